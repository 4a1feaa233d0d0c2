"""A byte-level tokenizer with Ling's special tokens and chat format, small enough for a vocabulary of 320.

Ids 0 to 255 are the bytes themselves; the special tokens follow.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|role_end|>", "<role>", "</role>", "<|number_end|>")
"""Never part of an answer's text."""
TEXT_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tools>",
    "</tools>",
)
"""Single tokens that a parser of the answer must still see."""

END_OF_TEXT = 256
ROLE_END = 257

CHAT_TEMPLATE = """\
{%- set thinking = enable_thinking if enable_thinking is defined else true -%}
{%- set flag = 'detailed thinking on' if thinking else 'detailed thinking off' -%}
{%- set has_system = messages and messages[0].role == 'system' -%}
{%- set system = messages[0].content if has_system else '' -%}
<role>SYSTEM</role>
{%- if system %}{{ system + '\\n' }}{% endif -%}
{%- if tools -%}
{{ '# Tools\\nYou may call these functions.\\n<tools>\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor -%}
{{ '</tools>\\nCall one as <tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n</tool_call>\\n' }}
{%- endif -%}
{%- if 'detailed thinking o' not in system %}{{ flag }}{% endif -%}
<|role_end|>
{%- for message in messages[1 if has_system else 0:] -%}
  {%- if message.role == 'user' or message.role == 'system' -%}
    {{ '<role>' + ('HUMAN' if message.role == 'user' else 'SYSTEM') + '</role>' + message.content + '<|role_end|>' }}
  {%- elif message.role == 'assistant' -%}
    {%- set content = message.content or '' -%}
    {%- set reasoning = message.reasoning_content or '' -%}
    {%- if '</think>' in content and not reasoning -%}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] -%}
      {%- set content = content.split('</think>', 1)[1] -%}
    {%- endif -%}
    {{ '<role>ASSISTANT</role>\\n<think>' + reasoning + '</think>' + content }}
    {%- for call in message.tool_calls or [] -%}
      {{ '' if loop.first else '\\n' }}{{ '<tool_call>' + call.function.name + '\\n' }}
      {%- for key, value in call.function.arguments.items() -%}
        {%- set text = value if value is string else value | tojson -%}
        {{ '<arg_key>' + key + '</arg_key>\\n<arg_value>' + text + '</arg_value>\\n' }}
      {%- endfor -%}
      {{ '</tool_call>' }}
    {%- endfor -%}
    {{ '<|role_end|>' }}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<role>OBSERVATION</role>' }}{% endif -%}
    {{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|role_end|>' }}{% endif -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<role>ASSISTANT</role>\\n<think>' + ('' if thinking else '</think>') }}
{%- endif -%}
"""


def byte_alphabet() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself if printable, else one from U+0100 up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in TEXT_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|role_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
