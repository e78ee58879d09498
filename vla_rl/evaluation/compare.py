"""Two checkpoints on the same starts: is the difference more than luck?"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Self

from vla_rl.evaluation.intervals import Interval, exact_mcnemar, paired_difference_interval
from vla_rl.evaluation.report import EvaluationReport, markdown_interval


@dataclass(frozen=True, kw_only=True)
class PairedResult:
    """How two policies did on the same starts of one task, or of all tasks together.

    Attributes:
        task: Full task name, or "overall".
        num_both: Starts that both solved.
        num_only_first: Starts that only the first solved.
        num_only_second: Starts that only the second solved.
        num_neither: Starts that neither solved.
    """

    task: str
    num_both: int
    num_only_first: int
    num_only_second: int
    num_neither: int

    @classmethod
    def from_pairs(cls, task: str, pairs: list[tuple[bool, bool]]) -> Self:
        """Count pairs of (first succeeded, second succeeded)."""
        counts = Counter(pairs)
        return cls(
            task=task,
            num_both=counts[True, True],
            num_only_first=counts[True, False],
            num_only_second=counts[False, True],
            num_neither=counts[False, False],
        )

    @property
    def num_starts(self) -> int:
        """Starts compared."""
        return self.num_both + self.num_only_first + self.num_only_second + self.num_neither

    @property
    def first_rate(self) -> float:
        """Success rate of the first, in [0, 1]."""
        return (self.num_both + self.num_only_first) / self.num_starts

    @property
    def second_rate(self) -> float:
        """Success rate of the second, in [0, 1]."""
        return (self.num_both + self.num_only_second) / self.num_starts

    @property
    def difference(self) -> float:
        """Second minus first, in [-1, 1]."""
        return (self.num_only_second - self.num_only_first) / self.num_starts

    @property
    def interval(self) -> Interval:
        """95 % interval of the difference (Newcombe's for paired data)."""
        return paired_difference_interval(self.num_both, self.num_only_first, self.num_only_second, self.num_neither)

    @property
    def p_value(self) -> float:
        """Two-sided, exact McNemar test."""
        return exact_mcnemar(self.num_only_first, self.num_only_second)

    def as_dict(self) -> dict[str, Any]:
        """Counts and everything computed from them, for JSON."""
        interval = self.interval
        return {
            **asdict(self),
            "first": self.first_rate,
            "second": self.second_rate,
            "difference": self.difference,
            "low": interval.low,
            "high": interval.high,
            "p_value": self.p_value,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two evaluation reports, paired start by start.

    Attributes:
        first: Checkpoint of the first report.
        second: Checkpoint of the second report.
        tasks: One result per task.
        overall: Result over all starts.
    """

    first: str
    second: str
    tasks: tuple[PairedResult, ...]
    overall: PairedResult

    def to_markdown(self) -> str:
        """A table with one row per task, and what it says."""
        lines = [
            f"# {self.second} against {self.first}",
            "",
            "| task | first | second | difference | 95 % interval | p |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_markdown_row(result) for result in (*self.tasks, self.overall)]
        return "\n".join([*lines, "", self.verdict()]) + "\n"

    def verdict(self) -> str:
        """One sentence on the overall difference."""
        result = self.overall
        evidence = (
            f"over {result.num_starts} starts: {result.num_only_second} solved only by the second, "
            f"{result.num_only_first} only by the first, exact McNemar p = {result.p_value:.2g}."
        )
        if result.p_value >= 0.05:
            return f"No difference shown {evidence}"
        return f"The {'second' if result.difference > 0 else 'first'} is better {evidence}"


def compare_reports(first: EvaluationReport, second: EvaluationReport) -> Comparison:
    """Pair two reports start by start.

    Raises:
        ValueError: The reports do not cover the same starts of the same suite and split under the same conditions.
    """
    for name in ("suite", "split", "conditions"):
        a, b = getattr(first, name), getattr(second, name)
        if a != b:
            raise ValueError(
                f"cannot compare: the reports differ in {name} ({a!r} and {b!r}); evaluate both on the same"
            )
    successes_first = {(outcome.task, outcome.index): outcome.success for outcome in first.outcomes}
    successes_second = {(outcome.task, outcome.index): outcome.success for outcome in second.outcomes}
    unpaired = sorted(successes_first.keys() ^ successes_second.keys())
    if unpaired:
        task, index = unpaired[0]
        raise ValueError(
            f"cannot compare: {len(unpaired)} starts are in one report only, e.g. {task}/{first.split}/{index}; "
            "evaluate both on the same starts"
        )
    pairs: dict[str, list[tuple[bool, bool]]] = {}
    for (task, index), success in successes_first.items():
        pairs.setdefault(task, []).append((success, successes_second[task, index]))
    return Comparison(
        first=first.checkpoint,
        second=second.checkpoint,
        tasks=tuple(PairedResult.from_pairs(task, task_pairs) for task, task_pairs in pairs.items()),
        overall=PairedResult.from_pairs("overall", [pair for task_pairs in pairs.values() for pair in task_pairs]),
    )


def _markdown_row(result: PairedResult) -> str:
    return (
        f"| {result.task} | {100 * result.first_rate:.1f} % | {100 * result.second_rate:.1f} % "
        f"| {100 * result.difference:+.1f} points | {markdown_interval(result.interval)} | {result.p_value:.2g} |"
    )
