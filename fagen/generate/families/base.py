"""What a kernel family declares. Each family is a module of this shape; there is no base class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any, NamedTuple, Protocol

from fagen.generate.program import Entry, Sizes, Workspace
from fagen.problem import Problem
from fagen.target import Target


@dataclass(frozen=True)
class Constraint:
    """One rule that a config must keep. `reason` is the sentence shown when it is broken.

    The reason may name knobs in braces, as in "BLOCK_M {block_m} needs 8 warps.".
    """

    name: str
    reason: str
    holds: Callable[[Problem, Target, Any], bool]


class Family(Protocol):
    """A module of `families/`."""

    NAME: str
    DIRECTION: str  # "forward" or "backward"
    TEMPLATE: str  # file name under templates/
    Knobs: type[Any]  # frozen dataclass; every field made by `knob`
    CONSTRAINTS: tuple[Constraint, ...]

    def why_unsupported(self, problem: Problem, target: Target) -> str | None:
        """Why no config fits a problem of this family's direction, or None."""

    def seeds(self, problem: Problem, target: Target) -> list[Any]:
        """Knobs to try first; the first one is the family's default. May hold invalid ones."""

    def context(self, problem: Problem, knobs: Any) -> dict[str, Any]:
        """What the template sees besides header, name, problem and knobs."""

    def entries(self, problem: Problem, knobs: Any, name: str) -> tuple[Entry, ...]:
        """The kernels in launch order; `name` is the Program's."""

    def grid(
        self, problem: Problem, knobs: Any, entry: int, sizes: Sizes, sm_count: int
    ) -> tuple[int, int, int]:
        """Launch grid of entry kernel number `entry` on a device of that many multiprocessors."""

    def scalars(self, problem: Problem, knobs: Any, sizes: Sizes, sm_count: int) -> dict[str, int]:
        """int32 arguments of a launch, by name, beyond those that `run` knows by itself."""

    def workspaces(self, knobs: Any, sizes: Sizes) -> tuple[Workspace, ...]:
        """Scratch memory of one launch."""

    def repeats(self, knobs: Any) -> bool:
        """Whether every run gives the same bits."""

    def limits(self, problem: Problem, knobs: Any) -> dict[str, range]:
        """Sizes that the source is not right outside of; see Program.limits."""

    def tile(self, knobs: Any) -> tuple[int, int]:
        """(query rows, key rows) of a tile: what the gate's shapes and the model go by."""

    def shared_bytes(self, problem: Problem, knobs: Any) -> int:
        """Estimate of shared memory a block, from the tiles alone."""


class Pass(NamedTuple):
    """A main kernel of a backward pass, as the estimate of its time sees it.

    rows, keys: of a step. owns_keys: whether a block owns keys and walks over rows.
    columns: of the head dims that its products go over: 2 * rows * keys * columns FLOPs a step.
    registers: of a thread, for accumulators and scores. stages: tiles in flight.
    beside: groups or blocks that hide each other's waits.
    """

    rows: int
    keys: int
    owns_keys: bool
    columns: int
    registers: float
    beside: int
    stages: int


class Backward(Family, Protocol):
    """A family of the backward pass."""

    def passes(self, problem: Problem, knobs: Any) -> tuple[Pass, ...]:
        """Its main kernels, in launch order."""

    def adds(self, knobs: Any) -> bool:
        """Whether dQ is added up in fp32 memory, which is cleared before and converted after."""


def knob(default: Any, choices: tuple[Any, ...], doc: str) -> Any:
    """A field of a family's Knobs: its default, every value the search may try, what it trades."""
    assert default in choices
    return field(default=default, metadata={"choices": choices, "doc": doc})


def every_choice(knobs_type: type[Any]) -> Iterator[Any]:
    """Each combination of choices, valid or not, in the order of declaration."""
    declared = fields(knobs_type)
    for values in product(*(f.metadata["choices"] for f in declared)):
        yield knobs_type(**{f.name: v for f, v in zip(declared, values, strict=True)})


def why_unsupported(family: Family, problem: Problem, target: Target) -> str | None:
    """Why no config of the family fits, or None."""
    if problem.direction != family.DIRECTION:
        return f"{family.NAME} computes the {family.DIRECTION} pass, not {problem.direction}."
    return family.why_unsupported(problem, target)


def why_invalid(family: Family, problem: Problem, target: Target, knobs: Any) -> str | None:
    """The first broken rule as a sentence, or None. The one statement of validity."""
    unsupported = why_unsupported(family, problem, target)
    if unsupported is not None:
        return unsupported
    for rule in family.CONSTRAINTS:
        if not rule.holds(problem, target, knobs):
            return rule.reason.format_map({f.name: getattr(knobs, f.name) for f in fields(knobs)})
    return None
