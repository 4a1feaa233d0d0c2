"""Every kind of broken checkpoint gives one error that names what is broken, before any weight is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from ling_serve.errors import CheckpointError, UnsupportedCheckpoint, WeightsError
from ling_serve.model.loading import load_model
from ling_serve.model.weights.tensor_source import TensorSource
from tests.broken_checkpoints import BROKEN, NOT_FINITE, QUANTISED, edit_tensors, put, quantise, set_field
from tests.checkpoints import cached_checkpoint


@pytest.fixture
def official(tmp_path: Path) -> Path:
    return shutil.copytree(cached_checkpoint(tokenizer=False), tmp_path / "checkpoint")


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    """The first layer's MLP in affine 8 bit, all else bfloat16, as mlx-lm stores it."""
    folder = shutil.copytree(cached_checkpoint(layout="mlx_lm", tokenizer=False), tmp_path / "checkpoint")

    def change(tensors: dict[str, mx.array]) -> None:
        for projection in ("gate_proj", "up_proj", "down_proj"):
            path = f"model.layers.0.mlp.{projection}"
            tensors.update(quantise(path, tensors[f"{path}.weight"]))

    edit_tensors(change)(folder)
    set_field(quantization={"bits": 8, "group_size": 32, "mode": "affine"})(folder)
    load_model(folder)  # sound until a test breaks it
    return folder


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def arm() -> None:
        monkeypatch.setattr(TensorSource, "read", lambda *_, **__: pytest.fail("a weight was read before the check"))

    return arm


def refusal(folder: Path, kind: type[CheckpointError], names: list[str]) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    message = caught.value.message
    print(message)
    assert type(caught.value) is kind
    assert [name for name in names if name not in message] == []
    assert len(message) < 3_000
    return message


@pytest.mark.parametrize("what", BROKEN)
def test_broken_official_checkpoint_is_refused_by_name(what: str, official: Path, no_reads: Callable[[], None]) -> None:
    apply, kind, names = BROKEN[what]
    apply(official)
    no_reads()
    refusal(official, kind, names)


@pytest.mark.parametrize("what", QUANTISED)
def test_broken_quantised_checkpoint_is_refused_by_name(
    what: str, quantised: Path, no_reads: Callable[[], None]
) -> None:
    apply, kind, names = QUANTISED[what]
    apply(quantised)
    no_reads()
    refusal(quantised, kind, names)


@pytest.mark.parametrize("what", NOT_FINITE)
def test_numbers_that_are_not_finite_are_refused(what: str, quantised: Path) -> None:
    apply, names = NOT_FINITE[what]
    apply(quantised)
    refusal(quantised, WeightsError, names)


def test_nan_code_of_a_microscaling_scale_is_refused(official: Path) -> None:
    path = "model.layers.0.mlp.up_proj"

    def change(tensors: dict[str, mx.array]) -> None:
        packed, scales = mx.quantize(tensors[f"{path}.weight"], group_size=32, bits=8, mode="mxfp8")
        scales[0, 0] = 0xFF
        tensors.update({f"{path}.weight": packed, f"{path}.scales": scales})

    edit_tensors(change)(official)
    refusal(official, WeightsError, [f"{path}.scales", "NaN"])


def test_file_in_place_of_a_folder(official: Path) -> None:
    refusal(official / "config.json", CheckpointError, ["config.json", "is a file"])
    refusal(official / "model.gguf", UnsupportedCheckpoint, ["model.gguf", "GGUF"])
    refusal(official / "nowhere", CheckpointError, ["nowhere", "does not exist"])


def test_float16_overflow_is_refused(official: Path) -> None:
    put("model.norm.weight", lambda w: w.astype(mx.float32) * 1e6)(official)
    load_model(official, dtype="float32")
    with pytest.raises(WeightsError, match=r"model\.norm\.weight holds numbers that float16 cannot represent"):
        load_model(official, dtype="float16")
