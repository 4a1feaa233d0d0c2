"""The tree printed in docs/architecture.md is the real one.

One line per entry (or several names joined by ` · `), folders with a slash at the end, indented by spaces or box
drawing; two spaces before the remark. A folder printed without entries stands for all that is in it.
"""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
SOURCES = ("ling_serve", "kernels/ling_kernels")
_DRAWING = " │├└─"


def printed_entries(markdown: str) -> Iterator[tuple[PurePosixPath, bool]]:
    """(path, is a folder) of every entry of the block fenced as `tree`."""
    block = re.search(r"^```tree\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)
    assert block is not None, f"{DOCUMENT} has no block fenced as ```tree"
    above: list[tuple[int, PurePosixPath]] = []
    for line in block[1].splitlines():
        entry = line.lstrip(_DRAWING)
        if not entry:
            continue
        column = len(line) - len(entry)
        while above and above[-1][0] >= column:
            above.pop()
        folder = above[-1][1] if above else PurePosixPath()
        for name in re.split(r"\s{2,}", entry)[0].split(" · "):
            yield folder / name, name.endswith("/")
            if name.endswith("/"):
                above.append((column, folder / name))


def real_modules() -> set[PurePosixPath]:
    return {
        PurePosixPath(path.relative_to(ROOT).as_posix())
        for source in SOURCES
        for path in (ROOT / source).rglob("*.py")
        if path.name != "__init__.py"
    }


def test_the_printed_tree_is_the_real_one() -> None:
    entries = dict(printed_entries(DOCUMENT.read_text(encoding="utf-8")))
    gone = sorted(str(path) for path, is_folder in entries.items() if (ROOT / path).is_dir() != is_folder)
    gone += sorted(str(path) for path in entries if not (ROOT / path).exists() and str(path) not in gone)
    assert not gone, f"printed, but not there (or not of that kind): {gone}"

    with_entries = {path.parent for path in entries}
    summed_up = {path for path, is_folder in entries.items() if is_folder and path not in with_entries}
    unprinted = [m for m in real_modules() if m not in entries and summed_up.isdisjoint(m.parents)]
    assert not unprinted, f"not printed: {sorted(map(str, unprinted))}"


def test_reading_a_tree() -> None:
    text = """
```tree
pyproject.toml · Makefile   build
a/                          first
├── b/
│   └── c.py · d.py         two
└── e/                      all of it
f.py
```
"""
    assert {str(path): is_folder for path, is_folder in printed_entries(text)} == {
        "pyproject.toml": False,
        "Makefile": False,
        "a": True,
        "a/b": True,
        "a/b/c.py": False,
        "a/b/d.py": False,
        "a/e": True,
        "f.py": False,
    }
