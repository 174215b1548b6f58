"""A Runner that computes with torch on the CPU, and a gate that only counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fagen.generate.program import Program
from fagen.outcome import Check, Verdict
from fagen.problem import Problem
from fagen.target import Target


def attention(q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float) -> tuple[Tensor, Tensor]:
    """The formula in fp64: output in q's dtype and the natural LSE in fp32."""
    group = q.shape[1] // max(1, k.shape[1])
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = scale * q.double() @ k.transpose(-1, -2)
    if causal != "none":
        shift = k.shape[2] - q.shape[2] if causal == "bottom_right" else 0
        rows, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        scores = scores.masked_fill(keys > rows + shift, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return (p @ v).to(q.dtype), lse.float()


@dataclass
class FakeRunner:
    """Computes what its program's problem says, and remembers which sizes it was called with."""

    program: Program
    target: Target
    device: torch.device
    launches: list[tuple[int, ...]] = field(default_factory=list)

    def launch(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
    ) -> None:
        self.launches.append(tuple(q.shape))
        causal = self.program.problem.features.causal
        right, right_lse = attention(q, k, v, causal, scale)
        o.copy_(right)
        lse.copy_(right_lse)

    def prepare(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.launch

    def launch_poisoned(self, *tensors: Any) -> None:
        self.launch(*tensors)


@dataclass
class FakeMachine:
    """Stands for `run.kernel.load` and `judge.verify.Gate`."""

    loaded: list[FakeRunner] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)  # families that fail the gate

    def load(self, program: Program, target: Target, device: torch.device) -> FakeRunner:
        runner = FakeRunner(program, target, device)
        self.loaded.append(runner)
        return runner

    def gate(self, problem: Problem, device: torch.device) -> FakeGate:
        return FakeGate(self)


@dataclass
class FakeGate:
    machine: FakeMachine

    def check(
        self, launch: Any, tile: tuple[int, int], limits: dict[str, range], *, level: str
    ) -> Verdict:
        program = launch.__self__.program
        self.machine.checked.append(program.key)
        error = 1.0 if program.config.family in self.machine.wrong else 0.0
        return Verdict((Check("o_max", error, 0.5),), "fake")
