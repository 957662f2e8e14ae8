"""Captured micro-batches with CUDA graphs: the plain step's weights, no host-device sync, and few launches."""

import copy
import gc

import pytest
import torch

from gpu_events import events_of, num_graphs, num_kernels
from trimtab import Engine
from trimtab.model.adapters import LoraSpec, add_adapter
from trimtab.model.captured_step import capture_micro_batches, compute_captured, compute_plainly
from trimtab.model.compiled_blocks import compile_blocks
from trimtab.model.losses import StepLoss
from trimtab.techniques.recomputation import checkpoint_layers
from trimtab.training.step import take_step, window_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


def a_bert(dropout=0.0):
    from transformers import BertConfig, BertForTokenClassification

    torch.manual_seed(0)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "classifier_dropout": dropout}
    return BertForTokenClassification(BertConfig(vocab_size=512, num_labels=5, **SIZES, **rates)).to(DEVICE).train()


def a_llama():
    from transformers import LlamaConfig, LlamaForTokenClassification

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, num_labels=5, num_key_value_heads=2, use_cache=False, **SIZES)
    config.classifier_dropout = 0.0
    return LlamaForTokenClassification(config).to(DEVICE).train()


def loss_of(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits.float()
    weight = (batch["labels"] >= 0).sum()
    total = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-1, reduction="sum"
    )
    return StepLoss(total / weight.clamp(min=1), weight, logits.detach())


def windows(num_windows, sizes):
    draw = torch.Generator().manual_seed(0)
    for _ in range(num_windows):
        yield [
            {
                "input_ids": torch.randint(0, 512, (1, size), generator=draw).to(DEVICE),
                "labels": torch.randint(-1, 5, (1, size), generator=draw).to(DEVICE),
            }
            for size in sizes
        ]


class Loop:
    """A training loop, window by window."""

    def __init__(self, model, *, captures, precision="bf16", lr=1e-3):
        self.engine = Engine(precision, device=DEVICE)
        self.captured = capture_micro_batches(model) if captures else None
        self.compute = compute_captured if captures else compute_plainly
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=lr, fused=True)
        self.model, self.optimizer = self.engine.prepare(model, optimizer)
        self.scheduler = self.engine.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))

    def step(self, window):
        result = window_gradients(
            self.engine, self.model, loss_of, iter(window), len(window), 1.0, compute=self.compute
        )
        take_step(self.optimizer, self.scheduler, result)
        return result


def losses(loop, sizes, num_windows=8):
    results = [loop.step(window) for window in windows(num_windows, sizes)]
    return torch.stack([result.loss_sum / result.weight for result in results]).cpu()


def assert_same_curve(plain, captured, precision):
    """Attention's backward adds in any order, and Adam's first steps enlarge the difference: some roundings a step."""
    eps = torch.finfo(torch.bfloat16 if precision == "bf16" else torch.float16).eps
    assert torch.allclose(plain, captured, rtol=4 * eps, atol=4 * eps), (plain, captured)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("sizes", [(128,), (128, 128), (192, 128, 64)], ids=str)
@pytest.mark.parametrize("kind", ["bert", "llama", "lora", "recomputed", "compiled", "compiled, recomputed"])
def test_the_loss_curve_is_that_of_the_plain_step(kind, sizes, precision):
    model = a_llama() if kind in ("llama", "lora") else a_bert()
    if kind == "lora":
        add_adapter(model, LoraSpec(rank=8))
    other = copy.deepcopy(model)
    if "compiled" in kind:
        compile_blocks(other)
    if "recomputed" in kind:
        checkpoint_layers(other, "all")
    expected = losses(Loop(model, captures=False, precision=precision), sizes)
    loop = Loop(other, captures=True, precision=precision)
    found = losses(loop, sizes)
    assert loop.captured.failure is None
    assert loop.captured.num_graphs == len(set(sizes))
    assert_same_curve(expected, found, precision)


def test_gradients_of_one_window_are_those_of_the_plain_step():
    """With a learning rate of 0 all windows have the same weights. A capture may get other kernels, so sums differ."""
    found = []
    for captures in (False, True):
        loop = Loop(a_bert(), captures=captures, lr=0.0)
        for window in windows(3, (192, 128)):
            loop.step(window)
        result = window_gradients(loop.engine, loop.model, loss_of, iter(window), 2, None, compute=loop.compute)
        found.append((result, torch.cat([p.grad.flatten() for p in loop.model.parameters() if p.grad is not None])))
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found[0][0].loss_sum, found[1][0].loss_sum, rtol=eps, atol=0)
    assert float(found[0][0].weight) == float(found[1][0].weight)
    assert (found[0][1] - found[1][1]).norm() <= 4 * eps * found[0][1].norm()


def test_dropout_differs_between_replays_and_is_the_same_in_a_recomputed_block():
    gradients = []
    for recomputes in (False, True):
        model = a_bert(dropout=0.3)
        if recomputes:
            checkpoint_layers(model, "all")
        loop = Loop(model, captures=True, lr=0.0)
        same = list(windows(1, (128,))) * 5
        for window in same[:3]:
            loop.step(window)
        assert loop.captured.failure is None
        values = [float(loop.step(window).loss_sum) for window in same]
        assert len(set(values)) > 1, "every replay draws new numbers"
        torch.manual_seed(5)
        window_gradients(loop.engine, loop.model, loss_of, iter(same[0]), 1, None, compute=loop.compute)
        gradients.append(torch.cat([p.grad.flatten() for p in loop.model.parameters() if p.grad is not None]))
    eps = torch.finfo(torch.bfloat16).eps
    assert (gradients[0] - gradients[1]).norm() <= 4 * eps * gradients[0].norm()


@pytest.mark.parametrize("compiles", [False, True])
def test_a_step_has_no_host_device_sync_and_few_launches(compiles):
    model = a_bert()
    if compiles:
        compile_blocks(model)
    loop = Loop(model, captures=True)
    prepared = list(windows(6, (128, 128)))
    for window in prepared[:4]:
        loop.step(window)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    loop.step(prepared[4])
    torch.cuda.set_sync_debug_mode("default")
    counts = events_of(lambda: loop.step(prepared[5]))
    assert num_graphs(counts) == 2
    # clipping, correction and the fused optimizer launch a few kernels for many tensors; a plain step has hundreds
    assert num_kernels(counts) < 120, counts


def test_gradients_keep_their_addresses():
    loop = Loop(a_bert(), captures=True)
    addresses = []
    for window in windows(5, (128, 64)):
        window_gradients(loop.engine, loop.model, loss_of, iter(window), 2, None, compute=loop.compute)
        addresses.append([p.grad.data_ptr() for p in loop.model.parameters() if p.grad is not None])
        loop.optimizer.zero_grad()
    assert addresses[2] == addresses[3] == addresses[4]


def test_a_model_that_syncs_runs_without_graphs(caplog):
    class Syncs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Embedding(512, 5)

        def forward(self, input_ids):
            assert float(self.inner.weight.detach().sum()) < 1e6
            return type("Output", (), {"logits": self.inner(input_ids)})

    torch.manual_seed(0)
    plain = Syncs().to(DEVICE)
    other = copy.deepcopy(plain)
    expected = losses(Loop(plain, captures=False, precision="no"), (64,))
    loop = Loop(other, captures=True, precision="no")
    with caplog.at_level("INFO", "trimtab"):
        found = losses(loop, (64,))
    assert sum("could not be captured" in record.message for record in caplog.records) == 1
    assert loop.captured.failure is not None
    assert torch.allclose(expected, found, rtol=1e-5)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_unfrozen_parameters_are_captured_again():
    model = a_bert()
    model.bert.embeddings.requires_grad_(False)
    other = copy.deepcopy(model)
    curves = []
    for one, captures in ((model, False), (other, True)):
        one.bert.embeddings.requires_grad_(True)
        loop = Loop(one, captures=captures)
        one.bert.embeddings.requires_grad_(False)
        found = []
        for number, window in enumerate(windows(8, (128,))):
            if number == 4:
                one.bert.embeddings.requires_grad_(True)
            result = loop.step(window)
            found.append(result.loss_sum / result.weight)
        curves.append(torch.stack(found).cpu())
    assert loop.captured.failure is None
    assert loop.captured.num_graphs == 1
    assert_same_curve(*curves, "bf16")


def test_a_graph_that_is_freed_during_a_capture_does_not_stop_it():
    """As that of an earlier run in this process, which is garbage that only the collector of cycles finds."""
    old = Loop(a_bert(), captures=True)
    for window in windows(3, (128,)):
        old.step(window)
    assert old.captured.num_graphs == 1
    old.captured.myself = old.captured  # a cycle
    del old
    loop = Loop(a_bert(), captures=True)
    thresholds = gc.get_threshold()
    gc.set_threshold(1)  # a collection at nearly every allocation
    try:
        for window in windows(3, (128,)):
            loop.step(window)
    finally:
        gc.set_threshold(*thresholds)
    assert loop.captured.failure is None
    assert loop.captured.num_graphs == 1
