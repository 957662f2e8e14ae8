"""Lifetimes from the allocator's own history: parts add up where the profiler misses releases."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from trimtab.report import anatomy as anatomies
from trimtab.report.allocator_history import History, blocks_in_use, with_lifetimes
from trimtab.report.anatomy import MemoryWatch
from trimtab.report.failed_step import record_of_blocks
from trimtab.report.profiled_blocks import Block, Profile, read_profile
from trimtab.report.step_record import ALLOCATED

CPU = torch.device("cpu")
ROWS, NARROW, WIDE = 256, 32, 512


def round_up(size):
    return -(-size // 512) * 512


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(NARROW, NARROW) for _ in range(3)])
        self.head = torch.nn.Linear(NARROW, WIDE)

    def get_output_embeddings(self):
        return self.head

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@pytest.fixture(scope="module")
def recorded():
    """A step that torch's profiler recorded on the CPU, where it misses nothing, and the blocks from before."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        functional.cross_entropy(model(torch.ones(ROWS, NARROW)), torch.ones(ROWS, dtype=torch.int64)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    watch = MemoryWatch(model, optimizer, CPU, names_modules=True)
    found = {}

    def keep(events, known, device, vocab_size):
        found.update(events=list(events), known=dict(known))
        return read_profile(events, known, device, vocab_size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anatomies, "read_profile", keep)
        watch.start()
        step()
        found["anatomy"] = watch.stop()
    return SimpleNamespace(**found)


def copied(blocks):
    return {
        address: Block(b.size, -1, b.part, b.exact_size, name=b.name, address=address) for address, b in blocks.items()
    }


def history_of(events, known):
    """What CUDA's allocator would have recorded: every allocation and release, in order."""
    waiting, moves = list(events), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if hasattr(event.extra_fields, "alloc_size"):
            moves.append(event)
    entries, living = [], set(known)
    for event in sorted(moves, key=lambda event: event.start_time_ns):
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if address in living and size > 0:  # a block from before the record, whose release the CPU does not report
            entries.append({"action": "free_requested", "addr": address, "size": 0, "time_us": 0})
        if size > 0:
            living.add(address)
        elif address not in living:
            continue
        else:
            living.discard(address)
        action = "alloc" if size > 0 else "free_requested"
        times = {"time_us": event.start_time_ns // 1000}
        entries.append({"action": action, "addr": address, "size": abs(size), **times})
        if size < 0:
            entries.append({"action": "free_completed", "addr": address, "size": abs(size), **times})
    return History({address: round_up(block.size) for address, block in known.items()}, entries, {})


def peak_of(history):
    """The most that was in use, from the history alone."""
    living = dict(history.before)
    peak = in_use = sum(living.values())
    for entry in history.entries:
        if entry["action"] == "alloc":
            living[entry["addr"]] = round_up(entry["size"])
            in_use += living[entry["addr"]]
        elif entry["action"] == "free_requested":
            in_use -= living.pop(entry["addr"])
        peak = max(peak, in_use)
    return peak


def without(profile_events, share):
    """The same events without a share of the releases, as the profiler reports them on CUDA."""
    draw = random.Random(0)

    def kept(event):
        children = [kept(child) for child in event.children if not missed(child)]
        return Fake(event, children)

    def missed(event):
        size = getattr(event.extra_fields, "alloc_size", 0)
        return size < 0 and draw.random() < share

    return [kept(event) for event in profile_events if not missed(event)]


class Fake:
    """An event with other children, which know it as their parent."""

    def __init__(self, event, children):
        self.name, self.extra_fields = event.name, event.extra_fields
        self.start_time_ns, self.children, self.parent = event.start_time_ns, children, None
        for child in children:
            child.parent = self


def dissected(profile, history, known):
    watch = MemoryWatch(torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), CPU)
    if history is not None:
        profile = with_lifetimes(profile, history, known)
    anatomies._assign_parts(profile)
    return watch._dissect(profile), watch._record(profile)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_parts_add_up_whatever_the_profiler_misses(recorded, share):
    history = history_of(recorded.events, recorded.known)
    events = without(recorded.events, share)
    profile = read_profile(events, copied(recorded.known), CPU, WIDE)
    anatomy, record = dissected(profile, history, copied(recorded.known))
    parts = [size for size in anatomy.parts().values() if size is not None]
    assert min(parts) >= 0
    assert sum(parts) == anatomy.allocated == record.peak().num_bytes == peak_of(history)
    assert anatomy.weights == recorded.anatomy.weights
    assert anatomy.optimizer_state == recorded.anatomy.optimizer_state
    assert anatomy.logits_and_loss == pytest.approx(recorded.anatomy.logits_and_loss, abs=4 * 512)
    assert [stage for stage, _ in record.stages] == ["forward", "backward", "optimizer"]
    for moment in record.moments():
        assert min(moment.parts.values()) >= 0


def test_without_the_history_blocks_would_seem_to_live_longer(recorded):
    """What made temporaries negative: the blocks that were not released exceed what was in use."""
    profile = read_profile(without(recorded.events, 1.0), copied(recorded.known), CPU, WIDE)
    anatomy, _ = dissected(profile, None, {})
    assert anatomy.allocated > 1.1 * recorded.anatomy.allocated


def test_allocations_that_the_profiler_missed_are_there(recorded):
    history = history_of(recorded.events, recorded.known)
    anatomy, record = dissected(Profile(), history, copied(recorded.known))
    assert anatomy.allocated == record.peak().num_bytes == peak_of(history)
    assert anatomy.temporaries > 0


def test_blocks_are_named_by_module(recorded):
    history = history_of(recorded.events, recorded.known)
    profile = read_profile(recorded.events, copied(recorded.known), CPU, WIDE)
    _, record = dissected(profile, history, copied(recorded.known))
    names = {(one.part, one.name) for one in record.allocations}
    assert {("weights", "head.weight"), ("optimizer state", "head.weight"), ("gradients", "head.weight")} <= names
    assert ("logits and loss", "head") in names
    assert ("temporaries", "layers.1") in names, "in backward, too"
    assert {part for part, _ in names} <= set(ALLOCATED)


def test_blocks_in_use_of_one_device():
    used, free = {"size": 512, "state": "active_allocated"}, {"size": 1024, "state": "inactive"}
    snapshot = {
        "segments": [
            {"device": 0, "address": 10_000, "blocks": [used, free, {**used, "size": 2048}]},
            {"device": 1, "address": 90_000, "blocks": [used]},
        ]
    }
    assert blocks_in_use(snapshot, 0) == {10_000: 512, 11_536: 2048}


def test_an_address_that_is_used_again_is_another_block():
    entries = [
        {"action": "alloc", "addr": 1, "size": 512, "time_us": 1},
        {"action": "free_requested", "addr": 1, "size": 512, "time_us": 2},
        {"action": "free_completed", "addr": 1, "size": 512, "time_us": 2},
        {"action": "alloc", "addr": 1, "size": 1000, "time_us": 30},
    ]
    seen = Profile([Block(1024, 0, op="the second", address=1)], times_ns=[29_000])
    found = with_lifetimes(seen, History({}, entries, {}), {})
    assert [(block.size, block.op, block.died) for block in found.blocks] == [
        (512, "", 1),
        (1024, "the second", float("inf")),
    ]


def test_a_moment_has_named_and_other_blocks():
    named = {1: Block(512, -1, "weights", 512, name="head.weight")}
    record = record_of_blocks({1: 512, 2: 4096}, named, "cuda:0", 8192)
    assert record.peak().parts["weights"] == 512
    assert record.peak().parts["activations"] == 4096
    assert record.beyond == {"allocator slack": 8192 - 4608}
