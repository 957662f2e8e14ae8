"""Settings that are valid alone but contradict each other, or one of which would have no effect."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trimtab.recipe.mistakes import Mistake, shown

if TYPE_CHECKING:
    from trimtab.recipe.schema import AdapterSettings, Recipe

_COLUMNS = {
    "classify": {"text", "label"},
    "regress": {"text", "label"},
    "causal-lm": {"text"},
    "chat": {"messages", "prompt", "answer"},
    "seq2seq": {"text", "target"},
    "masked-lm": {"text"},
}
_ADAMS = ("adamw", "adam")
_USED_BY = {"betas": _ADAMS, "eps": (*_ADAMS, "adagrad"), "momentum": ("sgd",)}
_LORA = {"rank", "alpha", "dropout", "targets", "experts", "layers", "ranks", "alphas", "trains", "rslora", "dora"}
_LORA |= {"lr_ratio"}
_ADAPTER_KEYS = {
    "lora": _LORA | {"base", "init"},
    "qlora": _LORA | {"init"},  # already refused for another reason
    "ia3": {"targets", "layers", "trains"},
    "side": {"reduction", "every", "dropout", "trains"},
    "prompt": {"tokens"},
    "prefix": {"tokens"},
}
_LANGUAGE_MODELING = ("causal-lm", "chat", "seq2seq", "masked-lm")


def find_contradictions(recipe: "Recipe") -> Iterator[Mistake]:
    """Yield every contradiction in a recipe whose single values are valid."""
    yield from _in_model(recipe)
    yield from _in_columns(recipe)
    yield from _in_training(recipe)
    yield from _in_memory(recipe)
    yield from _in_distillation(recipe)
    yield from _in_the_rest(recipe)


def _in_model(recipe: "Recipe") -> Iterator[Mistake]:
    model = recipe.model
    if isinstance(model, str):
        return
    if (model.name is None) == (model.config is None):
        both = "both name and config" if model.name else "neither name nor config"
        yield _mistake("model", f"found {both}; set name for a pretrained model, or config to train from scratch")
    elif model.name is None and model.tokenizer is None:
        yield _mistake("model.tokenizer", "required with model.config; allowed: a Hub name, a folder, or train")


def _in_columns(recipe: "Recipe") -> Iterator[Mistake]:
    data, task = recipe.data, recipe.task
    columns: dict[str, Any] = {
        name: getattr(data, name) for name in ("text", "label", "target", "messages", "prompt", "answer")
    }
    for name, column in columns.items():
        if task is not None and column is not None and name not in _COLUMNS[task]:
            used = ", ".join(f"data.{used}" for used in columns if used in _COLUMNS[task])
            yield _mistake(f"data.{name}", f"found {shown(column)}; task {task} reads {used}; leave it out", "task")
    given = {name for name, column in columns.items() if column is not None}
    if task is None and not any(given <= used for used in _COLUMNS.values()):
        names = " and ".join(f"data.{name}" for name in columns if name in given)
        yield _mistake("data", f"no task reads {names} together; leave out those that do not belong", "task")
    if isinstance(data.text, list) and task not in {None, "classify", "regress"}:
        text = f"found {shown(data.text)}; task {task} reads one column; pairs are for classify and regress"
        yield _mistake("data.text", text, "task")
    for name in ("prompt", "answer"):
        if data.messages is not None and columns[name] is not None:
            text = f"found {shown(columns[name])}; data.messages contains the whole conversation; leave one of them out"
            yield _mistake(f"data.{name}", text, "data.messages")
    if data.eval is not None and data.eval_share != _default(data, "eval_share"):
        text = f"found {shown(data.eval_share)}; nothing is split off if data.eval is set; leave one of them out"
        yield _mistake("data.eval_share", text, "data.eval")


def _in_training(recipe: "Recipe") -> Iterator[Mistake]:
    train = recipe.train
    for name, optimizers in _USED_BY.items():
        value = getattr(train, name)
        rule = train.optimizer.removeprefix("paged-").removesuffix("8bit")
        if value != _default(train, name) and rule not in optimizers and (rule != "auto" or name == "momentum"):
            others = " or ".join(optimizers)
            text = f"found {shown(value)}; no effect on {train.optimizer}; leave it out, or train.optimizer: {others}"
            yield _mistake(f"train.{name}", text, "train.optimizer")
    if train.schedule == "noam" and not train.warmup:
        text = "found 0; schedule noam needs a warmup; write a number of steps such as 4000"
        yield _mistake("train.warmup", text, "train.schedule")
    if train.max_steps is None and train.epochs is None:
        yield _mistake("train.epochs", "found null; a run needs an end; write a number, or train.max_steps: 1000")
    if train.max_steps is not None and train.epochs not in (None, _default(train, "epochs")):
        text = f"found {shown(train.epochs)}; train.max_steps replaces epochs; leave one of them out"
        yield _mistake("train.epochs", text, "train.max_steps")
    if train.label_smoothing and recipe.task == "regress":
        text = f"found {shown(train.label_smoothing)}; task regress has no classes; leave it out"
        yield _mistake("train.label_smoothing", text, "task")
    if train.class_weights is not None and recipe.task not in (None, "classify"):
        text = f"found {shown(train.class_weights)}; task {recipe.task} has no classes; leave it out"
        yield _mistake("train.class_weights", text, "task")
    if train.class_weights is not None and recipe.distill is not None:
        text = f"found {shown(train.class_weights)}; the loss of distill has no class weights; leave one of them out"
        yield _mistake("train.class_weights", text, "distill")
    if train.precision == "bf16-pure" and train.optimizer == "adafactor":
        text = "found bf16-pure; adafactor has no stochastic rounding, and small updates would be lost"
        yield _mistake("train.precision", f"{text}; write bf16, or train.optimizer: adamw8bit", "train.optimizer")


def _in_memory(recipe: "Recipe") -> Iterator[Mistake]:
    train, memory = recipe.train, recipe.memory
    if isinstance(memory.micro_batch, int) and memory.micro_batch > train.batch_size:
        text = f"found {memory.micro_batch}; larger than train.batch_size {train.batch_size}; lower it, or raise that"
        yield _mistake("memory.micro_batch", text, "train.batch_size")
    if (
        memory.loss in ("fused", "chunked", "liger")
        and recipe.task is not None
        and recipe.task not in _LANGUAGE_MODELING
    ):
        text = f"found {memory.loss}; task {recipe.task} has few logits per row; leave it out"
        yield _mistake("memory.loss", text, "task")
    if train.clip_by == "previous-norm" and (memory.update != "in-backward" or train.max_grad_norm is None):
        text = (
            f"found {train.clip_by}; only memory.update: in-backward clips by it, to train.max_grad_norm; leave it out"
        )
        yield _mistake("train.clip_by", text, "memory.update", "train.max_grad_norm")
    if memory.update == "in-backward":
        yield from conflicts_in_backward(recipe)
    if recipe.adapter == "none":
        return
    if not isinstance(recipe.adapter, str):
        yield from _in_adapter(recipe.adapter)
    if "base" in train.freeze:
        text = f"found {shown(train.freeze['base'])}; an adapter always freezes the base; leave one of them out"
        yield _mistake("train.freeze.base", text, "adapter")
    if train.precision == "bf16-pure":
        text = "found bf16-pure; adapters train in fp32, and bf16 already keeps the frozen base in bf16; write bf16"
        yield _mistake("train.precision", text, "adapter")


def _in_adapter(adapter: "AdapterSettings") -> Iterator[Mistake]:
    kind, base = adapter.kind, adapter.base
    for name in type(adapter).model_fields:
        value = getattr(adapter, name)
        kinds = [one for one, names in _ADAPTER_KEYS.items() if name in names]
        if name != "kind" and kind not in kinds and value != _default(adapter, name):
            others = " or ".join(kinds)
            text = f"found {shown(value)}; no effect on {kind}; leave it out, or write adapter.kind: {others}"
            yield _mistake(f"adapter.{name}", text, "adapter.kind")
    is_quantized = kind == "qlora" or base is not None
    stored = "4 bits" if kind == "qlora" else str(base)
    if is_quantized and adapter.init != "zero":
        text = f"found {adapter.init}; it changes the base weights, which are stored in {stored}; write zero"
        yield _mistake("adapter.init", text, "adapter.kind", "adapter.base")
    if adapter.experts:
        for name in ("dropout", "dora", "init"):
            if (value := getattr(adapter, name)) != _default(adapter, name):
                text = f"found {shown(value)}; adapters on fused experts do not support it; leave one of them out"
                yield _mistake(f"adapter.{name}", text, "adapter.experts")
    if base is not None and adapter.dora:
        text = f"found true; PEFT cannot read base weights in {base}; leave one of them out"
        yield _mistake("adapter.dora", text, "adapter.base")


def conflicts_in_backward(recipe: "Recipe") -> Iterator[Mistake]:
    """Yield the settings that prevent updates in backward, where not all gradients are known yet."""
    train, memory = recipe.train, recipe.memory
    why = "memory.update: in-backward changes weights before all gradients are known"
    if train.max_grad_norm is not None and train.clip_by == "norm":
        cure = "write null, or train.clip_by: previous-norm"
        text = f"found {shown(train.max_grad_norm)}; {why}, so their norm cannot clip them; {cure}"
        yield _mistake("train.max_grad_norm", text, "memory.update")
    if train.on_nan == "skip":
        yield _mistake("train.on_nan", f"found skip; {why}, so no step can be skipped; write stop", "memory.update")
    if train.precision == "fp16":
        text = f"found fp16; {why}, so no step can be skipped if one overflows; write bf16 or fp32"
        yield _mistake("train.precision", text, "memory.update")
    if train.compile in ("capture", "graphs"):
        text = f"found {train.compile}; CUDA graphs do not work with memory.update: in-backward; write blocks"
        yield _mistake("train.compile", text, "memory.update")
    if memory.micro_batch_tokens != "auto" or memory.micro_batch not in ("auto", train.batch_size):
        key = "micro_batch" if memory.micro_batch_tokens == "auto" else "micro_batch_tokens"
        text = f"found {getattr(memory, key)}; {why}, so the whole batch has to be one micro-batch; leave it out"
        yield _mistake(f"memory.{key}", text, "memory.update", "train.batch_size")


def _in_distillation(recipe: "Recipe") -> Iterator[Mistake]:
    distill, memory = recipe.distill, recipe.memory
    if distill is None:
        return
    if recipe.task == "regress":
        yield _mistake("distill", "task regress has no classes to learn from a teacher; leave it out", "task")
    if memory.loss not in ("auto", "plain"):
        text = (
            f"found {memory.loss}; a student is compared with its teacher by all logits; write plain, or leave it out"
        )
        yield _mistake("memory.loss", text, "distill")
    if memory.padding == "none":
        text = "found none; student and teacher are compared on padded rows; write longest, or leave it out"
        yield _mistake("memory.padding", text, "distill")
    if recipe.train.compile not in ("auto", "off"):
        found = f"found {recipe.train.compile}"
        text = f"{found}; the step of a student is neither compiled nor captured; write off, or leave it out"
        yield _mistake("train.compile", text, "distill")
    if recipe.adapter != "none" and distill.student is not None:
        text = f"found {shown(distill.student)}; an adapter is saved without its base, which would be the whole model"
        yield _mistake("distill.student", f"{text}; leave one of them out", "adapter")
    if distill.cache == "disk" and recipe.task == "masked-lm":
        text = "found disk; the masks of masked-lm change in every epoch; write none"
        yield _mistake("distill.cache", text, "task")
    for name in ("hidden", "attention"):
        if distill.cache == "disk" and getattr(distill, name)["weight"]:
            text = (
                f"found {shown(getattr(distill, name)['weight'])}; distill.cache: disk keeps no layers of the teacher"
            )
            yield _mistake(f"distill.{name}", f"{text}; leave one of them out", "distill.cache")
    yield from _in_layers_of_student(recipe)
    if not distill.alpha and not distill.hidden["weight"] and not distill.attention["weight"]:
        text = "found 0; the teacher has no effect; write a share such as 0.5, or give distill.hidden a weight"
        yield _mistake("distill.alpha", text, "distill.hidden", "distill.attention")


def _in_layers_of_student(recipe: "Recipe") -> Iterator[Mistake]:
    """Yield the weights of layers that cannot be compared with the teacher's, because of the student's adapter."""
    kind = recipe.adapter if isinstance(recipe.adapter, str) else recipe.adapter.kind
    why = {
        ("prompt", "hidden"): "with adapter: prompt the layers of the student have more tokens",
        ("prompt", "attention"): "with adapter: prompt the layers of the student have more tokens",
        ("prefix", "attention"): "with adapter: prefix the student attends to more tokens",
        ("side", "attention"): "adapter: side does not change the attention of its base, so this has no effect",
    }
    for name in ("hidden", "attention"):
        weight = getattr(recipe.distill, name)["weight"]
        if weight and (kind, name) in why:
            text = f"found {shown(weight)}; {why[kind, name]}; leave one of them out"
            yield _mistake(f"distill.{name}", text, "adapter")


def _in_the_rest(recipe: "Recipe") -> Iterator[Mistake]:
    name = recipe.track.register_as
    if name is not None and recipe.track.uri.startswith("databricks") and name.count(".") != 2:
        text = f"found {shown(name)}; on Databricks write CATALOG.SCHEMA.NAME, such as main.default.{name}"
        yield _mistake("track.register_as", text, "track.uri")
    limits = recipe.limits
    for name in ("train", "eval"):
        value = getattr(limits, name)
        if limits.overfit_batches and value is not None:
            text = f"found {shown(value)}; limits.overfit_batches sets the batches of both; leave one of them out"
            yield _mistake(f"limits.{name}", text, "limits.overfit_batches")
    never = recipe.data.eval is None and not recipe.data.eval_share and not limits.overfit_batches
    if recipe.early_stopping is not None and never:
        text = "data.eval_share: 0 disables evaluation; set data.eval, or leave early_stopping out"
        yield _mistake("early_stopping", text, "data.eval", "data.eval_share", "limits.overfit_batches")
    best, metric = recipe.checkpoint.best, recipe.evaluate.metric
    if isinstance(best, str) and metric not in (None, best):
        text = f"found {best}; evaluate.metric is {metric}; one metric chooses the best model; leave one of them out"
        yield _mistake("checkpoint.best", text, "evaluate.metric")
    track = recipe.track
    if track.register_as is not None and (track.uri == "none" or not track.log_model):
        other = "track.uri: none" if track.uri == "none" else "track.log_model: false"
        text = f"found {shown(track.register_as)}; with {other} no model is uploaded; leave one of them out"
        yield _mistake("track.register_as", text, "track.uri", "track.log_model")
    if recipe.out is not None and recipe.name is not None:
        text = f"found {shown(recipe.name)}; out is already the path of the run's folder; leave one of them out"
        yield _mistake("name", text, "out")


def _mistake(key: str, text: str, *others: str) -> Mistake:
    return Mistake(tuple(key.split(".")), text, others)


def _default(section: Any, name: str) -> Any:
    return type(section).model_fields[name].default
