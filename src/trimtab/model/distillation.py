"""The loss of a student: the labels, and the outputs of a frozen teacher, over the same items.

A student learns from the teacher's probabilities at a temperature T (Kullback-Leibler divergence, times T² so that its
gradients do not shrink with T), and optionally from hidden states and attention probabilities. Every term is a mean
over the items (rows or tokens) that the loss of the labels counts, so micro-batches and processes combine exactly.
Terms that compare whole rows (hidden states, attention) count once for every item of the row.

Shapes: B rows, L positions, V tokens or classes, K labels of a row, H heads, D hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trimtab.errors import LossError, RecipeError
from trimtab.model.forward import IGNORED, Batch, run_model
from trimtab.model.losses import StepLoss, build_measure, next_tokens, require_labels, require_logits, with_router_loss
from trimtab.model.router_loss import router_loss

PROBABILITIES, TOKENS = "teacher_log_probs", "teacher_tokens"  # keys of a batch with cached outputs of a teacher
_ROW_KINDS = ("cross-entropy", "binary-cross-entropy")
_PARTS = ("", "encoder_", "decoder_")  # names of a model's outputs


@dataclass(frozen=True)
class LayerTerm:
    """A distance between layers.

    Attributes:
        weight: Its weight in the loss; 0 disables it.
        layers: Maps layers of the student to layers of the teacher; None spaces them evenly and maps the last to the
            last.
    """

    weight: float = 0.0
    layers: Mapping[int, int] | None = None

    def pairs(self, num_student: int, num_teacher: int) -> list[tuple[int, int]]:
        """The layers to compare in models of these sizes.

        Raises:
            RecipeError: A layer does not exist.
        """
        if self.layers is None:
            return [(i, round((i + 1) * num_teacher / num_student) - 1) for i in range(num_student)]
        for layer, size, name in (
            (max(self.layers), num_student, "student"),
            (max(self.layers.values()), num_teacher, "teacher"),
        ):
            if layer >= size:
                raise RecipeError(
                    f"distill: the {name} has {size} layers, and layer {layer} is mapped", f"use layers 0 to {size - 1}"
                )
        return list(self.layers.items())


@dataclass(frozen=True)
class DistillTerms:
    """The terms of a student's loss.

    Attributes:
        temperature: Logits are divided by it.
        alpha: Share of the teacher's probabilities in the loss; the labels have the rest.
        hidden: Distance between hidden states.
        attention: Distance between attention probabilities.
        top_k: Number of most likely tokens to compare, with all others as one; None compares all tokens.
    """

    temperature: float = 2.0
    alpha: float = 0.5
    hidden: LayerTerm = LayerTerm()
    attention: LayerTerm = LayerTerm()
    top_k: int | None = None

    @property
    def outputs(self) -> dict[str, Any]:
        """Arguments that make a model return the compared outputs."""
        wanted = {"output_hidden_states": self.hidden.weight, "output_attentions": self.attention.weight}
        return {name: True for name, weight in wanted.items() if weight}


class DistillationLoss:
    """The loss of a student.

    Args:
        kind: As in `trimtab.model.losses.build_loss`, except "mse".
        shifts_labels: Whether the logits at position t predict the label at t + 1.
        label_smoothing: Label smoothing of the term for the labels.
        terms: The terms and their weights.
        teacher: A frozen model in eval mode, on the student's device; None if batches contain its outputs. It is not a
            module of the student: neither trained nor saved with it.
    """

    def __init__(
        self,
        kind: str,
        *,
        shifts_labels: bool,
        label_smoothing: float,
        terms: DistillTerms,
        teacher: torch.nn.Module | None,
    ) -> None:
        if kind not in (*_ROW_KINDS, "token-cross-entropy"):
            raise RecipeError(f"distill: a {kind} loss has no classes to learn from a teacher", "leave distill out")
        self._kind, self._shifts_labels, self._terms, self._teacher = kind, shifts_labels, terms, teacher
        self._measure = build_measure(kind, shifts_labels=shifts_labels, label_smoothing=label_smoothing)

    def __call__(self, model: torch.nn.Module, batch: Batch) -> StepLoss:
        """Compute the loss of `batch`."""
        require_labels(batch)
        terms = self._terms
        inputs: Any = {name: value for name, value in batch.items() if name not in (PROBABILITIES, TOKENS)}
        theirs = None if self._teacher is None else run_teacher(self._teacher, inputs, terms)
        outputs = run_model(model, {**inputs, **terms.outputs})
        logits = require_logits(model, outputs)
        hard, weight = self._measure(logits.float(), batch["labels"])
        value = hard * (1 - terms.alpha)
        if terms.alpha:
            targets = batch if theirs is None else self._targets(theirs, logits.shape[-1])
            apart = divergence(self._kind, logits, targets, terms.temperature)
            value = value + terms.alpha * terms.temperature**2 * self._mean_of_items(apart, batch["labels"], weight)
        for term, name in ((terms.hidden, "hidden_states"), (terms.attention, "attentions")):
            if term.weight:
                apart = _rows_apart(name, term, outputs, theirs, batch)
                value = value + term.weight * self._mean_of_rows(apart, batch["labels"], weight)
        step = StepLoss(value, weight, logits.detach())
        return with_router_loss(step, router_loss(model, outputs))

    def _targets(self, theirs: Any, num_classes: int) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return soft_targets(self._kind, theirs.logits[..., :num_classes], self._terms)

    def _labels(self, labels: torch.Tensor) -> torch.Tensor:
        return next_tokens(labels) if self._shifts_labels else labels

    def _mean_of_items(self, apart: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | int) -> torch.Tensor:
        if self._kind in _ROW_KINDS:
            return apart.mean()
        assert isinstance(weight, torch.Tensor)
        is_labelled = self._labels(labels) != IGNORED
        return torch.where(is_labelled, apart, 0.0).sum() / weight.clamp(min=1)

    def _mean_of_rows(self, apart_B: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | int) -> torch.Tensor:
        if self._kind in _ROW_KINDS:
            return apart_B.mean()
        assert isinstance(weight, torch.Tensor)
        num_items_B = (self._labels(labels) != IGNORED).sum(1)
        return (apart_B * num_items_B).sum() / weight.clamp(min=1)


@torch.no_grad()
def run_teacher(teacher: torch.nn.Module, batch: Batch, terms: DistillTerms) -> Any:
    """The outputs of a teacher; token types are not passed to a model without embeddings for them."""
    takes_types = (getattr(getattr(teacher, "config", None), "type_vocab_size", None) or 0) > 1
    inputs: Any = {name: value for name, value in batch.items() if name != "token_type_ids" or takes_types}
    return run_model(teacher, {**inputs, **terms.outputs})


def soft_targets(kind: str, logits: torch.Tensor, terms: DistillTerms) -> dict[str, torch.Tensor]:
    """The targets of a student: log-probabilities at the temperature, by their key in a batch.

    With `top_k`, they are those of the most likely tokens and, in the last position, of all others together. For
    several labels per row, they are the logits divided by the temperature.
    """
    scaled = logits.float() / terms.temperature
    if kind == "binary-cross-entropy":
        return {PROBABILITIES: scaled}
    log_p = functional.log_softmax(scaled, -1)
    if terms.top_k is None or terms.top_k >= log_p.shape[-1]:
        return {PROBABILITIES: log_p}
    best, tokens = log_p.topk(terms.top_k, -1)
    return {PROBABILITIES: _with_others(log_p, best, tokens), TOKENS: tokens.int()}


def divergence(
    kind: str, logits: torch.Tensor, targets: Mapping[str, torch.Tensor], temperature: float
) -> torch.Tensor:
    """The Kullback-Leibler divergence of a student from its targets, for every item.

    Args:
        kind: The kind of loss.
        logits: The logits of the student.
        targets: The result of `soft_targets`.
        temperature: The temperature of the targets.
    """
    theirs, tokens = targets[PROBABILITIES], targets.get(TOKENS)
    if kind == "binary-cross-entropy":
        return _binary_divergence(logits.float() / temperature, theirs)
    num_common = logits.shape[-1] if tokens is not None else min(logits.shape[-1], theirs.shape[-1])
    log_q = functional.log_softmax(logits[..., :num_common].float() / temperature, -1)
    if tokens is not None:
        log_q = _with_others(log_q, log_q.gather(-1, tokens.long()), tokens)
    if log_q.shape != theirs.shape:
        raise LossError(
            f"outputs of shape {list(theirs.shape)} of the teacher do not match {list(log_q.shape)} of the student",
            "choose a teacher with the labels and the tokenizer of the student",
        )
    return (theirs.exp() * (theirs - log_q)).sum(-1)


def _with_others(log_p: torch.Tensor, chosen: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Append the log-probability of all other tokens, computed from their sum because 1 minus the rest would cancel."""
    others = log_p.scatter(-1, tokens.long(), -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([chosen, others], -1)


def _binary_divergence(ours_BK: torch.Tensor, theirs_BK: torch.Tensor) -> torch.Tensor:
    if ours_BK.shape != theirs_BK.shape:
        raise LossError("the teacher has different labels from the student", "choose a teacher with the same labels")
    p = theirs_BK.sigmoid()
    yes = functional.logsigmoid(theirs_BK) - functional.logsigmoid(ours_BK)
    no = functional.logsigmoid(-theirs_BK) - functional.logsigmoid(-ours_BK)
    return (p * yes + (1 - p) * no).mean(-1)


# ---------------------------------------------------------------------- layers


def _rows_apart(name: str, term: LayerTerm, ours: Any, theirs: Any, batch: Batch) -> torch.Tensor:
    """The mean distance between layers for each row, over its tokens without padding."""
    distances = []
    for part in _PARTS:
        student, teacher = (_layers(outputs, f"{part}{name}") for outputs in (ours, theirs))
        if not student or not teacher:
            continue
        mask_BL = _token_mask(part, batch, student[0])
        for mine, other in term.pairs(len(student), len(teacher)):
            apart_BL = _distance(student[mine], teacher[other], is_hidden=name == "hidden_states")
            distances.append((apart_BL * mask_BL).sum(1) / mask_BL.sum(1).clamp(min=1))
    if not distances:
        raise LossError(f"the models return no {name}", f"leave distill.{name.partition('_')[0].rstrip('s')} out")
    return torch.stack(distances).mean(0)


def _layers(outputs: Any, name: str) -> Sequence[torch.Tensor]:
    found: Any = getattr(outputs, name, None)
    if not found or found[0] is None:
        return ()
    return tuple(found[1:] if name.endswith("hidden_states") else found)  # the first is the embedding


def _token_mask(part: str, batch: Batch, like: torch.Tensor) -> torch.Tensor:
    if part == "decoder_":
        return (batch["labels"] != IGNORED).float()
    if "attention_mask" in batch:
        return batch["attention_mask"].float()
    return torch.ones((like.shape[0], like.shape[-2]), device=like.device)


def _distance(ours: torch.Tensor, theirs: torch.Tensor, *, is_hidden: bool) -> torch.Tensor:
    """The distance at each position.

    For hidden states (B, L, D): the squared distance divided by the teacher's squared norm, so that a weight means the
    same for all models and layers. For attention (B, H, L, L): the squared distance, summed over the attended
    positions; padding has probability 0 and adds nothing.
    """
    if ours.shape != theirs.shape:
        what = "hidden size" if is_hidden else "number of attention heads"
        raise LossError(
            f"student and teacher differ in their {what}: {list(ours.shape)} and {list(theirs.shape)}",
            "leave distill.hidden and distill.attention out, or choose a student cut out of the teacher",
        )
    ours, theirs = ours.float(), theirs.float()
    squares = (ours - theirs).square().sum(-1)
    if is_hidden:
        return squares / theirs.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return squares.mean(1)
