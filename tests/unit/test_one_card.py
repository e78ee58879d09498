"""One asymmetric picture through the simulated and the real cameras: the policy must get the same, the right way up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import POLICY_SPEC, fake_start, tiny_policy
from PIL import Image

from robots.cameras import FileCameraConfig, OpenCVCameraConfig, make_camera
from robots.contract import DeploymentContract
from robots.observing import Observer
from robots.robot import Camera, RobotState
from robots.sim_robot import SimRobot, sim_cameras
from sim.mujoco_world import ACTION_MEANING
from vla_rl.serving.inference import PolicyInference
from vla_rl.serving.wire import decode, encode
from vla_rl.types import Observation

SPEC = replace(POLICY_SPEC, action_meaning=ACTION_MEANING)
HEIGHT, WIDTH = SPEC.image_size


def draw_card() -> np.ndarray:
    """Top row first; four corners of four colours, no two of which a flip, a turn or a swap of channels makes alike."""
    card = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    card[..., 0] = np.linspace(0, 120, WIDTH).astype(np.uint8)
    card[:9, :9], card[:9, -9:], card[-9:, :9], card[-9:, -9:] = (
        (250, 10, 20),
        (30, 240, 40),
        (50, 60, 230),
        (220, 210, 5),
    )
    return card


class CardWorld:
    """A world whose camera sees the card; its pictures are as its suite says."""

    def __init__(self, orientation: str) -> None:
        card = draw_card()
        self.image = card[::-1] if orientation == "bottom_up" else card

    def reset(self, start: object) -> None:
        pass

    def step(self, chunk: np.ndarray, record_frames: bool = False) -> object:
        raise AssertionError("nothing moves")

    def observe(self) -> Observation:
        return Observation(images=self.image[None].copy(), proprio=np.zeros(8, np.float32), instruction="look")

    def proprio(self) -> np.ndarray:
        return np.zeros(8, np.float32)


def contract_of(orientation: str) -> DeploymentContract:
    contract = tiny_policy(replace(SPEC, image_orientation=orientation)).contract()
    assert contract is not None
    return contract


def received(contract: DeploymentContract, camera: Camera, is_simulated: bool) -> np.ndarray:
    """The picture that a policy behind a server gets, over the wire's format."""
    observer = Observer(contract, [camera], is_simulated=is_simulated)
    named = dict.fromkeys(contract.state_names, 0.0)
    state = RobotState(time_s=0.0, received_s=0.0, position_m=np.zeros(3), rotation=np.eye(3), named=named)
    sent = observer.observation(state, observer.frames(), "look")
    arrived = decode(encode(sent))
    del arrived["t_obs"]  # the server takes it off
    policy, seen = tiny_policy(SPEC), list[Observation]()
    act = policy.act
    policy.act = lambda observations, *rest: seen.extend(observations) or act(observations, *rest)
    PolicyInference(policy, contract).infer(arrived)
    (observation,) = seen
    return observation.images[0]


@contextmanager
def camera_of(kind: str, contract: DeploymentContract, orientation: str, folder: Path) -> Iterator[Camera]:
    match kind:
        case "sim":
            robot = SimRobot(CardWorld(orientation), contract, is_lockstep=True)
            robot.begin(fake_start(0))
            (camera,) = sim_cameras(robot, contract)
        case "file":
            Image.fromarray(draw_card()).save(folder / "card.png")
            camera = make_camera(FileCameraConfig(name="agentview", path=folder / "card.png"))
        case _:
            pytest.importorskip("cv2")
            for index in range(3):  # OpenCV plays numbered pictures as a device's frames, without loss
                Image.fromarray(draw_card()).save(folder / f"card_{index}.png")
            camera = make_camera(OpenCVCameraConfig(name="agentview", device=str(folder / "card_%d.png")))
    yield camera
    camera.close()


@pytest.mark.parametrize("orientation", ["bottom_up", "top_down"])
@pytest.mark.parametrize("kind", ["sim", "file", "opencv"])
def test_every_camera_shows_the_policy_the_same_card(kind: str, orientation: str, tmp_path: Path) -> None:
    contract = contract_of(orientation)
    with camera_of(kind, contract, orientation, tmp_path) as camera:
        image = received(contract, camera, is_simulated=kind == "sim")
    expected = draw_card()[::-1] if orientation == "bottom_up" else draw_card()
    np.testing.assert_array_equal(image, expected)


def test_the_card_shows_every_way_to_get_it_wrong() -> None:
    card = draw_card()
    views = [card, card[::-1], card[:, ::-1], card[::-1, ::-1]]
    pictures = [view[..., channels] for view in views for channels in ((0, 1, 2), (2, 1, 0), (1, 0, 2))]
    assert len({picture.tobytes() for picture in pictures}) == len(pictures)
