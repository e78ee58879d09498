"""Cached files: made once, by one process, and anew when damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sim.cache import cache_folder, cached_file, digest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_RL_CACHE", str(tmp_path / "cache"))


def test_a_file_is_made_once() -> None:
    calls = []

    def make(path: Path) -> None:
        calls.append(path)
        path.write_text("content")

    first = cached_file("kind", "name.txt", make)
    assert first == cached_file("kind", "name.txt", make) == cache_folder() / "kind" / "name.txt"
    assert first.read_text() == "content"
    assert len(calls) == 1
    assert calls[0].suffix == ".txt"


@pytest.mark.parametrize("damage", ["change", "truncate", "remove", "lose_checksum"])
def test_a_damaged_file_is_made_anew(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = cached_file("kind", "name.bin", lambda path: path.write_bytes(b"12345678"))
    match damage:
        case "change":
            path.write_bytes(b"12345679")
        case "truncate":
            path.write_bytes(b"1234")
        case "remove":
            path.unlink()
        case "lose_checksum":
            path.with_name("name.bin.sha256").unlink()
    assert cached_file("kind", "name.bin", lambda path: path.write_bytes(b"12345678")).read_bytes() == b"12345678"
    assert ("damaged" in caplog.text) == (damage != "remove")


def test_a_maker_that_fails_leaves_nothing() -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached_file("kind", "name.txt", fail)
    assert cached_file("kind", "name.txt", lambda path: path.write_text("whole")).read_text() == "whole"


def test_many_processes_make_it_once(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from sim.cache import cached_file\n"
        "def make(path):\n"
        f"    with open({str(tmp_path / 'calls')!r}, 'a') as file: file.write('x')\n"
        "    time.sleep(0.2); path.write_text('content')\n"
        "print(cached_file('kind', 'name.txt', make).read_text())"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        for _ in range(4)
    ]
    assert [process.communicate()[0] for process in processes] == [b"content\n"] * 4
    assert (tmp_path / "calls").read_text() == "x"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLA_RL_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="set VLA_RL_CACHE"):
        cached_file("kind", "name.txt", lambda path: path.write_text(""))


def test_the_digest_keeps_parts_apart() -> None:
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("ab", b"c") == digest(b"ab", "c")
    assert len(digest("a")) == 32
