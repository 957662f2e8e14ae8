"""Write a transformers model as ONNX files and open them in onnxruntime."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trimtab.compress.onnx_graphs import Graph, flat, graphs_of
from trimtab.errors import ModelError, summarize_error
from trimtab.hardware.extras import require_extra
from trimtab.model.hub import quiet_transformers

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_OPSET = 18


def require_onnx() -> None:
    """Raise an error if a package that writes or runs ONNX files is missing."""
    for name in _PACKAGES:
        require_extra(name, "an ONNX file")


def write_onnx(model: Any, tokenizer: Any, folder: Path) -> list[str]:
    """Write a model as ONNX files (see `onnx_graphs`); weights of more than 2 GB are written to a second file.

    Args:
        model: A model in fp32 on the CPU.
        tokenizer: Its tokenizer, which decides whether a graph has an input for token types.
        folder: Where to write.

    Returns:
        The names of the files.

    Raises:
        ModelError: The model cannot be expressed in ONNX.
        MissingDependency: A package is missing.
    """
    require_onnx()
    with muted_exporters(), torch.no_grad():
        try:
            graphs = graphs_of(model.eval(), tokenizer)
            for graph in graphs:
                _write_graph(graph, folder / graph.file)
        except OSError:
            raise
        except Exception as error:  # the exporter raises its own classes, and any that the traced model raises
            cause: BaseException = error
            # the last line names what is missing, the first one says how to report it
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise ModelError(
                f"{type(model).__name__} cannot be exported to ONNX: {summarize_error(cause)}", "--to merged"
            ) from error
    return [graph.file for graph in graphs]


def _write_graph(graph: Graph, path: Path) -> None:
    any_size = torch.export.Dim.DYNAMIC
    program = torch.onnx.export(
        graph.module.eval(),
        (),
        kwargs=graph.example,
        input_names=[name for name, _ in flat(graph.example)],
        output_names=graph.outputs,
        opset_version=_OPSET,
        dynamic_shapes={  # rows and tokens: dimensions 0 and 1 of token ids, 0 and 2 of keys and values
            name: {0: any_size, 1: any_size}
            if isinstance(value, torch.Tensor)
            else [{0: any_size, 2: any_size}] * len(value)
            for name, value in graph.example.items()
        },
        dynamo=True,
        verbose=False,
    )
    assert program is not None  # with dynamo=True
    program.save(str(path))


def quantize_onnx(source: Path, target: Path) -> None:
    """Write an ONNX file with 8-bit weights; activations are rounded to 8 bits when the model runs.

    Args:
        source: A file of `write_onnx`.
        target: The file to write.
    """
    require_onnx()
    import onnx

    with muted_exporters():
        from onnxruntime.quantization import QuantType, quantize_dynamic

        model = onnx.load(str(source))
        # shapes of intermediate results: those of transposed weights are outdated, which the quantizer rejects
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
        ModelError: The file is damaged, or not an ONNX file.
        MissingDependency: onnxruntime is missing.
    """
    require_extra("onnxruntime", "an ONNX file")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's classes have no common base class
        raise ModelError(
            f"{path} cannot be loaded by onnxruntime: {summarize_error(error)}", "export the model again"
        ) from error


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
