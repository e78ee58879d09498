"""Peers for the drivers: simulated controllers of other projects, each in its own environment, on loopback.

`VLA_RL_PEERS` names the folder of the environments (default ~/.cache/vla-rl/peers); what is missing there is installed
from PyPI. A peer that cannot be installed skips its tests and says why.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peer_environments import PEERS, peer_python

from robots.franka_config import FrankaConfig

HERE = Path(__file__).parent
FCI_PORTS = (1337, 1338)  # arm and hand; fixed in libfranka, so each server has its own address
_numbers = itertools.count(1)
_PRIORITY = 5


_NOTES = pytest.StashKey[list[str]]()


def as_real_time() -> None:
    """Ask for real-time scheduling, as a robot's controller and its client have; without the right to it, go on."""
    if "sched_setscheduler" not in dir(os):
        return
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    except PermissionError:
        return


def _has_real_time() -> bool:
    """Of a process of its own, because there is no way back for this one everywhere."""
    asked = subprocess.run(
        [sys.executable, "-c", "import os; raise SystemExit(os.sched_getscheduler(0) != os.SCHED_RR)"],
        preexec_fn=as_real_time,
        check=False,
    )
    return asked.returncode == 0


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say something in the report at the end: what was measured, and what had to be tried again."""
    return request.config.stash.setdefault(_NOTES, []).append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What the tests noted, under what conditions."""
    if notes := config.stash.get(_NOTES, []):
        terminalreporter.section("simulated controllers")
        scheduling = "with" if _has_real_time() else "WITHOUT (no right to it; lost packets are the machine's)"
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        terminalreporter.write_line(f"{scheduling} real-time priority, {os.cpu_count()} cores, load {load}")
        for line in notes:
            terminalreporter.write_line(line)


class Peer:
    """A server process on its own loopback address."""

    def __init__(self, command: list[str], host: str, log: Path, environment: dict[str, str]) -> None:
        self.host = host
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                preexec_fn=as_real_time,
                start_new_session=True,
            )

    def wait_until_listening(self, timeout_s: float = 60.0) -> None:
        """Reads the kernel's table: a connection would be a client session."""
        deadline = time.monotonic() + timeout_s
        while not all(_is_listening(self.host, port) for port in FCI_PORTS):
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the peer at {self.host} did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


def _is_listening(host: str, port: int) -> bool:
    wanted = {f"{address[::-1].hex().upper()}:{port:04X}" for address in (socket.inet_aton(host), bytes(4))}
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any(row[1] in wanted and row[3] == "0A" for row in rows)


def _fr3_model() -> Path:
    """The FR3's MJCF out of franky-sim's wheel: franka-sim would fetch one from GitHub."""
    python = peer_python("franky", "franky-sim==1.0.4", "franky-control==2.0.0")
    (assets,) = (python.parents[1] / "lib").glob("python3*/site-packages/franky_sim/assets")
    folder = PEERS / "fr3"
    if not (folder / "assets").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(assets / "fr3.xml", folder)
        (folder / "assets").symlink_to(assets / "meshes")
    return folder / "fr3.xml"


StartPeer = Callable[..., Peer]


@pytest.fixture
def start_peer(tmp_path: Path) -> Iterator[StartPeer]:
    """Start a server of this folder by name: `start_peer("franka_sim", "--object-width-m", "0.04")`."""
    peers: list[Peer] = []

    def start(name: str, *arguments: str) -> Peer:
        if name == "franka_sim":
            environment = {"FR3_MJCF": str(_fr3_model())}
            python = peer_python("franka_sim", "franka-sim==1.1.7")
        else:
            environment = {}
            python = peer_python("franky", "franky-sim==1.0.4", "franky-control==2.0.0")
        process = os.getpid()  # two test runs on one machine must not meet
        host = f"127.{1 + (process >> 8) % 250}.{process % 256}.{1 + next(_numbers) % 250}"
        script = HERE / f"{name}_server.py"
        peer = Peer([str(python), str(script), "--host", host, *arguments], host, tmp_path / f"{host}.log", environment)
        peers.append(peer)
        peer.wait_until_listening()
        return peer

    yield start
    for peer in peers:
        peer.close()


@pytest.fixture
def real_time() -> Iterator[None]:
    """This process keeps time as the client of a robot must, if the machine allows it."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    as_real_time()
    yield
    os.sched_setscheduler(0, policy, parameters)


@pytest.fixture
def franka_config() -> Callable[..., FrankaConfig]:
    """Settings for a simulated controller at an address."""
    if importlib.util.find_spec("franky") is None:
        pytest.skip("franky-control is not installed: pip install 'vla-rl[franka]'")

    def make(host: str, **changes: object) -> FrankaConfig:
        base = {"host": host, "base_in_world_m": (0.0, 0.0, 0.0), "realtime": "ignore", "home_dynamics_factor": 0.2}
        return FrankaConfig.model_validate({**base, **changes})

    return make


@pytest.fixture
def run_client() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a script of this folder as another process of this environment."""
    clients: list[subprocess.Popen[str]] = []

    def run(script: str, *arguments: str) -> subprocess.Popen[str]:
        root = str(HERE.parents[1])
        clients.append(
            subprocess.Popen(
                [sys.executable, str(HERE / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
                },
                preexec_fn=as_real_time,
            )
        )
        return clients[-1]

    yield run
    for client in clients:
        if client.poll() is None:
            client.send_signal(signal.SIGCONT)
            client.kill()
        client.communicate()
