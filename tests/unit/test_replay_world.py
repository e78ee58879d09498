"""Saved states of simulators that can only be reset and stepped."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest

from sim.adapters.replay_world import Outcome, ReplayWorld, integration_state, mujoco_fault
from sim.adapters.starts import start_seed
from vla_rl.types import EnvSpec, SimError, Start, WorldState

SPEC = EnvSpec(
    cameras=("eye",),
    image_size=(2, 3),
    image_orientation="top_down",
    proprio_names=("sum",),
    action_names=("a", "b"),
    control_rate_hz=10.0,
)


class SumEnv:
    """Adds up all actions, beginning with its seed; solved above 100, over below -100, broken at exactly 50."""

    def __init__(self) -> None:
        self.total, self.num_resets = 0.0, 0
        self.drift = 0.0  # what no seed decides

    def reset(self, task: str, seed: int) -> None:
        self.total = float(seed)
        self.num_resets += 1

    def step(self, action: np.ndarray) -> Outcome:
        self.total += float(action.sum()) + self.drift
        fault = "the sum is unlucky" if self.total == 50.0 else None
        return Outcome(success=self.total > 100.0, is_over=abs(self.total) > 100.0, fault=fault)

    def image(self, camera: str, height: int, width: int) -> np.ndarray:
        return np.full((height, width, 3), int(self.total), dtype=np.uint8)

    def proprio(self) -> np.ndarray:
        return np.array([self.total], dtype=np.float32)

    def fingerprint(self) -> np.ndarray:
        return np.array([self.total])

    def mujoco_data(self) -> mujoco.MjData:
        raise ValueError("sums have no MuJoCo data")


def start(seed: int = 0, snapshot: WorldState | None = None) -> Start:
    init = np.zeros(0)
    return Start(task="sum/up", instruction="", split="train", index=7, init=init, seed=seed, snapshot=snapshot)


def chunk(*rows: tuple[float, float]) -> np.ndarray:
    return np.array(rows)


def test_a_saved_state_is_the_seed_and_the_way() -> None:
    world = ReplayWorld(SumEnv(), SPEC, horizon=9)
    world.reset(start(seed=3))
    world.step(chunk((0.5, 0.25), (-7.0, 1.0)))  # -7 is clipped to -1
    state = world.save_state()
    np.testing.assert_array_equal(state.physics, [3.75])
    np.testing.assert_array_equal(state.controller, [3.0, 0.5, 0.25, -1.0, 1.0])
    assert state.num_steps == 2


def test_a_state_is_reached_again_from_anywhere() -> None:
    env = SumEnv()
    world = ReplayWorld(env, SPEC, horizon=9)
    world.reset(start(seed=3))
    world.step(chunk((0.5, 0.25)))
    state = world.save_state()
    world.reset(start(seed=60))
    world.step(chunk((1.0, 1.0), (1.0, 1.0)))
    world.restore_state(state)
    assert (env.total, world.num_steps) == (3.75, 1)
    world.reset(start(seed=60, snapshot=state))
    assert (env.total, world.num_steps) == (3.75, 1)
    assert not world.step(chunk((0.0, 0.0)) * np.ones((7, 1))).is_done
    assert world.step(chunk((0.0, 0.0), (0.0, 0.0))).num_steps == 1  # 9 in all, with the one before the snapshot


def test_a_replay_that_ends_elsewhere_is_an_error() -> None:
    env = SumEnv()
    world = ReplayWorld(env, SPEC, horizon=9)
    world.reset(start())
    world.step(chunk((0.5, 0.25), (0.5, 0.25)))
    state = world.save_state()
    env.drift = 1e-9
    with pytest.raises(SimError, match=r"replaying 2 control steps of sum/up/train/7 led to another state.*branched"):
        world.restore_state(state)
    with pytest.raises(ValueError, match="over after 2 steps"):
        world.step(chunk((0.0, 0.0)))


def test_a_state_of_another_kind_of_world_is_refused() -> None:
    world = ReplayWorld(SumEnv(), SPEC, horizon=9)
    world.reset(start())
    state = WorldState(physics=np.zeros(1), controller=np.zeros(12), num_steps=2)
    with pytest.raises(ValueError, match=r"12 controller entries, but 2 control steps of sum/up have 5; restore it"):
        world.restore_state(state)


def test_the_environment_may_end_the_episode() -> None:
    world = ReplayWorld(SumEnv(), SPEC, horizon=9)
    world.reset(start(seed=99))
    won = world.step(chunk((0.5, 0.0), (1.0, 0.0), (1.0, 0.0)), record_frames=True)
    assert (won.num_steps, won.success, won.truncated) == (2, True, False)
    assert [int(frame[0, 0, 0]) for frame in won.frames] == [99, 100]
    world.reset(start(seed=-99))
    lost = world.step(chunk((-1.0, -1.0), (1.0, 0.0)))
    assert (lost.num_steps, lost.success, lost.truncated) == (1, False, True)
    with pytest.raises(ValueError, match="sum/up/train/7 is over after 1 steps"):
        world.step(chunk((0.0, 0.0)))


def test_a_fault_names_start_and_step_and_the_world_recovers() -> None:
    world = ReplayWorld(SumEnv(), SPEC, horizon=9)
    world.reset(start(seed=49))
    with pytest.raises(SimError, match=r"the sum is unlucky in sum/up/train/7 at control step 2"):
        world.step(chunk((0.5, 0.0), (0.5, 0.0), (0.5, 0.0)))
    with pytest.raises(ValueError, match="over"):
        world.step(chunk((0.0, 0.0)))
    world.reset(start(seed=0))
    assert world.step(chunk((0.0, 0.0))).num_steps == 1


def test_data_is_the_simulators() -> None:
    world = ReplayWorld(SumEnv(), SPEC, horizon=9)
    with pytest.raises(ValueError, match="call reset"):
        _ = world.data
    world.reset(start())
    with pytest.raises(ValueError, match="sums have no MuJoCo data"):
        _ = world.data


def test_faults_of_mujoco() -> None:
    model = mujoco.MjModel.from_xml_string(
        '<mujoco><worldbody><body><freejoint/><geom size="0.1"/></body></worldbody></mujoco>'
    )
    data = mujoco.MjData(model)
    mujoco.mj_step(model, data)
    assert mujoco_fault(data) is None
    assert integration_state(data)[0] == data.time == 0.002
    data.qvel[0] = np.nan
    assert mujoco_fault(data) == "the physics became invalid (positions or velocities are not finite)"
    mujoco.mj_step(model, data)  # resets itself, and says so
    assert np.isfinite(data.qvel).all()
    assert mujoco_fault(data) == "the physics became invalid (MuJoCo warnings: BADQVEL)"
    mujoco.mj_resetData(model, data)
    data.warning.number[mujoco.mjtWarning.mjWARN_VGEOMFULL] = 3
    assert mujoco_fault(data) is None


def test_seeds_are_names() -> None:
    tasks = ("sum/up", "sum/down")
    seeds = [start_seed(task, tasks, split, i) for task in tasks for split in ("train", "test") for i in range(3)]
    assert len(set(seeds)) == 12
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds[0] == start_seed("sum/up", tasks, "train", 0)
    with pytest.raises(ValueError, match="unknown task 'sum/left'; this suite has: sum/up, sum/down"):
        start_seed("sum/left", tasks, "train", 0)
    with pytest.raises(ValueError, match="no start 'train'/-1; splits: train, validation, test"):
        start_seed("sum/up", tasks, "train", -1)
