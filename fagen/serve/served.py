"""What `fagen.get` returns, for either direction: a chosen source, its story and its twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from fagen.errors import BadInput, NoDevice
from fagen.generate.families import repeats
from fagen.generate.program import Sizes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fagen.config import Config
    from fagen.generate.program import Program
    from fagen.outcome import Verdict
    from fagen.problem import Problem
    from fagen.records import Record
    from fagen.serve.candidates import Origin
    from fagen.target import Target

Launch = Callable[..., None]  # `Runner.launch`
Prepare = Callable[..., Launch]  # `Runner.prepare`


@dataclass(frozen=True)
class Chosen:
    """A candidate made ready. `prepare` and `verdict` are None where there is no device."""

    origin: Origin
    program: Program
    record: Record | None = None
    verdict: Verdict | None = None
    prepare: Prepare | None = None
    notes: tuple[str, ...] = ()


class Choose(Protocol):
    """Finds, loads and, if need be, verifies the source for a problem; see `library.choose`."""

    def __call__(
        self, problem: Problem, prefer: Config | None = None, *, repeatable: bool = False
    ) -> Chosen: ...


class Asked(NamedTuple):
    """How `get` was asked, besides for the problem and the device. words: its keywords."""

    target: Target
    words: dict[str, Any]


@dataclass(eq=False)
class Served:
    """A source for a problem, and those for calls that it can't take, found when they come.

    A copy of one is the same object. A pickled one is asked for anew where it is loaded, on the
    current device there; without one it can only be read.
    """

    problem: Problem
    chosen: Chosen
    device: torch.device | None
    _choose: Choose = field(repr=False)
    _twins: dict[Any, Chosen] = field(default_factory=dict, repr=False)
    asked: Asked = field(repr=False, kw_only=True)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        from fagen.serve.library import get_again

        kind = None if self.device is None else self.device.type
        return get_again, (self.problem.to_dict(), *self.asked, kind)

    @property
    def config(self) -> Config:
        return self.chosen.program.config

    @property
    def source(self) -> str:
        """The generated module."""
        return self.chosen.program.source

    @property
    def origin(self) -> Origin:
        """tuned, shipped, nearest, predicted or default."""
        return self.chosen.origin

    @property
    def verdict(self) -> Verdict | None:
        return self.chosen.verdict

    def __repr__(self) -> str:
        kind, story = type(self).__name__, "; ".join(self._story())
        return f"<fagen.{kind} {self.config} for {self.problem}: {story}>"

    def _story(self) -> list[str]:
        record, verdict = self.chosen.record, self.chosen.verdict
        words: list[str] = [self.origin]
        if record is not None:
            words[0] += f" ({record.source_text}, {record.created:%Y-%m-%d})"
            time = "" if record.median_us is None else f"{record.median_us:.4g} us"
            if not record.is_of(self.problem):
                words.append(f"tuned for {record.problem}" + (time and f", there {time}"))
            elif time:
                words.append(time)
        words.append("not verified" if verdict is None else f"verified on {verdict.where}")
        return [*words, *self.chosen.notes]

    def _check_device(self, q: Tensor) -> None:
        if self.device is None:
            raise NoDevice(
                "This kernel was made for a target without a device, so it can only be read.",
                "Call fagen.get without target= on a machine with that GPU.",
            )
        if q.device != self.device:
            raise BadInput(
                f"This kernel was made for {self.device}, the tensors are on {q.device}.",
                "Get one for these tensors: fagen.get(q, k, v).",
            )

    def _chosen_for(self, call: Problem, *, repeatable: bool = False) -> Chosen:
        """This source, its twin for the call's layout and scale, or one for its sizes.

        repeatable: one that gives the same bits in every run.
        """
        twin = self._twin(call, repeatable)
        if twin.program.why_unfit(Sizes.of(call)) is None:
            return twin
        kind = call.layout, call.features, repeatable, call.bucket
        if kind not in self._twins:
            self._twins[kind] = self._choose(call, repeatable=repeatable)
        return self._twins[kind]

    def _twin(self, call: Problem, repeatable: bool) -> Chosen:
        made = self.chosen.program.problem
        fits = not repeatable or repeats(self.config)
        if fits and (call.layout, call.features) == (made.layout, made.features):
            return self.chosen
        kind = call.layout, call.features, repeatable
        if kind not in self._twins:
            like = replace(self.problem, layout=call.layout, features=call.features)
            prefer = self.config if fits else None
            self._twins[kind] = self._choose(like, prefer=prefer, repeatable=repeatable)
        return self._twins[kind]
