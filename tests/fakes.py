"""Small stand-ins: worlds that are arithmetic, policies that are formulas, an untrained policy, made-up statistics."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from vla_rl.policies.compute import ComputeConfig
from vla_rl.policies.normalization import NormStats, RangeStats
from vla_rl.policies.openvla.config import NanoSizes, OpenVLAConfig, Surroundings
from vla_rl.policies.openvla.loading import new_openvla
from vla_rl.policies.openvla.policy import OpenVLAPolicy
from vla_rl.policies.tiny_vla import TinyVLA, TinyVLAConfig
from vla_rl.policies.word_tokenizer import WordTokenizer
from vla_rl.policy import ActOutput, Policy, Sampling
from vla_rl.types import EnvSpec, Observation, SimError, SlotResult, Split, Start, StepResult

# --- Worlds that are arithmetic ------------------------------------------------------------------------------------

FAKE_SPEC = EnvSpec(
    cameras=("front",),
    image_size=(2, 2),
    image_orientation="top_down",
    proprio_names=("start", "num_steps", "total"),
    action_names=("push", "nothing"),
    control_rate_hz=10.0,
)


def fake_start(
    index: int, *, goal: float = 3.0, crash_at: int = 0, task: str = "fake/push", split: Split = "train"
) -> Start:
    """Solved when the pushes add up to `goal`; the world crashes in control step `crash_at` (0: never)."""
    init = np.array([goal, crash_at], dtype=np.float64)
    return Start(task=task, instruction="push", split=split, index=index, init=init, seed=index)


class FakePool:
    """A pool of fake starts."""

    def __init__(self, *names: str, goal: float = 3.0) -> None:
        self.tasks: Sequence[str] = tuple(f"fake/{name}" for name in names)
        self._goal = goal

    def start(self, task: str, split: Split, index: int) -> Start:
        return fake_start(index, task=task, split=split, goal=self._goal)


@dataclass(kw_only=True, eq=False)
class _FakeSlot:
    start: Start
    record_frames: bool
    num_steps: int = 0
    total: float = 0.0
    is_over: bool = False
    answer: SlotResult | None = None


class FakeVecEnv:
    """A `VecEnv` of sums: `wait(None)` answers for some random slots, as a simulator whose worlds take turns would.

    It refuses whatever a real one would, and logs every call as (name, slot, start key), or ("wait", slots waited for,
    slots with a request under way).
    """

    spec = FAKE_SPEC

    def __init__(self, num_slots: int, horizon: int = 10, seed: int = 0) -> None:
        self.num_slots = num_slots
        self.log: list[tuple] = []
        self._horizon = horizon
        self._rng = np.random.default_rng(seed)
        self._slots: dict[int, _FakeSlot] = {}

    def reset(self, slot: int, start: Start, record_frames: bool = False) -> None:
        before = self._slots.get(slot)
        assert 0 <= slot < self.num_slots
        assert before is None or (before.is_over and before.answer is None), f"slot {slot} is not free"
        entry = self._slots[slot] = _FakeSlot(start=start, record_frames=record_frames)
        entry.answer = SlotResult(slot=slot, observation=self._observe(entry), step=None, physics_s=1.0, render_s=2.0)
        self.log.append(("reset", slot, start.key))

    def step(self, slot: int, chunk: np.ndarray) -> None:
        entry = self._slots[slot]
        assert entry.answer is None, f"slot {slot} has not been waited for"
        assert not entry.is_over, f"the episode in slot {slot} is over"
        assert chunk.shape[1] == FAKE_SPEC.action_dim
        self.log.append(("step", slot, entry.start.key))
        entry.answer = self._run(slot, entry, chunk)

    def _run(self, slot: int, entry: _FakeSlot, chunk: np.ndarray) -> SlotResult:
        goal, crash_at = entry.start.init
        num_before = entry.num_steps
        for action in chunk:
            entry.num_steps += 1
            entry.total += action[0]
            if entry.num_steps == crash_at:
                entry.is_over = True
                error = SimError(f"{entry.start.key} crashed at control step {crash_at:g}")
                return SlotResult(slot=slot, observation=None, step=None, error=error)
            success, is_last = entry.total >= goal, entry.num_steps == self._horizon
            if success or is_last:
                break
        entry.is_over = bool(success or is_last)
        num_steps = entry.num_steps - num_before
        image = np.full((2, 2, 3), entry.num_steps, dtype=np.uint8)
        step = StepResult(
            num_steps=num_steps,
            success=bool(success),
            truncated=bool(is_last and not success),
            frames=(image,) * num_steps if entry.record_frames else (),
        )
        observation = None if entry.is_over else self._observe(entry)
        return SlotResult(slot=slot, observation=observation, step=step, physics_s=1.0, render_s=2.0)

    def _observe(self, entry: _FakeSlot) -> Observation:
        proprio = np.array([entry.start.index, entry.num_steps, entry.total], dtype=np.float32)
        return Observation(images=np.zeros((1, 2, 2, 3), dtype=np.uint8), proprio=proprio, instruction="push")

    def wait(self, slots: Collection[int] | None = None, timeout_s: float = 60.0) -> list[SlotResult]:
        pending = sorted(slot for slot, entry in self._slots.items() if entry.answer is not None)
        assert pending, "nothing to wait for"
        if slots is None:
            slots = self._rng.choice(pending, size=self._rng.integers(1, len(pending) + 1), replace=False).tolist()
        assert set(slots) <= set(pending), f"slots {slots} have nothing under way; pending: {pending}"
        self.log.append(("wait", sorted(slots), pending))
        results = []
        for slot in sorted(slots):
            answer, self._slots[slot].answer = self._slots[slot].answer, None
            assert answer is not None
            results.append(answer)
        return results

    def close(self) -> None:
        pass


# --- Policies that are formulas ------------------------------------------------------------------------------------


@dataclass(eq=False)
class FakePolicy(Policy):
    """Pushes by 0 to 4 per control step: drawn from the episode's stream if stochastic, else a formula of the proprio.

    Either way a row's actions do not depend on the rest of the batch. `seen` holds the proprio of every observation.
    """

    is_stochastic: bool = False
    action_horizon: int = 4
    action_dim: int = 2
    seen: list[tuple[float, ...]] = field(default_factory=list)

    def act(
        self, observations: Sequence[Observation], sampling: Sampling, generators: Sequence[np.random.Generator]
    ) -> ActOutput:
        assert len(observations) == len(generators)
        self.seen += [tuple(observation.proprio.tolist()) for observation in observations]
        shape = (self.action_horizon, self.action_dim)
        if self.is_stochastic:
            draws = np.stack([generator.integers(5, size=shape) for generator in generators])
        else:
            steps = np.arange(self.action_horizon)[:, None]
            sums = np.array([int(observation.proprio.sum()) for observation in observations])
            draws = np.broadcast_to((7 * sums[:, None, None] + steps) % 5, (len(sums), *shape)).copy()
        logprobs = np.full((len(draws), draws[0].size), -np.log(5.0) / sampling.temperature, dtype=np.float32)
        return ActOutput(actions=draws.astype(np.float64), sample=draws.reshape(len(draws), -1), logprobs=logprobs)


# --- An untrained policy --------------------------------------------------------------------------------------------

INSTRUCTIONS = ("pick up the red cube", "pick up the blue cube", "put the red cube on the plate", "push the cube")
POLICY_SPEC = EnvSpec(
    cameras=("agentview",),
    image_size=(24, 32),
    image_orientation="bottom_up",
    proprio_names=("x", "y", "z", "rx", "ry", "rz", "finger_1", "finger_2"),
    action_names=("dx", "dy", "dz", "drx", "dry", "drz", "gripper"),
    control_rate_hz=20.0,
    proprio_units=("m", "m", "m", "rad", "rad", "rad", "m", "m"),
)


def range_stats(low: Sequence[float], high: Sequence[float], mask: Sequence[bool]) -> RangeStats:
    """Statistics with these 1 % and 99 % quantiles; the rest is made up to fit."""
    q01, q99 = np.array(low, dtype=np.float64), np.array(high, dtype=np.float64)
    middle, width = (q01 + q99) / 2, q99 - q01
    return RangeStats(
        q01=q01, q99=q99, min=q01 - 0.1 * width, max=q99 + 0.1 * width, mean=middle, std=width / 4, mask=np.array(mask)
    )


def norm_stats(spec: EnvSpec = POLICY_SPEC) -> NormStats:
    """Every action entry in [-0.5, 0.8] but the last one, which is left alone; proprioception in [-1, 1]."""
    dim, proprio_dim = spec.action_dim, spec.proprio_dim
    return NormStats(
        key="made_up",
        action=range_stats([-0.5] * dim, [0.8] * dim, [True] * (dim - 1) + [False]),
        proprio=range_stats([-1.0] * proprio_dim, [1.0] * proprio_dim, [True] * proprio_dim),
        num_transitions=100,
        num_trajectories=4,
    )


def tiny_policy(spec: EnvSpec = POLICY_SPEC, seed: int = 0, **config: object) -> TinyVLA:
    """An untrained tiny policy, the same for the same arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        settings = TinyVLAConfig(**config)  # type: ignore[arg-type]
        return TinyVLA(settings, spec, norm_stats(spec), WordTokenizer.from_instructions(INSTRUCTIONS)).eval()


def openvla_policy(
    spec: EnvSpec = POLICY_SPEC, seed: int = 0, compute: ComputeConfig | None = None, **config: object
) -> OpenVLAPolicy:
    """An untrained OpenVLA-OFT policy with 0.4 million parameters, the same for the same arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = NanoSizes(
            image_size=28,
            vision_dim=32,
            vision_depth=2,
            vision_heads=2,
            language_dim=48,
            language_layers=2,
            language_heads=3,
        )
        settings = OpenVLAConfig(sizes=sizes, **config)  # type: ignore[arg-type]
        surroundings = Surroundings(config=settings, spec=spec, suites=["made_up"])
        return new_openvla(surroundings, INSTRUCTIONS, norm_stats(spec), compute or ComputeConfig()).eval()


def random_observations(spec: EnvSpec, num: int, seed: int = 0) -> list[Observation]:
    """Noise images with the instructions in turn."""
    rng = np.random.default_rng(seed)
    shape = (len(spec.cameras), *spec.image_size, 3)
    return [
        Observation(
            images=rng.integers(256, size=shape, dtype=np.uint8),
            proprio=rng.uniform(-1.2, 1.2, spec.proprio_dim).astype(np.float32),
            instruction=INSTRUCTIONS[i % len(INSTRUCTIONS)],
        )
        for i in range(num)
    ]


def two_cameras(spec: EnvSpec = POLICY_SPEC) -> EnvSpec:
    """The interface with a camera on the hand."""
    return replace(spec, cameras=("agentview", "robot0_eye_in_hand"))
