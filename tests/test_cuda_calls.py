"""torch's raw calls where it has them, its public ones where it has not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fagen.run.cuda import allocate, current_device, current_stream, dense_strides

CUDA = torch.device("cuda", 3)


def test_the_raw_calls_are_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._C._cuda_getDevice", lambda: 5, raising=False)
    monkeypatch.setattr("torch._C._cuda_getCurrentRawStream", lambda i: 100 + i, raising=False)
    monkeypatch.setattr("torch._C._dynamo.guards._empty_strided_cuda", lambda *args: args)
    assert current_device()() == 5
    assert current_stream(CUDA)() == 103
    asked = allocate((2, 3, 4), torch.float16, CUDA)()
    assert asked == ((2, 3, 4), (12, 4, 1), torch.float16)


def test_the_public_calls_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "_cuda_getDevice",
        "_cuda_getCurrentRawStream",
        "_dynamo.guards._empty_strided_cuda",
    ):
        monkeypatch.delattr(f"torch._C.{name}", raising=False)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 6)
    monkeypatch.setattr(
        "torch.cuda.current_stream", lambda d: SimpleNamespace(cuda_stream=d.index)
    )
    monkeypatch.setattr("torch.empty", lambda shape, dtype, device: (shape, dtype, device))
    assert current_device()() == 6
    assert current_stream(CUDA)() == 3
    assert allocate((2, 3), torch.float16, CUDA)() == ((2, 3), torch.float16, CUDA)


def test_on_the_cpu_memory_is_torchs_and_the_stream_is_none() -> None:
    made = allocate((2, 0, 3), torch.float32, torch.device("cpu"))()
    assert made.shape == (2, 0, 3) and made.is_contiguous()
    assert current_stream(torch.device("cpu"))() == 0


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (2, 0, 4), (0, 5), (1, 1), (4, 2, 0)])
def test_dense_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert dense_strides(shape) == torch.empty(shape).stride()
