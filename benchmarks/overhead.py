"""What a training library costs: one loop as raw PyTorch, trimtab, Accelerate and Lightning Fabric, interleaved.

Each case runs in a process of its own, because Accelerate's settings are global. There, short blocks of steps of every
variant follow each other in a shuffled order, round by round, and the CPU time of each is compared with raw's of the
same round. A second copy of the raw loop shows how far the measurement itself can be trusted.
"""

import argparse
import copy
import gc
import json
import math
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from record import machine, publish
from torch.utils.data import DataLoader

MAX_NORM = 1.0
VOCAB_SIZE = 5000
RESULTS = Path(__file__).parent / "results" / "overhead"
LIBRARIES = ("torch", "transformers", "accelerate", "lightning")
PROTOCOL = (
    "fp32, eager attention with masks, dropout on, AdamW, clipping, linear schedule. In each round every variant runs "
    "one block of steps over its restarted loader, in a shuffled order. CPU time of the process, divided by the "
    "block's batches; one warm-up block of each is dropped; the garbage collector runs before each block and never in "
    "one. A time is the median over rounds, its spread the interquartile range; a ratio is the median of the ratios to "
    "raw within a round, with the 95% interval of that median. `raw, again` is a second copy of raw: its row is noise."
)


@dataclass(frozen=True)
class Case:
    config: dict[str, int]
    batch_size: int
    length: int
    num_steps: int  # batches in a block
    num_rounds: int
    num_accumulated: int = 1


BERT = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
TINY = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
CASES = {
    "bert-6x384": Case(BERT, batch_size=16, length=64, num_steps=1, num_rounds=100),
    "tiny": Case(TINY, batch_size=1, length=8, num_steps=20, num_rounds=300),
    "tiny, accumulation 4": Case(TINY, batch_size=1, length=8, num_steps=20, num_rounds=300, num_accumulated=4),
}


# ---------------------------------------------------------------- the loops, each as its library documents it


def raw(model, optimizer, loader, scheduler, num_accumulated):
    def plain():
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()

    def accumulating():
        for index, batch in enumerate(loader, start=1):
            loss = model(**batch).loss
            (loss / num_accumulated).backward()
            if index % num_accumulated == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return plain if num_accumulated == 1 else accumulating


def trimtab(model, optimizer, loader, scheduler, num_accumulated):
    from trimtab import Engine

    engine = Engine(cpu=True, gradient_accumulation_steps=num_accumulated)
    return with_the_verbs_of_accelerate(engine, *engine.prepare(model, optimizer, loader, scheduler))


def accelerate(model, optimizer, loader, scheduler, num_accumulated):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_accumulated)
    return with_the_verbs_of_accelerate(accelerator, *accelerator.prepare(model, optimizer, loader, scheduler))


def with_the_verbs_of_accelerate(engine, model, optimizer, loader, scheduler):
    def plain():
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            engine.backward(loss)
            engine.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()

    def accumulating():
        for batch in loader:
            with engine.accumulate(model):
                loss = model(**batch).loss
                engine.backward(loss)
                if engine.sync_gradients:
                    engine.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return plain if engine.gradient_accumulation_steps == 1 else accumulating


def fabric(model, optimizer, loader, scheduler, num_accumulated):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    def plain():
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            scheduler.step()

    def accumulating():
        for index, batch in enumerate(loader, start=1):
            is_accumulating = index % num_accumulated != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                loss = model(**batch).loss
                fabric.backward(loss / num_accumulated)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return plain if num_accumulated == 1 else accumulating


VARIANTS = {"raw": raw, "raw, again": raw, "trimtab": trimtab, "accelerate": accelerate, "fabric": fabric}


# ---------------------------------------------------------------- measuring one case


def build_model(case):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCAB_SIZE, attn_implementation="eager", **case.config)
    return BertForSequenceClassification(config).train()


def build_rows(case):
    """The rows of a block. Some end in padding, so that the attention mask has work to do."""
    shape = (case.num_steps * case.batch_size, case.length)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCAB_SIZE, shape, generator=generator)
    num_tokens = torch.randint(case.length // 2, case.length + 1, (shape[0], 1), generator=generator)
    mask = (torch.arange(case.length) < num_tokens).long()
    return [{"input_ids": i, "attention_mask": m, "labels": i[0] % 2} for i, m in zip(ids * mask, mask, strict=True)]


def build_block(variant, model, case):
    """One block of steps of a variant, with an optimizer, a loader and a scheduler of its own."""
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    loader = DataLoader(build_rows(case), batch_size=case.batch_size)  # in order: the same batches for everyone
    assert case.num_steps % case.num_accumulated == 0, "a block must be made of whole accumulation windows"
    num_optimizer_steps = case.num_steps * (case.num_rounds + 1) // case.num_accumulated
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, num_optimizer_steps)
    return VARIANTS[variant](model, optimizer, loader, scheduler, case.num_accumulated)


def cpu_ms(block, seed):
    torch.manual_seed(seed)  # the same dropout for everyone
    gc.collect()
    gc.disable()
    start = time.process_time()
    block()
    elapsed = time.process_time() - start
    gc.enable()
    return elapsed * 1000


def unequal_to_raw(models):
    """The peers whose weights differ in any bit from raw's; trimtab's must not."""
    reference = models["raw"].state_dict()
    states = {variant: model.state_dict() for variant, model in models.items()}
    unequal = [
        v for v, state in states.items() if not all(torch.equal(state[key], reference[key]) for key in reference)
    ]
    if "trimtab" in unequal:
        sys.exit("the weights of trimtab are NOT bit-equal to those of raw PyTorch")
    return unequal


def measure(case, num_threads):
    torch.set_num_threads(num_threads)
    initial = build_model(case)
    models = {variant: copy.deepcopy(initial) for variant in VARIANTS}
    blocks = {variant: build_block(variant, model, case) for variant, model in models.items()}
    for block in blocks.values():
        cpu_ms(block, seed=0)
    assert not torch.equal(initial.classifier.weight, models["raw"].classifier.weight), "nothing was trained"
    unequal = {"after the first block": unequal_to_raw(models)}
    gc.freeze()
    times = {variant: [] for variant in VARIANTS}
    shuffler = random.Random(0)
    for number in range(1, case.num_rounds + 1):
        for variant in shuffler.sample(list(blocks), len(blocks)):
            times[variant].append(cpu_ms(blocks[variant], seed=number) / case.num_steps)
    unequal["at the end"] = unequal_to_raw(models)
    assert torch.get_num_threads() == num_threads, "a library has changed the number of threads"
    return {"cpu_ms": times, "unequal_to_raw": unequal}


# ---------------------------------------------------------------- gathering and telling


def measure_in_child(name):
    child = subprocess.run([sys.executable, *sys.argv, "--child", name], stdout=subprocess.PIPE, text=True)
    if child.returncode:
        sys.exit(f"{name}: failed, see above")
    return json.loads(child.stdout.splitlines()[-1])


def summary(times):
    rows = {}
    for variant, mine in times.items():
        low, middle, high = statistics.quantiles(mine, n=4)
        ratios = sorted(a / b for a, b in zip(mine, times["raw"], strict=True))
        half, margin = len(ratios) / 2, 0.98 * math.sqrt(len(ratios))  # ranks of a median's 95% interval
        interval = ratios[max(0, math.floor(half - margin))], ratios[min(len(ratios), math.ceil(half + margin)) - 1]
        ratio = {"median": statistics.median(ratios), "low": interval[0], "high": interval[1]}
        rows[variant] = {"cpu_ms": middle, "spread": (high - low) / middle, "ratio": ratio}
    return rows


def markdown(report):
    lines = [f"- {key}: {value}" for key, value in report["setting"].items()]
    for name, case in report["cases"].items():
        lines.append(
            f"- {name}: {case['num_rounds']} rounds of {case['num_steps']} step(s); weights bit-equal to raw's"
        )
        found = [f"{when} of all but {unequal}" for when, unequal in case["unequal_to_raw"].items() if unequal]
        lines[-1] += ": " + ("; ".join(found) or "all variants, after the first block and at the end")
    lines += ["", "| model | variant | CPU ms/step | ratio to raw (95%) | spread |", "|---|---|---|---|---|"]
    for name, case in report["cases"].items():
        for variant, row in case["summary"].items():
            ratio = "{median:.4f} ({low:.4f} to {high:.4f})".format(**row["ratio"]) if variant != "raw" else "1"
            lines.append(f"| {name} | {variant} | {row['cpu_ms']:.3f} | {ratio} | {row['spread']:.1%} |")
    return "\n".join(lines) + "\n"


def parse_arguments(description, cases, results):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--rounds", type=int, help="timed blocks of each variant, 2 or more (default: by model)")
    parser.add_argument("--steps", type=int, help="steps in a block, a multiple of 4 (default: by model)")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--out", type=Path, help="write settings, every time and the summary to this JSON file")
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{results.name}.json and .md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = {"num_rounds": arguments.rounds, "num_steps": arguments.steps}
    return arguments, {n: replace(case, **{k: v for k, v in sizes.items() if v}) for n, case in cases.items()}


def main():
    words = "CPU time of a training loop, by library, as a ratio to raw PyTorch."
    arguments, cases = parse_arguments(words, CASES, RESULTS)
    if arguments.child:
        print(json.dumps(measure(cases[arguments.child], arguments.threads)))
        return
    report = {"setting": machine("cpu", arguments.threads, LIBRARIES) | {"protocol": PROTOCOL}, "cases": {}}
    for name in arguments.models:
        print(f"measuring {name} …", file=sys.stderr)
        measured = measure_in_child(name)
        report["cases"][name] = asdict(cases[name]) | measured | {"summary": summary(measured["cpu_ms"])}
    publish(report, markdown(report), "What the loop costs", RESULTS, arguments.save, arguments.out)


if __name__ == "__main__":
    main()
