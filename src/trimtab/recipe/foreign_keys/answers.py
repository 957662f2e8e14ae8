"""What to write instead of a key of another tool: answers, and the rules that derive them from a value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trimtab.recipe.yaml_text import as_yaml

V = TypeVar("V")
_ACCUMULATION = ("gradient_accumulation_steps", "accumulate_grad_batches")


@dataclass(frozen=True)
class Answer:
    """What to write instead of a key of another tool.

    Args:
        text: The answer as text, for an error message.
        settings: The recipe keys to write, dotted, with their values; empty if there are none.
        is_lost: Whether the key sets something that a recipe cannot express.
        note: How the settings differ from the meaning of the key.
    """

    text: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_lost: bool = False
    note: str = ""


# Takes the value and all keys of the same section.
Rule = Callable[[Any, Mapping[str, Any]], Answer]


def all_of(names: str, value: V) -> dict[str, V]:
    """Map each name, separated by spaces, to the same value."""
    return dict.fromkeys(names.split(), value)


# Recipe key → value in another tool (in lower case) → our value; a note in brackets says how they differ.
VALUES: dict[str, dict[str, str]] = {
    "train.precision": {
        **all_of("16-mixed fp16-mixed 16 half float16", "fp16"),
        **all_of("bf16-mixed bfloat16", "bf16"),
        **all_of("16-true fp16-true", "fp16 (mixed; pure fp16 is not supported)"),
        **all_of("bf16-true bf16_pure pure-bf16", "bf16-pure"),
        **all_of("32-true 32 no none float32 float full false", "fp32"),
    },
    "train.schedule": {
        "constant_with_warmup": "constant",
        "linear_with_warmup": "linear",
        "inverse_sqrt": "inverse-sqrt",
        **all_of("warmup_stable_decay wsd", "warmup-stable-decay"),
        **all_of("cosine_with_restarts cosine_with_min_lr cosine_annealing", "cosine (closest equivalent)"),
        "polynomial": "linear (closest equivalent)",
    },
    "train.optimizer": {
        **all_of("adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_fused", "adamw"),
        **all_of("adamw_8bit adamw_bnb_8bit adamw_torch_8bit adamw-8bit", "adamw8bit"),
        **all_of("adam_8bit adam_bnb_8bit", "adam8bit"),
        **all_of("paged_adamw_8bit paged_adamw8bit", "paged-adamw8bit"),
        **all_of("paged_adamw_32bit paged_adamw", "paged-adamw8bit (closest equivalent)"),
    },
    "task": {
        **all_of("text-classification sequence-classification sentiment-analysis classification", "classify"),
        **all_of("regression sts", "regress"),
        **all_of("text-generation clm lm causal language-modeling", "causal-lm"),
        **all_of("sft instruct instruction conversational", "chat"),
        **all_of("summarization translation text2text-generation seq2seq-lm", "seq2seq"),
        **all_of("fill-mask mlm", "masked-lm"),
    },
    "adapter": {
        "dora": "{kind: lora, dora: true}",
        **all_of("prompt_tuning prompt-tuning", "prompt"),
        **all_of("prefix_tuning prefix-tuning", "prefix"),
        **all_of("p_tuning p-tuning", "prompt (closest equivalent)"),
    },
    "early_stopping.mode": {"maximize": "max", "minimize": "min", "true": "max", "false": "min", "auto": "null"},
    "evaluate.every": {"steps": "500 steps", "epochs": "epoch", "no": "1000 epochs", "never": "1000 epochs"},
    "train.max_steps": {"-1": "null", "0": "null"},
    "data.on_bad_rows": {"ignore": "skip", "drop": "skip", "raise": "stop", "error": "stop", "fail": "stop"},
}


def written(settings: Mapping[str, Any], note: str = "", text: str = "") -> Answer:
    """Answer with recipe keys; `text` replaces the words for them."""
    words = text or ", and ".join(f"{key}: {as_yaml(value)}" for key, value in settings.items())
    return Answer(f"write {words}" + (f" ({note})" if note else ""), settings, note=note)


def left_out(reason: str, *, is_lost: bool = False) -> Answer:
    """Answer that a key has no counterpart."""
    return Answer(f"leave it out: {reason}", is_lost=is_lost)


def write(key: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Rule:
    """Answer with one recipe key and the converted value."""
    return lambda value, section: written({key: convert(value)}, note)


def write_named(key: str) -> Rule:
    """Answer with one recipe key whose values have other names in the other tool."""

    def rule(value: Any, section: Mapping[str, Any]) -> Answer:
        ours = VALUES[key].get(str(value).lower())
        if ours is None:
            return written({key: value})
        plain, _, note = ours.partition(" (")
        return Answer(f"write {key}: {ours}", {key: plain}, note=note.removesuffix(")"))

    return rule


def write_inside(outer: str, name: str, kind: str, key: str) -> Rule:
    """Answer with a mapping that also needs another key, such as the kind of an adapter."""
    return lambda value, section: written(
        {f"{outer}.{name}": kind, f"{outer}.{key}": value},
        text=f"{outer}: {{{name}: {kind}, {key}: {as_yaml(value)}}}",
    )


def omit(reason: str) -> Rule:
    """Answer that nothing is lost without the key."""
    return lambda value, section: left_out(reason)


def lose(reason: str) -> Rule:
    """Answer that a recipe cannot express the key."""
    return lambda value, section: left_out(reason, is_lost=True)


def renamed(pairs: str) -> dict[str, Rule]:
    """Parse keys whose value stays the same: "theirs=ours", separated by spaces."""
    return {theirs: write(ours) for theirs, ours in (pair.split("=") for pair in pairs.split())}


def is_on(value: Any) -> bool:
    """Whether a value means true."""
    return str(value).lower() in {"true", "yes", "on", "1"}


def if_on(on: str, off: str) -> Callable[[Any], str]:
    """Convert a flag to one of two words."""
    return lambda value: on if is_on(value) else off


def metric_name(value: Any) -> Any:
    """Remove the prefix of an evaluation from the name of a metric."""
    return str(value).removeprefix("eval_").removeprefix("val_")


def steps_of(key: str) -> Rule:
    """Answer with an interval; a number below 1 is a share of the run."""

    def rule(value: Any, section: Mapping[str, Any]) -> Answer:
        if isinstance(value, float) and value < 1:
            note = "of an epoch, not of the run"
            text = f"write {key}: {value:g} epochs ({note}), or a number of steps"
            return Answer(text, {key: f"{value:g} epochs"}, note=note)
        return written({key: f"{value} steps"})

    return rule


def batch_size(value: Any, section: Mapping[str, Any]) -> Answer:
    """Multiply the micro-batch size by the accumulation steps: `train.batch_size` counts rows per optimizer step."""
    names = ("per_device_train_batch_size", "micro_batch_size", "train_batch_size", "batch_size")
    rows = next((section[name] for name in names if section.get(name) is not None), None)
    steps = next((section[name] for name in _ACCUMULATION if section.get(name) is not None), 1)
    if not isinstance(rows, int) or not isinstance(steps, int):
        return Answer("write train.batch_size: rows per optimizer step; memory.micro_batch: rows per forward pass")
    total = f"write train.batch_size: {rows * steps} ({rows} × {steps} × the number of devices)"
    if steps == 1:
        return Answer(total, {"train.batch_size": rows})
    settings = {"train.batch_size": rows * steps, "memory.micro_batch": rows}
    text = f"{total}, and memory.micro_batch: {rows} to keep that split"
    return Answer(text, settings, note=f"{rows} × {steps}, on one device")


def packing(value: Any, section: Mapping[str, Any]) -> Answer:
    """Convert a flag for packed rows."""
    if value is False:
        return written({"memory.padding": "longest"})
    return written({"memory.padding": "none"}, "rows of a batch are concatenated, and attention stays within each")


def tracker(value: Any) -> str:
    """Convert names of trackers to `track.uri`."""
    words = {str(word).lower() for word in (value if isinstance(value, list | tuple) else [value])}
    return "none" if words <= {"none", "false", "no", "off"} else "local"


AUTOMATIC = omit("done automatically")
UNSUPPORTED = lose("trimtab has no equivalent")
NOT_YET = lose("not supported yet in this version")
LAUNCH = omit("`trimtab launch` starts several processes and sets up data parallel training")
ON_CPU = omit("pass --device cpu")
QUIET = omit("--quiet prints errors only")
UPLOAD = omit("best/ is a Hugging Face folder, ready to upload")
WORKERS = omit("data is loaded in the background automatically")
RESUME = omit("`trimtab resume RUN` resumes a run")
TRACKING = write("track.uri", tracker, "MLflow; local is a store in runs/")
MAX_STEPS = write("train.max_steps", lambda value: None if value == -1 else value)
