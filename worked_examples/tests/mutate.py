"""Change a token of grpo.py, and see whether a test fails: which changes does no test notice?

    python worked_examples/tests/mutate.py --sample 100 --seed 1        the maths, §1-§8, asked by test_grpo.py
    python worked_examples/tests/mutate.py --loop --sample 50           §9 and §10, asked by tests/test_training.py

A line for each change, last the number of those that were noticed. Survivors are to be read: some change nothing.
Each change is made in a process of its own, which has imported everything before it.
"""

import argparse
import io
import os
import random
import re
import signal
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "worked_examples/tests")]
os.environ |= {"OMP_NUM_THREADS": "1", "GRPO_EXAMPLES": os.environ.get("GRPO_EXAMPLES", "10")}
import pytest

import grpo
from worked_examples.course import grading

SOURCE = (ROOT / "grpo.py").read_text(encoding="utf-8")
CHANGES = {
    "+": "-", "-": "+", "*": "/", "/": "*", "&": "|", "|": "&", "~": "", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "==": "!=", "!=": "==", "and": "or", "or": "and", "is": "is not", "not": "", "if": "if not", "elif": "elif not",
    "assert": "assert True or", "True": "False", "False": "True", "0": "1", "1": "0", "0.0": "1.0", "min": "max",
    "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any", "zeros_like": "ones_like"}


def mutants(first, last):
    """What is changed, and the whole source, of each change between the headings of two sections."""
    lines = SOURCE.splitlines(keepends=True)
    first, last = (SOURCE.partition(f"\n# §{number} ")[0].count("\n") + 1 for number in (first, last))
    for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline):
        row, column, old = token.start[0] - 1, token.start[1], token.string
        if token.type not in (tokenize.NAME, tokenize.NUMBER, tokenize.OP) or not first < row < last:
            continue
        before, rest, new = lines[row][:column], lines[row][column:], CHANGES.get(old)
        call = re.match(r"\.\w+\([^()]*\)", rest)
        if re.match(r"\*[^ ]|\w+ not ", rest):                           # *args; "is" of "is not"
            continue
        if call and not before.endswith("torch"):                       # x.detach() becomes x
            old, new = call[0], ""
        elif token.type == tokenize.NUMBER:
            new = new or f"(2 * {old})"
        if new is not None:
            source = "".join([*lines[:row], before, new, rest[len(old):], *lines[row + 1:]])
            yield f"grpo.py:{row + 1}: {old} -> {new}   in: {lines[row].strip()}", source


def first_failure(source, laws):
    """The name of the first test that fails with this grpo.py; "" if none does."""
    signal.alarm(300)                                                   # then the process ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)                        # what warns of the change is not shown
    try:
        exec(compile(source, grpo.__file__, "exec"), vars(grpo))
    except Exception as error:
        return f"import: {error!r}"
    for law, call in laws:
        error = pytest.CallInfo.from_call(call, "call").excinfo
        if error and not error.errisinstance(pytest.skip.Exception):
            return law.originalname
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loop", action="store_true", help="sampling and training, instead of the maths")
    parser.add_argument("--sample", type=int, default=10**6, help="as many changes, at random; without it all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    everything = list(mutants(9, 11) if options.loop else mutants(1, 9))
    sample = random.Random(options.seed).sample(everything, min(options.sample, len(everything)))
    laws = grading.collect(ROOT / ("worked_examples/tests/test_training.py" if options.loop else "test_grpo.py"))
    if why := grading.in_a_process(first_failure, SOURCE, laws):
        sys.exit(f"red, or too slow, with grpo.py as it is: {why}")
    noticed = 0
    for change, source in sample:
        why = grading.in_a_process(first_failure, source, laws)
        noticed += why != ""
        print("noticed " if why else "SURVIVED", change, f"  by {why}" if why else "", flush=True)
    print(f"{noticed} of {len(sample)} changes are noticed, of {len(everything)} that there are")
