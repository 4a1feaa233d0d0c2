"""Every test that docs/review-findings.md names exists, and no row is without one."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "review-findings.md"
ROWS = [
    line
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| kind of bug")
]
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def names_in(file: str) -> frozenset[str]:
    """Names that pytest would collect."""
    module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


@pytest.mark.parametrize("row", [pytest.param(row, id=row[2:42]) for row in ROWS])
def test_a_row_names_tests_that_exist(row: str) -> None:
    _, kind, kept_out, tests, _ = row.split("|")
    assert kind.strip()
    assert kept_out.strip()
    named = _TEST.findall(tests)
    assert named
    assert len(named) == tests.count("::"), "a test that is not written as `tests/path.py::test_name`"
    gone = [f"{file}::{name}" for file, name in named if not (ROOT / file).is_file() or name not in names_in(file)]
    assert not gone


def test_no_bug_is_listed_twice() -> None:
    kinds = [row.split("|")[1].strip() for row in ROWS]
    assert len(kinds) == len(set(kinds)) > 20
