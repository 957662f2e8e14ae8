"""What is read back is what was written, type for type and bit for bit, or it is refused with its path."""

import collections
import enum
import functools
import json
import pathlib
import pickle
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trimtab.checkpoint.codec import decode, encode
from trimtab.errors import CheckpointError


def round_trip(value):
    """Through JSON text and the bytes of a safetensors file, as a checkpoint does."""
    encoded = encode(value)
    text = json.dumps(encoded.tree, allow_nan=False)
    tensors = {name: tensor.contiguous() for name, tensor in encoded.tensors.items()}
    read = safetensors.torch.load(safetensors.torch.save(tensors))
    return decode(json.loads(text), read.__getitem__)


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).tolist() if plain.numel() else []


def look(value):
    """A value as nested tuples that compare equal only for the same types and the same bits."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, tuple(value.shape), bits(value)
    if isinstance(value, np.ndarray | np.generic):
        return kind, value.dtype.str, value.shape, value.tobytes()
    if kind is int:
        return kind, hex(value)  # long numbers have no decimal text
    if kind is float:
        return kind, "nan" if value != value else struct.pack("d", value)
    if kind is complex:
        return kind, look(value.real), look(value.imag)
    if kind in (set, frozenset):
        return kind, sorted(repr(look(item)) for item in value)
    if isinstance(value, dict):
        factory = value.default_factory if kind is defaultdict else None
        return kind, factory, [(look(key), look(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return kind, getattr(value, "maxlen", None), [look(item) for item in value]
    return kind, value


def assert_round_trip(value):
    assert look(round_trip(value)) == look(value)


# ---------------------------------------------------------------------- any nesting of plain values

FLOATS = st.floats() | st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, 5e-324])
INTEGERS = st.integers() | st.integers(-3, 3).map(lambda n: n * 10**6000 + 1)
TEXT = st.text() | st.sampled_from(["$", "$tensor", "$.a", "__metadata__", "", ".", "a.b", "\ud800"])
KEYS = st.recursive(
    TEXT | st.integers(-5, 5) | INTEGERS | st.none() | st.booleans() | FLOATS | st.binary(max_size=3),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
ARRAYS = hnp.arrays(
    st.sampled_from(["?", "i1", "<u2", ">i4", "i8", "f2", "f4", ">f8", "c8", "c16"]),
    hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
)
TENSORS = hnp.arrays(
    st.sampled_from(["?", "u1", "i8", "f4", "c8", "c16"]),
    hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
).map(lambda array: torch.from_numpy(array.copy()))
LEAVES = st.one_of(
    *(st.none(), st.booleans(), INTEGERS, FLOATS, st.complex_numbers(), TEXT, st.binary(), ARRAYS, TENSORS),
    st.binary().map(bytearray),
    ARRAYS.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda"), torch.device("cuda:3"), torch.device("meta")]),
    st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    st.sampled_from([pathlib.Path("a/b"), pathlib.Path("/")]),
)


def nested(inner):
    dicts = st.dictionaries(KEYS, inner, max_size=3)
    return st.one_of(
        *(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), dicts),
        *(st.dictionaries(TEXT, inner, max_size=3), dicts.map(OrderedDict)),
        *(st.sets(KEYS, max_size=3), st.frozensets(KEYS, max_size=3)),
        st.dictionaries(KEYS, st.integers(-9, 9), max_size=3).map(Counter),
        st.tuples(st.sampled_from([None, int, float, list, dict]), dicts).map(lambda pair: defaultdict(*pair)),
        st.tuples(st.lists(inner, max_size=3), st.none() | st.integers(3, 5)).map(lambda pair: deque(*pair)),
    )


@pytest.mark.slow
@given(st.recursive(LEAVES, nested, max_leaves=8))
@settings(max_examples=250, suppress_health_check=list(HealthCheck))
def test_any_nesting_comes_back(value):
    assert_round_trip(value)


@pytest.mark.parametrize(
    "value",
    [
        {"milestones": Counter({3: 1, 5: 2}), "step": (1, (2.0, None))},
        {1: "int", "1": "str", False: "not 0"},
        {"a": {None: 1, (1, "x"): 2, frozenset({1}): 3}},
        {"$": "tensor", "name": "x"},
        {"$": {"$": {"$": None}}},
        [{"a.b": torch.ones(1)}, {"a": {"b": torch.zeros(1)}}],
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a.b#1": torch.ones(2)},
        {"__metadata__": torch.ones(1)},
        {"\ud800": torch.ones(1), "?": torch.zeros(1)},
        {10**6000: torch.ones(1)},
        -(10**6000),
        [2**63, -(2**63), 2**64 - 1, 2**64, 2**65],
        [np.float64(-0.0), np.bool_(True), np.longdouble(1) / 3, np.zeros((0, 3)), np.array(2.5)],
        np.arange(12.0).reshape(3, 4)[::2, ::-1],
    ],
    ids=range(14),
)
def test_values_that_other_formats_change(value):
    assert_round_trip(value)


# ---------------------------------------------------------------------- tensors

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
KEPT = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.float4_e2m1fn_x2, torch.complex32, torch.complex64, torch.complex128),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_every_dtype_is_kept_or_refused(dtype):
    raw = torch.arange(64, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    try:
        tensor = raw.view(dtype)
    except RuntimeError:  # quantized tensors are made in another way
        tensor = torch.empty(3, dtype=dtype)
    if dtype in KEPT:
        assert_round_trip({"x": tensor, "twice": tensor, "0-dim": tensor[0].clone(), "empty": tensor[:0].clone()})
    else:
        with pytest.raises(CheckpointError, match=f"'x' has the dtype {dtype}"):
            encode({"x": tensor})


def shapes():
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "middle": base[1:3],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "0-dim of a row": base[2, 3],
        "empty of a row": base[2, 3:3],
        "empty in two": torch.empty(2, 0, 3, dtype=torch.float16),
        "parameter": torch.nn.Parameter(base.clone()),
        "with graph": base.clone().requires_grad_() * 2,
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative view": torch.randn(3, dtype=torch.complex64).conj().imag,
        "nan payload": torch.tensor([0x7FC12345, -0x400001], dtype=torch.int32).view(torch.float32),
    }


@pytest.mark.parametrize("name", shapes())
def test_tensors_of_any_layout(name):
    tensor = shapes()[name]
    assert_round_trip({"x": tensor})
    assert type(round_trip(tensor)) is torch.Tensor
    assert not round_trip(tensor).requires_grad


def test_sparse_tensors():
    indices, values = torch.tensor([[1, 1, 3]]), torch.tensor([[1.0], [2.0], [3.0]])
    sparse = torch.sparse_coo_tensor(indices, values, (5, 1), check_invariants=True)
    back = round_trip([sparse, sparse.coalesce()])
    assert [tensor.is_coalesced() for tensor in back] == [False, True]
    assert back[0].shape == (5, 1)
    assert torch.equal(back[0]._values(), sparse._values())
    assert torch.equal(back[1].to_dense(), sparse.to_dense())


def test_a_copy_is_made_and_aligned():
    kept = torch.ones(3)
    assert decode(encode(kept).tree, lambda name: kept).data_ptr() != kept.data_ptr()
    assert round_trip(torch.ones(3)).data_ptr() % 64 == 0


def test_a_shared_tensor_is_written_once_and_shared_again():
    weight = torch.randn(4, 3)
    state = {"embedding": weight, "head": [weight, weight.view(4, 3)], "equal": weight.clone()}
    assert len(encode(state).tensors) == 2
    back = round_trip(state)
    back["embedding"].add_(1)
    assert torch.equal(back["head"][0], weight + 1)
    assert torch.equal(back["head"][1], weight + 1)
    assert torch.equal(back["equal"], weight)


def test_overlapping_views_stay_overlapping():
    base = torch.arange(1000.0)
    state = {"a": base[10:16], "b": base[13:19].view(3, 2).t(), "c": base[15], "d": base[12:12]}
    encoded = encode(state)
    assert sum(tensor.numel() * tensor.element_size() for tensor in encoded.tensors.values()) <= 64  # not all of base
    back = round_trip(state)
    assert look(back) == look(state)
    back["a"][5] = -1.0
    assert back["c"] == -1.0
    assert back["b"][0, 1] == -1.0
    assert back["b"].stride() == (1, 2)


def test_one_memory_seen_in_two_dtypes():
    raw = torch.arange(6, dtype=torch.uint8)
    state = {"short": raw.view(torch.int16), "int": raw[:4].view(torch.int32), "byte": raw[5]}
    back = round_trip(state)
    assert look(back) == look(state)
    back["int"].fill_(0)
    assert back["short"].tolist() == [0, 0, 0x0504]


def test_memory_of_numpy_that_torch_knows_twice():
    array = np.arange(6.0)
    state = {"begin": torch.from_numpy(array[:2]), "all": torch.from_numpy(array)}
    assert_round_trip(state)
    assert_round_trip(dict(reversed(state.items())))


def test_many_empty_tensors_do_not_mix():
    state = [torch.empty(0, index % 5, dtype=[torch.int8, torch.float64][index % 2]) for index in range(100)]
    assert_round_trip(state)


# ---------------------------------------------------------------------- tensor subclasses


class Scaled(torch.Tensor):
    """The smallest wrapper: bytes and a scale that stand for a tensor of floats."""

    @staticmethod
    def __new__(cls, data, scale, note=()):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data, scale, note=()):
        self._data, self._scale, self._note = data, scale, note

    def __tensor_flatten__(self):
        return ["_data", "_scale"], {"note": self._note}

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        assert parts["_data"].shape == size
        return Scaled(parts["_data"], parts["_scale"], context["note"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} on a tensor that is only saved")

    def __repr__(self):
        return "Scaled"


def test_a_subclass_comes_back_through_its_own_parts():
    scale = torch.tensor(0.5)
    state = {"w": Scaled(torch.arange(6, dtype=torch.int8).view(2, 3), scale, note=("a", 1)), "scale": scale}
    back = round_trip(state)
    assert type(back["w"]) is Scaled
    assert back["w"].shape == (2, 3)
    assert look(back["w"]._data) == look(state["w"]._data)
    assert back["w"]._note == ("a", 1)
    assert back["w"]._scale.data_ptr() == back["scale"].data_ptr()


def subclass_node(name):
    node = encode(Scaled(torch.ones(1), torch.ones(1))).tree
    return json.loads(json.dumps(node | {"class": name}))


@pytest.mark.parametrize(
    "name",
    ["this:Tensor", "os:system", "builtins:eval", "torch:Tensor", "torch:load", "pathlib:Path", "test_codec:Gone", ""],
)
def test_a_class_that_is_not_loaded_is_refused_and_not_imported(name):
    assert "this" not in sys.modules
    with pytest.raises(CheckpointError, match=f"class {name}, which is not imported"):
        decode(subclass_node(name), lambda name: torch.ones(1))
    assert "this" not in sys.modules


# ---------------------------------------------------------------------- what is refused


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Text(str):
    __slots__ = ()


class Plain(torch.Tensor):
    pass


class Unhashable:
    __hash__ = None

    def __call__(self):
        return 0


Point = collections.namedtuple("Point", "x y")
REFUSED = {  # functions, because some warn when they are made
    "function": lambda: assert_round_trip,
    "lambda": lambda: lambda: 0,
    "partial": lambda: functools.partial(int),
    "object": lambda: object(),
    "class": lambda: dict,
    "enum": lambda: Colour.RED,
    "int enum": lambda: Number.ONE,
    "str subclass": lambda: Text("a"),
    "named tuple": lambda: Point(1, 2),
    "dict subclass": lambda: collections.UserDict(),
    "defaultdict of a function": lambda: defaultdict(lambda: 0),
    "defaultdict of an object": lambda: defaultdict(Unhashable()),
    "generator": lambda: torch.Generator(),
    "path of another system": lambda: pathlib.PureWindowsPath("a"),
    "record array": lambda: np.ones(2).view(np.recarray),
    "objects": lambda: np.array([object()]),
    "dates": lambda: np.array(["2020-01-01"], dtype="M8[D]"),
    "text array": lambda: np.array(["a"]),
    "tensor subclass": lambda: torch.ones(1).as_subclass(Plain),
    "meta tensor": lambda: torch.ones(1, device="meta"),
    "compressed sparse": lambda: torch.eye(2).to_sparse_coo().to_sparse_csc(),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_faithful_form_is_refused_with_its_path(name):
    value = REFUSED[name]()
    with pytest.raises(CheckpointError, match=r"'outer\.1\.inner'"):
        encode({"outer": [0, {"inner": value}]})
    with pytest.raises(CheckpointError, match="'the top'"):
        encode(value)


@pytest.mark.parametrize("key", [Colour.RED, Text("a"), Number.ONE, Point(1, 2)], ids=str)
def test_keys_are_refused_too(key):
    with pytest.raises(CheckpointError, match=r"'outer\.key' is a "):
        encode({"outer": {key: 1}})


def test_a_state_that_contains_itself_is_refused():
    state: dict = {"a": []}
    state["a"].append(state)
    with pytest.raises(CheckpointError, match="contains itself"):
        encode(state)


@pytest.mark.parametrize(
    "tree",
    [
        {"$": "pickle", "value": "gASVAAAA"},
        {"$": ["tensor"]},
        {"$": None},
        {"$": "tensor"},
        {"$": "tensor", "name": "missing", "dtype": "float32", "shape": [1]},
        {"$": "tensor", "name": "x", "dtype": "float32", "shape": [9], "view": {"stride": [1], "offset": 0}},
        {"$": "tensor", "name": "x", "dtype": "load", "shape": [1], "view": {"stride": [1], "offset": 0}},
        {"$": "tuple", "items": 3},
        {"$": "dict", "pairs": [[1]]},
        {"$": "dict", "pairs": [[[], 1]]},
        {"$": "defaultdict", "factory": "eval", "pairs": []},
        {"$": "deque", "items": [], "maxlen": -1},
        {"$": "int", "value": "0xzz"},
        {"$": "float", "value": "many"},
        {"$": "complex", "value": []},
        {"$": "bytes", "value": "é"},
        {"$": "dtype", "value": "load"},
        {"$": "dtype", "value": "no_such_dtype"},
        {"$": "device", "value": "toaster"},
        {"$": "numpy", "dtype": "O", "shape": [1], "scalar": False, "value": "AAAAAAAAAAA="},
        {"$": "numpy", "dtype": "f8", "shape": [7], "scalar": False, "value": "AAAAAAAAAAA="},
        {"$": "sparse", "indices": [[9]], "values": [1.0], "shape": [2], "coalesced": True},
    ],
    ids=str,
)
def test_a_damaged_tree_is_an_error_of_ours(tree):
    with pytest.raises(CheckpointError):
        decode({"a": [tree]}, {"x": torch.ones(4, dtype=torch.uint8)}.__getitem__)


def test_nothing_is_pickled(monkeypatch):
    """Neither on the way out nor on the way in, for values of every kind."""

    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for module in (pickle, torch.serialization.pickle):
        for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
            monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    assert_round_trip({"a": [torch.ones(2), np.ones(2), {1, 2}, Counter("ab"), torch.float16, b"x", 1j]})
    assert type(round_trip(Scaled(torch.ones(1), torch.ones(1)))) is Scaled
