"""From a model's name to a folder, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from ling_serve.demo import CHECKPOINT
from ling_serve.errors import CheckpointError
from ling_serve.model.checkpoint_path import resolve_checkpoint


class NoSuchRepositoryError(RepositoryNotFoundError):
    def __init__(self) -> None:
        Exception.__init__(self, "404")


class GatedError(GatedRepoError):
    def __init__(self) -> None:
        Exception.__init__(self, "403")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """What would have been downloaded."""
    calls: list[tuple[str, list[str]]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        calls.append((repo_id, allow_patterns))
        return "/snapshots/one"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_existing_paths_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    assert resolve_checkpoint("owner/name") == Path("owner/name")
    assert resolve_checkpoint("~/owner") == tmp_path / "owner"
    assert asked == []


def test_demo_is_the_bundled_one_and_a_folder_of_that_name_needs_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("demo") == CHECKPOINT
    assert resolve_checkpoint("./demo") == Path("demo")


def test_repository_is_downloaded_without_code_or_pickles(asked: list[tuple[str, list[str]]]) -> None:
    assert resolve_checkpoint("inclusionAI/Ling-3.0-tiny") == Path("/snapshots/one")
    assert asked == [("inclusionAI/Ling-3.0-tiny", ["*.safetensors", "*.json", "*.jinja"])]


@pytest.mark.parametrize(
    "name",
    ["./nowhere", "/no/such/folder", "nowhere", "~/nowhere", "a/b/c", "owner/", "", "-x/y", "models\\tiny"],
)
def test_a_path_that_is_not_there_is_named(name: str, asked: list[Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_checkpoint(name)
    assert repr(name) in caught.value.message
    assert asked == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NoSuchRepositoryError(), "neither a folder here nor"),
        (GatedError(), "accept its terms"),
        (LocalEntryNotFoundError("offline"), "out of reach"),
        (OSError("disk full"), "disk full"),
        (ValueError("bad id"), "bad id"),
    ],
)
def test_failed_downloads_say_why(monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=expected) as caught:
        resolve_checkpoint("owner/name")
    assert "owner/name" in caught.value.message


def test_a_path_that_may_not_be_looked_at_is_named(monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> None:
    def forbidden(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", forbidden)
    with pytest.raises(CheckpointError, match=r"^/locked/model cannot be read: Permission denied"):
        resolve_checkpoint("/locked/model")
    assert not asked
