"""Dynamic sampling: learn only from groups with both successes and failures, and waste none of them.

A group is the list of episodes from one start. A group whose members all succeed (or all fail) has zero advantage
everywhere, so it is dropped and another is drawn. Groups beyond what an iteration needs are carried over to the next
ones for at most `max_carry_age` policy versions. Whatever is dropped is counted.

An episode that ended in neither success nor time limit has crashed. It says nothing about the policy and is removed
from its group; the rest is judged like any other group if at least two members remain, else the group is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from vla_rl.config import ConfigModel
from vla_rl.types import Episode

Group = list[Episode]

Verdict = Literal["kept", "too_few_successes", "too_many_successes", "crashed"]


class GroupFilterConfig(ConfigModel):
    """Dynamic sampling.

    Reference:
        Yu et al., "DAPO", arXiv 2503.14476, section 3.2; Li et al., "SimpleVLA-RL", arXiv 2509.09674. We differ in that
        surplus groups are kept for the next iteration, where the released code drops them.
    """

    enabled: bool = True
    """Drop groups outside the bounds. If false, every group is learned from that crashes have left two members."""
    min_success_rate: float = Field(default=0.1, ge=0, le=1)
    """Lowest success rate of a group that is kept. SimpleVLA-RL: 0.1; of 8 episodes, at least one must succeed."""
    max_success_rate: float = Field(default=0.9, ge=0, le=1)
    """Highest success rate of a group that is kept. SimpleVLA-RL: 0.9; of 8 episodes, at least one must fail."""
    max_carry_age: int = Field(default=1, ge=0)
    """Surplus groups are used for up to this many policy versions after the one that drew them; 0 drops them."""
    max_carried_groups: int = Field(default=64, ge=0)
    """Surplus groups that are carried over at most; the newest stay."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_success_rate > self.max_success_rate:
            raise ValueError(
                f"min_success_rate={self.min_success_rate} is above max_success_rate={self.max_success_rate}: "
                "no group could be kept"
            )
        return self


def judge_group(group: Sequence[Episode], config: GroupFilterConfig) -> tuple[Verdict, Group]:
    """Whether to learn from a group.

    Args:
        group: All episodes of one start, crashed ones included.
        config: The bounds.

    Returns:
        The verdict, and the members that did not crash.
    """
    members = [episode for episode in group if episode.success or episode.truncated]
    if not members or (len(members) == 1 and len(group) > 1):
        return "crashed", members
    success_rate = _success_rate(members)
    if config.enabled and success_rate < config.min_success_rate:
        return "too_few_successes", members
    if config.enabled and success_rate > config.max_success_rate:
        return "too_many_successes", members
    return "kept", members


def _success_rate(members: Sequence[Episode]) -> float:
    return float(np.mean([episode.success for episode in members]))


class GroupBuffer:
    """Collects the groups of an iteration and carries surplus ones over.

    The trainer calls, per iteration: `begin_iteration`, then `add` with each finished group until `num_groups` is
    enough, `take`, and `metrics`.
    """

    def __init__(self, config: GroupFilterConfig) -> None:
        """An empty buffer."""
        self._config = config
        self._groups: list[Group] = []
        self._counts: Counter[str] = Counter()
        self._success_rates: list[float] = []

    @property
    def num_groups(self) -> int:
        """Groups that `take` could return now."""
        return len(self._groups)

    @property
    def groups(self) -> tuple[Group, ...]:
        """What the buffer holds, oldest first; between iterations, the carried groups (for a checkpoint)."""
        return tuple(self._groups)

    def restore(self, groups: Sequence[Group]) -> None:
        """Replace the contents by the carried groups of a checkpoint."""
        self._groups = [list(group) for group in groups]

    def begin_iteration(self, policy_version: int) -> None:
        """Drop what is too old or too much to be carried into this iteration, and start counting.

        Args:
            policy_version: Version of the policy that is about to act.
        """
        self._counts.clear()
        self._success_rates.clear()
        young = [g for g in self._groups if policy_version - g[0].policy_version <= self._config.max_carry_age]
        self._counts["dropped_too_old"] = len(self._groups) - len(young)
        first = max(0, len(young) - self._config.max_carried_groups)
        self._counts["dropped_surplus"] = first
        self._groups = young[first:]
        self._counts["carried"] = len(self._groups)

    def add(self, group: Sequence[Episode]) -> Verdict:
        """Judge a finished group (crashed episodes included) and keep it if it is worth learning from."""
        verdict, members = judge_group(group, self._config)
        self._counts["finished"] += 1
        self._counts["crashed_episodes"] += len(group) - len(members)
        if members:
            self._success_rates.append(_success_rate(members))
        if verdict == "kept":
            self._groups.append(members)
            self._counts["kept"] += 1
        else:
            self._counts[f"dropped_{verdict}"] += 1
        return verdict

    def take(self, num_groups: int) -> list[Group]:
        """Remove and return up to `num_groups` groups, oldest first; what stays is surplus for the next iteration."""
        taken, self._groups = self._groups[:num_groups], self._groups[num_groups:]
        self._counts["taken"] += len(taken)
        return taken

    def metrics(self) -> dict[str, float]:
        """Counts since `begin_iteration`, named "groups/...".

        `groups/success_rate` is the mean over all groups that finished in this iteration, before the filter;
        `groups/kept_fraction` the share of them that was kept. Both are absent if no group finished.
        """
        names = ("finished", "kept", "taken", "carried", "crashed_episodes", *_DROPPED)
        metrics = {f"groups/{name}": float(self._counts[name]) for name in names}
        metrics["groups/surplus"] = float(len(self._groups))
        if self._counts["finished"]:
            metrics["groups/kept_fraction"] = self._counts["kept"] / self._counts["finished"]
        if self._success_rates:
            metrics["groups/success_rate"] = float(np.mean(self._success_rates))
        return metrics


_DROPPED = (
    "dropped_too_few_successes",
    "dropped_too_many_successes",
    "dropped_crashed",
    "dropped_too_old",
    "dropped_surplus",
)
