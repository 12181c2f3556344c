"""Files from the network: fetched to a temporary name, checked, and moved into place only when right."""

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.request
from pathlib import Path

from ..errors import ConfigError

TIMEOUT_S = 30


def cache_folder() -> Path:
    """Return the folder downloads go to: `$GRADVEIL_DATA`, else `~/.cache/gradveil`."""
    chosen = os.environ.get("GRADVEIL_DATA")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "gradveil"


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(url: str, target: Path, checksum: str) -> None:
    """Put the file at `url` at `target` if the start of its SHA-256 is `checksum`; else leave nothing behind.

    Nothing is fetched where the environment variable `GRADVEIL_OFFLINE` is set.
    """
    if os.environ.get("GRADVEIL_OFFLINE"):
        raise OSError("GRADVEIL_OFFLINE is set")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            shutil.copyfileobj(answer, file)
        if not (found := sha256(partial)).startswith(checksum):
            raise ConfigError(f"{url} has SHA-256 {found}, expected {checksum}: the download was damaged or replaced")
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def download_folder(url: str, root: Path, folder: str, checksum: str) -> Path:
    """Download a tar archive and put its top folder `folder` under `root`, whole or not at all."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=f".{folder}.") as scratch:
        archive = Path(scratch) / "archive"
        download(url, archive, checksum)
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        unpacked = Path(scratch) / folder
        if not unpacked.is_dir():
            raise ConfigError(f"{url} holds no folder {folder}")
        try:
            os.replace(unpacked, root / folder)
        except OSError:
            if not (root / folder).is_dir():  # another process put it there first: that one is as good
                raise
    return root / folder
