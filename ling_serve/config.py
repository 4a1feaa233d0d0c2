"""What the user asked for, frozen: one record per layer, composed into `ServeConfig`.

Defaults live here and nowhere else; the command line only overrides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ling_serve.errors import ConfigError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
GenerationConfigSource = Literal["auto", "none"]

_NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class ModelOptions:
    """Which checkpoint, and how to read it."""

    model: str
    """A folder, a Hugging Face repo id, or `demo` for the bundled model."""
    dtype: DTypeName = "auto"
    """Compute dtype; `auto` = float32 on a CPU when the model fits, otherwise the checkpoint's own."""
    served_model_names: tuple[str, ...] = ()
    """Names clients may use; the first is reported. Empty = the model as given."""
    chat_template: Path | None = None
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=lambda: _NO_KWARGS)
    generation_config: GenerationConfigSource = "auto"
    trust_remote_code: bool = False
    """Accepted for compatibility. Code from a checkpoint is never run."""


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of the scheduler and the caches."""

    max_model_len: int | None = None
    """Longest prompt + completion in tokens; None = what the model allows and memory holds."""
    max_num_seqs: int = 16
    """Sequences that run at once = KDA state slots."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step, decode and prefill together."""
    block_size: int = 32
    """Tokens per block of MLA latents: 16, 32 or 64."""
    memory_utilization: float = 0.9
    """Fraction of the device's (on a CPU: the free) memory that weights and caches may take."""
    max_queue_len: int = 1024
    """Requests that may wait; one more is answered 429."""
    seed: int = 0
    """Seeds the random numbers of requests that bring no seed of their own."""

    def __post_init__(self) -> None:
        _at_least("--max-num-seqs", self.max_num_seqs, 1)
        _at_least("--max-num-batched-tokens", self.max_num_batched_tokens, 1)
        _at_least("--max-queue-len", self.max_queue_len, 1)
        if self.max_model_len is not None:
            _at_least("--max-model-len", self.max_model_len, 2)
        if self.block_size not in (16, 32, 64):
            raise ConfigError(f"--block-size is {self.block_size}; expected 16, 32 or 64", param="--block-size")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(
                f"--memory-utilization is {self.memory_utilization}; expected a fraction above 0 and at most 1",
                param="--memory-utilization",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, below --max-num-seqs "
                f"{self.max_num_seqs}; each running sequence decodes one token a step, so raise the first or lower "
                "the second",
                param="--max-num-batched-tokens",
            )


@dataclass(frozen=True)
class HttpOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    log_level: str = "info"


@dataclass(frozen=True)
class ServeConfig:
    model: ModelOptions
    engine: EngineOptions = field(default_factory=EngineOptions)
    http: HttpOptions = field(default_factory=HttpOptions)


def _at_least(flag: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{flag} is {value!r}; expected a whole number of at least {least}", param=flag)
    if value < least:
        raise ConfigError(f"{flag} is {value}; expected at least {least}", param=flag)
