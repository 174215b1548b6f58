"""torch.ops.fagen: a kernel's call as an operator, for torch.compile and other graphs.

A graph holds a kernel by its name: what `fagen.get` was asked for, as JSON. Another process, or a
call on another device, finds its own kernel by it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fagen.problem import problem_from_dict
from fagen.serve.autograd import refuse_twice

if TYPE_CHECKING:
    from fagen.serve.kernel import Kernel

compiling = torch.compiler.is_compiling

_kernels: dict[tuple[str, torch.device | None], Kernel] = {}


def offer(kernel: Kernel) -> str:
    """The name under which a kernel's operator finds it."""
    words = {"problem": kernel.problem.to_dict(), **kernel.found_by}
    name = json.dumps(words, sort_keys=True)
    _kernels[name, kernel.device] = kernel
    return name


def traced(
    q: Tensor, k: Tensor, v: Tensor, name: str, scale: float | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """A kernel's call while torch makes a graph of it."""
    o, lse = torch.ops.fagen.attention(q, k, v, name, scale)
    return (o, lse) if return_lse else o


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
def attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    g: Tensor,
    kernel: str,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    dq, dk, dv = _kernel(kernel, q.device).gradient(q, k, v, o, lse, g, scale=scale)
    assert dq is not None and dk is not None and dv is not None
    return dq, dk, dv


@attention_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    g: Tensor,
    kernel: str,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.kernel, ctx.scale = inputs
    o, lse = output
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if g is None:
        return (None,) * 5
    found = torch.ops.fagen.attention_backward(*ctx.saved_tensors, g, ctx.kernel, ctx.scale)
    return *found, None, None


def _refuse(ctx: Any, *_: Tensor) -> None:
    refuse_twice()


attention.register_autograd(_differentiate, setup_context=_keep)
attention_backward.register_autograd(_refuse, setup_context=lambda ctx, inputs, output: None)
