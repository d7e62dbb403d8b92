"""Print grpo.py with a bug of the museum in it. Which line is wrong, what does it do, and which test sees it?

    python worked_examples/course/spot_the_bug.py 7 > grpo_bug.py   what a run shows is at the top
    python worked_examples/course/spot_the_bug.py 7 --answer        the exhibit

The docstrings are right. 1-10 are easy, 22-26 hard, the last two show in float32. --exhibit: the museum's own numbers.
"""

import argparse
import re
import sys
from pathlib import Path

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
ORDER = [21, 16, 1, 7, 11, 19, 14, 6, 5, 17, 2, 4, 22, 23, 10, 15, 3, 9, 18, 12, 26, 13, 24, 25, 20, 8]
MUSEUM = (HERE / "bug_museum.md").read_text(encoding="utf-8")
RIGHT = (ROOT / "grpo.py").read_text(encoding="utf-8")


def exhibits():
    """The museum's sections, by their numbers."""
    sections = re.findall(r"^(## (\d+)\. .*?)(?=^## |\Z)", MUSEUM, re.S | re.M)
    return {int(number): section.strip() for section, number in sections}


def patched(exhibit):
    """The text of grpo.py with an exhibit's diff in it, whose pieces @@ parts."""
    source = RIGHT
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


def main(argv):
    parser = argparse.ArgumentParser(prog="spot_the_bug.py", usage=__doc__, allow_abbrev=False)
    parser.add_argument("number", type=int, choices=range(1, len(ORDER) + 1))
    parser.add_argument("--exhibit", action="store_true")
    parser.add_argument("--answer", action="store_true")
    options = parser.parse_args(argv)
    exhibit = options.number if options.exhibit else ORDER[options.number - 1]
    if options.answer:
        print(exhibits()[exhibit])
    else:
        print(*(f"# what you see: {seen}" for seen in symptoms(exhibit)), patched(exhibit), sep="\n", end="")


if __name__ == "__main__":
    main(sys.argv[1:])
