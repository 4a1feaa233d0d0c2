"""What cannot be served is said in one line, with the code that belongs to it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import NoReturn

import pytest

from ling_serve.cli import main
from tests.checkpoints import cached_checkpoint


class Left(BaseException):
    pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    """Runs the command in this process. Returns its code, its error lines and its log."""
    codes: list[int] = []

    def leave(code: int) -> NoReturn:
        codes.append(code)
        raise Left

    monkeypatch.setattr("ling_serve.commands.serve.leave", leave)
    caplog.set_level("INFO")

    def run(*arguments: str) -> tuple[int, list[str], str]:
        try:
            code = main(arguments)
        except Left:
            code = codes[0]
        return code, capsys.readouterr().err.splitlines(), caplog.text

    return run


def test_a_taken_port_is_noticed_before_anything_is_loaded(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, lines, log = run("/no/such/folder", "--port", str(port))
    assert code == 2
    assert lines == [
        f"ling-serve: error: --port is {port}, which cannot be had on 127.0.0.1: Address already in use; choose another"
    ]
    assert "loading" not in log


@pytest.mark.parametrize("case", ["no such folder", "another architecture", "no tokenizer", "does not fit"])
def test_what_cannot_be_served(run, tmp_path: Path, case: str) -> None:
    checkpoint = cached_checkpoint()
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    flags: list[str] = []
    match case:
        case "no such folder":
            folder, said, expected = tmp_path / "missing", "missing", 1
        case "another architecture":
            config = json.loads((checkpoint / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
            (folder / "config.json").unlink()
            (folder / "config.json").write_text(json.dumps(config))
            said, expected = "LlamaForCausalLM", 1
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
            said, expected = "tokenizer.json", 1
        case _:
            flags, said, expected = ["--max-model-len", "999999999"], "--max-model-len", 2
    code, lines, log = run(str(folder), "--port", "0", *flags)
    assert code == expected
    errors = [line for line in lines if line.startswith("ling-serve: error: ")]
    assert len(errors) == 1, lines
    assert said in errors[0]
    assert "Traceback" not in log
    assert not any("Traceback" in line for line in lines)
