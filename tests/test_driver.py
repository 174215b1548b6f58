"""What is asked of the CUDA driver, by a library that answers as two GPUs would."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fagen import driver, target
from fagen.driver import Device, NoDriver
from fagen.errors import NoDevice
from fagen.target import detect, preset

FACTS = {
    "sm_count": 132,
    "l2_bytes": 62914560,
    "major": 9,
    "minor": 0,
    "registers_sm": 65536,
    "shared_bytes": 232448,
}
IDS = [uuid.UUID(int=7), uuid.UUID(int=8)]
TWO = tuple(Device("NVIDIA H200", str(one), **FACTS) for one in IDS)


@dataclass
class FakeCuda:
    """The calls of libcuda that `driver` makes. codes: what a call returns instead of 0."""

    codes: dict[str, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any) -> int:
            if name not in self.codes:
                getattr(self, f"_{name}")(*words)
            return self.codes.get(name, 0)

        return call

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = len(IDS)

    def _cuDeviceGet(self, device: Any, index: int) -> None:
        device._obj.value = 100 + index

    def _cuDeviceGetName(self, name: Any, size: int, device: int) -> None:
        assert device >= 100 and size == len(name)
        name.value = b"NVIDIA H200"

    def _cuDeviceGetUuid_v2(self, code: Any, device: int) -> None:
        code.raw = IDS[device - 100].bytes

    def _cuDeviceGetAttribute(self, value: Any, number: int, device: int) -> None:
        assert device >= 100
        (name,) = [fact for fact, known in driver.ATTRIBUTES.items() if known == number]
        value._obj.value = FACTS[name]

    def _cuGetErrorString(self, code: int, text: Any) -> None:
        text._obj.value = f"error string of {code}".encode()


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "torch_build", lambda: ("2.11.0+cu130", "13.0"))
    monkeypatch.setattr(driver, "devices", lambda: TWO)


def test_every_gpu_is_told_with_its_facts() -> None:
    assert driver.asked(FakeCuda()) == TWO


def test_a_driver_without_a_gpu_sees_none() -> None:
    assert driver.asked(FakeCuda({"cuInit": driver.NO_DEVICE})) == ()


@pytest.mark.parametrize(
    "call", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute"]
)
def test_what_fails_is_told_in_the_drivers_words(call: str) -> None:
    with pytest.raises(NoDriver, match="the CUDA driver says error string of 803"):
        driver.asked(FakeCuda({call: 803}))


def test_an_error_without_words_is_told_by_its_number() -> None:
    with pytest.raises(NoDriver, match="error 803"):
        driver.asked(FakeCuda({"cuInit": 803, "cuGetErrorString": 1}))


def test_a_driver_that_lacks_a_call_is_too_old() -> None:
    class Old(FakeCuda):
        def __getattr__(self, name: str) -> Any:
            if name == "cuDeviceGetUuid_v2":
                raise AttributeError(f"undefined symbol: {name}")
            return super().__getattr__(name)

    with pytest.raises(NoDriver, match=r"too old: .*cuDeviceGetUuid_v2"):
        driver.asked(Old())


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    driver.devices.cache_clear()
    with pytest.raises(NoDriver, match="there is no CUDA driver"):
        driver.devices()
    monkeypatch.setattr(target, "torch_build", lambda: ("2.11.0", "13.0"))
    with pytest.raises(NoDevice, match=r"No GPU: there is no CUDA driver \(libcuda.so.1\)"):
        detect()


@pytest.mark.usefixtures("two_gpus")
def test_a_target_is_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert detect() == detect(1) == detect("cuda:1") == preset("h200")
    assert target.cuda_name("1") == ("cuda:1", str(IDS[1]))


@pytest.mark.usefixtures("two_gpus")
def test_the_current_device_is_torchs_where_torch_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = SimpleNamespace(current_device=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert target.cuda_name() == target.cuda_name("cuda") == ("cuda:1", str(IDS[1]))
    monkeypatch.delitem(sys.modules, "torch")
    assert target.cuda_name() == ("cuda:0", str(IDS[0]))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["x", -1, "cuda:x", "cpu", "cuda:-1", object()])
def test_what_is_no_cuda_device_is_refused(device: Any) -> None:
    with pytest.raises(NoDevice, match="is no CUDA device"):
        detect(device)


@pytest.mark.usefixtures("two_gpus")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(NoDevice, match="Device 'cuda:2' does not exist; 2 visible"):
        detect("cuda:2")


def test_a_torch_without_cuda_has_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "torch_build", lambda: ("2.13.0+cpu", None))
    with pytest.raises(NoDevice, match="built without CUDA"):
        detect()


def test_torchs_build_is_read_as_torch_says_it() -> None:
    import torch

    assert target.torch_build() == (torch.__version__, torch.version.cuda)


def test_neither_target_nor_tuner_imports_torch(root: Path) -> None:
    asked = (
        "import sys; from fagen import target, errors\n"
        "try: target.detect()\n"
        "except errors.NoDevice: pass\n"
        "import fagen.tune.tuner, fagen.judge.measure\n"
        "print(sorted({'torch', 'triton', 'optuna', 'sqlalchemy'} & set(sys.modules)))"
    )
    words = [sys.executable, "-c", asked]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
