"""The end of a timed run: the finalists in turns with the default config and the peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fagen.config import Config
from fagen.outcome import Outcome
from fagen.tune import events
from fagen.tune.jobs import RaceReply, Tried
from fagen.tune.plan import RACE_MOST_S, Plan
from fagen.tune.result import Final, Finale, choose

# A pass ranks within 1 %, or worse. Most finalists leave the race once it is clear that they are
# slower: twelve of whom ten leave after eight rounds take as many turns as six that stay.
FINALISTS = 12
# A short run's race would take longer than its trials: 8 s for ten finalists of twelve trials that
# took 4 (bf16 B2 H16 N8192 D128 full, one H200), 4 s for four.
LEAST_FINALISTS = 4
TRIALS_A_FINALIST = 3
# Interleaved rounds: the median's error is a quarter of one sample's.
RACE_ROUNDS = 21


def how_many(trials: int) -> int:
    """Finalists of a run, beside the default and the incumbent."""
    return max(LEAST_FINALISTS, min(FINALISTS, trials // TRIALS_A_FINALIST))


def race(
    plan: Plan, outcomes: Sequence[Outcome], incumbent: Config | None, default: Config
) -> Finale:
    """Check and time `outcomes` once more; mark the winner."""
    programs = {outcome.config: plan.render(plan.problem, outcome.config) for outcome in outcomes}
    plan.on_event(events.Racing(len(programs)))
    worker = plan.workers[0]
    worker.prepare(plan.problem, plan.target, plan.policy)
    seconds = max(RACE_MOST_S / 2, plan.timeout_s - plan.seconds)
    reply = worker.race(list(programs.values()), RACE_ROUNDS, seconds)
    keys = {config: program.key for config, program in programs.items()}
    rejected = reply.rejected
    finals = _finals(reply, outcomes, keys)
    chosen = choose(finals, incumbent, default)
    shown = {str(f.outcome.config): f.timing for f in finals if f.outcome is not None}
    plan.on_event(events.Raced(shown, reply.peers))
    return Finale(
        tuple(replace(f, chosen=f is chosen) for f in finals),
        tuple(
            _refused(o, rejected[keys[o.config]]) for o in outcomes if keys[o.config] in rejected
        ),
        reply.missing,
        reply.note,
    )


def _finals(reply: RaceReply, outcomes: Sequence[Outcome], keys: dict[Config, str]) -> list[Final]:
    programs = [
        Final(keys[o.config], "program", reply.programs[keys[o.config]], o)
        for o in outcomes
        if keys[o.config] in reply.programs
    ]
    return [*programs, *(Final(name, "peer", timing) for name, timing in reply.peers.items())]


def _refused(outcome: Outcome, tried: Tried) -> Outcome:
    return replace(outcome, status=tried.status, reason=tried.reason, verdict=tried.verdict)
