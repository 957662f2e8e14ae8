"""What tracking costs a step, within one run: stretches with it and without it take turns.

Runs of their own differ by more than tracking costs, on a machine whose speed changes from minute to minute. Here one
loop logs every step of a stretch, and in the next one logs nothing while the process beside it is held (SIGSTOP). Each
stretch is compared with its neighbour, and which of the two comes first is drawn.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from itertools import cycle
from pathlib import Path

import torch
from record import machine, publish

from tracking import BATCH_SIZE, DEAD, FILE, LIBRARIES, LR, MAX_NORM, SERVER, encoded, free_port, make_model, make_store
from tracking import server as mlflow_server

RESULTS = Path(__file__).parent / "results" / "tracking-blocks"
NUM_WARM_UP = 20
PROTOCOL = (
    "The model and rows of tracking.py, a loop with `Engine(log_with='mlflow')`, one process, one thread. Stretches of "
    "steps take turns: in one each step's loss, gradient norm, learning rate and epoch are logged; in the other "
    "nothing is, and the process that ships is stopped. A pair is two neighbours, in an order that is drawn; its ratio "
    "is that of the mean wall time (CPU time of the training process) of a step. Shown are the median of the pairs and "
    "the 95% interval of the median by bootstrap. `in the logger` is the time of the logging call, a step."
)


def beside():
    """The processes that this one has started."""
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def pairs(model, uri, place, num_pairs, length):
    """Times of a step with tracking and without it, a pair at a time."""
    from transformers import AutoModelForSequenceClassification

    from trimtab import Engine

    engine = Engine(cpu=True, log_with="mlflow", project_dir=place)
    net = AutoModelForSequenceClassification.from_pretrained(model).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    net, optimizer = engine.prepare(net, optimizer)
    rows = encoded(model, 64 * BATCH_SIZE)
    batches = [{k: torch.stack([r[k] for r in rows[i : i + BATCH_SIZE]]) for k in rows[0]} for i in range(0, 512, 8)]
    data, step, in_logger = cycle(batches), 0, []
    engine.init_trackers("bench", {"lr": LR}, init_kwargs={"mlflow": {"uri": uri}})

    def take(num_steps, is_logged):
        nonlocal step
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            step += 1
            loss = net(**next(data)).loss
            engine.backward(loss)
            norm = engine.clip_grad_norm_(net.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            values = {"loss": loss.item(), "grad_norm": norm.item(), "lr": LR, "epoch": step / 1000}
            if is_logged:
                began = time.perf_counter()
                engine.log(values, step=step)
                in_logger.append(time.perf_counter() - began)
        return 1000 * (time.perf_counter() - wall) / num_steps, 1000 * (time.process_time() - cpu) / num_steps

    take(NUM_WARM_UP, True)
    time.sleep(8.0)  # the process beside has imported everything
    found, draw = [], random.Random(0)
    for number in range(num_pairs):
        times = {}
        for is_logged in draw.sample((True, False), 2):
            for pid in beside():
                os.kill(pid, signal.SIGCONT if is_logged else signal.SIGSTOP)
            times[is_logged] = take(length, is_logged)
        found.append([*times[True], *times[False]])
        print(f"pair {number + 1} of {num_pairs}: {found[-1][0]:.1f} ms with, {found[-1][2]:.1f} without", flush=True)
    for pid in beside():
        os.kill(pid, signal.SIGCONT)
    engine.end_training()
    return found, 1000 * statistics.mean(in_logger)


def interval(ratios):
    """The median, and between what it lies with 95%."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return statistics.median(ratios), medians[100], medians[3899]


def markdown(report):
    lines = [f"- {key}: {value}" for key, value in report["setting"].items()]
    lines += [
        f"- {report['num_pairs']} pairs of stretches of {report['length']} steps",
        "",
        "| tracking | step with, ms | without, ms | wall, with to without | CPU, with to without | in the logger, ms |",
        "|---|---|---|---|---|---|",
    ]
    for name, (found, in_logger) in report["found"].items():
        wall, cpu = (interval([one[i] / one[i + 2] for one in found]) for i in (0, 1))
        middles = [statistics.median(one[i] for one in found) for i in (0, 2)]
        words = [f"{middle:.4f} ({low:.4f} to {high:.4f})" for middle, low, high in (wall, cpu)]
        lines.append(f"| {name} | {middles[0]:.1f} | {middles[1]:.1f} | {words[0]} | {words[1]} | {in_logger:.3f} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description="What tracking costs a step, by stretches of one run.")
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--length", type=int, default=2, help="steps of a stretch; few, as machines drift")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/tracking-blocks.json and .md")
    arguments = parser.parse_args()
    os.environ.pop("TRIMTAB_TRACK", None)
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    torch.set_num_threads(1)
    report = {"setting": machine("cpu", 1, LIBRARIES) | {"protocol": PROTOCOL}, "found": {}}
    report |= {"num_pairs": arguments.pairs, "length": arguments.length}
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as folder:
        stage = Path(folder)
        make_model(stage / "model", 8)
        make_store(stage / "template.db")
        (stage / "store").mkdir()
        shutil.copy(stage / "template.db", stage / "store" / "mlflow.db")
        with mlflow_server(stage / "server", stage / "template.db") as (address, _):
            places = {FILE: f"sqlite:///{stage}/store/mlflow.db", SERVER: address}
            places[DEAD] = f"http://127.0.0.1:{free_port()}"
            for name, uri in places.items():
                found = pairs(stage / "model", uri, stage / name, arguments.pairs, arguments.length)
                report["found"][name] = found
    publish(report, markdown(report), "What tracking costs a step", RESULTS, arguments.save)


if __name__ == "__main__":
    main()
