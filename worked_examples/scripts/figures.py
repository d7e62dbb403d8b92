"""Draw the pictures of README and of the worked examples.

    python worked_examples/scripts/figures.py               draw all pictures
    python worked_examples/scripts/figures.py run           first run the demo, and write anew what depends on it

`run` is `python grpo.py --model tiny`, the same with ten times the learning rate, and with ten seeds: about six
minutes on one core. It writes their csv files and group.json. (On another processor the figures differ a little.)
"""

import itertools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import matplotlib
import numpy
import torch
from matplotlib.figure import Figure
from PIL import Image

import grpo
from worked_examples.scripts import look_at_a_group

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
BLUE, ORANGE, GREY, PALE, INK = "#1668b8", "#c25700", "#59636e", "#e8ebee", "#1b1f24"  # colour-blind readers tell them
STYLE = {"figure.figsize": (7.0, 2.9), "figure.constrained_layout.use": True, "figure.dpi": 200, "text.color": INK,
         "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10.5, "axes.titleweight": "bold",
         "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 8}


def csv(name):
    return numpy.genfromtxt(PICTURES / name, delimiter=",", names=True, deletechars="", dtype=None, encoding="utf-8")


# The pictures ---------------------------------------------------------------------------------------------------------

def method_in_one_picture():
    """README: eight answers with rewards and advantages, and the probabilities at their fork over the demo's steps."""
    data = json.loads((PICTURES / "group.json").read_text(encoding="utf-8"))
    beginning = "".join(data["forks"][0]["prefix"])                     # what all answers share
    k = len(beginning)
    figure = Figure(figsize=(8.3, 3.4))
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    left.set(xlim=(0, 100), ylim=(11.5, 0.3), title=f"1  Answer {data['prompt']} eight times, score each answer")
    left.axis("off")
    left.text(56, 0.8, "reward = format + right", size=8.5, color=GREY)
    left.text(85, 0.8, "advantage A", size=8.5, color=GREY)
    best_first = sorted(range(8), key=lambda i: -data["rewards"][i])
    for y, i in enumerate(best_first, 2):
        text, A = data["answers"][i]["text"], data["advantages"][i]
        colour = BLUE if A > 0 else ORANGE
        left.text(0, y, f"{beginning} {text[k + 1:]}", family="monospace", color=GREY)
        left.text(0, y, " " * k + "█", family="monospace", color=colour)
        left.text(0, y, " " * k + text[k], family="monospace", color="white", weight="bold")
        is_right, form = (rewards[i] for rewards in data["rewards_per_func"].values())
        left.text(56, y, f"{form + is_right:g} = {form:g} + {is_right:g}", color=colour)
        left.text(85, y, f"▲ +{A:.2f}" if A > 0 else f"▼ −{-A:.2f}", color=colour)
    left.text(0, 10.4, "2  Push each token up (▲) or down (▼)", size=10.5, weight="bold")
    left.text(0, 11.4, f"A = (reward − mean) / std, mean {data['mean']:g}, std {data['std']:.2f}.  Before the boxes "
              "they cancel (dapo).", size=8.5, color=GREY)
    carry, no_carry = 100 * numpy.array(data["whole_run"]["probabilities"]).T
    right.plot(carry, color=BLUE, lw=2.5, label=f"1, the carry:\n{carry[0]:.1f}% → {carry[-1]:.1f}%")
    right.plot(no_carry, color=ORANGE, lw=2.5, label=f"0, wrong:\n{no_carry[0]:.1f}% → {no_carry[-1]:.1f}%")
    right.legend(loc="center right")
    right.set(xlabel="step of the demo", ylabel=f"% next token after …{beginning[-8:]}", yticks=(0, 50, 100),
              title="3  The carry wins")
    return figure


def one_page():
    """Page 0: four answers to 7+5=, and one update of the logits of three words."""
    after = torch.tensor([0.25, -0.125, -0.125]).softmax(0)             # minus the gradient at three equal logits
    figure = Figure()
    left, right = figure.subplots(1, 2)
    left.set(xlim=(0, 10), ylim=(4.4, -0.4), title="Four answers, scored")
    left.axis("off")
    rows = [("7+5=", "score", "minus the mean", GREY), ("12", "1", "▲ +0.5", BLUE), ("11", "0", "▼ −0.5", ORANGE),
            ("12", "1", "▲ +0.5", BLUE), ("13", "0", "▼ −0.5", ORANGE)]
    for y, (answer, score, advantage, colour) in enumerate(rows):
        for x, text in ((0, answer), (2.5, score), (5, advantage)):
            left.text(x, y, text, size=12, color=colour)
    before = right.bar(numpy.arange(3) - 0.2, [100 / 3] * 3, 0.36, color=PALE)
    updated = right.bar(numpy.arange(3) + 0.2, (100 * after).tolist(), 0.36, color=[BLUE, ORANGE, ORANGE])
    right.bar_label(before, fmt="%.0f%%")
    right.bar_label(updated, fmt="%.0f%%", weight="bold")
    right.set(xticks=range(3), xticklabels=["12", "11", "13"], yticks=[], ylim=(0, 48),
              title="One update: before, after")
    return figure


def clipping():
    """Page 3: the loss of one token over its ratio."""
    ratio = torch.linspace(0, 3.5, 701)
    figure = Figure()
    titles = "A = +1: above 1.2 no gradient", "A = −1: below 0.8 no gradient"
    for axis, A, title in zip(figure.subplots(1, 2), (1.0, -1.0), titles):
        axis.axvspan(0.8, 1.2, color=PALE, lw=0)
        axis.plot(ratio, -ratio * A, ":", color=GREY, lw=1.5, label="without the clip")
        axis.plot(ratio, grpo.clipped_surrogate_loss(ratio, torch.full_like(ratio, A)), color=BLUE, lw=2.5)
        axis.plot([1], [-A], "o", color=INK, ms=5, label="ρ = 1: on-policy")
        axis.set(xlabel="ratio ρ (shaded: 0.8 … 1.2)", ylabel="loss of the token", title=title)
        axis.legend()
    return figure


def three_seeds(name):
    """Pages 6 and 7: runs of a real model; a line is the mean of up to three steps."""
    lines = csv(f"{name}.csv")
    figure = Figure(figsize=(9.4, 2.9))
    drawn = ("Right answers", "reward"), ("Silent groups", "silent"), ("Entropy (nats, log scale)", "entropy")
    for panel, (title, metric) in zip(figure.subplots(1, 3), drawn):
        for run, colour in ("seed 42", BLUE), ("seed 44", INK), ("seed 43", ORANGE):
            values = lines[metric][lines["run"] == run]
            smooth = [values[max(0, i - 2):i + 1].mean() for i in range(len(values))]
            panel.plot(range(1, len(values) + 1), smooth, color=colour, lw=1.8, label=run)
        panel.set(xlabel="step", title=title)
    panel.set_yscale("log")
    figure.axes[0].legend()
    return figure


def two_runs():
    """Page 11: the demo with ten seeds, and the collapse."""
    good, collapse = csv("tiny_seeds.csv"), csv("collapsed_run.csv")
    step = collapse["step"]
    figure = Figure(figsize=(9.4, 3.1))
    panels = figure.subplots(1, 3)
    drawn = (("Right answers", "rewards/accuracy_reward/mean"), ("Entropy (nats, log scale)", "entropy"),
             ("Silent groups", "frac_reward_zero_std"))
    for panel, (title, metric) in zip(panels, drawn):
        seeds = good[metric].reshape(-1, len(step)).T                   # a column for each seed
        panel.plot(step, seeds, color=BLUE, lw=0.6, alpha=0.3)
        panel.plot(step, seeds.mean(1), color=BLUE, lw=2.5, label="the demo: ten seeds, their mean")
        panel.plot(step, collapse[metric], color=ORANGE, lw=2, label="learning rate × 10")
        panel.set(xlabel="step", title=title)
    panels[0].legend(loc="center right")
    panels[1].set_yscale("log")
    return figure


DRAWINGS = {"grpo": method_in_one_picture, "one_page": one_page, "clipping": clipping, "two_runs": two_runs,
            "real_model": lambda: three_seeds("real_model"), "two_digit_sums": lambda: three_seeds("two_digit_sums")}

# The runs -------------------------------------------------------------------------------------------------------------

RUNS = {"tiny_run": [""], "collapsed_run": ["--learning_rate 3e-3"],
        "tiny_seeds": [f"--seed {seed}" for seed in range(10)]}
METRICS = ["step", "rewards/accuracy_reward/mean", "rewards/think_format_reward/mean", "frac_reward_zero_std",
           "entropy", "grad_norm", "loss"]


def demo(flags):
    """The demo's policy after its cold start, and its steps."""
    options, config, _ = grpo.parse_options(["--model", "tiny", *flags.split()])
    policy, *job, _ = grpo.load_job(options, config)
    return policy, grpo.train(policy, *job, config)


def run_all():
    """The csv files; group.json: look_at_a_group.py's data, and the carry at its first fork in a whole run."""
    for name, runs in RUNS.items():
        table = [[metrics[metric] for metric in METRICS] for flags in runs for _, _, metrics in demo(flags)[1]]
        numpy.savetxt(PICTURES / f"{name}.csv", table, "%.5g", ",", header=",".join(METRICS), comments="")
    data = look_at_a_group.group_data(*look_at_a_group.load(["--json", "group.json"])[1])
    ids = grpo.tiny_tokenizer().convert_tokens_to_ids
    question, beginning = torch.tensor(ids([*data["prompt"]])), ids(data["forks"][0]["prefix"])
    policy, steps = demo("")
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
