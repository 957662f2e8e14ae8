"""The page of the command line: every command with its arguments and options, from typer's own declarations."""

from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import typer

from trimtab.cli.main import app

_VALUES = {str: "TEXT", int: "NUMBER", float: "NUMBER", Path: "PATH"}


def command_line_page() -> str:
    """One section for each command, in the order of `trimtab --help`."""
    root = typer.main.get_command(app)
    found = list(_commands("trimtab", root))
    links = "\n".join(f"| [`{name}`](#{name.replace(' ', '-')}) | {_cell(command.help)} |" for name, command in found)
    sections = "\n\n".join(_section(name, command) for name, command in found)
    return f"""# Command line

`trimtab --help` lists the commands, `trimtab COMMAND --help` shows what is below. [Exit codes](exit-codes.md).

| command | what it does |
|---|---|
{links}

{sections}
"""


def _commands(name: str, group: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for word, command in group.commands.items():
        full = f"{name} {word}"
        found += _commands(full, command) if hasattr(command, "commands") else [(full, command)]
    return found


def _section(name: str, command: Any) -> str:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    options = [parameter for parameter in shown if parameter.param_type_name == "option" and parameter.name != "help"]
    words = [_placeholder(argument) for argument in arguments]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *words])
    parts = [f"## {name}", command.help.strip(), f"```text\n{usage}\n```"]
    if arguments:
        rows = [f"| `{_metavar(argument)}` | {_cell(argument.help)} |" for argument in arguments]
        parts.append("| argument | meaning |\n|---|---|\n" + "\n".join(rows))
    if options:
        types = get_type_hints(command.callback)
        rows = [f"| {_names(option, types[option.name])} | {_meaning(option)} |" for option in options]
        parts.append("| option | meaning |\n|---|---|\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name).upper().strip("[]")


def _placeholder(argument: Any) -> str:
    word = _metavar(argument) + ("…" if argument.nargs == -1 else "")
    return word if argument.required else f"[{word}]"


def _names(option: Any, annotation: Any) -> str:
    kinds = [kind for kind in (get_args(annotation) or (annotation,)) if kind is not type(None)]
    kind = get_args(kinds[0])[0] if get_origin(kinds[0]) is list else kinds[0]
    value = "" if option.is_flag else f" {_VALUES.get(kind, 'TEXT')}" + (" …" if option.multiple else "")
    names = ", ".join(f"`{name}{value}`" for name in option.opts)
    return names + "".join(f" / `{name}`" for name in option.secondary_opts)


def _meaning(option: Any) -> str:
    text, value = _cell(option.help), option.default
    if option.required:
        return f"{text} Required."
    return text if value in (None, False, (), []) or callable(value) else f"{text} Default: `{value}`."


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")
