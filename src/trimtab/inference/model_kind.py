"""The kind of a saved model: the task for which it has a head."""

from typing import Any

from trimtab.errors import ModelError, as_argument

KINDS_OF_TASKS = {
    "classify": "sequence-classification",
    "regress": "sequence-classification",
    "causal-lm": "causal-lm",
    "chat": "causal-lm",
    "seq2seq": "seq2seq-lm",
    "masked-lm": "masked-lm",
}
# Tables of transformers' auto classes; a class in several of them counts for the first one.
_TABLES = {
    "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq-lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}


def model_kind(name: str, config: Any, task: str | None = None) -> str:
    """Return the kind of a model from its task, or else from the class that it was saved from.

    Args:
        name: Its name in errors.
        config: Its config.
        task: The task that trimtab trained it for; None if unknown. Some classes are used for several tasks: BART's is
            trained with masked-lm as well as with seq2seq.

    Raises:
        ModelError: If that class has no head for a task.
    """
    if str(task) in KINDS_OF_TASKS:
        return KINDS_OF_TASKS[str(task)]
    architecture = next(iter(getattr(config, "architectures", None) or []), None)
    if architecture is None or architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal-lm"
    if architecture.endswith("ForSequenceClassification"):
        return "sequence-classification"
    if architecture.endswith("ForMaskedLM"):
        return "masked-lm"
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False) and not architecture.endswith("Model")
    if is_encoder_decoder or architecture in ("EncoderDecoderModel", "MarianMTModel"):
        return "seq2seq-lm"
    for kind, table in _TABLES.items():
        if architecture in _classes_in(table):
            return kind
    raise ModelError(
        f"{name} is a {architecture}, which has no task head",
        f"train one: trimtab train --model {as_argument(name)} --data FILE",
    )


def _classes_in(table: str) -> set[str]:
    from transformers.models.auto import modeling_auto

    found: set[str] = set()
    for names in getattr(modeling_auto, table).values():
        found.update([names] if isinstance(names, str) else names)
    return found
