"""The exceptions of trimtab. Each says what was wrong and what cures it, and knows its exit code.

TrimtabError                  1   anything of ours
├── UserError                 2   a mistake that the user can mend: what was wrong, and the cure
│   ├── PrepareError              something that cannot be prepared, or was used before it was
│   ├── LossError                 a loss that cannot be differentiated, or a weight that makes no sense
│   ├── CheckpointError           a folder that is no checkpoint of this run, or a value that cannot be saved
│   ├── RecipeError               a recipe, or a setting of the engine, that is not valid
│   ├── DataError                 rows, columns or labels that cannot be used
│   ├── ModelError                a model or tokenizer that cannot be loaded or used
│   │   └── TraceError            a training step that cannot be traced, so that nothing can be predicted of it
│   └── MissingDependency         an optional package that is not installed
├── PeerError                 1   another process of the run is gone, hung, or does something else
├── LossNotFinite             1   a loss or gradient that is NaN or infinite
├── DoesNotFit                3   no way to run within the memory given
└── Stopped                  75   stopped by a signal or a time limit; can be resumed
"""

_LONGEST_LINE = 200  # of other libraries' messages, some of which are essays


def in_one_line(error: Exception) -> str:
    """The kind of an exception and the first line of its message."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    line = lines[0] if len(lines[0]) <= _LONGEST_LINE else f"{lines[0][:_LONGEST_LINE]} …"
    return f"{type(error).__name__}: {line}"


class TrimtabError(Exception):
    """Base of everything that trimtab raises on purpose."""

    exit_code = 1


class UserError(TrimtabError):
    """A mistake that the user can mend.

    Args:
        problem: What was wrong, with the value found.
        cure: The key, call or command that mends it.
    """

    exit_code = 2

    def __init__(self, problem: str, cure: str = "") -> None:
        super().__init__(f"{problem}\n  cure: {cure}" if cure else problem)
        self.problem = problem
        self.cure = cure


class PrepareError(UserError):
    """Something that cannot be prepared, or was used before it was prepared."""


class LossError(UserError):
    """A loss that cannot be differentiated, or a weight that makes no sense."""


class CheckpointError(UserError):
    """A folder that is no checkpoint of this run, or a value that cannot be saved."""


class RecipeError(UserError):
    """A recipe, or a setting of the engine, that is not valid."""


class DataError(UserError):
    """Rows, columns or labels that cannot be used."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded or used."""


class TraceError(ModelError):
    """A training step that cannot be traced, so that nothing can be predicted of it.

    Args:
        model: The class of the model.
        cause: What tracing failed with.
    """

    def __init__(self, model: str, cause: Exception) -> None:
        super().__init__(
            f"no plan can be made for {model}: this step cannot be traced ({in_one_line(cause)})",
            "train without a plan: trimtab train does so by itself, and halves the micro-batch where a GPU runs out of "
            "memory; memory.micro_batch and memory.gradient_checkpointing set what a plan would have chosen",
        )


class MissingDependency(UserError):
    """An optional package that is not installed."""


class PeerError(TrimtabError):
    """Another process of the run is gone, hung, or does something else."""


class LossNotFinite(TrimtabError):
    """A loss or gradient that is NaN or infinite."""


class DoesNotFit(TrimtabError):
    """No way to run within the memory given."""

    exit_code = 3


class Stopped(TrimtabError, SystemExit):
    """Stopped by a signal; the run can be resumed. A script that does not catch it ends with its exit code."""

    exit_code = 75

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = self.exit_code
