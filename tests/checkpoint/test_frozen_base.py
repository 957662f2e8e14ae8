"""A frozen base is not saved, yet another base is detected; what has changed is saved although it does not train."""

import pytest
import safetensors.torch
import torch

from trimtab.checkpoint.frozen_base import FrozenBase, fingerprints_of, frozen_parameters, unsaved_parameters
from trimtab.checkpoint.state import ModelPart, apply_parts, checked_parts, encode_parts
from trimtab.checkpoint.store import write_checkpoint
from trimtab.errors import CheckpointError

FROZEN = ("embedding", "base", "norm")


class Model(torch.nn.Module):
    """A base with a norm that has buffers, and a head; the embeddings are tied to the decoder."""

    def __init__(self, seed, width=64, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Embedding(50, width)
        self.base = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.decoder = torch.nn.Linear(width, 50)
        self.decoder.weight = self.embedding.weight
        self.head = torch.nn.Linear(width, 2)
        self.to(dtype)

    def frozen(self, *names):
        for name, parameter in self.named_parameters():
            if name.startswith(names):
                parameter.requires_grad_(False)
        return self


def model_of(seed, *names, **options):
    """The base is that of seed 0, the rest that of another seed: as after some training."""
    model = Model(seed, **options)
    base = Model(0, **options).state_dict()
    model.load_state_dict(base | {k: v for k, v in model.state_dict().items() if k.startswith(("head", "decoder.b"))})
    return model.frozen(*(names or FROZEN))


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def saved(folder, model, part=ModelPart, **options):
    """Save a model; gives the names of the tensors in the file."""
    write_checkpoint(folder, encode_parts([part("model", model, **options)]))
    return set(safetensors.torch.load_file(folder / "model.safetensors"))


def load(folder, model, **options):
    parts = [ModelPart("model", model, **options)]
    apply_parts(checked_parts(folder, parts), parts)


def test_only_trainable_parameters_are_saved_and_come_back(tmp_path):
    run = model_of(1)
    run.norm.running_mean.fill_(3)
    buffers = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert saved(tmp_path / "c", run) == {"decoder.bias", "head.weight", "head.bias"} | buffers
    resumed = model_of(2)
    before = weights(resumed)
    load(tmp_path / "c", resumed)
    assert_equal(weights(resumed), weights(run))
    assert not torch.equal(before["head.weight"], run.head.weight)


def test_the_size_does_not_grow_with_the_base(tmp_path):
    sizes = []
    for width in (8, 512):
        saved(tmp_path / str(width), Model(0, width).frozen("embedding", "base", "norm.weight"))
        sizes.append(sum(path.stat().st_size for path in (tmp_path / str(width)).iterdir()))
    assert sizes[1] - sizes[0] < 5 * 4 * 512


def test_without_frozen_parameters_all_is_saved_and_tied_weights_once(tmp_path):
    model = Model(1)
    assert saved(tmp_path / "all", model) == set(model.state_dict()) - {"decoder.weight"}
    assert ".frozen" not in ModelPart("model", model).capture()
    run, resumed = Model(1).frozen("base"), model_of(2, "base")
    assert {"embedding.weight", "decoder.weight"} & saved(tmp_path / "c", run) == {"embedding.weight"}
    resumed.load_state_dict({"base.weight": run.base.weight, "base.bias": run.base.bias}, strict=False)
    load(tmp_path / "c", resumed)
    assert resumed.decoder.weight is resumed.embedding.weight
    assert_equal(weights(resumed), weights(run))


# ---------------------------------------------------------------------- another base


def changed_in(name, row=None):
    model = model_of(2)
    with torch.no_grad():
        parameter = model.get_parameter(name)
        (parameter if row is None else parameter[row, 3]).mul_(1.01).add_(1e-3)
    return model


def with_module(name, module):
    model = model_of(2)
    setattr(model, name, module)
    return model


OTHERS = {
    "another base": (
        lambda: Model(5).frozen(*FROZEN),
        r"4 of 6 frozen parameters differ, such as embedding\.weight, which has different",
    ),
    **{
        name: (lambda name=name: changed_in(name), rf"differ, such as {name}, which has different values")
        for name in ("embedding.weight", "base.weight", "base.bias", "norm.weight", "norm.bias")
    },
    **{
        f"one value of row {row}": (
            lambda row=row: changed_in("embedding.weight", row),
            "2 of 6 frozen parameters differ",
        )
        for row in (0, 1, 25, 49)
    },
    "precision": (
        lambda: model_of(2, dtype=torch.bfloat16),
        r"which is float32 \[50, 64\] in the checkpoint and bfloat16",
    ),
    "shape": (
        lambda: model_of(2, width=32),
        r"which is float32 \[50, 64\] in the checkpoint and float32 \[50, 32\] here",
    ),
    "trainable here": (
        lambda: model_of(2, "embedding"),
        r"does not contain base\.bias, which was frozen when it was saved and is trainable here, and 3 more",
    ),
    "a module more": (
        lambda: with_module("extra", torch.nn.Linear(2, 2)),
        r"does not match the model: missing extra\.bias, extra\.weight",
    ),
    "a module less": (
        lambda: with_module("base", torch.nn.Identity()),
        r"does not match the model: unexpected base\.bias, base\.weight",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_base_is_refused(tmp_path, name):
    make, cause = OTHERS[name]
    saved(tmp_path / "c", model_of(1))
    model = make()
    before = weights(model)
    with pytest.raises(CheckpointError, match=cause):
        load(tmp_path / "c", model)
    assert_equal(weights(model), before)


# ---------------------------------------------------------------------- frozen and yet changed


def test_what_is_frozen_only_here_is_loaded(tmp_path):
    """As in a run that freezes later: the parameter was saved, so it comes back."""
    run = model_of(1, "embedding")
    run.base.weight.data.add_(1)
    saved(tmp_path / "c", run)
    resumed = model_of(2, "embedding", "base")
    load(tmp_path / "c", resumed)
    assert_equal(weights(resumed), weights(run))


def test_what_trains_later_is_saved_if_told(tmp_path):
    run = model_of(1)
    names = saved(tmp_path / "c", run, also=run.base.parameters())
    assert {"base.weight", "base.bias"} <= names
    assert "embedding.weight" not in names
    resumed = model_of(2, "embedding", "norm")  # the base trains by now, and has changed
    resumed.base.weight.data.add_(1)
    load(tmp_path / "c", resumed)
    assert_equal(weights(resumed), weights(run))


def test_what_was_frozen_after_it_had_trained_is_saved(tmp_path):
    run = model_of(1, "embedding", "norm")
    base = FrozenBase(run)
    run.base.weight.data.add_(1)
    run.frozen("base")
    assert "base.weight" not in saved(tmp_path / "lost", run)
    assert {"base.weight", "base.bias"} <= saved(tmp_path / "c", run, base=base)
    resumed = model_of(2)
    base = FrozenBase(resumed)
    load(tmp_path / "c", resumed, base=base)
    assert_equal(weights(resumed), weights(run))
    # the resumed run, in which it was frozen from the start, saves it again
    assert "base.weight" in saved(tmp_path / "again", resumed, base=base)


@pytest.mark.parametrize("rows", [slice(None), slice(12, 13)])
def test_what_changes_without_gradients_is_saved(tmp_path, rows):
    """Such as an average of other weights; through `.data`, which no version counter notices; all of it or one row."""
    run = model_of(1)
    base = FrozenBase(run)
    run.base.weight.data[rows].mul_(0.99)
    names = saved(tmp_path / "c", run, base=base)
    assert "base.weight" in names
    assert not {"base.bias", "embedding.weight"} & names
    resumed = model_of(2)
    load(tmp_path / "c", resumed)
    assert_equal(weights(resumed), weights(run))


# ---------------------------------------------------------------------- fingerprints


class Earlier(ModelPart):
    """Saves what earlier versions saved: a CRC-32 of 16 values, here of the numbers from 0 on."""

    def capture(self):
        names = frozen_parameters(self._model)
        return super().capture() | {".frozen": dict.fromkeys(names, ["float32", [500, 8], "588c036e"])}


def test_checkpoints_with_samples_are_still_read(tmp_path):
    resumed = torch.nn.Sequential(torch.nn.Embedding(500, 8).requires_grad_(False), torch.nn.Linear(8, 2))
    resumed[0].weight.copy_(torch.arange(4000.0).view(500, 8))
    saved(tmp_path / "c", resumed, Earlier)
    load(tmp_path / "c", resumed)
    resumed[0].weight += 1
    with pytest.raises(CheckpointError, match="has different values"):
        load(tmp_path / "c", resumed)


class KeepsScale(torch.nn.Module):
    """Keeps what its weight needs under the weight's name, as bitsandbytes does."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randint(0, 255, (64, 1)).byte(), requires_grad=False)
        self.adapter = torch.nn.Parameter(torch.randn(3))
        self.scale = torch.rand(4)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.absmax"] = self.scale


def test_what_belongs_to_a_frozen_weight_is_not_saved_either(tmp_path):
    run, resumed = torch.nn.Sequential(KeepsScale(1)), torch.nn.Sequential(KeepsScale(1))
    with torch.no_grad():
        resumed[0].adapter.zero_()
    assert saved(tmp_path / "c", run) == {"0.adapter"}
    load(tmp_path / "c", resumed)
    assert torch.equal(resumed[0].adapter, run[0].adapter)


def quantized(changed=()):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    values = torch.randn(64, 64)
    for row, column, value in changed:
        values[row, column] = value
    module = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=True)
    module.weight = bitsandbytes.nn.Params4bit(values, requires_grad=False, quant_type="nf4")
    return torch.nn.Sequential(module.to("cpu"), torch.nn.Linear(64, 2))


def test_a_quantized_base_is_the_same_or_another(tmp_path, monkeypatch):
    saved(tmp_path / "c", quantized())
    load(tmp_path / "c", quantized())
    for changed in ([(5, 7, 1.5)], [(5, 7, 100.0)]):  # another code, and another scale
        with pytest.raises(CheckpointError, match="has different values"):
            load(tmp_path / "c", quantized(changed))
    known = unsaved_parameters(quantized(), (), None)["0.weight"]
    assert "cpu" in known.quantized_by
    assert "bitsandbytes" in known.quantized_by
    # the bits of another device may differ in rounding: dtype and shape still count
    monkeypatch.setattr("trimtab.checkpoint.frozen_base._quantizer_of", lambda tensor: "another device")
    load(tmp_path / "c", quantized([(5, 7, 1.5)]))


def test_fingerprints_are_exact():
    tensors = {
        "large": torch.randn(1000, 1000),
        "small": torch.randn(3),
        "none": torch.empty(0),
        "one": torch.tensor(1.0),
        "half": torch.randn(40).half(),
        "turned": torch.randn(30, 40).t(),
        "whole": torch.arange(5),
    }
    before = fingerprints_of(tensors)
    assert before == fingerprints_of({name: tensor.clone() for name, tensor in reversed(tensors.items())})
    assert before["large"].as_list()[:2] == ["float32", [1000, 1000]]
    assert before["turned"] == fingerprints_of({"turned": tensors["turned"].contiguous()})["turned"]
    for name in tensors.keys() - {"none"}:
        assert before[name].checksum
        tensors[name][(-1,) * tensors[name].dim()] += 1  # the last element
    after = fingerprints_of(tensors)
    assert [name for name in tensors if after[name] == before[name]] == ["none"]
    without_memory = {"meta": torch.empty(3, device="meta"), "sparse": torch.eye(3).to_sparse()}
    assert {one.checksum for one in fingerprints_of(without_memory).values()} == {""}
