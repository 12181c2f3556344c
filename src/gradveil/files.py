"""Tensors in files: replaced as a whole, and nobody's but their owner's."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from .core import Tensors
from .errors import StateError


def write_tensors(path: str | Path, tensors: Tensors, about: Mapping[str, str] | None = None) -> None:
    """Write tensors to a file that only its owner can read; it is on the disk before this returns.

    A kill at any moment, or a full disk, leaves the old file or the new one. Raises `StateError` where it cannot write.
    """
    path = Path(path)
    # A folder, because safetensors writes under a name it makes up: a kill must not leave such files behind for good.
    room = path.with_name(path.name + ".new")
    scratch = room / path.name
    try:
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir(mode=0o700)
        own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(own, scratch, None if about is None else dict(about))
        scratch.chmod(0o600)
        _sync(scratch)
        scratch.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise StateError(f"cannot write {path}: {error}") from error
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _sync(path: Path) -> None:
    if os.name != "posix" and path.is_dir():
        return  # Windows opens no folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
