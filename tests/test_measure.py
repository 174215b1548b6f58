"""Timing: what is sampled, in which order, which times are refused. A fake clock throughout."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from fagen.errors import MeasureError
from fagen.judge.measure import (
    CLEAR,
    CLEAR_ROUNDS,
    Bar,
    MeasurePolicy,
    WallClock,
    impossible,
    measure,
    race,
    turns,
)
from fagen.judge.ratios import rounds_to_tell
from fagen.problem import make_problem
from fagen.target import PRESETS

FAST = MeasurePolicy(warmup_ms=0.0, batch_ms=1.0, samples=5, pause_ms=0.0)
H200 = PRESETS["h200"]


class FakeClock:
    """A launch says by itself how long it takes: the value it leaves in `us`."""

    def __init__(self) -> None:
        self.us = 0.0
        self.batches: list[tuple[int, int]] = []
        self.replays: list[str] = []

    def batch(
        self, launch: Callable[[int], None], launches: int, sets: int
    ) -> Callable[[], float]:
        self.batches.append((launches, sets))

        def replay() -> float:
            launch(0)
            return self.us

        return replay

    def clock_mhz(self) -> int | None:
        return 1980

    def launch(self, name: str, *times: float) -> Callable[[int], None]:
        left = list(times)

        def run(_: int) -> None:
            self.replays.append(name)
            self.us = left.pop(0) if len(left) > 1 else left[0]

        return run


def test_samples_are_kept_raw_and_in_order() -> None:
    clock = FakeClock()
    # Two replays size the batch, one warms up; then the samples, each after an untimed replay.
    times = (10, 12, 11, 30, 9)
    paired = [us for sample in times for us in (99, sample)]
    timing = measure(clock.launch("a", 50, 50, 50, *paired), FAST, "cpu", clock=clock)
    assert timing.samples_us == times
    assert timing.median_us == 11
    assert timing.policy == FAST.name
    assert timing.clock_mhz == (1980,) * 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_time_that_cannot_be_is_an_error(bad: float) -> None:
    clock = FakeClock()
    with pytest.raises(MeasureError, match="timed at"):
        measure(clock.launch("a", bad), FAST, "cpu", clock=clock)
    with pytest.raises(MeasureError, match="timed at"):
        measure(clock.launch("a", 5, 5, 5, 5, bad), FAST, "cpu", clock=clock)


@pytest.mark.parametrize(
    ("us", "samples"), [(301.0, 1), (299.0, 2), (111.0, 2), (109.0, 5), (50.0, 5)]
)
def test_a_candidate_that_is_clearly_slower_is_given_up_early(us: float, samples: int) -> None:
    clock = FakeClock()
    timing = measure(clock.launch("a", us), FAST, "cpu", give_up_us=100.0, clock=clock)
    assert timing.samples_us == (us,) * samples
    if samples == 1:
        assert len(clock.replays) == 2
    clock = FakeClock()
    assert len(measure(clock.launch("a", us), FAST, "cpu", clock=clock).samples_us) == 5


def test_one_outlier_loses_no_candidate() -> None:
    clock = FakeClock()
    # Two replays size the batch, one warms up; then an untimed one before each sample.
    times = (101, 101, 101, 101, 250, 101, 100, 101, 101, 101, 102, 101, 99)
    timing = measure(clock.launch("a", *times), FAST, "cpu", give_up_us=100.0, clock=clock)
    assert timing.samples_us == (250, 100, 101, 102, 99)


@pytest.mark.parametrize(
    ("us", "sets", "launches"), [(10.0, 1, 100), (10.0, 7, 105), (5000.0, 4, 4), (0.1, 3, 510)]
)
def test_a_batch_is_long_enough_and_whole_rounds_of_the_sets(
    us: float, sets: int, launches: int
) -> None:
    clock = FakeClock()
    measure(clock.launch("a", us), FAST, "cpu", sets=sets, clock=clock)
    assert clock.batches[-1] == (launches, sets)


def test_a_race_takes_turns_in_an_order_that_changes() -> None:
    clock = FakeClock()
    entries = {name: clock.launch(name, us) for name, us in (("a", 10), ("b", 20), ("c", 30))}
    timings = race(entries, FAST, 4, clock=clock)
    taken = clock.replays[-24:]  # each turn replays twice, the first time untimed
    assert "".join(taken[::2]) == "abc" + "cba" + "bca" + "acb"
    assert taken[::2] == taken[1::2]
    assert {name: t.samples_us for name, t in timings.items()} == {
        "a": (10,) * 4,
        "b": (20,) * 4,
        "c": (30,) * 4,
    }


def test_the_card_rests_before_each_sample_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(time, "sleep", lambda s: clock.replays.append(f"{s * 1e3:g} ms"))
    measure(clock.launch("a", 10), replace(FAST, pause_ms=25.0), "cpu", clock=clock)
    assert clock.replays[3:] == ["25 ms", "a", "a"] * FAST.samples


def test_the_card_rests_before_each_turn_of_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(time, "sleep", lambda s: clock.replays.append(f"{s * 1e3:g} ms"))
    entries = {name: clock.launch(name, us) for name, us in (("a", 10), ("b", 20))}
    race(entries, replace(FAST, pause_ms=25.0), 2, clock=clock)
    first, second = ["25 ms", "a", "a"], ["25 ms", "b", "b"]
    assert clock.replays[-12:] == [*first, *second, *second, *first]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 13])
def test_each_contestant_follows_every_other_alike(count: int) -> None:
    names = [str(i) for i in range(count)]
    rounds = count * (1 + count % 2)
    taken = list(turns(names, rounds))
    orders = [taken[at : at + count] for at in range(0, len(taken), count)]
    assert all(sorted(order) == sorted(names) for order in orders)
    followed = Counter(pair for order in orders for pair in pairwise(order))
    assert len(followed) == count * (count - 1)
    assert set(followed.values()) == {rounds // count}


def test_drift_meets_all_contestants_alike() -> None:
    clock = FakeClock()
    now = [0]

    def drifting(us: float) -> Callable[[int], None]:
        def run(_: int) -> None:
            now[0] += 1
            clock.us = us * (1 + now[0] / 100)

        return run

    timings = race({"a": drifting(100), "b": drifting(101)}, FAST, 8, clock=clock)
    ratio = timings["b"].median_us / timings["a"].median_us
    assert 0.99 < ratio < 1.03


def test_who_is_clearly_slower_leaves_a_race_when_told_to() -> None:
    def raced(*rivals: str) -> dict[str, int]:
        clock = FakeClock()
        times = {"best": 100, "near": 109, "far": 112, "once": 100}
        entries = {name: clock.launch(name, us) for name, us in times.items()}
        # Two replays size the batch, one warms up; of its first three samples one is not slow.
        entries["once"] = clock.launch("once", *[300] * 3, 0.1, 300, 0.1, 100, 0.1, 300, 300)
        found = race(entries, FAST, 7, clock=clock, rivals=rivals)
        return {name: len(timing.samples_us) for name, timing in found.items()}

    assert raced() == dict.fromkeys(("best", "near", "far", "once"), 7)
    assert raced("best", "near", "far", "once") == {
        "best": 7,
        "near": 7,
        "far": CLEAR_ROUNDS,
        "once": 7,
    }


def test_who_is_a_little_slower_in_every_round_leaves_when_that_can_be_no_chance() -> None:
    clock = FakeClock()
    times = {"best": 100.0, "tied": 100.4, "slower": 100.5, "noisy": 101.0}
    entries = {name: clock.launch(name, us) for name, us in times.items()}
    # Two replays size the batch, one warms up; an untimed one is before each sample.
    once = [101.0, 101.0] * 3 + [101.0, 99.0] + [101.0, 101.0] * 8
    entries["noisy"] = clock.launch("noisy", *[101.0] * 3, *once)
    found = race(entries, FAST, 12, clock=clock, rivals=tuple(entries))
    rounds = {name: len(timing.samples_us) for name, timing in found.items()}
    assert rounds == {"best": 12, "tied": 12, "slower": rounds_to_tell(CLEAR), "noisy": 12}


def test_a_race_of_noisy_equals_keeps_nearly_all_of_them() -> None:
    left = 0
    for seed in range(100):
        dice, clock = random.Random(seed), FakeClock()
        entries = {name: clock.launch(name, *_noisy(dice, 100.0)) for name in "abcd"}
        found = race(entries, FAST, 21, clock=clock, rivals=tuple(entries))
        left += sum(len(timing.samples_us) < 21 for timing in found.values())
    assert left <= 8  # of 400


def _noisy(dice: random.Random, us: float) -> list[float]:
    return [us * dice.gauss(1, 0.05) for _ in range(60)]


def test_the_bar_is_timed_again_and_is_never_lower_than_it_was() -> None:
    clock = FakeClock()
    # Two replays size the batch, one warms up; then pairs, the second of which counts.
    launch = clock.launch("best", 100.0, 100.0, 100.0, 99.0, 120.0, 99.0, 90.0)
    bar = Bar(100.0, launch, FAST, "cpu", clock=clock)
    assert clock.replays == []  # nothing is timed before it is asked for
    assert [bar.now_us(), bar.now_us()] == [120.0, 100.0]

    def broken(_: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    assert Bar(100.0, broken, FAST, "cpu", clock=clock).now_us() == 100.0


def test_programs_leave_for_a_program_and_peers_for_a_program_too() -> None:
    clock = FakeClock()
    times = {"ours": 100.0, "slower": 103.0, "cudnn": 80.0, "fa2": 200.0}
    entries = {name: clock.launch(name, us) for name, us in times.items()}
    found = race(entries, FAST, 12, clock=clock, rivals=("ours", "slower"))
    rounds = {name: len(timing.samples_us) for name, timing in found.items()}
    assert rounds == {
        "ours": 12,
        "slower": rounds_to_tell(CLEAR),
        "cudnn": 12,
        "fa2": CLEAR_ROUNDS,
    }


def test_a_contestant_that_raises_is_named_and_the_race_goes_on() -> None:
    clock = FakeClock()

    def broken(_: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    failed: dict[str, str] = {}
    entries = {"x": broken, "a": clock.launch("a", 10), "n": clock.launch("n", float("nan"))}
    timings = race(entries, FAST, 3, clock=clock, failed=failed)
    assert set(timings) == {"a"}
    assert failed["x"] == "RuntimeError: operation not permitted when stream is capturing"
    assert failed["n"].startswith("MeasureError")
    with pytest.raises(RuntimeError, match="capturing"):
        race({"x": broken}, FAST, 3, clock=clock)


def test_the_policy_name_says_all_that_changes_a_time() -> None:
    changed = [
        MeasurePolicy(),
        MeasurePolicy(l2="flush"),
        MeasurePolicy(warmup_ms=1),
        MeasurePolicy(batch_ms=1),
        MeasurePolicy(samples=1),
        MeasurePolicy(pause_ms=1),
    ]
    assert len({policy.name for policy in changed}) == len(changed)


@pytest.mark.parametrize(("seq", "least"), [(128, 32), (8192, 2), (65536, 2)])
def test_rotated_inputs_are_more_than_twice_the_l2(seq: int, least: int) -> None:
    problem = make_problem(seq, 128)
    sets = MeasurePolicy().input_sets(problem, 60 << 20)
    assert sets >= least
    assert sets == 64 or sets * problem.io_bytes > 2 * (60 << 20)
    assert MeasurePolicy(l2="flush").input_sets(problem, 60 << 20) == 1


def test_times_that_beat_physics_are_named() -> None:
    problem = make_problem(8192, 128)  # 550 GFLOP: 556 us at 989 TFLOP/s
    assert impossible(problem, H200, 600.0) is None
    assert impossible(problem, H200, 485.0) is None  # above the datasheet, within the boost
    assert "flops" in str(impossible(problem, H200, 480.0))
    short = make_problem(1, 128, seq_kv=65536, heads=32)  # 1.07 GB: 224 us at 4.8 TB/s
    assert impossible(short, H200, 60.0) is None
    assert "traffic" in str(impossible(short, H200, 60.0, MeasurePolicy()))
    assert impossible(short, H200, 120.0, MeasurePolicy()) is None


def test_keys_that_nobody_sees_need_not_be_read() -> None:
    problem = make_problem(1, 128, seq_kv=65536, heads=32, causal=True)
    assert impossible(problem, H200, 2.0, MeasurePolicy()) is None


def test_wall_time_of_plain_calls_walks_through_the_sets() -> None:
    seen: list[int] = []
    assert WallClock().batch(seen.append, 5, 2)() > 0
    assert seen == [0, 1, 0, 1, 0]
