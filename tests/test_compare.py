"""`fagen bench`'s race of a kernel and torch's backends, on the CPU with a clock of its own."""

from __future__ import annotations

import pytest

from fagen.judge.measure import LaunchSet, MeasurePolicy, Replay
from fagen.problem import make_problem
from fagen.report.serving import race_lines, race_rows
from fagen.serve import library
from fagen.serve.compare import KERNEL, compare
from serve_fixtures import FakeMachine

POLICY = MeasurePolicy(warmup_ms=0.0, batch_ms=0.001, samples=1)


class StepClock:
    """Every batch of a contestant takes as many microseconds as contestants came before it."""

    def __init__(self) -> None:
        self.made = 0

    def batch(self, launch: LaunchSet, launches: int, sets: int) -> Replay:
        self.made += 1
        for number in range(sets):
            launch(number)
        us = float(self.made)
        return lambda: us

    def clock_mhz(self) -> int | None:
        return None


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    fake = FakeMachine()
    library.forget()
    monkeypatch.setattr("fagen.run.kernel.load", fake.load)
    monkeypatch.setattr("fagen.judge.verify.Gate", fake.gate)
    return fake


def test_the_kernel_and_every_backend_are_raced_or_named_with_a_reason(machine: FakeMachine):
    problem = make_problem(32, 16, heads=2, dtype="fp32", causal=True)
    raced = compare(problem, "cpu", None, policy=POLICY, rounds=3, clock=StepClock())
    entered = {*raced.timings, *raced.missing}
    assert entered >= {KERNEL}
    for backend in ("cudnn", "flash", "efficient", "math", "eager"):
        assert sum(backend in name for name in entered) == 1
    assert any("cudnn" in name and reason for name, reason in raced.missing.items())
    assert {len(timing.samples_us) for timing in raced.timings.values()} == {3}
    assert len(machine.loaded) == 1


def test_rows_of_a_race_are_fastest_first_and_relative_to_the_kernel(machine: FakeMachine):
    problem = make_problem(32, 16, heads=2, dtype="fp32")
    raced = compare(problem, "cpu", None, policy=POLICY, rounds=3, clock=StepClock())
    rows = race_rows(raced)
    assert [row["median_us"] for row in rows] == sorted(row["median_us"] for row in rows)
    assert rows[0]["name"] == KERNEL and rows[0]["times_kernel"] == 1.0
    assert rows[1]["times_kernel"] == rows[1]["median_us"] / rows[0]["median_us"]
    assert rows[0]["tflops"] == pytest.approx(problem.flops / rows[0]["median_us"] / 1e6)
    lines = race_lines(raced)
    assert POLICY.name in lines[1]
    assert len(lines) == 2 + len(raced.missing)
