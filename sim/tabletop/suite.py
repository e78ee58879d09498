"""The suite: which tasks, how hard, seen through which cameras. It makes starts and worlds."""

from __future__ import annotations

import difflib
import threading
import zlib
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float64
from pydantic import Field, field_validator

from sim.mujoco_world import ACTION_MEANING, ACTION_NAMES, PROPRIO_NAMES, PROPRIO_UNITS, MujocoWorld
from sim.tabletop.expert import ScriptedExpert
from sim.tabletop.instructions import instruction
from sim.tabletop.placement import HOVER, RANGES, ArmPoser, place_objects
from sim.tabletop.scene import AGENTVIEW, CONTROL_RATE_HZ
from sim.tabletop.task_scene import TabletopScene
from sim.tabletop.tasks import FAMILIES, TASKS, Difficulty, Task
from vla_rl.config import ConfigModel
from vla_rl.types import EnvSpec, Split, Start


class TabletopConfig(ConfigModel):
    """Choices of the tabletop suite."""

    type: Literal["tabletop"] = "tabletop"
    """Which suite."""
    tasks: tuple[str, ...] = (
        "pick_up_red_cube",
        "pick_up_blue_cube",
        "put_red_cube_on_plate",
        "put_blue_cube_on_plate",
    )
    """Task names, family names (pick_up, put_on, put_in, push_to, stack) or "all"; the default four share one model."""
    difficulty: Difficulty = "easy"
    """Number of objects and width of the placement; the levels are listed in `sim/tabletop/placement.py`."""
    cameras: tuple[Literal["agentview", "robot0_eye_in_hand"], ...] = Field(default=(AGENTVIEW,), min_length=1)
    """Cameras of an observation, in this order: "agentview" faces the robot, "robot0_eye_in_hand" is on the hand."""
    image_size: int = Field(default=64, ge=16, le=512)
    """Height and width of the images in pixels."""
    horizon: int = Field(default=80, ge=1)
    """Control steps (20 per second) until an episode is truncated; the scripted expert needs 25 to 55."""
    paraphrases: bool = False
    """Draw the wording of each start's instruction; otherwise each task has one canonical sentence."""
    randomise_arm: bool = True
    """Start with the gripper anywhere above the table; otherwise always in the same pose."""

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        select_tasks(names)
        return names


def select_tasks(names: Sequence[str]) -> tuple[Task, ...]:
    """The tasks that these names stand for, in the order of `TASKS`, each once.

    Raises:
        ValueError: A name is unknown; tells the nearest one and all others.
    """
    choices = ["all", *FAMILIES, *TASKS]
    for name in names:
        if name not in choices:
            nearest = difflib.get_close_matches(name, choices, n=1, cutoff=0.0)[0]
            raise ValueError(f"unknown task {name!r}; did you mean {nearest!r}? Choices: {', '.join(choices)}")
    if not names:
        raise ValueError(f"no task given; choices: {', '.join(choices)}")
    return tuple(task for task in TASKS.values() if not {"all", task.family, task.name}.isdisjoint(names))


class TabletopSuite:
    """A `Suite` of language-conditioned manipulation tasks with one Panda at a table."""

    name = "tabletop"

    def __init__(self, config: TabletopConfig | None = None) -> None:
        """Compile the models of the selected tasks (milliseconds)."""
        self.config = config if config is not None else TabletopConfig()
        selected = select_tasks(self.config.tasks)
        self._scenes = {f"{self.name}/{task.name}": TabletopScene(task, self.config.difficulty) for task in selected}
        model = next(iter(self._scenes.values())).model
        self._poser, self._poser_lock = ArmPoser(model.mj_model, model.grip_site), threading.Lock()
        self._home = self._poser.solve(HOVER)

    @property
    def tasks(self) -> Sequence[str]:
        """Full names of the selected tasks."""
        return tuple(self._scenes)

    @property
    def spec(self) -> EnvSpec:
        """LIBERO's layout: 8 proprioceptive entries, 7 actions, 20 Hz, bottom-up images."""
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
        """Time limit in control steps."""
        return self.config.horizon

    def scene(self, task: str) -> TabletopScene:
        """The scene of a selected task, by full name.

        Raises:
            ValueError: The task is not among the selected ones.
        """
        if task not in self._scenes:
            raise ValueError(f"unknown task {task!r}; this suite has: {', '.join(self._scenes)}")
        return self._scenes[task]

    def start(self, task: str, split: Split, index: int) -> Start:
        """The start with this name. Splits never share a random stream, so no start of one is in another.

        Raises:
            ValueError: Unknown task or split, or a negative index.
        """
        scene = self.scene(task)
        if split not in get_args(Split) or index < 0:
            raise ValueError(f"no start {split!r}/{index}; splits: {', '.join(get_args(Split))}, indices from 0")
        entropy = [zlib.crc32(part.encode()) for part in (task, split, self.config.difficulty)] + [index]
        layout_rng, arm_rng, words_rng, world_rng = map(np.random.default_rng, np.random.SeedSequence(entropy).spawn(4))
        layout = place_objects(scene.task, scene.objects, RANGES[self.config.difficulty], layout_rng)
        return Start(
            task=task,
            instruction=instruction(scene.task, words_rng if self.config.paraphrases else None),
            split=split,
            index=index,
            init=scene.initial_state(layout, self._arm_pose(arm_rng)),
            seed=int(world_rng.integers(2**31)),
        )

    def make_world(self) -> MujocoWorld:
        """A world for any of the selected tasks."""
        return MujocoWorld(self.scene, self.spec, self.config.horizon)

    def make_expert(self, task: str, rng: np.random.Generator) -> ScriptedExpert:
        """A demonstrator of one task with a style of its own."""
        return ScriptedExpert(self.scene(task), rng)

    def _arm_pose(self, rng: np.random.Generator) -> Float64[np.ndarray, " arm"]:
        if not self.config.randomise_arm:
            return self._home
        spread = RANGES[self.config.difficulty].hover
        with self._poser_lock:
            return self._poser.solve(HOVER + spread * rng.uniform(-1.0, 1.0, 3))
