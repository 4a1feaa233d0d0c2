"""MLX is told what it may keep, and on Metal what to wire."""

from typing import Any

import mlx.core as mx
import pytest

from ling_serve.engine import device_memory


@pytest.mark.parametrize("metal", [False, True])
def test_limits_reach_mlx(monkeypatch: pytest.MonkeyPatch, metal: bool) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx, "device_info", lambda: {device_memory.WORKING_SET: 12 << 30, "memory_size": 18 << 30})
    monkeypatch.setattr(mx, "set_cache_limit", lambda count: told.update(cache=count))
    monkeypatch.setattr(mx, "set_wired_limit", lambda count: told.update(wired=count))
    device_memory.limit_mlx(64 << 20)
    assert told == {"cache": 64 << 20, **({"wired": 12 << 30} if metal else {})}


def test_metal_recommends_how_much_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {device_memory.WORKING_SET: 12 << 30, "memory_size": 18 << 30})
    assert device_memory.memory_limit_bytes() == 12 << 30
