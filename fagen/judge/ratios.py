"""Ratios of two kernels' times in one race: their sample i was taken at nearly the same moment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

UNSURE = 0.05  # how often an interval of a ratio may miss it


def slowdown(a_us: Sequence[float], b_us: Sequence[float]) -> float:
    """The median of a / b over the rounds that both were in: drift hits both and cancels."""
    return median(_ratios(a_us, b_us))


def least_slowdown(a_us: Sequence[float], b_us: Sequence[float], unsure: float = UNSURE) -> float:
    """The lower end of the interval that holds the median ratio in all but `unsure` of races: an
    order statistic, by the binomial of the sign test; with too few rounds, and with nothing
    unsure, the smallest ratio."""
    ratios = sorted(_ratios(a_us, b_us))
    below, rank = 0.0, 0
    while (below := below + math.comb(len(ratios), rank) / 2 ** len(ratios)) <= unsure / 2:
        rank += 1
    return ratios[max(0, rank - 1)]


def rounds_to_tell(unsure: float) -> int:
    """With fewer than these even ratios that are all alike leave it open who is faster."""
    return math.ceil(math.log2(2 / unsure))


def _ratios(a_us: Sequence[float], b_us: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(a_us, b_us, strict=False)]
