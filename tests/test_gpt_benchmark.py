"""benchmarks/gpt.py with a model small enough for a CPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest
import torch
from torch import Tensor

from serve_fixtures import FakeMachine, faked

SIZES = {"LAYERS": 1, "WIDTH": 32, "HEADS": 2, "WORDS": 16, "LEARNING_RATE": 3e-2}


@pytest.fixture
def gpt(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    module = importlib.import_module("gpt")
    for name, value in SIZES.items():
        monkeypatch.setattr(module, name, value)
    yield module


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return faked(monkeypatch)


def test_fagen_and_eager_learn_alike_and_a_seed_changes_more(
    gpt: ModuleType, machine: FakeMachine
) -> None:
    found = gpt.compare(gpt.Size(batch=4, seq=32, steps=30, rounds=1), "cpu")
    assert found["loss_difference"] < found["seed_difference"]
    for losses in found["losses"].values():
        assert len(losses) == 30
        assert mean(losses[-5:]) < log(SIZES["WORDS"]) - 0.5  # of the first step: nothing known
    directions = {r.program.problem.direction for r in machine.loaded if r.launches}
    assert directions == {"forward", "backward"}


def test_a_wrong_gradient_shows(gpt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gpt.eager(q, k.detach(), v * 0.5 + v.detach() * 0.5)

    monkeypatch.setattr(gpt, "of_fagen", wrong)
    found = gpt.compare(gpt.Size(batch=4, seq=32, steps=30, rounds=1), "cpu")
    right = gpt.losses(gpt.eager, gpt.Size(4, 32, 30, 1), 0, "cpu")
    assert found["losses"]["eager"] == pytest.approx(right, rel=1e-4)
    assert found["loss_difference"] > 10 * mean(
        abs(a - b) for a, b in zip(right, found["losses"]["eager"], strict=True)
    )


def test_a_text_is_the_chain_that_its_seed_draws(gpt: ModuleType) -> None:
    size = gpt.Size(batch=3, seq=200, steps=1, rounds=1)
    first, again, other = (gpt.texts(size, 2, seed, "cpu") for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    pairs = {(int(a), int(b)) for row in first[0] for a, b in pairwise(row)}
    followers = [sum(a == word for a, _ in pairs) for word in range(SIZES["WORDS"])]
    assert max(followers) <= gpt.LIKELY
