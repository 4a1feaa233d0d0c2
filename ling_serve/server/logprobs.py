"""Log-probabilities in the two shapes OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence

from ling_serve.choice_text import TextToken
from ling_serve.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from ling_serve.protocol.completions import CompletionLogprobs
from ling_serve.text.tokenizer import Tokenizer

_LEAST = -9999.0  # JSON has no infinity


def chat_logprobs(tokens: Sequence[TextToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """`choices[].logprobs` of a chat: text, exact bytes and log-probability per token."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                **_entry(token.id, token.logprobs.logprob, tokenizer).model_dump(),
                top_logprobs=[_entry(top_id, logprob, tokenizer) for top_id, logprob in token.logprobs.top],
            )
            for token in tokens
        ]
    )


def completion_logprobs(tokens: Sequence[TextToken], tokenizer: Tokenizer) -> CompletionLogprobs:
    """`choices[].logprobs` of a completion; `top_logprobs` always holds the chosen token too."""
    return CompletionLogprobs(
        tokens=[_label(token.id, tokenizer) for token in tokens],
        token_logprobs=[max(token.logprobs.logprob, _LEAST) for token in tokens],
        top_logprobs=[
            {
                _label(token_id, tokenizer): max(logprob, _LEAST)
                for token_id, logprob in (*token.logprobs.top, (token.id, token.logprobs.logprob))
            }
            for token in tokens
        ],
        text_offset=[token.text_offset for token in tokens],
    )


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    spelled = tokenizer.token_bytes(token_id)
    return TopLogprob(token=spelled.decode("utf-8", "replace"), bytes=list(spelled), logprob=max(logprob, _LEAST))


def _label(token_id: int, tokenizer: Tokenizer) -> str:
    """A token as a key: bytes that are no whole character are spelled out, so that keys stay apart."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
