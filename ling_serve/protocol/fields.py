"""Fields of OpenAI's and vLLM's requests that are refused by name, and those that may be ignored.

Refused = ignoring it would change the answer. Ignored = it changes accounting, routing or speed, never the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ling_serve.protocol.base import Refusal

_NOT_YET = "it is not supported; leave it out"
_NO_CONSTRAINT = "constrained output is not supported; leave it out"
_NO_TOOLS = "tool calling is not supported; leave it out"
_TEXT_ONLY = "only text is supported"

REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "n": Refusal("only 1 is supported: send the request several times", (1,)),
        "best_of": Refusal("only 1 is supported", (1,)),
        "use_beam_search": Refusal("beam search is not supported", (False,)),
        "response_format": Refusal('only {"type": "text"} is supported', ({"type": "text"},)),
        "structured_outputs": Refusal(_NO_CONSTRAINT, ({},)),
        "guided_json": Refusal(_NO_CONSTRAINT),
        "guided_regex": Refusal(_NO_CONSTRAINT),
        "guided_choice": Refusal(_NO_CONSTRAINT, ([],)),
        "guided_grammar": Refusal(_NO_CONSTRAINT),
        "allowed_token_ids": Refusal(_NO_CONSTRAINT),
        "bad_words": Refusal(_NO_CONSTRAINT, ([],)),
        "logits_processors": Refusal("code from a request is never run", ([],)),
        "prompt_logprobs": Refusal(_NOT_YET, (False,)),
        "truncate_prompt_tokens": Refusal("a prompt is never cut; shorten it instead"),
        "return_tokens_as_token_ids": Refusal(_NOT_YET, (False,)),
        "return_token_ids": Refusal(_NOT_YET, (False,)),
        "thinking_token_budget": Refusal(_NOT_YET),
    }
)
"""On every generating endpoint."""

REFUSED_IN_CHAT: Mapping[str, Refusal] = MappingProxyType(
    {
        **REFUSED,
        "tools": Refusal(_NO_TOOLS, ([],)),
        "tool_choice": Refusal(_NO_TOOLS, ("none", "auto")),
        "functions": Refusal(_NO_TOOLS, ([],)),
        "function_call": Refusal(_NO_TOOLS, ("none", "auto")),
        "reasoning_effort": Refusal('use chat_template_kwargs, for example {"enable_thinking": false}'),
        "reasoning": Refusal('use chat_template_kwargs, for example {"enable_thinking": false}', ({},)),
        "verbosity": Refusal(_NOT_YET, ("medium",)),
        "modalities": Refusal(_TEXT_ONLY, (["text"], [])),
        "audio": Refusal(_TEXT_ONLY),
        "mm_processor_kwargs": Refusal(_TEXT_ONLY, ({},)),
        "web_search_options": Refusal("web search is not supported; leave it out"),
        "documents": Refusal("put documents into the messages", ([],)),
        "chat_template": Refusal("the template is chosen when the server starts (--chat-template)"),
        "echo": Refusal(_NOT_YET, (False,)),
    }
)

REFUSED_IN_COMPLETIONS: Mapping[str, Refusal] = MappingProxyType(
    {
        **REFUSED,
        "echo": Refusal(_NOT_YET, (False,)),
        "suffix": Refusal("the model cannot fill in the middle; leave it out", ("",)),
        "prompt_embeds": Refusal("send the prompt as text or token ids", ([],)),
    }
)

IGNORED = frozenset(
    {
        "cache_salt",
        "early_stopping",  # the next two steer beam search only
        "length_penalty",
        "kv_transfer_params",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "include_reasoning",
        "spaces_between_special_tokens",
    }
)
