"""An attention problem: its shape, its features, and what they cost.

Layout of every public function, as in torch: q (B, Hq, Sq, D), k (B, Hkv, Sk, D),
v (B, Hkv, Sk, Dv), output (B, Hq, Sq, Dv), LSE (B, Hq, Sq) in fp32, natural log.
"""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fagen.errors import BadProblem
from fagen.keys import key_of

Direction = Literal["forward", "backward", "decode"]
Dtype = Literal["bf16", "fp16", "fp32"]
Causal = Literal["none", "top_left", "bottom_right"]
ScaleSign = Literal["positive", "any"]
Layout = Literal["aligned16", "any"]

DTYPES: dict[str, Dtype] = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
}
ITEM_BYTES: dict[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
MAX_HEAD_DIM = 256
# Kernels take sizes as 32-bit integers, and round them up to tiles; offsets have 64 bits.
MAX_SIZE = 2**31 - 2**12


@dataclass(frozen=True)
class Shape:
    """Sizes in elements. heads_q is a multiple of heads_kv: query head h reads head h // ratio."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    dtype: Dtype


@dataclass(frozen=True)
class Features:
    """What is done besides softmax(scale * q k^T) v. Every default means: absent.

    causal: `top_left` lets query i see keys 0..i (torch's rule), `bottom_right` 0..i + Sk - Sq.
    scale: `any` is right for zero and negative scales too, at the price of one multiply a score.
    """

    causal: Causal = "none"
    scale: ScaleSign = "positive"


@dataclass(frozen=True)
class Problem:
    """One attention problem. `layout` is what its kernel may assume of pointers and strides:

    `aligned16`: last stride 1, bases and the other strides multiples of 16 bytes, row strides
    below 2**22 elements, no broadcast (stride 0) over more than one element. `any`: any strides.
    """

    shape: Shape
    features: Features = field(default_factory=Features)
    direction: Direction = "forward"
    layout: Layout = "aligned16"

    @property
    def key(self) -> str:
        """The exact key: every field counts."""
        return key_of(self)

    @property
    def class_key(self) -> str:
        """What must be equal for a kernel to be right: all but the sizes that are bucketed."""
        s = self.shape
        fixed = Shape(1, s.heads_q // s.heads_kv, 1, 0, 0, s.head_dim, s.head_dim_v, s.dtype)
        return key_of(replace(self, shape=fixed))

    @property
    def bucket(self) -> tuple[int, int, int]:
        """(seq_q, seq_kv, batch * heads_q), each rounded up by `size_bucket`."""
        s = self.shape
        return size_bucket(s.seq_q), size_bucket(s.seq_kv), size_bucket(s.batch * s.heads_q)

    @property
    def bucket_key(self) -> str:
        """Problems with one bucket key share a winner; tune and get both go by it."""
        return key_of([self.class_key, list(self.bucket)])

    @property
    def visible_pairs(self) -> int:
        """Query-key pairs that the mask lets through, over one head of one batch."""
        s = self.shape
        if self.features.causal == "none":
            return s.seq_q * s.seq_kv
        shift = s.seq_kv - s.seq_q if self.features.causal == "bottom_right" else 0
        first, last = 1 + shift, s.seq_q + shift  # keys seen by the first and the last row
        return _clipped_sum(first, last, s.seq_kv)

    @property
    def flops(self) -> int:
        """Of the matrix products, masked pairs not counted: 2 * pairs * (D + Dv) a head forward;
        backward 2 * pairs * (3 D + 2 Dv), for QK^T once more, dQ, dK, and gV^T, dV."""
        s = self.shape
        columns = s.head_dim + s.head_dim_v
        if self.direction == "backward":
            columns = 3 * s.head_dim + 2 * s.head_dim_v
        return 2 * self.visible_pairs * columns * s.batch * s.heads_q

    @property
    def io_bytes(self) -> int:
        """The fewest bytes: q, k, v read once, o and LSE written once; backward q, k, v, o, its
        gradient and LSE read once, three gradients written once."""
        s = self.shape
        q = s.batch * s.heads_q * s.seq_q * (s.head_dim + s.head_dim_v)
        kv = s.batch * s.heads_kv * s.seq_kv * (s.head_dim + s.head_dim_v)
        times = 2 if self.direction == "backward" else 1  # each of q's and kv's rows
        return times * (q + kv) * ITEM_BYTES[s.dtype] + 4 * s.batch * s.heads_q * s.seq_q

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; `problem_from_dict` reads it back."""
        return asdict(self)

    def __str__(self) -> str:
        s, f = self.shape, self.features
        heads = f"H{s.heads_q}" if s.heads_q == s.heads_kv else f"H{s.heads_q}/{s.heads_kv}"
        seq = f"N{s.seq_q}" if s.seq_q == s.seq_kv else f"N{s.seq_q}x{s.seq_kv}"
        dim = f"D{s.head_dim}" if s.head_dim == s.head_dim_v else f"D{s.head_dim}/{s.head_dim_v}"
        mask = {"none": "full", "top_left": "causal", "bottom_right": "causal bottom-right"}
        words = [self.direction, s.dtype, f"B{s.batch}", heads, seq, dim, mask[f.causal]]
        if f.scale == "any":
            words.append("any scale")
        if self.layout == "any":
            words.append("any strides")
        return " ".join(words)


def size_bucket(size: int) -> int:
    """Sizes up to 16 stand for themselves; above, the next power of two."""
    return size if size <= 16 else 1 << (size - 1).bit_length()


def make_problem(  # noqa: PLR0913  (the words of the command line, each with its default)
    seq: int,
    head_dim: int,
    *,
    batch: int = 1,
    heads: int = 16,
    kv_heads: int | None = None,
    seq_kv: int | None = None,
    head_dim_v: int | None = None,
    dtype: str = "bf16",
    causal: bool = False,
    causal_align: str = "top_left",
    scale_sign: ScaleSign = "positive",
    direction: Direction = "forward",
    layout: Layout | None = None,
) -> Problem:
    """A checked Problem from the words of the command line, with its defaults.

    The layout class is by default that of contiguous tensors: `any` where a row of head_dim or
    head_dim_v elements is no multiple of 16 bytes.

    Raises BadProblem with the field and the value that is wrong.
    """
    if str(dtype).removeprefix("torch.") not in DTYPES:
        raise BadProblem(f"dtype {dtype!r} is not supported.", "Use bf16, fp16 or fp32.")
    if causal is not True and causal is not False:
        raise BadProblem(
            f"causal must be True or False, got {causal!r}.",
            "Where the mask ends is said by causal_align: top_left or bottom_right.",
        )
    if causal_align not in ("top_left", "bottom_right"):
        raise BadProblem(
            f"causal alignment {causal_align!r} is unknown.", "Use top_left or bottom_right."
        )
    if causal_align != "top_left" and not causal:
        raise BadProblem(f"causal_align {causal_align!r} needs causal.", "Say causal=True too.")
    if scale_sign not in ("positive", "any"):
        raise BadProblem(f"scale_sign {scale_sign!r} is unknown.", "Use positive or any.")
    if layout not in (None, "aligned16", "any"):
        raise BadProblem(f"layout {layout!r} is unknown.", "Use aligned16 or any.")
    if direction not in ("forward", "backward"):
        raise BadProblem(f"direction {direction!r} has no kernels.", "Use forward or backward.")
    dim_v = head_dim if head_dim_v is None else head_dim_v
    shape = Shape(
        batch=_size("batch", batch, 0),
        heads_q=_size("heads", heads, 1),
        heads_kv=_size("kv_heads", heads if kv_heads is None else kv_heads, 1),
        seq_q=_size("seq", seq, 0),
        seq_kv=_size("seq_kv", seq if seq_kv is None else seq_kv, 0),
        head_dim=_size("head_dim", head_dim, 1, MAX_HEAD_DIM),
        head_dim_v=_size("head_dim_v", dim_v, 1, MAX_HEAD_DIM),
        dtype=DTYPES[str(dtype).removeprefix("torch.")],
    )
    if shape.heads_q % shape.heads_kv:
        raise BadProblem(
            f"heads {shape.heads_q} is not a multiple of kv_heads {shape.heads_kv}.",
            "Each key/value head serves the same number of query heads.",
        )
    features = Features("none" if not causal else causal_align, scale_sign)  # type: ignore[arg-type]
    return Problem(shape, features, direction, layout or contiguous_layout(shape))


def contiguous_layout(shape: Shape) -> Layout:
    """The layout class of contiguous q, k and v."""
    rows = shape.head_dim * ITEM_BYTES[shape.dtype], shape.head_dim_v * ITEM_BYTES[shape.dtype]
    return "any" if any(row % 16 for row in rows) else "aligned16"


def problem_from_dict(plain: dict[str, Any]) -> Problem:
    """The inverse of `Problem.to_dict`."""
    return Problem(
        Shape(**plain["shape"]),
        Features(**plain.get("features", {})),
        plain.get("direction", "forward"),
        plain.get("layout", "aligned16"),
    )


def _size(name: str, value: Any, least: int, most: int = MAX_SIZE) -> int:
    # numpy integers and torch sizes become plain ints here, so that no blob reaches the database.
    try:
        size = operator.index(value)
    except TypeError:
        raise BadProblem(f"{name} must be a whole number, got {value!r}.") from None
    if isinstance(value, bool):
        raise BadProblem(f"{name} must be a whole number, got {value!r}.")
    if not least <= size <= most:
        span = f"at least {least}" if size < least and most == MAX_SIZE else f"{least} to {most}"
        raise BadProblem(f"{name} must be {span}, got {size}.")
    return size


def _clipped_sum(first: int, last: int, most: int) -> int:
    """sum of min(max(x, 0), most) for x in first..last."""
    low = max(first, 1)
    if last < low:
        return 0
    top = min(last, most)
    ramp = (low + top) * (top - low + 1) // 2 if top >= low else 0
    flat = (last - max(low, most + 1) + 1) * most if last > most else 0
    return ramp + flat
