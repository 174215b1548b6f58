"""What the tuner finds on a GPU and in how long: from nothing, beside a neighbour, and repeated.

python benchmarks/searches.py --out benchmarks/results/h200_searches.json

Each cell begins with an empty database and empty caches, and with a copy of fagen with which
nothing ships: what ships for a shape and near it would be among its seeds. `fagen tune` with its
defaults tunes the cell's shape; then, into the same database, a neighbour of it with WARM_TRIALS
trials. A repeated cell is tuned again and again instead, each time from nothing and with another
seed. After that, in a process that tuned nothing, what the runs chose is checked and raced in
turns with the default and with the best configs known: of the measured space of that shape
(benchmarks/spaces), and the one that ships with fagen. The file is written after every cell, and a
cell in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from publish import ROOT, Plain, made, samples, times, without_folders
from steps import Ended, bare, end_on_sigterm, run_step, workplace, write

from fagen.config import Config
from fagen.errors import FagenError
from fagen.generate.families import config_from_dict
from fagen.generate.render import render
from fagen.judge.ratios import slowdown
from fagen.outcome import Status
from fagen.problem import Problem, make_problem, problem_from_dict
from fagen.records import shipped
from fagen.run.cuda import current_device
from fagen.serve.database import dataset
from fagen.serve.inputs import options_of
from fagen.target import detect, toolchain
from fagen.tune.jobs import Confirm, Prepare, Race

SCHEMA = 1  # of the file; a field that changes its meaning raises it
WARM_TRIALS = 12
REPEATS = 5
NEAR = " neighbour"  # at the end of a shape's name
KNOWN = 2  # configs of a measured space
ROUNDS = 21


@dataclass(frozen=True)
class Cell:
    """A shape to tune from nothing. neighbour: tuned after it; without one, it is repeated."""

    problem: Problem
    neighbour: Problem | None = None
    space: str = ""  # a file of benchmarks/spaces


CELLS = {
    "d128-full": Cell(
        make_problem(4096, 128, batch=4, heads=16),
        make_problem(8192, 128, batch=2, heads=16),
        "d128-full",
    ),
    "d128-causal": Cell(
        make_problem(4096, 128, batch=4, heads=16, causal=True),
        make_problem(8192, 128, batch=2, heads=16, causal=True),
        "d128-causal",
    ),
    "d64-full": Cell(
        make_problem(1024, 64, batch=16, heads=32),
        make_problem(2048, 64, batch=8, heads=32),
        "d64-full",
    ),
    "d256-causal": Cell(
        make_problem(2048, 256, batch=8, heads=8, causal=True),
        make_problem(4096, 256, batch=4, heads=8, causal=True),
        "d256-causal",
    ),
    "d96-causal": Cell(
        make_problem(4096, 96, batch=4, heads=16, causal=True),
        make_problem(2048, 96, batch=8, heads=16, causal=True),
        "d96-causal",
    ),
    "decode": Cell(
        make_problem(1, 128, seq_kv=8192, batch=16, heads=32, kv_heads=8),
        make_problem(1, 128, seq_kv=16384, batch=16, heads=32, kv_heads=8),
        "decode",
    ),
    "d64-causal repeated": Cell(
        make_problem(2048, 64, batch=8, heads=32, causal=True), space="d64-causal"
    ),
}


def known(problem: Problem, space: str) -> list[Config]:
    """The best known configs of a problem: of its measured space, and what ships with fagen."""
    found = [r.config for r in shipped(None, config_from_dict) if r.problem == problem]
    if space:
        rows = dataset(ROOT / f"benchmarks/spaces/{space}.jsonl.gz").rows
        right = sorted((r.true_us, r.config.key, r.config) for r in rows if r.right and r.true_us)
        found += [config for _, _, config in right[:KNOWN]]
    return list(dict.fromkeys(found))


# --- runs ---


@dataclass(frozen=True)
class Running:
    """What all cells share. root: the fagen that tunes."""

    work: Path
    root: Path
    deadline_s: float
    repeats: int


def tuned(problem: Problem, folder: Path, run: Running, *more: str) -> Plain:
    """A run of `fagen tune` in a process of its own, with what is in the folder already."""
    words = [*options_of(problem).split(), *more]
    command = [sys.executable, "-m", "fagen", "tune", *words, "--json", "--quiet"]
    ended = run_step(command, folder, run.deadline_s, run.root)
    return {"command": shlex.join(["fagen", "tune", *words]), **_of_run(ended)}


def _of_run(ended: Ended) -> Plain:
    row: Plain = {"process_s": _short(ended.seconds)}
    if ended.answer is None:
        return row | {"reason": ended.reason}
    if "winner" not in ended.answer or "seconds" not in ended.answer:
        return row | {"reason": "Its answer is none of fagen tune."}
    kept = ("tried", "counts", "state", "winner", "winner_us", "default", "default_us")
    return {**row, "tuning_s": _short(ended.answer["seconds"])} | {
        name: ended.answer[name] for name in kept
    }


def measured(name: str, cell: Cell, run: Running) -> list[Plain]:
    """The shapes of a cell, each with its runs and their race."""
    folder, limit = run.work / name.replace(" ", "-"), run.deadline_s
    best = known(cell.problem, cell.space)
    if cell.neighbour is None:
        runs = [
            tuned(cell.problem, folder / str(seed), run, "--seed", str(seed))
            for seed in range(run.repeats)
        ]
        return [_shape(name, "repeated", cell.problem, runs, best, folder, limit)]
    cold = tuned(cell.problem, folder, run)
    warm = tuned(cell.neighbour, folder, run, "--trials", str(WARM_TRIALS))
    near = list(dict.fromkeys([*known(cell.neighbour, ""), *best]))
    return [
        _shape(name, "cold", cell.problem, [cold], best, folder, limit),
        _shape(name + NEAR, "warm", cell.neighbour, [warm], near, folder, limit),
    ]


def _shape(
    name: str,
    start: str,
    problem: Problem,
    runs: list[Plain],
    best: Sequence[Config],
    folder: Path,
    deadline_s: float,
) -> Plain:
    row: Plain = {"name": name, "start": start, "problem": problem.to_dict(), "runs": runs}
    entrants = [config.to_dict() for config in best]
    entrants += [run[word] for run in runs for word in ("winner", "default") if run.get(word)]
    job = folder / "job.json"
    job.parent.mkdir(parents=True, exist_ok=True)
    job.write_text(json.dumps({"problem": problem.to_dict(), "configs": entrants}), "utf-8")
    words = [sys.executable, str(Path(__file__).resolve()), "--race", str(job)]
    ended = run_step(words, folder, deadline_s)
    if ended.answer is None:
        return row | {"reason": f"No race: {ended.reason}"}
    row["race"] = ended.answer
    for run in runs:
        raced = _raced(ended.answer, run.get("winner"))
        run["share"] = None if raced is None else raced["share"]
    default = _raced(ended.answer, runs[0].get("default"))
    return row | {"default_share": None if default is None else default["share"]}


def _raced(race: Plain, config: Plain | None) -> Plain | None:
    return next((row for row in race["rows"] if config in row["configs"]), None)


# --- the race, in a process of its own ---


def race(job: Plain) -> Plain:
    """Each source once. share: the time of the fastest over this one's, of same rounds."""
    from fagen.judge.measure import MeasurePolicy
    from fagen.tune.worker import Bench

    problem, here = problem_from_dict(job["problem"]), detect()
    programs, rejected = {}, {}
    for plain in job["configs"]:
        program = render(problem, config_from_dict(plain), toolchain().triton_minor)
        programs.setdefault(program.key, (program, []))[1].append(plain)
    bench, policy = Bench(), MeasurePolicy()
    bench.prepare(Prepare(problem, here, policy, f"cuda:{current_device()()}"))
    for key, (program, _) in programs.items():
        tried = bench.confirm(Confirm(program, "full"))
        if tried.status is not Status.OK:
            rejected[key] = f"{tried.status.value}: {tried.reason}"
    entrants = tuple(program for key, (program, _) in programs.items() if key not in rejected)
    reply = bench.race(Race(entrants, ROUNDS, leaving=True))
    if not reply.programs:
        raise SystemExit(f"No config can be raced: {rejected or reply.rejected}.")
    stayed = max(len(timing.samples_us) for timing in reply.programs.values())
    whole = [t for t in reply.programs.values() if len(t.samples_us) == stayed]
    fastest = min(whole, key=lambda timing: timing.median_us)
    rows: list[Plain] = [
        {
            "configs": _distinct(programs[key][1]),
            "share": _short(1 / slowdown(timing.samples_us, fastest.samples_us)),
            **times(timing, problem),
            **samples(timing),
        }
        for key, timing in reply.programs.items()
    ]
    peers = {name: {**times(t, problem), **samples(t)} for name, t in reply.peers.items()}
    refused = [{"configs": programs[key][1], "reason": why} for key, why in rejected.items()]
    return {
        "policy": policy.name,
        "rounds": ROUNDS,
        "rows": sorted(rows, key=lambda row: -row["share"]),
        "peers": peers,
        "rejected": refused,
    }


def _distinct(plains: Sequence[Plain]) -> list[Plain]:
    return [plain for i, plain in enumerate(plains) if plain not in plains[:i]]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _told(shape: Plain) -> str:
    parts = [f"{shape['name']}: {shape['start']}"]
    for run in shape["runs"]:
        spent = f"{run['process_s']:.1f} s"
        if "reason" in run:
            parts.append(f"{spent}, {run['reason']}")
        else:
            share = run.get("share")
            parts.append(f"{spent}, {run['tried']} tried, share {share}")
    return "; ".join([*parts, *([shape["reason"]] if "reason" in shape else [])])


def main(words: Sequence[str]) -> int:
    options = _options(words)
    if options.race is not None:
        answer_to, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
        print(json.dumps(race(json.loads(options.race.read_text("utf-8")))), file=answer_to)
        return 0
    try:
        target = detect()
    except FagenError as error:
        print(error, file=sys.stderr)
        return 1
    command = shlex.join(["python", "benchmarks/searches.py", *options.words])
    clean = None if options.clean is None else options.clean == "yes"
    document = {"schema": SCHEMA, **made(target, command, options.commit, clean), "shapes": []}
    try:
        document["shapes"] = begun(options.out, document)
        write(options.out, document)
    except (OSError, ValueError) as error:
        print(f"{options.out}: {error}", file=sys.stderr)
        return 1
    done = {shape["name"] for shape in document["shapes"]}
    end_on_sigterm()
    with workplace(options.work) as work:
        run = Running(work, bare(work), options.deadline, options.repeats)
        for name in options.cell or CELLS:
            if name in done:
                continue
            shapes = measured(name, CELLS[name], run)
            document["shapes"] += shapes
            write(options.out, document)
            print("\n".join(map(_told, shapes)), flush=True)
    return 1 if any(_unfinished(shape) for shape in document["shapes"]) else 0


def begun(out: Path, now: Plain) -> list[Plain]:
    """The shapes that a file has already, those that came to nothing left out.

    Raises ValueError for one that was made elsewhere, or is no such file.
    """
    if not out.exists():
        return []
    found = json.loads(out.read_text("utf-8"))
    if not isinstance(found, dict) or not isinstance(found.get("shapes"), list):
        raise ValueError("is no result of searches.py; name another.")
    for field in ("schema", "device", "versions", "commit"):
        if found.get(field) != now[field]:
            raise ValueError(f"has another {field}: {found.get(field)}, not {now[field]}.")
    failed = {shape["name"].removesuffix(NEAR) for shape in found["shapes"] if _unfinished(shape)}
    return [s for s in found["shapes"] if s["name"].removesuffix(NEAR) not in failed]


def _unfinished(shape: dict[str, Any]) -> bool:
    return "reason" in shape or any("reason" in run for run in shape["runs"])


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tune shapes from nothing, and race the winners.")
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--cell", choices=CELLS, action="append", help="one or more of them")
    parser.add_argument("--repeats", type=_count, default=REPEATS, help="of a repeated cell")
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds of each step")
    parser.add_argument("--work", type=Path, help="new folder for what steps write, kept")
    parser.add_argument("--commit", help="where git can't tell it")
    parser.add_argument("--clean", choices=("yes", "no"), help="its tree, with --commit")
    parser.add_argument("--race", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.out is None and options.race is None:
        parser.error("--out is needed")
    options.words = without_folders(words, ("--out", "--work"))
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
