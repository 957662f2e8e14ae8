"""The model card: a README.md that describes how a model was trained, how good it is and how to load it.

It is a pure function of the facts in `trimtab.json` and of the installed versions. Paths of the machine that trained
the model are reduced to file names: a card is meant to be published.
"""

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from trimtab.addresses import redact
from trimtab.log import printable
from trimtab.model.load import AUTO_CLASSES

CARD = "README.md"
_PACKAGES = {
    "transformers": ("transformers", "torch"),
    "peft": ("peft", "transformers", "torch"),
    "onnx": ("onnxruntime", "onnx", "transformers", "torch"),
    "gguf": ("gguf", "transformers", "torch"),
    "clustered": ("transformers", "torch"),
    "side-network": ("transformers", "torch"),
}
_PIPELINES = {
    "sequence-classification": "text-classification",
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
    "seq2seq-lm": "text2text-generation",
}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FORMS = {
    "exported",
    "quantized",
    "clustered",
    "half_precision",
}  # facts of models that were made from the one that was evaluated
_PRESENT = "returns `logits` and `present.N.key` and `present.N.value`, those of all tokens so far"
_ONNX_CACHE = {  # what the files of models that generate text take and return
    "causal-lm": [
        "`model.onnx` takes `input_ids` (rows, tokens), `attention_mask` (rows, tokens so far), for most models",
        "`position_ids` (rows, tokens), and the keys and values of earlier tokens, `past_key_values.N.key` and",
        f"`past_key_values.N.value` (rows, heads, earlier tokens, size of a head; at first no tokens). It {_PRESENT}.",
    ],
    "seq2seq-lm": [
        "`encoder_model.onnx` takes `input_ids` and `attention_mask` (rows, tokens of the source) and returns",
        "`cross.N.key` and `cross.N.value`, which the decoder reads. `decoder_model.onnx` takes these, `input_ids`",
        "(rows, tokens of the target), the `attention_mask` of the source, and `past_key_values.N.key` and",
        f"`past_key_values.N.value` (rows, heads, earlier tokens, size of a head; at first no tokens). It {_PRESENT}.",
    ],
}
_WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]|\\\\")
_PRIVATE = ("track", "out", "name", "checkpoint", "limits")  # parts of a recipe that do not change the model


@dataclass(frozen=True)
class CardSubject:
    """The subject of a model card.

    Args:
        kind: Kind of the model, as in `load_model`.
        form: "transformers", "peft", "onnx", "gguf", "clustered" or "side-network".
        base: The model that was trained further: a Hub name or a path; None if unknown.
        file: Name of the file with the weights, for forms that are one file.
        notes: Sentences about this export, such as its closeness to the original.
    """

    kind: str
    form: str = "transformers"
    base: str | None = None
    file: str = ""
    notes: tuple[str, ...] = ()


def model_card(facts: Mapping[str, Any], subject: CardSubject) -> str:
    """Return the text of README.md.

    Args:
        facts: The content of `trimtab.json`: task, recipe, data, metrics. All of it is optional.
        subject: The model.
    """
    import yaml

    recipe = facts.get("recipe") if isinstance(facts.get("recipe"), Mapping) else None
    base = subject.base or _base_in(recipe or {})
    header = yaml.safe_dump(_front_matter(subject, base), sort_keys=False, allow_unicode=True)
    title = _plain(_title(facts, base))
    parts = [f"---\n{header}---", f"# {title}", *subject.notes, "## Use", _usage(facts, subject, base)]
    if isinstance(facts.get("metrics"), Mapping) and facts["metrics"]:
        rows = [(_plain(name), _plain(_number(value))) for name, value in sorted(facts["metrics"].items())]
        whose = "Of the original model, on" if _FORMS & facts.keys() else "On"
        at = f" at step {facts['step']:,}" if isinstance(facts.get("step"), int) else ""
        rows_scored = public_text(str(facts.get("scored_on", "the held-out rows")))
        parts += ["## Quality", f"{whose} {rows_scored}{at}:", _table(("metric", "value"), rows)]
    if isinstance(facts.get("data"), Mapping) and facts["data"]:
        sources = [
            (
                _plain(str(part)),
                _plain(public_text(str(of.get("name", "")))),
                f"{of.get('num_rows') or 0:,}",
                f"`{_plain(str(of.get('fingerprint', '')))}`",
            )
            for part, of in facts["data"].items()
            if isinstance(of, Mapping)
        ]
        parts += ["## Data", _table(("used for", "name", "rows", "fingerprint (BLAKE2b)"), sources)]
    if recipe is not None:
        text = yaml.safe_dump(_public_recipe(recipe), sort_keys=False, allow_unicode=True)
        fence = "`" * max([3, *(len(ticks) + 1 for ticks in re.findall("`+", text))])  # a value may contain one
        parts += ["## Recipe", f"{fence}yaml\n{text}{fence}"]
    parts += ["## Versions", _table(("package", "version"), list(_versions(facts, subject.form)))]
    return "\n\n".join(parts) + "\n"


def _plain(text: str) -> str:
    """Return a text, such as a file name, as Markdown that shows it: no HTML, links, code or line breaks."""
    return re.sub(r"([\\`\[\]])", r"\\\1", html.escape(printable(text), quote=False))


def public_text(text: str) -> str:
    """Return a text without what belongs to one machine: the folder of a path, the credentials of a URL."""
    if "://" in text:
        return PurePosixPath(text).name if text.startswith("file:") else redact(text)
    if _WINDOWS_PATH.match(text):
        return _last_part(PureWindowsPath(text).parts)
    if text.startswith(("/", "~", "./", "../")):
        return _last_part(PurePosixPath(text).parts)
    return text


def public_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `trimtab.json` without what belongs to one machine."""
    public = {key: _public(value) for key, value in facts.items() if key != "recipe"}
    return public | ({"recipe": _public_recipe(facts["recipe"])} if isinstance(facts.get("recipe"), Mapping) else {})


def _last_part(parts: Sequence[str]) -> str:
    """Return the name at the end of a path; of the best model of a run, that of the run."""
    return parts[-2] if parts[-1] == "best" and len(parts) > 2 else parts[-1]


def _front_matter(subject: CardSubject, base: str | None) -> dict[str, Any]:
    library = "trimtab" if subject.form in ("clustered", "side-network") else subject.form
    found: dict[str, Any] = {"library_name": library, "pipeline_tag": _PIPELINES[subject.kind]}
    if base is not None and _HUB_NAME.fullmatch(base):  # the Hub accepts only model names on the Hub
        found["base_model"] = base
    return found | {"tags": ["trimtab", *([] if subject.form == "transformers" else [subject.form])]}


def _title(facts: Mapping[str, Any], base: str | None) -> str:
    task = facts.get("task")
    name = "A model" if base is None else public_text(base)
    if task is None:
        return name
    return f"{name}, fine-tuned with trimtab ({task})" if base else f"A model trained with trimtab ({task})"


def _base_in(recipe: Mapping[str, Any]) -> str | None:
    model = recipe.get("model")
    name = model.get("name") if isinstance(model, Mapping) else model
    return name if isinstance(name, str) and name else None


def _public_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe without unset keys and without what belongs to one machine."""
    kept: dict[str, Any] = _public({key: value for key, value in recipe.items() if key not in _PRIVATE})
    return kept


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _public(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_public(inner) for inner in value]
    return public_text(value) if isinstance(value, str) else value


def _usage(facts: Mapping[str, Any], subject: CardSubject, base: str | None) -> str:
    auto, file = AUTO_CLASSES[subject.kind], subject.file
    place = f'"FOLDER/{file}"' if subject.form == "gguf" else '"FOLDER"'
    lines = ["from trimtab import load", "", f"loaded = load({place})  # .model and .tokenizer"]
    if subject.form == "clustered":  # no other library reads this format
        lines += [
            'small = load("FOLDER", decode="on-use")  # decodes one weight at a time: slower, needs less memory',
            "```",
        ]
        return "\n".join(["```python", *lines])
    if subject.form == "onnx" and not file:  # generates text
        lines += ['print(loaded.generate("..."))', "```", "", *_ONNX_CACHE[subject.kind]]
        return "\n".join(["```python", *lines])
    if subject.form == "side-network":
        return "\n".join(["```python", *lines, "```"])
    lines += ["```", ""]
    if subject.form == "onnx":
        lines += ["With onnxruntime alone; inputs are int64 arrays of shape (rows, tokens):", "", "```python"]
        lines += ["import onnxruntime", "from transformers import AutoTokenizer", ""]
        lines += [
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
            f'session = onnxruntime.InferenceSession("FOLDER/{file}")',
        ]
        lines += ["logits = session.run(None, dict(tokenizer(texts, padding=True, return_tensors='np')))[0]"]
    else:
        lines += ["Or with plain Hugging Face libraries:", "", "```python"]
        other = ["from peft import PeftModel"] if subject.form == "peft" else []
        lines += [*other, f"from transformers import {auto}, AutoTokenizer", ""]
        option = f', gguf_file="{file}"' if subject.form == "gguf" else ""
        if subject.form == "peft":
            num_labels = (facts.get("head") or {}).get("num_labels")
            labels = f", num_labels={num_labels}" if num_labels else ""
            name = json.dumps(public_text(base or "BASE"), ensure_ascii=False)
            lines += [f"base = {auto}.from_pretrained({name}{labels})"]
            lines += ['model = PeftModel.from_pretrained(base, "FOLDER")']
        else:
            lines += [f'model = {auto}.from_pretrained("FOLDER"{option})']
        lines += [f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{option})']
    return "\n".join(["```python", *lines, "```"])


def _versions(facts: Mapping[str, Any], form: str) -> Iterator[tuple[str, str]]:
    if "trimtab" in facts:
        yield "trimtab", str(facts["trimtab"])
    for name in _PACKAGES[form]:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
