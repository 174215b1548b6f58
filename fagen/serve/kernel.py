"""A Kernel: the callable that `fagen.get` returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from fagen.errors import BadInput
from fagen.run.cuda import allocate, current_device
from fagen.run.unread import unread_lse
from fagen.serve import inputs
from fagen.serve.alike import Alike, alike
from fagen.serve.served import Launch, Served

if TYPE_CHECKING:
    from torch import Tensor

    from fagen.serve.gradient import GradientKernel, Gradients

MOST_PLANS = 256  # remembered calls; varied lengths must not grow the process


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


def _never() -> bool:
    return False


def kind_of(x: Tensor) -> tuple[object, ...]:
    """Whatever a plan depends on, and `alike` sees, as plain attributes."""
    return x.shape, x.stride(), x.dtype, x.device, x.is_neg(), x.requires_grad


@dataclass(eq=False, repr=False)
class Kernel(Served):
    """out = kernel(q, k, v): exact attention for any sizes of the kind it was made for.

    q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv). Batch, lengths and head counts are
    free; dtype, head sizes and the ratio of heads are those of `problem`. Unaligned or broadcast
    tensors, and scales <= 0 (or below 2**-126), run on a twin that is made and verified when it is
    first needed.

    Where an input requires grad, `gradient` computes the gradients. Under torch.compile, and
    wherever torch looks at each operator (make_fx, selective checkpointing), it is the operator
    torch.ops.fagen.attention.
    """

    find_gradient: Callable[[], GradientKernel] = field(repr=False, kw_only=True)
    _plans: dict[Any, _Plan] = field(default_factory=dict, repr=False)
    _last: _Plan | None = field(default=None, repr=False)
    _operator: str = field(default="", repr=False)  # under which torch.ops.fagen finds it
    _unusual: Callable[[], bool] = field(default=_never, repr=False)

    def __post_init__(self) -> None:
        if self.device is not None:
            from fagen.serve import operator

            self._operator = operator.offer(self)
            self._unusual = operator.unusual

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

        return_lse: also the log-sum-exp of each row, natural, scale included, fp32 (B, Hq, Sq). It
        has no gradient of its own.
        """
        if scale is not None and getattr(scale, "requires_grad", False):
            raise BadInput(
                "scale requires grad, and fagen computes no gradient of it.",
                "Pass float(scale), or scale q: kernel(q * scale, k, v, scale=1.0).",
            )
        if self._unusual():
            from fagen.serve import operator

            operator.refuse_tangents(q, k, v)
            if operator.is_watched():
                return operator.traced(q, k, v, self._operator, scale, return_lse)
        try:
            wants_grad = q.requires_grad or k.requires_grad or v.requires_grad
        except AttributeError:
            inputs.shape_of(q, k, v)  # says which of them is no tensor
            raise
        if wants_grad:
            from fagen.serve import autograd

            if autograd.is_on():
                return autograd.attend(self, q, k, v, scale, return_lse)
        return self.run(q, k, v, scale, return_lse)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A call without gradients."""
        try:
            plan = self._plan(q, k, v, scale)
        except AttributeError:
            inputs.shape_of(q, k, v)
            raise
        if plan.device is None or plan.current_device() == plan.device:
            return plan.run(q, k, v, scale, return_lse)
        import torch

        with torch.cuda.device(plan.device):
            return plan.run(q, k, v, scale, return_lse)

    def traced_gradient(self, *given: Any) -> Gradients:
        """q, k, v, o, lse, g, scale, wanted: `gradient` while torch makes a graph of it."""
        from fagen.serve import operator

        *tensors, scale, wanted = given
        return operator.traced_gradient(*tensors, name=self._operator, scale=scale, wanted=wanted)

    @cached_property
    def gradient(self) -> GradientKernel:
        """The kernel of its backward pass, found, and if need be verified, at first use."""
        return self.find_gradient()

    def _plan(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> _Plan:
        aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % inputs.ALIGNMENT == 0
        positive = scale is None or bool(scale >= inputs.LEAST_SCALE)
        last = self._last
        if (
            last is not None
            and last.aligned is aligned
            and last.positive is positive
            and last.alike(q, k, v)
        ):
            return last
        key = kind_of(q), kind_of(k), kind_of(v), aligned, positive
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
