"""What the tuner and its children say to each other: static, picklable values, never tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from fagen.config import Config
from fagen.generate.program import Program
from fagen.outcome import Built, Status, Timing, Verdict
from fagen.problem import Problem
from fagen.target import Target


@dataclass(frozen=True)
class Prepare:
    """Make inputs, truth and baseline of a problem on a device. `policy` is a MeasurePolicy."""

    problem: Problem
    target: Target
    policy: Any
    device: str


@dataclass(frozen=True)
class TryProgram:
    """A first check, then the time; what is not clearly slower than others is verified."""

    program: Program


@dataclass(frozen=True)
class Confirm:
    """Verify without timing; at finalist level with repeated runs."""

    program: Program
    level: Literal["full", "finalist"] = "finalist"


@dataclass(frozen=True)
class Race:
    """Time programs and peers in interleaved rounds."""

    programs: tuple[Program, ...]
    rounds: int
    leaving: bool = False  # as in judge.measure.race


@dataclass(frozen=True)
class BuildJob:
    """Compile for a target."""

    program: Program
    target: Target


@dataclass(frozen=True)
class InterpretJob:
    """Run through Triton's interpreter at a shrunken shape."""

    program: Program
    target: Target


@dataclass(frozen=True)
class Tried:
    """What became of one program in a worker. time_s: of its seconds there, those of timing."""

    status: Status
    reason: str = ""
    verdict: Verdict | None = None
    timing: Timing | None = None
    time_s: float = 0.0


@dataclass(frozen=True)
class BuildReply:
    """Either `built`, or why not. seconds: wall time of one process."""

    built: Built | None
    status: Status = Status.OK
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class RaceReply:
    """Interleaved timings, of programs by key and of peers by name.

    missing: peers that can't run here, with the reason. rejected: programs, by key, that did not
    pass the gate's finalist level.
    """

    programs: dict[str, Timing] = field(default_factory=dict)
    peers: dict[str, Timing] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, Tried] = field(default_factory=dict)
    note: str = ""


class Worker(Protocol):
    """Runs candidates somewhere: on a GPU, in the interpreter, or in a test's imagination."""

    def prepare(self, problem: Problem, target: Target, policy: Any) -> None:
        """Raises a FagenError when nothing can run at all."""

    def try_program(self, program: Program, seconds: float) -> Tried:
        """Raises WorkerDied when the candidate took its process with it."""

    def race(self, programs: list[Program], rounds: int, seconds: float) -> RaceReply:
        """Never raises WorkerDied: what died is in `rejected`, or `note` says why no race."""

    def close(self) -> None:
        """Kill and forget."""


class Builder(Protocol):
    """Compiles ahead of the worker."""

    size: int  # how many at once

    def submit(self, program: Program) -> Any:
        """A Future of BuildReply."""

    def close(self) -> None:
        """Kill and forget."""


class Renderer(Protocol):
    """`generate.render.render`, or a test's own."""

    def __call__(self, problem: Problem, config: Config, /) -> Program: ...
