r"""A reward: what differs from its solution as a text is compared as a formula, by math-verify.

    python grpo.py --model NAME --dataset problems.jsonl \
        --reward_funcs worked_examples.scripts.math_reward.math_accuracy_reward

Of an answer and of a solution it reads what follows the last </think> and ####: the last formula between dollars or in
a box; else the text, if no two letters in a row are a word; else what follows its last "is", "=" or ": ". A unit counts,
a percent or degree sign does not. Decimal numbers agree if they do to six digits behind the point, first zeros not
counted: 0.333333 with 1/3, too, but not 5.0000001 with the whole number 5.
"""

import math
import re

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig

import grpo

FORMULA = r"(?:\\boxed\{.*\}|\$\$[^$]+\$\$|\$[^$\n]+\$|\\\[.+?\\\]|\\\(.+?\\\))"
COMMAND = r"\\[A-Za-z]+(\{[A-Za-z ]+\})?"                               # as \frac and \begin{pmatrix}: no words
SIGNS = r"\\?%|°|\^(\\circ|\{\\circ\})"                                # gone before it is read: parsers differ in "50%"
RULES = NormalizationConfig(malformed_operators=True, nits=True)        # not units: 5m is not 5
LATEX = [math_verify.LatexExtractionConfig(normalization_config=RULES)]         # the other reader would take a part


def parse(text):
    text = re.sub(SIGNS, "", text).replace(r"\$", "").replace(r"\mathrm{e}", "e")
    formulas = re.findall(rf"{FORMULA}(?:\s*(?:,|and|or)\s*{FORMULA})*", text, re.S)
    bare = text.strip("* \t\r\n").rstrip("*. ")
    if not formulas and not re.search(r"[^\W\d_]{2}|\S\$|\n", re.sub(COMMAND, "", bare)):
        number = re.sub(r"[eE]([+-]?\d+)$", r"\\cdot 10^{\1}", bare)    # 1e-05
        formulas = [f"${number}$"]
    if not formulas or re.search(r"(?<![_\d])\d+(\s|~|\\[ ,;:!])+\d|\d_|'", formulas[-1]):      # 7 8 is not 56
        return []
    return math_verify.parse(formulas[-1], LATEX, "no_fallback", "first_match")


def read(text):
    """What an answer or a solution says; the formula comes last."""
    text = text.rpartition("</think>")[2].rpartition("####")[2][-1000:]
    return parse(text) or parse(re.split(r"\bis\b|(?<![!<>])=|:\s", text)[-1])


def count_zeros(parsed):
    """Of a number below 1, the zeros between the point and its first digit: 33 of 6.63e-34. Nothing is near 0."""
    size = abs(parsed[0].evalf()) if parsed and getattr(parsed[0], "is_number", False) else None
    if isinstance(size, sympy.Float) and 0 < size < 1:
        return math.ceil(-sympy.log(size, 10).evalf()) - 1
    return 99 if size == 0 else 0


def math_accuracy_reward(completions, solution, **kwargs):
    """1 for an answer that is the same as its solution, else 0; None without a solution."""
    rewards = grpo.accuracy_reward(completions, solution)               # as texts
    for i, (completion, reward) in enumerate(zip(completions, rewards)):
        if reward == 0:
            wanted = read(str(solution[i]))
            zeros = count_zeros(wanted)
            rewards[i] = float(math_verify.verify(wanted, read(grpo.text_of(completion)), float_rounding=6 + zeros,
                                                  numeric_precision=15 + zeros))    # it stops after five seconds
    return rewards
