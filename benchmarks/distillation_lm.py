"""Half of a language model's layers, trained for a few minutes with and without the whole model as its teacher.

    python benchmarks/distillation_lm.py --model FOLDER --train VALID.txt --test TEST.txt --work work --out lm.json
    python benchmarks/distillation.py --summary lm.json --save

FOLDER is a causal language model, or a .gguf file of one, whose weights are then stored as fp32. Texts are paragraphs,
one in a line; titles ("= Name =") and short lines are left out. Both students start from the same layers and see the
same blocks of text in the same order.
"""

import argparse
import dataclasses
import json
import math
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from cpu_time import example_inputs, interleaved
from distillation import write_rows
from record import machine
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimtab import Recipe, fit
from trimtab.compress.layer_cut import cut_layers
from trimtab.inference.held_out import quality_of, read_held_out
from trimtab.inference.load import load


def from_gguf(file, folder):
    """Write the model of a .gguf file as a plain folder."""
    names = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    stored = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
    config = stored.config
    if hasattr(config, "quantization_config"):  # the weights are not quantized any more
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(stored.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**names).save_pretrained(folder)
    return folder


def paragraphs(file, path, num_rows=None):
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    texts = [{"text": line} for line in lines if len(line) > 100 and not line.startswith("=")]
    return write_rows(texts[:num_rows], path)


def cut(model, folder):
    """Write the student that both kinds start from; returns the number of layers of the teacher."""
    loaded = load(model, device="cpu")
    num_layers = loaded.model.config.num_hidden_layers
    cut_layers(loaded.model, "half")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return num_layers


def train(start, rows, folder, args, distill):
    result = fit(
        Recipe(
            model=str(start),
            task="causal-lm",
            data={"train": rows, "eval_share": 0, "max_length": args.max_length},
            train={"max_steps": args.steps, "lr": args.lr, "batch_size": args.batch_size, "warmup": "6%"},
            checkpoint={"best": False, "every": None},
            distill=distill,
            track="none",
            seed=args.seed,
            out=str(folder),
        ),
        progress="plain",
        device=args.device,
        fresh=True,
    )
    return result.best


def read_model(folder, args, device):
    """Load a model to judge on plain text in blocks, of the same length for all."""
    loaded = load(folder, device=device)
    return dataclasses.replace(loaded, task_name="causal-lm", facts={"max_length": args.max_length})


def judge(folder, args, test):
    """The perplexity of a model, and the number of tokens that it had to predict."""
    loaded = read_model(folder, args, args.device)
    held_out = read_held_out(loaded, test, text="text")
    num_tokens = sum(length - 1 for length in held_out.tokens.lengths)
    return math.exp(quality_of(loaded, held_out, batch_size=8)["loss"]), num_tokens


def speed(teacher, student, args, test):
    loaded = {name: read_model(folder, args, "cpu") for name, folder in (("teacher", teacher), ("student", student))}
    held_out = read_held_out(loaded["teacher"], test, text="text", num_rows=20)
    models = {name: each.model.eval() for name, each in loaded.items()}
    seconds = interleaved(models, example_inputs(held_out, 1), 10)
    return seconds["teacher"] / seconds["student"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a causal language model, or a .gguf file")
    parser.add_argument("--name", help="its name in the table")
    parser.add_argument("--train", type=Path, required=True, help="text to train on")
    parser.add_argument("--test", type=Path, required=True, help="text to judge on")
    parser.add_argument("--test-rows", type=int, default=150, help="number of test paragraphs")
    parser.add_argument("--out", type=Path, required=True, help="file for the numbers")
    parser.add_argument("--work", type=Path, required=True, help="folder for runs, which are replaced")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--hidden", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="where to train; found by default")
    args = parser.parse_args()
    args.name = args.name or args.model.stem
    # names alone: the folders of a machine say nothing
    settings = {name: value.name if isinstance(value, Path) else value for name, value in vars(args).items()}
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    report = {"machine": machine(device, torch.get_num_threads(), ["torch", "transformers"]), "settings": settings}
    rows, test = paragraphs(args.train, args.work / "train.jsonl"), args.work / "test.jsonl"
    test = paragraphs(args.test, test, args.test_rows)
    teacher = from_gguf(args.model, args.work / "teacher") if args.model.suffix == ".gguf" else args.model
    start = args.work / "start"
    report["num_layers"] = cut(str(teacher), start)
    found = report["perplexity"] = {}
    found["original"], report["num_tokens"] = judge(teacher, args, test)
    found["half its layers, not trained"], _ = judge(start, args, test)
    terms = {"alpha": args.alpha, "temperature": args.temperature, "hidden": args.hidden}
    for kind, distill in (("text only", None), ("teacher and text", {"teacher": str(teacher), **terms})):
        student = train(start, rows, args.work / "student", args, distill)
        found[f"half, trained, {kind}"], _ = judge(student, args, test)
        print(found, flush=True)
    report["speed"] = speed(teacher, student, args, test)
    args.out.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
