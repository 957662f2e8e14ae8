"""A frozen base is compared by all of its values, in the forms in which bases come."""

import pytest
import torch

from trimtab.checkpoint.frozen_base import FrozenBase, fingerprints_of, frozen_parameters, unsaved_parameters
from trimtab.checkpoint.state import ModelPart, load_parts, save_parts
from trimtab.errors import CheckpointError

NUM_ROWS, WIDTH = 500, 8


class Model(torch.nn.Module):
    """A frozen table of embeddings, tied to a decoder, and a head that trains."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(NUM_ROWS, WIDTH, dtype=dtype).requires_grad_(False)
        self.decoder = torch.nn.Linear(WIDTH, NUM_ROWS, bias=False)
        self.decoder.weight = self.embedding.weight
        self.head = torch.nn.Linear(WIDTH, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [0, 1, 250, NUM_ROWS - 1])
def test_one_other_row_is_another_base(tmp_path, dtype, row):
    save_parts(tmp_path / "c", [ModelPart("model", Model(dtype))])
    other = Model(dtype)
    load_parts(tmp_path / "c", [ModelPart("model", other)])  # the same base
    other.embedding.weight[row, 3] += 1
    with pytest.raises(CheckpointError, match="2 of 2 frozen parameters differ, such as embedding.weight, which has other values"):
        load_parts(tmp_path / "c", [ModelPart("model", other)])


def test_one_row_that_has_changed_during_the_run_is_written(tmp_path):
    """However it was changed: an update of a few rows is found as well as one of all."""
    run = Model()
    base = FrozenBase(run)
    run.embedding.weight.data[123, 4] += 1
    save_parts(tmp_path / "c", [ModelPart("model", run, base=base)])
    resumed = Model()
    load_parts(tmp_path / "c", [ModelPart("model", resumed)])
    assert torch.equal(resumed.embedding.weight, run.embedding.weight)


class Earlier(ModelPart):
    """Writes what earlier versions wrote: a CRC-32 of 16 values, here of the numbers from 0 on."""

    def capture(self):
        names = frozen_parameters(self._model)
        return super().capture() | {".frozen": dict.fromkeys(names, ["float32", [NUM_ROWS, WIDTH], "588c036e"])}


def test_checkpoints_with_samples_are_still_read(tmp_path):
    resumed = Model()
    resumed.embedding.weight.copy_(torch.arange(float(NUM_ROWS * WIDTH)).view(NUM_ROWS, WIDTH))
    save_parts(tmp_path / "c", [Earlier("model", resumed)])
    load_parts(tmp_path / "c", [ModelPart("model", resumed)])
    resumed.embedding.weight += 1
    with pytest.raises(CheckpointError, match="has other values"):
        load_parts(tmp_path / "c", [ModelPart("model", resumed)])


def quantized(changed=()):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    values = torch.randn(64, 64)
    for row, column, value in changed:
        values[row, column] = value
    module = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", compress_statistics=True)
    module.weight = bitsandbytes.nn.Params4bit(values, requires_grad=False, quant_type="nf4")
    return torch.nn.Sequential(module.to("cpu"), torch.nn.Linear(64, 2))


def test_a_quantized_base_is_found_to_be_the_same_or_another(tmp_path):
    save_parts(tmp_path / "c", [ModelPart("model", quantized())])
    load_parts(tmp_path / "c", [ModelPart("model", quantized())])
    for changed in ([(5, 7, 1.5)], [(5, 7, 100.0)]):  # another code, and another scale
        with pytest.raises(CheckpointError, match="has other values"):
            load_parts(tmp_path / "c", [ModelPart("model", quantized(changed))])
    known = unsaved_parameters(quantized(), (), None)["0.weight"]
    assert "cpu" in known.quantized_by
    assert "bitsandbytes" in known.quantized_by


def test_what_another_device_has_quantized_is_not_compared(tmp_path, monkeypatch):
    """Its bits may differ in rounding; the form still counts."""
    save_parts(tmp_path / "c", [ModelPart("model", quantized())])
    monkeypatch.setattr("trimtab.checkpoint.frozen_base._quantizer_of", lambda tensor: "another device")
    load_parts(tmp_path / "c", [ModelPart("model", quantized([(5, 7, 1.5)]))])


def test_kinds_of_tensors_without_memory_have_no_checksum():
    tensors = {"meta": torch.empty(3, device="meta"), "sparse": torch.eye(3).to_sparse()}
    assert {one.checksum for one in fingerprints_of(tensors).values()} == {""}
