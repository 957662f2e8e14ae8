"""The recipe: every setting of a run, as one frozen tree with defaults.

The string below each field is its documentation: `trimtab init`, the JSON Schema and docs/recipe.md are generated from
it.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from trimtab.recipe.consistency import find_contradictions
from trimtab.recipe.mistakes import Mistake, drop_paths, explain_errors, raise_mistakes, unknown_keys
from trimtab.recipe.schema_keys import keys_of
from trimtab.recipe.value_types import (
    Allowances,
    BatchLimit,
    BlockRange,
    Budget,
    ClassWeights,
    Column,
    Duration,
    ExperimentName,
    FastDevRun,
    Folder,
    FolderName,
    FreezeDuration,
    GradientCheckpointing,
    Interval,
    Labels,
    LayerTerm,
    Metric,
    MicroBatch,
    ModelName,
    OffloadedBlocks,
    Patterns,
    Share,
    Source,
    Steps,
    StudentLayers,
    Targets,
    Text,
    Texts,
    TileTokens,
    TrackingUri,
    Warmup,
    at_most,
    normalize,
)

R = TypeVar("R")
PositiveInt = Annotated[int, Ge(1), AfterValidator(at_most(2**40))]
PositiveFloat = Annotated[float, Gt(0), AfterValidator(at_most(1e30))]  # products of several still fit into fp32
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Lt(1)]
OptimizerName = Literal[
    "auto",
    "adamw",
    "adam",
    "adagrad",
    "sgd",
    "adafactor",
    "adamw8bit",
    "adam8bit",
    "adagrad8bit",
    "paged-adamw8bit",
    "paged-adam8bit",
    "paged-adagrad8bit",
]
TaskName = Literal["classify", "regress", "causal-lm", "chat", "seq2seq", "masked-lm"]


class Section(BaseModel):
    """Base of every part of a recipe: frozen, and refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _normalize(cls, value: Any, info: ValidationInfo) -> Any:
        return normalize(value, cls.model_fields[info.field_name or ""])

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Make `help` readable: the keys with their meaning in the docstring, a signature without types."""
        keys = [f"    {key.dotted}: {' '.join((key.field.description or '').split())}" for key in keys_of(cls)]
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Keys:", *keys])
        cls.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty
                    if field.is_required()
                    else field.get_default(call_default_factory=True),
                )
                for name, field in cls.model_fields.items()
            ]
        )

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Show the keys that were set."""
        return [(name, value) for name, value in super().__repr_args__() if name in self.model_fields_set]


class ModelSettings(Section):
    """A model that needs more than a name; either `name` or `config` is required."""

    name: ModelName | None = None
    """Hub name or folder of a pretrained model."""
    config: dict[str, Any] | None = None
    """Configuration of a model to train from scratch: the keys of transformers' config.json, with model_type."""
    tokenizer: Text | None = None
    """Hub name or folder of the tokenizer; train = train one on the training texts; null = the model's own."""
    trust_remote_code: bool = False
    """Run Python code from the model's repository. Only for repositories you trust."""


class DataSettings(Section):
    """Data sources and the meaning of their columns."""

    train: Source
    """Training rows: csv, tsv, jsonl, json, parquet, arrow or txt file, folder, glob, or Hub name, with optional split
    and slice: imdb:train[:1000], reviews.csv[:80%]."""
    eval: Source | None = None
    """Evaluation rows, in the same form as train; null = split off from train."""
    eval_share: Share = 0.1
    """Share of train to split off for evaluation, chosen by the seed, if eval is null; 0 = no evaluation."""
    text: Texts | None = None
    """Column with the text; a list of two columns for sentence pairs; null = detected."""
    label: Labels | None = None
    """Column with the label; a list of columns for several labels per row; null = detected."""
    target: Column | None = None
    """Column with the text to generate (seq2seq); null = detected."""
    messages: Column | None = None
    """Column with a conversation: a list of {role, content}; null = detected."""
    prompt: Column | None = None
    """Column with the question, for chat data in two columns."""
    answer: Column | None = None
    """Column with the answer, for chat data in two columns; the loss is computed on it."""
    max_length: Annotated[int, Ge(2)] | None = None
    """Maximum tokens per row; longer rows are truncated; null = the model's maximum."""
    on_bad_rows: Literal["stop", "skip"] = "stop"
    """Rows that cannot be used: stop = raise an error with file and row; skip = drop them and report how many."""


class TrainSettings(Section):
    """Training hyperparameters. Defaults are those of HF Trainer."""

    epochs: PositiveFloat | None = 3.0
    """Number of passes over the training rows; null = max_steps decides."""
    max_steps: PositiveInt | None = None
    """Number of optimizer steps, instead of epochs. On the command line, each of the two replaces the recipe's
    other."""
    max_time: Duration | None = None
    """Save and stop after this time, such as 3h; `trimtab resume` continues the run."""
    batch_size: PositiveInt = 8
    """Rows per optimizer step, over all devices; memory.micro_batch is the number per forward pass."""
    lr: PositiveFloat = 5e-5
    """Peak learning rate; with schedule noam, the factor of its formula."""
    optimizer: OptimizerName = "auto"
    """Optimizer. 8bit = optimizer state in 8 bits (bitsandbytes); paged = this state moves to host memory when GPU
    memory is short; auto = adamw, or paged-adamw8bit with adapter: qlora on a GPU."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the moment estimates of Adam and AdamW, including their 8-bit versions."""
    eps: PositiveFloat = 1e-8
    """Term added to the denominator of adaptive optimizers."""
    momentum: Fraction = 0.0
    """Momentum of sgd."""
    weight_decay: NonNegative = 0.0
    """Weight decay; biases and norm weights never decay."""
    decay_embeddings: bool = True
    """Apply weight decay to embeddings."""
    schedule: Literal["linear", "cosine", "constant", "inverse-sqrt", "noam", "warmup-stable-decay"] = "linear"
    """Learning rate after the warmup: linear and cosine = decay to 0; constant; inverse-sqrt = proportional to
    1/√step; noam = the schedule of the original transformer; warmup-stable-decay = constant, then decay to 0 over the
    last fifth of the run."""
    warmup: Warmup = 0
    """Warmup steps: a number such as 500, or a share of the run such as 6%."""
    max_grad_norm: NonNegative | None = 1.0
    """Clip gradients to this norm; null or 0 = no clipping."""
    clip_by: Literal["norm", "previous-norm"] = "norm"
    """Norm that gradients are clipped by: norm = that of the current step; previous-norm = that of the previous step,
    for memory.update: in-backward (the first step is not clipped)."""
    label_smoothing: Fraction = 0.0
    """Share of the target probability to spread over all classes."""
    class_weights: ClassWeights | None = None
    """Weight of each label in the training loss, for one label per row: balanced = rows / (labels × rows of the label);
    or {label: weight}, where labels that are not named have 1. The loss of a batch is the weighted mean over its rows;
    evaluation is not weighted."""
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16", "bf16-pure"] = "auto"
    """fp16 and bf16 = mixed precision; bf16-pure = weights, gradients and optimizer state in bf16 with stochastic
    rounding; tf32 = fp32 with TF32 matrix products on NVIDIA GPUs; auto = bf16 if the device supports it natively, else
    fp16 on a GPU and fp32 on a CPU; a resumed run keeps what auto was."""
    freeze: dict[str, FreezeDuration] = {}
    """Parameters to freeze, and for how long: {base: always}, {base: 200 steps}, {'*.layer.0.*': 1 epoch}; base =
    everything except the head; other keys are patterns of module names."""
    group_by_length: bool = True
    """Batch rows of similar length together to reduce padding."""
    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """Non-finite loss: stop = raise an error; skip = skip the optimizer step; rewind = go back to the last checkpoint
    and continue with other rows, once per run."""
    compile: Literal["auto", "off", "capture", "blocks", "graphs"] = "auto"
    """blocks = compile the repeated blocks of the model with torch.compile before the first step; capture = capture
    forward and backward of each micro-batch size in CUDA graphs, which removes Python overhead in small models (one
    GPU); graphs = both; auto = the fastest for the length of the run on one NVIDIA GPU, else off."""
    deterministic: bool = False
    """Use only deterministic CUDA kernels; slower."""
    log_every: Steps = 10
    """Number of steps between logged metrics."""

    def num_steps(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps of a run."""
        return self.max_steps or max(1, math.ceil((self.epochs or 0) * steps_per_epoch))

    @field_validator("max_grad_norm", mode="after")
    @classmethod
    def _zero_is_off(cls, value: float | None) -> float | None:
        return value or None


class AdapterSettings(Section):
    """Adapters: small modules that are trained while the base model is frozen."""

    kind: Literal["lora", "qlora", "ia3", "side", "prompt", "prefix"] = "lora"
    """lora = low-rank matrices added to the base weights; qlora = the same on 4-bit (nf4) base weights; ia3 = one
    factor for each output of keys and values and each input of the second layer of an MLP; side = a narrow network that
    reads the hidden states of the base, so backward never enters the base; prompt = embeddings of virtual tokens before
    each row (prompt tuning), for decoders; prefix = keys and values of virtual tokens before each row, in every block
    (prefix tuning), for decoders."""
    base: Literal["fp8"] | None = None
    """Dtype in which kind lora stores the frozen base weights: fp8 = 8 bits, multiplied in fp8, on NVIDIA GPUs with
    compute capability 8.9 or higher (emulated on a CPU); null = the dtype of matrix products."""
    rank: PositiveInt = 16
    """Rank of the matrices; a higher rank has more trainable parameters."""
    alpha: PositiveFloat | None = None
    """The adapter's output is scaled by alpha / rank; null = twice the rank."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input."""
    targets: Targets | None = None
    """Modules that get an adapter; all-linear = every linear layer of the base, not the head; null = all-linear, or
    with kind ia3 the modules that PEFT chooses for the model type."""
    experts: bool = False
    """Also adapt fused expert weights, with two matrices of this rank for each expert; they are not linear modules, so
    targets does not include them."""
    layers: BlockRange | None = None
    """First and last block that get adapters, counted from 0; null = all blocks."""
    ranks: dict[str, PositiveInt] = {}
    """Rank by pattern of module names, or of expert weights: {'*.down_proj': 32}; the last matching pattern wins."""
    alphas: dict[str, PositiveFloat] = {}
    """Alpha by pattern of module names; the last matching pattern wins."""
    trains: Patterns = []
    """Modules to train in full, by pattern, such as [embed_tokens]; a new head is always trained."""
    rslora: bool = False
    """Scale by alpha / √rank instead (rsLoRA), for large ranks."""
    dora: bool = False
    """Train the norm of each row of the adapted weights as well (DoRA); slower, and needs more memory."""
    init: Literal["zero", "pissa", "pissa-fast", "olora"] = "zero"
    """Initial matrices: zero = one random and one zero; pissa = the largest singular values of the base weight, while
    the base keeps the rest; pissa-fast = the same, estimated; olora = QR decomposition of the base weight. Except for
    zero, the adapter is saved with twice the rank, for the original base."""
    lr_ratio: PositiveFloat = 1.0
    """Learning rate of the second matrices (B) as a multiple of train.lr (LoRA+); often 16."""
    reduction: PositiveInt = 8
    """Width of a side network: the hidden size of the model divided by this."""
    every: PositiveInt = 1
    """A side network reads every n-th block of the model, and always the last one."""
    tokens: PositiveInt = 20
    """Number of virtual tokens of prompt and prefix tuning."""


class MemorySettings(Section):
    """How to fit into memory. Except for `allow`, none of these changes the result of training."""

    budget: Budget | None = None
    """Device memory that the run may use, such as 8GiB; on a GPU the allocator is capped to stay within it, and
    micro-batches shrink if necessary; auto = the free memory of the device; null = no limit."""
    micro_batch: MicroBatch = "auto"
    """Rows per forward pass; auto = chosen by the planner on a GPU or with a budget, else all of train.batch_size."""
    gradient_checkpointing: GradientCheckpointing = "auto"
    """Recompute activations in backward instead of storing them: all = in every block; {every: 2} = in every second
    block; {all_but_every: 4} = in three of four blocks; {layers: [0, -1]} = in these blocks; ops = everything except
    the results of matrix products and attention; auto = chosen by the planner on a GPU or with a budget, else none."""
    offload_activations: OffloadedBlocks = "auto"
    """Keep activations that blocks save for backward in pinned host memory (of a recomputed block, its input): all = of
    every block; {every: 2} = of every second block; {all_but_every: 4} and {layers: [0, -1]} as in
    gradient_checkpointing; auto = all if nothing else fits on an NVIDIA GPU, else none."""
    tile_tokens: TileTokens = "auto"
    """Compute MLPs in tiles of this many tokens, and again in backward, so only one tile needs the wide tensors of an
    MLP; none = all tokens at once; auto = none, unless nothing else fits."""
    offload: Literal["auto", "none", "embeddings"] = "auto"
    """Weights to keep in host memory: embeddings = the token embeddings, if they are frozen; auto = embeddings if the
    run trains an adapter and no faster plan fits, else none."""
    update: Literal["auto", "device", "in-backward", "streamed", "host"] = "auto"
    """Where and when weights are updated: device = on the device, after backward; in-backward = each weight as soon as
    its gradient is complete, which is then freed; needs the whole batch in one micro-batch, and train.max_grad_norm:
    null or train.clip_by: previous-norm; streamed = gradients and optimizer state are kept in host memory and copied to
    the device slice by slice once all gradients are known; host = gradients, fp32 weights and optimizer state are kept
    in host memory, and the CPU updates the weights; auto = in-backward where it is possible and faster than other plans
    that fit, streamed or host if nothing else fits on a GPU, else device."""
    offload_state: Literal["auto", "none", "host"] = "auto"
    """Where to keep the optimizer state: none = on the device; host = in pinned host memory, copied to the device slice
    by slice during the update, best with update: in-backward; auto = host if all weights are trained and nothing else
    fits on an NVIDIA GPU, else none."""
    stream_weights: OffloadedBlocks = "auto"
    """Keep the weights of blocks in pinned host memory, and copy each block to the device while the previous one
    computes, in forward and backward: all = every block; {every: 2} = every second block; {all_but_every: 4} and
    {layers: [0, -1]} as in gradient_checkpointing; auto = all if nothing else fits on an NVIDIA GPU, else none.
    Trainable weights need update: host, or update: in-backward, which also streams their optimizer state."""
    allow: Allowances = []
    """Techniques that change results slightly, which the planner may choose if memory is short: 8bit = optimizer state
    in 8 bits."""
    loss: Literal["auto", "plain", "fused", "chunked", "liger"] = "auto"
    """Loss of language models: plain = from the full logits; fused = from the full logits without copies of them, by
    kernels on NVIDIA GPUs; chunked = without storing the full logits; liger = the fused kernel of liger-kernel; auto =
    plain if the logits are small."""
    kernels: Literal["auto", "plain", "liger", "fused"] = "auto"
    """Norms and activations: plain = the model's own; liger = fused kernels of liger-kernel for decoders, which store
    less for backward; fused = fused kernels for encoders like BERT; auto = on an NVIDIA GPU, liger if it is installed
    and supports the model, and fused in captured steps (train.compile)."""
    attention_backend: Literal["auto", "torch", "cudnn", "flash", "efficient", "math"] = "auto"
    """Kernel that computes attention, where it can run: cudnn; flash; efficient = memory-efficient; math = matrix
    products; torch = torch's own choice; auto = on Hopper GPUs cudnn if micro-batches have few shapes, else flash; on
    other devices torch."""
    micro_batch_tokens: MicroBatch = "auto"
    """Maximum tokens per forward pass, in addition to micro_batch; a longer row is processed alone."""
    padding: Literal["auto", "longest", "none"] = "auto"
    """longest = pad rows to the longest one in their micro-batch; none = concatenate rows and compute attention within
    each (models like BERT and Llama; others are padded); auto = none in half precision on NVIDIA GPUs of the Ampere
    generation or newer."""


class EvaluateSettings(Section):
    """When and how to evaluate."""

    every: Interval = "epoch"
    """Interval between evaluations: epoch, 500 steps, 10min. The last step is always evaluated."""
    metric: Metric | None = None
    """Metric that chooses the best model; null = the default metric of the task."""
    batch_size: PositiveInt | None = None
    """Rows per evaluation batch; null = chosen automatically."""
    at_start: bool = False
    """Also evaluate before the first step."""
    samples: Annotated[int, Ge(0)] = 3
    """Rows for which the models before and after training generate text at the end of the run, for its report (tasks
    causal-lm, chat and seq2seq); 0 = none."""


class CheckpointSettings(Section):
    """What to save."""

    best: bool | Metric = True
    """Save the best model as the Hugging Face folder best/, chosen by evaluate.metric or by the metric given here;
    false = save the last model."""
    every: Interval | None = "10min"
    """Interval between checkpoints to resume from: 10min, 500 steps, epoch. The last step is always saved. null = no
    checkpoints: a run that is killed cannot be resumed."""
    keep: PositiveInt = 2
    """Number of checkpoints to keep, newest first."""
    mirror: Folder | None = None
    """Second folder, such as a mounted drive; checkpoints and best/ are copied to MIRROR/EXPERIMENT/NAME."""


class EarlyStoppingSettings(Section):
    """Stop when evaluation no longer improves."""

    metric: Metric | None = None
    """Metric that must improve; null = evaluate.metric."""
    mode: Literal["max", "min"] | None = None
    """max = higher is better; min = lower is better; null = follows from the metric."""
    patience: PositiveInt = 3
    """Evaluations without improvement before training stops."""
    min_delta: NonNegative = 0.0
    """Minimum change that counts as an improvement."""


class DistillSettings(Section):
    """Train a small model (the student) to reproduce the outputs of a trained one (the teacher)."""

    teacher: ModelName
    """Run, folder or Hub name of the teacher: a model trained for the task, with the student's tokenizer."""
    student: StudentLayers | None = None
    """Layers of the model to train, counted from 0: half or a number = evenly spaced, including the first and the last;
    without `model`, they are taken from the teacher; null = all layers of `model`."""
    temperature: PositiveFloat = 2.0
    """Temperature that divides the logits of both models; higher = more weight on unlikely classes."""
    alpha: Annotated[float, Ge(0), Le(1)] = 0.5
    """Share of the teacher's term in the loss; the term of the labels has the rest."""
    hidden: LayerTerm = {"weight": 0.0, "layers": "auto"}
    """Weight of the distance between hidden states, and which student layer learns from which teacher layer; auto =
    evenly spaced, the last from the last."""
    attention: LayerTerm = {"weight": 0.0, "layers": "auto"}
    """Weight of the distance between attention probabilities, and the layers, as in hidden."""
    top_k: PositiveInt | None = None
    """Compare only the teacher's k most likely tokens, with the probability of all others summed; null = all tokens."""
    cache: Literal["none", "disk"] = "none"
    """disk = compute the teacher's outputs for all rows once, before training, and keep them on disk; training then
    needs no memory for the teacher. Not supported for masked-lm, whose masks change."""


class TrackSettings(Section):
    """Experiment tracking, in addition to the files in the run's folder."""

    uri: TrackingUri = "local"
    """local = MLFLOW_TRACKING_URI if it is set, else an MLflow store next to the runs (runs/mlflow.db); or the address
    of an MLflow server; none = no tracking. `track: none` is short for {uri: none}."""
    experiment: ExperimentName | None = None
    """Experiment that the run belongs to; its folder is runs/EXPERIMENT/NAME; null = named after the data. On
    Databricks a name is below /Shared; a path such as /Users/me@example.com/reviews is used as it is."""
    log_model: bool = True
    """Upload the best model to the tracking server."""
    register_as: FolderName | None = None
    """Register the best model under this name; it gets the alias `best` if it beats the model that has it. On
    Databricks the name has three parts: catalog.schema.name."""


class LimitSettings(Section):
    """Shorter runs for testing."""

    fast_dev_run: FastDevRun = False
    """Train, evaluate, save and predict for a few steps and keep nothing: true, or a number of steps."""
    overfit_batches: Annotated[int, Ge(0)] = 0
    """Train and evaluate on this many batches only, the same in every epoch; 0 = off."""
    train: BatchLimit | None = None
    """Maximum training batches per epoch: a number, or a share such as 10%."""
    eval: BatchLimit | None = None
    """Maximum batches per evaluation: a number, or a share such as 10%."""


class Recipe(Section):
    """All settings of a run. Sections may be given as dictionaries.

    Raises:
        RecipeError: Settings are invalid. The message has one line per mistake: the key, the value found, what is
            allowed, and a suggestion.
    """

    if TYPE_CHECKING:  # the generated signature would reject dictionaries and strings such as "3h", which are accepted

        def __init__(self, **values: Any) -> None: ...

    model: ModelName | ModelSettings
    """Hub name, folder or run of a pretrained model; a model on the tracking server: best:EXPERIMENT or
    models:/NAME@best; or {config: {...}, tokenizer: ...} to train from scratch."""
    task: TaskName | None = None
    """Training objective: classify = predict labels; regress = predict numbers; causal-lm = predict the next token of
    plain text; chat = generate answers in conversations; seq2seq = generate text from text; masked-lm = predict masked
    tokens; null = detected from the data."""
    data: DataSettings
    """What to train on."""
    train: TrainSettings = TrainSettings()
    """How to train."""
    adapter: Literal["none", "lora", "qlora", "ia3", "side", "prompt", "prefix"] | AdapterSettings = "none"
    """Train and save a small adapter instead of all weights: lora, qlora (4-bit base weights), ia3, side, prompt,
    prefix, or a mapping such as {kind: lora, rank: 32, targets: [q_proj, v_proj]}; none = train all weights."""
    distill: DistillSettings | None = None
    """Train the model to reproduce the outputs of a larger one; null = train on labels alone."""
    memory: MemorySettings = MemorySettings()
    """How to fit into memory."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """When and how to evaluate."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """What to save."""
    early_stopping: EarlyStoppingSettings | None = None
    """Stop when evaluation no longer improves; null = never."""
    track: TrackSettings = TrackSettings()
    """Experiment tracking."""
    limits: LimitSettings = LimitSettings()
    """Shorter runs for testing."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Random seed of the row order, dropout, new weights and the evaluation split."""
    name: FolderName | None = None
    """Name of the run; null = the next number."""
    out: Folder | None = None
    """Folder of the run; null = runs/EXPERIMENT/NAME."""

    @classmethod
    def from_file(cls, path: str | Path, sets: Sequence[str] = ()) -> "Recipe":
        """Read a recipe from a YAML file.

        Args:
            path: The file.
            sets: Changes to it, such as "train.epochs=5".

        Raises:
            RecipeError: The recipe is invalid; the message names file, line and key of each mistake.

        Example:
            fit(Recipe.from_file("recipe.yaml", sets=["train.lr=3e-5"]))
        """
        from trimtab.recipe.load import load_recipe

        return load_recipe(Path(path), {}, sets).recipe

    @field_validator("track", mode="before")
    @classmethod
    def _bare_uri(cls, value: Any) -> Any:
        return value if value is None or isinstance(value, Mapping | TrackSettings) else {"uri": value}

    @model_validator(mode="wrap")
    @classmethod
    def _all_mistakes_at_once(cls, values: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        context = info.context or {}
        mistakes: list[Mistake] = list(context.get("mistakes", []))
        recipe: Self | None = None
        values = _with_student(values)
        try:
            recipe = handler(values)
        except ValidationError as error:
            found = explain_errors(error, values, cls)
            mistakes += found
            if isinstance(values, Mapping):
                # Check the rest without the wrong values, so that the user sees all mistakes together.
                recipe = _valid_rest(handler, values, found)
        if recipe is not None:
            wrong = [*(mistake.key for mistake in mistakes), *unknown_keys(recipe)]
            extra_check = context.get("extra_check", lambda recipe: ())
            for mistake in (*find_contradictions(recipe), *extra_check(recipe)):
                if not any(map(mistake.depends_on, wrong)):
                    mistakes.append(mistake)
        if mistakes or recipe is None:
            raise_mistakes(mistakes, context.get("origins", {}))
        return recipe


def _with_student(values: Any) -> Any:
    """A recipe whose model is a part of its teacher, if it does not name a model."""
    distill = values.get("distill") if isinstance(values, Mapping) else None
    settings = distill.model_dump() if isinstance(distill, DistillSettings) else distill
    if not isinstance(settings, Mapping) or values.get("model") is not None:
        return values
    cuts = settings.get("student") is not None and settings.get("teacher") is not None
    return {**values, "model": settings["teacher"]} if cuts else values


def _valid_rest(handler: ModelWrapValidatorHandler[R], values: Mapping[str, Any], found: list[Mistake]) -> R | None:
    try:
        return handler(drop_paths(values, [mistake.path for mistake in found]))
    except ValidationError:
        return None
