"""Writes docs/configuration.md and docs/commands.md from the code that they describe, and
docs/measured.md, docs/replays.md, docs/searches.md, docs/tuners.md and a table of README.md from
benchmarks/results.

python docs/generate.py           write them
python docs/generate.py --check   say which one differs, and exit with 1
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click

from fagen import errors, settings
from fagen.cli.main import cli
from fagen.generate.families import FAMILIES
from fagen.problem import problem_from_dict

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
RESULTS = DOCS.parent / "benchmarks/results"
TABLE = re.compile("(?<=<!-- measured -->\n).*?(?=<!-- end of measured -->)", re.DOTALL)
NOTE = "<!-- Written by docs/generate.py. Change the code, then run: make docs -->"
WIDTH = 88


def configuration() -> str:
    """Environment variables, the knobs of each family, and errors with their exit codes."""
    parts = [
        "# Configuration",
        NOTE,
        "## Environment variables",
        _table(["variable", "meaning"], [[f"`{k}`", v] for k, v in settings.VARIABLES.items()]),
        "## Kernel families and their knobs",
        "`fagen tune` searches over these. A config that breaks a rule is never built; "
        "`fagen tune` counts what each rule cut. The default that is served and raced for a shape "
        "is the first of its family's seeds; the values of this column are those of a config that "
        "names no others.",
    ]
    for family in FAMILIES.values():
        knobs = [_knob_row(knob) for knob in fields(family.Knobs)]
        rules = [[f"`{rule.name}`", rule.reason] for rule in family.CONSTRAINTS]
        parts += [
            f"### `{family.NAME}`",
            _table(["knob", "default", "values", "meaning"], knobs),
            _table(["rule", "said when it is broken"], rules),
        ]
    parts += ["## Errors", _table(["error", "exit code", "meaning"], list(_errors()))]
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """What `--help` says, of every command."""
    parts = ["# Commands", NOTE]
    for context in _walk(_context(cli, "fagen", None)):
        shown = "\n".join(line.rstrip() for line in context.get_help().splitlines())
        parts.append(f"## `{context.command_path}`\n\n```\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


def measured() -> str:
    """Every cell that was raced with the other libraries."""
    parts = [
        "# Measured",
        NOTE,
        "Kernel times (CUDA graph, inputs rotated past L2) of what `fagen tune --trials 14` found "
        "in about 25 seconds a shape (D96: `--trials 34`, 50 seconds), in interleaved races with "
        "cuDNN through torch, FlashAttention-2 (torch's), FlashAttention-3, and in some "
        "FlashAttention-4; `sdpa-auto` is what torch chooses by itself. `faster` is the best "
        "peer's time over fagen's, in the median of rounds, with the 20th and the 80th "
        "percentile. Call times are of one eager call, host included: fagen's, and that of the "
        "peer whose call is fastest. A peer that is missing can't run the shape; the file says "
        "why. Every sample is in the file: [results](../benchmarks/README.md).",
    ]
    for path in sorted(RESULTS.glob("*-forward*.json")):
        parts += _measured_file(path)
    gradients = [
        p for path in sorted(RESULTS.glob("*-backward*.json")) for p in _measured_file(path)
    ]
    if gradients:
        parts += [
            "## The backward pass",
            "dQ, dK and dV alone: the forward passes ran before. Peers are timed by "
            "`torch.autograd.grad`, and all are called by it for the call times. fagen's kernel "
            "is timed whole, with what it clears, adds up and converts. FlashAttention-3's "
            "package has no backward pass. `repeating` is the best peer's time over that of "
            "fagen's kernel whose gradients are the same bits in every run, which is no other "
            "where the fastest repeats; no peer is asked to.",
            *gradients,
        ]
    return "\n\n".join(parts) + "\n"


def _measured_file(path: Path) -> list[str]:
    """A result file's heading, what ran, and its table; nothing where nothing was raced."""
    found = json.loads(path.read_text("utf-8"))
    device, versions = found["device"], found["versions"]
    cells = _raced(found)
    if not cells:
        return []
    backward = cells[0]["problem"]["direction"] == "backward"
    mean = geometric_mean(cell["times_best_peer"][0] for cell in cells)
    return [
        f"## {path.name}",
        f"{device['name']}, torch {versions['torch']}, Triton {versions['triton']}, "
        f"{found['date'][:10]}, commit {found['commit']['id']}. "
        f"Geometric mean of {len(cells)}: {mean:.3f}{_repeating_mean(cells)}.",
        _table(
            [
                *("shape", "fagen us", "TFLOP/s", "best peer", "its us", "faster"),
                *(("repeating",) if backward else ()),
                *("call us", "best peer's", "missing"),
            ],
            [_measured_row(cell) for cell in cells],
        ),
    ]


def _repeating_mean(cells: list[dict[str, Any]]) -> str:
    ratios = [
        cell["deterministic"]["times_best_peer"] for cell in cells if "deterministic" in cell
    ]
    known = [ratio[0] for ratio in ratios if ratio is not None]
    return f", of those that repeat {geometric_mean(known):.3f}" if known else ""


def _raced(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells in which fagen and a peer ran."""
    return [cell for cell in found["cells"] if cell["times_best_peer"] is not None]


def _measured_row(cell: dict[str, Any]) -> list[str]:
    best, us = cell["best_peer"], cell["kernel_us"]["fagen"]
    middle, low, high = cell["times_best_peer"]
    calls, repeating = cell["call_us"], []
    if "deterministic" in cell:
        known = cell["deterministic"]["times_best_peer"]
        repeating = ["-" if known is None else f"{known[0]:.3f}"]
    others = [time for name, time in calls.items() if not name.startswith("fagen")]
    missing = ", ".join(name.split(" ")[0] for name in cell["missing"])
    return [
        cell["problem"]["text"].removeprefix(f"{cell['problem']['direction']} "),
        f"{us:.1f}",
        f"{cell['problem']['flops'] / us * 1e-6:.0f}",
        best,
        f"{cell['kernel_us'][best]:.1f}",
        f"{middle:.3f} ({min(low, high):.3f} to {max(low, high):.3f})",
        *repeating,
        *(
            f"{time:.0f}" if time is not None else "-"
            for time in (calls.get("fagen"), min(others, default=None))
        ),
        missing or "-",
    ]


def _three(ratio: float | None) -> str:
    """With three digits; what is below 1 is not shown as 1."""
    return "-" if ratio is None else f"{min(ratio, 0.999) if ratio < 1 else ratio:.3f}"


def _mean_without(ratios: dict[str, float], lacks: list[dict[str, Any]]) -> float:
    named = {cell["problem"]["text"] for cell in lacks}
    return geometric_mean(ratio for text, ratio in ratios.items() if text not in named)


def readme() -> str:
    """README.md with the ratios of grid G as a table, and the other cells in words. Of a cell that
    was raced more than once the least ratio counts."""
    files = sorted(RESULTS.glob("h200-forward*.json"))
    cells = [c for path in files for c in _raced(json.loads(path.read_text("utf-8")))]
    ratios: dict[str, float] = {}
    for text, ratio in ((c["problem"]["text"], c["times_best_peer"][0]) for c in cells):
        ratios[text] = min(ratio, ratios.get(text, ratio))
    latest = [c for c in cells if any(name.startswith("fa4") for name in c["kernel_us"])]
    led = sum(c["best_peer"].startswith("fa4") for c in latest)
    grid, lengths = {}, []
    for text in list(ratios):
        shape = re.fullmatch(r"forward bf16 B(\d+) H(\d+) N(\d+) D(\d+) (full|causal)", text)
        batch, heads, n, dim = map(int, shape.groups()[:4]) if shape else (0, 0, 0, 0)
        if shape and (batch * n, heads * dim) == (16384, 2048):
            grid[n, dim, shape[5]] = ratios.pop(text)
            lengths.append(n)
    lacks = [c for c in cells if any(name.startswith("fa3") for name in c["missing"])]
    columns = [(dim, mask) for dim in (64, 128, 256) for mask in ("full", "causal")]
    rows = [
        [f"N{n}", *(_three(grid.get((n, *column))) for column in columns)]
        for n in sorted(set(lengths))
    ]
    cases = [(f"N{n} D{dim} {mask}", ratio) for (n, dim, mask), ratio in grid.items()]
    cases += [(text.removeprefix("forward "), ratio) for text, ratio in ratios.items()]
    named = ", ".join(f"{text} {_three(ratio)}" for text, ratio in cases if ratio < 1)
    table = _table(["", *(f"D{dim} {mask}" for dim, mask in columns)], rows)
    said = (
        f"Geometric mean of these {len(grid)}: {geometric_mean(grid.values()):.3f}. "
        f"Of {len(ratios)} other shapes (grouped heads, D96, D192/128, fp16, ragged and unequal "
        f"lengths): {geometric_mean(ratios.values()):.3f}; FlashAttention-3's package can't run "
        f"{len(lacks)} of them, which leave a mean of {_mean_without(ratios, lacks):.3f} without. "
        f"FlashAttention-4 was raced too in {len(latest)} shapes, the fastest peer in {led}. "
        f"Under 1.00, where a peer is faster: {named or 'none'}."
    )
    return TABLE.sub(lambda _: f"\n{table}\n\n{said}\n", README.read_text("utf-8"))


def replays() -> str:
    """What searches find on measured spaces."""
    parts = [
        "# Searches on measured spaces",
        NOTE,
        "What `fagen bench-tuner` said of each data set in benchmarks/spaces; what the strategies "
        "are and why the search is as it is: [search](search.md). Shares of the best config's "
        "speed that would have been picked after so many trials: the median over the seeds, then "
        "what nine of ten seeds reach, then the seconds such a run takes.",
    ]
    for path in sorted(RESULTS.glob("replay_*.json")):
        found = json.loads(path.read_text("utf-8"))
        space = path.stem.removeprefix("replay_")
        counts = list(next(iter(found["strategies"].values())))
        rows = [
            [f"`{name}`", *(_score(by_count[count]) for count in counts)]
            for name, by_count in found["strategies"].items()
        ]
        parts += [
            f"## {space}",
            f"{found['problem'].removeprefix('forward ')} on {found['device']}: "
            f"{found['configs']} configs, the best {found['optimum_us']:.1f} us; "
            f"{found['seeds']} seeds.",
            _table(["strategy", *(f"{count} trials" for count in counts)], rows),
        ]
    return "\n\n".join(parts) + "\n"


def _score(score: dict[str, float]) -> str:
    return f"{score['median']:.4f}, {score['p10']:.4f}, {score['seconds']:.0f} s"


def searches() -> str:
    """What runs of the tuner find on a GPU."""
    parts = [
        "# Runs of the tuner",
        NOTE,
        "`benchmarks/searches.py` tunes a shape from an empty database and empty caches (`cold`), "
        "by a fagen with which nothing ships, as what does would be among the seeds; "
        "then its neighbour with 12 trials into the same database (`warm`); one shape it tunes "
        "again and again from nothing, each time with another seed (`repeated`). `seconds` is the "
        "whole process, imports and the race at its end included. `share` is the time of the "
        "fastest kernel known over that of the kernel chosen, both raced in turns in a process "
        "that tuned nothing: known are the best of the shape's measured space ([replays]"
        "(replays.md)), the one that ships with fagen, what the runs chose, and the default.",
    ]
    for path in sorted(RESULTS.glob("h200_searches*.json")):
        found = json.loads(path.read_text("utf-8"))
        versions = found["versions"]
        head = ["shape", "start", "tried", "seconds", "share", "share of the default"]
        parts += [
            f"## {path.name}",
            f"{found['device']['name']}, torch {versions['torch']}, Triton {versions['triton']}, "
            f"{found['date'][:10]}, commit {found['commit']['id']}.",
            _table(head, [row for shape in found["shapes"] for row in _search_rows(shape)]),
        ]
    return "\n\n".join(parts) + "\n"


def _search_rows(shape: dict[str, Any]) -> Iterator[list[str]]:
    problem = str(problem_from_dict(shape["problem"])).removeprefix("forward ")
    default = shape.get("default_share")
    for run in shape["runs"]:
        share = run.get("share")
        yield [
            problem,
            shape["start"],
            str(run.get("tried", "-")),
            f"{run['process_s']:.1f}",
            f"{share:.4f}" if share is not None else run.get("reason") or shape.get("reason", "-"),
            "-" if default is None else f"{default:.4f}",
        ]


def tuners() -> str:
    """Tuners side by side, on one shape each."""
    parts = [
        "# Tuners side by side",
        NOTE,
        "`benchmarks/tuners.py` starts each tuner in a process of its own with empty caches, then "
        "holds what it chose against the fp64 truth and races the kernels that are right in one "
        "process ([results](../benchmarks/README.md)). `seconds` go from the start of the process "
        "until the first call with the chosen config returned, and for `fagen tune`, which checks "
        "every kernel and races its finalists, until its process ended; `of that tuning` leaves "
        "out imports. Each tunes a kernel of its own but the two of `triton.autotune`, which have "
        "fagen's portable family; so the times compare what a user gets, not searches alone. "
        "fagen starts from its families' seeds, which earlier H200 races found good for such "
        "shapes, and without what ships for them. "
        "Helion's kernel writes no LSE.",
    ]
    for path in sorted(RESULTS.glob("h200_tuners*.json")):
        found = json.loads(path.read_text("utf-8"))
        device, versions = found["device"], found["versions"]
        rows = [_tuner_row(row) for row in found["tuners"] + found["peers"]]
        parts += [
            f"## {path.name}",
            f"{found['problem']['text'].removeprefix('forward ')} on {device['name']}, "
            f"{found['cores']} cores, torch {versions['torch']}, Triton {versions['triton']}, "
            f"Helion {versions['helion'] or 'not installed'}, {found['date'][:10]}, commit "
            f"{found['commit']['id']}; a deadline of {found['deadline_s']:g} s for each tuner"
            f"{_budget(found['tuners'])}.",
            _table(
                [
                    *("tuner", "seconds", "of that tuning", "tried", "failed", "us", "TFLOP/s"),
                    *("time over fagen's", "config, or the reason why there is no time"),
                ],
                rows,
            ),
        ]
    return "\n\n".join(parts) + "\n"


def _budget(rows: list[dict[str, Any]]) -> str:
    told = [row["settings"]["autotune_budget_seconds"] for row in rows if "settings" in row]
    return f", of which Helion was told {told[0]} as its own budget" if told else ""


def _tuner_row(row: dict[str, Any]) -> list[str]:
    """A peer of torch has times alone."""
    counts = [str(row.get(word, "-")) for word in ("tried", "failed")]
    spent = [f"{row[word]:.1f}" if word in row else "-" for word in ("seconds", "tuning_s")]
    timed, beside = row.get("median_us"), row.get("times_fagen")
    return [
        row.get("tuner", row["name"]),
        *spent,
        *counts,
        "-" if timed is None else f"{timed:.1f}",
        "-" if timed is None else f"{row['tflops']:.0f}",
        "-" if beside is None else f"{beside[0]:.3f} ({beside[1]:.3f} to {beside[2]:.3f})",
        row.get("reason") or _chosen(row.get("config")),
    ]


def _chosen(config: dict[str, Any] | None) -> str:
    if config is None:
        return "-"
    family, knobs = config.get("family"), config.get("knobs", config)
    shown = ", ".join(f"{name}={value}" for name, value in knobs.items())
    return f"{family}: {shown}" if family else shown


def pages() -> dict[Path, str]:
    return {
        DOCS / "configuration.md": configuration(),
        DOCS / "commands.md": commands(),
        DOCS / "measured.md": measured(),
        DOCS / "replays.md": replays(),
        DOCS / "searches.md": searches(),
        DOCS / "tuners.md": tuners(),
        README: readme(),
    }


def differing() -> list[str]:
    """Names of the pages that are missing or do not say what the code says."""
    return [
        path.name
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    # A width of its own: help must not depend on the terminal of whoever runs this.
    return command.make_context(
        name,
        [],
        parent,
        resilient_parsing=True,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
    )


def _walk(context: click.Context) -> Iterator[click.Context]:
    yield context
    command = context.command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, f"{context.command_path} lists {name} and lacks it"
            yield from _walk(_context(inner, name, context))


def _knob_row(knob: Field[Any]) -> list[str]:
    values = ", ".join(f"`{value}`" for value in knob.metadata["choices"])
    return [f"`{knob.name}`", f"`{knob.default}`", values, knob.metadata["doc"]]


def _errors() -> Iterator[list[str]]:
    for name, found in vars(errors).items():
        if isinstance(found, type) and issubclass(found, errors.FagenError):
            meaning = (found.__doc__ or "").split("\n\n")[0]
            yield [f"`{name}`", str(found.exit_code), meaning]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    if "--check" in sys.argv[1:]:
        stale = differing()
        print("\n".join(f"{name} is out of date. Run: make docs" for name in stale))
        return 1 if stale else 0
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(DOCS.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
