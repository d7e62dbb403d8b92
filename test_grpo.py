"""The specification of grpo.py's maths, §1-§8.

A test's name is a sentence about a function, its docstring the law. Most functions have worked numbers (a page of
worked_examples/ does them by hand), an oracle (the definition once more in pure Python, on lists that know no padding),
laws (true for any numbers at all: Hypothesis looks for the smallest numbers that break one), and @beyond("..."): what
the formula leaves open. Then come padding, shapes and errors of all functions, the file as text, last the plumbing:
`grpo`, which is the file under test, and `expect(got, want)`, which compares and says what differs.

    pytest test_grpo.py                                      all of grpo.py; -v prints the specification
    GRPO_MODULE=my_grpo.py pytest -x test_grpo.py            your file: the formulas, up to the first mistake
    GRPO_MODULE=my_grpo.py pytest test_grpo.py -m beyond     your file: beyond them; -m "beyond(step='padding')"
    GRPO_MODULE=my_grpo.py pytest test_grpo.py -m errors     your file: wrong shapes and words are errors
"""

import ast
import copy
import functools
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
import types
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

f64 = functools.partial(torch.as_tensor, dtype=torch.float64)
nan, inf = math.nan, math.inf
settings.register_profile("grpo", deadline=None, derandomize=True, database=None, report_multiple_bugs=False,
                          max_examples=int(os.environ.get("GRPO_EXAMPLES", 20)))
settings.load_profile("grpo")
warnings.simplefilter("ignore", pytest.PytestUnknownMarkWarning)        # beyond and errors are this file's own
beyond = lambda step: pytest.mark.beyond(step=step)                     # for grpo.py, and where -m beyond asks for it
default_and = lambda *rows: pytest.mark.parametrize("options", [{}, *rows], ids=str)         # a test for each
any_scale = default_and(dict(scale_rewards="batch"), dict(scale_rewards="none"))

# What Hypothesis draws ------------------------------------------------------------------------------------------------
# Numbers lie on a grid: equal ones are common, sums of them exact, none is on an edge of the clip range, 0.8 or 1.2.

def grid(low, high, step):
    return st.integers(round(low / step), round(high / step)).map(lambda k: k * step)


reward, advantage, logp, ratio = grid(-5, 5, 0.25), grid(-2, 2, 0.25), grid(-3, 0, 0.125), grid(0.125, 3, 0.125)
logit, number = grid(-4, 4, 0.5), grid(-3, 3, 0.125)
group = st.lists(reward, min_size=2, max_size=5)                                # the rewards of one prompt's answers
unequal = group.filter(lambda rewards: len(set(rewards)) > 1)
batch = st.integers(2, 4).flatmap(                                              # 1 to 3 groups of the same size
    lambda G: st.lists(st.lists(reward, min_size=G, max_size=G), min_size=1, max_size=3))
words = st.lists(logit, min_size=2, max_size=4)                                 # the logits of a small vocabulary
distribution = st.lists(st.integers(1, 6), min_size=3, max_size=3).map(lambda w: [x / sum(w) for x in w])


def answers(*numbers):
    """1 to 3 answers of 1 to 4 tokens; a token is a tuple: one number from each of these strategies."""
    return st.lists(st.lists(st.tuples(*numbers), min_size=1, max_size=4), min_size=1, max_size=3)


def columns(rows, padding=3.0, width=None):
    """Rows of tokens as tensors (B, T), one for each place in the tuple, and the mask."""
    T, width = max([1, *map(len, rows)]), width or len(next(token for row in rows for token in row))
    cells = [[*(token + (1.0,) for token in row), *[(padding,) * width + (0.0,)] * (T - len(row))] for row in rows]
    return f64(cells).view(len(rows), T, width + 1).unbind(2)


def slope(function, x):
    """∂ Σ f(x) / ∂x; 0 where f takes x as a constant."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum() + 0 * x.sum(), x)[0]


# §1 Rewards -----------------------------------------------------------------------------------------------------------

numbers = lambda rewards: f64([nan if r is None else r for r in rewards])
beyond_text = functools.partial(pytest.param, marks=beyond("text"))


@pytest.mark.parametrize("answer, solution, want", [
    ("<think>7+5=12,4+8+1=13</think>132", "132", 1), ("<think>7+5=12,4+8+0=12</think>122", "132", 0),       # page 7
    ("132", "132", 1), ("132.0", "132", 0), ("<think>132", "132", 0), ("<think>132</think>131", "132", 0),
    (r"\boxed{132}", "132", 1), (r"<think>\boxed{131}</think>It is \boxed{132}.", "132", 1), ("", "132", 0),
    (r"\boxed{132} or \boxed{131}", "132", 0), (r"\boxed{131} or \boxed{132}", "132", 1), (r"\boxed{}", "132", 0),
    beyond_text("B\n", " B", 1), beyond_text("5", 5, 1), beyond_text("1,0", "10", 0), beyond_text("b", "B", 0),
    beyond_text(r"\boxed{ Oslo }", "Oslo", 1), beyond_text(r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{2}}", 1),
    beyond_text(r"\boxed{1} 2", "2", 0), beyond_text("None", None, nan), beyond_text("", " ", nan)], ids=str)
def test_accuracy_reward_matches_the_worked_answers(answer, solution, want):
    r"""r = 1 if the solution is what follows the last </think>, or, if a \boxed{} is there, its last box; else 0"""
    expect(numbers(grpo.accuracy_reward([answer], [solution])), [want])


@pytest.mark.parametrize("answer, want", [
    ("<think>7+5=12,4+8+1=13</think>132", 1), ("<think>7+5=12,4+8+0=12</think>122", 1), ("132.0", 0),       # page 7
    ("<think>132", 0), ("132</think>", 0), ("", 0), ("x<think>1</think>2", 0), ("<think>1</think>", 0),
    ("<think>\n1\n</think>\n\n2\n", 1), beyond_text("<think></think>b", 1),
    beyond_text("<Think>1</Think>2", 0), beyond_text(" <think>1</think>2", 0), beyond_text("<think>1</think> \n", 0),
    beyond_text("<think>1<think>2</think>3", 0), beyond_text("<think>1</think>2</think>3", 0),
    beyond_text("</think><think>1", 0), beyond_text("<think>1</think>2<think>", 0)], ids=str)
def test_think_format_reward_matches_the_worked_answers(answer, want):
    """r = 1 for <think>...</think> from the first character on, then an answer; else 0"""
    expect(numbers(grpo.think_format_reward([answer])), [want])


@beyond("text")
@pytest.mark.parametrize("name", ["accuracy_reward", "think_format_reward"])
def test_a_reward_of_a_chat_is_that_of_its_last_message(name):
    """r([..., {"content": text}]) = r(text), and columns that a reward does not know are no error"""
    texts = ["a", "<think>b</think>a", "<think>a", "", "<think></think>" + " " * 10**5]       # at once, however long
    function = functools.partial(getattr(grpo, name), solution=["a"] * len(texts), prompts=texts)
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": text}] for text in texts]
    expect(numbers(function(completions=chats)), numbers(function(completions=texts)))


@pytest.mark.parametrize("rewards, weights, want", [                                            # page 7
    (f64([[1.0, 0.8], [1.0, 0.7], [0.0, -0.2]]), f64([0.7, 0.3]), [0.94, 0.91, -0.06]),
    (f64([[1.0, 0.8], [1.0, 0.7], [0.0, -0.2]]), None, [1.8, 1.7, -0.2]),
    pytest.param(f64([[nan, 0.8], [1.0, 0.7]]), [0.7, 0.3], [0.24, 0.91], marks=beyond("missing")),
    pytest.param(f64([[1.0, nan], [nan, nan]]), None, [1.0, nan], marks=beyond("missing")),
    pytest.param(torch.tensor([[1, 1]]), [0.5, 0.25], [0.75], marks=beyond("dtypes"))])
def test_combine_rewards_matches_the_worked_numbers(rewards, weights, want):
    """r_i = Σ_f w_f·r_{i,f}, w_f = 1 unless given; integers become floats"""
    expect(grpo.combine_rewards(rewards, weights), want)


# §2 Group statistics and advantages -----------------------------------------------------------------------------------

def oracle_stats(rewards, correction=1):
    mean = sum(rewards) / len(rewards) if rewards else nan
    square = sum((r - mean) ** 2 for r in rewards)
    return mean, math.sqrt(square / (len(rewards) - correction)) if len(rewards) > correction else nan


def oracle_advantages(groups, scale_rewards="group", correction=1, eps=1e-4):
    stds = {"group": lambda group: oracle_stats(group, correction)[1] + eps, "none": lambda group: 1.0,
            "batch": lambda group: oracle_stats(sum(groups, []), correction)[1] + eps}
    return [[(r - oracle_stats(group)[0]) / stds[scale_rewards](group) for r in group] for group in groups]


def advantages(groups, **options):
    """(P, G): the advantages of each group of rewards."""
    return grpo.group_advantages(f64(groups).flatten(), len(groups[0]), **options).view(len(groups), -1)


@pytest.mark.parametrize("score", [reward, pytest.param(st.sampled_from([nan, 0.5, 2.0]), marks=beyond("missing"))],
                         ids=["all", "some missing"])
@default_and(dict(correction=0))
@given(data=st.data(), G=st.integers(2, 4))
def test_group_stats_match_the_oracle(score, options, data, G):
    """mean = 1/n·Σ r, std = √(Σ (r - mean)² / (n - correction)), n = the rewards that are not NaN; or NaN"""
    groups = data.draw(st.lists(st.lists(score, min_size=G, max_size=G), min_size=1, max_size=3), "rewards")
    stats = torch.stack(grpo.group_stats(f64(groups).flatten(), G, **options), 1)
    expect(stats, [oracle_stats([r for r in group if r == r], **options) for group in groups])


@pytest.mark.parametrize("rewards, options, want", [
    ([8.5, 6.2, 4.1], dict(), [1.0148, -0.0303, -0.9845]),                                      # page 1
    ([8.5, 6.2, 4.1], dict(correction=0, eps=0.0), [1.2429, -0.0371, -1.2058]),
    ([1.0, 0.0, 0.5], dict(), [0.9998, -0.9998, 0.0]),
    ([1.0, 0.0, 0.5], dict(correction=0, eps=0.0), [1.2247, -1.2247, 0.0]),
    ([1.0, 0.0, 0.5], dict(scale_rewards="none"), [0.5, -0.5, 0.0]),
    ([0.94, 0.91, -0.06], dict(correction=0, eps=0.0), [0.7392, 0.6746, -1.4138]),              # page 7
    ([1.0, 0.0, 0.0, 0.0], dict(eps=0.0), [1.5, -0.5, -0.5, -0.5]),                             # page 12
    ([1e6, 0.0, 0.0, 0.0], dict(eps=0.0), [1.5, -0.5, -0.5, -0.5]),                             # no more for it
    pytest.param([1.0, 1.0, nan], dict(eps=0.0), [0.0, 0.0, 0.0], marks=beyond("missing")),     # page 7
    pytest.param([2.0, nan], dict(), [0.0, 0.0], marks=beyond("missing")),                      # nobody to compare with
    pytest.param([nan, nan], dict(), [0.0, 0.0], marks=beyond("missing"))], ids=str)
def test_group_advantages_match_the_worked_numbers(rewards, options, want):
    """A = (r - mean) / (std + eps); n - 1 and eps = 1e-4 unless a row has the paper's (DeepSeekMath §4.1.2: eps = 0)"""
    expect(advantages([rewards], **options), [want], 5e-5)


@default_and(dict(correction=0), dict(eps=0.5), dict(scale_rewards="none"), dict(scale_rewards="batch"),
         dict(scale_rewards="batch", correction=0, eps=0.5))
@given(batch)
def test_group_advantages_match_the_oracle(options, groups):
    """A = (r - mean) / (std + eps), std of the group, or of the whole batch; "none": A = r - mean"""
    rewards = f64(groups).flatten()
    expect(grpo.group_advantages(rewards, len(groups[0]), **options), sum(oracle_advantages(groups, **options), []))


@any_scale
@given(batch)
def test_group_advantages_sum_to_zero_in_each_group(options, groups):
    """Σ_i A_i = 0: what one answer gains the others of its group lose"""
    expect(advantages(groups, **options).sum(1), [0.0] * len(groups))


@any_scale
@given(batch, reward)
def test_group_advantages_do_not_see_a_shift_of_the_rewards(options, groups, c):
    """A(r + c) = A(r): a group says who was better, not how good anybody was"""
    expect(advantages([[r + c for r in group] for group in groups], **options), advantages(groups, **options))


@given(unequal, reward.filter(bool))
def test_group_advantages_do_not_see_the_scale_of_the_rewards(rewards, c):
    """A(c·r) = sign(c)·A(r) at eps = 0: rewards in cents teach as much as in euros"""
    sign = math.copysign(1, c)
    expect(advantages([[c * r for r in rewards]], eps=0.0), sign * advantages([rewards], eps=0.0))


@given(batch, st.randoms())
def test_group_advantages_follow_a_permutation_of_the_answers(groups, random):
    """A(r in another order) = A(r) in that order: which answer was drawn first means nothing"""
    order = random.sample(range(len(groups[0])), len(groups[0]))
    expect(advantages([[group[i] for i in order] for group in groups]), advantages(groups)[:, order])


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
@given(batch)
def test_group_advantages_of_a_group_do_not_see_the_other_groups(scale_rewards, groups):
    """A(group 1, group 2, ...) = A(group 1), A(group 2), ...: answers to other questions are no baseline"""
    alone = [advantages([group], scale_rewards=scale_rewards) for group in groups]
    expect(advantages(groups, scale_rewards=scale_rewards), torch.cat(alone))


@given(group)
def test_group_advantages_rank_as_the_rewards_do(rewards):
    """r_i <= r_j => A_i <= A_j"""
    by_reward = advantages([sorted(rewards)])
    expect(by_reward, by_reward.sort().values)


@given(unequal)
def test_group_advantages_have_squares_that_sum_to_n_minus_1(rewards):
    """Σ A² = n - 1 at eps = 0, unless all rewards are equal (pages 6, 12): no group is louder than another"""
    expect(advantages([rewards], eps=0.0).square().sum(), len(rewards) - 1)


@beyond("equal")
@default_and(dict(eps=0.0), dict(scale_rewards="batch", eps=0.0), dict(scale_rewards="none"))
@given(st.integers(2, 16), st.floats(-1e8, 1e8, width=32))
def test_group_advantages_of_equal_rewards_are_exactly_zero_in_float32(options, G, r):
    """r_1 = ... = r_G => A = 0 to the last bit, no 0/0, though the float32 mean of eight times 0.1 is not 0.1"""
    expect(grpo.group_advantages(torch.full((G,), r), G, **options), [0.0] * G, 0)


@beyond("missing")
@any_scale
@given(batch, st.integers(0, 4))
def test_group_advantages_treat_a_missing_reward_as_an_answer_never_drawn(options, groups, i):
    """A(..., NaN, ...) = 0 there, and elsewhere A without that answer"""
    want = [A[:i] + [0.0] + A[i:] for A in advantages(groups, **options).tolist()]
    expect(advantages([group[:i] + [nan] + group[i:] for group in groups], **options), want)


@given(st.lists(st.tuples(st.integers(1, 4), advantage), min_size=1, max_size=4))
def test_broadcast_advantages_give_every_token_that_of_its_answer(rows):
    """A_{i,t} = A_i on real tokens, 0 at the padding"""
    mask = f64([[float(t < n) for t in range(5)] for n, _ in rows])
    want = [[A if t < n else 0.0 for t in range(5)] for n, A in rows]
    expect(grpo.broadcast_advantages(f64([A for _, A in rows]), mask), want)


# §3 Log-probabilities -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ids, eos, want", [                                                    # page 8
    ([5, 6, 1, 1, 1], 1, [1, 1, 1, 0, 0]),                                                      # pad id = EOS id
    ([5, 6, 7, 8, 9], 1, [1, 1, 1, 1, 1]), ([5, 6, 7, 8, 9], [1, 8], [1, 1, 1, 1, 0]),
    pytest.param([5, 8, 7, 1, 9], torch.tensor([1, 8]), [1, 1, 0, 0, 0], marks=beyond("text"))], ids=str)
def test_make_completion_mask_matches_the_worked_numbers(ids, eos, want):
    """m = 1 up to and including the first EOS, 0 behind it"""
    expect(grpo.make_completion_mask(torch.tensor([ids]), eos), [want])


@given(st.lists(st.integers(2, 5), max_size=3), st.lists(st.integers(0, 5), max_size=3))
def test_make_completion_mask_keeps_the_first_eos_and_nothing_behind_it(answer, behind):
    """|answer| + 1 real tokens in answer, EOS, anything: a policy whose EOS is masked never learns to stop"""
    mask = grpo.make_completion_mask(torch.tensor([answer + [1] + behind]), 1)
    expect(mask, [[1.0] * (len(answer) + 1) + [0.0] * len(behind)])


oracle_log_softmax = lambda logits: [z - math.log(sum(math.exp(y) for y in logits)) for z in logits]
entropy = lambda logits: grpo.entropy_from_logits(f64(logits)[None, None])[0, 0]


def log_softmax(logits):
    """The log-probs of all words, each asked for in turn, (V,)."""
    V = len(logits)
    return grpo.selective_log_softmax(f64(logits).expand(1, V, V), torch.arange(V)[None])[0]


def test_selective_log_softmax_matches_the_worked_numbers():
    """log p = z - log Σ exp(z): logits 2, 1, 0 at the temperatures 1 and 0.5 (page 8)"""
    expect(log_softmax([2.0, 1.0, 0.0]), [-0.4076, -1.4076, -2.4076], 5e-5)
    expect(log_softmax([4.0, 2.0, 0.0]), [-0.1429, -2.1429, -4.1429], 5e-5)


def test_entropy_from_logits_matches_the_worked_numbers():
    """H = -Σ p·log p: logits 2, 1, 0 (page 8)"""
    expect(entropy([2.0, 1.0, 0.0]), 0.8324, 5e-5)


@given(st.lists(st.tuples(st.lists(logit, min_size=3, max_size=3), st.integers(0, 2)), min_size=1, max_size=3))
def test_selective_log_softmax_matches_the_oracle(rows):
    """log p(o) = z_o - log Σ_v exp(z_v) at each position, and no position sees another"""
    logits, index = f64([[z] for z, _ in rows]), torch.tensor([[o] for _, o in rows])
    want = [oracle_log_softmax(z)[o] for z, o in rows]
    expect(grpo.selective_log_softmax(logits, index)[:, 0], want)
    expect(grpo.selective_log_softmax(logits.transpose(0, 1), index.T)[0], want)


@given(words)
def test_selective_log_softmax_adds_up_to_1_and_does_not_see_a_shift_of_the_logits(logits):
    """Σ_v p(v) = 1, and log p(z + c) = log p(z): logits have no zero point, exp(1000) is no overflow"""
    expect(log_softmax(logits).exp().sum(), 1.0)
    expect(log_softmax([z + 1000 for z in logits]), log_softmax(logits))


@given(words)
def test_entropy_from_logits_matches_the_oracle(logits):
    """H = -Σ_v p_v·log p_v in nats"""
    expect(entropy(logits), -sum(math.exp(x) * x for x in oracle_log_softmax(logits)))


@given(words)
def test_entropy_from_logits_lies_between_0_and_log_V(logits):
    """0 <= H <= log V, and H = log V where all words are equally likely; H(z + c) = H(z)"""
    assert 0 <= entropy(logits) <= math.log(len(logits)) + 1e-9
    expect(entropy([logits[0]] * len(logits)), math.log(len(logits)))
    expect(entropy([z + 1000 for z in logits]), entropy(logits))


@beyond("empty")
@given(words)
def test_entropy_from_logits_of_a_word_that_is_ruled_out_counts_0(logits):
    """A logit of -inf: 0·log 0 = 0 in value and slope, log p = -inf, and the other words are as without it"""
    H = lambda z: grpo.entropy_from_logits(z[None, None])
    expect(H(f64([*logits, -inf])), H(f64(logits)))
    expect(slope(H, f64([*logits, -inf])), [*slope(H, f64(logits)), 0.0])
    expect(log_softmax([*logits, -inf]), [*oracle_log_softmax(logits), -inf])


@functools.cache
def make_model(kind):
    """A model of random weights in float64, large enough that its distributions are far from uniform."""
    import transformers
    sizes = dict(vocab_size=12, bos_token_id=None, eos_token_id=1, pad_token_id=0, num_hidden_layers=2, hidden_size=16,
                 num_attention_heads=4, max_position_embeddings=32)
    more = dict(GPT2={}, Llama=dict(intermediate_size=32, num_key_value_heads=2))
    config = getattr(transformers, f"{kind}Config")(**sizes, **more[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


prompts_and_answers = st.lists(st.tuples(st.lists(st.integers(2, 11), min_size=1, max_size=3),
                                         st.lists(st.integers(1, 11), min_size=1, max_size=3)), min_size=1, max_size=3)


def padded(rows, junk=0):
    """Prompts padded on the left, answers on the right: (B, L) ids and mask of the one, (B, T) of the other."""
    L, T = (max(len(row[i]) for row in rows) for i in (0, 1))
    prompts = [[(junk, 0)] * (L - len(prompt)) + [(token, 1) for token in prompt] for prompt, _ in rows]
    answers = [[(token, 1) for token in answer] + [(junk, 0)] * (T - len(answer)) for _, answer in rows]
    return *torch.tensor(prompts).unbind(2), *torch.tensor(answers).unbind(2)


def oracle_logps(model, rows, temperature=1.0):
    """Each answer's log-probs and entropies from a pass of its own, without padding."""
    for prompt, answer in rows:
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logps = (logits / temperature).log_softmax(-1)
        yield logps[range(len(answer)), answer], -(logps.exp() * logps).sum(-1)


@pytest.mark.parametrize("kind", ["Llama", pytest.param("GPT2", marks=beyond("positions"))])
@default_and(dict(temperature=0.7), dict(temperature=0.7, compute_entropy=True))
@settings(max_examples=10)
@given(prompts_and_answers)
def test_per_token_logps_are_those_of_each_row_alone(kind, options, rows):
    """log π(o_t) = log softmax(logits / temperature)[o_t], H without gradient: no other row, no left padding is seen"""
    model, temperature = make_model(kind), options.get("temperature", 1.0)
    inputs = *_, mask = padded(rows)
    logps, entropies = grpo.per_token_logps(model, *inputs, **options)
    want, H = map(torch.cat, zip(*oracle_logps(model, rows, temperature)))
    got = logps[mask == 1]
    expect(got, want, MODEL_TOLERANCE)
    if "compute_entropy" in options:
        expect(entropies[mask == 1], H, MODEL_TOLERANCE)
        expect(f64(entropies.requires_grad), 0.0)
    slopes = [torch.autograd.grad(x.square().sum(), list(model.parameters())) for x in (got, want)]
    for mine, alone in zip(*slopes):                                    # of every weight
        expect(mine, alone, 100 * MODEL_TOLERANCE)


@settings(max_examples=10)
@given(st.lists(st.integers(2, 11), min_size=1, max_size=3), st.lists(st.integers(0, 11), max_size=2))
def test_per_token_logps_add_up_to_1_over_the_vocabulary(prompt, answer):
    """Σ_v π(v | q, o_<t) = 1: the same answer with each word as its last"""
    logps = grpo.per_token_logps(make_model("Llama"), *padded([(prompt, answer + [v]) for v in range(12)]))[0]
    expect(logps[:, -1].exp().sum(), 1.0)


@settings(max_examples=10)
@given(prompts_and_answers, st.integers(2, 11))
def test_per_token_logps_do_not_see_the_tokens_behind(rows, later):
    """log π(o_t | q, o_<t): one more token at the end of an answer changes none of those before it"""
    logps, longer = (grpo.per_token_logps(make_model("Llama"), *padded(x))[0] for x in (
        rows, [(prompt, answer + [later]) for prompt, answer in rows]))
    *_, mask = padded(rows)
    expect(longer[:, :-1][mask == 1], logps[mask == 1], MODEL_TOLERANCE)


@beyond("padding")
@pytest.mark.parametrize("junk", [-9, 10**6])
@settings(max_examples=10)
@given(rows=prompts_and_answers)
def test_per_token_logps_are_0_at_padding_that_is_no_word(junk, rows):
    """Ids of -9 or a million under the mask change nothing; logps and entropies are 0 there"""
    *_, mask = padded(rows)
    score = functools.partial(grpo.per_token_logps, make_model("Llama"))
    logps, entropies = score(*padded(rows, junk), compute_entropy=True)
    expect(logps, score(*padded(rows))[0] * mask)
    assert not entropies[mask == 0].any() and score(*padded(rows))[1] is None


@beyond("dtypes")
def test_per_token_logps_are_one_call_of_the_model_in_float32_or_wider():
    """bfloat16 weights: the softmax is float32. One pass without a cache, logits for the completion alone"""
    model, calls = copy.deepcopy(make_model("Llama")).bfloat16(), []
    model.register_forward_hook(lambda module, args, options, output: calls.append((options, output)), with_kwargs=True)
    prompts, prompt_mask, ids, mask = padded([([4, 5], [7, 8, 9]), ([6], [1])])
    score = functools.partial(grpo.per_token_logps, model, prompts.int(), prompt_mask.bool())
    logps, H = score(ids.int(), mask.float(), compute_entropy=True)
    (called, output), = calls
    assert output.logits.shape == (2, 4, 12) and not called["use_cache"] and logps.dtype == H.dtype == torch.float32
    want = output.logits[:1, :-1].float().log_softmax(-1).gather(2, ids[:1, :, None])[..., 0]
    expect(logps[:1], want, 1e-6)
    assert score(ids[:, :0], mask[:, :0])[0].shape == (2, 0)


# §4 Importance ratio and clip -----------------------------------------------------------------------------------------

SEQUENCE = dict(importance_sampling_level="sequence")                   # GSPO


def oracle_ratios(pairs, importance_sampling_level="token"):
    """The ratio of each token of an answer, from pairs of log π and log π_old."""
    logs = [p - q for p, q in pairs]
    return [math.exp(sum(logs) / len(logs) if importance_sampling_level == "sequence" else x) for x in logs]


@pytest.mark.parametrize("log_ratios, options, want", [
    ([0.10, 0.05, -0.10, 0.08, 0.02], {}, [1.1052, 1.0513, 0.9048, 1.0833, 1.0202]),            # page 1
    ([0.2] * 10, {}, [1.2214] * 10), ([0.2] * 10, SEQUENCE, [1.2214]),                          # page 3: not e² = 7.39
    ([18.0, -18.0], {}, [math.exp(18), math.exp(-18)])], ids=str)                               # however far, no bound
def test_importance_ratio_matches_the_worked_numbers(log_ratios, options, want):
    """ρ = exp(log π - log π_old); of a sequence exp(mean of log ρ over its tokens)"""
    logps, old = f64([log_ratios]) - 1, f64([log_ratios]) * 0 - 1
    expect(grpo.importance_ratio(logps, old, torch.ones_like(old), **options) / f64(want), [[1.0] * len(want)], 5e-5)


@default_and(SEQUENCE)
@given(answers(logp, logp))
def test_importance_ratio_matches_the_oracle(options, rows):
    """ρ = exp(log π - log π_old) (DeepSeekMath eq. 3); s = exp(1/|o|·Σ_t log ρ_t) (GSPO eq. 7), in shape (B, 1)"""
    logps, old, mask = columns(rows)
    got, want = grpo.importance_ratio(logps, old, mask, **options), [oracle_ratios(row, **options) for row in rows]
    assert got.shape == (len(rows), 1 if options else mask.size(1))
    expect(got.expand_as(mask)[mask == 1], sum(want, []))


@default_and(SEQUENCE)
@given(answers(logp, logp, logp))
def test_importance_ratio_is_1_on_policy_and_multiplies_over_two_steps(options, rows):
    """ρ(π/π) = 1, ρ(π/π_1)·ρ(π_1/π_0) = ρ(π/π_0), and so ρ(π/π_0)·ρ(π_0/π) = 1"""
    new, old, oldest, mask = columns(rows)
    real = lambda *pair: grpo.importance_ratio(*pair, mask, **options).expand_as(mask)[mask == 1]
    expect(real(new, new), torch.ones_like(real(new, new)))
    expect(real(new, old) * real(old, oldest), real(new, oldest))


@given(answers(logp, logp))
def test_importance_ratio_of_a_sequence_does_not_see_its_length(rows):
    """s(o o) = s(o): an answer written twice has the ratio that it has once, and is clipped alike"""
    once, twice = (grpo.importance_ratio(*columns(x), **SEQUENCE) for x in (rows, [row * 2 for row in rows]))
    expect(twice, once)


@default_and(SEQUENCE)
@given(answers(logp, logp))
def test_importance_ratio_has_itself_as_its_slope(options, rows):
    """∂ρ/∂log π = ρ; of a sequence s/|o|: the on-policy ratio is 1 and still teaches"""
    logps, old, mask = columns(rows)
    rho = lambda x: grpo.importance_ratio(x, old, mask, **options)
    length = mask.sum(1, keepdim=True) if options else 1
    expect(slope(rho, logps)[mask == 1], (rho(logps) / length).expand_as(mask)[mask == 1])


@pytest.mark.parametrize("epsilons", [(), (0.1, 0.55)], ids=str)                               # DAPO's clip-higher
@given(ratio)
def test_clip_ratio_matches_the_oracle_and_twice_is_once(epsilons, rho):
    """clip(ρ) = ρ, slope 1, inside 1 - ε_low ... 1 + ε_high, else the nearer end, slope 0; clip(clip(ρ)) = clip(ρ)"""
    low, high = epsilons or (0.2, 0.2)
    want = [1 - low, 0.0] if rho < 1 - low else [1 + high, 0.0] if rho > 1 + high else [rho, 1.0]
    clip = lambda x: grpo.clip_ratio(x, *epsilons)
    expect(torch.stack([clip(f64(rho)), slope(clip, f64(rho))]), want)
    expect(clip(clip(f64(rho))), want[0])


oracle_surrogate = lambda rho, A, epsilon_low=0.2, epsilon_high=0.2, delta=inf: (
    -min(min(rho, delta) * A, min(max(rho, 1 - epsilon_low), 1 + epsilon_high) * A))


def surrogate(rho, A, **options):
    """[l, ∂l/∂ρ] of one token."""
    loss = lambda x: grpo.clipped_surrogate_loss(x, f64([[A]]), **options)
    return torch.cat([loss(f64([[rho]])), slope(loss, f64([[rho]]))], 1)[0]


@pytest.mark.parametrize("rho, A, options, want, want_slope", [                                 # page 3
    (0.5, 1.0, {}, -0.5, -1.0), (1.1, 1.0, {}, -1.1, -1.0), (1.5, 1.0, {}, -1.2, 0.0),          # 1.5: far enough up
    (0.5, -1.0, {}, 0.8, 0.0), (1.1, -1.0, {}, 1.1, 1.0), (1.5, -1.0, {}, 1.5, 1.0),            # 0.5: far enough down
    (0.5, 1.0, dict(epsilon_low=0.9), -0.5, -1.0), (1.25, 1.0, dict(epsilon_high=0.28), -1.25, -1.0),
    (50.0, -1.0, {}, 50.0, 1.0), (50.0, -1.0, dict(delta=4.0), 4.0, 0.0),
    (50.0, 1.0, dict(delta=4.0), -1.2, 0.0), (3.0, -1.0, dict(delta=4.0), 3.0, 1.0),
    (1.2214, 1.24, {}, -1.488, 0.0), (1.2214, -1.24, {}, 1.5145, 1.24),
    (1.1052, 1.225, {}, -1.3539, -1.225), (1.0513, -1.225, {}, 1.2878, 1.225)], ids=str)        # page 1
def test_clipped_surrogate_loss_matches_the_worked_numbers(rho, A, options, want, want_slope):
    """l = -min(ρ·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A), and its slope ∂l/∂ρ"""
    expect(surrogate(rho, A, **options), [want, want_slope], 5e-5)


@default_and(dict(epsilon_low=0.1, epsilon_high=0.55), dict(delta=1.45))
@given(st.lists(st.tuples(ratio, ratio, advantage), min_size=1, max_size=3))
def test_clipped_surrogate_loss_matches_the_oracle(options, rows):
    """l = -min(ρ·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A) (DeepSeekMath eq. 3); with δ, min(ρ, δ)·A comes first"""
    want = [[oracle_surrogate(rho, A, **options) for rho in rhos] for *rhos, A in rows]
    ratios, A = f64([row[:2] for row in rows]), f64([row[2:] for row in rows])
    expect(grpo.clipped_surrogate_loss(ratios, A, **options), want)


@given(ratio, advantage)
def test_clipped_surrogate_loss_has_no_slope_only_where_the_token_has_moved_enough(rho, A):
    """∂l/∂ρ = 0 where A > 0 and ρ > 1 + ε, or A < 0 and ρ < 1 - ε; else -A: no way back is ever barred"""
    enough = A > 0 and rho > 1.2 or A < 0 and rho < 0.8
    expect(surrogate(rho, A)[1], 0.0 if enough else -A)


@given(ratio, advantage)
def test_clipped_surrogate_loss_never_promises_more_than_the_plain_one(rho, A):
    """Without δ l >= -ρ·A, the loss without a clip: it is never better than that, and equal inside the range"""
    loss, plain = surrogate(rho, A)[0], f64(-rho * A)
    expect(loss.maximum(plain), loss)
    if 0.8 < rho < 1.2:
        expect(loss, plain)


@pytest.mark.parametrize("name", ["clipped_surrogate_loss", "cispo_loss", "sapo_loss"])
@given(logp, ratio, advantage, grid(0, 4, 0.5))
def test_a_weight_of_a_token_goes_into_its_advantage(name, p, rho, A, w):
    """w·l(ρ, A) = l(ρ, w·A) for w >= 0: so an entropy mask or a sampler's correction multiplies the advantages"""
    inputs = [f64([[x]]) for x in ((p, rho) if name == "cispo_loss" else (rho,))]
    loss = functools.partial(getattr(grpo, name), *inputs)
    expect(loss(w * f64([[A]])), w * loss(f64([[A]])))


# §5 KL ----------------------------------------------------------------------------------------------------------------

ORACLE_KL = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
kl = lambda p, q, **options: grpo.kl_estimate(f64(p), f64(q), **options)


@pytest.mark.parametrize("options, want", [                                                     # page 9
    (dict(estimator="k1"), [0.6931, 0.0, -0.6931]), (dict(estimator="k2"), [0.2402, 0.0, 0.2402]),
    (dict(estimator="k3"), [0.1931, 0.0, 0.3069]), ({}, [0.1931, 0.0, 0.3069])], ids=str)
def test_kl_estimate_matches_the_worked_numbers(options, want):
    """π = (1/2, 1/4, 1/4), π_ref = (1/4, 1/4, 1/2): k1 = log π - log π_ref, k2 = k1²/2, k3 = exp(-k1) + k1 - 1"""
    expect(kl(f64([0.5, 0.25, 0.25]).log(), f64([0.25, 0.25, 0.5]).log(), **options), want, 5e-5)


@default_and(*(dict(estimator=name) for name in ORACLE_KL))
@given(st.lists(st.tuples(grid(-20, 0, 0.125), grid(-20, 0, 0.125)), min_size=1, max_size=3))
def test_kl_estimate_matches_the_oracle(options, tokens):
    """k1 = log π - log π_ref, k2 = k1²/2, k3 = exp(-k1) + k1 - 1 (DeepSeekMath eq. 4), however far π has moved"""
    oracle = ORACLE_KL[options.get("estimator", "k3")]
    expect(kl(*zip(*tokens), **options), [oracle(p - q) for p, q in tokens])


@given(logp, logp)
def test_kl_estimate_k3_is_never_negative_and_0_only_at_equality(p, q):
    """k3 >= 0, and k3 = 0 <=> π = π_ref, where its slope is 0, too"""
    k3 = kl([p], [q])
    assert k3 > 0 or p == q
    expect(kl([p], [p]), [0.0], 0)
    expect(slope(lambda x: grpo.kl_estimate(x, f64([p])), f64([p])), [0.0], 0)


@beyond("equal")
@given(st.integers(-1000, 1000), st.sampled_from([1e-8, 1e-6, 1e-4, 1e-2]), st.floats(-3, 0, width=32))
def test_kl_estimate_k3_is_never_negative_in_float32(n, scale, p):
    """expm1(-k1) + k1 >= 0 to the last bit: exp(-k1) + k1 - 1 is not, where π is close to π_ref"""
    k3 = grpo.kl_estimate(torch.tensor(p + n * scale / 100), torch.tensor(p))
    expect(k3.clamp(max=0), 0.0, 0)


@default_and(dict(estimator="k1"))
@given(distribution, distribution)
def test_kl_estimate_k1_and_k3_have_the_kl_as_their_mean(options, p, q):
    """Σ_v π(v)·k1(v) = Σ_v π(v)·k3(v) = KL(π‖π_ref): over samples both are right on average"""
    want = sum(x * math.log(x / y) for x, y in zip(p, q))
    expect(f64(p) @ kl(f64(p).log(), f64(q).log(), **options), want)


@pytest.mark.parametrize("what", ["k1", "k2", "k3", "ρ·k3"])
@given(distribution, distribution)
def test_kl_estimate_teaches_what_the_table_says(what, p, q):
    """With samples held fixed E ∇k1 = 0, E ∇k2 = ∇KL(π‖π_ref), E ∇k3 = ∇KL(π_ref‖π), E ∇(ρ·k3) = ∇KL(π‖π_ref)"""
    KL = sum(x * math.log(x / y) for x, y in zip(p, q))
    to_ref = [x * (math.log(x / y) - KL) for x, y in zip(p, q)]                 # ∇KL(π‖π_ref) by the logits
    want = {"k1": [0.0] * 3, "k2": to_ref, "k3": [x - y for x, y in zip(p, q)], "ρ·k3": to_ref}[what]
    options = dict(estimator=what) if what in ("k1", "k2") else {}
    weight = lambda logps: (logps - logps.detach()).exp() if what == "ρ·k3" else 1.0
    k = lambda logps: grpo.kl_estimate(logps, f64(q).log(), **options) * weight(logps)
    expect(slope(lambda z: f64(p) * k(z.log_softmax(0)), f64(p).log()), want)


# §6 The aggregations --------------------------------------------------------------------------------------------------

LOSS_TYPES, losses = ["grpo", "bnpo", "dr_grpo", "dapo"], answers(reward)
every_loss_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)
of_type = lambda loss_type, T_max=7: (                # the limit of sampling for the one that needs it
    dict(loss_type=loss_type) | (dict(max_completion_length=T_max) if loss_type == "dr_grpo" else {}))


def aggregate(rows, loss_type, T_max=7, **counts):
    loss, mask = columns(rows)
    return grpo.aggregate(loss, mask, **of_type(loss_type, T_max), **counts)


def oracle_weights(lengths, loss_type, T_max=7, num_rows_in_batch=None, num_items_in_batch=None):
    """What a token of each answer weighs: ∂loss/∂l."""
    B, own = num_rows_in_batch or len(lengths), max(sum(lengths), 1)
    of_row = {"grpo": lambda n: 1 / (B * max(n, 1)), "bnpo": lambda n: 1 / own, "dr_grpo": lambda n: 1 / (B * T_max),
              "dapo": lambda n: 1 / (num_items_in_batch or own)}
    return list(map(of_row[loss_type], lengths))


@pytest.mark.parametrize("loss_type, want, of_short, of_long", [
    ("grpo", 14.0, 1 / 8, 1 / 32), ("bnpo", 17.3, 1 / 20, 1 / 20),
    ("dr_grpo", 8.65, 1 / 40, 1 / 40), ("dapo", 17.3, 1 / 20, 1 / 20)])
def test_aggregate_matches_the_worked_numbers(loss_type, want, of_short, of_long):
    """Answers of 2, 8, 2, 8 tokens, token t of answer i has the loss 8i + t: value (page 10), weights (page 4)"""
    rows = [[(8.0 * i + t,) for t in range(n)] for i, n in enumerate((2, 8, 2, 8))]
    loss, mask = columns(rows)
    of = lambda x: grpo.aggregate(x, mask, **of_type(loss_type, 10))
    expect(of(loss), want)
    expect(slope(of, loss), mask * f64([[of_short], [of_long]] * 2))


@every_loss_type
@default_and(dict(num_rows_in_batch=20, num_items_in_batch=40), dict(num_rows_in_batch=1, num_items_in_batch=1))
@given(losses)
def test_aggregate_matches_the_oracle(options, loss_type, rows):
    """loss = Σ l·w: grpo 1/(B·n_i), dr_grpo 1/(B·T_max), dapo 1/N, bnpo 1/(own tokens); B, N given, or its own"""
    weights = oracle_weights(list(map(len, rows)), loss_type, **options)
    expect(aggregate(rows, loss_type, **options), sum(w * l for row, w in zip(rows, weights) for l, in row))


@every_loss_type
@given(answers(reward, reward), reward)
def test_aggregate_is_linear(loss_type, rows, c):
    """aggregate(c·l + k) = c·aggregate(l) + aggregate(k): the weight of a token does not depend on losses"""
    l, k = ([[token[i : i + 1] for token in row] for row in rows] for i in (0, 1))
    both = [[(c * x + y,) for x, y in row] for row in rows]
    expect(aggregate(both, loss_type), c * aggregate(l, loss_type) + aggregate(k, loss_type))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), reward)
def test_aggregate_of_a_constant_is_that_constant(loss_type, lengths, c):
    """l = c at every token => loss = c: these three are means, dr_grpo is not"""
    expect(aggregate([[(c,)] * n for n in lengths], loss_type), c)


@given(st.lists(st.lists(st.tuples(reward), min_size=3, max_size=3), min_size=1, max_size=3))
def test_aggregate_is_one_and_the_same_at_equal_lengths(rows):
    """n_1 = ... = n_B = T_max => all four are the mean over tokens"""
    mean = sum(x for row in rows for x, in row) / (3 * len(rows))
    expect(torch.stack([aggregate(rows, name, T_max=3) for name in LOSS_TYPES]), [mean] * 4)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@given(st.lists(losses, min_size=1, max_size=3), st.randoms())
def test_aggregate_of_microbatches_adds_up_to_the_whole(loss_type, parts, random):
    """Σ aggregate(part; rows and tokens of the whole) = aggregate(whole), whatever the split and the order of rows"""
    whole = random.sample(sum(parts, []), sum(map(len, parts)))
    counts = dict(num_rows_in_batch=len(whole), num_items_in_batch=sum(map(len, whole)))
    expect(sum(aggregate(part, loss_type, **counts) for part in parts), aggregate(whole, loss_type))


@beyond("empty")
@pytest.mark.parametrize("loss_type, want", [("grpo", 2 / 3), ("bnpo", 1), ("dr_grpo", 1 / 3), ("dapo", 1)])   # page 10
def test_aggregate_counts_an_answer_without_a_token(loss_type, want):
    """Lengths 2, 0, 8: it adds 0 and is one of the three rows. Only such answers: 0, not 0/0. One loss a row: (B, 1)"""
    expect(aggregate([[(1.0,)] * 2, [], [(1.0,)] * 8], loss_type, T_max=10), want)
    answer = f64([[2.0], [3.0]]), torch.ones(2, 4)                      # 2 at four tokens, 3 at four tokens
    expect(grpo.aggregate(*answer, **of_type(loss_type, 16)), 20 / (2 * 16) if loss_type == "dr_grpo" else 2.5)
    for B in (3, 0):
        empty = torch.zeros(B, 8)
        expect(grpo.aggregate(empty + 1, empty, **of_type(loss_type, 10)), 0.0)


# §8 Variants, before the loss that is made of them --------------------------------------------------------------------

@pytest.mark.parametrize("rho, clip, cispo, sapo", [                                            # page 13
    (0.5, 0.5, 0.5, 0.4700), (1.0, 1.0, 1.0, 1.0), (1.5, 0.0, 1.5, 1.4100), (6.0, 0.0, 5.0, 0.1596)])
def test_cispo_loss_and_sapo_loss_weight_a_token_as_worked(rho, clip, cispo, sapo):
    """The weight of ∇log π at A = 1: ρ or 0; CISPO min(ρ, 5); SAPO 4ρ·σ(ρ - 1)·(1 - σ(ρ - 1))"""
    one, logps = f64([[1.0]]), f64([[math.log(rho)]])
    clipped = slope(lambda x: -grpo.clipped_surrogate_loss(x.exp(), one), logps)
    capped = slope(lambda x: -grpo.cispo_loss(x, x.exp(), one), logps)
    gated = slope(lambda x: -grpo.sapo_loss(x.exp(), one), logps)
    expect(torch.cat([clipped, capped, gated], 1), [[clip, cispo, sapo]], 5e-5)


@default_and(dict(epsilon_high=1.3))
@given(logp, ratio, advantage)
def test_cispo_loss_matches_the_oracle_and_takes_the_ratio_as_a_constant(options, p, rho, A):
    """l = -sg[min(ρ, ε_high)]·A·log π (CISPO eq. 4): ∂l/∂ρ = 0, ∂l/∂log π = -min(ρ, ε_high)·A, which no ρ makes 0"""
    weight = min(rho, options.get("epsilon_high", 5.0))
    loss = lambda p, rho: grpo.cispo_loss(p, rho, f64([[A]]), **options)
    p, rho = f64([[p]]), f64([[rho]])
    expect(loss(p, rho), -weight * A * p)
    expect(slope(lambda x: loss(x, rho), p), [[-weight * A]])
    expect(slope(lambda x: loss(p, x), rho), [[0.0]])


def oracle_sapo(rho, A, temperature_pos=1.0, temperature_neg=1.05):
    tau = temperature_pos if A > 0 else temperature_neg
    return -4 / tau * A / (1 + math.exp(-tau * (rho - 1)))


@default_and(dict(temperature_pos=0.5, temperature_neg=2.0))
@given(st.lists(st.tuples(ratio, advantage), min_size=1, max_size=3))
def test_sapo_loss_matches_the_oracle(options, tokens):
    """l = -σ(τ(ρ - 1))·4/τ·A, τ by the sign of A, each token's own (SAPO eq. 5); ∂l/∂ρ = -A at ρ = 1, whatever τ is"""
    rho, A = f64(tokens).T
    expect(grpo.sapo_loss(rho[None], A[None], **options), [[oracle_sapo(*token, **options) for token in tokens]])
    expect(slope(lambda x: grpo.sapo_loss(x, A[None], **options), torch.ones_like(A)[None]), -A[None])


@given(ratio, advantage.filter(bool))
def test_sapo_loss_fades_and_is_never_cut_off(rho, A):
    """0 < ∂l/∂ρ / -A <= 1, with 1 at ρ = 1 alone: a sigmoid in the place of the clip"""
    share = slope(lambda x: grpo.sapo_loss(x, f64([[A]])), f64([[rho]])) / -A
    assert 0 < share < 1 or rho == share == 1, share


step = st.tuples(reward, st.integers(0, 3))                                     # its reward, and its last token
solutions = st.lists(st.tuples(st.integers(1, 4), step, step), min_size=4, max_size=4)          # length, two steps


def process(solutions, G=2, **options):
    """(B, T): the advantages of the tokens of solutions, each its length and its graded steps."""
    mask = f64([[float(t < n) for t in range(6)] for n, *_ in solutions])
    grades, ends = (torch.tensor([[step[k] for step in steps] for _, *steps in solutions]) for k in (0, 1))
    return grpo.process_advantages(grades.double(), ends, mask, G, **options)


@pytest.mark.parametrize("solutions, want", [                                                   # page 11
    ([(6, (1, 1), (1, 3), (1, 5)), (4, (1, 1), (0, 3), (nan, -7))],
     [[1.5, 1.5, 1.0, 1.0, 0.5, 0.5], [-1.5, -1.5, -2.0, -2.0, 0.0, 0.0]]),
    ([(6, (1, 1), (1, 3), (1, 5)), (4, (0, 1), (1, 3), (nan, 99))],
     [[1.5, 1.5, 1.0, 1.0, 0.5, 0.5], [-1.5, -1.5, 0.5, 0.5, 0.0, 0.0]])], ids=["carry", "wrong first"])
def test_process_advantages_match_the_worked_numbers(solutions, want):
    """A_t = Σ z of the steps that end at or after t, z = (r - mean) / std over all steps of the group (§4.1.3)"""
    expect(process(solutions, correction=0, eps=0.0), want)


@default_and(dict(correction=0), dict(eps=0.5))
@given(solutions)
def test_process_advantages_match_the_oracle(options, solutions):
    """A_t = Σ z of the steps that end at or after t, z = (r - mean) / (std + eps) over all steps of the group"""
    pairs = [[r for _, *steps in solutions[i : i + 2] for r, _ in steps] for i in (0, 2)]
    z = iter(sum(oracle_advantages(pairs, **options), []))
    ends = [[(next(z), end) for _, end in steps] for _, *steps in solutions]
    want = [[sum(a for a, end in steps if end >= t) if t < n else 0.0 for t in range(6)]
            for (n, *_), steps in zip(solutions, ends)]
    expect(process(solutions, **options), want)


@given(st.lists(st.tuples(st.integers(1, 4), reward), min_size=2, max_size=4))
def test_process_advantages_of_one_step_at_the_end_are_outcome_supervision(graded):
    """One step that ends at the last token: A_{i,t} = A_i"""
    outcome, = advantages([[r for _, r in graded]]).tolist()
    want = [[A if t < n else 0.0 for t in range(6)] for A, (n, _) in zip(outcome, graded)]
    expect(process([(n, (r, n - 1)) for n, r in graded], len(graded)), want)


# §7 The loss, made of all of them -------------------------------------------------------------------------------------

token = st.tuples(logp, logp, logp)                                             # log π, log π_old, log π_ref
rated = st.lists(st.tuples(advantage, st.lists(token, min_size=1, max_size=4)), min_size=1, max_size=3).map(
    lambda rows: [[(*token, A) for token in row] for A, row in rows])           # and the answer's A
far = answers(*[grid(-19, 0, 0.125)] * 3, advantage)                            # here each token has an A of its own
CISPO, SAPO = dict(policy_loss="cispo", epsilon_high=2.0), dict(policy_loss="sapo")
BIAS = dict(beta=0.1, use_bias_correction_kl=True)
one_option = default_and(
    *map(of_type, ["grpo", "bnpo", "dr_grpo"]), pytest.param(dict(epsilon_low=0.1), marks=beyond("defaults")),
    pytest.param(dict(policy_loss="cispo"), marks=beyond("defaults")), dict(epsilon_low=0.1, epsilon_high=0.55),
    dict(delta=1.45), dict(beta=0.1), dict(beta=0.1, loss_type="grpo"), BIAS, SEQUENCE, SEQUENCE | BIAS, CISPO, SAPO,
    SEQUENCE | dict(loss_type="grpo"), SEQUENCE | CISPO, SAPO | dict(loss_type="grpo"), SEQUENCE | SAPO)
any_options = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in dict(
    policy_loss=["clip", "cispo", "sapo"], importance_sampling_level=["token", "sequence"], loss_type=LOSS_TYPES,
    epsilon_low=[0.2, 0.1], epsilon_high=[None, 0.55], delta=[None, 1.7], beta=[0.0, 0.1],
    use_bias_correction_kl=[False, True], max_completion_length=[7]).items()})


def loss_of(rows, logps=None, by_token=False, **options):
    """grpo_loss of rows of tokens (log π, log π_old, log π_ref, A)."""
    own, old, ref, A, mask = columns(rows, width=4)
    constants = dict(old_logps=old) | (dict(ref_logps=ref) if "beta" in options else {})
    return grpo.grpo_loss(own if logps is None else logps, A if by_token else A[:, 0], mask, **constants, **options)


def oracle_loss(rows, at=None, policy_loss="clip", importance_sampling_level="token", epsilon_low=0.2,
                epsilon_high=None, delta=None, beta=0.0, use_bias_correction_kl=False, loss_type="dapo",
                max_completion_length=7):
    """The loss and its metrics, token by token. at: the rows without the move, from which CISPO's weights come."""
    top = epsilon_high or (5.0 if policy_loss == "cispo" else epsilon_low)
    lowest, highest = dict(clip=(1 - epsilon_low, 1 + top), cispo=(0.0, top), sapo=(0.0, inf))[policy_loss]
    weights, N = oracle_weights(list(map(len, rows)), loss_type, max_completion_length), sum(map(len, rows))
    loss = low = high = mean_kl = 0.0
    for row, fixed, w in zip(rows, at or rows, weights):
        ratios = oracle_ratios([token[:2] for token in row], importance_sampling_level)
        constants = oracle_ratios([token[:2] for token in fixed], importance_sampling_level)
        for (p, _, ref, A), rho, constant in zip(row, ratios, constants):
            if policy_loss == "clip":
                policy = oracle_surrogate(rho, A, epsilon_low, top, delta or inf)
            else:
                policy = -min(constant, top) * A * p if policy_loss == "cispo" else oracle_sapo(rho, A)
            k3 = ORACLE_KL["k3"](p - ref) * (rho if use_bias_correction_kl else 1.0)
            loss += w * (policy + beta * k3)
            mean_kl += k3 / N
            low += (rho < lowest and A < 0) / N
            high += (rho > highest and A > 0) / N
    return loss, {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high,
                  "kl": mean_kl}


def oracle_slopes(rows, **options):
    """∂loss/∂log π of each token by central differences; CISPO's weight, a constant, comes from the unmoved rows."""
    def loss(i, t, h):
        (p, *rest), moved = rows[i][t], list(map(list, rows))
        moved[i][t] = (p + h, *rest)
        return oracle_loss(moved, rows, **options)[0]
    return [(loss(i, t, 1e-6) - loss(i, t, -1e-6)) / 2e-6 for i, row in enumerate(rows) for t in range(len(row))]


def on_policy(rows, advantages, **options):
    """The loss of rows of log-probs at ρ = 1, and its slope: [loss, ∂loss/∂log π of each real token]."""
    logps, mask = columns(rows)
    loss = lambda x: grpo.grpo_loss(x, f64(advantages), mask, **options)[0]
    return torch.cat([loss(logps)[None], slope(loss, logps)[mask == 1]])


@pytest.mark.parametrize("options, want, want_by_default", [                                         # page 1
    (dict(loss_type="grpo"), -0.010313, -0.008417), (dict(loss_type="bnpo"), -0.092608, -0.075584),
    (dict(), -0.092608, -0.075584), (of_type("dr_grpo", 6), -0.077174, -0.062986)], ids=str)
def test_grpo_loss_matches_the_worked_numbers(options, want, want_by_default):
    """Answers of 5, 4, 6 tokens, A = 1.225, -1.225, 0, then the default's ±0.9998: from log ratios to one loss"""
    log_ratios = [[10, 5, -10, 8, 2], [-5, 10, -8, 5], [8, -5, 10, 5, -8, 10]]          # in hundredths
    logps, mask = columns([[(x / 100,) for x in row] for row in log_ratios])
    loss = lambda A: grpo.grpo_loss(logps, f64(A), mask, old_logps=0 * logps, **options)[0]
    expect(loss([1.225, -1.225, 0.0]), want, 5e-7)
    expect(loss([0.99980004, -0.99980004, 0.0]), want_by_default, 5e-7)


@pytest.mark.parametrize("lengths, loss_type, want", [                                          # page 2
    ([3, 3], "grpo", 0.0), ([2, 4], "grpo", 0.0), ([4, 2], "grpo", 0.0),
    ([3, 3], "dapo", 0.0), ([2, 4], "dapo", 1 / 3), ([4, 2], "dapo", -1 / 3)], ids=str)
def test_grpo_loss_on_policy_is_worked_out_from_lengths_alone(lengths, loss_type, want):
    """A = +1, -1 and ρ = 1: loss = Σ -A·w, 0 for grpo or equal lengths; the gradient of each token is -A·w, not 0"""
    got = on_policy([[(-1.0,)] * n for n in lengths], [1.0, -1.0], loss_type=loss_type)
    weights = oracle_weights(lengths, loss_type)
    expect(got, [want, *[-weights[0]] * lengths[0], *[weights[1]] * lengths[1]])


@one_option
@given(rated)
def test_grpo_loss_matches_the_oracle(options, rows):
    """loss = aggregate(l(ρ, A) + β·KL), with each option and some pairs, against a loop over tokens"""
    expect(loss_of(rows, **options)[0], oracle_loss(rows, **options)[0])


@pytest.mark.parametrize("by_token, rows", [(False, rated), pytest.param(True, far, marks=beyond("shapes"))],
                         ids=["A of answers", "A of tokens"])
@settings(max_examples=200)
@given(data=st.data(), options=any_options)
def test_grpo_loss_matches_the_oracle_with_any_options(by_token, rows, data, options):
    """loss = aggregate(l(ρ, A) + β·KL), whatever is combined; A (B,) or (B, T), up to log ρ = ±19: no hidden bound"""
    rows = data.draw(rows, "rows")
    expect(loss_of(rows, by_token=by_token, **options)[0], oracle_loss(rows, **options)[0])


@one_option
@given(rated)
def test_grpo_loss_has_the_slope_of_the_oracle(options, rows):
    """∂loss/∂log π of every token, by finite differences of the loop over tokens"""
    logps, *_, mask = columns(rows)
    got = slope(lambda x: loss_of(rows, x, **options)[0], logps)[mask == 1]
    expect(got, oracle_slopes(rows, **options), 1e-6)


@default_and(*map(of_type, ["grpo", "bnpo", "dr_grpo"]), CISPO, SAPO, SEQUENCE)
@given(answers(logp), st.data())
def test_grpo_loss_on_policy_has_the_gradient_of_reinforce(options, rows, data):
    """ρ = 1: ∂loss/∂log π_t = -A·w_t, also of gspo, cispo, sapo; the value of "clip" is Σ -A·w, whatever was written"""
    A = data.draw(st.lists(advantage, min_size=len(rows), max_size=len(rows)), "advantages")
    weights = oracle_weights(list(map(len, rows)), options.get("loss_type", "dapo"))
    want = [-a * w for a, w, row in zip(A, weights, rows) for _ in row]
    got = on_policy(rows, A, **options)
    expect(got[1:], want)
    expect(got[0] if "policy_loss" not in options else f64(sum(want)), sum(want))


@one_option
@given(answers(logp, advantage))
def test_grpo_loss_without_old_logps_takes_those_of_the_policy(options, rows):
    """old_logps = None is old_logps = log π, held fixed: the first update after sampling needs no second pass"""
    logps, A, mask = columns(rows)
    call = lambda x, **old: grpo.grpo_loss(x, A[:, 0], mask, ref_logps=0 * logps, **old, **options)[0]
    expect(call(logps), call(logps, old_logps=logps))
    expect(slope(call, logps), slope(lambda x: call(x, old_logps=logps), logps))


@given(unequal, logp)
def test_grpo_loss_is_0_on_policy_and_teaches_only_where_rewards_differ(rewards, p):
    """Answers of one length: loss = 0 in both cases; r_1 = ... = r_G: gradient 0, else not"""
    of = lambda rewards: on_policy([[(p,)]] * len(rewards), advantages([rewards])[0])
    silent, mixed = of([rewards[0]] * len(rewards)), of(rewards)
    expect(silent, [0.0] * len(silent))
    expect(mixed[0], 0.0)
    assert mixed[1:].abs().max() > 1e-3


@pytest.mark.parametrize("name", ["old_logps", "ref_logps"])
@default_and(CISPO, SAPO, SEQUENCE | BIAS)
@given(rated)
def test_grpo_loss_takes_the_other_log_probs_as_constants(options, name, rows):
    """∂loss/∂log π_old = ∂loss/∂log π_ref = 0, whatever comes in: only the policy learns"""
    logps, old, ref, A, mask = columns(rows)
    constants, options = dict(old_logps=old, ref_logps=ref), dict(beta=0.1) | options
    loss = lambda x: grpo.grpo_loss(logps, A[:, 0], mask, **constants | {name: x}, **options)[0]
    expect(slope(loss, constants[name]), torch.zeros_like(logps))


@one_option
@given(rated)
def test_grpo_loss_metrics_match_the_oracle(options, rows):
    """Shares of tokens. low: A < 0, ρ < 1 - ε_low; high: A > 0, ρ > 1 + ε_high (cispo: its cap); region: both; kl"""
    want = oracle_loss(rows, **options)[1]
    metrics = {name: x for name, x in loss_of(rows, **options)[1].items() if name in want}
    expect(f64(list(metrics.values())), [want[name] for name in metrics])


@pytest.mark.parametrize("what", ["value", "slope", pytest.param("metrics", marks=beyond("metrics"))])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@default_and(SEQUENCE, CISPO, SAPO)
@given(parts=st.lists(rated, min_size=1, max_size=3))
def test_grpo_loss_of_microbatches_adds_up_to_the_whole(what, options, loss_type, parts):
    """Σ over parts = the whole in value, gradient and metrics, given the whole batch's rows and tokens: any split"""
    def numbers(rows, **counts):
        call = functools.partial(loss_of, rows, **counts, **options, **of_type(loss_type), beta=0.1)
        logps, *_, mask = columns(rows)
        return {"value": lambda: call()[0], "slope": lambda: slope(lambda x: call(x)[0], logps)[mask == 1],
                "metrics": lambda: f64(list(call()[1].values()))}[what]()

    whole = sum(parts, [])
    counts = dict(num_rows_in_batch=len(whole), num_items_in_batch=sum(map(len, whole)))
    of_parts = [numbers(part, **counts) for part in parts]
    expect(torch.cat(of_parts) if what == "slope" else sum(of_parts), numbers(whole))


@beyond("empty")
@every_loss_type
@default_and(SEQUENCE, CISPO, SAPO, SEQUENCE | BIAS, dict(beta=0.0))
@given(st.lists(st.lists(st.tuples(logp, logp, logp, advantage), max_size=3), max_size=3))
def test_grpo_loss_counts_an_answer_without_a_token(options, loss_type, rows):
    """It is one of grpo's and dr_grpo's rows and adds nothing to gradient and metrics; no token at all: 0, not 0/0"""
    options = dict(beta=0.1) | options | of_type(loss_type)
    logps, *_, mask = columns(rows, width=4)
    (loss, got), (want, metrics) = loss_of(rows, by_token=True, **options), oracle_loss(rows, **options)
    expect(loss, want)
    expect(f64(list(got.values())), list(metrics.values()))
    assert list(got) == list(metrics) and set(map(type, got.values())) == {float}
    slopes = slope(lambda x: loss_of(rows, x, True, **options)[0], logps)
    expect(slopes[mask == 1], oracle_slopes(rows, **options), 1e-6)


# All functions that take a mask: padding, width, dtype of the mask ----------------------------------------------------

masked_loss = lambda by_token=False, **options: lambda x, y, m: grpo.grpo_loss(
    x, y if by_token else y[:, 0], m, old_logps=y, **(dict(ref_logps=y) if "beta" in options else {}), **options)[0]
MASKED = {  # a value that must not depend on the padding, from two columns and the mask
    "broadcast_advantages": lambda x, y, m: grpo.broadcast_advantages(x[:, 0], m),
    "process_advantages": lambda x, y, m: grpo.process_advantages(
        x[:, :1], torch.zeros(len(x), 1, dtype=torch.long), m, len(x), correction=0),
    "importance_ratio": lambda x, y, m: grpo.importance_ratio(x, y, m)[m != 0],
    "importance_ratio of a sequence": lambda x, y, m: grpo.importance_ratio(x, y, m, **SEQUENCE),
    **{f"aggregate {name}": lambda x, y, m, name=name: grpo.aggregate(x, m, **of_type(name)) for name in LOSS_TYPES},
    **{f"grpo_loss {name}": masked_loss(**of_type(name)) for name in LOSS_TYPES},
    "grpo_loss with KL": masked_loss(beta=0.5), "grpo_loss of a sequence": masked_loss(**SEQUENCE, loss_type="grpo"),
    "grpo_loss cispo": masked_loss(**CISPO), "grpo_loss sapo": masked_loss(**SAPO, loss_type="grpo"),
    "grpo_loss with A of tokens": masked_loss(True)}


def laws_of_padding(table):
    """Three laws about every function of a table like MASKED."""
    of_table = pytest.mark.parametrize("name", [
        pytest.param(name, marks=[beyond("shapes")] * ("of tokens" in name)) for name in table])

    @of_table
    @pytest.mark.parametrize("junk", [[-100.0, 3.0], pytest.param([nan, inf, -inf, 1e30], marks=beyond("padding"))],
                             ids=["a number", "NaN, infinite or huge"])
    @given(rows=answers(number, number), data=st.data())
    def test_what_is_at_the_padding_reaches_no_value_and_no_slope(name, junk, rows, data):
        """f(junk at the padding) = f(0 there), ∂f too, and ∂f/∂padding = 0"""
        junk = data.draw(st.sampled_from(junk), "at the padding")
        (x, y, mask), (x0, y0, _) = columns(rows, padding=junk), columns(rows, padding=0.0)
        expect(table[name](x, y, mask), table[name](x0, y0, mask))
        expect(slope(lambda x: table[name](x, y, mask), x), slope(lambda x: table[name](x, y0, mask), x0) * mask)

    @of_table
    @given(answers(number, number))
    def test_one_more_column_of_padding_changes_nothing(name, rows):
        """f(rows padded to T + 1) = f(rows padded to T)"""
        wider = [torch.nn.functional.pad(x, (0, 1)) for x in columns(rows)]
        got, want = table[name](*wider), table[name](*columns(rows))
        expect(got[:, : want.size(1)] if want.dim() == 2 else got, want)

    @beyond("masks")
    @of_table
    @given(answers(number, number), st.sampled_from([torch.bool, torch.int64, torch.uint8, torch.float32]))
    def test_a_mask_may_be_of_any_dtype(name, rows, dtype):
        """f(mask of this dtype) = f(mask of 0.0 and 1.0)"""
        x, y, mask = columns(rows)
        expect(table[name](x, y, mask.to(dtype)), table[name](x, y, mask))

    return locals()


globals().update({name: law for name, law in laws_of_padding(MASKED).items() if name.startswith("test_")})


# Shapes, dtypes and errors of every function --------------------------------------------------------------------------

def tensors(dtype=torch.float64):
    """X numbers, M a mask, I integers (B, T); R (B,); C (B, 1); S a scalar; L logits (B, T, V)."""
    torch.manual_seed(0)
    X, L = torch.randn(4, 3).to(dtype), torch.randn(4, 3, 5).to(dtype)
    return types.SimpleNamespace(X=X, R=X[:, 0].clone(), C=X[:, :1].clone(), S=X[0, 0].clone(), L=L,
                                 M=torch.ones(4, 3).tril(), I=torch.randint(3, (4, 3)))


CALLS = {  # a call, and what the result is like
    "combine_rewards": (lambda t: grpo.combine_rewards(t.X, t.X[0]), "R"),
    "group_stats": (lambda t: torch.cat(grpo.group_stats(t.R, 2)), "R"),
    "group_advantages": (lambda t: grpo.group_advantages(t.R, 2), "R"),
    "broadcast_advantages": (lambda t: grpo.broadcast_advantages(t.R, t.M), "X"),
    "process_advantages": (lambda t: grpo.process_advantages(t.X, t.I, t.M, 2), "X"),
    "make_completion_mask": (lambda t: grpo.make_completion_mask(t.I, 1), "I"),
    "selective_log_softmax": (lambda t: grpo.selective_log_softmax(t.L, t.I.int()), "X"),
    "entropy_from_logits": (lambda t: grpo.entropy_from_logits(t.L), "X"),
    "importance_ratio": (lambda t: grpo.importance_ratio(t.X, t.X, t.M), "X"),
    "clip_ratio": (lambda t: grpo.clip_ratio(t.R), "R"), "kl_estimate": (lambda t: grpo.kl_estimate(t.S, t.S), "S"),
    "clipped_surrogate_loss": (lambda t: grpo.clipped_surrogate_loss(t.X, t.X, delta=2.0), "X"),
    "cispo_loss": (lambda t: grpo.cispo_loss(t.X, t.C, t.C), "X"),
    "sapo_loss": (lambda t: grpo.sapo_loss(t.C, t.X), "X"),
    "aggregate": (lambda t: grpo.aggregate(t.X, t.M, **of_type("dr_grpo")), "S"),
    "grpo_loss": (lambda t: grpo.grpo_loss(t.X, t.R, t.M, old_logps=t.X, ref_logps=t.X, beta=0.1)[0], "S")}


@beyond("dtypes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_function_keeps_the_dtype_and_changes_no_argument(name, dtype):
    """The dtype that goes in comes out, in the shape that the docstring says; every tensor that went in is as it was"""
    (call, like), t, before = CALLS[name], tensors(dtype), tensors(dtype)
    result, want = call(t), vars(t)[like]
    assert (result.shape, result.dtype) == (want.shape, want.dtype)
    assert all(torch.equal(x, vars(before)[key]) for key, x in vars(t).items())


WRONG = {  # what the error names, and calls whose result would be wrong without a word, or an error in torch's words
    "rewards": ["group_stats(X, 2)"], "reward_weights": ["combine_rewards(X, [1, 2])"],
    "num_generations": ["group_stats(R, 0)", "group_stats(R, 1)", "group_stats(R, 3)", "group_stats(R, 8)",
                        "group_stats(R, 2, correction=2)", "group_advantages(R, 3)"],
    "scale_rewards": ["group_advantages(R, 2, scale_rewards='std')"],
    "step_ends": [f"process_advantages(X, {ends}, M, 2)" for ends in ("I - 1", "I + 3", "I[:, :1]")],
    "index": ["selective_log_softmax(L, I[:, :1])", "selective_log_softmax(L, I[0])"],
    "prompt_mask": ["per_token_logps(make_model('Llama'), I, M, I, M)"],
    "old_logps": [*[f"importance_ratio(X, {x}, M)" for x in "RCS"],
                  *[f"grpo_loss(X, R, M, old_logps={x})" for x in "RCS"]],
    "importance_sampling_level": ["importance_ratio(X, X, M, importance_sampling_level='word')"],
    "advantages": [*[f"broadcast_advantages({x}, M)" for x in "XCS"], "clipped_surrogate_loss(X, R[:3])",
                   "sapo_loss(X, R[:3])", "cispo_loss(X, X, R[:3])", "grpo_loss(X, X[0], M)", "grpo_loss(X, C, M)",
                   "grpo_loss(X, R[:1], M)"],
    "ref_logps": [*[f"kl_estimate(X, {x})" for x in "RCS"], *[f"grpo_loss(X, R, M, ref_logps={x})" for x in "RCS"],
                  "grpo_loss(X, R, M, beta=0.1)"],
    "estimator": ["kl_estimate(X, X, estimator='k4')"], "loss_type": ["aggregate(X, M, loss_type='mean')"],
    "per_token_loss": [f"aggregate({x}, M, loss_type='dapo')" for x in "RS"],
    "max_completion_length": ["aggregate(X, M, loss_type='dr_grpo')"],
    "completion_mask": ["grpo_loss(X, R, M[0])", "grpo_loss(X, R, M[:, :1])", "importance_ratio(X, X, M[:, :1])"],
    "policy_loss": ["grpo_loss(X, R, M, policy_loss='ppo')"]}


@pytest.mark.errors
@pytest.mark.parametrize("argument, call", [(argument, call) for argument in WRONG for call in WRONG[argument]])
def test_a_wrong_shape_or_word_is_an_error_that_names_the_argument(argument, call):
    """A (B,) that would broadcast against (B, T), a B that is no multiple of G, an unknown word: never silent"""
    with pytest.raises((AssertionError, ValueError), match=rf"^([\w ,]+, )?{argument}(, [\w ,]+)?: (got|allowed)"):
        eval(f"grpo.{call}", globals() | vars(tensors()))


# The file as a text: to be pasted, and to be stepped through ----------------------------------------------------------

@beyond("file")
@pytest.mark.parametrize("name, most", [("group_advantages", 2), ("clipped_surrogate_loss", 2), ("grpo_loss", 8)])
def test_a_function_can_be_pasted_with_those_that_it_calls(name, most, monkeypatch):
    """`import torch` and at most this many functions are a whole file"""
    needed, pasted = {name} | grpo.called_by(getattr(grpo.module, name)), types.ModuleType("pasted")
    sources = [inspect.getsource(getattr(grpo.module, x)) for x in needed]
    exec("\n\n\n".join(["import torch", *sources]), vars(pasted))
    assert len(needed) <= most, sorted(needed)
    calls = [call for key, (call, _) in CALLS.items() if key.split()[0] == name]
    want = [call(tensors()) for call in calls]
    monkeypatch.setattr(grpo, "module", pasted)
    for call, value in zip(calls, want):
        expect(call(tensors()), value, 0)


@beyond("file")
def test_a_debugger_comes_from_the_loss_to_the_ratio_in_a_few_steps():
    """At most 30 presses of `s` from the call of grpo_loss to the first line of importance_ratio"""
    t, stops, loss = tensors(), [], grpo.module.grpo_loss

    def trace(frame, event, _):
        stops.append(f"{frame.f_code.co_name}: {event}")                # pdb, too, stops at calls, lines and returns
        return trace

    sys.settrace(trace)
    loss(t.X, t.R, t.M, old_logps=t.X, ref_logps=t.X, beta=0.1)
    sys.settrace(None)
    assert stops.index("importance_ratio: line") <= 30, stops


@beyond("file")
def test_a_breakpoint_at_a_name_stops_in_the_function_and_no_local_is_a_command():
    """No decorator is in between; no local is called r, n, s, c, l, a, p, q, w, u, d, b or j, as pdb's commands are"""
    for function in ast.walk(ast.parse(inspect.getsource(grpo.module))):
        if isinstance(function, ast.FunctionDef):
            names = {node.arg if isinstance(node, ast.arg) else getattr(node, "id", "") for node in ast.walk(function)}
            assert not (function.decorator_list or names & set("rnsclapqwudbj")), function.name


# Plumbing: the file under test, and what a failure says ---------------------------------------------------------------

torch.set_num_threads(1)
HERE, STUDENTS = Path(__file__).resolve().parent, os.environ.get("GRPO_MODULE")


class FileUnderTest:
    """The functions of a file; one that a student has not written, or not with this argument, skips the test."""

    def __init__(self, path):
        path, self.failed = Path(path).with_suffix(".py").resolve(), set()
        self.module = sys.modules.get(path.stem)
        if getattr(self.module, "__file__", None) != str(path):
            spec = importlib.util.spec_from_file_location(path.stem, path)
            self.module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.module)

    def __getattr__(self, name):
        if not STUDENTS or name.startswith(("_", "pytest")):                    # pytest asks every object for these
            return getattr(self.module, name)
        if not hasattr(self.module, name):
            pytest.skip(f"{self.module.__name__} has no {name}")
        value = getattr(self.module, name)
        return functools.partial(self.ask, name, value) if callable(value) else value

    def ask(self, name, function, *args, **options):
        takes = inspect.signature(function).parameters.values()
        lacks = set() if any(p.kind == p.VAR_KEYWORD for p in takes) else set(options) - {p.name for p in takes}
        if lacks:
            pytest.skip(f"{name} has no argument {', '.join(sorted(lacks))}")
        if broken := self.failed & self.called_by(function):
            pytest.skip(f"{name} calls {', '.join(sorted(broken))}, where a law fails: mend that first")
        try:
            return function(*args, **options)
        except NotImplementedError as error:
            if error.args:                                                      # torch's own, for a wrong dtype
                raise
            pytest.skip(f"{traceback.extract_tb(error.__traceback__)[-1].name} is not written yet")
        except Exception as error:
            error.add_note("\n    ".join([*the_law()[1:], f"got       {type(error).__name__} from {name}"]))
            raise

    def called_by(self, function, known=frozenset()):
        names = function.__code__.co_names if inspect.isfunction(function) else ()
        new = {name for name in names if inspect.isfunction(getattr(self.module, name, None))} - known
        return known.union(new, *[self.called_by(getattr(self.module, name), known | new) for name in new])


grpo = FileUnderTest(STUDENTS or HERE / "grpo.py")
TOLERANCE = getattr(grpo.module, "TOLERANCE", 1e-6) if STUDENTS else 1e-9
MODEL_TOLERANCE = max(TOLERANCE, 1e-5) if STUDENTS else 1e-9    # without position ids, rotary angles are rounded


@pytest.fixture(autouse=True)
def formula_first(request):
    """Of another file than grpo.py, what goes beyond the formula is asked by -m alone."""
    for name in ("beyond", "errors"):
        mark = request.node.get_closest_marker(name) if STUDENTS else None
        if mark and (name not in request.config.option.markexpr or mark.kwargs.get("step") == "file"):
            pytest.skip(f"not the formula: -m {name} asks for it, or it is about the text of grpo.py")


def the_law():
    """The docstring of the test that runs, and its arguments."""
    frame = sys._getframe(1)
    while not frame.f_code.co_name.startswith("test_"):
        frame = frame.f_back
    values = [f"input     {name} = {frame.f_locals[name]}" for name in inspect.getargs(frame.f_code).args]
    return [frame.f_code.co_name, str(frame.f_code.co_consts[0]), *values]      # the first constant is the docstring


def expect(got, want, tolerance=None):
    """Compare two tensors. A failure shows the law and the arguments of the test, what was expected and what came."""
    __tracebackhide__ = True
    want, tolerance = f64(want).detach(), TOLERANCE if tolerance is None else tolerance
    if isinstance(got, torch.Tensor) and got.shape == want.shape:
        if torch.allclose(got.detach().double(), want, tolerance, tolerance, equal_nan=True):
            return
    got = got.tolist() if isinstance(got, torch.Tensor) else got
    shown = lambda x: re.sub(r"\d+\.\d+(e-\d+)?", lambda digits: f"{float(digits[0]):.8g}", str(x))
    test, law, *inputs = the_law()
    if STUDENTS:
        grpo.failed |= {name for name in vars(grpo.module) if test.startswith(f"test_{name}_")}
    raise AssertionError("\n    ".join([law, *inputs, f"expected  {shown(want.tolist())}", f"got       {shown(got)}"]))
