"""The training step on MLX: any device MLX runs on."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ling_serve.demo.dense import forward
from ling_serve.demo.optimizer_mlx import MlxOptimizer
from ling_serve.demo.parameters import Arrays, expert_bias_names
from ling_serve.demo.pool import LEARNED, START, TOKEN, Rows
from ling_serve.demo.train import StepMetrics
from ling_serve.model.config import ModelConfig


class MlxTrainer:
    """Parameters, optimiser state and the step over them."""

    def __init__(
        self, config: ModelConfig, parameters: Arrays, pool: Rows, dtype: str, *, compiled: bool = True
    ) -> None:
        self._config = config
        self._dtype: mx.Dtype = getattr(mx, dtype)
        self._optimizer = MlxOptimizer()
        self._parameters = {name: mx.array(value) for name, value in parameters.items()}
        self._moments = self._optimizer.initial_state(self._parameters)
        self._pool = mx.array(pool)
        self._kept: tuple[dict[str, mx.array], dict[str, mx.array]] = ({}, {})
        self._metrics = mx.zeros(4)
        state = [self._parameters, self._moments]
        self._step = partial(mx.compile, inputs=state, outputs=state)(self._update) if compiled else self._update

    def step(self, picked: npt.NDArray[np.int32], rate: float, bias_rate: float, number: int) -> None:
        """One update on these rows of the pool; `number` counts from 1."""
        mx.eval(self._metrics)  # at most two steps in flight
        scalars = (mx.array(rate), mx.array(bias_rate), mx.array(float(number)))
        self._metrics = self._step(self._pool, mx.array(picked), *scalars)
        mx.async_eval(self._metrics, self._parameters, self._moments)

    def metrics(self) -> StepMetrics:
        loss, norm, most, least = (float(value) for value in np.array(self._metrics))
        return StepMetrics(loss, norm, most, least)

    def predict(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """[B, T] the likeliest next token after each of `tokens` [B, T]."""
        logits, _ = forward(self._parameters, self._config, mx.array(tokens), self._dtype)
        return np.array(mx.argmax(logits, axis=-1), dtype=np.int32)

    def remember(self) -> None:
        """Keep the parameters and moments for `restore`."""
        self._kept = (dict(self._parameters), dict(self._moments))

    def restore(self) -> None:
        """Go back to what `remember` kept."""
        self._parameters.update(self._kept[0])
        self._moments.update(self._kept[1])

    def parameters(self) -> Arrays:
        return {name: np.array(value) for name, value in self._parameters.items()}

    def _update(
        self, pool: mx.array, picked: mx.array, rate: mx.array, bias_rate: mx.array, number: mx.array
    ) -> mx.array:
        rows = pool[picked].astype(mx.int32)
        biases = {name: self._parameters[name] for name in expert_bias_names(self._config)}
        trained = {name: value for name, value in self._parameters.items() if name not in biases}

        def loss_of(trained: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
            return self._loss({**trained, **biases}, rows)

        (loss, load), gradients = mx.value_and_grad(loss_of)(trained)
        norm = self._optimizer.apply(self._parameters, gradients, self._moments, rate, number)
        for index, (name, value) in enumerate(biases.items()):
            # An expert with more than its share becomes less attractive, without a loss term.
            self._parameters[name] = value + bias_rate * mx.sign(1.0 - load[index])
        return mx.stack([loss, norm, load.max(), load.min()])

    def _loss(self, parameters: dict[str, mx.array], rows: mx.array) -> tuple[mx.array, mx.array]:
        """Mean cross entropy of the learned tokens, and each expert's load [layers, E] relative to uniform."""
        tokens = rows & TOKEN
        sequence = mx.cumsum((rows & START) > 0, axis=-1)
        logits, chosen = forward(parameters, self._config, tokens, self._dtype, sequence)
        logits, targets = logits[:, :-1], tokens[:, 1:]
        learned = (rows[:, 1:] >= LEARNED).astype(mx.float32)
        losses = mx.logsumexp(logits, axis=-1) - mx.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        real = (tokens != self._config.pad_token_id).astype(mx.float32)[..., None]
        load = (chosen * real).sum(axis=(1, 2)) / real.sum()
        load = mx.stop_gradient(load * (self._config.num_experts / self._config.num_experts_per_tok))
        return (losses * learned).sum() / learned.sum(), load
