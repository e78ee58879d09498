"""Our compiled goals beside LIBERO's own, on states around the goal."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from sim.libero.domain import LiberoDomain
from sim.libero.package import find_tasks
from sim.libero.predicates import (
    InSitePredicate,
    JointPredicate,
    OnObjectPredicate,
    Predicate,
    compile_goal,
    holds,
    lamp_predicates,
)

pytest.importorskip("libero")
pytestmark = [pytest.mark.libero, pytest.mark.slow]

TASKS = (
    "libero_spatial/0",  # on an object
    "libero_object/0",  # in a basket
    "libero_goal/3",  # in a drawer
    "libero_goal/1",  # on a region of the stove
    "libero_goal/0",  # open
    "libero_10/2",  # turn on, and on
    "libero_10/3",  # close, and in
    "libero_90/14",  # on an object, with a free sentence
)


@pytest.mark.parametrize("task", TASKS)
def test_goals_agree_with_liberos(task: str) -> None:
    domain = LiberoDomain(find_tasks([task])[0], has_textures=False)
    goal, data, rng = compile_goal(domain.env), domain.env.sim.data._data, np.random.default_rng(0)
    start, model = domain.env.sim.data.qpos.copy(), domain.mj_model
    ours, theirs = [], []
    for _ in range(300):
        data.qpos[:] = start
        mujoco.mj_forward(model, data)
        for predicate in goal:
            bring_near(predicate, model, data, rng)
        mujoco.mj_forward(model, data)
        ours.append(holds(goal, data))
        theirs.append(bool(domain.env._check_success()))
    assert ours == theirs
    assert 0.005 < np.mean(ours) < 0.995  # both answers occurred


def bring_near(predicate: Predicate, model: mujoco.MjModel, data: mujoco.MjData, rng: np.random.Generator) -> None:
    """Put what the predicate is about somewhere around its border."""
    if isinstance(predicate, JointPredicate):
        for address in predicate.addresses:
            data.qpos[address] = predicate.threshold + rng.normal() * 0.01
        return
    address = model.jnt_qposadr[model.body_jntadr[predicate.body]]
    if isinstance(predicate, OnObjectPredicate):
        place, spread = data.xpos[predicate.other], np.array([0.02, 0.02, 0.01])
    else:
        place = data.site_xpos[predicate.site].copy()
        spread = 0.7 * np.abs(data.site_xmat[predicate.site].reshape(3, 3) @ predicate.size)
        if not isinstance(predicate, InSitePredicate):
            place[2] += 0.02
    data.qpos[address : address + 3] = place + spread * rng.normal(size=3)


def test_a_lamp_follows_its_knob() -> None:
    domain = LiberoDomain(find_tasks(["libero_goal/7"])[0], has_textures=False)
    lamps = lamp_predicates(domain.env)
    assert list(lamps) == ["flat_stove_1_burner"]
    (lamp,) = lamps.values()
    for angle, is_on in ((0.0, False), (0.499, False), (0.5, True), (1.5, True)):
        domain.env.sim.data.qpos[lamp.addresses[0]] = angle
        assert lamp.holds(domain.env.sim.data._data) == is_on
        domain.env._post_process()
        site = domain.mj_model.site("flat_stove_1_burner").id
        assert (domain.mj_model.site_rgba[site, 3] > 0) == is_on


def test_an_unknown_goal_is_refused() -> None:
    domain = LiberoDomain(find_tasks(["libero_goal/7"])[0], has_textures=False)
    domain.env.parsed_problem["goal_state"] = [["stack", "akita_black_bowl_1", "plate_1"]]
    with pytest.raises(ValueError, match=r"LIBERO goal \['stack', .*\] is not supported; known: in, on, open"):
        compile_goal(domain.env)
