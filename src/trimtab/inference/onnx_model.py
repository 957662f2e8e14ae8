"""A model in ONNX files, with the interface of a transformers model: it is called with tensors and returns logits."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trimtab.compress.onnx_graphs import DECODER_FILE, MODEL_FILE
from trimtab.errors import ModelError
from trimtab.model.load import load_config


def is_onnx(folder: str | Path) -> bool:
    """Whether a folder contains ONNX files and no weights in another form."""
    place = Path(folder)
    has_files = any((place / name).is_file() for name in (MODEL_FILE, DECODER_FILE))
    return has_files and not any(place.glob("*.safetensors"))


class OnnxModel(torch.nn.Module):
    """Run the ONNX files of an exported folder on the CPU; `load_onnx_model` creates it.

    Args:
        folder: The folder.
        session: The opened file that computes logits.
    """

    def __init__(self, folder: str | Path, session: Any) -> None:
        torch.nn.Module.__init__(self)  # a subclass is also a class of transformers, whose layers are not built
        self.config = load_config(str(folder))
        self.file_bytes = sum(path.stat().st_size for path in Path(folder).iterdir() if ".onnx" in path.suffixes)
        self._session = session
        # code that reads the device of a model looks at a parameter
        self._placeholder = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def generation_config(self) -> Any:
        """Raise an error: the file has no key-value cache."""
        raise ModelError(
            "this ONNX file has no key-value cache and does not generate text", "export the model again: --to onnx"
        )

    def get_output_embeddings(self) -> Any:
        """Return a head without weights: its number of rows is the size of an output."""
        return SimpleNamespace(weight=torch.empty(self._session.get_outputs()[0].shape[-1], 0))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Any:
        """Return the logits, as transformers' models do."""
        from transformers.modeling_outputs import SequenceClassifierOutput

        inputs = {"input_ids": input_ids}
        inputs["attention_mask"] = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        inputs["token_type_ids"] = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        logits: Any = run_session(self._session, inputs)["logits"]
        return SequenceClassifierOutput(logits=logits)


def run_session(session: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run an ONNX file; return its outputs by name. Inputs that it does not have are left out."""
    names = [node.name for node in session.get_inputs()]
    outputs = session.run(None, {name: inputs[name].cpu().contiguous().numpy() for name in names})
    found = zip((node.name for node in session.get_outputs()), outputs, strict=True)
    return {name: torch.from_numpy(value) for name, value in found}
