"""Demonstration files in LIBERO's published HDF5 layout, one file per task.

data/                      attrs: problem_info (JSON with language_instruction), num_demos, total, env_args
  demo_0/                  attrs: num_samples, instruction (ours: the paraphrase of this demonstration)
    actions (T, 7)         float64, the suite's units
    rewards, dones (T,)    1 at the last step
    obs/agentview_rgb, obs/eye_in_hand_rgb (T, H, W, 3) uint8, bottom-up rows as LIBERO's
    obs/ee_pos, ee_ori (T, 3), ee_states (T, 6), gripper_states (T, 2)

LIBERO's own files also hold simulator states, robot states and joint positions; nothing here reads or writes those.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from vla_rl.data.demos import Demonstration

_DATASET_OF_CAMERA = {"agentview": "agentview_rgb", "robot0_eye_in_hand": "eye_in_hand_rgb"}


def write_demonstrations(path: Path, demonstrations: Sequence[Demonstration], cameras: Sequence[str]) -> None:
    """Write the demonstrations of one task; the file appears whole or not at all.

    Raises:
        ValueError: No demonstrations, or of several tasks.
        OSError: The disk is full, or the folder cannot be written.
    """
    tasks = {demo.task for demo in demonstrations}
    if len(tasks) != 1:
        raise ValueError(f"a demonstration file holds one task, got {sorted(tasks)}")
    content = _file_content(tasks.pop(), demonstrations, cameras)
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            error.errno, f"cannot write {path}: {error.strerror}; free space on the disk or choose another folder"
        ) from error


def _file_content(task: str, demonstrations: Sequence[Demonstration], cameras: Sequence[str]) -> bytes:
    """The file, put together in memory: the HDF5 library cannot close a file cleanly once a write to it has failed."""
    with h5py.File(task, "w", driver="core", backing_store=False) as file:
        data = file.create_group("data")
        problem = {"problem_name": task, "language_instruction": demonstrations[0].instruction}
        data.attrs["problem_info"] = json.dumps(problem)
        data.attrs["env_args"] = json.dumps({"type": 1, "env_name": task, "env_kwargs": {}})
        data.attrs["num_demos"] = len(demonstrations)
        data.attrs["total"] = sum(demo.num_steps for demo in demonstrations)
        for i, demo in enumerate(demonstrations):
            _write_one(data.create_group(f"demo_{i}"), demo, cameras)
        file.flush()
        content: bytes = file.id.get_file_image()
        return content


def _write_one(group: h5py.Group, demo: Demonstration, cameras: Sequence[str]) -> None:
    group.attrs["num_samples"] = demo.num_steps
    group.attrs["instruction"] = demo.instruction
    last = np.zeros(demo.num_steps, dtype=np.uint8)
    last[-1] = 1
    group["actions"], group["rewards"], group["dones"] = demo.actions, last, last
    obs = group.create_group("obs")
    for c, camera in enumerate(cameras):
        obs.create_dataset(_dataset_of(camera), data=demo.images[:, c], compression="lzf")
    proprio = demo.proprio.astype(np.float64)
    obs["ee_pos"], obs["ee_ori"], obs["ee_states"] = proprio[:, :3], proprio[:, 3:6], proprio[:, :6]
    obs["gripper_states"] = proprio[:, 6:8]


def read_demonstrations(path: Path, cameras: Sequence[str]) -> list[Demonstration]:
    """Read a file of this layout, ours or LIBERO's.

    Raises:
        ValueError: No such file, another kind of file, damaged, or a camera is missing.
    """
    try:
        with h5py.File(path, "r") as file:
            data = file["data"]
            problem = json.loads(data.attrs["problem_info"])
            instruction = problem["language_instruction"]
            instruction = instruction if isinstance(instruction, str) else "".join(instruction)
            names = sorted(data, key=lambda name: int(name.removeprefix("demo_")))
            return [_read_one(data[name], problem["problem_name"], instruction.strip('"'), cameras) for name in names]
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:  # what h5py makes of damaged files
        raise ValueError(f"cannot read {path} as demonstrations in LIBERO's layout: {error}") from error


def _read_one(group: h5py.Group, task: str, instruction: str, cameras: Sequence[str]) -> Demonstration:
    obs = group["obs"]
    missing = [camera for camera in cameras if _dataset_of(camera) not in obs]
    if missing:
        raise ValueError(
            f"no images of {', '.join(missing)}, only {', '.join(sorted(obs))}; "
            "set suite.cameras to what was recorded, or record again: vla-rl demos"
        )
    proprio = np.concatenate([obs["ee_pos"], obs["ee_ori"], obs["gripper_states"]], axis=1)
    return Demonstration(
        task=task,
        instruction=str(group.attrs.get("instruction", instruction)),
        images=np.stack([obs[_dataset_of(camera)][()] for camera in cameras], axis=1),
        proprio=proprio.astype(np.float32),
        actions=group["actions"][()].astype(np.float64),
    )


def read_folder(folder: Path, cameras: Sequence[str]) -> list[Demonstration]:
    """All demonstration files (*.hdf5) of a folder, in name order.

    Raises:
        ValueError: There are none.
    """
    paths = sorted(folder.glob("*.hdf5"))
    if not paths:
        raise ValueError(f"{folder} holds no demonstrations (*.hdf5); collect some first: vla-rl demos")
    return [demo for path in paths for demo in read_demonstrations(path, cameras)]


def _dataset_of(camera: str) -> str:
    return _DATASET_OF_CAMERA.get(camera, f"{camera}_rgb")
