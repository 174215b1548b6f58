"""Candidates on their way to an outcome: rendered and built ahead, tried in the order asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from fagen.config import Config
from fagen.errors import WorkerDied
from fagen.generate import lint
from fagen.generate.program import Program
from fagen.outcome import Outcome, Seconds, Status
from fagen.tune.crew import Crew
from fagen.tune.jobs import BuildReply, Tried, Worker
from fagen.tune.plan import Plan
from fagen.tune.result import is_time

if TYPE_CHECKING:
    from fagen.tune.search import Search

# Asked for and not yet told: more would only make the search's knowledge older. A build takes 4 to
# 6 s of one core and a candidate 0.4 s of the GPU: with eight the GPU waited for half of the time
# (128 candidates in 80 s, 16 cores). For each device; the same on every machine, so that a seed
# gives one sequence.
AHEAD = 16
LEAST_TRY_S = 1.0  # with less time left than this no candidate is begun


@dataclass(frozen=True)
class _Candidate:
    config: Config
    program: Program | None  # None: not rendered, for the reason in `error`
    build: Future[BuildReply] | None  # None: the same source is known, or under way
    error: str = ""


class Pipeline:
    """`take` gives one outcome after the other: with one device in the order asked, whatever the
    builds take; with several as they come, so that a slow candidate holds up its own alone.

    known: outcomes of earlier runs. A source that has an outcome is not tried again.
    """

    def __init__(self, plan: Plan, search: Search, known: list[Outcome]) -> None:
        self.exhausted = False
        self.time_up = False
        self._plan = plan
        self._search = search
        self._sources = {o.program_key: o for o in known if o.program_key}
        self._pending: deque[_Candidate] = deque()
        self._crew = Crew(plan.workers)
        self._trying: dict[Config, Future[Outcome | None]] = {}
        self._verified_us = min((_verified_us(o) for o in known), default=float("inf"))

    def fill(self, room: int) -> None:
        """Begin candidates: up to AHEAD for each device and no more than `room` are under way."""
        most = min(AHEAD * self._crew.size, room)
        while len(self._pending) < most and not (self.exhausted or self.time_up):
            if self._plan.seconds_left < LEAST_TRY_S:
                self.time_up = True
                return
            config = self._search.ask()
            if config is None:
                self.exhausted = True
                return
            self._pending.append(self._begun(config))

    def __bool__(self) -> bool:
        return bool(self._pending)

    def take(self) -> Outcome | None:
        """The next outcome; None when the time was up before there was one."""
        for candidate in self._pending:
            if len(self._trying) == self._crew.size:
                break
            if candidate.build is not None and candidate.config not in self._trying:
                self._trying[candidate.config] = self._crew.begin(self._task(candidate))
        candidate = self._settled()
        self._pending.remove(candidate)
        trying = self._trying.pop(candidate.config, None)
        outcome = self._untried(candidate) if trying is None else trying.result()
        if outcome is None:
            self.time_up = True
        elif outcome.program_key:
            self._sources.setdefault(outcome.program_key, outcome)
        return outcome

    def _settled(self) -> _Candidate:
        """The oldest that has an outcome, once there is one."""
        while True:
            for candidate in islice(self._pending, 1 if self._crew.size == 1 else None):
                trying = self._trying.get(candidate.config)
                if trying.done() if trying is not None else self._is_known(candidate):
                    return candidate
            wait(self._trying.values(), return_when=FIRST_COMPLETED)

    def _is_known(self, candidate: _Candidate) -> bool:
        return candidate.program is None or candidate.program.key in self._sources

    def finished(self, wait_s: float) -> list[Outcome]:
        """When no more is taken: outcomes that other devices have, or have within wait_s."""
        done, _ = wait(self._trying.values(), timeout=wait_s)
        right = [f for f in self._trying.values() if f in done and f.exception() is None]
        return [outcome for f in right if (outcome := f.result()) is not None]

    def prepare(self) -> None:
        """Make inputs and truths on every device."""
        plan = self._plan
        self._crew.all(lambda worker: worker.prepare(plan.problem, plan.target, plan.policy))

    def close(self) -> None:
        self._crew.close()

    def _begun(self, config: Config) -> _Candidate:
        try:
            program = self._plan.render(self._plan.problem, config)
        except Exception as error:  # a template that can't take these knobs costs them alone
            return _Candidate(config, None, None, f"not rendered: {type(error).__name__}: {error}")
        under_way = {c.program.key for c in self._pending if c.program is not None}
        if program.key in self._sources or program.key in under_way:
            return _Candidate(config, program, None)
        return _Candidate(config, program, self._plan.builder.submit(program))

    def _untried(self, candidate: _Candidate) -> Outcome:
        """Of one that could not be rendered, or whose source another one has."""
        if candidate.program is None:
            return Outcome(candidate.config, Status.BUILD_ERROR, candidate.error)
        twin = self._sources[candidate.program.key]
        reason = twin.reason or f"same source as {twin.config}"
        return replace(twin, config=candidate.config, reason=reason, seconds=Seconds())

    def _task(self, candidate: _Candidate) -> Callable[[Worker], Outcome | None]:
        return lambda worker: self._outcome(candidate, worker)

    def _outcome(self, candidate: _Candidate, worker: Worker) -> Outcome | None:
        config, program = candidate.config, candidate.program
        assert program is not None
        reply = self._built(candidate)
        if reply is None:
            return None
        outcome = Outcome(
            config,
            reply.status,
            reply.reason,
            program.key,
            program.template_digest,
            seconds=Seconds(build=reply.seconds),
        )
        return outcome if reply.built is None else self._tried(outcome, reply, program, worker)

    def _built(self, candidate: _Candidate) -> BuildReply | None:
        assert candidate.build is not None
        try:
            return candidate.build.result(timeout=max(0.0, self._plan.seconds_left))
        except FutureTimeout:
            return None

    def _tried(
        self, outcome: Outcome, reply: BuildReply, program: Program, worker: Worker
    ) -> Outcome | None:
        plan, built = self._plan, reply.built
        assert built is not None
        outcome = replace(outcome, built=built, predicted_us=plan.predict(outcome.config, built))
        rejected = lint.why_rejected(built, plan.target)
        if rejected is not None:
            return replace(outcome, status=Status.LINT_REJECTED, reason=rejected)
        began = plan.clock()
        if plan.timed:
            tried = self._worked(program, worker)
        else:
            tried = self._interpreted(outcome, program, worker)
        if tried is None:
            return None
        took = plan.clock() - began
        return replace(
            outcome,
            status=tried.status,
            reason=tried.reason,
            verdict=tried.verdict,
            timing=tried.timing,
            seconds=Seconds(reply.seconds, took - tried.time_s, tried.time_s),
        )

    def _interpreted(self, outcome: Outcome, program: Program, worker: Worker) -> Tried:
        assert outcome.predicted_us is not None
        # The interpreter takes 5-10 s for what the compiler does in 2: only what may win is asked.
        if outcome.predicted_us >= self._verified_us:
            return Tried(Status.PREDICTED, "not verified: not predicted faster than one that is")
        tried = self._worked(program, worker) or Tried(
            Status.PREDICTED, "not verified: the time was up"
        )
        checked = replace(outcome, status=tried.status, verdict=tried.verdict)
        self._verified_us = min(self._verified_us, _verified_us(checked))
        return tried

    def _worked(self, program: Program, worker: Worker) -> Tried | None:
        left = self._plan.seconds_left
        if left < LEAST_TRY_S:
            return None
        try:
            tried = worker.try_program(program, left)
        except WorkerDied as died:
            if died.timed_out and self._plan.seconds_left <= 0:
                return None  # the run's own end, not the candidate's fault
            return Tried(Status.TIMED_OUT if died.timed_out else Status.CRASHED, died.message)
        return _checked(tried)


def _verified_us(outcome: Outcome) -> float:
    passed = outcome.verdict is not None and outcome.verdict.passed
    return outcome.predicted_us if passed and outcome.predicted_us else float("inf")


def _checked(tried: Tried) -> Tried:
    """A timing that is no time is a failure, not a fast kernel."""
    if tried.status not in (Status.OK, Status.SLOWER):
        return tried
    samples = tried.timing.samples_us if tried.timing is not None else ()
    if samples and all(is_time(sample) for sample in samples):
        return tried
    shown = ", ".join(str(sample) for sample in samples[:3]) or "none"
    return replace(tried, status=Status.CRASHED, reason=f"no usable time: {shown}", timing=None)
