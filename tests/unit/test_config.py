"""Layers, unions and error messages of configs, and that printed configs read back."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from vla_rl import config as config_module
from vla_rl.config import ConfigError, ConfigModel, load_config
from vla_rl.config_text import config_to_yaml, describe_fields


class Adam(ConfigModel):
    type: Literal["adam"] = "adam"
    """Kind."""
    lr: float = Field(default=1e-3, gt=0)
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decays."""


class Sgd(ConfigModel):
    type: Literal["sgd"] = "sgd"
    """Kind."""
    lr: float
    """Learning rate."""
    momentum: float = 0.0
    """Momentum."""


class Lora(ConfigModel):
    rank: int = 8
    """Rank."""


OptimizerUnion = Annotated[Adam | Sgd, Field(discriminator="type")]


class Train(ConfigModel):
    num_updates: int = 100
    """Updates."""
    optimizer: OptimizerUnion = Adam(lr=3e-4)
    """Optimiser,
    of either kind."""
    lora: Lora | None = None
    """Adapter."""
    mode: Literal["off", "fast", "exact"] = "off"
    """Mode."""


class Root(ConfigModel):
    name: str
    """Name of the run."""
    train: Train = Train()
    """Training."""
    output: Path | None = None
    """Folder."""
    schedule: tuple[OptimizerUnion, ...] = ()
    """One after the other."""
    weights: dict[str, float] = Field(default_factory=dict)
    """By task."""


def load(*overrides: str, files: tuple[Path, ...] = ()) -> Root:
    return load_config(Root, files, ("name=x", *overrides))


def message(*overrides: str, files: tuple[Path, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, files=files)
    return str(caught.value)


def yaml_file(folder: Path, text: str, name: str = "a.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# --- Layers ----------------------------------------------------------------------------------------------------------


def test_defaults_then_files_then_overrides(tmp_path: Path) -> None:
    first = yaml_file(tmp_path, "train: {num_updates: 1, mode: fast}\n", "1.yaml")
    second = yaml_file(tmp_path, "train:\n  num_updates: 2\n", "2.yaml")
    loaded = load("train.optimizer.lr=5e-6", files=(first, second))
    assert loaded.train == Train(num_updates=2, mode="fast", optimizer=Adam(lr=5e-6))


def test_values_are_read_as_yaml_scalars_and_lists() -> None:
    loaded = load(
        "train.optimizer.betas=[0.5, 1e-1]", "train.mode=off", "output=runs/a b", "train.lora.rank=4", "weights.lift=2"
    )
    assert loaded.train.optimizer == Adam(lr=3e-4, betas=(0.5, 0.1))
    assert loaded.train.mode == "off"  # a string, though YAML 1.1 has it as false
    assert loaded.output == Path("runs/a b")
    assert loaded.train.lora == Lora(rank=4)
    assert loaded.weights == {"lift": 2.0}
    assert load("train.lora={rank: 2}", "train.lora=null").train.lora is None


def test_changing_the_type_of_a_union_starts_from_the_new_defaults() -> None:
    assert load("train.optimizer={type: sgd, lr: 1}").train.optimizer == Sgd(lr=1.0)
    assert load("train.optimizer.type=sgd", "train.optimizer.lr=2").train.optimizer == Sgd(lr=2.0)
    # Without a change of type, the default block stays the base (3e-4, not 1e-3).
    assert load("train.optimizer.type=adam").train.optimizer == Adam(lr=3e-4)
    back = load("train.optimizer={type: sgd, lr: 1}", "train.optimizer={type: adam}")
    assert back.train.optimizer == Adam()


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load(files=(yaml_file(tmp_path, "# nothing\n"),)) == Root(name="x")


# --- Errors ----------------------------------------------------------------------------------------------------------


def test_unknown_key_names_path_source_and_near_names(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "train:\n  optimizer:\n    momentun: 1\n    type: sgd\n")
    text = message(files=(path,))
    assert text.startswith(f"{path}: unknown key 'train.optimizer.momentun'.")
    assert "Did you mean 'train.optimizer.momentum'?" in text
    assert "Keys of 'train.optimizer': lr, momentum, type." in text


def test_key_in_the_wrong_section_is_found_elsewhere() -> None:
    text = message("rank=3")
    assert "override 'rank=3': unknown key 'rank'. Did you mean 'train.lora.rank'?" in text
    assert "Did you mean" not in message("train.optimizer.momentum=3")  # exists, but not for the type in use


def test_unknown_key_inside_a_list_of_blocks() -> None:
    assert "unknown key 'schedule.1.beta'. Did you mean 'schedule.1.betas'" in message(
        "schedule=[{type: sgd, lr: 1}, {type: adam, beta: 1}]"
    )


def test_all_problems_are_listed_each_with_its_source(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "train: {num_updates: many}\n")
    lines = message("train.optimizer.lr=-1", files=(path,)).splitlines()
    assert lines == [
        f"{path}: 'train.num_updates' is 'many' (str): Input should be a valid integer.",
        "override 'train.optimizer.lr=-1': 'train.optimizer.lr' is -1 (int): Input should be greater than 0.",
    ]


@pytest.mark.parametrize("value", ["true", "8.5", "'8'", "[8]", "{a: 8}", "null"])
def test_wrong_types_are_not_converted(value: str) -> None:
    assert "'train.num_updates'" in message(f"train.num_updates={value}")


def test_choices_and_tags_suggest_the_nearest() -> None:
    assert "'train.mode' is 'exat' (str)" in message("train.mode=exat")
    assert "Did you mean 'exact'?" in message("train.mode=exat")
    assert "choose one of adam, sgd. Did you mean 'adam'?" in message("train.optimizer.type=adm")
    assert "'schedule.0.type' is missing; choose one of adam, sgd." in message("schedule=[{lr: 1}]")


def test_missing_required_values() -> None:
    assert "'train.optimizer.lr' is required and was not given" in message("train.optimizer.type=sgd")
    with pytest.raises(ConfigError, match="'name' is required"):
        load_config(Root, [], [])


@pytest.mark.parametrize("override", ["train", "=3", "train..mode=off"])
def test_overrides_need_a_name_and_a_value(override: str) -> None:
    assert "expected 'name=value'" in message(override)


def test_bad_yaml_names_file_and_line(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "train:\n  mode: fast\n  mode: exact\n")
    assert f"{path}, line 3: not valid YAML: the key 'mode' appears twice." in message(files=(path,))
    path = yaml_file(tmp_path, "train:\n  mode: [fast\nname: a\n")
    assert f"{path}, line 3: not valid YAML" in message(files=(path,))
    path = yaml_file(tmp_path, "- a\n- b\n")
    assert "expected 'key: value' lines at the top level, got list" in message(files=(path,))


def test_missing_file_lists_the_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    presets = tmp_path / "configs"
    (presets / "algo").mkdir(parents=True)
    for name in ("quickstart.yaml", "algo/simplevla.yaml"):
        (presets / name).write_text("{}\n")
    monkeypatch.setattr(config_module, "_PRESET_FOLDERS", (presets,))
    text = message(files=(Path("configs/quikstart.yaml"),))
    assert "config file 'configs/quikstart.yaml' does not exist." in text
    assert f"Did you mean '{presets / 'quickstart.yaml'}'?" in text
    assert str(presets / "algo" / "simplevla.yaml") in text


# --- Text ------------------------------------------------------------------------------------------------------------

VARIED = (
    "train.optimizer={type: sgd, lr: 1e-7}",
    "train.lora={}",
    "schedule=[{type: adam}, {type: sgd, lr: 2}]",
    "output=a/b",
    "weights={'a b': 1, '5e3': .inf}",
)


@pytest.mark.parametrize("comments", [True, False])
@pytest.mark.parametrize("overrides", [(), VARIED])
def test_printed_config_reads_back_equal(tmp_path: Path, comments: bool, overrides: tuple[str, ...]) -> None:
    original = load(*overrides)
    path = yaml_file(tmp_path, config_to_yaml(original, comments=comments))
    assert load_config(Root, [path]) == original


def test_comments_are_the_documentation() -> None:
    text = config_to_yaml(Root(name="x"), comments=True)
    assert text.startswith("# Name of the run.\nname: x\n# Training.\ntrain:\n  # Updates.\n  num_updates: 100\n")
    assert "  # Optimiser,\n  # of either kind.\n  optimizer:\n    # Kind.\n    type: adam\n" in text


def test_describe_fields_covers_all_members_of_unions() -> None:
    rows = {(row.name, row.condition): row for row in describe_fields(Root)}
    assert rows["train.num_updates", ""][:4] == ("train.num_updates", "int", "100", "Updates.")
    assert rows["train.optimizer.type", ""][1:4] == ("adam | sgd", "adam", "Optimiser, of either kind.")
    assert rows["train.optimizer.lr", "train.optimizer.type=adam"].default == "0.0003"
    assert rows["train.optimizer.lr", "train.optimizer.type=sgd"].default == ""
    assert rows["train.lora", ""][1:3] == ("block", "null")
    assert rows["train.lora.rank", ""].default == "8"
    assert rows["output", ""].type == "path | null"
    assert rows["train.mode", ""].type == "off | fast | exact"


def test_configs_are_frozen_and_closed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Train().num_updates = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="num_update"):
        Train(num_update=3)  # type: ignore[call-arg]
