"""What a checkpoint costs, and how long it takes to go on from one: trimtab, Accelerate and HF Trainer in one run.

Two measurements, each in a process of its own, because the libraries keep global settings. *Saving*: short blocks of
steps of one model, with a save at their beginning and without one, follow each other in a shuffled order. *Resuming*:
every library trains a tiny model to a late step; then runs that were saved early and late go on, in a shuffled order.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import overhead
import torch
from quality import QUIET, load_classifier, tokenize, write_rows
from record import machine, publish
from torch.utils.data import DataLoader, default_collate

RESULTS = Path(__file__).parent / "results" / "checkpoint"
SAVE_EVERY = 50  # steps; what the ratios are for
KEEP = 2
TARGET = 1.03  # of trimtab's wall time, at one save for each 50 steps
EARLY = 10
NUM_ROUNDS_OF_RESUMING = 4
BATCH_SIZE = 4
LENGTH = 8
NO_LAYERS = dict(hidden_size=16, num_hidden_layers=0, num_attention_heads=2, intermediate_size=32)
PROTOCOLS = {
    "saving": (
        "fp32, eager attention with masks, dropout on, AdamW, clipping, linear schedule; every library keeps the last "
        f"{KEEP} checkpoints. A block begins with a save, or with none, and each library is compared with its own "
        "blocks without one. What is still being written when the steps of a block are done is waited for, within its "
        "time. The extra time of a block is that of one save, whatever its length, so the ratio at one save for each "
        f"{SAVE_EVERY} steps is 1 + (ratio of the blocks - 1) x (steps of a block) / {SAVE_EVERY}: the median over "
        "rounds, with the 95% interval of that median. trimtab's writer has a thread of its own and waits until all is "
        "on the disk (fsync). With one thread that trains and two cores it has a core for itself; where it has none, "
        "its work holds the training up, and the ratio of CPU time, which counts all threads of the process, is what "
        "to look at. The others write in the training thread and leave the rest to the system, which is made to bring "
        "it to the disk before the next block, in nobody's time. `without saving, again` is a second block of "
        "trimtab's without a save: its row is noise."
    ),
    "resuming": (
        "A BERT without layers, batch {batch_size}, {num_rows:,} rows, shuffled, the late step within the first epoch. "
        "Model and data are there before the clock starts, which runs until the first new step is done. trimtab, "
        "recipe: finding, verifying and loading the state, and what `fit` does from then on; trimtab, own loop: "
        "`load_state`; Accelerate: `load_state` and `skip_first_batches`, with its seedable sampler; HF Trainer: "
        "`train(resume_from_checkpoint=...)`, which also makes its loader and optimizer. trimtab verifies the checksum "
        "of every file first. Wall time, median over {num_rounds} rounds in shuffled order, and their range. Right "
        "rows: whether the first new step saw those that the same step of the undisturbed run saw."
    ),
}


# ---------------------------------------------------------------- saving: each library as it documents it


def trimtab_saving(model, optimizer, loader, scheduler, folder):
    """As the loop of recipes saves."""
    from trimtab import Engine
    from trimtab.checkpoint.background import BackgroundWriter
    from trimtab.checkpoint.checkpoints_folder import CheckpointsFolder

    engine, shelf = Engine(cpu=True), CheckpointsFolder(folder, keep=KEEP)
    block = overhead.with_the_verbs_of_accelerate(engine, *engine.prepare(model, optimizer, loader, scheduler))
    writer = BackgroundWriter(on_saved=lambda _: shelf.tidy())

    def save(step):
        failure = writer.save(shelf.place(step), engine.capture_state(), {"step": step})
        assert failure is None, failure

    return SimpleNamespace(block=block, save=save, wait=writer.wait, optimizer=optimizer)


def accelerate_saving(model, optimizer, loader, scheduler, folder):
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    files = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=KEEP)
    accelerator = Accelerator(cpu=True, project_config=files)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    block = overhead.with_the_verbs_of_accelerate(accelerator, *prepared)
    return SimpleNamespace(
        block=block, save=lambda step: accelerator.save_state(), wait=lambda: None, optimizer=optimizer
    )


def hf_trainer_saving(model, optimizer, loader, scheduler, folder):
    """Its saving in a plain loop, because its own loop cannot take turns with others."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(output_dir=str(folder), save_total_limit=KEEP, use_cpu=True, **QUIET)
    trainer = Trainer(model, arguments, optimizers=(optimizer, scheduler))

    def save(step):
        trainer.state.global_step = step
        trainer._save_checkpoint(model, trial=None)

    block = overhead.raw(model, optimizer, loader, scheduler, 1)
    return SimpleNamespace(block=block, save=save, wait=lambda: None, optimizer=optimizer)


SAVING = {"trimtab": trimtab_saving, "accelerate": accelerate_saving, "hf-trainer": hf_trainer_saving}
# each is a library and whether it saves; every library is compared with itself
BLOCKS = {name: (name, True) for name in SAVING} | {f"{name} without saving": (name, False) for name in SAVING}
BLOCKS["without saving, again"] = ("trimtab", False)


def timed_block(library, step, seed):
    """Milliseconds of a block; with a step it begins with a save."""
    found = {}

    def run():
        start = time.perf_counter()
        if step is not None:
            library.save(step)
            found["stood_still_ms"] = (time.perf_counter() - start) * 1000
        library.block()
        library.wait()
        found["wall_ms"] = (time.perf_counter() - start) * 1000

    library.optimizer.zero_grad()  # as the loop of recipes leaves them; trimtab would save gradients, too
    os.sync()
    found["cpu_ms"] = overhead.cpu_ms(run, seed)
    return found


def measure_saving(case, work):
    from transformers import get_linear_schedule_with_warmup

    libraries = {}
    for name, prepare in SAVING.items():
        model = overhead.build_model(case)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
        loader = DataLoader(overhead.build_rows(case), batch_size=case.batch_size)
        scheduler = get_linear_schedule_with_warmup(optimizer, 0, case.num_steps * 3 * (case.num_rounds + 1))
        libraries[name] = prepare(model, optimizer, loader, scheduler, work / name)
    for number, library in enumerate(libraries.values()):
        timed_block(library, step=1, seed=number)  # the optimizer's state and trimtab's memory for snapshots are made
    times = {name: [] for name in BLOCKS}
    shuffler = random.Random(0)
    for number in range(1, case.num_rounds + 1):
        for name in shuffler.sample(list(BLOCKS), len(BLOCKS)):
            library, saves = BLOCKS[name]
            times[name].append(timed_block(libraries[library], 1 + number if saves else None, number))
    return {"times": times, "mib_of_a_checkpoint": {name: size_of_one(work / name, model) for name in SAVING}}


def size_of_one(folder, model):
    """MiB of the newest checkpoint; at least weights and two moments, and of as many as are kept."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    by_folder = {}
    for path in files:
        by_folder[path.parent] = by_folder.get(path.parent, 0) + path.stat().st_size
    least = 3 * sum(parameter.nbytes for parameter in model.parameters())
    whole = [size for size in by_folder.values() if size >= least]
    assert len(whole) == KEEP, f"{folder} holds {len(whole)} whole checkpoints, not {KEEP}"
    return max(whole) / 2**20


def summary_of_saving(case, times):
    rows = {}
    for name, (library, saves) in BLOCKS.items():
        if not saves and name != "without saving, again":
            continue
        row = {}
        for clock in ("wall_ms", "cpu_ms"):
            pair = {
                "raw": [t[clock] for t in times[f"{library} without saving"]],
                name: [t[clock] for t in times[name]],
            }
            found = overhead.summary(pair)
            row[f"{clock}_of_a_step"] = found["raw"]["cpu_ms"] / case.num_steps
            share = case.num_steps / SAVE_EVERY
            row[clock] = {key: 1 + (value - 1) * share for key, value in found[name]["ratio"].items()}
        if saves:
            row["stood_still_ms"] = statistics.median(t["stood_still_ms"] for t in times[name])
        rows[name] = row
    return rows


# ---------------------------------------------------------------- resuming: each library as it documents it


class Watch:
    """Runs a clock until a step is done, and knows the rows that the model saw last."""

    def __init__(self):
        self.seconds, self._start, self._rows = 0.0, None, None

    @contextmanager
    def looking(self):
        """While every model of this kind is looked at, whoever builds it."""
        from transformers import BertForSequenceClassification

        forward = BertForSequenceClassification.forward

        @wraps(forward)
        def watched(model, *args, **batch):
            self._rows = batch["input_ids"]
            return forward(model, *args, **batch)

        with patch.object(BertForSequenceClassification, "forward", watched):
            yield

    def start(self):
        self._start = time.perf_counter()

    def stop(self):
        self.seconds += time.perf_counter() - self._start
        self._start = None

    def rows(self):
        """The rows of the last step, as the ids of their tokens without padding."""
        return [[token for token in row if token] for row in self._rows.tolist()]


class Stops:
    """What happens after which step: a save, a look at the rows, the end."""

    def __init__(self, watch, save=(), look=()):
        self._watch, self._save, self._look = watch, save, look
        self.seen = {}

    def wants_save(self, step):
        return step in self._save

    def is_over(self, step):
        """Look at the rows of this step; whether it was the last."""
        if step in self._look:
            self.seen[step] = self._watch.rows()
        return step >= max(self._look)


class OwnLoop:
    """A loop of one's own with Accelerate's verbs."""

    def __init__(self, settings, work, watch, name):
        self._settings, self._work, self._watch, self._name = settings, work, watch, name

    def _build(self):
        from transformers import get_linear_schedule_with_warmup

        if self._name == "accelerate":
            from accelerate import Accelerator, DataLoaderConfiguration

            plan = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
            engine = Accelerator(cpu=True, dataloader_config=plan)
        else:
            from trimtab import Engine

            engine = Engine(cpu=True)
        model, examples = self._settings.parts()
        torch.manual_seed(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
        loader = DataLoader(examples, batch_size=BATCH_SIZE, shuffle=True)
        scheduler = get_linear_schedule_with_warmup(optimizer, 0, len(loader))
        return engine, *engine.prepare(model, optimizer, loader, scheduler)

    def _place(self, step):
        return str(self._work / self._name / f"state-{step}")

    def _run(self, engine, model, optimizer, loader, scheduler, stops, num_done):
        def batches():
            for step, batch in enumerate(loader, start=num_done + 1):
                yield batch
                if stops.wants_save(step):
                    engine.save_state(self._place(step))
                if stops.is_over(step):
                    return

        overhead.with_the_verbs_of_accelerate(engine, model, optimizer, batches(), scheduler)()

    def train(self, stops):
        self._run(*self._build(), stops, 0)

    def go_on(self, step, stops):
        engine, model, optimizer, loader, scheduler = self._build()
        self._watch.start()
        engine.load_state(self._place(step))
        if self._name == "accelerate":
            loader = engine.skip_first_batches(loader, step)
        self._run(engine, model, optimizer, loader, scheduler, stops, step)
        self._watch.stop()


class TrimtabRecipe:
    """`fit`, whose data and model are there before the clock starts, as those of the others are."""

    def __init__(self, settings, work, watch):
        self._settings, self._work, self._watch = settings, work / "recipe", watch

    def _fit(self, out, stops, save_every, **options):
        from trimtab import Recipe, fit
        from trimtab.errors import Stopped

        class AtStep:
            @staticmethod
            def on_step(state):
                if options:  # a run that goes on: this is its first new step
                    self._watch.stop()
                if stops.is_over(state.step):
                    os.kill(os.getpid(), signal.SIGTERM)  # a stop that can be resumed; a wish to end would be final

        recipe = Recipe(
            model=str(self._settings.folder),
            task="classify",
            data={"train": str(self._settings.folder / "rows.jsonl"), "eval_share": 0, "max_length": LENGTH},
            train={"epochs": 1, "batch_size": BATCH_SIZE, "precision": "fp32", "log_every": 1000},
            checkpoint={"every": f"{save_every} steps"},
            out=str(out),
        )
        with contextlib.suppress(Stopped):
            fit(recipe, callbacks=[AtStep()], progress="quiet", device="cpu", **options)

    def train(self, stops):
        """Twice, because checkpoints are saved in even intervals; the second is the undisturbed run."""
        for step in (EARLY, self._settings.late):
            is_last = step == self._settings.late
            self._fit(self._work / str(step), stops if is_last else Stops(self._watch, look=(step,)), step)

    def go_on(self, step, stops):
        import trimtab.run

        out = self._work / f"copy-of-{step}"  # going on from a step removes later ones
        shutil.copytree(self._work / str(step), out)
        find_start_point, go_on = trimtab.run.find_start_point, trimtab.run.go_on

        def timed_find(*args):
            self._watch.start()
            found = find_start_point(*args)
            self._watch.stop()
            assert found.checkpoint.name == f"step-{step}", found
            return found

        def timed_go_on(*args):
            self._watch.start()
            return go_on(*args)

        with patch.object(trimtab.run, "find_start_point", timed_find), patch.object(trimtab.run, "go_on", timed_go_on):
            self._fit(out, stops, self._settings.late, resume=f"step-{step}")
        shutil.rmtree(out)


class HFTrainer:
    """HF Trainer."""

    def __init__(self, settings, work, watch):
        self._settings, self._work, self._watch = settings, work / "hf-trainer", watch

    def _trainer(self, after_step):
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class AtStep(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                after_step(state.global_step, control)

        model, examples = self._settings.parts()
        arguments = TrainingArguments(
            output_dir=str(self._work),
            num_train_epochs=1,
            per_device_train_batch_size=BATCH_SIZE,
            use_cpu=True,
            dataloader_pin_memory=False,
            seed=0,
            **QUIET,
        )
        return Trainer(model, arguments, default_collate, examples, callbacks=[AtStep()])

    def train(self, stops):
        def after_step(step, control):
            control.should_save = stops.wants_save(step)
            control.should_training_stop = stops.is_over(step)

        self._trainer(after_step).train()

    def go_on(self, step, stops):
        def after_step(step, control):
            self._watch.stop()
            control.should_training_stop = stops.is_over(step)

        trainer = self._trainer(after_step)
        self._watch.start()
        trainer.train(resume_from_checkpoint=str(self._work / f"checkpoint-{step}"))


RESUMING = {
    "trimtab, recipe": TrimtabRecipe,
    "trimtab, own loop": partial(OwnLoop, name="trimtab"),
    "accelerate": partial(OwnLoop, name="accelerate"),
    "hf-trainer": HFTrainer,
}


class ResumingSettings:
    """What all train: the rows, as a file and as tokens, and a model that is so small that loading it is nothing."""

    def __init__(self, folder, late):
        from transformers import BertConfig, BertForSequenceClassification

        from trimtab.model.load import train_tokenizer

        self.folder, self.late = folder, late
        self.num_rows = late * BATCH_SIZE * 5 // 4
        draw = random.Random(0)
        words = [f"word{number}" for number in range(500)]
        rows = [{"text": " ".join(draw.choices(words, k=draw.randint(3, 6)))} for _ in range(self.num_rows)]
        rows = [row | {"label": index % 2} for index, row in enumerate(rows)]
        self._tokenizer = train_tokenizer([row["text"] for row in rows[:2000]], 1000)
        self._tokenizer.save_pretrained(folder)
        torch.manual_seed(0)
        config = BertConfig(vocab_size=len(self._tokenizer), **NO_LAYERS)
        BertForSequenceClassification(config).save_pretrained(folder)
        write_rows(rows, folder / "rows.jsonl")
        # tensors of one length: a collator that pads would take longer than the model
        examples = tokenize(partial(self._tokenizer, padding="max_length"), rows, LENGTH)
        self._examples = [{name: torch.tensor(value) for name, value in row.items()} for row in examples]

    def parts(self):
        """A model that was not trained yet, and the rows."""
        return load_classifier(self.folder).train(), self._examples


def measure_resuming(late, num_rounds, work):
    settings = ResumingSettings(work, late)
    found = {name: {step: [] for step in (EARLY, late)} for name in RESUMING}
    is_right = {name: {step: True for step in (EARLY, late)} for name in RESUMING}
    undisturbed = {}
    for name, make in RESUMING.items():
        watch, began = Watch(), time.monotonic()
        with watch.looking():
            stops = Stops(watch, save=(EARLY, late), look=(EARLY + 1, late + 1))
            make(settings, work, watch).train(stops)
        undisturbed[name] = stops.seen
        print(f"{late + 1:,} steps with {name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    shuffler = random.Random(0)
    pairs = [(name, step) for name in RESUMING for step in (EARLY, late)]
    for number in range(num_rounds + 1):
        for name, step in shuffler.sample(pairs, len(pairs)):
            watch = Watch()
            with watch.looking():
                stops = Stops(watch, look=(step + 1,))
                RESUMING[name](settings, work, watch).go_on(step, stops)
            if number > 0:  # the first round is the warm-up
                found[name][step].append(watch.seconds)
            is_right[name][step] &= stops.seen == {step + 1: undisturbed[name][step + 1]}
    wrong = [step for step, right in is_right["trimtab, recipe"].items() if not right]
    wrong += [step for step, right in is_right["trimtab, own loop"].items() if not right]
    if wrong:
        sys.exit(f"trimtab went on with other rows than those of the undisturbed run: steps {wrong}")
    return {"seconds": found, "sees_the_right_rows": is_right, "num_rows": settings.num_rows}


# ---------------------------------------------------------------- gathering and telling


def measure(name, arguments, case):
    """One of the two, in a process of its own."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=arguments.folder) as folder:
        os.environ["TRIMTAB_CACHE"] = str(Path(folder) / "cache")
        if name == "saving":
            found = measure_saving(case, Path(folder))
        else:
            found = measure_resuming(arguments.late, arguments.resume_rounds, Path(folder))
    assert torch.get_num_threads() == arguments.threads, "a library has changed the number of threads"
    return found


def disk(folder):
    """The file system that is written to."""
    shown = subprocess.run(["df", "--output=fstype,target", folder], capture_output=True, text=True).stdout
    return " on ".join(shown.splitlines()[-1].split()) if shown else "not known"


def markdown(report):
    lines = [f"- {key}: {value}" for key, value in report["setting"].items()]
    if "saving" in report:
        lines += markdown_of_saving(report["saving"])
    if "resuming" in report:
        lines += markdown_of_resuming(report["resuming"])
    return "\n".join(lines) + "\n"


def markdown_of_saving(found):
    case, rows = found["case"], found["summary"]
    sizes = ", ".join(f"{name} {size:.0f}" for name, size in found["mib_of_a_checkpoint"].items())
    lines = [
        "",
        f"## One save for each {SAVE_EVERY} steps, against no saving",
        "",
        f"- protocol: {PROTOCOLS['saving']}",
    ]
    lines.append(
        f"- BERT, 6 layers x 384, batch {case['batch_size']} x {case['length']}: {case['num_rounds']} rounds of blocks "
        f"of {case['num_steps']} steps; without saving a step takes {rows['trimtab']['wall_ms_of_a_step']:.0f} ms of "
        f"wall time, {rows['trimtab']['cpu_ms_of_a_step']:.0f} ms of CPU time; MiB of a checkpoint: {sizes}"
    )
    lines += ["", "| | wall time, ratio (95%) | CPU time, ratio (95%) | a save holds the loop up, ms |"]
    lines += ["|---|---|---|---|"]
    for name, row in rows.items():
        ratios = ["{median:.4f} ({low:.4f} to {high:.4f})".format(**row[clock]) for clock in ("wall_ms", "cpu_ms")]
        still = f"{row['stood_still_ms']:.0f}" if "stood_still_ms" in row else ""
        lines.append(f"| {name} | {' | '.join(ratios)} | {still} |")
    reached = rows["trimtab"]["wall_ms"]["high"] <= TARGET
    words = f"Target for trimtab: at most {TARGET} in wall time, up to the end of the interval: "
    return [*lines, "", words + ("reached." if reached else "NOT reached.")]


def markdown_of_resuming(found):
    late = found["late"]
    words = {"batch_size": BATCH_SIZE, "num_rows": found["num_rows"], "num_rounds": found["num_rounds"]}
    lines = ["", "## From a checkpoint to the first new step", ""]
    lines += [f"- protocol: {PROTOCOLS['resuming'].format(**words)}", ""]
    lines += [f"| | at step {EARLY}, ms | at step {late:,}, ms | right rows |", "|---|---|---|---|"]
    for name, by_step in found["seconds"].items():
        cells = []
        for seconds in by_step.values():
            middle, low, high = (1000 * value for value in (statistics.median(seconds), min(seconds), max(seconds)))
            cells.append(f"{middle:.0f} ({low:.0f} to {high:.0f})")
        right = found["sees_the_right_rows"][name].values()
        cells.append("yes" if all(right) else "no" if not any(right) else "not always")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def parse_arguments():
    parser = argparse.ArgumentParser(description="What a save costs, and how long it takes to go on, by library.")
    parser.add_argument("--only", choices=PROTOCOLS, help="one of the two measurements")
    parser.add_argument("--rounds", type=int, default=8, help="timed blocks of each kind, 2 or more")
    parser.add_argument("--steps", type=int, default=3, help=f"steps in a block; {SAVE_EVERY} takes no scaling")
    parser.add_argument("--late", type=int, default=10_000, help="the late step, of which a resume is timed")
    parser.add_argument("--resume-rounds", type=int, default=NUM_ROUNDS_OF_RESUMING)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, help="where to write; the system's folder for temporary files if left out"
    )
    parser.add_argument("--out", type=Path, help="write settings, every time and the summary to this JSON file")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/checkpoint.json and .md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    case = replace(overhead.CASES["bert-6x384"], num_steps=arguments.steps, num_rounds=arguments.rounds)
    if arguments.child:
        print("\n" + json.dumps(measure(arguments.child, arguments, case)))
        return
    setting = machine("cpu", arguments.threads, ("torch", "transformers", "accelerate"))
    setting["written to"] = disk(arguments.folder or tempfile.gettempdir())
    report = {"setting": setting}
    for name in [arguments.only] if arguments.only else PROTOCOLS:
        print(f"measuring {name} …", file=sys.stderr)
        report[name] = overhead.measure_in_child(name)
    if "saving" in report:
        report["saving"] |= {"case": asdict(case), "summary": summary_of_saving(case, report["saving"]["times"])}
    if "resuming" in report:
        report["resuming"] |= {"late": arguments.late, "num_rounds": arguments.resume_rounds}
    publish(report, markdown(report), "What a checkpoint costs", RESULTS, arguments.save, arguments.out)


if __name__ == "__main__":
    main()
