"""Print grpo.py's §1-§8 as homework: signatures and docstrings as they are, the bodies to be written.

    python worked_examples/homework.py > my_grpo.py
    GRPO_MODULE=my_grpo.py python -m pytest -q test_grpo.py

The exercises are the functions whose docstring names a Source. The helpers beside them (_check, plain_number, ...) stay
whole. The first command takes a tenth of a second, and imports neither grpo nor torch.
"""

import ast
from pathlib import Path

HEADING = """\
# Replace each `raise NotImplementedError` by what the docstring above it says. Functions call each other as the
# equations do, so begin at the top. To grade this file as my_grpo.py, beside grpo.py and test_grpo.py, up to the first
# mistake, which is shown with equation, input and what was expected:
#     GRPO_MODULE=my_grpo.py python -m pytest -q -x --tb=short test_grpo.py
# One function alone: -k group_stats. One lecture alone, §1-§2, §3-§5 or §6-§8:
#     -k "accuracy or think or overlong or combine or group or advantages or leave_one or gae or broadcast"
#     -k "completion_mask or softmax or per_token or ratio or surrogate or cispo or sapo or kl"
#     -k "entropy_mask or aggregate or split or grpo_loss or on_policy"
# Tests of what is not in this file (§9 on) are skipped.
"""


def names_in(nodes):
    """All plain names that stand in some pieces of code."""
    return {node.id for piece in nodes for node in ast.walk(piece) if isinstance(node, ast.Name)}


def used_imports(nodes, used):
    """The lines of the import statements among nodes, without the names that are not used."""
    lines, end = [], None
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if end and node.lineno > end + 1:                           # standard library, blank line, torch
                lines.append("")
            end = node.end_lineno
            node.names = [alias for alias in node.names if (alias.asname or alias.name) in used]
            if node.names:
                lines.append(ast.unparse(node))
    return lines


def is_exercise(node):
    return isinstance(node, ast.FunctionDef) and "Source:" in (ast.get_docstring(node) or "")


def homework(source):
    """The text of my_grpo.py, from that of grpo.py."""
    lines = source.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("# §1 "))
    last = next(number for number, line in enumerate(lines) if line.startswith("# §9 "))
    nodes = ast.parse(source).body
    maths = [node for node in nodes if first < node.lineno <= last]
    for node in reversed([node for node in maths if is_exercise(node)]):          # from the end: numbers stay valid
        docstring, end = node.body[0], node.end_lineno
        lines[docstring.end_lineno : end] = ["    raise NotImplementedError"]
        last -= end - docstring.end_lineno - 1
    purpose = lines[: nodes[0].end_lineno]                              # grpo.py's docstring, with the notation
    return "\n".join([HEADING, *purpose, "", *used_imports(nodes, names_in(maths)), "", *lines[first:last]]).rstrip()


if __name__ == "__main__":
    print(homework((Path(__file__).resolve().parent.parent / "grpo.py").read_text(encoding="utf-8")))
