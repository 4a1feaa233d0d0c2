"""Errors about memory name the setting that helps: turning it the way they say leaves more room."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ling_serve.cache.budget import plan_memory
from ling_serve.commands.serve_flags import parse_serve_flags
from ling_serve.config import EngineOptions
from ling_serve.errors import ConfigError
from tests.cache.test_budget import GIB, TINY, plan

FLAG = re.compile(r"--[a-z-]+")


def test_every_flag_that_is_named_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_serve_flags(["--help"])
    known = set(FLAG.findall(capsys.readouterr().out))
    named = set[str]()
    for weights_gib, max_model_len in ((14.7, None), (9.0, 131072), (4.8, 200000)):
        with pytest.raises(ConfigError) as caught:
            plan(weights_gib, EngineOptions(max_model_len=max_model_len))
        named |= set(FLAG.findall(caught.value.message))
        if caught.value.param is not None:
            named.add(caught.value.param)
    assert {"--max-model-len", "--max-num-seqs", "--memory-utilization", "--max-num-batched-tokens"} <= named
    assert named <= known


def test_a_context_that_does_not_fit_fits_when_the_advice_is_taken() -> None:
    asked = EngineOptions(max_model_len=131072)
    with pytest.raises(ConfigError) as caught:
        plan(9.0, asked)
    assert caught.value.param == "--max-model-len"
    match = re.search(r"only (\d+) tokens fit; lower it or --max-num-seqs, or raise", caught.value.message)
    assert match is not None
    fits = int(match[1])
    assert plan(9.0, replace(asked, max_model_len=fits)).max_model_len == fits
    assert plan(9.0, EngineOptions(max_num_seqs=2)).max_model_len > fits
    assert plan(9.0, EngineOptions(memory_utilization=0.95)).max_model_len > fits


@pytest.mark.parametrize("change", [{"max_num_seqs": 1}, {"memory_utilization": 0.95}])
def test_where_nothing_fits_each_setting_that_is_named_helps(change: dict[str, float]) -> None:
    def make(**options: float) -> int:
        return plan_memory(
            TINY,
            weight_bytes=int(9.6 * GIB),
            step_bytes=GIB,
            memory_limit_bytes=12 * GIB,
            options=EngineOptions(**options),  # pyright: ignore[reportArgumentType]
            model_max_len=131072,
        ).max_model_len

    with pytest.raises(ConfigError, match="do not fit") as caught:
        make()
    assert all(flag in caught.value.message for flag in ("--max-num-seqs", "--memory-utilization"))
    assert make(**change) >= 2


def test_a_deficit_is_shown_and_never_divided() -> None:
    """With states for 256 sequences nothing is left: an error with the table, no negative number of blocks."""
    with pytest.raises(ConfigError) as caught:
        plan(8.04, EngineOptions(max_num_seqs=256))
    lines = [line.split("  ") for line in caught.value.message.splitlines()[1:]]
    table = {cells[1].strip(): cells[-1].strip() for cells in lines}
    print(caught.value.message)
    assert table["left for latents"].startswith("-2.")
    assert table["MLA latents (6 layers)"].startswith("0 blocks")
    assert table["context that fits"] == "0 of 131,072 tokens"
    assert table["KDA states (18 layers)"].startswith("256 + 2 slots x 18.63 MiB")
