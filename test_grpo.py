"""The specification of grpo.py's maths, §1-§8.

A test's name is a sentence about a function, its docstring the law. Most functions have worked numbers (a
page of worked_examples/ does them by hand), an oracle (the definition once more in pure Python, on lists that
know no padding), laws (true for any numbers: Hypothesis looks for the smallest ones that break a law), and
@beyond("..."): what the formula leaves open. Then come padding, shapes and errors.

    pytest test_grpo.py                                            -v prints the specification
    GRPO_EXAMPLES=200 pytest test_grpo.py --hypothesis-seed=1      200 draws of a law, for 20 or 100; a seed
"""

import copy
import functools
import itertools
import math
import os
import types
import warnings

import pytest
import torch
from hypothesis import Phase, core, given, settings
from hypothesis import strategies as st

import grpo

nan, inf = math.nan, math.inf
TOLERANCE = MODEL_TOLERANCE = 1e-9                                      # the second where a model computes
DRAWS = os.environ.get("GRPO_EXAMPLES")                                 # of each law; without a seed the same
settings.register_profile("grpo", deadline=None, derandomize=core.global_force_seed is None, database=None,
                          report_multiple_bugs=False, print_blob=False, max_examples=int(DRAWS or 20),
                          phases=[Phase.explicit, Phase.generate, Phase.shrink])
settings.load_profile("grpo")
more_draws = settings(max_examples=int(DRAWS or 100))                   # of a law that few numbers would break
torch.set_num_threads(1)
warnings.simplefilter("ignore", pytest.PytestUnknownMarkWarning)        # beyond and errors are this file's


def beyond(step):
    """A mark of what the formula leaves open."""
    return pytest.mark.beyond(step=step)


def with_options(*rows):
    """A test for each of these keyword arguments."""
    return pytest.mark.parametrize("options", rows, ids=str)


def f64(numbers):
    return torch.as_tensor(numbers, dtype=torch.float64)


# What a failure says ----------------------------------------------------------------------------------------

@pytest.fixture(autouse=True)
def remember_what_is_asked(request):
    Difference.law = request.function.__doc__
    if request.config.option.tbstyle == "auto":
        request.config.option.tbstyle = "short"                         # where a function raises an error


class Difference(pytest.fail.Exception):
    """A failure without a traceback: the law, the smallest input (Hypothesis' notes), expected, got."""

    def __str__(self):
        return "\n".join([self.law, *getattr(self, "__notes__", []), self.msg])


def expect(got, want, tolerance=1e-9):
    """Compare two tensors, at tolerance 0 to the bit; if one is a multiple of the other, say so."""
    want, hint = f64(want).detach(), ""
    if isinstance(got, torch.Tensor):
        got = got.detach().double()
        tolerance = max(tolerance, TOLERANCE) if tolerance else 0
        is_close = functools.partial(torch.allclose, got, rtol=tolerance, atol=tolerance, equal_nan=True)
        if got.shape == want.shape:
            if is_close(want):
                return
            factor = (got * want).sum() / want.square().sum()
            several = want.count_nonzero() > 1 and factor.isfinite() and is_close(factor * want)
            if (several or is_close(-want)) and f"{factor:.4g}" != "1":     # one number is a multiple of any
                hint = f"\ngot = {factor:.4g} × expected"
        got = got.tolist()
    raise Difference(f"expected  {want.tolist()}\ngot       {got}{hint}", pytrace=False)


# What Hypothesis draws --------------------------------------------------------------------------------------
# Most numbers lie on a grid: equal ones are common, sums exact, none is on an edge of the clip range.
# any_... is drawn, every_... a table with a test for each row; ..._of calls a function of grpo.py.

def grid(low, high, step):
    return st.integers(round(low / step), round(high / step)).map(lambda k: k * step)


any_reward = grid(-5, 5, 0.25)
any_advantage = grid(-2, 2, 0.25)
any_logp = grid(-3, 0, 0.125)
any_ratio = grid(0.125, 3, 0.125)
any_logit = grid(-4, 4, 0.5)
any_number = grid(-3, 3, 0.125)
any_float32 = st.floats(-1e8, 1e8, width=32)
any_group = st.lists(any_reward, min_size=2, max_size=5)                # the rewards of one prompt's answers
any_unequal_group = any_group.filter(lambda rewards: len(set(rewards)) > 1)
any_groups = st.integers(2, 4).flatmap(                                 # 1 to 3 groups of the same size
    lambda G: st.lists(st.lists(any_reward, min_size=G, max_size=G), min_size=1, max_size=3))
any_groups_with_gaps = st.lists(                                        # NaN: no function has scored it
    st.tuples(*[any_reward | st.just(nan)] * 4), min_size=1, max_size=3)
any_logits = st.lists(any_logit, min_size=2, max_size=4)                # of a small vocabulary
any_distribution = st.lists(st.integers(1, 6), min_size=3, max_size=3).map(             # of three words
    lambda weights: [weight / sum(weights) for weight in weights])


def answers(*numbers):
    """1 to 3 answers of 1 to 4 tokens; a token is a tuple: one number from each of these strategies."""
    return st.lists(st.lists(st.tuples(*numbers), min_size=1, max_size=4), min_size=1, max_size=3)


def columns(rows, padding=3.0, width=None):
    """These answers as tensors (B, T), one for each place in a token's tuple; then their mask."""
    T = max([1, *map(len, rows)])
    width = width or len(next(token for row in rows for token in row))
    junk = tuple(padding + place for place in range(width))             # another in each column
    numbers = [row + [junk] * (T - len(row)) for row in rows]
    mask = [[1.0] * len(row) + [0.0] * (T - len(row)) for row in rows]
    return *f64(numbers).view(len(rows), T, width).unbind(2), f64(mask).view(len(rows), T)


def slope(function, x):
    """∂ Σ f(x) / ∂x; 0 where f takes x as a constant."""
    __tracebackhide__ = True
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sum() + 0 * x.sum(), x)[0]


# §1 Rewards -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rewards, weights, want", [                                            # page 7
    (f64([[1.0, 0.8], [1.0, 0.7], [0.0, -0.2]]), [f64([0.7, 0.3])], [0.94, 0.91, -0.06]),
    (f64([[1.0, 0.8], [1.0, 0.7], [0.0, -0.2]]), [], [1.8, 1.7, -0.2]),
    pytest.param(f64([[nan, 0.8], [1.0, 0.7]]), [[0.7, 0.3]], [0.24, 0.91], marks=beyond("missing")),
    pytest.param(f64([[nan, nan], [0.5, nan]]), [[0.7, 0.0]], [nan, 0.35], marks=beyond("missing")),
    pytest.param(torch.tensor([[1, 1]]), [[0.5, 0.25]], [0.75], marks=beyond("dtypes"))], ids=str)
def test_combine_rewards_matches_the_worked_numbers(rewards, weights, want):
    """r_i = Σ_f w_f·r_{i,f}, w_f = 1 unless given, without the functions that abstained; NaN where all did"""
    expect(grpo.combine_rewards(rewards, *weights), want)


# §2 Group statistics and advantages -------------------------------------------------------------------------

def oracle_stats(rewards, correction=1):
    """Of the rewards that there are; one alone, or none, has the std 0."""
    present = [r for r in rewards if not math.isnan(r)]
    if not present:
        return nan, 0.0
    mean = sum(present) / len(present)
    return mean, math.sqrt(sum((r - mean) ** 2 for r in present) / max(len(present) - correction, 1))


def oracle_advantages(groups, scale_rewards="group", correction=1, eps=1e-4):
    std_of_all = oracle_stats([r for rewards in groups for r in rewards], correction)[1]
    want = []
    for rewards in groups:
        mean, std = oracle_stats(rewards, correction)
        scale = {"group": std + eps, "batch": std_of_all + eps, "none": 1.0}[scale_rewards]
        want.append([(r - mean) / scale for r in rewards])
    return want


def advantages_of(groups, **options):
    """The advantages of groups of rewards, (P, G)."""
    rewards = f64(groups)
    return grpo.group_advantages(rewards.flatten(), rewards.size(1), **options).view(rewards.shape)


every_scale = with_options({}, dict(scale_rewards="batch"), dict(scale_rewards="none"))


@with_options({}, dict(correction=0))
@given(any_groups)
def test_group_stats_match_the_oracle(options, groups):
    """mean = 1/G·Σ r, std = √(Σ (r - mean)² / (G - correction)), of each group its own"""
    mean, std = grpo.group_stats(f64(groups).flatten(), len(groups[0]), **options)
    expect(torch.stack([mean, std], 1), [oracle_stats(group, **options) for group in groups])


@beyond("missing")
@with_options({}, dict(correction=0))
@given(any_groups_with_gaps)
def test_group_stats_leave_out_what_is_nan(options, groups):
    """Mean and std of the rewards that there are, of one alone it and 0, of none NaN and 0"""
    mean, std = grpo.group_stats(f64(groups).flatten(), 4, **options)
    expect(torch.stack([mean, std], 1), [oracle_stats(group, **options) for group in groups])


@beyond("equal")
@with_options({}, dict(correction=0))
@more_draws
@given(st.integers(2, 16), any_float32, st.integers(0, 3))
def test_group_stats_of_a_silent_group_are_its_reward_and_exactly_0_in_float32(options, G, r, gaps):
    """r_1 = ... = r_G => mean = r_1, std = 0 to the last bit, NaN among them or not; torch's mean of eight
    times 0.1 is not 0.1"""
    silent, other = [r] * G + [nan] * gaps, [i / 8 for i in range(G + gaps)]
    mean, std = grpo.group_stats(torch.tensor([silent, other]).flatten(), G + gaps, **options)
    expect(torch.stack([mean[0], std[0]]), [r, 0.0], 0)
    expect(torch.stack([mean[1], std[1]]), oracle_stats(other, **options), 1e-6)


@pytest.mark.parametrize("groups, options, want", [
    ([[8.5, 6.2, 4.1]], dict(), [[1.0148, -0.0303, -0.9845]]),                                  # page 1
    ([[8.5, 6.2, 4.1]], dict(correction=0, eps=0.0), [[1.2429, -0.0371, -1.2058]]),
    ([[1.0, 0.0, 0.5]], dict(), [[0.9998, -0.9998, 0.0]]),
    ([[1.0, 0.0, 0.5]], dict(correction=0, eps=0.0), [[1.2247, -1.2247, 0.0]]),
    ([[1.0, 0.0, 0.5]], dict(scale_rewards="none"), [[0.5, -0.5, 0.0]]),
    ([[0.94, 0.91, -0.06]], dict(correction=0, eps=0.0), [[0.7392, 0.6746, -1.4137]]),          # page 7
    ([[1.0, 0.0, 0.0, 0.0]], dict(eps=0.0), [[1.5, -0.5, -0.5, -0.5]]),                         # page 10
    ([[1e6, 0.0, 0.0, 0.0]], dict(eps=0.0), [[1.5, -0.5, -0.5, -0.5]]),                     # no more for it
    ([[3.0, 1.0], [2.0, 2.0], [4.0, 0.0]], dict(scale_rewards="batch"),         # std of all six √2, mean 2
     [[0.7071, -0.7071], [0.0, 0.0], [1.4141, -1.4141]])], ids=str)
def test_group_advantages_match_the_worked_numbers(groups, options, want):
    """A = (r - mean) / (std + eps); n - 1 and eps = 1e-4 unless a row says otherwise (§4.1.2: eps = 0)"""
    expect(advantages_of(groups, **options), want, 5e-5)


@with_options({}, dict(correction=0), dict(eps=0.5), dict(scale_rewards="none"), dict(scale_rewards="batch"),
              dict(scale_rewards="batch", correction=0, eps=0.5))
@given(any_groups)
def test_group_advantages_match_the_oracle(options, groups):
    """A = (r - mean) / (std + eps), std of the group, or of the whole batch; "none": A = r - mean"""
    expect(advantages_of(groups, **options), oracle_advantages(groups, **options))


@every_scale
@given(any_groups)
def test_group_advantages_sum_to_zero_in_each_group(options, groups):
    """Σ_i A_i = 0: what one answer gains the others of its group lose"""
    expect(advantages_of(groups, **options).sum(1), [0.0] * len(groups))


@every_scale
@given(any_groups, any_reward)
def test_group_advantages_do_not_see_a_shift_of_the_rewards(options, groups, c):
    """A(r + c) = A(r): a group says who was better, not how good anybody was"""
    expect(advantages_of(f64(groups) + c, **options), advantages_of(groups, **options))


@with_options({}, dict(scale_rewards="none"))
@given(any_groups)
def test_group_advantages_of_a_group_do_not_see_the_other_groups(options, groups):
    """A(group 1, group 2, ...) = A(group 1), A(group 2), ...; "batch": the std sees the others"""
    alone = [advantages_of([rewards], **options) for rewards in groups]
    expect(advantages_of(groups, **options), torch.cat(alone))


@given(any_unequal_group)
def test_group_advantages_have_squares_that_sum_to_n_minus_1(rewards):
    """Σ A² = n - 1 at eps = 0, unless all rewards are equal (pages 6, 10): no group is louder than another"""
    expect(advantages_of([rewards], eps=0.0).square().sum(), len(rewards) - 1)


@beyond("equal")
@with_options(dict(eps=0.0), dict(scale_rewards="batch", eps=0.0), dict(scale_rewards="none"), {})
@more_draws
@given(st.integers(2, 16), any_float32)
def test_group_advantages_of_equal_rewards_are_exactly_zero_in_float32(options, G, r):
    """r_1 = ... = r_G => A = 0 to the last bit, and no 0/0 at eps = 0"""
    expect(grpo.group_advantages(torch.full((G,), r), G, **options), [0.0] * G, 0)


@beyond("missing")
@with_options({}, dict(correction=0, eps=0.5), dict(scale_rewards="batch"), dict(scale_rewards="none"))
@given(any_group, st.integers(0, 4), st.integers(1, 3))
def test_group_advantages_do_not_see_an_answer_without_a_reward(options, rewards, place, gaps):
    """A(r with NaN in it) = A(r) with 0 in it: an answer that nobody could score says nothing of the others"""
    A, none = advantages_of([rewards], **options)[0], [nan] * gaps
    got = advantages_of([rewards[:place] + none + rewards[place:]], **options)[0]
    expect(got, f64([*A[:place], *[0.0] * gaps, *A[place:]]))


@given(st.lists(st.tuples(st.integers(1, 4), any_advantage), min_size=1, max_size=4))
def test_broadcast_advantages_give_every_token_that_of_its_answer(rows):
    """A_{i,t} = A_i on real tokens, 0 at the padding"""
    mask = [[1.0] * n + [0.0] * (5 - n) for n, _ in rows]
    want = [[A] * n + [0.0] * (5 - n) for n, A in rows]
    expect(grpo.broadcast_advantages(f64([A for _, A in rows]), f64(mask)), want)


# §3 Log-probabilities ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("ids, eos, want", [                                                # page 8
    ([5, 6, 1, 1, 1], 1, [1, 1, 1, 0, 0]),                                          # pad id = EOS id
    ([5, 6, 7, 8, 9], 1, [1, 1, 1, 1, 1]), ([5, 6, 7, 8, 9], [1, 8], [1, 1, 1, 1, 0]),
    pytest.param([5, 8, 7, 1, 9], torch.tensor([1, 8]), [1, 1, 0, 0, 0], marks=beyond("text"))], ids=str)
def test_make_completion_mask_matches_the_worked_numbers(ids, eos, want):
    """m = 1 up to and including the first EOS, 0 behind it"""
    expect(grpo.make_completion_mask(torch.tensor([ids]), eos), [want])


@given(st.lists(st.integers(2, 5), max_size=3), st.lists(st.integers(0, 5), max_size=3))
def test_make_completion_mask_keeps_the_first_eos_and_nothing_behind_it(answer, behind):
    """|answer| + 1 real tokens in answer, EOS, anything: a choice to stop that is masked has no gradient"""
    mask = grpo.make_completion_mask(torch.tensor([answer + [1] + behind]), 1)
    expect(mask, [[1.0] * (len(answer) + 1) + [0.0] * len(behind)])


def oracle_log_softmax(logits):
    return [z - math.log(sum(math.exp(y) for y in logits)) for z in logits]


def log_softmax_of(logits):
    """The log-probs of all words, each asked for in turn, (V,)."""
    V = len(logits)
    return grpo.selective_log_softmax(f64(logits).expand(1, V, V), torch.arange(V)[None])[0]


def entropy_of(logits):
    """H of one position, from its logits (V,)."""
    return grpo.entropy_from_logits(f64(logits)[None, None])[0, 0]


def test_selective_log_softmax_matches_the_worked_numbers():
    """log p = z - log Σ_v exp(z_v): logits 2, 1, 0; twice these, as at temperature 0.5 (page 8)"""
    expect(log_softmax_of([2.0, 1.0, 0.0]), [-0.4076, -1.4076, -2.4076], 5e-5)
    expect(log_softmax_of([4.0, 2.0, 0.0]), [-0.1429, -2.1429, -4.1429], 5e-5)


@given(st.lists(st.tuples(any_logit, any_logit, any_logit, st.integers(0, 2)), min_size=1, max_size=3))
def test_selective_log_softmax_matches_the_oracle(tokens):
    """log p(o) = z_o - log Σ_v exp(z_v) of each token o, and the same of z + 1000"""
    logits, index = f64([z for *z, _ in tokens]), torch.tensor([o for *_, o in tokens])     # (T, V), (T,)
    want = [oracle_log_softmax(z)[o] for *z, o in tokens]
    expect(grpo.selective_log_softmax(logits[None], index[None])[0], want)
    expect(grpo.selective_log_softmax(logits.unsqueeze(1) + 1000, index.unsqueeze(1))[:, 0], want)


def test_entropy_from_logits_matches_the_worked_numbers():
    """H = -Σ_v p_v·log p_v in nats; logits 2, 1, 0 (page 8)"""
    expect(entropy_of([2.0, 1.0, 0.0]), 0.8324, 5e-5)


@given(any_logits)
def test_entropy_from_logits_matches_the_oracle(logits):
    """H = -Σ_v p_v·log p_v, and the same of z + 1000"""
    want = -sum(math.exp(x) * x for x in oracle_log_softmax(logits))
    expect(entropy_of(logits), want)
    expect(entropy_of([z + 1000 for z in logits]), want)


@given(any_logits)
def test_entropy_from_logits_falls_with_the_logits_of_likely_words(logits):
    """∂H/∂z_v = -p_v·(log p_v + H), as a bonus for entropy needs it: p is not held fixed"""
    logps = oracle_log_softmax(logits)
    H = -sum(math.exp(x) * x for x in logps)
    expect(slope(entropy_of, f64(logits)), [-math.exp(x) * (x + H) for x in logps])


@beyond("empty")
@given(any_logits)
def test_entropy_from_logits_of_a_word_that_is_ruled_out_counts_0(logits):
    """A logit of -inf: 0·log 0 = 0 in value and slope, log p = -inf, and the other words are as without it"""
    expect(entropy_of([*logits, -inf]), entropy_of(logits))
    expect(slope(entropy_of, f64([*logits, -inf])), f64([*slope(entropy_of, f64(logits)), 0.0]))
    expect(log_softmax_of([*logits, -inf]), [*oracle_log_softmax(logits), -inf])


@functools.cache
def make_model(kind):
    """A model of random weights in float64, large enough that its distributions are not uniform."""
    import transformers
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=12, bos_token_id=None, eos_token_id=1, pad_token_id=0, num_hidden_layers=2, hidden_size=16,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=32, max_position_embeddings=256)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


any_prompt = st.lists(st.integers(2, 11), min_size=1, max_size=5)
any_answer = st.lists(st.integers(1, 11), min_size=1, max_size=3)
any_prompts_and_answers = st.lists(                                     # a long answer is scored in pieces
    st.tuples(any_prompt, any_answer | any_answer.map(lambda ids: ids * 70)), min_size=1, max_size=3)


def padded(rows, junk=0):
    """Prompts padded on the left, answers on the right: ids and mask (B, L) of those, (B, T) of these."""
    L = max(len(prompt) for prompt, _ in rows)
    T = max(len(answer) for _, answer in rows)
    prompt_ids = [[junk] * (L - len(prompt)) + prompt for prompt, _ in rows]
    prompt_mask = [[0] * (L - len(prompt)) + [1] * len(prompt) for prompt, _ in rows]
    answer_ids = [answer + [junk] * (T - len(answer)) for _, answer in rows]
    answer_mask = [[1] * len(answer) + [0] * (T - len(answer)) for _, answer in rows]
    return tuple(map(torch.tensor, (prompt_ids, prompt_mask, answer_ids, answer_mask)))


def oracle_logps(kind, rows, temperature=1.0):
    """Log-prob and entropy of each real token; each answer has a pass of its own, without padding."""
    logps, entropies = [], []
    for prompt, answer in rows:
        logits = make_model(kind)(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        log_p = (logits / temperature).log_softmax(-1)                                          # (T, V)
        logps.append(log_p[range(len(answer)), answer])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


@pytest.mark.parametrize("kind", ["Llama", pytest.param("GPT2", marks=beyond("positions"))])
@with_options({}, dict(temperature=0.7))
@given(any_prompts_and_answers)
def test_per_token_logps_are_those_of_each_row_alone(kind, options, rows):
    """log π(o_t) = log softmax(logits / T)[o_t] of a pass over this row: no other row, no padding is seen"""
    *_, mask = padded(rows)
    logps, _ = grpo.per_token_logps(make_model(kind), *padded(rows), **options)
    expect(logps[mask == 1], oracle_logps(kind, rows, **options)[0], MODEL_TOLERANCE)


@given(any_prompts_and_answers)
def test_per_token_logps_have_for_each_row_the_gradient_of_this_row_alone(rows):
    """∂ log π(o_i)/∂θ: rows share the weights θ and no hidden state; others change it by rounding alone"""
    weights = list(make_model("Llama").parameters())
    logps, _ = grpo.per_token_logps(make_model("Llama"), *padded(rows))
    for logps_of_row, (prompt, answer) in zip(logps, rows):
        alone, _ = oracle_logps("Llama", [(prompt, answer)])
        got = torch.autograd.grad(logps_of_row[:len(answer)].sum(), weights, retain_graph=True)
        for slope_of_row, slope_alone in zip(got, torch.autograd.grad(alone.sum(), weights)):
            expect(slope_of_row, slope_alone, 10 * MODEL_TOLERANCE)


@given(any_prompts_and_answers)
def test_per_token_logps_come_with_the_entropies_if_asked(rows):
    """H of softmax(logits / T), without gradient"""
    options, (*_, mask) = dict(temperature=0.7), padded(rows)
    _, entropies = grpo.per_token_logps(make_model("Llama"), *padded(rows), compute_entropy=True, **options)
    expect(entropies[mask == 1], oracle_logps("Llama", rows, **options)[1], MODEL_TOLERANCE)
    expect(f64(entropies.requires_grad), 0.0)


@beyond("padding")
@pytest.mark.parametrize("junk", [-9, 10**6])
@given(rows=any_prompts_and_answers)
def test_per_token_logps_are_0_at_padding_that_is_no_word(junk, rows):
    """Ids of -9 or a million under the mask change no log-prob; logps and entropies are 0 there"""
    *_, mask = padded(rows)
    logps, entropies = grpo.per_token_logps(make_model("Llama"), *padded(rows, junk), compute_entropy=True)
    want, no_entropies = grpo.per_token_logps(make_model("Llama"), *padded(rows))
    expect(logps, want * mask)
    assert not entropies[mask == 0].any() and no_entropies is None


@beyond("dtypes")
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32], ids=str)
def test_per_token_logps_of_bfloat16_weights_are_float32(mask_dtype):
    """The model's logits are bfloat16, their log-softmax is float32; ids int32, a mask of any dtype"""
    model = copy.deepcopy(make_model("Llama")).bfloat16()
    prompt, answer = torch.tensor([[4, 5]]), torch.tensor([[7, 8, 9]])
    logps, entropies = grpo.per_token_logps(
        model, prompt.int(), torch.ones(1, 2, dtype=mask_dtype), answer.int(),
        torch.ones(1, 3, dtype=mask_dtype), compute_entropy=True)
    assert logps.dtype == entropies.dtype == torch.float32
    logits = model(torch.cat([prompt, answer], 1)).logits[0, 1:-1].float()                      # (3, 12)
    expect(logps[0], logits.log_softmax(-1)[range(3), answer[0]], 1e-6)


@beyond("empty")
def test_per_token_logps_are_one_call_of_the_model_and_empty_without_a_token():
    """One pass without a cache, which computes the last T + 1 logits alone; T = 0: (B, 0)"""
    model, calls = copy.deepcopy(make_model("Llama")), []

    def note(module, args, options, output):
        calls.append((options["use_cache"], output.logits.shape))

    model.register_forward_hook(note, with_kwargs=True)
    some, _ = grpo.per_token_logps(model, *padded([([4, 5], [7, 8, 9]), ([6], [1])]))
    assert calls == [(False, (2, 4, 12))]
    forward = model.forward
    model.forward = lambda logits_to_keep, **options: forward(**options)        # it may compute them all
    expect(grpo.per_token_logps(model, *padded([([4, 5], [7, 8, 9]), ([6], [1])]))[0], some)
    ids, mask, no_ids, no_mask = padded([([4, 5], []), ([6], [])])
    logps, _ = grpo.per_token_logps(model, ids, mask, no_ids.long(), no_mask.long())
    assert logps.shape == (2, 0)


# §4 Importance ratio, clip, the policy terms ----------------------------------------------------------------

SEQUENCE = dict(importance_sampling_level="sequence")                   # GSPO


def oracle_ratios(tokens, importance_sampling_level="token"):
    """The ratio of each token of an answer; a token begins with log π, log π_old."""
    logs = [p - q for p, q, *_ in tokens]
    if importance_sampling_level == "sequence":
        logs = [sum(logs) / len(logs) for _ in logs]
    return [math.exp(x) for x in logs]


@pytest.mark.parametrize("log_ratios, options, want", [
    ([0.10, 0.05, -0.10, 0.08, 0.02], {}, [1.1052, 1.0513, 0.9048, 1.0833, 1.0202]),            # page 1
    ([0.2] * 10, {}, [1.2214] * 10), ([0.2] * 10, SEQUENCE, [1.2214]),              # page 3: not e² = 7.39
    ([18.0, -18.0], {}, [math.exp(18), math.exp(-18)]),                             # no bound up to e²⁰
    pytest.param([30.0, -30.0], {}, [math.exp(20), math.exp(-30)], marks=beyond("overflow")),
    pytest.param([25.0, 35.0], SEQUENCE, [math.exp(20)], marks=beyond("overflow"))], ids=str)
def test_importance_ratio_matches_the_worked_numbers(log_ratios, options, want):
    """ρ = exp(log π - log π_old); of a sequence exp(mean of log ρ over its tokens)"""
    old = torch.full((1, len(log_ratios)), -1.0, dtype=torch.float64)
    got = grpo.importance_ratio(old + f64(log_ratios), old, torch.ones_like(old), **options)
    expect(got / f64(want), [[1.0] * len(want)], 5e-5)


@with_options({}, SEQUENCE)
@given(answers(any_logp, any_logp))
def test_importance_ratio_matches_the_oracle_and_has_itself_as_its_slope(options, rows):
    """ρ = π/π_old (DeepSeekMath eq. 3), exp(mean log ρ) of a sequence (GSPO eq. 7); ∂Σρ/∂log π = ρ"""
    logps, old, mask = columns(rows)

    def at_tokens(logps):
        return grpo.importance_ratio(logps, old, mask, **options).expand_as(mask)[mask == 1]

    want = [ratio for row in rows for ratio in oracle_ratios(row, **options)]
    expect(at_tokens(logps), want)
    expect(slope(at_tokens, logps)[mask == 1], want)


@given(answers(any_logp, any_logp))
def test_importance_ratio_of_a_sequence_does_not_see_its_length(rows):
    """s(o o) = s(o): log ratios that come twice give the ratio that they give once, and are clipped alike"""
    once, twice = columns(rows), columns([row + row for row in rows])
    expect(grpo.importance_ratio(*twice, **SEQUENCE), grpo.importance_ratio(*once, **SEQUENCE))


@given(any_distribution, any_distribution, st.tuples(any_number, any_number, any_number))
def test_importance_ratio_turns_means_under_the_old_policy_into_means_under_the_new(new, old, f):
    """Σ_v π_old(v)·ρ(v)·f(v) = Σ_v π(v)·f(v), whatever f is: importance sampling"""
    new, old, f = f64([new]), f64([old]), f64([f])                      # each (1, V)
    rho = grpo.importance_ratio(new.log(), old.log(), torch.ones(1, 3))
    expect((old * rho * f).sum(), (new * f).sum())


@pytest.mark.parametrize("low, high, epsilons", [
    (0.8, 1.2, ()), (0.9, 1.55, (0.1, 0.55))], ids=str)                 # the default; DAPO raises ε_high
@given(any_ratio)
def test_clip_ratio_matches_the_oracle_in_value_and_slope_and_twice_is_once(low, high, epsilons, rho):
    """clip(ρ) = min(max(ρ, 1 - ε_low), 1 + ε_high) = clip(clip(ρ)); ∂clip/∂ρ = 1 in the range, 0 outside"""
    clipped = grpo.clip_ratio(f64(rho), *epsilons)
    expect(clipped, min(max(rho, low), high))
    expect(slope(lambda x: grpo.clip_ratio(x, *epsilons), f64(rho)), 1.0 if low < rho < high else 0.0)
    expect(grpo.clip_ratio(clipped, *epsilons), clipped)


def oracle_surrogate(rho, A, epsilon_low=0.2, epsilon_high=0.2, delta=inf):
    clipped = min(max(rho, 1 - epsilon_low), 1 + epsilon_high)
    return -min(min(rho, delta) * A, clipped * A)


def surrogate_of(rho, A, **options):
    """[l, ∂l/∂ρ] of one token."""
    def loss(rho):
        return grpo.clipped_surrogate_loss(rho, f64([[A]]), **options)

    return torch.cat([loss(f64([[rho]])), slope(loss, f64([[rho]]))], 1)[0]


@pytest.mark.parametrize("rho, A, options, want", [                                             # page 3
    (0.5, 1.0, {}, [-0.5, -1.0]), (1.1, 1.0, {}, [-1.1, -1.0]), (1.5, 1.0, {}, [-1.2, 0.0]),    # 1.5: up
    (0.5, -1.0, {}, [0.8, 0.0]), (1.1, -1.0, {}, [1.1, 1.0]), (1.5, -1.0, {}, [1.5, 1.0]),      # 0.5: down
    (0.5, 1.0, dict(epsilon_low=0.9), [-0.5, -1.0]), (1.25, 1.0, dict(epsilon_high=0.28), [-1.25, -1.0]),
    (50.0, -1.0, {}, [50.0, 1.0]), (50.0, -1.0, dict(delta=4.0), [4.0, 0.0]),
    (50.0, 1.0, dict(delta=4.0), [-1.2, 0.0]), (3.0, -1.0, dict(delta=4.0), [3.0, 1.0]),
    (1.2214, 1.24, {}, [-1.488, 0.0]), (1.2214, -1.24, {}, [1.5145, 1.24]),
    (1.1052, 1.225, {}, [-1.3539, -1.225]), (1.0513, -1.225, {}, [1.2878, 1.225])], ids=str)    # page 1
def test_clipped_surrogate_loss_matches_the_worked_numbers(rho, A, options, want):
    """l = -min(min(ρ, δ)·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A), and its slope ∂l/∂ρ"""
    expect(surrogate_of(rho, A, **options), want, 5e-5)


@with_options({}, dict(epsilon_low=0.1, epsilon_high=0.55), dict(delta=1.45))
@given(st.lists(st.tuples(any_ratio, any_ratio, any_advantage), min_size=1, max_size=3))
def test_clipped_surrogate_loss_matches_the_oracle(options, rows):
    """l = -min(ρ·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A) (DeepSeekMath eq. 3); δ: min(ρ, δ)·A comes first"""
    first, second, A = f64(rows).T.unsqueeze(2)                         # an answer's tokens, its advantage
    want = [[oracle_surrogate(x, A, **options), oracle_surrogate(y, A, **options)] for x, y, A in rows]
    expect(grpo.clipped_surrogate_loss(torch.cat([first, second], 1), A, **options), want)


@given(any_ratio, any_advantage)
def test_clipped_surrogate_loss_has_no_slope_only_where_the_token_has_moved_enough(rho, A):
    """Without δ ∂l/∂ρ = 0 where A > 0 and ρ > 1 + ε, or A < 0 and ρ < 1 - ε; else -A: the way back is open"""
    enough = A > 0 and rho > 1.2 or A < 0 and rho < 0.8
    expect(surrogate_of(rho, A)[1], 0.0 if enough else -A)


@with_options({}, dict(epsilon_high=1.3))
@given(any_logp, any_ratio, any_advantage)
def test_cispo_loss_matches_the_oracle_and_takes_the_ratio_as_a_constant(options, p, rho, A):
    """l = -sg[min(ρ, ε_high)]·A·log π (MiniMax-M1 eq. 4, 5): ∂l/∂ρ = 0, ∂l/∂log π = -min(ρ, ε_high)·A"""
    weight = min(rho, options.get("epsilon_high", 5.0))
    p, rho = f64([[p]]), f64([[rho]])

    def loss(p, rho):
        return grpo.cispo_loss(p, rho, f64([[A]]), **options)

    expect(loss(p, rho), -weight * A * p)
    expect(slope(lambda x: loss(x, rho), p), [[-weight * A]])
    expect(slope(lambda x: loss(p, x), rho), [[0.0]])


def oracle_sapo(rho, A, temperature_pos=1.0, temperature_neg=1.05):
    tau = temperature_pos if A > 0 else temperature_neg
    return -4 / tau * A / (1 + math.exp(-tau * (rho - 1)))


@with_options({}, dict(temperature_pos=0.5, temperature_neg=2.0))
@given(st.lists(st.tuples(any_ratio, any_advantage), min_size=1, max_size=3))
def test_sapo_loss_matches_the_oracle(options, tokens):
    """l = -σ(τ(ρ - 1))·4/τ·A, τ by the sign of A (SAPO eq. 5-6); ∂l/∂ρ = -A at ρ = 1, for any τ"""
    rho, A = f64(tokens).T.unsqueeze(1)                                 # each (1, T)
    expect(grpo.sapo_loss(rho, A, **options), [[oracle_sapo(*token, **options) for token in tokens]])
    expect(slope(lambda rho: grpo.sapo_loss(rho, A, **options), torch.ones_like(rho)), -A)


# §5 KL ------------------------------------------------------------------------------------------------------

def oracle_kl(p, q, estimator="k3"):
    k1 = p - q
    return {"k1": k1, "k2": k1 * k1 / 2, "k3": math.exp(-k1) - 1 + k1}[estimator]


@pytest.mark.parametrize("p, q, options, want", [                                               # page 9
    ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5], dict(estimator="k1"), [0.6931, 0.0, -0.6931]),
    ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5], dict(estimator="k2"), [0.2402, 0.0, 0.2402]),
    ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5], {}, [0.1931, 0.0, 0.3069])], ids=str)                # k3
def test_kl_estimate_matches_the_worked_numbers(p, q, options, want):
    """k1 = log π - log π_ref, k2 = k1²/2, k3 = exp(-k1) + k1 - 1, of three tokens"""
    expect(grpo.kl_estimate(f64(p).log(), f64(q).log(), **options), want, 5e-5)


@with_options({}, dict(estimator="k1"), dict(estimator="k2"))
@given(st.lists(st.tuples(grid(-20, 0, 0.125), grid(-20, 0, 0.125)), min_size=1, max_size=3))
def test_kl_estimate_matches_the_oracle(options, tokens):
    """k1 = log π - log π_ref, k2 = k1²/2, k3 = exp(-k1) + k1 - 1 (DeepSeekMath eq. 4), however far π is"""
    logps, ref_logps = f64(tokens).T
    want = [oracle_kl(p, q, **options) for p, q in tokens]
    expect(grpo.kl_estimate(logps, ref_logps, **options), want)


@beyond("overflow")
@given(st.floats(21, 500, width=32))
def test_kl_estimate_k3_of_a_token_that_is_almost_lost_is_bounded(x):
    """-k1 = x above 20: e²⁰ - 1 - x, where exp(x) may leave float32, with the gradient of k1, 1"""
    ref_logps = torch.tensor([0.0])
    expect(grpo.kl_estimate(ref_logps - x, ref_logps), [math.exp(20) - 1 - x], 1e-6)
    expect(slope(lambda logps: grpo.kl_estimate(logps, ref_logps), ref_logps - x), [1.0])


@beyond("equal")
@more_draws
@given(st.integers(-1000, 1000), st.sampled_from([1e-8, 1e-6, 1e-4, 1e-2]), st.floats(-3, 0, width=32))
def test_kl_estimate_k3_is_never_negative_in_float32(n, scale, p):
    """expm1(-k1) + k1 >= 0 to the last bit: exp(-k1) + k1 - 1 is not, where π is close to π_ref"""
    k3 = grpo.kl_estimate(torch.tensor(p + n * scale / 100), torch.tensor(p))
    expect(k3, k3.clamp(min=0), 0)


@with_options({}, dict(estimator="k1"))
@given(any_distribution, any_distribution)
def test_kl_estimate_k1_and_k3_have_the_kl_as_their_mean(options, p, q):
    """Σ_v π(v)·k1(v) = Σ_v π(v)·k3(v) = KL(π‖π_ref): over samples both are right on average"""
    want = sum(x * math.log(x / y) for x, y in zip(p, q))
    expect((f64(p) * grpo.kl_estimate(f64(p).log(), f64(q).log(), **options)).sum(), want)


@pytest.mark.parametrize("options, by_ratio, teaches", [
    (dict(estimator="k1"), False, "nothing"), (dict(estimator="k2"), False, "∇KL(π‖π_ref)"),
    ({}, False, "∇KL(π_ref‖π)"), ({}, True, "∇KL(π‖π_ref)")], ids=str)  # ρ·k3: DeepSeek-V3.2
@given(any_distribution, any_distribution)
def test_kl_estimate_teaches_what_the_table_says(options, by_ratio, teaches, p, q):
    """Samples held fixed: E ∇k1 = 0, E ∇k2 = ∇KL(π‖π_ref), E ∇k3 = ∇KL(π_ref‖π); E ∇(ρ·k3) = ∇KL(π‖π_ref):
    the ratio tells autograd that the samples depend on θ"""
    def mean(logits):
        logps = logits.log_softmax(0)
        rho = (logps - logps.detach()).exp()                            # 1, with slope 1
        k = grpo.kl_estimate(logps, f64(q).log(), **options)
        return f64(p) * (rho * k if by_ratio else k)                    # the samples are the weights π(v)

    kl = sum(x * math.log(x / y) for x, y in zip(p, q))
    want = {"nothing": [0.0] * 3, "∇KL(π‖π_ref)": [x * (math.log(x / y) - kl) for x, y in zip(p, q)],
            "∇KL(π_ref‖π)": [x - y for x, y in zip(p, q)]}
    expect(slope(mean, f64(p).log()), want[teaches])                    # by the logits of π


# §6 The aggregations ----------------------------------------------------------------------------------------

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo"]
any_losses = answers(any_reward)
every_loss_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)


def of_type(loss_type, T_max=7):
    """With the limit of sampling for the one that needs it."""
    more = dict(max_completion_length=T_max) if loss_type == "dr_grpo" else {}
    return dict(loss_type=loss_type) | more


def counts_of(rows):
    """What each part of a batch of these rows is told of the whole."""
    return dict(num_rows_in_batch=len(rows), num_items_in_batch=sum(map(len, rows)))


def aggregate_of(rows, loss_type, T_max=7, **counts):
    loss, mask = columns(rows)
    return grpo.aggregate(loss, mask, **of_type(loss_type, T_max), **counts)


def oracle_weights(lengths, loss_type, T_max=7, num_rows_in_batch=None, num_items_in_batch=None):
    """What a token of each answer weighs: ∂loss/∂l."""
    B = num_rows_in_batch or len(lengths)
    own_tokens = max(sum(lengths), 1)
    if loss_type == "grpo":
        return [1 / (B * max(n, 1)) for n in lengths]
    if loss_type == "dr_grpo":
        return [1 / (B * T_max) for _ in lengths]
    if loss_type == "bnpo":
        return [1 / own_tokens] * len(lengths)
    return [1 / (num_items_in_batch or own_tokens)] * len(lengths)


@pytest.mark.parametrize("loss_type, want, of_short, of_long", [
    ("grpo", 14.0, 1 / 8, 1 / 32), ("bnpo", 17.3, 1 / 20, 1 / 20),
    ("dr_grpo", 8.65, 1 / 40, 1 / 40), ("dapo", 17.3, 1 / 20, 1 / 20)])
def test_aggregate_matches_the_worked_numbers(loss_type, want, of_short, of_long):
    """2, 8, 2, 8 tokens, token t of answer i has the loss 8i + t: value (page 5), weights (page 4)"""
    rows = [[(8.0 * i + t,) for t in range(n)] for i, n in enumerate((2, 8, 2, 8))]
    loss, mask = columns(rows)
    expect(grpo.aggregate(loss, mask, **of_type(loss_type, 10)), want)
    got = slope(lambda x: grpo.aggregate(x, mask, **of_type(loss_type, 10)), loss)
    expect(got, mask * f64([[of_short], [of_long], [of_short], [of_long]]))


@every_loss_type
@with_options({}, dict(num_rows_in_batch=20, num_items_in_batch=40))
@given(any_losses)
def test_aggregate_matches_the_oracle(options, loss_type, rows):
    """loss = Σ l·w: grpo 1/(B·n_i), dr_grpo 1/(B·T_max), dapo 1/N, bnpo 1/(own tokens); B, N given or own"""
    weights = oracle_weights(list(map(len, rows)), loss_type, **options)
    want = sum(w * loss for row, w in zip(rows, weights) for (loss,) in row)
    expect(aggregate_of(rows, loss_type, **options), want)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), any_reward)
def test_aggregate_of_a_constant_is_that_constant(loss_type, lengths, c):
    """l = c at every token, none of the answers empty => loss = c: these three are means, dr_grpo is not"""
    expect(aggregate_of([[(c,)] * n for n in lengths], loss_type), c)


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
@given(st.lists(any_losses, min_size=1, max_size=3), st.randoms())
def test_aggregate_of_microbatches_adds_up_to_the_whole(loss_type, parts, random):
    """Σ aggregate(part; rows and tokens of the whole) = aggregate(whole), for any split; not bnpo"""
    whole = random.sample(sum(parts, []), sum(map(len, parts)))
    of_parts = sum(aggregate_of(part, loss_type, **counts_of(whole)) for part in parts)
    expect(of_parts, aggregate_of(whole, loss_type))


@beyond("empty")
@pytest.mark.parametrize("loss_type, want", [                                                   # page 5
    ("grpo", 2 / 3), ("bnpo", 1), ("dr_grpo", 1 / 3), ("dapo", 1)])
def test_aggregate_counts_an_answer_without_a_token(loss_type, want):
    """Lengths 2, 0, 8: it adds 0 and is one of three rows; no token, or no answer: 0, not 0/0"""
    expect(aggregate_of([[(1.0,)] * 2, [], [(1.0,)] * 8], loss_type, T_max=10), want)
    for B in (3, 0):
        expect(grpo.aggregate(torch.ones(B, 8), torch.zeros(B, 8), **of_type(loss_type)), 0.0)


@beyond("shapes")
@every_loss_type
@given(any_losses)
def test_aggregate_of_one_loss_for_each_answer_is_that_of_its_tokens(loss_type, rows):
    """l of shape (B, 1), as GSPO has it, is the loss of each token of its answer"""
    loss, mask = columns(rows)
    of_answers = grpo.aggregate(loss[:, :1], mask, **of_type(loss_type))
    expect(of_answers, grpo.aggregate(loss[:, :1].expand_as(mask), mask, **of_type(loss_type)))


# §7 The loss, made of all of them ---------------------------------------------------------------------------

any_rated_answer = st.tuples(                                           # tokens (log π, old, ref, A of all)
    st.lists(st.tuples(any_logp, any_logp, any_logp), min_size=1, max_size=4), any_advantage
).map(lambda rated: [(*token, rated[1]) for token in rated[0]])
any_rated_answers = st.lists(any_rated_answer, min_size=1, max_size=3)
any_tokens_or_none = st.lists(st.tuples(any_logp, any_logp, any_logp, any_advantage), max_size=3)
CISPO = dict(policy_loss="cispo", epsilon_high=2.0)
SAPO = dict(policy_loss="sapo")
RANGE = dict(epsilon_low=0.1, epsilon_high=0.55)
KL = dict(beta=0.1)                                                     # loss_of passes log π_ref with it
BIAS_CORRECTED_KL = dict(beta=0.1, use_bias_correction_kl=True)


def with_each_loss_type(*rows, loss_types=LOSS_TYPES):
    """A test for each of these keyword arguments with each loss type: a trainer may have one alone."""
    return with_options(*[of_type(loss_type) | options for loss_type in loss_types for options in rows])


every_option = with_each_loss_type(                                     # any_options combines them
    {}, RANGE, dict(delta=1.45), CISPO, SAPO, SEQUENCE | RANGE,
    KL, BIAS_CORRECTED_KL, KL | CISPO, KL | SAPO, KL | SEQUENCE)
any_options = st.tuples(
    st.sampled_from([{}, dict(epsilon_low=0.1, delta=1.7), dict(epsilon_high=0.55), CISPO, SAPO]),
    st.sampled_from([{}, SEQUENCE]), st.sampled_from([dict(beta=0.0), KL, BIAS_CORRECTED_KL]),
    st.sampled_from(LOSS_TYPES).map(of_type)).map(lambda parts: parts[0] | parts[1] | parts[2] | parts[3])


def loss_of(rows, logps=None, by_token=False, **options):
    """grpo_loss of tokens (log π, log π_old, log π_ref, A); log π_ref is passed where beta is."""
    own_logps, old, ref, A, mask = columns(rows, width=4)
    logps = own_logps if logps is None else logps
    reference = dict(ref_logps=ref) if "beta" in options else {}
    return grpo.grpo_loss(logps, A if by_token else A[:, 0], mask, old_logps=old, **reference, **options)


def slopes_of(rows, **options):
    """∂loss/∂log π of each real token."""
    logps, *_, mask = columns(rows, width=4)
    return slope(lambda x: loss_of(rows, x, **options)[0], logps)[mask == 1]


def with_ratios(rows, importance_sampling_level="token"):
    """The tokens (log π, log π_old, log π_ref, A, ρ) of all answers."""
    ratios = [rho for row in rows for rho in oracle_ratios(row, importance_sampling_level)]
    return [(*token, rho) for token, rho in zip(sum(rows, []), ratios)]


def oracle_term(p, A, rho, weight, policy_loss="clip", epsilon_low=0.2, epsilon_high=None, delta=None):
    """l of one token. CISPO's weight is a ratio, too, but a constant."""
    if policy_loss == "cispo":
        return -min(weight, epsilon_high or 5.0) * A * p
    if policy_loss == "sapo":
        return oracle_sapo(rho, A)
    return oracle_surrogate(rho, A, epsilon_low, epsilon_high or epsilon_low, delta or inf)


def oracle_loss(rows, at=None, importance_sampling_level="token", loss_type="dapo", max_completion_length=7,
                beta=0.0, use_bias_correction_kl=False, **of_term):
    """Σ_i w_i·Σ_t (l + β·k3); DeepSeekMath eq. 3: w_i = 1/(G·|o_i|). at: the rows of CISPO's weights."""
    weights = oracle_weights(list(map(len, rows)), loss_type, max_completion_length)
    tokens, fixed = [with_ratios(x, importance_sampling_level) for x in (rows, at or rows)]
    loss, w_of_tokens = 0.0, [w for row, w in zip(rows, weights) for _ in row]
    for w, (p, _, ref, A, rho), (*_, constant) in zip(w_of_tokens, tokens, fixed):
        k3 = oracle_kl(p, ref) * (rho if use_bias_correction_kl else 1.0)
        loss += w * (oracle_term(p, A, rho, constant, **of_term) + beta * k3)
    return loss


def oracle_metrics(rows, importance_sampling_level="token", policy_loss="clip", epsilon_low=0.2,
                   epsilon_high=None, beta=None, use_bias_correction_kl=False, **others):
    """Shares of the tokens: A < 0 and ρ below the range, A > 0 and ρ above it, both; and the mean KL."""
    lowest, highest = {"clip": (1 - epsilon_low, 1 + (epsilon_high or epsilon_low)),
                       "cispo": (0.0, epsilon_high or 5.0), "sapo": (0.0, inf)}[policy_loss]
    tokens = with_ratios(rows, importance_sampling_level)
    low = sum(rho < lowest and A < 0 for *_, A, rho in tokens)
    high = sum(rho > highest and A > 0 for *_, A, rho in tokens)
    sums = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    if beta is not None:                                                # then log π_ref is given
        weights = [rho if use_bias_correction_kl else 1.0 for *_, rho in tokens]
        sums["kl"] = sum(w * oracle_kl(p, ref) for w, (p, _, ref, *_) in zip(weights, tokens))
    return {name: x / max(len(tokens), 1) for name, x in sums.items()}


def oracle_slopes(rows, **options):
    """∂loss/∂log π of each token by central differences; CISPO's weight, a constant, does not move."""
    slopes = []
    for i, row in enumerate(rows):
        for t, (p, *rest) in enumerate(row):
            above, below = [list(row) for row in rows], [list(row) for row in rows]
            above[i][t] = (p + 1e-6, *rest)
            below[i][t] = (p - 1e-6, *rest)
            difference = oracle_loss(above, rows, **options) - oracle_loss(below, rows, **options)
            slopes.append(difference / 2e-6)
    return slopes


@pytest.mark.parametrize("options, want, want_by_default", [                                    # page 1
    (dict(loss_type="grpo"), -0.010313, -0.008417), (dict(loss_type="bnpo"), -0.092608, -0.075584),
    (dict(), -0.092608, -0.075584), (of_type("dr_grpo", 6), -0.077174, -0.062986),
    (dict(loss_type="grpo", beta=0.04), -0.0051625, -0.0032666),       # the paper's: + 0.04·0.1931·2/3
    (dict(beta=0.04), -0.0879728, -0.0709480)], ids=str)                                # + 0.04·0.1931·9/15
def test_grpo_loss_matches_the_worked_numbers(options, want, want_by_default):
    """Answers of 5, 4, 6 tokens, A = 1.225, -1.225, 0, then the default's ±0.9998: log ratios to one loss;
    with β: π = 2·π_ref in two answers, where k3 = 0.1931 (page 9), π = π_ref in the third"""
    log_ratios = [[10, 5, -10, 8, 2], [-5, 10, -8, 5], [8, -5, 10, 5, -8, 10]]          # in hundredths
    logps, mask = columns([[(x / 100,) for x in row] for row in log_ratios])
    if "beta" in options:
        options = options | dict(ref_logps=logps - f64([[2.0], [2.0], [1.0]]).log())
    for A, wanted in ((1.225, want), (0.99980004, want_by_default)):
        loss, _ = grpo.grpo_loss(logps, f64([A, -A, 0.0]), mask, old_logps=0 * logps, **options)
        expect(loss, wanted, 5e-7)


@pytest.mark.parametrize("lengths, loss_type, want", [                                          # page 2
    ([3, 3], "grpo", 0.0), ([2, 4], "grpo", 0.0), ([4, 2], "grpo", 0.0),
    ([3, 3], "dapo", 0.0), ([2, 4], "dapo", 1 / 3), ([4, 2], "dapo", -1 / 3)], ids=str)
def test_grpo_loss_on_policy_is_worked_out_from_lengths_alone(lengths, loss_type, want):
    """A = +1, -1, ρ = 1: loss = Σ -A·w, 0 for grpo or equal lengths; a token's gradient is -A·w, not 0"""
    logps, mask = columns([[(-1.0,)] * n for n in lengths])
    expect(grpo.grpo_loss(logps, f64([1.0, -1.0]), mask, loss_type=loss_type)[0], want)


@pytest.mark.parametrize("policy_loss, want", [                                                 # page 10
    ("clip", [0.5, 1, 0, 0]), ("cispo", [0.5, 1, 1.5, 5]), ("sapo", [0.47, 1, 1.41, 0.1596])])
def test_grpo_loss_weights_tokens_as_worked(policy_loss, want):
    """-4·∂loss/∂log π at A = 1, ρ = 0.5, 1, 1.5, 6: ρ or 0; min(ρ, 5); 4ρ·σ(ρ - 1)·(1 - σ(ρ - 1))"""
    rows = [[(math.log(rho), 0.0, 0.0, 1.0) for rho in (0.5, 1.0, 1.5, 6.0)]]
    expect(-4 * slopes_of(rows, policy_loss=policy_loss), want, 5e-5)


@every_option
@given(any_rated_answers)
def test_grpo_loss_matches_the_oracle(options, rows):
    """loss = aggregate(l(ρ, A) + β·KL), against a loop over tokens"""
    expect(loss_of(rows, **options)[0], oracle_loss(rows, **options))


@every_option
@given(any_rated_answers)
def test_grpo_loss_has_the_slope_of_the_oracle(options, rows):
    """∂loss/∂log π of every token, by finite differences of the loop over tokens"""
    expect(slopes_of(rows, **options), oracle_slopes(rows, **options), 1e-6)


@with_each_loss_type({}, CISPO, SAPO, SEQUENCE)
@given(any_rated_answers)
def test_grpo_loss_on_policy_has_the_gradient_of_reinforce(options, rows):
    """ρ = 1: ∂loss/∂log π_t = -A·w_t, of gspo, cispo, sapo, too; the value of "clip" is Σ -A·w"""
    logps, _, _, A, mask = columns(rows)

    def loss(logps):
        return grpo.grpo_loss(logps, A[:, 0], mask, **options)[0]

    weights = oracle_weights([len(row) for row in rows], options["loss_type"])
    want = [-A * weight for row, weight in zip(rows, weights) for *_, A in row]
    expect(slope(loss, logps)[mask == 1], want)
    if "policy_loss" not in options:
        expect(loss(logps), sum(want))


@every_loss_type
@given(st.lists(st.tuples(any_logit, any_reward), min_size=2, max_size=3), st.integers(2, 3))
def test_grpo_loss_has_the_gradient_of_the_mean_reward_over_all_groups(loss_type, vocabulary, G):
    """Σ π(group)·∇loss = -(G - 1)/G·∇E r over all V^G groups of one-token answers, on-policy, A = r - mean"""
    logits, rewards = f64(vocabulary).T

    def mean_loss(logits):
        logps, total = logits.log_softmax(0), 0.0
        for group in itertools.product(range(len(vocabulary)), repeat=G):       # which word each answer is
            logps_of_group, r = logps[list(group)], rewards[list(group)]                        # (G,), (G,)
            loss, _ = grpo.grpo_loss(
                logps_of_group.unsqueeze(1), r - r.mean(), torch.ones(G, 1), **of_type(loss_type, 1))
            total += logps_of_group.detach().sum().exp() * loss         # the samples do not know of θ
        return total

    slope_of_mean_reward = slope(lambda logits: logits.softmax(0) @ rewards, logits)
    expect(slope(mean_loss, logits), -(G - 1) / G * slope_of_mean_reward)


@with_each_loss_type(KL, KL | CISPO, KL | SAPO, KL | SEQUENCE, BIAS_CORRECTED_KL)
@given(any_rated_answers)
def test_grpo_loss_takes_the_other_log_probs_as_constants(options, rows):
    """∂loss/∂log π_old = ∂loss/∂log π_ref = 0, whatever comes in: only the policy learns"""
    logps, old, ref, A, mask = columns(rows)

    def loss(old, ref):
        return grpo.grpo_loss(logps, A[:, 0], mask, old_logps=old, ref_logps=ref, **options)[0]

    expect(slope(lambda x: loss(x, ref), old), torch.zeros_like(old))
    expect(slope(lambda x: loss(old, x), ref), torch.zeros_like(ref))


@beyond("overflow")
@given(st.floats(88.75, 500, width=32), any_advantage)
def test_grpo_loss_of_a_ratio_that_leaves_float32_has_no_gradient(x, A):
    """log ρ = 88.75 and more, exp(log ρ) = inf: loss -(1 + ε)·A, clipped, or -e²⁰·A where A < 0; no NaN"""
    one = torch.ones(1, 1)

    def loss(logps):
        return grpo.grpo_loss(logps, A * one, one, old_logps=0 * one)[0]

    expect(loss(x * one), -A * (1.2 if A > 0 else math.exp(20)), 1e-6)
    expect(slope(loss, x * one), [[0.0]])


@beyond("metrics")
@with_each_loss_type({}, RANGE, KL | CISPO, KL | SAPO, KL | SEQUENCE, BIAS_CORRECTED_KL)
@given(any_rated_answers)
def test_grpo_loss_metrics_match_the_oracle(options, rows):
    """low: A < 0, ρ below the range; high: A > 0, ρ above it (cispo: the cap, sapo: none); both; mean kl"""
    metrics, want = loss_of(rows, **options)[1], oracle_metrics(rows, **options)
    assert metrics.keys() == want.keys()
    expect(f64([metrics[name] for name in want]), list(want.values()))


@beyond("metrics")
@given(any_rated_answers)
def test_grpo_loss_metrics_on_the_edge_of_the_range_count_nothing(rows):
    """ε = 0, ρ = 1: the edge is inside the range"""
    on_policy = [[(p, p, ref, A) for p, _, ref, A in row] for row in rows]
    expect(f64(list(loss_of(on_policy, epsilon_low=0.0, epsilon_high=0.0)[1].values())), [0.0] * 3)


@with_each_loss_type(KL, KL | SEQUENCE, KL | CISPO, KL | SAPO, loss_types=["grpo", "dr_grpo", "dapo"])
@given(st.lists(any_rated_answers, min_size=1, max_size=3))
def test_grpo_loss_of_microbatches_adds_up_to_the_whole(options, parts):
    """Σ loss(part; rows and tokens of the whole) = loss(whole), ∂ at each token and metrics, too; not bnpo"""
    whole = sum(parts, [])
    loss, metrics = loss_of(whole, **options)
    of_parts = [loss_of(part, **options, **counts_of(whole)) for part in parts]
    expect(sum(loss for loss, _ in of_parts), loss)
    slopes = [slopes_of(part, **options, **counts_of(whole)) for part in parts]
    expect(torch.cat(slopes), slopes_of(whole, **options))
    for name in metrics:
        expect(f64(sum(of_part[name] for _, of_part in of_parts)), metrics[name])


@beyond("shapes")
@more_draws
@given(st.lists(any_tokens_or_none, max_size=3), any_options)
def test_grpo_loss_with_advantages_of_tokens_and_an_answer_without_one_matches_the_oracle(rows, options):
    """A (B, T), as process supervision has it; an answer without a token is a row of grpo and dr_grpo"""
    loss, metrics = loss_of(rows, by_token=True, **options)
    expect(loss, oracle_loss(rows, **options))
    metrics_wanted = oracle_metrics(rows, **options)
    assert list(metrics) == list(metrics_wanted) and set(map(type, metrics.values())) == {float}
    expect(f64(list(metrics.values())), list(metrics_wanted.values()))
    expect(slopes_of(rows, by_token=True, **options), oracle_slopes(rows, **options), 1e-6)


# §8 Process supervision, and two rewards that read a text ---------------------------------------------------

any_step = st.tuples(any_reward, st.integers(0, 3))                     # its reward, and its last token
any_missing_step = st.tuples(st.just(nan), st.sampled_from([-7, 0, 99]))    # whatever its end is
any_solution = st.tuples(                                               # its length, then three steps
    st.integers(1, 4), any_step | any_missing_step, any_step, any_step | any_missing_step)
any_solutions = st.lists(any_solution, min_size=4, max_size=4)


def process_advantages_of(solutions, G=2, **options):
    """(B, T): the advantages of the tokens of solutions, each its length and its graded steps."""
    mask = f64([[float(t < length) for t in range(6)] for length, *_ in solutions])
    grades = f64([[reward for reward, _ in steps] for _, *steps in solutions])
    ends = torch.tensor([[end for _, end in steps] for _, *steps in solutions])
    return grpo.process_advantages(grades, ends, mask, G, **options)


def oracle_process(solutions, correction=1, eps=1e-4):
    """Solutions 0 and 1 are a group, 2 and 3 are one."""
    want = [[0.0] * 6 for _ in solutions]
    for group in ([0, 1], [2, 3]):
        rewards = [reward for i in group for reward, _ in solutions[i][1:] if not math.isnan(reward)]
        mean, std = oracle_stats(rewards, correction)
        for i in group:
            length, *steps = solutions[i]
            for reward, end in steps:
                for t in range(length):
                    if t <= end and not math.isnan(reward):
                        want[i][t] += (reward - mean) / (std + eps)
    return want


@pytest.mark.parametrize("solutions, want", [                                                   # page 10
    ([(6, (1, 1), (1, 3), (1, 5)), (4, (1, 1), (0, 3), (nan, -7))],
     [[1.5, 1.5, 1.0, 1.0, 0.5, 0.5], [-1.5, -1.5, -2.0, -2.0, 0.0, 0.0]]),
    ([(6, (1, 1), (1, 3), (1, 5)), (4, (0, 1), (1, 3), (nan, 99))],
     [[1.5, 1.5, 1.0, 1.0, 0.5, 0.5], [-1.5, -1.5, 0.5, 0.5, 0.0, 0.0]])], ids=["carry", "wrong first"])
def test_process_advantages_match_the_worked_numbers(solutions, want):
    """A_t = Σ z of the steps that end at or after t, z = (r - mean) / std over a group's steps (§4.1.3)"""
    expect(process_advantages_of(solutions, correction=0, eps=0.0), want)


@with_options({}, dict(correction=0), dict(eps=0.5))
@given(any_solutions)
def test_process_advantages_match_the_oracle(options, solutions):
    """A_t = Σ z of the steps that end at or after t, z = (r - mean) / (std + eps); NaN: no step"""
    expect(process_advantages_of(solutions, **options), oracle_process(solutions, **options))


def none_as_nan(rewards):
    """A reward of None as NaN."""
    return f64([nan if reward is None else reward for reward in rewards])


def beyond_text(*row):
    return pytest.param(*row, marks=beyond("text"))


@pytest.mark.parametrize("answer, solution, want", [
    ("<think>7+5=12,4+8+1=13</think>132", "132", 1), ("<think>7+5=12,4+8+0=12</think>122", "132", 0), # page 7
    ("132", "132", 1), ("132.0", "132", 0), ("<think>132", "132", 0), ("<think>132</think>131", "132", 0),
    (r"\boxed{132}", "132", 1), (r"<think>\boxed{131}</think>It is \boxed{132}.", "132", 1), ("", "132", 0),
    (r"\boxed{131} or \boxed{132}", "132", 1), (r"\boxed{1}. No: \boxed{\frac{\sqrt{2}}{2}}", "1", 0),
    (r"\boxed{}", "132", 0), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1), (r"\boxed{\frac{1}{2}}", "2", 0),
    beyond_text("B\n", " B", 1), beyond_text("5", 5, 1), beyond_text("1,0", "10", 0),
    beyond_text("b", "B", 0), beyond_text(r"\boxed{ Oslo }", "Oslo", 1), beyond_text(r"\boxed{1} 2", "2", 0),
    beyond_text(r"\boxed{1} \boxed{2", "1", 0), beyond_text("{2}", "{2}", 1), beyond_text("1} 2", "1", 0),
    beyond_text("None", None, nan), beyond_text("", " ", nan), beyond_text("nan", nan, nan),
    beyond_text("72", 72.0, 1), beyond_text("-0.5", -0.5, 1), beyond_text("0.00005", 5e-05, 1),
    beyond_text("1" + "0" * 16, 1e16, 1), beyond_text("1e+16", 1e16, 0), beyond_text("72", r"\boxed{72}", 1),
    beyond_text("7", "<think>6</think>7", 1), beyond_text("<think>1</think>131</think>132", "132", 1)], ids=str)
def test_accuracy_reward_matches_the_worked_answers(answer, solution, want):
    r"""r = 1 if the text after the last </think> (its last \boxed{}) is the solution; no solution: None"""
    expect(none_as_nan(grpo.accuracy_reward([answer], [solution])), [want])


def in_braces(parts):
    return "{" + "".join(parts) + "}"


any_formula = st.recursive(st.sampled_from(["a", "2 ", r"\frac"]), lambda inner: st.lists(inner).map(in_braces))
any_text = st.lists(st.sampled_from([r"\boxed{1}", r"\boxed{", "</think>", "{", "}", "3"])).map("".join)
any_text_without_a_box = st.lists(st.sampled_from(["{", "}", "3 ", "\n"])).map("".join)


@beyond("text")
@more_draws
@given(any_text, any_formula, any_text_without_a_box)
def test_accuracy_reward_reads_the_last_box_as_far_as_the_brace_that_closes_it(before, formula, behind):
    r"""...\boxed{x}... is right for x, where no box follows; without the brace that closes it, wrong for x"""
    answers = [before + r"\boxed{" + formula + end for end in ("}" + behind, "")]
    expect(none_as_nan(grpo.accuracy_reward(answers, [formula] * 2)), [1.0, 0.0])


@pytest.mark.errors
def test_accuracy_reward_wants_a_solution_for_each_answer():
    """Two answers and one solution: an error, not one reward"""
    with pytest.raises(ValueError):
        grpo.accuracy_reward(["1", "2"], ["1"])


@pytest.mark.parametrize("answer, want", [
    ("<think>7+5=12,4+8+1=13</think>132", 1), ("<think>7+5=12,4+8+0=12</think>122", 1), # page 7
    ("132.0", 0), ("<think>132", 0), ("132</think>", 0), ("", 0), ("x<think>1</think>2", 0),
    ("<think>1</think>", 0), ("<think>\n1\n</think>\n\n2\n", 1), beyond_text("<think></think>b", 1),
    beyond_text("<Think>1</Think>2", 0), beyond_text(" <think>1</think>2", 0),
    beyond_text("<think>1</think> \n", 0), beyond_text("<think>1<think>2</think>3", 0),
    beyond_text("<think>1</think>2</think>3", 0), beyond_text("</think><think>1", 0),
    beyond_text("<think>1</think>2<think>", 0), beyond_text("<think>1</think>2<think></think>4", 0)], ids=str)
def test_think_format_reward_matches_the_worked_answers(answer, want):
    """r = 1 for one <think>...</think>, from the first character on, then an answer; else 0"""
    expect(none_as_nan(grpo.think_format_reward([answer])), [want])


@beyond("text")
@pytest.mark.parametrize("name", ["accuracy_reward", "think_format_reward"])
def test_a_reward_of_a_chat_is_that_of_its_last_message(name):
    """r([..., {"content": text}]) = r(text), and columns that a reward does not know are no error"""
    texts = ["a", "<think>b</think>a", "<think>a", "", "<think></think>" + " " * 10**5]         # however long
    chats = [[{"role": "user", "content": "a"}] * 2 + [{"role": "assistant", "content": text}] for text in texts]
    reward, others = getattr(grpo, name), dict(solution=["a"] * len(texts), prompts=texts)
    of_texts = none_as_nan(reward(completions=texts, **others))
    expect(none_as_nan(reward(completions=chats, **others)), of_texts)


# Functions that take a mask: padding, width, dtype of the mask ----------------------------------------------

def masked_loss(x, y, m, **options):
    """The loss of two columns and the mask, with a KL."""
    return grpo.grpo_loss(x, y[:, 0], m, old_logps=y, ref_logps=y, beta=0.5, **options)[0]


MASKED = [  # a value that must not depend on the padding, from two columns and the mask
    ("broadcast_advantages", lambda x, y, m: grpo.broadcast_advantages(x[:, 0], m)),
    ("process_advantages", lambda x, y, m: grpo.process_advantages(
        x[:, :1], 0 * m[:, :1].long(), m, len(x), correction=0)),
    ("importance_ratio", lambda x, y, m: grpo.importance_ratio(x, y, m)[m != 0]),
    ("importance_ratio of a sequence", lambda x, y, m: grpo.importance_ratio(x, y, m, **SEQUENCE)),
    ("aggregate", lambda x, y, m: sum(grpo.aggregate(x, m, **of_type(name)) for name in LOSS_TYPES)),
    ("grpo_loss", lambda x, y, m: grpo.grpo_loss(x, y[:, 0], m, old_logps=y)[0]),
    ("grpo_loss dr_grpo", lambda x, y, m: masked_loss(x, y, m, **of_type("dr_grpo"))),
    ("grpo_loss cispo", lambda x, y, m: masked_loss(x, y, m, **CISPO)),
    ("grpo_loss of a sequence", lambda x, y, m: masked_loss(x, y, m, **SEQUENCE, loss_type="grpo")),
    ("grpo_loss sapo", lambda x, y, m: masked_loss(x, y, m, **SAPO, loss_type="bnpo")),
    pytest.param("grpo_loss with A of tokens", lambda x, y, m: grpo.grpo_loss(x, y, m, old_logps=y)[0],
                 marks=beyond("shapes")),
    pytest.param("grpo_loss metrics", lambda x, y, m: f64(
        list(grpo.grpo_loss(x, y[:, 0], m, old_logps=y, ref_logps=y)[1].values())), marks=beyond("metrics"))]
every_masked_function = pytest.mark.parametrize("name, function", MASKED)


def expect_nothing_of_the_padding(function, rows, junk):
    """f(junk at the padding) = f(0 there), ∂f too, and ∂f/∂padding = 0."""
    x, y, mask = columns(rows, junk)
    x0, y0, _ = columns(rows, 0.0)
    expect(function(x, y, mask), function(x0, y0, mask))
    with_zeros = slope(lambda x: function(x, y0, mask), x0)
    expect(slope(lambda x: function(x, y, mask), x), with_zeros * mask)


@every_masked_function
@given(answers(any_number, any_number), st.sampled_from([-100.0, 3.0]))
def test_what_is_at_the_padding_reaches_no_value_and_no_slope(name, function, rows, junk):
    """f(any number at the padding) = f(0 there), ∂f too, and ∂f/∂padding = 0"""
    expect_nothing_of_the_padding(function, rows, junk)


@beyond("padding")
@every_masked_function
@given(answers(any_number, any_number), st.sampled_from([nan, inf, -inf, 1e30]))
def test_nan_at_the_padding_reaches_no_value_and_no_slope(name, function, rows, junk):
    """f(NaN, ±inf or 1e30 at the padding) = f(0 there), ∂f too, and ∂f/∂padding = 0"""
    expect_nothing_of_the_padding(function, rows, junk)


@beyond("masks")
@every_masked_function
@given(answers(any_number, any_number), st.sampled_from([torch.bool, torch.int64, torch.uint8, torch.half]))
def test_a_mask_may_be_of_any_dtype(name, function, rows, dtype):
    """f(mask of this dtype) = f(mask of 0.0 and 1.0)"""
    x, y, mask = columns(rows)
    expect(function(x, y, mask.to(dtype)), function(x, y, mask))


# Shapes, dtypes and errors ----------------------------------------------------------------------------------

def tensors(dtype=torch.float64):
    """X numbers, M a mask, I integers (B, T); Q (T, T); R (B,); C (B, 1); S a scalar; L logits (B, T, V)."""
    torch.manual_seed(0)
    X, L = torch.randn(4, 3).to(dtype), torch.randn(4, 3, 5).to(dtype)
    return types.SimpleNamespace(X=X, Q=X[:3].clone(), R=X[:, 0].clone(), C=X[:, :1].clone(), L=L,
                                 S=X[0, 0].clone(), M=torch.ones(4, 3).tril(), I=torch.randint(3, (4, 3)))


@beyond("dtypes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, call, like", [                          # a call, and what the result is like
    ("combine_rewards", lambda t: grpo.combine_rewards(t.X, t.X[0]), "R"),
    ("group_stats", lambda t: torch.cat(grpo.group_stats(t.R, 2)), "R"),
    ("group_advantages", lambda t: grpo.group_advantages(t.R, 2), "R"),
    ("broadcast_advantages", lambda t: grpo.broadcast_advantages(t.R, t.M), "X"),
    ("process_advantages", lambda t: grpo.process_advantages(t.X, t.I, t.M, 2), "X"),
    ("make_completion_mask", lambda t: grpo.make_completion_mask(t.I, 1), "I"),
    ("selective_log_softmax", lambda t: grpo.selective_log_softmax(t.L, t.I.short()), "X"),
    ("entropy_from_logits", lambda t: grpo.entropy_from_logits(t.L), "X"),
    ("importance_ratio", lambda t: grpo.importance_ratio(t.X, t.X, t.M), "X"),
    ("clip_ratio", lambda t: grpo.clip_ratio(t.R), "R"),
    ("kl_estimate", lambda t: grpo.kl_estimate(t.S, t.S), "S"),
    ("clipped_surrogate_loss", lambda t: grpo.clipped_surrogate_loss(t.X, t.X, delta=2.0), "X"),
    ("cispo_loss", lambda t: grpo.cispo_loss(t.X, t.C, t.C), "X"),
    ("sapo_loss", lambda t: grpo.sapo_loss(t.C, t.X), "X"),
    ("aggregate", lambda t: grpo.aggregate(t.X, t.M, **of_type("dr_grpo")), "S"),
    ("grpo_loss", lambda t: grpo.grpo_loss(t.X, t.R, t.M, ref_logps=t.X, beta=0.1)[0], "S")])
def test_a_function_keeps_the_dtype_and_changes_no_argument(name, call, like, dtype):
    """The float dtype that goes in comes out, and what went in is as it was"""
    t, before = tensors(dtype), tensors(dtype)
    result, want = call(t), getattr(t, like)
    assert (result.shape, result.dtype) == (want.shape, want.dtype)
    assert all(torch.equal(x, getattr(before, key)) for key, x in vars(t).items())


@beyond("dtypes")
@pytest.mark.parametrize("name, call, want", [
    ("group_advantages", lambda r: grpo.group_advantages(r, 4, eps=0.0), [1.5, -0.5, -0.5, -0.5]),
    ("group_advantages", lambda r: grpo.group_advantages(r == 1, 4, eps=0.0), [1.5, -0.5, -0.5, -0.5]),
    ("sapo_loss", lambda r: grpo.sapo_loss(torch.tensor([1.3]), r - 1), [0.0, *[oracle_sapo(1.3, -1)] * 3]),
    ("process_advantages", lambda r: grpo.process_advantages(
        r.view(2, 2), torch.tensor([[0, 1]] * 2), torch.ones(2, 2), 2, eps=0.0), [[1, -0.5], [-1, -0.5]])])
def test_whole_numbers_are_rewards_as_floats_are(name, call, want):
    """1, 0, 0, 0 has the mean 1/4 and the std 1/2"""
    expect(call(torch.tensor([1, 0, 0, 0])), want, 1e-6)


@beyond("dtypes")
def test_group_advantages_of_bfloat16_rewards_see_their_smallest_difference():
    """Mean and std are float32 inside: in bfloat16 the mean of these four would be 1"""
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0078125], dtype=torch.bfloat16)
    expect(grpo.group_advantages(rewards, 4, eps=0.0).float(), [-0.5, -0.5, -0.5, 1.5], 1e-6)


t = tensors()
REFUSED = [  # a function, its argument, a call, and what is wrong in silence there, or torch's own error
    ("combine_rewards", "reward_weights", lambda x: grpo.combine_rewards(t.X, x), [1, 2], [1, nan, 1]),
    ("group_stats", "rewards", lambda x: grpo.group_stats(x, 2), t.X),
    ("group_stats", "num_generations", lambda x: grpo.group_stats(t.R, x), 0, 1, 3, 8),
    ("group_stats", "num_generations", lambda x: grpo.group_stats(t.R, 2, **x), dict(correction=2)),
    ("group_advantages", "scale_rewards", lambda x: grpo.group_advantages(t.R, 2, scale_rewards=x), "std"),
    ("broadcast_advantages", "advantages", lambda x: grpo.broadcast_advantages(x, t.M), t.X, t.C, t.S),
    ("process_advantages", "completion_mask", lambda x: grpo.process_advantages(t.X, t.I, x, 2), t.M[:1]),
    ("process_advantages", "step_ends",
     lambda x: grpo.process_advantages(t.X, x, t.M, 2), t.I - 1, t.I + 1, t.I[:, :1]),
    ("selective_log_softmax", "index", lambda x: grpo.selective_log_softmax(t.L, x), t.I[:, :1], t.I[0]),
    ("per_token_logps", "prompt_mask",                                  # padding at the end
     lambda x: grpo.per_token_logps(make_model("Llama"), t.I, x, t.I, t.M), t.M),
    ("per_token_logps", "completion_mask",                              # padding at the beginning, or within
     lambda x: grpo.per_token_logps(make_model("Llama"), t.I, t.I >= 0, t.I, x), t.M.flip(1), t.I != 0),
    ("importance_ratio", "old_logps", lambda x: grpo.importance_ratio(t.X, x, t.M), t.R, t.C, t.S),
    ("importance_ratio", "completion_mask", lambda x: grpo.importance_ratio(t.X, t.X, x), t.M[:, :1]),
    ("importance_ratio", "importance_sampling_level",
     lambda x: grpo.importance_ratio(t.X, t.X, t.M, importance_sampling_level=x), "word"),
    ("clipped_surrogate_loss", "advantages", lambda x: grpo.clipped_surrogate_loss(t.Q, x), t.R[:3], t.X[:1]),
    ("cispo_loss", "advantages", lambda x: grpo.cispo_loss(t.Q, t.Q, x), t.R[:3], t.X[:1]),
    ("sapo_loss", "advantages", lambda x: grpo.sapo_loss(t.Q, x), t.R[:3], t.X[:1]),
    ("kl_estimate", "ref_logps", lambda x: grpo.kl_estimate(t.X, x), t.R, t.C, t.S),
    ("kl_estimate", "estimator", lambda x: grpo.kl_estimate(t.X, t.X, estimator=x), "k4"),
    ("aggregate", "per_token_loss", lambda x: grpo.aggregate(x, t.M, loss_type="dapo"), t.R, t.S),
    ("aggregate", "loss_type", lambda x: grpo.aggregate(t.X, t.M, loss_type=x), "mean"),
    ("aggregate", "max_completion_length", lambda x: grpo.aggregate(t.X, t.M, **x), dict(loss_type="dr_grpo")),
    ("grpo_loss", "advantages", lambda x: grpo.grpo_loss(t.X, x, t.M), t.X[0], t.C, t.R[:1]),
    ("grpo_loss", "completion_mask", lambda x: grpo.grpo_loss(t.X, t.R, x), t.M[0], t.M[:, :1]),
    ("grpo_loss", "old_logps", lambda x: grpo.grpo_loss(t.X, t.R, t.M, old_logps=x), t.R, t.C, t.S),
    ("grpo_loss", "ref_logps", lambda x: grpo.grpo_loss(t.X, t.R, t.M, ref_logps=x), t.R, t.C, t.S),
    ("grpo_loss", "ref_logps", lambda x: grpo.grpo_loss(t.X, t.R, t.M, **x), KL, dict(use_bias_correction_kl=True)),
    ("grpo_loss", "policy_loss", lambda x: grpo.grpo_loss(t.X, t.R, t.M, policy_loss=x), "ppo"),
    ("grpo_loss", "delta", lambda x: grpo.grpo_loss(t.X, t.R, t.M, delta=2, **x), CISPO, SAPO),
    ("grpo_loss", "epsilon_high", lambda x: grpo.grpo_loss(t.X, t.R, t.M, **SAPO, epsilon_high=x), 2.0)]


@pytest.mark.errors
@pytest.mark.parametrize("argument, call, wrong", [
    pytest.param(argument, call, wrong, id=f"{name}, {argument}: {getattr(wrong, 'shape', wrong)}")
    for name, argument, call, *wrongs in REFUSED for wrong in wrongs])
def test_a_wrong_shape_or_word_is_an_error_that_names_the_argument(argument, call, wrong):
    """For example a (B, 1) that would broadcast against (B, T), a wrong B, an unknown word; B = 4, T = 3"""
    with pytest.raises((AssertionError, ValueError), match=rf"\b{argument}\b.*: got .+; allowed"):
        call(wrong)
        raise Difference(f"expected  an error that names {argument}, for\n{wrong}\ngot       none", pytrace=False)
