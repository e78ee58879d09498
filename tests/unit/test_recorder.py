"""The recorder: every finished episode loads, whenever the process dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from robots.recorder import Event, Recorder, finished_episodes, load_episode
from robots.robot import CameraFrame, Command, RobotState

NAMES = ("eef_pos_x", "finger_1")


def state(value: float) -> RobotState:
    return RobotState(
        time_s=value,
        received_s=value,
        position_m=np.array([value, 0.0, 0.0]),
        rotation=np.eye(3),
        named={"eef_pos_x": value, "finger_1": 0.04},
    )


def command(value: float) -> Command:
    return Command(position_m=np.array([value, 1.0, 2.0]), rotation=np.eye(3), gripper=-1.0)


def record(recorder: Recorder, num_ticks: int, instruction: str = "pick up the cube") -> None:
    recorder.begin({"instruction": instruction})
    for i in range(num_ticks):
        if i % 2 == 0:
            frame = CameraFrame(image=np.full((4, 5, 3), i, np.uint8), captured_s=0.05 * i, index=i)
            recorder.picture("front", frame)
            recorder.picture("front", frame)  # the same one again
        asked = None if i == 1 else np.arange(7.0) + i
        recorder.tick(0.05 * i, asked, None if i == 1 else command(float(i)), state(0.1 * i))
    recorder.event(Event(time_s=1.0, tick=2, kind="hold", severity="hold", detail="no action"))


def test_an_episode_is_read_back_as_it_was(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, NAMES, action_dim=7)
    record(recorder, 4)
    folder = recorder.finish({"outcome": "success"})
    assert folder == tmp_path / "episode_000000"
    episode = load_episode(folder)
    assert episode.info["outcome"] == "success"
    assert episode.info["instruction"] == "pick up the cube"
    np.testing.assert_allclose(episode.time_s, [0.0, 0.05, 0.1, 0.15])
    np.testing.assert_array_equal(episode.asked[2], np.arange(7.0) + 2)
    assert np.isnan(episode.asked[1]).all()
    assert np.isnan(episode.sent_position_m[1]).all()
    np.testing.assert_array_equal(episode.sent_position_m[3], [3.0, 1.0, 2.0])
    np.testing.assert_allclose(episode.measured[:, 0], [0.0, 0.1, 0.2, 0.3])
    assert episode.images["front"].shape == (2, 4, 5, 3)
    assert episode.image_ticks["front"].tolist() == [0, 2]
    np.testing.assert_array_equal(episode.images["front"][:, 3, 4, 2], [0, 2])
    assert [(event.kind, event.tick) for event in episode.events] == [("hold", 2)]


def test_episodes_are_numbered_on_and_an_empty_one_loads(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = Recorder(tmp_path, NAMES, action_dim=7)
        record(recorder, 0)
        recorder.finish({"outcome": "stopped"})
    record(recorder, 1)
    recorder.begin({"instruction": "another"})  # the open one is kept
    recorder.discard()
    assert [path.name for path in finished_episodes(tmp_path)] == [f"episode_{i:06d}" for i in range(3)]
    assert [len(load_episode(path).time_s) for path in finished_episodes(tmp_path)] == [0, 0, 1]
    assert load_episode(finished_episodes(tmp_path)[2]).info["outcome"] == "abandoned"
    assert recorder.finish({}) is None
    with pytest.raises(ValueError, match="is no finished episode"):
        load_episode(tmp_path)


def test_pictures_that_change_their_size_are_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, NAMES, action_dim=7)
    record(recorder, 1)
    recorder.begin({})
    recorder.picture("front", CameraFrame(image=np.zeros((4, 5, 3), np.uint8), captured_s=0.0, index=0))
    with pytest.raises(ValueError, match=r"\(4, 5, 3\).*\(8, 5, 3\)"):
        recorder.picture("front", CameraFrame(image=np.zeros((8, 5, 3), np.uint8), captured_s=0.1, index=1))
    recorder.discard()


_ENDLESS = """
import sys
sys.path[:0] = sys.argv[2:]
from test_recorder import NAMES, record
from pathlib import Path
from robots.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), NAMES, action_dim=7)
while True:
    record(recorder, 20)
    recorder.finish({"outcome": "success"})
    print("finished", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.011, 0.02])
def test_a_killed_process_leaves_whole_episodes(tmp_path: Path, delay_s: float) -> None:
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", _ENDLESS, str(tmp_path), str(root), str(root / "tests" / "unit")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
    episodes = finished_episodes(tmp_path)
    assert len(episodes) >= 3
    for folder in episodes:
        assert len(load_episode(folder).time_s) == 20
    Recorder(tmp_path, NAMES, action_dim=7)  # the next run starts beside what was left
