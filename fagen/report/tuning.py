"""Rows and lines of `fagen tune`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fagen.judge.ratios import slowdown
from fagen.report.plain import (
    Row,
    missing_rows,
    problem_row,
    shortened,
    tflops,
    verdict_row,
)
from fagen.serve.inputs import get_call, tune_command

if TYPE_CHECKING:
    from fagen.outcome import Outcome, Status
    from fagen.tune.result import Final, TuneResult

MOST_REASONS = 8  # shown; --json has them all


def tune_row(result: TuneResult, rejected: Mapping[tuple[Status, str], int]) -> Row:
    """`fagen tune --json`."""
    winner = result.winner
    return {
        **problem_row(result.problem),
        "target": result.target.name,
        "run_id": result.run_id,
        "state": result.state,
        "timed": result.timed,
        "winner": None if winner is None else winner.config.to_dict(),
        "winner_us": result.winner_us if result.timed else None,
        "winner_predicted_us": None if winner is None else winner.predicted_us,
        "default": result.default.to_dict(),
        "default_us": result.default_us,
        "source_key": None if winner is None else winner.program_key,
        "verdict": verdict_row(None if winner is None else winner.verdict),
        "tried": result.tried,
        "space": result.space,
        "counts": {status.value: number for status, number in result.counts.items()},
        "seconds": result.seconds,
        "finals": final_rows(result),
        "missing": missing_rows(result.missing),
        "unverified": None if result.unverified is None else result.unverified.config.to_dict(),
        "rejected": rejected_rows(rejected),
        "note": result.note,
    }


def final_rows(result: TuneResult) -> list[Row]:
    """The race, fastest first; without one, the winner alone. times_winner: the time over the
    winner's, of the rounds that both were in."""
    chosen = next((final.timing for final in result.finals if final.chosen), None)
    rows = [
        _final_row(
            str(final.outcome.config) if final.outcome is not None else final.name,
            _kind(final, result),
            (final.timing.median_us, final.timing.p20_us, final.timing.p80_us),
            slowdown(final.timing.samples_us, chosen.samples_us) if chosen else None,
            result,
        )
        for final in result.finals
    ]
    if not rows and result.winner is not None:
        time_us = result.winner_us if result.timed else None
        name, kind = str(result.winner.config), "winner" if result.timed else "predicted"
        rows = [_final_row(name, kind, (time_us, None, None), 1.0 if time_us else None, result)]
    return sorted(rows, key=lambda row: row["median_us"] or float("inf"))


def rejected_rows(rejected: Mapping[tuple[Status, str], int]) -> list[Row]:
    """What was rejected and why, most frequent first."""
    ordered = sorted(rejected.items(), key=lambda item: (-item[1], item[0]))
    return [
        {"status": status.value, "reason": reason, "count": count}
        for (status, reason), count in ordered
    ]


def tune_table(result: TuneResult) -> list[Row]:
    if not result.timed:
        shown = ("kind", "predicted_us", "name")
        return [{name: row[name] for name in shown} for row in final_rows(result)]
    return [
        {
            "kind": row["kind"],
            "median us": row["median_us"],
            "p20": row["p20_us"],
            "p80": row["p80_us"],
            "TFLOP/s": row["tflops"],
            "x winner": row["times_winner"],
            "name": row["name"],
        }
        for row in final_rows(result)
    ]


def tune_lines(
    result: TuneResult,
    rejected: Mapping[tuple[Status, str], int],
    cuts: Mapping[tuple[str, str], int],
    where: str,
) -> list[str]:
    """The story under the table: errors, what was left out and why, where it is, what is next."""
    lines = []
    if not result.timed:
        lines.append("Nothing was timed: times are predictions of the analytic model.")
    if result.unverified is not None:
        found = result.unverified
        lines.append(
            f"Predicted faster, {found.predicted_us:.4g} us, but it needs a GPU to be verified: "
            f"{found.config}"
        )
    if result.partial:
        lines.append("Partial: the run was interrupted; what was measured is stored and counts.")
    lines += _verdict_lines(result.winner)
    lines += [f"Not measured: {name}: {why}" for name, why in result.missing.items()]
    lines += [result.note] if result.note else []
    lines.append(f"{result.tried} of {result.space} valid configs tried, {result.seconds:.1f} s.")
    for (status, reason), count in sorted(rejected.items(), key=lambda item: -item[1])[
        :MOST_REASONS
    ]:
        lines.append(f"Rejected {count} {status.value}: {shortened(reason)}")
    if cuts:
        lines.append("Cut before any compile: " + cuts_text(cuts))
    lines.append(f"Stored as run {result.run_id} in {where}")
    call = f"kernel = {get_call(result.problem)}"
    there = f"on that GPU: {tune_command(result.problem)}; then {call}"
    lines.append(f"Next: {call if result.timed else there}")
    return lines


def cuts_text(cuts: Mapping[tuple[str, str], int]) -> str:
    ordered = sorted(cuts.items(), key=lambda item: (-item[1], item[0]))
    return "; ".join(f"{family} {count} by {shortened(why)}" for (family, why), count in ordered)


def _kind(final: Final, result: TuneResult) -> str:
    if final.chosen:
        return "winner"
    if final.outcome is not None and final.outcome.config == result.default:
        return "default"
    return "peer" if final.kind == "peer" else "finalist"


def _final_row(
    name: str,
    kind: str,
    times_us: tuple[float | None, ...],
    times_winner: float | None,
    result: TuneResult,
) -> Row:
    median_us, p20_us, p80_us = times_us
    winner = result.winner
    predicted_us = winner.predicted_us if winner is not None and kind == "predicted" else None
    return {
        "name": name,
        "kind": kind,
        "predicted_us": predicted_us,
        "median_us": median_us,
        "p20_us": p20_us,
        "p80_us": p80_us,
        "tflops": tflops(result.problem, median_us),
        "times_winner": times_winner,
    }


def _verdict_lines(winner: Outcome | None) -> list[str]:
    if winner is None:
        return ["No winner."]
    if winner.verdict is None:
        return ["The winner has no verdict yet; fagen.get verifies it at its first use."]
    worst = winner.verdict.worst
    shown = ""
    if worst is not None:
        shown = f", worst {worst.name}: error {worst.error:.3g} of {worst.budget:.3g} allowed"
    return [f"Verified on {winner.verdict.where}, {len(winner.verdict.checks)} checks{shown}."]
