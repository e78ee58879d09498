"""A LIBERO task as a scene of ours: the model that LIBERO compiles, its goal, its furniture and lamps, all cached."""

from __future__ import annotations

import importlib.metadata
import threading
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

import mujoco
import numpy as np
from jaxtyping import Float64
from pydantic import BaseModel

from sim.cache import cached_file, digest
from sim.libero.domain import LiberoDomain
from sim.libero.lite_meshes import LITE_VERSION, simplify_visuals
from sim.libero.package import LiberoTask, package_version
from sim.libero.predicates import JointPredicate, Predicate, compile_goal, holds, lamp_predicates
from sim.model import PINNED_MUJOCO, ROBOSUITE_SOLVER_TOLERANCE, OscConfig, RenderOptions, SimModel
from sim.world import TaskScene
from vla_rl.types import Start

MeshQuality = Literal["full", "lite"]

CONTROL_RATE_HZ = 20.0
LIBERO_SAMPLES = 4
_FORMAT = "1"
"""Counts changes of what is cached."""
_FIRST_LAMP_GROUP = 3
"""LIBERO draws site groups 0 to 2; a lamp's site gets a group of its own, which is drawn while it shines."""


class _Lamp(BaseModel):
    group: int
    is_on: JointPredicate


class SceneRecord(BaseModel):
    """What a scene needs besides its model; one JSON file per task.

    Attributes:
        model: Digest of the model's XML; tasks with the same XML share the model.
        goal: Conjunction.
        fixtures: Furniture that a start places.
        nullspace_posture: Arm posture (rad) at a reset.
        lamps: Sites that shine.
    """

    model: str
    goal: tuple[Predicate, ...]
    fixtures: tuple[str, ...]
    nullspace_posture: tuple[float, ...]
    lamps: tuple[_Lamp, ...]


class LiberoScene(TaskScene):
    """One task (a `TaskScene`). A start's `init` is qpos, qvel, and seven numbers for each piece of furniture.

    Args:
        task: Which one.
        mesh_quality: "lite" draws simplified meshes; the physics is the same.
        samples: Anti-aliasing samples per pixel.
    """

    def __init__(self, task: LiberoTask, mesh_quality: MeshQuality = "full", samples: int = LIBERO_SAMPLES) -> None:
        self.task = task
        self.key = scene_key(task)
        record_file = cached_file("libero/scenes", f"{self.key}.json", lambda path: _make_record(task, path))
        self.record = SceneRecord.model_validate_json(record_file.read_text(encoding="utf-8"))
        self.model = _shared_model(task, self.record, mesh_quality, samples)

    def place(self, data: mujoco.MjData, start: Start) -> None:
        """Write positions and velocities.

        Raises:
            ValueError: The start does not belong to this scene.
        """
        nq, nv, num_fixtures = self.model.mj_model.nq, self.model.mj_model.nv, len(self.model.fixtures)
        if start.init.shape != (nq + nv + 7 * num_fixtures,):
            raise ValueError(
                f"{start.key}: init has shape {start.init.shape}; this scene needs {nq} positions, {nv} velocities and "
                f"7 numbers for each of {num_fixtures} pieces of furniture"
            )
        data.qpos[:] = start.init[:nq]
        data.qvel[:] = start.init[nq : nq + nv]

    def fixture_poses(self, start: Start) -> Float64[np.ndarray, "fixtures 7"]:
        """Where the start puts the furniture: position (m) and quaternion (w, x, y, z), world frame."""
        return start.init[len(start.init) - 7 * len(self.model.fixtures) :].reshape(-1, 7)

    def is_success(self, data: mujoco.MjData) -> bool:
        """Whether LIBERO's goal holds."""
        return holds(self.record.goal, data)

    def site_groups(self, data: mujoco.MjData) -> frozenset[int]:
        """Groups of the lamps that are on."""
        return frozenset(lamp.group for lamp in self.record.lamps if lamp.is_on.holds(data))


def scene_key(task: LiberoTask) -> str:
    """Digest of what a scene depends on: the task file and the versions of the software that reads it."""
    versions = (package_version(), importlib.metadata.version("robosuite"), PINNED_MUJOCO)
    return digest(_FORMAT, *versions, task.bddl.read_bytes())


def _make_record(task: LiberoTask, path: Path) -> None:
    domain = LiberoDomain(task)
    lamps = lamp_predicates(domain.env)
    if _FIRST_LAMP_GROUP + len(lamps) > mujoco.mjNGROUP:
        raise ValueError(f"{task.full_name} has {len(lamps)} lamps; {mujoco.mjNGROUP - _FIRST_LAMP_GROUP} can be drawn")
    record = SceneRecord(
        model=digest(domain.xml),
        goal=compile_goal(domain.env),
        fixtures=domain.fixtures,
        nullspace_posture=tuple(float(angle) for angle in domain.env.robots[0].controller.initial_joint),
        lamps=tuple(_Lamp(group=_FIRST_LAMP_GROUP + i, is_on=is_on) for i, is_on in enumerate(lamps.values())),
    )
    cached_file("libero/models", f"{record.model}.mjb", lambda file: _save_model(domain, file))
    path.write_text(record.model_dump_json(indent=1), encoding="utf-8")


def _save_model(domain: LiberoDomain, path: Path) -> None:
    """Save the model with its lamps shining, each in a site group of its own."""
    mj_model = domain.mj_model
    for i, name in enumerate(lamp_predicates(domain.env)):
        site = mj_model.site(name).id
        mj_model.site_group[site] = _FIRST_LAMP_GROUP + i
        mj_model.site_rgba[site, 3] = 1.0 - mj_model.site_rgba[site, 3]  # LIBERO's way to switch it on
    mujoco.mj_saveModel(mj_model, str(path))


def _load_model(task: LiberoTask, record: SceneRecord, mesh_quality: MeshQuality) -> mujoco.MjModel:
    if mesh_quality == "full":
        file = cached_file("libero/models", f"{record.model}.mjb", lambda path: _save_model(LiberoDomain(task), path))
    else:
        name = f"{digest(record.model, LITE_VERSION)}.mjb"
        file = cached_file("libero/models", name, lambda path: _save_lite_model(task, record, path))
    return mujoco.MjModel.from_binary_path(str(file))


def _save_lite_model(task: LiberoTask, record: SceneRecord, path: Path) -> None:
    mujoco.mj_saveModel(simplify_visuals(_load_model(task, record, "full")), str(path))


_models: WeakValueDictionary[tuple[str, MeshQuality, int], SimModel] = WeakValueDictionary()
_models_lock = threading.Lock()


def _shared_model(task: LiberoTask, record: SceneRecord, mesh_quality: MeshQuality, samples: int) -> SimModel:
    """The model from memory or from the cache; built anew only if the cached file is gone or damaged."""
    with _models_lock:
        model = _models.get((record.model, mesh_quality, samples))
        if model is None:
            model = SimModel.build(
                _load_model(task, record, mesh_quality),
                control_rate_hz=CONTROL_RATE_HZ,
                osc=OscConfig(nullspace_posture=record.nullspace_posture),
                render=RenderOptions(samples=samples),
                fixtures=record.fixtures,
                solver_tolerance=ROBOSUITE_SOLVER_TOLERANCE,
            )
            _models[record.model, mesh_quality, samples] = model
    return model
