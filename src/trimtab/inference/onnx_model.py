"""A model in an ONNX file, with the interface of a transformers model: it is called with tensors and returns logits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from trimtab.compress.onnx_file import MODEL_FILE, open_session, run_session
from trimtab.errors import ModelError
from trimtab.model.load import load_config


def is_onnx(folder: str | Path) -> bool:
    """Whether a folder contains an ONNX file and no weights in another form."""
    place = Path(folder)
    return (place / MODEL_FILE).is_file() and not any(place.glob("*.safetensors"))


class OnnxModel(torch.nn.Module):
    """Runs the ONNX file of an exported folder on the CPU.

    Args:
        folder: A folder with `model.onnx` and `config.json`.

    Raises:
        ModelError: The file is damaged.
        MissingDependency: onnxruntime is missing.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.config = load_config(str(folder))
        files = [file for file in Path(folder).iterdir() if file.name.startswith(MODEL_FILE)]
        self.file_bytes = sum(file.stat().st_size for file in files)
        self._session = open_session(Path(folder) / MODEL_FILE)
        self._inputs = {node.name for node in self._session.get_inputs()}
        # code that asks for the device of a model looks at a parameter
        self._placeholder = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def generation_config(self) -> Any:
        """Refused: the file has no key-value cache."""
        raise ModelError(
            "an ONNX file computes logits and does not generate text", "use the model it was exported from"
        )

    def get_output_embeddings(self) -> Any:
        """Return a head without weights: its number of rows is the size of an output."""
        return SimpleNamespace(weight=torch.empty(self._session.get_outputs()[0].shape[-1], 0))

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> Any:
        """Return the logits, as transformers' models do."""
        from transformers.modeling_outputs import SequenceClassifierOutput

        inputs = {"input_ids": input_ids}
        inputs["attention_mask"] = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if "token_type_ids" in self._inputs:
            inputs["token_type_ids"] = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        logits: Any = run_session(self._session, {name: value.long().cpu() for name, value in inputs.items()})
        return SequenceClassifierOutput(logits=logits)
