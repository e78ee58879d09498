"""Frames that nobody should send, and a client that sends them all and watches."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from vla_rl.serving.wire import encode

OBSERVATION = {
    "observation/images/agentview": np.zeros((16, 16, 3), dtype=np.uint8),
    "observation/state": np.ones(8, dtype=np.float32),
    "prompt": "pick up the red cube",
}
_DTYPES = [
    "<f4",
    "|O",
    "<c8",
    "|V8",
    "<M8[ns]",
    "<f3",
    "<f99",
    "<U0",
    "{'a': 'f4'}",
    "f4,f4",
    "",
    "\x00",
    b"<f4",
    5,
    None,
]
_SHAPES = [[8], [-1], [2**40, 2**40], [8.0], [True], "8", None, [1] * 70, [2**64 - 1], [0, 2**60], []]


def malformed_frames(num: int, seed: int = 0) -> Iterator[bytes | str]:
    """Random bytes, damaged and cut frames, impossible arrays, deep nesting, lists that claim to be endless, text."""
    rng = np.random.default_rng(seed)
    whole = encode(OBSERVATION)
    for i in range(num):
        match i % 8:
            case 0:
                yield rng.bytes(int(rng.integers(0, 200)))
            case 1:
                damaged = bytearray(whole)
                for position in rng.integers(len(whole), size=int(rng.integers(1, 9))):
                    damaged[position] ^= 1 << int(rng.integers(8))
                yield bytes(damaged)
            case 2:
                yield whole[: int(rng.integers(len(whole)))]
            case 3:
                array = {b"__ndarray__": True, b"data": b"\x00" * 32, b"dtype": "<f4", b"shape": [8]}
                array[b"dtype"] = _DTYPES[int(rng.integers(len(_DTYPES)))]
                array[b"shape"] = _SHAPES[int(rng.integers(len(_SHAPES)))]
                yield msgpack.packb({"observation/state": array})
            case 4:
                depth = int(rng.integers(1, 3000))
                yield [b"\x91" * depth, b"\x81\xa1a" * depth, b"\xdd\x00\x0f\x42\x40" * depth][int(rng.integers(3))]
            case 5:
                value = [
                    b"__ndarray__",
                    {b"__npgeneric__": 1, b"dtype": "<u1", b"data": 2**40},
                    msgpack.ExtType(5, b"x"),
                ]
                yield msgpack.packb({"observation/state": value[int(rng.integers(3))]})
            case 6:
                yield ["", "hello", "{}", "x" * 70_000][int(rng.integers(4))]
            case _:
                yield msgpack.packb([1, None, 1.5, "text", {}, {"a": 1}, [[1]] * 3, 2**63][int(rng.integers(8))])


_RAW = [
    b"\x00" * 64,
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
]
_HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def send_raw_garbage(port: int, num: int, seed: int = 0) -> None:
    """Bytes that are no handshake, and bytes after a handshake that are no frames; each connection must end."""
    rng = np.random.default_rng(seed)
    for i in range(num):
        data = _RAW[i % len(_RAW)] if i % 2 else _HANDSHAKE + rng.bytes(200)
        with socket.create_connection(("127.0.0.1", port), timeout=10.0) as raw:
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            try:
                while raw.recv(65536):
                    pass
            except ConnectionResetError:
                pass


def send_malformed(url: str, num: int, seed: int = 0) -> Counter[str]:
    """Send each frame and wait for what becomes of it: an "answer", a "text" that says why, or a "close"."""
    outcomes: Counter[str] = Counter()
    frames = malformed_frames(num, seed)
    frame = next(frames, None)
    while frame is not None:
        with connect(url, compression=None, proxy=None) as connection:
            connection.recv(timeout=10.0)
            try:
                while frame is not None:
                    connection.send(frame)
                    frame = next(frames, None)
                    reply = connection.recv(timeout=10.0)
                    outcomes["text" if isinstance(reply, str) else "answer"] += 1
                    if isinstance(reply, str):
                        break
            except ConnectionClosed:
                outcomes["close"] += 1
    return outcomes
