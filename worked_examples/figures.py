"""Draw the figures of the worked examples: `python worked_examples/figures.py` writes each PNG beside its page."""

import csv
import sys
from pathlib import Path

import matplotlib
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import grpo  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

BLUE, RED, GREEN, ORANGE, GREY = "#1f5fa8", "#c0392b", "#2e7d32", "#d97706", "#777777"
plt.rcParams |= {
    "figure.figsize": (7.0, 2.9),
    "figure.dpi": 100,
    "font.size": 10,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def save(figure, name):
    figure.savefig(HERE / name, metadata={"Software": None})
    plt.close(figure)


def loss_and_learning():
    """Page 3: the loss of a two-word policy says nothing while the policy learns (μ = 4, gradient descent, step 0.2)."""
    A = torch.tensor([1.0, -1.0], dtype=torch.float64)
    words, mask = torch.tensor([[0], [1]]), torch.ones(2, 1)
    theta, losses, right = torch.zeros(2, dtype=torch.float64, requires_grad=True), [], []
    for update in range(40):
        logps = theta.log_softmax(0)[words]
        old_logps = logps.detach() if update % 4 == 0 else old_logps
        loss, _ = grpo.grpo_loss(logps, A, mask, old_logps=old_logps, loss_type="grpo")
        losses.append(loss.item())
        right.append(theta.softmax(0)[0].item())
        theta = (theta - 0.2 * torch.autograd.grad(loss, theta)[0]).detach().requires_grad_()
    figure, (left, second) = plt.subplots(1, 2)
    left.plot(range(1, 41), losses, ".-", color=RED)
    left.set(xlabel="update", ylabel="loss", ylim=(-0.25, 0.05), title="the loss: 0, -0.1, -0.2, -0.2, 0, ...")
    second.plot(range(1, 41), right, ".-", color=BLUE)
    second.set(xlabel="update", ylabel="probability", ylim=(0, 1.05), title="π(right word): it learns")
    save(figure, "03_loss_and_learning.png")


def clipping():
    """Page 4: the loss of one token over its ratio."""
    ratio = torch.linspace(0, 3.5, 701, dtype=torch.float64).unsqueeze(0)
    figure, axes = plt.subplots(1, 2)
    for axis, A, title in (axes[0], 1.0, "A = +1: more of this token"), (axes[1], -1.0, "A = -1: less of this token"):
        loss = {
            delta: grpo.clipped_surrogate_loss(ratio, torch.tensor([A], dtype=torch.float64), delta=delta)[0]
            for delta in (None, 2.0)
        }
        axis.plot(ratio[0], -ratio[0] * A, ":", color=GREY, label="-ρA, no clip")
        axis.plot(ratio[0], loss[None], color=BLUE, lw=2, label="clipped, ε = 0.2")
        if A < 0:
            axis.plot(ratio[0], loss[2.0], "--", color=RED, lw=2, label="and δ = 2")
        axis.axvspan(0.8, 1.2, color=GREEN, alpha=0.12, lw=0)
        axis.plot([1], [-A], "o", color="black", ms=4)
        axis.set(xlabel="ratio ρ (green: 0.8 ... 1.2)", ylabel="loss", title=title, xlim=(0, 3.5))
        axis.legend(loc="lower left" if A > 0 else "upper left")
    save(figure, "04_clipping.png")


def kl_estimators():
    """Page 5: the three estimators over the log-ratio, and their expected gradients on the page's three words."""
    k1 = torch.linspace(-2, 2, 401, dtype=torch.float64).unsqueeze(0)
    figure, (left, second) = plt.subplots(1, 2)
    for name, colour in ("k1", GREY), ("k2", ORANGE), ("k3", BLUE):
        left.plot(k1[0], grpo.kl_estimate(k1, torch.zeros_like(k1), estimator=name)[0], color=colour, lw=2, label=name)
    left.set(xlabel="log π - log π_ref of the sampled word", ylabel="estimate (nats)", ylim=(-2, 5), title="value for one token")
    left.legend()
    pi, ref = (torch.tensor(p, dtype=torch.float64) for p in ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]))
    words = torch.arange(3)
    for i, (name, colour) in enumerate((("k1", GREY), ("k2", ORANGE), ("k3", BLUE))):
        theta = pi.log().clone().requires_grad_()
        k = grpo.kl_estimate(theta.log_softmax(0)[None], ref.log()[None], estimator=name)[0]
        gradient, = torch.autograd.grad((pi * k).sum(), theta)
        second.bar(
            (words + 0.27 * (i - 1)).tolist(),
            gradient.tolist(),
            0.25,
            color=colour,
            label={"k1": "k1: 0", "k2": "k2: ∇KL(π‖ref)", "k3": "k3: ∇KL(ref‖π)"}[name],
        )
    second.set(
        xticks=words,
        xticklabels=["word 1", "word 2", "word 3"],
        ylabel="E[gradient] on its logit",
        title="as a loss: three gradients",
        ylim=(-0.4, 0.4),
    )
    second.axhline(0, color="black", lw=0.8)
    second.legend(loc="lower left", fontsize=9)
    save(figure, "05_kl_estimators.png")


def aggregation():
    """Page 6: what one token, and one whole answer, weighs when the answer has n tokens and stands beside three of 50."""
    def weight(loss_type, n):  # of one token of the first row: the gradient of the aggregate
        mask = (torch.arange(100) < torch.tensor([[n], [50], [50], [50]])).long()
        token_loss = torch.zeros(4, 100, dtype=torch.float64, requires_grad=True)
        if loss_type == "bnpo":  # two microbatches of two answers, each divided by its own tokens, then the mean of the two
            loss = sum(grpo.aggregate(token_loss[rows], mask[rows], loss_type="bnpo") for rows in (slice(0, 2), slice(2, 4))) / 2
        else:
            loss = grpo.aggregate(token_loss, mask, loss_type=loss_type, max_completion_length=100)
        return torch.autograd.grad(loss, token_loss)[0][0, 0].item()

    lengths = range(1, 101)
    figure, axes = plt.subplots(1, 2)
    styles = {"grpo": (RED, "-"), "bnpo": (ORANGE, "--"), "dapo": (BLUE, "-"), "dr_grpo": (GREEN, "-")}
    names = {"bnpo": "bnpo (2 microbatches)", "dr_grpo": "dr_grpo (L = 100)"}
    for loss_type, (colour, line) in styles.items():
        token = [weight(loss_type, n) for n in lengths]
        for axis, y in (axes[0], token), (axes[1], [n * w for n, w in zip(lengths, token)]):
            axis.plot(lengths, y, line, color=colour, lw=2, label=names.get(loss_type, loss_type))
    axes[0].set(title="weight of one token", ylim=(0, 0.02), ylabel="∂L / ∂(token loss)")
    axes[1].set(title="weight of the whole answer", ylim=(0, 0.5), ylabel="sum over the answer's tokens")
    for axis in axes:
        axis.set(xlabel="n, tokens in the answer", xlim=(0, 100))
    axes[0].legend(fontsize=9)
    save(figure, "06_aggregation.png")


def variants():
    """Page 9: the weight of ∇log π at each of the page's nine tokens."""
    A = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    log_ratio = torch.tensor([[0.0, 0.3, -0.5], [0.1, 0.2, 0.0], [0.0, 0.4, -0.3], [-0.1, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    methods = {
        "clip, ε = 0.2": {},
        "DAPO": dict(epsilon_high=0.28),
        "GSPO": dict(importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
        "CISPO": dict(policy_loss="cispo", epsilon_high=5.0),
        "SAPO": dict(policy_loss="sapo"),
    }
    figure, axis = plt.subplots()
    for i, ((name, options), colour) in enumerate(zip(methods.items(), (GREY, BLUE, GREEN, ORANGE, RED))):
        logps = log_ratio.clone().requires_grad_()
        loss, _ = grpo.grpo_loss(logps, A, mask, old_logps=torch.zeros(4, 3, dtype=torch.float64), loss_type="dapo", **options)
        axis.bar(
            [k + 0.16 * (i - 2) for k in range(9)],
            (-9 * torch.autograd.grad(loss, logps)[0][mask == 1]).tolist(),
            0.15,
            color=colour,
            label=name,
        )
    ticks = [f"answer {i + 1}\nρ = {r:.2f}" for i, row in enumerate(log_ratio.exp().tolist()) for r, m in zip(row, mask[i]) if m]
    axis.set(
        xticks=range(9), xticklabels=ticks, ylabel="weight of ∇log π", title="two right answers, two wrong ones", ylim=(-1.7, 1.7)
    )
    axis.tick_params(axis="x", labelsize=7.5)
    axis.axhline(0, color="black", lw=0.8)
    axis.legend(fontsize=8, ncol=5, loc="upper right")
    save(figure, "09_variants.png")


def which_groups_teach():
    """Page 10: silent groups in theory, and in the run of tiny_run.csv."""
    with open(HERE / "tiny_run.csv") as file:
        run = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    p = torch.linspace(0, 1, 201, dtype=torch.float64)
    figure, (left, second) = plt.subplots(1, 2)
    for G, colour in zip((2, 4, 8, 16, 64), (GREY, GREEN, BLUE, ORANGE, RED)):
        left.plot(p, p**G + (1 - p) ** G, color=colour, lw=2, label=f"G = {G}")
    left.set(xlabel="p, share of right answers", ylabel="share of silent groups", title="p^G + (1 - p)^G")
    left.legend(fontsize=9)
    steps = [row["step"] for row in run]
    for name, label, colour in (
        ("rewards/accuracy_reward/mean", "accuracy", BLUE),
        ("frac_reward_zero_std", "silent groups", RED),
        ("entropy", "entropy (nats a token)", GREEN),
    ):
        second.plot(steps, [row[name] for row in run], color=colour, lw=1.2, label=label)
    second.set(xlabel="step", ylim=(0, 1.05), title="python grpo.py --model tiny")
    second.legend(fontsize=9)
    save(figure, "10_which_groups_teach.png")


if __name__ == "__main__":
    for draw in (loss_and_learning, clipping, kl_estimators, aggregation, variants, which_groups_teach):
        draw()
