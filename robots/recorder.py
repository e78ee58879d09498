"""Records episodes on the disk: what was asked, what was sent, what was measured, what was seen, and every event.

    <folder>/episode_000003/
        episode.json    instruction, outcome, times, contract
        ticks.npz       one row per control period: see `Episode`
        events.jsonl    one line per event
        images_<camera>.u8     every new picture that was looked at, raw RGB one after the other, size in episode.json
        images_<camera>.i64    the control period that each belongs to

An episode is written under a hidden name, flushed to the disk and renamed when it is finished: whatever kills the
process, finished episodes are whole, and what had arrived of the running one lies in `.episode_000003.part`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64, UInt8

from robots.robot import CameraFrame, Command, RobotState

_COLUMNS = ("time_s", "asked", "sent_position_m", "sent_rotation", "sent_gripper", "is_sent", "measured")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something worth knowing later.

    Attributes:
        time_s: `time.monotonic()`.
        tick: Control period.
        kind: Short name, e.g. "clipped_workspace".
        severity: "info", "clamped", "hold" or "fault".
        detail: For people.
    """

    time_s: float
    tick: int
    kind: str
    severity: str
    detail: str


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedEpisode:
    """A finished episode, T control periods.

    Attributes:
        info: Instruction, outcome, contract, and the names of the columns of `measured`.
        time_s: Of each control period.
        asked: The policy's actions; NaN where there was none.
        sent_position_m: What the driver reported as sent; NaN where nothing was.
        sent_rotation: As a matrix.
        sent_gripper: -1 (open) to +1 (closed).
        measured: State entries by `info["state_names"]`.
        images: Per camera: the pictures, mapped from the disk. Real cameras are looked at in every control period,
            the simulator's, which draw on demand, at decisions.
        image_ticks: Per camera: the control period of each picture.
        events: In order.
    """

    info: Mapping[str, Any]
    time_s: Float64[np.ndarray, " ticks"]
    asked: Float64[np.ndarray, "ticks action_dim"]
    sent_position_m: Float64[np.ndarray, "ticks 3"]
    sent_rotation: Float64[np.ndarray, "ticks 3 3"]
    sent_gripper: Float64[np.ndarray, " ticks"]
    measured: Float64[np.ndarray, "ticks state_dim"]
    images: Mapping[str, UInt8[np.ndarray, "pictures height width 3"]]
    image_ticks: Mapping[str, Int64[np.ndarray, " pictures"]]
    events: Sequence[Event]


class Recorder:
    """Writes one episode after the other into a folder. Everything that arrives is on the disk within the same tick."""

    def __init__(self, folder: Path, state_names: Sequence[str], action_dim: int) -> None:
        """Use a folder.

        Args:
            folder: Made if it is missing; finished episodes in it stay.
            state_names: Entries of the recorded state.
            action_dim: Of the policy's actions.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".episode_*.part"):
            (leftover / "interrupted").touch()  # of a process that was killed; kept for people to look at
        self._folder = folder
        self._state_names = tuple(state_names)
        self._action_dim = action_dim
        self._part: Path | None = None
        self._ticks: list[tuple[Any, ...]] = []
        self._pictures: dict[str, _PictureStream] = {}
        self._stream: Any = None

    def begin(self, info: Mapping[str, Any]) -> None:
        """Start an episode; one that is still open is finished as "abandoned"."""
        if self._part is not None:
            self.finish({"outcome": "abandoned"})
        numbers = [int(path.name.split("_")[1].split(".")[0]) for path in self._folder.glob("*episode_*")]
        self._name = f"episode_{max(numbers, default=-1) + 1:06d}"
        self._part = self._folder / f".{self._name}.part"
        self._part.mkdir()
        self._info = dict(info) | {"state_names": list(self._state_names), "image_sizes": {}}
        (self._part / "episode.json").write_text(json.dumps(self._info, indent=2))
        self._stream = (self._part / "ticks.jsonl").open("a", buffering=1)
        self._events = (self._part / "events.jsonl").open("a", buffering=1)
        self._ticks, self._pictures = [], {}

    def tick(self, time_s: float, asked: np.ndarray | None, sent: Command | None, state: RobotState) -> None:
        """One control period."""
        nan = np.full(3, np.nan)
        row = (
            time_s,
            np.full(self._action_dim, np.nan) if asked is None else np.asarray(asked, dtype=np.float64),
            nan if sent is None else sent.position_m,
            np.full((3, 3), np.nan) if sent is None else sent.rotation,
            np.nan if sent is None else sent.gripper,
            sent is not None,
            np.array([state.named.get(name, np.nan) for name in self._state_names]),
        )
        self._ticks.append(row)
        self._stream.write(json.dumps([np.asarray(value).tolist() for value in row]) + "\n")

    def picture(self, camera: str, frame: CameraFrame) -> None:
        """A picture that was looked at; one that was recorded already is not again.

        Raises:
            ValueError: The camera's pictures have changed their size within an episode.
        """
        assert self._part is not None
        if camera not in self._pictures:
            self._pictures[camera] = _PictureStream(self._part / f"images_{camera}", frame.image.shape)
            self._info["image_sizes"][camera] = frame.image.shape[:2]
            (self._part / "episode.json").write_text(json.dumps(self._info, indent=2))
        self._pictures[camera].add(frame, len(self._ticks))

    def event(self, event: Event) -> None:
        """Something happened."""
        if self._part is not None:
            self._events.write(json.dumps(asdict(event)) + "\n")

    def finish(self, info: Mapping[str, Any]) -> Path | None:
        """End the episode and give it its name; does nothing if none is open.

        Args:
            info: Outcome and whatever else is known at the end.

        Returns:
            The episode's folder.
        """
        if self._part is None:
            return None
        part, self._part = self._part, None
        self._close_streams()
        columns = zip(*self._ticks, strict=True) if self._ticks else [()] * len(_COLUMNS)
        arrays: dict[str, Any] = {name: np.array(column) for name, column in zip(_COLUMNS, columns, strict=True)}
        np.savez(part / "ticks.npz", **arrays)
        (part / "episode.json").write_text(json.dumps(self._info | dict(info), indent=2))
        (part / "ticks.jsonl").unlink()
        for path in (*part.iterdir(), part):
            _fsync(path)
        final = self._folder / self._name
        part.rename(final)
        _fsync(self._folder)
        return final

    def amend(self, info: Mapping[str, Any]) -> None:
        """Add to what is known about the last finished episode."""
        path = self._folder / self._name / "episode.json"
        changed = path.with_suffix(".tmp")
        changed.write_text(json.dumps(json.loads(path.read_text()) | dict(info), indent=2))
        _fsync(changed)
        changed.replace(path)

    def discard(self) -> None:
        """Forget the running episode."""
        if self._part is not None:
            self._close_streams()
            shutil.rmtree(self._part)
            self._part = None

    def _close_streams(self) -> None:
        for stream in (self._stream, self._events, *self._pictures.values()):
            stream.close()


class _PictureStream:
    """One camera's pictures of an episode, appended to two files as they come."""

    def __init__(self, stem: Path, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._pixels = stem.with_suffix(".u8").open("ab", buffering=0)
        self._ticks = stem.with_suffix(".i64").open("ab", buffering=0)
        self._newest: int | None = None

    def add(self, frame: CameraFrame, tick: int) -> None:
        if frame.image.shape != self._shape:
            raise ValueError(f"the pictures were {self._shape}, and now one is {frame.image.shape}")
        if frame.index != self._newest:
            self._newest = frame.index
            self._pixels.write(np.ascontiguousarray(frame.image).data)
            self._ticks.write(np.int64(tick).tobytes())

    def close(self) -> None:
        self._pixels.close()
        self._ticks.close()


def finished_episodes(folder: Path) -> list[Path]:
    """Folders of the finished episodes, oldest first."""
    return sorted(path for path in folder.glob("episode_*") if path.is_dir())


def load_episode(folder: Path) -> RecordedEpisode:
    """Read a finished episode.

    Raises:
        ValueError: The folder is none; names what is missing.
    """
    try:
        info = json.loads((folder / "episode.json").read_text())
        with np.load(folder / "ticks.npz", allow_pickle=False) as file:
            ticks = {name: file[name] for name in _COLUMNS}
        images, image_ticks = {}, {}
        for camera, size in info["image_sizes"].items():
            image_ticks[camera] = np.fromfile(folder / f"images_{camera}.i64", dtype=np.int64)
            shape = (len(image_ticks[camera]), *size, 3)
            images[camera] = np.memmap(folder / f"images_{camera}.u8", dtype=np.uint8, mode="r", shape=shape)
        lines = (folder / "events.jsonl").read_text().splitlines()
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} is no finished episode: {error}") from error
    ticks.pop("is_sent")
    num_ticks = len(ticks["time_s"])
    shapes = {"asked": (num_ticks, -1), "sent_position_m": (num_ticks, 3), "sent_rotation": (num_ticks, 3, 3)}
    if num_ticks == 0:
        shapes = {"asked": (0, 0), "sent_position_m": (0, 3), "sent_rotation": (0, 3, 3), "measured": (0, 0)}
    arrays = {name: values.reshape(shapes.get(name, values.shape)).astype(np.float64) for name, values in ticks.items()}
    events = [Event(**json.loads(line)) for line in lines]
    return RecordedEpisode(info=info, images=images, image_ticks=image_ticks, events=events, **arrays)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
