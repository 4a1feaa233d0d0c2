"""Fixtures of the server's tests: the text side of a byte-level checkpoint, and servers with scripted engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ling_serve.text.generation_config import GenerationDefaults
from ling_serve.text.template import ChatTemplate
from ling_serve.text.text_side import TextSide
from ling_serve.text.tokenizer import Tokenizer
from tests.byte_tokenizer import write_tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import Server, serving


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextSide:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_checkpoint(folder)
    return TextSide(tokenizer, ChatTemplate(tokenizer), GenerationDefaults.from_checkpoint(folder, "auto", tokenizer))


@pytest.fixture
def serve(text: TextSide) -> Iterator[Callable[..., Server]]:
    """Starts a server for an engine; the options are `serving`'s."""
    with ExitStack() as stack:

        def start(engine: FakeEngine, **options: Any) -> Server:
            stack.callback(engine.stop)
            return stack.enter_context(serving(engine, text, **options))

        yield start
