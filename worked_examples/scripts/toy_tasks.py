"""The toy tasks of worked_examples/07_training_your_own_model.md as files: problems to train on, and held out.

    python worked_examples/scripts/toy_tasks.py TASK [SEED]

TASK is few_words, words or parity. It writes TASK.jsonl and TASK_held_out.jsonl. Parity has a column trace, a thought
before each answer: small_model.py --imitate trace.
"""

import json
import random
import sys


def backwards(rng, train, held_out):
    """Spell a word backwards: abcd> has the solution dcba."""
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(3, 5))) for _ in range(2 * (train + held_out))]
    return [{"prompt": f"{word}>", "solution": word[::-1]} for word in dict.fromkeys(words)], train, held_out


def parity(rng):
    """Is the number of ones odd? 0100000001= has the solution 0. The trace counts along."""
    rows = []
    for number in rng.sample(range(1024), 700):
        bits = f"{number:010b}"
        counts = "".join(str(bits[:i + 1].count("1") % 2) for i in range(10))
        rows.append({"prompt": f"{bits}=", "solution": counts[-1], "trace": f"<think>{counts}</think>{counts[-1]}"})
    rng.shuffle(rows)
    return rows, 500, 200


TASKS = {"few_words": lambda rng: backwards(rng, 40, 100), "words": lambda rng: backwards(rng, 375, 125),
         "parity": parity}


def make(task, seed):
    """The rows to train on, and those held out."""
    rows, train, held_out = TASKS[task](random.Random(seed))
    return rows[:train], rows[train:train + held_out]


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in TASKS:
        sys.exit(__doc__)
    for name, rows in zip(["", "_held_out"], make(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1)):
        with open(f"{sys.argv[1]}{name}.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
