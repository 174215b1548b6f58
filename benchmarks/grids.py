"""Races what `fagen.get` serves against its peers over whole grids, and writes a result file.

python benchmarks/grids.py --grid G --db winners.db --out benchmarks/results/h200-forward.json
python benchmarks/grids.py --grid G --direction backward --db winners.db \\
    --out benchmarks/results/h200-backward.json

Kernel time and call time of every contestant, in interleaved rounds, as `fagen bench` takes them.
Where gradients may differ from run to run, the kernel that repeats them is raced beside the one
that is served.
The file is written after every cell; --append goes on with the cells that it lacks. --list prints
the cells as options of `fagen tune` and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, cast

from publish import check, made, now, without_folders
from steps import write

from fagen.errors import FagenError
from fagen.judge import calls
from fagen.judge.measure import MeasurePolicy
from fagen.judge.peers import backends_named
from fagen.outcome import Timing, Verdict
from fagen.problem import Direction, Problem, make_problem
from fagen.report.bench import DETERMINISTIC, KERNEL, best_peer, call_times, host_times, ratio
from fagen.serve.compare import Comparison, compare
from fagen.serve.inputs import options_of
from fagen.target import Target, detect

SCHEMA = 1  # of the file; a field that changes its meaning raises it
TOKENS, HIDDEN = 16384, 2048  # of a cell of G: batch * length and heads * head size
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)  # a backward pass from the second on
MASKS = (False, True)
FILES = ("--db", "--out")
PEERS = {
    "forward": ("auto", "cudnn", "flash", "fa3"),
    "backward": ("auto", "cudnn", "flash", "efficient", "fa3"),
}
POLICY, ROUNDS = MeasurePolicy(), 11  # a cell of five contestants takes 3 s

Plain = dict[str, Any]


def grid_g(direction: Direction) -> list[Problem]:
    """36 cells of one amount of tokens and features; 30 of a backward pass."""
    return [
        make_problem(
            n, d, batch=TOKENS // n, heads=HIDDEN // d, causal=causal, direction=direction
        )
        for d in (64, 128, 256)
        for causal in MASKS
        for n in (LENGTHS if direction == "forward" else LENGTHS[1:])
    ]


def grid_g2(direction: Direction) -> list[Problem]:
    """15 cells of what G leaves out: grouped heads, other head sizes, fp16, other lengths; 8 of a
    backward pass."""
    backward = direction == "backward"
    grouped = [
        make_problem(n, 128, batch=2, heads=32, kv_heads=8, causal=True, direction=direction)
        for n in ((4096, 8192) if backward else LENGTHS[1:])
    ]
    shapes: list[tuple[tuple[int, int], dict[str, Any]]] = [
        ((4096, 96), {"batch": 4}),
        ((4096, 192), {"batch": 4, "head_dim_v": 128}),
        ((3000, 128), {"batch": 1}),
    ]
    if not backward:
        shapes.insert(2, ((4096, 128), {"batch": 4, "dtype": "fp16"}))
    others = [
        make_problem(*shape, causal=causal, direction=direction, **words)
        for shape, words in shapes
        for causal in MASKS
    ]
    if backward:
        return [*grouped, *others]
    long: dict[str, Any] = {"batch": 4, "seq_kv": 8192}
    unequal = [
        make_problem(1024, 128, **long),
        make_problem(1024, 128, causal=True, causal_align="bottom_right", **long),
    ]
    return [*grouped, *others, *unequal]


def grid_call(direction: Direction) -> list[Problem]:
    """So small that the host is the bound: read its host_us."""
    return [
        make_problem(128, 128, heads=8, causal=causal, direction=direction) for causal in MASKS
    ]


GRIDS = {"G": grid_g, "G2": grid_g2, "call": grid_call}


def head(options: argparse.Namespace, target: Target) -> Plain:
    """All but the cells."""
    command = shlex.join(["python", "benchmarks/grids.py", *options.words])
    clean = None if options.clean is None else options.clean == "yes"
    return {
        "schema": SCHEMA,
        **made(target, command, options.commit, clean),
        "l2": POLICY.l2,
        "policy": {"kernel": POLICY.name, "call": calls.POLICY, "rounds": ROUNDS},
        "summary": {},
        "cells": [],
        "failed": [],
    }


def cell(raced: Comparison, seconds: float) -> Plain:
    """One shape. All objects have the same keys: fagen, and each peer by its name."""
    kernel, problem = raced.kernel, raced.problem
    row = {
        "problem": {"text": str(problem), **problem.to_dict(), "flops": problem.flops},
        "date": now(),
        "seconds": _short(seconds),
        "origin": kernel.origin,
        "config": kernel.config.to_dict(),
        "source": kernel.chosen.program.key,
        "kernel_us": _medians(raced.timings),
        "best_peer": best_peer(raced.timings),
        "times_best_peer": times_best_peer(raced, KERNEL),
        "host_us": _medians(host_times(raced)),
        "call_us": _medians(call_times(raced)),
        "samples_us": _samples(raced.timings),
        "clocks_mhz": {name: list(one.clock_mhz) for name, one in raced.timings.items()},
        "host_samples_us": _samples(host_times(raced)),
        "call_samples_us": _samples(call_times(raced)),
        "missing": raced.missing,
        "errors": errors(kernel.verdict),
    }
    if problem.direction == "backward":
        row["deterministic"] = deterministic(raced)
    return row


def deterministic(raced: Comparison) -> Plain:
    """The kernel that repeats bit for bit, under the name that it has in the times: the one that
    is served, where that does."""
    name = KERNEL if raced.deterministic is None else DETERMINISTIC
    kernel = raced.deterministic or raced.kernel
    return {
        "name": name,
        "origin": kernel.origin,
        "config": kernel.config.to_dict(),
        "source": kernel.chosen.program.key,
        "times_best_peer": times_best_peer(raced, name),
        "errors": errors(kernel.verdict),
    }


def times_best_peer(raced: Comparison, name: str) -> list[float] | None:
    """The best peer's time over that of one of fagen's kernels."""
    best, ours = best_peer(raced.timings), raced.timings.get(name)
    if best is None or ours is None:
        return None
    return [_short(one) for one in ratio(raced.timings[best], ours)]


def errors(verdict: Verdict | None) -> list[Plain]:
    """The gate's checks of the kernel, the one nearest its budget first."""
    if verdict is None:
        return []
    left, ordered = list(verdict.checks), []
    while left:
        worst = Verdict(tuple(left)).worst
        assert worst is not None
        left.remove(worst)
        ordered.append(check(worst) | {"where": verdict.where})
    return ordered


def summary(cells: Sequence[Plain]) -> Plain:
    """Of the best peers' times over fagen's: above 1, fagen is faster; and over those of the
    kernels that repeat, where gradients are raced."""
    found = _summary({row["problem"]["text"]: row["times_best_peer"] for row in cells})
    repeating = {
        row["problem"]["text"]: row["deterministic"]["times_best_peer"]
        for row in cells
        if "deterministic" in row
    }
    return found | ({"deterministic": _summary(repeating)} if repeating else {})


def _summary(raced: Mapping[str, list[float] | None]) -> Plain:
    times = {text: ratios[0] for text, ratios in raced.items() if ratios is not None}
    if not times:
        return {}
    least = min(times, key=lambda text: times[text])
    return {
        "cells": len(times),
        "geometric_mean": _short(geometric_mean(times.values())),
        "least": [times[least], least],
        "under_1": sorted(text for text, value in times.items() if value < 1),
    }


def continued(found: Plain, new: Plain) -> Plain:
    """An earlier file, to be added to. ValueError where it was made another way."""
    for field in ("schema", "commit", "device", "versions", "policy"):
        if found[field] != new[field]:
            raise ValueError(f"its {field} is {found[field]}, and here it is {new[field]}")
    return {**found, "command": f"{found['command']}; {new['command']}", "failed": []}


def measure(problems: Sequence[Problem], document: Plain, options: argparse.Namespace) -> None:
    """Every problem that the document lacks, written as it comes."""
    done = {row["problem"]["text"] for row in document["cells"]}
    for number, problem in enumerate(problems, 1):
        if str(problem) in done:
            continue
        start = time.perf_counter()
        try:
            raced = compare(
                problem, None, options.db, backends=options.peers, policy=POLICY, rounds=ROUNDS
            )
        except (FagenError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            document["failed"].append({"problem": str(problem), "reason": reason})
            print(f"[{number}/{len(problems)}] {problem}: FAILED: {reason}", flush=True)
        else:
            row = cell(raced, time.perf_counter() - start)
            document["cells"].append(row)
            print(f"[{number}/{len(problems)}] {_line(row)}", flush=True)
        document["summary"] = summary(document["cells"])
        write(options.out, document)


def main(words: Sequence[str]) -> int:
    options = _options(words)
    direction = cast("Direction", options.direction)
    problems = [problem for name in options.grid for problem in GRIDS[name](direction)]
    problems = [p for p in problems if all(word in str(p).split() for word in options.match)]
    if options.list:
        print("\n".join(options_of(problem) for problem in problems))
        return 0
    document = head(options, detect())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.exists():
        if not options.append:
            print(f"{options.out} exists. Say --append, or remove it.", file=sys.stderr)
            return 1
        try:
            document = continued(json.loads(options.out.read_text("utf-8")), document)
        except ValueError as why:
            print(f"{options.out} can't be continued: {why}.", file=sys.stderr)
            return 1
    measure(problems, document, options)
    print(json.dumps(document["summary"]))
    return 1 if document["failed"] else 0


def _line(row: Plain) -> str:
    times = row["times_best_peer"]
    told = "no peer or no kernel" if times is None else f"{times[0]:.3f}x by {row['best_peer']}"
    us = row["kernel_us"].get(KERNEL)
    return f"{row['problem']['text']}: {us} us, {told}, {row['seconds']} s"


def _medians(timings: Mapping[str, Timing]) -> Plain:
    return {name: _short(timing.median_us) for name, timing in timings.items()}


def _samples(timings: Mapping[str, Timing]) -> Plain:
    return {name: list(timing.samples_us) for name, timing in timings.items()}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Race fagen's kernels over a grid.")
    parser.add_argument("--grid", action="append", choices=GRIDS, required=True)
    parser.add_argument("--direction", choices=PEERS, default="forward", help="[default: forward]")
    parser.add_argument("--match", action="append", default=[], help="a word of the shape: D128")
    parser.add_argument("--db", help="of the winners [default: the user's]")
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--append", action="store_true", help="keep the cells that it has")
    parser.add_argument("--peers", help="as in fagen bench")
    parser.add_argument("--fa4", action="store_true", help="FlashAttention-4 too")
    parser.add_argument("--commit", help="where git can't tell it")
    parser.add_argument("--clean", choices=("yes", "no"), help="its tree, with --commit")
    parser.add_argument("--list", action="store_true", help="print the cells, measure nothing")
    options = parser.parse_args(words)
    if options.out is None and not options.list:
        parser.error("say --out FILE")
    asked = options.peers.split(",") if options.peers else PEERS[options.direction]
    named = [*asked, *(["fa4"] if options.fa4 else [])]
    try:
        options.peers = backends_named(named)
    except FagenError as error:
        parser.error(str(error))
    options.words = without_folders(words, FILES)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
