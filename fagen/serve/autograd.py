"""A kernel's call as torch's autograd sees it: one saved LSE, and the tuned backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fagen.errors import BadInput

if TYPE_CHECKING:
    from fagen.serve.gradient import Gradients
    from fagen.serve.kernel import Kernel

is_on = torch.is_grad_enabled


def attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, scale: float | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`Kernel.run` with gradients: q, k, v, o and LSE are kept for them, and no scores."""
    o, lse = _Attend.apply(q, k, v, kernel, scale)  # type: ignore[no-untyped-call]
    return (o, lse) if return_lse else o


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        o, lse = kernel.run(q, k, v, scale, True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # zeros for LSE at each backward call, by a kernel
        ctx.call = kernel, scale
        return o, lse

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:  # nothing depends on O
            return (None,) * 5
        kernel, scale = ctx.call
        wanted = ctx.needs_input_grad[:3]
        if torch.compiler.is_compiling():  # a compiled backward pass of an eager forward one
            return *kernel.traced_gradient(*ctx.saved_tensors, g, scale, wanted), None, None
        compute = partial(kernel.gradient, scale=scale, wanted=wanted)
        if not is_on():  # which it is where a second derivative is asked for
            return *compute(*ctx.saved_tensors, g), None, None
        found = _Gradients.apply(compute, *ctx.saved_tensors, g)  # type: ignore[no-untyped-call]
        return *found, None, None


class _Gradients(torch.autograd.Function):
    """A step of its own, so that a second derivative is refused, not wrong."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Gradients], *given: Tensor) -> Gradients:
        return compute(*given)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        refuse_twice()


def refuse_twice() -> None:
    """Raises BadInput."""
    raise BadInput(
        "fagen's gradients have no gradients of their own (create_graph, double backward).",
        "Use torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for such a step.",
    )
