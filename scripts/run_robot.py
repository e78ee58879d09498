"""vla-rl run-robot: a checkpoint on a robot, through policy server, runtime and safety chain."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from robots.cameras import make_camera
from robots.contract import DeploymentContract, require_world
from robots.franka_config import FrankaConfig
from robots.lerobot_factory import LeRobotArmConfig
from robots.recorder import Recorder
from robots.robot import Camera, Robot
from robots.run_types import Answer, EpisodeReport, Infer, InferenceError, RunState, control_period_s
from robots.runtime import Runtime
from robots.safety import SafetyChain
from robots.sim_robot import SimRobot, sim_cameras
from robots.watchdog import Watchdog
from scripts.progress import console
from scripts.robot_config import DeployConfig, SimRobotConfig, real_robot
from scripts.robot_operator import Operator
from scripts.serve import make_server
from sim.suites import make_suite
from vla_rl.config import load_config
from vla_rl.config_text import config_to_yaml
from vla_rl.evaluation.intervals import wilson_interval
from vla_rl.rollout.sources import evaluation_starts
from vla_rl.serving.chunking import ChunkBuffer
from vla_rl.serving.client import PolicyClient, PolicyError


def run_robot(
    config: DeployConfig,
    contract: DeploymentContract,
    client: PolicyClient,
    folder: Path,
    instruction: str | None,
    num_episodes: int | None,
    report_line: Callable[[str], None] = console.print,
) -> list[EpisodeReport]:
    """Run episodes and record them; returns how each went."""
    match config.robot:
        case SimRobotConfig():
            return _run_sim(config, config.robot, contract, client, folder, num_episodes, report_line)
        case FrankaConfig() | LeRobotArmConfig():
            if not instruction:
                raise ValueError("a real robot needs to be told what to do: --instruction 'pick up the red cube'")
            robot = real_robot(config.robot)
            with ExitStack() as opened:
                cameras = [opened.enter_context(closing(make_camera(entry))) for entry in config.cameras]
                infer = make_inference(client, config.action_scale)
                runtime = make_runtime(config, contract, infer, robot, cameras, make_recorder(folder, contract))
                return _run_real(runtime, instruction, num_episodes or 1, report_line)


def _run_real(
    runtime: Runtime, instruction: str, num_episodes: int, report_line: Callable[[str], None]
) -> list[EpisodeReport]:
    reports: list[EpisodeReport] = []
    operator = Operator(runtime, sys.stdin)
    with operator.attending():
        for line in runtime.preflight():
            report_line(line)
        while len(reports) < num_episodes and runtime.state is RunState.READY:
            reports.append(operator.run_real_episode(instruction, report_line))
    return reports


def _run_sim(
    config: DeployConfig,
    robot_config: SimRobotConfig,
    contract: DeploymentContract,
    client: PolicyClient,
    folder: Path,
    num_episodes: int | None,
    report_line: Callable[[str], None],
) -> list[EpisodeReport]:
    suite = make_suite(robot_config.suite)
    require_world(contract, suite.spec)
    starts = evaluation_starts(suite, robot_config.split, robot_config.starts_per_task)[:num_episodes]
    robot = SimRobot(suite.make_world(), contract, is_lockstep=robot_config.pace == "lockstep")
    cameras, latency_s = sim_cameras(robot, contract), robot_config.added_latency_s
    reports: list[EpisodeReport] = []
    robot.begin(starts[0])
    infer = make_inference(client, config.action_scale, latency_s)
    recorder = make_recorder(folder, contract)
    runtime = make_runtime(config, contract, infer, robot, cameras, recorder, robot.outcome)
    operator = Operator(runtime)
    with operator.attending():
        for line in runtime.preflight():
            report_line(line)
        for start in starts:
            robot.begin(start)
            report = operator.run_episode(start.instruction)
            report_line(f"{start.key}: {report.outcome} after {report.num_steps} steps  {report.detail}")
            reports.append(report)
            if report.outcome in ("stopped", "estop"):
                break
            runtime.acknowledge()  # a world that crashed, or an episode that ended in a fault, is put aside
    return reports


def make_runtime(
    config: DeployConfig,
    contract: DeploymentContract,
    infer: Infer,
    robot: Robot,
    cameras: Sequence[Camera],
    recorder: Recorder,
    outcome: Callable[[], str | None] = lambda: None,
) -> Runtime:
    """All that stands between a policy and a robot, a watchdog included where the robot moves on by itself."""
    return Runtime(
        robot,
        cameras,
        infer,
        SafetyChain(contract, config.safety, robot.description),
        ChunkBuffer(control_period_s(contract, config.runtime), config.blend),
        contract,
        config.runtime,
        watchdog=None if robot.description.is_lockstep else Watchdog(),
        recorder=recorder,
        is_episode_over=outcome,
    )


def make_recorder(folder: Path, contract: DeploymentContract) -> Recorder:
    """Of episodes under a contract."""
    return Recorder(folder, contract.state_names, len(contract.action.names))


def make_inference(client: PolicyClient, action_scale: Sequence[float], added_latency_s: float = 0.0) -> Infer:
    """Ask a policy server; its displacements and rotations are multiplied with the scale (see `DeployConfig`)."""
    factors = np.array([*action_scale, 1.0])  # the gripper is no distance

    def infer(observation: dict[str, Any], deadline_s: float) -> Answer:
        started = time.monotonic()
        try:
            answer = client.infer(observation, deadline_s=deadline_s)
        except PolicyError as error:
            raise InferenceError(str(error)) from error
        time.sleep(added_latency_s)
        if time.monotonic() - started > deadline_s:
            raise InferenceError(f"the answer took longer than {deadline_s:g} s")
        if answer.actions.shape[1] != len(factors):
            raise InferenceError(f"actions have {answer.actions.shape[1]} entries, expected {len(factors)}")
        return replace(answer, actions=answer.actions * factors)

    return infer


def summary(reports: Sequence[EpisodeReport]) -> str:
    """Success with its interval, and the worst of the cadences."""
    solved = sum(report.outcome == "success" for report in reports)
    interval = wilson_interval(solved, len(reports))
    worst = max((report.cadence for report in reports), key=lambda cadence: cadence.period_p99_ms)
    return (
        f"{solved} of {len(reports)} episodes solved: {100 * solved / len(reports):.1f} % "
        f"({100 * interval.low:.1f} to {100 * interval.high:.1f} %); worst cadence: {worst}"
    )


def main(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT] [FILE.yaml ...] [KEY=VALUE ...]",
            help="Run, checkpoint or policy folder (not with --server), then settings (see --print-config).",
            show_default=False,
        ),
    ] = None,
    robot: Annotated[
        str | None, typer.Option("--robot", help="Preset: configs/robots/<name>.yaml, read before other files.")
    ] = None,
    instruction: Annotated[str | None, typer.Option("--instruction", help="What a real robot is told to do.")] = None,
    episodes: Annotated[int | None, typer.Option("--episodes", min=1, help="Episodes, at most.")] = None,
    server: Annotated[
        str | None, typer.Option("--server", help="Address of a policy server, e.g. ws://10.0.0.2:8000; default: own.")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="File with the server's key.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the recordings.")] = Path("runs/robot"),
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the effective configuration.")] = False,
) -> None:
    """Run a checkpoint on a robot: policy server, runtime, safety chain, recordings (sections: see --print-config)."""
    words = list(arguments or [])
    is_setting = not words or "=" in words[0] or words[0].endswith(".yaml")
    checkpoint = words.pop(0) if server is None and not is_setting else None
    files = [*([f"configs/robots/{robot}.yaml"] if robot else []), *(word for word in words if "=" not in word)]
    config = load_config(DeployConfig, [Path(name) for name in files], [word for word in words if "=" in word])
    if print_config:
        typer.echo(config_to_yaml(config, comments=True))
        raise typer.Exit
    if server is None and checkpoint is None:
        raise ValueError("give a checkpoint, or the address of a policy server with --server")
    api_key = None if api_key_file is None else api_key_file.read_text(encoding="utf-8").strip()
    own = None if checkpoint is None else make_server(Path(checkpoint), port=0)
    with own or nullcontext():
        client = PolicyClient(server or (own.url if own else ""), api_key=api_key)
        try:
            metadata = client.connect()
            if "contract" not in metadata:
                raise ValueError(f"the policy server sends no contract, only {sorted(metadata)}; use vla-rl serve")
            contract = DeploymentContract.from_document(metadata["contract"])
            reports = run_robot(config, contract, client, out, instruction, episodes)
        finally:
            client.close()
    console.print(summary(reports))
    console.print(f"recordings are in {out}")


if __name__ == "__main__":
    typer.run(main)
