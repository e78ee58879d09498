"""openpi's framing: what goes in comes out, and nothing but a ValueError comes out of what should not have come in."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from malformed_frames import malformed_frames

from vla_rl.serving.wire import decode, encode


def test_the_bytes_are_those_of_openpi() -> None:
    # Written by hand from the msgpack specification: map of one, text of one, map of four with byte strings as keys.
    frame = encode({"a": np.array([1.0, 2.0], dtype="<f4")})
    expected = (
        b"\x81\xa1a\x84"
        b"\xc4\x0b__ndarray__\xc3"
        b"\xc4\x04data\xc4\x08\x00\x00\x80\x3f\x00\x00\x00\x40"
        b"\xc4\x05dtype\xa3<f4"
        b"\xc4\x05shape\x91\x02"
    )
    assert frame == expected


ARRAYS = [
    np.arange(24, dtype=np.uint8).reshape(2, 4, 3),
    np.array([1.5, np.nan, -np.inf], dtype=np.float32),
    np.array(3, dtype=np.int64),
    np.zeros((0, 7)),
    np.array([True, False]),
    np.arange(12.0).reshape(3, 4)[:, ::2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(["pick", "place"]),
    np.array([1, 2], dtype=">i4"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}{array.shape}")
def test_arrays_come_back_as_writable_copies(array: np.ndarray) -> None:
    back = decode(encode({"a": array}))["a"]
    np.testing.assert_array_equal(back, array)
    assert back.shape == array.shape
    assert back.dtype == array.dtype.newbyteorder("=")
    assert back.flags.writeable
    assert back.flags.owndata or back.base.flags.owndata


def test_nested_values_and_scalars_come_back() -> None:
    message = {"a": {"b": [1, None, "x", b"y", 1.5, True]}, "n": np.int16(-3), "f": np.float32(0.1)}
    back = decode(encode(message))
    assert back == message
    assert type(back["n"]) is np.int16
    assert type(back["f"]) is np.float32


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON_LIKE, max_size=4))
def test_any_message_comes_back(message: dict) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.array([1j]), np.zeros(2, dtype="f4,f4"), np.datetime64("2020"), {1, 2}, object(), 2**64],
    ids=repr,
)
def test_what_cannot_be_sent_is_named(value: object) -> None:
    with pytest.raises(ValueError, match="this cannot be sent"):
        encode({"a": value})


def array_frame(**changes: object) -> bytes:
    entry = {"__ndarray__": True, "data": b"\x00" * 32, "dtype": "<f4", "shape": [8], **changes}
    return msgpack.packb({"a": {key.encode(): value for key, value in entry.items()}})


def test_the_unchanged_array_frame_is_read() -> None:
    assert decode(array_frame())["a"].shape == (8,)


@pytest.mark.parametrize(
    "dtype", ["|O", "<c8", "|V4", "<M8[s]", "f4,f4", "<f3", "|S0", "<U0", "float32", "", None, 4, b"<f4"]
)
def test_only_plain_dtypes_are_taken(dtype: object) -> None:
    with pytest.raises(ValueError, match=r"dtype|holds nothing"):
        decode(array_frame(dtype=dtype))


@pytest.mark.parametrize(
    "shape",
    [[7], [-8], [-1, -8], [8.0], [True, 8], "8", None, 8, [8] + [1] * 8, [2**33, 2**33], [2**62, 4], [], [0, 8]],
)
def test_a_shape_must_fit_the_data(shape: object) -> None:
    with pytest.raises(ValueError, match=r"an array (of|whose) shape"):
        decode(array_frame(shape=shape))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x81\xa1a",  # ends too early
        b"\x80\x80",  # goes on after its end
        b"\x90",  # a list
        b"\x01",
        b"\x81\x01\x02",  # a number as key
        b"\x81\xc4\x01a\x02",  # bytes as key
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",  # a time stamp: an extension
        b"\xc1",  # never used
        b"\x81\xa1a\xa2\xff\xff",  # not UTF-8
        b"\x91" * 5000,
        b"\x81\xa1a\xdd\x7f\xff\xff\xff",  # a list of two thousand million
        b"\x81\xa1a\xdc\xff\xff" + b"\xc0" * 65535,  # a list longer than observations have
    ],
    ids=lambda frame: frame[:12].hex(),
)
def test_a_damaged_frame_is_a_value_error(frame: bytes) -> None:
    with pytest.raises(ValueError, match="the frame is"):
        decode(frame)


def test_objects_cannot_be_multiplied() -> None:
    # 16 lists of 4096 lists of 64 numbers: 4 million numbers, each a byte on the wire.
    inner = b"\xdc\x00\x40" + b"\x01" * 64
    frame = b"\x81\xa1a\xdc\x00\x10" + (b"\xdc\x10\x00" + inner * 4096) * 16
    with pytest.raises(ValueError, match="more than 65536 entries"):
        decode(frame)


def test_a_frame_has_a_largest_size() -> None:
    frame = encode({"a": np.zeros(1000, dtype=np.uint8)})
    assert decode(frame, max_bytes=len(frame))["a"].size == 1000
    with pytest.raises(ValueError, match=f"has {len(frame)} bytes; at most {len(frame) - 1} are taken"):
        decode(frame, max_bytes=len(frame) - 1)


@pytest.mark.parametrize("number", [2**40, -1, "1", None, float("inf")])
def test_a_scalar_must_fit_its_dtype(number: object) -> None:
    with pytest.raises(ValueError, match="a scalar that"):
        decode(msgpack.packb({"a": {b"__npgeneric__": True, b"data": number, b"dtype": "|u1"}}))


def test_ten_thousand_malformed_frames_raise_nothing_but_value_errors() -> None:
    reasons = []
    for frame in malformed_frames(10_000):
        if isinstance(frame, bytes):
            try:
                assert isinstance(decode(frame), dict)  # some damage hits a picture's pixels
            except ValueError as error:
                reasons.append(str(error))
    assert len(reasons) > 6_000
    assert all(reasons)
