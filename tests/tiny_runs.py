"""Parts of runs that take less than a second: tiny models in folders, and rows that can be learned."""

import csv
import json
import random
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from tiny_models import config_of
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model, train_tokenizer
from trimtab.runs.journal import VOLATILE_KEYS

GOOD = ("good", "great", "fine", "lovely")
BAD = ("bad", "awful", "dull", "poor")
OTHERS = ("the", "film", "was", "a", "very", "long", "story", "about", "this", "cast")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NO_DROPOUT = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
_ONE_LAYER = {
    **dict.fromkeys(("bert", "roberta", "llama"), {"num_hidden_layers": 1}),
    "gpt2": {"n_layer": 1},
}
_DISTILBERT = {"model_type": "distilbert", "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 48}
_KINDS = {
    **dict.fromkeys(("bert", "roberta", "distilbert"), "masked-lm"),
    **dict.fromkeys(("gpt2", "llama"), "causal-lm"),
    **dict.fromkeys(("t5", "marian"), "seq2seq-lm"),
}


def review(index: int) -> dict[str, str]:
    """A row whose label follows from one of its words; lengths differ."""
    draw = random.Random(index)
    label, words = ("good", GOOD) if index % 2 else ("bad", BAD)
    text = draw.choices(OTHERS, k=draw.randint(1, 8))
    text.insert(draw.randint(0, len(text)), draw.choice(words))
    return {"text": " ".join(text), "label": label}


def reviews(num_rows: int, first: int = 0) -> list[dict[str, str]]:
    return [review(index) for index in range(first, first + num_rows)]


def write_csv(path: Path, rows: list[dict]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def lines_of(run: Path) -> list[dict]:
    """The journal of a run, without its first line, which is the config."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()][1:]


def reproducible_lines(run: Path, *left_out: str) -> list[dict]:
    """The journal of a run, without values that differ each time, and without some keys."""
    return [{k: v for k, v in line.items() if k not in {*VOLATILE_KEYS, *left_out}} for line in lines_of(run)]


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in the safetensors files of a folder, which has some."""
    found = {f"{path.name}:{name}": t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    assert found
    return found


@cache
def tokenizer():
    """Each word of the reviews is one token."""
    return train_tokenizer([" ".join(row.values()) for row in reviews(200)], 340)


def tiny_config(name: str, **changes) -> dict:
    base = _DISTILBERT | {"max_position_embeddings": 64} if name == "distilbert" else config_of(name)
    return base | _ONE_LAYER.get(name, {}) | changes


class TinyModels:
    """Builds each model once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, str] = {}

    def folder(self, name: str = "bert", *, kind: str = "", chat: bool = False, head: dict | None = None, **changes):
        """A folder with a model and its tokenizer.

        Args:
            name: The family.
            kind: Kind of the model; by default what it is pretrained for, and a classification head is new.
            chat: Whether the tokenizer has a chat template.
            head: Settings of the head.
            changes: To its config.
        """
        key = json.dumps([name, kind, chat, head, changes], sort_keys=True)
        if key not in self._folders:
            folder = self._root / f"{name}-{len(self._folders)}"
            tok = tokenizer()
            tok.chat_template = CHAT_TEMPLATE if chat else None
            with torch.random.fork_rng():  # the same weights whichever test asks first
                torch.manual_seed(0)
                model = load_model(tiny_config(name, **changes), kind or _KINDS[name], head or {}, tok)
            with quiet_transformers():
                model.save_pretrained(folder)
                tok.save_pretrained(folder)
            self._folders[key] = str(folder)
        return self._folders[key]


class Watch:
    """Records the weights after each step, in host memory."""

    def __init__(self):
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step(self, state):
        state_dict = state.model.state_dict()
        self.weights.append({name: value.to("cpu", copy=True) for name, value in state_dict.items()})


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
