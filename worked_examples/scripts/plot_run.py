"""Draw one or several runs: reward, silent groups, entropy, clipped tokens and length of the answers over the steps.

    python worked_examples/scripts/plot_run.py RUN [RUN ...]

A RUN is the folder of a run. It writes run.png: thin lines are the steps, thick ones the mean of the last ten steps.
"""

import json
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure

PANELS = {"reward": "reward", "frac_reward_zero_std": "share of silent groups", "entropy": "entropy (nats per token)",
          "clip_ratio/region_mean": "share of tokens clipped", "completions/mean_length": "tokens of an answer"}


def draw(runs):
    figure = Figure(figsize=(14, 3), layout="constrained")
    panels = figure.subplots(1, 5)
    for number, run in enumerate(runs):
        lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = [line["step"] for line in lines]
        for panel, (name, title) in zip(panels, PANELS.items()):
            values = [line[name] for line in lines]
            smooth = [statistics.fmean(values[max(0, i - 9):i + 1]) for i in range(len(values))]
            panel.plot(steps, values, color=f"C{number}", lw=0.8, alpha=0.4)
            panel.plot(steps, smooth, color=f"C{number}", lw=2.2, label=run)
            panel.set(title=title, xlabel="step")
    panels[0].legend(fontsize=8)
    return figure


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(__doc__)
    draw(sys.argv[1:]).savefig("run.png", dpi=120)
    print("run.png:", *sys.argv[1:])
