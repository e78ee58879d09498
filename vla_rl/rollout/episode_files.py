"""Groups of episodes in one `.npz` file, without pickle: a checkpoint keeps the groups that are carried over.

Arrays of all decisions are stacked; everything else is JSON text inside the same file. Recorded frames are not kept.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.types import Decision, Episode, Observation, Start, WorldState

_FORMAT = 2


def save_groups(path: Path, groups: Sequence[Sequence[Episode]]) -> None:
    """Write groups of episodes.

    Args:
        path: File to write; should end in ".npz".
        groups: Episodes of one suite and one policy (arrays of equal shape), grouped.
    """
    episodes = [episode for group in groups for episode in group]
    arrays: dict[str, np.ndarray] = {}
    for index, episode in enumerate(episodes):
        arrays[f"init_{index}"] = episode.start.init
        if episode.start.snapshot is not None:
            arrays[f"snapshot_physics_{index}"] = episode.start.snapshot.physics
            arrays[f"snapshot_controller_{index}"] = episode.start.snapshot.controller
            arrays[f"snapshot_fixtures_{index}"] = episode.start.snapshot.fixtures
    decisions = [decision for episode in episodes for decision in episode.decisions]
    if decisions:
        arrays["images"] = np.stack([decision.observation.images for decision in decisions])
        arrays["proprio"] = np.stack([decision.observation.proprio for decision in decisions])
        arrays["sample"] = np.stack([decision.sample for decision in decisions])
        arrays["logprobs"] = np.stack([decision.logprobs for decision in decisions])
    header = {"format": _FORMAT, "groups": [[_episode_header(episode) for episode in group] for group in groups]}
    arrays["header"] = np.array(json.dumps(header))
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def load_groups(path: Path) -> list[list[Episode]]:
    """Read what `save_groups` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Another kind of file, damaged, or of another format.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(str(arrays["header"]))
    except (zipfile.BadZipFile, KeyError, EOFError, ValueError) as error:
        raise ValueError(f"'{path}' is not a readable file of episodes: {error}") from error
    if header["format"] != _FORMAT:
        raise ValueError(f"'{path}' has format {header['format']}; this version reads format {_FORMAT}.")
    groups: list[list[Episode]] = []
    num_episodes = num_decisions = 0
    for group in header["groups"]:
        groups.append([])
        for item in group:
            rows = range(num_decisions, num_decisions + len(item["decisions"]))
            groups[-1].append(_episode(item, arrays, num_episodes, rows))
            num_episodes += 1
            num_decisions = rows.stop
    return groups


def _episode_header(episode: Episode) -> dict[str, Any]:
    start = episode.start
    return {
        "task": start.task,
        "instruction": start.instruction,
        "split": start.split,
        "index": start.index,
        "seed": start.seed,
        "snapshot_num_steps": None if start.snapshot is None else start.snapshot.num_steps,
        "episode_index": episode.episode_index,
        "group_index": episode.group_index,
        "policy_version": episode.policy_version,
        "success": episode.success,
        "truncated": episode.truncated,
        "decisions": [
            {"instruction": d.observation.instruction, "temperature": d.temperature, "num_steps": d.num_steps}
            for d in episode.decisions
        ],
    }


def _episode(item: dict[str, Any], arrays: dict[str, np.ndarray], index: int, rows: range) -> Episode:
    snapshot = None
    if item["snapshot_num_steps"] is not None:
        snapshot = WorldState(
            physics=arrays[f"snapshot_physics_{index}"],
            controller=arrays[f"snapshot_controller_{index}"],
            fixtures=arrays[f"snapshot_fixtures_{index}"],
            num_steps=item["snapshot_num_steps"],
        )
    start = Start(
        init=arrays[f"init_{index}"],
        snapshot=snapshot,
        **{name: item[name] for name in ("task", "instruction", "split", "index", "seed")},
    )
    decisions = [
        Decision(
            observation=Observation(
                images=arrays["images"][row], proprio=arrays["proprio"][row], instruction=decision["instruction"]
            ),
            sample=arrays["sample"][row],
            logprobs=arrays["logprobs"][row],
            temperature=decision["temperature"],
            num_steps=decision["num_steps"],
        )
        for row, decision in zip(rows, item["decisions"], strict=True)
    ]
    names = ("episode_index", "group_index", "policy_version", "success", "truncated")
    return Episode(start=start, decisions=decisions, **{name: item[name] for name in names})
