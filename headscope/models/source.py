"""Where a model comes from: a directory, a GGUF file, or the Hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported at run time only

from headscope.errors import ModelError, check_type
from headscope.models import packaged

REACH_SECONDS = 5.0


@dataclass(frozen=True)
class Source:
    """What `from_pretrained` is given: `path` (a directory or a hub id), and how."""

    path: str
    local: bool
    gguf_file: str | None = None
    revision: str | None = None
    files_only: bool = True

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that every `from_pretrained` shares. Nothing local ever asks the network."""
        arguments: dict[str, Any] = {"local_files_only": self.files_only}
        if self.revision is not None and not self.local:
            arguments["revision"] = self.revision
        if self.gguf_file is not None:
            arguments["gguf_file"] = self.gguf_file
        return arguments


def find_source(name: str, revision: str | None = None) -> Source:
    """Tell a directory, a `.gguf` file and a hub id apart; of a hub id, find out quickly whether it can be had.

    Raises:
        ModelError: No such directory or file, not a possible hub id, unknown to the Hub, or the Hub is out of reach
            and its cache has nothing under this name.
    """
    if not name.strip():
        raise ModelError("the model's name is empty", "give a hub id, a directory or a .gguf file")
    # These know no error: of a user that does not exist, of a name that is too long.
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return _directory(name, path)
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{name} is a file, not a model directory", "name the directory, or a .gguf file")
        return Source(str(path.parent), local=True, gguf_file=path.name)
    if name.lower().endswith(".gguf") and name.count("/") == 2 and not name.startswith((".", "/", "~")):
        repository, file = name.rsplit("/", 1)
        return _hub(name, repository, revision, gguf_file=file)
    if name.lower().endswith(".gguf"):
        raise ModelError(f"no such file: {name}", "check the path; a file on the Hub is OWNER/NAME/FILE.gguf")
    if not _can_be_hub_id(name):
        raise ModelError(f"no model at {name}: neither a directory, nor a .gguf file, nor a possible hub id",
                         "check the path")  # fmt: skip
    return _hub(name, name, revision)


def resolve(name: str | PathLike[str] | None, revision: str | None, *, weights: bool = True) -> tuple[str, Source]:
    """The name to show and the source to load; with `weights`, packaged ones are checked on the way.

    Raises:
        ModelError: As `find_source`, or the packaged weights are not the published ones.
    """
    named = os.fspath(name) if isinstance(name, os.PathLike) else name
    check_type("model", named, str, "a hub id, a path or a transformers model")
    directory = packaged.packaged_directory()
    wanted = packaged.default_model_name() if name is None else os.fspath(name)
    if directory is not None and (wanted == packaged.SHORT_NAME or Path(wanted) == directory):
        if wanted == packaged.SHORT_NAME and Path(wanted).is_dir():
            return wanted, find_source(wanted, revision)
        if weights:
            packaged.check_packaged_weights(directory)
        return (packaged.SHORT_NAME if name is None else wanted), Source(str(directory), local=True)
    return wanted, find_source(wanted, revision)


def _directory(name: str, path: Path) -> Source:
    if (path / "config.json").is_file():
        return Source(str(path), local=True)
    files = sorted(file.name for file in path.glob("*.gguf"))
    if len(files) == 1:
        return Source(str(path), local=True, gguf_file=files[0])
    if files:
        raise ModelError(f"{name} holds {len(files)} GGUF files", f"name one of them, for example {path / files[0]}")
    raise ModelError(
        f"{name} is not a model directory: it has no config.json", "name the directory that holds config.json"
    )


def _can_be_hub_id(name: str) -> bool:
    if name.startswith((".", "/", "~")) or "\\" in name:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _hub(name: str, repository: str, revision: str | None, gguf_file: str | None = None) -> Source:
    """Ask the Hub once, without retries: loading itself would retry for half a minute without a network."""
    offline = Source(repository, local=False, gguf_file=gguf_file, revision=revision)
    if constants.HF_HUB_OFFLINE:
        return offline
    try:
        HfApi().model_info(repository, revision=revision, timeout=REACH_SECONDS)
    except RevisionNotFoundError as error:
        raise ModelError(f"{name} has no revision {revision!r} on the Hub", "check --revision") from error
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated on the Hub", "ask for access on its page, then log in with: hf auth login"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"no model {name}: neither a directory here nor on the Hub (or it is private)",
            "check the spelling; for a private model log in with: hf auth login",
        ) from error
    except Exception:
        # The HTTP library has error classes of its own; whichever it is, the cache may still have the model.
        return offline
    return Source(repository, local=False, gguf_file=gguf_file, revision=revision, files_only=False)
