"""Trace compiled blocks: what torch.compile would keep for backward, and the kernels that it would generate.

AOTAutograd traces forward and backward of a block into one graph, with inductor's decompositions, and its partitioner
decides which values forward keeps and which backward recomputes. Both work on `meta` tensors and take about half a
second, so graphs are reused for equal blocks and inputs. The graphs run in AOTAutograd's own autograd function, as
fused kernels (`fused_kernels.py`). A block without such a graph is predicted uncompiled, and a message says so.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from trimtab.errors import summarize_error
from trimtab.log import log_info_once, unmuted
from trimtab.model import compiled_blocks
from trimtab.planner.trace.cuda import Gpu
from trimtab.planner.trace.fused_kernels import FusedGraph
from trimtab.planner.trace.recorder import Recorder
from trimtab.planner.trace.thread_patches import stand_ins_on_this_thread
from trimtab.techniques.base import Patch

_MOST = 256  # graphs that are kept
_graphs: dict[Any, Callable[..., Any] | str] = {}  # a remark instead of a graph: this block cannot be traced
_EMPTY = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_NUMBERS_OF_BLOCKS = ("layer_idx", "layer_id", "layer_index")  # blocks that differ only in these share graphs


class NotTraceable(Exception):  # noqa: N818 (the cure is to predict the uncompiled block)
    """The graph of a block does not show what a GPU would compute."""


def compiled_block_patches(recorder: Recorder, gpu: Gpu) -> Iterator[Patch]:
    """Replacements that let compiled blocks of a traced model run as their graphs."""

    def run(blocks: Any, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _run_compiled(own, args, kwargs, recorder, gpu)

    yield compiled_blocks.CompiledBlocks, "run", run
    yield compiled_blocks, "_is_observed", lambda: False  # the recorder is also a dispatch mode


def _run_compiled(
    own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Recorder, gpu: Gpu
) -> Any:
    block: torch.nn.Module = own.__self__  # type: ignore[attr-defined]
    leaves, form = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    named = dict([*block.named_parameters(), *block.named_buffers()])
    inputs = [*named.values(), *tensors]
    key = own.__code__, _key_of(block, leaves, form, inputs, gpu)
    if key not in _graphs:
        if len(_graphs) >= _MOST:
            _graphs.clear()
        _graphs[key] = _graph_of(own, list(named), leaves, form, inputs, recorder)
    graph = _graphs[key]
    if not isinstance(graph, str):
        return graph(*inputs)
    recorder.remarks[graph] = None
    with unmuted():
        log_info_once(graph)
    return own(*args, **kwargs)


def _key_of(block: torch.nn.Module, leaves: list[Any], form: Any, inputs: list[torch.Tensor], gpu: Gpu) -> Any:
    """Everything that determines the graph of a block."""
    addresses = [id(tensor) for tensor in inputs]
    shapes = tuple((tuple(x.shape), x.stride(), x.dtype, x.requires_grad, addresses.index(id(x))) for x in inputs)
    constants = tuple(leaf if isinstance(leaf, _PLAIN) else type(leaf) for leaf in leaves)
    switches: Any = torch.backends.cuda
    state = (
        torch.is_autocast_enabled("meta"),
        torch.get_autocast_dtype("meta"),
        torch.get_default_dtype(),
        switches.flash_sdp_enabled(),
        switches.mem_efficient_sdp_enabled(),
        switches.math_sdp_enabled(),
    )
    settings = tuple(_settings_of(module, is_block=module is block) for module in block.modules())
    return settings, shapes, constants, str(form), state, gpu


def _settings_of(module: torch.nn.Module, is_block: bool) -> tuple[Any, ...]:
    """Numbers, strings and functions of a module: techniques replace the forward of single modules.

    Their changes to the forward of the block itself, such as recomputation, are outside the graph.
    """
    found: list[Any] = [type(module), getattr(getattr(module, "config", None), "_attn_implementation", None)]
    for name, value in vars(module).items():
        if isinstance(value, _PLAIN) and name not in _NUMBERS_OF_BLOCKS:
            found.append((name, value))
        elif callable(value) and not is_block:
            found.append((name, getattr(value, "__code__", type(value))))
    return tuple(found)


def _graph_of(
    own: Callable[..., Any],
    names: list[str],
    leaves: list[Any],
    form: Any,
    inputs: list[torch.Tensor],
    recorder: Recorder,
) -> Callable[..., Any] | str:
    """The forward of a block as a function of its parameters, buffers and inputs; a remark if it cannot be traced."""
    block: torch.nn.Module = own.__self__  # type: ignore[attr-defined]
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    held = [(own, block, [None if known else leaf for leaf, known in zip(leaves, is_tensor, strict=True)])]

    def forward(*values: torch.Tensor) -> Any:
        forward_of_block, module, constants = held[0]
        given = iter(values[len(names) :])
        filled = [next(given) if known else leaf for leaf, known in zip(constants, is_tensor, strict=True)]
        args, kwargs = pytree.tree_unflatten(filled, form)
        with _reparametrize_module(module, dict(zip(names, values, strict=False))):
            return forward_of_block(*args, **kwargs)

    try:
        compiled = _partitioned(forward, len(names))
        with _while_tracing(recorder):
            compiled(*inputs)  # traces and partitions
    except Exception as error:  # errors of the tracer, of an operation without a rule, or of the partitioner
        return f"compiled {type(block).__name__} is predicted as if it were not compiled: {summarize_error(error)}"
    held.clear()  # only the graphs are needed from now on
    return compiled


@contextmanager
def _while_tracing(recorder: Recorder) -> Iterator[None]:
    """Hide the first run of a graph from the recorder and from gradient checkpointing around the block."""
    with (
        _disable_current_modes(),
        recorder.paused(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        stand_ins_on_this_thread([(torch.compiler, "is_compiling", lambda: True)]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _partitioned(forward: Callable[..., Any], num_weights: int) -> Callable[..., Any]:
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(joint: torch.fx.GraphModule, values: Any, **options: Any) -> Any:
        unknown = next((node.name for node in joint.graph.nodes if _makes_nothing(node)), None)
        if unknown is not None:
            raise NotTraceable(f"a kernel in it is known by its results only ({unknown})")
        # torch.compile treats weights as inputs that stay alive: keeping one costs nothing, keeping a copy of it does
        options["static_lifetime_input_indices"] = list(range(num_weights))
        return min_cut_rematerialization_partition(joint, values, compiler="inductor", **options)

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return FusedGraph(gm.graph)

    return aot_function(
        forward,
        compile_graph,
        compile_graph,
        partition_fn=partition,
        decompositions=_decompositions(),
        num_params_buffers=num_weights,
    )


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's decompositions, with the options of compiled blocks: whether fused kernels draw random numbers.

    Inductor's settings apply to all threads, so they are not changed to make the choice.
    """
    from torch._inductor import decomposition

    draws_as_eager = compiled_blocks.inductor_options().get("fallback_random", False)
    return decomposition.decompositions if draws_as_eager else decomposition.fast_random_decomps()


def _makes_nothing(node: torch.fx.Node) -> bool:
    """Whether a node is the result of a kernel that does not run on `meta`: such kernels are opaque to a compiler."""
    return getattr(node.target, "_overloadpacket", None) in _EMPTY and bool(node.users)
