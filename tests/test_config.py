"""Settings that cannot be meant are refused by name."""

from typing import Any

import pytest

import ling_serve
from ling_serve.config import EngineOptions
from ling_serve.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"max_num_seqs": "8"}, "--max-num-seqs"),
        ({"max_num_seqs": True}, "--max-num-seqs"),
        ({"max_queue_len": 0}, "--max-queue-len"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"block_size": 17}, "--block-size"),
        ({"memory_utilization": 1.5}, "--memory-utilization"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "--max-num-batched-tokens"),
    ],
)
def test_a_wrong_size_names_its_flag(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} is ") as caught:
        EngineOptions(**options)
    assert caught.value.param == flag


def test_every_exported_name_is_there() -> None:
    assert all(getattr(ling_serve, name) is not None for name in ling_serve.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = ling_serve.Nothing
