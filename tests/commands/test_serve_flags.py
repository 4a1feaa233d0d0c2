"""Flags become settings, and wrong ones end the process with code 2 and one line that names them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ling_serve import __version__
from ling_serve.cli import main
from ling_serve.commands.serve_flags import parse_serve_flags
from ling_serve.config import EngineOptions, HttpOptions, ModelOptions, ServeConfig


def test_defaults() -> None:
    expected = ServeConfig(ModelOptions("demo", default_chat_template_kwargs={}), EngineOptions(), HttpOptions())
    for arguments in (["demo"], ["--model", "demo"], ["demo", "--model", "demo"]):
        assert parse_serve_flags(arguments) == expected
    assert (expected.http.host, expected.http.port) == ("127.0.0.1", 8000)


def test_every_flag(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("x")
    arguments = f"""org/name --host ::1 --port 9 --served-model-name a b --max-model-len 2048 --max-num-seqs 2
        --max-num-batched-tokens 64 --block-size 16 --gpu-memory-utilization 0.5 --dtype float16 --seed 3
        --chat-template {template} --trust-remote-code --tensor-parallel-size 1 --speculative-config null
        --api-key k --log-level debug --generation-config none --default-chat-template-kwargs"""
    config = parse_serve_flags([*arguments.split(), '{"enable_thinking": false}'])
    assert config == ServeConfig(
        ModelOptions("org/name", "float16", ("a", "b"), template, {"enable_thinking": False}, "none", True),
        EngineOptions(2048, 2, 64, 16, 0.5, seed=3),
        HttpOptions("::1", 9, "k", "debug"),
    )
    assert parse_serve_flags(["m", "--memory-utilization", "0.5"]).engine.memory_utilization == 0.5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--model is missing; expected a checkpoint folder"),
        (["a", "--model", "b"], "--model is 'b', but the model was also given as 'a'"),
        (["a", "b"], "unrecognized arguments: b"),
        (["m", "--port", "x"], "argument --port: 'x' given; expected a port from 0 to 65535"),
        (["m", "--port", "70000"], "argument --port: '70000' given; expected a port from 0 to 65535"),
        (["m", "--max-model-len", "1e3"], "argument --max-model-len: '1e3' given; expected a whole number"),
        (["m", "--max-model-len", "1"], "--max-model-len is 1; expected at least 2"),
        (["m", "--max-num-seqs", "0"], "--max-num-seqs is 0; expected at least 1"),
        (["m", "--max-num-seqs", "99", "--max-num-batched-tokens", "9"], "--max-num-batched-tokens is 9, below"),
        (["m", "--block-size", "17"], "--block-size is 17; expected 16, 32 or 64"),
        (["m", "--memory-utilization", "2"], "--memory-utilization is 2.0; expected a fraction"),
        (["m", "--memory-utilization", "lots"], "'lots' given; expected a number such as 0.9"),
        (["m", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["m", "--tensor-parallel-size", "2"], "--tensor-parallel-size is 2; expected 1"),
        (["m", "--speculative-config", '{"method": "mtp"}'], "--speculative-config asks for speculative decoding"),
        (["m", "--speculative-config", "{"], "argument --speculative-config: '{' given; expected JSON"),
        (["m", "--default-chat-template-kwargs", '{"a":' + "[" * 50_000], "expected a JSON object"),
        (["m", "--default-chat-template-kwargs", "[1]"], "argument --default-chat-template-kwargs: '[1]' given"),
        (["m", "--chat-template", "/nowhere.jinja"], "argument --chat-template: '/nowhere.jinja' given"),
        (["m", "--api-key", " "], "argument --api-key: ' ' given; expected a key that is not empty"),
        (["m", "--log-level", "loud"], "argument --log-level: invalid choice: 'loud'"),
        (["m", "--generation-config", "x"], "argument --generation-config: invalid choice: 'x'"),
        (["m", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["m", "--max-model", "5"], "unrecognized arguments: --max-model 5"),
        (["m", "--host", "no such host"], "--host is 'no such host', which is no address"),
    ],
)
def test_a_wrong_flag(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("ling-serve: error: ")
    assert said in lines[0]


def test_help_and_version_are_quick() -> None:
    code = (
        "import sys; from ling_serve.cli import main\n"
        "for flag in ('--help', '--version'):\n"
        "    try: main([flag])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "print([m for m in ('mlx.core', 'mlx_lm', 'transformers', 'fastapi', 'uvicorn', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert f"ling-serve {__version__}" in done.stdout
    assert "--default-chat-template-kwargs" in done.stdout
