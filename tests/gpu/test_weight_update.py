"""Weights that are updated in backward or on the host, on a GPU: streams, pinned memory, peaks against predictions."""

import json

import pytest
import torch

from trimtab.model.half_weights import round_weights
from trimtab.optim import host_update, offloaded_state
from trimtab.optim.build import build_optimizer
from trimtab.optim.host_update import build_on_host, master_of
from trimtab.optim.in_backward import update_in_backward, updates_of
from trimtab.optim.offloaded_state import offload_state
from trimtab.optim.quantized import sync_host_state
from trimtab.optim.streamed_update import build_streamed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda:0")
MIB = 2**20


def layers(width=1024, num_layers=8):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(num_layers))).to(CUDA)


def groups_of(model):
    return [{"params": list(model.parameters()), "weight_decay": 0.1}]


def build(groups, device):
    return build_optimizer("adamw", groups, lr=1e-3, device=device)


def batches(num=2, width=1024):
    return [torch.randn(64, width, device=CUDA, generator=torch.Generator(CUDA).manual_seed(n)) for n in range(num)]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_in_backward_equals_a_step_after_it(optimizer):
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    weights = []
    for in_backward in (True, False):
        model = layers()
        made = build_optimizer(optimizer, groups_of(model), lr=1e-3, device=CUDA)
        if in_backward:
            update_in_backward(model, made)
        for rows in batches(3):
            updates_of(model).begin_window(1)
            model(rows).square().mean().backward()
            assert all((p.grad is None) is in_backward for p in model.parameters())
            made.step()
            made.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "adagrad", "adamw8bit"])
def test_state_on_the_host_gives_the_same_bits(monkeypatch, optimizer, in_backward):
    """With many small slices and few buffers; many times, because races are rare."""
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(offloaded_state, "SLOT_BYTES", 2**19)
    monkeypatch.setattr(offloaded_state, "NUM_SLOTS", 3)

    def plain(groups, device):
        return build_optimizer(optimizer, groups, lr=1e-3, device=device)

    weights, states = [], []
    for offloads in (True, False):
        model = layers()
        groups = groups_of(model)
        made = offload_state(plain, groups, CUDA) if offloads else plain(groups, CUDA)
        if in_backward:
            update_in_backward(model, made)
        for rows in batches(3) * 10:
            updates_of(model).begin_window(1)
            model(rows).square().mean().backward()
            made.step()
            made.zero_grad()
        sync_host_state(made)
        large = [p for p in model.parameters() if p.dim() > 1]
        for value in (value for p in large for value in made.state[p].values() if torch.is_tensor(value)):
            assert not value.dim() or value.is_cuda is not offloads
            assert not value.dim() or not offloads or value.is_pinned()
        weights.append([p.detach().clone() for p in model.parameters()])
        states.append([v.cpu() for p in large for v in made.state[p].values() if torch.is_tensor(v)])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_streamed_updates_equal_those_on_the_device(monkeypatch, optimizer, num_micro_batches):
    """With many small slices and few buffers; many times, because races are rare. Nothing is clipped."""
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(offloaded_state, "SLOT_BYTES", 2**18)
    monkeypatch.setattr(offloaded_state, "NUM_SLOTS", 3)

    def plain(groups, device):
        return build_optimizer(optimizer, groups, lr=1e-3, device=device)

    weights = []
    for streams in (True, False):
        model = layers()
        groups = groups_of(model)
        made = build_streamed(plain, groups, CUDA, model) if streams else plain(groups, CUDA)
        for _ in range(20):
            updates_of(model).begin_window(num_micro_batches)
            for rows in batches(num_micro_batches):
                model(rows).square().mean().backward()
            assert all((p.grad is None) is streams for p in model.parameters())
            made.step()
            made.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


def test_streamed_gradients_are_clipped_on_the_device():
    model, other = layers(), layers()
    optimizer, reference = build_streamed(build, groups_of(model), CUDA, model), build(groups_of(other), CUDA)
    for rows in batches(4):
        updates_of(model).begin_window(1, 0.01)
        for one in (model, other):
            one(rows).square().mean().backward()
        norm = updates_of(model).clip(0.01)
        assert norm.is_cuda
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(other.parameters(), 0.01))
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("most", "size"), [(2**28, 2**24), (0, 2**16)])
def test_sums_of_gradients_on_the_host_are_those_of_the_device(monkeypatch, most, size):
    """Also if the device waits for every copy, and with many slices; many times, because races are rare."""
    monkeypatch.setattr(host_update, "MOST_IN_FLIGHT", most)
    monkeypatch.setattr(host_update, "SLICE", size)
    model, other = layers(), layers()
    optimizer = build_on_host(build, groups_of(model))
    assert all(master_of(p).is_pinned() for p in model.parameters())
    for _ in range(20):
        for rows in batches(3):
            for one in (model, other):
                one(rows).square().mean().backward()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert ours.grad is None
            assert torch.equal(master_of(ours).grad, theirs.grad.cpu())
        optimizer.step()
        optimizer.zero_grad()
        other.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(ours.cpu(), master_of(ours))
                theirs.copy_(ours)


def test_rounded_weights_get_the_gradients_of_autocast():
    model, other = layers(), layers()
    round_weights(model.parameters(), torch.bfloat16)
    optimizer = build_on_host(build, groups_of(model))
    for rows in batches(2):
        for one in (model, other):
            with torch.autocast("cuda", torch.bfloat16):
                loss = one(rows).float().square().mean()
            loss.backward()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(master_of(ours).grad, theirs.grad.cpu())
    optimizer.step()
    assert all(torch.equal(p.cpu(), master_of(p).bfloat16()) for p in model.parameters())


def test_no_memory_of_the_device_is_left_after_backward():
    model = layers()
    optimizer = build_on_host(build, groups_of(model))
    for rows in batches(2):
        model(rows).square().mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for rows in batches(2):
        model(rows).square().mean().backward()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + MIB


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize(
    ("update", "precision", "rows", "train"),
    [
        ("in-backward, state on the host", "bf16", 4, {"max_grad_norm": None}),
        ("in-backward, state on the host", "bf16-pure", 4, {"max_grad_norm": None, "optimizer": "adamw8bit"}),
        ("device, state on the host", "bf16", 2, {}),
        ("in-backward", "bf16", 4, {"max_grad_norm": None}),
        ("in-backward", "bf16-pure", 4, {"max_grad_norm": None}),
        ("streamed", "bf16", 4, {}),
        ("streamed", "bf16", 2, {}),  # two micro-batches
        ("streamed", "bf16-pure", 4, {"optimizer": "adamw8bit"}),
        ("host", "bf16", 4, {}),
        ("host", "bf16", 2, {}),  # two micro-batches
        ("host", "bf16-pure", 4, {}),
    ],
)
def test_the_peak_is_the_predicted_one(tmp_path, fresh_peaks, update, precision, rows, train, recompute):
    name, _, state = update.partition(", ")
    where = {"update": name, "offload_state": "host" if state else "none"}
    text = " ".join(str(number) for number in range(400))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} {text}"}) + "\n" for number in range(16)))
    recipe = {
        "model": {"config": LLAMA, "tokenizer": "train"},
        "task": "causal-lm",
        "data": {"train": str(path), "eval_share": 0, "max_length": 256},
        "train": {"max_steps": 3, "batch_size": 4, "precision": precision, "compile": "off", **train},
        "memory": {"budget": "auto", **where, "gradient_checkpointing": recompute, "kernels": "plain"},
        "checkpoint": {"every": None},
        "track": "none",
        "out": str(tmp_path / "run"),
    }
    if rows < 4:
        recipe["memory"]["micro_batch"] = rows
    predicted, measured = fresh_peaks(recipe)
    print(f"{update} {precision} {rows} {recompute}: {predicted / MIB:.1f} MiB, measured {measured / MIB:.1f}")  # noqa: T201
    assert predicted == pytest.approx(measured, rel=0.02)
