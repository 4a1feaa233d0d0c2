"""Chat messages → the prompt text the model was trained on, by the checkpoint's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from ling_serve.errors import CheckpointError, ConfigError, RequestError
from ling_serve.text.messages import normalise_messages
from ling_serve.text.tokenizer import Tokenizer

NO_KWARGS: Mapping[str, Any] = MappingProxyType({})

_FLAG = "--chat-template"
# Parameters of transformers' apply_chat_template, and the variables that have request fields of their own.
_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class ChatTemplate:
    """Renders chats in transformers' sandbox. Pure: it may be used from several threads at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_override: Path | None = None,
        default_kwargs: Mapping[str, Any] = NO_KWARGS,
    ) -> None:
        """`template_override` is a Jinja file that replaces the checkpoint's template; `default_kwargs` are template
        variables such as `enable_thinking`, which a request's own override.

        Raises `ConfigError` (override, kwargs) or `CheckpointError` for a template that cannot be read or parsed.
        """
        if reserved := sorted(_RESERVED & set(default_kwargs)):
            raise ConfigError(
                f"--default-chat-template-kwargs holds {reserved[0]}, which is no variable of a template; remove it",
                param="--default-chat-template-kwargs",
            )
        self._pretrained = tokenizer.pretrained
        self._override = None if template_override is None else _read(template_override)
        self._default_kwargs = dict(default_kwargs)
        self._check_syntax(template_override)

    @property
    def available(self) -> bool:
        """Whether there is a template at all; without one `render` refuses every chat."""
        return bool(self._override or self._pretrained.chat_template)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt for `messages` (OpenAI's shape, see `normalise_messages`).

        `kwargs` are the request's chat_template_kwargs (null = absent). `continue_final_message` leaves the last
        message open for the model to go on, and replaces the generation prompt.

        Raises `RequestError` for messages or kwargs that are malformed or that the template refuses, and where there
        is no template.
        """
        if not self.available:
            raise RequestError(
                f"the checkpoint has no chat template; start the server with {_FLAG} PATH, or use /v1/completions",
                param="messages",
            )
        given = {name: value for name, value in (kwargs or NO_KWARGS).items() if value is not None}
        if reserved := sorted(_RESERVED & set(given)):
            raise RequestError(
                f"chat_template_kwargs.{reserved[0]} is not a variable of a template; remove it",
                param=f"chat_template_kwargs.{reserved[0]}",
            )
        chat = normalise_messages(messages)
        try:
            return self._pretrained.apply_chat_template(
                chat,
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self._override,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=False,
                **{**self._default_kwargs, **given},
            )
        except TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from error
        except Exception as error:  # a template is a program; what it cannot digest is the request's
            reason = f"{type(error).__name__}: {error}"[:300]
            raise RequestError(f"the chat template cannot render the messages: {reason}", param="messages") from error

    def _check_syntax(self, override: Path | None) -> None:
        if not self.available:
            return
        try:
            self.render([{"role": "user", "content": ""}])
        except RequestError as error:
            cause = error.__cause__
            if not isinstance(cause, TemplateSyntaxError):
                return  # this template wants other messages
            where = f"line {cause.lineno}: {cause.message}"
            if override is not None:
                raise ConfigError(f"{_FLAG} {override} is not a Jinja template: {where}", param=_FLAG) from error
            raise CheckpointError(
                f"the checkpoint's chat template is not a Jinja template: {where}; pass another with {_FLAG} PATH"
            ) from error


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_FLAG} {path} cannot be read as UTF-8 text: {error}", param=_FLAG) from error
    if not text.strip():
        raise ConfigError(f"{_FLAG} {path} is empty; expected a Jinja template", param=_FLAG)
    return text
