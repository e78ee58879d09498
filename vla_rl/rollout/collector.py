"""Runs episodes in the slots of a `VecEnv`: early exit, immediate refill, one policy batch for whichever slots wait.

While the policy infers for some slots, the worlds of the others simulate. Two ways to choose the batch:

- "ready": whatever waits. Best throughput where episodes or worlds are uneven. Which observations share a batch depends
  on timing, and with it the last bits of the logits, so sampled runs are not bit-reproducible.
- "waves": the slots are split into two fixed halves that take turns. Everything is a function of the seed, so an
  interrupted and resumed run equals an uninterrupted one; worlds of equal cost lose almost nothing.

Every random draw belongs to the episode (run seed, episode index), never to the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sim.vec_env import VecEnv
from vla_rl.distributed import torch_threads
from vla_rl.metrics import Timings
from vla_rl.policy import Policy, Sampling
from vla_rl.run import seed_sequence
from vla_rl.types import Decision, Episode, Observation, SimError, SlotResult, Start

Batching = Literal["ready", "waves"]


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeRequest:
    """An episode that is to be run."""

    start: Start
    episode_index: int
    group_index: int
    record_frames: bool = False


@dataclass(kw_only=True, eq=False)
class _Running:
    episode: Episode
    generator: np.random.Generator
    observation: Observation | None = None


@dataclass(kw_only=True, eq=False)
class Collector:
    """Runs episodes and hands each over as it ends.

    Attributes:
        env: The worlds.
        policy: The acting policy.
        execution_horizon: Control steps executed of each predicted chunk.
        run_seed: Seed of the run.
        batching: See the module's docstring.
        max_crashed_fraction: A run with more crashed episodes than this stops (checked from 20 episodes on).
    """

    env: VecEnv
    policy: Policy
    execution_horizon: int
    run_seed: int
    batching: Batching = "waves"
    max_crashed_fraction: float = 0.1
    timings: Timings = field(default_factory=Timings)
    num_crashed: int = 0
    num_finished: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.execution_horizon <= self.policy.action_horizon:
            raise ValueError(
                f"execution_horizon is {self.execution_horizon}, but the policy predicts {self.policy.action_horizon} "
                f"control steps; choose a value from 1 to {self.policy.action_horizon}"
            )
        if self.policy.action_dim != self.env.spec.action_dim:
            raise ValueError(
                f"the policy's actions have {self.policy.action_dim} entries, the suite's {self.env.spec.action_dim} "
                f"({', '.join(self.env.spec.action_names)}); use a policy that was made for this suite"
            )

    def run(
        self,
        next_request: Callable[[], EpisodeRequest | None],
        on_episode: Callable[[Episode | None, EpisodeRequest], None],
        sampling: Sampling,
        policy_version: int = 0,
    ) -> None:
        """Run until there is neither a request nor a running episode.

        Args:
            next_request: Asked whenever a slot is free; None means: nothing now (asked again when an episode ends).
            on_episode: Gets every finished episode, or None for one whose world crashed.
            sampling: How the policy draws its actions.
            policy_version: Written into the episodes.

        Raises:
            SimError: Too many worlds crashed.
        """
        run = _Run(self, next_request, on_episode, sampling, policy_version)
        with torch_threads(1):
            for slots in run.batches():
                self._serve(run, self.env.wait(slots))

    def _serve(self, run: _Run, results: list[SlotResult]) -> None:
        for result in results:
            self.timings.add("physics", result.physics_s)
            self.timings.add("render", result.render_s)
            run.take(result)
        run.fill_idle_slots()
        run.decide([result.slot for result in results])

    def count(self, crash: SimError | None) -> None:
        """Keep the books of crashes.

        Raises:
            SimError: Too many worlds crashed; the last crash is quoted.
        """
        self.num_finished += 1
        if crash is None:
            return
        self.num_crashed += 1
        if self.num_finished >= 20 and self.num_crashed > self.max_crashed_fraction * self.num_finished:
            raise SimError(
                f"{self.num_crashed} of {self.num_finished} episodes crashed, more than the allowed fraction "
                f"{self.max_crashed_fraction}; the last one: {crash}"
            ) from crash


class _Run:
    """The books of one `Collector.run`: which slot runs what."""

    def __init__(
        self,
        collector: Collector,
        next_request: Callable[[], EpisodeRequest | None],
        on_episode: Callable[[Episode | None, EpisodeRequest], None],
        sampling: Sampling,
        policy_version: int,
    ) -> None:
        self.collector = collector
        self.next_request = next_request
        self.on_episode = on_episode
        self.sampling = sampling
        self.policy_version = policy_version
        self.running: dict[int, _Running] = {}
        self.requests: dict[int, EpisodeRequest] = {}

    def batches(self) -> Iterator[Collection[int] | None]:
        """The slots to wait for, until nothing runs; None means any."""
        self.fill_idle_slots()
        turn = 0
        while self.running:
            if self.collector.batching == "ready":
                yield None
                continue
            wave = [slot for slot in sorted(self.running) if slot % 2 == turn]
            if wave:
                yield wave
            turn = 1 - turn

    def fill_idle_slots(self) -> None:
        for slot in range(self.collector.env.num_slots):
            if slot in self.running:
                continue
            request = self.next_request()
            if request is None:
                return
            self.requests[slot] = request
            self.running[slot] = _Running(
                episode=Episode(
                    start=request.start,
                    episode_index=request.episode_index,
                    group_index=request.group_index,
                    policy_version=self.policy_version,
                ),
                generator=np.random.default_rng(
                    seed_sequence(self.collector.run_seed, "episode", request.episode_index)
                ),
            )
            self.collector.env.reset(slot, request.start, request.record_frames)

    def take(self, result: SlotResult) -> None:
        """Book what a slot answered; a finished episode is handed over and its slot is free."""
        running = self.running[result.slot]
        running.observation = result.observation
        if result.step is not None:
            episode = running.episode
            episode.decisions[-1].num_steps = result.step.num_steps
            episode.success, episode.truncated = result.step.success, result.step.truncated
            episode.frames.extend(result.step.frames)
        if result.error is None and not (result.step is not None and result.step.is_done):
            return
        del self.running[result.slot]
        self.collector.count(result.error)
        self.on_episode(None if result.error else running.episode, self.requests.pop(result.slot))

    def decide(self, slots: Collection[int]) -> None:
        """One policy call for all of these slots that have an observation, then their chunks go out."""
        waiting = [
            (slot, r) for slot in slots if (r := self.running.get(slot)) is not None and r.observation is not None
        ]
        if not waiting:
            return
        observations = [r.observation for _, r in waiting if r.observation is not None]
        with self.collector.timings.measure("inference"):
            output = self.collector.policy.act(observations, self.sampling, [r.generator for _, r in waiting])
        for i, (slot, r) in enumerate(waiting):
            r.episode.decisions.append(
                Decision(
                    observation=observations[i],
                    sample=output.sample[i],
                    logprobs=output.logprobs[i],
                    temperature=self.sampling.temperature,
                )
            )
            r.observation = None
            self.collector.env.step(slot, output.actions[i, : self.collector.execution_horizon])
