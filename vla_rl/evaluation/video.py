"""Recorded episodes as MP4, GIF and still pictures: enlarged, captioned, side by side.

The one place where images recorded upside down ("bottom_up") are turned; everything that leaves this file is top-down.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import imageio_ffmpeg
import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from vla_rl.run import atomic_path

Frame: TypeAlias = UInt8[np.ndarray, "height width 3"]
Canvas: TypeAlias = UInt8[np.ndarray, "canvas_height canvas_width 3"]

MIN_CELL_PX = 256
_GAP_PX = 8
_FONT_PX = 14
_LINE_PX = 18
_MAX_INSTRUCTION_LINES = 2
_BACKGROUND = (255, 255, 255)
_INK = (40, 40, 40)
_GREEN = (20, 130, 50)
_RED = (190, 40, 30)
_NO_FRAMES = "got no frames to write; expected at least one: was the episode recorded?"


@dataclass(frozen=True, kw_only=True, eq=False)
class Clip:
    """One recorded episode.

    Attributes:
        frames: One image per control step, all of one size; uint8, as the world drew them.
        orientation: Where row 0 of the frames is.
        instruction: What the robot was told.
        success: Whether it did it.
        label: Who acted, e.g. "after RL"; may be empty.
    """

    frames: Sequence[Frame]
    orientation: Literal["bottom_up", "top_down"]
    instruction: str
    success: bool
    label: str = ""

    def __post_init__(self) -> None:
        """Refuse a clip without frames."""
        if not self.frames:
            raise ValueError(f"the episode {self.instruction!r} has no frames; record it with record_frames=True")

    def picture(self, index: int) -> Frame:
        """A frame the right way up, enlarged to at least 256 px a side; the last one if the clip is over by then."""
        frame = self.frames[min(index, len(self.frames) - 1)]
        if self.orientation == "bottom_up":
            frame = frame[::-1]
        scale = math.ceil(MIN_CELL_PX / min(frame.shape[:2]))
        return frame.repeat(scale, axis=0).repeat(scale, axis=1)


def compose(rows: Sequence[Sequence[Clip]], hold_frames: int = 20) -> Iterator[Frame]:
    """Play clips together in a grid, e.g. one row per start with the cloned policy left and the trained one right.

    Every picture has its instruction below it, and how the episode ended from its last frame on. A clip that is over
    waits for the longest one.

    Args:
        rows: Clips by row; equal numbers in each row, and pictures of one size.
        hold_frames: How often the end of the longest clip is repeated.

    Yields:
        Frames of one size, top-down.

    Raises:
        ValueError: The grid is empty or uneven, or the pictures' sizes differ (raised when the first frame is taken).
    """
    if not rows or len({len(row) for row in rows}) != 1:
        raise ValueError(f"got rows of {[len(row) for row in rows]} clips; expected at least one, all of equal length")
    clips = [clip for row in rows for clip in row]
    width = _common_width(clips)
    running, over = _strips(clips, width, is_over=False), _strips(clips, width, is_over=True)
    for index in range(max(len(clip.frames) for clip in clips) + hold_frames):
        cells = [
            np.concatenate([clip.picture(index), (over if index >= len(clip.frames) - 1 else running)[number]])
            for number, clip in enumerate(clips)
        ]
        yield _grid(cells, num_columns=len(rows[0]))


def contact_sheet(clips: Sequence[Clip], num_columns: int = 6) -> Frame:
    """A still picture: one row per clip, with frames at even distances from the first to the last; top-down.

    Args:
        clips: Clips of one frame size.
        num_columns: Frames per clip, at least 2.

    Raises:
        ValueError: Fewer than two columns, no clips, or clips of different sizes.
    """
    if num_columns < 2:
        raise ValueError(f"got num_columns={num_columns}; expected at least 2, for the first and the last frame")
    width = num_columns * (_common_width(clips) + _GAP_PX) - _GAP_PX
    rows = []
    for clip, strip in zip(clips, _strips(clips, width, is_over=True), strict=True):
        chosen = np.linspace(0, len(clip.frames) - 1, num_columns).round().astype(int)
        pictures = _grid([clip.picture(int(index)) for index in chosen], num_columns)
        rows.append(np.concatenate([pictures, strip]))
    return _grid(rows, num_columns=1)


def write_mp4(path: Path, frames: Iterable[Frame], rate_hz: float) -> None:
    """Encode frames (H.264, plays in any browser). The file appears under its name only when it is complete.

    Args:
        path: Ends in ".mp4"; its folder is created if needed.
        frames: Top-down frames of one size, at least one.
        rate_hz: Frames per second.

    Raises:
        ValueError: There is no frame.
    """
    even = map(_pad_to_even, frames)  # H.264 stores colour at half the resolution
    first = next(even, None)
    if first is None:
        raise ValueError(_NO_FRAMES)
    size = (first.shape[1], first.shape[0])
    num_frames = 0
    with atomic_path(path) as temporary:
        writer = imageio_ffmpeg.write_frames(str(temporary), size, fps=rate_hz, quality=7, macro_block_size=2)
        try:
            writer.send(None)  # starts the encoder
            for frame in itertools.chain([first], even):
                writer.send(np.ascontiguousarray(frame))
                num_frames += 1
        finally:
            writer.close()
        # The encoder does not say that it failed at the end, e.g. on a full disk.
        if imageio_ffmpeg.count_frames_and_secs(str(temporary))[0] != num_frames:
            raise OSError("the encoder did not write all frames (is the disk full?)")


def write_gif(path: Path, frames: Iterable[Frame], rate_hz: float, every: int = 2) -> None:
    """Write a looping GIF, for pages that do not play videos. The file appears under its name only when it is complete.

    Args:
        path: Ends in ".gif"; its folder is created if needed.
        frames: Top-down frames of one size, at least one.
        rate_hz: Frames per second of the input; the GIF plays at the same speed.
        every: Keep one frame in so many, which makes the file smaller.

    Raises:
        ValueError: There is no frame.
    """
    kept = [Image.fromarray(frame) for frame in itertools.islice(frames, 0, None, every)]
    if not kept:
        raise ValueError(_NO_FRAMES)
    # One palette for all frames: what stands still then costs nothing after the first frame. The last frame adds the
    # colours of the verdicts.
    samples = [np.asarray(kept[index]) for index in (0, len(kept) // 2, -1)]
    palette = Image.fromarray(np.concatenate(samples)).quantize(128)
    first, *rest = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in kept)
    duration_ms = round(1000 * every / rate_hz)
    with atomic_path(path) as temporary:
        first.save(temporary, format="GIF", save_all=True, append_images=rest, duration=duration_ms, loop=0)


def write_png(path: Path, frame: Frame) -> None:
    """Write a still picture. The file appears under its name only when it is complete."""
    with atomic_path(path) as temporary:
        Image.fromarray(frame).save(temporary, format="PNG", optimize=True)


def _common_width(clips: Sequence[Clip]) -> int:
    if not clips:
        raise ValueError("got no clips; expected at least one")
    sizes = {clip.frames[0].shape for clip in clips}
    if len(sizes) != 1:
        raise ValueError(f"got clips of sizes {sorted(sizes)}; expected one size: record all with the same camera")
    return int(clips[0].picture(0).shape[1])


def _strips(clips: Sequence[Clip], width: int, is_over: bool) -> list[Frame]:
    """Captions of equal size: the instruction, and below it who acted and (if over) how it ended."""
    font = ImageFont.load_default(_FONT_PX)
    instructions = [_wrap(clip.instruction, font, width - 8) for clip in clips]
    y_last = 2 + max(len(lines) for lines in instructions) * _LINE_PX
    strips = []
    for clip, lines in zip(clips, instructions, strict=True):
        image = Image.new("RGB", (width, y_last + _LINE_PX + 4), _BACKGROUND)
        draw = ImageDraw.Draw(image)
        for number, line in enumerate(lines):
            draw.text((4, 2 + number * _LINE_PX), line, fill=_INK, font=font)
        draw.text((4, y_last), clip.label, fill=_INK, font=font)
        if is_over:
            text, color = ("success", _GREEN) if clip.success else ("failure", _RED)
            draw.text((width - 4, y_last), text, fill=color, font=font, anchor="ra")
        strips.append(np.asarray(image))
    return strips


def _wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    """Lines that fit; what needs more than `_MAX_INSTRUCTION_LINES` ends in dots."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    if len(lines) > _MAX_INSTRUCTION_LINES:
        lines = [*lines[: _MAX_INSTRUCTION_LINES - 1], f"{lines[_MAX_INSTRUCTION_LINES - 1]} ..."]
    return lines


def _grid(cells: Sequence[Frame], num_columns: int) -> Canvas:
    """Equal pictures in rows, with a gap between them."""
    height, width = cells[0].shape[:2]
    num_rows = len(cells) // num_columns
    shape = (num_rows * (height + _GAP_PX) - _GAP_PX, num_columns * (width + _GAP_PX) - _GAP_PX, 3)
    canvas = np.full(shape, _BACKGROUND, dtype=np.uint8)
    for number, cell in enumerate(cells):
        y, x = (number // num_columns) * (height + _GAP_PX), (number % num_columns) * (width + _GAP_PX)
        canvas[y : y + height, x : x + width] = cell
    return canvas


def _pad_to_even(frame: Frame) -> Canvas:
    return np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), constant_values=255)
