"""The training step in PyTorch, for CUDA devices: the maths and names of `dense.py`, replayed as one CUDA graph.

PyTorch is no dependency of the project; only this module and only training needs it.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ling_serve.demo.optimizer import NEWTON_SCHULZ, NEWTON_SCHULZ_ROUNDS, OptimizerOptions, uses_muon
from ling_serve.demo.parameters import Arrays, expert_bias_names
from ling_serve.demo.pool import LEARNED, START, TOKEN, Rows
from ling_serve.demo.train import StepMetrics
from ling_serve.model.config import AttentionKind, MlpKind, ModelConfig

CHUNK = 16
Weights = dict[str, Tensor]


class TorchForward:
    """Logits and expert loads of `dense.forward`, layer by layer so that layers of a kind compile once."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, compiled: bool) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._kda: Callable[..., Tensor] = self._kda_layer
        self._mla: Callable[..., Tensor] = self._mla_layer
        if compiled:  # the attention layers alone: with the others compiled too, PyTorch 2.11's results were wrong
            self._kda = torch.compile(self._kda_layer, dynamic=False)
            self._mla = torch.compile(self._mla_layer, dynamic=False)
        rows, columns = torch.arange(CHUNK)[:, None], torch.arange(CHUNK)[None, :]
        sizes = (1, 2, 4, 8)
        corners = [(rows // (2 * s) == columns // (2 * s)) & (rows // s != columns // s) for s in sizes]
        self._corners = torch.stack(corners).float().to(device)
        self._eye = torch.eye(CHUNK, device=device)
        self._lower = torch.tril(torch.ones(CHUNK, CHUNK, device=device))

    def __call__(self, weights: Weights, tokens: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """tokens, sequence [B, T] int64 → logits [B, T, vocab], load [layers, E] relative to uniform."""
        causal = torch.ones(tokens.shape[1], tokens.shape[1], device=self.device).tril().bool()
        visible = (causal & (sequence[:, :, None] == sequence[:, None, :]))[:, None]
        same = [F.pad(sequence[:, back:] == sequence[:, :-back], (back, 0)) for back in (1, 2, 3)]
        keep = torch.stack(same)[..., None].to(self.dtype)
        goes_on = same[0][:, ::CHUNK].float()  # [B, chunks]
        real = (tokens != self.config.pad_token_id).float()[..., None]
        x = self._embedding(weights["model.word_embeddings.weight"], tokens)
        loads: list[Tensor] = []
        for plan in self.config.layers:
            layer = inside(weights, f"model.layers.{plan.index}.")
            if plan.attention is AttentionKind.KDA:
                x = self._kda(_attention_of(layer), x, keep, goes_on)
            else:
                x = self._mla(_attention_of(layer), x, visible)
            mlp = inside(layer, "mlp.") | {"norm": layer["post_attention_layernorm.weight"]}
            if plan.mlp is MlpKind.DENSE:
                x = self._dense_layer(mlp, x)
            else:
                x, load = self._moe_layer(mlp, x, real)
                loads.append(load)
        return self._logits(weights["model.norm.weight"], weights["lm_head.weight"], x), torch.stack(loads)

    def _embedding(self, table: Tensor, tokens: Tensor) -> Tensor:
        # A product with one-hot rows: its gradient is a product too, without atomics or a sort.
        return F.one_hot(tokens, table.shape[0]).to(self.dtype) @ table.to(self.dtype)

    def _logits(self, norm: Tensor, head: Tensor, x: Tensor) -> Tensor:
        return self._linear(self._norm(norm, x), head).float()

    def _kda_layer(self, p: Weights, x: Tensor, keep: Tensor, goes_on: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads, dim = self.config.num_attention_heads, self.config.head_dim
        normed = self._norm(p["norm"], x)

        def split(y: Tensor) -> Tensor:
            return y.float().reshape(batch, length, heads, dim).transpose(1, 2)

        q, k, v = (
            split(self._conv(self._linear(normed, p[f"{name}_proj.weight"]), p[f"{name}_conv1d.weight"], keep))
            for name in "qkv"
        )
        q, k = _unit(q) * dim**-0.5, _unit(k)
        raw = split(self._linear(normed, p["f_proj.weight"])) + p["dt_bias"].reshape(heads, 1, dim)
        decay = self.config.kda_lower_bound * torch.sigmoid(torch.exp(p["A_log"])[:, None, None] * raw)
        beta = torch.sigmoid(self._linear(normed, p["b_proj.weight"]).float()).transpose(1, 2)
        out = self._chunked(q, k, v, decay, beta, goes_on).transpose(1, 2)
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * p["o_norm.weight"]
        gate = torch.sigmoid(self._linear(normed, p["g_proj.weight"]).float())
        return x + self._linear((out.reshape(batch, length, -1) * gate).to(self.dtype), p["o_proj.weight"])

    def _chunked(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, goes_on: Tensor) -> Tensor:
        batch, heads, length, dim = q.shape
        count = length // CHUNK
        q, k, v, decay, beta = (y.reshape(batch, heads, count, CHUNK, -1) for y in (q, k, v, decay, beta))
        total = decay.cumsum(-2)
        middle = total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
        rise, fall = torch.exp(total - middle), torch.exp(middle - total)
        keys = (k * fall).transpose(-1, -2)
        within = ((q * rise) @ keys) * self._lower
        solve = self._inverse(beta * ((k * rise) @ keys) * (self._lower - self._eye)) * beta.transpose(-1, -2)
        grown = torch.exp(total)
        reads, fresh, queries = solve @ (k * grown), solve @ v, q * grown
        last = total[..., -1:, :]
        writes = (k * torch.exp(last - total)).transpose(-1, -2)
        remain = torch.exp(last).transpose(-1, -2)
        state = torch.zeros(batch, heads, dim, dim, device=q.device)
        out: list[Tensor] = []
        for n in range(count):
            state = state * goes_on[:, n, None, None, None]
            update = fresh[:, :, n] - reads[:, :, n] @ state
            out.append(queries[:, :, n] @ state + within[:, :, n] @ update)
            state = remain[:, :, n] * state + writes[:, :, n] @ update
        return torch.cat(out, dim=2)

    def _inverse(self, below: Tensor) -> Tensor:
        with torch.no_grad():
            inverse = self._eye - below * self._corners[0]
            for corner in self._corners[1:]:
                inverse = inverse - inverse @ (below * corner) @ inverse
        return inverse @ (2.0 * self._eye - (self._eye + below) @ inverse)

    def _mla_layer(self, p: Weights, x: Tensor, visible: Tensor) -> Tensor:
        batch, length, _ = x.shape
        config = self.config
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        normed = self._norm(p["norm"], x)
        q = self._norm(p["q_a_layernorm.weight"], self._linear(normed, p["q_a_proj.weight"]))
        q = self._linear(q, p["q_b_proj.weight"]).reshape(batch, length, heads, -1).transpose(1, 2)
        joint = self._linear(normed, p["kv_a_proj_with_mqa.weight"])
        latent = self._norm(p["kv_a_layernorm.weight"], joint[..., : config.kv_lora_rank])[:, None]
        k_rope = joint[:, None, :, config.kv_lora_rank :]
        keys = latent @ p["embed_q.weight"].to(self.dtype)
        values = latent @ p["unembed_out.weight"].to(self.dtype).transpose(-1, -2)
        scores = q[..., :nope] @ keys.transpose(-1, -2)
        scores = scores + self._rope(q[..., nope:]) @ self._rope(k_rope).transpose(-1, -2)
        scores = torch.where(visible, scores.float() * config.qk_head_dim**-0.5, -1e30)
        out = (torch.softmax(scores, dim=-1).to(self.dtype) @ values).transpose(1, 2)
        out = out * torch.sigmoid(self._linear(normed, p["g_proj.weight"]).float())[..., None].to(self.dtype)
        return x + self._linear(out.reshape(batch, length, -1), p["dense.weight"])

    def _dense_layer(self, p: Weights, x: Tensor) -> Tensor:
        return x + self._swiglu(p, "", self._norm(p["norm"], x))

    def _moe_layer(self, p: Weights, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        normed = self._norm(p["norm"], x)
        gate = p["gate.weight"].to(self.dtype).float()  # the checkpoint keeps it in bfloat16
        scores = torch.sigmoid(normed.float() @ gate.T)
        with torch.no_grad():
            grouped = (scores + p["gate.expert_bias"]).unflatten(-1, (config.n_group, -1))
            best_two = (grouped * (_better(grouped) < 2)).sum(-1)
            opened = (_better(best_two) < config.topk_group)[..., None]
            eligible = torch.where(opened, grouped, -1e30).flatten(-2)
            mask = (_better(eligible) < config.num_experts_per_tok).float()
            load = (mask * real).sum((0, 1)) / real.sum() * (config.num_experts / config.num_experts_per_tok)
        share = scores * mask
        share = (share / (share.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor).to(self.dtype)
        stacked = config.num_experts * config.moe_intermediate_size
        gates = self._linear(normed, p["switch_mlp.gate_proj.weight"].reshape(stacked, -1))
        ups = self._linear(normed, p["switch_mlp.up_proj.weight"].reshape(stacked, -1))
        inner = (F.silu(gates) * ups).unflatten(-1, (config.num_experts, -1)) * share[..., None]
        down = p["switch_mlp.down_proj.weight"].to(self.dtype).transpose(-1, -2).reshape(stacked, -1)
        return x + inner.flatten(-2) @ down + self._swiglu(p, "shared_experts.", normed), load

    def _swiglu(self, p: Weights, prefix: str, x: Tensor) -> Tensor:
        gate = F.silu(self._linear(x, p[f"{prefix}gate_proj.weight"]))
        return self._linear(gate * self._linear(x, p[f"{prefix}up_proj.weight"]), p[f"{prefix}down_proj.weight"])

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.to(self.dtype).T

    def _norm(self, weight: Tensor, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight
        return wide.to(self.dtype)

    def _conv(self, y: Tensor, weight: Tensor, keep: Tensor) -> Tensor:
        taps, length = weight[..., 0].to(self.dtype), y.shape[1]
        out = y * taps[:, 3]
        for back in (1, 2, 3):
            past = F.pad(y[:, : length - back], (0, 0, back, 0))
            out = out + past * keep[back - 1] * taps[:, 3 - back]
        return F.silu(out)

    def _rope(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        rates = self.config.rope_theta ** (-torch.arange(0, width, 2, device=x.device).float() / width)
        angles = torch.arange(x.shape[-2], device=x.device).float()[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class TorchTrainer:
    """Parameters, optimiser state and the step over them."""

    def __init__(
        self, config: ModelConfig, parameters: Arrays, pool: Rows, dtype: str, *, compiled: bool = True
    ) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._forward = TorchForward(config, getattr(torch, dtype), self._device, compiled)
        self._plain = TorchForward(config, getattr(torch, dtype), self._device, False)
        self._options = OptimizerOptions()
        self._pad = config.pad_token_id
        self._weights = {name: torch.tensor(value, device=self._device) for name, value in parameters.items()}
        self._trained = [name for name in self._weights if not name.endswith(".expert_bias")]
        for name in self._trained:
            self._weights[name].requires_grad_()
        self._biases = [self._weights[name] for name in expert_bias_names(config)]
        self._muon = [name for name in self._trained if uses_muon(name, self._weights[name].shape)]
        self._adam = [name for name in self._trained if name not in self._muon]
        self._first = {name: torch.zeros_like(self._weights[name]) for name in self._trained}
        self._second = {name: torch.zeros_like(self._weights[name]) for name in self._adam}
        self._pool = torch.tensor(pool.astype(np.int32), device=self._device)
        self._scalars = torch.zeros(3, device=self._device)  # learning rate, bias rate, step
        self._metrics = torch.zeros(4, device=self._device)
        self._usual_norm = torch.full((), 10.0, device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._rows = torch.zeros(0)
        self._kept: list[Tensor] = []

    def step(self, picked: npt.NDArray[np.int32], rate: float, bias_rate: float, number: int) -> None:
        """One update on these rows of the pool; `number` counts from 1. The first few run before the graph is made."""
        index = torch.from_numpy(picked).to(self._device, non_blocking=True)
        rows = self._pool[index].long()
        scalars = torch.tensor([rate, bias_rate, float(number)])
        if number == 1:
            self._rows = rows
        self._rows.copy_(rows)
        self._scalars.copy_(scalars, non_blocking=True)
        if self._device.type == "cpu":
            self._update()
        elif number <= 3:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._update()
            torch.cuda.current_stream().wait_stream(side)
        else:
            self._graph = graph = self._graph or self._capture()
            graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._update()
        return graph

    def metrics(self) -> StepMetrics:
        return StepMetrics(*self._metrics.tolist())

    def predict(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """[B, T] the likeliest next token after each of `tokens` [B, T]."""
        batch = torch.from_numpy(tokens).long().to(self._device)
        with torch.no_grad():
            logits, _ = self._plain(self._weights, batch, torch.zeros_like(batch))
        return logits.argmax(-1).int().cpu().numpy()

    def remember(self) -> None:
        """Keep a copy of the parameters and moments for `restore`."""
        self._kept = [value.detach().clone() for value in self._state()]

    def restore(self) -> None:
        """Go back to what `remember` kept, in place, so that the graph stays valid."""
        with torch.no_grad():
            torch._foreach_copy_(self._state(), self._kept)

    def _state(self) -> list[Tensor]:
        return [*self._weights.values(), *self._first.values(), *self._second.values()]

    def parameters(self) -> Arrays:
        return {name: value.detach().cpu().numpy() for name, value in self._weights.items()}

    def _update(self) -> None:
        tokens = self._rows & TOKEN
        sequence = ((self._rows & START) > 0).long().cumsum(-1)
        logits, load = self._forward(self._weights, tokens, sequence)
        learned = (self._rows[:, 1:] >= LEARNED).float()
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = (losses * learned.flatten()).sum() / learned.sum()
        gradients = torch.autograd.grad(loss, [self._weights[name] for name in self._trained])
        with torch.no_grad():
            norm = torch.stack(torch._foreach_norm(gradients)).norm()
            scale = (self._options.max_norm / (norm + 1e-6)).clamp(max=1.0)
            # A step whose gradient is far above the usual one is left out: Muon would follow it at full length.
            gradients = torch._foreach_mul(gradients, torch.where(norm < 5 * self._usual_norm, scale, 0.0))
            self._usual_norm.lerp_(torch.minimum(norm, 2 * self._usual_norm), 0.02)
            self._apply(dict(zip(self._trained, gradients, strict=True)))
            for bias, share in zip(self._biases, load, strict=True):
                bias += self._scalars[1] * torch.sign(1.0 - share)
            self._metrics.copy_(torch.stack([loss.detach(), norm, load.max(), load.min()]))

    def _apply(self, gradients: Weights) -> None:
        options, (rate, _, number) = self._options, self._scalars
        weights = [self._weights[name] for name in self._adam + self._muon]
        torch._foreach_mul_([w for w in weights if w.ndim > 1], 1 - rate * options.weight_decay)
        updates = self._adam_updates(gradients, number) + self._muon_updates(gradients)
        torch._foreach_mul_(updates, rate)
        torch._foreach_mul_(updates[: len(self._adam)], options.adam_share)
        torch._foreach_sub_(weights, updates)

    def _adam_updates(self, gradients: Weights, number: Tensor) -> list[Tensor]:
        grads = [gradients[name] for name in self._adam]
        first, second = [self._first[n] for n in self._adam], [self._second[n] for n in self._adam]
        one, two = self._options.betas
        torch._foreach_lerp_(first, grads, 1 - one)
        torch._foreach_mul_(second, two)
        torch._foreach_addcmul_(second, grads, grads, 1 - two)
        roots = torch._foreach_sqrt(torch._foreach_div(second, 1 - two**number))
        torch._foreach_add_(roots, self._options.eps)
        return list(torch._foreach_div(torch._foreach_div(first, 1 - one**number), roots))

    def _muon_updates(self, gradients: Weights) -> list[Tensor]:
        moments, grads = [self._first[n] for n in self._muon], [gradients[n] for n in self._muon]
        torch._foreach_mul_(moments, self._options.momentum)
        torch._foreach_add_(moments, grads)
        updates = torch._foreach_add(grads, moments, alpha=self._options.momentum)
        groups: dict[tuple[int, int], list[str]] = {}
        wide: Weights = {}
        for name, update in zip(self._muon, updates, strict=True):
            update = update.transpose(-1, -2) if update.shape[-2] > update.shape[-1] else update
            small, large = update.shape[-2:]
            wide[name] = update.reshape(-1, small, large)
            groups.setdefault((small, large), []).append(name)
        result: Weights = {}
        for (_, large), names in groups.items():
            solved = _newton_schulz(torch.cat([wide[name] for name in names]))
            solved = solved.float() * (self._options.update_rms * large**0.5)
            for name, part in zip(names, solved.split([len(wide[name]) for name in names]), strict=True):
                shape = self._weights[name].shape
                result[name] = (part.transpose(-1, -2) if shape[-2] > shape[-1] else part).reshape(shape)
        return [result[name] for name in self._muon]


def inside(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _attention_of(layer: Weights) -> Weights:
    return inside(layer, "attention.") | {"norm": layer["input_layernorm.weight"]}


def _better(scores: Tensor) -> Tensor:
    return (scores[..., None, :] > scores[..., :, None]).sum(-1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _newton_schulz(x: Tensor) -> Tensor:
    a, b, c = NEWTON_SCHULZ
    x = (x / (x.square().sum((-2, -1), keepdim=True).sqrt() + 1e-7)).bfloat16()
    for _ in range(NEWTON_SCHULZ_ROUNDS):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
