"""Change a token of grpo.py, and see whether a test fails: which changes does no test notice?

    python worked_examples/tests/mutate.py --sample 100 --seed 1        the maths, §1-§8, asked by test_grpo.py
    python worked_examples/tests/mutate.py --loop --sample 50           §9 and §10, asked by worked_examples/tests/test_training.py

A line for each change, last the number of those that were noticed. Survivors are to be read: some change nothing.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import signal
import sys
import tokenize
import types
from pathlib import Path

import pytest
import transformers                                                     # once for all, before the processes fork

ROOT = Path(__file__).resolve().parents[2]
SOURCE = (ROOT / "grpo.py").read_text(encoding="utf-8")
CHANGES = {
    "+": "-", "-": "+", "*": "/", "/": "*", "&": "|", "|": "&", "~": "", "<": "<=", "<=": "<", ">": ">=", ">=": ">",
    "==": "!=", "!=": "==", "and": "or", "or": "and", "is": "is not", "not": "", "if": "if not", "elif": "elif not",
    "assert": "assert True or", "True": "False", "False": "True", "0": "1", "1": "0", "0.0": "1.0", "min": "max",
    "max": "min", "amin": "amax", "amax": "amin", "any": "all", "all": "any", "zeros_like": "ones_like"}


def mutants(first, last):
    """The function, the line, what is changed, and the whole source, of each change between two headings."""
    lines = SOURCE.splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    first, last = (next(i for i, line in enumerate(lines) if line.startswith(f"# §{n} ")) for n in (first, last))
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(SOURCE).readline)
              if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.OP)]
    function = ""
    for i, token in enumerate(tokens):
        line, column = token.start[0] - 1, token.start[1]
        start = end = starts[line] + column
        if token.string == "def" and column == 0:
            function = tokens[i + 1].string
        if not first < line < last:
            continue
        if token.string in CHANGES:
            end, new = start + len(token.string), CHANGES[token.string]
        elif token.type == tokenize.NUMBER:
            end, new = start + len(token.string), f"(2 * {token.string})"
        elif token.string == "." and tokens[i - 1].string != "torch" and tokens[i + 2].string == "(":
            depth, j = 1, i + 3                                         # x.detach() becomes x
            while depth > 0:
                depth += {"(": 1, ")": -1}.get(tokens[j].string, 0)
                j += 1
            (row, stop), new = tokens[j - 1].end, ""
            end = starts[row - 1] + stop
        no_operator = token.string == "*" and tokens[i - 1].string in ",[{" or tokens[i + 1].string == "not"
        if end > start and not no_operator:                             # (a, *, b), [*a], is not
            change = f"{SOURCE[start:end]} -> {new}   in: {lines[line].strip()}"
            yield function, line + 1, change, SOURCE[:start] + new + SOURCE[end:]


def ask(job):
    """What pytest says of a grpo.py with this change: 0 if no test fails. What takes 5 minutes is noticed."""
    *_, source, tests = job

    def stop(*args):
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(300)
    module = sys.modules["grpo"] = types.ModuleType("grpo")
    module.__file__ = str(ROOT / "grpo.py")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        try:
            exec(compile(source, module.__file__, "exec"), vars(module))
            return int(pytest.main(["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore", tests]))
        except Exception:                                               # it cannot even be imported
            return 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loop", action="store_true", help="sampling and training, instead of the maths")
    parser.add_argument("--sample", type=int, help="as many changes, at random; without it all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tests = ROOT / ("worked_examples/tests/test_training.py" if options.loop else "test_grpo.py")
    everything = list(mutants(9, 11) if options.loop else mutants(1, 9))
    sample = random.Random(options.seed).sample(everything, min(options.sample or len(everything), len(everything)))
    jobs = [(*mutant, str(tests)) for mutant in sample]
    os.environ.setdefault("GRPO_EXAMPLES", "10")
    sys.path.insert(0, str(ROOT))
    noticed = 0
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for (function, line, change, *_), code in zip(jobs, pool.imap(ask, jobs)):
            noticed += code != 0
            print(f"{'noticed' if code else 'SURVIVED':10}grpo.py:{line} {function}: {change}", flush=True)
    print(f"{noticed} of {len(jobs)} changes are noticed, of {len(everything)} that there are")
