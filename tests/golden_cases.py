"""The modules that are kept in tests/golden: together they take every template branch."""

from __future__ import annotations

from fagen.config import Config
from fagen.generate.families import (
    flash,
    flash_bwd,
    flash_bwd_roles,
    flash_bwd_ws,
    flash_ws,
    kv_outer,
    slim,
)
from fagen.generate.program import Program
from fagen.generate.render import render
from fagen.problem import Problem, make_problem


def golden_programs() -> list[Program]:
    oldest = [render(problem, config) for problem, config in CASES]
    return oldest + [render(problem, config, NEWEST) for problem, config in OTHER_IN_NEWEST]


def _flash(**knobs: object) -> Config:
    return Config("flash", flash.Knobs(**knobs))  # type: ignore[arg-type]


def _flash_ws(**knobs: object) -> Config:
    return Config("flash_ws", flash_ws.Knobs(**knobs))  # type: ignore[arg-type]


def _kv_outer(**knobs: object) -> Config:
    return Config("kv_outer", kv_outer.Knobs(**knobs))  # type: ignore[arg-type]


def _slim(**knobs: object) -> Config:
    return Config("slim", slim.Knobs(**knobs))  # type: ignore[arg-type]


def _flash_bwd(**knobs: object) -> Config:
    return Config("flash_bwd", flash_bwd.Knobs(**knobs))  # type: ignore[arg-type]


def _flash_bwd_ws(**knobs: object) -> Config:
    return Config("flash_bwd_ws", flash_bwd_ws.Knobs(**knobs))  # type: ignore[arg-type]


def _flash_bwd_roles(**knobs: object) -> Config:
    return Config("flash_bwd_roles", flash_bwd_roles.Knobs(**knobs))  # type: ignore[arg-type]


_FULL = make_problem(8192, 128)
_CAUSAL = make_problem(8192, 128, causal=True)
_ODD = make_problem(100, 80, seq_kv=70, dtype="fp16", causal=True, causal_align="bottom_right")
_VALUES_PADDED = make_problem(200, 64, head_dim_v=40, dtype="fp32", layout="any", scale_sign="any")
_STRIDED_CAUSAL = make_problem(
    200,
    72,
    head_dim_v=64,
    causal=True,
    causal_align="bottom_right",
    layout="any",
    scale_sign="any",
)
# Two tiles for each of q, k, v; rows that see no key.
_CORNER_96 = make_problem(
    300,
    96,
    seq_kv=500,
    dtype="fp16",
    causal=True,
    causal_align="bottom_right",
    scale_sign="any",
)
_WIDE_PADDED = make_problem(4096, 192, head_dim_v=120, causal=True, causal_align="bottom_right")

_GRADIENTS = make_problem(8192, 128, direction="backward")
_GRADIENTS_ODD = make_problem(
    200,
    72,
    head_dim_v=64,
    heads=4,
    kv_heads=2,
    dtype="fp32",
    causal=True,
    causal_align="bottom_right",
    layout="any",
    direction="backward",
)

_GRADIENTS_CAUSAL = make_problem(4096, 64, causal=True, direction="backward")
_GRADIENTS_CORNER = make_problem(
    300,
    96,
    seq_kv=400,
    head_dim_v=64,
    heads=4,
    kv_heads=2,
    dtype="fp16",
    causal=True,
    causal_align="bottom_right",
    direction="backward",
)
_GRADIENTS_WIDE = make_problem(
    1024, 192, head_dim_v=128, causal=True, causal_align="bottom_right", direction="backward"
)

CASES: list[tuple[Problem, Config]] = [
    (_FULL, _flash(block_n=128, num_stages=2, loads="tma")),
    (_CAUSAL, _flash(loads="tma", loop="rotate_p", mask="longest_first", order="heads_first")),
    (_CAUSAL, _flash(loop="rotate_s", mask="every_tile", order="head_groups")),
    (_CAUSAL, _flash(loop="rotate_p", mask="every_tile")),
    (_CAUSAL, _flash(block_m=64, block_n=128, num_warps=4, num_stages=1, max_registers=168)),
    (_ODD, _flash(block_m=64, num_warps=4, rescale_tau=8.0, rescale_skip="branch")),
    (_VALUES_PADDED, _flash(block_m=64, block_n=32, num_stages=2)),
    (_FULL, _kv_outer()),
    (_STRIDED_CAUSAL, _kv_outer(q_tiles=4)),
    (_ODD, _slim(block_n=32, row=128, loads="tma")),
    (make_problem(256, 64), _slim()),
    (_VALUES_PADDED, _slim(block_m=16, block_n=32)),
    (_FULL, _flash_ws()),
    (_FULL, _flash_ws(block_m=64, block_n=64, claim="early", output="stores")),
    (_CAUSAL, _flash_ws(half_diagonal=True, ping_pong=True, claim="early")),
    (
        make_problem(4096, 64, causal=True),
        _flash_ws(block_m=192, slots=3, boundary="finish", ping_pong=True, section_mb=32),
    ),
    (
        make_problem(4096, 128, causal=True),
        _flash_ws(ping_pong=True, rescale="under_scores", queries="registers"),
    ),
    (make_problem(256, 64), _flash_ws(block_n=64, rescale="under_scores", ping_pong=True)),
    (
        make_problem(4096, 128, causal=True),
        _flash_ws(block_m=192, block_n=64, slots=3, output="queries", rescale_tau=8.0),
    ),
    (
        make_problem(1024, 64),
        _flash_ws(
            block_m=256,
            block_n=64,
            slots=6,
            boundary="finish",
            rescale_tau=8.0,
            rescale="under_scores",
        ),
    ),
    (
        make_problem(4096, 96),
        _flash_ws(block_m=192, boundary="finish", rescale_tau=8.0, in_flight=1),
    ),
    (_CORNER_96, _flash_ws(output="queries", claim="early")),
    (
        make_problem(4096, 256),
        _flash_ws(block_n=64, boundary="finish", rescale_tau=8.0, output="stores", queries="half"),
    ),
    (
        _CORNER_96,
        _flash_ws(
            rescale="under_scores", half_diagonal=True, queries="registers", rescale_tau=8.0
        ),
    ),
    (
        make_problem(40, 128, seq_kv=900, heads=8, kv_heads=2, causal=True),
        _flash_ws(block_n=64, slots=3, pack_heads=True, boundary="finish"),
    ),
    (
        make_problem(16, 128, seq_kv=900, heads=8, kv_heads=2),
        _flash_ws(block_m=64, block_n=64, pack_heads=True, boundary="finish", output="stores"),
    ),
    (_WIDE_PADDED, _flash_ws(boundary="finish", output="stores", rescale="under_scores")),
    (_GRADIENTS, _flash_bwd_ws()),
    (_GRADIENTS, _flash_bwd_ws(dq="kernel")),
    (_GRADIENTS, _flash_bwd_ws(dq="kernel", persistent=True)),
    (_GRADIENTS_CAUSAL, _flash_bwd_ws(kv_block_m=128, persistent=True)),
    (_GRADIENTS, _flash_bwd_ws(dq="ordered", early_scores=False)),
    (_GRADIENTS_CAUSAL, _flash_bwd_ws(kv_block_m=128, early_scores=False)),
    (_GRADIENTS_CAUSAL, _flash_bwd_ws(kv_block_m=128, dq="ordered")),
    (_GRADIENTS_CORNER, _flash_bwd_ws(dq="kernel", q_early=True, early_scores=False)),
    (_GRADIENTS_CORNER, _flash_bwd_ws()),
    (make_problem(1024, 256, direction="backward"), _flash_bwd_roles(q_block_n=32)),
    (_GRADIENTS_WIDE, _flash_bwd_roles(q_block_n=64, q_early=True)),
    (_GRADIENTS_WIDE, _flash_bwd_roles(q_block_n=64, kv_slots=3, kv_early=True)),
    (_GRADIENTS, _flash_bwd()),
    (_GRADIENTS_ODD, _flash_bwd(kv_block_m=32, kv_block_n=32, q_block_m=32, q_block_n=32)),
]

# Gluon's words for loads and stores by TMA changed after 3.7.
NEWEST = (3, 9)
OTHER_IN_NEWEST: list[tuple[Problem, Config]] = [
    case
    for case in CASES
    if case[1] == _flash_ws()
    or case[0] in (_CORNER_96, _GRADIENTS_WIDE)
    or case == (_GRADIENTS, _flash_bwd_ws())
]
