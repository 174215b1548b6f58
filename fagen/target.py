"""The device a kernel is made for, and the compiler that makes it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import runpy
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fagen import driver
from fagen.errors import NoDevice, NoTriton, UnknownTarget
from fagen.keys import key_of

TRITON_RANGE = ((3, 6), (3, 10))  # from, up to and not including


@dataclass(frozen=True)
class Target:
    """Facts of one GPU. Rates are dense peaks by the vendor's datasheet at the boost clock.

    arch: compute capability as 10 * major + minor. shared_bytes: the most one block may opt into.
    exp2_per_clock_sm: results of the special function unit, a clock and an SM.
    """

    name: str
    arch: int
    sm_count: int
    shared_bytes: int
    registers_sm: int
    l2_bytes: int
    memory_gbps: float
    clock_ghz: float
    tensor_tflops: float  # bf16/fp16 in, fp32 accumulate, no sparsity
    exp2_per_clock_sm: int = 16
    mig: str = ""

    @property
    def device_key(self) -> str:
        """Rows of one device key were measured on devices that are alike."""
        return key_of([self.name, self.arch, self.sm_count, self.shared_bytes, self.mig])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.arch}, {self.sm_count} SMs)"


# Sources: NVIDIA H100, H200 and B200 datasheets; "NVIDIA A100 Tensor Core GPU Architecture" and
# "NVIDIA H100 Tensor Core GPU Architecture" whitepapers; "NVIDIA Ada GPU Architecture" whitepaper
# (RTX 4090, L40S); shared memory a block from the CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability" (sm_80 163 KB, sm_89 99 KB, sm_90 and sm_100 227 KB).
# exp2: 16 a clock and SM on all of these (CUDA C++ Programming Guide, "Throughput of Native
# Arithmetic Instructions"). H200: SM count, shared memory and 60 MB L2 as read off the device.
PRESETS: dict[str, Target] = {
    "h100": Target("NVIDIA H100 80GB HBM3", 90, 132, 232448, 65536, 50 << 20, 3350.0, 1.83, 989.0),
    "h200": Target("NVIDIA H200", 90, 132, 232448, 65536, 60 << 20, 4800.0, 1.83, 989.0),
    "a100": Target("NVIDIA A100-SXM4-80GB", 80, 108, 166912, 65536, 40 << 20, 2039.0, 1.41, 312.0),
    "l40s": Target("NVIDIA L40S", 89, 142, 101376, 65536, 96 << 20, 864.0, 2.52, 362.0),
    "rtx4090": Target(
        "NVIDIA GeForce RTX 4090", 89, 128, 101376, 65536, 72 << 20, 1008.0, 2.52, 165.2
    ),
    "b200": Target("NVIDIA B200", 100, 148, 232448, 65536, 126 << 20, 8000.0, 1.85, 2250.0),
}


def preset(name: str) -> Target:
    """The target of a preset name (h100, h200, a100, l40s, rtx4090, b200)."""
    try:
        return PRESETS[str(name).lower()]
    except KeyError:
        raise UnknownTarget(
            f"Target {name!r} is unknown.", f"Use one of {', '.join(PRESETS)}."
        ) from None


def detect(device: int | str | None = None) -> Target:
    """The target of a CUDA device, by default the current one. Raises NoDevice."""
    facts = _facts(device)
    arch = facts.major * 10 + facts.minor
    like = _like(facts.name, arch)
    per_sm = like.tensor_tflops / like.sm_count
    return replace(
        like,
        name=facts.name,
        arch=arch,
        sm_count=facts.sm_count,
        shared_bytes=facts.shared_bytes,
        registers_sm=facts.registers_sm,
        l2_bytes=facts.l2_bytes,
        tensor_tflops=per_sm * facts.sm_count,
        mig=_mig_profile(facts.name),
    )


def cuda_name(device: int | str | None = None) -> tuple[str, str]:
    """torch's name of a device, and the card's UUID. Raises NoDevice."""
    facts = _facts(device)
    return f"cuda:{_index_of(device)}", facts.uuid


def _facts(device: int | str | None) -> driver.Device:
    visible = _visible()
    index = _index_of(device)
    if index >= len(visible):
        raise NoDevice(
            f"Device {device!r} does not exist; {len(visible)} visible.", "Use --device 0."
        )
    return visible[index]


def _visible() -> tuple[driver.Device, ...]:
    """At least one GPU. Raises NoDevice."""
    build = torch_build()
    if build is None:
        raise NoDevice("torch is not installed.", "Install torch, or name a --target.")
    why = "no CUDA device is visible"
    if build[1] is None:
        why = "this torch is built without CUDA"
    else:
        try:
            if found := driver.devices():
                return found
        except driver.NoDriver as error:
            why = str(error)
    raise NoDevice(
        f"No GPU: {why}.",
        "To work offline name a target (fagen show --target h200); see also: fagen doctor",
    )


def torch_build() -> tuple[str, str | None] | None:
    """torch's version and the CUDA that it is built for, if any; None when it is missing.

    Its import takes 3 s, so its file is read.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    said = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return str(said["__version__"]), said["cuda"]


def _index_of(device: int | str | None) -> int:
    text = "cuda" if device is None else str(device)
    named = re.fullmatch(r"(cuda:)?(\d+)", text)
    if named is not None:
        return int(named.group(2))
    if text != "cuda":
        raise NoDevice(f"{text!r} is no CUDA device.", "Use --device 0.")
    torch = sys.modules.get("torch")  # without it nobody has chosen one
    return torch.cuda.current_device() if torch is not None else 0


def _like(name: str, arch: int) -> Target:
    for known in PRESETS.values():
        if known.name == name:
            return known
    same = [t for t in PRESETS.values() if t.arch == arch]
    older = [t for t in PRESETS.values() if t.arch <= arch]
    return (same or older or list(PRESETS.values()))[-1]


def _mig_profile(name: str) -> str:
    found = re.search(r"MIG\s+(\S+)", name)
    return found.group(1) if found else ""


@dataclass(frozen=True)
class Toolchain:
    """What turns a source into machine code. torch and driver are recorded, no key."""

    triton: str
    ptxas: str
    torch: str = ""
    driver: str = ""

    @property
    def key(self) -> str:
        return key_of([self.triton, self.ptxas])

    @property
    def triton_minor(self) -> tuple[int, int]:
        """The Triton release whose dialect a template must speak, e.g. (3, 6)."""
        major, minor = self.triton.split(".")[:2]
        return int(major), int(minor)


@lru_cache(maxsize=1)
def toolchain() -> Toolchain:
    """The installed Triton and its ptxas, without importing either triton or torch.

    Raises NoTriton when it is missing or outside the supported range.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise NoTriton("Triton is not installed.", "Run: pip install 'triton>=3.6,<3.10'")
    version = _version("triton")
    low, high = TRITON_RANGE
    found = Toolchain(version, _ptxas_version(Path(spec.origin).parent), _version("torch"))
    from fagen import settings

    if not low <= found.triton_minor < high and not settings.any_triton():
        raise NoTriton(
            f"Triton {version} is outside {low[0]}.{low[1]} to {high[0]}.{high[1] - 1}.",
            "Install one of those, or set FAGEN_ANY_TRITON=1 to try it.",
        )
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _ptxas_version(triton_dir: Path) -> str:
    ptxas = triton_dir / "backends" / "nvidia" / "bin" / "ptxas"
    try:
        shown = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"V(\d+\.\d+\.\d+)", shown.stdout)
    return found.group(1) if found else ""
