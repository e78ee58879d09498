"""vla-rl run-robot: a checkpoint on a robot, through policy server, runtime and safety chain."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import Field

from robots.cameras import CameraConfig, make_camera
from robots.contract import DeploymentContract
from robots.franka import FrankaRobot
from robots.franka_config import FrankaConfig
from robots.recorder import Recorder
from robots.robot import Camera, Robot
from robots.run_types import Answer, EpisodeReport, Infer, InferenceError, RuntimeConfig, control_period_s
from robots.runtime import Runtime
from robots.safety import SafetyChain, SafetyConfig
from robots.sim_robot import SimRobot, sim_cameras
from robots.watchdog import Watchdog
from scripts.progress import console
from scripts.serve import make_server
from sim.suites import SuiteConfig, make_suite
from sim.tabletop.suite import TabletopConfig
from vla_rl.config import ConfigModel, load_config
from vla_rl.config_text import config_to_yaml
from vla_rl.evaluation.intervals import wilson_interval
from vla_rl.rollout.sources import evaluation_starts
from vla_rl.serving.chunking import Blend, ChunkBuffer
from vla_rl.serving.client import PolicyClient, PolicyError
from vla_rl.types import Split


class SimRobotConfig(ConfigModel):
    """A world of a suite as the robot."""

    type: Literal["sim"] = "sim"
    """Which robot."""
    suite: SuiteConfig = TabletopConfig()
    """Worlds and tasks; cameras as in training."""
    split: Split = "test"
    """Pool of starts."""
    starts_per_task: int = Field(default=13, ge=1)
    """Episodes per task, each from another start."""
    pace: Literal["lockstep", "real_time"] = "lockstep"
    """"lockstep": the world waits for the policy, and every episode is the one that `vla-rl evaluate` would run.
    "real_time": it moves on by itself."""
    added_latency_s: float = Field(default=0.0, ge=0)
    """Time by which every answer of the policy is delayed."""


class DeployConfig(ConfigModel):
    """Everything about a run on a robot, besides the checkpoint."""

    robot: Annotated[SimRobotConfig | FrankaConfig, Field(discriminator="type")] = SimRobotConfig()
    """Which robot."""
    cameras: tuple[CameraConfig, ...] = ()
    """Real cameras, by the contract's names; the simulated robot brings its own."""
    safety: SafetyConfig
    """Limits; the workspace has no default."""
    runtime: RuntimeConfig = RuntimeConfig()
    """Modes, deadlines, recoveries."""
    blend: Blend = "latest"
    """What counts where an old and a new chunk overlap."""


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
        case FrankaConfig():
            if not instruction:
                raise ValueError("a real robot needs to be told what to do: --instruction 'pick up the red cube'")
            robot = FrankaRobot(config.robot)
            cameras = [make_camera(entry) for entry in config.cameras]
            with _runtime(config, contract, client, robot, cameras, folder) as runtime:
                for line in runtime.preflight():
                    report_line(line)
                return [_real_episode(runtime, instruction, report_line) for _ in range(num_episodes or 1)]


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
    starts = evaluation_starts(suite, robot_config.split, robot_config.starts_per_task)[:num_episodes]
    robot = SimRobot(suite.make_world(), contract, is_lockstep=robot_config.pace == "lockstep")
    reports = []
    robot.begin(starts[0])
    with _runtime(
        config,
        contract,
        client,
        robot,
        sim_cameras(robot, contract),
        folder,
        robot.outcome,
        robot_config.added_latency_s,
    ) as runtime:
        for line in runtime.preflight():
            report_line(line)
        for start in starts:
            robot.begin(start)
            report = runtime.run_episode(start.instruction)
            report_line(f"{start.key}: {report.outcome} after {report.num_steps} steps  {report.detail}")
            reports.append(report)
            runtime.acknowledge()  # a world that crashed, or an episode that ended in a fault, is put aside
    return reports


@contextmanager
def _runtime(
    config: DeployConfig,
    contract: DeploymentContract,
    client: PolicyClient,
    robot: Robot,
    cameras: Sequence[Camera],
    folder: Path,
    outcome: Callable[[], str | None] = lambda: None,
    added_latency_s: float = 0.0,
) -> Iterator[Runtime]:
    """A runtime whose emergency stop hangs on SIGINT and SIGTERM; closed at the end, whatever happens."""
    runtime = Runtime(
        robot,
        cameras,
        _inference(client, added_latency_s),
        SafetyChain(contract, config.safety, robot.description),
        ChunkBuffer(control_period_s(contract, config.runtime), config.blend),
        contract,
        config.runtime,
        watchdog=None if robot.description.is_lockstep else Watchdog(),
        recorder=Recorder(folder, contract.state_names, len(contract.action.names)),
        is_episode_over=outcome,
    )
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, lambda *_: runtime.emergency_stop())
        yield runtime
    finally:
        runtime.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _real_episode(runtime: Runtime, instruction: str, report_line: Callable[[str], None]) -> EpisodeReport:
    """One episode with a person beside the robot, who starts it and says how it went."""
    typer.prompt("hands off the robot; press Enter to start", default="", show_default=False)
    report = runtime.run_episode(instruction)
    report_line(f"{report.outcome} after {report.num_steps} steps; {report.cadence}  {report.detail}")
    if report.outcome in ("stopped", "failure"):
        is_solved = typer.confirm("was the task solved?")
        report = replace(report, outcome="success" if is_solved else "failure")
        runtime.mark_last_episode(report.outcome)
    if report.outcome == "fault":
        typer.prompt("see to the robot, then press Enter to clear the fault", default="", show_default=False)
        runtime.acknowledge()
    return report


def _inference(client: PolicyClient, added_latency_s: float) -> Infer:
    def infer(observation: dict[str, Any], deadline_s: float) -> Answer:
        started = time.monotonic()
        try:
            answer = client.infer(observation, deadline_s=deadline_s)
        except PolicyError as error:
            raise InferenceError(str(error)) from error
        time.sleep(added_latency_s)
        if time.monotonic() - started > deadline_s:
            raise InferenceError(f"the answer took longer than {deadline_s:g} s")
        return answer

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
            contract = DeploymentContract.model_validate(metadata["contract"])
            reports = run_robot(config, contract, client, out, instruction, episodes)
        finally:
            client.close()
    console.print(summary(reports))
    console.print(f"recordings are in {out}")


if __name__ == "__main__":
    typer.run(main)
