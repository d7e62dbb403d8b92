"""Draw the pictures of README and of the worked examples, each for a light and for a dark page.

    python worked_examples/scripts/figures.py               draw all pictures
    python worked_examples/scripts/figures.py run           first run the demo, and write anew what depends on it

`run` is `python grpo.py --model tiny`, the same with ten times the learning rate, and with ten seeds: about six
minutes on one core. It writes their csv files and group.html. (On another processor the figures differ a little.)
"""

import itertools
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import matplotlib
import numpy
import torch
from PIL import Image

import grpo
from worked_examples.scripts import look_at_a_group

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
# Blue and orange differ for colour-blind readers, too.
LIGHT = dict(paper="#ffffff", ink="#1b1f24", grey="#59636e", blue="#1668b8", orange="#c25700", pale="#e8ebee")
DARK = dict(paper="#0d1117", ink="#e8eaed", grey="#a9b1ba", blue="#5aa7ee", orange="#f0883e", pale="#262c34")
PLACES = {"paper": ("figure.facecolor", "axes.facecolor", "savefig.facecolor"),
          "ink": ("text.color", "axes.labelcolor", "axes.titlecolor"),
          "grey": ("axes.edgecolor", "xtick.color", "ytick.color")}
STYLE = {"figure.figsize": (7.0, 2.9), "figure.constrained_layout.use": True, "font.size": 10, "axes.titlesize": 10.5,
         "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False}


def draw_all():
    for name, draw in DRAWINGS.items():
        for colours, suffix in (LIGHT, "_light" if name == "grpo" else ""), (DARK, "_dark"):
            plt.rcParams.update(STYLE)
            for colour, settings in PLACES.items():
                plt.rcParams.update(dict.fromkeys(settings, colours[colour]))
            save(draw(**colours), f"{name}{suffix}.png")


def save(figure, name):
    figure.savefig(PICTURES / name, dpi=200, metadata={"Software": None})
    plt.close(figure)
    few_colours = Image.open(PICTURES / name).convert("RGB").quantize(200, dither=Image.Dither.NONE)
    few_colours.save(PICTURES / name, optimize=True)


def csv(name):
    return numpy.genfromtxt(PICTURES / name, delimiter=",", names=True, deletechars="", dtype=None, encoding="utf-8")


def group_of_the_page():
    page = (PICTURES / "group.html").read_text(encoding="utf-8")
    return json.loads(re.search(r'id="group">(.*?)</script>', page, re.S)[1])


def signed(A, digits):
    return f"{'▲' if A > 0 else '▼'} {A:+.{digits}f}".replace("-", "−")


# The pictures: a function for each, whose arguments are colours -------------------------------------------------------

def method_in_one_picture(paper, ink, grey, blue, orange, **_):
    """README: eight answers with rewards and advantages, and the probabilities at their fork over the demo's steps."""
    data = group_of_the_page()
    fork, run = data["forks"][0], data["whole_run"]
    beginning = "".join(fork["prefix"])                                 # what all answers share
    figure = plt.figure(figsize=(8.3, 3.4), layout="none")
    left, right = figure.add_axes((0.01, 0, 0.66, 1)), figure.add_axes((0.755, 0.165, 0.225, 0.645))
    left.set(xlim=(0, 100), ylim=(13, 0))
    left.axis("off")
    bold, small = dict(weight="bold", size=11.5, va="center"), dict(size=9, va="center", color=grey)
    left.text(0, 0.7, f"1  Answer {data['prompt']} eight times, score each answer", **bold)
    left.text(56, 1.8, "reward = format + right", **small)
    left.text(85.5, 1.8, "advantage A", **small)
    best_first = sorted(range(8), key=lambda i: -data["rewards"][i])
    for y, i in enumerate(best_first, 3):
        text, A = data["answers"][i]["text"], data["advantages"][i]
        colour, width = blue if A > 0 else orange, 1.6                  # of a character, in hundredths of the panel
        left.add_patch(plt.Rectangle((width * len(beginning) - 0.15, y - 0.44), width + 0.3, 0.88, color=colour, lw=0))
        for k, character in enumerate(text):
            style = dict(color=paper, weight="bold") if k == len(beginning) else dict(color=grey)
            left.text(width * (k + 0.5), y, character, ha="center", va="center", family="monospace", size=10.5, **style)
        form, is_right = (data["rewards_per_func"][name][i] for name in ("think_format_reward", "accuracy_reward"))
        left.text(56, y, f"{data['rewards'][i]:g} = {form:g} + {is_right:g}", va="center", color=colour)
        left.text(85.5, y, signed(A, 2), va="center", color=colour)
    left.text(0, 11.4, "2  Push each token up (▲) or down (▼)", **bold)
    left.text(0, 12.4, f"A = (reward − mean) / std, mean {data['mean']:g}, std {data['std']:.2f}.  Before the boxes "
              "they cancel (dapo).", **small)
    probabilities = 100 * numpy.array(run["probabilities"])
    steps = len(probabilities) - 1
    for k, (colour, y, verdict) in enumerate(((blue, 80, "carry, right"), (orange, 20, "no carry, wrong"))):
        first, last = (f"{p:.1f}%" if p >= 0.1 else "< 0.1%" for p in probabilities[[0, -1], k])
        right.plot(probabilities[:, k], color=colour, lw=2.5)
        right.text(0.98 * steps, y, f"{run['words'][k]} ({verdict}):\n{first} → {last}", color=colour, ha="right",
                   va="center", size=9.5)
    right.set(xlim=(0, steps), ylim=(-2, 102), yticks=[0, 50, 100], yticklabels=["0", "50", "100%"],
              xticks=[0, steps // 2, steps], xlabel="step of the demo")
    figure.text(0.705, 0.944, "3  Repeat: the carry wins", **bold | {"size": 10.5})
    figure.text(0.705, 0.865, f"next token after …{beginning[-8:]}", **small)
    return figure


def one_page(ink, grey, blue, orange, pale, **_):
    """Page 0: four answers to 7+5=, and one update of the logits of three words."""
    words, samples, scores, advantages = ["12", "11", "13"], [0, 1, 0, 2], [1, 0, 1, 0], [0.5, -0.5, 0.5, -0.5]
    step = torch.tensor([2 * 0.5, -0.5, -0.5]) / 4                      # minus the gradient at three equal logits
    before, after = ((100 * logits.softmax(0)).tolist() for logits in (torch.zeros(3), step))
    figure, (left, right) = plt.subplots(1, 2, width_ratios=(1.15, 1))
    left.set(xlim=(0, 10), ylim=(4.1, -0.9), title="Four answers, scored")
    left.axis("off")
    left.text(0, -0.45, "7+5=", family="monospace", weight="bold", size=12)
    left.text(3.9, -0.45, "score", color=grey)
    left.text(6.2, -0.45, "minus the mean", color=grey)
    for y, (k, score, A) in enumerate(zip(samples, scores, advantages)):
        style = dict(size=12, va="center", color=blue if A > 0 else orange)
        left.add_patch(plt.Rectangle((0, y + 0.08), 3.0, 0.84, fill=False, ec=style["color"], lw=1.8))
        left.text(1.5, y + 0.5, words[k], family="monospace", ha="center", **style)
        left.text(4.4, y + 0.5, f"{score:g}", ha="center", **style)
        left.text(6.2, y + 0.5, signed(A, 1), **style)
    for k in range(3):
        colour = blue if after[k] > before[k] else orange
        right.bar(k - 0.2, before[k], 0.36, color=pale, ec=grey, lw=0.8)
        right.bar(k + 0.2, after[k], 0.36, color=colour)
        right.text(k - 0.2, before[k] + 1, f"{before[k]:.0f}%", ha="center", color=grey)
        right.text(k + 0.2, after[k] + 1, f"{after[k]:.0f}%", ha="center", color=colour, weight="bold")
    right.set(xticks=range(3), xticklabels=words, yticks=[], ylim=(0, 52), title="One update: before, after")
    right.spines["left"].set_visible(False)
    return figure


def clipping(ink, grey, blue, pale, **_):
    """Page 3: the loss of one token over its ratio."""
    ratio = torch.linspace(0, 3.5, 701, dtype=torch.float64).unsqueeze(0)
    figure, axes = plt.subplots(1, 2)
    for axis, A in (axes[0], 1.0), (axes[1], -1.0):
        axis.axvspan(0.8, 1.2, color=pale, lw=0)
        axis.plot(ratio[0], -ratio[0] * A, ":", color=grey, lw=1.5)
        loss = grpo.clipped_surrogate_loss(ratio, torch.full_like(ratio, A))
        axis.plot(ratio[0], loss[0], color=blue, lw=2.5)
        axis.plot([1], [-A], "o", color=ink, ms=5)
        axis.text(1.12, -A, "ρ = 1:\non-policy", size=8.5, va="top" if A < 0 else "bottom")
        axis.set(xlabel="ratio ρ (shaded: 0.8 … 1.2)", ylabel="loss of the token", xlim=(0, 3.6))
    axes[0].set(ylim=(-3.7, 0.2), yticks=[0, -1, -2, -3], title="A = +1: above 1.2 no gradient")
    axes[0].text(2.3, -1.12, "clipped", color=blue, va="bottom")
    axes[0].text(2.2, -2.9, "−ρA, no clip", color=grey, ha="right")
    axes[1].set(ylim=(-0.2, 3.7), yticks=[0, 1, 2, 3], title="A = −1: below 0.8 no gradient")
    axes[1].text(0.1, 0.9, "clipped", color=blue, va="bottom")
    axes[1].text(2.65, 3.1, "not clipped: grows\nwithout limit", color=blue, ha="right", va="center")
    return figure


def real_model(ink, blue, orange, **_):
    """Page 7: real_model.csv."""
    lines = csv("real_model.csv")
    figure, panels = plt.subplots(1, 3, figsize=(9.4, 2.9))
    drawn = (("Three seeds learn", "reward", ("seed 42", "seed 43", "seed 44")),
             ("Three learning rates", "reward", ("rate 1e-6", "seed 42", "rate 1e-4")),
             ("Counting a word is hacked", "mentions", ("hacked", "mended")))
    for panel, (title, metric, runs) in zip(panels, drawn):
        for run, colour in zip(runs, (blue, orange, ink)):
            values = lines[metric][lines["run"] == run]
            smooth = [values[max(0, i - 2):i + 1].mean() for i in range(len(values))]      # a step has four prompts
            label = "rate 1e-5" if title.endswith("rates") and run == "seed 42" else run
            panel.plot(range(1, len(smooth) + 1), smooth, color=colour, lw=2, label=label)
        panel.set(xlabel="step", ylim=(0, None), title=title)
        panel.legend(frameon=False, fontsize=8, loc="upper left")
    panels[0].set_ylabel("right answers of a step")
    panels[2].set_ylabel("mentions of the topic")
    return figure


def good_run(ink, grey, blue, orange, **_):
    """Page 11: the demo with ten seeds."""
    runs = csv("tiny_seeds.csv")
    steps = int(runs["step"].max())
    figure, panels = plt.subplots(1, 3, figsize=(9.4, 2.9))
    drawn = (("rewards/accuracy_reward/mean", blue, "share of a step's answers", "Right answers rise"),
             ("entropy", ink, "nats per token", "Entropy peaks while it learns"),
             ("frac_reward_zero_std", orange, "groups with equal rewards", "Silent groups dip, then rise"))
    for panel, (name, colour, label, title) in zip(panels, drawn):
        values = runs[name].reshape(-1, steps)                          # a row for each seed
        panel.plot(range(1, steps + 1), values.T, color=colour, lw=0.6, alpha=0.3)
        panel.plot(range(1, steps + 1), values.mean(0), color=colour, lw=2.5)
        panel.set(xlabel="step", ylabel=label, title=title, xlim=(0, steps), ylim=(0, None))
    panels[0].text(0.97 * steps, 0.06, "thin: a seed, thick: the mean of ten", ha="right", size=8, color=grey)
    return figure


def collapse(ink, grey, blue, orange, **_):
    """Page 11: collapsed_run.csv."""
    run = csv("collapsed_run.csv")
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3))
    for panel, metric, colour, label in (
            (left, "rewards/accuracy_reward/mean", blue, "right answers"),
            (left, "rewards/think_format_reward/mean", ink, "well-formed"),
            (left, "frac_reward_zero_std", orange, "silent groups"),
            (right, "entropy", ink, "entropy (nats)"),
            (right, "completions/clipped_ratio", grey, "cut off"),
            (right, "loss", orange, "loss")):
        panel.plot(run["step"], run[metric], color=colour, lw=1.6, label=label)
    left.set(xlabel="step", xlim=(0, run["step"][-1]), title="Too fast: hardly an answer is right")
    right.set(xlabel="step", xlim=(0, run["step"][-1]), title="Entropy shows it, the loss does not")
    left.legend(frameon=False, fontsize=9, loc="center right")
    right.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


DRAWINGS = {"grpo": method_in_one_picture, "one_page": one_page, "clipping": clipping, "real_model": real_model,
            "curve": good_run, "collapse": collapse}


# The runs -------------------------------------------------------------------------------------------------------------

METRICS = ["step", "rewards/accuracy_reward/mean", "rewards/think_format_reward/mean", "frac_reward_zero_std",
           "entropy", "completions/mean_length", "completions/clipped_ratio", "grad_norm", "loss"]


def demo(*flags):
    """The demo's policy after its cold start, and its steps."""
    config, options, _ = grpo.parse_options(["--model", "tiny", *flags])
    problems, _, policy, tokenizer = grpo.load_job(config, options)
    grpo.cold_start(policy, tokenizer, problems, config.seed)
    reward_funcs = [grpo.load_reward_func(name) for name in options.reward_funcs]
    return policy, grpo.train(policy, tokenizer, problems, reward_funcs, config)


def write_csv(name, lines, metrics):
    rows = [",".join(f"{line[metric]:.5g}" for metric in metrics) for line in lines]
    (PICTURES / name).write_text("\n".join([",".join(metrics), *rows]) + "\n")


def run_all():
    """Ten seeds, the collapse, the good run; group.html: look_at_a_group.py's page, and its first fork in that run."""
    torch.set_num_threads(1)
    seeds = [metrics for seed in range(10) for _, _, metrics in demo("--seed", str(seed))[1]]
    write_csv("tiny_seeds.csv", seeds, ["step", "rewards/accuracy_reward/mean", "frac_reward_zero_std", "entropy"])
    write_csv("collapsed_run.csv", [metrics for _, _, metrics in demo("--learning_rate", "3e-3")[1]], METRICS)
    _, config, job = look_at_a_group.load(["--html", "group.html"])
    seen = look_at_a_group.update_on_one_group(*job, config)
    data = look_at_a_group.group_data(seen)
    beginning, pulls = next(iter(seen.forks.items()))
    tokens = [max(pulls, key=pulls.get), min(pulls, key=pulls.get)]     # the right and the wrong one
    policy, steps = demo()
    lines, probabilities = [], []
    for step in itertools.chain([None], steps):                         # before the first step, and after each
        probs = look_at_a_group.next_token_probs(policy, seen.rollout, beginning, config)
        probabilities.append([float(f"{p:.7g}") for p in probs[tokens].tolist()])
        lines += [step[2]] if step else []
    write_csv("tiny_run.csv", lines, METRICS)
    data["whole_run"] = {"words": [look_at_a_group.word(token, seen.tokenizer) for token in tokens],
                         "probabilities": probabilities}
    (PICTURES / "group.html").write_text(look_at_a_group.page(data), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        run_all()
    draw_all()
