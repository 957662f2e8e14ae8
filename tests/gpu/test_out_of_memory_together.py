"""Two processes on one GPU, one of which the allocator refuses memory in the middle of a run: both go on smaller.

NCCL does not let two processes share a device, so gloo exchanges the gradients here.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
HERE = Path(__file__).parent


def test_both_take_the_step_back(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    search = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    common = os.environ | {"PYTHONPATH": search, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TRIMTAB_CACHE": "off"}
    files = [(tmp_path / f"said-{rank}").open("w+") for rank in range(2)]
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "runs_out_together.py"), str(tmp_path)],
            env=common | {"RANK": str(rank)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        for rank, file in enumerate(files)
    ]
    try:
        codes = [process.wait(200) for process in started]
    finally:
        for process in started:
            process.kill()
    said = "\n".join(Path(file.name).read_text()[-4000:] for file in files)
    for file in files:
        file.close()
    assert codes == [0, 0], said
    print(said)
