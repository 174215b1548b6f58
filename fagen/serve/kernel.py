"""A Kernel: the callable that `fagen.get` returns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fagen.errors import BadInput, NoDevice
from fagen.generate.program import Sizes
from fagen.serve import inputs

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


@dataclass(frozen=True)
class Chosen:
    """A candidate made ready. `launch` and `verdict` are None where there is no device."""

    origin: Origin
    program: Program
    record: Record | None = None
    verdict: Verdict | None = None
    launch: Launch | None = None
    notes: tuple[str, ...] = ()


class Choose(Protocol):
    """Finds, loads and, if need be, verifies the source for a problem; see `library.choose`."""

    def __call__(self, problem: Problem, prefer: Config | None = None) -> Chosen: ...


class _Plan(NamedTuple):
    """All that one kind of call needs."""

    launch: Launch
    o_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    scale: float


@dataclass(eq=False)
class Kernel:
    """out = kernel(q, k, v): exact attention for any sizes of the kind it was made for.

    q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv). Batch, lengths and head counts are
    free; dtype, head sizes and the ratio of heads are those of `problem`. Unaligned or broadcast
    tensors, and scales <= 0, run on a twin that is made and verified when it is first needed.
    """

    problem: Problem
    chosen: Chosen
    device: torch.device | None
    _choose: Choose = field(repr=False)
    _twins: dict[Any, Chosen] = field(default_factory=dict, repr=False)
    _plans: dict[Any, _Plan] = field(default_factory=dict, repr=False)

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
        import torch

        try:
            plan = self._plan(q, k, v, scale)
        except AttributeError:
            inputs.shape_of(q, k, v)  # says which of them is no tensor
            raise
        o = torch.empty(plan.o_shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=q.device)
        used = plan.scale if scale is None else float(scale)
        if q.is_cuda and torch.cuda.current_device() != q.device.index:
            with torch.cuda.device(q.device):
                plan.launch(q, k, v, o, lse, used)
        else:
            plan.launch(q, k, v, o, lse, used)
        return (o, lse) if return_lse else o

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
            words[0] += f" (trial {record.trial_id}, {record.created:%Y-%m-%d})"
            if record.problem.bucket != self.problem.bucket:
                words.append(f"tuned for {record.problem}")
            if record.median_us is not None:
                words.append(f"{record.median_us:.4g} us")
        words.append("not verified" if verdict is None else f"verified on {verdict.where}")
        return [*words, *self.chosen.notes]

    def _plan(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> _Plan:
        # One lookup a call: whatever a plan depends on is in the key, as plain attributes.
        key = (
            *(q.shape, q.stride(), q.dtype, q.device),
            *(k.shape, k.stride(), k.dtype, k.device),
            *(v.shape, v.stride(), v.dtype, v.device),
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) % inputs.ALIGNMENT == 0,
            scale is None or scale > 0,
            q.requires_grad or k.requires_grad or v.requires_grad,
        )
        plan = self._plans.get(key)
        if plan is None or key[-1]:  # whether gradients are on is asked at each such call
            plan = self._make_plan(q, k, v, scale)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _make_plan(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> _Plan:
        shape = inputs.shape_of(q, k, v)
        inputs.check_promise(self.problem, shape)
        inputs.check_gradients(q, k, v)
        self._check_device(q)
        any_scale = scale is not None and not scale > 0
        chosen = self._chosen_for(
            inputs.problem_like(self.problem, shape, inputs.layout_of(q, k, v), any_scale)
        )
        assert chosen.launch is not None
        rows = (shape.batch, shape.heads_q, shape.seq_q)
        return _Plan(chosen.launch, (*rows, shape.head_dim_v), rows, 1 / math.sqrt(shape.head_dim))

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
        """This kernel's source, its twin for the call's layout and scale, or a larger one."""
        twin = self._twin(call)
        if twin.program.why_too_large(Sizes.of(call)) is None:
            return twin
        larger = call.layout, call.features, call.bucket
        if larger not in self._twins:
            self._twins[larger] = self._choose(call)
        return self._twins[larger]

    def _twin(self, call: Problem) -> Chosen:
        made = self.chosen.program.problem
        if (call.layout, call.features) == (made.layout, made.features):
            return self.chosen
        kind = call.layout, call.features
        if kind not in self._twins:
            from dataclasses import replace

            like = replace(self.problem, layout=call.layout, features=call.features)
            self._twins[kind] = self._choose(like, prefer=self.config)
        return self._twins[kind]
