"""Run in LeRobot's environment: its factory finds our plugin by name and drives the arm; prints one JSON line."""

import json
import sys
import time

from lerobot.robots import RobotConfig, make_robot_from_config
from lerobot.utils.import_utils import register_third_party_plugins

PERIOD_S = 1 / 30


def main() -> None:
    register_third_party_plugins()
    config = RobotConfig.get_choice_class("vla_rl_franka")(
        host=sys.argv[1], workspace_low_m=[0.2, -0.4, 0.1], workspace_high_m=[0.8, 0.4, 1.0], realtime="ignore"
    )
    robot = make_robot_from_config(config)
    robot.connect()
    begun = robot.get_observation()
    pose = {name: begun[name] for name in robot.action_features}
    sent, slowest = {}, 0.0
    for tick in range(75):
        started = time.monotonic()
        robot.get_observation()
        sent = robot.send_action({**pose, "ee.y": pose["ee.y"] + 0.002 * min(tick, 40), "ee.gripper_pos": 0.0})
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(max(0.0, started + PERIOD_S - time.monotonic()))
    far = robot.send_action({**pose, "ee.x": 2.0})
    ended = robot.get_observation()
    robot.disconnect()
    print(
        json.dumps(
            {
                "features": sorted(begun) == sorted(robot.observation_features),
                "moved_y_m": ended["ee.y"] - begun["ee.y"],
                "sent_y_m": sent["ee.y"] - begun["ee.y"],
                "far_x_m": far["ee.x"] - ended["ee.x"],
                "gripper": ended["ee.gripper_pos"],
                "slowest_ms": 1e3 * slowest,
            }
        )
    )


if __name__ == "__main__":
    main()
