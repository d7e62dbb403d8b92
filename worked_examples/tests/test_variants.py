"""The specification of variants.py, in the words of test_grpo.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo
from test_grpo import (Difference, any_distribution, any_groups, any_logp, any_number, any_reward, answers, beyond,
                       columns, expect, expect_nothing_of_the_padding, f64, grid, remember_what_is_asked, slope,
                       with_options)
from worked_examples import variants

settings.load_profile("grpo")


@pytest.mark.parametrize("limits, lengths, want", [
    ((1280, 256), [900, 1024, 1088, 1152, 1280, 2000], [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]),                # page 10
    pytest.param((5, 0), [5, 6], [0.0, -1.0], marks=beyond("empty"))], ids=str)
def test_get_soft_overlong_punishment_matches_the_worked_numbers(limits, lengths, want):
    """r = 0 up to L - c tokens, then falls as (L - c - n)/c, and is -1 beyond L (DAPO eq. 13)"""
    punish = variants.get_soft_overlong_punishment(*limits)
    expect(f64(punish(completion_ids=[[7] * n for n in lengths], prompts=None)), want)


@given(any_groups)
def test_leave_one_out_advantages_match_the_oracle(groups):
    """A_i = r_i - mean of the other G - 1 (RLOO)"""
    G = len(groups[0])
    want = [[r - (sum(rewards) - r) / (G - 1) for r in rewards] for rewards in groups]
    expect(variants.leave_one_out_advantages(f64(groups).flatten(), G), sum(want, []))


@pytest.mark.parametrize("rewards, want", [                                                     # page 10
    ([1, 0, 0, 0], [3, -1, -1, -1]), ([1, 1, 0, 1], [1 / 3, 1 / 3, -1, 1 / 3]), ([0, 0, 0, 0], [0, 0, 0, 0])], ids=str)
def test_maxrl_advantages_match_the_worked_numbers(rewards, want):
    """A = (r - mean) / mean: G/k - 1 if right, where k of G are right, -1 if wrong; 0 at mean 0"""
    expect(variants.maxrl_advantages(f64(rewards), 4), want)


@given(any_groups)
def test_maxrl_advantages_match_the_oracle(groups):
    """A = (r - mean) / mean, 0 at mean 0 (MaxRL), for rewards of 0 and more"""
    groups = [[abs(r) for r in rewards] for rewards in groups]
    means = [sum(rewards) / len(rewards) for rewards in groups]
    want = [(r - mean) / (mean or 1) for rewards, mean in zip(groups, means) for r in rewards]
    expect(variants.maxrl_advantages(f64(groups).flatten(), len(groups[0])), want)


@beyond("missing")
@pytest.mark.parametrize("name, want", [("leave_one_out_advantages", 2), ("maxrl_advantages", 1)])
def test_a_reward_of_nan_is_in_no_mean(name, want):
    """r = 2, NaN, 0: the others' mean is 0 and 2, the group's is 1; beside NaN alone a reward has no other"""
    rewards = f64([2, math.nan, 0, 2, math.nan, math.nan, math.nan, math.nan, math.nan])
    expect(getattr(variants, name)(rewards, 3), [want, 0, -want, 0, 0, 0, 0, 0, 0])


def test_distillation_advantages_match_the_worked_numbers_and_are_constants():
    """A = log π_teacher - log π: of two words the student expects both, ½ and ½, its teacher ¾ and ¼ (page 10)"""
    teacher, student, mask = f64([[0.75, 0.25]]).log(), f64([[0.5, 0.5]]).log(), torch.ones(1, 2)
    expect(variants.distillation_advantages(teacher, student, mask), [[0.4055, -0.6931]], 5e-5)
    expect(slope(lambda x: variants.distillation_advantages(teacher, x, mask), student), [[0.0, 0.0]])


@given(any_distribution, any_distribution)
def test_distillation_advantages_pull_the_student_to_the_teacher(p, q):
    """Σ_v π(v)·∇loss(v) = ∇KL(π‖π_teacher) over the one-token answers v, on-policy"""
    def mean_loss(logits):                                              # the three answers, each as often as π says
        logps, mask = logits.log_softmax(0).unsqueeze(1), torch.ones(3, 1)
        A = variants.distillation_advantages(f64(q).log().unsqueeze(1), logps, mask)
        return grpo.grpo_loss(logps, 3 * f64(p).unsqueeze(1) * A, mask)[0]

    kl = sum(x * math.log(x / y) for x, y in zip(p, q))
    expect(slope(mean_loss, f64(p).log()), [x * (math.log(x / y) - kl) for x, y in zip(p, q)])


@pytest.mark.parametrize("options, worked", [                                                   # page 10
    (dict(lam=0.0), [0.1, 0.2, 0.1]), (dict(lam=0.5), [0.225, 0.25, 0.1]), (dict(lam=1.0), [0.4, 0.3, 0.1]),
    (dict(gamma=0.9, lam=0.5), [0.09975, 0.155, 0.1]), ({}, [0.38025, 0.295, 0.1])], ids=str)
@given(answers(any_reward, any_reward))
def test_gae_advantages_match_the_worked_numbers_and_the_oracle(options, worked, rows):
    """A_t = Σ_k (γλ)^k·δ_{t+k}, δ_t = r_t + γ·V_{t+1} - V_t, nothing after the end; return_t = A_t + V_t"""
    r, V = f64([[0, 0, 1]]), f64([[0.6, 0.7, 0.9]])
    expect(variants.gae_advantages(r, V, torch.ones(1, 3), **options)[0], [worked])
    gamma, lam = options.get("gamma", 1.0), options.get("lam", 0.95)
    want = []
    for row in rows:
        values = [V for _, V in row] + [0.0]
        delta = [r + gamma * values[t + 1] - values[t] for t, (r, _) in enumerate(row)]
        for t in range(len(row)):
            want.append(sum((gamma * lam) ** k * x for k, x in enumerate(delta[t:])))
    r, V, mask = columns(rows)
    A, returns = variants.gae_advantages(r, V, mask, **options)
    expect(A[mask == 1], want)
    expect(returns[mask == 1], A[mask == 1] + V[mask == 1])


@given(answers(any_logp, any_logp), st.lists(any_reward, min_size=3, max_size=3), grid(0, 2, 0.25))
def test_kl_penalized_rewards_match_the_oracle(rows, scores, beta):
    """r_t = -β·(log π - log π_ref), and the answer's score at its last token (DeepSeekMath eq. 2; page 9)"""
    logps, ref, mask = columns(rows)
    want = [-beta * (p - q) + score * (t + 1 == len(row))
            for row, score in zip(rows, scores) for t, (p, q) in enumerate(row)]
    got = variants.kl_penalized_rewards(f64(scores[: len(rows)]), logps, ref, mask, beta=beta)
    expect(got[mask == 1], want)
    expect(got[mask == 0], torch.zeros_like(got[mask == 0]))


def kept_tokens(rows, quantile):
    """top_entropy_mask at the real tokens, from rows of (H,)."""
    H, mask = columns(rows, padding=9.0)
    return variants.top_entropy_mask(H, mask, quantile)[mask == 1]


@given(answers(grid(0, 2, 0.25)), grid(0, 1, 0.125))
def test_top_entropy_mask_matches_the_worked_numbers_and_the_oracle(rows, quantile):
    """m = 1 where H >= the (1 - quantile)-quantile of the real tokens' H, interpolated between neighbours:
    of 5 tokens the 2, or the 1, with the highest entropy"""
    of_5_tokens = [[(0.1,), (2.0,), (0.3,)], [(1.5,), (0.2,)]]
    expect(kept_tokens(of_5_tokens, 0.4), [0, 1, 0, 1, 0])
    expect(kept_tokens(of_5_tokens, 0.2), [0, 1, 0, 0, 0])
    H = [h for row in rows for h, in row]
    place = (1 - quantile) * (len(H) - 1)
    below, above = sorted(H)[math.floor(place)], sorted(H)[math.ceil(place)]
    threshold = below + (place - math.floor(place)) * (above - below)
    expect(kept_tokens(rows, quantile), [float(h >= threshold) for h in H])


@with_options({}, dict(cap=1.2))
@given(any_logp, any_logp)
def test_truncated_importance_ratio_matches_the_oracle_and_is_a_constant(options, old, sampled):
    """w = min(exp(log π_old - log π_sampler), cap) (page 8); no gradient flows into it"""
    want = min(math.exp(old - sampled), options.get("cap", 2.0))
    old, sampled = f64(old), f64(sampled)
    expect(variants.truncated_importance_ratio(old, sampled, **options), want)
    expect(slope(lambda x: variants.truncated_importance_ratio(x, sampled, **options), old), 0.0)
    expect(slope(lambda x: variants.truncated_importance_ratio(old, x, **options), sampled), 0.0)


MASKED = [
    ("distillation_advantages", lambda x, y, m: variants.distillation_advantages(x, y, m)),
    ("gae_advantages", lambda x, y, m: torch.cat(variants.gae_advantages(x, y, m))),
    ("kl_penalized_rewards", lambda x, y, m: variants.kl_penalized_rewards(x[:, 0], x, y, m, beta=0.1)),
    ("top_entropy_mask", lambda x, y, m: variants.top_entropy_mask(x, m, 0.5).double())]


@pytest.mark.parametrize("name, function", MASKED)
@pytest.mark.parametrize("junk", [3.0, pytest.param(math.nan, marks=beyond("padding"))])
@given(rows=answers(any_number, any_number))
def test_what_is_at_the_padding_reaches_no_value_and_no_slope(name, function, junk, rows):
    """f(3 or NaN at the padding) = f(0 there), ∂f too, and ∂f/∂padding = 0"""
    expect_nothing_of_the_padding(function, rows, junk)


X = torch.ones(2, 3)


@pytest.mark.errors
@pytest.mark.parametrize("name, argument, arguments, options", [
    ("get_soft_overlong_punishment", "soft_punish_cache", (4, 5), {}),
    ("maxrl_advantages", "rewards", (-X[:, 0], 2), {}),
    ("distillation_advantages", "teacher_logps", (X[0], X, X), {}),
    ("distillation_advantages", "teacher_logps", (X, X, X[0]), {}),
    ("gae_advantages", "values", (X, X[0], X), {}), ("gae_advantages", "values", (X, X, X[0]), {}),
    ("top_entropy_mask", "entropies|completion_mask", (X, X[0], 1), {}),
    ("kl_penalized_rewards", "scores", (X[0], X, X, X), dict(beta=0.1)),
    ("kl_penalized_rewards", "completion_mask", (X[:, 0], X, X, X[0]), dict(beta=0.1)),
    ("truncated_importance_ratio", "sampling_logps|old_logps", (X, X[0]), {})])
def test_a_wrong_shape_is_an_error_that_names_the_argument(name, argument, arguments, options):
    """For example a shape that would broadcast in silence, or c > L"""
    with pytest.raises((AssertionError, ValueError), match=rf"^({argument}): got .+; allowed"):
        getattr(variants, name)(*arguments, **options)
        raise Difference(f"expected  an error that names {argument}, for\n{arguments}\ngot       none", pytrace=False)
