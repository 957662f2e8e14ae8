"""Known devices are found under the names that people and torch use; a measurement has the right units."""

from dataclasses import replace

import pytest
import torch

from trimtab.errors import RecipeError
from trimtab.hardware.catalog import CATALOG, GIB, find, identify_device, measure_device
from trimtab.hardware.inventory import take_inventory

GPUS = [device for device in CATALOG.values() if device.name != "cpu"]


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_rows_are_plausible(device):
    """A slipped digit or a swapped column is far outside of these."""
    assert CATALOG[device.name] is device
    assert 5 * GIB < device.memory_bytes < 200 * GIB
    assert 250e9 < device.bandwidth < 6e12
    assert 5e12 < device.fp32 < 200e12
    assert device.fp32 <= (device.tf32 or device.fp32) <= device.fp16 < 1400e12
    assert 9 < device.fp32 / device.bandwidth < 120
    assert device.capability is not None
    is_ampere = device.capability >= (8, 0)
    assert device.native_bf16 is device.flash is (device.bf16 is not None) is (device.tf32 is not None) is is_ampere
    assert device.bf16 in (None, device.fp16)


def test_older_cards_have_no_bf16_and_no_flash():
    assert {device.name for device in GPUS if not device.native_bf16} == {
        *("p100", "v100", "v100-32gb", "t4", "rtx-2060", "rtx-2070", "rtx-2080", "rtx-2080-ti")
    }


def test_rates_of_unsupported_dtypes():
    t4 = CATALOG["t4"]
    assert t4.rate("tf32") == t4.rate("fp32") == t4.fp32
    assert t4.rate("bf16") == pytest.approx(t4.rate("fp16") / 10)
    h200 = CATALOG["h200"]
    assert h200.rate("fp32") < h200.rate("tf32") < h200.rate("bf16") == h200.rate("fp16")
    assert h200.rate("fp8") == 2 * h200.rate("bf16")
    with pytest.raises(KeyError):
        h200.rate("int4")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        *((short, short) for short in CATALOG),
        ("T4", "t4"),
        ("RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("4060ti", "rtx-4060-ti"),
        ("RTX 4060 Ti 16GB", "rtx-4060-ti"),
        ("GeForce RTX 3060 12GB", "rtx-3060"),
        ("a100-80gb", "a100"),
        ("a100 40g", "a100-40gb"),
        ("V100-16GB", "v100"),
        ("v100_32gb", "v100-32gb"),
        ("nvidia-h100", "h100"),
        ("h100-sxm", "h100"),
        ("H100 SXM5 80GB", "h100"),
        ("h100-pcie-80gb", "h100-pcie"),
        ("A6000", "rtx-a6000"),
        ("AMD MI300X", "mi300x"),
        ("CPU", "cpu"),
    ],
)
def test_names_as_people_type_them(name, short):
    assert find(name) is CATALOG[short]


@pytest.mark.parametrize(
    ("name", "offered", "not_offered"), [("rtx-4095", "rtx-4090", "t4"), ("a1000", "a100", "cpu"), ("t40", "t4", "cpu")]
)
def test_unknown_names_are_refused_with_similar_ones(name, offered, not_offered):
    with pytest.raises(RecipeError, match=f"unknown device '{name}'") as error:
        find(name)
    names = error.value.cure.removeprefix("use one of ").split(", ")
    assert offered in names
    assert not_offered not in names


def test_nothing_close_lists_every_name():
    with pytest.raises(RecipeError) as error:
        find("banana")
    assert error.value.cure == "use one of " + ", ".join(CATALOG)


def inventory_of(name, gib):
    found = take_inventory("cpu")
    return replace(found, device="cuda:0", name=name, memory_bytes=int(gib * GIB), capability=(8, 0))


@pytest.mark.parametrize(
    ("name", "gib", "short"),
    [
        ("Tesla T4", 14.56, "t4"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx-4090"),
        ("NVIDIA GeForce RTX 2080 Ti", 10.8, "rtx-2080-ti"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100"),
        ("NVIDIA A100 80GB PCIe", 79.1, "a100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40gb"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32gb"),
        ("Tesla P100-PCIE-16GB", 15.9, "p100"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H100 PCIe", 79.1, "h100-pcie"),
        ("NVIDIA A10G", 22.0, "a10g"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA RTX A6000", 47.5, "rtx-a6000"),
        ("AMD Instinct MI300X", 191.7, "mi300x"),
    ],
)
def test_names_as_torch_gives_them(name, gib, short):
    found = identify_device(inventory_of(name, gib))
    assert found is not None
    assert found == replace(CATALOG[short], memory_bytes=int(gib * GIB))


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7),
        ("NVIDIA GeForce RTX 4070 SUPER", 11.7),
        ("NVIDIA GeForce RTX 4060 Ti", 7.6),
        ("NVIDIA GeForce RTX 3080", 11.8),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.5),
        ("NVIDIA H100 NVL", 93.1),
        ("Quadro K620", 2.0),
    ],
)
def test_cards_that_only_look_alike_are_unknown(name, gib):
    assert identify_device(inventory_of(name, gib)) is None


def test_a_cpu_is_identified_with_its_own_memory():
    inventory = take_inventory("cpu")
    assert identify_device(inventory) == replace(CATALOG["cpu"], memory_bytes=inventory.memory_bytes)


def test_measuring_a_cpu_gives_figures_in_the_right_units():
    """From one busy core without vector instructions to a server of hundreds."""
    cpu = measure_device("cpu")
    assert (cpu.name, cpu.is_cpu, cpu.is_measured, cpu.capability) == ("cpu", True, True, None)
    assert 1e7 < cpu.fp32 < 1e15
    assert 1e7 < cpu.bandwidth < 1e14
    assert 1e-8 < cpu.host_op_s < 0.1
    assert cpu.tf32 is None
    assert 1e5 < cpu.rate("bf16") < 1e16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_measuring_a_gpu():
    before = torch.backends.cuda.matmul.fp32_precision
    found = measure_device("cuda")
    assert torch.backends.cuda.matmul.fp32_precision == before
    known = identify_device(take_inventory("cuda"))
    if known is None:
        pytest.skip(f"no row for {found.name}")
    for measured, sheet in ((found.fp32, known.fp32), (found.fp16, known.fp16), (found.bandwidth, known.bandwidth)):
        assert 0.3 * sheet < measured < 1.1 * sheet
    assert (found.tf32 is None) == (known.tf32 is None)
    assert 5e-7 < found.host_op_s < 1e-4
