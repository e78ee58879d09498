"""Frames of openpi's websocket protocol: msgpack maps in which arrays are maps as well.

An array is `{b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}` and a numpy scalar
`{b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"}`, keys as bytes, as Lev Maximov's msgpack-numpy and openpi
(Physical Intelligence, `openpi_client.msgpack_numpy`) write them. Nothing is ever executed: no pickle, no objects. We
differ in what is taken: numbers, booleans and text only, every length bounded, and arrays that own their memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

import msgpack
import numpy as np
from jaxtyping import Shaped

MAX_FRAME_BYTES = 32 * 2**20
"""Default limit of a frame: five camera pictures of 1920 x 1080, or two hundred of 224 x 224."""
_MAX_LIST, _MAX_ENTRIES, _MAX_TEXT_BYTES, _MAX_DIMENSIONS = 4096, 2**16, 2**20, 8
_ARRAY_DTYPE = re.compile(r"[<>|=]?[biufSU][0-9]{1,6}")
_SCALAR_DTYPE = re.compile(r"[<>|=]?[biuf][0-9]{1,2}")
ContainerT = TypeVar("ContainerT", list[Any], dict[Any, Any])


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame.

    Args:
        message: Nested maps, lists, text, bytes, numbers, None, numpy scalars and arrays.

    Raises:
        ValueError: It holds something else.
    """
    try:
        return bytes(msgpack.packb(message, default=_encode_numpy))
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"this cannot be sent: {error}; send maps, lists, text, numbers and arrays") from error


def decode(frame: bytes, max_bytes: int = MAX_FRAME_BYTES) -> dict[str, Any]:
    """Read a frame from somebody who is not trusted.

    Args:
        frame: What arrived.
        max_bytes: Longer frames are refused.

    Returns:
        The map; its arrays are writable copies in the machine's byte order.

    Raises:
        ValueError: The frame is damaged, too long, or not a map with text as keys.
    """
    if len(frame) > max_bytes:
        raise ValueError(f"the frame has {len(frame)} bytes; at most {max_bytes} are taken")
    entries = _EntryCount()
    try:
        message = msgpack.unpackb(
            frame,
            object_hook=lambda entry: _decode_numpy(entries.add(entry)),
            list_hook=entries.add,
            ext_hook=_refuse_extension,
            max_array_len=_MAX_LIST,
            max_map_len=_MAX_LIST,
            max_str_len=_MAX_TEXT_BYTES,
            max_bin_len=max_bytes,
            max_ext_len=0,
        )
    except (ValueError, RecursionError) as error:  # msgpack's own errors are ValueErrors, some of them without a text
        raise ValueError(f"the frame is damaged: {error or type(error).__name__}") from error
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise ValueError("the frame is not a map with text as keys")
    return message


class _EntryCount:
    """Lists in lists could make gigabytes of objects out of a frame of megabytes."""

    def __init__(self) -> None:
        self._num = 0

    def add(self, container: ContainerT) -> ContainerT:
        self._num += len(container)
        if self._num > _MAX_ENTRIES:
            raise ValueError(f"more than {_MAX_ENTRIES} entries")
        return container


def _encode_numpy(value: object) -> dict[bytes, Any]:
    if not isinstance(value, np.ndarray | np.generic):
        raise TypeError(f"a value of type {type(value).__name__}")
    if value.dtype.kind not in "biufSU":
        raise TypeError(f"an array of dtype {value.dtype}")
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}


def _decode_numpy(entry: dict[Any, Any]) -> Any:
    if b"__ndarray__" in entry:
        return _array(entry.get(b"data"), entry.get(b"dtype"), entry.get(b"shape"))
    if b"__npgeneric__" in entry:
        return _scalar(entry.get(b"data"), entry.get(b"dtype"))
    return entry


def _array(data: Any, dtype_text: Any, shape: Any) -> Shaped[np.ndarray, ...]:
    dtype = _dtype(dtype_text, _ARRAY_DTYPE)
    if not isinstance(data, bytes):
        raise ValueError("an array without data")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(type(size) is int for size in shape):
        raise ValueError(f"an array whose shape is not a list of at most {_MAX_DIMENSIONS} integers")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of shape {shape} and dtype {dtype} with {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _scalar(data: Any, dtype_text: Any) -> np.generic:
    if not isinstance(data, bool | int | float):
        raise ValueError("a scalar that is not a number")
    try:
        with np.errstate(over="ignore"):  # too large for a float32 is infinite, as in any arithmetic
            value = _dtype(dtype_text, _SCALAR_DTYPE).type(data)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a scalar that does not fit its dtype: {error}") from error
    return value  # type: ignore[no-any-return]


def _dtype(text: Any, pattern: re.Pattern[str]) -> np.dtype[Any]:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ValueError("an array of a dtype that is not taken; send numbers, booleans or text")
    try:
        dtype = np.dtype(text)
    except TypeError as error:
        raise ValueError(f"an array of unknown dtype {text}") from error
    if dtype.itemsize == 0:
        raise ValueError(f"an array of dtype {text}, which holds nothing")
    return dtype


def _refuse_extension(code: int, _data: bytes) -> NoReturn:
    raise ValueError(f"msgpack extension {code}, which is not taken")
