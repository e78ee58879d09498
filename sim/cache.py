"""Files that are expensive to make (compiled models, settled starts), kept on disk under names that say what they are.

A file's name is a digest of everything it depends on, so nothing has to be invalidated. Many processes may ask for the
same file at once: one makes it, the others wait. A file is written under a temporary name, checked by a digest of its
content when it is read, and made anew if that does not match.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vla_rl.run import atomic_path

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """The cache: `$VLA_RL_CACHE`, else `$XDG_CACHE_HOME/vla-rl`, else `~/.cache/vla-rl`. It may be deleted any time."""
    chosen = os.environ.get("VLA_RL_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vla-rl"


def digest(*parts: str | bytes) -> str:
    """Name of whatever depends on these parts: 32 hexadecimal digits (128 bits of SHA-256)."""
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little") + data)
    return sha.hexdigest()[:32]


def cached_file(kind: str, name: str, make: Callable[[Path], None]) -> Path:
    """The file `<cache>/<kind>/<name>`; makes it if it is missing or damaged.

    Args:
        kind: Subfolder.
        name: File name with its suffix; contains a digest of what the content depends on.
        make: Writes the file to the path that it is given (in the same folder, with the same suffix).

    Raises:
        OSError: The cache cannot be written; says how to choose another folder.
    """
    path = cache_folder() / kind / name
    checksum = path.with_name(path.name + ".sha256")
    if _is_intact(path, checksum):
        return path
    with _lock(path.with_name(path.name + ".lock")):
        if _is_intact(path, checksum):  # another process was faster
            return path
        if path.exists():
            _log.warning("the cached file %s is damaged; it is made anew", path)
        checksum.unlink(missing_ok=True)  # from here on the file counts as missing until its checksum is there again
        with atomic_path(path) as temporary:
            make(temporary)
        with atomic_path(checksum) as temporary:
            temporary.write_text(_file_digest(path), encoding="ascii")
    return path


def _is_intact(path: Path, checksum: Path) -> bool:
    try:
        return checksum.read_text(encoding="ascii") == _file_digest(path)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, so that a killed one blocks nobody."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise OSError(
            f"the cache folder {path.parent} cannot be written ({error}); set VLA_RL_CACHE to another"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
