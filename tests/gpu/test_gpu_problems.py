"""Every family on drawn legal problems, on the device, against float64 attention."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention import assert_exact, make_inputs, make_outputs, plain_attention
from exact_variants import exact_variants
from fagen.generate.families import families_of
from fagen.generate.program import Program, Sizes
from fagen.generate.render import render
from fagen.problem import make_problem
from fagen.run.kernel import Runner, load
from fagen.target import toolchain
from gpu_fixtures import build_all, here, on_device

EXAMPLES = 520
PLAIN = make_problem(200, 128)

KINDS = [
    ("bf16", 128, 128),
    ("fp16", 64, 64),
    ("bf16", 80, 40),
    ("fp32", 64, 64),
    ("bf16", 256, 256),
    ("fp16", 1, 8),
    ("bf16", 192, 128),
    ("bf16", 64, 256),
    ("fp16", 96, 96),
    ("fp32", 40, 24),
    ("bf16", 8, 8),
    ("bf16", 1, 1),
]
SIZES = st.sampled_from(
    [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 300, 511, 640, 1000]
)


@pytest.fixture(scope="module")
def runners() -> list[Runner]:
    minor = toolchain().triton_minor
    variants = exact_variants(here(), KINDS, each=2)
    programs: list[Program] = [render(problem, config, minor) for problem, config in variants]
    build_all(programs)
    return [load(program, here(), "cuda:0") for program in programs]


@st.composite
def calls(draw: Any) -> tuple[int, int, int, int, int, int, float]:
    """(program, batch, heads_kv, ratio, seq_q, seq_kv, scale)"""
    return (
        draw(st.integers(0, 10_000)),
        draw(st.sampled_from([1, 1, 2, 3])),
        draw(st.sampled_from([1, 2, 5])),
        draw(st.sampled_from([1, 1, 2, 3, 8])),
        draw(SIZES),
        draw(SIZES),
        draw(st.sampled_from([0.0, 0.05, 0.3, 1.0, -0.2])),
    )


def test_any_legal_problem_is_exact(runners: list[Runner]):
    seen: set[tuple[str, str]] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(call=calls())
    def check(call: tuple[int, int, int, int, int, int, float]) -> None:
        number, batch, heads_kv, ratio, seq_q, seq_kv, scale = call
        runner = runners[number % len(runners)]
        made_for = runner.program.problem
        ratio = min(runner.program.limits.get("group", (ratio,)))
        s, f = made_for.shape, made_for.features
        problem = make_problem(
            seq_q,
            s.head_dim,
            batch=batch,
            heads=heads_kv * ratio,
            kv_heads=heads_kv,
            seq_kv=seq_kv,
            head_dim_v=s.head_dim_v,
            dtype=s.dtype,
            causal=f.causal != "none",
            causal_align=f.causal if f.causal != "none" else "top_left",
            layout=made_for.layout,
            scale_sign=f.scale,
        )
        if runner.program.why_unfit(Sizes.of(problem)) is not None:
            return
        if f.scale != "any" and scale <= 0:
            scale = s.head_dim**-0.5
        drawn = make_inputs(problem, torch.Generator().manual_seed(number))
        q, k, v = (on_device(x) for x in drawn)
        o, lse = make_outputs(problem, "cuda:0")
        runner.launch_poisoned(q, k, v, o, lse, scale)
        assert_exact(o, lse, plain_attention(q, k, v, scale, f.causal), v)
        seen.add((runner.program.config.family, runner.program.name))

    check()
    made = Counter(runner.program.config.family for runner in runners)
    reached = Counter(family for family, _ in seen)
    assert all(reached[family] >= count * 3 // 4 for family, count in made.items())
    assert set(made) >= {
        f.NAME for f in families_of("forward") if not f.why_unsupported(PLAIN, here())
    }
