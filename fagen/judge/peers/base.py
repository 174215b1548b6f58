"""What a peer is: somebody else's exact attention, pinned to one backend and named with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from fagen.problem import Problem

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v, scale -> O
Pin = Callable[[], AbstractContextManager[object]]


def never_absent() -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One way to compute attention that is not fagen's.

    key: its word on the command line. name: with versions, as in results. attention: for one
    problem; raises NotImplementedError with a sentence for a problem that it has no mask for.
    absent: why it can't be used here, with the command to install it, or None. pin: entered around
    calls so that torch takes this backend and no other. keeps_scores: in memory, as one matrix.
    """

    key: str
    name: Callable[[], str]
    attention: Callable[[Problem], Attention]
    absent: Callable[[], str | None] = never_absent
    pin: Pin = nullcontext
    keeps_scores: bool = False


@dataclass(frozen=True)
class Peer:
    """A backend that runs a problem. Tensors as everywhere in fagen: (B, H, S, D).

    `attend` is the bare call: it is pinned only within `pin()`, which takes 20 us of host time
    that no user pays. Calling the peer does both.
    """

    backend: str
    name: str
    attend: Attention = field(compare=False)
    pin: Pin = field(compare=False, default=nullcontext)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        with self.pin():
            return self.attend(q, k, v, scale)
