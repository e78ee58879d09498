"""Checkpoints appear whole or not at all, are checked before use, and continue bit for bit."""

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from tabular import TabularPolicy, decision, episode

from vla_rl.train import checkpoint as checkpoint_module
from vla_rl.train.checkpoint import (
    latest_checkpoint,
    load_carried_groups,
    load_trainer_state,
    save_checkpoint,
    verify_checkpoint,
)
from vla_rl.train.optim import OptimConfig, Optimizer


@pytest.fixture
def policy() -> TabularPolicy:
    return TabularPolicy(torch.zeros(1, 1, 2))


class FailingPolicy:
    """Writes half of its files, then fails."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "half.bin").write_bytes(b"half")
        raise self._error


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_state_comes_back_as_it_was(tmp_path: Path, policy: TabularPolicy) -> None:
    generator = np.random.default_rng(5)
    state = {
        "num_updates": 3,
        "random": generator.bit_generator.state,  # 128-bit integers
        "losses": [0.1, 1e-300],
        "torch_random": torch.get_rng_state(),
        "pairs": (1, 2),
        "by_index": {0: "a"},
        "none": None,
    }
    folder = save_checkpoint(tmp_path, 12, policy, state)
    assert folder == tmp_path / "checkpoints" / "iteration_000012"
    loaded = load_trainer_state(folder)
    assert torch.equal(loaded.pop("torch_random"), state.pop("torch_random"))
    assert loaded == state
    again = np.random.default_rng()
    again.bit_generator.state = loaded["random"]
    assert again.random() == generator.random()
    np.testing.assert_array_equal(np.load(folder / "policy" / "logits.npy"), policy.logits.detach().numpy())
    # Counters and random states can be read without torch.
    assert '"num_updates": 3' in (folder / "trainer" / "state.json").read_text()


def test_carried_groups_come_back(tmp_path: Path, policy: TabularPolicy) -> None:
    folder = save_checkpoint(tmp_path, 1, policy, {}, groups=[[episode([decision([1], [-0.5], 1)])]])
    ((found,),) = load_carried_groups(folder)
    assert found.decisions[0].sample.tolist() == [1]


def test_optimizer_continues_bit_for_bit(tmp_path: Path) -> None:
    def train(policy: TabularPolicy, optimizer: Optimizer, iterations: range) -> None:
        for iteration in iterations:
            (policy.logits * torch.tensor([0.3, -iteration])).sum().backward()
            optimizer.step()

    config = OptimConfig(lr=0.1, warmup_updates=3)
    whole = TabularPolicy(torch.ones(1, 1, 2))
    whole_optimizer = Optimizer(whole.named_parameters(), config)
    train(whole, whole_optimizer, range(3))
    folder = save_checkpoint(tmp_path, 3, whole, {"optimizer": whole_optimizer.state_dict()})
    resumed = TabularPolicy(torch.from_numpy(np.load(folder / "policy" / "logits.npy")))
    resumed_optimizer = Optimizer(resumed.named_parameters(), config)
    resumed_optimizer.load_state_dict(load_trainer_state(folder)["optimizer"])
    train(whole, whole_optimizer, range(3, 6))
    train(resumed, resumed_optimizer, range(3, 6))
    assert torch.equal(whole.logits, resumed.logits)
    assert resumed_optimizer.num_steps == 6


def test_latest_is_the_newest_complete_one(tmp_path: Path, policy: TabularPolicy) -> None:
    assert latest_checkpoint(tmp_path) is None
    for iteration in (2, 10, 1_000_000):
        save_checkpoint(tmp_path, iteration, policy, {})
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "iteration_1000000"
    (tmp_path / "checkpoints" / "iteration_1000000" / "manifest.json").unlink()
    (tmp_path / "checkpoints" / ".iteration_2000000.tmp" / "policy").mkdir(parents=True)
    (tmp_path / "checkpoints" / "iteration_best").mkdir()
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "iteration_000010"


def test_only_the_last_are_kept(tmp_path: Path, policy: TabularPolicy) -> None:
    for iteration in range(5):
        save_checkpoint(tmp_path, iteration, policy, {}, keep_last=2)
    assert names(tmp_path) == ["iteration_000003", "iteration_000004"]
    with pytest.raises(ValueError, match="keep_last is 0"):
        save_checkpoint(tmp_path, 5, policy, {}, keep_last=0)


def test_the_same_iteration_is_replaced(tmp_path: Path, policy: TabularPolicy) -> None:
    save_checkpoint(tmp_path, 1, policy, {"value": 1})
    folder = save_checkpoint(tmp_path, 1, policy, {"value": 2})
    assert load_trainer_state(folder) == {"value": 2}
    assert names(tmp_path) == ["iteration_000001"]


def test_leftovers_of_a_killed_run_do_no_harm(tmp_path: Path, policy: TabularPolicy) -> None:
    left = tmp_path / "checkpoints" / ".iteration_000001.tmp" / "policy"
    left.mkdir(parents=True)
    (left / "stale.bin").write_bytes(b"stale")
    folder = save_checkpoint(tmp_path, 1, policy, {})
    verify_checkpoint(folder)
    assert not (folder / "policy" / "stale.bin").exists()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("file write failed: No space left")]
)
def test_full_disk_leaves_the_previous_checkpoint_and_nothing_else(
    tmp_path: Path, policy: TabularPolicy, error: Exception
) -> None:
    save_checkpoint(tmp_path, 1, policy, {"value": 1})
    for iteration in (1, 2):
        with pytest.raises(OSError, match=r"cannot write checkpoint '.*': .*No space left.* GB are free") as caught:
            save_checkpoint(tmp_path, iteration, FailingPolicy(error), {})
        assert caught.value.errno == (error.errno if isinstance(error, OSError) else 0)
    assert names(tmp_path) == ["iteration_000001"]
    assert load_trainer_state(tmp_path / "checkpoints" / "iteration_000001") == {"value": 1}


def test_full_disk_while_the_trainer_state_is_written(
    tmp_path: Path, policy: TabularPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_module.torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 1, policy, {"tensor": torch.ones(1)})
    assert names(tmp_path) == []


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, FailingPolicy(KeyboardInterrupt()), {})
    assert names(tmp_path) == []


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    match kind:
        case "truncated":
            path.write_bytes(data[:-1])
        case "changed":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "missing":
            path.unlink()


@pytest.mark.parametrize(
    ("kind", "message"), [("truncated", "bytes instead of"), ("changed", "SHA-256"), ("missing", "is missing")]
)
@pytest.mark.parametrize("name", ["policy/logits.npy", "trainer/state.pt", "trainer/state.json", "trainer/groups.npz"])
def test_damage_is_found_and_named(tmp_path: Path, policy: TabularPolicy, kind: str, message: str, name: str) -> None:
    folder = save_checkpoint(tmp_path, 1, policy, {"tensor": torch.ones(1)})
    damage(folder / name, kind)
    with pytest.raises(ValueError, match=rf"{name}' .*{message}.*Copy the checkpoint again"):
        load_trainer_state(folder)


@pytest.mark.parametrize("text", [None, "{"])
def test_folders_without_a_manifest_are_refused(tmp_path: Path, policy: TabularPolicy, text: str | None) -> None:
    folder = save_checkpoint(tmp_path, 1, policy, {})
    (folder / "manifest.json").unlink()
    if text is not None:
        (folder / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="is not a complete checkpoint"):
        verify_checkpoint(folder)


def test_state_that_torch_cannot_load_safely_is_refused(tmp_path: Path, policy: TabularPolicy) -> None:
    folder = save_checkpoint(tmp_path, 1, policy, {"path": Path("a")})
    with pytest.raises(ValueError, match="cannot read the trainer's state"):
        load_trainer_state(folder)
