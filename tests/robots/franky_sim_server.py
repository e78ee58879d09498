"""Runs franky-sim with a cube before the arm, on one loopback address. Started in franky-sim's environment.

Prints the cube's position (m, base frame) five times a second, one JSON list a line.
"""

import argparse
import json
import threading
import time
import xml.etree.ElementTree as ElementTree

import franky_sim
from franky_sim.mujoco_simulator import MujocoSimulator


def add_cube(worldbody: ElementTree.Element, position_m: tuple[float, float, float], size_m: float) -> None:
    body = ElementTree.SubElement(worldbody, "body", name="cube", pos=" ".join(map(str, position_m)))
    ElementTree.SubElement(body, "freejoint")
    half = f"{size_m / 2}"
    ElementTree.SubElement(
        body,
        "geom",
        type="box",
        size=f"{half} {half} {half}",
        mass="0.05",
        friction="2 0.05 0.001",
        rgba="0.8 0.1 0.1 1",
    )


def report(sim: MujocoSimulator) -> None:
    while True:
        time.sleep(0.2)
        if sim.data is not None:
            print(json.dumps(sim.data.body("cube").xpos.tolist()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--cube-m", type=float, nargs=3, default=(0.5, 0.0, 0.02))
    options = parser.parse_args()
    with MujocoSimulator(enable_visualization=False) as sim:
        add_cube(sim.worldbody, tuple(options.cube_m), 0.04)
        sim.add_robot()
        with franky_sim.SimulationServer(sim, hostname_candidates=[options.host]) as server:
            threading.Thread(target=report, args=(sim,), daemon=True).start()
            server.run_forever()


if __name__ == "__main__":
    main()
