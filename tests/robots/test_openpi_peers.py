"""openpi's unmodified client drives our server, our client drives openpi's server, and garbage harms nobody."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from fake_server import ServerProcess
from malformed_frames import send_malformed, send_raw_garbage
from peer_environments import peer_python

from vla_rl.serving.client import PolicyClient, PolicyError

pytestmark = [pytest.mark.robot_peers, pytest.mark.timeout(300)]
SCRIPT = str(Path(__file__).parent / "openpi_peer.py")


@pytest.fixture(scope="module")
def openpi() -> str:
    return str(peer_python("openpi", "openpi-client==0.1.2", "openpi-server==0.1.0", "typing_extensions"))


@pytest.fixture
def ours() -> ServerProcess:  # type: ignore[misc]
    process = ServerProcess()
    yield process
    process.close()


def test_openpis_client_drives_our_server(openpi: str, ours: ServerProcess) -> None:
    done = subprocess.run(
        [openpi, SCRIPT, "client", str(ours.port)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["metadata"]["server"] == "fake"
    for answer, total in zip(result["answers"], (28.0, 56.0), strict=True):
        np.testing.assert_array_equal(answer, np.full((4, 7), total) + np.arange(4.0)[:, None])
    assert "observation/state is missing" in result["error"]


def test_our_client_drives_openpis_server(openpi: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([openpi, SCRIPT, "server", str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            client = PolicyClient(f"ws://127.0.0.1:{port}", timeout_s=60.0)
            assert client.connect() == {"name": "openpi"}
            observation = {"observation/state": np.arange(8, dtype=np.float32), "prompt": "pick up the cube"}
            for _ in range(3):
                answer = client.infer(observation, deadline_s=10.0)
                np.testing.assert_array_equal(answer.actions, np.full((4, 7), 28.0))
            with pytest.raises(PolicyError, match="the policy server says"):
                client.infer({"prompt": "no state"}, deadline_s=10.0)
            np.testing.assert_array_equal(client.infer(observation, deadline_s=10.0).actions, np.full((4, 7), 28.0))
            client.close()
        finally:
            server.kill()


def test_ten_thousand_malformed_frames(ours: ServerProcess) -> None:
    send_malformed(ours.url, 400, seed=1)  # what is allocated once
    before = ours.memory_bytes()
    assert send_malformed(ours.url, 10_000).total() == 10_000
    send_raw_garbage(ours.port, 500)
    assert ours.process.poll() is None
    assert ours.memory_bytes() - before < 20 * 2**20
    client = PolicyClient(ours.url)
    client.connect()
    assert client.infer({"observation/state": np.ones(3, np.float32)}, deadline_s=10.0).actions[0, 0] == 3.0
    client.close()
