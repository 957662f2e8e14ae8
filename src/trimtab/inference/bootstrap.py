"""Bootstrap intervals and paired tests: how much a metric depends on the choice of evaluated rows.

Shapes: N rows, R resamples.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.inference.row_scores import RowScores

NUM_RESAMPLES = 1000
_MAX_WEIGHTS = 2**22  # size of one block of resamples: 32 MiB in fp64
_MAX_RANKED = 2**29  # maximum number of scores to rank for the AUC of all resamples
_TAIL = 0.025  # share on each side of a 95% interval


@dataclass(frozen=True)
class PairedDifference:
    """The difference of a metric between two models on the same rows.

    Args:
        first: Value of the first model.
        second: Value of the second model.
        low: Lower end of the 95% interval of `second - first`.
        high: Upper end.
        p_value: Probability of a difference at least as large if both models were equally good.
        test: "McNemar" (exact) or "bootstrap".
    """

    first: float
    second: float
    low: float
    high: float
    p_value: float
    test: str


def resampled_metrics(scores: RowScores, num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> dict[str, Tensor]:
    """Compute every metric on rows drawn with replacement: shape [R] each.

    Equal numbers of rows and seeds give the same draws, which makes the resamples of two models pairs. AUC is left out
    if there are too many rows and labels to rank them in each resample.
    """
    num_ranked = scores.outputs_NK.numel() * num_resamples
    found: dict[str, list[Tensor]] = {}
    for weights in _resamples(len(scores), num_resamples, seed):
        for name, values in scores.metrics(weights, auc=num_ranked <= _MAX_RANKED).items():
            found.setdefault(name, []).append(values)
    return {name: torch.cat(values) for name, values in found.items()}


def interval_of(values_R: Tensor) -> tuple[float, float]:
    """Return the 95% percentile interval; resamples in which a metric is undefined do not count."""
    low, high = values_R.nanquantile(torch.tensor([_TAIL, 1 - _TAIL], dtype=values_R.dtype)).tolist()
    return low, high


def paired_differences(first: RowScores, second: RowScores, *, seed: int = 0) -> dict[str, PairedDifference]:
    """Test whether two models differ on the same rows: accuracy with McNemar's exact test, the rest by bootstrap."""
    everything = torch.ones(1, len(first), dtype=torch.float64)
    values = [scores.metrics(everything) for scores in (first, second)]
    resampled = [resampled_metrics(scores, seed=seed) for scores in (first, second)]
    found = {}
    for name in resampled[0]:
        differences = resampled[1][name] - resampled[0][name]
        p_value, test = _bootstrap_p_value(differences), "bootstrap"
        if name == "accuracy":
            p_value, test = mcnemar(first.hits_N, second.hits_N), "McNemar"
        one, other = (each[name].item() for each in values)
        found[name] = PairedDifference(one, other, *interval_of(differences), p_value, test)
    return found


def mcnemar(first_hits_N: Tensor, second_hits_N: Tensor) -> float:
    """Return the two-sided p-value of McNemar's exact test: is each model as often the only one that is right?"""
    only_first = int(((first_hits_N > 0) & (second_hits_N == 0)).sum())
    only_second = int(((first_hits_N == 0) & (second_hits_N > 0)).sum())
    num, least = only_first + only_second, min(only_first, only_second)
    ways = torch.arange(least + 1, dtype=torch.float64)
    log_ways = math.lgamma(num + 1) - torch.lgamma(ways + 1) - torch.lgamma(num - ways + 1)
    return min(1.0, 2 * math.exp(float(log_ways.logsumexp(0)) - num * math.log(2)))


def _bootstrap_p_value(differences_R: Tensor) -> float:
    """Return twice the share of resamples on the far side of 0, but not less than their number can resolve."""
    known = differences_R[~differences_R.isnan()]
    least = min(int((known <= 0).sum()), int((known >= 0).sum()))
    return min(1.0, 2 * (least + 1) / (len(known) + 1))


def _resamples(num_rows: int, num_resamples: int, seed: int) -> Iterator[Tensor]:
    """Yield blocks of weights: how often each row was drawn."""
    generator = torch.Generator().manual_seed(seed)
    per_block = max(1, _MAX_WEIGHTS // num_rows)
    for start in range(0, num_resamples, per_block):
        size = min(per_block, num_resamples - start)
        drawn = torch.randint(num_rows, (size, num_rows), generator=generator)
        ones = torch.ones(1, dtype=torch.float64).expand_as(drawn)
        yield torch.zeros(size, num_rows, dtype=torch.float64).scatter_add_(1, drawn, ones)
