"""Predict for one text and format the result as one line."""

from trimtab.inference.classify import classify_texts, regress_texts
from trimtab.inference.generate import generate_texts
from trimtab.inference.load import LoadedModel


def predict_text(loaded: LoadedModel, text: str, *, max_new_tokens: int = 128) -> str:
    """Return the prediction for a text: label and score, a number, or the generated text."""
    if loaded.task_name == "classify":
        prediction = classify_texts(loaded, [text])[0]
        label = prediction.label if isinstance(prediction.label, str) else ", ".join(prediction.label) or "none"
        return f"{label} ({prediction.score:.3f})"
    if loaded.task_name == "regress":
        values = regress_texts(loaded, [text])[0]
        return ", ".join(f"{value:.4f}" for value in (values if isinstance(values, list) else [values]))
    return generate_texts(loaded, [text], max_new_tokens)[0]
