"""flash_bwd_roles: the backward pass for Hopper at head dims above 128, always the same bits.

dK and dV of 64 keys don't fit one group's registers: one group of warps sums dV, another dK.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fagen.generate.families import bwd_order, bwd_q, bwd_side
from fagen.generate.families.base import Constraint, Pass, knob
from fagen.generate.families.parts import width
from fagen.generate.families.tiling import cdiv, descriptor, padded, size_args
from fagen.generate.program import Arg, Entry, Sizes, Workspace
from fagen.problem import ITEM_BYTES, Problem
from fagen.target import Target

NAME = "flash_bwd_roles"
DIRECTION = "backward"
TEMPLATE = "flash_bwd_roles.py.j2"

KEYS = 64  # whose dK and dV a block owns
ROWS = 64  # query rows of a step
WIDE = 256  # the padded head dim from which on a group has room for one gradient alone


@dataclass(frozen=True)
class Knobs(bwd_q.Knobs):
    """The kernel for dK and dV, and the one for dQ."""

    kv_slots: int = knob(2, (2, 3), "tiles of Q and of dO in flight towards dK and dV")
    p_slots: int = knob(2, (1, 2), "tiles of P between the group that makes it and the one of dK")
    kv_early: bool = knob(
        False, (False, True), "queue QK^T and dO V^T of the next step before dV and dK of this one"
    )


CONSTRAINTS: tuple[Constraint, ...] = (
    *bwd_q.CONSTRAINTS,
    Constraint(
        "kv_shared_memory",
        "{kv_slots} slots of Q and dO, and {p_slots} of P, need more shared memory than a block "
        "has.",
        lambda p, t, k: _kv_shared_bytes(p, k) <= t.shared_bytes,
    ),
)


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if target.arch != 90:
        return "flash_bwd_roles is for Hopper: it needs compute capability 9.0."
    if problem.shape.dtype == "fp32":
        return "flash_bwd_roles multiplies 16-bit operands."
    dims = problem.shape.head_dim, problem.shape.head_dim_v
    if max(map(padded, dims)) != WIDE:
        return "flash_bwd_roles is for head dims of 129 to 256."
    return None


def seeds(problem: Problem, target: Target) -> list[Knobs]:
    """At D256 one slot of P or two were 1 % apart on one H200, and 32 keys in two slots are all
    that fits beside dQ. Where values have 128 columns, 64 keys and three slots fit as well, and
    the next step's products queued won with them (D192/128, N4096)."""
    wide, narrow = Knobs(q_block_n=64), Knobs(q_block_n=32)
    three = replace(wide, kv_slots=3, kv_early=True)
    found = [three, replace(three, q_early=True), replace(three, p_slots=1)]
    for knobs in (wide, narrow):
        found += [knobs, replace(knobs, p_slots=1), replace(knobs, q_early=True)]
    return [*found, replace(wide, kv_slots=3), replace(narrow, kv_early=True)]


def repeats(knobs: Knobs) -> bool:
    return True


def context(problem: Problem, knobs: Knobs) -> dict[str, Any]:
    bottom_right = problem.features.causal == "bottom_right"
    return {
        "words": bwd_q.words(problem),
        "side": bwd_side.words(problem),
        "unshift": " - seq_kv + seq_q" if bottom_right else "",
        "gl_dtype": {"bf16": "gl.bfloat16", "fp16": "gl.float16"}[problem.shape.dtype],
    }


def entries(problem: Problem, knobs: Knobs, name: str) -> tuple[Entry, ...]:
    dim, dim_v = problem.shape.head_dim, problem.shape.head_dim_v
    args = (
        descriptor("q_desc", problem, ROWS, dim),
        descriptor("k_desc", problem, KEYS, dim),
        descriptor("v_desc", problem, KEYS, dim_v),
        descriptor("g_desc", problem, ROWS, dim_v),
        descriptor("dk_desc", problem, KEYS, dim),
        descriptor("dv_desc", problem, KEYS, dim_v),
        Arg("lse2_desc", f"tensordesc<fp32[{ROWS}]>"),
        Arg("delta_desc", f"tensordesc<fp32[{ROWS}]>"),
        Arg("scale_log2", "fp32"),
        *size_args(),
        bwd_order.ARG,
    )
    return (
        bwd_side.entry(problem, name),
        Entry(f"{name}_kv", args, 4, 1, bwd_q.LAUNCH_REGISTERS, "gluon", ("DK", "DV")),
        bwd_q.entry(problem, knobs, name),
    )


def grid(
    problem: Problem, knobs: Knobs, entry: int, sizes: Sizes, sm_count: int
) -> tuple[int, int, int]:
    return (
        bwd_side.grid(sizes),
        (cdiv(sizes.seq_kv, KEYS) * sizes.batch * sizes.heads_kv, 1, 1),
        bwd_q.grid(sizes),
    )[entry]


def scalars(problem: Problem, knobs: Knobs, sizes: Sizes, sm_count: int) -> dict[str, int]:
    return bwd_order.scalars(problem, sizes, ROWS)


def workspaces(knobs: Knobs, sizes: Sizes) -> tuple[Workspace, ...]:
    return bwd_side.workspaces(sizes)


def adds(knobs: Knobs) -> bool:
    return False


def passes(problem: Problem, knobs: Knobs) -> tuple[Pass, ...]:
    columns = 2 * (width(problem.shape.head_dim) + width(problem.shape.head_dim_v))
    kv = Pass(ROWS, KEYS, True, columns, 0.0, 2, knobs.kv_slots)
    return kv, bwd_q.main_pass(problem, knobs)


def limits(problem: Problem, knobs: Knobs) -> dict[str, range]:
    return bwd_side.LIMITS


def tile(knobs: Knobs) -> tuple[int, int]:
    return bwd_q.TILE, max(KEYS, knobs.q_block_n)


def shared_bytes(problem: Problem, knobs: Knobs) -> int:
    return max(bwd_q.shared_bytes(problem, knobs), _kv_shared_bytes(problem, knobs))


def _kv_shared_bytes(problem: Problem, knobs: Knobs) -> int:
    """K and V, the slots of Q and dO with two numbers a row, and those of P."""
    columns = padded(problem.shape.head_dim) + padded(problem.shape.head_dim_v)
    tiles = columns * (KEYS + knobs.kv_slots * ROWS) + knobs.p_slots * KEYS * ROWS
    terms = 2 * 4 * knobs.kv_slots * ROWS
    return ITEM_BYTES[problem.shape.dtype] * tiles + terms + bwd_q.BARRIER_BYTES
