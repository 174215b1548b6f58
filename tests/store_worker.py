"""A process that uses a database, for the tests of many at once.

python store_worker.py PATH ACTION NAME COUNT: says "ready", waits for a line on stdin, acts, and
says "done" or the error.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from store_rows import NOW, final_row, run_row, trial_row, verdict_row
from tuning_db import Store, StoreError, schema


def write(path: str, name: str, count: int) -> None:
    """A run of `count` trials, each its own source; says the number of each once it is stored."""
    store = Store(path, "write")
    run_id = store.add_run(run_row(name))
    for number in range(count):
        store.add_trial(trial_row(run_id, 10.0 + number, f"{name}-{number}"))
        say(number)
    store.put_verdict(verdict_row(program="of all"))
    store.add_finals([final_row(run_id, f"{name}-0", 10.0, chosen=True)])


def improve(path: str, name: str, count: int) -> None:
    """A run of `count` trials, each faster than the one before; says the id of each."""
    store = Store(path, "write")
    run_id = store.add_run(run_row(name))
    for number in range(count):
        us = 10.0 + count - number
        say(store.add_trial(trial_row(run_id, us, f"{name}-{number}")))
    store.end_run(run_id, "finished", partial=False, ended=NOW)


def watch(path: str, name: str, count: int) -> None:
    """Asks for the best of everything until `count` runs are finished; says how often it did, or
    which answer was worse than one before."""
    store, before, asked = Store(path), dict[str, float](), 0
    finished = False
    while not finished:
        finished = len(store.runs(state="finished")) == count
        best = {view.run.problem_key: view.best_us or 0.0 for view in store.best()}
        worse = [key for key, us in before.items() if best.get(key, us + 1) > us]
        if worse:
            return say(f"worse: {worse} after {asked}")
        before, asked = best, asked + 1
        time.sleep(0.2)  # a reader that never rests takes a core from the writers
    return say(asked)


def hold(path: str, name: str, count: int) -> None:
    """A run that is never ended."""
    Store(path, "write").add_run(run_row(name))
    say("held")
    sys.stdin.readline()


def migrate(path: str, name: str, count: int) -> None:
    """Opens with the migrations in folder `name`, whose head is version `count`."""
    schema.MIGRATIONS, schema.HEAD = Path(name), count
    store = Store(path, "write")
    store.add_run(run_row("after"))


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


ACTIONS = {f.__name__: f for f in (write, improve, watch, hold, migrate)}


def main() -> None:
    path, action, name, count = sys.argv[1:]
    say("ready")
    sys.stdin.readline()
    try:
        ACTIONS[action](path, name, int(count))
    except StoreError as error:
        say(f"{type(error).__name__}: {error}")
    else:
        say("done")


if __name__ == "__main__":
    main()
