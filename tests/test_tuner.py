"""The whole tuner with a fake worker: order, rows, resume, ties, failures, budgets, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from fagen.config import Config
from fagen.errors import (
    BadProblem,
    BadSetting,
    CacheError,
    DatabaseError,
    FagenError,
    Interrupted,
    NoValidConfig,
    TerminatedRun,
    WorkerDied,
)
from fagen.generate.families import config_from_dict, repeats
from fagen.generate.program import Program
from fagen.generate.space import SearchSpace
from fagen.outcome import GATE, Built, KernelFacts, Outcome, Status, Timing
from fagen.problem import Problem, make_problem
from fagen.records import Records
from fagen.report.tuning import tune_lines
from fagen.target import Toolchain, preset
from fagen.tune import events
from fagen.tune.finale import FINALISTS, how_many
from fagen.tune.jobs import BuildReply, RaceReply, Tried
from fagen.tune.ledger import Ledger
from fagen.tune.plan import Plan
from fagen.tune.result import Final, Finale, choose, finalists
from fagen.tune.seeding import in_any_case
from fagen.tune.signals import Terminated
from fagen.tune.tuner import run, tune
from fakes import (
    FAILED,
    PASSED,
    PROBLEM,
    TARGET,
    FakeBuilder,
    FakeClock,
    FakeLedger,
    FakeShop,
    FakeWorker,
    NoisyWorker,
    formula_us,
    full_space,
    render_fake,
    small_space,
    space_of,
    timed,
    wrong,
)

TOOLCHAIN = Toolchain("3.7.1", "12.9.86")


def test_a_run_tries_seeds_first_saves_each_row_and_picks_the_fastest() -> None:
    shop = FakeShop()
    result = run(shop.plan())
    default = full_space().seeds[0]
    assert shop.worker.tried[0] == default
    assert [row.config for row in shop.ledger.rows] == shop.worker.tried
    assert result.tried == 24 == result.counts[Status.OK]
    assert result.winner is not None
    assert formula_us(result.winner.config) == min(map(formula_us, shop.worker.tried))
    assert result.winner_us == formula_us(result.winner.config)
    assert result.default_us == formula_us(default)
    assert shop.builder.closed and shop.worker.closed


def test_two_runs_of_one_seed_are_the_same_and_another_seed_is_not() -> None:
    def tried(seed: int) -> list[Config]:
        shop = FakeShop()
        run(shop.plan(seed=seed, trials=60))
        return shop.worker.tried

    assert tried(1) == tried(1)
    assert tried(1) != tried(2)


def test_events_tell_the_run_from_start_to_finish() -> None:
    shop = FakeShop()
    run(shop.plan(trials=5))
    kinds = [type(event).__name__ for event in shop.events]
    middle = ["TrialDone"] * 5
    assert kinds == ["Started", "Preparing", *middle, "Racing", "Raced", "Finished"]
    done = [e for e in shop.events if isinstance(e, events.TrialDone)]
    assert [e.done for e in done] == [1, 2, 3, 4, 5]
    assert [e.total for e in done] == [5] * 5
    assert done[-1].best_us == min(map(formula_us, shop.worker.tried))


def test_the_race_holds_the_best_and_the_default_beside_the_peers() -> None:
    shop = FakeShop(FakeWorker(peers={"sdpa-flash": 200.0, "sdpa-cudnn": 90.0}))
    result = run(shop.plan(trials=30))
    [raced] = shop.worker.raced
    best = sorted(set(map(formula_us, shop.worker.tried)))[0]
    assert full_space().seeds[0] in raced
    assert len(raced) <= FINALISTS + 1
    assert min(map(formula_us, raced)) == best
    peers = {f.name: f.timing.median_us for f in result.finals if f.kind == "peer"}
    assert peers == {"sdpa-flash": 200.0, "sdpa-cudnn": 90.0}
    assert result.missing == {"cudnn (torch)": "not in this build"}
    assert [f.chosen for f in result.finals].count(True) == 1


# T01: the fastest config is wrong.


def test_a_fast_and_wrong_config_never_wins_and_its_error_is_kept() -> None:
    fast = set(sorted(full_space().configs, key=formula_us)[:200])
    shop = FakeShop(FakeWorker(behave=lambda c: wrong() if c in fast else None))
    result = run(shop.plan(trials=48))
    bad = [row for row in shop.ledger.rows if row.status == Status.WRONG_RESULT]
    assert bad and result.winner is not None
    assert result.winner.config not in fast
    assert all(row.verdict == FAILED and row.timing is None for row in bad)
    assert result.counts[Status.WRONG_RESULT] == len(bad)


def test_a_wrong_default_rejects_only_itself() -> None:
    default = full_space().seeds[0]
    shop = FakeShop(FakeWorker(behave=lambda c: wrong() if c == default else None))
    result = run(shop.plan(trials=10))
    assert result.counts == {Status.OK: 9, Status.WRONG_RESULT: 1}
    assert result.default_us is None


def test_a_finalist_that_fails_its_last_check_does_not_win_nor_stay_right() -> None:
    first = FakeShop()
    best = run(first.plan()).winner
    assert best is not None
    shop = FakeShop(FakeWorker(refused=frozenset([best.config])))
    result = run(shop.plan())
    assert result.winner is not None and result.winner.config != best.config
    assert shop.ledger.rows[-1].status == Status.WRONG_RESULT
    assert shop.ledger.rows[-1].config == best.config
    again = FakeShop(ledger=shop.ledger)
    assert run(again.plan()).winner != best
    assert best.config not in again.worker.tried


class Judging(FakeWorker):
    """Calls slower what is, beside the fastest so far, as the bench of a real worker does."""

    def __init__(self, lucky: Config) -> None:
        super().__init__(lambda c: 20.0 if c == lucky else formula_us(c))
        self.refused = frozenset({lucky})
        self.fastest = float("inf")

    def try_program(self, program: Program, seconds: float) -> Tried:
        tried = super().try_program(program, seconds)
        us = self.formula(program.config)
        if us > 1.1 * self.fastest:
            return Tried(Status.SLOWER, "slower", timing=Timing((us, us), "fake timer"))
        self.fastest = min(us, self.fastest)
        return tried

    def race(self, programs: list[Program], rounds: int, seconds: float) -> RaceReply:
        reply = super().race(programs, rounds, seconds)
        if reply.rejected:
            self.fastest = float("inf")
        return reply


# T01: the fastest is wrong in the end, and others looked slow beside it.
@pytest.mark.parametrize("stopped", [False, True])
def test_what_was_slower_than_a_refused_kernel_alone_is_tried_again(stopped: bool) -> None:
    lucky = full_space().seeds[2]
    shop = FakeShop(worker=Judging(lucky))
    if stopped:  # the race ends the run; another one goes on
        shop.worker.race = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())  # type: ignore[method-assign]
        with pytest.raises(Interrupted):
            run(shop.plan(trials=40))
        rows = [r for r in shop.ledger.rows if r.config != lucky]
        shop = FakeShop(worker=Judging(lucky), ledger=FakeLedger(rows=rows))
    result = run(shop.plan(trials=40))
    tried = {row.config for row in shop.ledger.rows} - {lucky}
    assert result.winner is not None
    assert result.winner_us == min(map(formula_us, tried))
    final = {row.config: row.status for row in shop.ledger.rows}
    best = min(formula_us(c) for c, status in final.items() if status is Status.OK)
    for config, status in final.items():
        if status is Status.SLOWER:
            assert formula_us(config) > 1.1 * best


# T02, T03: one candidate fails, in every way there is.


def test_each_kind_of_failure_costs_one_row_and_none_is_tried_again() -> None:
    space = small_space(12)
    plans = dict(enumerate(space.configs))
    builds = {
        plans[1]: BuildReply(None, Status.BUILD_ERROR, "ptxas: internal error"),
        plans[2]: BuildReply(None, Status.OUT_OF_RESOURCES, "needs 400000 bytes"),
        plans[3]: BuildReply(None, Status.TIMED_OUT, "The build process was killed"),
        plans[4]: BuildReply(Built("m.py", (KernelFacts("k", 1024, 255, 9000),))),
    }
    tries: dict[Config, Tried | BaseException] = {
        plans[5]: wrong(),
        plans[6]: WorkerDied("The gpu process ended: SIGABRT", timed_out=False),
        plans[7]: WorkerDied("The gpu process was killed at its deadline", timed_out=True),
        plans[8]: Tried(Status.OUT_OF_RESOURCES, "CUDA out of memory"),
        plans[9]: timed(float("nan")),
        plans[10]: timed(float("inf"), 3.0),
        plans[11]: timed(0.0),
    }
    shop = FakeShop(FakeWorker(behave=tries.get), FakeBuilder(builds.get))
    result = run(shop.plan(space, trials=40))
    status = {row.config: row.status for row in shop.ledger.rows}
    assert [status[plans[i]].value for i in range(12)] == [
        "ok",
        "build_error",
        "out_of_resources",
        "timed_out",
        "lint_rejected",
        "wrong_result",
        "crashed",
        "timed_out",
        "out_of_resources",
        "crashed",
        "crashed",
        "crashed",
    ]
    assert all(row.reason for row in shop.ledger.rows if row.status != Status.OK)
    assert result.winner is not None and result.winner.config == plans[0]
    again = FakeShop(ledger=shop.ledger)
    run(again.plan(space, trials=40))
    assert again.worker.tried == [] == again.builder.submitted


def test_a_config_that_does_not_render_costs_one_row() -> None:
    space = small_space(6)
    broken = space.configs[2]

    def render(problem: object, config: Config) -> object:
        if config == broken:
            raise KeyError("block_q is undefined")
        return render_fake(PROBLEM, config)

    shop = FakeShop()
    result = run(shop.plan(space, render=render))
    assert result.counts == {Status.OK: 5, Status.BUILD_ERROR: 1}
    [row] = [row for row in shop.ledger.rows if row.status == Status.BUILD_ERROR]
    assert row.config == broken and "block_q" in row.reason


def test_equal_source_is_built_and_timed_once_and_is_a_row_for_each_config() -> None:
    space = small_space(8)
    shop = FakeShop()

    def render(problem: object, config: Config) -> object:
        twins = space.configs[:4]
        source = twins[0] if config in twins else config
        return replace(render_fake(PROBLEM, config), key=source.key)

    result = run(shop.plan(space, render=render))
    assert len(shop.ledger.rows) == 8 == result.tried
    assert len(shop.builder.submitted) == 5 == len(shop.worker.tried)
    times = {row.config: row.median_us for row in shop.ledger.rows}
    assert len({times[c] for c in space.configs[:4]}) == 1


def test_a_lost_race_falls_back_to_the_single_passes_and_says_so() -> None:
    shop = FakeShop(FakeWorker(race_dies=True))
    result = run(shop.plan())
    assert result.finals == () and "No race" in result.note
    assert result.winner is not None
    assert result.winner_us == min(map(formula_us, shop.worker.tried))


def test_an_error_of_fagen_itself_ends_the_run_with_its_children() -> None:
    shop = FakeShop(FakeWorker(behave=lambda c: ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        run(shop.plan())
    assert shop.worker.closed and shop.builder.closed
    assert shop.ledger.finished[-1][1] is True


@dataclass
class BrokenLedger(FakeLedger):
    """A database that fails when the run ends."""

    def finish(self, finale: Finale, *, interrupted: bool) -> None:
        raise DatabaseError("The disk is full.")


def test_a_database_that_fails_at_the_end_hides_neither_ctrl_c_nor_a_bug() -> None:
    shop = FakeShop(ledger=BrokenLedger())
    shop.worker.behave = lambda c: KeyboardInterrupt() if len(shop.worker.tried) == 6 else None
    with pytest.raises(Interrupted, match="5 candidates are kept, best so far"):
        run(shop.plan())
    with pytest.raises(ZeroDivisionError):
        run(
            FakeShop(
                FakeWorker(behave=lambda c: ZeroDivisionError()), ledger=BrokenLedger()
            ).plan()
        )
    with pytest.raises(DatabaseError, match="full"):  # a winner that is not stored is no success
        run(FakeShop(ledger=BrokenLedger()).plan())


# T04: nothing works.


@pytest.mark.parametrize(
    "reply", [wrong(), timed(float("nan")), timed(float("inf")), timed(-1.0), timed()]
)
def test_when_everything_fails_there_is_an_error_with_counts_and_no_winner(reply: Tried) -> None:
    shop = FakeShop(FakeWorker(behave=lambda config: reply))
    with pytest.raises(NoValidConfig) as caught:
        run(shop.plan(small_space(6)))
    status = Status.WRONG_RESULT if reply.verdict == FAILED else Status.CRASHED
    assert f"6 {status.value}" in str(caught.value)
    assert caught.value.exit_code == 1
    assert shop.ledger.winners == [] and shop.ledger.finished[-1][1] is False


def test_a_later_run_of_failures_keeps_the_earlier_winner() -> None:
    ledger, space = FakeLedger(), small_space(12)
    first = run(FakeShop(ledger=ledger).plan(space, trials=4))
    later = FakeShop(FakeWorker(behave=lambda config: wrong()), ledger=ledger)
    result = run(later.plan(space, trials=12))
    assert first.winner is not None and result.winner is not None
    assert result.winner.config == first.winner.config
    assert result.counts == {Status.WRONG_RESULT: 8}


def test_no_valid_config_names_the_rules_that_cut() -> None:
    space = replace(space_of([]), cuts={("flash", "registers"): 12, ("slim", "too long"): 1})
    with pytest.raises(NoValidConfig, match=r"flash: registers \(12\).*slim: too long"):
        run(FakeShop().plan(space))


def test_no_trials_is_no_winner() -> None:
    with pytest.raises(NoValidConfig, match="budget was too small"):
        run(FakeShop().plan(trials=0))


# T05: noise.


def test_noise_drift_and_outliers_cost_less_than_two_percent() -> None:
    true = [1.00, 1.01, 1.05, 1.30]
    space = small_space(4)
    regrets = []
    for seed in range(200):
        place = {config: true[(i + seed) % 4] for i, config in enumerate(space.configs)}
        worker = NoisyWorker(lambda config, place=place: 100.0 * place[config], seed)
        result = run(FakeShop(worker).plan(space, trials=4, seed=seed))
        assert result.winner is not None
        regrets.append(place[result.winner.config] - 1.0)
    assert mean(regrets) < 0.02
    assert max(regrets) <= 0.05 + 1e-9


def test_twenty_noisy_runs_choose_the_best_or_its_like() -> None:
    """Of 24 configs one is the best, one 0.3 % slower, the default 10 %, the others 5 to 40 %."""
    space = small_space(24)
    true = [1.1, *(1.05 + 0.35 * i / 21 for i in range(22)), 1.0]
    true[11] = 1.003
    place = dict(zip(space.configs, true, strict=True))
    for unlucky in (0, 1000):
        chosen = []
        for seed in range(20):
            worker = NoisyWorker(lambda config: 100.0 * place[config], unlucky + seed)
            result = run(FakeShop(worker).plan(space, trials=24, seed=seed))
            assert result.winner is not None and result.default == space.configs[0]
            chosen.append(place[result.winner.config])
        assert sum(us <= 1.003 for us in chosen) >= 19
        assert mean(chosen) < 1.02
        assert max(chosen) <= 1.1  # none is slower than the default


def finals(*medians: float) -> list[Final]:
    configs = [c for c in full_space().configs if c.family == "flash"][: len(medians)]
    return [
        Final(
            c.key,
            "program",
            Timing((us,) * 5, "fake"),
            Outcome(c, Status.OK, built=Built("m", (KernelFacts("k", 1000 * (9 - i), 64, 0),))),
        )
        for i, (c, us) in enumerate(zip(configs, medians, strict=True))
    ]


def chosen(
    entries: list[Final], incumbent: Config | None = None, default: Config | None = None
) -> int:
    final = choose(entries, incumbent, default or full_space().configs[-1])
    assert final is not None
    return entries.index(final)


def test_the_default_is_left_only_for_what_is_faster_beyond_the_noise_of_the_race() -> None:
    def noisy(median_us: float, spread: float) -> Timing:
        return Timing(tuple(median_us * (1 + spread * (i % 7 - 3) / 3) for i in range(21)), "fake")

    default, other = finals(103.0, 100.0)
    for spread, who in ((0.0, 1), (0.02, 1), (0.06, 0)):
        pair = [replace(default, timing=noisy(103.0, spread)), other]
        pair[1] = replace(other, timing=Timing(noisy(100.0, spread).samples_us[::-1], "fake"))
        assert chosen(pair, default=default.outcome.config) == who  # type: ignore[union-attr]
        assert chosen(pair) == 1
    # Who left the race is compared over the rounds that it was in.
    for us, who in ((112.0, 1), (100.2, 0)):
        pair[0] = replace(default, timing=Timing((us,) * 3, "fake"))
        assert chosen(pair, default=default.outcome.config) == who  # type: ignore[union-attr]


def test_ties_go_to_what_was_there_then_to_the_smaller_and_a_clear_best_wins() -> None:
    tied = finals(100.0, 100.2, 100.35, 103.0)
    first, second, _, slow = [f.outcome.config for f in tied if f.outcome is not None]
    assert chosen(tied) == 2  # the least shared memory of the three within 0.4 %
    assert chosen(tied, default=second) == 1
    assert chosen(tied, incumbent=first, default=second) == 0
    assert chosen(tied, incumbent=slow, default=slow) == 2
    assert chosen(finals(100.0, 102.0, 103.0)) == 0


def test_of_equals_in_every_way_the_one_predicted_fastest_wins() -> None:
    one, two, three = finals(100.0, 100.1, 100.2)
    built = one.outcome.built if one.outcome is not None else None
    entries = [
        replace(f, outcome=replace(f.outcome, built=built, predicted_us=us))
        for f, us in ((one, 95.0), (two, 90.0), (three, 99.0))
        if f.outcome is not None
    ]
    assert chosen(entries) == 1


def test_the_order_of_arrival_decides_nothing() -> None:
    entries = finals(100.0, 100.1, 100.3)
    assert chosen(entries) == 2
    assert chosen(entries[::-1]) == 0


def test_finalists_are_distinct_sources_with_default_and_incumbent() -> None:
    configs = full_space().configs[:8]
    outcomes = [
        Outcome(c, Status.OK, program_key=f"source {i // 2}", timing=Timing((10.0 + i,), "fake"))
        for i, c in enumerate(configs)
    ]
    picked = finalists(outcomes, configs[7], configs[5], 2)
    assert [o.program_key for o in picked] == ["source 0", "source 1", "source 2", "source 3"]
    assert picked[2].config == configs[5] and picked[3].config == configs[7]


def test_beside_finalists_that_may_differ_the_fastest_that_repeat_are_raced() -> None:
    problem = replace(make_problem(1024, 64, heads=2), direction="backward")
    configs = SearchSpace.of(problem, preset("h200")).configs
    differing = [c for c in configs if not repeats(c)][:2]
    repeating = [c for c in configs if repeats(c)][:4]
    outcomes = [
        Outcome(c, Status.OK, program_key=c.key, timing=Timing((10.0 + i,), "fake"))
        for i, c in enumerate([*differing, *repeating])
    ]
    picked = [o.config for o in finalists(outcomes, differing[0], None, 2)]
    assert picked == [*differing, *repeating[:2]]
    picked = [o.config for o in finalists(outcomes[2:], differing[0], None, 3)]
    assert picked == repeating[:3]


@pytest.mark.parametrize(("trials", "most"), [(0, 4), (12, 4), (20, 6), (36, 12), (256, 12)])
def test_a_short_run_has_few_finalists(trials: int, most: int) -> None:
    assert how_many(trials) == most
    if trials == 12:
        shop = FakeShop()
        run(shop.plan(trials=trials))
        [raced] = shop.worker.raced
        assert most <= len(raced) <= most + 1  # the default


# T07 and resume: what the budgets mean.


@pytest.mark.parametrize(
    ("words", "trials", "seconds"),
    [
        ({}, 64, 75.0),
        ({"effort": "quick"}, 20, 40.0),
        ({"effort": "full"}, 256, 300.0),
        ({"effort": "full", "trials": 3}, 3, 300.0),
        ({"effort": "quick", "timeout": 7}, 20, 7),
        ({"trials": 0, "timeout": 0.0}, 0, 0.0),
    ],
)
def test_an_effort_is_trials_and_a_timeout_unless_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: dict[str, Any],
    trials: int,
    seconds: float,
) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr("fagen.tune.tuner.run", plans.append)
    tune(PROBLEM, target="h200", db=str(tmp_path / "t.db"), **words)
    assert [(plan.trials, plan.timeout_s) for plan in plans] == [(trials, seconds)]


def test_trials_is_the_total_of_a_key_and_a_rerun_goes_on() -> None:
    ledger = FakeLedger()
    first = FakeShop(ledger=ledger)
    run(first.plan(trials=10))
    second = FakeShop(ledger=ledger)
    assert run(second.plan(trials=10)).tried == 10
    assert second.worker.tried == []
    third = FakeShop(ledger=ledger)
    assert run(third.plan(trials=16)).tried == 16
    assert len(third.worker.tried) == 6
    assert not set(third.worker.tried) & set(first.worker.tried)


# O02
def test_more_trials_than_configs_stops_when_the_space_is_used_up() -> None:
    shop = FakeShop()
    result = run(shop.plan(small_space(12), trials=40))
    assert result.state == "exhausted"
    assert Counter(shop.worker.tried) == Counter(small_space(12).configs)


@pytest.mark.parametrize(("timeout_s", "each_s"), [(60.0, 7.0), (5.0, 60.0), (20.0, 0.5)])
def test_a_run_ends_within_its_timeout(timeout_s: float, each_s: float) -> None:
    worker = FakeWorker(seconds_each=each_s, clock=FakeClock(1000.0))
    shop = FakeShop(worker)
    plan = shop.plan(trials=500, timeout_s=timeout_s)
    if each_s > timeout_s:
        with pytest.raises(NoValidConfig, match="budget was too small"):
            run(plan)
        assert shop.ledger.rows == []  # cut off by the run's own end: not the candidate's fault
    else:
        result = run(plan)
        assert result.state == "time_up"
        assert result.winner is not None
        assert result.tried == len(shop.ledger.rows) > 1
    assert worker.clock() - 1000.0 <= timeout_s


def test_a_candidate_over_its_own_limit_is_timed_out_and_the_run_goes_on() -> None:
    slow = small_space(8).configs[3]
    died = WorkerDied("The gpu process was killed at its deadline", timed_out=True)
    shop = FakeShop(FakeWorker(behave=lambda c: died if c == slow else None))
    result = run(shop.plan(small_space(8)))
    assert result.counts == {Status.OK: 7, Status.TIMED_OUT: 1}


# Offline: predicted, never timed.


def test_offline_only_a_verified_prediction_wins() -> None:
    space = small_space(12)
    verified = set(space.configs[6:])
    replies = {
        c: Tried(Status.PREDICTED, "", PASSED if c in verified else None) for c in space.configs
    }
    shop = FakeShop(FakeWorker(behave=replies.get))
    result = run(shop.plan(space, timed=False))
    assert not result.timed and shop.worker.raced == []
    assert result.counts == {Status.PREDICTED: 12}
    assert result.winner is not None and result.winner.config in verified
    assert result.winner.timing is None
    assert result.winner_us == result.winner.predicted_us
    best = min(o.predicted_us or 0 for o in shop.ledger.rows if o.verdict == PASSED)
    assert result.winner_us == best


def test_offline_the_interpreter_is_asked_only_about_what_may_win() -> None:
    shop = FakeShop(FakeWorker(behave=lambda c: Tried(Status.PREDICTED, "", PASSED)))
    result = run(shop.plan(timed=False, trials=40))
    skipped = [row for row in shop.ledger.rows if row.verdict is None]
    assert result.winner is not None
    assert skipped and len(shop.worker.tried) + len(skipped) == 40
    assert all("not verified" in row.reason for row in skipped)
    assert all((row.predicted_us or 0) >= (result.winner_us or 0) for row in skipped)


def test_offline_what_is_predicted_faster_and_needs_a_gpu_is_named() -> None:
    def behave(config: Config) -> Tried:
        return Tried(Status.PREDICTED, "", None if config.family == "flash_ws" else PASSED)

    result = run(FakeShop(FakeWorker(behave=behave)).plan(timed=False, trials=60))
    assert result.winner is not None and result.winner.config.family != "flash_ws"
    assert result.unverified is not None and result.unverified.config.family == "flash_ws"
    assert (result.unverified.predicted_us or 0) < (result.winner.predicted_us or 0)
    lines = tune_lines(result, {}, {}, "tuning.db")
    assert any(str(result.unverified.config) in line for line in lines)


def test_offline_without_one_verified_is_an_error() -> None:
    reply = Tried(Status.PREDICTED, "unverified, the interpreter can't run it")
    with pytest.raises(NoValidConfig, match="verified: 6 predicted"):
        run(FakeShop(FakeWorker(behave=lambda c: reply)).plan(small_space(6), timed=False))


def test_predicted_rows_are_seeds_of_a_timed_run_and_count_for_nothing() -> None:
    ledger, space = FakeLedger(), small_space(40)
    offline_shop = FakeShop(
        FakeWorker(behave=lambda c: Tried(Status.PREDICTED, "", PASSED)), ledger=ledger
    )
    winner = run(offline_shop.plan(space, timed=False, trials=10)).winner
    shop = FakeShop(ledger=ledger)
    result = run(shop.plan(space, trials=10))
    assert result.tried == 10 == len(shop.worker.tried)
    assert winner is not None and winner.config in shop.worker.tried[:2]


def test_neighbours_winners_are_tried_right_after_the_default() -> None:
    near = full_space().configs[123]
    shop = FakeShop(ledger=FakeLedger(near=[near]))
    run(shop.plan(trials=3))
    assert shop.worker.tried[:2] == [full_space().seeds[0], near]


def test_a_short_run_beside_many_neighbours_has_timed_every_family() -> None:
    space = full_space()
    near = [c for c in space.configs if c.family == space.seeds[0].family][100:140:10]
    shop = FakeShop(ledger=FakeLedger(near=near))
    run(shop.plan(trials=12))
    assert shop.worker.tried[1:5] == near
    assert {c.family for c in shop.worker.tried} == {c.family for c in space.configs}


def test_seeds_and_neighbours_are_built_before_the_space_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, near = str(tmp_path / "t.db"), full_space().configs[123]
    wider = replace(PROBLEM, shape=replace(PROBLEM.shape, batch=2))
    only = replace(small_space(1), configs=(near,), seeds=(near,))
    with Records.open(path, "write", config_from_dict) as records:
        ledger = Ledger(records, wider, TARGET, TOOLCHAIN)
        assert run(FakeShop(ledger=ledger).plan(only)).winner is not None
    asked: list[Config] = []

    class Builder:
        def submit(self, program: Program) -> None:
            asked.append(program.config)

    @contextmanager
    def staff(*_: Any) -> Iterator[Any]:
        yield (), Builder()

    def space(*_: Any) -> SearchSpace:
        assert near in asked
        return full_space()

    monkeypatch.setattr("fagen.tune.tuner.staff", staff)
    monkeypatch.setattr("fagen.tune.tuner.SearchSpace.of", space)
    monkeypatch.setattr("fagen.tune.tuner.run", lambda plan: None)
    tune(PROBLEM, target="h200", db=path)
    seeds = in_any_case(full_space().seeds)
    assert asked[: len(seeds)] == seeds and near in asked[len(seeds) :]
    asked.clear()
    monkeypatch.setattr("fagen.tune.tuner.SearchSpace.of", lambda *_: full_space())
    tune(PROBLEM, target="h200", db=path, trials=2)
    assert asked[:2] == seeds[:2] and len(asked) <= 4


# T06: Ctrl-C and SIGTERM, first by exception, then for real.


@pytest.mark.parametrize(
    ("stop", "error", "code"),
    [(KeyboardInterrupt(), Interrupted, 130), (Terminated(), TerminatedRun, 143)],
)
def test_an_interrupted_run_keeps_its_rows_and_a_rerun_goes_on(
    stop: BaseException, error: type[FagenError], code: int
) -> None:
    shop = FakeShop()
    shop.worker.behave = lambda c: stop if len(shop.worker.tried) == 6 else None
    with pytest.raises(error, match="partial") as caught:
        run(shop.plan(trials=20))
    result = caught.value.result  # type: ignore[attr-defined]
    assert caught.value.exit_code == code
    assert result.partial and result.tried == 5 == len(shop.ledger.rows)
    assert result.winner_us == min(map(formula_us, shop.worker.tried[:5]))
    assert shop.worker.closed and shop.builder.closed
    assert shop.ledger.finished[-1][1] is True
    again = FakeShop(ledger=shop.ledger)
    assert run(again.plan(trials=20)).tried == 20
    assert len(again.worker.tried) == 15


SCRIPT = """
    import sys, time
    from fakes import PROBLEM, TARGET, FakeShop, FakeWorker, full_space
    from fagen.errors import FagenError
    from fagen.generate.families import config_from_dict
    from fagen.records import Records
    from fagen.target import Toolchain, preset
    from fagen.tune.events import TrialDone
    from fagen.tune.ledger import Ledger
    from fagen.tune.tuner import run, tune

    def slow(config):
        time.sleep(float(sys.argv[2]))

    class SlowToClose(FakeWorker):
        def close(self):
            time.sleep(float(sys.argv[2]))

    def said(event):
        if isinstance(event, TrialDone):
            print(event.done, flush=True)

    with Records.open(sys.argv[1], "write", config_from_dict) as records:
        ledger = Ledger(records, PROBLEM, TARGET, Toolchain("3.7.1", "12.9.86"))
        shop = FakeShop(SlowToClose(behave=slow), ledger=ledger)
        try:
            result = run(shop.plan(trials=20, on_event=said, clock=time.monotonic,
                                   started=time.monotonic()))
            print("tried", result.tried)
        except FagenError as error:
            print(error)
            sys.exit(error.exit_code)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "tune_slowly.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def started(script: Path, seconds_each: float) -> subprocess.Popen[str]:
    tests = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    command = [sys.executable, str(script), str(script.parent / "t.db"), str(seconds_each)]
    return subprocess.Popen(command, env=env, text=True, stdout=-1, stderr=-1)


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    while (said := process.stdout.readline()) and said.strip() != line:
        pass


def stored(script: Path) -> list[Outcome]:
    with Records.open(str(script.parent / "t.db"), "read", config_from_dict) as records:
        return Ledger(records, PROBLEM, TARGET, TOOLCHAIN).history("fake timer")


@pytest.mark.parametrize(
    ("number", "twice", "code"),
    [(signal.SIGINT, False, 130), (signal.SIGTERM, False, 143), (signal.SIGINT, True, 130)],
)
def test_a_real_signal_ends_the_run_quietly_within_two_seconds(
    script: Path, number: signal.Signals, twice: bool, code: int
) -> None:
    process = started(script, 0.3)
    read_until(process, "5")
    begun = time.monotonic()
    process.send_signal(number)
    if twice:
        time.sleep(0.1)  # while the children are being ended
        process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - begun < 2.0
    assert process.returncode == code
    assert err == ""
    assert "partial" in out
    assert 5 <= len(stored(script)) <= 7


# O03
def test_a_killed_run_is_not_running_and_the_next_one_goes_on(script: Path) -> None:
    process = started(script, 0.3)
    read_until(process, "2")
    process.kill()
    process.communicate()
    before = len(stored(script))
    assert before >= 2
    with Records.open(str(script.parent / "t.db"), "read", config_from_dict) as records:
        assert [r.state for r in records.runs()] == ["interrupted"]
    out, err = started(script, 0.0).communicate(timeout=60)
    assert (err, out.splitlines()[-1]) == ("", "tried 20")
    assert len(out.splitlines()) == 21 - before
    assert len(stored(script)) == 20
    with Records.open(str(script.parent / "t.db"), "read", config_from_dict) as records:
        assert sorted(r.state for r in records.runs()) == ["finished", "interrupted"]
        best = records.best(PROBLEM, TARGET)
        assert best is not None and best.chosen
        assert {f.name for f in records.finals(best.run_id)} >= {"flash (torch)", "cudnn (torch)"}


def test_a_refused_finalist_is_out_of_the_real_database_too(tmp_path: Path) -> None:
    path = str(tmp_path / "t.db")
    with Records.open(path, "write", config_from_dict) as records:
        ledger = Ledger(records, PROBLEM, TARGET, TOOLCHAIN)
        best = run(FakeShop(ledger=ledger).plan(trials=12)).winner
        assert best is not None
        bad = FakeShop(FakeWorker(refused=frozenset([best.config])), ledger=ledger)
        run(bad.plan(trials=12))
        served = records.best(PROBLEM, TARGET)
        assert served is not None and served.config != best.config
        history = {o.config: o.status for o in ledger.history("fake timer")}
        assert history[best.config] == Status.WRONG_RESULT
        assert len(history) == 12


def test_a_config_whose_source_changed_is_tried_again_and_the_fast_ones_first() -> None:
    space, ledger = small_space(12), FakeLedger()
    best = run(FakeShop(ledger=ledger).plan(space)).winner
    assert best is not None

    def render_new(problem: Problem, config: Config) -> Program:
        return replace(render_fake(problem, config), key=f"new {config.key}")

    shop = FakeShop(ledger=ledger)
    result = run(shop.plan(space, render=render_new, trials=6))
    assert len(shop.worker.tried) == result.tried == 6
    assert best.config in shop.worker.tried[:2]
    assert result.winner is not None and result.winner.program_key.startswith("new ")


def test_what_another_gate_judged_is_tuned_again_and_the_fast_ones_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = small_space(12)
    with Records.open(str(tmp_path / "t.db"), "write", config_from_dict) as records:
        ledger = Ledger(records, PROBLEM, TARGET, TOOLCHAIN)
        with monkeypatch.context() as earlier:
            earlier.setattr("fagen.tune.ledger.GATE", "0: laxer")
            best = run(FakeShop(ledger=ledger).plan(space)).winner
        assert best is not None
        assert ledger.history("fake timer") == []
        assert best.config in ledger.neighbours()
        shop = FakeShop(ledger=ledger)
        result = run(shop.plan(space, trials=6))
        assert len(shop.worker.tried) == result.tried == 6
        assert best.config in shop.worker.tried[:3]
        assert [r.plan.exactness for r in records.runs()] == [GATE, "0: laxer"]
        assert len(ledger.history("fake timer")) == 6
        assert ledger.neighbours() == []


def test_what_a_stricter_gate_refuses_wins_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = small_space(6)
    with Records.open(str(tmp_path / "t.db"), "write", config_from_dict) as records:
        ledger = Ledger(records, PROBLEM, TARGET, TOOLCHAIN)
        with monkeypatch.context() as earlier:
            earlier.setattr("fagen.tune.ledger.GATE", "0: laxer")
            best = run(FakeShop(ledger=ledger).plan(space)).winner
        assert best is not None
        worker = FakeWorker(behave=lambda c: wrong())
        with pytest.raises(NoValidConfig):
            run(FakeShop(worker, ledger=ledger).plan(space))
        assert records.best(PROBLEM, TARGET) is None
        history = ledger.history("fake timer")
        assert {o.status for o in history} == {Status.WRONG_RESULT}
        assert len(history) == 6


def test_a_refused_finalist_says_nothing_of_another_device_or_toolchain(tmp_path: Path) -> None:
    places = [(TARGET, TOOLCHAIN), (preset("a100"), TOOLCHAIN), (TARGET, Toolchain("3.6.0", "1"))]
    with Records.open(str(tmp_path / "t.db"), "write", config_from_dict) as records:
        for target, tools in places:
            best = run(
                FakeShop(ledger=Ledger(records, PROBLEM, target, tools)).plan(small_space(6))
            ).winner
        assert best is not None
        bad = FakeWorker(refused=frozenset([best.config]))
        run(FakeShop(bad, ledger=Ledger(records, PROBLEM, *places[0])).plan(small_space(6)))
        served = [records.best(PROBLEM, target, tools) for target, tools in places]
        assert [r is not None and r.config == best.config for r in served] == [False, True, True]


def test_the_same_shape_of_another_device_or_toolchain_is_the_nearest(tmp_path: Path) -> None:
    with Records.open(str(tmp_path / "t.db"), "write", config_from_dict) as records:
        other = Ledger(records, PROBLEM, TARGET, Toolchain("3.6.0", "1"))
        best = run(FakeShop(ledger=other).plan(small_space(6))).winner
        assert best is not None
        assert best.config in Ledger(records, PROBLEM, TARGET, TOOLCHAIN).neighbours()
        assert other.neighbours() == []


def test_ctrl_c_while_a_run_closes_loses_neither_its_race_nor_its_result() -> None:
    class Closing(FakeBuilder):
        def close(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            super().close()

    shop = FakeShop(builder=Closing())
    assert run(shop.plan(small_space(6))).winner is not None
    assert shop.ledger.finished[-1][1] is False and shop.ledger.winners != []


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"trials": -1}, BadSetting),
        ({"effort": "heroic"}, BadSetting),
        ({"effort": 3}, BadSetting),
        ({"trials": 1.5}, BadSetting),
        ({"timeout": float("nan")}, BadSetting),
        ({"timeout": float("inf")}, BadSetting),
        ({"timeout": -1}, BadSetting),
        ({"timeout": "5"}, BadSetting),
        ({"seed": -1}, BadSetting),
        ({"seed": 2**32}, BadSetting),
        ({"device": 0, "target": "h200"}, BadSetting),
        ({"problem": (1, 2, 9, 16)}, BadProblem),
        ({"problem": PROBLEM, "seq": 4}, BadProblem),
    ],
    ids=str,
)
def test_an_argument_that_can_not_be_used_is_refused_before_anything_starts(
    words: dict[str, object], error: type[FagenError], tmp_path: Path
) -> None:
    shape = {} if "problem" in words else {"seq": 9, "head_dim": 16}
    with pytest.raises(error):
        tune(**{**shape, "db": str(tmp_path / "t.db"), **words})
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_can_not_be_made_ends_a_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAGEN_CACHE", "/dev/null")
    with pytest.raises(CacheError, match="FAGEN_CACHE"):
        tune(seq=9, head_dim=16, target="h200", trials=1, db=str(tmp_path / "t.db"))
    assert list(tmp_path.iterdir()) == []
