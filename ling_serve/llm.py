"""The engine without HTTP: prompts in, completions out, in the calling thread."""

from __future__ import annotations

import ling_serve.blas  # pyright: ignore[reportUnusedImport]  # isort: skip  # noqa: F401  (must come before MLX)

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from types import TracebackType
from typing import Any

from ling_serve.choice_text import ChoiceText, StopPlan
from ling_serve.config import EngineOptions, ModelOptions, ServeConfig
from ling_serve.engine.build import build_engine_from
from ling_serve.engine.engine import Engine
from ling_serve.engine.events import ErrorEvent, TokenEvent, TokenLogprobs
from ling_serve.engine.request import FinishReason, Request, SamplingParams
from ling_serve.errors import ConfigError, LingServeError, QueueFull, RequestError
from ling_serve.model.checkpoint_path import resolve_checkpoint
from ling_serve.text.text_side import TextSide
from ling_serve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt."""

    text: str
    """Without special tokens, and without the stop string that ended it."""
    token_ids: tuple[int, ...]
    """Every sampled token, the one that ended the sequence included."""
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    """One per token id, if asked for."""


class LLM:
    """A loaded model. Use it in the thread that made it, and close it, or use it as a context manager.

        with LLM("demo") as llm:
            [answer] = llm.chat([{"role": "user", "content": "What is 17 times 23?"}])

    Options are the fields of `ModelOptions` and `EngineOptions`, such as `dtype` and `max_num_seqs`. Raises ConfigError
    for an unknown one, and whatever `build_engine` does.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = _config(model, options)
        path = resolve_checkpoint(model)
        text = TextSide.from_checkpoint(path, config.model)
        self.tokenizer, self.template, self.defaults = text.tokenizer, text.template, text.defaults
        self._engine: Engine | None = build_engine_from(path, config)
        self._ids = count()

    @property
    def engine(self) -> Engine:
        """Raises LingServeError once closed."""
        if self._engine is None:
            raise LingServeError("this LLM is closed")
        return self._engine

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Complete each prompt (text, or token ids), in one batch; answers come in the order of the prompts.

        `sampling` is one for all or one each; None = the checkpoint's defaults. Raises RequestError for a prompt that
        cannot be answered, and NotFinite where the model computes garbage; then it answers none.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts is one string; expected a list of prompts", param="prompts")
        ids = [tuple(self.tokenizer.encode(p)) if isinstance(p, str) else tuple(p) for p in prompts]
        chosen = self._sampling(ids, sampling)
        answers = [
            _Answer(self._request(prompt, params), self.tokenizer, self._stop_plan(params, stop))
            for prompt, params in zip(ids, chosen, strict=True)
        ]
        self._run(answers)
        return [answer.completion() for answer in answers]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Answer one conversation (a list of messages), or each of several."""
        prompts = [self.template.render(one, chat_template_kwargs) for one in _conversations(messages)]
        return self.generate(prompts, sampling, stop=stop)

    def close(self) -> None:
        """Let go of the model and its caches."""
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _sampling(
        self, prompts: Sequence[Sequence[int]], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None:
            return [self._default_sampling(len(prompt)) for prompt in prompts]
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if len(given) != len(prompts):
            raise RequestError(f"{len(given)} sampling parameters for {len(prompts)} prompts", param="sampling")
        return given

    def _default_sampling(self, prompt_len: int) -> SamplingParams:
        defaults = self.defaults
        return SamplingParams(
            max_tokens=defaults.max_new_tokens or max(1, self.engine.max_model_len - prompt_len),
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        )

    def _request(self, prompt: tuple[int, ...], sampling: SamplingParams) -> Request:
        return Request(f"llm-{next(self._ids)}", prompt, sampling, self.defaults.eos_token_ids)

    def _stop_plan(self, sampling: SamplingParams, stop: Sequence[str]) -> StopPlan:
        return StopPlan(tuple(stop), () if sampling.ignore_eos else self.defaults.implicit_stop_strings)

    def _run(self, answers: Sequence[_Answer]) -> None:
        engine = self.engine
        open_answers: dict[str, _Answer] = {}
        waiting = deque(answers)
        try:
            while waiting or open_answers:
                for answer in _admitted(engine, waiting):
                    open_answers[answer.request.id] = answer
                for event in engine.step():
                    if isinstance(event, ErrorEvent):
                        raise event.error
                    if isinstance(event, TokenEvent):
                        answer = open_answers[event.request_id]
                        answer.take(event)
                        if answer.finish is not None:
                            del open_answers[event.request_id]
                            engine.abort(event.request_id)  # after a stop string; otherwise it has ended by itself
        finally:
            for request_id in open_answers:
                engine.abort(request_id)


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    one = [message for message in messages if isinstance(message, Mapping)]
    several = [conversation for conversation in messages if not isinstance(conversation, Mapping)]
    if bool(one) == bool(several):
        raise RequestError("messages is neither one conversation nor a list of conversations", param="messages")
    return [one] if one else several


def _admitted(engine: Engine, waiting: deque[_Answer]) -> Iterator[_Answer]:
    """Answers whose requests the engine takes now; the others stay in `waiting`."""
    while waiting:
        try:
            engine.add(waiting[0].request)
        except QueueFull:
            return
        yield waiting.popleft()


class _Answer:
    """A completion as it comes."""

    def __init__(self, request: Request, tokenizer: Tokenizer, plan: StopPlan) -> None:
        self.request = request
        self.finish: FinishReason | None = None
        self._text = ChoiceText(0, tokenizer, plan)
        self._parts: list[str] = []
        self._events: list[TokenEvent] = []

    def take(self, event: TokenEvent) -> None:
        self._events.append(event)
        part = self._text.push(event)
        self._parts.append(part.text)
        self.finish = part.finish

    def completion(self) -> Completion:
        assert self.finish is not None
        logprobs = tuple(event.logprobs for event in self._events if event.logprobs is not None)
        return Completion(
            text="".join(self._parts),
            token_ids=tuple(event.token for event in self._events),
            finish_reason=self.finish,
            logprobs=logprobs if self.request.sampling.logprobs is not None else None,
        )


def _config(model: str, options: Mapping[str, Any]) -> ServeConfig:
    """Sort options by the record they belong to."""
    if "gpu_memory_utilization" in options:  # vLLM's name, as on the command line
        options = {**options, "memory_utilization": options["gpu_memory_utilization"]}
        del options["gpu_memory_utilization"]
    model_names, engine_names = ({f.name for f in fields(record)} for record in (ModelOptions, EngineOptions))
    for name in options:
        if name not in model_names | engine_names:
            known = ", ".join(sorted((model_names | engine_names) - {"model"}))
            raise ConfigError(f"LLM has no option {name!r}; expected one of {known}", param=name)
    return ServeConfig(
        ModelOptions(model, **{name: value for name, value in options.items() if name in model_names}),
        EngineOptions(**{name: value for name, value in options.items() if name in engine_names}),
    )
