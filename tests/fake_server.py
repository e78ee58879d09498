"""A policy that is a formula, and a process that serves it: one that can be frozen, killed and weighed."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.serving.server import PolicyServer, wait_for_signal


class FormulaPolicy:
    """Action entry a of control step k is the state's sum + k; an observation may ask for a delay or a failure."""

    def __init__(self, contract: str = "formula") -> None:
        self.metadata = {"contract": {"name": contract}, "server": "fake"}
        self.num_running = self.max_running = self.num_answered = 0

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            time.sleep(observation.get("delay_s", 0.0))
            if observation.get("fail"):
                raise RuntimeError("the weights are on fire")
            if "observation/state" not in observation:
                raise ValueError("observation/state is missing")
            total = float(np.sum(observation["observation/state"]))
            self.num_answered += 1
            return {"actions": np.full((4, 7), total) + np.arange(4.0)[:, None]}
        finally:
            self.num_running -= 1


class ServerProcess:
    """`FormulaPolicy` behind a server in a process of its own."""

    def __init__(self, port: int = 0, contract: str = "formula") -> None:
        command = [sys.executable, str(Path(__file__)), "--port", str(port), "--contract", contract]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server did not start"
        self.port = int(line)

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def memory_bytes(self) -> int:
        """Resident set."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--contract")
    arguments = parser.parse_args()
    with PolicyServer(FormulaPolicy(arguments.contract), port=arguments.port, max_frame_bytes=2**20) as server:
        print(server.port, flush=True)
        wait_for_signal()


if __name__ == "__main__":
    main()
