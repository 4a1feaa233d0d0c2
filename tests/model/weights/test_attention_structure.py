"""Which attention a layer has is said by config.json and shown by its tensors; where they differ nothing is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ling_serve.errors import WeightsError
from ling_serve.model.loading import read_weights
from tests.checkpoints import write_checkpoint


def replan(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("layout", ["official", "mlx_lm"])
@pytest.mark.parametrize(
    ("group", "layer", "missing", "left_over"),
    [
        (2, 1, "kv_a_proj_with_mqa.weight [40, 64]", "A_log"),  # KDA tensors where MLA is planned
        (5, 0, "kv_a_proj_with_mqa.weight [40, 64]", "A_log"),  # the same: an incomplete group is all MLA
    ],
)
def test_tensors_of_another_attention_are_refused_by_layer(
    layout: str, group: int, layer: int, missing: str, left_over: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, layout=layout, tokenizer=False)  # pyright: ignore[reportArgumentType]
    replan(folder, layer_group_size=group)
    with pytest.raises(WeightsError) as caught:
        read_weights(folder)
    print(caught.value.message)
    assert f"model.layers.{layer}.attention.{missing}" in caught.value.message
    assert f"model.layers.{layer}.attention.{left_over}" in caught.value.message


def test_tensors_of_mla_are_not_taken_for_kda(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, {"num_hidden_layers": 8, "layer_group_size": 4}, tokenizer=False)
    replan(folder, layer_group_size=8)
    with pytest.raises(WeightsError) as caught:
        read_weights(folder)
    print(caught.value.message)
    assert "model.layers.3.attention.q_conv1d.weight" in caught.value.message
    assert "model.layers.3.attention.kv_a_proj_with_mqa.weight" in caught.value.message


def test_direct_and_low_rank_queries_are_not_taken_for_each_other(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, tokenizer=False)
    replan(folder, q_lora_rank=None)
    with pytest.raises(WeightsError, match=r"layers\.3\.attention\.q_proj\.weight") as caught:
        read_weights(folder)
    assert "model.layers.3.attention.q_a_proj.weight" in caught.value.message
