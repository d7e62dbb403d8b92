"""Tests of grpo.py, section by section.

Each function of §1-§8 has a twin here in pure Python: numbers and lists, no tensors, no padding, so that it cannot
share a masking bug. Beside the twin stand relations (shift, scale, split, pad), gradients, every worked number of the
guides that students read, and exact enumeration where a claim is about an expectation. Hypothesis draws ragged batches
whose padding is garbage, NaN and infinities included. To run the same properties against your own file:

    GRPO_MODULE=my_grpo.py python -m pytest -q test_grpo.py

A function that is absent or still raises NotImplementedError is skipped by name, and so is an option that it lacks.
What goes beyond the formula (NaN rewards, NaN in padding, exact zeros in float32, error messages) is marked `beyond`
and left out for your file, unless GRPO_BEYOND=1 asks for it.
"""

import ast
import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tokenize
import traceback
import types
import warnings
from pathlib import Path

if "GRPO_TEST_CUDA" not in os.environ:              # before torch is imported: these tests are about the CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_pre_hook

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
settings.register_profile("grpo", deadline=None, database=None, report_multiple_bugs=False,
                          max_examples=int(os.environ.get("GRPO_EXAMPLES", 40)), derandomize=True)
settings.load_profile("grpo")
torch.set_num_threads(1)
nan, inf = math.nan, math.inf


class ModuleUnderTest:
    """The file named by GRPO_MODULE. What a student's file lacks or has not written yet skips the test that asks."""

    def __init__(self, name, own=False):
        path = Path(name if name.endswith(".py") else name + ".py")
        path = path if path.is_absolute() or path.exists() else HERE / path
        spec = importlib.util.spec_from_file_location(path.stem, path)
        self.module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.own, self.strict = own, own or "GRPO_BEYOND" in os.environ

    def __getattr__(self, name):
        if name.startswith("_") or name.startswith("pytest"):           # what pytest asks of every object
            raise AttributeError(name)
        if not self.own and not hasattr(self.module, name):
            pytest.skip(f"{self.module.__name__} has no {name}")
        value = getattr(self.module, name)
        return value if self.own or not inspect.isfunction(value) else self.lenient(name, value)

    def lenient(self, name, function):
        parameters = inspect.signature(function).parameters.values()

        def call(*args, **options):
            lacks = set(options) - {p.name for p in parameters}
            if lacks and not any(p.kind is p.VAR_KEYWORD for p in parameters):
                pytest.skip(f"{self.module.__name__}.{name} has no argument {', '.join(sorted(lacks))}")
            try:
                return function(*args, **options)
            except NotImplementedError as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                if "raise NotImplementedError" not in last.line:        # torch's own, for a wrong dtype
                    raise
                pytest.skip(f"{self.module.__name__}.{last.name} is not written yet")

        return call


OWN = "GRPO_MODULE" not in os.environ
grpo = ModuleUnderTest(os.environ.get("GRPO_MODULE", "grpo"), own=OWN)
own_only = pytest.mark.skipif(not OWN, reason="about grpo.py itself, not its equations")
beyond = pytest.mark.skipif(not grpo.strict, reason="beyond the formula: GRPO_BEYOND=1 asks for it")


def more(*values):
    """A row of a table that is beyond the formula."""
    return pytest.param(*values, marks=beyond)


def options(*rows):
    """Parametrize a test by keyword arguments, none at all first."""
    return pytest.mark.parametrize("options", [{}, *rows], ids=str)


def f64(x):
    return torch.as_tensor(x, dtype=torch.float64)


def gradient(x, wrt):
    return torch.autograd.grad(x.sum(), wrt, retain_graph=True)[0]


def shown(x):
    x = x.tolist() if isinstance(x, torch.Tensor) else x
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join(map(shown, x)) + "]"
    return f"{x:.8g}" if isinstance(x, float) else repr(x)


def expect(got, want, equation, tolerance=1e-9, **inputs):
    """Compare with the value that is right. The message: the equation, the input, what was expected, what came."""
    __tracebackhide__ = True
    want = f64(want).detach()
    if isinstance(got, torch.Tensor) and got.shape == want.shape:
        if torch.allclose(got.detach().double(), want, atol=tolerance, rtol=1e-9, equal_nan=True):
            return
    came_in = "".join(f"\n    input     {name} = {shown(value)}" for name, value in inputs.items())
    raise AssertionError(f"{equation}{came_in}\n    expected  {shown(want)}\n    got       {shown(got)}")


def map_rows(function, *ragged):
    return [[function(*values) for values in zip(*rows)] for rows in zip(*ragged)]


class Batch:
    """A ragged batch: rows without padding for the twins, and tensors padded with junk for the functions.

    The values lie on a grid: ties and zeros are frequent, and a twin's threshold is exact.
    """

    def __init__(self, lengths, G, seed=0, junk=(-100.0, 0.0, 3.0), mask_dtype=torch.float64):
        rng, self.lengths, self.G, self.junk, self.T = random.Random(seed), lengths, G, junk, max([1, *lengths])
        logps = [[-rng.randint(8, 48) / 8 for _ in range(n)] for n in lengths]
        self.rows = {name: map_rows(lambda x: x + rng.randint(-8, 8) / 8, logps) for name in ("old", "ref", "sampled")}
        for name in ("entropies", "rewards", "values", "A of tokens"):
            self.rows[name] = map_rows(lambda x: rng.randint(0 if name == "entropies" else -8, 8) / 4, logps)
        self.A = [rng.randint(-8, 8) / 4 for _ in lengths]
        self.rows |= {"logps": logps, "ratio": map_rows(lambda p, q: math.exp(p - q), logps, self.rows["old"]),
                      "A": [[a] * n for a, n in zip(self.A, lengths)]}
        self.mask = self.pad([[1.0] * n for n in lengths]).to(mask_dtype)

    def __repr__(self):
        return f"Batch({self.rows}, G={self.G}, junk={self.junk}, mask={self.mask.dtype})"

    def __getitem__(self, name):
        return f64(self.A) if name == "A" else self.mask if name == "mask" else self.pad(self.rows[name], *self.junk)

    def of(self, *names):
        return {name: self.rows[name] for name in names}

    def pad(self, rows, *fill):
        fill = fill or (0.0,)
        return f64([row + [fill[(i + t) % len(fill)] for t in range(len(row), self.T)] for i, row in enumerate(rows)])

    def real(self, x):
        return torch.where(self.mask != 0, x, 0)


@st.composite
def batches(draw, groups=st.integers(1, 3), min_length=0):
    """P prompts of G answers, of up to 5 tokens each. For grpo.py itself: empty rows, any mask, any padding as well."""
    G = draw(st.integers(2, 4))
    B = G * draw(groups)
    lengths = draw(st.lists(st.integers(min_length if grpo.strict else 1, 5), min_size=B, max_size=B))
    junk = [nan, inf, -inf, 1e30, -1e30, -100.0, 0.0] if grpo.strict else [-100.0, 3.0, 0.0]
    masks = [torch.bool, torch.int64, torch.uint8, torch.float32] if grpo.strict else [torch.float64]
    return Batch(lengths, G, draw(st.integers(0, 10**6)), draw(st.permutations(junk)), draw(st.sampled_from(masks)))


def for_batches(test):
    return given(batches())(example(Batch([3, 1, 2, 2], 2, seed=3))(test))


def tokenwise(twin):
    return lambda *rows, **options: [twin(*values, **options) for values in zip(*rows)]


def by_rows(name, inputs, twin, equation, *choices, pick=None, slope=True):
    """Make the test of a function whose rows stand alone: its value is the twin's, its gradient the twin's slope.

    The twin takes and returns lists; its slope in the first input that is not A is taken by differences.
    """
    @pytest.mark.parametrize("options", choices or [{}], ids=str)
    @for_batches
    def test(options, batch):
        names, function, masked = inputs.split(), getattr(grpo, name), "mask" in inputs
        x, rows = names[names[0] == "A"], batch.of(*[n for n in names if n != "mask"])
        values = {n: batch[n] if masked or n == "A" else batch.pad(rows[n]) for n in names}
        values[x].requires_grad_()
        got = function(*values.values(), **options)
        got = got if pick is None else got[pick]
        of_row = lambda i, **moved: twin(*(moved.get(n, rows[n][i]) for n in rows), **options)
        want = batch.pad([of_row(i) for i in range(len(batch.lengths))])
        expect(batch.real(got), want, equation, **rows, **options)
        nudge = lambda i, t, h: math.fsum(of_row(i, **{x: [y + h * (k == t) for k, y in enumerate(rows[x][i])]}))
        slope_at = lambda i, t: (nudge(i, t, 1e-5) - nudge(i, t, -1e-5)) / 2e-5
        if slope:
            want = batch.pad([[slope_at(i, t) for t in range(n)] for i, n in enumerate(batch.lengths)])
            expect(gradient(batch.real(got), values[x]), want, f"the slope of {equation}", 1e-6, **rows, **options)
        assert slope or not got.requires_grad, "a constant: detach it"
        if grpo.strict and masked and got.shape == batch.mask.shape:
            assert (got[batch.mask == 0] == (name == "importance_ratio")).all(), "padding is 0, a ratio there 1"
        if grpo.strict and not masked and "A" not in names:             # element by element: any shape
            for shape in (lambda y: y[:1].flatten(), lambda y: y[0, 0], lambda y: y[None, :, :0]):
                expect(function(*map(shape, values.values()), **options), shape(got), f"{equation}, in any shape")

    return test


# §1 Rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward, pairs", [
    (1.0, [("42", "42"), ("<think>41</think>42", "42")]), (0.0, [("43", "42"), ("<think>42</think>41", "42")]),
    more(1.0, [("1,000", "1000"), ("1000.0", "1,000"), ("-7", "-7"), ("1/2", "0.5"), ("+3", "3"), ("1,000/2", "500"),
               (" 42\n", "42"), ("42", " 42\n"), (".5", "1/2"), ("5.", "5"), ("5", 5), ("9" * 999, "9" * 997 + "99."),
               ("The answer is 42.", "42"), (r"\boxed{42}", "42"), (r"\boxed{1,000}", "1000"), (r"$\frac12$", "0.5"),
               (r"\boxed{\frac{2}{4}}", r"\frac12"), ("$x+1$", "$1+x$"), (r"$2\sqrt{3}$", r"2\sqrt{3}"), ("B", "B"),
               (r"$\frac12$", r"\[\frac12\]"), (r"$\frac12$", r"\(\frac12\)"), ("a</think>1</think>2", "2"),
               ("yes", "yes"), ("Paris", "Paris"), (r"\boxed{Paris}", "Paris"), (r"\boxed{B}", "B")]),
    more(0.0, [("-7", "7"), ("0.3333", "1/3"), ("0.1", "0.10000000000000000001"), ("", "42"), ("1/0", "1"), (".", "0"),
               ("12,34", "1234"), ("1234,567", "1234567"), (r"$\sqrt{3}$", r"2\sqrt{3}"), ("9" * 5000, "42"),
               ("C", "B"), ("forty-two", "42"), (r"\boxed{Lyon}", "Paris"), ("Lyon", "Paris"), ("no", "yes"),
               ("42", "no number")]),
    more(None, [("42", ""), ("42", " "), ("", "")])])
def test_accuracy(reward, pairs):
    answers, solutions = zip(*pairs)
    assert grpo.accuracy_reward(list(answers), list(solutions)) == [reward] * len(pairs)
    if grpo.strict:
        chats = [[{"role": "user", "content": "42"}, {"role": "assistant", "content": answer}] for answer in answers]
        assert grpo.accuracy_reward(completions=chats, solution=solutions, prompts=chats) == [reward] * len(pairs)


@own_only
def test_accuracy_is_bounded_and_works_in_a_thread(monkeypatch):
    import math_verify
    with concurrent.futures.ThreadPoolExecutor() as pool:               # math-verify's clock needs the main thread
        assert pool.submit(grpo.accuracy_reward, [r"$\frac{2}{4}$"], [r"\frac12"]).result() == [1.0]
    seen = []

    def watched(original):
        return lambda *args, **limit: seen.append((len(str(args[0])), *limit.values())) or original(*args, **limit)

    for name in ("parse", "verify"):
        monkeypatch.setattr(math_verify, name, watched(getattr(math_verify, name)))
    for solution in ("7", "-1,000", "1/2"):         # without a digit, an answer needs no parser
        answers = ["I do not know", "", r"\frac{a}{b}", "<think>7</think>x", solution]
        assert grpo.accuracy_reward(answers, [solution] * 5) == [0.0, 0.0, 0.0, 0.0, 1.0] and not seen
    hostile = ["1" * 100_000, "$" + "{" * 100_000, "(" * 100_000, "1 " * 50_000, "\\boxed{" * 15_000, "1,234" * 20_000,
               "</think>" * 12_000, "<think>" * 14_000, " " * 100_000 + "x", "1/" * 50_000, "." * 100_000]
    assert grpo.accuracy_reward(hostile, ["7"] * len(hostile)) == [0.0] * len(hostile)
    assert grpo.accuracy_reward(["x" * 10_000 + r"$\frac{2}{4}$"], [r"\frac12"]) == [1.0]
    assert len(seen) >= 6 and all(length <= 1000 and 0 < seconds <= 5 for length, seconds in seen)


@pytest.mark.parametrize("reward, texts", [
    (1.0, ["<think>a</think>b", "<think>\na\n</think>\n\nb\n"]), more(1.0, ["<think></think>b"]),
    (0.0, ["x<think>a</think>b", "a</think>b", "<think>a", ""]),
    more(0.0, [" <think>a</think>b", "<think>a</think>", "<think>a</think> \n", "<think>a<think>b</think>c",
               "<think>a</think>b</think>c", "</think><think>a", "<think>a</think>b<think>", "<Think>a</Think>b",
               "<think>" * 10**4, "<think>" + "<" * 10**5 + "</think>", "</think>" * 10**4,
               "<think></think>" + " " * 10**5])])
def test_think_format(reward, texts):
    assert grpo.think_format_reward(texts) == [reward] * len(texts)
    if grpo.strict:
        chats = [[{"role": "assistant", "content": "x"}, {"role": "assistant", "content": text}] for text in texts]
        assert grpo.think_format_reward(completions=chats, solution=["1"]) == [reward] * len(texts)


@given(st.integers(1, 30), st.integers(0, 30), st.lists(st.integers(0, 40), min_size=1, max_size=5))
@example(1280, 256, [1024, 1025, 1152, 1279, 1280, 1281, 5000])
def test_soft_overlong(L, c, lengths):
    c = max(min(c, L), 0 if grpo.strict else 1)
    rewards = grpo.get_soft_overlong_punishment(L, c)(completion_ids=[[7] * n for n in lengths], prompts=None)
    want = [0.0 if n <= L - c else -1.0 if n > L else (L - c - n) / c for n in lengths]
    expect(f64(rewards), want, "r = 0 up to L - c, then (L - c - n)/c, -1 beyond L (DAPO eq. 13)", L=L, c=c, n=lengths)


@given(st.integers(1, 3).flatmap(lambda F: st.lists(st.lists(st.floats(-5, 5), min_size=F, max_size=F), min_size=1)))
@example([[1.0, 0.8], [1.0, 0.7], [0.0, -0.2]])
def test_combine_rewards(rewards):
    weights = [0.7, 0.3, -2.0][: len(rewards[0])]
    want = [math.fsum(w * r for w, r in zip(weights, row)) for row in rewards]
    expect(grpo.combine_rewards(f64(rewards), f64(weights)), want, "r = Σ w·r_f", rewards=rewards, weights=weights)
    expect(grpo.combine_rewards(f64(rewards)), list(map(math.fsum, rewards)), "r = Σ r_f", rewards=rewards)
    if grpo.strict:
        rewards, equation = f64([[1.0, nan], [nan, nan], [nan, 3.0]]), "r = Σ w·r_f over those that are not NaN"
        expect(grpo.combine_rewards(rewards, [2.0, 0.5]), [2.0, nan, 1.5], equation)
        expect(grpo.combine_rewards(rewards), [1.0, nan, 3.0], equation)


# §2 Group statistics and advantages ----------------------------------------------------------------------------------

ADVANTAGE = "A = (r - mean) / (std + eps), std with n - 1, eps = 1e-4 outside the root (DeepSeekMath §4.1.2)"


def groups_of(values, G):
    return [values[i : i + G] for i in range(0, len(values), G)]


def statistics_of(values, correction=1):
    """The mean and the std of the values that are not NaN."""
    values = [v for v in values if v == v]
    mean, n = statistics.fmean(values) if values else nan, len(values) - correction
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / n) if values and n > 0 else nan


def twin_advantages(rewards, G, scale_rewards="group", correction=1, eps=1e-4):
    out = []
    for group in groups_of(rewards, G):
        mean, std = statistics_of(group, correction)
        std = statistics_of(rewards, correction)[1] if scale_rewards == "batch" else std
        scale = 1.0 if scale_rewards == "none" else std + eps
        silent = len({r for r in group if r == r}) <= 1
        out += [0.0 if r != r or silent else (r - mean) / scale for r in group]
    return out


@st.composite
def grouped(draw):
    """Rewards of one to three groups, and G; for grpo.py itself some of them are NaN."""
    G, rewards = draw(st.integers(2, 5)), st.floats(-10, 10) | st.sampled_from([0.0, 1.0])
    n = G * draw(st.integers(1, 3))
    return draw(st.lists(rewards | st.just(nan) if grpo.strict else rewards, min_size=n, max_size=n)), G


def for_groups(test):
    return given(grouped())(example(([1.0, 0.0, 0.5, 3.0, 2.5, 2.0], 3))(example(([1.0, 0.0, 1.0, 1.0], 2))(test)))


@options(dict(correction=0))
@for_groups
def test_group_stats(options, case):
    got = torch.stack(grpo.group_stats(f64(case[0]), case[1], **options), 1)
    want = [statistics_of(group, **options) for group in groups_of(*case)]
    expect(got, want, "mean and std = √(Σ (r - mean)² / (n - correction))", 1e-7, rewards=case[0], G=case[1], **options)


@options(dict(correction=0), dict(scale_rewards="none"), dict(scale_rewards="batch"), dict(eps=0.5),
         dict(scale_rewards="batch", correction=0, eps=1e-6))
@for_groups
def test_group_advantages(options, case):
    got, want = grpo.group_advantages(f64(case[0]), case[1], **options), twin_advantages(*case, **options)
    expect(got, want, ADVANTAGE, 1e-7, rewards=case[0], num_generations=case[1], **options)


@pytest.mark.parametrize("rewards, options, want", [
    ([8.5, 6.2, 4.1], dict(correction=0, eps=0.0), [1.2429, -0.0371, -1.2058]),   # the guide's 1.24, -0.04, -1.21
    ([8.5, 6.2, 4.1], {}, [1.01476, -0.03029, -0.98446]),                         # TRL's
    ([1.0, 0.0, 0.5], dict(correction=0, eps=0.0), [1.2247, -1.2247, 0.0]),       # the notes' 1.225
    ([1.0, 0.0, 0.5], dict(eps=0.0), [1.0, -1.0, 0.0]),                           # with the 1/(B-1) that they write
    ([1.0, 0.0, 0.5], {}, [0.9998, -0.9998, 0.0]),                                # TRL's
    ([1.0, 0.0, 0.5], dict(scale_rewards="none"), [0.5, -0.5, 0.0]),              # r - mean: Dr. GRPO's
    ([1.0, 0.0, 0.0], dict(eps=0.0), [1.1547, -0.57735, -0.57735]),               # √((G-1)(G-k)/(G·k)) = √(4/3)
    ([0.25], dict(correction=0), [0.0])])                                         # a group of one
def test_worked_advantages(rewards, options, want):
    got = grpo.group_advantages(f64(rewards), len(rewards), **options)
    expect(got, want, ADVANTAGE, 5e-5, rewards=rewards, **options)


@beyond
@pytest.mark.parametrize("G", range(2, 17))
def test_equal_rewards_give_exactly_zero_in_float32(G):
    for value in (0.1, 0.7, 1.0, 1e-3, 1e8, -3.3, 1 / 3):
        rewards = torch.full((2 * G,), value)
        rewards[G:] = value / 3
        for options in ({}, dict(eps=1e-8), dict(eps=0.0), dict(scale_rewards="none"), dict(correction=0),
                        dict(scale_rewards="batch", eps=0.0)):
            assert torch.equal(grpo.group_advantages(rewards, G, **options), torch.zeros(2 * G)), (value, options)
        assert not grpo.leave_one_out_advantages(rewards, G).any()
        assert torch.equal(torch.stack(grpo.group_stats(rewards, G)), torch.stack([rewards[::G], torch.zeros(2)]))
        steps, ends = rewards[:, None].repeat(1, 3), torch.tensor([[0, 1, 2]] * 2 * G)
        assert not grpo.process_advantages(steps, ends, torch.ones(2 * G, 3), G, eps=0.0).any()


@given(grouped(), st.floats(-5, 5), st.floats(0.1, 5), st.integers(0, 999))
def test_advantages_shift_scale_and_permute(case, shift, scale, seed):
    r, G, rng = f64(case[0]).nan_to_num(), case[1], random.Random(seed)
    A = grpo.group_advantages(r, G, eps=0.01)
    expect(grpo.group_advantages(r + shift, G, eps=0.01), A, "A is the same for r + constant", 1e-8, rewards=r)
    expect(grpo.group_advantages(r * scale, G, eps=0.01 * scale), A, "A is the same for c·r and c·eps", 1e-8, rewards=r)
    groups = rng.sample(range(len(r) // G), len(r) // G)
    order = [g * G + i for g in groups for i in rng.sample(range(G), G)]
    expect(grpo.group_advantages(r[order], G, eps=0.01), A[order], "A moves with its reward", 1e-8, rewards=r)
    expect(A.view(-1, G).sum(1), [0.0] * (len(r) // G), "A of a group sums to 0", 1e-8, rewards=r)


@for_groups
def test_leave_one_out(case):
    others = [statistics_of(group[:i] + group[i + 1 :])[0] for group in groups_of(*case) for i in range(case[1])]
    want = [r - mean if r == r and mean == mean else 0.0 for r, mean in zip(case[0], others)]
    got = grpo.leave_one_out_advantages(f64(case[0]), case[1])
    expect(got, want, "A = r - mean of the other G - 1 (RLOO)", rewards=case[0], num_generations=case[1])


@st.composite
def stepped(draw):
    G, P, S, T = draw(st.integers(2, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    reward = st.integers(-3, 3).map(float) | (st.just(nan) if grpo.strict else st.nothing())
    rewards = [[draw(reward) for _ in range(S)] for _ in range(G * P)]
    end, no_end = st.integers(0, T - 1), st.sampled_from([-5, 0, 999])
    return rewards, map_rows(lambda r: draw(end if r == r else no_end), rewards), [draw(end) + 1 for _ in rewards], G, T


@options(dict(correction=0), dict(eps=0.5))
@given(stepped())
@example(([[1.0, 0.0], [0.5, 2.0]], [[1, 3], [0, 2]], [4, 3], 2, 4))
def test_process_advantages(options, case):
    rewards, ends, lengths, G, T = case
    S, mask = len(rewards[0]), f64([[float(t < n) for t in range(T)] for n in lengths])
    scaled = groups_of(twin_advantages(sum(rewards, []), G * S, **options), S)
    want = [[math.fsum(a for a, end in zip(scaled[i], ends[i]) if end >= t) if t < n else 0.0 for t in range(T)]
            for i, n in enumerate(lengths)]
    got = grpo.process_advantages(f64(rewards), torch.tensor(ends), mask, G, **options)
    expect(got, want, "A_t = Σ of the normalised rewards of the steps that end at or after t (DeepSeekMath §4.1.3)",
           step_rewards=rewards, step_ends=ends, lengths=lengths, num_generations=G)


def twin_gae(r, v, gamma=1.0, lam=0.95):
    deltas = [r[t] + gamma * [*v, 0.0][t + 1] - v[t] for t in range(len(r))]
    return [math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r))) for t in range(len(r))]


GAE = [{}, dict(gamma=0.5), dict(gamma=0.9, lam=0.5), dict(lam=0.0), dict(lam=1.0)]
test_gae = by_rows("gae_advantages", "rewards values mask", twin_gae,
                   "A_t = Σ_k (γλ)^k·δ_{t+k}, δ_t = r_t + γ·V_{t+1} - V_t", *GAE, pick=0)
test_returns = by_rows("gae_advantages", "rewards values mask",
                       lambda r, v, **options: [a + x for a, x in zip(twin_gae(r, v, **options), v)],
                       "return_t = A_t + V_t", *GAE, pick=1)


@for_batches
def test_broadcast(batch):
    got = grpo.broadcast_advantages(batch["A"], batch.mask)
    expect(got, batch.pad(batch.rows["A"]), "A_t = A on real tokens, 0 at padding", advantages=batch.A)


# §3 Log-probabilities ------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=4),
       st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True))
@example([[3, 0, 0, 0], [0, 3, 3, 3], [3, 3, 3, 3]], [0])               # pad = EOS
def test_completion_mask(ids, eos):
    want = [[float(not any(token in eos for token in row[:t])) for t in range(4)] for row in ids]
    for kind in [eos, tuple(eos), torch.tensor(eos), eos[0]][: 4 if len(eos) == 1 else 3] if grpo.strict else [eos]:
        got = grpo.completion_mask(torch.tensor(ids), kind)
        expect(got, want, "m = 1 up to and including the first EOS", ids=ids, eos_token_ids=eos)


@st.composite
def logit_tables(draw):
    V = draw(st.integers(1, 4))
    row = st.lists(st.lists(st.floats(-30, 30), min_size=V, max_size=V), min_size=2, max_size=2)
    logits = draw(st.lists(row, min_size=1, max_size=3))
    return logits, map_rows(lambda _: draw(st.integers(0, V - 1)), logits)


@given(logit_tables())
@example(([[[2.0, 0.0, -1.0], [0.5, 0.0, 4.0]]], [[1, 2]]))
def test_selective_log_softmax_and_entropy(case):
    logits, index = case
    logps = map_rows(lambda r: [x - max(r) - math.log(math.fsum(math.exp(y - max(r)) for y in r)) for x in r], logits)
    got, want = grpo.selective_log_softmax(f64(logits), torch.tensor(index)), map_rows(lambda p, i: p[i], logps, index)
    expect(got, want, "log p = logit - log Σ exp(logit)", logits=logits, index=index)
    want = map_rows(lambda p: -math.fsum(math.exp(x) * x for x in p), logps)
    expect(grpo.entropy_from_logits(f64(logits)), want, "H = -Σ p·log p", logits=logits)


@pytest.mark.parametrize("name", ["entropy_from_logits", "selective_log_softmax"])
def test_gradient_in_the_logits_and_a_word_that_is_ruled_out(name):
    torch.manual_seed(0)
    logits, index = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True), torch.tensor([[0, 1, 3], [3, 0, 1]])
    function = lambda x: getattr(grpo, name)(x, *[index] * (name != "entropy_from_logits"))
    assert torch.autograd.gradcheck(function, logits)
    if grpo.strict:
        ruled = torch.nn.functional.pad(logits.detach(), (0, 1), value=-inf).requires_grad_()
        expect(function(ruled), function(logits), "-inf rules a word out")
        want = torch.nn.functional.pad(gradient(function(logits), logits), (0, 1))
        expect(gradient(function(ruled), ruled), want, "the gradient of the other words")


@functools.cache
def causal_lm(kind):
    """A causal LM of random weights in float64."""
    sizes = dict(vocab_size=23, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
                 bos_token_id=None, eos_token_id=1, pad_token_id=0)
    llama = dict(sizes, intermediate_size=48, num_key_value_heads=2, head_dim=8)
    name, options = {"gpt2": ("GPT2", sizes), "llama": ("Llama", llama), "qwen2": ("Qwen2", llama),
                     "granite": ("Granite", llama | dict(logits_scaling=4.0)),
                     "cohere": ("Cohere", llama | dict(logit_scale=0.3)),
                     "gemma3": ("Gemma3Text", llama | dict(final_logit_softcapping=2.0)),
                     "opt": ("OPT", sizes | dict(word_embed_proj_dim=32, ffn_dim=48)), "bloom": ("Bloom", sizes)}[kind]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name + "Config")(**options))
    for name, p in model.double().eval().named_parameters():
        torch.nn.init.normal_(p, std=0.3)
        p.requires_grad_("norm" not in name)        # cohere and gemma3 sum these gradients in float32
    return model


def scoring_batch():
    """Prompts and answers of several lengths; what stands at padding is no word, in a student's test word 0."""
    torch.manual_seed(1)
    prompt_mask = torch.tensor([[0] * (4 - n) + [1] * n for n in (4, 2, 1, 3)])
    answer_mask = torch.tensor([[1] * n + [0] * (6 - n) for n in (6, 3, 0, 1)])
    prompt_ids = torch.randint(23, (4, 4)).masked_fill(prompt_mask == 0, -9 if grpo.strict else 0)
    answer_ids = torch.randint(23, (4, 6)).masked_fill(answer_mask == 0, 10**6 if grpo.strict else 0)
    return prompt_ids, prompt_mask, answer_ids, answer_mask


@pytest.mark.parametrize("kind", ["llama", *map(more, "gpt2 qwen2 granite cohere gemma3 opt bloom".split())])
@options(dict(temperature=0.7), more(dict(temperature=0.7, compute_entropy=True)))
def test_per_token_logps_are_those_of_each_row_alone(kind, options):
    model, batch = causal_lm(kind), scoring_batch()
    batch = [x[:1] for x in batch] if kind == "bloom" else batch        # of left padding, Bloom itself makes NaN
    prompt_ids, prompt_mask, answer_ids, answer_mask = batch
    want, want_H = torch.zeros(answer_ids.shape).double(), torch.zeros(answer_ids.shape).double()
    for i in range(len(want)):
        prompt, answer = prompt_ids[i][prompt_mask[i] == 1], answer_ids[i][answer_mask[i] == 1]
        logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        logps = (logits / options.get("temperature", 1.0)).log_softmax(-1)
        want[i, : len(answer)] = logps.gather(1, answer[:, None])[:, 0]
        want_H[i, : len(answer)] = -(logps.exp() * logps).sum(1).detach()
    logps, entropies = grpo.per_token_logps(model, *batch, **options)
    rule = "log π(o_t) = log softmax(logits / temperature), at the position before o_t"
    tolerance = 1e-9 if grpo.strict else 1e-5       # without position ids, float32 rounds other rotary angles
    expect(logps, want, rule, tolerance, prompt_ids=prompt_ids, completion_ids=answer_ids, **options)
    weights = [p for p in model.parameters() if p.requires_grad]
    scale = torch.linspace(1, 2, want.numel()).view_as(want)
    for got, true in zip(*(torch.autograd.grad((x * scale).sum(), weights) for x in (logps, want))):
        expect(got, true, rule + ": the gradient", 100 * tolerance)
    assert entropies is None or not entropies.requires_grad
    if "compute_entropy" in options:
        expect(entropies, want_H, "H = -Σ p·log p at each position")


@beyond
def test_per_token_logps_takes_other_dtypes_and_no_tokens_and_is_one_call():
    model, calls = copy.deepcopy(causal_lm("llama")), []
    batch = prompt_ids, prompt_mask, answer_ids, answer_mask = scoring_batch()
    short = prompt_ids.clamp(0, 22).int(), prompt_mask.bool(), answer_ids.clamp(0, 22).int(), answer_mask.float()
    assert torch.equal(grpo.per_token_logps(model, *short)[0], grpo.per_token_logps(model, *batch)[0])
    assert not grpo.per_token_logps(model, *batch[:3], answer_mask * 0, compute_entropy=True)[1].any()
    assert grpo.per_token_logps(model, *batch[:2], answer_ids[:, :0], answer_mask[:, :0])[0].shape == (4, 0)
    model.bfloat16().register_forward_hook(lambda *call: calls.append((call[2], call[3])), with_kwargs=True)
    got, entropies = grpo.per_token_logps(model, *batch, compute_entropy=True)
    (options, output), = calls
    assert output.logits.shape == (4, 7, 23) and options["use_cache"] is False and output.past_key_values is None
    assert got.dtype == entropies.dtype == torch.float32
    logps = output.logits[:1, :-1].float().log_softmax(-1)              # the softmax is not in half precision
    expect(got[:1], logps.gather(2, answer_ids[:1, :, None])[..., 0], "log softmax in float32", 1e-6)


# §4 Importance ratio and clip ----------------------------------------------------------------------------------------

RATIO = "ρ = exp(log π - log π_old) (DeepSeekMath eq. 3); of a sequence exp(mean of log ρ over its tokens) (GSPO eq. 7)"
SURROGATE = "l = -min(ρ·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A) (DeepSeekMath eq. 3)"


def twin_importance(p, q, importance_sampling_level="token"):
    logs = [a - b for a, b in zip(p, q)]
    sequence = importance_sampling_level == "sequence"
    return [math.exp(math.fsum(logs) / len(logs) if sequence else x) for x in logs]


SEQUENCE = dict(importance_sampling_level="sequence")
test_importance_ratio = by_rows("importance_ratio", "logps old mask", twin_importance, RATIO, {}, SEQUENCE)


def test_the_sequence_ratio_of_the_guide_is_the_geometric_mean():
    old, mask = f64([[-2.3] * 10]), torch.ones(1, 10)
    expect(grpo.importance_ratio(old + 0.2, old, mask), [[1.2214] * 10], RATIO, 5e-5)
    sequence = grpo.importance_ratio(old + 0.2, old, mask, importance_sampling_level="sequence")
    expect(sequence, [[math.exp(2.0) ** (1 / 10)]], RATIO)                      # not e² = 7.39
    expect(grpo.clip_ratio(sequence), [[1.2]], "clip(ρ, 0.8, 1.2)")


def twin_clip(r, epsilon_low=0.2, epsilon_high=0.2):
    return min(max(r, 1 - epsilon_low), 1 + epsilon_high)


def twin_clipped(r, A, epsilon_low=0.2, epsilon_high=0.2, delta=None):
    return -min((r if delta is None else min(r, delta)) * A, twin_clip(r, epsilon_low, epsilon_high) * A)


def twin_sapo(r, A, temperature_pos=1.0, temperature_neg=1.05):
    tau = temperature_pos if A > 0 else temperature_neg
    return -4 / tau * A / (1 + math.exp(-tau * (r - 1)))


test_clip_ratio = by_rows("clip_ratio", "ratio", tokenwise(twin_clip), "clip(ρ, 1 - ε_low, 1 + ε_high)",
                          {}, dict(epsilon_low=0.1, epsilon_high=0.5))
test_clipped_surrogate = by_rows("clipped_surrogate_loss", "ratio A", tokenwise(twin_clipped), SURROGATE,
                                 {}, dict(epsilon_low=0.1, epsilon_high=0.5), dict(delta=1.4))
test_sapo = by_rows("sapo_loss", "ratio A", tokenwise(twin_sapo), "l = -σ(τ(ρ - 1))·4/τ·A (SAPO eq. 5)",
                    {}, dict(temperature_pos=0.5, temperature_neg=2.0))
test_truncated_importance_ratio = by_rows(
    "truncated_importance_ratio", "old sampled", tokenwise(lambda p, q, cap=2.0: min(math.exp(p - q), cap)),
    "w = min(exp(old - sampled), cap)", {}, dict(cap=1.2), slope=False)


@options(dict(epsilon_high=1.2))
@for_batches
def test_cispo(options, batch):
    logps, cap = batch.pad(batch.rows["logps"]).requires_grad_(), options.get("epsilon_high", 5.0)
    ratio = (logps - batch.pad(batch.rows["old"])).exp()
    weights = map_rows(lambda r, a: -min(r, cap) * a, *batch.of("ratio", "A").values())
    loss, inputs = batch.real(grpo.cispo_loss(logps, ratio, batch["A"], **options)), batch.of("logps", "ratio", "A")
    want = map_rows(lambda w, p: w * p, weights, batch.rows["logps"])
    expect(loss, batch.pad(want), "l = -sg[min(ρ, ε_high)]·A·log π (CISPO eq. 4)", **inputs, **options)
    equation = "dl/d log π = -min(ρ, ε_high)·A: the weight is a constant"
    expect(gradient(loss, logps), batch.pad(weights), equation, **inputs, **options)


@pytest.mark.parametrize("delta", [{}, dict(delta=3.0)], ids=str)
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.25, 1.5, 5.0])
@pytest.mark.parametrize("A", [1.5, -1.5])
def test_truth_table_of_the_clipped_gradient(A, ratio, delta):
    x, bounds = f64([[ratio]]).requires_grad_(), dict(epsilon_low=0.2, epsilon_high=0.3) | delta
    stops = (A > 0 and ratio > 1.3) or (A < 0 and ratio < 0.8) or (A < 0 and ratio > delta.get("delta", inf))
    got = gradient(grpo.clipped_surrogate_loss(x, f64([A]), **bounds), x)
    expect(got, [[0.0 if stops else -A]], SURROGATE + ", its slope in ρ", ratio=ratio, advantages=A, **bounds)


# §5 KL ---------------------------------------------------------------------------------------------------------------

TWIN_KL = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
test_kl_estimate = by_rows(
    "kl_estimate", "logps ref", tokenwise(lambda p, q, estimator="k3": TWIN_KL[estimator](p - q)),
    "k3 = exp(log π_ref - log π) - (log π_ref - log π) - 1; k1 = log π - log π_ref; k2 = ½·k1² (DeepSeekMath eq. 4)",
    {}, dict(estimator="k1"), dict(estimator="k2"), dict(estimator="k3"))


@beyond
def test_k3_is_never_negative_in_float32():
    torch.manual_seed(0)
    for scale in (1e-8, 1e-6, 1e-4, 1e-2, 1.0, 10.0):
        logps = torch.randn(1000, 200) * scale - 1
        assert (grpo.kl_estimate(logps, logps + torch.randn(1000, 200) * scale) >= 0).all()
    d = torch.randn(1000, 200) * 1e-4
    assert (torch.exp(-d) + d - 1).min() < 0                                                # the textbook form is


def enumeration():
    """All sequences of two tokens over three words, under policies π and π_ref that depend on the first token."""
    torch.manual_seed(0)
    theta, ref = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)
    first, second = torch.tensor(list(itertools.product(range(3), repeat=2))).T
    tables = [weights.log_softmax(1) for weights in (theta, ref)]
    return theta, *(torch.stack([table[3][first], table[first, second]], 1) for table in tables)      # (9, 2), (9, 2)


def test_kl_estimators_in_expectation_and_gradient():
    theta, logps, ref = enumeration()
    p = logps.detach().sum(1).exp()[:, None]
    kl = {k: grpo.kl_estimate(logps, ref, estimator=k) for k in ("k1", "k2", "k3")}
    forward = (logps.sum(1).exp() * (logps - ref).sum(1)).sum()
    expect((p * kl["k1"]).sum(), forward, "E k1 = KL(π‖π_ref)")
    expect((p * kl["k3"]).sum(), forward, "E k3 = KL(π‖π_ref)")
    assert abs((p * kl["k2"]).sum().item() - forward.item()) > 1e-2                         # biased
    # The gradients of single tokens (the last of each sequence), where "∇KL" is that of the token's distribution.
    last = {k: gradient((p * x)[:, 1:], theta) for k, x in kl.items()}
    table, ref_table = theta[:3].log_softmax(1), ref[:, 1].view(3, 3)
    first = logps[:, 0].detach().exp().view(3, 3)[:, 0]
    of_policy = gradient(first * (table.exp() * (table - ref_table)).sum(1), theta)
    of_reference = gradient(first * (ref_table.exp() * (ref_table - table)).sum(1), theta)
    assert of_policy.norm() > 0.05 and (of_policy - of_reference).norm() > 0.05
    expect(last["k1"], torch.zeros(4, 3), "E ∇k1 = 0: no signal at all")
    expect(last["k2"], of_policy, "E ∇k2 = ∇KL(π‖π_ref)")
    expect(last["k3"], of_reference, "E ∇k3 = ∇KL(π_ref‖π)")
    ratio = grpo.importance_ratio(logps, logps.detach(), f64([[1, 1]] * 9))
    expect(gradient((p * kl["k3"] * ratio)[:, 1:], theta), of_policy, "E ∇(ρ·k3) = ∇KL(π‖π_ref): bias correction")


def twin_kl_penalized(A, p, q, beta):
    return [-beta * (a - b) + A[0] * (t == len(p) - 1) for t, (a, b) in enumerate(zip(p, q))]


test_kl_penalized_rewards = by_rows(
    "kl_penalized_rewards", "A logps ref mask", twin_kl_penalized,
    "r_t = -β·(log π - log π_ref), and the score A at the end (DeepSeekMath eq. 2)", dict(beta=0.0), dict(beta=0.5))


@beyond
def test_the_score_stands_at_the_last_real_token_where_the_mask_has_a_hole():
    logps, ref, mask = f64([[-1.0, nan, -2.0, nan]]), f64([[-1.5, inf, -1.0, 0.0]]), torch.tensor([[1, 0, 1, 0]])
    got = grpo.kl_penalized_rewards(f64([3.0]), logps, ref, mask, beta=0.1)
    expect(got, [[-0.05, 0.0, 3.1, 0.0]], "the score at the last real token")


# §6 Masks ------------------------------------------------------------------------------------------------------------


def twin_threshold(batch, quantile):
    """The (1 - quantile)-quantile of the real tokens' entropies, interpolated; exact, for all lies on a grid."""
    entropies = sorted(sum(batch.rows["entropies"], [])) or [0.0]
    position = (1 - quantile) * (len(entropies) - 1)
    below, above = entropies[math.floor(position)], entropies[math.ceil(position)]
    return below + (position - math.floor(position)) * (above - below)


@given(batches(), st.integers(0, 8).map(lambda k: k / 8))
def test_top_entropy_mask(batch, quantile):
    got, threshold = grpo.top_entropy_mask(batch["entropies"], batch.mask, quantile), twin_threshold(batch, quantile)
    want = batch.pad(map_rows(lambda h: float(h >= threshold), batch.rows["entropies"]))
    equation = "1 where H is at or above the (1 - quantile)-quantile of the real tokens"
    expect(got, want, equation, quantile=quantile, **batch.of("entropies"))


# §7 The aggregations -------------------------------------------------------------------------------------------------

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
AGGREGATE = {"grpo": "loss = mean over rows of (Σ_t l·m / Σ_t m)", "bnpo": "loss = Σ l·m / Σ m",
             "dapo": "loss = Σ l·m / tokens of the batch", "dr_grpo": "loss = Σ l·m / (rows · max_completion_length)"}


def twin_aggregate(rows, loss_type, max_completion_length=1, num_items_in_batch=None, num_rows_in_batch=None):
    n, tokens, total = num_rows_in_batch or len(rows), max(sum(map(len, rows)), 1), math.fsum(sum(rows, []))
    if loss_type == "grpo":
        return math.fsum(math.fsum(row) / len(row) for row in rows if row) / n
    items = num_items_in_batch or tokens
    return total / {"bnpo": tokens, "dapo": items, "dr_grpo": n * max_completion_length}[loss_type]


def with_length(options, L):
    return options | (dict(max_completion_length=L) if options.get("loss_type") == "dr_grpo" else {})


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@options(dict(num_items_in_batch=40, num_rows_in_batch=20), more(dict(num_items_in_batch=1, num_rows_in_batch=1)))
@for_batches
def test_aggregate(loss_type, options, batch):
    options, rows = with_length(options | dict(loss_type=loss_type), 7), batch.rows["rewards"]
    x, want, equation = batch["rewards"].requires_grad_(), twin_aggregate(rows, **options), AGGREGATE[loss_type]
    loss = grpo.aggregate(x, batch.mask, **options)
    expect(loss, want, equation, per_token_loss=rows, **options)
    units = [[[float(i == k)] * n for k, n in enumerate(batch.lengths)] for i in range(len(rows))]
    slopes = [[twin_aggregate(unit, **options) / n] * n if n else [] for unit, n in zip(units, batch.lengths)]
    expect(gradient(loss, x), batch.pad(slopes), "each token's weight in " + equation, per_token_loss=rows, **options)
    if grpo.strict:
        want_of_rows, pad = twin_aggregate(batch.rows["A"], **options), torch.nn.functional.pad
        expect(grpo.aggregate(batch["A"][:, None], batch.mask, **options), want_of_rows, "a loss for each answer")
        longer = grpo.aggregate(pad(x, (0, 3), value=nan), pad(batch.mask, (0, 3)), **options)
        expect(longer, want, "more padding changes nothing")


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@given(batches(groups=st.integers(2, 3)), st.data())
def test_any_split_gives_the_whole_value_and_gradient(loss_type, batch, data):
    B, logps, losses = len(batch.lengths), batch["logps"].requires_grad_(), []
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, B - 1), max_size=3))), B]
    options = dict(loss_type=loss_type, max_completion_length=7, beta=0.1, num_rows_in_batch=B)
    for a, b in [(0, B), *zip(cuts, cuts[1:])]:
        part = dict(old_logps=batch["old"][a:b], ref_logps=batch["ref"][a:b], num_items_in_batch=sum(batch.lengths))
        losses.append(grpo.grpo_loss(logps[a:b], batch["A"][a:b], batch.mask[a:b], **options, **part)[0])
    equation, inputs = "the sum over the parts is the whole", dict(lengths=batch.lengths, cuts=cuts)
    expect(sum(losses[1:]), losses[0], equation, **inputs)
    expect(gradient(sum(losses[1:]), logps), gradient(losses[0], logps), equation + ", of the gradient", **inputs)


NOTES_LOG_RATIOS = [[0.1, 0.05, -0.1, 0.08, 0.02], [-0.05, 0.1, -0.08, 0.05], [0.08, -0.05, 0.1, 0.05, -0.08, 0.1]]


@pytest.mark.parametrize("A, losses", [(1.225, [-0.010313, -0.092608, -0.077174, -0.092608]),
                                       (0.9998, [-0.008417, -0.075584, -0.062986, -0.075584])])
def test_the_three_completions_of_the_notes(A, losses):
    A, mask = f64([A, -A, 0.0]), f64([[1] * len(row) + [0] * (6 - len(row)) for row in NOTES_LOG_RATIOS])
    old = torch.full((3, 6), -2.0, dtype=torch.float64)
    new = old + f64([row + [-inf if grpo.strict else 0.0] * (6 - len(row)) for row in NOTES_LOG_RATIOS])
    for loss_type, want in zip(LOSS_TYPES, losses):
        loss = grpo.grpo_loss(new, A, mask, old_logps=old, **with_length(dict(loss_type=loss_type), 6))[0]
        expect(loss, want, AGGREGATE[loss_type] + " of the notes", 1e-6, advantages=A)
    ratio = grpo.importance_ratio(new, old, mask)[mask == 1]
    expect(torch.stack([ratio.min(), ratio.max()]), [0.9048, 1.1052], RATIO, 5e-5)
    tokens = grpo.clipped_surrogate_loss((new - old).exp(), f64([1.225, -1.225, 0.0]))
    rows = [grpo.aggregate(tokens[i : i + 1], mask[i : i + 1], loss_type="grpo") for i in range(3)]
    expect(torch.stack(rows), [-1.26537, 1.23443, 0.0], "the losses of the three completions", 5e-6)
    rows = f64([[-0.3], [0.2], [0.0]])
    expect(grpo.aggregate(rows, torch.ones_like(rows), loss_type="grpo"), -0.1 / 3, "their question 11")


# §8 The loss ---------------------------------------------------------------------------------------------------------

DEFAULTS = dict(policy_loss="clip", loss_type="dapo", importance_sampling_level="token", delta=None, beta=0.0,
                epsilon_low=0.2, epsilon_high=0.2, use_bias_correction_kl=False, kl_estimator="k3",
                top_entropy_quantile=1.0, sampling_cap=2.0)
OTHERS = dict(policy_loss=["cispo", "sapo"], loss_type=["grpo", "bnpo", "dr_grpo"], delta=[2.0], beta=[0.1],
              importance_sampling_level=["sequence"], epsilon_low=[0.1, 0.0], epsilon_high=[0.4, 0.0, 0.8],
              use_bias_correction_kl=[True], kl_estimator=["k1", "k2"], top_entropy_quantile=[0.5], sampling_cap=[1.1])
any_options = st.fixed_dictionaries({k: st.sampled_from([default, *OTHERS[k]]) for k, default in DEFAULTS.items()})


def twin_loss(batch, o, per="row", old="old", corrected=False):
    """The loss and the metrics, token by token."""
    threshold, ratios = twin_threshold(batch, o["top_entropy_quantile"]), [
        twin_importance(p, q, o["importance_sampling_level"]) for p, q in zip(batch.rows["logps"], batch.rows[old])]
    rows, metrics = [], {"clip_ratio/low_mean": [], "clip_ratio/high_mean": [], "clip_ratio/region_mean": [], "kl": []}
    for i, As in enumerate(batch.rows["A" if per == "row" else "A of tokens"]):
        rows.append([])
        for t, (A, r) in enumerate(zip(As, ratios[i])):
            logp, tau = batch.rows["logps"][i][t], 1.0 if A > 0 else 1.05
            low, high, loss = 0.0, inf, -4 / tau * A / (1 + math.exp(-tau * (r - 1)))
            if o["policy_loss"] == "clip":
                low, high = 1 - o["epsilon_low"], 1 + o["epsilon_high"]
                loss = twin_clipped(r, A, o["epsilon_low"], o["epsilon_high"], o["delta"])
            elif o["policy_loss"] == "cispo":
                high, loss = o["epsilon_high"], -min(r, o["epsilon_high"]) * A * logp
            if o["top_entropy_quantile"] < 1 and batch.rows["entropies"][i][t] < threshold:
                loss = 0.0
            if corrected:
                loss *= min(math.exp(batch.rows[old][i][t] - batch.rows["sampled"][i][t]), o["sampling_cap"])
            kl = TWIN_KL[o["kl_estimator"]](logp - batch.rows["ref"][i][t]) * (r if o["use_bias_correction_kl"] else 1)
            rows[i].append(loss + o["beta"] * kl)
            clipped = [float(r < low and A < 0), float(r > high and A > 0)]
            for name, value in zip(metrics, [*clipped, sum(clipped), kl]):
                metrics[name].append(value)
    if o["importance_sampling_level"] == "sequence":
        for name in list(metrics)[:3]:              # a row counts once, where any of its tokens clips
            tokens = iter(metrics[name])
            metrics[name] = [max(itertools.islice(tokens, n), default=0.0) for n in batch.lengths]
    metrics["entropy"] = sum(batch.rows["entropies"], [])
    return twin_aggregate(rows, o["loss_type"], 7), {k: statistics.fmean(v) if v else 0.0 for k, v in metrics.items()}


@options(dict(loss_type="grpo"), dict(loss_type="bnpo"), dict(loss_type="dr_grpo"), dict(beta=0.1),
         dict(epsilon_low=0.1, epsilon_high=0.5), dict(loss_type="grpo", importance_sampling_level="sequence"))
@for_batches
def test_grpo_loss(options, batch):
    ref = dict(ref_logps=batch["ref"]) if "beta" in options else {}
    options = with_length(options, 7)
    loss = grpo.grpo_loss(batch["logps"], batch["A"], batch.mask, old_logps=batch["old"], **ref, **options)
    inputs, want = batch.of("logps", "old", "ref", "A") | options, twin_loss(batch, DEFAULTS | options)[0]
    expect(loss[0], want, "loss = aggregate(-min(ρ·A, clip(ρ)·A) + β·k3)", **inputs)


@beyond
@settings(max_examples=5 * settings().max_examples)
@given(batches(), any_options, st.sampled_from(["row", "token"]), st.sampled_from(["old", "logps"]), st.booleans())
def test_grpo_loss_with_any_options(batch, o, per, old, corrected):
    if o["policy_loss"] == "cispo":                 # whose bound is a cap
        o = o | dict(epsilon_high=1 + o["epsilon_high"])
    logps, A = batch["logps"].requires_grad_(), batch["A" if per == "row" else "A of tokens"]
    constants = [batch[name].requires_grad_() for name in ("ref", "entropies", "old", "sampled")]
    loss, metrics = grpo.grpo_loss(
        logps, A, batch.mask, ref_logps=constants[0], entropies=constants[1], max_completion_length=7,
        old_logps=constants[2] if old == "old" else None, sampling_logps=constants[3] if corrected else None, **o)
    want, want_metrics = twin_loss(batch, o, per, old, corrected)
    expect(loss, want, "the loss, token by token", advantages=batch.A, **o)
    loss.backward()
    assert logps.grad.isfinite().all() and not logps.grad[batch.mask == 0].any()
    assert not any(x.grad is not None for x in constants)
    assert all(type(value) is float for value in metrics.values()) and set(metrics) == set(want_metrics)
    for name in metrics:
        tolerance = 1e-7 if "clip" in name else 1e-10                   # a mean of zeros and ones is one of float32
        assert metrics[name] == pytest.approx(want_metrics[name], abs=tolerance), name


@pytest.mark.parametrize("options", [
    *[dict(loss_type=a) | b for a in LOSS_TYPES for b in ({}, SEQUENCE)], dict(beta=0.3),
    *map(more, [dict(policy_loss="sapo"), dict(delta=1.3), dict(beta=0.3, use_bias_correction_kl=True),
                SEQUENCE | dict(policy_loss="sapo", top_entropy_quantile=0.5)])], ids=str)
def test_gradient_of_the_loss_by_finite_differences(options):
    torch.manual_seed(0)
    logps, old, ref, H = torch.randn(4, 4, 3, dtype=torch.float64) * 0.5 - 2
    mask, A = f64([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]), f64([1.0, -1.0, 0.5, -0.5])
    options = with_length(options, 5) | (dict(entropies=H) if "top_entropy_quantile" in options else {})
    options = options | (dict(ref_logps=ref) if "beta" in options else {})
    loss = lambda x: grpo.grpo_loss(x, A, mask, old_logps=old, **options)[0]
    assert torch.autograd.gradcheck(loss, logps.requires_grad_())


def test_on_policy_the_value_is_zero_and_the_gradient_is_reinforce():
    theta, logps, _ = enumeration()
    A, mask = f64([1.0, -1.0, 0.0] * 3), torch.ones(9, 2, dtype=torch.float64)
    loss = grpo.grpo_loss(logps, A, mask)[0]
    expect(loss, 0.0, "on-policy, equal lengths: the loss is -mean A = 0", advantages=A)
    want = gradient(-(A[:, None] * logps).sum() / 18, theta)
    assert want.norm() > 0.01
    expect(gradient(loss, theta), want, "on-policy the gradient is REINFORCE's: -mean of A·∇log π", advantages=A)
    expect(grpo.grpo_loss(logps, A, mask, old_logps=logps.detach())[0], loss, "old_logps=None means the detached logps")
    loss = grpo.grpo_loss(logps, A + f64([1.0] * 3 + [0.0] * 6), f64([[1, 1]] * 3 + [[1, 0]] * 6))[0]
    expect(loss, -0.5, "at ragged lengths the loss is -Σ A·m / Σ m")
    rewards, loss = f64([1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 2.0]), 0.0
    for p, logp, reward in zip(logps.detach().sum(1).exp(), logps[:, None], rewards[:, None]):
        loss = loss + p * grpo.grpo_loss(logp, reward, f64([[1, 1]]), loss_type="dr_grpo", max_completion_length=1)[0]
    value = logps.sum(1).exp() * rewards
    expect(gradient(loss, theta), -gradient(value, theta), "E ∇loss = -∇ E[r]", rewards=rewards)


@beyond
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)], ids=str)
def test_a_batch_without_a_token_is_zero(shape):
    for loss_type, level in itertools.product(LOSS_TYPES, ("token", "sequence")):
        x = torch.full(shape, nan, dtype=torch.float64, requires_grad=True)
        constants = dict.fromkeys(["old_logps", "ref_logps", "entropies", "sampling_logps"], x.detach())
        options = with_length(dict(loss_type=loss_type, importance_sampling_level=level, beta=0.1), 3)
        options |= dict(top_entropy_quantile=0.5)
        loss, metrics = grpo.grpo_loss(x, torch.ones(len(x)), torch.zeros(shape), **constants, **options)
        assert loss.item() == 0.0 and set(metrics.values()) == {0.0} and not gradient(loss, x).any()


# Every function's signature, shapes, dtypes and errors ---------------------------------------------------------------
# Each function's signature, the axes of its tensors (a number stands for itself), and those of its results.

EPS, BOUNDS = "correction=1, eps=0.0001", "epsilon_low=0.2, epsilon_high=0.2"
WHOLE = "max_completion_length=None, num_items_in_batch=None, num_rows_in_batch=None"
CALLS = {
    "combine_rewards": ("(rewards_per_func, reward_weights=None)", "BF F", "B"),
    "group_stats": ("(rewards, num_generations, *, correction=1)", "B 2", "P P"),
    "group_advantages": (f"(rewards, num_generations, *, scale_rewards='group', {EPS})", "B 2", "B"),
    "leave_one_out_advantages": ("(rewards, num_generations)", "B 2", "B"),
    "process_advantages": (f"(step_rewards, step_ends, completion_mask, num_generations, *, {EPS})",
                           "BS BS BT 2", "BT"),
    "gae_advantages": ("(rewards, values, completion_mask, *, gamma=1.0, lam=0.95)", "BT BT BT", "BT BT"),
    "broadcast_advantages": ("(advantages, completion_mask)", "B BT", "BT"),
    "completion_mask": ("(completion_ids, eos_token_ids)", "BT 1", "BT"),
    "selective_log_softmax": ("(logits, index)", "BTV BT", "BT"),
    "entropy_from_logits": ("(logits)", "BTV", "BT"),
    "per_token_logps": ("(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *, temperature=1.0, "
                        "compute_entropy=False)", "model BL BL BT BT compute_entropy=1", "BT BT"),
    "importance_ratio": ("(logps, old_logps, completion_mask, *, importance_sampling_level='token')", "BT BT BT", "BT"),
    "clip_ratio": (f"(ratio, {BOUNDS})", "BT", "BT"),
    "clipped_surrogate_loss": (f"(ratio, advantages, *, {BOUNDS}, delta=None)", "BT B", "BT"),
    "cispo_loss": ("(logps, ratio, advantages, *, epsilon_high=5.0)", "BT BT B", "BT"),
    "sapo_loss": ("(ratio, advantages, *, temperature_pos=1.0, temperature_neg=1.05)", "BT B", "BT"),
    "truncated_importance_ratio": ("(old_logps, sampling_logps, *, cap=2.0)", "BT BT", "BT"),
    "kl_estimate": ("(logps, ref_logps, *, estimator='k3')", "BT BT", "BT"),
    "kl_penalized_rewards": ("(scores, logps, ref_logps, completion_mask, *, beta)", "B BT BT BT beta=1", "BT"),
    "top_entropy_mask": ("(entropies, completion_mask, quantile)", "BT BT 1", "BT"),
    "aggregate": (f"(per_token_loss, completion_mask, *, loss_type, {WHOLE})", "BT BT loss_type=grpo", ""),
    "grpo_loss": ("(logps, advantages, completion_mask, *, old_logps=None, ref_logps=None, entropies=None, "
                  f"sampling_logps=None, beta=0.0, {BOUNDS}, delta=None, loss_type='dapo', "
                  "importance_sampling_level='token', policy_loss='clip', top_entropy_quantile=1.0, kl_estimator='k3', "
                  f"use_bias_correction_kl=False, sampling_cap=2.0, {WHOLE})",
                  "BT B BT old_logps=BT ref_logps=BT entropies=BT sampling_logps=BT beta=1 top_entropy_quantile=0", ""),
}
SIZES = dict(B=4, T=3, V=5, S=2, F=2, L=2, P=2)


def arguments(name, dtype=torch.float64):
    """The arguments of a call after CALLS, by name, and the axes of its tensors."""
    torch.manual_seed(0)
    names = re.findall(r"(\w+)(?==|,|\))", CALLS[name][0])
    pairs = [word.split("=") if "=" in word else (names[i], word) for i, word in enumerate(CALLS[name][1].split())]
    values, axes = {}, {parameter: letters for parameter, letters in pairs if letters.isupper()}
    for parameter, letters in pairs:
        values[parameter] = torch.randn([SIZES[axis] for axis in axes.get(parameter, "")]).to(dtype)
        if parameter not in axes:
            values[parameter] = {"0": 0, "1": 1, "2": 2, "model": causal_lm("llama")}.get(letters, letters)
        elif "mask" in parameter:
            masks = {"BL": [[0, 1], [1, 1], [1, 1], [0, 1]], "BT": [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]}
            values[parameter] = torch.tensor(masks[letters])
        elif re.search("ids|index|ends", parameter):
            values[parameter] = torch.randint(3, values[parameter].shape)
    return values, axes


def tensors(result):
    return [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor)]


@own_only
@pytest.mark.parametrize("name", CALLS)
def test_signatures_shapes_and_dtypes_and_no_argument_is_changed(name):
    assert str(inspect.signature(getattr(grpo, name))) == CALLS[name][0]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        values, axes = arguments(name, dtype)
        if name == "top_entropy_mask":              # the result is of the mask's dtype
            values["completion_mask"] = values["completion_mask"].to(dtype)
        before = copy.deepcopy({parameter: values[parameter] for parameter in axes})
        results = tensors(getattr(grpo, name)(**values))
        shapes = [tuple(SIZES[axis] for axis in letters) for letters in CALLS[name][2].split(" ")]
        assert [tuple(x.shape) for x in results] == shapes
        of_ids = {"completion_mask": torch.int64, "per_token_logps": torch.float64}
        assert {x.dtype for x in results} == {of_ids.get(name, dtype)}
        assert all(torch.equal(values[parameter], x) for parameter, x in before.items())


@own_only
@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call[1].count("B") > 1])
def test_any_wrong_shape_is_a_value_error_that_names_an_argument(name):
    values, axes = arguments(name)
    for parameter, letters in axes.items():
        x = values[parameter]
        wrong = {"a row less": x[:-1], "one row": x[:1], "an axis more": x[None], "an axis less": x[0]}
        if "".join(axes.values()).count(letters[1:]) > 1 and letters[1:]:
            wrong |= {"a column less": x[:, :-1], "one column": x[:, :1]}
        if parameter in ("ratio", "per_token_loss"):                    # these may be (B, 1)
            wrong.pop("one column", None)
        for how, y in wrong.items():
            with pytest.raises(ValueError) as error:
                getattr(grpo, name)(**values | {parameter: y})
                pytest.fail(f"{parameter} with {how} passes")
            assert re.match(r"(\w+): got .*allowed ", str(error.value))[1] in values, (parameter, how, str(error.value))


WRONG = {  # the argument that the message must name, and the calls; X, M are (4, 3), R is (4,)
    "solution": "accuracy_reward(['1', '2'], ['1'])",
    "soft_punish_cache": "get_soft_overlong_punishment(5, 6); get_soft_overlong_punishment(5, -1)",
    "rewards_per_func": "combine_rewards(R)", "reward_weights": "combine_rewards(X, [1.0, 2.0])",
    "rewards": "group_stats(X, 2); group_stats([1.0, 2.0], 2); group_advantages(X, 2); leave_one_out_advantages(X, 2)",
    "num_generations": "group_stats(R, 3); group_stats(R, 1); group_stats(R, 0); group_stats(R, 2, correction=2);"
                       "group_advantages(R, 3); leave_one_out_advantages(R, 1); process_advantages(X, I, M, 3)",
    "scale_rewards": "group_advantages(R, 2, scale_rewards='std')",
    "step_ends": "process_advantages(X, I + 3, M, 2); process_advantages(X, I - 1, M, 2)",
    "completion_ids": "completion_mask([[1]], 1); completion_mask(I[0], 1)",
    "prompt_mask": "per_token_logps(None, I, M.cumsum(1) < 3, I, M); per_token_logps(None, I[:, :0], M[:, :0], I, M)",
    "importance_sampling_level": "importance_ratio(X, X, M, importance_sampling_level='word');"
                                 "grpo_loss(X, R, M, importance_sampling_level='word')",
    "advantages": "clipped_surrogate_loss(X[:, :1], R[:3]); sapo_loss(X[:, :1], R[:3]); cispo_loss(X, X[:, :1], R[:3]);"
                  "clipped_surrogate_loss(X, X[:, :1]); grpo_loss(X, X[:3], M); grpo_loss(X, X[:, :1], M)",
    "ratio": "cispo_loss(X, X[:3, :1], R); clipped_surrogate_loss(R, R); sapo_loss(R, R)",
    "per_token_loss": "aggregate(X[:3, :1], M, loss_type='grpo'); aggregate(R, M, loss_type='grpo')",
    "estimator": "kl_estimate(X, X, estimator='k4'); grpo_loss(X, R, M, ref_logps=X, kl_estimator='k4')",
    "loss_type": "aggregate(X, M, loss_type='mean'); grpo_loss(X, R, M, loss_type=None)",
    "max_completion_length": "aggregate(X, M, loss_type='dr_grpo'); grpo_loss(X, R, M, loss_type='dr_grpo')",
    "ref_logps": "grpo_loss(X, R, M, beta=0.1); kl_estimate(X, R[:3])",
    "entropies": "grpo_loss(X, R, M, top_entropy_quantile=0.5)", "policy_loss": "grpo_loss(X, R, M, policy_loss='ppo')"}


@beyond
@pytest.mark.parametrize("name, call", [(name, call) for name in WRONG for call in WRONG[name].split(";")])
def test_wrong_input_is_named(name, call):
    space = dict(X=torch.zeros(4, 3), M=torch.ones(4, 3), R=torch.zeros(4), I=torch.zeros(4, 3, dtype=torch.long))
    with pytest.raises(ValueError, match=rf"^{name}: got [^\n]*; allowed [^\n]+$"):
        eval(f"grpo.{call.strip()}", {"grpo": grpo}, space)


COMPOSED = {
    "group_advantages": "group_stats", "leave_one_out_advantages": "group_advantages",
    "process_advantages": "group_advantages", "clipped_surrogate_loss": "clip_ratio",
    "per_token_logps": "selective_log_softmax entropy_from_logits", "kl_penalized_rewards": "kl_estimate",
    "grpo_loss": "importance_ratio clipped_surrogate_loss top_entropy_mask truncated_importance_ratio kl_estimate "
                 "aggregate"}


@own_only
@pytest.mark.parametrize("name", CALLS)
def test_functions_build_on_each_other_and_are_pasted_with_what_they_call(name):
    space, called, wanted = {"torch": torch, "F": torch.nn.functional, "math": math}, set(), [name]
    for function in wanted:                         # the list grows
        source = inspect.getsource(getattr(grpo.module, function))
        exec(source, space)
        words = set(re.findall(r"\b(\w+)\(", source)) - set(wanted)
        wanted += [word for word in sorted(words) if inspect.isfunction(getattr(grpo.module, word, None))]

    def noted(callee, original):
        return lambda *args, **options: called.add(callee) or original(*args, **options)

    space |= {callee: noted(callee, space[callee]) for callee in wanted[1:]}
    values = arguments(name)[0]
    for got, want in zip(tensors(space[name](**values)), tensors(getattr(grpo, name)(**values)), strict=True):
        assert torch.equal(got, want)
    assert called >= set(COMPOSED.get(name, "").split())


# Coursework: these tests on a student's file -------------------------------------------------------------------------

TEXTBOOK = '''
import torch
def group_advantages(rewards, num_generations, *, eps=1e-4):
    r = rewards.view(-1, num_generations)
    mean = torch.mean(r, 1, keepdim=True)
    std = torch.std(r, 1, keepdim=True)
    return ((r - mean) / (std + eps)).view(-1)
def leave_one_out_advantages(rewards, num_generations):
    r = rewards.view(-1, num_generations)
    return (r - (r.sum(1, keepdim=True) - r) / (num_generations - 1)).view(-1)
def completion_mask(completion_ids, eos_token_ids):
    is_eos = torch.isin(completion_ids, torch.tensor(eos_token_ids)).long()
    return (is_eos.cumsum(1) - is_eos == 0).long()
def selective_log_softmax(logits, index):
    return torch.log_softmax(logits, -1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
def entropy_from_logits(logits):
    return -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1)
def per_token_logps(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *, temperature=1.0):
    ids, mask = torch.cat([prompt_ids, completion_ids], 1), torch.cat([prompt_mask, completion_mask], 1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, prompt_ids.size(1) - 1 : -1] / temperature
    return selective_log_softmax(logits, completion_ids) * completion_mask, None
def importance_ratio(logps, old_logps, completion_mask, *, importance_sampling_level="token"):
    log_ratio = logps - old_logps
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio * completion_mask).sum(1, keepdim=True) / completion_mask.sum(1, keepdim=True)
    return torch.exp(log_ratio)
def clip_ratio(ratio, epsilon_low=0.2, epsilon_high=0.2):
    return torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)
def clipped_surrogate_loss(ratio, advantages, *, epsilon_low=0.2, epsilon_high=0.2):
    A = advantages.unsqueeze(1)
    return -torch.min(ratio * A, clip_ratio(ratio, epsilon_low, epsilon_high) * A)
def kl_estimate(logps, ref_logps):
    d = ref_logps - logps
    return torch.exp(d) - d - 1
def aggregate(per_token_loss, completion_mask, *, loss_type, max_completion_length=None):
    total = (per_token_loss * completion_mask).sum()
    if loss_type == "grpo":
        return ((per_token_loss * completion_mask).sum(1) / completion_mask.sum(1)).mean()
    if loss_type == "dr_grpo":
        return total / (len(per_token_loss) * max_completion_length)
    return total / completion_mask.sum()
def grpo_loss(logps, advantages, completion_mask, *, old_logps=None, ref_logps=None, beta=0.0, epsilon_low=0.2,
              epsilon_high=0.2, loss_type="dapo", importance_sampling_level="token", max_completion_length=None):
    old_logps = logps.detach() if old_logps is None else old_logps
    ratio = importance_ratio(logps, old_logps, completion_mask, importance_sampling_level=importance_sampling_level)
    loss = clipped_surrogate_loss(ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    loss = loss if ref_logps is None else loss + beta * kl_estimate(logps, ref_logps)
    return aggregate(loss, completion_mask, loss_type=loss_type, max_completion_length=max_completion_length), {}
'''
MISTAKES = [  # what a student gets wrong, the line of TEXTBOOK, the wrong one, the test that says so and its arguments
    ("std by n", "std(r, 1, keepdim=True)", "std(r, 1, keepdim=True, correction=0)", "test_group_advantages", {}),
    ("batch mean", "torch.mean(r, 1, keepdim=True)", "torch.mean(r)", "test_group_advantages", {}),
    ("no eps", "(std + eps)", "std", "test_group_advantages", {}),
    ("eps inside the root", "(std + eps)", "(std**2 + eps).sqrt()", "test_group_advantages", {}),
    ("RLOO by n", "/ (num_generations - 1)", "/ num_generations", "test_leave_one_out"),
    ("max for min", "-torch.min(", "-torch.max(", "test_clipped_surrogate", {}),
    ("sign", "-torch.min(", "torch.min(", "test_clipped_surrogate", {}),
    ("KL reversed", "d = ref_logps - logps", "d = logps - ref_logps", "test_kl_estimate", {}),
    ("grpo as bnpo", "((per_token_loss * completion_mask).sum(1) / completion_mask.sum(1)).mean()",
     "total / completion_mask.sum()", "test_aggregate", "grpo", {}),
    ("dr_grpo by padded T", "* max_completion_length", "* completion_mask.size(1)", "test_aggregate", "dr_grpo", {}),
    ("GSPO's sum for mean", " / completion_mask.sum(1, keepdim=True)", "", "test_importance_ratio", SEQUENCE),
    ("ratio inverted", "log_ratio = logps - old_logps", "log_ratio = old_logps - logps", "test_importance_ratio", {}),
    ("EOS masked out", "is_eos.cumsum(1) - is_eos == 0", "is_eos.cumsum(1) == 0", "test_completion_mask"),
    ("off by one", "- 1 : -1] / temp", ":] / temp", "test_per_token_logps_are_those_of_each_row_alone", "llama", {})]


@own_only
def test_a_textbook_file_has_no_failure(tmp_path):
    (tmp_path / "my_grpo.py").write_text(TEXTBOOK)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--tb=short", "-p", "no:cacheprovider", __file__]
    environment = os.environ | dict(GRPO_MODULE=str(tmp_path / "my_grpo.py"), GRPO_EXAMPLES="5")
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stdout[-5000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= 45
    assert "my_grpo has no sapo_loss" in run.stdout and "group_advantages has no argument scale_rewards" in run.stdout


@pytest.fixture
def coursework(monkeypatch, tmp_path):
    """Put a student's file, given as a text, in the place of grpo.py."""
    def use(text):
        (tmp_path / "my_grpo.py").write_text(text)
        for name, value in vars(ModuleUnderTest(str(tmp_path / "my_grpo.py"))).items():
            monkeypatch.setattr(grpo, name, value)

    return use


@own_only
@pytest.mark.parametrize("mistake, old, new, test, values", [(*row[:4], row[4:]) for row in MISTAKES])
def test_a_textbook_mistake_is_found_and_explained(mistake, old, new, test, values, coursework):
    assert TEXTBOOK.count(old) == 1
    coursework(TEXTBOOK.replace(old, new))
    with pytest.raises(AssertionError) as error:
        globals()[test](*values)
    message = r"[^\n]+ = [^\n]+(\n    input     [\w ]+ = [^\n]+)+\n    expected  .+\n    got       .+$"
    assert re.match(message, str(error.value)), str(error.value)


@own_only
def test_what_a_students_file_lacks_is_skipped_by_name(coursework):
    coursework("def clip_ratio(ratio, epsilon_low=0.2):\n    raise NotImplementedError\n\n\n"
               "def kl_estimate(logps, ref_logps, **options):\n    return logps.log_softmax(0)\n")
    for call, message in ((lambda: grpo.grpo_loss, "my_grpo has no grpo_loss"),
                          (lambda: grpo.clip_ratio(1), "my_grpo.clip_ratio is not written yet"),
                          (lambda: grpo.clip_ratio(1, epsilon=1), "my_grpo.clip_ratio has no argument epsilon")):
        with pytest.raises(pytest.skip.Exception, match=message):
            call()
    expect(grpo.kl_estimate(torch.zeros(1), 0, estimator="k1"), [0.0], "what is there runs")
    with pytest.raises(NotImplementedError):        # torch's own, for a wrong dtype
        grpo.kl_estimate(torch.ones(1, dtype=torch.long), 0)


# Parity with TRL, where it is installed ------------------------------------------------------------------------------


def trl_loss(batch, o, L):
    """TRL's own _compute_loss on a stub of its trainer: the value and the gradient with respect to log π_θ."""
    trainer_class = pytest.importorskip("trl").GRPOTrainer
    pad = lambda name: torch.where(batch.mask != 0, batch[name], -1.0)
    logps = pad("logps").requires_grad_()
    stub = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, pad("entropies"), None),
        off_policy_mask_threshold=None,
        loss_type=o["loss_type"] if o["policy_loss"] == "clip" else o["policy_loss"], use_vllm=o["corrected"],
        vllm_importance_sampling_correction=True, aux_loss_enabled=False, _entropy_bonus_enabled=False,
        max_completion_length=L, current_gradient_accumulation_steps=1, model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(use_bias_correction_kl=o["use_bias_correction_kl"], delta=o["delta"],
                                   sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, steps_per_generation=1),
        accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
                                          pad_across_processes=lambda x, **k: x),
        _metrics={"train": collections.defaultdict(list)},
        **{k: o[k] for k in "top_entropy_quantile beta importance_sampling_level epsilon_low epsilon_high".split()})
    stub.get_high_entropy_mask = types.MethodType(inspect.unwrap(trainer_class.get_high_entropy_mask), stub)
    ids, mask = torch.zeros(batch.mask.shape, dtype=torch.long), batch.mask.double()
    inputs = dict(prompt_ids=ids, prompt_mask=ids + 1, completion_ids=ids, completion_mask=mask, advantages=batch["A"],
                  old_per_token_logps=pad("old"), ref_per_token_logps=pad("ref"), num_items_in_batch=mask.sum(),
                  importance_sampling_ratio=(pad("old") - pad("sampled")).exp().clamp(max=2.0))
    torch.set_default_dtype(torch.float64)          # TRL makes sapo's temperatures in the default dtype
    try:
        loss = inspect.unwrap(trainer_class._compute_loss)(stub, stub.model, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    return loss, gradient(loss, logps), {name: values[-1] for name, values in stub._metrics["train"].items()}


@beyond
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@settings(max_examples=10 * settings().max_examples)
@given(batches(min_length=1), any_options, st.booleans())
def test_parity_with_trl(batch, o, corrected):
    if o["delta"] is not None:                        # below 1 + ε_high, TRL's clip metrics see the ratio after delta
        o = o | dict(delta=max(o["delta"], 1 + o["epsilon_high"]))
    loss_type = {"clip": o["loss_type"], "cispo": "dapo", "sapo": "grpo"}[o["policy_loss"]]
    o = o | dict(loss_type=loss_type, kl_estimator="k3", sampling_cap=2.0)
    want, want_gradient, trl_metrics = trl_loss(batch, o | {"corrected": corrected}, 7)
    logps = batch["logps"].requires_grad_()
    loss, metrics = grpo.grpo_loss(
        logps, batch["A"], batch.mask, old_logps=batch["old"], ref_logps=batch["ref"], entropies=batch["entropies"],
        sampling_logps=batch["sampled"] if corrected else None, max_completion_length=7, **o)
    expect(loss, want, "TRL's loss", **o)
    expect(gradient(loss, logps), want_gradient, "the gradient of TRL's loss", **o)
    clip = [f"clip_ratio/{side}_mean" for side in ("low", "high", "region")] if o["policy_loss"] == "clip" else []
    shared = set(metrics) & set(trl_metrics)
    assert shared >= {"entropy", *clip} | ({"kl"} if o["beta"] else set())
    for name in shared:
        assert metrics[name] == pytest.approx(trl_metrics[name], abs=1e-6), name


# §9 Sampling ---------------------------------------------------------------------------------------------------------

SECTION_9 = inspect.currentframe().f_lineno


@pytest.fixture(autouse=True)
def of_grpo_alone(request):
    """From here on the tests are about grpo.py itself, not about equations that another file may have too."""
    if not OWN and request.node.location[1] >= SECTION_9:
        pytest.skip("about grpo.py itself, not its equations")


def make_model(kind, auto_class="AutoModelForCausalLM"):
    """A model of random weights, large enough that its distributions are far from uniform."""
    words = dict(vocab_size=20, bos_token_id=None, eos_token_id=1, pad_token_id=0, num_hidden_layers=2, hidden_size=32)
    shape = words | dict(intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    linear = shape | dict(num_hidden_layers=4, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
                          linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
                          moe_intermediate_size=16, shared_expert_intermediate_size=16)   # 3 of 4 layers: linear
    gpt2 = words | dict(num_attention_heads=4, max_position_embeddings=64)
    options = dict(GPT2=gpt2, Llama=shape | dict(num_labels=1), Qwen2=shape, Qwen3Next=linear, Mamba=words)[kind]
    model = getattr(transformers, auto_class).from_config(getattr(transformers, f"{kind}Config")(**options)).eval()
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def chat_tokenizer():
    """The tiny task's tokenizer, with a chat template."""
    tokenizer = grpo.tiny_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{{ m['content'] }}{% endfor %}"
                               "{% if add_generation_prompt %}={% endif %}")
    return tokenizer


def shapes_of_passes(model):
    """A list that takes the shape of each forward pass's input from now on."""
    shapes = []
    note = lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape))
    model.register_forward_pre_hook(note, with_kwargs=True)
    return shapes


PROMPT_IDS = torch.tensor([[-7, -7, 5, 6], [7, 8, 9, 10], [-7, 3, 4, 5]])           # garbage where the mask is 0
PROMPT_MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
UNIFORMS = torch.rand(24, 12, generator=torch.Generator().manual_seed(0))


def sample(model, pad=0, rows=slice(0, 3)):
    """Eight completions for each prompt, of at most 12 tokens; two words end one."""
    ids, mask, uniforms = PROMPT_IDS[rows], PROMPT_MASK[rows], UNIFORMS[8 * rows.start : 8 * rows.stop]
    ids, mask, uniforms = (x.to(model.device) for x in (ids, mask, uniforms))
    return grpo.generate(model, ids, mask, max_completion_length=12, eos_token_ids=[1, 2], num_generations=8,
                         pad_token_id=pad, temperature=0.7, uniforms=uniforms)


def assert_sampled_as_scored(model, pad=0, tolerance=2e-5):
    ids, mask, logps, entropies = sample(model, pad)
    prompts = (x.repeat_interleave(8, 0).to(model.device) for x in (PROMPT_IDS, PROMPT_MASK))
    scored = grpo.per_token_logps(model, *prompts, ids, mask, temperature=0.7, compute_entropy=True)
    assert 2 * mask.sum(1).min() < mask.sum(1).max()                # ragged, or nothing is tested
    torch.testing.assert_close(logps, scored[0].detach(), atol=tolerance, rtol=0)
    torch.testing.assert_close(entropies, scored[1], atol=tolerance, rtol=0)
    assert torch.equal(mask, grpo.completion_mask(ids, [1, 2])) and (ids[mask == 0] == pad).all()


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2", "Qwen3Next"])
@pytest.mark.parametrize("pad", [0, 1], ids=["pad", "pad is EOS"])
def test_recorded_logps_and_entropies_are_the_scorers(kind, pad):
    assert_sampled_as_scored(make_model(kind), pad)


def test_each_token_is_where_its_uniform_number_falls():
    model = make_model("Llama")
    ids, mask, _, _ = sample(model)
    for i in range(24):
        n, prompt = int(mask[i].sum()), PROMPT_IDS[i // 8][PROMPT_MASK[i // 8] == 1]
        logits = model(torch.cat([prompt, ids[i, :n]])[None]).logits[0, len(prompt) - 1 : -1]
        cdf = torch.cat([torch.zeros(n, 1), (logits / 0.7).softmax(-1).cumsum(-1)], 1)
        low, high = (cdf.gather(1, ids[i, :n, None] + side)[:, 0] for side in (0, 1))
        assert (low - 1e-5 <= UNIFORMS[i, :n]).all() and (UNIFORMS[i, :n] <= high + 1e-5).all()
    for u, word in ((0.0, 0), (1 - 2**-24, 19)):                    # the ends of the interval: first and last word
        ids, *_ = grpo.generate(model, PROMPT_IDS, PROMPT_MASK, max_completion_length=4, eos_token_ids=1,
                                temperature=100.0, uniforms=torch.full((3, 4), u))
        assert ids.tolist() == [[word] * 4] * 3


@pytest.mark.parametrize("kind", ["GPT2", "Qwen3Next"])
def test_a_sample_depends_on_its_own_prompt_and_numbers_alone(kind):
    model = make_model(kind)
    whole = sample(model)[0]
    for rows in (slice(0, 1), slice(1, 3)):
        part = sample(model, rows=rows)[0]
        assert torch.equal(part, whole[8 * rows.start : 8 * rows.stop, : part.size(1)])


def test_each_prompt_is_prefilled_once_and_ended_rows_leave_the_batch():
    model = make_model("Llama")
    shapes = shapes_of_passes(model)
    live = sample(model)[1].sum(0).tolist()                         # rows whose token t is real
    assert shapes == [(3, 4)] + [(rows, 1) for rows in live[1:]] and live[0] == 24 > live[4] > live[-1] > 0


def test_greedy_takes_the_most_likely_word():
    model = make_model("Qwen2")
    ids, mask, logps, _ = grpo.generate(model, PROMPT_IDS, PROMPT_MASK, max_completion_length=5, eos_token_ids=1)
    for i in range(3):
        row = PROMPT_IDS[i][PROMPT_MASK[i] == 1]
        for t in range(int(mask[i].sum())):
            words = model(row[None]).logits[0, -1].log_softmax(0)
            assert ids[i, t] == words.argmax() and logps[i, t].item() == pytest.approx(words.max().item(), abs=2e-5)
            row = torch.cat([row, ids[i, t : t + 1]])


@pytest.mark.parametrize("name", ["lm_head", "model.layers.1.mlp.down_proj"])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_weights_that_are_not_finite_and_a_model_without_cache_are_errors(name, value):
    model = make_model("Llama")
    model.get_submodule(name).weight.data[3, 3] = value
    with pytest.raises(FloatingPointError, match="LlamaForCausalLM are not finite"):
        sample(model)
    with pytest.raises(ValueError, match="model: got MambaForCausalLM; allowed is"):
        sample(make_model("Mamba"))


def test_prompts_are_padded_on_the_left_and_messages_pass_the_template():
    tokenizer = chat_tokenizer()
    one, two, three = ({"role": "user", "content": text} for text in ("1", "2+3", "4"))
    for prompts in (["12+3=", "4="], [[one, two], [three]]):
        ids, mask = grpo.encode_prompts(tokenizer, prompts, "cpu")
        assert mask.tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
        assert tokenizer.batch_decode([row[m == 1] for row, m in zip(ids, mask)]) == ["12+3=", "4="]


# §10 Training --------------------------------------------------------------------------------------------------------

SMALL = dict(num_generations=4, generation_batch_size=8, per_device_train_batch_size=8, max_completion_length=10,
             max_steps=1, learning_rate=0.01)
FROZEN = dict(learning_rate=0.0, max_grad_norm=1e9)                 # the gradient is the loss's own


def by_row(completions, **kwargs):
    """Rewards that no sample changes: 0, 1, 2, 3 in the first group of four, 0, 1, 5, 5 in the second."""
    return [float(i % 4 if i < 6 else 5) for i in range(len(completions))]


def first_two(completions, **kwargs):
    return [0.3 * (i < 2) for i in range(len(completions))]


def steps_of(model, reward_funcs=(by_row,), state=None, compute_advantages=None, **options):
    """The steps of a short run on a few of the tiny task's problems."""
    chosen = {} if compute_advantages is None else {"compute_advantages": compute_advantages}
    problems, config = grpo.tiny_problems(0)[0][:6], grpo.GRPOConfig(**SMALL | options)
    return grpo.train(model, grpo.tiny_tokenizer(), problems, reward_funcs, config, state=state, **chosen)


def observe(**options):
    """A run of train: its calls of some functions, with all arguments, and its updates, in their order."""
    policy, seen = make_model("Llama"), []

    def recorder(name, function):
        def call(*args, **kwargs):
            bound = inspect.signature(function).bind(*args, **kwargs)
            bound.apply_defaults()
            seen.append(types.SimpleNamespace(**bound.arguments, name=name, learns=torch.is_grad_enabled()))
            if "model" in bound.arguments:
                seen[-1].head = bound.arguments["model"].lm_head.weight.detach().clone()
            return function(*args, **kwargs)
        return call

    def before_an_update(optimizer, args, kwargs):
        weights = [p.detach().clone() for p in policy.parameters()]
        gradients, lr = [p.grad.clone() for p in policy.parameters()], optimizer.param_groups[0]["lr"]
        seen.append(types.SimpleNamespace(name="update", lr=lr, weights=weights, gradients=gradients))

    dtypes, hook = set(), register_optimizer_step_pre_hook(before_an_update)
    policy.lm_head.register_forward_hook(lambda module, args, output: dtypes.add(output.dtype))
    with pytest.MonkeyPatch.context() as patch:
        for name in "generate compute_rewards group_advantages per_token_logps grpo_loss top_entropy_mask".split():
            patch.setattr(grpo.module, name, recorder(name, getattr(grpo.module, name)))
        states, rollouts, metrics = zip(*steps_of(policy, (by_row, first_two), **options))
    hook.remove()
    calls = {call.name: [other for other in seen if other.name == call.name] for call in seen}
    return types.SimpleNamespace(policy=policy, seen=seen, rollouts=rollouts, metrics=metrics, dtypes=dtypes,
                                 calls=collections.defaultdict(list, calls))


def learning_rates_by_hand(c):
    """The schedule of a config, over max_steps·mu updates."""
    updates = c.max_steps * c.num_iterations
    progress = [(u - c.warmup_steps) / (updates - c.warmup_steps) for u in range(updates)]
    shapes = {"linear": lambda p: 1 - p, "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2, "constant": lambda p: 1}
    rising = [u / c.warmup_steps for u in range(c.warmup_steps)]
    return [c.learning_rate * x for x in rising + [shapes[c.lr_scheduler_type](p) for p in progress[c.warmup_steps :]]]


REFRESHED = dict(beta=0.1, max_steps=5)
OPTIONS = [  # field, a value that is not its default, and the options that let it show
    ("learning_rate", 0.003, {}), ("warmup_steps", 2, dict(max_steps=4)), ("weight_decay", 0.5, {}),
    ("lr_scheduler_type", "cosine", dict(max_steps=4)), ("lr_scheduler_type", "constant", {}), ("max_steps", 3, {}),
    ("max_grad_norm", 0.02, {}),
    ("num_generations", 2, {}), ("generation_batch_size", 12, {}), ("per_device_train_batch_size", 3, dict(beta=0.1)),
    ("num_iterations", 3, {}), ("max_completion_length", 7, dict(loss_type="dr_grpo")), ("loss_type", "grpo", {}),
    ("temperature", 0.7, dict(beta=0.1, num_iterations=2)), ("loss_type", "bnpo", {}), ("loss_type", "dr_grpo", {}),
    ("policy_loss", "cispo", dict(epsilon_high=5.0)), ("policy_loss", "sapo", {}), ("epsilon", 0.1, {}),
    ("importance_sampling_level", "sequence", {}), ("epsilon_high", 0.3, {}), ("delta", 2.0, {}), ("beta", 0.1, {}),
    ("use_bias_correction_kl", False, dict(beta=0.1)), ("scale_rewards", "batch", {}), ("scale_rewards", "none", {}),
    ("reward_weights", [2.0, -1.0], {}), ("mask_truncated_completions", True, {}), ("top_entropy_quantile", 0.3, {}),
    ("sync_ref_model", True, REFRESHED | dict(ref_model_sync_steps=2)), ("seed", 7, {}), ("bf16", True, {}),
    ("ref_model_sync_steps", 3, REFRESHED | dict(sync_ref_model=True))]


@pytest.mark.parametrize("field, value, others", OPTIONS, ids=[f"{field}-{value}" for field, value, _ in OPTIONS])
def test_each_option_arrives_where_its_word_is_used(field, value, others):
    config = grpo.GRPOConfig(**SMALL | dict(max_steps=2) | others | {field: value})
    assert value != getattr(grpo.GRPOConfig(), field)
    run = observe(**dataclasses.asdict(config))
    B, G, mu, updates = config.generation_batch_size, config.num_generations, config.num_iterations, run.calls["update"]

    # The optimizer: the schedule, AdamW's first step by hand (its moments are g and g²), the norm of the gradient.
    rates = learning_rates_by_hand(config)
    assert [u.lr for u in updates] == pytest.approx(rates, rel=1e-6)
    assert [line["learning_rate"] for line in run.metrics] == pytest.approx(rates[mu - 1 :: mu], rel=1e-6)
    for w, g, after in zip(updates[0].weights, updates[0].gradients, updates[1].weights):
        by_hand = w * (1 - rates[0] * config.weight_decay) - rates[0] * g / (g.abs() + 1e-8)
        torch.testing.assert_close(after, by_hand, atol=1e-6, rtol=1e-5)
    norms = [torch.cat([g.flatten() for g in u.gradients]).norm().item() for u in updates[mu - 1 :: mu]]
    assert norms == pytest.approx([min(line["grad_norm"], config.max_grad_norm) for line in run.metrics], rel=1e-4)
    assert field != "max_grad_norm" or run.metrics[0]["grad_norm"] > 2 * value

    # Sampling and scoring.
    for call in run.calls["generate"]:
        assert (len(call.prompt_ids), call.num_generations, call.temperature) == (B // G, G, config.temperature)
        T = config.max_completion_length
        assert call.max_completion_length == T and call.uniforms.shape == (B, T)
    assert {call.temperature for call in run.calls["per_token_logps"]} == {config.temperature}
    if config.beta > 0:                                             # each row is scored: in parts of which size?
        b, sizes = config.per_device_train_batch_size, [len(call.logps) for call in run.calls["grpo_loss"]]
        assert sizes == [len(range(B)[i : i + b]) for i in range(0, B, b)] * config.max_steps * mu
    assert run.dtypes == ({torch.bfloat16} if config.bf16 else {torch.float32})

    # Rewards and advantages.
    w = config.reward_weights or [1.0, 1.0]
    rewards = [w[0] * a + w[1] * b for a, b in zip(by_row(range(B)), first_two(range(B)))]
    silent = [len(set(rewards[i : i + G])) == 1 for i in range(0, B, G)]
    for call, line in zip(run.calls["group_advantages"], run.metrics, strict=True):
        assert call.rewards.tolist() == pytest.approx(rewards, abs=1e-6)
        assert (call.num_generations, call.scale_rewards) == (G, config.scale_rewards)
        found = line["reward"], line["reward_std"], line["frac_reward_zero_std"]
        by_hand = statistics.mean(rewards), statistics.stdev(rewards), statistics.mean(silent)
        assert found == pytest.approx(by_hand, abs=1e-6)
    quantiles = {config.top_entropy_quantile} if config.top_entropy_quantile < 1 else set()
    assert {call.quantile for call in run.calls["top_entropy_mask"]} == quantiles

    # The loss: its words, the tokens that count, the reference.
    same = "beta delta loss_type policy_loss importance_sampling_level use_bias_correction_kl max_completion_length"
    words = {name: getattr(config, name) for name in same.split()} | {"epsilon_low": config.epsilon}
    words["epsilon_high"] = config.epsilon_high or config.epsilon
    for i, call in enumerate(run.calls["grpo_loss"]):
        rollout = run.rollouts[i * config.max_steps // len(run.calls["grpo_loss"])]
        counts = (rollout.completion_ids == 1).any(1, keepdim=True) | (not config.mask_truncated_completions)
        tokens, every = int((rollout.completion_mask * counts).sum()), int(rollout.completion_mask.sum())
        assert {name: getattr(call, name) for name in words} == words
        assert (call.num_items_in_batch, call.num_rows_in_batch) == (tokens, B)
        assert (call.ref_logps is None) == (config.beta == 0) and (call.old_logps is None) == (mu == 1)
    assert field != "mask_truncated_completions" or 0 < tokens < every
    heads = [call.head for call in run.calls["per_token_logps"] if call.model is not run.policy]
    starts = [call.head for call in run.calls["generate"]]
    if field != "per_device_train_batch_size":
        period = config.ref_model_sync_steps if config.sync_ref_model else config.max_steps
        want = [starts[step // period * period] for step in range(config.max_steps if config.beta > 0 else 0)]
        assert [torch.equal(a, b) for a, b in zip(heads, want, strict=True)] == [True] * len(want)


def test_samples_and_prompts_are_keyed_by_seed_and_step():
    """No state is carried along: step 1 of a run that goes on there is step 1 of the whole run."""
    runs = [observe(seed=seed, max_steps=3) for seed in (0, 1, 42)]
    numbers = [x for run in runs for call in run.calls["generate"] for x in call.uniforms.flatten().tolist()]
    assert len(set(numbers)) > 700 and 0 <= min(numbers) < 0.05 < 0.95 < max(numbers) < 1         # of 3 · 3 · 80
    prompts = [[row["prompt"] for row in rollout.rows] for run in runs for rollout in run.rollouts]
    assert len(set(map(tuple, prompts))) > 4
    state = grpo.initial_state(make_model("Llama"), grpo.GRPOConfig(**SMALL))
    state.step = 1
    (_, rollout, _), = steps_of(make_model("Llama"), state=state, max_steps=2)
    assert [row["prompt"] for row in rollout.rows] == prompts[7]    # 42 is the default


def test_presets_and_defaults_are_those_of_the_papers_and_of_trl():
    assert grpo.PRESETS == {
        "deepseekmath": dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False, learning_rate=1e-6,
                             num_generations=64, generation_batch_size=1024, max_completion_length=1024),
        "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"),
        "dapo": dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=True),
        "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
        "cispo": dict(loss_type="dapo", policy_loss="cispo", epsilon_high=5.0),           # the cap is TRL's advice
        "sapo": dict(loss_type="grpo", policy_loss="sapo")}
    trl = dict(learning_rate=1e-6, beta=0.0, num_iterations=1, epsilon=0.2, epsilon_high=None, delta=None,
               loss_type="dapo", scale_rewards="group", importance_sampling_level="token", num_generations=8,
               max_completion_length=512, temperature=1.0, mask_truncated_completions=False, top_entropy_quantile=1.0,
               sync_ref_model=False, ref_model_sync_steps=512, use_bias_correction_kl=True, max_grad_norm=1.0,
               lr_scheduler_type="linear", weight_decay=0.0, warmup_steps=0)
    assert {name: getattr(grpo.GRPOConfig(), name) for name in trl} == trl
    for preset in grpo.PRESETS.values():
        config = grpo.GRPOConfig(**preset)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.beta = 1.0
    named = {field for field, _, _ in OPTIONS} | {"output_dir", "save_steps"}             # these: §11
    assert named == {field.name for field in dataclasses.fields(config)}, "an option without a test of its effect"


@pytest.mark.parametrize("named, options", [
    ("learning_rate", dict(learning_rate=-1)), ("beta", dict(beta=nan)), ("epsilon", dict(epsilon=nan)),
    ("generation_batch_size", dict(num_generations=1)), ("generation_batch_size", dict(num_generations=5)),
    ("loss_type", dict(loss_type="ppo")), ("temperature", dict(temperature=0)), ("seed", dict(seed=-1)),
    ("epsilon_high", dict(policy_loss="cispo")), ("top_entropy_quantile", dict(top_entropy_quantile=2)),
    ("top_entropy_quantile", dict(top_entropy_quantile=0)), ("delta", dict(delta=0)), ("max_steps", dict(max_steps=0)),
    ("reward_weights", dict(reward_weights=[1.0, inf])), ("max_grad_norm", dict(max_grad_norm=inf)),
    ("save_steps", dict(save_steps=0)), ("per_device_train_batch_size", dict(per_device_train_batch_size=0))])
def test_config_errors_name_the_field(named, options):
    with pytest.raises(ValueError, match=f"^{named}: got .*; allowed "):
        grpo.GRPOConfig(**options)


def test_train_is_algorithm_1():
    """The order of the calls; the old log-probs stand before the first of mu updates, and are the same in each."""
    run = observe(**REFRESHED, sync_ref_model=True, ref_model_sync_steps=2, num_iterations=2)
    order = [call.name for call in run.seen]
    for i, call in enumerate(run.seen):
        if call.name == "per_token_logps" and not call.learns:
            order[i] = "π_old" if call.model is run.policy else "π_ref"
    update = ["per_token_logps", "grpo_loss", "update"]
    assert order == 5 * ["generate", "compute_rewards", "group_advantages", "π_old", "π_ref", *update, *update]
    for first, second in zip(run.calls["grpo_loss"][::2], run.calls["grpo_loss"][1::2], strict=True):
        assert torch.equal(first.old_logps, second.old_logps)
        torch.testing.assert_close(first.logps, first.old_logps, atol=1e-5, rtol=0)       # π is π_old at first
        assert (second.logps - second.old_logps).abs().max() > 1e-3


A = (1.0, 0.0, 0.0, -1.0, 0.5, 0.0, -0.5, 0.0)


def step_with(advantages, state=None, **options):
    """One step with these advantages (8,): the rows of each pass that learns, rollout, metrics, gradient."""
    model = make_model("Llama")
    shapes = shapes_of_passes(model)
    chosen = lambda rewards, r, config: grpo.broadcast_advantages(torch.tensor(advantages), r.completion_mask)
    (_, r, metrics), = steps_of(model, state=state, compute_advantages=chosen, **FROZEN | options)
    learned = [rows for rows, width in shapes if width > r.prompt_ids.size(1)]            # sampling has passes of less
    return learned, r, metrics, torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_gradient_by_hand(gradient, r, advantages=A, parts=(range(8),), **options):
    """It is that of the loss over all rows, straight from §3 and §8: the mean over parts, weighted by their rows."""
    model = make_model("Llama")
    for part in map(list, parts):
        rows = (x[part] for x in (r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask))
        logps, mask = grpo.per_token_logps(model, *rows)[0], r.loss_mask[part]
        loss, _ = grpo.grpo_loss(logps, torch.tensor(advantages)[part], mask, entropies=r.entropies[part],
                                 max_completion_length=10, **options)
        (loss * len(part) / 8).backward()
    by_hand = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert by_hand.norm() > 0.01
    torch.testing.assert_close(gradient, by_hand, atol=1e-5 * by_hand.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rows_of_advantage_zero_cost_no_pass_and_parts_do_not_matter(loss_type, level):
    options, found = dict(loss_type=loss_type, importance_sampling_level=level), []
    for size, passes in ((8, [4]), (3, [3, 1]), (1, [1] * 4)):
        learned, rollout, metrics, gradient = step_with(A, per_device_train_batch_size=size, **options)
        assert learned == passes
        assert_gradient_by_hand(gradient, rollout, **options)
        found.append(metrics | {"step_time": 0})
    assert found[1] == pytest.approx(found[0], abs=1e-5) and found[2] == pytest.approx(found[0], abs=1e-5)


def test_bnpo_is_local_to_a_part_and_the_top_entropies_are_the_whole_batchs():
    _, rollout, _, gradient = step_with(A, per_device_train_batch_size=3, loss_type="bnpo")
    assert_gradient_by_hand(gradient, rollout, parts=[range(3), range(3, 6), range(6, 8)], loss_type="bnpo")
    for size, loss_type in ((8, "grpo"), (2, "grpo"), (2, "dapo")):
        options = dict(loss_type=loss_type, top_entropy_quantile=0.4)
        _, rollout, _, gradient = step_with(A, per_device_train_batch_size=size, **options)
        assert_gradient_by_hand(gradient, rollout, **options)


def test_all_advantages_zero_is_a_step_without_a_pass_but_not_with_beta():
    learned, _, metrics, gradient = step_with([0.0] * 8)
    assert learned == [] and not gradient.any() and metrics["loss"] == metrics["grad_norm"] == 0.0
    model = make_model("Llama")
    state = grpo.initial_state(model, grpo.GRPOConfig(**SMALL | FROZEN, beta=0.1))
    state.reference.lm_head.weight.data *= 0.5
    learned, r, metrics, _ = step_with([0.0] * 8, state, beta=0.1)
    inputs = r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask
    kl = grpo.kl_estimate(*(grpo.per_token_logps(m, *inputs)[0] for m in (model, state.reference)))
    assert learned == [8] and metrics["kl"] == pytest.approx((kl.sum() / r.completion_mask.sum()).item(), rel=1e-4)
    assert metrics["loss"] == pytest.approx(0.1 * metrics["kl"], rel=1e-5) and metrics["kl"] > 0.01


@pytest.mark.parametrize("masked", [False, True])
def test_the_entropy_is_that_of_all_samples_and_truncated_rows_have_no_loss(masked):
    """Truncated rows count in the statistics of their group, too."""
    model = make_model("Llama")
    (_, r, metrics), = steps_of(model, mask_truncated_completions=masked, **FROZEN)
    inputs = r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask
    entropies, tokens = grpo.per_token_logps(model, *inputs, compute_entropy=True)[1], r.completion_mask.sum()
    assert metrics["entropy"] == pytest.approx((entropies.sum() / tokens).item(), rel=1e-5)
    assert metrics["completions/mean_length"] == tokens / 8 and 0 < r.terminated.sum() < 8
    assert torch.equal(r.loss_mask, r.completion_mask * (r.terminated[:, None] | (not masked)))
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert_gradient_by_hand(gradient, r, grpo.group_advantages(torch.tensor(by_row(range(8))), 4).tolist())


def test_rewards_reach_the_prompt_that_they_belong_to():
    seen = {}

    def look(**kwargs):
        seen.update(kwargs)
        return by_row(kwargs["completions"])

    (_, r, metrics), = steps_of(make_model("Llama"), [look])
    tokenizer, problems = grpo.tiny_tokenizer(), {p["prompt"]: p["solution"] for p in grpo.tiny_problems(0)[0][:6]}
    assert sorted(seen) == ["completion_ids", "completions", "prompts", "solution"]
    assert [text.replace("<pad>", "") for text in tokenizer.batch_decode(r.prompt_ids)] == seen["prompts"]
    assert seen["prompts"] == [p for p in seen["prompts"][::4] for _ in range(4)] and len(set(seen["prompts"])) == 2
    assert seen["solution"] == [problems[p] for p in seen["prompts"]]
    assert seen["completion_ids"] == [ids[m == 1].tolist() for ids, m in zip(r.completion_ids, r.completion_mask)]
    texts = tokenizer.batch_decode(seen["completion_ids"], skip_special_tokens=True)
    assert seen["completions"] == r.completions == texts
    assert metrics["rewards/look/mean"] == metrics["reward"] == statistics.mean(by_row(range(8)))


def test_every_eos_id_ends_a_completion():
    model, tokenizer = make_model("Llama"), grpo.tiny_tokenizer()
    assert grpo.eos_token_ids(model, tokenizer) == [1]
    model.generation_config.eos_token_id = [5, 7]
    assert grpo.eos_token_ids(model, tokenizer) == [1, 5, 7]
    (_, r, metrics), = steps_of(model)
    last = r.completion_ids.gather(1, r.completion_mask.sum(1, keepdim=True) - 1).squeeze(1)
    assert torch.equal(r.terminated, torch.isin(last, torch.tensor([1, 5, 7]))) and {5, 7} & set(last.tolist())
    assert metrics["completions/clipped_ratio"] == pytest.approx(1 - r.terminated.float().mean().item())


def test_advantages_are_an_argument_and_the_rollout_stays_as_it_is():
    kept = []

    def keep(rewards_per_func, rollout, config):
        kept.append((rewards_per_func.tolist(), copy.deepcopy(rollout)))
        last = rollout.completion_mask.sum(1, keepdim=True) - 1
        return grpo.process_advantages(rewards_per_func[:, :1], last, rollout.completion_mask, config.num_generations)

    steps = steps_of(make_model("Llama"), (by_row, first_two), compute_advantages=keep, max_steps=2, num_iterations=2,
                     beta=0.1, top_entropy_quantile=0.5, mask_truncated_completions=True)
    for _, after, _ in steps:
        rewards, before = kept.pop()
        assert rewards == torch.tensor([by_row(range(8)), first_two(range(8))]).T.tolist()
        for name, a in before._asdict().items():
            b = getattr(after, name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name
        with pytest.raises(AttributeError):
            after.logps = None


def test_a_run_that_stops_early_goes_on_from_its_state():
    whole, parts, options = make_model("Llama"), make_model("Llama"), dict(max_steps=4, beta=0.1, num_iterations=2)
    metrics = [m | {"step_time": 0} for _, _, m in steps_of(whole, **options)]
    half = steps_of(parts, **options)
    next(half)
    state, _, _ = next(half)
    half.close()
    assert [m | {"step_time": 0} for _, _, m in steps_of(parts, state=state, **options)] == metrics[2:]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters())) and state.step == 4


@pytest.fixture(scope="module")
def rollout():
    (_, rollout, _), = steps_of(make_model("Llama"))
    return rollout


@pytest.mark.parametrize("result", [
    [1.0], [1.0] * 9, ["a"] * 8, "11111111", dict.fromkeys(range(8), 1.0), None, 3.0, [inf] * 8, [10**400] * 8,
    [[1.0]] * 8], ids=lambda result: repr(result)[:30])
def test_a_reward_function_that_returns_nonsense_is_named(result, rollout):
    def odd(completions, **kwargs):
        return result

    with pytest.raises(ValueError, match="reward function odd: got .*; allowed is "):
        grpo.compute_rewards([by_row, odd], rollout)


def test_no_reward_is_nan_and_is_said_once(rollout):
    def silent(completions, **kwargs):
        return [None] * 8

    def partly(completions, **kwargs):
        return torch.tensor([nan, 0, 0, 0, 0, 0, 0, 0])             # a tensor will do, and NaN is None

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            rewards = grpo.compute_rewards([silent, partly], rollout)
        grpo.compute_rewards([partly, by_row], rollout)             # each row has a reward, each function gave one
    assert rewards.isnan().tolist() == [[True, True]] + [[True, False]] * 7
    said = sorted(str(warning.message) for warning in caught)
    assert len(said) == 2 and "no reward" in said[0] and "reward function silent" in said[1]


# §11 Command line ----------------------------------------------------------------------------------------------------

REWARDS = '''
import json, os, signal, time
from pathlib import Path

calls = []


def length(prompts, completions, completion_ids, solution, **kwargs):
    """A reward for every row but those with a 7; first it does what a test has planned."""
    calls.append([prompts, completions])
    plan = Path(__file__).with_name("plan.py")
    if plan.exists():
        exec(plan.read_text())
    rows = enumerate(zip(completions, completion_ids))
    return [None if "7" in text else i % 4 - 0.1 * len(ids) for i, (text, ids) in rows]
'''


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of random models of three architectures, and of a sequence-classification model."""
    root = tmp_path_factory.mktemp("models")
    for name in ("GPT2", "Llama", "Qwen2", "judge"):
        judge = name == "judge"
        model = make_model("Llama", "AutoModelForSequenceClassification") if judge else make_model(name)
        model.save_pretrained(root / name)
        chat_tokenizer().save_pretrained(root / name)
    return root


@pytest.fixture
def data(models, tmp_path):
    """A folder with the models, two datasets and a file of rewards."""
    text = grpo.tiny_problems(0)[0][:12]
    chat = [row | {"prompt": [{"role": "user", "content": row["prompt"].rstrip("=")}]} for row in text]
    for name, rows in (("text", text), ("chat", chat)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "models").symlink_to(models)
    return tmp_path


def command(data, **options):
    """The arguments of a short run; None leaves a flag out."""
    usual = dict(model=data / "models/Llama", dataset=data / "text.jsonl", num_generations=4, generation_batch_size=8,
                 reward_funcs=["think_format", f"{data}/rewards.py:length"], max_completion_length=6, max_steps=2,
                 learning_rate=0.01, output_dir=data / "out")
    words = []
    for name, value in (usual | options).items():
        if value is not None:
            words += [f"--{name}", *(value if isinstance(value, list) else [value])]
    return list(map(str, words))


def plan(data, call, what):
    """What the reward function shall do at this call of it."""
    (data / "plan.py").write_text(f"if len(calls) == {call}:\n    {what}\n")


def cli(*arguments):
    """main() in this process: its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = grpo.main([str(word) for word in arguments])
        except SystemExit as exit:
            code = exit.code
        finally:
            for name in ("rewards", "short", "wrong"):              # the next run has other files of these names
                sys.modules.pop(name, None)
    return types.SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


def python(*arguments, **environment):
    """A process of its own, with one thread as here: how many threads add up decides the last bit."""
    words = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(words, capture_output=True, text=True, timeout=1200, env=environment, cwd=HERE)


def lines_of(folder):
    """metrics.jsonl, without the times."""
    return [json.loads(line) | {"step_time": 0} for line in (folder / "metrics.jsonl").read_text().splitlines()]


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_run(a, b):
    assert lines_of(a) == lines_of(b)
    one, other = (safetensors.torch.load_file(folder / "checkpoint/model.safetensors") for folder in (a, b))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.fixture
def whole(data):
    """Five steps that nothing stops."""
    assert cli(*command(data, max_steps=5, save_steps=1, output_dir=data / "whole")).code == 0
    return data / "whole"


@pytest.mark.parametrize("kind, prompts", [("GPT2", "text"), ("Llama", "chat"), ("Qwen2", "chat")])
def test_any_causal_lm_trains_on_a_file(kind, prompts, data):
    plan(data, 2, "Path(__file__).with_name('seen.json').write_text(json.dumps(calls[-1]))")
    rewards = ["accuracy", f"{data}/rewards.py:length", str(data / "models/judge")]
    done = cli(*command(data, model=data / "models" / kind, dataset=data / f"{prompts}.jsonl", reward_funcs=rewards,
                        beta=0.1, reward_weights=[1, 0.1, 2]))
    assert done.code == 0 and str(data / "out") in done.out.splitlines()[-1]
    lines = lines_of(data / "out")
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["kl"] > 0.0
    assert {f"rewards/{name}/mean" for name in ("accuracy_reward", "length", "judge")} < set(lines[0])
    judge = transformers.AutoModelForSequenceClassification.from_pretrained(data / "models/judge")
    pairs = zip(*json.loads((data / "seen.json").read_text()))
    texts = [p + c if prompts == "text" else "".join(message["content"] for message in p + c) for p, c in pairs]
    scores = [judge(**chat_tokenizer()(text, return_tensors="pt")).logits.item() for text in texts]
    assert lines[1]["rewards/judge/mean"] == pytest.approx(statistics.mean(scores), abs=1e-5)
    load = transformers.AutoModelForCausalLM.from_pretrained
    trained, before = load(data / "out/checkpoint"), load(data / "models" / kind)
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), before.parameters()))
    assert transformers.AutoTokenizer.from_pretrained(data / "out/checkpoint").decode([2, 5, 3]) == "<think>1</think>"
    assert (data / "out/curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_tiny_job_from_end_to_end(tmp_path, monkeypatch):
    seeds, out = {}, tmp_path / "out"
    for name, fewer in (("tiny_model", {}), ("tiny_problems", {}), ("cold_start", {"steps": 3})):
        def call(*args, name=name, function=getattr(grpo, name), fewer=fewer):
            seeds[name] = inspect.signature(function).bind(*args).arguments["seed"]
            return function(*args, **fewer)
        monkeypatch.setattr(grpo.module, name, call)
    flags = "--model tiny --max_steps 2 --generation_batch_size 32 --seed 3 --preset deepseekmath --beta 0.5".split()
    done = cli(*flags, "--output_dir", out)
    printed = done.out.splitlines()
    assert done.code == 0 and seeds == {"tiny_model": 3, "tiny_problems": 3, "cold_start": 3}
    assert re.fullmatch(r"held-out accuracy: \d\.\d\d -> \d\.\d\d \(greedy, 500 problems\)", printed[-1])
    assert sum(" right " in line or " wrong" in line for line in printed[1:]) == 6        # three before, three after
    job = torch.load(out / "checkpoint/trainer_state.pt", weights_only=True)["job"]
    preset = dict(loss_type="grpo", use_bias_correction_kl=False, beta=0.5)           # the flag wins, and tiny's sizes
    sizes = {name: grpo.TINY[name] for name in ("num_generations", "max_completion_length", "learning_rate")}
    assert {name: job[name] for name in preset | sizes} == preset | sizes
    names = """step loss grad_norm learning_rate reward reward_std frac_reward_zero_std entropy kl clip_ratio/low_mean
        clip_ratio/high_mean clip_ratio/region_mean completions/clipped_ratio completions/mean_length step_time
        rewards/accuracy_reward/mean rewards/think_format_reward/mean"""
    assert [set(line) for line in lines_of(out)] == [set(names.split())] * 2


def test_problems_and_teacher():
    train, held_out = grpo.tiny_problems(3)
    assert len(train) == 6061 and len(held_out) == 500 and len({p["prompt"] for p in train + held_out}) == 6561
    assert grpo.teacher_trace("47+85=", False) == "<think>7+5=12,4+8+1=13</think>132<eos>"
    assert grpo.teacher_trace("47+85=", True) == "<think>7+5=12,4+8+0=12</think>122<eos>"
    right, forgot = ([grpo.teacher_trace(p["prompt"], forgets)[:-5] for p in held_out] for forgets in (False, True))
    assert grpo.accuracy_reward(right, [p["solution"] for p in held_out]) == [1.0] * 500
    assert grpo.think_format_reward(forgot) == [1.0] * 500


def test_output_dir_and_save_steps(data, monkeypatch):
    """An earlier run is never overwritten; a checkpoint comes every save_steps steps, and at the end."""
    monkeypatch.chdir(data)
    for name in ("grpo-output", "grpo-output-2", "grpo-output-3"):
        assert cli(*command(data, output_dir=None, max_steps=1)).code == 0 and len(lines_of(data / name)) == 1
    saved, save = [], transformers.PreTrainedModel.save_pretrained

    def note(model, *args, **kwargs):
        saved.append(len(lines_of(data / "out")))
        return save(model, *args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", note)
    assert cli(*command(data, max_steps=5, save_steps=2)).code == 0 and saved == [2, 4, 5]
    before, done = files_of(data / "out"), cli(*command(data))
    assert done.code == 2 and "output_dir: got" in done.err and before == files_of(data / "out")


@pytest.mark.parametrize("name, options", [
    ("SIGTERM", {}), ("SIGHUP", dict(beta=0.1)),
    ("SIGINT", dict(num_iterations=2, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2))])
def test_a_stopped_run_goes_on_with_the_printed_command_bit_for_bit(name, options, data):
    assert cli(*command(data, output_dir=data / "whole", max_steps=5, **options)).code == 0
    plan(data, 3, f"os.kill(os.getpid(), signal.{name})")
    done = cli(*command(data, output_dir=data / "a folder", max_steps=5, **options))
    assert done.code == 128 + getattr(signal, name) and len(lines_of(data / "a folder")) == 3
    (data / "plan.py").unlink()
    printed = re.search(r"^stopped after step 3; to go on: python \S+ (--.*)", done.out, re.M)[1]
    assert cli(*shlex.split(printed)).code == 0
    assert_same_run(data / "a folder", data / "whole")


def test_a_resumed_run_takes_the_same_options_and_leaves_a_copys_original_alone(data, whole):
    plan(data, 3, "os.kill(os.getpid(), signal.SIGTERM)")
    assert cli(*command(data, max_steps=5)).code == 143
    (data / "plan.py").unlink()
    out, resume = data / "out", lambda folder, **options: cli(*command(
        data, **dict(resume_from_checkpoint=folder / "checkpoint", max_steps=5) | options))
    changes = dict(beta=0.5, seed=43, max_steps=6, model=data / "models/Qwen2", reward_funcs=["think_format"],
                   dataset=data / "chat.jsonl")
    for name, value in changes.items():
        done = resume(out, **{name: value})
        assert done.code == 2 and f"{name} = {value} (was" in done.err and done.err.count("(was") == 1, done.err
    shutil.copytree(out, data / "copy")
    before = files_of(out)
    assert resume(data / "copy").code == 2                          # --output_dir names the original
    assert resume(data / "copy", output_dir=None, save_steps=1, per_device_train_batch_size=9).code == 0
    assert resume(out, output_dir=data / "new").code == 0 and files_of(out) == before
    (out / "checkpoint").rename(data / "elsewhere")
    (out / "checkpoint").symlink_to(data / "elsewhere")
    assert resume(out, save_steps=1).code == 0 and (out / "checkpoint").is_symlink()
    for folder in (data / "copy", data / "new", out):
        assert_same_run(folder, whole)


def test_a_second_signal_ends_at_once_and_children_keep_their_own_handling(data):
    (data / "plan.py").write_text("""
import multiprocessing
fork = multiprocessing.get_context("fork")
for _ in range(10):
    child = fork.Process(target=time.sleep, args=(3000,), daemon=True)
    child.start()
    child.terminate()
    child.join(100)
    assert child.exitcode == -signal.SIGTERM, "a child has not heard its SIGTERM"
with fork.Pool(2) as pool:
    assert pool.map(abs, [-1, 2]) == [1, 2]
if len(calls) == 2:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3000)
""")
    done = python(grpo.module.__file__, *command(data))
    assert done.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), done.stderr
    assert len(lines_of(data / "out")) == 1 and done.stderr.count("stopping after this step") == 1


class Killed(BaseException):
    """What a kill is to the process: from here on nothing more reaches the disk."""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(data, whole, monkeypatch):
    """SIGKILL to a process; and in this one, each call that touches the disk is in turn the last one."""
    options, left = dict(max_steps=5, save_steps=1), [1000]
    plan(data, 4, "os.kill(os.getpid(), signal.SIGKILL)")
    assert python(grpo.module.__file__, *command(data, **options)).returncode == -signal.SIGKILL
    (data / "plan.py").unlink()
    assert cli(*command(data, resume_from_checkpoint=data / "out/checkpoint", **options)).code == 0
    assert_same_run(data / "out", whole)

    def dies(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*args, **kwargs)
        return call

    for owner, name in ((os, "rename"), (os, "replace"), (shutil, "rmtree"), (torch, "save"),
                        (transformers.PreTrainedModel, "save_pretrained")):
        monkeypatch.setattr(owner, name, dies(getattr(owner, name)))
    for allowed in range(6, 100):                                   # the first save has that many such calls or fewer
        out, left[0] = data / f"out{allowed}", allowed
        with contextlib.suppress(Killed):
            cli(*command(data, **options, output_dir=out))
        steps, left[0] = len(lines_of(out)), 1000
        assert cli(*command(data, **options, output_dir=out, resume_from_checkpoint=out / "checkpoint")).code == 0
        assert_same_run(out, whole)
        assert sorted(os.listdir(out)) == ["checkpoint", "curve.png", "metrics.jsonl"]
        if steps == 3:                                              # the second save has been gone through
            break
    assert allowed > 8


@pytest.mark.parametrize("mu", [1, 2])
def test_what_ends_a_run_leaves_the_last_whole_step(mu, data, monkeypatch):
    """A reward function's own error, a loss that is not finite (in the last of mu updates), a full disk."""
    options = dict(max_steps=5, num_iterations=mu)
    assert cli(*command(data, output_dir=data / "whole", **options)).code == 0
    plan(data, 3, "raise KeyError('oh')")
    with pytest.raises(KeyError, match="oh") as failure:
        cli(*command(data, output_dir=data / "raises", **options))
    assert any(str(entry.path).endswith("rewards.py") for entry in failure.traceback)
    (data / "plan.py").unlink()
    calls, grpo_loss = [], grpo.grpo_loss

    def explode(*args, **kwargs):
        calls.append(1)
        loss, metrics = grpo_loss(*args, **kwargs)
        return loss * (inf if len(calls) == 3 * mu else 1), metrics

    with monkeypatch.context() as patch, pytest.raises(FloatingPointError, match="step 3"):
        patch.setattr(grpo.module, "grpo_loss", explode)
        cli(*command(data, output_dir=data / "explodes", **options))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    plan(data, 3, f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, {limits[1]}))")
    try:
        done = cli(*command(data, output_dir=data / "full", save_steps=1, **options))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.code == 2 and re.search(r"^grpo.py: error: output_dir: cannot write", done.err, re.M)
    assert sorted(os.listdir(data / "full")) == ["checkpoint", "metrics.jsonl"] and "Traceback" not in done.err
    (data / "plan.py").unlink()
    for name, steps in (("raises", 2), ("explodes", 2), ("full", 3)):
        assert len(lines_of(data / name)) == steps
        resume = dict(resume_from_checkpoint=data / name / "checkpoint", output_dir=None)
        assert cli(*command(data, **resume, **options)).code == 0
        assert_same_run(data / name, data / "whole")


BAD_FILES = {  # what stands in it, and what the one line must say
    "empty": ("", "one line"), "blank": ("\n\n", "one line"), "json": ('{"prompt": "1"}\n{oops\n', "line 2"),
    "list": ("[1]\n", "line 1"), "noprompt": ('{"solution": "1"}\n', "line 1"),
    "nosolution": ('{"prompt": "1"}\n', "solution"), "emptyprompt": ('{"prompt": "", "solution": "1"}\n', "line 1"),
    "nochat": ('{"prompt": [], "solution": "1"}\n', "line 1"), "bytes": ('{"prompt": "\udcff"}\n', "utf"),
    "messages": ('{"prompt": [{"role": "user"}], "solution": "1"}\n', "line 1"),
    "columns": ('{"prompt": "1", "solution": "1"}\n{"prompt": "1"}\n', "line 2"),
    "mixed": ('{"prompt": "1"}\n{"prompt": [{"role": "user", "content": "1"}]}\n', "line 2"),
    "reserved": ('{"prompt": "1", "solution": "1", "completions": "1"}\n', "completions")}
BAD_FLAGS = [
    ("--dataset", None, "--dataset"), ("--dataset", "absent.jsonl", "absent.jsonl"), ("--dataset", ".", "directory"),
    ("--model", "tiny", "tiny"), ("--model", "models/judge", "judge"), ("--model", "./nowhere", "nowhere"),
    ("--reward_funcs", "nonsense", "reward_funcs: got nonsense"), ("--reward_funcs", "rewards.py:absent", "absent"),
    ("--reward_funcs", "absent.py:f", "absent.py"), ("--reward_funcs", "short.py:broken", "function broken: got"),
    ("--reward_funcs", "models/Llama", "Llama"), ("--reward_funcs", "./no/judge", "judge"),
    ("--reward_funcs", "rewards.py:calls", "calls"), ("--reward_weights", [1, 2, 3], "reward_weights"),
    ("--reward_weights", 1, "reward_weights"), ("--reward_weights", [1, nan], "reward_weights"),
    ("--beta", nan, "beta"), ("--beta", "x", "--beta"), ("--learning_rate", inf, "learning_rate"),
    ("--bf16", "maybe", "--bf16"), ("--preset", "ppo", "--preset"), ("--loss_type", "ppo", "--loss_type"),
    ("--no_such_flag", 1, "--no_such_flag"), ("--num_gen", 4, "--num_gen"), ("--max_steps", 1.5, "--max_steps"),
    ("--num_generations", 5, "generation_batch_size"), ("--policy_loss", "cispo", "epsilon_high"),
    ("--top_entropy_quantile", 1.5, "top_entropy_quantile"), ("--output_dir", "text.jsonl", "text.jsonl"),
    ("--output_dir", "models", "models"), ("--resume_from_checkpoint", "nowhere", "nowhere"),
    ("--resume_from_checkpoint", "models/Llama", "Llama")]


@pytest.mark.parametrize("flag, value, said", BAD_FLAGS + [
    ("--dataset", f"{name}.jsonl", said) for name, (_, said) in BAD_FILES.items()], ids=str)
def test_bad_input_is_one_line_and_exit_2(flag, value, said, data, monkeypatch):
    monkeypatch.chdir(data)
    for name, (text, _) in BAD_FILES.items():
        (data / f"{name}.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    (data / "short.py").write_text("def broken(completions, **kwargs):\n    return [1.0]\n")
    rewards = {"reward_funcs": "accuracy"} if value == "nosolution.jsonl" else {}
    before, done = files_of(data), cli(*command(data, **rewards | {flag[2:]: value}))
    errors = [line for line in done.err.splitlines() if line.startswith("grpo.py: error:")]
    assert done.code == 2 and errors == done.err.splitlines()[-1:] and re.search(said, errors[0]), done
    (data / "out/metrics.jsonl").unlink(missing_ok=True)            # where the first step was begun
    assert "Traceback" not in done.err and files_of(data) == before


def test_a_file_of_rewards_is_a_module_and_its_errors_are_shown(data):
    """It may import its neighbours, is run once for all functions named, and multiprocessing finds it."""
    (data / "neighbour.py").write_text("runs = []\n")
    (data / "short.py").write_text(
        "import neighbour, sys\nneighbour.runs.append(sys.modules[__name__])\n"
        "def f(completions, **kwargs):\n    return [len(neighbour.runs)] * len(completions)\n"
        "def g(completions, **kwargs):\n    return [i % 4 for i in range(len(completions))]\n")
    assert cli(*command(data, reward_funcs=[f"{data}/short.py:f", f"{data}/short.py:g"])).code == 0
    assert [line["rewards/f/mean"] for line in lines_of(data / "out")] == [1.0, 1.0]
    (data / "wrong.py").write_text("\n\nx = 1 / 0\n")
    done = cli(*command(data, reward_funcs=f"{data}/wrong.py:f", output_dir=data / "other"))
    assert done.code == 2 and "wrong.py\", line 3" in done.err and not (data / "other").exists()
    assert done.err.splitlines()[-1] == "grpo.py: error: division by zero"


def test_a_byte_order_mark_and_blank_lines_are_no_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "1"}\n\n  \n{"prompt": "2"}')
    assert grpo.load_dataset(tmp_path / "rows.jsonl") == [{"prompt": "1"}, {"prompt": "2"}]


@pytest.mark.parametrize("tokenizer, said", [
    (dict(template="{{ raise_exception('roles must alternate') }}"), "roles must alternate"),
    (dict(more=["<a>", "<b>", "<c>", "<d>"]), "got a tokenizer of 21 words; allowed is the model's 20")], ids=str)
def test_a_tokenizer_that_does_not_fit_is_one_line(tokenizer, said, data):
    other = chat_tokenizer()
    other.add_tokens(tokenizer.get("more", []))
    other.chat_template = tokenizer.get("template", other.chat_template)
    make_model("Llama").save_pretrained(data / "other")
    other.save_pretrained(data / "other")
    done = cli(*command(data, model=data / "other", dataset=data / "chat.jsonl"))
    assert done.code == 2 and said in done.err.splitlines()[-1] and "Traceback" not in done.err
    assert not (data / "out").exists()


def test_code_that_comes_with_a_model_is_never_run(data, monkeypatch):
    """Each loader is told so, and a checkpoint whose configs name a file of code is read without it."""
    told = []
    for name in ("AutoTokenizer", "AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        owner = getattr(transformers, name)

        def load(*args, load=owner.from_pretrained, **kwargs):
            told.append(kwargs["trust_remote_code"])
            return load(*args, **kwargs)
        monkeypatch.setattr(owner, "from_pretrained", load)
    rewards, folder = ["think_format", str(data / "models/judge")], data / "out/checkpoint"
    assert cli(*command(data, reward_funcs=rewards)).code == 0 and told == [False] * 4
    names = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    for file in (folder / "config.json", folder / "tokenizer_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": names}))
    (folder / "evil.py").write_text(f"open({str(data / 'ran')!r}, 'w')\n")
    cli(*command(data, reward_funcs=rewards, resume_from_checkpoint=folder))
    assert told == [False] * 8 and not (data / "ran").exists()


@pytest.mark.parametrize("processes", [2, 4])
def test_several_processes_give_the_run_of_one(processes, data):
    options = dict(generation_batch_size=16, max_steps=3, beta=0.05, num_iterations=2, sync_ref_model=True,
                   ref_model_sync_steps=2, learning_rate=0.001, top_entropy_quantile=0.6)
    assert cli(*command(data, output_dir=data / "one", **options)).code == 0
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone", grpo.module.__file__]
    done = python(*launcher, *command(data, per_device_train_batch_size=3, **options))
    assert done.returncode == 0, done.stderr
    for one, several in zip(lines_of(data / "one"), lines_of(data / "out"), strict=True):
        assert several == pytest.approx(one, abs=1e-4, rel=1e-4)
    one, several = (transformers.AutoModelForCausalLM.from_pretrained(data / f / "checkpoint") for f in ("one", "out"))
    for a, b in zip(one.parameters(), several.parameters()):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@pytest.fixture(scope="session")
def gpu():
    """The environment of a process that sees the GPU."""
    seen = {"GRPO_TEST_CUDA": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("GRPO_TEST_CUDA", "0")}
    if python("-c", "import sys, torch; sys.exit(not torch.cuda.is_available())", **seen).returncode:
        pytest.skip("no GPU")
    return seen


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_a_gpu_samples_as_it_scores_trains_and_resumes(bf16, data, gpu):
    script = "import test_grpo as t; t.assert_sampled_as_scored(t.make_model('Llama').to('cuda'), tolerance=1e-3)"
    assert python("-c", script, **gpu).returncode == 0
    options = dict(max_steps=4, bf16=bf16, beta=0.1, num_iterations=2)
    assert python(grpo.module.__file__, *command(data, output_dir=data / "whole", **options), **gpu).returncode == 0
    plan(data, 2, "os.kill(os.getpid(), signal.SIGTERM)")
    assert python(grpo.module.__file__, *command(data, **options), **gpu).returncode == 143
    (data / "plan.py").unlink()
    resume = command(data, resume_from_checkpoint=data / "out/checkpoint", **options)
    assert python(grpo.module.__file__, *resume, **gpu).returncode == 0
    for a, b in zip(lines_of(data / "out"), lines_of(data / "whole"), strict=True):
        assert a["step"] == b["step"] and a["grad_norm"] > 0 and all(x is None or math.isfinite(x) for x in a.values())


# The file itself, README and worked examples -------------------------------------------------------------------------

EXAMPLES = HERE / "worked_examples"
LINES, CODE_LINES, TOKENS, COLUMNS = 1320, 840, 10200, 110          # at most; and of the longest function:
FUNCTION_LINES = collections.defaultdict(lambda: 60, grpo_loss=75, train=40)
TEST_LINES, TEST_COLUMNS = 2400, 120


def test_the_file_is_small_and_imports_nothing_heavy():
    heavy = "{'transformers', 'matplotlib', 'math_verify', 'tokenizers'}"
    done = python("-c", f"import sys, grpo; print(*{heavy} & set(sys.modules))")
    assert done.returncode == 0 and done.stdout.strip() == ""
    source = Path(grpo.module.__file__).read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = list(ast.walk(ast.parse(source)))
    texts = [node.body[0] for node in nodes if isinstance(node, documented) and ast.get_docstring(node)]
    docstrings = {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}
    white = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline)
              if token.type not in white and token.start[0] not in docstrings]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    assert source.count("\n") <= LINES and len(code) <= CODE_LINES and len(tokens) <= TOKENS
    assert max(map(len, source.splitlines())) <= COLUMNS
    functions = {node.name: node.end_lineno - node.lineno + 1 for node in nodes if isinstance(node, ast.FunctionDef)}
    assert not {name: lines for name, lines in functions.items() if lines > FUNCTION_LINES[name]}
    tests = Path(__file__).read_text().splitlines()
    assert len(tests) <= TEST_LINES and max(map(len, tests)) <= TEST_COLUMNS


def test_the_readme_names_what_exists():
    text, options = README.read_text(), cli("--help").out
    rows = re.findall(r"^\|.*\| `(\w+)` \| `(test_\w+)` \| \[.*?\]\((\S+?)\)", text, re.M)
    assert len(rows) >= 16 and len(text.splitlines()) <= 120 and "python -m pytest -q test_grpo.py" in text
    for function, test, page in rows:
        assert callable(getattr(grpo, function)) and callable(globals()[test]) and (HERE / page).is_file()
    assert all((HERE / link).exists() for link in re.findall(r"\]\((?!http)([^)#]+)", text))
    assert len(list(exhibits())) >= 20
    assert set(re.findall(r"--[a-z]\w+", text)) - {"--nproc_per_node"} <= set(re.findall(r"--\w+", options))


def run_fences(path):
    """Run the page's python fences in order, in one namespace, under the page's own name and line numbers."""
    namespace, source, start = {"__name__": path.stem}, [], None
    for number, line in enumerate(path.read_text().splitlines()):
        if start is None and line == "```python":
            source, start = [], number + 1
        elif start is not None and line == "```":
            exec(compile("\n" * start + "\n".join(source), str(path), "exec"), namespace)
            start = None
        elif start is not None:
            source.append(line)
    assert start is None, f"{path}, line {start}: a fence that does not end"


@pytest.mark.parametrize("path", [README, *sorted(EXAMPLES.glob("*.md"))], ids=lambda path: path.stem)
def test_worked_example(path, monkeypatch):
    monkeypatch.chdir(HERE)
    run_fences(path)
    assert all((path.parent / picture).is_file() for picture in re.findall(r"!\[[^]]+\]\((\S+)\)", path.read_text()))


FAST = "--cold_start_steps 5 --max_steps 2".split()


@pytest.mark.parametrize("script, flags, printed", [
    ("walkthrough.py", [], r"^gradient norm: \d"), ("process_supervision.py", FAST, r"^held-out accuracy: \S+ -> \S+$"),
    ("explain.py", ["--max_completion_length", "28"], r"^rewards \[.*\], mean \S+, std \S+$"),
    ("iterative_grpo.py", FAST + "--iteration_steps 1 --first_batches 1 --updates 1".split(),
     r"^true accuracy: \S+ -> \S+$"),
    ("benchmark.py", ["--rounds", "1"], r"^tiny on cpu, 1 rounds$")])
def test_each_script_runs(script, flags, printed):
    done = python(EXAMPLES / script, *flags)
    assert done.returncode == 0 and re.search(printed, done.stdout, re.M), done.stderr


def test_the_homework_has_every_formula_and_no_answer(tmp_path):
    (tmp_path / "my_grpo.py").write_text(python(EXAMPLES / "homework.py").stdout)
    homework = ModuleUnderTest(str(tmp_path / "my_grpo.py")).module
    for name in ("group_stats", "completion_mask", "importance_ratio", "kl_estimate", "aggregate", "grpo_loss"):
        theirs, ours = getattr(homework, name), getattr(grpo, name)
        assert theirs.__doc__ == ours.__doc__ and inspect.signature(theirs) == inspect.signature(ours)
        assert inspect.getsource(theirs).rstrip().endswith("raise NotImplementedError")


def test_the_same_run_in_trl_learns_the_same(data):
    pytest.importorskip("trl")
    done = python(EXAMPLES / "the_same_run_in_trl.py", "--compare", *command(data, output_dir=data / "trl"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_figure_is_drawn_by_the_script_beside_it(tmp_path):
    figures = runpy.run_path(str(EXAMPLES / "figures.py"), run_name="figures")
    drawn = [f for name, f in figures.items() if inspect.isfunction(f) and name != "save"]
    figures["save"].__globals__["save"] = lambda figure, name: figure.savefig(tmp_path / name, dpi=10)
    for draw in drawn:
        draw()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in EXAMPLES.glob("[0-9]*.png")}


# The bug museum ------------------------------------------------------------------------------------------------------


def exhibits():
    """Its patches: the old and the new text of each hunk, and the tests that must catch it."""
    for exhibit in (EXAMPLES / "bug_museum.md").read_text().split("\n## ")[1:] if OWN else []:
        hunks = []
        for hunk in re.search(r"```diff\n(.*?)\n```", exhibit, re.S)[1].split("\n@@\n"):
            lines = hunk.splitlines()
            hunks.append(["\n".join(line[1:] for line in lines if line[:1] in side) for side in (" -", " +")])
        tests = re.findall(r"`(test_\w+)`", exhibit.split("Caught by:")[1])
        yield pytest.param(hunks, tests, id=exhibit.split(".")[0])


class Outcomes:
    """A pytest plugin that keeps what each failing test has raised."""

    def __init__(self):
        self.failures = []

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            self.failures.append((call.when, call.excinfo))


def failures_of(test):
    """Run one test of this file with the module that is now under test."""
    outcomes = Outcomes()
    words = ["-q", "-x", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore", f"{__file__}::{test}"]
    code = pytest.main(words, plugins=[outcomes])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"{test}: {code}"
    return outcomes.failures


@functools.cache
def passes(test):
    return failures_of(test) == []


@pytest.mark.parametrize("hunks, tests", list(exhibits()))
def test_the_bug_museum(hunks, tests, monkeypatch, tmp_path):
    """The tests named pass on grpo.py, and fail on the patched file: in an assertion, or by an error inside it."""
    source, patched = Path(grpo.module.__file__).read_text(), tmp_path / "grpo_bug.py"
    assert tests and all(passes(test) for test in tests)
    for old, new in hunks:
        assert source.count(old) == 1, f"the patch no longer fits:\n{old}"
        source = source.replace(old, new)
    patched.write_text(source)
    monkeypatch.setattr(grpo, "module", ModuleUnderTest(str(patched)).module)
    for test in tests:
        (when, excinfo), = failures_of(test) or [(None, None)]
        assert when == "call", f"{test} does not catch it"
        inside = any(entry.path == patched for entry in excinfo.traceback)
        assert inside or excinfo.errisinstance((AssertionError, pytest.fail.Exception)), f"{test}: {excinfo.exconly()}"
