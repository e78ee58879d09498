"""Any Gymnasium environment that shows images and takes continuous actions."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
from pydantic import Field, field_validator, model_validator

from sim.adapters.gymnasium_env import (
    RENDER,
    GymnasiumEnv,
    SuccessRule,
    check_action_space,
    checked_picture,
    entry,
)
from sim.adapters.replay_world import ReplayWorld
from sim.adapters.starts import start_seed
from vla_rl.config import ConfigModel
from vla_rl.types import EnvSpec, Split, Start


class GymnasiumConfig(ConfigModel):
    """Choices of the Gymnasium suite."""

    type: Literal["gymnasium"] = "gymnasium"
    """Which suite."""
    tasks: tuple[str, ...] = Field(min_length=1)
    """Gymnasium's ids of the environments, "module:Id-v0" if a module must be imported first. All tasks of a suite have
    the same interface."""
    instructions: dict[str, str]
    """Sentence of each task, by its id."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of `gymnasium.make`."""
    cameras: tuple[str, ...] = Field(default=(RENDER,), min_length=1)
    """What an observation shows, in this order: "render" (the environment's `render()`), keys of its observation that
    hold an image, or "observation" if the observation is an image."""
    image_size: int = Field(default=64, ge=16, le=1024)
    """Height and width of the images in pixels; other sizes are resized, so square ones keep their proportions."""
    proprio_keys: tuple[str, ...] = ()
    """Keys of the observation that make up the proprioceptive state, or "observation" if it is one vector."""
    success: SuccessRule = "is_success"
    """What counts as success: info["is_success"], info["success"], or the end of an episode with a positive reward."""
    horizon: int | None = Field(default=None, ge=1)
    """Control steps until an episode is truncated; null takes the environment's own `max_episode_steps`."""
    control_rate_hz: float | None = Field(default=None, gt=0)
    """Control steps per second; null takes the environment's `render_fps`."""

    @field_validator("kwargs")
    @classmethod
    def _check_kwargs(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        for name, instead in {"render_mode": "cameras", "max_episode_steps": "horizon"}.items():
            if name in kwargs:
                raise ValueError(f"{name!r} is set by the suite; use the field {instead!r}")
        return kwargs

    @model_validator(mode="after")
    def _check_instructions(self) -> GymnasiumConfig:
        for task in self.tasks:
            if task not in self.instructions:
                raise ValueError(f"{task} has no instruction; write one under 'instructions'")
        return self


@dataclass(frozen=True, kw_only=True)
class _Interface:
    """What a policy, and the world, must know about an environment."""

    action_dim: int
    proprio_names: tuple[str, ...]
    control_rate_hz: float
    horizon: int


class GymnasiumSuite:
    """A `Suite` of Gymnasium environments.

    A start is a seed, given to the environment's own reset. States are saved as the way that leads to them, see
    `sim/adapters/replay_world.py`. Makes each environment once to look at its spaces.

    Args:
        config: Choices.

    Raises:
        ValueError: An environment is unknown, or its actions, images, rates or interfaces do not fit.
        ImportError: Gymnasium is not installed.
    """

    name = "gymnasium"

    def __init__(self, config: GymnasiumConfig) -> None:
        if importlib.util.find_spec("gymnasium") is None:
            raise ImportError("Gymnasium environments need the package gymnasium. Run: pip install 'gymnasium>=1.0'")
        self.config = config
        interfaces = {task: self._look_at(task) for task in self.tasks}
        self._interface = next(iter(interfaces.values()))
        for task, interface in interfaces.items():
            if interface != self._interface:
                raise ValueError(
                    f"{task} has the interface {interface}, but {self.tasks[0]} has {self._interface}; tasks with "
                    "different interfaces need suites of their own"
                )

    @property
    def tasks(self) -> Sequence[str]:
        """Full names of the selected tasks."""
        return tuple(dict.fromkeys(f"{self.name}/{task}" for task in self.config.tasks))

    @property
    def spec(self) -> EnvSpec:
        """Images top row first; actions in [-1, 1] span the environment's bounds."""
        return EnvSpec(
            cameras=self.config.cameras,
            image_size=(self.config.image_size, self.config.image_size),
            image_orientation="top_down",
            proprio_names=self._interface.proprio_names,
            action_names=tuple(f"action_{i}" for i in range(self._interface.action_dim)),
            control_rate_hz=self._interface.control_rate_hz,
        )

    @property
    def horizon(self) -> int:
        """Time limit in control steps."""
        return self._interface.horizon

    def start(self, task: str, split: Split, index: int) -> Start:
        """The start with this name: a seed made of the name.

        Raises:
            ValueError: Unknown task or split, or a negative index.
        """
        seed = start_seed(task, self.tasks, split, index)
        instruction = self.config.instructions[task.removeprefix(f"{self.name}/")]
        return Start(task=task, instruction=instruction, split=split, index=index, init=np.zeros(0), seed=seed)

    def make_world(self) -> ReplayWorld:
        """A world for any of the selected tasks."""
        config = self.config
        env = GymnasiumEnv(self._make_env, config.cameras, config.proprio_keys, config.success)
        return ReplayWorld(env, self.spec, self._interface.horizon)

    def make_expert(self, task: str, rng: np.random.Generator) -> NoReturn:
        """There is none.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"Gymnasium's tasks have no scripted expert; collect demonstrations of {task} another way")

    def _make_env(self, task: str) -> Any:
        import gymnasium

        env_id = task.removeprefix(f"{self.name}/")
        kwargs = dict(self.config.kwargs)
        if RENDER in self.config.cameras:
            kwargs["render_mode"] = "rgb_array"
        try:
            return gymnasium.make(env_id, max_episode_steps=-1, disable_env_checker=True, **kwargs)  # -1: no limit
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"Gymnasium cannot make {env_id!r} with {kwargs}: {error}") from error

    def _look_at(self, task: str) -> _Interface:
        import gymnasium

        config, env = self.config, self._make_env(task)
        sample = env.observation_space.sample()
        for camera in config.cameras:
            if camera != RENDER:
                checked_picture(camera, entry(sample, camera))
        proprio_names = [f"{key}_{i}" for key in config.proprio_keys for i in range(entry(sample, key).size)]
        rate = config.control_rate_hz or env.metadata.get("render_fps")
        horizon = config.horizon or gymnasium.spec(env.spec.id).max_episode_steps
        action_dim = check_action_space(task, env.action_space)
        env.close()
        if rate is None:
            raise ValueError(f"{task} does not tell its control rate; set 'control_rate_hz'")
        if horizon is None:
            raise ValueError(f"{task} has no time limit of its own; set 'horizon'")
        return _Interface(
            action_dim=action_dim,
            proprio_names=tuple(proprio_names),
            control_rate_hz=float(rate),
            horizon=horizon,
        )
