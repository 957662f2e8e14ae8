"""How much worse a smaller model is: the one number that bounds such as `--max-loss 1%` refer to."""

from collections.abc import Mapping

_HIGHER_IS_BETTER = ("accuracy", "pearson")  # the first that a task has; else the loss


def main_metric(quality: Mapping[str, float]) -> str:
    """Return the metric that bounds refer to: accuracy, Pearson's correlation, or the loss of a language model."""
    return next((name for name in _HIGHER_IS_BETTER if name in quality), "loss")


def quality_loss(original: Mapping[str, float], smaller: Mapping[str, float]) -> float:
    """Return how much worse the second model is; negative if it is better.

    For accuracy and correlation the difference, so 1% is one point; for a loss the relative increase.

    Args:
        original: The metrics of the original model.
        smaller: The metrics of the smaller one on the same rows.
    """
    name = main_metric(original)
    if name != "loss":
        return original[name] - smaller[name]
    return (smaller[name] - original[name]) / max(abs(original[name]), 1e-12)
