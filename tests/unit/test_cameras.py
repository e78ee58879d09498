"""Cameras: test card, files, OpenCV on a video file that stands for a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from robots.cameras import (
    FakeCamera,
    FakeCameraConfig,
    FileCamera,
    FileCameraConfig,
    OpenCVCamera,
    OpenCVCameraConfig,
    make_camera,
)
from robots.robot import Camera, RobotError

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def corners(image: np.ndarray) -> list[tuple[int, ...]]:
    """Top left, top right, bottom left, bottom right."""
    return [tuple(int(value) for value in image[row, column]) for row in (2, -3) for column in (2, -3)]


def write_video(path: Path, num_frames: int) -> np.ndarray:
    """The test card as a video; returns the card."""
    card = FakeCamera(FakeCameraConfig(name="front", height=64, width=96)).read().image
    writer = imageio_ffmpeg.write_frames(str(path), (96, 64), fps=20, quality=9)
    writer.send(None)
    for _ in range(num_frames):
        writer.send(np.ascontiguousarray(card))
    writer.close()
    return card


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen within 10 s")


def test_the_card_shows_every_flip_and_channel_swap() -> None:
    camera = FakeCamera(FakeCameraConfig(name="front", height=32, width=48))
    assert isinstance(camera, Camera)
    image = camera.read().image
    assert image.shape == (32, 48, 3)
    assert corners(image) == [RED, GREEN, BLUE, WHITE]
    views = [image, image[::-1], image[:, ::-1], image[::-1, ::-1], image[:, :, ::-1]]
    assert len({tuple(corners(view)) for view in views}) == 5


def test_a_frozen_camera_repeats_itself_and_a_stopped_one_says_so() -> None:
    camera = FakeCamera(FakeCameraConfig(name="front"))
    first, second = camera.read(), camera.read()
    assert (first.index, second.index) == (0, 1)
    assert (first.image != second.image).any()
    camera.freeze()
    assert camera.read() is second
    camera.thaw()
    assert camera.read().index == 2
    camera.stop()
    with pytest.raises(RobotError, match="front"):
        camera.read()


def test_a_folder_plays_by_the_clock_and_begins_again(tmp_path: Path) -> None:
    for number, colour in enumerate((RED, GREEN, BLUE)):
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("not a picture")
    now = [100.0]
    camera = FileCamera(FileCameraConfig(name="front", path=tmp_path, rate_hz=10.0), clock=lambda: now[0])
    seen = []
    for now[0] in (100.0, 100.05, 100.15, 100.25, 100.35):
        frame = camera.read()
        seen.append((frame.index, tuple(int(v) for v in frame.image[0, 0]), round(frame.captured_s - 100.0, 6)))
    assert seen == [(0, RED, 0.0), (0, RED, 0.0), (1, GREEN, 0.1), (2, BLUE, 0.2), (3, RED, 0.3)]


def test_a_single_picture_and_a_video(tmp_path: Path) -> None:
    card = write_video(tmp_path / "card.mp4", 3)
    Image.fromarray(card).save(tmp_path / "card.png")
    picture = make_camera(FileCameraConfig(name="front", path=tmp_path / "card.png")).read().image
    np.testing.assert_array_equal(picture, card)
    played = make_camera(FileCameraConfig(name="front", path=tmp_path / "card.mp4")).read().image
    assert np.abs(np.array(corners(played)) - corners(card)).max() < 20  # a video codec is not exact


@pytest.mark.parametrize("name", ["nothing", "notes.txt"])
def test_no_pictures(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("not a picture")
    with pytest.raises(ValueError, match=name):
        make_camera(FileCameraConfig(name="front", path=tmp_path / name))


def test_opencv_delivers_rgb_and_reopens_a_device_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "card.mp4"
    card = write_video(path, 5)
    camera = make_camera(OpenCVCameraConfig(name="front", device=str(path), max_reopens=2))
    assert isinstance(camera, OpenCVCamera)
    frame = camera.read()
    assert np.abs(np.array(corners(frame.image)) - corners(card)).max() < 20
    wait_for(lambda: camera.num_reopens == 2)

    def is_gone() -> bool:
        try:
            return camera.read().index < 0
        except RobotError as error:
            return "2 reopenings" in str(error)

    wait_for(is_gone)
    camera.close()
    camera.close()


class Device:
    """Stands for OpenCV: delivers what it is told, a hundred times a second."""

    CAP_PROP_FRAME_WIDTH = CAP_PROP_FRAME_HEIGHT = CAP_PROP_FPS = CAP_PROP_BUFFERSIZE = 0

    def __init__(self) -> None:
        self.picture = np.zeros((8, 8, 3), np.uint8)
        self.num_reads, self.is_live = 0, True

    def VideoCapture(self, device: int) -> Device:  # noqa: N802 - OpenCV's name
        return self

    def set(self, key: int, value: float) -> None: ...

    def release(self) -> None: ...

    def read(self) -> tuple[bool, np.ndarray]:
        time.sleep(0.01)
        self.num_reads += 1
        if self.is_live:
            self.picture = self.picture + np.uint8(1)  # one more step of grey: a sensor's noise
        return True, self.picture.copy()


def test_a_device_that_delivers_the_same_picture_again_and_again_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr("robots.cameras._import_cv2", lambda: device)
    camera = OpenCVCamera(OpenCVCameraConfig(name="front", device=0))
    wait_for(lambda: camera.read().index > 3)
    device.is_live = False
    num_reads = device.num_reads
    wait_for(lambda: device.num_reads > num_reads + 3)
    last = camera.read()
    wait_for(lambda: device.num_reads > num_reads + 10)
    assert camera.read() is last  # it grows old, as if nothing had come
    assert time.monotonic() - last.captured_s > 0.05
    device.is_live = True
    wait_for(lambda: camera.read().index > last.index)
    camera.close()


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing.mp4")
    with pytest.raises(RobotError, match=r"front.*nothing\.mp4"):
        make_camera(OpenCVCameraConfig(name="front", device=missing, max_reopens=0))
