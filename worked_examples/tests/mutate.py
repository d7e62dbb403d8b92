"""Change a token of grpo.py, and see whether a test fails: which changes does no test notice?

    python worked_examples/tests/mutate.py --sample 100 --seed 1                the maths, §1-§8, asked by test_grpo.py
    python worked_examples/tests/mutate.py --loop --sample 50                   §9 and §10, asked by test_training.py

A line for each change, last the number of those that were noticed. Survivors are to be read: some change nothing.
"""

import argparse
import ast
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import types
from pathlib import Path

import pytest
import transformers                                                     # once for all, before the processes fork

ROOT = Path(__file__).resolve().parents[2]
SOURCE = (ROOT / "grpo.py").read_bytes()                                # ast counts columns in bytes
TOKENS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"), ast.And: ("and", "or"), ast.Or: ("or", "and"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")}
NAMES = dict(min="max", max="min", amin="amax", amax="amin", any="all", all="any", zeros_like="ones_like")


def place(line, column):
    return len(b"".join(SOURCE.splitlines(keepends=True)[:line - 1])) + column


def text_of(node):
    return SOURCE[place(node.lineno, node.col_offset):place(node.end_lineno, node.end_col_offset)].decode()


def between(left, right, operator):
    """The change of the operator that stands between two nodes."""
    start, end = place(left.end_lineno, left.end_col_offset), place(right.lineno, right.col_offset)
    old, new = TOKENS[type(operator)]
    return start, end, SOURCE[start:end].decode().replace(old, new, 1)


def changes(node):
    """Start, end and new text of each change of this node."""
    if isinstance(node, ast.BinOp) and type(node.op) in TOKENS:
        yield between(node.left, node.right, node.op)
    elif isinstance(node, ast.BoolOp):
        yield between(node.values[0], node.values[1], node.op)
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in TOKENS:
        yield between(node.left, node.comparators[0], node.ops[0])
    if not hasattr(node, "end_lineno"):
        return
    start, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
    if isinstance(node, (ast.If, ast.IfExp)):
        test = node.test
        yield (place(test.lineno, test.col_offset), place(test.end_lineno, test.end_col_offset), f"(not ({text_of(test)}))")
    elif isinstance(node, ast.UnaryOp):                                 # without its - or ~ or not
        yield start, end, text_of(node.operand)
    elif isinstance(node, ast.Assert):
        yield start, end, "pass"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield start, end, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield start, end, {0: "1", 1: "0"}.get(node.value, repr(2 * node.value))
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield end - len(node.attr), end, NAMES[node.attr]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and text_of(node.func.value) != "torch":
        yield start, end, text_of(node.func.value)                      # x.detach() becomes x


def mutants(first, last):
    """Function, line, old and new text, source, of each change between these two headings."""
    lines = SOURCE.decode().splitlines()
    first, last = (next(i for i, line in enumerate(lines) if line.startswith(f"# §{n} ")) for n in (first, last))
    for function in ast.walk(ast.parse(SOURCE)):
        if isinstance(function, ast.FunctionDef) and first < function.lineno < last:
            for node in ast.walk(function):
                for start, end, new in changes(node):
                    old, line = SOURCE[start:end].decode(), SOURCE[:start].count(b"\n")
                    shown = lines[line].strip() if end - start < 40 else ""
                    text = f"{' '.join(old.split())} -> {' '.join(new.split())}   in: {shown}"
                    yield function.name, line + 1, text, SOURCE[:start] + new.encode() + SOURCE[end:]


def ask(mutant):
    """What pytest says of a grpo.py with this change: 0 if no test fails. First come the laws of its function."""
    name, *_, source, tests, seconds = mutant

    def stop(*args):
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    module = sys.modules["grpo"] = types.ModuleType("grpo")
    module.__file__ = str(ROOT / "grpo.py")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        try:
            exec(compile(source, module.__file__, "exec"), vars(module))
            for chosen in (["-k", name], []):
                code = pytest.main(["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore", tests, *chosen])
                if code not in (0, 5):                                  # 5: no test has this name
                    return int(code)
        except Exception:                                               # it cannot even be imported
            return 1
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loop", action="store_true", help="sampling and training, instead of the maths")
    parser.add_argument("--sample", type=int, help="as many changes, at random; without it all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=300, help="a change that takes longer counts as noticed")
    options = parser.parse_args()
    tests = ROOT / ("worked_examples/tests/test_training.py" if options.loop else "test_grpo.py")
    everything = list(mutants(9, 11) if options.loop else mutants(1, 9))
    sample = random.Random(options.seed).sample(everything, min(options.sample or 10**9, len(everything)))
    jobs = [(*mutant, str(tests), options.seconds) for mutant in sample]
    os.environ.setdefault("GRPO_EXAMPLES", "10")
    sys.path.insert(0, str(ROOT))
    noticed = 0
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for (name, line, text, *_), code in zip(jobs, pool.imap(ask, jobs)):
            noticed += code != 0
            print(f"{'noticed' if code else 'SURVIVED':10}grpo.py:{line} {name}: {text}", flush=True)
    print(f"{noticed} of {len(jobs)} changes are noticed, of {len(everything)} that there are")
