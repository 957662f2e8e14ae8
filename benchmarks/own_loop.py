"""A training loop of one's own on a GPU: raw PyTorch, Accelerate, and trimtab with and without CUDA graphs, in turns.

A BERT-base with a batch of 32 rows of 128 tokens computes faster than Python can launch its kernels: without graphs
every library waits for the host. All variants run in one process. In each round, every variant takes a block of steps
over its restarted loader, in a shuffled order.

    python benchmarks/own_loop.py --save          # on a GPU, about a minute
    python benchmarks/own_loop.py --small         # tries the script on a CPU
"""

import argparse
import gc
import importlib.util
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from record import machine, publish
from torch.utils.data import DataLoader

MAX_NORM = 1.0
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "accelerate", "triton")
PROTOCOL = (
    "mixed precision bf16, sdpa attention, rows of equal length without a mask, dropout 0.1, fused AdamW, clipping by "
    "norm, batches from a DataLoader. Wall time of a block of steps between two synchronizations, divided by its "
    "steps; two blocks of each variant are dropped, in which kernels are loaded, compiled and captured; the garbage "
    "collector does not run inside a block; all variants have the same seed in a round"
)


@dataclass(frozen=True)
class Case:
    """What is trained, and for how long."""

    config: dict[str, int]
    batch_size: int
    length: int
    num_steps: int  # of a block
    num_rounds: int


BERT_BASE = Case({}, batch_size=32, length=128, num_steps=20, num_rounds=10)
SMALL = Case(
    dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=500),
    batch_size=4,
    length=16,
    num_steps=2,
    num_rounds=2,
)


# ---------------------------------------------------------------- the loops, each as its library documents it


def raw(model, optimizer, loader, device):
    model.to(device)

    def block():
        for batch in loader:
            batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return block


def accelerate(model, optimizer, loader, device):
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    return with_backward(accelerator, *accelerator.prepare(model, optimizer, loader))


def trimtab(model, optimizer, loader, device):
    from trimtab import Engine

    engine = Engine("bf16", device=device)
    return with_backward(engine, *engine.prepare(model, optimizer, loader))


def with_backward(engine, model, optimizer, loader):
    def block():
        for batch in loader:
            loss = model(**batch).loss
            engine.backward(loss)
            engine.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return block


def trimtab_graphs(model, optimizer, loader, device, *, compiles=False):
    from trimtab import Engine

    engine = Engine("bf16", device=device, cuda_graphs=True, compile_blocks=compiles)
    model, optimizer, loader = engine.prepare(model, optimizer, loader)

    def block():
        for batch in loader:
            loss = engine.forward_backward(model, batch)
            engine.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return block


VARIANTS = {
    "raw PyTorch": raw,
    "Accelerate": accelerate,
    "trimtab": trimtab,
    "trimtab, cuda_graphs": trimtab_graphs,
    "trimtab, cuda_graphs and compile_blocks": partial(trimtab_graphs, compiles=True),
}


# ---------------------------------------------------------------- measuring


def variants_here(device):
    """All variants whose library is installed; blocks are not compiled on a CPU, where it takes a minute."""
    names = [name for name in VARIANTS if name != "Accelerate" or importlib.util.find_spec("accelerate")]
    return [name for name in names if device.type == "cuda" or "compile" not in name]


def build_block(name, case, device):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(**case.config)
    model = BertForSequenceClassification(config).train()
    ids = torch.randint(5, config.vocab_size, (case.num_steps * case.batch_size, case.length))
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in ids]
    loader = DataLoader(rows, batch_size=case.batch_size, pin_memory=device.type == "cuda")
    model.to(device)  # before the optimizer, which Accelerate needs for fused ones
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=device.type == "cuda")
    return VARIANTS[name](model, optimizer, loader, device)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(block, device, seed):
    """Wall time of a block, and its last loss."""
    torch.manual_seed(seed)
    gc.collect()
    gc.disable()
    synchronize(device)
    start = time.perf_counter()
    loss = block()
    synchronize(device)
    elapsed = time.perf_counter() - start
    gc.enable()
    return elapsed * 1000, float(loss)


def measure(case, device):
    names = variants_here(device)
    blocks = {name: build_block(name, case, device) for name in names}
    times, losses = {name: [] for name in names}, {}
    for name in names:
        print(f"warming up {name} …", file=sys.stderr)
        for number in range(2):
            milliseconds(blocks[name], device, seed=number)
    gc.freeze()
    shuffler = random.Random(0)
    for number in range(case.num_rounds):
        for name in shuffler.sample(names, len(names)):
            found, losses[name] = milliseconds(blocks[name], device, seed=2 + number)
            times[name].append(found / case.num_steps)
    gc.unfreeze()
    return {"ms_per_step": times, "last_loss": losses}


# ---------------------------------------------------------------- telling


def markdown(report):
    case = report["case"]
    lines = [
        f"Milliseconds of a training step of a BERT-base, {case['batch_size']} × {case['length']} tokens: median over "
        f"{case['num_rounds']} rounds of {case['num_steps']} steps, and the fastest and slowest round. "
        f"{report['protocol'][0].upper()}{report['protocol'][1:]}."
        if report["device"] != "cpu"
        else "A trial on a CPU with a small model: these times say nothing about a GPU.",
        "",
        "| loop | ms per step | range | × raw | last loss |",
        "|---|---|---|---|---|",
    ]
    reference = statistics.median(report["ms_per_step"]["raw PyTorch"])
    for name, times in report["ms_per_step"].items():
        middle = statistics.median(times)
        lines.append(
            f"| {name} | {middle:.1f} | {min(times):.1f} to {max(times):.1f} | {reference / middle:.2f} | "
            f"{report['last_loss'][name]:.3f} |"
        )
    where = "; ".join(f"{name}: {value}" for name, value in report["machine"].items())
    return "\n".join([*lines, "", f"`benchmarks/own_loop.py` makes this table. {where}."]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="timed blocks of each variant")
    parser.add_argument("--steps", type=int, help="steps in a block")
    parser.add_argument("--small", action="store_true", help="a small model, on a CPU where there is no GPU")
    parser.add_argument("--out", type=Path, help="write the report to this JSON file")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/own-loop-GPU.json and .md")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.small:
        sys.exit("no CUDA GPU found; --small tries the script on a CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = SMALL if args.small else BERT_BASE
    sizes = {"num_steps": args.steps or chosen.num_steps, "num_rounds": args.rounds or chosen.num_rounds}
    case = Case(**asdict(chosen) | sizes)
    report = {
        "machine": machine(device.type, torch.get_num_threads(), PACKAGES),
        "device": device.type,
        "protocol": PROTOCOL,
        "case": asdict(case),
    }
    report |= measure(case, device)
    gpu = torch.cuda.get_device_name().split()[-1].lower() if device.type == "cuda" else "cpu"
    title = "A training loop of one's own"
    publish(report, markdown(report), title, RESULTS / f"own-loop-{gpu}", args.save, args.out)


if __name__ == "__main__":
    main()
