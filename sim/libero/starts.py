"""Starts of a LIBERO task: the published initial states, and as many of our own as anyone wants.

The 50 published states of a task are for testing. Training and validation starts are drawn from the task's own
placement sampler with a seed of their own, let settle, checked, and kept on disk. No position of a published state goes
into them, so the pools are disjoint.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import mujoco
import numpy as np
from jaxtyping import Float64

from sim.cache import cached_file, digest
from sim.libero.domain import LiberoDomain
from sim.libero.package import LiberoTask, read_init_states
from sim.libero.scene import LiberoScene
from vla_rl.types import SimError, Split, Start, WorldState

if TYPE_CHECKING:
    from sim.mujoco_world import MujocoWorld

DUMMY_ACTION = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
"""What LIBERO's evaluations send while objects fall into place: stay, open the gripper."""

_FORMAT = "2"
"""Counts changes of what is cached."""
_FALL_STEPS = 20
"""Control steps in which drawn objects come to rest before they are looked at."""
_MAX_SPEED = 0.05
"""Velocity (m/s, rad/s) of an object that counts as being at rest."""
_HEIGHT_TOLERANCE_M = 0.02
"""An object that comes to rest this far outside the heights of the published starts has fallen off or over."""
_MAX_DRAWS = 100


class TaskStarts:
    """The starts of one task.

    Args:
        scene: The task.
        make_world: Makes a world for that scene, for letting things settle.
        settle_steps: Control steps of the dummy action before an episode begins; published evaluations: 10.
    """

    def __init__(self, scene: LiberoScene, make_world: Callable[[], MujocoWorld], settle_steps: int) -> None:
        self._scene = scene
        self._make_world = make_world
        self._settle_steps = settle_steps

    @property
    def num_published(self) -> int:
        """How many starts are published for this task; 50 in the original suites."""
        return len(self._published)

    def published(self, split: Split, index: int) -> Start:
        """A published start, under the name that it has in this split.

        Raises:
            ValueError: There are not so many.
        """
        if index >= self.num_published:
            raise ValueError(
                f"{self._scene.task.full_name} has {self.num_published} published starts; there is no number {index}. "
                "Ask for fewer starts per task (evaluation.starts_per_task)"
            )
        return self._start(split, index, *self._published[index])

    def generated(self, split: Split, index: int) -> Start:
        """A start of our own; the first time it is drawn, later it is read from the cache."""
        # Tasks with equal task files draw different starts, and what counts as in place depends on the published ones.
        task, settle_steps = self._scene.task, str(self._settle_steps)
        which = (task.suite, task.name, split, str(index))
        name = digest(_FORMAT, self._scene.key, settle_steps, *which, task.init_states.read_bytes())
        file = cached_file("libero/starts", f"{name}.npz", lambda path: self._generate(split, index, path))
        (init, snapshot), *_ = _read(file)
        return self._start(split, index, init, snapshot)

    def _generate(self, split: Split, index: int, path: Path) -> None:
        task, world = self._scene.task, self._make_world()
        entropy = [zlib.crc32(part.encode()) for part in (task.suite, task.name, split)] + [index]
        rng = np.random.default_rng(np.random.SeedSequence(entropy))
        for _ in range(_MAX_DRAWS):
            qpos, fixtures = _domain(task).draw(seed=int(rng.integers(2**32)))
            qvel = np.zeros(self._scene.model.mj_model.nv)
            drawn = self._start(split, index, np.concatenate([qpos, qvel, fixtures.ravel()]))
            world.reset(drawn)
            try:
                world.settle(DUMMY_ACTION, _FALL_STEPS + self._settle_steps)
            except SimError:
                continue
            if not self._scene.is_success(world.data) and self._is_in_place(world.data):
                _write(path, [drawn.init], [world.save_state()])
                return
        raise ValueError(f"{task.full_name}: none of {_MAX_DRAWS} draws gave an unsolved start with objects at rest")

    def _is_in_place(self, data: mujoco.MjData) -> bool:
        """Objects are at rest and stand on what they stand on in the published starts."""
        model = self._scene.model.mj_model
        free = np.flatnonzero(model.jnt_type == mujoco.mjtJoint.mjJNT_FREE)
        speeds = [np.abs(data.qvel[address : address + 6]).max() for address in model.jnt_dofadr[free]]
        heights = model.jnt_qposadr[free] + 2
        # In MuJoCo's state vector qpos follows the time.
        usual = np.array([snapshot.physics[1 + heights] for _, snapshot in self._published])
        is_low = data.qpos[heights] < usual.min(axis=0) - _HEIGHT_TOLERANCE_M
        is_high = data.qpos[heights] > usual.max(axis=0) + _HEIGHT_TOLERANCE_M
        return max(speeds, default=0.0) < _MAX_SPEED and not (is_low | is_high).any()

    @cached_property
    def _published(self) -> list[tuple[Float64[np.ndarray, " init"], WorldState]]:
        task = self._scene.task
        name = digest(_FORMAT, self._scene.key, str(self._settle_steps), task.suite, task.init_states.read_bytes())
        return _read(cached_file("libero/starts", f"{name}.npz", self._settle_published))

    def _settle_published(self, path: Path) -> None:
        states = read_init_states(self._scene.task.init_states)
        poses = LiberoDomain(self._scene.task, has_textures=False).published_fixture_poses(len(states))
        world, inits, settled = self._make_world(), [], []
        for index, (state, fixtures) in enumerate(zip(states, poses, strict=True)):
            start = self._start("test", index, np.concatenate([state[1:], fixtures.ravel()]))
            world.reset(start)
            world.settle(DUMMY_ACTION, self._settle_steps)
            inits.append(start.init)
            settled.append(world.save_state())
        _write(path, inits, settled)

    def _start(
        self, split: Split, index: int, init: Float64[np.ndarray, " init"], snapshot: WorldState | None = None
    ) -> Start:
        task = self._scene.task
        return Start(
            task=task.full_name,
            instruction=task.instruction,
            split=split,
            index=index,
            init=init,
            seed=0,  # a LIBERO world draws nothing during an episode
            snapshot=snapshot,
        )


@lru_cache(maxsize=32)  # about 50 MB each
def _domain(task: LiberoTask) -> LiberoDomain:
    return LiberoDomain(task, has_textures=False)


def _write(path: Path, inits: list[Float64[np.ndarray, " init"]], settled: list[WorldState]) -> None:
    np.savez(
        path,
        init=np.stack(inits),
        physics=np.stack([state.physics for state in settled]),
        controller=np.stack([state.controller for state in settled]),
        fixtures=np.stack([state.fixtures for state in settled]),
    )


def _read(path: Path) -> list[tuple[Float64[np.ndarray, " init"], WorldState]]:
    with np.load(path) as arrays:
        rows = zip(*(arrays[name] for name in ("init", "physics", "controller", "fixtures")), strict=True)
        return [
            (init, WorldState(physics=physics, controller=controller, fixtures=fixtures, num_steps=0))
            for init, physics, controller, fixtures in rows
        ]
