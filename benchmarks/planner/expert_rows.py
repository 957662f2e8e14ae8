"""Mixtures of experts on a GPU: predicted against measured peaks and step times of Mixtral, Qwen3-MoE and gpt-oss.

    python benchmarks/planner/expert_rows.py --out benchmarks/results/experts-h200
    python benchmarks/planner/expert_rows.py --predict              # the predictions alone, without a GPU
    python benchmarks/planner/expert_rows.py --small --only qwen3   # tiny models on any device: shows that rows run

Models have the widths and numbers of experts of Mixtral-8x7B, Qwen3-30B-A3B and gpt-oss-20b, two layers, and random
weights. Each row is a run of `trimtab.fit` in a process of its own, which is ended after its last step, before
anything is saved. Processes start and plan side by side; one at a time builds its model on the GPU while one at a time
takes its steps, so peaks are those of a fresh allocator and step times those of a GPU of its own. A row that fails is
shown with its reason, and the others go on. A second call measures only what is missing in `--out`.

Routing: grouped products hold the tokens of all experts in one tensor of tokens times experts per token, sorted by
expert, so no size depends on what routers choose; the prediction assumes nothing about it. Its times assume that a
grouped product runs as fast as one product of all its tokens, which random weights come near to: their routers choose
experts almost evenly. Models that loop over their experts are predicted with balanced routing, and are not among these.
"""

import argparse
import fcntl
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from fast_rows import Watch, prediction_of, recipe_of, row, run_row

GIB, MIB = 2**30, 2**20
NUM_STEPS = 6
BUDGET_GIB = 65  # of a row; two rows are on the device at a time
LAYERS = {"num_hidden_layers": 2, "vocab_size": 32000}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **LAYERS,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        **LAYERS,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        **LAYERS,
    },
}
SMALL = {
    "hidden_size": 64,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 96),
    **dict.fromkeys(("num_attention_heads", "num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    "head_dim": 16,
    "vocab_size": 500,
}
LORA = {"kind": "lora", "rank": 8}
LORA_EXPERTS = LORA | {"experts": True}
# Precision and adapter of a row by its words.
KINDS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "bf16": ("bf16", None),
    "bf16, recompute all": ("bf16", None),
    "bf16-pure": ("bf16-pure", None),
    "bf16-pure, recompute all": ("bf16-pure", None),
    "bf16-pure, 2 micro-batches": ("bf16-pure", None),
    "lora with experts": ("bf16", LORA_EXPERTS),
    "lora with experts, recompute all": ("bf16", LORA_EXPERTS),
    "lora": ("bf16", LORA),
}


def _all_rows() -> Iterator[tuple[str, dict[str, Any]]]:
    for kind, (precision, adapter) in KINDS.items():
        for model, config in MODELS.items():
            made = row(config, kind, 4, 2048, "causal-lm", adapter, precision=precision, max_steps=NUM_STEPS)
            yield f"{model}, {kind}", made


ROWS = dict(_all_rows())


def small_step(step: dict[str, Any]) -> dict[str, Any]:
    """The same row with a tiny model and short texts."""
    config = step["config"] | {key: value for key, value in SMALL.items() if key in step["config"]}
    num_micro = step["rows"] // step["memory"]["micro_batch"]
    return step | {
        "config": config,
        "rows": 2 * num_micro,
        "length": 48,
        "memory": step["memory"] | {"micro_batch": 2},
    }


# ---------------------------------------------------------------------- one row, in a process of its own


class _Measured(Exception):
    """Ends a run after its last step: nothing is to be saved."""


class _Steps(Watch):
    """A callback: when each step ended; after the last one, the peaks."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.peaks: dict[str, int] = {}

    def on_step(self, state: Any) -> None:
        import torch

        from trimtab.hardware.memory import peak_memory

        super().on_step(state)
        device = next(state.model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        if state.step == NUM_STEPS:
            self.peaks["allocated" if device.type == "cuda" else "resident"] = peak_memory(device)
            if device.type == "cuda":
                self.peaks["reserved"] = torch.cuda.max_memory_reserved(device)
            raise _Measured


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one process build its model while one takes its steps, until it ends; plans are made in all at once."""
    from trimtab import run
    from trimtab.training.loop import Trainer

    build, fit, held = run.build_trainer, Trainer.fit, {}

    def take(name: str) -> None:
        held[name] = (Path(tempfile.gettempdir()) / f"trimtab-expert-rows.{name}").open("w")
        fcntl.flock(held[name], fcntl.LOCK_EX)

    def build_alone(*args: Any, **options: Any) -> Any:
        take("build")
        return build(*args, **options)

    def fit_alone(self: Trainer) -> Any:
        take("steps")
        held.pop("build").close()
        return fit(self)

    with mock.patch.object(run, "build_trainer", build_alone), mock.patch.object(Trainer, "fit", fit_alone):
        yield


def measure(name: str, is_small: bool) -> dict[str, Any]:
    """Run a row and tell what was predicted and measured."""
    from trimtab import fit

    step = small_step(ROWS[name]) if is_small else ROWS[name]
    steps, began = _Steps(), time.monotonic()
    with tempfile.TemporaryDirectory() as place, _one_at_a_time():
        recipe = recipe_of(step, f"{place}/run", "2GiB" if is_small else f"{BUDGET_GIB}GiB")
        with suppress(_Measured):
            fit(recipe, callbacks=[steps], progress="quiet")
        plan = json.loads(Path(place, "run", "plan.json").read_text())
        lines = [json.loads(line) for line in Path(place, "run", "metrics.jsonl").read_text().splitlines()]
    notes = [line["note"] for line in lines if "note" in line]
    if steps.problem or notes or not steps.peaks:
        return {"name": name, "failure": steps.problem or "; ".join(notes) or "ended before its last step"}
    seconds = [after - before for before, after in zip(steps.ends[1:], steps.ends[2:], strict=False)]
    return {
        "name": name,
        "step": step,
        "losses": [round(line["loss"], 4) for line in lines if "loss" in line],
        "plan": {key: value for key, value in plan.items() if not key.startswith("predicted")},
        "predicted": {"allocated": plan.get("predicted_peak_bytes"), "step_s": plan.get("predicted_step_s")},
        "measured": steps.peaks | {"step_s": statistics.median(seconds)},
        "seconds": round(time.monotonic() - began, 1),
    }


def predicted(name: str) -> dict[str, Any]:
    """What is predicted of a row for an H200, without a GPU, with plain techniques."""
    from trimtab.hardware.catalog import CATALOG
    from trimtab.planner.time import step_seconds
    from trimtab.techniques.apply import method_values

    step = ROWS[name]
    known = {"gradient_checkpointing": step["memory"]["gradient_checkpointing"]}
    known |= method_values(recipe_of(step, "nowhere", None))
    values = {
        "step": step,
        "micro_batch_size": step["memory"]["micro_batch"],
        "precision": step["train"]["precision"],
        "techniques": known,
    }
    began = time.monotonic()
    prediction = prediction_of(values)
    figures = {
        "allocated": prediction.allocated,
        "step_s": step_seconds(prediction.trace.ops, CATALOG["h200"], tf32=False).seconds,
        "parts": dict(prediction.parts),
    }
    return {"name": name, "predicted": figures, "seconds": round(time.monotonic() - began, 1)}


# ---------------------------------------------------------------------- all rows


def table(found: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| row | predicted peak, MiB | measured | difference | predicted step, ms | measured | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        if "failure" in one:
            lines.append(f"| {one['name']} | failed: {one['failure']} | | | | | |")
            continue
        told, seen = one["predicted"], one.get("measured", {})
        cells = [
            *_compared(told["allocated"], seen.get("allocated"), MIB, ".1f"),
            *_compared(told["step_s"], seen.get("step_s"), 1e-3, ".1f"),
        ]
        lines.append(f"| {one['name']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _compared(told: float | None, seen: float | None, unit: float, form: str) -> list[str]:
    cells = ["" if value is None else format(value / unit, "," + form) for value in (told, seen)]
    return [*cells, "" if told is None or seen is None else f"{100 * (told / seen - 1):+.2f}%"]


def _keep(found: dict[str, dict[str, Any]], out: Path | None, around: dict[str, Any]) -> None:
    """Write what is measured so far; those of an earlier call are among it."""
    if out is None:
        return
    rows = [found[name] for name in ROWS if name in found]
    out.mkdir(parents=True, exist_ok=True)
    report = {"machine": around, "rows": rows}
    (out / "rows.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    about = json.dumps(around)
    (out / "table.md").write_text(f"{table(rows)}\n{about}\n", encoding="utf-8")


def _known(out: Path | None) -> dict[str, dict[str, Any]]:
    if out is None or not (out / "rows.json").exists():
        return {}
    rows = json.loads((out / "rows.json").read_text(encoding="utf-8"))["rows"]
    return {one["name"]: one for one in rows if "failure" not in one}


def main() -> None:
    """Run the rows side by side and write those that were measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="folder for rows.json and table.md")
    parser.add_argument("--jobs", type=int, default=8, help="processes side by side")
    parser.add_argument("--only", default="", help="rows with one of these words, with | between them")
    parser.add_argument("--seconds", type=float, default=140, help="the longest that a row may take")
    parser.add_argument("--small", action="store_true", help="tiny models, on any device")
    parser.add_argument("--predict", action="store_true", help="predict for an H200, without a GPU")
    parser.add_argument("--commit", help="the commit to note, where there is no git")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(json.dumps(measure(options.row, options.small)), flush=True)
        os._exit(0)  # the next row waits for this process to end
    if options.small and options.out:
        parser.error("--small measures nothing: leave --out away")
    wanted = [name for name in ROWS if any(word in name for word in options.only.split("|"))]
    if options.predict:
        print(table([predicted(name) for name in wanted]))
        return
    _run_all(wanted, options)


def _run_all(wanted: list[str], options: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch
    from record import machine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    around = machine(device, 1, ("torch", "transformers", "peft", "triton"))
    around |= {"commit": options.commit} if options.commit else {}
    found, began = _known(options.out), time.monotonic()
    wanted = [name for name in wanted if name not in found]
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(run_row, name, options, __file__) for name in wanted]):
            result = done.result()
            found[result["name"]] = result
            print(f"{time.monotonic() - began:5.0f} s  {table([result]).splitlines()[-1]}", flush=True)
            _keep(found, options.out, around)
    print("\n" + table([found[name] for name in ROWS if name in found]))


if __name__ == "__main__":
    main()
