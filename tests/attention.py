"""What the kernel tests share: attention written out in float64, and tensors of a layout class."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from fagen.judge import reference
from fagen.problem import Problem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Of the largest |V|, for unit-normal inputs: P is rounded once to the dtype (2**-9, 2**-12) and so
# is the output; fp32 sums of a few hundred terms.
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 2e-5}
# Of gradients, as FlashAttention's own tests have it: of the baseline's error, and beside it.
FACTOR, SLACK = 3.0, 1e-4


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: str = "none"
) -> tuple[Tensor, Tensor]:
    """(output, LSE) in float64; a row that sees no key gives 0 and -inf."""
    q, k, v = (x.double() for x in (q, k, v))
    ratio = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    s = q @ k.transpose(-1, -2) * scale
    if causal != "none":
        seq_q, seq_kv = s.shape[-2:]
        shift = seq_kv - seq_q if causal == "bottom_right" else 0
        seen = torch.arange(seq_q)[:, None] + shift >= torch.arange(seq_kv)[None, :]
        s = s.masked_fill(~seen.to(s.device), float("-inf"))
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return p @ v, lse


def make_inputs(problem: Problem, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Unit-normal q, k, v in the problem's layout class, with NaN wherever no element is."""
    s = problem.shape
    wanted = (
        (s.heads_q, s.seq_q, s.head_dim),
        (s.heads_kv, s.seq_kv, s.head_dim),
        (s.heads_kv, s.seq_kv, s.head_dim_v),
    )
    make = _strided if problem.layout == "any" else _aligned
    return tuple(make(s.batch, *w, DTYPES[s.dtype], generator) for w in wanted)  # type: ignore[return-value]


def make_outputs(problem: Problem, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Output and LSE, filled with NaN so that an element that is not written shows."""
    s = problem.shape
    rows = (s.batch, s.heads_q, s.seq_q)
    nan = float("nan")
    return (
        torch.full((*rows, s.head_dim_v), nan, dtype=DTYPES[s.dtype], device=device),
        torch.full(rows, nan, dtype=torch.float32, device=device),
    )


def assert_exact(o: Tensor, lse: Tensor, truth: tuple[Tensor, Tensor], v: Tensor) -> None:
    """Within what the dtype allows of the truth, and exactly 0 and -inf where nothing is seen."""
    wanted_o, wanted_lse = truth
    name = {v: k for k, v in DTYPES.items()}[o.dtype]
    hidden = wanted_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), hidden)
    assert not o[hidden].any()
    if o.numel():
        most = max(1.0, v.double().abs().max().item() if v.numel() else 1.0)
        assert (o.double() - wanted_o).abs().max().item() <= TOLERANCE[name] * most
    if (~hidden).any():
        apart = (lse.double() - wanted_lse)[~hidden].abs()
        assert (apart <= 1e-4 + 1e-6 * wanted_lse[~hidden].abs()).all()


def make_gradient(problem: Problem, generator: torch.Generator) -> Tensor:
    """A unit-normal gradient of the output, in the problem's layout class."""
    s = problem.shape
    make = _strided if problem.layout == "any" else _aligned
    return make(s.batch, s.heads_q, s.seq_q, s.head_dim_v, DTYPES[s.dtype], generator)


def assert_gradients(
    launch: Callable[..., None],
    problem: Problem,
    inputs: tuple[Tensor, Tensor, Tensor],
    g: Tensor,
    scale: float,
) -> None:
    """As exact as the gate wants them: at most FACTOR times the baseline's error, and SLACK."""
    o, lse = reference.baseline(*inputs, problem.features, scale)
    outputs = [torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device) for x in inputs]
    with warnings.catch_warnings():
        # numpy warns of what is masked next: probabilities of keys past the end.
        warnings.simplefilter("ignore", RuntimeWarning)
        launch(*inputs, o, lse, g, *outputs, scale)
    given = (*inputs, g, problem.features, scale)
    truths, bases = reference.truth_gradients(*given), reference.baseline_gradients(*given)
    for name, found, true, base in zip("QKV", outputs, truths, bases, strict=True):
        assert not found.isnan().any(), f"d{name} has NaN, or was not written"
        if found.numel():
            error, allowed = ((x.double() - true).abs().max().item() for x in (found, base))
            assert error <= FACTOR * allowed + SLACK, f"d{name}: {error} of {allowed}"


def _aligned(
    batch: int, heads: int, seq: int, dim: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    # (B, S, H, D) in memory, each row padded with NaN to a multiple of 16 bytes.
    room = torch.full((batch, seq, heads, -(-dim // 8) * 8 + 8), float("nan"), dtype=dtype)
    values = torch.randn((batch, seq, heads, dim), generator=generator)
    room[..., :dim] = values.to(dtype)
    return room[..., :dim].transpose(1, 2)


def _strided(
    batch: int, heads: int, seq: int, dim: int, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    # Every second element of every second row, one element into the storage.
    room = torch.full((batch * heads * 2 * seq * 2 * dim + 1,), float("nan"), dtype=dtype)
    view = room[1:].view(batch, heads, 2 * seq, 2 * dim)[:, :, ::2, ::2]
    view.copy_(torch.randn((batch, heads, seq, dim), generator=generator))
    return view
