"""Draw the figures of the worked examples: `python worked_examples/figures.py` writes each PNG beside its page.

`python worked_examples/figures.py run` first runs `python grpo.py --model tiny`, as it stands, with
`--learning_rate 3e-3` and with ten seeds, and writes what hangs on these runs: the output in the README, the csv files,
the table of page 6, and the page of a group with its picture, for which Chromium is needed. (Another processor adds in
another order, and its figures differ a little.)
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy
import torch
from PIL import Image

HERE = Path(__file__).resolve().parent
PICTURES = HERE / "pictures"
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
    figure.savefig(PICTURES / name, metadata={"Software": None})
    plt.close(figure)


def loss_and_learning():
    """Page 2: the lows of the loss rise while the policy learns (two words, μ = 4, gradient descent, step 0.2)."""
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
    left.set(xlabel="update", ylabel="loss", ylim=(-0.25, 0.05), title="the loss: its lows rise")
    second.plot(range(1, 41), right, ".-", color=BLUE)
    second.set(xlabel="update", ylabel="probability", ylim=(0, 1.05), title="π(right word): it learns")
    save(figure, "loss_and_learning.png")


def clipping():
    """Page 3: the loss of one token over its ratio."""
    ratio = torch.linspace(0, 3.5, 701, dtype=torch.float64).unsqueeze(0)
    figure, axes = plt.subplots(1, 2)
    for axis, A, title in (
            (axes[0], 1.0, "A = +1: more of this token"), (axes[1], -1.0, "A = -1: less of this token")):
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
    save(figure, "clipping.png")


def kl_estimators():
    """Page 9: the three estimators over the log-ratio, and their expected gradients on the page's three words."""
    k1 = torch.linspace(-2, 2, 401, dtype=torch.float64).unsqueeze(0)
    figure, (left, second) = plt.subplots(1, 2)
    for name, colour in ("k1", GREY), ("k2", ORANGE), ("k3", BLUE):
        left.plot(k1[0], grpo.kl_estimate(k1, torch.zeros_like(k1), estimator=name)[0], color=colour, lw=2, label=name)
    left.set(xlabel="log π - log π_ref of the sampled word", ylabel="estimate (nats)", ylim=(-2, 5))
    left.set_title("value for one token")
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
    save(figure, "kl_estimators.png")


def length_bias():
    """Page 4: what a token, and a whole answer, weighs when the answer has n tokens and stands beside three of 50."""
    def weight(loss_type, n):  # of one token of the first row: the gradient of the aggregate
        mask = (torch.arange(100) < torch.tensor([[n], [50], [50], [50]])).long()
        token_loss = torch.zeros(4, 100, dtype=torch.float64, requires_grad=True)
        if loss_type == "bnpo":  # two microbatches of two answers, each divided by its own tokens, then their mean
            parts = (slice(0, 2), slice(2, 4))
            loss = sum(grpo.aggregate(token_loss[rows], mask[rows], loss_type="bnpo") for rows in parts) / 2
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
    save(figure, "length_bias.png")


def variants():
    """Page 15: the weight of ∇log π at each of the page's nine tokens."""
    A = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    log_ratio = torch.tensor([[0.0, 0.3, -0.5], [0.1, 0.2, 0.0], [0.0, 0.4, -0.3], [-0.1, 0.0, 0.0]]).double()
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
        loss, _ = grpo.grpo_loss(logps, A, mask, old_logps=torch.zeros(4, 3).double(), loss_type="dapo", **options)
        axis.bar(
            [k + 0.16 * (i - 2) for k in range(9)],
            (-9 * torch.autograd.grad(loss, logps)[0][mask == 1]).tolist(),
            0.15,
            color=colour,
            label=name,
        )
    rows, columns = (mask == 1).nonzero().T.tolist()
    ticks = [f"answer {i + 1}\nρ = {log_ratio[i, t].exp():.2f}" for i, t in zip(rows, columns)]
    axis.set(xticks=range(9), xticklabels=ticks, ylabel="weight of ∇log π", ylim=(-1.7, 1.7))
    axis.set_title("two right answers, two wrong ones")
    axis.tick_params(axis="x", labelsize=7.5)
    axis.axhline(0, color="black", lw=0.8)
    axis.legend(fontsize=8, ncol=5, loc="upper right")
    save(figure, "variants.png")


def which_groups_teach():
    """Page 6: silent groups in theory, and in the run of tiny_run.csv."""
    run = numpy.genfromtxt(PICTURES / "tiny_run.csv", delimiter=",", names=True, deletechars="")
    p = torch.linspace(0, 1, 201, dtype=torch.float64)
    figure, (left, second) = plt.subplots(1, 2)
    for G, colour in zip((2, 8, 16, 64), (GREY, BLUE, ORANGE, RED)):
        left.plot(p, p**G + (1 - p) ** G, color=colour, lw=2, label=f"G = {G}")
    left.set(xlabel="p, share of right answers", ylabel="share of silent groups", title="p^G + (1 - p)^G")
    left.legend(fontsize=9, loc="upper center")
    curves = {"accuracy": (run["rewards/accuracy_reward/mean"], BLUE),
              "silent groups": (run["frac_reward_zero_std"], RED), "10 · entropy (nats)": (10 * run["entropy"], GREEN)}
    for label, (values, colour) in curves.items():
        second.plot(run["step"], values, color=colour, lw=0.8, alpha=0.25)
        means = numpy.convolve(values, numpy.ones(10) / 10, "valid")
        second.plot(run["step"][5:-4], means, color=colour, lw=2, label=label)
    second.set(xlabel="step", ylim=(0, 1.05), title="python grpo.py --model tiny")
    second.legend(fontsize=9, loc="center right", bbox_to_anchor=(1, 0.68))
    save(figure, "which_groups_teach.png")


def collapse():
    """Page 6: the same run with a learning rate of 3e-3."""
    run = numpy.genfromtxt(PICTURES / "collapsed_run.csv", delimiter=",", names=True, deletechars="")
    figure, (left, second) = plt.subplots(1, 2)
    left.plot(run["step"], run["rewards/accuracy_reward/mean"], color=BLUE, lw=1.2, label="accuracy")
    left.plot(run["step"], run["rewards/think_format_reward/mean"], color=ORANGE, lw=1.2, label="think format")
    left.plot(run["step"], run["frac_reward_zero_std"], color=RED, lw=1.2, label="silent groups")
    left.set(xlabel="step", ylim=(0, 1.05), title="--learning_rate 3e-3")
    left.legend(fontsize=9, loc="center right")
    second.plot(run["step"], run["entropy"], color=GREEN, lw=1.2, label="entropy (nats)")
    second.plot(run["step"], run["completions/clipped_ratio"], color=GREY, lw=1.2, label="cut off at the limit")
    second.plot(run["step"], run["loss"], color=RED, lw=1.2, label="loss")
    second.set(xlabel="step", ylim=(-0.15, 1.05), title="the same run")
    second.legend(fontsize=9, loc="center right")
    save(figure, "collapse.png")


def learning_curves():
    """README: the demo with ten seeds."""
    runs = numpy.genfromtxt(PICTURES / "tiny_seeds.csv", delimiter=",", names=True, deletechars="")
    figure, panels = plt.subplots(1, 3, figsize=(11, 3))
    titles = {"rewards/accuracy_reward/mean": "right answers of a step's samples", "entropy": "entropy (nats a token)",
              "frac_reward_zero_std": "silent groups: all rewards equal"}
    for axis, (name, title), colour in zip(panels, titles.items(), (BLUE, GREEN, RED)):
        curves = runs[name].reshape(-1, 120)                            # a row for each seed
        axis.plot(range(1, 121), curves.T, color=colour, lw=0.7, alpha=0.3)
        axis.plot(range(1, 121), curves.mean(0), color=colour, lw=2)
        axis.set(title=title, xlabel="step", ylim=(0, 0.07) if name == "entropy" else (0, 1.02))
    save(figure, "curve.png")


def group(folder=PICTURES):
    """README: explain.py's page of a group, and its tokens as a browser draws them, after five updates."""
    page, picture = folder / "group.html", folder / "group.png"
    subprocess.run([sys.executable, HERE / "explain.py", "--html", page], check=True)
    with tempfile.TemporaryDirectory() as scratch:
        tokens = Path(scratch, "tokens.html")                           # the page without the text above them
        tokens.write_text(page.read_text().replace("</style>", "h1 ~ p:not(#key, #note) { display: none } </style>"))
        subprocess.run(["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={scratch}/profile",
                        f"--screenshot={picture}", "--window-size=1200,910", f"{tokens.as_uri()}?5"], check=True)
    Image.open(picture).quantize(128).save(picture, optimize=True)      # from PIL, which comes with matplotlib


METRICS = ["step", "rewards/accuracy_reward/mean", "rewards/think_format_reward/mean", "frac_reward_zero_std",
           "entropy", "completions/mean_length", "completions/clipped_ratio", "grad_norm", "loss"]


def run_tiny(csv, *flags):
    """Run the demo in an empty folder, and write its metrics; what the demo printed, and the lines of the metrics."""
    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, str(HERE.parent / "grpo.py"), "--model", "tiny", *flags]
    printed = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    log = [json.loads(line) for line in (folder / "grpo-output/metrics.jsonl").read_text().splitlines()]
    rows = [",".join(f"{line[name]:.5g}" for name in METRICS) for line in log]
    (PICTURES / csv).write_text("\n".join([",".join(METRICS), *rows]) + "\n")
    return printed, rows


def rewrite(page, pattern, text):
    """Put this text in the page, once, where the pattern fits."""
    old = page.read_text()
    new, count = re.subn(pattern, lambda match: text, old, flags=re.M | re.S)
    assert count == 1, (page, pattern)
    page.write_text(new)


def runs():
    """What README and page 6 say of the demo, made anew."""
    printed, _ = run_tiny("tiny_run.csv")
    run_tiny("collapsed_run.csv", "--learning_rate", "3e-3")
    all_rows = [",".join(METRICS)]
    for seed in range(10):
        last_line, rows = run_tiny("tiny_seeds.csv", "--seed", str(seed))
        print(f"seed {seed}: {last_line.splitlines()[-1]}; samples of the last ten steps: "
              f"{numpy.mean([float(row.split(',')[1]) for row in rows[-10:]]):.3f}")
        all_rows += rows
    (PICTURES / "tiny_seeds.csv").write_text("\n".join(all_rows) + "\n")
    rewrite(HERE.parent / "README.md", r"^before GRPO.*?^held-out accuracy[^\n]*\n", printed)
    tiny, collapsed = (numpy.genfromtxt(PICTURES / name, delimiter=",", names=True, deletechars="")
                       for name in ("tiny_run.csv", "collapsed_run.csv"))
    for name in METRICS[1:]:
        means = [f"{x.mean():.3f}" for x in (tiny[name][:10], tiny[name][-10:], collapsed[name][-10:])]
        rewrite(HERE / "06_which_groups_teach.md", rf"^\| `{name}` \|[^\n]*", f"| `{name}` | {' | '.join(means)} |")


def checks(library):
    """The table of a library on the page of trainers, as it is printed: `figures.py checks trl`, or verl."""
    script = f"worked_examples/check_{library}.py"
    command = [sys.executable, "-W", "ignore", "worked_examples/check.py", script]
    printed = subprocess.run(command, cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=True).stdout
    table = printed.partition("\n\n")[0]           # without the details
    first = f"$ python worked_examples/check.py {script}\n"
    rewrite(HERE / "check_your_trainer.md", rf"{re.escape(first)}.*?^```", f"{first}{table}\n```")


if __name__ == "__main__":
    if sys.argv[1:2] == ["checks"]:
        sys.exit(checks(sys.argv[2]))
    if sys.argv[1:] == ["run"]:
        runs()
        group()
    for draw in (loss_and_learning, clipping, kl_estimators, length_bias, variants, which_groups_teach, collapse,
                 learning_curves):
        draw()
