"""Kernel time: CUDA-graph replays between two events, caches cold by a named policy, medians.

`rotate`: launches walk through input sets that are together above twice the L2 cache, so each
finds its own inputs evicted. One sample is one replay of a graph of many launches, divided by
their number: no launch overhead, no gaps between launches. What fagen reports.

`flush`: a write of twice the L2 cache before every launch, with an event pair around the launch
alone. The write keeps the stream busy while the host queues the next launch, so no host gap is
timed, but the pair itself adds one to two microseconds: compare only what was measured alike, and
use it where the inputs are too large to hold several sets.

A time that is NaN, infinite, zero or negative raises MeasureError; it is never a fast kernel.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Literal, Protocol

from fagen.errors import MeasureError
from fagen.judge.ratios import least_slowdown, rounds_to_tell
from fagen.outcome import Timing
from fagen.problem import ITEM_BYTES, Problem
from fagen.target import Target

if TYPE_CHECKING:
    import torch

LaunchSet = Callable[[int], None]  # launches on input set number i
Replay = Callable[[], float]  # runs a batch of launches, returns microseconds a launch

MOST_LAUNCHES = 512  # in one graph: capturing costs about 20 us each
# A candidate is lost when its fastest sample so far is above this many times the best's time, by
# the number of samples: one may be an outlier, and two medians of one config are within 0.8 % in
# nine of ten cases (two passes of 456 configs on an H200, benchmarks/spaces).
LOST = (3.0, 1.1)
# Finalists closer than this are the same, and a fixed rule among them gives the same winner in
# every run. Two kernels' ratio in one race and in another on an H200: 0.0 to 0.3 % apart
# (benchmarks/results/h200_flash_ws_race3.json: D128, rescale under_scores against after_softmax).
NOISE = 0.004
CLEAR_ROUNDS = 3  # of a race, after which a contestant may be lost
CLEAR = 0.01  # how often a contestant may leave a race for one that is no faster
MOST_SETS = 64


@dataclass(frozen=True)
class MeasurePolicy:
    """How a time is taken. Its name stands beside every stored time; only equal ones compare.

    warmup_ms: untimed replays before the first sample, so that clocks are steady. batch_ms: about
    how long one sample takes. samples: how many of them in a pass. pause_ms: rest before each
    sample, of a pass and of a race.

    The card is never busy for long. On an H200 (700 W) a kernel that fills the tensor cores runs
    for 30 to 75 ms as after a rest, then the power cap slows it by 9 to 17 %, for as long as it
    or another such kernel goes on (benchmarks/results/h200_power_cap.json): what a sample says
    would hang on what ran before it. With this pause before two batches of 4 ms, ratios of a race
    repeat to 0.3 % (h200_flash_ws_race3.json); without it, the median of a pass was 0 to 11 %
    above its first samples (h200_unrested_passes.json).
    """

    l2: Literal["rotate", "flush"] = "rotate"
    warmup_ms: float = 10.0
    batch_ms: float = 4.0
    samples: int = 5
    pause_ms: float = 25.0

    @property
    def name(self) -> str:
        shape = f"w{self.warmup_ms:g}-b{self.batch_ms:g}-n{self.samples}-p{self.pause_ms:g}"
        return f"graph-{self.l2}-{shape}"

    def input_sets(self, problem: Problem, l2_bytes: int) -> int:
        """How many input sets a launch must rotate over, outputs counted as part of a set."""
        if self.l2 == "flush":
            return 1
        return min(MOST_SETS, max(2, 1 + 2 * l2_bytes // max(problem.io_bytes, 1)))


class Clock(Protocol):
    """What times batches. Tests bring their own."""

    def batch(self, launch: LaunchSet, launches: int, sets: int) -> Replay:
        """A repeatable batch of `launches`, over input sets 0 to sets - 1 in turn."""

    def clock_mhz(self) -> int | None:
        """The SM clock now, or None where nobody can tell."""


def measure(
    launch: LaunchSet,
    policy: MeasurePolicy,
    device: torch.device | str,
    *,
    sets: int = 1,
    give_up_us: float | None = None,
    clock: Clock | None = None,
) -> Timing:
    """The time of a launch. give_up_us: the best time of others; once it is clear that the launch
    is slower (LOST), no more samples are taken: fewer than the policy's say so."""
    clock = clock or clock_of(device, policy)
    replay, first_us = _sized_batch(launch, policy, sets, clock)
    if give_up_us is not None and first_us > LOST[0] * give_up_us:
        return _timing([first_us], [clock.clock_mhz()], policy)
    _warm(replay, first_us, policy)
    samples, clocks = [], []
    for _ in range(policy.samples):
        samples.append(_rested(replay, policy))
        clocks.append(clock.clock_mhz())
        if give_up_us is not None and is_lost(samples, give_up_us):
            break
    return _timing(samples, clocks, policy)


class Bar:
    """The fastest kernel so far. Who seems lost to it may have met a slower device, by heat or
    power, and so it is timed once more then."""

    def __init__(
        self,
        us: float,
        launch: LaunchSet,
        policy: MeasurePolicy,
        device: torch.device | str,
        *,
        sets: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self.us = us
        self._policy = policy
        self._batch = partial(
            _sized_batch, launch, policy, sets, clock or clock_of(device, policy)
        )
        self._replay: Replay | None = None

    def now_us(self) -> float:
        """Its time at this moment, or its first one where that is longer or it can't be timed."""
        try:
            if self._replay is None:
                self._replay, us = self._batch()
                _warm(self._replay, us, self._policy)
            return max(self.us, _rested(self._replay, self._policy))
        except (RuntimeError, MeasureError):
            return self.us


def is_lost(samples_us: Sequence[float], best_us: float) -> bool:
    """Whether so many samples say that a kernel is slower than one that takes best_us (LOST)."""
    return min(samples_us) > LOST[min(len(samples_us), len(LOST)) - 1] * best_us


def race(
    contestants: dict[str, LaunchSet],
    policy: MeasurePolicy,
    rounds: int,
    *,
    device: torch.device | str = "cuda",
    sets: int = 1,
    clock: Clock | None = None,
    failed: dict[str, str] | None = None,
    rivals: Collection[str] = (),
) -> dict[str, Timing]:
    """Contestants measured in turns, one sample a turn after a pause, in a balanced order.

    Drift of the card then meets all of them alike, and so does what the one before left behind:
    without pauses and with an order that was only rotated, whoever came after the slowest peer was
    faster every time (384 us for a kernel that then took 438:
    benchmarks/results/h200_rotated_order_race.json). One that raises is named in `failed` with its
    reason and left out; without `failed` it raises. Whoever is clearly slower than the
    fastest of the `rivals` is not timed any more: its samples are fewer.
    """
    clock = clock or clock_of(device, policy)
    ready: dict[str, Replay] = {}
    for name, launch in contestants.items():
        try:
            ready[name], first_us = _sized_batch(launch, policy, sets, clock)
            _warm(ready[name], first_us, policy)
        except (RuntimeError, MeasureError) as error:
            if failed is None:
                raise
            ready.pop(name, None)
            failed[name] = one_line(error)
    samples: dict[str, list[float]] = {name: [] for name in ready}
    clocks: dict[str, list[int | None]] = {name: [] for name in ready}
    for name in turns(ready, rounds):
        if rivals and _has_left(samples, name, rivals):
            continue
        samples[name].append(_rested(ready[name], policy))
        clocks[name].append(clock.clock_mhz())
    return {name: _timing(samples[name], clocks[name], policy) for name in ready if samples[name]}


def _has_left(samples: dict[str, list[float]], name: str, rivals: Collection[str]) -> bool:
    """Whether one is clearly behind the fastest rival that is still in the race: LOST in every
    round, or slower beyond NOISE by the interval of the ratio."""
    mine, in_race = samples[name], [samples[rival] for rival in rivals if rival in samples]
    if not in_race or min(map(len, samples.values())) < CLEAR_ROUNDS:
        return False
    rounds = max(map(len, in_race))
    fastest = min((s for s in in_race if len(s) >= rounds - 1), key=median)
    if least_slowdown(mine, fastest, 0.0) > LOST[-1]:
        return True
    least = least_slowdown(mine, fastest, CLEAR)
    return len(mine) >= rounds_to_tell(CLEAR) and least > 1 + NOISE


def turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Every name once a round; over as many rounds as names each follows every other alike.

    E. J. Williams, 1949: a zigzag, shifted by one from round to round; every second round runs
    backwards where the names are odd in number, and twice as many rounds are needed.
    """
    ring = list(names)
    count = len(ring)
    zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(count)]
    for turn in range(rounds if ring else 0):
        backwards = count % 2 and turn % 2
        shift = turn // 2 if count % 2 else turn
        order = [ring[(place + shift) % count] for place in zigzag]
        yield from reversed(order) if backwards else order


def impossible(
    problem: Problem, target: Target, us: float, policy: MeasurePolicy | None = None
) -> str | None:
    """Why no kernel can be this fast, as a sentence, or None: then time or launch are wrong.

    Bounds are generous: 1.15x the tensor peak, since cards boost above the datasheet's clock;
    half of the least traffic, and with cold caches only, since an L2 is no strict LRU.
    """
    peak = target.tensor_tflops * (0.5 if problem.shape.dtype == "fp32" else 1.0)  # TF32
    compute_us = problem.flops / (peak * 1.15e6)
    if us < compute_us:
        least = f"{compute_us:.3g} us that {problem.flops} flops take at 1.15x peak"
        return f"{us:.3g} us is below the {least}."
    if policy is not None:
        memory_us = 0.5 * _least_bytes(problem) / (target.memory_gbps * 1e3)
        if us < memory_us:
            return f"{us:.3g} us is below the {memory_us:.3g} us that half of the traffic takes."
    return None


def clock_of(device: torch.device | str, policy: MeasurePolicy) -> Clock:
    """The clock of a torch device: CUDA graphs on a GPU, wall time elsewhere."""
    import torch

    where = torch.device(device)
    if where.type == "cuda":
        from fagen.judge.graphs import CudaClock

        return CudaClock(where, policy.l2)
    return WallClock()


class WallClock:
    """Wall time of plain calls: for machines without a GPU, where no time is ever stored."""

    def batch(self, launch: LaunchSet, launches: int, sets: int) -> Replay:
        def replay() -> float:
            start = time.perf_counter()
            for i in range(launches):
                launch(i % sets)
            return (time.perf_counter() - start) * 1e6 / launches

        return replay

    def clock_mhz(self) -> int | None:
        return None


def _sized_batch(
    launch: LaunchSet, policy: MeasurePolicy, sets: int, clock: Clock
) -> tuple[Replay, float]:
    """A batch of about policy.batch_ms, a multiple of the sets long; and the time it goes by."""
    short = clock.batch(launch, sets, sets)
    short()
    first_us = checked(short())
    wanted = math.ceil(policy.batch_ms * 1e3 / first_us / sets) * sets
    most = max(MOST_LAUNCHES // sets, 1) * sets
    launches = max(sets, min(wanted, most))
    return (short if launches == sets else clock.batch(launch, launches, sets)), first_us


def _warm(replay: Replay, first_us: float, policy: MeasurePolicy) -> None:
    end = time.perf_counter() + policy.warmup_ms / 1e3
    replay()
    while time.perf_counter() < end:
        replay()


def _rested(replay: Replay, policy: MeasurePolicy) -> float:
    time.sleep(policy.pause_ms / 1e3)
    replay()  # untimed: the caches and clocks of whatever ran before are not its own
    return checked(replay())


def checked(us: float) -> float:
    """The same time. Raises MeasureError for one that can't be."""
    if not math.isfinite(us) or us <= 0:
        raise MeasureError(f"A launch was timed at {us} us.", "That is a fault of the timing.")
    return us


def _timing(samples: list[float], clocks: list[int | None], policy: MeasurePolicy) -> Timing:
    known = tuple(mhz for mhz in clocks if mhz is not None)
    return Timing(tuple(samples), policy.name, known)


def _least_bytes(problem: Problem) -> int:
    """As Problem.io_bytes, without keys that no query sees and queries that see no key."""
    s, item = problem.shape, ITEM_BYTES[problem.shape.dtype]
    causal = problem.features.causal
    keys = min(s.seq_kv, s.seq_q) if causal == "top_left" else s.seq_kv
    queries = min(s.seq_q, s.seq_kv) if causal == "bottom_right" else s.seq_q
    reads = s.batch * s.heads_kv * keys * (s.head_dim + s.head_dim_v)
    reads += s.batch * s.heads_q * queries * s.head_dim
    writes = s.batch * s.heads_q * s.seq_q * (s.head_dim_v * item + 4)
    if problem.direction == "backward":
        reads += 2 * s.batch * s.heads_q * queries * s.head_dim_v  # O and its gradient
        writes = s.batch * s.heads_q * s.seq_q * s.head_dim * item
        writes += s.batch * s.heads_kv * s.seq_kv * (s.head_dim + s.head_dim_v) * item
    return (reads * item if problem.visible_pairs else 0) + writes


def one_line(error: Exception) -> str:
    """An error as the reason why a contestant was left out."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
