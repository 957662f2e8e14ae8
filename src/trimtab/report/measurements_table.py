"""The table that all commands on the size of models print at the end."""

from collections.abc import Sequence

from trimtab.inference.model_measurement import ModelMeasurement
from trimtab.report.tables import Table

_MAIN_METRICS = ("accuracy", "f1", "pearson", "perplexity")  # the first two that a task has


def measurements_table(measurements: Sequence[ModelMeasurement]) -> Table:
    """Return size, memory, latency, throughput, quality and closeness, one row for each model."""
    metrics = [name for name in _MAIN_METRICS if name in measurements[0].quality][:2] or ["loss"]
    header = ["model", "disk MB", "memory MB", "1 row ms", "32 rows ms", "rows/s", *metrics, "KL", "same answer"]
    rows = []
    for one in measurements:
        row = [one.name, "" if one.disk_bytes is None else f"{one.disk_bytes / 1e6:,.1f}"]
        row += [f"{one.memory_bytes / 1e6:,.1f}", f"{one.latency_1_s * 1e3:,.1f}", f"{one.latency_32_s * 1e3:,.1f}"]
        row += [f"{one.rows_per_s:,.0f}", *(f"{one.quality[name]:.4f}" for name in metrics)]
        of = one.divergence
        row += ["", ""] if of is None else [f"{of.kl_mean:.2g}", f"{of.agreement:.2%}"]
        rows.append(row)
    return header, rows
