"""Draw one or several runs: reward, held-out rewards, silent groups, entropy, clipped tokens, length of the answers.

    python worked_examples/scripts/plot_run.py RUN [RUN ...]

A RUN is the folder of a run. It writes run.png: thin lines are the steps, thick ones the mean of the last ten steps.
Held-out rewards are points, at the steps of --eval_steps and at the end; a second reward function's are dashed.
"""

import json
import math
import statistics
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

PANELS = {"reward": "reward", "frac_reward_zero_std": "share of silent groups", "entropy": "entropy (nats per token)",
          "clip_ratio/region_mean": "share of tokens clipped", "completions/mean_length": "tokens of an answer"}


def series(lines, name):
    """A metric at the steps whose line has it; null, as where no answer has a reward, is NaN: a gap."""
    found = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in found], [math.nan if value is None else value for _, value in found]


def draw(runs):
    texts = [Path(run, "metrics.jsonl").read_text(encoding="utf-8") for run in runs]
    metrics = [[json.loads(line) for line in text.splitlines()] for text in texts]
    asked = sorted({name for lines in metrics for line in lines for name in line if name.startswith("eval_rewards/")})
    figure = Figure(figsize=(17, 3.2), layout="constrained")
    reward, held_out, *others = figure.subplots(1, 6)
    for number, (run, lines) in enumerate(zip(runs, metrics)):
        color = f"C{number}" if len(runs) <= 10 else matplotlib.colormaps["turbo"](number / (len(runs) - 1))
        for panel, (name, title) in zip([reward, *others], PANELS.items()):
            steps, values = series(lines, name)
            windows = [[x for x in values[max(0, i - 9):i + 1] if x == x] for i in range(len(values))]
            smooth = [statistics.fmean(window) if window else math.nan for window in windows]
            panel.plot(steps, values, color=color, lw=0.8, alpha=0.4)
            panel.plot(steps, smooth, color=color, lw=2.2, label=f" {run}")     # matplotlib hides what begins with _
            panel.set(title=title, xlabel="step (thick: mean of the last ten)")
        for name, style in zip(asked, ["o-", "s--", "^:", "v-."]):
            held_out.plot(*series(lines, name), style, color=color, markersize=4)
    names = [name.split("/")[1] for name in asked]
    held_out.set(title=f"held out: {', '.join(names) or 'nothing'}", xlabel="step (not smoothed)")
    reward.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    draw(sys.argv[1:]).savefig("run.png", dpi=120)
    print("run.png:", *sys.argv[1:])
