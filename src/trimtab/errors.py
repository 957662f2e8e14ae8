"""Exceptions of trimtab and their exit codes.

TrimtabError                  1   base class of all of them
├── UserError                 2   a mistake that the user can fix; the message names the problem and the cure
│   ├── PrepareError              an object that cannot be prepared, or that was used before `prepare`
│   ├── LossError                 a loss that cannot be differentiated, or an invalid weight of a loss
│   ├── CheckpointError           a folder that is not a checkpoint of this run, or a value that cannot be saved
│   ├── RecipeError               an invalid recipe, or an invalid setting of the engine
│   ├── DataError                 rows, columns or labels that cannot be used
│   ├── ModelError                a model or tokenizer that cannot be loaded or used
│   │   └── TraceError            a training step that cannot be traced, so its memory and time are not predicted
│   └── MissingDependency         an optional package that is not installed
├── PeerError                 1   another process of the run died, hangs or executes something else
├── LossNotFinite             1   a loss or gradient that is NaN or infinite
├── DoesNotFit                3   the run does not fit into the given memory
└── Stopped                  75   stopped by a signal or a time limit; the run can be resumed
"""

import os
import re
import shlex

from trimtab.addresses import redact

__all__ = [
    *("CheckpointError", "DataError", "DoesNotFit", "LossError", "LossNotFinite", "MissingDependency", "ModelError"),
    *("PeerError", "PrepareError", "RecipeError", "Stopped", "TraceError", "TrimtabError", "UserError"),
]

_MAX_LINE_LENGTH = 200  # messages of other libraries can be several pages long
_RESUME = re.compile(r"\btrimtab resume (?P<run>\S+?)(?P<sets>(?: --set [^\s;,)]+)*)(?=[;,.)]?(?:\s|$))(?! --)")
_COMMAND = re.compile(r"\b(?<![\w!.`])(?:trimtab|pip|hf) [a-z][^;\n]*")
_OPTION = re.compile(r"--(?P<name>[a-z][a-z-]*)(?: (?P<value>[^\s;,)]+))?")
_SWITCHES = {"resume", "fresh", "overwrite", "trust-remote-code"}  # options without a value


def summarize_error(error: BaseException) -> str:
    """Summarize an exception as its class name and the first line of its message."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    line = lines[0] if len(lines[0]) <= _MAX_LINE_LENGTH else f"{lines[0][:_MAX_LINE_LENGTH]} …"
    return f"{type(error).__name__}: {line}"


def as_argument(path: str | os.PathLike[str]) -> str:
    """Quote a path, where needed, for a command that the user pastes into a shell."""
    return shlex.quote(os.fspath(path))


def in_python(message: str) -> str:
    """Translate the commands and options in a message to what is written in a notebook."""

    def as_call(found: re.Match[str]) -> str:
        sets = found["sets"].split(" --set ")[1:]
        return f'trimtab.resume("{found["run"]}"{f", sets={sets}" if sets else ""})'

    def as_argument_of_a_call(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"] or ""
        if name in _SWITCHES:
            return f"{name.replace('-', '_')}=True{value and ' '}{value}"
        if name == "set":
            key, _, value = value.partition("=")
            section, _, key = key.rpartition(".")
            setting = f'{section}={{"{key}": {_literal(value)}}}' if section else f"{key}={_literal(value)}"
            return f"Recipe({setting})"
        return f"{'from_step' if name == 'from' else name.replace('-', '_')}={_literal(value)}"

    parts, end = [], 0
    message = _RESUME.sub(as_call, message)
    for command in _COMMAND.finditer(message):
        parts += [_OPTION.sub(as_argument_of_a_call, message[end : command.start()]), f"!{command[0]}"]
        end = command.end()
    return "".join([*parts, _OPTION.sub(as_argument_of_a_call, message[end:])])


def _literal(text: str) -> str:
    words = {"true": "True", "false": "False", "null": "None"}
    return words.get(text) or (text if re.fullmatch(r"…|[-+.\de]*\d[-+.\de]*|\[.*", text) else f'"{text}"')


class TrimtabError(Exception):
    """Base class of all exceptions that trimtab raises on purpose; credentials in URLs are removed from its message."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: IPython calls this in place of printing a traceback."""
        return [f"{type(self).__name__}: {in_python(str(self))}"]


class UserError(TrimtabError):
    """A mistake that the user can fix.

    Args:
        problem: What is wrong, with the value found.
        cure: The key, call or command that fixes it.
    """

    exit_code = 2

    def __init__(self, problem: str, cure: str = "") -> None:
        super().__init__(f"{problem}\n  cure: {cure}" if cure else problem)
        self.problem = redact(problem)
        self.cure = redact(cure)


class PrepareError(UserError):
    """An object that cannot be prepared, or that was used before `prepare`."""


class LossError(UserError):
    """A loss that cannot be differentiated, or an invalid weight of a loss."""


class CheckpointError(UserError):
    """A folder that is not a checkpoint of this run, or a value that cannot be saved."""


class RecipeError(UserError):
    """An invalid recipe, or an invalid setting of the engine."""


class DataError(UserError):
    """Rows, columns or labels that cannot be used."""


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded or used."""


class TraceError(ModelError):
    """A training step that cannot be traced, so its memory and time are not predicted.

    Args:
        model: Class name of the model.
        cause: Exception raised while tracing.
    """

    def __init__(self, model: str, cause: Exception) -> None:
        super().__init__(
            f"no plan for {model}: its training step cannot be traced ({summarize_error(cause)})",
            "set memory.budget (a size, or auto): `trimtab train` then measures what fits, with trial steps on the "
            "device; without a budget it halves the micro-batch size when a GPU runs out of memory; or set "
            "memory.micro_batch and the other keys of memory yourself",
        )


class MissingDependency(UserError):
    """An optional package that is not installed."""


class PeerError(TrimtabError):
    """Another process of the run died, hangs or executes something else."""


class LossNotFinite(TrimtabError):
    """A loss or gradient that is NaN or infinite."""


class DoesNotFit(TrimtabError):
    """The run does not fit into the given memory."""

    exit_code = 3


class Stopped(TrimtabError, SystemExit):
    """A run was stopped by a signal or a time limit; it can be resumed.

    It is a `SystemExit`, so a script that does not catch it exits with code 75 and without a traceback.
    """

    exit_code = 75

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = self.exit_code
