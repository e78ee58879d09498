"""`mesh_quality: lite`: a copy of a compiled model that draws fewer triangles and smaller textures, with equal physics.

Software rendering takes time per triangle, and LIBERO's models have 240,000 to 400,000 of them, most smaller than a
pixel. Visual meshes are simplified by edge collapses with quadric errors (Garland and Heckbert 1997, "Surface
simplification using quadric error metrics"), done by the library fast-simplification. It knows positions only, so:

- vertices at one position are welded before, else the mesh would tear along its seams;
- an open border gets a fin, a triangle upright on each border edge, whose plane keeps the border in place (section 6 of
  the paper);
- a merged vertex takes the place of the nearest vertex that it replaces, and a corner keeps to the texture coordinates
  and normals of its own side of a seam. So new faces point into the old tables of vertices, normals and texture
  coordinates.

Everything is written into a copy of the compiled arrays. Nothing is compiled again, so what the physics reads is equal
to the last bit. What is not kept: rays and mouse picks against simplified meshes (`mj_ray`, `mjv_select`).
"""

from __future__ import annotations

import copy
import math
from types import ModuleType

import mujoco
import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64, Shaped
from PIL import Image

TOLERANCE_M = 0.002
"""At 128 pixels a quarter of a pixel in LIBERO's table view, and half a pixel in the wrist view from 30 cm."""
MAX_FACES = 8000
"""The robot's mount and a wicker basket would have more at that tolerance."""
MAX_TEXTURE = 512
"""Texels; LIBERO's textures have up to 4096, and OpenGL samples those from smaller copies at such distances."""
MIN_FACES = 64
"""Tiny parts keep a shape even where the tolerance would flatten them."""

LITE_VERSION = f"1 {TOLERANCE_M} {MAX_FACES} {MAX_TEXTURE} {MIN_FACES}"
"""Part of the name of a cached lite model; the number counts changes of the method."""

# fast-simplification raises its limit on the squared error to 1e-9 * 102**aggressiveness over 100 rounds. This one ends
# at 1, the squared tolerance for points in units of it; the library's own default goes on until the count is reached.
_TO_TOLERANCE = 9.0 / math.log10(102.0)
_TO_COUNT = 7.0


def simplify_visuals(
    full: mujoco.MjModel,
    *,
    tolerance_m: float = TOLERANCE_M,
    max_faces: int = MAX_FACES,
    max_texture: int = MAX_TEXTURE,
) -> mujoco.MjModel:
    """A copy whose visual meshes have fewer faces and whose textures are smaller; deterministic.

    Only meshes that no geom can collide with are touched, and of those only `mesh_face`, `mesh_facenormal`,
    `mesh_facetexcoord` and `mesh_facenum`; of textures `tex_data`, `tex_width` and `tex_height`. Arrays keep their
    sizes; what is no longer used is zero, so it compresses well.

    Args:
        full: Compiled model; not changed.
        tolerance_m: A merged vertex stays this close to the planes of all faces that it replaces.
        max_faces: Faces that a mesh may keep, whatever the tolerance says. A mesh with many open borders may keep more.
        max_texture: Longest side of a texture (of one face of a cube map), in texels.

    Raises:
        ImportError: fast-simplification is missing.
        ValueError: An argument is out of range.
    """
    if not (tolerance_m > 0.0 and max_faces >= MIN_FACES and max_texture >= 1):
        raise ValueError(
            f"tolerance_m={tolerance_m}, max_faces={max_faces}, max_texture={max_texture} given; expected a positive "
            f"tolerance, at least {MIN_FACES} faces and 1 texel"
        )
    library = _load_library()
    lite = copy.copy(full)
    for mesh in _visual_meshes(full):
        if full.mesh_facenum[mesh] > MIN_FACES:
            _simplify_mesh(library, lite, int(mesh), tolerance_m, max_faces)
    for texture in range(full.ntex):
        _shrink_texture(lite, texture, max_texture)
    return lite


def _load_library() -> ModuleType:
    try:
        import fast_simplification
    except ModuleNotFoundError as error:
        raise ImportError(
            "mesh_quality: lite needs the package fast-simplification; run: pip install 'vla-rl[libero]', or choose "
            "mesh_quality: full"
        ) from error
    library: ModuleType = fast_simplification
    return library


def _visual_meshes(model: mujoco.MjModel) -> Int64[np.ndarray, " meshes"]:
    """Meshes that are drawn and cannot touch anything."""
    can_touch = (model.geom_contype != 0) | (model.geom_conaffinity != 0)
    can_touch[model.pair_geom1] = can_touch[model.pair_geom2] = True
    is_drawn_only = (model.geom_type == int(mujoco.mjtGeom.mjGEOM_MESH)) & ~can_touch
    uses_mesh = (model.geom_dataid >= 0) & (model.geom_type != int(mujoco.mjtGeom.mjGEOM_HFIELD))
    is_visual = np.zeros(model.nmesh, dtype=bool)
    is_visual[model.geom_dataid[is_drawn_only]] = True
    is_visual[model.geom_dataid[uses_mesh & ~is_drawn_only]] = False
    return np.flatnonzero(is_visual & (model.mesh_graphadr < 0))  # a convex hull is made for collisions only


def _simplify_mesh(library: ModuleType, model: mujoco.MjModel, mesh: int, tolerance_m: float, max_faces: int) -> None:
    """Replace the faces of one mesh, in place."""
    start, num_faces = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
    faces = model.mesh_face[start : start + num_faces]
    vertices = _table(model.mesh_vert, model.mesh_vertadr[mesh], model.mesh_vertnum[mesh]).astype(np.float64)
    points, vertex_of_point, point_of_vertex = np.unique(vertices, axis=0, return_index=True, return_inverse=True)
    welded = point_of_vertex.reshape(-1)[faces]

    target = _merge_points(library, points, welded[_is_proper(welded)].astype(np.int32), tolerance_m, max_faces)
    merged = target[welded]
    kept = _is_proper(merged)
    distance = np.linalg.norm(points - points[target], axis=1)

    corner_arrays = [(model.mesh_facenormal, model.mesh_normal, model.mesh_normaladr, model.mesh_normalnum)]
    if model.mesh_texcoordadr[mesh] >= 0:
        texture = (model.mesh_facetexcoord, model.mesh_texcoord, model.mesh_texcoordadr, model.mesh_texcoordnum)
        corner_arrays.append(texture)
    for corner_array, values, address, count in corner_arrays:
        corners = corner_array[start : start + num_faces]
        table = _table(values, address[mesh], count[mesh])
        _rewrite(corners, _keep_sides(table, corners, welded, merged, distance)[kept])
    _rewrite(faces, vertex_of_point[merged[kept]])
    model.mesh_facenum[mesh] = kept.sum()


def _table(
    values: Float32[np.ndarray, "all width"], address: np.int32, count: np.int32
) -> Float32[np.ndarray, "entries width"]:
    table: Float32[np.ndarray, "entries width"] = values[address : address + count]
    return table


def _is_proper(faces: Shaped[np.ndarray, "faces 3"]) -> Bool[np.ndarray, " faces"]:
    """Whether the three corners differ."""
    is_proper: Bool[np.ndarray, " faces"] = (faces != np.roll(faces, 1, axis=1)).all(axis=1)
    return is_proper


def _rewrite(rows: Int32[np.ndarray, "old 3"], new_rows: Shaped[np.ndarray, "new 3"]) -> None:
    rows[: len(new_rows)] = new_rows
    rows[len(new_rows) :] = 0


def _merge_points(
    library: ModuleType,
    points: Float64[np.ndarray, "points 3"],
    faces: Int32[np.ndarray, "faces 3"],
    tolerance_m: float,
    max_faces: int,
) -> Int64[np.ndarray, " points"]:
    """The point that takes each point's place.

    Edges are collapsed up to the tolerance, or beyond it if that leaves too many faces. The optimal place of a merged
    vertex can lie far away where the faces around it are almost parallel, so the nearest original point takes it.
    """
    centred = points - points.mean(axis=0)
    fin_points, fins = _border_fins(centred, faces)
    all_points, all_faces = np.concatenate([centred, fin_points]), np.concatenate([faces, fins])
    to_tolerance, to_count = (tolerance_m, MIN_FACES, _TO_TOLERANCE), (np.ptp(points), max_faces, _TO_COUNT)
    for unit_m, num_wanted, aggressiveness in (to_tolerance, to_count):
        _, remaining, collapses = library.simplify(
            all_points / unit_m,
            all_faces,
            target_count=min(num_wanted, len(all_faces)),
            agg=aggressiveness,
            return_collapses=True,
        )
        if len(remaining) <= max_faces:
            break
    optimum, _, cluster = library.replay_simplification(all_points / unit_m, all_faces, collapses)
    cluster = cluster[: len(points)]
    distance = np.linalg.norm(centred / unit_m - optimum[cluster], axis=1)
    by_distance = np.lexsort((distance, cluster))
    clusters, first = np.unique(cluster[by_distance], return_index=True)
    target: Int64[np.ndarray, " points"] = by_distance[first][np.searchsorted(clusters, cluster)]
    return target


def _border_fins(
    points: Float64[np.ndarray, "points 3"], faces: Int32[np.ndarray, "faces 3"]
) -> tuple[Float64[np.ndarray, "fins 3"], Int32[np.ndarray, "fins 3"]]:
    """One triangle upright on each edge that only one face has, and their tips, numbered on from `points`."""
    edges = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    _, edge, num_uses = np.unique(np.sort(edges, axis=1), axis=0, return_inverse=True, return_counts=True)
    on_border = np.flatnonzero(num_uses[edge.reshape(-1)] == 1)
    a, b, c = (points[faces[on_border % len(faces), i]] for i in range(3))
    normal = np.cross(b - a, c - a)
    normal /= np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    start, end = points[edges[on_border, 0]], points[edges[on_border, 1]]
    tips = (start + end) / 2.0 + normal * np.linalg.norm(end - start, axis=1, keepdims=True)
    numbers = len(points) + np.arange(len(tips), dtype=np.int32)
    return tips, np.column_stack([edges[on_border, 1], edges[on_border, 0], numbers])


def _keep_sides(
    table: Float32[np.ndarray, "entries width"],
    corners: Int32[np.ndarray, "faces 3"],
    welded: Int64[np.ndarray, "faces 3"],
    merged: Int64[np.ndarray, "faces 3"],
    distance_m: Float64[np.ndarray, " points"],
) -> Int64[np.ndarray, "faces 3"]:
    """Entry of `table` for each corner after the merge: one of its own side of every seam.

    A wedge is a point with one value; a point on a seam has several. Wedges of one merged vertex that share faces are
    connected without crossing a seam. A corner takes the connected wedge nearest to where the vertex is now.

    Args:
        table: Normals or texture coordinates of the mesh.
        corners: Entry of each corner before.
        welded: Point of each corner before.
        merged: Point of each corner after.
        distance_m: How far each point moves.
    """
    _, value = np.unique(table, axis=0, return_inverse=True)
    value = value.reshape(-1).astype(np.int64)
    _, first, wedge = np.unique(welded * len(table) + value[corners], return_index=True, return_inverse=True)
    wedge = wedge.reshape(corners.shape)
    inside = [
        (wedge[same, i], wedge[same, j])
        for i, j in ((0, 1), (1, 2), (2, 0))
        for same in (merged[:, i] == merged[:, j],)
    ]
    side = _connected(len(first), np.concatenate([np.stack(pair) for pair in inside], axis=1))
    by_distance = np.lexsort((distance_m[welded.reshape(-1)[first]], side))
    sides, nearest = np.unique(side[by_distance], return_index=True)
    entry = corners.reshape(-1)[first][by_distance[nearest]].astype(np.int64)
    return entry[np.searchsorted(sides, side)][wedge]


def _connected(num_nodes: int, edges: Int64[np.ndarray, "2 edges"]) -> Int64[np.ndarray, " nodes"]:
    """Smallest node that each node is connected with."""
    label = np.arange(num_nodes)
    while True:
        smaller = label.copy()
        np.minimum.at(smaller, edges[0], label[edges[1]])
        np.minimum.at(smaller, edges[1], label[edges[0]])
        smaller = smaller[smaller]
        if np.array_equal(smaller, label):
            return label
        label = smaller


def _shrink_texture(model: mujoco.MjModel, texture: int, max_side: int) -> None:
    """Average a texture down, in place. The six faces of a cube map lie below each other."""
    width, height, channels = (int(size[texture]) for size in (model.tex_width, model.tex_height, model.tex_nchannel))
    num_faces = 6 if model.tex_type[texture] != mujoco.mjtTexture.mjTEXTURE_2D and height == 6 * width else 1
    scale = max_side / max(width, height // num_faces)
    if scale >= 1.0:
        return
    new_width, new_height = max(1, round(width * scale)), num_faces * max(1, round(height // num_faces * scale))
    address = model.tex_adr[texture]
    texels = model.tex_data[address : address + height * width * channels]
    shape = (height, width) if channels == 1 else (height, width, channels)
    image = Image.fromarray(texels.reshape(shape)).resize((new_width, new_height), Image.Resampling.BOX)
    small = np.asarray(image).reshape(-1)
    texels[: len(small)] = small
    texels[len(small) :] = 0
    model.tex_width[texture], model.tex_height[texture] = new_width, new_height
