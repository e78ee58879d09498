"""A client that holds the arm at 20 Hz and tells in JSON lines what happens to it; the tests freeze it."""

import json
import sys
import time

from robots.franka import FrankaRobot
from robots.franka_config import FrankaConfig
from robots.robot import Command, RobotError


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    robot = FrankaRobot(FrankaConfig(host=sys.argv[1], base_in_world_m=(0.0, 0.0, 0.0), realtime="ignore"))
    robot.connect(10.0)
    state = robot.observe()
    try:
        for tick in range(200):
            robot.command(Command(position_m=state.position_m, rotation=state.rotation, gripper=-1.0))
            robot.observe()
            if tick == 20:
                say(event="running")
            time.sleep(0.05)
        say(event="never failed")
    except RobotError as error:
        state = robot.observe()
        say(event="failed", words=str(error), mode=state.mode, faults=state.faults)
        begun = time.monotonic()
        robot.recover()
        say(event="recovered", mode=robot.observe().mode, seconds=time.monotonic() - begun)
    robot.close()


if __name__ == "__main__":
    main()
