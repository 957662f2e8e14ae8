"""Memory in use, budgets and allocator settings."""

import platform
import subprocess
import sys

import pytest
import torch

from trimtab import Engine, Recipe
from trimtab.build.engine import build_engine
from trimtab.errors import DoesNotFit, RecipeError
from trimtab.hardware import memory
from trimtab.hardware.inventory import describe_slow_precision, find_device, native_precision, take_inventory
from trimtab.planner.target import target_here


@pytest.mark.slow
def test_memory_in_use_follows_allocations():
    """In a subprocess: this process may reuse memory that it freed before."""
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


@pytest.mark.slow
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
    assert int(before) >= 5 * 64 / 2, "a fault for each page, of 2 MiB at most"
    assert (int(after) < int(before) / 10) is done


def test_the_inventory_of_a_cpu():
    inventory = take_inventory("cpu")
    assert inventory.memory_bytes > 2**28
    assert inventory.num_cpus >= 1


@pytest.mark.parametrize(
    ("avx512", "amx", "auto"), [(False, False, "fp32"), (True, False, "bf16"), (False, True, "bf16")]
)
def test_auto_on_a_cpu_is_bf16_where_it_is_native(avx512, amx, auto, monkeypatch):
    monkeypatch.delenv("TRIMTAB_CPU_PRECISION")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    cpu = find_device("cpu")
    assert native_precision(cpu) == auto == target_here("cpu").precision("auto")
    assert Engine(mixed_precision="auto", device="cpu").mixed_precision == auto.replace("fp32", "no")
    assert build_engine(Recipe(model="m", data={"train": "d"}), "cpu").mixed_precision == auto.replace("fp32", "no")
    assert f"emulated on this CPU: correct, but many times slower than {auto}" in describe_slow_precision("fp16", cpu)
    assert (describe_slow_precision("bf16-pure", cpu) is None) is (auto == "bf16")
    assert describe_slow_precision("fp32", cpu) is describe_slow_precision("no", cpu) is None
    monkeypatch.setenv("TRIMTAB_CPU_PRECISION", "fp32")
    assert native_precision(cpu) == "fp32"
    monkeypatch.setenv("TRIMTAB_CPU_PRECISION", "fp16")
    with pytest.raises(RecipeError, match="TRIMTAB_CPU_PRECISION is 'fp16'"):
        native_precision(cpu)


def test_a_slow_precision_is_reported_once(monkeypatch, caplog):
    caplog.set_level("INFO", logger="trimtab")
    monkeypatch.setattr("trimtab.log._logged_once", set())
    for _ in range(2):
        Engine(mixed_precision="fp16", device="cpu")
    assert caplog.messages == [describe_slow_precision("fp16", torch.device("cpu"))]


GIB = 2**30


class Gpu:
    """A GPU of 16 GiB with 1.5 GiB in use, of which the allocator knows 1 GiB."""

    def __init__(self, monkeypatch, outside=GIB // 2):
        self.fractions = []
        monkeypatch.setattr(torch, "get_device_module", lambda device: self)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: self.fractions.append(given))
        monkeypatch.setattr(memory, "_capped", set())
        self._outside = outside

    def mem_get_info(self, device):
        return 15 * GIB - self._outside, 16 * GIB

    def memory_reserved(self, device):
        return GIB


CUDA = torch.device("cuda", 0)


def test_the_cap_subtracts_memory_outside_of_the_allocator(monkeypatch):
    gpu = Gpu(monkeypatch)
    assert memory.non_allocator_memory(CUDA) == GIB // 2
    memory.cap_memory(CUDA, None)
    assert gpu.fractions == [], "a cap that the user has set stays"
    cap = memory.cap_memory(CUDA, memory.resolve_budget("8GiB", CUDA), memory.non_allocator_memory(CUDA))
    assert gpu.fractions == [(7.5 / 16, CUDA)]
    assert cap.budget_bytes == 8 * GIB
    assert cap.share(2 * GIB) == 0.25
    memory.cap_memory(CUDA, None)
    assert gpu.fractions[1:] == [(1.0, CUDA)], "the cap of a run ends with the next one"


def test_memory_of_other_processes_is_not_part_of_a_budget(monkeypatch):
    Gpu(monkeypatch, outside=5 * GIB)
    assert memory.non_allocator_memory(CUDA) == GIB


def test_auto_is_the_free_memory(monkeypatch):
    gpu = Gpu(monkeypatch)
    budget = memory.resolve_budget("auto", CUDA)
    assert budget == 16 * GIB
    memory.cap_memory(CUDA, budget, memory.non_allocator_memory(CUDA))
    assert gpu.fractions == [(15.5 / 16, CUDA)]
    assert memory.resolve_budget(None, CUDA) is None


def test_impossible_budgets(monkeypatch):
    Gpu(monkeypatch)
    with pytest.raises(RecipeError, match="memory.budget is 24.0 GiB, but cuda:0 has 16.0 GiB") as caught:
        memory.cap_memory(CUDA, 24 * GIB)
    assert caught.value.cure == "set memory.budget: auto for the free memory, or at most 16GiB"
    with pytest.raises(DoesNotFit, match="the CUDA context of cuda:0 alone takes 512.0 MiB"):
        memory.cap_memory(CUDA, GIB // 4, GIB // 2)


def test_a_budget_of_the_cpu():
    cpu = torch.device("cpu")
    auto, total = memory.resolve_budget("auto", cpu), memory.total_memory(cpu)
    assert memory.memory_in_use(cpu) < auto <= 1.1 * total
    with pytest.raises(RecipeError, match="but cpu has"):
        memory.resolve_budget("900TiB", cpu)
    assert memory.MemoryCap(cpu).share(5) is None


def test_an_exceeded_budget_is_reported_once(caplog):
    cap = memory.MemoryCap(torch.device("cpu"), 100)
    with caplog.at_level("INFO", "trimtab"):
        assert [cap.share(in_use) for in_use in (50, 200, 300)] == [0.5, 2.0, 3.0]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …"), "2.50 GiB more"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 800 bytes. Error code 12"),
         "800 bytes more"),
        (MemoryError(), ""),
    ],
)  # fmt: skip
def test_the_size_of_a_failed_allocation(error, words):
    assert memory.is_out_of_memory(error)
    assert memory.describe_failed_allocation(error) == words


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_unless_the_user_says_otherwise(monkeypatch, name):
    set_to = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", set_to.append)
    monkeypatch.setattr(sys, "platform", "linux")
    assert memory.prefer_expandable_segments()
    assert set_to == ["expandable_segments:True"]
    monkeypatch.setenv(name, "max_split_size_mb:512")
    assert not memory.prefer_expandable_segments()
    assert len(set_to) == 1


@pytest.mark.parametrize(
    ("platform", "cuda", "environment", "has"),
    [
        ("linux", "13.0", {}, True),
        ("linux", None, {}, False),  # ROCm
        ("win32", "13.0", {}, False),
        ("linux", "13.0", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, False),
        ("linux", "13.0", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
        ("linux", "13.0", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512, expandable_segments:True"}, True),
        ("linux", None, {"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}, False),
    ],
)
def test_whether_a_run_has_expandable_segments(monkeypatch, platform, cuda, environment, has):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: None)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")
    monkeypatch.setattr(sys, "platform", platform)
    for name in memory._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert memory.has_expandable_segments() is has


def test_settings_made_at_run_time_count(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "expandable_segments:False")
    assert not memory.has_expandable_segments()


# ---------------------------------------------------------------------- containers


def group(root, files):
    root.mkdir(parents=True)
    for name, text in files.items():
        (root / name).write_text(text)


def test_a_container_may_have_less(tmp_path):
    """Limits of both kinds of control groups; a group without one does not count."""
    v2 = {"memory.max": "1000\n", "memory.current": "600\n", "memory.stat": "anon 1\ninactive_file 50\n"}
    group(tmp_path / "v2", v2)
    (tmp_path / "v2.own").write_text("0::/\n")
    assert memory.free_in_cgroups(tmp_path / "v2", tmp_path / "v2.own") == [450]
    group(tmp_path / "deep" / "user" / "job", v2)
    (tmp_path / "deep.own").write_text("0::/user/job\n")
    assert memory.free_in_cgroups(tmp_path / "deep", tmp_path / "deep.own") == [450]
    group(tmp_path / "free", v2 | {"memory.max": "max\n"})
    assert memory.free_in_cgroups(tmp_path / "free", tmp_path / "v2.own") == []
    group(tmp_path / "full", v2 | {"memory.current": "5000\n"})
    assert memory.free_in_cgroups(tmp_path / "full", tmp_path / "v2.own") == [0]
    v1 = {"memory.limit_in_bytes": "900", "memory.usage_in_bytes": "300", "memory.stat": "total_inactive_file 7\n"}
    group(tmp_path / "v1" / "memory" / "docker", v1)
    (tmp_path / "v1.own").write_text("5:cpu:/docker\n4:memory:/docker\n0::/\n")
    assert memory.free_in_cgroups(tmp_path / "v1", tmp_path / "v1.own") == [607]
    assert memory.free_in_cgroups(tmp_path, tmp_path / "missing") == []


def test_page_cache_of_a_container_is_free_memory(tmp_path, monkeypatch):
    """Files that were read, such as those of a model, count as used there until the kernel needs their memory."""
    group(tmp_path / "group", {"memory.max": "10000", "memory.current": "9000", "memory.stat": "inactive_file 8000\n"})
    (tmp_path / "own").write_text("0::/\n")
    found = memory.free_in_cgroups(tmp_path / "group", tmp_path / "own")
    monkeypatch.setattr(memory, "free_in_cgroups", lambda: found)
    monkeypatch.setattr(memory, "memory_in_use", lambda _: 500)
    assert memory.free_host_memory() == 9500
