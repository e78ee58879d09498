"""What an update learns from: the decisions of many episodes as flat arrays, and how they are split.

Shapes: B decisions, L sample elements ("tokens") of a decision, N episodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Shaped

from vla_rl.types import Episode, Observation

_SIDE_BY_SIDE = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch:
    """Decisions of N episodes, in order.

    Attributes:
        observations: What the policy saw; B of them.
        sample: What it drew; first axis B.
        old_logprobs: Log-probabilities when it drew, at `temperatures`.
        mask: Tokens whose control step was executed. Only these are learned from.
        advantages: Of the decision (in outcome methods: of its episode).
        episode_ids: Index 0..N-1 of the episode that the decision belongs to.
        temperatures: Sampling temperature of each decision.
        is_on_policy: Drawn by the very policy that is about to be updated (False for carried-over groups).
    """

    observations: tuple[Observation, ...]
    sample: Shaped[np.ndarray, "batch ..."]
    old_logprobs: Float32[np.ndarray, "batch tokens"]
    mask: Bool[np.ndarray, "batch tokens"]
    advantages: Float32[np.ndarray, " batch"]
    episode_ids: Int[np.ndarray, " batch"]
    temperatures: Float[np.ndarray, " batch"]
    is_on_policy: Bool[np.ndarray, " batch"]

    @property
    def num_decisions(self) -> int:
        """B."""
        return len(self.observations)

    @property
    def num_episodes(self) -> int:
        """N."""
        return int(self.episode_ids.max()) + 1

    @property
    def num_tokens(self) -> int:
        """Executed tokens."""
        return int(self.mask.sum())

    def minibatches(self, num_minibatches: int, generator: np.random.Generator) -> Iterator[Int[np.ndarray, " rows"]]:
        """Rows of each minibatch. Whole episodes are shuffled and dealt out; sizes differ by at most one episode.

        With fewer episodes than minibatches, each episode is a minibatch of its own.
        """
        order = generator.permutation(self.num_episodes)
        for episodes in np.array_split(order, min(num_minibatches, self.num_episodes)):
            yield np.flatnonzero(np.isin(self.episode_ids, episodes))

    def micro_batches(
        self, rows: Int[np.ndarray, " rows"], micro_batch_size: int
    ) -> Iterator[Int[np.ndarray, " micro"]]:
        """Split rows into at most `micro_batch_size` decisions of one temperature each; nothing is padded.

        Equal observations (the copies of a group at its start) become neighbours: policies that compute equal ones of
        a call once then do so in the update, too. All parts are of about the same size and, where there are rows
        enough, their number is a multiple of four, so that cores that work side by side finish together; it does not
        depend on the number of cores, as results must not.
        """
        rows = self._equal_ones_together(rows)
        for temperature in np.unique(self.temperatures[rows]):
            same = rows[self.temperatures[rows] == temperature]
            num_parts = _SIDE_BY_SIDE * -(-len(same) // (_SIDE_BY_SIDE * micro_batch_size))
            yield from np.array_split(same, min(num_parts, len(same)))

    def _equal_ones_together(self, rows: Int[np.ndarray, " rows"]) -> Int[np.ndarray, " rows"]:
        """Rows in the order in which the like of their observation comes first."""
        first: dict[tuple[bytes, str], int] = {}
        rank = [
            first.setdefault((observation.proprio.tobytes(), observation.instruction), i)
            for i, observation in enumerate(self.observations[row] for row in rows)
        ]
        return rows[np.argsort(rank, kind="stable")]


def make_batch(
    episodes: Sequence[Episode],
    advantages: Float[np.ndarray, " episodes"],
    *,
    tokens_per_step: int,
    policy_version: int,
) -> RolloutBatch:
    """Flatten episodes into a batch.

    Args:
        episodes: Finished episodes with at least one decision each.
        advantages: One per episode; shared by all of its decisions.
        tokens_per_step: Sample elements of one control step (token policies: the action's dimension).
        policy_version: Version of the policy that is about to be updated.

    Raises:
        ValueError: No episodes, an episode without executed steps, or a number of advantages that differs.
    """
    if len(episodes) != len(advantages):
        raise ValueError(f"{len(episodes)} episodes but {len(advantages)} advantages; one each is expected.")
    if not episodes:
        raise ValueError("a batch needs at least one episode; the group filter may have dropped all of them.")
    for episode in episodes:
        if episode.num_steps == 0:
            raise ValueError(f"episode {episode.episode_index} of '{episode.start.key}' has no executed control step.")
    lengths = [len(episode.decisions) for episode in episodes]
    decisions = [decision for episode in episodes for decision in episode.decisions]
    old_logprobs = np.stack([decision.logprobs for decision in decisions])
    num_executed = np.array([decision.num_steps for decision in decisions]) * tokens_per_step
    if num_executed.max() > old_logprobs.shape[1]:
        raise ValueError(
            f"{num_executed.max()} executed tokens in a sample of {old_logprobs.shape[1]}: "
            f"tokens_per_step={tokens_per_step} does not fit the policy."
        )
    is_on_policy = [episode.policy_version == policy_version for episode in episodes]
    return RolloutBatch(
        observations=tuple(decision.observation for decision in decisions),
        sample=np.stack([decision.sample for decision in decisions]),
        old_logprobs=old_logprobs,
        mask=np.arange(old_logprobs.shape[1])[None] < num_executed[:, None],
        advantages=np.repeat(advantages, lengths).astype(np.float32),
        episode_ids=np.repeat(np.arange(len(episodes)), lengths),
        temperatures=np.array([decision.temperature for decision in decisions], dtype=np.float64),
        is_on_policy=np.repeat(is_on_policy, lengths),
    )
