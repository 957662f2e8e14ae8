"""Bits against quality: clustered weights beside plain rounding and nf4, of the same weights of the same model.

    python benchmarks/clustering.py MODEL DATA --calibration ROWS [--bits 2 3 4 6 8] [--train-steps 100] [--save NAME]

Every variant changes the same weights (linear modules and embeddings); sizes count palettes and scales. Plain rounding
maps the minimum and maximum of a group to the ends of an even grid, and stores both in fp16: once for each group that
shares a palette without scales, once for groups of 128 weights, where they cost the same quarter of a bit as scales
for 64 weights. nf4 has a scale for 64 weights, in fp32, or quantized again ("double").
"""

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from record import machine, publish

from trimtab.compress.block_clustering import cluster_model
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.compress.clustering import PER, ClusterSettings, clusterable
from trimtab.compress.palette_training import train_palettes, use_clustered
from trimtab.compress.palettes import rows_of_group
from trimtab.inference.held_out import quality_of, read_held_out
from trimtab.inference.load import load
from trimtab.model.losses import build_loss
from trimtab.model.nf4 import Nf4

RESULTS = Path(__file__).parent / "results"
BLOCK = 128  # weights of a group of plain rounding at the size of palettes


def plain_rounding(weight, bits, group):
    """Round to an even grid between minimum and maximum of each group of consecutive weights; returns values, bits."""
    flat = weight.flatten()
    padded = torch.cat([flat, flat[-1:].expand(-len(flat) % group)]).view(-1, group)
    low, high = (edge.half().float() for edge in (padded.amin(1, keepdim=True), padded.amax(1, keepdim=True)))
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-20)
    rounded = ((padded - low) / step).round().clamp(0, 2**bits - 1) * step + low
    return rounded.flatten()[: len(flat)].view_as(weight), bits * len(flat) + 32 * len(padded)


def nf4_rounding(weight, double):
    scale_bits = 8 / 64 + 32 / (64 * 256) if double else 32 / 64
    return Nf4(torch.float32, double).rounded(weight), weight.numel() * (4 + scale_bits)


class Bench:
    """One model, the rows it is judged on, and the rows of calibration."""

    def __init__(self, args):
        self.loaded, self.args = load(args.model), args
        model = self.loaded.model
        self.held_out = read_held_out(self.loaded, args.data, num_rows=args.rows)
        self.comparison = self.held_out.compare_with(self.loaded, args.compared_rows)
        self.state = {name: value.clone() for name, value in model.state_dict().items()}
        self.targets = clusterable(model, ClusterSettings())
        self.num_weights = sum(model.get_parameter(name).numel() for name in self.targets)
        self.calibration = args.calibration and read_held_out(
            self.loaded, args.calibration, num_rows=args.calibration_rows
        )
        self.results = []

    def reset(self):
        self.loaded = load(self.args.model)

    def record(self, name, total_bits, started):
        divergence = self.comparison.compare(self.loaded.model) if total_bits else None
        quality = quality_of(self.loaded, self.held_out)
        metric = next(name for name in ("accuracy", "loss") if name in quality and self.metric_is(name))
        found = {"name": name, metric: quality[metric], "loss": quality["loss"], "cpu_s": time.process_time() - started}
        if divergence is not None:
            found |= {"bits": total_bits / self.num_weights, "kl": divergence.kl_mean, "same": divergence.agreement}
        self.results.append(found)
        print(found, flush=True)

    def metric_is(self, name):
        return (name == "accuracy") == (self.held_out.task.loss_kind == "cross-entropy")

    @torch.no_grad()
    def rounded(self, name, rounding):
        """Judge a rounding of single weights."""
        if not self.is_wanted(name):
            return
        started, total = time.process_time(), 0
        self.loaded.model.load_state_dict(self.state)
        for target in self.targets:
            parameter = self.loaded.model.get_parameter(target)
            values, bits = rounding(parameter.detach())
            parameter.copy_(values)
            total += bits
        self.record(name, total, started)

    def is_wanted(self, name):
        return not self.args.only or name in self.args.only

    def clustered(self, name, settings, train_steps=0):
        if not self.is_wanted(name):
            return
        started = time.process_time()
        model = self.loaded.model
        model.load_state_dict(self.state)
        rows, batches, loss_of = self.calibration, [], None
        if settings.needs_calibration:
            batches = [batch for _, batch in rows.batches(8)]
            loss = build_loss(rows.task.loss_kind, shifts_labels=rows.task.shifts_labels)
            loss_of = lambda model, batch: loss(model, batch).value  # noqa: E731
        found = dict(cluster_model(model, settings, batches, loss_of))
        weights = {target: found[target] for target in found if isinstance(found[target], ClusteredWeight)}
        if train_steps:
            use_clustered(model, weights)
            examples = [rows.tokens[row] for row in range(len(rows))]
            order = torch.Generator().manual_seed(0)
            loader = torch.utils.data.DataLoader(
                examples, 16, shuffle=True, collate_fn=rows.task.collate, generator=order
            )
            train_palettes(model, load(self.args.model).model, loader, kind=rows.task.loss_kind, num_steps=train_steps)
            for module in model.modules():
                if hasattr(module, "palettes"):
                    module.palettes.data = module.palettes.data.half().float()  # as they are stored
        self.record(name, sum(8 * weight.num_bytes for weight in weights.values()), started)
        if train_steps:
            self.reset()

    def run(self):
        self.record("original, 32 bits", 0, time.process_time())
        for bits in self.args.bits:
            for per in self.args.per:
                self.clustered(f"{bits} bits, palette per {per}", ClusterSettings(bits=bits, per=per))
                settings = ClusterSettings(bits=bits, per=per, scale_block=0)
                self.clustered(f"{bits} bits, palette per {per}, no scales", settings)
                rows = lambda weight, per=per: rows_of_group(weight.shape, bits, per) * weight.shape[1]  # noqa: E731, B023
                self.rounded(
                    f"{bits} bits, plain per {per}",
                    lambda weight, rows=rows: plain_rounding(weight, bits, rows(weight)),  # noqa: B023
                )
            settings = ClusterSettings(bits=bits, per="tensor", scale_block=BLOCK)
            self.clustered(f"{bits} bits, palette per tensor, scales of {BLOCK}", settings)
            self.rounded(f"{bits} bits, plain per {BLOCK}", lambda weight: plain_rounding(weight, bits, BLOCK))  # noqa: B023
            if bits == 4:
                self.rounded("nf4", lambda weight: nf4_rounding(weight, False))
                self.rounded("nf4, double", lambda weight: nf4_rounding(weight, True))
            if self.calibration and bits in self.args.calibrated_bits:
                for importance in self.args.importance:
                    settings = ClusterSettings(bits=bits, importance=importance)
                    self.clustered(f"{bits} bits, per rows, {importance}", settings)
                settings = ClusterSettings(bits=bits, importance="activations", compensate=True)
                self.clustered(f"{bits} bits, per rows, compensated", settings)
                if self.args.train_steps:
                    name = f"{bits} bits, per rows, compensated, trained palettes"
                    self.clustered(name, settings, self.args.train_steps)
        return self.results


def table(results):
    metric = "accuracy" if "accuracy" in results[0] else "loss"
    lines = [f"| weights | bits a weight | {metric} | change | KL | same answer |", "|---|---|---|---|---|---|"]
    for found in results:
        change = found[metric] - results[0][metric]
        row = [found["name"], f"{found.get('bits', 32):.2f}", f"{found[metric]:.4f}", f"{change:+.4f}"]
        row += [f"{found['kl']:.5f}", f"{found['same']:.2%}"] if "kl" in found else ["", ""]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data", help="labelled rows to judge on")
    parser.add_argument("--calibration", help="rows for importance, compensation and training; not those of DATA")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--per", nargs="+", choices=PER, default=list(PER))
    parser.add_argument("--importance", nargs="*", default=["activations", "gradients"])
    parser.add_argument("--calibrated-bits", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--rows", type=int, default=None, help="rows to judge on")
    parser.add_argument("--compared-rows", type=int, default=256)
    parser.add_argument("--calibration-rows", type=int, default=256)
    parser.add_argument("--train-steps", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="names of the only variants to measure")
    parser.add_argument("--save", help="name of the files in benchmarks/results")
    args = parser.parse_args()
    bench = Bench(args)
    results = bench.run()
    where = machine(str(bench.loaded.device), torch.get_num_threads(), ["torch", "transformers", "bitsandbytes"])
    path = RESULTS / (args.save or "clustering")
    publish({"machine": where, "results": results}, table(results), "Clustered weights", path, bool(args.save))


if __name__ == "__main__":
    main()
