"""Memory figures are real ones, and freed memory stays with the process once that was asked for."""

import platform
import subprocess
import sys

import pytest

from trimtab.hardware.inventory import find_device, native_precision, take_inventory


def test_memory_follows_what_is_held():
    """In a process of its own: one that has freed memory before may take it from there."""
    code = """
import torch
from trimtab.hardware.memory import memory_in_use, peak_memory
cpu = torch.device("cpu")
before = memory_in_use(cpu)
held = torch.ones(64 * 2**20 // 4)
print(memory_in_use(cpu) - before, peak_memory(cpu) - memory_in_use(cpu))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, below_peak = map(int, run.stdout.split())
    assert 50 * 2**20 < grown < 100 * 2**20
    assert below_peak > -(2**20)


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
