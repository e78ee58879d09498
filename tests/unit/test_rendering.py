"""Choice of the OpenGL library, and pictures of the toy scene."""

from __future__ import annotations

import threading

import mujoco
import numpy as np
import pytest
from toy_suite import toy_model

from sim import rendering
from sim.model import RenderOptions, SimModel


def picture(model: SimModel, height: int = 24, width: int = 32, camera: str = "top") -> np.ndarray:
    data = mujoco.MjData(model.mj_model)
    mujoco.mj_forward(model.mj_model, data)
    image = np.zeros((height, width, 3), dtype=np.uint8)
    rendering.render(model, data, model.camera_id(camera), image)
    return image


def num_red(image: np.ndarray) -> int:
    red, green, blue = (image[..., i].astype(int) for i in range(3))
    return int(((red > 60) & (red > 2 * green) & (red > 2 * blue)).sum())


@pytest.mark.parametrize(
    ("wanted", "devices", "osmesa", "expected"),
    [
        ("", ("gpu",), "libOSMesa.so", "egl"),
        ("", ("cpu",), "libOSMesa.so", "osmesa"),
        ("", (), "libOSMesa.so", "osmesa"),
        ("", ("cpu",), None, "egl"),
        ("egl", ("cpu",), "libOSMesa.so", "egl"),
        ("osmesa", ("gpu",), "libOSMesa.so", "osmesa"),
    ],
)
def test_choice_of_the_library(
    monkeypatch: pytest.MonkeyPatch, wanted: str, devices: tuple[str, ...], osmesa: str | None, expected: str
) -> None:
    monkeypatch.setenv("MUJOCO_GL", wanted)
    monkeypatch.setenv("PYOPENGL_PLATFORM", expected)
    monkeypatch.setattr(rendering, "_egl_devices", lambda: devices)
    monkeypatch.setattr(rendering.ctypes.util, "find_library", lambda name: osmesa)
    assert rendering.ensure_gl_backend.__wrapped__() == expected
    assert rendering.os.environ["MUJOCO_GL"] == expected


@pytest.mark.parametrize(
    ("wanted", "packages"),
    [("", "libosmesa6 libegl1 libgl1-mesa-dri"), ("osmesa", "libosmesa6"), ("egl", "libegl1 libgl1-mesa-dri")],
)
def test_missing_libraries_are_named_with_their_packages(
    monkeypatch: pytest.MonkeyPatch, wanted: str, packages: str
) -> None:
    monkeypatch.setenv("MUJOCO_GL", wanted)
    monkeypatch.setattr(rendering, "_egl_devices", lambda: ())
    monkeypatch.setattr(rendering.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(OSError, match=f"apt-get install {packages}$"):
        rendering.ensure_gl_backend.__wrapped__()


def test_a_backend_with_a_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    with pytest.raises(ValueError, match="MUJOCO_GL='glfw' cannot render off-screen"):
        rendering.ensure_gl_backend.__wrapped__()


def test_pyopengl_bound_to_the_other_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    monkeypatch.setattr(rendering, "_egl_devices", lambda: ("cpu",))
    monkeypatch.setattr(rendering.ctypes.util, "find_library", lambda name: "libOSMesa.so")
    with pytest.raises(OSError, match=r"PyOpenGL is bound to 'egl'.*set MUJOCO_GL=egl"):
        rendering.ensure_gl_backend.__wrapped__()


def test_rows_come_bottom_first() -> None:
    image = picture(toy_model(), camera="side")
    assert image[:4].mean() > 2 * image[-4:].mean()  # grey floor below, black sky above


def test_sizes_may_alternate() -> None:
    model = toy_model()
    small, large = picture(model, 24, 32), picture(model, 50, 70)
    np.testing.assert_array_equal(picture(model, 24, 32), small)
    np.testing.assert_array_equal(picture(model, 50, 70), large)
    assert num_red(large) > num_red(small) > 0


def test_groups_select_what_is_drawn() -> None:
    assert num_red(picture(toy_model(render=RenderOptions(samples=0, geom_groups=(1,))))) > 0
    assert num_red(picture(toy_model(render=RenderOptions(samples=0, geom_groups=(0,))))) == 0  # the cube is in group 1


def test_anti_aliasing_blurs_edges_and_shadows_darken() -> None:
    plain = picture(toy_model(render=RenderOptions(samples=0, shadows=False)))
    smooth = picture(toy_model(render=RenderOptions(samples=4, shadows=False)))
    shaded = picture(toy_model(render=RenderOptions(samples=0, shadows=True)))
    assert not np.array_equal(plain, smooth)
    assert shaded.mean() < plain.mean()
    np.testing.assert_allclose(smooth.mean(), plain.mean(), rtol=0.05)


def test_threads_draw_the_same_picture() -> None:
    model = toy_model()
    images: list[np.ndarray] = []

    def draw() -> None:
        images.append(picture(model))
        rendering.free_renderers()

    threads = [threading.Thread(target=draw) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(images) == 3
    for image in images:
        np.testing.assert_array_equal(image, picture(model))


def test_freed_renderers_are_made_again() -> None:
    model = toy_model()
    image = picture(model)
    rendering.free_renderers()
    rendering.free_renderers()
    assert len(rendering._renderers.by_model) == 0
    np.testing.assert_array_equal(picture(model), image)


def test_a_thread_keeps_a_bounded_number_of_renderers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_RENDERERS_PER_THREAD", 2)
    rendering.free_renderers()
    first, second, third = (toy_model() for _ in range(3))
    image = picture(first)
    picture(second)
    np.testing.assert_array_equal(picture(first), image)  # used again: `second` is now the oldest
    picture(third)
    kept = list(rendering._renderers.by_model)
    assert kept == [first.mj_model._address, third.mj_model._address]
