"""`fagen.get`: from a shape to a kernel that can be called. Never tunes, never migrates.

memo -> the user's database -> shipped records -> nearest -> predicted -> default. What has no
passed verdict for this device and toolchain is verified here, at first use, and says so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, overload

from fagen import settings
from fagen.config import Config
from fagen.errors import BadProblem, FagenError, NoDevice, NoKernel, VerificationFailed
from fagen.generate.families import config_from_dict, repeats
from fagen.generate.program import Program
from fagen.problem import Problem, problem_from_dict
from fagen.records import runs_ended, shipped
from fagen.serve.candidates import Candidate, OnMiss, candidates
from fagen.serve.database import reading
from fagen.serve.explain import Explanation, explain
from fagen.serve.gradient import GradientKernel
from fagen.serve.inputs import problem_of, tune_command
from fagen.serve.kernel import Kernel
from fagen.serve.place import Place, place_of
from fagen.serve.ready import (
    fitting,
    give_up_on,
    is_candidates_fault,
    make_ready,
    refuse_spoilt,
)
from fagen.serve.served import Asked, Chosen
from fagen.target import Target

if TYPE_CHECKING:
    from fagen.records import Record, Records

log = logging.getLogger(__name__)

EACH_REPEATABLE = 100  # rows of a bucket: the fastest few may all be of kernels that don't repeat

_memo: dict[Any, Kernel | GradientKernel] = {}
_warned: set[str] = set()
_seen_runs = 0
_lock = threading.RLock()


@overload
def get(
    *first: Any,
    direction: Literal["backward"],
    device: Any = None,
    target: str | Target | None = None,
    on_miss: OnMiss = "nearest",
    db: str | None = None,
    deterministic: bool = False,
    **words: Any,
) -> GradientKernel: ...


@overload
def get(
    *first: Any,
    device: Any = None,
    target: str | Target | None = None,
    on_miss: OnMiss = "nearest",
    db: str | None = None,
    deterministic: bool = False,
    **words: Any,
) -> Kernel: ...


def get(
    *first: Any,
    device: Any = None,
    target: str | Target | None = None,
    on_miss: OnMiss = "nearest",
    db: str | None = None,
    deterministic: bool = False,
    **words: Any,
) -> Kernel | GradientKernel:
    """The best known kernel for a shape; its `repr` says which one and why.

    The shape: keywords as in `make_problem` (seq=8192, head_dim=128, causal=True, ...), a Problem,
    a tuple (B, H, S, D) with keywords for the rest, or the tensors q, k, v with causal keywords.
    device: default the tensors', else the current CUDA device. target: a name or a Target, to look
    at source and config without that device. on_miss: "nearest" takes the nearest tuned shape,
    then the default config; "default" only the default; "raise" raises NoKernel. deterministic:
    gradients are to be the same bits in every run, as while torch.use_deterministic_algorithms is
    on; the forward pass always is.

    A Kernel computes gradients by itself where its inputs require them; direction="backward" gives
    the GradientKernel that it would use.

    Raises NoDevice, NoKernel, BadProblem, BadInput, VerificationFailed, NotDuringCapture.
    """
    problem, place = _asked(first, words, device, target, db, on_miss)
    where = place.target, str(place.device), place.db or settings.database_setting()
    key = (_kind(problem), where, on_miss, deterministic)
    with _lock:
        _forget_after_tuning()
        kernel = _memo.get(key)
        if kernel is None:
            kernel = _memo[key] = _made(problem, place, on_miss, deterministic)
    # One kernel serves all sizes of a bucket; which were asked for is each caller's own.
    return kernel if kernel.problem == problem else replace(kernel, problem=problem)


def _made(
    problem: Problem, place: Place, on_miss: OnMiss, deterministic: bool
) -> Kernel | GradientKernel:
    twins: OnMiss = "nearest" if on_miss == "raise" else on_miss
    find = partial(choose, place, twins)
    words: dict[str, Any] = {"on_miss": twins, "db": place.db, "deterministic": deterministic}
    asked = Asked(place.target, words)
    if problem.direction == "backward":
        chosen = choose(place, on_miss, problem, repeatable=deterministic)
        return GradientKernel(
            problem, chosen, place.device, find, asked=asked, deterministic=deterministic
        )
    chosen = choose(place, on_miss, problem)
    backward = replace(problem, direction="backward")
    gradient = partial(get, backward, device=place.device, **words)
    return Kernel(problem, chosen, place.device, find, asked=asked, find_gradient=gradient)


def get_again(
    problem: dict[str, Any], target: Target, words: dict[str, Any], device: str | None
) -> Kernel | GradientKernel:
    """A kernel that was pickled, maybe on another machine. device: of which type it had one."""
    whole = problem_from_dict(problem)
    if device is not None:
        with suppress(NoDevice):
            here: Kernel | GradientKernel
            here = get(whole, device=None if device == "cuda" else device, **words)
            return here
    to_read: Kernel | GradientKernel = get(whole, target=target, **words)
    return to_read


def why(
    *first: Any,
    device: Any = None,
    target: str | Target | None = None,
    on_miss: OnMiss = "nearest",
    db: str | None = None,
    deterministic: bool = False,
    **words: Any,
) -> Explanation:
    """What `get` would return for the same arguments, field by field. Runs and stores nothing.

    deterministic: for a backward problem, as for `get(..., deterministic=True).gradient`.
    """
    problem, place = _asked(first, words, device, target, db, on_miss)
    with _open(place.db) as records:
        rows = _rows(problem, records, deterministic)
        for candidate, program in _walk(place, on_miss, problem, None, rows, deterministic):
            return explain(place, problem, rows, candidate, program, records)
        return explain(place, problem, rows, None, None, records)


@lru_cache(maxsize=1024)
def _kind(problem: Problem) -> tuple[str, tuple[int, int, int]]:
    # 25 us to compute; fagen.get(q, k, v)(q, k, v) asks for it in every call.
    return problem.class_key, problem.bucket


def _forget_after_tuning() -> None:
    """A run that this process finished may have found something better."""
    global _seen_runs
    ended = runs_ended()
    if ended != _seen_runs:
        _seen_runs = ended
        _memo.clear()


def forget() -> None:
    """Drop every kernel that `get` remembers, so that new tuning results are seen."""
    with _lock:
        _memo.clear()


def choose(
    place: Place,
    on_miss: OnMiss,
    problem: Problem,
    prefer: Config | None = None,
    *,
    repeatable: bool = False,
) -> Chosen:
    """The first candidate that can be made ready; on a device: loaded and verified.

    prefer: a config to try before all others. repeatable: one that gives the same bits in every
    run.
    """
    failures: list[str] = []
    with _lock, _open(place.db) as records:
        rows = _rows(problem, records, repeatable)
        for candidate, program in _walk(place, on_miss, problem, prefer, rows, repeatable):
            try:
                return make_ready(place, candidate, program, records)
            except Exception as error:
                if not is_candidates_fault(error):
                    raise
                give_up_on(place, candidate, program, error, records)
                refuse_spoilt(place, error)
                failures.append(str(error))
    if failures:
        raise VerificationFailed(
            f"None of {len(failures)} kernels for {problem} can be used: {failures[0]}",
            "Run: fagen doctor",
        )
    raise NoKernel(
        f"No kernel for {problem} on {place.target.name}.", f"Run: {tune_command(problem)}"
    )


def _asked(
    first: tuple[Any, ...], words: dict[str, Any], device: Any, target: Any, db: Any, on_miss: str
) -> tuple[Problem, Place]:
    if on_miss not in ("nearest", "default", "raise"):
        raise BadProblem(f"on_miss {on_miss!r} is unknown.", "Use nearest, default or raise.")
    problem = problem_of(first, words)
    if device is None and len(first) == 3:
        device = first[0].device
    return problem, place_of(device, target, None if db is None else str(db))


def _walk(
    place: Place,
    on_miss: OnMiss,
    problem: Problem,
    prefer: Config | None,
    rows: list[Record],
    repeatable: bool,
) -> Iterator[tuple[Candidate, Program]]:
    """Candidates that fit, each source once; with `repeatable`, those that give the same bits."""
    tried: set[str] = set()
    first = [] if prefer is None else [Candidate("default", prefer)]
    for candidate in (*first, *candidates(problem, place.target, place.toolchain, rows, on_miss)):
        if repeatable and not repeats(candidate.config):
            continue
        program = fitting(place, problem, candidate)
        if program is not None and program.key not in tried:
            tried.add(program.key)
            yield candidate, program


def _rows(problem: Problem, records: Records | None, repeatable: bool) -> list[Record]:
    if records is not None:
        try:
            if repeatable:
                return records.candidates(problem.class_key, each=EACH_REPEATABLE)
            return records.candidates(problem.class_key)
        except FagenError as error:  # damaged further down than the first page, or locked
            _warn_without(error)
    return shipped(problem.class_key, config_from_dict)


@contextmanager
def _open(db: str | None) -> Iterator[Records | None]:
    """The database for reading, or None with one warning: a broken one is a miss, not an end."""
    with ExitStack() as stack:
        try:
            records = stack.enter_context(reading(db))
        except FagenError as error:
            _warn_without(error)
            records = None
        yield records


def _warn_without(error: FagenError) -> None:
    _warn_once(f"going on without the tuning database: {error}")


def _warn_once(line: str) -> None:
    if line not in _warned:
        _warned.add(line)
        log.warning("%s", line)
