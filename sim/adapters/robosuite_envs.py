"""robosuite environments by name, without images, whose resets are functions of a seed.

robosuite 1.4 draws from the global random generators of numpy and Python. They are seeded for the moment of a reset,
under a lock, and put back afterwards. robosuite is imported here and only when it is needed: it takes seconds.
"""

from __future__ import annotations

import difflib
import importlib
import random
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mujoco
import numpy as np

from sim.rendering import ensure_gl_backend

_global_generators = threading.RLock()
_ASSETS = ("mesh", "tex", "hfield", "skin", "bvh", "names", "text")

INSTRUCTIONS = {
    "Lift": "lift the red cube",
    "Stack": "put the red cube on the green cube",
    "NutAssembly": "put each nut on its peg",
    "NutAssemblySingle": "put the nut on its peg",
    "NutAssemblySquare": "put the square nut on the square peg",
    "NutAssemblyRound": "put the round nut on the round peg",
    "PickPlace": "put each object into its bin",
    "PickPlaceSingle": "put the object into its bin",
    "PickPlaceMilk": "put the milk into its bin",
    "PickPlaceBread": "put the bread into its bin",
    "PickPlaceCereal": "put the cereal into its bin",
    "PickPlaceCan": "put the can into its bin",
    "Door": "open the door",
    "Wipe": "wipe the table",
    "TwoArmLift": "lift the pot with both arms",
    "TwoArmPegInHole": "put the peg into the hole",
    "TwoArmHandover": "hand the hammer over to the other arm",
}
"""What robosuite's own environments ask for; robosuite itself has no sentences."""


def import_robosuite(modules: Sequence[str] = ()) -> Any:
    """The `robosuite` package, after the modules that register environments of their own.

    Raises:
        ImportError: A module is missing.
    """
    ensure_gl_backend()  # before the import: robosuite would choose for itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations in robosuite's own code
        robosuite = importlib.import_module("robosuite")
        for name in modules:
            importlib.import_module(name)
    return robosuite


def check_names(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse unknown names.

    Raises:
        ValueError: Tells the nearest name and what is there.
    """
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown robosuite {kind} {name!r}.{hint} There is: {', '.join(sorted(known))}")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of numpy and Python for a moment, for one thread at a time."""
    with _global_generators:
        numpy_state, python_state = np.random.get_state(), random.getstate()
        np.random.seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)


class SeededEnv:
    """One robosuite environment (attribute `env`).

    Without `hard_reset` robosuite keeps the model, and with it whatever was changed there, and the command of each
    gripper; both are put back before a reset, so that no episode depends on the one before.

    Args:
        name: robosuite's name of the environment.
        options: Keyword arguments of its constructor.
        seed: What the constructor draws: sizes of some objects.

    Raises:
        ValueError: robosuite refuses the options.
    """

    def __init__(self, name: str, options: dict[str, Any], seed: int) -> None:
        robosuite = import_robosuite()
        try:
            with seeded(seed), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.env = robosuite.make(name, **options)
        except (AssertionError, KeyError, TypeError, ValueError) as error:  # robosuite's ways to refuse
            raise ValueError(
                f"robosuite cannot make {name} with {options['robots']} and these options: {error}"
            ) from error
        # In this mode robosuite draws from a set of strings, whose order is another one in every process.
        self._is_object_drawn = getattr(self.env, "single_object_mode", 0) == 1
        if self._is_object_drawn:
            self.env.single_object_mode = 2  # the object that `env.nut_id` or `env.object_id` names
        self._arrays = {} if self.env.hard_reset else model_arrays(self.mj_model)

    @property
    def mj_model(self) -> mujoco.MjModel:
        """The environment's present model."""
        model: mujoco.MjModel = self.env.sim.model._model
        return model

    def reset(self, seed: int) -> None:
        """The environment's own reset; the same seed always gives the same state."""
        for name, values in self._arrays.items():
            array = getattr(self.mj_model, name)
            if not np.array_equal(array, values):
                array[:] = values
        for robot in self.env.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        with seeded(seed):
            if self._is_object_drawn:
                kind = "nut" if hasattr(self.env, "nut_to_id") else "object"
                num_objects = len(getattr(self.env, f"{kind}_to_id"))
                setattr(self.env, f"{kind}_id", int(np.random.randint(num_objects)))
            self.env.reset()


def model_arrays(mj_model: mujoco.MjModel) -> dict[str, np.ndarray]:
    """Copies of a model's arrays by name, but for its assets."""
    names = [name for name in dir(mj_model) if not name.startswith(("_", *_ASSETS))]
    values = {name: getattr(mj_model, name) for name in names}
    return {name: value.copy() for name, value in values.items() if isinstance(value, np.ndarray)}
