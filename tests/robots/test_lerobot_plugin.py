"""LeRobot's own factory finds the plugin and drives our Franka driver. Optional: LeRobot's dependencies are large.

python3 -m venv ENV && ENV/bin/pip install lerobot -e plugins/lerobot_robot_vla_rl && ENV/bin/pip install --no-deps -e .
VLA_RL_LEROBOT_PYTHON=ENV/bin/python make test-robots
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lerobot_environment import lerobot_python, lerobot_variables

pytestmark = pytest.mark.robot_peers


@pytest.mark.usefixtures("real_time")
def test_lerobot_drives_our_franka(start_peer: Any, tmp_path: Path) -> None:
    python = lerobot_python()
    done = subprocess.run(
        [python, str(Path(__file__).with_name("lerobot_client.py")), start_peer("franka_sim").host],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=lerobot_variables(python, tmp_path),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["features"]
    assert report["sent_y_m"] == pytest.approx(0.08, abs=0.01)
    assert report["moved_y_m"] == pytest.approx(0.08, abs=0.015)
    assert report["far_x_m"] < 0.045  # the leash, not 1.4 m
    assert report["gripper"] < 10.0
