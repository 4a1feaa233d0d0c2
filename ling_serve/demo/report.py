# ruff: noqa: RUF001  the tables use typographic signs
"""Asks a checkpoint the evaluation's questions through the engine and prints the tables of docs/demo-model.md:
`python -m ling_serve.demo.report [--samples 200]`.
"""

from __future__ import annotations

import ling_serve.blas  # noqa: F401  # pyright: ignore[reportUnusedImport]  # isort: skip

import argparse
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ling_serve.config import DTypeName
from ling_serve.demo import CHECKPOINT, evaluate
from ling_serve.demo.data import Turn
from ling_serve.demo.dense import forward
from ling_serve.demo.export import read_weights
from ling_serve.demo.pool import START, TOKEN, make_pool
from ling_serve.llm import LLM
from ling_serve.model.config import ModelConfig


def right_answers(llm: LLM, turns: Sequence[Turn], thinking: bool) -> float:
    """Share of the questions whose answer, after the reasoning, is exactly the wanted one."""
    conversations = [[{"role": "user", "content": turn.question}] for turn in turns]
    completions = llm.chat(conversations, chat_template_kwargs={"enable_thinking": thinking})
    answers = [completion.text.rpartition("</think>")[2] for completion in completions]
    return sum(answer == turn.answer for answer, turn in zip(answers, turns, strict=True)) / len(turns)


def expert_loads(folder: Path, rows: int) -> npt.NDArray[np.float32]:
    """[MoE layers, experts] share of the tokens of that many training rows, relative to uniform."""
    config = ModelConfig.from_file(folder)
    weights = {name: mx.array(value) for name, value in read_weights(folder).items()}
    picked = make_pool(3 * rows, 0.72, seed=99, workers=1)[:rows].astype(np.int32)
    tokens, sequence = picked & TOKEN, np.cumsum((picked & START) > 0, axis=-1, dtype=np.int32)
    _, chosen = forward(weights, config, mx.array(tokens), mx.float32, mx.array(sequence))
    real = mx.array((tokens != config.pad_token_id).astype(np.float32))[..., None]
    share = (chosen * real).sum(axis=(1, 2)) / real.sum()
    return np.array(share * config.num_experts / config.num_experts_per_tok, dtype=np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    dtype: DTypeName = options.dtype
    print("| questions | asked | thinking off | thinking on |\n|---|---|---|---|", flush=True)
    with LLM(str(options.checkpoint), dtype=dtype, max_model_len=512, max_num_seqs=64) as llm:
        for name, turns in evaluate.questions(options.samples).items():
            off, on = (100 * right_answers(llm, turns, thinking) for thinking in (False, True))
            print(f"| {name} | {len(turns)} | {off:.1f} % | {on:.1f} % |", flush=True)
        turns = evaluate.product_turns()
        print(f"| every product from 10 × 10 to 99 × 99, as `a * b` | {len(turns)} ", end="| ", flush=True)
        print(f"{100 * right_answers(llm, turns, False):.2f} % | – |", flush=True)
    print("\n| MoE layer | busiest expert | idlest expert | experts below a tenth of their share |\n|---|---|---|---|")
    first = ModelConfig.from_file(options.checkpoint).first_k_dense_replace
    for index, load in enumerate(expert_loads(options.checkpoint, 48)):
        idle = int((load < 0.1).sum())
        print(f"| {first + index} | {load.max():.2f} × | {load.min():.2f} × | {idle} of {len(load)} |")


if __name__ == "__main__":
    main()
