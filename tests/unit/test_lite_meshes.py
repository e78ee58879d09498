"""Lite models: fewer triangles, smaller textures, the same pictures within a bound, and the same physics to the bit."""

from __future__ import annotations

import copy
import sys
from itertools import pairwise

import mujoco
import numpy as np
import pytest

from sim.libero.lite_meshes import MIN_FACES, TOLERANCE_M, simplify_visuals
from sim.model import RenderOptions
from sim.rendering import Renderer

pytest.importorskip("fast_simplification")

NUM_RINGS, NUM_COLUMNS, HEIGHT_M = 60, 96, 0.2
NUM_FACES = 2 * NUM_RINGS * NUM_COLUMNS
TEXTURE = 1024

MESH_ARRAYS = {"mesh_face", "mesh_facenormal", "mesh_facetexcoord", "mesh_facenum"}
TEXTURE_ARRAYS = {"tex_data", "tex_width", "tex_height"}


def vase_radius(height: np.ndarray) -> np.ndarray:
    return 0.06 + 0.02 * np.sin(2.0 * np.pi * height / HEIGHT_M)


def vase(*, has_texture: bool = True) -> bytes:
    """OBJ file of an open tube with a waist: `grid_mesh` rolled up; the first and the last column lie on each other."""
    u, v = grid(NUM_COLUMNS, NUM_RINGS)
    radius, angle = vase_radius(v * HEIGHT_M), 2.0 * np.pi * (u % 1.0)  # the same to the bit on both sides of the seam
    slope = 0.02 * 2.0 * np.pi / HEIGHT_M * np.cos(2.0 * np.pi * v)
    vertices = np.column_stack([radius * np.cos(angle), radius * np.sin(angle), v * HEIGHT_M])
    normals = np.column_stack([np.cos(angle), np.sin(angle), -slope])
    return grid_mesh(vertices, normals, np.column_stack([u, v]) if has_texture else None, NUM_COLUMNS, NUM_RINGS)


def panel() -> bytes:
    """OBJ file of a flat square, 10 cm wide."""
    x, y = grid(30, 30)
    vertices = np.column_stack([0.1 * x, np.zeros_like(x), 0.1 * y])
    return grid_mesh(vertices, np.tile([0.0, -1.0, 0.0], (len(x), 1)), np.column_stack([x, y]), 30, 30)


def grid(columns: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    u, v = np.meshgrid(np.linspace(0, 1, columns + 1), np.linspace(0, 1, rows + 1))
    return u.ravel(), v.ravel()


def grid_mesh(vertices: np.ndarray, normals: np.ndarray, texcoord: np.ndarray | None, columns: int, rows: int) -> bytes:
    corner = (np.arange(rows)[:, None] * (columns + 1) + np.arange(columns)).ravel()
    right, above = corner + 1, corner + columns + 1
    faces = np.concatenate([np.column_stack([corner, right, above]), np.column_stack([right, above + 1, above])]) + 1
    lines = ["v {:.9g} {:.9g} {:.9g}".format(*row) for row in vertices]
    lines += ["vn {:.9g} {:.9g} {:.9g}".format(*row) for row in normals]
    lines += ["vt {:.9g} {:.9g}".format(*row) for row in ([] if texcoord is None else texcoord)]
    item = "{0}//{0}" if texcoord is None else "{0}/{0}/{0}"
    lines += ["f " + " ".join(item.format(number) for number in face) for face in faces]
    return "\n".join(lines).encode()


def make_model(*, pair: str = "") -> mujoco.MjModel:
    """A vase that is drawn only, one that is also touched, one with a mesh of its own for contacts, on a table."""
    drawn = 'type="mesh" group="1" contype="0" conaffinity="0" material="paint"'
    return mujoco.MjModel.from_xml_string(
        f"""
    <mujoco>
      <asset>
        <texture name="paint" type="2d" builtin="checker" width="{TEXTURE}" height="{TEXTURE}" rgb1="1 0 0" rgb2="0 0 1"
          mark="random" random="0.02" markrgb="1 1 1"/>
        <texture name="sky" type="skybox" builtin="gradient" width="600" height="3600" rgb1="0 1 0" rgb2="0 1 0"/>
        <material name="paint" texture="paint"/>
        <mesh name="drawn" file="vase.obj" inertia="shell"/><mesh name="shared" file="vase.obj" inertia="shell"/>
        <mesh name="in_pair" file="vase.obj" inertia="shell"/><mesh name="plain" file="plain.obj" inertia="shell"/>
        <mesh name="panel" file="panel.obj" inertia="shell"/>
        <mesh name="hull" vertex="0 0 0 .1 0 0 0 .1 0 0 0 .1"/>
      </asset>
      <worldbody>
        <light pos="0 -1 2" dir="0 1 -2"/><light pos="0.3 -1 0.2" dir="-.3 1 0"/>
        <camera name="front" pos="0 -0.8 0.12" xyaxes="1 0 0 0 0.1 1"/>
        <geom type="plane" size="2 2 .1"/>
        <body name="a" pos="0 0 0.01"><freejoint/>
          <geom {drawn} name="drawn" mesh="drawn" mass="0.1"/><geom type="box" size=".05 .05 .01" mass="0.3"/></body>
        <body pos="-0.2 0 0.01"><freejoint/>
          <geom {drawn} mesh="shared" mass="0"/><geom type="mesh" mesh="shared" group="3"/></body>
        <body pos="0.2 0 0.01"><freejoint/>
          <geom {drawn} mesh="plain" mass="0"/><geom type="mesh" mesh="hull" mass="0.2" group="3"/></body>
        <body pos="0 0.5 0.01"><freejoint/><geom {drawn} name="in_pair" mesh="in_pair"/></body>
        <geom {drawn} mesh="panel" pos="-0.05 0.2 0.25"/>
      </worldbody>
      <contact>{pair}</contact>
    </mujoco>""",
        assets={"vase.obj": vase(), "plain.obj": vase(has_texture=False), "panel.obj": panel()},
    )


def arrays(model: mujoco.MjModel) -> dict[str, np.ndarray]:
    names = (name for name in dir(model) if not name.startswith("_"))
    return {name: value for name in names if isinstance(value := getattr(model, name), np.ndarray)}


def changed(one: mujoco.MjModel, other: mujoco.MjModel) -> set[str]:
    """Names of the arrays that differ in any bit."""
    others = arrays(other)
    return {name for name, value in arrays(one).items() if value.tobytes() != others[name].tobytes()}


def picture(
    model: mujoco.MjModel, camera: str = "front", size: int = 128, qpos: np.ndarray | None = None
) -> np.ndarray:
    data = mujoco.MjData(model)
    data.qpos[:] = model.qpos0 if qpos is None else qpos
    mujoco.mj_forward(model, data)
    renderer = Renderer(model, RenderOptions())
    image = np.zeros((size, size, 3), dtype=np.uint8)
    renderer.render(data, model.camera(camera).id, image)
    renderer.free()
    return image.astype(np.float64)


def psnr(image: np.ndarray, reference: np.ndarray) -> float:
    return float(10.0 * np.log10(255.0**2 / np.square(image - reference).mean()))


def corners(model: mujoco.MjModel, mesh: str, kind: str) -> np.ndarray:
    """Value of each corner of each face: (faces, 3, width)."""
    index = model.mesh(mesh).id
    start = model.mesh_faceadr[index]
    column = {"vert": "face", "normal": "facenormal", "texcoord": "facetexcoord"}[kind]
    rows = getattr(model, f"mesh_{column}")[start : start + model.mesh_facenum[index]]
    return getattr(model, f"mesh_{kind}")[getattr(model, f"mesh_{kind}adr")[index] + rows]


def height_and_angle(model: mujoco.MjModel, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of points on the mesh "drawn", in the frame in which it was written."""
    mesh = model.mesh("drawn").id
    rotation = np.zeros(9)
    mujoco.mju_quat2Mat(rotation, model.mesh_quat[mesh])
    x, y, z = np.moveaxis(points @ rotation.reshape(3, 3).T + model.mesh_pos[mesh], -1, 0)
    return z, np.arctan2(y, x)


@pytest.fixture(scope="module")
def full() -> mujoco.MjModel:
    return make_model()


@pytest.fixture(scope="module")
def lite(full: mujoco.MjModel) -> mujoco.MjModel:
    return simplify_visuals(full)


@pytest.mark.parametrize("mesh", ["drawn", "plain"])
def test_visual_meshes_lose_most_faces(full: mujoco.MjModel, lite: mujoco.MjModel, mesh: str) -> None:
    assert full.mesh(mesh).facenum[0] == NUM_FACES
    assert MIN_FACES <= lite.mesh(mesh).facenum[0] < NUM_FACES / 8


def test_the_budget_holds_whatever_the_tolerance(full: mujoco.MjModel) -> None:
    exact = simplify_visuals(full, tolerance_m=1e-6, max_faces=2000)
    coarse = simplify_visuals(full, tolerance_m=1.0)
    assert MIN_FACES <= coarse.mesh("drawn").facenum[0] < 200 < exact.mesh("drawn").facenum[0] <= 2000


def test_a_finer_tolerance_keeps_more_faces(full: mujoco.MjModel) -> None:
    counts = [simplify_visuals(full, tolerance_m=t).mesh("drawn").facenum[0] for t in (0.0002, 0.001, 0.005)]
    assert all(fine > coarse for fine, coarse in pairwise(counts))


def test_the_surface_stays_within_the_tolerance(lite: mujoco.MjModel) -> None:
    """Vertices are old ones; centres of faces, where a chord is farthest from the curve, are checked here."""
    middle = corners(lite, "drawn", "vert").mean(axis=1)
    height, _ = height_and_angle(lite, middle)
    centre = lite.mesh_pos[lite.mesh("drawn").id]
    rotation = np.zeros(9)
    mujoco.mju_quat2Mat(rotation, lite.mesh_quat[lite.mesh("drawn").id])
    radius = np.linalg.norm((middle @ rotation.reshape(3, 3).T + centre)[:, :2], axis=1)
    assert np.abs(radius - vase_radius(height)).max() < 3.0 * TOLERANCE_M


def test_texture_coordinates_stay_in_place_on_both_sides_of_the_seam(lite: mujoco.MjModel) -> None:
    texcoord = corners(lite, "drawn", "texcoord")
    height, angle = height_and_angle(lite, corners(lite, "drawn", "vert"))
    turn = texcoord[..., 0] - angle / (2.0 * np.pi)
    away = np.abs(turn - np.round(turn))
    assert np.quantile(away, 0.95) < 1e-4
    assert away.max() < 2.5 / NUM_COLUMNS, (
        "only where a vertex moved onto the seam, its other side ends a little earlier"
    )
    # MuJoCo may flip v; here it counts that it follows the height.
    v = texcoord[..., 1]
    np.testing.assert_allclose(
        np.minimum(np.abs(v - height / HEIGHT_M), np.abs(1 - v - height / HEIGHT_M)), 0, atol=1e-4
    )
    assert np.ptp(texcoord[..., 0], axis=1).max() < 0.5, "a face reaches across the seam: the texture is smeared on it"


def test_open_borders_keep_their_shape(full: mujoco.MjModel, lite: mujoco.MjModel) -> None:
    """Collapses along the border of a flat panel cost nothing by themselves; fins keep its corners."""
    assert lite.mesh("panel").facenum[0] < full.mesh("panel").facenum[0] / 4
    old, new = (corners(model, "panel", "vert") for model in (full, lite))
    area = [np.linalg.norm(np.cross(x[:, 1] - x[:, 0], x[:, 2] - x[:, 0]), axis=1).sum() / 2.0 for x in (old, new)]
    np.testing.assert_allclose(area, 0.01, rtol=0.01)


def test_the_seam_stays_closed(lite: mujoco.MjModel) -> None:
    """Each edge inside has two faces; at the two open ends it has one."""
    vertices = corners(lite, "drawn", "vert")
    height, _ = height_and_angle(lite, vertices)
    _, point = np.unique(vertices.reshape(-1, 3), axis=0, return_inverse=True)
    point = point.reshape(-1, 3)
    edges = np.sort(np.concatenate([point[:, [0, 1]], point[:, [1, 2]], point[:, [2, 0]]]), axis=1)
    heights = np.concatenate([height[:, [0, 1]], height[:, [1, 2]], height[:, [2, 0]]])
    _, first, num_faces = np.unique(edges, axis=0, return_index=True, return_counts=True)
    at_end = (np.abs(heights[first]) < 1e-6).all(axis=1) | (np.abs(heights[first] - HEIGHT_M) < 1e-6).all(axis=1)
    np.testing.assert_array_equal(num_faces, np.where(at_end, 1, 2))


def test_normals_point_outwards(lite: mujoco.MjModel) -> None:
    vertices, normals = corners(lite, "drawn", "vert"), corners(lite, "drawn", "normal")
    faces = np.cross(vertices[:, 1] - vertices[:, 0], vertices[:, 2] - vertices[:, 0])
    faces /= np.linalg.norm(faces, axis=1, keepdims=True)
    assert (normals * faces[:, None]).sum(axis=-1).min() > 0.7


def test_the_picture_stays_and_nothing_tears(full: mujoco.MjModel, lite: mujoco.MjModel) -> None:
    wanted, got = picture(full), picture(lite)
    assert psnr(got, wanted) > 28.0
    background = lambda image: (image[..., 1] > 100) & (image[..., 0] < 100)  # noqa: E731 the sky is green
    assert background(wanted).mean() > 0.1
    assert (background(wanted) != background(got)).mean() < 0.01


def test_meshes_that_can_be_touched_are_left_alone(full: mujoco.MjModel, lite: mujoco.MjModel) -> None:
    for mesh in ("shared", "hull"):
        for kind in ("vert", "normal"):
            np.testing.assert_array_equal(corners(lite, mesh, kind), corners(full, mesh, kind))


def test_a_mesh_in_a_contact_pair_is_left_alone(lite: mujoco.MjModel) -> None:
    assert lite.mesh("in_pair").facenum[0] < NUM_FACES
    paired = make_model(pair='<pair geom1="in_pair" geom2="drawn"/>')
    kept = simplify_visuals(paired)
    assert kept.mesh("in_pair").facenum[0] == kept.mesh("drawn").facenum[0] == NUM_FACES
    assert kept.mesh("plain").facenum[0] < NUM_FACES


def test_everything_else_is_equal(full: mujoco.MjModel, lite: mujoco.MjModel) -> None:
    assert len(arrays(full)) > 300
    assert changed(full, lite) == MESH_ARRAYS | TEXTURE_ARRAYS


def test_the_original_is_not_changed() -> None:
    original = make_model()
    before = copy.copy(original)
    simplify_visuals(original)
    assert not changed(before, original)


def test_same_trajectory_to_the_bit(full: mujoco.MjModel, lite: mujoco.MjModel) -> None:
    states = []
    for model in (full, lite):
        data = mujoco.MjData(model)
        data.qvel[:] = np.linspace(-1.0, 1.0, model.nv)
        mujoco.mj_step(model, data, 200)
        assert data.ncon > 0
        states.append(np.concatenate([data.qpos, data.qvel]))
    np.testing.assert_array_equal(*states)


def test_the_result_is_always_the_same(full: mujoco.MjModel, lite: mujoco.MjModel) -> None:
    assert not changed(lite, simplify_visuals(full))


def test_a_saved_model_is_loaded_again(lite: mujoco.MjModel, tmp_path: object) -> None:
    path = f"{tmp_path}/lite.mjb"
    mujoco.mj_saveModel(lite, path)
    assert not changed(lite, mujoco.MjModel.from_binary_path(path))


def test_textures_are_averaged_down(full: mujoco.MjModel) -> None:
    lite = simplify_visuals(full, max_texture=256)
    paint, sky = lite.tex("paint").id, lite.tex("sky").id
    assert (lite.tex_width[paint], lite.tex_height[paint]) == (256, 256)
    assert (lite.tex_width[sky], lite.tex_height[sky]) == (256, 6 * 256)
    for texture in (paint, sky):
        old, new = (
            m.tex_data[m.tex_adr[texture] :][: m.tex_width[texture] * m.tex_height[texture] * 3] for m in (full, lite)
        )
        np.testing.assert_allclose(new.reshape(-1, 3).mean(axis=0), old.reshape(-1, 3).mean(axis=0), atol=0.5)
        assert not lite.tex_data[lite.tex_adr[texture] + len(new) : lite.tex_adr[texture] + len(old)].any()


def test_a_missing_library_names_the_extra(full: mujoco.MjModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fast_simplification", None)
    with pytest.raises(ImportError, match=r"fast-simplification; run: pip install 'vla-rl\[libero\]'"):
        simplify_visuals(full)


@pytest.mark.parametrize("argument", [{"tolerance_m": 0.0}, {"max_faces": MIN_FACES - 1}, {"max_texture": 0}])
def test_impossible_arguments_are_refused(full: mujoco.MjModel, argument: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="given; expected a positive tolerance"):
        simplify_visuals(full, **argument)


@pytest.mark.libero
@pytest.mark.slow
def test_libero_pictures_stay() -> None:
    """Both cameras of one task at 128 pixels, at a published start."""
    from sim.libero.package import find_tasks, read_init_states
    from sim.libero.scene import LiberoScene

    task = find_tasks(["libero_spatial/0"])[0]
    full, lite = (LiberoScene(task, mesh_quality=quality).model.mj_model for quality in ("full", "lite"))
    assert changed(full, lite) == MESH_ARRAYS | TEXTURE_ARRAYS
    assert lite.mesh_facenum.sum() < full.mesh_facenum.sum() / 5
    qpos = read_init_states(task.init_states)[0][1 : 1 + full.nq]
    for camera in ("agentview", "robot0_eye_in_hand"):
        wanted, got = (picture(model, camera, qpos=qpos) for model in (full, lite))
        assert np.abs(got - wanted).mean() < 2.5
        assert psnr(got, wanted) > 29.0
