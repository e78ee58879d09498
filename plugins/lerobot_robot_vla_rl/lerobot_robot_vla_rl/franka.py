"""The robot class. Actions and observations are absolute tool poses under LeRobot's names for them."""

from functools import cached_property
from typing import Any

import numpy as np
from lerobot.cameras.utils import make_cameras_from_configs
from lerobot.robots.robot import Robot

from lerobot_robot_vla_rl.config_franka import VlaRlFrankaConfig
from robots.following import PoseFollower
from robots.franka import FrankaRobot
from robots.franka_config import FrankaConfig
from robots.rotations import matrix_from_rotation_vector, rotation_vector_from_matrix
from robots.safety_config import SafetyConfig

_POSE = ("ee.x", "ee.y", "ee.z", "ee.wx", "ee.wy", "ee.wz")
_LIMITS = ("workspace_low_m", "workspace_high_m", "leash_m", "leash_rad")
_GRIPPER = "ee.gripper_pos"
"""0 (closed) to 100 (open), as LeRobot counts grippers."""


class VlaRlFranka(Robot):
    """Position (m), rotation vector (rad) and gripper of the tool; joints (degrees) are observed as well.

    Every action passes the safety chain's steps. If no action comes any more, a watchdog holds the arm and then stops
    it; the next action moves on from where the arm stands. A fault of the controller takes a new connection.
    """

    config_class = VlaRlFrankaConfig
    name = "vla_rl_franka"

    def __init__(self, config: VlaRlFrankaConfig) -> None:
        super().__init__(config)
        self.config = config
        # Positions here are of the base frame, so the training world's origin plays no part.
        driver = FrankaRobot(
            FrankaConfig.model_validate(
                {"host": config.host, "base_in_world_m": (0.0, 0.0, 0.0), "realtime": config.realtime}
            )
        )
        limits = {name: getattr(config, name) for name in _LIMITS}
        self._robot = PoseFollower(driver, SafetyConfig.model_validate({**config.safety, **limits}), config.rate_hz)
        self._is_connected = False
        self.cameras = make_cameras_from_configs(config.cameras)

    @cached_property
    def action_features(self) -> dict[str, type]:
        """Names of an action's entries."""
        return dict.fromkeys((*_POSE, _GRIPPER), float)

    @cached_property
    def observation_features(self) -> dict[str, Any]:
        """Names of an observation's entries."""
        joints = dict.fromkeys((f"joint_{index}.pos" for index in range(1, 8)), float)
        images = {name: (camera.height, camera.width, 3) for name, camera in self.config.cameras.items()}
        return {**self.action_features, **joints, **images}

    @property
    def is_connected(self) -> bool:
        """Whether arm and cameras answer."""
        return self._is_connected and all(camera.is_connected for camera in self.cameras.values())

    @property
    def is_calibrated(self) -> bool:
        """The arm knows its joints."""
        return True

    def connect(self, calibrate: bool = True) -> None:
        """Reach arm, hand and cameras; nothing moves."""
        self._robot.connect(self.config.connect_timeout_s)
        self._is_connected = True
        for camera in self.cameras.values():
            camera.connect()

    def calibrate(self) -> None:
        """Nothing to do."""

    def configure(self) -> None:
        """Nothing to do."""

    def get_observation(self) -> dict[str, Any]:
        """The newest state and pictures."""
        state = self._robot.observe()
        pose = dict(zip(_POSE, [*state.position_m, *rotation_vector_from_matrix(state.rotation)], strict=True))
        joints = {f"joint_{i + 1}.pos": float(angle) for i, angle in enumerate(np.rad2deg(state.joint_positions_rad))}
        images = {name: camera.async_read() for name, camera in self.cameras.items()}
        width = {_GRIPPER: 100.0 * state.gripper_width_m / 0.08}
        return {**{name: float(value) for name, value in pose.items()}, **width, **joints, **images}

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        """Move towards a pose; returns the target that the limits have left of it for this control period."""
        values = np.array([float(action[name]) for name in (*_POSE, _GRIPPER)])
        if not np.isfinite(values).all():
            raise ValueError(f"the action is not finite: {action}")
        gripper = float(np.clip(1.0 - values[6] / 50.0, -1.0, 1.0))
        sent = self._robot.follow(values[:3], matrix_from_rotation_vector(values[3:6]), gripper)
        pose = [*sent.position_m, *rotation_vector_from_matrix(sent.rotation)]
        return {**dict(zip(_POSE, map(float, pose), strict=True)), _GRIPPER: 50.0 * (1.0 - sent.gripper)}

    def disconnect(self) -> None:
        """Stop, with torque on, and let go."""
        self._is_connected = False
        self._robot.close()
        for camera in self.cameras.values():
            if camera.is_connected:
                camera.disconnect()
