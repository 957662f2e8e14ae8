"""Plans under their budget on a GPU: recipes with budgets drawn at random, 20 steps each, capped.

    python benchmarks/planner/hold.py OUT.json [--budgets 2] [--only TEXT] [--seconds 500]
    python benchmarks/planner/hold.py --publish OUT.json …

For each recipe the smallest plan is predicted without the GPU, and budgets are drawn between what it needs and twice
that. Then `trimtab.fit` plans and trains with that budget, in a process of its own. What counts: no run is out of
memory, no step is taken back, and allocator and context together stay within the budget.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from plain_rows import BERT, DISTILBERT, GEMMA, GPT2, LLAMA, MODERNBERT, QWEN, ROBERTA, T5

MIB, GIB = 2**20, 2**30
WIDE = LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "tie_word_embeddings": False}
WORDS = ["the", "film", "was", "a", "story", "about", "this", "cast", "very", "long", "and", "nothing", "happened"]
NUM_STEPS, SEED = 20, 7


def spec(config: dict[str, Any], task: str, rows: int, length: int, **more: Any) -> dict[str, Any]:
    """A recipe without its data; `train`, `memory` and `adapter` as in a recipe."""
    return {"config": config, "task": task, "rows": rows, "length": length, "train": {}, "memory": {}, **more}


RECIPES = {
    "bert, classify": spec(BERT, "classify", 64, 384),
    "roberta, regress, fp32": spec(ROBERTA, "regress", 32, 256, train={"precision": "fp32"}),
    "distilbert, classify, fp16": spec(DISTILBERT, "classify", 64, 256, train={"precision": "fp16"}),
    "modernbert, masked-lm": spec(MODERNBERT, "masked-lm", 32, 512),
    "gpt2, causal-lm": spec(GPT2, "causal-lm", 16, 1024),
    "qwen 0.6B, causal-lm, tf32": spec(QWEN, "causal-lm", 8, 512, train={"precision": "tf32"}),
    "gemma 0.3B, causal-lm, 8 bits allowed": spec(GEMMA, "causal-lm", 16, 512, memory={"allow": ["8bit"]}),
    "t5, seq2seq": spec(T5, "seq2seq", 32, 256),
    "llama 1B, causal-lm": spec(LLAMA, "causal-lm", 8, 1024),
    "llama 1B, causal-lm, bf16-pure, adagrad": spec(
        LLAMA, "causal-lm", 8, 1024, train={"precision": "bf16-pure", "optimizer": "adagrad"}
    ),
    "llama 1B, lora": spec(LLAMA, "causal-lm", 16, 1024, adapter="lora"),
    "llama 8B of 8 layers, qlora": spec(WIDE, "causal-lm", 16, 1024, adapter="qlora"),
}


def rows_of(task: str, num_rows: int, longest: int) -> list[dict[str, Any]]:
    """Rows of all lengths; some of them as long as any."""
    draw = random.Random(0)
    found: list[dict[str, Any]] = []
    for number in range(num_rows):
        length = longest if number % 10 == 0 else draw.randint(longest // 8, longest)
        text = " ".join(draw.choices(WORDS, k=length))
        found.append(
            {
                "classify": {"text": text, "label": ("good", "bad")[number % 2]},
                "regress": {"text": text, "label": draw.random()},
                "seq2seq": {"source": text, "target": text[: len(text) // 4]},
            }.get(task, {"text": text})
        )
    return found


def recipe_of(one: dict[str, Any], budget: int | None, out: str) -> Any:
    """The recipe with its data."""
    from trimtab import Recipe

    task, longest = one["task"], one["length"]
    columns = {"seq2seq": {"text": "source", "target": "target"}, "classify": {"text": "text", "label": "label"}}
    columns["regress"] = columns["classify"]
    data = {
        "train": rows_of(task, one["rows"] * 12, longest),
        "eval": rows_of(task, 24, longest),
        "max_length": longest,
        **columns.get(task, {"text": "text"}),
    }
    train = {"batch_size": one["rows"], "max_steps": NUM_STEPS, "lr": 1e-5, "log_every": 1, **one["train"]}
    return Recipe(
        model={"config": one["config"], "tokenizer": "train"},
        task=task,
        data=data,
        train=train,
        adapter=one.get("adapter", "none"),
        memory={"budget": None if budget is None else str(budget), **one["memory"]},
        checkpoint={"every": None},
        out=out,
    )


def planner_of(recipe: Any) -> Any:
    """What `fit` asks on an H200, without one."""
    from trimtab.planner.survey import RecipeRows, planner_for
    from trimtab.planner.target import known_target

    return planner_for(recipe, known_target("h200", None), RecipeRows(recipe))


def smallest_total(planner: Any) -> int:
    """What the smallest plan needs: every technique, with micro-batches of one row, or with one micro-batch."""
    *_, last = planner.space.sets()
    ends = (planner.space.micro_batches[0], planner.space.micro_batches[-1])
    return min(planner.prediction(last.with_micro_batch(size)).total for size in ends)


def predicted(run: dict[str, Any]) -> tuple[int, int]:
    """The peaks of a run's steps and evaluations, from the techniques that it used."""
    from trimtab.techniques.apply import plain_spec

    one, plan = RECIPES[run["recipe"]], run["plan"]
    recipe = recipe_of(one, run["budget"], "nowhere")
    evaluate = recipe.evaluate.model_copy(update={"batch_size": plan["eval_micro_batch"]})
    planner = planner_of(recipe.model_copy(update={"evaluate": evaluate}))
    keys = ("loss", "optimizer", "offload", "gradient_checkpointing", "kernels", "attention_backend")
    techniques = {key: plan[key] for key in keys if key in plan} | {"adapter": one.get("adapter", "none")}
    spec = plain_spec(plan["micro_batch_size"], planner.precision, **techniques)
    return planner.prediction(spec).allocated, planner.evaluation(spec)[1].allocated


def child() -> None:
    """Import, predict the smallest plan, wait for a turn, train, and say what was measured."""
    name, draw = json.loads(sys.stdin.readline())
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401

    import trimtab.run
    from trimtab.hardware.memory import non_allocator_memory
    from trimtab.units import format_bytes

    one = RECIPES[name]
    if one.get("adapter"):
        import peft  # noqa: F401
    with tempfile.TemporaryDirectory() as place:
        smallest = smallest_total(planner_of(recipe_of(one, None, f"{place}/none")))
        budget = int(smallest * draw)
        told: dict[str, Any] = {"recipe": name, "smallest": smallest, "budget": budget}
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.monotonic()
        try:
            result = trimtab.run.fit(recipe_of(one, budget, f"{place}/run"), progress="quiet")
            lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
            last = next(line for line in reversed(lines) if "peak_reserved_bytes" in line)
            torch.cuda.synchronize()
            outside = non_allocator_memory(torch.device("cuda", 0))
            steps = [line["time"] for line in lines if "loss" in line]
            told |= {
                "plan": {
                    key: getattr(result.plan, key)
                    for key in (
                        *("micro_batch_size", "optimizer", "gradient_checkpointing", "loss", "kernels", "offload"),
                        *("predicted_peak_bytes", "predicted_total_bytes", "predicted_eval_peak_bytes"),
                        *("eval_micro_batch", "predicted_step_s"),
                    )
                },
                "measured": {key: value for key, value in last.items() if key.endswith("bytes")},
                "outside": outside,
                "total": last["peak_reserved_bytes"] + outside,
                "notes": [line["note"] for line in lines if "note" in line],
                "rows_at_once": result.fit.micro_batch_size,
                "steps": result.fit.step,
                "step_s": sorted(b - a for a, b in zip(steps, steps[1:], strict=False))[len(steps) // 2],
            }
            told["held"] = told["total"] <= budget and not told["notes"] and result.fit.step == NUM_STEPS
        except Exception as error:
            told |= {"held": False, "failure": f"{type(error).__name__}: {error}"[:600]}
        told["seconds"] = round(time.monotonic() - began, 1)
    peak = format_bytes(told["total"]) if "total" in told else told.get("failure", "")
    told["words"] = f"{name}: {peak} of {format_bytes(budget)}, smallest {format_bytes(smallest)}"
    print(json.dumps(told), flush=True)


def main() -> None:
    """Start every process ahead, and give each its turn on the GPU."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--publish", action="store_true", help="no runs: those of the files become the result")
    parser.add_argument("--budgets", type=int, default=2, help="of each recipe")
    parser.add_argument("--only", default="", help="recipes with one of these words, with | between them")
    parser.add_argument("--seconds", type=float, default=1e9, help="no run begins later than that")
    parser.add_argument("--ahead", type=int, default=10, help="processes that are started ahead")
    options = parser.parse_args()
    if options.publish:
        publish_runs([run for path in options.out for run in json.loads(path.read_text())])
        return
    draw, began = random.Random(SEED), time.monotonic()
    wanted = [(name, draw.uniform(1, 2)) for _ in range(options.budgets) for name in RECIPES]
    wanted = [one for one in wanted if any(words in one[0] for words in options.only.split("|"))]
    waiting: list[subprocess.Popen[str]] = []
    found: list[dict[str, Any]] = []
    try:
        for number, one in enumerate(wanted):
            while len(waiting) < options.ahead and number + len(waiting) < len(wanted):
                waiting.append(_started(wanted[number + len(waiting)]))
            if time.monotonic() - began > options.seconds:
                print(f"no time for {len(wanted) - number} runs")
                break
            found.append(_told(waiting.pop(0), one[0]))
            print(
                f"{'held' if found[-1]['held'] else 'NOT HELD'} {found[-1].get('words')} "
                f"{found[-1].get('plan', {}).get('micro_batch_size')} {found[-1].get('notes')} "
                f"{found[-1].get('failure', '')}",
                flush=True,
            )
            options.out[0].write_text(json.dumps(found, indent=1))
    finally:
        for process in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    print(f"{sum(one['held'] for one in found)} of {len(found)} held, {time.monotonic() - began:.0f} s")


def publish_runs(runs: list[dict[str, Any]]) -> None:
    """The table of the runs that were made, with what is predicted today of each."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from record import publish

    lines = [
        "- measured on: NVIDIA H200s, torch 2.11.0, transformers 5.17.0",
        f"- {sum(run['held'] for run in runs)} of {len(runs)} runs of {len({run['recipe'] for run in runs})} recipes "
        f"held their budget: {NUM_STEPS} steps, no step taken back, and the peak of allocator and context within it",
        "",
        "MiB. *Used* is the peak of the allocator with what is outside of it; peaks are those of tensors. Predictions "
        f"are those of the code that is here, made without a GPU, with transformers {version('transformers')}.",
        "",
        "| recipe | budget | used | plan | steps, measured | predicted | evaluation, measured | predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        plan, measured = run["plan"], run["measured"]
        words = [f"micro-batch {plan['micro_batch_size']}"]
        words += [f"recompute {plan['gradient_checkpointing']}"] if plan["gradient_checkpointing"] != "none" else []
        words += [f"loss {plan['loss']}"] if plan["loss"] != "plain" else []
        words += [plan["optimizer"]] if plan["optimizer"] != "adamw" else []
        peaks = predicted(run)
        lines.append(
            f"| {run['recipe']} | {run['budget'] / MIB:,.0f} | {run['total'] / MIB:,.0f} | {', '.join(words)} | "
            f"{measured['peak_memory_bytes'] / MIB:,.1f} | {peaks[0] / MIB:,.1f} | "
            f"{measured['preflight_eval_peak_bytes'] / MIB:,.1f} | {peaks[1] / MIB:,.1f} |"
        )
    result = Path(__file__).parents[1] / "results" / "planner-hold.md"
    publish({"runs": runs}, "\n".join(lines) + "\n", "Plans under their budget", result, save=True)


def _started(wanted: tuple[str, float]) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, __file__, "--child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(wanted) + "\n")
    process.stdin.flush()
    return process


def _told(process: "subprocess.Popen[str]", name: str) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    said = process.stdout.readline()
    if said.strip() == "ready":
        process.stdin.write("go\n")
        process.stdin.flush()
        said = process.stdout.readline()
    _, complaints = process.communicate()
    try:
        told: dict[str, Any] = json.loads(said)
        return told
    except ValueError:
        last = complaints.strip().splitlines()[-1:] or [said[:200]]
        return {"recipe": name, "held": False, "failure": f"exit code {process.returncode}: {last[0]}"}


if __name__ == "__main__":
    child() if "--child" in sys.argv else main()
