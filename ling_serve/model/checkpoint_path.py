"""From what a user calls a model to a folder on disk."""

from __future__ import annotations

import re
from pathlib import Path

from ling_serve.demo import CHECKPOINT as DEMO_CHECKPOINT
from ling_serve.errors import CheckpointError

DEMO = "demo"
DOWNLOADED_FILES = ("*.safetensors", "*.json", "*.jinja")
"""Weights, settings, tokenizer and template. No code, no pickles."""

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_checkpoint(name: str) -> Path:
    """`demo` → the bundled checkpoint; an existing path → itself; `owner/name` → its Hugging Face snapshot, downloaded.

    A folder that happens to be called demo is given as ./demo. Raises CheckpointError for a path that is not there and
    for a repository that cannot be had.
    """
    if name == DEMO:
        return DEMO_CHECKPOINT
    path = Path(name).expanduser()
    if name and _exists(path):  # an empty path is the current folder
        return path
    if not _REPO_ID.fullmatch(name):
        raise CheckpointError(
            f"{name!r} does not exist; expected a checkpoint folder, a Hugging Face repository as owner/name or {DEMO}"
        )
    return _download(name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; make it readable for this user") from error


def _download(repo_id: str) -> Path:
    # Imported here: nothing else needs the network.
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(DOWNLOADED_FILES)))
    except GatedRepoError as error:
        raise CheckpointError(
            f"{repo_id} needs permission: accept its terms and log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo_id!r} is neither a folder here nor a repository on Hugging Face (or it is private: `hf auth login`)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{repo_id!r} is no folder here, and it cannot be downloaded: Hugging Face is out of reach and there is no "
            "complete earlier download"
        ) from error
    except Exception as error:  # whatever the network and the disk come up with
        raise CheckpointError(f"{repo_id} cannot be downloaded: {error}") from error
