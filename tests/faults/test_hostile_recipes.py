"""Hostile recipes and command lines: each ends in a message or works, and no setting is ignored in silence."""

import os
import random
import re
from pathlib import Path

import pytest
import yaml
from hostile_input import VALUES, Call, damage_bytes, damage_json, run_all

from tiny_runs import reviews, write_csv
from trimtab.recipe.schema import Recipe
from trimtab.recipe.schema_keys import keys_of

SEED = int(os.environ.get("TRIMTAB_FUZZ_SEED", "0"))
COUNT = int(os.environ.get("TRIMTAB_FUZZ_COUNT", "60"))
ADAPTERS = ("lora", "qlora", "ia3", "prompt", "prefix", "side")
WORDS = [
    *("auto", "none", "lora", "8bit", "0", "-1", "1e300", "nan", "inf", "9223372036854775808", "10%", "-5%", "101%"),
    *("", " ", "\t", "../x", "~", "~nobody/x", "/dev/null", "/proc/self/mem", "a" * 300, "é\u202e", "{}", "[", "null"),
    *("=", "=x", "x=", "train.lr", "train.lr=", "train.lr=[1", "data=5", "model={}", "a.b.c=1", "seed=nan", "--"),
    *("best:", "models:/", "1GiB", "-1GiB", "1e999GiB", "1s", "-3h", "9" * 400 + "h", "step-", "step--1", "\x1b[2J"),
]


@pytest.fixture
def base(tiny, tmp_path):
    data = write_csv(tmp_path / "reviews.csv", reviews(24))
    return {"model": tiny.folder("bert"), "data": {"train": str(data)}, "train": {"max_steps": 1, "batch_size": 4}}


def with_value(base: dict, dotted: str, value: object) -> dict:
    """A recipe with one more key."""
    recipe = {name: dict(part) if isinstance(part, dict) else part for name, part in base.items()}
    section, _, name = dotted.rpartition(".")
    if not section:
        return recipe | {dotted: value}
    outer = recipe.get(section)
    recipe[section] = (outer if isinstance(outer, dict) else {}) | {name: value}
    return recipe


def recipes(base: dict, draw: random.Random):
    """Recipes with an odd value of one key, with the key that they set; or damaged in another way."""
    keys = [key.dotted for key in keys_of(Recipe) if key.dotted.count(".") < 2]
    while True:
        kind = draw.random()
        if kind < 0.65:
            key = draw.choice(keys)
            start = base | ({"adapter": {"kind": draw.choice(ADAPTERS)}} if key.startswith("adapter.") else {})
            yield key, yaml.safe_dump(with_value(start, key, draw.choice(VALUES))).encode()
        elif kind < 0.75:  # a key that does not exist
            key = draw.choice(keys)
            yield f"!{key}x", yaml.safe_dump(with_value(base, f"{key}x", draw.choice(VALUES))).encode()
        elif kind < 0.9:
            yield "", yaml.safe_dump(damage_json(base, draw)).encode()
        else:
            yield "", damage_bytes(yaml.safe_dump(base).encode(), draw)


@pytest.mark.slow
def test_recipes(base, fork_server, tmp_path):
    draw = random.Random(SEED)

    def calls():
        for number, (key, text) in zip(range(COUNT), recipes(base, draw), strict=False):
            path = tmp_path / f"{number}.yaml"
            path.write_bytes(text)
            words = ["check", str(path)]
            if number % 4 == 0:
                words = ["train", str(path), "--out", str(tmp_path / f"run-{number}")]
            yield Call(f"{number} {key}: {text[-400:]!r}", words)

    def is_silent(call: Call) -> str | None:
        """What an accepted recipe does not report: `check` prints each value with the line that sets it."""
        key = call.name.split(":")[0].split()[-1] if " :" not in call.name.partition(":")[0] + ":" else ""
        if call.child.code != 0:
            return None
        if key.startswith("!"):
            return f"{call.name}: an unknown key was accepted"
        if call.words[0] == "check" and key and not shown(call.child.out, key, Path(call.words[1]).name):
            return f"{call.name}: not shown\n{call.child.out}"
        return None

    assert run_all(fork_server, calls(), is_silent) == COUNT


def shown(printed: str, key: str, file: str) -> bool:
    """Whether a key, or a part of it, is printed with its line in the file."""
    name = key.rpartition(".")[2]
    lines = printed.splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(rf"\s*{re.escape(name)}:", line)]
    return any(file in line for number in starts for line in lines[number : number + 12])


def command_lines(draw: random.Random, files: list[str]):
    """Command lines of every command, with options that exist and words that do not belong to them."""
    import typer.main

    from trimtab.cli.main import app

    group = typer.main.get_command(app)
    waits = {"ui", "launch", "demo", "compare", "pull", "runs", "track"}  # for servers, or run for minutes
    commands = {name: found for name, found in group.commands.items() if name not in waits}
    while True:
        name = draw.choice(sorted(commands))
        words = [name]
        for parameter in commands[name].params:
            chance = draw.random()
            value = draw.choice([*WORDS, *files, *files])
            if parameter.param_type_name == "argument":
                words += [value] * (chance < 0.9)
            elif chance < 0.12:
                words += [parameter.opts[0]] + [value] * (not getattr(parameter, "is_flag", False))
        yield [word.replace("\0", "") for word in words]


@pytest.mark.slow
def test_command_lines(base, fork_server, tmp_path):
    draw = random.Random(SEED)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(base))
    files = [base["model"], base["data"]["train"], str(tmp_path / "recipe.yaml"), str(tmp_path / "new"), str(tmp_path)]

    def calls():
        for number, words in zip(range(COUNT), command_lines(draw, files), strict=False):
            yield Call(f"{number}", words)

    work = tmp_path / "work"
    work.mkdir()
    assert run_all(fork_server, calls(), cwd=work) == COUNT
