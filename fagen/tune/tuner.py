"""From a problem to a verified kernel in the database: the main path, top to bottom."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fagen.config import Config
from fagen.errors import Interrupted, NoValidConfig, TerminatedRun
from fagen.generate.families import config_from_dict
from fagen.generate.render import render
from fagen.generate.space import SearchSpace
from fagen.outcome import Outcome, Status
from fagen.problem import Problem, make_problem
from fagen.records import Records
from fagen.target import Target, toolchain
from fagen.tune import events
from fagen.tune.finale import FINALISTS, Finale, race
from fagen.tune.ledger import Ledger
from fagen.tune.pipeline import Pipeline
from fagen.tune.place import place_of
from fagen.tune.plan import Plan
from fagen.tune.result import State, TuneResult, finalists, value_of
from fagen.tune.search import Search
from fagen.tune.seeding import starting_points
from fagen.tune.signals import Terminated, shielded, terminable
from fagen.tune.staff import policy_of, staff

TRIALS = 64
TIMEOUT_S = 150.0  # with at most two builds or checks past it, a cold run ends within 180 s
OFFLINE_TIMEOUT_S = 75.0


def tune(
    problem: Problem | None = None,
    *,
    target: Target | str | None = None,
    device: int | str | None = None,
    trials: int = TRIALS,
    timeout: float | None = None,
    seed: int = 0,
    db: str | None = None,
    on_event: events.OnEvent = events.ignore,
    **shape: Any,
) -> TuneResult:
    """Generate, verify and time kernels for a problem; every result is stored.

    The problem, or the keywords of `make_problem`: `tune(seq=8192, head_dim=128, causal=True)`.
    trials is the total for this problem and device, earlier runs included; timeout bounds this
    run's wall time. With a `target`, or without a GPU, nothing is timed: candidates are compiled
    for it, verified in Triton's interpreter and ranked by a model.

    Raises NoValidConfig, Interrupted (what was measured is stored), DeviceBusy, NoTriton.
    """
    started = time.monotonic()
    asked = problem if problem is not None else make_problem(**shape)
    compiler = toolchain()
    place = place_of(target, device)
    timed = place.device is not None
    seconds = timeout if timeout is not None else TIMEOUT_S if timed else OFFLINE_TIMEOUT_S
    renders = partial(render, triton_minor=compiler.triton_minor)
    with (
        Records.open(db, "write", config_from_dict) as records,
        place.held(seconds, on_event),
        staff(place, renders) as (worker, builder),
    ):
        return run(
            Plan(
                problem=asked,
                target=place.target,
                ledger=Ledger(records, asked, place.target, compiler),
                worker=worker,
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
                plan.ledger.finish(this.finale, interrupted=True)
            raise
    plan.close()
    result = _closed(this)
    if result.winner is None:
        raise NoValidConfig(_why_none(this), "Each one's reason: fagen db trials.")
    return result


def _opened(plan: Plan) -> _Run:
    """The space, what is known of it, and a search that starts from there."""
    space = plan.space or SearchSpace.of(plan.problem, plan.target)
    if not space.configs:
        cuts = "; ".join(f"{family}: {why} ({n})" for (family, why), n in space.cuts.items())
        raise NoValidConfig(f"No config is valid for {plan.problem}: {cuts}.")
    valid = set(space.configs)
    known = plan.ledger.history(plan.policy_name)
    counted = [o for o in known if o.status != Status.PREDICTED or not plan.timed]
    done = [outcome for outcome in counted if outcome.config in valid]
    seeds = starting_points(space, plan.predict, known, plan.ledger.neighbours())
    values = [(o.config, value_of(o, timed=plan.timed)) for o in done]
    search = Search(space, plan.seed, values, trials=plan.trials, seeds=seeds, prior=plan.predict)
    incumbent = plan.ledger.incumbent()
    sizes = len(space.configs), len(done), plan.trials
    plan.on_event(
        events.Started(plan.problem, plan.target, plan.timed, *sizes, plan.timeout_s, space.cuts)
    )
    run_id = plan.ledger.begin(plan)
    return _Run(plan, space, (space.seeds or space.configs)[0], search, run_id, incumbent, done)


def _try_candidates(this: _Run) -> None:
    plan, pipeline = this.plan, Pipeline(this.plan, this.search, this.done)
    pipeline.fill(plan.trials - len(this.done))
    if pipeline:
        plan.on_event(events.Preparing())
        plan.worker.prepare(plan.problem, plan.target, plan.policy)
    while pipeline:
        outcome = pipeline.take()
        if outcome is None:
            break
        plan.ledger.save(outcome)  # first the row, so that a crash loses nothing
        this.search.tell(outcome.config, value_of(outcome, timed=plan.timed))
        this.done.append(outcome)
        this.counts[outcome.status] += 1
        _tell(this, outcome)
        pipeline.fill(plan.trials - len(this.done))
    if pipeline.time_up:
        this.state = "time_up"
    elif pipeline.exhausted:
        this.state = "exhausted"


def _tell(this: _Run, outcome: Outcome) -> None:
    plan = this.plan
    left = max(0.0, plan.seconds_left)
    done = events.TrialDone(outcome, len(this.done), plan.trials, this.search.best_us, left)
    plan.on_event(done)


def _race_finalists(this: _Run) -> None:
    plan = this.plan
    outcomes = finalists(this.done, this.default, this.incumbent, FINALISTS) if plan.timed else []
    if not outcomes:
        return
    this.finale = race(plan, outcomes, this.incumbent)
    for refused in this.finale.rejected:
        plan.ledger.reject(refused)
        this.counts[refused.status] += 1
        this.done = [refused if _same(o, refused) else o for o in this.done]


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


def _closed(this: _Run) -> TuneResult:
    plan, finale = this.plan, this.finale
    plan.ledger.finish(finale, interrupted=this.state == "interrupted")
    plan.on_event(events.Finished(this.state, plan.seconds))
    return TuneResult(
        problem=plan.problem,
        target=plan.target,
        run_id=this.id,
        state=this.state,
        timed=plan.timed,
        winner=_winner(this),
        default=this.default,
        tried=len(this.done),
        space=len(this.space.configs),
        counts=dict(this.counts),
        seconds=plan.seconds,
        finals=finale.finals,
        missing=finale.missing,
        note=finale.note,
    )


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
