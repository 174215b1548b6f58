"""What a cubin says of its kernel before it is run: registers, spills, how its products wait."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from fagen.outcome import Built, KernelFacts
from fagen.target import Target

TOOL_LIMIT_S = 60.0

# Static local stores plus loads a thread, in bytes. A spill inside the loop is paid at every step:
# 523 stores (2092 bytes) made a Hopper kernel useless, 26 + 51 words (308 bytes) were bearable.
SPILL_LIMIT_BYTES = 2048

# A wait after (nearly) every wgmma: Triton does so for 128 rows on 4 warps. A loop that overlaps
# waits once or twice for 8 to 32 of them.
SERIALISED_SHARE = 0.5

_RESOURCES = re.compile(r"Function (?P<name>[^:]+):\s*REG:(?P<registers>\d+)")
_LOCAL = re.compile(r"\b(?:STL|LDL)(?P<suffix>(?:\.\w+)*)\.?\s")
_LOCAL_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def facts_of(cubin: bytes, name: str, shared_bytes: int) -> KernelFacts:
    """Facts of one kernel; a finding says so when the disassembler can't read the cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            usage = _tool("-res-usage", file.name)
            sass = _tool("-sass", file.name)
        except (OSError, subprocess.SubprocessError) as error:
            return KernelFacts(name, shared_bytes, 0, 0, (f"cubin not read: {error}",))
    return KernelFacts(
        name, shared_bytes, registers_in(usage), spill_bytes_in(sass), findings_in(sass)
    )


def why_rejected(built: Built, target: Target) -> str | None:
    """Why this can't win and is not worth the device's time, as a sentence, or None."""
    for kernel in built.kernels:
        if kernel.shared_bytes > target.shared_bytes:
            return (
                f"{kernel.name} needs {kernel.shared_bytes} bytes of shared memory,"
                f" a block of {target.name} has {target.shared_bytes}."
            )
        if kernel.spill_bytes > SPILL_LIMIT_BYTES:
            return (
                f"{kernel.name} spills {kernel.spill_bytes} bytes a thread,"
                f" more than {SPILL_LIMIT_BYTES}."
            )
    return None


def registers_in(usage: str) -> int:
    """The most registers a thread of any function in `cuobjdump -res-usage`."""
    return max((int(found["registers"]) for found in _RESOURCES.finditer(usage)), default=0)


def spill_bytes_in(sass: str) -> int:
    """Bytes that the local stores and loads of a listing move a thread, each counted once."""
    return sum(_width(found["suffix"]) for found in _LOCAL.finditer(sass))


def findings_in(sass: str) -> tuple[str, ...]:
    """Notes for a reader: which matrix and load instructions there are, and what is amiss."""
    products, waits = sass.count("HGMMA"), sass.count("WARPGROUP.DEPBAR")
    notes = []
    if products:
        notes.append(f"{products} wgmma, {waits} waits")
    if products >= 4 and waits >= SERIALISED_SHARE * products:
        notes.append("serialised wgmma")
    if tma := sass.count("UTMALDG"):
        notes.append(f"{tma} TMA loads")
    return tuple(notes)


def _width(suffix: str) -> int:
    return next((_LOCAL_BYTES[p] for p in suffix.split(".") if p in _LOCAL_BYTES), 4)


def _tool(option: str, cubin: str) -> str:
    done = subprocess.run(
        [_cuobjdump(), option, cubin],
        capture_output=True,
        text=True,
        timeout=TOOL_LIMIT_S,
        check=True,
    )
    return done.stdout


@lru_cache(maxsize=1)
def _cuobjdump() -> Path:
    """The disassembler that Triton's wheel brings."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("triton is not installed")
    return Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
