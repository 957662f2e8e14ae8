"""Packed batches on a GPU: torch's kernels with row boundaries give what padded batches give, without a sync."""

import contextlib
import math

import pytest
import torch

import packed_rows as pr
from gpu_events import events_of
from trimtab.model.packed_attention import Kernel, kernel_for, packed_attention
from trimtab.model.padding_free import enable, find_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.version.hip is not None, reason="needs a CUDA device"),
]
ROW, MASKED, CAUSAL = "sequence-classification", "masked-lm", "causal-lm"
MODELS = [
    ("bert", ROW, {}),
    ("roberta", MASKED, {}),
    ("roberta", ROW, {}),
    ("modernbert", ROW, {}),
    ("modernbert", MASKED, {}),
    ("llama", CAUSAL, {}),
    ("gpt2", CAUSAL, {}),
    ("opt", CAUSAL, {}),
    ("qwen2", CAUSAL, {}),
    ("mistral", CAUSAL, {"sliding_window": 6}),
]
LENGTHS = (9, 0, 1, 300, 129, 5)
HAS_FLASH = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
needs_flash = pytest.mark.skipif(not HAS_FLASH, reason="torch's flash kernel needs compute capability 8.0")
KERNELS = [pytest.param(Kernel.FLASH, torch.bfloat16, marks=needs_flash), (Kernel.EFFICIENT, torch.float32)]


def kernel_here(dtype):
    return kernel_for("cuda", dtype, torch.cuda.get_device_capability())


def boundaries(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)


def inputs(dtype, num_heads=4, num_shared=4, width=64, lengths=LENGTHS):
    torch.manual_seed(0)
    shapes = [(1, sum(lengths), heads, width) for heads in (num_heads, num_shared, num_shared)]
    return [torch.randn(shape, device="cuda").to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


# ---------------------------------------------------------------------- kernels


@pytest.mark.parametrize("width", [16, 64, 96, 128])
@pytest.mark.parametrize("num_shared", [4, 2])
@pytest.mark.parametrize("window", [None, 1, 6, 128, 1000])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_kernels_equal_rows(kernel, dtype, is_causal, window, num_shared, width):
    """Against one call per row in fp32, as on a CPU. Longest is an upper bound of lengths."""
    if kernel is Kernel.EFFICIENT and not is_causal and window is not None and window < max(LENGTHS):
        pytest.skip("the kernel has no windows in both directions")
    tensors = inputs(dtype, num_shared=num_shared, width=width)
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    options = {"is_causal": is_causal, "window": window, "scale": 0.3, "dropout": 0.0}
    found = packed_attention(*tensors, boundaries(LENGTHS), 320, kernel=kernel, **options)
    wanted = packed_attention(*exact, boundaries(LENGTHS), 320, kernel=Kernel.ROWS, **options)
    bound = 4 * torch.finfo(dtype).eps if dtype is torch.bfloat16 else 1e-4  # TF32 is off by default
    pr.assert_close(found, wanted, bound, "output")
    weights = torch.randn_like(wanted)
    of_found = torch.autograd.grad(found, tensors, weights.to(dtype))
    of_wanted = torch.autograd.grad(wanted, exact, weights)
    for one, other in zip(of_found, of_wanted, strict=True):
        pr.assert_close(one, other, bound, "gradient", at_least=1.0)


@needs_flash
@pytest.mark.parametrize("num_shared", [4, 2])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_rows_of_one_length(is_causal, num_shared, is_compiled):
    """They are computed like padded rows, by cuDNN where it can; in a compiled block with symbolic sizes."""
    lengths = (96,) * 5
    tensors = inputs(torch.bfloat16, num_shared=num_shared, lengths=lengths)
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    options = {"is_causal": is_causal, "window": None, "scale": 0.3, "dropout": 0.0}
    compute = torch.compile(packed_attention, dynamic=True) if is_compiled else packed_attention
    found = compute(*tensors, boundaries(lengths), 96, kernel=Kernel.FLASH, row_length=96, **options)
    wanted = packed_attention(*exact, boundaries(lengths), 96, kernel=Kernel.ROWS, **options)
    bound = 4 * torch.finfo(torch.bfloat16).eps
    pr.assert_close(found, wanted, bound, "output")
    weights = torch.randn_like(wanted)
    gradients = [torch.autograd.grad((x * weights).sum(), y) for x, y in ((found, tensors), (wanted, exact))]
    for one, other in zip(*gradients, strict=True):
        pr.assert_close(one, other, 2 * bound, "gradient")


@needs_flash
@pytest.mark.parametrize("is_compiled", [False, True])
def test_short_rows_with_filler(is_compiled):
    """Filler is longer than any row, and neither changes rows nor gives anything but zeros."""
    tensors = inputs(torch.bfloat16, lengths=(9, 0, 130, 77, 900))
    starts = boundaries((9, 0, 130, 77, 900))
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    options = {"is_causal": False, "window": None, "scale": 0.3, "dropout": 0.0}
    compute = torch.compile(packed_attention, dynamic=True) if is_compiled else packed_attention
    found = compute(*tensors, starts, 900, kernel=Kernel.FLASH, max_row_length=130, **options)
    wanted = packed_attention(*exact, starts, 900, kernel=Kernel.ROWS, **options)
    bound = 4 * torch.finfo(torch.bfloat16).eps
    pr.assert_close(found[:, :216], wanted[:, :216], bound, "output")
    assert not found[:, 216:].any()
    weights = torch.randn_like(wanted)
    weights[:, 216:] = 0
    gradients = [torch.autograd.grad((x * weights).sum(), y) for x, y in ((found, tensors), (wanted, exact))]
    for one, other in zip(*gradients, strict=True):
        pr.assert_close(one, other, 2 * bound, "gradient")


@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
@pytest.mark.parametrize("lengths", [(1, 0, 1), (0, 0, 7), (1,), (5, 0)])
def test_rows_of_one_token_and_none(kernel, dtype, lengths):
    tensors = inputs(dtype, num_shared=2, lengths=lengths)
    exact = [tensor.detach().float().requires_grad_() for tensor in tensors]
    options = {"is_causal": True, "window": None, "scale": None, "dropout": 0.0}
    found = packed_attention(*tensors, boundaries(lengths), max(lengths), kernel=kernel, **options)
    wanted = packed_attention(*exact, boundaries(lengths), max(lengths), kernel=Kernel.ROWS, **options)
    bound = 4 * torch.finfo(dtype).eps if dtype is torch.bfloat16 else 1e-4
    pr.assert_close(found, wanted, bound, "output")
    found.sum().backward()
    wanted.sum().backward()
    for one, other in zip(tensors, exact, strict=True):
        pr.assert_close(one.grad, other.grad, bound, "gradient", at_least=1.0)


@needs_flash
def test_dropout():
    """Values are the unit vectors, so the output is the matrix of weights."""
    kernel, dtype = Kernel.FLASH, torch.bfloat16
    lengths, probability, num_draws = (40, 24), 0.3, 500
    query, key, value = inputs(dtype, 1, 1, 64, lengths)
    value = torch.eye(64, device="cuda", dtype=dtype)[None, None].requires_grad_()
    options = {"is_causal": False, "window": None, "scale": None}

    def weights(dropout):
        return packed_attention(query, key, value, boundaries(lengths), 40, kernel=kernel, dropout=dropout, **options)

    wanted = weights(0.0).detach().float()
    draws = torch.stack([weights(probability).detach().float() for _ in range(num_draws)])
    is_weight = wanted > 0
    share = float((draws[:, is_weight] == 0).float().mean())
    count = num_draws * int(is_weight.sum())
    assert abs(share - probability) < 6 * math.sqrt(probability * (1 - probability) / count) + 2**-8
    deviation = wanted * math.sqrt(probability / (1 - probability) / num_draws)
    rounding = 4 * torch.finfo(dtype).eps * wanted
    assert ((draws.mean(0) - wanted).abs() <= 6 * deviation + rounding).all()
    assert not draws[:, ~is_weight].any()  # rows stay apart

    # backward drops the same weights: the gradient of values is the transposed matrix
    output = weights(probability)
    (gradient,) = torch.autograd.grad(output, value, torch.eye(64, device="cuda", dtype=dtype)[None, :, None])
    assert torch.equal(gradient[0, 0] == 0, output[0, :, 0].T == 0)


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("model_type", "model_kind", "settings"), MODELS)
def test_fp32_equals_padded(model_type, model_kind, settings, recomputes):
    model, rows = pr.small_model(model_type, model_kind, **settings).cuda(), pr.some_rows()
    kernel = kernel_here(None)
    if find_problem(model, model_kind, kernel) is not None:
        assert model_type == "modernbert"
        pytest.skip("local attention in both directions needs the flash kernel")
    wanted = pr.step(pr.logits_of_padded, model, rows, model_kind)
    enable(model, model_kind, kernel)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    pr.assert_same_step(pr.step(pr.logits_of_packed, model, rows, model_kind), wanted, 1e-4)


@needs_flash
@pytest.mark.parametrize("is_pure", [False, True])
@pytest.mark.parametrize(("model_type", "model_kind", "settings"), MODELS)
def test_bf16_equals_padded(model_type, model_kind, settings, is_pure):
    """No farther from fp32 than twice the padded batch in bf16, in the norm of all gradients."""
    model, rows = pr.small_model(model_type, model_kind, **settings).cuda(), pr.some_rows()
    exact = pr.step(pr.logits_of_padded, model, rows, model_kind)
    if is_pure:
        model.to(torch.bfloat16)
    cast = contextlib.nullcontext() if is_pure else torch.autocast("cuda", torch.bfloat16)
    with cast:
        padded = pr.step(pr.logits_of_padded, model, rows, model_kind)
        assert find_problem(model, model_kind, Kernel.FLASH) is None
        enable(model, model_kind, Kernel.FLASH)
        packed = pr.step(pr.logits_of_packed, model, rows, model_kind)
    eps = torch.finfo(torch.bfloat16).eps
    for found, reference in zip(zip(packed, padded, strict=True), exact, strict=True):
        of_packed, of_padded = (_distance(one, reference) for one in found)
        assert of_packed <= 2 * of_padded + eps, (of_packed, of_padded)


def _distance(found, wanted):
    if isinstance(wanted, torch.Tensor):
        found, wanted = {"": found}, {"": wanted}
    squares = sum(float((found[name].float() - wanted[name]).square().sum()) for name in wanted)
    return math.sqrt(squares / sum(float(tensor.square().sum()) for tensor in wanted.values()))


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=needs_flash), None])
@pytest.mark.parametrize(("model_type", "model_kind", "settings"), MODELS)
def test_no_syncs(model_type, model_kind, settings, dtype):
    model = pr.small_model(model_type, model_kind, **settings).cuda()
    kernel = kernel_here(dtype)
    if find_problem(model, model_kind, kernel) is not None:
        pytest.skip("the model needs the flash kernel")
    enable(model, model_kind, kernel)
    batch = pr.on_device(pr.packed_batch(pr.some_rows()), "cuda")
    use_cache = {"use_cache": False} if model_kind == CAUSAL else {}

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is not None):
            logits = model(**batch, **use_cache).logits
        logits.float().square().mean().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    step()
    torch.cuda.set_sync_debug_mode("default")


@needs_flash
def test_flash_runs_in_half_precision():
    """The kernel is the flash one, and heads of keys are not repeated."""
    query, key, value = inputs(torch.bfloat16, num_shared=2)
    options = {"is_causal": True, "window": None, "scale": None, "dropout": 0.0}
    starts = boundaries(LENGTHS)
    names = set(events_of(lambda: packed_attention(query, key, value, starts, 300, kernel=Kernel.FLASH, **options)))
    assert "aten::_flash_attention_forward" in names
    assert not names & {"aten::repeat_interleave", "aten::copy_", "aten::item"}
