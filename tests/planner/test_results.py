"""What is remembered of an operation on `meta` is what it would have returned."""

import pytest
import torch

from trimtab.planner.trace import cache as results
from trimtab.planner.trace.cache import run_on_meta

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(results, "_known", {})


def turned():
    return meta(2, 7, 4, 8).transpose(1, 2)


CALLS = {
    "same shapes": lambda: (aten.mul.Tensor, (meta(4, 8), meta(4, 8)), {}),
    "other formats": lambda: (aten.mul.Tensor, (meta(4, 8, dtype=torch.bfloat16), meta(4, 8)), {}),
    "broadcast": lambda: (aten.add.Tensor, (meta(4, 1), meta(8)), {}),
    "turned round": lambda: (aten.mul.Tensor, (turned(), meta(2, 1, 7, 8)), {}),
    "expanded": lambda: (aten.neg.default, (meta(1, 8).expand(4, 8),), {}),
    "a number": lambda: (aten.mul.Tensor, (meta(4, dtype=torch.bfloat16), 2.5), {}),
    "numbers of another kind": lambda: (aten.mul.Tensor, (meta(4, dtype=torch.int64), 2.5), {}),
    "a product": lambda: (aten.mm.default, (meta(4, 8), meta(8, 3)), {}),
    "several results": lambda: (aten.topk.default, (meta(4, 8), 3), {}),
    "lists": lambda: (aten.cat.default, ([meta(4, 8), meta(2, 8)],), {}),
    "words": lambda: (aten._to_copy.default, (turned(),), {"dtype": torch.float16}),
    "a format of memory": lambda: (aten.clone.default, (turned(),), {"memory_format": torch.contiguous_format}),
    "a sum": lambda: (aten.sum.dim_IntList, (meta(4, 8), [0], True), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_second_answer_is_the_first(name, monkeypatch):
    call = CALLS[name]
    func, args, kwargs = call()
    expected = func(*args, **kwargs)
    run_on_meta(func, args, kwargs)
    monkeypatch.setattr(results, "_learn", None)  # nothing may be computed again
    _, args, kwargs = call()
    found = run_on_meta(func, args, kwargs)
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, expected)), strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        assert one.untyped_storage()._cdata not in [a.untyped_storage()._cdata for a in args if torch.is_tensor(a)]


def test_what_differs_is_not_taken_for_the_same():
    assert run_on_meta(aten.mul.Tensor, (meta(4, dtype=torch.int64), 2), {}).dtype is torch.int64
    assert run_on_meta(aten.mul.Tensor, (meta(4, dtype=torch.int64), 2.0), {}).dtype is torch.float32
    assert run_on_meta(aten.neg.default, (meta(4, 8),), {}).stride() == (8, 1)
    assert run_on_meta(aten.neg.default, (meta(8, 4).t(),), {}).stride() == (1, 4)


@pytest.mark.parametrize(
    ("func", "more"), [(aten.view.default, [[32]]), (aten._unsafe_view.default, [[32]]), (aten.detach.default, [])]
)
def test_views_stay_views(func, more):
    for _ in range(3):
        tensor = meta(4, 8)
        assert run_on_meta(func, (tensor, *more), {}).untyped_storage()._cdata == tensor.untyped_storage()._cdata


def test_what_is_changed_in_place_is_what_was_given():
    for _ in range(3):
        tensor = meta(4, 8)
        assert run_on_meta(aten.add_.Tensor, (tensor, meta(4, 8)), {}) is tensor
    for _ in range(3):
        tensor, other = meta(4, 8), meta(4, 8)
        run_on_meta(aten.set_.source_Tensor, (tensor, other), {})
        assert tensor.untyped_storage()._cdata == other.untyped_storage()._cdata, "or have other memory"
    for _ in range(3):
        assert run_on_meta(aten.resize_.default, (meta(4, 8), [64]), {}).shape == (64,), "and it may have grown"


def test_tensors_of_other_kinds_compute_in_their_own_way():
    class Own(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (4, 8), device="meta")

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return torch.zeros(3)

    run_on_meta(aten.neg.default, (meta(4, 8),), {})
    assert run_on_meta(aten.neg.default, (Own(),), {}).shape == (3,)


def test_the_default_format_counts():
    run_on_meta(aten.true_divide.Tensor, (meta(4, dtype=torch.int64), 2), {})
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = run_on_meta(aten.true_divide.Tensor, (meta(4, dtype=torch.int64), 2), {})
    finally:
        torch.set_default_dtype(before)
    assert found.dtype is torch.float64


def test_tensors_with_data_are_computed_with():
    for number in (1.0, 2.0):
        assert run_on_meta(aten.mul.Tensor, (torch.tensor(number), 2.0), {}) == 2 * number


def test_a_mistake_is_one_each_time():
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run_on_meta(aten.mm.default, (meta(4, 8), meta(4, 8)), {})
