"""Draw the pictures of README and of the worked examples, each for a light and for a dark page.

    python worked_examples/scripts/figures.py               draw all pictures but real_group.png, a screenshot
    python worked_examples/scripts/figures.py run           run the demo first, and write anew what depends on it
    python worked_examples/scripts/figures.py checks trl    write a library's table (trl, verl) on the page of trainers

`run` is `python grpo.py --model tiny`, the same with a learning rate ten times as high, and with ten seeds, then the
page of a group: about eight minutes on one core. It writes the csv files of these runs, group.html, the output in
README and the table on 11_reading_a_run.md. (Another processor adds in another order, and its figures differ a little.)
"""

import copy
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "worked_examples"
PICTURES = EXAMPLES / "pictures"
sys.path.insert(0, str(ROOT))
import grpo  # noqa: E402
from worked_examples.scripts import look_at_a_group  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

# Blue and orange differ for colour-blind readers, too; where there are more lines, they have labels.
LIGHT = SimpleNamespace(paper="#ffffff", ink="#1b1f24", grey="#59636e", blue="#1668b8", orange="#c25700",
                        pale="#e8ebee")
DARK = SimpleNamespace(paper="#0d1117", ink="#e8eaed", grey="#a9b1ba", blue="#5aa7ee", orange="#f0883e",
                       pale="#262c34")
STYLE = {
    "figure.figsize": (7.0, 2.9),
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def use(theme):
    """Let matplotlib draw in these colours."""
    plt.rcParams.update(STYLE)
    for name in ("figure.facecolor", "axes.facecolor", "savefig.facecolor"):
        plt.rcParams[name] = theme.paper
    for name in ("text.color", "axes.labelcolor", "axes.titlecolor"):
        plt.rcParams[name] = theme.ink
    for name in ("axes.edgecolor", "xtick.color", "ytick.color"):
        plt.rcParams[name] = theme.grey


def save(figure, name):
    figure.savefig(PICTURES / name, dpi=200, metadata={"Software": None})
    plt.close(figure)
    few_colours = Image.open(PICTURES / name).convert("RGB").quantize(200, dither=Image.Dither.NONE)
    few_colours.save(PICTURES / name, optimize=True)


def draw_all():
    for name, draw in DRAWINGS.items():
        for theme, suffix in (LIGHT, "_light" if name == "grpo" else ""), (DARK, "_dark"):
            use(theme)
            save(draw(theme), f"{name}{suffix}.png")


def label_ends(axis, x, ends):
    """Write at the right end of each line (y, label, colour) its label, no two closer than a line of text."""
    low, high = axis.get_ylim()
    gap, ends = 0.075 * (high - low), sorted(ends)
    places = [y for y, _, _ in ends]
    for k in 100 * list(range(1, len(places))):                         # neighbours push each other apart
        push = max(0, gap - (places[k] - places[k - 1])) / 2
        places[k - 1], places[k] = places[k - 1] - push, places[k] + push
    over = max(0, places[-1] - high)
    for y, (_, label, colour) in zip(places, ends):
        axis.annotate(label, (x, y - over), (4, 0), textcoords="offset points", color=colour, va="center", size=9,
                      annotation_clip=False)


def csv(name):
    return numpy.genfromtxt(PICTURES / name, delimiter=",", names=True, deletechars="")


def group_of_the_page(name="group.html"):
    """The data in a page of pictures/."""
    page = (PICTURES / name).read_text(encoding="utf-8")
    return json.loads(re.search(r'id="group">(.*?)</script>', page, re.S)[1])


# README ---------------------------------------------------------------------------------------------------------------

def shared_beginning(tokens, answers):
    """How many tokens an answer shares with one that is not the same."""
    others = [other for other in answers if other != tokens]
    equal = [[a == b for a, b in zip(tokens, other)] + [False] for other in others]
    return max(row.index(False) for row in equal)


def method_in_one_picture(theme):
    """README: eight answers with rewards and advantages, and the probabilities at their fork over a run."""
    data = group_of_the_page()
    prefix, run = data["forks"][0]["prefix"], data["whole_run"]
    figure = plt.figure(figsize=(8.3, 3.5), layout="none")
    left, right = figure.add_axes((0.01, 0, 0.66, 1)), figure.add_axes((0.755, 0.165, 0.225, 0.645))
    left.set(xlim=(0, 100), ylim=(14.1, 0))
    left.axis("off")
    bold = dict(weight="bold", size=11.5, color=theme.ink, va="center")
    small = dict(size=8.3, va="center", color=theme.grey)
    G, winners = len(data["answers"]), sum(A > 0 for A in data["advantages"])
    chance = math.exp(sum(data["old_logps"][data["rewards"].index(max(data["rewards"]))]))    # of a right answer
    luck = math.comb(G, winners) * chance**winners * (1 - chance) ** (G - winners)
    left.text(0, 0.7, f"1  GRPO asks {data['prompt']} {G} times, rewards each answer", **bold)
    chosen = f"chosen: {100 * chance:.1f}% are right, 1 group in {round(1 / luck, -1):.0f} has {winners}"
    left.text(0, 1.7, chosen, **small)
    left.text(54, 1.7, "reward = format + right", **small)
    left.text(85.5, 1.7, "advantage A", **small)
    answers = [[token for token in answer["tokens"] if token != "<eos>"] for answer in data["answers"]]
    shared = [shared_beginning(tokens, answers) for tokens in answers]
    best_first = sorted(range(len(answers)), key=lambda i: (-data["rewards"][i], -shared[i]))
    for row, i in enumerate(best_first):
        y, A = 2.8 + 0.95 * row, data["advantages"][i]
        colour, sign = (theme.blue, "▲") if A > 0 else (theme.orange, "▼")
        fork, width = sum(map(len, answers[i][:shared[i]])), 1.6        # of a character, in hundredths of the panel
        left.add_patch(plt.Rectangle((width * fork - 0.15, y - 0.42), width + 0.3, 0.84, color=colour, lw=0))
        for k, character in enumerate("".join(answers[i])):
            style = dict(color=theme.paper, weight="bold") if k == fork else dict(color=theme.grey)
            left.text(width * (k + 0.5), y, character, ha="center", va="center", family="monospace", size=10.5, **style)
        form, sum_right = (data["rewards_per_func"][name][i] for name in ("think_format_reward", "accuracy_reward"))
        reward = f"{data['rewards'][i]:g} = {form:g} + {sum_right:g}"
        left.text(54, y, reward, size=9.5, va="center", color=colour)
        left.text(85.5, y, f"{sign} {A:+.2f}".replace("-", "−"), size=9.5, va="center", color=colour)
    left.text(0, 11.4, "2  Push each token’s log-probability by A (▲ or ▼)", **bold)
    best = max(data["rewards"])
    example = f"({best:g} − {data['mean']:g}) / {data['std']:.2f} = {max(data['advantages']):.2f}"
    meanings = ("Before the fork (box) pushes cancel; after it, the model is sure. Probability moves at the fork.",
                f"A = (reward − mean) / standard deviation (with n − 1): {example}")
    for line, meaning in enumerate(meanings):
        left.text(0, 12.4 + 0.9 * line, meaning, **small | {"color": theme.ink})
    probabilities = 100 * numpy.array(run["probabilities"])
    steps = len(probabilities) - 1
    for k, (colour, y, verdict) in enumerate(((theme.blue, 80, "carry, right"), (theme.orange, 20, "no carry, wrong"))):
        first, last = (f"{p:.1f}%" if p >= 0.1 else "< 0.1%" for p in probabilities[[0, -1], k])
        right.plot(probabilities[:, k], color=colour, lw=2.5)
        text = f"{run['words'][k]} ({verdict}):\n{first} → {last}"
        right.text(0.98 * steps, y, text, color=colour, ha="right", va="center", size=9.5)
    right.set(xlim=(0, steps), ylim=(-2, 102), yticks=[0, 50, 100], yticklabels=["0", "50", "100%"],
              xticks=[0, steps // 2, steps], xlabel="step (16 questions × 8)")
    figure.text(0.705, 0.944, "3  Repeat: the carry wins", **bold | {"size": 10.5})
    figure.text(0.705, 0.865, f"next token after {''.join(prefix[1:])}", size=9, va="center", color=theme.grey)
    return figure


def learning_curves(theme):
    """Reading a run: the demo with ten seeds."""
    runs = csv("tiny_seeds.csv")
    steps = int(runs["step"].max())
    right = runs["rewards/accuracy_reward/mean"].reshape(-1, steps)     # a row for each seed
    entropy, silent = (runs[name].reshape(-1, steps) for name in ("entropy", "frac_reward_zero_std"))
    figure, panels = plt.subplots(1, 3, figsize=(9.4, 2.9))
    titles = (f"{100 * right[:, 0].mean():.0f}% right → {100 * right[:, -10:].mean():.0f}%;",
              "while it switches, entropy peaks", "and silent groups dip")
    labels = ("share of a step's answers", "nats per token", "groups with equal rewards")
    for axis, values, title, label, colour in zip(
            panels, (right, entropy, silent), titles, labels, (theme.blue, theme.ink, theme.orange)):
        axis.plot(range(1, steps + 1), values.T, color=colour, lw=0.6, alpha=0.3)
        axis.plot(range(1, steps + 1), values.mean(0), color=colour, lw=2.5)
        axis.set(xlabel="step", ylabel=label, xlim=(0, steps), ylim=(0, None if values is entropy else 1.02))
        axis.set_title(title)
    panels[0].text(0.97 * steps, 0.06, "thin: a seed, thick: the mean of ten", ha="right", size=8, color=theme.grey)
    return figure


# The pages ------------------------------------------------------------------------------------------------------------

def one_page(theme):
    """Page 0: four answers to 7+5=, and one update of the logits of three words."""
    words, samples, scores = ["12", "11", "13"], [0, 1, 0, 2], torch.tensor([1.0, 0.0, 1.0, 0.0])
    advantages = scores - scores.mean()
    logits = torch.zeros(3, requires_grad=True)
    loss = -(advantages * logits.log_softmax(0)[samples]).mean()
    gradient, = torch.autograd.grad(loss, logits)
    before, after = (x.detach().softmax(0).tolist() for x in (logits, logits - gradient))
    figure, (left, right) = plt.subplots(1, 2, width_ratios=(1.15, 1), figsize=(7.0, 2.9))
    left.set(xlim=(0, 10), ylim=(4.1, -0.9))
    left.axis("off")
    left.text(0, -0.45, "7+5=", family="monospace", weight="bold", size=12)
    left.text(3.9, -0.45, "score", color=theme.grey)
    left.text(6.2, -0.45, "minus the mean", color=theme.grey)
    for y, (k, score, A) in enumerate(zip(samples, scores.tolist(), advantages.tolist())):
        colour, sign = (theme.blue, "▲") if A > 0 else (theme.orange, "▼")
        left.add_patch(plt.Rectangle((0, y + 0.08), 3.0, 0.84, fill=False, ec=colour, lw=1.8))
        left.text(1.5, y + 0.5, words[k], family="monospace", size=12, ha="center", va="center", color=colour)
        left.text(4.4, y + 0.5, f"{score:g}", size=12, ha="center", va="center", color=colour)
        left.text(6.2, y + 0.5, f"{sign} {A:+.1f}".replace("-", "−"), size=12, va="center", color=colour)
    left.set_title("Four answers, scored")
    for k, word in enumerate(words):
        colour = theme.blue if after[k] > before[k] else theme.orange
        right.bar(k - 0.2, 100 * before[k], 0.36, color=theme.pale, ec=theme.grey, lw=0.8)
        right.bar(k + 0.2, 100 * after[k], 0.36, color=colour)
        right.text(k - 0.2, 100 * before[k] + 1, f"{100 * before[k]:.0f}%", ha="center", color=theme.grey)
        right.text(k + 0.2, 100 * after[k] + 1, f"{100 * after[k]:.0f}%", ha="center", color=colour, weight="bold")
    right.set(xticks=range(3), xticklabels=words, yticks=[], ylim=(0, 52))
    right.spines["left"].set_visible(False)
    right.set_title("One update: before, after")
    return figure


def loss_and_learning(theme):
    """Page 2: the loss is 0 at new answers, the policy learns (two words, μ = 4, gradient descent at rate 0.2)."""
    A = torch.tensor([1.0, -1.0], dtype=torch.float64)
    words, mask = torch.tensor([[0], [1]]), torch.ones(2, 1)
    theta, losses, right = torch.zeros(2, dtype=torch.float64, requires_grad=True), [], []
    for update in range(40):
        logps = theta.log_softmax(0)[words]
        old_logps = logps.detach() if update % 4 == 0 else old_logps
        loss, _ = grpo.grpo_loss(logps, A, mask, old_logps=old_logps, loss_type="grpo")
        losses.append(loss.item())
        right.append(100 * theta.softmax(0)[0].item())
        theta = (theta - 0.2 * torch.autograd.grad(loss, theta)[0]).detach().requires_grad_()
    figure, (first, second) = plt.subplots(1, 2)
    new = list(range(0, 40, 4))
    for axis, values, colour in (first, losses, theme.orange), (second, right, theme.blue):
        axis.plot(range(1, 41), values, ".-", color=colour, lw=1.2, ms=4)
        axis.plot([k + 1 for k in new], [values[k] for k in new], "o", mfc=theme.paper, mec=colour, mew=1.5, ms=6)
        axis.set(xlabel="update (○ new answers)")
    first.set(ylabel="loss", ylim=(-0.25, 0.05))
    first.set_title("Loss: 0 at ○, its gradient is not")
    second.set(ylabel="π(right word) in %", ylim=(0, 105))
    second.set_title(f"The policy learns: {right[0]:.0f}% → {right[-1]:.0f}%")
    return figure


def clipping(theme):
    """Page 3: the loss of one token over its ratio."""
    ratio = torch.linspace(0, 3.5, 701, dtype=torch.float64).unsqueeze(0)
    figure, axes = plt.subplots(1, 2)
    for axis, A in (axes[0], 1.0), (axes[1], -1.0):
        advantages = torch.full_like(ratio, A)
        axis.axvspan(0.8, 1.2, color=theme.pale, lw=0)
        axis.plot(ratio[0], -ratio[0] * A, ":", color=theme.grey, lw=1.5)
        axis.plot(ratio[0], grpo.clipped_surrogate_loss(ratio, advantages)[0], color=theme.blue, lw=2.5)
        axis.plot([1], [-A], "o", color=theme.ink, ms=5)
        axis.text(1.12, -A, "ρ = 1:\non-policy", size=8.5, va="top" if A < 0 else "bottom")
        axis.set(xlabel="ratio ρ (shaded: 0.8 … 1.2)", ylabel="loss of the token", xlim=(0, 3.6))
    axes[0].set_title("A = +1: above 1.2 no gradient")
    axes[0].set(ylim=(-3.7, 0.2), yticks=[0, -1, -2, -3])
    axes[0].text(2.3, -1.12, "clipped", color=theme.blue, va="bottom")
    axes[0].text(2.2, -2.9, "−ρA, no clip", color=theme.grey, ha="right")
    axes[1].set_title("A = −1: below 0.8 no gradient")
    axes[1].set(ylim=(-0.2, 3.7), yticks=[0, 1, 2, 3])
    axes[1].text(0.1, 0.9, "clipped", color=theme.blue, va="bottom")
    axes[1].text(2.65, 3.1, "not clipped: grows\nwithout limit", color=theme.blue, ha="right", va="center")
    return figure


def kl_estimators(theme):
    """Page 9: the three estimators over the log-ratio, and their expected gradients on the page's three words."""
    k1 = torch.linspace(-2, 2, 401, dtype=torch.float64).unsqueeze(0)
    figure, (left, right) = plt.subplots(1, 2)
    styles = {"k1": (theme.grey, ":", (-1.75, -1.35)), "k2": (theme.orange, "--", (-1.95, 2.2)),
              "k3": (theme.blue, "-", (-1.8, 4.2))}
    for name, (colour, line, place) in styles.items():
        left.plot(k1[0], grpo.kl_estimate(k1, torch.zeros_like(k1), estimator=name)[0], line, color=colour, lw=2.2)
        left.text(*place, name, color=colour, weight="bold")
    left.set(xlabel="log π − log π_ref of the sampled word", ylabel="estimate (nats)", ylim=(-2, 5))
    left.set_title("Value: only k1 is negative")
    pi, ref = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]))
    meaning = {"k1": "k1: 0 everywhere", "k2": "k2: ∇KL(π‖ref)", "k3": "k3: ∇KL(ref‖π)"}
    for i, (name, (colour, _, _)) in enumerate(styles.items()):
        theta = pi.log().clone().requires_grad_()
        k = grpo.kl_estimate(theta.log_softmax(0)[None], ref.log()[None], estimator=name)[0]
        gradient, = torch.autograd.grad((pi * k).sum(), theta)
        for word, value in enumerate(gradient.tolist()):
            x = word + 0.28 * (i - 1)
            right.bar(x, value, 0.26, color=colour)
            if abs(value) < 1e-9:                                       # a bar that one cannot see
                right.text(x, 0.01, "0", ha="center", color=colour, weight="bold")
        right.text(0.98, 0.92 - 0.09 * i, meaning[name], transform=right.transAxes, ha="right", color=colour)
    right.axhline(0, color=theme.grey, lw=0.8)
    right.set(xticks=range(3), xticklabels=["word 1", "word 2", "word 3"])
    right.set(ylabel="mean gradient on its logit", ylim=(-0.45, 0.35))
    right.set_title("As a loss: three gradients")
    return figure


def length_bias(theme):
    """Page 4: the weight of a token, and of its whole answer, when it has n tokens and three others have 50."""
    def weight(loss_type, n):                                           # of a token: the gradient of the aggregate
        mask = (torch.arange(100) < torch.tensor([[n], [50], [50], [50]])).long()
        token_loss = torch.zeros(4, 100, dtype=torch.float64, requires_grad=True)
        if loss_type == "bnpo":                                         # the mean of two microbatches of two answers
            parts = (slice(0, 2), slice(2, 4))
            loss = sum(grpo.aggregate(token_loss[rows], mask[rows], loss_type="bnpo") for rows in parts) / 2
        else:
            loss = grpo.aggregate(token_loss, mask, loss_type=loss_type, max_completion_length=100)
        return torch.autograd.grad(loss, token_loss)[0][0, 0].item()

    lengths, ends = range(1, 101), ([], [])
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.9))
    styles = {"grpo": (theme.orange, "-"), "bnpo": (theme.grey, "--"), "dapo": (theme.blue, "-"),
              "dr_grpo": (theme.ink, ":")}
    for loss_type, (colour, line) in styles.items():
        token = [weight(loss_type, n) for n in lengths]
        name = "bnpo (2 parts)" if loss_type == "bnpo" else loss_type
        for k, y in (0, token), (1, [n * w for n, w in zip(lengths, token)]):
            axes[k].plot(lengths, y, line, color=colour, lw=2.2)
            ends[k].append((y[-1], name, colour))
    axes[0].set_title("Token: grpo divides by n")
    axes[0].set(ylim=(0, 0.0125), ylabel="weight of one token")
    axes[1].set_title("Answer: equal under grpo")
    axes[1].set(ylim=(0, 0.5), ylabel="weight of all its tokens")
    for axis, labels in zip(axes, ends):
        axis.set(xlabel="n, tokens in the answer", xlim=(0, 100))
        label_ends(axis, 100, labels)
    return figure


def which_groups_teach(theme):
    """Page 6: silent groups in theory, and in the run of tiny_run.csv."""
    run = csv("tiny_run.csv")
    p = torch.linspace(0, 1, 201, dtype=torch.float64)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
    for G, colour, line in (2, theme.grey, ":"), (8, theme.blue, "-"), (16, theme.ink, "--"), (64, theme.orange, "-"):
        left.plot(p, p**G + (1 - p) ** G, line, color=colour, lw=2, label=f"G = {G}")
    left.set(xlabel="p, chance that an answer is right", ylabel="chance that all G agree", ylim=(0, 1.02))
    left.legend(loc="lower center", bbox_to_anchor=(0.5, 0.04), fontsize=9, frameon=False)
    left.set_title("Sure questions give silent groups")
    curves = {"right answers": (run["rewards/accuracy_reward/mean"], theme.blue),
              "silent groups": (run["frac_reward_zero_std"], theme.orange),
              "10 · entropy": (10 * run["entropy"], theme.ink)}
    right.set(xlabel="step of the demo (thick: the mean of ten)", ylim=(0, 1.05), xlim=(0, run["step"][-1]))
    for label, (values, colour) in curves.items():
        right.plot(run["step"], values, color=colour, lw=0.8, alpha=0.3)
        right.plot(run["step"][5:-4], numpy.convolve(values, numpy.ones(10) / 10, "valid"), color=colour, lw=2.2)
    ends = [(values[-10:].mean(), label, colour) for label, (values, colour) in curves.items()]
    label_ends(right, run["step"][-1], ends)
    right.set_title("Silent groups dip while it learns")
    return figure


def collapse(theme):
    """Reading a run: collapsed_run.csv."""
    run = csv("collapsed_run.csv")
    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3))
    curves = ({"right answers": (run["rewards/accuracy_reward/mean"], theme.blue),
               "well-formed": (run["rewards/think_format_reward/mean"], theme.ink),
               "silent groups": (run["frac_reward_zero_std"], theme.orange)},
              {"entropy (nats)": (run["entropy"], theme.ink), "cut off": (run["completions/clipped_ratio"], theme.grey),
               "loss": (run["loss"], theme.orange)})
    for axis, lines in zip(axes, curves):
        for values, colour in lines.values():
            axis.plot(run["step"], values, color=colour, lw=1.6)
        axis.set(xlabel="step", xlim=(0, run["step"][-1]))
        ends = [(values[-5:].mean(), label, colour) for label, (values, colour) in lines.items()]
        label_ends(axis, run["step"][-1], ends)
    axes[0].set_title("Too fast: hardly an answer is right")
    axes[1].set_title("Entropy shows it, the loss does not")
    return figure


def real_model(theme):
    """Page 14: real_model.csv."""
    lines = numpy.genfromtxt(PICTURES / "real_model.csv", delimiter=",", names=True, deletechars="", dtype=None,
                             encoding="utf-8")

    def smooth(name, metric="reward"):
        """The mean of a step and of the two before it: a step has only four prompts."""
        values = lines[metric][lines["run"] == name]
        return [values[max(0, i - 2):i + 1].mean() for i in range(len(values))]

    figure, panels = plt.subplots(1, 3, figsize=(9.4, 2.9))
    colours = (theme.blue, theme.orange, theme.ink)
    groups = (("Three seeds learn", ("seed 42", "seed 43", "seed 44")),
              ("Three learning rates", ("rate 1e-6", "seed 42", "rate 1e-4")),
              ("Counting a word is hacked", ("hacked", "mended")))
    for panel, (title, runs) in zip(panels, groups):
        for run, colour in zip(runs, colours):
            metric = "mentions" if run in ("hacked", "mended") else "reward"
            values = smooth(run, metric)
            panel.plot(range(1, len(values) + 1), values, color=colour, lw=2,
                       label="rate 1e-5" if title.endswith("rates") and run == "seed 42" else run)
        panel.set(xlabel="step", ylim=(0, None))
        panel.set_title(title)
        panel.legend(frameon=False, fontsize=8, loc="upper left")
    panels[0].set_ylabel("right answers of a step")
    panels[2].set_ylabel("mentions of the topic")
    return figure


DRAWINGS = {"grpo": method_in_one_picture, "curve": learning_curves, "one_page": one_page,
            "loss_and_learning": loss_and_learning, "clipping": clipping, "kl_estimators": kl_estimators,
            "length_bias": length_bias, "which_groups_teach": which_groups_teach, "collapse": collapse,
            "real_model": real_model}


# The runs -------------------------------------------------------------------------------------------------------------

METRICS = ["step", "rewards/accuracy_reward/mean", "rewards/think_format_reward/mean", "frac_reward_zero_std",
           "entropy", "completions/mean_length", "completions/clipped_ratio", "grad_norm", "loss"]


def run_tiny(name, *flags):
    """Run the demo in an empty folder and write its metrics; what the demo printed, and the lines of the metrics."""
    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, str(ROOT / "grpo.py"), "--model", "tiny", *flags]
    printed = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    log = [json.loads(line) for line in (folder / "grpo-output/metrics.jsonl").read_text().splitlines()]
    rows = [",".join(f"{line[metric]:.5g}" for metric in METRICS) for line in log]
    (PICTURES / name).write_text("\n".join([",".join(METRICS), *rows]) + "\n")
    return printed, rows


def runs():
    """tiny_run.csv, collapsed_run.csv and tiny_seeds.csv; what the first of these runs printed."""
    printed, _ = run_tiny("tiny_run.csv")
    run_tiny("collapsed_run.csv", "--learning_rate", "3e-3")
    all_rows = [",".join(METRICS[:-2])]                                 # without grad_norm and loss
    for seed in range(10):
        output, rows = run_tiny("tiny_seeds.csv", "--seed", str(seed))
        print(f"seed {seed}: {output.splitlines()[-1]}; samples of the last ten steps: "
              f"{numpy.mean([float(row.split(',')[1]) for row in rows[-10:]]):.3f}", flush=True)
        all_rows += [row.rsplit(",", 2)[0] for row in rows]
    (PICTURES / "tiny_seeds.csv").write_text("\n".join(all_rows) + "\n")
    return printed


def group(argv=()):
    """pictures/group.html: look_at_a_group.py's page, and its first fork over a whole run of the demo from the same weights."""
    own, options, config = look_at_a_group.parse(["--html", str(PICTURES / "group.html"), *argv])
    policy, tokenizer, dataset, reward_funcs = look_at_a_group.load(options, config)
    weights = copy.deepcopy(policy.state_dict())
    seen = look_at_a_group.update_on_one_group(policy, tokenizer, dataset, reward_funcs, config, look_at_a_group.forgets_the_carry)
    data = look_at_a_group.group_data(seen, tokenizer, config)
    policy.load_state_dict(weights)
    data["whole_run"] = whole_run(seen, policy, tokenizer, dataset, reward_funcs)
    Path(own.html).write_text(look_at_a_group.page(data), encoding="utf-8")


def whole_run(seen, policy, tokenizer, dataset, reward_funcs):
    """The probabilities of the best and the worst word at the first fork, before and after each step of the demo."""
    beginning, pulls = next(iter(seen.forks.items()))
    words = [max(pulls, key=pulls.get), min(pulls, key=pulls.get)]
    demo, _ = grpo.parse_options(["--model", "tiny"])
    probabilities = []

    def note():
        with torch.no_grad():
            probs = look_at_a_group.next_token_probs(policy, seen.rollout, beginning, demo)
        probabilities.append([float(f"{p:.7g}") for p in probs[words].tolist()])

    note()
    for _ in grpo.train(policy, tokenizer, dataset, reward_funcs, demo):
        note()
    return {"words": [tokenizer.decode([word]) for word in words], "probabilities": probabilities}


def rewrite(page, pattern, text):
    """Put this text in the page, once, where the pattern fits."""
    old = page.read_text()
    new, count = re.subn(pattern, lambda match: text, old, flags=re.M | re.S)
    assert count == 1, (page, pattern)
    page.write_text(new)


def pages(printed):
    """The demo's output in README, and the table of 11_reading_a_run.md."""
    demo = r"^  45\+32=.*?^held-out accuracy[^\n]*\n"
    rewrite(ROOT / "README.md", demo, re.search(demo, printed, re.M | re.S)[0])
    tiny, collapsed = csv("tiny_run.csv"), csv("collapsed_run.csv")
    for name in METRICS[1:]:
        means = [f"{x.mean():.3f}" for x in (tiny[name][:10], tiny[name][-10:], collapsed[name][-10:])]
        rewrite(EXAMPLES / "11_reading_a_run.md", rf"^\| `{name}` \| -?\d[^\n]*", f"| `{name}` | {' | '.join(means)} |")


def checks(library):
    """The table of a library on the page of trainers, as it is printed."""
    script = f"worked_examples/check_your_own/check_{library}.py"
    command = [sys.executable, "-W", "ignore", "worked_examples/check_your_own/check.py", script]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    table = printed.partition("\n\n")[0]                                # without the details
    first = f"$ python worked_examples/check_your_own/check.py {script}\n"
    rewrite(EXAMPLES / "check_your_own/README.md", rf"{re.escape(first)}.*?^```", f"{first}{table}\n```")


def main(argv):
    if argv[:1] == ["checks"]:
        return checks(argv[1])
    if argv == ["run"]:
        printed = runs()
        group()
        pages(printed)
    draw_all()


if __name__ == "__main__":
    main(sys.argv[1:])
