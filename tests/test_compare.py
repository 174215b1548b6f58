"""`fagen bench`'s race of a kernel and its peers, on the CPU with a clock of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fagen.judge.calls import CallTiming
from fagen.judge.measure import LaunchSet, MeasurePolicy, Replay
from fagen.judge.peers import Peer, lineup
from fagen.outcome import Timing
from fagen.problem import Problem, make_problem
from fagen.report.bench import (
    Cell,
    bench_row,
    best_peer,
    cell_line,
    grid_lines,
    grid_table,
    race_lines,
    race_rows,
    race_table,
    rate_table,
    ratio,
    short,
)
from fagen.serve import library
from fagen.serve.compare import DETERMINISTIC, KERNEL, Comparison, compare
from fagen.target import preset
from serve_fixtures import FakeMachine

POLICY = MeasurePolicy(warmup_ms=0.0, batch_ms=0.001, samples=1, pause_ms=0.0)


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


def test_the_kernel_and_every_backend_are_raced_or_named_with_a_reason(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    problem = make_problem(32, 16, heads=2, dtype="fp32", causal=True)
    raced = compare(problem, "cpu", None, policy=POLICY, rounds=3, clock=StepClock())
    entered = {*raced.timings, *raced.missing}
    assert entered >= {KERNEL}
    assert {short(name) for name in entered} == {KERNEL, *lineup.STANDARD}
    assert any("cudnn" in name and reason for name, reason in raced.missing.items())
    assert {len(timing.samples_us) for timing in raced.timings.values()} == {3}
    assert set(raced.calls) == set(raced.timings)
    for timing in raced.calls.values():
        assert len(timing.host.samples_us) == len(timing.call.samples_us) == 3
    assert len(machine.loaded) == 1


def test_only_the_named_backends_are_raced(machine: FakeMachine):
    problem = make_problem(32, 16, heads=2, dtype="fp32")
    raced = compare(
        problem, "cpu", None, backends=["math"], policy=POLICY, rounds=2, clock=StepClock()
    )
    assert [short(name) for name in (*raced.timings, *raced.missing)] == [KERNEL, "math"]


def test_a_kernel_of_the_same_bucket_is_counted_by_the_problem_that_was_asked(
    machine: FakeMachine,
):
    sizes = [17, 32]  # one bucket, one remembered kernel
    raced = [
        compare(
            make_problem(seq, 16, heads=2, dtype="fp32"),
            *("cpu", None),
            **{"backends": ["math"], "policy": POLICY, "rounds": 1, "clock": StepClock()},
        )
        for seq in sizes
    ]
    assert raced[0].kernel.chosen is raced[1].kernel.chosen
    rates = [race_rows(one)[0]["tflops"] for one in raced]
    assert rates[0] < rates[1]


@pytest.fixture
def two_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeasurePolicy, "input_sets", lambda *_: 2)


@pytest.mark.usefixtures("two_sets")
def test_backward_passes_are_raced_as_torch_calls_them(machine: FakeMachine):
    problem = make_problem(32, 16, heads=4, kv_heads=2, dtype="fp32", direction="backward")
    words = {"backends": ["math", "fa3"], "policy": POLICY, "rounds": 2, "clock": StepClock()}
    raced = compare(problem, "cpu", None, **words)
    assert [short(name) for name in raced.timings] == [KERNEL, "math"]
    assert set(raced.calls) == set(raced.timings)
    assert [short(name) for name in raced.missing] == ["fa3"]
    assert raced.deterministic is None  # the one that is raced repeats
    assert raced.kernel.config.family == "flash_bwd"
    backward, forward = (
        next(one for one in machine.loaded if one.program.problem.direction == direction)
        for direction in ("backward", "forward")
    )
    # Once for each input set, and once for the calls; gradients again and again.
    assert len(forward.launches) == 3 < len(backward.launches)
    assert set(backward.wanted) == {("DQ", "DK", "DV")}


@pytest.mark.usefixtures("two_sets")
def test_where_gradients_do_not_repeat_a_kernel_whose_do_is_raced_too(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, bool]] = []

    def get(problem: Problem, *, deterministic: bool = False, **words: Any) -> Any:
        asked.append((problem.direction, deterministic))
        return library.get(problem, deterministic=deterministic, **words)

    monkeypatch.setattr("fagen.serve.compare.repeats", lambda _: False)
    monkeypatch.setattr("fagen.serve.compare.get", get)
    problem = make_problem(32, 16, heads=2, dtype="fp32", direction="backward")
    words = {"backends": ["math"], "policy": POLICY, "rounds": 3, "clock": StepClock()}
    raced = compare(problem, "cpu", None, **words)
    pairs = [
        (direction, which) for direction in ("backward", "forward") for which in (False, True)
    ]
    assert asked == pairs
    assert [short(name) for name in raced.timings] == [KERNEL, DETERMINISTIC, "math"]
    assert raced.deterministic is not None and raced.deterministic.deterministic
    assert short(str(best_peer(raced.timings))) == "math"
    lines = race_lines(raced)
    assert lines[1].startswith(f"{DETERMINISTIC} is <fagen.GradientKernel flash_bwd(")
    row = bench_row(Cell(problem, (), raced), preset("h200"))
    assert row["deterministic_config"]["family"] == "flash_bwd"
    forward = compare(replace(problem, direction="forward"), "cpu", None, **words)
    assert DETERMINISTIC not in forward.timings and forward.deterministic is None


@pytest.mark.usefixtures("two_sets")
def test_a_peer_whose_forward_pass_fails_before_its_calls_is_named(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
):
    ready, made = Peer.ready, []

    def some(self: Peer, *given: Any) -> Any:
        made.append(self.backend)
        if made.count("math") > 3:  # tried, and two sets
            raise RuntimeError("CUDA out of memory")
        return ready(self, *given)

    monkeypatch.setattr(Peer, "ready", some)
    problem = make_problem(32, 16, heads=2, dtype="fp32", direction="backward")
    words = {"backends": ["math"], "policy": POLICY, "rounds": 1, "clock": StepClock()}
    raced = compare(problem, "cpu", None, **words)
    assert [short(name) for name in raced.timings] == [KERNEL, "math"]
    assert [short(name) for name in raced.calls] == [KERNEL]
    assert list(raced.missing.values()) == ["RuntimeError: CUDA out of memory"]


# What is shown of it

US = {
    KERNEL: (10.0, 11.0, 12.0),
    "sdpa-cudnn 9.1 (torch 2)": (12.0, 11.0, 15.0),
    "fa3 (fa3-fwd 0.0.3)": (11.0, 11.55, 12.6),
}


@pytest.fixture
def raced(machine: FakeMachine) -> Comparison:
    problem = make_problem(32, 16, heads=2, dtype="fp32", causal=True)
    kernel = library.get(problem, device="cpu")
    timings = {name: Timing(us, "p") for name, us in US.items()}
    calls = {
        name: CallTiming(Timing((3.0, 3.0, 4.0), "w"), Timing((30.0, 31.0, 32.0), "w"))
        for name in US
    }
    missing = {"flex (torch 2)": "no compiler"}
    return Comparison(problem, kernel, timings, calls, missing, "p")


def test_rows_of_a_race_are_fastest_first_and_relative_to_the_kernel(raced: Comparison):
    rows = race_rows(raced)
    assert [short(row["name"]) for row in rows] == [KERNEL, "fa3", "cudnn"]
    assert rows[0]["times_kernel"] == 1.0
    # Of the same rounds: 1.1, 1.05, 1.05.
    assert rows[1]["times_kernel"] == pytest.approx(1.05)
    assert rows[1]["times_kernel_p80"] == pytest.approx(1.1)
    assert rows[0]["tflops"] == pytest.approx(raced.problem.flops / 11.0 / 1e6)
    assert (rows[0]["host_us"], rows[0]["call_us"]) == (3.0, 31.0)
    assert rows[0]["samples_us"] == [10.0, 11.0, 12.0]
    assert race_table(raced)[1]["x fagen"] == rows[1]["times_kernel"]


def test_drift_that_hits_both_cancels():
    assert ratio(Timing((2.0, 4.0, 8.0), "p"), Timing((1.0, 2.0, 4.0), "p")) == (2.0, 2.0, 2.0)


def test_lines_of_a_race_name_the_best_peer_the_policy_and_the_missing(raced: Comparison):
    lines = race_lines(raced)
    assert "Kernel time of the best peer, fa3 (fa3-fwd 0.0.3): 1.050x fagen's" in lines[1]
    assert lines[2].startswith("Host time of the best peer")
    assert lines[-1] == "Not measured: flex (torch 2): no compiler"
    assert any("Kernel times by p" in line for line in lines)


def test_json_holds_the_kernel_its_race_and_the_best_peer(raced: Comparison):
    row = bench_row(Cell(raced.problem, (), raced), preset("h200"))
    assert row["config"] == raced.kernel.config.to_dict()
    assert row["best_kernel_peer"].startswith("fa3")
    assert row["times_best_kernel"] == pytest.approx(1.05)
    assert row["times_best_host"] == 1.0
    assert row["missing"] == [{"name": "flex (torch 2)", "reason": "no compiler"}]
    assert row["roofline_us"] > 0


def test_a_kernel_that_failed_leaves_its_peers(raced: Comparison):
    alone = replace(raced, timings={n: t for n, t in raced.timings.items() if n != KERNEL})
    found = Cell(raced.problem, (), alone)
    assert bench_row(found, preset("h200"))["times_best_kernel"] is None
    assert [row["times_kernel"] for row in race_rows(alone)] == [None, None]
    assert "fagen failed" in cell_line(found)
    assert grid_table([found], preset("h200"))[0]["fagen us"] is None


def test_a_grid_is_a_row_a_shape_and_its_mean(raced: Comparison):
    slower = replace(
        raced,
        problem=make_problem(64, 16, heads=2, dtype="fp32"),
        timings={**raced.timings, KERNEL: Timing((22.0, 23.1, 25.2), "p")},
        missing={},
    )
    cells = [Cell(one.problem, (), one) for one in (raced, slower)]
    cells.append(Cell(make_problem(128, 16), (), error="no memory"))
    first, second, third = grid_table(cells, preset("h200"))
    assert (first["best peer"], first["x fagen"]) == ("fa3", pytest.approx(1.05))
    assert second["x fagen"] == pytest.approx(0.5)
    assert third["fagen us"] is None
    assert list(rate_table(cells)[0]) == ["TFLOP/s", KERNEL, "cudnn", "fa3"]
    lines = grid_lines(cells, 4)
    assert lines[0] == "Partial: 3 of 4 shapes."
    assert "0.7246x fagen's, geometric mean of 2; least 0.5x at fp32 B1 H2 N64" in lines[1]
    assert "Not measured at 1 of 2: flex (torch 2): no compiler" in lines
    assert lines[-1] == "Failed: bf16 B1 H16 N128 D16 full: no memory"
    assert cell_line(cells[0]) == "fagen 11 us, fa3 11.55 us, 1.050x fagen's"
    assert best_peer({KERNEL: Timing((1.0,), "p")}) is None
