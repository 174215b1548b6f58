"""Writes one tuning run of a database as a result file of benchmarks/results.

python benchmarks/publish.py --db runs.db --run 1 --out benchmarks/results/NAME.json \\
    --command "fagen tune --seq 8192 --head-dim 128"

The same database, run and options give the same bytes. What the run did not record is asked of
the machine that publishes only where that is the machine of the run, and is null otherwise.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import fagen
from fagen import target as targets
from fagen.config import Config
from fagen.errors import FagenError
from fagen.generate.families import config_from_dict
from fagen.generate.render import render
from fagen.generate.space import SearchSpace
from fagen.judge.measure import MeasurePolicy
from fagen.outcome import Check, Timing, Verdict
from fagen.problem import Problem
from fagen.records import Final, Record, Records, Run
from fagen.target import Target, Toolchain

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = 1  # of the file; a field that changes its meaning raises it
CUDNN, FLASH = "sdpa-cudnn", "sdpa-flash"
LEAST_ROWS = 3  # for a rank correlation

Plain = dict[str, Any]


def document(
    run: Run, records: Sequence[Record], finals: Sequence[Final], given: Plain, machine: Plain
) -> Plain:
    """The result file. given: command, commit, cold_start_s; machine: driver and CUDA."""
    timed = sorted(
        (r for r in records if r.outcome.timing is not None and r.run_id == run.run_id),
        key=lambda r: r.trial_id,
    )
    seconds = None if run.ended is None else (run.ended - run.started).total_seconds()
    return {
        "schema": SCHEMA,
        "date": run.started.astimezone(UTC).isoformat(timespec="seconds"),
        "command": given["command"],
        "seed": run.plan.seed,
        "commit": {**given["commit"], "sources": sources(timed)},
        "device": {**run.target.to_dict(), "driver": machine["driver"]},
        "software": {
            "torch": torch_named(finals) or run.toolchain.torch or None,
            "triton": run.toolchain.triton,
            "ptxas": run.toolchain.ptxas,
            "cuda": machine["cuda"],
            "driver_and_cuda": machine["how"],
        },
        "problem": {
            "text": str(run.problem),
            **run.problem.to_dict(),
            "flops": run.problem.flops,
            "least_bytes": run.problem.io_bytes,
        },
        "policy": policy(run, finals, timed),
        "run": {
            "id": run.run_id,
            "state": run.state,
            "strategy": run.plan.strategy,
            "trials": run.plan.trials,
            "timeout_s": run.plan.timeout_s,
            "seconds": _short(seconds),
            "cold_start_s": given["cold_start_s"],
            "outcomes": dict(sorted(run.counts.items())),
        },
        "race": race_rows(run, records, finals),
        "knobs_timed": knobs_timed(timed),
        "timed_rows": [timed_row(record) for record in timed],
        "not_timed": [
            {"config": str(r.config), "status": r.status.value, "reason": r.outcome.reason}
            for r in sorted(records, key=lambda r: r.trial_id)
            if r.outcome.timing is None and r.run_id == run.run_id
        ],
        "model": model(timed, next((f.name for f in finals if f.chosen), None)),
    }


def race_rows(run: Run, records: Iterable[Record], finals: Sequence[Final]) -> list[Plain]:
    """Programs and peers, fastest first. Sample i of rows that stayed was taken in round i."""
    by_source = {record.program_key: record for record in records}
    space = SearchSpace.of(run.problem, run.target)
    default = (space.seeds or space.configs)[0]
    cudnn, flash = median_of(finals, CUDNN), median_of(finals, FLASH)
    rows = []
    for final in finals:
        record = by_source.get(final.name) if final.kind == "program" else None
        row: Plain = {"kind": _kind(final, record, default), "name": final.name}
        if final.timing is None:
            rows.append({**row, "reason": final.reason})
            continue
        median_us = final.timing.median_us
        row |= times(final.timing, run.problem)
        row["speed_to_cudnn"] = None if cudnn is None else _short(cudnn / median_us)
        row["speed_to_flash"] = None if flash is None else _short(flash / median_us)
        if record is not None:
            row["name"] = str(record.config)
            row |= {"source": record.program_key, "template": record.outcome.template_digest}
            row |= {"config": record.config.to_dict(), "verdict": verdict(record.verdict)}
        rows.append(row | samples(final.timing))
    return rows


def knobs_timed(timed: Iterable[Record]) -> Plain:
    """For each family how many configs were timed, and which values of each knob."""
    seen: dict[str, dict[str, set[Any]]] = {}
    counts: Counter[str] = Counter()
    for record in timed:
        family = record.config.family
        counts[family] += 1
        for knob, value in record.config.to_dict()["knobs"].items():
            seen.setdefault(family, {}).setdefault(knob, set()).add(value)
    return {
        family: {"configs": counts[family]} | {knob: sorted(seen[family][knob]) for knob in knobs}
        for family, knobs in sorted(seen.items())
    }


def timed_row(record: Record) -> Plain:
    """A trial's single pass, not interleaved with any other: it ranks, it does not decide."""
    outcome, timing = record.outcome, record.outcome.timing
    assert timing is not None
    worst = None if outcome.verdict is None else outcome.verdict.worst
    built = outcome.built
    return {
        "trial": record.trial_id,
        "config": str(record.config),
        "source": record.program_key,
        "predicted_us": _short(record.predicted_us),
        "median_us": _short(timing.median_us),
        "status": record.status.value,
        "worst_check": None if worst is None else check(worst),
        "registers": None if built is None else built.registers,
        "shared_bytes": None if built is None else built.shared_bytes,
        "spill_bytes": None if built is None else built.spill_bytes,
        **samples(timing),
    }


def policy(run: Run, finals: Iterable[Final], timed: Iterable[Record]) -> Plain:
    """How times were taken. ValueError where rows were not all timed alike."""
    race = [f.timing for f in finals if f.timing is not None]
    names = {timing.policy for timing in race}
    names |= {r.outcome.timing.policy for r in timed if r.outcome.timing is not None}
    if names - {run.plan.policy}:
        raise ValueError(f"Rows of one run were timed by {sorted(names | {run.plan.policy})}.")
    found = policy_named(run.plan.policy)
    return {
        "name": run.plan.policy,
        "same_for_programs_and_peers": True,
        "l2": None if found is None else found.l2,
        "input_sets": found and found.input_sets(run.problem, run.target.l2_bytes),
        "warmup_ms": None if found is None else found.warmup_ms,
        "batch_ms": None if found is None else found.batch_ms,
        "samples": None if found is None else found.samples,
        "pause_ms": None if found is None else found.pause_ms,
        "race_rounds": max((len(timing.samples_us) for timing in race), default=0),
        "exactness": run.plan.exactness,
    }


def policy_named(name: str) -> MeasurePolicy | None:
    """The inverse of `MeasurePolicy.name`; None for another kind of policy."""
    found = re.fullmatch(r"graph-(rotate|flush)-w([\d.]+)-b([\d.]+)-n(\d+)-p([\d.]+)", name)
    if found is None:
        return None
    l2: Literal["rotate", "flush"] = "rotate" if found[1] == "rotate" else "flush"
    return MeasurePolicy(l2, float(found[2]), float(found[3]), int(found[4]), float(found[5]))


def model(timed: Sequence[Record], winner: str | None) -> Plain:
    """How well the predictions made before timing rank the single-pass medians.

    winner: the source that won the race. Its rank counts from 1; equal predictions share theirs.
    """
    rows = [
        (r.config.family, r.program_key, r.predicted_us, r.outcome.timing.median_us)
        for r in timed
        if r.predicted_us is not None and r.outcome.timing is not None
    ]
    predicted = [row[2] for row in rows]
    ranks = average_ranks(predicted)
    place = next((rank for rank, row in zip(ranks, rows, strict=True) if row[1] == winner), None)
    families = sorted({row[0] for row in rows})
    parts = {name: [row for row in rows if row[0] == name] for name in families}
    return {
        "rows": len(rows),
        "spearman": _spearman_of(rows),
        "spearman_by_family": {name: _spearman_of(part) for name, part in parts.items()},
        "winner_rank": place,
        "winner_rank_share": None if place is None else _short(place / len(rows)),
    }


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's rho with ties: Pearson's r of the average ranks (M. Kendall and J. D. Gibbons,
    "Rank Correlation Methods", 5th edition, 1990, chapters 1 and 3). NaN if all of one are equal.
    """
    middle = (len(xs) + 1) / 2
    a = [rank - middle for rank in average_ranks(xs)]
    b = [rank - middle for rank in average_ranks(ys)]
    scale = (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5
    return sum(x * y for x, y in zip(a, b, strict=True)) / scale if scale else float("nan")


def average_ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of the ranks that they take up."""
    ordered = sorted(values)
    first = {value: i for i, value in reversed(list(enumerate(ordered, 1)))}
    last = {value: i for i, value in enumerate(ordered, 1)}
    return [(first[value] + last[value]) / 2 for value in values]


def times(timing: Timing, problem: Problem) -> Plain:
    return {
        "median_us": _short(timing.median_us),
        "p20_us": _short(timing.p20_us),
        "p80_us": _short(timing.p80_us),
        "tflops": _short(problem.flops / timing.median_us / 1e6),
    }


def samples(timing: Timing) -> Plain:
    """As they were stored, in the order taken."""
    return {"samples_us": list(timing.samples_us), "clocks_mhz": list(timing.clock_mhz)}


def verdict(found: Verdict | None) -> Plain | None:
    if found is None:
        return None
    checks = [check(one) for one in found.checks]
    return {"passed": found.passed, "where": found.where, "checks": checks}


def check(one: Check) -> Plain:
    """Strict JSON has no number for an error that is NaN or infinite: they are text."""
    error = one.error if isfinite(one.error) else str(one.error)
    return {"name": one.name, "error": error, "budget": one.budget, "detail": one.detail}


def median_of(finals: Iterable[Final], peer: str) -> float | None:
    """The median of a peer by the start of its name; what follows are versions."""
    for final in finals:
        if final.kind == "peer" and final.name.split()[0] == peer and final.timing is not None:
            return final.timing.median_us
    return None


def torch_named(finals: Iterable[Final]) -> str | None:
    """torch with its build, "2.11.0+cu130", as the peers of the run are named."""
    for final in finals:
        if final.kind == "peer" and (found := re.search(r"\(torch (\S+)\)", final.name)):
            return found[1]
    return None


def sources(timed: Sequence[Record]) -> Plain:
    """How many of the run's sources this checkout still emits: what ties the run to a commit."""
    same = 0
    for record in timed:
        emitted = render(record.problem, record.config, record.toolchain.triton_minor)
        same += emitted.key == record.program_key
    return {"timed": len(timed), "emitted_alike_by_this_checkout": same}


def commit(root: Path, given: str | None, clean: bool | None) -> Plain:
    """The commit and whether the tree was clean, and who says so: a run records neither."""
    if given is not None:
        return {"id": given, "clean": clean, "how": "given by hand; the run records none"}
    # Result files are what is being written; they are no part of what ran.
    changed = _git(root, "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {
        "id": _git(root, "rev-parse", "HEAD"),
        "clean": None if changed is None else changed == "",
        "how": "asked of git when published; the run records none",
    }


def made(target: Target, command: str, given: str | None, clean: bool | None) -> Plain:
    """When, by what and on what a result file is made that is measured in this process."""
    tools, build = targets.toolchain(), targets.torch_build()
    here = machine(target, tools, None, None)
    return {
        "date": now(),
        "command": command,
        "commit": commit(ROOT, given, clean),
        "device": {**target.to_dict(), "driver": here["driver"]},
        "versions": {
            "fagen": fagen.__version__,
            "torch": build and build[0],
            "cuda": here["cuda"],
            "triton": tools.triton,
            "ptxas": tools.ptxas,
            "python": platform.python_version(),
        },
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def without_folders(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command line whose files are named alone: where they lie is nobody's business."""

    def shown(word: str, before: str) -> str:
        option, equals, value = word.rpartition("=")
        if before in options:
            return Path(word).name
        return option + equals + Path(value).name if option in options else word

    return [shown(word, before) for before, word in pairwise(["", *words])]


def machine(target: Target, toolchain: Toolchain, driver: str | None, cuda: str | None) -> Plain:
    """Driver and CUDA, which a run does not record."""
    if driver is not None or cuda is not None:
        return {"driver": driver, "cuda": cuda, "how": "given by hand"}
    try:
        here = targets.detect().device_key == target.device_key
        same = here and targets.toolchain().key == toolchain.key
    except FagenError:
        same = False
    if not same:
        return {"driver": None, "cuda": None, "how": "unknown: published on another machine"}
    build = targets.torch_build()
    return {
        "driver": toolchain.driver or _driver(),
        "cuda": None if build is None else build[1],
        "how": "asked when published, on a machine of the same device and toolchain",
    }


def text_of(value: Any, indent: int = 0) -> str:
    """Strict JSON, one space a level; lists of numbers stand on one line."""
    if isinstance(value, dict) and value:
        rows = [f"{json.dumps(k)}: {text_of(v, indent + 1)}" for k, v in value.items()]
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        rows = [text_of(one, indent + 1) for one in value]
    else:
        return json.dumps(value, allow_nan=False)
    left, right = "{}" if isinstance(value, dict) else "[]"
    start, end = "\n" + " " * (indent + 1), "\n" + " " * indent
    return left + start + ("," + start).join(rows) + end + right


def _kind(final: Final, record: Record | None, default: Config) -> str:
    if final.kind == "peer":
        return "peer"
    if final.chosen:
        return "winner"
    return "default" if record is not None and record.config == default else "finalist"


def _spearman_of(rows: Sequence[tuple[str, str, float, float]]) -> float | None:
    if len(rows) < LEAST_ROWS:
        return None
    rho = spearman([row[2] for row in rows], [row[3] for row in rows])
    return _short(rho) if isfinite(rho) else None


def _short(value: float | None) -> float | None:
    """Six digits: more than any time holds. Raw samples keep all of theirs."""
    return None if value is None else float(f"{value:.6g}")


def _git(root: Path, *words: str) -> str | None:
    return _said(["git", "-C", str(root), *words])


def _driver() -> str | None:
    said = _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return said.splitlines()[0] if said else None


def _said(words: list[str]) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Publish one tuning run as a result file.")
    parser.add_argument("--db", required=True)
    parser.add_argument("--run", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--command", required=True, help="what was typed to make the run")
    parser.add_argument("--commit", help="of the run, where it was made from another checkout")
    parser.add_argument("--clean", choices=("yes", "no"), help="its tree, with --commit")
    parser.add_argument("--driver", help="of the machine of the run")
    parser.add_argument("--cuda", help="that torch was built for there")
    parser.add_argument("--cold-start-s", type=float, help="the command's wall time, empty caches")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    options = _options(words)
    with Records.open(options.db, "read", config_from_dict) as database:
        runs = database.runs(run_id=options.run)
        if not runs:
            print(f"There is no run {options.run} in {options.db}.", file=sys.stderr)
            return 1
        run = runs[0]
        # A finalist may be a trial of an earlier run of the same problem.
        of_problem = database.trials(problem=run.problem)
        finals = database.finals(run.run_id)
    alike = [r for r in of_problem if r.device_key == run.target.device_key]
    records = [r for r in alike if r.toolchain_key == run.toolchain.key]
    records.sort(key=lambda r: (r.run_id == run.run_id, r.trial_id))
    clean = None if options.clean is None else options.clean == "yes"
    given = {
        "command": options.command,
        "commit": commit(ROOT, options.commit, clean),
        "cold_start_s": options.cold_start_s,
    }
    found = machine(run.target, run.toolchain, options.driver, options.cuda)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = text_of(document(run, records, finals, given, found)) + "\n"
    options.out.write_text(text, encoding="utf-8")
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
