"""The tuner's side of its worker children: what survives when a candidate kills one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from fagen.errors import FagenError, WorkerDied
from fagen.generate.program import Program
from fagen.outcome import Status
from fagen.problem import Problem
from fagen.target import Target
from fagen.tune.children import Child, JobFailed, begun
from fagen.tune.jobs import (
    Confirm,
    InterpretJob,
    Prepare,
    Race,
    RaceReply,
    Renderer,
    Tried,
    TryProgram,
)

PREPARE_LIMIT_S = 60.0  # CUDA's start and the timed inputs
TRY_LIMIT_S = 30.0  # load, all checks and the timing: 1-3 s for a right and quick kernel
FIRST_LIMIT_S = 90.0  # the first candidate of a process waits for inputs and truths to be made
CONFIRM_LIMIT_S = 30.0
LEAST_RACE_S = 20.0  # 21 rounds of ten contestants take 5 s


class GpuWorker:
    """Programs on one GPU, in a child that is replaced whenever a candidate spoils it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._child = Child("gpu")
        self._prepare: Prepare | None = None
        self._prepared = 0  # the child's number when it was last prepared
        self._warm = 0  # the child's number when a candidate last came through

    def start(self) -> None:
        """Start the process; otherwise the first job does."""
        self._child.start()

    def prepare(self, problem: Problem, target: Target, policy: Any) -> None:
        wanted = Prepare(problem, target, policy, self._device)
        if wanted != self._prepare:
            self._prepare, self._prepared = wanted, 0
        self._ready()

    def try_program(self, program: Program, seconds: float) -> Tried:
        limit = TRY_LIMIT_S if self._warm == self._child.starts else FIRST_LIMIT_S
        tried = self._tried(TryProgram(program), min(limit, seconds))
        self._warm = self._child.starts
        return tried

    def race(self, programs: list[Program], rounds: int, seconds: float) -> RaceReply:
        """Who is still in the race at its end is checked as a finalist, or all where there was
        none. If one is refused, the others are checked, too, and those that are right race again:
        who left may have left for a wrong one."""
        until = time.monotonic() + seconds
        rejected: dict[str, Tried] = {}
        reply = self._raced(programs, rounds, until)
        first = stayed(programs, reply) or programs
        try:
            self._check(first, rejected)
            if rejected:
                self._check([p for p in programs if p not in first], rejected)
                right = [p for p in programs if p.key not in rejected]
                reply = self._raced(right, rounds, until)
        except FagenError as error:  # no process comes up any more
            reply = RaceReply(note=f"No race: {error}")
        return replace(reply, rejected={**reply.rejected, **rejected})

    def _raced(self, programs: list[Program], rounds: int, until: float) -> RaceReply:
        limit = max(LEAST_RACE_S, until - time.monotonic())
        try:
            reply: RaceReply = self._call(Race(tuple(programs), rounds, leaving=True), limit)
        except (FagenError, JobFailed) as error:
            return RaceReply(note=f"No race: {error}")
        return reply

    def _check(self, programs: list[Program], rejected: dict[str, Tried]) -> None:
        """As finalists; who is refused is added to `rejected`, also where another ends it all."""
        for program in programs:
            tried = self._confirmed(program)
            if tried.status != Status.OK:
                rejected[program.key] = tried

    def close(self) -> None:
        self._child.close()

    def check(self, program: Program, level: Literal["full", "finalist"], seconds: float) -> Tried:
        """Verify and don't time. Raises WorkerDied."""
        return self._tried(Confirm(program, level), seconds)

    def _confirmed(self, program: Program) -> Tried:
        try:
            return self.check(program, "finalist", CONFIRM_LIMIT_S)
        except WorkerDied as died:
            status = Status.TIMED_OUT if died.timed_out else Status.CRASHED
            return Tried(status, died.message)

    def _tried(self, job: TryProgram | Confirm, seconds: float) -> Tried:
        try:
            tried: Tried = self._call(job, seconds)
        except JobFailed as failed:
            return Tried(Status.CRASHED, str(failed))
        return tried

    def _call(self, job: Any, seconds: float) -> Any:
        self._ready()
        return self._child.call(job, seconds)

    def _ready(self) -> None:
        begun(self._prepare_child, "The GPU can't be used")

    def _prepare_child(self) -> None:
        """A new child knows nothing: give it the problem again."""
        self._child.start()
        if self._prepared == self._child.starts:
            return
        assert self._prepare is not None
        try:
            self._child.call(self._prepare, PREPARE_LIMIT_S)
        except JobFailed as failed:
            raise FagenError(f"The GPU can't be prepared for this shape: {failed}") from None
        self._prepared = self._child.starts


def stayed(programs: list[Program], reply: RaceReply) -> list[Program]:
    """Who was timed in every round of a race."""
    rounds = {key: len(timing.samples_us) for key, timing in reply.programs.items()}
    most = max(rounds.values(), default=0)
    return [p for p in programs if rounds.get(p.key) == most]


class InterpretWorker:
    """Programs in Triton's interpreter: in fp16 or fp32, as its bf16 products are wrong."""

    def __init__(self, render: Renderer) -> None:
        self._render = render
        self._child = Child("interpret")

    def start(self) -> None:
        """Start the process; otherwise the first job does."""
        self._child.start()

    def prepare(self, problem: Problem, target: Target, policy: Any) -> None:
        self._target = target
        self._problem = interpretable(problem)

    def try_program(self, program: Program, seconds: float) -> Tried:
        if not program.interpretable:
            return Tried(Status.PREDICTED, "unverified: Triton's interpreter does not run Gluon")
        twin = self._render(self._problem, program.config)
        begun(self._child.start, "Nothing can be verified")
        try:
            tried: Tried = self._child.call(InterpretJob(twin, self._target), seconds)
        except JobFailed as failed:
            return Tried(Status.PREDICTED, f"unverified, the interpreter can't run it: {failed}")
        return tried

    def race(self, programs: Sequence[Program], rounds: int, seconds: float) -> RaceReply:
        return RaceReply(note="Nothing was timed: there is no GPU.")

    def close(self) -> None:
        self._child.close()


def interpretable(problem: Problem) -> Problem:
    """The same problem in a dtype that the interpreter computes right."""
    if problem.shape.dtype != "bf16":
        return problem
    return replace(problem, shape=replace(problem.shape, dtype="fp16"))
