"""Where the LSE goes that nobody asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fagen.run import unread
from fagen.run.unread import MOST, unread_lse

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """What is said of the current stream; memory of a device is memory of the host."""
    said, empty = [False], torch.empty

    def on_cpu(count: int, dtype: torch.dtype, device: torch.device) -> Any:
        assert device.type == "cuda"
        return empty(count, dtype=dtype)

    monkeypatch.setattr("torch.empty", on_cpu)
    monkeypatch.setattr(unread, "capturing", lambda: lambda: said[0])
    monkeypatch.setattr(unread, "_places", {})
    yield said


def test_small_ones_share_one_place_of_a_device_for_good() -> None:
    first, second = unread_lse((1, 8, 128), CUDA), unread_lse((2, 3, 5), CUDA)
    assert first is not None and second is not None
    assert first.shape == (1, 8, 128) and first.dtype == torch.float32 and first.is_contiguous()
    assert first.data_ptr() == second.data_ptr()
    elsewhere = unread_lse((2, 3, 5), torch.device("cuda", 1))
    assert elsewhere is not None and elsewhere.data_ptr() != first.data_ptr()
    address = first.data_ptr()
    del first, second
    again = unread_lse((1, 1, MOST), CUDA)
    assert again is not None and again.data_ptr() == address


def test_large_ones_are_allocated_as_those_on_the_cpu_and_in_a_capture(
    capturing: list[bool],
) -> None:
    assert unread_lse((1, 1, MOST + 1), CUDA) is None
    assert unread_lse((1, 8, 128), torch.device("cpu")) is None
    capturing[0] = True
    assert unread_lse((1, 8, 128), CUDA) is None
