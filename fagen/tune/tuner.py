"""From a problem to a verified kernel in the database: the main path, top to bottom."""

from __future__ import annotations

import contextlib
import operator
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from fagen import settings
from fagen.config import Config
from fagen.errors import (
    BadProblem,
    BadSetting,
    DatabaseError,
    Interrupted,
    NoValidConfig,
    TerminatedRun,
)
from fagen.generate.families import config_from_dict
from fagen.generate.render import render
from fagen.generate.space import SearchSpace, seeds_of, why_invalid
from fagen.outcome import Outcome, Status
from fagen.problem import Problem, make_problem
from fagen.target import Target, toolchain
from fagen.tune import events
from fagen.tune.effort import EFFORTS, Effort
from fagen.tune.finale import how_many, race
from fagen.tune.jobs import Builder, Renderer
from fagen.tune.pipeline import LEAST_TRY_S, Pipeline
from fagen.tune.place import place_of
from fagen.tune.plan import Plan
from fagen.tune.result import Finale, State, TuneResult, doubted, finalists, value_of
from fagen.tune.seeding import FROM_NEIGHBOURS, in_any_case, starting_points
from fagen.tune.signals import Terminated, shielded, terminable
from fagen.tune.staff import policy_of, staff

if TYPE_CHECKING:
    from fagen.tune.search import Search

LAST_WAIT_S = 1.0  # for what other devices are about to end when the time is up
MOST_SECONDS = 10**7  # a third of a year
MOST_SEED = 2**32 - 1  # the sampler's


def tune(  # noqa: PLR0913  (the words of the command line, each with its default)
    problem: Problem | None = None,
    *,
    target: Target | str | None = None,
    device: int | str | None = None,
    devices: Sequence[int | str] | None = None,
    effort: str = "normal",
    trials: int | None = None,
    timeout: float | None = None,
    seed: int = 0,
    db: str | None = None,
    on_event: events.OnEvent = events.ignore,
    **shape: Any,
) -> TuneResult:
    """Generate, verify and time kernels for a problem; every result is stored.

    The problem, or the keywords of `make_problem`: `tune(seq=8192, head_dim=128, causal=True)`.
    effort, "quick", "normal" or "full", is a number of trials and a timeout; either can be given.
    trials is the total for this problem and device, earlier runs included; timeout bounds this
    run's wall time. With several `devices`, which must be alike, candidates are shared out among
    them, and the finalists race on the first. With a `target`, or without a GPU, nothing is
    timed: candidates are compiled for it, verified in Triton's interpreter and ranked by a model.

    Raises NoValidConfig, Interrupted (what was measured is stored), DeviceBusy, NoTriton.
    """
    started = time.monotonic()
    asked = _problem(problem, shape)
    budget = _effort(effort)
    trials = budget.trials if trials is None else _whole("trials", trials, 0)
    seed = _whole("seed", seed, 0, MOST_SEED)
    if timeout is not None and not (
        isinstance(timeout, int | float) and 0 <= timeout <= MOST_SECONDS
    ):
        raise BadSetting(f"timeout must be 0 to {MOST_SECONDS} seconds, got {timeout!r}.")
    compiler = toolchain()
    place = place_of(target, device, devices)
    settings.kernel_dir()  # a folder that can't be written is no candidate's fault
    timed = place.device is not None
    usual = budget.timeout_s if timed else budget.offline_timeout_s
    seconds = usual if timeout is None else timeout
    renders = partial(render, triton_minor=compiler.triton_minor)
    from fagen.records import Records  # brings sqlalchemy
    from fagen.tune.ledger import Ledger

    with (
        Records.open(db, "write", config_from_dict) as records,
        staff(place, renders) as (workers, builder),
    ):
        ledger = Ledger(records, asked, place.target, compiler)
        # All while the children start, and before the GPU is ours alone.
        _build(builder, renders, asked, in_any_case(seeds_of(asked, place.target))[:trials])
        near = (c for c in ledger.neighbours() if not why_invalid(asked, place.target, c))
        _build(builder, renders, asked, islice(near, min(FROM_NEIGHBOURS, trials)))
        space = SearchSpace.of(asked, place.target)
        with place.held(seconds, on_event):
            return run(
                Plan(
                    problem=asked,
                    target=place.target,
                    space=space,
                    ledger=ledger,
                    workers=workers,
                    builder=builder,
                    render=renders,
                    policy=policy_of(place),
                    timed=timed,
                    trials=trials,
                    timeout_s=seconds,
                    seed=seed,
                    on_event=on_event,
                    started=started,
                )
            )


def _build(
    builder: Builder, renders: Renderer, problem: Problem, configs: Iterable[Config]
) -> None:
    """Begin what a run tries first: it is known 2 to 3 s before the whole space."""
    for config in configs:
        with contextlib.suppress(Exception):  # a config that does not render has a row of its own
            builder.submit(renders(problem, config))


def _problem(given: Problem | None, shape: dict[str, Any]) -> Problem:
    if given is None:
        return make_problem(**shape)
    if not isinstance(given, Problem):
        raise BadProblem(
            f"The problem must be a fagen.Problem, got {type(given).__name__}.",
            "Say fagen.tune(seq=8192, head_dim=128).",
        )
    if shape:
        raise BadProblem(f"A Problem is whole; {', '.join(shape)} can't be added.")
    return given


def _effort(name: str) -> Effort:
    if not isinstance(name, str) or name not in EFFORTS:
        raise BadSetting(f"effort must be {', '.join(EFFORTS)}, got {name!r}.")
    return EFFORTS[name]


def _whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise BadSetting(f"{name} must be a whole number, got {value!r}.") from None
    if number < least or (most is not None and number > most):
        span = f"at least {least}" if most is None else f"{least} to {most}"
        raise BadSetting(f"{name} must be {span}, got {number}.")
    return number


@dataclass
class _Run:
    """What a run has found so far. `done`: outcomes of this key, those of earlier runs first."""

    plan: Plan
    space: SearchSpace
    default: Config
    search: Search
    id: int = 0
    incumbent: Config | None = None
    done: list[Outcome] = field(default_factory=list)
    counts: Counter[Status] = field(default_factory=Counter)
    state: State = "finished"
    finale: Finale = field(default_factory=Finale)


def run(plan: Plan) -> TuneResult:
    """Search, race, choose, and store all of it. Raises NoValidConfig, Interrupted."""
    with terminable():
        this = _opened(plan)
        try:
            _try_candidates(this)
            _race_finalists(this)
            _look_again(this)
        except KeyboardInterrupt as stop:
            with shielded():
                plan.close()
                this.state = "interrupted"
                result = _closed(this)
            kind = TerminatedRun if isinstance(stop, Terminated) else Interrupted
            raise kind(_so_far(result), "Run the same again to go on.", result=result) from None
        except BaseException:
            with shielded():
                plan.close()
                this.state = "interrupted"
                _finish(this)
            raise
        with shielded():
            plan.close()
            result = _closed(this)
    if result.winner is None:
        step = (
            "Each one's reason: fagen db trials." if result.tried else "Give more time or trials."
        )
        raise NoValidConfig(_why_none(this), step)
    return result


def _opened(plan: Plan) -> _Run:
    """The space, what is known of it, and a search that starts from there."""
    space = plan.space
    if not space.configs:
        cuts = "; ".join(f"{family}: {why} ({n})" for (family, why), n in space.cuts.items())
        raise NoValidConfig(f"No config is valid for {plan.problem}: {cuts}.")
    valid = set(space.configs)
    known = [o for o in plan.ledger.history(plan.policy_name) if o.config in valid]
    current = [o for o in known if _is_current(plan, o)]
    done = [o for o in current if o.status != Status.PREDICTED or not plan.timed]
    again = doubted(done)  # as of a run whose finalist was refused
    done = [o for o in done if o not in again]
    changed = [o for o in known if o not in current and o.median_us is not None]
    changed.sort(key=lambda o: (o.median_us or 0.0, o.config.key))
    near = [*(o.config for o in changed), *plan.ledger.neighbours()]
    incumbent = plan.ledger.incumbent()
    served = [incumbent] if incumbent in valid else []  # before the default: of a short run all
    seeds = [*(o.config for o in again), *served, *starting_points(space, known, near)]
    values = [(o.config, value_of(o, timed=plan.timed)) for o in done]
    from fagen.tune.search import Search  # brings optuna

    estimate = cache(plan.predict)  # of every config, by the search and by its sampler
    search = Search(space, plan.seed, values, trials=plan.trials, seeds=seeds, prior=estimate)
    sizes = len(space.configs), len(done), plan.trials
    plan.on_event(
        events.Started(plan.problem, plan.target, plan.timed, *sizes, plan.timeout_s, space.cuts)
    )
    run_id = plan.ledger.begin(plan)
    return _Run(plan, space, (space.seeds or space.configs)[0], search, run_id, incumbent, done)


def _is_current(plan: Plan, outcome: Outcome) -> bool:
    """Whether the config still has the source that this outcome is about."""
    try:
        return plan.render(plan.problem, outcome.config).key == outcome.program_key
    except Exception:  # it did not render then, and does not now
        return not outcome.program_key


def _try_candidates(this: _Run) -> None:
    pipeline = Pipeline(this.plan, this.search, this.done)
    try:
        _take_all(this, pipeline)
        if pipeline.time_up:
            _keep(this, pipeline.finished(LAST_WAIT_S))
    except KeyboardInterrupt:
        with shielded(), contextlib.suppress(DatabaseError):
            _keep(this, pipeline.finished(0.0))
        raise
    finally:
        pipeline.close()
    if pipeline.time_up:
        this.state = "time_up"
    elif pipeline.exhausted:
        this.state = "exhausted"


def _take_all(this: _Run, pipeline: Pipeline) -> None:
    plan = this.plan
    pipeline.fill(plan.trials - len(this.done))
    if pipeline:
        plan.on_event(events.Preparing())
        pipeline.prepare()
    while pipeline:
        outcome = pipeline.take()
        if outcome is None:
            break
        _keep(this, [outcome])
        pipeline.fill(plan.trials - len(this.done))


def _keep(this: _Run, outcomes: Iterable[Outcome]) -> None:
    for outcome in outcomes:
        this.plan.ledger.save(outcome)  # first the row, so that a crash loses nothing
        this.search.tell(outcome.config, value_of(outcome, timed=this.plan.timed))
        this.done.append(outcome)
        this.counts[outcome.status] += 1
        _tell(this, outcome)


def _tell(this: _Run, outcome: Outcome) -> None:
    plan = this.plan
    left = max(0.0, plan.seconds_left)
    done = events.TrialDone(outcome, len(this.done), plan.trials, this.search.best_us, left)
    plan.on_event(done)


def _race_finalists(this: _Run) -> None:
    plan = this.plan
    most = how_many(plan.trials)
    outcomes = finalists(this.done, this.default, this.incumbent, most) if plan.timed else []
    if not outcomes:
        return
    this.finale = race(plan, outcomes, this.incumbent, this.default)
    for refused in this.finale.rejected:
        plan.ledger.reject(refused)
        this.counts[refused.status] += 1
        this.done = [refused if _same(o, refused) else o for o in this.done]


def _look_again(this: _Run) -> None:
    """Once a finalist was refused: what was only slower than it."""
    again = doubted(this.done) if this.finale.rejected else []
    if not again or this.plan.seconds_left < LEAST_TRY_S:
        return
    this.done = [outcome for outcome in this.done if outcome not in again]
    this.search.again([outcome.config for outcome in again])
    # On the first device: it knows that the finalist was refused.
    whole, this.plan = this.plan, replace(this.plan, workers=this.plan.workers[:1])
    _try_candidates(this)
    _race_finalists(this)
    this.plan = whole


def _same(outcome: Outcome, other: Outcome) -> bool:
    return outcome.program_key == other.program_key


def _winner(this: _Run) -> Outcome | None:
    """Of the race; else the best single pass. A prediction that nothing verified never wins."""
    for final in this.finale.finals:
        if final.chosen:
            return final.outcome
    best: tuple[float, str, Outcome] | None = None
    for outcome in this.done:
        value = value_of(outcome, timed=this.plan.timed)
        verified = outcome.verdict is not None and outcome.verdict.passed
        if value is not None and verified:
            entry = (value, outcome.config.key, outcome)
            best = entry if best is None or entry[:2] < best[:2] else best
    return best[2] if best is not None else None


def _unverified(this: _Run, winner: Outcome | None) -> Outcome | None:
    """What a prediction puts before the winner, where nothing could be timed."""
    if this.plan.timed or winner is None or winner.predicted_us is None:
        return None
    faster = [
        o
        for o in this.done
        if o.status is Status.PREDICTED and o.verdict is None and o.predicted_us is not None
    ]
    best = min(faster, key=lambda o: (o.predicted_us, o.config.key), default=None)
    if best is None or not (best.predicted_us or 0.0) < winner.predicted_us:
        return None
    return best


def _closed(this: _Run) -> TuneResult:
    plan, finale, winner = this.plan, this.finale, _winner(this)
    _finish(this)
    plan.on_event(events.Finished(this.state, plan.seconds))
    return TuneResult(
        problem=plan.problem,
        target=plan.target,
        run_id=this.id,
        state=this.state,
        timed=plan.timed,
        winner=winner,
        default=this.default,
        tried=len(this.done),
        space=len(this.space.configs),
        counts=dict(this.counts),
        seconds=plan.seconds,
        finals=finale.finals,
        missing=finale.missing,
        note=finale.note,
        unverified=_unverified(this, winner),
    )


def _finish(this: _Run) -> None:
    interrupted = this.state == "interrupted"
    try:
        this.plan.ledger.finish(this.finale, interrupted=interrupted)
    except DatabaseError:  # why the run ends is told instead: its state shows when we are gone
        if not interrupted:
            raise


def _so_far(result: TuneResult) -> str:
    best = "no winner yet"
    if result.winner is not None and result.winner_us is not None:
        best = f"best so far {result.winner_us:.1f} us, {result.winner.config}"
    return f"Stopped, so partial: {result.tried} candidates are kept, {best}."


def _why_none(this: _Run) -> str:
    if not this.done:
        return f"No candidate was tried for {this.plan.problem}: the budget was too small."
    counts = Counter(outcome.status for outcome in this.done)
    reasons = ", ".join(f"{n} {status.value}" for status, n in counts.most_common())
    verified = "right" if this.plan.timed else "verified"
    return f"None of {len(this.done)} candidates for {this.plan.problem} is {verified}: {reasons}."
