"""Known faults of other attention libraries and tuners: each has a test here.

A test says which it is about in its name (`test_n03_...`), or in a comment above it (`# N03`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent

CASES = {
    "N01": "a row whose mask hides every key",
    "N02": "a causal mask lined up with the wrong corner",
    "N03": "head sizes that are no power of two, and values of another size",
    "N04": "grouped heads with a remainder or a high ratio",
    "N05": "odd and empty lengths",
    "N06": "raw scores beyond the range of fp16",
    "N07": "a log-sum-exp in the wrong base",
    "N09": "strided, broadcast and misaligned views",
    "N10": "offsets that pass 2**31",
    "N11": "ranks, dtypes, devices and arguments that are not supported",
    "R03": "generated text that lives in no file, or whose file is gone",
    "R04": "an import that touches the device, writes, or is slow",
    "R05": "host time and memory that grow with each call, length or failure",
    "T01": "the fastest config is wrong, or the reference is",
    "T02": "one config that fails ends the run",
    "T03": "a config that hangs, or takes its process with it",
    "T04": "every config fails",
    "T06": "Ctrl-C that loses results or leaves processes behind",
    "C01": "a key that misses something",
    "C02": "a file that was cut short",
    "C03": "many processes on one database",
    "C04": "a home or a folder that can't be written",
    "O01": "the search space changed since the last run",
    "O02": "the same config proposed again and again",
    "O03": "a killed run that stays alive in the database",
    "D01": "numpy numbers stored as blobs",
    "D02": "--json that is no JSON",
    "D03": "broken pipes, and failures that exit with 0",
    "D04": "times that lose their zone",
    "D05": "databases of older and newer versions",
}
IDS = r"[A-Z]\d\d(?:, [A-Z]\d\d)*"


def marked(text: str) -> dict[str, list[str]]:
    """Which tests of a file are marked with each case."""
    found = defaultdict(list)
    waiting: list[str] = []
    for line in text.splitlines():
        if marker := re.match(rf" *# ({IDS})(\b|$)", line):
            waiting += marker[1].split(", ")
        if test := re.match(r" *def (test_(?:([a-z]\d\d)_)?\w+)\(", line):
            named = [test[2].upper()] if test[2] else []
            for case in dict.fromkeys(waiting + named):
                found[case].append(test[1])
            waiting = []
    return dict(found)


def marked_anywhere() -> dict[str, list[str]]:
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        if path != Path(__file__).resolve():
            for case, names in marked(path.read_text(encoding="utf-8")).items():
                found[case] += names
    return dict(found)


def test_every_case_has_a_test() -> None:
    found = marked_anywhere()
    assert [f"{case}: {fault}" for case, fault in CASES.items() if case not in found] == []


def test_a_marker_counts_for_the_next_test_alone() -> None:
    text = """
# N01, C02: a line of its own
@decorated
def test_one():
    # no marker: N03
def test_two():
def test_t04_three():
    # D01
    def test_in_a_class(self):
# R03
"""
    assert marked(text) == {
        "N01": ["test_one"],
        "C02": ["test_one"],
        "T04": ["test_t04_three"],
        "D01": ["test_in_a_class"],
    }
