"""Writes the winners of tuning databases as records that come with fagen.

python benchmarks/ship.py --db winners.db --out tuning_db/records/h200.jsonl

One line a problem: what won its newest race, and passed today's gate; and a second one, where that
does not repeat bit for bit, of the fastest raced one that does. A file holds one device and
toolchain. What --out holds already stays, unless a database has a faster winner of that problem,
so the same databases give the same bytes, however often. What can't be shipped is named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fagen.errors import DatabaseError, FagenError
from fagen.generate.families import config_from_dict, repeats
from fagen.generate.render import render
from fagen.generate.space import why_invalid
from fagen.outcome import GATE
from fagen.problem import problem_from_dict
from fagen.records.convert import shipped_record
from tuning_db import Store, StoreError, TrialView
from tuning_db.exchange import Winner, line_of, read_lines, winner_of

EACH = 100  # raced sources of a problem, more than any race has
UNRACED = "its best was never raced; tune it again"


def found(store: Store) -> tuple[list[Winner], list[str]]:
    """The winner of each problem, device and toolchain, and why others have none."""
    problems = {run.problem_key: run.problem for run in store.runs()}
    winners, refused = [], []
    for key in sorted(problems):
        views = store.best(keys={"problem_key": key}, each=EACH, exactness=GATE)
        if not views:
            refused.append(f"{_named(problems[key])}: nothing was timed")
        for _, group in groupby(views, lambda v: (v.run.device_key, v.run.toolchain_key)):
            best, *others = group
            why = why_no_winner(best) or why_unfit(winner_of(best))
            if why is not None:
                refused.append(f"{_named(best.run.problem)}: {why}")
                continue
            fit = (v for v in others if why_unraced(v) is None and not why_unfit(winner_of(v)))
            winners += needed([winner_of(best), *map(winner_of, fit)])
    return winners, refused


def needed(ranked: Iterable[Winner]) -> list[Winner]:
    """The first, and the first that repeats bit for bit."""
    first, *others = ranked
    if _repeats(first):
        return [first]
    return [first, *[w for w in others if _repeats(w)][:1]]


def _repeats(winner: Winner) -> bool:
    return repeats(config_from_dict(winner.config))


def why_no_winner(view: TrialView) -> str | None:
    """Why the best trial of a problem is nothing to ship, or None."""
    return why_unraced(view) or (None if view.chosen else UNRACED)


def why_unraced(view: TrialView) -> str | None:
    """Why nobody knows whether it is right, and how fast beside others; or None."""
    if not view.trial.checks:
        return "no verdict"
    if view.run.exactness_policy != GATE:
        return f"judged by gate {view.run.exactness_policy!r}, not by {GATE!r}; tune it again"
    return UNRACED if view.final_us is None else None


def why_unfit(winner: Winner) -> str | None:
    """Why fagen would not serve this line, or must not, or None."""
    try:
        record = shipped_record(winner, config_from_dict)
    except (FagenError, AttributeError, KeyError, TypeError, ValueError) as error:
        return f"not understood by this version ({error})"
    if record.verdict is None or not record.verdict.passed:
        return "no passed verdict"
    problem, target = record.problem, record.target
    keys = {
        "problem_key": problem.key,
        "class_key": problem.class_key,
        "bucket_key": problem.bucket_key,
        "device_key": target.device_key,
        "toolchain_key": record.toolchain.key,
        "config_key": record.config.key,
    }
    wrong = [name for name, key in keys.items() if getattr(winner, name) != key]
    if wrong:
        return f"{wrong[0]} is not that of its values"
    return why_invalid(problem, target, record.config)


def merged(winners: Iterable[Winner]) -> tuple[list[Winner], list[str]]:
    """Those needed of each problem, in an order of their own, and what was decided.

    Today's gate comes before an older one, then the faster; of equals the first.
    """
    held: dict[str, list[Winner]] = {}
    for winner in winners:
        of_problem = held.setdefault(winner.problem_key, [])
        if winner not in of_problem:
            of_problem.append(winner)
    kept, decided = [], []
    for ranked in (sorted(of_problem, key=_rank) for of_problem in held.values()):
        those = needed(ranked)
        kept += those
        times = " and ".join(f"{winner.median_us:.6g}" for winner in those)
        decided += [
            f"{_named(left.problem)}: {times} us is kept, not {left.median_us:.6g} us"
            for left in ranked
            if left not in those
        ]
    return sorted(kept, key=_order), decided


def text_of(winners: Iterable[Winner]) -> str:
    return "".join(line_of(winner) + "\n" for winner in winners)


def places(winners: Iterable[Winner]) -> dict[tuple[str, str], str]:
    """Device key and toolchain key of all winners, each with its words."""
    return {
        (w.device_key, w.toolchain_key): f"{w.target['name']} with Triton {w.toolchain['triton']}"
        for w in winners
    }


def emits_another_source(winner: Winner) -> bool:
    """Whether the template has changed since: `get` then checks it at its first use."""
    record = shipped_record(winner, config_from_dict)
    emitted = render(record.problem, record.config, record.toolchain.triton_minor)
    return emitted.key != winner.program_key


def _rank(winner: Winner) -> tuple[bool, float]:
    return winner.exactness_policy != GATE, winner.median_us


def _order(winner: Winner) -> tuple[Any, ...]:
    """By what `get` compares, then by size: a diff then shows neighbours side by side."""
    problem = problem_from_dict(winner.problem)
    s, f = problem.shape, problem.features
    kind = problem.direction, s.dtype, s.head_dim, s.head_dim_v, f.causal, f.scale, problem.layout
    sizes = s.heads_q // s.heads_kv, s.seq_q, s.seq_kv, s.batch, s.heads_q
    return *kind, *sizes, winner.problem_key, winner.median_us  # the fastest is served


def _named(plain: dict[str, Any]) -> str:
    try:
        return str(problem_from_dict(plain))
    except (AttributeError, KeyError, TypeError):
        return f"a problem of another version ({str(plain)[:60]})"


def _read_existing(path: Path) -> list[Winner]:
    """Raises DatabaseError when a line of the file would not be served."""
    if not path.exists():
        return []
    winners = read_lines(path.read_text(encoding="utf-8").splitlines())
    for number, winner in enumerate(winners, 1):
        why = why_unfit(winner)
        if why is not None:
            raise DatabaseError(
                f"{path}, record {number}, {_named(winner.problem)}: {why}.",
                "Remove that line, or the file.",
            )
    return winners


def _read_databases(options: argparse.Namespace) -> tuple[list[Winner], list[str]]:
    winners, refused = [], []
    for path in options.db:
        store = Store(path, "read")
        try:
            good, bad = found(store)
        finally:
            store.close()
        winners += good
        refused += [f"{path}: {line}" for line in bad]
    asked = {"device_key": options.device_key, "toolchain_key": options.toolchain_key}
    wanted = {name: key for name, key in asked.items() if key is not None}
    return [w for w in winners if all(getattr(w, n) == k for n, k in wanted.items())], refused


def _ship(options: argparse.Namespace) -> int:
    held = _read_existing(options.out)
    winners, refused = _read_databases(options)
    for line in refused:
        print(f"left out: {line}", file=sys.stderr)
    if not winners:
        print("There is no winner to ship. Run: fagen tune, on a GPU.", file=sys.stderr)
        return 1
    where = places([*held, *winners])
    if len(where) > 1:
        listed = "".join(
            f"\n  --device-key {device} --toolchain-key {tools}: {words}"
            for (device, tools), words in sorted(where.items(), key=lambda item: item[1])
        )
        print(
            "A file holds one device and toolchain; the databases and the file have "
            f"{len(where)}. Say one, and a file for each:{listed}",
            file=sys.stderr,
        )
        return 2
    kept, decided = merged([*held, *winners])
    for line in decided:
        print(line)
    changed = sum(emits_another_source(winner) for winner in kept)
    if changed:
        print(f"{changed} of another source than this checkout emits: checked at first use")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text_of(kept), encoding="utf-8")
    [words] = where.values()
    print(f"wrote {options.out}: {len(kept)} winner(s) of {words}")
    return 0


def _jsonl(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".jsonl":
        raise argparse.ArgumentTypeError(f"{text}: fagen reads *.jsonl alone")
    return path


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ship winners of tuning databases as records.")
    parser.add_argument("--db", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--out", type=_jsonl, required=True, metavar="FILE.jsonl")
    parser.add_argument("--device-key", help="take the winners of one device")
    parser.add_argument("--toolchain-key", help="take the winners of one toolchain")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    try:
        return _ship(_options(words))
    except (FagenError, StoreError) as error:
        print(f"{error.message} {error.next_step}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
