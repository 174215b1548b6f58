"""Whether tensors are of the kind that earlier ones were, found out in one call.

Reading dtype, device, sizes, strides and requires_grad of three tensors in Python takes 1.3 us;
the object by which torch.compile guards its code compares all of them in 0.3 us. It is not a
public interface, so what it says is tried on small tensors first, and it is left out where it
does not see a difference that it must see.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Alike = Callable[..., bool]


def alike(*tensors: Tensor) -> Alike:
    """Gives True only for as many tensors that are like these in all but address and contents.

    It may give False for some that are, such as the same tensor twice.
    """
    guards = _guards()
    return _never if guards is None else _check_of(guards, *tensors)


@lru_cache(maxsize=1)
def _guards() -> Any:
    """torch's class for it, or None where it is missing or can't be trusted."""
    import torch

    module = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    guards = getattr(module, "TensorGuards", None)
    return guards if guards is not None and sees_every_difference(guards) else None


def sees_every_difference(guards: Any) -> bool:
    """Whether the class tells tensors apart wherever a kernel has to."""
    import torch

    try:
        with torch.inference_mode(mode=False), torch.enable_grad():
            return _is_right_on_small_tensors(guards)
    except (TypeError, RuntimeError, AttributeError):
        return False


def _is_right_on_small_tensors(guards: Any) -> bool:
    import torch

    zeros = partial(torch.zeros, device="cpu", dtype=torch.float32)
    first, second, third = (zeros(2, 4, 6, 8) for _ in range(3))
    check = _check_of(guards, first, second, third)
    others = (
        first.half(),
        first.to("meta"),
        zeros(2, 4, 5, 8),
        zeros(2, 4, 6),
        zeros(2, 6, 4, 8).transpose(1, 2),
        zeros(2, 4, 6, 8).requires_grad_(),
        [0.0],
    )
    unlike = [(o, second, third) for o in others] + [(first, second, o) for o in others]
    return check(zeros(2, 4, 6, 8), second, third) is True and not any(check(*u) for u in unlike)


def _check_of(guards: Any, *tensors: Tensor) -> Alike:
    sizes = [list(t.shape) for t in tensors]
    strides = [list(t.stride()) for t in tensors]
    made = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Alike = made.check
    return check


def _never(*_: object) -> bool:
    return False
