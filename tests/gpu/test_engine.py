"""The engine on an accelerator: the bits of the plain loop, no waiting for the device, exact accumulation, resume."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from trimtab import Engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


class Batches(torch.utils.data.Dataset):
    """Rows of token ids, some of whose labels are ignored."""

    def __init__(self, num_rows=64, length=16, vocab=97):
        generator = torch.Generator().manual_seed(7)
        self.ids = torch.randint(0, vocab, (num_rows, length), generator=generator)
        self.labels = self.ids.clone()
        self.labels[torch.rand(num_rows, length, generator=generator) < 0.4] = -100

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"ids": self.ids[index], "labels": self.labels[index]}


def a_model(vocab=97, width=64):
    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Embedding(vocab, width),
        torch.nn.Linear(width, 4 * width),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(4 * width, vocab),
    )


def loss_of(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def weights(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def run_raw(precision, num_epochs=2):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "no": None}[precision]
    model = a_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    torch.manual_seed(1)
    for _ in range(num_epochs):
        for batch in DataLoader(Batches(), batch_size=8, shuffle=True):
            batch = {k: v.cuda() for k, v in batch.items()}
            with torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                output = model(batch["ids"])
            loss = F.cross_entropy(output.float().flatten(0, 1), batch["labels"].flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return weights(model)


def run_ours(precision, num_epochs=2, watch_syncs=False):
    engine = Engine(precision)
    assert engine.device.type == "cuda"
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = DataLoader(Batches(), batch_size=8, shuffle=True)
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    torch.manual_seed(1)
    for epoch in range(num_epochs):
        for batch in loader:
            if watch_syncs and epoch:
                torch.cuda.set_sync_debug_mode("warn")
            engine.backward(loss_of(model, batch))
            engine.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
    return weights(model)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_weights_are_bit_equal_to_the_plain_loop(precision):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.equal(run_ours(precision), run_raw(precision))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("precision", "allowed"), [("no", 0), ("bf16", 0), ("fp16", 8)])
def test_the_host_never_waits_but_for_one_read_of_an_fp16_step(precision, allowed):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ours(precision, watch_syncs=True)
    syncs = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    assert len(syncs) == allowed, [f"{w.filename}:{w.lineno}" for w in syncs]


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (1, 2, 5, 24), (31, 1)])
def test_device_weights_give_the_gradient_of_the_whole_without_a_read(precision, sizes):
    rows = Batches(32)
    rows.labels[: sizes[0] - 1] = -100
    rows.labels[0, 0] = 3
    whole = a_model().cuda().eval()
    loss_of(whole, {"ids": rows.ids.cuda(), "labels": rows.labels.cuda()}).backward()
    expected = torch.cat([p.grad.flatten() for p in whole.parameters()])
    engine = Engine(precision, gradient_accumulation_steps=len(sizes))
    if precision == "fp16":
        engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 1024.0})
    model = engine.prepare(a_model().eval())
    pieces = zip(rows.ids.cuda().split(sizes), rows.labels.cuda().split(sizes), strict=True)
    for index, (ids, labels) in enumerate(pieces):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if index else "default")
        with engine.accumulate(model):
            engine.backward(loss_of(model, {"ids": ids, "labels": labels}), weight=(labels != -100).sum())
        torch.cuda.set_sync_debug_mode("default")
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert ((found - expected).norm() / expected.norm()).item() <= (1e-6 if precision == "no" else 3e-3)


def test_a_weightless_micro_batch_on_the_device_contributes_nothing():
    engine = Engine(gradient_accumulation_steps=2)
    model = engine.prepare(torch.nn.Linear(4, 3))
    x, labels = torch.randn(5, 4, device="cuda"), torch.tensor([1, 2, 0, 1, 1], device="cuda")
    for target in (labels, torch.full_like(labels, -100)):
        with engine.accumulate(model):
            engine.backward(F.cross_entropy(model(x), target), weight=(target != -100).sum())
    found = model.weight.grad.clone()
    model.zero_grad()
    F.cross_entropy(model(x), labels).backward()
    assert ((found - model.weight.grad).norm() / found.norm()).item() <= 1e-6


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_resume_in_the_middle_of_an_epoch_is_bit_equal(precision, tmp_path):
    torch.use_deterministic_algorithms(True, warn_only=True)

    def build(seed):
        torch.manual_seed(seed)
        torch.cuda.manual_seed(seed)
        engine = Engine(precision)
        model = a_model()
        raw = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        return engine, *engine.prepare(model, raw, DataLoader(Batches(), batch_size=8, shuffle=True))

    def train(engine, model, optimizer, loader, num_steps, save_at=None):
        losses = []
        while len(losses) < num_steps:
            for batch in loader:
                loss = loss_of(model, batch)
                engine.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if len(losses) == save_at:
                    engine.save_state(tmp_path / "state")
                if len(losses) == num_steps:
                    break
        return losses

    whole = build(0)
    expected = train(*whole, num_steps=19, save_at=11)
    again = build(99)
    again[0].load_state(tmp_path / "state")
    assert train(*again, num_steps=8) == expected[11:]
    assert torch.equal(weights(again[1]), weights(whole[1]))
    assert again[2].state[again[1][0].weight]["step"].device.type == "cuda"  # fused state stays on the device
    torch.use_deterministic_algorithms(False)


def test_batches_copied_beside_the_computation_are_whole():
    """Large batches, a busy device, memory that is freed and reused at once: every batch must be what was loaded."""
    rows = torch.arange(64).float().repeat_interleave(1 << 18).view(64, -1)
    engine = Engine()
    loader = engine.prepare(DataLoader(rows, batch_size=4, num_workers=2))
    square = torch.randn(4096, 4096, device="cuda")
    sums = []
    for batch in loader:
        square = torch.tanh(square @ square)
        sums.append(batch.double().mean(1) + 0 * square[0, 0].double())
        del batch
    assert torch.equal(torch.cat(sums).cpu(), torch.arange(64).double())


def test_outputs_are_fp32_and_the_model_is_on_the_device():
    engine = Engine("bf16")
    model = engine.prepare(torch.nn.Linear(4, 4))
    assert model.weight.is_cuda
    assert model(torch.ones(1, 4, device="cuda")).dtype is torch.float32
    assert next(iter(engine.prepare(DataLoader(torch.ones(2, 4))))).is_cuda


@pytest.mark.parametrize("weights_are_on", ["cuda", "cpu"])
def test_token_weights_are_exact_on_bf16_gradients(weights_are_on):
    """The factor that ends a window is fp32: rounded to bf16 it would be off by up to 0.2%. And nothing is read."""
    num_tokens = [3, 1000, 7]  # the expected total is that of three micro-batches like the first
    torch.manual_seed(5)
    model = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    plain = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    engine = Engine(gradient_accumulation_steps=len(num_tokens))
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(len(num_tokens), 4, 256, device="cuda", dtype=torch.bfloat16)
    weights = [torch.tensor(count, device=weights_are_on) for count in num_tokens]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for rows, weight in zip(inputs, weights, strict=True):
            with engine.accumulate(model):
                engine.backward(model(rows).float().square().mean(), weight=weight)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for rows, count in zip(inputs, num_tokens, strict=True):
        (plain(rows).float().square().mean() * torch.tensor(count / (3 * num_tokens[0]), device="cuda")).backward()
    factor = torch.tensor(3 * num_tokens[0], device="cuda", dtype=torch.float32) / sum(num_tokens)
    assert torch.equal(model.weight.grad, (plain.weight.grad.float() * factor).bfloat16())
