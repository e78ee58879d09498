"""Recordings become LeRobot datasets that LeRobot reads; needs LeRobot's environment, as test_lerobot_plugin.py."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lerobot_environment import lerobot_python, lerobot_variables

from robots.recorder import Recorder
from robots.robot import CameraFrame, Command, RobotState

pytestmark = pytest.mark.robot_peers

CLIENT = Path(__file__).with_name("lerobot_dataset_client.py")
STATE = ("eef_pos_x", "finger_1")
CONTRACT = {
    "control_rate_hz": 20.0,
    "action": {"names": ["x", "gripper"]},
    "cameras": [{"name": "front", "orientation": "bottom_up"}],
}


def picture(value: int) -> np.ndarray:
    """A test card, 8 x 10: its first row is red, its first column green, and `value` is the blue everywhere."""
    image = np.zeros((8, 10, 3), np.uint8)
    image[0, :, 0], image[:, 0, 1], image[:, :, 2] = 255, 255, value
    return image


def record(
    folder: Path, outcome: str, num_ticks: int, is_simulated: bool = True, scale: int = 1, **contract: Any
) -> None:
    recorder = Recorder(folder, STATE, action_dim=2)
    facts = {"instruction": f"until {outcome}", "robot": "Panda", "is_simulated": is_simulated}
    recorder.begin({**facts, "contract": {**CONTRACT, **contract}})
    for i in range(num_ticks):
        if i % 2 == 0:
            recorder.picture(
                "front", CameraFrame(image=picture(i).repeat(scale, 0).repeat(scale, 1), captured_s=0.0, index=i)
            )
        command = Command(position_m=np.array([0.1 * i, 0.0, 0.3]), rotation=np.eye(3), gripper=1.0)
        state = RobotState(
            time_s=0.0,
            received_s=0.0,
            position_m=np.zeros(3),
            rotation=np.eye(3),
            named={"eef_pos_x": 0.2 * i, "finger_1": 0.04},
        )
        is_hold = i == 1
        recorder.tick(0.05 * i, None if is_hold else np.array([i, -1.0]), None if is_hold else command, state)
    recorder.finish({"outcome": outcome})


def convert(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    python = lerobot_python()
    return subprocess.run(
        [python, "-m", "lerobot_robot_vla_rl.convert", str(folder / "recordings"), str(folder / "out"), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=lerobot_variables(python, folder),
    )


def read(folder: Path) -> dict[str, Any]:
    python = lerobot_python()
    done = subprocess.run(
        [python, str(CLIENT), str(folder / "out"), "local/out", "front"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=lerobot_variables(python, folder),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


def test_lerobot_reads_what_was_recorded(tmp_path: Path) -> None:
    record(tmp_path / "recordings", "success", 4)
    record(tmp_path / "recordings", "failure", 3)
    done = convert(tmp_path, "--no-videos")
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert (counts["episodes"], counts["frames"], counts["frames_left_out"]) == (2, 5, 2)
    found = read(tmp_path)
    assert (found["fps"], found["episodes"], found["robot"], found["names"]) == (20, 2, "Panda", ["x", "gripper"])
    assert found["action"] == [[0.0, -1.0], [2.0, -1.0], [3.0, -1.0], [0.0, -1.0], [2.0, -1.0]]
    np.testing.assert_allclose(np.array(found["action.sent"])[:, 0], [0.0, 0.2, 0.3, 0.0, 0.2], atol=1e-6)
    np.testing.assert_allclose(np.array(found["action.sent"])[0], [0, 0, 0.3, 0, 0, 0, 1], atol=1e-6)
    np.testing.assert_allclose(np.array(found["observation.state"])[:, 0], [0.0, 0.4, 0.6, 0.0, 0.4], atol=1e-6)
    assert np.array(found["episode_index"]).tolist() == [0, 0, 0, 1, 1]
    assert np.array(found["next.success"]).ravel().tolist() == [False, False, True, False, False]
    assert found["tasks"] == ["until success"] * 3 + ["until failure"] * 2
    assert found["has_stats"]
    corners = np.array(found["corners"])  # frames, channels, 2, 2
    np.testing.assert_array_equal(corners[:, 2, 0, 0], [0, 2, 2, 0, 2])  # the newest picture at that moment
    # The simulator's first row is the bottom one, so red is below now; left stays left.
    np.testing.assert_array_equal(corners[0, 0], [[0, 0], [255, 255]])
    np.testing.assert_array_equal(corners[0, 1], [[255, 0], [255, 0]])


def test_only_some_outcomes_and_the_pictures_of_real_cameras(tmp_path: Path) -> None:
    record(tmp_path / "recordings", "failure", 3)
    record(tmp_path / "recordings", "success", 3, is_simulated=False)
    done = convert(tmp_path, "--no-videos", "--outcome", "success")
    assert json.loads(done.stdout.splitlines()[-1])["episodes_left_out"] == 1, done.stderr[-2000:]
    found = read(tmp_path)
    assert found["tasks"] == ["until success"] * 2
    np.testing.assert_array_equal(np.array(found["corners"])[0, 0], [[255, 255], [0, 0]])


def test_videos_are_written(tmp_path: Path) -> None:
    record(tmp_path / "recordings", "success", 6, scale=16)  # the encoder needs more than a few pixels
    done = convert(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (video,) = (tmp_path / "out" / "videos").rglob("*.mp4")
    assert video.stat().st_size > 0
    assert "observation.images.front" in json.loads((tmp_path / "out" / "meta" / "info.json").read_text())["features"]


def test_what_cannot_be_converted_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    record(tmp_path / "recordings", "failure", 3)
    assert "'failure': 1" in convert(tmp_path, "--outcome", "success").stderr
    record(tmp_path / "recordings", "failure", 3, control_rate_hz=10.0)
    assert "episode_000001 differs from episode_000000" in convert(tmp_path, "--no-videos").stderr
    assert sorted(path.name for path in tmp_path.glob("*out*")) == []
