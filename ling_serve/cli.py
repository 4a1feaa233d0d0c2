"""The `ling-serve` command. Only what a command needs is imported, so that `--help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ling_serve.errors import ConfigError, LingServeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0 after `--help`, `--version` or an ordered end (SIGTERM, SIGINT, SIGHUP); 1 when the checkpoint cannot be served or
    the engine died; 2 for a wrong flag or setting.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["serve"]:
        given = given[1:]
    try:
        return _serve(given)
    except LingServeError as error:
        print(f"ling-serve: error: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130


def _serve(arguments: Sequence[str]) -> int:
    from ling_serve.commands.serve_flags import parse_serve_flags

    config = parse_serve_flags(arguments)
    from ling_serve.commands.serve import serve

    return serve(config)


if __name__ == "__main__":
    sys.exit(main())
