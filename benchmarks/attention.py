"""Attention backends compared on a GPU through `fit`: rows of many lengths (as movie reviews have them) and of one.

Every variant is trained for some steps in a fresh process, repeats interleaved; tokens are counted without padding.

    python benchmarks/attention.py --out benchmarks/results/attention-h200.json
"""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Lengths in tokens: log-normal, cut; their mean is 262, that of IMDb in tokens of BERT cut at 512.
MEDIAN, SIGMA, LONGEST = 230, 0.72, 512
NUM_WORDS = 1000
BERT = {"model_type": "bert", "vocab_size": NUM_WORDS + 10}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
JOBS: dict[str, dict[str, Any]] = {
    "bert, many lengths": {"config": BERT, "task": "classify", "batch_size": 32, "lengths": None, "steps": 150},
    "bert, 512 tokens": {"config": BERT, "task": "classify", "batch_size": 32, "lengths": 512, "steps": 60},
    "llama 1B lora, 4 x 2048": {
        "config": LLAMA,
        "task": "causal-lm",
        "batch_size": 4,
        "lengths": 2048,
        "steps": 24,
        "adapter": "lora",
    },
}
RAW = "plain loop without cuDNN"  # autocast, fused AdamW, clipping; the same batches, ready in pinned memory
VARIANTS = ("auto", "torch", "cudnn", "flash", "efficient", RAW)


def lengths_of(job: dict[str, Any], num_rows: int) -> list[int]:
    if job["lengths"] is not None:
        return [job["lengths"]] * num_rows
    draw = random.Random(0)
    return [max(8, min(LONGEST, round(draw.lognormvariate(math.log(MEDIAN), SIGMA)))) for _ in range(num_rows)]


def write_tokenizer(folder: Path) -> None:
    """One token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(NUM_WORDS))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    special |= {"mask_token": "[MASK]", "eos_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(BERT))


def write_rows(path: Path, job: dict[str, Any]) -> None:
    draw = random.Random(1)
    rows = []
    for length in lengths_of(job, job["batch_size"] * job["steps"]):
        text = " ".join(f"w{draw.randrange(NUM_WORDS)}" for _ in range(length))
        rows.append({"text": text, "label": draw.randrange(2)} if job["task"] == "classify" else {"text": text})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def raw_loop(job: dict[str, Any]) -> float:
    """Tokens per second of a BERT in a plain loop: what the host can launch."""
    import time

    import torch
    from transformers import BertConfig, BertForSequenceClassification

    from trimtab.data.batching import LengthGroupedBatches

    config = BertConfig(**{key: value for key, value in job["config"].items() if key != "model_type"})
    model = BertForSequenceClassification(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    lengths = lengths_of(job, job["batch_size"] * job["steps"])
    windows = LengthGroupedBatches(lengths, job["batch_size"], job["batch_size"], seed=0).windows()
    batches = []
    for rows in (micro for window in windows for micro in window):
        ids = torch.randint(5, NUM_WORDS, (len(rows), max(lengths[row] for row in rows)))
        mask = torch.stack([(torch.arange(ids.shape[1]) < lengths[row]).long() for row in rows])
        labels = torch.randint(0, 2, (len(rows),))
        batches.append([tensor.pin_memory() for tensor in (ids, mask, labels)] + [sum(lengths[row] for row in rows)])
    began, num_tokens, first = 0.0, 0, job["steps"] // 3
    for number, (*tensors, count) in enumerate(batches):
        if number == first:
            torch.cuda.synchronize()
            began, num_tokens = time.perf_counter(), 0
        ids, mask, labels = (tensor.cuda(non_blocking=True) for tensor in tensors)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        num_tokens += count
    torch.cuda.synchronize()
    return num_tokens / (time.perf_counter() - began)


def child(name: str, variant: str, place: Path) -> None:
    import torch

    if variant == RAW:
        print(json.dumps({"job": name, "variant": variant, "tokens_per_s": round(raw_loop(JOBS[name]))}))
        return

    from trimtab import Recipe, fit

    job = JOBS[name]
    recipe = Recipe.model_validate(
        {
            "model": {"config": job["config"], "tokenizer": str(place / "tokenizer")},
            "task": job["task"],
            "data": {"train": str(place / f"{name}.jsonl"), "eval_share": 0, "max_length": job["lengths"] or LONGEST},
            "train": {"batch_size": job["batch_size"], "max_steps": job["steps"], "log_every": 10, "precision": "bf16"},
            "adapter": job.get("adapter", "none"),
            "memory": {"attention_backend": variant},
            "checkpoint": {"every": None, "best": False},
            "track": "none",
            "out": str(place / f"run-{name}-{variant}-{random.randrange(10**9)}"),
        }
    )
    result = fit(recipe, progress="quiet")
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()][1:]
    speeds = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line and line["step"] > job["steps"] // 3]
    plan = result.plan.as_dict()
    print(
        json.dumps(
            {
                "job": name,
                "variant": variant,
                "chosen": plan["attention_backend"],
                "micro_batch": plan["micro_batch_size"],
                "tokens_per_s": round(statistics.median(speeds)),
                "peak_bytes": result.fit.peak_memory_bytes,
                "predicted_peak_bytes": plan["predicted_peak_bytes"],
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
            }
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--jobs", nargs="*", default=list(JOBS))
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.child:
        name, variant, place = args.child
        return child(name, variant, Path(place))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_tokenizer(place / "tokenizer")
        for name in args.jobs:
            write_rows(place / f"{name}.jsonl", JOBS[name])
        for _ in range(args.repeats):
            for name in args.jobs:
                for variant in args.variants:
                    command = [sys.executable, __file__, "--child", name, variant, folder]
                    done = subprocess.run(command, capture_output=True, text=True, check=False)
                    if done.returncode:
                        print(f"{name}, {variant}: {done.stderr[-800:]}", flush=True)
                        continue
                    found.append(json.loads(done.stdout.splitlines()[-1]))
                    print(json.dumps(found[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"runs": found}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
