"""Demonstration files: exact round trip, LIBERO's layout, one error for whatever is wrong, whole or not at all."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

from vla_rl.data.demos import Demonstration
from vla_rl.data.libero_hdf5 import read_demonstrations, read_folder, write_demonstrations

CAMERAS = ("agentview", "robot0_eye_in_hand")


def demonstration(num_steps: int, seed: int, task: str = "tabletop/pick_up_red_cube") -> Demonstration:
    rng = np.random.default_rng(seed)
    return Demonstration(
        task=task,
        instruction=f"pick up the red cube, wording {seed}",
        images=rng.integers(256, size=(num_steps, 2, 12, 16, 3), dtype=np.uint8),
        proprio=rng.normal(size=(num_steps, 8)).astype(np.float32),
        actions=rng.normal(size=(num_steps, 7)),
    )


@pytest.fixture
def demos() -> list[Demonstration]:
    """A dozen, so that demo_10 and demo_11 come after demo_9."""
    return [demonstration(2 + seed, seed) for seed in range(12)]


@pytest.fixture
def path(tmp_path: Path, demos: list[Demonstration]) -> Path:
    write_demonstrations(tmp_path / "task.hdf5", demos, CAMERAS)
    return tmp_path / "task.hdf5"


def test_what_is_read_is_what_was_written(path: Path, demos: list[Demonstration]) -> None:
    loaded = read_demonstrations(path, CAMERAS)
    assert len(loaded) == len(demos)
    for found, expected in zip(loaded, demos, strict=True):
        assert (found.task, found.instruction) == (expected.task, expected.instruction)
        for name in ("images", "proprio", "actions"):
            assert getattr(found, name).dtype == getattr(expected, name).dtype
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert [item.name for item in path.parent.iterdir()] == ["task.hdf5"]


def test_cameras_are_read_in_the_order_asked_for(path: Path, demos: list[Demonstration]) -> None:
    (first, *_) = read_demonstrations(path, CAMERAS[::-1])
    np.testing.assert_array_equal(first.images, demos[0].images[:, ::-1])
    (first, *_) = read_demonstrations(path, ("robot0_eye_in_hand",))
    np.testing.assert_array_equal(first.images, demos[0].images[:, 1:])


def test_the_layout_is_liberos(path: Path, demos: list[Demonstration]) -> None:
    with h5py.File(path) as file:
        assert list(file) == ["data"]
        data = file["data"]
        problem = json.loads(data.attrs["problem_info"])
        assert problem["language_instruction"] == demos[0].instruction
        assert problem["problem_name"] == json.loads(data.attrs["env_args"])["env_name"] == demos[0].task
        assert data.attrs["num_demos"] == 12
        assert data.attrs["total"] == sum(range(2, 14))
        assert set(data) == {f"demo_{i}" for i in range(12)}
        for i, demo in enumerate(demos):
            group, num = data[f"demo_{i}"], demo.num_steps
            assert group.attrs["num_samples"] == num
            found = {}
            group.visititems(lambda name, item, found=found: found.update({name: item}))
            layout = {name: (item.shape, item.dtype) for name, item in found.items() if isinstance(item, h5py.Dataset)}
            assert layout == {
                "actions": ((num, 7), np.float64),
                "rewards": ((num,), np.uint8),
                "dones": ((num,), np.uint8),
                "obs/agentview_rgb": ((num, 12, 16, 3), np.uint8),
                "obs/eye_in_hand_rgb": ((num, 12, 16, 3), np.uint8),
                "obs/ee_pos": ((num, 3), np.float64),
                "obs/ee_ori": ((num, 3), np.float64),
                "obs/ee_states": ((num, 6), np.float64),
                "obs/gripper_states": ((num, 2), np.float64),
            }
            assert group["rewards"][()].tolist() == group["dones"][()].tolist() == [0] * (num - 1) + [1]
            np.testing.assert_array_equal(group["obs/ee_pos"], demo.proprio[:, :3])
            np.testing.assert_array_equal(group["obs/ee_ori"], demo.proprio[:, 3:6])
            np.testing.assert_array_equal(group["obs/ee_states"], demo.proprio[:, :6])
            np.testing.assert_array_equal(group["obs/gripper_states"], demo.proprio[:, 6:])
            np.testing.assert_array_equal(group["obs/eye_in_hand_rgb"], demo.images[:, 1])


def test_a_file_of_libero_itself_is_read(path: Path) -> None:
    """Theirs has one wording per task, in quotes or as a list of characters, and none per demonstration."""
    for sentence in ('"open the drawer"', list("open the drawer")):
        with h5py.File(path, "r+") as file:
            file["data"].attrs["problem_info"] = json.dumps(
                {"problem_name": "libero_kitchen", "language_instruction": sentence}
            )
            for group in file["data"].values():
                group.attrs.pop("instruction", None)
        loaded = read_demonstrations(path, CAMERAS)
        assert {(demo.task, demo.instruction) for demo in loaded} == {("libero_kitchen", "open the drawer")}


def test_a_missing_camera_is_named_with_those_that_are_there(path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"cannot read {path} .* no images of frontview, only agentview_rgb, .*set suite\.cameras"
    ):
        read_demonstrations(path, ("agentview", "frontview"))


def damaged(path: Path, damage: str) -> Path:
    match damage:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_text("no HDF5 at all")
        case "torn":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        case "overwritten":
            content = bytearray(path.read_bytes())
            content[len(content) // 3 : 2 * len(content) // 3] = b"\x5a" * (len(content) // 3)
            path.write_bytes(content)
        case _:
            with h5py.File(path, "r+") as file:
                edit(file, damage)
    return path


def edit(file: h5py.File, damage: str) -> None:
    match damage:
        case "no data":
            del file["data"]
        case "no problem_info":
            del file["data"].attrs["problem_info"]
        case "broken problem_info":
            file["data"].attrs["problem_info"] = "{"
        case "problem_info is a list":
            file["data"].attrs["problem_info"] = "[]"
        case "no actions":
            del file["data/demo_3/actions"]
        case "another group":
            file["data"].create_group("mask")
        case "uneven":
            del file["data/demo_3/obs/ee_pos"]
            file["data/demo_3/obs/ee_pos"] = np.zeros((1, 3))


@pytest.mark.parametrize(
    "damage",
    [
        *("missing", "empty", "text", "torn", "overwritten", "no data", "no problem_info", "broken problem_info"),
        *("problem_info is a list", "no actions", "another group", "uneven"),
    ],
)
def test_whatever_is_wrong_with_a_file_is_one_error_that_names_it(path: Path, damage: str) -> None:
    with pytest.raises(ValueError, match=rf"^cannot read {path} as demonstrations in LIBERO's layout: ."):
        read_demonstrations(damaged(path, damage), CAMERAS)


def test_a_file_holds_one_task(tmp_path: Path) -> None:
    for demos in ([], [demonstration(2, 0), demonstration(2, 1, task="tabletop/stack")]):
        with pytest.raises(ValueError, match="a demonstration file holds one task, got"):
            write_demonstrations(tmp_path / "task.hdf5", demos, CAMERAS)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name, seed in (("b", 1), ("a", 2)):
        write_demonstrations(tmp_path / f"{name}.hdf5", [demonstration(2, seed, task=f"toy/{name}")], CAMERAS)
    (tmp_path / "notes.txt").write_text("not a demonstration")
    assert [demo.task for demo in read_folder(tmp_path, CAMERAS)] == ["toy/a", "toy/b"]


def test_a_folder_without_demonstrations_says_how_to_get_some(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=rf"{folder} holds no demonstrations .*: vla-rl demos"):
            read_folder(folder, CAMERAS)


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond this size: a full disk, as far as a writer can tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_full_disk_leaves_nothing_half_written(path: Path, demos: list[Demonstration], share: float) -> None:
    before, other = path.read_bytes(), path.with_name("other.hdf5")
    for target in (other, path):  # a new file, and one that is there already
        with (
            room_for(int(share * len(before))),
            pytest.raises(OSError, match=rf"cannot write {target}: File too large; free space on the disk"),
        ):
            write_demonstrations(target, demos, CAMERAS)
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before
    write_demonstrations(other, demos, CAMERAS)  # and it works once there is room again
    assert len(read_demonstrations(other, CAMERAS)) == len(demos)
