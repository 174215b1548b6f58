"""torch.ops.fagen: a kernel's call as an operator, for torch.compile and other graphs.

A graph holds a kernel by its name: what `fagen.get` was asked for, as JSON. Another process, or a
call on another device, finds its own kernel by it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fagen.errors import BadInput
from fagen.problem import problem_from_dict
from fagen.serve.autograd import refuse_twice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fagen.serve.gradient import Gradients
    from fagen.serve.kernel import Kernel

_kernels: dict[tuple[str, torch.device | None], Kernel] = {}


def unusual() -> bool:
    """Whether a call may need more than to be run."""
    return is_watched() or forward_ad._current_level >= 0


def is_watched() -> bool:
    """Whether torch makes a graph of what is called, or wants to see each operator."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def refuse_tangents(*tensors: Tensor) -> None:
    """Raises BadInput for one with a tangent, whose derivative would be lost."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):  # type: ignore[no-untyped-call]
        raise BadInput(
            "fagen has no forward-mode derivative.",
            "Use torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for such a step.",
        )


def offer(kernel: Kernel) -> str:
    """The name under which a kernel's operator finds it."""
    words = {"problem": kernel.problem.to_dict(), **kernel.asked.words}
    name = json.dumps(words, sort_keys=True)
    _kernels[name, kernel.device] = kernel
    return name


def traced(
    q: Tensor, k: Tensor, v: Tensor, name: str, scale: float | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """A kernel's call while torch makes a graph of it."""
    o, lse = torch.ops.fagen.attention(q, k, v, name, scale)
    return (o, lse) if return_lse else o


def traced_gradient(
    *given: Tensor, name: str, scale: float | None, wanted: Sequence[bool]
) -> Gradients:
    """q, k, v, o, lse, g: the gradients that are wanted."""
    found = torch.ops.fagen.attention_backward(*given, name, scale, list(wanted))
    dq, dk, dv = (x if want else None for x, want in zip(found, wanted, strict=True))
    return dq, dk, dv


def _kernel(name: str, device: torch.device) -> Kernel:
    found = _kernels.get((name, device))
    if found is None:
        from fagen.serve.library import get

        words = json.loads(name)
        found = get(problem_from_dict(words.pop("problem")), device=device, **words)
    return found


@torch.library.custom_op("fagen::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, kernel: str, scale: float | None
) -> tuple[Tensor, Tensor]:
    """O and LSE."""
    o, lse = _kernel(kernel, q.device).run(q, k, v, scale, True)
    return o, lse


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, kernel: str, scale: float | None) -> tuple[Tensor, Tensor]:
    rows = q.shape[:3]
    return q.new_empty((*rows, v.shape[3])), q.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("fagen::attention_backward", mutates_args=())
def attention_backward(  # noqa: PLR0913 (an operator takes tensors one by one)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    g: Tensor,
    kernel: str,
    scale: float | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; an empty tensor for one that is not wanted."""
    gradient = _kernel(kernel, q.device).gradient
    found = gradient(q, k, v, o, lse, g, scale=scale, wanted=tuple(wanted))  # type: ignore[arg-type]
    dq, dk, dv = (q.new_empty(0) if x is None else x for x in found)
    return dq, dk, dv


@attention_backward.register_fake
def _(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    g: Tensor,
    kernel: str,
    scale: float | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        x.new_empty(x.shape if want else 0) for x, want in zip((q, k, v), wanted, strict=True)
    )
    return dq, dk, dv


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.kernel, ctx.scale = inputs
    o, lse = output
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 5
    wanted = ctx.needs_input_grad[:3]
    given = *ctx.saved_tensors, g
    return *traced_gradient(*given, name=ctx.kernel, scale=ctx.scale, wanted=wanted), None, None


def _refuse(ctx: Any, *_: Tensor) -> None:
    refuse_twice()


attention.register_autograd(_differentiate, setup_context=_keep)
attention_backward.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)
