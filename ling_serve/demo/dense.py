"""The model as one differentiable function of its parameters over full, equally long sequences: what training runs.

`forward` computes what `BailingV3` computes, in the same parameters, without caches: KDA in chunks of 16 tokens, MLA as
plain causal attention, and every expert on every token with the unchosen ones weighted zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx

from ling_serve.model.config import AttentionKind, MlpKind, ModelConfig

Parameters = Mapping[str, mx.array]
"""By full name, as in `BailingV3`: `model.layers.0.attention.q_proj.weight`."""

CHUNK = 16


def forward(
    parameters: Parameters, config: ModelConfig, tokens: mx.array, dtype: mx.Dtype, sequence: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Logits [B, T, vocab] float32 of `tokens` [B, T] (T a multiple of 16), and the chosen experts [layers, B, T, E].

    Tokens of a row see each other only where `sequence` [B, T] agrees (ascending integers, changing at multiples of 16;
    None = one sequence). Matrices are used in `dtype`; gates, states, the router, softmax and the norms are in float32.
    """
    sequence = mx.zeros(tokens.shape, dtype=mx.int32) if sequence is None else sequence
    x = parameters["model.word_embeddings.weight"][tokens].astype(dtype)  # [B, T, h]
    chosen: list[mx.array] = []
    for plan in config.layers:
        layer = _Scope(parameters, f"model.layers.{plan.index}.", dtype)
        normed = layer.norm("input_layernorm", x, config.rms_norm_eps)
        attention = layer.inside("attention.")
        x = x + (kda if plan.attention is AttentionKind.KDA else mla)(attention, config, normed, sequence)
        normed = layer.norm("post_attention_layernorm", x, config.rms_norm_eps)
        if plan.mlp is MlpKind.DENSE:
            x = x + swiglu(layer.inside("mlp."), normed)
        else:
            routed, mask = moe(layer.inside("mlp."), config, normed)
            chosen.append(mask)
            x = x + routed
    scope = _Scope(parameters, "", dtype)
    hidden = scope.norm("model.norm", x, config.rms_norm_eps)
    return scope.linear("lm_head", hidden).astype(mx.float32), mx.stack(chosen)


def kda(layer: _Scope, config: ModelConfig, x: mx.array, sequence: mx.array) -> mx.array:
    """Kimi delta attention over x [B, T, h] from a zero state."""
    batch, length, _ = x.shape
    heads, dim = config.num_attention_heads, config.head_dim

    def split(y: mx.array) -> mx.array:  # [B, H, T, D] float32
        return y.astype(mx.float32).reshape(batch, length, heads, dim).swapaxes(1, 2)

    q, k, v = (split(_short_conv(layer, name, x, sequence)) for name in "qkv")
    q, k = _unit(q) * dim**-0.5, _unit(k)
    rate = mx.exp(layer["A_log"])[:, None, None]
    bias = layer["dt_bias"].reshape(heads, 1, dim)
    decay = config.kda_lower_bound * mx.sigmoid(rate * (split(layer.linear("f_proj", x)) + bias))
    beta = mx.sigmoid(layer.linear("b_proj", x).astype(mx.float32)).swapaxes(1, 2)  # [B, H, T]
    out = kda_chunked(q, k, v, decay, beta, sequence).swapaxes(1, 2)  # [B, T, H, D]
    out = mx.fast.rms_norm(out, layer["o_norm.weight"].astype(mx.float32), config.rms_norm_eps)
    out = out.reshape(batch, length, -1) * mx.sigmoid(layer.linear("g_proj", x).astype(mx.float32))
    return layer.linear("o_proj", out.astype(x.dtype))


def kda_chunked(q: mx.array, k: mx.array, v: mx.array, decay: mx.array, beta: mx.array, sequence: mx.array) -> mx.array:
    """The delta rule with per-channel decay, from a zero state where a sequence starts, in chunks.

    q, k, v and the log-decay are [B, H, T, D] float32, beta is [B, H, T]. With G the running sum of the log-decay in a
    chunk and L = beta A, A_ij = k_i (k_j e^(G_i - G_j)) below the diagonal, the chunk's updates solve
    (I + L) U = beta (V - (K e^G) S). Exponents are taken relative to the middle of the chunk, so none exceeds
    8 * 5 nats.
    """
    batch, heads, length, dim = q.shape
    count = length // CHUNK

    def chunks(y: mx.array) -> mx.array:
        return y.reshape(batch, heads, count, CHUNK, -1)

    q, k, v, beta = chunks(q), chunks(k), chunks(v), chunks(beta)
    total = mx.cumsum(chunks(decay), axis=-2)
    middle = total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    rise, fall = mx.exp(total - middle), mx.exp(middle - total)
    keys = (k * fall).swapaxes(-1, -2)
    lower = mx.tril(mx.ones((CHUNK, CHUNK)))
    within = ((q * rise) @ keys) * lower
    solve = _inverse_of_unit_lower(beta * ((k * rise) @ keys) * (lower - mx.eye(CHUNK)))
    solve = solve * beta.swapaxes(-1, -2)
    grown = mx.exp(total)
    reads, fresh = solve @ (k * grown), solve @ v
    queries, last = q * grown, total[..., -1:, :]
    writes = (k * mx.exp(last - total)).swapaxes(-1, -2)
    keep = mx.exp(last).swapaxes(-1, -2)
    state = mx.zeros((batch, heads, dim, v.shape[-1]))
    out: list[mx.array] = []
    for n in range(count):
        if n > 0:
            goes_on = sequence[:, n * CHUNK] == sequence[:, n * CHUNK - 1]
            state = state * goes_on[:, None, None, None]
        update = fresh[:, :, n] - reads[:, :, n] @ state
        out.append(queries[:, :, n] @ state + within[:, :, n] @ update)
        state = keep[:, :, n] * state + writes[:, :, n] @ update
    return mx.concatenate(out, axis=2)


def _inverse_of_unit_lower(below: mx.array) -> mx.array:
    """(I + below)^-1 for strictly lower triangular [..., 16, 16], by doubling the size of solved diagonal blocks.

    The gradient -X' G X' comes from one Newton step on the solved value, which also polishes it.
    """
    row, column = mx.arange(CHUNK)[:, None], mx.arange(CHUNK)[None, :]
    fixed = mx.stop_gradient(below)
    identity = mx.eye(CHUNK)
    inverse = identity
    size = 1
    while size < CHUNK:
        corner = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        block = mx.where(corner, fixed, 0.0)
        inverse = identity - block if size == 1 else inverse - inverse @ block @ inverse
        size *= 2
    inverse = mx.stop_gradient(inverse)
    return inverse @ (2.0 * identity - (identity + below) @ inverse)


def mla(layer: _Scope, config: ModelConfig, x: mx.array, sequence: mx.array) -> mx.array:
    """Multi-head latent attention over x [B, T, h], keys and values materialised."""
    batch, length, _ = x.shape
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    if config.q_lora_rank is None:
        q = layer.linear("q_proj", x)
    else:
        q = layer.linear("q_b_proj", layer.norm("q_a_layernorm", layer.linear("q_a_proj", x), config.rms_norm_eps))
    q = q.reshape(batch, length, heads, -1).swapaxes(1, 2)
    latent, k_rope = mx.split(layer.linear("kv_a_proj_with_mqa", x), [config.kv_lora_rank], axis=-1)
    latent = layer.norm("kv_a_layernorm", latent, config.rms_norm_eps)[:, None]  # [B, 1, T, c]
    keys = latent @ layer.matrix("embed_q.weight")  # [B, H, T, nope]
    values = latent @ layer.matrix("unembed_out.weight").swapaxes(-1, -2)
    scores = q[..., :nope] @ keys.swapaxes(-1, -2)
    scores = scores + _rope(q[..., nope:], config) @ _rope(k_rope[:, None], config).swapaxes(-1, -2)
    scores = scores.astype(mx.float32) * config.qk_head_dim**-0.5
    visible = mx.tri(length, dtype=mx.bool_) & (sequence[:, :, None] == sequence[:, None, :])
    scores = mx.where(visible[:, None], scores, -1e30)
    out = (mx.softmax(scores, axis=-1).astype(x.dtype) @ values).swapaxes(1, 2)  # [B, T, H, v]
    out = out * mx.sigmoid(layer.linear("g_proj", x).astype(mx.float32))[..., None].astype(x.dtype)
    return layer.linear("dense", out.reshape(batch, length, -1))


def moe(layer: _Scope, config: ModelConfig, x: mx.array) -> tuple[mx.array, mx.array]:
    """The routed and shared experts' sum [B, T, h], and which experts each token chose [B, T, E] (0 or 1)."""
    scores = mx.sigmoid(x.astype(mx.float32) @ layer.matrix("gate.weight").astype(mx.float32).T)
    mask = mx.stop_gradient(_choose(scores + layer["gate.expert_bias"], config))
    weights = scores * mask
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    weights = (weights * config.routed_scaling_factor).astype(x.dtype)
    experts, width = config.num_experts, config.moe_intermediate_size
    gate = x @ layer.matrix("switch_mlp.gate_proj.weight").reshape(experts * width, -1).T
    up = x @ layer.matrix("switch_mlp.up_proj.weight").reshape(experts * width, -1).T
    inner = (gate * mx.sigmoid(gate) * up).reshape(*x.shape[:2], experts, width) * weights[..., None]
    down = layer.matrix("switch_mlp.down_proj.weight").swapaxes(-1, -2).reshape(experts * width, -1)
    routed = inner.reshape(*x.shape[:2], -1) @ down
    return routed + swiglu(layer.inside("shared_experts."), x), mask


def _choose(scores: mx.array, config: ModelConfig) -> mx.array:
    """1 for the top experts inside the top groups, else 0, by counting for each how many are better."""
    grouped = scores.reshape(*scores.shape[:-1], config.n_group, -1)
    best_two = (grouped * (_better(grouped) < 2)).sum(axis=-1)
    open_groups = (_better(best_two) < config.topk_group)[..., None]
    eligible = mx.where(open_groups, grouped, -mx.inf).reshape(scores.shape)
    return (_better(eligible) < config.num_experts_per_tok).astype(mx.float32)


def _better(scores: mx.array) -> mx.array:
    return (scores[..., None, :] > scores[..., :, None]).sum(axis=-1)


def swiglu(layer: _Scope, x: mx.array) -> mx.array:
    gate = layer.linear("gate_proj", x)
    return layer.linear("down_proj", gate * mx.sigmoid(gate) * layer.linear("up_proj", x))


def _short_conv(layer: _Scope, name: str, x: mx.array, sequence: mx.array) -> mx.array:
    """Depthwise causal convolution and SiLU of a projection of x."""
    y = layer.linear(f"{name}_proj", x)
    taps = layer.matrix(f"{name}_conv1d.weight")[..., 0]  # [P, taps]
    count, length = taps.shape[1], y.shape[1]
    out = y * taps[:, -1]
    for back in range(1, count):
        past = mx.pad(y[:, : length - back], [(0, 0), (back, 0), (0, 0)])
        same = mx.pad(sequence[:, back:] == sequence[:, : length - back], [(0, 0), (back, 0)])
        out = out + past * same[..., None].astype(y.dtype) * taps[:, -1 - back]
    return out * mx.sigmoid(out)


def _rope(x: mx.array, config: ModelConfig) -> mx.array:
    return mx.fast.rope(x, x.shape[-1], traditional=True, base=config.rope_theta, scale=1.0, offset=0)


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


class _Scope:
    """The parameters under one prefix, with the compute dtype."""

    def __init__(self, parameters: Parameters, prefix: str, dtype: mx.Dtype) -> None:
        self._parameters = parameters
        self._prefix = prefix
        self._dtype = dtype

    def __getitem__(self, name: str) -> mx.array:
        return self._parameters[self._prefix + name]

    def inside(self, name: str) -> _Scope:
        return _Scope(self._parameters, self._prefix + name, self._dtype)

    def matrix(self, name: str) -> mx.array:
        return self[name].astype(self._dtype)

    def linear(self, name: str, x: mx.array) -> mx.array:
        return x @ self.matrix(f"{name}.weight").T

    def norm(self, name: str, x: mx.array, eps: float) -> mx.array:
        return mx.fast.rms_norm(x, self.matrix(f"{name}.weight"), eps)
