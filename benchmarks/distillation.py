"""Does a teacher help? The same student, cut out of a fine-tuned teacher, trained with and without it, seed by seed.

For every seed a teacher is fine-tuned on labelled rows, and some of its layers are the student. Both kinds of students
start from the same weights and train on the same rows, in the same order and with the same settings; one of them also
learns from the teacher. All are judged on test rows whose texts do not stand among the training rows; the weights after
the last step count. Times are those of forward passes of the last seed's models, teacher and student in turns, when
no seed is training any more: CPU time on one thread, and on a GPU also the time until its result is there.

    python benchmarks/distillation.py --work imdb --model FOLDER --data FOLDER --out imdb.json
    python benchmarks/distillation.py --work imdb --model FOLDER --data FOLDER --out imdb.json --parallel 5
    python benchmarks/distillation.py --summary imdb.json --save

`--data` is a folder with one file of training rows and one of test rows. `--parallel 5` trains five seeds at a time, in
processes that share one GPU: accuracies stay what they are, times of training do not. It needs no network and no
tracking. `--summary` also takes the files of benchmarks/distillation_lm.py; `--save` writes
benchmarks/results/distillation.md, with the numbers in a .json beside it.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from cpu_time import example_inputs, interleaved
from record import machine, publish

from trimtab import Recipe, fit
from trimtab.compress.layer_cut import cut_layers
from trimtab.data.sources import load_rows
from trimtab.inference.held_out import quality_of, read_held_out
from trimtab.inference.load import load

RESULTS = Path(__file__).parent / "results" / "distillation"
LABELS, TEACHER = "labels only", "teacher and labels"


def write_rows(rows, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read_columns(path, args):
    columns = load_rows(str(path)).columns
    return [{"text": text, "label": label} for text, label in zip(columns[args.text], columns[args.label], strict=True)]


def prepare_rows(args, work):
    """Write the training rows, and test rows whose texts are not among them; the same ones for every seed."""
    train, test = read_columns(args.train, args), read_columns(args.test, args)
    known = {row["text"] for row in train}
    test = [row for row in test if row["text"] not in known]
    for rows in (train, test):
        random.Random(0).shuffle(rows)
    files = {"train": train[: args.rows], "test": test[: args.test_rows]}
    return {name: write_rows(rows, work / f"{name}.jsonl") for name, rows in files.items()}


def train(model, rows, folder, args, *, epochs, lr, seed, distill=None):
    """Train a model; returns the folder of its last weights, and the seconds that it took."""
    started = time.perf_counter()
    result = fit(
        Recipe(
            model=model,
            task="classify",
            data={"train": rows, "eval_share": 0, "text": "text", "label": "label", "max_length": args.max_length},
            train={
                "epochs": epochs,
                "lr": lr,
                "batch_size": args.batch_size,
                "warmup": "6%",
                "weight_decay": 0.01,
                "precision": args.precision,
                "compile": "off",
            },
            checkpoint={"best": False, "every": None},
            distill=distill,
            track="none",
            seed=seed,
            out=str(folder),
        ),
        progress="quiet",
        device=args.device,
        fresh=True,
    )
    return result.best, time.perf_counter() - started


def cut(teacher, folder, layers):
    """Write the student that both kinds start from; returns the layers that were kept."""
    loaded = load(teacher, device="cpu")
    kept = cut_layers(loaded.model, layers[0] if len(layers) == 1 else layers)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return kept[0]


def judge(folder, args, test):
    loaded = load(folder, device=args.device)
    return quality_of(loaded, read_held_out(loaded, test, text="text", label="label"), batch_size=64)["accuracy"]


def speed(teacher, student, test, device):
    """Seconds of teacher and student, with 1 and with 32 rows: on the CPU, and where there is one on a GPU in bf16."""
    loaded = {"teacher": load(teacher, device="cpu"), "student": load(student, device="cpu")}
    held_out = read_held_out(loaded["teacher"], test, text="text", label="label", num_rows=200)
    models = {name: each.model.eval() for name, each in loaded.items()}
    inputs = {num_rows: example_inputs(held_out, num_rows) for num_rows in (1, 32)}
    found = {"tokens": inputs[1]["input_ids"].shape[1]}
    found["cpu"] = {rows: interleaved(models, inputs[rows], repeats) for rows, repeats in ((1, 40), (32, 8))}
    if device.startswith("cuda"):
        models = {name: model.to(device, torch.bfloat16) for name, model in models.items()}
        found[device] = {rows: interleaved(models, move(batch, device), 100) for rows, batch in inputs.items()}
    return found


def move(batch, device):
    return {name: value.to(device) for name, value in batch.items()}


def run_seed(args, seed, work):
    """Train and judge a teacher and both students."""
    files = prepare_rows(args, work)
    found = {"seed": seed, "rows": {name: len(Path(file).read_text().splitlines()) for name, file in files.items()}}
    common = {"seed": seed, "args": args}
    teacher, found["teacher_s"] = train(
        args.model, files["train"], work / "teacher", epochs=args.teacher_epochs, lr=args.teacher_lr, **common
    )
    start = work / "start"
    found["layers"] = cut(teacher, start, args.layers)
    found["accuracy"] = {"teacher": judge(teacher, args, files["test"])}
    found["accuracy"]["start"] = judge_start(start, teacher, args, files["test"])
    terms = {"alpha": args.alpha, "temperature": args.temperature, "hidden": args.hidden}
    terms["cache"] = "none" if args.hidden else "disk"
    for kind, distill in ((LABELS, None), (TEACHER, {"teacher": str(teacher), **terms})):
        student, found[f"{kind}_s"] = train(
            str(start), files["train"], work / "student", epochs=args.epochs, lr=args.lr, distill=distill, **common
        )
        found["accuracy"][kind] = judge(student, args, files["test"])
        print(seed, kind, found["accuracy"], flush=True)
    found["folders"] = {"teacher": str(teacher), "student": str(student), "test": files["test"]}
    return found


def judge_start(start, teacher, args, test):
    """Judge the student before training, with the labels and the columns of the teacher's run."""
    facts = Path(teacher) / "trimtab.json"
    if facts.exists():
        shutil.copy(facts, start)
    accuracy = judge(start, args, test)
    (start / "trimtab.json").unlink(missing_ok=True)  # the start is a plain folder to train from
    return accuracy


# ---------------------------------------------------------------------- several seeds


def run_seeds(args):
    """Run all seeds, one after the other or in parallel processes; returns what was found, seed by seed."""
    if args.parallel == 1:
        return [run_seed(args, seed, args.work / str(seed)) for seed in args.seeds]
    waiting, running, failed = list(args.seeds), {}, []
    try:
        while waiting or running:
            while waiting and len(running) < args.parallel:
                seed = waiting.pop(0)
                running[seed] = start_seed(args, seed)
            for seed in [seed for seed, process in running.items() if process.poll() is not None]:
                failed += [seed] * (running.pop(seed).returncode != 0)
            time.sleep(0.2)
    finally:
        for process in running.values():
            process.kill()
    for seed in failed:
        print(f"seed {seed} failed:", (args.work / f"{seed}.log").read_text()[-2000:], sep="\n", flush=True)
    done = [args.work / f"{seed}.json" for seed in args.seeds if seed not in failed]
    return [found for path in done for found in json.loads(path.read_text())["seeds"]]


def start_seed(args, seed):
    """Start a process for one seed with the same arguments; it shares the cores with the others."""
    args.work.mkdir(parents=True, exist_ok=True)
    out = args.work / f"{seed}.json"
    changes = ["--parallel", "1", "--seeds", str(seed), "--out", str(out), "--no-speed"]
    threads = str(max(1, (os.cpu_count() or 1) // args.parallel))
    with (args.work / f"{seed}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, *sys.argv, *changes],
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads},
        )


# ---------------------------------------------------------------------- summary


def mean_and_spread(values):
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.mean(values), spread


def terms_text(settings):
    return f"`alpha: {settings['alpha']:g}, temperature: {settings['temperature']:g}, hidden: {settings['hidden']:g}`"


def classifier_text(report):
    settings, seeds = report["settings"], report["seeds"]
    rows, first = seeds[0]["rows"], seeds[0]
    accuracy = {kind: [seed["accuracy"][kind] for seed in seeds] for kind in first["accuracy"]}
    layers = ", ".join(map(str, first["layers"]))
    lines = [
        f"{Path(settings['model']).name} as a classifier: the teacher trains {settings['teacher_epochs']:g} epochs on "
        f"{rows['train']:,} rows (learning rate {settings['teacher_lr']:g}). The student is cut out of it (layers "
        f"{layers}, counted from 0) and trains {settings['epochs']:g} epochs on the same rows (learning rate "
        f"{settings['lr']:g}), with labels alone, or with the teacher too ({terms_text(settings)}). Batches of "
        f"{settings['batch_size']} rows of at most {settings['max_length']} tokens, `train.precision: "
        f"{settings['precision']}`. Accuracy on {rows['test']:,} test "
        f"rows, mean and standard deviation over {len(seeds)} seeds, each with a teacher of its own.\n",
        "| model | accuracy | share of its teacher's |",
        "|---|---|---|",
    ]
    names = {"teacher": "teacher", "start": "student as cut, not trained"}
    for kind, found in accuracy.items():
        share = mean_and_spread([mine / teacher for mine, teacher in zip(found, accuracy["teacher"], strict=True)])
        mean, spread = mean_and_spread(found)
        name = names.get(kind, f"student, {kind}")
        lines.append(f"| {name} | {mean:.4f} ± {spread:.4f} | {share[0]:.2%} ± {share[1]:.2%} |")
    return "\n".join([*lines, "", gain_text(accuracy), *speed_lines(report)])


def gain_text(accuracy):
    gains = [(ours - alone) * 100 for ours, alone in zip(accuracy[TEACHER], accuracy[LABELS], strict=True)]
    mean, spread = mean_and_spread(gains)
    return (
        f"The teacher adds {mean:+.2f} ± {spread / len(gains) ** 0.5:.2f} points of accuracy (mean and standard error "
        f"of the paired difference; smallest {min(gains):+.2f}, largest {max(gains):+.2f})."
    )


def speed_lines(report):
    found = report.get("speed") or {}
    kinds = {name: times for name, times in found.items() if name != "tokens"}
    how = {"cpu": "CPU time of a forward pass on one thread in fp32"}
    for name, times in kinds.items():
        one, many = (times[rows]["teacher"] / times[rows]["student"] for rows in ("1", "32"))
        yield (
            f"The student is {one:.2f} times as fast as its teacher with 1 row, {many:.2f} times with 32 rows "
            f"({how.get(name, 'forward pass on the GPU in bf16, not compiled')}; rows of {found['tokens']} tokens)."
        )


def language_model_text(report):
    settings, found = report["settings"], report["perplexity"]
    lines = [
        f"{settings['name']}: {report['num_layers']} layers, and a student with half of them. Students train "
        f"{settings['steps']} steps of {settings['batch_size']} rows of {settings['max_length']} tokens (learning "
        f"rate {settings['lr']:g}), with the text alone, or with the teacher too ({terms_text(settings)}). Perplexity "
        f"per token on {report['num_tokens']:,} tokens of test text, seed {settings['seed']}.\n",
        "| model | perplexity |",
        "|---|---|",
        *(f"| {name} | {value:,.1f} |" for name, value in found.items()),
        "\nThe original was not trained on this kind of text, the students were: compare students with each other.",
        f"The student is {report['speed']:.2f} times as fast as its teacher (CPU time of a forward pass of one row "
        f"of {settings['max_length']} tokens on one thread).",
    ]
    return "\n".join(lines)


def where_text(report):
    return "; ".join(f"{name}: {value}" for name, value in report["machine"].items() if name != "load when it began")


def summarize(files, save):
    """Print the tables of reports; with `save`, those of the kind that is not given are kept from the last time."""
    kept = RESULTS.with_suffix(".json")
    found = json.loads(kept.read_text()) if save and kept.exists() else {}
    reports = [json.loads(file.read_text()) for file in files]
    classifiers = [report for report in reports if "seeds" in report]
    for report in classifiers[1:]:
        classifiers[0]["seeds"] += report["seeds"]
    if classifiers:
        classifiers[0]["seeds"].sort(key=lambda seed: seed["seed"])
        found["classifier"] = classifiers[0]
    for report in reports:
        if "perplexity" in report:
            found["language model"] = report
    texts = {
        "classifier": ("A classifier", classifier_text),
        "language model": ("A language model", language_model_text),
    }
    parts = [
        f"## {title}\n\n{write(found[kind])}\n\n{where_text(found[kind])}.\n"
        for kind, (title, write) in texts.items()
        if kind in found
    ]
    script = "`benchmarks/distillation.py` and `benchmarks/distillation_lm.py` make these tables.\n\n"
    publish(found, script + "\n".join(parts), "A student with and without its teacher", RESULTS, save)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="pretrained model that the teacher is trained from")
    parser.add_argument("--data", type=Path, help="folder with one *train* and one *test* file: parquet, jsonl, csv")
    parser.add_argument("--train", type=Path, help="training rows, instead of --data")
    parser.add_argument("--test", type=Path, help="test rows, instead of --data")
    parser.add_argument("--text", default="text", help="column of the text")
    parser.add_argument("--label", default="label", help="column of the label")
    parser.add_argument("--out", type=Path, help="file for the numbers")
    parser.add_argument("--work", type=Path, help="folder for runs, which are replaced")
    parser.add_argument("--rows", type=int, help="number of training rows; all by default")
    parser.add_argument("--test-rows", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--parallel", type=int, default=1, help="seeds at a time, each in a process")
    parser.add_argument("--layers", type=int, nargs="+", default=[3], help="a number, or the layers themselves from 0")
    parser.add_argument("--epochs", type=float, default=3, help="of the students")
    parser.add_argument("--lr", type=float, default=1e-4, help="of the students")
    parser.add_argument("--teacher-epochs", type=float, default=2)
    parser.add_argument("--teacher-lr", type=float, default=1e-4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--precision", default="auto", help="of training; auto is bf16 on a GPU that has it")
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--hidden", type=float, default=1.0, help="weight of the distance between hidden states")
    parser.add_argument("--device", help="where to train; found by default")
    parser.add_argument("--no-speed", action="store_true", help="train and judge only")
    parser.add_argument("--summary", type=Path, nargs="+", help="print the tables of these --out files instead")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/distillation.md")
    args = parser.parse_args()
    if args.summary:
        return summarize(args.summary, args.save)
    if args.data:
        args.train, args.test = (find_rows(args.data, part) for part in ("train", "test"))
    missing = [name for name in ("model", "train", "test", "out", "work") if getattr(args, name) is None]
    if missing:
        parser.error("missing: " + ", ".join(f"--{name}" for name in missing))
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    report = {
        "machine": machine(device, torch.get_num_threads(), ["torch", "transformers"]),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "seeds": run_seeds(args),
    }
    if not args.no_speed and report["seeds"]:
        report["speed"] = speed(*report["seeds"][-1]["folders"].values(), device)
    args.out.write_text(json.dumps(report) + "\n")
    if not args.no_speed:
        summarize([args.out], args.save)
    return len(report["seeds"]) < len(args.seeds)  # as an exit status: 1 if a seed failed


def find_rows(folder, part):
    found = sorted(path for path in folder.iterdir() if part in path.name)
    if len(found) != 1:
        raise SystemExit(f"{folder}: one file with {part!r} in its name is needed, found {len(found)}")
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
