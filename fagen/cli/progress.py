"""What a person sees on stderr while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from fagen.cli.output import note
from fagen.outcome import Status
from fagen.report.plain import cell
from fagen.tune.events import (
    Event,
    Finished,
    OtherLoad,
    Preparing,
    Racing,
    Started,
    TrialDone,
    WaitingForDevice,
)

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_EVERY_S = 2.0  # at most one plain line for trials in this time
SILENCE_S = 5.0  # and a sign of life when nothing was said for this long


class Shower(Protocol):
    """Draws progress somewhere. best: what the best time so far is called."""

    best: str

    def line(self, text: str) -> None: ...

    def trial(self, event: TrialDone) -> None: ...

    def close(self) -> None: ...


class Watcher:
    """Takes a run's events: shows them, and counts for the result what was rejected and why."""

    def __init__(self, shower: Shower) -> None:
        self._shower = shower
        self.started: Started | None = None
        self.rejected: Counter[tuple[Status, str]] = Counter()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        self._shower.close()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self.started = event
            self._shower.best = "best" if event.timed else "best predicted"
        if isinstance(event, TrialDone):
            outcome = event.outcome
            if outcome.status not in (Status.OK, Status.SLOWER, Status.PREDICTED):
                self.rejected[outcome.status, outcome.reason] += 1
            self._shower.trial(event)
        text = told(event)
        if text:
            self._shower.line(text)


def told(event: Event) -> str:
    """An event as a line; nothing for those that a bar or the result shows."""
    match event:
        case Started():
            how = "timed" if event.timed else "offline: nothing is timed"
            known = f", {event.known} known from earlier runs" if event.known else ""
            return f"{event.space} valid configs, {how}{known}."
        case WaitingForDevice():
            return (
                f"Waiting for the GPU, held by {event.holder} ({event.seconds_left:.0f} s left)."
            )
        case OtherLoad():
            return f"Other load on the card, times will be noisy: {event.note}"
        case Preparing():
            return "Preparing inputs and the exact result."
        case Racing():
            return f"Measuring {event.programs} finalists again, interleaved with the peers."
        case Finished():
            return f"Run {event.state.replace('_', ' ')} after {event.seconds:.1f} s."
    return ""


def trial_text(event: TrialDone, best: str, since_s: float = 0.0) -> str:
    """Where a run stands, `since_s` after its last trial."""
    left = max(0.0, event.seconds_left - since_s)
    return f"{event.done}/{event.total} tried, {best_text(event, best)}, {left:.0f} s left"


def best_text(event: TrialDone, best: str) -> str:
    return "none good yet" if event.best_us is None else f"{best} {cell(event.best_us)} us"


class Quiet:
    """--quiet: the result alone."""

    best = "best"

    def line(self, text: str) -> None: ...

    def trial(self, event: TrialDone) -> None: ...

    def close(self) -> None: ...


class PlainLines:
    """For files and pipes: a line every few seconds, also while one candidate takes long."""

    def __init__(self) -> None:
        self.best = "best"
        self._last = time.monotonic()
        self._told = "Starting."
        self._trial: tuple[TrialDone, float] | None = None
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)
        self._ticker.start()

    def line(self, text: str) -> None:
        self._last, self._told, self._trial = time.monotonic(), text, None
        note(text)

    def trial(self, event: TrialDone) -> None:
        if time.monotonic() - self._last >= LINE_EVERY_S or event.done == event.total:
            self.line(trial_text(event, self.best))
        self._trial = event, time.monotonic()

    def close(self) -> None:
        self._over.set()
        self._ticker.join()

    def _tick(self) -> None:
        while not self._over.wait(0.5):
            if time.monotonic() - self._last >= SILENCE_S:
                self._last = time.monotonic()
                note(self._still())

    def _still(self) -> str:
        if self._trial is None:
            return f"Still: {self._told}"
        event, at = self._trial
        return trial_text(event, self.best, time.monotonic() - at)


class Bar:
    """For terminals: one bar that stays in its place, lines above it."""

    def __init__(self) -> None:
        self.best = "best"
        self._progress = _bar()
        self._progress.start()
        self._task = self._progress.add_task("", total=None, best="none tried yet", left="")

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def trial(self, event: TrialDone) -> None:
        self._progress.update(
            self._task,
            completed=event.done,
            total=event.total,
            best=best_text(event, self.best),
            left=f"{event.seconds_left:.0f} s left",
        )

    def close(self) -> None:
        self._progress.stop()


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[best]}"),
        TextColumn("{task.fields[left]}"),
        console=Console(stderr=True),
        transient=True,
    )
