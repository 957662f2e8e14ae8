"""Trial steps of several processes: what one of them has no memory for, none of them chooses."""

import json

import probed_runs
import pytest
from launching import run_together

from tiny_runs import reviews, write_csv
from trimtab.hardware.resident_peak import can_measure_resident_peak


@pytest.mark.slow
@pytest.mark.skipif(not can_measure_resident_peak(), reason="steps cannot be measured here")
def test_processes_choose_alike(fork_server, tiny, tmp_path):
    write_csv(tmp_path / "reviews.csv", reviews(64))
    (tmp_path / "model.txt").write_text(tiny.folder("bert"))
    run_together(fork_server, probed_runs, tmp_path, 2)
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["chosen"] == 4, "eight rows fit in the first process only"
    assert first["total"] == (100 + 4 * 40) * probed_runs.MIB
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["origin"] == "measured"
