"""A Runner that computes with torch on the CPU, and a gate that only counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fagen.generate.program import Program
from fagen.judge.reference import truth_gradients
from fagen.outcome import Check, Verdict
from fagen.problem import Problem
from fagen.serve import inputs, library
from fagen.target import Target

if TYPE_CHECKING:
    import pytest


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
    wanted: list[tuple[str, ...]] = field(default_factory=list)  # of a backward pass

    def launch(self, *given: Any) -> None:
        q, k, v, o, lse, *backward, scale = given
        self._check_promises(given[:-1])
        self.launches.append(tuple(q.shape))
        features = self.program.problem.features
        if backward:
            g, *outputs = backward
            for out, right in zip(
                outputs, truth_gradients(q, k, v, g, features, scale), strict=True
            ):
                if out.shape == right.shape:  # else it is not wanted
                    out.copy_(right)
            return
        right, right_lse = attention(q, k, v, features.causal, scale)
        o.copy_(right)
        lse.copy_(right_lse)

    def _check_promises(self, tensors: tuple[Tensor, ...]) -> None:
        """What kernels rely on; a GPU meets a broken promise with a fault, or a wrong result."""
        q, k, v, _, _, *backward = tensors
        if self.program.problem.layout == "aligned16":
            assert inputs.layout_of(q, k, v) == "aligned16"
            assert all(inputs.layout_of(g, g, g) == "aligned16" for g in backward[:1])
        outputs = (*tensors[3:5], *backward[1:])
        assert all(x.data_ptr() % 16 == 0 and x.is_contiguous() for x in outputs)
        assert not any(x.is_neg() for x in tensors)

    def prepare(self, *_: Tensor, wanted: Any = ()) -> Any:
        self.wanted.append(tuple(wanted))
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


def faked(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """One that all kernels of this process are loaded on, none of them remembered."""
    fake = FakeMachine()
    library.forget()
    library._warned.clear()
    monkeypatch.setattr("fagen.run.kernel.load", fake.load)
    monkeypatch.setattr("fagen.judge.verify.Gate", fake.gate)
    return fake
