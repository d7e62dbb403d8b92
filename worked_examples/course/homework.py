"""Homework: write grpo.py's functions yourself, run them, and have them graded.

    python worked_examples/course/homework.py --new my_grpo.py                   signatures and docstrings, no bodies
    python worked_examples/course/homework.py --new my_grpo.py --variant 1       with other defaults (1, 2 or 3)
    python worked_examples/course/homework.py my_grpo.py                         a table of logits learns, in seconds
    python worked_examples/course/homework.py my_grpo.py --model tiny            grpo.py's run and flags, half a minute
    python worked_examples/course/homework.py --grade my_grpo.py                 points, and why each lost one is lost
    python worked_examples/course/homework.py --grade my_grpo.py -k aggregate    the same for one function, in seconds
    python worked_examples/course/homework.py --reveal 3                         rung 3's answer, after your prediction
    python worked_examples/course/homework.py --compare a.py b.py --seeds 0 1 2  both curves in one picture

A function that is not written earns nothing; a run takes grpo.py's in its place. The rungs are at the top of the new
file; write what you expect into predictions.txt, a line for each ("3: ..."), before you run. While you write, the tests
show the first mistake with its input, what is expected, and what came. They expect the defaults of variant 0; with
another variant use --grade -k. Without -m they ask for the formula alone:

    GRPO_MODULE=my_grpo.py python -m pytest -q -x test_grpo.py -k group_stats
    GRPO_MODULE=my_grpo.py python -m pytest -q -x test_grpo.py -k group_stats -m "beyond or errors"

A function has points for the formula, for what its docstring promises beyond it, for its errors, and for agreeing with
grpo.py on what train passes to it. If the formula is wrong, and what train gets as well, it earns nothing. --grade with
--json FILE writes what Gradescope reads.
"""

import argparse
import re
import statistics
import sys
from pathlib import Path

from exercises import GRPO, VARIANTS_FILE, VARIANTS, exercises, load, text_of, written

COURSE = Path(__file__).with_name("README.md")


# The new file ---------------------------------------------------------------------------------------------------------

def emptied(source):
    """The lines of a source; the bodies of the exercises are gone."""
    lines = source.splitlines()
    for function in reversed(exercises(source).values()):               # from the end: line numbers stay valid
        lines[function.body[0].end_lineno:function.end_lineno] = ["    raise NotImplementedError"]
    return lines


def rungs():
    """{number: (text, answer)}, from course/README.md."""
    found = re.findall(r"^### (\d+)\. (.*?)<details><summary>Answer</summary>\n(.*?)</details>",
                       text_of(COURSE), re.S | re.M)
    return {int(number): (text.strip(), answer.strip()) for number, text, answer in found}


def new(path, variant):
    """Write the file for the student; an error if it exists."""
    paragraphs = text_of(GRPO).split('"""')[1].split("\n\n")
    notation = next(text for text in paragraphs if text.startswith("Notation"))
    shapes = next(text for text in paragraphs if text.startswith("The Args")).partition(" Left out")[0]
    table, ablations = (text_of(COURSE).partition(f"\n## {title}\n\n")[2].partition("\n\n")[0]
                        for title in ("The rungs", "Three ablations to hand in"))
    tasks = [f"Rung {number}. {text}" for number, (text, _) in rungs().items()]
    head = [f"My GRPO. Variant {variant}.", __doc__.partition("\n\n")[2].rstrip(), notation,
            f'{shapes}\nAn error is a ValueError or an AssertionError and begins with the name: "rewards: got ..."',
            table, *tasks, f"Three ablations\n\n{ablations}"]
    ours, others = (emptied(text_of(path, variant)) for path in (GRPO, VARIANTS_FILE))
    first, last = ([line.startswith(f"# §{n} ") for line in ours].index(True) for n in (1, 9))
    variants = others[others.index("import grpo") + 1:]
    with open(path, "x", encoding="utf-8") as file:
        print('r"""' + "\n\n".join(head), '"""', "", "import math", "import re", "", "import torch", "",
              *ours[first:last], "# Further exercises: variants of GRPO " + "-" * 68, *variants, sep="\n", file=file)
    return 0


# A student's file -----------------------------------------------------------------------------------------------------

def put(path, grpo):
    """Put a student's functions into the module grpo, and say which are grpo.py's own."""
    mine, left = {"__name__": Path(path).stem, "__file__": str(path)}, {}
    exec(compile(Path(path).read_text(encoding="utf-8"), str(path), "exec"), mine)
    reasons, _ = written(path)
    for name, why in reasons.items():
        if why not in ("", "grpo.py's own lines"):
            left.setdefault(why, []).append(name)
            mine[name] = getattr(grpo, name, None)                      # for those of the student's that call it
        setattr(grpo, name, mine[name])
    count = len(reasons) - sum(map(len, left.values()))
    return "\n".join([f"{count} of {len(reasons)} functions are yours; for the others a run takes grpo.py's",
                      *[f"{why}: {', '.join(names)}" for why, names in left.items()]])


def table(grpo, seed, rounds=40):
    """GRPO on logits that stand in a table: for 4 questions, at 10 places, 8 words, of which 0 ends the answer.

    Question k wants word k + 1. An answer of n words earns r = 2 - n/10, and 1 more if the word is in it.
    Yields of each round: mean reward, mean length, the loss before its 4 updates, the clipped share in the 1st and 4th.
    """
    import torch
    torch.manual_seed(seed)
    logits = torch.zeros(4, 10, 8)
    logits[:, :, 0], logits[:, 0, 0] = -2.0, -100.0                     # it rarely stops, and never at once
    optimizer = torch.optim.SGD([logits.requires_grad_()], lr=50.0)
    for _ in range(rounds):
        p = logits.detach().softmax(-1).repeat_interleave(16, 0)                                      # (64, 10, 8)
        ids = torch.multinomial(p.flatten(0, 1), 1).view(64, 10)
        answers = [row[:row.index(0) + 1] if 0 in row else row for row in ids.tolist()]
        rewards = torch.tensor([2 - len(a) / 10 + (i // 16 + 1 in a) for i, a in enumerate(answers)])
        mask, advantages = grpo.make_completion_mask(ids, 0), grpo.group_advantages(rewards, 16)
        old_logps, updates = None, []
        for _ in range(4):
            logps = grpo.selective_log_softmax(logits.repeat_interleave(16, 0), ids)
            loss, metrics = grpo.grpo_loss(logps, advantages, mask, old_logps=old_logps, loss_type="grpo")
            old_logps = logps.detach() if old_logps is None else old_logps
            updates.append((loss.item(), metrics["clip_ratio/region_mean"]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield rewards.mean().item(), sum(map(len, answers)) / 64, updates[0][0], updates[0][1], updates[-1][1]


def run(path, flags):
    """The table, or with flags grpo.py's own run."""
    import torch
    if not Path(path).is_file():
        raise SystemExit(f"homework.py: error: there is no file {path}")
    torch.set_num_threads(1)                                            # for so little work more would wait
    grpo = load()
    print(put(path, grpo))
    if flags:
        return grpo.main(flags)
    print("round  reward  length  loss, 1st of 4 updates  clipped: 1st    4th")
    for number, row in list(enumerate(table(grpo, seed=0)))[::5]:
        print("{:5}  {:6.2f}  {:6.1f}  {:22.4f}  {:12.3f}  {:5.3f}".format(number, *row))
    ends = [sum(row[0] for row in list(table(grpo, seed))[-5:]) / 5 for seed in range(3)]
    print("R =", ", ".join(f"{reward:.2f}" for reward in ends), "(the reward of the last five rounds, seeds 0, 1, 2)")
    return 0


def compare(paths, seeds, flags):
    """Run --model tiny with each file and seed; the rewards as a table, and as curves in compare.png."""
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot
    starts = {}
    for path in paths:
        curves, greedy = [], []
        for seed in seeds:
            grpo = load()
            put(path, grpo)
            config, _ = grpo.parse_options(["--model", "tiny", *flags, "--seed", str(seed)])
            problems, held_out = grpo.tiny_problems(seed)
            policy, tokenizer = grpo.load_model("tiny", seed)
            if seed not in starts:                                      # the same beginning for both files
                grpo.cold_start(policy, tokenizer, problems, seed)
                starts[seed] = {name: weight.clone() for name, weight in policy.state_dict().items()}
            policy.load_state_dict(starts[seed])
            rewards = [grpo.accuracy_reward, grpo.think_format_reward]
            curves.append([row["reward"] for _, _, row in grpo.train(policy, tokenizer, problems, rewards, config)])
            print(f"{path}, seed {seed}:")
            greedy.append(grpo.evaluate(policy, tokenizer, held_out, rewards, config))
        third = max(len(curves[0]) // 3, 1)
        for i in range(0, len(curves[0]), third):
            means = [statistics.mean(curve[i:i + third]) for curve in curves]
            std = f" ± {statistics.pstdev(means):.3f}" if len(seeds) > 1 else ""
            print(f"{path}, reward of steps {i + 1}-{i + third}: {statistics.mean(means):.3f}{std}")
        print(f"{path}, held-out accuracy: {', '.join(f'{x:.2f}' for x in greedy)}")
        steps, columns = range(1, len(curves[0]) + 1), list(zip(*curves))
        line, = pyplot.plot(steps, [statistics.mean(column) for column in columns], label=path)
        pyplot.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=line.get_color(), alpha=0.2)
    pyplot.xlabel("step")
    pyplot.ylabel(f"mean reward; band: all of {len(seeds)} seeds")
    pyplot.legend()
    pyplot.savefig("compare.png", dpi=120)
    print("compare.png: both curves")
    return 0


def reveal(number):
    """The answer of a rung, if predictions.txt has a prediction."""
    path = Path("predictions.txt")
    said = path.read_text(encoding="utf-8") if path.exists() else ""
    if number not in rungs():
        raise ValueError(f"--reveal: got {number}; allowed is one of {', '.join(map(str, rungs()))}")
    if not re.search(rf"^{number}: *\S", said, re.M):
        raise ValueError(f"--reveal: predictions.txt has no line \"{number}: what you expect\" yet")
    print(rungs()[number][1])
    return 0


def main(argv):
    if argv and not argv[0].startswith("-"):
        return run(argv[0], argv[1:])
    parser = argparse.ArgumentParser(prog="homework.py", usage=__doc__, allow_abbrev=False)
    parser.add_argument("--new", metavar="FILE")
    parser.add_argument("--variant", type=int, choices=VARIANTS)
    parser.add_argument("--grade", metavar="FILE")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("-k", metavar="NAME", default="")
    parser.add_argument("--reveal", type=int, metavar="N")
    parser.add_argument("--compare", nargs=2, metavar="FILE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options, flags = parser.parse_known_args(argv)
    try:
        if options.new:
            return new(options.new, options.variant or 0)
        if options.reveal is not None:
            return reveal(options.reveal)
        if options.compare:
            return compare(options.compare, options.seeds, flags)
        if options.grade:
            import grading
            return grading.grade(options.grade, options.json, options.k, options.variant)
    except (OSError, ValueError) as error:
        parser.exit(2, f"homework.py: error: {error}\n")
    parser.print_usage()
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
