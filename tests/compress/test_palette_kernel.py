"""The kernel that multiplies from packed indices, in Triton's interpreter, which needs no GPU.

Triton decides at its import whether it interprets, so the tests run in a subprocess with TRITON_INTERPRET=1.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from trimtab.compress.clustering import ClusterSettings, cluster_weight

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="needs Triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(IS_INTERPRETED, reason="starts the other")
def test_the_kernel_in_the_interpreter():
    options = ("-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the subprocess of the first test")
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("scale_block", [0, 16])
def test_equal_to_the_product_with_the_decoded_weight(bits, scale_block):
    from trimtab.compress import palette_kernel

    torch.manual_seed(0)
    weight = cluster_weight(torch.randn(37, 101), ClusterSettings(bits=bits, rows=5, scale_block=scale_block))
    x = torch.randn(3, 101)
    decoded = weight.decoded(torch.float64)
    bound = 101 * torch.finfo(torch.float32).eps * (x.double().abs() @ decoded.abs().T)
    difference = palette_kernel.multiply(x, weight).double() - x.double() @ decoded.T
    assert bool((difference.abs() <= bound).all())
