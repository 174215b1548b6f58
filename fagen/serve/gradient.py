"""A GradientKernel: the backward pass that `fagen.get(direction="backward")` returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fagen.errors import BadInput
from fagen.run.cuda import allocate, current_device
from fagen.run.kernel import GRADIENTS
from fagen.serve import inputs
from fagen.serve.alike import Alike, alike
from fagen.serve.kernel import MOST_PLANS, kind_of
from fagen.serve.served import Launch, Served

if TYPE_CHECKING:
    from torch import Tensor

    from fagen.problem import Shape

Given = tuple["Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor"]  # q, k, v, o, lse, g
Gradients = tuple["Tensor | None", "Tensor | None", "Tensor | None"]
Wanted = tuple[bool, bool, bool]
ALL = (True, True, True)


class _How(NamedTuple):
    """What a plan depends on besides the tensors' kinds: which addresses TMA and wide loads take,
    the sign of the scale, whether bits must repeat, and the caller's wish."""

    aligned: bool
    aligned_kept: bool
    aligned_g: bool
    positive: bool
    repeatable: bool
    wanted: Wanted


class _Plan(NamedTuple):
    """All that one kind of call needs, and how to tell that kind.

    new: memory for dQ, dK and dV each, none for those that nothing writes. copies_g, copies_kept:
    whether g, and o and LSE, are laid out anew first. alike, how: what the tensors, and what all
    else that the plan depends on, are.
    """

    launch: Launch
    new: tuple[Callable[[], Tensor], ...]
    copies_g: bool
    copies_kept: bool
    scale: float
    device: int | None
    current_device: Callable[[], int]
    alike: Alike
    how: _How

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        g: Tensor,
        scale: float | None,
    ) -> Gradients:
        if self.copies_g:
            g = _copied(g)
        if self.copies_kept:
            o, lse = _copied(o), _copied(lse)
        made = [new() for new in self.new]
        self.launch(q, k, v, o, lse, g, *made, self.scale if scale is None else float(scale))
        dq, dk, dv = (x if want else None for x, want in zip(made, self.how.wanted, strict=True))
        return dq, dk, dv


@dataclass(eq=False, repr=False)
class GradientKernel(Served):
    """dq, dk, dv = kernel(q, k, v, o, lse, g): the gradients of exact attention.

    q, k, v as for the forward kernel; o (B, Hq, Sq, Dv) and lse (B, Hq, Sq) as that left them; g,
    the gradient of o. What a kernel sums by atomic additions may differ in the last bits from run
    to run; with `deterministic`, and while torch.use_deterministic_algorithms is on, only kernels
    run that repeat bit for bit.
    """

    deterministic: bool = field(default=False, kw_only=True)
    _plans: dict[Any, _Plan] = field(default_factory=dict, repr=False)
    _last: _Plan | None = field(default=None, repr=False)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        g: Tensor,
        *,
        scale: float | None = None,
        wanted: Wanted = ALL,
    ) -> Gradients:
        """The gradients of q, k and v, dense, in their dtype; None for those not `wanted`.

        scale: the forward call's, by default 1/sqrt(D). Rows that see no key have no part where
        their g is finite. Autograd sees nothing of this call: what it returns has no graph.
        """
        try:
            plan = self._plan((q, k, v, o, lse, g), scale, wanted)
        except AttributeError:  # something is no tensor
            _check_kept(inputs.shape_of(q, k, v), q, g, o, lse)
            raise
        if plan.device is None or plan.current_device() == plan.device:
            return plan.run(q, k, v, o, lse, g, scale)
        import torch

        with torch.cuda.device(plan.device):
            return plan.run(q, k, v, o, lse, g, scale)

    def _plan(self, given: Given, scale: float | None, wanted: Wanted) -> _Plan:
        from torch import are_deterministic_algorithms_enabled

        q, k, v, o, lse, g = given
        dq, dk, dv = wanted
        how = _How(
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) % inputs.ALIGNMENT == 0,
            (o.data_ptr() | lse.data_ptr()) % inputs.ALIGNMENT == 0,
            g.data_ptr() % inputs.ALIGNMENT == 0,
            scale is None or bool(scale >= inputs.LEAST_SCALE),
            self.deterministic or are_deterministic_algorithms_enabled(),
            (dq, dk, dv),
        )
        last = self._last
        if last is not None and last.how == how and last.alike(*given):
            return last
        key = (*map(kind_of, given), how)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(given, how)
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        self._last = plan
        return plan

    def _make_plan(self, given: Given, how: _How) -> _Plan:
        q, k, v, o, lse, g = given
        shape = inputs.shape_of(q, k, v)
        _check_kept(shape, q, g, o, lse)
        if not q.shape[1]:
            made = self.problem.shape
            shape = replace(shape, heads_q=made.heads_q, heads_kv=made.heads_kv)
        inputs.check_promise(self.problem, shape)
        self._check_device(q)
        layout = inputs.layout_of(q, k, v)
        # torch has gradients of one number for all of a sum's terms, and negated ones.
        unfit = layout == "aligned16" and inputs.layout_of(g, g, g) == "any"
        copies_g = unfit or g.is_neg()
        call = inputs.problem_like(self.problem, shape, layout, not how.positive)
        chosen = self._chosen_for(call, repeatable=how.repeatable)
        assert chosen.prepare is not None
        names = [name for name, want in zip(GRADIENTS, how.wanted, strict=True) if want]
        written = {x for e in chosen.program.entries if e.is_for(names) for x in e.gives}
        shapes = (
            tuple(x.shape) if name in written else (0,)
            for name, x in zip(GRADIENTS, (q, k, v), strict=True)
        )
        laid = g.new_empty(g.shape) if copies_g else g
        return _Plan(
            chosen.prepare(q, k, v, laid, wanted=names),
            tuple(allocate(one, q.dtype, q.device) for one in shapes),
            copies_g,
            not how.aligned_kept,
            1 / math.sqrt(shape.head_dim),
            q.device.index if q.is_cuda else None,
            current_device(),
            alike(*given),
            how,
        )


def _copied(x: Tensor) -> Tensor:
    """Dense, at an address of its own, and of what it holds where it is a negated view."""
    import torch

    return x.resolve_neg().clone(memory_format=torch.contiguous_format)


def _check_kept(shape: Shape, q: Tensor, g: Tensor, o: Tensor, lse: Tensor) -> None:
    """Raises BadInput for what no forward call of q, k and v left."""
    import torch

    rows = (shape.batch, q.shape[1], shape.seq_q)
    for name, got, dims, dtype in (
        ("o", o, (*rows, shape.head_dim_v), q.dtype),
        ("g", g, (*rows, shape.head_dim_v), q.dtype),
        ("lse", lse, rows, torch.float32),
    ):
        if not isinstance(got, torch.Tensor):
            raise BadInput(f"{name} must be a tensor, got {type(got).__name__}.")
        if tuple(got.shape) != dims or got.dtype != dtype or got.device != q.device:
            raise BadInput(
                f"{name} must be {dims} of {dtype} on {q.device}, got {tuple(got.shape)} of"
                f" {got.dtype} on {got.device}.",
                "Pass what kernel(q, k, v, return_lse=True) gave, and the gradient of its output.",
            )
        if name == "g":
            continue
        if got.is_neg():
            raise BadInput(f"{name} is a negated view.", f"Pass {name}.resolve_neg().")
        if not got.is_contiguous():
            raise BadInput(f"{name} is not contiguous.", f"Pass {name}.contiguous().")
