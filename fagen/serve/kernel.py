"""A Kernel: the callable that `fagen.get` returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fagen.errors import BadInput, NoDevice
from fagen.generate.program import Sizes
from fagen.run.cuda import allocate, current_device
from fagen.run.unread import unread_lse
from fagen.serve import inputs
from fagen.serve.alike import Alike, alike

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fagen.config import Config
    from fagen.generate.program import Program
    from fagen.outcome import Verdict
    from fagen.problem import Problem
    from fagen.records import Record
    from fagen.serve.candidates import Origin

MOST_PLANS = 256  # remembered calls; varied lengths must not grow the process


class Launch(Protocol):
    """`Runner.launch`."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, /
    ) -> None: ...


class Prepare(Protocol):
    """`Runner.prepare`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, /) -> Launch: ...


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

    def __call__(self, problem: Problem, prefer: Config | None = None) -> Chosen: ...


class _Plan(NamedTuple):
    """All that one kind of call needs, and how to tell that kind.

    unread: where the LSE goes unless it is asked for; None: into new memory, too.
    device: the CUDA device's index, None on the CPU.
    alike, aligned, positive: what the tensors, their addresses and the scale are.
    """

    launch: Launch
    new_o: Callable[[], Tensor]
    new_lse: Callable[[], Tensor]
    unread: Tensor | None
    scale: float
    device: int | None
    current_device: Callable[[], int]
    alike: Alike
    aligned: bool
    positive: bool

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        o = self.new_o()
        lse = self.new_lse() if return_lse or self.unread is None else self.unread
        self.launch(q, k, v, o, lse, self.scale if scale is None else float(scale))
        return (o, lse) if return_lse else o


@dataclass(eq=False)
class Kernel:
    """out = kernel(q, k, v): exact attention for any sizes of the kind it was made for.

    q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv). Batch, lengths and head counts are
    free; dtype, head sizes and the ratio of heads are those of `problem`. Unaligned or broadcast
    tensors, and scales <= 0 (or below 2**-126), run on a twin that is made and verified when it is
    first needed.
    """

    problem: Problem
    chosen: Chosen
    device: torch.device | None
    _choose: Choose = field(repr=False)
    _twins: dict[Any, Chosen] = field(default_factory=dict, repr=False)
    _plans: dict[Any, _Plan] = field(default_factory=dict, repr=False)
    _last: _Plan | None = field(default=None, repr=False)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """softmax(scale * q k^T) v, with scale 1/sqrt(D) by default.

        return_lse: also the log-sum-exp of each row, natural, scale included, fp32 (B, Hq, Sq).
        """
        try:
            plan = self._plan(q, k, v, scale)
        except AttributeError:
            inputs.shape_of(q, k, v)  # says which of them is no tensor
            raise
        if plan.device is None or plan.current_device() == plan.device:
            return plan.run(q, k, v, scale, return_lse)
        import torch

        with torch.cuda.device(plan.device):
            return plan.run(q, k, v, scale, return_lse)

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
        return f"<fagen.Kernel {self.config} for {self.problem}: {'; '.join(self._story())}>"

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

    def _plan(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> _Plan:
        aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % inputs.ALIGNMENT == 0
        positive = scale is None or bool(scale >= inputs.LEAST_SCALE)
        if q.requires_grad or k.requires_grad or v.requires_grad:
            inputs.check_gradients(q, k, v)  # whether gradients are on is asked at each such call
        last = self._last
        if (
            last is not None
            and last.aligned is aligned
            and last.positive is positive
            and last.alike(q, k, v)
        ):
            return last
        # Whatever a plan depends on is in the key, as plain attributes.
        key = (
            *(q.shape, q.stride(), q.dtype, q.device),
            *(k.shape, k.stride(), k.dtype, k.device),
            *(v.shape, v.stride(), v.dtype, v.device),
            *(aligned, positive, q.is_neg(), k.is_neg(), v.is_neg()),
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(q, k, v, aligned, positive)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        self._last = plan
        return plan

    def _make_plan(self, q: Tensor, k: Tensor, v: Tensor, aligned: bool, positive: bool) -> _Plan:
        import torch

        shape = inputs.shape_of(q, k, v)
        if not q.shape[1]:
            made = self.problem.shape
            shape = replace(shape, heads_q=made.heads_q, heads_kv=made.heads_kv)
        inputs.check_promise(self.problem, shape)
        self._check_device(q)
        chosen = self._chosen_for(
            inputs.problem_like(self.problem, shape, inputs.layout_of(q, k, v), not positive)
        )
        assert chosen.prepare is not None
        rows = (shape.batch, q.shape[1], shape.seq_q)
        return _Plan(
            chosen.prepare(q, k, v),
            allocate((*rows, shape.head_dim_v), q.dtype, q.device),
            allocate(rows, torch.float32, q.device),
            unread_lse(rows, q.device),
            1 / math.sqrt(shape.head_dim),
            q.device.index if q.is_cuda else None,
            current_device(),
            alike(q, k, v),
            aligned,
            positive,
        )

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

    def _chosen_for(self, call: Problem) -> Chosen:
        """This kernel's source, its twin for the call's layout and scale, or one for its sizes."""
        twin = self._twin(call)
        if twin.program.why_unfit(Sizes.of(call)) is None:
            return twin
        kind = call.layout, call.features, call.bucket
        if kind not in self._twins:
            self._twins[kind] = self._choose(call)
        return self._twins[kind]

    def _twin(self, call: Problem) -> Chosen:
        made = self.chosen.program.problem
        if (call.layout, call.features) == (made.layout, made.features):
            return self.chosen
        kind = call.layout, call.features
        if kind not in self._twins:
            like = replace(self.problem, layout=call.layout, features=call.features)
            self._twins[kind] = self._choose(like, prefer=self.config)
        return self._twins[kind]
