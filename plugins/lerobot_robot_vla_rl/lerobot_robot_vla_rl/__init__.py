"""vla-rl's Franka driver for LeRobot's tools: `lerobot-record --robot.type=vla_rl_franka --robot.host=...`."""

from lerobot_robot_vla_rl.config_franka import VlaRlFrankaConfig
from lerobot_robot_vla_rl.franka import VlaRlFranka

__all__ = ["VlaRlFranka", "VlaRlFrankaConfig"]
