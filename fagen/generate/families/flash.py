"""flash: query tile outside, key/value tiles inside (FlashAttention-2 order)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fagen.generate.families.base import Constraint, knob
from fagen.generate.families.tiling import cdiv, dim_words, forward_args, padded, tensor_bytes
from fagen.generate.program import Entry, Sizes, Workspace
from fagen.problem import Problem, size_bucket
from fagen.target import Target

NAME = "flash"
DIRECTION = "forward"
TEMPLATE = "flash.py.j2"

# Accumulator registers a thread, of 255. Compiled for sm_90 (Triton 3.6, D128, 8 warps): 128x128
# uses 187 plain and 255 with carried scores, neither spills; D256 at 128x128 spills in every form.
MAX_TILE_REGISTERS = 224


@dataclass(frozen=True)
class Knobs:
    """One FlashAttention-2 kernel."""

    block_m: int = knob(128, (16, 64, 128), "query rows of a tile")
    block_n: int = knob(64, (32, 64, 128), "keys of a tile: fewer, larger steps against registers")
    num_warps: int = knob(8, (4, 8), "warps that share a tile")
    num_stages: int = knob(3, (1, 2, 3, 4), "key/value tiles in flight, each costs shared memory")
    loads: str = knob("pointer", ("pointer", "tma"), "how tiles reach shared memory")
    loop: str = knob(
        "plain",
        ("plain", "rotate_s", "rotate_p"),
        "what is carried over the loop edge, so that a matrix product runs under the softmax: "
        "nothing, the next scores, or the last probabilities",
    )
    mask: str = knob(
        "split",
        ("every_tile", "split", "longest_first"),
        "mask every tile; only those at the edge, in a loop of their own; the same and the rows "
        "with most keys first",
    )
    rescale_tau: float = knob(
        0.0, (0.0, 4.0, 8.0), "keep the old maximum within this many log2 units; 0: never"
    )
    rescale_skip: str = knob(
        "never", ("never", "branch"), "multiply always, or branch around it when no row moved"
    )
    order: str = knob(
        "tiles_first",
        ("tiles_first", "heads_first", "head_groups"),
        "which programs are neighbours, and so share keys in L2",
    )
    # Three blocks of 64x128 on 4 warps share a multiprocessor of an H200 below 170 registers. They
    # hide each other's loads and softmax: 983 us against 1204 at 128x128 on 8 warps (bf16 D128
    # N8192 full, raced, 2026-11-29). Under a causal mask they need the cap (186 without it):
    # 510 us, the best without it 545.
    max_registers: int = knob(
        0, (0, 128, 168), "cap on a thread's registers, for more blocks a multiprocessor; 0: none"
    )


def _registers(problem: Problem, knobs: Knobs) -> float:
    carried = {"plain": 1.5, "rotate_s": 2.5, "rotate_p": 2.0}[knobs.loop]
    columns = padded(problem.shape.head_dim_v) + carried * knobs.block_n
    return knobs.block_m * columns / (32 * knobs.num_warps)


def _fits_registers(problem: Problem, knobs: Knobs) -> bool:
    most = min(MAX_TILE_REGISTERS, knobs.max_registers or MAX_TILE_REGISTERS)
    return _registers(problem, knobs) <= most


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "tma_needs_hopper",
        "Tensor descriptors need compute capability 9.0.",
        lambda p, t, k: k.loads != "tma" or t.arch >= 90,
    ),
    Constraint(
        "tma_needs_alignment",
        "Tensor descriptors need 16-byte aligned pointers and strides.",
        lambda p, t, k: k.loads != "tma" or p.layout == "aligned16",
    ),
    Constraint(
        "rows_fit_tile",
        "A tile of {block_m} query rows would be mostly empty.",
        lambda p, t, k: k.block_m <= max(16, size_bucket(p.shape.seq_q)),
    ),
    Constraint(
        "small_tile_for_few_rows",
        "A tile of 16 rows leaves the matrix unit idle: it is for few rows, or for fp32.",
        lambda p, t, k: k.block_m > 16 or p.shape.seq_q <= 32 or p.shape.dtype == "fp32",
    ),
    Constraint(
        "keys_fit_tile",
        "A tile of {block_n} keys would be mostly empty.",
        lambda p, t, k: k.block_n <= max(32, size_bucket(p.shape.seq_kv)),
    ),
    Constraint(
        "warps_cover_rows",
        # 128 rows on 4 warps put a wait after every wgmma; 16 rows on 8 warps split the keys.
        "{num_warps} warps don't suit {block_m} query rows.",
        lambda p, t, k: (k.block_m, k.num_warps) in ((16, 4), (64, 4), (64, 8), (128, 8)),
    ),
    Constraint(
        "registers",
        "The accumulators of {block_m}x{block_n} don't fit {num_warps} warps' registers.",
        lambda p, t, k: _fits_registers(p, k),
    ),
    Constraint(
        "shared_memory",
        "{block_m}x{block_n} in {num_stages} stages needs more shared memory than a block has.",
        lambda p, t, k: shared_bytes(p, k) <= t.shared_bytes,
    ),
    Constraint(
        "longest_first_is_causal",
        "Without a causal mask all query tiles are equally long.",
        lambda p, t, k: k.mask != "longest_first" or p.features.causal != "none",
    ),
    Constraint(
        "skip_needs_tau",
        "A rescale can only be skipped when a threshold keeps the old maximum.",
        lambda p, t, k: (k.rescale_tau > 0) == (k.rescale_skip == "branch"),
    ),
    Constraint(
        "skip_fails_on_blackwell",
        "Triton can't compile the branch around the rescale for Blackwell.",  # seen in 3.7.1
        lambda p, t, k: k.rescale_skip != "branch" or t.arch < 100,
    ),
    Constraint(
        "carried_p_needs_columns",
        # One H200, Triton 3.6, bf16, 64x128 on 4 warps: D1 ends in an illegal access (at the last
        # PV, says compute-sanitizer), D2 in wrong values. The drawn problems above 16 are right.
        "With pointer loads and few value columns, carried probabilities meet the wrong values.",
        lambda p, t, k: k.loop != "rotate_p" or k.loads != "pointer" or p.shape.head_dim_v >= 16,
    ),
    Constraint(
        "fp32_needs_small_tiles",
        # Without tensor cores the operands sit in registers: 128x128 at D64 spills 29 KB (sm_90).
        "fp32 operands of {block_m}x{block_n} don't fit {num_warps} warps' registers.",
        lambda p, t, k: (
            p.shape.dtype != "fp32"
            or (k.block_n == 32 and (k.block_m, k.num_warps) in ((16, 4), (64, 8)))
        ),
    ),
    Constraint(
        "cap_is_for_small_blocks",
        "Capped at {max_registers} registers, {num_warps} warps leave no room for another block.",
        lambda p, t, k: k.max_registers == 0 or (k.num_warps == 4 and p.shape.dtype != "fp32"),
    ),
    Constraint(
        "one_stage_is_for_plain",
        "A rotated loop in one stage overlaps nothing.",
        lambda p, t, k: k.loop == "plain" or k.num_stages > 1,
    ),
)


def why_unsupported(problem: Problem, target: Target) -> str | None:
    return None


def seeds(problem: Problem, target: Target) -> list[Knobs]:
    mask = "split" if problem.features.causal == "none" else "longest_first"
    if problem.shape.dtype == "fp32":
        return _seeds_fp32(problem, target, mask)
    small = [
        Knobs(16, 64, 4, 2, mask=mask),
        Knobs(16, 32, 4, 2, mask=mask),
        Knobs(64, 64, 4, 2, mask=mask),
        Knobs(64, 32, 4, 2, mask=mask),
        Knobs(64, 32, 8, 2, mask=mask),
        Knobs(64, 32, 8, 1, mask=mask),
    ]
    # Best and widest spread on one H200, bf16 D128 N8192, full and causal.
    tma = [
        Knobs(128, 128, 8, 3, "tma", "plain", mask),
        Knobs(128, 128, 8, 2, "tma", "plain", mask),
        Knobs(64, 128, 4, 1, "tma", "plain", mask, max_registers=168),
        Knobs(64, 64, 4, 1, "tma", "plain", mask, max_registers=128),
        Knobs(128, 64, 8, 3, "tma", "plain", mask),
        Knobs(128, 64, 8, 2, "tma", "plain", mask),
        Knobs(128, 128, 8, 2, "tma", "rotate_p", mask),
        Knobs(128, 64, 8, 3, "tma", "rotate_p", mask),
        Knobs(128, 64, 8, 3, "tma", "rotate_s", mask),
        Knobs(64, 64, 4, 3, "tma", "plain", mask),
    ]
    return [*tma, Knobs(128, 64, 8, 3, mask=mask), Knobs(128, 64, 8, 2, mask=mask), *small]


def _seeds_fp32(problem: Problem, target: Target, mask: str) -> list[Knobs]:
    """The first two are best at D128 N2048 full on one H200 (benchmarks/spaces/fp32.jsonl.gz).

    sm_90, both masks, compiled: with a threshold at most 2.4 KB a thread spill up to D256; without
    one 40 to 80 KB above D128. Elsewhere (sm_89, sm_100) `wide` spills 1 to 4 KB at D128, and
    `small` nothing.
    """
    wide = Knobs(64, 32, 8, 2, mask=mask, rescale_tau=8.0, rescale_skip="branch")
    narrow = replace(wide, block_m=16, num_warps=4)
    small = Knobs(16, 32, 4, 1, mask=mask)
    bare = replace(wide, mask="every_tile", rescale_tau=0.0, rescale_skip="never")
    if target.arch != 90:
        return [small, narrow, wide, bare]
    if max(problem.shape.head_dim, problem.shape.head_dim_v) > 128:
        return [narrow, wide] if problem.shape.seq_q <= 16 else [wide, narrow]
    found = [wide, bare, replace(wide, loop="rotate_s"), replace(bare, num_stages=3), narrow]
    return [narrow, *found, small] if problem.shape.seq_q <= 16 else [*found, small]


def context(problem: Problem, knobs: Knobs) -> dict[str, Any]:
    scale = "" if problem.features.scale == "any" else ", scale_log2"
    return {
        **dim_words(problem),
        "tma": knobs.loads == "tma",
        "tau": knobs.rescale_tau,
        "fold_args": scale + (", TAU" if knobs.rescale_tau else ""),
        "longest_first": knobs.mask == "longest_first",
        "passes": [True] if knobs.mask == "every_tile" else [False, True],
    }


def entries(problem: Problem, knobs: Knobs, name: str) -> tuple[Entry, ...]:
    args = forward_args(problem, knobs.loads == "tma", knobs.block_m, knobs.block_n)
    return (Entry(name, args, knobs.num_warps, knobs.num_stages, knobs.max_registers or None),)


def grid(
    problem: Problem, knobs: Knobs, entry: int, sizes: Sizes, sm_count: int
) -> tuple[int, int, int]:
    return cdiv(sizes.seq_q, knobs.block_m) * sizes.batch * sizes.heads_q, 1, 1


def scalars(problem: Problem, knobs: Knobs, sizes: Sizes, sm_count: int) -> dict[str, int]:
    return {}


def workspaces(knobs: Knobs, sizes: Sizes) -> tuple[Workspace, ...]:
    return ()


def repeats(knobs: Knobs) -> bool:
    return True


def limits(problem: Problem, knobs: Knobs) -> dict[str, range]:
    return {}


def tile(knobs: Knobs) -> tuple[int, int]:
    return knobs.block_m, knobs.block_n


def shared_bytes(problem: Problem, knobs: Knobs) -> int:
    """Q once, K and V once a stage, one more K when the loop runs ahead (164 and 197 KB at
    128x128, D128, two stages, compiled for sm_90 with Triton 3.6). In one stage V takes the
    place of K."""
    q, k, v = tensor_bytes(problem, knobs.block_m, knobs.block_n)
    if knobs.num_stages == 1:
        return q + max(k, v)
    return q + knobs.num_stages * (k + v) + (0 if knobs.loop == "plain" else k)
