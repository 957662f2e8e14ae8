"""The TensorBoard tracker of `Engine(log_with="tensorboard")`: a thin adapter around torch's `SummaryWriter`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import RecipeError


class TensorBoardTracker:
    """Writes the values of a run as TensorBoard events, as Accelerate's tracker does.

    Args:
        folder: The folder that contains the events of each project; None is the working directory.
    """

    name = "tensorboard"

    def __init__(self, folder: Path | None) -> None:
        if find_spec("tensorboard") is None:
            raise RecipeError('log_with="tensorboard" needs the package tensorboard', "pip install tensorboard")
        self._folder = folder or Path(".")
        self._settings: dict[str, Any] = {}
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The `SummaryWriter`, for images and histograms; None before `init_trackers` and on other processes."""
        return self.writer

    def set_up(self, **settings: Any) -> None:
        """Take arguments of `SummaryWriter`."""
        self._settings = settings

    def start(self, project_name: str, config: dict[str, Any] | None) -> None:
        """Open the writer and log the settings of the run."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self._folder / project_name, **self._settings)
        if config:
            usual = {
                key: value if isinstance(value, int | float | str) else str(value) for key, value in config.items()
            }
            self.writer.add_hparams(usual, metric_dict={})

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Write numbers as scalars, texts as texts, and a dict of numbers as one chart."""
        for key, value in values.items():
            if isinstance(value, str):
                self.writer.add_text(key, value, global_step=step)
            elif isinstance(value, dict):
                self.writer.add_scalars(key, value, global_step=step)
            else:
                number = value.item() if isinstance(value, torch.Tensor) else value
                self.writer.add_scalar(key, number, global_step=step)
        self.writer.flush()

    def finish(self) -> None:
        """Close the writer."""
        if self.writer is not None:
            self.writer.close()
