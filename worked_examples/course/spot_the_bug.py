"""Print grpo.py with a bug of the museum in it. Which line is wrong, what does it do, and which test sees it?

    python worked_examples/course/spot_the_bug.py 7 > grpo_bug.py   what a run shows is at the top
    python worked_examples/course/spot_the_bug.py 7 --hint          the function that has it
    python worked_examples/course/spot_the_bug.py 7 --check 250     whether line 250 of grpo_bug.py is the wrong one
    python worked_examples/course/spot_the_bug.py 7 --test          run the tests that see it
    python worked_examples/course/spot_the_bug.py 7 --answer        the exhibit

The docstrings are right. 1-10 are easy, 22-26 hard, the last two show in float32. --exhibit: the museum's own numbers.
"""

import argparse
import difflib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
ORDER = [21, 16, 1, 7, 11, 19, 14, 6, 5, 17, 2, 4, 22, 23, 10, 15, 3, 9, 18, 12, 26, 13, 24, 25, 20, 8]
MUSEUM = (HERE / "bug_museum.md").read_text(encoding="utf-8")


def exhibits():
    """The museum's sections, by their numbers."""
    sections = re.findall(r"^(## (\d+)\. .*?)(?=^## |\Z)", MUSEUM, re.S | re.M)
    return {int(number): section.strip() for section, number in sections}


def patched(exhibit):
    """The text of grpo.py with an exhibit's diff in it, whose pieces @@ parts."""
    source = (ROOT / "grpo.py").read_text(encoding="utf-8")
    diff = re.search(r"^```diff\n(.*?)\n```$", exhibits()[exhibit], re.S | re.M)[1]
    for hunk in diff.split("\n@@\n"):
        old, new = ("\n".join(line[1:] for line in hunk.split("\n") if line[0] in side) for side in (" -", " +"))
        if source.count(old) != 1:
            raise ValueError(f"exhibit {exhibit} no longer fits; found {source.count(old)} times, not once:\n{old}")
        source = source.replace(old, new.ljust(len(old)))               # a comment beside it stays in its column
    return re.sub(" +$", "", source, flags=re.M)


def symptoms(exhibit):
    """What the museum's first table says that one sees."""
    rows = re.findall(r"^\| (.*?) \| ([\d, ]+) \|$", MUSEUM, re.M)
    return [seen for seen, numbers in rows if str(exhibit) in numbers.split(", ")]


def printed(exhibit):
    """The lines of grpo_bug.py: the symptoms as comments, then grpo.py with the bug."""
    return [*(f"# what you see: {seen}" for seen in symptoms(exhibit)), "", *patched(exhibit).splitlines()]


def changed(exhibit):
    """The numbers of the lines of grpo_bug.py that are wrong; where a line is missing, its neighbours'."""
    right, wrong = (ROOT / "grpo.py").read_text(encoding="utf-8").splitlines(), printed(exhibit)
    moves = difflib.SequenceMatcher(None, right, wrong, autojunk=False).get_opcodes()[1:]     # the first is the comment
    return [line for kind, _, _, first, last in moves if kind != "equal"
            for line in (range(first + 1, last + 1) if first < last else (first, first + 1))]


def run_tests(exhibit):
    """Run the tests that the museum names in a copy of the project that has the bug; 0 if one of them fails."""
    names = re.findall(r"`(test_\w+)`", exhibits()[exhibit].rpartition("Caught by:")[2])
    with tempfile.TemporaryDirectory() as folder:
        project = shutil.copytree(ROOT, Path(folder, "copy"), ignore=shutil.ignore_patterns(".*", "__pycache__"))
        (project / "grpo.py").write_text(patched(exhibit), encoding="utf-8")
        files = [str(path.relative_to(project)) for path in (project / "test_grpo.py", *project.glob("*/tests/*.py"))
                 if any(f"def {name}(" in path.read_text(encoding="utf-8") for name in names)]
        command = ["-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", *files, "-k", " or ".join(names)]
        print("with grpo_bug.py as grpo.py: python", *command[:-1], repr(command[-1]), flush=True)
        return int(subprocess.run([sys.executable, *command], cwd=project).returncode != 1)


def main(argv):
    parser = argparse.ArgumentParser(prog="spot_the_bug.py", usage=__doc__, allow_abbrev=False)
    parser.add_argument("number", type=int, choices=range(1, len(ORDER) + 1))
    for flag in ("--exhibit", "--hint", "--test", "--answer"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--check", type=int, metavar="LINE")
    options = parser.parse_args(argv)
    exhibit = options.number if options.exhibit else ORDER[options.number - 1]
    if options.test:
        return run_tests(exhibit)
    if options.check is not None:
        print("yes, that is the line" if options.check in changed(exhibit) else "no, that line is right")
    elif options.answer:
        print(exhibits()[exhibit])
    elif options.hint:
        above = "\n".join(printed(exhibit)[:changed(exhibit)[0]])
        print(re.findall(r"^def (\w+)", above, re.M)[-1])
    else:
        print("\n".join(printed(exhibit)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
