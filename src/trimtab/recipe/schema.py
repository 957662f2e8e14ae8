"""The recipe: everything that a run can be told, as one frozen tree with defaults that work.

Each key is documented here and nowhere else: `trimtab init`, the JSON Schema and the error messages use this text.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from annotated_types import Ge, Gt, Lt
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from trimtab.recipe.consistency import contradictions
from trimtab.recipe.describe import Later
from trimtab.recipe.mistakes import Mistake, mistakes_of, refuse, without
from trimtab.recipe.value_types import (
    Allowances,
    BatchLimit,
    BlockRange,
    Budget,
    Column,
    Duration,
    FastDevRun,
    FolderName,
    Interval,
    Labels,
    Metric,
    MicroBatch,
    ModelName,
    Patterns,
    Recomputed,
    Share,
    Source,
    Steps,
    Targets,
    Text,
    Texts,
    TrackingUri,
    Until,
    Warmup,
    tidy,
)

R = TypeVar("R")
Beta = Annotated[float, Ge(0), Lt(1)]
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
    """Base of every part of a recipe: frozen, with no keys but its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _tidy(cls, value: Any, info: ValidationInfo) -> Any:
        return tidy(value, cls.model_fields[info.field_name or ""])


class ModelSettings(Section):
    """A model that needs more than a name; one of `name` and `config`."""

    name: ModelName | None = Field(default=None, description="Hub name or folder of a pretrained model.")
    config: dict[str, Any] | None = Field(
        default=None,
        description="Start from scratch: the model's configuration as transformers writes it, with model_type.",
    )
    tokenizer: Text | None = Field(
        default=None,
        description="Name or folder of the tokenizer; train = learn one from the training texts; null = the model's.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that comes with the model. Only if you trust it."
    )


class DataSettings(Section):
    """What to train on, and which columns hold what."""

    train: Source = Field(
        description="Training rows: csv, tsv, jsonl, json, parquet or txt file, folder, glob, or hub name; "
        "split and slice allowed: imdb:train[:1000], reviews.csv[:80%]."
    )
    eval: Source | None = Field(
        default=None, description="Evaluation rows, written like train; null = split off from train."
    )
    eval_share: Share = Field(
        default=0.1, description="Share of train that is split off, by the seed, where eval is null; 0 = no evaluation."
    )
    text: Texts | None = Field(
        default=None, description="Column with the text; a list of two for sentence pairs; null = guessed and said."
    )
    label: Labels | None = Field(
        default=None, description="Column with the label; a list for several labels a row; null = guessed and said."
    )
    target: Column | None = Field(
        default=None, description="Column with the text to produce (seq2seq); null = guessed and said."
    )
    messages: Column | None = Field(
        default=None, description="Column with a chat: a list of {role, content}; null = guessed and said."
    )
    prompt: Column | None = Field(default=None, description="Column with the question, where a chat is two columns.")
    answer: Column | None = Field(
        default=None, description="Column with the answer, where a chat is two columns; it carries the loss."
    )
    max_length: int | None = Field(
        default=None, ge=2, description="Longest row in tokens, the rest is cut; null = what the model takes."
    )
    on_bad_rows: Literal["stop", "skip"] = Field(
        default="stop",
        description="stop = an error with file and row; skip = leave bad rows out, count and report them.",
    )


class TrainSettings(Section):
    """How to train. Defaults are those of HF Trainer."""

    epochs: float = Field(default=3.0, gt=0, description="Passes over the training rows.")
    max_steps: int | None = Field(default=None, ge=1, description="Optimizer steps to train, in the place of epochs.")
    max_time: Duration | None = Field(
        default=None, description="Save and stop after this long, such as 3h; `trimtab resume` goes on from there."
    )
    batch_size: int = Field(
        default=8,
        ge=1,
        description="Rows of one optimizer step, over all devices; how they are cut is memory.micro_batch.",
    )
    lr: float = Field(default=5e-5, gt=0, description="Highest learning rate; for noam the factor in front.")
    optimizer: OptimizerName = Field(
        default="auto",
        description="Optimizer; 8bit = its state in 8 bits (bitsandbytes), paged = that state moves to host memory "
        "where the GPU has too little; auto = adamw, with adapter: qlora on a GPU paged-adamw8bit.",
    )
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="Averages of Adam and AdamW, 8-bit ones too.")
    eps: float = Field(default=1e-8, gt=0, description="Added to the divisor by adaptive optimizers.")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum of sgd.")
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay; biases and norms are always left out.")
    decay_embeddings: bool = Field(default=True, description="Whether weight decay also acts on embeddings.")
    schedule: Literal["linear", "cosine", "constant", "inverse-sqrt", "noam", "warmup-stable-decay"] = Field(
        default="linear", description="How the learning rate goes after the warmup."
    )
    warmup: Warmup = Field(
        default=0, description="Steps of rising learning rate: a number of steps, or a share such as 6%."
    )
    max_grad_norm: float | None = Field(
        default=1.0, ge=0, description="Clip gradients to this norm; null or 0 = never."
    )
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="Share of the target spread over all classes.")
    precision: Literal["auto", "fp32", "tf32", "fp16", "bf16", "bf16-pure"] = Field(
        default="auto",
        description="fp16 and bf16 are mixed precision; bf16-pure = weights, gradients and optimizer state in bf16, "
        "rounded stochastically; tf32 = fp32 with faster, coarser products on NVIDIA GPUs; auto = bf16 where native, "
        "else fp16 on a GPU, else fp32.",
    )
    freeze: dict[str, Until] = Field(
        default={},
        description="What is not trained, and how long: {base: always}, {base: 200 steps}, {'*.layer.0.*': 1 epoch}; "
        "base = all but the head, else a pattern of module names.",
    )
    group_by_length: bool = Field(
        default=True, description="Batches of rows that are near in length, so that little is padded."
    )
    on_nan: Literal["stop", "skip", "rewind"] = Field(
        default="stop",
        description="When a loss is not finite: stop; skip = leave that step out; rewind = once, back to the last "
        "saved state, and on with other rows.",
    )
    deterministic: bool = Field(
        default=False, description="On a GPU: only kernels that give the same bits every time; slower."
    )
    log_every: Steps = Field(default=10, description="A line of metrics every so many steps.")

    @field_validator("max_grad_norm", mode="after")
    @classmethod
    def _zero_is_off(cls, value: float | None) -> float | None:
        return value or None


class AdapterSettings(Section):
    """Small trained matrices beside the weights of a model that itself stays as it is."""

    kind: Literal["lora", "qlora"] = Field(
        default="lora", description="lora = beside the weights as they are; qlora = beside weights of 4 bits (nf4)."
    )
    rank: int = Field(default=16, ge=1, description="Rank of the matrices: how much an adapter can learn.")
    alpha: float | None = Field(
        default=None, gt=0, description="What an adapter adds is multiplied with alpha / rank; null = twice the rank."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout in front of the adapters.")
    targets: Targets = Field(
        default="all-linear", description="Which modules get an adapter; all-linear = all of the base, not the head."
    )
    layers: BlockRange | None = Field(
        default=None, description="Only in these blocks: first and last, counted from 0; null = in all."
    )
    ranks: dict[str, Annotated[int, Ge(1)]] = Field(
        default={}, description="Other ranks by pattern of module names: {'*.down_proj': 32}; the later pattern wins."
    )
    alphas: dict[str, Annotated[float, Gt(0)]] = Field(default={}, description="Other alphas by pattern.")
    trains: Patterns = Field(
        default=[],
        description="Modules that are trained in full, by pattern, such as [embed_tokens]; a new head always is.",
    )
    rslora: bool = Field(
        default=False, description="Multiply with alpha / √rank: for large ranks, which else learn slowly."
    )


class MemorySettings(Section):
    """How to fit. None of these changes what is computed."""

    budget: Budget | None = Field(
        default=None,
        description="Memory that the run may use, such as 8GiB: it stays within, in smaller micro-batches if need be; "
        "auto = what the device has free; null = no limit.",
    )
    micro_batch: MicroBatch = Field(
        default="auto",
        description="Rows that go through the model at once; auto = as `trimtab plan` chooses on a GPU or with a "
        "budget, else all of train.batch_size.",
    )
    gradient_checkpointing: Recomputed = Field(
        default="auto",
        description="Compute activations again in backward instead of keeping them: all = of every block; {every: 2} = "
        "of every second one; {layers: [0, -1]} = of these; ops = all but matrix products and attention; auto = as "
        "`trimtab plan` chooses on a GPU or with a budget, else none.",
    )
    offload: Literal["auto", "none", "embeddings"] = Field(
        default="auto",
        description="What is kept in host memory: embeddings = the table of token embeddings, if it does not train; "
        "auto = that where an adapter trains and nothing faster fits, else none.",
    )
    allow: Allowances = Field(
        default=[],
        description="What the plan may choose although it changes results a little: 8bit = the optimizer's state in 8 "
        "bits, where memory is short.",
    )
    loss: Literal["auto", "plain", "chunked", "liger"] = Field(
        default="auto",
        description="How the loss of language models is computed: chunked = without a tensor of all logits; liger = "
        "the same by the kernel of liger-kernel; auto = plain where the logits are small.",
    )
    kernels: Literal["auto", "plain", "liger"] = Field(
        default="auto",
        description="Norms and gated products: liger = fused kernels of liger-kernel, which keep less for backward; "
        "auto = liger on an NVIDIA GPU where it is installed and knows the model.",
    )
    attention_backend: Literal["auto", "torch", "cudnn", "flash", "efficient", "math"] = Field(
        default="auto",
        description="Kernel that computes attention, where it can run: cudnn, flash, efficient (memory-efficient) or "
        "math (matrix products); torch = the choice of torch; auto = on Hopper GPUs cudnn where batches have few "
        "shapes, else flash, and torch everywhere else.",
    )
    padding: Annotated[Literal["longest"], Later()] = Field(
        default="longest", description="Rows are padded to the longest of their micro-batch. One way so far."
    )


class EvaluateSettings(Section):
    """When and how to evaluate."""

    every: Interval = Field(
        default="epoch", description="How often: epoch, 500 steps, 10min; and always after the last step."
    )
    metric: Metric | None = Field(
        default=None, description="The metric that chooses the best model; null = the task's own."
    )
    batch_size: int | None = Field(default=None, ge=1, description="Rows of an evaluation batch; null = chosen.")
    at_start: bool = Field(default=False, description="Evaluate also before the first step.")


class CheckpointSettings(Section):
    """What is kept of a run."""

    best: bool | Metric = Field(
        default=True,
        description="Keep the best model, as a Hugging Face folder best/, by evaluate.metric or by a metric named "
        "here; false = keep the last one.",
    )
    every: Interval | None = Field(
        default="10min",
        description="How often the whole state is saved, to resume from: 10min, 500 steps, epoch; and always after the "
        "last step. null = never: a run that is killed is lost.",
    )
    keep: int = Field(default=2, ge=1, description="How many of these states are kept, the newest ones.")
    mirror: Text | None = Field(
        default=None,
        description="A folder in a second place, such as a mounted drive; states and best/ are copied to "
        "MIRROR/EXPERIMENT/NAME.",
    )


class EarlyStoppingSettings(Section):
    """Stop when evaluation no longer improves."""

    metric: Metric | None = Field(default=None, description="What must improve; null = evaluate.metric.")
    mode: Literal["max", "min"] | None = Field(
        default=None, description="Whether more is better; null = known from the metric."
    )
    patience: int = Field(default=3, ge=1, description="Evaluations without improvement before stopping.")
    min_delta: float = Field(default=0.0, ge=0, description="Smallest change that counts as improvement.")


class TrackSettings(Section):
    """Where metrics go besides the run's own folder."""

    uri: TrackingUri = Field(
        default="local",
        description="local = an MLflow store beside the runs (runs/mlflow.db), or MLFLOW_TRACKING_URI where that is "
        "set; or an MLflow server's address; none. `track: none` is the same as {uri: none}.",
    )
    experiment: FolderName | None = Field(
        default=None,
        description="Runs of one experiment lie together: runs/EXPERIMENT/NAME; null = named after the data.",
    )
    log_model: bool = Field(default=True, description="Whether the best model goes to the tracking server, too.")
    register_as: FolderName | None = Field(
        default=None,
        description="Register the best model under this name; it gets the alias `best` if it beats the one before.",
    )


class LimitSettings(Section):
    """Shorter runs, to try things."""

    fast_dev_run: FastDevRun = Field(
        default=False,
        description="A few steps of everything (train, evaluate, save, predict), nothing left behind; or how many.",
    )
    overfit_batches: int = Field(
        default=0, ge=0, description="Train and evaluate on this many batches only, the same each epoch; 0 = off."
    )
    train: BatchLimit | None = Field(
        default=None, description="At most this many training batches an epoch, or this share."
    )
    eval: BatchLimit | None = Field(default=None, description="At most this many evaluation batches, or this share.")


class Recipe(Section):
    """Everything about a run. Sections may be given as mappings.

    Raises:
        RecipeError: With a line for every mistake: the key, the value found, what is allowed, and what was meant.
    """

    if TYPE_CHECKING:  # the fields' own types would forbid mappings and words such as "3h", which are welcome

        def __init__(self, **values: Any) -> None: ...

    model: ModelName | ModelSettings = Field(
        description="Hub name, folder or run of a pretrained model; one on the tracking server: best:EXPERIMENT, "
        "models:/NAME@best; or {config: {...}, tokenizer: ...} to start from scratch."
    )
    task: TaskName | None = Field(
        default=None, description="What the model learns; null = guessed from the data, and said."
    )
    data: DataSettings = Field(description="What to train on.")
    train: TrainSettings = Field(default=TrainSettings(), description="How to train.")
    adapter: Literal["none", "lora", "qlora"] | AdapterSettings = Field(
        default="none",
        description="Train small matrices beside the weights instead of all weights, and save only them: lora, qlora "
        "(beside weights of 4 bits), or a mapping such as {kind: lora, rank: 32, targets: [q_proj, v_proj]}.",
    )
    memory: MemorySettings = Field(default=MemorySettings(), description="How to fit into memory.")
    evaluate: EvaluateSettings = Field(default=EvaluateSettings(), description="When to evaluate, and by what.")
    checkpoint: CheckpointSettings = Field(default=CheckpointSettings(), description="What is kept of the run.")
    early_stopping: EarlyStoppingSettings | None = Field(
        default=None, description="Stop when evaluation no longer improves; null = never."
    )
    track: TrackSettings = Field(default=TrackSettings(), description="Where metrics go besides the run's folder.")
    limits: LimitSettings = Field(default=LimitSettings(), description="Shorter runs, to try things.")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Order of rows, dropout, new weights, the split: all follow from it."
    )
    name: FolderName | None = Field(default=None, description="Name of the run; null = the next number.")
    out: Text | None = Field(default=None, description="Folder of the run; null = runs/EXPERIMENT/NAME.")

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
        try:
            recipe = handler(values)
        except ValidationError as error:
            found = mistakes_of(error, values, cls)
            mistakes += found
            if isinstance(values, Mapping):
                # The rest is looked at as well, so that nobody has to mend a recipe twice.
                recipe = _valid_rest(handler, values, found)
        if recipe is not None:
            wrong = [mistake.key for mistake in mistakes]
            further = context.get("further", lambda recipe: ())
            for mistake in (*contradictions(recipe), *further(recipe)):
                if not any(map(mistake.touches, wrong)):
                    mistakes.append(mistake)
        if mistakes or recipe is None:
            refuse(mistakes, context.get("origins", {}))
        return recipe


def _valid_rest(handler: ModelWrapValidatorHandler[R], values: Mapping[str, Any], found: list[Mistake]) -> R | None:
    try:
        return handler(without(values, [mistake.path for mistake in found]))
    except ValidationError:
        return None
