"""The time that compilation takes, and whether a run is long enough for it."""

import torch

from trimtab.model.blocks import blocks_of

# seconds to compile one kind of block without a cache: 10 s for BERT, 9 s for Llama, with LoRA at most 12 s
_KIND_S = 12.0
_SIZE_S = 0.02  # seconds for each block to run and capture one micro-batch size; 12 blocks of BERT-base took 0.27 s
_FEWEST_STEPS = 200  # in fewer steps, compiling takes longer than it saves
_FIRST_CAPABILITY = (8, 0)  # older GPUs compute so slowly that they rarely wait for Python


def compile_seconds(model: torch.nn.Module) -> float:
    """Seconds to compile the blocks of a model before the first step."""
    return _KIND_S * len({type(block) for _, block in blocks_of(model)})


def capture_seconds(model: torch.nn.Module, num_sizes: int) -> float:
    """Seconds to capture sizes of micro-batches before the first step."""
    return _SIZE_S * num_sizes * len(blocks_of(model))


def compiling_may_pay(num_steps: int | None, capability: tuple[int, int] | None, *, has_triton: bool) -> bool:
    """Whether compiled blocks are worth a prediction.

    Args:
        num_steps: Optimizer steps of the run; None if unknown.
        capability: Compute capability of an NVIDIA GPU; None for other devices.
        has_triton: Whether Triton is installed.
    """
    is_long = num_steps is None or num_steps >= _FEWEST_STEPS
    return is_long and has_triton and capability is not None and capability >= _FIRST_CAPABILITY
