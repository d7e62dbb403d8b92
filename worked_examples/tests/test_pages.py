"""The numbers of the pages that no code of a page asserts, and the right ones of errors_in_published_texts.md.

What test_grpo.py and test_variants.py have in their tables is not here again.
"""

import inspect
import itertools
import math
import re
from pathlib import Path

import numpy
import torch
from pytest import approx

import grpo
from worked_examples import formulas
from worked_examples.scripts import variants

EXAMPLES = Path(grpo.__file__).resolve().parent / "worked_examples"
BY_G = dict(correction=0, eps=0)                                        # a std that divides by G, as on most pages


def f64(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def mask_of(*lengths):
    """(B, T): answers of these lengths."""
    return torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def gradient(loss, x):
    return torch.autograd.grad(loss.sum(), x, retain_graph=True)[0]


def numbers(x):
    """The floats in a tensor, or in a list of numbers and tensors of one."""
    return x.flatten().tolist() if isinstance(x, torch.Tensor) else [float(number) for number in x]


def near(*want, digits=4):
    """These numbers, rounded to so many digits behind the point."""
    return approx(list(want), abs=0.5 * 10**-digits)


def weights(loss_type, *lengths, T_max=10):
    """What a token of each answer weighs in the loss."""
    losses = torch.zeros(len(lengths), max(lengths), dtype=torch.float64, requires_grad=True)
    loss = grpo.aggregate(losses, mask_of(*lengths), loss_type=loss_type, max_completion_length=T_max)
    return gradient(loss, losses)[:, 0].tolist()


def load(name):
    """A run that is drawn in a picture: a column for each metric."""
    path = EXAMPLES / f"pictures/{name}.csv"
    return numpy.genfromtxt(path, delimiter=",", names=True, deletechars="", dtype=None, encoding="utf-8")


# The group of page 1 with answers of 5, 4 and 6 tokens, from guide 004
OLD_LOGPS = f64([-2.1, -1.8, -2.3, -1.9, -2.0, 0], [-2.2, -1.7, -2.4, -2.1, 0, 0], [-2.0, -1.9, -2.2, -1.8, -2.3, -2.1])
LOG_RATIOS = f64([0.1, 0.05, -0.1, 0.08, 0.02, 0], [-0.05, 0.1, -0.08, 0.05, 0, 0],
                 [0.08, -0.05, 0.1, 0.05, -0.08, 0.1])
MASK = mask_of(5, 4, 6)


def test_the_functions_of_page_00():
    """Each function that its table names is in formulas.py and, but for RLOO, in grpo.py"""
    page = (EXAMPLES / "00_grpo_on_one_page.md").read_text(encoding="utf-8")
    names = re.findall(r"`(\w+)`", page.partition("| formula |")[2])
    assert len(names) == 11 and all(callable(getattr(formulas, name)) for name in names)
    assert [name for name in names if not hasattr(grpo, name)] == ["leave_one_out_advantages"]


def test_the_numbers_of_page_01():
    """Means, squares and stds of both groups; the ratios and token losses of the second"""
    r = f64(8.5, 6.2, 4.1)
    mean, std = grpo.group_stats(r, 3, correction=0)
    squares = (r - mean).square()
    assert numbers(r - mean) == near(2.2333, -0.0667, -2.1667)
    assert numbers([*squares, squares.sum()]) == near(4.9878, 0.0044, 4.6944, 9.6867)
    assert numbers([mean, std, grpo.group_stats(r, 3)[1]]) == near(6.2667, 1.7969, 2.2008)
    assert numbers(grpo.group_advantages(f64(0.50, 0.50, 0.51), 3, **BY_G)) == near(-0.7071, -0.7071, 1.4142)

    r = f64(1, 0, 0.5)
    assert numbers([grpo.group_stats(r, 3, correction=correction)[1] for correction in (0, 1)]) == near(0.4082, 0.5)
    assert numbers(grpo.group_advantages(r, 3, eps=0)) == near(1, -1, 0)

    ratio = grpo.importance_ratio(OLD_LOGPS + LOG_RATIOS, OLD_LOGPS, MASK)
    losses = grpo.clipped_surrogate_loss(ratio, f64([1.225], [-1.225], [0])) * MASK
    assert numbers(ratio[1, :4]) == near(0.9512, 1.1052, 0.9231, 1.0513)
    assert numbers(losses[0, :5]) == near(-1.3538, -1.2878, -1.1084, -1.3270, -1.2497)
    assert numbers(losses[1, :4]) == near(1.1653, 1.3538, 1.1308, 1.2878)
    assert numbers(losses.sum(1) / MASK.sum(1)) == near(-1.26537, 1.23443, 0, digits=5)
    assert losses.sum().item() == approx(-1.389126, abs=5e-7)


def test_the_numbers_of_page_02():
    """The policy of two words: forty updates, new answers for every fourth; and p = 0.99"""
    words, mask, A = torch.tensor([[0], [1]]), torch.ones(2, 1), f64(1, -1)
    theta, ratios, losses, clipped = f64(0, 0).requires_grad_(), [], [], []
    for update in range(40):
        logps = theta.log_softmax(0)[words]
        old_logps = logps.detach() if update % 4 == 0 else old_logps
        loss, metrics = grpo.grpo_loss(logps, A, mask, old_logps=old_logps)
        ratios += numbers((logps - old_logps).exp())
        losses.append(loss.item())
        clipped.append(metrics["clip_ratio/region_mean"])
        theta = (theta - 0.2 * gradient(loss, theta)).detach().requires_grad_()
    assert ratios[:8] == near(1, 1, 1.0997, 0.9003, 1.1964, 0.8036, 1.2869, 0.7131)
    assert 1 / (1 + math.exp(-0.2)) == approx(0.54983, abs=5e-6) and clipped[:4] == [0, 0, 0, 1]
    lowest = [min(losses[start : start + 4]) for start in range(0, 40, 4)]
    assert losses[::4] == approx([0] * 10, abs=1e-12) and lowest == sorted(lowest)
    assert [lowest[0], lowest[-1]] == near(-0.200, -0.103, digits=3)
    assert theta.softmax(0)[0].item() == approx(0.99, abs=5e-3)

    theta = f64(math.log(99), 0).requires_grad_()                       # p = 0.99
    loss, _ = grpo.grpo_loss(theta.log_softmax(0)[words], A, mask)
    assert numbers(gradient(loss, theta)) == approx([-0.5, 0.5]) and 2 * 0.99 * 0.01 == approx(0.02, abs=5e-4)


def test_the_numbers_of_page_03():
    """Answer 1 in a second update; one update that jumps over the limit"""
    old_logps = f64([-2.3, -2.0, -2.5, -2.2, -2.4, -2.3, -2.1, -2.6, -2.3, -2.3])
    logps = old_logps + 0.2
    assert numbers([old_logps.sum(), logps.sum()]) == approx([-23, -21])
    assert numbers(grpo.importance_ratio(logps, old_logps, torch.ones(1, 10))) == near(*[1.2214] * 10)
    assert [math.exp(2), math.exp(2) * 1.24] == near(7.39, 9.16, digits=2)              # guide 001: in no token

    theta, words = f64(0, 0).requires_grad_(), torch.tensor([[0], [1]])
    loss, _ = grpo.grpo_loss(theta.log_softmax(0)[words], f64(1, -1), torch.ones(2, 1))
    right = (theta - 1 * gradient(loss, theta)).softmax(0)[0].item()
    assert [right, right / 0.5] == near(0.7311, 1.4621)


def test_the_numbers_of_page_04():
    """The weights under another T_max, three answers against one, rare successes"""
    assert [weights("dr_grpo", 2, other, T_max=other)[0] for other in (8, 2)] == approx([0.0625, 0.25])
    assert [weights("dr_grpo", 2, other)[0] for other in (8, 2)] == approx([0.05, 0.05])

    A, mask = grpo.group_advantages(f64(1, 1, 1, 0), 4, scale_rewards="none"), mask_of(2, 2, 2, 18)
    assert A.tolist() == [0.25, 0.25, 0.25, -0.75]
    losses = [grpo.grpo_loss(torch.zeros(4, 18), A, mask, loss_type=loss_type)[0] for loss_type in ("grpo", "dapo")]
    assert numbers(losses) == approx([0, 0.5])
    for right, divided, undivided in ((1, 2.65, 0.875), (4, 1.0, 0.5)):                 # of 8
        rewards = (torch.arange(8) < right).double()
        assert grpo.group_advantages(rewards, 8, **BY_G)[0].item() == approx(divided, abs=5e-3)
        assert grpo.group_advantages(rewards, 8, scale_rewards="none")[0].item() == undivided


def test_the_numbers_of_page_05():
    """Sums of answers, the weights in microbatches, and three answers without the empty one"""
    losses, mask = torch.arange(32.0).view(4, 8), mask_of(2, 8, 2, 8)
    assert (losses * mask).sum(1).tolist() == [1, 92, 33, 220]
    assert [weights("dapo", 2, 2)[0] / 2, weights("dapo", 8, 8)[0] / 2] == [0.125, 0.03125]
    without = [2 * weights(name, 2, 8)[0] + 8 * weights(name, 2, 8)[1] for name in ("grpo", "dapo", "dr_grpo")]
    assert without == approx([1, 1, 0.5])                               # with it: a table of test_grpo.py


def test_the_numbers_of_page_06():
    """Silent groups: p^G + (1 - p)^G; the demo's first steps and its last ones"""
    def silent(p, G=8):
        return p**G + (1 - p) ** G

    for p, want in ((0.5, [0.5, 0.0078, 0.0000, 0]), (0.9, [0.82, 0.4305, 0.1853, 0.0012]),
                    (0.99, [0.9802, 0.9227, 0.8515, 0.5256])):
        assert [silent(p, G) for G in (2, 8, 16, 64)] == near(*want)
        assert silent(1 - p) == approx(silent(p))
    assert silent(0.5, 16) == approx(0.00003, abs=5e-6)
    assert [silent(0.97), silent(0.15)] == near(0.7837, 0.2725)
    assert [(4 * 0.97 + 5 * 0.15) / 9, (4 * silent(0.97) + 5 * silent(0.15)) / 9] == near(0.5144, 0.4997)

    run = load("tiny_run")
    right, quiet, entropy = run["rewards/accuracy_reward/mean"], run["frac_reward_zero_std"], run["entropy"]
    assert [right[0], quiet[0]] == approx([0.5, 0.5], abs=0.06)         # about half
    assert entropy[1:6].mean() > entropy[0] > entropy[-10:].mean()      # up, then down beyond the start
    assert quiet[1:6].mean() < quiet[0] < quiet[-10:].mean()            # down, then up beyond it
    assert 1 - right[-10:].mean() < quiet[-10:].mean() / 4              # few silent groups can be wrong ones


def test_the_numbers_of_page_07():
    """Four answers, several rewards, the runs of a real model, memory"""
    answers = ["<think>7+5=12,4+8+1=13</think>132", "<think>7+5=12,4+8+0=12</think>122", "132", "<think>132"]
    assert grpo.accuracy_reward(answers, solution=["132"] * 4) == [1, 0, 1, 0]
    assert grpo.think_format_reward(answers) == [1, 1, 0, 0]
    assert grpo.accuracy_reward(["1,000"], solution=["1000.0"]) == [0]
    table = f64([1, 0.8], [1, 0.7], [0, -0.2])
    rewards, doubled = grpo.combine_rewards(table, [0.7, 0.3]), grpo.combine_rewards(table, [1.4, 0.6])
    assert numbers([rewards.mean(), rewards.std(correction=0)]) == near(0.5967, 0.4645)
    first = [grpo.group_advantages(r, 3, scale_rewards="none")[0] for r in (rewards, doubled)]
    assert numbers(first) == near(0.3433, 0.6867)
    assert grpo.group_advantages(f64(1, 1, 0), 3, eps=0)[2].item() == approx(-1.1547, abs=5e-5)

    runs = load("real_model")
    seeds = runs[numpy.char.startswith(runs["run"], "seed")]
    first, last = seeds[seeds["step"] <= 4], seeds[seeds["step"] > 26]
    assert [first["silent"].mean(), last["silent"].mean()] == near(0.44, 0.83, digits=2)
    assert [first["entropy"].mean(), last["entropy"].mean()] == near(1.92, 0.13, digits=2)
    for seed, want in ((42, [0.16, 0.89]), (43, [0.12, 0.84]), (44, [0.09, 0.95])):
        rewards = [part["reward"][part["run"] == f"seed {seed}"].mean() for part in (first, last)]
        assert rewards == near(*want, digits=2)
    too_fast = runs[(runs["run"] == "rate 1e-4") & (runs["step"] >= 4)]
    assert (too_fast["silent"] == 1).all() and (too_fast["grad_norm"] == 0).all()
    for run, step, want in (("hacked", 1, [1.78, 1.06]), ("mended", 1, [1.59, 1.06]),
                            ("hacked", 10, [3.09, 2.31]), ("mended", 10, [1.82, 1.06])):
        line, = runs[(runs["run"] == run) & (runs["step"] == step)]
        assert [line["reward"], line["mentions"]] == near(*want, digits=2)
        if run == "hacked":                                             # `length` is what is left
            assert line["reward"] - line["mentions"] == approx(0.72 if step == 1 else 0.78, abs=5e-3)

    for millions, layers, width, want in (              # width: of the keys of a token in a layer; 4 bytes a number
            (134.515, 30, 3 * 64, [2.2, 0.5, 1.9]), (494.03, 24, 2 * 64, [7.9, 2.0, 1.0]),
            (1543.7, 28, 2 * 128, [24.7, 6.2, 2.3]), (7615.6, 28, 4 * 128, [121.8, 30.5, 4.7])):
        keys_and_values = 64 * 640 * layers * 2 * width * 4 / 1e9
        assert [16 * millions / 1e3, 4 * millions / 1e3, keys_and_values] == near(*want, digits=1)


def test_the_numbers_of_page_08():
    """Two temperatures, and the weight of a sampler that disagrees"""
    logits, tokens = f64([[2, 1, 0]] * 3), torch.tensor([[0, 1, 2]])
    assert [logits[0, 0].exp().sum().item(), math.log(11.1073)] == near(11.1073, 2.4076)
    scored, sampled = [grpo.selective_log_softmax(logits / temperature, tokens) for temperature in (1, 0.5)]
    ratio = grpo.importance_ratio(scored, sampled, torch.ones(1, 3))
    assert numbers(ratio[0, :2]) == near(0.767, 2.086, digits=3)
    assert (scored - sampled)[0, 1].item() == approx(0.735, abs=5e-4)

    weight = variants.truncated_importance_ratio(f64(-1, -3), f64(-1.1, -5))
    assert numbers(weight) == near(1.1052, 2)


def test_the_numbers_of_page_09():
    """Means and spreads of k1, k2, k3; a token that is almost lost; the KL in the reward or in the loss"""
    pi, ref, lost = f64(0.5, 0.25, 0.25), f64(0.25, 0.25, 0.5), f64(0.6, 0.399, 0.001)
    assert (pi @ (pi / ref).log()).item() == approx(0.1733, abs=5e-5)
    for p, estimator, std, digits in ((pi, "k1", 0.5747, 4), (pi, "k2", 0.1040, 4), (pi, "k3", 0.1103, 4),
                                      (lost, "k1", 0.30, 2), (lost, "k3", 15.6, 1)):
        k = grpo.kl_estimate(p.log(), ref.log(), estimator=estimator)
        assert numbers([(p @ (k - p @ k).square()).sqrt()]) == near(std, digits=digits), (estimator, p)
    for estimator, want in (("k2", -0.007), ("k3", -0.499)):
        logits = lost.log().requires_grad_()
        k = grpo.kl_estimate(logits.log_softmax(0), ref.log(), estimator=estimator)
        assert gradient(lost @ k, logits)[2].item() == approx(want, abs=5e-4)           # the weights are constants

    k1, mask, scores = f64([0.1, -0.2, 0.3], [0, 0, 0]), torch.ones(2, 3), f64(1, 1)
    in_reward = variants.kl_penalized_rewards(scores, k1, 0 * k1, mask, beta=0.1).sum(1)
    assert numbers([*in_reward, in_reward.mean()]) == approx([0.98, 1, 0.99])
    assert in_reward.std().item() == approx(0.01414, abs=5e-6)
    assert numbers(grpo.group_advantages(in_reward, 2, eps=0)) == near(-0.7071, 0.7071)
    k3 = grpo.kl_estimate(k1, 0 * k1)[0]
    assert numbers([*k3, k3.mean()]) == near(0.0048, 0.0214, 0.0408, 0.0224)
    loss, _ = grpo.grpo_loss(k1, 0 * scores, mask, ref_logps=0 * k1, beta=0.1, loss_type="grpo")
    assert loss.item() == approx(0.00112, abs=5e-6)


# Page 10 ----------------------------------------------------------------------------------------------------

R, MASK_10, STILL = f64(1, 1, 0, 0), mask_of(3, 2, 3, 1), torch.zeros(4, 3, dtype=torch.float64)


def moved(*log_ratios):
    """The policy has moved on answer 1."""
    return torch.cat([f64(log_ratios), STILL[1:]])


def pushes(A, log_ratios, **options):
    """On the three tokens of answer 1: -∂loss/∂log π."""
    logps = log_ratios.clone().requires_grad_()
    loss, _ = grpo.grpo_loss(logps, A, MASK_10, old_logps=STILL, **options)
    return -gradient(loss, logps)[0]


def test_the_numbers_of_page_10():
    """One batch: the push of each method on answer 1; then GSPO's section and DAPO's"""
    A, drift = grpo.group_advantages(R, 4, **BY_G), moved(0, 0.23, 0.4)
    assert A.tolist() == [1, 1, -1, -1] and numbers(drift.exp()[0]) == near(1, 1.2586, 1.4918)
    grades = f64([1, 1, 1], [1, 1, math.nan], [1, 1, 0], [0, math.nan, math.nan])
    by_step = grpo.process_advantages(grades, torch.arange(3).expand(4, 3), MASK_10, 4, **BY_G)
    token_rewards = variants.kl_penalized_rewards(R, STILL, STILL, MASK_10, beta=0)
    by_critic, _ = variants.gae_advantages(token_rewards, moved(0.6, 0.7, 0.9), MASK_10, lam=1)
    of_others = variants.leave_one_out_advantages(R, 4)
    centred = grpo.group_advantages(R, 4, scale_rewards="none")
    clip, dapo, cispo = dict(loss_type="grpo"), dict(epsilon_high=0.28), dict(policy_loss="cispo")
    gspo = dict(importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4, loss_type="grpo")
    sapo, per_answer = dict(policy_loss="sapo", loss_type="grpo"), dict(loss_type="dr_grpo", max_completion_length=1)
    dr_grpo = dict(loss_type="dr_grpo", max_completion_length=3)
    for method, push, want in (
            ("process supervision", pushes(by_step, drift, **clip), 0.1336),
            ("PPO", pushes(by_critic, drift, **clip), 0.0333), ("REINFORCE", pushes(R, STILL, **per_answer), 0.75),
            ("RLOO", pushes(of_others, STILL, **per_answer), 0.5),
            ("Dr. GRPO", pushes(centred, drift, **dr_grpo), 0.0417),
            ("GSPO", pushes(A, drift, **gspo), 0), ("SAPO", pushes(A, drift, **sapo), 0.3036)):
        assert numbers([push.sum()]) == near(want), method
    assert by_step[0, 0].item() == approx(1.6036, abs=5e-5)
    assert numbers(12 * pushes(A, drift, **sapo)) == near(1, 1.2378, 1.4051)
    methods = (clip, gspo, sapo, dapo, cispo)
    assert [pushes(A, drift, **options).count_nonzero() for options in methods] == [1, 0, 3, 2, 3]
    on_policy = [pushes(A, STILL, **options).sum().item() for options in methods]
    assert on_policy == approx([0.25, 0.25, 0.25, 3 / 9, 3 / 9])

    cancels, sequence = moved(0, 0.3, -0.5), dict(importance_sampling_level="sequence")
    ratios = [grpo.importance_ratio(log_ratios, STILL, MASK_10, **sequence)[0] for log_ratios in (drift, cancels)]
    assert numbers([*ratios, math.exp(0.3)]) == near(1.2337, 0.9355, 1.3499)
    assert numbers(pushes(A, cancels, **gspo)) == near(0.0780, 0.0780, 0.0780) and pushes(A, cancels, **clip)[1] == 0
    logps = torch.cat([drift, STILL]).requires_grad_()                  # one more group, silent, of the same lengths
    A = grpo.group_advantages(f64(1, 1, 0, 0, 1, 1, 1, 1), 4, **BY_G)
    loss, _ = grpo.grpo_loss(logps, A, MASK_10.repeat(2, 1), old_logps=torch.zeros_like(logps), **dapo)
    assert -gradient(loss, logps)[0].sum().item() == approx(0.1255, abs=5e-5)


def test_the_numbers_of_page_10_on_steps_and_critics():
    """The grades of 47 + 85, more steps, and GAE"""
    mean, std = grpo.group_stats(f64(1, 1, 1, 1, 0), 5, correction=0)
    assert numbers([mean, std, (1 - mean) / std, (0 - mean) / std]) == approx([0.8, 0.4, 0.5, -2])
    for grades, ends, want in (([[1, 1, 1, 1], [1, 0, math.nan, math.nan]], [[0, 1, 2, 3], [1, 3, 0, 0]], 1.7889),
                               ([[1, 1], [1, 0]], [[1, 3], [1, 3]], 1.1547)):
        A = grpo.process_advantages(f64(*grades), torch.tensor(ends), torch.ones(2, 4), 2, **BY_G)
        assert A[0, 0].item() == approx(want, abs=5e-5)
    for lam, want in ((0, [0.1, 0.2, 0.1]), (1, [0.4, 0.3, 0.1])):
        A, _ = variants.gae_advantages(f64([0, 0, 1]), f64([0.6, 0.7, 0.9]), torch.ones(1, 3), lam=lam)
        assert A[0].tolist() == approx(want)
    rewards, ones = f64([0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]), torch.ones(4, 3)
    A, _ = variants.gae_advantages(rewards, 0.5 * ones, ones, lam=1)    # a critic that guesses the mean
    assert A.tolist() == [[0.5] * 3, [0.5] * 3, [-0.5] * 3, [-0.5] * 3]


def test_the_numbers_of_page_10_on_baselines():
    """Mean and variance of the gradient over all 3^G groups of a policy with three answers: nothing is simulated"""
    p, r = f64(0.5, 0.3, 0.2), f64(1, 0, 0.5)
    true_gradient = p * (r - p @ r)
    assert (p @ r).item() == approx(0.6)

    def mean_and_variance(advantages, G):
        gradients, chances = [], []
        for answers in itertools.product(range(3), repeat=G):
            answers, theta = list(answers), p.log().requires_grad_()
            logps = theta.log_softmax(0)[answers].unsqueeze(1)          # (G, 1)
            loss, _ = grpo.grpo_loss(logps, advantages(r[answers], G), torch.ones_like(logps), loss_type="grpo")
            gradients.append(-gradient(loss, theta))
            chances.append(p[answers].prod())
        chances, gradients = torch.stack(chances), torch.stack(gradients)
        mean = chances @ gradients
        return mean, (chances @ (gradients - mean).square().sum(1)).item()

    for b, want in ((0, 0.1662), (0.6, 0.0438), (10, 56.4062)):
        mean, variance = mean_and_variance(lambda rewards, G: rewards - b, 1)
        assert torch.allclose(mean, true_gradient) and variance == approx(want, abs=5e-5)
    for G, of_others, without in ((2, 0.1172, 0.0831), (4, 0.0268, 0.0416)):
        mean, variance = mean_and_variance(variants.leave_one_out_advantages, G)
        assert torch.allclose(mean, true_gradient) and variance == approx(of_others, abs=5e-5)
        assert mean_and_variance(lambda rewards, G: rewards, G)[1] == approx(without, abs=5e-5)


def test_the_eight_more_of_page_10():
    """The lines of the table against each method's own definition: two answers of three tokens, A = 1 and -1"""
    A, mask = f64(1, -1), torch.ones(2, 3)
    A_it = A.unsqueeze(1).expand(2, 3)                                  # (B, T)
    old_logps = f64([0.5, 0.8, 0.01], [0.5, 0.2, 0.6]).log()
    logps = (old_logps + f64([0.1, 0.17, 0.9], [-0.1, 0.3, -0.6])).requires_grad_()

    def loss_of(advantages, old_logps=old_logps, mask=mask, **options):
        return grpo.grpo_loss(logps, advantages, mask, old_logps=old_logps, **options)[0]

    change = logps.detach().exp() - old_logps.exp()                     # π - π_old
    dppo = loss_of(A_it * (change * A_it.sign() <= 0.1), epsilon_low=1, epsilon_high=math.inf)
    up_grpo = loss_of(A, torch.where(A_it > 0, logps.detach(), old_logps), loss_type="grpo")
    wapo = loss_of(A.clamp(min=0), loss_type="dr_grpo", max_completion_length=3)
    log_ratio = torch.where(A_it > 0, (logps - old_logps).clamp(max=0.4), (logps - old_logps).clamp(min=-0.4))
    s = grpo.importance_ratio(old_logps + log_ratio, old_logps, mask, importance_sampling_level="sequence")     # (B, 1)
    gmpo = grpo.aggregate(-s * A.unsqueeze(1), mask, loss_type="grpo")
    up, down = math.exp((0.1 + 0.17 + 0.4) / 3), -math.exp((-0.1 + 0.3 - 0.4) / 3)
    for method, loss, want in (("DPPO", dppo, [1.1052, 0, 2.4596, -0.9048, -1.3499, 0]),
                               ("UP-GRPO", up_grpo, [1, 1, 1, -0.9048, -1.3499, 0]),
                               ("WAPO", wapo, [1.1052, 1.1853, 0, 0, 0, 0]),
                               ("GMPO", gmpo, [up, up, 0, down, down, 0])):
        assert numbers(-6 * gradient(loss, logps)) == near(*want), method               # times 6 tokens

    four_A, s = f64(1, 1, -1, -1), f64([0.9], [0.6], [0.9], [0.6])      # DeepSeek-V3.2: -log 0.6 = 0.51
    assert (four_A * ((four_A >= 0) | (-s[:, 0].log() <= 0.25))).tolist() == [1, 1, -1, 0]
    gspo = dict(mask=mask_of(1, 3), importance_sampling_level="sequence", max_completion_length=1)
    luspo, times_length = loss_of(A, loss_type="dr_grpo", **gspo), loss_of(A * f64(1, 3), loss_type="grpo", **gspo)
    assert luspo.item() == approx(times_length.item())
    r = f64(1, 0, 0, 0)                                                 # MaxRL: (1 - ¼)/¼ and -1
    maxrl = grpo.group_advantages(r, 4, scale_rewards="none") / grpo.group_stats(r, 4)[0]
    assert maxrl.tolist() == [3, -1, -1, -1]


# Page 11 and the other pages --------------------------------------------------------------------------------

def test_the_numbers_of_page_11():
    """A good run and a collapse: the table, and what the text says of the collapse's steps"""
    good, collapse, ten = load("tiny_run"), load("collapsed_run"), load("tiny_seeds")
    page = (EXAMPLES / "11_reading_a_run.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| (-?\d.*) \|$", page, re.M)
    assert len(rows) == 6
    for name, cells in rows:
        means = [good[name][:10].mean(), good[name][-10:].mean(), collapse[name][-10:].mean()]
        assert [float(cell) for cell in cells.split(" | ")] == approx(means, abs=6e-4), name
    right, entropy = collapse["rewards/accuracy_reward/mean"], collapse["entropy"]
    assert right[:3].tolist() == near(0.45, 0.20, 0.07, digits=2) and right[3:].max() < 0.08
    assert [entropy[0], entropy[10:].mean()] == [approx(0.03, abs=5e-3), approx(0.3, abs=0.05)]
    assert (collapse["grad_norm"] == 0).sum() == (collapse["frac_reward_zero_std"] == 1).sum() == 14
    assert len(collapse) == 60 and (good["grad_norm"] > 0).all()
    assert abs(good["loss"]).max() < 0.06 and abs(collapse["loss"]).max() < 0.06
    first, last = ten[ten["step"] <= 10], ten[ten["step"] > 50]         # of ten seeds
    for name, rises in (("rewards/accuracy_reward/mean", True), ("entropy", False), ("frac_reward_zero_std", True)):
        assert (last[name].mean() > first[name].mean()) == rises


def test_the_numbers_of_check_your_own():
    """√(3/2), the factor of a std that divides by G"""
    r = f64(8.5, 6.2, 4.1)
    factors = grpo.group_advantages(r, 3, **BY_G) / grpo.group_advantages(r, 3)
    assert numbers([*factors, math.sqrt(3 / 2)]) == near(*[1.225] * 4, digits=3)


def test_the_errors_in_published_texts_000_to_003():
    """Guide 001's numbers (its losses: test_grpo.py); advantages need no log-probs"""
    assert "Group Relative Policy Optimization" in grpo.__doc__
    r = f64(8.5, 6.2, 4.1)
    assert grpo.group_stats(r, 3, correction=0)[1].square().item() == approx(3.2289, abs=5e-5)
    assert numbers(grpo.group_advantages(r, 3)) == near(1.01476, -0.03029, -0.98446, digits=5)
    A = grpo.broadcast_advantages(f64(1.24, -0.04, -1.21), mask_of(10, 8, 12))
    assert A.sum(1).tolist() == approx([10 * 1.24, 8 * -0.04, 12 * -1.21])
    assert not any("logps" in name for name in inspect.signature(grpo.group_advantages).parameters)


def test_the_errors_in_published_texts_004():
    """The rows of the page, from padding to denominators"""
    assert math.isnan(-math.inf - -math.inf)                            # padding: a mask is safe
    ones = torch.ones(3, 6)
    assert (ones * ones.unsqueeze(1)).shape == (3, 3, 6)                # unsqueeze(1) of a (B, T): wrong in silence
    ratio = grpo.importance_ratio(OLD_LOGPS + LOG_RATIOS, OLD_LOGPS, MASK)
    assert [ratio.min().item(), ratio.max().item()] == near(0.9048, 1.1052)
    assert torch.equal(grpo.clip_ratio(ratio), ratio)
    loss = grpo.clipped_surrogate_loss(f64([1.5]), f64([1.225])).item()
    assert [loss, 1.225 * 1.5] == approx([-1.47, 1.8375])
    assert sum([-0.3, 0.2, 0]) / 3 == approx(-0.0333, abs=5e-5)
    rho = torch.linspace(0, 3, 301).unsqueeze(1)
    assert grpo.clipped_surrogate_loss(rho, torch.full_like(rho, -0.5)).min().item() == approx(0.4)
    losses = f64(2, -1, 0.5).requires_grad_()
    losses.backward(gradient=torch.full_like(losses, 1 / 3))            # no scalar, and the gradient of a mean
    assert losses.grad.tolist() == approx([1 / 3] * 3)
    for loss_type, want in (("grpo", [1 / 3, 1 / 3, 1 / 3]), ("dapo", [5 / 15, 4 / 15, 6 / 15]),
                            ("dr_grpo", [5 / 18, 4 / 18, 6 / 18])):
        of_tokens = weights(loss_type, 5, 4, 6, T_max=6)
        assert [5 * of_tokens[0], 4 * of_tokens[1], 6 * of_tokens[2]] == approx(want)
