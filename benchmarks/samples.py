"""Time and memory of the samples at the end of a run, on a GPU: one Llama with random weights, saved to a folder.

Use: python benchmarks/samples.py 1b lora --budget 8GiB
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab import Recipe, fit
from trimtab.build import samples
from trimtab.hardware.memory import memory_in_use, non_allocator_memory
from trimtab.model.tokenizer import train_tokenizer
from trimtab.units import format_bytes

SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
WORDS = ("the", "film", "was", "a", "very", "long", "story", "about", "this", "cast", "and", "why", "it", "ends")
ROWS = [{"text": " ".join(WORDS[(7 * row + 3 * word) % len(WORDS)] for word in range(300))} for row in range(64)]


def make_model(size: str, folder: Path) -> str:
    """Save a model with random weights in bf16; the same folder serves several runs."""
    if not folder.exists():
        config = AutoConfig.for_model("llama", **SHAPES[size], **HEADS)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        train_tokenizer([row["text"] for row in ROWS], 400).save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("adapter", choices=["none", "lora", "qlora"])
    parser.add_argument("--budget", default=None)
    parser.add_argument("--models", default="/tmp/models")
    asked = parser.parse_args()
    model = make_model(asked.size, Path(asked.models) / asked.size)
    found: dict[str, object] = {"model": asked.size, "adapter": asked.adapter, "budget": asked.budget}
    generate = samples.generate_samples

    def watched(best, request):  # type: ignore[no-untyped-def]
        torch.cuda.reset_peak_memory_stats()
        found["left of training"] = format_bytes(memory_in_use(request.device))
        began = time.perf_counter()
        made = generate(best, request)
        found["samples"], found["seconds"] = len(made["rows"]), round(time.perf_counter() - began, 1)
        found["peak with context"] = format_bytes(
            torch.cuda.max_memory_reserved() + non_allocator_memory(request.device)
        )
        return made

    samples.generate_samples = watched
    with tempfile.TemporaryDirectory() as out:
        recipe = Recipe(
            model=model,
            task="causal-lm",
            data={"train": ROWS, "eval_share": 0.2},
            adapter=asked.adapter,
            train={"max_steps": 4, "batch_size": 4, "precision": "bf16-pure" if asked.adapter == "none" else "bf16"},
            memory={"budget": asked.budget},
            checkpoint={"every": None},
            out=str(Path(out) / "run"),
        )
        result = fit(recipe, progress="quiet")
        found["peak of training"] = format_bytes(result.fit.peak_memory_bytes)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
