"""A tuner without compiler, GPU or database: times are a formula of the config.

Whole runs are then deterministic, and any failure can be planted at any candidate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from fagen.config import Config
from fagen.errors import WorkerDied
from fagen.generate.program import Program
from fagen.generate.space import SearchSpace
from fagen.outcome import Built, Check, KernelFacts, Outcome, Status, Timing, Verdict
from fagen.problem import Problem, make_problem
from fagen.target import Target, preset
from fagen.tune.events import Event
from fagen.tune.jobs import BuildReply, RaceReply, Tried
from fagen.tune.ledger import Budget
from fagen.tune.plan import Plan
from fagen.tune.result import Finale

PROBLEM = make_problem(1024, 128)
TARGET = preset("h200")
PASSED = Verdict((Check("o_max[ragged]", 0.001, 0.002),), "fake device")
FAILED = Verdict((Check("o_max[ragged]", 0.9, 0.002),), "fake device")


@dataclass(frozen=True)
class Policy:
    name: str = "fake timer"


@dataclass
class FakeClock:
    """Stands still but for what fakes add to it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def formula_us(config: Config) -> float:
    """A smooth bowl over flash's knobs; other families are slower."""
    k = config.knobs
    if config.family != "flash":
        return 900.0
    time = 100.0 + 0.2 * abs(k.block_m - 128) + 0.3 * abs(k.block_n - 64)
    time *= {1: 1.5, 2: 1.1, 3: 1.0, 4: 1.05}[k.num_stages]
    time *= 1.0 if k.loads == "tma" else 1.2
    time *= {"plain": 1.1, "rotate_s": 1.05, "rotate_p": 1.0}[k.loop]
    time *= {"split": 1.0, "every_tile": 1.08, "longest_first": 1.02}[k.mask]
    return time * (1.03 if k.rescale_tau else 1.0) * (1.0 if k.order == "tiles_first" else 1.04)


def wrong() -> Tried:
    return Tried(Status.WRONG_RESULT, "o_max[ragged]: error 0.9 over budget 0.002", FAILED)


def timed(*samples_us: float) -> Tried:
    return Tried(Status.OK, "", PASSED, Timing(samples_us, "fake timer"))


def render_fake(problem: Problem, config: Config) -> Program:
    """A program whose source is the config's text, so that each config has its own key."""
    return Program(
        problem, config, f"fake_{config.key}", f"# {config}\n", config.key, "digest", ()
    )


def built_fake(config: Config) -> Built:
    return Built("fake.py", (KernelFacts(f"fake_{config.key}", 65536, 128, 0),))


@dataclass
class FakeBuilder:
    """Builds at once. `fails`: what to answer, or to raise, instead of a Built."""

    fails: Callable[[Config], BuildReply | None] = lambda config: None
    size: int = 4
    submitted: list[Config] = field(default_factory=list)
    closed: bool = False

    def submit(self, program: Program) -> Future[BuildReply]:
        self.submitted.append(program.config)
        future: Future[BuildReply] = Future()
        reply = self.fails(program.config)
        future.set_result(reply or BuildReply(built_fake(program.config)))
        return future

    def close(self) -> None:
        self.closed = True


Behave = Callable[[Config], Tried | BaseException | None]


@dataclass
class FakeWorker:
    """Times by a formula. `behave`: another reply, or what to raise, for a config."""

    formula: Callable[[Config], float] = formula_us
    behave: Behave = lambda config: None
    clock: FakeClock = field(default_factory=FakeClock)
    seconds_each: float = 0.0
    peers: dict[str, float] = field(default_factory=lambda: {"flash (torch)": 150.0})
    refused: frozenset[Config] = frozenset()  # at finalist level
    race_dies: bool = False
    tried: list[Config] = field(default_factory=list)
    raced: list[list[Config]] = field(default_factory=list)
    prepared: int = 0
    closed: bool = False

    def prepare(self, problem: Problem, target: Target, policy: Any) -> None:
        self.prepared += 1

    def try_program(self, program: Program, seconds: float) -> Tried:
        self.tried.append(program.config)
        self.clock.now += min(self.seconds_each, seconds)
        if self.seconds_each > seconds:
            raise WorkerDied("killed at its deadline", timed_out=True)
        reply = self.behave(program.config)
        if isinstance(reply, BaseException):
            raise reply
        return reply or timed(*self.sample(program.config, 5))

    def sample(self, config: Config, count: int) -> list[float]:
        return [self.formula(config)] * count

    def race(self, programs: list[Program], rounds: int, seconds: float) -> RaceReply:
        self.raced.append([p.config for p in programs])
        rejected = {p.key: wrong() for p in programs if p.config in self.refused}
        if self.race_dies:
            return RaceReply(rejected=rejected, note="No race: the process died.")
        left = [p for p in programs if p.key not in rejected]
        taken: dict[str, list[float]] = {p.key: [] for p in left}
        for _ in range(rounds):
            for p in left:
                taken[p.key] += self.sample(p.config, 1)
        return RaceReply(
            {key: Timing(tuple(samples), "fake timer") for key, samples in taken.items()},
            {name: Timing((us,) * rounds, "fake timer") for name, us in self.peers.items()},
            {"cudnn (torch)": "not in this build"},
            rejected,
        )

    def close(self) -> None:
        self.closed = True


class NoisyWorker(FakeWorker):
    """5 % noise, a drift of 20 % over the run, and one sample in fifty ten times too long."""

    def __init__(self, formula: Callable[[Config], float], seed: int) -> None:
        super().__init__(formula)
        self._random = random.Random(seed)
        self._samples = 0

    def sample(self, config: Config, count: int) -> list[float]:
        return [self._one(config) for _ in range(count)]

    def _one(self, config: Config) -> float:
        self._samples += 1
        drift = 1 + 0.2 * min(1.0, self._samples / 120)
        outlier = 10.0 if self._random.random() < 0.02 else 1.0
        return self.formula(config) * drift * outlier * max(0.5, self._random.gauss(1, 0.05))


@dataclass
class FakeLedger:
    """Rows in lists, with the meaning of `tune.ledger.Ledger`."""

    rows: list[Outcome] = field(default_factory=list)
    winners: list[Config] = field(default_factory=list)
    near: list[Config] = field(default_factory=list)
    finished: list[tuple[Finale, bool]] = field(default_factory=list)
    runs: int = 0

    def history(self, policy: str) -> list[Outcome]:
        return list({row.config: row for row in self.rows}.values())

    def incumbent(self) -> Config | None:
        return self.winners[-1] if self.winners else None

    def neighbours(self) -> list[Config]:
        return self.near

    def begin(self, budget: Budget) -> int:
        self.runs += 1
        return self.runs

    def save(self, outcome: Outcome) -> int:
        self.rows.append(outcome)
        return len(self.rows)

    def reject(self, outcome: Outcome) -> None:
        self.save(outcome)

    def finish(self, finale: Finale, *, interrupted: bool) -> None:
        self.finished.append((finale, interrupted))
        self.winners += [f.outcome.config for f in finale.finals if f.chosen and f.outcome]


@dataclass
class FakeShop:
    """Everything a run needs; the parts stay at hand for assertions."""

    worker: FakeWorker = field(default_factory=FakeWorker)
    builder: FakeBuilder = field(default_factory=FakeBuilder)
    ledger: Any = field(default_factory=FakeLedger)
    events: list[Event] = field(default_factory=list)

    def plan(self, space: SearchSpace | None = None, **changes: Any) -> Plan:
        plan = Plan(
            problem=PROBLEM,
            target=TARGET,
            ledger=self.ledger,
            workers=(self.worker,),
            builder=self.builder,
            render=render_fake,
            policy=Policy(),
            timed=True,
            trials=24,
            timeout_s=1000.0,
            on_event=self.events.append,
            clock=self.worker.clock,
            started=self.worker.clock(),
            space=space or full_space(),
        )
        return replace(plan, **changes)


_FULL: list[SearchSpace] = []


def full_space() -> SearchSpace:
    """Every valid config of PROBLEM, made once."""
    if not _FULL:
        _FULL.append(SearchSpace.of(PROBLEM, TARGET))
    return _FULL[0]


def small_space(count: int) -> SearchSpace:
    """`count` valid configs spread over the whole space; the first is the default."""
    configs = full_space().configs
    chosen = [configs[i * len(configs) // count] for i in range(count)]
    return space_of(chosen)


def space_of(configs: Sequence[Config], seeds: Iterable[Config] = ()) -> SearchSpace:
    seeds = tuple(seeds) or tuple(configs[:1])
    return SearchSpace(PROBLEM, TARGET, tuple(configs), seeds, {})
