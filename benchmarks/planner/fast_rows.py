"""Peaks of packed, compiled, captured and fp8 steps, measured on a GPU: the rows of `h200-fast.json`.

    python benchmarks/planner/fast_rows.py --out tests/planner/golden/h200-fast.json [--jobs 5]
    python benchmarks/planner/fast_rows.py --small --only "bert, packed"

Each row is a run of `trimtab.fit` in a process of its own: a model with random weights, four steps. Several run side by
side on one GPU, because only the statistics of their own allocators are read; memory outside of an allocator cannot be
told apart then and is noted with `--jobs 1` alone. A row in which compilation failed, or a micro-batch was made
smaller, is no measurement: it is shown with its reason and left out of the file. `--small` runs tiny models on any
device, which shows that the rows run, and writes no file.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plain_rows import BERT, LLAMA, MODERNBERT, ROBERTA

MIB = 2**20
NUM_STEPS = 4
PACKAGES = ("torch", "transformers", "peft", "triton", "liger-kernel")
WORDS = ["the", "film", "was", "a", "story", "about", "this", "cast", "very", "long", "and", "nothing", "happened"]
MINILM = BERT | {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6}
SHORT_ROBERTA = ROBERTA | {"num_hidden_layers": 6}
SHORT_MODERNBERT = MODERNBERT | {"num_hidden_layers": 6}
# Blocks share a graph, and a model of few layers is made sooner: its peak has the same terms.
LLAMA_1B = LLAMA | {"num_hidden_layers": 6, "vocab_size": 32000}
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 3,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
LORA, FP8 = {"kind": "lora"}, {"kind": "lora", "base": "fp8"}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}


def row(
    config: dict[str, Any],
    words: str,
    rows: int = 32,
    length: int = 512,
    task: str = "classify",
    adapter: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """One row. `words` are its techniques: packed, compiled, captured, graphs (both), chunked, liger, micro-batches."""
    told = words.split(", ")
    num_micro = next((int(word.split()[0]) for word in told if word.endswith("micro-batches")), 1)
    recomputed = next((word.removeprefix("recompute ") for word in told if word.startswith("recompute ")), "none")
    compiled = {"graphs": "graphs", "captured": "capture", "compiled": "blocks"}
    train = {"compile": next((value for word, value in compiled.items() if word in told), "off")}
    memory = {
        "padding": "none" if "packed" in told else "longest",
        "gradient_checkpointing": recomputed,
        "kernels": "liger" if "liger" in told else "plain",
        "loss": "chunked" if "chunked" in told else "plain",
        "micro_batch": rows // num_micro,
    }
    step = {"config": config, "task": task, "rows": rows, "length": length, "adapter": adapter or "none"}
    return {**step, "train": train | settings, "memory": memory}


def _all_rows() -> Iterator[tuple[str, dict[str, Any]]]:
    bert = ("packed", "packed, recompute all", "packed, 4 micro-batches", "compiled", "compiled, recompute all")
    bert += ("compiled, packed", "compiled, packed, recompute all", "compiled, packed, 4 micro-batches")
    for words in (*bert, "graphs", "graphs, packed", "graphs, packed, 4 micro-batches", "captured, packed"):
        yield f"bert, {words}", row(BERT, words)
    for words in ("packed", "compiled, packed, 2 micro-batches", "graphs, packed", "captured, packed"):
        yield f"minilm, {words}", row(MINILM, words, 64, 256)
    for words in ("packed", "compiled, packed"):
        yield f"roberta, {words}", row(SHORT_ROBERTA, words, 32, 256, precision="fp16")
        yield f"modernbert, {words}", row(SHORT_MODERNBERT, words, task="masked-lm")
    llama = {"rows": 4, "length": 1024, "task": "causal-lm"}
    of_a_base = (
        "packed",
        "compiled",
        "compiled, recompute all",
        "compiled, packed",
        "graphs, packed",
        "captured, packed",
    )
    for words in of_a_base:
        yield f"llama 1B, lora, {words}", row(LLAMA_1B, words, adapter=LORA, **llama)
    for words in ("plain", "compiled", "compiled, packed, 2 micro-batches", "liger, recompute ops"):
        yield f"llama 1B, fp8, {words}", row(LLAMA_1B, words, adapter=FP8, **llama)
    full = ("packed, chunked", "compiled, 2 micro-batches", "graphs, recompute all")
    for words in full:
        yield f"llama 1B, {words}", row(LLAMA_1B, words, precision="bf16-pure", **llama)
    for words in ("packed, recompute all", "compiled, packed"):
        yield f"llama 8B, fp8, {words}", row(LLAMA_8B, words, adapter=FP8, **llama)
    yield "llama 8B, lora, compiled, recompute all", row(LLAMA_8B, "compiled, recompute all", adapter=LORA, **llama)


ROWS = dict(_all_rows())


def rows_of(step: dict[str, Any]) -> list[dict[str, Any]]:
    """Texts that make full rows; for packed steps of classifiers of all lengths, some of them as long as any.

    Texts of language models are concatenated and cut; each has a token at its start and one at its end.
    """
    draw, longest = random.Random(0), step["length"]
    has_all_lengths = step["memory"]["padding"] == "none" and step["task"] == "classify"
    found = []
    for number in range(NUM_STEPS * step["rows"]):
        is_short = has_all_lengths and number % 10
        num_words = draw.randint(longest // 8, longest) if is_short else 2 * longest - 2
        text = " ".join(draw.choices(WORDS, k=num_words))
        found.append({"text": text} | ({"label": ("good", "bad")[number % 2]} if step["task"] == "classify" else {}))
    return found


def recipe_of(step: dict[str, Any], out: str, budget: str | None) -> Any:
    """The recipe of a row, with its data."""
    from trimtab import Recipe

    return Recipe(
        model={"config": step["config"], "tokenizer": "train"},
        task=step["task"],
        data={"train": rows_of(step), "eval_share": 0, "max_length": step["length"]},
        train={
            "precision": "bf16",
            "batch_size": step["rows"],
            "max_steps": NUM_STEPS,
            "log_every": 1,
            **step["train"],
        },
        memory={**step["memory"], "budget": budget},
        adapter=step["adapter"],
        checkpoint={"every": None},
        track="none",
        out=out,
    )


def prediction_of(values: dict[str, Any]) -> Any:
    """What is predicted of a measured row today, without a GPU: for the techniques that its run used."""
    from trimtab.planner.survey import RecipeRows, planner_for
    from trimtab.planner.target import known_target
    from trimtab.techniques.apply import plain_spec

    recipe = recipe_of(values["step"], "nowhere", None)
    planner = planner_for(recipe, known_target("h200", None), RecipeRows(recipe))
    return planner.prediction(plain_spec(values["micro_batch_size"], values["precision"], **values["techniques"]))


# ---------------------------------------------------------------------- one row, in a process of its own


def small_step(step: dict[str, Any]) -> dict[str, Any]:
    """The same row with a tiny model and short texts."""
    known = set(step["config"]) | {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    config = step["config"] | {key: value for key, value in SMALL.items() if key in known or key == "vocab_size"}
    scale = step["rows"] // step["memory"]["micro_batch"]
    memory = step["memory"] | {"micro_batch": 2}
    return step | {"config": config, "rows": 2 * scale, "length": 48, "memory": memory}


class Watch:
    """A callback: what became of compilation and of captured graphs."""

    problem: str | None = None

    def on_step(self, state: Any) -> None:
        from trimtab.model.captured_step import captured_micro_batches_of
        from trimtab.model.compiled_blocks import compiled_blocks_of

        for kind in (compiled_blocks_of(state.model), captured_micro_batches_of(state.model)):
            if kind is not None and kind.failure is not None:
                self.problem = f"{type(kind).__name__}: {kind.failure}"


def measure(name: str, is_small: bool, is_alone: bool) -> dict[str, Any]:
    """Run a row and tell what was predicted and measured."""
    import torch

    from trimtab import fit
    from trimtab.hardware.memory import non_allocator_memory

    step = small_step(ROWS[name]) if is_small else ROWS[name]
    watch, began = Watch(), time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        recipe = recipe_of(step, f"{place}/run", "2GiB" if is_small else "25GiB")
        result = fit(recipe, callbacks=[watch], progress="quiet")
        lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(lines) if "peak_reserved_bytes" in line)
    measured = {"allocated": last["peak_memory_bytes"], "reserved": last["peak_reserved_bytes"]}
    if is_alone and torch.cuda.is_available():
        measured["outside"] = non_allocator_memory(torch.device("cuda", torch.cuda.current_device()))
    plan, notes = result.plan, [line["note"] for line in lines if "note" in line]
    if watch.problem or notes or result.fit.step != NUM_STEPS:
        return {"name": name, "failure": watch.problem or "; ".join(notes) or f"ended after step {result.fit.step}"}
    return {
        "name": name,
        "step": step,
        "techniques": dict(plan.spec.values),
        "micro_batch_size": plan.micro_batch_size,
        "precision": plan.precision,
        "predicted": {"allocated": plan.predicted_peak_bytes, "total": plan.predicted_total_bytes},
        "measured": measured,
        "seconds": round(time.monotonic() - began, 1),
    }


# ---------------------------------------------------------------------- all rows


def run_row(name: str, options: argparse.Namespace, script: str = __file__) -> dict[str, Any]:
    """Start the process of a row and read what it tells; a failure is told too."""
    command = [sys.executable, script, "--row", name, "--jobs", str(options.jobs), *(["--small"] * options.small)]
    num_threads = str(max(1, (os.cpu_count() or 1) // options.jobs))
    threads = {"OMP_NUM_THREADS": num_threads, "TORCHINDUCTOR_COMPILE_THREADS": num_threads}
    quiet = {"TRIMTAB_CACHE": "off", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | threads | quiet,
    )
    try:
        said, complaints = process.communicate(timeout=options.seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"name": name, "failure": f"took more than {options.seconds:g} s"}
    told = [line for line in said.splitlines() if line.startswith('{"name"')]
    if process.returncode or not told:
        lines = [line for line in complaints.splitlines() if line.strip()]
        return {"name": name, "failure": " ".join(lines[-2:])[-400:] or f"exit code {process.returncode}"}
    found: dict[str, Any] = json.loads(told[-1])
    return found


def shown(found: dict[str, Any]) -> str:
    """A line of the table."""
    if "failure" in found:
        return f"{found['name']:48} FAILED: {found['failure']}"
    measured, predicted = found["measured"]["allocated"], found["predicted"]["allocated"] or 0
    figures = f"{predicted / MIB:10,.1f} {measured / MIB:10,.1f} {predicted / measured:8.4f}"
    return f"{found['name']:48} {figures} {found['seconds']:6.1f} s"


def written(rows: list[dict[str, Any]], hardware: str) -> str:
    """The file: one row a line."""
    versions = {name: value for name in PACKAGES if (value := _version(name))}
    head = f'{{\n "hardware": {json.dumps(hardware)},\n "versions": {json.dumps(versions)},\n "rows": [\n  '
    kept = [{key: value for key, value in found.items() if key != "seconds"} for found in rows]
    return head + ",\n  ".join(json.dumps(found) for found in kept) + "\n ]\n}\n"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except ImportError:
        return None


def main() -> None:
    """Run the rows side by side and write those that were measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--jobs", type=int, default=5, help="rows that run side by side")
    parser.add_argument("--only", default="", help="rows with one of these words, with | between them")
    parser.add_argument("--seconds", type=float, default=180, help="the longest that a row may take")
    parser.add_argument("--small", action="store_true", help="tiny models, on any device")
    parser.add_argument("--commit", help="the commit to note, where there is no git")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options.row, options.small, options.jobs == 1)), flush=True)
        return
    if options.small and options.out:
        parser.error("--small measures nothing: leave --out away")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch
    from record import machine

    around = machine("cuda" if torch.cuda.is_available() else "cpu", 1, ())
    wanted = [name for name in ROWS if any(word in name for word in options.only.split("|"))]
    # what compiles takes longest and comes first, so that no such row is left alone at the end
    wanted.sort(key=lambda name: "compiled" not in name and "graphs" not in name)
    began, found = time.monotonic(), []
    what = "tiny models: no measurement" if options.small else "MiB of allocated tensors"
    print(f"{'row':48} {'predicted':>10} {'measured':>10} {'ratio':>8}    {what}")
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(run_row, name, options) for name in wanted]):
            print(shown(done.result()), flush=True)
            found.append(done.result() | {"commit": options.commit or around.get("commit")})
            good = sorted((one for one in found if "failure" not in one), key=lambda one: list(ROWS).index(one["name"]))
            if options.out is not None:  # after every row: what is measured is kept if the rest is cut off
                hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
                options.out.write_text(written(good, hardware), encoding="utf-8")
    print(f"{len(good)} of {len(found)} rows in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
