"""Replayed searches as rows."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fagen.records.dataset import Dataset
    from fagen.report.plain import Row
    from fagen.tune.replay import Score

    Found = Mapping[str, Mapping[int, Score]]  # by strategy and number of trials


def heading(dataset: Dataset) -> str:
    """What was measured, in one line."""
    timed = [row for row in dataset.rows if row.passes_us]
    right = sum(row.right for row in timed)
    twice = sum(len(row.passes_us) > 1 for row in timed)
    return (
        f"{dataset.problem} on {dataset.target}: {len(dataset.rows)} configs, {right} right, "
        f"{len(timed) - right} clearly slower, {twice} timed more than once, the best "
        f"{dataset.optimum_us:.4g} us."
    )


def replay_table(found: Found) -> list[Row]:
    return [
        {
            "strategy": name,
            "trials": count,
            "median": f"{score.median:.4f}",
            "p10": f"{score.p10:.4f}",
            "seconds": f"{score.seconds:.0f}",
        }
        for name, by_count in found.items()
        for count, score in by_count.items()
    ]


def replay_rows(dataset: Dataset, found: Found, trials: int, seeds: int) -> dict[str, Any]:
    return {
        "problem": str(dataset.problem),
        "device": dataset.target.name,
        "configs": len(dataset.rows),
        "optimum_us": dataset.optimum_us,
        "trials": trials,
        "seeds": seeds,
        "strategies": {
            name: {str(count): asdict(score) for count, score in by_count.items()}
            for name, by_count in found.items()
        },
    }
