"""The bundled demo model answers over HTTP, greedily, as the readme shows it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from ling_serve.config import EngineOptions, ModelOptions, ServeConfig
from ling_serve.demo import CHECKPOINT
from ling_serve.engine.build import build_engine
from ling_serve.engine.thread import EngineThread
from ling_serve.text.text_side import TextSide
from tests.server.live_server import serving, wait_until

OPTIONS = ModelOptions("demo", default_chat_template_kwargs={"enable_thinking": False})


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    engine = EngineThread(lambda: build_engine(ServeConfig(OPTIONS, EngineOptions(max_model_len=2048, max_num_seqs=2))))
    engine.start()
    wait_until(lambda: engine.state != "loading", "the model is loaded", timeout_s=60)
    assert engine.state == "ready", engine.error
    with (
        serving(engine, TextSide.from_checkpoint(CHECKPOINT, OPTIONS), model_names=("demo",)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client
    assert engine.stop(10)


def ask(client: openai.OpenAI, question: str, stream: bool) -> str:
    settings: Any = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0}
    if not stream:
        return client.chat.completions.create(**settings).choices[0].message.content or ""
    with client.chat.completions.create(**settings, stream=True) as chunks:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
def test_a_discount(client: openai.OpenAI, stream: bool) -> None:
    assert "$480" in ask(client, "A laptop costs $600 and is 20% off. How much do I pay?", stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
def test_two_products_at_once(client: openai.OpenAI, stream: bool) -> None:
    questions = ["What is 17 times 23?", "46 * 37"]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda question: ask(client, question, stream), questions))
    assert "391" in answers[0]
    assert "1702" in answers[1]
