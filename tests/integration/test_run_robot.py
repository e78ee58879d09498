"""The training world as a robot, over the real websocket, through the whole chain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from robots.recorder import finished_episodes, load_episode
from scripts.cli import app, main
from sim.suites import make_suite
from sim.tabletop.suite import TabletopConfig
from vla_rl.policies.loading import load_policy
from vla_rl.policies.tiny_vla import TinyVLA, TinyVLAConfig
from vla_rl.policies.token_policy import TokenPolicy
from vla_rl.policies.word_tokenizer import WordTokenizer
from vla_rl.policy import Sampling
from vla_rl.rollout.engine import RolloutConfig, make_collector, make_vec_env, requests_of
from vla_rl.rollout.sources import evaluation_starts
from vla_rl.serving.client import PolicyClient, PolicyError
from vla_rl.types import Episode

HORIZON = 20
NUM_PER_TASK = 13


def run(*words: str | Path) -> Result:
    """A command that must succeed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that moves a lot and sees what it does; what it is good for does not matter here."""
    import torch
    from fakes import norm_stats

    torch.manual_seed(0)
    suite = make_suite(TabletopConfig(image_size=32))
    instructions = [suite.start(task, "train", 0).instruction for task in suite.tasks]
    config = TinyVLAConfig(hidden_dim=32, num_keypoints=4)
    policy = TinyVLA(config, suite.spec, norm_stats(suite.spec), WordTokenizer.from_instructions(instructions))
    policy.save(tmp_path_factory.mktemp("policy"))
    folder = tmp_path_factory.mktemp("checkpoint")
    policy.save(folder)
    return folder


def in_process(policy: TokenPolicy) -> list[Episode]:
    """What `vla-rl evaluate` runs: greedy, on all test starts."""
    suite = make_suite(TabletopConfig(image_size=32, horizon=HORIZON))
    policy.eval()
    env = make_vec_env(suite, config := RolloutConfig(num_slots=4, num_threads=2))
    episodes: dict[int, Episode] = {}
    waiting = iter(requests_of(evaluation_starts(suite, "test", NUM_PER_TASK)))

    def finished(episode: Episode | None, _: object) -> None:
        assert episode is not None
        episodes[episode.episode_index] = episode

    try:
        make_collector(env, policy, config, 0).run(lambda: next(waiting, None), finished, Sampling(mode="greedy"))
    finally:
        env.close()
    return [episodes[index] for index in sorted(episodes)]


def executed(policy: TokenPolicy, episode: Episode) -> np.ndarray:
    chunks = [policy.decode(d.sample[None])[0][: d.num_steps] for d in episode.decisions]
    return np.concatenate(chunks)


def sim(*words: str) -> Sequence[str]:
    return ["--robot", "sim", "robot.suite.image_size=32", f"robot.suite.horizon={HORIZON}", *words]


@pytest.mark.slow
def test_in_lockstep_every_episode_is_the_one_that_evaluation_runs(checkpoint: Path, tmp_path: Path) -> None:
    output = run("run-robot", checkpoint, *sim(f"robot.starts_per_task={NUM_PER_TASK}"), "--out", tmp_path).output
    policy = load_policy(checkpoint)
    expected, recorded = in_process(policy), [load_episode(path) for path in finished_episodes(tmp_path)]
    assert len(expected) == len(recorded) == 4 * NUM_PER_TASK >= 50
    for episode, recording in zip(expected, recorded, strict=True):
        assert recording.info["instruction"] == episode.start.instruction
        assert (recording.info["outcome"] == "success") is episode.success
        actions = executed(policy, episode)
        assert len(recording.asked) == len(actions)
        # Pictures feed back into actions, so equal actions to the end mean equal worlds. A batch rounds differently
        # from single rows, which may move a token by one bin now and then.
        is_same = np.abs(recording.asked - actions).max(axis=1) < 1e-9
        assert is_same.mean() > 0.95
        assert {event.kind for event in recording.events} <= {"clipped_workspace"}
    assert "of 52 episodes solved" in output.replace("\n", " ")


@pytest.mark.slow
def test_in_real_time_late_answers_cost_time_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    words = sim("robot.pace=real_time", "robot.starts_per_task=1", "robot.added_latency_s=0.2")
    run("run-robot", checkpoint, *words, "--episodes", "2", "--out", tmp_path)
    for path in finished_episodes(tmp_path):
        recording = load_episode(path)
        is_asked = np.isfinite(recording.asked[:, 0])
        assert not is_asked[:3].any()  # 0.2 s are four control periods
        assert is_asked.sum() >= 5
        assert recording.info["outcome"] in ("failure", "fault")


@pytest.mark.slow
def test_a_server_elsewhere_and_a_robot_that_does_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    from scripts.serve import make_server

    with make_server(checkpoint, port=0) as server:
        words = ["run-robot", "--server", server.url, *sim("robot.starts_per_task=1"), "--out", tmp_path / "a"]
        run(*words, "--episodes", "1")
        wrong = CliRunner().invoke(app, [*map(str, words), "robot.suite.cameras=[frontview]"])
        assert wrong.exit_code != 0
    nobody = CliRunner().invoke(
        app, ["run-robot", "--server", "ws://127.0.0.1:9", *sim(), "--out", str(tmp_path / "b")]
    )
    assert "cannot reach a policy server" in str(nobody.exception)
    nothing = CliRunner().invoke(app, ["run-robot", *sim()])
    assert "give a checkpoint" in str(nothing.exception)
    no_box = CliRunner().invoke(app, ["run-robot", str(checkpoint)])
    assert "workspace_low_m" in str(no_box.exception)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [(PolicyError("nobody is there"), "error: nobody is there"), ({"x": 1}, "sends no contract, only ['x']")],
)
def test_a_server_that_is_of_no_use_is_one_clear_message(
    metadata: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(client: PolicyClient) -> Any:
        if isinstance(metadata, Exception):
            raise metadata
        return metadata

    monkeypatch.setattr(PolicyClient, "connect", connect)
    monkeypatch.setattr("sys.argv", ["vla-rl", "run-robot", "--server", "ws://127.0.0.1:9", *sim(), "--out", "unused"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 1
    assert message in " ".join(capsys.readouterr().out.split())
