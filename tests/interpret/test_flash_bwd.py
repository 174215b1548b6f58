"""The portable backward kernels in Triton's interpreter, against gradients in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention import assert_gradients, make_gradient, make_inputs
from fagen.config import Config
from fagen.generate.families import flash_bwd
from fagen.generate.families.base import every_choice, why_invalid
from fagen.generate.families.flash_bwd import Knobs
from fagen.generate.program import Program
from fagen.generate.render import render
from fagen.judge.verify import Gate
from fagen.outcome import Verdict
from fagen.problem import Problem, make_problem
from fagen.run.kernel import load
from fagen.target import preset

H200 = preset("h200")
SMALL = Knobs(32, 32, 4, 1, 32, 32, 4, 1)


def backward(seq: int, dim: int, **words: Any) -> Problem:
    return make_problem(seq, dim, dtype=words.pop("dtype", "fp16"), direction="backward", **words)


def assert_exact(problem: Problem, knobs: Knobs, scale: float, low: float = 0.0) -> None:
    """low: added to every score, by a column of Q and K."""
    dice = torch.Generator().manual_seed(problem.shape.seq_q * 1000 + problem.shape.seq_kv)
    q, k, v = make_inputs(problem, dice)
    if low:
        # Sixteenths, so that scores are the same in whatever order they are summed up: LSE comes
        # from torch's, and a last bit of -1200 would show in dQ, times K's column of -150.
        q, k = ((16 * x).round() / 16 for x in (q, k))
        q[..., 0], k[..., 0] = 8.0, low / (8.0 * scale)
    launch = load(render(problem, Config(flash_bwd.NAME, knobs)), H200, "cpu").launch_poisoned
    assert_gradients(launch, problem, (q, k, v), make_gradient(problem, dice), scale)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize(("seq", "seq_kv"), [(70, 70), (40, 97), (97, 40), (1, 33)])
def test_gradients_are_exact(seq: int, seq_kv: int, causal: str, dtype: str) -> None:
    words: dict[str, Any] = {} if causal == "none" else {"causal": True, "causal_align": causal}
    problem = backward(seq, 24, seq_kv=seq_kv, heads=4, kv_heads=2, dtype=dtype, **words)
    assert_exact(problem, SMALL, 0.2)


@pytest.mark.parametrize("low", [-120.0, -300.0, 90.0])
@pytest.mark.parametrize("causal", [False, True])
def test_scores_far_below_and_above_zero_meet_ragged_ends(low: float, causal: bool) -> None:
    assert_exact(
        backward(45, 16, seq_kv=50, heads=2, causal=causal, dtype="fp32"), SMALL, 0.25, low
    )


def test_any_legal_problem_has_exact_gradients() -> None:
    sizes = st.sampled_from([0, 1, 2, 15, 16, 31, 33, 64, 65, 97, 129])
    dims = st.sampled_from([1, 8, 16, 40, 64, 72])

    @st.composite
    def problems(draw: Callable[[Any], Any]) -> Problem:
        causal = draw(st.sampled_from(["none", "top_left", "bottom_right"]))
        heads_kv = draw(st.sampled_from([1, 2]))
        words = {} if causal == "none" else {"causal": True, "causal_align": causal}
        return backward(
            draw(sizes),
            draw(dims),
            batch=draw(st.sampled_from([1, 2])),
            heads=heads_kv * draw(st.sampled_from([1, 3])),
            kv_heads=heads_kv,
            seq_kv=draw(sizes),
            head_dim_v=draw(dims),
            dtype=draw(st.sampled_from(["fp16", "fp32"])),
            layout=draw(st.sampled_from(["aligned16", "any"])),
            **words,
        )

    drawn = st.sampled_from(list(every_choice(Knobs)))

    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(problem=problems(), knobs=drawn, scale=st.sampled_from([0.15, 1.0, -0.3, 0.0]))
    def check(problem: Problem, knobs: Knobs, scale: float) -> None:
        valid = [
            k
            for k in (knobs, *flash_bwd.seeds(problem, H200))
            if why_invalid(flash_bwd, problem, H200, k) is None  # type: ignore[arg-type]
        ]
        assert_exact(problem, valid[0], scale)

    check()


# The gate


def checked(program: Program) -> Verdict:
    runner, gate = load(program, H200, "cpu"), Gate(program.problem, torch.device("cpu"))
    tile = flash_bwd.tile(program.config.knobs)
    return gate.check(runner.launch_poisoned, tile, program.limits, level="quick")


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_the_gate_lets_it_through(causal: str) -> None:
    words: dict[str, Any] = {} if causal == "none" else {"causal": True, "causal_align": causal}
    problem = backward(60, 24, seq_kv=70, heads=4, kv_heads=2, **words)
    verdict = checked(render(problem, Config(flash_bwd.NAME, SMALL)))
    assert verdict.passed, verdict.worst
