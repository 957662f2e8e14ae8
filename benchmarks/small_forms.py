"""Every smaller form of one trained model on the same rows: size, CPU time, quality, closeness to the original.

    python benchmarks/small_forms.py RUN ROWS --work FOLDER [--only int8 onnx] [--save small-forms]

RUN is a run or a folder of a classifier, ROWS are labelled rows that it was not trained on. Forms are written by
trimtab's own commands into FOLDER, and are loaded from there; palettes are calibrated with training rows if RUN is a
run whose training rows still exist. Two forms of other packages stand beside them and are made in memory: torch's own
dynamic quantization of linear modules, and nf4 as transformers rounds it when it loads a model.

Times are medians of the CPU time of a forward pass on one thread. All models take turns, so that other work on the
machine meets all of them. Rows of these passes are copies of the row of median length.
"""

import argparse
import os
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from cpu_time import example_inputs, interleaved
from record import machine, publish
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

from trimtab.checkpoint.export import export_model
from trimtab.commands.export import export
from trimtab.commands.quantize import quantize
from trimtab.commands.shrink import forms_of
from trimtab.inference.held_out import quality_of, read_held_out
from trimtab.inference.load import load
from trimtab.inference.model_measurement import memory_bytes, weight_bytes
from trimtab.log import muted
from trimtab.model.load import resolve_source

RESULTS = Path(__file__).parent / "results"
CPU = torch.device("cpu")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # loaded in the dtype of their files
PACKAGES = ["torch", "transformers", "torchao", "bitsandbytes", "onnxruntime"]


def write_bf16(source, folder):
    loaded = load(source, device=CPU, dtype=torch.bfloat16)
    export_model(folder, loaded.model, loaded.tokenizer, card={**loaded.facts, "task": loaded.task_name})


def written_forms(original, source, held_out):
    """What writes each form, by name."""
    few = held_out.rows.select(list(range(min(8, len(held_out.rows)))))
    forms = {"bf16": partial(write_bf16, source), **forms_of(original, source, held_out, CPU)}
    forms |= {name: partial(quantize, source, to=(name,), data=few, device=CPU) for name in ("fp8", "bnb-int8")}
    return forms | {"onnx": partial(export, source, to="onnx")}


def torch_dynamic(source):
    """torch's own dynamic quantization: int8 weights, activations quantized for every product."""
    model = load(source, device=CPU).model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def transformers_nf4(source):
    """nf4 of every linear module but the head, each weight rounded alone."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["classifier"],
    )
    return AutoModelForSequenceClassification.from_pretrained(
        source, quantization_config=settings, dtype=torch.float32, device_map="cpu"
    ).eval()


IN_MEMORY = {"torch's own dynamic int8": torch_dynamic, "nf4 by transformers": transformers_nf4}


class Forms:
    """The forms of one model that could be made, and why others could not."""

    def __init__(self, args):
        self.source = resolve_source(args.model, adapters=False)
        self.original = load(self.source, device=CPU)
        self.held_out = read_held_out(self.original, args.rows, num_rows=args.num_rows)
        self.args = args
        self.models = {"original": self.original}
        self.folders = {"original": Path(self.source)}
        self.failed = {}

    def make(self):
        for name, write in written_forms(self.original, self.source, self.held_out).items():
            self._try(name, partial(self._from_folder, name, write))
        for name, build in IN_MEMORY.items():
            self._try(name, lambda build=build: replace(self.original, model=build(self.source)))

    def _try(self, name, load_form):
        if self.args.only and name not in self.args.only:
            return
        print(name, flush=True)
        try:
            with muted():
                loaded = load_form()
            with torch.inference_mode():
                loaded.model.eval()(**example_inputs(self.held_out, 1))
        except Exception as error:  # of any type: other packages write and run these forms
            self.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"{name}: {self.failed[name]}", flush=True)
        else:
            self.models[name] = loaded

    def _from_folder(self, name, write):
        folder = self.folders[name] = self.args.work / name
        if not folder.exists():
            write(folder)
        return load(folder, device=CPU, **({"dtype": HALF[name]} if name in HALF else {}))

    def measure(self):
        """Measurements of each form, by name."""
        comparison = self.held_out.compare_with(self.original, self.args.compared_rows)
        models = {name: loaded.model for name, loaded in self.models.items()}
        times = {
            num_rows: interleaved(models, example_inputs(self.held_out, num_rows), repeats)
            for num_rows, repeats in ((1, self.args.repeats), (32, max(3, self.args.repeats // 4)))
        }
        found = {}
        for name, loaded in self.models.items():
            folder = self.folders.get(name)
            apart = comparison.compare(loaded.model)
            found[name] = {
                "disk_mb": None if folder is None else weight_bytes(folder) / 1e6,
                "memory_mb": None if name == "torch's own dynamic int8" else memory_bytes(loaded.model) / 1e6,
                "ms_1": times[1][name] * 1e3,
                "ms_32": times[32][name] * 1e3,
                "accuracy": quality_of(loaded, self.held_out)["accuracy"],
                "kl": apart.kl_mean,
                "same": apart.agreement,
            }
        return found


def table(found):
    lines = ["| form | disk MB | memory MB | 1 row ms | 32 rows ms | accuracy | KL | same answer |", "|---" * 8 + "|"]
    for name, one in found.items():
        sizes = ["" if one[key] is None else f"{one[key]:.1f}" for key in ("disk_mb", "memory_mb")]
        apart = ["", ""] if name == "original" else [f"{one['kl']:.1e}", f"{one['same']:.2%}"]
        cells = [name, *sizes, f"{one['ms_1']:.1f}", f"{one['ms_32']:.0f}", f"{one['accuracy']:.4f}", *apart]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def text_of(report):
    where = report["machine"]
    lines = [
        f"{report['model']}, a classifier with {report['parameters'] / 1e6:.1f} M parameters, on {report['rows']} rows "
        f"that it was not trained on; KL and equal answers on {report['compared_rows']} of them. Times are medians of "
        f"the CPU time of a forward pass on one thread, of all forms in turns, with rows of {report['tokens']} tokens. "
        "`benchmarks/small_forms.py` makes this table.",
        table(report["forms"]),
        "Forms without a size on disk are made in memory by the package that is named. Palettes (cluster) are decoded "
        "once, when the model is loaded. torch hides the packed weights of its own dynamic quantization, so that their "
        "memory is not counted.",
        *(f"{name} failed: {reason}" for name, reason in report["failed"].items()),
        f"{where['hardware']}; {where['versions']}; commit {where['commit']}.",
    ]
    return "\n\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="run or folder of a classifier")
    parser.add_argument("rows", help="labelled rows that it was not trained on")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for the forms; those that exist are used again"
    )
    parser.add_argument("--name", help="name of the model in the text")
    parser.add_argument("--only", nargs="+", help="names of the only forms to make")
    parser.add_argument("--num-rows", type=int, help="number of rows to judge on; all by default")
    parser.add_argument("--compared-rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=60, help="forward passes of one row that are timed")
    parser.add_argument("--save", help="name of the files in benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    where = machine("cpu", 1, PACKAGES)
    forms = Forms(args)
    forms.make()
    report = {
        "machine": where,
        "model": args.name or Path(args.model).name,
        "parameters": forms.original.model.num_parameters(),
        "rows": len(forms.held_out),
        "compared_rows": min(args.compared_rows, len(forms.held_out)),
        "tokens": example_inputs(forms.held_out, 1)["input_ids"].shape[1],
        "forms": forms.measure(),
        "failed": forms.failed,
    }
    path = RESULTS / (args.save or "small-forms")
    publish(report, text_of(report), "Forms of one model: size, time and quality", path, bool(args.save))


if __name__ == "__main__":
    main()
