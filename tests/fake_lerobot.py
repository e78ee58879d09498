"""A package that acts like LeRobot's as far as our wrapper uses it: a planar arm of two links and its kinematics."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest


class TwoLinks:
    """Links of 0.3 m; both joints turn about z, and the tool points along the second link."""

    LENGTH_M = 0.3

    def __init__(self, urdf_path: str = "", target_frame_name: str = "", joint_names: list[str] | None = None) -> None:
        self.arguments = (urdf_path, target_frame_name, joint_names)

    def forward_kinematics(self, joint_pos_deg: np.ndarray) -> np.ndarray:
        first, both = np.deg2rad(joint_pos_deg[0]), np.deg2rad(joint_pos_deg[:2].sum())
        pose = np.eye(4)
        pose[:2, :2] = [[np.cos(both), -np.sin(both)], [np.sin(both), np.cos(both)]]
        pose[:2, 3] = self.LENGTH_M * (np.cos(first) + np.cos(both)), self.LENGTH_M * (np.sin(first) + np.sin(both))
        return pose

    def inverse_kinematics(self, current_joint_pos: np.ndarray, desired_ee_pose: np.ndarray) -> np.ndarray:
        x, y = desired_ee_pose[:2, 3] / self.LENGTH_M
        elbow = np.arccos(np.clip((x * x + y * y - 2) / 2, -1, 1))
        shoulder = np.arctan2(y, x) - np.arctan2(np.sin(elbow), 1 + np.cos(elbow))
        return np.rad2deg([shoulder, elbow])


@dataclass
class TwoLinksConfig:
    port: str
    id: str = ""
    use_degrees: bool = True
    disable_torque_on_disconnect: bool = True


class TwoLinksArm:
    """Its joints are at once where they are told to be; keeps every goal."""

    name = "two_links"
    is_calibrated = True
    made: ClassVar[list[TwoLinksArm]] = []

    def __init__(self, config: TwoLinksConfig) -> None:
        self.config = config
        self.positions = {"shoulder.pos": 0.0, "elbow.pos": 90.0, "gripper.pos": 100.0}
        self.action_features = self.observation_features = dict.fromkeys(self.positions, float)
        self.is_connected = False
        self.goals: list[dict[str, float]] = []
        self.made.append(self)

    def connect(self, calibrate: bool = True) -> None:
        self.is_connected = True

    def disconnect(self) -> None:
        self.is_connected = False

    def get_observation(self) -> dict[str, Any]:
        return dict(self.positions)

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        self.goals.append(dict(action))
        self.positions.update(action)
        return action


class _RobotConfig:
    @staticmethod
    def get_known_choices() -> dict[str, type]:
        return {"two_links": TwoLinksConfig}

    @staticmethod
    def get_choice_class(kind: str) -> type:
        return {"two_links": TwoLinksConfig}[kind]


def install(monkeypatch: pytest.MonkeyPatch) -> list[TwoLinksArm]:
    """Make it importable; arms that are made are appended to what is returned."""
    modules = {
        "lerobot": {},
        "lerobot.utils": {},
        "lerobot.model": {},
        "lerobot.robots": {"__path__": [], "RobotConfig": _RobotConfig, "make_robot_from_config": TwoLinksArm},
        "lerobot.utils.import_utils": {"register_third_party_plugins": lambda: None},
        "lerobot.model.kinematics": {"RobotKinematics": TwoLinks},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(TwoLinksArm, "made", [])
    return TwoLinksArm.made
