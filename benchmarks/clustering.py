"""Bits against quality: clustered weights beside round-to-nearest, int8 and nf4, of the same weights of the same model.

    python benchmarks/clustering.py MODEL DATA --calibration ROWS --title TITLE [--bits 2 3 4 6 8] [--save]

Every variant changes the same weights (linear modules and embeddings); sizes count palettes and scales. Round to
nearest has the blocks of the palettes (64 columns of a row, a scale of 8 bits): 2**bits evenly spaced values, the
largest entry of a block is the last of them. "min and max" stores both ends of the grid for 128 weights in fp16. int8
has a scale in fp32 for each row. nf4 has a scale for 64 weights, in fp32, or quantized again ("double"). `--own-texts`
judges a language model on texts that it writes itself. `--save` puts the table of this model into
benchmarks/results/clustering.json and .md, beside those of other models; `benchmarks/pictures.py` draws them.
"""

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from record import keep, machine

from trimtab.compress.block_clustering import cluster_model
from trimtab.compress.block_scales import BlockScales
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.compress.clustering import ClusterSettings, clusterable, storable
from trimtab.compress.palette_training import is_clustered_module, train_palettes, use_clustered
from trimtab.inference.held_out import quality_of, read_held_out
from trimtab.inference.load import load
from trimtab.model.nf4 import Nf4

RESULTS = Path(__file__).parent / "results" / "clustering"
BLOCK = 64
NOTES = """Sizes count palettes and scales; MB is the whole model, with what is not changed in fp32. Palettes are
k-means palettes for groups of rows, with a scale of 8 bits for 64 columns of a row; "calibrated" weights errors by the
inputs and lets later columns compensate; "trained" also trains the palettes to answer as the original does. Calibration
and training rows are other rows than those that judge. One seed: the standard error of an accuracy of 0.87 on 600 rows
is 1.4 points, so differences of a few rows say little, and KL says more.
"""


def round_to_nearest(weight, bits, block=BLOCK):
    """Round to evenly spaced values, with a signed scale of 8 bits for each block of a row; returns values, bits."""
    num_columns, half = weight.shape[1], 2 ** (bits - 1)
    scales = BlockScales.of(weight, block, len(weight))
    unit = weight.abs().max() / 127
    step = scales.factors() * (-unit / half)  # the largest entry becomes -half, the last value of two's complement
    rounded = (weight / torch.where(step == 0, 1.0, step)).round().clamp(-half, half - 1) * step
    return rounded, bits * weight.numel() + len(weight) * math.ceil(num_columns / block) * 8 + 32


def min_and_max(weight, bits, group=128):
    """Round to an even grid between minimum and maximum of each group of consecutive weights; returns values, bits."""
    flat = weight.flatten()
    padded = torch.cat([flat, flat[-1:].expand(-len(flat) % group)]).view(-1, group)
    low, high = (edge.half().float() for edge in (padded.amin(1, keepdim=True), padded.amax(1, keepdim=True)))
    step = ((high - low) / (2**bits - 1)).clamp(min=1e-20)
    rounded = ((padded - low) / step).round().clamp(0, 2**bits - 1) * step + low
    return rounded.flatten()[: len(flat)].view_as(weight), bits * len(flat) + 32 * len(padded)


def int8(weight):
    step = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-20)
    return (weight / step).round() * step, 8 * weight.numel() + 32 * len(weight)


def nf4(weight, double):
    scale_bits = 8 / 64 + 32 / (64 * 256) if double else 32 / 64
    return Nf4(torch.float32, double).rounded(weight), weight.numel() * (4 + scale_bits)


def write_texts(loaded, path, num_texts, seed):
    """Let a model write texts, from the start token alone."""
    lines = []
    for number in range(num_texts):
        torch.manual_seed(seed + number)
        start = torch.tensor([[loaded.tokenizer.bos_token_id]])
        written = loaded.model.generate(start, max_new_tokens=200, do_sample=True, top_k=0, temperature=0.9)
        lines.append(json.dumps({"text": loaded.tokenizer.decode(written[0], skip_special_tokens=True)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


class Bench:
    """One model, the rows it is judged on, and the rows of calibration."""

    def __init__(self, args):
        self.loaded, self.args = load(args.model), args
        model = self.loaded.model
        data, calibration = args.data, args.calibration
        if args.own_texts:
            place = Path(tempfile.mkdtemp())
            data = write_texts(self.loaded, place / "data.jsonl", args.own_texts, 0)
            calibration = write_texts(self.loaded, place / "calibration.jsonl", args.own_texts, 10**6)
        self.held_out = read_held_out(self.loaded, data, num_rows=args.rows)
        self.comparison = self.held_out.compare_with(self.loaded, args.compared_rows)
        self.state = {name: value.clone() for name, value in model.state_dict().items()}
        self.targets = clusterable(model, ClusterSettings())
        self.num_weights = sum(model.get_parameter(name).numel() for name in self.targets)
        self.num_others = sum(parameter.numel() for parameter in model.parameters()) - self.num_weights
        self.rows = {
            num_rows: read_held_out(self.loaded, calibration, num_rows=num_rows)
            for num_rows in (args.calibration_rows if calibration else ())
        }
        self.results = []

    def record(self, name, total_bits, started):
        quality = quality_of(self.loaded, self.held_out)
        found = {"name": name, "loss": quality["loss"], "bits": total_bits / self.num_weights}
        found |= {"mb": (total_bits / 8 + 4 * self.num_others) / 1e6, "cpu_s": time.process_time() - started}
        if self.held_out.task.loss_kind == "cross-entropy":
            found["accuracy"] = quality["accuracy"]
        if self.results:
            divergence = self.comparison.compare(self.loaded.model)
            found |= {"kl": divergence.kl_mean, "same": divergence.agreement}
        self.results.append(found)
        print(found, flush=True)

    @torch.no_grad()
    def rounded(self, name, rounding):
        """Judge a rounding of single weights."""
        started, total = time.process_time(), 0
        self.loaded.model.load_state_dict(self.state)
        for target in self.targets:
            parameter = self.loaded.model.get_parameter(target)
            values, bits = rounding(parameter.detach())
            parameter.copy_(values)
            total += bits
        self.record(name, total, started)

    def clustered(self, name, settings, rows=None, num_steps=()):
        """Judge palettes; afterwards, also with palettes that were trained for numbers of steps."""
        started = time.process_time()
        model = self.loaded.model
        model.load_state_dict(self.state)
        batches = [batch for _, batch in rows.batches(8)] if rows else []
        found = dict(cluster_model(model, settings, batches))
        weights = {target: found[target] for target in found if isinstance(found[target], ClusteredWeight)}
        total_bits = sum(8 * weight.num_bytes for weight in weights.values())
        self.record(name, total_bits, started)
        for steps in num_steps:
            self.loaded = load(self.args.model)
            use_clustered(self.loaded.model, weights)
            teacher, task, tokens = load(self.args.model).model, rows.task, rows.tokens
            train_palettes(self.loaded.model, teacher, tokens, task.collate, kind=task.loss_kind, num_steps=steps)
            for module in filter(is_clustered_module, self.loaded.model.modules()):
                module.palettes.data = storable(module.palettes.data, settings.palette_dtype).float()
            of_steps = f" for {steps} steps" if len(num_steps) > 1 else ""
            self.record(f"{name}, trained{of_steps}", total_bits, started)
            self.loaded = load(self.args.model)

    def run(self):
        """Judge all variants; yields after each number of bits."""
        self.record("original", 32 * self.num_weights, time.process_time())
        for bits in self.args.bits:
            self.clustered(f"{bits} bits: palettes", ClusterSettings(bits=bits))
            for num_rows, rows in self.rows.items() if bits in self.args.calibrated_bits else ():
                settings = ClusterSettings(bits=bits, importance="activations", compensate=True)
                num_steps = [steps for steps in self.args.train_steps if steps and bits in self.args.trained_bits]
                of_rows = f" on {num_rows:,} rows" if len(self.rows) > 1 else ""
                self.clustered(f"{bits} bits: palettes, calibrated{of_rows}", settings, rows, num_steps)
            self.rounded(f"{bits} bits: round to nearest", lambda weight, bits=bits: round_to_nearest(weight, bits))
            self.rounded(f"{bits} bits: round, min and max", lambda weight, bits=bits: min_and_max(weight, bits))
            if bits == 4:
                self.rounded("nf4, double", lambda weight: nf4(weight, True))
                self.rounded("nf4", lambda weight: nf4(weight, False))
            if bits == 8:
                self.rounded("int8", int8)
            yield bits


def table(results):
    """Return the table of a model, the largest variant first."""
    results = sorted(results, key=lambda found: -found["bits"])
    is_classifier = "accuracy" in results[0]
    quality = "accuracy" if is_classifier else "perplexity"
    lines = [
        f"| weights | bits a weight | MB | {quality} | change | KL | same answer |",
        "|---|---|---|---|---|---|---|",
    ]
    value_of = (lambda row: row["accuracy"]) if is_classifier else (lambda row: math.exp(row["loss"]))
    for found in results:
        value = value_of(found)
        row = [found["name"], f"{found['bits']:.2f}", f"{found['mb']:.2f}"]
        row += [f"{value:.4f}" if is_classifier else f"{value:.3f}", f"{value - value_of(results[0]):+.4f}"]
        row += [f"{found['kl']:.5f}", f"{found['same']:.2%}"] if "kl" in found else ["", ""]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def save(title, about, results, where, path=RESULTS):
    """Put the results of a model into the file, in the place of older ones of the same title."""
    file = path.with_suffix(".json")
    models = json.loads(file.read_text()).get("models", {}) if file.is_file() else {}
    models[title] = {"about": about, "machine": where, "results": results}
    parts = [f"## {name}\n\n{model['about']}\n\n{table(model['results'])}" for name, model in models.items()]
    text = "\n".join([NOTES, *parts])
    keep({"models": models}, text, "Clustered weights beside other forms of the same size", path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("data", nargs="?", help="labelled rows to judge on")
    parser.add_argument("--calibration", help="rows for importance, compensation and training; not those of DATA")
    parser.add_argument("--own-texts", type=int, default=0, help="texts that the model writes, to judge and calibrate")
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--calibrated-bits", type=int, nargs="*", default=[2, 3, 4, 6, 8])
    parser.add_argument("--trained-bits", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--rows", type=int, default=None, help="rows to judge on")
    parser.add_argument("--compared-rows", type=int, default=600)
    parser.add_argument("--calibration-rows", type=int, nargs="+", default=[256], help="each number is a variant")
    parser.add_argument("--train-steps", type=int, nargs="+", default=[60], help="each number is a variant")
    parser.add_argument("--title", default="a model")
    parser.add_argument("--about", default="", help="a sentence for the table")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/clustering.json and .md")
    args = parser.parse_args()
    if not args.data and not args.own_texts:
        parser.error("name DATA, or --own-texts 48")
    bench = Bench(args)
    where = machine(str(bench.loaded.device), torch.get_num_threads(), ["torch", "transformers", "bitsandbytes"])
    for _ in bench.run():
        if args.save:
            save(args.title, args.about, bench.results, where)
    print(table(bench.results))


if __name__ == "__main__":
    main()
