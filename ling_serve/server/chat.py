"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from fastapi import APIRouter, Request, Response
from starlette.types import Receive

from ling_serve.choice_text import ChoiceText, Part, TextToken
from ling_serve.engine.request import FinishReason
from ling_serve.engine.request import Request as EngineRequest
from ling_serve.protocol import parse_body
from ling_serve.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    Delta,
)
from ling_serve.server.bodies import decode_json
from ling_serve.server.endpoint import answer, stream_events
from ling_serve.server.generation import Choice, Generation
from ling_serve.server.logprobs import chat_logprobs
from ling_serve.server.responses import wire_finish
from ling_serve.server.sampling import sampling_params, stop_plan
from ling_serve.server.service import Ready, Service
from ling_serve.server.sse import event, templated


def chat_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def create_chat_completion(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await answer(service, request, prepare=_prepare, complete=_complete, stream=_stream)

    return router


@dataclass(frozen=True)
class _Chat:
    """One request, ready for the engine, and what its answers have in common."""

    id: str
    model: str
    created: int
    body: ChatCompletionRequest
    ready: Ready
    choices: list[Choice]

    def logprobs(self, tokens: tuple[TextToken, ...]) -> ChatLogprobs | None:
        if self.body.wanted_logprobs is None:
            return None
        return chat_logprobs(tokens, self.ready.text.tokenizer)


def _prepare(service: Service, ready: Ready, body_bytes: bytes) -> _Chat:
    """Decode, check, render and tokenise: slow for a long prompt, so it runs in a thread."""
    body = parse_body(ChatCompletionRequest, decode_json(body_bytes))
    service.check_model(body.model)
    text = ready.text
    prompt_text = text.template.render(
        [message.model_dump(exclude_none=True) for message in body.messages],
        body.chat_template_kwargs,
        body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    prompt = text.tokenizer.encode(prompt_text, body.add_special_tokens)
    chat_id = f"chatcmpl-{uuid.uuid4().hex}"
    engine_request = EngineRequest(
        id=chat_id,
        prompt=tuple(prompt),
        sampling=sampling_params(body, ready, prompt, "messages"),
        eos_token_ids=text.defaults.eos_token_ids,
    )
    choice = Choice(engine_request, ChoiceText(0, text.tokenizer, stop_plan(body, text.defaults)))
    return _Chat(chat_id, service.model_names[0], int(time.time()), body, ready, [choice])


async def _complete(chat: _Chat, generation: Generation, receive: Receive) -> ChatCompletion:
    texts: list[str] = []
    tokens: list[TextToken] = []
    finish: FinishReason | None = None
    async with aclosing(generation.parts(receive)) as batches:
        async for parts in batches:
            for part in parts:
                texts.append(part.text)
                tokens += part.tokens
                finish = part.finish
    choice = ChatChoice(
        index=0,
        message=AnswerMessage(content="".join(texts)),
        logprobs=chat.logprobs(tuple(tokens)),
        finish_reason=wire_finish(finish),
    )
    return ChatCompletion(id=chat.id, created=chat.created, model=chat.model, choices=[choice], usage=generation.usage)


def _stream(chat: _Chat, generation: Generation, receive: Receive, heartbeat_s: float) -> AsyncGenerator[str]:
    options = chat.body.stream_options
    with_usage = options is not None and (options.include_usage or options.continuous_usage_stats)
    continuous = options is not None and options.continuous_usage_stats

    def chunk(*choices: ChatChunkChoice, usage: bool = False) -> str:
        message = ChatCompletionChunk(
            id=chat.id,
            created=chat.created,
            model=chat.model,
            choices=list(choices),
            usage=generation.usage if usage else None,
        )
        return event(message.model_dump_json(exclude=None if with_usage else {"usage"}))

    def text_chunk(text: str, tokens: tuple[TextToken, ...] = ()) -> str:
        choice = ChatChunkChoice(index=0, delta=Delta(content=text), logprobs=chat.logprobs(tokens))
        return chunk(choice, usage=continuous)

    def chunks_of(part: Part) -> str:
        text = ""
        if part.text or part.tokens:
            text += plain_chunk(part.text) if is_plain else text_chunk(part.text, part.tokens)
        if part.finish is not None:
            choice = ChatChunkChoice(index=0, delta=Delta(), finish_reason=wire_finish(part.finish))
            text += chunk(choice, usage=continuous)
        return text

    is_plain = not continuous and chat.body.wanted_logprobs is None
    plain_chunk = templated(text_chunk)
    return stream_events(
        generation.parts(receive, heartbeat_s),
        chunks_of,
        first=chunk(ChatChunkChoice(index=0, delta=Delta(role="assistant", content="")), usage=continuous),
        last=partial(chunk, usage=True) if options is not None and options.include_usage else None,
    )
