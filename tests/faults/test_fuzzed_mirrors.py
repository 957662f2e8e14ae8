"""Mirrors whose files were changed at random, with every checksum made right again, are resumed.

None ends in a traceback, and none executes code, contacts an address or writes outside the run and its mirror.
"""

import json
import random
import shutil
from pathlib import Path

import pytest

from edited_mirrors import Listener, edit_facts, edit_json, edit_recipe, make_remote_code, make_run
from trimtab.build.resume_rules import flat
from trimtab.errors import RecipeError
from trimtab.recipe.load import load_recipe

NUM_MIRRORS = 12  # of each seed
EXIT_CODES = (0, 1, 2, 3, 75)
REPLACED = {"out", "name", "checkpoint.mirror", "train.max_steps", "train.epochs"}  # by the command, as documented
FILES = ("run.json", "plan.json", ".mirror.json", "best/trimtab.json", "best/config.json", "best/tokenizer_config.json")


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("mirrored"), tiny.folder("bert"))


@pytest.fixture
def listener():
    server = Listener()
    yield server
    server.close()


class Attacker:
    """Changes values of a mirror, at random."""

    def __init__(self, seed: int, outside: Path, uri: str, model: Path) -> None:
        self.random = random.Random(seed)
        self.values = [
            *(None, True, False, -1, 0, 1, 2**63, 10**400, 1e300, -0.5, "", " ", "none", "auto", "a\0b", "x" * 300),
            *(
                "\x1b]0;title\x07\x1b[2J",
                "../../outside",
                str(outside),
                str(outside / "new"),
                "~nobody-here/x",
                "é\ud800",
            ),
            *(
                uri,
                f"{uri}/x.csv",
                f"sqlite:///{outside}/new.db",
                f"file://{outside}",
                "models:/x@best",
                "best:reviews",
            ),
            *(
                str(model),
                {"name": str(model), "trust_remote_code": True},
                [],
                {},
                [[[]]],
                {"": {}},
                "step-1",
                "1" * 5000,
            ),
            *({"every": 1}, {"layers": [0]}, [str(outside)], {str(outside): "always"}),
        ]

    def change(self, tree, depth=0):
        """Set one value somewhere in a tree of JSON values."""
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if isinstance(tree, dict) and (not keys or self.random.random() < 0.03):
            keys = ["unknown"]
        if not keys:
            return
        key = self.random.choice(keys)
        inner = tree.get(key) if isinstance(tree, dict) else tree[key]
        if isinstance(inner, dict | list) and inner and self.random.random() < 0.8:
            self.change(inner, depth + 1)
        else:
            tree[key] = self.random.choice(self.values)

    def edit(self, mirror: Path) -> str:
        """Change up to three values in one kind of file; return which."""
        kind = self.random.choice(["recipe", "recipe", "recipe", "facts", "tracking", "journal", *FILES])
        for _ in range(self.random.randint(1, 3)):
            if kind == "recipe":
                edit_recipe(mirror, self.change)
            elif kind == "facts":
                for folder in mirror.glob("checkpoints/step-*"):
                    edit_facts(folder, self.change_facts)
            elif kind == "tracking":
                known = {"about": {"run": "a"}, "servers": [{"uri": self.values[22], "sent": 5, "run_id": "b"}]}
                self.change(known)
                (mirror / "tracking.json").write_text(json.dumps(known))
            elif kind == "journal":
                lines = (mirror / "metrics.jsonl").read_text().splitlines()
                number = self.random.randrange(len(lines))
                line = json.loads(lines[number])
                self.change(line)
                lines[number] = json.dumps(line)
                (mirror / "metrics.jsonl").write_text("\n".join(lines) + "\n")
            elif (mirror / kind).exists():
                edit_json(mirror / kind, self.change)
        return kind

    def change_facts(self, facts):
        self.change(self.random.choice([facts, facts["run"], facts["settings"]]))


def settings_of(folder: Path):
    try:
        return flat(load_recipe(folder / "recipe.yaml", {}, []).recipe.model_dump(mode="json"))
    except RecipeError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_fuzzed_mirrors(finished, tiny, fork_server, listener, own_folder, tmp_path, seed):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "private.csv").write_text("text,label\nmine,a\nyours,b\n")
    model, mark = make_remote_code(outside / "remote-code", tiny.folder("bert"))
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    attacker = Attacker(seed, outside, listener.uri, model)
    environment = {"MLFLOW_TRACKING_TOKEN": "secret", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    for number in range(NUM_MIRRORS):
        place = tmp_path / f"mirror-{number}"
        mirror = Path(shutil.copytree(finished, place / "drive" / "reviews" / "here"))
        what = attacker.edit(mirror)
        (place / "work").mkdir()
        asked = settings_of(mirror)
        command = ("resume", str(mirror), "--out", "there", "--device", "cpu", "--set", "train.max_steps=3")
        child = fork_server.start_command(*command, cwd=place / "work", environment=environment)
        try:
            code = child.wait(120)
        except BaseException:
            child.kill()
            raise
        said = f"seed {seed}, mirror {number}, {what}: {mirror}\n{child.out}{child.err}"
        assert code in EXIT_CODES, said
        assert "Traceback" not in said, said
        assert "\x1b]0" not in child.err, said
        assert listener.received == [], said
        assert not mark.exists(), said
        assert {path: path.stat().st_mtime_ns for path in outside.rglob("*")} == before, said
        assert {path.name for path in place.iterdir()} == {"drive", "work"}, said
        assert {path.name for path in (place / "work").iterdir()} <= {"there"}, said
        used = settings_of(place / "work" / "there") if code == 0 else None
        if what == "recipe" and used is not None and asked is not None:
            silent = {key for key in used if used[key] != asked.get(key) and key not in REPLACED}
            assert {key for key in silent if key not in said} == set(), said
