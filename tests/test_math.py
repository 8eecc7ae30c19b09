"""The equations, against numbers worked out by hand, limits, and padding that must not matter."""

import math

import pytest
import torch
from helpers import ppo_config

from train_ppo import (
    KL_COEF_BOUNDS,
    KL_ESTIMATORS,
    NO_SCORES,
    AlgorithmConfig,
    PPOConfig,
    Rollout,
    RolloutConfig,
    ScoreConfig,
    control_kl,
    experience,
    gae,
    grpo_advantages,
    k1,
    k2,
    k3,
    kl_shaped_rewards,
    mean_metrics,
    new_state,
    next_kl_coef,
    ppo_policy_loss,
    ppo_value_loss,
    rloo_advantages,
    shape_scores,
)
from train_reward import (
    bradley_terry_loss,
    effective_n,
    fit_temperature,
    learning_rate,
    preference_accuracy,
    wilson_interval,
)
from utils import masked_mean, masked_whiten, token_logprobs
from utils.tensors import masked_variance, token_entropy

T = torch.tensor
ONES = torch.ones(1, 3, dtype=torch.bool)


def close(a, b, tolerance=1e-6):
    torch.testing.assert_close(torch.as_tensor(a).float(), torch.as_tensor(b).float(), atol=tolerance, rtol=0)


def pad(x, value, columns=2):
    """Columns of rubbish on the right."""
    return torch.cat([x, torch.full((x.shape[0], columns), value, dtype=x.dtype)], 1)


# --- masked reductions


def test_masked_mean_selects():
    x = T([[1.0, 2.0, math.nan], [3.0, math.inf, math.nan]])
    mask = T([[True, True, False], [True, False, False]])
    close(masked_mean(x, mask), 2.0)


def test_masked_mean_of_nothing_is_zero_with_zero_gradient():
    x = T([1.0, 2.0], requires_grad=True)
    mean = masked_mean(x, T([False, False]))
    mean.backward()
    assert mean.item() == 0 and x.grad.tolist() == [0, 0]


def test_masked_mean_gradient_ignores_nan():
    x = T([1.0, math.nan], requires_grad=True)
    masked_mean(x, T([True, False])).backward()
    assert x.grad.tolist() == [1, 0]


def test_masked_whiten_by_hand():
    # mean 2, population variance ((1)^2 + 0 + (1)^2) / 3 = 2/3
    out = masked_whiten(T([[1.0, 2.0, 3.0, 99.0]]), T([[True, True, True, False]]))
    close(out, [[-math.sqrt(1.5), 0.0, math.sqrt(1.5), 0.0]], 1e-5)


@pytest.mark.parametrize("x", [[[5.0, math.nan]], [[3.0, 3.0]]])
def test_masked_whiten_of_one_or_equal_values_is_zero(x):
    x = T(x)
    assert masked_whiten(x, ~x.isnan()).tolist() == [[0.0, 0.0]]


def test_whitening_ignores_a_shift():
    x, mask = torch.randn(4, 5), torch.rand(4, 5) > 0.3
    close(masked_whiten(x + 50, mask), masked_whiten(x, mask), 1e-4)


CONSTANTS = [1000.1, 99.7, -0.1, 1e-8, 1e6 + 0.1, 3.3e7, 1e12]


@pytest.mark.parametrize("value", CONSTANTS)
@pytest.mark.parametrize("shape", [(64, 128), (6, 7), (1, 3)])
def test_equal_values_are_exactly_zero_after_whitening(value, shape):
    x, mask = torch.full(shape, value), torch.rand(shape) > 0.3
    mask[0, 0] = True
    assert not masked_whiten(x, mask).any() and masked_variance(x, mask) == 0
    assert not masked_whiten(torch.where(mask, x, math.nan), mask).any()
    nearly = torch.where(torch.rand(shape) > 0.5, x, torch.nextafter(x, x * 2))  # rounding is no difference either
    assert not masked_whiten(nearly, mask).any()


@pytest.mark.parametrize("value", CONSTANTS)
@pytest.mark.parametrize("n", [2, 3, 6])
@pytest.mark.parametrize("estimate", [rloo_advantages, grpo_advantages])
def test_equal_rewards_are_exactly_zero_advantages(value, n, estimate):
    equal = torch.full((n,), value)
    assert estimate(equal, n).tolist() == [0.0] * n
    other = torch.arange(n).float()
    close(estimate(torch.cat([equal, other]), n)[n:], estimate(other, n))
    assert not estimate(torch.cat([equal, other]), n)[:n].any()


def test_whitening_keeps_small_differences_of_large_values():
    """An offset of 1e5, differences of 1: float32 would lose digits of the mean, and nothing is taken for rounding."""
    out = masked_whiten(T([[100001.0, 100002.0, 100003.0]]), ONES)
    close(out, [[-math.sqrt(1.5), 0.0, math.sqrt(1.5)]], 1e-5)
    close(grpo_advantages(T([100001.0, 100003.0]), 2), [-1.0, 1.0])
    assert masked_whiten(T([[math.nan, 1.0, 2.0]]), ONES).isnan().all()  # what is broken is not hidden


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_a_constant_reward_without_kl_is_no_advantage(estimator):
    tensors, _ = experience(group([1000.1] * 4), ppo_config("m", **estimates(estimator)), 0.1)
    assert not tensors["advantages"].any()


def test_scores_that_differ_by_rounding_are_normalised_to_zero():
    scores = torch.full((6,), 1000.1)
    scores[::2] = torch.nextafter(scores[::2], scores[::2] * 2)
    shaped = shape_scores(scores, T([4.0] * 6), T([True] * 6), ScoreConfig(normalize=True), dict(NO_SCORES))
    assert shaped.abs().max() < 1


def estimates(estimator, **algorithm):
    return dict(rollout=RolloutConfig(n=4), algorithm=AlgorithmConfig(estimator, **algorithm))


def group(scores, kl=(0.0, 0.0, 0.0, 0.0)):
    """Responses of two tokens; each one's summed log ratio to the reference is `kl`, all of it on the first token."""
    return [
        Rollout(0, [5], [6, 2], "x", True, score, [-1.0 + k, -2.0], [-1.0, -2.0], [0.3, 0.5])
        for score, k in zip(scores, kl)
    ]


@pytest.mark.parametrize("kl_coef", [0.0, 0.001, 0.05, 1.0])
@pytest.mark.parametrize("estimator, price", [("k1", lambda k: k), ("k2", lambda k: k * k / 2)])
def test_grpo_whitens_scores_and_not_the_kl(kl_coef, estimator, price):
    """Four wrong answers: each token's advantage is minus kl_coef times its KL, however small that is."""
    kl = [-0.1, 0.02, 0.1, -0.04]
    cfg = ppo_config("m", **estimates("grpo", kl_in="reward", kl_estimator=estimator))
    tensors, metrics = experience(group([0.0] * 4, kl), cfg, kl_coef)
    close(tensors["advantages"], [[-kl_coef * price(k), 0.0] for k in kl], 1e-6)
    tensors, _ = experience(group([0.0, 0.0, 0.0, 4.0], kl), cfg, kl_coef)
    whitened = [-1 / 3**0.5] * 3 + [3**0.5]
    close(tensors["advantages"], [[w - kl_coef * price(k), w] for w, k in zip(whitened, kl)], 1e-6)
    close(metrics["objective/reward_mean"], -kl_coef * sum(map(price, kl)) / 4)


def test_grpo_with_kl_in_the_loss_has_no_kl_in_its_advantages():
    tensors, _ = experience(
        group([0.0] * 4, [0.1, 0.2, 0.3, 0.4]), ppo_config("m", **estimates("grpo", kl_in="loss")), 1
    )
    assert not tensors["advantages"].any()


def test_token_logprobs_and_entropy():
    logits = T([[math.log(4.0), math.log(3.0), math.log(2.0), 0.0]])  # .4 .3 .2 .1
    close(token_logprobs(logits, T([1])), [math.log(0.3)])
    close(token_entropy(logits), [-sum(p * math.log(p) for p in (0.4, 0.3, 0.2, 0.1))])
    assert token_logprobs(logits.bfloat16(), T([1])).dtype == torch.float32


# --- rewards and advantages


def test_score_stands_on_the_last_response_token():
    mask = T([[True, True, True, False, False], [True] * 5])
    zeros = torch.zeros(2, 5)
    rewards = kl_shaped_rewards(T([2.0, 3.0]), zeros, zeros, mask, 0.1)
    assert rewards.tolist() == [[0, 0, 2, 0, 0], [0, 0, 0, 0, 3]]


def test_kl_is_paid_on_every_token():
    logprobs, ref = T([[-1.0, -2.0, -3.0]]), T([[-1.5, -2.0, -2.0]])
    rewards = kl_shaped_rewards(T([1.0]), logprobs, ref, ONES, 0.1)
    close(rewards, [[-0.05, 0.0, 1.1]])


def test_rewards_ignore_rubbish_in_padding():
    mask = T([[True, True, False]])
    rewards = kl_shaped_rewards(T([1.0]), T([[-1.0, -1.0, math.nan]]), T([[-2.0, -1.0, math.inf]]), mask, 0.5)
    assert rewards.tolist() == [[-0.5, 1.0, 0.0]]


def test_a_row_without_response_tokens_gets_no_reward():
    assert kl_shaped_rewards(T([9.0]), torch.zeros(1, 2), torch.zeros(1, 2), T([[False, False]]), 1.0).tolist() == [
        [0, 0]
    ]


def test_gae_by_hand():
    # deltas: 0 + .4 - .5 = -.1; 0 + .3 - .4 = -.1; 1 - .3 = .7. lambda .5: A3 = .7; A2 = -.1 + .35; A1 = -.1 + .125
    advantages, returns = gae(T([[0.0, 0.0, 1.0]]), T([[0.5, 0.4, 0.3]]), ONES, 1.0, 0.5)
    close(advantages, [[0.025, 0.25, 0.7]])
    close(returns, [[0.525, 0.65, 1.0]])


def test_gae_with_discount_by_hand():
    # gamma .9, lambda 1: returns are discounted sums, A = return - value
    advantages, returns = gae(T([[1.0, 2.0, 3.0]]), T([[0.1, 0.2, 0.3]]), ONES, 0.9, 1.0)
    close(returns, [[1 + 0.9 * 2 + 0.81 * 3, 2 + 0.9 * 3, 3.0]], 1e-5)
    close(advantages, [[5.13, 4.5, 2.7]], 1e-5)


def test_gae_with_lambda_zero_is_the_td_error():
    # 1 + .5 x 1 - .5, 2 + .5 x 3 - 1, 3 - 3
    advantages, returns = gae(T([[1.0, 2.0, 3.0]]), T([[0.5, 1.0, 3.0]]), ONES, 0.5, 0.0)
    close(advantages, [[1.0, 2.5, 0.0]])
    close(returns, [[1.5, 3.5, 3.0]])


def test_gae_ignores_padding():
    rewards, values = T([[0.0, 0.0, 1.0]]), T([[0.5, 0.4, 0.3]])
    plain = gae(rewards, values, ONES, 1.0, 0.5)
    padded = gae(pad(rewards, math.nan), pad(values, 7.0), pad(ONES, False), 1.0, 0.5)
    for a, b in zip(plain, padded):
        assert b[:, :3].tolist() == a.tolist() and b[:, 3:].tolist() == [[0, 0]]


def test_k3_by_hand():
    difference = T([-0.5, 0.1])  # logprob - ref_logprob
    close(difference.mean(), -0.2)  # k1 can be negative
    close(k3(difference, torch.zeros(2)).mean(), ((math.exp(0.5) - 1 - 0.5) + (math.exp(-0.1) - 1 + 0.1)) / 2)
    close(k3(difference, torch.zeros(2)).mean(), 0.0768, 1e-4)


@pytest.mark.parametrize(
    "estimator, wanted",
    [
        ("k1", [0.05, -0.01]),
        ("k2", [-0.0125, -0.0005]),
        ("k3", [-0.1 * (math.exp(0.5) - 1.5), -0.1 * (math.exp(-0.1) - 0.9)]),
    ],
)
def test_each_estimator_is_paid_in_the_reward(estimator, wanted):
    rewards = kl_shaped_rewards(
        T([0.0]), T([[-0.5, 0.1, 9.0]]), torch.zeros(1, 3), T([[True, True, False]]), 0.1, estimator
    )
    close(rewards, [[*wanted, 0.0]])


def test_gradients_of_the_estimators_as_losses():
    """Over all outcomes of a three-way choice: k2 has the gradient of KL(p || q), k3 that of KL(q || p), k1 none."""
    theta, q = T([0.3, -1.0, 0.7], dtype=torch.float64), T([0.2, 0.3, 0.5], dtype=torch.float64).log()

    def gradient(loss):
        x = theta.clone().requires_grad_()
        loss(x.log_softmax(-1)).backward()
        return x.grad

    exact = gradient(lambda logp: (logp.exp() * (logp - q)).sum())
    expected = {
        name: gradient(lambda logp, estimate=estimate: (logp.detach().exp() * estimate(logp, q)).sum())
        for name, estimate in KL_ESTIMATORS.items()
    }
    close(expected["k1"], torch.zeros(3))
    close(expected["k2"], exact)
    close(expected["k3"], gradient(lambda logp: (q.exp() * (q - logp)).sum()))
    assert (exact - expected["k3"]).abs().max() > 0.01 and exact.abs().max() > 0.1  # two ways towards q
    p = theta.softmax(-1)
    for estimate in (k1, k3):  # both are unbiased as numbers
        close((p * estimate(p.log(), q)).sum(), (p * (p.log() - q)).sum())
    assert (p * k2(p.log(), q)).sum() > 0


# --- advantages without a critic


def test_rloo_by_hand():
    close(rloo_advantages(T([1.0, 2.0, 3.0, 0.0, 0.0, 6.0]), 3), [1 - 2.5, 0.0, 3 - 1.5, -3.0, -3.0, 6.0])


def test_grpo_by_hand():
    close(grpo_advantages(T([1.0, 3.0, 5.0, 5.0]), 2), [-1.0, 1.0, 0.0, 0.0])
    close(grpo_advantages(T([0.0, 0.0, 3.0]), 3), T([-1.0, -1.0, 2.0]) / 2**0.5)


@pytest.mark.parametrize("estimate", [rloo_advantages, grpo_advantages])
def test_a_shift_of_one_prompts_rewards_changes_nothing(estimate):
    rewards = T([0.1, 0.7, -2.0, 5.0, 1.0, 1.5])
    close(estimate(rewards + T([9.0, 9.0, 9.0, -4.0, -4.0, -4.0]), 3), estimate(rewards, 3), 1e-5)


# --- scores


def test_scores_are_normalised_over_the_run():
    """After each batch the moments are those of all scores so far, and that batch is scaled by them."""
    moments, seen = dict(NO_SCORES), []
    for batch in ([1.0, 2.0, 6.0], [10.0], [-3.0, -3.0]):
        seen += batch
        shaped = shape_scores(
            T(batch), T([4.0] * len(batch)), T([True] * len(batch)), ScoreConfig(normalize=True), moments
        )
        everything = T(seen, dtype=torch.float64)
        close(shaped, (T(batch) - everything.mean()) / everything.std(unbiased=False).clamp(min=1e-6), 1e-5)
    assert moments["count"] == 6 and moments["mean"] == pytest.approx(13 / 6)


def test_scores_are_clipped_then_penalised():
    cfg = ScoreConfig(clip=2.0, missing_eos_penalty=1.0, length_penalty=0.1)
    close(
        shape_scores(T([5.0, -1.0]), T([3.0, 10.0]), T([True, False]), cfg, dict(NO_SCORES)), [2 - 0.3, -1 - 1 - 1.0]
    )
    close(shape_scores(T([5.0]), T([3.0]), T([False]), ScoreConfig(), dict(NO_SCORES)), [5.0])


# --- losses


def test_dual_clip_by_hand():
    """Ratio 5: a negative advantage costs 3 and not 5, without a gradient; a positive one is clipped as ever."""
    logprobs = T([[5.0, 5.0, 2.0]]).log().requires_grad_()
    loss, metrics = ppo_policy_loss(logprobs, torch.zeros(1, 3), T([[-1.0, 1.0, -1.0]]), ONES, 0.2, 3.0)
    close(loss, (3.0 - 1.2 + 2.0) / 3)
    close(metrics["policy/clip_fraction"], 2 / 3)
    loss.backward()
    close(logprobs.grad, [[0.0, 0.0, 2 / 3]])
    close(ppo_policy_loss(logprobs, torch.zeros(1, 3), T([[-1.0, 1.0, -1.0]]), ONES, 0.2)[0], (5.0 - 1.2 + 2.0) / 3)


def test_policy_loss_by_hand():
    # ratios 1.5 (clipped to 1.2 for A > 0), 0.5 (clipped to 0.8 for A < 0), 1.1
    logprobs = T([[1.5, 0.5, 1.1]]).log()
    loss, metrics = ppo_policy_loss(logprobs, torch.zeros(1, 3), T([[1.0, -1.0, 2.0]]), ONES, 0.2)
    close(loss, (-1.2 + 0.8 - 2.2) / 3)
    close(metrics["policy/clip_fraction"], 2 / 3)
    close(metrics["policy/ratio_mean"], 3.1 / 3)
    close(metrics["policy/approx_kl"], sum(r - 1 - math.log(r) for r in (1.5, 0.5, 1.1)) / 3)


def test_clipped_tokens_have_no_gradient():
    logprobs = T([[1.5, 0.5, 1.1]]).log().requires_grad_()
    ppo_policy_loss(logprobs, torch.zeros(1, 3), T([[1.0, -1.0, 2.0]]), ONES, 0.2)[0].backward()
    close(logprobs.grad, [[0.0, 0.0, -2.2 / 3]])


def test_policy_gradient_at_ratio_one():
    logprobs = torch.zeros(1, 3, requires_grad=True)
    loss, metrics = ppo_policy_loss(logprobs, torch.zeros(1, 3), T([[1.0, -2.0, 4.0]]), ONES, 0.2)
    loss.backward()
    close(logprobs.grad, [[-1 / 3, 2 / 3, -4 / 3]])
    assert (
        metrics["policy/approx_kl"] == 0 and metrics["policy/clip_fraction"] == 0 and metrics["policy/ratio_mean"] == 1
    )


def test_value_loss_by_hand():
    # 1: value 1.0, old 0.5, clip .2 -> .7; return 2: errors 1 and 1.69, the larger counts. 2: inside the clip: 0.01
    loss, metrics = ppo_value_loss(
        T([[1.0, 0.1]]), T([[0.5, 0.0]]), T([[2.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool), 0.2
    )
    close(loss, 0.5 * (1.69 + 0.01) / 2)
    close(metrics["critic/clip_fraction"], 0.5)


@pytest.mark.parametrize("rubbish", [0.0, 1e30, math.inf, math.nan])
def test_losses_and_metrics_ignore_padding(rubbish):
    torch.manual_seed(0)
    x = [torch.randn(2, 3) * 0.1 for _ in range(3)]
    mask = T([[True, True, True], [True, False, False]])
    for function in (ppo_policy_loss, ppo_value_loss):
        inputs = x[0].clone().requires_grad_()
        loss, metrics = function(inputs, x[1], x[2], mask, 0.2)
        loss.backward()
        wide = pad(x[0], rubbish, 97).requires_grad_()
        padded_loss, padded_metrics = function(
            wide, pad(x[1], rubbish, 97), pad(x[2], rubbish, 97), pad(mask, False, 97), 0.2
        )
        padded_loss.backward()
        close(padded_loss, loss)
        close(wide.grad[:, :3], inputs.grad)
        assert not wide.grad[:, 3:].any()
        for name in metrics:
            close(padded_metrics[name], metrics[name])


def test_loss_of_an_all_masked_batch_is_zero():
    logprobs = torch.full((1, 2), math.nan, requires_grad=True)
    loss, _ = ppo_policy_loss(logprobs, torch.zeros(1, 2), torch.ones(1, 2), T([[False, False]]), 0.2)
    loss.backward()
    assert loss.item() == 0 and logprobs.grad.tolist() == [[0, 0]]


# --- KL controller


def test_controller_by_hand():
    close(next_kl_coef(0.1, 0.2, 0.1, 1000, 100), 0.1 * (1 + 0.2 * 0.1))  # error 1, clipped to 0.2
    close(next_kl_coef(0.1, 0.11, 0.1, 1000, 100), 0.1 * (1 + 0.1 * 0.1))
    close(next_kl_coef(0.1, 0.0, 0.1, 1000, 100), 0.1 * (1 - 0.2 * 0.1))
    close(next_kl_coef(0.1, 0.1, 0.1, 1000, 100), 0.1)


def test_controller_is_bounded():
    up = down = 0.2
    for _ in range(3000):
        up, down = next_kl_coef(up, 1.0, 0.1, 10_000, 256), next_kl_coef(down, 0.0, 0.1, 10_000, 256)
    assert (down, up) == KL_COEF_BOUNDS


@pytest.mark.parametrize("target, horizon", [(0, 100), (-1, 100), (0.1, 0)])
def test_controller_refuses_bad_values(target, horizon):
    with pytest.raises(ValueError):
        next_kl_coef(0.1, 0.1, target, horizon, 1)


def test_moving_average_drives_the_same_rule():
    """decay 0.5, target 0.1, horizon 1000, 100 responses a step.

    KL 0.1 then 0.3 average 0.1 and 0.2; 0.2 is 100% over, clipped to 20%.
    """
    from utils.config import parse_config

    cfg = parse_config(
        PPOConfig,
        [
            "--model.path",
            "m",
            "--data",
            "d",
            "--output_dir",
            "o",
            "--reward_model.path",
            "r",
            "--total_steps",
            "1",
            "--train_batch_size",
            "100",
            "--algorithm.kl_coef",
            "0.1",
            "--algorithm.kl_ctrl",
            '{"method": "moving_average", "target_kl": 0.1, "horizon": 1000, "decay": 0.5}',
        ],
    )
    state = new_state(cfg)
    control_kl(cfg, state, 0.1)
    close(state["kl_coef"], 0.1)
    control_kl(cfg, state, 0.3)
    close([state["kl_average"], state["kl_coef"]], [0.2, 0.1 * (1 + 0.2 * 0.1)])


# --- Bradley-Terry


def test_bradley_terry_by_hand():
    loss, metrics = bradley_terry_loss(T([1.0, 0.0]), T([0.0, 2.0]))
    close(loss, (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2))) / 2)
    close(metrics["accuracy"], 0.5)
    close(metrics["margin"], -0.5)


def test_bradley_terry_margin():
    close(bradley_terry_loss(T([1.0]), T([0.0]), T([1.0]))[0], math.log(2))


@pytest.mark.parametrize("margin", [None, T([0.0, 0.0]), T([1.0, 5.0]), T([-2.0, 100.0])])
def test_the_logged_margin_is_that_of_the_scores(margin):
    close(bradley_terry_loss(T([1.0, 4.0]), T([0.5, 1.0]), margin)[1]["margin"], (0.5 + 3.0) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bradley_terry_is_finite_at_the_extremes(dtype):
    close(bradley_terry_loss(T([-400.0], dtype=dtype), T([400.0], dtype=dtype))[0], 800.0)
    close(bradley_terry_loss(T([400.0], dtype=dtype), T([-400.0], dtype=dtype))[0], 0.0)


def test_a_tie_counts_half():
    close(preference_accuracy(torch.zeros(10), torch.zeros(10)), 0.5)
    close(preference_accuracy(T([1.0, 0.0, 2.0, 0.0]), T([0.0, 1.0, 2.0, -1.0])), 2.5 / 4)


def test_temperature_recovers_the_scale():
    # differences d with chosen winning as often as sigmoid(d / 2) says: 100 pairs at d = 2 ln 3, of which 75 agree
    d = 2 * math.log(3)
    assert abs(fit_temperature([d] * 75 + [-d] * 25) - 2) < 0.02


@pytest.mark.parametrize("size", [1e-6, 1.0, 5.0, 1e5])
@pytest.mark.parametrize("n", [1, 7, 100, 4000])
def test_temperature_without_a_mistake_counts_half_a_coin(size, n):
    """n right pairs and half a coin: sigmoid(d / T) = (n + 1/4) / (n + 1/2), so T = d / ln(4 n + 1)."""
    assert fit_temperature([size] * n) == pytest.approx(size / math.log(4 * n + 1), rel=1e-4)


def test_temperature_with_mistakes_that_are_near_misses_is_not_the_edge():
    """99 pairs at 5 and one at -0.001, whose likelihood alone asks for a T near 0."""
    assert 0.5 < fit_temperature([5.0] * 99 + [-0.001]) < 1.5
    differences = torch.linspace(0.1, 6.0, 200).tolist()
    assert 0.1 < fit_temperature(differences) < 1.5


def test_a_small_disagreement_with_a_model_without_mistakes_is_no_contradiction():
    """Of a model that is right in 100 pairs by 5, a pair at -1 is right with probability 0.23, at -5 with 0.002."""
    temperature = fit_temperature([5.0] * 100)
    close([1 / (1 + math.exp(d / temperature)) for d in (1.0, 5.0)], [0.2317, 1 / 402], 1e-4)


def test_temperature_at_the_limits():
    assert fit_temperature([0.0] * 9) == 1.0
    assert fit_temperature([-2.0] * 9) == pytest.approx(200.0)  # worse than chance: nothing is likely


def test_effective_n_by_hand():
    """Pairs that say the same count once a prompt; independent ones all; without variance the prompts count."""
    assert effective_n(T([1.0, 1.0, 0.0, 0.0]), ["a", "a", "b", "b"]) == pytest.approx(2)
    assert effective_n(T([1.0, 0.0, 1.0, 0.0]), list("abcd")) == 4
    assert effective_n(T([1.0, 0.0, 1.0, 0.0]), ["a", "a", "b", "b"]) == 4  # never more than all
    assert effective_n(torch.ones(6), ["a", "a", "b", "b", "c", "c"]) == 3
    # off the mean 0.75: 0.25 + 0.25, 0.25 - 0.75; squared 0.25 + 0.25 for 3 x 0.0625 + 0.5625
    assert effective_n(T([1.0, 1.0, 1.0, 0.0]), ["a", "a", "b", "b"]) == 4
    assert effective_n(T([1.0, 1.0, 1.0, 0.0, 0.0]), ["a", "a", "a", "b", "b"]) == pytest.approx(5 * 1.2 / 2.88)


def test_means_over_mini_batches_count_tokens():
    seen = [(30, {"policy/loss": 1.0, "x": 2.0}), (10, {"policy/loss": 5.0})]
    assert mean_metrics(seen) == {"policy/loss": 2.0, "x": 2.0}


def test_learning_rate_schedule():
    # two steps up, then down by 1/18 a step; the rate that the step after the last would have is 0
    wanted = [0.5, 1.0, *(k / 18 for k in range(18, 0, -1))]
    close([learning_rate(step, 20, 1.0) for step in range(20)], wanted)
    close([learning_rate(step, 20, 3e-4) for step in range(20)], [3e-4 * rate for rate in wanted], 1e-9)


def test_wilson_interval_by_hand():
    # 8 of 10: (0.8 + z²/20 ± z sqrt(0.016 + z²/400)) / (1 + z²/10), z = 1.96
    assert wilson_interval(0.8, 10) == [0.4902, 0.9433]
