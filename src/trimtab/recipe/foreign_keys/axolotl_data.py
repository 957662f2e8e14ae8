"""The datasets of an Axolotl config: where the rows are, and which columns mean what.

Axolotl takes a list of datasets, each with a type that names columns and a prompt format. A recipe has one source of
rows; its task names the columns, and the chat template of the tokenizer formats conversations.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from trimtab.recipe.foreign_keys.answers import Answer, is_on, left_out, written
from trimtab.recipe.foreign_keys.axolotl import chat_template

# Types with an instruction, an input and an answer: the column of the answer. The other two are found by their names.
_INSTRUCTIONS = {"alpaca": "output", "alpaca_chat": "output", "gpteacher": "response", "alpaca_w_system": "output"}
# Keys of messages and roles that are supported without changes.
_READ = {"role": {"role", "from"}, "content": {"content", "value"}}
_ROLES = {
    "user": {"user", "human"},
    "assistant": {"assistant", "gpt", "model", "bot", "chatbot"},
    "system": {"system"},
    "tool": {"tool"},
}
_FILE_TYPES = {"json", "jsonl", "csv", "tsv", "parquet", "text", "txt", "arrow"}
_REMOTE = ("s3://", "gs://", "gcs://", "adl://", "abfs://", "oci://", "http://", "https://")
_ONE = "a recipe has one source of rows: join the files, or write them as one glob such as data/*.jsonl"
_NO_TYPE = "the task is found from the columns; `trimtab data show` prints it"


def dataset_answers(name: str, value: Any) -> Iterator[tuple[str, Any, Answer]]:
    """Yield every key of a list of datasets with its value and its answer.

    Args:
        name: datasets, pretraining_dataset or test_datasets.
        value: Its value: a list of mappings, a mapping, or the name of a dataset.
    """
    entries = value if isinstance(value, list) else [value]
    entries = [entry if isinstance(entry, Mapping) else {"path": entry} for entry in entries]
    if not entries:
        yield name, value, left_out("it is empty", is_lost=True)
        return
    first = dict(entries[0])
    if name == "pretraining_dataset":
        first.setdefault("type", "pretrain")
    is_test = name == "test_datasets"
    yield f"{name}.0.path", first.get("path"), _source("data.eval" if is_test else "data.train", first)
    files, split = first.get("data_files"), first.get("split")
    if isinstance(files, list) and files[1:] and first.get("path") in _FILE_TYPES:
        yield f"{name}.0.data_files", files[1:], left_out(_ONE, is_lost=True)
    if split not in (None, "", "train") and (files or _is_file(str(first.get("path")))):
        yield f"{name}.0.split", split, left_out("slice the file: data.train: 'FILE[:10%]'", is_lost=True)
    for key in sorted(map(str, first.keys() - {"path", "name", "split", "data_files"})):
        answer = left_out("the columns are those of datasets") if is_test else _answer(key, first)
        yield f"{name}.0.{key}", first.get(key), answer
    for number, entry in enumerate(entries[1:], start=1):
        yield f"{name}.{number}", entry.get("path"), left_out(_ONE, is_lost=True)


def _source(ours: str, entry: Mapping[str, Any]) -> Answer:
    path, files, split = entry.get("path"), entry.get("data_files"), entry.get("split")
    if not isinstance(path, str) or not path:
        return left_out(f"a dataset needs a path, found {path!r}", is_lost=True)
    if path.startswith(_REMOTE):
        return left_out(f"download it, and write the file as {ours}", is_lost=True)
    files = files if isinstance(files, list) else [files] if files else []
    if files and path in _FILE_TYPES:
        return written({ours: files[0]})
    if files:
        return left_out(f"download {', '.join(map(str, files))} of {path}, and write it as {ours}", is_lost=True)
    source = f"{path}/{entry['name']}" if entry.get("name") else path
    return written({ours: f"{source}:{split}" if split and not _is_file(path) else source})


def _is_file(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.rpartition(".")[2] in _FILE_TYPES


def _answer(key: str, entry: Mapping[str, Any]) -> Answer:
    value = entry.get(key)
    if key == "type":
        return _type(value, entry)
    if key in ("chat_template", "chat_template_jinja"):
        return chat_template(value, entry)
    if key in ("field_messages", "field", "text_column"):
        return left_out("part of type")
    if key in ("message_field_role", "message_field_content", "message_property_mappings"):
        return _message_keys(key, value)
    if key == "roles":
        known = isinstance(value, Mapping) and all(
            isinstance(names, list) and all(name in _ROLES.get(role, ()) for name in map(str, names))
            for role, names in value.items()
        )
        return left_out("these roles are supported without changes" if known else _rename("roles"), is_lost=not known)
    if key == "roles_to_train":
        return left_out(
            "the loss is computed on answers only", is_lost=value not in (["assistant"], ["gpt"], ["assistant", "gpt"])
        )
    if key == "train_on_eos":
        return left_out("the end token of each answer has loss", is_lost=value != "turn")
    if key == "field_tools":
        return left_out("tools are read from the column tools", is_lost=value != "tools")
    if key in ("ds_type", "preprocess_shards", "trust_remote_code") and not (
        key == "trust_remote_code" and is_on(value)
    ):
        return left_out("found from the file")
    if key in ("shards", "shards_idx"):
        return left_out("slice the data: data.train: 'FILE[:10%]'", is_lost=True)
    return left_out("trimtab has no equivalent", is_lost=True)


def _type(value: Any, entry: Mapping[str, Any]) -> Answer:
    if isinstance(value, Mapping):
        return _own_type(value)
    word = str(value or "").partition(".")[0].partition(":")[0].lower()
    if word in ("chat_template", "sharegpt"):
        column = entry.get("field_messages") or ("conversations" if word == "sharegpt" else "messages")
        return written({"task": "chat", "data.messages": column})
    if word in ("completion", "pretrain"):
        return written({"task": "causal-lm", "data.text": entry.get("field") or entry.get("text_column") or "text"})
    if word in _INSTRUCTIONS:
        note = f"the chat template of the tokenizer formats rows, not the prompt of {word}"
        return written({"task": "chat", "data.answer": _INSTRUCTIONS[word]}, note)
    return left_out(f"trimtab has no format {value!r}: {_NO_TYPE}", is_lost=True)


def _own_type(value: Mapping[str, Any]) -> Answer:
    """Convert a custom type with its columns and formats."""
    prompt, answer = value.get("field_instruction", "instruction"), value.get("field_output", "output")
    settings = {"task": "chat", "data.prompt": prompt, "data.answer": answer}
    lost = sorted(key for key in value if key not in ("field_instruction", "field_output", "field_input"))
    if prompt == "instruction" and value.get("field_input", "input") in ("input", "context"):
        del settings["data.prompt"]  # found by its name, together with the column of the input
    elif "field_input" in value:
        lost.append("field_input")
    note = f"without {', '.join(lost)}: the chat template of the tokenizer formats rows" if lost else ""
    return written(settings, note)


def _message_keys(key: str, value: Any) -> Answer:
    pairs = value if isinstance(value, Mapping) else {key.removeprefix("message_field_"): value}
    known = all(str(name) in _READ.get(meaning, {meaning}) for meaning, name in pairs.items())
    return left_out(
        "these keys are supported without changes" if known else _rename("keys of messages"), is_lost=not known
    )


def _rename(what: str) -> str:
    return f"rename the {what} in the data: role (or from) and content (or value); user, assistant, system, tool"
