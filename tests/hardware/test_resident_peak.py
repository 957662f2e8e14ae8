"""The peak of resident memory counts from where it was reset, and what was freed before does not count."""

import pytest
import torch

from trimtab.hardware.memory import memory_in_use
from trimtab.hardware.resident_peak import can_measure_resident_peak, reset_resident_peak, resident_peak

MIB = 2**20
pytestmark = pytest.mark.skipif(not can_measure_resident_peak(), reason="Linux counts the peak of a part of the work")


def peak_of(num_bytes):
    reset_resident_peak()
    before = memory_in_use(torch.device("cpu"))
    torch.ones(num_bytes, dtype=torch.uint8)  # freed at once: only the peak sees it
    return resident_peak() - before


def test_a_smaller_peak_after_a_larger_one():
    large, small = peak_of(256 * MIB), peak_of(64 * MIB)
    assert large == pytest.approx(256 * MIB, rel=0.1)
    assert small == pytest.approx(64 * MIB, rel=0.2)
