"""Any robosuite environment by name: one Panda under OSC_POSE in our kernel, all else in robosuite's own step."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import mujoco
import numpy as np
from pydantic import Field, field_validator

from sim.adapters.replay_world import ReplayWorld
from sim.adapters.robosuite_envs import INSTRUCTIONS, SeededEnv, check_names, import_robosuite
from sim.adapters.robosuite_scene import RobosuiteScene, kernel_obstacle
from sim.adapters.robosuite_stepped import RobosuiteStepped, action_names, proprio_names
from sim.adapters.starts import start_seed
from sim.model import RenderOptions, substeps_per_control_step
from sim.mujoco_world import ACTION_MEANING, ACTION_NAMES, PROPRIO_NAMES, PROPRIO_UNITS, MujocoWorld
from vla_rl.config import ConfigModel
from vla_rl.types import EnvSpec, Split, Start

_OWN_OPTIONS = {
    "robots": "robots",
    "controller_configs": "controller",
    "control_freq": "control_rate_hz",
    "horizon": "horizon",
    "camera_names": "cameras",
    "camera_heights": "image_size",
    "camera_widths": "image_size",
    "hard_reset": "hard_reset",
    **dict.fromkeys(("ignore_done", "has_renderer", "has_offscreen_renderer", "use_camera_obs")),
}
"""Constructor arguments that the suite sets, and the field to use in their place."""


class RobosuiteConfig(ConfigModel):
    """Choices of the robosuite suite."""

    type: Literal["robosuite"] = "robosuite"
    """Which suite."""
    tasks: tuple[str, ...] = Field(default=("Lift",), min_length=1)
    """robosuite's names of the environments: Lift, Stack, NutAssembly, PickPlaceCan, Door, ..."""
    robots: tuple[str, ...] = Field(default=("Panda",), min_length=1, max_length=2)
    """robosuite's names of the robots: one, or two for the two-arm tasks."""
    controller: Literal["OSC_POSE", "OSC_POSITION", "JOINT_POSITION", "JOINT_VELOCITY", "JOINT_TORQUE"] = "OSC_POSE"
    """robosuite's default controller of this name; one Panda under OSC_POSE runs in our kernel."""
    kernel: bool = True
    """Run in our kernel what can; false takes robosuite's own step for everything."""
    hard_reset: bool = False
    """Compile the model anew at each reset, as robosuite does by default: some environments draw the sizes of objects
    again. Takes a second or so, and goes through robosuite's own step."""
    cameras: tuple[str, ...] = Field(default=("agentview",), min_length=1)
    """Cameras of an observation, in this order; all tasks have agentview, frontview, birdview, robot0_eye_in_hand."""
    image_size: int = Field(default=128, ge=16, le=1024)
    """Height and width of the images in pixels."""
    horizon: int = Field(default=400, ge=1)
    """Control steps until an episode is truncated."""
    control_rate_hz: float = Field(default=20.0, gt=0)
    """Control steps per second; a control period is a multiple of 2 ms."""
    instructions: dict[str, str] = Field(default_factory=dict)
    """Sentence of a task by its name, in place of the built-in one; environments of others have no built-in one."""
    env_options: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the environments' constructors, e.g. table_full_size."""
    modules: tuple[str, ...] = ()
    """Modules to import first, which define environments of their own."""

    @field_validator("tasks")
    @classmethod
    def _take_full_names(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(task.removeprefix("robosuite/") for task in tasks)

    @field_validator("env_options")
    @classmethod
    def _check_env_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        for name in options:
            if name in _OWN_OPTIONS:
                instead = f"; use the field {_OWN_OPTIONS[name]!r}" if _OWN_OPTIONS[name] else ""
                raise ValueError(f"{name!r} is set by the suite{instead}")
        return options


@dataclass(frozen=True, kw_only=True, eq=False)
class _Loaded:
    """What is known about a task once its environment has been made; also what there is to draw (a `Drawable`)."""

    mj_model: mujoco.MjModel
    scene: RobosuiteScene | None
    obstacle: str | None
    proprio_names: tuple[str, ...]
    action_names: tuple[str, ...]
    render: RenderOptions


class RobosuiteSuite:
    """A `Suite` of robosuite environments.

    All tasks have one interface and go one way: in our kernel (starts and success still are robosuite's), or through
    robosuite's own step. A task is loaded when it is first used.

    Args:
        config: Choices.

    Raises:
        ValueError: An unknown task or robot, or options that robosuite refuses.
        ImportError: A module of the config is missing.
    """

    name = "robosuite"

    def __init__(self, config: RobosuiteConfig | None = None) -> None:
        self.config = config if config is not None else RobosuiteConfig()
        robosuite = import_robosuite(self.config.modules)
        check_names("environment", self.config.tasks, list(robosuite.ALL_ENVIRONMENTS))
        check_names("robot", self.config.robots, list(robosuite.ALL_ROBOTS))
        for task in self.config.tasks:
            if task not in self.config.instructions and task not in INSTRUCTIONS:
                raise ValueError(f"{task} has no built-in instruction; write one under 'instructions.{task}'")
        self._controller = robosuite.load_controller_config(default_controller=self.config.controller)
        self._lock = threading.RLock()
        self._loaded: dict[str, _Loaded] = {}
        self._first = self._load(self.tasks[0])

    @property
    def tasks(self) -> Sequence[str]:
        """Full names of the selected tasks."""
        return tuple(dict.fromkeys(f"{self.name}/{task}" for task in self.config.tasks))

    @property
    def spec(self) -> EnvSpec:
        """LIBERO's layout for one Panda under OSC_POSE; images bottom row first, as robosuite returns them."""
        # Environments that run through robosuite's own step may have any arm, hand and controller.
        is_known = (self.config.robots, self._first.proprio_names) == (("Panda",), PROPRIO_NAMES)
        is_known = is_known and self._first.action_names == ACTION_NAMES
        return EnvSpec(
            cameras=self.config.cameras,
            image_size=(self.config.image_size, self.config.image_size),
            image_orientation="bottom_up",
            proprio_names=self._first.proprio_names,
            action_names=self._first.action_names,
            control_rate_hz=self.config.control_rate_hz,
            action_meaning=ACTION_MEANING if is_known else None,
            proprio_units=PROPRIO_UNITS if is_known else (),
        )

    def obstacle(self, task: str) -> str | None:
        """Why a task goes through robosuite's own step; None if it runs in our kernel.

        Raises:
            ValueError: The task is not among the selected ones.
        """
        return self._load(task).obstacle

    @property
    def horizon(self) -> int:
        """Time limit in control steps."""
        return self.config.horizon

    def start(self, task: str, split: Split, index: int) -> Start:
        """The start with this name: what robosuite's own reset draws with a seed made of the name.

        Raises:
            ValueError: Unknown task or split, or a negative index.
        """
        seed = start_seed(task, self.tasks, split, index)
        scene = self._load(task).scene
        short = task.removeprefix(f"{self.name}/")
        return Start(
            task=task,
            instruction=self.config.instructions.get(short) or INSTRUCTIONS[short],
            split=split,
            index=index,
            init=np.zeros(0) if scene is None else scene.initial_state(seed),
            seed=seed,
        )

    def make_world(self) -> MujocoWorld | ReplayWorld:
        """A world for any of the selected tasks."""
        if self._first.scene is not None:
            return MujocoWorld(self._scene, self.spec, self.config.horizon, robosuite_timing=True)
        env = RobosuiteStepped(self._make_env, self._load)
        return ReplayWorld(env, self.spec, self.config.horizon)

    def make_expert(self, task: str, rng: np.random.Generator) -> NoReturn:
        """There is none.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"robosuite's tasks have no scripted expert; collect demonstrations of {task} another way")

    def _scene(self, task: str) -> RobosuiteScene:
        scene = self._load(task).scene
        assert scene is not None, "all tasks of a suite go the way of the first"
        return scene

    def _load(self, task: str) -> _Loaded:
        with self._lock:
            if task not in self._loaded:
                if task not in self.tasks:
                    raise ValueError(f"unknown task {task!r}; this suite has: {', '.join(self.tasks)}")
                loaded = self._describe(task)
                self._check_like_first(task, loaded)
                self._loaded[task] = loaded
            return self._loaded[task]

    def _describe(self, task: str) -> _Loaded:
        seeded = self._make_env(task)
        env, mj_model = seeded.env, seeded.mj_model
        substeps_per_control_step(mj_model.opt.timestep, self.config.control_rate_hz)  # refuses what does not divide
        obstacle = self._obstacle_in_config() or kernel_obstacle(seeded)
        options = RenderOptions()
        mj_model.vis.quality.offsamples = options.samples
        cameras = [mj_model.camera(i).name for i in range(mj_model.ncam)]
        if missing := [camera for camera in self.config.cameras if camera not in cameras]:
            raise ValueError(f"{task} has no camera {', '.join(missing)}; cameras: {', '.join(cameras)}")
        return _Loaded(
            mj_model=mj_model,
            scene=None if obstacle else RobosuiteScene(seeded, self.config.control_rate_hz),
            obstacle=obstacle,
            proprio_names=proprio_names(env),
            action_names=action_names(env),
            render=options,
        )

    def _obstacle_in_config(self) -> str | None:
        config = self.config
        if not config.kernel:
            return "the config switches the kernel off"
        if config.robots != ("Panda",) or config.controller != "OSC_POSE":
            return f"{' and '.join(config.robots)} under {config.controller} is not one Panda under OSC_POSE"
        if config.hard_reset:
            return "hard_reset compiles a model for each start"
        if config.env_options.get("initialization_noise") is not None:
            return "initialization_noise gives each start a nullspace posture of its own"
        return None

    def _check_like_first(self, task: str, loaded: _Loaded) -> None:
        first = next(iter(self._loaded.values()), loaded)
        for what in ("proprio_names", "action_names"):
            if getattr(loaded, what) != getattr(first, what):
                raise ValueError(
                    f"{task} has {what} {getattr(loaded, what)}, but {self.tasks[0]} has {getattr(first, what)}; "
                    "tasks with different interfaces need suites of their own"
                )
        if (loaded.scene is None) != (first.scene is None):
            path, other = (loaded.obstacle, task) if loaded.obstacle else (first.obstacle, self.tasks[0])
            raise ValueError(
                f"{other} needs robosuite's own step ({path}), the other tasks run in the kernel; select them apart or "
                "set kernel=false"
            )

    def _make_env(self, task: str) -> SeededEnv:
        name, num_robots = task.removeprefix(f"{self.name}/"), len(self.config.robots)
        options = {
            "robots": list(self.config.robots) if num_robots > 1 else self.config.robots[0],
            "controller_configs": [self._controller] * num_robots if num_robots > 1 else self._controller,
            "control_freq": self.config.control_rate_hz,
            "ignore_done": True,
            "hard_reset": self.config.hard_reset,
            "has_renderer": False,
            "has_offscreen_renderer": False,
            "use_camera_obs": False,
            "initialization_noise": None,
            **self.config.env_options,
        }
        return SeededEnv(name, options, seed=zlib.crc32(task.encode()))
