"""Candidates on their way to an outcome: rendered and built ahead, tried in the order asked."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace

from fagen.config import Config
from fagen.errors import WorkerDied
from fagen.generate import lint
from fagen.generate.program import Program
from fagen.outcome import Outcome, Seconds, Status
from fagen.tune.jobs import BuildReply, Tried
from fagen.tune.plan import Plan
from fagen.tune.result import is_time
from fagen.tune.search import Search

# Asked for and not yet told: more would only make the search's knowledge older. A build takes 4 to
# 6 s of one core and a candidate 0.4 s of the GPU: with eight the GPU waited for half of the time
# (128 candidates in 80 s, 16 cores). The same on every machine, so that a seed gives one sequence.
AHEAD = 16
LEAST_TRY_S = 1.0  # with less time left than this no candidate is begun


@dataclass(frozen=True)
class _Candidate:
    config: Config
    program: Program | None  # None: not rendered, for the reason in `error`
    build: Future[BuildReply] | None  # None: the same source is known, or under way
    error: str = ""


class Pipeline:
    """`take` gives one outcome after the other, in a fixed order whatever the builds take.

    known: outcomes of earlier runs. A source that has an outcome is not tried again.
    """

    def __init__(self, plan: Plan, search: Search, known: list[Outcome]) -> None:
        self.exhausted = False
        self.time_up = False
        self._plan = plan
        self._search = search
        self._sources = {o.program_key: o for o in known if o.program_key}
        self._pending: deque[_Candidate] = deque()
        self._verified_us = min((_verified_us(o) for o in known), default=float("inf"))

    def fill(self, room: int) -> None:
        """Begin candidates: up to AHEAD and no more than `room` are under way."""
        while len(self._pending) < min(AHEAD, room) and not (self.exhausted or self.time_up):
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
        """The oldest candidate's outcome; None when the time was up before it had one."""
        outcome = self._outcome(self._pending.popleft())
        if outcome is None:
            self.time_up = True
        elif outcome.program_key:
            self._sources.setdefault(outcome.program_key, outcome)
        return outcome

    def _begun(self, config: Config) -> _Candidate:
        try:
            program = self._plan.render(self._plan.problem, config)
        except Exception as error:  # a template that can't take these knobs costs them alone
            return _Candidate(config, None, None, f"not rendered: {type(error).__name__}: {error}")
        under_way = {c.program.key for c in self._pending if c.program is not None}
        if program.key in self._sources or program.key in under_way:
            return _Candidate(config, program, None)
        return _Candidate(config, program, self._plan.builder.submit(program))

    def _outcome(self, candidate: _Candidate) -> Outcome | None:
        config, program = candidate.config, candidate.program
        if program is None:
            return Outcome(config, Status.BUILD_ERROR, candidate.error)
        twin = self._sources.get(program.key)
        if twin is not None:
            reason = twin.reason or f"same source as {twin.config}"
            return replace(twin, config=config, reason=reason, seconds=Seconds())
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
        return outcome if reply.built is None else self._tried(outcome, reply, program)

    def _built(self, candidate: _Candidate) -> BuildReply | None:
        assert candidate.build is not None  # a twin's outcome is known by the time of its turn
        try:
            return candidate.build.result(timeout=max(0.0, self._plan.seconds_left))
        except FutureTimeout:
            return None

    def _tried(self, outcome: Outcome, reply: BuildReply, program: Program) -> Outcome | None:
        plan, built = self._plan, reply.built
        assert built is not None
        outcome = replace(outcome, built=built, predicted_us=plan.predict(outcome.config, built))
        rejected = lint.why_rejected(built, plan.target)
        if rejected is not None:
            return replace(outcome, status=Status.LINT_REJECTED, reason=rejected)
        began = plan.clock()
        tried = self._worked(program) if plan.timed else self._interpreted(outcome, program)
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

    def _interpreted(self, outcome: Outcome, program: Program) -> Tried:
        assert outcome.predicted_us is not None
        # The interpreter takes 5-10 s for what the compiler does in 2: only what may win is asked.
        if outcome.predicted_us >= self._verified_us:
            return Tried(Status.PREDICTED, "not verified: not predicted faster than one that is")
        tried = self._worked(program) or Tried(Status.PREDICTED, "not verified: the time was up")
        checked = replace(outcome, status=tried.status, verdict=tried.verdict)
        self._verified_us = min(self._verified_us, _verified_us(checked))
        return tried

    def _worked(self, program: Program) -> Tried | None:
        left = self._plan.seconds_left
        if left < LEAST_TRY_S:
            return None
        try:
            tried = self._plan.worker.try_program(program, left)
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
