"""A policy behind the server: observations by the contract's names in, the greedy chunk out."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from robots.contract import CameraContract, DeploymentContract
from vla_rl.policy import Policy, Sampling
from vla_rl.types import Observation

STATE_KEY, PROMPT_KEY = "observation/state", "prompt"


def image_key(camera: str) -> str:
    """Where a camera's picture is in an observation on the wire."""
    return f"observation/images/{camera}"


class PolicyInference:
    """Answers observations with `policy.act`, without chance.

    An observation holds "observation/images/<camera>" (height, width, 3) uint8 and "observation/state" float32 in the
    contract's order, and "prompt": text.
    """

    def __init__(self, policy: Policy, contract: DeploymentContract) -> None:
        self._policy = policy
        self._contract = contract
        self._generators = [np.random.default_rng(0)]  # greedy draws nothing from it

    @property
    def metadata(self) -> dict[str, Any]:
        """The contract, and who answers."""
        return {
            "contract": self._contract.model_dump(mode="json"),
            "policy": self._contract.policy,
            "server": f"vla-rl {importlib.metadata.version('vla-rl')}",
        }

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """`actions`: (K, A) float64 in the contract's units.

        Raises:
            ValueError: Lists everything that is missing, unknown or of another shape or dtype.
        """
        output = self._policy.act([self._read(observation)], Sampling(mode="greedy"), self._generators)
        return {"actions": output.actions[0]}

    def example(self, prompt: str) -> dict[str, Any]:
        """An observation without content, e.g. to warm up."""
        images = {
            image_key(camera.name): np.zeros((camera.height, camera.width, 3), dtype=np.uint8)
            for camera in self._contract.cameras
        }
        state = np.zeros(len(self._contract.state_names), dtype=np.float32)
        return {**images, STATE_KEY: state, PROMPT_KEY: prompt}

    def _read(self, observation: dict[str, Any]) -> Observation:
        cameras = self._contract.cameras
        expected = [*(image_key(camera.name) for camera in cameras), STATE_KEY, PROMPT_KEY]
        problems = [f"{key} is missing" for key in expected if key not in observation]
        problems += [f"{key!r} is unknown" for key in observation if key not in expected]
        if not problems:
            problems = [problem for camera in cameras if (problem := _image_problem(observation, camera))]
            problems += [
                problem
                for problem in (self._state_problem(observation[STATE_KEY]), _prompt_problem(observation))
                if problem
            ]
        if problems:
            raise ValueError(f"the observation cannot be used: {'; '.join(problems)}; expected {', '.join(expected)}")
        state: Float32[np.ndarray, " proprio_dim"] = observation[STATE_KEY]
        images: UInt8[np.ndarray, "cameras height width 3"] = np.stack(
            [observation[image_key(camera.name)] for camera in cameras]
        )
        return Observation(images=images, proprio=state, instruction=observation[PROMPT_KEY])

    def _state_problem(self, state: Any) -> str | None:
        names = self._contract.state_names
        if not _is_array(state, np.float32, (len(names),)):
            return f"{STATE_KEY} is {_describe(state)}, not float32 of shape ({len(names)},): {', '.join(names)}"
        broken = [name for name, value in zip(names, state, strict=True) if not np.isfinite(value)]
        return f"{STATE_KEY} is not finite in {', '.join(broken)}" if broken else None


def _image_problem(observation: dict[str, Any], camera: CameraContract) -> str | None:
    key, shape = image_key(camera.name), (camera.height, camera.width, 3)
    image = observation[key]
    return None if _is_array(image, np.uint8, shape) else f"{key} is {_describe(image)}, not uint8 of shape {shape}"


def _prompt_problem(observation: dict[str, Any]) -> str | None:
    prompt = observation[PROMPT_KEY]
    return None if isinstance(prompt, str) and prompt.strip() else f"{PROMPT_KEY} is {prompt!r:.40}, not an instruction"


def _is_array(value: Any, dtype: type[np.generic], shape: tuple[int, ...]) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == dtype and value.shape == shape


def _describe(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
