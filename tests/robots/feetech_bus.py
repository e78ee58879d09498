"""Six Feetech STS3215 servos on a serial bus that is a pseudo-terminal: protocol 0, as LeRobot's SO-101 speaks it.

Packets and registers follow Feetech's STS memory table, as `lerobot/motors/feetech/tables.py` (LeRobot 0.4.4) has it.
Not imitated: the time that bytes take on the wire, load, heat, EPROM that forgets when it is locked.
"""

from __future__ import annotations

import os
import pty
import select
import threading
import time
import tty
from collections.abc import Mapping
from dataclasses import dataclass

MODEL_NUMBER = 777
TICKS_PER_TURN = 4095  # as LeRobot counts
SPEED_TICKS_S = 3000.0  # about 60 degrees in 0.22 s, the servo's no-load speed
BROADCAST = 0xFE
PING, READ, WRITE, SYNC_READ, SYNC_WRITE = 1, 2, 3, 0x82, 0x83
MODEL, ID, MIN_LIMIT, MAX_LIMIT, OFFSET, TORQUE, GOAL, PRESENT, VOLTAGE, HEAT, MOVING = (
    3,
    5,
    9,
    11,
    31,
    40,
    42,
    56,
    62,
    63,
    66,
)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What `lerobot-calibrate` leaves in a motor and in LeRobot's file, whose keys these are."""

    id: int
    range_min: int
    range_max: int
    homing_offset: int = 0
    drive_mode: int = 0


class Motor:
    """Registers of one servo, and where its horn is, in ticks after the homing offset."""

    def __init__(self, calibration: Calibration) -> None:
        self.registers = bytearray(96)
        self.registers[0:2] = 3, 10  # firmware
        self.registers[ID] = calibration.id
        self.registers[VOLTAGE], self.registers[HEAT] = 120, 30
        self.put(MODEL, MODEL_NUMBER)
        self.put(MIN_LIMIT, calibration.range_min)
        self.put(MAX_LIMIT, calibration.range_max)
        self.put(OFFSET, calibration.homing_offset, sign_bit=11)
        self.position = (calibration.range_min + calibration.range_max) / 2
        self.put(GOAL, round(self.position), sign_bit=15)

    def get(self, address: int, sign_bit: int | None = None) -> int:
        """A word; with a sign bit, the rest is the magnitude."""
        value = int.from_bytes(self.registers[address : address + 2], "little")
        if sign_bit is None or not value >> sign_bit & 1:
            return value
        return -(value & (1 << sign_bit) - 1)

    def put(self, address: int, value: int, sign_bit: int = 15) -> None:
        """Set a word."""
        word = abs(value) | (value < 0) << sign_bit
        self.registers[address : address + 2] = word.to_bytes(2, "little")

    def advance(self, elapsed_s: float) -> None:
        """Move towards the goal, which the position limits bound, if torque is on."""
        goal = min(max(self.get(GOAL, 15), self.get(MIN_LIMIT)), self.get(MAX_LIMIT))
        reach = SPEED_TICKS_S * elapsed_s if self.registers[TORQUE] else 0.0
        step = min(max(goal - self.position, -reach), reach)
        self.position += step
        self.registers[MOVING] = step != 0
        self.put(PRESENT, round(self.position))


class FeetechBus:
    """Servos that answer on `port` from a thread, while the context lasts."""

    def __init__(self, calibrations: Mapping[str, Calibration]) -> None:
        self.motors = {one.id: Motor(one) for one in calibrations.values()}
        self.is_answering = True
        """False: packets are read and ignored, as with the motors' power off."""
        self._master, self._slave = pty.openpty()
        tty.setraw(self._slave)  # an echo would be read as an answer
        self.port = os.ttyname(self._slave)
        self._moved_s = time.monotonic()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="feetech bus", daemon=True)

    def __enter__(self) -> FeetechBus:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        self._thread.join()
        os.close(self._master)
        os.close(self._slave)

    def torques(self) -> list[int]:
        """Torque_Enable of each motor."""
        return [motor.registers[TORQUE] for motor in self.motors.values()]

    def goals(self) -> list[int]:
        """Goal_Position of each motor, in ticks."""
        return [motor.get(GOAL, 15) for motor in self.motors.values()]

    def _serve(self) -> None:
        received = bytearray()
        while not self._is_closing.is_set():
            if select.select([self._master], [], [], 0.005)[0]:
                received += os.read(self._master, 1024)
            self._advance()
            while (packet := _next_packet(received)) is not None:
                answer = self._answer(*packet) if self.is_answering else b""
                if answer:
                    os.write(self._master, answer)

    def _advance(self) -> None:
        now = time.monotonic()
        for motor in self.motors.values():
            motor.advance(now - self._moved_s)
        self._moved_s = now

    def _answer(self, target: int, instruction: int, parameters: bytes) -> bytes:
        if instruction == SYNC_READ:
            address, length = parameters[:2]
            return b"".join(self._status(number, address, length) for number in parameters[2:])
        if instruction == SYNC_WRITE:
            address, length = parameters[:2]
            for start in range(2, len(parameters), length + 1):
                self._write(parameters[start], address, parameters[start + 1 : start + 1 + length])
            return b""
        if instruction == PING and target == BROADCAST:
            return b"".join(self._status(number) for number in self.motors)
        if instruction == PING:
            return self._status(target)
        if instruction == READ:
            return self._status(target, *parameters)
        if instruction == WRITE:
            self._write(target, parameters[0], parameters[1:])
            return self._status(target)
        raise ValueError(f"instruction {instruction:#x} is not one of those that LeRobot sends")

    def _write(self, number: int, address: int, data: bytes) -> None:
        if number in self.motors:
            self.motors[number].registers[address : address + len(data)] = data

    def _status(self, number: int, address: int = 0, length: int = 0) -> bytes:
        if number not in self.motors:
            return b""
        data = self.motors[number].registers[address : address + length]
        body = bytes([number, length + 2, 0, *data])
        return b"\xff\xff" + body + bytes([_checksum(body)])


def _next_packet(received: bytearray) -> tuple[int, int, bytes] | None:
    """Take target, instruction and parameters of the first whole packet."""
    start = received.find(b"\xff\xff")
    if start < 0 or len(received) < start + 4 or len(received) < start + 4 + received[start + 3]:
        return None
    body = bytes(received[start + 2 : start + 4 + received[start + 3]])
    del received[: start + 2 + len(body)]
    if body[-1] != _checksum(body[:-1]):
        raise ValueError(f"checksum of {body.hex()}")
    return body[0], body[2], body[3:-1]


def _checksum(body: bytes) -> int:
    return ~sum(body) & 0xFF
