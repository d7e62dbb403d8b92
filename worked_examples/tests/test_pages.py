"""The numbers of the pages that no code of a page asserts, and the right ones of errors_in_published_texts.md.

What test_grpo.py and test_variants.py have in their tables is not here again.
"""

import itertools
import math
import re
import types
from pathlib import Path

import numpy
import torch
from pytest import approx

import grpo
from worked_examples import formulas
from worked_examples.course import spot_the_bug
from worked_examples.scripts import variants

EXAMPLES = Path(grpo.__file__).resolve().parent / "worked_examples"
BY_G = dict(correction=0, eps=0)                                        # a std that divides by G, as on most pages
UNSCALED = dict(scale_rewards="none")


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


def test_the_functions_of_page_00():
    """Each function that its table names is in formulas.py and, but for RLOO, in grpo.py"""
    page = (EXAMPLES / "00_grpo_on_one_page.md").read_text(encoding="utf-8")
    names = re.findall(r"`(\w+)`", page.partition("| formula |")[2])
    assert len(names) == 11 and all(callable(getattr(formulas, name)) for name in names)
    assert [name for name in names if not hasattr(grpo, name)] == ["leave_one_out_advantages"]


def test_the_numbers_of_page_01():
    """Guide 001's group and its stds; guide 004's group, with its ratios and token losses"""
    r = f64(8.5, 6.2, 4.1)
    mean, std = grpo.group_stats(r, 3, correction=0)
    squares = (r - mean).square()
    assert numbers(r - mean) == near(2.2333, -0.0667, -2.1667)
    assert numbers([*squares, squares.sum()]) == near(4.9878, 0.0044, 4.6944, 9.6867)
    assert numbers([mean, std, std.square(), grpo.group_stats(r, 3)[1]]) == near(6.2667, 1.7969, 3.2289, 2.2008)
    assert numbers(grpo.group_advantages(r, 3)) == near(1.01476, -0.03029, -0.98446, digits=5)
    factors = grpo.group_advantages(r, 3, **BY_G) / grpo.group_advantages(r, 3)         # of check_your_own/README.md
    assert numbers([*factors, math.sqrt(3 / 2)]) == near(*[1.225] * 4, digits=3)
    assert numbers(grpo.group_advantages(f64(0.50, 0.50, 0.51), 3, **BY_G)) == near(-0.7071, -0.7071, 1.4142)

    r = f64(1, 0, 0.5)
    assert numbers([grpo.group_stats(r, 3, correction=correction)[1] for correction in (0, 1)]) == near(0.4082, 0.5)
    assert numbers(grpo.group_advantages(r, 3, eps=0)) == near(1, -1, 0)
    log_ratios = f64([0.1, 0.05, -0.1, 0.08, 0.02, 0], [-0.05, 0.1, -0.08, 0.05, 0, 0],
                     [0.08, -0.05, 0.1, 0.05, -0.08, 0.1])
    mask = mask_of(5, 4, 6)
    ratio = grpo.importance_ratio(log_ratios, torch.zeros_like(log_ratios), mask)
    losses = grpo.clipped_surrogate_loss(ratio, f64([1.225], [-1.225], [0])) * mask
    assert numbers(ratio[1, :4]) == near(0.9512, 1.1052, 0.9231, 1.0513)
    assert numbers([ratio.min(), ratio.max()]) == near(0.9048, 1.1052) and torch.equal(grpo.clip_ratio(ratio), ratio)
    assert numbers(losses[0, :5]) == near(-1.3538, -1.2878, -1.1084, -1.3270, -1.2497)
    assert numbers(losses[1, :4]) == near(1.1653, 1.3538, 1.1308, 1.2878)
    assert numbers(losses.sum(1) / mask.sum(1)) == near(-1.26537, 1.23443, 0, digits=5)


def test_the_numbers_of_page_02():
    """The policy of two words: forty updates, new answers for every fourth; and p = 0.99"""
    words, mask, A = torch.tensor([[0], [1]]), torch.ones(2, 1), f64(1, -1)
    theta, ratios, losses = f64(0, 0).requires_grad_(), [], []
    for update in range(40):
        logps = theta.log_softmax(0)[words]
        old_logps = logps.detach() if update % 4 == 0 else old_logps
        loss, _ = grpo.grpo_loss(logps, A, mask, old_logps=old_logps)
        ratios += numbers((logps - old_logps).exp())
        losses.append(loss.item())
        theta = (theta - 0.2 * gradient(loss, theta)).detach().requires_grad_()
    assert ratios[:8] == near(1, 1, 1.0997, 0.9003, 1.1964, 0.8036, 1.2869, 0.7131)
    assert [1 / (1 + math.exp(-0.2))] == near(0.54983, digits=5)
    lowest = [min(losses[start : start + 4]) for start in range(0, 40, 4)]
    assert [lowest[0], lowest[-1]] == near(-0.200, -0.103, digits=3) and lowest == sorted(lowest)
    assert numbers(theta.softmax(0)) == near(0.99, 0.01, digits=2)

    theta = f64(math.log(99), 0).requires_grad_()                       # p = 0.99
    loss, _ = grpo.grpo_loss(theta.log_softmax(0)[words], A, mask)
    assert numbers(gradient(loss, theta)) == approx([-0.5, 0.5]) and [2 * 0.99 * 0.01] == near(0.02, digits=3)


def test_the_numbers_of_page_03():
    """One update that jumps over the limit; guide 001's sums and its ratio of the whole answer, in no token"""
    theta, words = f64(0, 0).requires_grad_(), torch.tensor([[0], [1]])
    loss, _ = grpo.grpo_loss(theta.log_softmax(0)[words], f64(1, -1), torch.ones(2, 1))
    right = (theta - 1 * gradient(loss, theta)).softmax(0)[0].item()
    assert [right, right / 0.5] == near(0.7311, 1.4621)
    assert [math.exp(-21 + 23), math.exp(10 * 0.2), math.exp(2) * 1.24] == near(7.39, 7.39, 9.16, digits=2)


def test_the_numbers_of_page_04():
    """The weights under another T_max, three answers against one, rare successes"""
    of_short = [weights("dr_grpo", 2, other, T_max=T_max)[0] for other, T_max in ((8, 8), (2, 2), (8, 10), (2, 10))]
    assert of_short == approx([0.0625, 0.25, 0.05, 0.05])
    A, mask = grpo.group_advantages(f64(1, 1, 1, 0), 4, **UNSCALED), mask_of(2, 2, 2, 18)
    losses = [grpo.grpo_loss(torch.zeros(4, 18), A, mask, loss_type=loss_type)[0] for loss_type in ("grpo", "dapo")]
    assert A.tolist() == [0.25, 0.25, 0.25, -0.75] and numbers(losses) == approx([0, 0.5])
    for right, want in ((1, [2.65, 0.875]), (4, [1.0, 0.5])):           # of 8; divided by the std or not
        rewards = (torch.arange(8) < right).double()
        assert [grpo.group_advantages(rewards, 8, **by)[0].item() for by in (BY_G, UNSCALED)] == near(*want, digits=2)


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
    assert [silent(0.5, 16)] == near(0.00003, digits=5)
    assert [silent(0.97), silent(0.15)] == near(0.7837, 0.2725)
    assert [(4 * 0.97 + 5 * 0.15) / 9, (4 * silent(0.97) + 5 * silent(0.15)) / 9] == near(0.5144, 0.4997)

    run = load("tiny_run")
    right, quiet, entropy = run["rewards/accuracy_reward/mean"], run["frac_reward_zero_std"], run["entropy"]
    assert [right[0], quiet[0]] == approx([0.5, 0.5], abs=0.06)         # about half
    assert entropy[1:6].mean() > entropy[0] > entropy[-10:].mean()      # up, then down beyond the start
    assert quiet[1:6].mean() < quiet[0] < quiet[-10:].mean()            # down, then up beyond it
    assert 1 - right[-10:].mean() < quiet[-10:].mean() / 4              # few silent groups can be wrong ones


def test_the_numbers_of_page_07():
    """Several rewards, the runs of a real model, memory"""
    rewards = f64(0.94, 0.91, -0.06)
    assert numbers([rewards.mean(), rewards.std(correction=0)]) == near(0.5967, 0.4645)
    first = [grpo.group_advantages(r, 3, **UNSCALED)[0] for r in (rewards, 2 * rewards)]
    assert numbers(first) == near(0.3433, 0.6867)
    assert numbers(grpo.group_advantages(f64(1, 1, 0), 3, eps=0)[2:]) == near(-1.1547)

    runs = load("real_model")
    seeds = runs[numpy.char.startswith(runs["run"], "seed")]
    first, last = seeds[seeds["step"] <= 4], seeds[seeds["step"] > 26]
    for name, want in (("silent", [0.44, 0.83]), ("entropy", [1.92, 0.13])):
        assert [first[name].mean(), last[name].mean()] == near(*want, digits=2)
    for seed, want in ((42, [0.16, 0.89]), (43, [0.12, 0.84]), (44, [0.09, 0.95])):
        rewards = [part["reward"][part["run"] == f"seed {seed}"].mean() for part in (first, last)]
        assert rewards == near(*want, digits=2)
    too_fast = runs[(runs["run"] == "rate 1e-4") & (runs["step"] >= 4)]
    assert (too_fast["silent"] == 1).all() and (too_fast["grad_norm"] == 0).all()
    for run, step, want in (("hacked", 1, [1.78, 1.06, 0.72]), ("mended", 1, [1.59, 1.06]),
                            ("hacked", 10, [3.09, 2.31, 0.78]), ("mended", 10, [1.82, 1.06])):
        line, = runs[(runs["run"] == run) & (runs["step"] == step)]
        reward, mentions = line["reward"], line["mentions"]             # if each mention counts, `length` is the rest
        assert [reward, mentions, reward - mentions][: len(want)] == near(*want, digits=2)

    for millions, layers, width, want in (              # width: of the keys of a token in a layer; 4 bytes a number
            (134.515, 30, 3 * 64, [2.2, 0.5, 1.9]), (494.03, 24, 2 * 64, [7.9, 2.0, 1.0]),
            (1543.7, 28, 2 * 128, [24.7, 6.2, 2.3]), (7615.6, 28, 4 * 128, [121.8, 30.5, 4.7])):
        keys_and_values = 64 * 640 * layers * 2 * width * 4 / 1e9
        assert [16 * millions / 1e3, 4 * millions / 1e3, keys_and_values] == near(*want, digits=1)


def test_the_numbers_of_page_08():
    """The denominator of the softmax, two temperatures, and the weight of a sampler that disagrees"""
    logits = f64(2, 1, 0)
    assert numbers([logits.exp().sum(), logits.logsumexp(0)]) == near(11.1073, 2.4076)
    too_likely = logits.log_softmax(0) - (logits / 0.5).log_softmax(0)
    assert numbers(too_likely.exp()[:2]) == near(0.767, 2.086, digits=3)
    assert numbers(too_likely[1:2]) == near(0.735, digits=3)
    assert numbers(variants.truncated_importance_ratio(f64(-1, -3), f64(-1.1, -5))) == near(1.1052, 2)


def test_the_numbers_of_page_09():
    """Spreads of k1, k2, k3; a token that is almost lost; the KL in the reward or in the loss"""
    pi, ref, lost = f64(0.5, 0.25, 0.25), f64(0.25, 0.25, 0.5), f64(0.6, 0.399, 0.001)
    for p, estimator, std, digits in ((pi, "k1", 0.5747, 4), (pi, "k2", 0.1040, 4), (pi, "k3", 0.1103, 4),
                                      (lost, "k1", 0.30, 2), (lost, "k3", 15.6, 1)):
        k = grpo.kl_estimate(p.log(), ref.log(), estimator=estimator)
        assert numbers([(p @ (k - p @ k).square()).sqrt()]) == near(std, digits=digits), (estimator, p)
    for estimator, want in (("k2", -0.007), ("k3", -0.499)):
        logits = lost.log().requires_grad_()
        k = grpo.kl_estimate(logits.log_softmax(0), ref.log(), estimator=estimator)
        assert numbers(gradient(lost @ k, logits)[2:]) == near(want, digits=3)          # the weights are constants

    k1, mask, scores = f64([0.1, -0.2, 0.3], [0, 0, 0]), torch.ones(2, 3), f64(1, 1)
    in_reward = variants.kl_penalized_rewards(scores, k1, 0 * k1, mask, beta=0.1).sum(1)
    assert numbers([*in_reward, in_reward.mean(), in_reward.std()]) == near(0.98, 1, 0.99, 0.01414, digits=5)
    assert numbers(grpo.group_advantages(in_reward, 2, eps=0)) == near(-0.7071, 0.7071)
    k3 = grpo.kl_estimate(k1, 0 * k1)[0]
    assert numbers([*k3, k3.mean()]) == near(0.0048, 0.0214, 0.0408, 0.0224)
    loss, _ = grpo.grpo_loss(k1, 0 * scores, mask, ref_logps=0 * k1, beta=0.1, loss_type="grpo")
    assert numbers([loss]) == near(0.00112, digits=5)


# Page 10 ----------------------------------------------------------------------------------------------------

R, MASK_10, STILL = f64(1, 1, 0, 0), mask_of(3, 2, 3, 1), torch.zeros(4, 3, dtype=torch.float64)


def moved(*log_ratios):
    """The policy has moved on answer 1."""
    return torch.cat([f64(log_ratios), STILL[1:]])


def pushes(A, log_ratios, mask=MASK_10, **options):
    """On the three tokens of answer 1: -∂loss/∂log π."""
    logps = log_ratios.clone().requires_grad_()
    loss, _ = grpo.grpo_loss(logps, A, mask, old_logps=torch.zeros_like(logps), **options)
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
    centred = grpo.group_advantages(R, 4, **UNSCALED)
    clip, dapo, cispo = dict(loss_type="grpo"), dict(epsilon_high=0.28), dict(policy_loss="cispo")
    sequence, narrow = dict(importance_sampling_level="sequence"), dict(epsilon_low=3e-4, epsilon_high=4e-4)
    gspo, sapo = clip | sequence | narrow, clip | dict(policy_loss="sapo")
    per_answer, dr_grpo = [dict(loss_type="dr_grpo", max_completion_length=T_max) for T_max in (1, 3)]
    for method, push, want in (
            ("process supervision", pushes(by_step, drift, **clip), 0.1336),
            ("PPO", pushes(by_critic, drift, **clip), 0.0333), ("REINFORCE", pushes(R, STILL, **per_answer), 0.75),
            ("RLOO", pushes(of_others, STILL, **per_answer), 0.5),
            ("Dr. GRPO", pushes(centred, drift, **dr_grpo), 0.0417),
            ("GSPO", pushes(A, drift, **gspo), 0), ("SAPO", pushes(A, drift, **sapo), 0.3036)):
        assert numbers([push.sum()]) == near(want), method
    assert numbers([by_step[0, 0], *12 * pushes(A, drift, **sapo)]) == near(1.6036, 1, 1.2378, 1.4051)
    for options, pushed, on_policy in ((clip, 1, 0.25), (gspo, 0, 0.25), (sapo, 3, 0.25), (dapo, 2, 3 / 9),
                                       (cispo, 3, 3 / 9)):
        assert pushes(A, drift, **options).count_nonzero() == pushed, options
        assert numbers([pushes(A, STILL, **options).sum()]) == near(on_policy), options

    cancels = moved(0, 0.3, -0.5)
    ratios = [grpo.importance_ratio(log_ratios, STILL, MASK_10, **sequence)[0] for log_ratios in (drift, cancels)]
    assert numbers([*ratios, math.exp(0.3)]) == near(1.2337, 0.9355, 1.3499)
    assert numbers(pushes(A, cancels, **gspo)) == near(0.0780, 0.0780, 0.0780) and pushes(A, cancels, **clip)[1] == 0
    A = grpo.group_advantages(f64(1, 1, 0, 0, 1, 1, 1, 1), 4, **BY_G)   # one more group, silent, of the same lengths
    assert numbers([pushes(A, torch.cat([drift, STILL]), MASK_10.repeat(2, 1), **dapo).sum()]) == near(0.1255)


def test_the_numbers_of_page_10_on_steps_and_critics():
    """The grades of 47 + 85, more steps, and a critic that guesses the group's mean"""
    assert numbers(grpo.group_stats(f64(1, 1, 1, 1, 0), 5, correction=0)) == near(0.8, 0.4)
    for grades, ends, want in (([[1, 1, 1, 1], [1, 0, math.nan, math.nan]], [[0, 1, 2, 3], [1, 3, 0, 0]], 1.7889),
                               ([[1, 1], [1, 0]], [[1, 3], [1, 3]], 1.1547)):
        A = grpo.process_advantages(f64(*grades), torch.tensor(ends), torch.ones(2, 4), 2, **BY_G)
        assert numbers([A[0, 0]]) == near(want)
    rewards, ones = f64([0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0]), torch.ones(4, 3)
    A, _ = variants.gae_advantages(rewards, 0.5 * ones, ones, lam=1)
    assert A.tolist() == [[0.5] * 3, [0.5] * 3, [-0.5] * 3, [-0.5] * 3]


def test_the_numbers_of_page_10_on_baselines():
    """Mean and variance of the gradient over all 3^G groups of a policy with three answers: nothing is simulated"""
    p, r = f64(0.5, 0.3, 0.2), f64(1, 0, 0.5)
    true_gradient = p * (r - p @ r)
    assert numbers([p @ r]) == near(0.6)

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
        return mean, chances @ (gradients - mean).square().sum(1)

    for b, want in ((0, 0.1662), (0.6, 0.0438), (10, 56.4062)):
        mean, variance = mean_and_variance(lambda rewards, G: rewards - b, 1)
        assert torch.allclose(mean, true_gradient) and numbers([variance]) == near(want)
    for G, of_others, without in ((2, 0.1172, 0.0831), (4, 0.0268, 0.0416)):
        mean, variance = mean_and_variance(variants.leave_one_out_advantages, G)
        assert torch.allclose(mean, true_gradient) and numbers([variance]) == near(of_others)
        assert numbers([mean_and_variance(lambda rewards, G: rewards, G)[1]]) == near(without)


def test_four_of_the_eight_more_of_page_10():
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
    log_ratio = torch.where(A_it > 0, (logps - old_logps).clamp(max=0.4), (logps - old_logps).clamp(min=-0.4))
    s = grpo.importance_ratio(old_logps + log_ratio, old_logps, mask, importance_sampling_level="sequence")     # (B, 1)
    gmpo = grpo.aggregate(-s * A.unsqueeze(1), mask, loss_type="grpo")
    up, down = math.exp((0.1 + 0.17 + 0.4) / 3), -math.exp((-0.1 + 0.3 - 0.4) / 3)
    for method, loss, want in (("DPPO", dppo, [1.1052, 0, 2.4596, -0.9048, -1.3499, 0]),
                               ("UP-GRPO", up_grpo, [1, 1, 1, -0.9048, -1.3499, 0]),
                               ("GMPO", gmpo, [up, up, 0, down, down, 0])):
        assert numbers(-6 * gradient(loss, logps)) == near(*want), method               # times 6 tokens

    gspo = dict(mask=mask_of(1, 3), importance_sampling_level="sequence", max_completion_length=1)
    luspo, times_length = loss_of(A, loss_type="dr_grpo", **gspo), loss_of(A * f64(1, 3), loss_type="grpo", **gspo)
    assert luspo.item() == approx(times_length.item())


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


def test_the_numbers_of_exhibit_20():
    """Two groups of twelve rewards of 0.4, in grpo.py with the exhibit's bug"""
    broken, r = types.ModuleType("broken"), torch.full((24,), 0.4)
    exec(spot_the_bug.patched(20), vars(broken))
    assert (broken.group_stats(r, 12)[0] - r[0]).tolist() == approx([6e-8] * 2, abs=5e-9)
    assert broken.group_advantages(r, 12).tolist() == approx([-6] * 24, abs=0.5)


def test_the_errors_in_published_texts():
    """The rows of the page whose numbers no other page has"""
    assert "Group Relative Policy Optimization" in grpo.__doc__
    assert math.isnan(-math.inf - -math.inf)                            # padding: a mask is safe
    ones = torch.ones(3, 6)
    assert (ones * ones.unsqueeze(1)).shape == (3, 3, 6)                # unsqueeze(1) of a (B, T): wrong in silence
    loss = grpo.clipped_surrogate_loss(f64([1.5]), f64([1.225])).item()
    assert [loss, 1.225 * 1.5, sum([-0.3, 0.2, 0]) / 3] == near(-1.47, 1.8375, -0.0333)
    rho = torch.linspace(0, 3, 301).unsqueeze(1)
    assert numbers([grpo.clipped_surrogate_loss(rho, torch.full_like(rho, -0.5)).min()]) == near(0.4)
    losses = f64(2, -1, 0.5).requires_grad_()
    losses.backward(gradient=torch.full_like(losses, 1 / 3))            # no scalar, and the gradient of a mean
    assert losses.grad.tolist() == approx([1 / 3] * 3)
    for loss_type, want in (("grpo", [1 / 3, 1 / 3, 1 / 3]), ("dapo", [5 / 15, 4 / 15, 6 / 15]),
                            ("dr_grpo", [5 / 18, 4 / 18, 6 / 18])):
        of_tokens = weights(loss_type, 5, 4, 6, T_max=6)
        assert [5 * of_tokens[0], 4 * of_tokens[1], 6 * of_tokens[2]] == approx(want)
