"""The gate's own test on the device, through the worker that tunes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

import pytest

from exact_variants import exact_variants
from fagen.generate.families import families_of
from fagen.generate.program import Program
from fagen.generate.render import render
from fagen.generate.space import why_invalid
from fagen.outcome import Status
from fagen.problem import Direction, Problem, make_problem
from fagen.target import toolchain
from fagen.tune.proxies import GpuWorker
from gpu_fixtures import QUICK, build_all, here
from mutations import MUTATIONS, mutated

SECONDS = 30.0
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
LEAST = {"forward": 50, "backward": 14}  # variants, and of each family
LEAST_OF_EACH = {"forward": 10, "backward": 4}
KINDS = [
    ("bf16", 128, 128),
    ("bf16", 64, 64),
    ("fp16", 80, 80),
    ("bf16", 256, 256),
    ("fp32", 64, 64),
    ("fp16", 192, 128),
    ("bf16", 1, 1),
]


@pytest.fixture(scope="module")
def worker() -> Iterator[GpuWorker]:
    gpu = GpuWorker("cuda:0")
    yield gpu
    gpu.close()


def families_here(direction: str) -> list[str]:
    """Families that this device can run."""
    problem = make_problem(200, 128)
    families = families_of(direction)
    return [f.NAME for f in families if f.why_unsupported(problem, here()) is None]


def tried(worker: GpuWorker, programs: list[Program]) -> dict[str, tuple[Status, str]]:
    """Status and reason by name; the programs of one problem together, as it is prepared once."""
    found = {}

    def problem_of(program: Program) -> Problem:
        return program.problem

    ordered = sorted(programs, key=lambda p: p.problem.key)
    for problem, group in groupby(ordered, problem_of):
        worker.prepare(problem, here(), QUICK)
        for program in group:
            outcome = worker.check(program, "full", SECONDS)
            found[program.name] = (outcome.status, outcome.reason)
    return found


def test_every_planted_fault_is_caught_and_never_timed(worker: GpuWorker):
    minor = toolchain().triton_minor
    planted = [m for family in MUTATIONS.values() for m in family]
    programs = [
        mutated(m, minor) for m in planted if why_invalid(m.case[0], here(), m.case[1]) is None
    ]
    build_all(programs)
    found = tried(worker, programs)
    assert len(found) == len(programs) >= 36
    families = Counter(program.config.family for program in programs)
    for direction in DIRECTIONS:
        assert all(families[family] >= 12 for family in families_here(direction))
    # A fault that reads or writes far outside takes its process with it: that is caught, too.
    missed = [name for name, (status, _) in found.items() if status == Status.OK]
    assert missed == []
    assert {s for s, _ in found.values()} <= {Status.WRONG_RESULT, Status.CRASHED}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_exact_variants_are_kept(worker: GpuWorker, direction: Direction):
    variants = exact_variants(here(), KINDS, each=2, direction=direction)
    minor = toolchain().triton_minor
    programs = [render(problem, config, minor) for problem, config in variants]
    build_all(programs)
    found = tried(worker, programs)
    assert len(found) >= LEAST[direction]
    families = Counter(config.family for _, config in variants)
    assert all(families[family] >= LEAST_OF_EACH[direction] for family in families_here(direction))
    assert {name: why for name, why in found.items() if why[0] != Status.OK} == {}
