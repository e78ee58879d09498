"""A compiled model in which some fixed bodies stand elsewhere, without a second copy of its meshes and textures.

LIBERO and robosuite draw the poses of furniture at every reset and write them into the model, so they are not part of
MuJoCo's state. Worlds share one model of a few hundred MB; what differs is a few numbers. A view is a copy of the
model's C struct (a few kB of sizes and pointers) whose `body_pos` and `body_quat` point to arrays of its own. MuJoCo's
C functions take its address like that of any model.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import mujoco
import numpy as np
from jaxtyping import Float64, Int64

from sim.model import PINNED_MUJOCO, check_mujoco_version

check_mujoco_version()
# Loaded already by the `mujoco` package; opening it again makes its symbols visible to the compiled kernel too.
LIBRARY = ctypes.CDLL(str(Path(mujoco.__file__).parent / f"libmujoco.so.{PINNED_MUJOCO}"), mode=ctypes.RTLD_GLOBAL)
for _name in ("mj_step1", "mj_fwdPosition"):
    getattr(LIBRARY, _name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    getattr(LIBRARY, _name).restype = None
_usable_size = ctypes.CDLL(None).malloc_usable_size
_usable_size.argtypes, _usable_size.restype = [ctypes.c_void_p], ctypes.c_size_t


class ModelView:
    """One world's view of a shared model.

    Args:
        mj_model: The shared model; it must not change any more.
        bodies: Bodies whose poses the view owns. Without any, the view is the model itself.
    """

    def __init__(self, mj_model: mujoco.MjModel, bodies: Int64[np.ndarray, " bodies"]) -> None:
        self.mj_model = mj_model
        self.bodies = bodies
        self.address: int = mj_model._address
        self._position, self._quaternion = mj_model.body_pos, mj_model.body_quat
        if len(bodies):
            self._position, self._quaternion = self._position.copy(), self._quaternion.copy()
            self._struct = _copy_struct(mj_model, {"body_pos": self._position, "body_quat": self._quaternion})
            self.address = self._struct.ctypes.data

    def place(self, poses: Float64[np.ndarray, "bodies 7"]) -> None:
        """Set the bodies' poses relative to their parents: position (m), quaternion (w, x, y, z).

        Raises:
            ValueError: Not one pose per body.
        """
        if poses.shape != (len(self.bodies), 7):
            raise ValueError(f"{len(self.bodies)} poses of 7 numbers expected, got an array of shape {poses.shape}")
        if len(self.bodies):
            self._position[self.bodies] = poses[:, :3]
            self._quaternion[self.bodies] = poses[:, 3:]

    @property
    def poses(self) -> Float64[np.ndarray, "bodies 7"]:
        """The bodies' poses relative to their parents: position (m), quaternion (w, x, y, z)."""
        return np.concatenate([self._position[self.bodies], self._quaternion[self.bodies]], axis=1)

    def step1(self, data: mujoco.MjData) -> None:
        """`mj_step1` in this view: poses, velocities and contacts of the present state."""
        LIBRARY.mj_step1(self.address, data._address)

    def forward_position(self, data: mujoco.MjData) -> None:
        """`mj_fwdPosition` in this view: poses and contacts of the present positions."""
        LIBRARY.mj_fwdPosition(self.address, data._address)


def _copy_struct(
    mj_model: mujoco.MjModel, replaced: dict[str, Float64[np.ndarray, "bodies n"]]
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The struct's bytes with the addresses of some arrays replaced; their place is found by their present value.

    Raises:
        RuntimeError: An address occurs not exactly once, so this is not the layout that MuJoCo documents.
    """
    num_words = _usable_size(mj_model._address) // 8  # at least the struct; what follows it is ours to read
    struct = np.ctypeslib.as_array((ctypes.c_uint64 * num_words).from_address(mj_model._address)).copy()
    for name, array in replaced.items():
        places = np.flatnonzero(struct == getattr(mj_model, name).ctypes.data)
        if len(places) != 1:
            raise RuntimeError(f"the address of {name} occurs {len(places)} times in MuJoCo's model struct, not once")
        struct[places[0]] = array.ctypes.data
    return struct
