"""A scripted expert for LIBERO's tasks of picking and placing, in closed loop on the true poses.

What to pick and where to put it come from the compiled goal, how to take hold of it from the shapes. The action depends
on the present state (and on a style drawn once per episode): there is no phase counter that could be out of step. If
the object slips away, the expert opens the fingers, goes back and tries again. That is what DART needs: the action plus
noise is executed, the action is stored. What is remembered is only where things stood when the expert last looked.

Reference: M. Laskey et al., "DART: Noise Injection for Robust Imitation Learning", arXiv 1703.09327.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import mujoco
import numpy as np
from jaxtyping import Float64

from sim.libero.mechanisms import DrawerOpener, KnobTurner, is_drawer, is_knob
from sim.libero.motion import Command, Hand, Style
from sim.libero.placing import Placer
from sim.libero.predicates import InSitePredicate, JointPredicate, OnObjectPredicate, OnSitePredicate, Predicate
from sim.libero.scene import LiberoScene


@runtime_checkable
class _Skill(Protocol):
    def command(self, data: mujoco.MjData) -> Command:
        """What to do in this state."""


class LiberoExpert:
    """Solves one task from privileged state, part of the goal by part.

    Measured on libero_object, libero_spatial and libero_goal (all tasks but the one that opens a drawer and fills it);
    other suites' tasks are tried if their goals are of the same kinds.

    Args:
        scene: The task.
        rng: Source of the style; one expert per episode gives varied demonstrations.

    Raises:
        ValueError: There is no expert for this task; see `unsupported_part`.
    """

    def __init__(self, scene: LiberoScene, rng: np.random.Generator) -> None:
        unsupported = unsupported_part(scene)
        if unsupported is not None:
            raise ValueError(
                f"no expert for {scene.task.full_name} ({scene.task.name}): it cannot bring about {unsupported!r}. It "
                "can put things in or on what does not move, turn knobs and open drawers; "
                "sim.libero.expert.has_expert tells for which tasks that is enough"
            )
        self.style = Style.draw(rng)
        self._hand = Hand(scene.model)
        self._skills = [(part, _skill(scene, part, self._hand, self.style)) for part in scene.record.goal]

    def act(self, data: mujoco.MjData) -> Float64[np.ndarray, " action_dim"]:
        """The action for this state, each entry in [-1, 1]."""
        skill = next((skill for part, skill in self._skills if not part.holds(data)), self._skills[-1][1])
        return self._hand.action(data, skill.command(data), self.style)


def has_expert(scene: LiberoScene) -> bool:
    """Whether the expert has a skill for every part of a task's goal."""
    return unsupported_part(scene) is None


def unsupported_part(scene: LiberoScene) -> Predicate | None:
    """The first part of a task's goal that the expert has no skill for."""
    model = scene.model.mj_model
    return next((part for part in scene.record.goal if not _is_supported(model, part)), None)


def _is_supported(model: mujoco.MjModel, part: Predicate) -> bool:
    match part:
        case OnObjectPredicate(body=body):
            return _is_free(model, body)
        case InSitePredicate(body=body, site=site) | OnSitePredicate(body=body, site=site):
            # An open drawer would have to be opened first, and stands in the arm's way then.
            owner = int(model.site_bodyid[site])
            return _is_free(model, body) and (int(model.body_jntnum[owner]) == 0 or _is_free(model, owner))
        case JointPredicate(addresses=(address,)):
            return is_knob(model, _joint_at(model, address)) or (
                is_drawer(model, _joint_at(model, address)) and _opens(model, part)
            )
    return False


def _skill(scene: LiberoScene, part: Predicate, hand: Hand, style: Style) -> _Skill:
    """The skill for a supported part of a goal."""
    model = scene.model.mj_model
    if not isinstance(part, JointPredicate):
        return Placer(model, hand, style, part)
    joint = _joint_at(model, part.addresses[0])
    if is_knob(model, joint):
        return KnobTurner(model, hand, style, joint, _direction(part))
    return DrawerOpener(model, hand, style, joint)


def _is_free(model: mujoco.MjModel, body: int) -> bool:
    joint = int(model.body_jntadr[body])
    return joint >= 0 and bool(model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE)


def _joint_at(model: mujoco.MjModel, address: int) -> int:
    return int(np.flatnonzero(model.jnt_qposadr == address)[0])


def _direction(part: JointPredicate) -> float:
    """Sign of the motion that the goal asks for."""
    return 1.0 if part.comparison in (">", ">=") else -1.0


def _opens(model: mujoco.MjModel, part: JointPredicate) -> bool:
    """The goal asks for the far end of the joint's range."""
    far_end = max(model.jnt_range[_joint_at(model, part.addresses[0])], key=abs)
    return bool(np.sign(far_end) == _direction(part))
