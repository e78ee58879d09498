"""Runs franka-sim with the controller's real limits, on one loopback address. Started in franka-sim's environment."""

import argparse
import logging

from franka_sim.franka_sim_server import FrankaSimServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--object-width-m", type=float, default=None, help="what the gripper closes on")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    server = FrankaSimServer(
        host=options.host,
        enforce_comm_constraints=True,
        enforce_motion_limits=True,
        gripper_object_width=options.object_width_m,
    )
    server.start()


if __name__ == "__main__":
    main()
