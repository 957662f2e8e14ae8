"""The pages of the Python API: the public names of `trimtab`, and the classes that its functions return."""

import inspect
import re
from enum import Enum
from typing import Any, get_type_hints

import trimtab
from docstrings import markdown_of

WIDTH = 100


def python_page() -> str:
    """Every public name but `Engine`, which has a page of its own."""
    names = [name for name in trimtab.__all__ if name not in ("Engine", "__version__")]
    objects = {name: getattr(trimtab, name) for name in names}
    functions = {name: value for name, value in objects.items() if inspect.isfunction(value)}
    returned = {kind.__name__: kind for value in functions.values() if (kind := _returned_class(value))}
    classes = {name: value for name, value in objects.items() if inspect.isclass(value)} | returned
    parts = [_function(name, value, "##") for name, value in functions.items()]
    parts += [_class(name, value) for name, value in sorted(classes.items())]
    sections = "\n\n".join(parts)
    rows = [_row(name, value, name.lower()) for name, value in functions.items()]
    # The headings of `plan` and of the class `Plan` differ in case only: the second one gets a number.
    for name, value in sorted(classes.items()):
        rows.append(_row(name, value, name.lower() + "_1" * (name.lower() in functions)))
    summary = "\n".join(rows)
    return f"""# Python

`import trimtab` is cheap: each name below imports its module at its first use. `trimtab.__version__` is
{trimtab.__version__!r}. Your own loops use [`Engine`](engine.md); exceptions are listed with their
[exit codes](exit-codes.md). To begin with, read [`fit`](#fit), [`load`](#load), [`plan`](#plan) and
[`Recipe`](#recipe).

| name | what it is |
|---|---|
{summary}

{sections}
"""


def engine_page() -> str:
    """`Engine` and its methods."""
    methods = "\n\n".join(_member(name, value, "##") for name, value in _members(trimtab.Engine))
    return f"""# Engine

Accelerate's methods, for your own loop: [the tutorial](../tutorials/own-loop.md),
[Accelerate's scripts](../accelerate.md). Most loops need these:

| in the loop | method |
|---|---|
| before it | [`prepare`](#prepare) model, optimizer, loader and scheduler; [`init_trackers`](#init_trackers) |
| a step | [`accumulate`](#accumulate), [`backward`](#backward), [`clip_grad_norm_`](#clip_grad_norm_); \
with CUDA graphs [`forward_backward`](#forward_backward) |
| evaluation | [`gather_for_metrics`](#gather_for_metrics), [`log`](#log) |
| checkpoints | [`save_state`](#save_state), [`load_state`](#load_state) |
| the result | [`save_model`](#save_model), [`unwrap_model`](#unwrap_model), [`end_training`](#end_training) |
| several processes | [`is_main_process`](#is_main_process), [`wait_for_everyone`](#wait_for_everyone), \
[`print`](#print) |

All of it:

{_fenced("Engine", trimtab.Engine)}

{markdown_of(trimtab.Engine.__doc__)}

{methods}
"""


def _row(name: str, value: Any, anchor: str) -> str:
    """A line of the table of names: a link to the section, and the first paragraph of it."""
    paragraph = markdown_of(value.__doc__).partition("\n\n")[0]
    return f"| [`{name}`](#{anchor}) | {' '.join(paragraph.split())} |"


def _returned_class(function: Any) -> type | None:
    kind = get_type_hints(function).get("return")
    return kind if inspect.isclass(kind) and kind.__module__.startswith("trimtab.") else None


def _class(name: str, kind: type) -> str:
    parts = [f"## {name}"]
    if issubclass(kind, Enum):
        values = "\n".join(f"- `{member.name}`" for member in kind)
        return "\n\n".join([*parts, markdown_of(kind.__doc__), values])
    if name == "Recipe":
        parts.append('```py\nRecipe(model=..., data={"train": ...}, train={"epochs": 3}, ...)\n```')
        parts.append("Its keys are those of a [recipe file](../recipe.md), sections as dictionaries.")
        return "\n\n".join([*parts, markdown_of(kind.__doc__.partition("\n\nKeys:")[0])])
    if not issubclass(kind, BaseException):
        parts.append(_fenced(name, kind))
    parts.append(markdown_of(kind.__doc__))
    parts += [_member(f"{name}.{member}", value, "###") for member, value in _members(kind)]
    return "\n\n".join(part for part in parts if part)


def _member(name: str, value: Any, level: str) -> str:
    if isinstance(value, property):
        return f"{level} {name}\n\n{markdown_of(value.__doc__)}"
    return _function(name, value, level)


def _members(kind: type) -> list[tuple[str, Any]]:
    """Public methods and properties that trimtab defines: those of the class itself, then those of its bases."""
    found: dict[str, Any] = {}
    for parent in kind.__mro__:
        if parent.__module__.startswith("trimtab.") and not issubclass(parent, BaseException):
            found |= {name: value for name, value in vars(parent).items() if name not in found}
    members = [(name, value) for name, value in found.items() if not name.startswith("_")]
    members = [(name, getattr(value, "__func__", value)) for name, value in members]
    return [(name, value) for name, value in members if inspect.isfunction(value) or isinstance(value, property)]


def _function(name: str, function: Any, level: str) -> str:
    return "\n\n".join(
        part for part in (f"{level} {name}", _fenced(name, function), markdown_of(function.__doc__)) if part
    )


def _fenced(name: str, value: Any) -> str:
    """The signature, one argument per line where it is long."""
    signature = inspect.signature(value)
    if inspect.isclass(value):
        signature = signature.replace(return_annotation=inspect.Signature.empty)
    given = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    text = _plain(f"{name}{signature.replace(parameters=given)}")
    if len(text) > WIDTH:
        inside = _plain(",\n    ".join(_arguments(given)))
        text = f"{name}(\n    {inside},\n)" + _plain(str(signature).rpartition(")")[2])
    return f"```py\n{text}\n```"


def _arguments(given: list[inspect.Parameter]) -> list[str]:
    found, is_marked = [], False
    for parameter in given:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_marked:
            found.append("*")
            is_marked = True
        is_marked |= parameter.kind is parameter.VAR_POSITIONAL
        found.append(str(parameter))
    return found


def _plain(text: str) -> str:
    """Annotations without the modules that their names come from."""
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_]\w*)", "", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations that are only imported for type checkers
    return text.replace("<factory>", "...")
