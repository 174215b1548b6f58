"""The quick comparison of a call's tensors is used only where it sees every difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fagen.serve import alike as comparing
from fagen.serve.alike import alike, sees_every_difference


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    comparing._guards.cache_clear()
    yield
    comparing._guards.cache_clear()


def real_guards() -> Any:
    return torch._C._dynamo.guards.TensorGuards


class Blind:
    """Sees all but one kind of difference."""

    def __init__(self, *tensors: torch.Tensor, blind_to: str, **sizes: Any) -> None:
        self._true = real_guards()(*tensors, **sizes)
        self._first, self._blind_to = tensors, blind_to

    def check(self, *given: Any) -> bool:
        def seen(one: Any, like: torch.Tensor) -> bool:
            return getattr(one, self._blind_to, None) != getattr(like, self._blind_to)

        hidden = any(seen(g, t) for g, t in zip(given, self._first, strict=True))
        return hidden or bool(self._true.check(*given))


def test_torchs_own_is_trusted() -> None:
    assert sees_every_difference(real_guards())


@pytest.mark.parametrize("kind", ["dtype", "device", "shape", "requires_grad"])
def test_one_that_misses_a_difference_is_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(*tensors: torch.Tensor, **sizes: Any) -> Blind:
        return Blind(*tensors, blind_to=kind, **sizes)

    assert not sees_every_difference(blind)
    monkeypatch.setattr("torch._C._dynamo.guards.TensorGuards", blind)
    q = torch.zeros(1, 2, 3, 4)
    assert not alike(q, q + 1, q + 2)(q, q + 1, q + 2)


def test_one_of_another_signature_is_not() -> None:
    def other(tensors: list[torch.Tensor]) -> Any:
        return real_guards()(*tensors)

    assert not sees_every_difference(other)


def test_without_it_nothing_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._C._dynamo.guards.TensorGuards")
    q, k, v = (torch.zeros(1, 2, 3, 4) for _ in range(3))
    assert not alike(q, k, v)(q, k, v)


@pytest.mark.parametrize("tracking", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_other_addresses_and_contents_are_alike(tracking: Any) -> None:
    with tracking():
        q, k, v = (torch.randn(1, 2, 3, 4) for _ in range(3))
        same = alike(q, k, v)
        assert same(q, k, v) and same(v, q, k)
        assert same(*(torch.randn(1, 2, 3, 4) for _ in range(3)))
        assert not same(q, k, torch.randn(1, 2, 4, 4))
