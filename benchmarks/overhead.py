"""What a training library costs: one loop as raw PyTorch, trimtab, Accelerate and Lightning Fabric, interleaved.

Each case runs in a process of its own, because Accelerate's settings are global. There, blocks of steps of every variant
follow each other in a shuffled order, round by round, and the CPU time of each block is compared with raw's of the same
round. A second copy of the raw loop shows how far the measurement itself can be trusted.

    python benchmarks/overhead.py [--models tiny] [--rounds 20] [--steps 50] [--save]
"""

import argparse
import copy
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

MAX_NORM = 1.0
RESULTS = Path(__file__).parent / "results" / "overhead"
PROTOCOL = (
    "One process for each model; in each round every variant runs one block of steps over its restarted loader, in a "
    "shuffled order. CPU time of the process, a block's divided by its steps (with accumulation: by its micro-batches); "
    "one warm-up block of each variant is dropped; the garbage collector runs before each block and never in one. "
    "Times are medians over rounds and their spread is the interquartile range; a ratio is the median of the ratios to "
    "raw within a round, with its quartiles. `raw, again` is a second copy of raw: what it differs by is noise."
)


@dataclass(frozen=True)
class Case:
    layers: int
    width: int
    heads: int
    ffn: int
    batch_size: int
    length: int
    num_steps: int  # in a block
    num_rounds: int
    num_accumulated: int = 1


CASES = {
    "bert-6x384": Case(6, 384, 12, 1536, batch_size=16, length=64, num_steps=2, num_rounds=40),
    "tiny": Case(1, 32, 2, 64, batch_size=1, length=8, num_steps=60, num_rounds=60),
    "tiny, accumulation 4": Case(1, 32, 2, 64, 1, 8, num_steps=60, num_rounds=60, num_accumulated=4),
}


# ---------------------------------------------------------------- the loops, each as its library documents it


def raw(model: Any, optimizer: Any, loader: Any, scheduler: Any, num_accumulated: int) -> Callable[[], None]:
    def plain() -> None:
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()

    def accumulating() -> None:
        for index, batch in enumerate(loader, start=1):
            loss = model(**batch).loss
            (loss / num_accumulated).backward()
            if index % num_accumulated == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return plain if num_accumulated == 1 else accumulating


def trimtab(model: Any, optimizer: Any, loader: Any, scheduler: Any, num_accumulated: int) -> Callable[[], None]:
    from trimtab import Engine

    engine = Engine(cpu=True, gradient_accumulation_steps=num_accumulated)
    model, optimizer, loader, scheduler = engine.prepare(model, optimizer, loader, scheduler)
    return _with_accelerate_verbs(engine, model, optimizer, loader, scheduler)


def accelerate(model: Any, optimizer: Any, loader: Any, scheduler: Any, num_accumulated: int) -> Callable[[], None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_accumulated)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    return _with_accelerate_verbs(accelerator, model, optimizer, loader, scheduler)


def _with_accelerate_verbs(engine: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> Callable[[], None]:
    def plain() -> None:
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            engine.backward(loss)
            engine.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()

    def accumulating() -> None:
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


def fabric(model: Any, optimizer: Any, loader: Any, scheduler: Any, num_accumulated: int) -> Callable[[], None]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    def plain() -> None:
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            scheduler.step()

    def accumulating() -> None:
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


def build_model(case: Case) -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=5000,
        hidden_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        intermediate_size=case.ffn,
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config).train()


def build_rows(case: Case) -> list[dict[str, torch.Tensor]]:
    """Rows of one block. Some end in padding, so that the attention mask has work to do."""
    random_numbers = torch.Generator().manual_seed(1)

    def row() -> dict[str, torch.Tensor]:
        ids = torch.randint(5, 5000, (case.length,), generator=random_numbers)
        num_tokens = torch.randint(case.length // 2, case.length + 1, (), generator=random_numbers)
        mask = (torch.arange(case.length) < num_tokens).long()
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids[0] % 2}

    return [row() for _ in range(case.num_steps * case.batch_size)]


def build_block(variant: str, model: torch.nn.Module, case: Case) -> Callable[[], None]:
    """One block of steps of a variant, on an optimizer, a loader and a scheduler of its own."""
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    loader = DataLoader(build_rows(case), batch_size=case.batch_size)  # type: ignore[arg-type]
    num_steps = case.num_steps * (case.num_rounds + 1) // case.num_accumulated
    scheduler = get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    return VARIANTS[variant](model, optimizer, loader, scheduler, case.num_accumulated)


def cpu_ms(block: Callable[[], None], seed: int) -> float:
    torch.manual_seed(seed)  # the same dropout for every variant
    gc.collect()
    gc.disable()
    start = time.process_time()
    block()
    elapsed = time.process_time() - start
    gc.enable()
    return elapsed * 1000


def differences(models: dict[str, torch.nn.Module]) -> dict[str, float]:
    """For each variant, the largest difference of any weight from raw's; 0 means equal bits."""
    reference = models["raw"].state_dict()
    found = {}
    for name, model in models.items():
        state = model.state_dict()
        unequal = [key for key in reference if not torch.equal(reference[key], state[key])]
        found[name] = max(((reference[key] - state[key]).abs().max().item() for key in unequal), default=0.0)
    if found["trimtab"] != 0.0:
        sys.exit(f"trimtab is NOT bit-equal to raw: weights differ by up to {found['trimtab']:.3g}")
    return found


def measure(case: Case, num_threads: int) -> dict[str, Any]:
    torch.set_num_threads(num_threads)
    initial = build_model(case)
    models = {variant: copy.deepcopy(initial) for variant in VARIANTS}
    blocks = {variant: build_block(variant, model, case) for variant, model in models.items()}
    for block in blocks.values():
        cpu_ms(block, seed=0)
    if all(torch.equal(old, new) for old, new in zip(initial.parameters(), models["raw"].parameters(), strict=True)):
        sys.exit("no weight has changed: nothing was trained")
    after_first = differences(models)
    gc.freeze()
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    shuffler = random.Random(0)
    for number in range(1, case.num_rounds + 1):
        for variant in shuffler.sample(list(blocks), len(blocks)):
            times[variant].append(cpu_ms(blocks[variant], seed=number) / case.num_steps)
    assert torch.get_num_threads() == num_threads, "a library has changed the number of threads"
    return {"ms": times, "differs_after_first_block": after_first, "differs_at_the_end": differences(models)}


# ---------------------------------------------------------------- gathering and telling


def measure_in_child(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", "--models", name, "--threads", str(arguments.threads)]
    for option in ("rounds", "steps"):
        if getattr(arguments, option) is not None:
            command += [f"--{option}", str(getattr(arguments, option))]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        sys.exit(f"{name}: failed, see above")
    return json.loads(child.stdout.splitlines()[-1])


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    table = {}
    for variant, ms in times.items():
        low, middle, high = statistics.quantiles(ms, n=4)
        ratios = [mine / raw for mine, raw in zip(ms, times["raw"], strict=True)]
        ratio_low, ratio, ratio_high = statistics.quantiles(ratios, n=4)
        table[variant] = {
            "cpu_ms": middle,
            "spread": (high - low) / middle,
            "ratio": ratio,
            "ratio_low": ratio_low,
            "ratio_high": ratio_high,
        }
    return table


def setting(num_threads: int) -> dict[str, str]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    packages = ("torch", "transformers", "accelerate", "lightning")
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "../src"], capture_output=True, text=True).stdout
    return {
        "hardware": f"{cpu}, {os.cpu_count()} cores, {num_threads} thread(s) used",
        "versions": ", ".join(f"{name} {version(name)}" for name in packages) + f", Python {platform.python_version()}",
        "commit": (commit or "none") + (" with changes in src" if changed else ""),
        "protocol": PROTOCOL,
    }


def markdown(report: dict[str, Any]) -> str:
    lines = ["# What the loop costs", ""]
    lines += [f"- {key}: {value}" for key, value in report["setting"].items()]
    for name, case in report["cases"].items():
        unequal = {v: d for v, d in case["differs_at_the_end"].items() if d or case["differs_after_first_block"][v]}
        said = f"all but {unequal} have" if unequal else "all variants have"
        size = f"{len(case['ms']['raw'])} rounds of {case['num_steps']} steps"
        lines.append(f"- {name}: {size}; {said} weights bit-equal to raw after the first block and at the end")
    lines += ["", "| model | variant | CPU ms/step | ratio to raw (quartiles) | spread |", "|---|---|---|---|---|"]
    for name, case in report["cases"].items():
        for variant, row in case["summary"].items():
            quartiles = f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}"
            ratio = "1" if variant == "raw" else f"{row['ratio']:.4f} ({quartiles})"
            lines.append(f"| {name} | {variant} | {row['cpu_ms']:.3f} | {ratio} | {row['spread']:.2%} |")
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU time of a training loop, by library, as a ratio to raw PyTorch.")
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, help="timed blocks of each variant (default: by model)")
    parser.add_argument("--steps", type=int, help="steps in a block; a multiple of 4 (default: by model)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the measurements as JSON here")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}.json and .md to benchmarks/results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def sized(name: str, arguments: argparse.Namespace) -> Case:
    case = CASES[name]
    num_steps, num_rounds = arguments.steps or case.num_steps, arguments.rounds or case.num_rounds
    if num_steps % case.num_accumulated or num_rounds < 2:
        sys.exit(f"{name} needs at least 2 rounds, and steps that are a multiple of {case.num_accumulated}")
    return replace(case, num_steps=num_steps, num_rounds=num_rounds)


def main() -> None:
    arguments = parse_arguments()
    cases = {name: sized(name, arguments) for name in arguments.models}
    if arguments.child:
        print(json.dumps(measure(cases[arguments.models[0]], arguments.threads)))
        return
    report: dict[str, Any] = {"setting": setting(arguments.threads), "cases": {}}
    for name, case in cases.items():
        measured = measure_in_child(name, arguments)
        report["cases"][name] = asdict(case) | measured | {"summary": summary(measured["ms"])}
        print(f"{name}: measured", file=sys.stderr)
    text = markdown(report)
    files = [arguments.out] if arguments.out else []
    if arguments.save:
        files.append(RESULTS.with_suffix(".json"))
        RESULTS.with_suffix(".md").write_text(text)
    for file in files:
        file.write_text(json.dumps(report, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
