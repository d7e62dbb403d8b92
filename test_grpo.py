"""Tests of grpo.py, section by section.

Each function of §1-§8 has a twin here in pure Python: lists without padding, so that it cannot share a masking bug.
Beside it stand gradients, worked numbers of the guides, and exact enumeration. With GRPO_MODULE=my_grpo.py they test
that file: what it lacks or has not written yet (raise NotImplementedError) is skipped by name, and what goes beyond the
formula is left out, unless GRPO_BEYOND=1, or one step of it: digits, equal, missing, empty, padding or positions.
"""

import ast
import atexit
import collections
import contextlib
import copy
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
from pathlib import Path

if "GRPO_TEST_CUDA" not in os.environ:              # before torch is imported: these tests are about the CPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

HERE = Path(__file__).resolve().parent
README, EXAMPLES = HERE / "README.md", HERE / "worked_examples"
settings.register_profile("grpo", deadline=None, database=None, report_multiple_bugs=False, derandomize=True,
                          max_examples=int(os.environ.get("GRPO_EXAMPLES", 40)), phases=set(Phase) - {Phase.explain})
settings.load_profile("grpo")
torch.set_num_threads(1)
nan, inf = math.nan, math.inf


class ModuleUnderTest:
    """The file named by GRPO_MODULE. What a student's file lacks or has not written yet skips the test that asks."""

    def __init__(self, name, own=False):
        path = Path(name).with_suffix(".py")
        path = path if path.exists() else HERE / path
        spec = importlib.util.spec_from_file_location(path.stem, path)
        self.module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.step = os.environ.get("GRPO_BEYOND")
        self.own, self.strict = own, own or self.step == "1"
        self.asked = []                             # the functions that the test at hand has asked for

    def __getattr__(self, name):
        if name.startswith(("_", "pytest")):        # what pytest asks of every object
            raise AttributeError(name)
        self.asked.append(name)
        if not self.own and not hasattr(self.module, name):
            pytest.skip(f"{self.module.__name__} has no {name}")
        value = getattr(self.module, name)
        return value if self.own or not inspect.isfunction(value) else functools.partial(self.lenient, name, value)

    def at(self, step):
        return self.strict or self.step == step

    def lacks(self, name, options):
        parameters = inspect.signature(getattr(self.module, name, lambda: 0)).parameters.values()
        return set(options) - {name if p.kind is p.VAR_KEYWORD else p.name for p in parameters for name in options}

    def lenient(self, name, function, *args, **options):
        if lacks := self.lacks(name, options):
            pytest.skip(f"{self.module.__name__}.{name} has no argument {', '.join(sorted(lacks))}")
        try:
            return function(*args, **options)
        except NotImplementedError as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            if "raise NotImplementedError" not in last.line:            # torch's own, for a wrong dtype
                raise
            pytest.skip(f"{self.module.__name__}.{last.name} is not written yet")


OWN = "GRPO_MODULE" not in os.environ
reference = ModuleUnderTest("grpo", own=True)
grpo = reference if OWN else ModuleUnderTest(os.environ["GRPO_MODULE"])
own_only = pytest.mark.skipif(not OWN, reason="about grpo.py itself, not its equations")
beyond = pytest.mark.skipif(not grpo.strict, reason="beyond the formula: GRPO_BEYOND=1 asks for it")
more = functools.partial(pytest.param, marks=beyond)                    # a row of a table that is beyond the formula
f64 = functools.partial(torch.as_tensor, dtype=torch.float64)
numbers = lambda rewards: f64([nan if r is None else r for r in rewards])
LIBRARY = grpo.module.__name__.startswith("check_")                     # another trainer's own code
if not OWN:                                         # from here on, `import grpo` has the student's functions in it
    put = runpy.run_path(str(EXAMPLES / "homework.py"))["put"]
    atexit.unregister(print)
    atexit.register(print, put(grpo.module.__file__, ModuleUnderTest(str(HERE / "grpo.py")).module))


def options(*rows):
    """Parametrize a test by keyword arguments, none at all first."""
    return pytest.mark.parametrize("options", [{}, *rows], ids=str)


def gradient(x, wrt):
    return torch.autograd.grad(x.sum(), wrt, retain_graph=True)[0]


def shown(x):
    text = repr(x.tolist() if isinstance(x, torch.Tensor) else x)
    return re.sub(r"\d+\.\d+(e-\d+)?", lambda x: f"{float(x[0]):.{12 if grpo.at('digits') else 8}g}", text)[:999]


def expect(got, want, equation, tolerance=1e-9, failed={}, **inputs):
    """Compare what came, or what a function gives, with what is right. The message: equation, input, and both."""
    __tracebackhide__ = True
    want, error = f64(want).detach(), None
    try:
        got = got() if callable(got) else got
    except Exception as raised:
        got = error = raised
    if isinstance(got, torch.Tensor) and got.shape == want.shape:
        exact = 1e-9 if grpo.at("digits") else getattr(grpo.module, "TOLERANCE", 1e-6)     # τ = 1.05 in float32
        if torch.allclose(got.detach().double(), want, atol=max(tolerance, exact), rtol=exact, equal_nan=True):
            return
    test = os.environ.get("PYTEST_CURRENT_TEST")
    if not OWN and "pytest" in sys.argv[0] and failed.setdefault(equation, test) != test:     # check.py counts them all
        pytest.skip(f"the same equation fails in {failed[equation]}")
    came_in = "".join(f"\n    input     {name} = {shown(value)}" for name, value in inputs.items())
    raise AssertionError(f"{equation}{came_in}\n    expected  {shown(want)}\n    got       {shown(got)}") from error


def expect_gradient(function, x, equation, **inputs):
    """Compare the gradient with finite differences, along one line on which every element of x moves."""
    x, step = x.detach().requires_grad_(), torch.linspace(1e-6, 2e-6, x.numel()).view_as(x)
    slope = (function(x + step) - function(x - step)).sum() / 2e-6
    expect(lambda: (gradient(function(x), x) * step).sum() / 1e-6, slope, f"the slope of {equation}", 1e-6, **inputs)


def map_rows(function, *ragged):
    return [[function(*values) for values in zip(*rows)] for rows in zip(*ragged)]


class Batch:
    """A ragged batch on a grid: rows for the twins, tensors padded with junk for the functions."""

    def __init__(self, lengths, G, seed=0, junk=(-100.0, 0.0, 3.0), mask_dtype=torch.float64, far=1):
        self.lengths, self.G, self.seed, self.junk, self.T = lengths, G, seed, junk, max([1, *lengths])
        rng = random.Random(seed)
        grid = lambda low, high: [[rng.randint(low, high) / 8 for _ in range(n)] for n in lengths]
        self.rows = dict(logps=grid(-48, -8), entropies=grid(0, 16), rewards=grid(-16, 16), values=grid(-16, 16))
        for name in ("old", "ref", "sampled"):
            self.rows[name] = map_rows(lambda x, y: x + far * y, self.rows["logps"], grid(-8, 8))
        self.rows["ratio"] = map_rows(lambda p, q: math.exp(p - q), self.rows["logps"], self.rows["old"])
        self.A = [rng.randint(-8, 8) / 4 for _ in lengths]
        self.rows["A"] = [[a] * n for a, n in zip(self.A, lengths)]
        self.scores = [rng.choice([0.0, 1.0, a, *[nan, nan] * grpo.at("missing")]) for a in self.A]
        self.mask = self.pad([[1.0] * n for n in lengths]).to(mask_dtype)

    def __repr__(self):
        return f"Batch({self.lengths}, {self.G}, {self.seed})"

    def __getitem__(self, name):
        return f64(self.A) if name == "A" else self.mask if name == "mask" else self.pad(self.rows[name], *self.junk)

    def of(self, *names):
        return {name: self.rows[name] for name in names}

    def pad(self, rows, *junk):
        fill = itertools.cycle(junk or (0.0,))
        return f64([row + [next(fill) for _ in range(len(row), self.T)] for row in rows]).view(len(rows), self.T)

    def real(self, x, padding=0):
        return torch.where(self.mask != 0, x, padding)


@st.composite
def batches(draw):
    """P prompts of G answers, of up to 5 tokens each. For grpo.py itself: empty rows, any mask, any padding as well."""
    G = draw(st.integers(2, 4))
    B = G * draw(st.integers(1, 3))
    shortest = 0 if grpo.at("empty") else 1
    lengths = draw(st.lists(st.integers(shortest, 5), min_size=B, max_size=B).filter(lambda n: any(n) or grpo.strict))
    junk = [nan, inf, -inf, 1e30, -1e30, -100.0, 0.0] if grpo.at("padding") else [-100.0, 3.0, 0.0]
    masks = [torch.bool, torch.int64, torch.uint8, torch.float32] if grpo.strict else [torch.float64]
    return Batch(lengths, G, draw(st.integers(0, 10**6)), draw(st.permutations(junk)), draw(st.sampled_from(masks)))


def for_batches(test):
    return given(batches())(example(Batch([3, 1, 2, 2], 2, seed=3))(test))


def by_rows(name, inputs, twin, equation, *choices, constants="", item=0):
    """Make a test: the value is the twin's (of a row, without a mask of a token), no gradient flows to constants."""
    @pytest.mark.parametrize("options", choices or [{}], ids=str)
    @for_batches
    def test(options, batch):
        names, masked, padding = inputs.split(), "mask" in inputs, float(name == "importance_ratio")
        rows = batch.of(*[n for n in names if n != "mask"])
        values = {n: batch[n] if masked or n == "A" else batch.pad(rows[n]) for n in names}

        def result(**moved):
            got = getattr(grpo, name)(*(values | moved).values(), **options)
            got = got[item] if isinstance(got, tuple) else got
            if not isinstance(got, torch.Tensor) or got.dim() != 2:
                return got
            assert not (grpo.strict and masked and got.isnan().any()), "an answer without a token has a ratio too"
            judged = name == "broadcast_advantages" or grpo.strict and masked and got.shape == batch.mask.shape
            return got if judged else batch.real(got, padding)

        of_row = functools.partial(twin, **options)
        want = [of_row(*row) for row in zip(*rows.values())] if masked else map_rows(of_row, *rows.values())
        expect(result, batch.pad(want, padding), equation, **values, **options)
        for n in set(rows) - {"A"}:
            if n in constants.split():
                passes_on = result(**{n: values[n].clone().requires_grad_()}).requires_grad
                expect(f64(passes_on), 0.0, f"requires_grad = False: {n} is constant (detach)", **values, **options)
            else:
                expect_gradient(lambda x: result(**{n: x}), values[n], equation, **values, **options)

    return test


# §1 Rewards ----------------------------------------------------------------------------------------------------------

ANSWERS = [  # reward, pairs of answer and solution
    (1.0, [("42", "42"), ("<think>41</think>42", "42"), ("1000.0", "1,000")]),
    (1.0, [(r"\boxed{42}", "42"), (r"<think>\boxed{41}</think>\boxed{42}", "42")]),
    (0.0, [("43", "42"), ("<think>42</think>41", "42")]),
    more(1.0, [("1,000", "1000"), ("-7", "-7.0"), ("+3", "3"), ("B 1\t\r\n", "B 1"), ("B", " B"),
               ("5.", "5"), (".5", "0.50"), ("5", 5), ("9" * 999, "9" * 997 + "99."), ("a</think>1</think>2", "2"),
               (r"= \boxed{1,000}.", "1000"), (r"\boxed{Oslo}", "Oslo"), (r"\boxed{1}\boxed{2}", "2"), ("1e-5", 1e-5),
               (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), ("7", r"So it is \boxed{7}.")]),
    more(0.0, [("-7", "7"), ("0.1", "0.10000000000000000001"), ("", "42"), (".", "0"), ("12,34", "1234"), ("0,5", "5"),
               ("1234,567", "1234567"), ("9" * 999, "42"), ("2x", "2"), (r"\boxed{1} 2", "2"), ("1", 1e-5),
               ("nan", "NaN"), ("sNaN", "1"), ("inf", "Infinity"), ("1e999999999", "2e999999999"), (r"\boxed{2", "2")]),
    more(None, [("42", ""), ("42", " "), ("", ""), ("None", None)])]


@pytest.mark.parametrize("reward, pairs", ANSWERS)
def test_accuracy(reward, pairs):
    answers, solutions = map(list, zip(*pairs))
    rule = "r = 1 if the text after the last </think>, else the whole text, is the solution, else 0; None without one"
    expect(lambda: numbers(grpo.accuracy_reward(answers, solutions)), numbers([reward] * len(pairs)), rule,
           completions=answers, solution=solutions)
    if grpo.strict:
        turns = [{"role": "user", "content": "42"}, {"role": "assistant", "content": "?"}]
        chats = [[*turns, {"role": "assistant", "content": answer}] for answer in answers]
        assert grpo.accuracy_reward(answers, solutions) == [reward] * len(pairs)
        assert grpo.accuracy_reward(completions=chats, solution=solutions, prompts=chats) == [reward] * len(pairs)
        hostile = ["1" * 10**5, "\\boxed{" * 15_000, "1,234" * 20_000, "\\boxed{" + "{" * 10**5, "</think>" * 12_000]
        assert not any(grpo.accuracy_reward(hostile, ["7"] * len(hostile)))


@pytest.mark.parametrize("reward, texts", [
    (1.0, ["<think>a</think>b", "<think>\na\n</think>\n\nb\n"]), more(1.0, ["<think></think>b"]),
    (0.0, ["x<think>a</think>b", "a</think>b", "<think>a", "", *["<think>a</think>"] * (not LIBRARY)]),
    more(0.0, [" <think>a</think>b", "<think>a</think> \n", "<think>a<think>b</think>c",
               "<think>a</think>b</think>c", "</think><think>a", "<think>a</think>b<think>", "<Think>a</Think>b",
               "<think>" * 10**4, "<think>" + "<" * 10**5 + "</think>", "<think></think>" + " " * 10**5])])
def test_think_format(reward, texts):
    rule = "r = 1 if the text is <think>...</think> from its first character on, then an answer, else 0"
    expect(lambda: numbers(grpo.think_format_reward(texts)), [reward] * len(texts), rule, completions=texts)
    if grpo.strict:
        chats = [[{"role": "assistant", "content": "x"}, {"role": "assistant", "content": text}] for text in texts]
        assert grpo.think_format_reward(completions=chats, solution=["1"]) == [reward] * len(texts)


@pytest.mark.parametrize("L, c", [(9, 4), (3, 3), more(5, 0)])
def test_soft_overlong(L, c):
    lengths = [0, 1, L - c, L - c + 1, L - 1, L, L + 1, 2 * L]
    ids, rule = [[7] * n for n in lengths], "r = 0 up to L - c, then (L - c - n)/c, -1 beyond L (DAPO eq. 13)"
    want = [0.0 if n <= L - c else -1.0 if n > L else (L - c - n) / c for n in lengths]
    rewards = lambda: numbers(grpo.get_soft_overlong_punishment(L, c)(completion_ids=ids, prompts=None))
    expect(rewards, want, rule, max_completion_len=L, soft_punish_cache=c, completion_ids=ids, lengths=lengths)


@pytest.mark.parametrize("weights", [None, f64([0.7, -2.0]), more([0.7, -2.0])], ids=str)
@given(st.lists(st.tuples(*[st.sampled_from([1.0, 0.8, -3.5, *[nan] * grpo.at("missing")])] * 2), min_size=1))
def test_combine_rewards(weights, rewards):
    factors = [1.0, 1.0] if weights is None else [0.7, -2.0]
    given_ones = [[w * r for w, r in zip(factors, row) if r == r] for row in rewards]
    want = [math.fsum(row) if row else nan for row in given_ones]
    got = lambda: grpo.combine_rewards(f64(rewards), weights)
    expect(got, want, "r = Σ w·r_f, over those that are not NaN", rewards_per_func=rewards, reward_weights=weights)
    assert not grpo.strict or grpo.combine_rewards(torch.tensor([[1, 1]]), [0.5, 0.25]) == 0.75


# §2 Group statistics and advantages ----------------------------------------------------------------------------------

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
        out += [0.0 if r != r or len({r for r in group if r == r}) <= 1 else (r - mean) / scale for r in group]
    return out


@options(dict(correction=0))
@for_batches
def test_group_stats(options, batch):
    got = lambda: torch.stack(grpo.group_stats(f64(batch.scores), batch.G, **options), 1)
    want = [statistics_of(group, **options) for group in groups_of(batch.scores, batch.G)]
    equation = "mean and std = √(Σ (r - mean)² / (n - correction))"
    expect(got, want, equation, rewards=batch.scores, num_generations=batch.G, **options)


@options(dict(correction=0), dict(scale_rewards="none"), dict(scale_rewards="batch"), dict(eps=0.5),
         dict(scale_rewards="batch", correction=0, eps=1e-6))
@for_batches
def test_group_advantages(options, batch):
    got = lambda: grpo.group_advantages(f64(batch.scores), batch.G, **options)
    want = twin_advantages(batch.scores, batch.G, **options)
    equation = "A = r - mean" if options.get("scale_rewards") == "none" else (
        "A = (r - mean) / (std + eps), std with n - 1, eps = 1e-4 outside the root (DeepSeekMath §4.1.2)")
    expect(got, want, equation, rewards=batch.scores, num_generations=batch.G, **options)


@pytest.mark.skipif(not grpo.at("equal"), reason="beyond the formula")
def test_equal_rewards_give_exactly_zero_in_float32():
    cases = [torch.full((G,), value) for G in range(2, 17) for value in (0.1, 0.7, 1e-3, 1e8, -3.3)]
    for rewards in cases:
        expect(grpo.group_advantages(rewards, len(rewards)), rewards * 0, "A = 0 if all are equal", 0, rewards=rewards)
    for rewards in cases:
        G, steps = len(rewards), rewards[:, None].expand(-1, 3)
        assert torch.equal(torch.stack(grpo.group_stats(rewards, G)), torch.stack([rewards[:1], rewards[:1] * 0]))
        scaled = [grpo.group_advantages(rewards, G, scale_rewards=how, eps=0.0) for how in ("group", "batch", "none")]
        assert not torch.stack([*scaled, grpo.leave_one_out_advantages(rewards, G)]).any()
        assert not grpo.process_advantages(steps, torch.zeros_like(steps), torch.ones(G, 3), G, eps=0.0).any()


@for_batches
def test_leave_one_out(batch):
    want, G = [], batch.G
    for group in groups_of(batch.scores, G):
        means = [statistics_of(group[:i] + group[i + 1 :])[0] for i in range(G)]
        want += [r - mean if r - mean == r - mean else 0.0 for r, mean in zip(group, means)]
    got = lambda: grpo.leave_one_out_advantages(f64(batch.scores), G)
    expect(got, want, "A = r - mean of the other G - 1 (RLOO)", rewards=batch.scores, num_generations=G)


@options(dict(correction=0), dict(eps=0.5))
@for_batches
def test_process_advantages(options, batch):
    rng, S, T = random.Random(str(batch.A)), 3, batch.T
    rewards = [[rng.choice([0.0, 0.5, 1.0, *[nan] * grpo.at("missing")]) for _ in range(S)] for _ in batch.lengths]
    ends = map_rows(lambda r: rng.randrange(T) if r == r else rng.choice([-5, 0, 999]), rewards)
    scaled = groups_of(twin_advantages(sum(rewards, []), batch.G * S, **options), S)
    want = [[math.fsum(a for a, end in zip(scaled[i], ends[i]) if end >= t) for t in range(n)]
            for i, n in enumerate(batch.lengths)]
    got = lambda: grpo.process_advantages(f64(rewards), torch.tensor(ends), batch.mask, batch.G, **options)
    expect(got, batch.pad(want), "A_t = Σ normalised rewards of steps that end at or after t (DeepSeekMath §4.1.3)",
           step_rewards=rewards, step_ends=ends, completion_mask=batch.mask, num_generations=batch.G, **options)


def twin_gae(r, v, gamma=1.0, lam=0.95):
    deltas = [r[t] + gamma * [*v, 0.0][t + 1] - v[t] for t in range(len(r))]
    return [math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(r))) for t in range(len(r))]


test_gae = by_rows("gae_advantages", "rewards values mask", twin_gae,
                   "A_t = Σ_k (γλ)^k·δ_{t+k}, δ_t = r_t + γ·V_{t+1} - V_t",
                   {}, dict(gamma=0.5), dict(gamma=0.9, lam=0.5), dict(lam=0.0), dict(lam=1.0))
test_returns = by_rows("gae_advantages", "rewards values mask", lambda r, v: [a + b for a, b in zip(twin_gae(r, v), v)],
                       "return_t = A_t + V_t", item=1)
test_broadcast = by_rows("broadcast_advantages", "A mask", lambda A: A, "A_t = A on real tokens, 0 at padding")


# §3 Log-probabilities ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("one", [True, False])
@given(st.lists(st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=1, max_size=4),
       st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True))
@example([[3, 0, 0, 0], [0, 3, 3, 3], [3, 3, 3, 3]], [0])               # pad = EOS
def test_completion_mask(one, ids, eos):
    want = [[float(not any(token in eos[: 1 if one else 3] for token in row[:t])) for t in range(4)] for row in ids]
    for kind in [eos[0]] if one else [eos, torch.tensor(eos)][: 1 + grpo.strict]:
        got = lambda: grpo.completion_mask(torch.tensor(ids), kind)
        expect(got, want, "m = 1 up to and including the first EOS", ids=ids, eos_token_ids=kind)


@pytest.mark.parametrize("name", ["selective_log_softmax", "entropy_from_logits"])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_selective_log_softmax_and_entropy(scale, name):
    torch.manual_seed(0)
    logits, index = torch.randn(2, 3, 4, dtype=torch.float64) * scale, torch.tensor([[0, 1, 3], [3, 0, 1]])
    logps = [[[x - max(z) - math.log(math.fsum(math.exp(y - max(z)) for y in z)) for x in z] for z in row]
             for row in logits.tolist()]
    chosen = map_rows(lambda p, i: p[i], logps, index)
    entropies = map_rows(lambda p: -math.fsum(math.exp(x) * x for x in p), logps)
    function, want, equation = dict(
        selective_log_softmax=(lambda x: grpo.selective_log_softmax(x, index), chosen, "log p = z - log Σ exp(z)"),
        entropy_from_logits=(lambda x: grpo.entropy_from_logits(x), entropies, "H = -Σ p·log p"))[name]
    forms = [lambda x: x, lambda x: torch.nn.functional.pad(x, (0, 1), value=-inf)]     # -inf rules a word out
    for form in forms if grpo.strict else forms[:1]:
        expect(lambda: function(form(logits)), want, equation, logits=logits, index=index)
        expect_gradient(lambda x: function(form(x)), logits, equation, logits=logits, index=index)


def make_model(kind, auto_class="AutoModelForCausalLM"):
    """A model of random weights, large enough that its distributions are far from uniform."""
    words = dict(vocab_size=20, bos_token_id=None, eos_token_id=1, pad_token_id=0, num_hidden_layers=2, hidden_size=32)
    shape = words | dict(intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    linear = shape | dict(num_hidden_layers=4, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
                          linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1,
                          moe_intermediate_size=16, shared_expert_intermediate_size=16)   # 3 of 4 layers: linear
    gpt2 = words | dict(num_attention_heads=4, max_position_embeddings=64)
    opt = gpt2 | dict(word_embed_proj_dim=32, ffn_dim=48)
    shapes = dict(GPT2=gpt2, OPT=opt, Llama=shape | dict(num_labels=1), Qwen2=shape, Qwen3Next=linear, Mamba=words)
    model = getattr(transformers, auto_class).from_config(getattr(transformers, f"{kind}Config")(**shapes[kind])).eval()
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def scoring_batch():
    """Prompts and answers of several lengths; what stands at padding is no word, in a student's test word 0."""
    torch.manual_seed(1)
    prompt_mask = torch.tensor([[0] * (4 - n) + [1] * n for n in (4, 2, 1, 3)])
    answer_mask = torch.tensor([[1] * n + [0] * (6 - n) for n in (6, 3, 0, 1)])
    prompt_ids = torch.randint(20, (4, 4)).masked_fill(prompt_mask == 0, -9 if grpo.at("padding") else 0)
    answer_ids = torch.randint(20, (4, 6)).masked_fill(answer_mask == 0, 10**6 if grpo.at("padding") else 0)
    return prompt_ids, prompt_mask, answer_ids, answer_mask


@pytest.mark.parametrize("kind", ["Llama", *["GPT2", "OPT"] * grpo.at("positions")])
@options(dict(temperature=0.7), dict(temperature=0.7, compute_entropy=True))
def test_per_token_logps_are_those_of_each_row_alone(kind, options):
    model, batch = make_model(kind).double(), scoring_batch()
    prompt_ids, prompt_mask, answer_ids, answer_mask = batch
    want, want_H = torch.zeros(4, 6).double(), torch.zeros(4, 6).double()
    for i in range(4):
        prompt, answer = prompt_ids[i][prompt_mask[i] == 1], answer_ids[i][answer_mask[i] == 1]
        logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        logps = (logits / options.get("temperature", 1.0)).log_softmax(-1)
        want[i, : len(answer)] = logps.gather(1, answer[:, None])[:, 0]
        want_H[i, : len(answer)] = -(logps.exp() * logps).sum(1).detach()
    inputs = dict(zip(("prompt_ids", "prompt_mask", "completion_ids", "completion_mask"), batch)) | options
    rule = "log π(o_t) = log softmax(logits / temperature), at the position before o_t"
    tolerance = 1e-9 if grpo.at("digits") else 1e-5     # without position ids, float32 rounds other rotary angles
    real = lambda x: x if grpo.strict else torch.where(answer_mask == 1, x, 0)          # else the padding's are free
    expect(lambda: real(grpo.per_token_logps(model, *batch, **options)[0]), want, rule, tolerance, **inputs)
    logps, entropies = grpo.per_token_logps(model, *batch, **options)
    scale = torch.linspace(1, 2, want.numel()).view_as(want)
    for p in model.parameters():
        expect(gradient(real(logps) * scale, p), gradient(want * scale, p), rule + ": the gradient", 100 * tolerance)
    if "compute_entropy" in options:
        expect(real(entropies), want_H, "H = -Σ p·log p at each position", tolerance, **inputs)
        needs_grad = entropies.requires_grad and not LIBRARY            # which may leave that to the mask made of them
        expect(f64(needs_grad), 0.0, "entropies.requires_grad = False: no gradient (detach)", **inputs)
    assert not grpo.strict or (entropies is None) == ("compute_entropy" not in options)


@beyond
def test_per_token_logps_takes_other_dtypes_and_no_tokens_and_is_one_call():
    model, calls = make_model("Llama").bfloat16(), []
    model.register_forward_hook(lambda module, args, options, output: calls.append((options, output)), with_kwargs=True)
    prompt_ids, prompt_mask, answer_ids, answer_mask = scoring_batch()
    prompts = prompt_ids.int(), prompt_mask.bool()
    got, entropies = grpo.per_token_logps(model, *prompts, answer_ids.int(), answer_mask.float(), compute_entropy=True)
    (options, output), = calls
    assert output.logits.shape == (4, 7, 20) and options["use_cache"] is False and output.past_key_values is None
    assert got.dtype == entropies.dtype == torch.float32 and not entropies[answer_mask == 0].any()
    logps = output.logits[:1, :-1].float().log_softmax(-1)              # the softmax is not in half precision
    expect(got[:1], logps.gather(2, answer_ids[:1, :, None])[..., 0], "log softmax in float32", 1e-6)
    assert grpo.per_token_logps(model, *prompts, answer_ids[:, :0], answer_mask[:, :0])[0].shape == (4, 0)


# §4 Importance ratio and clip ----------------------------------------------------------------------------------------

RATIO = "ρ = exp(log π - log π_old) (DeepSeekMath eq. 3); of a sequence exp(mean of log ρ over its tokens) (GSPO eq. 7)"
POLICIES = dict(clip="l = -min(ρ·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A) (DeepSeekMath eq. 3)",
                cispo="l = -sg[min(ρ, ε_high)]·A·log π (CISPO eq. 4)", sapo="l = -σ(τ(ρ - 1))·4/τ·A (SAPO eq. 5)")
SEQUENCE = dict(importance_sampling_level="sequence")


def twin_importance(p, q, importance_sampling_level="token"):
    logs = [a - b for a, b in zip(p, q)]
    return [math.exp(math.fsum(logs) / len(logs) if importance_sampling_level == "sequence" else x) for x in logs]


def twin_clip(r, epsilon_low=0.2, epsilon_high=0.2):
    return min(max(r, 1 - epsilon_low), 1 + epsilon_high)


def twin_clipped(r, A, epsilon_low=0.2, epsilon_high=0.2, delta=None):
    return -min((r if delta is None else min(r, delta)) * A, twin_clip(r, epsilon_low, epsilon_high) * A)


def twin_sapo(r, A, temperature_pos=1.0, temperature_neg=1.05):
    tau = temperature_pos if A > 0 else temperature_neg
    return -4 / tau * A / (1 + math.exp(-tau * (r - 1)))


test_importance_ratio = by_rows("importance_ratio", "logps old mask", twin_importance, RATIO, {}, SEQUENCE)
test_clip_ratio = by_rows("clip_ratio", "ratio", twin_clip, "clip(ρ, 1 - ε_low, 1 + ε_high)",
                          {}, dict(epsilon_low=0.1, epsilon_high=0.5))
test_clipped_surrogate = by_rows("clipped_surrogate_loss", "ratio A", twin_clipped, POLICIES["clip"],
                                 {}, dict(epsilon_low=0.1, epsilon_high=0.5), dict(delta=1.4))
test_cispo = by_rows("cispo_loss", "logps ratio A", lambda p, r, A, epsilon_high=5.0: -min(r, epsilon_high) * A * p,
                     POLICIES["cispo"], {}, dict(epsilon_high=1.2), constants="ratio")
test_sapo = by_rows("sapo_loss", "ratio A", twin_sapo,
                    POLICIES["sapo"] + "; τ in A's dtype: torch.where of two numbers gives float32",
                    {}, dict(temperature_pos=0.5, temperature_neg=2.0))
test_truncated_importance_ratio = by_rows(
    "truncated_importance_ratio", "old sampled", lambda p, q, cap=2.0: min(math.exp(p - q), cap),
    "w = min(exp(old - sampled), cap)", {}, dict(cap=1.2), constants="old sampled")


# §5 KL ---------------------------------------------------------------------------------------------------------------

TWIN_KL = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
test_kl_estimate = by_rows("kl_estimate", "logps ref", lambda p, q, estimator="k3": TWIN_KL[estimator](p - q),
                           "k3 = exp(-k1) + k1 - 1, k1 = log π - log π_ref, k2 = ½·k1² (DeepSeekMath eq. 4)",
                           {}, *[dict(estimator=k) for k in TWIN_KL])
test_kl_penalized_rewards = by_rows("kl_penalized_rewards", "A logps ref mask", lambda A, p, q, beta: [
    -beta * (a - b) + A[0] * (t == len(p) - 1) for t, (a, b) in enumerate(zip(p, q))],
    "r_t = -β·(log π - log π_ref), and the score A at the end (DeepSeekMath eq. 2)", dict(beta=0.0), dict(beta=0.5))
FAR = Batch([2, 2], 2, seed=42, far=18)             # the policy has left the old one and the reference far behind


@beyond
def test_the_score_stands_at_the_last_real_token_where_the_mask_has_a_hole():
    logps, ref = f64([[1.0, nan, 2.0, inf]]), f64([[0.5, inf, 3.0, 0.0]])
    got = grpo.kl_penalized_rewards(f64([3.0]), logps, ref, f64([[1, 0, 1, 0]]), beta=0.1)
    expect(got, [[-0.05, 0.0, 3.1, 0.0]], "the score at the last real token")


@pytest.mark.parametrize("estimator", TWIN_KL)
def test_kl_estimate_far_off(estimator):
    want = map_rows(lambda p, q: TWIN_KL[estimator](p - q), *FAR.of("logps", "ref").values())
    got = grpo.kl_estimate(FAR["logps"], FAR["ref"], estimator=estimator)
    expect(got, want, f"{estimator}, however large log π - log π_ref is", **FAR.of("logps", "ref"))


@beyond
def test_k3_is_never_negative_in_float32():
    torch.manual_seed(0)
    logps, noise = torch.randn(2, 1000, 200)
    for scale in (1e-8, 1e-6, 1e-4, 1e-2, 1.0, 10.0):                   # at 1e-4, exp(-d) + d - 1 is, in places
        k3 = grpo.kl_estimate(logps * scale - 1, (logps + noise) * scale - 1)
        expect(k3.min().clamp(max=0), 0.0, "k3 >= 0 in float32: expm1(d) - d, not exp(d) - d - 1", 0.0, scale=scale)


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
    kl = {k: grpo.kl_estimate(logps, ref, estimator=k) for k in TWIN_KL}
    exact = (p[:, 0] * (logps - ref).sum(1)).sum()
    expect((p * kl["k1"]).sum(), exact, "E k1 = KL(π‖π_ref)")
    expect((p * kl["k3"]).sum(), exact, "E k3 = KL(π‖π_ref)")
    assert abs((p * kl["k2"]).sum() - exact) > 1e-2                     # biased
    # The gradients of single tokens (the last of each sequence), where "∇KL" is that of the token's distribution.
    first, table, ref_table = p.view(3, 3).sum(1), theta[:3].log_softmax(1), ref[:, 1].view(3, 3)
    of_policy = gradient(first * (table.exp() * (table - ref_table)).sum(1), theta)
    of_reference = gradient(first * (ref_table.exp() * (ref_table - table)).sum(1), theta)
    ratio = grpo.importance_ratio(logps, logps.detach(), torch.ones(9, 2))
    for x, want, equation in ((kl["k1"], torch.zeros(4, 3), "E ∇k1 = 0: no signal at all"),
                              (kl["k2"], of_policy, "E ∇k2 = ∇KL(π‖π_ref)"),
                              (kl["k3"], of_reference, "E ∇k3 = ∇KL(π_ref‖π)"),
                              (kl["k3"] * ratio, of_policy, "E ∇(ρ·k3) = ∇KL(π‖π_ref): bias correction")):
        expect(gradient((p * x)[:, 1:], theta), want, equation)


# §6 Masks ------------------------------------------------------------------------------------------------------------

def twin_threshold(batch, quantile):
    """The (1 - quantile)-quantile of the real tokens' entropies, interpolated; exact, for all lies on a grid."""
    entropies = sorted(sum(batch.rows["entropies"], [])) or [0.0]
    position = (1 - quantile) * (len(entropies) - 1)
    below, above = entropies[math.floor(position)], entropies[math.ceil(position)]
    return below + (position - math.floor(position)) * (above - below)


@given(batches(), st.integers(0, 8).map(lambda k: k / 8))
def test_top_entropy_mask(batch, quantile):
    inputs = dict(entropies=batch["entropies"], completion_mask=batch.mask, quantile=quantile)
    want = batch.pad(map_rows(lambda h: float(h >= twin_threshold(batch, quantile)), batch.rows["entropies"]))
    expect(lambda: grpo.top_entropy_mask(**inputs), want, "m = 1 where H >= their (1 - quantile)-quantile", **inputs)


# §7 The aggregations -------------------------------------------------------------------------------------------------

AGGREGATE = {"grpo": "loss = mean over rows of (Σ_t l·m / Σ_t m)", "bnpo": "loss = Σ l·m / Σ m",
             "dr_grpo": "loss = Σ l·m / (rows · max_completion_length)", "dapo": "loss = Σ l·m / tokens of the batch"}


def twin_aggregate(rows, loss_type, max_completion_length=1, num_items_in_batch=None, num_rows_in_batch=None):
    n, tokens, total = num_rows_in_batch or max(len(rows), 1), max(sum(map(len, rows)), 1), math.fsum(sum(rows, []))
    if loss_type == "grpo":
        return math.fsum(math.fsum(row) / len(row) for row in rows if row) / n
    items = num_items_in_batch or tokens
    return total / {"bnpo": tokens, "dapo": items, "dr_grpo": n * max_completion_length}[loss_type]


@pytest.mark.parametrize("loss_type", AGGREGATE)
@options(dict(num_items_in_batch=40, num_rows_in_batch=20), more(dict(num_items_in_batch=1, num_rows_in_batch=1)))
@for_batches
def test_aggregate(loss_type, options, batch):
    options, rows = options | dict(loss_type=loss_type, max_completion_length=7), batch.rows["rewards"]
    equation, inputs = AGGREGATE[loss_type], dict(per_token_loss=batch["rewards"], mask=batch.mask) | options
    got = lambda: grpo.aggregate(batch["rewards"], batch.mask, **options)
    expect(got, twin_aggregate(rows, **options), equation, **inputs)
    expect_gradient(lambda x: grpo.aggregate(x, batch.mask, **options), batch["rewards"], equation, **inputs)
    if grpo.strict:
        want = twin_aggregate(batch.rows["A"], **options)
        expect(grpo.aggregate(batch["A"][:, None], batch.mask, **options), want, "a loss for each answer")


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@given(batches(), st.integers(1, 3))
def test_any_split_gives_the_whole_value_and_gradient(loss_type, batch, size):
    tensors = batch["logps"].requires_grad_(), batch["A"], batch.mask, batch["old"], batch["ref"]
    options = dict(loss_type=loss_type, beta=0.1, max_completion_length=7, num_items_in_batch=sum(batch.lengths),
                   num_rows_in_batch=len(batch.lengths))
    run = lambda x, A, mask, old, ref: grpo.grpo_loss(x, A, mask, old_logps=old, ref_logps=ref, **options)
    losses, metrics = zip(*map(run, *[x.split(size) for x in tensors]))
    (whole, want), parts = run(*tensors), sum(losses)
    inputs, rule = dict(lengths=batch.lengths, rows_of_a_part=size) | options, "loss = the sum of the parts' losses"
    expect(parts, whole, rule, **inputs)
    expect(gradient(parts, tensors[0]), gradient(whole, tensors[0]), rule + ", and so their gradients", **inputs)
    for name in want if grpo.strict else ():
        assert math.fsum(part[name] for part in metrics) == pytest.approx(want[name], abs=1e-6)


# §8 The loss ---------------------------------------------------------------------------------------------------------

CHOICES = dict(epsilon_low=[0.2, 0.1, 0.0], epsilon_high=[0.2, 0.4, 0.0, 0.8], delta=[None, 2.0], beta=[0.0, 0.1],
               use_bias_correction_kl=[False, True], top_entropy_quantile=[1.0, 0.5], sampling_cap=[2.0, 1.1])
KINDS = [dict(policy_loss=policy, loss_type=name, importance_sampling_level=level) for level in ("token", "sequence")
         for policy in ("clip", "cispo", "sapo") for name in ("dapo", "grpo", "bnpo", "dr_grpo")]
DEFAULTS = {name: values[0] for name, values in CHOICES.items()} | KINDS[0] | dict(kl_estimator="k3")


def known(options):
    """Those that the grpo_loss under test has; test_grpo_loss, which has a row for each, names the others."""
    return {name: value for name, value in options.items() if name not in grpo.lacks("grpo_loss", options)}


any_case = st.tuples(batches(), st.fixed_dictionaries({n: st.sampled_from(v) for n, v in known(CHOICES).items()}),
                     *map(st.sampled_from, [[False, grpo.strict], ["old", "logps"], ["logps", "sampled"]]))


def twin_loss(batch, old="old", corrected=False, **options):
    """The loss and the metrics, in lists of rows of tokens."""
    o, rows = DEFAULTS | options, batch.rows
    ratio = [twin_importance(p, q, o["importance_sampling_level"]) for p, q in zip(rows["logps"], rows[old])]
    low, high, policy = {"clip": (1 - o["epsilon_low"], 1 + o["epsilon_high"], lambda p, r, A: twin_clipped(
                                  r, A, o["epsilon_low"], o["epsilon_high"], o["delta"])),
                         "cispo": (0.0, o["epsilon_high"], lambda p, r, A: -min(r, o["epsilon_high"]) * A * p),
                         "sapo": (0.0, inf, lambda p, r, A: twin_sapo(r, A))}[o["policy_loss"]]
    loss = map_rows(policy, rows["logps"], ratio, rows["A"])
    if o["top_entropy_quantile"] < 1:
        threshold = twin_threshold(batch, o["top_entropy_quantile"])
        loss = map_rows(lambda x, H: x if H >= threshold else 0.0, loss, rows["entropies"])
    if corrected:
        loss = map_rows(lambda x, p, q: x * min(math.exp(p - q), o["sampling_cap"]), loss, rows[old], rows["sampled"])
    kl = map_rows(lambda p, q: TWIN_KL[o["kl_estimator"]](p - q), rows["logps"], rows["ref"])
    if o["use_bias_correction_kl"]:
        kl = map_rows(lambda k, r: k * r, kl, ratio)
    loss = map_rows(lambda x, k: x + o["beta"] * k, loss, kl)
    clipped_low = map_rows(lambda r, A: float(r < low and A < 0), ratio, rows["A"])
    clipped_high = map_rows(lambda r, A: float(r > high and A > 0), ratio, rows["A"])
    metrics = dict(low=clipped_low, high=clipped_high, region=map_rows(max, clipped_low, clipped_high))
    metrics = {f"clip_ratio/{side}_mean": x for side, x in metrics.items()} | dict(kl=kl, entropy=rows["entropies"])
    return twin_aggregate(loss, o["loss_type"], 7), {name: twin_aggregate(x, "bnpo") for name, x in metrics.items()}


def check(what, batch, o, per_token=False, old="old", sampled="logps"):
    """Compare the loss and its gradient, or the metrics, with the twin's; all arguments that it takes are given."""
    o = {name: value for name, value in o.items() if value != DEFAULTS[name]}
    if o.get("policy_loss") == "cispo":             # whose bound is a cap
        o["epsilon_high"] = 1 + o.get("epsilon_high", 0.2)
    A = batch["rewards" if per_token else "A"]
    batch.rows["A"] = batch.rows["rewards" if per_token else "A"]
    names = dict(ref_logps="ref", entropies="entropies", old_logps=old, sampling_logps=sampled)
    names = {name: row for name, row in known(names).items() if row != "logps"}           # left out while on-policy
    constants = {name: batch[row].requires_grad_(grpo.strict or what == "constants") for name, row in names.items()}
    fixed = constants | known(dict(max_completion_length=7)) | o
    call = lambda logps, module=grpo: module.grpo_loss(logps, A, batch.mask, **fixed)
    logps = batch["logps"].requires_grad_()
    inputs = dict(logps=logps, A=A, mask=batch.mask) | fixed
    equation = f"loss = aggregate(l·top_entropy_mask·w + β·KL), {POLICIES[o.get('policy_loss', 'clip')]}"
    equation += "; k1 = log π - log π_ref, k3 = exp(-k1) + k1 - 1" * ("beta" in o)
    equation += "; ρ = exp(mean of an answer's log ρ)" * ("importance_sampling_level" in o)
    equation += "; the first ρ at most δ" * ("delta" in o)
    want, want_metrics = twin_loss(batch, old, "sampling_logps" in names, **o)
    expect(lambda: call(logps)[0], want, equation, **inputs)
    loss, metrics = call(logps)
    if what == "metrics":
        assert not grpo.strict or set(metrics) == set(want_metrics) and set(map(type, metrics.values())) == {float}
        for name in sorted(set(metrics) & set(want_metrics) | set(["kl"] * ("beta" in o and metrics != {}))):
            bounds = "cap" if o.get("policy_loss") == "cispo" else "1 + ε_high, A > 0; low: ρ < 1 - ε_low, A < 0"
            rule = f"{name} = a mean over real tokens; high: of ρ > {bounds}"
            expect(f64(metrics.get(name, nan)), want_metrics[name], rule, 1e-7, **inputs)
        return
    loss.backward()
    for name, x in constants.items():
        expect(f64(0.0 if x.grad is None else x.grad.abs().sum()), 0.0, f"∂loss/∂{name} = 0: detach it", **inputs)
    if not OWN:
        expect(logps.grad, gradient(call(logps, reference)[0], logps), f"the gradient of {equation}", **inputs)
    elif old == "old" and o.get("policy_loss") != "cispo" and 0.0 not in o.values():       # no kink at ρ = 1
        expect_gradient(lambda x: call(x)[0], logps, equation, **inputs)
    assert not grpo.strict or logps.grad.isfinite().all() and not logps.grad[batch.mask == 0].any()


@options(*[dict(loss_type=name) for name in ("grpo", "bnpo", "dr_grpo")], SEQUENCE, dict(delta=1.4), dict(beta=0.1),
         dict(epsilon_low=0.1, epsilon_high=0.5), dict(policy_loss="cispo"), dict(policy_loss="sapo", loss_type="grpo"),
         SEQUENCE | dict(loss_type="grpo"), dict(sampling_cap=1.2), SEQUENCE | dict(loss_type="grpo", sampling_cap=1.2),
         dict(beta=0.1, kl_estimator="k1"), dict(beta=0.1, use_bias_correction_kl=True), dict(top_entropy_quantile=0.5),
         dict(beta=0.1, top_entropy_quantile=0.5), dict(beta=0.1, loss_type="grpo"))
@for_batches
def test_grpo_loss(options, batch):
    check("loss", batch, options, sampled="sampled" if "sampling_cap" in options else "logps")


@pytest.mark.skipif(LIBRARY, reason="there they come without a gradient")
@for_batches
def test_grpo_loss_takes_the_other_log_probs_as_constants(batch):
    check("constants", batch, dict(beta=0.1), sampled="sampled")


@options(SEQUENCE | dict(loss_type="grpo"), dict(policy_loss="sapo", loss_type="grpo"), dict(beta=0.1))
def test_grpo_loss_far_off(options):
    check("loss", FAR, options)


@pytest.mark.parametrize("kind", [*KINDS, dict(kl_estimator="k1"), dict(kl_estimator="k2")], ids=str)
@given(any_case)
def test_grpo_loss_with_any_options(kind, case):
    check("loss", case[0], case[1] | kind, *case[2:])


@pytest.mark.parametrize("kind", [{}, SEQUENCE, dict(loss_type="grpo"), dict(policy_loss="cispo"), dict(delta=1.1),
                                  dict(policy_loss="sapo", loss_type="grpo")], ids=str)
@given(any_case)
@example((Batch([3, 1, 2, 2], 2, seed=3), known(dict(use_bias_correction_kl=True)), False, "old", "logps"))
def test_grpo_loss_metrics(kind, case):
    check("metrics", case[0], case[1] | kind, *case[2:])


@pytest.mark.skipif(not grpo.at("empty"), reason="beyond the formula")
@options(dict(loss_type="grpo"), dict(loss_type="bnpo"), SEQUENCE | dict(loss_type="dr_grpo"))
@pytest.mark.parametrize("what", ["loss", "metrics"])
@pytest.mark.parametrize("lengths", [[1, 0], [0, 0], *[[]] * grpo.strict], ids=str)
def test_answers_without_a_token(options, what, lengths):
    check(what, Batch(lengths, 2, 0, [nan] * grpo.strict), options | known(dict(top_entropy_quantile=0.5)))


def test_on_policy_the_value_is_zero_and_the_gradient_is_reinforce():
    theta, logps, _ = enumeration()
    A, mask = f64([1.0, -1.0, 0.0] * 3), torch.ones(9, 2, dtype=torch.float64)
    loss = grpo.grpo_loss(logps, A, mask)[0]
    expect(loss, 0.0, "on-policy, equal lengths: the loss is -mean A = 0", advantages=A)
    want = gradient(-(A[:, None] * logps).sum() / 18, theta)
    expect(gradient(loss, theta), want, "on-policy the gradient is REINFORCE's: -mean of A·∇log π", advantages=A)
    p, rewards = logps.sum(1).exp(), f64([1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 2.0])
    loss = grpo.grpo_loss(logps, 9 * p.detach() * rewards, mask, loss_type="dr_grpo", max_completion_length=1)[0]
    expect(gradient(loss, theta), -gradient(p * rewards, theta), "E ∇loss = -∇ E[r]", rewards=rewards)


# Shapes, dtypes and errors of every function -------------------------------------------------------------------------
# X, M, I are (B, T) = (4, 3): numbers, a mask, integers. R is (B,), L is (B, T, V).

CALLS = {  # what the results are like, and the calls
    "R": ["combine_rewards(X, X[0])", "group_advantages(R, 2)", "leave_one_out_advantages(R, 2)"],
    "R[:2]": ["group_stats(R, 2)"],
    "X": ["process_advantages(X, I, M, 2)", "gae_advantages(X, X, M)", "broadcast_advantages(R, M)",
          "selective_log_softmax(L, I)", "entropy_from_logits(L)", "importance_ratio(X, X, M)", "clip_ratio(X)",
          "clipped_surrogate_loss(X, R)", "clipped_surrogate_loss(X, X)", "cispo_loss(X, X, R)", "cispo_loss(X, X, X)",
          "cispo_loss(X, X[:, :1], R)", "sapo_loss(X, R)", "sapo_loss(X, X)", "truncated_importance_ratio(X, X)",
          "kl_estimate(X, X)", "kl_penalized_rewards(R, X, X, M, beta=0.1)"],
    "X[:, :1]": ["importance_ratio(X, X, M, importance_sampling_level='sequence')", "sapo_loss(X[:, :1], R)",
                 "clipped_surrogate_loss(X[:, :1], R)"],
    "I": ["completion_mask(I, 1)"], "M": ["top_entropy_mask(X, M, 0.5)"],
    "X[0]": ["clip_ratio(X[0])", "kl_estimate(X[0], X[0])", "truncated_importance_ratio(X[0], X[0])"],
    "X[0, 0]": ["clip_ratio(X[0, 0])", "kl_estimate(X[0, 0], X[0, 0])", "aggregate(X, M, loss_type='grpo')",
                "aggregate(X[:, :1], M, loss_type='grpo')", "grpo_loss(X, X, M)",
                "truncated_importance_ratio(X[0, 0], X[0, 0])",
                "grpo_loss(X, R, M, old_logps=X, ref_logps=X, entropies=X, sampling_logps=X, beta=0.1)"]}


def evaluate(call, dtype=torch.float64):
    torch.manual_seed(0)
    space = dict(X=torch.randn(4, 3).to(dtype), R=torch.randn(4).to(dtype), L=torch.randn(4, 3, 5).to(dtype),
                 M=torch.ones(4, 3).tril(), I=torch.randint(3, (4, 3)))
    before, result = copy.deepcopy(space), eval(call, {"grpo": grpo, "llama": make_model("Llama").double()} | space)
    assert all(torch.equal(x, before[name]) for name, x in space.items()), "an argument is changed"
    return result


@own_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("like, call", [(like, call) for like in CALLS for call in CALLS[like]])
def test_shapes_and_dtypes_and_no_argument_is_changed(like, call, dtype):
    results, want = evaluate("grpo." + call, dtype), evaluate(like, dtype)
    for x in results if isinstance(results, tuple) else [results]:
        assert isinstance(x, dict) or (x.shape, x.dtype) == (want.shape, want.dtype)


LEGAL = {  # cuts that leave the shapes as they may be
    "combine_rewards(X[:-1], X[0])", "combine_rewards(X[:1], X[0])", "broadcast_advantages(R, M[:, :-1])",
    "broadcast_advantages(R, M[:, :1])", "clipped_surrogate_loss(X[:, :-1], R)", "clipped_surrogate_loss(X[:, :1], R)",
    "clipped_surrogate_loss(X[:, :1], X)", "cispo_loss(X, X[:, :1], R)", "cispo_loss(X, X[:, :1], X)",
    "sapo_loss(X[:, :-1], R)", "sapo_loss(X[:, :1], R)", "sapo_loss(X[:, :1], X)",
    "aggregate(X[:, :1], M, loss_type='grpo')"}


@own_only
@pytest.mark.parametrize("call", [*sum(CALLS.values(), []), "per_token_logps(None, I, M + 1, I, M)",
                                  "generate(None, I, M, max_completion_length=1, eos_token_ids=1)"])
def test_any_wrong_shape_is_a_value_error_that_names_an_argument(call):
    for tensor in re.finditer(r"\b[XMIRL]\b(?!\[)", call) if len(re.findall(r"\b[XMIRL]\b", call)) > 1 else []:
        cuts = ["[:-1]", "[:1]", "[None]", "[0]", "[:, :-1]", "[:, :1]"]
        for cut in cuts[:4] if tensor[0] == "R" or "[:, :1]" in call else cuts:
            wrong = call[: tensor.end()] + cut + call[tensor.end() :]
            if wrong not in LEGAL:
                with pytest.raises(ValueError, match=r"^\w+: got .*; allowed "):
                    evaluate("grpo." + wrong)
                    pytest.fail(f"{wrong} passes")


WRONG = {  # the argument that the message must name, and the calls
    "reward_weights": "combine_rewards(X, [1.0, 2.0])", "rewards": "group_stats([1.0, 2.0], 2); group_stats(X, 2)",
    "num_generations": "group_stats(R, 3); group_stats(R, 1); group_stats(R, 0); group_stats(R, 2, correction=2);"
                       "group_advantages(R, 3); leave_one_out_advantages(R, 1); process_advantages(X, I, M, 3)",
    "step_ends": "process_advantages(X, I + 3, M, 2); process_advantages(X, I - 1, M, 2)",
    "scale_rewards": "group_advantages(R, 2, scale_rewards='std')", "rewards_per_func": "combine_rewards(R[0])",
    "prompt_mask": "per_token_logps(None, I[1:], M[1:], I[1:], M[1:]); per_token_logps(None, I[:, :0], M[:, :0], I, M)",
    "importance_sampling_level": "grpo_loss(X, R, M, importance_sampling_level='word')",
    "estimator": "kl_estimate(X, X, estimator='k4'); grpo_loss(X, R, M, ref_logps=X, kl_estimator='k4')",
    "loss_type": "aggregate(X, M, loss_type='mean'); grpo_loss(X, R, M, loss_type=None)",
    "max_completion_length": "aggregate(X, M, loss_type='dr_grpo'); grpo_loss(X, R, M, loss_type='dr_grpo')",
    "ref_logps": "grpo_loss(X, R, M, beta=0.1)",
    "entropies": "grpo_loss(X, R, M, top_entropy_quantile=0.5)", "policy_loss": "grpo_loss(X, R, M, policy_loss='ppo')"}


@beyond
@pytest.mark.parametrize("name, call", [(name, call) for name in WRONG for call in WRONG[name].split(";")])
def test_wrong_input_is_named(name, call):
    with pytest.raises(ValueError, match=rf"^{name}: got [^\n]*; allowed [^\n]+$"):
        evaluate("grpo." + call.strip())


# Coursework: these tests on a student's file, themselves tested in worked_examples/test_homework.py -------------------

for text in map(ast.unparse, ast.parse(Path(__file__).read_text()).body):           # -k name finds tests of grpo.name
    for test in re.findall(r"^(?:def )?(test_\w+)", text, re.M):
        names = re.findall(r"(?:grpo\.|by_rows\(')(\w+)", text)
        vars(globals().get(test, types.SimpleNamespace())).update(dict.fromkeys(names, True))


@pytest.mark.parametrize("page", [] if OWN else sorted(EXAMPLES.glob("[0-9]*.md")), ids=lambda page: page.stem)
def test_worked_example_with_the_students_functions(page, monkeypatch, request):
    if "worked_example" not in request.config.option.keyword:
        pytest.skip("-k worked_example asks for it: pages take the docstrings at their word")
    test_worked_example(page, monkeypatch)


# §9 Sampling ---------------------------------------------------------------------------------------------------------

@pytest.fixture(autouse=True)
def of_grpo_alone(request):
    """From here on the tests are about grpo.py itself, not about equations that another file may have too."""
    if not OWN and request.node.location[1] >= inspect.currentframe().f_lineno:
        pytest.skip("about grpo.py itself, not its equations")


def chat_tokenizer():
    """The tiny task's tokenizer, with a chat template."""
    tokenizer = grpo.tiny_tokenizer()
    tokenizer.chat_template = ("{% for m in messages %}{{ m['content'] }}{% endfor %}"
                               "{% if add_generation_prompt %}={% endif %}")
    return tokenizer


def passes_of(model):
    """A list that takes rows, width and the logits' dtype of each forward pass from now on."""
    passes = []
    note = lambda module, args, kwargs, output: passes.append((*kwargs["input_ids"].shape, output.logits.dtype))
    model.register_forward_hook(note, with_kwargs=True)
    return passes


PROMPT_IDS = torch.tensor([[-7, -7, 5, 6], [7, 8, 9, 10], [-7, 3, 4, 5]])           # garbage where the mask is 0
PROMPT_MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
UNIFORMS = torch.rand(24, 12, generator=torch.Generator().manual_seed(0))


def sample(model, pad=0, G=8):
    """G completions for each prompt, of at most 12 tokens; two words end one."""
    ids, mask, uniforms = (x.to(model.device) for x in (PROMPT_IDS, PROMPT_MASK, UNIFORMS[: 3 * G]))
    return grpo.generate(model, ids, mask, max_completion_length=12, eos_token_ids=[1, 2], num_generations=G,
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


def logits_of(model, i, answer):
    """The model's logits for each word of an answer to prompt i, in one pass without padding or cache."""
    prompt = PROMPT_IDS[i][PROMPT_MASK[i] == 1]
    return model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Next"])
@pytest.mark.parametrize("G", [1, 8])
def test_each_token_is_where_its_uniform_number_falls(kind, G):
    """It follows from its own prompt, its own numbers and nothing else."""
    model = make_model(kind)
    ids, mask, _, _ = sample(model, G=G)
    for i in range(3 * G):
        answer = ids[i][mask[i] == 1]
        assert len(answer) == 12 or answer[-1] in (1, 2)
        probabilities = (logits_of(model, i // G, answer) / 0.7).softmax(-1)
        high = probabilities.cumsum(-1).gather(1, answer[:, None])[:, 0]
        low, u = high - probabilities.gather(1, answer[:, None])[:, 0], UNIFORMS[i, : len(answer)]
        assert (low - 1e-5 <= u).all() and (u <= high + 1e-5).all()
    for u, word in ((0.0, 0), (1 - 2**-24, 19)):                    # the ends of the interval: first and last word
        ids, *_ = grpo.generate(model, PROMPT_IDS, PROMPT_MASK, max_completion_length=4, eos_token_ids=1,
                                temperature=100.0, uniforms=torch.full((3, 4), u))
        assert ids.tolist() == [[word] * 4] * 3


def test_each_prompt_is_prefilled_once_and_ended_rows_leave_the_batch():
    model = make_model("Llama")
    passes = passes_of(model)
    live = sample(model)[1].sum(0).tolist()                         # rows whose token t is real
    assert live[0] == 24 > live[4] > live[-1] > 0
    assert passes == [(rows, width, torch.float32) for rows, width in [(3, 4)] + [(rows, 1) for rows in live[1:]]]


def test_greedy_takes_the_most_likely_word():
    model = make_model("Qwen2")
    ids, mask, logps, _ = grpo.generate(model, PROMPT_IDS, PROMPT_MASK, max_completion_length=5, eos_token_ids=1)
    for i in range(3):
        answer, real = ids[i][mask[i] == 1], logps[i][mask[i] == 1]
        best, words = logits_of(model, i, answer).log_softmax(-1).max(-1)
        assert torch.equal(answer, words)
        torch.testing.assert_close(real, best.detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["lm_head", "model.layers.1.mlp.down_proj"])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_weights_that_are_not_finite_are_an_error(name, value):
    model = make_model("Llama")
    model.get_submodule(name).weight.data[3, 3] = value
    with pytest.raises(FloatingPointError, match="LlamaForCausalLM are not finite"):
        sample(model)


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


def by_row(completions, **kwargs):
    """Rewards that no sample changes; in the first two groups of four, two are its mean."""
    return [float(digit) for digit in "021101210213"[: len(completions)]]


def first_two(completions, **kwargs):
    return [0.3 * (i < 2) for i in range(len(completions))]


def steps_of(model, reward_funcs=(by_row,), train={}, **options):
    """The steps of a short run on a few of the tiny task's problems; train: further arguments of train."""
    problems, config = grpo.tiny_problems(0)[0][:6], grpo.GRPOConfig(**SMALL | options)
    return grpo.train(model, grpo.tiny_tokenizer(), problems, reward_funcs, config, **train)


def share_of_the_rate(c, update):
    """The schedule: the share of the learning rate at one of max_steps·mu updates."""
    if update < c.warmup_steps:
        return update / c.warmup_steps
    done = (update - c.warmup_steps) / (c.max_steps * c.num_iterations - c.warmup_steps)
    return {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}[c.lr_scheduler_type]


WORDS = """beta delta loss_type policy_loss importance_sampling_level use_bias_correction_kl
    max_completion_length""".split()                                # that mean in the loss what they mean in the config


def assert_run_by_hand(reward_funcs=(by_row, first_two), instead={}, **options):
    """A twin of the policy learns from its samples, each step in one piece; all metrics and weights must be the same.

    instead: what the twin takes some options to be. Returns: the last rollout; the rows of each pass that scored.
    """
    policy = make_model("Llama").double()
    twin, reference, passes = copy.deepcopy(policy), copy.deepcopy(policy), passes_of(policy)
    c = grpo.GRPOConfig(**SMALL | options | instead)
    optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=c.weight_decay)
    B, G, update = c.generation_batch_size, c.num_generations, itertools.count()
    for step, (_, r, metrics) in enumerate(steps_of(policy, reward_funcs, **options)):
        if c.sync_ref_model and step % c.ref_model_sync_steps == 0:
            reference.load_state_dict(twin.state_dict())
        sampled = r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask
        score = functools.partial(grpo.per_token_logps, temperature=c.temperature, compute_entropy=True)
        with torch.no_grad():
            (old, entropies), (ref, _) = score(twin, *sampled), score(reference, *sampled)
        torch.testing.assert_close(r.logps, old, atol=1e-6, rtol=0)
        mask, ended = r.completion_mask, (r.completion_ids == 1).any(1)
        by_func = [f(range(B)) for f in reward_funcs]
        weights = c.reward_weights or [1.0] * len(reward_funcs)
        rewards = [sum(w * x for w, x in zip(weights, row)) for row in zip(*by_func, strict=True)]
        advantages = grpo.group_advantages(torch.tensor(rewards), G, scale_rewards=c.scale_rewards)
        for _ in range(c.num_iterations):
            logps = score(twin, *sampled)[0]
            loss, found = grpo.grpo_loss(
                logps, advantages, mask * (ended[:, None] | (not c.mask_truncated_completions)), old_logps=old,
                ref_logps=ref if c.beta > 0 else None, epsilon_low=c.epsilon,
                epsilon_high=c.epsilon if c.epsilon_high is None else c.epsilon_high,
                **{word: getattr(c, word) for word in WORDS})
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), c.max_grad_norm).item()
            optimizer.param_groups[0]["lr"] = lr = c.learning_rate * share_of_the_rate(c, next(update))
            optimizer.step()
        silent = [len(set(rewards[i : i + G])) == 1 for i in range(0, B, G)]
        want = {"step": step + 1, "loss": loss.item(), "grad_norm": norm, "learning_rate": lr,
                "reward": statistics.mean(rewards), "reward_std": statistics.stdev(rewards),
                "frac_reward_zero_std": statistics.mean(silent), "entropy": (entropies * mask).sum() / mask.sum(),
                "completions/mean_length": mask.sum() / B, "completions/clipped_ratio": 1 - ended.sum() / B,
                **found, "sampling/sampling_logp_difference/max": 0.0,
                **{f"rewards/{f.__name__}/mean": statistics.mean(x) for f, x in zip(reward_funcs, by_func)}}
        want = {name: float(x) for name, x in want.items()} | {"step_time": metrics["step_time"]}
        assert metrics == pytest.approx(want, rel=1e-4, abs=1e-6)
        for a, b in zip(policy.parameters(), twin.parameters()):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
    assert step + 1 == c.max_steps
    return r, [rows for rows, width, _ in passes if width > r.prompt_ids.size(1)]


MU = dict(num_iterations=3, max_steps=2)                            # the ratio is 1 in the first update
REFRESHED = dict(beta=0.1, max_steps=4)
OPTIONS = [  # field, a value that is not its default, and the options that let it show
    ("learning_rate", 0.003, {}), ("warmup_steps", 2, dict(max_steps=4)), ("weight_decay", 0.5, {}),
    ("lr_scheduler_type", "cosine", dict(max_steps=4)), ("lr_scheduler_type", "constant", dict(max_steps=2)),
    ("max_steps", 3, {}), ("max_grad_norm", 0.02, dict(max_steps=3)), ("num_generations", 2, {}),
    ("generation_batch_size", 12, {}), ("num_iterations", 3, {}), ("reward_weights", [2.0, -1.0], {}),
    ("max_completion_length", 7, dict(loss_type="dr_grpo")), ("temperature", 0.7, REFRESHED | MU),
    ("loss_type", "grpo", {}), ("loss_type", "dr_grpo", {}), ("beta", 0.1, {}),
    ("policy_loss", "cispo", MU | dict(epsilon_high=5.0)), ("policy_loss", "sapo", MU), ("epsilon", 0.1, MU),
    ("importance_sampling_level", "sequence", MU), ("epsilon_high", 0.3, MU), ("delta", 1.02, MU),
    ("use_bias_correction_kl", False, MU | REFRESHED), ("scale_rewards", "batch", {}), ("scale_rewards", "none", {}),
    ("mask_truncated_completions", True, {}), ("sync_ref_model", True, REFRESHED | dict(ref_model_sync_steps=2)),
    ("ref_model_sync_steps", 3, REFRESHED | dict(sync_ref_model=True))]


@pytest.mark.parametrize("field, value, others", OPTIONS, ids=[f"{field}-{value}" for field, value, _ in OPTIONS])
def test_each_option_does_what_its_word_says(field, value, others):
    options = others | {field: value}
    assert_run_by_hand(**options)
    default = SMALL.get(field, getattr(grpo.GRPOConfig(), field))
    with pytest.raises((AssertionError, ValueError)):               # or the run does not show the option at all
        assert_run_by_hand(**options, instead={field: default})


def test_train_is_algorithm_1():
    """Outer iterations that begin with π_ref ← π_θ, and mu updates against one π_old and π_ref."""
    assert_run_by_hand(**REFRESHED, sync_ref_model=True, ref_model_sync_steps=2, num_iterations=2)


@pytest.mark.parametrize("options", [
    dict(num_iterations=2), dict(num_iterations=2, importance_sampling_level="sequence", loss_type="grpo"),
    dict(loss_type="dr_grpo")], ids=str)
def test_rows_of_advantage_zero_cost_no_pass_and_parts_do_not_matter(options):
    """Parts are a memory knob. π_old takes no pass of its own: it is what the first update scores."""
    for weight, beta, part, rows in ((1, 0, 8, 4), (1, 0, 3, 4), (1, 0.1, 3, 8), (0, 0, 8, 0), (0, 0.1, 8, 8)):
        _, passes = assert_run_by_hand([by_row], per_device_train_batch_size=part, beta=beta,
                                       reward_weights=[float(weight)], **options)
        scored = options.get("num_iterations", 1) + (beta > 0)      # for each update, for π_ref
        assert passes == [min(part, rows - i) for i in range(0, rows, part)] * scored


def test_the_sampler_is_compared_with_the_scorer(monkeypatch):
    """In the rows that learn, before the first update changes the weights."""
    generate, moved = grpo.generate, torch.zeros(8, 1)

    def shifted(*args, **options):
        ids, mask, logps, entropies = generate(*args, **options)
        return ids, mask, (logps - moved) * mask, entropies

    monkeypatch.setattr(grpo.module, "generate", shifted)
    for row, shift, difference in ((0, 0.5, 0.5), (1, -0.25, 0.25), (3, 0.5, 0.0)):     # A = 0 in row 3
        moved = torch.zeros(8, 1)
        moved[row] = shift
        for _, _, metrics in steps_of(make_model("Llama"), num_iterations=2, per_device_train_batch_size=3):
            assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(difference, abs=1e-5)


def test_bf16_is_autocast_in_sampling_and_scoring_over_float32_weights():
    model = make_model("Llama")
    passes = passes_of(model)
    list(steps_of(model, bf16=True))
    assert {dtype for _, _, dtype in passes} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("masked", [False, True])
def test_the_entropy_is_that_of_all_samples_and_truncated_rows_have_no_loss(masked):
    """Truncated rows count in the statistics of their group, too."""
    rollout, passes = assert_run_by_hand(mask_truncated_completions=masked, beta=0.1)
    learn = rollout.terminated | (not masked)
    assert 0 < rollout.terminated.sum() < 8 and passes == [learn.sum()] * 2


def test_samples_and_prompts_are_keyed_by_seed_and_step(monkeypatch):
    """No state is carried along: step 1 of a run that goes on there is step 1 of the whole run."""
    numbers, generate = [], grpo.generate

    def note(*args, uniforms, **options):
        numbers.append(uniforms)
        return generate(*args, uniforms=uniforms, **options)

    monkeypatch.setattr(grpo.module, "generate", note)
    runs = [r for seed in (0, 1, 42) for _, r, _ in steps_of(make_model("Llama"), seed=seed, max_steps=3)]
    u, prompts = torch.stack(numbers), [[row["prompt"] for row in r.rows] for r in runs]
    assert u.shape == (9, 8, 10) and len(u.unique()) > 700 and 0 <= u.min() < 0.05 < 0.95 < u.max() < 1
    assert len(set(map(tuple, prompts))) > 4
    state = grpo.initial_state(make_model("Llama"), grpo.GRPOConfig(**SMALL))
    state.step = 1
    (_, r, _), = steps_of(make_model("Llama"), train={"state": state}, max_steps=2)
    assert [row["prompt"] for row in r.rows] == prompts[7] and torch.equal(numbers[9], u[7])        # 42: the default


def test_presets_and_defaults_are_those_of_the_papers_and_of_trl():
    assert grpo.PRESETS == {
        "deepseekmath": dict(loss_type="grpo", beta=0.04, use_bias_correction_kl=False, learning_rate=1e-6,
                             num_generations=64, generation_batch_size=1024, max_completion_length=1024),
        "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"), "sapo": dict(loss_type="grpo", policy_loss="sapo"),
        "dapo": dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=True),
        "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
        "cispo": dict(loss_type="dapo", policy_loss="cispo", epsilon_high=5.0)}           # the cap is TRL's advice
    trl = dict(learning_rate=1e-6, beta=0.0, num_iterations=1, epsilon=0.2, epsilon_high=None, delta=None,
               loss_type="dapo", scale_rewards="group", importance_sampling_level="token", num_generations=8,
               max_completion_length=512, temperature=1.0, mask_truncated_completions=False,
               sync_ref_model=False, ref_model_sync_steps=512, use_bias_correction_kl=True, max_grad_norm=1.0,
               lr_scheduler_type="linear", weight_decay=0.0, warmup_steps=0)
    default = grpo.GRPOConfig()
    assert {name: getattr(default, name) for name in trl} == trl
    assert {name: grpo.grpo_loss.__kwdefaults__[name] for name in DEFAULTS} == DEFAULTS
    assert grpo.cispo_loss.__kwdefaults__ == {"epsilon_high": 5.0}
    with pytest.raises(AttributeError):
        default.beta = 1.0
    tested_elsewhere = set("bf16 seed per_device_train_batch_size output_dir save_steps".split())
    assert {field for field, _, _ in OPTIONS} | tested_elsewhere == set(vars(default)), "an option without a test"


def test_rewards_reach_the_prompt_that_they_belong_to():
    seen = {}

    def look(**kwargs):
        seen.update(kwargs)
        return by_row(**kwargs)

    (_, r, m), = steps_of(make_model("Llama"), [look])
    tokenizer, problems = grpo.tiny_tokenizer(), {p["prompt"]: p["solution"] for p in grpo.tiny_problems(0)[0][:6]}
    assert sorted(seen) == ["completion_ids", "completions", "prompts", "solution"] and "rewards/look/mean" in m
    assert [text.replace("<pad>", "") for text in tokenizer.batch_decode(r.prompt_ids)] == seen["prompts"]
    assert seen["prompts"] == [p for p in seen["prompts"][::4] for _ in range(4)] and len(set(seen["prompts"])) == 2
    assert seen["solution"] == [problems[p] for p in seen["prompts"]]
    assert seen["completion_ids"] == [ids[m == 1].tolist() for ids, m in zip(r.completion_ids, r.completion_mask)]
    assert seen["completions"] == tokenizer.batch_decode(seen["completion_ids"], skip_special_tokens=True)


def test_every_eos_id_ends_a_completion():
    model, tokenizer = make_model("Llama"), grpo.tiny_tokenizer()
    assert grpo.eos_token_ids(model, tokenizer) == grpo.eos_token_ids(grpo.tiny_model(tokenizer, 0), tokenizer) == [1]
    model.generation_config.eos_token_id = [5, 7]
    assert grpo.eos_token_ids(model, tokenizer) == [1, 5, 7]
    (_, r, _), = steps_of(model)
    last = r.completion_ids.gather(1, r.completion_mask.sum(1, keepdim=True) - 1).squeeze(1)
    assert torch.equal(r.terminated, torch.isin(last, torch.tensor([1, 5, 7]))) and {5, 7} & set(last.tolist())


def test_advantages_are_an_argument_and_the_rollout_stays_as_it_is():
    before, options = [], dict(beta=0.1, mask_truncated_completions=True)

    def threefold(rewards_per_func, rollout, config):
        before.extend(copy.deepcopy(rollout))
        return 3 * grpo.outcome_advantages(rewards_per_func, rollout, config)

    (_, _, once), = steps_of(make_model("Llama"), **options)
    (_, after, thrice), = steps_of(make_model("Llama"), train={"compute_advantages": threefold}, **options)
    assert thrice["grad_norm"] == pytest.approx(3 * once["grad_norm"], rel=1e-4)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    with pytest.raises(AttributeError):
        after.logps = None
    answers = lambda *args: grpo.outcome_advantages(*args)[:, 0]    # one for each answer will do
    (_, _, of_answers), = steps_of(make_model("Llama"), train={"compute_advantages": answers}, **options)
    assert of_answers == once | {"step_time": of_answers["step_time"]}
    with pytest.raises(ValueError, match="advantages: got"):
        list(steps_of(make_model("Llama"), train={"compute_advantages": lambda *args: torch.ones(8, 99)}))


@pytest.fixture(scope="module")
def rollout():
    (_, rollout, _), = steps_of(make_model("Llama"))
    return rollout


@pytest.mark.parametrize("result", [[1.0], [1.0] * 9, [], [inf] * 8, [nan] * 8, [None] * 7 + [-inf]], ids=str)
def test_rewards_of_wrong_number_or_not_finite_are_named(result, rollout):
    with pytest.raises(ValueError, match="reward function <lambda>: got .*; allowed is "):
        grpo.compute_rewards([by_row, lambda **kwargs: result], rollout)


def test_no_reward_is_nan(rollout):
    rewards = grpo.compute_rewards([lambda **_: [None] * 8, lambda **_: (None, True, *torch.arange(6))], rollout)
    assert rewards.isnan().tolist() == [[True, True]] + [[True, False]] * 7
    assert rewards[1:, 1].tolist() == [1, 0, 1, 2, 3, 4, 5] and rewards.dtype == torch.float32


# §11 Command line ----------------------------------------------------------------------------------------------------

REWARDS = '''
import json, os, signal, time
from pathlib import Path
calls, answer = [], None

def length(prompts, completions, completion_ids, solution, **kwargs):
    """A reward for every row but those with word 11; first it does, once, what a test has planned for this call."""
    calls.append([prompts, completions])
    plan = Path(__file__).with_name(f"plan{len(calls)}.py")
    if plan.exists():
        exec(plan.rename(plan.with_name("done.py")).read_text(), globals())
    return answer or [None if 11 in ids else i % 4 - 0.1 * len(ids) for i, ids in enumerate(completion_ids)]
'''


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of models that name a file of code: causal ones, and one that classifies."""
    root = tmp_path_factory.mktemp("models")
    made = {name: make_model(name) for name in ("GPT2", "Llama", "Qwen2", "Mamba")}
    for name, model in (made | {"judge": make_model("Llama", "AutoModelForSequenceClassification")}).items():
        tokenizer = chat_tokenizer()
        model.config.auto_map = {"AutoConfig": "absent.C", "AutoModelForCausalLM": "absent.M"}
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def data(models, tmp_path):
    """A folder with the models, two datasets (a byte order mark and blank lines are no rows) and a file of rewards."""
    text = grpo.tiny_problems(0)[0][:12]
    chat = [row | {"prompt": [{"role": "user", "content": row["prompt"].rstrip("=")}]} for row in text]
    for name, rows in (("text", text), ("chat", chat)):
        (tmp_path / f"{name}.jsonl").write_text("\ufeff" + "\n  \n\n".join(map(json.dumps, rows)) + "\n\n")
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


def cli(*arguments):
    """main() in this process: its exit code and what it printed, as python would have it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = grpo.main([str(word) for word in arguments])
        except SystemExit as exit:
            code = exit.code
        except Exception:
            traceback.print_exc()
            code = 1
    for name in ("rewards", "short", "wrong", "reward_model"):      # the next run has other files of these names
        sys.modules.pop(name, None)
    return types.SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


def python(*arguments, **environment):
    """A process of its own, with one thread as here: how many threads add up decides the last bit."""
    words = [sys.executable, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(words, capture_output=True, text=True, timeout=1200, env=environment, cwd=HERE)


def lines_of(folder):
    return [json.loads(line) | {"step_time": 0} for line in (folder / "metrics.jsonl").read_text().splitlines()]


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resume(data, folder, **options):
    return cli(*command(data, **dict(max_steps=5, resume_from_checkpoint=folder / "checkpoint") | options))


def assert_same_run(a, b):
    assert lines_of(a) == lines_of(b)
    one, other = (safetensors.torch.load_file(folder / "checkpoint/model.safetensors") for folder in (a, b))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.fixture
def whole(data):
    assert cli(*command(data, max_steps=5, save_steps=1, output_dir=data / "whole")).code == 0
    return data / "whole"


@pytest.mark.parametrize("kind, prompts", [("GPT2", "text"), ("Llama", "chat"), ("Qwen2", "chat")])
def test_any_causal_lm_trains_on_a_file(kind, prompts, data):
    done = cli(*command(data, model=data / "models" / kind, dataset=data / f"{prompts}.jsonl", beta=0.1,
                        reward_funcs=["accuracy", f"{data}/rewards.py:length"], reward_weights=[1, 0.1]))
    assert done.code == 0 and str(data / "out") in done.out.splitlines()[-1]
    lines = lines_of(data / "out")
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["kl"] > 0.0
    assert transformers.AutoTokenizer.from_pretrained(data / "out/checkpoint").decode([2, 5, 3]) == "<think>1</think>"
    assert (data / "out/curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_tiny_job_from_end_to_end(tmp_path, monkeypatch):
    def begin(model, tokenizer, problems, seed):
        assert seed == 3 and problems == grpo.tiny_problems(3)[0]
        assert all(map(torch.equal, model.parameters(), grpo.tiny_model(tokenizer, 3).parameters()))
        cold_start(model, tokenizer, problems, seed, steps=3)

    cold_start = grpo.module.cold_start
    monkeypatch.setattr(grpo.module, "cold_start", begin)
    flags = "--model tiny --max_steps 2 --generation_batch_size 32 --seed 3 --preset deepseekmath --beta 0.5".split()
    done = cli(*flags, "--output_dir", tmp_path / "out")
    assert done.code == 0 and len(lines_of(tmp_path / "out")) == 2
    shown = re.search(r"^before GRPO.*?^held-out[^\n]*\n", README.read_text(), re.S | re.M)[0]
    varies = r"^  \d+\+\d+=.*   (right|wrong, it is \d+)|\S+$|\d\.\d\d"               # answers, the folder, numbers
    assert re.sub(varies, "", done.out, flags=re.M) == re.sub(varies, "", shown, flags=re.M)
    _, config = grpo.parse_options(flags)                           # flags win over sizes, and sizes over presets
    preset = grpo.PRESETS["deepseekmath"] | grpo.TINY
    assert config == grpo.GRPOConfig(**preset | dict(max_steps=2, generation_batch_size=32, seed=3, beta=0.5))


def test_problems_and_teacher():
    train, held_out = grpo.tiny_problems(3)
    assert len(held_out) == 500 and len({p["prompt"] for p in train + held_out}) == len(train) + 500 > 6000
    assert grpo.teacher_trace("47+85=", False) == "<think>7+5=12,4+8+1=13</think>132<eos>"
    assert grpo.teacher_trace("47+85=", True) == "<think>7+5=12,4+8+0=12</think>122<eos>"
    right = [grpo.teacher_trace(p["prompt"], False).removesuffix("<eos>") for p in held_out]
    assert grpo.accuracy_reward(right, [p["solution"] for p in held_out]) == [1.0] * 500


def test_an_earlier_run_is_never_overwritten(data, monkeypatch):
    monkeypatch.chdir(data)
    for name in ("grpo-output", "grpo-output-2", "grpo-output-3"):
        assert cli(*command(data, output_dir=None, max_steps=1)).code == 0 and len(lines_of(data / name)) == 1
    before, done = files_of(data), cli(*command(data, output_dir="grpo-output"))
    assert done.code == 2 and "output_dir: got" in done.err and before == files_of(data)
    done = cli(*command(data, max_steps=1, learning_rate=1, weight_decay=1e39))         # the last update overflows
    assert done.code == 1 and "after step 1 are not finite" in done.err and not (data / "out/checkpoint").exists()


LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)
ENDS = {  # what happens in the third call of the reward function, the exit code, what is said, some options
    "Ctrl-C": ("raise KeyboardInterrupt", 130, "", dict(num_iterations=2, beta=0.1, sync_ref_model=True,
                                                        ref_model_sync_steps=2, lr_scheduler_type="cosine")),
    "an error": ("raise KeyError('oh')", 1, "Traceback.*rewards.py.*KeyError: 'oh'", dict(warmup_steps=3)),
    "a wrong reward": ("answer = [0.5]", 2, "\ngrpo.py: error: reward function length: got .0.5.; allowed is 8 ", {}),
    "a loss": ("", 1, "FloatingPointError: step 3: the loss", dict(num_iterations=2, save_steps=1)),
    "a full disk": (f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, {LIMIT[1]}))", 2,
                    "\ngrpo.py: error: output_dir: cannot write", dict(save_steps=1))}


@pytest.mark.parametrize("what, code, said, options", ENDS.values(), ids=ENDS)
def test_what_ends_a_run_leaves_its_last_whole_step(what, code, said, options, data, monkeypatch):
    losses, grpo_loss, folder = [], grpo.grpo_loss, data / "a folder"

    def overflow(*args, **kwargs):
        loss, metrics = grpo_loss(*args, **kwargs)
        losses.append(loss)
        return loss * (inf if what == "" and len(losses) == 10 + 6 else 1), metrics     # in the second of mu updates

    monkeypatch.setattr(grpo.module, "grpo_loss", overflow)
    assert cli(*command(data, max_steps=5, output_dir=data / "whole", **options)).code == 0
    (data / "plan3.py").write_text(what)
    run = command(data, max_steps=5, output_dir=folder, **options)
    done, again = cli(*run), [*run, "--resume_from_checkpoint", f"{folder}/checkpoint"]
    resource.setrlimit(resource.RLIMIT_FSIZE, LIMIT)
    step = 4 if what.startswith("import") else 3
    assert done.code == code and re.search(said, done.err, re.S) and len(lines_of(folder)) == step - 1, done
    assert set(os.listdir(folder)) == {"checkpoint", "metrics.jsonl"}
    printed = re.findall(rf"^stopped in step {step}; to go on: python \S+ (--.*)", done.out, re.M)
    assert list(map(shlex.split, printed)) == [again] and cli(*again).code == 0
    assert_same_run(folder, data / "whole")


@pytest.mark.parametrize("when", ["a step", "an update", "a save", "a second one"])
def test_ctrl_c_at_any_place_saves_a_whole_step_or_none(when, data, whole, monkeypatch):
    """Between an update and its metrics the weights belong to no step: what is left is the last of save_steps."""
    owner, name, number = {"a step": (grpo.module, "sample_rollout", 3), "an update": (torch.optim.AdamW, "step", 3),
                           "a save": (torch, "save", 2), "a second one": (torch, "save", 3)}[when]
    function, calls = getattr(owner, name), []

    @functools.wraps(function)
    def interrupted(*args, **kwargs):
        calls.append(name)
        result = function(*args, **kwargs)
        if len(calls) == number or when == "a second one" and len(calls) == number + 1:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)
    assert cli(*command(data, max_steps=5, save_steps=1)).code == 130
    monkeypatch.setattr(owner, name, function)
    assert sorted(os.listdir(data / "out")) == ["checkpoint", "metrics.jsonl"]
    assert torch.load(data / "out/checkpoint/trainer_state.pt", weights_only=True)["step"] == 2
    assert resume(data, data / "out").code == 0
    assert_same_run(data / "out", whole)


def test_a_checkpoint_goes_on_elsewhere_and_further_and_with_other_options(data, whole):
    out = data / "out"
    assert cli(*command(data, max_steps=3)).code == 0               # finished: its linear schedule is at 0
    before = files_of(out)
    shutil.copytree(out, data / "copy")
    assert resume(data, data / "copy").code == 2                    # --output_dir names the original
    assert files_of(out) == before
    assert resume(data, data / "copy", output_dir=None, save_steps=1, per_device_train_batch_size=9).code == 0
    assert resume(data, out, output_dir=data / "new", learning_rate=0.02).code == 0 and files_of(out) == before
    rates = [[line["learning_rate"] for line in lines_of(data / name)] for name in ("copy", "new")]
    assert rates[0] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3, 0.004, 0.002])
    assert rates[1] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3, 0.008, 0.004])


def test_a_silent_step_after_a_resume_moves_by_momentum_as_in_the_whole_run(data):
    options = dict(reward_funcs=f"{data}/rewards.py:length", max_steps=3)
    (data / "plan3.py").write_text("answer = [1.0] * 8")
    assert cli(*command(data, output_dir=data / "whole", **options)).code == 0
    (data / "plan3.py").write_text("raise KeyboardInterrupt")
    assert cli(*command(data, **options)).code == 130
    (data / "plan1.py").write_text("answer = [1.0] * 8")            # the third step's rewards again
    assert resume(data, data / "out", **options).code == 0 and lines_of(data / "out")[2]["grad_norm"] == 0.0
    assert_same_run(data / "out", data / "whole")


def test_the_whole_process_group_hears_ctrl_c_and_a_sigterm_kills(data, whole):
    """The reward function's pool of workers and the run hear one Ctrl-C, as from a terminal."""
    (data / "plan3.py").write_text("""
import multiprocessing, threading
threading.Timer(0.5, os.killpg, (0, signal.SIGINT)).start()
with multiprocessing.get_context("fork").Pool(2) as pool:
    pool.map(time.sleep, [3000, 3000])
""")
    words = ["env", "OMP_NUM_THREADS=1", sys.executable, grpo.module.__file__, *command(data, max_steps=5)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=100, start_new_session=True)
    assert run.returncode == 130 and "stopped in step 3" in run.stdout, run.stderr
    (data / "done.py").unlink()
    (data / "plan3.py").write_text("os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(3000)")
    again = [*words, "--resume_from_checkpoint", str(data / "out/checkpoint"), "--save_steps", "1"]
    assert subprocess.run(again, capture_output=True).returncode == -signal.SIGTERM
    assert torch.load(data / "out/checkpoint/trainer_state.pt", weights_only=True)["step"] == 4
    assert resume(data, data / "out").code == 0
    assert_same_run(data / "out", whole)


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(data, whole, monkeypatch):
    left = [1000]                                                   # calls that may touch the disk

    def dies(function, *args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise SystemExit
        return function(*args, **kwargs)

    for owner, name in ((os, "rename"), (shutil, "copy"), (shutil, "rmtree"), (torch, "save")):
        monkeypatch.setattr(owner, name, functools.partial(dies, getattr(owner, name)))
    for allowed in range(5, 100):                                   # the first save has five such calls
        out, left[0] = data / f"out{allowed}", allowed
        cli(*command(data, max_steps=5, save_steps=1, output_dir=out))
        steps, left[0] = len(lines_of(out)), 1000
        assert resume(data, out, output_dir=None, save_steps=1).code == 0
        assert_same_run(out, whole)
        assert sorted(os.listdir(out)) == ["checkpoint", "curve.png", "metrics.jsonl"]
        if steps == 3:                                              # the second save has been gone through
            break
    assert allowed > 8


BAD_FILES = {  # what stands in it, and what the one line must say
    "blank": ("\n\n", "line 1: got an empty"), "json": ('{"prompt": "1"}\n\n{oops\n', "line 3: got {oops"),
    "list": ("[1]\n", "line 1"), "noprompt": ('{"solution": "1"}\n', "line 1"), "text": ('"prompt"', "line 1"),
    "nosolution": ('{"prompt": "1"}\n', "solution"), "bytes": ('{"prompt": "\udcff"}\n', "utf"),
    "columns": ('{"prompt": "1", "solution": "1"}\n{"prompt": "1"}\n', "line 2")}
BAD_FLAGS = [  # flag, value, what the one line must say
    ("dataset", None, "--dataset"), ("dataset", "absent.jsonl", "absent.jsonl"), ("dataset", ".", "directory"),
    ("model", "tiny", "tiny"), ("model", "./nowhere", "nowhere"), ("beta", nan, "beta: got"), ("beta", "x", "--beta"),
    ("reward_funcs", "string.py:broken", "string.py:broken"), ("model", "models/Mamba", "got MambaForCausalLM"),
    ("reward_funcs", "nonsense", "reward_funcs: got nonsense"), ("reward_funcs", "rewards.py:absent", "absent"),
    ("reward_funcs", "absent.py:f", "absent.py"), ("reward_funcs", "short.py:broken", "function broken: got"),
    ("reward_funcs", "models/judge", "models/judge"), ("output_dir", "text.jsonl", "text.jsonl"),
    ("output_dir", "models", "models"), ("resume_from_checkpoint", "nowhere", "nowhere"),
    ("resume_from_checkpoint", "models/Llama", "Llama"), ("preset", "ppo", "--preset"),
    ("loss_type", "bnpo", "--loss_type"), ("no_such_flag", 1, "--no_such_flag"), ("num_gen", 4, "--num_gen"),
    ("bf16", "maybe", "--bf16"), ("reward_weights", [1, 2, 3], "reward_weights: "),
    ("reward_weights", 1, "reward_weights: "), ("learning_rate", -1, "learning_rate: got"), ("max_steps", 0, "_steps"),
    ("max_grad_norm", inf, "max_grad_norm: got"), ("seed", -1, "seed: got"), ("policy_loss", "cispo", "epsilon_high"),
    ("num_generations", 1, "generation_batch_size: got"), ("num_generations", 5, "generation_batch_size: got")]


@pytest.mark.parametrize("flag, value, said", BAD_FLAGS + [
    ("dataset", f"{name}.jsonl", said) for name, (_, said) in BAD_FILES.items()], ids=str)
def test_bad_input_is_one_line_and_exit_2(flag, value, said, data, monkeypatch):
    monkeypatch.chdir(data)
    for name, (text, _) in BAD_FILES.items():
        (data / f"{name}.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    for name in ("short.py", "string.py"):                          # one has the name of a module of Python's
        (data / name).write_text("def broken(completions, **kwargs):\n    return [1.0]\n")
    usual = dict(dataset="chat.jsonl", reward_funcs=["accuracy", "rewards.py:length"])
    before, done = files_of(data), cli(*command(data, **usual | {flag: value}))
    errors = [line for line in done.err.splitlines() if line.startswith("grpo.py: error:")]
    assert done.code == 2 and errors == done.err.splitlines()[-1:] and re.search(said, errors[0]), done
    assert "Traceback" not in done.err and files_of(data) == before


def test_a_file_of_rewards_is_a_module_and_its_errors_are_shown(data):
    """It may import its neighbours, is run once for all functions named, and multiprocessing finds it."""
    (data / "neighbour.py").write_text("runs = []\n")
    (data / "short.py").write_text("import neighbour, sys\nneighbour.runs.append(sys.modules[__name__])\n"
                                   "def f(completions, **_):\n    return [len(neighbour.runs)] * len(completions)\n"
                                   "def g(completions, **_):\n    return [i % 4 for i in range(len(completions))]\n")
    assert cli(*command(data, reward_funcs=[f"{data}/short.py:f", f"{data}/short.py:g"])).code == 0
    assert [line["rewards/f/mean"] for line in lines_of(data / "out")] == [1.0, 1.0]
    (data / "wrong.py").write_text("\n\nx = 1 / 0\n")
    done = cli(*command(data, reward_funcs=f"{data}/wrong.py:f", output_dir=data / "other"))
    assert done.code == 1 and "wrong.py\", line 3" in done.err and not (data / "other").exists()


def test_code_that_comes_with_a_model_is_never_run(data, monkeypatch):
    """The models' configs name a file of code, which is absent; each loader is told not to look for it."""
    told = []
    for name in ("AutoTokenizer", "AutoModelForCausalLM"):
        owner = getattr(transformers, name)

        def load(*args, load=owner.from_pretrained, **kwargs):
            told.append(kwargs["trust_remote_code"])
            return load(*args, **kwargs)
        monkeypatch.setattr(owner, "from_pretrained", load)
    for again in (None, data / "out/checkpoint"):
        assert cli(*command(data, resume_from_checkpoint=again)).code == 0
    assert told == [False] * 4


def test_a_gpu_samples_as_it_scores_trains_and_resumes(data):
    gpu = {"GRPO_TEST_CUDA": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("GRPO_TEST_CUDA", "0")}
    if python("-c", "import sys, torch; sys.exit(not torch.cuda.is_available())", **gpu).returncode:
        pytest.skip("no GPU")
    script = "import test_grpo as t; t.assert_sampled_as_scored(t.make_model('Llama').to('cuda'), tolerance=1e-3)"
    assert python("-c", script, **gpu).returncode == 0
    for bf16 in (False, True):
        whole, out = data / f"whole {bf16}", data / f"out {bf16}"
        options = dict(max_steps=4, bf16=bf16, beta=0.1, num_iterations=2, output_dir=None)
        run = [grpo.module.__file__, *command(data, **options)]
        assert python(*run, "--output_dir", whole, **gpu).returncode == 0
        (data / "plan2.py").write_text("raise KeyboardInterrupt")
        assert python(*run, "--output_dir", out, **gpu).returncode == 130
        assert python(*run, "--resume_from_checkpoint", out / "checkpoint", **gpu).returncode == 0
        for a, b in zip(lines_of(out), lines_of(whole), strict=True):
            assert a["step"] == b["step"] and a["grad_norm"] > 0 and all(map(math.isfinite, a.values()))


# The file itself, README and worked examples -------------------------------------------------------------------------

LINES, CODE_LINES, TOKENS, COLUMNS = 1120, 690, 8400, 110           # at most; and of the longest function:
FUNCTION_LINES = collections.defaultdict(lambda: 55, grpo_loss=70, train=40)


def test_the_file_is_small_and_imports_nothing_heavy():
    done = python("-c", "import sys, grpo; print(*{'transformers', 'matplotlib', 'math_verify'} & set(sys.modules))")
    assert done.returncode == 0 and done.stdout.strip() == ""
    source = Path(grpo.module.__file__).read_text()
    white = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline)
              if token.type not in white and not token.string.lstrip("r").startswith('"""')]       # docstrings
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    assert source.count("\n") <= LINES and len(code) <= CODE_LINES and len(tokens) <= TOKENS
    assert max(map(len, source.splitlines())) <= COLUMNS
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert not [f.name for f in functions if f.end_lineno - f.lineno + 1 > FUNCTION_LINES[f.name]]
    tests = Path(__file__).read_text().splitlines()
    assert len(tests) <= 1700 and max(map(len, tests)) <= 120


def test_the_readme_names_what_exists():
    text, options = README.read_text(), cli("--help").out
    rows = re.findall(r"^\|.*\| `(\w+)` \| `(test_\w+)` \| \[.*?\]\((\S+?)\)", text, re.M)
    assert len(rows) >= 16 and len(text.splitlines()) <= 120 and "python -m pytest -q test_grpo.py" in text
    for function, test, page in rows:
        assert callable(getattr(grpo, function)) and callable(globals()[test]) and (HERE / page).is_file()
    assert all((HERE / link).exists() for link in re.findall(r"\]\((?!http)([^)#]+)", text))
    assert len(SPOT.exhibits()) >= 20
    assert set(re.findall(r"--[a-z]\w+", text)) - {"--html", "--tb"} <= set(re.findall(r"--\w+", options))


@pytest.mark.parametrize("path", [README, *sorted(EXAMPLES.glob("*.md"))], ids=lambda path: path.stem)
def test_worked_example(path, monkeypatch):
    """The page's python fences run in order, in one namespace, under the page's own name and line numbers."""
    monkeypatch.chdir(HERE)
    text, namespace = path.read_text(), {"__name__": path.stem}
    for fence in re.finditer(r"^```python\n(.*?)(^```$|\Z)", text, re.S | re.M):
        exec(compile("\n" * text.count("\n", 0, fence.start(1)) + fence[1], str(path), "exec"), namespace)
    assert all((path.parent / picture).is_file() for picture in re.findall(r"!\[[^]]+\]\((\S+)\)", text))


# The bug museum ------------------------------------------------------------------------------------------------------

SPOT = types.SimpleNamespace(**runpy.run_path(str(EXAMPLES / "spot_the_bug.py")))


class Failures(list):
    """A pytest plugin: when tests failed (in "setup", "call" or "teardown"), and what they raised."""

    def pytest_runtest_makereport(self, item, call):
        if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
            self.append((call.when, call.excinfo))


@pytest.mark.parametrize("exhibit", SPOT.exhibits())
def test_the_bug_museum(exhibit, monkeypatch, tmp_path):
    """The tests named fail on the patched file: in an assertion, or by an error inside it."""
    patched = tmp_path / "grpo_bug.py"
    patched.write_text(SPOT.patched(exhibit))
    monkeypatch.setattr(grpo, "module", ModuleUnderTest(str(patched)).module)
    for test in re.findall(r"`(test_\w+)`", SPOT.exhibits()[exhibit].split("Caught by:")[1]):
        failures, quiet = Failures(), "-q -x --tb=no -p no:cacheprovider -p no:unraisableexception -W ignore".split()
        pytest.main([*quiet, f"{__file__}::{test}"], plugins=[failures])
        (when, excinfo), = failures or [(None, None)]
        assert when == "call", f"{test} does not catch it"
        inside = any(entry.path == patched for entry in excinfo.traceback)
        assert inside or excinfo.errisinstance((AssertionError, pytest.fail.Exception)), f"{test}: {excinfo.exconly()}"
