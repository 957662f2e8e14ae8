"""What tracking in MLflow costs: trimtab, HF Trainer and Lightning, without it, with a file, a server, a dead server.

Each run is a process of its own and takes the same steps on the same rows; runs of all kinds follow each other in a
shuffled order, round by round, and a kind is compared with the same library's run without tracking of the same round.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

BEGAN = time.perf_counter()  # before torch is imported, for which everyone waits

import torch  # noqa: E402
from record import machine, publish  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "tracking"
LIBRARIES = ("torch", "transformers", "lightning", "mlflow")
CONFIG = dict(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=2000)
BATCH_SIZE, LENGTH, LR, MAX_NORM = 8, 64, 5e-5, 1.0
NUM_WARM_UP = 5
PATIENCE_S = 420  # for a run on a dead server: mlflow itself gives up after four minutes
OFF, FILE, SERVER, DEAD = "off", "sqlite file", "server", "dead server"
SETTINGS = (OFF, FILE, SERVER, DEAD)
PROTOCOL = (
    "A BERT classifier (4 layers of 256), 8 rows of 64 tokens, fp32, AdamW, clipping, linear schedule; loss, learning "
    "rate, gradient norm and epoch are logged at every step, models are not. Each run is a fresh process; in a round "
    "all follow each other in a shuffled order. Stores exist before; a server is `mlflow server` on loopback with a "
    "sqlite store; the port of a dead server is closed. `step` is the median of wall times between the ends of steps "
    f"(the first {NUM_WARM_UP} left out), `mean` includes the slow ones, `CPU` is the median CPU time of the training "
    "process between them (`beside`: CPU seconds of other processes that it started, over the run). `in the logger` is "
    "what the training thread spends in the logging call, a step. `until step 1` counts from the start of the program, "
    "imports included; `after` from the last step to the end of training. Medians over rounds; ratios are medians of "
    "the ratios to `off` of the same library within a round. `lost` is the wall time of the whole run beyond that of "
    "`off`. `arrived` says how many of the steps' losses the store holds afterwards, in the worst round."
)


# ---------------------------------------------------------------- one run


class Watch:
    """Notes when steps end, and how long the logging call takes."""

    def __init__(self):
        self.walls, self.cpus, self.in_logger_s, self.num_calls = [], [], 0.0, 0

    def step(self):
        self.walls.append(time.perf_counter())
        self.cpus.append(time.process_time())

    def around(self, owner, name):
        """Time a method from now on."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.in_logger_s += time.perf_counter() - start
                self.num_calls += 1

        setattr(owner, name, timed)


def rows(num_rows):
    """Texts of one length, so that nobody pads, and of which the label can be learnt."""
    draw = random.Random(0)
    words = [f"w{number}" for number in range(500)]
    return [{"text": " ".join(draw.choices(words, k=LENGTH - 2)), "label": index % 2} for index in range(num_rows)]


def encoded(folder, num_rows):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = rows(num_rows)
    ids = tokenizer([row["text"] for row in texts], truncation=True, max_length=LENGTH, padding="max_length")
    return [
        {"input_ids": torch.tensor(i), "attention_mask": torch.tensor(m), "labels": torch.tensor(row["label"])}
        for i, m, row in zip(ids["input_ids"], ids["attention_mask"], texts, strict=True)
    ]


def with_fit(model, num_steps, uri, place, watch):
    from trimtab import Recipe, fit
    from trimtab.runs.run_folder import RunFolder

    watch.around(RunFolder, "record")

    class Steps:
        def on_step(self, state):
            watch.step()

    recipe = Recipe(
        model=str(model),
        data={"train": str(model / "rows.csv"), "max_length": LENGTH, "eval_share": 0},
        train={"max_steps": num_steps, "batch_size": BATCH_SIZE, "log_every": 1, "lr": LR, "precision": "fp32"},
        memory={"micro_batch": BATCH_SIZE},
        checkpoint={"every": None},
        track={"uri": uri or "none", "experiment": "bench", "log_model": False},
        out=str(place / "run"),
    )
    fit(recipe, callbacks=[Steps()], progress="quiet", device="cpu")


def with_engine(model, num_steps, uri, place, watch):
    from torch.utils.data import DataLoader
    from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

    from trimtab import Engine
    from trimtab.tracking.mlflow.tracker import MlflowTracker

    watch.around(MlflowTracker, "log")
    engine = Engine(cpu=True, log_with=None if uri is None else "mlflow", project_dir=place)
    net = AutoModelForSequenceClassification.from_pretrained(model).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    loader = DataLoader(encoded(model, num_steps * BATCH_SIZE), batch_size=BATCH_SIZE)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, num_steps)
    net, optimizer, loader, scheduler = engine.prepare(net, optimizer, loader, scheduler)
    settings = {} if uri is None else {"mlflow": {"uri": uri}}
    engine.init_trackers("bench", {"lr": LR, "batch_size": BATCH_SIZE}, init_kwargs=settings)
    for step, batch in enumerate(loader, start=1):
        loss = net(**batch).loss
        engine.backward(loss)
        norm = engine.clip_grad_norm_(net.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        values = {"loss": loss.item(), "grad_norm": norm.item(), "lr": scheduler.get_last_lr()[0]}
        engine.log(values | {"epoch": step / num_steps}, step=step)
        watch.step()
    engine.end_training()


def with_trainer(model, num_steps, uri, place, watch):
    from transformers import AutoModelForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
    from transformers.integrations import MLflowCallback

    class Steps(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            watch.step()

    if uri is not None:
        os.environ["MLFLOW_TRACKING_URI"] = uri
        os.environ["MLFLOW_EXPERIMENT_NAME"] = "bench"
        watch.around(MLflowCallback, "on_log")
    arguments = TrainingArguments(
        str(place / "run"),
        max_steps=num_steps,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=LR,
        logging_steps=1,
        save_strategy="no",
        report_to="none" if uri is None else "mlflow",
        use_cpu=True,
        disable_tqdm=True,
    )
    net = AutoModelForSequenceClassification.from_pretrained(model)
    data = encoded(model, num_steps * BATCH_SIZE)
    with contextlib.redirect_stdout(sys.stderr):
        Trainer(net, arguments, train_dataset=data, callbacks=[Steps()]).train()
    if uri is not None:
        import mlflow

        mlflow.end_run()  # waits for what its thread still has to send, as the end of the program would


def with_lightning(model, num_steps, uri, place, watch):
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import MLFlowLogger
    from torch.utils.data import DataLoader
    from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = AutoModelForSequenceClassification.from_pretrained(model)

        def training_step(self, batch, index):
            loss = self.net(**batch).loss
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            self.log_dict({"loss": loss, "lr": rate, "share": (index + 1) / num_steps, "grad_norm": self.norm})
            return loss

        norm = 0.0

        def on_before_optimizer_step(self, optimizer):
            self.norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0)
            schedule = get_linear_schedule_with_warmup(optimizer, 0, num_steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    class Steps(pl.Callback):
        def on_train_batch_end(self, *_):
            watch.step()

    logger = False if uri is None else MLFlowLogger("bench", tracking_uri=uri)
    if logger:
        watch.around(MLFlowLogger, "log_metrics")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=num_steps,
        logger=logger,
        log_every_n_steps=1,
        gradient_clip_val=MAX_NORM,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
        callbacks=[Steps()],
    )
    loader = DataLoader(encoded(model, num_steps * BATCH_SIZE), batch_size=BATCH_SIZE)
    with contextlib.redirect_stdout(sys.stderr):
        trainer.fit(Classifier().train(), loader)


WAYS = {
    "trimtab fit": with_fit,
    "trimtab Engine": with_engine,
    "HF Trainer": with_trainer,
    "Lightning": with_lightning,
}
PEERS = ("HF Trainer", "Lightning")


def run_here(way, model, num_steps, uri, place):
    """One run in this process, and what it took."""
    torch.manual_seed(0)
    watch, failure = Watch(), None
    try:
        WAYS[way](model, num_steps, uri, place, watch)
    except Exception as error:  # a library that does not survive a dead server: that is what we want to know
        failure = f"{type(error).__name__}: {error}"[:200]
    ended = time.perf_counter()
    return {
        "failure": failure,
        "num_steps": len(watch.walls),
        "walls_ms": [1000 * (b - a) for a, b in zip(watch.walls, watch.walls[1:], strict=False)][NUM_WARM_UP - 1 :],
        "cpus_ms": [1000 * (b - a) for a, b in zip(watch.cpus, watch.cpus[1:], strict=False)][NUM_WARM_UP - 1 :],
        "in_logger_ms": 1000 * watch.in_logger_s / watch.num_calls if watch.num_calls else 0.0,
        "until_step_1_s": watch.walls[0] - BEGAN if watch.walls else None,
        "after_s": ended - watch.walls[-1] if watch.walls else None,
        "total_s": ended - BEGAN,
        "beside_cpu_s": _children_s(),
    }


def _children_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---------------------------------------------------------------- the stage


def make_model(folder, num_rows):
    import csv

    from transformers import BertConfig, BertForSequenceClassification

    from trimtab.model.load import train_tokenizer

    torch.manual_seed(0)
    tokenizer = train_tokenizer([row["text"] for row in rows(200)], CONFIG["vocab_size"])
    tokenizer.save_pretrained(folder)
    config = BertConfig(**CONFIG | {"vocab_size": max(len(tokenizer), CONFIG["vocab_size"])})
    BertForSequenceClassification(config).save_pretrained(folder)
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label"])
        writer.writeheader()
        writer.writerows(rows(num_rows))


def make_store(path):
    """An empty store, which takes seconds; each run gets a copy."""
    code = "import sys; from mlflow import MlflowClient; MlflowClient(sys.argv[1]).search_experiments()"
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    subprocess.run([sys.executable, "-c", code, f"sqlite:///{path}"], check=True, env=environment, capture_output=True)
    return path


def free_port():
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


@contextlib.contextmanager
def server(folder, template):
    """An `mlflow server` on loopback; gives its address and its store."""
    folder.mkdir()
    store, port = shutil.copy(template, folder / "mlflow.db"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{store}", "--artifacts-destination", str(folder / "files")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                break
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", store
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def num_arrived(store):
    """Of how many steps the store holds the loss, and forgets them for the next run."""
    with contextlib.closing(sqlite3.connect(store, timeout=60)) as database:
        (count,) = database.execute("select count(distinct step) from metrics where key = 'loss'").fetchone()
        database.execute("delete from metrics")
        database.execute("delete from latest_metrics")
        database.commit()
    return count


def run_in_child(way, setting, model, num_steps, stage, address):
    """One run in a process of its own."""
    place = Path(tempfile.mkdtemp(dir=stage))
    uri, store = None, None
    if setting == FILE:
        (place / "store").mkdir()
        store = shutil.copy(stage / "template.db", place / "store" / "mlflow.db")
        uri = "sqlite:///store/mlflow.db"
    elif setting == SERVER:
        uri, store = address
    elif setting == DEAD:
        uri = f"http://127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        way,
        str(model),
        str(num_steps),
        uri or "none",
        str(place),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false"}
    for name in ("MLFLOW_TRACKING_URI", "TRIMTAB_TRACK"):
        environment.pop(name, None)
    began = time.perf_counter()
    with (place / "stderr").open("w+") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            cwd=place,
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=PATIENCE_S)
            lines = [line for line in out.splitlines() if line.startswith('{"failure"')]
            found = json.loads(lines[-1]) if lines else None
        except subprocess.TimeoutExpired:
            found = {"failure": f"ended after {PATIENCE_S} s", "num_steps": 0, "total_s": time.perf_counter() - began}
        finally:  # it, and what it has started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if found is None:
            errors.seek(0)
            sys.exit(f"{way}, {setting}: failed\n{errors.read()[-3000:]}")
    if found["failure"] and setting != DEAD:
        sys.exit(f"{way}, {setting}: {found['failure']}")
    found["arrived"] = None if store is None else num_arrived(store)
    shutil.rmtree(place, ignore_errors=True)
    return {"way": way, "setting": setting, **found}


# ---------------------------------------------------------------- gathering and telling


def measure(arguments, stage):
    model = stage / "model"
    make_model(model, arguments.steps * BATCH_SIZE)
    make_store(stage / "template.db")
    shuffler, runs = random.Random(0), []
    with server(stage / "server", stage / "template.db") as address:
        for number in range(arguments.rounds):
            cases = [(way, setting) for way in arguments.ways for setting in arguments.settings]
            for way, setting in shuffler.sample(cases, len(cases)):
                if setting == DEAD and way in PEERS and number >= arguments.dead_rounds:
                    continue  # minutes each
                print(f"round {number + 1}: {way}, {setting} …", file=sys.stderr)
                found = run_in_child(way, setting, model, arguments.steps, stage, address)
                runs.append({"round": number, **found})
    return runs


def summary(runs):
    rows = []
    for way in dict.fromkeys(run["way"] for run in runs):
        off = {run["round"]: run for run in runs if (run["way"], run["setting"]) == (way, OFF)}
        for setting in SETTINGS:
            mine = [run for run in runs if (run["way"], run["setting"]) == (way, setting)]
            if mine:
                rows.append({"way": way, "setting": setting, **_row(mine, off)})
    return rows


def _row(mine, off):
    whole = [run for run in mine if run["failure"] is None]
    lost = [run["total_s"] - off[run["round"]]["total_s"] for run in mine if run["round"] in off]
    row = {
        "num_runs": len(mine),
        "failures": sorted({run["failure"] for run in mine if run["failure"]}),
        "failed_after_s": statistics.median([run["total_s"] for run in mine if run["failure"]] or [0.0]),
        "lost_s": statistics.median(lost) if lost else None,
    }
    if not whole:
        return row

    def middle(take):
        return statistics.median(take(run) for run in whole)

    def ratio(take):
        found = [take(run) / take(off[run["round"]]) for run in whole if run["round"] in off]
        return [min(found), statistics.median(found), max(found)] if found else None

    measures = {
        "step_ms": lambda run: statistics.median(run["walls_ms"]),
        "mean_ms": lambda run: statistics.mean(run["walls_ms"]),
        "cpu_ms": lambda run: statistics.median(run["cpus_ms"]),
    }
    row |= {name: middle(take) for name, take in measures.items()}
    row |= {name.replace("_ms", "_ratio"): ratio(take) for name, take in measures.items()}
    row |= {key: middle(lambda run, key=key: run[key]) for key in ("until_step_1_s", "after_s", "beside_cpu_s")}
    row["in_logger_ms"] = middle(lambda run: run["in_logger_ms"])
    arrived = [run["arrived"] for run in whole if run["arrived"] is not None]
    return row | {"arrived": min(arrived) if arrived else None, "num_steps": whole[0]["num_steps"]}


def _ratio(found, is_reference):
    if found is None or is_reference:
        return "1" if is_reference else "–"
    return f"{found[1]:.3f} ({found[0]:.3f} to {found[2]:.3f})"


def markdown(report):
    lines = [f"- {key}: {value}" for key, value in report["setting"].items()]
    lines.append(f"- {report['num_rounds']} rounds of {report['num_steps']} steps; ratios with their least and largest")
    lines += [
        "",
        "| library | tracking | step, ms | to off | mean, ms | to off | CPU, ms | to off | in the logger, ms "
        "| until step 1, s | after, s | beside, CPU s | lost, s | arrived |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in report["summary"]:
        head = f"| {row['way']} | {row['setting']} "
        lost = "–" if row["lost_s"] is None or row["setting"] == OFF else f"{row['lost_s']:+.1f}"
        if "step_ms" not in row:
            why = f"{row['failures'][0].split(':')[0]} ({row['num_runs']} run)"
            lines.append(
                f"{head}| no step: ended after {row['failed_after_s']:.0f} s by {why} {'| ' * 9}| {lost} | – |"
            )
            continue
        is_off = row["setting"] == OFF
        arrived = "–" if row["arrived"] is None else f"{row['arrived']} of {row['num_steps']}"
        lines.append(
            f"{head}| {row['step_ms']:.1f} | {_ratio(row['step_ratio'], is_off)} "
            f"| {row['mean_ms']:.1f} | {_ratio(row['mean_ratio'], is_off)} "
            f"| {row['cpu_ms']:.1f} | {_ratio(row['cpu_ratio'], is_off)} | {row['in_logger_ms']:.3f} "
            f"| {row['until_step_1_s']:.1f} | {row['after_s']:.1f} | {row['beside_cpu_s']:.1f} | {lost} | {arrived} |"
        )
    return "\n".join(lines) + "\n"


def main():
    if sys.argv[1:2] == ["--child"]:
        way, model, num_steps, uri, place = sys.argv[2:]
        torch.set_num_threads(1)
        print(json.dumps(run_here(way, Path(model), int(num_steps), None if uri == "none" else uri, Path(place))))
        return
    parser = argparse.ArgumentParser(description="Step time with MLflow tracking, by library and by kind of server.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dead-rounds", type=int, default=1, help="of the other libraries, which take four minutes")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--out", type=Path, help="write settings, every time and the summary to this JSON file")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/tracking.json and .md")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no server is left behind
    report = {"setting": machine("cpu", 1, LIBRARIES) | {"protocol": PROTOCOL}, "num_rounds": arguments.rounds}
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as stage:
        report |= {"num_steps": arguments.steps, "runs": measure(arguments, Path(stage))}
    report["summary"] = summary(report["runs"])
    publish(report, markdown(report), "What tracking costs", RESULTS, arguments.save, arguments.out)


if __name__ == "__main__":
    main()
