"""Views of a shared model: furniture of their own, everything else in common."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from sim.model_view import ModelView

XML = """
<mujoco><worldbody>
  <body name="shelf" pos="0 0 1"><geom type="box" size="0.5 0.5 0.1"/>
    <body name="lamp" pos="0 0 0.2"><geom type="sphere" size="0.05"/></body></body>
  <body name="ball" pos="0 0 1.4"><freejoint/><geom type="sphere" size="0.05" mass="0.1"/></body>
</worldbody></mujoco>"""


@pytest.fixture
def model() -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(XML)


def view_of(model: mujoco.MjModel, *names: str) -> ModelView:
    return ModelView(model, np.array([model.body(name).id for name in names], dtype=np.int64))


def test_a_view_without_bodies_is_the_model(model: mujoco.MjModel) -> None:
    view, data, reference = view_of(model), mujoco.MjData(model), mujoco.MjData(model)
    assert view.address == model._address
    view.place(np.zeros((0, 7)))
    view.step1(data)
    mujoco.mj_step1(model, reference)
    np.testing.assert_array_equal(data.xpos, reference.xpos)


def test_two_views_differ_in_their_furniture_only(model: mujoco.MjModel) -> None:
    before = model.body_pos.copy()
    low, high = view_of(model, "shelf"), view_of(model, "shelf")
    low.place(np.array([[0.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.0]]))
    high.place(np.array([[0.3, 0.0, 2.0, 0.0, 0.0, 0.0, 1.0]]))
    for view, z in ((low, 0.5), (high, 2.0), (low, 0.5)):
        data = mujoco.MjData(model)
        view.forward_position(data)
        assert data.body("shelf").xpos[2] == z
        assert data.body("lamp").xpos[2] == pytest.approx(z + 0.2)  # what stands on it moves along
    np.testing.assert_array_equal(model.body_pos, before)
    np.testing.assert_array_equal(high.poses, [[0.3, 0.0, 2.0, 0.0, 0.0, 0.0, 1.0]])


def test_contacts_follow_the_furniture(model: mujoco.MjModel) -> None:
    view, data = view_of(model, "shelf"), mujoco.MjData(model)
    view.step1(data)
    assert data.ncon == 0
    view.place(np.array([[0.0, 0.0, 1.26, 1.0, 0.0, 0.0, 0.0]]))  # 1.26 + 0.1 > 1.4 - 0.05
    view.step1(data)
    assert data.ncon > 0


def test_wrong_poses_are_refused(model: mujoco.MjModel) -> None:
    with pytest.raises(ValueError, match=r"1 poses of 7 numbers expected, got an array of shape \(2, 7\)"):
        view_of(model, "shelf").place(np.zeros((2, 7)))
