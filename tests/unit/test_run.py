"""Run folders and random streams."""

import errno
import json
from pathlib import Path

import numpy as np
import pytest

from vla_rl.run import atomic_path, open_run, seed_sequence


def words(*arguments: int | str) -> list[int]:
    return seed_sequence(*arguments).generate_state(2).tolist()  # type: ignore[arg-type]


def test_streams_are_the_same_for_ever() -> None:
    # A change of these numbers changes every run that is resumed or repeated.
    assert words(0) == np.random.SeedSequence(0).generate_state(2).tolist()
    assert words(7, "episode", 3) == [3981313786, 1226886671]


def test_streams_differ_by_every_key() -> None:
    purposes: list[tuple[int | str, ...]] = [
        (1,),
        (1, "a"),
        (1, "b"),
        (1, 0),
        (1, 1),
        (1, "a", 0),
        (1, "a", 1),
        (1, 0, "a"),
    ]
    purposes += [(2, "a"), (1, 0, 0), (1, "0"), (1, "a", "b"), (1, "ab")]
    assert len({tuple(words(*purpose)) for purpose in purposes}) == len(purposes)


def test_a_run_records_config_and_software(tmp_path: Path) -> None:
    folder = open_run(tmp_path / "runs" / "a", "x: 1\n")
    assert folder.config_file.read_text() == "x: 1\n"
    versions = json.loads((folder.path / "versions.json").read_text())
    assert versions["packages"]["numpy"] == np.__version__
    assert versions["packages"]["mujoco"] == "3.3.2"
    assert versions["num_cpu_cores"] >= 1
    assert versions.keys() >= {"python", "platform", "git_commit", "has_uncommitted_changes"}


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    open_run(tmp_path / "a", "x: 1\n")
    with pytest.raises(FileExistsError, match=r"a' is not empty; .*--resume"):
        open_run(tmp_path / "a", "x: 2\n")
    assert (tmp_path / "a" / "config.yaml").read_text() == "x: 1\n"
    (tmp_path / "empty").mkdir()
    open_run(tmp_path / "empty", "x: 1\n")


def test_resuming_keeps_the_earlier_config(tmp_path: Path) -> None:
    for text in ("x: 1\n", "x: 1\n", "x: 2\n", "x: 3\n"):
        open_run(tmp_path / "a", text, resume=(tmp_path / "a").exists())
    assert (tmp_path / "a" / "config.yaml").read_text() == "x: 3\n"
    assert (tmp_path / "a" / "config.1.yaml").read_text() == "x: 1\n"
    assert (tmp_path / "a" / "config.2.yaml").read_text() == "x: 2\n"


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no run to resume in '.*b'"):
        open_run(tmp_path / "b", "x: 1\n", resume=True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_full_disk_and_missing_permission_give_one_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, "the reason")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match=r"cannot write run folder '.*a': the reason; free space") as caught:
        open_run(tmp_path / "a", "x: 1\n")
    assert caught.value.errno == code


def write_half(target: Path, error: Exception) -> None:
    with atomic_path(target) as temporary:
        temporary.write_text("half")
        raise error


def test_atomic_path_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "report.md"
    with atomic_path(target) as temporary:
        temporary.write_text("old")
        assert not target.exists()
    with pytest.raises(ValueError, match="stop"):
        write_half(target, ValueError("stop"))
    assert target.read_text() == "old"
    assert list(target.parent.iterdir()) == [target]


def test_atomic_path_names_the_file_when_the_disk_is_full(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cannot write '.*curve.png': No space left.*free some space"):
        write_half(tmp_path / "curve.png", OSError(errno.ENOSPC, "No space left on device"))
    assert list(tmp_path.iterdir()) == []
