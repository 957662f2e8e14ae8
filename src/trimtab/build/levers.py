"""What `auto` means for the levers that save memory: a rule on the device and on sizes, never a timing."""

from typing import Any

import torch

from trimtab.build.model import adapter_settings
from trimtab.build.parts import Loaded, Tokens
from trimtab.data.tasks.base import Task
from trimtab.engine.engine import Engine
from trimtab.engine.placement import to_device
from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.model.chunked_loss import check_head, require_liger
from trimtab.model.linear_cross_entropy import logits_bytes
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import as_yaml

SMALL_LOGITS_BYTES = 128 * 2**20  # below it there is little to win


def choose_optimizer(recipe: Recipe, device: torch.device) -> str:
    """The optimizer; for weights of 4 bits on a GPU one whose state leaves the GPU if it has to."""
    if recipe.train.optimizer != "auto":
        return recipe.train.optimizer
    adapter = adapter_settings(recipe)
    is_qlora = adapter is not None and adapter.kind == "qlora"
    return "paged-adamw8bit" if is_qlora and device.type == "cuda" else "adamw"


def loads_kernels(kernels: str, optimizer: str, adapter: str) -> bool:
    """Whether kernels of Triton or bitsandbytes are loaded, which take memory of the GPU beside the allocator's."""
    return kernels == "liger" or "8bit" in optimizer or adapter.startswith("qlora")


def describe_adapter(recipe: Recipe) -> str:
    """The adapter in a few words."""
    adapter = adapter_settings(recipe)
    if adapter is None:
        return "none"
    return f"{adapter.kind}, rank {adapter.rank}" + (", rslora" if adapter.rslora else "")


def spelled(recomputed: Any) -> str:
    """What is computed again, as it is written in a recipe."""
    return recomputed if isinstance(recomputed, str) else as_yaml(recomputed)


def choose_loss(
    recipe: Recipe, task: Task, tokens: Tokens, loaded: Loaded, engine: Engine, num_rows: int, has_own_loss: bool
) -> str:
    """How the loss is computed: "plain", "chunked" or "liger".

    A model whose head does more than a matrix product is found out on one short row, before the first step.
    """
    wanted = recipe.memory.loss
    if task.loss_kind != "token-cross-entropy" or has_own_loss:
        if wanted in ("chunked", "liger"):
            why = "a loss of your own is computed from logits" if has_own_loss else f"task {task.name} has few logits"
            raise RecipeError(f"memory.loss: {wanted}: {why}", "leave it out")
        return "plain"
    if wanted == "plain":
        return wanted
    how = "chunked" if wanted == "auto" else wanted  # liger's kernel was measured and is not faster: docs/memory.md
    if wanted == "auto" and logits_bytes(num_rows, max(tokens.train.lengths), _vocabulary(loaded)) < SMALL_LOGITS_BYTES:
        return "plain"
    if how == "liger":
        require_liger()
    batch = to_device(task.collate([tokens.train[0]]), engine.device)
    with engine.autocast():
        problem = check_head(loaded.model, batch, how)
    if problem is None:
        return how
    if wanted != "auto":
        raise RecipeError(f"memory.loss: {wanted}: {problem}", "memory.loss: plain")
    say(f"the loss is computed from all logits, because {problem}")
    return "plain"


def _vocabulary(loaded: Loaded) -> int:
    bare: Any = loaded.model
    head = bare.get_output_embeddings()
    return int(head.weight.shape[0]) if head is not None else 0
