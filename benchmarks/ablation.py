"""What each knob is worth for each shape, from the trials that tuning databases hold.

python benchmarks/ablation.py --db winners.db --out docs/ablation.md

Of each shape the configs of its winner's family are compared (--family NAME: of that one). The
same databases and options give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations, permutations
from pathlib import Path
from statistics import median
from typing import Any

from fagen.config import Config
from fagen.errors import FagenError
from fagen.generate.families import FAMILIES, config_from_dict, family_named
from fagen.generate.space import why_invalid
from fagen.problem import Problem
from fagen.records import Record, Records, dataset

HEAD = """# What each knob is worth

Written by `benchmarks/ablation.py` from the stored trials of tuning databases: {rows} timed \
configs of {shapes} shape(s) in {runs} run(s), of which {pairs} pairs differ in one knob alone, \
or in two that a rule ties.

How to read a line, of a knob that goes from `a` to `b`:

| column | says |
| --- | --- |
| time, b to a | the time with `b` over the time with `a`: below 1, `b` is faster. The median \
over all pairs of timed configs of one run that differ in nothing else |
| p20 to p80 | of the same ratios: on both sides of 1, it hangs on the other knobs |
| pairs | how many; one or two are a hint at best |
| best with a, best with b | the fastest config with that value over the fastest of all: 1 is the \
fastest itself; 1.05 loses 5 % when the knob is held there and all others are free |

Two knobs on one line are tied by a rule: neither can change alone. Values that were \
never timed are left out.

**Times of one pass drift.** Every config was timed once, one after the other, and a card's clock \
moves meanwhile: the two of a pair may be minutes apart, and a few percent between single pairs \
mean nothing. Medians of many pairs are better than that. Ratios of the fastest configs are of \
two single passes, and of two runs where a shape was tuned more than once. The search tries more \
configs near good ones, so pairs are no random draw. Races decide ([measuring](measuring.md)); \
this page shows what a knob is about.
"""


@dataclass(frozen=True)
class Pass:
    """One timed config. `run` tells runs of all databases apart."""

    run: tuple[int, int]
    record: Record
    us: float

    def values(self, knobs: Sequence[str]) -> tuple[Any, ...]:
        return tuple(getattr(self.record.config.knobs, name) for name in knobs)


@dataclass(frozen=True)
class Place:
    """Where and how times were taken: those of one place may stand in one table."""

    device_key: str
    toolchain_key: str
    policy: str
    words: str

    @classmethod
    def of(cls, record: Record) -> Place:
        assert record.outcome.timing is not None
        tools, policy = record.toolchain, record.outcome.timing.policy
        words = f"{record.target}, Triton {tools.triton}, ptxas {tools.ptxas}, timed by {policy}"
        return cls(record.device_key, record.toolchain_key, policy, words)


@dataclass(frozen=True)
class Change:
    """One knob, or two that a rule ties, from one value to a later one of its declaration.

    ratios: time with `after` over time with `before`, sorted, of each pair that differs in
    nothing else. best_before, best_after: the fastest with that value over the fastest of all.
    """

    knobs: tuple[str, ...]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    ratios: tuple[float, ...]
    best_before: float
    best_after: float


@dataclass(frozen=True)
class Shape:
    """One problem at one place, and its timed configs of one family."""

    place: Place
    problem: Problem
    family: str
    passes: tuple[Pass, ...]
    changes: tuple[Change, ...]
    fixed: tuple[tuple[str, Any], ...]  # knobs that had one value in all of them

    @property
    def best(self) -> Pass:
        return min(newest(self.passes), key=lambda one: one.us)

    @property
    def pairs(self) -> int:
        return sum(len(change.ratios) for change in self.changes)


def read(databases: Iterable[str]) -> list[Pass]:
    """Every timed trial but the wrong ones, in the order of the databases and of their trials.

    Raises DatabaseError.
    """
    found = []
    for number, path in enumerate(databases):
        with Records.open(path, "read", config_from_dict) as records:
            trials = [t for s in dataset.TIMED for t in records.trials(status=s)]
        for record in sorted(trials, key=lambda r: r.trial_id):
            timing = record.outcome.timing
            if timing is not None and not record.quarantined:
                found.append(Pass((number, record.run_id), record, timing.median_us))
    return found


def shapes(passes: Iterable[Pass], family: str | None) -> list[Shape]:
    """By place, then by problem. family None: of each problem the winner's."""
    groups: dict[tuple[Place, Problem], list[Pass]] = defaultdict(list)
    for one in passes:
        groups[Place.of(one.record), one.record.problem].append(one)
    found = []
    for (place, problem), group in groups.items():
        name = family or winners_family(group)
        mine = tuple(one for one in group if one.record.config.family == name)
        if mine:
            changes, fixed = compared(name, mine)
            found.append(Shape(place, problem, name, mine, changes, fixed))
    return sorted(found, key=lambda s: (s.place.words, s.place.toolchain_key, _order(s.problem)))


def winners_family(group: Sequence[Pass]) -> str:
    """Of the fastest config that won a race; where none was raced, of the fastest pass."""

    def rank(one: Pass) -> tuple[bool, float]:
        raced = one.record.median_us if one.record.chosen else None
        return raced is None, one.us if raced is None else raced

    return min(group, key=rank).record.config.family


def compared(
    family: str, passes: Sequence[Pass]
) -> tuple[tuple[Change, ...], tuple[tuple[str, Any], ...]]:
    """Every change of a knob or of tied ones, in declared order, and the knobs of one value."""
    last = newest(passes)
    best = min(one.us for one in last)
    names = [declared.name for declared in fields(family_named(family).Knobs)]
    changes: list[Change] = []
    fixed = []
    for place, name in enumerate(names):
        for knobs in ((name,), *((name, other) for other in names[place + 1 :])):
            ratios = ratios_of(knobs, passes)
            fastest: dict[tuple[Any, ...], float] = {}
            for one in last:
                values = one.values(knobs)
                fastest[values] = min(one.us, fastest.get(values, one.us))
            if knobs == (name,) and len(fastest) == 1:
                fixed.append((name, *next(iter(fastest))))
            # Of single knobs every change, though no pair was timed; of tied ones those timed.
            timed = sorted(fastest, key=rank_in(family, knobs))
            for before, after in combinations(timed, 2):
                found = tuple(sorted(ratios.get((before, after), ())))
                if found or len(knobs) == 1:
                    held = fastest[before] / best, fastest[after] / best
                    changes.append(Change(knobs, before, after, found, *held))
    return tuple(changes), tuple(fixed)


def rank_in(family: str, knobs: Sequence[str]) -> Callable[[tuple[Any, ...]], tuple[int, ...]]:
    """The declared order of values of these knobs."""
    choices = {f.name: f.metadata["choices"] for f in fields(family_named(family).Knobs)}
    return lambda values: tuple(
        choices[name].index(value) for name, value in zip(knobs, values, strict=True)
    )


def newest(passes: Iterable[Pass]) -> list[Pass]:
    """The last pass of each config counts, as in a run that is continued."""
    return list({one.record.config.key: one for one in passes}.values())


def ratios_of(
    knobs: Sequence[str], passes: Iterable[Pass]
) -> dict[tuple[tuple[Any, ...], tuple[Any, ...]], list[float]]:
    """Time ratios by (before, after), both ways, of pairs of one run that differ in all these
    knobs and in no other. Two knobs: only where a rule ties them."""
    alike: dict[tuple[Any, ...], list[Pass]] = defaultdict(list)
    for one in passes:
        plain = one.record.config.to_dict()["knobs"]
        rest = tuple(value for name, value in plain.items() if name not in knobs)
        alike[one.run, rest].append(one)
    found: dict[Any, list[float]] = defaultdict(list)
    for group in alike.values():
        for one, other in permutations(group, 2):
            before, after = one.values(knobs), other.values(knobs)
            differ = all(a != b for a, b in zip(before, after, strict=True))
            if differ and (len(knobs) == 1 or tied(knobs, one, other)):
                found[before, after].append(other.us / one.us)
    return found


def tied(knobs: Sequence[str], one: Pass, other: Pass) -> bool:
    """Whether none of these knobs could change alone, from either side."""
    problem, target = one.record.problem, one.record.target
    for start, end in ((one, other), (other, one)):
        config = start.record.config
        for name, value in zip(knobs, end.values(knobs), strict=True):
            alone = Config(config.family, replace(config.knobs, **{name: value}))
            if why_invalid(problem, target, alone) is None:
                return False
    return True


def page(found: Sequence[Shape], runs: int) -> str:
    """The whole page in Markdown."""
    counts = {
        "rows": sum(len(shape.passes) for shape in found),
        "shapes": len({shape.problem for shape in found}),
        "runs": runs,
        "pairs": sum(shape.pairs for shape in found),
    }
    parts = [HEAD.format(**counts)]
    by_place: dict[Place, list[Shape]] = defaultdict(list)
    for shape in found:
        by_place[shape.place].append(shape)
    families = [name for name in FAMILIES if any(shape.family == name for shape in found)]
    parts += [glossary(name) for name in families]
    for place, there in by_place.items():
        parts.append(f"## {place.words}\n")
        parts += overviews(there, families)
        parts += [section(shape) for shape in there]
    return "\n".join(parts)


def glossary(family: str) -> str:
    """What the knobs of a family trade, as it declares them."""
    rows = [
        (f"`{f.name}`", ", ".join(map(str, f.metadata["choices"])), f.metadata["doc"])
        for f in fields(family_named(family).Knobs)
    ]
    return f"## The knobs of {family}\n\n" + table(("knob", "values", "what it trades"), rows)


def overviews(there: Sequence[Shape], families: Iterable[str]) -> list[str]:
    """For each family and mask one table over all shapes: does a knob pay everywhere?"""
    masks: dict[str, Callable[[Shape], bool]] = {
        "full": lambda shape: shape.problem.features.causal == "none",
        "causal": lambda shape: shape.problem.features.causal != "none",
    }
    parts = []
    for family in families:
        for mask, of_mask in masks.items():
            mine = [shape for shape in there if shape.family == family and of_mask(shape)]
            rows = list(_overview_rows(family, mine))
            if len(mine) > 1 and rows:
                title = f"### All {mask} shapes of {family} ({len(mine)})\n\n"
                text = (
                    "Each number is a median over the shapes; `least` and `most` are the medians "
                    "of the shapes with the least and the greatest ratio.\n\n"
                )
                parts.append(title + text + table(_OVERVIEW, rows))
    return parts


_OVERVIEW = (
    *("knob", "a to b", "time, b to a", "least", "most", "shapes", "pairs"),
    *("best with a", "best with b"),
)


def _overview_rows(family: str, mine: Iterable[Shape]) -> Iterator[tuple[str, ...]]:
    by_change: dict[Any, list[Change]] = defaultdict(list)
    for shape in mine:
        for change in shape.changes:
            by_change[change.knobs, change.before, change.after].append(change)
    names = [declared.name for declared in fields(family_named(family).Knobs)]

    def declared_order(change: tuple[Any, Any, Any]) -> tuple[Any, ...]:
        knobs, before, after = change
        rank = rank_in(family, knobs)
        first, *others = map(names.index, knobs)
        return first, others, rank(before), rank(after)

    for change in sorted(by_change, key=declared_order):
        changes = by_change[change]
        middles = [median(one.ratios) for one in changes if one.ratios]
        yield (
            *_said(*change),
            *(_times([of(middles)] if middles else []) for of in (median, min, max)),
            *(str(len(middles)), str(sum(len(one.ratios) for one in changes))),
            _times([one.best_before for one in changes]),
            _times([one.best_after for one in changes]),
        )


def section(shape: Shape) -> str:
    """One shape: its fastest config, a line a change, and what never changed."""
    best = shape.best
    runs = len({one.run for one in shape.passes})
    lines = [
        f"### {shape.problem}\n",
        f"{len(shape.passes)} timed configs of {shape.family} in {runs} run(s), {shape.pairs} "
        f"pairs. Fastest pass: {best.us:.6g} us, `{best.record.config}`.\n",
    ]
    if shape.changes:
        rows = [
            (
                *_said(c.knobs, c.before, c.after),
                *(_times(c.ratios), _spread(c.ratios), str(len(c.ratios))),
                *(_times([c.best_before]), _times([c.best_after])),
            )
            for c in shape.changes
        ]
        lines.append(table(_COLUMNS, rows))
    if shape.fixed:
        held = ", ".join(f"`{knob}` {value}" for knob, value in shape.fixed)
        lines.append(f"One value alone was timed of: {held}.\n")
    return "\n".join(lines)


_COLUMNS = (
    *("knob", "a to b", "time, b to a", "p20 to p80", "pairs"),
    *("best with a", "best with b"),
)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _said(knobs: Sequence[str], before: Iterable[Any], after: Iterable[Any]) -> tuple[str, str]:
    names = ", ".join(f"`{name}`" for name in knobs)
    return names, f"{', '.join(map(str, before))} to {', '.join(map(str, after))}"


def _times(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.3f}" if ratios else "-"


def _spread(ratios: Sequence[float]) -> str:
    """The 20th and 80th percentile of sorted ratios, by the rule of `Timing`."""
    if not ratios:
        return "-"
    places = (min(len(ratios) - 1, int(share * len(ratios))) for share in (0.2, 0.8))
    return " to ".join(f"{ratios[place]:.3f}" for place in places)


def _order(problem: Problem) -> tuple[Any, ...]:
    """Neighbours in length side by side."""
    s, f = problem.shape, problem.features
    kind = problem.direction, s.dtype, s.head_dim, s.head_dim_v, f.causal, f.scale, problem.layout
    return *kind, s.heads_q // s.heads_kv, s.seq_q, s.seq_kv, s.batch, s.heads_q


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What each knob is worth, from stored trials.")
    parser.add_argument("--db", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    parser.add_argument("--family", choices=list(FAMILIES), help="default: each winner's own")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    options = _options(words)
    try:
        passes = read(options.db)
    except FagenError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    found = shapes(passes, options.family)
    if not found:
        of = f" of family {options.family}" if options.family else ""
        print(
            f"No config{of} was timed in these databases. Run: fagen tune, on a GPU.",
            file=sys.stderr,
        )
        return 1
    text = page(found, len({one.run for shape in found for one in shape.passes}))
    if options.out is None:
        print(text, end="")
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text, encoding="utf-8")
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
