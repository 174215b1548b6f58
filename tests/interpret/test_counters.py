"""A kernel that claims its tiles through a counter, with a Runner around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fagen.run.kernel import LOG2_E, load
from fagen.target import preset
from launch_programs import DIM, counting, family

if TYPE_CHECKING:
    import pytest


def test_the_counter_of_a_launch_is_left_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fagen.run.kernel.family_of", lambda config: family(persistent=True))
    runner = load(counting(), preset("h200"), "cpu")
    assert runner.paths == ("interpreter",)
    q = torch.randn(1, 3, 128, DIM, dtype=torch.bfloat16)
    o, lse = torch.zeros_like(q), torch.zeros(1, 3, 128)
    prepared = runner.prepare(q, q, q)
    for times in (1, 2, 3):
        if times == 2:
            runner.launch_poisoned(q, q, q, o, lse, 1 / LOG2_E)
        else:
            prepared(q, q, q, o, lse, 1 / LOG2_E)
        assert torch.equal(lse, torch.full_like(lse, times))
    assert torch.equal(o, q)
