"""Predicted against measured: every row of tests/planner/golden, traced without a GPU, beside what the GPU said.

    python benchmarks/planner/accuracy.py [--save]

Rows of `h200-plain.json` are steps of plain transformers code (plain_rows.py), those of `h200-own.json` steps of
trimtab (`trimtab compare` with the recipes of benchmarks/memory), those of `h200-fast.json` packed, compiled, captured
and fp8 steps of trimtab (fast_rows.py; the file may be absent), those of `h200-design.json` older ones, plain again.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "planner" / "golden"
RESULT = ROOT / "benchmarks" / "results" / "planner-accuracy"
MIB, GIB = 2**20, 2**30
OF_A_PLAIN_STEP = (
    *("config", "head", "rows", "length", "precision", "optimizer", "implementation"),
    *("gradient_checkpointing", "mask", "target_length"),
)
CAUSAL_LM = SimpleNamespace(
    loss_kind="token-cross-entropy", shifts_labels=True, model_kind="causal-lm", head=dict, name="causal-lm"
)
# Rows that are further off than `MOST_ABOVE` or `MOST_BELOW`: by how much, and why.
KNOWN: dict[str, tuple[float, str]] = {
    "fast bert, graphs": (
        -0.075,
        "attention with a mask in compiled blocks keeps 50 MiB more per block, cause not found",
    ),
}
NOT_PREDICTED = {"own 1B, ladder: loss liger": "it runs liger-kernel itself, which is an extra"}
MOST_ABOVE, MOST_BELOW = 0.02, 0.01
OF_TRIMTAB = ("h200-own", "h200-fast")


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        file: Which of the golden files it is from.
        name: What was run; no two rows have the same.
        family: The kind of model.
        values: As the file has it.
    """

    file: str
    name: str
    family: str
    values: dict[str, Any] = field(hash=False)

    @property
    def measured(self) -> dict[str, Any]:
        return self.values["measured"]


def golden_rows() -> list[Row]:
    """All rows of all files."""
    found = []
    for file in ("h200-design", "h200-plain", "h200-own", "h200-fast"):
        path = GOLDEN / f"{file}.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        found += [Row(file, *_name_and_family(file, values), values) for values in rows]
    return found


def _name_and_family(file: str, values: dict[str, Any]) -> tuple[str, str]:
    if "step" in values:
        return f"fast {values['name']}", values["step"]["config"]["model_type"]
    if "recipe" in values:
        return _own_name(values), "llama"
    return _plain_name(file, values), values["config"]["model_type"].removesuffix("_text")


def _own_name(values: dict[str, Any]) -> str:
    size = values["recipe"].removeprefix("llama-").removesuffix(".yaml").upper()
    return f"own {size}, {values['table']}: {values['name']}"


def _plain_name(file: str, values: dict[str, Any]) -> str:
    config = values["config"]
    size = {2048: " 1B", 4096: " 8B"}.get(config.get("hidden_size"), "")
    words = [
        f"{file.removeprefix('h200-')} {config['model_type'].removesuffix('_text')}{size}",
        f"{values['rows']}×{values['length']}" + (f"→{values['target_length']}" if values["target_length"] else ""),
        values["precision"],
        f"{values['optimizer']} {values['implementation']}",
        *(["recompute all"] if values["gradient_checkpointing"] else []),
        *([f"{values['mask']} mask"] if values["mask"] != "none" else []),
        *([] if values["flash"] else ["no flash"]),
    ]
    return ", ".join(words)


@dataclass(frozen=True)
class Outcome:
    """What is predicted of a row, in bytes; see `trimtab.planner.memory.Prediction`. The trace is let go of."""

    allocated: int
    parts: dict[str, int]
    stage: str
    reserved: int | None = None  # this and what follows: where the allocator was replayed
    reserved_default: int | None = None  # without expandable segments
    needed: int | None = None
    step_s: float | None = None  # on an H200 whose host is as fast as it was; where that was measured


def _chunks_as_measured() -> Any:
    """The chunked loss without kernels, as it was when the rows were measured."""
    return mock.patch("trimtab.model.linear_cross_entropy.kernels_of_chunks", return_value=None)


class Predictor:
    """Traces rows; what several rows share is made once."""

    def __init__(self) -> None:
        self._tracers: dict[tuple[str, ...], Any] = {}
        self._outcomes: dict[str, Outcome] = {}

    def predict(self, row: Row, with_replay: bool = False) -> Outcome:
        """Predict a row, and what the allocator makes of it if asked.

        Raises:
            trimtab.errors.MissingDependency: The row needs a package that is not installed.
        """
        from trimtab.planner.allocator import replay
        from trimtab.planner.memory import predict

        same = self.step_of(row)
        found = self._outcomes.get(same)
        if found is None or (with_replay and found.needed is None):
            with _chunks_as_measured():
                prediction = _fast_prediction(row.values) if "step" in row.values else predict(self._trace(row))
            trace = prediction.trace
            found = Outcome(
                prediction.allocated, dict(prediction.parts), prediction.stage, step_s=_seconds(row, trace.ops)
            )
            if with_replay:
                again = replay(trace.events)
                found = replace(
                    found,
                    reserved=again.reserved_peak,
                    reserved_default=again.reserved_peak_fixed,
                    needed=again.needed,
                )
            self._outcomes[same] = found
        return found

    def step_of(self, row: Row) -> str:
        """The same for rows that measured the same step."""
        same = json.dumps({key: value for key, value in row.values.items() if key not in _NOT_OF_THE_STEP})
        return hashlib.sha256(same.encode()).hexdigest()[:12]

    def _trace(self, row: Row) -> Any:
        from trimtab.planner.trace.cuda import Gpu
        from trimtab.planner.trace.plain_step import trace_plain_step

        gpu = Gpu(flash=row.values["flash"])
        if "recipe" in row.values:
            return self._own(row.values, gpu)
        options = {key: row.values[key] for key in OF_A_PLAIN_STEP}
        return trace_plain_step(recomputes=options.pop("gradient_checkpointing"), **options, gpu=gpu)

    def _own(self, values: dict[str, Any], gpu: Any) -> Any:
        from trimtab.planner.shapes import BatchShape
        from trimtab.planner.trace import recipe_step as tracing
        from trimtab.recipe.load import load_recipe
        from trimtab.techniques.apply import method_values, plain_spec
        from trimtab.techniques.base import as_text

        changes = [f"{key}={json.dumps(value)}" for key, value in values["changes"].items()]
        path = ROOT / "benchmarks" / "memory" / values["recipe"]
        recipe = load_recipe(path, {}, ["data.train=text.jsonl", *changes]).recipe
        key = (values["recipe"], str(recipe.adapter), str(values["flash"]))
        if key not in self._tracers:
            self._tracers[key] = tracing.StepTracer(recipe, CAUSAL_LM, gpu)
        keys = ("optimizer", "loss", "kernels", "gradient_checkpointing", "offload")
        techniques = {key: as_text(values[key]) for key in keys} | method_values(recipe)
        spec = plain_spec(values["micro_batch_size"], values["precision"], **techniques)
        shape = BatchShape(values["micro_batch_size"], values["length"], values["is_padded"])
        num_micro = -(-values["batch_size"] // values["micro_batch_size"])
        with _as_measured(tracing, values):
            return self._tracers[key].trace(spec, shape, num_micro)


def _fast_prediction(values: dict[str, Any]) -> Any:
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        from fast_rows import prediction_of
    finally:
        del sys.path[0]
    return prediction_of(values)


def _seconds(row: Row, ops: Any) -> float | None:
    from trimtab.hardware.catalog import CATALOG
    from trimtab.planner.time import step_seconds

    host_op_s = row.measured.get("host_op_s")
    if host_op_s is None:
        return None
    device = replace(CATALOG["h200"], host_op_s=host_op_s)
    return step_seconds(ops, device, tf32=row.values["precision"] == "tf32").seconds


def order(pairs: list[tuple[float, float]]) -> float:
    """Kendall's τ: how far two measures agree on which of two is larger, over all pairs."""
    signs = [
        (one[0] > other[0]) - (one[0] < other[0]) == (one[1] > other[1]) - (one[1] < other[1])
        for one, other in itertools.combinations(pairs, 2)
    ]
    return 2 * sum(signs) / len(signs) - 1


_NOT_OF_THE_STEP = ("measured", "predicted", "commit", "name", "table", "cap", "changes")


@contextlib.contextmanager
def _as_measured(tracing: Any, values: dict[str, Any]) -> Iterator[None]:
    """Inside, steps are those of the trimtab that was measured: a row says where it was another than today's."""
    from trimtab.techniques import attention_backend

    make_loss, take_step, held = tracing.make_loss, tracing.take_step, []

    def make_holding_loss(*args: Any, **kwargs: Any) -> Any:
        loss = make_loss(*args, **kwargs)

        def hold(model: Any, batch: Any) -> Any:
            step = loss(model, batch)
            if step.value.requires_grad:
                held[:] = [step]
            return step

        return hold

    def take_and_let_go(*args: Any) -> None:
        take_step(*args)
        held.clear()

    with contextlib.ExitStack() as stack:
        if not values["repeats_heads"]:  # of grouped attention, where the flash kernel does not run
            stack.enter_context(mock.patch.object(attention_backend, "has_grouped_heads", return_value=False))
        if values["holds_logits"]:  # while the optimizer steps
            stack.enter_context(mock.patch.object(tracing, "make_loss", make_holding_loss))
            stack.enter_context(mock.patch.object(tracing, "take_step", take_and_let_go))
        yield


# ---------------------------------------------------------------------- the table and the picture


def compare(rows: list[Row]) -> list[dict[str, Any]]:
    """Predict every row; one that cannot be predicted says why."""
    from trimtab.errors import MissingDependency

    predictor, found = Predictor(), []
    for row in rows:
        said: dict[str, Any] = {"row": row.name, "file": row.file, "family": row.family, "measured": row.measured}
        began = time.process_time()
        try:
            outcome = predictor.predict(row, with_replay=True)
        except MissingDependency as error:
            found.append(said | {"not_predicted": str(error).splitlines()[0]})
            continue
        said |= {
            "step": predictor.step_of(row),
            "predicted": asdict(outcome),
            "cpu_s": round(time.process_time() - began, 2),
        }
        if "allocated" in row.measured:
            said["error"] = outcome.allocated / row.measured["allocated"] - 1
        found.append(said)
        print(f"{row.name}: {100 * said.get('error', 0):+.2f}%", file=sys.stderr, flush=True)
    return found


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors of the allocated peak by kind of model, and of all."""
    groups: dict[str, list[float]] = {}
    for said in found:
        if "error" in said:
            kind = f"{said['family']}, {'trimtab' if said['file'] in OF_TRIMTAB else 'plain transformers'}"
            for name in (kind, "all"):
                groups.setdefault(name, []).append(said["error"])
    everything = groups.pop("all")
    return [
        {
            "rows": name,
            "count": len(errors),
            "median": statistics.median(map(abs, errors)),
            "within 0.1%": sum(abs(error) <= 0.001 for error in errors),
            "lowest": min(errors),
            "highest": max(errors),
        }
        for name, errors in [*groups.items(), ("all", everything)]
    ]


def num_steps(found: list[dict[str, Any]]) -> int:
    """How many different steps were measured."""
    return len({said["step"] for said in found if "error" in said})


def described(found: list[dict[str, Any]]) -> str:
    """The tables in Markdown."""
    lines = ["| rows | count | median of abs. error | within 0.1% | lowest | highest |", "|---|---|---|---|---|---|"]
    for one in summary(found):
        lines.append(
            f"| {one['rows']} | {one['count']} | {100 * one['median']:.3f}% | {one['within 0.1%']} | "
            f"{100 * one['lowest']:+.2f}% | {100 * one['highest']:+.2f}% |"
        )
    lines += [
        "",
        "MiB. Reserved is what the allocator takes where memory is plentiful. It is predicted for expandable segments; "
        "`plain` and `design` rows were measured with them, of `own` and `fast` rows that was not noted, and theirs is "
        "the peak of a whole run.",
        "",
        "| row | measured peak | predicted | error | measured reserved | predicted | error | peak in |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for said in found:
        if "error" not in said:
            continue
        measured, predicted = said["measured"], said["predicted"]
        reserved = predicted["reserved"] / measured["reserved"] - 1
        lines.append(
            f"| {said['row']} | {measured['allocated'] / MIB:,.1f} | {predicted['allocated'] / MIB:,.1f} | "
            f"{100 * said['error']:+.2f}% | {measured['reserved'] / MIB:,.0f} | {predicted['reserved'] / MIB:,.0f} | "
            f"{100 * reserved:+.1f}% | {predicted['stage']} |"
        )
    lines += ["", *(f"- {name}: {100 * figure:+.2f}%, because {why}." for name, (figure, why) in KNOWN.items())]
    missing = [said for said in found if "not_predicted" in said]
    lines += [f"- {said['row']}: not predicted, because {said['not_predicted']}." for said in missing]
    lines += ["", *_needed(found), "", *_times(found), "", *_cpu(found)]
    return "\n".join(lines) + "\n"


def _needed(found: list[dict[str, Any]]) -> list[str]:
    lines = [
        "The smallest limit under which a step runs (expandable segments), MiB; those of `plain` rows were sought in "
        "steps of 16 MiB, those of `design` rows in steps of half a percent of the peak and more:",
        "",
        "| row | measured | predicted | error |",
        "|---|---|---|---|",
    ]
    for said in found:
        limit = measured_limit(said)
        if limit is not None:
            needed = said["predicted"]["needed"]
            lines.append(
                f"| {said['row']} | {limit / MIB:,.0f} | {needed / MIB:,.0f} | {100 * (needed / limit - 1):+.2f}% |"
            )
    return lines


def measured_limit(said: dict[str, Any]) -> float | None:
    """The smallest limit under which a step ran, where that was sought: in bytes, or as a multiple of the peak."""
    measured = said["measured"]
    if "needed" in measured:
        return float(measured["needed"])
    peak = measured.get("allocated", said.get("predicted", {}).get("allocated"))
    return float(measured["needed_ratio"] * peak) if "needed_ratio" in measured else None


def _times(found: list[dict[str, Any]]) -> list[str]:
    timed = [said for said in found if said.get("predicted", {}).get("step_s") is not None]
    lines = [
        "Seconds of a step of trimtab, where the speed of the host was measured beside it:",
        "",
        "| row | measured ms | predicted ms | error |",
        "|---|---|---|---|",
    ]
    for said in timed:
        measured, predicted = said["measured"]["step_s"], said["predicted"]["step_s"]
        off = f"{100 * (predicted / measured - 1):+.0f}%"
        lines.append(f"| {said['row']} | {1e3 * measured:.1f} | {1e3 * predicted:.1f} | {off} |")
    for name, of_it in (("1 × 2048", lambda row: "ladder" in row), ("4 × 2048", lambda row: "4 x" in row)):
        pairs = [(said["measured"]["step_s"], said["predicted"]["step_s"]) for said in timed if of_it(said["row"])]
        close = sum(abs(predicted / measured - 1) <= 0.25 for measured, predicted in pairs)
        lines += ["", f"{name}: Kendall's τ {order(pairs):.2f}; {close} of {len(pairs)} within 25%."]
    return lines


def _cpu(found: list[dict[str, Any]]) -> list[str]:
    """Rows that were traced already, as part of another, took no time and are left out."""
    took = sorted(said["cpu_s"] for said in found if said.get("cpu_s", 0) > 0.05)
    return [
        f"CPU seconds of a prediction, on one core: {statistics.median(took):.1f} (median), {took[0]:.1f} to "
        f"{took[-1]:.1f}, the first with the import of transformers; that is the trace, the replays of the allocator "
        f"and the search for the smallest limit. {len(took)} predictions took {sum(took):.0f} s. The machine was "
        "shared with other programs.",
    ]


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Predicted over measured, and the error under it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [said for said in found if "error" in said]
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(7.5, 8), sharex=True, height_ratios=(3, 1.2), layout="constrained"
    )
    families = sorted({said["family"] for said in shown})
    colours = dict(zip(families, pyplot.get_cmap("tab10").colors, strict=False))
    for family in families:
        for is_own, marker in ((False, "o"), (True, "^")):
            some = [said for said in shown if said["family"] == family and (said["file"] in OF_TRIMTAB) is is_own]
            if not some:
                continue
            x = [said["measured"]["allocated"] / GIB for said in some]
            whose = "trimtab's step" if is_own else "plain transformers"
            style = {"marker": marker, "color": colours[family], "alpha": 0.75, "s": 36, "linewidths": 0}
            above.scatter(
                x, [said["predicted"]["allocated"] / GIB for said in some], label=f"{family}, {whose}", **style
            )
            below.scatter(x, [100 * said["error"] for said in some], **style)
    ends = [0.8 * min(said["measured"]["allocated"] for said in shown) / GIB, 180]
    above.plot(ends, ends, color="0.6", linewidth=1, zorder=0)
    above.set(xscale="log", yscale="log", ylabel="predicted without a GPU, GiB")
    above.set_title(f"Allocated peak of a training step: {len(shown)} measurements on H200s")
    above.legend(frameon=False)
    below.axhspan(-1, 2, color="0.93", zorder=0)
    below.axhline(0, color="0.6", linewidth=1, zorder=0)
    below.set(xlabel="measured on the GPU, GiB", ylabel="error, %")
    ticks = (1, 2, 4, 8, 16, 32, 64, 128)
    for axis in (above.xaxis, above.yaxis, below.xaxis):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from record import machine, publish

    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    found = compare(golden_rows())
    around = machine("cpu", 1, ("torch", "transformers", "peft"))
    report = {"surroundings": around, "summary": summary(found), "rows": found}
    head = [*(f"- predicted on: {key}: {value}" for key, value in around.items())]
    head.append("- measured on: NVIDIA H200, torch 2.11.0, transformers 5.17.0")
    head.append(f"- {sum('error' in said for said in found)} measurements of {num_steps(found)} different steps")
    text = "\n".join(head) + "\n\n" + described(found)
    publish(report, text, "Predicted and measured memory of training steps", RESULT.with_suffix(".md"), options.save)
    if options.save:
        plot(found, RESULT.with_suffix(".png"))


if __name__ == "__main__":
    main()
