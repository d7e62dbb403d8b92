"""Draw one or several runs: reward, silent groups, entropy, clipped tokens and length of the answers over the steps.

    python worked_examples/scripts/plot_run.py RUN [RUN ...] [--output run.png]

A RUN is the folder of a run, or its metrics.jsonl. Thin lines are the steps, thick ones the mean of the last ten steps.
"""

import argparse
import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

PANELS = {"reward": "reward", "frac_reward_zero_std": "share of silent groups", "entropy": "entropy (nats per token)",
          "clip_ratio/region_mean": "share of tokens clipped", "completions/mean_length": "tokens of an answer"}


def load(run):
    path = Path(run, "metrics.jsonl") if Path(run).is_dir() else Path(run)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def draw(runs):
    figure = Figure(figsize=(14, 3), layout="constrained")
    axes = figure.subplots(1, 5)
    for axis, name in zip(axes, PANELS):
        for number, (run, lines) in enumerate(runs.items()):
            steps = [line["step"] for line in lines]
            values = [line[name] for line in lines]
            smooth = [statistics.fmean(values[max(0, i - 9):i + 1]) for i in range(len(values))]
            axis.plot(steps, values, color=f"C{number}", lw=0.8, alpha=0.4)
            axis.plot(steps, smooth, color=f"C{number}", lw=2.2, label=run)
        axis.set(title=PANELS[name], xlabel="step")
    axes[0].legend(fontsize=8)
    return figure


def main(argv=None):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--output", default="run.png", metavar="FILE.png")
    options = parser.parse_args(argv)
    draw({run: load(run) for run in options.runs}).savefig(options.output, dpi=120)
    print(f"{options.output}: {', '.join(options.runs)}")


if __name__ == "__main__":
    main()
