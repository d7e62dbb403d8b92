"""Print grpo.py with a bug of the museum in it. Which line is wrong, what does it do, and which test sees it?

    python worked_examples/course/spot_the_bug.py 7 > grpo_bug.py
    python worked_examples/course/spot_the_bug.py 7 --run              20 steps of the demo, without the bug and with it

What a run shows is at the top. The docstrings are right. The number is the exhibit's: 1, 5, 6, 7, 11, 14, 16, 17, 19
and 21 are easy, 8, 13, 20, 24 and 25 hard; 8 and 20 show in float32. --run leaves out the check that ends a run.
"""

import copy
import re
import statistics
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo

MUSEUM = Path(__file__).with_name("bug_museum.md").read_text(encoding="utf-8")
RIGHT = Path(grpo.__file__).read_text(encoding="utf-8")
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


def seen_with(exhibit):
    """The flags with which a run shows it, or a command that shows it without a run."""
    return "".join(re.findall("^`((?:--|python ).*)`$", EXHIBITS[exhibit], re.M))


def means(source, exhibit, policy, *flags):
    """Train the demo with a text of grpo.py and the exhibit's flags: the mean of each metric over the steps."""
    module = ModuleType("grpo_bug")
    exec(source.replace("assert gap", "assert True or gap"), vars(module))           # no run is ended
    _, config, _ = module.parse_options(["--model", "tiny", *seen_with(exhibit).split(), *flags])
    tokenizer, dataset = module.tiny_tokenizer(), module.tiny_problems(config.seed)[0]
    tokenizer.eos_token = "<pad>" if exhibit == "17" else "<eos>"       # the policy's is <eos>
    rewards = [module.accuracy_reward, module.think_format_reward]
    steps = [metrics for *_, metrics in module.train(copy.deepcopy(policy), tokenizer, dataset, rewards, config)]
    return {name: statistics.fmean(step[name] for step in steps) for name in steps[0]}


def compare(exhibit, policy, *flags):
    """Each row about a metric, its means without the bug and with it, and whether it is so."""
    rows = re.findall("^(`(.*?)` is (0|too large|too small|1e-3 or more))", "\n".join(symptoms(exhibit)), re.M)
    if rows:
        right, wrong = (means(source, exhibit, policy, *flags) for source in (RIGHT, patched(exhibit)))
    for row, name, word in rows:
        x, y = right[name], wrong[name]
        yield row, x, y, {"0": x != 0 == y, "too large": abs(y) > abs(x), "too small": abs(y) < abs(x),
                          "1e-3 or more": y >= 1e-3 > x}[word]


def run(exhibit):
    """Print the means of 20 steps behind each row about a metric."""
    options, config, _ = grpo.parse_options(["--model", "tiny"])
    policy, *_ = grpo.load_job(options, config)
    print(f"{'means over 20 steps':60}{'grpo.py':>10}{'exhibit':>10}")
    for row, right, wrong, is_so in compare(exhibit, policy, "--max_steps", "20"):
        print(f"{row:60}{right:10.3g}{wrong:10.3g}{'' if is_so else '   not so'}")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    exhibit, *flags = sys.argv[1:]
    if flags == ["--run"]:
        run(exhibit)
    else:
        print(*(f"# what you see: {row}" for row in symptoms(exhibit)), patched(exhibit), sep="\n", end="")
