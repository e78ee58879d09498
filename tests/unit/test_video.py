"""Videos: orientation, enlargement, captions, grids, and files that a decoder reads back."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from vla_rl.evaluation.video import Clip, Frame, compose, contact_sheet, write_gif, write_mp4, write_png


def make_frames(num_frames: int, size: int = 64) -> list[Frame]:
    """A red first row on gray that brightens by one per frame."""
    frames = [np.full((size, size, 3), 100 + index, dtype=np.uint8) for index in range(num_frames)]
    for frame in frames:
        frame[0] = (255, 0, 0)
    return frames


def make_clip(num_frames: int = 3, **changes: Any) -> Clip:
    fields: dict[str, Any] = {
        "frames": make_frames(num_frames),
        "orientation": "top_down",
        "instruction": "pick up the red cube",
        "success": True,
        "label": "after RL",
    }
    return Clip(**{**fields, **changes})


def has_color(image: Frame, color: tuple[int, int, int]) -> bool:
    return bool((image == np.array(color)).all(axis=2).any())


GREEN, RED = (20, 130, 50), (190, 40, 30)


def test_pictures_are_enlarged_by_whole_pixels() -> None:
    picture = make_clip().picture(1)
    assert picture.shape == (256, 256, 3)
    assert (picture[:4] == (255, 0, 0)).all()
    assert (picture[4:] == 101).all()
    assert make_clip(frames=make_frames(1, size=100)).picture(0).shape == (300, 300, 3)
    assert make_clip(frames=make_frames(1, size=512)).picture(0).shape == (512, 512, 3)


def test_bottom_up_frames_are_turned() -> None:
    picture = make_clip(orientation="bottom_up").picture(0)
    assert (picture[-4:] == (255, 0, 0)).all()
    assert (picture[:-4] == 100).all()


def test_the_verdict_appears_at_the_end() -> None:
    frames = list(compose([[make_clip(num_frames=3)]], hold_frames=2))
    assert len(frames) == 5
    assert [has_color(frame[256:], GREEN) for frame in frames] == [False, False, True, True, True]
    assert not any(has_color(frame, RED) for frame in frames)
    failed = list(compose([[make_clip(success=False)]], hold_frames=0))
    assert has_color(failed[-1][256:], RED)


def test_the_caption_depends_on_instruction_and_label() -> None:
    base = next(compose([[make_clip()]]))
    for other in (make_clip(instruction="pick up the blue cube"), make_clip(label="cloned")):
        changed = next(compose([[other]]))
        assert changed.shape == base.shape
        assert (changed[:256] == base[:256]).all()
        assert (changed[256:] != base[256:]).any()


def test_a_grid_plays_side_by_side_and_waits_for_the_longest() -> None:
    short, long = make_clip(num_frames=2, label="after RL"), make_clip(num_frames=5, label="cloned", success=False)
    frames = list(compose([[long, short], [short, long]], hold_frames=0))
    assert len(frames) == 5
    assert frames[0].shape[1] == 2 * 256 + 8
    assert frames[4][100, 100, 0] == 104  # the long clip goes on
    assert frames[4][100, 400, 0] == 101  # the short one waits
    assert has_color(frames[1][256:330, 264:], GREEN)
    assert not has_color(frames[1][256:330, :256], RED)


def test_a_long_instruction_takes_two_lines_and_ends_in_dots() -> None:
    one = next(compose([[make_clip()]]))
    two = next(compose([[make_clip(instruction="put the bowl " * 4)]]))
    many = next(compose([[make_clip(instruction="put the bowl " * 40)]]))
    assert one.shape[0] < two.shape[0] == many.shape[0]


def test_uneven_grids_mixed_sizes_and_missing_frames_are_refused() -> None:
    clip = make_clip()
    with pytest.raises(ValueError, match="equal length"):
        next(compose([[clip, clip], [clip]]))
    with pytest.raises(ValueError, match="at least one"):
        next(compose([]))
    with pytest.raises(ValueError, match="no clips"):
        next(compose([[]]))
    with pytest.raises(ValueError, match="one size"):
        next(compose([[clip, make_clip(frames=make_frames(1, size=32))]]))
    with pytest.raises(ValueError, match="record_frames=True"):
        make_clip(frames=[])


def test_a_contact_sheet_shows_first_to_last() -> None:
    sheet = contact_sheet([make_clip(num_frames=11), make_clip(num_frames=2, success=False)], num_columns=3)
    assert sheet.shape[1] == 3 * 256 + 2 * 8
    assert [int(sheet[100, x, 0]) for x in (100, 364, 628)] == [100, 105, 110]
    assert has_color(sheet, GREEN)
    assert has_color(sheet, RED)
    with pytest.raises(ValueError, match="num_columns=1"):
        contact_sheet([make_clip()], num_columns=1)


def test_an_mp4_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "videos" / "clip.mp4"
    frames = list(compose([[make_clip(num_frames=6)]], hold_frames=0))
    odd = [frame[:-1, :-1] for frame in frames]
    write_mp4(path, odd, rate_hz=20.0)
    decode = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(decode, capture_output=True, check=True, timeout=60, stdin=subprocess.DEVNULL)
    assert b" 20 fps" in done.stderr
    decoded = np.frombuffer(done.stdout, np.uint8).reshape(6, frames[0].shape[0], 256, 3)
    assert abs(int(decoded[5, 100, 100, 0]) - 105) <= 3
    assert [file.name for file in path.parent.iterdir()] == ["clip.mp4"]


def test_a_gif_plays_at_the_same_speed(tmp_path: Path) -> None:
    path = tmp_path / "clip.gif"
    frames = [np.roll(frame, 10 * index, axis=0) for index, frame in enumerate(make_frames(6))]
    write_gif(path, frames, rate_hz=20.0, every=2)
    with Image.open(path) as image:
        assert image.n_frames == 3
        assert image.info["duration"] == 100
        assert image.info["loop"] == 0


def test_a_png_is_read_back(tmp_path: Path) -> None:
    write_png(tmp_path / "still.png", make_frames(1)[0])
    with Image.open(tmp_path / "still.png") as image:
        np.testing.assert_array_equal(np.asarray(image), make_frames(1)[0])


@pytest.mark.parametrize("write", [write_mp4, write_gif])
def test_nothing_to_write_is_refused(tmp_path: Path, write: Any) -> None:
    with pytest.raises(ValueError, match="no frames"):
        write(tmp_path / "clip", iter([]), 20.0)
    assert not list(tmp_path.iterdir())
