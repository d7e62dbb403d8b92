r"""A reward file: the answer and the solution compared as formulas, by math-verify.

    python grpo.py --model NAME --dataset problems.jsonl \
        --reward_funcs worked_examples/scripts/math_reward.py:math_accuracy_reward

Texts are compared first, then plain numbers as fractions, then formulas by math-verify. A solution of words needs the
same words. Alone, math-verify reads "2x+3" as 2 and "Paris 2024" as 2024, and runs for minutes on hostile text.
"""

import re
import sys
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import grpo

CASES = {                                                               # reward: pairs of answer and solution
    1.0: [("1/2", "0.5"), ("1,000/2", "500"), ("It is 42.", "42"), ("**7**", "7"), ("- 7", "-7"), ("5", 5), ("B", " B"),
          ("$x+1$", "$1+x$"), (r"\boxed{\frac{2}{4}}", r"\frac12"), (r"$2\sqrt{3}$", r"2\sqrt{3}"), ("0.00001", 1e-5),
          (r"= \(\frac12\)", r"\(\frac12\)"), (r"\boxed{2x+3}", "3+2x"), ("x^2-1", "$(x-1)(x+1)$"), ("-1,000", "-1000"),
          (r"\boxed{1}\boxed{\text{on}}", r"\boxed{on}"), (r"\boxed{\frac{2}{4}}" + " 1" * 999, "0.5"),
          (r"\boxed{\frac{\sqrt9}{4}}", "3/4"), ("6.02e100", "6.02e+100"), ("a</think>1</think>2", "2")],
    0.0: [("0.3333", "1/3"), ("1/0", "1"), ("12,34", "1234"), ("1234,567", "1234567"), (r"$\sqrt{3}$", r"2\sqrt{3}"),
          ("on", "no"), (r"\boxed{Lyon}", "Paris"), ("2", "2x+3"), (r"3\pi", "3"), ("Рим 7", "Киев 7"), ("1", 1e-5),
          ("- 7", "7"), (r"\boxed{1} 2", "2")],
    None: [("42", ""), ("42", None)]}


def plain_number(text):
    """Read "1,000", "-7.0", "1e-05" or "1/2" as an exact fraction; None where the text is anything else."""
    digits = r"(\d+|\d{1,3}(,\d{3})+)"
    number = rf"[+-]?({digits}(\.\d*)?|\.\d+)(e[+-]?\d{{1,3}})?|[+-]?{digits}/(?![0,]*$){digits}"
    if len(text) <= 1000 and re.fullmatch(number, text):
        return Fraction(text.replace(",", ""))


def unboxed(text):
    r"""Take the content of the last \boxed{}, or \boxed{\text{}}, of a text, else the whole text."""
    boxed = re.findall(r"\\boxed\{(?:\\text\{)?((?:[^{}]|\{[^{}]*\})*)\}", text)
    return boxed[-1] if boxed else text


def formula(text):
    """Put a bare formula between dollars, or math-verify reads "2x+3" as 2; a text with words stays."""
    word = r"(?<![\\A-Za-z])[^\W\d_]{2}"                                # two letters, in no LaTeX command
    return text if re.search(rf"\$|\\\[|\\\(|{word}", text) else f"${text}$"


def same_answer(answer, solution):
    answer, solution = unboxed(answer), unboxed(solution)
    if answer == solution:
        return True
    number = plain_number(solution)
    if number is not None and (plain_number(answer) is not None or not re.search(r"\d", answer)):
        return plain_number(answer) == number                           # without a digit, it needs no parser
    if formula(solution) == solution and not re.search(r"[\\$]", solution):             # no mathematics
        return False
    import math_verify
    gold = math_verify.parse(formula(solution))
    found = math_verify.parse(formula(answer[-1000:]))                  # the answer comes last
    return math_verify.verify(gold, found)                              # each stops after five seconds


def math_accuracy_reward(completions, solution, **kwargs):
    """1 for an answer (the text after the last </think>) that is the same as its solution, else 0; None without one."""
    texts = [grpo.text_of(completion).rpartition("</think>")[2] for completion in completions]
    pairs = zip(texts, ["" if s is None else str(s).strip() for s in solution], strict=True)
    return [float(same_answer(text.strip("* \t\r\n"), s)) if s else None for text, s in pairs]      # **bold**
