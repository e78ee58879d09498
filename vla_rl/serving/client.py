"""The robot's side of openpi's websocket protocol. Every wait has a deadline, and a late answer is never used.

We differ from openpi's client (Physical Intelligence, `openpi_client.websocket_client_policy`) in the deadlines, in
reconnecting, and in that arrays are writable copies, whatever the version of numpy.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float64
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from vla_rl.serving.wire import MAX_FRAME_BYTES, decode, encode

_FIRST_BACKOFF_S = 0.1
_FAREWELL_S = 0.5


class PolicyError(RuntimeError):
    """The policy server cannot be reached, or does not answer as it should; the message says why."""


class PolicyRefusedError(PolicyError):
    """Trying again would not help: the server does not take the key, or serves another policy than before."""


class PolicyTimeoutError(PolicyError):
    """There was no answer within the deadline; the connection is closed, so that it cannot arrive any more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What the policy said to one observation.

    Attributes:
        actions: (K, A), in the contract's units; not checked for being finite.
        t_obs: `time.monotonic()` of this host when the observation was made.
        seq: Number of the request, from 1.
        server_timing: Milliseconds, as the server measured them.
    """

    actions: Float64[np.ndarray, "horizon action_dim"]
    t_obs: float
    seq: int
    server_timing: dict[str, float] = field(default_factory=dict)


class PolicyClient:
    """One connection to a policy server. `close` may be called from any thread, the rest takes turns."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = 10.0, max_backoff_s: float = 5.0
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            url: E.g. "ws://127.0.0.1:8000".
            api_key: What the server asks for, if it does.
            timeout_s: How long `connect` tries.
            max_backoff_s: Longest wait between two attempts; the first is 0.1 s, each failure doubles it.

        Raises:
            ValueError: Not a websocket address.
        """
        if not url.startswith(("ws://", "wss://")):
            raise ValueError(f"the policy server's address is {url!r}; expected e.g. 'ws://127.0.0.1:8000'")
        self._url = url
        self._headers = {} if api_key is None else {"Authorization": f"Api-Key {api_key}"}
        self._timeout_s, self._max_backoff_s = timeout_s, max_backoff_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connection: ClientConnection | None = None
        self._resources = ExitStack()
        self._metadata: dict[str, Any] | None = None
        self._seq = self._num_failures = 0
        self._retry_s = 0.0

    def connect(self) -> dict[str, Any]:
        """Reach the server, which may still be starting.

        Returns:
            Its metadata; `contract` is the deployment contract, if it is one of ours.

        Raises:
            PolicyError: It was not reached in time, or refused.
        """
        end_s = time.monotonic() + self._timeout_s
        with self._lock:
            while True:
                try:
                    if self._connection is None:
                        self._open(end_s)
                    return dict(self._metadata or {})
                except PolicyRefusedError:
                    raise
                except PolicyError:
                    if self._closed.is_set() or self._retry_s >= end_s:
                        raise
                    self._closed.wait(self._retry_s - time.monotonic())

    def infer(self, observation: Mapping[str, Any], *, deadline_s: float) -> Answer:
        """Ask for actions. A lost connection is opened again, if the back-off allows it by now.

        Args:
            observation: By the contract's names; its `t_obs` (default: now) comes back with the answer.
            deadline_s: Longest time from call to return.

        Raises:
            PolicyTimeoutError: No answer by then.
            PolicyError: Not connected, or the server sent an error.
            ValueError: The observation cannot be sent, or the deadline is not a positive time.
        """
        if not 0.0 < deadline_s < math.inf:
            raise ValueError(f"the deadline is {deadline_s} s; expected a positive time")
        end_s = time.monotonic() + deadline_s
        if not self._lock.acquire(timeout=deadline_s):
            raise PolicyTimeoutError(f"another request to {self._url} took longer than {deadline_s:g} s")
        try:
            self._seq += 1
            t_obs = float(observation.get("t_obs", time.monotonic()))
            frame = encode({**observation, "t_obs": t_obs, "seq": self._seq})
            if self._connection is None:
                self._reopen(end_s)
            return self._read(self._exchange(frame, end_s, deadline_s), t_obs)
        except PolicyError:
            self._drop()
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the connection; a request under way fails at once. May be called again."""
        self._closed.set()
        if self._lock.acquire(blocking=False):
            try:
                self._resources.close()  # says farewell
                self._connection = None
            finally:
                self._lock.release()
        elif (connection := self._connection) is not None:
            _cut(connection)

    def _reopen(self, end_s: float) -> None:
        wait_s = self._retry_s - time.monotonic()
        if wait_s > 0.0:
            raise PolicyError(f"not connected to {self._url}; the next attempt may be made in {wait_s:.1f} s")
        self._open(end_s)

    def _open(self, end_s: float) -> None:
        if self._closed.is_set():
            raise PolicyError("this client is closed")
        try:
            connection = self._resources.enter_context(
                connect(
                    self._url,
                    compression=None,
                    max_size=MAX_FRAME_BYTES,
                    additional_headers=self._headers,
                    open_timeout=max(0.001, end_s - time.monotonic()),
                    close_timeout=_FAREWELL_S,
                    proxy=None,
                )
            )
            self._connection = connection
            greeting = connection.recv(timeout=max(0.0, end_s - time.monotonic()))
            metadata = decode(greeting) if isinstance(greeting, bytes) else {"error": greeting}
        except InvalidStatus as error:
            status = error.response.status_code
            text = f"{self._url} refuses to talk (HTTP {status})"
            raise PolicyRefusedError(f"{text}: wrong or missing API key" if status == 401 else text) from error
        except (OSError, WebSocketException, ValueError) as error:
            self._num_failures += 1
            self._retry_s = time.monotonic() + min(
                _FIRST_BACKOFF_S * 2.0 ** min(self._num_failures - 1, 30), self._max_backoff_s
            )
            self._drop()
            raise PolicyError(
                f"cannot reach a policy server at {self._url}: {error or type(error).__name__}"
            ) from error
        if self._closed.is_set():
            self._drop()
            raise PolicyError("this client is closed")
        if self._metadata is not None and self._metadata.get("contract") != metadata.get("contract"):
            self._drop()
            raise PolicyRefusedError(f"{self._url} now serves another policy than at first; start again to use it")
        self._metadata, self._num_failures = metadata, 0

    def _exchange(self, frame: bytes, end_s: float, deadline_s: float) -> str | bytes:
        connection = self._connection
        if connection is None:
            raise PolicyError("this client is closed")
        # Cutting the connection ends any wait: for the answer, for its rest, and for a frozen server to take the frame.
        timer = threading.Timer(max(0.0, end_s - time.monotonic()), _cut, [connection])
        timer.start()
        try:
            connection.send(frame)
            reply = connection.recv()
        except (OSError, WebSocketException) as error:
            if self._closed.is_set():
                raise PolicyError("this client was closed") from error
            if time.monotonic() < end_s:
                raise PolicyError(f"the connection to {self._url} is lost: {error}") from error
            raise PolicyTimeoutError(f"no answer from {self._url} within {deadline_s:g} s") from error
        finally:
            timer.cancel()
        if time.monotonic() >= end_s:
            raise PolicyTimeoutError(f"the answer from {self._url} took longer than {deadline_s:g} s")
        return reply

    def _read(self, reply: str | bytes, t_obs: float) -> Answer:
        if isinstance(reply, str):
            raise PolicyError(f"the policy server says: {reply}")
        try:
            answer = decode(reply)
            actions = np.asarray(answer["actions"], dtype=np.float64)
        except KeyError as error:
            raise PolicyError(f"the answer has no actions, only {', '.join(answer) or 'nothing'}") from error
        except (ValueError, TypeError) as error:
            raise PolicyError(f"the policy server's answer cannot be read: {error}") from error
        if actions.ndim != 2 or actions.size == 0:
            raise PolicyError(f"actions have shape {actions.shape}; expected (control steps, action entries)")
        if answer.get("seq", self._seq) != self._seq or answer.get("t_obs", t_obs) != t_obs:
            raise PolicyError("the answer belongs to another observation")
        timing = answer.get("server_timing")
        numbers = {k: float(v) for k, v in timing.items() if isinstance(v, int | float)} if timing else {}
        return Answer(actions=actions, t_obs=t_obs, seq=self._seq, server_timing=numbers)

    def _drop(self) -> None:
        if self._connection is not None:
            _cut(self._connection)
            self._connection = None
        self._resources.close()


def _cut(connection: ClientConnection) -> None:
    with suppress(OSError):  # it is closed already
        connection.socket.shutdown(socket.SHUT_RDWR)
