"""What the GPU tests share."""

from __future__ import annotations

from functools import lru_cache

import torch

from fagen.generate.program import Program
from fagen.judge.measure import MeasurePolicy
from fagen.target import Target, detect
from fagen.tune.pool import BuildPool, builder_count

QUICK = MeasurePolicy(warmup_ms=0.5, batch_ms=0.5, samples=2, pause_ms=0.0)


@lru_cache(maxsize=1)
def here() -> Target:
    return detect()


def build_all(programs: list[Program]) -> None:
    """Compile in parallel, into Triton's cache."""
    pool = BuildPool(here(), builder_count())
    try:
        replies = [pool.submit(program) for program in programs]
        assert [r.result().reason for r in replies if r.result().built is None] == []
    finally:
        pool.close()


def on_device(drawn: torch.Tensor) -> torch.Tensor:
    """The same strides, offset and surroundings in device memory."""
    room = torch.empty(0, dtype=drawn.dtype).set_(drawn.untyped_storage()).to("cuda:0")
    return torch.as_strided(room, drawn.shape, drawn.stride(), drawn.storage_offset())
