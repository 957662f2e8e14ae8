"""Peaks of training steps in plain transformers code, measured on a GPU: the rows that predictions are held against.

    python benchmarks/planner/plain_rows.py OUT.json [--only TEXT] [--seconds 120]

Each row builds a model from a config, takes four steps and notes what the allocator says. Rows with `cap` may look for
the smallest limit under which the step still runs. What a row says of the step is named as in
`trimtab.planner.trace.plain_step.trace_plain_step`, which predicts the same.
"""

import argparse
import contextlib
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch

MIB = 2**20
BERT = {"model_type": "bert"}
ROBERTA = {"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
DISTILBERT = {"model_type": "distilbert"}
MODERNBERT = {"model_type": "modernbert"}
GPT2 = {"model_type": "gpt2"}
T5 = {
    "model_type": "t5",
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 3072,
    "num_layers": 12,
    "num_heads": 12,
    "decoder_start_token_id": 0,  # the config does not set it, and labels cannot be shifted without
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "sliding_window": 512,
}
HEADS = {
    "bert": "AutoModelForSequenceClassification",
    "roberta": "AutoModelForSequenceClassification",
    "distilbert": "AutoModelForSequenceClassification",
    "modernbert": "AutoModelForSequenceClassification",
    "t5": "AutoModelForSeq2SeqLM",
}


def row(
    config: dict[str, Any], rows: int, length: int, precision: str, implementation: str = "fused", **more: Any
) -> dict[str, Any]:
    """One row. `mask`: none, full or padded. `flash`: False switches the flash kernel off."""
    return {
        "config": config,
        "head": HEADS.get(config["model_type"], "AutoModelForCausalLM"),
        "rows": rows,
        "length": length,
        "precision": precision,
        "optimizer": "adamw",
        "implementation": implementation,
        "gradient_checkpointing": False,
        "mask": "none",
        "target_length": None,
        "flash": True,
        "cap": False,
        **more,
    }


ROWS = [
    row(BERT, 32, 128, "fp32", "foreach", cap=True),
    row(BERT, 32, 128, "bf16", "foreach"),
    row(BERT, 32, 128, "bf16", gradient_checkpointing=True),
    row(BERT, 32, 512, "bf16", cap=True),
    row(BERT, 16, 512, "bf16", mask="padded"),
    row(BERT, 16, 512, "bf16", mask="full"),
    row(BERT, 16, 256, "fp16", cap=True),
    row(BERT, 16, 512, "fp16", flash=False, mask="padded"),
    row(BERT, 16, 512, "fp16", flash=False),
    row(BERT, 16, 128, "fp32", "foreach", optimizer="sgd"),
    row(BERT, 16, 128, "fp32", "foreach", optimizer="adagrad"),
    row(BERT, 16, 128, "tf32", "fused", optimizer="adam", mask="padded"),
    row(ROBERTA, 16, 256, "bf16", mask="padded"),
    row(ROBERTA, 16, 512, "fp32", "foreach", mask="padded", gradient_checkpointing=True),
    row(DISTILBERT, 64, 128, "bf16", mask="padded"),
    row(DISTILBERT, 32, 256, "fp16", flash=False, mask="padded", cap=True),
    row(MODERNBERT, 8, 1024, "bf16", mask="padded", cap=True),
    row(MODERNBERT, 8, 512, "fp32", "foreach"),
    row(GPT2, 4, 1024, "bf16", cap=True),
    row(GPT2, 4, 1024, "fp16", flash=False),
    row(GPT2, 4, 512, "fp32", "foreach", mask="padded"),
    row(GPT2, 8, 1024, "bf16", gradient_checkpointing=True),
    row(QWEN, 2, 1024, "bf16", cap=True),
    row(QWEN, 2, 2048, "bf16", gradient_checkpointing=True),
    row(QWEN, 2, 1024, "fp16", flash=False, mask="padded"),
    row(GEMMA, 2, 1024, "bf16", cap=True),
    row(GEMMA, 2, 1024, "bf16-pure", "foreach", gradient_checkpointing=True, mask="padded"),
    row(T5, 8, 512, "bf16", target_length=128, cap=True),
    row(T5, 8, 256, "fp32", "foreach", target_length=64, mask="padded"),
    row(T5, 8, 512, "bf16", target_length=128, gradient_checkpointing=True, mask="padded"),
    row(LLAMA, 2, 1024, "bf16", cap=True),
    row(LLAMA, 1, 2048, "fp16", flash=False),
    row(LLAMA, 2, 2048, "bf16-pure", "foreach", cap=True),
    row(LLAMA, 2, 2048, "bf16-pure", gradient_checkpointing=True, cap=True),
    row(LLAMA, 4, 1024, "bf16", gradient_checkpointing=True, mask="padded"),
]


def build(spec: dict[str, Any]) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """The model, its optimizer and a batch."""
    import transformers

    values = dict(spec["config"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    kind = getattr(transformers, spec["head"])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if spec["precision"] == "bf16-pure" else torch.float32)
    with torch.device("cuda"):
        model = kind.from_config(config)
    torch.set_default_dtype(torch.float32)
    model.train()
    model.config.use_cache = False
    if spec["gradient_checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kinds = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adagrad": "Adagrad"}
    optimizer = getattr(torch.optim, kinds[spec["optimizer"]])(
        model.parameters(), lr=1e-5, **{spec["implementation"]: True}
    )
    shape = (spec["rows"], spec["length"])
    batch = {"input_ids": torch.randint(10, 5000, shape, device="cuda")}
    if spec["mask"] != "none":
        batch["attention_mask"] = torch.ones(shape, dtype=torch.long, device="cuda")
        if spec["mask"] == "padded":
            batch["attention_mask"][0, -5:] = 0
    name = type(model).__name__
    if "SequenceClassification" in name:
        batch["labels"] = torch.zeros(spec["rows"], dtype=torch.long, device="cuda")
    elif spec["target_length"]:
        batch["labels"] = torch.randint(10, 5000, (spec["rows"], spec["target_length"]), device="cuda")
    else:
        batch["labels"] = batch["input_ids"].clone()
    return model, optimizer, batch


def steps(spec: dict[str, Any], model: Any, optimizer: Any, batch: dict[str, torch.Tensor], count: int) -> list[float]:
    """Train; milliseconds of each step."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(spec["precision"])
    scaler = torch.amp.GradScaler("cuda", enabled=spec["precision"] == "fp16")
    took = []
    for _ in range(count):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", dtype=dtype) if dtype else contextlib.nullcontext():
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        del loss
        torch.cuda.synchronize()
        took.append((time.perf_counter() - began) * 1e3)
    return took


def clear() -> int:
    """Give everything back; what is still allocated."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """What the allocator says of one row."""
    torch.backends.cuda.enable_flash_sdp(spec["flash"])
    torch.backends.cuda.enable_cudnn_sdp(spec["flash"])
    tf32 = spec["precision"] == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    left = clear()
    model, optimizer, batch = build(spec)
    built = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    took = steps(spec, model, optimizer, batch, 4)
    free, total = torch.cuda.mem_get_info()
    found = {
        "left": left,
        "built": built,
        "after": torch.cuda.memory_allocated(),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "outside": total - free - torch.cuda.memory_reserved(),
        "step_ms": round(sorted(took[1:])[1], 2),
    }
    del model, optimizer, batch
    clear()
    return found


def smallest_cap(spec: dict[str, Any], allocated: int) -> dict[str, Any]:
    """The smallest limit, in steps of 16 MiB, under which the step still runs."""
    total = torch.cuda.mem_get_info()[1]
    low, high = allocated // (16 * MIB), int(allocated * 1.08) // (16 * MIB) + 12
    tries = 0
    while low < high:
        middle = (low + high) // 2
        tries += 1
        clear()
        torch.cuda.set_per_process_memory_fraction(middle * 16 * MIB / total)
        fits = runs_under_cap(spec)
        clear()
        low, high = (low, middle) if fits else (middle + 1, high)
    torch.cuda.set_per_process_memory_fraction(1.0)
    return {"needed": high * 16 * MIB, "needed_tries": tries}


def runs_under_cap(spec: dict[str, Any]) -> bool:
    """Whether three steps run under the limit that is set; everything they made is dropped."""
    try:
        steps(spec, *build(spec), 3)
    except torch.OutOfMemoryError:
        return False
    return True


def main() -> None:
    """Measure the rows that were asked for, and write them after each one."""
    import transformers

    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--caps", action="store_true")
    options = parser.parse_args()
    began, results = time.monotonic(), []
    for spec in ROWS:
        if options.only not in json.dumps(spec) or time.monotonic() - began > options.seconds:
            continue
        try:
            found = measure(spec)
            if options.caps and spec["cap"]:
                found |= smallest_cap(spec, found["allocated"])
        except Exception as error:  # a row that fails is a row too
            found = {"failure": f"{type(error).__name__}: {str(error)[:200]}"}
            clear()
        results.append({**spec, "measured": found})
        said = {
            key: round(value / MIB, 1) if key not in ("step_ms", "needed_tries", "failure") else value
            for key, value in found.items()
        }
        print(
            spec["config"]["model_type"],
            spec["rows"],
            spec["length"],
            spec["precision"],
            spec["implementation"],
            said,
            flush=True,
        )
        options.out.write_text(
            json.dumps(
                {
                    "hardware": torch.cuda.get_device_name(),
                    "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                    "rows": results,
                },
                indent=1,
            )
        )
    print(f"{len(results)} rows in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
