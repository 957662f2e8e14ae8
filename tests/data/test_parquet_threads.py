"""Reading parquet leaves no threads behind: one that needs the interpreter while it ends would abort the process."""

import subprocess
import sys
from pathlib import Path

import pytest

pyarrow = pytest.importorskip("pyarrow")

SCRIPT = """
import os, sys
from pathlib import Path
import pyarrow.parquet, pyarrow.dataset
from trimtab.data.bad_rows import BadRows
from trimtab.data.files import read_file

before = len(os.listdir("/proc/self/task"))
rows = read_file(Path(sys.argv[1]), BadRows("stop"))
assert len(rows) == 20_000
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_no_thread_is_left_behind(tmp_path):
    from pyarrow import parquet

    columns = {name: [f"text {number}" for number in range(20_000)] for name in "abcd"}
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet", row_group_size=1000)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "rows.parquet")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(found.stdout) == 0
