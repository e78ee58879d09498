"""Finding LIBERO's files, in any distribution of it, without questions on stdin."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sim.libero import package
from sim.libero.package import available_tasks, find_tasks, read_init_states, sentence_of

ORIGINAL_INIT = """
import os, yaml
config = os.path.join(os.environ.get("LIBERO_CONFIG_PATH", os.path.expanduser("~/.libero")), "config.yaml")
if not os.path.exists(config):
    raise SystemExit("asked on stdin: " + input("Do you want to specify a custom path? (Y/N): "))
def get_libero_path(key):
    with open(config) as file:
        return yaml.safe_load(file)[key]
"""
ORIGINAL_BENCHMARK = """
from collections import namedtuple
Task = namedtuple("Task", "name language problem_folder bddl_file init_states_file")
class Spatial:
    tasks = [Task("pick_it", "Pick it", "libero_spatial", "pick_it.bddl", "pick_it.pruned_init")]
class Broken:
    tasks = [Task("lost", "Lost", "libero_goal", "lost.bddl", "lost.pruned_init")]
def get_benchmark_dict():
    print("[info] noise")
    return {"libero_spatial": Spatial, "libero_goal": Broken, "libero_spatial_lan": Spatial, "libero_100": None}
"""


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """A package in the layout of the original repository, which asks a question at its first import."""
    root = tmp_path / "site" / "libero" / "libero"
    for folder in ("benchmark", "assets/scenes", "bddl_files/libero_spatial", "init_files/libero_spatial"):
        (root / folder).mkdir(parents=True)
    (root.parent / "__init__.py").write_text("")
    (root / "__init__.py").write_text(ORIGINAL_INIT)
    (root / "benchmark" / "__init__.py").write_text(ORIGINAL_BENCHMARK)
    (root / "bddl_files/libero_spatial/pick_it.bddl").write_text("(define (:language Grab\n  this thing) (:goal x))")
    (root / "init_files/libero_spatial/pick_it.pruned_init").write_bytes(b"")
    return root


def run_with(site: Path, tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "LIBERO_CONFIG_PATH"}
    environment |= {
        "PYTHONPATH": f"{site}:{Path(__file__).parents[2]}",
        "VLA_RL_CACHE": str(tmp_path / "cache"),
        "HOME": str(tmp_path / "home"),
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def test_the_original_asks_nothing_and_writes_only_to_our_cache(original: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    code = "from sim.libero.package import available_tasks; print(available_tasks())"
    done = run_with(original.parents[1], tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert "noise" not in done.stdout
    assert "suite='libero_spatial', index=0, name='pick_it', instruction='pick it'" in done.stdout
    assert "suite='libero_spatial_lan', index=0, name='pick_it', instruction='grab this thing'" in done.stdout
    assert "libero_goal" not in done.stdout  # its files are missing
    assert list((tmp_path / "home").iterdir()) == []
    assert (tmp_path / "cache" / "libero_config" / "config.yaml").is_file()


def test_a_package_without_assets_is_refused(original: Path, tmp_path: Path) -> None:
    (original / "assets" / "scenes").rmdir()
    done = run_with(original.parents[1], tmp_path, "from sim.libero.package import prepare_libero; prepare_libero()")
    assert "ImportError: LIBERO's assets are missing" in done.stderr  # and nothing was asked on stdin before


def test_the_paths_of_an_installation_that_is_gone_are_replaced(original: Path, tmp_path: Path) -> None:
    config = tmp_path / "cache" / "libero_config" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("assets: /gone/assets\nbenchmark_root: /gone\n")
    done = run_with(original.parents[1], tmp_path, "from sim.libero.package import prepare_libero; prepare_libero()")
    assert done.returncode == 0, done.stderr
    assert str(original) in config.read_text()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'vla-rl\[libero\]'"):
        package.prepare_libero.__wrapped__()


def test_the_sentence_of_a_task_file(tmp_path: Path) -> None:
    file = tmp_path / "task.bddl"
    file.write_text("(define (problem x)\n (:language open the\n   drawer )\n (:regions ))")
    assert sentence_of(file) == "open the drawer"


STATES = np.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize("new_format", [True, False])
def test_pytorchs_files_are_read_without_pytorch(tmp_path: Path, new_format: bool) -> None:
    torch.save(STATES, tmp_path / "a.pruned_init", _use_new_zipfile_serialization=new_format)
    np.testing.assert_array_equal(read_init_states(tmp_path / "a.pruned_init"), STATES)


def test_numpys_files_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", states=STATES)
    np.testing.assert_array_equal(read_init_states(tmp_path / "a.npz"), STATES)
    np.savez(tmp_path / "b.npz", states=np.arange(3))
    with pytest.raises(ValueError, match="does not hold a table of initial states"):
        read_init_states(tmp_path / "b.npz")


class _Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("false",)


def test_a_file_that_runs_code_is_refused(tmp_path: Path) -> None:
    torch.save(_Harmful(), tmp_path / "zip.pruned_init")
    (tmp_path / "old.pruned_init").write_bytes(pickle.dumps(_Harmful()))
    for name in ("zip", "old"):
        with pytest.raises(ValueError, match=r"asks for posix\.system"):
            read_init_states(tmp_path / f"{name}.pruned_init")


@pytest.mark.libero
class TestInstalled:
    """With the package of the extra."""

    @pytest.fixture(autouse=True)
    def _needs_libero(self) -> None:
        pytest.importorskip("libero")

    def test_all_suites_are_there(self) -> None:
        suites = available_tasks()
        assert list(suites)[:5] == ["libero_10", "libero_90", "libero_goal", "libero_object", "libero_spatial"]
        assert {name: len(suites[name]) for name in package.STANDARD_SUITES} == {
            "libero_spatial": 10,
            "libero_object": 10,
            "libero_goal": 10,
            "libero_10": 10,
            "libero_90": 90,
        }
        for suite in ("spatial", "object", "goal", "10"):
            assert all(len(suites[f"libero_{suite}_{kind}"]) == 10 for kind in ("lan", "object", "swap", "task"))

    def test_tasks_are_found_by_suite_index_or_name(self) -> None:
        name = "pick_up_the_black_bowl_on_the_ramekin_and_place_it_on_the_plate"
        (task,) = find_tasks(["libero_spatial/5", f"libero_spatial/{name}"])
        assert (task.full_name, task.name) == ("libero_spatial/5", name)
        assert task.instruction == "pick up the black bowl on the ramekin and place it on the plate"
        assert len(find_tasks(["libero_goal", "libero_goal/3", "libero_10/0"])) == 11
        (paraphrase,) = find_tasks(["libero_goal_lan/1"])
        assert paraphrase.instruction == "place the bowl on the stove"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("libero_spatal", r"'libero_spatal' is not there.*Did you mean 'libero_spatial'\? Suites: libero_10, "),
            ("libero_goal/10", r"^libero_goal has no task '10'\. Tasks: 0 \(open_the_middle_drawer"),
            ("libero_goal/turn_on_stove", r"Did you mean 'turn_on_the_stove'\?"),
        ],
    )
    def test_a_wrong_name_is_answered_with_what_is_there(self, name: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            find_tasks([name])
