"""Ratios of two kernels in one race."""

from __future__ import annotations

import random

import pytest

from fagen.judge.ratios import least_slowdown, rounds_to_tell, slowdown


def test_drift_that_hits_both_cancels_and_only_common_rounds_count() -> None:
    card = [1.0, 1.1, 1.3, 1.2]
    assert slowdown([20 * c for c in card], [10 * c for c in card]) == pytest.approx(2.0)
    assert slowdown([20.0, 22.0], [10 * c for c in card]) == pytest.approx(2.0)


def test_of_21_ratios_the_sixth_is_the_least_that_may_be_the_median() -> None:
    def least(count: int) -> float:
        return least_slowdown([float(i) for i in range(1, count + 1)], [1.0] * count)

    # Of a binomial of 21 halves 0.013 is at most 5, 0.039 at most 6.
    assert [least(n) for n in (1, 5, 6, 11, 21)] == [1.0, 1.0, 1.0, 2.0, 6.0]


@pytest.mark.parametrize("unsure", [0.05, 0.01])
def test_an_interval_misses_the_ratio_as_seldom_as_it_says(unsure: float) -> None:
    dice = random.Random(1)
    runs = 4000
    missed = 0
    for _ in range(runs):
        a = [1.1 * dice.gauss(1, 0.05) for _ in range(21)]
        b = [dice.gauss(1, 0.05) for _ in range(21)]
        missed += least_slowdown(a, b, unsure) > 1.1 * 1.003  # one side of two
    assert missed / runs <= unsure / 2


def test_rounds_to_tell_are_as_many_as_leave_less_than_half_of_the_doubt_on_each_side() -> None:
    for unsure in (0.05, 0.01):
        rounds = rounds_to_tell(unsure)
        assert 0.5**rounds <= unsure / 2 < 0.5 ** (rounds - 1)
