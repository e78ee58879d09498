"""The policy server: openpi's websocket protocol (Physical Intelligence, `openpi_server.websocket_policy_server`).

The first frame of a connection is the server's metadata; then each observation is answered by a frame with `actions`;
an error is a text frame, after which the connection is closed with code 1011. `GET /healthz` answers 200. We differ
from openpi in that inference never blocks the network (a model that takes a minute to warm up loses no connection),
that the key which openpi's client sends is checked, that browsers, long frames and long queues are refused, and that
`t_obs` and `seq` of an observation come back with its actions, so that no answer is taken for another's.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import ipaddress
import logging
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from vla_rl.serving.wire import MAX_FRAME_BYTES, decode, encode

_ECHOED = ("t_obs", "seq")
_logger = logging.getLogger(__name__)


@runtime_checkable
class ServedPolicy(Protocol):
    """What the server needs of a policy. Both are used from one thread at a time."""

    @property
    def metadata(self) -> dict[str, Any]:
        """What every client is told first; `contract` holds the deployment contract."""

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Answer one observation; `actions` is (K, A).

        Raises:
            ValueError: The observation is not what the policy takes; the client is told why.
        """


class PolicyServer:
    """Serves one policy to any number of clients from a thread of its own; use it in a `with` block."""

    def __init__(
        self,
        policy: ServedPolicy,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        api_key: str | None = None,
        warm_up: Mapping[str, Any] | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_waiting: int = 16,
        keepalive_s: float = 20.0,
    ) -> None:
        """Prepare; nothing is opened yet.

        Args:
            policy: What answers.
            host: Address to listen at.
            port: To listen at; 0 picks a free one.
            api_key: If given, clients must send the header `Authorization: Api-Key <key>`.
            warm_up: Observation that is answered before anyone can connect, so that the first client need not wait.
            max_frame_bytes: Longer frames are refused.
            max_waiting: Requests that wait or run; one more is refused.
            keepalive_s: Time between two pings, and the time that a client has to answer one.

        Raises:
            ValueError: The address can be reached from other machines and there is no key, or the key is not usable.
        """
        if api_key is not None and not (
            api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""
        ):
            raise ValueError("the API key must be printable ASCII without spaces at its ends, and not empty")
        if api_key is None and not _is_loopback(host):
            raise ValueError(
                f"host {host!r} can be reached from other machines, who could then ask the policy what they like; give "
                "an API key (--api-key-file), or listen at 127.0.0.1 and forward the port with ssh"
            )
        self._policy = policy
        self._host, self._port = host, port
        self._authorization = None if api_key is None else f"Api-Key {api_key}".encode()
        self._warm_up = warm_up
        self._max_frame_bytes = max_frame_bytes
        self._max_waiting = max_waiting
        self._keepalive_s = keepalive_s
        self._num_waiting = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="policy")  # one thread: one inference at a time
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._greeting = b""

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._port

    @property
    def url(self) -> str:
        """For clients on this machine."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"ws://{host}:{self._port}"

    def start(self) -> None:
        """Warm up, then listen; returns when clients can connect.

        Raises:
            ValueError: The address cannot be listened at, or the policy refuses the warm-up's observation.
        """
        self._greeting = encode(self._policy.metadata)
        if self._warm_up is not None:
            encode(self._worker.submit(self._policy.infer, dict(self._warm_up)).result())
        listening: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(listening,), name="policy server", daemon=True)
        self._thread.start()
        self._port = listening.result()

    def stop(self) -> None:
        """Close every connection (code 1001), let a running inference end, free the port. May be called again."""
        if self._thread is not None and self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._worker.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, listening: Future[int]) -> None:
        asyncio.run(self._serve(listening))

    async def _serve(self, listening: Future[int]) -> None:
        self._loop = asyncio.get_running_loop()
        quiet = logging.getLogger(f"{__name__}.protocol")  # whoever sends garbage shall not fill the log
        quiet.setLevel(logging.CRITICAL)
        try:
            server = await serve(
                self._handle,
                self._host,
                self._port,
                process_request=self._admit,
                origins=[None],  # browsers name the page that they show: no web page may talk to a robot's policy
                compression=None,
                max_size=self._max_frame_bytes,
                max_queue=2,
                ping_interval=self._keepalive_s,
                ping_timeout=self._keepalive_s,
                logger=quiet,
            )
        except (OSError, OverflowError) as error:
            listening.set_exception(
                ValueError(f"cannot listen at {self._host} port {self._port} ({error}); choose another host or port")
            )
            return
        async with server:
            listening.set_result(next(iter(server.sockets)).getsockname()[1])
            await self._stopping.wait()

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if self._authorization is not None:
            given = [value.encode("utf-8", "surrogateescape") for value in request.headers.get_all("Authorization")]
            if len(given) != 1 or not hmac.compare_digest(given[0], self._authorization):
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "wrong or missing API key\n")
        return None

    async def _handle(self, connection: ServerConnection) -> None:
        try:
            await connection.send(self._greeting)
            async for frame in connection:
                answer = await self._answer(connection, frame)
                if answer is None:
                    return
                await connection.send(answer)
                if isinstance(answer, str):
                    await connection.close(CloseCode.INTERNAL_ERROR, "the previous frame says why")
        except ConnectionClosed:
            return

    async def _answer(self, connection: ServerConnection, frame: str | bytes) -> bytes | str | None:
        """Actions as bytes, an error as text, or None if the client has left."""
        try:
            if isinstance(frame, str):
                raise ValueError("the frame is text; send observations as msgpack")
            observation = decode(frame, self._max_frame_bytes)
            echo = {key: observation.pop(key) for key in _ECHOED if key in observation}
            answer = await self._queued(connection, observation)
            return None if answer is None else encode({**answer, **echo})
        except ValueError as error:
            return str(error)
        except Exception as error:  # a policy is anybody's code: its failure must not take the other clients along
            _logger.exception("inference failed")
            return f"inference failed: {type(error).__name__}: {error}"

    async def _queued(self, connection: ServerConnection, observation: dict[str, Any]) -> dict[str, Any] | None:
        if self._num_waiting >= self._max_waiting:
            raise ValueError(f"the server is busy: {self._num_waiting} requests are waiting")
        self._num_waiting += 1
        pending = self._worker.submit(self._timed, observation, time.monotonic())
        answer = asyncio.wrap_future(pending)
        gone = asyncio.ensure_future(connection.wait_closed())
        either: set[asyncio.Future[Any]] = {answer, gone}
        try:
            # Nobody waits for the answer of a closed connection: its turn goes to the next in the queue.
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None
        finally:
            answer.cancel()
            gone.cancel()
            self._num_waiting -= 1

    def _timed(self, observation: dict[str, Any], asked_s: float) -> dict[str, Any]:
        begin_s = time.monotonic()
        answer = self._policy.infer(observation)
        timing = {"wait_ms": 1e3 * (begin_s - asked_s), "infer_ms": 1e3 * (time.monotonic() - begin_s)}
        return {**answer, "server_timing": timing}


def wait_for_signal() -> None:
    """Return when the process is asked to end (SIGINT, SIGTERM). Only in the main thread."""
    asked = threading.Event()
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        asked.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
