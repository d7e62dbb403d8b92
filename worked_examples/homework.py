"""Homework: write the functions of grpo.py's §1-§8. Signatures and docstrings, without the bodies, are printed by

    python worked_examples/homework.py > my_grpo.py

once: a second time would empty what you have written. What is not written yet is grpo.py's, so that file runs from the
start, and shows each function at work as soon as it stands:

    python worked_examples/homework.py my_grpo.py                   a table of logits learns, in three seconds
    python worked_examples/homework.py my_grpo.py --model tiny      grpo.py's run, with its flags, in half a minute

The table shows the large mistakes; the tests, all. They grade the file up to the first mistake, beside grpo.py and
test_grpo.py, or a part of it (-k group_advantages):

    GRPO_MODULE=my_grpo.py python -m pytest -q -x --tb=short test_grpo.py

Climb by rungs, a few lines each, and run the table after each. Write down what you expect before you look. R is the
reward at the table's end, S the step of --model tiny up to which nine of ten answers of five steps were right; both
stand in the last line, here for the seeds 0, 1 and 2. On another machine S is some steps off: compare rungs on yours.

1. REINFORCE: group_advantages returns A = r. All rewards of the table are positive: what is drawn first is praised.
   Expect a collapse, R = 2.0, 1.9, 2.0, where 2.8 can be had. The tiny model is only slower: S = 33, 51, 30.
2. The baseline: A = r - mean. Expect a slow rise, 2.2 or so in round 20, then R = 2.7, 2.6, 2.7; S = 20, 19, 29.
   Predict: what is the loss before the first of a round's four updates?
3. The scale: A = (r - mean) / (std + eps). Expect 2.7 or so in round 20 already, and R = 2.8, 2.7, 2.8. The tiny
   model gains nothing, S = 19, 23, 27, for its AdamW scales anyway. Where the loss is -0.0006 now, r - mean was not
   0 in a group of equal rewards.
4. The mask and the denominator: completion_mask and aggregate. Leave the EOS out of the mask first. Predict: how
   long are the answers at the table's end? The tiny model, which can stop already, shows nothing: S = 19, 19, 27.
5. The ratio and the clip: importance_ratio, clip_ratio, clipped_surrogate_loss. Predict: which share of the tokens
   is clipped in the first and in the fourth update, early and late? Leave out the clip first: so small a table even
   learns faster without. Expect the tiny model at --num_iterations 4 to fall back on its way, S = 39, 55, 62, where
   the clip gives 17, 33, 19.
6. The KL: kl_estimate. Expect --beta 0.04 to change little, S = 19, 19, 26, with a `kl` of 0.6 ... 1.1 at most in
   metrics.jsonl; with --beta 0.5 it stays below 0.1, and 0.8 to 0.9 of the answers are right at the end, not 0.95.
7. The log-probs: selective_log_softmax and per_token_logps. Take the logits one place off first. Predict: what does
   the tiny model, whose cold start learns by them, answer before GRPO?

Then the other functions, from the top. The pages are a second grader: -k "worked_example and 05" is page 5. They and
GRPO_BEYOND=1 ask for more than the formula: missing rewards, NaN in padding, exact zeros, errors. check.py makes a
table of both.
"""

import ast
import inspect
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ANSWERS = """
# What the rungs let you predict. 2: 0 in every round, for ρ = 1 and a group's advantages add up to 0; the gradient is
# not 0. 4: 9.5 of 10 places, as at the beginning, and R = 2.0: the word that stops is never praised. 5: 0 in each
# first update, where ρ = 1; in the fourth 0.4 to 0.5 at the beginning, and less as less is left to learn. 7: one word
# again and again, 45+32=====, and 0.00 to the end: no answer is right, and no group teaches."""


def homework(source):
    """The text of my_grpo.py, from that of grpo.py. An exercise is a function whose docstring names a Source."""
    lines, nodes = source.splitlines(), ast.parse(source).body
    notation = lines[: nodes[0].end_lineno]                             # grpo.py's docstring
    for node in reversed(nodes):                                        # from the end: numbers stay valid
        if isinstance(node, ast.FunctionDef) and "Source:" in (ast.get_docstring(node) or ""):
            lines[node.body[0].end_lineno : node.end_lineno] = ["    raise NotImplementedError"]
    first, last = ([i for i, line in enumerate(lines) if line.startswith(f"# §{n} ")][0] for n in (1, 9))
    heading = [f"# {line}".rstrip() for line in __doc__.splitlines()]
    imports = ["", "import decimal", "import math", "", "import torch", ""]
    return "\n".join([*heading, "", *notation, *imports, *lines[first:last]]).rstrip() + "\n" + ANSWERS


def unwritten(source, mine, exercises):
    """The exercises that a student's file lacks, or that do nothing but raise NotImplementedError."""
    bodies = {f.name: [ast.unparse(line) for line in f.body if not isinstance(line, ast.Expr)]      # no docstring
              for f in ast.parse(source).body if isinstance(f, ast.FunctionDef)}
    empty = [name for name, body in bodies.items() if body and body[0].startswith("raise NotImplementedError")]
    return [name for name in exercises if name in empty or name not in mine]


def put(path, grpo):
    """Put a student's functions in the place of grpo.py's; what is not written, or lacks an argument, is grpo.py's."""
    mine, source = {"__name__": Path(path).stem, "__file__": path}, Path(path).read_text(encoding="utf-8")
    exec(compile(source, path, "exec"), mine)
    exercises = {name: f for name, f in vars(grpo).items() if "Source:" in (inspect.isfunction(f) and f.__doc__ or "")}
    left, unused = unwritten(source, mine, exercises), []
    for name, ours in exercises.items():
        theirs = ours if name in left else mine[name]
        lacks = set(inspect.signature(ours).parameters) - set(inspect.signature(theirs).parameters)
        mine[name] = ours if lacks else theirs
        setattr(grpo, name, mine[name])
        unused += [f"{name} (has no {', '.join(sorted(lacks))})"] * bool(lacks)
    said = f"{len(exercises) - len(left)} of {len(exercises)} written; left: {', '.join(left) or 'none'}"
    return f"grpo.py's own run in place of {', '.join(unused)}\n{said}" if unused else said


def watched(train, right):
    """train, with the share of right answers of each step kept in a list."""
    def steps(*args, **options):
        for step in train(*args, **options):
            right.append(step[-1].get("rewards/accuracy_reward/mean", 0))
            yield step
    return steps


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
        answers = [row[: row.index(0) + 1] if 0 in row else row for row in ids.tolist()]
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


def main(path, *flags):
    sys.path.insert(0, str(HERE.parent))
    import torch
    import grpo
    torch.set_num_threads(1)                                            # for so little work, more would wait
    print(put(path, grpo))
    if flags:
        right = []
        grpo.train = watched(grpo.train, right)
        code = grpo.main(list(flags))
        fives = [sum(right[i : i + 5]) / 5 for i in range(len(right) - 4)]
        if right:
            print("S =", next((i + 5 for i, mean in enumerate(fives) if mean >= 0.9), "none"))
        if right and code == 130:                                       # the command above is without the file
            print(f"here it is python {sys.argv[0]} {path}, then its flags")
        return code
    print("round  reward  length  loss, 1st of 4 updates  clipped: 1st    4th")
    for number, row in list(enumerate(table(grpo, seed=0)))[::5]:
        print("{:5}  {:6.2f}  {:6.1f}  {:22.4f}  {:12.3f}  {:5.3f}".format(number, *row))
    ends = [sum(row[0] for row in list(table(grpo, seed))[-5:]) / 5 for seed in range(3)]
    print("R =", ", ".join(f"{reward:.2f}" for reward in ends))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(homework((HERE.parent / "grpo.py").read_text(encoding="utf-8")))
    else:                                                               # a file before the flags, else my_grpo.py
        sys.exit(main(*["my_grpo.py"] * sys.argv[1].startswith("-"), *sys.argv[1:]))
