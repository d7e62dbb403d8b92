"""The exercises of the homework: which functions of grpo.py and variants.py they are, and which a file has written.

homework.py makes and runs a student's file, grading.py grades it; both import this module.
"""

import ast
import re
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRPO, VARIANTS_FILE = ROOT / "grpo.py", ROOT / "worked_examples/scripts/variants.py"
VARIANTS = {0: {}, 1: dict(correction=0, eps=1e-6, epsilon_low=0.1, lam=0.9),
            2: dict(correction=0, importance_sampling_level="sequence", cap=1.5),
            3: dict(eps=1e-3, loss_type="grpo", epsilon_low=0.3, cap=1.5)}


def text_of(path, variant=0):
    """The text of a file, with a variant's defaults in the signatures."""
    text = path.read_text(encoding="utf-8")
    for option, default in VARIANTS[variant].items():
        default = f"{option}={default!r}".replace("'", '"')
        text = re.sub(rf"\b{option}=(?=[\d\"])[^,)]+", default, text)
    return text


def exercises(source):
    """{name: syntax tree} of the functions with a docstring, in grpo.py those of the maths."""
    nodes = ast.parse(source.partition("\n# §9 ")[0]).body
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)}


def main_and_further():
    """The names of the exercises: of the main line, and further ones."""
    main = [name for name in exercises(text_of(GRPO)) if name != "process_advantages"]
    return main, ["process_advantages", *exercises(text_of(VARIANTS_FILE))]


def ours(variant=0):
    """{name: syntax tree} of all exercises."""
    return exercises(text_of(GRPO, variant)) | exercises(text_of(VARIANTS_FILE, variant))


def load():
    """A new module grpo."""
    module = types.ModuleType("grpo")
    module.__file__ = str(GRPO)
    exec(compile(text_of(GRPO), module.__file__, "exec"), module.__dict__)
    return module


def arguments(function):
    """{argument: its default, as text} of a function, from its syntax tree; None without a default."""
    args, defaults = function.args, function.args.defaults + function.args.kw_defaults
    names = [arg.arg for arg in args.args + args.kwonlyargs]
    defaults = [None] * (len(names) - len(defaults)) + defaults
    return {name: default and ast.unparse(default) for name, default in zip(names, defaults)}


def written(path):
    """{name: reason}: "" or why a student's file has nothing of its own there; and its functions' syntax trees."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    mine = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name: node.module for node in imports for alias in node.names}

    def body(function):
        return [ast.dump(line) for line in function.body if not isinstance(line, (ast.Expr, ast.Assert, ast.Pass))]

    def why(name, function):
        if name in imported:
            return f"imported from {imported[name]}"
        if name not in mine or ast.unparse(mine[name].body[-1]) == "raise NotImplementedError":
            return "not written"
        if lacks := arguments(function).keys() - arguments(mine[name]):
            return f"has no argument {', '.join(sorted(lacks))}"
        return "grpo.py's own lines" if len(body(function)) > 2 and body(mine[name]) == body(function) else ""

    return {name: why(name, function) for name, function in ours().items()}, mine
