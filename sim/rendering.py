"""Off-screen rendering: choice of the OpenGL library, and a small cache of drawing contexts per thread.

An OpenGL context belongs to the thread that made it, so every thread keeps its own `Renderer`s, one per model, and
frees them itself (`free_renderers`). Images come bottom row first, as robosuite and LIBERO return them.
"""

from __future__ import annotations

import atexit
import ctypes
import ctypes.util
import os
import threading
from collections import OrderedDict
from collections.abc import Collection
from functools import cache
from typing import Any, Literal, Protocol, runtime_checkable

import mujoco
import numpy as np
from jaxtyping import UInt8

from sim.model import RenderOptions

Backend = Literal["egl", "osmesa"]

MAX_RENDERERS_PER_THREAD = 12
"""A LIBERO model takes a few hundred MB of textures per context; suites have ten tasks."""

MAX_GEOMS = 1000
"""Geoms in a scene, as robosuite sets it."""

_USERS_RASTER_THREADS = os.environ.get("LP_NUM_THREADS")

_DEBIAN_PACKAGES: dict[Backend, str] = {"egl": "libegl1 libgl1-mesa-dri", "osmesa": "libosmesa6"}


@cache
def ensure_gl_backend() -> Backend:
    """Choose the OpenGL library for this process and tell every other library through `MUJOCO_GL`.

    `MUJOCO_GL` wins if it is set. Otherwise EGL is used if it offers a graphics card, then OSMesa, then EGL on the
    CPU. Call it before robosuite is imported: robosuite would choose EGL without asking.

    Raises:
        ValueError: `MUJOCO_GL` names something else than "egl" or "osmesa".
        OSError: No library can be loaded; names the Debian packages to install.
    """
    wanted = os.environ.get("MUJOCO_GL", "").lower().strip()
    if wanted not in ("", "egl", "osmesa"):
        raise ValueError(f"MUJOCO_GL={wanted!r} cannot render off-screen; set it to 'egl' or 'osmesa', or unset it")
    devices = _egl_devices()
    has_osmesa = ctypes.util.find_library("OSMesa") is not None
    if wanted:
        backend: Backend = "egl" if wanted == "egl" else "osmesa"
        is_usable = bool(devices) if backend == "egl" else has_osmesa
    else:
        backend = "egl" if "gpu" in devices or not has_osmesa else "osmesa"
        is_usable = bool(devices) or has_osmesa
    if not is_usable:
        packages = _DEBIAN_PACKAGES[backend] if wanted else " ".join(reversed(_DEBIAN_PACKAGES.values()))
        raise OSError(
            f"no off-screen OpenGL library can be used (MUJOCO_GL={wanted or 'unset'}). On Debian or Ubuntu: "
            f"apt-get install {packages}"
        )
    loaded = os.environ.get("PYOPENGL_PLATFORM", backend)
    if loaded != backend:
        raise OSError(
            f"PyOpenGL is bound to {loaded!r} in this process, but {backend!r} is needed; set MUJOCO_GL={loaded}"
        )
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = backend
    use_raster_threads(0)
    return backend


def use_raster_threads(num_threads: int) -> None:
    """Threads in which Mesa's software renderer fills triangles, for the process; to be set before the first image.

    With 0 a picture is drawn in the thread that asks for it, one picture at a time in the whole process. That is best
    for scenes of a few primitives. Scenes of many triangles gain from threads: on two cores LIBERO's are drawn 1.5
    times as fast with two. A value of `LP_NUM_THREADS` that the user has set is left alone.
    """
    if _USERS_RASTER_THREADS is None:
        os.environ["LP_NUM_THREADS"] = str(num_threads)


def _egl_devices() -> tuple[Literal["gpu", "cpu"], ...]:
    """Kinds of the devices that EGL can open, asked without PyOpenGL (its import binds the process to one library)."""
    name = ctypes.util.find_library("EGL")
    if name is None:
        return ()
    egl = ctypes.CDLL(name)
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    addresses = {
        function: egl.eglGetProcAddress(function)
        for function in (b"eglQueryDevicesEXT", b"eglQueryDeviceStringEXT", b"eglGetPlatformDisplayEXT")
    }
    if not all(addresses.values()):
        return ()
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
        addresses[b"eglQueryDevicesEXT"]
    )
    describe = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)(addresses[b"eglQueryDeviceStringEXT"])
    display = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)(
        addresses[b"eglGetPlatformDisplayEXT"]
    )
    egl.eglInitialize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    handles, count = (ctypes.c_void_p * 32)(), ctypes.c_int(0)
    if not query(32, ctypes.addressof(handles), ctypes.addressof(count)):
        return ()
    platform_device, extensions = 0x313F, 0x3055  # EGL_PLATFORM_DEVICE_EXT, EGL_EXTENSIONS
    kinds: list[Literal["gpu", "cpu"]] = []
    for handle in handles[: count.value]:
        if egl.eglInitialize(display(platform_device, handle, None), None, None):
            is_software = b"EGL_MESA_device_software" in (describe(handle, extensions) or b"")
            kinds.append("cpu" if is_software else "gpu")
    return tuple(kinds)


def _make_gl_context(width: int, height: int) -> Any:
    backend = ensure_gl_backend()
    if backend == "egl":
        from mujoco.egl import GLContext
    else:
        from mujoco.osmesa import GLContext
    context = GLContext(width, height)
    _free_at_exit()
    return context


@cache
def _free_at_exit() -> None:
    """Free the main thread's contexts at exit, before MuJoCo's own exit handler closes the display under them."""
    atexit.register(free_renderers)


@runtime_checkable
class Drawable(Protocol):
    """What there is to draw, and how."""

    @property
    def mj_model(self) -> mujoco.MjModel:
        """Compiled model whose meshes and textures are loaded."""

    @property
    def render(self) -> RenderOptions:
        """Drawing options."""


class Renderer:
    """Draws the worlds of one model in one thread.

    Args:
        mj_model: Compiled model.
        options: What to draw.
    """

    def __init__(self, mj_model: mujoco.MjModel, options: RenderOptions) -> None:
        self._mj_model = mj_model  # kept alive: its address names this renderer
        self._gl = _make_gl_context(8, 8)  # its own buffer is not used: MuJoCo draws into one of its own
        self._gl.make_current()
        self._context = mujoco.MjrContext(mj_model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._context.readDepthMap = mujoco.mjtDepthMap.mjDEPTH_ZEROFAR
        self._size = (0, 0)
        self._scene = mujoco.MjvScene(mj_model, maxgeom=MAX_GEOMS)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = options.shadows
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = options.reflections
        self._options = mujoco.MjvOption()
        self._options.geomgroup[:] = [group in options.geom_groups for group in range(6)]
        self._site_groups = options.site_groups
        self._perturb = mujoco.MjvPerturb()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def render(
        self,
        data: mujoco.MjData,
        camera_id: int,
        out: UInt8[np.ndarray, "height width 3"],
        site_groups: Collection[int] = (),
    ) -> None:
        """Draw a camera's image into `out`, bottom row first.

        Args:
            data: Up-to-date data (poses belong to `qpos`), of this model or of one with the same meshes and textures
                (colours and sizes are those of the data's own model); not changed.
            camera_id: Id of a camera of the model.
            out: C-contiguous.
            site_groups: Site groups to draw besides those of the options.
        """
        height, width = out.shape[:2]
        self._gl.make_current()
        if self._size != (height, width):
            mujoco.mjr_resizeOffscreen(width, height, self._context)
            self._size = (height, width)
        self._camera.fixedcamid = camera_id
        self._options.sitegroup[:] = [group in self._site_groups or group in site_groups for group in range(6)]
        mujoco.mjv_updateScene(
            data.model, data, self._options, self._perturb, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )
        viewport = mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_render(viewport, self._scene, self._context)
        mujoco.mjr_readPixels(out, None, viewport, self._context)

    def free(self) -> None:
        """Free the context; only in the thread that made it."""
        self._gl.make_current()
        self._context.free()
        self._gl.free()


class _ThreadRenderers(threading.local):
    """Renderers of the current thread, least recently used first."""

    def __init__(self) -> None:
        self.by_model: OrderedDict[int, Renderer] = OrderedDict()


_renderers = _ThreadRenderers()


def render(
    model: Drawable,
    data: mujoco.MjData,
    camera_id: int,
    out: UInt8[np.ndarray, "height width 3"],
    site_groups: Collection[int] = (),
) -> None:
    """Draw with the current thread's renderer of the model; makes it at the first call. See `Renderer.render`."""
    renderers = _renderers.by_model
    key = model.mj_model._address
    renderer = renderers.get(key)
    if renderer is None:
        while len(renderers) >= MAX_RENDERERS_PER_THREAD:
            renderers.popitem(last=False)[1].free()
        renderer = renderers[key] = Renderer(model.mj_model, model.render)
    renderers.move_to_end(key)
    renderer.render(data, camera_id, out, site_groups)


def free_renderers() -> None:
    """Free the current thread's renderers; every thread that rendered calls it before it ends."""
    while _renderers.by_model:
        _renderers.by_model.popitem()[1].free()
