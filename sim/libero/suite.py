"""LIBERO and LIBERO-PRO as a suite: any of their tasks, seen through LIBERO's cameras."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from pydantic import Field

from sim.libero.expert import LiberoExpert
from sim.libero.package import LiberoTask, find_tasks
from sim.libero.scene import CONTROL_RATE_HZ, LIBERO_SAMPLES, LiberoScene, MeshQuality
from sim.libero.starts import TaskStarts
from sim.mujoco_world import ACTION_MEANING, ACTION_NAMES, PROPRIO_NAMES, PROPRIO_UNITS, MujocoWorld
from sim.rendering import use_raster_threads
from vla_rl.config import ConfigModel
from vla_rl.types import EnvSpec, Split, Start

HORIZONS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Control steps of an episode in OpenVLA's evaluations; variants of a suite take the suite's."""
LONGEST_HORIZON = 520


class LiberoConfig(ConfigModel):
    """Choices of the LIBERO suites."""

    type: Literal["libero"] = "libero"
    """Which suite."""
    tasks: tuple[str, ...] = Field(default=("libero_spatial",), min_length=1)
    """"<suite>", "<suite>/<index>" or "<suite>/<task name>"; suites of different kinds may be mixed."""
    cameras: tuple[Literal["agentview", "robot0_eye_in_hand"], ...] = Field(default=("agentview",), min_length=1)
    """Cameras of an observation, in this order: "agentview" faces the robot, "robot0_eye_in_hand" is on the hand."""
    image_size: int = Field(default=256, ge=16, le=1024)
    """Height and width of the images in pixels."""
    mesh_quality: MeshQuality = "full"
    """"full" draws LIBERO's own meshes; "lite" simplified ones, several times faster on a CPU but not pixel-exact."""
    samples: int = Field(default=LIBERO_SAMPLES, ge=0, le=16)
    """Anti-aliasing samples per pixel: LIBERO's pictures have 4; 0 draws up to twice as fast in software."""
    starts: Literal["generated", "published"] = "generated"
    """Training and validation starts: drawn from the task's placement sampler, or the 50 published initial states that
    the test uses (as papers do; then training has seen the test starts)."""
    settle_steps: int = Field(default=10, ge=0)
    """Control steps in which objects fall into place before an episode begins; published evaluations: 10."""
    horizon: int | None = Field(default=None, ge=1)
    """Control steps until an episode is truncated; null: what OpenVLA's evaluations use (220 to 520, by suite)."""


class LiberoSuite:
    """A `Suite` of LIBERO's tasks."""

    name = "libero"

    def __init__(self, config: LiberoConfig) -> None:
        """Find the tasks; their models are loaded when they are first needed.

        Raises:
            ImportError: LIBERO is not installed.
            ValueError: Unknown suite or task; lists what is there.
        """
        self.config = config
        self._tasks = {task.full_name: task for task in find_tasks(config.tasks)}
        use_raster_threads(os.cpu_count() or 1)
        self._scenes: dict[str, LiberoScene] = {}
        self._starts: dict[str, TaskStarts] = {}
        self._lock = threading.RLock()

    @property
    def tasks(self) -> Sequence[str]:
        """Full names of the selected tasks, e.g. "libero_spatial/5"."""
        return tuple(self._tasks)

    @property
    def spec(self) -> EnvSpec:
        """8 proprioceptive entries, 7 actions, 20 Hz; images bottom row first, as LIBERO returns them."""
        return EnvSpec(
            cameras=self.config.cameras,
            image_size=(self.config.image_size, self.config.image_size),
            image_orientation="bottom_up",
            proprio_names=PROPRIO_NAMES,
            action_names=ACTION_NAMES,
            control_rate_hz=CONTROL_RATE_HZ,
            action_meaning=ACTION_MEANING,
            proprio_units=PROPRIO_UNITS,
        )

    @property
    def horizon(self) -> int:
        """Time limit in control steps of the task with the longest."""
        return max(map(self.horizon_of, self.tasks))

    def horizon_of(self, task: str) -> int:
        """Time limit of a task in control steps."""
        if self.config.horizon is not None:
            return self.config.horizon
        suite = self._task(task).suite
        return next((steps for prefix, steps in HORIZONS.items() if suite.startswith(prefix)), LONGEST_HORIZON)

    def scene(self, task: str) -> LiberoScene:
        """The scene of a selected task; compiled at the very first use (seconds), then loaded from the cache.

        Raises:
            ValueError: The task is not among the selected ones.
        """
        with self._lock:
            if task not in self._scenes:
                self._scenes[task] = LiberoScene(self._task(task), self.config.mesh_quality, self.config.samples)
            return self._scenes[task]

    def start(self, task: str, split: Split, index: int) -> Start:
        """The start with this name. Test starts are the published ones; with `starts: published` so are all others.

        Training goes round the published starts: their number is the index modulo their count.

        Raises:
            ValueError: Unknown task or split, a negative index, or more test starts than were published.
        """
        if split not in get_args(Split) or index < 0:
            raise ValueError(f"no start {split!r}/{index}; splits: {', '.join(get_args(Split))}, indices from 0")
        starts = self._starts_of(task)
        if split == "test":
            return starts.published(split, index)
        if self.config.starts == "published":
            return starts.published(split, index % starts.num_published)
        return starts.generated(split, index)

    def make_world(self) -> MujocoWorld:
        """A world for any of the selected tasks."""
        return MujocoWorld(self.scene, self.spec, self.horizon_of, robosuite_timing=True)

    def make_expert(self, task: str, rng: np.random.Generator) -> LiberoExpert:
        """A demonstrator of one task with a style of its own.

        Raises:
            ValueError: There is no expert for this task.
        """
        return LiberoExpert(self.scene(task), rng)

    def _task(self, name: str) -> LiberoTask:
        if name not in self._tasks:
            raise ValueError(f"unknown task {name!r}; this suite has: {', '.join(self._tasks)}")
        return self._tasks[name]

    def _starts_of(self, task: str) -> TaskStarts:
        with self._lock:
            if task not in self._starts:
                self._starts[task] = TaskStarts(self.scene(task), self.make_world, self.config.settle_steps)
            return self._starts[task]
