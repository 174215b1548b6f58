"""`fagen tune` with candidates that act, as a program of its own: for tests that end it.

python acting_tune.py RIGHT SECONDS WHERE WORDS...: the first RIGHT candidates are right and take
SECONDS each on the device; the others hang WHERE ("build" or "device"), and the first that does
makes the file "hanging" in the folder ACTING. WORDS go to `fagen tune`. Says "done N" for each
row that is stored.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from acting import HANG, Act, act_in_children, rendering
from fagen import settings
from fagen.cli import places
from fagen.cli.main import main
from fagen.config import Config
from fagen.tune import place, tuner
from fagen.tune.events import Event, TrialDone
from fakes import PROBLEM, TARGET, Policy, small_space

CANDIDATES = 24


def acts(right: int, seconds: float, where: str, seen: dict[Config, Act], config: Config) -> Act:
    """The same for a config whenever it is rendered; what ships for near shapes is only built."""
    if config not in small_space(CANDIDATES).configs:
        return Act()
    if config not in seen:
        hang = Act(**{where: f"Path(os.environ['ACTING'], 'hanging').touch()\n{HANG}"})
        seen[config] = Act(device=f"time.sleep({seconds})") if len(seen) < right else hang
    return seen[config]


def say(event: Event, then: Any) -> None:
    if isinstance(event, TrialDone):
        sys.stdout.write(f"done {event.done}\n")
        sys.stdout.flush()
    then(event)


def stage(right: int, seconds: float, where: str) -> None:
    """The real tuner with its real pool and proxies, on no device, in a small space."""
    space, tune = small_space(CANDIDATES), tuner.tune
    act_in_children()
    places.place_of = lambda device, name: (TARGET, True)
    tuner.place_of = lambda target, device, devices: place.Place(TARGET, "cuda:0")
    tuner.policy_of = lambda place: Policy()
    tuner.seeds_of = lambda problem, target: space.seeds
    tuner.SearchSpace = SimpleNamespace(of=lambda problem, target: space)
    render = rendering(partial(acts, right, seconds, where, {}))
    tuner.render = lambda problem, config, triton_minor: render(problem, config)
    tuner.tune = lambda *given, on_event, **words: tune(
        *given, on_event=partial(say, then=on_event), **words
    )
    # The lock of a device that many tests pretend to have.
    settings.lock_dir = lambda: Path(os.environ["ACTING"])
    place.report_other_load = lambda uuid, on_event: None


if __name__ == "__main__":
    stage(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
    shape = PROBLEM.shape
    size = ["--seq", str(shape.seq_q), "--head-dim", str(shape.head_dim)]
    sys.exit(main(["tune", *size, "--trials", str(CANDIDATES), *sys.argv[4:]]))
