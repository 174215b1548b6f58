"""A shape's kernel raced against torch's own attention on this machine, interleaved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fagen.judge.measure import LaunchSet, MeasurePolicy, race
from fagen.outcome import Timing
from fagen.problem import Problem
from fagen.serve.kernel import Kernel
from fagen.serve.library import get

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fagen.judge.measure import Clock
    from fagen.judge.peers import Peer

ROUNDS = 15
KERNEL = "fagen"


@dataclass(frozen=True)
class Comparison:
    """timings by name, the kernel's as KERNEL; missing: who could not run, with the reason."""

    kernel: Kernel
    timings: dict[str, Timing]
    missing: dict[str, str]
    policy: str


def compare(
    problem: Problem,
    device: str | torch.device | None,
    db: str | None,
    *,
    policy: MeasurePolicy | None = None,
    rounds: int = ROUNDS,
    clock: Clock | None = None,
) -> Comparison:
    """Kernel and peers in turns, on rotating inputs. Raises NoDevice."""
    import torch

    from fagen.judge.peers import peers
    from fagen.serve.place import place_of

    policy = policy or MeasurePolicy()
    place = place_of(device, None, db)
    kernel = get(problem, device=place.device, db=db)
    assert place.device is not None
    with torch.no_grad():
        found, missing = peers(problem, place.device)
        sets = [
            _inputs(problem, place.device, seed)
            for seed in range(policy.input_sets(problem, place.target.l2_bytes))
        ]
        contestants = {KERNEL: _kernel_launch(kernel, sets)}
        contestants |= {name: _peer_launch(peer, problem, sets) for name, peer in found.items()}
        failed: dict[str, str] = {}
        timings = race(
            contestants,
            policy,
            rounds,
            device=place.device,
            sets=len(sets),
            clock=clock,
            failed=failed,
        )
    return Comparison(kernel, timings, {**missing, **failed}, policy.name)


def _inputs(problem: Problem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    s = problem.shape
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[s.dtype]
    dice = torch.Generator(device).manual_seed(seed)
    q, k, v = (
        torch.randn(size, generator=dice, device=device, dtype=dtype)
        for size in (
            (s.batch, s.heads_q, s.seq_q, s.head_dim),
            (s.batch, s.heads_kv, s.seq_kv, s.head_dim),
            (s.batch, s.heads_kv, s.seq_kv, s.head_dim_v),
        )
    )
    return q, k, v


def _kernel_launch(kernel: Kernel, sets: list[tuple[Tensor, Tensor, Tensor]]) -> LaunchSet:
    kernel(*sets[0])  # makes what these tensors need, before any graph is captured

    def launch(number: int) -> None:
        kernel(*sets[number])

    return launch


def _peer_launch(
    peer: Peer, problem: Problem, sets: list[tuple[Tensor, Tensor, Tensor]]
) -> LaunchSet:
    scale = problem.shape.head_dim**-0.5

    def launch(number: int) -> None:
        peer(*sets[number], scale)

    return launch
