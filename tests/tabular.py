"""A policy whose gradients can be worked out by hand, and episodes made to measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vla_rl.policy import Evaluation
from vla_rl.types import Decision, Episode, Observation, Start


def observation(state: int) -> Observation:
    return Observation(
        images=np.zeros((1, 1, 1, 3), np.uint8), proprio=np.array([state], np.float32), instruction="reach"
    )


class TabularPolicy(torch.nn.Module):
    """Free logits for each (state, token): (S, L, V). The observation's first proprio entry is the state."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits.clone())

    def evaluate(self, observations: Sequence[Observation], sample: np.ndarray, temperature: float) -> Evaluation:
        states = torch.tensor([int(item.proprio[0]) for item in observations])
        all_logprobs = torch.log_softmax(self.logits[states] / temperature, dim=-1)  # (B, L, V)
        logprobs = all_logprobs.gather(-1, torch.from_numpy(sample)[..., None])[..., 0]
        return Evaluation(logprobs=logprobs, entropy=-(all_logprobs.exp() * all_logprobs).sum(-1))

    @torch.no_grad()
    def draw(self, state: int, temperature: float, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Sample (L,) and its log-probabilities (L,)."""
        probabilities = torch.softmax(self.logits[state].double() / temperature, dim=-1).numpy()
        sample = np.array([generator.choice(len(p), p=p / p.sum()) for p in probabilities])
        evaluation = self.evaluate([observation(state)], sample[None], temperature)
        return sample, evaluation.logprobs[0].numpy()

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        np.save(folder / "logits.npy", self.logits.detach().numpy())


class PlainGradientStep:
    """Gradient descent that remembers the gradients it was given."""

    def __init__(self, policy: TabularPolicy, lr: float = 0.0) -> None:
        self._policy, self._lr = policy, lr
        self.gradients: list[torch.Tensor] = []

    def step(self) -> float:
        gradient = self._policy.logits.grad
        assert gradient is not None
        self.gradients.append(gradient.clone())
        with torch.no_grad():
            self._policy.logits -= self._lr * gradient
        self._policy.logits.grad = None
        return float(self.gradients[-1].norm())


def decision(
    sample: Sequence[int], logprobs: Sequence[float], num_steps: int, state: int = 0, temperature: float = 1.0
) -> Decision:
    return Decision(
        observation=observation(state),
        sample=np.array(sample),
        logprobs=np.array(logprobs, np.float32),
        temperature=temperature,
        num_steps=num_steps,
    )


def episode(
    decisions: Sequence[Decision] = (),
    *,
    success: bool = True,
    crashed: bool = False,
    group: int = 0,
    version: int = 0,
) -> Episode:
    start = Start(task="toy/reach", instruction="reach", split="train", index=group, init=np.zeros(2), seed=group)
    return Episode(
        start=start,
        episode_index=0,
        group_index=group,
        policy_version=version,
        decisions=list(decisions),
        success=success and not crashed,
        truncated=not success and not crashed,
    )


def played_episode(
    policy: TabularPolicy,
    num_steps: Sequence[int],
    *,
    success: bool,
    seed: int,
    temperature: float = 1.0,
    version: int = 0,
) -> Episode:
    """An episode whose samples really come from the policy; one decision per entry of `num_steps`, states in turn."""
    generator = np.random.default_rng(seed)
    decisions = []
    for index, steps in enumerate(num_steps):
        state = index % policy.logits.shape[0]
        sample, logprobs = policy.draw(state, temperature, generator)
        decisions.append(decision(list(sample), list(logprobs), steps, state, temperature))
    return episode(decisions, success=success, version=version)
