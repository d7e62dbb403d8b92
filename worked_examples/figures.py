"""Draw the figures of the worked examples: `python worked_examples/figures.py` writes each PNG beside its page."""

import json
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
plt.rcParams |= {"figure.figsize": (7.0, 2.9), "figure.dpi": 100, "font.size": 10, "axes.grid": True, "grid.alpha": 0.25,
                 "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "figure.constrained_layout.use": True}


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
        loss = {delta: grpo.clipped_surrogate_loss(ratio, torch.tensor([A], dtype=torch.float64), delta=delta)[0] for delta in (None, 2.0)}
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
    pi, ref = (torch.tensor(p, dtype=torch.float64) for p in ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]))
    words = torch.arange(3)
    for i, (name, colour) in enumerate((("k1", GREY), ("k2", ORANGE), ("k3", BLUE))):
        theta = pi.log().clone().requires_grad_()
        k = grpo.kl_estimate(theta.log_softmax(0)[None], ref.log()[None], estimator=name)[0]
        gradient, = torch.autograd.grad((pi * k).sum(), theta)
        second.bar(words + 0.27 * (i - 1), gradient, 0.25, color=colour, label={"k1": "k1: 0", "k2": "k2: ∇KL(π‖ref)", "k3": "k3: ∇KL(ref‖π)"}[name])
    second.set(xticks=words, xticklabels=["word 1", "word 2", "word 3"], ylabel="E[gradient] on its logit", title="as a loss: three gradients",
               ylim=(-0.45, 0.8))
    second.axhline(0, color="black", lw=0.8)
    second.legend(loc="upper right", fontsize=9)
    save(figure, "05_kl_estimators.png")


def length_weights():
    """Page 6: what one token, and one whole answer, weighs, for answers of 1 ... 100 tokens beside one of 50."""
    n = torch.arange(1, 101, dtype=torch.float64)
    token = {"grpo": 1 / (2 * n), "dapo": 1 / (n + 50), "dr_grpo (L = 100)": torch.full_like(n, 1 / 200)}
    figure, axes = plt.subplots(1, 2)
    for (name, weight), colour in zip(token.items(), (RED, BLUE, GREEN)):
        axes[0].plot(n, weight, color=colour, lw=2, label=name)
        axes[1].plot(n, weight * n, color=colour, lw=2, label=name)
    axes[0].set(xlabel="tokens in the answer", ylabel="weight", ylim=(0, 0.06), title="of one of its tokens")
    axes[1].set(xlabel="tokens in the answer", ylabel="weight", ylim=(0, 0.8), title="of the whole answer")
    axes[0].legend()
    save(figure, "06_length_weights.png")


if __name__ == "__main__":
    for draw in (loss_and_learning, clipping, kl_estimators, length_weights):
        draw()
