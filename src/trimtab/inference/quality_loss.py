"""How much worse a smaller model is: the number that bounds such as `--max-loss 1%` refer to."""

from collections.abc import Mapping


def main_metric(quality: Mapping[str, float]) -> str:
    """Return the metric that bounds refer to.

    It is accuracy, F1 if rows have several labels (MCC is then undefined), Pearson's correlation, or the loss of a
    language model.
    """
    if "accuracy" in quality and ("mcc" in quality or "f1" not in quality):
        return "accuracy"
    return next((name for name in ("f1", "pearson") if name in quality), "loss")


def quality_loss(original: Mapping[str, float], smaller: Mapping[str, float]) -> float:
    """Return how much worse the second model is; negative if it is better.

    For accuracy, F1 and correlation it is the difference, so 1% is one point; for a loss it is the relative increase.

    Args:
        original: The metrics of the original model.
        smaller: The metrics of the smaller one on the same rows.
    """
    name = main_metric(original)
    if name != "loss":
        return original[name] - smaller[name]
    return (smaller[name] - original[name]) / max(abs(original[name]), 1e-12)
