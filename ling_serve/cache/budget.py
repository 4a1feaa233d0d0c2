"""Divides the device's memory between weights, activations, states and latents, and shows the division."""

from __future__ import annotations

from dataclasses import dataclass

from ling_serve.cache.layout import CacheLayout
from ling_serve.config import EngineOptions
from ling_serve.errors import ConfigError

SPECIAL_SLOTS = 2
"""The zero slot and the scratch slot."""
SPECIAL_BLOCKS = 1
"""The scratch block."""

Row = tuple[str, str]


@dataclass(frozen=True)
class MemoryPlan:
    """How many blocks and slots there are, and the context they allow."""

    num_blocks: int
    """Usable blocks, the scratch block not counted."""
    num_slots: int
    """Sequences at once."""
    max_model_len: int
    """Longest prompt + completion, in tokens."""
    rows: tuple[Row, ...]
    """(label, value) lines of the start-up table."""

    def table(self) -> str:
        return format_table(self.rows)


def plan_memory(
    layout: CacheLayout,
    *,
    weight_bytes: int,
    step_bytes: int,
    memory_limit_bytes: int,
    options: EngineOptions,
    model_max_len: int,
    step_bytes_per_token: int = 0,
) -> MemoryPlan:
    """Give states what --max-num-seqs needs and latents what is left, up to what the sequences can ever use.

    `step_bytes` is the peak of the largest step over weights and caches, `step_bytes_per_token` what it takes more for
    each token of context. Raises ConfigError, with the table, when not even one block fits or an explicit
    --max-model-len does not.
    """
    wanted_len = _wanted_len(options, model_max_len)
    usable = int(memory_limit_bytes * options.memory_utilization)
    state_bytes = (options.max_num_seqs + SPECIAL_SLOTS) * layout.bytes_per_slot
    left = usable - weight_bytes - step_bytes - state_bytes
    block_bytes = options.block_size * layout.bytes_per_token
    step_block_bytes = options.block_size * step_bytes_per_token
    blocks_per_seq = -(-wanted_len // options.block_size)
    affordable = left // max(1, block_bytes + step_block_bytes) - SPECIAL_BLOCKS
    if affordable >= blocks_per_seq:  # no context is longer, so a further block costs its latents alone
        affordable = (left - blocks_per_seq * step_block_bytes) // max(1, block_bytes) - SPECIAL_BLOCKS
    num_blocks = max(0, min(options.max_num_seqs * blocks_per_seq, affordable))
    max_model_len = min(wanted_len, num_blocks * options.block_size)
    rows = (
        ("device memory", show_bytes(memory_limit_bytes)),
        (f"usable (--memory-utilization {options.memory_utilization:g})", show_bytes(usable)),
        ("weights", show_bytes(weight_bytes)),
        (f"largest step ({options.max_num_batched_tokens:,} tokens)", _step(step_bytes, step_bytes_per_token)),
        (
            f"KDA states ({len(layout.kda_layers)} layers)",
            f"{options.max_num_seqs} + {SPECIAL_SLOTS} slots x {show_bytes(layout.bytes_per_slot)} = "
            f"{show_bytes(state_bytes)}",
        ),
        ("left for latents", show_bytes(left)),
        (
            f"MLA latents ({len(layout.mla_layers)} layers)",
            f"{num_blocks:,} blocks x {options.block_size} tokens x {show_bytes(layout.bytes_per_token)} = "
            f"{show_bytes(num_blocks * block_bytes)}",
        ),
        ("context that fits", f"{max_model_len:,} of {wanted_len:,} tokens"),
        (
            "sequences at that length",
            f"{num_blocks * options.block_size / max(1, max_model_len):.1f}",
        ),
    )
    if max_model_len < 2:
        raise ConfigError(
            "the caches do not fit into memory; raise --memory-utilization, lower --max-num-seqs or "
            f"--max-num-batched-tokens, or serve a smaller checkpoint\n{format_table(rows)}"
        )
    if options.max_model_len is not None and max_model_len < wanted_len:
        raise ConfigError(
            f"--max-model-len is {wanted_len}, but only {max_model_len} tokens fit; lower it or --max-num-seqs, "
            f"or raise --memory-utilization\n{format_table(rows)}",
            param="--max-model-len",
        )
    return MemoryPlan(num_blocks, options.max_num_seqs, max_model_len, rows)


def show_bytes(count: int) -> str:
    """`1.5 GiB`, `19.2 MiB`, `6.8 KiB`; a deficit keeps its sign."""
    size = abs(count)
    sign = "-" if count < 0 else ""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{sign}{size / (1 << power):,.2f} {unit}"
    return f"{sign}{size} B"


def format_table(rows: tuple[Row, ...]) -> str:
    """The rows as text, values aligned."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"  {label:<{width}}  {value}" for label, value in rows)


def _wanted_len(options: EngineOptions, model_max_len: int) -> int:
    if options.max_model_len is None:
        return model_max_len
    if options.max_model_len > model_max_len:
        raise ConfigError(
            f"--max-model-len is {options.max_model_len}; the model was trained for at most {model_max_len}",
            param="--max-model-len",
        )
    return options.max_model_len


def _step(step_bytes: int, step_bytes_per_token: int) -> str:
    if step_bytes_per_token == 0:
        return show_bytes(step_bytes)
    return f"{show_bytes(step_bytes)} + {show_bytes(step_bytes_per_token)} per token of context"
