"""Memory figures are real ones, and freed memory stays with the process once that was asked for."""

import platform
import subprocess
import sys

import pytest
import torch

from trimtab.hardware.inventory import find_device, native_precision, take_inventory
from trimtab.hardware.memory import memory_in_use, peak_memory

CPU = torch.device("cpu")


def test_memory_follows_what_is_held():
    before = memory_in_use(CPU)
    held = torch.ones(64 * 2**20 // 4)
    assert memory_in_use(CPU) - before > 50 * 2**20
    assert peak_memory(CPU) >= memory_in_use(CPU) - 2**20
    del held


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
@pytest.mark.parametrize(("setting", "done"), [({}, True), ({"MALLOC_ARENA_MAX": "4"}, False)])
def test_freed_memory_is_kept_and_not_faulted_in_again(setting, done):
    """Counts the page faults of tensors above 32 MiB, which glibc by itself maps anew each time."""
    code = """
import resource, torch
from trimtab.hardware.memory import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5): torch.ones(64 * 2**20 // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
first = faults(); done = keep_freed_memory()
for _ in range(6): last = faults()  # the heap grows for a while before everything fits into it
print(done, first, last)
"""
    env = {"PATH": "/usr/bin:/bin", **setting}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    told, before, after = run.stdout.split()
    assert told == str(done)
    assert int(before) > 10 * 1000
    assert (int(after) < int(before) / 10) is done


def test_the_inventory_of_a_cpu():
    inventory = take_inventory("cpu")
    assert inventory.memory_bytes > 2**28
    assert inventory.num_cpus >= 1
    assert native_precision(find_device("cpu")) == "fp32"
