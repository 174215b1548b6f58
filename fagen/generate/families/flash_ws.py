"""flash_ws: persistent, warp-specialised FlashAttention for Hopper, written in Gluon."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from fagen.generate.families import order
from fagen.generate.families.base import Constraint, knob
from fagen.generate.families.parts import parts, width
from fagen.generate.families.tiling import cdiv
from fagen.generate.program import Arg, Entry, Sizes, Workspace
from fagen.problem import ITEM_BYTES, Problem
from fagen.target import Target

NAME = "flash_ws"
DIRECTION = "forward"
TEMPLATE = "flash_ws.py.j2"

ROWS = 64  # of a consumer group: the rows of one wgmma
PACKS = (2, 4, 8, 16, 32, 64)  # heads in a tile of packed ones
PACKED_ROWS = 1024  # queries; above, tiles of one head are at least 0.94 full
OTHER_REGISTERS = 32  # three groups with 24 left, D80 and 128 keys: every wgmma waits (Triton 3.6)
# Up to here four groups win at D64, under a causal mask up to twice as many keys; up to half as
# many, two groups in turns at D128 without one.
SHORT_KEYS = 2048
TILE_SLOTS = 4  # of claimed tiles: two more than Q has, so that none is handed back
# Registers at launch and of a consumer, by groups. A producer keeps 24; together they fill the
# 65536 of a multiprocessor (12 warps of 168, 16 of 128 and 20 of 96; with one group two blocks
# share it).
REGISTERS = {1: (128, 232), 2: (168, 240), 3: (128, 160), 4: (96, 112)}


@dataclass(frozen=True)
class Knobs:
    """One warp-specialised kernel."""

    block_m: int = knob(
        128, (64, 128, 192, 256), "query rows of a tile, 64 for each consumer group"
    )
    block_n: int = knob(128, (64, 128), "keys of a block")
    slots: int = knob(2, (2, 3, 4, 6), "blocks of K and of V in flight, each costs shared memory")
    boundary: str = knob(
        "overlap",
        ("overlap", "finish"),
        "start the next tile's QK^T before this tile's last PV, with twice the room for Q unless "
        "it is in registers, or finish a tile first",
    )
    queries: str = knob(
        "shared",
        ("shared", "half", "registers"),
        "where QK^T finds Q at every step: in shared memory, half of its columns in registers, or "
        "all",
    )
    half_diagonal: bool = knob(
        False, (False, True), "compute half of a block where the diagonal hides the rest"
    )
    ping_pong: bool = knob(
        False,
        (False, True),
        "groups take turns at the tensor cores; a turn ends when its products are done",
    )
    rescale_tau: float = knob(
        0.0, (0.0, 8.0), "keep the old maximum within this many log2 units; 0: never"
    )
    rescale: str = knob(
        "after_softmax",
        ("after_softmax", "under_scores"),
        "multiply O by its factor at the end of a step, or under QK^T of the next",
    )
    output: str = knob(
        "tma",
        ("tma", "queries", "stores"),
        "O through shared memory of its own, through that of its Q, or in 16-byte stores",
    )
    section_mb: int = knob(
        64, (16, 32, 64, 128), "keys and values that a launch works on at a time, in L2"
    )
    claim: str = knob("late", ("late", "early"), "when a block claims its next tile")
    pack_heads: bool = knob(
        False, (False, True), "a tile's rows are queries of all heads that share keys"
    )
    in_flight: int = knob(
        2,
        (2, 1),
        "products of a group at a time: QK^T of a block and PV of the one before, or one of them, "
        "in fewer registers",
    )


def _groups(knobs: Knobs) -> int:
    return knobs.block_m // ROWS


def _q_slots(knobs: Knobs) -> int:
    """A tile's, and the next one's where both are read at a time or O lies in this one's."""
    twice = knobs.boundary == "overlap" or knobs.output == "queries"
    twice = twice and knobs.queries != "registers"
    return _groups(knobs) * (2 if twice else 1)


def _registers(problem: Problem, knobs: Knobs) -> float:
    """Of a consumer thread: O, the scores, the held probabilities and Q (compiled without Q: 184
    at D128 and block_n 128, 135 at block_n 64, 200 at D256 and block_n 64). With one product in
    flight the probabilities take the place of the scores."""
    held = {"shared": 0.0, "half": 0.25, "registers": 0.5}[knobs.queries]
    blocks = 1.0 if knobs.in_flight == 1 else 1.5
    words = width(problem.shape.head_dim_v) + blocks * knobs.block_n
    return (words + held * width(problem.shape.head_dim)) / 2


def _fits_registers(problem: Problem, knobs: Knobs) -> bool:
    groups = _groups(knobs)
    # One group is compiled within the 128 registers of the launch, not those it gets later.
    most = REGISTERS[3 if groups == 1 else groups][1]
    return _registers(problem, knobs) + OTHER_REGISTERS <= most


def _align(knobs: Knobs, pack: int) -> int:
    """What the first key that a tile's last rows don't see is a multiple of."""
    return knobs.block_n if knobs.half_diagonal else ROWS // pack


def _pack(problem: Problem, knobs: Knobs) -> int:
    """Heads whose queries share a tile."""
    shape = problem.shape
    return shape.heads_q // shape.heads_kv if knobs.pack_heads else 1


CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "tma_needs_alignment",
        "Tensor descriptors need 16-byte aligned pointers and strides.",
        lambda p, t, k: p.layout == "aligned16",
    ),
    Constraint(
        "rows_fit_tile",
        "A tile of {block_m} query rows would be mostly empty.",
        lambda p, t, k: k.block_m <= max(ROWS, cdiv(p.shape.seq_q * _pack(p, k), ROWS) * ROWS),
    ),
    Constraint(
        "half_diagonal_is_causal",
        "Without a causal mask there is no diagonal.",
        lambda p, t, k: not k.half_diagonal or p.features.causal != "none",
    ),
    Constraint(
        "half_diagonal_needs_keys",
        "With more query rows than keys, tiles end below the diagonal.",
        lambda p, t, k: not k.half_diagonal or p.shape.seq_q <= p.shape.seq_kv,
    ),
    Constraint(
        "half_diagonal_halves_a_block",
        "A group's diagonal is half a block for two groups and 128 keys only.",
        lambda p, t, k: not k.half_diagonal or (k.block_m, k.block_n) == (128, 128),
    ),
    Constraint(
        "packing_needs_groups",
        "Heads are packed where 2, 4, 8 ... 64 of them share keys.",
        lambda p, t, k: not k.pack_heads or _pack(p, k) in PACKS,
    ),
    Constraint(
        "packing_fills_tiles",
        "Tiles of one head are full enough with {block_m} rows: packing is for few queries.",
        lambda p, t, k: not k.pack_heads or p.shape.seq_q <= PACKED_ROWS,
    ),
    Constraint(
        "packed_rows_share_a_diagonal",
        "With packed heads a tile's diagonal is narrower than half a block.",
        lambda p, t, k: not k.pack_heads or not k.half_diagonal,
    ),
    Constraint(
        "halves_are_multiplied",
        "wgmma takes 16 columns at a time: half of a part of this head_dim is fewer.",
        lambda p, t, k: (
            k.queries != "half" or all(part.half >= 16 for part in parts(p.shape.head_dim))
        ),
    ),
    Constraint(
        "turns_need_groups",
        "A single group has nobody to take turns with.",
        lambda p, t, k: not k.ping_pong or _groups(k) > 1,
    ),
    Constraint(
        "skipped_blocks_fit_ring",
        # A group waits for the blocks right of its diagonal: they must all be there.
        "{slots} slots are too few for the blocks that a group skips.",
        lambda p, t, k: p.features.causal == "none" or k.slots > (k.block_m - 1) // k.block_n,
    ),
    Constraint(
        "tma_output_needs_alignment",
        "Rows of O are no multiple of 16 bytes, so TMA can't store them.",
        lambda p, t, k: (
            k.output == "stores" or p.shape.head_dim_v * ITEM_BYTES[p.shape.dtype] % 16 == 0
        ),
    ),
    Constraint(
        "output_fits_queries",
        "O goes where Q lay only where it has Q's shape and Q lies there to the end.",
        lambda p, t, k: (
            k.output != "queries"
            or (k.queries != "registers" and parts(p.shape.head_dim) == parts(p.shape.head_dim_v))
        ),
    ),
    Constraint(
        "wide_stores_need_columns",
        "16-byte stores take 32 columns of O at a time.",
        lambda p, t, k: (
            k.output != "stores" or all(part.width >= 32 for part in parts(p.shape.head_dim_v))
        ),
    ),
    Constraint(
        "sections_are_causal",
        "Without a causal mask a head's tiles follow each other: sections are for causal ones.",
        lambda p, t, k: p.features.causal != "none" or k.section_mb == 64,
    ),
    Constraint(
        "registers",
        "{block_n} keys, O, and Q in {queries}, don't fit the registers of a group.",
        lambda p, t, k: _fits_registers(p, k),
    ),
    Constraint(
        "one_in_flight_is_a_last_resort",
        # At D128 one alone is 9 % slower to 1 % faster than two (docs/flash_ws.md).
        "One product at a time is for O of up to 96 columns, where two don't fit the registers.",
        lambda p, t, k: (
            k.in_flight == 2
            or (
                width(p.shape.head_dim_v) <= 96 and not _fits_registers(p, replace(k, in_flight=2))
            )
        ),
    ),
    Constraint(
        "one_in_flight_stands_alone",
        "One product at a time is in no turn, and over before the next tile or rescaling begins.",
        lambda p, t, k: (
            k.in_flight == 2
            or (not k.ping_pong and k.boundary == "finish" and k.rescale == "after_softmax")
        ),
    ),
    Constraint(
        "shared_memory",
        "{block_m}x{block_n} in {slots} slots needs more shared memory than a block has.",
        lambda p, t, k: shared_bytes(p, k) <= t.shared_bytes // (2 if _groups(k) == 1 else 1),
    ),
)


def why_unsupported(problem: Problem, target: Target) -> str | None:
    if target.arch != 90:
        return "flash_ws is for Hopper: it needs compute capability 9.0."
    if problem.shape.dtype == "fp32":
        return "flash_ws multiplies 16-bit operands."
    if max(problem.shape.head_dim, problem.shape.head_dim_v) > 256:
        return "flash_ws takes head dims up to 256."
    return None


def seeds(problem: Problem, target: Target) -> list[Knobs]:
    few = [
        k for k in _few_queries(problem) if all(r.holds(problem, target, k) for r in CONSTRAINTS)
    ]
    if few:
        return [*few[:2], replace(few[0], claim="early"), replace(few[0], rescale_tau=8.0)]
    chosen = _seeds(problem)
    if problem.shape.seq_q <= PACKED_ROWS // 4:
        packed = [replace(k, pack_heads=True, half_diagonal=False) for k in chosen]
        chosen = [k for pair in zip(packed, chosen, strict=True) for k in pair]
    return [_fitted(problem, target, k) for k in chosen]


def _fitted(problem: Problem, target: Target, knobs: Knobs) -> Knobs:
    """The same where it is valid, or else with O elsewhere, in fewer slots or in smaller tiles:
    D192 with values of 128 columns has no room for what is best at D128. Not below two groups."""
    tiles = [(m, n) for m in (256, 192, 128) if m < knobs.block_m for n in (128, 64)]
    less = [slots for slots in (6, 4, 3, 2) if slots <= knobs.slots]
    outputs = (knobs.output, "tma", "stores")
    own = (knobs.block_m, knobs.block_n)
    for (m, n), slots, output in product((own, *tiles), less, outputs):
        halved = knobs.half_diagonal and (m, n) == own
        smaller = replace(
            knobs, block_m=m, block_n=n, slots=slots, output=output, half_diagonal=halved
        )
        if all(rule.holds(problem, target, smaller) for rule in CONSTRAINTS):
            return smaller
    return knobs


def _few_queries(problem: Problem) -> list[Knobs]:
    """For queries that one group holds, by preference. One query of each of four heads that share
    8192 keys, D128, one H200: 123 us packed, with whatever else, at 4.35 TB/s; 199 to 217 not
    packed; 206 the best of the portable families (benchmarks/spaces/decode.jsonl.gz)."""
    shape = problem.shape
    alike = shape.heads_q // max(1, shape.heads_kv)
    packed = alike in PACKS
    if shape.seq_q * (alike if packed else 1) > ROWS:
        return []
    return [
        Knobs(
            ROWS,
            keys,
            slots,
            "finish",
            output=output,
            rescale="under_scores",
            pack_heads=packed,
        )
        for output in ("stores", "tma")
        for keys in (64, 128)
        for slots in (2, 3, 4)
    ]


def _seeds(problem: Problem) -> list[Knobs]:
    """What was best by head dim in benchmarks/results/h200_flash_ws_race2.json to _race6.json, and
    neighbours."""
    causal = problem.features.causal != "none"
    seq_q, seq_kv = problem.shape.seq_q, problem.shape.seq_kv
    halved = causal and seq_q <= seq_kv
    wide = width(problem.shape.head_dim) + width(problem.shape.head_dim_v)
    if wide <= 128:
        four = _kept(Knobs(256, 64, 6, "finish", output="queries"))
        long = _kept(Knobs(192, 128, 3, "finish", ping_pong=True, output="queries"))
        two = Knobs(128, 128, 4, "finish", "registers", half_diagonal=halved)
        most_keys = SHORT_KEYS * (2 if causal else 1)
        # 2.5 % ahead of `four` at N2048 (benchmarks/results/h200_searches_repeated.json).
        small = replace(four, section_mb=16, claim="early")
        return [
            *([four, long] if seq_kv <= most_keys else [long, four]),
            *([small, replace(small, output="tma")] if causal else []),
            replace(long, output="tma"),
            replace(four, output="tma"),
            Knobs(256, 64, 6, "overlap", output="queries"),
            Knobs(192, 64, 6, "finish", "registers"),
            two,
            replace(four, slots=4),
            _kept(replace(two, ping_pong=True)),
            Knobs(64, 128, 2, "finish", output="stores"),
        ]
    if wide <= 320:
        three = _kept(Knobs(192, 64, 3, "finish"))
        left = replace(three, output="queries")
        half = replace(left, queries="half")
        two = _kept(Knobs(128, 128, 2, "finish", half_diagonal=halved))
        turns = replace(two, ping_pong=True)
        deep = replace(left, slots=4)
        if causal and seq_q * 2 > seq_kv:
            first, later = [deep, three], [left]
        elif causal:
            first, later = [replace(turns, output="stores", section_mb=32), turns], [deep]
        else:
            short = seq_kv <= SHORT_KEYS // 2
            first, later = [turns, left] if short else [left, turns], [deep]
        if wide <= 224:
            alone = Knobs(192, 128, 2, "finish", in_flight=1)
            if causal:
                small, kept = replace(three, section_mb=32), replace(alone, rescale_tau=8.0)
                first = [small, replace(kept, slots=3), *first, replace(alone, slots=3)]
            else:
                first = [alone, *first, replace(alone, rescale_tau=8.0)]
        return [
            *first,
            half,
            replace(half, boundary="overlap"),
            replace(two, queries="half"),
            *later,
            replace(turns, output="queries"),
            Knobs(128, 128, 2, half_diagonal=halved),
            replace(three, rescale="after_softmax"),
            replace(turns, queries="registers"),
            *([replace(three, section_mb=128)] if causal else []),
        ]
    best = _kept(Knobs(128, 64, 2, "finish", "half", output="stores"))
    shared = replace(best, queries="shared")
    return [
        best,
        replace(best, claim="early"),
        replace(shared, claim="early"),
        shared,
        *([replace(best, section_mb=128)] if causal else []),
        replace(shared, rescale="after_softmax"),
        replace(best, ping_pong=True),
        replace(best, rescale_tau=0.0),
    ]


def _kept(knobs: Knobs) -> Knobs:
    """With a threshold, and what makes it cheap."""
    return replace(knobs, rescale_tau=8.0, rescale="under_scores")


def context(problem: Problem, knobs: Knobs) -> dict[str, Any]:
    groups = _groups(knobs)
    return {
        "parts": parts(problem.shape.head_dim),
        "parts_v": parts(problem.shape.head_dim_v),
        "groups": groups,
        "q_slots": _q_slots(knobs),
        "pack": _pack(problem, knobs),
        "tile_slots": TILE_SLOTS,
        # Of each ring its slots and who hands one back.
        "rings": [
            ("q", "Q_SLOTS", 1),
            ("k", "SLOTS", "GROUPS"),
            ("v", "SLOTS", "GROUPS"),
        ],
        "launch_fields": ["heads_q", "group", "seq_q", "seq_kv", *_launch_sizes(problem, knobs)],
        "registers": REGISTERS[groups][1],
        "gl_dtype": {"bf16": "gl.bfloat16", "fp16": "gl.float16"}[problem.shape.dtype],
        "ptx_dtype": {"bf16": "bf16", "fp16": "f16"}[problem.shape.dtype],
        "shift": " + launch.seq_kv - launch.seq_q"
        if problem.features.causal == "bottom_right"
        else "",
    }


def _launch_sizes(problem: Problem, knobs: Knobs) -> tuple[str, ...]:
    """Names of what `scalars` gives, those that the kernel takes."""
    if problem.features.causal != "none":
        return ("tiles_m", "tiles", "end_row", "section", "sections")
    return ("tiles_m", "tiles") if _groups(knobs) == 1 else ("tall", "short", "talls", "tiles")


def entries(problem: Problem, knobs: Knobs, name: str) -> tuple[Entry, ...]:
    dtype = problem.shape.dtype

    def descriptors(x: str, rows: str, dim: int) -> list[Arg]:
        return [
            Arg(f"{x}{part.suffix}_desc", f"tensordesc<{dtype}[1,1,{rows},{part.width}]>")
            for part in parts(dim)
        ]

    pack = _pack(problem, knobs)
    queries = f"{ROWS}" if pack == 1 else f"{ROWS // pack},{pack}"
    dim, dim_v = problem.shape.head_dim, problem.shape.head_dim_v
    tma_out = knobs.output != "stores"
    # Under a bottom-right mask a tile may begin before row 0, and is then stored row by row.
    pointer = not tma_out or problem.features.causal == "bottom_right"
    args = (
        Arg("counter", "*i32"),
        *descriptors("q", queries, dim),
        *descriptors("k", f"{knobs.block_n}", dim),
        *descriptors("v", f"{knobs.block_n}", dim_v),
        *(descriptors("o", queries, dim_v) if tma_out else []),
        *([Arg("O", f"*{dtype}", 16)] if pointer else []),
        Arg("LSE", "*fp32", 16),
        Arg("scale_log2", "fp32"),
        *(Arg(size, "i32") for size in ("heads_q", "group", "seq_q", "seq_kv")),
        *(Arg(size, "i32") for size in _launch_sizes(problem, knobs)),
    )
    return (Entry(name, args, 4, 1, REGISTERS[_groups(knobs)][0], "gluon"),)


def grid(
    problem: Problem, knobs: Knobs, entry: int, sizes: Sizes, sm_count: int
) -> tuple[int, int, int]:
    places = sm_count * (2 if _groups(knobs) == 1 else 1)
    return min(places, scalars(problem, knobs, sizes, sm_count)["tiles"]), 1, 1


def scalars(problem: Problem, knobs: Knobs, sizes: Sizes, sm_count: int) -> dict[str, int]:
    pack = _pack(problem, knobs)
    sizes = sizes._replace(heads_q=sizes.heads_q // pack)
    heads = sizes.batch * sizes.heads_q
    packed = {"heads_q": sizes.heads_q, "group": sizes.heads_q // max(1, sizes.heads_kv)}
    causal = problem.features.causal
    if causal == "none":
        units = cdiv(sizes.seq_q * pack, ROWS)
        tall, short = order.cut(units, _groups(knobs), heads, sm_count)
        return {
            **packed,
            "tiles_m": tall + short,
            "tiles": (tall + short) * heads,
            "tall": tall,
            "short": short,
            "talls": tall * heads,
        }
    # A tile ends where its diagonal meets the end of a block.
    shift = sizes.seq_kv - sizes.seq_q if causal == "bottom_right" else 0
    align = _align(knobs, pack)
    end = (cdiv(sizes.seq_q + shift, align) * align - shift) * pack
    tiles_m = cdiv(end, knobs.block_m)
    row_bytes = (sizes.head_dim + sizes.head_dim_v) * ITEM_BYTES[problem.shape.dtype]
    section, sections = order.sections(
        heads,
        packed["group"],
        sizes.seq_kv * row_bytes,
        knobs.section_mb * 10**6,
        last=order.last_heads(tiles_m, sizes.seq_q / max(1, sizes.seq_q + shift), sm_count),
    )
    return {
        **packed,
        "tiles_m": tiles_m,
        "tiles": tiles_m * heads,
        "end_row": end,
        "section": section,
        "sections": sections,
    }


def workspaces(knobs: Knobs, sizes: Sizes) -> tuple[Workspace, ...]:
    return ()


def repeats(knobs: Knobs) -> bool:
    return True


def limits(problem: Problem, knobs: Knobs) -> dict[str, range]:
    pack = _pack(problem, knobs)
    return {
        # Half a block is enough on the diagonal: with more rows than keys, tiles end below it.
        **({"rows_beyond_keys": range(1)} if knobs.half_diagonal else {}),
        **({"group": range(pack, pack + 1)} if pack > 1 else {}),
    }


def tile(knobs: Knobs) -> tuple[int, int]:
    return knobs.block_m, knobs.block_n


def shared_bytes(problem: Problem, knobs: Knobs) -> int:
    item = ITEM_BYTES[problem.shape.dtype]
    dim, dim_v = width(problem.shape.head_dim), width(problem.shape.head_dim_v)
    keys = knobs.slots * knobs.block_n * (dim + dim_v)
    rows = _q_slots(knobs) * ROWS * dim
    out = _groups(knobs) * ROWS * dim_v if knobs.output == "tma" else 0
    # Compiled, above the tiles: 0.9 KB; with stores 2.3, 4.4 and 6.6 KB for 1, 2 and 3 groups.
    exchange = 6144 if knobs.output == "stores" else 0
    return item * (keys + rows + out) + exchange + 1024
