r"""A reward file: what differs from its solution as a text is compared as a formula, by math-verify.

    python grpo.py --model NAME --dataset problems.jsonl \
        --reward_funcs worked_examples/scripts/math_reward.py:math_accuracy_reward

The formula is the last one between dollars or in a box; else the text, if no two letters in a row are a word; else, of
an answer, what follows its last "is", "=" or ": ". A unit counts, a percent or degree sign does not. Decimal numbers
agree if they do to six digits behind the point, 0.333333 with 1/3, too, but not 5.0000001 with the whole number 5.
"""

import re
import sys
from pathlib import Path

import math_verify
from latex2sympy2_extended import NormalizationConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo

FORMULA = r"(?:\\boxed\{.*\}|\$\$[^$]+\$\$|\$[^$\n]+\$|\\\[.+?\\\]|\\\(.+?\\\))"
COMMAND = r"\\[A-Za-z]+(\{[A-Za-z ]+\})?"                               # as \frac and \begin{pmatrix}: no words
RULES = NormalizationConfig(malformed_operators=True, nits=True)        # not units: 5m is not 5
LATEX = [math_verify.LatexExtractionConfig(normalization_config=RULES)]         # the other reader would take a part


def parse(text):
    text = text.replace(r"\$", "").replace(r"\mathrm{e}", "e")
    formulas = re.findall(rf"{FORMULA}(?:\s*(?:,|and|or)\s*{FORMULA})*", text, re.S)
    bare = text.strip("* \t\r\n").rstrip("*. ")
    if not formulas and not re.search(r"[^\W\d_]{2}|\S\$|\n", re.sub(COMMAND, "", bare)):
        number = re.sub(r"[eE]([+-]?\d+)$", r"\\cdot 10^{\1}", bare)    # 1e-05
        formulas = [f"${number}$"]
    if not formulas or re.search(r"(?<![_\d])\d+(\s|~|\\[ ,;:!])+\d|\d_|'", formulas[-1]):      # 7 8 is not 56
        return []
    return math_verify.parse(formulas[-1], LATEX, "no_fallback", "first_match")


def math_accuracy_reward(completions, solution, **kwargs):
    """1 for an answer (the text after the last </think>) that is the same as its solution, else 0; None without one."""
    rewards = grpo.accuracy_reward(completions, solution)               # as texts
    for i, (completion, reward) in enumerate(zip(completions, rewards)):
        if reward == 0:
            answer = grpo.text_of(completion).rpartition("</think>")[2][-1000:]     # the formula comes last
            read = parse(answer) or parse(re.split(r"\bis\b|(?<![!<>])=|:\s", answer)[-1])
            rewards[i] = float(math_verify.verify(parse(str(solution[i])), read))   # both stop after five seconds
    return rewards
