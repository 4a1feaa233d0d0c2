"""One token of Kimi Delta Attention, and the token loop that defines it, in MLX ops.

Source: the recurrence of `fla/ops/kda/naive.py` (flash-linear-attention), here with the state kept as [dv, dk]:

    S = S · diag(e^g);  u = β (v - S k);  S = S + u kᵀ;  o = S q
"""

from __future__ import annotations

import mlx.core as mx

from ling_kernels.exponential import exp, sigmoid


def kda_gate(f: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float) -> mx.array:
    """Log-decay of every key channel in nats: lower_bound · sigmoid(exp(A_log) · (f + dt_bias)).

    f [..., H, dk] any float dtype, A_log [H], dt_bias [H, dk] or [H * dk] -> [..., H, dk] float32 in (lower_bound, 0).
    """
    heads, key_dim = f.shape[-2:]
    rate = mx.exp(A_log.astype(mx.float32)).reshape(heads, 1)
    offset = dt_bias.astype(mx.float32).reshape(heads, key_dim) * rate
    return lower_bound * sigmoid(f.astype(mx.float32) * rate + offset)


def kda_step(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Advance R sequences by one token.

    q, k [R, H, dk] (normalised, q scaled), v [R, H, dv], g [R, H, dk] log-decay, beta [R, H], state [R, H, dv, dk];
    all float32. Returns o [R, H, dv] and the new state.
    """
    decayed = state * exp(g)[..., None, :]
    u = (v[..., None] - decayed @ k[..., None]) * beta[..., None, None]
    state = decayed + u * k[..., None, :]
    return (state @ q[..., None]).squeeze(-1), state


def kda_recurrent(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Advance B sequences by T tokens, one at a time: what every faster form must agree with.

    q, k, g [B, T, H, dk], v [B, T, H, dv], beta [B, T, H], state [B, H, dv, dk]; all float32.
    Returns o [B, T, H, dv] and the new state.
    """
    outputs: list[mx.array] = []
    for t in range(q.shape[1]):
        o, state = kda_step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state)
        outputs.append(o)
    return mx.stack(outputs, axis=1), state
