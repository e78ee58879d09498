"""Sources of pictures for robots that have none of their own: a test card, files, and whatever OpenCV can open.

All deliver RGB with the first row on top, as cameras do; who needs another orientation turns them (`robots.observing`).
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import UInt8
from pydantic import Field

from robots.robot import Camera, CameraFrame, RobotError
from vla_rl.config import ConfigModel

Image = UInt8[np.ndarray, "height width 3"]

_VIDEO_SUFFIXES = (".mp4", ".avi", ".mkv", ".mov", ".webm")
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp")


class FakeCameraConfig(ConfigModel):
    """A test card."""

    type: Literal["fake"] = "fake"
    """Which camera."""
    name: str = Field(min_length=1)
    """As in the checkpoint's contract."""
    height: int = Field(default=256, ge=8)
    """In pixels."""
    width: int = Field(default=256, ge=8)
    """In pixels."""


class FileCameraConfig(ConfigModel):
    """Pictures from disk, as if a camera took them now."""

    type: Literal["file"] = "file"
    """Which camera."""
    name: str = Field(min_length=1)
    """As in the checkpoint's contract."""
    path: Path
    """A picture, a folder of pictures (in the order of their names), or a video; all frames are kept in memory."""
    rate_hz: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    """Frames per second; after the last comes the first."""


class OpenCVCameraConfig(ConfigModel):
    """A USB camera or a stream."""

    type: Literal["opencv"] = "opencv"
    """Which camera."""
    name: str = Field(min_length=1)
    """As in the checkpoint's contract."""
    device: int | str
    """Number of the camera, or address of the stream."""
    height: int | None = Field(default=None, ge=8)
    """Asked of the device, in pixels; None: its own."""
    width: int | None = Field(default=None, ge=8)
    """Asked of the device, in pixels; None: its own."""
    rate_hz: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Asked of the device; None: its own."""
    open_timeout_s: float = Field(default=5.0, gt=0, le=60.0, allow_inf_nan=False)
    """Until the first frame."""
    max_reopens: int = Field(default=3, ge=0)
    """How often a device that delivers nothing is opened anew before it counts as gone."""


CameraConfig = Annotated[FakeCameraConfig | FileCameraConfig | OpenCVCameraConfig, Field(discriminator="type")]


def make_camera(config: FakeCameraConfig | FileCameraConfig | OpenCVCameraConfig) -> Camera:
    """The camera of a config.

    Raises:
        RobotError: The device delivers nothing.
        ValueError: The files are not pictures.
    """
    match config:
        case FakeCameraConfig():
            return FakeCamera(config)
        case FileCameraConfig():
            return FileCamera(config)
        case OpenCVCameraConfig():
            return OpenCVCamera(config)


class FakeCamera:
    """Four coloured corners (top: red, green; bottom: blue, white), so that any flip or channel swap shows.

    Every reading is a new frame with another grey level in the middle, until `freeze` or `stop`.
    """

    def __init__(self, config: FakeCameraConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._index = -1
        self._frame: CameraFrame | None = None
        self._is_frozen = self._is_stopped = False

    @property
    def name(self) -> str:
        """As in the contract."""
        return self._config.name

    def read(self) -> CameraFrame:
        """The next frame; the last one again if frozen.

        Raises:
            RobotError: Stopped.
        """
        if self._is_stopped:
            raise RobotError(f"camera {self.name} was stopped")
        if self._frame is None or not self._is_frozen:
            self._index += 1
            self._frame = CameraFrame(image=self._draw(), captured_s=self._clock(), index=self._index)
        return self._frame

    def freeze(self) -> None:
        """From now on the last frame comes again and again, as from a camera whose driver hangs."""
        self._is_frozen = True

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._is_frozen = False

    def stop(self) -> None:
        """From now on there are no frames, as from a camera that was unplugged."""
        self._is_stopped = True

    def close(self) -> None:
        """Nothing to let go of."""

    def _draw(self) -> Image:
        height, width = self._config.height, self._config.width
        card = np.empty((height, width, 3), np.uint8)
        top, left = slice(None, height // 2), slice(None, width // 2)
        bottom, right = slice(height // 2, None), slice(width // 2, None)
        card[top, left], card[top, right] = (255, 0, 0), (0, 255, 0)
        card[bottom, left], card[bottom, right] = (0, 0, 255), (255, 255, 255)
        card[height // 2 - 2 : height // 2 + 2, width // 2 - 2 : width // 2 + 2] = self._index % 256
        return card


class FileCamera:
    """Plays pictures from disk by the clock."""

    def __init__(self, config: FileCameraConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Read all files.

        Raises:
            ValueError: There is nothing at the path, or no pictures.
        """
        self._config = config
        self._clock = clock
        self._images = _load(config.path)
        self._start_s = clock()

    @property
    def name(self) -> str:
        """As in the contract."""
        return self._config.name

    def read(self) -> CameraFrame:
        """The frame that is due now, stamped with the time it was due."""
        index = int((self._clock() - self._start_s) * self._config.rate_hz)
        captured_s = self._start_s + index / self._config.rate_hz
        return CameraFrame(image=self._images[index % len(self._images)], captured_s=captured_s, index=index)

    def close(self) -> None:
        """Nothing to let go of."""


class OpenCVCamera:
    """Reads a device on its own thread and keeps the newest frame only: a slow loop must not see the past.

    A picture that is the last one to the bit is no news: sensors have noise, so it comes from a driver or a stream that
    hangs. The frame then grows old, which holds the robot, as if nothing had been delivered.
    """

    def __init__(self, config: OpenCVCameraConfig) -> None:
        """Open the device and wait for its first frame.

        Raises:
            ImportError: OpenCV is not installed.
            RobotError: No frame in time.
        """
        self._config = config
        self._cv2 = _import_cv2()
        self._frame: CameraFrame | None = None
        self._lost: str | None = None
        self._has_news = threading.Condition()
        self._is_closing = threading.Event()
        self.num_reopens = 0
        """How often the device had to be opened anew."""
        self._thread = threading.Thread(target=self._work, name=f"camera {config.name}", daemon=True)
        self._thread.start()
        with self._has_news:
            self._has_news.wait_for(lambda: self._frame or self._lost, config.open_timeout_s)
        if self._frame is None:
            self.close()
            raise RobotError(
                f"camera {config.name} (device {config.device!r}) has delivered no frame within "
                f"{config.open_timeout_s:g} s{f': {self._lost}' if self._lost else ''}; is it plugged in and free?"
            )

    @property
    def name(self) -> str:
        """As in the contract."""
        return self._config.name

    def read(self) -> CameraFrame:
        """The newest frame.

        Raises:
            RobotError: The device is gone.
        """
        if self._lost is not None or self._frame is None:
            raise RobotError(f"camera {self.name} (device {self._config.device!r}) is gone: {self._lost}")
        return self._frame

    def close(self) -> None:
        """Let go of the device; safe at any time."""
        self._is_closing.set()
        if self._lost is None:
            self._lost = "closed"
        self._thread.join(1.0)  # a device that hangs in its driver keeps its thread

    def _work(self) -> None:
        capture = self._open()
        while not self._is_closing.is_set():
            is_there, picture = capture.read()
            if is_there:
                self._publish(picture)
                continue
            capture.release()
            if self.num_reopens >= self._config.max_reopens:
                with self._has_news:
                    self._lost = f"no frames after {self.num_reopens} reopenings"
                    self._has_news.notify_all()
                return
            self.num_reopens += 1
            self._is_closing.wait(0.1)
            capture = self._open()
        capture.release()

    def _open(self) -> Any:
        config, cv2 = self._config, self._cv2
        capture = cv2.VideoCapture(config.device)
        wanted = {
            cv2.CAP_PROP_FRAME_WIDTH: config.width,
            cv2.CAP_PROP_FRAME_HEIGHT: config.height,
            cv2.CAP_PROP_FPS: config.rate_hz,
            cv2.CAP_PROP_BUFFERSIZE: 1,
        }
        for key, value in wanted.items():
            if value is not None:
                capture.set(key, value)
        return capture

    def _publish(self, picture: Image) -> None:
        image = np.ascontiguousarray(picture[:, :, ::-1])  # OpenCV's channels are blue, green, red; nobody else's are
        if self._frame is not None and np.array_equal(image, self._frame.image):
            return
        index = 0 if self._frame is None else self._frame.index + 1
        with self._has_news:
            self._frame = CameraFrame(image=image, captured_s=time.monotonic(), index=index)
            self._has_news.notify_all()


def _import_cv2() -> Any:
    try:
        return importlib.import_module("cv2")
    except ImportError as error:
        raise ImportError(f"videos and devices need OpenCV ({error}): pip install opencv-python-headless") from error


def _load(path: Path) -> list[Image]:
    """All frames of a picture, a folder of pictures, or a video."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.is_file()]
    if len(files) == 1 and files[0].suffix.lower() in _VIDEO_SUFFIXES:
        images = _load_video(files[0])
    else:
        images = [_load_image(file) for file in files if file.suffix.lower() in _IMAGE_SUFFIXES]
    if not images:
        raise ValueError(
            f"{path} holds no pictures; expected {', '.join(_IMAGE_SUFFIXES)} files, or one video "
            f"({', '.join(_VIDEO_SUFFIXES)})"
        )
    return images


def _load_image(path: Path) -> Image:
    from PIL import Image as PillowImage  # only file cameras need it

    with PillowImage.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def _load_video(path: Path) -> list[Image]:
    capture = _import_cv2().VideoCapture(str(path))
    images = []
    while (read := capture.read())[0]:
        images.append(np.ascontiguousarray(read[1][:, :, ::-1]))
    capture.release()
    return images
