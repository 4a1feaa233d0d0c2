"""The `ling-serve` command. Only what a command needs is imported, so that `--help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from ling_serve.commands.leave import report
from ling_serve.errors import LingServeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0 after `--help`, `--version` or an ordered end (SIGTERM, SIGINT, SIGHUP); 1 when the checkpoint cannot be served or
    the engine died; 2 for a wrong flag or setting.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["serve"]:
        given = given[1:]
    try:
        _serve(given)
    except LingServeError as error:
        return report(error)
    except KeyboardInterrupt:
        return 130


def _serve(arguments: Sequence[str]) -> NoReturn:
    from ling_serve.commands.serve_flags import parse_serve_flags

    config = parse_serve_flags(arguments)
    from ling_serve.commands.serve import serve

    serve(config)


if __name__ == "__main__":
    sys.exit(main())
