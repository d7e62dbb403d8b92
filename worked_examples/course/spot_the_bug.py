"""Print grpo.py with a bug of the museum in it. Which line is wrong, what does it do, and which test sees it?

    python worked_examples/course/spot_the_bug.py 7 > grpo_bug.py

What a run shows is at the top. The docstrings are right. The number is the exhibit's: 1, 5, 6, 7, 11, 14, 16, 17, 19
and 21 are easy, 8, 13, 20, 24 and 25 hard; 8 and 20 show in float32.
"""

import re
import sys
from pathlib import Path

MUSEUM = Path(__file__).with_name("bug_museum.md").read_text(encoding="utf-8")
RIGHT = Path(__file__).resolve().parents[2].joinpath("grpo.py").read_text(encoding="utf-8")
EXHIBITS = {number: text for text, number in re.findall(r"^(## (\d+)\. .*?)(?=^## |\Z)", MUSEUM, re.S | re.M)}


def patched(exhibit):
    """The text of grpo.py with an exhibit's diff in it, whose pieces @@ parts."""
    source = RIGHT
    diff = re.search(r"^```diff\n(.*?)\n```$", EXHIBITS[exhibit], re.S | re.M)[1]
    for hunk in diff.split("\n@@\n"):
        old, new = ("\n".join(line[1:] for line in hunk.split("\n") if line[0] in side) for side in (" -", " +"))
        assert source.count(old) == 1, f"exhibit {exhibit} no longer fits, or fits several times:\n{old}"
        source = source.replace(old, new.ljust(len(old)))               # a comment beside it stays in its column
    return re.sub(" +$", "", source, flags=re.M)


def symptoms(exhibit):
    """What the museum's first table says that one sees."""
    rows = re.findall(r"^\| (.*?) \| ([\d, ]+) \|$", MUSEUM, re.M)
    return [seen for seen, numbers in rows if exhibit in numbers.split(", ")]


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in EXHIBITS:
        sys.exit(__doc__)
    print(*(f"# what you see: {seen}" for seen in symptoms(sys.argv[1])), patched(sys.argv[1]), sep="\n", end="")
