"""The numbers of the pages that no code of a page asserts: they are on the page, and they are what comes out."""

import itertools
import json
import math
import re
import sys
from pathlib import Path

import numpy
import torch
from conftest import EXAMPLES, ROOT, cli
from pytest import approx

import grpo
from test_grpo import f64
from worked_examples import variants
from worked_examples.scripts import figures, small_model

BY_G = dict(correction=0, eps=0)                                        # a std that divides by G, as on most pages
UNSCALED = dict(scale_rewards="none")


def gradient(loss, x):
    return torch.autograd.grad(loss.sum(), x, retain_graph=True)[0]


def parts_of(page):
    """Its table rows, list items, headings and paragraphs, each as one line; a minus is "-"."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"\n(?![\n|#-]|\d+\. )", " ", text)                 # the lines of a paragraph become one
    return text.replace("−", "-").replace("∓", "-").splitlines()


def on_page(name, where, text, *got):
    """In the one part with `where` (a row begins with it) of the page whose name begins so, the numbers of this text
    stand in this order, and with these digits they are what came."""
    page, = EXAMPLES.glob(f"{name}*.md")
    parts = [part for part in parts_of(page) if (part.startswith(where) if where[0] == "|" else where in part)]
    assert len(parts) == 1, (name, where, f"is in {len(parts)} parts")
    words = text.split()
    pattern = ".*?".join(rf"(?<![\d.-]){re.escape(word)}(?!\.?\d)" for word in words)
    assert re.search(pattern, parts[0]), (name, where, text)
    numbers = [word.replace(",", "") for word in words]
    want = [approx(float(number), abs=0.5 * 10 ** -len(number.partition(".")[2])) for number in numbers]
    assert [number for x in got for number in torch.as_tensor(x).flatten().tolist()] == want


ESSAYS = f64([8.5, 6.2, 4.1])                                           # guide 001's rewards
LOG_RATIOS = f64([[0.1, 0.05, -0.1, 0.08, 0.02, 0], [-0.05, 0.1, -0.08, 0.05, 0, 0],
                  [0.08, -0.05, 0.1, 0.05, -0.08, 0.1]])
LENGTHS = torch.arange(6) < torch.tensor([[5], [4], [6]])               # guide 004's three answers


def pushes_of(scores, drawn, words):
    """How far an update moves the logits of this many equally likely words, of which some were drawn."""
    logits = f64([0] * words).requires_grad_()
    return -gradient(-(scores * logits.log_softmax(0)[drawn]).sum(), logits)


def test_without_a_baseline_a_wrong_answer_rises_and_with_it_an_answer_rises_by_its_advantage():
    """Page 0: 9 points for the word 0 and 8 for the others, of which word 1 is drawn twice; all draws of four. Page 1: of
    100 texts three essays were drawn: by r the other 97 fall; by A, which adds up to 0, their gradient is 0"""
    rewards, drawn = f64([9, 8, 8, 8]), [0, 1, 1, 2]
    on_page("00", "The wrong one, 11", "33 -2 5 -3", rewards.sum(), pushes_of(rewards, drawn, 3))
    A = rewards - rewards.mean()
    on_page("00", "So you compare", "8.25 0.75 -0.25", rewards.mean(), A[:2])
    on_page("00", "So you compare", "0.75 -0.5 -0.25", pushes_of(A, drawn, 3))
    wrong_wins = [0, 0]                                                 # by r, by A
    for drawn in itertools.product(range(3), repeat=4):
        earned = torch.where(torch.tensor(drawn) == 0, 9.0, 8.0).double()
        for i, scores in enumerate((earned, earned - earned.mean())):
            push = pushes_of(scores, list(drawn), 3)
            wrong_wins[i] += (push[1:] > push[0] + 1e-9).any().item()
    assert wrong_wins == [48, 0]
    on_page("00", "The estimate is right on average", "81 48", 3**4, wrong_wins[0])

    A = grpo.group_advantages(ESSAYS, 3, **BY_G)
    for scores, moves in ((ESSAYS, [1, 1, 1] + 97 * [-1]), (A, [1, -1, -1] + 97 * [0])):
        push = pushes_of(scores, [0, 1, 2], 100)
        assert torch.where(push.abs() < 1e-9, 0, push).sign().tolist() == moves


def test_the_numbers_of_page_01s_essays():
    """Mean, squares, both stds; a tiny difference counts as much as a large one, and the unit does not count"""
    mean, std = grpo.group_stats(ESSAYS, 3, correction=0)
    squares, A = (ESSAYS - mean).square(), grpo.group_advantages(ESSAYS, 3, **BY_G)
    on_page("01", "A negative one", "6.2667", mean)
    on_page("01", "| r - mean |", "2.2333 -0.0667 -2.1667 0", ESSAYS - mean, (ESSAYS - mean).sum())
    on_page("01", "| (r - mean)² |", "4.9878 0.0044 4.6944 9.6867", squares, squares.sum())
    on_page("01", "| **A** |", "1.2429 -0.0371 -1.2058 0", A, A.sum())
    on_page("01", "The std is √", "9.6867 1.7969 2.2333 1.7969 1.2429", squares.sum(), std, 2.2333, std, A[0])
    A_close = grpo.group_advantages(f64([0.50, 0.50, 0.51]), 3, **BY_G)
    on_page("01", "the rewards 0.50", "-0.7071 -0.7071 1.4142", A_close)
    assert grpo.group_advantages(100 * ESSAYS, 3, **BY_G).tolist() == approx(A.tolist())


def test_the_numbers_of_page_01s_second_group():
    """Stds, ratios, token losses, means of answers; a product of a hundred ratios"""
    r = f64([1, 0, 0.5])
    by_G, std = [grpo.group_stats(r, 3, correction=correction)[1] for correction in (0, 1)]
    on_page("01", "The mean is 0.5", "0.4082 1.2247 -1.2247 0", by_G, grpo.group_advantages(r, 3, **BY_G))
    on_page("01", "Code differs here", "0.5 0.5001 0.9998 -0.9998 0", std, std + 1e-4, grpo.group_advantages(r, 3))
    on_page("01", "Strictly, the sum runs", "13,781", 1.1**100)
    ratio = grpo.importance_ratio(LOG_RATIOS, torch.zeros_like(LOG_RATIOS), LENGTHS)
    losses = grpo.clipped_surrogate_loss(ratio, f64([[1.225], [-1.225], [0]])) * LENGTHS
    on_page("01", "No: the ratios lie", "0.9048 1.1052", ratio.min(), ratio.max())
    on_page("01", "| ρ, answer 1 |", "1.1052 1.0513 0.9048 1.0833 1.0202", ratio[0, :5])
    on_page("01", "| ρ, answer 2 |", "0.9512 1.1052 0.9231 1.0513", ratio[1, :4])
    on_page("01", "| ℓ, answer 1 |", "-1.3538 -1.2878 -1.1084 -1.3270 -1.2497 -6.326841 -1.26537", losses[0, :5],
            losses[0].sum(), losses[0].sum() / 5)
    on_page("01", "| ℓ, answer 2 |", "1.1653 1.3538 1.1308 1.2878 4.937715 1.23443", losses[1, :4], losses[1].sum(),
            losses[1].sum() / 4)
    on_page("01", "The 15 token losses", "-6.326841 4.937715 -1.389126", losses[:2].sum(1), losses.sum())


def test_the_numbers_of_the_texts_from_which_these_pages_grew():
    """Groups 001 and 004: squares, both stds, TRL's advantages; the ratio of an answer of ten tokens; what the clip
    leaves; a mean of losses; the least loss at A = -0.5; what three answers weigh; a pad of -inf; ten losses"""
    mean, std = grpo.group_stats(ESSAYS, 3, correction=0)
    assert (ESSAYS - mean).square().tolist() == approx([4.988, 0.0044, 4.694], abs=5e-4)
    assert (std.square().item(), std.item()) == (approx(3.2289, abs=5e-5), approx(1.7969, abs=5e-5))
    assert grpo.group_advantages(ESSAYS, 3).tolist() == approx([1.01476, -0.03029, -0.98446], abs=5e-6)
    assert grpo.group_stats(ESSAYS, 3)[1].item() == approx(2.2008, abs=5e-5)
    each = grpo.importance_ratio(f64([[-2.1] * 10]), f64([[-2.3] * 10]), torch.ones(1, 10))
    one = grpo.importance_ratio(f64([[-2.1] * 10]), f64([[-2.3] * 10]), torch.ones(1, 10),
                                importance_sampling_level="sequence")
    assert [round(x, 4) for x in (each[0, 0].item(), one.item())] == [1.2214, 1.2214]
    assert [round(x, 2) for x in (each.prod().item(), each.prod().item() * 1.24)] == [7.39, 9.16]
    loss = grpo.clipped_surrogate_loss(each.requires_grad_(), torch.full_like(each, 1.24))
    assert loss[0, 0].item() == approx(-1.488) and gradient(loss, each).count_nonzero() == 0
    loss = grpo.clipped_surrogate_loss(each, torch.full_like(each, -1.24))              # of a bad answer
    assert loss[0, 0].item() == approx(1.5145, abs=5e-5) and (gradient(loss, each) > 0).all()
    of_clip, of_none = [grpo.clipped_surrogate_loss(f64([1.5]), f64([1.225]), epsilon_high=e) for e in (0.2, math.inf)]
    assert (of_clip.item(), of_none.item()) == (approx(-1.47), approx(-1.8375))

    r = f64([1, 0, 0.5])
    stds = [grpo.group_stats(r, 3, correction=correction)[1].item() for correction in (0, 1)]
    assert stds == approx([0.408, 0.5], abs=5e-4)
    for options, A in ((BY_G, [1.225, -1.225, 0]), (dict(eps=0), [1, -1, 0]), (UNSCALED, [0.5, -0.5, 0])):
        assert grpo.group_advantages(r, 3, **options).tolist() == approx(A, abs=5e-4)
    assert grpo.aggregate(f64([[-0.3], [0.2], [0]]), torch.ones(3, 1), loss_type="grpo").item() == approx(-0.1 / 3)
    rho = torch.linspace(0, 3, 301)
    assert grpo.clipped_surrogate_loss(rho, torch.full_like(rho, -0.5)).min().item() == approx(0.4)
    losses = torch.zeros(3, 6, requires_grad=True)
    for loss_type, want in (("grpo", [1 / 3, 1 / 3, 1 / 3]), ("dapo", [5 / 15, 4 / 15, 6 / 15]),
                            ("dr_grpo", [5 / 18, 4 / 18, 6 / 18])):
        loss = grpo.aggregate(losses, LENGTHS, loss_type=loss_type, max_completion_length=6)
        assert gradient(loss, losses).sum(1).tolist() == approx(want), loss_type
    padded = f64([-math.inf])
    assert (padded - padded).isnan().all()                              # a mask is needed, no pad value serves
    for loss_type, *want in (("grpo", -0.010313, -0.008417), ("bnpo", -0.092608, -0.075584),
                             ("dapo", -0.092608, -0.075584), ("dr_grpo", -0.077174, -0.062986)):
        for A, by_hand in zip((1.225, 0.9998), want):
            loss, _ = grpo.grpo_loss(LOG_RATIOS, A * f64([1, -1, 0]), LENGTHS, old_logps=torch.zeros_like(LOG_RATIOS),
                                     loss_type=loss_type, max_completion_length=6)
            assert loss.item() == approx(by_hand, abs=5e-7), (A, loss_type)


def test_the_numbers_of_page_02():
    """The policy of two words: forty updates, new answers for every fourth; a KL term"""
    words, theta = torch.tensor([[0], [1]]), f64([0, 0]).requires_grad_()
    rows, ratios, losses = [], [], []
    for update in range(40):
        logps = theta.log_softmax(0)[words]
        old_logps = logps.detach() if update % 4 == 0 else old_logps
        loss, _ = grpo.grpo_loss(logps, f64([1, -1]), torch.ones(2, 1), old_logps=old_logps)
        ratios.append((logps - old_logps).exp())
        losses.append(loss.item())
        of_theta = gradient(loss, theta)
        rows.append([theta[0], *ratios[-1], loss, of_theta[0]])
        theta = (theta - 0.2 * of_theta).detach().requires_grad_()
    for row, where, text in zip(rows, ("1", "2", "3", "4", "5, new answers"), (
            "0 1 1 0 -0.5", "0.1 1.0997 0.9003 -0.0997 -0.4950", "0.1990 1.1964 0.8036 -0.1964 -0.4807",
            "0.2951 1.2869 0.7131 -0.2 0", "0.2951 1 1 0 -0.5")):
        on_page("02", f"| {where} |", text, *row)
    on_page("02", "The first update takes", "1.0997 0.9003", ratios[1])
    lowest = [min(losses[start : start + 4]) for start in range(0, 40, 4)]
    assert lowest == sorted(lowest)
    highest = max(ratio[0, 0] for ratio in ratios[-4:])
    on_page("02", "It *rises*", "-0.200 -0.103 0.97 1.03", lowest[0], lowest[-1], 0.97, 1 / 0.97)
    on_page("02", "It *rises*", "1.0060 1.0060 -0.103", highest, highest, lowest[-1])
    on_page("02", "Does the loss say more", "0.5 0.99", 0.5, theta.softmax(0)[0])
    two_and_four = torch.arange(4) < torch.tensor([[2], [4]])           # tokens of the right answer, of the wrong one
    for loss_type, want in (("grpo", 0), ("dapo", 1 / 3)):
        loss, _ = grpo.grpo_loss(torch.zeros(2, 4), f64([1, -1]), two_and_four, loss_type=loss_type)
        assert loss.item() == approx(want)
    on_page("02", "Above 0. Let", "0.3333", loss)
    k3 = grpo.kl_estimate(f64([0.3]), f64([0]))
    on_page("02", "**A KL term.**", "1.35 0.0408 0.0408 0.0016", math.exp(0.3), k3, k3, 0.04 * k3)


def test_the_numbers_of_page_03():
    """The push on a rare token, and where it ends; an update that jumps over the limit"""
    for now, text in ((0.01, "-0.99"), (0.5, "-25")):                   # drawn at 0.01; another token has the rest
        logits = f64([now, 1 - now]).log().requires_grad_()
        ratio = (logits.log_softmax(0)[:1] - math.log(0.01)).exp()
        of_logit = gradient(grpo.clipped_surrogate_loss(ratio, f64([1]), epsilon_high=math.inf), logits)[0]
        on_page("03", "does not know when to stop", text, of_logit)
    for A, text in ((1, "0.5 0.8 -0.5 -1 1.1 1.1 -1.1 -1 1.5 1.2 -1.2 0"),
                    (-1, "-0.5 -0.8 0.8 0 -1.1 -1.1 1.1 1 -1.5 -1.2 1.5 1")):
        rho = f64([0.5, 1.1, 1.5]).requires_grad_()
        loss = grpo.clipped_surrogate_loss(rho, torch.full_like(rho, A))
        cells = torch.stack([rho * A, rho.clamp(0.8, 1.2) * A, loss, gradient(loss, rho)], 1)
        on_page("03", f"| A = {A:+} | -min", text, cells)
    right = f64([0.5, -0.5]).softmax(0)[0]                              # a learning rate of 1 times page 2's gradient
    on_page("03", "One update can jump", "0.7311 1.462", right, right / 0.5)
    for epsilon_high, text in ((0.2, "0.012"), (0.28, "0.0128")):
        end = 0.01 * (1 + epsilon_high)
        rho = f64([end / 0.01 - 1e-6, end / 0.01 + 1e-6]).requires_grad_()
        loss = grpo.clipped_surrogate_loss(rho, torch.ones_like(rho), epsilon_high=epsilon_high)
        on_page("03", "At 0.01 · 1.2", text, end)
        assert gradient(loss, rho).tolist() == [-1, 0]


def test_the_numbers_of_page_04():
    """The weights of tokens and answers; logits after updates, and the mean length of wrong and right answers; a
    denominator that the neighbor decides"""
    mask, A = torch.arange(8) < torch.tensor([[2], [8], [2], [8]]), f64([1, 1, -1, -1])
    for loss_type, text in (("grpo", "0.125 0.03125 0.25 0.25"), ("dapo", "0.05 0.05 0.1 0.4"),
                            ("dr_grpo", "0.025 0.025 0.05 0.2")):
        token_losses = torch.zeros(4, 8, requires_grad=True)
        loss = grpo.aggregate(token_losses, mask, loss_type=loss_type, max_completion_length=10)
        weights = gradient(loss, token_losses)
        on_page("04", f"| {loss_type} | 1/", text, weights[:2, 0], weights[:2].sum(1))
    for loss_type in ("grpo", "dapo"):
        theta, lengths, moved = f64([0, 0, 0, 0]), [], []
        for _ in range(5):
            p = theta.requires_grad_().softmax(0)
            lengths.append([(p[pair] @ f64([2, 8]) / p[pair].sum()).item() for pair in ([2, 3], [0, 1])])
            logps = torch.cat([theta.log_softmax(0).unsqueeze(1), torch.zeros(4, 7)], 1)    # a choice, then certainty
            loss, _ = grpo.grpo_loss(logps, A, mask, loss_type=loss_type)
            moved.append(-8 * gradient(loss, theta))
            theta = (theta + moved[-1]).detach()
        wrongs, rights = zip(*lengths)
        if loss_type == "grpo":                                        # the lengths in between: test_pictures.py
            assert moved[0].tolist() == approx([1, 0.25, -1, -0.25])
            on_page("04", "| right | +8", "1 8 0.03125 0.25", moved[0][0], 8, 1 / 32, moved[0][1])
            on_page("04", "| wrong | -1", "-1 -0.25", moved[0][2:])
            on_page("04", "![Mean tokens", "0 4 5 7.72 2.28 5", 0, 4, wrongs[0], wrongs[-1], rights[-1], rights[0])
        else:
            assert [*wrongs, *rights] == approx([5] * 10)
            on_page("04", "Under dapo the logits move by", "0.4 0.4 -0.4 -0.4", moved[0])
    on_page("04", "With odds of", "2.117 1 2.117 8 1 2 3.117 6.08", math.exp(0.75), 1, math.exp(0.75), 8, 1, 2,
            math.exp(0.75) + 1, (8 * math.exp(0.75) + 2) / (math.exp(0.75) + 1))
    lengths = torch.arange(18) < torch.tensor([[2], [2], [2], [18]])
    advantages = f64([0.25, 0.25, 0.25, -0.75])
    losses = [grpo.grpo_loss(torch.zeros(4, 18), advantages, lengths, loss_type=loss_type)[0].item()
              for loss_type in ("grpo", "dapo")]
    on_page("04", "though its gradient is not", "0 24 0.5", losses[0], 24, losses[1])
    for T_max, weight in ((8, 0.0625), (2, 0.25), (10, 0.05)):          # of 2 answers; the longest, or the limit
        token_losses = torch.zeros(2, 8, requires_grad=True)
        loss = grpo.aggregate(token_losses, torch.ones(2, 8), loss_type="dr_grpo", max_completion_length=T_max)
        assert gradient(loss, token_losses)[0, 0].item() == approx(weight)


def test_the_numbers_of_page_05():
    """Page 2's right word, if π_old stays; what a token weighs in the wrong sum of parts"""
    theta, right = f64([0, 0]).requires_grad_(), []
    for _ in range(20):
        logps = theta.log_softmax(0).unsqueeze(1)
        loss, _ = grpo.grpo_loss(logps, f64([1, -1]), torch.ones(2, 1), old_logps=f64([[0.5], [0.5]]).log())
        theta = (theta - 0.2 * gradient(loss, theta)).detach().requires_grad_()
        right.append(theta.softmax(0)[0].item())
    on_page("05", "measured from the start", "1.2869 0.6434", right[2] / 0.5, right[-1])
    assert len(set(right[2:])) == 1                                     # from the third update on it stays
    on_page("05", "No: (34/4 + 312/16)/2", "0.125 0.03125 0.05", 1 / 2 / 4, 1 / 2 / 16, 1 / 20)
    losses, mask = torch.arange(32.0).view(4, 8), torch.arange(8) < torch.tensor([[2], [8], [2], [8]])
    for loss_type, text in (("grpo", "4.25 9.75 14"), ("dapo", "1.7 15.6 17.3"), ("dr_grpo", "0.85 7.8 8.65")):
        parts = [grpo.aggregate(losses[rows], mask[rows], loss_type=loss_type, max_completion_length=10,
                                num_rows_in_batch=4, num_items_in_batch=20) for rows in ([0, 2], [1, 3], [0, 1, 2, 3])]
        on_page("05", f"| {loss_type} | ", text, *parts)


def test_the_numbers_of_page_06():
    """Groups with 1 and 4 right answers; silent groups, p^G + (1 - p)^G; a mean over easy and hard questions"""
    for right, text in ((1, "0.125 0.35355 0.35365 2.4742 -0.3535"), (4, "0.5 0.53452 0.53462 0.9352 -0.9352")):
        rewards = (torch.arange(8) < right).double()
        (mean, std), A = grpo.group_stats(rewards, 8), grpo.group_advantages(rewards, 8)
        on_page("06", f"| {right} | ", text, mean, std, std + 1e-4, A[0], A[-1])

    def silent(p, G=8):
        return p**G + (1 - p) ** G

    for text in "0.5 0.5 0.0078 0.00003", "0.9 0.82 0.4305 0.1853 0.0012", "0.99 0.9802 0.9227 0.8515 0.5256":
        p, *shares = text.split()
        on_page("06", f"| {p} |", text, float(p), *[silent(float(p), G) for G, _ in zip((2, 8, 16, 64), shares)])
    on_page("06", "the formula gives", "0.33 0.872 0.9227 0.0175 0.7417", silent(0.87), (4 * 0.99 + 0.4) / 5,
            silent(0.99), silent(0.4), (4 * 0.9227 + 0.0175) / 5)


def test_the_numbers_of_page_07():
    """Several rewards; twice the weights; None and 0"""
    rewards = f64([0.94, 0.91, -0.06])
    on_page("07", "| 1, 0.8 |", "0.5967 0.4645", *grpo.group_stats(rewards, 3, correction=0))
    on_page("07", "Twice the weights", "0.3433 0.6867", *[grpo.group_advantages(r, 3, **UNSCALED)[0]
                                                          for r in (rewards, 2 * rewards)])
    on_page("07", "a 0 is a grade", "-1.1547", grpo.group_advantages(f64([1, 1, 0]), 3, eps=0)[2])


def test_the_numbers_of_page_08():
    """The denominator of a softmax, two temperatures"""
    logits = f64([2, 1, 0])
    logps, sampler, total = logits.log_softmax(0), (logits / 0.5).log_softmax(0), logits.exp().sum()
    on_page("08", "e² + e + 1", "11.1073 2.4076 -0.4076 -1.4076 -2.4076", total, total.log(), logps)
    on_page("08", "How open was", "0.6652 0.2447 0.0900 0.8324", logps.exp(), grpo.entropy_from_logits(logits))
    too_likely = (logps - sampler)[[1, 0]]
    on_page("08", "At temperature 0.5", "-0.1429 -2.1429 -4.1429 2.086 0.767", sampler, too_likely.exp())
    on_page("08", "It finds 1, 2 and (GPT-2) 5", "0.735", too_likely[0])


def test_the_numbers_of_page_09():
    """Spreads of k1, k2, k3; a token that is almost lost; the KL in the reward or in the loss"""
    pi, ref, lost = f64([0.5, 0.25, 0.25]), f64([0.25, 0.25, 0.5]), f64([0.6, 0.399, 0.001])

    def of_three(p, estimator):
        """k, its mean and its standard deviation; the gradients on the third logit, on average and if it is drawn."""
        logits = p.log().requires_grad_()
        k = grpo.kl_estimate(logits.log_softmax(0), ref.log(), estimator=estimator)
        mean = p @ k                                                    # p is a constant
        return k, mean, (p @ (k - mean).square()).sqrt(), gradient(mean, logits)[2], gradient(k[2], logits)[2]

    for estimator, row, text in (("k1", "| k1 | 0.6931", "0.6931 0 -0.6931 0.1733 0.5747"),
                                 ("k2", "| k2 | ½", "0.2402 0 0.2402 0.1802 0.1040"),
                                 ("k3", "| k3 | ½", "0.1931 0 0.3069 0.1733 0.1103")):
        on_page("09", row, text, *of_three(pi, estimator)[:3])
    k1, k2, k3 = [of_three(lost, estimator) for estimator in ("k1", "k2", "k3")]
    on_page("09", "do not count on it", "15.6 0.30 500", k3[2], k1[2], ref[2] / lost[2])
    on_page("09", "calls the token back", "-0.007 -0.499 -498.5", k2[3], k3[3], k3[4])
    loss, _ = grpo.grpo_loss(logps := pi.log().unsqueeze(0).requires_grad_(), f64([0]), torch.ones(1, 3), beta=1,
                             ref_logps=ref.log().unsqueeze(0), use_bias_correction_kl=True)
    assert gradient(loss, logps)[0].tolist() == approx(((pi / ref).log() / 3).tolist())     # of ρ·k3: k1·∇log π

    k1, mask, scores = f64([[0.1, -0.2, 0.3], [0, 0, 0]]), torch.ones(2, 3), f64([1, 1])
    in_reward = variants.kl_penalized_rewards(scores, k1, 0 * k1, mask, beta=0.1).sum(1)
    on_page("09", "The rewards are 1 - 0.1", "0.98 1 0.99 0.01414 -0.7071", in_reward, *grpo.group_stats(in_reward, 2),
            grpo.group_advantages(in_reward, 2, eps=0)[0])
    k3 = grpo.kl_estimate(k1, 0 * k1)[0]
    assert k3.tolist() == approx([0.0048, 0.0214, 0.0408], abs=5e-5)
    loss, _ = grpo.grpo_loss(k1, 0 * scores, mask, ref_logps=0 * k1, beta=0.1, loss_type="grpo")
    on_page("09", "in the loss instead", "0.0224 0.00112", k3.mean(), loss)


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
    on_page("10", "| ρ: how many times", "1 1.2586 1.4918", drift[0].exp())
    clip, dapo, cispo = dict(loss_type="grpo"), dict(epsilon_high=0.28), dict(policy_loss="cispo")
    sequence, narrow = dict(importance_sampling_level="sequence"), dict(epsilon_low=3e-4, epsilon_high=4e-4)
    gspo, sapo = clip | sequence | narrow, clip | dict(policy_loss="sapo")
    per_answer, dr_grpo = [dict(loss_type="dr_grpo", max_completion_length=T_max) for T_max in (1, 3)]
    grades = f64([[1, 1, 1], [1, 1, math.nan], [1, 1, 0], [0, math.nan, math.nan]])
    by_step = grpo.process_advantages(grades, torch.arange(3).expand(4, 3), MASK, 4, **BY_G)
    of_others, centred = variants.leave_one_out_advantages(R, 4), grpo.group_advantages(R, 4, **UNSCALED)
    token_rewards, V = variants.kl_penalized_rewards(R, STILL, STILL, MASK, beta=0), moved(0.6, 0.7, 0.9)
    by_critic, deltas, of_mean = [variants.gae_advantages(token_rewards, values, MASK, lam=lam)[0]
                                  for values, lam in ((V, 1), (V, 0), (STILL + 0.5, 1))]
    for where, text, got, log_ratios, options in (
            ("PPO | 0.4", "0.4 0.3 0.1 0.0333", by_critic, drift, clip),
            ("Dr. GRPO | 0.5", "0.5 0.5 0.5 0.0417", centred, drift, dr_grpo),
            ("process supervision | 1", "1.6036 1.0690 0.5345 0.1336", by_step, drift, clip),
            ("RLOO | ⅔", "0.5", of_others, STILL, per_answer), ("REINFORCE | 1", "1 1 1 0.75", R, STILL, per_answer)):
        its = got[0].expand(3), pushes(got, log_ratios, **options).sum()
        on_page("10", f"| {where}", text, *its[-len(text.split()):])
    on_page("10", "PPO's critic guesses", "0.1 0.2 0.1", deltas[0])
    assert (of_mean == grpo.broadcast_advantages(centred, MASK)).all()
    faded = pushes(A, drift, **sapo)
    on_page("10", "| SAPO | 1 |", "1 1.2378 1.4051 0.3036", 12 * faded, faded.sum())
    for options, pushed in (clip, 1), (gspo, 0), (sapo, 3):
        assert pushes(A, drift, **options).count_nonzero() == pushed, options
        assert pushes(A, STILL, **options).sum().item() == approx(0.25), options

    cancels = moved(0, 0.3, -0.5)
    ratio, of_cancels = [grpo.importance_ratio(x, STILL, MASK, **sequence)[0] for x in (drift, cancels)]
    on_page("10", "GSPO gives the whole answer", "1.2337", ratio)
    on_page("10", "rises and falls can cancel", "0.9355", of_cancels)
    each = pushes(A, cancels, **gspo)
    on_page("10", "All three, each by", "0.9355 0.0780 1.3499", of_cancels, each[0], cancels[0, 1].exp())
    assert len(set(each.tolist())) == 1 and pushes(A, cancels, **clip)[1] == 0
    A = grpo.group_advantages(f64([1, 1, 0, 0, 1, 1, 1, 1]), 4, **BY_G)   # one more group, silent, of the same lengths
    on_page("10", "dynamic sampling", "0.1255", pushes(A, torch.cat([drift, STILL]), MASK.repeat(2, 1), **dapo).sum())

    rho = f64([50]).requires_grad_()
    without, capped = [grpo.clipped_surrogate_loss(rho, f64([-1]), delta=delta) for delta in (None, 4)]
    on_page("10", "the loss is 4 instead", "4 50 0", capped, without, gradient(capped, rho))

    for right, text in ((4, "0.5 0.5 1"), (1, "0.875 0.3307 2.6458 0.875 0.125 7")):
        rewards = (torch.arange(8) < right).double()
        mean, std = grpo.group_stats(rewards, 8, correction=0)
        got = (1 - mean, std, grpo.group_advantages(rewards, 8, **BY_G)[0],
               1 - mean, mean, variants.maxrl_advantages(rewards, 8)[0])
        on_page("10", "MaxRL (arXiv", text, *got[-len(text.split()):])
        assert right == 1 or got[2] == got[5]                           # four of eight: both methods' A is 1

    teacher, policy, two = f64([[0.75, 0.25]]).log(), f64([0, 0]).requires_grad_(), torch.ones(1, 2)
    A = variants.distillation_advantages(teacher, policy.log_softmax(0).unsqueeze(0), two)
    pull = gradient(-(policy.softmax(0).detach() * A * policy.log_softmax(0)), policy)
    on_page("10", "A is ln(", "0.4055 -0.6931 -0.2747", A, pull[0])

    on_page("10", "The five grades", "0.8 0.4", *grpo.group_stats(f64([1, 1, 1, 1, 0]), 5, correction=0))
    ends, mask = torch.tensor([[1, 3, 5], [1, 3, 0]]), torch.arange(6) < torch.tensor([[6], [4]])
    A = grpo.process_advantages(f64([[1, 1, 1], [1, 0, math.nan]]), ends, mask, 2, **BY_G)
    on_page("10", "No. They get", "-1.5 -2 1.5 1 0.5", A[1, [0, 2]], A[0, ::2])
    for first, rows in ((1.1547, [[1, 1], [1, 0]]), (1.7889, [[1, 1, 1, 1], [1, 0, math.nan, math.nan]])):   # split
        A = grpo.process_advantages(f64(rows), torch.arange(len(rows[0])).expand(2, -1), torch.ones(2, 4), 2, **BY_G)
        assert A[0, 0].item() == approx(first, abs=5e-5)


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

    on_page("10", "so that the mean reward is", "0.6", p @ r)
    fixed = [variance(lambda rewards, G: rewards - b, 1) for b in (0, 0.6, 10)]
    on_page("10", "| variance of", "0.1662 0.0438 56.4062", *fixed)
    of_others, plain = [[variance(scores, G).item() for G in (2, 4)] for scores in (
        variants.leave_one_out_advantages, lambda rewards, G: rewards)]
    on_page("10", "But few others", "0.1172 0.1662 0.0831", of_others[0], fixed[0], plain[0])
    assert [of_others[1], plain[1]] == approx([0.0268, 0.0416], abs=5e-5)


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
    total = good["rewards/accuracy_reward/mean"] + good["rewards/think_format_reward/mean"]
    for step, text in ((8, "1.76 34 0.04"), (80, "1.96 72 0.01")):
        steps = slice(step - 8, step)
        on_page("11", "takes the run, and a checkpoint", f"{step} {text}", step, total[steps].mean(),
                100 * good["frac_reward_zero_std"][steps].mean(), good["entropy"][steps].mean())
    right, entropy = collapse["rewards/accuracy_reward/mean"], collapse["entropy"]
    on_page("11", "**The first two steps", "0.56 0.03 0.00 0.01", right[:3], 0.01)
    assert right[3:].max() < 0.01 and collapse["rewards/think_format_reward/mean"][2:4].max() < 0.5
    on_page("11", "Entropy does", "0.04 0.33 0.07", entropy[0], entropy[2], 0.07)
    assert ten["entropy"].max() < 0.07 and entropy[2] == entropy.max()
    on_page("11", "Entropy does", "0.16 0.07 37 80", 0.16, 0.07, (collapse["grad_norm"] > 0).sum(), len(collapse))
    assert max(abs(good["loss"]).max(), abs(collapse["loss"]).max()) < 0.07 and (good["grad_norm"] > 0).all()
    names = "rewards/accuracy_reward/mean", "frac_reward_zero_std", "entropy"
    right, quiet, entropy = [ten[name].reshape(10, 80).mean(0) for name in names]       # over ten seeds
    assert entropy[1:6].mean() > entropy[0] > entropy[-10:].mean()      # up, then down beyond the start
    assert quiet[1:6].mean() < quiet[0] < quiet[-10:].mean()            # down, then up beyond it
    assert 1 - right[-10:].mean() < quiet[-10:].mean() / 4              # few silent groups can be wrong ones


def test_the_numbers_of_page_03s_runs():
    """With the clip three seeds learn, without it they forget; how right seed 1 is after one step"""
    right = figures.csv("clip_runs.csv")["rewards/accuracy_reward/mean"].reshape(3, 2, 80)     # seed, clip or none, step
    assert (right[:, 0, -10:].mean(1) > 0.94).all() and (right[:, 1, -10:].mean(1) < 0.03).all()
    assert (right[:, 0, 0] == right[:, 1, 0]).all()                     # the first step's answers are drawn before it
    on_page("03", "They do: without the clip", "65 18", *(100 * right[1, :, 1]))


def test_the_numbers_of_page_10s_runs():
    """Ten methods and the demo, five seeds each: the seeds differ more; REINFORCE begins slowest"""
    lines = figures.csv("ten_methods.csv")
    names = list(dict.fromkeys(lines["method"]))
    held_out, first = [numpy.array([lines[column][lines["method"] == name] for name in names])          # (11, 5)
                       for column in ("held_out", "first_steps")]
    assert held_out.shape == (11, 5) and lines["seed"][:5].tolist() == [42, 1, 2, 3, 4]
    assert (held_out.argmin(1) == 3).all() and (held_out.mean(0).max() - held_out.mean(0).min() >
                                                held_out.mean(1).max() - held_out.mean(1).min())
    on_page("10", "Held out, the seeds", "0.988 0.998", held_out.mean(1).min(), held_out.mean(1).max())
    assert names[-1] == "REINFORCE" and (first[:-1] > first[-1]).all()


def test_the_numbers_of_page_06s_runs():
    """Its table of three seeds; two learn, and in 67 of the third's 100 steps all 32 groups are silent"""
    table = figures.csv("two_digit_sums.csv")
    runs = [table[table["run"] == f"seed {seed}"] for seed in (42, 43, 44)]
    on_page("06", "| sampled answers right", "0.87 0.01 0.88", *[run["reward"][-10:].mean() for run in runs])
    for metric, row, text in (("silent", "| silent groups, step 1", "0.97 0.77 0.97 1.00 0.94 0.74"),
                              ("entropy", "| entropy, step 1", "1.96 0.05 2.09 0.16 1.87 0.06")):
        on_page("06", row, text, *[x for run in runs for x in (run[metric][0], run[metric][-10:].mean())])
    stuck, others = table[table["run"] == "seed 43"], table[table["run"] != "seed 43"]
    assert set(stuck["reward"][-10:]) == {0, 1 / 32} and (stuck["silent"][-10:] == 1).all()     # 8 of 256: a group
    assert (stuck["grad_norm"] == 0).sum() == (stuck["silent"] == 1).sum() == 67
    assert stuck["silent"].min() == 30 / 32 and (others["silent"] < 1).all()
    right, silent = (runs[0][name].reshape(-1, 5).mean(1) for name in ("reward", "silent"))
    above = silent - (right**8 + (1 - right)**8)                        # the dots of seed 42, and the curve of G = 8
    assert abs(above[0]) < 0.003 < above[1:].min()
    assert stuck["entropy"][44] > 0.7                                   # it rises in between
    assert stuck["entropy"][7] < 0.17 < 0.6 < others["entropy"][others["step"] == 8].min()      # alike before right


def test_the_numbers_of_page_07s_runs():
    """A real model: three seeds, a learning rate that is too high, a reward that is hacked"""
    runs = figures.csv("real_model.csv")
    seeds = runs[numpy.char.startswith(runs["run"], "seed")]
    first, last = seeds[seeds["step"] <= 4], seeds[seeds["step"] > 26]
    for metric, text in (("silent", "0.69 0.67"), ("entropy", "1.94 0.13")):
        on_page("07", "to 0.13 nats", text, first[metric].mean(), last[metric].mean())
    on_page("07", "to 0.13 nats", "0.05 0.81 0.84 0.95", first["reward"].mean(),
            *[last["reward"][last["run"] == f"seed {seed}"].mean() for seed in (42, 43, 44)])
    too_fast = runs[(runs["run"] == "rate 1e-4") & (runs["step"] >= 4)]
    assert (too_fast["silent"] == 1).all() and (too_fast["grad_norm"] == 0).all()
    hacked = runs[runs["run"] == "hacked"]
    on_page("07", "The desert was a desert", "1.06 2.31", *[hacked["mentions"][hacked["step"] == i] for i in (1, 10)])


# README -----------------------------------------------------------------------------------------------------

def test_the_readmes_own_task_reward_and_command_run(tmp_path, monkeypatch, capsys):
    """Its line of JSON, its function and its command, with a small model made for them; the rewards are added"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    section = (ROOT / "README.md").read_text().partition("\n## Your own model")[2].partition("\n## ")[0]
    line, = re.findall(r"`(\{.*?\})`", section)
    code, commands = re.findall(r"^```\w*\n(.*?)^```$", section, re.S | re.M)
    Path("task.jsonl").write_text(f"{line}\n" * 8)
    Path("my_rewards.py").write_text(code)
    small_model.main("task.jsonl model --steps 0".split())
    start, resume = [line.replace("NAME_OR_FOLDER", "model").split()[2:] for line in commands.splitlines()]
    done = cli(*start, "--max_steps", 1, "--max_completion_length", 8, "--generation_batch_size", 16)
    assert done.code == 0 and "rewards: accuracy_reward, my_rewards.short" in done.out, done.err
    row = json.loads(Path("grpo-output/completions.jsonl").read_text())
    assert row["rewards"]["short"] == [0.5 if len(text) <= 3 else 0 for text in row["completions"]]
    assert row["rewards"]["accuracy_reward"] == [float(text == "cba") for text in row["completions"]]
    done = cli(*resume, "--max_steps", 2)
    assert done.code == 0 and "from step 1 of 2" in done.out, done.err


def test_the_readmes_story_is_in_the_pictures_data():
    """The carry's probability at the fork of the group, before and after the demo; loss near 0, more silent groups"""
    readme, run = (ROOT / "README.md").read_text(), figures.csv("tiny_run.csv")
    group = json.loads((figures.PICTURES / "group.json").read_text(encoding="utf-8"))
    assert group["prompt"] == "79+21=" and "its likeliest answer to 79+21 is 90" in readme
    before, *_, after = [carry for carry, _ in group["whole_run"]["probabilities"]]
    tokens, A = sum(len(answer["tokens"]) for answer in group["answers"]), max(group["advantages"])
    words = " ".join(readme.split())
    assert f"{tokens} tokens in all" in words and f"by 4 · {A:.3f}/{tokens} = {4 * A / tokens:.4f}" in words
    assert f"rises from {before:.1%} to {after:.1%}." in readme and f"a {before:.0%} chance to carry" in readme
    reward = run["rewards/accuracy_reward/mean"] + run["rewards/think_format_reward/mean"]
    for step in 8, 80:
        recent = slice(step - 8, step)
        silent = run["frac_reward_zero_std"][recent].mean()
        assert f"step {step}: reward {reward[recent].mean():.2f}, silent groups {silent:.0%}, ..." in readme
    assert abs(run["loss"]).max() < 0.02 and (run["grad_norm"] > 0).all()
