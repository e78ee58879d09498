"""A Gymnasium environment as a `SteppedEnv`: actions in [-1, 1], RGB images, success told by the environment.

Gymnasium is imported only when it is needed, as every optional package.
"""

from __future__ import annotations

import atexit
import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any, Literal, TypeVar, get_args

import mujoco
import numpy as np
from jaxtyping import Float32, Float64, UInt8
from PIL import Image

from sim.adapters.home_thread import HomeThread
from sim.adapters.replay_world import Outcome, integration_state, mujoco_fault

RENDER = "render"
"""Camera whose image is what the environment's `render()` returns."""

OBSERVATION = "observation"
"""Name of an observation that is one array and no dictionary of arrays."""

SuccessRule = Literal["is_success", "success", "terminated_with_reward"]
Value = TypeVar("Value")
_EXIT_TIMEOUT_S = 10.0
_living: weakref.WeakSet[GymnasiumEnv] = weakref.WeakSet()


class GymnasiumEnv:
    """One Gymnasium environment per task.

    All calls run in one thread that belongs to this object, because drawing contexts are bound to threads, and worlds
    are run by whichever thread is free.

    Args:
        make_env: Makes the environment of a task, by its full name.
        cameras: Cameras of the suite; see `GymnasiumConfig.cameras`.
        proprio_keys: Entries of the observation that make up the proprioceptive state.
        success: How the environment tells success.
    """

    def __init__(
        self,
        make_env: Callable[[str], Any],
        cameras: tuple[str, ...],
        proprio_keys: tuple[str, ...],
        success: SuccessRule,
    ) -> None:
        self._make_env = make_env
        self._cameras = cameras
        self._proprio_keys = proprio_keys
        self._success = success
        self._envs: dict[str, Any] = {}
        self._task = ""
        self._observation: Any = None
        self._history = hashlib.sha256()
        self._thread = HomeThread("gymnasium")
        weakref.finalize(self, _close, self._thread, self._envs).atexit = False  # `_close_all_at_exit` does it then
        _living.add(self)

    def mujoco_data(self) -> mujoco.MjData:
        """Data of a MuJoCo environment; poses lag behind the positions as the environment leaves them.

        Raises:
            ValueError: The environment does not show any.
        """
        data = _mujoco_data(self._env)
        if data is None:
            raise ValueError(
                f"{self._task} has no MuJoCo data (no attribute 'data' of that type); use what it observes"
            )
        return data

    def reset(self, task: str, seed: int) -> None:
        """The environment's own reset with a seed."""

        def reset() -> Any:
            if task not in self._envs:
                self._envs[task] = self._make_env(task)
            return self._envs[task].reset(seed=seed)[0]

        self._task = task
        self._observation = self._run(reset)
        self._history = hashlib.sha256()
        self._remember(self._observation)

    def step(self, action: Float64[np.ndarray, " action_dim"]) -> Outcome:
        """One step of the environment; [-1, 1] is stretched to the bounds of its action space."""
        scaled = scale_action(action, self._env.action_space)
        self._observation, reward, terminated, truncated, info = self._run(lambda: self._env.step(scaled))
        self._remember((self._observation, reward, terminated, truncated))
        data = _mujoco_data(self._env)
        return Outcome(
            success=self._is_success(float(reward), bool(terminated), info),
            is_over=bool(terminated or truncated),
            fault=_fault(self._observation) if data is None else mujoco_fault(data),
        )

    def image(self, camera: str, height: int, width: int) -> UInt8[np.ndarray, "height width 3"]:
        """A camera's picture, top row first, resized (mean of the pixels it covers)."""
        if camera not in self._cameras:
            raise ValueError(f"no camera {camera!r}; cameras: {', '.join(self._cameras)}")
        shown = self._run(self._env.render) if camera == RENDER else entry(self._observation, camera)
        _close_all_at_exit()
        picture = Image.fromarray(np.ascontiguousarray(checked_picture(camera, shown)))
        return np.array(picture.resize((width, height), Image.Resampling.BOX))  # of the same size: unchanged

    def proprio(self) -> Float32[np.ndarray, " proprio_dim"]:
        """The chosen entries of the last observation, one after the other."""
        parts = [np.ravel(entry(self._observation, key)) for key in self._proprio_keys]
        return np.concatenate([np.zeros(0), *parts]).astype(np.float32)

    def fingerprint(self) -> Float64[np.ndarray, " entries"]:
        """MuJoCo's state if there is one, then a digest of all that the environment has answered since its reset."""
        digest = np.frombuffer(self._history.digest(), dtype=np.uint8).astype(np.float64)
        data = _mujoco_data(self._env)
        return digest if data is None else np.concatenate([integration_state(data), digest])

    @property
    def _env(self) -> Any:
        return self._envs[self._task]

    def _run(self, call: Callable[[], Value]) -> Value:
        return self._thread.run(call)

    def _remember(self, answer: Any) -> None:
        for leaf in _leaves(answer):
            self._history.update(np.ascontiguousarray(leaf).tobytes())

    def _is_success(self, reward: float, terminated: bool, info: Mapping[str, Any]) -> bool:
        if self._success == "terminated_with_reward":
            return terminated and reward > 0.0
        if self._success not in info:
            raise ValueError(
                f"{self._task} does not tell info[{self._success!r}] (it tells: {', '.join(info) or 'nothing'}); set "
                f"'success' to one of {', '.join(get_args(SuccessRule))}"
            )
        return bool(info[self._success])


def entry(observation: Any, key: str) -> np.ndarray:
    """An entry of an observation: of a dictionary by its key, or the whole of it by the name "observation".

    Raises:
        ValueError: There is none of this name; lists those that exist.
    """
    entries = observation if isinstance(observation, Mapping) else {OBSERVATION: observation}
    if key not in entries:
        raise ValueError(f"the observation has no entry {key!r}; there is: {', '.join(entries)}")
    return np.asarray(entries[key])


def checked_picture(camera: str, picture: Any) -> UInt8[np.ndarray, "height width 3"]:
    """The picture, if it is an RGB image.

    Raises:
        ValueError: Not a uint8 array of shape (height, width, 3).
    """
    if isinstance(picture, np.ndarray) and picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3:
        return picture
    what = f"{picture.dtype} of shape {picture.shape}" if isinstance(picture, np.ndarray) else type(picture).__name__
    raise ValueError(
        f"camera {camera!r} shows {what}, but an RGB image is uint8 of shape (height, width, 3); wrap the "
        "environment so that it returns that"
    )


def check_action_space(task: str, space: Any) -> int:
    """The number of entries of an action.

    Raises:
        ValueError: Not a bounded box of real numbers with one axis.
    """
    from gymnasium.spaces import Box

    if not isinstance(space, Box) or len(space.shape) != 1 or space.dtype.kind != "f":
        raise ValueError(f"{task} has the action space {space}; only a Box of real numbers with one axis can be used")
    if not space.is_bounded():
        raise ValueError(f"{task} has the action space {space} without bounds; wrap it in RescaleAction or ClipAction")
    return int(space.shape[0])


def scale_action(action: Float64[np.ndarray, " action_dim"], space: Any) -> np.ndarray:
    """The action with [-1, 1] stretched to the box."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    scaled = 0.5 * (low + high) + 0.5 * (high - low) * action
    bounded: np.ndarray = np.clip(scaled.astype(space.dtype), space.low, space.high)  # rounding may lead beyond
    return bounded


def _mujoco_data(env: Any) -> mujoco.MjData | None:
    data = getattr(env.unwrapped, "data", None)
    return data if isinstance(data, mujoco.MjData) else None


def _fault(observation: Any) -> str | None:
    numbers = [leaf for leaf in _leaves(observation) if leaf.dtype.kind == "f"]
    return None if all(np.isfinite(leaf).all() for leaf in numbers) else "the observation is not finite"


def _leaves(answer: Any) -> Iterator[np.ndarray]:
    """The arrays of a nested observation, in a fixed order."""
    if isinstance(answer, Mapping):
        for key in sorted(answer):
            yield from _leaves(answer[key])
    elif isinstance(answer, tuple | list):
        for item in answer:
            yield from _leaves(item)
    else:
        yield np.asarray(answer)


def _close(thread: HomeThread, envs: dict[str, Any]) -> Future[Any]:
    closed = thread.submit(lambda: [env.close() for env in envs.values()])
    thread.stop()
    return closed


@cache
def _close_all_at_exit() -> None:
    """Let environments free their drawing contexts, before MuJoCo's own exit handler closes the display under them."""

    def close_all() -> None:
        for closed in [_close(env._thread, env._envs) for env in _living]:
            closed.result(timeout=_EXIT_TIMEOUT_S)

    atexit.register(close_all)
