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
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

import grpo
from worked_examples.scripts import look_at_a_group

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
# Blue and orange differ for colour-blind readers, too.
COLOURS = {
    "": dict(paper="#ffffff", ink="#1b1f24", grey="#59636e", blue="#1668b8", orange="#c25700", pale="#e8ebee"),
    "_dark": dict(paper="#0d1117", ink="#e8eaed", grey="#a9b1ba", blue="#5aa7ee", orange="#f0883e", pale="#262c34")}
PLACES = {"paper": ("figure.facecolor", "axes.facecolor"), "ink": ("text.color", "axes.labelcolor"),
          "grey": ("axes.edgecolor", "xtick.color", "ytick.color")}
STYLE = {"figure.figsize": (7.0, 2.9), "figure.constrained_layout.use": True, "font.size": 10, "axes.titlesize": 10.5,
         "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
         "legend.frameon": False, "legend.fontsize": 8}


def draw_all():
    for (name, draw), (suffix, colours) in itertools.product(DRAWINGS.items(), COLOURS.items()):
        matplotlib.rcParams.update(STYLE)
        for colour, settings in PLACES.items():
            matplotlib.rcParams.update(dict.fromkeys(settings, colours[colour]))
        path = PICTURES / f"{name}{suffix}.png"
        draw(**colours).savefig(path, dpi=200)
        few_colours = Image.open(path).convert("RGB").quantize(200, dither=Image.Dither.NONE)
        few_colours.save(path, optimize=True)


def csv(name):
    return numpy.genfromtxt(PICTURES / name, delimiter=",", names=True, deletechars="", dtype=None, encoding="utf-8")


# The pictures: a function for each, whose arguments are colours -------------------------------------------------------

def method_in_one_picture(paper, grey, blue, orange, **_):
    """README: eight answers with rewards and advantages, and the probabilities at their fork over the demo's steps."""
    page = (PICTURES / "group.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="group">(.*?)</script>', page, re.S)[1])
    fork, run = data["forks"][0], data["whole_run"]
    beginning = "".join(fork["prefix"])                                 # what all answers share
    figure = Figure(figsize=(8.3, 3.4), layout="none")
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
        left.add_patch(Rectangle((width * len(beginning) - 0.15, y - 0.44), width + 0.3, 0.88, color=colour, lw=0))
        for k, character in enumerate(text):
            style = dict(color=paper, weight="bold") if k == len(beginning) else dict(color=grey)
            left.text(width * (k + 0.5), y, character, ha="center", va="center", family="monospace", size=10.5, **style)
        form, is_right = (data["rewards_per_func"][name][i] for name in ("think_format_reward", "accuracy_reward"))
        left.text(56, y, f"{data['rewards'][i]:g} = {form:g} + {is_right:g}", va="center", color=colour)
        left.text(85.5, y, f"▲ +{A:.2f}" if A > 0 else f"▼ −{-A:.2f}", va="center", color=colour)
    left.text(0, 11.4, "2  Push each token up (▲) or down (▼)", **bold)
    left.text(0, 12.4, f"A = (reward − mean) / std, mean {data['mean']:g}, std {data['std']:.2f}.  Before the boxes "
              "they cancel (dapo).", **small)
    probabilities = 100 * numpy.array(run["probabilities"])
    steps = len(probabilities) - 1
    for k, (colour, y, verdict) in enumerate(((blue, 80, "carry, right"), (orange, 20, "no carry, wrong"))):
        first, last = probabilities[[0, -1], k]
        right.plot(probabilities[:, k], color=colour, lw=2.5)
        right.text(0.98 * steps, y, f"{run['words'][k]} ({verdict}):\n{first:.1f}% → {last:.1f}%", color=colour,
                   ha="right", va="center", size=9.5)
    right.set(xlim=(0, steps), ylim=(-2, 102), yticks=[0, 50, 100], yticklabels=["0", "50", "100%"],
              xticks=[0, steps // 2, steps], xlabel="step of the demo")
    figure.text(0.705, 0.944, "3  Repeat: the carry wins", **bold | {"size": 10.5})
    figure.text(0.705, 0.865, f"next token after …{beginning[-8:]}", **small)
    return figure


def one_page(grey, blue, orange, pale, **_):
    """Page 0: four answers to 7+5=, and one update of the logits of three words."""
    after = torch.tensor([0.25, -0.125, -0.125]).softmax(0).tolist()    # minus the gradient at three equal logits
    figure = Figure()
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    left.set(xlim=(0, 10), ylim=(4.1, -0.9), title="Four answers, scored")
    left.axis("off")
    left.text(0, -0.45, "7+5=", family="monospace", weight="bold", size=12)
    left.text(3.9, -0.45, "score", color=grey)
    left.text(6.2, -0.45, "minus the mean", color=grey)
    for y, (word, score) in enumerate((("12", 1), ("11", 0), ("12", 1), ("13", 0))):
        style = dict(size=12, va="center", color=blue if score else orange)
        left.add_patch(Rectangle((0, y + 0.08), 3.0, 0.84, fill=False, ec=style["color"], lw=1.8))
        left.text(1.5, y + 0.5, word, family="monospace", ha="center", **style)
        left.text(4.4, y + 0.5, f"{score}", ha="center", **style)
        left.text(6.2, y + 0.5, "▲ +0.5" if score else "▼ −0.5", **style)
    for k, colour in enumerate((blue, orange, orange)):
        before = right.bar(k - 0.2, 100 / 3, 0.36, color=pale, ec=grey, lw=0.8)
        right.bar_label(before, fmt="%.0f%%", padding=1, color=grey)
        updated = right.bar(k + 0.2, 100 * after[k], 0.36, color=colour)
        right.bar_label(updated, fmt="%.0f%%", padding=1, color=colour, weight="bold")
    right.set(xticks=range(3), xticklabels=["12", "11", "13"], yticks=[], ylim=(0, 52),
              title="One update: before, after")
    right.spines["left"].set_visible(False)
    return figure


def clipping(ink, grey, blue, pale, **_):
    """Page 3: the loss of one token over its ratio."""
    ratio = torch.linspace(0, 3.5, 701, dtype=torch.float64)
    figure = Figure()
    axes = figure.subplots(1, 2)
    for axis, A in zip(axes, (1.0, -1.0)):
        axis.axvspan(0.8, 1.2, color=pale, lw=0)
        axis.plot(ratio, -ratio * A, ":", color=grey, lw=1.5)
        axis.plot(ratio, grpo.clipped_surrogate_loss(ratio, torch.full_like(ratio, A)), color=blue, lw=2.5)
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
    figure = Figure()
    drawn = (("Three seeds learn", "reward", "right answers of a step", ("seed 42", "seed 43", "seed 44")),
             ("Counting a word is hacked", "mentions", "mentions of the topic", ("hacked", "mended")))
    for panel, (title, metric, label, runs) in zip(figure.subplots(1, 2), drawn):
        for run, colour in zip(runs, (blue, orange, ink)):
            values = lines[metric][lines["run"] == run]
            smooth = [values[max(0, i - 2):i + 1].mean() for i in range(len(values))]      # a step has four prompts
            panel.plot(range(1, len(smooth) + 1), smooth, color=colour, lw=2, label=run)
        panel.set(xlabel="step", ylabel=label, ylim=(0, None), title=title)
        panel.legend()
    return figure


def two_runs(blue, orange, **_):
    """Page 11: the demo with ten seeds, and the collapse."""
    good, collapse = csv("tiny_seeds.csv"), csv("collapsed_run.csv")
    step, form = collapse["step"], collapse["rewards/think_format_reward/mean"]
    figure = Figure(figsize=(9.4, 3.1))
    panels = figure.subplots(1, 3)
    drawn = (("Right answers", "rewards/accuracy_reward/mean"), ("Entropy (nats, log scale)", "entropy"),
             ("Silent groups", "frac_reward_zero_std"))
    for panel, (title, metric) in zip(panels, drawn):
        seeds = good[metric].reshape(-1, len(step)).T                   # a column for each seed
        panel.plot(step, seeds, color=blue, lw=0.6, alpha=0.3)
        panel.plot(step, seeds.mean(1), color=blue, lw=2.5, label="the demo: ten seeds, their mean")
        panel.plot(step, collapse[metric], color=orange, lw=2, label="learning rate × 10")
        panel.set(xlabel="step", title=title, xlim=(0, len(step)))
    panels[0].plot(step, form, ":", color=orange, lw=1.5, label="learning rate × 10: well-formed")
    panels[0].legend(loc="center right")
    panels[1].set(yscale="log", yticks=[0.01, 0.1], yticklabels=["0.01", "0.1"])
    return figure


DRAWINGS = {"grpo": method_in_one_picture, "one_page": one_page, "clipping": clipping, "real_model": real_model,
            "two_runs": two_runs}


# The runs -------------------------------------------------------------------------------------------------------------

RUNS = {"tiny_run": [""], "collapsed_run": ["--learning_rate 3e-3"],
        "tiny_seeds": [f"--seed {seed}" for seed in range(10)]}
METRICS = ["step", "rewards/accuracy_reward/mean", "rewards/think_format_reward/mean", "frac_reward_zero_std",
           "entropy", "grad_norm", "loss"]


def demo(flags):
    """The demo's policy after its cold start, and its steps."""
    config, options, _ = grpo.parse_options(["--model", "tiny", *flags.split()])
    problems, _, policy, tokenizer = grpo.load_job(config, options)
    grpo.cold_start(policy, tokenizer, problems, config.seed)
    reward_funcs = [grpo.load_reward_func(name) for name in options.reward_funcs]
    return policy, grpo.train(policy, tokenizer, problems, reward_funcs, config)


def run_all():
    """The csv files; group.html: look_at_a_group.py's page, and the carry at its first fork in a whole run."""
    torch.set_num_threads(1)
    for name, runs in RUNS.items():
        table = [[metrics[metric] for metric in METRICS] for flags in runs for _, _, metrics in demo(flags)[1]]
        numpy.savetxt(PICTURES / f"{name}.csv", table, "%.5g", ",", header=",".join(METRICS), comments="")
    _, job = look_at_a_group.load(["--html", "group.html"])
    data, carries, (policy, steps) = look_at_a_group.group_data(*job), ["1", "0"], demo("")
    prompt, prefix, tokens = map(grpo.tiny_tokenizer().convert_tokens_to_ids,
                                 ([*data["prompt"]], data["forks"][0]["prefix"], carries))

    def probabilities():
        probs = look_at_a_group.next_token_probs(policy, torch.tensor(prompt), prefix, grpo.GRPOConfig())
        return probs[tokens].tolist()

    data["whole_run"] = {"words": carries, "probabilities": [probabilities(), *(probabilities() for _ in steps)]}
    (PICTURES / "group.html").write_text(look_at_a_group.page(data), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        run_all()
    draw_all()
