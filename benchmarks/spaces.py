"""Measures whole search spaces, the data that `fagen bench-tuner --replay` searches again.

python benchmarks/spaces.py --space d128-full --db spaces.db

Every config of a space goes through the pipeline of `fagen tune`: built, checked, timed under the
same policy, each pass in an order of its own. Run it again on the same database to go on where it
stopped. --list prints the spaces with their sizes and measures nothing. A space is what is valid
of its problem with the knobs in FIXED held: the whole ones have 2000 to 27000 configs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fagen.config import Config
from fagen.generate.families import config_from_dict
from fagen.generate.render import render
from fagen.generate.space import SearchSpace
from fagen.outcome import GATE, Outcome
from fagen.problem import Problem, make_problem
from fagen.records import Plan as Budget
from fagen.records import Records
from fagen.target import preset, toolchain
from fagen.tune.ledger import Ledger
from fagen.tune.pipeline import Pipeline
from fagen.tune.place import place_of
from fagen.tune.plan import Plan
from fagen.tune.staff import policy_of, staff

STRATEGY = "whole space"
PASSES = 2
Held = Mapping[str, Mapping[str, Sequence[Any]]]  # by family and knob, the values it may have

# The portable family is 1.6 to 4 times slower here, and has thousands of configs.
FLASH = {
    "loads": ("tma",),
    "order": ("tiles_first",),
    "max_registers": (0,),
    "num_stages": (2, 3),
    "rescale_tau": (0.0, 8.0),
    "rescale_skip": ("never",),
}
KV_OUTER = {"num_stages": (1, 2)}
TWO_STAGES = {**FLASH, "num_stages": (2,)}
LATE = {"claim": ("late",)}
FINISHED = {**LATE, "boundary": ("finish",), "rescale_tau": (8.0,)}


@dataclass(frozen=True)
class Space:
    """A problem, and the knobs that are held."""

    problem: Problem
    held: Held


SPACES = {
    "d128-full": Space(
        make_problem(4096, 128, batch=4, heads=16), {"flash_ws": LATE, "flash": FLASH}
    ),
    "d128-causal": Space(
        make_problem(4096, 128, batch=4, heads=16, causal=True),
        {"flash_ws": {**LATE, "section_mb": (64,)}, "flash": FLASH},
    ),
    "d64-full": Space(
        make_problem(1024, 64, batch=16, heads=32),
        {"flash_ws": {**FINISHED, "rescale": ("under_scores",)}, "flash": TWO_STAGES},
    ),
    "d64-causal": Space(
        make_problem(2048, 64, batch=8, heads=32, causal=True),
        {
            "flash_ws": {
                **FINISHED,
                "rescale": ("under_scores",),
                "section_mb": (64,),
                "block_m": (128, 192, 256),
            },
            "flash": TWO_STAGES,
        },
    ),
    "d96-causal": Space(
        make_problem(4096, 96, batch=4, heads=16, causal=True),
        {
            "flash_ws": {
                **FINISHED,
                "rescale_tau": (0.0, 8.0),
                "section_mb": (64,),
                "queries": ("shared",),
            },
            "flash": TWO_STAGES,
        },
    ),
    "fp32": Space(
        make_problem(2048, 128, batch=2, heads=16, dtype="fp32"),
        {"flash": {"rescale_tau": (0.0, 8.0), "order": ("tiles_first", "head_groups")}},
    ),
    "d256-causal": Space(
        make_problem(2048, 256, batch=8, heads=8, causal=True),
        {"flash": {**FLASH, "rescale_skip": ("never", "branch")}},
    ),
    "decode": Space(
        make_problem(1, 128, seq_kv=8192, batch=16, heads=32, kv_heads=8),
        {"flash": {**FLASH, "loads": ("pointer", "tma"), "rescale_skip": ("never", "branch")}},
    ),
}


def held(space: SearchSpace, values: Held) -> SearchSpace:
    """What is left of a space when some knobs have these values only."""

    def fits(config: Config) -> bool:
        wanted = values.get(config.family, {})
        return all(getattr(config.knobs, knob) in allowed for knob, allowed in wanted.items())

    kept = {name: tuple(filter(fits, getattr(space, name))) for name in ("configs", "seeds")}
    return replace(space, **kept)


@dataclass
class Shuffled:
    """Stands where the search stands in a run: the configs of one pass in a random order."""

    configs: list[Config]

    def ask(self) -> Config | None:
        return self.configs.pop() if self.configs else None


def measure(space: Space, db: str, seconds: float) -> None:
    started = time.monotonic()
    place, compiler = place_of(None, None), toolchain()
    if place.device is None:
        raise SystemExit("spaces.py: there is no GPU; --list shows the spaces.")

    def renders(problem: Problem, config: Config) -> Any:
        return render(problem, config, triton_minor=compiler.triton_minor)

    with (
        Records.open(db, "write", config_from_dict) as records,
        staff(place, renders) as (workers, builder),
        place.held(seconds, lambda event: None),
    ):
        whole = held(SearchSpace.of(space.problem, place.target), space.held)
        plan = Plan(
            problem=space.problem,
            target=place.target,
            space=whole,
            ledger=Ledger(records, space.problem, place.target, compiler),
            workers=workers,
            builder=builder,
            render=renders,
            policy=policy_of(place),
            timed=True,
            trials=len(whole.configs),
            timeout_s=seconds,
            started=started,
        )
        for number in range(PASSES):
            counts = Counter(r.config for r in records.trials(problem=space.problem))
            left = [c for c in whole.configs if counts[c] <= number]
            random.Random(number).shuffle(left)
            if left and not one_pass(plan, records, left, number):
                break


def one_pass(plan: Plan, records: Records, configs: list[Config], number: int) -> bool:
    """Whether the time sufficed. Everything is built as early as it can be."""
    budget = Budget(
        plan.policy_name, GATE, f"{STRATEGY}, pass {number + 1}", number, len(configs), None
    )
    run = records.begin_run(plan.problem, plan.target, toolchain(), budget)
    for config in reversed(configs):
        plan.builder.submit(plan.render(plan.problem, config))
    pipeline = Pipeline(plan, Shuffled(configs), [])  # type: ignore[arg-type]
    pipeline.prepare()
    tally: Counter[str] = Counter()
    done = True
    for outcome in outcomes(pipeline):
        if outcome is None:
            done = False
            break
        records.save(run, outcome)
        tally[outcome.status.value] += 1
        if sum(tally.values()) % 50 == 0:
            print(f"pass {number + 1}: {dict(tally)}, {plan.seconds:.0f} s", flush=True)
    pipeline.close()
    records.finish_run(run, interrupted=not done)
    print(f"pass {number + 1}: {dict(tally)}, {plan.seconds:.0f} s, done: {done}", flush=True)
    return done


def outcomes(pipeline: Pipeline) -> Iterator[Outcome | None]:
    """Each one's; None at the end where the time was up."""
    pipeline.fill(sys.maxsize)
    while pipeline:
        yield pipeline.take()
        pipeline.fill(sys.maxsize)
    if pipeline.time_up:
        yield None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--space", choices=SPACES, action="append")
    parser.add_argument("--db")
    parser.add_argument("--seconds", type=float, default=550.0)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    for name in options.space or SPACES:
        if options.list:
            space = SPACES[name]
            found = held(SearchSpace.of(space.problem, preset("h200")), space.held)
            counts = dict(Counter(c.family for c in found.configs))
            print(f"{name}: {space.problem}, {len(found.configs)} configs {counts}")
        else:
            measure(SPACES[name], options.db, options.seconds)


if __name__ == "__main__":
    main()
