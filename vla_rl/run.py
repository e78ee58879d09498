"""What belongs to a run as a whole: its folder, a record of the software that made it, and its random streams."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_PACKAGES = ("vla-rl", "torch", "mujoco", "robosuite", "numpy", "numba", "pydantic", "safetensors")


def seed_sequence(run_seed: int, *keys: int | str) -> np.random.SeedSequence:
    """The random stream for one purpose: equal arguments give equal streams, different ones independent streams.

    Args:
        run_seed: Seed of the run, not negative.
        keys: What the stream is for, e.g. ("episode", 17). Strings are hashed with SHA-256, so streams do not change
            between processes or Python versions. Integers must not be negative.
    """
    words: list[int] = []
    for key in keys:
        if isinstance(key, str):
            # The leading 1 and 0 keep a string apart from every integer.
            words += [1, int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")]
        else:
            words += [0, int(key)]
    return np.random.SeedSequence(entropy=run_seed, spawn_key=tuple(words))


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps everything: config, versions, metrics, checkpoints, reports, videos."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The effective configuration."""
        return self.path / "config.yaml"


def open_run(folder: Path, config_yaml: str, resume: bool = False) -> RunFolder:
    """Create or reopen a run folder; record config (`config.yaml`) and software (`versions.json`, `code.diff`).

    A resumed run keeps the earlier records under numbered names (`config.1.yaml`, ...) where they differ.

    Args:
        folder: E.g. "runs/name".
        config_yaml: The effective configuration as text.
        resume: Continue a run that is there. If false, the folder must be missing or empty.

    Raises:
        FileExistsError: There is a run already.
        FileNotFoundError: There is no run to resume.
        OSError: The folder cannot be written (permissions, full disk).
    """
    if resume and not RunFolder(folder).config_file.exists():
        raise FileNotFoundError(f"there is no run to resume in '{folder}' (no config.yaml); check the name.")
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"run folder '{folder}' is not empty; choose another name or continue it with --resume.")
    versions, diff = _versions()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _record(RunFolder(folder).config_file, config_yaml)
        _record(folder / "versions.json", json.dumps(versions, indent=2) + "\n")
        if diff:
            _record(folder / "code.diff", diff)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write run folder '{folder}': {error.strerror}; free space on the disk or choose another folder",
        ) from error
    return RunFolder(folder)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name in the file's folder (made if needed); the file gets its name if the block ends without error.

    The temporary keeps the suffix, for writers that choose their format by it. Nothing is left behind after an error.

    Raises:
        OSError: The file cannot be written (full disk, permissions); names it.
    """
    temporary = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except OSError as error:
        message = f"cannot write '{path}': {error.strerror or error}; free some space or choose another folder"
        raise OSError(error.errno or 0, message) from error
    finally:
        temporary.unlink(missing_ok=True)


def _record(path: Path, text: str) -> None:
    """Write text; an earlier text that differs is kept as `name.N.suffix`."""
    if path.exists():
        if path.read_text(encoding="utf-8") == text:
            return
        number = 1
        while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(kept)
    path.write_text(text, encoding="utf-8")


def flat_versions() -> dict[str, str]:
    """Software versions and the commit as one mapping of name to version, for reports."""
    versions, diff = _versions()
    flat = {name: version for name, version in versions["packages"].items() if version is not None}
    commit = str(versions["git_commit"] or "unknown") + ("+changes" if diff else "")
    return {"python": versions["python"], **flat, "commit": commit}


def _versions() -> tuple[dict[str, Any], str]:
    """The software and machine, and the uncommitted changes of the checkout that the code runs from."""
    packages: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = None
    commit = _git("rev-parse", "HEAD")
    diff = _git("diff", "HEAD") if commit else None
    versions = {
        "python": platform.python_version(),
        "packages": packages,
        "git_commit": commit,
        "has_uncommitted_changes": bool(diff),
        "platform": platform.platform(),
        "num_cpu_cores": os.cpu_count(),
    }
    return versions, diff or ""


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of the source code; None if that is no checkout or git is not installed."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=30,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
