"""Tests of grpo.py, section by section.

Each function of §1-§8 has a twin here in pure Python: numbers and lists, no tensors, no padding, so that it cannot share a
masking bug. Beside the twin stand relations (shift, scale, split, pad), gradients, every worked number of the guides that
students read, and exact enumeration where a claim is about an expectation. Hypothesis draws ragged batches whose padding is
garbage, NaN and infinities included.

To run the same properties against your own file, with the functions that it has:

    GRPO_MODULE=my_grpo.py python -m pytest test_grpo.py
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import json
import logging
import math
import os
import random
import re
import runpy
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
settings.register_profile("grpo", deadline=None, max_examples=40, derandomize="CI" in os.environ)
settings.load_profile("grpo")
torch.set_num_threads(1)
nan, inf = math.nan, math.inf


class ModuleUnderTest:
    """The file named by GRPO_MODULE; a function that it lacks skips the test that asks for it."""

    def __init__(self, name):
        path = Path(name if name.endswith(".py") else name + ".py")
        path = path if path.is_absolute() or path.exists() else HERE / path
        spec = importlib.util.spec_from_file_location(path.stem, path)
        self.module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)

    def __getattr__(self, name):
        if name.startswith("_") or name.startswith("pytest"):                                 # what pytest asks of every object
            raise AttributeError(name)
        if not hasattr(self.module, name):
            pytest.skip(f"{self.module.__name__} has no {name}")
        return getattr(self.module, name)


grpo = ModuleUnderTest(os.environ.get("GRPO_MODULE", "grpo"))
OWN = "GRPO_MODULE" not in os.environ
own_only = pytest.mark.skipif(not OWN, reason="about grpo.py itself, not its equations")


def f64(x):
    return torch.tensor(x, dtype=torch.float64)


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(
        actual, expected if isinstance(expected, torch.Tensor) else f64(expected), atol=tolerance, rtol=1e-10, check_dtype=False
    )


@dataclasses.dataclass
class Batch:
    """A ragged batch: lists without padding for the twins, and tensors whose padding is garbage for the functions."""

    mask: torch.Tensor
    lists: dict
    tensors: dict
    lengths: list

    def __getitem__(self, name):
        return self.tensors[name]

    def rows(self, name):
        return self.lists[name]

    def spread(self, rows, fill=0.0):
        """Rows of a twin's result back in a (B, T) tensor, padded with fill."""
        return f64([row + [fill] * (self.mask.size(1) - len(row)) for row in rows])


logs = st.floats(-6, 0)
garbage = st.sampled_from([nan, inf, -inf, 1e30, -1e30, -100.0, 0.0])


@st.composite
def batches(draw, min_length=0, groups=st.integers(1, 3)):
    """P prompts of G answers, of 0 to 5 tokens each, with log-probs near each other and per-token or per-row advantages."""
    G = draw(st.integers(2, 4))
    B, T = G * draw(groups), draw(st.integers(1, 5))
    lengths = [draw(st.integers(min(min_length, T), T)) for _ in range(B)]
    real = f64([[1.0] * n + [0.0] * (T - n) for n in lengths])
    mask = real.to(draw(st.sampled_from([torch.bool, torch.int64, torch.float64])))
    base = [[draw(logs) for _ in range(n)] for n in lengths]
    near = lambda row: [x + draw(st.floats(-1, 1)) for x in row]
    lists = {"logps": base, "old": [near(r) for r in base], "ref": [near(r) for r in base], "sampled": [near(r) for r in base],
             "entropies": [[draw(st.floats(0, 3)) for _ in r] for r in base], "tokens": [[draw(st.floats(-2, 2)) for _ in r] for r in base],
             "values": [[draw(st.floats(-2, 2)) for _ in r] for r in base]}
    tensors = {name: f64([row + [draw(garbage) for _ in range(T - len(row))] for row in rows]) for name, rows in lists.items()}
    advantages = [draw(st.floats(-2, 2)) for _ in range(B)]
    lists["A"], lists["G"] = advantages, G
    tensors["A"] = f64(advantages)
    return Batch(mask, lists, tensors, lengths)


def requires_grad(batch, *names):
    for name in names:
        batch.tensors[name] = batch[name].clone().requires_grad_()
    return [batch[name] for name in names]


def assert_clean_gradient(x, mask):
    assert x.grad.isfinite().all() and not x.grad[mask == 0].any()


# §1 Rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, solution, reward",
    [
        ("42", "42", 1.0),
        ("1,000", "1000", 1.0),
        ("1000.0", "1,000", 1.0),
        ("-7", "-7", 1.0),
        ("-7", "7", 0.0),
        ("1/2", "0.5", 1.0),
        ("2,000/4,000", "0.5", 1.0),
        (" 42\n", "42", 1.0),
        ("0.3333", "1/3", 0.0),
        ("0.1", "0.10000000000000000001", 0.0),
        ("+3", "3", 1.0),
        (".5", "1/2", 1.0),
        ("43", "42", 0.0),
        ("", "42", 0.0),
        ("1/0", "1", 0.0),
        ("12,34", "1234", 0.0),
        ("The answer is 42.", "42", 1.0),
        (r"\boxed{42}", "42", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"$\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac12", 1.0),
        (r"$x+1$", "$1+x$", 1.0),
        (r"$2\sqrt{3}$", r"2\sqrt{3}", 1.0),
        (r"$\sqrt{3}$", r"2\sqrt{3}", 0.0),
        ("<think>41</think>42", "42", 1.0),
        ("<think>42</think>41", "42", 0.0),
        ("a</think>1</think>2", "2", 1.0),
        ("42", "no number at all", None),
        ("42", "", None),
        ("9" * 5000, "42", 0.0),
        ("5", 5, 1.0),
        ("1,000/2", "500", 1.0),
        (r"$\frac12$", r"\[\frac12\]", 1.0),
        (r"$\frac12$", r"\(\frac12\)", 1.0),
    ],
)
def test_accuracy(answer, solution, reward):
    assert grpo.accuracy_reward([answer], [solution]) == [reward]
    assert grpo.accuracy_reward(completions=[[{"role": "assistant", "content": answer}]], solution=[solution], prompts=["?"]) == [reward]


def test_accuracy_rows_and_hostile_text():
    assert grpo.accuracy_reward(["1", "2", "3"], ["1", "3", "x y"]) == [1.0, 0.0, None]
    hostile = [
        "1" * 100_000,
        "$" + "{" * 100_000,
        "(" * 100_000,
        "1 " * 50_000,
        "\\boxed{" * 15_000,
        "</think>" * 12_000,
        "1,234" * 20_000,
        "<think>" * 14_000,
        " " * 100_000 + "x",
        "\n" * 100_000 + "x",
    ]
    assert grpo.accuracy_reward(hostile, ["7"] * len(hostile)) == [0.0] * len(hostile)
    with pytest.raises(ValueError, match="^solution: got 1 for 2 completions; allowed is"):
        grpo.accuracy_reward(["1", "2"], ["1"])


def test_rewards_read_the_last_message():
    chat = [
        [
            {"role": "assistant", "content": "<think>a</think>41"},
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "42"},
        ]
    ]
    assert grpo.accuracy_reward(chat, ["42"]) == [1.0] and grpo.think_format_reward(chat) == [0.0]


def test_accuracy_has_a_time_limit_and_works_in_a_thread(monkeypatch):
    import math_verify
    latex, limits = ([r"$\frac{2}{4}$"], [r"\frac12"]), []
    with concurrent.futures.ThreadPoolExecutor() as pool:  # math-verify's clock works in the main thread alone
        assert pool.submit(grpo.accuracy_reward, *latex).result() == [1.0]
    parse, verify = math_verify.parse, math_verify.verify
    monkeypatch.setattr(
        math_verify,
        "parse",
        lambda *a, parsing_timeout=None, **k: limits.append(parsing_timeout) or parse(*a, parsing_timeout=parsing_timeout, **k),
    )
    monkeypatch.setattr(
        math_verify,
        "verify",
        lambda *a, timeout_seconds=None, **k: limits.append(timeout_seconds) or verify(*a, timeout_seconds=timeout_seconds, **k),
    )
    assert grpo.accuracy_reward(*latex) == [1.0] and len(limits) == 3 and all(limits)


@pytest.mark.parametrize(
    "text, reward",
    [
        ("<think>a</think>b", 1.0),
        ("<think></think>b", 1.0),
        ("<think>\na\n</think>\n\nb\n", 1.0),
        (" <think>a</think>b", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> \n", 0.0),
        ("x<think>a</think>b", 0.0),
        ("<think>a<think>b</think>c", 0.0),
        ("<think>a</think>b</think>c", 0.0),
        ("a</think>b", 0.0),
        ("<think>a", 0.0),
        ("", 0.0),
        ("</think><think>a", 0.0),
        ("<think>a</think>b<think>", 0.0),
        ("<Think>a</Think>b", 0.0),
    ],
)
def test_think_format(text, reward):
    assert grpo.think_format_reward([text]) == [reward]
    assert grpo.think_format_reward(completions=[[{"role": "assistant", "content": text}]], solution=["1"]) == [reward]


def test_think_format_on_hostile_text():
    texts = [
        "<think>" * 14_000,
        "<think>" + "a" * 100_000,
        "<think>" + "<" * 100_000 + "</think>",
        "</think>" * 12_000,
        "<think></think>" + " " * 100_000,
    ]
    assert grpo.think_format_reward(texts) == [0.0] * 5


@given(st.integers(1, 30), st.integers(0, 30), st.lists(st.integers(0, 40), min_size=1, max_size=5))
@example(1280, 256, [1024, 1025, 1152, 1279, 1280, 1281])
def test_soft_overlong(L, c, lengths):
    c = min(c, L)
    f = grpo.get_soft_overlong_punishment(L, c)
    rewards = f(completion_ids=[[7] * n for n in lengths], prompts=None)
    for n, reward in zip(lengths, rewards):
        assert reward == pytest.approx(0.0 if n <= L - c else max(-1.0, -(n - (L - c)) / c) if c else -1.0, abs=1e-12)


def test_soft_overlong_worked_numbers():
    f = grpo.get_soft_overlong_punishment(1280, 256)
    assert f(completion_ids=[[0] * n for n in (1024, 1152, 1280, 5000)]) == [0.0, -0.5, -1.0, -1.0]
    assert grpo.get_soft_overlong_punishment(4, 0)(completion_ids=[[0] * 4, [0] * 5]) == [0.0, -1.0]


@given(
    st.integers(1, 4).flatmap(
        lambda F: st.tuples(
            st.lists(st.lists(st.one_of(st.floats(-5, 5), st.just(nan)), min_size=F, max_size=F), min_size=1, max_size=5),
            st.lists(st.floats(-2, 2), min_size=F, max_size=F),
        )
    )
)
@example(([[1.0, 0.8], [1.0, 0.7], [0.0, -0.2]], [0.7, 0.3]))
def test_combine_rewards(case):
    rewards, weights = case
    for w in (weights, None):
        want = [
            math.fsum(r * (1 if w is None else w[f]) for f, r in enumerate(row) if r == r) if any(r == r for r in row) else nan
            for row in rewards
        ]
        got = grpo.combine_rewards(f64(rewards), None if w is None else f64(w))
        torch.testing.assert_close(got, f64(want), equal_nan=True)
        torch.testing.assert_close(grpo.combine_rewards(f64(rewards), w), got, equal_nan=True)   # a list will do


# §2 Group statistics and advantages ----------------------------------------------------------------------------------

rewards_or_nan = st.one_of(st.floats(-10, 10), st.sampled_from([0.0, 1.0]), st.just(nan))


def groups_of(values, G):
    return [values[i : i + G] for i in range(0, len(values), G)]


def known(values):
    return [v for v in values if v == v]


def std_of(values, correction):
    values = known(values)
    if len(values) <= correction:
        return nan
    return math.sqrt(math.fsum((v - statistics.fmean(values)) ** 2 for v in values) / (len(values) - correction))


def twin_group_advantages(rewards, G, scale, correction, eps):
    out = []
    for group in groups_of(rewards, G):
        mean = statistics.fmean(known(group)) if known(group) else 0.0
        std = {"group": std_of(group, correction), "batch": std_of(rewards, correction), "none": None}[scale]
        equal = len(set(known(group))) <= 1
        out += [0.0 if r != r or equal or r == mean else (r - mean) / (1 if std is None else std + eps) for r in group]
    return out


@st.composite
def grouped(draw, elements=rewards_or_nan):
    G = draw(st.integers(2, 5))
    return (
        draw(
            st.lists(elements, min_size=G, max_size=G).flatmap(
                lambda g: st.lists(st.lists(elements, min_size=G, max_size=G), min_size=0, max_size=2).map(
                    lambda rest: sum(rest, g)
                )
            )
        ),
        G,
    )


@given(grouped(), st.sampled_from([0, 1]))
@example(([8.5, 6.2, 4.1], 3), 0)
@example(([1.0, 0.0, 0.5], 3), 1)
@example(([nan, nan], 2), 1)
def test_group_stats(case, correction):
    rewards, G = case
    mean, std = grpo.group_stats(f64(rewards), G, correction=correction)
    want = [statistics.fmean(known(g)) if known(g) else nan for g in groups_of(rewards, G)]
    torch.testing.assert_close(mean, f64(want), atol=1e-12, rtol=1e-12, equal_nan=True)
    torch.testing.assert_close(
        std,
        f64([std_of(g, correction) if known(g) else nan for g in groups_of(rewards, G)]),
        atol=1e-7,
        rtol=1e-9,
        equal_nan=True,
    )


@given(grouped(), st.sampled_from(["group", "batch", "none"]), st.sampled_from([0, 1]), st.sampled_from([1e-4, 1e-6, 1.0]))
@example(([1.0, 0.0, nan, nan], 2), "group", 1, 1e-4)
def test_group_advantages(case, scale, correction, eps):
    rewards, G = case
    got = grpo.group_advantages(f64(rewards), G, scale_rewards=scale, correction=correction, eps=eps)
    if all(len(set(g)) == len(g) or len(set(g)) == 1 for g in map(known, groups_of(rewards, G))) or eps == 1.0:
        close(got, twin_group_advantages(rewards, G, scale, correction, eps), 1e-7)
    assert not got[f64(rewards).isnan()].any() and got.isfinite().all()


@pytest.mark.parametrize("rewards, options, expected", [
    ([8.5, 6.2, 4.1], dict(correction=0, eps=0.0), [1.2429, -0.0371, -1.2058]),               # the guide's 1.24, -0.04, -1.21
    ([8.5, 6.2, 4.1], {}, [1.01476, -0.03029, -0.98446]),                                     # TRL's
    ([1.0, 0.0, 0.5], dict(correction=0, eps=0.0), [1.2247, -1.2247, 0.0]),                   # the notes' 1.225
    ([1.0, 0.0, 0.5], dict(correction=1, eps=0.0), [1.0, -1.0, 0.0]),                         # with the 1/(B-1) they write
    ([1.0, 0.0, 0.5], {}, [0.9998, -0.9998, 0.0]),                                            # TRL's
    ([1.0, 0.0, 0.5], dict(scale_rewards="none"), [0.5, -0.5, 0.0])])                         # r - mean: Dr. GRPO's
def test_worked_advantages(rewards, options, expected):
    close(grpo.group_advantages(f64(rewards), 3, **options), expected, 5e-5)


def test_groups_of_one():
    mean, std = grpo.group_stats(f64([0.25, 3.0]), 1, correction=0)
    close(mean, [0.25, 3.0])
    close(std, [0.0, 0.0])
    close(grpo.group_advantages(f64([0.25, 3.0]), 1, correction=0), [0.0, 0.0])


def test_worked_statistics():
    r = f64([8.5, 6.2, 4.1])
    mean, std = grpo.group_stats(r, 3, correction=0)
    close(mean, [6.2667], 5e-5)
    close((r - mean).square(), [4.988, 0.0044, 4.694], 5e-4)
    close(std, [1.7969], 5e-5)
    close(std.square(), [3.2289], 5e-5)
    notes = f64([1.0, 0.0, 0.5])
    close(grpo.group_stats(notes, 3, correction=0)[1], [math.sqrt(1 / 6)])                    # 0.408
    close(grpo.group_stats(notes, 3, correction=1)[1], [0.5])


@pytest.mark.parametrize("G", range(2, 17))
def test_equal_rewards_give_exactly_zero_in_float32(G):
    for value in (0.1, 0.7, 1.0, 1e-3, 1e8, -3.3, 1 / 3):
        rewards = torch.full((2 * G,), value)
        rewards[G:] = value / 3
        for options in (
            {},
            dict(eps=1e-8),
            dict(eps=0.0),
            dict(scale_rewards="none"),
            dict(scale_rewards="batch", eps=0.0),
            dict(correction=0),
        ):
            A = grpo.group_advantages(rewards, G, **options)
            assert A.dtype == torch.float32 and torch.equal(A, torch.zeros(2 * G)), (value, options)
        assert not grpo.leave_one_out_advantages(rewards, G).any() and not grpo.group_stats(rewards, G)[1].any()
        assert torch.equal(grpo.group_stats(rewards, G)[0], rewards[::G])
        steps = rewards[:, None].repeat(1, 3)
        assert not grpo.process_advantages(steps, torch.tensor([[0, 1, 2]] * 2 * G), torch.ones(2 * G, 3), G, eps=0.0).any()


@given(grouped(st.floats(-10, 10)), st.floats(-5, 5), st.floats(0.1, 5), st.randoms())
def test_advantages_shift_scale_and_permute(case, shift, scale, random):
    rewards, G = f64(case[0]), case[1]
    A = grpo.group_advantages(rewards, G, eps=1e-2)
    close(grpo.group_advantages(rewards + shift, G, eps=1e-2), A, 1e-9)
    close(grpo.group_advantages(rewards * scale, G, eps=1e-2 * scale), A, 1e-9)
    order = [g * G + i for g in random.sample(range(len(rewards) // G), len(rewards) // G) for i in random.sample(range(G), G)]
    close(grpo.group_advantages(rewards[order], G, eps=1e-2), A[order], 1e-9)
    close(A.view(-1, G).sum(1), [0.0] * (len(rewards) // G), 1e-9)
    unscaled = grpo.group_advantages(rewards, G, scale_rewards="none")
    close(grpo.leave_one_out_advantages(rewards, G), unscaled * G / (G - 1), 1e-9)


@pytest.mark.parametrize("G", [2, 3, 8])
def test_binary_rewards_in_closed_form(G):
    for k in range(1, G):
        A = grpo.group_advantages(f64([1.0] * k + [0.0] * (G - k)), G, eps=0.0)
        assert A[0].item() == pytest.approx(math.sqrt((G - 1) * (G - k) / (G * k)), abs=1e-12)
        assert A.square().sum().item() == pytest.approx(G - 1, abs=1e-12) and A.abs().max() <= (G - 1) / math.sqrt(G) + 1e-12


@given(grouped())
@example(([nan, 2.0, nan, nan], 2))
def test_leave_one_out(case):
    rewards, G = case
    want = []
    for group in groups_of(rewards, G):
        for i, r in enumerate(group):
            others = known(group[:i] + group[i + 1 :])
            want.append(r - statistics.fmean(others) if r == r and others else 0.0)
    close(grpo.leave_one_out_advantages(f64(rewards), G), want, 1e-9)


@st.composite
def stepped(draw):
    G, P, S, T = draw(st.integers(2, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    rewards = [[draw(st.one_of(st.integers(-3, 3).map(float), st.just(nan))) for _ in range(S)] for _ in range(G * P)]
    ends = [[draw(st.integers(0, T - 1)) if r == r else draw(st.sampled_from([-5, 0, 999])) for r in row] for row in rewards]
    return rewards, ends, [draw(st.integers(0, T)) for _ in range(G * P)], G, T


@given(stepped(), st.sampled_from([0, 1]))
@example(([[1.0, 0.0], [0.5, nan]], [[1, 3], [2, 0]], [4, 3], 2, 4), 1)
def test_process_advantages(case, correction):
    rewards, ends, lengths, G, T = case
    mask = torch.tensor([[t < n for t in range(T)] for n in lengths])
    flat = [sum(group, []) for group in groups_of(rewards, G)]
    want = []
    for i, row in enumerate(rewards):
        steps = flat[i // G]
        std = std_of(steps, correction)
        scaled = [0.0 if r != r or len(set(known(steps))) == 1 else (r - statistics.fmean(known(steps))) / (std + 1e-4) for r in row]
        want.append([sum(s for s, end in zip(scaled, ends[i]) if end >= t) if t < lengths[i] else 0.0 for t in range(T)])
    close(grpo.process_advantages(f64(rewards), torch.tensor(ends), mask, G, correction=correction), want, 1e-9)


def test_one_step_a_row_is_outcome_supervision():
    rewards, mask = f64([1.0, 0.0, 0.5, 0.2]), torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
    A = grpo.process_advantages(rewards[:, None], mask.sum(1, keepdim=True) - 1, mask, 2)
    close(A, grpo.broadcast_advantages(grpo.group_advantages(rewards, 2), mask))


@given(batches(), st.floats(0, 1), st.floats(0, 1))
def test_gae(batch, gamma, lam):
    want_A, want_R = [], []
    for rewards, values in zip(batch.rows("tokens"), batch.rows("values")):
        deltas = [r + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t, r in enumerate(rewards)]
        A = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
        want_A.append(A)
        want_R.append([a + v for a, v in zip(A, values)])
    rewards, values = requires_grad(batch, "tokens", "values")
    advantages, returns = grpo.gae_advantages(rewards, values, batch.mask, gamma=gamma, lam=lam)
    close(advantages, batch.spread(want_A))
    close(returns, batch.spread(want_R))
    (advantages.sum() + returns.sum()).backward()
    assert_clean_gradient(rewards, batch.mask)
    assert_clean_gradient(values, batch.mask)


def test_gae_at_its_ends():
    r, v, mask = f64([[1.0, 2.0, 3.0]]), f64([[0.5, 0.25, 0.125]]), torch.ones(1, 3)
    close(grpo.gae_advantages(r, v, mask, gamma=1.0, lam=1.0)[1], [[6.0, 5.0, 3.0]])          # λ = 1: returns are what comes
    close(grpo.gae_advantages(r, v, mask, gamma=0.5, lam=0.0)[0], [[1 + 0.125 - 0.5, 2 + 0.0625 - 0.25, 3 - 0.125]])   # λ = 0: one step
    close(grpo.gae_advantages(r, v, mask)[0], grpo.gae_advantages(r, v, mask, gamma=1.0, lam=0.95)[0])


def test_gae_of_no_tokens():
    empty = torch.zeros(2, 0)
    assert [x.shape for x in grpo.gae_advantages(empty, empty, empty)] == [(2, 0), (2, 0)]


def test_gae_steps_over_a_hole_in_the_mask():
    r, v, mask = f64([[1.0, nan, 3.0]]), f64([[0.5, inf, 0.125]]), torch.tensor([[1, 0, 1]])
    for got, want in zip(grpo.gae_advantages(r, v, mask, gamma=0.9), grpo.gae_advantages(r[:, ::2], v[:, ::2], mask[:, ::2], gamma=0.9)):
        close(got[:, ::2], want)
        assert got[0, 1] == 0.0


@given(batches())
def test_broadcast(batch):
    close(grpo.broadcast_advantages(batch["A"], batch.mask), batch.spread([[a] * n for a, n in zip(batch.rows("A"), batch.lengths)]))


# §3 Log-probabilities ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=4),
    st.sets(st.integers(0, 4), min_size=1, max_size=3),
)
@example([[3, 0, 0, 0], [0, 3, 3, 3], [3, 3, 3, 3]], {0})  # pad = EOS
def test_completion_mask(ids, eos):
    want = [[int(not any(token in eos for token in row[:t])) for t in range(4)] for row in ids]
    for kind in (list, tuple, lambda e: torch.tensor(list(e))) + ((lambda e: next(iter(e)),) if len(eos) == 1 else ()):
        got = grpo.completion_mask(torch.tensor(ids), kind(eos))
        assert got.tolist() == want and got.dtype == torch.int64


logits_lists = st.integers(1, 4).flatmap(
    lambda V: st.lists(
        st.lists(st.lists(st.floats(-30, 30), min_size=V, max_size=V), min_size=2, max_size=2), min_size=1, max_size=3
    )
)


@given(logits_lists, st.data())
def test_selective_log_softmax_and_entropy(logits, data):
    index = [[data.draw(st.integers(0, len(row) - 1)) for row in rows] for rows in logits]
    lse = lambda row: max(row) + math.log(math.fsum(math.exp(x - max(row)) for x in row))
    close(
        grpo.selective_log_softmax(f64(logits), torch.tensor(index)),
        [[row[i] - lse(row) for row, i in zip(rows, idx)] for rows, idx in zip(logits, index)],
        1e-11,
    )
    entropy = [[-math.fsum(math.exp(x - lse(row)) * (x - lse(row)) for x in row) for row in rows] for rows in logits]
    close(grpo.entropy_from_logits(f64(logits)), entropy, 1e-11)


def test_log_softmax_and_entropy_gradients_and_ruled_out_words():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    index = torch.randint(5, (2, 3))
    assert torch.autograd.gradcheck(lambda x: grpo.selective_log_softmax(x, index), logits)
    assert torch.autograd.gradcheck(grpo.entropy_from_logits, logits)
    ruled = logits.detach().clone()
    ruled[..., 2] = -inf
    ruled.requires_grad_()
    without = ruled.detach()[..., [0, 1, 3, 4]].requires_grad_()
    H = grpo.entropy_from_logits(ruled)
    close(H, grpo.entropy_from_logits(without).detach())
    H.sum().backward()
    grpo.entropy_from_logits(without).sum().backward()
    close(ruled.grad[..., [0, 1, 3, 4]], without.grad)
    assert not ruled.grad[..., 2].any()
    words = torch.tensor([[0, 1, 3], [4, 0, 1]])
    assert grpo.selective_log_softmax(ruled, words).isfinite().all()
    assert grpo.selective_log_softmax(ruled, torch.full((2, 3), 2)).eq(-inf).all()
    close(grpo.entropy_from_logits(torch.zeros(1, 1, 7, dtype=torch.float64)), [[math.log(7)]])


def causal_lm(kind):
    shape = dict(
        vocab_size=23,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    config = {
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=23, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=None, eos_token_id=1
        ),
        "llama": lambda: transformers.LlamaConfig(**shape),
        "qwen2": lambda: transformers.Qwen2Config(**shape),
        "granite (scaled logits)": lambda: transformers.GraniteConfig(**shape, logits_scaling=4.0),
        "cohere (scaled logits)": lambda: transformers.CohereConfig(**shape, logit_scale=0.3),
        "gemma3 (soft cap)": lambda: transformers.Gemma3TextConfig(**shape, final_logit_softcapping=2.0),
        "opt (nested body)": lambda: transformers.OPTConfig(
            vocab_size=23,
            hidden_size=32,
            word_embed_proj_dim=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        ),
    }[kind]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def scoring_batch():
    torch.manual_seed(1)
    P, T, prompts, answers = 4, 6, [4, 2, 1, 3], [6, 3, 0, 1]
    prompt_mask = torch.tensor([[0] * (P - n) + [1] * n for n in prompts])
    answer_mask = torch.tensor([[1] * n + [0] * (T - n) for n in answers])
    prompt_ids = torch.randint(23, (4, P)).masked_fill(prompt_mask == 0, -9)                   # garbage, no valid id
    answer_ids = torch.randint(23, (4, T)).masked_fill(answer_mask == 0, 10**6)
    return prompt_ids, prompt_mask, answer_ids, answer_mask


@pytest.mark.parametrize(
    "kind",
    ["gpt2", "llama", "qwen2", "granite (scaled logits)", "cohere (scaled logits)", "gemma3 (soft cap)", "opt (nested body)"],
)
def test_per_token_logps_are_those_of_each_row_alone(kind):
    model = causal_lm(kind)
    for name, p in model.named_parameters():  # cohere and gemma3 sum these gradients in float32
        p.requires_grad_("norm" not in name or kind[:6] not in ("cohere", "gemma3"))
    prompt_ids, prompt_mask, answer_ids, answer_mask = scoring_batch()
    weight = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    want, want_H = (torch.zeros(4, 6, dtype=torch.float64) for _ in range(2))
    for i in range(4):
        prompt, answer = prompt_ids[i][prompt_mask[i] == 1], answer_ids[i][answer_mask[i] == 1]
        logps = (model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        want[i, : len(answer)] = logps.gather(1, answer[:, None])[:, 0]
        want_H[i, : len(answer)] = -(logps.exp() * logps).sum(1).detach()
    (want * weight).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    for chunk_size in (None, 1, 3, 100):
        model.zero_grad()
        logps, entropies = grpo.per_token_logps(
            model, prompt_ids, prompt_mask, answer_ids, answer_mask, temperature=0.7, compute_entropy=True, chunk_size=chunk_size
        )
        close(logps, want.detach(), 1e-10)
        close(entropies, want_H.detach(), 1e-10)
        assert not entropies.requires_grad
        (logps * weight).sum().backward()
        for name, p in model.named_parameters():
            if p.requires_grad:
                close(p.grad, gradients[name], 1e-9)
    assert grpo.per_token_logps(model, prompt_ids, prompt_mask, answer_ids, answer_mask)[1] is None


def test_ids_may_be_int32_and_a_batch_may_be_empty():
    prompt_ids, prompt_mask, answer_ids, answer_mask = scoring_batch()
    short, model = (x.clamp(0, 22).int() for x in (prompt_ids, answer_ids)), causal_lm("llama")
    prompt_int, answer_int = short
    close(
        grpo.per_token_logps(model, prompt_int, prompt_mask, answer_int, answer_mask)[0].detach(),
        grpo.per_token_logps(model, prompt_ids, prompt_mask, answer_ids, answer_mask)[0].detach(),
    )
    logits, index = torch.randn(2, 3, 5, dtype=torch.float64), torch.tensor([[0, 1, 2], [3, 4, 0]])
    assert torch.equal(grpo.selective_log_softmax(logits, index.int()), grpo.selective_log_softmax(logits, index))
    assert grpo.selective_log_softmax(logits[:0], index[:0]).shape == (0, 3)
    steps, ends = f64([[1.0], [0.0]]), torch.tensor([[1], [0]])
    assert torch.equal(
        grpo.process_advantages(steps, ends.int(), torch.ones(2, 2), 2), grpo.process_advantages(steps, ends, torch.ones(2, 2), 2)
    )
    for loss_type in LOSS_TYPES:
        assert grpo.aggregate(torch.zeros(0, 3), torch.zeros(0, 3), loss_type=loss_type, max_completion_length=3).item() == 0.0


@pytest.mark.parametrize("vocab_size, rows", [(23, [10]), (2**23, [4, 4, 2]), (2**26, [1] * 10)])
def test_without_chunk_size_a_chunk_is_at_most_2_to_the_25_logits(vocab_size, rows):
    model, seen, body = causal_lm("llama"), [], []
    told = copy.copy(model.config)
    told.vocab_size = vocab_size
    model.config.get_text_config = lambda *args, **kwargs: told  # what sizes the chunks; the head keeps its 23 words
    model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits.numel() // 23))
    model.model.register_forward_pre_hook(lambda module, args, kwargs: body.append(kwargs), with_kwargs=True)
    logps, _ = grpo.per_token_logps(model, *scoring_batch())
    assert seen == rows and body[0]["use_cache"] is False
    logps.sum().backward()
    assert len(seen) == (1 if len(rows) == 1 else 2 * len(rows))                              # one chunk is not made twice


def test_temperature_divides_the_logits_and_one_is_the_default():
    model, batch = causal_lm("llama"), scoring_batch()
    assert torch.equal(grpo.per_token_logps(model, *batch)[0], grpo.per_token_logps(model, *batch, temperature=1.0)[0])
    hot = grpo.per_token_logps(model, *batch, temperature=2.0)[0].detach()
    with torch.no_grad():
        model.lm_head.weight /= 2.0
    close(hot, grpo.per_token_logps(model, *batch)[0].detach(), 1e-10)


def test_a_model_without_position_ids():
    torch.manual_seed(0)
    model = (
        transformers.BloomForCausalLM(
            transformers.BloomConfig(
                vocab_size=23, hidden_size=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=1, pad_token_id=0
            )
        )
        .double()
        .eval()
    )
    prompts, answers = torch.randint(23, (2, 3)), torch.randint(23, (2, 4))
    want = model(torch.cat([prompts, answers], 1)).logits[:, 2:-1].log_softmax(-1).gather(2, answers[..., None])[..., 0]
    close(grpo.per_token_logps(model, prompts, torch.ones(2, 3), answers, torch.ones(2, 4), chunk_size=3)[0].detach(), want.detach(), 1e-10)


@own_only
def test_a_model_that_goes_round_its_decoder_is_refused():
    model, forward = causal_lm("llama"), causal_lm("llama").forward
    model.forward = lambda input_ids, position_ids=None, **kwargs: forward(input_ids=input_ids)
    with pytest.raises(
        ValueError,
        match="^model: got LlamaForCausalLM.*allowed is|^model: LlamaForCausalLM does not call its get_decoder.*allowed is",
    ):
        grpo.per_token_logps(model, *scoring_batch())


def test_per_token_logps_holds_one_chunk_of_logits():
    model, seen = causal_lm("llama"), []
    model.lm_head.register_forward_hook(lambda module, args, logits: seen.append(logits.numel() // 23))
    logps, _ = grpo.per_token_logps(model, *scoring_batch(), chunk_size=3)
    assert seen == [3, 3, 3, 1]                                                               # 10 real tokens, no padding
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        logps, _ = grpo.per_token_logps(model, *scoring_batch(), chunk_size=3)
        assert not any(shape[-1:] == (23,) for shape in kept)                                 # the forward leaves no logits behind
    logps.sum().backward()
    assert seen == [3, 3, 3, 1] * 2 + seen[8:] and sorted(seen[8:]) == [1, 3, 3, 3]           # the backward makes them again


def test_per_token_logps_in_half_precision_and_without_tokens():
    model = causal_lm("qwen2").bfloat16()
    prompt_ids, prompt_mask, answer_ids, answer_mask = scoring_batch()
    assert grpo.per_token_logps(model, prompt_ids, prompt_mask, answer_ids, answer_mask)[0].dtype == torch.float32
    assert not grpo.per_token_logps(model, prompt_ids, prompt_mask, answer_ids, answer_mask * 0)[0].any()
    with pytest.raises(ValueError, match="^prompt_mask: got .*; allowed is left-padded"):
        grpo.per_token_logps(model, prompt_ids.flip(1), prompt_mask.flip(1), answer_ids, answer_mask)
    with pytest.raises(ValueError, match="^prompt_mask: got .*; allowed is left-padded"):
        grpo.per_token_logps(model, prompt_ids[:, :0], prompt_mask[:, :0], answer_ids, answer_mask)


# §4 Importance ratio and clip ----------------------------------------------------------------------------------------


@given(batches(), st.sampled_from(["token", "sequence"]))
def test_importance_ratio(batch, level):
    (logps,) = requires_grad(batch, "logps")
    ratio = grpo.importance_ratio(logps, batch["old"], batch.mask, importance_sampling_level=level)
    logs = [[a - b for a, b in zip(x, y)] for x, y in zip(batch.rows("logps"), batch.rows("old"))]
    if level == "token":
        close(ratio, batch.spread([[math.exp(d) for d in row] for row in logs], 1.0))
    else:
        close(ratio, [[math.exp(math.fsum(row) / max(len(row), 1))] for row in logs])
    ratio.sum().backward()
    assert_clean_gradient(logps, batch.mask)
    gradient = ratio.detach() if level == "token" else ratio.detach() / f64(batch.lengths).clamp(min=1)[:, None]
    close(logps.grad, gradient * (batch.mask != 0))


def test_the_sequence_ratio_of_the_guide_is_the_geometric_mean():
    old = f64([[-2.3] * 10])
    close(grpo.importance_ratio(old + 0.2, old, torch.ones(1, 10)), [[1.2214] * 10], 5e-5)
    sequence = grpo.importance_ratio(old + 0.2, old, torch.ones(1, 10), importance_sampling_level="sequence")
    close(sequence, [[math.exp(2.0) ** (1 / 10)]])                                            # not e² = 7.39
    close(grpo.clip_ratio(sequence), [[1.2]])


@given(st.lists(st.floats(0, 4), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1))
def test_clip_ratio(ratios, low, high):
    ratio = f64([ratios]).requires_grad_()
    clipped = grpo.clip_ratio(ratio, low, high)
    close(clipped, [[min(max(r, 1 - low), 1 + high) for r in ratios]])
    clipped.sum().backward()
    assert all(g == (1 - low <= r <= 1 + high) for g, r in zip(ratio.grad[0].tolist(), ratios))
    close(grpo.clip_ratio(f64([[0.5, 1.0, 1.5]])), [[0.8, 1.0, 1.2]])


def twin_clipped(r, A, low, high, delta):
    return -min((r if delta is None else min(r, delta)) * A, min(max(r, 1 - low), 1 + high) * A)


@given(batches(), st.booleans(), st.booleans(), st.floats(0, 0.5), st.floats(0, 0.5), st.one_of(st.none(), st.floats(0.5, 4)))
def test_clipped_surrogate(batch, per_token, per_sequence, low, high, delta):
    ratios = [[math.exp(a - b) for a, b in zip(x, y)] for x, y in zip(batch.rows("logps"), batch.rows("old"))]
    ratios = [[math.exp(sum(map(math.log, row)) / max(len(row), 1))] * len(row) for row in ratios] if per_sequence else ratios
    A_rows = batch.rows("tokens") if per_token else [[a] * n for a, n in zip(batch.rows("A"), batch.lengths)]
    ratio = grpo.importance_ratio(
        batch["logps"], batch["old"], batch.mask, importance_sampling_level="sequence" if per_sequence else "token"
    )
    loss = grpo.clipped_surrogate_loss(ratio, batch["tokens"] if per_token else batch["A"], epsilon_low=low, epsilon_high=high, delta=delta)
    assert loss.shape == (batch.mask[:, :1] if per_sequence and not per_token else batch.mask).shape
    want = batch.spread([[twin_clipped(r, a, low, high, delta) for r, a in zip(rs, As)] for rs, As in zip(ratios, A_rows)])
    close(torch.where(batch.mask != 0, loss, 0), want, 1e-10)


@pytest.mark.parametrize("A", [1.5, -1.5])
@pytest.mark.parametrize(
    "ratio, region", [(0.5, "below"), (0.9, "inside"), (1.0, "inside"), (1.25, "inside"), (1.5, "above"), (5.0, "far above")]
)
@pytest.mark.parametrize("delta", [None, 3.0])
def test_truth_table_of_the_clipped_gradient(A, ratio, region, delta):
    x = f64([[ratio]]).requires_grad_()
    grpo.clipped_surrogate_loss(x, f64([A]), epsilon_low=0.2, epsilon_high=0.3, delta=delta).sum().backward()
    stops = (A > 0 and ratio > 1.3) or (A < 0 and ratio < 0.8) or (A < 0 and delta is not None and ratio > delta)
    assert x.grad.item() == (0.0 if stops else -A)


def test_worked_clipping():
    A = f64([1.2400])
    close(-grpo.clipped_surrogate_loss(f64([[7.39]]), A), [[1.488]])                          # the objective; the loss is -1.488
    ratio = f64([[math.exp(0.2)]]).requires_grad_()
    grpo.clipped_surrogate_loss(ratio, A).sum().backward()
    assert ratio.grad.item() == 0.0
    ratios = torch.linspace(0.01, 5, 500, dtype=torch.float64)[:, None]
    lowest = grpo.clipped_surrogate_loss(ratios, torch.full((500,), -0.5, dtype=torch.float64)).min()
    assert lowest.item() == pytest.approx(0.4, abs=1e-12)                                     # a loss of +0.2 cannot occur at A = -0.5


@given(batches(), st.floats(0.5, 5), st.booleans())
def test_cispo(batch, cap, per_sequence):
    logps, old = requires_grad(batch, "logps", "old")
    level = "sequence" if per_sequence else "token"
    ratio = grpo.importance_ratio(logps, old, batch.mask, importance_sampling_level=level)
    loss = grpo.cispo_loss(logps, ratio, batch["A"], epsilon_high=cap)
    weights = [[math.exp(a - b) for a, b in zip(x, y)] for x, y in zip(batch.rows("logps"), batch.rows("old"))]
    weights = [[math.exp(sum(map(math.log, row)) / max(len(row), 1))] * len(row) for row in weights] if per_sequence else weights
    want = [[-min(w, cap) * A * p for w, p in zip(ws, ps)] for ws, A, ps in zip(weights, batch.rows("A"), batch.rows("logps"))]
    close(torch.where(batch.mask != 0, loss, 0), batch.spread(want), 1e-10)
    torch.where(batch.mask != 0, loss, 0).sum().backward()
    close(
        logps.grad, batch.spread([[-min(w, cap) * A for w in ws] for ws, A in zip(weights, batch.rows("A"))]), 1e-10
    )  # REINFORCE, weighted
    assert old.grad is None or not old.grad.any()


@given(batches(), st.floats(0.5, 2), st.floats(0.5, 2), st.booleans())
def test_sapo(batch, pos, neg, per_token):
    A_rows = batch.rows("tokens") if per_token else [[a] * n for a, n in zip(batch.rows("A"), batch.lengths)]
    ratio = grpo.importance_ratio(batch["logps"], batch["old"], batch.mask)
    loss = grpo.sapo_loss(ratio, batch["tokens"] if per_token else batch["A"], temperature_pos=pos, temperature_neg=neg)
    want = []
    for x, y, As in zip(batch.rows("logps"), batch.rows("old"), A_rows):
        taus = [pos if a > 0 else neg for a in As]
        want.append([-1 / (1 + math.exp(-t * (math.exp(p - q) - 1))) * 4 / t * a for p, q, a, t in zip(x, y, As, taus)])
    close(torch.where(batch.mask != 0, loss, 0), batch.spread(want), 1e-10)


def test_sapo_slope_at_one_and_defaults():
    for A in (2.0, -2.0):
        ratio = f64([[1.0]]).requires_grad_()
        grpo.sapo_loss(ratio, f64([A])).sum().backward()
        assert ratio.grad.item() == pytest.approx(-A, abs=1e-12)
    ratio = f64([[0.7], [1.9]]).requires_grad_()
    assert torch.autograd.gradcheck(lambda r: grpo.sapo_loss(r, f64([1.0, -1.0])), ratio)
    close(grpo.sapo_loss(ratio, f64([1.0, -1.0])), grpo.sapo_loss(ratio, f64([1.0, -1.0]), temperature_pos=1.0, temperature_neg=1.05))
    assert not torch.equal(grpo.sapo_loss(ratio, f64([-1.0, -1.0])), grpo.sapo_loss(ratio, f64([-1.0, -1.0]), temperature_neg=1.0))


@given(batches(), st.floats(0.5, 3))
def test_truncated_importance_ratio(batch, cap):
    old, sampled = requires_grad(batch, "old", "sampled")
    weight = grpo.truncated_importance_ratio(old, sampled, cap=cap)
    want = [[min(math.exp(a - b), cap) for a, b in zip(x, y)] for x, y in zip(batch.rows("old"), batch.rows("sampled"))]
    close(torch.where(batch.mask != 0, weight, 0), batch.spread(want))
    assert not weight.requires_grad
    assert grpo.truncated_importance_ratio(f64([[0.0]]), f64([[-9.0]])).item() == 2.0


# §5 KL ---------------------------------------------------------------------------------------------------------------

TWIN_KL = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(st.lists(st.tuples(logs, logs), min_size=1, max_size=5))
def test_kl_estimate(estimator, pairs):
    logps, ref = f64([[p for p, _ in pairs]]).requires_grad_(), f64([[q for _, q in pairs]])
    kl = grpo.kl_estimate(logps, ref, estimator=estimator)
    close(kl, [[TWIN_KL[estimator](p - q) for p, q in pairs]], 1e-11)
    kl.sum().backward()
    close(logps.grad, [[{"k1": 1.0, "k2": p - q, "k3": -math.expm1(q - p)}[estimator] for p, q in pairs]], 1e-11)
    close(grpo.kl_estimate(logps, ref), grpo.kl_estimate(logps, ref, estimator="k3"))


def test_k3_is_never_negative_in_float32():
    torch.manual_seed(0)
    for scale in (1e-8, 1e-6, 1e-4, 1e-2, 1.0, 10.0):
        logps = torch.randn(1000, 200) * scale - 1
        ref = logps + torch.randn(1000, 200) * scale
        assert (grpo.kl_estimate(logps, ref) >= 0).all()
    d = torch.randn(1000, 200) * 1e-4
    assert (torch.exp(-d) + d - 1).min() < 0                                                  # the textbook form is


def enumeration():
    """All sequences of two tokens over three words, under policies π and π_ref that depend on the first token."""
    torch.manual_seed(0)
    theta, ref = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)
    sequences = torch.tensor(list(itertools.product(range(3), repeat=2)))

    def logps(weights):                                                                       # (9, 2)
        table = weights.log_softmax(1)
        return torch.stack([table[3][sequences[:, 0]], table[sequences[:, 0], sequences[:, 1]]], 1)

    return theta, logps(theta), logps(ref)


def expectation(x, logps):
    return (logps.detach().sum(1).exp()[:, None] * x).sum()


def test_kl_estimators_in_expectation_and_gradient():
    theta, logps, ref = enumeration()
    grad = lambda x: torch.autograd.grad(x, theta, retain_graph=True)[0]
    forward = (logps.sum(1).exp() * (logps - ref).sum(1)).sum()
    value = {k: expectation(grpo.kl_estimate(logps, ref, estimator=k), logps) for k in ("k1", "k2", "k3")}
    close(value["k1"], forward.detach())
    close(value["k3"], forward.detach())
    assert abs(value["k2"].item() - forward.item()) > 1e-2                                    # biased
    # The gradients of single tokens (the last of each sequence), where "∇KL" is that of the token's distribution.
    last = {k: expectation(grpo.kl_estimate(logps, ref, estimator=k)[:, 1:], logps) for k in ("k1", "k2", "k3")}
    table, ref_table = theta[:3].log_softmax(1), enumeration()[2][:, 1].view(3, 3)
    first = logps[:, 0].detach().exp().view(3, 3)[:, 0]
    kl = (first * (table.exp() * (table - ref_table)).sum(1)).sum()
    kl_reverse = (first * (ref_table.exp() * (ref_table - table)).sum(1)).sum()
    assert grad(kl).norm() > 0.05 and (grad(kl) - grad(kl_reverse)).norm() > 0.05
    close(grad(last["k1"]), torch.zeros(4, 3, dtype=torch.float64))                           # no signal at all
    close(grad(last["k2"]), grad(kl))
    close(grad(last["k3"]), grad(kl_reverse))
    corrected = grpo.kl_estimate(logps, ref)[:, 1:] * (logps - logps.detach()).exp()[:, 1:]
    close(grad(expectation(corrected, logps)), grad(kl))
    close(grad(expectation((logps.sum(1) - logps.detach().sum(1)).exp()[:, None] * (logps - ref).detach(), logps)), grad(forward))


@pytest.mark.parametrize("bias_correction", [False, True])
def test_bias_correction_in_the_loss(bias_correction):
    theta, logps, ref = enumeration()
    grad = lambda x: torch.autograd.grad(x, theta, retain_graph=True)[0]
    first, mask = logps[::3, :1], torch.ones(3, 1)                                            # one token: its three values, by probability
    loss = sum(
        p
        * grpo.grpo_loss(
            first[i : i + 1],
            f64([0.0]),
            mask[:1],
            ref_logps=ref[::3, :1][i : i + 1],
            beta=1.0,
            use_bias_correction_kl=bias_correction,
        )[0]
        for i, p in enumerate(first.detach().exp()[:, 0])
    )
    kl = (first.exp() * (first - ref[::3, :1])).sum()
    reverse = (ref[::3, :1].exp() * (ref[::3, :1] - first)).sum()
    close(grad(loss), grad(kl if bias_correction else reverse))


@given(batches(), st.floats(0, 2))
def test_kl_penalized_rewards(batch, beta):
    (logps,) = requires_grad(batch, "logps")
    got = grpo.kl_penalized_rewards(batch["A"], logps, batch["ref"], batch.mask, beta=beta)
    want = [[-beta * (p - q) for p, q in zip(x, y)] for x, y in zip(batch.rows("logps"), batch.rows("ref"))]
    want = [row[:-1] + [row[-1] + score] if row else [] for row, score in zip(want, batch.rows("A"))]
    close(got, batch.spread(want))
    got.sum().backward()
    assert_clean_gradient(logps, batch.mask)


def test_kl_penalized_rewards_step_over_a_hole_in_the_mask():
    x, ref, mask = f64([[-1.0, nan, -2.0]]), f64([[-1.5, inf, -1.0]]), torch.tensor([[1, 0, 1]])
    close(grpo.kl_penalized_rewards(f64([3.0]), x, ref, mask, beta=0.1), [[-0.05, 0.0, 3.1]])


# §6 Masks ------------------------------------------------------------------------------------------------------------


@given(batches(), st.floats(0, 1))
def test_top_entropy_mask(batch, quantile):
    real = sorted(h for row in batch.rows("entropies") for h in row)
    got = grpo.top_entropy_mask(batch["entropies"], batch.mask, quantile)
    assert got.dtype == batch.mask.dtype and not got[batch.mask == 0].any()
    if real:
        position = (1 - quantile) * (len(real) - 1)
        below = real[math.floor(position)]
        threshold = below + (position - math.floor(position)) * (real[math.ceil(position)] - below)
        want = batch.spread([[float(h >= threshold) for h in row] for row in batch.rows("entropies")])
        unsure = batch.spread([[float(abs(h - threshold) < 1e-9) for h in row] for row in batch.rows("entropies")])
        assert ((got.double() == want) | (unsure == 1)).all()
        assert (got != 0).sum() >= max(1, math.floor(quantile * len(real)))


def test_top_entropy_mask_keeps_the_top_fifth():
    entropies = f64([[0.1, 0.9, 0.2, 0.3, 0.8], [0.4, 0.5, 0.6, 0.7, nan]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    assert grpo.top_entropy_mask(entropies, mask, 0.2).tolist() == [[0, 1, 0, 0, 1], [0, 0, 0, 0, 0]]
    assert grpo.top_entropy_mask(entropies, mask, 1.0).tolist() == mask.tolist()
    assert grpo.top_entropy_mask(entropies, mask, 0.0).tolist() == [[0, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert not grpo.top_entropy_mask(entropies, mask * 0, 0.5).any()


# §7 The aggregations -------------------------------------------------------------------------------------------------

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")


def twin_aggregate(rows, loss_type, L, items=None, batch_rows=None):
    tokens, n = sum(map(len, rows)), len(rows) if batch_rows is None else batch_rows
    total = math.fsum(x for row in rows for x in row)
    return {
        "grpo": math.fsum(math.fsum(row) / len(row) for row in rows if row) / n,
        "bnpo": total / max(tokens, 1),
        "dr_grpo": total / (n * L),
        "dapo": total / max(tokens if items is None else items, 1),
    }[loss_type]


@given(
    batches(),
    st.sampled_from(LOSS_TYPES),
    st.booleans(),
    st.integers(5, 9),
    st.one_of(st.none(), st.integers(0, 50)),
    st.one_of(st.none(), st.integers(1, 50)),
)
def test_aggregate(batch, loss_type, per_sequence, L, items, rows):
    (x,) = requires_grad(batch, "tokens")
    lists = batch.rows("tokens")
    if per_sequence:
        x = batch["A"].clone()[:, None].requires_grad_()
        lists = [[a] * n for a, n in zip(batch.rows("A"), batch.lengths)]
    options = dict(loss_type=loss_type, max_completion_length=L, num_items_in_batch=items, num_rows_in_batch=rows)
    loss = grpo.aggregate(x, batch.mask, **options)
    assert loss.shape == () and loss.item() == pytest.approx(twin_aggregate(lists, loss_type, L, items, rows), abs=1e-12)
    loss.backward()
    assert x.grad.isfinite().all()
    if not per_sequence:
        assert_clean_gradient(x, batch.mask)
        longer = torch.nn.functional.pad(x.detach(), (0, 3), value=nan), torch.nn.functional.pad(batch.mask, (0, 3))
        close(grpo.aggregate(*longer, **options), loss.detach())                              # more padding changes nothing


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@given(batches(groups=st.integers(2, 3)), st.data())
def test_any_split_gives_the_whole_value_and_gradient(loss_type, batch, data):
    options = dict(
        loss_type=loss_type,
        max_completion_length=7,
        num_items_in_batch=sum(batch.lengths),
        num_rows_in_batch=len(batch.lengths),
        beta=0.1,
        old_logps=None,
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, len(batch.lengths) - 1), max_size=3)))

    def gradient(parts):
        logps = batch["logps"].clone().requires_grad_()
        total = sum(
            grpo.grpo_loss(
                logps[a:b],
                batch["A"][a:b],
                batch.mask[a:b],
                **options | dict(ref_logps=batch["ref"][a:b], old_logps=batch["old"][a:b]),
            )[0]
            for a, b in parts
        )
        total.backward()
        return total.detach(), logps.grad

    whole, split = gradient([(0, len(batch.lengths))]), gradient(list(zip([0, *cuts], [*cuts, len(batch.lengths)])))
    close(split[0], whole[0], 1e-11)
    close(split[1], whole[1], 1e-11)


def test_bnpo_is_local():
    loss, mask = f64([[1.0, nan], [0.0, 0.0]]), torch.tensor([[1, 0], [1, 1]])
    close(grpo.aggregate(loss, mask, loss_type="bnpo"), 1 / 3)
    close((grpo.aggregate(loss[:1], mask[:1], loss_type="bnpo") + grpo.aggregate(loss[1:], mask[1:], loss_type="bnpo")) / 2, 0.5)


NOTES_LOG_RATIOS = [[0.1, 0.05, -0.1, 0.08, 0.02], [-0.05, 0.1, -0.08, 0.05], [0.08, -0.05, 0.1, 0.05, -0.08, 0.1]]


@pytest.mark.parametrize("A, expected", [
    (f64([1.225, -1.225, 0.0]), dict(grpo=-0.010313, bnpo=-0.092608, dapo=-0.092608, dr_grpo=-0.077174, rows=[-1.26537, 1.23443, 0.0])),
    (None, dict(grpo=-0.008417, bnpo=-0.075584, dapo=-0.075584, dr_grpo=-0.062986, rows=None))])
def test_the_three_completions_of_the_notes(A, expected):
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    log_ratio = f64([row + [-inf] * (6 - len(row)) for row in NOTES_LOG_RATIOS])
    A = grpo.group_advantages(f64([1.0, 0.0, 0.5]), 3) if A is None else A                    # TRL's ±0.9998
    old = torch.full((3, 6), -2.0, dtype=torch.float64)
    for loss_type in LOSS_TYPES:
        loss, metrics = grpo.grpo_loss(old + log_ratio, A, mask, old_logps=old, loss_type=loss_type, max_completion_length=6)
        assert loss.item() == pytest.approx(expected[loss_type], abs=5e-7) and metrics["clip_ratio/region_mean"] == 0.0
    ratio = grpo.importance_ratio(old + log_ratio, old, mask)
    assert ratio.min().item() == pytest.approx(0.9048, abs=5e-5) and ratio.max().item() == pytest.approx(1.1052, abs=5e-5)
    if expected["rows"]:
        rows = [
            grpo.aggregate(grpo.clipped_surrogate_loss(ratio, A)[i : i + 1], mask[i : i + 1], loss_type="grpo").item()
            for i in range(3)
        ]
        assert rows == pytest.approx(expected["rows"], abs=5e-6)
    close(grpo.aggregate(f64([[-0.3], [0.2], [0.0]]), torch.ones(3, 1), loss_type="grpo"), -0.1 / 3)


# §8 The loss ---------------------------------------------------------------------------------------------------------

loss_options = st.fixed_dictionaries(
    {
        "policy_loss": st.sampled_from(["clip", "cispo", "sapo"]),
        "importance_sampling_level": st.sampled_from(["token", "sequence"]),
        "loss_type": st.sampled_from(LOSS_TYPES),
        "beta": st.sampled_from([0.0, 0.1]),
        "use_bias_correction_kl": st.booleans(),
        "delta": st.sampled_from([None, 1.5]),
        "epsilon_low": st.sampled_from([0.2, 0.1]),
        "epsilon_high": st.sampled_from([0.2, 0.4]),
        "top_entropy_quantile": st.sampled_from([1.0, 0.5]),
        "sampling_cap": st.sampled_from([2.0, 1.1]),
        "kl_estimator": st.sampled_from(["k1", "k2", "k3"]),
    }
)


def twin_loss(batch, o, per_token, on_policy, corrected):
    rows, entropies = [], sorted(h for row in batch.rows("entropies") for h in row)
    position = (1 - o["top_entropy_quantile"]) * (len(entropies) - 1) if entropies else 0
    lo, hi = math.floor(position), math.ceil(position)
    threshold = entropies[lo] + (position - lo) * (entropies[hi] - entropies[lo]) if entropies else 0
    counts = {"low": [], "high": [], "kl": []}
    for i, n in enumerate(batch.lengths):
        logps, old = batch.rows("logps")[i], batch.rows("logps" if on_policy else "old")[i]
        d = [p - q for p, q in zip(logps, old)]
        sequence = o["importance_sampling_level"] == "sequence"
        d = [sum(d) / n] * n if sequence and n else d
        row = []
        for t in range(n):
            r, A = math.exp(d[t]), batch.rows("tokens")[i][t] if per_token else batch.rows("A")[i]
            if o["policy_loss"] == "clip":
                low, high, l = (
                    1 - o["epsilon_low"],
                    1 + o["epsilon_high"],
                    twin_clipped(r, A, o["epsilon_low"], o["epsilon_high"], o["delta"]),
                )
            elif o["policy_loss"] == "cispo":
                low, high, l = 0, o["epsilon_high"], -min(r, o["epsilon_high"]) * A * logps[t]
            else:
                tau = 1.0 if A > 0 else 1.05
                low, high, l = 0, inf, -4 / tau * A / (1 + math.exp(-tau * (r - 1)))
            if o["top_entropy_quantile"] < 1:
                l *= batch.rows("entropies")[i][t] >= threshold
            if corrected:
                l *= min(math.exp(old[t] - batch.rows("sampled")[i][t]), o["sampling_cap"])
            kl = TWIN_KL[o["kl_estimator"]](logps[t] - batch.rows("ref")[i][t]) * (r if o["use_bias_correction_kl"] else 1)
            row.append(l + o["beta"] * kl)
            counts["kl"].append(kl)
            counts["low"].append(float(r < low and A < 0))
            counts["high"].append(float(r > high and A > 0))
        rows.append(row)
    return twin_aggregate(rows, o["loss_type"], 7), {k: statistics.fmean(v) if v else 0.0 for k, v in counts.items()}


@settings(max_examples=150)
@given(batches(min_length=1), loss_options, st.booleans(), st.booleans(), st.booleans())
def test_grpo_loss(batch, o, per_token, on_policy, corrected):
    (logps,) = requires_grad(batch, "logps")
    loss, metrics = grpo.grpo_loss(
        logps,
        batch["tokens"] if per_token else batch["A"],
        batch.mask,
        old_logps=None if on_policy else batch["old"],
        ref_logps=batch["ref"],
        entropies=batch["entropies"],
        sampling_logps=batch["sampled"] if corrected else None,
        max_completion_length=7,
        **o,
    )
    want, counts = twin_loss(batch, o, per_token, on_policy, corrected)
    assert loss.item() == pytest.approx(want, abs=1e-10)
    loss.backward()
    assert_clean_gradient(logps, batch.mask)
    assert all(type(value) is float for value in metrics.values())
    assert metrics["kl"] == pytest.approx(counts["kl"], abs=1e-10)
    assert metrics["entropy"] == pytest.approx(statistics.fmean([h for row in batch.rows("entropies") for h in row]), abs=1e-10)
    if o["importance_sampling_level"] == "token":
        assert metrics["clip_ratio/low_mean"] == pytest.approx(counts["low"], abs=1e-12)
        assert metrics["clip_ratio/high_mean"] == pytest.approx(counts["high"], abs=1e-12)
    assert metrics["clip_ratio/region_mean"] == pytest.approx(metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"], abs=1e-12)


def test_gradient_of_the_loss_by_finite_differences():
    torch.manual_seed(0)
    logps, old, ref = (torch.randn(4, 3, dtype=torch.float64) * 0.5 - 2 for _ in range(3))
    mask, A = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]), f64([1.0, -1.0, 0.5, -0.5])
    for o in itertools.product(["clip", "sapo"], ["token", "sequence"], LOSS_TYPES, [None, 1.3]):
        f = lambda x: grpo.grpo_loss(
            x,
            A,
            mask,
            old_logps=old,
            ref_logps=ref,
            beta=0.3,
            policy_loss=o[0],
            importance_sampling_level=o[1],
            loss_type=o[2],
            delta=o[3],
            max_completion_length=5,
            use_bias_correction_kl=True,
        )[0]
        assert torch.autograd.gradcheck(f, logps.clone().requires_grad_())


@pytest.mark.parametrize(
    "A, r, delta, want",
    [(-1.0, 9.0, None, 9.0), (-1.0, 9.0, 3.0, 3.0), (-1.0, 0.5, 3.0, 0.8), (1.0, 9.0, 3.0, -1.2), (1.0, 0.5, 3.0, -0.5)],
)
def test_the_loss_passes_its_bounds_on(A, r, delta, want):
    x = f64([[math.log(r)]])
    close(grpo.grpo_loss(x, f64([A]), torch.ones(1, 1), old_logps=torch.zeros_like(x), delta=delta)[0], want)
    close(grpo.clipped_surrogate_loss(x.exp(), f64([A]), delta=delta), [[want]])


def test_metrics_at_the_edge_of_the_clip_and_of_one_token():
    x, mask, A = f64([[-1.0, nan, nan], [nan, nan, nan]]), torch.tensor([[1, 0, 0], [0, 0, 0]]), f64([1.0, -1.0])
    for policy_loss, low, high in (("clip", 0.0, 0.0), ("cispo", 0.0, 1.0)):                  # ρ = 1 stands on the bound: not clipped
        for sign in (1, -1):
            metrics = grpo.grpo_loss(x, sign * A, mask, policy_loss=policy_loss, epsilon_low=low, epsilon_high=high, entropies=-x)[1]
            assert metrics == {"entropy": 1.0, "clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.0, "clip_ratio/region_mean": 0.0}
    assert grpo.grpo_loss(x, A, mask, use_bias_correction_kl=True)[0].item() == -1.0          # there is no KL to correct
    close(grpo.aggregate(f64([[3.0]]), torch.ones(1, 1), loss_type="dapo", num_items_in_batch=1), 3.0)


def test_sequence_level_metrics_are_means_over_rows():
    old, mask = torch.full((4, 3), -2.0, dtype=torch.float64), torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    logps = old + f64([[0.5], [-0.5], [0.0], [-0.5]])
    _, metrics = grpo.grpo_loss(logps, f64([1.0, -1.0, 1.0, 1.0]), mask, old_logps=old, importance_sampling_level="sequence")
    assert metrics == {"clip_ratio/low_mean": 0.25, "clip_ratio/high_mean": 0.25, "clip_ratio/region_mean": 0.5}
    _, metrics = grpo.grpo_loss(logps, f64([1.0, -1.0, 1.0, 1.0]), mask, old_logps=old)
    assert metrics == {
        "clip_ratio/low_mean": pytest.approx(1 / 9),
        "clip_ratio/high_mean": pytest.approx(3 / 9),
        "clip_ratio/region_mean": pytest.approx(4 / 9),
    }


def test_on_policy_the_value_is_zero_and_the_gradient_is_reinforce():
    theta, logps, _ = enumeration()
    A = grpo.group_advantages(f64([1.0, 0.0, 0.5] * 3), 3, eps=0.0)
    loss, metrics = grpo.grpo_loss(logps, A, torch.ones(9, 2))
    assert loss.item() == pytest.approx(0.0, abs=1e-12) and metrics["clip_ratio/region_mean"] == 0.0
    got = torch.autograd.grad(loss, theta, retain_graph=True)[0]
    close(got, torch.autograd.grad(-(A[:, None] * logps).sum() / 18, theta, retain_graph=True)[0])
    assert got.norm() > 0.01
    ragged = torch.tensor([[1, 1]] * 3 + [[1, 0]] * 6)
    assert grpo.grpo_loss(logps, A * f64([2.0] * 3 + [1.0] * 6) + f64([0.5] * 3 + [-0.25] * 6), ragged)[
        0
    ].item() != pytest.approx(0.0, abs=1e-3)
    close(grpo.grpo_loss(logps, A, torch.ones(9, 2), old_logps=logps.detach())[0], loss)


def test_the_expected_gradient_is_the_policy_gradient():
    theta, logps, _ = enumeration()
    rewards = f64([1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 2.0])
    probabilities = logps.detach().sum(1).exp()
    surrogate = sum(
        p
        * grpo.grpo_loss(logps[i : i + 1], rewards[i : i + 1], torch.ones(1, 2), loss_type="dr_grpo", max_completion_length=1)[0]
        for i, p in enumerate(probabilities)
    )
    value = (logps.sum(1).exp() * rewards).sum()
    close(torch.autograd.grad(surrogate, theta, retain_graph=True)[0], -torch.autograd.grad(value, theta)[0])


def test_a_batch_without_a_token_is_zero():
    x, mask = torch.full((2, 3), nan, dtype=torch.float64, requires_grad=True), torch.zeros(2, 3)
    for loss_type, level in itertools.product(LOSS_TYPES, ("token", "sequence")):
        loss, metrics = grpo.grpo_loss(
            x,
            f64([1.0, -1.0]),
            mask,
            old_logps=x.detach(),
            ref_logps=x.detach(),
            entropies=x.detach(),
            beta=0.1,
            top_entropy_quantile=0.5,
            loss_type=loss_type,
            importance_sampling_level=level,
            max_completion_length=3,
        )
        loss.backward()
        assert loss.item() == 0.0 and set(metrics.values()) == {0.0} and not x.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes_are_kept(dtype):
    x, mask, A = torch.full((4, 3), -1.0, dtype=dtype), torch.ones(4, 3), torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=dtype)
    results = [
        *grpo.group_stats(A, 2),
        grpo.group_advantages(A, 2),
        grpo.group_advantages(A, 2, scale_rewards="batch"),
        grpo.leave_one_out_advantages(A, 2),
        grpo.process_advantages(x, torch.zeros(4, 3, dtype=torch.long), mask, 2),
        *grpo.gae_advantages(x, x, mask),
        grpo.broadcast_advantages(A, mask),
        grpo.combine_rewards(x, [1.0, 2.0, 3.0]),
        grpo.selective_log_softmax(x[None], torch.zeros(1, 4, dtype=torch.long)),
        grpo.entropy_from_logits(x[None]),
        grpo.importance_ratio(x, x, mask),
        grpo.clip_ratio(x),
        grpo.clipped_surrogate_loss(x, A),
        grpo.cispo_loss(x, x, A),
        grpo.sapo_loss(x, A),
        grpo.truncated_importance_ratio(x, x),
        grpo.kl_estimate(x, x),
        grpo.kl_penalized_rewards(A, x, x, mask, beta=0.1),
        grpo.top_entropy_mask(-x, mask.to(dtype), 0.5),
        *(grpo.aggregate(x, mask, loss_type=kind, max_completion_length=3) for kind in LOSS_TYPES),
        grpo.grpo_loss(x, A, mask)[0],
    ]
    assert {result.dtype for result in results} == {dtype}


# Wrong input ---------------------------------------------------------------------------------------------------------

DEFAULTS = {  # part of the contract: what a call without options computes
    "group_stats": dict(correction=1),
    "group_advantages": dict(scale_rewards="group", correction=1, eps=1e-4),
    "process_advantages": dict(correction=1, eps=1e-4),
    "gae_advantages": dict(gamma=1.0, lam=0.95),
    "per_token_logps": dict(temperature=1.0, compute_entropy=False),
    "importance_ratio": dict(importance_sampling_level="token"),
    "clip_ratio": dict(epsilon_low=0.2, epsilon_high=0.2),
    "clipped_surrogate_loss": dict(epsilon_low=0.2, epsilon_high=0.2, delta=None),
    "cispo_loss": dict(epsilon_high=5.0),
    "sapo_loss": dict(temperature_pos=1.0, temperature_neg=1.05),
    "truncated_importance_ratio": dict(cap=2.0),
    "kl_estimate": dict(estimator="k3"),
    "aggregate": dict(max_completion_length=None, num_items_in_batch=None, num_rows_in_batch=None),
    "grpo_loss": dict(
        old_logps=None,
        ref_logps=None,
        entropies=None,
        sampling_logps=None,
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        delta=None,
        loss_type="dapo",
        importance_sampling_level="token",
        policy_loss="clip",
        top_entropy_quantile=1.0,
        kl_estimator="k3",
        use_bias_correction_kl=False,
        sampling_cap=2.0,
        max_completion_length=None,
        num_items_in_batch=None,
        num_rows_in_batch=None,
    ),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    parameters = inspect.signature(getattr(grpo, name)).parameters
    assert {key: parameters[key].default for key in DEFAULTS[name]} == DEFAULTS[name]


X, M, V = torch.zeros(4, 3), torch.ones(4, 3), torch.zeros(4)
IDS = torch.zeros(4, 3, dtype=torch.long)
WRONG = [  # the argument that the message must name, and the call
    ("rewards", lambda: grpo.group_stats(X, 2)),
    ("rewards", lambda: grpo.group_stats([1.0, 2.0], 2)),
    ("rewards", lambda: grpo.group_stats(IDS[:, 0], 2)),
    ("num_generations", lambda: grpo.group_stats(V, 3)),
    ("num_generations", lambda: grpo.group_stats(V, 1)),
    ("num_generations", lambda: grpo.group_stats(V, 0)),
    ("num_generations", lambda: grpo.group_stats(V, 2.0)),
    ("correction", lambda: grpo.group_stats(V, 2, correction=-1)),
    ("correction", lambda: grpo.group_stats(V, 2, correction=nan)),
    ("num_generations", lambda: grpo.group_advantages(V, 3)),
    ("num_generations", lambda: grpo.group_advantages(V, 1)),
    ("num_generations", lambda: grpo.group_advantages(V, -2)),
    ("eps", lambda: grpo.group_advantages(V, 2, eps=-1e-4)),
    ("eps", lambda: grpo.group_advantages(V, 2, eps=nan)),
    ("scale_rewards", lambda: grpo.group_advantages(V, 2, scale_rewards="std")),
    ("scale_rewards", lambda: grpo.group_advantages(V, 2, scale_rewards=True)),
    ("rewards", lambda: grpo.group_advantages(V.to(torch.complex64), 2)),
    ("num_generations", lambda: grpo.leave_one_out_advantages(V, 1)),
    ("num_generations", lambda: grpo.leave_one_out_advantages(V, 3)),
    ("rewards", lambda: grpo.leave_one_out_advantages(X, 2)),
    ("step_ends", lambda: grpo.process_advantages(X, X, M, 2)),
    ("step_ends", lambda: grpo.process_advantages(X, IDS[:, :2], M, 2)),
    ("step_ends", lambda: grpo.process_advantages(X, IDS + 3, M, 2)),
    ("step_ends", lambda: grpo.process_advantages(X, IDS - 1, M, 2)),
    ("completion_mask", lambda: grpo.process_advantages(X, IDS, M[:2], 2)),
    ("num_generations", lambda: grpo.process_advantages(X, IDS, M, 3)),
    ("eps", lambda: grpo.process_advantages(X, IDS, M, 2, eps=nan)),
    ("correction", lambda: grpo.process_advantages(X, IDS, M, 2, correction=nan)),
    ("correction", lambda: grpo.group_advantages(V, 2, correction=nan)),
    ("step_ends", lambda: grpo.process_advantages(X, torch.tensor([[0, 1, 2]] * 3 + [[0, 1, 3]]), M, 2)),
    ("advantages", lambda: grpo.clipped_surrogate_loss(X[:, :1], V[:3])),
    ("ratio", lambda: grpo.cispo_loss(X, X[:3, :1], V)),
    ("advantages", lambda: grpo.sapo_loss(X[:, :1], V[:3])),
    ("completion_mask", lambda: grpo.aggregate(X[:3, :1], M, loss_type="grpo")),
    ("entropies", lambda: grpo.grpo_loss(X, V, M, entropies=V)),
    ("epsilon_low", lambda: grpo.grpo_loss(X, V, M, policy_loss="sapo", epsilon_low=nan)),
    ("epsilon_high", lambda: grpo.grpo_loss(X, V, M, policy_loss="sapo", epsilon_high=nan)),
    ("delta", lambda: grpo.grpo_loss(X, V, M, policy_loss="sapo", delta=nan)),
    ("advantages", lambda: grpo.grpo_loss(X, torch.zeros(5, 3), M)),
    ("step_rewards", lambda: grpo.process_advantages(V, IDS, M, 2)),
    ("values", lambda: grpo.gae_advantages(X, X[:, :2], M)),
    ("gamma", lambda: grpo.gae_advantages(X, X, M, gamma=1.1)),
    ("lam", lambda: grpo.gae_advantages(X, X, M, lam=-0.1)),
    ("completion_mask", lambda: grpo.gae_advantages(X, X, M[:, :2])),
    ("lam", lambda: grpo.gae_advantages(X, X, M, lam=nan)),
    ("advantages", lambda: grpo.broadcast_advantages(X, M)),
    ("completion_mask", lambda: grpo.broadcast_advantages(V, M[:3])),
    ("rewards_per_func", lambda: grpo.combine_rewards(V)),
    ("reward_weights", lambda: grpo.combine_rewards(X, [1.0, 2.0])),
    ("reward_weights", lambda: grpo.combine_rewards(X, [1.0, nan, 1.0])),
    ("soft_punish_cache", lambda: grpo.get_soft_overlong_punishment(5, 6)),
    ("soft_punish_cache", lambda: grpo.get_soft_overlong_punishment(5, -1)),
    ("max_completion_len", lambda: grpo.get_soft_overlong_punishment(-5, 0)),
    ("completion_ids", lambda: grpo.completion_mask(X, 1)),
    ("completion_ids", lambda: grpo.completion_mask([[1]], 1)),
    ("eos_token_ids", lambda: grpo.completion_mask(IDS, None)),
    ("completion_ids", lambda: grpo.completion_mask(IDS.to(torch.complex64), 1)),
    ("estimator", lambda: grpo.kl_estimate(X, X, estimator=3)),
    ("estimator", lambda: grpo.kl_estimate(X, X, estimator=V.numpy())),
    ("loss_type", lambda: grpo.aggregate(X, M, loss_type=None)),
    ("eos_token_ids", lambda: grpo.completion_mask(IDS, 1.5)),
    ("completion_ids", lambda: grpo.completion_mask(IDS[0], 1)),
    ("index", lambda: grpo.selective_log_softmax(X[None], IDS)),
    ("index", lambda: grpo.selective_log_softmax(X[None], X[:1])),
    ("logits", lambda: grpo.selective_log_softmax(X, IDS)),
    ("logits", lambda: grpo.entropy_from_logits(X)),
    ("logits", lambda: grpo.entropy_from_logits(IDS[None])),
    ("old_logps", lambda: grpo.importance_ratio(X, X[:2], M)),
    ("completion_mask", lambda: grpo.importance_ratio(X, X, M[:, :1])),
    ("logps", lambda: grpo.importance_ratio(V, X, M)),
    ("importance_sampling_level", lambda: grpo.importance_ratio(X, X, M, importance_sampling_level="word")),
    ("ratio", lambda: grpo.clip_ratio(V)),
    ("epsilon_low", lambda: grpo.clip_ratio(X, -0.1)),
    ("epsilon_high", lambda: grpo.clip_ratio(X, 0.1, nan)),
    ("epsilon_high", lambda: grpo.clip_ratio(X, 0.1, "0.2")),
    ("advantages", lambda: grpo.clipped_surrogate_loss(X, V[:3])),
    ("advantages", lambda: grpo.clipped_surrogate_loss(X, X[:, :1])),
    ("advantages", lambda: grpo.clipped_surrogate_loss(X, torch.zeros(3))),
    ("epsilon_low", lambda: grpo.clipped_surrogate_loss(X, V, epsilon_low=-1)),
    ("epsilon_high", lambda: grpo.clipped_surrogate_loss(X, V, epsilon_high=nan)),
    ("delta", lambda: grpo.clipped_surrogate_loss(X, V, delta=0)),
    ("delta", lambda: grpo.clipped_surrogate_loss(X, V, delta=nan)),
    ("ratio", lambda: grpo.clipped_surrogate_loss(V, V)),
    ("ratio", lambda: grpo.cispo_loss(X, X[:, :2], V)),
    ("ratio", lambda: grpo.cispo_loss(X, X[:3], V)),
    ("epsilon_high", lambda: grpo.cispo_loss(X, X, V, epsilon_high=-1)),
    ("advantages", lambda: grpo.cispo_loss(X, X, V[:2])),
    ("logps", lambda: grpo.cispo_loss(V, X, V)),
    ("temperature_pos", lambda: grpo.sapo_loss(X, V, temperature_pos=0)),
    ("temperature_neg", lambda: grpo.sapo_loss(X, V, temperature_neg=nan)),
    ("advantages", lambda: grpo.sapo_loss(X, V[:2])),
    ("ratio", lambda: grpo.sapo_loss(V, V)),
    ("cap", lambda: grpo.truncated_importance_ratio(X, X, cap=0)),
    ("sampling_logps", lambda: grpo.truncated_importance_ratio(X, V)),
    ("old_logps", lambda: grpo.truncated_importance_ratio(V, V)),
    ("estimator", lambda: grpo.kl_estimate(X, X, estimator="k4")),
    ("ref_logps", lambda: grpo.kl_estimate(X, X[:, :1])),
    ("logps", lambda: grpo.kl_estimate(V, V)),
    ("scores", lambda: grpo.kl_penalized_rewards(X, X, X, M, beta=0.1)),
    ("beta", lambda: grpo.kl_penalized_rewards(V, X, X, M, beta=-1)),
    ("ref_logps", lambda: grpo.kl_penalized_rewards(V, X, V, M, beta=1)),
    ("logps", lambda: grpo.kl_penalized_rewards(V, V, X, M, beta=1)),
    ("completion_mask", lambda: grpo.kl_penalized_rewards(V, X, X, V, beta=1)),
    ("quantile", lambda: grpo.top_entropy_mask(X, M, 1.5)),
    ("quantile", lambda: grpo.top_entropy_mask(X, M, nan)),
    ("entropies", lambda: grpo.top_entropy_mask(V, M, 0.5)),
    ("completion_mask", lambda: grpo.top_entropy_mask(X, M[:2], 0.5)),
    ("loss_type", lambda: grpo.aggregate(X, M, loss_type="mean")),
    ("max_completion_length", lambda: grpo.aggregate(X, M, loss_type="dr_grpo")),
    ("completion_mask", lambda: grpo.aggregate(X, M[:, :2], loss_type="grpo")),
    ("max_completion_length", lambda: grpo.aggregate(X, M, loss_type="grpo", max_completion_length=0)),
    ("num_items_in_batch", lambda: grpo.aggregate(X, M, loss_type="dapo", num_items_in_batch=-1)),
    ("num_rows_in_batch", lambda: grpo.aggregate(X, M, loss_type="grpo", num_rows_in_batch=0)),
    ("per_token_loss", lambda: grpo.aggregate(V, M, loss_type="grpo")),
    ("ref_logps", lambda: grpo.grpo_loss(X, V, M, beta=0.1)),
    ("entropies", lambda: grpo.grpo_loss(X, V, M, top_entropy_quantile=0.5)),
    ("beta", lambda: grpo.grpo_loss(X, V, M, beta=nan)),
    ("advantages", lambda: grpo.grpo_loss(X, V[:3], M)),
    ("old_logps", lambda: grpo.grpo_loss(X, V, M, old_logps=V)),
    ("policy_loss", lambda: grpo.grpo_loss(X, V, M, policy_loss="ppo")),
    ("kl_estimator", lambda: grpo.grpo_loss(X, V, M, kl_estimator="k9")),
    ("sampling_cap", lambda: grpo.grpo_loss(X, V, M, sampling_cap=0)),
    ("delta", lambda: grpo.grpo_loss(X, V, M, delta=-1)),
    ("epsilon_low", lambda: grpo.grpo_loss(X, V, M, epsilon_low=nan)),
    ("epsilon_high", lambda: grpo.grpo_loss(X, V, M, epsilon_high=-1)),
    ("logps", lambda: grpo.grpo_loss(V, V, M)),
    ("completion_mask", lambda: grpo.grpo_loss(X, V, V)),
    ("sampling_logps", lambda: grpo.grpo_loss(X, V, M, sampling_logps=V)),
    ("max_completion_length", lambda: grpo.grpo_loss(X, V, M, loss_type="dr_grpo")),
    ("loss_type", lambda: grpo.grpo_loss(X, V, M, loss_type="x")),
    ("importance_sampling_level", lambda: grpo.grpo_loss(X, V, M, importance_sampling_level="x")),
    ("top_entropy_quantile", lambda: grpo.grpo_loss(X, V, M, top_entropy_quantile=-0.1, entropies=X)),
    ("temperature", lambda: grpo.per_token_logps(None, IDS, M, IDS, M, temperature=0)),
    ("completion_ids", lambda: grpo.per_token_logps(None, IDS, M, X, M)),
    ("completion_mask", lambda: grpo.per_token_logps(None, IDS, M, IDS, M[:2])),
    ("chunk_size", lambda: grpo.per_token_logps(None, IDS, M, IDS, M, chunk_size=0)),
    ("prompt_ids", lambda: grpo.per_token_logps(None, X, M, IDS, M)),
    ("prompt_mask", lambda: grpo.per_token_logps(None, IDS, M[:, :2], IDS, M)),
]


@pytest.mark.parametrize("name, call", WRONG, ids=[f"{i}-{name}" for i, (name, _) in enumerate(WRONG)])
def test_wrong_input_is_named(name, call):
    with pytest.raises(ValueError, match=rf"^{name}: got .*allowed is ." if OWN else name):
        call()


@own_only
def test_messages_say_what_came_and_what_is_allowed():
    for call, message in [
        (lambda: grpo.group_stats(torch.zeros(5), 2), "num_generations: got int 2; allowed is a number that divides B = 5"),
        (
            lambda: grpo.process_advantages(X, torch.tensor([[0, 1, 3]] * 4), M, 2),
            "step_ends: got 0 ... 3; allowed is 0 ... T-1 = 2",
        ),
        (lambda: grpo.group_stats(V, 2, correction=2), "num_generations: got 2 with correction = 2; allowed is a larger one"),
        (
            lambda: grpo.group_advantages(V, 2, correction=2),
            "num_generations: got 2 with correction = 2; allowed is a larger one",
        ),
        (
            lambda: grpo.leave_one_out_advantages(V, 1),
            "num_generations: got 1; allowed is 2 or more, there must be others to compare with",
        ),
        (lambda: grpo.combine_rewards(X, [1.0, 2.0, inf]), "reward_weights: got [1.0, 2.0, inf]; allowed is finite numbers"),
        (lambda: grpo.get_soft_overlong_punishment(5, 6), "soft_punish_cache: got 6; allowed is at most max_completion_len = 5"),
        (
            lambda: grpo.clipped_surrogate_loss(X, torch.zeros(3)),
            "advantages: got dtype torch.float32, shape (3,); allowed is a tensor of dtype floating-point and shape (B=4) or (B=4, T=3)",
        ),
        (
            lambda: grpo.clipped_surrogate_loss(V, V),
            "ratio: got dtype torch.float32, shape (4,); allowed is a tensor of dtype floating-point and shape (B, 1) or (B, T)",
        ),
        (lambda: grpo.clipped_surrogate_loss(X, V, delta=-1), "delta: got int -1; allowed is a number > 0"),
        (lambda: grpo.clip_ratio(X, torch.tensor(-0.5)), "epsilon_low: got Tensor tensor(-0.5000); allowed is a number >= 0"),
        (lambda: grpo.kl_estimate(X, X, estimator="k4"), "estimator: got str 'k4'; allowed is 'k1' or 'k2' or 'k3'"),
        (lambda: grpo.aggregate(X, M, loss_type="dr_grpo"), "max_completion_length: got NoneType None; allowed is a number > 0"),
        (
            lambda: grpo.completion_mask(X, 1),
            "completion_ids: got dtype torch.float32, shape (4, 3); allowed is a tensor of dtype int and shape (B, T)",
        ),
    ]:
        with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
            call()


# The file itself -----------------------------------------------------------------------------------------------------

MATHS = """accuracy_reward think_format_reward get_soft_overlong_punishment combine_rewards group_stats group_advantages leave_one_out_advantages process_advantages
gae_advantages broadcast_advantages completion_mask selective_log_softmax entropy_from_logits per_token_logps importance_ratio clip_ratio clipped_surrogate_loss cispo_loss
sapo_loss truncated_importance_ratio kl_estimate kl_penalized_rewards top_entropy_mask aggregate grpo_loss""".split()


@own_only
def test_each_function_can_be_pasted_alone():
    """With `import torch` and _check; grpo_loss, which puts the others together, with the six that it calls."""
    source = {name: inspect.getsource(getattr(grpo.module, name)) for name in [*MATHS, "_check"]}

    def alone(name, *more):
        space = {"torch": torch}
        exec("\n\n".join(source[n] for n in ("_check", name, *more)), space)
        return space[name]

    model, mask, A = causal_lm("llama"), torch.ones(4, 3), f64([1.0, 0.0, 1.0, 0.5])
    x = torch.linspace(-2, -0.1, 12, dtype=torch.float64).view(4, 3)
    calls = {
        "accuracy_reward": (["4"], ["4"]),
        "think_format_reward": (["<think>a</think>b"],),
        "combine_rewards": (x,),
        "group_stats": (A, 2),
        "group_advantages": (A, 2),
        "leave_one_out_advantages": (A, 2),
        "process_advantages": (x, IDS, mask, 2),
        "gae_advantages": (x, x, mask),
        "broadcast_advantages": (A, mask),
        "completion_mask": (IDS, 1),
        "selective_log_softmax": (x[None], IDS[:, :1].view(1, 4)),
        "entropy_from_logits": (x[None],),
        "per_token_logps": (model, *scoring_batch()),
        "importance_ratio": (x, x - 1, mask),
        "clip_ratio": (x,),
        "clipped_surrogate_loss": (x, A),
        "cispo_loss": (x, x, A),
        "sapo_loss": (x, A),
        "truncated_importance_ratio": (x, x - 0.1),
        "kl_estimate": (x, x - 1),
        "top_entropy_mask": (-x, mask, 0.5),
    }
    for name, arguments in calls.items():
        got, want = alone(name)(*arguments), getattr(grpo, name)(*arguments)
        for a, b in zip(got, want) if isinstance(got, (tuple, list)) else [(got, want)]:
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert alone("get_soft_overlong_punishment")(4, 2)(completion_ids=[[1] * 3]) == [-0.5]
    assert torch.equal(alone("kl_penalized_rewards")(A, x, x - 1, mask, beta=0.1), grpo.kl_penalized_rewards(A, x, x - 1, mask, beta=0.1))
    assert torch.equal(alone("aggregate")(x, mask, loss_type="grpo"), grpo.aggregate(x, mask, loss_type="grpo"))
    parts = (
        "importance_ratio",
        "clipped_surrogate_loss",
        "cispo_loss",
        "sapo_loss",
        "truncated_importance_ratio",
        "kl_estimate",
        "top_entropy_mask",
        "aggregate",
    )
    assert torch.equal(alone("grpo_loss", *parts)(x, A, mask)[0], grpo.grpo_loss(x, A, mask)[0])


@own_only
def test_a_function_that_a_students_file_lacks_is_skipped_by_name(tmp_path):
    (tmp_path / "my_grpo.py").write_text("def kl_estimate(logps, ref_logps, *, estimator='k3'):\n    return logps\n")
    student = ModuleUnderTest(str(tmp_path / "my_grpo.py"))
    assert student.kl_estimate(1, 2) == 1
    with pytest.raises(pytest.skip.Exception, match="my_grpo has no grpo_loss"):
        student.grpo_loss


# Parity with TRL, where it is installed ------------------------------------------------------------------------------


def trl_loss(batch, o, L):
    """TRL's own _compute_loss on a stub of its trainer: the value and the gradient with respect to log π_θ."""
    trainer_class = pytest.importorskip("trl").GRPOTrainer
    pad = lambda x: torch.where(batch.mask != 0, x, -1.0)
    logps = pad(batch["logps"]).requires_grad_()
    stub = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, pad(batch["entropies"]), None),
        top_entropy_quantile=o["top_entropy_quantile"],
        beta=o["beta"],
        off_policy_mask_threshold=None,
        importance_sampling_level=o["importance_sampling_level"],
        epsilon_low=o["epsilon_low"],
        epsilon_high=o["epsilon_high"],
        loss_type=o["loss_type"] if o["policy_loss"] == "clip" else o["policy_loss"],
        use_vllm=o["corrected"],
        vllm_importance_sampling_correction=True,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=L,
        current_gradient_accumulation_steps=1,
        model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(
            use_bias_correction_kl=o["use_bias_correction_kl"],
            delta=o["delta"],
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, pad_across_processes=lambda x, **k: x
        ),
        _metrics={"train": __import__("collections").defaultdict(list)},
    )
    stub.get_high_entropy_mask = types.MethodType(inspect.unwrap(trainer_class.get_high_entropy_mask), stub)
    ids, mask = torch.zeros(batch.mask.shape, dtype=torch.long), batch.mask.double()
    inputs = dict(
        prompt_ids=ids,
        prompt_mask=ids + 1,
        completion_ids=ids,
        completion_mask=mask,
        advantages=batch["A"],
        old_per_token_logps=pad(batch["old"]),
        ref_per_token_logps=pad(batch["ref"]),
        num_items_in_batch=mask.sum(),
        importance_sampling_ratio=(pad(batch["old"]) - pad(batch["sampled"])).exp().clamp(max=2.0),
    )
    torch.set_default_dtype(torch.float64)  # TRL makes sapo's temperatures in the default dtype
    try:
        loss = inspect.unwrap(trainer_class._compute_loss)(stub, stub.model, inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    return loss.item(), logps.grad, {name: values[-1] for name, values in stub._metrics["train"].items()}


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@settings(max_examples=1000)
@given(batches(min_length=1), loss_options.map(lambda o: o | {"kl_estimator": "k3", "sampling_cap": 2.0}), st.booleans())
def test_parity_with_trl(batch, o, corrected):
    o = o | {"corrected": corrected} | {"cispo": {"loss_type": "dapo"}, "sapo": {"loss_type": "grpo"}}.get(o["policy_loss"], {})
    if o["top_entropy_quantile"] < 1:       # TRL's threshold is of float32: on a grid, rounding does not decide who reaches it
        batch.tensors["entropies"] = (batch["entropies"] * 64).round() / 64
    want, gradient, trl_metrics = trl_loss(batch, o, 7)
    (logps,) = requires_grad(batch, "logps")
    loss, metrics = grpo.grpo_loss(
        logps,
        batch["A"],
        batch.mask,
        old_logps=batch["old"],
        ref_logps=batch["ref"],
        entropies=batch["entropies"],
        sampling_logps=batch["sampled"] if corrected else None,
        max_completion_length=7,
        **{k: v for k, v in o.items() if k != "corrected"},
    )
    loss.backward()
    assert loss.item() == pytest.approx(want, abs=1e-10)
    close(logps.grad, gradient, 1e-10)
    shared = set(metrics) & set(trl_metrics)
    assert shared >= {"entropy"} | ({"kl"} if o["beta"] else set()) | (
        {"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"} if o["policy_loss"] == "clip" else set()
    )
    for name in shared:
        assert metrics[name] == pytest.approx(trl_metrics[name], abs=1e-6), name


# §9 Sampling ---------------------------------------------------------------------------------------------------------

TINY_SHAPE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  max_position_embeddings=64, bos_token_id=None, eos_token_id=1, pad_token_id=0)


def make_model(kind, vocab_size=20):
    """A causal LM of random weights, large enough that its distributions are far from uniform."""
    torch.manual_seed(0)
    shape = dict(TINY_SHAPE, vocab_size=vocab_size)
    config = {"gpt2": lambda: transformers.GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=64,
                                                      bos_token_id=None, eos_token_id=1, pad_token_id=0),
              "llama": lambda: transformers.LlamaConfig(**shape), "qwen2": lambda: transformers.Qwen2Config(**shape)}[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


PROMPT_IDS = torch.tensor([[-7, -7, 5, 6], [7, 8, 9, 10], [-7, 3, 4, 5]])                 # garbage where the mask is 0
PROMPT_MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


def sample(model, eos=(1, 2), pad=0, temperature=0.7, G=8, T=12, rows=slice(None), seed=0):
    uniforms = torch.rand(len(PROMPT_IDS), G, T, generator=torch.Generator().manual_seed(seed))[rows].flatten(0, 1)
    return grpo.generate(model, PROMPT_IDS[rows], PROMPT_MASK[rows], max_completion_length=T, eos_token_ids=list(eos), num_generations=G,
                         pad_token_id=pad, temperature=temperature, uniforms=uniforms), uniforms


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
@pytest.mark.parametrize("pad", [0, 1], ids=["pad", "pad is EOS"])
def test_recorded_logps_and_entropies_are_the_scorers(kind, pad):
    model = make_model(kind)
    (ids, mask, logps, entropies), _ = sample(model, pad=pad)
    scored, scored_entropies = grpo.per_token_logps(
        model, PROMPT_IDS.repeat_interleave(8, 0), PROMPT_MASK.repeat_interleave(8, 0), ids, mask, temperature=0.7, compute_entropy=True)
    assert 3 * mask.sum(1).min() < mask.sum(1).max()                # ragged, or nothing is tested
    torch.testing.assert_close(logps, scored.detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(entropies, scored_entropies, atol=2e-5, rtol=0)
    assert torch.equal(mask, grpo.completion_mask(ids, [1, 2])) and (ids[mask == 0] == pad).all()


def test_each_token_is_where_its_uniform_number_falls():
    model = make_model("llama")
    (ids, mask, _, _), uniforms = sample(model)
    for i in range(len(ids)):
        n, prompt = int(mask[i].sum()), PROMPT_IDS[i // 8][PROMPT_MASK[i // 8] == 1]
        logits = model(torch.cat([prompt, ids[i, :n]])[None]).logits[0, len(prompt) - 1 : -1]
        cdf = torch.cat([torch.zeros(n, 1), (logits / 0.7).softmax(-1).cumsum(-1)], 1)
        low, high = cdf.gather(1, ids[i, :n, None])[:, 0], cdf.gather(1, ids[i, :n, None] + 1)[:, 0]
        assert (low - 1e-5 <= uniforms[i, :n]).all() and (uniforms[i, :n] <= high + 1e-5).all()


def test_a_sample_depends_on_its_own_prompt_and_numbers_alone():
    model = make_model("gpt2")
    (whole, *_), _ = sample(model)
    for rows in (slice(0, 1), slice(1, 3)):
        (part, *_), _ = sample(model, rows=rows)
        assert torch.equal(part, whole[rows.start * 8 : rows.stop * 8, : part.size(1)])


def test_equal_prefixes_pass_the_model_once_and_ended_samples_leave():
    model, calls = make_model("llama"), []
    model.model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    (ids, mask, _, _), _ = sample(model)
    distinct = [len({(i // 8, *ids[i, :t].tolist()) for i in range(24) if mask[i, t]}) for t in range(mask.size(1))]
    assert calls == [(rows, 4 if t == 0 else 1) for t, rows in enumerate(distinct)]
    live = mask.sum(0).tolist()
    assert distinct[0] == 3 < distinct[1] < live[1] and distinct[2] > distinct[1] and live[-1] < 24   # they part, and they leave


@pytest.mark.parametrize("static_cache", [False, True])
def test_a_process_whose_samples_have_ended_keeps_step_with_the_others(static_cache, monkeypatch):
    model, calls = make_model("llama"), []
    options = dict(max_completion_length=12, eos_token_ids=list(range(2, 20)), num_generations=2, uniforms=torch.rand(6, 12))
    alone = grpo.generate(model, PROMPT_IDS, PROMPT_MASK, **options, static_cache=static_cache)
    monkeypatch.setattr(grpo.module, "all_reduce", lambda x: x + 1)                       # elsewhere, a sample always goes on
    model.model.register_forward_pre_hook(lambda *a: calls.append(1))
    kept = grpo.generate(model, PROMPT_IDS, PROMPT_MASK, **options, static_cache=static_cache)
    n = alone[0].size(1)
    assert len(calls) == 12 > n + 2 and all(torch.equal(a, b[:, :n]) and not b[:, n:].any() for a, b in zip(alone, kept))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_a_static_cache_gives_the_same_samples(kind):
    model, (ids, mask) = make_model(kind), (torch.randint(2, 20, (3, 6)), torch.ones(3, 6).long())
    mask[0, :3] = 0
    options = dict(max_completion_length=20, eos_token_ids=[1, 5, 7], num_generations=4, uniforms=torch.rand(12, 20), temperature=0.8)
    widths = []
    model.register_forward_pre_hook(lambda module, args, kwargs: widths.append(kwargs["attention_mask"].shape), with_kwargs=True)
    dynamic, static = (
        grpo.generate(model, ids, mask, **options),
        (widths.clear(), grpo.generate(model, ids, mask, **options, static_cache=True))[1],
    )
    assert torch.equal(dynamic[0], static[0]) and torch.equal(dynamic[1], static[1])
    for a, b in zip(dynamic[2:], static[2:]):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=0)
    assert {width for _, width in widths[1:]} == {26} and len({rows for rows, _ in widths}) >= 3     # one shape until rows leave


def test_a_sliding_window_keeps_its_own_cache():
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**TINY_SHAPE, vocab_size=20, sliding_window=8)).eval()
    options = dict(max_completion_length=12, eos_token_ids=1, num_generations=2, uniforms=torch.rand(4, 12))
    ids, mask = torch.randint(2, 20, (2, 6)), torch.ones(2, 6).long()
    assert torch.equal(grpo.generate(model, ids, mask, **options)[0], grpo.generate(model, ids, mask, **options, static_cache=True)[0])


def test_a_cuda_graph_is_recorded_after_a_warm_up_and_leaves_the_lengths_alone(monkeypatch):
    """The protocol, with stand-ins for the GPU: a graph replays what was called while it recorded."""
    events, length, output = [], torch.tensor(7), torch.zeros(2)

    class Graph:
        def replay(self):
            events.append("replay")
            forward()

    def forward():
        events.append("forward")
        length.add_(1)
        return output.add_(1)

    @contextlib.contextmanager
    def during(what):
        events.append("record" if isinstance(what, Graph) else what)
        yield
        events.append("end")

    for name, stand_in in (
        ("Stream", lambda: "side stream"),
        ("stream", during),
        ("synchronize", lambda: events.append("wait")),
        ("CUDAGraph", Graph),
        ("graph", during),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    launch = grpo.cuda_graph(forward, [length])
    assert events == ["wait", "side stream", "forward", "end", "wait", "record", "forward", "end"] and length == 7
    assert launch() is output and length == 8 and events[-2:] == ["replay", "forward"]


def test_greedy_takes_the_most_likely_word():
    model = make_model("qwen2")
    ids, mask, logps, _ = grpo.generate(model, PROMPT_IDS, PROMPT_MASK, max_completion_length=5, eos_token_ids=1)
    for i in range(3):
        row = PROMPT_IDS[i][PROMPT_MASK[i] == 1]
        for t in range(int(mask[i].sum())):
            logits = model(row[None]).logits[0, -1]
            assert ids[i, t] == logits.argmax()
            torch.testing.assert_close(logps[i, t], logits.log_softmax(0).max(), atol=2e-5, rtol=0)
            row = torch.cat([row, ids[i, t : t + 1]])


# §10 Training --------------------------------------------------------------------------------------------------------


def test_bradley_terry():
    chosen, rejected = torch.tensor([1.0, 0.0, -2.0]).double(), torch.tensor([0.0, 0.0, 1.0]).double()
    want = sum(math.log(1 + math.exp(-d)) for d in (1, 0, -3)) / 3
    assert grpo.bradley_terry_loss(chosen, rejected).item() == pytest.approx(want, abs=1e-12)
    assert torch.autograd.gradcheck(grpo.bradley_terry_loss, (chosen.requires_grad_(), rejected.requires_grad_()))
    with pytest.raises(ValueError, match="rejected: got .*; allowed is"):
        grpo.bradley_terry_loss(chosen, rejected[:2])


@pytest.mark.parametrize("options, named", [
    (dict(learning_rate=-1), "learning_rate"), (dict(beta=math.nan), "beta"), (dict(num_generations=1), "num_generations"),
    (dict(num_generations=5, generation_batch_size=64), "generation_batch_size"), (dict(loss_type="ppo"), "loss_type"),
    (dict(max_steps=1.5), "max_steps"), (dict(temperature=0), "temperature"), (dict(bf16="yes"), "bf16"), (dict(seed=-1), "seed"),
    (dict(policy_loss="cispo"), "epsilon_high"), (dict(top_entropy_quantile=2), "top_entropy_quantile"), (dict(delta=0), "delta")])
def test_config_errors_name_the_field(options, named):
    with pytest.raises(ValueError, match=f"^{named}: got .*; allowed is "):
        grpo.GRPOConfig(**options)


def test_a_preset_leaves_the_tiny_task_its_sizes_and_flags_win():
    settings, config, _ = grpo.read_options({"model": "tiny", "preset": "deepseekmath", "beta": 0.5})
    assert (config.loss_type, config.beta) == ("grpo", 0.5) and config.max_completion_length == grpo.TINY["max_completion_length"]
    assert config.learning_rate == grpo.TINY["learning_rate"] and config.num_generations == grpo.TINY["num_generations"]
    _, config, _ = grpo.read_options({"model": "gpt2", "dataset": "x.jsonl", "preset": "deepseekmath"})
    assert (config.num_generations, config.max_completion_length, config.beta) == (64, 1024, 0.04)


def test_config_is_frozen_and_every_preset_is_one():
    for preset in grpo.PRESETS.values():
        config = grpo.GRPOConfig(**preset)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.beta = 1.0
    assert set(grpo.PRESETS) == {"deepseekmath", "dr_grpo", "dapo", "gspo", "cispo", "sapo"}


@own_only
def test_train_is_algorithm_1(monkeypatch):
    """Every step of the algorithm is replaced by a recorder: the order, and who changes when, is all that is left."""
    events, policy = [], torch.nn.Linear(1, 1, bias=False)
    monkeypatch.setattr(grpo.module, "sample_batch", lambda dataset, config, step: events.append(f"batch {step}"))
    monkeypatch.setattr(
        grpo.module,
        "sample_rollout",
        lambda policy, *a: (events.append(f"sample with {policy.weight.item():.0f}"), types.SimpleNamespace())[1],
    )
    monkeypatch.setattr(grpo.module, "compute_rewards", lambda *a: events.append("rewards"))
    monkeypatch.setattr(grpo.module, "compute_advantages", lambda *a: events.append("advantages"))
    monkeypatch.setattr(grpo.module, "reference_logps", lambda reference, *a: events.append(f"reference {reference.weight.item():.0f}"))
    monkeypatch.setattr(grpo.module, "step_metrics", lambda state, *a: {})

    def update(policy, *a):
        events.append("update")
        policy.weight.data += 1

    monkeypatch.setattr(grpo.module, "update_policy", update)
    policy.weight.data.zero_()
    config = grpo.GRPOConfig(max_steps=5, num_iterations=2, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2)
    state = grpo.train(policy, None, None, [], config, report=lambda state, metrics: events.append("report"))
    step = lambda i, ref: [f"batch {i}", f"sample with {2 * i}", "rewards", "advantages", f"reference {ref}", "update", "update", "report"]
    assert events == step(0, 0) + step(1, 0) + step(2, 4) + step(3, 4) + step(4, 8) and state.step == 5
    assert len(inspect.getsource(grpo.train).splitlines()) <= 60
    del events[:]
    policy.weight.data.zero_()
    judge = types.SimpleNamespace()
    monkeypatch.setattr(grpo.module, "update_reward_model", lambda state, *a: events.append(f"judge after {state.step}"))
    config, state = dataclasses.replace(config, sync_ref_model=False, train_reward_model=True, max_steps=3), None
    state = grpo.initial_state(policy, None, dataclasses.replace(config, train_reward_model=False))
    state.reward_model = judge
    grpo.train(policy, None, None, [], config, state=state)
    assert [e for e in events if e[:3] in ("ref", "jud")] == [f"{e}" for i in (1, 2, 3) for e in ("reference 0", f"judge after {i}")]


def rollout_and_advantages(config, advantages, kind="llama"):
    """A rollout of a small model on the tiny task, with the advantages given (B,)."""
    tokenizer, model = grpo.tiny_tokenizer(), make_model(kind)
    rollout = grpo.sample_rollout(
        model, tokenizer, grpo.tiny_problems(0)[0][: config.generation_batch_size // config.num_generations], config, 0
    )
    return model, rollout, grpo.broadcast_advantages(torch.tensor(advantages), rollout.completion_mask)


def gradient_of_update(config, advantages, **kwargs):
    model, rollout, A = rollout_and_advantages(config, advantages)
    if config.beta > 0:
        rollout.ref_logps = rollout.sampling_logps - 0.1
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    metrics = grpo.update_policy(model, grpo.initial_state(model, None, config), rollout, A, config)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), metrics, calls, rollout, A


OPTIONS = dict(num_generations=4, generation_batch_size=8, max_completion_length=10, learning_rate=0.0, max_grad_norm=1e9)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rows_of_advantage_zero_cost_no_pass_and_parts_do_not_matter(loss_type, level):
    advantages = [1.0, -1.0, 0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    config = grpo.GRPOConfig(**OPTIONS, loss_type=loss_type, importance_sampling_level=level, per_device_train_batch_size=8)
    gradient, metrics, calls, rollout, A = gradient_of_update(config, advantages)
    assert calls == [4]                                                                   # the four that teach, once
    model = make_model("llama")                                                           # all eight by hand
    logps, _ = grpo.per_token_logps(model, rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask)
    loss, _ = grpo.grpo_loss(
        logps, A, rollout.completion_mask, loss_type=loss_type, importance_sampling_level=level, max_completion_length=10
    )
    loss.backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert whole.norm() > 0.01
    torch.testing.assert_close(gradient, whole, atol=1e-5 * whole.abs().max().item(), rtol=1e-4)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for rows in (1, 3):
        parts, part_metrics, calls, _, _ = gradient_of_update(dataclasses.replace(config, per_device_train_batch_size=rows), advantages)
        torch.testing.assert_close(parts, whole, atol=1e-5 * whole.abs().max().item(), rtol=1e-4)
        assert part_metrics == pytest.approx(metrics, abs=1e-5) and max(calls) <= rows


def test_equal_rows_pass_the_model_once_and_count_as_often_as_they_are():
    model, config = make_model("llama"), grpo.GRPOConfig(**OPTIONS)
    _, rollout, A = rollout_and_advantages(config, [1.0, -1.0, 0.5, -0.5] * 2)
    for x in (rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask):
        x[3], x[6] = x[1].clone(), x[1].clone()                     # rows 1, 3 and 6 are now equal
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    weights = torch.arange(1.0, 9.0)[:, None]
    once = grpo.score(model, rollout, torch.arange(8), config)
    plain, _ = grpo.per_token_logps(model, rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask)
    assert calls == [6, 8]
    torch.testing.assert_close(once, plain[:, : once.size(1)], atol=2e-5, rtol=0)
    gradients = [torch.cat([g.flatten() for g in torch.autograd.grad((logps * weights).sum(), list(model.parameters()))]) for logps in (once, plain)]
    torch.testing.assert_close(*gradients, atol=1e-5 * gradients[1].abs().max().item(), rtol=1e-4)


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=12), size=st.integers(1, 5), data=st.data())
def test_microbatches_hold_each_chosen_row_once_and_are_sorted_by_length(lengths, size, data):
    chosen = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    parts = grpo.microbatches(mask, chosen, grpo.GRPOConfig(per_device_train_batch_size=size))
    rows = [i for part in parts for i in part.tolist()]
    assert rows == sorted((i for i in range(len(lengths)) if chosen[i]), key=lambda i: lengths[i])
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1) and all(0 < len(part) <= size for part in parts)


def test_all_advantages_zero_is_a_step_without_a_pass():
    gradient, metrics, calls, _, _ = gradient_of_update(grpo.GRPOConfig(**OPTIONS), [0.0] * 8)
    assert calls == [] and not gradient.any() and metrics["loss"] == metrics["grad_norm"] == 0.0


def test_with_beta_every_row_counts():
    _, metrics, calls, _, _ = gradient_of_update(grpo.GRPOConfig(**OPTIONS, beta=0.1), [1.0, -1.0] + [0.0] * 6)
    assert calls == [8] and metrics["kl"] == pytest.approx(math.expm1(-0.1) + 0.1, abs=1e-5)


def test_the_first_of_mu_updates_finds_the_old_logps_and_the_second_uses_them():
    config = grpo.GRPOConfig(**dict(OPTIONS, learning_rate=1e-2), lr_scheduler_type="constant", num_iterations=2)
    model, rollout, A = rollout_and_advantages(config, [1.0, -1.0, 0.5, -0.5, 1.0, -1.0, 0.0, 0.0])
    state, calls = grpo.initial_state(model, None, config), []
    model.model.layers[0].register_forward_pre_hook(lambda *a: calls.append(1))
    first = grpo.update_policy(model, state, rollout, A, config)
    old = rollout.old_logps.clone()
    torch.testing.assert_close(old, rollout.sampling_logps, atol=2e-5, rtol=0)
    second = grpo.update_policy(model, state, rollout, A, config)
    assert torch.equal(old, rollout.old_logps) and len(calls) == 2                        # one pass an update, none for π_old
    assert first["clip_ratio/region_mean"] == 0.0 < second["clip_ratio/region_mean"]


def test_rewards_reach_the_prompt_that_they_belong_to():
    config, problems = grpo.GRPOConfig(**OPTIONS), grpo.tiny_problems(0)[0][:2]
    tokenizer = grpo.tiny_tokenizer()
    rollout = grpo.sample_rollout(make_model("llama"), tokenizer, problems, config, 0)
    assert rollout.prompts == [p["prompt"] for p in problems for _ in range(4)]
    assert rollout.columns == {"solution": [p["solution"] for p in problems for _ in range(4)]}
    assert [text.replace("<pad>", "") for text in tokenizer.batch_decode(rollout.prompt_ids)] == rollout.prompts
    assert torch.equal(rollout.lengths, rollout.completion_mask.sum(1)) and rollout.lengths.unique().numel() > 1


def test_every_eos_id_ends_a_completion():
    model = make_model("llama")
    assert grpo.eos_token_ids(model, grpo.tiny_tokenizer()) == sorted({1, model.generation_config.eos_token_id} - {None})
    model.generation_config.eos_token_id = [5, 7]
    assert grpo.eos_token_ids(model, grpo.tiny_tokenizer()) == [1, 5, 7]
    rollout = grpo.sample_rollout(model, grpo.tiny_tokenizer(), grpo.tiny_problems(0)[0][:2], grpo.GRPOConfig(**OPTIONS), 0)
    last = rollout.completion_ids.gather(1, rollout.lengths[:, None] - 1).squeeze(1)
    assert torch.equal(rollout.terminated, torch.isin(last, torch.tensor([1, 5, 7]))) and torch.isin(last, torch.tensor([5, 7])).any()


def test_the_logged_entropy_is_that_of_the_distributions():
    config = grpo.GRPOConfig(**OPTIONS)
    model, rollout, A = rollout_and_advantages(config, [1.0, -1.0] * 4)
    state, rewards = grpo.initial_state(model, None, config), torch.arange(8.0)[:, None]
    metrics = grpo.step_metrics(state, rollout, rewards, grpo.update_policy(model, state, rollout, A, config), [len], config)
    _, entropies = grpo.per_token_logps(
        make_model("llama"),
        rollout.prompt_ids,
        rollout.prompt_mask,
        rollout.completion_ids,
        rollout.completion_mask,
        compute_entropy=True,
    )
    assert metrics["entropy"] == pytest.approx((entropies.sum() / rollout.completion_mask.sum()).item(), rel=1e-5)
    assert metrics["rewards/len/mean"] == metrics["reward"] == 3.5 and metrics["frac_reward_zero_std"] == 0.0


def test_the_gradient_is_that_of_all_processes(monkeypatch):
    """With two processes that do the same, sums double and normalisers double: the gradient is that of one."""
    config = grpo.GRPOConfig(**OPTIONS)
    one, metrics, *_ = gradient_of_update(config, [1.0, -1.0, 0.5, -0.5] * 2)
    monkeypatch.setattr(grpo.module, "all_reduce", lambda x: x.mul_(2))
    two, both, *_ = gradient_of_update(config, [1.0, -1.0, 0.5, -0.5] * 2)
    torch.testing.assert_close(one, two)
    assert both == pytest.approx(metrics, rel=1e-5)


def test_masked_truncated_completions_and_low_entropy_tokens_have_advantage_zero():
    config = grpo.GRPOConfig(**OPTIONS, mask_truncated_completions=True)
    _, rollout, _ = rollout_and_advantages(config, [1.0] * 8)
    assert 0 < rollout.terminated.sum() < 8
    rewards, before = torch.arange(8.0)[:, None], rollout.completion_mask
    A = grpo.compute_advantages(rewards, rollout, config)
    assert torch.equal(rollout.completion_mask, before * rollout.terminated[:, None]) and not A[~rollout.terminated].any()
    want = grpo.group_advantages(rewards[:, 0], 4)                                        # truncated rows count in the statistics
    assert torch.equal(A[:, 0][rollout.terminated], want[rollout.terminated])
    config = grpo.GRPOConfig(**OPTIONS, top_entropy_quantile=0.3)
    _, rollout, _ = rollout_and_advantages(config, [1.0] * 8)
    A = grpo.compute_advantages(rewards, rollout, config)
    assert torch.equal(A != 0, grpo.top_entropy_mask(rollout.entropies, rollout.completion_mask, 0.3) != 0)


def test_the_entropy_quantile_is_that_of_all_processes(monkeypatch):
    config = grpo.GRPOConfig(**OPTIONS, top_entropy_quantile=0.3)
    _, rollout, _ = rollout_and_advantages(config, [1.0] * 8)
    whole = grpo.compute_advantages(torch.arange(8.0)[:, None], rollout, config)
    halves = [dataclasses.replace(rollout, completion_mask=rollout.completion_mask[rows], entropies=rollout.entropies[rows],
                                  sampling_logps=rollout.sampling_logps[rows]) for rows in (slice(4), slice(4, 8))]
    room = lambda x: torch.nn.functional.pad(x, (0, 10 - x.size(1)))
    for rank, own in enumerate(halves):
        monkeypatch.setattr(
            grpo.module,
            "gather",
            lambda x: torch.cat([room(getattr(h, "entropies" if x.is_floating_point() else "completion_mask")) for h in halves]),
        )
        monkeypatch.setattr(grpo.module, "own_share", lambda rows: rows[4 * rank : 4 * rank + 4])
        assert torch.equal(grpo.compute_advantages(torch.arange(8.0)[:, None], own, config), whole[4 * rank : 4 * rank + 4])


def test_epochs_are_shuffled_and_complete():
    config = grpo.GRPOConfig(num_generations=2, generation_batch_size=6)                  # 3 prompts a step
    seen = [row for step in range(14) for row in grpo.sample_batch(list(range(7)), config, step)]
    epochs = [seen[i : i + 7] for i in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and len({tuple(e) for e in epochs}) == 6
    assert seen[:3] == grpo.sample_batch(list(range(7)), config, 0)


def test_a_column_of_the_dataset_cannot_stand_for_the_completions():
    _, rollout = rollout_of("1", "2", completions=["x", "y"], solution=["1", "1"])
    assert grpo.compute_rewards([grpo.accuracy_reward], rollout).tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("result", [[1.0], ["a"] * 8, None, [math.inf] * 8, 3.0])
def test_a_reward_function_that_returns_nonsense_is_named(result):
    def odd(completions, **kwargs):
        return result
    _, rollout, _ = rollout_and_advantages(grpo.GRPOConfig(**OPTIONS), [1.0] * 8)
    with pytest.raises(ValueError, match="reward function odd: got .*; allowed is a list of 8 finite numbers or None"):
        grpo.compute_rewards([odd], rollout)


def rollout_of(*completions, prompt="47+85=", **columns):
    """A rollout of these texts, as one group of the tiny task."""
    tokenizer = grpo.tiny_tokenizer()
    ids = tokenizer([text + "<eos>" for text in completions], padding=True, padding_side="right", return_tensors="pt")
    B, mask = len(completions), ids["attention_mask"]
    return tokenizer, grpo.Rollout(
        prompts=[prompt] * B,
        completions=list(completions),
        columns={k: list(v) for k, v in columns.items()},
        prompt_ids=None,
        prompt_mask=None,
        completion_ids=ids["input_ids"],
        completion_mask=mask,
        lengths=mask.sum(1),
        terminated=torch.ones(B).bool(),
        sampling_logps=torch.zeros(mask.shape),
        entropies=torch.zeros(mask.shape),
    )


def test_steps_end_at_the_separator_at_the_think_tag_and_at_the_last_token():
    tokenizer, rollout = rollout_of("<think>7+5=12,4+8+1=13</think>132", "<think>7</think>", "13,,2")
    seen, config = {}, grpo.GRPOConfig(**OPTIONS, step_separator=",")

    def steps_of(steps, prompts, **kwargs):
        seen["steps"] = steps
        return [[float(10 * i + j) if j else None for j in range(len(row))] for i, row in enumerate(steps)]

    rewards, ends = grpo.compute_step_rewards(steps_of, rollout, tokenizer, config)
    assert seen["steps"] == [["<think>7+5=12,", "4+8+1=13</think>", "132"], ["<think>7</think>"], ["13,", ",", "2"]]
    assert ends.tolist() == [[7, 16, 20], [3, 0, 0], [2, 3, 5]]                           # an EOS alone is no step
    torch.testing.assert_close(rewards, torch.tensor([[nan, 1.0, 2.0], [nan, nan, nan], [nan, 21.0, 22.0]]), equal_nan=True)
    assert grpo.compute_step_rewards(None, rollout, tokenizer, config) is None
    for wrong in ([[1.0]] * 3, [1.0] * 3, [[1.0] * 3, [1.0], [inf] * 3]):
        with pytest.raises(ValueError, match="reward function <lambda>: got .*; allowed is a list of 3 lists of finite numbers"):
            grpo.compute_step_rewards(lambda steps, **kwargs: wrong, rollout, tokenizer, config)


def test_steps_keep_the_spaces_that_a_token_alone_does_not_show():
    from tokenizers import Tokenizer, decoders, models
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<pad>", "<eos>", "▁one", "▁two", ";", "▁;;", "\n"])}, unk_token="<pad>"))
    words.decoder = decoders.Metaspace()                                                  # as Llama's: decode([3]) is "two"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    _, rollout = rollout_of("12", "12")
    rollout.completion_ids = torch.tensor([[2, 3, 4, 3, 2, 4, 6, 1], [2, 5, 3, 1, 0, 0, 0, 0]])
    rollout.lengths, seen = torch.tensor([8, 4]), {}
    _, ends = grpo.compute_step_rewards(lambda steps, **kwargs: seen.update(steps=steps) or [[1.0] * len(row) for row in steps],
                                        rollout, tokenizer, grpo.GRPOConfig(**OPTIONS, step_separator=";"))
    assert tokenizer.decode([3]) == "two" and seen["steps"] == [["one two;", " two one;\n"], ["one ;;", " two"]]
    assert ends.tolist() == [[2, 7], [1, 3]]


def test_rewards_by_objects_without_a_name_and_by_none_at_all():
    class Score:
        def __call__(self, completions, **kwargs):
            return [float(len(c)) for c in completions]

    tokenizer, rollout = rollout_of("12", "132")
    assert grpo.compute_rewards([Score(), functools.partial(Score())], rollout).tolist() == [[2.0, 2.0], [3.0, 3.0]]
    with pytest.raises(ValueError, match=r"reward function partial: TypeError: .*the dataset's columns are prompt\)"):
        grpo.compute_rewards([functools.partial(len)], rollout)
    assert grpo.compute_rewards([], rollout).shape == (2, 0)
    config, seen = grpo.GRPOConfig(**OPTIONS, max_steps=1, step_separator=","), []
    grpo.train(grpo.tiny_model(tokenizer, 0), tokenizer, grpo.tiny_problems(0)[0], [], config, report=lambda state, m: seen.append(m),
               step_reward_func=grpo.addition_steps)                                      # steps alone may teach
    assert math.isnan(seen[0]["reward"]) and 0 <= seen[0]["rewards/steps/mean"] <= 1


def test_the_tiny_task_has_step_rewards_and_they_become_advantages():
    right, forgot = "<think>7+5=12,4+8+1=13</think>132", "<think>7+5=12,4+8+0=12</think>122"
    tokenizer, rollout = rollout_of(right, forgot, "<think>7+5=11,4+8+1=13</think>131", "122")
    config = grpo.GRPOConfig(**OPTIONS, step_separator=",")
    step_rewards = grpo.compute_step_rewards(grpo.addition_steps, rollout, tokenizer, config)
    torch.testing.assert_close(
        step_rewards[0], torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, nan, nan]]), equal_nan=True
    )
    assert grpo.addition_steps(["47+85="], [["<think>7+5=12,", "4+8+1=13</think>", "132", "", "132"]]) == [[1.0, 1.0, 1.0, 0.0, 0.0]]
    outcome = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    A = grpo.compute_advantages(outcome, rollout, config, step_rewards)
    want = grpo.process_advantages(*step_rewards, rollout.completion_mask, 4) + grpo.broadcast_advantages(
        grpo.group_advantages(outcome[:, 0], 4), rollout.completion_mask
    )
    torch.testing.assert_close(A, want)
    assert torch.equal(
        grpo.compute_advantages(torch.zeros(4, 0), rollout, config, step_rewards),
        grpo.process_advantages(*step_rewards, rollout.completion_mask, 4),
    )


def test_the_reward_model_pairs_best_with_worst_learns_and_replays(monkeypatch):
    tokenizer, rollout = rollout_of("1", "2", "3", "4", "5", "6", "7", "8", prompt="9+9=")
    policy, config = make_model("gpt2"), grpo.GRPOConfig(
        **OPTIONS, train_reward_model=True, reward_model_learning_rate=1e-2, replay_share=0.25
    )
    judge = grpo.initial_state(policy, tokenizer, config).reward_model
    for name, weight in judge.model.base_model.named_parameters():
        assert torch.equal(weight, dict(policy.base_model.named_parameters())[name])      # it starts from the policy's body
    judge.remember(rollout, torch.tensor([0.5, 2.0, nan, 1.0, 3.0, 3.0, 3.0, 3.0]), 4)
    assert judge.pairs == [["9+9=2", "9+9=1"]]                                            # one abstained, and equals make no pair
    judge.remember(rollout, torch.tensor([1.0, 4.0, 2.0, 3.0, 0.0, 1.0, 1.0, 0.0]), 4)
    assert judge.pairs[1:] == [["9+9=2", "9+9=1"], ["9+9=4", "9+9=3"], ["9+9=6", "9+9=8"], ["9+9=7", "9+9=5"]]
    asked, score = [], judge.score
    monkeypatch.setattr(judge, "score", lambda texts: (asked.append(texts), score(texts))[1])
    judge.learn(config, 1, 20)
    assert judge.pairs == [] and len(judge.replay) == 5 and {len(texts) for texts in asked} == {128}
    for better, worse in judge.replay:
        assert score([better])[0] > score([worse])[0]
    del asked[:]
    judge.pairs = [["new", "pair"]]
    monkeypatch.setattr(judge, "score", lambda texts: (asked.append(texts), score(["1"] * len(texts)))[1])
    judge.learn(config, 2, 3)
    assert [texts[:64].count("new") for texts in asked] == [48] * 3 and len(judge.replay) == 6      # a quarter of each batch is replayed
    judge.learn(config, 3, 3)
    assert len(asked) == 3                                                                # nothing new: nothing to do


def test_with_a_learned_reward_its_score_alone_counts_and_the_truth_ranks(models, data):
    config, rewards = grpo.GRPOConfig(**OPTIONS, train_reward_model=True), torch.tensor([[5.0, 0.0], [6.0, 1.0]])
    assert grpo.total_reward(rewards, config).tolist() == [5.0, 6.0]
    assert grpo.total_reward(rewards, dataclasses.replace(config, train_reward_model=False)).tolist() == [5.0, 7.0]
    out = data / "out"
    assert grpo.main(["--model", str(models / "qwen2"), "--dataset", f"{data}/chat.jsonl", "--output_dir", str(out), *QUICK, *EVERYTHING,
                      "--reward_funcs", f"{data}/my_rewards.py:length", "--reward_weights", "2", "--step_reward_func", "addition_steps",
                      "--step_separator", ","]) == 2                                      # addition_steps reads text, not messages
    assert grpo.main(["--model", str(models / "qwen2"), "--dataset", f"{data}/chat.jsonl", "--output_dir", str(out), *QUICK, *EVERYTHING,
                      "--reward_funcs", f"{data}/my_rewards.py:length", "--reward_weights", "2"]) == 0
    last = lines_of(out)[-1]
    assert last["reward"] == pytest.approx(last["rewards/reward_model/mean"]) and last["rewards/length/mean"] < 0
    pairs, replay = json.loads((out / "checkpoint/run.json").read_text())["pairs"]
    assert pairs == [] and len(replay) > 0 and all(len(pair) == 2 for pair in replay)
    transformers.AutoModelForSequenceClassification.from_pretrained(out / "checkpoint/reward_model")


def test_the_reward_model_scores_many_texts_as_it_scores_each():
    judge = grpo.initial_state(make_model("llama"), grpo.tiny_tokenizer(), grpo.GRPOConfig(**OPTIONS, train_reward_model=True)).reward_model
    prompts, completions = [f"{i}+{7 * i}=" for i in range(70)], [str(8 * i) * (1 + i % 5) for i in range(70)]
    sizes = []
    judge.model.register_forward_pre_hook(lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True)
    together = judge(prompts, completions)
    assert sizes == [64, 6] and len({round(score, 4) for score in together}) > 60
    assert together == pytest.approx([judge([p], [c])[0] for p, c in zip(prompts, completions)], abs=1e-5)


def test_train_called_without_a_state_makes_the_reward_model_itself():
    def length(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    tokenizer, seen = grpo.tiny_tokenizer(), []
    config = grpo.GRPOConfig(**OPTIONS, train_reward_model=True, ref_model_sync_steps=1, reward_model_steps=1, max_steps=2)
    problems = grpo.tiny_problems(0)[0][:8]
    state = grpo.train(grpo.tiny_model(tokenizer, 0), tokenizer, problems, [length], config, report=lambda state, m: seen.append(m))
    assert len(state.reward_model.replay) > 0 and state.reward_model.pairs == []
    assert all(m["reward"] == pytest.approx(m["rewards/reward_model/mean"]) and m["rewards/length/mean"] > 1 for m in seen)


# §11 Command line ----------------------------------------------------------------------------------------------------


def chat_tokenizer():
    tokenizer = grpo.tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    return tokenizer


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of random models of three architectures, and of a sequence-classification model."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("gpt2", "llama", "qwen2"):
        make_model(kind).save_pretrained(root / kind)
        chat_tokenizer().save_pretrained(root / kind)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**TINY_SHAPE, vocab_size=20, num_labels=1)
    transformers.LlamaForSequenceClassification(config).save_pretrained(root / "judge")
    chat_tokenizer().save_pretrained(root / "judge")
    return root


@pytest.fixture
def data(tmp_path):
    problems = grpo.tiny_problems(0)[0][:12]
    chats = [{"prompt": [{"role": "user", "content": p["prompt"].rstrip("=")}], "solution": p["solution"]} for p in problems]
    for name, rows in (("text", problems), ("chat", chats)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(
        "def length(prompts, completions, completion_ids, solution, **kwargs):\n"
        "    assert len(prompts) == len(completions) == len(completion_ids) == len(solution)\n"
        "    return [None if i % 3 == 0 else -float(len(ids)) for i, ids in enumerate(completion_ids)]\n"
        "def broken(completions, **kwargs):\n    return [1.0]\n"
        "def raises(completions, **kwargs):\n    raise KeyError('oh')\n")
    return tmp_path


QUICK = "--max_steps 2 --num_generations 4 --generation_batch_size 8 --max_completion_length 6".split()


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind, prompts", [("gpt2", "text"), ("llama", "chat"), ("qwen2", "text"), ("qwen2", "chat")])
def test_any_causal_lm_trains_on_a_file(kind, prompts, models, data, capsys):
    out = data / "out"
    rewards = ["accuracy", f"{data}/my_rewards.py:length", str(models / "judge"), "soft_overlong"]
    assert (
        grpo.main(
            [
                "--model",
                str(models / kind),
                "--dataset",
                f"{data}/{prompts}.jsonl",
                "--output_dir",
                str(out),
                "--learning_rate",
                "1e-3",
                "--reward_weights",
                "1",
                "0.1",
                "2",
                "0.5",
                "--beta",
                "0.1",
                *QUICK,
                "--reward_funcs",
                *rewards,
            ]
        )
        == 0
    )
    lines = lines_of(out)
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["kl"] > 0.0
    for line in lines:
        means = [line[f"rewards/{name}/mean"] for name in ("accuracy_reward", "length", "judge", "soft_overlong_punishment")]
        assert all(isinstance(mean, float) for mean in means)
    trained = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    before = transformers.AutoModelForCausalLM.from_pretrained(models / kind)
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), before.parameters()))
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_tiny_job_from_end_to_end(tmp_path, monkeypatch, capsys):
    cold_start = grpo.cold_start
    monkeypatch.setattr(grpo.module, "cold_start", lambda *args: cold_start(*args, steps=3))
    out = tmp_path / "out"
    assert grpo.main(["--model", "tiny", "--max_steps", "3", "--generation_batch_size", "32", "--output_dir", str(out)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"held-out accuracy: \d\.\d\d -> \d\.\d\d \(greedy, 500 problems\)", printed[-1])
    assert sum("right" in line or "wrong" in line for line in printed) == 8               # four before, four after
    assert any("loss stays near 0" in line for line in printed)
    names = {
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "entropy",
        "num_tokens",
        "step_time",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "clip_ratio/region_mean",
        "completions/clipped_ratio",
        "sampling/sampling_logp_difference/max",
        *(f"rewards/{f}_reward/{s}" for f in ("accuracy", "think_format") for s in ("mean", "std")),
        *(f"completions/{k}_{n}" for k in ("mean", "min", "max") for n in ("length", "terminated_length")),
    }
    assert [set(line) for line in lines_of(out)] == [names] * 3
    for line in lines_of(out):
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
    assert transformers.AutoTokenizer.from_pretrained(out / "checkpoint").decode([2, 5, 3]) == "<think>1</think>"
    text = README.read_text()
    assert all(f"`{name}`" in text for name in names if "rewards/" not in name), "a metric that the README does not explain"


def test_problems_and_teacher():
    train, held_out = grpo.tiny_problems(3)
    assert len(train) == 7600 and len(held_out) == 500 and len({p["prompt"] for p in train + held_out}) == 8100
    assert grpo.teacher_trace("47+85=", False) == "<think>7+5=12,4+8+1=13</think>132<eos>"
    assert grpo.teacher_trace("47+85=", True) == "<think>7+5=12,4+8+0=12</think>122<eos>"
    for problem in train[:200]:
        assert grpo.accuracy_reward([grpo.teacher_trace(problem["prompt"], False)[:-5]], [problem["solution"]]) == [1.0]
        assert grpo.think_format_reward([grpo.teacher_trace(problem["prompt"], True)[:-5]]) == [1.0]


@pytest.mark.parametrize("options, signal, code", [
    ([], "SIGTERM", 143), (["--beta", "0.1", "--num_iterations", "2", "--sync_ref_model", "--ref_model_sync_steps", "3"], "SIGINT", 130)])
def test_a_resumed_run_ends_bit_for_bit_like_one_never_stopped(options, signal, code, models, data, capsys):
    common = ["--model", str(models / "llama"), "--dataset", f"{data}/text.jsonl", "--learning_rate", "1e-2", *QUICK, "--max_steps", "5",
              "--save_steps", "2", *options]
    assert grpo.main([*common, "--output_dir", str(data / "whole")]) == 0
    (data / "stop.py").write_text(
        "import os, signal\ncalls = []\n"
        "def stop(completions, **kwargs):\n    calls.append(1)\n"
        "    if len(calls) == 2: os.kill(os.getpid(), signal.SIGNAL)\n    return [None] * len(completions)\n".replace(
            "SIGNAL", signal
        )
    )
    (data / "go.py").write_text("def stop(completions, **kwargs):\n    return [None] * len(completions)\n")
    rewards = ["--reward_funcs", "accuracy", "think_format"]
    assert grpo.main([*common, "--output_dir", str(data / "whole"), *rewards, f"{data}/go.py:stop"]) == 0
    assert grpo.main([*common, "--output_dir", str(data / "parts"), *rewards, f"{data}/stop.py:stop"]) == code
    assert f"stopped after step 2; to go on: python grpo.py --resume_from_checkpoint {data}/parts/checkpoint" in capsys.readouterr().out
    assert [line["step"] for line in lines_of(data / "parts")] == [1, 2]
    (data / "stop.py").write_text((data / "go.py").read_text())
    assert grpo.main(["--resume_from_checkpoint", str(data / "parts/checkpoint")]) == 0
    drop = lambda lines: [{k: v for k, v in line.items() if k != "step_time"} for line in lines]
    assert drop(lines_of(data / "parts")) == drop(lines_of(data / "whole"))
    a, b = (safetensors.torch.load_file(data / name / "checkpoint/model.safetensors") for name in ("parts", "whole"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_resume_refuses_other_options_and_damaged_files(models, data, capsys):
    out = data / "out"
    common = ["--model", str(models / "gpt2"), "--dataset", f"{data}/text.jsonl", "--output_dir", str(out), *QUICK]
    assert grpo.main(common) == 0
    resume = ["--resume_from_checkpoint", str(out / "checkpoint")]
    assert grpo.main([*resume, "--beta", "0.5", "--seed", "42"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "beta = 0.5 (was 0.0)" in error and "seed" not in error
    for file in sorted((out / "checkpoint").rglob("*.*")):
        whole, half = file.read_bytes(), file.stat().st_size // 2
        damages = [None, whole[:half], whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]]
        for damage in damages[: 2 if file.name == "run.json" else 3]:                     # gone, cut off, one bit flipped
            file.unlink() if damage is None else file.write_bytes(damage)
            assert grpo.main(resume) == 2 and "resume_from_checkpoint: cannot read" in capsys.readouterr().err.splitlines()[-1], file
        file.write_bytes(whole)
    assert grpo.main(resume) == 0


def without_times(folder):
    return [{k: v for k, v in line.items() if k != "step_time"} for line in lines_of(folder)]


def assert_same_files(a, b, names=("model.safetensors", "optimizer.pt")):
    for name in names:
        x, y = ((folder / "checkpoint" / name).read_bytes() for folder in (a, b))
        assert x == y, f"{name} differs"


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}       # as here: how many threads add up decides the last bit
EVERYTHING = ["--learning_rate", "1e-3", "--beta", "0.05", "--num_iterations", "2", "--sync_ref_model", "--ref_model_sync_steps", "2",
              "--train_reward_model", "--reward_model_steps", "3"]


def test_killed_at_random_moments_and_resumed_it_ends_bit_for_bit_the_same(models, data):
    common = ["--model", str(models / "llama"), "--dataset", f"{data}/text.jsonl", *QUICK, "--max_steps", "24", "--save_steps", "1",
              "--reward_funcs", f"{data}/my_rewards.py:length", *EVERYTHING]
    assert grpo.main([*common, "--output_dir", str(data / "whole")]) == 0
    out, rng, kills = data / "killed", random.Random(), 0
    out.mkdir()
    command = [*common, "--output_dir", str(out)]
    while kills < 3:
        process = subprocess.Popen(
            [sys.executable, grpo.module.__file__, *command], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=ONE_THREAD
        )
        done = len(lines_of(out)) if (out / "metrics.jsonl").exists() else 0
        while process.poll() is None and (
            not (out / "metrics.jsonl").exists() or len((out / "metrics.jsonl").read_text().splitlines()) < done + 3
        ):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))                                                   # a step takes about 0.1 s, half of it the saving
        process.kill()
        process.wait()
        kills += 1
        command = ["--resume_from_checkpoint", str(out / "checkpoint")]
    assert grpo.main(command) == 0
    assert without_times(out) == without_times(data / "whole") and [line["step"] for line in lines_of(out)] == list(range(1, 25))
    assert_same_files(out, data / "whole", ("model.safetensors", "reference/model.safetensors", "reward_model/model.safetensors"))


class Killed(BaseException):
    pass


def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(models, data, monkeypatch):
    """Each call that touches the disk is in turn the last one; what is found afterwards is the old checkpoint or the new one."""
    out = data / "out"
    assert grpo.main(["--model", str(models / "llama"), "--dataset", f"{data}/text.jsonl", *QUICK, "--output_dir", str(out)]) == 0
    settings, config, folder = grpo.read_options({"resume_from_checkpoint": str(out / "checkpoint")})
    policy, tokenizer = grpo.load_model(folder)
    state, left = grpo.load_checkpoint(folder, policy, tokenizer, config), [0]

    def dies(f):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return f(*args, **kwargs)
        return call

    for owner, name in ((os, "rename"), (grpo.module.shutil, "rmtree"), (torch, "save"), (json, "dump"), (type(policy), "save_pretrained")):
        monkeypatch.setattr(owner, name, dies(getattr(owner, name)))
    points = 0
    while True:
        state.step, points, left[0] = state.step + 1, points + 1, points + 1
        try:
            grpo.save_checkpoint(policy, tokenizer, state, config, settings)
        except Killed:
            left[0] = 0
            _, _, found = grpo.read_options({"resume_from_checkpoint": str(out / "checkpoint")})
            assert json.loads((Path(found) / "run.json").read_text())["step"] in (state.step - 1, state.step)
            left[0] = 0
            grpo.save_checkpoint(policy, tokenizer, state, config, settings)              # and the next save finds its way
        else:
            break
    assert points >= 7 and sorted(os.listdir(out)) == ["checkpoint", "curve.png", "metrics.jsonl"]


def test_a_full_disk_is_reported_and_loses_nothing(models, data, capsys):
    import resource
    out, (soft, hard) = data / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    command = ["--model", str(models / "llama"), "--dataset", f"{data}/text.jsonl", *QUICK, "--output_dir", str(out)]
    assert grpo.main(command) == 0
    before = (out / "checkpoint/model.safetensors").read_bytes()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))                         # no file may grow beyond 20 kB
        assert grpo.main([*command, "--learning_rate", "1e-2", "--save_steps", "1"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("grpo.py:")]
    assert len(errors) == 3 and "warning: output_dir: cannot write" in errors[0] and "error: output_dir: cannot write" in errors[2]
    assert (out / "checkpoint/model.safetensors").read_bytes() == before and len(lines_of(out)) == 2


def test_a_reward_function_that_raises_is_named_with_its_row_after_a_checkpoint(models, data, capsys):
    (data / "late.py").write_text("calls = []\ndef row(prompts, completions, **kwargs):\n    calls.append(1)\n"
                                  "    return [1.0 / (len(calls) < 3 or p != '37+64=') for p in prompts]\n")
    (data / "one.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("11+11=", "37+64=")))
    out = data / "out"
    assert grpo.main(["--model", str(models / "llama"), "--dataset", f"{data}/one.jsonl", "--reward_funcs", f"{data}/late.py:row", *QUICK,
                      "--max_steps", "5", "--output_dir", str(out)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    found = re.search(
        r"reward function row: ZeroDivisionError: .* at row (\d+), '(.*)' \(the .* columns are prompt.*stopped after step 2; to go on:",
        error,
    )
    assert found and int(found[1]) in (0, 4)
    assert json.loads((out / "checkpoint/run.json").read_text())["step"] == 2


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(models, data, capsys, monkeypatch):
    out, update, calls = data / "out", grpo.update_policy, []

    def explode(policy, *args):
        calls.append(1)
        if len(calls) == 3:
            next(policy.parameters()).data[:] = math.inf
        return update(policy, *args)

    monkeypatch.setattr(grpo.module, "update_policy", explode)
    assert (
        grpo.main(
            [
                "--model",
                str(models / "llama"),
                "--dataset",
                f"{data}/text.jsonl",
                "--reward_funcs",
                f"{data}/my_rewards.py:length",
                *QUICK,
                "--max_steps",
                "5",
                "--save_steps",
                "1",
                "--output_dir",
                str(out),
            ]
        )
        == 2
    )
    assert re.search(r"error: step 3: loss is nan, grad_norm is nan", capsys.readouterr().err.splitlines()[-1])
    assert json.loads((out / "checkpoint/run.json").read_text())["step"] == 2 and len(lines_of(out)) == 2
    weights = safetensors.torch.load_file(out / "checkpoint/model.safetensors")
    assert all(w.isfinite().all() for w in weights.values())


def test_bad_input_is_one_line_and_exit_2(models, data, capsys):
    model, file = ["--model", str(models / "llama")], ["--dataset", f"{data}/text.jsonl"]
    bad = {
        "empty": b"",
        "blank": b"\n\n",
        "json": b'{"prompt": "1"}\n{oops\n',
        "utf8": b'{"prompt": "1"}\n{"prompt": "\xff"}\n',
        "list": b"[1]\n",
        "noprompt": b'{"solution": "1"}\n',
        "emptyprompt": b'{"prompt": ""}\n',
        "messages": b'{"prompt": [{"role": "user"}]}\n',
        "columns": b'{"prompt": "1", "solution": "1"}\n{"prompt": "1"}\n',
        "mixed": b'{"prompt": "1"}\n{"prompt": [{"role": "user", "content": "1"}]}\n',
        "nosolution": b'{"prompt": "1"}\n',
        "long": json.dumps({"prompt": "1" * 60, "solution": "1"}).encode(),
    }
    for name, content in bad.items():
        (data / f"{name}.jsonl").write_bytes(content)
    (data / "afile").write_text("precious")
    cases = [
        ([], "--model tiny"),
        (model, "--dataset FILE.jsonl"),
        ([*model, "--dataset", f"{data}/absent.jsonl"], "absent.jsonl"),
        *(
            ([*model, "--dataset", f"{data}/{name}.jsonl", *extra], said)
            for name, extra, said in [
                ("empty", [], "empty"),
                ("blank", [], "blank.jsonl, line 1"),
                ("json", [], "json.jsonl, line 2"),
                ("utf8", [], "utf8.jsonl, line 2"),
                ("list", [], "line 1"),
                ("noprompt", [], "line 1: got b'{"),
                ("emptyprompt", [], "line 1"),
                ("messages", [], "line 1"),
                ("columns", [], "line 2: got columns"),
                ("mixed", [], "line 2"),
                ("nosolution", ["--reward_funcs", "accuracy"], "missing 1 required positional argument: 'solution'"),
                ("long", [], "prompt 1: got 60 tokens; allowed is the model's context of 64 less"),
            ]
        ),
        ([*model, *file, "--reward_funcs", "nonsense"], "reward_funcs: got nonsense; allowed is accuracy, think_format"),
        ([*model, *file, "--reward_funcs", f"{data}/my_rewards.py:absent"], "my_rewards.py:absent"),
        ([*model, *file, "--reward_funcs", f"{data}/absent.py:f"], "absent.py"),
        ([*model, *file, "--reward_funcs", f"{data}/my_rewards.py:broken"], "reward function broken: got [1.0]"),
        ([*model, *file, "--reward_funcs", f"{data}/my_rewards.py:raises"], "reward function raises: KeyError: 'oh'"),
        ([*model, *file, "--reward_weights", "1"], "reward_weights: got 1 for 2 reward functions"),
        (["--model", f"{data}/nowhere", *file], "model: cannot load"),
        (["--model", f"{data}/nowhere", "--dataset", f"{data}/nofile"], "nofile"),               # the dataset is looked at first
        ([*model, *file, "--step_reward_func", "nothing"], "step_reward_func: got nothing"),
        ([*model, *file, "--reward_funcs", f"{data}/no/judge"], "reward_funcs: cannot load"),
        ([*model, *file, "--preset", "ppo"], "--preset"),
        ([*model, *file, "--loss_type", "ppo"], "--loss_type"),
        ([*model, *file, "--no_such_flag", "1"], "--no_such_flag"),
        ([*model, *file, "--num_generations", "5"], "generation_batch_size: got 8"),
        ([*model, *file, "--beta", "x"], "--beta"),
        ([*model, *file, "--bf16", "maybe"], "--bf16"),
        ([*model, *file, "--max_completion_length", "70"], "context of 64"),
        ([*model, *file, "--output_dir", f"{data}/afile"], "afile, which is a file"),
        (["--resume_from_checkpoint", f"{data}/nowhere"], "resume_from_checkpoint: cannot read"),
    ]
    (data / "out").mkdir()
    (data / "out/metrics.jsonl").write_text("earlier")
    for arguments, said in cases:
        options = QUICK if "--num_generations" not in arguments else ["--generation_batch_size", "8"]
        if "--resume_from_checkpoint" not in arguments:
            arguments = ["--output_dir", str(data / "out"), *options, *arguments]
        try:
            code = grpo.main(arguments)
        except SystemExit as exit:
            code = exit.code
        error = capsys.readouterr().err
        last = error.splitlines()[-1]
        assert code == 2 and last.startswith("grpo.py: error:") and said in last and "Traceback" not in error, (arguments, error)
    assert (data / "out/metrics.jsonl").read_text() == "earlier" and (data / "afile").read_text() == "precious"
    assert os.listdir(data / "out") == ["metrics.jsonl"]
    assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)     # a hub that is not there: one line too


def test_explain_prints_a_group_token_by_token(models, data, capsys):
    assert grpo.main(["--model", str(models / "llama"), "--dataset", f"{data}/text.jsonl", *QUICK, "--learning_rate", "1e-2", "--explain",
                      "--output_dir", str(data / "out"), "--reward_funcs", f"{data}/my_rewards.py:length"]) == 0
    text = capsys.readouterr().out
    header = next(line for line in text.splitlines() if "old logp" in line)
    rows = [line for line in text.splitlines() if re.match(r" +'.*' +[01] ", line)]
    assert {len(row) for row in rows} == {len(header)} and not (data / "out").exists()
    for row in rows:                                                                      # the columns agree with each other
        mask, logp, old, ratio, clipped, advantage, loss = row.split()[-7:]
        assert float(ratio) == pytest.approx(math.exp(float(logp) - float(old)), rel=2e-3)
        A, r = float(advantage), float(ratio)
        assert float(loss) == pytest.approx(-min(r * A, min(max(r, 0.8), 1.2) * A) * int(mask), abs=2e-3)
        assert (clipped == "yes") == ((r > 1.2 and A > 0) or (r < 0.8 and A < 0))
    assert re.search(r"rewards \[.*\], mean -?\d+\.\d{4}, std \d+\.\d{4}", text)
    two = ["--model", str(models / "llama"), "--dataset", f"{data}/text.jsonl", *QUICK, "--explain", "--reward_funcs",
           f"{data}/my_rewards.py:length", "soft_overlong", "--reward_weights", "0", "1"]
    texts = [(grpo.main(two + more), capsys.readouterr().out)[1] for more in ([], ["--train_reward_model"])]
    assert texts[0] == texts[1]                                                           # it shows the given rewards, weighted
    assert grpo.main([*two[:4], *QUICK, "--max_completion_length", "12", "--explain", "--mask_truncated_completions",
                      "--reward_funcs", f"{data}/my_rewards.py:length"]) == 0


def torchrun(processes, *arguments):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={processes}",
            "--standalone",
            grpo.module.__file__,
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env=ONE_THREAD,
    )


def test_several_processes_give_the_run_of_one(models, data):
    (data / "my.py").write_text(
        "def steps(steps, **kwargs):\n    return [[float(len(text)) for text in row] for row in steps]\n"
        "def short(completions, **kwargs):\n    return [None if '7' in text else -float(len(text)) for text in completions]\n"
    )
    command = ["--model", models / "llama", "--dataset", data / "text.jsonl", *QUICK, "--generation_batch_size", "16", "--max_steps", "4",
               "--reward_funcs", f"{data}/my.py:short", "--step_reward_func", f"{data}/my.py:steps", "--step_separator", "1", *EVERYTHING]
    assert grpo.main([*map(str, command), "--output_dir", str(data / "1")]) == 0
    for processes, extra in ((2, ["--per_device_train_batch_size", "3"]), (4, []), (2, ["--fsdp", "--per_device_train_batch_size", "3"])):
        out = data / f"{processes}{len(extra)}"
        done = torchrun(processes, *command, *extra, "--output_dir", out)
        assert done.returncode == 0, done.stderr
        for one, several in zip(without_times(data / "1"), without_times(out), strict=True):
            assert several == pytest.approx(one, abs=1e-4, rel=1e-5)
        for part in ("", "reference/", "reward_model/"):
            a, b = (safetensors.torch.load_file(folder / f"checkpoint/{part}model.safetensors") for folder in (data / "1", out))
            for name in a:
                torch.testing.assert_close(a[name], b[name], atol=1e-4, rtol=0)
    done = torchrun(
        2, "--resume_from_checkpoint", out / "checkpoint", "--fsdp", "--output_dir", data / "resumed"
    )  # sharded, and loaded again
    assert done.returncode == 0 and not (data / "resumed/metrics.jsonl").exists(), done.stderr[-2000:]


def test_a_process_that_dies_ends_the_job(models, data):
    (data / "die.py").write_text(
        "import os, signal\ncalls = []\n"
        "def die(completions, **kwargs):\n    calls.append(1)\n"
        "    if len(calls) == 2 and os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n    return [1.0] * len(completions)\n"
        "def fail(completions, **kwargs):\n    calls.append(1)\n"
        "    return [1.0 / (len(calls) < 2 or os.environ['RANK'] == '0')] * len(completions)\n"
    )
    command = [
        "--model",
        models / "llama",
        "--dataset",
        data / "text.jsonl",
        *QUICK,
        "--max_steps",
        "4",
        "--output_dir",
        data / "out",
        "--reward_funcs",
    ]
    done = torchrun(2, *command, f"{data}/die.py:die")
    assert done.returncode != 0 and "grpo.py: error: lost the other processes" in done.stderr and "Signal 9 (SIGKILL)" in done.stderr
    done = torchrun(2, *command, f"{data}/die.py:fail")                                   # an error in one process alone ends both, saved
    assert done.returncode != 0 and "reward function fail: ZeroDivisionError" in done.stderr and "failed in another process" in done.stderr
    assert "AttributeError" not in done.stderr and done.stderr.count("grpo.py: error:") == 2                  # a clear line from each
    assert json.loads((data / "out/checkpoint/run.json").read_text())["step"] == 1


@own_only
def test_import_pulls_in_nothing_heavy():
    code = "import sys, grpo; print(*sorted({'transformers', 'matplotlib', 'math_verify'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=os.path.dirname(grpo.module.__file__))
    assert done.returncode == 0 and done.stdout.strip() == ""


@own_only
def test_the_readme_names_what_exists():
    text, tests = README.read_text(), Path(__file__).read_text()
    rows = re.findall(r"^\| .* \| `(\w+)` \| `(test_\w+)` \| \[.*\]\((\S+)\) \|$", text, re.M)
    assert len(rows) >= 16
    for function, test, page in rows:
        assert callable(getattr(grpo, function)) and f"def {test}(" in tests
        assert function in (HERE / page).read_text() or function == "train"
    assert len(text.splitlines()) <= 120 and "python -m pytest -q test_grpo.py" in text


# The worked examples -------------------------------------------------------------------------------------------------

EXAMPLES = HERE / "worked_examples"


def run_fences(path):
    """Run the page's python fences in order, in one namespace, under the page's own name and line numbers; then it is returned."""
    lines, namespace, source, start = path.read_text().splitlines(), {"__name__": path.stem}, [], None
    for number, line in enumerate(lines):
        if start is None and line == "```python":
            source, start = [], number + 1
        elif start is not None and line == "```":
            exec(compile("\n" * start + "\n".join(source), str(path), "exec"), namespace)
            start = None
        elif start is not None:
            source.append(line)
    assert start is None, f"{path}, line {start}: a fence that does not end"
    return namespace


@own_only
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("[0-9]*.md")), ids=lambda path: path.stem)
def test_worked_example(path, monkeypatch):
    monkeypatch.chdir(HERE)
    run_fences(path)
    for picture in re.findall(r"!\[[^]]+\]\((\S+)\)", path.read_text()):
        assert (EXAMPLES / picture).is_file()


@own_only
def test_a_wrong_number_in_a_page_points_into_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n```python\n\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as failure:
        run_fences(page)
    assert failure.traceback[-1].path == page and failure.traceback[-1].lineno + 1 == 9


@own_only
def test_the_walkthrough(capsys):
    runpy.run_path(str(EXAMPLES / "walkthrough.py"), run_name="walkthrough")
    printed = capsys.readouterr().out
    assert "gradient norm:" in printed and len(re.findall(r"^A = ", printed, re.M)) == 16


@own_only
def test_every_figure_is_drawn_by_the_script_beside_it(tmp_path):
    figures = runpy.run_path(str(EXAMPLES / "figures.py"), run_name="figures")
    drawn = [name for name in figures if inspect.isfunction(figures[name]) and name != "save"]
    figures["save"].__globals__["save"] = lambda figure, name: (tmp_path / name).write_bytes(b"") or figure.savefig(tmp_path / name, dpi=10)
    for name in drawn:
        figures[name]()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in EXAMPLES.glob("[0-9]*.png")}


def exhibits():
    """The bug museum's patches: number, the old and new text of each hunk, and the tests that must catch it."""
    for exhibit in (EXAMPLES / "bug_museum.md").read_text().split("\n## ")[1:]:
        diff = re.search(r"```diff\n(.*?)\n```", exhibit, re.S)[1]
        hunks = [[[line[1:] for line in hunk.splitlines() if line[:1] in sides] for sides in (" -", " +")] for hunk in diff.split("\n@@\n")]
        yield pytest.param(hunks, re.findall(r"`(test_\w+)`", exhibit.split("Caught by:")[1]), id=exhibit.split(".")[0])


@own_only
@pytest.mark.parametrize("hunks, tests", list(exhibits()) if OWN else [])
def test_the_bug_museum(hunks, tests, monkeypatch, tmp_path):
    source = Path(grpo.module.__file__).read_text()
    for old, new in (("\n".join(side) for side in hunk) for hunk in hunks):
        assert source.count(old) == 1, f"the patch no longer fits:\n{old}"
        source = source.replace(old, new)
    (tmp_path / "grpo_bug.py").write_text(source)
    monkeypatch.setattr(grpo, "module", ModuleUnderTest(str(tmp_path / "grpo_bug.py")).module)
    quick = settings(
        deadline=None, max_examples=40, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate]
    )  # no shrinking
    assert tests
    for test in tests:
        if hasattr(globals()[test], "hypothesis"):
            monkeypatch.setattr(globals()[test], "_hypothesis_internal_use_settings", quick)
        assert (
            pytest.main(["-q", "-x", "--tb=no", "-p", "no:cacheprovider", f"{__file__}::{test}"]) == pytest.ExitCode.TESTS_FAILED
        ), f"{test} does not catch it"


@own_only
def test_the_bug_museum_is_open():
    assert len(list(exhibits())) >= 20
