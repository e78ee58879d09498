"""From cameras and a robot's state to the observation that a policy server takes, by the contract's names."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from robots.contract import CameraContract, DeploymentContract
from robots.robot import Camera, CameraFrame, RobotError, RobotState


class Observer:
    """Takes the newest pictures and puts an observation together.

    Args:
        contract: Names, orders and sizes.
        cameras: Matched by name.
        is_simulated: The cameras already deliver pictures as the training world does, bottom row first where the
            contract says so; real cameras deliver the top row first, and their pictures are turned here and only here.
    """

    def __init__(self, contract: DeploymentContract, cameras: Sequence[Camera], is_simulated: bool) -> None:
        by_name = {camera.name: camera for camera in cameras}
        self._cameras = [(entry, by_name[entry.name]) for entry in contract.cameras]
        self._contract = contract
        self.is_simulated = is_simulated

    def frames(self) -> dict[str, CameraFrame]:
        """The newest frame of each camera, by name.

        Raises:
            RobotError: A camera has none.
        """
        return {entry.name: camera.read() for entry, camera in self._cameras}

    def observation(self, state: RobotState, frames: Mapping[str, CameraFrame], instruction: str) -> dict[str, Any]:
        """What goes over the wire.

        Raises:
            RobotError: The state lacks an entry, or is not finite.
        """
        missing = [name for name in self._contract.state_names if name not in state.named]
        if missing:
            raise RobotError(f"the robot's state lacks {', '.join(missing)}, which the checkpoint's contract names")
        values = np.array([state.named[name] for name in self._contract.state_names], dtype=np.float32)
        if not np.isfinite(values).all():
            raise RobotError(f"the robot's state is not finite: {dict(state.named)}")
        images = {
            f"observation/images/{entry.name}": self._fit(entry, frames[entry.name].image) for entry, _ in self._cameras
        }
        return {**images, "observation/state": values, "prompt": instruction, "t_obs": time.monotonic()}

    def _fit(
        self, entry: CameraContract, image: UInt8[np.ndarray, "height width 3"]
    ) -> UInt8[np.ndarray, "new_height new_width 3"]:
        if not self.is_simulated and entry.orientation == "bottom_up":
            image = image[::-1]
        if image.shape[:2] != (entry.height, entry.width):
            image = _resize(image, entry.height, entry.width)
        return np.ascontiguousarray(image)


def _resize(
    image: UInt8[np.ndarray, "height width 3"], height: int, width: int
) -> UInt8[np.ndarray, "new_height new_width 3"]:
    """Cut out the middle in the wanted aspect ratio, then scale: stretching would move what the policy sees."""
    from PIL import Image  # not needed where cameras have the contract's size

    old_height, old_width = image.shape[:2]
    scale = min(old_height / height, old_width / width)
    cut_height, cut_width = round(scale * height), round(scale * width)
    top, left = (old_height - cut_height) // 2, (old_width - cut_width) // 2
    cut = np.ascontiguousarray(image[top : top + cut_height, left : left + cut_width])
    return np.asarray(Image.fromarray(cut).resize((width, height), Image.Resampling.BILINEAR))
