"""The command line: every command and option, what each command prints, and the exit codes."""

import contextlib
import csv
import errno
import io
import json
import logging
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import typer
import yaml
from safetensors.torch import load_file

from tiny_runs import reviews, write_csv, write_jsonl
from trimtab.__main__ import main as run_script
from trimtab.build.resume_rules import flat
from trimtab.cli.main import app
from trimtab.cli.output import show_table
from trimtab.errors import ModelError
from trimtab.hardware.extras import install_line
from trimtab.inference.load import load
from trimtab.recipe.schema import Recipe
from trimtab.recipe.schema_keys import choices_of, keys_of
from trimtab.report.compare import Comparison
from trimtab.report.studies import STUDIES

SCRIPT = Path(sys.executable).with_name("trimtab")
ROWS = reviews(24)

# Every command and every option: additions are made here on purpose.
SHARED = ["--data", "--eval", "--model", "--task"]
SURFACE = {
    "best": ["--json", "--metric", "--uri", "EXPERIMENT"],
    "check": [*SHARED, "--device", "--resume", "--schema", "--set", "RECIPE"],
    "checkpoints": ["RUN"],
    "cluster": [
        *("--bits", "--calibration", "--calibration-rows", "--compensate", "--data", "--device", "--embeddings"),
        *("--group-rows", "--importance", "--per", "--quiet", "--rest", "--rows", "--scale-block", "--train-steps"),
        *("FOLDER", "MODEL"),
    ],
    "compare": [
        *SHARED,
        *(
            "--device",
            "--out",
            "--quiet",
            "--repeats",
            "--sample",
            "--set",
            "--steps",
            "--study",
            "--timeout",
            "--track",
        ),
        *("--variants", "--vary", "--warmup-steps", "RECIPE"),
    ],
    "config": ["--default", "--to"],
    "convert": ["--out", "CONFIG"],
    "data show": [*SHARED, "--examples", "--set", "RECIPE"],
    "demo": ["--fresh", "--json", "--lm", "--out", "--quiet", "--resume"],
    "doctor": [],
    "evaluate": [
        *("--against", "--device", "--json", "--label", "--out", "--rows", "--text", "--track", "--worst"),
        *("DATA", "MODEL"),
    ],
    "export": ["--data", "--dtype", "--force", "--push", "--rows", "--to", "FOLDER", "MODEL"],
    "init": [*SHARED, "--to"],
    "launch": [
        *("--address", "--config", "--cpu", "--dry-run", "--host-index", "--hosts", "--log-dir", "--max-restarts"),
        *("--module", "--num-hosts", "--port", "--processes", "--quiet", "ARGUMENTS", "TARGET"),
    ],
    "memory": [
        *SHARED,
        *("--device", "--gpu", "--length", "--measure", "--memory", "--out", "--quiet", "--set", "--snapshot"),
        "RECIPE",
    ],
    "merge": [
        *("--device", "--dtype", "--force", "--max-kl", "--min-agreement", "--onto", "--rows", "FOLDER", "RUN"),
    ],
    "plan": [
        *SHARED,
        *(
            "--device",
            "--gpu",
            "--host-memory",
            "--json",
            "--length",
            "--longest",
            "--max-batch",
            "--memory",
            "--quiet",
        ),
        "--set",
        "RECIPE",
    ],
    "predict": [
        *("--batch-size", "--column", "--device", "--max-new-tokens", "--out", "--overwrite", "--probabilities"),
        *("--safe-csv", "--text", "FILE", "MODEL"),
    ],
    "distill": ["--device", "--fresh", "--json", "--out", "--quiet", "--resume", "--set", "RECIPE"],
    "quantize": [
        *("--data", "--device", "--dtype", "--max-loss", "--quiet", "--rows", "--size", "--to", "FOLDER", "MODEL"),
    ],
    "shrink": ["--data", "--device", "--max-loss", "--quiet", "--rows", "--track", "FOLDER", "MODEL"],
    "report": ["--device", "--out", "--port", "--samples", "--watch", "RUNS"],
    "resume": ["--device", "--from", "--json", "--out", "--quiet", "--set", "--trust-remote-code", "RUN"],
    "pull": ["--metric", "--uri", "FOLDER", "MODEL"],
    "runs": ["ROOT"],
    "track sync": ["--to", "RUN"],
    "ui": ["--port", "ROOT"],
    "train": [
        *SHARED,
        *("--batch-size", "--device", "--epochs", "--fast-dev-run", "--fresh", "--json", "--label", "--limit-eval"),
        *("--limit-train", "--lr", "--max-length", "--max-steps", "--max-time", "--memory", "--name", "--out"),
        *("--overfit-batches", "--precision", "--quiet", "--resume", "--seed", "--set", "--text", "RECIPE"),
    ],
}


@pytest.fixture(autouse=True)
def data(own_folder):
    """The rows in the working folder of every test."""
    return write_csv(own_folder / "reviews.csv", ROWS)


@pytest.fixture
def bert(tiny):
    return tiny.folder("bert")


@pytest.fixture
def trained(trimtab, bert):
    done = trimtab("train", "--model", bert, "--data", "reviews.csv", "--max-steps", 2, "--out", "trained", "--quiet")
    assert done == (0, "", "")
    return "trained"


# ---------------------------------------------------------------------- the surface


def options_of(command):
    names = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    arguments = {parameter.name.upper() for parameter in command.params if parameter.param_type_name == "argument"}
    return sorted((names - {"--help"}) | arguments)


def test_every_command_and_option_is_listed():
    root = typer.main.get_command(app)
    assert options_of(root) == ["--version"]
    found = {}
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        found |= (
            {f"{name} {part}": options_of(c) for part, c in inner.items()} if inner else {name: options_of(command)}
        )
    assert found == {name: sorted(options) for name, options in SURFACE.items()}


def test_help_lists_every_command(trimtab):
    done = trimtab("--help")
    assert done.code == 0
    for name in SURFACE:
        assert f" {name.split()[0]} " in done.out
        shown = trimtab(*name.split(), "--help").out
        for option in SURFACE[name]:
            assert option in shown or option.lower() in shown
    assert trimtab("--version").out.startswith("trimtab 0.")


@pytest.mark.parametrize(("option", "key"), [("precision", "train.precision"), ("task", "task")])
def test_help_lists_every_choice(option, key):
    commands = typer.main.get_command(app).commands
    written = next(parameter.help for parameter in commands["train"].params if parameter.name == option)
    field = next(found.field for found in keys_of(Recipe) if found.dotted == key)
    assert set(re.split(r"[ ,.]+(?:or )?", written.rstrip("."))) == set(choices_of(field.annotation))


def test_help_lists_every_study():
    commands = typer.main.get_command(app).commands
    written = next(parameter.help for parameter in commands["compare"].params if parameter.name == "study")
    assert set(re.split(r"[ ,.]+(?:or )?", written.partition(": ")[2].rstrip("."))) == set(STUDIES)


# ---------------------------------------------------------------------- in subprocesses


def test_exit_code_0_and_json_lines(own_folder, bert, fork_server):
    arguments = ("--model", bert, "--data", "reviews.csv", "--max-steps", 2, "--device", "cpu", "--out", "run")
    done = fork_server.start_command("train", *map(str, arguments), "--json")
    assert done.wait() == 0, done.err
    events = [json.loads(line) for line in done.out.splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "step", "evaluation", "finish"]
    assert events[1].keys() >= {"step", "loss", "lr", "tokens_per_s", "memory_bytes", "num_skipped", "seconds_left"}
    assert events[3]["metrics"].keys() == {"loss", "accuracy", "f1"}
    assert events[-1] == {"event": "finish", "summary": "finished after 2 steps: run", "failed": False}
    assert "task classify" in done.err  # the log goes to standard error, not between the lines
    assert all(line.startswith("trimtab: ") for line in done.err.splitlines())


def test_python_m_is_the_command_line(own_folder):
    done = subprocess.run([sys.executable, "-m", "trimtab", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "trimtab", "")


@pytest.mark.slow
def test_exit_code_2_and_no_traceback(own_folder):
    (own_folder / "recipe.yaml").write_text("model: x\ndata: {train: y}\ntrian: {lr: fast}\nfp16: true\n")
    done = subprocess.run([str(SCRIPT), "check", "recipe.yaml"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: the recipe has 4 problems:\n")  # there are neither x nor y
    assert "\n  recipe.yaml:2: data.train: 'y' is not a local file or folder" in done.stderr
    assert "did you mean train" in done.stderr
    assert "train.precision: fp16" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------- train


def test_train_prints_its_result(trimtab, bert):
    done = trimtab("train", "--model", bert, "--data", "reviews.csv", "--max-steps", 2, "--name", "first")
    assert done.code == 0
    assert "step 2/2 · " in done.out
    assert "evaluation at step 2 · " in done.out
    for word in ("accuracy", "best accuracy", "steps", "tokens/s", "peak memory", "runs/reviews/first/best"):
        assert word in done.out
    assert "runs/reviews/first/report.html" in done.out
    assert done.out.endswith('\nnext: trimtab predict runs/reviews/first --text "…"\n')


def test_commands_to_paste_are_quoted(trimtab, bert):
    """Names with spaces and quotes: what is printed works in a shell."""
    train = ("train", "--model", bert, "--data", "reviews.csv", "--max-steps", 1, "--out", "my run's")
    done = trimtab(*train)
    assert shlex.split(done.out.rpartition("next: ")[2]) == ["trimtab", "predict", "my run's", "--text", "…"]
    again = trimtab(*train)
    longer = shlex.split(again.err.rpartition("train longer: ")[2])
    assert longer == ["trimtab", "resume", "my run's", "--set", "train.epochs=…"]
    missing = trimtab("predict", "my run's", "reviews.csv", "--out", "my folder/it's.csv")
    assert missing.err.endswith("mkdir -p 'my folder'\n")


def test_every_flag_reaches_the_recipe(trimtab, bert, own_folder):
    for file, rows in (("mine.csv", ROWS), ("held-out.csv", reviews(9, 500))):
        write_csv(own_folder / file, [{"body": row["text"], "stars": row["label"]} for row in rows])
    # flag → value, recipe key, value in the resolved recipe
    flags = {
        "--model": (bert, "model", bert),
        "--data": ("mine.csv", "data.train", str(own_folder / "mine.csv")),
        "--eval": ("held-out.csv", "data.eval", str(own_folder / "held-out.csv")),
        "--task": ("classify", "task", "classify"),
        "--text": ("body", "data.text", "body"),
        "--label": ("stars", "data.label", "stars"),
        "--epochs": (0.5, "train.epochs", 0.5),
        "--max-time": ("1h", "train.max_time", "1h"),
        "--batch-size": (4, "train.batch_size", 4),
        "--lr": (1e-4, "train.lr", 0.25),  # --set wins over flags
        "--max-length": (12, "data.max_length", 12),
        "--precision": ("bf16", "train.precision", "bf16"),
        "--memory": ("8GiB", "memory.budget", "8GiB"),
        "--seed": (5, "seed", 5),
        "--out": ("run", "out", "run"),
        "--limit-train": ("34%", "limits.train", 0.34),
        "--limit-eval": (1, "limits.eval", 1),
    }
    words = [word for flag, (value, *_) in flags.items() for word in (flag, value)]
    done = trimtab("train", *words, "--device", "cpu", "--set", "train.optimizer=sgd", "--set", "train.lr=0.25")
    assert done.code == 0, done.err
    text = Path("run/recipe.yaml").read_text()
    recipe = flat(yaml.safe_load(text))
    assert {key: recipe[key] for _, key, _ in flags.values()} == {key: value for _, key, value in flags.values()}
    assert recipe["train.optimizer"] == "sgd"
    for flag in ("--data", "--eval", "--batch-size", "--limit-train", "--set", "default"):
        assert f"# {flag}\n" in text
    plan = json.loads(Path("run/plan.json").read_text())
    assert (plan["num_train_rows"], plan["num_eval_rows"], plan["num_steps"]) == (24, 9, 1)


def test_fast_dev_run_and_overfit_batches(trimtab, bert, own_folder):
    before = sorted(own_folder.rglob("*"))
    done = trimtab("train", "--model", bert, "--data", "reviews.csv", "--fast-dev-run")
    assert done.code == 0
    assert sorted(own_folder.rglob("*")) == before
    flags = ("--overfit-batches", 1, "--epochs", 3, "--out", "run", "--quiet")
    assert trimtab("train", "--model", bert, "--data", "reviews.csv", *flags).code == 0
    assert json.loads(Path("run/plan.json").read_text())["num_steps"] == 3


def test_quiet_also_silences_messages_about_the_recipe(trimtab, bert):
    Path("recipe.yaml").write_text("model: {name: other, tokenizer: other}\ndata: {train: reviews.csv}\n")
    arguments = ("train", "recipe.yaml", "--model", bert, "--fast-dev-run", "--quiet")
    assert trimtab(*arguments) == (0, "", "")


def test_exit_code_75_at_the_time_limit(trimtab, bert):
    limited = ("train", "--model", bert, "--data", "reviews.csv", "--max-time", "0.001s")
    done = trimtab(*limited, "--out", "run")
    assert done.code == 75
    assert "time limit after 1 steps" in done.out
    assert done.out.endswith("\nnext: trimtab resume run\n")
    status = json.loads(Path("run/run.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 1)
    assert Path("run/best/model.safetensors").is_file()
    assert trimtab(*limited, "--quiet") == (75, "", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data", "reviews.csv"), "model: required"),
        (("--model", "BERT"), "data.train: required"),
        (("--model", "BERT", "--data", "review.csv"), "did you mean reviews.csv?"),
        (("--model", "no/such", "--data", "reviews.csv"), "the Hub cannot be reached"),
        (("--model", "BERT", "--data", "reviews.csv", "--label", "stars"), "no column 'stars'"),
        (
            ("--model", "BERT", "--data", "reviews.csv", "--device", "gpu7"),
            "'gpu7' is not a torch device\n  cure: cpu, ",
        ),
        (("--model", "BERT", "--data", "reviews.csv", "--set", "evaluate.metric=acuracy"), "did you mean 'accuracy'"),
        (("--model", "BERT", "--data", "reviews.csv", "--set", "memory.budget=900TiB"), "but cpu has"),
        (("--model", "BERT", "--data", "reviews.csv", "--out", "reviews.csv"), "is a file, and a run needs a folder"),
        (("--model", "BERT", "--data", "reviews.csv", "--quiet", "--json"), "both given"),
        (("nowhere.yaml",), "there is no recipe nowhere.yaml"),
    ],
)
def test_mistakes_end_in_one_message(trimtab, bert, own_folder, arguments, words):
    done = trimtab("train", *(bert if word == "BERT" else word for word in arguments))
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert words in done.err
    assert done.out == ""
    assert [path.name for path in own_folder.iterdir()] == ["reviews.csv"]


def test_a_folder_in_use_is_untouched(trimtab, bert, trained):
    before = {path: path.read_bytes() for path in Path(trained).rglob("*") if path.is_file()}
    done = trimtab("train", "--model", bert, "--data", "reviews.csv", "--out", trained)
    assert (done.code, done.err) == (
        2,
        "error: trained contains a finished run (step 2 of 2)\n  cure: choose another --out, pass --fresh to "
        "replace it, or train longer: trimtab resume trained --set train.epochs=…\n",
    )
    assert {path: path.read_bytes() for path in Path(trained).rglob("*") if path.is_file()} == before


def test_an_internal_error_keeps_its_traceback(trimtab, bert, monkeypatch):
    monkeypatch.setattr("trimtab.training.loop.window_gradients", lambda *parts, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trimtab("train", "--model", bert, "--data", "reviews.csv", "--out", "run", "--quiet")
    assert json.loads(Path("run/run.json").read_text())["state"] == "failed"
    assert " failed " in trimtab("runs", ".").out


# ---------------------------------------------------------------------- from init to runs


def test_convert_and_check(trimtab, bert):
    config = f"base_model: {bert}\ndatasets: [{{path: reviews.csv, type: completion}}]\nlearning_rate: 1e-4\nrex: 1\n"
    Path("axolotl.yml").write_text(config)
    printed = trimtab("convert", "axolotl.yml")
    assert (printed.code, printed.err) == (0, "")
    done = trimtab("convert", "axolotl.yml", "--out", "converted.yaml")
    assert done.code == 0
    assert "1 without an equivalent\n  rex: unknown to" in done.out
    assert Path("converted.yaml").read_text() == printed.out
    assert trimtab("check", "converted.yaml").code == 0
    again = trimtab("convert", "axolotl.yml", "--out", "converted.yaml")
    assert (again.code, again.out) == (2, "")
    assert "converted.yaml exists" in again.err


def test_a_full_disk_leaves_no_half_recipe(trimtab, bert, file_size_limit):
    with file_size_limit(300):
        done = trimtab("init", "--model", bert, "--data", "reviews.csv", "--to", "my own.yaml")
    assert done.code == 2
    assert "my own.yaml cannot be written: File too large\n  cure: free space on that disk, or choose" in done.err
    assert not list(Path().glob("*my own*"))
    done = trimtab("init", "--model", bert, "--data", "reviews.csv", "--to", "my own.yaml")
    assert (done.code, done.out) == (0, "my own.yaml written; next: trimtab check 'my own.yaml'\n")


def test_init_check_train(trimtab, bert):
    """A recipe written by init is valid and trains."""
    done = trimtab("init", "--model", bert, "--data", "reviews.csv", "--task", "classify", "--to", "mine.yaml")
    assert (done.code, done.out) == (0, "mine.yaml written; next: trimtab check mine.yaml\n")
    text = Path("mine.yaml").read_text()
    assert yaml.safe_load(text)["data"] == {"train": "reviews.csv"}
    again = trimtab("init", "--to", "mine.yaml")
    assert again.code == 2
    assert "mine.yaml exists" in again.err
    assert Path("mine.yaml").read_text() == text
    missing = trimtab("init", "--to", "no/such/folder.yaml")
    assert missing.code == 2
    assert "cannot be written" in missing.err

    checked = trimtab("check", "mine.yaml", "--set", "train.lr=1e-3")
    assert checked.code == 0
    resolved = yaml.safe_load(checked.out)
    assert resolved["train"]["lr"] == 1e-3
    assert resolved["train"]["epochs"] == 3
    by_key = {line.split(":")[0].strip(): line.rpartition("# ")[2] for line in checked.out.splitlines()}
    assert by_key["lr"] == "--set"
    assert by_key["epochs"] == "default"
    assert by_key["task"].startswith("mine.yaml:")

    trained = trimtab("train", "mine.yaml", "--set", "train.epochs=9", "--out", "none", "--max-steps", 1)
    assert trained.code == 2, "two lengths on one command line"
    Path("mine.yaml").write_text(text.replace("# epochs: 3.0", "epochs: 9"))
    trained = trimtab("train", "mine.yaml", "--max-steps", 1, "--out", "run", "--quiet")
    assert trained == (0, "", "")
    assert yaml.safe_load(Path("run/recipe.yaml").read_text())["train"]["max_steps"] == 1
    assert "# --max-steps; replaces train.epochs" in Path("run/recipe.yaml").read_text()


def test_check_needs_no_file(trimtab, bert):
    checked = trimtab("check", "--model", bert, "--data", "reviews.csv", "--eval", "reviews.csv", "--task", "classify")
    assert checked.code == 0
    lines = [" ".join(line.split()) for line in checked.out.splitlines()]
    assert {"train: reviews.csv # --data", "eval: reviews.csv # --eval", "task: classify # --task"} <= set(lines)
    checked = trimtab("check", "--model", "no-such-model", "--data", "review.csv")
    assert (checked.code, "--data: data.train: 'review.csv' does not exist; did you mean" in checked.err) == (2, True)


def test_check_prints_the_schema(trimtab):
    schema = json.loads(trimtab("check", "--schema").out)
    assert schema["properties"].keys() >= {"model", "data", "train", "limits"}


def test_runs(trimtab, trained):
    assert trimtab("runs", "nowhere").out == "no runs below nowhere; of another folder: trimtab runs FOLDER\n"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    killed = json.loads(Path("trained/run.json").read_text()) | {"state": "running", "pid": dead.pid, "step": 1}
    Path("killed").mkdir()
    Path("killed/run.json").write_text(json.dumps(killed))
    lines = trimtab("runs", ".").out.splitlines()
    assert lines[0].split() == ["run", "state", "step", "best", "age"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert rows.keys() == {"trained", "killed"}
    assert rows["trained"][1:4] == ["finished", "2/2", "accuracy"]
    assert rows["killed"][1:3] == ["killed", "1/2"]


def test_doctor(trimtab):
    done = trimtab("doctor")
    assert done.code == 0
    for word in ("python", "device", "precision: auto", "bf16", "fp16", "attention", "transformers", torch.__version__):
        assert word in done.out
    assert "mlflow" in done.out


def test_an_interrupt_while_the_command_line_is_imported(monkeypatch, capsys):
    class Importing(types.ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "trimtab.cli.main", Importing("trimtab.cli.main"))
    with pytest.raises(SystemExit) as ending:
        run_script()
    assert (ending.value.code, capsys.readouterr().err) == (130, "stopped\n")


def test_an_interrupt_before_typer_has_taken_over(trimtab, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("trimtab.cli.main.app", interrupted)
    done = trimtab("doctor")
    assert (done.code, done.err) == (130, "stopped\n")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "another one while Python exits prints no traceback"


def test_a_file_without_permission_is_no_internal_error(trimtab, monkeypatch):
    def refused():
        raise PermissionError(errno.EACCES, "Permission denied", "my run/run.json")

    monkeypatch.setattr("trimtab.hardware.doctor.collect_findings", refused)
    done = trimtab("doctor")
    assert done.code == 1
    assert done.err == (
        "error: my run/run.json: Permission denied\n"
        "  cure: see its owner and permissions: ls -ld 'my run' 'my run/run.json'\n"
    )


def test_an_interrupt_is_not_silent(trimtab, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("trimtab.hardware.doctor.collect_findings", interrupted)
    done = trimtab("doctor")
    assert (done.code, done.err) == (130, "stopped\n")


def test_a_table_in_a_pipe(capsys):
    """Each row is one line, and rich does not take the extra in `pip install 'trimtab[liger]'` for markup."""
    show_table(("run", "[cure]"), [("a" * 200, install_line("liger_kernel"))])
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "[cure]"]
    assert row.split(maxsplit=1) == ["a" * 200, "pip install 'trimtab[liger]'"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from kernels-community: %s."),
        ("bitsandbytes.autograd._functions", "MatMul8bitLt: inputs will be cast from torch.float32 to %s"),
        ("torchao", "Failed to load %s: no such library"),
    ],
)
def test_a_warning_that_users_cannot_act_on_is_not_shown(caplog, name, message):
    """Other packages log them at import or in each product, on some machines; here their loggers repeat them."""
    theirs = logging.getLogger(name)
    with caplog.at_level(logging.WARNING):
        theirs.warning(message, "no module")
        theirs.warning("something else")
    assert [record.getMessage() for record in caplog.records] == ["something else"]


# ---------------------------------------------------------------------- several processes


def test_config_and_launch(trimtab, own_folder, monkeypatch):
    """Answers are written to a file that launch reads by default; flags override it; a dry run starts nothing."""
    monkeypatch.setattr("sys.stdin", io.StringIO("two\n2\n\n"))
    done = trimtab("config")
    assert done.code == 0
    assert "found two; allowed: a whole number, 1 or more" in done.out
    assert done.out.endswith("launch.yaml written; next: trimtab launch SCRIPT.py, or a recipe\n")
    assert yaml.safe_load(Path("launch.yaml").read_text()) == {"processes": 2}
    Path("mine.py").write_text("print('never')")
    shown = trimtab("launch", "--max-restarts", 1, "--dry-run", "mine.py", "--lr", 3, "--quiet")
    assert (shown.code, shown.err) == (0, "")
    assert re.search(r"processes +2 +launch.yaml:\d+ *\n", shown.out)
    assert re.search(r"max restarts +1 +--max-restarts *\n", shown.out)
    assert re.search(
        r"TRIMTAB_LOG_DIR=\S+ torchrun --nnodes 1 --nproc-per-node 2 .* mine.py --lr 3 --quiet\n", shown.out
    )
    assert "--nproc-per-node 3 " in trimtab("launch", "--processes", 3, "--dry-run", "mine.py").out
    assert not Path("runs").exists()

    assert "launch.yaml exists" in trimtab("config", "--default").err
    assert trimtab("config", "--default", "--to", "found.yaml").out.startswith("found.yaml written")
    assert yaml.safe_load(Path("found.yaml").read_text()) is None
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    silent = trimtab("config", "--to", "other.yaml")
    assert silent.code == 2
    assert "error: no answer on standard input\n  cure: --default asks no questions" in silent.err
    assert not Path("other.yaml").exists()


def test_launch_reports_all_mistakes_at_once(trimtab):
    Path("launch.yaml").write_text("procesess: 2\n")
    done = trimtab("launch", "--processes", 0, "--hosts", "node1,node2", "mien.py")
    assert (done.code, done.out) == (2, "")
    lines = done.err.splitlines()
    assert lines[0] == "error: launch has 4 problems:"
    assert lines[1] == "  launch.yaml:1: procesess: no such key; did you mean processes?"
    assert lines[2].startswith("  --processes: found 0")
    assert "not among node1, node2" in lines[3]
    assert lines[4] == "  there is no mien.py; pass a script (.py) or a recipe (.yaml)"
    missing = trimtab("launch", "--config", "nowhere.yaml", "x.py")
    assert missing.code == 2
    assert "there is no launch file nowhere.yaml" in missing.err


@pytest.mark.slow
def test_launch_runs_a_script(trimtab):
    """The exit code is that of the script."""
    Path("mine.py").write_text("import os, sys\nopen(os.environ['RANK'], 'w')\nsys.exit(int(sys.argv[1]))\n")
    assert trimtab("launch", "--quiet", "--processes", 1, "mine.py", 0).code == 0
    assert Path("0").is_file()
    assert trimtab("launch", "--quiet", "--processes", 1, "mine.py", 7).code == 7


# ---------------------------------------------------------------------- comparisons


def test_mistakes_of_compare_are_found_before_anything_runs(trimtab, bert, own_folder):
    (own_folder / "wrong.yaml").write_text("slow: {train.lrr: 1}\n")
    (own_folder / "recipe.yaml").write_text(f"model: {bert}\ndata: {{train: reviews.csv}}\n")
    for arguments, words in (
        ((), "one of --vary, --study and --variants"),
        (("--study", "optimisers"), "did you mean optimizers"),
        (("--vary", "train.lr"), "no key with values"),
        (("--vary", "train.lr=1,2", "--steps", 2), "leave too few to time"),
        (("--vary", "train.lr=1,2", "--timeout", "soon"), "is not a duration"),
        (("--vary", "train.lr=1,2", "--set", "train.lr=fast"), "train.lr: found 'fast'"),
        (("--vary", "train.lrr=1,2"), "--vary: train.lrr: found 1; no such key; did you mean train.lr?"),
        (("--variants", "wrong.yaml"), "wrong.yaml: train.lrr: found 1; no such key; did you mean train.lr?"),
    ):
        done = trimtab("compare", "recipe.yaml", *arguments)
        assert (done.code, done.out) == (2, "")
        assert words in done.err
    assert not Path("runs").exists()


def test_a_full_disk_does_not_hide_what_compare_measured(trimtab, bert, own_folder, monkeypatch):
    def full(found, folder, title):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "results.json"))

    def measured(recipe, candidates, protocol, *, logs):
        facts = {"steps": 20, "repeats": 1, "warmup steps": 2, "each run": "a fresh process"}
        return Comparison(tuple(one.outcome() for one in candidates), facts, {}, {})

    monkeypatch.setattr("trimtab.commands.compare.compare", measured)
    monkeypatch.setattr("trimtab.report.tables.write_folder", full)
    flags = ("--model", bert, "--data", "reviews.csv", "--out", "results")
    done = trimtab("compare", "--vary", "train.lr=1,2", *flags)
    assert (done.code, "samples/s" in done.out) == (1, True)
    assert "error: results/results.json: No space left on device\n  cure: free space on that disk" in done.err


# ---------------------------------------------------------------------- data and predictions


def test_data_show(trimtab, bert, own_folder, caplog):
    caplog.set_level("INFO", logger="trimtab")
    done = trimtab("data", "show", "--model", bert, "--data", "reviews.csv", "--eval", "reviews.csv", "--examples", 2)
    assert done.code == 0
    assert (done.out + caplog.text).count("text: column 'text' (guessed; set data.text to change it)") == 1
    assert "special tokens added by the tokenizer: <s> … </s>: do not add them yourself" in done.out
    assert f"<s>{ROWS[0]['text']}</s>" in done.out
    assert "example 2 (reviews.csv, line 3)" in done.out
    assert "example 3" not in done.out
    assert "good   12 (50.0%)" in done.out
    (own_folder / "recipe.yaml").write_text(f"model: {bert}\ndata: {{train: reviews.csv, max_length: 4}}\n")
    assert "special tokens added" in trimtab("data", "show", "recipe.yaml").out
    assert trimtab("data", "show", "recipe.yaml", "--examples", 0).code == 2
    assert trimtab("data", "show", "recipe.yaml", "--data", "nowhere.csv").code == 2


def test_predict_a_file(trimtab, trained, own_folder):
    texts = [{"id": i, "text": row["text"]} for i, row in enumerate(reviews(7, 300))]
    write_csv(own_folder / "new.csv", texts)
    done = trimtab("predict", trained, "new.csv", "--out", "labelled.csv", "--batch-size", 2)
    assert (done.code, done.out) == (0, "7 rows written to labelled.csv\n")
    with Path("labelled.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == [row["text"] for row in texts]
    assert {row["prediction"] for row in rows} <= {"bad", "good"}
    assert all(0.5 <= float(row["score"]) <= 1 for row in rows)
    write_jsonl(own_folder / "other.jsonl", [{"body": "a good film", "more": "x"}])
    assert trimtab("predict", trained, "other.jsonl", "--out", "o.jsonl", "--column", "body").code == 0
    assert json.loads(Path("o.jsonl").read_text())["prediction"] in {"bad", "good"}


def test_predict_lines_of_standard_input(trimtab, trained, monkeypatch):
    typed = f"{ROWS[0]['text']}\n{ROWS[1]['text']}\n".encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed)))
    done = trimtab("predict", trained, "-", "--probabilities")
    assert done.code == 0
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["text"] for row in rows] == [ROWS[0]["text"], ROWS[1]["text"]]
    assert all(row["probability_bad"] + row["probability_good"] == pytest.approx(1, abs=2e-6) for row in rows)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"good \xff film\n")))
    done = trimtab("predict", trained, "-")
    assert done.code == 2
    assert "stdin is not UTF-8" in done.err


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(trimtab, own_folder):
    done = trimtab("predict", "no-such-model", "reviews.csv", "--out", "x.xlsx")
    assert "cannot be written to x.xlsx" in done.err


def test_predict_one_line(trimtab, trained, tiny):
    label = trimtab("predict", trained, "--text", ROWS[0]["text"])
    assert label.code == 0
    assert re.fullmatch(r"(good|bad) \(0\.\d{3}\)\n", label.out)
    written = trimtab("predict", tiny.folder("gpt2"), "--text", "the film", "--max-new-tokens", 3)
    assert written.code == 0


def test_mistakes_of_predict(trimtab, trained, own_folder):
    for arguments, words in (
        ((), "a FILE or --text"),
        (("reviews.csv", "--text", "x"), "a FILE or --text"),
        (("reviews.csv",), "--out is missing"),
        (("nowhere.csv", "--out", "x.csv"), "nowhere.csv"),
        (("reviews.csv", "--out", "no/such/x.csv"), "no/such/x.csv does not exist"),
        (("reviews.csv", "--out", "x.csv", "--column", "body"), "no column 'body'"),
        (("reviews.csv", "--out", "reviews.csv"), "is also the input"),
        (("reviews.csv", "--out", "x.xlsx"), "cannot be written to x.xlsx"),
        (("-", "--out", "x.csv"), "predictions go to stdout"),
        (("reviews.csv", "--out", "trained/metrics.jsonl"), "metrics.jsonl exists"),
        (("--text", "x", "--probabilities"), "need a FILE"),
        (("--text", "x", "--out", "x.csv"), "need a FILE"),
        (("--text", "x", "--device", "gpu7"), "is not a torch device"),
    ):
        done = trimtab("predict", trained, *arguments)
        assert (done.code, done.out) == (2, "")
        assert words in done.err
    assert {path.name for path in own_folder.iterdir()} == {"reviews.csv", "trained"}


def test_the_model_of_a_run_is_the_one_that_predicts(trimtab, trained):
    """`predict RUN` and `predict RUN/best` are one model, and not the one that training started from."""
    answers = {trimtab("predict", name, "--text", ROWS[1]["text"]).out for name in (trained, f"{trained}/best")}
    assert len(answers) == 1
    assert load_file(f"{trained}/best/model.safetensors").keys() >= {"classifier.weight", "bert.pooler.dense.weight"}
    wrong = trimtab("predict", "reviews.csv", "--text", "x")
    assert wrong.code == 2
    assert "is a file, not a model" in wrong.err


# ---------------------------------------------------------------------- damaged weights


def zero_some_bytes(path, num_bytes=2000):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + num_bytes] = bytes(num_bytes)
    path.write_bytes(content)


def test_damaged_weights_of_a_run_are_refused_by_every_command(trimtab, trained, bert, own_folder, monkeypatch):
    """They would answer, and be certified as exported, without a word."""
    assert trimtab("predict", trained, "--text", "x").code == 0
    with monkeypatch.context() as patch:
        patch.setattr("trimtab.model.best_weights.checksum_of", None)
        assert trimtab("predict", trained, "--text", "x").code == 0, "an unchanged file is read once"
    zero_some_bytes(Path(trained, "best/model.safetensors"))
    distilled = {"model": bert, "data": {"train": "reviews.csv"}, "distill": {"teacher": trained}}
    Path("distill.yaml").write_text(yaml.safe_dump(distilled | {"train": {"max_steps": 1}}))
    before = {path.name for path in own_folder.iterdir()}
    for command in (
        ("predict", trained, "--text", "x"),
        ("predict", f"{trained}/best", "--text", "x"),
        ("predict", trained, "reviews.csv", "--out", "predicted.csv"),
        ("evaluate", trained, "reviews.csv"),
        ("evaluate", bert, "reviews.csv", "--against", trained),
        ("export", trained, "new", "--to", "merged"),
        ("export", trained, "new", "--to", "onnx"),
        ("merge", trained, "new"),
        ("quantize", trained, "new"),
        ("cluster", trained, "new"),
        ("shrink", trained, "new"),
        ("distill", "distill.yaml", "--out", "new"),
        ("train", "--model", trained, "--data", "reviews.csv", "--max-steps", 1, "--out", "new"),
    ):
        done = trimtab(*command)
        assert done.code == 2, command
        assert "trained/best/model.safetensors is damaged" in done.err, command
        assert {path.name for path in own_folder.iterdir()} == before, command
    assert "trimtab resume trained" in done.err
    with pytest.raises(ModelError, match="is damaged"):
        load(trained)
    Path(trained, "best/model.safetensors").unlink()
    assert "model.safetensors is missing" in trimtab("predict", trained, "--text", "x").err
    assert trimtab("resume", trained).code == 0
    assert trimtab("predict", trained, "--text", "x").code == 0


URL = "https://me:s3cr3t@host/x"
LONG = "x" * 300


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--model", URL, "--data", "r.csv"],
        ["train", "--model", "m", "--data", "s3://me:s3cr3t@bucket/x.csv"],
        ["train", "--model", "m", "--data", "r.csv", "--out", URL],
        ["train", "--model", "m", "--data", "r.csv", "--set", f"checkpoint.mirror={URL}"],
        ["resume", URL],
        ["resume", LONG],
        ["predict", LONG, "--text", "x"],
        ["predict", "~nobody-here/m", "--text", "x"],
        ["predict", "m", "r.csv", "--out", "https://me:s3cr3t@host/o.csv"],
        ["train", "--model", "m", "--data", "~nobody-here/x.csv"],
        ["train", "--model", "m", "--data", f"{LONG}.csv"],
        ["train", "--model", "m", "--data", "r.csv", "--out", LONG],
        ["train", "--model", "m", "--data", "r.csv", "--name", LONG],
        ["train", f"{LONG}.yaml"],
        ["init", "--model", "m", "--data", "r.csv", "--to", URL],
        ["report", LONG],
        ["pull", "models:/m@best", LONG],
    ],
)
def test_paths_that_cannot_be(trimtab_command, own_folder, words):
    """Addresses with passwords, names beyond the limit of file systems, homes of nobody: one message, no folder."""
    write_csv(Path("r.csv"), ROWS)
    before = sorted(Path().iterdir())
    code, out, err = trimtab_command(*words)
    assert code == 2, out + err
    assert "error: " in err
    assert "s3cr3t" not in out + err
    assert sorted(Path().iterdir()) == before


def test_names_with_a_null_character(trimtab_command, own_folder):
    write_csv(Path("r.csv"), ROWS)
    values = {"name": "a\0", "out": "b\0", "checkpoint": {"mirror": "c\0"}, "track": {"register_as": "d\0"}}
    Path("r.yaml").write_text(yaml.safe_dump({"model": "e\0", "data": {"train": "r.csv"}, **values}))
    code, _, err = trimtab_command("check", "r.yaml")
    assert code == 2
    assert err.count("contains a null character") == 5


def test_damaged_files_of_a_run_and_odd_folders_end_in_one_message(trimtab, trained, own_folder, monkeypatch, caplog):
    caplog.set_level("INFO", logger="trimtab")
    with Path(trained, "recipe.yaml").open("ab") as recipe:
        recipe.write(b"# \xff\n")
    assert trimtab("report", trained).code == 0
    for facts in ({"data": 7}, {"held_out": 7}):
        Path(trained, "report.json").write_text(json.dumps(facts))
        caplog.clear()
        assert trimtab("report", trained).code == 0
        assert "report.json is damaged" in caplog.text
    Path("loop").symlink_to("loop")
    done = trimtab("resume", "loop")
    assert (done.code, "Too many levels of symbolic links" in done.err) == (1, True)
    Path("gone").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir("gone")
        Path("../gone").rmdir()
        done = trimtab("runs")
        assert (done.code, "the current folder does not exist any more" in done.err) == (2, True)


def test_a_damaged_or_locked_tracking_store(trimtab, own_folder, monkeypatch):
    monkeypatch.setattr("trimtab.tracking.mlflow.uri._LOCKED_S", 0.01)
    with contextlib.closing(sqlite3.connect("store.db", isolation_level=None)) as store:
        store.execute("CREATE TABLE runs (id)")
        store.execute("BEGIN EXCLUSIVE")
        locked = trimtab("best", "imdb", "--uri", "sqlite:///store.db")
    assert (locked.code, "database is locked" in locked.err) == (2, True)
    Path("store.db").write_bytes(b"no database" * 500)
    damaged = trimtab("best", "imdb", "--uri", "sqlite:///store.db")
    assert (damaged.code, "the tracking store store.db is damaged" in damaged.err) == (2, True)
