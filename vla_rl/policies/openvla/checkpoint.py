"""Reading a checkpoint folder in the format of openvla/openvla-7b and of OpenVLA-OFT's training runs.

The weights are memory-mapped and go tensor by tensor to the target device and dtype, so that the host never holds more
than the model itself (on a CPU) or about one shard (on a GPU). Every tensor is accounted for. The folder is only read.

Side modules lie beside the weights as `<name>--<step>_checkpoint.pt`, written by data-parallel training: their keys
may carry the prefix "module.".
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

Shape = tuple[int, ...]
SIDE_MODULES = ("action_head", "proprio_projector", "noisy_action_projector", "vision_backbone")
OUR_FILE = "vla_rl.json"
"""Beside the published files: what they do not say."""
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """What is in a checkpoint folder.

    Attributes:
        folder: Where.
        config: Content of `config.json`.
        shards: Files with the weights of the model.
        side_files: Names of the side modules that are there, with their files.
    """

    folder: Path
    config: Mapping[str, Any]
    shards: tuple[Path, ...]
    side_files: Mapping[str, Path]

    @classmethod
    def find(cls, folder: Path) -> CheckpointFiles:
        """List a folder.

        Raises:
            ValueError: A file is missing, damaged or ambiguous.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder} is no OpenVLA checkpoint: it has no config.json")
        config = read_json(path)
        return cls(folder=folder, config=config, shards=_find_shards(folder), side_files=_find_side_files(folder))

    def require_trainable(self, stage: Literal["sft", "train"]) -> None:
        """Refuse a stage that the side modules do not allow.

        Raises:
            ValueError: Says which file, and what to use instead.
        """
        if "vision_backbone" in self.side_files:
            raise ValueError(f"{self.folder} modulates its vision towers (FiLM), which can be evaluated, not trained")
        if "noisy_action_projector" in self.side_files:
            raise ValueError(
                f"{self.folder} has a diffusion head, which can be evaluated, not trained; start from a checkpoint "
                "without the files action_head--* and noisy_action_projector--*"
            )
        if stage == "train" and "action_head" in self.side_files:
            raise ValueError(
                f"{self.folder} has a regression head, which gives no probabilities of actions; reinforcement learning "
                "needs a checkpoint that was cloned with discrete tokens, for example "
                "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1"
            )

    def ours(self) -> dict[str, Any] | None:
        """Content of `vla_rl.json`; None: the folder was not written by vla-rl.

        Raises:
            ValueError: The file is damaged.
        """
        path = self.folder / OUR_FILE
        if not path.is_file():
            return None
        content = read_json(path)
        if not {"policy", "env_spec"} <= content.keys():
            raise ValueError(f"{path} is damaged: it lacks policy or env_spec")
        return content

    def norm_stats(self) -> Mapping[str, Any]:
        """Statistics by dataset: of `dataset_statistics.json` if it is there, else of `config.json`."""
        path = self.folder / "dataset_statistics.json"
        if path.is_file():
            return read_json(path)
        stats: Mapping[str, Any] = self.config.get("norm_stats") or {}
        return stats

    def side_module(self, name: str) -> dict[str, torch.Tensor]:
        """Tensors of a side module, memory-mapped.

        Raises:
            ValueError: The file is damaged.
        """
        path = self.side_files[name]
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
            raise ValueError(f"{path} does not hold the tensors of a module by name")
        return {key.removeprefix("module."): value for key, value in tensors.items()}

    def shapes(self) -> dict[str, Shape]:
        """Names and shapes of all tensors in the shards; reads their headers only."""
        shapes: dict[str, Shape] = {}
        for shard in self.shards:
            with _open_shard(shard, "cpu") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (no iterator)
                    if key in shapes:
                        raise ValueError(f"tensor {key!r} is in two files of {self.folder}")
                    shapes[key] = tuple(tensors.get_slice(key).get_shape())
        return shapes

    def tensors(self, device: str) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the shards, one after the other, on the device and in the dtype of the file."""
        for shard in self.shards:
            with _open_shard(shard, device) as tensors:
                for key in tensors.keys():  # noqa: SIM118 (no iterator)
                    yield key, tensors.get_tensor(key)


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file.

    Raises:
        ValueError: The file is damaged, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: expected a table of names, found {type(content).__name__}")
    return content


def resolve_checkpoint_folder(name: str) -> Path:
    """The folder that a user means: a path, or a hub id whose files are already in the local cache.

    Nothing is downloaded.

    Raises:
        ValueError: Neither.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not is_hub_id(name):
        raise ValueError(f"checkpoint {name!r} does not exist")
    try:
        from huggingface_hub import snapshot_download  # of the extra [openvla]
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise ValueError(
            f"checkpoint {name!r} does not exist; if it is a hub id: pip install 'vla-rl[openvla]'"
        ) from error

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint {name!r} is neither a folder nor a hub id in the local cache; download it first: "
            f"hf download {name}"
        ) from error


def is_hub_id(name: str) -> bool:
    """Whether a checkpoint that is no folder here can be a hub id; in a folder that is here it is a mistyped path."""
    folder = name.partition("/")[0]
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(folder).is_dir()


def load_weights(
    module: nn.Module, tensors: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype, source: str
) -> None:
    """Fill a module that was built on the meta device.

    Args:
        module: Its parameters are replaced, one by one.
        tensors: By name; each is converted and assigned before the next one is read.
        dtype: Of the floating-point weights.
        source: Where the tensors come from, for the message.

    Raises:
        ValueError: Names are missing, unexpected or doubled, or shapes differ; lists all of them.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found: dict[str, Shape] = {}
    doubled: list[str] = []
    for name, tensor in tensors:
        if name in found:
            doubled.append(f"  doubled: {name}")
            continue
        found[name] = tuple(tensor.shape)
        if expected.get(name) == found[name]:
            converted = tensor.to(dtype) if tensor.is_floating_point() else tensor
            module.load_state_dict({name: converted}, strict=False, assign=True)
    problems = compare_shapes(expected, found) + doubled
    if problems:
        raise ValueError(f"the weights in {source} do not fit the model:\n" + "\n".join(problems))


def compare_shapes(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> list[str]:
    """One line per tensor that is missing, unexpected or of another shape."""
    lines = [f"  missing: {name} {list(expected[name])}" for name in expected if name not in found]
    lines += [f"  unexpected: {name} {list(found[name])}" for name in found if name not in expected]
    lines += [
        f"  wrong shape: {name} is {list(found[name])}, expected {list(expected[name])}"
        for name in expected
        if name in found and expected[name] != found[name]
    ]
    return lines


def _find_shards(folder: Path) -> tuple[Path, ...]:
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    path = folder / _INDEX
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} has no weights: neither model.safetensors nor {_INDEX}") from error
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{path} names files that are not in the folder: {', '.join(missing)}; copy them again")
    return tuple(folder / name for name in names)


def _find_side_files(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for name in SIDE_MODULES:
        alike = sorted(path for path in folder.glob("*.pt") if name in path.name)
        files = [path for path in alike if "checkpoint" in path.name]  # OpenVLA-OFT's rule
        if alike and not files:
            raise ValueError(f"{alike[0]} is not recognised: side modules are named {name}--<step>_checkpoint.pt")
        if len(files) > 1:
            raise ValueError(
                f"{folder} has {len(files)} files for {name}: {', '.join(path.name for path in files)}; keep one"
            )
        found |= {name: files[0]} if files else {}
    return found


def _open_shard(path: Path, device: str) -> Any:
    try:
        return safe_open(path, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged: {error}; copy or download it again") from error
