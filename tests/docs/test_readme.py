"""Code in README.md and docs/ runs, and links lead somewhere.

A block runs when the line above its fence is `<!-- runs: alone -->`, or `<!-- runs: demo-server -->` for one that talks
to http://127.0.0.1:8000, where `make serve` would serve the demo model.
"""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SERVED = "http://127.0.0.1:8000"
_MARKED = re.compile(r"^<!-- runs: (\S+) -->\n+```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_RUNNERS = {"python": [sys.executable, "-c"], "bash": ["bash", "-euo", "pipefail", "-c"]}


@dataclass(frozen=True)
class Block:
    place: str
    needs: str
    language: str
    code: str


def marked_blocks() -> Iterator[Block]:
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in _MARKED.finditer(text):
            line = text.count("\n", 0, match.start(3)) + 1
            yield Block(f"{document.relative_to(ROOT)}:{line}", match[1], match[2], match[3])


def with_id(block: Block) -> object:
    return pytest.param(block, id=block.place)


BLOCKS = list(marked_blocks())


def test_every_marked_block_can_be_run_and_the_readme_shows_both_ways() -> None:
    marks = sum(document.read_text(encoding="utf-8").count("<!-- runs:") for document in DOCUMENTS)
    assert marks == len(BLOCKS), "a mark without a fenced block right below it"
    assert {block.language for block in BLOCKS} <= set(_RUNNERS)
    assert {block.needs for block in BLOCKS if block.place.startswith("README.md")} == {"alone", "demo-server"}


@pytest.mark.parametrize("block", [with_id(block) for block in BLOCKS if block.needs == "alone"])
def test_it_runs_alone(block: Block, tmp_path: Path) -> None:
    run(block.language, block.code, tmp_path)


@pytest.mark.parametrize("block", [with_id(block) for block in BLOCKS if block.needs == "demo-server"])
def test_it_runs_against_the_demo_server(block: Block, demo_server: str, tmp_path: Path) -> None:
    assert SERVED in block.code
    run(block.language, block.code.replace(SERVED, demo_server), tmp_path)


@pytest.mark.parametrize("document", [pytest.param(d, id=str(d.relative_to(ROOT))) for d in DOCUMENTS])
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    dead = [link for link in links if link and ":" not in link and not (document.parent / link).exists()]
    assert not dead, f"links to what does not exist: {dead}"


def run(language: str, code: str, folder: Path) -> None:
    """In an empty folder; curl fails when the answer is an HTTP error."""
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n", encoding="utf-8")
    environment = os.environ | {"NO_PROXY": "127.0.0.1", "CURL_HOME": str(folder)}
    done = subprocess.run(
        [*_RUNNERS[language], code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "it printed nothing"


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [str(Path(sys.executable).with_name("ling-serve")), "--model", "demo", "--port", str(port)]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as server:
        try:
            wait_until_healthy(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
                raise


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with opener.open(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"the demo server did not start:\n{log.read_text()}")
