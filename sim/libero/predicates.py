"""LIBERO's goal predicates, compiled from its objects into numbers that are checked without LIBERO.

They see the data as LIBERO's do after a control step: joint positions at its end, poses and contacts from before the
last physics step (see `MujocoWorld`). A goal is a conjunction.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal

import mujoco
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ON_OBJECT_RADIUS = 0.03
_ON_SITE_HEIGHT = 0.10
_ON_SITE_DEPTH = 0.005
_IN_SITE_DEPTH = 0.01


class _Predicate(BaseModel):
    """Part of a goal; ids belong to one compiled model."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class JointPredicate(_Predicate):
    """`Open`, `Close`, `TurnOn`, `TurnOff`: joint positions (m or rad) against a threshold."""

    kind: Literal["joint"] = "joint"
    addresses: tuple[int, ...]
    comparison: Literal["<", "<=", ">", ">="]
    threshold: float
    needs_all: bool

    def holds(self, data: mujoco.MjData) -> bool:
        """Whether any (or all) of the joints are past the threshold."""
        compare = _COMPARISONS[self.comparison]
        positions = (compare(float(data.qpos[address]), self.threshold) for address in self.addresses)
        return all(positions) if self.needs_all else any(positions)


class InSitePredicate(_Predicate):
    """`In(object, region)`: the object's origin is in the region's box, which grows with its rotation."""

    kind: Literal["in_site"] = "in_site"
    body: int
    site: int
    size: tuple[float, float, float]

    def holds(self, data: mujoco.MjData) -> bool:
        """Whether the point is strictly inside."""
        total = np.abs(data.site_xmat[self.site].reshape(3, 3) @ self.size)
        offset = data.xpos[self.body] - data.site_xpos[self.site]
        total_below = total + np.array([0.0, 0.0, _IN_SITE_DEPTH])
        return bool((offset < total).all() and (offset > -total_below).all())


class OnSitePredicate(_Predicate):
    """`On(object, region)`: the object's origin is above the region, and it touches the region's owner if any."""

    kind: Literal["on_site"] = "on_site"
    body: int
    site: int
    size: tuple[float, float, float]
    contact: tuple[tuple[int, ...], tuple[int, ...]] | None

    def holds(self, data: mujoco.MjData) -> bool:
        """Whether it is above and touches."""
        offset = data.site_xmat[self.site].reshape(3, 3) @ (data.xpos[self.body] - data.site_xpos[self.site])
        x, y, z = self.size
        is_above = z - _ON_SITE_DEPTH < offset[2] < z + _ON_SITE_HEIGHT and abs(offset[0]) < x and abs(offset[1]) < y
        return bool(is_above and (self.contact is None or _touch(data, *self.contact)))


class OnObjectPredicate(_Predicate):
    """`On(object, other)`: not below the other, touching it, and less than 3 cm beside it."""

    kind: Literal["on_object"] = "on_object"
    body: int
    other: int
    contact: tuple[tuple[int, ...], tuple[int, ...]]

    def holds(self, data: mujoco.MjData) -> bool:
        """Whether it lies on the other."""
        offset = data.xpos[self.body] - data.xpos[self.other]
        is_near = offset[2] >= 0.0 and np.linalg.norm(offset[:2]) < _ON_OBJECT_RADIUS
        return bool(is_near) and _touch(data, *self.contact)


Predicate = Annotated[
    JointPredicate | InSitePredicate | OnSitePredicate | OnObjectPredicate, Field(discriminator="kind")
]


def _touch(data: mujoco.MjData, geoms: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether a contact joins the two sets of geoms."""
    pairs = data.contact.geom[: data.ncon]
    is_first, is_second = np.isin(pairs, geoms), np.isin(pairs, others)
    return bool(((is_first[:, 0] & is_second[:, 1]) | (is_first[:, 1] & is_second[:, 0])).any())


def compile_goal(env: Any) -> tuple[Predicate, ...]:
    """The goal of a LIBERO environment.

    Args:
        env: A built environment (`BDDLBaseDomain`).

    Raises:
        ValueError: The goal uses a predicate, or a combination of things, that is not known here.
    """
    return tuple(_compile(env, atom) for atom in env.parsed_problem["goal_state"])


def lamp_predicates(env: Any) -> dict[str, JointPredicate]:
    """Sites that shine while a knob is turned on: site name -> predicate."""
    lamps = {}
    for state in env.tracking_object_states_change:
        owner = env.get_object(state.object_name)
        for name, _ in owner.object_properties["vis_site_names"].values():
            lamps[name] = _joint_predicate(env, owner.joints, owner.turn_on, owner, needs_all=False)
    return lamps


def _compile(env: Any, atom: list[str]) -> Predicate:
    match atom:
        case ["in", subject, place] if place in env.object_sites_dict:
            return InSitePredicate(body=env.obj_body_id[subject], site=_site_id(env, place), size=_size(env, place))
        case ["on", subject, place] if place in env.object_sites_dict:
            owner = env.get_object(env.object_sites_dict[place].parent_name)
            return OnSitePredicate(
                body=env.obj_body_id[subject],
                site=_site_id(env, place),
                size=_size(env, place),
                contact=None if owner is None else (_geoms(env, owner), _geoms(env, env.get_object(subject))),
            )
        case ["on", subject, other]:
            return OnObjectPredicate(
                body=env.obj_body_id[subject],
                other=env.obj_body_id[other],
                contact=(_geoms(env, env.get_object(other)), _geoms(env, env.get_object(subject))),
            )
        case ["open" | "close" | "turnon" | "turnoff" as verb, subject]:
            site = env.object_sites_dict.get(subject)
            owner = env.get_object(subject if site is None else site.parent_name)
            method = {"open": "is_open", "close": "is_close", "turnon": "turn_on", "turnoff": "turn_off"}[verb]
            joints = owner.joints if site is None else site.joints
            return _joint_predicate(env, joints, getattr(owner, method), owner, needs_all=verb in ("close", "turnoff"))
    raise ValueError(f"LIBERO goal {atom} is not supported; known: in, on, open, close, turnon, turnoff")


def _joint_predicate(
    env: Any, joints: list[str], test: Callable[[float], bool], owner: Any, *, needs_all: bool
) -> JointPredicate:
    """Find the comparison that LIBERO's test makes: its threshold is an end of one of the object's ranges."""
    ranges = owner.object_properties["articulation"].values()
    for threshold in sorted({float(end) for values in ranges for end in values}):
        below, at, above = (bool(test(threshold + shift)) for shift in (-1e-9, 0.0, 1e-9))
        if below != above:
            comparison = {(True, False): "<", (True, True): "<=", (False, False): ">", (False, True): ">="}[below, at]
            return JointPredicate(
                addresses=tuple(int(env.sim.model.get_joint_qpos_addr(joint)) for joint in joints),
                comparison=comparison,  # type: ignore[arg-type]  # one of the four literals above
                threshold=threshold,
                needs_all=needs_all,
            )
    raise ValueError(f"the test {test} of {owner.name} compares with none of its ranges")


def _site_id(env: Any, name: str) -> int:
    return int(env.sim.model.site_name2id(name))


def _size(env: Any, site: str) -> tuple[float, float, float]:
    x, y, z = (float(value) for value in np.asarray(env.object_sites_dict[site].size))
    return x, y, z


def _geoms(env: Any, model: Any) -> tuple[int, ...]:
    return tuple(int(env.sim.model.geom_name2id(name)) for name in model.contact_geoms)


def holds(goal: tuple[Predicate, ...], data: mujoco.MjData) -> bool:
    """Whether every part of the goal holds."""
    return all(predicate.holds(data) for predicate in goal)
