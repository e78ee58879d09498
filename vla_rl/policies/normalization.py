"""Normalisation of actions and proprioception by dataset statistics, with OpenVLA's formulas and file format.

Source: OpenVLA / OpenVLA-OFT, `dataset_statistics.json`: {key: {"action": {...}, "proprio": {...}, ...}}; actions use
the q01..q99 range ("bounds_q99"), entries whose `mask` is False (the gripper) pass through unchanged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from jaxtyping import Bool, Float64

_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True, eq=False)
class RangeStats:
    """Per-entry statistics of one quantity; `mask` False means: not normalised."""

    q01: Float64[np.ndarray, " dim"]
    q99: Float64[np.ndarray, " dim"]
    min: Float64[np.ndarray, " dim"]
    max: Float64[np.ndarray, " dim"]
    mean: Float64[np.ndarray, " dim"]
    std: Float64[np.ndarray, " dim"]
    mask: Bool[np.ndarray, " dim"]

    @classmethod
    def from_data(cls, values: Float64[np.ndarray, "rows dim"], mask: Bool[np.ndarray, " dim"]) -> Self:
        """Statistics of recorded rows."""
        return cls(
            q01=np.quantile(values, 0.01, axis=0),
            q99=np.quantile(values, 0.99, axis=0),
            min=values.min(axis=0),
            max=values.max(axis=0),
            mean=values.mean(axis=0),
            std=values.std(axis=0),
            mask=mask,
        )

    def normalize(self, values: Float64[np.ndarray, "*rows dim"]) -> Float64[np.ndarray, "*rows dim"]:
        """Map [q01, q99] to [-1, 1], clipped; unmasked entries unchanged."""
        scaled = 2.0 * (values - self.q01) / (self.q99 - self.q01 + _EPSILON) - 1.0
        return np.where(self.mask, np.clip(scaled, -1.0, 1.0), values)

    def denormalize(
        self, values: Float64[np.ndarray, "*rows dim"], epsilon: float = _EPSILON
    ) -> Float64[np.ndarray, "*rows dim"]:
        """Map [-1, 1] back to [q01, q99 + epsilon]; unmasked entries unchanged. Original OpenVLA: epsilon 0."""
        return np.where(self.mask, 0.5 * (values + 1.0) * (self.q99 - self.q01 + epsilon) + self.q01, values)

    def over_extremes(self) -> Self:
        """The same with minimum and maximum in place of the quantiles ("bounds" in OpenVLA-OFT, for ALOHA)."""
        return replace(self, q01=self.min, q99=self.max)

    def to_dict(self) -> dict[str, list[float] | list[bool]]:
        """Lists, in the published format."""
        return {name: getattr(self, name).tolist() for name in ("q01", "q99", "min", "max", "mean", "std", "mask")}

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Self:
        """Inverse of `to_dict`; a missing mask means that everything is normalised."""
        missing = [name for name in ("q01", "q99", "min", "max", "mean", "std") if name not in entry]
        if missing:
            raise ValueError(f"normalisation statistics lack {missing}; found {sorted(entry)}")
        arrays = {
            name: np.asarray(entry[name], dtype=np.float64) for name in ("q01", "q99", "min", "max", "mean", "std")
        }
        mask = np.asarray(entry.get("mask", [True] * len(arrays["q01"])), dtype=bool)
        lengths = {name: len(values) for name, values in (arrays | {"mask": mask}).items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"normalisation statistics have entries of different lengths: {lengths}")
        if not all(np.isfinite(values).all() for values in arrays.values()):
            raise ValueError("normalisation statistics are not finite; compute them again from the data")
        if (arrays["q01"] > arrays["q99"]).any() or (arrays["min"] > arrays["max"]).any():
            raise ValueError("normalisation statistics have a lower bound above its upper bound (q01, q99, min, max)")
        return cls(**arrays, mask=mask)


@dataclass(frozen=True, kw_only=True, eq=False)
class NormStats:
    """Statistics of one dataset.

    Attributes:
        key: Name of the dataset, the key in `dataset_statistics.json`.
        action: Of single actions.
        proprio: Of the proprioceptive state.
        num_transitions: Control steps in the dataset.
        num_trajectories: Demonstrations in the dataset.
    """

    key: str
    action: RangeStats
    proprio: RangeStats
    num_transitions: int
    num_trajectories: int

    def save(self, folder: Path) -> None:
        """Write `dataset_statistics.json`."""
        entry = {
            "action": self.action.to_dict(),
            "proprio": {name: values for name, values in self.proprio.to_dict().items() if name != "mask"},
            "num_transitions": self.num_transitions,
            "num_trajectories": self.num_trajectories,
        }
        (folder / "dataset_statistics.json").write_text(json.dumps({self.key: entry}, indent=2))

    @classmethod
    def load(cls, folder: Path, key: str | None = None) -> Self:
        """Read `dataset_statistics.json`; `key` may be left out if the file holds one dataset.

        Raises:
            ValueError: The key is missing or ambiguous; the message lists the candidates.
        """
        path = folder / "dataset_statistics.json"
        content = json.loads(path.read_text())
        if key is None and len(content) == 1:
            key = next(iter(content))
        if key is None or key not in content:
            raise ValueError(f"normalisation key {key!r} is not in {path}; choose one of {sorted(content)}")
        entry = content[key]
        if not {"action", "proprio"} <= entry.keys():
            raise ValueError(f"{key!r} in {path} needs 'action' and 'proprio'; found {sorted(entry)}")
        return cls(
            key=key,
            action=RangeStats.from_dict(entry["action"]),
            proprio=RangeStats.from_dict(entry["proprio"]),
            num_transitions=int(entry.get("num_transitions", 0)),
            num_trajectories=int(entry.get("num_trajectories", 0)),
        )
