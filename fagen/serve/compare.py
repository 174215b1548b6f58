"""A shape's kernel raced against its peers on this machine, by kernel time and by call time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fagen.generate.families import repeats
from fagen.judge.calls import Caller, CallTiming, race_calls
from fagen.judge.measure import LaunchSet, MeasurePolicy, one_line, race
from fagen.outcome import Timing
from fagen.problem import Problem
from fagen.serve.gradient import GradientKernel
from fagen.serve.kernel import Kernel
from fagen.serve.library import get

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fagen.judge.measure import Clock
    from fagen.judge.peers import Peer
    from fagen.judge.peers.lineup import Inputs

ROUNDS = 11
KERNEL = "fagen"
DETERMINISTIC = "fagen-deterministic"  # raced where the kernel's gradients differ in the last bits


@dataclass(frozen=True)
class Comparison:
    """Times by name, the kernel's as KERNEL; missing: who could not run, with the reason.

    timings: kernel times, taken by `policy`; calls: call times. Sample i of all in one of them
    was taken in round i. deterministic: the kernel timed as DETERMINISTIC.
    """

    problem: Problem
    kernel: Kernel | GradientKernel
    timings: dict[str, Timing]
    calls: dict[str, CallTiming]
    missing: dict[str, str]
    policy: str
    deterministic: Kernel | GradientKernel | None = field(default=None, kw_only=True)


def compare(
    problem: Problem,
    device: str | torch.device | None,
    db: str | None,
    *,
    backends: Sequence[str] | None = None,
    policy: MeasurePolicy | None = None,
    rounds: int = ROUNDS,
    clock: Clock | None = None,
) -> Comparison:
    """Kernel and peers in turns: kernel time on rotating inputs, then call time on one set.

    Beside a kernel whose gradients may differ from run to run, the one of `deterministic=True`.
    backends: keys of peers, by default `peers.STANDARD`. Raises NoDevice.
    """
    import torch

    from fagen.judge.peers import STANDARD, draw_inputs, peer_launch, peers
    from fagen.serve.place import place_of

    policy = policy or MeasurePolicy()
    place = place_of(device, None, db)
    kernel = get(problem, device=place.device, db=db)
    where = place.device
    assert where is not None
    kernels: dict[str, Kernel | GradientKernel] = {KERNEL: kernel}
    if problem.direction == "backward" and not repeats(kernel.config):
        kernels[DETERMINISTIC] = get(problem, device=where, db=db, deterministic=True)
    failed: dict[str, str] = {}
    with torch.no_grad():
        count = policy.input_sets(problem, place.target.l2_bytes)
        sets = [draw_inputs(problem, where, seed) for seed in range(count)]
        chosen = STANDARD if backends is None else backends
        found, missing = peers(problem, where, chosen, sets[0])
        ours = {name: _kernel_calls(problem, one, sets, db) for name, one in kernels.items()}
        launches = {name: launch for name, (launch, _) in ours.items()}
        launches |= {name: peer_launch(peer, problem, sets) for name, peer in found.items()}
        timings = race(
            launches, policy, rounds, device=where, sets=count, clock=clock, failed=failed
        )
        callers = {name: Caller(call) for name, (_, call) in ours.items() if name in timings}
        for name in (name for name in found if name in timings):
            try:
                callers[name] = _peer_caller(found[name], problem, sets[0])
            except RuntimeError as error:  # a forward pass that lacks memory by now
                failed[name] = one_line(error)
        calls = race_calls(callers, rounds, device=where, failed=failed)
    return Comparison(
        problem,
        kernel,
        timings,
        calls,
        {**missing, **failed},
        policy.name,
        deterministic=kernels.get(DETERMINISTIC),
    )


def _kernel_calls(
    problem: Problem, kernel: Kernel | GradientKernel, sets: list[Inputs], db: str | None
) -> tuple[LaunchSet, Callable[[], Any]]:
    """The kernel on each input set, and what a user calls, on the first one.

    Of a backward pass that is autograd's call, as the peers' is.
    """
    if not isinstance(kernel, GradientKernel):
        return _on_sets(kernel, sets), partial(kernel, *sets[0])
    from fagen.judge.peers import Peer

    forward = get(
        replace(problem, direction="forward"),
        device=kernel.device,
        db=db,
        deterministic=kernel.deterministic,
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return forward(q, k, v, scale=scale)  # type: ignore[return-value]

    given = []
    for q, k, v, g in sets:
        o, lse = forward(q, k, v, return_lse=True)
        given.append((q, k, v, o, lse, g))
    q, k, v, g = sets[0]
    ready = Peer(KERNEL, KERNEL, attend).ready(q, k, v, g, problem.shape.head_dim**-0.5)
    return _on_sets(kernel, given), ready


def _on_sets(kernel: Callable[..., Any], sets: Sequence[tuple[Tensor, ...]]) -> LaunchSet:
    def launch(number: int) -> None:
        kernel(*sets[number])

    launch(0)  # makes what these tensors need, before any graph is captured
    return launch


def _peer_caller(peer: Peer, problem: Problem, inputs: Inputs) -> Caller:
    scale = problem.shape.head_dim**-0.5
    if problem.direction == "backward":
        q, k, v, g = inputs
        return Caller(peer.ready(q, k, v, g, scale))
    q, k, v = inputs
    return Caller(partial(peer.attend, q, k, v, scale), peer.pin)
