"""Commands that write are killed or ended by a signal: an older output stays whole, and nothing partial is left."""

import random
import shutil
import signal

import pytest
import yaml

from tiny_runs import reviews, write_csv

pytestmark = pytest.mark.slow

NEW = "out/new"
COMMANDS = {
    "predict": ("predict", "{run}", "{rows}", "--out", "out/new.csv", "--overwrite"),
    "evaluate": ("evaluate", "{run}", "{rows}", "--out", NEW),
    "report": ("report", "{run}", "--out", "out/new.html"),
    "export merged": ("export", "{run}", NEW, "--to", "merged"),
    "export onnx": ("export", "{run}", NEW, "--to", "onnx"),
    "quantize": ("quantize", "{run}", NEW),
    "cluster": ("cluster", "{run}", NEW),
    "merge": ("merge", "{adapter}", NEW),
    "distill": ("distill", "distill.yaml", "--out", NEW, "--resume"),
    "pull": ("pull", "imdb", NEW, "--uri", "{uri}"),
    "compare": (
        *("compare", "{recipe}", "--vary", "train.lr=1e-3,1e-4", "--steps", "8"),
        *("--repeats", "1", "--out", NEW),
    ),
}
KEEPS = ("distill", "compare")  # what they have done so far


@pytest.fixture(scope="module")
def home(stage, tmp_path_factory):
    """A trained run, one with an adapter, recipes, and a tracking store with a model."""
    folder = tmp_path_factory.mktemp("commands")
    rows = write_csv(folder / "rows.csv", reviews(24))
    base = {"model": stage.models["bert"], "data": {"train": str(rows)}, "train": {"max_steps": 3}}
    for name, more in {
        "run": {"track": {"uri": f"sqlite:///{folder}/mlflow.db", "experiment": "imdb"}},
        "adapter": {"adapter": "lora"},
    }.items():
        recipe = base | {"out": str(folder / name)} | more
        done = stage.train(recipe, notes=str(folder / name), environment={"TRIMTAB_TRACK": ""})
        assert done.wait() == 0, done.said
    (folder / "recipe.yaml").write_text(yaml.safe_dump(base))
    (folder / "distill.yaml").write_text(yaml.safe_dump(base | {"distill": {"teacher": str(folder / "run")}}))
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_ends_early_leaves_nothing_partial(stage, home, tmp_path, name):
    temporary = tmp_path / "temporary"
    places = {"run": home / "run", "adapter": home / "adapter", "rows": home / "rows.csv"}
    places |= {"recipe": home / "recipe.yaml", "uri": f"sqlite:///{home}/mlflow.db"}
    words = [word.format(**places) for word in COMMANDS[name]]
    work = tmp_path / "work"

    def run(nth=0, number=0):
        child = stage.start(
            "disturbed_command",
            environment={"TMPDIR": str(temporary), "TRIMTAB_TRACK": "none"},
            cwd=work,
            words=words,
            folder=str(work / "out"),
            nth=nth,
            number=number,
            count=str(tmp_path / "count"),
        )
        return child.wait(), child.said

    def begin():
        for folder in (work, temporary):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        (work / "out").mkdir()
        shutil.copy(home / "distill.yaml", work)

    def names():
        return {str(path.relative_to(work / "out")) for path in (work / "out").rglob("*")}

    begin()
    code, said = run()
    assert code == 0, said[-3000:]
    whole, num_events = names(), int((tmp_path / "count").read_text())
    assert num_events > 0
    draw = random.Random(name)
    numbers = [signal.SIGTERM, signal.SIGKILL]
    if name not in KEEPS:
        numbers += [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL]
    for number in numbers:
        nth = draw.randint(1, num_events)
        where = f"{number.name} at {nth} of {num_events}"
        begin()
        code, said = run(nth, number)
        assert "Traceback" not in said, (where, said[-3000:])
        if number == signal.SIGKILL:
            assert code == -number, (where, said[-3000:])
            code, said = run()  # removes what the kill has left
            refuses = "choose" in said or "exists" in said or "not empty" in said
            assert code == 0 or (code == 2 and refuses), (where, said[-3000:])
        else:
            assert code in (0, 75, 130, -number), (where, said[-3000:])
        assert not [path for path in names() if "writing" in path], (where, said[-3000:])
        ours = [path.name for path in temporary.iterdir() if path.name != ".ses"]  # that is a file of ONNX Runtime
        assert not ours, (where, said[-3000:])
        if name not in KEEPS:
            assert names() in (set(), whole), (where, said[-3000:])
