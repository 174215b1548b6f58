"""What the arguments of `get` and of a kernel mean: a Problem, a Shape, a layout class."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fagen.errors import BadInput, BadProblem
from fagen.problem import DTYPES, MAX_HEAD_DIM, Layout, Problem, Shape, make_problem

if TYPE_CHECKING:
    from torch import Tensor

ROW_STRIDE_LIMIT = 1 << 22  # elements; see Problem.layout
ALIGNMENT = 16  # bytes
# fp32's least normal number. A kernel for positive scales multiplies scores that a mask has made
# -inf: below this its scale may be 0, and the product NaN.
LEAST_SCALE = 2.0**-126


def problem_of(first: tuple[Any, ...], words: dict[str, Any]) -> Problem:
    """The Problem that the arguments of `get` mean. Raises BadProblem or BadInput."""
    if not first:
        _known(words)
        if not {"seq", "head_dim"} <= words.keys():
            raise BadProblem("A shape needs seq and head_dim.", "Say get(seq=8192, head_dim=128).")
        return make_problem(**words)
    if len(first) == 3:
        return _problem_of_tensors(first, words)
    if len(first) == 1 and isinstance(first[0], Problem):
        if words:
            raise BadProblem(f"A Problem is whole; {', '.join(words)} can't be added.")
        return first[0]
    if len(first) == 1 and isinstance(first[0], tuple) and len(first[0]) == 4:
        return _problem_of_tuple(first[0], words)
    raise BadProblem(
        "The shape must be keywords, a Problem, (B, H, S, D) or the tensors q, k, v.",
        "Say get(seq=8192, head_dim=128), or get(q, k, v).",
    )


def words_of(problem: Problem) -> dict[str, Any]:
    """The keywords of `make_problem` that give this problem, those with their default left out."""
    s, f = problem.shape, problem.features
    aligned = f.causal if f.causal == "none" else "top_left"
    known = (
        ("batch", s.batch, 1),
        ("heads", s.heads_q, 16),
        ("kv_heads", s.heads_kv, s.heads_q),
        ("seq_kv", s.seq_kv, s.seq_q),
        ("head_dim_v", s.head_dim_v, s.head_dim),
        ("dtype", s.dtype, "bf16"),
        ("causal", f.causal != "none", False),
        ("causal_align", f.causal, aligned),
        ("direction", problem.direction, "forward"),
    )
    changed = {name: held for name, held, default in known if held != default}
    return {"seq": s.seq_q, "head_dim": s.head_dim, **changed}


def options_of(problem: Problem) -> str:
    """A problem as the options of a command line."""
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in words_of(problem).items()
    )


def tune_command(problem: Problem) -> str:
    """The command that tunes a problem."""
    return f"fagen tune {options_of(problem)}"


def get_call(problem: Problem) -> str:
    """The call that gets a problem's kernel."""
    words = ", ".join(f"{name}={value!r}" for name, value in words_of(problem).items())
    return f"fagen.get({words})"


def shape_of(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """The Shape of q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv). Raises BadInput.

    Of tensors without heads it is that of one head: there is a kernel for it, with nothing to do.
    """
    import torch

    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise BadInput(f"{name} must be a tensor, got {type(tensor).__name__}.")
        if tensor.dim() != 4:
            raise BadInput(
                f"{name} has {tensor.dim()} dimensions, {tuple(tensor.shape)}.",
                "Pass (batch, heads, length, head size); unsqueeze what is missing.",
            )
        if tensor.is_neg():
            raise BadInput(
                f"{name} is a negated view: what lies in memory is not what it holds.",
                f"Pass {name}.resolve_neg().",
            )
    _same("dtype", q.dtype, k.dtype, v.dtype, "Cast them to one, say k.to(q.dtype).")
    _same("device", q.device, k.device, v.device, "Move them to one, say k.to(q.device).")
    dtype = DTYPES.get(str(q.dtype).removeprefix("torch."))
    if dtype is None:
        raise BadInput(f"dtype {q.dtype} is not supported.", "Use bfloat16, float16 or float32.")
    _check_sizes(q, k, v)
    batch, heads_q, seq_q, head_dim = q.shape
    _, heads_kv, seq_kv, head_dim_v = v.shape
    heads = (heads_q, heads_kv) if heads_q else (1, 1)
    return Shape(batch, *heads, seq_q, seq_kv, head_dim, head_dim_v, dtype)


def layout_of(q: Tensor, k: Tensor, v: Tensor) -> Layout:
    """`aligned16` if a kernel may rely on it for q, k, v and for the output that is allocated."""
    item = q.element_size()
    if v.shape[3] * item % ALIGNMENT:  # the rows of a dense output
        return "any"
    return "aligned16" if all(_is_aligned(t, item) for t in (q, k, v)) else "any"


def check_promise(problem: Problem, shape: Shape) -> None:
    """Raises BadInput where a call's shape is not of the kind that a kernel was made for."""
    made = problem.shape
    for name, wanted, got in (
        ("dtype", made.dtype, shape.dtype),
        ("head size of q and k", made.head_dim, shape.head_dim),
        ("head size of v", made.head_dim_v, shape.head_dim_v),
        (
            "ratio of query to key/value heads",
            made.heads_q // made.heads_kv,
            shape.heads_q // shape.heads_kv,
        ),
    ):
        if wanted != got:
            raise BadInput(
                f"This kernel was made for {name} {wanted}, got {got}.",
                "Get one for these tensors: fagen.get(q, k, v).",
            )


def problem_like(problem: Problem, shape: Shape, layout: Layout, any_scale: bool) -> Problem:
    """The problem of one call of a kernel that was made for `problem`."""
    features = replace(problem.features, scale="any") if any_scale else problem.features
    return Problem(shape, features, problem.direction, layout)


def _same(name: str, q: object, k: object, v: object, fix: str) -> None:
    if not q == k == v:
        raise BadInput(f"q, k, v differ in {name}: {q}, {k}, {v}.", fix)


def _check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    qs, ks, vs = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    shown = f"q {qs}, k {ks}, v {vs}"
    if not qs[0] == ks[0] == vs[0]:
        raise BadInput(f"Batch sizes differ: {shown}.", "Expand k and v to q's batch.")
    if ks[1:3] != vs[1:3]:
        raise BadInput(f"k and v differ in heads or length: {shown}.", "They must agree.")
    if qs[3] != ks[3]:
        raise BadInput(f"q and k differ in head size: {shown}.", "They must agree.")
    if qs[1] != ks[1] and (ks[1] < 1 or qs[1] < 1 or qs[1] % ks[1]):
        raise BadInput(
            f"{qs[1]} query heads are no multiple of {ks[1]} key/value heads.",
            "Each key/value head serves the same number of query heads.",
        )
    if not (1 <= qs[3] <= MAX_HEAD_DIM and 1 <= vs[3] <= MAX_HEAD_DIM):
        raise BadInput(f"Head size outside 1 to {MAX_HEAD_DIM}: {shown}.")


def _is_aligned(tensor: Tensor, item: int) -> bool:
    *outer, last = tensor.stride()
    if last != 1 or tensor.data_ptr() % ALIGNMENT or outer[2] >= ROW_STRIDE_LIMIT:
        return False
    return all(
        size <= 1 or (stride * item % ALIGNMENT == 0 and stride != 0)
        for stride, size in zip(outer, tensor.shape, strict=False)
    )


def _known(words: dict[str, Any]) -> dict[str, Any]:
    known = inspect.signature(make_problem).parameters.keys()
    unknown = words.keys() - known
    if unknown:
        raise TypeError(
            f"get() got unexpected keyword arguments {sorted(unknown)};"
            f" a shape has {', '.join(known)}"
        )
    return words


def _problem_of_tensors(first: tuple[Any, ...], words: dict[str, Any]) -> Problem:
    extra = words.keys() - {"causal", "causal_align", "scale_sign", "layout", "direction"}
    if extra:
        raise BadProblem(f"The tensors say {', '.join(sorted(extra))} already.", "Leave it out.")
    s = shape_of(*first)
    return make_problem(
        s.seq_q,
        s.head_dim,
        batch=s.batch,
        heads=s.heads_q,
        kv_heads=s.heads_kv,
        seq_kv=s.seq_kv,
        head_dim_v=s.head_dim_v,
        dtype=s.dtype,
        **words,
    )


def _problem_of_tuple(sizes: tuple[Any, ...], words: dict[str, Any]) -> Problem:
    batch, heads, seq, head_dim = sizes
    twice = words.keys() & {"batch", "heads", "seq", "head_dim"}
    if twice:
        raise BadProblem(f"(B, H, S, D) says {', '.join(sorted(twice))} already.")
    return make_problem(seq, head_dim, batch=batch, heads=heads, **_known(words))
