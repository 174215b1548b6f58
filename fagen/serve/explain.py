"""Why a shape gets the kernel that it gets: every field of the key, wanted against found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fagen.config import Config
from fagen.generate.program import Program
from fagen.outcome import GATE, Verdict
from fagen.problem import Problem
from fagen.serve.candidates import Candidate, Origin
from fagen.serve.inputs import tune_command
from fagen.serve.place import Place
from fagen.serve.ready import known_verdict

if TYPE_CHECKING:
    from fagen.records import Record, Records

Match = Literal["hit", "miss"]


@dataclass(frozen=True)
class KeyField:
    """One field of the key. `found` is None where no stored row was chosen."""

    name: str
    rule: str  # "exact", "bucket" or, for what only asks for a new verdict, "verify"
    wanted: str
    found: str | None

    @property
    def match(self) -> Match:
        return "hit" if self.wanted == self.found else "miss"


@dataclass(frozen=True)
class Explanation:
    """What `get` would return. origin and config are None where it would raise NoKernel."""

    problem: Problem
    place: Place
    origin: Origin | None
    config: Config | None
    program: Program | None
    record: Record | None
    verdict: Verdict | None
    fields: tuple[KeyField, ...]
    reason: str

    @property
    def next_step(self) -> str:
        """The command that would make it better, or nothing."""
        own = self.record is not None and self.record.is_of(self.problem)
        if self.origin == "tuned" or (self.origin == "shipped" and own):
            return ""
        return f"Run: {tune_command(self.problem)}"


def explain(
    place: Place,
    problem: Problem,
    rows: Sequence[Record],
    candidate: Candidate | None,
    program: Program | None,
    records: Records | None,
) -> Explanation:
    """Put together what `why` found; `rows` are the stored ones of the problem's class."""
    record = candidate.record if candidate is not None else None
    verdict = None
    if candidate is not None and program is not None:
        verdict = known_verdict(place, candidate, program, records)
    return Explanation(
        problem=problem,
        place=place,
        origin=candidate.origin if candidate is not None else None,
        config=candidate.config if candidate is not None else None,
        program=program,
        record=record,
        verdict=verdict,
        fields=_key_fields(place, problem, program, record),
        reason=_reason(place, problem, rows, candidate),
    )


_PROBLEM_FIELDS: tuple[tuple[str, str, Callable[[Problem], Any]], ...] = (
    ("direction", "exact", lambda p: p.direction),
    ("dtype", "exact", lambda p: p.shape.dtype),
    ("head_dim", "exact", lambda p: p.shape.head_dim),
    ("head_dim_v", "exact", lambda p: p.shape.head_dim_v),
    ("head_ratio", "exact", lambda p: p.shape.heads_q // p.shape.heads_kv),
    ("causal", "exact", lambda p: p.features.causal),
    ("scale", "exact", lambda p: p.features.scale),
    ("layout", "exact", lambda p: p.layout),
    ("class_key", "exact", lambda p: p.class_key),
    ("seq_q", "bucket", lambda p: p.bucket[0]),
    ("seq_kv", "bucket", lambda p: p.bucket[1]),
    ("batch_x_heads", "bucket", lambda p: p.bucket[2]),
)


def _key_fields(
    place: Place, problem: Problem, program: Program | None, record: Record | None
) -> tuple[KeyField, ...]:
    shape = [
        KeyField(name, rule, str(of(problem)), None if record is None else str(of(record.problem)))
        for name, rule, of in _PROBLEM_FIELDS
    ]
    made = None if record is None else record.toolchain
    source = program.key if program is not None else "none"
    facts = (
        ("device", "exact", str(place.target), None if record is None else str(record.target)),
        ("triton", "verify", place.toolchain.triton, made.triton if made else None),
        ("ptxas", "verify", place.toolchain.ptxas, made.ptxas if made else None),
        ("source", "verify", source, None if record is None else record.program_key),
        ("gate", "verify", GATE, None if record is None else record.exactness),
    )
    return (*shape, *(KeyField(*fact) for fact in facts))


def _reason(
    place: Place, problem: Problem, rows: Sequence[Record], candidate: Candidate | None
) -> str:
    here = sum(r.device_key == place.target.device_key for r in rows)
    known = f"{len(rows)} stored row(s) of this class, {here} of them on {place.target.name}"
    record = None if candidate is None else candidate.record
    own = record is None or record.is_of(problem)
    size = "shape" if own else "size bucket"
    said = {
        "tuned": f"a row of your database is of this {size}",
        "shipped": f"a row that came with fagen is of this {size}",
        "nearest": "no row has these sizes; the nearest of this class on this device is taken",
        "predicted": "nothing of this class was timed on this device; an offline prediction is",
        "default": "nothing of this class is known on this device; the family's default is taken",
    }
    found = said[candidate.origin] if candidate is not None else "nothing may be served"
    if here and candidate is not None and candidate.origin == "default":
        found = "nothing stored serves these sizes, or none was asked for; the default is taken"
    if record is not None and not own:
        found += f" (it was tuned for {record.problem})"
    return f"{found}; {known}."
