"""What a peer is: somebody else's exact attention, pinned to one backend and named with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from fagen.problem import Problem

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v, scale -> O
Gradients = tuple[Tensor, Tensor, Tensor]  # dQ, dK, dV
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
    no_backward: why it has the forward pass alone.
    """

    key: str
    name: Callable[[], str]
    attention: Callable[[Problem], Attention]
    absent: Callable[[], str | None] = never_absent
    pin: Pin = nullcontext
    keeps_scores: bool = False
    no_backward: str | None = None


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

    def ready(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float
    ) -> Callable[[], Gradients]:
        """Runs the forward pass, and returns the backward pass for g, the gradient of O, alone.

        g is laid out in memory as the peer's own O, as the gradient of what a model does with O
        is: some backends copy any other, and no copy is timed. No pin is needed around the call:
        the forward pass chose whose backward pass it is.

        The call may be captured in a CUDA graph on any stream. Autograd runs each operation of a
        backward pass on the stream of its forward one, and makes that stream wait for the
        caller's before the first and the caller's for it after the last ("Stream semantics of
        backward passes" in torch's notes on CUDA). In a capture that forks the captured stream
        and joins it again. The default stream can't be captured and would end it with an error,
        so the forward pass runs on another: one for all, so that launches in one graph reuse
        each other's memory, which torch keeps by stream.

        Raises NotImplementedError where the backend has no backward pass.
        """
        leaves = (q.detach(), k.detach(), v.detach())
        for leaf in leaves:
            leaf.requires_grad_()
        with self.pin(), torch.enable_grad(), _aside(q.device):
            out = self.attend(*leaves, scale)
            laid = g if g.stride() == out.stride() else torch.empty_like(out).copy_(g)
        if not out.requires_grad:
            raise NotImplementedError("it has no backward pass: autograd does not know its output")

        def differentiate() -> Gradients:
            dq, dk, dv = torch.autograd.grad(out, leaves, laid, retain_graph=True)
            return dq, dk, dv

        return differentiate


def peer_launch(
    peer: Peer, problem: Problem, inputs: Sequence[tuple[Tensor, ...]]
) -> Callable[[int], None]:
    """Launches on input set number i. inputs: q, k, v; for a backward pass and g, the gradient.

    The first launch of a backward pass runs the forward passes of all sets, so it must not be
    captured: as the clocks launch once before they capture. What they keep lives as long as this.
    """
    scale = problem.shape.head_dim**-0.5
    ready: list[Callable[[], Gradients]] = []

    def attend(number: int) -> None:
        q, k, v, *_ = inputs[number]
        peer(q, k, v, scale)

    def differentiate(number: int) -> None:
        if not ready:
            ready[:] = [peer.ready(q, k, v, g, scale) for q, k, v, g in inputs]
        ready[number]()

    return differentiate if problem.direction == "backward" else attend


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On a stream that is not the default one, after what was launched so far, and before what
    comes next."""
    if device.type != "cuda":
        yield
        return
    caller = torch.cuda.current_stream(device)
    stream = _stream(caller.device)
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        yield
    caller.wait_stream(stream)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
