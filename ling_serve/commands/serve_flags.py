"""The flags of `ling-serve`, and the settings they make. Imports nothing heavy: `--help` must be quick."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ling_serve._version import __version__
from ling_serve.config import EngineOptions, HttpOptions, ModelOptions, ServeConfig
from ling_serve.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_EPILOG = """\
examples:
  ling-serve demo                          the bundled demo model
  ling-serve ~/models/Ling-3.0-tiny        a checkpoint folder
  ling-serve owner/name --port 9000        a Hugging Face repository, downloaded

Clients talk to http://HOST:PORT/v1 as they would to OpenAI. GET /health answers 200 once the model is ready.
"""

Value = TypeVar("Value")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage. Raises `ConfigError`."""
        raise ConfigError(f"{message} (ling-serve --help lists the flags)")


def parse_serve_flags(arguments: Sequence[str]) -> ServeConfig:
    """Raises `ConfigError` naming the flag, its value and what was expected; `--help` and `--version` exit."""
    flags = _parser().parse_args(arguments)
    _refuse_what_is_not_there(flags)
    return ServeConfig(
        model=ModelOptions(
            model=_model(flags),
            dtype=flags.dtype,
            served_model_names=tuple(flags.served_model_name),
            chat_template=flags.chat_template,
            default_chat_template_kwargs=flags.default_chat_template_kwargs,
            generation_config=flags.generation_config,
            trust_remote_code=flags.trust_remote_code,
        ),
        engine=EngineOptions(
            max_model_len=flags.max_model_len,
            max_num_seqs=flags.max_num_seqs,
            max_num_batched_tokens=flags.max_num_batched_tokens,
            block_size=flags.block_size,
            max_queue_len=flags.max_queue_len,
            memory_utilization=flags.memory_utilization,
            seed=flags.seed,
        ),
        http=HttpOptions(host=flags.host, port=flags.port, api_key=flags.api_key, log_level=flags.log_level),
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ling-serve",
        description="Serve a Ling-3.0 (Bailing V3) model over an OpenAI-compatible HTTP API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    model, engine, http = ModelOptions(""), EngineOptions(), HttpOptions()
    parser.add_argument("--version", action="version", version=f"ling-serve {__version__}")
    add = parser.add_argument_group("model").add_argument
    add("positional_model", metavar="MODEL", nargs="?", help="a folder, a Hugging Face repo id, or demo")
    add("--model", metavar="MODEL", help="the same as a flag")
    add("--served-model-name", metavar="NAME", nargs="+", default=[], help="names for clients (default: MODEL)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default=model.dtype,
        help=_and_default("compute dtype"),
    )
    add("--chat-template", metavar="FILE", type=_existing_file, help="a Jinja file instead of the checkpoint's own")
    add(
        "--default-chat-template-kwargs",
        metavar="JSON",
        type=_json_object,
        default={},
        help='template variables that a request may override, e.g. {"enable_thinking": false}',
    )
    add(
        "--generation-config",
        choices=("auto", "none"),
        default=model.generation_config,
        help="none = ignore the checkpoint's sampling defaults",
    )
    add("--trust-remote-code", action="store_true", help="accepted; code from a checkpoint is never run")
    add = parser.add_argument_group("engine").add_argument
    add("--max-model-len", metavar="N", type=_whole, help="longest prompt + completion (default: what memory holds)")
    add("--max-num-seqs", metavar="N", type=_whole, default=engine.max_num_seqs, help=_and_default("requests at once"))
    add(
        "--max-num-batched-tokens",
        metavar="N",
        type=_whole,
        default=engine.max_num_batched_tokens,
        help=_and_default("tokens of one step"),
    )
    add(
        "--block-size",
        metavar="N",
        type=_whole,
        default=engine.block_size,
        help=_and_default("tokens per cache block: 16, 32 or 64"),
    )
    add(
        "--memory-utilization",
        "--gpu-memory-utilization",
        metavar="X",
        type=_fraction,
        default=engine.memory_utilization,
        help=_and_default("share of the memory that weights and caches may take"),
    )
    add(
        "--max-queue-len",
        metavar="N",
        type=_whole,
        default=engine.max_queue_len,
        help=_and_default("requests that may wait; one more is answered 429"),
    )
    add("--seed", metavar="N", type=_whole, default=engine.seed, help=_and_default("for requests without a seed"))
    add("--tensor-parallel-size", "-tp", metavar="N", type=_whole, default=1, help="only 1 is supported")
    add("--speculative-config", metavar="JSON", type=_json, help="not supported; null is accepted")
    add = parser.add_argument_group("HTTP").add_argument
    add("--host", default=http.host, help=_and_default("address to listen on"))
    add("--port", type=_port, default=http.port, help=_and_default("0 = any free port"))
    add("--api-key", metavar="KEY", type=_key, help="ask clients for Authorization: Bearer KEY")
    add("--log-level", choices=LOG_LEVELS, default=http.log_level, help=_and_default("how much to log"))
    return parser


def _and_default(text: str) -> str:
    return f"{text} (default: %(default)s)"


def _model(flags: argparse.Namespace) -> str:
    given = [name for name in (flags.positional_model, flags.model) if name is not None]
    if not given or not given[0]:
        raise ConfigError("--model is missing; expected a checkpoint folder, a Hugging Face repo id, or demo")
    if len(set(given)) > 1:
        raise ConfigError(f"--model is {flags.model!r}, but the model was also given as {flags.positional_model!r}")
    return given[0]


def _refuse_what_is_not_there(flags: argparse.Namespace) -> None:
    if flags.tensor_parallel_size != 1:
        raise ConfigError(
            f"--tensor-parallel-size is {flags.tensor_parallel_size}; expected 1: the model runs on one device",
            param="--tensor-parallel-size",
        )
    if flags.speculative_config is not None:
        raise ConfigError(
            "--speculative-config asks for speculative decoding, which is not supported; leave it out or give null",
            param="--speculative-config",
        )


def _checked(expected: str) -> Callable[[Callable[[str], Value]], Callable[[str], Value]]:
    """Turns a reader's ValueError into argparse's message that names flag, value and expectation."""

    def wrap(read: Callable[[str], Value]) -> Callable[[str], Value]:
        def checked(text: str) -> Value:
            try:
                return read(text)
            except (ValueError, OSError, RecursionError):
                raise argparse.ArgumentTypeError(f"{text!r} given; expected {expected}") from None

        return checked

    return wrap


@_checked("a whole number")
def _whole(text: str) -> int:
    return int(text)


@_checked("a number such as 0.9")
def _fraction(text: str) -> float:
    return float(text)


@_checked("a port from 0 to 65535")
def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise ValueError
    return port


@_checked("a key that is not empty")
def _key(text: str) -> str:
    if not text.strip():
        raise ValueError
    return text.strip()


@_checked("JSON")
def _json(text: str) -> Any:
    return json.loads(text)


@_checked('a JSON object such as {"enable_thinking": false}')
def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value  # pyright: ignore[reportUnknownVariableType]  (JSON)


@_checked("a file that exists")
def _existing_file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise ValueError
    return path
