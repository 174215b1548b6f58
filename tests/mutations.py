"""Planted faults: edits of generated text, each of a kind that somebody shipped."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Mutation:
    """`old` (a regular expression) becomes `new` wherever it stands in the kernel of `case`."""

    name: str
    case: tuple[Problem, Config]
    old: str
    new: str
    gpu_only: bool = False  # Triton's interpreter can't show the fault, or not run the family


def mutated(mutation: Mutation, triton_minor: tuple[int, int] = (3, 6)) -> Program:
    """The Program with the fault, under a name of its own."""
    return edited(render(*mutation.case, triton_minor), mutation.name, mutation.old, mutation.new)


def edited(program: Program, what: str, old: str, new: str) -> Program:
    """The Program with `new` wherever `old`, a regular expression, stands; named for `what`."""
    source, count = re.subn(old, new, program.source)
    assert count > 0, f"{what}: {old} is not in {program.name}"
    name = f"{program.name}_{re.sub('[^A-Za-z0-9]+', '_', what)}"
    return replace(
        program,
        name=name,
        source=source.replace(program.name, name),
        entries=tuple(
            replace(e, function=e.function.replace(program.name, name)) for e in program.entries
        ),
    )


def _flash(**knobs: object) -> Config:
    return Config("flash", flash.Knobs(64, 32, 4, 2, **knobs))  # type: ignore[arg-type]


_FULL = make_problem(500, 24, dtype="fp16")
_CAUSAL = make_problem(500, 24, dtype="fp16", causal=True)
_CORNER = make_problem(500, 24, dtype="fp16", causal=True, causal_align="bottom_right")
_GROUPED = make_problem(500, 24, dtype="fp16", heads=4, kv_heads=2)

_GRADIENTS = make_problem(
    500,
    24,
    dtype="fp16",
    heads=4,
    kv_heads=2,
    causal=True,
    causal_align="bottom_right",
    direction="backward",
)

FULL = (_FULL, _flash())
CAUSAL = (_CAUSAL, _flash())
CORNER = (_CORNER, _flash(mask="longest_first"))
GROUPED = (_GROUPED, _flash(order="heads_first"))
GRADIENTS = (
    _GRADIENTS,
    Config("flash_bwd", flash_bwd.Knobs(32, 32, 4, 1, 32, 32, 4, 1)),
)
_HOPPER = make_problem(
    300,
    128,
    seq_kv=400,
    heads=4,
    kv_heads=2,
    dtype="fp16",
    causal=True,
    causal_align="bottom_right",
    direction="backward",
)
_WIDE = make_problem(300, 256, heads=2, direction="backward")
_WIDE_GROUPED = make_problem(
    300,
    256,
    heads=4,
    kv_heads=2,
    causal=True,
    causal_align="bottom_right",
    direction="backward",
)
ADDED = (_HOPPER, Config("flash_bwd_ws", flash_bwd_ws.Knobs(kv_block_m=64)))
ROLES_FULL, ROLES_GROUPED = (
    (problem, Config("flash_bwd_roles", flash_bwd_roles.Knobs(32, 2, False, 2, 1)))
    for problem in (_WIDE, _WIDE_GROUPED)
)
KEPT = (_FULL, _flash(rescale_tau=8.0, rescale_skip="branch"))
ROTATED = (_CAUSAL, _flash(loop="rotate_p"))
AHEAD = (_FULL, _flash(loop="rotate_s"))

OUTER = (_FULL, Config("kv_outer", kv_outer.Knobs(64, 32, 4, 1, 4)))
OUTER_CAUSAL = (_CAUSAL, OUTER[1])
OUTER_CORNER = (_CORNER, OUTER[1])
OUTER_GROUPED = (_GROUPED, OUTER[1])

_SHORT = replace(_FULL, shape=replace(_FULL.shape, seq_q=120, seq_kv=120))
SLIM = (_SHORT, Config("slim", slim.Knobs(32, 32, 128, 4)))
SLIM_CAUSAL = (replace(_SHORT, features=_CAUSAL.features), SLIM[1])
SLIM_CORNER = (replace(_SHORT, features=_CORNER.features), SLIM[1])
SLIM_GROUPED = (
    replace(_SHORT, shape=replace(_SHORT.shape, heads_q=4, heads_kv=2)),
    SLIM[1],
)


def _flash_ws(problem: Problem, **knobs: object) -> tuple[Problem, Config]:
    words = {"block_n": 64, "slots": 3} | knobs
    return problem, Config("flash_ws", flash_ws.Knobs(**words))  # type: ignore[arg-type]


# More tiles than any device has multiprocessors: some blocks claim a second one.
WS = _flash_ws(make_problem(500, 24, batch=4, dtype="fp16"))
WS_CAUSAL = _flash_ws(_CAUSAL)
WS_HALF = _flash_ws(_CAUSAL, block_n=128, half_diagonal=True)
WS_CORNER = _flash_ws(_CORNER)
WS_GROUPED = _flash_ws(_GROUPED)
WS_EARLY = _flash_ws(_FULL, claim="early", ping_pong=True)
WS_STORES = _flash_ws(_FULL, output="stores", boundary="finish")
WS_KEPT = _flash_ws(_FULL, rescale_tau=8.0, boundary="finish", rescale="under_scores")
WS_PACKED = _flash_ws(
    make_problem(37, 24, heads=8, kv_heads=2, seq_kv=300, dtype="fp16", causal=True),
    pack_heads=True,
)
# Two tall tiles and two short ones a head, on few multiprocessors as on many.
WS_SHORT = _flash_ws(make_problem(600, 64, heads=5, dtype="fp16"), block_m=192)
WS_QUERIES = _flash_ws(_FULL, output="queries")
WS_SPLIT = _flash_ws(make_problem(500, 64, dtype="fp16"), queries="half")
WS_PARTS = _flash_ws(make_problem(500, 96, dtype="fp16"))
WS_ALONE = _flash_ws(
    WS_PARTS[0], block_m=192, block_n=128, slots=2, boundary="finish", in_flight=1
)

# What no gate survives, in every source of `flash`. LSE is poisoned with NaN: the loop never ends.
WILD_STORE = (r"o_rows = O \+", "o_rows = O + (1 << 40) +")
ENDLESS_LOOP = (
    r"    m_i = tl.full",
    "    while tl.load(LSE, volatile=True) != 1.5:\n        seq_q += 1\n    m_i = tl.full",
)

_STORE_LAST = (r"tl.store\(LSE \+ out, lse, mask=rows < seq_q\)", r"tl.store(LSE + out, lse)")


def _everywhere(
    full: tuple[Problem, Config],
    causal: tuple[Problem, Config],
    corner: tuple[Problem, Config],
    grouped: tuple[Problem, Config],
) -> list[Mutation]:
    """Faults that every forward family can have."""
    visible = r"<= last_seen\[:, None\]"
    return [
        Mutation("diagonal hidden", causal, visible, "< last_seen[:, None]"),
        Mutation("one key too many", causal, visible, "<= last_seen[:, None] + 1"),
        Mutation("wrong corner", corner, r"rows \+ seq_kv - seq_q", "rows"),
        Mutation("pad key counted", full, r"< seq_kv, s,", "<= seq_kv, s,"),
        Mutation(
            "memory past the last key",
            full,
            r"offs_n\[:, None\] < seq_kv",
            "offs_n[:, None] < seq_kv + 1",
        ),
        Mutation(
            "last query row unwritten",
            full,
            r"\(rows\[:, None\] < seq_q\) &",
            "(rows[:, None] < seq_q - 1) &",
        ),
        Mutation("LSE past its end", full, *_STORE_LAST),
        Mutation("LSE in log2", full, r" \* 0.6931471805599453", ""),
        Mutation(
            "scale of the padded head", full, r"\bscale_log2 -", "(scale_log2 * 0.8660254) -"
        ),
        Mutation("wrong key head", grouped, r"head_q // group", "head_q % group"),
        Mutation("maximum not subtracted", full, r"- (m_new|m_i)\[:, None\]\)", "- 0.0)"),
        Mutation(
            "hidden row is NaN",
            corner,
            r"tl.where\(hidden\[:, None\], 0.0, ",
            "tl.where(hidden[:, None], float('nan'), ",
        ),
        Mutation("sum not divided", full, r"acc = acc / l_i\[:, None\]", "acc = acc"),
        Mutation(
            "probabilities in 8 bits",
            full,
            r"p.to\(tl.float16\)",
            "p.to(tl.float8e5).to(tl.float16)",
            gpu_only=True,
        ),
    ]


# A fault must leave arrivals and waits in balance: one that hangs says nothing of the gate. So
# `key_blocks`, which all partitions count by, may be wrong, and a single partition's loop may not.
_WARP_SPECIALISED = [
    Mutation("diagonal hidden", WS_CAUSAL, r"<= last_seen\[:, None\]", "< last_seen[:, None]"),
    Mutation(
        "one key too many", WS_CAUSAL, r"<= last_seen\[:, None\]", "<= last_seen[:, None] + 1"
    ),
    Mutation("wrong corner", WS_CORNER, r"rows \+ launch.seq_kv - launch.seq_q", "rows"),
    Mutation("pad key counted", WS, r"\+ launch.seq_kv - 1\n", "+ launch.seq_kv\n"),
    Mutation(
        "a group's rows left out",
        WS,
        r"GROUP \* ROWS < launch.seq_q\)",
        "GROUP * ROWS < launch.seq_q - 64)",
    ),
    Mutation(
        "short tiles as tall",
        WS_SHORT,
        r"BLOCK_M \+ m \* \(BLOCK_M - ROWS\)",
        "BLOCK_M + m * BLOCK_M",
    ),
    Mutation("output of another tile", WS_QUERIES, r"tile_no - 2, o_row", "tile_no - 2, row"),
    Mutation("half of Q twice", WS_SPLIT, r"a = a.slice\(32, 32, 1\)", "a = a.slice(0, 32, 1)"),
    Mutation("O in old units", WS_ALONE, r"\n    o, o_2 = rescale\(o, o_2, alpha\)\n", "\n"),
    Mutation("LSE in log2", WS, r" \* 0.6931471805599453", ""),
    Mutation("LSE past its end", WS, r" & \(lse_rows < launch.seq_q\)", ""),
    Mutation("output past its end", WS_STORES, r" & \(rows < launch.seq_q\)", ""),
    Mutation("wrong key head", WS_GROUPED, r"head // launch.group", "head % launch.group"),
    Mutation("maximum not subtracted", WS, r"- (m_new|m_i)\[:, None\]\)", "- 0.0)"),
    Mutation(
        "hidden row is NaN",
        WS_CORNER,
        r"gl.where\(l_rows == 0.0, 0.0, ",
        "gl.where(l_rows == 0.0, float('nan'), ",
    ),
    Mutation(
        "hidden row not guarded",
        WS_CORNER,
        r"m_i = gl.maximum\(gl.max\(s, 1\) \* scale_log2, LOWEST\)",
        "m_i = gl.max(s, 1) * scale_log2",
    ),
    Mutation("sum not divided", WS, r"\(o \* scale\)", "o"),
    Mutation("rescale forgotten", WS, r"o = o \* gl.convert_layout\(alpha[^\n]*", "o = o"),
    Mutation("sums not rescaled", WS, r"l_i = l_i \* gl.convert_layout\(alpha[^\n]*", "l_i = l_i"),
    Mutation(
        "last block skipped",
        WS,
        r"\(launch.seq_kv - 1\) // BLOCK_N \+ 1",
        "gl.maximum(launch.seq_kv // BLOCK_N, 1)",
    ),
    Mutation("keys of the block before", WS_EARLY, r"n - j \* BLOCK_N", "n - (j - 1) * BLOCK_N"),
    Mutation(
        "values of the next block",
        WS_EARLY,
        r"n - \(j - 1\) \* BLOCK_N",
        "n - j * BLOCK_N",
    ),
    Mutation(
        "first block's values skipped",
        WS,
        r"last_head, 0, count - 1",
        "last_head, BLOCK_N, count - 1",
    ),
    Mutation("last values of the next tile", WS, r"last_batch, last_head", "batch, head_kv"),
    Mutation(
        "tile of another head",
        WS,
        r"launch, last_row, batch, head, GROUP",
        "launch, last_row, batch, next_head, GROUP",
    ),
    Mutation("rows of the first group", WS, r"row \+ g \* ROWS", "row"),
    Mutation(
        "half of a block for a group too many",
        WS_HALF,
        r"GROUP \* ROWS % BLOCK_N == 0",
        "GROUP * ROWS % BLOCK_N <= ROWS",
    ),
    # Shows where a launch has more tiles than blocks, and the launch before left its count.
    Mutation("counter not reset", WS, r"gl.store\(counter, 0, [^\n]*", "pass"),
    Mutation(
        "threshold above fp16", WS_KEPT, r"TAU = gl.constexpr\(8.0\)", "TAU = gl.constexpr(40.0)"
    ),
    Mutation(
        "kept maximum, stale sum",
        WS_KEPT,
        r"l_i, m_new, alpha, held\n",
        r"l_i, gl.maximum(m_new, m_i + 1.0), alpha, held\n",
    ),
    Mutation("packed row as a query", WS_PACKED, r"LAYOUT\)\)\) // PACK", "LAYOUT)))"),
    Mutation("half of the head size", WS_PARTS, r"use_acc=True", "use_acc=False"),
]

MUTATIONS: dict[str, list[Mutation]] = {
    "flash_bwd_ws": [
        Mutation("ACC is not cleared", ADDED, r"gl.store\(ACC.*", "pass", gpu_only=True),
        Mutation(
            "DELTA of another head",
            ADDED,
            r"at = head.to\(gl.int64\) \* tiles \* ROWS",
            "at = head * seq_q",
            gpu_only=True,
        ),
        Mutation(
            "LSE in natural units", ADDED, r"lse \* 1\.4426950408889634", "lse", gpu_only=True
        ),
        Mutation("DELTA forgotten", ADDED, r"dp - terms\[None, :\]", "dp", gpu_only=True),
        Mutation(
            "one query head of each group", ADDED, r"steps = group \*", "steps =", gpu_only=True
        ),
        Mutation(
            "rows above the diagonal left out",
            ADDED,
            r"(first = .*BLOCK_M \* BLOCK_M)",
            r"\1\n    first = gl.minimum(first + BLOCK_M, (seq_q - 1) // BLOCK_M * BLOCK_M)",
            gpu_only=True,
        ),
        Mutation(
            "the diagonal hidden",
            ADDED,
            r"keys\[:, None\] <= last_seen",
            "keys[:, None] < last_seen",
            gpu_only=True,
        ),
        Mutation(
            "the diagonal seen one step too far",
            ADDED,
            r"if lead < KEYS - 1",
            "if lead < KEYS - 65",
            gpu_only=True,
        ),
        Mutation(
            "the second head without a mask", ADDED, r", first_lead\)", ", KEYS)", gpu_only=True
        ),
        Mutation("no scale on dK", ADDED, r"dk = dk \* \(.*\)", "dk = dk", gpu_only=True),
        Mutation(
            "no scale on dQ", ADDED, r" \* \(scale_log2 \* 0.693\d+\)\n", "\n", gpu_only=True
        ),
        Mutation(
            "dQ in the other group's columns",
            ADDED,
            r"row, i \* SHARE\]",
            "row, (1 - i) * SHARE]",
            gpu_only=True,
        ),
        Mutation(
            "dS of one group",
            ADDED,
            r"a = ds.tiles.index\(GROUPS \* slot \+ i\)",
            "a = ds.tiles.index(GROUPS * slot)",
            gpu_only=True,
        ),
        Mutation(
            "the last step's dQ left out",
            ADDED,
            r"part = start_dq\(k, ds, last % 2, GROUP\)",
            "part = gl.zeros([ROWS, SHARE], gl.float32, ACC_Q)",
            gpu_only=True,
        ),
    ],
    "flash_bwd_roles": [
        Mutation(
            "delta forgotten for dK", ROLES_GROUPED, r"dp - terms\[None, :\]", "dp", gpu_only=True
        ),
        Mutation(
            "delta forgotten for dQ", ROLES_GROUPED, r"dp - delta\[:, None\]", "dp", gpu_only=True
        ),
        Mutation(
            "one query head of each group",
            ROLES_GROUPED,
            r"steps = group \* gl",
            "steps = gl",
            gpu_only=True,
        ),
        Mutation(
            "the first query head of each group",
            ROLES_GROUPED,
            r"head \+ 1, head\)",
            "head, head)",
            gpu_only=True,
        ),
        Mutation(
            "another key head for dQ",
            ROLES_GROUPED,
            r"head // group,\n",
            "head % group,\n",
            gpu_only=True,
        ),
        Mutation(
            "the diagonal hidden from dK",
            ROLES_GROUPED,
            r"keys\[:, None\] <=",
            "keys[:, None] <",
            gpu_only=True,
        ),
        Mutation(
            "the diagonal's neighbour seen by dQ",
            ROLES_GROUPED,
            r"<= last_seen\[:, None\]",
            "<= last_seen[:, None] + 1",
            gpu_only=True,
        ),
        Mutation(
            "the wrong corner",
            ROLES_GROUPED,
            r"rows\[None, :\] \+ seq_kv - seq_q",
            "rows[None, :]",
            gpu_only=True,
        ),
        Mutation(
            "the wrong corner for dQ",
            ROLES_GROUPED,
            r"gl.minimum\(rows \+ seq_kv - seq_q",
            "gl.minimum(rows",
            gpu_only=True,
        ),
        Mutation(
            "rows at the diagonal left out",
            ROLES_GROUPED,
            r"// ROWS \* ROWS",
            "// ROWS * ROWS + ROWS",
            gpu_only=True,
        ),
        Mutation(
            "masked tiles taken for whole",
            ROLES_GROUPED,
            r"< last_key:",
            "< last_key - ROWS:",
            gpu_only=True,
        ),
        Mutation(
            "masked blocks taken for whole",
            ROLES_GROUPED,
            r"seq_kv\) // DQ_BLOCK_N\n",
            "seq_kv) // DQ_BLOCK_N + 1\n",
            gpu_only=True,
        ),
        Mutation("keys past the end", ROLES_FULL, r"if masked:", "if False:", gpu_only=True),
        Mutation("no scale on dK", ROLES_FULL, r"\(dk \* \(.*?\)\)", "(dk)", gpu_only=True),
        Mutation("no scale on dQ", ROLES_FULL, r"\(dq \* \(.*?\)\)", "(dq)", gpu_only=True),
        Mutation(
            "rows of another head",
            ROLES_FULL,
            r"\* heads_q \+ head\) \* padded",
            "* heads_q) * padded",
            gpu_only=True,
        ),
        Mutation(
            "heads that are not padded",
            ROLES_FULL,
            r"head.to\(gl.int64\) \* tiles.*",
            "head * seq_q",
            gpu_only=True,
        ),
        Mutation(
            "the last rows not stored",
            ROLES_FULL,
            r"if row < seq_q:\n        tma",
            "if row < 0:\n        tma",
            gpu_only=True,
        ),
    ],
    "flash_bwd": [
        Mutation("delta forgotten for dK", GRADIENTS, r"dp - delta\[None, :\]", "dp"),
        Mutation("delta forgotten for dQ", GRADIENTS, r"dp - delta\[:, None\]", "dp"),
        Mutation("one query head of each group", GRADIENTS, r"group \* tiles_m", "tiles_m"),
        Mutation(
            "the diagonal hidden", GRADIENTS, r"keys\[:, None\] <= rows", "keys[:, None] < rows"
        ),
        Mutation(
            "the diagonal's neighbour seen",
            GRADIENTS,
            r"<= last_seen\[:, None\]",
            "<= last_seen[:, None] + 1",
        ),
        Mutation(
            "rows above the diagonal left out",
            GRADIENTS,
            "first_m = .*",
            "first_m = n // BLOCK_M * BLOCK_M + BLOCK_M",
        ),
        Mutation("no scale on dK", GRADIENTS, r"dk = dk \* \(.*\)", "dk = dk"),
        Mutation("no scale on dQ", GRADIENTS, r"dq = dq \* \(.*\)", "dq = dq"),
        Mutation("LSE in log2 units", GRADIENTS, r" \* 1\.4426950408889634", ""),
        Mutation(
            "DELTA of the first tile alone",
            GRADIENTS,
            r"rows = tl.program_id\(0\) % tiles \* BLOCK_M",
            "rows = 0 * BLOCK_M",
        ),
        Mutation("dV of P in other units", GRADIENTS, r"dv = tl.dot\(p", "dv = tl.dot((p * 1.02)"),
        Mutation(
            "the last keys are not stored",
            GRADIENTS,
            r"held = keys < seq_kv\n    offs_d",
            "held = keys < seq_kv - 1\n    offs_d",
        ),
        Mutation(
            "stored past the end",
            GRADIENTS,
            r"dk.to\((.*?)\), mask=held\[:, None\] &",
            r"dk.to(\1), mask=",
        ),
    ],
    "flash_ws": [replace(mutation, gpu_only=True) for mutation in _WARP_SPECIALISED],
    "flash": [
        *_everywhere(FULL, CAUSAL, CORNER, GROUPED),
        Mutation("hidden row not guarded", CORNER, r"-3\.0e38", "float('-inf')"),
        Mutation("rescale forgotten", FULL, r"acc = acc \* alpha\[:, None\]", "acc = acc"),
        Mutation("sum not rescaled", FULL, r"l_i \* alpha \+", "l_i +"),
        Mutation(
            "last tile skipped",
            FULL,
            r"full_end, kv_end, BLOCK_N",
            "full_end, kv_end - BLOCK_N, BLOCK_N",
        ),
        Mutation(
            "first tile skipped", FULL, r"tl.range\(0, full_end", "tl.range(BLOCK_N, full_end"
        ),
        Mutation("diagonal taken as full", CAUSAL, r"start_m \+ 1\)", "start_m + BLOCK_M)"),
        Mutation(
            "new maximum without the multiply",
            KEPT,
            r"(?s)m_new = tl.where\(m_new <= m_i \+ TAU, m_i, m_new\)\n(.*?)alpha = ([^\n]*)",
            r"old = m_i\n\1alpha = tl.where(m_new <= old + TAU, 1.0, \2)",
        ),
        Mutation(
            "kept maximum, stale sum",
            KEPT,
            r"return p, alpha, m_new, l_i",
            "return p, alpha, tl.maximum(m_new, m_i + 1.0), l_i",
        ),
        Mutation(
            "values one tile ahead",
            ROTATED,
            r"tl.cast\(n - BLOCK_N, tl.int64\)",
            "tl.cast(n, tl.int64)",
        ),
        Mutation("scores one tile late", AHEAD, r"        s = s_next\n", ""),
    ],
    "kv_outer": [
        *_everywhere(OUTER, OUTER_CAUSAL, OUTER_CORNER, OUTER_GROUPED),
        Mutation("hidden row not guarded", OUTER_CORNER, r"-3\.0e38", "float('-inf')"),
        Mutation("rescale forgotten", OUTER, r"acc = acc \* alpha\[:, None\]", "acc = acc"),
        Mutation("sum not rescaled", OUTER, r"l_i \* alpha \+", "l_i +"),
        Mutation(
            "last key tile skipped",
            OUTER,
            r"tl.range\(0, kv_end, BLOCK_N\)",
            "tl.range(0, kv_end - BLOCK_N, BLOCK_N)",
        ),
        Mutation(
            "state not stored", OUTER, r"tl.store\(L \+ state \+ rows, l_i, mask=live\)", "pass"
        ),
        Mutation(
            "state of another head",
            OUTER,
            # Of one array, and read only: with one state for all, heads that run one after the
            # other, as in the interpreter, would each find their own.
            r"tl.load\(L \+ state \+ rows, mask=live & \(n > 0\)",
            "tl.load(L + rows, mask=live & (n > 0)",
        ),
        Mutation(
            "first query tile skipped", OUTER, r"start = first_m", "start = first_m + BLOCK_M"
        ),
        Mutation("stale memory as state", OUTER, r" & \(n > 0\), other=0.0", ", other=0.0"),
    ],
    "slim": [
        *_everywhere(SLIM, SLIM_CAUSAL, SLIM_CORNER, SLIM_GROUPED),
        Mutation(
            "hidden row not guarded",
            SLIM_CORNER,
            r"base = tl.where\(\w+ == float\(\"-inf\"\), 0.0, (\w+)\)",
            r"base = \1",
        ),
        Mutation(
            "maximum of the last piece",
            SLIM,
            r"m_i = tl.maximum\(m_i, tl.max\((s\d), 1\)\)",
            r"m_i = tl.max(\1, 1)",
        ),
        Mutation("sum of the last piece", SLIM, r"l_i \+= ", "l_i = "),
        Mutation("diagonal taken as full", SLIM_CAUSAL, r"start_m \+ 1\)", "start_m + BLOCK_M)"),
        Mutation(
            "last piece skipped", SLIM, r"if kv_end > 2 \* BLOCK_N:", "if kv_end > 3 * BLOCK_N:"
        ),
    ],
}
