"""Streamed weights on a GPU: the bits of the plain step, two blocks of memory, no syncs, peaks against predictions."""

import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpu.test_gradient_checkpointing import a_bert, a_llama, loss_of, rows, step
from tiny_runs import lines_of, reviews
from trimtab import Recipe, fit
from trimtab.hardware.extras import has_package
from trimtab.model import streamed_blocks
from trimtab.model.blocks import blocks_of
from trimtab.model.fp8 import is_supported
from trimtab.model.streamed_blocks import stream_blocks, streamable
from trimtab.optim.build import build_optimizer
from trimtab.optim.in_backward import update_in_backward, updates_of
from trimtab.optim.preallocation import preallocate_state
from trimtab.optim.streamed_state import stream_state
from trimtab.techniques.recomputation import checkpoint_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:cuDNN Attention defaults"),  # once in a process
]
CUDA = torch.device("cuda:0")
MIB = 2**20
RECOMPUTED = ["none", "all", {"every": 2}]


@pytest.fixture(autouse=True)
def _deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch):
    monkeypatch.setattr(streamed_blocks, "MIN_BYTES", 1024)


def streamed(model, *, trains=True):
    blocks = [block for _, block in blocks_of(model)]
    return stream_blocks(model, blocks, [streamable(block, trains=trains) for block in blocks], CUDA)


@pytest.mark.parametrize("which", RECOMPUTED, ids=str)
@pytest.mark.parametrize("make", [a_llama, a_bert])
def test_the_step_is_the_plain_one(make, which):
    model = make()
    plain = step(model, torch.bfloat16)
    found = streamed(model)
    checkpoint_layers(model, which)
    for _ in range(5):  # copies of a step may still run when the next one begins
        loss, gradient, generator = step(model, torch.bfloat16)
        assert torch.equal(loss, plain[0])
        assert torch.equal(gradient, plain[1])
        assert torch.equal(generator, plain[2])
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for unit in found.units for tensor in unit)


def test_wide_blocks_are_fetched_in_time():
    """Each copy takes as long as the computation of a block: what is used too early or overwritten too soon shows."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 16}
    model = a_llama(**sizes).requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    plain = step(model, torch.bfloat16)
    streamed(model, trains=False)
    for which in ("none", "all"):
        checkpoint_layers(model, which)
        for _ in range(10):
            found = step(model, torch.bfloat16)
            assert torch.equal(found[0], plain[0])
            assert torch.equal(found[1], plain[1])


@pytest.mark.parametrize("which", ["none", "all"])
def test_weights_of_two_blocks_are_on_the_device_and_the_host_does_not_wait(which):
    model = a_llama(num_hidden_layers=12).requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    per_block = sum(p.nbytes for p in blocks_of(model)[0][1].parameters() if p.nbytes >= 1024)
    gc.collect()  # models of earlier tests
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    streamed(model, trains=False)
    torch.cuda.synchronize()
    freed = before - torch.cuda.memory_allocated()
    assert freed == pytest.approx(10 * per_block, abs=0.9 * per_block)  # the allocator may give up to 1 MiB more
    checkpoint_layers(model, which)
    step(model, torch.bfloat16)
    batch = rows()
    num_rows, length = batch["input_ids"].shape
    # a mask that is made already: transformers looks for padding and packed rows otherwise, which waits for the device
    batch["attention_mask"] = torch.ones(length, length, dtype=torch.bool).tril().expand(num_rows, 1, -1, -1).cuda()
    loss_of(model, torch.bfloat16, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss_of(model, torch.bfloat16, batch).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("which", ["none", "all"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "sgd"])
def test_updates_in_backward_reach_host_memory(optimizer, which):
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    weights = []
    for streams in (True, False):
        model = a_llama(num_hidden_layers=6)
        found = streamed(model) if streams else None
        checkpoint_layers(model, which)
        made = build_optimizer(optimizer, [{"params": list(model.parameters())}], lr=1e-3, device=CUDA)
        update_in_backward(model, made)
        if found is not None:
            stream_state(model, found, made)
        preallocate_state(made, model.parameters())
        for _ in range(6):
            updates_of(model).begin_window(1)
            loss_of(model, torch.bfloat16).backward()
            assert all(p.grad is None for p in model.parameters())
            made.step()
            made.zero_grad()
        weights.append([p.detach().cpu().clone() for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


IN_BACKWARD = {"train": {"max_grad_norm": None}, "memory": {"update": "in-backward"}}
RUNS = {
    "lora": {"adapter": "lora", "memory": {"micro_batch": 2}},
    "qlora": {"adapter": "qlora", "memory": {"gradient_checkpointing": "all"}},
    "fp8": {"adapter": {"kind": "lora", "base": "fp8"}, "memory": {"gradient_checkpointing": "all"}},
    "side": {"adapter": "side"},
    "in backward": IN_BACKWARD,
    "host": {"memory": {"update": "host", "micro_batch": 2}},
}


@pytest.mark.parametrize("case", RUNS)
def test_runs_are_equal_to_the_bit(tiny, tmp_path, case):
    if case == "qlora":
        pytest.importorskip("bitsandbytes")
    if case == "fp8" and not is_supported(torch.cuda.get_device_capability()):
        pytest.skip("needs fp8 units")
    sections = RUNS[case]
    results = []
    for value in ("all", "none"):
        recipe = Recipe(
            model=tiny.folder("llama", num_hidden_layers=4, hidden_size=64, intermediate_size=128),
            task="causal-lm",
            data={"train": reviews(64), "eval": reviews(24, first=1000), "text": "text"},
            train={"max_steps": 6, "batch_size": 4, "lr": 1e-2, "log_every": 1, "deterministic": True, "compile": "off"}
            | sections.get("train", {}),
            memory={"stream_weights": value, "kernels": "plain", "gradient_checkpointing": "none"}
            | sections.get("memory", {}),
            adapter=sections.get("adapter", "none"),
            out=str(tmp_path / value),
            track="none",
        )
        result = fit(recipe, progress="quiet")
        losses = [line["loss"] for line in lines_of(result.folder) if "loss" in line]
        results.append((losses, load_file(next((Path(result.folder) / "best").glob("*.safetensors")))))
    (ours, weights), (theirs, expected) = results
    if case in ("qlora", "fp8"):
        # Streamed bases are quantized on the host, whose codes differ where a value lies between two of them. The loss
        # of the first step is nearly the same; from then on differences grow with the learning rate.
        assert ours[0] == pytest.approx(theirs[0], rel=1e-3)
        assert ours == pytest.approx(theirs, rel=2e-2)
        return
    assert ours == theirs
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("recompute", ["none", "all"])
@pytest.mark.parametrize(
    ("adapter", "update", "precision", "optimizer"),
    [
        ("lora", "device", "bf16", "adamw"),
        ("qlora", "device", "bf16", "adamw"),
        ("none", "in-backward", "bf16", "adamw"),
        ("none", "in-backward", "bf16-pure", "adamw8bit"),
        ("none", "host", "bf16", "adamw"),
    ],
)
def test_the_peak_is_the_predicted_one(tmp_path, fresh_peaks, adapter, update, precision, optimizer, recompute):
    if (adapter == "qlora" or "8bit" in optimizer) and not has_package("bitsandbytes"):
        pytest.skip("needs bitsandbytes")
    text = " ".join(str(number) for number in range(400))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} {text}"}) + "\n" for number in range(16)))
    memory = {"budget": "auto", "gradient_checkpointing": recompute, "kernels": "plain"}
    recipe = {
        "model": {"config": LLAMA, "tokenizer": "train"},
        "task": "causal-lm",
        "data": {"train": str(path), "eval_share": 0, "max_length": 256},
        "train": {"max_steps": 3, "batch_size": 4, "precision": precision, "compile": "off", "max_grad_norm": None}
        | {"optimizer": optimizer},
        "adapter": adapter,
        "memory": memory | {"stream_weights": "all", "update": update},
        "checkpoint": {"every": None},
        "track": "none",
        "out": str(tmp_path / "run"),
    }
    predicted, measured = fresh_peaks(recipe)
    words = f"{adapter} {update} {precision} {recompute}"
    print(f"{words}: {predicted / MIB:.1f} MiB, measured {measured / MIB:.1f}")  # noqa: T201
    assert predicted == pytest.approx(measured, rel=0.02)
