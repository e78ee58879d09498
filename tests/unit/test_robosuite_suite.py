"""robosuite environments as worlds: which way each goes, what its starts are, whose verdict counts."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from sim.adapters import RobosuiteConfig, RobosuiteSuite
from sim.adapters.robosuite_envs import SeededEnv, import_robosuite, seeded
from sim.adapters.robosuite_stepped import RobosuiteStepped
from sim.mujoco_world import MujocoWorld, rotation_vector
from sim.world import World
from vla_rl.config import load_config
from vla_rl.types import Start

STILL = np.zeros((1, 7))


@cache
def suite_of(*tasks: str, **choices: Any) -> RobosuiteSuite:
    return RobosuiteSuite(RobosuiteConfig(tasks=tasks, image_size=32, **choices))


@cache
def define_hooked_lift() -> str:
    """An environment of somebody's own, which does something at every control step."""
    import_robosuite()
    from robosuite.environments.manipulation.lift import Lift

    class HookedLift(Lift):
        def _post_action(self, action: np.ndarray) -> Any:
            return super()._post_action(action)

    return HookedLift.__name__


def begun(suite: RobosuiteSuite, task: str, index: int = 0) -> World:
    world = suite.make_world()
    world.reset(suite.start(f"robosuite/{task}", "train", index))
    return world


def env_of(world: World) -> Any:
    """The robosuite environment inside a world that uses robosuite's own step."""
    stepped = world._env  # type: ignore[attr-defined]
    assert isinstance(stepped, RobosuiteStepped)
    return stepped._env


# Which way


def test_one_panda_under_osc_pose_runs_in_the_kernel() -> None:
    suite = suite_of("Lift", "Stack", "Door")
    assert suite.tasks == ("robosuite/Lift", "robosuite/Stack", "robosuite/Door")
    assert [suite.obstacle(task) for task in suite.tasks] == [None] * 3
    assert isinstance(suite.make_world(), MujocoWorld)
    assert suite.spec.image_orientation == "bottom_up"
    assert suite.spec.proprio_names[0] == "eef_pos_x"
    assert suite.spec.proprio_names[6:] == ("finger_1", "finger_2")
    assert suite.spec.action_names == ("dx", "dy", "dz", "drx", "dry", "drz", "gripper")


@pytest.mark.parametrize(
    ("tasks", "choices", "reason", "num_actions"),
    [
        (("Lift",), {"kernel": False}, "the config switches the kernel off", 7),
        (("Lift",), {"hard_reset": True}, "hard_reset compiles a model for each start", 7),
        (("Lift",), {"controller": "OSC_POSITION"}, "Panda under OSC_POSITION is not one Panda under OSC_POSE", 4),
        (("Lift",), {"controller": "JOINT_VELOCITY"}, "Panda under JOINT_VELOCITY is not one Panda under OSC_POSE", 8),
        (("Lift",), {"robots": ("UR5e",)}, "UR5e under OSC_POSE is not one Panda under OSC_POSE", 7),
        (("TwoArmPegInHole",), {"robots": ("Panda", "Panda")}, "Panda and Panda under OSC_POSE is not one Panda", 12),
        (("Lift",), {"env_options": {"initialization_noise": "default"}}, "a nullspace posture of its own", 7),
        (("Lift",), {"env_options": {"gripper_types": "RethinkGripper"}}, "the hand is a RethinkGripper", 7),
        (("Wipe",), {}, "Wipe has a _post_action of its own", 6),
        (("HookedLift",), {"instructions": {"HookedLift": "lift"}}, "HookedLift has a _post_action of its own", 7),
    ],
)
def test_all_else_goes_through_robosuites_own_step(
    tasks: tuple[str, ...], choices: dict[str, Any], reason: str, num_actions: int
) -> None:
    define_hooked_lift()
    suite = RobosuiteSuite(RobosuiteConfig(tasks=tasks, image_size=32, **choices))
    assert reason in str(suite.obstacle(suite.tasks[0]))
    assert suite.spec.action_dim == num_actions
    is_panda = suite.config.robots == ("Panda",) and num_actions == 7
    assert (suite.spec.action_meaning is not None) is is_panda  # no contract says "Panda" of another arm
    world = begun(suite, tasks[0])
    assert world.step(np.zeros((2, num_actions))).num_steps == 2
    assert world._env.proprio().shape == (suite.spec.proprio_dim,)  # type: ignore[attr-defined]


def test_two_arms_have_names_of_their_own() -> None:
    spec = RobosuiteSuite(RobosuiteConfig(tasks=("TwoArmHandover",), robots=("Panda", "Panda"))).spec
    assert spec.action_names[6:8] == ("robot0_gripper", "robot1_dx")
    assert spec.proprio_names[7:9] == ("robot0_finger_2", "robot1_eef_pos_x")


def test_tasks_of_a_suite_have_one_interface_and_go_one_way() -> None:
    hooked = define_hooked_lift()
    suite = RobosuiteSuite(RobosuiteConfig(tasks=("Lift", "Wipe")))
    with pytest.raises(ValueError, match=r"robosuite/Wipe has .*_names .*suites of their own"):
        suite.start("robosuite/Wipe", "train", 0)
    mixed = RobosuiteConfig(tasks=("Lift", hooked), instructions={hooked: "lift"})
    with pytest.raises(ValueError, match=r"HookedLift needs robosuite's own step \(HookedLift has .*kernel=false"):
        RobosuiteSuite(mixed).start(f"robosuite/{hooked}", "train", 0)
    both = RobosuiteSuite(mixed.model_copy(update={"kernel": False}))
    assert begun(both, hooked).step(STILL).num_steps == 1


# Mistakes


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tasks": ("Lfit",)}, r"unknown robosuite env.* 'Lfit'\. Did you mean 'Lift'\? There is: .*Door, .*Wipe"),
        ({"robots": ("Pandda",)}, r"unknown robosuite robot 'Pandda'\. Did you mean 'Panda'\? There is: Baxter, IIWA"),
        ({"robots": ("Panda", "Panda")}, r"robosuite cannot make Lift with \['Panda', 'Panda'\].*Only one robot"),
        ({"cameras": ("agentveiw",)}, "robosuite/Lift has no camera agentveiw; cameras: frontview, .*agentview"),
        ({"env_options": {"colour": "red"}}, "robosuite cannot make Lift .*unexpected keyword argument 'colour'"),
        ({"env_options": {"robots": "Panda"}}, "'robots' is set by the suite; use the field 'robots'"),
        ({"env_options": {"use_camera_obs": True}}, "'use_camera_obs' is set by the suite "),
        ({"robots": ("Sawyer",)}, "cannot make Lift with Sawyer and these options: .*mesh volume is too small"),
        ({"control_rate_hz": 30.0}, "not a multiple of the physics timestep"),
        ({"control_rate_hz": 30.0, "kernel": False}, "not a multiple of the physics timestep"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RobosuiteSuite(RobosuiteConfig(**choices))


def test_environments_of_others_need_a_sentence() -> None:
    hooked = define_hooked_lift()
    with pytest.raises(ValueError, match=r"HookedLift has no built-in instruction; .*'instructions\.HookedLift'"):
        RobosuiteSuite(RobosuiteConfig(tasks=(hooked,)))
    with pytest.raises(ImportError, match="no_such_module"):
        RobosuiteSuite(RobosuiteConfig(modules=("no_such_module",)))


def test_options_can_be_written_as_overrides() -> None:
    config = load_config(RobosuiteConfig, [], ["tasks=[Door]", "instructions.Door=pull", "env_options.use_latch=false"])
    suite = RobosuiteSuite(config)
    start = suite.start("robosuite/Door", "train", 0)
    assert start.instruction == "pull"
    assert start.init.shape == (10 + 7,)  # arm, fingers, hinge but no latch; the pose of the door


# Starts


def test_starts_have_names_and_leave_the_global_generators_alone() -> None:
    suite = suite_of("Lift", "Stack", "Door")
    np.random.seed(5)
    expected = np.random.get_state()[1].copy()
    starts = {
        (task, split, index): suite.start(task, split, index).init
        for task in suite.tasks
        for split in ("train", "test")
        for index in range(2)
    }
    np.testing.assert_array_equal(np.random.get_state()[1], expected)
    for task in suite.tasks:
        assert len({init.tobytes() for (name, _, _), init in starts.items() if name == task}) == 4
    again = RobosuiteSuite(RobosuiteConfig(tasks=("Door", "Lift")))
    for task in again.tasks:
        np.testing.assert_array_equal(again.start(task, "test", 1).init, starts[task, "test", 1])


def test_seeded_generators_are_put_back() -> None:
    draws = []
    for _ in range(2):
        random.seed(1)
        np.random.seed(1)
        with seeded(3):
            draws.append((random.random(), np.random.random()))
        assert random.random() == random.Random(1).random()
        assert np.random.random() == np.random.RandomState(1).random_sample()
    assert draws[0] == draws[1] == (random.Random(3).random(), np.random.RandomState(3).random_sample())


def test_a_start_places_the_door() -> None:
    suite = suite_of("Lift", "Stack", "Door")
    frames = []
    for index in range(2):
        world = begun(suite, "Door", index)
        np.testing.assert_array_equal(world.data.qpos, world.start.init[:11])
        door = world.data.model.body("Door_main").id
        frames.append(world.data.xpos[door].copy())
        np.testing.assert_allclose(frames[-1], world.start.init[11:14], atol=1e-12)
    assert np.abs(frames[0] - frames[1]).max() > 1e-3


def test_the_one_object_of_a_task_is_drawn_with_the_start() -> None:
    """robosuite draws it from a set of strings, in whose order every process differs."""
    suite = suite_of("NutAssemblySingle")
    nuts = []
    for index in range(8):
        heights = suite.start("robosuite/NutAssemblySingle", "train", index).init[9:].reshape(2, 7)[:, 2]
        assert sorted(heights > 5.0) == [False, True]  # the other one is out of the way
        nuts.append(int(heights.argmin()))
    assert set(nuts) == {0, 1}
    seeds = [suite.start("robosuite/NutAssemblySingle", "train", index).seed for index in range(8)]
    expected = []
    for seed in seeds:
        np.random.seed(seed)
        expected.append(np.random.randint(2))
    assert nuts == expected


def test_unknown_starts_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown task 'robosuite/Wipe'; this suite has: robosuite/Lift"):
        suite_of("Lift", "Stack", "Door").start("robosuite/Wipe", "train", 0)
    world = begun(suite_of("Lift", "Stack", "Door"), "Lift")
    with pytest.raises(ValueError, match=r"init has shape \(3,\), this task needs \(16,\)"):
        world.reset(replace(world.start, init=np.zeros(3)))


def test_there_is_no_expert() -> None:
    with pytest.raises(ValueError, match="no scripted expert"):
        suite_of("Lift", "Stack", "Door").make_expert("robosuite/Lift", np.random.default_rng(0))


# Success


def lifted(start: Start) -> Start:
    """The start with the cube in the air."""
    init = start.init.copy()
    init[9 + 2] += 0.2  # arm and fingers, then the cube's position
    return replace(start, init=init)


def test_success_is_robosuites_verdict_on_this_world() -> None:
    suite = suite_of("Lift", "Stack", "Door")
    low, high = suite.make_world(), suite.make_world()
    start = suite.start("robosuite/Lift", "train", 0)
    low.reset(start)
    high.reset(lifted(start))
    assert not low.step(STILL).is_done
    assert high.step(STILL).success
    assert not low.step(STILL).is_done
    np.testing.assert_array_equal(suite.start("robosuite/Lift", "train", 0).init, start.init)


def test_threads_get_the_verdicts_of_their_own_worlds() -> None:
    suite = suite_of("Lift", "Stack", "Door")
    start = suite.start("robosuite/Lift", "train", 0)
    verdicts: dict[bool, list[bool]] = {False: [], True: []}

    def run(is_lifted: bool) -> None:
        world = suite.make_world()
        for _ in range(20):
            world.reset(lifted(start) if is_lifted else start)
            verdicts[is_lifted].append(world.step(STILL).success)
            suite.start("robosuite/Lift", "test", 1)  # uses the same environment

    threads = [threading.Thread(target=run, args=(is_lifted,)) for is_lifted in verdicts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {False: [False] * 20, True: [True] * 20}


# robosuite's own step


def test_observations_are_robosuites_own() -> None:
    """From the instant at which its sensors read."""
    world = begun(suite_of("Door", kernel=False), "Door")
    for action in np.random.default_rng(0).uniform(-1.0, 1.0, (5, 1, 7)):
        world.step(action)
        theirs, ours = env_of(world)._get_observations(), world.observe().proprio
        np.testing.assert_array_equal(ours[:3], theirs["robot0_eef_pos"].astype(np.float32))
        quaternion = np.roll(theirs["robot0_eef_quat"], 1)  # from (x, y, z, w)
        np.testing.assert_allclose(ours[3:6], rotation_vector(quaternion), atol=1e-6)
        np.testing.assert_array_equal(ours[6:], theirs["robot0_gripper_qpos"].astype(np.float32))


def test_a_world_is_drawn_with_its_own_colours() -> None:
    suite = suite_of("Door", kernel=False)
    painted, plain = begun(suite, "Door"), begun(suite, "Door")
    np.testing.assert_array_equal(painted.observe().images, plain.observe().images)
    painted.data.model.geom_rgba[:] = painted.data.model.geom_rgba[:, ::-1]
    painted.data.model.geom_matid[:] = -1
    assert not np.array_equal(painted.observe().images, plain.observe().images)
    painted.reset(painted.start)
    np.testing.assert_array_equal(painted.observe().images, plain.observe().images)


def test_hard_resets_draw_sizes_again() -> None:
    suite = suite_of("Lift", hard_reset=True)
    world = suite.make_world()
    sizes = []
    for index in (0, 1, 0):
        world.reset(suite.start("robosuite/Lift", "train", index))
        sizes.append(world.data.model.geom("cube_g0").size.copy())
    assert world.observe().images.std() > 0
    np.testing.assert_array_equal(sizes[0], sizes[2])
    assert not np.array_equal(sizes[0], sizes[1])
    assert all((size >= 0.020).all() and (size <= 0.022).all() for size in sizes)


def test_soft_resets_forget_the_episode_before() -> None:
    options = {"robots": "Panda", "has_offscreen_renderer": False, "use_camera_obs": False, "hard_reset": False}
    lift = SeededEnv("Lift", options, seed=1)
    lift.reset(7)
    state = lift.env.sim.get_state().flatten()
    lift.mj_model.body_mass[:] *= 2.0
    for _ in range(3):
        lift.env.step(np.ones(lift.env.action_dim))
    assert np.abs(lift.env.robots[0].gripper.current_action).max() > 0.0
    mass = lift.mj_model.body_mass.sum()
    lift.reset(7)
    np.testing.assert_array_equal(lift.env.sim.get_state().flatten(), state)
    np.testing.assert_array_equal(lift.env.robots[0].gripper.current_action, [0.0])
    assert lift.mj_model.body_mass.sum() == pytest.approx(0.5 * mass)


def test_a_full_name_means_the_same_task() -> None:
    assert RobosuiteConfig(tasks=("robosuite/Lift", "Stack")).tasks == ("Lift", "Stack")
