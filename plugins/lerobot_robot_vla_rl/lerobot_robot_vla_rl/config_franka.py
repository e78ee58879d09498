"""Settings, registered under LeRobot's `--robot.type`."""

from dataclasses import dataclass, field
from typing import Any

from lerobot.cameras import CameraConfig
from lerobot.robots.config import RobotConfig


@RobotConfig.register_subclass("vla_rl_franka")
@dataclass(kw_only=True)
class VlaRlFrankaConfig(RobotConfig):
    """A Franka arm. Lengths in metres, base frame of the arm."""

    host: str
    """Address of the controller."""
    workspace_low_m: list[float]
    """Corner of the box that targets are clipped to; there is no default."""
    workspace_high_m: list[float]
    """The opposite corner."""
    rate_hz: float = 30.0
    """Actions per second of LeRobot's loop (`--dataset.fps`, `--fps`): limits per action follow from it."""
    leash_m: float = 0.04
    """Largest distance of a target from where the tool is; further ones are pulled back, and so reported."""
    leash_rad: float = 0.2
    """Largest rotation of a target from how the tool is turned."""
    safety: dict[str, Any] = field(default_factory=dict)
    """Further limits by the names of `robots.safety_config.SafetyConfig`, e.g. linear_speed_m_s, keep_out."""
    realtime: str = "enforce"
    """"ignore" for simulators."""
    connect_timeout_s: float = 10.0
    """Until the controller answers."""
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
    """LeRobot's cameras by name."""
