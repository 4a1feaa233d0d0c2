"""The training loop on MLX with a tiny model: it learns, saves, resumes, and keeps the experts in use."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from ling_serve.demo import evaluate, export, parameters, pool, train
from ling_serve.demo.optimizer import uses_muon
from ling_serve.demo.optimizer_mlx import orthogonal
from ling_serve.demo.trainer_mlx import MlxTrainer
from ling_serve.model.config import ModelConfig
from tests.parity.random_model import small_config

CONFIG = ModelConfig.from_dict(small_config(vocab_size=512, pad_token_id=495))


@pytest.fixture(scope="module")
def rows() -> pool.Rows:
    return pool.make_pool(120, 1.0, seed=7, workers=1)


def make(rows: pool.Rows) -> MlxTrainer:
    return MlxTrainer(CONFIG, parameters.initial_parameters(CONFIG, 0), rows, "float32", compiled=False)


def test_it_learns_and_can_go_back(rows: pool.Rows) -> None:
    trainer = make(rows)
    picked = np.arange(8, dtype=np.int32)
    losses: list[float] = []
    for number in range(1, 16):
        if number == 5:
            trainer.remember()
        trainer.step(picked, 4e-3, 1e-3, number)
        losses.append(trainer.metrics().loss)
    print([round(loss, 2) for loss in losses])
    assert losses[-1] < 0.6 * losses[0]
    trainer.restore()
    trainer.step(picked, 0.0, 0.0, 5)
    assert trainer.metrics().loss == pytest.approx(losses[4], rel=1e-5)


def test_each_layers_bias_follows_its_own_load(rows: pool.Rows) -> None:
    """Also when the parameters come in another order than the layers, as they do when they are read from files."""
    start = parameters.initial_parameters(CONFIG, 0)
    for index, name in enumerate(parameters.expert_bias_names(CONFIG)):
        start[name][index] = 10.0  # this layer sends every token to this expert
    shuffled = dict(sorted(start.items(), key=lambda item: item[0], reverse=True))
    trainer = MlxTrainer(CONFIG, shuffled, rows, "float32", compiled=False)
    trainer.step(np.arange(4, dtype=np.int32), 0.0, 0.5, 1)
    after = trainer.parameters()
    for index, name in enumerate(parameters.expert_bias_names(CONFIG)):
        assert after[name][index] == pytest.approx(9.5)
        assert (np.delete(after[name], index) == 0.5).any()


def test_a_run_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small_config(vocab_size=512, pad_token_id=495)), encoding="utf-8")
    monkeypatch.setattr(train, "CHECKPOINT", folder)
    monkeypatch.setattr(evaluate, "all_products", lambda: evaluate.tasks(1)[0])
    options = train.TrainOptions(
        tmp_path / "out",
        steps=3,
        seconds=0.0,
        rows=2,
        conversations=20,
        pool=tmp_path / "pool.npz",
        eval_samples=1,
        dtype="float32",
        compiled=False,
        workers=1,
    )
    train.train(options)
    events = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event["step"] for event in events if "loss" in event] == [1, 2]
    assert "products, thinking off" in events[-2]["exact"]
    saved = train.load_parameters(tmp_path / "out")
    assert {name: value.shape for name, value in saved.items()} == {
        name: value.shape for name, value in parameters.initial_parameters(CONFIG, 0).items()
    }
    export.write_weights(saved, CONFIG, folder / "model.safetensors")
    read = export.read_weights(folder)
    rounded = np.array(mx.array(saved["lm_head.weight"]).astype(mx.bfloat16).astype(mx.float32))
    assert (read["lm_head.weight"] == rounded).all()
    assert (read["model.layers.0.attention.dt_bias"] == saved["model.layers.0.attention.dt_bias"]).all()


def test_muon_makes_singular_values_alike() -> None:
    shapes = {"a": (3, 32, 16), "b": (16, 48)}
    rng = np.random.default_rng(5)
    matrices = {name: mx.array(rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    updates = orthogonal(matrices, update_rms=0.2)
    for name, shape in shapes.items():
        values = np.linalg.svd(np.array(updates[name]), compute_uv=False) / (0.2 * max(shape[-2:]) ** 0.5)
        print(name, values.min(), values.max())
        assert values.min() > 0.4
        assert values.max() < 1.4
        assert updates[name].shape == shape
    assert uses_muon("model.layers.1.mlp.switch_mlp.up_proj.weight", (16, 64, 192))
    assert not uses_muon("model.layers.1.mlp.gate.weight", (16, 192))
    assert not uses_muon("lm_head.weight", (512, 192))


def test_right_rows_look_at_learned_tokens_only() -> None:
    rows = np.array([[1, 2, 3 | pool.LEARNED, 4 | pool.LEARNED, 0]] * 3, dtype=np.uint16)
    guesses = np.array([[9, 3, 4, 9, 9], [9, 3, 9, 9, 9], [9, 9, 4, 9, 9]], dtype=np.int32)
    assert evaluate.right_rows(lambda tokens: guesses, rows).tolist() == [True, False, False]
