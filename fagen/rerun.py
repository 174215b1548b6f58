"""What a script of `fagen repro` runs: builds its trial's source, checks it, times it.

Reads no database and no template. On a GPU all is done in this process, so that a debugger or
profiler that runs the script sees the kernel.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import fagen
from fagen import target as targets
from fagen.cli.output import emit, emit_table, note
from fagen.errors import BadSetting, FagenError, NoDevice, WorkerDied
from fagen.generate import lint
from fagen.generate.plain import program_from_dict
from fagen.generate.program import Program, source_key
from fagen.outcome import GATE, Built, Check, KernelFacts, Status, Timing, Verdict
from fagen.report.plain import Row, cell, check_line, shortened
from fagen.report.stored import facts_lines
from fagen.run.cuda import current_device
from fagen.target import Target, Toolchain
from fagen.tune.jobs import Confirm, Prepare, Race, Tried
from fagen.tune.proxies import InterpretWorker, interpretable
from fagen.tune.worker import Bench, failure

TIMEOUT_S = 60.0
ROUNDS = 11  # of the race with torch, as in `fagen bench`
LONGER = "A kernel that hangs ends so; for one that is slow say --timeout SECONDS."


@dataclass(frozen=True)
class Trial:
    """What the script holds. program: with the script's source, whether or not it was edited."""

    program: Program
    target: Target
    toolchain: Toolchain
    plain: dict[str, Any]

    @property
    def measured(self) -> dict[str, Any]:
        return dict(self.plain["measured"])


def main(plain: dict[str, Any], source: str, arguments: list[str] | None = None) -> int:
    """The exit code: 0 the kernel is right, 1 it is wrong, or is not built or does not end, 2 bad
    use. SystemExit from --help and for unknown arguments."""
    asked = _parser().parse_args(arguments)
    try:
        if os.environ.get("TRITON_INTERPRET") == "1":
            raise BadSetting(
                "Nothing is compiled while TRITON_INTERPRET is 1.",
                "Unset it: without a GPU, Triton's interpreter is started from here.",
            )
        return _run(_trial(plain, source), asked)
    except FagenError as error:
        return _ended(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _ended("Interrupted.", 130)
    except BrokenPipeError:  # the reader has had enough, as in `python script.py | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _ended(f"{error.strerror}.", 1)


def _ended(said: str, code: int) -> int:
    note(f"fagen: {said}")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Build, check and time one trial of fagen.",
        epilog="Exit codes: 0 the kernel is right; 1 it is wrong, or is not built or does not "
        "end; 2 bad use. Without a GPU nothing is timed.",
    )
    parser.add_argument(
        "--finalist",
        action="store_true",
        help="on a GPU, check as a finalist: repeated runs must be equal bit for bit, too",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="end the script when building, checking or timing takes longer than this, as it does "
        f"with a kernel that hangs [default: {TIMEOUT_S:g}]",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no time that can be waited for")
    return seconds


def _trial(plain: dict[str, Any], source: str) -> Trial:
    try:
        program = program_from_dict(plain["program"], source)
        key = source_key(source, program.name)
        # A module's file is found by its name, and this text may be edited, above its code too.
        edited = f"_edited_{key[:8]}" if key != program.key else "_rerun"
        program = replace(program, key=key, name=program.name + edited)
        target, tools = Target(**plain["target"]), Toolchain(**plain["toolchain"])
    except FagenError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadSetting(
            f"TRIAL or SOURCE is damaged: {type(error).__name__}: {error}.",
            "Write the script again with fagen repro.",
        ) from None
    return Trial(program, target, tools, plain)


def _run(trial: Trial, asked: argparse.Namespace) -> int:
    try:
        here, nowhere = targets.detect(), ""
    except NoDevice as error:
        here, nowhere = None, error.message
    _introduce(trial, here, nowhere)
    built = _built(trial, here or trial.target, asked.timeout)
    if built is None:
        return 1
    if here is None:
        return _interpreted(trial, asked.timeout)
    try:
        return _on_gpu(trial, here, asked.timeout, "finalist" if asked.finalist else "full")
    except FagenError:
        raise
    except RuntimeError as error:  # what CUDA says, by way of torch or Triton
        return _failed(failure(error))


def _introduce(trial: Trial, here: Target | None, nowhere: str) -> None:
    """What is tried where, beside where it was tried and what came of it then."""
    emit(f"Trial {trial.plain['trial_id']} of {trial.plain['created']}: {trial.program.problem}")
    emit(f"{trial.program.config}\n")
    emit_table(_versions(trial, here))
    emit("\n" + "\n".join([*_measured_lines(trial), *_warnings(trial)]))
    if here is None:
        emit(f"{nowhere} Nothing will be timed.")
    elif here.device_key != trial.target.device_key:
        emit("This is another device than then: times do not compare.")


def _versions(trial: Trial, here: Target | None) -> list[Row]:
    now, then = targets.toolchain(), trial.toolchain
    facts = (
        ("device", here, trial.target),
        ("triton", now.triton, then.triton),
        ("ptxas", now.ptxas, then.ptxas),
        ("torch", now.torch, then.torch),
        ("gate", GATE, trial.plain["gate"]),
        ("source", trial.program.key, trial.plain["tried_key"]),
        ("fagen", fagen.__version__, None),  # not stored
    )
    return [{"": name, "now": new or None, "then": old or None} for name, new, old in facts]


def _measured_lines(trial: Trial) -> Iterator[str]:
    measured = trial.measured
    time = f"{cell(measured['median_us'])} us" if measured["median_us"] else "not timed"
    yield f"Then: {measured['status']}, {time}"
    if measured["reason"]:
        yield f"  {shortened(measured['reason'])}"
    if measured["worst"] is not None:
        worst = check_line(_check(measured["worst"]))
        yield f"  worst check, on {measured['checked_on']}: {worst}"


def _check(plain: dict[str, Any]) -> Check:
    return Check(**{**plain, "error": float(plain["error"]), "budget": float(plain["budget"])})


def _warnings(trial: Trial) -> Iterator[str]:
    written = trial.plain["program"]["key"]
    if trial.program.key != written:
        yield "WARNING: the source was edited after the script was written."
    if written != trial.plain["tried_key"]:
        yield "WARNING: this is not the source that was tried; the script's first lines say why."


def _built(trial: Trial, target: Target, timeout_s: float) -> Built | None:
    """Compiled, and what the machine code shows; None when that failed."""
    from fagen.generate.build import BuildFailed, build  # imports Triton

    emit(f"\nBuilding for {target}.")
    try:
        with ended_after(timeout_s, "building"):
            built = build(trial.program, target)
    except BuildFailed as error:
        _failed(Tried(error.status, str(error)))
        return None
    emit("\n".join(facts_lines(built)))
    then = tuple(KernelFacts(**kernel) for kernel in trial.measured["kernels"])
    if then and then != built.kernels:
        emit("\n".join(["Then:", *facts_lines(replace(built, kernels=then))]))
    rejected = lint.why_rejected(built, target)
    if rejected is not None:
        emit(f"fagen tune would not time it: {rejected}")
    return built


def _on_gpu(
    trial: Trial, here: Target, timeout_s: float, level: Literal["full", "finalist"]
) -> int:
    """As the tuner's own child does it, with today's timing policy."""
    from fagen.judge.measure import MeasurePolicy, impossible

    policy, bench, program = MeasurePolicy(), Bench(), trial.program
    emit(f'\nChecking at level "{level}".')
    with ended_after(timeout_s, "checking"):
        bench.prepare(Prepare(program.problem, here, policy, _device()))
        tried = bench.confirm(Confirm(program, level))
    _show_checks(tried.verdict)
    if tried.status != Status.OK:
        return _failed(tried)
    emit(f"\nTiming by {policy.name}, in turns with the fused attention of others.")
    stored_by = trial.measured["policy"]
    if stored_by and stored_by != policy.name:
        emit(f"The stored time was taken by {stored_by}: the two do not compare.")
    with ended_after(timeout_s, "timing"):
        raced = bench.race(Race((program,), ROUNDS))
    if program.key not in raced.programs:
        return _failed(raced.rejected[program.key])
    timing = raced.programs[program.key]
    emit_table(_time_rows({"this kernel": timing, **raced.peers}, trial.measured["median_us"]))
    for name, why in raced.missing.items():
        emit(f"Not measured: {name}: {why}")
    doubt = impossible(program.problem, here, timing.median_us, policy)
    return 0 if doubt is None else _failed(Tried(Status.CRASHED, f"no usable time: {doubt}"))


def _device() -> str:
    return f"cuda:{current_device()()}"


def _time_rows(timings: dict[str, Timing], then_us: float | None) -> list[Row]:
    """then_us: the stored median of the first."""
    rows: list[Row] = []
    for name, timing in timings.items():
        then = None if rows else then_us
        rows.append(
            {
                "name": name,
                "median us": timing.median_us,
                "p20": timing.p20_us,
                "p80": timing.p80_us,
                "then us": then,
                "x then": timing.median_us / then if then else None,
            }
        )
    return rows


def _interpreted(trial: Trial, timeout_s: float) -> int:
    """What can be said of the numbers without a GPU, at the gate's quick level."""
    if not trial.program.interpretable:
        emit("\nNothing was run: there is no GPU, and Triton's interpreter does not run Gluon.")
        return 0
    twin = in_fp16(trial.program)
    emit(f"\nChecking in Triton's interpreter, on small shapes in {twin.problem.shape.dtype}.")
    worker = InterpretWorker(lambda _problem, _config: twin)
    try:
        worker.prepare(twin.problem, trial.target, None)
        tried = worker.try_program(twin, timeout_s)
    except WorkerDied as died:
        if died.timed_out:
            return _failed(Tried(Status.TIMED_OUT, f"{died.message} {LONGER}"))
        return _failed(Tried(Status.CRASHED, died.message))
    finally:
        worker.close()
    _show_checks(tried.verdict)
    if tried.status == Status.WRONG_RESULT:
        return _failed(tried)
    if tried.verdict is None:
        emit(f"Nothing was run: {tried.reason}")
    return 0


def in_fp16(program: Program) -> Program:
    """The same source with bf16 made fp16: the interpreter's bf16 products are wrong."""
    problem = interpretable(program.problem)
    if problem == program.problem:
        return program
    source = program.source.replace("tl.bfloat16", "tl.float16")
    entries = tuple(
        replace(e, args=tuple(replace(a, type=a.type.replace("bf16", "fp16")) for a in e.args))
        for e in program.entries
    )
    name = f"{program.name}_in_fp16"
    key = source_key(source, program.name)
    return replace(program, problem=problem, name=name, source=source, key=key, entries=entries)


def _show_checks(verdict: Verdict | None) -> None:
    """Each error beside its budget, the nearest to it or furthest over it first."""
    if verdict is None:
        return
    for check in sorted(verdict.checks, key=lambda check: check.share, reverse=True):
        emit(f"{check_line(check)} ({check.detail})")
    if verdict.passed:
        emit(f"Right on {verdict.where}.")


def _failed(tried: Tried) -> int:
    emit(f"{tried.status.value}: {tried.reason}")
    return 1


@contextmanager
def ended_after(seconds: float, doing: str) -> Iterator[None]:
    """End the process with code 1 when the block takes longer: a kernel that hangs keeps its
    caller in the driver, where no exception reaches it."""
    message = f"fagen: Ended after {seconds:g} s of {doing}. {LONGER}\n"

    def end() -> None:
        os.write(2, message.encode())
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
