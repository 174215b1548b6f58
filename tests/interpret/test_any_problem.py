"""Families on drawn legal problems, in Triton's interpreter, against float64 attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from attention import assert_exact, make_inputs, make_outputs, plain_attention
from fagen.config import Config
from fagen.generate.families import FAMILIES
from fagen.generate.families.base import every_choice
from fagen.generate.render import render
from fagen.generate.space import why_invalid
from fagen.problem import Problem, make_problem
from fagen.run.kernel import load
from fagen.target import preset
from interpretable import INTERPRETABLE

TARGET = preset("h200")
# Three families at 110 each: more than 300 problems.
EXAMPLES = 110

SIZES = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 128, 129, 150])
DIMS = st.sampled_from([1, 8, 16, 24, 40, 64, 72, 80, 96])


@st.composite
def problems(draw: Callable[[Any], Any]) -> Problem:
    causal = draw(st.sampled_from(["none", "top_left", "bottom_right"]))
    heads_kv = draw(st.sampled_from([1, 2]))
    dim = draw(DIMS)
    return make_problem(
        draw(SIZES),
        dim,
        batch=draw(st.sampled_from([1, 1, 2])),
        heads=heads_kv * draw(st.sampled_from([1, 2, 3])),
        kv_heads=heads_kv,
        seq_kv=draw(SIZES),
        head_dim_v=draw(st.sampled_from([dim, dim, 8, 40])),
        dtype=draw(st.sampled_from(["fp16", "fp32"])),  # bf16 products are garbage there
        causal=causal != "none",
        causal_align=causal if causal != "none" else "top_left",
        layout=draw(st.sampled_from(["aligned16", "any"])),
        scale_sign=draw(st.sampled_from(["positive", "any"])),
    )


def _choices(name: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(list(every_choice(FAMILIES[name].Knobs)))


def _nearest_valid(problem: Problem, name: str, knobs: Any) -> Config | None:
    """The drawn knobs when they are valid, else the family's first seed that is."""
    family = FAMILIES[name]
    drawn = [] if knobs is None else [knobs]
    for candidate in (*drawn, *family.seeds(problem, TARGET)):
        config = Config(name, candidate)
        if why_invalid(problem, TARGET, config) is None:
            return config
    return None


# N03, N04, N05
@pytest.mark.parametrize("name", INTERPRETABLE)
def test_any_legal_problem_is_exact(name: str):
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(problem=problems(), knobs=_choices(name), scale=st.sampled_from([None, 2.0, -0.5, 0.0]))
    @example(make_problem(2, 16, seq_kv=0, causal=True, dtype="fp16"), None, None)
    @example(
        make_problem(70, 16, seq_kv=3, causal=True, causal_align="bottom_right", dtype="fp32"),
        None,
        None,
    )
    def check(problem: Problem, knobs: Any, scale: float | None) -> None:
        config = _nearest_valid(problem, name, knobs)
        assert config is not None
        if scale is None or (scale <= 0 and problem.features.scale != "any"):
            scale = problem.shape.head_dim**-0.5
        q, k, v = make_inputs(problem, torch.Generator().manual_seed(0))
        o, lse = make_outputs(problem)
        load(render(problem, config), TARGET, "cpu").launch(q, k, v, o, lse, scale)
        assert_exact(o, lse, plain_attention(q, k, v, scale, problem.features.causal), v)

    check()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of 0/0, where a row sees no other score
@pytest.mark.parametrize("name", INTERPRETABLE)
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("hidden", [slice(0, 96), slice(96, None)])
def test_tiles_whose_scores_are_all_minus_infinity_count_for_nothing(
    name: str, causal: str, hidden: slice
):
    align = causal if causal != "none" else "top_left"
    problem = make_problem(
        64, 16, seq_kv=192, dtype="fp16", causal=causal != "none", causal_align=align
    )
    for knobs in list(every_choice(FAMILIES[name].Knobs))[:: 997 if name == "flash" else 7]:
        config = Config(name, knobs)
        if why_invalid(problem, TARGET, config) is not None:
            continue
        q, k, v = make_inputs(problem, torch.Generator().manual_seed(0))
        q.abs_()
        k[..., hidden, :] = -torch.inf
        o, lse = make_outputs(problem)
        load(render(problem, config), TARGET, "cpu").launch(q, k, v, o, lse, 0.25)
        o_truth, lse_truth = plain_attention(q, k, v, 0.25, problem.features.causal)
        assert torch.isfinite(lse_truth).any() or causal == "top_left"
        seen = torch.isfinite(lse_truth)  # others see no other score: 0, or NaN as torch has it
        torch.testing.assert_close(o[seen].double(), o_truth[seen], atol=4e-3, rtol=0)
        torch.testing.assert_close(lse[seen].double(), lse_truth[seen], atol=1e-3, rtol=0)


def test_zero_batch_launches_nothing():
    problem = make_problem(16, 16, batch=0, dtype="fp16")
    q, k, v = make_inputs(problem, torch.Generator().manual_seed(0))
    o, lse = make_outputs(problem)
    config = Config("flash", FAMILIES["flash"].Knobs(16, 32, 4, 1))
    load(render(problem, config), TARGET, "cpu").launch(q, k, v, o, lse, 0.25)
    assert o.shape == (0, 16, 16, 16)
    assert lse.shape == (0, 16, 16)


def test_strides_over_one_element_may_be_anything():
    problem = make_problem(40, 16, heads=1, dtype="fp16")
    q, k, v = make_inputs(problem, torch.Generator().manual_seed(0))
    odd = [x.as_strided(x.shape, (3, 5, x.stride(2), 1)) for x in (q, k, v)]
    config = Config("flash", FAMILIES["flash"].Knobs(64, 32, 4, 2, "tma"))
    results = []
    for tensors in ((q, k, v), odd):
        o, lse = make_outputs(problem)
        load(render(problem, config), TARGET, "cpu").launch(*tensors, o, lse, 0.25)
        results.append(o)
    assert torch.equal(*results)
