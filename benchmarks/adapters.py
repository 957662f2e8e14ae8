"""A side network against LoRA and its relatives: accuracy, predicted memory on a GPU, and CPU time of a step.

MiniLM learns the 77 intents of banking77 and the two labels of IMDb with each adapter, from the same rows and the same
heads (by the seed), and is judged on the test rows after the last step. Memory is the planner's prediction for an RTX
4090 in bf16: of MiniLM, and of a Llama of 1.24 B parameters, which is not trained here.

    python benchmarks/adapters.py --model MINILM --data DATA --save
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from record import machine, publish

RESULTS = Path(__file__).parent / "results" / "adapters"
GPU = "rtx-4090"
LLAMA = Path(__file__).parent / "memory" / "llama-1b.yaml"
# each with the learning rate that it is known to like
ADAPTERS = {
    "LoRA, rank 16": ({"kind": "lora", "rank": 16}, 1e-3),
    "side network, reduction 4": ({"kind": "side", "reduction": 4}, 2e-3),
    "head only": ("none", 2e-3),
    "side network, reduction 4, every 2": ({"kind": "side", "reduction": 4, "every": 2}, 2e-3),
    "IA3": ({"kind": "ia3"}, 1e-2),
    "DoRA, rank 16": ({"kind": "lora", "rank": 16, "dora": True}, 1e-3),
}
# rows to train on, rows to judge on, tokens, epochs
WORKS = {"banking77": (1600, 600, 32, 4), "imdb": (384, 384, 96, 3), "imdb, 8 epochs": (384, 384, 96, 8)}
BATCH_SIZE = 32


def banking_rows(folder, num_train, num_test):
    def read(split, number):
        lines = (folder / "banking77" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [{name: json.loads(line)[name] for name in ("text", "label")} for line in lines]
        return random.Random(0).sample(rows, min(number, len(rows)))

    return read("train", num_train), read("test", num_test)


def imdb_rows(folder, num_train, num_test):
    import pyarrow.parquet

    def read(split):
        path = folder / "imdb" / f"imdb_full_{split}.parquet"
        return pyarrow.parquet.read_table(path, columns=["text", "label"]).to_pylist()

    train = random.Random(0).sample(read("train"), num_train)
    texts = {row["text"] for row in train}
    return train, random.Random(1).sample([row for row in read("test") if row["text"] not in texts], num_test)


def write_rows(rows, path):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


class StepTimes:
    """CPU seconds of each step, which other processes on the machine do not change much."""

    def __init__(self):
        self.ends = []

    def on_step(self, state):
        self.num_trainable = sum(p.numel() for p in state.model.parameters() if p.requires_grad)
        self.ends.append(time.process_time())

    @property
    def median(self):
        return statistics.median(b - a for a, b in zip(self.ends, self.ends[1:], strict=False))


def train(adapter, lr, files, work, model, seed):
    """Accuracy on the test rows after the last step, CPU seconds of a step, trainable parameters."""
    from trimtab import Recipe, fit

    _, _, length, epochs = WORKS[work]
    times = StepTimes()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        recipe = Recipe(
            model=str(model),
            task="classify",
            data={"train": files[0], "eval": files[1], "max_length": length},
            adapter=adapter,
            train={
                "epochs": epochs,
                "batch_size": BATCH_SIZE,
                "lr": lr,
                "warmup": "6%",
                "freeze": {"base": "always"} if adapter == "none" else {},
            },
            evaluate={"every": f"{epochs} epochs"},
            checkpoint={"every": None},
            track="none",
            seed=seed,
            out=f"{folder}/run",
        )
        result = fit(recipe, callbacks=[times], progress="quiet", device="cpu")
    return {
        "accuracy": result.fit.metrics["accuracy"],
        "cpu_s_per_step": times.median,
        "num_trainable": times.num_trainable,
        "num_steps": result.fit.step,
        "seconds": time.monotonic() - began,
    }


def predict(model):
    """Peak GiB on the GPU: of MiniLM with 32 x 256 tokens, and of a Llama of 1.24 B with 4 x 2,048."""
    import yaml

    from trimtab import predict_step_memory

    config = yaml.safe_load(LLAMA.read_text())["model"]["config"]
    found = {}
    for name, (adapter, _) in ADAPTERS.items():
        if adapter == "none":
            continue
        options = {"precision": "bf16", "gpu": GPU, "adapter": adapter}
        minilm = predict_step_memory(str(model), "classify", 32, 256, **options)
        llama = predict_step_memory(config, "causal-lm", 4, 2048, loss="chunked", **options)
        found[name] = {
            kind: {
                "allocated": one.allocated,
                "total": one.total,
                "activations": one.parts["activations"],
                "trained": one.parts["gradients"] + one.parts["optimizer state"],
            }
            for kind, one in (("MiniLM", minilm), ("Llama", llama))
        }
    return found


def markdown(report):
    lines = [f"- {key}: {value}" for key, value in report["setting"].items()]
    lines += ["", "## Accuracy and time", ""]
    heads = ["adapter", "trainable", *(f"{work}: accuracy" for work in WORKS), *(f"{w}: CPU s/step" for w in WORKS)]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in ADAPTERS:
        runs = {work: [r for r in report["runs"] if (r["adapter"], r["work"]) == (name, work)] for work in WORKS}
        if not any(runs.values()):
            continue
        cells = [name, f"{max(run['num_trainable'] for several in runs.values() for run in several):,}"]
        for key in ("accuracy", "cpu_s_per_step"):
            for work in WORKS:
                values = [run[key] for run in runs[work]]
                spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
                cells.append(f"{statistics.mean(values):.3f}{spread}" if values else "not run")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"## Predicted memory on an {GPU}, bf16, GiB", ""]
    lines += [
        "| adapter | MiniLM, 32 × 256: peak | of it activations | Llama 1.24 B, 4 × 2,048, chunked loss: peak | of it "
        "activations | gradients and state |",
        "|---" * 6 + "|",
    ]
    for name, found in report["memory"].items():
        gib = {kind: {key: value / 2**30 for key, value in sizes.items()} for kind, sizes in found.items()}
        small, large = gib["MiniLM"], gib["Llama"]
        cells = [f"{small['allocated']:.3f}", f"{small['activations']:.3f}", f"{large['allocated']:.2f}"]
        cells += [f"{large['activations']:.2f}", f"{large['trained']:.2f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description="Adapters on MiniLM: accuracy, CPU time, predicted memory.")
    parser.add_argument("--model", type=Path, required=True, help="folder of MiniLM")
    parser.add_argument("--data", type=Path, required=True, help="folder with banking77/ and imdb/")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names of adapters")
    parser.add_argument("--works", nargs="*", default=list(WORKS), help="names of works")
    parser.add_argument("--add", action="store_true", help=f"add runs to those in {RESULTS}.json")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS}.json and .md")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    report = {
        "setting": {
            "model": "all-MiniLM-L6-v2 (22.7 M parameters), fp32 on a CPU",
            "work": "; ".join(
                f"{work}: {rows[0]:,} rows, {rows[1]:,} test rows, at most {rows[2]} tokens, {rows[3]} epochs"
                for work, rows in WORKS.items()
            ),
            "protocol": f"AdamW, batches of {BATCH_SIZE}, linear schedule with 6% warmup, rates "
            + ", ".join(f"{lr:g} ({name})" for name, (_, lr) in ADAPTERS.items())
            + "; rates were not searched",
            "seeds": options.seeds,
            **machine("cpu", options.threads, ["torch", "transformers", "peft"]),
        },
    }
    before = json.loads(RESULTS.with_suffix(".json").read_text()) if options.add else {}
    report |= {"runs": before.get("runs", []), "memory": before.get("memory") or predict(options.model)}
    with tempfile.TemporaryDirectory() as folder:
        for work in options.works:
            read = banking_rows if work == "banking77" else imdb_rows
            rows = read(options.data, *WORKS[work][:2])
            files = [write_rows(part, Path(folder) / f"{work}-{i}.jsonl") for i, part in enumerate(rows)]
            for seed in range(options.seeds):
                for name in options.only or ADAPTERS:
                    found = train(*ADAPTERS[name], files, work, options.model, seed)
                    report["runs"].append({"adapter": name, "work": work, "seed": seed, **found})
                    print(work, seed, name, found, file=sys.stderr, flush=True)
    publish(report, markdown(report), "Adapters: accuracy, time and memory", RESULTS, options.save)


if __name__ == "__main__":
    main()
