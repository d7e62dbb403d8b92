"""Does a file of yours compute what grpo.py does? The laws of test_grpo.py and test_variants.py, asked of its code.

    python worked_examples/check_your_own/check.py my_grpo.py                  the formulas
    python worked_examples/check_your_own/check.py my_grpo.py -x -k kl         up to the first mistake in the KL
    python worked_examples/check_your_own/check.py my_grpo.py -m beyond        what the formulas leave open
    python worked_examples/check_your_own/check.py my_grpo.py -m errors        are wrong shapes and words errors?

What follows the file goes to pytest; no settings of pytest in a folder, a plugin or the environment do. Last comes a
line for each function: same, differs (a law, its smallest input), or waits for NAME (a function that it calls, and that
differs or is not there); then one line for those that are not there. A law is skipped where the file lacks an argument,
or raises NotImplementedError without a text, and the line says so. Where a default is not grpo.py's, the laws pass
grpo.py's. The file's TOLERANCE (1e-6) says how exact it is. The file runs in this process: if it is not yours, read it
first.
"""

import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import grpo
from worked_examples import variants

LAWS = [ROOT / "test_grpo.py", ROOT / "worked_examples/tests/test_variants.py"]
CALLED = re.findall(r"(?:grpo|variants)\.(\w+)\(", "".join(path.read_text(encoding="utf-8") for path in LAWS))
NAMES = {name: module for module in (grpo, variants) for name in vars(module) if name in CALLED}
OPTIONS = ["--noconftest", "--disable-plugin-autoload", "-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider",
           "-c", os.devnull, "--rootdir", str(ROOT), "-m", "not beyond and not errors",
           *"-q -rN --tb=short --no-header -W ignore".split()]
MISSING = inspect.Parameter.empty


def python_file(path):
    """The path itself, if it is one of Python code: else, as with a notebook, the program ends in a sentence."""
    if not path.endswith(".py"):
        sys.exit(f"got {path}; allowed is a file of Python code, NAME.py")
    return path


def load(path):
    """The file as a module; for `import grpo` it gets grpo.py itself, and it may import its neighbours."""
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location("your_file", path)
    module = sys.modules["your_file"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def not_written():
    raise NotImplementedError


def is_written(mine, name):
    """Whether a module has a function with other code than not_written's."""
    function = getattr(mine, name, not_written)
    return not inspect.isfunction(function) or function.__code__.co_code != not_written.__code__.co_code


def put(mine, names):
    """Put these functions of a student's module into grpo.py and variants.py, and the others of those into it."""
    for name, module in NAMES.items():
        source, target = (mine, module) if name in names else (module, mine)
        setattr(target, name, getattr(source, name))


def pytest_alone(*arguments, plugin):
    """pytest's exit code. It is deaf to the settings of the folders around it and of the environment."""
    for name in "PYTEST_ADDOPTS", "PYTEST_PLUGINS":
        os.environ.pop(name, None)
    return pytest.main([*OPTIONS, *arguments], plugins=[plugin])


def name_the_numbers(error, item):
    """Add a row of a table to its error: what each of the numbers is. What Hypothesis draws has its names already."""
    if hasattr(item, "callspec") and not hasattr(error, "__notes__"):
        row = {name: x for name, x in item.callspec.params.items() if isinstance(x, (int, float, str, list, dict))}
        error.add_note(", ".join(f"{name} = {x}" for name, x in row.items() if name != "want"))


def defaults(function):
    """{argument: its default, or MISSING}."""
    return {name: x.default for name, x in inspect.signature(function).parameters.items()}


def about(item):
    """The function that a law is about, the first that its name mentions, and the law's mark."""
    mentioned = [name for name in NAMES if name in item.name]
    marks = [mark for mark in ("beyond", "errors") if item.get_closest_marker(mark)]
    return min(mentioned, key=item.name.index), (marks + ["formula"])[0]


class Laws:
    """A plugin of pytest, which puts a module in the place of grpo.py and variants.py and notes what the laws say."""

    def __init__(self, module):
        self.module, self.asked = module, None                          # asked: the function that a law is about
        self.outcomes = {name: [] for name in NAMES}                    # "same", or why a law was skipped
        self.broken = {name: [] for name in NAMES}                      # laws, and their smallest inputs
        self.notes = {name: [] for name in NAMES}                       # defaults that are not grpo.py's
        self.words = {name: {} for name in NAMES}                       # {("loss_type", "grpo"): is it answered?}
        for name in NAMES:
            setattr(module, name, self.watched(name, getattr(module, name, None)))
        sys.modules["grpo"] = sys.modules["worked_examples.variants"] = module
        sys.modules["worked_examples"].variants = module

    def watched(self, name, function):
        """The function, as the laws and the file itself call it: it skips a law that cannot be asked."""
        mine, ours = defaults(function or not_written), defaults(getattr(NAMES[name], name))
        passed = {option: x for option, x in ours.items() if x is not MISSING and mine.get(option, x) != x
                  and (x is not None or mine[option] is MISSING)}
        self.notes[name] = [f"your default {x} is {mine[x]}" for x in passed if mine[x] is not MISSING]

        def call(*args, **options):
            __tracebackhide__ = True
            if function is None:
                self.skip(name, "not there")
            if name != self.asked and self.broken[name]:
                self.skip(name, "differs")
            words = {(option, x) for option, x in (ours | options).items() if isinstance(x, str)}
            words |= {(option, "") for option, x in options.items() if x != ours[option]}
            signature = inspect.signature(function)
            if all(x.kind is not x.VAR_KEYWORD for x in signature.parameters.values()):     # without an effect
                options = {option: x for option, x in options.items() if option in mine or x != ours[option]}
            try:
                given = signature.bind_partial(*args, **options)
            except TypeError as error:
                self.skip(name, str(error).replace("got an unexpected keyword", "no"))
            if name == self.asked:                                      # a law calls it, not the file
                given.arguments = passed | given.arguments
            try:
                result = function(*given.args, **given.kwargs)
            except NotImplementedError as error:
                if error.args:                                          # torch's own, for a wrong dtype
                    raise
                self.words[name] = dict.fromkeys(words, False) | self.words[name]
                self.skip(name, "not there")
            self.words[name] |= dict.fromkeys(words, True)
            return result
        return call

    def skip(self, name, why):
        if name != self.asked:
            why = f"{name}: {why}" if why.startswith("no argument") else f"waits for {name}"
        pytest.skip(why)

    def pytest_collection_finish(self, session):
        if session.testsfailed:                                         # an import failed, and pytest says why
            return
        if not session.items:
            raise pytest.UsageError("no law is asked: none has this name and this mark")
        laws = sys.modules["test_grpo"]
        laws.TOLERANCE = getattr(self.module, "TOLERANCE", 1e-6)
        laws.MODEL_TOLERANCE = max(laws.TOLERANCE, 1e-5)                # without position ids, angles round

    def pytest_runtest_setup(self, item):
        self.asked, _ = about(item)

    def pytest_runtest_makereport(self, item, call):
        if call.when != "call":
            return
        if call.excinfo is None:
            self.outcomes[self.asked].append("same")
        elif call.excinfo.errisinstance(pytest.skip.Exception):
            self.outcomes[self.asked].append(call.excinfo.value.msg)
        else:
            name_the_numbers(call.excinfo.value, item)
            smallest = "".join(getattr(call.excinfo.value, "__notes__", [item.name]))
            self.broken[self.asked].append(" ".join(f"{item.function.__doc__}; {smallest}".split()))

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.section("what the laws say")
        absent = []
        for name in NAMES:
            outcomes, broken, words = self.outcomes[name], self.broken[name], self.words[name]
            why = sorted(set(outcomes) - {"same"})
            waits = [reason for reason in why if reason.startswith("waits")]
            notes = self.notes[name] + [reason for reason in why if reason.startswith("no argument")]
            for option in sorted({option for option, word in words if not words[option, word]}):
                asked = sorted(word for other, word in words if other == option and word and words[other, word])
                notes.append(f"{option} asked: {', '.join(asked) or 'no'}")
            if broken:
                line = f"differs in {len(broken)} of {len(broken) + len(outcomes)} ({'; '.join([broken[0], *notes])})"
            elif waits or "same" not in outcomes:
                line = ", ".join(waits or why)
            else:
                count = f"same in {outcomes.count('same')} of {len(outcomes)}" if why else "same"
                line = f"{count} ({'; '.join(notes or why)})" if notes or why else count
            if line == "not there":
                absent.append(name)
            elif line:
                terminalreporter.line(f"{name:30}{line}")
        if absent:
            terminalreporter.line(f"{'not there':30}{', '.join(absent)}")


def main(path, *options):
    """Ask the laws; pytest's exit code."""
    return pytest_alone(*map(str, LAWS), *options, plugin=Laws(load(path)))


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    sys.exit(main(python_file(sys.argv[1]), *sys.argv[2:]))
