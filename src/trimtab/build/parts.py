"""What flows between the stages of a run."""

from dataclasses import dataclass
from typing import Any

import torch

from trimtab.data.sources import Rows
from trimtab.data.tasks.base import Task
from trimtab.data.tokens import TokenDataset


@dataclass(frozen=True)
class Data:
    """Rows, and the task that says what they are."""

    task: Task
    train: Rows
    eval: Rows | None


@dataclass(frozen=True)
class Tokens:
    """Rows as the model sees them."""

    train: TokenDataset
    eval: TokenDataset | None
    max_length: int


@dataclass(frozen=True)
class Loaded:
    """A model and its tokenizer, and the kernels that its norms run on."""

    model: torch.nn.Module
    tokenizer: Any
    kernels: str = "plain"
