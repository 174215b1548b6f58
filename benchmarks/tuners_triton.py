"""fagen's portable kernel as a user of triton.autotune has it; a part of benchmarks/tuners.py.

python benchmarks/tuners_triton.py JOB.json     tune it, and print what was chosen as JSON

Imports nothing of fagen: what starts here costs what it costs such a user. The job names the
module with the kernel, its arguments, the columns of its tensor descriptors, and the list of
configs; see `portable` of tuners.py.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = math.log2(math.e)
ROWS = {"q_desc": "BLOCK_M", "k_desc": "BLOCK_N", "v_desc": "BLOCK_N"}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
TORCH_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16}

Plain = dict[str, Any]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def kernel_of(job: Plain) -> Any:
    """The jitted function of the job's module."""
    spec = importlib.util.spec_from_file_location("portable", job["module"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, job["kernel"])


def as_triton(config: Mapping[str, Any]) -> triton.Config:
    """One of the job's configs; descriptors get its tile before each run, as Triton's tutorials
    have it."""
    tile = {name: value for name, value in config.items() if name not in OPTIONS}
    options = {name: value for name, value in config.items() if name in OPTIONS and value}
    return triton.Config(tile, **options, pre_hook=_set_blocks)


def as_plain(config: triton.Config) -> Plain:
    return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages} | (
        {"maxnreg": config.maxnreg} if config.maxnreg else {}
    )


def autotuned(job: Plain) -> Any:
    """The kernel under triton.autotune with its defaults."""
    configs = [as_triton(config) for config in job["configs"]]
    return triton.autotune(configs=configs, key=["seq_q", "seq_kv"])(kernel_of(job))


def attention(job: Plain, config: Plain | None = None, kernel: Any = None) -> Attend:
    """softmax(q k^T / sqrt(dim)) v. config: of the plain kernel; kernel: one that is tuned."""
    kernel = kernel_of(job) if kernel is None else kernel
    tile = config or job["configs"][0]
    given = {} if config is None else {name: value for name, value in config.items() if value}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, heads, seq_q, dim = q.shape
        o = torch.empty(batch, heads, seq_q, v.shape[3], dtype=q.dtype, device=q.device)
        lse = torch.empty(batch, heads, seq_q, dtype=torch.float32, device=q.device)
        values = _values(job["columns"], tile, q, k, v) | {"O": o, "LSE": lse}
        values["scale_log2"] = dim**-0.5 * LOG2_E

        def grid(meta: Mapping[str, Any]) -> tuple[int, int, int]:
            return triton.cdiv(seq_q, meta["BLOCK_M"]) * batch * heads, 1, 1

        kernel[grid](*(values[name] for name in job["args"]), **given)
        return o

    return attend


def _values(
    columns: Mapping[str, int],
    tile: Mapping[str, int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> Plain:
    """Every argument by its name, but the outputs and the scale."""
    values: Plain = {
        "heads_q": q.shape[1],
        "group": q.shape[1] // k.shape[1],
        "seq_q": q.shape[2],
        "seq_kv": k.shape[2],
    }
    for letter, tensor in (("q", q), ("k", k), ("v", v)):
        values[letter.upper()] = tensor
        for dim, stride in zip("bhsd", tensor.stride(), strict=True):
            values[f"stride_{letter}{dim}"] = stride
        name = f"{letter}_desc"
        if name in columns:
            block = [1, 1, tile[ROWS[name]], columns[name]]
            shape, strides = list(tensor.shape), list(tensor.stride())
            values[name] = TensorDescriptor(tensor, shape, strides, block)
    return values


def _set_blocks(values: Plain) -> None:
    for name, rows in ROWS.items():
        if name in values:
            values[name].block_shape = [1, 1, values[rows], values[name].block_shape[-1]]


def inputs(shape: Plain, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """q, k and v of a shape, as a program has them at its first call."""
    torch.manual_seed(0)
    size = (shape["batch"], shape["heads"], shape["seq"], shape["head_dim"])
    dtype = TORCH_DTYPE[shape["dtype"]]
    return tuple(torch.randn(size, dtype=dtype, device=device) for _ in range(3))


def main(path: str) -> Plain:
    job = json.loads(Path(path).read_text("utf-8"))
    q, k, v = inputs(job["shape"])
    tuner = autotuned(job)
    attend = attention(job, kernel=tuner)
    started = time.perf_counter()
    attend(q, k, v)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    times = [(as_plain(config), ms[0]) for config, ms in tuner.configs_timings.items()]
    return {
        "ready_at": time.time(),
        "tuning_s": seconds,
        "tried": len(times),
        "failed": sum(math.isinf(ms) for _, ms in times),
        "config": as_plain(tuner.best_config),
        "timed_ms": [[config, None if math.isinf(ms) else ms] for config, ms in times],
    }


if __name__ == "__main__":
    answer_to, sys.stdout = sys.stdout, sys.stderr  # libraries print, too
    print(json.dumps(main(sys.argv[1])), file=answer_to)
