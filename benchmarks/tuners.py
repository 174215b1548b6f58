"""Three tuners on one shape, each from a cold start; what they chose is then raced together.

python benchmarks/tuners.py --out benchmarks/results/h200_tuners_full.json

fagen             `fagen tune` with its defaults, into an empty database, and with nothing shipped
triton            triton.autotune over fagen's own list of valid configs of its portable family
                  `flash`: tile sizes, warps and stages, all other knobs as in its default
triton-maxnreg    the same, with the register caps of that list, which triton.Config can have too
helion            Helion's quick effort on attention written in Helion (tuners_helion.py)

Each tuner is a process of its own, with empty caches and a deadline; then each kernel is held
against the fp64 truth in another (tuners_race.py), and those that are right are raced in turns,
with torch's backends. A step that fails is in the result with its reason, and the others go on.
The file is written after every step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from publish import ROOT, made, without_folders
from steps import Ended, bare, end_on_sigterm, run_step, workplace, write

from fagen.config import Config
from fagen.errors import FagenError
from fagen.generate.descriptors import block_shape
from fagen.generate.program import Program, below_header
from fagen.generate.render import render
from fagen.generate.space import SearchSpace
from fagen.judge.peers import backends_named
from fagen.problem import Problem, make_problem
from fagen.serve.inputs import options_of, words_of
from fagen.target import Target, detect, toolchain

SCHEMA = 1  # of the file; a field that changes its meaning raises it
TUNERS = {
    "fagen": "fagen tune, its defaults",
    "triton": "triton.autotune over fagen's list of family flash: tiles, warps, stages",
    "triton-maxnreg": "the same, with the register caps of the list",
    "helion": "Helion, autotune_effort=quick",
}
PEERS = "cudnn,flash"
PORTABLE, KERNEL = "flash", "attention"
# What triton.Config can say of a knob, by its name in the kernel or among Triton's options.
TILES = {"block_m": "BLOCK_M", "block_n": "BLOCK_N"}
OPTIONS = {"num_warps": "num_warps", "num_stages": "num_stages"}
CAP = {"max_registers": "maxnreg"}
# Helion takes a budget of its own: it must end by itself before the deadline kills it, and what
# compiles when the budget is over is still waited for.
HELION_SHARE = 0.75
# Every tuner's files are read from the disk once before, and the device is started: the first
# would pay for all.
WARM = """
import contextlib, torch, triton
for name in ("fagen.tune.tuner", "optuna", "sqlalchemy", "helion", "sklearn.ensemble"):
    with contextlib.suppress(ImportError):
        __import__(name)
torch.zeros(1, device="cuda")
print("{}")
"""

Plain = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What all steps share. `chosen` fills as tuners end."""

    problem: Problem
    target: Target
    work: Path
    deadline_s: float
    peers: Sequence[str] = ()
    chosen: Plain = field(default_factory=dict)

    @property
    def database(self) -> Path:
        return self.work / "fagen" / "fagen.db"

    @property
    def causal(self) -> bool:
        return self.problem.features.causal != "none"


# --- fagen's list as triton.autotune takes it ---


def portable(problem: Problem, target: Target, folder: Path, *, capped: bool) -> Plain:
    """The job of tuners_triton.py: writes the kernel's module into the folder.

    The kernel is what family `flash` emits, with the tile sizes as arguments without a default.
    """
    space = SearchSpace.of(problem, target)
    default = next((config for config in space.seeds if config.family == PORTABLE), None)
    if default is None:
        raise ValueError(f"Family {PORTABLE} has no config for {problem}.")
    free = TILES | OPTIONS | (CAP if capped else {})
    configs = [config for config in space.configs if _differs_only_in(free, config, default)]
    programs = [render(problem, config, toolchain().triton_minor) for config in configs]
    path = folder / "portable.py"
    path.write_text(one_kernel(programs), encoding="utf-8")
    (entry,) = programs[0].entries
    s = problem.shape
    return {
        "module": str(path),
        "kernel": KERNEL,
        "args": [arg.name for arg in entry.args],
        "columns": {
            arg.name: block_shape(arg.type)[-1]
            for arg in entry.args
            if arg.type.startswith("tensordesc")
        },
        "configs": [
            {word: getattr(config.knobs, knob) for knob, word in free.items()}
            for config in configs
        ],
        "held": {
            one.name: getattr(default.knobs, one.name)
            for one in fields(default.knobs)
            if one.name not in free
        },
        "shape": {
            "batch": s.batch,
            "heads": s.heads_q,
            "seq": s.seq_q,
            "head_dim": s.head_dim,
            "dtype": s.dtype,
        },
    }


def one_kernel(programs: Sequence[Program]) -> str:
    """The module that all of them are, but for tile sizes. ValueError where that is not so."""
    texts = Counter(map(_without_tile, programs))
    if len(texts) != 1:
        raise ValueError(f"{len(programs)} configs have {len(texts)} kernels, not one.")
    return next(iter(texts))


def _without_tile(program: Program) -> str:
    text = below_header(program.source).lstrip("\n")
    for knob, word in TILES.items():
        value = getattr(program.config.knobs, knob)
        text = _replaced(text, f"{word}: tl.constexpr = {value},", f"{word}: tl.constexpr,")
    text, count = re.subn(r"^# launch .*\n", "", text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{program.name} names its launch {count} times, not once.")
    return _replaced(text, f"def {program.name}(", f"def {KERNEL}(")


def _replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(f"The kernel has {old!r} {text.count(old)} times, not once.")
    return text.replace(old, new)


def _differs_only_in(free: Mapping[str, str], config: Config, default: Config) -> bool:
    return config.family == default.family and all(
        getattr(config.knobs, one.name) == getattr(default.knobs, one.name)
        for one in fields(default.knobs)
        if one.name not in free
    )


# --- steps ---


def job_file(bench: Bench, folder: Path, **more: Any) -> Path:
    """What a step is told."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    shared = {"words": words_of(bench.problem), "causal": bench.causal}
    path.write_text(json.dumps({**shared, **more}), encoding="utf-8")
    return path


def tuned(bench: Bench, name: str) -> Plain:
    """A tuner's row, before its kernel is checked and raced."""
    folder = bench.work / name
    folder.mkdir(parents=True)
    try:
        words, more = _command(bench, name, folder)
    except ValueError as error:
        return {"name": name, "tuner": TUNERS[name], "reason": str(error)}
    root = bare(bench.work) if name == "fagen" else ROOT  # what ships would be among the seeds
    ended = run_step(words, folder, bench.deadline_s, root)
    row: Plain = {"name": name, "tuner": TUNERS[name], "process_s": _short(ended.seconds), **more}
    if ended.answer is None:
        return row | {"reason": ended.reason}
    found = _of_fagen(ended) if name == "fagen" else dict(ended.answer)
    if found["config"] is None:
        return row | {"reason": "It found no kernel."}
    ready_at = found.pop("ready_at", None)
    ready = ended.seconds if ready_at is None else ready_at - ended.started_at
    return row | {"seconds": _short(ready), **found, "tuning_s": _short(found["tuning_s"])}


def _command(bench: Bench, name: str, folder: Path) -> tuple[list[str], Plain]:
    """What a tuner's process runs, and what its row says of what was asked."""
    here = Path(__file__).resolve().parent
    if name == "fagen":
        options = options_of(bench.problem).split()
        return [sys.executable, "-m", "fagen", "tune", *options, "--json", "--quiet"], {}
    if name == "helion":
        s = bench.problem.shape
        budget = int(HELION_SHARE * bench.deadline_s)
        shape = {"batch": s.batch, "heads": s.heads_q, "seq": s.seq_q, "head_dim": s.head_dim}
        path = job_file(bench, folder, shape={**shape, "dtype": s.dtype}, budget_s=budget)
        return [sys.executable, str(here / "tuners_helion.py"), str(path)], {}
    job = portable(bench.problem, bench.target, folder, capped=name == "triton-maxnreg")
    path = job_file(bench, folder, **job)
    words = [sys.executable, str(here / "tuners_triton.py"), str(path)]
    return words, {"listed": len(job["configs"]), "held": job["held"]}


def _of_fagen(ended: Ended) -> Plain:
    """`fagen tune --json` in the words of the others. What was only slower has not failed."""
    found = ended.answer
    assert found is not None
    failed = {name: n for name, n in found["counts"].items() if name not in ("ok", "slower")}
    return {
        "tuning_s": found["seconds"],
        "tried": found["tried"],
        "failed": sum(failed.values()),
        "config": found["winner"],
        "counts": found["counts"],
    }


def final_job(bench: Bench, folder: Path) -> Path:
    """The job of tuners_race.py."""
    jobs = {name: bench.work / name / "job.json" for name in bench.chosen if "triton" in name}
    return job_file(
        bench,
        folder,
        chosen=bench.chosen,
        db=str(bench.database),
        triton={name: json.loads(path.read_text("utf-8")) for name, path in jobs.items()},
        peers=list(bench.peers),
    )


def checked(bench: Bench, name: str) -> Plain:
    """The fields that the check adds to a row."""
    folder = bench.work / "final"
    script = str(Path(__file__).resolve().parent / "tuners_race.py")
    words = [sys.executable, script, str(final_job(bench, folder)), "check", name]
    ended = run_step(words, folder, bench.deadline_s)
    if ended.answer is None:
        return {"passed": False, "reason": f"Its check failed: {ended.reason}"}
    # An error that JSON has no number for is text.
    wrong = [
        one["name"]
        for one in ended.answer["checks"]
        if isinstance(one["error"], str) or one["error"] > one["budget"]
    ]
    reason = {"reason": f"Its result is wrong: {', '.join(wrong)}."} if wrong else {}
    return {**ended.answer, **reason}


def raced(bench: Bench, names: Sequence[str]) -> Ended:
    folder = bench.work / "final"
    script = str(Path(__file__).resolve().parent / "tuners_race.py")
    words = [sys.executable, script, str(final_job(bench, folder)), "race", *names]
    return run_step(words, folder, bench.deadline_s)


# --- the result ---


def measure(bench: Bench, names: Sequence[str], document: Plain, out: Path) -> None:
    """Every step, the file written after each."""
    warmed = run_step([sys.executable, "-c", WARM], bench.work / "warm", bench.deadline_s)
    print(f"imports: {warmed.seconds:.1f} s {warmed.reason}", flush=True)
    rows = document["tuners"]
    for name in names:
        row = tuned(bench, name)
        rows.append(row)
        if "config" in row:
            bench.chosen[name] = row["config"]
        print(_told(row), flush=True)
        write(out, document)
    for row in rows:
        if "config" in row:
            row |= checked(bench, row["name"])
            print(f"{row['name']}: {row.get('reason', 'right')}", flush=True)
            write(out, document)
    ended = raced(bench, [row["name"] for row in rows if row.get("passed")])
    if ended.answer is None:
        document["race"] = {"reason": ended.reason}
    else:
        add_race(document, ended.answer)
    write(out, document)


def add_race(document: Plain, race: Plain) -> None:
    """Times into the tuners' rows; who is no tuner gets a row of its own."""
    times = dict(race["rows"])
    for row in document["tuners"]:
        name = row["name"]
        if name in times:
            row |= times.pop(name)
        elif name in race["missing"]:
            row["reason"] = f"Not timed: {race['missing'][name]}"
    named = {row["name"] for row in document["tuners"]}
    document["race"] = {
        "policy": race["policy"],
        "missing": {name: why for name, why in race["missing"].items() if name not in named},
    }
    document["peers"] = [{"name": name, **row} for name, row in times.items()]


def head(bench: Bench, options: argparse.Namespace) -> Plain:
    """All but the rows."""
    command = shlex.join(["python", "benchmarks/tuners.py", *options.words])
    clean = None if options.clean is None else options.clean == "yes"
    document = made(bench.target, command, options.commit, clean)
    document["versions"]["helion"] = _installed("helion")
    problem = bench.problem
    return {
        "schema": SCHEMA,
        **document,
        "problem": {"text": str(problem), **problem.to_dict(), "flops": problem.flops},
        "cores": len(os.sched_getaffinity(0)),
        "deadline_s": bench.deadline_s,
        "tuners": [],
        "peers": [],
        "race": {},
    }


def main(words: Sequence[str]) -> int:
    options = _options(words)
    for path in (options.out, options.work):
        if path is not None and path.exists():
            print(f"{path} exists. Remove it, or name another.", file=sys.stderr)
            return 1
    problem = make_problem(
        options.seq,
        options.head_dim,
        batch=options.batch,
        heads=options.heads,
        dtype=options.dtype,
        causal=options.causal,
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        target = detect()
    except FagenError as error:
        print(error, file=sys.stderr)
        return 1
    end_on_sigterm()
    with workplace(options.work) as work:
        bench = Bench(problem, target, work, options.deadline, options.peers)
        document = head(bench, options)
        measure(bench, options.tuners.split(","), document, options.out)
    for row in [*document["tuners"], *document["peers"]]:
        print(_told(row))
    return 1 if any("reason" in row for row in [*document["tuners"], document["race"]]) else 0


def _told(row: Plain) -> str:
    if "reason" in row:
        return f"{row['name']}: {row['reason']}"
    parts = [row["name"]]
    if "tried" in row:
        parts.append(f"{row['seconds']} s, {row['tried']} configs, {row['failed']} failed")
    if "tflops" in row:
        parts.append(f"{row['tflops']} TFLOP/s, {row['median_us']} us")
    return ": ".join(parts)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Race tuners, each from a cold start.")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--tuners", default=",".join(TUNERS), help=f"of {', '.join(TUNERS)}")
    parser.add_argument("--peers", default=PEERS, help="as in fagen bench")
    parser.add_argument("--deadline", type=float, default=180.0, help="seconds of each step")
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--work", type=Path, help="new folder for what steps write, kept")
    parser.add_argument("--commit", help="where git can't tell it")
    parser.add_argument("--clean", choices=("yes", "no"), help="its tree, with --commit")
    options = parser.parse_args(words)
    unknown = set(options.tuners.split(",")) - set(TUNERS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(TUNERS)}")
    try:
        options.peers = backends_named(options.peers.split(","))
    except FagenError as error:
        parser.error(str(error))
    options.words = without_folders(words, ("--out", "--work"))
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
