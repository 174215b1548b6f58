"""The adversarial set: small problems, each of which broke some real kernel.

Sizes follow the candidate's tile, so that every class of tile occurs: skipped, full, diagonal,
ragged in queries and in keys, and three key tiles or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from fagen.generate.program import Sizes
from fagen.judge.arena import LAYOUTS
from fagen.problem import Problem

Scores = Literal["randn", "slope", "level", "lead", "outliers", "uniform", "equal"]
Values = Literal["bounded", "one_hot", "heads"]
Broken = Literal["", "query_row", "kv_head"]

LEVEL = -120.0  # exp(120) overflows fp32: a pad column scored 0 wins, exp(0 - LSE) is inf
LEAD = 1100.0
# With fewer outputs, or fewer columns of V, a case gets more batches: the largest error of a
# few, or of many that share their weights, is a lottery.
FEW_OUTPUTS, FEW_COLUMNS, MOST_BATCHES = 1024, 64, 8
CROWD_ROUNDS = 3  # a persistent kernel's first tile, its second, and the one whose slots it reuses
RAW_DOT = 2.0e5  # above fp16's 65504 before the scale is applied


@dataclass(frozen=True)
class Case:
    """scores, amount: how q and k are drawn (`_SCORES`). broken: where a NaN is put."""

    name: str
    sizes: Sizes
    scores: Scores
    amount: float = 1.0
    values: Values = "bounded"
    scale: float = 1.0
    layout: str = "tight"
    broken: Broken = ""
    far: bool = False


def cases(
    problem: Problem,
    tile: tuple[int, int],
    limits: dict[str, range],
    *,
    thorough: bool,
    sm_count: int = 0,
) -> list[Case]:
    """The shrunken cases of a candidate. Not thorough: the list that a CPU can afford.

    sm_count: of a GPU, which then also gets a case with several tiles for each multiprocessor: a
    persistent kernel takes one tile after another only where there are more than it has places.
    """
    room = _Room(problem, tile, limits, thorough)
    made = list(_main(room))
    if thorough:
        made += _more(room)
    if sm_count:
        made.append(_crowd(room, sm_count))
    if problem.direction == "backward":  # a NaN of Q or K reaches every gradient
        made = [case for case in made if not case.broken]
    turns = LAYOUTS[problem.layout]
    return [replace(case, layout=_layout(case, turns, i)) for i, case in enumerate(made)]


def target_cases(problem: Problem) -> list[Case]:
    """The problem's own shape: plain noise, and a maximum that rises from tile to tile.

    Where that has few outputs, the batch is larger.
    """
    sizes = _enough(Sizes.of(problem), MOST_BATCHES)
    rise = min(300.0, sizes.seq_kv / 16) / max(sizes.seq_kv, 1)
    scale = sizes.head_dim**-0.5
    layouts = LAYOUTS[problem.layout]
    return [
        Case("target", sizes, "randn", scale=scale, layout=layouts[0]),
        Case("target,rising", sizes, "slope", rise, scale=scale, layout=layouts[1]),
    ]


def fill(case: Case, q: Tensor, k: Tensor, v: Tensor, seed: int) -> None:
    """Draws a case's inputs into the views."""
    dice = torch.Generator(q.device).manual_seed(seed)

    drawn_q, drawn_k = (
        torch.randn(view.shape, generator=dice, device=view.device) for view in (q, k)
    )
    _SCORES[case.scores](case, drawn_q, drawn_k)
    q.copy_(drawn_q)
    # Bounded, so that the largest error is one of many alike: with the tails of a normal
    # distribution it hung on a few outputs, and right kernels came out at 1.1 of their budget.
    drawn_v = torch.rand(v.shape, generator=dice, device=v.device).mul_(2).sub_(1)
    if case.values == "one_hot":
        drawn_v = _one_hot(v)
    if case.values == "heads":  # every key/value head of every batch a constant of its own
        count = v.shape[0] * v.shape[1]
        drawn_v = (
            torch.arange(1.0, count + 1, device=v.device).view(*v.shape[:2], 1, 1).expand(v.shape)
        )
    for view, drawn in ((k, drawn_k), (v, drawn_v)):
        shared = view.shape[1] > 1 and view.stride(1) == 0
        (view[:, :1] if shared else view).copy_(drawn[:, :1] if shared else drawn)


@dataclass(frozen=True)
class _Room:
    """What the sizes of cases are made from."""

    problem: Problem
    tile: tuple[int, int]
    limits: dict[str, range]
    thorough: bool

    @property
    def scale(self) -> float:
        return float(self.problem.shape.head_dim**-0.5)

    @property
    def seq_q(self) -> int:
        """Two query tiles or more, ragged; the last sees a whole key tile below its diagonal."""
        wide = max(self.tile)
        return wide + wide // 2 + 5

    @property
    def seq_kv(self) -> int:
        """Three key tiles or more, ragged; the first query tile skips one under a causal mask."""
        return max(2 * self.tile[1], max(self.tile)) + self.tile[1] // 2 + 5

    def sizes(self, seq_q: int, seq_kv: int, batch: int = 1, heads_kv: int | None = None) -> Sizes:
        shape = self.problem.shape
        ratio = shape.heads_q // shape.heads_kv
        if heads_kv is None:
            heads_kv = 2 if self.thorough or ratio <= 2 else 1
        heads_q = heads_kv * ratio
        wanted = _enough(
            Sizes(batch, heads_q, heads_kv, seq_q, seq_kv, shape.head_dim, shape.head_dim_v),
            MOST_BATCHES if self.thorough else MOST_BATCHES // 2,
        )
        most = {name: right[-1] for name, right in self.limits.items()}
        held = Sizes(*(min(n, most.get(f, n)) for f, n in wanted._asdict().items()))
        rows = held.seq_kv + most.get("rows_beyond_keys", held.rows_beyond_keys)
        return held._replace(seq_q=min(held.seq_q, rows))


def _enough(sizes: Sizes, most: int) -> Sizes:
    outputs = sizes.heads_q * sizes.seq_q * sizes.head_dim_v
    if sizes.batch == 0 or outputs == 0:
        return sizes
    columns = sizes.heads_kv * sizes.head_dim_v
    wanted = max(-(-FEW_OUTPUTS // outputs), -(-FEW_COLUMNS // columns))
    return sizes._replace(batch=max(sizes.batch, min(most, wanted)))


def _main(room: _Room) -> Iterator[Case]:
    block_m, block_n = room.tile
    scale = room.scale
    ragged = room.sizes(room.seq_q, room.seq_kv)
    exact = room.sizes(2 * max(room.tile), max(2 * block_n, 2 * block_m))
    yield Case("ragged", ragged, "randn", scale=0.7 * scale)
    yield Case("ragged,rising", ragged, "slope", 8 / block_n, scale=scale)
    yield Case("ragged,low", ragged, "level", LEVEL, scale=scale)
    yield Case("ragged,edges", ragged, "uniform", values="one_hot", scale=scale)
    yield Case("exact,edges", exact, "uniform", values="one_hot", scale=scale)
    yield Case("exact,creeping", exact, "slope", 3 / block_n, scale=scale)
    yield Case("ragged,huge", ragged, "randn", 8.0, scale=scale)
    heads = room.sizes(block_m // 2 + 3, 2 * block_n + 7, batch=2, heads_kv=2)
    yield Case("heads", heads, "randn", values="heads", scale=scale)
    wide = room.sizes(block_m // 2 + 3, 3 * block_n + 7)
    yield Case("wide,edges", wide, "uniform", values="one_hot", scale=scale)
    tall = room.sizes(2 * block_m + block_m // 2 + block_n + 9, block_n + 9)
    yield Case("tall", tall, "randn", scale=scale)
    if room.problem.shape.dtype == "fp16" or room.thorough:
        yield Case("raw_overflow", heads, "equal", sqrt(RAW_DOT), scale=10 / RAW_DOT)
        steep = 8.0 / (3600.0 * sqrt(room.problem.shape.head_dim))
        yield Case("raw_overflow,random", heads, "randn", 60.0, scale=steep)
    yield Case("lead", heads, "lead", LEAD, scale=scale)
    yield Case("one_query", room.sizes(1, 2 * block_n + 3), "randn", scale=scale)
    yield Case("one_query,low", room.sizes(1, block_n + 1), "level", LEVEL, scale=scale)
    yield Case("one_key", room.sizes(block_m + 1, 1), "randn", scale=scale)
    yield Case("no_keys", room.sizes(5, 0), "randn", scale=scale)
    yield Case("no_queries", room.sizes(0, 5), "randn", scale=scale)
    broken = room.sizes(block_m + 3, block_n + 9, batch=2)
    yield Case("nan_query", broken, "randn", scale=scale, broken="query_row")
    yield Case("nan_kv", broken, "randn", scale=scale, broken="kv_head")
    if room.problem.features.scale == "any":
        yield Case("negative_scale", ragged, "randn", scale=-scale)
        yield Case("negative_scale,low", ragged, "level", LEVEL, scale=-scale)
        yield Case("zero_scale", ragged, "randn", scale=0.0)


def _more(room: _Room) -> Iterator[Case]:
    block_m, block_n = room.tile
    scale = room.scale
    ragged = room.sizes(2 * max(room.tile) + 7, room.seq_kv + 2 * block_n, batch=2)
    yield Case("ragged,falling", ragged, "slope", -8 / block_n, scale=scale)
    yield Case("ragged,creeping", ragged, "slope", 3 / block_n, scale=scale)
    yield Case("ragged,outliers", ragged, "outliers", 8.0, scale=scale)
    yield Case("ragged,noise16", ragged, "randn", 4.0, scale=scale)
    yield Case("ragged,lead", ragged, "lead", LEAD, scale=scale)
    for keys in (block_n - 1, block_n, block_n + 1, 2 * block_n, 3 * block_n, 4 * block_n):
        for queries in (block_m - 1, block_m, block_m + 1):
            sizes = room.sizes(queries, keys)
            yield Case(f"sizes{queries}x{keys}", sizes, "slope", 8 / block_n, scale=scale)
    yield Case(
        "tall,rising", room.sizes(3 * block_m + 5, 2 * block_n), "slope", 8 / block_n, scale=scale
    )
    yield Case("one_one", room.sizes(1, 1), "randn", scale=scale)
    yield Case("no_batch", room.sizes(5, 5, batch=0), "randn", scale=scale)
    yield Case(
        "far,batch", room.sizes(16, 40, batch=3, heads_kv=1), "randn", scale=scale, far=True
    )
    yield Case("far,heads", room.sizes(16, 40, heads_kv=3), "randn", scale=scale, far=True)


def _crowd(room: _Room, sm_count: int) -> Case:
    """Tiles for several rounds of a persistent launch that has two places a multiprocessor."""
    block_m, block_n = room.tile
    one = room.sizes(block_m + 3, 2 * block_n + 7, heads_kv=1)
    tiles = one.heads_q * (2 if one.seq_q > block_m else 1)
    sizes = one._replace(batch=max(one.batch, -(-CROWD_ROUNDS * 2 * sm_count // tiles)))
    return Case("crowd", sizes, "randn", scale=room.scale)


def _layout(case: Case, turns: tuple[str, ...], turn: int) -> str:
    layout = turns[turn % len(turns)]
    apart = case.values == "heads" or case.broken  # heads that must not share memory
    return "gapped" if layout == "expanded" and apart else layout


def _pattern(case: Case, q: Tensor, k: Tensor, nats: Tensor) -> None:
    """Adds about `nats[j]` to every score of key j by the last channel, half in q and half in k.

    The last, so that in fp32 the small products are summed before the large one hides their bits.

    Rows differ by 15 % each way: with head_dim 1 they would be all the same otherwise.
    """
    share = max(sqrt(float(nats.abs().max()) / abs(case.scale)), 1.0) if nats.numel() else 1.0
    q[..., -1] = share * (1.0 + 0.15 * q[..., -1].clamp(-1.0, 1.0))
    k[..., -1] = nats / (share * case.scale)


def _draw_randn(case: Case, q: Tensor, k: Tensor) -> None:
    q.mul_(case.amount)
    k.mul_(case.amount)


def _draw_slope(case: Case, q: Tensor, k: Tensor) -> None:
    _pattern(case, q, k, case.amount * torch.arange(k.shape[2], device=k.device))


def _draw_level(case: Case, q: Tensor, k: Tensor) -> None:
    _pattern(case, q, k, torch.full((k.shape[2],), case.amount, device=k.device))


def _draw_lead(case: Case, q: Tensor, k: Tensor) -> None:
    nats = torch.zeros(k.shape[2], device=k.device)
    nats[2 * k.shape[2] // 3 :][:1] = case.amount
    # The other channels are silent: added to 1100 in fp32 they cost more than the LSE's budget.
    q[..., :-1] = 0.0
    _pattern(case, q, k, nats)


def _draw_outliers(case: Case, q: Tensor, k: Tensor) -> None:
    k[:, :, 5 :: max(k.shape[2] // 4, 6)].mul_(case.amount)


def _draw_uniform(case: Case, q: Tensor, k: Tensor) -> None:
    q.zero_()


def _draw_equal(case: Case, q: Tensor, k: Tensor) -> None:
    each = case.amount / sqrt(q.shape[-1])
    q.fill_(each)
    k.fill_(each)


_SCORES: dict[str, Callable[[Case, Tensor, Tensor], None]] = {
    "randn": _draw_randn,
    "slope": _draw_slope,
    "level": _draw_level,
    "lead": _draw_lead,
    "outliers": _draw_outliers,
    "uniform": _draw_uniform,
    "equal": _draw_equal,
}


def _one_hot(v: Tensor) -> Tensor:
    """Row j is 1 in channel j % Dv, so the visible keys can be read off the output."""
    rows, columns = v.shape[2:]
    row = torch.arange(rows, device=v.device)
    if columns < 8:  # too few channels to tell keys apart: signs instead
        return (1.0 - 2.0 * (row % 2)).view(-1, 1).expand(v.shape)
    hot = (row[:, None] % columns) == torch.arange(columns, device=v.device)
    return hot.float().expand(v.shape)
