"""Attention as a Helion kernel, tuned by Helion; a part of benchmarks/tuners.py.

python benchmarks/tuners_helion.py JOB.json     tune it, and print what was chosen as JSON

Needs helion (1.5.0 is what ran, with torch 2.11) and what its search imports: scikit-learn.
Imports nothing of fagen.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helion
import helion.language as hl
import torch

LOG2_E = math.log2(math.e)
EFFORT = "quick"
TORCH_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Rows of Helion's log that are no candidate of their own: "started" comes before each measurement.
NO_CANDIDATE = {"started", "filtered", "deduplicated"}

Plain = dict[str, Any]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attend_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_log2: float, causal: hl.constexpr
) -> torch.Tensor:
    """q, k, v (heads, rows, dim), of one length; products and softmax in fp32.

    A head is picked by its number, not as a tile: so products are of two dimensions, and K and V
    can come by tensor descriptors.
    """
    heads, rows, dim = q.shape
    dim = hl.specialize(dim)
    out = torch.empty([heads, rows, dim], dtype=q.dtype, device=q.device)
    for one_head, tile_m in hl.tile([heads, rows], block_size=[1, None]):
        head = one_head.begin
        row_max = hl.full([tile_m], float("-inf"), dtype=torch.float32)  # in log2 units
        row_sum = hl.zeros([tile_m], dtype=torch.float32)
        acc = hl.zeros([tile_m, dim], dtype=torch.float32)
        query = q[head, tile_m, :]
        last = tile_m.end if causal else rows
        for tile_n in hl.tile(last):
            scores = hl.dot(query, k[head, tile_n, :].T)
            if causal:
                seen = tile_n.index[None, :] <= tile_m.index[:, None]
                scores = torch.where(seen, scores, float("-inf"))
            new_max = torch.maximum(row_max, torch.amax(scores, -1) * scale_log2)
            p = torch.exp2(scores * scale_log2 - new_max[:, None])
            shrink = torch.exp2(row_max - new_max)
            row_sum = row_sum * shrink + torch.sum(p, -1)
            acc = hl.dot(p.to(v.dtype), v[head, tile_n, :], acc=acc * shrink[:, None])
            row_max = new_max
        out[head, tile_m, :] = (acc / row_sum[:, None]).to(out.dtype)
    return out


def attention(kernel: Any, causal: bool) -> Attend:
    """softmax(q k^T / sqrt(dim)) v of (batch, heads, rows, dim)."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return kernel(*arguments(q, k, v, causal)).view(q.shape)  # type: ignore[no-any-return]

    return attend


def arguments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[Any, ...]:
    return *(one.flatten(0, 1) for one in (q, k, v)), q.shape[3] ** -0.5 * LOG2_E, causal


def configured(config: Plain) -> Any:
    """The kernel with one config, which is not tuned again."""
    return helion.kernel(attend_heads, config=helion.Config(**config), static_shapes=True)


def settings(job: Plain) -> Plain:
    """What is asked of Helion; all else is its default."""
    return {
        "autotune_effort": EFFORT,
        "autotune_budget_seconds": job["budget_s"],
        "autotune_random_seed": 0,
        "static_shapes": True,
    }


def counted(log: Path) -> tuple[int, int]:
    """Configs that Helion's log has, and how many of them were never timed well."""
    statuses: dict[str, set[str]] = {}
    with log.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if row["status"] not in NO_CANDIDATE:
                statuses.setdefault(row["config_id"], set()).add(row["status"])
    return len(statuses), sum("ok" not in found for found in statuses.values())


def main(path: str) -> Plain:
    job = json.loads(Path(path).read_text("utf-8"))
    shape, asked = job["shape"], settings(job)
    torch.manual_seed(0)
    size = (shape["batch"], shape["heads"], shape["seq"], shape["head_dim"])
    dtype = TORCH_DTYPE[shape["dtype"]]
    q, k, v = (torch.randn(size, dtype=dtype, device="cuda") for _ in range(3))
    log = Path(path).with_name("helion-log")
    kernel = helion.kernel(attend_heads, **asked, autotune_log=str(log))
    given = arguments(q, k, v, job["causal"])
    started = time.perf_counter()
    bound = kernel.bind(given)
    config = bound.autotune(given)
    bound(*given)
    torch.cuda.synchronize()
    seconds, ready_at = time.perf_counter() - started, time.time()
    tried, failed = counted(log.with_suffix(".csv"))
    return {
        "ready_at": ready_at,
        "tuning_s": seconds,
        "tried": tried,
        "failed": failed,
        "config": dict(config),
        "settings": asked,
    }


# Helion's workers are spawned and import this file again.
if __name__ == "__main__":
    answer_to, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
    print(json.dumps(main(sys.argv[1])), file=answer_to)
