"""The numbers of the pages that no code of a page asserts: they are on the page, and they are what comes out."""

import itertools
import math
import re

import numpy
import torch
from conftest import EXAMPLES
from pytest import approx

import grpo
from test_grpo import f64
from worked_examples import variants
from worked_examples.scripts import figures

BY_G = dict(correction=0, eps=0)                                        # a std that divides by G, as on most pages
UNSCALED = dict(scale_rewards="none")


def gradient(loss, x):
    return torch.autograd.grad(loss.sum(), x, retain_graph=True)[0]


def on_page(name, text, *got):
    """The numbers of this text are on the page whose name begins so, and with these digits they are what came."""
    page, = EXAMPLES.glob(f"{name}*.md")
    page, words = page.read_text(encoding="utf-8"), text.split()
    patterns = [rf"(?<![\d.]){word.replace('-', '[−∓]')}(?!\.?\d)" for word in words]
    assert [pattern for pattern in patterns if not re.search(pattern, page)] == [], name
    want = [approx(float(word), abs=0.5 * 10 ** -len(word.partition(".")[2])) for word in words]
    assert [number for x in got for number in torch.as_tensor(x).flatten().tolist()] == want


ESSAYS = f64([8.5, 6.2, 4.1])                                           # guide 001's rewards
LOG_RATIOS = f64([[0.1, 0.05, -0.1, 0.08, 0.02, 0], [-0.05, 0.1, -0.08, 0.05, 0, 0],
                  [0.08, -0.05, 0.1, 0.05, -0.08, 0.1]])
LENGTHS = torch.arange(6) < torch.tensor([[5], [4], [6]])               # guide 004's three answers


def pushes_of(scores, drawn, words):
    """How far an update moves the logits of this many equally likely words, of which some were drawn."""
    logits = f64([0] * words).requires_grad_()
    return -gradient(-(scores * logits.log_softmax(0)[drawn]).mean(), logits)


def test_without_a_baseline_a_wrong_answer_rises_and_with_it_an_answer_rises_by_its_advantage():
    """Page 0: a judge gives 9 to the word 0 and 8 to the others, of which word 1 is drawn twice. Page 1: of 100 texts
    three essays were drawn: by r the other 97 fall; by A, which adds up to 0, their gradient is 0"""
    rewards, drawn = f64([9, 8, 8, 8]), [0, 1, 1, 2]
    assert pushes_of(rewards, drawn, 3)[:2].sign().tolist() == [-1, 1]
    assert pushes_of(rewards - rewards.mean(), drawn, 3)[:2].sign().tolist() == [1, -1]
    A = grpo.group_advantages(ESSAYS, 3, **BY_G)
    for scores, moves in ((ESSAYS, [1, 1, 1] + 97 * [-1]), (A, [1, -1, -1] + 97 * [0])):
        push = pushes_of(scores, [0, 1, 2], 100)
        assert torch.where(push.abs() < 1e-9, 0, push).sign().tolist() == moves


def test_the_numbers_of_page_01s_essays_and_of_the_errors_in_guide_001():
    """Guide 001's group: mean, squares, both stds; a tiny difference counts as much as a large one. The ratio of a
    whole answer; what the clip leaves of an objective of 1.8375"""
    mean, std = grpo.group_stats(ESSAYS, 3, correction=0)
    squares = (ESSAYS - mean).square()
    on_page("01", "6.2667 2.2333 -0.0667 -2.1667", mean, ESSAYS - mean)
    on_page("01", "4.9878 0.0044 4.6944 9.6867", squares, squares.sum())
    on_page("01", "1.7969 2.2008", std, grpo.group_stats(ESSAYS, 3)[1])
    on_page("01", "-0.7071 -0.7071 1.4142", grpo.group_advantages(f64([0.50, 0.50, 0.51]), 3, **BY_G))
    on_page("errors", "4.988 0.0044 4.694 3.2289", squares, std.square())
    on_page("errors", "1.01476 -0.03029 -0.98446", grpo.group_advantages(ESSAYS, 3))
    whole = grpo.importance_ratio(f64([[-21]]), f64([[-23]]), torch.ones(1, 1))
    on_page("errors", "7.39 9.16", whole, whole * 1.24)
    of_clip, of_none = [grpo.clipped_surrogate_loss(f64([1.5]), f64([1.225]), epsilon_high=e) for e in (0.2, math.inf)]
    on_page("errors", "-1.47 1.8375", of_clip, -of_none)


def test_the_numbers_of_page_01s_second_group_and_of_the_errors_in_guide_004():
    """Guide 004's group: stds, ratios, token losses, means of answers. A mean of losses; the least loss at A = -0.5;
    what its three answers weigh under each denominator"""
    r = f64([1, 0, 0.5])
    on_page("01", "0.4082 0.5", grpo.group_stats(r, 3, correction=0)[1], grpo.group_stats(r, 3)[1])
    on_page("01", "1 -1 0", grpo.group_advantages(r, 3, eps=0))
    ratio = grpo.importance_ratio(LOG_RATIOS, torch.zeros_like(LOG_RATIOS), LENGTHS)
    losses = grpo.clipped_surrogate_loss(ratio, f64([[1.225], [-1.225], [0]])) * LENGTHS
    on_page("01", "0.9512 1.1052 0.9231 1.0513 0.9048 1.1052", ratio[1, :4], ratio.min(), ratio.max())
    on_page("01", "-1.3538 -1.2878 -1.1084 -1.3270 -1.2497", losses[0, :5])
    on_page("01", "1.1653 1.3538 1.1308 1.2878", losses[1, :4])
    on_page("01", "-1.26537 1.23443 0", losses.sum(1) / LENGTHS.sum(1))
    on_page("errors", "-0.0333", grpo.aggregate(f64([[-0.3], [0.2], [0]]), torch.ones(3, 1), loss_type="grpo"))
    rho = torch.linspace(0, 3, 301)
    on_page("errors", "0.4", grpo.clipped_surrogate_loss(rho, torch.full_like(rho, -0.5)).min())
    losses = torch.zeros(3, 6, requires_grad=True)
    for loss_type, want in (("grpo", [1 / 3, 1 / 3, 1 / 3]), ("dapo", [5 / 15, 4 / 15, 6 / 15]),
                            ("dr_grpo", [5 / 18, 4 / 18, 6 / 18])):
        loss = grpo.aggregate(losses, LENGTHS, loss_type=loss_type, max_completion_length=6)
        assert gradient(loss, losses).sum(1).tolist() == approx(want), loss_type


def test_the_numbers_of_page_02():
    """The policy of two words: forty updates, new answers for every fourth"""
    words, theta, ratios, losses = torch.tensor([[0], [1]]), f64([0, 0]).requires_grad_(), [], []
    for update in range(40):
        logps = theta.log_softmax(0)[words]
        old_logps = logps.detach() if update % 4 == 0 else old_logps
        loss, _ = grpo.grpo_loss(logps, f64([1, -1]), torch.ones(2, 1), old_logps=old_logps)
        ratios.append((logps - old_logps).exp())
        losses.append(loss.item())
        theta = (theta - 0.2 * gradient(loss, theta)).detach().requires_grad_()
    on_page("02", "1 1 1.0997 0.9003 1.1964 0.8036 1.2869 0.7131", *ratios[:4])
    lowest = [min(losses[start : start + 4]) for start in range(0, 40, 4)]
    assert lowest == sorted(lowest)
    on_page("02", "-0.200 -0.103 0.99", lowest[0], lowest[-1], theta.softmax(0)[0])


def test_the_numbers_of_pages_03_to_08():
    """An update that jumps over the limit; the std of easy and hard questions; silent groups, p^G + (1 - p)^G; several
    rewards; the softmax's denominator, two temperatures, and the weight of a sampler that disagrees"""
    right = f64([0.5, -0.5]).softmax(0)[0]                              # 1 times page 2's gradient
    on_page("03", "0.7311 1.462", right, right / 0.5)
    for now, text in ((0.01, "-0.99"), (0.5, "-25")):                   # drawn at 0.01; another token has the rest
        logits = f64([now, 1 - now]).log().requires_grad_()
        ratio = (logits.log_softmax(0)[:1] - math.log(0.01)).exp()
        on_page("03", text, gradient(grpo.clipped_surrogate_loss(ratio, f64([1]), epsilon_high=math.inf), logits)[0])
    for right, text in ((1, "2.65 0.875"), (4, "1 0.5")):
        rewards = (torch.arange(8) < right).double()
        on_page("04", text, *[grpo.group_advantages(rewards, 8, **options)[0] for options in (BY_G, UNSCALED)])
    for p, text in ((0.5, "0.5 0.0078 0.00003 0"), (0.9, "0.82 0.4305 0.1853 0.0012"),
                    (0.99, "0.9802 0.9227 0.8515 0.5256")):
        on_page("06", text, *[p**G + (1 - p) ** G for G in (2, 8, 16, 64)])
    on_page("06", "0.33 0.9227 0.0175", *[p**8 + (1 - p) ** 8 for p in (0.87, 0.99, 0.4)])
    on_page("06", "0.872 0.7417", (4 * 0.99 + 0.4) / 5, (4 * 0.9227 + 0.0175) / 5)
    rewards = f64([0.94, 0.91, -0.06])
    on_page("07", "0.5967 0.4645", *grpo.group_stats(rewards, 3, correction=0))
    on_page("07", "0.3433 0.6867", *[grpo.group_advantages(r, 3, **UNSCALED)[0] for r in (rewards, 2 * rewards)])
    on_page("07", "-1.1547", grpo.group_advantages(f64([1, 1, 0]), 3, eps=0)[2])
    logits = f64([2, 1, 0])
    too_likely = logits.log_softmax(0) - (logits / 0.5).log_softmax(0)
    on_page("08", "11.1073 2.4076", logits.exp().sum(), logits.logsumexp(0))
    on_page("08", "0.767 2.086 0.735", too_likely.exp()[:2], too_likely[1])
    on_page("08", "1.1052 2", variants.truncated_importance_ratio(f64([-1, -3]), f64([-1.1, -5])))


def test_the_numbers_of_page_09():
    """Spreads of k1, k2, k3; a token that is almost lost; the KL in the reward or in the loss"""
    pi, ref, lost = f64([0.5, 0.25, 0.25]), f64([0.25, 0.25, 0.5]), f64([0.6, 0.399, 0.001])
    for p, estimator, std in ((pi, "k1", "0.5747"), (pi, "k2", "0.1040"), (pi, "k3", "0.1103"), (lost, "k1", "0.30"),
                              (lost, "k3", "15.6")):
        k = grpo.kl_estimate(p.log(), ref.log(), estimator=estimator)
        on_page("09", std, (p @ (k - p @ k).square()).sqrt())
    for estimator, of_lost in (("k2", "-0.007"), ("k3", "-0.499")):
        logits = lost.log().requires_grad_()
        k = grpo.kl_estimate(logits.log_softmax(0), ref.log(), estimator=estimator)
        on_page("09", of_lost, gradient(lost @ k, logits)[2])           # the weights are constants

    k1, mask, scores = f64([[0.1, -0.2, 0.3], [0, 0, 0]]), torch.ones(2, 3), f64([1, 1])
    in_reward = variants.kl_penalized_rewards(scores, k1, 0 * k1, mask, beta=0.1).sum(1)
    on_page("09", "0.98 1 0.99 0.01414", in_reward, in_reward.mean(), in_reward.std())
    on_page("09", "-0.7071 0.7071", grpo.group_advantages(in_reward, 2, eps=0))
    k3 = grpo.kl_estimate(k1, 0 * k1)[0]
    on_page("09", "0.0048 0.0214 0.0408 0.0224", k3, k3.mean())
    on_page("09", "0.00112", grpo.grpo_loss(k1, 0 * scores, mask, ref_logps=0 * k1, beta=0.1, loss_type="grpo")[0])


# Page 10 ----------------------------------------------------------------------------------------------------

R, STILL = f64([1, 1, 0, 0]), torch.zeros(4, 3, dtype=torch.float64)
MASK = torch.arange(3) < torch.tensor([[3], [2], [3], [1]])


def moved(*log_ratios):
    """The policy has moved on answer 1."""
    return torch.cat([f64([log_ratios]), STILL[1:]])


def pushes(A, log_ratios, mask=MASK, **options):
    """On the three tokens of answer 1: -∂loss/∂log π."""
    logps = log_ratios.clone().requires_grad_()
    loss, _ = grpo.grpo_loss(logps, A, mask, old_logps=torch.zeros_like(logps), **options)
    return -gradient(loss, logps)[0]


def test_the_numbers_of_page_10():
    """One batch: the push of each method on answer 1; GSPO's section and DAPO's; the grades of 47 + 85, more steps"""
    A, drift = grpo.group_advantages(R, 4, **BY_G), moved(0, 0.23, 0.4)
    on_page("10", "1 1.2586 1.4918", drift[0].exp())
    grades = f64([[1, 1, 1], [1, 1, math.nan], [1, 1, 0], [0, math.nan, math.nan]])
    by_step = grpo.process_advantages(grades, torch.arange(3).expand(4, 3), MASK, 4, **BY_G)
    token_rewards = variants.kl_penalized_rewards(R, STILL, STILL, MASK, beta=0)
    by_critic, _ = variants.gae_advantages(token_rewards, moved(0.6, 0.7, 0.9), MASK, lam=1)
    of_others = variants.leave_one_out_advantages(R, 4)
    centred = grpo.group_advantages(R, 4, **UNSCALED)
    clip, dapo, cispo = dict(loss_type="grpo"), dict(epsilon_high=0.28), dict(policy_loss="cispo")
    sequence, narrow = dict(importance_sampling_level="sequence"), dict(epsilon_low=3e-4, epsilon_high=4e-4)
    gspo, sapo = clip | sequence | narrow, clip | dict(policy_loss="sapo")
    per_answer, dr_grpo = [dict(loss_type="dr_grpo", max_completion_length=T_max) for T_max in (1, 3)]
    on_page("10", "0.1336", pushes(by_step, drift, **clip).sum())                       # process supervision
    on_page("10", "0.0333", pushes(by_critic, drift, **clip).sum())                     # PPO
    on_page("10", "0.75", pushes(R, STILL, **per_answer).sum())                         # REINFORCE
    on_page("10", "0.5", pushes(of_others, STILL, **per_answer).sum())                  # RLOO: 3 · 2/3 / 4
    on_page("10", "0.0417", pushes(centred, drift, **dr_grpo).sum())
    on_page("10", "0.3036 1.6036", pushes(A, drift, **sapo).sum(), by_step[0, 0])
    on_page("10", "1 1.2378 1.4051", 12 * pushes(A, drift, **sapo))
    for options, pushed, on_policy in ((clip, 1, 0.25), (gspo, 0, 0.25), (sapo, 3, 0.25), (dapo, 2, 3 / 9),
                                       (cispo, 3, 3 / 9)):
        assert pushes(A, drift, **options).count_nonzero() == pushed, options
        assert pushes(A, STILL, **options).sum().item() == approx(on_policy), options

    cancels = moved(0, 0.3, -0.5)
    ratios = [grpo.importance_ratio(log_ratios, STILL, MASK, **sequence)[0] for log_ratios in (drift, cancels)]
    on_page("10", "1.2337 0.9355 1.3499", *ratios, cancels[0, 1].exp())
    on_page("10", "0.0780 0.0780 0.0780", pushes(A, cancels, **gspo))
    assert pushes(A, cancels, **clip)[1] == 0
    A = grpo.group_advantages(f64([1, 1, 0, 0, 1, 1, 1, 1]), 4, **BY_G)   # one more group, silent, of the same lengths
    on_page("10", "0.1255", pushes(A, torch.cat([drift, STILL]), MASK.repeat(2, 1), **dapo).sum())

    on_page("10", "0.8 0.4", *grpo.group_stats(f64([1, 1, 1, 1, 0]), 5, correction=0))
    for grades, ends, first in (([[1, 1, 1, 1], [1, 0, math.nan, math.nan]], [[0, 1, 2, 3], [1, 3, 0, 0]], "1.7889"),
                                ([[1, 1], [1, 0]], [[1, 3], [1, 3]], "1.1547")):
        A = grpo.process_advantages(f64(grades), torch.tensor(ends), torch.ones(2, 4), 2, **BY_G)
        on_page("10", first, A[0, 0])


def test_the_numbers_of_page_10_on_baselines():
    """Mean and variance of the gradient over all 3^G groups of a policy with three answers: nothing is simulated"""
    p, r = f64([0.5, 0.3, 0.2]), f64([1, 0, 0.5])

    def variance(advantages, G):
        gradients, chances = [], []
        for answers in itertools.product(range(3), repeat=G):
            answers, theta = list(answers), p.log().requires_grad_()
            logps = theta.log_softmax(0)[answers].unsqueeze(1)          # (G, 1)
            loss, _ = grpo.grpo_loss(logps, advantages(r[answers], G), torch.ones_like(logps), loss_type="grpo")
            gradients.append(-gradient(loss, theta))
            chances.append(p[answers].prod())
        chances, gradients = torch.stack(chances), torch.stack(gradients)
        mean = chances @ gradients
        assert torch.allclose(mean, p * (r - p @ r))                    # the true gradient of the mean reward
        return chances @ (gradients - mean).square().sum(1)

    on_page("10", "0.6", p @ r)
    for b, text in ((0, "0.1662"), (0.6, "0.0438"), (10, "56.4062")):
        on_page("10", text, variance(lambda rewards, G: rewards - b, 1))
    for G, text in ((2, "0.1172 0.0831"), (4, "0.0268 0.0416")):
        on_page("10", text, variance(variants.leave_one_out_advantages, G), variance(lambda rewards, G: rewards, G))


# The runs ---------------------------------------------------------------------------------------------------

def test_the_numbers_of_the_demos_runs():
    """Page 11's table of a good run and a collapse; what the text says of them"""
    good, collapse, ten = figures.csv("tiny_run.csv"), figures.csv("collapsed_run.csv"), figures.csv("tiny_seeds.csv")
    page = (EXAMPLES / "11_reading_a_run.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| (-?\d.*) \|$", page, re.M)
    assert len(rows) == 6
    for name, cells in rows:
        means = [good[name][:10].mean(), good[name][-10:].mean(), collapse[name][-10:].mean()]
        assert [float(cell) for cell in cells.split(" | ")] == approx(means, abs=6e-4), name
    right, entropy = collapse["rewards/accuracy_reward/mean"], collapse["entropy"]
    on_page("11", "0.48 0.12 0.02 0.03 0.27", right[:3], entropy[0], entropy.max())
    assert right[3:].max() < 0.07
    assert len(collapse) == 60 and (collapse["grad_norm"] > 0).sum() == 40 and (good["grad_norm"] > 0).sum() == 59
    assert abs(good["loss"]).max() < 0.08 and abs(collapse["loss"]).max() < 0.08
    names = "rewards/accuracy_reward/mean", "frac_reward_zero_std", "entropy"
    right, quiet, entropy = [ten[name].reshape(10, 60).mean(0) for name in names]       # over ten seeds
    assert entropy[1:6].mean() > entropy[0] > entropy[-10:].mean()      # up, then down beyond the start
    assert quiet[1:6].mean() < quiet[0] < quiet[-10:].mean()            # down, then up beyond it
    assert 1 - right[-10:].mean() < quiet[-10:].mean() / 4              # few silent groups can be wrong ones


def test_the_numbers_of_page_06s_runs():
    """Its table of three seeds; two learn, and in 67 of the third's 100 steps all 32 groups are silent"""
    table = figures.csv("two_digit_sums.csv")
    for seed, text in ((42, "0.97 0.77 1.96 0.05 0.87"), (43, "0.97 1.00 2.09 0.16 0.01"),
                       (44, "0.94 0.74 1.87 0.06 0.88")):
        run = table[table["run"] == f"seed {seed}"]
        silent, entropy, reward = [run[-10:][metric].mean() for metric in ("silent", "entropy", "reward")]
        on_page("06", text, run["silent"][0], silent, run["entropy"][0], entropy, reward)
    stuck, others = table[table["run"] == "seed 43"], table[table["run"] != "seed 43"]
    assert (stuck["grad_norm"] == 0).sum() == (stuck["silent"] == 1).sum() == 67
    assert stuck["silent"].min() == 30 / 32 and (others["silent"] < 1).all()
    assert stuck["entropy"][44] > 0.7                                   # it rises in between
    assert stuck["entropy"][7] < 0.17 < 0.6 < others["entropy"][others["step"] == 8].min()      # alike before right


def test_the_numbers_of_page_07s_runs():
    """A real model: three seeds, a learning rate that is too high, a reward that is hacked and then mended"""
    runs = figures.csv("real_model.csv")
    seeds = runs[numpy.char.startswith(runs["run"], "seed")]
    first, last = seeds[seeds["step"] <= 4], seeds[seeds["step"] > 26]
    for metric, text in (("silent", "0.69 0.67"), ("entropy", "1.94 0.13")):
        on_page("07", text, first[metric].mean(), last[metric].mean())
    for seed, text in ((42, "0.06 0.81"), (43, "0.05 0.84"), (44, "0.05 0.95")):
        on_page("07", text, *[part["reward"][part["run"] == f"seed {seed}"].mean() for part in (first, last)])
    too_fast = runs[(runs["run"] == "rate 1e-4") & (runs["step"] >= 4)]
    assert (too_fast["silent"] == 1).all() and (too_fast["grad_norm"] == 0).all()
    for run, step, text in (("hacked", 1, "1.78 1.06"), ("mended", 1, "1.59 1.06"), ("hacked", 10, "3.09 2.31"),
                            ("mended", 10, "1.82 1.06")):
        line, = runs[(runs["run"] == run) & (runs["step"] == step)]
        on_page("07", text, line["reward"], line["mentions"])
