"""Print grpo.py with one bug of the museum in it. Which line is wrong, what does it do, and which test would see it?

    python worked_examples/spot_the_bug.py 7 > grpo_bug.py
    python grpo_bug.py --model tiny
    python worked_examples/spot_the_bug.py 7 --answer

The docstrings are right, the code is not. All the bugs come once, in an order that is always the same and not that of
bug_museum.md; --exhibit 7 is the museum's own number 7 instead. --answer prints the museum's text in place of the code.
"""

import random
import re
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent


def exhibits():
    """The museum's sections, by their numbers."""
    museum = (HERE / "bug_museum.md").read_text(encoding="utf-8")
    sections = re.findall(r"^(## (\d+)\. .*?)(?=^## |\Z)", museum, re.S | re.M)
    return {int(number): section.strip() for section, number in sections}


def patched(exhibit):
    """The text of grpo.py with an exhibit's diff in it, whose pieces @@ parts."""
    source = (HERE.parent / "grpo.py").read_text(encoding="utf-8")
    diff = re.search(r"^```diff\n(.*?)\n```$", exhibits()[exhibit], re.S | re.M)[1]
    for hunk in diff.split("\n@@\n"):
        old, new = ("\n".join(line[1:] for line in hunk.split("\n") if line[0] in side) for side in (" -", " +"))
        if source.count(old) != 1:
            raise ValueError(f"exhibit {exhibit} no longer fits; found {source.count(old)} times, not once:\n{old}")
        source = source.replace(old, new.ljust(len(old)))               # a comment beside it stays in its column
    return re.sub(" +$", "", source, flags=re.M)


def with_bug(exhibit):
    """A module like grpo, with the bug."""
    module = types.ModuleType(f"grpo_with_bug_{exhibit}")
    exec(compile(patched(exhibit), f"{module.__name__}.py", "exec"), module.__dict__)
    return module


def main(argv):
    sections = exhibits()
    shuffled = random.Random(4).sample(list(sections), len(sections))
    words = [word for word in argv if word not in ("--answer", "--exhibit")]
    if len(words) != 1 or not words[0].isdecimal() or int(words[0]) not in sections:
        print(f"spot_the_bug.py: error: got {' '.join(argv) or 'nothing'}; allowed is a number from 1 to "
              f"{len(sections)}, beside it --answer, --exhibit or both", file=sys.stderr)
        return 2
    number = int(words[0]) if "--exhibit" in argv else shuffled[int(words[0]) - 1]
    print(sections[number] if "--answer" in argv else patched(number).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
