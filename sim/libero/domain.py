"""LIBERO's own environment object, built once per task for what only its code knows: the model and the placements.

It is slow to build (seconds) and never steps. What is learned from it goes into cached files; see `scene.py`.
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
import warnings
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float64

from sim.libero.package import LiberoTask, prepare_libero

ARENA_MB = 32
"""Memory for contacts and constraints of one world. LIBERO's 1.3 GB are sized for 5,000 contacts; there are hundreds.

If it were too small, MuJoCo would report a full buffer, and the world raises a `SimError`.
"""

_FLAT_TEXTURE = r'<texture name="\1" type="2d" builtin="flat" width="1" height="1"/>'
_MAX_ATTEMPTS = 1000
_numpy_lock = threading.Lock()


class LiberoDomain:
    """The environment of one task.

    Args:
        task: Which one.
        has_textures: Without them the model is half as large and cannot be drawn, which is enough for placements.
    """

    def __init__(self, task: LiberoTask, has_textures: bool = True) -> None:
        self.task = task
        self.xml = ""
        self._has_textures = has_textures
        with _numpy_seed(0):
            self.env = self._build()
            # As after a reset: sites that mark things for people are invisible.
            self.env.visualize(vis_settings=dict.fromkeys(self.env._visualizations, False))
            self.env._post_process()

    @property
    def mj_model(self) -> Any:
        """The compiled model, with the furniture where the first draw has put it."""
        return self.env.sim.model._model

    @cached_property
    def fixtures(self) -> tuple[str, ...]:
        """Bodies of the furniture that LIBERO moves by writing into the model."""
        return tuple(fixture.root_body for fixture in self.env.fixtures_dict.values())

    def fixture_poses(self) -> Float64[np.ndarray, "fixtures 7"]:
        """Where the furniture stands now."""
        bodies = [self.mj_model.body(name) for name in self.fixtures]
        return np.array([[*body.pos, *body.quat] for body in bodies]).reshape(-1, 7)

    def draw(self, seed: int) -> tuple[Float64[np.ndarray, " nq"], Float64[np.ndarray, "fixtures 7"]]:
        """One draw of LIBERO's reset: positions of robot and objects, poses of the furniture.

        Raises:
            ValueError: The task's regions leave no room for its objects.
        """
        with _numpy_seed(seed):
            self._reset()
            return self.env.sim.data.qpos.copy(), self.fixture_poses()

    def published_fixture_poses(self, num_episodes: int) -> Float64[np.ndarray, "episodes fixtures 7"]:
        """Where the furniture stands in the published evaluation: `seed(0)` once, then one reset per episode.

        LIBERO adds its initialisers of drawers and knobs again at every reset, so each reset draws more numbers.
        """
        initialisers = self.env.object_property_initializers
        each = list(initialisers)
        poses = []
        with _numpy_seed(0):
            for _ in range(num_episodes):
                self._reset(before_attempt=lambda: initialisers.extend(each))
                poses.append(self.fixture_poses())
        del initialisers[len(each) :]
        return np.array(poses).reshape(num_episodes, -1, 7)

    def _reset(self, before_attempt: Any = lambda: None) -> None:
        """LIBERO's reset without compiling the model again; draws anew where objects would overlap, as LIBERO does."""
        from robosuite.utils.errors import RandomizationError

        for _ in range(_MAX_ATTEMPTS):
            before_attempt()
            self.env.sim.reset()
            # Things on furniture are placed relative to its sites where the compiled model has them.
            self.env.sim.model.body_pos[:], self.env.sim.model.body_quat[:] = self._compiled_poses
            try:
                self.env._reset_internal()
            except RandomizationError:
                continue
            return
        raise ValueError(f"{self.task.full_name}: no placement without overlap in {_MAX_ATTEMPTS} draws")

    def _build(self) -> Any:
        prepare_libero()
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # deprecations in robosuite's and LIBERO's own code
            import robosuite
            from libero.libero.envs import TASK_MAPPING, bddl_utils
            from robosuite.utils.errors import RandomizationError

            problem = bddl_utils.get_problem_info(str(self.task.bddl))["problem_name"]
            for _ in range(_MAX_ATTEMPTS):
                env = TASK_MAPPING[problem].__new__(TASK_MAPPING[problem])
                env._initialize_sim = lambda env=env: self._compile(env)
                try:
                    env.__init__(
                        str(self.task.bddl),
                        robots=["Panda"],
                        controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
                        initialization_noise=None,
                        has_offscreen_renderer=False,
                        use_camera_obs=False,
                        control_freq=20,
                    )
                except RandomizationError:
                    continue
                return env
        raise ValueError(f"{self.task.full_name}: no placement without overlap in {_MAX_ATTEMPTS} draws")

    def _compile(self, env: Any) -> None:
        """Stands in for robosuite's `_initialize_sim`: the same model with less memory per world."""
        from robosuite.utils.binding_utils import MjSim

        self.xml, num_sizes = re.subn(r"<size [^>]*/>", f'<size memory="{ARENA_MB}M"/>', env.model.get_xml())
        if num_sizes != 1:
            raise ValueError(f"{self.task.full_name}: the model has {num_sizes} <size> elements, one was expected")
        xml = self.xml
        if not self._has_textures:
            xml = re.sub(r'<texture (?=[^>]*file=)[^>]*name="([^"]+)"[^>]*/>', _FLAT_TEXTURE, xml)
        env.sim = MjSim.from_xml_string(xml)
        env.sim.forward()
        env.initialize_time(env.control_freq)
        self._compiled_poses = env.sim.model.body_pos.copy(), env.sim.model.body_quat.copy()


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, from which LIBERO draws, and put it back afterwards."""
    with _numpy_lock:
        state = np.random.get_state()
        np.random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(state)
