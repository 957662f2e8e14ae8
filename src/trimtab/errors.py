"""The exceptions of trimtab. Each says what was wrong and what cures it, and knows its exit code.

TrimtabError                  1   anything of ours
├── UserError                 2   a mistake that the user can mend: what was wrong, and the cure
│   ├── PrepareError              something that cannot be prepared, or was used before it was
│   ├── LossError                 a loss that cannot be differentiated, or a weight that makes no sense
│   ├── CheckpointError           a folder that is no checkpoint of this run, or a value that cannot be saved
│   ├── RecipeError               a recipe, or a setting of the engine, that is not valid
│   ├── DataError                 rows, columns or labels that cannot be used
│   ├── ModelError                a model or tokenizer that cannot be loaded or used
│   └── MissingDependency         an optional package that is not installed
├── PeerError                 1   another process of the run is gone, hung, or does something else
├── LossNotFinite             1   a loss or gradient that is NaN or infinite
├── DoesNotFit                3   no way to run within the memory given
└── Stopped                  75   stopped by a signal or a time limit; can be resumed
"""


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
