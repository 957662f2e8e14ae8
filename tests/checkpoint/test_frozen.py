"""A frozen base is not written, yet another base is found out; what has changed is written though it does not train."""

import pytest
import safetensors.torch
import torch

from trimtab.checkpoint.codec import encode
from trimtab.checkpoint.frozen_base import FrozenBase, fingerprints_of, unsaved_parameters
from trimtab.checkpoint.state import ModelPart, load_parts, num_bytes_of_parts, save_parts
from trimtab.errors import CheckpointError


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


FROZEN = ("embedding", "base", "norm")


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


def saved(folder, model, **options):
    save_parts(folder, [ModelPart("model", model, **options)])
    return set(safetensors.torch.load_file(folder / "model.safetensors"))


def test_only_what_trains_is_written_and_comes_back(tmp_path):
    run = model_of(1)
    run.norm.running_mean.fill_(3)
    names = saved(tmp_path / "c", run)
    buffers = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert names == {"decoder.bias", "head.weight", "head.bias"} | buffers
    resumed = model_of(2)
    before = weights(resumed)
    load_parts(tmp_path / "c", [ModelPart("model", resumed)])
    assert_equal(weights(resumed), weights(run))
    assert not torch.equal(before["head.weight"], run.head.weight)
    assert num_bytes_of_parts([ModelPart("model", run)]) < 10 * 64 * 4


def test_the_size_does_not_grow_with_the_base(tmp_path):
    sizes = []
    for width in (8, 512):
        saved(tmp_path / str(width), Model(0, width).frozen("embedding", "base", "norm.weight"))
        sizes.append(sum(path.stat().st_size for path in (tmp_path / str(width)).iterdir()))
    assert sizes[1] - sizes[0] < 5 * 4 * 512
    assert sizes[1] - sizes[0] < 512 * 512 * 4 / 50


def test_a_model_without_frozen_parameters_is_written_whole(tmp_path):
    model = Model(1)
    assert saved(tmp_path / "c", model) == set(model.state_dict()) - {"decoder.weight"}
    assert ".frozen" not in ModelPart("model", model).capture()


def test_tied_weights_that_train_are_written_once(tmp_path):
    run, resumed = Model(1).frozen("base"), model_of(2, "base")
    names = saved(tmp_path / "c", run)
    assert "embedding.weight" in names
    assert "decoder.weight" not in names
    resumed.load_state_dict({"base.weight": run.base.weight, "base.bias": run.base.bias}, strict=False)
    load_parts(tmp_path / "c", [ModelPart("model", resumed)])
    assert resumed.decoder.weight is resumed.embedding.weight
    assert_equal(weights(resumed), weights(run))


# ---------------------------------------------------------------------- another base


def refused(tmp_path, model, match):
    saved(tmp_path / "c", model_of(1))
    before = weights(model)
    with pytest.raises(CheckpointError, match=match):
        load_parts(tmp_path / "c", [ModelPart("model", model)])
    assert_equal(weights(model), before)


def test_another_base_is_named(tmp_path):
    refused(
        tmp_path,
        Model(5).frozen(*FROZEN),
        r"not that of the checkpoint: 4 of 6 frozen parameters differ, such as embedding\.weight, which has other values",
    )


@pytest.mark.parametrize("name", ["embedding.weight", "base.weight", "base.bias", "norm.weight", "norm.bias"])
def test_one_tensor_of_another_base_is_enough(tmp_path, name):
    model = model_of(2)
    with torch.no_grad():
        model.get_parameter(name).mul_(1.01).add_(1e-3)
    refused(tmp_path, model, rf"frozen parameters differ, such as {name}, which has other values")


def test_another_precision_is_named(tmp_path):
    refused(tmp_path, model_of(2, dtype=torch.bfloat16), r"embedding\.weight, which is float32 \[50, 64\] there and bfloat16")


def test_another_shape_is_named(tmp_path):
    refused(
        tmp_path, model_of(2, width=32), r"embedding\.weight, which is float32 \[50, 64\] there and float32 \[50, 32\] here"
    )


def test_what_is_missing_must_be_frozen_here_too(tmp_path):
    refused(
        tmp_path,
        model_of(2, "embedding"),
        r"does not contain base\.bias, which was frozen when it was saved and is trainable here, and 3 more",
    )


def test_what_is_frozen_only_here_is_taken_from_the_checkpoint(tmp_path):
    """As in a run that freezes later: the parameter was saved, so it comes back."""
    run = model_of(1, "embedding")
    run.base.weight.data.add_(1)
    saved(tmp_path / "c", run)
    resumed = model_of(2, "embedding", "base")
    load_parts(tmp_path / "c", [ModelPart("model", resumed)])
    assert_equal(weights(resumed), weights(run))


def test_other_modules_are_named(tmp_path):
    model = model_of(2)
    model.extra = torch.nn.Linear(2, 2)
    refused(tmp_path, model, r"does not match the model: missing extra\.bias, extra\.weight")
    model = model_of(2)
    model.base = torch.nn.Identity()
    with pytest.raises(CheckpointError, match=r"does not match the model: unexpected base\.bias, base\.weight"):
        load_parts(tmp_path / "c", [ModelPart("model", model)])


# ---------------------------------------------------------------------- frozen and yet changed


def test_what_trains_later_is_written_if_told(tmp_path):
    run = model_of(1)
    names = saved(tmp_path / "c", run, also=run.base.parameters())
    assert {"base.weight", "base.bias"} <= names
    assert "embedding.weight" not in names
    resumed = model_of(2, "embedding", "norm")  # the base trains by now, and has moved
    resumed.base.weight.data.add_(1)
    load_parts(tmp_path / "c", [ModelPart("model", resumed)])
    assert_equal(weights(resumed), weights(run))


def test_what_was_frozen_after_it_had_trained_is_written(tmp_path):
    run = model_of(1, "embedding", "norm")
    base = FrozenBase(run)
    run.base.weight.data.add_(1)
    run.frozen("base")
    assert "base.weight" not in saved(tmp_path / "lost", run)
    assert {"base.weight", "base.bias"} <= saved(tmp_path / "c", run, base=base)
    resumed = model_of(2)
    base = FrozenBase(resumed)
    load_parts(tmp_path / "c", [ModelPart("model", resumed, base=base)])
    assert_equal(weights(resumed), weights(run))
    # and it is written again by the resumed run, in which it was frozen from the beginning
    assert "base.weight" in saved(tmp_path / "again", resumed, base=base)


def test_an_average_of_other_weights_is_written(tmp_path):
    """It does not train, but it moves; through `.data`, which no counter of torch's notices."""
    run = model_of(1)
    base = FrozenBase(run)
    run.base.weight.data.mul_(0.99)
    names = saved(tmp_path / "c", run, base=base)
    assert "base.weight" in names
    assert not {"base.bias", "embedding.weight"} & names
    resumed = model_of(2)
    load_parts(tmp_path / "c", [ModelPart("model", resumed)])
    assert_equal(weights(resumed), weights(run))


class Quantized(torch.nn.Module):
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


def test_what_goes_with_a_frozen_weight_is_not_written_either(tmp_path):
    run, resumed = torch.nn.Sequential(Quantized(1)), torch.nn.Sequential(Quantized(1))
    with torch.no_grad():
        resumed[0].adapter.zero_()
    assert saved(tmp_path / "c", run) == {"0.adapter"}
    load_parts(tmp_path / "c", [ModelPart("model", resumed)])
    assert torch.equal(resumed[0].adapter, run[0].adapter)


# ---------------------------------------------------------------------- likeness


def test_likeness_is_exact():
    tensors = {
        "large": torch.randn(1000, 1000),
        "small": torch.randn(3),
        "none": torch.empty(0),
        "one": torch.tensor(1.0),
        "half": torch.randn(40).half(),
        "turned": torch.randn(30, 40).t(),
        "whole": torch.arange(5),
    }
    likeness = fingerprints_of(tensors)
    assert likeness == fingerprints_of({name: tensor.clone() for name, tensor in reversed(tensors.items())})
    assert likeness["large"].as_list()[:2] == ["float32", [1000, 1000]]
    assert likeness["turned"] == fingerprints_of({"turned": tensors["turned"].contiguous()})["turned"]
    for name in ("large", "small", "one", "half", "turned", "whole"):
        assert likeness[name].checksum
        tensors[name][(-1,) * tensors[name].dim()] += 1  # the last element
    assert [name for name, now in fingerprints_of(tensors).items() if now != likeness[name]] == [
        name for name in tensors if name != "none"
    ]


def test_the_likeness_of_many_tensors_is_small():
    model = Model(0).frozen(*FROZEN)
    known = unsaved_parameters(model, (), None)
    assert known.keys() == {
        "embedding.weight",
        "decoder.weight",
        "base.weight",
        "base.bias",
        "norm.weight",
        "norm.bias",
    }
    assert not encode({name: likeness.as_list() for name, likeness in known.items()}).tensors
