"""Rows and lines of `fagen bench`: the analysis, the race of one shape, and that of a grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, NamedTuple, cast

from fagen.analysis import Cost, roofline_us
from fagen.outcome import Timing
from fagen.problem import Problem
from fagen.report.plain import Row, cell, missing_rows, problem_row, tflops
from fagen.target import Target

if TYPE_CHECKING:
    from fagen.serve.compare import Comparison

KERNEL, DETERMINISTIC = "fagen", "fagen-deterministic"


@dataclass(frozen=True)
class Cell:
    """One shape of a grid. raced is None without a GPU, and where `error` says what went wrong."""

    problem: Problem
    costs: Sequence[Cost]
    raced: Comparison | None = None
    error: str = ""


class Ratio(NamedTuple):
    """A contestant's time over the kernel's, of same rounds: drift hits both and cancels."""

    median: float
    p20: float
    p80: float


def ratio(theirs: Timing, ours: Timing) -> Ratio:
    """Above 1 is slower than the kernel."""
    pairs = zip(theirs.samples_us, ours.samples_us, strict=True)
    ratios = sorted(a / b for a, b in pairs)
    last = len(ratios) - 1
    return Ratio(
        median(ratios),
        ratios[min(last, int(0.2 * len(ratios)))],
        ratios[min(last, int(0.8 * len(ratios)))],
    )


def best_peer(timings: Mapping[str, Timing]) -> str | None:
    """The fastest that is none of fagen's, by its median."""
    peers = [name for name in timings if name not in (KERNEL, DETERMINISTIC)]
    return min(peers, key=lambda name: timings[name].median_us, default=None)


def times_best(timings: Mapping[str, Timing]) -> Ratio | None:
    """The best peer's time over the kernel's, or None where one of them was not timed."""
    best, ours = best_peer(timings), timings.get(KERNEL)
    return None if best is None or ours is None else ratio(timings[best], ours)


def short(name: str) -> str:
    """A contestant without its versions: `sdpa-cudnn 9.19.0 (torch 2.11.0)` is cudnn."""
    return name.split()[0].removeprefix("sdpa-")


def host_times(raced: Comparison) -> dict[str, Timing]:
    return {name: timing.host for name, timing in raced.calls.items()}


def call_times(raced: Comparison) -> dict[str, Timing]:
    return {name: timing.call for name, timing in raced.calls.items()}


def cost_rows(costs: Iterable[Cost], target: Target) -> list[Row]:
    """The analysis of `fagen bench`, on a target's peak rates."""
    return [
        {
            "form": cost.form,
            "flops": cost.flops,
            "flops_per_byte": cost.flops_per_byte,
            "extra_bytes": cost.extra_bytes,
            "asked_bytes": cost.asked_bytes,
            "hbm_bytes": cost.hbm_bytes,
            "least_us": cost.least_us(target),
        }
        for cost in costs
    ]


def cost_table(costs: Sequence[Cost], target: Target) -> list[Row]:
    return [
        {
            "form": cost.form,
            "GFLOP": cost.flops / 1e9,
            "extra MiB": cost.extra_bytes / 2**20,
            "asked MiB": cost.asked_bytes / 2**20,
            "HBM MiB": cost.hbm_bytes / 2**20,
            "FLOP/byte": cost.flops_per_byte,
            "least us": cost.least_us(target),
        }
        for cost in costs
    ]


def cost_lines(problem: Problem, target: Target) -> list[str]:
    """The heading of the analysis."""
    ridge = target.tensor_tflops * 1e3 / target.memory_gbps
    return [
        f"On paper: {problem}; q, k, v, o and LSE take {problem.io_bytes / 2**20:.4g} MiB.",
        f"{target} turns from memory to compute bound at {ridge:.0f} FLOP a byte of HBM.",
        "standard: scores go through memory. queries outside: tiles of queries walk over keys, as "
        "in FlashAttention-2 and most kernels here. keys outside: tiles of keys walk over queries "
        "(family kv_outer).",
    ]


def bench_row(found: Cell, target: Target) -> Row:
    """`fagen bench --json`; `raced` and `missing` are empty where nothing could be timed."""
    problem, raced = found.problem, found.raced
    row = {
        **problem_row(problem),
        "target": target.name,
        "flops": problem.flops,
        "least_bytes": problem.io_bytes,
        "roofline_us": roofline_us(problem, target),
        "analysis": cost_rows(found.costs, target),
        "origin": None if raced is None else raced.kernel.origin,
        "config": None if raced is None else raced.kernel.config.to_dict(),
        "deterministic_config": _deterministic_config(raced),
        "raced": [] if raced is None else race_rows(raced),
        "missing": [] if raced is None else missing_rows(raced.missing),
        "measure_policy": None if raced is None else raced.policy,
        "error": found.error or None,
    }
    return row | _best_row(raced)


def _deterministic_config(raced: Comparison | None) -> Row | None:
    """Of what was timed beside the kernel, which does not repeat bit for bit."""
    if raced is None or raced.deterministic is None:
        return None
    return raced.deterministic.config.to_dict()


def _best_row(raced: Comparison | None) -> Row:
    """The best peer and how many times the kernel's time it takes, for each kind of time."""
    kinds: dict[str, Mapping[str, Timing]] = {"kernel": {}, "host": {}, "call": {}}
    if raced is not None:
        kinds = {"kernel": raced.timings, "host": host_times(raced), "call": call_times(raced)}
    row: Row = {}
    for kind, timings in kinds.items():
        found = times_best(timings)
        row[f"best_{kind}_peer"] = best_peer(timings)
        row[f"times_best_{kind}"] = None if found is None else found.median
        row[f"times_best_{kind}_p20"] = None if found is None else found.p20
        row[f"times_best_{kind}_p80"] = None if found is None else found.p80
    return row


def race_rows(raced: Comparison) -> list[Row]:
    """The kernel and its peers, fastest first. times_kernel: above 1 is slower than fagen."""
    base = raced.timings.get(KERNEL)
    rows = [_race_row(raced, name, timing, base) for name, timing in raced.timings.items()]
    return sorted(rows, key=lambda row: cast("float", row["median_us"]))


def _race_row(raced: Comparison, name: str, timing: Timing, base: Timing | None) -> Row:
    call, times = raced.calls.get(name), None if base is None else ratio(timing, base)
    return {
        "name": name,
        "median_us": timing.median_us,
        "p20_us": timing.p20_us,
        "p80_us": timing.p80_us,
        "tflops": tflops(raced.problem, timing.median_us),
        "times_kernel": None if times is None else times.median,
        "times_kernel_p20": None if times is None else times.p20,
        "times_kernel_p80": None if times is None else times.p80,
        "host_us": None if call is None else call.host.median_us,
        "call_us": None if call is None else call.call.median_us,
        "samples_us": list(timing.samples_us),
        "host_samples_us": None if call is None else list(call.host.samples_us),
        "call_samples_us": None if call is None else list(call.call.samples_us),
    }


def race_table(raced: Comparison) -> list[Row]:
    columns = {
        "median us": "median_us",
        "p20": "p20_us",
        "p80": "p80_us",
        "TFLOP/s": "tflops",
        "x fagen": "times_kernel",
        "host us": "host_us",
        "call us": "call_us",
        "name": "name",
    }
    return [{shown: row[name] for shown, name in columns.items()} for row in race_rows(raced)]


def race_lines(raced: Comparison) -> list[str]:
    """Who fagen's entry is, how it does, how it was timed, and who is missing."""
    lines = [f"{KERNEL} is {raced.kernel!r}"]
    if raced.deterministic is not None:
        lines.append(f"{DETERMINISTIC} is {raced.deterministic!r}")
    for what, timings in (
        ("Kernel", raced.timings),
        ("Host", host_times(raced)),
        ("Call", call_times(raced)),
    ):
        best, times = best_peer(timings), times_best(timings)
        if best is not None and times is not None:
            spread = f"{times.p20:.3f} to {times.p80:.3f}"
            lines.append(
                f"{what} time of the best peer, {best}: {times.median:.3f}x fagen's ({spread})."
            )
    lines.append(f"Kernel times by {raced.policy}; all in interleaved rounds.")
    return [*lines, *(f"Not measured: {name}: {why}" for name, why in raced.missing.items())]


def grid_table(cells: Sequence[Cell], target: Target) -> list[Row]:
    """A row a shape: the kernel, and the best peer of each kind of time as multiples of it."""
    return [_grid_row(found, target) for found in cells]


def _grid_row(found: Cell, target: Target) -> Row:
    raced, row = found.raced, {"shape": _shape(found.problem)}
    ours = None if raced is None else raced.timings.get(KERNEL)
    best = None if raced is None else best_peer(raced.timings)
    times = None if raced is None else times_best(raced.timings)
    call = None if raced is None else raced.calls.get(KERNEL)
    host_times_best = None if raced is None else times_best(host_times(raced))
    call_times_best = None if raced is None else times_best(call_times(raced))
    us = None if ours is None else ours.median_us
    return row | {
        "fagen us": us,
        "TFLOP/s": tflops(found.problem, us),
        "of roofline": None if us is None else roofline_us(found.problem, target) / us,
        "best peer": None if best is None else short(best),
        "x fagen": None if times is None else times.median,
        "p20": None if times is None else times.p20,
        "p80": None if times is None else times.p80,
        "host us": None if call is None else call.host.median_us,
        "x host": None if host_times_best is None else host_times_best.median,
        "call us": None if call is None else call.call.median_us,
        "x call": None if call_times_best is None else call_times_best.median,
    }


def rate_table(cells: Sequence[Cell]) -> list[Row]:
    """TFLOP/s of everybody, a row a shape."""
    raced = [found.raced for found in cells if found.raced is not None]
    names = list(dict.fromkeys(name for one in raced for name in one.timings))
    return [
        {"TFLOP/s": _shape(one.problem)}
        | {
            short(name): tflops(one.problem, one.timings[name].median_us)
            if name in one.timings
            else None
            for name in names
        }
        for one in raced
    ]


def grid_lines(cells: Sequence[Cell], asked: int) -> list[str]:
    """The story under the tables: the mean, who is missing where, what failed."""
    raced = [found.raced for found in cells if found.raced is not None]
    times = [(found.median, one) for one in raced if (found := times_best(one.timings))]
    lines = []
    if len(cells) < asked:
        lines.append(f"Partial: {len(cells)} of {asked} shapes.")
    if times:
        least, where = min(times, key=lambda pair: pair[0])
        mean = geometric_mean(value for value, _ in times)
        lines.append(
            f"Kernel time of the best peer is {cell(mean)}x fagen's, geometric mean of "
            f"{len(times)}; least {cell(least)}x at {_shape(where.problem)}."
        )
    policies = ", ".join(dict.fromkeys(one.policy for one in raced))
    lines += [f"Kernel times by {policies}; all in interleaved rounds."] if raced else []
    missing: dict[tuple[str, str], int] = {}
    for one in raced:
        for pair in one.missing.items():
            missing[pair] = missing.get(pair, 0) + 1
    for (name, why), count in missing.items():
        lines.append(f"Not measured at {count} of {len(raced)}: {name}: {why}")
    return lines + [f"Failed: {_shape(f.problem)}: {f.error}" for f in cells if f.error]


def cell_line(found: Cell) -> str:
    """What one shape's race gave, for the progress on stderr."""
    if found.raced is None:
        return found.error or "analysed"
    ours, best = found.raced.timings.get(KERNEL), best_peer(found.raced.timings)
    times = times_best(found.raced.timings)
    told = "fagen failed" if ours is None else f"fagen {cell(ours.median_us)} us"
    if best is None:
        return f"{told}, no peer"
    theirs = f"{short(best)} {cell(found.raced.timings[best].median_us)} us"
    return f"{told}, {theirs}" + ("" if times is None else f", {times.median:.3f}x fagen's")


def _shape(problem: Problem) -> str:
    return str(problem).removeprefix(f"{problem.direction} ")
