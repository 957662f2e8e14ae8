"""Write a transformers model as an ONNX file, and check the file by running it in onnxruntime.

The graph has dynamic numbers of rows and tokens. Shapes: B rows, L tokens.
"""

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import ModelError, summarize_error
from trimtab.hardware.extras import require_extra
from trimtab.model.config import max_positions
from trimtab.model.hub import quiet_transformers

MODEL_FILE = "model.onnx"
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_OPSET = 18
# Sums of products in another order differ by some eps of the largest value, and layers amplify that: tiny models of
# four families differ by 8 eps at most, MiniLM by 13. A wrong graph differs by 1e5 eps and more.
_MAX_EPS = 1024


@dataclass(frozen=True)
class OnnxCheck:
    """How far the outputs of an ONNX file are from those of its torch model.

    Args:
        max_difference: Largest difference of two logits.
        max_logit: Largest magnitude of a logit of the torch model.
        num_shapes: Number of shapes that were compared.
    """

    max_difference: float
    max_logit: float
    num_shapes: int

    @property
    def limit(self) -> float:
        """The largest difference that rounding in fp32 explains."""
        return _MAX_EPS * torch.finfo(torch.float32).eps * self.max_logit


def require_onnx() -> None:
    """Raise an error if a package that writes or runs ONNX files is missing."""
    for name in _PACKAGES:
        require_extra(name, "an ONNX file")


def write_onnx(model: Any, tokenizer: Any, path: Path) -> None:
    """Write a model as an ONNX file from token ids to logits; weights of more than 2 GB are written to a second file.

    Args:
        model: A classifier, masked or causal language model in fp32 on the CPU.
        tokenizer: Its tokenizer, which decides whether the graph has an input for token types.
        path: The file to write.

    Raises:
        ModelError: The model cannot be expressed in ONNX.
        MissingDependency: A package is missing.
    """
    require_onnx()
    _refuse_others(model)
    inputs = example_inputs(model, tokenizer, 2, 8)
    any_size = torch.export.Dim.DYNAMIC
    with muted_exporters(), torch.no_grad():
        try:
            program = torch.onnx.export(
                _Logits(model).eval(),
                (),
                kwargs=inputs,
                input_names=list(inputs),
                output_names=["logits"],
                opset_version=_OPSET,
                dynamic_shapes={name: {0: any_size, 1: any_size} for name in inputs},
                dynamo=True,
                verbose=False,
            )
            assert program is not None  # with dynamo=True
            program.save(str(path))
        except OSError:
            raise
        except Exception as error:  # the exporter raises its own classes, and any that the traced model raises
            raise ModelError(
                f"{type(model).__name__} cannot be exported to ONNX: {summarize_error(error)}", "--to merged"
            ) from error


def quantize_onnx(source: Path, target: Path) -> None:
    """Write an ONNX file with 8-bit weights, whose activations are rounded to 8 bits when the model runs.

    Args:
        source: A file of `write_onnx`.
        target: The file to write.
    """
    require_onnx()
    import onnx

    with muted_exporters():
        from onnxruntime.quantization import QuantType, quantize_dynamic

        model = onnx.load(str(source))
        # shapes of intermediate results: those of transposed weights are outdated, which the quantizer refuses
        model.graph.ClearField("value_info")
        quantize_dynamic(
            model,
            target,
            weight_type=QuantType.QInt8,
            per_channel=True,
            # 7 bits: 8-bit products saturate on CPUs without VNNI, so the same file would give other answers there.
            # MiniLM on 256 reviews, KL: 0.0052; 8 bits on a CPU with VNNI 0.0039, 8 bits per tensor 0.0088.
            reduce_range=True,
            use_external_data_format=source.with_name(f"{source.name}.data").exists(),
        )


def open_session(path: Path) -> Any:
    """Open an ONNX file in onnxruntime, on the CPU, with as many threads as torch has.

    Raises:
        ModelError: The file is damaged, or is no ONNX file.
        MissingDependency: onnxruntime is missing.
    """
    require_extra("onnxruntime", "an ONNX file")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's classes have no base class of their own
        raise ModelError(
            f"{path} cannot be loaded by onnxruntime: {summarize_error(error)}", "export the model again"
        ) from error


def run_session(session: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run an ONNX model; returns its logits."""
    (logits,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return torch.from_numpy(logits)


@torch.no_grad()
def compare_onnx(session: Any, model: Any, tokenizer: Any) -> OnnxCheck:
    """Compare an ONNX model with its torch model on random tokens: one row and several, short and long, padded."""
    longest = min(max_positions(model) or 48, 48)
    shapes = [(1, 1), (1, longest // 2), (2, 8), (5, longest)]
    difference = largest = 0.0
    for num_rows, length in shapes:
        inputs = example_inputs(model, tokenizer, num_rows, length)
        expected = _Logits(model)(**inputs)
        found = run_session(session, inputs)
        if found.shape != expected.shape:
            raise ModelError(
                f"the ONNX file gives outputs of shape {tuple(found.shape)} where the model gives "
                f"{tuple(expected.shape)}; nothing was written",
                "--to merged",
            )
        gap = (found - expected).abs().max().item()
        difference = gap if not gap <= difference else difference  # keeps NaN
        largest = max(largest, expected.abs().max().item())
    return OnnxCheck(difference, largest, len(shapes))


def require_close(check: OnnxCheck) -> None:
    """Raise an error if an ONNX model differs from its torch model by more than rounding explains; NaN always does."""
    if not check.max_difference <= check.limit:
        raise ModelError(
            f"the ONNX file differs from the model: logits by up to {check.max_difference:.3g}, rounding explains "
            f"{check.limit:.3g}; nothing was written",
            "--to merged",
        )


def example_inputs(model: Any, tokenizer: Any, num_rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens with the inputs of the graph; all rows but the first are padded."""
    config, forward = model.config, inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(num_rows * 1000 + length)
    num_tokens = getattr(config.get_text_config(), "vocab_size", len(tokenizer))
    ids_BL = torch.randint(0, min(num_tokens, len(tokenizer)), (num_rows, length), generator=generator)
    mask_BL = torch.ones_like(ids_BL)
    if num_rows > 1 and length > 2:
        mask_BL[1:, -length // 3 :] = 0
        ids_BL = torch.where(mask_BL.bool(), ids_BL, torch.tensor(tokenizer.pad_token_id or 0))
    inputs = {"input_ids": ids_BL, "attention_mask": mask_BL}
    if "token_type_ids" in tokenizer.model_input_names and "token_type_ids" in forward:
        inputs["token_type_ids"] = torch.zeros_like(ids_BL)
    return inputs


class _Logits(torch.nn.Module):
    """A model that takes tensors alone and returns its logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        self._options = {"use_cache": False} if takes_cache else {}

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the logits."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, **types, **self._options)
        logits: torch.Tensor = outputs.logits
        return logits


def _refuse_others(model: Any) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(
            f"{type(model).__name__} is an encoder-decoder: its two parts would be two ONNX files, which is not "
            "supported",
            "--to merged",
        )


@contextmanager
def muted_exporters() -> Iterator[None]:
    """Suppress warnings and log lines of the exporters inside, and restore the settings on exit."""
    root, null = logging.getLogger(), logging.NullHandler()
    before = root.manager.disable
    root.addHandler(null)  # without a handler, a call of logging.warning() would install a visible one for good
    logging.disable(logging.WARNING)
    try:
        with quiet_transformers():
            yield
    finally:
        logging.disable(before)
        root.removeHandler(null)
