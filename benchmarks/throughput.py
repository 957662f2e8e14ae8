"""How many rows a CPU-second trains: trimtab, HF Trainer (plain and grouping by length), Accelerate and Lightning.

Rounds are interleaved: in each, every variant runs once, in a shuffled order and in a process of its own, because the
libraries keep global settings. All train the same model on the same tokens with the same optimizer and schedule.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from quality import LR, MAX_GRAD_NORM, QUIET, imdb_rows, load_classifier, tokenize, write_rows
from record import machine, publish
from torch.utils.data import DataLoader

RESULTS = Path(__file__).parent / "results" / "throughput"
BATCH_SIZE = 16
NUM_FIRST_STEPS = 3  # the optimizer's state and what libraries make late are made in them
PROTOCOL = (
    "fp32, dropout on, fused AdamW, clipping, linear schedule, batches padded to their longest row; tokens are made "
    "beforehand. The clock is the CPU time of the process with all its threads, from the end of the first "
    f"{NUM_FIRST_STEPS} steps to the end of the last; nothing is evaluated or saved. Rows and tokens (without padding) "
    "are counted where they enter the model. A rate is tokens a CPU-second divided by the mean length of all rows, so "
    "that a part of an epoch with short rows is no advantage: the median over rounds, and their range. A ratio is the "
    "median of the ratios within a round, and their range. The ceiling is what the counted padding allows, if time "
    "were proportional to positions."
)


class Clock:
    """CPU time from the end of the first steps to the end of the last, and what entered the model meanwhile."""

    def __init__(self, num_steps):
        self.num_total = NUM_FIRST_STEPS + num_steps
        self.found = {"cpu_s": 0.0, "num_rows": 0, "num_tokens": 0, "num_positions": 0}
        self.num_done, self._start = 0, None

    def step(self, model):
        """An optimizer step is done."""
        self.num_done += 1
        if self.num_done == 1:
            model.register_forward_pre_hook(self._count, with_kwargs=True)
        if self.num_done == NUM_FIRST_STEPS:
            assert model.training, "the model does not train"
            gc.collect()
            self._start = time.process_time()
        elif self.num_done == self.num_total:
            self.found["cpu_s"] = time.process_time() - self._start

    def _count(self, model, args, batch):
        if NUM_FIRST_STEPS <= self.num_done < self.num_total:
            self.found["num_rows"] += len(batch["input_ids"])
            self.found["num_tokens"] += int(batch["attention_mask"].sum())
            self.found["num_positions"] += batch["input_ids"].numel()


# ---------------------------------------------------------------- the variants, each as its library documents it


def trimtab(settings, clock, seed, group_by_length=True):
    from trimtab import Recipe, fit

    class Tick:
        def on_step(self, state):
            clock.step(state.model)

    recipe = Recipe(
        model=str(settings.work / "start"),
        task="classify",
        data={"train": str(settings.work / "train.jsonl"), "eval_share": 0, "max_length": settings.max_length},
        train={"max_steps": clock.num_total, "batch_size": BATCH_SIZE, "lr": LR, "max_grad_norm": MAX_GRAD_NORM}
        | {"precision": "fp32", "group_by_length": group_by_length},
        seed=seed,
        out=tempfile.mkdtemp(dir=settings.work),
    )
    fit(recipe, callbacks=[Tick()], progress="quiet", device="cpu")


def hf_trainer(settings, clock, seed, sampling="random"):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tick(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            clock.step(model)

    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=settings.work),
        max_steps=clock.num_total,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=LR,
        max_grad_norm=MAX_GRAD_NORM,
        optim="adamw_torch_fused",
        train_sampling_strategy=sampling,
        seed=seed,
        use_cpu=True,
        dataloader_pin_memory=False,
        **QUIET,
    )
    examples, collate = examples_and_collator(settings)
    Trainer(settings.classifier, arguments, collate, examples, callbacks=[Tick()]).train()


def accelerate(settings, clock, seed):
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(seed)
    accelerator = Accelerator(cpu=True)
    parts = (settings.classifier.train(), *optimizer_and_schedule(settings, clock), shuffled_loader(settings))
    model, optimizer, scheduler, loader = accelerator.prepare(*parts)
    while clock.num_done < clock.num_total:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            clock.step(model)
            if clock.num_done == clock.num_total:
                break


def lightning(settings, clock, seed):
    try:
        import lightning
    except ImportError:  # the same under its other name
        import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = settings.classifier.train()

        def training_step(self, batch, index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            optimizer, scheduler = optimizer_and_schedule(settings, clock)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Tick(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            clock.step(module.model)

    lightning.seed_everything(seed, verbose=False)
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options |= {"max_steps": clock.num_total, "gradient_clip_val": MAX_GRAD_NORM}
    trainer = lightning.Trainer(accelerator="cpu", devices=1, callbacks=[Tick()], **options)
    trainer.fit(Module(), shuffled_loader(settings))


PEERS = {
    "does not group": {"hf-trainer": hf_trainer, "accelerate": accelerate, "lightning": lightning},
    "groups": {"hf-trainer, grouping": partial(hf_trainer, sampling="group_by_length")},
}
TARGETS = {"does not group": 1.8, "groups": 1.05}  # trimtab's ratio to the best peer of each kind
VARIANTS = {"trimtab": trimtab, **PEERS["groups"], **PEERS["does not group"]}
EXTRA = {"trimtab, not grouping": partial(trimtab, group_by_length=False)}  # only where --variants asks for it


def examples_and_collator(settings):
    from transformers import AutoTokenizer, DataCollatorWithPadding

    tokenizer = AutoTokenizer.from_pretrained(settings.work / "start")
    return torch.load(settings.work / "tokens.pt"), DataCollatorWithPadding(tokenizer)


def shuffled_loader(settings):
    examples, collate = examples_and_collator(settings)
    return DataLoader(examples, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)


def optimizer_and_schedule(settings, clock):
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.AdamW(settings.classifier.parameters(), lr=LR, weight_decay=0.0, fused=True)
    return optimizer, get_linear_schedule_with_warmup(optimizer, 0, clock.num_total)


# ---------------------------------------------------------------- measuring


def run_child(settings):
    """One variant, timed in this process; the last line of the output is what was found."""
    torch.set_num_threads(settings.threads)
    name, seed, settings.work = settings.child[0], int(settings.child[1]), Path(settings.child[2])
    settings.classifier = load_classifier(settings.work / "start")
    clock = Clock(settings.steps)
    (VARIANTS | EXTRA)[name](settings, clock, seed)
    assert clock.num_done == clock.num_total, f"{clock.num_done} steps were made, not {clock.num_total}"
    assert torch.get_num_threads() == settings.threads, "a library has changed the number of threads"
    print("\n" + json.dumps(clock.found))


def in_child(settings, name, seed, work):
    environment = {"OMP_NUM_THREADS": str(settings.threads), "TRIMTAB_CACHE": str(work / "cache")}
    command = [sys.executable, "-W", "ignore", *sys.argv, "--child", name, str(seed), str(work)]
    child = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if child.returncode:
        sys.exit(f"{name} failed:\n{child.stdout}\n{child.stderr}")
    return json.loads(child.stdout.splitlines()[-1])


def prepare(settings, work):
    """The model, the rows and their tokens on disk; gives the mean length of a row."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    torch.manual_seed(0)
    load_classifier(settings.model).save_pretrained(work / "start")
    tokenizer.save_pretrained(work / "start")
    rows, _ = imdb_rows(settings.data, settings.rows, 1)
    write_rows(rows, work / "train.jsonl")
    examples = tokenize(tokenizer, rows, settings.max_length)
    torch.save(examples, work / "tokens.pt")
    return statistics.mean(len(example["input_ids"]) for example in examples)


def measure(settings):
    runs = {name: [] for name in settings.variants}
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        mean_length = prepare(settings, Path(folder))
        for number in range(settings.rounds):
            for name in random.Random(number).sample(settings.variants, len(settings.variants)):
                found = in_child(settings, name, number, Path(folder))
                runs[name].append(found | {"rate": found["num_tokens"] / mean_length / found["cpu_s"]})
                print(f"round {number + 1}, {name}: {runs[name][-1]}", file=sys.stderr)
    return {"mean_length": mean_length, "runs": runs}


def middle(values):
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def summary(runs):
    """Rates and padding of every variant, and how trimtab compares with the best peer of each kind."""
    rates = {name: [run["rate"] for run in found] for name, found in runs.items()}
    total = {name: {key: sum(run[key] for run in found) for key in found[0]} for name, found in runs.items()}
    rows, ratios = {}, {}
    for name, sums in total.items():
        padding = 1 - sums["num_tokens"] / sums["num_positions"]
        rows[name] = middle(rates[name]) | {"rows_per_cpu_s": sums["num_rows"] / sums["cpu_s"], "padding": padding}
    for kind, peers in PEERS.items():
        there = [name for name in peers if name in rates and "trimtab" in rates]
        if there:
            best = max(there, key=lambda name: rows[name]["median"])
            ratio = middle([a / b for a, b in zip(rates["trimtab"], rates[best], strict=True)])
            ceiling = (1 - rows["trimtab"]["padding"]) / (1 - rows[best]["padding"])
            ratios[kind] = {"best": best, **ratio, "target": TARGETS[kind], "ceiling": ceiling}
    return {"variants": rows, "ratios": ratios}


def markdown(report):
    lines = [f"- {key}: {value}" for key, value in report["setting"].items()]
    lines += ["", "| variant | rate (range) | rows counted / CPU-second | padding |", "|---|---|---|---|"]
    for name, row in report["summary"]["variants"].items():
        words = "{median:.3f} ({low:.3f} to {high:.3f}) | {rows_per_cpu_s:.3f} | {padding:.1%}".format(**row)
        lines.append(f"| {name} | {words} |")
    lines.append("")
    for kind, ratio in report["summary"]["ratios"].items():
        words = "{median:.3f} ({low:.3f} to {high:.3f}) of {best}; target {target}; ceiling by padding {ceiling:.2f}"
        words += ": reached" if ratio["median"] >= ratio["target"] else ": NOT reached"
        lines.append(f"- trimtab, to the best that {kind}: {words.format(**ratio)}")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description="Rows a CPU-second trains, by library.")
    parser.add_argument("--model", type=Path, required=True, help="folder of MiniLM, or of another encoder")
    parser.add_argument("--data", type=Path, required=True, help="folder with imdb_full_{train,test}.parquet")
    parser.add_argument("--rows", type=int, default=4000, help="under 3,200, HF Trainer groups less well")
    parser.add_argument("--steps", type=int, default=50, help="timed steps of a run; 50 are one group of HF Trainer's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS, *EXTRA], default=list(VARIANTS))
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/throughput.json and .md")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.child:
        sys.exit(run_child(settings))
    setting = machine(
        "cpu", settings.threads, ("torch", "transformers", "accelerate", "lightning", "pytorch_lightning")
    )
    measured = measure(settings)
    setting["run"] = (
        f"{settings.model.name}, {settings.rows:,} rows of IMDb of {measured['mean_length']:.0f} tokens on average, at "
        f"most {settings.max_length}; batch {BATCH_SIZE}, {settings.rounds} rounds of {settings.steps} steps"
    )
    report = {"setting": setting | {"protocol": PROTOCOL}, **measured, "summary": summary(measured["runs"])}
    publish(report, markdown(report), "Rows a CPU-second trains", RESULTS, settings.save)


if __name__ == "__main__":
    main()
