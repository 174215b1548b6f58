"""Host time of one eager call, fagen against torch's scaled_dot_product_attention.

python benchmarks/call_time.py --out FILE.json

What is timed is how long the host is busy until a call returns; the device works on meanwhile, and
is waited for between samples. Each round takes one sample of every contestant, one after another
and in another order than the round before; a sample is the mean of some hundred calls.

`fagen` is kernel(q, k, v) as `fagen.get` gave it. `plan`, `output` and `launch` are its parts:
choosing what to run by what the tensors are, allocating O and LSE, and the launch itself.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from publish import ROOT, commit, text_of
from torch.nn.functional import scaled_dot_product_attention

import fagen
from fagen.judge.measure import turns
from fagen.target import detect, toolchain

DEVICE = torch.device("cuda:0")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Samples = dict[str, list[float]]


def main() -> None:
    asked = _options()
    words = {name: getattr(asked, name) for name in ("batch", "heads", "seq", "head_dim", "dtype")}
    kernel = fagen.get(**words, causal=asked.causal, db=asked.db)
    shape = (asked.batch, asked.heads, asked.seq, asked.head_dim)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=DTYPES[asked.dtype]) for _ in range(3))
    samples = interleaved(
        _contestants(kernel, q, k, v, asked.causal),
        calls=asked.calls,
        rounds=asked.rounds,
        settle=torch.cuda.synchronize,
    )
    medians = {name: median(taken) for name, taken in samples.items()}
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        # Where files lie is nobody's business.
        "command": f"python benchmarks/call_time.py {' '.join(asked.words)}",
        "commit": commit(ROOT, asked.commit, asked.clean),
        "device": detect().name,
        "host": _host(),
        "versions": {
            "torch": torch.__version__,
            "triton": toolchain().triton,
            "python": platform.python_version(),
        },
        "problem": kernel.problem.to_dict(),
        "origin": kernel.origin,
        "config": str(kernel.config),
        "paths": _paths(kernel, q, k, v),
        "calls_a_sample": asked.calls,
        "call_us": medians,
        "fagen_over_sdpa": median(
            ours / theirs for ours, theirs in zip(samples["fagen"], samples["sdpa"], strict=True)
        ),
        "samples_us": samples,
    }
    asked.out.write_text(text_of(found) + "\n")
    for name, us in medians.items():
        print(f"{name:10} {us:8.2f} us")
    print(f"fagen over sdpa: {found['fagen_over_sdpa']:.3f}; launched {found['paths']}")


def interleaved(
    contestants: dict[str, Callable[[], Any]],
    *,
    calls: int,
    rounds: int,
    settle: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Microseconds a call of each contestant, one sample a round.

    settle: waits for the device.
    """
    samples: Samples = {name: [] for name in contestants}
    for call in contestants.values():  # the first calls compile, check and allocate
        _sample(call, calls, settle, clock)
    for name in turns(contestants, rounds):
        samples[name].append(_sample(contestants[name], calls, settle, clock))
    return samples


def _sample(
    call: Callable[[], Any], calls: int, settle: Callable[[], None], clock: Callable[[], float]
) -> float:
    settle()
    start = clock()
    for _ in range(calls):
        call()
    return (clock() - start) / calls * 1e6


def _contestants(
    kernel: fagen.Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> dict[str, Callable[[], Any]]:
    plan = kernel._plan(q, k, v, None)
    o, lse = plan.new_o(), plan.new_lse()
    return {
        "fagen": lambda: kernel(q, k, v),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=causal),
        "plan": lambda: kernel._plan(q, k, v, None),
        "output": plan.new_o,
        "launch": lambda: plan.launch(q, k, v, o, lse, plan.scale),
        "nothing": lambda: None,  # what the loop and a lambda cost
    }


def _paths(
    kernel: fagen.Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[str, ...]:
    """How the entry kernels of the source that such a call runs are launched."""
    launch: Any = kernel._plan(q, k, v, None).launch
    return tuple(launch.paths)


def _host() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--calls", type=int, default=300, help="of one sample")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--db", help="tuning database; default: the user's")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", help="where git can't tell: the commit of this checkout")
    parser.add_argument("--clean", type=lambda said: said == "yes", help="yes or no")
    asked = parser.parse_args()
    places = {"--out", "--db", "--commit", "--clean"}
    asked.words = [
        word
        for before, word in zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
        if word.partition("=")[0] not in places and before not in places
    ]
    return asked


if __name__ == "__main__":
    main()
