"""The search by itself: valid, distinct, covering, reproducible, quick."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields, make_dataclass
from typing import Any

import numpy as np
import optuna
import pytest

from fagen.config import Config
from fagen.generate.families.base import every_choice, knob
from fagen.generate.space import SearchSpace, seeds_of
from fagen.tune.search import VALUES_TIMED, Search
from fagen.tune.seeding import in_any_case, starting_points
from fakes import PROBLEM, TARGET, formula_us, full_space, small_space, space_of


def played(search: Search, count: int, value: Any = formula_us) -> list[Config]:
    """Ask and tell `count` times, or until the space is used up."""
    asked = []
    for _ in range(count):
        config = search.ask()
        if config is None:
            break
        asked.append(config)
        search.tell(config, value(config))
    return asked


def test_seeds_come_first_and_no_config_comes_twice() -> None:
    space = full_space()
    asked = played(Search(space, 0), 150)
    assert asked[: len(space.seeds)] == list(space.seeds)
    assert len(set(asked)) == 150
    assert set(asked) <= set(space.configs)


# O02
def test_a_space_of_twelve_is_covered_once_each_and_then_exhausted() -> None:
    space = small_space(12)
    asked = played(Search(space, 3), 40)
    assert len(asked) == 12
    assert set(asked) == set(space.configs)


# O02
def test_the_same_seed_and_tells_give_the_same_sequence() -> None:
    first, second = (played(Search(full_space(), 7), 60) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("ahead", [1, 8])
def test_every_knob_of_every_family_is_timed_at_two_values_within_56(ahead: int) -> None:
    search, asked, waiting = Search(full_space(), 0), [], []
    for _ in range(56):
        waiting.append(search.ask())
        if len(waiting) == ahead:
            asked.append(waiting.pop(0))
            search.tell(asked[-1], formula_us(asked[-1]))
    short = []
    for family in {c.family for c in full_space().configs}:
        members = [c.knobs for c in full_space().configs if c.family == family]
        mine = [c.knobs for c in [*asked, *waiting] if c.family == family]
        for field in fields(members[0]):
            possible = {getattr(k, field.name) for k in members}
            seen = {getattr(k, field.name) for k in mine}
            if len(seen) < min(VALUES_TIMED, len(possible)):
                short.append(f"{family}.{field.name}")
    assert short == []


def test_a_knob_whose_new_value_fails_is_tried_at_another_config() -> None:
    fails = {"pointer"}
    search = Search(full_space(), 0)
    tried = played(
        search, 60, lambda c: None if getattr(c.knobs, "loads", "") in fails else formula_us(c)
    )
    pointer = [c for c in tried if getattr(c.knobs, "loads", "") == "pointer"]
    assert 2 <= len(pointer) <= 30


def test_the_search_beats_random_choice_within_64() -> None:
    best = min(map(formula_us, full_space().configs))
    found = [min(map(formula_us, played(Search(full_space(), s), 64))) for s in range(5)]
    assert max(found) <= 1.03 * best


def test_all_failures_never_stop_the_search() -> None:
    asked = played(Search(full_space(), 0), 80, lambda config: None)
    assert len(set(asked)) == 80


def test_known_configs_are_not_asked_for_again_and_guide_the_rest() -> None:
    space = full_space()
    first = played(Search(space, 0), 40)
    history = [(c, formula_us(c)) for c in first]
    search = Search(space, 0, history)
    assert search.best_us == min(map(formula_us, first))
    assert not set(played(search, 40)) & set(first)


def test_a_failed_config_of_an_earlier_run_is_not_asked_for_again() -> None:
    space = small_space(12)
    asked = played(Search(space, 0, [(space.configs[0], None)]), 40)
    assert space.configs[0] not in asked
    assert len(asked) == 11


# O01
def test_a_space_that_grew_or_shrank_keeps_what_is_still_valid() -> None:
    whole = small_space(12)
    history = [(c, formula_us(c)) for c in whole.configs[:8]]
    smaller = space_of(whole.configs[4:])
    assert set(played(Search(smaller, 0, history), 40)) == set(whole.configs[8:])
    larger = small_space(40)
    asked = played(Search(larger, 0, history), 80)
    assert set(asked) == set(larger.configs) - {c for c, _ in history}


# O01
def test_renamed_knobs_and_numpy_choices_never_reach_optuna() -> None:
    wide = make_dataclass(
        "Wide",
        [("rows", int, knob(np.int64(64), (np.int64(32), np.int64(64), np.int64(128)), "rows"))],
        frozen=True,
    )
    configs = [Config("wide", knobs) for knobs in every_choice(wide)]
    space = SearchSpace(PROBLEM, TARGET, tuple(configs), (configs[0],), {})
    history = [(c, 5.0) for c in small_space(3).configs]
    asked = played(Search(space, 0, history), 10, lambda c: float(c.knobs.rows))
    assert set(asked) == set(configs)


def test_prior_orders_the_neighbours_of_the_best() -> None:
    @dataclass(frozen=True)
    class Line:
        place: int = knob(0, tuple(range(30)), "place")

    configs = [Config("line", knobs) for knobs in every_choice(Line)]
    space = SearchSpace(PROBLEM, TARGET, tuple(configs), (configs[0],), {})
    search = Search(space, 0, prior=lambda c: 100.0 - c.knobs.place)
    asked = played(search, 4, lambda c: 100.0 - c.knobs.place)
    assert [c.knobs.place for c in asked] == [0, 29, 28, 27]


def test_seeds_take_at_most_half_of_the_trials() -> None:
    space = full_space()
    given = [c for c in space.configs if c not in space.seeds][::50]
    asked = played(Search(space, 0, trials=60, seeds=given), 60)
    assert asked[:30] == given[:30]
    fewer = Search(space, 0, trials=60, seeds=given[:30])
    assert asked == played(fewer, 60)  # what was given beyond half changes nothing


# As a rescale's threshold and its branch: one knob at a time never gets from one to the other.
def test_polish_changes_knobs_together_that_can_only_change_together() -> None:
    @dataclass(frozen=True)
    class Tied:
        left: int = knob(0, tuple(range(6)), "left")
        right: int = knob(0, tuple(range(6)), "right, equal to left")
        free: int = knob(0, tuple(range(6)), "free")

    configs = [Config("tied", k) for k in every_choice(Tied) if k.left == k.right]
    space = SearchSpace(PROBLEM, TARGET, tuple(configs), (configs[0],), {})
    search = Search(space, 0, trials=0, prior=lambda c: 10.0 - c.knobs.left)
    asked = played(search, 5, lambda c: 100.0 - 10 * c.knobs.left + c.knobs.free)
    assert Config("tied", Tied(5, 5, 0)) in asked


def test_polish_also_tries_neighbours_of_a_config_that_is_nearly_as_good_and_unlike() -> None:
    @dataclass(frozen=True)
    class Plain:
        a: int = knob(0, tuple(range(6)), "a")
        b: int = knob(0, tuple(range(6)), "b")
        c: int = knob(0, tuple(range(6)), "c")

    def us(config: Config) -> float:  # a wide bowl at 0, and a narrow, deeper hole at 5
        k = config.knobs
        if (k.a, k.b) == (5, 5):
            return 90.0 - 10 * (k.c == 4)
        return 85.0 + k.a + k.b + k.c

    configs = [Config("plain", knobs) for knobs in every_choice(Plain)]
    seeds = [Config("plain", Plain(0, 0, 0)), Config("plain", Plain(5, 5, 5))]
    space = SearchSpace(PROBLEM, TARGET, tuple(configs), tuple(seeds), {})
    for seed in range(5):
        asked = played(Search(space, seed, prior=lambda c: 1 + abs(c.knobs.c - 4)), 10, us)
        assert min(map(us, asked)) == 80.0


def test_a_lone_tile_shape_is_found_though_the_estimate_knows_nothing_of_it() -> None:
    space = full_space()

    def us(config: Config) -> float:  # one tile shape stands alone, 25 % ahead
        k = config.knobs
        if config.family != "flash":
            return 900.0
        if (k.block_m, k.block_n, k.num_warps, k.num_stages) == (64, 128, 8, 2):
            return 92.0 * (1.15 if k.loads == "pointer" else 1.0) * (1 + 0.1 * bool(k.rescale_tau))
        return formula_us(config) * 1.2

    best = min(map(us, space.configs))
    for seed in range(4):
        given = starting_points(space, [], [])
        search = Search(space, seed, trials=128, seeds=given, prior=formula_us)
        assert min(map(us, played(search, 128, us))) <= 1.02 * best


def test_what_is_built_ahead_is_what_a_run_starts_from() -> None:
    space = full_space()
    ahead = in_any_case(seeds_of(space.problem, space.target))
    assert seeds_of(space.problem, space.target) == space.seeds
    assert len(ahead) >= 6 and {c.family for c in ahead} == {c.family for c in space.seeds}
    neighbours = [c for c in space.configs if c not in ahead][:4]
    first = starting_points(space, [], neighbours)[: 4 + len(ahead)]
    assert set(ahead) < set(first)


def test_optuna_says_nothing_and_keeps_the_users_verbosity(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = optuna.logging.get_verbosity()
    played(Search(full_space(), 0), 40)
    assert optuna.logging.get_verbosity() == before
    assert capfd.readouterr() == ("", "")


def test_an_ask_takes_a_few_milliseconds() -> None:
    search = Search(full_space(), 0)
    took = []
    for _ in range(80):
        begun = time.thread_time()  # of this thread: other load changes little
        config = search.ask()
        took.append(time.thread_time() - begun)
        assert config is not None
        search.tell(config, formula_us(config))
    assert sorted(took)[40] < 0.015  # 2 ms on an idle core
