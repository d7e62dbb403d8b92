"""The homework: write the maths of GRPO yourself, one function after another, and see each at work.

    python worked_examples/course/homework.py --new my_grpo.py             what there is to write
    python worked_examples/course/homework.py my_grpo.py                   your functions learn a table of logits
    python worked_examples/course/homework.py my_grpo.py --model tiny      grpo.py's run and flags, half a minute
    python worked_examples/course/homework.py --grade my_grpo.py           points, and why each lost one is lost
    python worked_examples/course/homework.py --grade my_grpo.py -k kl     the same for the functions called so

A run takes grpo.py's function where yours is not written. The rungs are at the top of the new file. Before you run one,
write what you expect into predictions.txt. While you write, ask the tests of one function up to the first mistake:

    python worked_examples/check_your_own/check.py my_grpo.py -x -k group_stats
    python worked_examples/check_your_own/check.py my_grpo.py -x -k group_stats -m "beyond or errors"

A function has points for the formula, shared out among its options, for what is promised beyond it, and for its errors.
If the formula is wrong with an option, the last two are lost. --json FILE writes what Gradescope reads. The promises
are in the docstring of a function, in grpo.py's own (below the notation in a new file), and here:

- A float dtype that goes in (bfloat16, too) comes out; per_token_logps returns float32 or wider. Rewards may be
  integers or bools, which become floats. Ids and an index may be of any integer dtype. No argument is changed.
- Without a token, or without a row, the result is 0 or empty, not 0/0. k3 takes exp of 20 at most.
- per_token_logps calls the model once, with use_cache=False, and asks it for T + 1 logits (logits_to_keep). An id at
  padding may be no word (-9).
- An error is an AssertionError or a ValueError, and its text is "ARGUMENT: got ...; allowed ...".
"""

import argparse
import inspect
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo
from worked_examples import variants
from worked_examples.check_your_own import check
from worked_examples.course import grading

COURSE = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def new(path):
    """Write the file for the student: this docstring, grpo.py's from the notation on, the rungs without answers; the
    exercises."""
    notation = grpo.__doc__[grpo.__doc__.index("Notation"):]
    rungs = re.search("^## The rungs.*?(?=\n\n## )", COURSE, re.S | re.M)[0]
    rungs = re.sub("\n\n<details>.*?</details>", "", rungs, flags=re.S)
    maths = re.search("^# §1 .*?(?=^# §9 )", inspect.getsource(grpo), re.S | re.M)[0]
    further = "# Further exercises\n" + inspect.getsource(variants).partition("\nimport grpo\n")[2]
    text = f'r"""{__doc__}\n{notation}\n{rungs}\n"""\n\nimport math\nimport re\n\nimport torch\n\n{maths}{further}'
    for name, module in check.NAMES.items():
        source = inspect.getsource(getattr(module, name))
        head = re.match('.*?""".*?"""\n', source, re.S)[0]              # to the end of the docstring
        text = text.replace(source, f"{head}    raise NotImplementedError\n")
    with open(path, "x", encoding="utf-8") as file:                     # never over another
        file.write(text)


def table(seed):
    """GRPO on logits that are a table: for 4 questions, at 10 places, 8 words, of which 0 ends the answer.

    Question k wants word k + 1. An answer of n words earns r = 2 - n/10, and 1 more if the word is in it.
    Yields of each round: mean reward, mean length, the loss before its 4 updates, the share of clipped tokens in the
    1st and the 4th, and in the 4th the least and the largest ratio.
    """
    torch.manual_seed(seed)
    logits = torch.zeros(4, 10, 8)
    logits[:, :, 0] = -2.0                                              # it rarely stops,
    logits[:, 0, 0] = -100.0                                            # and not at once
    optimizer = torch.optim.SGD([logits.requires_grad_()], lr=50.0)
    for _ in range(40):
        p = logits.detach().softmax(-1).repeat_interleave(16, 0)                                      # (64, 10, 8)
        ids = torch.multinomial(p.flatten(0, 1), 1).view(64, 10)
        answers = [row[:row.index(0) + 1] if 0 in row else row for row in ids.tolist()]
        rewards = torch.tensor([2 - len(a) / 10 + (i // 16 + 1 in a) for i, a in enumerate(answers)])
        mask = grpo.make_completion_mask(ids, 0)
        advantages = grpo.group_advantages(rewards, 16)
        old_logps, updates = None, []
        for _ in range(4):
            logps = grpo.selective_log_softmax(logits.repeat_interleave(16, 0), ids)
            loss, metrics = grpo.grpo_loss(logps, advantages, mask, old_logps=old_logps, loss_type="grpo")
            old_logps = logps.detach() if old_logps is None else old_logps
            updates.append((loss.item(), metrics["clip_ratio/region_mean"]))
            ratios = (logps.detach() - old_logps)[mask == 1].exp()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        clipped = updates[0][1], updates[-1][1]
        yield rewards.mean().item(), sum(map(len, answers)) / 64, updates[0][0], *clipped, *map(float, ratios.aminmax())


def run(path, flags):
    """The table, or with flags grpo.py's own run."""
    torch.set_num_threads(1)                                            # for so little work more would wait
    mine = check.load(path)
    yours = [name for name in check.NAMES if check.is_written(mine, name)]
    check.put(mine, yours)
    print(f"{len(yours)} of {len(check.NAMES)} functions are yours:", ", ".join(yours))
    if flags:
        return grpo.main(flags)
    print("round  reward  length  loss, 1st of 4 updates  clipped: 1st    4th  ratio in the 4th")
    runs = [list(table(seed)) for seed in range(3)]
    for number in range(0, 40, 5):
        print("{:5}  {:6.2f}  {:6.1f}  {:22.4f}  {:12.3f}  {:5.3f}  {:.2f} to {:.2f}".format(number, *runs[0][number]))
    ends = [sum(row[0] for row in rows[-5:]) / 5 for rows in runs]
    print("R =", ", ".join(f"{reward:.2f}" for reward in ends), "(the reward of the last five rounds, seeds 0, 1, 2)")


def main(argv):
    parser = argparse.ArgumentParser(prog="homework.py", usage=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=check.python_file)
    parser.add_argument("--new", action="store_true")
    parser.add_argument("--grade", action="store_true")
    parser.add_argument("-k", default="")
    parser.add_argument("--json")
    options, flags = parser.parse_known_args(argv)                      # flags: grpo.py's
    if options.new:
        return new(options.file)
    if not options.grade:
        return run(options.file, flags)
    return grading.grade(options.file, options.k, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
