"""LeRobot's own SO-101, its Feetech driver included, driven by our wrapper; only the motors are emulated.

Needs LeRobot's environment as `test_lerobot_plugin.py` does, with LeRobot's `feetech` extra:
python3 -m venv ENV && ENV/bin/pip install 'lerobot[feetech]' -e plugins/lerobot_robot_vla_rl
ENV/bin/pip install --no-deps -e .
VLA_RL_LEROBOT_PYTHON=ENV/bin/python make test-robots
"""

from __future__ import annotations

import importlib
import json
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from lerobot_environment import lerobot_python, lerobot_variables

pytestmark = pytest.mark.robot_peers

HERE = Path(__file__).parent
JOINTS = ("shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll")
DEADLINE_S = 120.0


Report = dict[str, Any]


@pytest.fixture(scope="module")
def run_so101(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Report]:
    """Run the client against a new bus; do to that what it asks for."""
    python = lerobot_python()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))  # a folder of scripts that is no package
        feetech_bus = importlib.import_module("feetech_bus")

    def run(what: str) -> Report:
        folder = tmp_path_factory.mktemp(what)
        # A quarter turn either way about the middle; offsets of both signs, which the bus encodes by a sign bit.
        calibrations = {
            name: feetech_bus.Calibration(id=number, range_min=1024, range_max=3072, homing_offset=250 * number - 800)
            for number, name in enumerate((*JOINTS, "gripper"), start=1)
        }
        (folder / "peer.json").write_text(json.dumps({name: asdict(one) for name, one in calibrations.items()}))
        with feetech_bus.FeetechBus(calibrations) as bus:
            return _converse([python, str(HERE / "so101_client.py"), what, bus.port, str(folder)], folder, bus)

    return run


def _converse(command: list[str], folder: Path, bus: Any) -> Report:
    log, last = folder / "client.log", ""
    with log.open("w") as errors:
        client = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=lerobot_variables(command[0], folder),
        )
    deadline = threading.Timer(DEADLINE_S, client.kill)
    deadline.start()
    assert client.stdin is not None
    assert client.stdout is not None
    try:
        for last in client.stdout:
            if last.startswith("?"):
                client.stdin.write(json.dumps(_obey(bus, last[1:].strip())) + "\n")
                client.stdin.flush()
    finally:
        deadline.cancel()
        client.kill()
        client.communicate()
    if not last.startswith("{"):
        pytest.fail(f"no report, but {last!r}:\n{log.read_text()[-2000:]}")
    report: Report = json.loads(last)
    print(report)
    return report


def _obey(bus: Any, wish: str) -> Any:
    match wish:
        case "goals":
            return bus.goals()
        case "torques":
            return bus.torques()
        case "silence" | "speak":
            bus.is_answering = wish == "speak"
            return bus.is_answering
        case _:
            raise ValueError(f"the client asks for {wish!r}")


@pytest.fixture(scope="module")
def driven(run_so101: Callable[[str], Report]) -> Report:
    return run_so101("drive")


@pytest.fixture(scope="module")
def lost(run_so101: Callable[[str], Report]) -> Report:
    return run_so101("lose")


def test_the_arm_goes_where_the_pose_says(driven: Report) -> None:
    assert driven["connect"][0] == ""
    assert driven["features"]
    assert driven["named"]
    # LeRobot truncates to ticks of 0.088 degrees.
    assert driven["reached_deg"] == pytest.approx([10.0, 20.0, -15.0, 12.0, -25.0], abs=0.2)
    assert driven["sent_m"] == pytest.approx([0.32, 0.04, 0.17], abs=1e-6)
    assert driven["reached_m"] == pytest.approx([0.32, 0.04, 0.17], abs=5e-4)
    assert driven["gripper_m"] == pytest.approx(0.0, abs=1e-3)


def test_a_target_that_is_no_pose_sends_nothing(driven: Report) -> None:
    assert driven["nan"][0] == "ValueError"
    assert driven["nan_sent_nothing"]


def test_the_motors_limits_and_lerobots_leash_end_a_target_that_is_too_far(driven: Report) -> None:
    assert driven["far_deg"][0] == pytest.approx(90.0, abs=0.2)
    assert driven["far_sent_m"][0] == pytest.approx(0.48)  # at 90 degrees, the limit of the wrapper's config
    assert driven["absurd"][0] == ""  # what LeRobot would refuse with an error of its own
    assert driven["leashed_m"] == pytest.approx([-0.02, 0.0, 0.0], abs=5e-4)  # 10 degrees


def test_hold_stays_where_the_arm_was(driven: Report) -> None:
    assert -75.0 < driven["held_deg"] < 5.0  # on its way from 10 to -80 degrees
    assert driven["sank_deg"][1:] == pytest.approx([0.0] * 4, abs=0.2)
    assert abs(driven["sank_deg"][0]) < 10.0  # it was moving at 260 degrees a second while it was read


def test_stop_refuses_commands_until_recover(driven: Report) -> None:
    assert driven["stopped"][0] == "RobotError"
    assert driven["recovered"][0] == ""


def test_torque_after_close_is_as_configured(driven: Report) -> None:
    assert driven["torque_kept"] == [1] * 6
    assert driven["torque_dropped"] == [0] * 6


def test_an_arm_without_calibration_is_refused_and_asks_nothing(driven: Report) -> None:
    assert driven["uncalibrated"][0] == "RobotError"
    assert "lerobot-calibrate" in driven["uncalibrated"][1]


@pytest.mark.parametrize("call", ["connect", "command", "observe", "hold", "recover"])
def test_a_silent_bus_raises_and_does_not_hang(lost: Report, call: str) -> None:
    name, message, wall_s = lost[call]
    assert name == "RobotError"
    assert "so_follower" in message
    assert wall_s < 5.0


def test_stop_is_safe_on_a_silent_bus(lost: Report) -> None:
    assert lost["stop"][0] == ""


def test_connect_can_be_tried_again(lost: Report) -> None:
    assert lost["connect_again"][:2] == ["", ""]


def test_close_is_safe_on_a_silent_bus(lost: Report) -> None:
    assert lost["close"][:2] == ["", ""]
    assert lost["is_closed"]


def test_stop_is_safe_with_a_leash_per_motor(driven: Report) -> None:
    assert driven["stop_with_leash_per_motor"][:2] == ["", ""]
    assert driven["close_with_leash_per_motor"][:2] == ["", ""]
