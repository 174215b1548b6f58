"""The gate's own test, through the worker of offline tuning: faults caught, variants kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from exact_variants import exact_variants
from fagen.config import Config
from fagen.generate.families import FAMILIES
from fagen.generate.render import render
from fagen.outcome import Status
from fagen.problem import Problem
from fagen.target import preset
from fagen.tune.children import Child
from fagen.tune.jobs import InterpretJob, Tried
from interpretable import INTERPRETABLE
from mutations import MUTATIONS, Mutation, mutated

PLANTED = [m for family in MUTATIONS.values() for m in family if not m.gpu_only]
VARIANTS = [
    (problem, config)
    for problem, config in exact_variants(
        preset("h200"),
        [("fp16", 16, 16), ("fp32", 24, 24)],  # bf16 products are garbage in the interpreter
        each=4,
        # The gate's shapes follow the tile, and the interpreter's time follows them.
        keep=lambda config: config.knobs.block_m <= 64 and config.knobs.block_n <= 64,
    )
    if render(problem, config).interpretable
]
SECONDS = 120.0


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Child]:
    child = Child("interpret")
    yield child
    child.close()


def test_every_family_has_a_dozen_faults_and_there_are_fifty_variants():
    assert set(MUTATIONS) == set(FAMILIES)
    for name, family in MUTATIONS.items():
        here = [m for m in family if name not in INTERPRETABLE or not m.gpu_only]
        assert len(here) >= 12
    assert len(set(VARIANTS)) >= 50


def test_faults_have_names_of_their_own():
    names = [mutated(fault).name for family in MUTATIONS.values() for fault in family]
    assert len(set(names)) == len(names)


# T01
@pytest.mark.parametrize("mutation", PLANTED, ids=lambda m: f"{m.case[1].family}: {m.name}")
def test_planted_fault_is_caught(interpreter: Child, mutation: Mutation):
    tried: Tried = interpreter.call(InterpretJob(mutated(mutation), preset("h200")), SECONDS)
    assert tried.status == Status.WRONG_RESULT
    assert tried.verdict is not None
    assert not tried.verdict.passed


@pytest.mark.parametrize(("problem", "config"), VARIANTS, ids=str)
def test_exact_variant_is_kept(interpreter: Child, problem: Problem, config: Config):
    job = InterpretJob(render(problem, config), preset("h200"))
    tried: Tried = interpreter.call(job, SECONDS)
    assert tried.status == Status.PREDICTED, tried.reason
