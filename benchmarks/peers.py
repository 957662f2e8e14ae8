"""Speed and memory of trimtab and its peers on one work, interleaved: `python benchmarks/peers.py bert-imdb`.

In each round every tool trains once, in a shuffled order and in a fresh process. All train the same model on the same
rows with the same optimizer, schedule and precision; the rest is each library's default. The table has the median
over rounds and the range.

    python benchmarks/peers.py bert-imdb --rounds 3 --save
    python benchmarks/peers.py bert-imdb --peers hf-trainer torch+nocudnn --vary memory.attention_backend=torch
    python benchmarks/peers.py minilm-imdb --model FOLDER --data FOLDER --rounds 5
    python benchmarks/peers.py llama-1b-full --small --check        # do all compute the same loss?
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from peer_tools import OPTIONS, TOOLS, Job, parse, quiet_libraries, run_tool
from peer_works import WORKS, made_rows, read_tokens, write_jsonl, write_tiny_pretrained, write_tokenizer

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "accelerate", "lightning", "pytorch_lightning", "peft", "liger-kernel")
PACKAGES += ("bitsandbytes", "flash-attn", "triton")
GIB = 2**30
IMDB_LENGTH, SMALL_LENGTH = 512, 64
NO_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")  # of BERT; the decoders here have none
PROTOCOL = (
    "a fresh process for each run, in a shuffled order in each round. Fused AdamW without weight decay (QLoRA on a "
    "GPU: paged 8-bit AdamW), clipping at 1.0, linear schedule, no loader workers; every process starts from the same "
    "file of texts and tokenizes it (trimtab's cache of tokens, and compiled code of all, are empty in the first round "
    "only, or with --cold in all). Tokens are counted without padding. Tokens/s: the median over blocks of steps in "
    "the second half of a run; the host waits for the device at the ends of blocks only. The table has the median "
    "over rounds (lowest to highest). Memory: the peak that torch's allocator reports, on a CPU that of the process. "
    "First step: from the start of the process to the end of the first step. Wall: from the start of the process to "
    "the last step or, where a model is written, until it is. A ratio is the median of the ratios within a round."
)


# ---------------------------------------------------------------- preparing


def chosen_work(settings):
    """The work, as the arguments change it."""
    work = WORKS[settings.work]
    if settings.small:
        work = work.small()
    changes = {"batch_size": settings.batch_size, "precision": settings.precision, "num_steps": settings.steps}
    work = replace(work, **{key: value for key, value in changes.items() if value is not None})
    if settings.length:
        work = replace(work, lengths=replace(work.lengths, median=settings.length, sigma=0.0, longest=settings.length))
    if settings.check:
        work = replace(work, num_steps=3)
        if work.config and work.task == "classify":
            work = replace(work, config=work.config | dict.fromkeys(NO_DROPOUT, 0.0))
    return work


def prepare(settings, work, folder):
    """Write the rows, their lengths, the tokenizer and, for a pretrained model, a start for every round."""
    if work.config is not None:
        lengths = work.lengths.draw(work.batch_size * work.num_steps)
        write_tokenizer(folder / "tokenizer")
        write_jsonl(made_rows(work.task, lengths), folder / "train.jsonl")
    else:
        prepare_pretrained(settings, work, folder)
        longest = SMALL_LENGTH if settings.small else IMDB_LENGTH
        lengths = [len(row["input_ids"]) for row in read_tokens(folder, work, longest)]
    (folder / "lengths.json").write_text(json.dumps(lengths))
    return lengths


def prepare_pretrained(settings, work, folder):
    """The reviews, and the model with a head drawn by each round's seed."""
    import torch
    from quality import imdb_rows, load_classifier
    from transformers import AutoTokenizer

    source = settings.model
    num_rows, num_test = work.num_steps * work.batch_size, settings.test_rows
    if settings.data:
        rows, test = imdb_rows(settings.data, num_rows or 25_000, num_test)
    else:
        rows, test = (made_rows("classify", [40] * number) for number in (num_rows, min(num_test, 16)))
    if source is None:
        source = folder / "tiny"
        write_tiny_pretrained(source)
    write_jsonl(rows, folder / "train.jsonl")
    write_jsonl(test, folder / "test.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(folder / "tokenizer")
    for seed in settings.seeds:
        torch.manual_seed(seed)
        model = load_classifier(source)
        if settings.check:
            for name in NO_DROPOUT:
                setattr(model.config, name, 0.0)
        model.save_pretrained(folder / f"start-{seed}")
        tokenizer.save_pretrained(folder / f"start-{seed}")


# ---------------------------------------------------------------- measuring


def run_child(settings, work):
    """One run in this process; the last line of the output is what was found."""
    import torch

    name, seed, folder, place, started = settings.child
    torch.set_num_threads(settings.threads)
    job = Job(
        replace(work, num_steps=num_steps_of(work, Path(folder))),
        Path(folder),
        Path(place),
        int(seed),
        settings.device,
        checks=settings.check,
        started=float(started),
    )
    print("\n" + json.dumps(run_tool(name, job)))


def num_steps_of(work, folder):
    return work.num_steps or math.ceil(len(json.loads((folder / "lengths.json").read_text())) / work.batch_size)


def in_child(settings, name, seed, folder, timeout_s):
    """Start a run; what it found, or why it found nothing."""
    place = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    # Compiled code and tokens of a tool are kept from round to round, unless every run has to begin from nothing.
    # The name of its folder has no spaces: where code of a block is C++, torch's compiler command would fail.
    own_folder = "".join(letter if letter.isalnum() else "_" for letter in name)
    cache = place / "cache" if settings.cold else folder / "cache" / own_folder
    caches = {"TRIMTAB_CACHE": "trimtab", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    environment = os.environ | {key: str(cache / value) for key, value in caches.items()}
    environment |= {"OMP_NUM_THREADS": str(settings.threads)}
    command = [sys.executable, "-W", "ignore", *sys.argv, "--child", name, str(seed), str(folder), str(place)]
    try:
        child = subprocess.run(
            [*command, str(time.monotonic())], capture_output=True, text=True, env=environment, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"failure": "the time limit was reached"}
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if child.returncode:
        print(f"{name} failed:\n{child.stdout[-2000:]}\n{child.stderr[-4000:]}", file=sys.stderr)
        return {"failure": f"failed: {(child.stderr.strip().splitlines() or ['no message'])[-1][:120]}"}
    return json.loads(child.stdout.splitlines()[-1])


def measure(settings, folder, keep):
    """Run all rounds; `keep` gets the runs after each one."""
    began, runs = time.monotonic(), {name: [] for name in settings.tools}
    for number in settings.seeds:
        for name in random.Random(number).sample(settings.tools, len(settings.tools)):
            left_s = settings.seconds_limit - (time.monotonic() - began)
            if left_s < 1:
                continue
            if any(run.get("failure", "").startswith("not installed") for run in runs[name]):
                continue
            found = in_child(settings, name, number, folder, left_s)
            runs[name].append({"round": number} | found)
            print(f"round {number + 1}, {name}: {short(found)}", file=sys.stderr, flush=True)
            keep(runs)
    return runs


def short(found):
    if "failure" in found:
        return found["failure"]
    words = "{tokens_per_s:,.0f} tokens/s, {peak:.2f} GiB, first step after {first_step_s:.1f} s, {wall_s:.1f} s"
    return words.format(**found, peak=found["peak_bytes"] / GIB)


# ---------------------------------------------------------------- telling


def middle(values):
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def summary(runs):
    """For every tool the median and range of each measure, or its failure, and trimtab against the best peer."""
    measures = ("tokens_per_s", "tokens_per_s_overall", "peak_bytes", "reserved_bytes", "first_step_s", "wall_s")
    measures += ("accuracy",)
    rows = {}
    for name, found in runs.items():
        good = [run for run in found if "failure" not in run]
        if good:
            rows[name] = {key: middle([run[key] for run in good]) for key in measures if key in good[0]}
            rows[name]["num_runs"] = len(good)
        bad = [run["failure"] for run in found if "failure" in run]
        if bad or not good:
            rows.setdefault(name, {})["failure"] = bad[-1] if bad else "not run"
    return {"tools": rows, "ratios": ratios_to_best_peer(runs, rows)}


def ratios_to_best_peer(runs, rows):
    """Tokens/s of every form of trimtab divided by those of the best peer in the same round."""
    speeds = {
        name: {run["round"]: run["tokens_per_s"] for run in found if "failure" not in run}
        for name, found in runs.items()
    }
    peers = [name for name, of_it in speeds.items() if of_it and parse(name)[0] not in ("trimtab", "torch")]
    if not peers:
        return {}
    best = max(peers, key=lambda name: rows[name]["tokens_per_s"]["median"])
    ratios = {}
    for name, of_it in speeds.items():
        values = [speed / speeds[best][number] for number, speed in of_it.items() if number in speeds[best]]
        if values and parse(name)[0] == "trimtab":
            ratios[name] = {"best_peer": best, **middle(values)}
    return ratios


def markdown(report):
    return "".join(f"- {key}: {value}\n" for key, value in report["setting"].items()) + "\n" + table(report)


def table(report):
    tools = report["summary"]["tools"]
    has_accuracy = any("accuracy" in row for row in tools.values())
    heads = ["", "tokens/s", "peak GiB", "first step, s", "wall, s", *(["accuracy"] if has_accuracy else [])]
    lines = ["|" + "|".join(f" {head} " for head in heads) + "|", "|---" * len(heads) + "|"]
    for name in sorted(tools, key=lambda name: -tools[name].get("tokens_per_s", {"median": 0})["median"]):
        lines.append(f"| {name} | {' | '.join(cells(tools[name], has_accuracy))} |")
    lines.append("")
    for name, ratio in report["summary"]["ratios"].items():
        words = "{median:.2f} ({low:.2f} to {high:.2f}) × the tokens/s of {best_peer}, the best peer".format(**ratio)
        lines.append(f"- {name}: {words}")
    if has_accuracy:
        lines += accuracies(report["runs"])
    return "\n".join(lines) + "\n"


def accuracies(runs):
    """The accuracy of every seed, and the mean."""
    for name, found in runs.items():
        by_seed = {run["round"]: run["accuracy"] for run in found if "accuracy" in run}
        if by_seed:
            words = ", ".join(f"{value:.4f} (seed {seed})" for seed, value in sorted(by_seed.items()))
            yield f"- {name}: mean accuracy {statistics.mean(by_seed.values()):.4f}: {words}"


def cells(row, has_accuracy):
    if "tokens_per_s" not in row:
        return [row["failure"], "", "", "", *([""] if has_accuracy else [])]
    peak = spread({key: value / GIB for key, value in row["peak_bytes"].items()}, ".2f")
    found = [
        spread(row["tokens_per_s"], ",.0f"),
        peak,
        spread(row["first_step_s"], ".1f"),
        spread(row["wall_s"], ".1f"),
    ]
    if "failure" in row:
        found[0] += f" ({row['num_runs']} runs; {row['failure']})"
    return [*found, *([spread(row["accuracy"], ".4f")] if has_accuracy else [])]


def spread(values, form):
    median, low, high = (format(values[key], form) for key in ("median", "low", "high"))
    return median if low == high else f"{median} ({low} – {high})"


def differences(runs):
    """The losses of all tools, and the largest relative difference of the first step's and of all."""
    losses = {name: found[0]["losses"] for name, found in runs.items() if found and "losses" in found[0]}
    lines = [f"{name}: {', '.join(f'{loss:.6f}' for loss in of_it)}" for name, of_it in losses.items()]
    for step in range(min(map(len, losses.values()), default=0)):
        values = [of_it[step] for of_it in losses.values()]
        lines.append(f"step {step + 1}: largest relative difference {(max(values) - min(values)) / max(values):.2e}")
    return "\n".join(lines)


# ---------------------------------------------------------------- the command


def parse_arguments():
    options = "; ".join(f"+{name}: {words}" for name, words in OPTIONS.items())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("work", choices=WORKS)
    add("--peers", nargs="*", help=f"of {', '.join(TOOLS)}, with options ({options}); default: by work")
    add("--no-trimtab", action="store_true", help="leave trimtab's own recipe out; --vary adds others")
    add("--vary", nargs="+", action="append", default=[], metavar="KEY=VALUE", help="also trimtab with these changes")
    add("--rounds", type=int, default=1)
    add("--first-seed", type=int, default=0, help="seed of the first round: seeds may run side by side for accuracy")
    add("--steps", type=int, help="optimizer steps of a run (default: by work)")
    add("--seconds-limit", type=float, default=86_400, help="start no run after this time, and stop the one that runs")
    add("--small", action="store_true", help="a tiny model and few steps, for a CPU")
    add("--check", action="store_true", help="3 steps in the order of the rows: compare losses instead of speed")
    add(
        "--cold",
        action="store_true",
        help="empty caches for every run (minilm-imdb: always), not only in the first round",
    )
    add("--length", type=int, help="give all rows this many tokens")
    add("--batch-size", type=int)
    add("--precision", choices=("fp32", "bf16", "bf16-pure"))
    add("--model", type=Path, help="minilm-imdb: folder of the pretrained encoder")
    add("--data", type=Path, help="minilm-imdb: folder with imdb_full_{train,test}.parquet")
    add("--test-rows", type=int, help="minilm-imdb: rows to judge with (default: 24,000, on a CPU 500)")
    add("--device", help="cuda or cpu (default: cuda if there is one)")
    add("--threads", type=int, help="threads of a process (default: all cores)")
    add("--out", type=Path, help="write the results to this .json, and the table beside it as .md")
    add("--save", action="store_true", help="write them to benchmarks/results/peers-WORK-DEVICE")
    add("--child", nargs=5, help=argparse.SUPPRESS)
    return completed(parser, parser.parse_args())


def completed(parser, settings):
    """Defaults that depend on others, and the list of tools."""
    import torch

    settings.device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings.threads = settings.threads or os.cpu_count()
    settings.seeds = range(settings.first_seed, settings.first_seed + settings.rounds)
    settings.cold |= WORKS[settings.work].is_whole_run
    settings.test_rows = settings.test_rows or (500 if settings.device == "cpu" else 24_000)
    if settings.length and WORKS[settings.work].lengths is None:
        parser.error(f"{settings.work} has rows of its own: leave --length out")
    needs_folders = settings.work == "minilm-imdb" and not settings.small
    if needs_folders and not (settings.model and settings.data):
        parser.error("minilm-imdb needs --model and --data (or --small)")
    work = WORKS[settings.work].small() if settings.small else WORKS[settings.work]
    peers = list(work.peers) if settings.peers is None else settings.peers
    trimtab = [] if settings.no_trimtab else ["trimtab"]
    settings.tools = list(dict.fromkeys([*trimtab, *(" ".join(["trimtab", *keys]) for keys in settings.vary), *peers]))
    try:
        for name in settings.tools:
            parse(name)
    except ValueError as error:
        parser.error(str(error))
    return settings


def result_path(settings):
    if settings.out:
        return settings.out
    import torch

    gpu = settings.device.startswith("cuda")
    place = torch.cuda.get_device_name().split()[-1].lower() if gpu else "cpu"
    return RESULTS / f"peers-{settings.work}-{place}{'-small' if settings.small else ''}.json"


def main():
    quiet_libraries()
    settings = parse_arguments()
    work = chosen_work(settings)
    if settings.child:
        return run_child(settings, work)
    from record import keep, machine

    setting = machine(settings.device, settings.threads, PACKAGES)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        lengths = prepare(settings, work, Path(folder))
        work = replace(work, num_steps=num_steps_of(work, Path(folder)))
        setting["work"] = (
            f"{settings.work}: {work.words}; batch {work.batch_size}, {work.precision}, {work.num_steps} steps, "
            f"{statistics.mean(lengths):.0f} tokens per row, {settings.rounds} round(s)"
        )
        words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
        setting["command"] = " ".join(["python", "benchmarks/peers.py", *words])
        setting["protocol"] = PROTOCOL

        def report_of(runs):
            return {"work": settings.work, "setting": setting, "runs": runs, "summary": summary(runs)}

        def keep_runs(runs):
            if settings.save or settings.out:
                report = report_of(runs)
                keep(report, markdown(report), f"Speed: {settings.work}", result_path(settings))

        runs = measure(settings, Path(folder), keep_runs)
    keep_runs(runs)
    print(f"{setting['work']}\n\n{differences(runs) if settings.check else table(report_of(runs))}")
    return None


if __name__ == "__main__":
    main()
