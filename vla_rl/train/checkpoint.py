"""Checkpoints: folders that explain themselves, appear whole or not at all, and are checked before they are used.

    <run>/checkpoints/iteration_000123/
        policy/          what `Policy.save` wrote: enough to evaluate, serve or run a robot
        trainer/         state.json (counters, random states), state.pt (tensors), groups.npz (carried-over groups)
        manifest.json    size and SHA-256 of every file; written last

A checkpoint is written under a hidden temporary name, flushed to the disk, and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError

from vla_rl.rollout.episode_files import load_groups, save_groups
from vla_rl.types import Episode

_MANIFEST = "manifest.json"
_NAME = re.compile(r"iteration_(\d{6,})")


@runtime_checkable
class Savable(Protocol):
    """The part of a `Policy` that a checkpoint needs."""

    def save(self, folder: Path) -> None:
        """Write a folder that is enough to evaluate, serve or run a robot."""


def save_checkpoint(
    run_folder: Path,
    iteration: int,
    policy: Savable,
    state: Mapping[str, Any],
    groups: Sequence[Sequence[Episode]] = (),
    keep_last: int | None = None,
) -> Path:
    """Write `checkpoints/iteration_<iteration>`; an older one of the same number is replaced.

    Args:
        run_folder: The run's folder.
        iteration: Iterations (or updates) done.
        policy: Saved in `policy/`.
        state: What the trainer needs to continue bit for bit: numbers, text, lists, dicts and tensors.
        groups: Carried-over groups of episodes.
        keep_last: Remove all but this many newest checkpoints afterwards; None keeps all.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: It could not be written (full disk, permissions). Nothing is left behind, earlier ones are intact.
        ValueError: `keep_last` is less than 1.
    """
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; expected at least 1, or null to keep all checkpoints.")
    root = run_folder / "checkpoints"
    final = root / f"iteration_{iteration:06d}"
    temporary = root / f".{final.name}.tmp"
    try:
        _remove(temporary)
        _write(temporary, policy, state, groups)
        _publish(temporary, final)
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch and safetensors wrap a full disk in errors of their own.
        raise OSError(getattr(error, "errno", None) or 0, _cannot_write(final, error)) from error
    finally:
        _remove(temporary)
    if keep_last is not None:
        for old in _complete_checkpoints(run_folder)[:-keep_last]:
            _remove(old)
    return final


def latest_checkpoint(run_folder: Path) -> Path | None:
    """The newest complete checkpoint of a run; None if there is none."""
    return next(reversed(_complete_checkpoints(run_folder)), None)


def resolve_checkpoint(path: Path) -> Path:
    """The policy folder that a user means: a run's newest checkpoint, a checkpoint, or a policy folder itself.

    Raises:
        ValueError: There is none, or the checkpoint is damaged.
    """
    if (path / "config.json").is_file():
        return path
    checkpoint = latest_checkpoint(path) if (path / "checkpoints").is_dir() else path
    if checkpoint is None or not checkpoint.is_dir():
        raise ValueError(
            f"'{path}' holds no checkpoint; expected a run folder such as 'runs/name', a checkpoint such as "
            "'runs/name/checkpoints/iteration_000100', or a policy folder"
        )
    verify_checkpoint(checkpoint)
    return checkpoint / "policy"


def load_trainer_state(checkpoint: Path) -> dict[str, Any]:
    """The `state` of `save_checkpoint`; tensors are on the CPU.

    Raises:
        ValueError: A file is missing or damaged.
    """
    verify_checkpoint(checkpoint)
    try:
        plain = json.loads((checkpoint / "trainer" / "state.json").read_text(encoding="utf-8"))
        tensors = torch.load(checkpoint / "trainer" / "state.pt", map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read the trainer's state in '{checkpoint}': {error}") from error
    return {**plain, **tensors}


def load_carried_groups(checkpoint: Path) -> list[list[Episode]]:
    """The `groups` of `save_checkpoint`.

    Raises:
        FileNotFoundError: The checkpoint has no such file.
        ValueError: The file is damaged.
    """
    return load_groups(checkpoint / "trainer" / "groups.npz")


def verify_checkpoint(checkpoint: Path) -> None:
    """Compare every file with the manifest.

    Raises:
        ValueError: Not a complete checkpoint, or a file is missing, truncated or changed; names it.
    """
    try:
        manifest = json.loads((checkpoint / _MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{checkpoint}' is not a complete checkpoint (manifest.json: {error}); expected a folder like "
            "'runs/name/checkpoints/iteration_000100'."
        ) from error
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            problem = "is missing"
        elif path.stat().st_size != expected["num_bytes"]:
            problem = f"has {path.stat().st_size} bytes instead of {expected['num_bytes']}"
        elif _sha256(path) != expected["sha256"]:
            problem = "has changed (its SHA-256 differs from the manifest)"
        else:
            continue
        raise ValueError(
            f"checkpoint file '{path}' {problem}: the copy is damaged. Copy the checkpoint again, or delete "
            f"'{checkpoint}' and resume from the one before."
        )


def _complete_checkpoints(run_folder: Path) -> list[Path]:
    """Oldest first."""
    found = {
        int(match.group(1)): path
        for path in (run_folder / "checkpoints").glob("iteration_*")
        if (match := _NAME.fullmatch(path.name)) and (path / _MANIFEST).is_file()
    }
    return [found[iteration] for iteration in sorted(found)]


def _write(folder: Path, policy: Savable, state: Mapping[str, Any], groups: Sequence[Sequence[Episode]]) -> None:
    trainer = folder / "trainer"
    trainer.mkdir(parents=True)
    policy.save(folder / "policy")
    plain = {name: value for name, value in state.items() if _is_json(value)}
    (trainer / "state.json").write_text(json.dumps(plain, indent=2), encoding="utf-8")
    torch.save({name: value for name, value in state.items() if name not in plain}, trainer / "state.pt")
    save_groups(trainer / "groups.npz", groups)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        path.relative_to(folder).as_posix(): {"num_bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }
    (folder / _MANIFEST).write_text(json.dumps({"format": 1, "files": manifest}, indent=2), encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        _fsync(path)


def _is_json(value: object) -> bool:
    """Whether a value survives JSON unchanged (no tensors, tuples or integer keys)."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)


def _publish(temporary: Path, final: Path) -> None:
    """Give a finished folder its name; an older one of that name goes."""
    replaced = final.with_name(f".{final.name}.old")
    _remove(replaced)
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    _fsync(final.parent)
    _remove(replaced)


def _remove(folder: Path) -> None:
    """Delete a folder such that it never looks complete while it goes."""
    (folder / _MANIFEST).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cannot_write(final: Path, error: Exception) -> str:
    parent = next(folder for folder in final.parents if folder.exists())
    free_gb = shutil.disk_usage(parent).free / 1e9
    return (
        f"cannot write checkpoint '{final}': {error}. {free_gb:.1f} GB are free there; free some space or keep fewer "
        "checkpoints. Nothing was left behind and earlier checkpoints are intact; resume from the newest."
    )
