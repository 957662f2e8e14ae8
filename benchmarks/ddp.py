"""What a training library costs under DDP: raw PyTorch, trimtab and Accelerate on two gloo processes, interleaved.

For each case torchrun starts two processes, and both hold every variant. There, short blocks of steps of every variant
follow each other in a shuffled order, the same in both, and are compared with raw's of the same round. A second copy of
the raw loop shows how far the measurement itself can be trusted.
"""

import copy
import gc
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import overhead
import torch
import torch.distributed as dist
from overhead import BERT, TINY, Case
from record import machine, publish
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

NUM_PROCESSES = 2
NUM_WARM_UPS = 2  # DDP sorts its buckets anew in the second step
RESULTS = Path(__file__).parent / "results" / "ddp"
TOLERANCE = 1e-6  # how far a weight of trimtab may be from raw's
PROTOCOL = (
    "fp32, eager attention with masks, dropout on (of another seed in each process), AdamW, clipping, linear schedule; "
    "gloo, gradients as views of DDP's buckets, each process takes its contiguous half of every batch. Raw and "
    "Accelerate leave DDP's other settings as they are, so that it sends the model's buffers around once a step; "
    "trimtab does so only for batch norms. In each round every variant runs one block of steps, an epoch of its "
    "loader, in a shuffled order, both processes beginning together; what a library does when an epoch begins counts, "
    "for more than in epochs of the usual length. CPU time is summed over the processes, wall time is that of the "
    "slower one, both divided by the block's batches; two warm-up blocks of each are dropped; the garbage collector "
    "runs before each block and never in one. A time is the median over rounds; a ratio is the median of the ratios to "
    "raw within a round, with the 95% interval of that median. `raw, again` is a second copy of raw: its row is noise. "
    "Other threads (trimtab has two that watch the processes) run through the blocks of all variants, so no ratio "
    "shows them: their share is given apart. Before all that, every variant trains fresh copies for two windows with "
    "SGD and without clipping, since AdamW and clipping both hide a wrong scale of the gradients. There and at the end "
    "weights must be bit-equal in both processes, and no weight of trimtab may be "
    f"further than {TOLERANCE:g} from raw's."
)
CASES = {
    "bert-6x384": Case(BERT, batch_size=16, length=64, num_steps=2, num_rounds=18),
    "bert-6x384, accumulation 4": Case(BERT, batch_size=16, length=64, num_steps=4, num_rounds=10, num_accumulated=4),
    "tiny": Case(TINY, batch_size=2, length=8, num_steps=40, num_rounds=20),
}


# ---------------------------------------------------------------- the loops, each as its library documents it


def raw(model, optimizer, loader, scheduler, num_accumulated):
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    share = loader.batch_size // NUM_PROCESSES
    loader = DataLoader(loader.dataset, share, sampler=my_rows(loader), generator=loader.generator)

    def accumulating():
        for index, batch in enumerate(loader, start=1):
            ends_window = index % num_accumulated == 0
            with nullcontext() if ends_window else model.no_sync():
                loss = model(**batch).loss
                (loss / num_accumulated).backward()
            if ends_window:
                torch.nn.utils.clip_grad_norm_(model.parameters(), overhead.MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    return overhead.raw(model, optimizer, loader, scheduler, 1) if num_accumulated == 1 else accumulating


def my_rows(loader):
    """Row numbers of this process: its contiguous share of each batch, as trimtab and Accelerate give it."""
    share, rank = loader.batch_size // NUM_PROCESSES, dist.get_rank()
    return [row for row in range(len(loader.dataset)) if row % loader.batch_size // share == rank]


def accelerate(model, optimizer, loader, scheduler, num_accumulated):
    from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=num_accumulated,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    return overhead.with_the_verbs_of_accelerate(accelerator, *prepared)


VARIANTS = {"raw": raw, "raw, again": raw, "trimtab": overhead.trimtab, "accelerate": accelerate}


# ---------------------------------------------------------------- measuring one case, in each of the processes


def build_blocks(case, make_optimizer):
    """Each variant's block of steps and the model that it trains, with optimizer, loader and scheduler of its own."""
    from transformers import get_linear_schedule_with_warmup

    assert case.num_steps % case.num_accumulated == 0, "a block must be made of whole accumulation windows"
    initial = overhead.build_model(case)
    models = {variant: copy.deepcopy(initial) for variant in VARIANTS}
    blocks = {}
    for variant, prepare in VARIANTS.items():
        optimizer = make_optimizer(models[variant].parameters())
        # In order: the same rows for everyone. Where a loader has no generator of its own, its start draws a number
        # that dropout has to do without; in trimtab that is the first process alone.
        loader = DataLoader(overhead.build_rows(case), case.batch_size, generator=torch.Generator())
        num_optimizer_steps = case.num_steps * (NUM_WARM_UPS + case.num_rounds) // case.num_accumulated
        scheduler = get_linear_schedule_with_warmup(optimizer, 0, num_optimizer_steps)
        blocks[variant] = prepare(models[variant], optimizer, loader, scheduler, case.num_accumulated)
    return blocks, models


def run_together(block, seed):
    """CPU and wall time in ms of a block that begins at the same moment in all processes."""
    wall_ms = []

    def begin_together():
        dist.barrier()
        start = time.perf_counter()
        block()
        wall_ms.append((time.perf_counter() - start) * 1000)

    cpu_ms = overhead.cpu_ms(begin_together, NUM_PROCESSES * seed + dist.get_rank())
    return cpu_ms, *wall_ms


def differences_to_raw(models):
    """For each variant the largest difference of a weight to raw's, if all processes have the same weights."""
    found = {}
    for variant, model in models.items():
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        those_of_first = weights.clone()
        dist.broadcast(those_of_first, src=0)
        if not torch.equal(weights, those_of_first):
            sys.exit(f"{variant}: the weights of process {dist.get_rank()} are NOT bit-equal to those of process 0")
        if variant == "raw":
            reference = weights
        found[variant] = float((weights - reference).abs().max())
    if not found["trimtab"] <= TOLERANCE:
        sys.exit(f"a weight of trimtab differs from raw's by {found['trimtab']:.1e}, more than {TOLERANCE:g}")
    return found


def check_gradients(case):
    """Differences to raw after two windows that no optimizer and no clipping forgives."""
    short = replace(case, num_steps=2 * case.num_accumulated)
    blocks, models = build_blocks(short, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
    before = models["raw"].classifier.weight.detach().clone()
    with patch.object(overhead, "MAX_NORM", math.inf):
        for block in blocks.values():
            run_together(block, seed=0)
    change = float((models["raw"].classifier.weight.detach() - before).abs().max())
    assert change > 100 * TOLERANCE, f"training has changed weights by only {change:.1e}: nothing can be compared"
    return differences_to_raw(models)


def measure(case, num_threads):
    torch.set_num_threads(num_threads)
    differences = {"after two windows of SGD": check_gradients(case)}
    blocks, models = build_blocks(case, lambda parameters: torch.optim.AdamW(parameters, lr=5e-5))
    times = {variant: [] for variant in VARIANTS}
    shuffler = random.Random(0)
    for number in range(NUM_WARM_UPS + case.num_rounds):
        if number == NUM_WARM_UPS:
            gc.freeze()
            start = clocks()
        for variant in shuffler.sample(list(blocks), len(blocks)):
            times[variant].append(run_together(blocks[variant], seed=number))
    beside, total = over_all(clocks() - start).tolist()
    differences["at the end"] = differences_to_raw(models)
    assert torch.get_num_threads() == num_threads, "a library has changed the number of threads"
    found = {"differences_to_raw": differences, "share_of_other_threads": beside / total}
    return found | over_processes(times, case.num_steps)


def clocks():
    """CPU seconds so far: of Python's threads beside the main one, and of the whole process."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    beside = sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in others)
    return torch.tensor([beside, time.process_time()], dtype=torch.float64)


def over_all(values, operation=dist.ReduceOp.SUM):
    dist.all_reduce(values, op=operation)
    return values


def over_processes(times, num_steps):
    """Times of a step after the warm-up: CPU time summed over the processes, wall time of the slower one."""
    cpu_ms, wall_ms = {}, {}
    for variant, mine in times.items():
        cpu, wall = torch.tensor(mine[NUM_WARM_UPS:], dtype=torch.float64).T.contiguous() / num_steps
        cpu_ms[variant] = over_all(cpu).tolist()
        wall_ms[variant] = over_all(wall, dist.ReduceOp.MAX).tolist()
    return {"cpu_ms": cpu_ms, "wall_ms": wall_ms}


# ---------------------------------------------------------------- gathering and telling


def measure_in_processes(name, num_threads):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_PROCESSES}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
    command = [*torchrun, *sys.argv, "--child", name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{name}: failed, see above")
    return json.loads(done.stdout.splitlines()[-1])


def summary(measured):
    """Of each variant: CPU time and wall time, each with its ratio to raw's."""
    cpu, wall = overhead.summary(measured["cpu_ms"]), overhead.summary(measured["wall_ms"])
    return {
        variant: {"cpu": cpu[variant], "wall": {"wall_ms" if k == "cpu_ms" else k: v for k, v in wall[variant].items()}}
        for variant in cpu
    }


def markdown(report):
    lines = [f"- {key}: {value}" for key, value in report["setting"].items()]
    for name, case in report["cases"].items():
        found = [
            f"{when}: " + ", ".join(f"{variant} {largest:.1g}" for variant, largest in by_variant.items())
            for when, by_variant in case["differences_to_raw"].items()
        ]
        lines.append(
            f"- {name}: {case['num_rounds']} rounds of {case['num_steps']} step(s); largest difference of a weight to "
            f"raw's {'; '.join(found)}. Other threads took {case['share_of_other_threads']:.2%} of the CPU time."
        )
    lines += ["", "| model | variant | CPU ms/step | ratio to raw (95%) | wall ms/step | ratio to raw (95%) |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, case in report["cases"].items():
        for variant, row in case["summary"].items():
            cells = [name, variant]
            for clock in ("cpu", "wall"):
                ratio = "{median:.4f} ({low:.4f} to {high:.4f})".format(**row[clock]["ratio"])
                cells += [f"{row[clock][f'{clock}_ms']:.3f}", ratio if variant != "raw" else "1"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    words = "Time of a training loop under DDP, by library, as a ratio to raw's."
    arguments, cases = overhead.parse_arguments(words, CASES, RESULTS)
    if arguments.child:
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
        measured = measure(cases[arguments.child], arguments.threads)
        if dist.get_rank() == 0:
            print(json.dumps(measured))
        dist.destroy_process_group()
        return
    setting = machine("cpu", NUM_PROCESSES * arguments.threads, overhead.LIBRARIES)
    report = {"setting": setting | {"protocol": PROTOCOL}, "cases": {}}
    for name in arguments.models:
        print(f"measuring {name} …", file=sys.stderr)
        measured = measure_in_processes(name, arguments.threads)
        report["cases"][name] = asdict(cases[name]) | measured | {"summary": summary(measured)}
    publish(report, markdown(report), "What the loop costs on two processes", RESULTS, arguments.save, arguments.out)


if __name__ == "__main__":
    main()
