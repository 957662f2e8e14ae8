"""What is tried on each pair of the zoo: one plain step of transformers, then runs of `fit` with one technique each.

A variant returns nothing, or a remark, if it holds. It raises `Fallback` if trimtab says that it does something else,
and fails with any other exception. Results are compared with those of the plain run: training something else is a
failure, too.
"""

import json
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from zoo_pairs import TASKS, shrunk

from trimtab import Recipe, fit, load
from trimtab.inference.generate import generate_texts
from trimtab.model.hub import quiet_transformers
from trimtab.model.tokenizer import train_tokenizer
from trimtab.run import resume

STEPS, MAX_LENGTH = 3, 24
# Losses in fp32 that are summed in another order, after at most three steps of AdamW, which divides by small moments.
TOLERANCE = 2e-3
ROUNDING = 1e-5  # of losses of three steps in fp32 that differ by the order of a sum of gradients
TEXT = "the cat sat on a mat while some dogs ran after it and nobody saw them again"
WORDS = TEXT.split()
ROWS = [
    {
        "text": " ".join(WORDS[start : start + 2 + 5 * start % 9]),
        "label": ("no", "yes")[start % 2],
        "target": WORDS[start],
    }
    for start in range(16)
]
GENERATES = ("causal-lm", "seq2seq")
COLUMNS = {"classify": ("text", "label"), "seq2seq": ("text", "target")}


class Fallback(Exception):
    """The technique was asked for, and trimtab said that it uses something else, and why."""


class Differs(AssertionError):
    """A run that ended, with another result than it should have."""


@dataclass
class Trained:
    """Records a run: a callback."""

    weights: dict = field(default_factory=dict)
    evaluations: list = field(default_factory=list)
    num_trained_tensors: int = 0

    def on_eval(self, state, metrics):
        self.evaluations.append(float(metrics["loss"]))

    def on_end(self, state):
        self.weights = {name: value.detach().clone() for name, value in state.model.state_dict().items()}
        self.trainable = {name for name, value in state.model.named_parameters() if value.requires_grad}


class DiesAt:
    """A callback that kills its process after a step, when the checkpoint of the step before it is on disk."""

    def __init__(self, step, out):
        self._step, self._out = step, out

    def on_step(self, state):
        if state.step == self._step:
            while not (self._out / "checkpoints" / f"step-{self._step - 1}").exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)


class Said(logging.Handler):
    """Keeps what trimtab logs."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Pair:
    """One architecture and one task: its small model in a folder, and the runs with it.

    Args:
        model_type: As transformers names it.
        task: As a recipe names it.
        tokenizer: Folder of a tokenizer.
        folder: For everything that is written.
    """

    def __init__(self, model_type, task, tokenizer, folder):
        self.model_type, self.task, self.tokenizer, self.folder = model_type, task, tokenizer, folder
        self.said = Said()
        logger = logging.getLogger("trimtab")
        logger.handlers[:] = [self.said]
        logger.setLevel(logging.INFO)
        logger.propagate = False

    @cached_property
    def settings(self):
        """Settings of the small model, with the ids of the tokenizer."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.tokenizer)
        ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("pad", "bos", "eos")}
        config = CONFIG_MAPPING[self.model_type]
        if self.task == "seq2seq" or getattr(config, "is_encoder_decoder", False):
            ids["decoder_start_token_id"] = ids["pad_token_id"]
        changes = {"is_decoder": False} if self.model_type == "reformer" and self.task != "causal-lm" else {}
        return shrunk(self.model_type, len(tokenizer)) | ids | changes

    # ------------------------------------------------------------------ variants

    def plain(self):
        """Transformers alone: build the model, write it to a folder, train one step. Not a word of trimtab."""
        settings = dict(self.settings)
        config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
        if self.task == "classify":
            names = dict(enumerate(("no", "yes")))
            config.num_labels, config.id2label = 2, names
            config.label2id = {name: number for number, name in names.items()}
            config.problem_type = "single_label_classification"
        torch.manual_seed(0)
        with quiet_transformers():
            model = getattr(transformers, TASKS[self.task][0]).from_config(config)
            model.save_pretrained(self.base)
            transformers.AutoTokenizer.from_pretrained(self.tokenizer).save_pretrained(self.base)
            batch = self._plain_batch()
            optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
        if not torch.isfinite(loss):
            raise Differs(f"the loss is {float(loss)}")

    def _plain_batch(self):
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.tokenizer)
        texts = tokenizer([row["text"] for row in ROWS[:4]], padding=True, return_tensors="pt")
        batch = {name: texts[name] for name in ("input_ids", "attention_mask")}
        if self.task == "classify":
            return batch | {"labels": torch.tensor([0, 1, 0, 1])}
        if self.task == "seq2seq":
            targets = tokenizer([row["target"] for row in ROWS[:4]], padding=True, return_tensors="pt")
            labels = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, -100)
            # FSMT does not make the inputs of its decoder from labels
            made = {"decoder_input_ids": targets["input_ids"].roll(1, 1)} if self.model_type == "fsmt" else {}
            return batch | {"labels": labels} | made
        return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    def fit(self):
        """Three steps with evaluations; what was saved is what was trained; it predicts."""
        self.reference = self._run("fit", model=str(self.base))
        return self._load_and_predict("fit", self.reference)

    def config(self):
        """The same from scratch: the settings are `model.config` of the recipe."""
        trained = self._run("config", model={"config": self.settings, "tokenizer": self.tokenizer})
        return self._load_and_predict("config", trained)

    def resume(self):
        """Back to the checkpoint of the first step, in this process: the same bits."""
        trained = Trained()
        resume(self.out("fit"), from_step="step-1", callbacks=[trained], progress="quiet", device="cpu")
        self._assert_same_bits(trained)

    def kill(self):
        """A process that kills itself after the second step; another one resumes: the same bits."""
        out = self.out("kill")
        killed = self._forked(lambda: self._run("kill", callbacks=[DiesAt(2, out)], model=str(self.base)))
        if killed != -signal.SIGKILL:
            raise Differs(f"the process ended with {killed} before it was killed")
        trained = Trained()
        result = resume(out, callbacks=[trained], progress="quiet", device="cpu")
        if result.fit.step != STEPS or not any("resum" in line for line in self.said.lines):
            raise Differs("the run was not resumed")
        self._assert_same_bits(trained)

    def recompute(self):
        """All blocks recomputed: the same bits, or at least the same losses, if sums are added up in another order."""
        trained = self._run("recompute", model=str(self.base), memory={"gradient_checkpointing": "all"})
        difference = self._difference(trained)
        if difference:
            self._assert_same_losses(trained, tolerance=ROUNDING)
        return difference

    def chunked(self):
        """Loss in chunks: the same losses."""
        self._assert_same_losses(self._run("chunked", model=str(self.base), memory={"loss": "chunked"}))

    def packed(self):
        """No padding: the same losses, as far as no dropout is drawn."""
        del self.said.lines[:]
        trained = self._run("packed", model=str(self.base), memory={"padding": "none"})
        if trained.plan.padding != "none":
            said = [line for line in self.said.lines if line.startswith("memory.padding: longest, because ")]
            if not said:
                raise Differs("batches are padded, and nothing says why")
            raise Fallback("padded: " + said[0].partition("because ")[2])
        self._assert_same_losses(trained, is_random=self._draws_dropout())

    def lora(self):
        """LoRA on all linear layers: the adapter is trained, saved, loaded with its base, and predicts."""
        trained = self._run("lora", model=str(self.base), adapter={"kind": "lora", "rank": 4})
        second = [name for name in trained.trainable if ".lora_B." in name]
        if not any(trained.weights[name].any() for name in second):
            raise Differs("no adapter was trained")
        return self._load_and_predict("lora", trained)

    # ------------------------------------------------------------------ their parts

    @property
    def base(self):
        return self.folder / "base"

    def out(self, name):
        return self.folder / "runs" / name

    def _run(self, name, callbacks=(), memory=None, **changes):
        trained = Trained()
        recipe = Recipe(
            task=self.task,
            data={"train": self._data("train", 0, 12), "eval": self._data("eval", 12, 16), "max_length": MAX_LENGTH},
            train={"max_steps": STEPS, "batch_size": 4, "lr": 1e-3, "precision": "fp32", "log_every": 1},
            evaluate={"at_start": True},
            memory=memory or {},
            checkpoint={"best": False, "every": "1 steps" if name in ("fit", "kill") else None, "keep": STEPS},
            track="none",
            out=str(self.out(name)),
            **changes,
        )
        result = fit(recipe, callbacks=[trained, *callbacks], progress="quiet", device="cpu")
        trained.plan = result.plan
        trained.losses = _losses(result.folder / "metrics.jsonl")
        values = [*trained.losses, *trained.evaluations]
        if result.fit.step != STEPS or len(trained.evaluations) < 2 or len(trained.losses) != STEPS:
            raise Differs(f"{result.fit.step} steps, {len(trained.evaluations)} evaluations")
        if not all(map(torch.isfinite, map(torch.tensor, values))):
            raise Differs(f"losses are {values}")
        return trained

    def _data(self, name, first, end):
        """A file: a run with rows that are given in Python cannot be resumed."""
        path = self.folder / f"{name}.jsonl"
        columns = COLUMNS.get(self.task, ("text",))
        rows = [{column: row[column] for column in columns} for row in ROWS[first:end]]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def _load_and_predict(self, name, trained):
        """Compare loaded with trained weights, and predict; returns a remark if transformers alone cannot predict."""
        loaded = load(self.out(name), device="cpu")
        weights = loaded.model.state_dict()
        for key, value in trained.weights.items():
            if key not in weights or not torch.equal(weights[key], value):
                stored = load_file(self.out(name) / "best" / "model.safetensors").get(key)
                is_stored = stored is not None and torch.equal(stored, value)
                who = "transformers does not load" if is_stored else "trimtab does not store or load"
                raise Differs(f"{who} {key} as it was trained")
        try:
            self._predict(loaded)
        except Differs:
            raise
        except Exception as error:
            if self.task in GENERATES and not self._generates_without_trimtab():
                return f"transformers cannot generate with this model: {error}"
            raise
        return None

    def _predict(self, loaded):
        texts = [row["text"] for row in ROWS[:3]]
        if self.task == "classify":
            if not set(loaded.predict(texts)) <= {"no", "yes"}:
                raise Differs("it predicts other labels")
        elif self.task == "masked-lm":
            with torch.no_grad():
                inputs = loaded.tokenizer(texts[0], return_tensors="pt", return_token_type_ids=False)
                logits = loaded.model(**inputs).logits
            if not torch.isfinite(logits).all():
                raise Differs("its logits are not finite")
        elif not all(isinstance(text, str) for text in generate_texts(loaded, texts, 3)):
            raise Differs("it generates no text")

    def _generates_without_trimtab(self):
        with quiet_transformers():
            model = getattr(transformers, TASKS[self.task][0]).from_pretrained(self.base).eval()
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.base)
            texts = [row["text"] for row in ROWS[:3]]
            batch = tokenizer(
                texts, padding=True, padding_side="left", return_tensors="pt", return_token_type_ids=False
            )
            try:
                model.generate(**batch, max_new_tokens=3)
            except Exception:
                return False
        return True

    def _draws_dropout(self):
        """Whether the model draws random numbers in training: then other shapes of batches mean other numbers."""
        model = load(self.out("fit"), device="cpu").model.train()
        before = torch.get_rng_state()
        with torch.no_grad():
            model(**self._plain_batch())
        return not torch.equal(before, torch.get_rng_state())

    def _assert_same_bits(self, trained):
        difference = self._difference(trained)
        if difference:
            self._fail(difference)

    def _difference(self, trained):
        """The weight that differs most from that of the plain run, in words; None if all bits are equal."""
        errors = {
            name: float((trained.weights[name].float() - value.float()).abs().max() / value.float().abs().max())
            for name, value in self.reference.weights.items()
            if not torch.equal(trained.weights[name], value)
        }
        if not errors:
            return None
        worst = max(errors, key=errors.__getitem__)
        return f"not the same bits: {worst} differs by {errors[worst]:.1e} of its largest value"

    def _assert_same_losses(self, trained, is_random=False, tolerance=TOLERANCE):
        pairs = [(trained.evaluations[0], self.reference.evaluations[0])]
        pairs += [] if is_random else zip(trained.losses, self.reference.losses, strict=True)
        for found, wanted in pairs:
            if abs(found - wanted) > tolerance * abs(wanted):
                self._fail(f"a loss is {found:.5f}, and {wanted:.5f} without the technique")

    def _fail(self, difference):
        """Fail with a difference, or with the reason if the model is different each time."""
        if not self._is_reproducible:
            raise Differs("two equal runs differ: the model draws numbers from a seed that it does not take from torch")
        raise Differs(difference)

    @cached_property
    def _is_reproducible(self):
        """Whether a second run, equal to the plain one, has the same weights."""
        return self._difference(self._run("again", model=str(self.base))) is None

    @staticmethod
    def _forked(function):
        pid = os.fork()
        if pid == 0:
            try:
                function()
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _losses(journal):
    lines = map(json.loads, journal.read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def make_tokenizer(folder):
    """Write a byte-level tokenizer."""
    train_tokenizer([TEXT], 300).save_pretrained(folder)
    return str(Path(folder))
