"""Ways to break a small checkpoint, each with the error it must give and what the message must name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from ling_serve.errors import CheckpointError, ConfigFieldError, UnsupportedCheckpoint, WeightsError
from tests.checkpoints import write_json, write_shards

Break = Callable[[Path], object]

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
QUERY = "model.layers.0.attention.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
KV_B = "model.layers.3.attention.kv_b_proj.weight"
CONV = "model.layers.0.attention.k_conv1d.weight"


def edit_config(change: Callable[[dict[str, Any]], object]) -> Break:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        write_json(folder / "config.json", config)

    return apply


def set_field(**fields: Any) -> Break:
    return edit_config(lambda config: config.update(fields))


def edit_index(change: Callable[[dict[str, str]], object]) -> Break:
    def apply(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        write_json(folder / INDEX, index)

    return apply


def edit_tensors(change: Callable[[dict[str, mx.array]], object]) -> Break:
    def apply(folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        tensors = {name: array for file in files for name, array in mx.load(str(file)).items()}
        mx.eval(tensors)
        change(tensors)
        write_shards(folder, tensors, 2)

    return apply


def put(name: str, value: Callable[[mx.array], mx.array]) -> Break:
    return edit_tensors(lambda tensors: tensors.update({name: value(tensors[name])}))


def drop(*names: str) -> Break:
    return edit_tensors(lambda tensors: [tensors.pop(name) for name in names])


def add(name: str, *shape: int, dtype: mx.Dtype = mx.bfloat16) -> Break:
    return edit_tensors(lambda tensors: tensors.update({name: mx.ones(shape, dtype)}))


def replace_weights(*files: str) -> Break:
    def apply(folder: Path) -> None:
        for file in (*folder.glob("*.safetensors"), folder / INDEX):
            file.unlink()
        for file in files:
            (folder / file).write_bytes(b"weights")

    return apply


def edit_file(name: str, change: Callable[[bytes], bytes]) -> Break:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def edit_header(change: Callable[[dict[str, Any]], object]) -> Break:
    def rewrite(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return edit_file(FIRST, rewrite)


def copy_shard(folder: Path) -> None:
    (folder / INDEX).unlink()
    mx.save_safetensors(str(folder / "model-extra.safetensors"), {QUERY: mx.ones((32, 64))})


def both(*breaks: Break) -> Break:
    return lambda folder: [apply(folder) for apply in breaks]


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}

BROKEN: dict[str, tuple[Break, type[CheckpointError], list[str]]] = {
    # The folder.
    "config.json missing": (lambda f: (f / "config.json").unlink(), CheckpointError, ["config.json", "does not exist"]),
    "config.json no JSON": (edit_file("config.json", lambda b: b[:-9]), CheckpointError, ["config.json", "JSON"]),
    "config.json nested too deep": (
        edit_file("config.json", lambda b: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        CheckpointError,
        ["config.json", "JSON"],
    ),
    "config.json with a number of 5,000 digits": (
        edit_file("config.json", lambda b: b.replace(b"320", b"3" * 5000)),
        CheckpointError,
        ["config.json", "JSON"],
    ),
    "config.json a list": (edit_file("config.json", lambda b: b"[]"), CheckpointError, ["config.json", "list"]),
    "config.json not UTF-8": (edit_file("config.json", lambda b: b'{"\xff"}'), CheckpointError, ["config.json"]),
    "empty folder": (lambda f: [p.unlink() for p in f.iterdir()], CheckpointError, ["no *.safetensors"]),
    "only pickles": (replace_weights("pytorch_model.bin"), UnsupportedCheckpoint, ["pytorch_model.bin", "safetensors"]),
    "only GGUF": (replace_weights("ling-q4.gguf"), UnsupportedCheckpoint, ["ling-q4.gguf", "GGUF"]),
    # The config.
    "another architecture": (
        set_field(architectures=["BailingMoeV2_5ForCausalLM"]),
        UnsupportedCheckpoint,
        ["BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM"],
    ),
    "no architecture": (set_field(architectures=[]), ConfigFieldError, ["architectures", "[]"]),
    "field missing": (edit_config(lambda c: c.pop("kv_lora_rank")), ConfigFieldError, ["kv_lora_rank", "missing"]),
    "field negative": (set_field(hidden_size=-64), ConfigFieldError, ["hidden_size", "-64"]),
    "field zero": (set_field(num_attention_heads=0), ConfigFieldError, ["num_attention_heads", "0"]),
    "field beyond a float": (set_field(rms_norm_eps=10**400), ConfigFieldError, ["rms_norm_eps", "a finite number"]),
    "limit beyond a float": (
        set_field(expert_swiglu_limit_list=[10**400]),
        ConfigFieldError,
        ["expert_swiglu_limit_list", "a list"],
    ),
    "field a string": (set_field(num_experts="8"), ConfigFieldError, ["num_experts", "'8'"]),
    "one layer too few": (
        add("model.layers.4.input_layernorm.weight", 64),
        WeightsError,
        ["left over", "model.layers.4.", "num_hidden_layers is 4"],
    ),
    "one layer too many": (set_field(num_hidden_layers=5), WeightsError, ["num_hidden_layers is 5", "layer 4"]),
    "thousands of layers": (set_field(num_hidden_layers=10**4), WeightsError, ["num_hidden_layers is 10000"]),
    "layers beyond any memory": (
        set_field(num_hidden_layers=1 << 33),
        ConfigFieldError,
        ["num_hidden_layers", str(1 << 33), "10000"],
    ),
    "a million experts": (
        set_field(num_experts=10**6),
        WeightsError,
        ["num_experts is 1000000", "model.layers.1.mlp.gate.weight", "[8, 64]"],
    ),
    "sizes beyond any array": (set_field(intermediate_size=1 << 40), CheckpointError, ["config.json", str(1 << 40)]),
    "a wider vocabulary": (set_field(vocab_size=352), WeightsError, ["model.word_embeddings.weight", "[352, 64]"]),
    # Quantisations that are not read.
    "block FP8 by config": (set_field(quantization_config=FP8), UnsupportedCheckpoint, ["fp8", "mlx_lm.convert"]),
    "block FP8 by tensors": (
        add("model.layers.0.attention.q_proj.weight_scale_inv", 1, 1, dtype=mx.float32),
        UnsupportedCheckpoint,
        ["model.layers.0.attention.q_proj.weight_scale_inv", "FP8"],
    ),
    "GPTQ by config": (set_field(quantization_config={"quant_method": "gptq"}), UnsupportedCheckpoint, ["gptq"]),
    "AWQ by tensors": (
        add("model.layers.0.attention.q_proj.qweight", 64, 4, dtype=mx.int32),
        UnsupportedCheckpoint,
        ["model.layers.0.attention.q_proj.qweight", "AWQ"],
    ),
    "compressed-tensors": (
        set_field(quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        UnsupportedCheckpoint,
        ["compressed-tensors"],
    ),
    "unknown method": (
        set_field(quantization_config={"quant_method": "magic2bit"}),
        UnsupportedCheckpoint,
        ["magic2bit", "not known"],
    ),
    "config says 4 bit, tensors do not": (
        set_field(quantization={"bits": 4, "group_size": 32}),
        WeightsError,
        ["affine 4-bit group 32", "no tensor is quantised"],
    ),
    # The index and the files.
    "index names a missing file": (lambda f: (f / SECOND).unlink(), WeightsError, [SECOND, "not there"]),
    "file missing, no index": (
        both(lambda f: (f / INDEX).unlink(), lambda f: (f / SECOND).unlink()),
        WeightsError,
        [SECOND, "missing"],
    ),
    "index no JSON": (edit_file(INDEX, lambda b: b[:40]), WeightsError, [INDEX, "JSON"]),
    "index without map": (edit_file(INDEX, lambda b: b'{"metadata": {}}'), WeightsError, [INDEX, "weight_map"]),
    "index leaves the folder": (
        edit_index(lambda m: m.update({QUERY: "../model.safetensors"})),
        WeightsError,
        [QUERY, "../model.safetensors"],
    ),
    "index lists what no file has": (
        edit_index(lambda m: m.update({"model.extra.weight": FIRST})),
        WeightsError,
        ["model.extra.weight", "lack"],
    ),
    "index names the wrong file": (edit_index(lambda m: m.update({QUERY: SECOND})), WeightsError, [QUERY, SECOND]),
    "index misses a tensor": (edit_index(lambda m: m.pop(QUERY)), WeightsError, [QUERY, "not list"]),
    "tensor in two files": (copy_shard, WeightsError, [QUERY, "twice"]),
    "file cut short": (edit_file(SECOND, lambda b: b[: len(b) // 2]), WeightsError, [SECOND, "cut short"]),
    "file of four bytes": (edit_file(SECOND, lambda b: b[:4]), WeightsError, [SECOND, "cut short"]),
    "file with a tail": (edit_file(SECOND, lambda b: b + b"\0" * 64), WeightsError, [SECOND, "damaged"]),
    "header length lies": (
        edit_file(FIRST, lambda b: struct.pack("<Q", 1 << 60) + b[8:]),
        WeightsError,
        [FIRST, str(1 << 60)],
    ),
    "header no JSON": (edit_file(FIRST, lambda b: b[:8] + b"?" + b[9:]), WeightsError, [FIRST, "header"]),
    "header shape lies": (
        edit_header(lambda h: h[QUERY].update(shape=[64, 64])),
        WeightsError,
        [QUERY, "[64, 64]", "damaged"],
    ),
    "header offsets overlap": (
        edit_header(lambda h: h[QUERY].update(data_offsets=[0, 32 * 64 * 2])),
        WeightsError,
        [FIRST, "begins at byte"],
    ),
    "header entry is no entry": (edit_header(lambda h: h.update({QUERY: 7})), WeightsError, [QUERY, "7"]),
    # The tensors.
    "tensor missing": (drop(QUERY), WeightsError, ["1 missing", QUERY, "[32, 64]"]),
    "tensor left over": (
        add("model.layers.0.attention.z_proj.weight", 2, 3),
        WeightsError,
        ["z_proj.weight", "[2, 3]"],
    ),
    "wrong shape": (put(QUERY, lambda w: w[:-1]), WeightsError, [QUERY, "[31, 64]", "[32, 64]"]),
    "transposed": (put(QUERY, lambda w: w.T), WeightsError, [QUERY, "[64, 32]", "[32, 64]"]),
    "integers": (put(QUERY, lambda w: w.astype(mx.int32)), WeightsError, [QUERY, "I32", "BF16"]),
    "expert missing": (drop(EXPERT), WeightsError, ["1 missing", EXPERT, "[32, 64]"]),
    "expert too many": (
        add("model.layers.1.mlp.experts.8.up_proj.weight", 32, 64),
        WeightsError,
        ["1 left over", "experts.8.up_proj"],
    ),
    "expert misshapen": (put(EXPERT, lambda w: w.T), WeightsError, [EXPERT, "[64, 32]"]),
    "kv_b_proj of a head too few": (put(KV_B, lambda w: w[:32]), WeightsError, [KV_B, "[32, 32]", "[64, 32]"]),
    "convolution of three taps": (put(CONV, lambda w: w[..., :3]), WeightsError, [CONV, "[32, 1, 3]", "[32, 1, 4]"]),
    "A_log of a head too many": (
        put("model.layers.0.attention.A_log", lambda a: mx.ones((1, 1, 3, 1))),
        WeightsError,
        ["A_log", "[1, 1, 3, 1]", "[2]"],
    ),
    "split and joined kv_b_proj": (
        add("model.layers.3.attention.embed_q.weight", 2, 32, 16),
        WeightsError,
        ["left over", "embed_q"],
    ),
    "two biases of the router": (
        add("model.layers.1.mlp.gate.e_score_correction_bias", 8, dtype=mx.float32),
        WeightsError,
        ["left over", "mlp.gate."],
    ),
    "hundreds missing": (
        edit_tensors(lambda t: [t.pop(name) for name in list(t) if ".experts." in name and ".0." not in name]),
        WeightsError,
        ["63 missing", "experts.1.", "53 more"],
    ),
}

QUANTISED: dict[str, tuple[Break, type[CheckpointError], list[str]]] = {
    "scales without biases": (drop("model.layers.0.mlp.up_proj.biases"), WeightsError, ["mlp.up_proj.biases"]),
    "scales missing": (drop("model.layers.0.mlp.up_proj.scales"), WeightsError, ["mlp.up_proj.weight", "U32"]),
    "weight missing": (drop("model.layers.0.mlp.up_proj.weight"), WeightsError, ["mlp.up_proj.weight"]),
    "scales of half the groups": (
        put("model.layers.0.mlp.up_proj.scales", lambda s: s[:, :1]),
        WeightsError,
        ["mlp.up_proj.biases"],
    ),
    "scales that divide nothing": (
        put("model.layers.0.mlp.up_proj.scales", lambda s: mx.concatenate([s, s[:, :1]], axis=1)),
        WeightsError,
        ["mlp.up_proj", "input width 64"],
    ),
    "packed for a width that fits no bits": (
        put("model.layers.0.mlp.up_proj.weight", lambda w: w[:, :3]),
        WeightsError,
        ["mlp.up_proj", "input width 64"],
    ),
    "microscaling codes for 8 bit affine": (
        put("model.layers.0.mlp.up_proj.scales", lambda s: s.astype(mx.uint8)),
        WeightsError,
        ["left over", "model.layers.0.mlp.up_proj.biases"],
    ),
    "config says another mode": (
        set_field(quantization={"bits": 4, "group_size": 64, "mode": "affine"}),
        WeightsError,
        ["affine 4-bit group 64", "affine 8-bit group 32"],
    ),
    "config says another mode for a path": (
        edit_config(lambda c: c["quantization"].update({"model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 32}})),
        WeightsError,
        ["model.layers.0.mlp.up_proj", "affine 4-bit", "affine 8-bit"],
    ),
    "config says a path is not quantised": (
        edit_config(lambda c: c["quantization"].update({"model.layers.0.mlp.up_proj": False})),
        WeightsError,
        ["model.layers.0.mlp.up_proj", "not quantised"],
    ),
    "config says the head is quantised": (
        edit_config(lambda c: c["quantization"].update({"lm_head": {"bits": 8, "group_size": 32}})),
        WeightsError,
        ["lm_head", "not quantised"],
    ),
    "bits a string": (
        set_field(quantization={"bits": "8", "group_size": 32}),
        ConfigFieldError,
        ["quantization.bits", "'8'"],
    ),
    "mode unknown": (
        set_field(quantization={"bits": 8, "group_size": 32, "mode": "int8"}),
        ConfigFieldError,
        ["quantization.mode", "int8"],
    ),
    "quantised router": (
        edit_tensors(lambda t: t.update(quantise("model.layers.1.mlp.gate", t["model.layers.1.mlp.gate.weight"]))),
        UnsupportedCheckpoint,
        ["model.layers.1.mlp.gate"],
    ),
    "quantised kv_b_proj": (
        edit_tensors(lambda t: t.update({"model.layers.3.attention.kv_b_proj.scales": mx.ones((64, 1))})),
        UnsupportedCheckpoint,
        ["model.layers.3.attention.kv_b_proj"],
    ),
    "a scale for each expert": (
        add("model.layers.1.mlp.switch_mlp.up_proj.global_scale", 8, dtype=mx.float32),
        UnsupportedCheckpoint,
        ["model.layers.1.mlp.switch_mlp.up_proj.global_scale"],
    ),
}

NOT_FINITE: dict[str, tuple[Break, list[str]]] = {
    "NaN scale": (put("model.layers.0.mlp.up_proj.scales", lambda s: s * float("nan")), ["up_proj.scales", "NaN"]),
    "infinite weight": (put("model.norm.weight", lambda w: w * float("-inf")), ["model.norm.weight", "infinite"]),
}


def quantise(path: str, weight: mx.array) -> dict[str, mx.array]:
    """The three tensors of an affine 8-bit module."""
    packed, scales, biases = mx.quantize(weight, group_size=32, bits=8)
    return {f"{path}.weight": packed, f"{path}.scales": scales, f"{path}.biases": biases}
