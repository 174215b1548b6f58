"""The picture of `fagen bench --plot`: TFLOP/s over sequence length, a line a contestant."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fagen.analysis import roofline_us
from fagen.errors import BadSetting, MissingPackage
from fagen.problem import Problem
from fagen.report.bench import DETERMINISTIC, KERNEL, Cell, short
from fagen.report.plain import tflops
from fagen.target import Target

if TYPE_CHECKING:
    from fagen.serve.compare import Comparison

FORMATS = (".png", ".svg", ".pdf")
ACROSS = 3  # panels in a row
# A contestant keeps its colour from picture to picture. After Okabe and Ito, "Color Universal
# Design" (2008): told apart by people who see few colours.
COLOURS = {
    KERNEL: "#d55e00",
    DETERMINISTIC: "#e39a66",
    "cudnn": "#0072b2",
    "flash": "#56b4e9",
    "fa3": "#009e73",
    "fa4": "#cc79a7",
    "flex": "#e69f00",
    "efficient": "#999999",
    "auto": "#4d4d4d",
    "math": "#bbbbbb",
    "eager": "#f0c000",
}


def check(path: Path) -> None:
    """Before anything is measured. Raises BadSetting, MissingPackage."""
    if path.suffix.lower() not in FORMATS:
        raise BadSetting(
            f"--plot {path} has no known ending.", f"Name it {path.stem}.png, .svg or .pdf."
        )
    if not path.absolute().parent.is_dir():
        raise BadSetting(f"--plot: there is no folder {path.parent}.", "Make it first.")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingPackage(
            "--plot needs matplotlib, which is not installed.",
            "Run: pip install 'fagen[plot]'",
        )


def draw(cells: Sequence[Cell], target: Target, path: Path) -> None:
    """Write the picture: a panel for each kind of shape, the roofline drawn in every one.

    Raises OSError.
    """
    from matplotlib.figure import Figure  # no pyplot: no window, nothing global

    panels: dict[str, list[Comparison]] = {}
    for found in cells:
        if found.raced is not None:
            panels.setdefault(_kind(found.problem), []).append(found.raced)
    across = min(ACROSS, max(len(panels), 1))
    down = -(-max(len(panels), 1) // across)
    figure = Figure(figsize=(5.2 * across, 4.0 * down), dpi=120, layout="constrained")
    places = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, (kind, raced) in zip(places, panels.items(), strict=False):
        _panel(axes, kind, sorted(raced, key=lambda one: one.problem.shape.seq_q), target)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    what = " and ".join(sorted({found.problem.direction for found in cells})).capitalize()
    figure.suptitle(f"{what} attention on {target.name}: kernel time, medians")
    figure.savefig(path)


def _panel(axes: Any, kind: str, raced: Sequence[Comparison], target: Target) -> None:
    lengths = [one.problem.shape.seq_q for one in raced]
    roof = [tflops(one.problem, roofline_us(one.problem, target)) for one in raced]
    axes.plot(lengths, roof, color="black", linestyle="--", linewidth=1, label="roofline")
    for name in dict.fromkeys(name for one in raced for name in one.timings):
        points = [
            (one.problem.shape.seq_q, tflops(one.problem, one.timings[name].median_us))
            for one in raced
            if name in one.timings
        ]
        axes.plot(
            *zip(*points, strict=True),
            color=COLOURS.get(short(name)),
            linewidth=2.2 if name == KERNEL else 1.2,
            marker="o",
            markersize=4,
            label=short(name),
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title(kind)
    axes.set_xlabel("query length")
    axes.set_ylabel("TFLOP/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")


def _kind(problem: Problem) -> str:
    """What the shapes of one panel share: all but the lengths and how often there is a head."""
    s, f = problem.shape, problem.features
    dim = f"D{s.head_dim}" if s.head_dim == s.head_dim_v else f"D{s.head_dim}/{s.head_dim_v}"
    ratio = s.heads_q // s.heads_kv
    words = [s.dtype, dim, "full" if f.causal == "none" else "causal"]
    words += ["bottom-right"] if f.causal == "bottom_right" else []
    return " ".join(words + ([f"{ratio} query heads a key head"] if ratio > 1 else []))
