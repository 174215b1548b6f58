"""The bench of a worker child, on the CPU: a runner that computes attention in plain torch."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from fagen.generate.program import Program
from fagen.judge.measure import Bar, MeasurePolicy
from fagen.judge.reference import baseline
from fagen.outcome import Outcome, Status, Timing
from fagen.problem import make_problem
from fagen.target import preset
from fagen.tune.jobs import Confirm, Prepare, Race, TryProgram
from fagen.tune.result import finalists, value_of
from fagen.tune.worker import Bench
from fakes import full_space, render_fake

if TYPE_CHECKING:
    from torch import Tensor

PROBLEM = make_problem(40, 16, heads=2)
POLICY = MeasurePolicy(warmup_ms=0.1, batch_ms=0.1, samples=3, pause_ms=0.0)
CARD = replace(preset("h200"), l2_bytes=1 << 10)


def attend(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> None:
    """What the gate calls plain attention in the same precision: as right as a kernel must be."""
    out, log_sum = baseline(q, k, v, PROBLEM.features, scale)
    o.copy_(out)
    lse.copy_(log_sum)


@dataclass
class Runner:
    act: Callable[..., None] = attend

    def launch(self, *args: Any) -> None:
        self.act(*args)

    def launch_poisoned(self, *args: Any) -> None:
        self.act(*args)  # which has no scratch memory


def five_percent_off(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, s: float) -> None:
    attend(q, k, v, o, lse, s)
    o.mul_(1.05)


def raising(message: str) -> Callable[..., None]:
    def act(*args: Any) -> None:
        raise RuntimeError(message)

    return act


@pytest.fixture(scope="module")
def prepared() -> Bench:
    """One for all tests, as in a child: the truth of every case is made once."""
    made = Bench()
    made.prepare(Prepare(PROBLEM, CARD, POLICY, "cpu"))
    return made


@pytest.fixture
def bench(prepared: Bench) -> Bench:
    """As if nothing had been tried yet."""
    prepared._passed.clear()
    prepared._best = None
    return prepared


def program(number: int = 0) -> Program:
    return render_fake(PROBLEM, full_space().configs[number])


def loads(monkeypatch: pytest.MonkeyPatch, *acts: Callable[..., None]) -> None:
    by_key = {program(i).key: act for i, act in enumerate(acts)}
    monkeypatch.setattr("fagen.run.kernel.load", lambda p, target, device: Runner(by_key[p.key]))


def test_a_right_kernel_is_verified_and_then_timed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(monkeypatch, attend)
    tried = bench.try_program(TryProgram(program()))
    assert tried.status == Status.OK, tried.reason
    assert tried.verdict is not None and tried.verdict.passed
    assert tried.timing is not None and len(tried.timing.samples_us) == POLICY.samples
    assert tried.timing.policy == POLICY.name and math.isfinite(tried.timing.median_us)


# T01
def test_a_wrong_kernel_is_never_timed_and_its_error_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(monkeypatch, five_percent_off)
    tried = bench.try_program(TryProgram(program()))
    assert tried.status == Status.WRONG_RESULT
    assert tried.timing is None
    assert tried.verdict is not None and not tried.verdict.passed
    assert "over budget" in tried.reason


def test_what_is_clearly_slower_is_not_checked_further_and_is_no_winner(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(monkeypatch, attend, five_percent_off)
    best = bench._best = Bar(1e-3, lambda _: None, POLICY, "cpu")
    levels = []
    check = bench._gate.check
    monkeypatch.setattr(
        bench._gate,
        "check",
        lambda *a, level, **more: (levels.append(level), check(*a, level=level, **more))[1],
    )
    tried = bench.try_program(TryProgram(program(0)))
    assert tried.status == Status.SLOWER and tried.verdict is None
    assert tried.timing is not None and len(tried.timing.samples_us) < POLICY.samples
    assert "the time of the fastest" in tried.reason
    assert levels == ["smoke"] and bench._best is best
    # A wrong kernel is called wrong, however slow.
    assert bench.try_program(TryProgram(program(1))).status == Status.WRONG_RESULT
    row = Outcome(program(0).config, tried.status, tried.reason, "key", timing=tried.timing)
    assert value_of(row, timed=True) == tried.timing.median_us
    assert finalists([row], row.config, row.config, 4) == []


def test_who_met_a_slower_device_than_the_fastest_did_is_measured_and_checked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(monkeypatch, attend, attend, attend)
    first = bench.try_program(TryProgram(program(0)))
    assert first.timing is not None and bench._best is not None
    best = bench._best = Bar(first.timing.median_us / 2.5, lambda _: None, POLICY, "cpu")
    monkeypatch.setattr(best, "now_us", lambda: 1e9)
    monkeypatch.setattr("fagen.judge.measure.LOST", (1e9, 1.1))
    slowed = bench.try_program(TryProgram(program(1)))
    assert slowed.status == Status.OK, slowed.reason
    assert slowed.timing is not None
    assert len(slowed.timing.samples_us) == POLICY.samples
    monkeypatch.setattr(best, "now_us", lambda: best.us)
    assert bench.try_program(TryProgram(program(2))).status == Status.SLOWER


def test_what_is_wrong_beyond_the_first_case_and_fast_is_never_timed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def later_wrong(*args: Any) -> None:
        seen.append(1)
        (attend if len(seen) <= 30 else five_percent_off)(*args)

    loads(monkeypatch, later_wrong)
    tried = bench.try_program(TryProgram(program()))
    assert tried.status == Status.WRONG_RESULT and tried.timing is None
    assert bench._best is None


# T02
@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("CUDA out of memory. Tried to allocate 2 GiB", Status.OUT_OF_RESOURCES),
        ("CUDA error: an illegal memory access was encountered", Status.CRASHED),
    ],
)
def test_what_a_launch_raises_is_a_row_and_the_next_candidate_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, message: str, status: Status
) -> None:
    loads(monkeypatch, raising(message), attend)
    tried = bench.try_program(TryProgram(program(0)))
    assert (tried.status, tried.reason) == (status, message)
    assert bench.try_program(TryProgram(program(1))).status == Status.OK


def test_a_time_below_what_the_device_can_do_is_no_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(monkeypatch, attend)
    snail = replace(CARD, tensor_tflops=1e-9)
    monkeypatch.setattr(bench, "_job", Prepare(PROBLEM, snail, POLICY, "cpu"))
    tried = bench.try_program(TryProgram(program()))
    assert tried.status == Status.CRASHED and tried.timing is None
    assert "no usable time" in tried.reason


def test_a_finalist_that_differs_from_run_to_run_is_wrong(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0]

    def drifting(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float) -> None:
        attend(q, k, v, o, lse, scale)
        calls[0] += 1
        lse.add_(2e-6 * (calls[0] % 2))  # far inside its budget

    loads(monkeypatch, attend, drifting)
    assert bench.confirm(Confirm(program(0))).status == Status.OK
    assert bench.confirm(Confirm(program(1))).status == Status.WRONG_RESULT


def test_the_race_times_programs_and_peers_in_turns_and_names_the_missing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(monkeypatch, attend, attend, raising("CUDA error: launch failed"))
    reply = bench.race(Race((program(0), program(1), program(2)), 4))
    assert set(reply.programs) == {program(0).key, program(1).key}
    assert {len(t.samples_us) for t in reply.programs.values()} == {4}
    assert set(reply.rejected) == {program(2).key}
    assert any(name.startswith("sdpa-flash") for name in reply.peers)
    assert not any(name.startswith(("eager", "sdpa-math")) for name in reply.peers)
    assert any(name.startswith("sdpa-cudnn") for name in reply.missing)
    assert not set(reply.peers) & set(reply.missing)


def test_programs_alone_are_who_others_may_leave_a_race_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(monkeypatch, attend, attend)
    asked: list[Any] = []

    def race(contestants: dict[str, Any], *_: Any, rivals: Any, **__: Any) -> dict[str, Timing]:
        asked.append(set(rivals))
        return {name: Timing((1.0,), "fake timer") for name in contestants}

    monkeypatch.setattr("fagen.judge.measure.race", race)
    both = (program(0), program(1))
    assert len(bench.race(Race(both, 4, leaving=True)).peers) > 0
    bench.race(Race(both, 4))
    assert asked == [{p.key for p in both}, set()]


# R05
def test_a_candidate_that_failed_keeps_no_tensor_alive(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def greedy(*args: Any) -> None:
        mine = args[0].clone()
        kept.append(weakref.ref(mine))
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    loads(monkeypatch, greedy, attend)
    assert bench.try_program(TryProgram(program(0))).status == Status.OUT_OF_RESOURCES
    assert bench.try_program(TryProgram(program(1))).status == Status.OK
    assert [one() for one in kept] == [None] * len(kept) != []
