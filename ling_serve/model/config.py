"""config.json of a Bailing V3 checkpoint as one checked, frozen record: sizes, rotary scaling and a plan of the layers.

The architecture is decided by `architectures` alone: the model type `bailing_hybrid` is shared with an older, different
architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from ling_serve.cache.layout import CacheLayout
from ling_serve.errors import MISSING, CheckpointError, ConfigFieldError, UnsupportedCheckpoint
from ling_serve.model.config_fields import FieldReader

ARCHITECTURE = "BailingMoeV3ForCausalLM"

LEAST_KDA_LOWER_BOUND = -10.0
"""Below this, decays of a 16-token block span more than e^±80 and leave the range of float32."""

MOST_LAYERS = 10_000
"""More are a damaged number: planning them takes memory before any tensor could contradict it."""

_QUANTISED_CACHE_KEYS = (
    "turboquant",
    "turboquant_config",
    "kv_quant",
    "k_quant",
    "v_quant",
    "kv_bits",
    "kv_cache_bits",
    "kv_cache_quantization",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "latent_quantization",
)


class AttentionKind(Enum):
    KDA = "kda"
    MLA = "mla"


class MlpKind(Enum):
    DENSE = "dense"
    MOE = "moe"


class RopeKind(Enum):
    PLAIN = "plain"
    LINEAR = "linear"
    YARN = "yarn"


@dataclass(frozen=True)
class LayerPlan:
    """What one decoder layer is made of."""

    index: int
    attention: AttentionKind
    mlp: MlpKind
    swiglu_limit: float | None
    """Clamp of the routed experts' activations; None = no clamp."""
    shared_swiglu_limit: float | None
    """Clamp of the shared experts' activations; None = no clamp."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies stretch beyond the trained length. The YaRN fields have no meaning for other kinds."""

    kind: RopeKind = RopeKind.PLAIN
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class ModelConfig:
    """A Bailing V3 model. Field names are those of config.json where one exists.

    Optional fields and what their absence (or null) means: `tie_word_embeddings` false, `rope_scaling` none,
    `norm_topk_prob` true, `moe_shared_expert_intermediate_size` = `moe_intermediate_size`, `num_nextn_predict_layers`
    0, the two SwiGLU limit lists no clamp, `eos_token_id` and `pad_token_id` none. Everything else here is required.
    `rope_parameters`, the newer spelling, stands in for `rope_scaling` and `rope_theta` where those are absent.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    first_k_dense_replace: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    layer_group_size: int
    head_dim: int
    """Of a KDA head: of its queries and keys, and of its values."""
    q_lora_rank: int | None
    """None = queries come straight from one projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    short_conv_kernel_size: int
    kda_lower_bound: float
    """Lower bound of the log-decay of one token, in nats."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_nextn_predict_layers: int
    """Multi-token-prediction layers stored after the main ones; their tensors are not part of this model."""
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    checkpoint_dtype: str | None
    """`dtype` or `torch_dtype` as written, such as "bfloat16"."""
    quantization: Mapping[str, Any] | None
    """As written, for the weights code."""
    quantization_config: Mapping[str, Any] | None
    """As written, for the weights code."""
    layers: tuple[LayerPlan, ...]

    @classmethod
    def from_file(cls, path: Path) -> ModelConfig:
        """Read `path`, a config.json or the folder that holds one.

        Raises CheckpointError (no such file, no JSON), ConfigFieldError and UnsupportedCheckpoint.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{file} does not exist; expected a checkpoint folder with a config.json") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{file} holds a JSON {type(values).__name__}; expected an object")
        return cls.from_dict(cast("dict[str, Any]", values))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Check and convert the object of a config.json.

        Raises ConfigFieldError (a field is missing, malformed or contradicts another) and UnsupportedCheckpoint
        (another architecture, or quantised caches).
        """
        _check_architecture(values)
        fields = FieldReader(values)
        _refuse_unsupported(fields)
        moe_intermediate_size = fields.integer("moe_intermediate_size")
        vocab_size = fields.integer("vocab_size")
        pad_ids = fields.token_ids("pad_token_id", vocab_size=vocab_size)
        config = cls(
            vocab_size=vocab_size,
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            moe_intermediate_size=moe_intermediate_size,
            moe_shared_expert_intermediate_size=fields.integer(
                "moe_shared_expert_intermediate_size", default=moe_intermediate_size
            ),
            num_hidden_layers=fields.integer("num_hidden_layers"),
            num_attention_heads=fields.integer("num_attention_heads"),
            num_experts=fields.integer("num_experts"),
            num_experts_per_tok=fields.integer("num_experts_per_tok"),
            num_shared_experts=fields.integer("num_shared_experts", least=0),
            first_k_dense_replace=fields.integer("first_k_dense_replace", least=0),
            n_group=fields.integer("n_group"),
            topk_group=fields.integer("topk_group"),
            norm_topk_prob=fields.flag("norm_topk_prob", default=True),
            routed_scaling_factor=fields.number("routed_scaling_factor", above=0.0),
            layer_group_size=fields.integer("layer_group_size"),
            head_dim=fields.integer("head_dim"),
            q_lora_rank=fields.optional_integer("q_lora_rank"),
            kv_lora_rank=fields.integer("kv_lora_rank"),
            qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
            qk_rope_head_dim=fields.integer("qk_rope_head_dim", least=2),
            v_head_dim=fields.integer("v_head_dim"),
            short_conv_kernel_size=fields.integer("short_conv_kernel_size", least=2),
            kda_lower_bound=fields.number("kda_lower_bound"),
            rms_norm_eps=fields.number("rms_norm_eps", above=0.0),
            rope_theta=_rope_theta(fields),
            rope_scaling=_rope_scaling(fields),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", least=0, default=0),
            eos_token_ids=fields.token_ids("eos_token_id", vocab_size=vocab_size),
            pad_token_id=pad_ids[0] if pad_ids else None,
            checkpoint_dtype=fields.text("dtype") or fields.text("torch_dtype"),
            quantization=fields.mapping("quantization"),
            quantization_config=fields.mapping("quantization_config"),
            layers=_plan_layers(fields),
        )
        _check_consistency(config, fields)
        return config

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(plan.index for plan in self.layers if plan.attention is AttentionKind.MLA)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(plan.index for plan in self.layers if plan.attention is AttentionKind.KDA)

    @property
    def qk_head_dim(self) -> int:
        """Of an MLA query: the part without and the part with rotary positions."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_width(self) -> int:
        """Cached values of one token and MLA layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def kda_width(self) -> int:
        """Channels of q, of k and of v of a KDA layer: all heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Of all shared experts, which are stored as one; 0 = none."""
        return self.moe_shared_expert_intermediate_size * self.num_shared_experts

    def cache_layout(self, dtype: mx.Dtype) -> CacheLayout:
        """The caches of this model when latents and convolution inputs are kept in `dtype`."""
        return CacheLayout(
            mla_layers=self.mla_layers,
            kda_layers=self.kda_layers,
            latent_width=self.latent_width,
            latent_dtype=dtype,
            conv_taps=self.short_conv_kernel_size - 1,
            conv_width=3 * self.kda_width,
            conv_dtype=dtype,
            num_heads=self.num_attention_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
        )


def _check_architecture(values: Mapping[str, Any]) -> None:
    value = cast("object", values.get("architectures", MISSING))
    names = [name for name in cast("list[object]", value) if isinstance(name, str)] if isinstance(value, list) else []
    if not names or names != value:
        raise ConfigFieldError("architectures", values.get("architectures", MISSING), f'["{ARCHITECTURE}"]')
    if names != [ARCHITECTURE]:
        hint = " (Ling-2.6 has this model_type too, but is another architecture)"
        raise UnsupportedCheckpoint(
            f"config.json: the architecture is {', '.join(names)}; only {ARCHITECTURE} (Ling-3.0) is served"
            + (hint if values.get("model_type") == "bailing_hybrid" else ""),
            param="architectures",
        )


def _refuse_unsupported(fields: FieldReader) -> None:
    """Fields that would change the computation in a way this model does not implement."""
    fields.fixed("hidden_act", "silu", "the only activation of this architecture")
    fields.fixed("score_function", "sigmoid", "the router scores experts with a sigmoid")
    fields.fixed("scoring_func", "sigmoid", "the router scores experts with a sigmoid")
    fields.fixed("topk_method", "noaux_tc", "experts are chosen by groups with a bias")
    fields.fixed("moe_router_enable_expert_bias", True, "the router has a bias for each expert")
    fields.fixed("kda_safe_gate", True, "only the bounded gate is implemented")
    fields.fixed("no_kda_lora", True, "only full-rank KDA gates are implemented")
    fields.fixed("use_kda_lora", False, "only full-rank KDA gates are implemented")
    fields.fixed("rope_interleave", True, "rotary pairs are neighbours")
    fields.fixed("gated_attention_proj_granularity_type", "head_wise", "one gate for each head")
    for name in ("use_bias", "use_qkv_bias", "attention_bias"):
        fields.fixed(name, False, "projections have no bias")
    fields.fixed("norm_head", False, "the output head is used as stored")
    fields.fixed("use_rmsnorm", True, "the only norm of this architecture")
    nested = [fields.mapping("quantization"), fields.mapping("quantization_config")]
    for values in [fields.values, *(group for group in nested if group is not None)]:
        for name in _QUANTISED_CACHE_KEYS:
            if values.get(name):
                raise UnsupportedCheckpoint(
                    f"config.json: {name} is {values[name]!r}; quantised caches are not served (MLA latents and KDA "
                    "states are kept unquantised), so remove the field",
                    param=name,
                )


def _rope_theta(fields: FieldReader) -> float:
    parameters = fields.mapping("rope_parameters")
    if "rope_theta" not in fields.values and parameters is not None:
        return FieldReader(parameters, prefix="rope_parameters.").number("rope_theta", above=1.0)
    return fields.number("rope_theta", above=1.0)


def _rope_scaling(fields: FieldReader) -> RopeScaling:
    source = "rope_parameters" if fields.mapping("rope_scaling") is None else "rope_scaling"
    values = fields.mapping(source)
    if values is None:
        return RopeScaling()
    inner = FieldReader(values, prefix=f"{source}.")
    name = "type" if values.get("type") is not None else "rope_type"
    kind = values.get(name)
    if kind is None or kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind=RopeKind.LINEAR, factor=inner.number("factor", above=0.0))
    if kind in ("yarn", "deepseek_yarn"):
        for unsupported in ("attention_factor", "truncate"):
            if values.get(unsupported) is not None:
                raise inner.error(unsupported, "no such field: mscale and mscale_all_dim set the attention scale")
        return RopeScaling(
            kind=RopeKind.YARN,
            factor=inner.number("factor", above=0.0),
            original_max_position_embeddings=inner.integer("original_max_position_embeddings", default=4096),
            beta_fast=inner.number("beta_fast", above=0.0, default=32.0),
            beta_slow=inner.number("beta_slow", above=0.0, default=1.0),
            mscale=inner.number("mscale", default=1.0),
            mscale_all_dim=inner.number("mscale_all_dim", default=0.0),
        )
    raise inner.error(name, '"default", "linear", "yarn" or "deepseek_yarn"')


def _plan_layers(fields: FieldReader) -> tuple[LayerPlan, ...]:
    """Each group of `layer_group_size` layers ends in MLA; so do all layers of an incomplete last group."""
    count, group = fields.integer("num_hidden_layers"), fields.integer("layer_group_size")
    if count > MOST_LAYERS:
        raise fields.error("num_hidden_layers", f"an integer from 1 to {MOST_LAYERS}")
    dense = fields.integer("first_k_dense_replace", least=0)
    routed = fields.limits("expert_swiglu_limit_list", count=count)
    shared = fields.limits("share_expert_swiglu_limit_list", count=count)
    tail = count // group * group
    return tuple(
        LayerPlan(
            index=index,
            attention=AttentionKind.MLA if (index + 1) % group == 0 or index >= tail else AttentionKind.KDA,
            mlp=MlpKind.DENSE if index < dense else MlpKind.MOE,
            swiglu_limit=routed[index],
            shared_swiglu_limit=shared[index],
        )
        for index in range(count)
    )


def _check_consistency(config: ModelConfig, fields: FieldReader) -> None:
    """Fields that must fit each other."""
    if not LEAST_KDA_LOWER_BOUND <= config.kda_lower_bound < 0.0:
        raise fields.error("kda_lower_bound", f"a number from {LEAST_KDA_LOWER_BOUND:g} to below 0")
    if config.qk_rope_head_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number: rotary positions turn pairs")
    if config.first_k_dense_replace > config.num_hidden_layers:
        raise fields.error("first_k_dense_replace", f"at most num_hidden_layers = {config.num_hidden_layers}")
    if config.num_experts % config.n_group:
        raise fields.error("n_group", f"a divisor of num_experts = {config.num_experts}")
    if config.topk_group > config.n_group:
        raise fields.error("topk_group", f"at most n_group = {config.n_group}")
    group_size = config.num_experts // config.n_group
    if config.n_group > 1 and group_size < 2:
        raise fields.error(
            "n_group", f"at most num_experts / 2 = {config.num_experts // 2}: a group's score takes two experts"
        )
    if config.num_experts_per_tok > config.topk_group * group_size:
        raise fields.error(
            "num_experts_per_tok",
            f"at most {config.topk_group * group_size}, the experts of the {config.topk_group} groups that are kept",
        )
