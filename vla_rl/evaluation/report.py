"""What an evaluation found, as data: one outcome per start, success rates with Wilson intervals, JSON and Markdown.

The outcomes are the truth; every rate is computed from them, so two reports can be compared start by start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from vla_rl.evaluation.intervals import Interval, wilson_interval
from vla_rl.run import atomic_path
from vla_rl.types import Split

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class StartOutcome:
    """What became of the one episode from one start.

    Attributes:
        task: Full task name.
        index: The start's position within (task, split).
        success: Solved within the time limit.
        num_steps: Control steps executed.
        crashed: The world failed; counts as a failure, so that no start drops out of a comparison.
    """

    task: str
    index: int
    success: bool
    num_steps: int
    crashed: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """Success on one task, or on all of them together.

    Attributes:
        task: Full task name, or "overall".
        num_starts: Episodes, one per start.
        num_successes: Solved ones.
        num_crashed: Episodes whose world failed; all of them count as failures.
        mean_steps: Control steps of the solved episodes on average; None if none was solved.
    """

    task: str
    num_starts: int
    num_successes: int
    num_crashed: int
    mean_steps: float | None

    @classmethod
    def from_outcomes(cls, task: str, outcomes: Sequence[StartOutcome]) -> Self:
        """Count outcomes."""
        solved = [outcome.num_steps for outcome in outcomes if outcome.success]
        return cls(
            task=task,
            num_starts=len(outcomes),
            num_successes=len(solved),
            num_crashed=sum(outcome.crashed for outcome in outcomes),
            mean_steps=sum(solved) / len(solved) if solved else None,
        )

    @property
    def success_rate(self) -> float:
        """Share of the starts that were solved, in [0, 1]."""
        return self.num_successes / self.num_starts

    @property
    def interval(self) -> Interval:
        """95 % Wilson interval of the success rate."""
        return wilson_interval(self.num_successes, self.num_starts)


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """One checkpoint on a fixed set of starts.

    Attributes:
        suite: Name of the suite.
        checkpoint: Where the policy came from, as the user named it.
        split: Pool of the starts.
        mode: How actions were chosen.
        temperature: Sampling temperature; 1.0 for greedy actions, where it has no effect.
        seed: Seed of the evaluation's random draws.
        outcomes: One per (task, index).
        seconds: Wall time of the evaluation.
        conditions: What else an episode depends on (time limit, difficulty, cameras, executed horizon); JSON values.
        versions: Package name -> version.
    """

    suite: str
    checkpoint: str
    split: Split
    mode: Literal["sample", "greedy"]
    temperature: float
    seed: int
    outcomes: tuple[StartOutcome, ...]
    seconds: float
    versions: Mapping[str, str]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an empty report and two outcomes of one start."""
        if not self.outcomes:
            raise ValueError("an evaluation report needs at least one outcome; got none: select at least one start")
        seen = set()
        for outcome in self.outcomes:
            start = (outcome.task, outcome.index)
            if start in seen:
                raise ValueError(
                    f"start {outcome.task}/{self.split}/{outcome.index} has two outcomes; expected one episode a start"
                )
            seen.add(start)

    @property
    def tasks(self) -> tuple[TaskResult, ...]:
        """Result of each task, in the order of their first outcome."""
        by_task: dict[str, list[StartOutcome]] = {}
        for outcome in self.outcomes:
            by_task.setdefault(outcome.task, []).append(outcome)
        return tuple(TaskResult.from_outcomes(task, outcomes) for task, outcomes in by_task.items())

    @property
    def overall(self) -> TaskResult:
        """Result over all starts."""
        return TaskResult.from_outcomes("overall", self.outcomes)

    def to_json(self) -> str:
        """The report with the derived rates beside the outcomes; `from_json` reads it back."""
        document = {
            "format_version": FORMAT_VERSION,
            **asdict(self),
            "overall": result_as_dict(self.overall),
            "tasks": [result_as_dict(result) for result in self.tasks],
        }
        document["outcomes"] = document.pop("outcomes")  # the long part last
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json`'s text; the derived rates in it are computed anew from the outcomes.

        Raises:
            ValueError: The text is not a report of this format.
        """
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"not an evaluation report of format {FORMAT_VERSION}; write it again with `vla-rl evaluate`"
            )
        try:
            fields = {name: document[name] for name in cls.__dataclass_fields__}
            fields["outcomes"] = tuple(StartOutcome(**outcome) for outcome in document["outcomes"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"broken evaluation report: {error}; write it again with `vla-rl evaluate`") from error
        return cls(**fields)

    def to_markdown(self) -> str:
        """A title, how it was measured, and a table with one row per task."""
        how = "greedy actions" if self.mode == "greedy" else f"sampled actions at temperature {self.temperature:g}"
        lines = [
            f"# Evaluation of {self.checkpoint}",
            "",
            f"Suite `{self.suite}`, {self.overall.num_starts} starts of the `{self.split}` split, one episode each, "
            f"{how}, seed {self.seed}, {self.seconds:.0f} s. Success with 95 % Wilson intervals.",
            "",
            "| task | success | 95 % interval | solved | steps when solved |",
            "|---|---|---|---|---|",
        ]
        lines += [_markdown_row(result) for result in (*self.tasks, self.overall)]
        if self.overall.num_crashed:
            lines += ["", f"{self.overall.num_crashed} episodes crashed and count as failures."]
        if self.conditions:
            listed = (f"{name} {json.dumps(value)}" for name, value in sorted(self.conditions.items()))
            lines += ["", f"Conditions: {', '.join(listed)}."]
        lines += ["", markdown_versions(self.versions)]
        return "\n".join(lines) + "\n"

    def save(self, folder: Path) -> None:
        """Write `report.json` and `report.md` into a folder, which is created if needed."""
        write_text_atomically(folder / "report.json", self.to_json())
        write_text_atomically(folder / "report.md", self.to_markdown())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a `report.json`, or the one inside a folder.

        Raises:
            FileNotFoundError: Nothing is there.
            ValueError: The file is not a report of this format; the message names it.
        """
        file = path / "report.json" if path.is_dir() else path
        try:
            return cls.from_json(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error


def result_as_dict(result: TaskResult) -> dict[str, Any]:
    """Counts, rate and interval of a result, for JSON."""
    interval = result.interval
    return {**asdict(result), "success": result.success_rate, "low": interval.low, "high": interval.high}


def markdown_interval(interval: Interval) -> str:
    """E.g. "79.4 to 88.3 %"."""
    return f"{100 * interval.low:.1f} to {100 * interval.high:.1f} %"


def markdown_versions(versions: Mapping[str, str]) -> str:
    """One line that names the packages."""
    return "Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) + "."


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new one, never a part; makes the folder if needed."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)


def _markdown_row(result: TaskResult) -> str:
    steps = "-" if result.mean_steps is None else f"{result.mean_steps:.0f}"
    return (
        f"| {result.task} | {100 * result.success_rate:.1f} % | {markdown_interval(result.interval)} "
        f"| {result.num_successes} of {result.num_starts} | {steps} |"
    )
