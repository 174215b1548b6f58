"""Which configs could serve a problem, best first. Pure: rows in, candidates out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fagen.config import Config
from fagen.generate.space import seeds_of
from fagen.outcome import GATE, Status
from fagen.problem import Problem
from fagen.target import Target, Toolchain

if TYPE_CHECKING:
    from fagen.records import Record

Origin = Literal["tuned", "shipped", "nearest", "predicted", "default"]
OnMiss = Literal["nearest", "default", "raise"]


@dataclass(frozen=True)
class Candidate:
    """A config and where it came from. `record` is None for a family's own default."""

    origin: Origin
    config: Config
    record: Record | None = None


def candidates(
    problem: Problem,
    target: Target,
    toolchain: Toolchain,
    records: Iterable[Record],
    on_miss: OnMiss,
) -> Iterator[Candidate]:
    """tuned -> shipped -> nearest -> predicted -> default; only what was measured on this device.

    `default` leaves out the nearest, `raise` all but the exact ones. Rows that are alike stay in
    the order of `records`, which is the database's: what a run chose first, then by time.
    """
    here = [r for r in records if r.device_key == target.device_key and not r.quarantined]
    timed = [r for r in here if r.status is Status.OK and r.median_us is not None]

    def rank(record: Record) -> tuple[bool, bool, float, bool]:
        other_build = (record.toolchain_key, record.exactness) != (toolchain.key, GATE)
        other_sizes = not record.is_of(problem)
        return record.shipped, other_build, distance(problem, record.problem), other_sizes

    timed.sort(key=rank)
    exact = [r for r in timed if r.problem.bucket == problem.bucket]
    yield from (Candidate("shipped" if r.shipped else "tuned", r.config, r) for r in exact)
    if on_miss == "raise":
        return
    if on_miss == "nearest":
        others = (r for r in timed if r.problem.bucket != problem.bucket)
        yield from (Candidate("nearest", r.config, r) for r in others)
    guessed = sorted((r for r in here if r.status is Status.PREDICTED), key=rank)
    yield from (Candidate("predicted", r.config, r) for r in guessed)
    yield from (Candidate("default", config) for config in seeds_of(problem, target))


def distance(wanted: Problem, found: Problem) -> float:
    """How many doublings apart two problems of one class are, over the three bucketed sizes."""
    pairs = zip(wanted.bucket, found.bucket, strict=True)
    return sum(abs(math.log2(max(a, 1)) - math.log2(max(b, 1))) for a, b in pairs)
