"""Recordings of `vla-rl run-robot` as a LeRobot dataset (v3), written by LeRobot itself.

vla-rl-to-lerobot runs/robot OUT [--outcome success] [--no-videos]

One row per control period in which an action was carried out; holds, and periods that waited for the policy, are left
out and counted. Columns beside LeRobot's own (timestamp, frame_index, episode_index, task, ...):

    action                    what the policy asked for, in the contract's names and units
    action.sent               what the driver passed on: position (m), rotation vector (rad), gripper (-1 open .. 1)
    observation.state         what was measured, by the recording's names
    observation.images.NAME   the newest picture at that moment, first row on top
    next.reward, next.done, next.success    of the episode: 1 in the last row of a solved one
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from robots.recorder import RecordedEpisode, finished_episodes, load_episode
from robots.rotations import rotation_vector_from_matrix

_SENT_NAMES = ["ee.x", "ee.y", "ee.z", "ee.wx", "ee.wy", "ee.wz", "gripper"]


def convert(
    recordings: Path, out: Path, repo_id: str, outcomes: Sequence[str] = (), use_videos: bool = True
) -> Mapping[str, int]:
    """Write a dataset; it appears whole or not at all.

    Args:
        recordings: Folder of `robots.recorder.Recorder`.
        out: The dataset's folder, which must not exist.
        repo_id: Name that LeRobot knows the dataset by; nothing is uploaded.
        outcomes: Only episodes that ended so, e.g. "success"; empty: all.
        use_videos: Pictures in MP4 files (compressed, with loss); else as PNG inside the tables.

    Returns:
        Counts: episodes, frames, frames_left_out, episodes_left_out.

    Raises:
        ValueError: No episodes, or they differ in what they recorded; names them.
        FileExistsError: `out` exists.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another folder or remove it")
    folders = finished_episodes(recordings)
    chosen = [folder for folder in folders if not outcomes or load_episode(folder).info.get("outcome") in outcomes]
    if not chosen:
        found = Counter(str(load_episode(folder).info.get("outcome")) for folder in folders)
        raise ValueError(f"{recordings} has no episode to convert; finished ones by outcome: {dict(found)}")
    counts = Counter(episodes_left_out=len(folders) - len(chosen))
    partial = out.with_name(f".{out.name}.partial")
    if partial.exists():
        raise FileExistsError(f"{partial} exists: another conversion is running, or one was stopped; then remove it")
    layout = _layout(load_episode(chosen[0]))
    for folder in chosen:
        if (found_layout := _layout(load_episode(folder))) != layout:
            raise ValueError(f"{folder.name} differs from {chosen[0].name}: {found_layout} instead of {layout}")
    dataset = _create(load_episode(chosen[0]), partial, repo_id, use_videos)
    for folder in chosen:
        episode = load_episode(folder)
        rows = np.flatnonzero(np.isfinite(episode.asked).all(axis=1) & np.isfinite(episode.sent_gripper))
        counts["frames_left_out"] += len(episode.time_s) - len(rows)
        if len(rows) == 0:
            counts["episodes_left_out"] += 1
            continue
        for frame in _frames(episode, rows):
            dataset.add_frame(frame)
        dataset.save_episode()
        counts.update(episodes=1, frames=len(rows))
    dataset.finalize()
    partial.rename(out)
    return {name: counts[name] for name in ("episodes", "frames", "frames_left_out", "episodes_left_out")}


def _layout(episode: RecordedEpisode) -> dict[str, Any]:
    """What the episodes of one dataset must have in common."""
    contract = episode.info["contract"]
    return {
        "rate_hz": contract["control_rate_hz"],
        "actions": list(contract["action"]["names"]),
        "state": list(episode.info["state_names"]),
        "images": {name: list(images.shape[1:]) for name, images in sorted(episode.images.items())},
    }


def _create(episode: RecordedEpisode, root: Path, repo_id: str, use_videos: bool) -> Any:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset  # seconds of imports: --help should not wait

    layout = _layout(episode)
    fps = round(layout["rate_hz"])
    if fps != layout["rate_hz"]:
        raise ValueError(f"LeRobot's datasets have whole frames per second, the recording {layout['rate_hz']:g}")
    features: dict[str, dict[str, Any]] = {
        "action": {"dtype": "float32", "shape": (len(layout["actions"]),), "names": layout["actions"]},
        "action.sent": {"dtype": "float32", "shape": (len(_SENT_NAMES),), "names": _SENT_NAMES},
        "observation.state": {"dtype": "float32", "shape": (len(layout["state"]),), "names": layout["state"]},
        "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    }
    for name, shape in layout["images"].items():
        features[f"observation.images.{name}"] = {
            "dtype": "video" if use_videos else "image",
            "shape": tuple(shape),
            "names": ["height", "width", "channels"],
        }
    robot = str(episode.info.get("robot", "unknown"))
    return LeRobotDataset.create(repo_id, fps, features, root=root, robot_type=robot, use_videos=use_videos)


def _frames(episode: RecordedEpisode, rows: np.ndarray) -> Iterator[dict[str, Any]]:
    is_success = episode.info.get("outcome") == "success"
    bottom_up = {
        camera["name"]
        for camera in episode.info["contract"]["cameras"]
        if episode.info["is_simulated"] and camera["orientation"] == "bottom_up"
    }
    for row in rows:
        is_last = row == rows[-1]
        sent = (*episode.sent_position_m[row], *rotation_vector_from_matrix(episode.sent_rotation[row]))
        frame = {
            "action": episode.asked[row].astype(np.float32),
            "action.sent": np.array([*sent, episode.sent_gripper[row]], dtype=np.float32),
            "observation.state": episode.measured[row].astype(np.float32),
            "next.reward": np.array([is_success and is_last], dtype=np.float32),
            "next.done": np.array([is_last]),
            "next.success": np.array([is_success and is_last]),
            "task": episode.info["instruction"],
        }
        for name, images in episode.images.items():
            newest = np.searchsorted(episode.image_ticks[name], row, side="right") - 1
            image = images[max(newest, 0)]
            frame[f"observation.images.{name}"] = np.ascontiguousarray(image[::-1] if name in bottom_up else image)
        yield frame


def main() -> None:
    """The command; prints one line of JSON."""
    parser = argparse.ArgumentParser(prog="vla-rl-to-lerobot", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recordings", type=Path, help="folder that run-robot recorded into")
    parser.add_argument("out", type=Path, help="folder of the dataset; must not exist")
    parser.add_argument("--repo-id", help="name in LeRobot; default: local/ and the folder's name")
    parser.add_argument("--outcome", action="append", default=[], help="only episodes that ended so; can be repeated")
    parser.add_argument("--no-videos", action="store_true", help="pictures as PNG in the tables, without loss")
    options = parser.parse_args()
    try:
        counts = convert(
            options.recordings,
            options.out,
            options.repo_id or f"local/{options.out.name}",
            options.outcome,
            use_videos=not options.no_videos,
        )
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps({"dataset": str(options.out), **counts}))


if __name__ == "__main__":
    main()
