"""How a model computes its steps, as part of a checkpoint: whether compiling or capturing has failed."""

from collections.abc import Callable
from typing import Any

from trimtab.model.captured_step import CapturedMicroBatches
from trimtab.model.compiled_blocks import CompiledBlocks


class ExecutionState:
    """The state of compiled blocks and of captured micro-batches; a run has one or both."""

    def __init__(self, blocks: CompiledBlocks | None, captured: CapturedMicroBatches | None) -> None:
        self._blocks, self._captured = blocks, captured

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        state = {} if self._blocks is None else self._blocks.state_dict()
        return state if self._captured is None else state | {"captured": self._captured.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states that both runs have: a run may have compiled before, and capture now."""
        of_blocks = {key: value for key, value in state.items() if key != "captured"}
        if self._blocks is not None and of_blocks:
            self._blocks.load_state_dict(of_blocks)
        if self._captured is not None and "captured" in state:
            self._captured.load_state_dict(state["captured"])

    def undo_point(self) -> Callable[[], None]:
        """Return a function that undoes `load_state_dict`, which never removes a failure."""
        owners: list[Any] = [owner for owner in (self._blocks, self._captured) if owner is not None]
        before = [(owner, owner.failure) for owner in owners]

        def undo() -> None:
            for owner, failure in before:
                owner.failure = failure

        return undo
