"""Predicts a step of every architecture that transformers registers for a task, and prints which cannot be traced.

    python benchmarks/planner/zoo.py [--only mixtral,qwen3] [--task causal-lm] [--shard 1/4] [--trains]
    python benchmarks/planner/zoo.py --table [--save]

Each pair of an architecture and a task is built from its default config (or from the fewest settings that transformers
needs to build it: small_configs.py) and predicted for 2 x 128 tokens, bf16, on an H200. Results are lines of a JSON
file, one for each pair; a pair that has one is not tried again, unless with `--again` (all) or `--failed` (those that
were not traced). Pairs run in a subprocess that is replaced after some pairs, and killed if one pair takes too long.

The share of traced pairs is that of all pairs that transformers builds, whether or not it can train them. `--trains`
asks transformers itself about the pairs that were not traced, with plain PyTorch: can a small config of the
architecture (2 layers, narrow) be built on the CPU and trained for one step?
"""

import argparse
import json
import os
import re
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from small_configs import MINIMAL, MINIMAL_FOR_TASK, few_layers, small_config

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "zoo-trace"
GIB = 2**30
ROWS, LENGTH, PRECISION, GPU = 2, 128, "bf16", "h200"
MAPPINGS = {
    "causal-lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
    "classify": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForSequenceClassification"),
    "masked-lm": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
}
NOT_BUILT, TRACED, NOT_TRACED = "not built", "traced", "not traced"
SLOW_S = 5.0
MOST_PAIRS_OF_A_PROCESS = 40
_MOST_SECONDS_TO_START = 300


class Pair(NamedTuple):
    """An architecture and a task."""

    model: str
    task: str


def all_pairs() -> list[Pair]:
    """Every pair that transformers registers."""
    from transformers.models.auto import modeling_auto

    return [Pair(model, task) for task, (names, _) in MAPPINGS.items() for model in getattr(modeling_auto, names)]


# ---------------------------------------------------------------------- one pair, in a subprocess


def default_config(pair: Pair) -> dict[str, Any]:
    """The config of a pair, as a recipe has it."""
    return {"model_type": pair.model, **MINIMAL.get(pair.model, {}), **MINIMAL_FOR_TASK.get(pair, {})}


def built_on_meta(pair: Pair) -> Any:
    """The model of a pair, as transformers builds it, without weights."""
    import torch
    import transformers

    values = default_config(pair)
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        return getattr(transformers, MAPPINGS[pair.task][1]).from_config(config)


def num_parameters(pair: Pair) -> int:
    """Trainable parameters of the model of a pair."""
    return sum(parameter.numel() for parameter in built_on_meta(pair).parameters())


def why_not_built(pair: Pair) -> str | None:
    """Why transformers cannot build the config on `meta`; None if it can."""
    try:
        built_on_meta(pair)
    except Exception as error:
        return _reason(error)
    return None


def why_not_trained(pair: Pair) -> str | None:
    """Why transformers cannot train a small config of the architecture for one step on the CPU; None if it can."""
    import transformers

    values = default_config(pair)
    reasons = []
    for shrink in (small_config, few_layers):
        try:
            config = transformers.AutoConfig.for_model(values["model_type"], **_without_type(values))
            small = shrink(config, 2)
            _train_once(pair, transformers.AutoConfig.for_model(values["model_type"], **_without_type(values), **small))
        except Exception as error:
            reasons.append(_reason(error))
        else:
            return None
    return reasons[0] if reasons[0] == reasons[1] else " / ".join(reasons)


def _without_type(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "model_type"}


def _train_once(pair: Pair, config: Any) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    if pair.task == "classify" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0
    if pair.task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    model = getattr(transformers, MAPPINGS[pair.task][1]).from_config(config).float().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = torch.randint(3, 100, (2, LENGTH))
    labels = torch.tensor([0, 1]) if pair.task == "classify" else ids.clone()
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
    loss.backward()
    optimizer.step()


def predict(pair: Pair) -> dict[str, Any]:
    """Predict a step of a pair: seconds, and GiB or the reason why not."""
    from trimtab.planner.predict_step import predict_step_memory

    began, began_cpu = time.perf_counter(), time.process_time()
    found: dict[str, Any] = {}
    try:
        prediction = predict_step_memory(default_config(pair), pair.task, ROWS, LENGTH, gpu=GPU, precision=PRECISION)
        found["gib"] = round(prediction.allocated / GIB, 3)
    except Exception as error:
        found |= {"reason": _reason(error), "where": _where(error)}
    return found | {
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_s": round(time.process_time() - began_cpu, 2),
    }


def _reason(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:300]


def _where(error: BaseException) -> str:
    """The innermost line of code below the first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages/torch/" not in frame.filename] or frames
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(ours[-3:]))


def work(asks_training: bool) -> None:
    """Read pairs from standard input, and write a line of results for each."""
    if not asks_training:
        import trimtab.planner.predict_step  # noqa: F401 (takes seconds, which are not those of the first pair)
    print("ready", flush=True)
    for line in sys.stdin:
        pair = Pair(*json.loads(line))
        found: dict[str, Any]
        if asks_training:
            found = {"trains": why_not_trained(pair) or "yes"}
        else:
            reason = why_not_built(pair)
            found = {"not_built": reason} if reason else predict(pair)
        print("\n" + json.dumps({"model": pair.model, "task": pair.task} | found), flush=True)


# ---------------------------------------------------------------------- all pairs


class Worker:
    """A subprocess that answers for one pair after the other.

    Args:
        asks_training: What it answers: whether transformers trains the pair, or the prediction.
    """

    def __init__(self, asks_training: bool) -> None:
        command = [sys.executable, __file__, "--work", *(["--trains"] if asks_training else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read = b""
        self.num_pairs = 0
        self._line(_MOST_SECONDS_TO_START)

    def ask(self, pair: Pair, seconds: float) -> dict[str, Any] | None:
        """The answer for a pair; None if it took too long, or the subprocess ended."""
        assert self._process.stdin is not None
        self.num_pairs += 1
        self._process.stdin.write(json.dumps(pair).encode() + b"\n")
        self._process.stdin.flush()
        line = self._line(seconds)
        while line and not line.startswith(b'{"model": '):  # libraries print, too
            line = self._line(seconds)
        return dict(json.loads(line)) if line else None

    def _line(self, seconds: float) -> bytes:
        """The next line; nothing if it does not come in time, or the subprocess ended."""
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, end - time.monotonic()))
            more = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not more:
                return b""
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line + b"\n"

    def end(self) -> None:
        """End the subprocess."""
        self._process.kill()
        self._process.wait()


def answers(pairs: Iterable[Pair], asks_training: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """The answers for all pairs, one after the other."""
    worker: Worker | None = None
    for pair in pairs:
        worker = worker or Worker(asks_training)
        answer = worker.ask(pair, seconds)
        if answer is None:
            reason = f"no answer within {seconds:.0f} s"
            answer = {**pair._asdict(), **({"trains": reason} if asks_training else {"reason": reason})}
        yield answer
        if len(answer) == 3 and "no answer" in str(answer) or worker.num_pairs >= MOST_PAIRS_OF_A_PROCESS:
            worker.end()
            worker = None
    if worker is not None:
        worker.end()


def read_results(path: Path) -> dict[Pair, dict[str, Any]]:
    """The latest answers in a file, by pair."""
    found: dict[Pair, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        values = json.loads(line)
        pair = Pair(values["model"], values["task"])
        before = found.get(pair, {})
        if "trains" not in values:  # a new prediction replaces the old one, not the answer about training
            before = {name: before[name] for name in ("trains",) if name in before}
        found[pair] = before | values
    return found


def status(values: dict[str, Any]) -> str:
    """What came of a pair."""
    if "not_built" in values:
        return NOT_BUILT
    return TRACED if "gib" in values else NOT_TRACED


# ---------------------------------------------------------------------- the table


def summary(results: dict[Pair, dict[str, Any]]) -> str:
    """Counts for each task, then the pairs that were not traced, that were slow, and that are not built."""
    lines = ["| task | pairs | not built | traced | not traced | traced of built |", "|---|---:|---:|---:|---:|---:|"]
    for task in (*MAPPINGS, "all"):
        found = [status(values) for pair, values in results.items() if task in (pair.task, "all")]
        not_built, traced, not_traced = (found.count(name) for name in (NOT_BUILT, TRACED, NOT_TRACED))
        counts = f"{len(found)} | {not_built} | {traced} | {not_traced}"
        lines.append(f"| {task} | {counts} | {traced / max(1, traced + not_traced):.1%} |")
    is_open = {pair: values for pair, values in results.items() if status(values) == NOT_TRACED}
    lines += _list("Not traced", is_open, "reason")
    lines += _list("The same with a small config, trained by transformers alone on the CPU", is_open, "trains")
    slow = {pair: values for pair, values in results.items() if values.get("cpu_s", 0) > SLOW_S}
    lines += _list(f"Slower than {SLOW_S:.0f} s of CPU time", slow, "cpu_s")
    lacking = {pair: values for pair, values in results.items() if status(values) == NOT_BUILT}
    lines += _list("Not built by transformers", lacking, "not_built")
    return "\n".join(lines)


def _list(title: str, results: dict[Pair, dict[str, Any]], column: str) -> list[str]:
    found = sorted((pair, values) for pair, values in results.items() if column in values)
    if not found:
        return []
    lines = ["", f"## {title}", "", f"| model | task | {column} |", "|---|---|---|"]
    for pair, values in found:
        text = str(values[column]).rpartition("cannot be traced (")[2].partition(" cure:")[0].replace("|", "\\|")
        lines.append(f"| {pair.model} | {pair.task} | {text[:160]} |")
    return lines


def table(results: dict[Pair, dict[str, Any]]) -> str:
    """Every traced pair with its GiB and CPU seconds."""
    lines = ["", "## Traced", "", "| model | task | GiB | CPU seconds |", "|---|---|---:|---:|"]
    for pair, values in sorted(results.items()):
        if "gib" in values:
            lines.append(f"| {pair.model} | {pair.task} | {values['gib']:.2f} | {values['cpu_s']:.1f} |")
    return "\n".join(lines)


def _heading() -> str:
    import torch
    import transformers

    return (
        "# Which architectures can be traced\n\n"
        f"`python benchmarks/planner/zoo.py`, transformers {transformers.__version__}, torch {torch.__version__}: "
        f"`predict_step_memory` of every registered pair, {ROWS} x {LENGTH} tokens, {PRECISION}, {GPU.upper()}. "
        "Configs are transformers' defaults, or what small_configs.py adds where a default cannot be built or trained "
        "(`MINIMAL`). Seconds are CPU time of a busy machine with two cores. Slow are recurrences that transformers "
        "computes token by token (Jamba, RWKV, Zamba, whose shared blocks are traced one by one), and a loop over 768 "
        "experts (LongCat).\n"
    )


def main() -> None:
    """Run the pairs that were asked for, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="model types, separated by commas; a regular expression each")
    parser.add_argument("--task", help="tasks, separated by commas")
    parser.add_argument("--shard", default="1/1", help="which part of the pairs, such as 2/4")
    parser.add_argument("--trains", action="store_true", help="ask transformers whether it trains what was not traced")
    parser.add_argument("--again", action="store_true", help="repeat pairs that have a result")
    parser.add_argument("--failed", action="store_true", help="repeat pairs that were not traced")
    parser.add_argument("--seconds", type=float, default=60, help="limit for a pair")
    parser.add_argument("--results", type=Path, default=RESULT.with_suffix(".jsonl"), help="the file of results")
    parser.add_argument("--table", action="store_true", help="print the table and try nothing")
    parser.add_argument("--save", action="store_true", help=f"write the table to {RESULT.name}.md")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.trains)
        return
    if not options.table:
        _run(options)
    results = read_results(options.results)
    print(summary(results))
    if options.save:
        options.results.write_text("".join(json.dumps(values) + "\n" for _, values in sorted(results.items())))
        RESULT.with_suffix(".md").write_text("\n".join((_heading(), summary(results), table(results), "")))


def _run(options: argparse.Namespace) -> None:
    before = read_results(options.results)
    part, num_parts = map(int, options.shard.split("/"))
    pairs = [pair for pair in all_pairs() if _is_asked(pair, options)]
    pairs = [pair for pair in pairs if options.again or _is_open(before.get(pair), options)][part - 1 :: num_parts]
    for pair, answer in zip(pairs, answers(pairs, options.trains, options.seconds), strict=True):
        with options.results.open("a") as file:
            file.write(json.dumps(answer) + "\n")
        shown = " ".join(str(value)[:200] for name, value in answer.items() if name not in pair._fields)
        print(f"{pair.task:10} {pair.model:24} {shown}", file=sys.stderr, flush=True)


def _is_asked(pair: Pair, options: argparse.Namespace) -> bool:
    names, tasks = (text.split(",") if text else None for text in (options.only, options.task))
    is_named = names is None or any(re.fullmatch(name, pair.model) for name in names)
    return is_named and (tasks is None or pair.task in tasks)


def _is_open(values: dict[str, Any] | None, options: argparse.Namespace) -> bool:
    if options.trains:
        return values is not None and "reason" in values and "trains" not in values
    if values is None:
        return True
    is_tried = "gib" in values or "reason" in values or "not_built" in values
    return not is_tried or (options.failed and "gib" not in values)


if __name__ == "__main__":
    main()
