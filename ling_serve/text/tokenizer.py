"""The checkpoint's tokenizer.

Nothing here changes after construction. transformers' own encode sets truncation, padding and the treatment of special
tokens on the shared backend at every call, which threads must not do to each other ("Already borrowed"); so the backend
is called directly, and two ways to encode are two backends.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from ling_serve.errors import CheckpointError
from ling_serve.text.spelling import read_spelling

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SENTENCEPIECE_FILE = "tokenizer.model"


class PretrainedTokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    eos_token_id: int | list[int] | None
    chat_template: str | Mapping[str, str] | None

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer: ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> str: ...


class Tokenizer:
    """Text ↔ token ids. Every method may be called from any thread, also at the same time."""

    def __init__(self, pretrained: PretrainedTokenizer) -> None:
        """Raises `CheckpointError` when the tokens of this kind of tokenizer cannot be spelled one by one."""
        self.pretrained = pretrained
        self._backend = pretrained.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._plain_backend: tokenizers.Tokenizer | None = None
        self._plain_backend_lock = threading.Lock()
        self._spelling = read_spelling(_decoder_of(self._backend))

        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos = pretrained.eos_token_id
        self.eos_ids = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """The highest id + 1. A model's vocabulary may be padded beyond it."""

    @classmethod
    def from_checkpoint(cls, path: Path) -> Tokenizer:
        """Reads tokenizer.json (or else tokenizer.model) from the folder `path`; code in the folder is never run.

        Raises `CheckpointError` naming the file that is missing or broken.
        """
        try:
            source = _tokenizer_file(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {_one_line(error)}") from error
        _check_tokenizer_config(path / TOKENIZER_CONFIG_FILE)
        try:
            pretrained = _load(path, source)
        except Exception as error:
            raise CheckpointError(f"{path / source} cannot be loaded as a tokenizer: {_one_line(error)}") from error
        return cls(pretrained)

    def encode(self, text: str, add_special: bool = False, *, parse_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special` adds what the checkpoint's post-processor puts around a text (say, a begin-of-text id).
        `parse_special` reads `<|role_end|>` and the like in the text as the tokens they name, as rendered chat
        templates need; without it they are spelled out as ordinary text. Lone surrogates become U+FFFD.
        """
        backend = self._backend if parse_special else self._without_added_tokens()
        # A batch of one: `encode` keeps the interpreter to itself, a second and more for a megabyte.
        [encoding] = backend.encode_batch_fast([_well_formed(text)], add_special_tokens=add_special)
        return encoding.ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False, continuing: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids outside the vocabulary nothing.

        `continuing`: the ids follow other text, so a SentencePiece vocabulary's first space is kept.
        """
        spelled = b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special_ids))
        text = spelled.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space and not continuing else text

    @property
    def strips_first_space(self) -> bool:
        """A text decoded from its beginning loses one leading space (SentencePiece vocabularies)."""
        return self._spelling.leading_space

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, often a part of a character; empty for an id outside the vocabulary."""
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if token is None else self._spelling.bytes_of(token)

    def token_text(self, token_id: int) -> str:
        """One token as text, with U+FFFD for bytes that are no whole character: for showing, not for joining."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _without_added_tokens(self) -> tokenizers.Tokenizer:
        with self._plain_backend_lock:
            if self._plain_backend is None:
                state = json.loads(self._backend.to_str())
                state["added_tokens"] = []
                self._plain_backend = type(self._backend).from_str(json.dumps(state))
            return self._plain_backend


def _tokenizer_file(path: Path) -> str:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder; expected a checkpoint folder that holds {TOKENIZER_FILE}")
    for name in (TOKENIZER_FILE, SENTENCEPIECE_FILE):
        if (path / name).is_file():
            return name
    raise CheckpointError(
        f"{path} holds no {TOKENIZER_FILE} (nor {SENTENCEPIECE_FILE}); copy the tokenizer files of the original "
        "checkpoint into it"
    )


def _load(path: Path, source: str) -> PretrainedTokenizer:
    with quiet_transformers():
        if source == TOKENIZER_FILE:
            # AutoTokenizer would look at config.json, whose model type transformers may not know.
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
        loader = cast("Any", Loader)
        return loader.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Keeps transformers' advice to itself: that there is no PyTorch is how it should be."""

    def only_errors(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    # Filters of a logger don't see its children's records, but those of the handler that prints them do.
    logger = logging.getLogger("transformers")
    logger.addFilter(only_errors)
    try:
        import_module("transformers")
        handlers = list(logger.handlers)
        for handler in handlers:
            handler.addFilter(only_errors)
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(only_errors)
    finally:
        logger.removeFilter(only_errors)


def _check_tokenizer_config(path: Path) -> None:
    if not path.is_file():
        return
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {_one_line(error)}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds a {type(config).__name__}; expected a JSON object")
    template = cast("dict[str, Any]", config).get("chat_template")
    if template is None or isinstance(template, str) or _is_named_templates(template):
        return
    raise CheckpointError(
        f"{path}: chat_template is {str(template)[:80]!r}; expected a string, or a list of objects with `name` and "
        "`template`"
    )


def _is_named_templates(value: object) -> bool:
    if not isinstance(value, list):
        return False
    return all(
        isinstance(entry, dict) and {"name", "template"} <= set(cast("dict[str, Any]", entry))
        for entry in cast("list[object]", value)
    )


def _decoder_of(backend: tokenizers.Tokenizer) -> dict[str, Any] | None:
    decoder = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _well_formed(text: str) -> str:
    """JSON can carry half of a surrogate pair, which UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
