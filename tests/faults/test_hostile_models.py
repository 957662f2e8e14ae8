"""Hostile model folders: damaged and foreign files end in a message, never in a traceback, a hang or full memory."""

import functools
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from hostile_input import Call, damage_bytes, damage_json, run_all, write_json

from tiny_models import TEXTS
from tiny_runs import write_jsonl
from trimtab.errors import UserError
from trimtab.inference.load import load
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model, load_tokenizer

SEED = int(os.environ.get("TRIMTAB_FUZZ_SEED", "0"))
COUNT = int(os.environ.get("TRIMTAB_FUZZ_COUNT", "60"))


@pytest.fixture(scope="module")
def bases(tiny, tmp_path_factory, fork_server):
    """A folder of each stored form of a model."""
    root = tmp_path_factory.mktemp("bases")
    head = {"num_labels": 2, "id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    found = {
        "classifier": tiny.folder("bert", kind="sequence-classification", head=head),
        "decoder": tiny.folder("llama"),
        "chat": tiny.folder("gpt2", chat=True),
        "seq2seq": tiny.folder("t5"),
    }
    _add_adapter(Path(found["decoder"]), root / "adapter")
    _add_gguf(Path(found["decoder"]), root / "gguf")
    found |= {"adapter": str(root / "adapter"), "gguf": str(root / "gguf")}
    for name, words in {
        "quantized": ["quantize", found["decoder"], root / "quantized", "--to", "int8", "--rows", "0"],
        "clustered": ["cluster", found["decoder"], root / "clustered", "--rows", "0"],
        "onnx": ["export", found["classifier"], root / "onnx", "--to", "onnx"],
    }.items():
        child = fork_server.start_command(*map(str, words))
        assert child.wait() == 0, child.err
        found[name] = str(root / name)
    return found


def _add_adapter(base: Path, folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    with quiet_transformers():
        tokenizer = load_tokenizer(str(base))
        model = load_model(str(base), "causal-lm", {}, tokenizer)
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _add_gguf(base: Path, folder: Path) -> None:
    from tiny_gguf import write_gguf

    folder.mkdir()
    write_gguf(folder / "model.gguf", load_model(str(base), "causal-lm", {}, None))


def damaged(base: Path, folder: Path, draw: random.Random) -> str:
    """Copy a model with one damaged file; return what was done to it."""
    shutil.copytree(base, folder)
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    if path.suffix == ".json" and draw.random() < 0.8:
        value = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, damage_json(value, draw))
    else:
        path.write_bytes(damage_bytes(path.read_bytes(), draw))
    return f"{base.name}/{path.name}"


def command(kind: str, folder: Path, data: Path, draw: random.Random) -> list[str]:
    labels = {"classifier": "reviews.csv", "onnx": "reviews.csv"}
    rows = str(data / labels.get(kind, "texts.jsonl"))
    out = str(folder.parent / "out")
    short = ["--max-new-tokens", "4"]
    commands = [["predict", str(folder), "--text", "the cat", *short]] * 5
    commands.append(["predict", str(folder), rows, "--out", f"{out}.jsonl", *short])
    commands.append(["evaluate", str(folder), rows])
    commands.append(["train", "--model", str(folder), "--data", rows, "--max-steps", "1", "--out", f"{out}-run"])
    commands.append(["quantize", str(folder), out, "--rows", "0"])
    commands.append(["export", str(folder), out, "--to", "merged"])
    return draw.choice(commands)


@pytest.mark.slow
def test_damaged_models_end_in_messages(bases, fork_server, tmp_path):
    draw = random.Random(SEED)
    (tmp_path / "reviews.csv").write_text("text,label\n" + "a fine film,good\na dull film,bad\n" * 8)
    write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS * 4])

    def calls():
        for number in range(COUNT):
            folder = tmp_path / str(number) / "model"
            kind = draw.choice(list(bases))
            name = f"{number} {kind}: {damaged(Path(bases[kind]), folder, draw)}"
            yield Call(name, command(kind, folder, tmp_path, draw))

    assert run_all(fork_server, calls()) == COUNT


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ '%1000000000d'|format(1) }}",
        "{% set n = namespace(s='x') %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    ],
)
def test_endless_templates_end(tiny, fork_server, tmp_path, template):
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder("gpt2", chat=True), folder)
    (folder / "chat_template.jinja").write_text(template)
    turns = [{"role": "user", "content": "the film"}, {"role": "assistant", "content": "was long"}]
    write_jsonl(tmp_path / "chat.jsonl", [{"messages": turns}] * 8)
    write_json(tmp_path / "recipe.yaml", {"model": str(folder), "data": {"train": str(tmp_path / "chat.jsonl")}})
    calls = [
        ["predict", str(folder), "--text", "the cat", "--max-new-tokens", "4"],
        ["data", "show", str(tmp_path / "recipe.yaml")],
    ]

    def says_why(call):
        return None if "the chat template needs more than" in call.child.err else call.child.err

    assert run_all(fork_server, (Call(words[0], words) for words in calls), says_why) == 2


REGEX = {"type": "Split", "behavior": "Isolated", "invert": False}
TO_1000 = {"type": "Replace", "pattern": {"String": "w"}, "content": "w" * 1000}
NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (
            "tokenizer.json",
            {"post_processor": {"type": "New"}},
            "untagged enum(.|\n)*upgrade tokenizers",
        ),
        ("tokenizer.json", {"pre_tokenizer": REGEX | {"pattern": {"Regex": "[a"}}}, "tokenizer of .*Oniguruma"),
        (
            "tokenizer.json",
            {"pre_tokenizer": REGEX | {"pattern": {"Regex": "(x+x+)+y"}}},
            "used: PanicExc.*limit",
        ),
        ("tokenizer.json", {"model.vocab.the": 4_000_000_000}, "a token with the id 4,000,000,000, and 328 tokens"),
        (
            "tokenizer.json",
            {"normalizer": {"type": "Sequence", "normalizers": [TO_1000] * 3}},
            "makes 1,000,000,000",
        ),
        ("tokenizer_config.json", {"pad_token": "\ud800"}, "tokenizer of .*surrogates"),
        ("tokenizer.json", NESTED, r"tokenizer\.json is damaged: maximum recursion"),
        ("config.json", {"hidden_size": "32"}, r"config\.json of .*'hidden_size'.*expected int, got str"),
        ("config.json", {"rms_norm_eps": "nan"}, r"config\.json of .*'rms_norm_eps'"),
        ("config.json", {"num_hidden_layers": 10**9}, "describes 1,000,000,000 layers"),
        ("config.json", {"hidden_size": 10**6}, "describes 1,000,.* parameters or more .*weights have .* bytes"),
        ("model.safetensors.index.json", {"weight_map": {"x": "../../x"}}, r"names the file '\.\./\.\./x'"),
        ("generation_config.json", {"num_beams": 10**6}, "sets num_beams: 1,000,000"),
        ("generation_config.json", {"eos_token_id": "x"}, "cannot be used: TypeError"),
        ("generation_config.json", {"cache_implementation": "x"}, "cannot be loaded: Invalid `cache_impl"),
        ("trimtab.json", {"recipe": [1]}, r"trimtab\.json cannot be read: recipe is \[1\]"),
    ],
)
def test_a_hostile_file_is_named(tiny, tmp_path, name, changes, problem):
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder("llama"), folder)
    path = folder / name
    if isinstance(changes, str):
        path.write_text(changes)
    else:
        value = json.loads(path.read_text()) if path.exists() else {}
        for key, new in changes.items():
            *outer, last = key.split(".")
            functools.reduce(dict.__getitem__, outer, value)[last] = new
        write_json(path, value)
    with pytest.raises(UserError, match=problem):
        load(folder).generate("x" * 60, 4)
