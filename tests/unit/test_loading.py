"""Whatever is wrong with a policy folder comes as one ValueError that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import tiny_policy

from vla_rl.policies.loading import load_policy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_policy(hidden_dim=16, num_keypoints=2).save(tmp_path / "policy")
    return tmp_path / "policy"


def test_a_saved_folder_is_complete(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {"model.safetensors", "config.json", "vocabulary.json", "dataset_statistics.json"}
    assert load_policy(folder).config.hidden_dim == 16  # type: ignore[attr-defined]


def test_another_folder_is_no_policy(tmp_path: Path, folder: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", folder / "config.json"):
        with pytest.raises(ValueError, match=rf"{path} is not a policy: it has no config\.json"):
            load_policy(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"policy": 1}', '{"policy": {}}', "\x00"])
def test_a_damaged_config_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        load_policy(folder)


def edit_config(folder: Path, edit: Callable[[dict], None]) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_an_unknown_type_is_named_with_the_known_ones(folder: Path) -> None:
    edit_config(folder, lambda content: content["policy"].update(type="huge_vla"))
    with pytest.raises(ValueError, match="holds a policy of unknown type 'huge_vla'; known: tiny_vla"):
        load_policy(folder)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "torn weights": lambda folder: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:1000]
    ),
    "weights of another size": lambda folder: edit_config(
        folder, lambda content: content["policy"].update(num_blocks=1)
    ),
    "no vocabulary": lambda folder: (folder / "vocabulary.json").unlink(),
    "broken vocabulary": lambda folder: (folder / "vocabulary.json").write_text('["a"'),
    "no statistics": lambda folder: (folder / "dataset_statistics.json").unlink(),
    "empty statistics": lambda folder: (folder / "dataset_statistics.json").write_text("{}"),
    "unknown option": lambda folder: edit_config(folder, lambda content: content["policy"].update(colour=1)),
    "no interface": lambda folder: edit_config(folder, lambda content: content.pop("env_spec")),
    "incomplete interface": lambda folder: edit_config(folder, lambda content: content["env_spec"].pop("cameras")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_is_one_error_that_names_the_folder(folder: Path, damage: str) -> None:
    DAMAGES[damage](folder)
    with pytest.raises(ValueError, match=rf"(?s)the policy in {folder} cannot be read .*; use another checkpoint"):
        load_policy(folder)
