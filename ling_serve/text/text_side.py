"""Everything of a checkpoint that turns text into ids and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ling_serve.config import ModelOptions
from ling_serve.text.generation_config import GenerationDefaults
from ling_serve.text.template import ChatTemplate
from ling_serve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextSide:
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults

    @classmethod
    def from_checkpoint(cls, path: Path, options: ModelOptions) -> TextSide:
        """Read the folder `path` as `options` ask. Raises `CheckpointError` or `ConfigError`."""
        tokenizer = Tokenizer.from_checkpoint(path)
        template = ChatTemplate(tokenizer, options.chat_template, options.default_chat_template_kwargs)
        return cls(tokenizer, template, GenerationDefaults.from_checkpoint(path, options.generation_config, tokenizer))
