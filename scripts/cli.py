"""The console command `vla-rl <verb>`: one verb per script of this folder."""

from __future__ import annotations

import sys

import typer

from robots.robot import RobotError
from scripts import (
    bench_policy,
    bench_sim,
    bench_train,
    calibrate_response,
    collect_demos,
    compare,
    doctor,
    evaluate,
    export,
    quickstart,
    run_robot,
    serve,
    sft,
    train,
)
from scripts.progress import console
from scripts.run_config import field_table
from vla_rl.serving.client import PolicyError
from vla_rl.types import SimError, TrainingError

app = typer.Typer(
    help="Reinforcement learning of vision-language-action policies in MuJoCo worlds.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
EVERYTHING = field_table("seed", "device", "suite", "policy", "compute", "demos", "sft", "rl", "rollout", "evaluation")
app.command("quickstart", epilog=EVERYTHING)(quickstart.main)
app.command("demos", epilog=field_table("suite", "demos", "seed"))(collect_demos.main)
app.command("sft", epilog=field_table("suite", "policy", "compute", "sft", "seed", "device"))(sft.main)
app.command("train", epilog=field_table("suite", "policy", "compute", "rl", "rollout", "seed", "device"))(train.main)
app.command("evaluate", epilog=field_table("suite", "policy", "compute", "evaluation", "rollout", "seed", "device"))(
    evaluate.main
)
app.command("compare")(compare.main)
app.command("run-robot")(run_robot.main)
app.command("calibrate-response")(calibrate_response.main)
app.command("export")(export.main)
app.command("serve")(serve.main)
app.command("doctor", epilog=EVERYTHING)(doctor.main)
app.command("bench-policy", epilog=field_table("suite", "policy", "compute", "rl", "device"))(bench_policy.main)
app.command("bench-sim")(bench_sim.main)
app.command("bench-train", epilog=EVERYTHING)(bench_train.main)


_USER_ERRORS = (
    ValueError,
    OSError,
    ImportError,
    FloatingPointError,
    SimError,
    TrainingError,
    PolicyError,
    RobotError,
)


def main() -> None:
    """Run a verb; a user's mistake ends in one clear message, not in a traceback."""
    try:
        app()
    except _USER_ERRORS as error:
        console.print(f"error: {error}", style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
