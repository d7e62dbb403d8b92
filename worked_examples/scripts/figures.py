"""Draw the pictures of README and of the worked examples.

    python worked_examples/scripts/figures.py               draw all pictures
    python worked_examples/scripts/figures.py run           first run the demo, and write anew what depends on it

`run` writes group.json and the demo's csv files: 75 runs, about half an hour on one core. (On another processor the
figures differ a little.)
"""

import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import matplotlib
import numpy
import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator
from PIL import Image

import grpo
from worked_examples import variants
from worked_examples.scripts import look_at_a_group, process_supervision

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
BLUE, ORANGE, GREY, PALE, INK = "#1668b8", "#c25700", "#59636e", "#e8ebee", "#1b1f24"  # color-blind readers tell them
CENTER = {"ha": "center", "va": "center"}
STYLE = {"figure.figsize": (7.0, 2.9), "figure.constrained_layout.use": True, "figure.dpi": 200, "text.color": INK,
         "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10.5, "axes.titleweight": "bold",
         "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 9}


def csv(name):
    return numpy.genfromtxt(PICTURES / name, delimiter=",", names=True, deletechars="", dtype=None, encoding="utf-8")


def signed(number, digits):
    return f"{number:+.{digits}f}".replace("-", "−")


def smooth(values, n):
    """The mean of up to n steps at each step."""
    return [values[max(0, i - n + 1):i + 1].mean() for i in range(len(values))]


# The group of look_at_a_group.py --------------------------------------------------------------------------------------

def group():
    """Its data, and the answers' beginning in common."""
    data = json.loads((PICTURES / "group.json").read_text(encoding="utf-8"))
    return data, data["forks"][0]["prefix"]


def method_in_one_picture():
    """README: eight answers with rewards and advantages, and the probabilities at their fork over the demo's steps."""
    data, shared = group()
    beginning = "".join(shared)
    k = len(beginning)
    left, right = Figure(figsize=(8.3, 3.4)).subplots(1, 2, width_ratios=(3, 1))
    left.set(xlim=(0, 100), ylim=(11.5, 0.3), title=f"1  Answer {data['prompt']} eight times, score each answer")
    left.axis("off")
    left.text(56, 0.9, "reward = format + right", size=9, color=GREY)
    left.text(84, 0.9, "advantage A", size=9, color=GREY)
    for y, i in enumerate(sorted(range(8), key=lambda i: -data["rewards"][i]), 2):
        text, A = data["answers"][i]["text"], data["advantages"][i]
        color = BLUE if A > 0 else ORANGE
        left.text(0, y, f"{beginning} {text[k + 1:]}", family="monospace", color=GREY)
        left.text(0, y, " " * k + "█", family="monospace", color=color)
        left.text(0, y, " " * k + text[k], family="monospace", color="white", weight="bold")
        is_right, form = (rewards[i] for rewards in data["rewards_per_func"].values())
        left.text(56, y, f"{form + is_right:g} = {form:g} + {is_right:g}", color=color)
        left.text(88, y, f"{'▲' if A > 0 else '▼'} {signed(A, 2)}", color=color)
    left.text(0, 10.4, "2  Push the tokens of each answer up (▲) or down (▼)", size=10.5, weight="bold")
    left.text(0, 11.4, f"A = (reward − mean)/std, mean {data['mean']:g}, std {data['std']:.2f}.  Left of the boxes the "
              "pushes cancel.", size=9, color=GREY)
    for word, color, percent in zip(("1, the carry", "0, forgotten"), (BLUE, ORANGE),
                                    100 * numpy.array(data["whole_run"]["probabilities"]).T):
        right.plot(percent, color=color, lw=2.5, label=f"{word}:\n{percent[0]:.1f}% → {percent[-1]:.1f}%")
    right.legend(loc="center right", title=f"next after {beginning[-4:]}")
    right.set(xlabel="step of the demo", xticks=(0, 40, 80), yticks=(0, 50, 100), yticklabels=("0%", "50%", "100%"),
              title="3  The carry wins")
    return left.figure


def fork():
    """README: what the pushes of the eight answers add up to at each token, before the first update."""
    data, shared = group()
    k = len(shared)
    pushes = 1000 * numpy.array([row[0] for row in data["methods"]["dapo"]["weights"][0]])     # alike in each token
    axis = Figure(figsize=(8.3, 2.7)).subplots()
    axis.axhline(0, color=PALE, lw=1, zorder=0)
    axis.plot(range(1, k + 1), [0] * k, "o-", color=INK, ms=5, lw=2.5)

    def name(t, y, token, **style):
        axis.text(t + 1, y, token, **CENTER, family="monospace", size=9 if len(token) < 5 else 7, **style)

    for t, token in enumerate(shared):
        name(t, -6, token, color=GREY)
    for color, sign, word in (BLUE, 1, "right"), (ORANGE, -1, "wrong"):
        branch = [i for i in range(8) if sign * data["advantages"][i] > 0]
        tokens, net = data["answers"][branch[0]]["tokens"], pushes[branch].sum()
        axis.plot([k, k + 1], [0, net], "-", color=color, lw=2.5)
        axis.plot(range(k + 1, len(tokens) + 1), [net] * (len(tokens) - k), "o-", color=color, ms=5, lw=2.5)
        for t in range(k, len(tokens)):
            name(t, net + sign * 6, tokens[t], color=color, weight="bold" if t == k else "normal")
        axis.text(k + 1.5, 0.5 * net, f"four {word} answers: {signed(net, 1)}", color=color, va="center")
    axis.text(0.8, 9, f"all eight answers agree: {signed(pushes[pushes > 0].sum(), 1)} and "
              f"{signed(pushes[pushes < 0].sum(), 1)} cancel", va="center")
    axis.set(xlabel=f"token of the answers to {data['prompt']}", ylabel="net push × 1000", ylim=(-38, 38),
             yticks=(-20, 0, 20), xticks=range(1, 22, 4), title="Where the answers part, the pushes part")
    return axis.figure


# Pages 0 to 4: computed -----------------------------------------------------------------------------------------------

def one_page():
    """Page 0: four answers to 7+5=, and one update of the logits of three words."""
    after = torch.tensor([0.25, -0.125, -0.125]).softmax(0)             # minus the gradient at three equal logits
    left, right = Figure().subplots(1, 2)
    left.set(xlim=(0, 10), ylim=(5.4, -0.4), title="Four answers to 7+5=, scored")
    left.axis("off")
    rows = [("answer", "score", "score − mean", GREY), ("12", "1", "▲ +0.5", BLUE), ("11", "0", "▼ −0.5", ORANGE),
            ("12", "1", "▲ +0.5", BLUE), ("13", "0", "▼ −0.5", ORANGE), ("mean", "0.5", "0", GREY)]
    for y, (answer, score, advantage, color) in enumerate(rows):
        for x, text in ((0, answer), (3, score), (5.6, advantage)):
            left.text(x, y, text, size=11, color=color, va="center")
    left.axhline(4.5, color=PALE, lw=1)
    before = right.bar(numpy.arange(3) - 0.2, [100 / 3] * 3, 0.36, color=PALE)
    updated = right.bar(numpy.arange(3) + 0.2, (100 * after).tolist(), 0.36, color=[BLUE, ORANGE, ORANGE])
    right.bar_label(before, fmt="%.0f%%")
    right.bar_label(updated, fmt="%.0f%%", weight="bold")
    right.set(xticks=range(3), xticklabels=["12", "11", "13"], yticks=[], ylim=(0, 48), xlabel="answer",
              ylabel="probability", title="One update: before (gray) and after")
    return left.figure


def token_losses():
    """Page 1: three answers of 5, 4 and 6 tokens, advantages 1.225, -1.225 and 0; a second update."""
    A = torch.tensor([[1.225], [-1.225], [0.0]], dtype=torch.float64)
    drift = torch.tensor([[0.10, 0.05, -0.10, 0.08, 0.02, 0], [-0.05, 0.10, -0.08, 0.05, 0, 0],
                          [0.08, -0.05, 0.10, 0.05, -0.08, 0.10]], dtype=torch.float64)
    return grpo.clipped_surrogate_loss(drift.exp(), A.expand(3, 6)), torch.arange(6) < torch.tensor([[5], [4], [6]])


def three_averages():
    """Page 1: the token losses as a heat map, and an arrow to each average."""
    losses, mask = token_losses()
    total, sizes = losses[mask].sum().item(), mask.sum(1)
    axis = Figure(figsize=(8.3, 3.1)).subplots()
    axis.set(xlim=(-2.1, 15.2), ylim=(4.7, -0.8), title="Fifteen token losses, three averages")
    axis.axis("off")
    colors = LinearSegmentedColormap.from_list("", [BLUE, PALE, ORANGE])
    axis.imshow(losses.where(mask, torch.nan).numpy(), cmap=colors, vmin=-1.6, vmax=1.6, extent=(0, 6, 3, 0),
                aspect="auto")
    arrow = lambda start, end: axis.annotate("", end, start, arrowprops=dict(arrowstyle="->", color=GREY, lw=1.5))
    write = lambda x, y, text, **style: axis.text(x, y, text, **(CENTER | dict(size=9) | style))
    for i, color in enumerate((BLUE, ORANGE, GREY)):
        write(-0.2, i + 0.5, f"answer {i + 1}", ha="right")
        for t in range(sizes[i]):
            loss = losses[i, t]
            write(t + 0.5, i + 0.5, signed(loss, 2) if loss else "0", color="white" if loss else INK)
        mean = losses[i, mask[i]].mean()
        write(7.5, i + 0.5, signed(mean, 4) if mean else "0", color=color, weight="bold")
        arrow((6.1 if i == 2 else sizes[i] + 0.1, i + 0.5), (6.6, i + 0.5))
        arrow((8.4, i + 0.5), (9.7, 0.65 + 0.2 * i))
    write(7.5, -0.4, "mean", color=GREY)
    write(3, 3.9, f"sum of the 15: {signed(total, 4)}", weight="bold")
    arrow((3, 3.1), (3, 3.6))
    for y, loss_type, how in ((0.85, "grpo", "mean of the 3 means"), (3.1, "dapo", "sum / 15 tokens"),
                              (4.2, "dr_grpo", "sum / (3 answers · limit 6)")):
        loss = grpo.aggregate(losses, mask, loss_type=loss_type, max_completion_length=6)
        write(9.9, y, f"{loss_type}: {signed(loss, 4)}", ha="left", size=10.5, weight="bold")
        write(9.9, y + 0.5, how, ha="left", color=GREY)
        if y > 3:
            arrow((5.3, 3.9), (9.7, y + 0.2))
    return axis.figure


def two_words():
    """Page 2: P(right) before each of forty updates, and the loss there; new answers every fourth update."""
    words, theta, right, losses = torch.tensor([[0], [1]]), torch.zeros(2, dtype=torch.float64), [], []
    for update in range(40):
        theta.requires_grad_()
        logps = theta.log_softmax(0)[words]
        old_logps = logps.detach() if update % 4 == 0 else old_logps
        loss, _ = grpo.grpo_loss(logps, torch.tensor([1.0, -1.0]).double(), torch.ones(2, 1), old_logps=old_logps)
        right.append(theta.softmax(0)[0].item())
        losses.append(loss.item())
        theta = (theta - 0.2 * torch.autograd.grad(loss, theta)[0]).detach()
    return right, losses


def sawtooth():
    """Page 2: the policy gets better while the loss is a sawtooth whose lows rise."""
    right, losses = two_words()
    above, below = Figure(figsize=(7.0, 3.9)).subplots(2, 1, sharex=True)
    for start in range(0, 40, 8):                                       # every other round is shaded
        for axis in above, below:
            axis.axvspan(start + 0.5, start + 4.5, color=PALE, lw=0)
    above.plot(range(1, 41), right, "o-", color=BLUE, ms=3, lw=2)
    above.set(ylim=(0.45, 1.05), yticks=(0.5, 0.75, 1), title="The policy gets better: probability of the right word")
    above.text(1, right[0] + 0.09, f"{right[0]:.1f}", color=BLUE, ha="center", weight="bold")
    above.text(40, right[-1] - 0.15, f"{right[-1]:.2f}", color=BLUE, ha="center", weight="bold")
    below.plot(range(1, 41), losses, "o-", color=ORANGE, ms=3, lw=1.5)
    lows = [start + int(numpy.argmin(losses[start:start + 4])) for start in range(0, 40, 4)]
    below.plot([i + 1 for i in lows], [losses[i] for i in lows], ":", color=INK, lw=1.5, label="lowest loss of a round")
    for i in lows[0], lows[-1]:
        below.text(min(i + 1, 39), losses[i] - 0.04, signed(losses[i], 3), color=ORANGE, ha="center", weight="bold")
    below.set(ylim=(-0.25, 0.03), yticks=(-0.2, -0.1, 0), xticks=(1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 40),
              xlabel="update (shaded or white: a round of four updates on the same answers)",
              title="The loss returns to 0 with new answers, and its lows rise")
    below.legend(loc="lower center")
    return above.figure


def clipping():
    """Page 3: the loss of one token over its ratio, and the four names of the page's table."""
    ratio = torch.linspace(0.2, 1.8, 321)
    panels = Figure(figsize=(8.3, 3.1)).subplots(1, 2)
    drawn = ((1.0, "A = +1: a good token, up to 1.2", (-1.5, -1.2, -1, -0.5),
              ("it fell instead:\nstill pushed up", 0.5, -1.1, BLUE), ("far enough:\nno gradient", 1.5, -0.95, ORANGE)),
             (-1.0, "A = −1: a bad token, down to 0.8", (0.5, 0.8, 1, 1.5),
              ("far enough:\nno gradient", 0.5, 1.05, ORANGE), ("it rose instead:\nstill pushed down", 1.5, 0.9, BLUE)))
    for axis, (A, title, ticks, *names) in zip(panels, drawn):
        axis.axvspan(0.8, 1.2, color=PALE, lw=0)
        axis.plot(ratio, -ratio * A, ":", color=GREY, lw=1.5, label="without the clip")
        axis.plot(ratio, grpo.clipped_surrogate_loss(ratio, torch.full_like(ratio, A)), color=BLUE, lw=2.5)
        axis.plot([1], [-A], "o", color=INK, ms=5, label="ρ = 1: as sampled")
        for name, x, y, color in names:
            axis.text(x, y, name, **CENTER, size=9, color=color)
        axis.set(xlabel="ratio ρ (shaded: 0.8 … 1.2)", ylabel="loss of the token (lower is better)", title=title,
                 xticks=(0.5, 0.8, 1, 1.2, 1.5), yticks=ticks)
    panels[0].legend(loc="lower left")
    return axis.figure


def token_weights():
    """Page 4: the two right answers, of 2 and 8 tokens; a token's area is its weight, in each row on the same scale."""
    mask = torch.arange(8) < torch.tensor([[2], [8], [2], [8]])
    rows = Figure(figsize=(8.3, 3.1)).subplots(3, 1, sharex=True, sharey=True)
    for axis, loss_type in zip(rows, ("grpo", "dapo", "dr_grpo")):
        losses = torch.zeros(4, 8, requires_grad=True)
        loss = grpo.aggregate(losses, mask, loss_type=loss_type, max_completion_length=10)
        weights = torch.autograd.grad(loss, losses)[0]
        for i, x0, color in (0, 0, GREY), (1, 3.4, BLUE):
            n, w = int(mask[i].sum()), weights[i, 0].item()
            side = (w / 0.125) ** 0.5                                   # grpo's largest token is 1 by 1
            for t in range(n):
                x = x0 + 1.05 * t + 0.525 - side / 2
                axis.add_patch(Rectangle((x, 0.5 - side / 2), side, side, fc=color, lw=0))
            axis.text(x0 + 1.05 * n / 2, 1.2, f"{n} tokens of {w:g} = {n * w:g}", color=color, **CENTER, size=9)
        axis.text(-0.4, 0.5, loss_type, ha="right", va="center", weight="bold", size=11)
        axis.set(xlim=(-2.1, 12.2), ylim=(-0.02, 1.45), aspect="equal")
        axis.axis("off")
    rows[0].set_title("A token's area is its weight: tokens can weigh the same, or answers, not both", x=0.0)
    return rows[0].figure


def mean_lengths(loss_type, updates=4):
    """Page 4's policy of four answers: the mean tokens of a right and of a wrong one before and after each update."""
    mask, A = torch.arange(8) < torch.tensor([[2], [8], [2], [8]]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    theta, lengths = torch.zeros(4), []
    for _ in range(updates + 1):
        p = theta.requires_grad_().softmax(0).view(2, 2)                # right, wrong; short, long
        lengths.append((p @ torch.tensor([2.0, 8.0]) / p.sum(1)).tolist())
        logps = torch.cat([theta.log_softmax(0).unsqueeze(1), torch.zeros(4, 7)], 1)
        loss, _ = grpo.grpo_loss(logps, A, mask, loss_type=loss_type)
        theta = (theta - 8 * torch.autograd.grad(loss, theta)[0]).detach()
    return numpy.array(lengths)


def growing_answers():
    """Page 4: under grpo wrong answers grow longer, right ones shorter; under dapo they keep their lengths."""
    axis = Figure(figsize=(7.0, 2.7)).subplots()
    (right, wrong), level = mean_lengths("grpo").T, mean_lengths("dapo")[:, 1]
    for values, color, name, dy in ((wrong, ORANGE, "grpo, wrong answers", 0.45), (level, GREY, "dapo, both", 0.45),
                                    (right, BLUE, "grpo, right answers", -0.55)):
        axis.plot(range(5), values, "o-", color=color, lw=2.5)
        axis.text(4.12, values[-1], name, color=color, va="center", weight="bold")
        for update in range(1, 5):
            axis.text(update, values[update] + dy, f"{values[update]:.3g}", color=color, **CENTER, size=9)
    axis.set(xlim=(-0.15, 5.5), ylim=(1.4, 8.6), xticks=range(5), yticks=(2, 5, 8), xlabel="update",
             ylabel="mean tokens", title="grpo: a mistake survives better if it is long")
    return axis.figure


# Pages 3, 6, 7, 10, 11: runs ------------------------------------------------------------------------------------------

def with_and_without_the_clip():
    """Page 3: right answers of three runs with the clip, and of three without it."""
    right = csv("clip_runs.csv")["rewards/accuracy_reward/mean"].reshape(3, 2, -1)
    panels = Figure(figsize=(8.3, 2.7)).subplots(1, 3, sharey=True)
    for panel, seed, pair in zip(panels, (42, 1, 2), right):
        for values, color, name in zip(pair, (BLUE, ORANGE), ("with the clip", "without it")):
            panel.plot(range(1, len(values) + 1), values, color=color, lw=0.5, alpha=0.4)
            panel.plot(range(1, len(values) + 1), smooth(values, 5), color=color, lw=2.2, label=name)
        panel.set(xlabel="step", title=f"Seed {seed}", ylim=(-0.03, 1.03))
    panels[0].set(ylabel="share of right answers")
    panels[1].legend(loc="center right")
    return panel.figure


def silent_groups():
    """Page 6: the share of silent groups if all questions were alike, p^G + (1 - p)^G, and what two runs show."""
    p = numpy.linspace(0, 1, 501)
    axis = Figure(figsize=(7.0, 3.6)).subplots()
    for G, color, width, x, y in (2, GREY, 1.5, 0.33, 0.61), (8, INK, 2.5, 0.22, 0.24), (64, GREY, 1.5, 0.08, 0.07):
        axis.plot(p, p**G + (1 - p) ** G, color=color, lw=width)
        axis.text(x, y, f"G = {G}", color=color, va="center", weight="bold")
    lines = csv("two_digit_sums.csv")
    for run, color, marker in ("seed 42", BLUE, "o"), ("seed 43", ORANGE, "s"):
        reward, silent = (lines[metric][lines["run"] == run].reshape(-1, 5).mean(1) for metric in ("reward", "silent"))
        axis.plot(reward, silent, marker, color=color, ms=4.5, alpha=0.8)
    axis.text(0.05, 0.99, "seed 43 stays in this corner", color=ORANGE, va="center")
    axis.text(0.84, 0.35, "seed 42: means of five steps, G = 8", color=BLUE, va="center", ha="right")
    axis.set(xlabel="share of right answers", ylabel="share of silent groups", xlim=(-0.02, 1.02), ylim=(-0.02, 1.04),
             title="Curves: if all questions were equally hard. Dots: two runs")
    return axis.figure


def three_panels(curves):
    """Right answers, silent groups and entropy over the steps, of each curve: three columns, and how it is drawn."""
    panels = Figure(figsize=(9.0, 3.0)).subplots(1, 3)
    drawn = (("Right answers", "share of answers"), ("Silent groups", "share of groups"),
             ("Entropy (log scale)", "nats per token"))
    for i, (panel, (title, unit)) in enumerate(zip(panels, drawn)):
        for columns, style in curves:
            panel.plot(range(1, len(columns[i]) + 1), columns[i], **style)
        panel.set(xlabel="step", title=title, ylabel=unit)
    panels[0].legend()
    panel.set_yscale("log", subs=[])
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter("{x:g}")
    return panel.figure


def three_seeds(name, *colors):
    """Pages 6 and 7: runs of a real model."""
    lines, curves = csv(f"{name}.csv"), []
    for seed, color in zip((42, 43, 44), colors):
        run = lines[lines["run"] == f"seed {seed}"]
        curves.append(([smooth(run[metric], 3) for metric in ("reward", "silent", "entropy")],
                       dict(color=color, lw=1.8, label=f"seed {seed}")))
    figure = three_panels(curves)
    figure.supxlabel("A line is the mean of up to three steps.", size=9, color=GREY)
    return figure


def toy_run():
    """Page 7: two rewards of sorted letters; in_order can be hacked, as in_place, measured in both runs, shows."""
    lines = csv("toy_run.csv")
    panels = Figure(figsize=(9.0, 2.9)).subplots(1, 3)
    drawn = ("reward", "What each is trained on"), ("in_place", "Letters in place"), ("length", "Tokens of an answer")
    for panel, (column, title) in zip(panels, drawn):
        for run, color in ("in_place", BLUE), ("in_order", ORANGE):
            values = smooth(lines[column][lines["run"] == run], 10)
            panel.plot(range(1, len(values) + 1), values, color=color, lw=2.2, label=f"trained on {run}")
        panel.set(xlabel="step (mean of up to ten)", title=title, ylim=(0, 6.3 if column == "length" else 1.05))
    panels[0].set(ylabel="mean reward")
    panels[1].set(ylabel="share of the letters")
    panels[0].legend(loc="lower right")
    return panel.figure


def two_runs():
    """Page 11: the demo with ten seeds, and the collapse."""
    metrics = "rewards/accuracy_reward/mean", "frac_reward_zero_std", "entropy"
    good, collapse = csv("tiny_seeds.csv"), csv("collapsed_run.csv")
    seeds = numpy.array([good[metric].reshape(10, -1) for metric in metrics])           # metric, seed, step
    figure = three_panels([
        (seeds.transpose(0, 2, 1), dict(color=BLUE, lw=0.6, alpha=0.3)),
        (seeds.mean(1), dict(color=BLUE, lw=2.5, label="ten seeds, mean")),
        ([collapse[metric] for metric in metrics], dict(color=ORANGE, lw=2, label="learning rate × 10"))])
    figure.axes[0].legend(loc="center right")
    return figure


def ten_methods():
    """Page 10: the demo and ten methods, five seeds each: what greedy answers reach, and how fast samples rise."""
    lines = csv("ten_methods.csv")
    names = list(dict.fromkeys(lines["method"]))
    panels = Figure(figsize=(8.3, 3.5)).subplots(1, 2, sharey=True)
    drawn = ("held_out", "Held-out sums, greedy, after 80 steps"), ("first_steps", "Samples, mean of steps 1 to 20")
    for panel, (column, title) in zip(panels, drawn):
        for y, name in enumerate(names):
            values = lines[column][lines["method"] == name]
            panel.axhline(y, color=PALE, lw=1, zorder=0)
            panel.plot(values, [y] * len(values), "o", color=BLUE, ms=5, alpha=0.55, mew=0, label="a seed" * (y == 0))
            panel.plot(values.mean(), y, "|", color=INK, ms=13, mew=2, label="mean of five" * (y == 0))
        panel.set(xlabel="share of right answers", title=title, yticks=range(len(names)), yticklabels=names,
                  ylim=(len(names) - 0.5, -0.5))
    panels[0].set(xlim=(0.9, 1.004))
    panels[0].legend(loc="lower left")
    return panel.figure


DRAWINGS = {
    "grpo": method_in_one_picture, "fork": fork, "one_page": one_page, "three_averages": three_averages,
    "sawtooth": sawtooth, "clipping": clipping, "clip_runs": with_and_without_the_clip,
    "token_weights": token_weights, "growing_answers": growing_answers, "silent_groups": silent_groups,
    "toy_run": toy_run, "ten_methods": ten_methods, "two_runs": two_runs,
    "two_digit_sums": lambda: three_seeds("two_digit_sums", BLUE, ORANGE, INK),
    "real_model": lambda: three_seeds("real_model", BLUE, GREY, INK)}

# The runs of the demo -------------------------------------------------------------------------------------------------

RUNS = {"tiny_run": [""], "collapsed_run": ["--learning_rate 4e-3"],
        "tiny_seeds": [f"--seed {seed}" for seed in range(200, 210)],
        "clip_runs": [f"--num_iterations 8 --seed {seed} {limits}" for seed in (42, 1, 2)
                      for limits in ("", "--epsilon 1 --epsilon_high 1e9")]}
METRICS = ["step", "rewards/accuracy_reward/mean", "rewards/think_format_reward/mean", "frac_reward_zero_std",
           "entropy", "grad_norm", "loss"]


def per_answer(function):
    """What train takes, from a function of rewards and G."""
    return lambda rewards, rollout, config: grpo.broadcast_advantages(
        function(rewards, config.num_generations), rollout.completion_mask).to(rollout.sampler_logps)


METHODS = {                                                             # page 10's flags, with the demo's two passes
    "the demo": "", "GRPO": "--loss_type grpo --beta 0.04",
    "DAPO": "--epsilon_high 0.28 --mask_truncated_completions true",
    "GSPO": "--loss_type grpo --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4",
    "SAPO": "--loss_type grpo --policy_loss sapo", "CISPO": "--policy_loss cispo",
    "Dr. GRPO": "--loss_type dr_grpo --scale_rewards none", "process supervision": "",
    "MaxRL": "--loss_type grpo",
    "RLOO": "--loss_type dr_grpo --num_iterations 1", "REINFORCE": "--loss_type dr_grpo --num_iterations 1"}
ADVANTAGES = {
    "process supervision": process_supervision.compute_advantages, "MaxRL": per_answer(variants.maxrl_advantages),
    "RLOO": per_answer(variants.leave_one_out_advantages), "REINFORCE": per_answer(lambda rewards, G: rewards)}


def demo(flags, compute_advantages=grpo.outcome_advantages):
    """The demo's policy after its cold start, its steps, and a function that answers the held-out sums."""
    options, config, _ = grpo.parse_options(["--model", "tiny", *flags.split()])
    policy, tokenizer, *job, held_out = grpo.load_job(options, config)
    answer = lambda: grpo.evaluate(policy, tokenizer, held_out, [grpo.accuracy_reward], config)["accuracy_reward"]
    return policy, grpo.train(policy, tokenizer, *job, config, compute_advantages=compute_advantages), answer


def run_all():
    """The csv files; group.json: look_at_a_group.py's data, and the carry at its first fork in a whole run."""
    for name, runs in RUNS.items():
        table = [[metrics[metric] for metric in METRICS] for flags in runs for _, _, metrics in demo(flags)[1]]
        numpy.savetxt(PICTURES / f"{name}.csv", table, "%.5g", ",", header=",".join(METRICS), comments="")
    lines = ["method,seed,held_out,first_steps"]
    for (name, flags), seed in itertools.product(METHODS.items(), (42, 1, 2, 3, 4)):
        _, steps, answer = demo(f"{flags} --seed {seed}", ADVANTAGES.get(name, grpo.outcome_advantages))
        right = numpy.array([metrics["rewards/accuracy_reward/mean"] for _, _, metrics in steps])
        lines.append(f"{name},{seed},{answer():.3f},{right[:20].mean():.4f}")
    (PICTURES / "ten_methods.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = look_at_a_group.group_data(*look_at_a_group.load(["--json", "group.json"])[1])
    ids = grpo.tiny_tokenizer().convert_tokens_to_ids
    question, beginning = torch.tensor(ids([*data["prompt"]])), ids(data["forks"][0]["prefix"])
    policy, steps, _ = demo("")
    probabilities = []
    for _ in itertools.chain(["before the first step"], steps):
        probs = look_at_a_group.next_token_probs(policy, question, beginning, 1.0)
        probabilities.append(probs[ids(["1", "0"])].tolist())
    data["whole_run"] = {"words": ["1", "0"], "probabilities": probabilities}
    (PICTURES / "group.json").write_text(json.dumps(data, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        run_all()
    matplotlib.rcParams.update(STYLE)
    for name, draw in DRAWINGS.items():
        path = PICTURES / f"{name}.png"
        draw().savefig(path)
        Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)    # a third
