r"""A reward file: what differs from its solution as a text is compared as a formula, by math-verify.

    python grpo.py --model NAME --dataset problems.jsonl \
        --reward_funcs worked_examples/scripts/math_reward.py:math_accuracy_reward

A solution of words needs the same words. Numbers agree to six digits behind the point; 1e-05 is not read as a number.
Alone, math-verify reads "2x+3" as 2 and "Paris 2024" as 2024.
"""

import re
import sys
from pathlib import Path

import math_verify

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo

WORD = r"(?<![\\A-Za-z])[^\W\d_]{2}"                                    # two letters, in no LaTeX command


def parse(text):
    """Parse a text with words as it is; a bare formula between dollars, or math-verify reads "2x+3" as 2."""
    return math_verify.parse(text if re.search(rf"\$|\\\[|\\\(|{WORD}", text) else f"${text}$")


def same_formula(answer, solution):
    if re.search(WORD, solution) and not re.search(r"[\\$]", solution):             # no mathematics
        return False
    end = answer[-1000:].strip("* \t\r\n")                              # it comes last, perhaps in **bold**
    return math_verify.verify(parse(solution), parse(end))              # both stop after five seconds


def math_accuracy_reward(completions, solution, **kwargs):
    """1 for an answer (the text after the last </think>) that is the same as its solution, else 0; None without one."""
    rewards = grpo.accuracy_reward(completions, solution)               # as texts
    answers = [grpo.text_of(completion).rpartition("</think>")[2] for completion in completions]
    return [float(same_formula(answer, str(wanted))) if reward == 0 else reward
            for reward, answer, wanted in zip(rewards, answers, solution)]
