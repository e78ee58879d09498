"""Updates of a tabular policy: exact gradients, invariances, checks, and what each ingredient of the method does."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tabular import PlainGradientStep, TabularPolicy, decision, episode, played_episode

from vla_rl.algos.advantages import GrpoAdvantage, group_advantages
from vla_rl.algos.batch import RolloutBatch, make_batch
from vla_rl.algos.denominators import ConstantNorm, DenominatorConfig, EpisodeMean, TokenMean
from vla_rl.algos.policy_gradient import AlgoConfig, update
from vla_rl.algos.surrogates import ClippedSurrogate
from vla_rl.rollout.filters import GroupBuffer, GroupFilterConfig
from vla_rl.train.optim import OptimConfig, Optimizer
from vla_rl.types import Episode

# Two control steps of two tokens: L = 4; three values each, three states.
NUM_TOKENS, NUM_VALUES, NUM_STATES = 4, 3, 3
ONE_MINIBATCH = AlgoConfig(num_minibatches=1)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def policy() -> TabularPolicy:
    logits = torch.randn(NUM_STATES, NUM_TOKENS, NUM_VALUES, generator=torch.Generator().manual_seed(0))
    return TabularPolicy(logits)


def uneven_batch(policy: TabularPolicy, version: int = 0, temperature: float = 1.0) -> RolloutBatch:
    """Four episodes of 1 to 4 decisions; the last chunk of three of them was not fully executed."""
    lengths = [[1], [2, 2, 1], [2, 2], [2, 2, 2, 1]]
    episodes = [
        played_episode(policy, steps, success=index % 2 == 0, seed=index, version=version, temperature=temperature)
        for index, steps in enumerate(lengths)
    ]
    return make_batch(episodes, np.array([1.5, -0.5, 0.7, -1.7]), tokens_per_step=2, policy_version=0)


def gradient(policy: TabularPolicy, batch: RolloutBatch, config: AlgoConfig) -> torch.Tensor:
    optimizer = PlainGradientStep(policy)
    update(policy, optimizer, batch, config, rng())
    (only,) = optimizer.gradients
    return only


def test_gradient_is_the_policy_gradient(policy: TabularPolicy) -> None:
    # At ratio 1, d loss / d logits = -A (onehot - softmax) / T / (tokens of the episode * episodes).
    temperature = 1.6
    played = played_episode(policy, [2], success=True, seed=0, temperature=temperature)
    batch = make_batch([played], np.array([2.0]), tokens_per_step=2, policy_version=0)
    found = gradient(policy, batch, ONE_MINIBATCH)
    softmax = torch.softmax(policy.logits.detach()[0] / temperature, dim=-1)
    onehot = torch.eye(NUM_VALUES)[torch.from_numpy(played.decisions[0].sample)]
    torch.testing.assert_close(found[0], -2.0 * (onehot - softmax) / temperature / NUM_TOKENS)
    assert torch.all(found[1:] == 0)


@pytest.mark.parametrize("denominator", [EpisodeMean(), TokenMean(), ConstantNorm(num_tokens=16)])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 7])
def test_any_split_into_micro_batches_gives_the_same_gradient(
    policy: TabularPolicy, denominator: DenominatorConfig, micro_batch_size: int
) -> None:
    policy = policy.double()
    batch = uneven_batch(policy)
    whole = AlgoConfig(num_minibatches=1, denominator=denominator, micro_batch_size=100)
    split = whole.model_copy(update={"micro_batch_size": micro_batch_size})
    torch.testing.assert_close(gradient(policy, batch, split), gradient(policy, batch, whole), rtol=1e-6, atol=1e-9)


def test_denominators_differ_on_uneven_episodes(policy: TabularPolicy) -> None:
    batch = uneven_batch(policy)
    by_episode = gradient(policy, batch, AlgoConfig(num_minibatches=1, denominator=EpisodeMean()))
    by_token = gradient(policy, batch, AlgoConfig(num_minibatches=1, denominator=TokenMean()))
    constant = gradient(policy, batch, AlgoConfig(num_minibatches=1, denominator=ConstantNorm(num_tokens=7)))
    assert not torch.allclose(by_episode, by_token)
    # (1 + 5 + 4 + 7) executed steps of two tokens: 1 / 34 each, against 1 / (4 * 7) each.
    assert batch.num_tokens == 34
    torch.testing.assert_close(by_token * 34 / 28, constant)


def test_tokens_that_were_not_executed_have_no_gradient_whatever_they_hold(policy: TabularPolicy) -> None:
    played = played_episode(policy, [1], success=True, seed=0)
    clean = gradient(policy, make_batch([played], np.ones(1), tokens_per_step=2, policy_version=0), ONE_MINIBATCH)
    assert torch.all(clean[0, 2:] == 0)
    assert torch.all(clean[0, :2] != 0)
    played.decisions[0].logprobs[2:] = [np.nan, -500.0]
    dirty = gradient(policy, make_batch([played], np.ones(1), tokens_per_step=2, policy_version=0), ONE_MINIBATCH)
    assert torch.equal(clean, dirty)


def test_first_update_of_an_on_policy_batch(policy: TabularPolicy) -> None:
    episodes = [played_episode(policy, [2, 2], success=index < 3, seed=index) for index in range(8)]
    rewards = np.array([float(item.success) for item in episodes])
    advantages = group_advantages(rewards, np.zeros(8, dtype=int), GrpoAdvantage())
    batch = make_batch(episodes, advantages, tokens_per_step=2, policy_version=0)
    metrics = update(policy, PlainGradientStep(policy), batch, ONE_MINIBATCH, rng())
    # Equal lengths: the loss is minus the mean advantage, which is zero.
    assert metrics["update/loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["update/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["update/clip_fraction_high"] == metrics["update/clip_fraction_low"] == 0.0
    assert metrics["update/kl_k3"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["update/grad_norm"] > 0


# --- Checks ----------------------------------------------------------------------------------------------------------


def test_ratio_check_fires_if_evaluate_disagrees_with_act(policy: TabularPolicy) -> None:
    played = played_episode(policy, [2], success=True, seed=0)
    played.decisions[0].logprobs[1] += 0.01
    batch = make_batch([played], np.ones(1), tokens_per_step=2, policy_version=0)
    with pytest.raises(RuntimeError, match=r"max \|ratio - 1\| is 0\.00995.*ratio_tolerance=0\.001"):
        update(policy, PlainGradientStep(policy), batch, ONE_MINIBATCH, rng())
    update(policy, PlainGradientStep(policy), batch, AlgoConfig(num_minibatches=1, ratio_tolerance=0.05), rng())


def test_ratio_check_fires_if_the_temperature_is_forgotten(policy: TabularPolicy) -> None:
    played = played_episode(policy, [2], success=True, seed=0, temperature=1.6)
    played.decisions[0].temperature = 1.0
    batch = make_batch([played], np.ones(1), tokens_per_step=2, policy_version=0)
    with pytest.raises(RuntimeError, match="disagree"):
        update(policy, PlainGradientStep(policy), batch, ONE_MINIBATCH, rng())


def test_ratio_check_leaves_out_carried_groups_and_later_steps(policy: TabularPolicy) -> None:
    batch = uneven_batch(policy, version=-1)
    policy.logits.data[..., 0] += 0.5  # the policy has changed since
    metrics = update(policy, PlainGradientStep(policy, lr=1.0), batch, AlgoConfig(num_epochs=2), rng())
    assert metrics["update/off_policy_fraction"] == 1.0
    assert metrics["update/ratio_max"] > 1.001
    assert metrics["update/num_optimizer_steps"] == 8


def test_non_finite_logprobs_stop_the_update_before_a_step(policy: TabularPolicy) -> None:
    played = played_episode(policy, [2], success=True, seed=0)
    played.decisions[0].logprobs[0] = np.nan
    batch = make_batch([played], np.ones(1), tokens_per_step=2, policy_version=0)
    optimizer = PlainGradientStep(policy)
    with pytest.raises(FloatingPointError, match="old_logprobs of act: 1 of 4"):
        update(policy, optimizer, batch, ONE_MINIBATCH, rng())
    assert not optimizer.gradients


def test_exploding_ratio_is_named(policy: TabularPolicy) -> None:
    batch = make_batch(
        [episode([decision([0] * 4, [-200.0] * 4, 2)])], -np.ones(1), tokens_per_step=2, policy_version=5
    )
    with pytest.raises(FloatingPointError, match="policy-gradient loss"):
        update(policy, PlainGradientStep(policy), batch, ONE_MINIBATCH, rng())


# --- Batches ---------------------------------------------------------------------------------------------------------


def test_minibatches_deal_out_whole_episodes_once(policy: TabularPolicy) -> None:
    batch = uneven_batch(policy)
    parts = list(batch.minibatches(2, rng(3)))
    assert sorted(np.concatenate(parts)) == list(range(batch.num_decisions))
    assert not set(batch.episode_ids[parts[0]]) & set(batch.episode_ids[parts[1]])
    assert [list(part) for part in batch.minibatches(2, rng(3))] == [list(part) for part in parts]
    orders = {tuple(map(tuple, batch.minibatches(2, rng(seed)))) for seed in range(10)}
    assert len(orders) > 1
    assert len(list(batch.minibatches(9, rng()))) == 4


def test_micro_batches_have_one_temperature_each(policy: TabularPolicy) -> None:
    episodes = [played_episode(policy, [2] * 3, success=True, seed=0, temperature=t) for t in (1.0, 1.6)]
    batch = make_batch(episodes, np.ones(2), tokens_per_step=2, policy_version=0)
    parts = list(batch.micro_batches(np.arange(6), 2))
    assert [set(batch.temperatures[part]) for part in parts] == [{1.0}] * 3 + [{1.6}] * 3
    assert sorted(np.concatenate(parts)) == list(range(6))
    update(policy, PlainGradientStep(policy), batch, ONE_MINIBATCH, rng())


@pytest.mark.parametrize(("size", "sizes"), [(3, [3, 3, 3, 2]), (2, [2, 2, 2, 1, 1, 1, 1, 1]), (100, [3, 3, 3, 2])])
def test_micro_batches_are_even_and_keep_equal_observations_together(
    policy: TabularPolicy, size: int, sizes: list[int]
) -> None:
    episodes = [played_episode(policy, [2] * length, success=True, seed=i) for i, length in enumerate((4, 3, 4))]
    batch = make_batch(episodes, np.ones(3), tokens_per_step=2, policy_version=0)
    starts = [0, 4, 7]  # of one group
    observations = tuple(
        replace(one, proprio=np.full(3, 0.0 if row in starts else row, np.float32))
        for row, one in enumerate(batch.observations)
    )
    batch = replace(batch, observations=observations)
    parts = list(batch.micro_batches(np.arange(11), size))
    assert [len(part) for part in parts] == sizes
    order = np.concatenate(parts).tolist()
    assert sorted(order) == list(range(11))
    assert order[:3] == starts


def test_make_batch_explains_what_is_wrong(policy: TabularPolicy) -> None:
    played = played_episode(policy, [2], success=True, seed=0)
    with pytest.raises(ValueError, match="1 episodes but 2 advantages"):
        make_batch([played], np.ones(2), tokens_per_step=2, policy_version=0)
    with pytest.raises(ValueError, match="at least one episode"):
        make_batch([], np.ones(0), tokens_per_step=2, policy_version=0)
    with pytest.raises(ValueError, match="tokens_per_step=7 does not fit"):
        make_batch([played], np.ones(1), tokens_per_step=7, policy_version=0)
    with pytest.raises(ValueError, match="no executed control step"):
        make_batch([episode([decision([0] * 4, [0.0] * 4, 0)])], np.ones(1), tokens_per_step=2, policy_version=0)


# --- The ingredients of the method -----------------------------------------------------------------------------------


def bandit_group(
    policy: TabularPolicy, config: AlgoConfig, group: int, generator: np.random.Generator
) -> list[Episode]:
    """One-token episodes; value 1 succeeds."""
    episodes = []
    for _ in range(config.group_size):
        sample, logprobs = policy.draw(0, config.temperature, generator)
        made = decision(list(sample), list(logprobs), 1, temperature=config.temperature)
        episodes.append(episode([made], success=bool(sample[0] == 1), group=group))
    return episodes


def bandit_batch(groups: list[list[Episode]]) -> RolloutBatch:
    episodes = [item for group in groups for item in group]
    rewards = np.array([float(item.success) for item in episodes])
    indices = np.array([item.group_index for item in episodes])
    advantages = group_advantages(rewards, indices, GrpoAdvantage())
    return make_batch(episodes, advantages, tokens_per_step=1, policy_version=0)


def test_a_two_armed_bandit_learns() -> None:
    policy = TabularPolicy(torch.tensor([[[1.0, -1.0]]]))
    optimizer = Optimizer(policy.named_parameters(), OptimConfig(lr=0.1, weight_decay=0.0))
    config, generator = AlgoConfig(groups_per_iteration=8), rng()
    for _ in range(8):
        groups = [bandit_group(policy, config, index, generator) for index in range(config.groups_per_iteration)]
        update(policy, optimizer, bandit_batch(groups), config, generator)
    success_rate = torch.softmax(policy.logits.detach()[0, 0], dim=-1)[1]
    assert success_rate > 0.8  # from 0.12


def test_clip_higher_gives_rare_successes_more_headroom() -> None:
    # A rare value (10 %) succeeds, a common one (90 %) fails. Many small steps on one batch push the rare value up
    # until the clip stops it: just above 1 + clip_high times its old probability. Its rise is what keeps entropy up.
    reached, entropies, high_fractions = [], [], []
    for clip_high in (0.2, 0.28):
        policy = TabularPolicy(torch.log(torch.tensor([[[0.9, 0.1]]])))
        played = [episode([decision([1], [np.log(0.1)], 1)]), episode([decision([0], [np.log(0.9)], 1)], success=False)]
        batch = make_batch(played, np.array([1.0, 0.0]), tokens_per_step=1, policy_version=0)
        surrogate = ClippedSurrogate(clip_low=0.2, clip_high=clip_high)
        config = AlgoConfig(num_minibatches=1, num_epochs=60, surrogate=surrogate)
        metrics = update(policy, PlainGradientStep(policy, lr=0.01), batch, config, rng())
        evaluation = policy.evaluate(batch.observations[:1], batch.sample[:1], 1.0)
        reached.append(evaluation.logprobs.exp().item() / 0.1)
        entropies.append(evaluation.entropy.item())
        high_fractions.append(metrics["update/clip_fraction_high"])
    assert reached == pytest.approx([1.2, 1.28], abs=0.02)
    assert entropies[1] > entropies[0]
    assert high_fractions[0] > high_fractions[1] > 0


def test_temperature_raises_entropy_and_belongs_to_the_ratio(policy: TabularPolicy) -> None:
    entropies = []
    for temperature in (1.0, 1.6):
        # The ratio check inside `update` proves that log-probabilities are compared at this temperature.
        batch = uneven_batch(policy, temperature=temperature)
        entropies.append(update(policy, PlainGradientStep(policy), batch, ONE_MINIBATCH, rng())["update/entropy"])
    assert entropies[1] > entropies[0]


@pytest.mark.parametrize("enabled", [True, False])
def test_dynamic_sampling_removes_zero_advantages(enabled: bool) -> None:
    policy = TabularPolicy(torch.tensor([[[3.0, 0.0]]]))
    config, generator = AlgoConfig(group_size=4, temperature=1.0), rng()
    buffer = GroupBuffer(GroupFilterConfig(enabled=enabled))
    buffer.begin_iteration(policy_version=0)
    for index in range(60):
        buffer.add(bandit_group(policy, config, index, generator))
    batch = bandit_batch(buffer.take(8))
    fraction = update(policy, PlainGradientStep(policy), batch, config, rng())["update/zero_advantage_fraction"]
    if enabled:
        assert fraction == 0.0
    else:
        assert fraction > 0.5
