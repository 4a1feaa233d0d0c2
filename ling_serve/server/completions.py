"""`POST /v1/completions`: every prompt of a request is an engine request of its own, and keeps its index."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter, Request, Response
from starlette.types import Receive

from ling_serve.choice_text import ChoiceText, Part, TextToken
from ling_serve.engine.request import FinishReason
from ling_serve.engine.request import Request as EngineRequest
from ling_serve.protocol import Completion, CompletionRequest, parse_body
from ling_serve.protocol.completions import CompletionChoice, CompletionLogprobs
from ling_serve.server.bodies import decode_json
from ling_serve.server.endpoint import answer, stream_events
from ling_serve.server.generation import Choice, Generation
from ling_serve.server.logprobs import completion_logprobs
from ling_serve.server.responses import wire_finish
from ling_serve.server.sampling import sampling_params, stop_plan
from ling_serve.server.service import Ready, Service
from ling_serve.server.sse import event, templated


def completions_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", summary="Continue a text")
    async def create_completion(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return await answer(service, request, prepare=_prepare, complete=_complete, stream=_stream)

    return router


@dataclass(frozen=True)
class _Job:
    """One request, ready for the engine, and what its answers have in common."""

    id: str
    model: str
    created: int
    body: CompletionRequest
    ready: Ready
    choices: list[Choice]

    def logprobs(self, tokens: list[TextToken]) -> CompletionLogprobs | None:
        if self.body.wanted_logprobs is None:
            return None
        return completion_logprobs(tokens, self.ready.text.tokenizer)


@dataclass
class _Collected:
    """A choice as it grows."""

    texts: list[str] = field(default_factory=list[str])
    tokens: list[TextToken] = field(default_factory=list[TextToken])
    finish: FinishReason | None = None

    def add(self, part: Part) -> None:
        self.texts.append(part.text)
        self.tokens += part.tokens
        self.finish = part.finish


def _prepare(service: Service, ready: Ready, body_bytes: bytes) -> _Job:
    """Decode, check and tokenise: slow for a long prompt, so it runs in a thread."""
    body = parse_body(CompletionRequest, decode_json(body_bytes))
    service.check_model(body.model)
    text = ready.text
    job_id = f"cmpl-{uuid.uuid4().hex}"
    choices: list[Choice] = []
    for index, prompt in enumerate(body.prompt):
        ids = text.tokenizer.encode(prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt
        request = EngineRequest(
            id=f"{job_id}-{index}",
            prompt=tuple(ids),
            sampling=sampling_params(body, ready, ids, "prompt"),
            eos_token_ids=text.defaults.eos_token_ids,
        )
        choices.append(Choice(request, ChoiceText(index, text.tokenizer, stop_plan(body, text.defaults))))
    return _Job(job_id, service.model_names[0], int(time.time()), body, ready, choices)


async def _complete(job: _Job, generation: Generation, receive: Receive) -> Completion:
    collected = [_Collected() for _ in job.choices]
    async with aclosing(generation.parts(receive)) as batches:
        async for parts in batches:
            for part in parts:
                collected[part.index].add(part)
    choices = [
        CompletionChoice(
            index=index,
            text="".join(choice.texts),
            logprobs=job.logprobs(choice.tokens),
            finish_reason=wire_finish(choice.finish),
        )
        for index, choice in enumerate(collected)
    ]
    return Completion(id=job.id, created=job.created, model=job.model, choices=choices, usage=generation.usage)


def _stream(job: _Job, generation: Generation, receive: Receive, heartbeat_s: float) -> AsyncGenerator[str]:
    options = job.body.stream_options
    with_usage = options is not None and (options.include_usage or options.continuous_usage_stats)
    continuous = options is not None and options.continuous_usage_stats

    def chunk(*choices: CompletionChoice, usage: bool = False) -> str:
        message = Completion(
            id=job.id,
            created=job.created,
            model=job.model,
            choices=list(choices),
            usage=generation.usage if usage else None,
        )
        return event(message.model_dump_json(exclude=None if with_usage else {"usage"}))

    def text_chunk(index: int, text: str, tokens: tuple[TextToken, ...] = ()) -> str:
        choice = CompletionChoice(index=index, text=text, logprobs=job.logprobs(list(tokens)))
        return chunk(choice, usage=continuous)

    def chunks_of(part: Part) -> str:
        text = ""
        if part.text or part.tokens:
            plain = plain_chunks[part.index] if is_plain else None
            text += plain(part.text) if plain else text_chunk(part.index, part.text, part.tokens)
        if part.finish is not None:
            choice = CompletionChoice(index=part.index, text="", finish_reason=wire_finish(part.finish))
            text += chunk(choice, usage=continuous)
        return text

    is_plain = not continuous and job.body.wanted_logprobs is None
    plain_chunks = [templated(partial(text_chunk, index)) for index in range(len(job.choices))]
    return stream_events(
        generation.parts(receive, heartbeat_s),
        chunks_of,
        last=partial(chunk, usage=True) if options is not None and options.include_usage else None,
    )
