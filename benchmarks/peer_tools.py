"""How each library trains a work of benchmarks/peers.py, written as its documentation does, and the clock of them all.

A tool is a name with options: `hf-trainer+liger+group`. Every tool runs in a process of its own (`run_tool`).
"""

import gc
import importlib.util
import json
import logging
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peer_works import Work, build_model, read_tokens

MAX_GRAD_NORM = 1.0
LONG_RUN = 5_000  # steps
LORA_RANK, LORA_ALPHA = 16, 32
OPTIONS = {
    "group": "batches of rows of similar length",
    "flatten": "transformers' DataCollatorWithFlattening: a batch is one long row",
    "liger": "Liger's kernels",
    "recompute": "gradient checkpointing of all blocks",
    "compile": "torch.compile of the model",
    "nocudnn": "cuDNN's attention switched off",
}


class EnoughError(Exception):
    """Ends a run of `fit` after the last step, before its model is written."""


@dataclass
class Job:
    """One run of one tool.

    Attributes:
        folder: Has the rows, the tokenizer and the lengths.
        place: A new folder for what the run writes.
        options: Of the tool; for trimtab changes to its recipe.
        checks: Rows in their order, no dropout, and the loss of every step is noted.
        started: When the process was started, by `time.monotonic`.
    """

    work: Work
    folder: Path
    place: Path
    seed: int
    device: str
    options: Sequence[str] = ()
    checks: bool = False
    started: float = 0.0
    step_tokens: list[int] = field(default_factory=list)  # without padding, in the order of the steps
    losses: list[float] = field(default_factory=list)

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def lengths(self) -> list[int]:
        return json.loads((self.folder / "lengths.json").read_text())

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def written_model(self) -> Path:
        return self.place / "model"

    def note_loss(self, loss: Any) -> None:
        if self.checks:
            self.losses.append(float(loss.detach()))


# ---------------------------------------------------------------- the clock


class Clock:
    """Times blocks of steps; the host waits for the device at the ends of blocks only."""

    def __init__(self, num_steps: int, started: float, synchronize: Callable[[], None]) -> None:
        self.num_steps, self.num_done = num_steps, 0
        self._block = max(1, num_steps // 20)
        self._started, self._synchronize = started, synchronize
        self._marks: list[tuple[int, float, float]] = []  # steps done, seconds, CPU seconds
        self.first_step_s = math.nan
        self.loaded_s = math.nan  # when the model was loaded; known of trimtab alone

    def step(self) -> None:
        """An optimizer step was launched."""
        self.num_done += 1
        if self.num_done == 1:
            self._synchronize()
            self.first_step_s = time.monotonic() - self._started
            gc.collect()
        if (self.num_steps - self.num_done) % self._block == 0:
            self._synchronize()
            self._marks.append((self.num_done, time.perf_counter(), time.process_time()))

    def speeds(self, step_tokens: Sequence[int]) -> dict[str, Any]:
        """Tokens per second over the second half of the steps: of each block, their median, and of all together."""
        assert self.num_done == self.num_steps, f"{self.num_done} steps were made, not {self.num_steps}"
        marks = [mark for mark in self._marks if mark[0] >= self.num_steps // 2]
        pairs = list(zip(marks, marks[1:], strict=False))
        assert pairs, "too few steps: take at least 3"
        blocks = [sum(step_tokens[one[0] : two[0]]) / (two[1] - one[1]) for one, two in pairs]
        first, last = marks[0], marks[-1]
        num_tokens = sum(step_tokens[first[0] : last[0]])
        return {
            "tokens_per_s": statistics.median(blocks),
            "tokens_per_s_overall": num_tokens / (last[1] - first[1]),
            "tokens_per_cpu_s": num_tokens / (last[2] - first[2]),
            "step_ms": 1e3 * (last[1] - first[1]) / (last[0] - first[0]),
            "block_tokens_per_s": [round(block) for block in blocks],
        }


class Counting:
    """A collator that counts the tokens of its batches."""

    def __init__(self, collate: Callable[..., Any], step_tokens: list[int]) -> None:
        self._collate, self._step_tokens = collate, step_tokens

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        self._step_tokens.append(sum(len(row["input_ids"]) for row in rows))
        return self._collate(rows)


# ---------------------------------------------------------------- parts that the peers share


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def missing_packages(tool: str, job: Job) -> list[str]:
    """What a tool needs for a job and is not installed."""
    needed = {"hf-trainer": ["accelerate"], "accelerate": ["accelerate"], "lightning": ["lightning"]}.get(tool, [])
    if "lightning" in needed and is_installed("pytorch_lightning"):
        needed = []
    needed += ["liger_kernel"] * ("liger" in job.options) + ["bitsandbytes"] * (job.work.adapter == "qlora")
    return [name for name in needed if not is_installed(name)]


def peer_model(job: Job, applies_liger: bool = True) -> Any:
    """The model with its adapter and the options that do not belong to one library."""
    import torch

    model = build_model(job.folder, job.work, job.seed, job.device)
    if "liger" in job.options and applies_liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if "flatten" in job.options and is_installed("flash_attn"):
        model.set_attn_implementation("flash_attention_2")
    if job.work.adapter != "none":
        from peft import LoraConfig, get_peft_model

        settings = {"r": LORA_RANK, "lora_alpha": LORA_ALPHA, "target_modules": "all-linear"}
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    if job.is_cuda:
        torch.cuda.reset_peak_memory_stats()  # as `fit` does before its first step
    return model


def prepared_model(job: Job) -> Any:
    """The same with what HF Trainer does itself."""
    model = peer_model(job)
    if "recompute" in job.options:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "compile" in job.options:
        model.compile()
    return model


def rows_and_collator(job: Job) -> tuple[list[dict[str, Any]], Counting]:
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, DataCollatorWithFlattening, DataCollatorWithPadding

    rows = read_tokens(job.folder, job.work, job.max_length)
    tokenizer = AutoTokenizer.from_pretrained(job.folder / "tokenizer")
    if "flatten" in job.options:
        collate = DataCollatorWithFlattening()
    elif job.work.task == "classify":
        collate = DataCollatorWithPadding(tokenizer)
    else:
        collate = DataCollatorForSeq2Seq(tokenizer)  # pads labels too
    return rows, Counting(collate, job.step_tokens)


def peer_loader(job: Job) -> Any:
    from torch.utils.data import DataLoader
    from transformers.trainer_pt_utils import LengthGroupedSampler

    rows, collate = rows_and_collator(job)
    order: dict[str, Any] = {"shuffle": not job.checks}
    if "group" in job.options and not job.checks:
        order = {"sampler": LengthGroupedSampler(job.work.batch_size, lengths=[len(row["input_ids"]) for row in rows])}
    return DataLoader(rows, job.work.batch_size, collate_fn=collate, pin_memory=job.is_cuda, **order)


def peer_optimizer(job: Job, model: Any) -> tuple[Any, Any]:
    """Fused AdamW (with 4-bit weights on a GPU the paged 8-bit one) and a linear schedule."""
    import torch
    from transformers import get_linear_schedule_with_warmup

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if job.work.adapter == "qlora" and job.is_cuda:
        from bitsandbytes.optim import PagedAdamW8bit

        optimizer = PagedAdamW8bit(parameters, lr=job.work.lr, weight_decay=0.0)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=job.work.lr, weight_decay=0.0, fused=True)
    return optimizer, get_linear_schedule_with_warmup(optimizer, 0, job.work.num_steps)


# ---------------------------------------------------------------- the tools


def plain_torch(job: Job, clock: Clock) -> None:
    """A loop without any library: autocast, fused AdamW, clipping."""
    import torch

    model = prepared_model(job)
    optimizer, schedule = peer_optimizer(job, model)
    autocast = torch.autocast(job.device.partition(":")[0], torch.bfloat16, enabled=job.work.precision == "bf16")
    for batch in peer_loader(job):
        batch = {name: tensor.to(job.device, non_blocking=True) for name, tensor in batch.items()}
        with autocast:
            loss = model(**batch).loss
        loss.backward()
        job.note_loss(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.step()
    save_if_whole(job, model)


def hf_trainer(job: Job, clock: Clock) -> None:
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Tick(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.step()

    class Noting(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            job.note_loss(loss[0] if isinstance(loss, tuple) else loss)
            return loss

    is_paged = job.work.adapter == "qlora" and job.is_cuda
    sampling = "group_by_length" if "group" in job.options else "random"
    arguments = TrainingArguments(
        output_dir=str(job.place / "hf-trainer"),
        max_steps=job.work.num_steps,
        per_device_train_batch_size=job.work.batch_size,
        learning_rate=job.work.lr,
        max_grad_norm=MAX_GRAD_NORM,
        optim="paged_adamw_8bit" if is_paged else "adamw_torch_fused",
        train_sampling_strategy="sequential" if job.checks else sampling,
        bf16=job.work.precision == "bf16",
        use_liger_kernel="liger" in job.options,
        gradient_checkpointing="recompute" in job.options,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        torch_compile="compile" in job.options,
        seed=job.seed,
        use_cpu=not job.is_cuda,
        dataloader_pin_memory=job.is_cuda,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = peer_model(job, applies_liger=False)
    rows, collate = rows_and_collator(job)
    trainer = (Noting if job.checks else Trainer)(model, arguments, collate, rows, callbacks=[Tick()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    save_if_whole(job, trainer.model)


def accelerate(job: Job, clock: Clock) -> None:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=not job.is_cuda, mixed_precision="bf16" if job.work.precision == "bf16" else "no")
    model = prepared_model(job)
    set_seed(job.seed)
    model, optimizer, schedule, loader = accelerator.prepare(model, *peer_optimizer(job, model), peer_loader(job))
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        job.note_loss(loss)
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        clock.step()
    save_if_whole(job, accelerator.unwrap_model(model))


def lightning(job: Job, clock: Clock) -> None:
    import torch

    if is_installed("lightning"):
        import lightning
    else:  # the same under its other name
        import pytorch_lightning as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = prepared_model(job)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.model(**batch).loss
            job.note_loss(loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer, schedule = peer_optimizer(job, self.model)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            # its own clipping refuses fused optimizers in mixed precision
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)

    class Tick(lightning.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            clock.step()

    lightning.seed_everything(job.seed, verbose=False)
    module = Module()
    precision = {"bf16": "bf16-mixed", "bf16-pure": "bf16-true", "fp32": "32-true"}[job.work.precision]
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options |= {"max_steps": clock.num_steps, "precision": precision}
    accelerator = "gpu" if job.is_cuda else "cpu"
    trainer = lightning.Trainer(accelerator=accelerator, devices=1, callbacks=[Tick()], **options)
    trainer.fit(module, peer_loader(job))
    save_if_whole(job, module.model)


def trimtab(job: Job, clock: Clock) -> None:
    """Through `fit` with a recipe; the options are changes to it."""
    import yaml

    from trimtab import fit
    from trimtab.recipe.load import load_recipe

    class Tick:
        def on_step(self, state: Any) -> None:
            clock.step()
            if state.step == clock.num_steps and not job.work.is_whole_run:
                raise EnoughError

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if " parameters in " in record.getMessage() and math.isnan(clock.loaded_s):
                clock.loaded_s = time.monotonic() - job.started

    logging.getLogger("trimtab").addHandler(Watch())
    logging.getLogger("trimtab").setLevel(logging.INFO)
    path = job.place / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_of(job)))
    loaded = load_recipe(path, {}, [], job.options)
    job.step_tokens[:] = tokens_of_steps(loaded.recipe, job)
    try:
        result = fit(loaded, callbacks=[Tick()], progress="quiet", device=job.device)
        assert result.fit.num_tokens == sum(job.step_tokens), "`fit` counted other tokens"
        job.written_model.symlink_to(result.best)
    except EnoughError:
        pass
    if job.checks:
        lines = (Path(loaded.recipe.out) / "metrics.jsonl").read_text().splitlines()
        job.losses[:] = [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def planned_steps(job: Job) -> int:
    """Steps of the recipe. A run whose steady state is measured is the beginning of a long one, and planned as such."""
    is_cut = not job.work.is_whole_run and not job.checks
    return max(LONG_RUN, job.work.num_steps) if is_cut else job.work.num_steps


def recipe_of(job: Job) -> dict[str, Any]:
    """The work as a recipe: only what is not a default."""
    work = job.work
    named = str(job.folder / f"start-{job.seed}")
    recipe: dict[str, Any] = {
        "model": {"config": work.config, "tokenizer": str(job.folder / "tokenizer")} if work.config else named,
        "task": work.task,
        "data": {"train": str(job.folder / "train.jsonl"), "eval_share": 0, "max_length": job.max_length},
        "train": {"max_steps": planned_steps(job), "batch_size": work.batch_size, "lr": work.lr}
        | {"precision": work.precision},
        "checkpoint": {"every": None, "best": False},
        "track": "none",
        "seed": job.seed,
        "out": str(job.place / "trimtab"),
    }
    if work.adapter != "none":
        recipe["adapter"] = {"kind": work.adapter, "rank": LORA_RANK, "alpha": LORA_ALPHA}
    if job.checks:
        recipe["train"] |= {"log_every": 1, "group_by_length": False}
        recipe["limits"] = {"overfit_batches": work.num_steps}  # in the order of the file
    return recipe | work.recipe


def tokens_of_steps(recipe: Any, job: Job) -> list[int]:
    """Tokens of every optimizer step: the rows of a batch follow from seed and epoch, however they are computed."""
    from trimtab.data.batching import epoch_batches

    lengths, found = job.lengths, []
    options = {"seed": recipe.seed, "group_by_length": recipe.train.group_by_length, "shuffle": not job.checks}
    for epoch in range(math.ceil(job.work.num_steps * recipe.train.batch_size / len(lengths))):
        batches = epoch_batches(lengths, recipe.train.batch_size, epoch=epoch, **options)
        found += [sum(lengths[row] for row in batch) for batch in batches]
    return found[: job.work.num_steps]  # the last batch of an epoch may be smaller, and steps end with it


def save_if_whole(job: Job, model: Any) -> None:
    if job.work.is_whole_run:
        model.save_pretrained(job.written_model)


TOOLS: dict[str, Callable[[Job, Clock], None]] = {
    "trimtab": trimtab,
    "hf-trainer": hf_trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "torch": plain_torch,
}


def parse(name: str) -> tuple[str, list[str]]:
    """A tool and its options: `hf-trainer+liger`, or `trimtab memory.padding=none train.compile=blocks`.

    Raises:
        ValueError: There is no such tool or option.
    """
    tool, *changes = name.split()
    tool, *options = tool.split("+")
    known = OPTIONS if tool != "trimtab" else {}
    unknown = [option for option in options if option not in known]
    if tool not in TOOLS or unknown or (changes and tool != "trimtab"):
        raise ValueError(f"{name!r} is not a tool; tools: {', '.join(TOOLS)}, options of peers: +{', +'.join(OPTIONS)}")
    return tool, [*options, *changes]


# ---------------------------------------------------------------- one run


def run_tool(name: str, job: Job) -> dict[str, Any]:
    """Train with a tool in this process; return what was measured, or why there is nothing."""
    import torch

    tool, options = parse(name)
    job = replace(job, options=options)
    if missing := missing_packages(tool, job):
        return {"failure": f"not installed: {', '.join(missing)}"}
    if job.is_cuda:
        limit_memory(job, tool)
    if "nocudnn" in options:
        torch.backends.cuda.enable_cudnn_sdp(False)
    clock = Clock(job.work.num_steps, job.started, torch.cuda.synchronize if job.is_cuda else lambda: None)
    try:
        TOOLS[tool](job, clock)
    except torch.OutOfMemoryError:
        return {"failure": "out of memory"}
    found = {"wall_s": time.monotonic() - job.started, "first_step_s": clock.first_step_s, **peaks(job)}
    if not math.isnan(clock.loaded_s):
        found["loaded_to_first_step_s"] = clock.first_step_s - clock.loaded_s
    num_tokens = sum(job.step_tokens[: clock.num_steps])
    assert num_tokens == sum(job.lengths), f"{num_tokens:,} tokens were trained on, not {sum(job.lengths):,}"
    found |= clock.speeds(job.step_tokens) | {"num_tokens": num_tokens}
    plan = job.place / "trimtab" / "plan.json"
    if plan.exists():
        found["plan"] = dict(plan_values(json.loads(plan.read_text())))
    if job.losses:
        found["losses"] = job.losses
    if job.work.is_whole_run and not job.checks:
        found["accuracy"] = judge(job)
    return found


def limit_memory(job: Job, tool: str) -> None:
    """Hold a peer to the budget; trimtab holds itself to it."""
    import torch

    if job.work.budget_gib is not None and tool != "trimtab":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(job.work.budget_gib * 2**30 / total)


def peaks(job: Job) -> dict[str, int]:
    import torch

    if job.is_cuda:
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return {"peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def plan_values(plan: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The plan of a run of trimtab, without what is long."""
    for key, value in plan.items():
        if isinstance(value, str | int | float | bool) or value is None:
            yield key, value


def judge(job: Job) -> float:
    """The share of test rows that the written model labels rightly, in fp32, the same way for every tool."""
    from quality import accuracy, load_classifier, tokenize
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.folder / "tokenizer")
    rows = [json.loads(line) for line in (job.folder / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    examples = tokenize(tokenizer, rows, job.max_length)
    return accuracy(load_classifier(job.written_model), tokenizer, examples, job.device)


def quiet_libraries() -> None:
    """Set what has to be set before the libraries are imported."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # HF Trainer would spread a batch over all GPUs
    if not sys.warnoptions:
        import warnings

        warnings.simplefilter("ignore")
