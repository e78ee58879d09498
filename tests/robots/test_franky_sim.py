"""franky-sim 1.0.4 has physics: a scripted policy picks a cube through server, runtime and safety chain."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from robots.schedule import CadenceReport

pytestmark = [pytest.mark.robot_peers, pytest.mark.timeout(240)]


def test_the_cube_is_lifted(start_peer: Any, run_client: Any, tmp_path: Path, note: Callable[[str], None]) -> None:
    pytest.importorskip("franky", reason="franky-control is not installed: pip install 'vla-rl[franka]'")
    peer = start_peer("franky_sim")
    server = run_client("scripted_server.py", "pick")
    url = json.loads(server.stdout.readline())["url"]
    client = run_client("franka_runtime_client.py", peer.host, url, "pick", "25", str(tmp_path / "recordings"))
    assert client.stdout is not None
    lines = [json.loads(line) for line in client.stdout]
    result = lines[-1]
    heights = [json.loads(line)[2] for line in peer.log.read_text().splitlines() if line.startswith("[")]
    note(f"pick on franky-sim: {CadenceReport(**result['cadence'])}; cube lifted to {max(heights):.3f} m")
    print("pick", json.dumps(result), "cube", heights[:1], max(heights), heights[-1])
    assert result["outcome"] == "failure"  # only the time limit ends it
    assert result["num_reflexes"] == 0
    assert heights[0] < 0.03
    assert max(heights) > 0.12
