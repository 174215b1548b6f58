"""The gate of a backward pass: right gradients go through, wrong ones do not, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen.judge import gradients, reference
from fagen.judge.gradients import KINDS
from fagen.judge.verify import Gate
from fagen.outcome import Verdict
from fagen.problem import Features, Problem, make_problem

TILE = (32, 16)
CPU = torch.device("cpu")
# Of outputs, inputs and the scale; what it returns is ignored.
Spoil = Callable[[list[Tensor], list[Tensor], float], object]


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def backward(causal: str = "none", **words: Any) -> Problem:
    align = "top_left" if causal == "none" else causal
    words = {"heads": 4, "kv_heads": 2, "dtype": "fp16", **words}
    forward = make_problem(96, 24, causal=causal != "none", causal_align=align, **words)
    return replace(forward, direction="backward")


@dataclass
class Right:
    """Computes gradients as the baseline does; `spoil` makes them wrong."""

    features: Features
    spoil: Spoil = lambda outputs, inputs, scale: None

    def __call__(self, *given: Any) -> None:
        q, k, v, _, _, g, *outputs, scale = given
        found = reference.baseline_gradients(q, k, v, g, self.features, scale)
        for output, one in zip(outputs, found, strict=True):
            output.copy_(one)
        self.spoil(outputs, list(given[:6]), scale)


def judged(problem: Problem, spoil: Spoil | None = None, level: Any = "quick") -> Verdict:
    launch = Right(problem.features) if spoil is None else Right(problem.features, spoil)
    return Gate(problem, CPU).check(launch, TILE, {}, level=level)


@pytest.mark.parametrize("layout", ["aligned16", "any"])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_right_gradients_pass(dtype: str, causal: str, layout: str) -> None:
    verdict = judged(backward(causal, dtype=dtype, layout=layout), level="full")
    assert verdict.passed, verdict.worst
    assert {check.name.partition("[")[0] for check in verdict.checks} == set(KINDS)


def _five_percent(which: int) -> Spoil:
    return lambda outputs, inputs, scale: outputs[which].mul_(1.05)


def _beside(outputs: list[Tensor], inputs: list[Tensor], scale: float) -> None:
    one = outputs[1]
    if one.numel():
        one.as_strided((1,), (1,), one.storage_offset() + one.numel()).fill_(1.0)


def _unwritten(outputs: list[Tensor], inputs: list[Tensor], scale: float) -> None:
    dv = outputs[2]
    dv.copy_(torch.where(torch.arange(dv.shape[2])[:, None] == dv.shape[2] - 1, POISONED, dv))


POISONED = torch.tensor(0x7ED5, dtype=torch.int16).view(torch.float16)


def _input_changed(outputs: list[Tensor], inputs: list[Tensor], scale: float) -> None:
    if inputs[4].numel():
        inputs[4][0, 0, 0] += 1.0  # LSE


def _last_head_alone(outputs: list[Tensor], inputs: list[Tensor], scale: float) -> None:
    """dK and dV of the last of the query heads that share a key head."""
    q, k, v, _, _, g = inputs
    ratio = q.shape[1] // k.shape[1]
    last = slice(ratio - 1, None, ratio)
    found = reference.baseline_gradients(
        q[:, last], k, v, g[:, last], Features(), q.shape[3] ** -0.5
    )
    outputs[1].copy_(found[1])
    outputs[2].copy_(found[2])


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (_five_percent(0), "dq_l2"),
        (_five_percent(1), "dk_l2"),
        (_five_percent(2), "dv_l2"),
        (lambda outputs, inputs, scale: outputs[0].zero_(), "dq_max"),
        (_last_head_alone, "dv_max"),
        (_beside, "guards"),
        (_unwritten, "unwritten"),
        (_input_changed, "inputs"),
    ],
)
def test_what_is_wrong_is_caught_and_named(spoil: Any, kind: str) -> None:
    verdict = judged(backward(), spoil)
    assert not verdict.passed
    assert kind in {c.name.partition("[")[0] for c in verdict.checks if not c.passed}


def test_a_mask_that_is_forgotten_is_caught() -> None:
    problem = backward("top_left")
    gate = Gate(problem, CPU)
    assert not gate.check(Right(Features()), TILE, {}, level="quick").passed


def test_a_truth_too_dear_is_taken_of_some_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gradients.TRUTH_FLOPS, "cpu", 3e6)
    problem = backward(batch=2, heads=12, kv_heads=6)
    assert judged(problem, level="full").passed
    spoilt = judged(problem, lambda outputs, *_: outputs[1][-1:, -1:].mul_(1.2), level="full")
    assert not spoilt.passed


@pytest.mark.parametrize(("error", "passes"), [(3e-5, True), (3e-3, False)])
def test_where_nothing_but_rounding_is_right_errors_are_absolute(
    error: float, passes: bool
) -> None:
    """Values that are all equal have gradients of zero, and float64 gives 1e-17 for them."""
    dice = torch.Generator().manual_seed(0)
    truth = torch.randn(2, 2, 40, 24, generator=dice, dtype=torch.float64) * 1e-17
    right = gradients.RightGradients((truth, truth, truth), None)
    base = [torch.zeros_like(truth) for _ in range(3)]
    found = [torch.full_like(truth, error) for _ in range(3)]
    budgets = [
        gradients.FACTOR * float(of_base) + gradients.SLACK for of_base in right.judged(base)
    ]
    errors = [float(one) for one in right.judged(found)]
    fits = [one <= most for one, most in zip(errors, budgets, strict=True)]
    assert fits == [passes] * 6
