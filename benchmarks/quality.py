"""Does trimtab train as well as HF Trainer? The same model, rows and settings in both, interleaved, seed by seed.

Both start from one folder with one head, and a model of its own judges the final weights of both on the same test rows
in fp32, so that neither library's evaluation matters. trimtab groups rows by length, which is its default; HF Trainer
does not, which is its own: everything else is told to be equal, and checked where it can be.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # HF Trainer would spread a batch over all that it sees
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from record import machine, publish

RESULTS = Path(__file__).parent / "results" / "quality"
TARGET_POINTS = 0.5
QUIET = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}  # for HF Trainer
LR, BATCH_SIZE, WEIGHT_DECAY, WARMUP, MAX_GRAD_NORM = 5e-5, 16, 0.01, 0.06, 1.0
PROTOCOL = (
    "AdamW (fused, 0.9 / 0.999 / 1e-8), linear schedule, clipping at 1.0; biases and norms do not decay. Training rows "
    "and test rows are drawn once, by a fixed seed; a test row whose text stands among the training rows is left out. "
    "For each seed a head is drawn and saved with the model, and both libraries start from that folder; the order of "
    "rows and dropout follow from the seed, but are not the same in both. The weights after the last step are judged, "
    "not the best ones. trimtab groups rows by length and HF Trainer does not, as their defaults are."
)


# ---------------------------------------------------------------- rows


def imdb_rows(folder, num_train, num_test):
    """Reviews drawn by a fixed seed, as two lists of dicts; no text stands in both."""
    import pyarrow.parquet

    def read(split):
        return pyarrow.parquet.read_table(folder / f"imdb_full_{split}.parquet", columns=["text", "label"]).to_pylist()

    train = random.Random(0).sample(read("train"), num_train)
    texts = {row["text"] for row in train}
    return train, random.Random(1).sample([row for row in read("test") if row["text"] not in texts], num_test)


def write_rows(rows, path):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def tokenize(tokenizer, rows, max_length):
    """Rows as HF Trainer takes them: lists of ids, padded by its collator."""
    encoded = tokenizer([row["text"] for row in rows], truncation=True, max_length=max_length)
    examples = [dict(zip(encoded, values, strict=True)) for values in zip(*encoded.values(), strict=True)]
    return [example | {"labels": row["label"]} for example, row in zip(examples, rows, strict=True)]


# ---------------------------------------------------------------- the two libraries


def trimtab(start, tokenizer, files, examples, settings, seed):
    """The weights after training with `fit`, and what it found itself on the test rows."""
    from trimtab import Recipe, fit

    initial = load_classifier(start).state_dict()

    class Look:
        """Sees that training begins with the weights of the folder, and takes those of the end."""

        def on_step(self, state):
            if state.step == 1:  # the first learning rate of a warmup is 0, so that nothing has moved yet
                unlike = [k for k, v in state.model.state_dict().items() if not torch.equal(v.cpu(), initial[k])]
                assert not unlike, f"trimtab did not begin with the weights of the folder: {unlike}"

        def on_end(self, state):
            self.weights = to_host(state.model.state_dict())

    look = Look()
    recipe = Recipe(
        model=str(start),
        task="classify",
        data={"train": files[0], "eval": files[1], "text": "text", "label": "label", "max_length": settings.max_length},
        train={"epochs": settings.epochs, "warmup": settings.warmup_steps, "precision": settings.precision}
        | {"batch_size": BATCH_SIZE, "lr": LR, "weight_decay": WEIGHT_DECAY, "max_grad_norm": MAX_GRAD_NORM},
        evaluate={"every": f"{settings.num_steps} steps", "metric": "accuracy", "batch_size": 64},
        checkpoint={"best": False},
        seed=seed,
        out=str(start.parent / f"trimtab-{seed}"),
    )
    result = fit(recipe, callbacks=[look], progress="quiet", device=settings.device)
    wanted = {"num_steps": settings.num_steps, "warmup_steps": settings.warmup_steps, "num_train_rows": settings.rows}
    planned = {key: getattr(result.plan, key) for key in wanted}
    assert planned == wanted, f"trimtab planned {planned}, not {wanted}"
    return look.weights, result.fit.metrics["accuracy"], result.fit.step


def hf_trainer(start, tokenizer, files, examples, settings, seed):
    """The weights after training with HF Trainer, and what it found itself on the test rows."""
    from transformers import DataCollatorWithPadding, PrinterCallback, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(start.parent / f"hf-{seed}"),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=64,
        learning_rate=LR,
        weight_decay=WEIGHT_DECAY,
        warmup_steps=settings.warmup_steps,
        optim="adamw_torch_fused",
        max_grad_norm=MAX_GRAD_NORM,
        fp16=settings.precision == "fp16",
        bf16=settings.precision == "bf16",
        seed=seed,
        use_cpu=settings.device == "cpu",
        dataloader_pin_memory=settings.device != "cpu",
        **QUIET,
    )
    trainer = Trainer(
        model=load_classifier(start),
        args=arguments,
        train_dataset=examples[0],
        eval_dataset=examples[1],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return to_host(trainer.model.state_dict()), trainer.evaluate()["eval_accuracy"], trainer.state.global_step


LIBRARIES = {"trimtab": trimtab, "hf-trainer": hf_trainer}


# ---------------------------------------------------------------- judging


def load_classifier(folder):
    from transformers import AutoModelForSequenceClassification, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, dtype=torch.float32)


def to_host(state):
    return {name: value.detach().cpu().clone() for name, value in state.items()}


@torch.no_grad()
def accuracy(judge, tokenizer, examples, device):
    """The share of examples that the model labels rightly, in fp32."""
    judge = judge.to(device).eval()
    ordered = sorted(examples, key=lambda example: len(example["input_ids"]))
    num_right = 0
    for start in range(0, len(ordered), 64):
        batch = tokenizer.pad(ordered[start : start + 64], return_tensors="pt").to(device)
        labels = batch.pop("labels")
        num_right += int((judge(**batch).logits.argmax(-1) == labels).sum())
    return num_right / len(ordered)


def run_seed(seed, settings, tokenizer, rows, work):
    """Both libraries from one initial model, the first one in turn."""
    start = work / f"start-{seed}"
    torch.manual_seed(seed)
    judge = load_classifier(settings.model)
    judge.save_pretrained(start)
    tokenizer.save_pretrained(start)
    files = [write_rows(part, work / f"{name}.jsonl") for name, part in zip(("train", "test"), rows, strict=True)]
    examples = [tokenize(tokenizer, part, settings.max_length) for part in rows]
    found = {"seed": seed, "before": accuracy(judge, tokenizer, examples[1], settings.device)}
    for name in list(LIBRARIES)[:: 1 if seed % 2 == 0 else -1]:
        began = time.monotonic()
        weights, own, num_steps = LIBRARIES[name](start, tokenizer, files, examples, settings, seed)
        seconds = time.monotonic() - began
        assert num_steps == settings.num_steps, f"{name} made {num_steps} steps, not {settings.num_steps}"
        judge.load_state_dict(weights)
        judged = accuracy(judge, tokenizer, examples[1], settings.device)
        found[name] = {"accuracy": judged, "own_accuracy": own, "num_steps": num_steps, "seconds": seconds}
        print(f"seed {seed}: {name} {judged:.4f} (its own word: {own:.4f}), {seconds:.0f} s", file=sys.stderr)
    return found


def summary(runs):
    scores = {name: [run[name]["accuracy"] for run in runs] for name in LIBRARIES}
    differences = [100 * (a - b) for a, b in zip(scores["trimtab"], scores["hf-trainer"], strict=True)]
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    return {
        "mean_accuracy": {name: statistics.mean(values) for name, values in scores.items()},
        "difference_points": mean,
        "standard_error_points": error,
        "within_target": abs(mean) <= TARGET_POINTS,
    }


# ---------------------------------------------------------------- telling


def markdown(report):
    lines = [f"- {key}: {value}" for key, value in report["setting"].items()]
    lines += ["", "| seed | before | trimtab | HF Trainer | difference, points |", "|---|---|---|---|---|"]
    for run in report["runs"]:
        ours, theirs = run["trimtab"]["accuracy"], run["hf-trainer"]["accuracy"]
        words = f"{run['before']:.4f} | {ours:.4f} | {theirs:.4f} | {100 * (ours - theirs):+.2f}"
        lines.append(f"| {run['seed']} | {words} |")
    found = report["summary"]
    ours, theirs = (found["mean_accuracy"][name] for name in ("trimtab", "hf-trainer"))
    difference, error = f"{found['difference_points']:+.2f}", found["standard_error_points"]
    lines += [f"| mean | | {ours:.4f} | {theirs:.4f} | {difference} |", ""]
    noise = "" if error is None else f" (standard error over the seeds {error:.2f})"
    word = "within" if found["within_target"] else "NOT within"
    lines.append(f"The means differ by {difference} points{noise}: {word} {TARGET_POINTS} points.")
    return "\n".join(lines) + "\n"


def parse_arguments():
    parser = argparse.ArgumentParser(description="Test accuracy of one model trained by trimtab and by HF Trainer.")
    parser.add_argument("--model", type=Path, required=True, help="folder of MiniLM, or of another encoder")
    parser.add_argument("--data", type=Path, required=True, help="folder with imdb_full_{train,test}.parquet")
    parser.add_argument("--rows", type=int, default=4000, help="training rows")
    parser.add_argument("--test-rows", type=int, help="test rows (default: 2000, or --rows where that is less)")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 up")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/quality.json and .md")
    settings = parser.parse_args()
    settings.test_rows = settings.test_rows or min(2000, settings.rows)
    settings.num_steps = math.ceil(settings.rows / BATCH_SIZE) * settings.epochs
    settings.warmup_steps = math.ceil(WARMUP * settings.num_steps)
    return settings


def main():
    settings = parse_arguments()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    rows = imdb_rows(settings.data, settings.rows, settings.test_rows)
    words = (
        f"{settings.model.name}, {settings.rows:,} training and {settings.test_rows:,} test rows of IMDb, "
        f"{settings.epochs} epoch(s), batch {BATCH_SIZE}, lr {LR}, weight decay {WEIGHT_DECAY}, warmup "
        f"{settings.warmup_steps} of {settings.num_steps} steps, max_length {settings.max_length}, "
        f"{settings.precision} on {settings.device}"
    )
    setting = machine(settings.device, torch.get_num_threads(), ("torch", "transformers", "accelerate"))
    with tempfile.TemporaryDirectory(prefix="quality-") as work:
        os.environ["TRIMTAB_CACHE"] = str(Path(work) / "cache")
        runs = [run_seed(seed, settings, tokenizer, rows, Path(work)) for seed in range(settings.seeds)]
    setting |= {"run": words, "protocol": PROTOCOL}
    report = {"setting": setting, "runs": runs, "summary": summary(runs)}
    publish(report, markdown(report), "Accuracy beside HF Trainer", RESULTS, settings.save)


if __name__ == "__main__":
    main()
