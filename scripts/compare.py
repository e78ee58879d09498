"""vla-rl compare: two evaluation reports on the same starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.progress import console
from vla_rl.evaluation.compare import compare_reports
from vla_rl.evaluation.report import EvaluationReport


def main(
    first: Annotated[Path, typer.Argument(help="report.json, or the folder that holds it.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="The other one, on the same starts.", show_default=False)],
) -> None:
    """Compare two evaluations start by start (difference with interval, exact McNemar test)."""
    console.print(compare_reports(EvaluationReport.load(first), EvaluationReport.load(second)).to_markdown())


if __name__ == "__main__":
    typer.run(main)
