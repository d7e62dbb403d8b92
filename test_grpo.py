"""The specification of grpo.py's maths, §1-§8.

A test's name is a sentence about a function, its docstring the law. Most functions have worked numbers (a
page of worked_examples/ does them by hand), an oracle (the definition once more in pure Python, on lists that
know no padding), laws (true for any numbers: Hypothesis looks for the smallest ones that break a law), and
@beyond("..."): what the formula leaves open. Then come padding, shapes and errors.

    pytest test_grpo.py                                            -v prints the specification
    GRPO_EXAMPLES=200 pytest test_grpo.py --hypothesis-seed=1      up to 200 draws of a law, from this seed
    python worked_examples/check_your_own/check.py my_grpo.py      the same laws, of a file of your own
"""

import copy
import functools
import itertools
import math
import os
import re
import types
import warnings

import pytest
import torch
from hypothesis import Phase, core, given, settings
from hypothesis import strategies as st

import grpo

f64 = functools.partial(torch.as_tensor, dtype=torch.float64)
nan, inf = math.nan, math.inf
TOLERANCE = MODEL_TOLERANCE = 1e-9                                      # the second where a model computes
DRAWS = int(os.environ.get("GRPO_EXAMPLES", 20))                        # of each law; without a seed the same
settings.register_profile("grpo", deadline=None, derandomize=core.global_force_seed is None, database=None,
                          report_multiple_bugs=False, print_blob=False, max_examples=DRAWS,
                          phases=[Phase.explicit, Phase.generate, Phase.shrink])
settings.load_profile("grpo")
torch.set_num_threads(1)
warnings.simplefilter("ignore", pytest.PytestUnknownMarkWarning)        # beyond and errors are this file's
beyond = lambda step: pytest.mark.beyond(step=step)
with_options = lambda *rows: pytest.mark.parametrize("options", rows, ids=str)               # a test for each


# What a failure says ----------------------------------------------------------------------------------------

asked = {}                                                              # the law, and the row of its table


@pytest.fixture(autouse=True)
def remember_what_is_asked(request):
    row = getattr(request.node, "callspec", None)
    inputs = [f"{name} = {text_of(value)}" for name, value in row.params.items() if name != "want"] if row else []
    asked.update(law=request.function.__doc__, row=", ".join(inputs))


class Difference(pytest.fail.Exception):
    """A failure without a traceback: the law, the smallest input, what was expected, what came."""

    def __str__(self):
        inputs = getattr(self, "__notes__", [asked["row"]])             # the notes are Hypothesis'
        return "\n".join([asked["law"], *inputs, self.msg])


def text_of(x):
    """Numbers of a tensor, a list or one, with eight digits."""
    numbers = str(x.tolist() if isinstance(x, torch.Tensor) else x)
    return re.sub(r"\d+\.\d+(e-\d+)?", lambda digits: f"{float(digits[0]):.8g}", numbers)


def differs(want, got, hint=""):
    raise Difference(f"expected  {text_of(want)}\ngot       {text_of(got)}{hint}", pytrace=False)


def expect(got, want, tolerance=None):
    """Compare two tensors; if got is a multiple of what was expected, say so."""
    want, tolerance = f64(want).detach(), TOLERANCE if tolerance is None else tolerance
    if not isinstance(got, torch.Tensor) or got.shape != want.shape:
        differs(want, got)
    got = got.detach().double()
    is_close = functools.partial(torch.allclose, got, rtol=tolerance, atol=tolerance, equal_nan=True)
    if is_close(want):
        return
    factor = (got * want).sum() / want.square().sum()
    of_several = want.count_nonzero() > 1 and factor.isfinite() and is_close(factor * want)
    if of_several or is_close(-want):                                   # one number is a multiple of any other
        differs(want, got, f"\ngot = {factor:.4g} × expected")
    differs(want, got)


def expect_between(low, got, high):
    if not low <= got <= high:
        differs(f"between {text_of(low)} and {text_of(high)}", got)


# What Hypothesis draws --------------------------------------------------------------------------------------
# Most lie on a grid: equal ones are common, sums exact, none is on an edge of the clip range, 0.8 or 1.2.

def grid(low, high, step):
    return st.integers(round(low / step), round(high / step)).map(lambda k: k * step)


reward, advantage, logp = grid(-5, 5, 0.25), grid(-2, 2, 0.25), grid(-3, 0, 0.125)
ratio, logit, number = grid(0.125, 3, 0.125), grid(-4, 4, 0.5), grid(-3, 3, 0.125)
any_float32 = st.floats(-1e8, 1e8, width=32)
group = st.lists(reward, min_size=2, max_size=5)                        # the rewards of one prompt's answers
unequal = group.filter(lambda rewards: len(set(rewards)) > 1)
batch = st.integers(2, 4).flatmap(                                      # 1 to 3 groups of the same size
    lambda G: st.lists(st.lists(reward, min_size=G, max_size=G), min_size=1, max_size=3))
words = st.lists(logit, min_size=2, max_size=4)                         # the logits of a small vocabulary


def shares(weights):
    return [w / sum(weights) for w in weights]


distribution = st.lists(st.integers(1, 6), min_size=3, max_size=3).map(shares)          # of three words


def answers(*numbers):
    """1 to 3 answers of 1 to 4 tokens; a token is a tuple: one number from each of these strategies."""
    return st.lists(st.lists(st.tuples(*numbers), min_size=1, max_size=4), min_size=1, max_size=3)


def columns(rows, padding=3.0, width=None):
    """These answers as tensors (B, T), one for each place in a token's tuple; then their mask."""
    T, width = max([1, *map(len, rows)]), width or len(next(token for row in rows for token in row))
    pad = lambda numbers, filler: [*numbers, *[filler] * (T - len(numbers))]
    places = [[pad([token[k] for token in row], padding) for row in rows] for k in range(width)]
    mask = [pad([1.0] * len(row), 0.0) for row in rows]
    return f64([*places, mask]).view(width + 1, len(rows), T)


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
    pytest.param(torch.tensor([[1, 1]]), [[0.5, 0.25]], [0.75], marks=beyond("dtypes"))])
def test_combine_rewards_matches_the_worked_numbers(rewards, weights, want):
    """r_i = Σ_f w_f·r_{i,f}, w_f = 1 unless given, without the functions that abstained (NaN)"""
    expect(grpo.combine_rewards(rewards, *weights), want)


@pytest.mark.errors
@given(st.lists(st.booleans(), min_size=1, max_size=4).filter(any))
def test_combine_rewards_names_the_rows_in_which_all_abstained(silent):
    """r_{i,f} = NaN for all f: an error that says i; nansum alone would make r_i = 0"""
    rewards = f64([[nan, nan] if none else [nan, 1.0] for none in silent])
    with pytest.raises((AssertionError, ValueError)) as error:
        grpo.combine_rewards(rewards)
    rows = [str(i) for i, none in enumerate(silent) if none]
    assert re.findall(r"\d+", str(error.value))[:len(rows)] == rows


# §2 Group statistics and advantages -------------------------------------------------------------------------

def oracle_stats(rewards, correction=1):
    mean = sum(rewards) / len(rewards)
    return mean, math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - correction))


def oracle_advantages(groups, scale_rewards="group", correction=1, eps=1e-4):
    std_of_all = oracle_stats([r for rewards in groups for r in rewards], correction)[1]
    want = []
    for rewards in groups:
        mean, std = oracle_stats(rewards, correction)
        scale = {"group": std + eps, "batch": std_of_all + eps, "none": 1.0}[scale_rewards]
        want.append([(r - mean) / scale for r in rewards])
    return want


def advantages(groups, **options):
    """The advantages of groups of rewards, (P, G)."""
    rewards = f64(groups)
    return grpo.group_advantages(rewards.flatten(), rewards.size(1), **options).view(rewards.shape)


any_scale = with_options({}, dict(scale_rewards="batch"), dict(scale_rewards="none"))


@with_options({}, dict(correction=0))
@given(batch)
def test_group_stats_match_the_oracle(options, groups):
    """mean = 1/G·Σ r, std = √(Σ (r - mean)² / (G - correction)), of each group its own"""
    mean, std = grpo.group_stats(f64(groups).flatten(), len(groups[0]), **options)
    expect(torch.stack([mean, std], 1), [oracle_stats(group, **options) for group in groups])


@beyond("equal")
@with_options({}, dict(correction=0))
@given(st.integers(2, 16), any_float32)
def test_group_stats_of_a_silent_group_are_its_reward_and_exactly_0_in_float32(options, G, r):
    """r_1 = ... = r_G => mean = r_1, std = 0 to the last bit; torch's mean of eight times 0.1 is not 0.1"""
    silent, other = torch.full((G,), r), torch.arange(G) / 8
    mean, std = grpo.group_stats(torch.cat([silent, other]), G, **options)
    expect(torch.stack([mean[0], std[0]]), [r, 0.0], 0)
    expect(torch.stack([mean[1], std[1]]), oracle_stats(other.tolist(), **options), 1e-6)


@pytest.mark.parametrize("rewards, options, want", [
    ([8.5, 6.2, 4.1], dict(), [1.0148, -0.0303, -0.9845]),                                      # page 1
    ([8.5, 6.2, 4.1], dict(correction=0, eps=0.0), [1.2429, -0.0371, -1.2058]),
    ([1.0, 0.0, 0.5], dict(), [0.9998, -0.9998, 0.0]),
    ([1.0, 0.0, 0.5], dict(correction=0, eps=0.0), [1.2247, -1.2247, 0.0]),
    ([1.0, 0.0, 0.5], dict(scale_rewards="none"), [0.5, -0.5, 0.0]),
    ([0.94, 0.91, -0.06], dict(correction=0, eps=0.0), [0.7392, 0.6746, -1.4137]),              # page 7
    ([1.0, 0.0, 0.0, 0.0], dict(eps=0.0), [1.5, -0.5, -0.5, -0.5]),                             # page 12
    ([1e6, 0.0, 0.0, 0.0], dict(eps=0.0), [1.5, -0.5, -0.5, -0.5])], ids=str)               # no more for it
def test_group_advantages_match_the_worked_numbers(rewards, options, want):
    """A = (r - mean) / (std + eps); n - 1 and eps = 1e-4 unless a row says otherwise (§4.1.2: eps = 0)"""
    expect(advantages([rewards], **options), [want], 5e-5)


@with_options({}, dict(correction=0), dict(eps=0.5), dict(scale_rewards="none"), dict(scale_rewards="batch"),
              dict(scale_rewards="batch", correction=0, eps=0.5))
@given(batch)
def test_group_advantages_match_the_oracle(options, groups):
    """A = (r - mean) / (std + eps), std of the group, or of the whole batch; "none": A = r - mean"""
    expect(advantages(groups, **options), oracle_advantages(groups, **options))


@any_scale
@given(batch)
def test_group_advantages_sum_to_zero_in_each_group(options, groups):
    """Σ_i A_i = 0: what one answer gains the others of its group lose"""
    expect(advantages(groups, **options).sum(1), [0.0] * len(groups))


@any_scale
@given(batch, reward)
def test_group_advantages_do_not_see_a_shift_of_the_rewards(options, groups, c):
    """A(r + c) = A(r): a group says who was better, not how good anybody was"""
    expect(advantages(f64(groups) + c, **options), advantages(groups, **options))


@given(unequal, reward.filter(bool))
def test_group_advantages_do_not_see_the_scale_of_the_rewards(rewards, c):
    """A(c·r) = sign(c)·A(r) at eps = 0: rewards in cents teach as much as in euros"""
    A = advantages([rewards], eps=0.0)
    expect(advantages(c * f64([rewards]), eps=0.0), A if c > 0 else -A)


@given(batch, st.data())
def test_group_advantages_follow_a_permutation_of_the_answers(groups, data):
    """A(r in another order) = A(r) in that order: which answer was drawn first means nothing"""
    order = data.draw(st.permutations(range(len(groups[0]))), "order")
    expect(advantages(f64(groups)[:, order]), advantages(groups)[:, order])


@with_options({}, dict(scale_rewards="none"))
@given(batch)
def test_group_advantages_of_a_group_do_not_see_the_other_groups(options, groups):
    """A(group 1, group 2, ...) = A(group 1), A(group 2), ...; "batch": the std sees the others"""
    alone = [advantages([rewards], **options) for rewards in groups]
    expect(advantages(groups, **options), torch.cat(alone))


@given(unequal)
def test_group_advantages_have_squares_that_sum_to_n_minus_1(rewards):
    """Σ A² = n - 1 at eps = 0, unless all rewards are equal (pages 6, 12): no group is louder than another"""
    expect(advantages([rewards], eps=0.0).square().sum(), len(rewards) - 1)


@beyond("equal")
@with_options(dict(eps=0.0), dict(scale_rewards="batch", eps=0.0), dict(scale_rewards="none"), {})
@given(st.integers(2, 16), any_float32)
def test_group_advantages_of_equal_rewards_are_exactly_zero_in_float32(options, G, r):
    """r_1 = ... = r_G => A = 0 to the last bit, and no 0/0 at eps = 0"""
    expect(grpo.group_advantages(torch.full((G,), r), G, **options), [0.0] * G, 0)


@given(st.lists(st.tuples(st.integers(1, 4), advantage), min_size=1, max_size=4))
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


def log_softmax(logits):
    """The log-probs of all words, each asked for in turn, (V,)."""
    V = len(logits)
    return grpo.selective_log_softmax(f64(logits).expand(1, V, V), torch.arange(V)[None])[0]


def entropy(logits):
    """H of one position, from its logits (V,)."""
    return grpo.entropy_from_logits(f64(logits)[None, None])[0, 0]


def test_selective_log_softmax_matches_the_worked_numbers():
    """log p = z - log Σ exp(z): logits 2, 1, 0 at the temperatures 1 and 0.5 (page 8)"""
    expect(log_softmax([2.0, 1.0, 0.0]), [-0.4076, -1.4076, -2.4076], 5e-5)
    expect(log_softmax([4.0, 2.0, 0.0]), [-0.1429, -2.1429, -4.1429], 5e-5)


@given(st.lists(st.tuples(st.tuples(logit, logit, logit), st.integers(0, 2)), min_size=1, max_size=3))
def test_selective_log_softmax_matches_the_oracle(rows):
    """log p(o) = z_o - log Σ_v exp(z_v) at each position, and no position sees another"""
    logits, index = f64([[z] for z, _ in rows]), torch.tensor([[o] for _, o in rows])
    want = [oracle_log_softmax(z)[o] for z, o in rows]
    expect(grpo.selective_log_softmax(logits, index)[:, 0], want)
    expect(grpo.selective_log_softmax(logits.transpose(0, 1), index.T)[0], want)


@given(words)
def test_selective_log_softmax_adds_up_to_1_and_does_not_see_a_shift_of_the_logits(logits):
    """Σ_v p(v) = 1, and log p(z + c) = log p(z): logits have no zero point, 1000 does not overflow"""
    expect(log_softmax(logits).exp().sum(), 1.0)
    expect(log_softmax([z + 1000 for z in logits]), log_softmax(logits))


def test_entropy_from_logits_matches_the_worked_numbers():
    """H = -Σ p·log p: logits 2, 1, 0 (page 8)"""
    expect(entropy([2.0, 1.0, 0.0]), 0.8324, 5e-5)


@given(words)
def test_entropy_from_logits_matches_the_oracle(logits):
    """H = -Σ_v p_v·log p_v in nats"""
    expect(entropy(logits), -sum(math.exp(x) * x for x in oracle_log_softmax(logits)))


@given(words)
def test_entropy_from_logits_lies_between_0_and_log_V(logits):
    """0 <= H <= log V, and H = log V where all words are equally likely; H(z + c) = H(z)"""
    assert 0 <= entropy(logits) <= math.log(len(logits)) + TOLERANCE
    expect(entropy([logits[0]] * len(logits)), math.log(len(logits)))
    expect(entropy([z + 1000 for z in logits]), entropy(logits))


@given(words)
def test_entropy_from_logits_falls_with_the_logits_of_likely_words(logits):
    """∂H/∂z_v = -p_v·(log p_v + H), as a bonus for entropy needs it: p is not held fixed"""
    logps = oracle_log_softmax(logits)
    H = -sum(math.exp(x) * x for x in logps)
    expect(slope(entropy, f64(logits)), [-math.exp(x) * (x + H) for x in logps])


@beyond("empty")
@given(words)
def test_entropy_from_logits_of_a_word_that_is_ruled_out_counts_0(logits):
    """A logit of -inf: 0·log 0 = 0 in value and slope, log p = -inf, and the other words are as without it"""
    expect(entropy([*logits, -inf]), entropy(logits))
    expect(slope(entropy, f64([*logits, -inf])), [*slope(entropy, f64(logits)), 0.0])
    expect(log_softmax([*logits, -inf]), [*oracle_log_softmax(logits), -inf])


@functools.cache
def make_model(kind):
    """A model of random weights in float64, large enough that its distributions are not uniform."""
    import transformers
    sizes = dict(vocab_size=12, bos_token_id=None, eos_token_id=1, pad_token_id=0, num_hidden_layers=2,
                 hidden_size=16, num_attention_heads=4, max_position_embeddings=32)
    if kind == "Llama":
        sizes |= dict(intermediate_size=32, num_key_value_heads=2)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


prompt = st.lists(st.integers(2, 11), min_size=1, max_size=3)
prompts_and_answers = st.lists(
    st.tuples(prompt, st.lists(st.integers(1, 11), min_size=1, max_size=3)), min_size=1, max_size=3)


def padded(rows, junk=0):
    """Prompts padded on the left, answers on the right: ids and mask (B, L) of those, (B, T) of these."""
    L, T = (max(len(row[i]) for row in rows) for i in (0, 1))
    prompts = [[(junk, 0)] * (L - len(prompt)) + [(token, 1) for token in prompt] for prompt, _ in rows]
    answers = [[(token, 1) for token in answer] + [(junk, 0)] * (T - len(answer)) for _, answer in rows]
    return *torch.tensor(prompts).unbind(2), *torch.tensor(answers).unbind(2)


def oracle_logps(model, rows, temperature=1.0):
    """Log-prob and entropy of each real token; each answer has a pass of its own, without padding."""
    logps, entropies = [], []
    for prompt, answer in rows:
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        log_p = (logits / temperature).log_softmax(-1)                                          # (T, V)
        logps.append(log_p[range(len(answer)), answer])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


@pytest.mark.parametrize("kind", ["Llama", pytest.param("GPT2", marks=beyond("positions"))])
@with_options({}, dict(temperature=0.7), dict(temperature=0.7, compute_entropy=True))
@given(prompts_and_answers)
def test_per_token_logps_are_those_of_each_row_alone(kind, options, rows):
    """log π(o_t) = log softmax(logits / T)[o_t], H without gradient: no other row, no left padding is seen"""
    model, temperature = make_model(kind), options.get("temperature", 1.0)
    *_, mask = inputs = padded(rows)
    logps, entropies = grpo.per_token_logps(model, *inputs, **options)
    got, (want, H) = logps[mask == 1], oracle_logps(model, rows, temperature)
    expect(got, want, MODEL_TOLERANCE)
    if "compute_entropy" in options:
        expect(entropies[mask == 1], H, MODEL_TOLERANCE)
        expect(f64(entropies.requires_grad), 0.0)
    weights = list(model.parameters())
    mine, alone = (torch.autograd.grad(x.square().sum(), weights) for x in (got, want))
    for my_slope, slope_alone in zip(mine, alone):
        expect(my_slope, slope_alone, 100 * MODEL_TOLERANCE)


@given(prompt, st.lists(st.integers(0, 11), max_size=2))
def test_per_token_logps_add_up_to_1_over_the_vocabulary(prompt, answer):
    """Σ_v π(v | q, o_<t) = 1: the same answer with each word as its last"""
    rows = [(prompt, answer + [v]) for v in range(12)]
    logps, _ = grpo.per_token_logps(make_model("Llama"), *padded(rows))
    expect(logps[:, -1].exp().sum(), 1.0)


@beyond("padding")
@pytest.mark.parametrize("junk", [-9, 10**6])
@given(rows=prompts_and_answers)
def test_per_token_logps_are_0_at_padding_that_is_no_word(junk, rows):
    """Ids of -9 or a million under the mask change no log-prob; logps and entropies are 0 there"""
    *_, mask = padded(rows)
    logps, entropies = grpo.per_token_logps(make_model("Llama"), *padded(rows, junk), compute_entropy=True)
    want, no_entropies = grpo.per_token_logps(make_model("Llama"), *padded(rows))
    expect(logps, want * mask)
    assert not entropies[mask == 0].any() and no_entropies is None


@pytest.mark.errors
@pytest.mark.parametrize("argument, prompt_mask, completion_mask", [
    ("prompt_mask", [1, 1, 0], [1, 1, 1]), ("completion_mask", [0, 1, 1], [1, 0, 1]),
    ("completion_mask", [1, 1, 1], [0, 0, 1])])
def test_per_token_logps_want_no_padding_between_the_tokens(argument, prompt_mask, completion_mask):
    """The masks are the model's attention: a prompt that ends in padding, a hole in an answer: an error"""
    ids, mask = torch.tensor([[4, 5, 6]]), torch.tensor([[0, 1, 1]])
    with pytest.raises((AssertionError, ValueError), match=f"^{argument}: got"):
        grpo.per_token_logps(make_model("Llama"), ids, f64([prompt_mask]), ids, f64([completion_mask]))


@beyond("dtypes")
def test_per_token_logps_are_one_call_of_the_model_in_float32_or_wider():
    """bfloat16 weights: the softmax is float32. One pass without a cache, for the last T + 1 logits"""
    model, calls = copy.deepcopy(make_model("Llama")).bfloat16(), []

    def note(module, args, options, output):
        calls.append((options, output))

    model.register_forward_hook(note, with_kwargs=True)
    prompts, prompt_mask, ids, mask = padded([([4, 5], [7, 8, 9]), ([6], [1])])
    score = functools.partial(grpo.per_token_logps, model, prompts.int(), prompt_mask.bool())
    logps, H = score(ids.int(), mask.float(), compute_entropy=True)
    (called, output), = calls
    assert output.logits.shape == (2, 4, 12) and not called["use_cache"]
    assert logps.dtype == H.dtype == torch.float32
    want = output.logits[:1, :-1].float().log_softmax(-1).gather(2, ids[:1, :, None])[..., 0]
    expect(logps[:1], want, 1e-6)
    assert score(ids[:, :0], mask[:, :0])[0].shape == (2, 0)


# §4 Importance ratio and clip -------------------------------------------------------------------------------

SEQUENCE = dict(importance_sampling_level="sequence")                   # GSPO


def oracle_ratios(pairs, importance_sampling_level="token"):
    """The ratio of each token of an answer, from pairs of log π and log π_old."""
    logs = [p - q for p, q in pairs]
    if importance_sampling_level == "sequence":
        logs = [sum(logs) / len(logs) for _ in logs]
    return [math.exp(x) for x in logs]


@pytest.mark.parametrize("log_ratios, options, want", [
    ([0.10, 0.05, -0.10, 0.08, 0.02], {}, [1.1052, 1.0513, 0.9048, 1.0833, 1.0202]),            # page 1
    ([0.2] * 10, {}, [1.2214] * 10), ([0.2] * 10, SEQUENCE, [1.2214]),              # page 3: not e² = 7.39
    ([18.0, -18.0], {}, [math.exp(18), math.exp(-18)])], ids=str)                   # however far, no bound
def test_importance_ratio_matches_the_worked_numbers(log_ratios, options, want):
    """ρ = exp(log π - log π_old); of a sequence exp(mean of log ρ over its tokens)"""
    old = torch.full((1, len(log_ratios)), -1.0, dtype=torch.float64)
    got = grpo.importance_ratio(old + f64(log_ratios), old, torch.ones_like(old), **options)
    expect(got / f64(want), [[1.0] * len(want)], 5e-5)


@given(answers(logp, logp))
def test_importance_ratio_matches_the_oracle(rows):
    """ρ = exp(log π - log π_old) at each token (DeepSeekMath eq. 3); ∂ρ/∂log π = ρ: at ρ = 1 it still teaches"""
    logps, old, mask = columns(rows)
    rho = lambda logps: grpo.importance_ratio(logps, old, mask)
    want = [ratio for row in rows for ratio in oracle_ratios(row)]
    expect(rho(logps)[mask == 1], want)
    expect(slope(rho, logps)[mask == 1], want)


@given(answers(logp, logp))
def test_importance_ratio_of_a_sequence_matches_the_oracle(rows):
    """s = exp(1/|o|·Σ log ρ_t), one for each answer, (B, 1) (GSPO eq. 7); ∂s/∂log π_t = s/|o|"""
    logps, old, mask = columns(rows)
    s = lambda logps: grpo.importance_ratio(logps, old, mask, **SEQUENCE)
    want = [oracle_ratios(row, "sequence") for row in rows]
    expect(s(logps), [ratios[:1] for ratios in want])
    expect(slope(s, logps)[mask == 1], [ratio / len(ratios) for ratios in want for ratio in ratios])


@with_options({}, SEQUENCE)
@given(answers(logp, logp, logp))
def test_importance_ratio_is_1_on_policy_and_multiplies_over_two_steps(options, rows):
    """ρ(π/π) = 1, ρ(π/π_1)·ρ(π_1/π_0) = ρ(π/π_0), and so ρ(π/π_0)·ρ(π_0/π) = 1"""
    new, old, oldest, mask = columns(rows)
    at_tokens = lambda *pair: grpo.importance_ratio(*pair, mask, **options).expand_as(mask)[mask == 1]
    expect(at_tokens(new, new), [1.0] * sum(map(len, rows)))
    expect(at_tokens(new, old) * at_tokens(old, oldest), at_tokens(new, oldest))


@given(answers(logp, logp))
def test_importance_ratio_of_a_sequence_does_not_see_its_length(rows):
    """s(o o) = s(o): log ratios that come twice give the ratio that they give once, and are clipped alike"""
    once, twice = columns(rows), columns([row + row for row in rows])
    expect(grpo.importance_ratio(*twice, **SEQUENCE), grpo.importance_ratio(*once, **SEQUENCE))


@given(distribution, distribution, st.tuples(number, number, number))
def test_importance_ratio_turns_means_under_the_old_policy_into_means_under_the_new(new, old, f):
    """Σ_v π_old(v)·ρ(v)·f(v) = Σ_v π(v)·f(v), whatever f is: importance sampling"""
    new, old, f = f64([new]), f64([old]), f64([f])
    rho = grpo.importance_ratio(new.log(), old.log(), torch.ones(1, 3))
    expect((old * rho * f).sum(), (new * f).sum())


@pytest.mark.parametrize("low, high, epsilons", [(0.2, 0.2, ()), (0.1, 0.55, (0.1, 0.55))], ids=str)    # DAPO
@given(ratio)
def test_clip_ratio_matches_the_oracle_and_twice_is_once(low, high, epsilons, rho):
    """clip(ρ) = ρ, slope 1, in 1 - ε_low ... 1 + ε_high, else the nearer end, slope 0; clip(clip) = clip"""
    clip, rho = lambda x: grpo.clip_ratio(x, *epsilons), f64(rho)
    want = [1 - low, 0.0] if rho < 1 - low else [1 + high, 0.0] if rho > 1 + high else [rho, 1.0]
    expect(torch.stack([clip(rho), slope(clip, rho)]), want)
    expect(clip(clip(rho)), want[0])


def oracle_surrogate(rho, A, epsilon_low=0.2, epsilon_high=0.2, delta=inf):
    clipped = min(max(rho, 1 - epsilon_low), 1 + epsilon_high)
    return -min(min(rho, delta) * A, clipped * A)


def surrogate(rho, A, **options):
    """[l, ∂l/∂ρ] of one token."""
    rho, loss = f64([[rho]]), lambda rho: grpo.clipped_surrogate_loss(rho, f64([[A]]), **options)
    return torch.cat([loss(rho), slope(loss, rho)], 1)[0]


@pytest.mark.parametrize("rho, A, options, want", [                                             # page 3
    (0.5, 1.0, {}, [-0.5, -1.0]), (1.1, 1.0, {}, [-1.1, -1.0]), (1.5, 1.0, {}, [-1.2, 0.0]),    # far enough up
    (0.5, -1.0, {}, [0.8, 0.0]), (1.1, -1.0, {}, [1.1, 1.0]), (1.5, -1.0, {}, [1.5, 1.0]),      # 0.5: down
    (0.5, 1.0, dict(epsilon_low=0.9), [-0.5, -1.0]), (1.25, 1.0, dict(epsilon_high=0.28), [-1.25, -1.0]),
    (50.0, -1.0, {}, [50.0, 1.0]), (50.0, -1.0, dict(delta=4.0), [4.0, 0.0]),
    (50.0, 1.0, dict(delta=4.0), [-1.2, 0.0]), (3.0, -1.0, dict(delta=4.0), [3.0, 1.0]),
    (1.2214, 1.24, {}, [-1.488, 0.0]), (1.2214, -1.24, {}, [1.5145, 1.24]),
    (1.1052, 1.225, {}, [-1.3539, -1.225]), (1.0513, -1.225, {}, [1.2878, 1.225])], ids=str)    # page 1
def test_clipped_surrogate_loss_matches_the_worked_numbers(rho, A, options, want):
    """l = -min(min(ρ, δ)·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A), and its slope ∂l/∂ρ"""
    expect(surrogate(rho, A, **options), want, 5e-5)


@with_options({}, dict(epsilon_low=0.1, epsilon_high=0.55), dict(delta=1.45))
@given(st.lists(st.tuples(ratio, ratio, advantage), min_size=1, max_size=3))
def test_clipped_surrogate_loss_matches_the_oracle(options, rows):
    """l = -min(ρ·A, clip(ρ, 1 - ε_low, 1 + ε_high)·A) (DeepSeekMath eq. 3); δ: min(ρ, δ)·A comes first"""
    first, second, A = f64(rows).T.unsqueeze(2)                         # two tokens of each answer, its advantage
    want = [[oracle_surrogate(x, A, **options), oracle_surrogate(y, A, **options)] for x, y, A in rows]
    expect(grpo.clipped_surrogate_loss(torch.cat([first, second], 1), A, **options), want)


@given(ratio, advantage)
def test_clipped_surrogate_loss_has_no_slope_only_where_the_token_has_moved_enough(rho, A):
    """Without δ ∂l/∂ρ = 0 where A > 0 and ρ > 1 + ε, or A < 0 and ρ < 1 - ε; else -A: the way back is open"""
    enough = A > 0 and rho > 1.2 or A < 0 and rho < 0.8
    expect(surrogate(rho, A)[1], 0.0 if enough else -A)


@given(ratio, advantage)
def test_clipped_surrogate_loss_never_promises_more_than_the_plain_one(rho, A):
    """Without δ l >= -ρ·A, the loss without a clip: never better than that, and equal inside the range"""
    loss, plain = surrogate(rho, A)[0], -rho * A
    assert loss >= plain - TOLERANCE
    if 0.8 < rho < 1.2:
        expect(loss, plain)


def policy_loss(name, logps, rho, A):
    """One of the three; "cispo" alone takes log π, too."""
    return getattr(grpo, name)(*[logps] * (name == "cispo_loss"), rho, A)


@pytest.mark.parametrize("name", ["clipped_surrogate_loss", "cispo_loss", "sapo_loss"])
@given(logp, ratio, advantage, grid(0, 4, 0.5))
def test_a_weight_of_a_token_goes_into_its_advantage(name, p, rho, A, w):
    """w·l(ρ, A) = l(ρ, w·A) for w >= 0: an entropy mask, a sampler's correction multiply the advantages"""
    loss = lambda A: policy_loss(name, f64([[p]]), f64([[rho]]), f64([[A]]))
    expect(loss(w * A), w * loss(A))


# §5 KL ------------------------------------------------------------------------------------------------------

def oracle_kl(p, q, estimator="k3"):
    k1 = p - q
    return {"k1": k1, "k2": k1 * k1 / 2, "k3": math.exp(-k1) - 1 + k1}[estimator]


def kl(p, q, **options):
    return grpo.kl_estimate(f64(p), f64(q), **options)


every_estimator = with_options({}, *(dict(estimator=name) for name in ("k1", "k2", "k3")))


@pytest.mark.parametrize("options, want", [                                                 # page 9
    (dict(estimator="k1"), [0.6931, 0.0, -0.6931]), (dict(estimator="k2"), [0.2402, 0.0, 0.2402]),
    (dict(estimator="k3"), [0.1931, 0.0, 0.3069]), ({}, [0.1931, 0.0, 0.3069])], ids=str)
def test_kl_estimate_matches_the_worked_numbers(options, want):
    """π = (1/2, 1/4, 1/4), π_ref = (1/4, 1/4, 1/2): k1 = log π/π_ref, k2 = k1²/2, k3 = exp(-k1) + k1 - 1"""
    expect(kl(f64([0.5, 0.25, 0.25]).log(), f64([0.25, 0.25, 0.5]).log(), **options), want, 5e-5)


@every_estimator
@given(st.lists(st.tuples(grid(-20, 0, 0.125), grid(-20, 0, 0.125)), min_size=1, max_size=3))
def test_kl_estimate_matches_the_oracle(options, tokens):
    """k1 = log π - log π_ref, k2 = k1²/2, k3 = exp(-k1) + k1 - 1 (DeepSeekMath eq. 4), however far π is"""
    expect(kl(*zip(*tokens), **options), [oracle_kl(p, q, **options) for p, q in tokens])


@given(logp, logp)
def test_kl_estimate_k3_is_never_negative_and_0_only_at_equality(p, q):
    """k3 >= 0, and k3 = 0 <=> π = π_ref, where its slope is 0, too"""
    assert kl([p], [q]) > 0 or p == q
    expect(kl([p], [p]), [0.0], 0)
    expect(slope(lambda x: grpo.kl_estimate(x, f64([p])), f64([p])), [0.0], 0)


@beyond("equal")
@given(st.integers(-1000, 1000), st.sampled_from([1e-8, 1e-6, 1e-4, 1e-2]), st.floats(-3, 0, width=32))
def test_kl_estimate_k3_is_never_negative_in_float32(n, scale, p):
    """expm1(-k1) + k1 >= 0 to the last bit: exp(-k1) + k1 - 1 is not, where π is close to π_ref"""
    k3 = grpo.kl_estimate(torch.tensor(p + n * scale / 100), torch.tensor(p))
    expect(k3.clamp(max=0), 0.0, 0)


@with_options({}, dict(estimator="k1"))
@given(distribution, distribution)
def test_kl_estimate_k1_and_k3_have_the_kl_as_their_mean(options, p, q):
    """Σ_v π(v)·k1(v) = Σ_v π(v)·k3(v) = KL(π‖π_ref): over samples both are right on average"""
    want = sum(x * math.log(x / y) for x, y in zip(p, q))
    expect(f64(p) @ kl(f64(p).log(), f64(q).log(), **options), want)


@pytest.mark.parametrize("what", ["k1", "k2", "k3", "ρ·k3"])
@given(distribution, distribution)
def test_kl_estimate_teaches_what_the_table_says(what, p, q):
    """Samples held fixed: E ∇k1 = 0, E ∇k2 = E ∇(ρ·k3) = ∇KL(π‖π_ref), E ∇k3 = ∇KL(π_ref‖π)"""
    KL = sum(x * math.log(x / y) for x, y in zip(p, q))
    to_ref = [x * (math.log(x / y) - KL) for x, y in zip(p, q)]         # ∇KL(π‖π_ref) by the logits
    from_ref = [x - y for x, y in zip(p, q)]                            # ∇KL(π_ref‖π)
    want = {"k1": [0.0] * 3, "k2": to_ref, "k3": from_ref, "ρ·k3": to_ref}[what]
    options = dict(estimator=what) if what in ("k1", "k2") else {}

    def mean_over_samples(logits):
        logps = logits.log_softmax(0)
        k = grpo.kl_estimate(logps, f64(q).log(), **options)
        return f64(p) * (k * (logps - logps.detach()).exp() if what == "ρ·k3" else k)

    expect(slope(mean_over_samples, f64(p).log()), want)


# §6 The aggregations ----------------------------------------------------------------------------------------

LOSS_TYPES, losses = ["grpo", "bnpo", "dr_grpo", "dapo"], answers(reward)
every_loss_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)
type_of_a_whole_batch = pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])  # bnpo: a part


def of_type(loss_type, T_max=7):
    """With the limit of sampling for the one that needs it."""
    more = dict(max_completion_length=T_max) if loss_type == "dr_grpo" else {}
    return dict(loss_type=loss_type) | more


def counts_of(rows):
    """What each part of a batch of these rows is told of the whole."""
    return dict(num_rows_in_batch=len(rows), num_items_in_batch=sum(map(len, rows)))


def aggregate(rows, loss_type, T_max=7, **counts):
    loss, mask = columns(rows)
    return grpo.aggregate(loss, mask, **of_type(loss_type, T_max), **counts)


def oracle_weights(lengths, loss_type, T_max=7, num_rows_in_batch=None, num_items_in_batch=None):
    """What a token of each answer weighs: ∂loss/∂l."""
    B, own = num_rows_in_batch or len(lengths), max(sum(lengths), 1)
    if loss_type == "grpo":
        return [1 / (B * max(n, 1)) for n in lengths]
    if loss_type == "dr_grpo":
        return [1 / (B * T_max) for n in lengths]
    return [1 / (num_items_in_batch or own) if loss_type == "dapo" else 1 / own for n in lengths]


@pytest.mark.parametrize("loss_type, want, of_short, of_long", [
    ("grpo", 14.0, 1 / 8, 1 / 32), ("bnpo", 17.3, 1 / 20, 1 / 20),
    ("dr_grpo", 8.65, 1 / 40, 1 / 40), ("dapo", 17.3, 1 / 20, 1 / 20)])
def test_aggregate_matches_the_worked_numbers(loss_type, want, of_short, of_long):
    """2, 8, 2, 8 tokens, token t of answer i has the loss 8i + t: value (page 10), weights (page 4)"""
    rows = [[(8.0 * i + t,) for t in range(n)] for i, n in enumerate((2, 8, 2, 8))]
    loss, mask = columns(rows)
    of = lambda x: grpo.aggregate(x, mask, **of_type(loss_type, 10))
    expect(of(loss), want)
    expect(slope(of, loss), mask * f64([[of_short], [of_long]] * 2))


@every_loss_type
@with_options({}, dict(num_rows_in_batch=20, num_items_in_batch=40),
             dict(num_rows_in_batch=1, num_items_in_batch=1))
@given(losses)
def test_aggregate_matches_the_oracle(options, loss_type, rows):
    """loss = Σ l·w: grpo 1/(B·n_i), dr_grpo 1/(B·T_max), dapo 1/N, bnpo 1/(own tokens); B, N given or own"""
    weights = oracle_weights(list(map(len, rows)), loss_type, **options)
    want = sum(w * loss for row, w in zip(rows, weights) for (loss,) in row)
    expect(aggregate(rows, loss_type, **options), want)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo"])
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), reward)
def test_aggregate_of_a_constant_is_that_constant(loss_type, lengths, c):
    """l = c at every token, none of the answers empty => loss = c: these three are means, dr_grpo is not"""
    expect(aggregate([[(c,)] * n for n in lengths], loss_type), c)


@given(st.lists(st.tuples(reward, reward, reward), min_size=1, max_size=3))
def test_aggregate_is_one_and_the_same_at_equal_lengths(rows):
    """n_1 = ... = n_B = T_max => all four are the mean over tokens"""
    mean = sum(map(sum, rows)) / (3 * len(rows))
    tokens = [[(loss,) for loss in row] for row in rows]
    expect(torch.stack([aggregate(tokens, name, T_max=3) for name in LOSS_TYPES]), [mean] * 4)


@type_of_a_whole_batch
@given(st.lists(losses, min_size=1, max_size=3), st.randoms())
def test_aggregate_of_microbatches_adds_up_to_the_whole(loss_type, parts, random):
    """Σ aggregate(part; rows and tokens of the whole) = aggregate(whole), for any split; not bnpo"""
    whole = random.sample(sum(parts, []), sum(map(len, parts)))
    of_parts = sum(aggregate(part, loss_type, **counts_of(whole)) for part in parts)
    expect(of_parts, aggregate(whole, loss_type))


@beyond("empty")
@pytest.mark.parametrize("loss_type, want", [                                                   # page 10
    ("grpo", 2 / 3), ("bnpo", 1), ("dr_grpo", 1 / 3), ("dapo", 1)])
def test_aggregate_counts_an_answer_without_a_token(loss_type, want):
    """Lengths 2, 0, 8: it adds 0 and is one of the three rows. Only such answers, or none: 0, not 0/0"""
    expect(aggregate([[(1.0,)] * 2, [], [(1.0,)] * 8], loss_type, T_max=10), want)
    for B in (3, 0):
        empty = torch.zeros(B, 8)
        expect(grpo.aggregate(empty + 1, empty, **of_type(loss_type, 10)), 0.0)


@beyond("shapes")
@every_loss_type
@given(answers(reward))
def test_aggregate_of_one_loss_for_each_answer_is_that_of_its_tokens(loss_type, rows):
    """l of shape (B, 1), as GSPO has it, is the loss of each token of its answer"""
    loss, mask = columns(rows)
    of = lambda x: grpo.aggregate(x, mask, **of_type(loss_type))
    expect(of(loss[:, :1]), of(loss[:, :1].expand_as(mask)))


# §8 Two other policy terms, before the loss that is made of them --------------------------------------------

@pytest.mark.parametrize("name, want", [                                                        # page 13
    ("clipped_surrogate_loss", [0.5, 1.0, 0.0, 0.0]), ("cispo_loss", [0.5, 1.0, 1.5, 5.0]),
    ("sapo_loss", [0.47, 1.0, 1.41, 0.1596])])
def test_a_policy_loss_weights_a_token_as_worked(name, want):
    """-∂l/∂log π at A = 1, ρ = 0.5, 1, 1.5, 6: ρ or 0; CISPO min(ρ, 5); SAPO 4ρ·σ(ρ - 1)·(1 - σ(ρ - 1))"""
    logps = f64([[0.5, 1.0, 1.5, 6.0]]).log()
    loss = lambda logps: policy_loss(name, logps, logps.exp(), f64([[1.0]]))
    expect(-slope(loss, logps), [want], 5e-5)


@with_options({}, dict(epsilon_high=1.3))
@given(logp, ratio, advantage)
def test_cispo_loss_matches_the_oracle_and_takes_the_ratio_as_a_constant(options, p, rho, A):
    """l = -sg[min(ρ, ε_high)]·A·log π (MiniMax-M1 eq. 4, 5): ∂l/∂ρ = 0, ∂l/∂log π = -min(ρ, ε_high)·A"""
    weight = min(rho, options.get("epsilon_high", 5.0))
    loss = lambda p, rho: grpo.cispo_loss(p, rho, f64([[A]]), **options)
    p, rho = f64([[p]]), f64([[rho]])
    expect(loss(p, rho), -weight * A * p)
    expect(slope(lambda x: loss(x, rho), p), [[-weight * A]])
    expect(slope(lambda x: loss(p, x), rho), [[0.0]])


def oracle_sapo(rho, A, temperature_pos=1.0, temperature_neg=1.05):
    tau = temperature_pos if A > 0 else temperature_neg
    return -4 / tau * A / (1 + math.exp(-tau * (rho - 1)))


@with_options({}, dict(temperature_pos=0.5, temperature_neg=2.0))
@given(st.lists(st.tuples(ratio, advantage), min_size=1, max_size=3))
def test_sapo_loss_matches_the_oracle(options, tokens):
    """l = -σ(τ(ρ - 1))·4/τ·A, τ by the sign of each token's A (SAPO eq. 5-6); ∂l/∂ρ = -A at ρ = 1, for any τ"""
    rho, A = f64(tokens).T
    loss = lambda rho: grpo.sapo_loss(rho, A[None], **options)
    expect(loss(rho[None]), [[oracle_sapo(*token, **options) for token in tokens]])
    expect(slope(loss, torch.ones_like(A)[None]), -A[None])


@given(ratio, advantage.filter(bool))
def test_sapo_loss_fades_and_is_never_cut_off(rho, A):
    """0 < ∂l/∂ρ / -A <= 1, with 1 at ρ = 1 alone: a sigmoid in the place of the clip"""
    share = slope(lambda x: grpo.sapo_loss(x, f64([[A]])), f64([[rho]])) / -A
    assert 0 < share < 1 or rho == share == 1, share


# §7 The loss, made of all of them ---------------------------------------------------------------------------

token = st.tuples(logp, logp, logp)                                     # log π, log π_old, log π_ref


def with_advantages(rows):
    return [[(*token, A) for token in answer] for A, answer in rows]


rated = st.lists(st.tuples(advantage, st.lists(token, min_size=1, max_size=4)), min_size=1, max_size=3).map(
    with_advantages)                                                    # each token has its answer's A
far = answers(*[grid(-19, 0, 0.125)] * 3, advantage)                    # here each token has an A of its own
CISPO, SAPO = dict(policy_loss="cispo", epsilon_high=2.0), dict(policy_loss="sapo")
BIAS = dict(beta=0.1, use_bias_correction_kl=True)
one_option = with_options(
    {}, *map(of_type, ["grpo", "bnpo", "dr_grpo"]), dict(epsilon_low=0.1, epsilon_high=0.55), dict(delta=1.45),
    dict(beta=0.1), dict(beta=0.1, loss_type="grpo"), BIAS, SEQUENCE, SEQUENCE | BIAS, CISPO, SAPO,
    SEQUENCE | dict(loss_type="grpo"), SEQUENCE | CISPO, SAPO | dict(loss_type="grpo"), SEQUENCE | SAPO)
any_options = st.fixed_dictionaries(dict(
    policy_loss=st.sampled_from(["clip", "cispo", "sapo"]), loss_type=st.sampled_from(LOSS_TYPES),
    importance_sampling_level=st.sampled_from(["token", "sequence"]), epsilon_low=st.sampled_from([0.2, 0.1]),
    epsilon_high=st.sampled_from([None, 0.55]), delta=st.sampled_from([None, 1.7]),
    beta=st.sampled_from([0.0, 0.1]), use_bias_correction_kl=st.booleans(), max_completion_length=st.just(7)))


def loss_of(rows, logps=None, by_token=False, **options):
    """grpo_loss of rows of tokens (log π, log π_old, log π_ref, A)."""
    own, old, ref, A, mask = columns(rows, width=4)
    logps, A = own if logps is None else logps, A if by_token else A[:, 0]
    constants = dict(old_logps=old, ref_logps=ref) if "beta" in options else dict(old_logps=old)
    return grpo.grpo_loss(logps, A, mask, **constants, **options)


def slopes_of(rows, **options):
    """∂loss/∂log π of each real token."""
    logps, *_, mask = columns(rows, width=4)
    return slope(lambda x: loss_of(rows, x, **options)[0], logps)[mask == 1]


def oracle_loss(rows, at=None, policy_loss="clip", importance_sampling_level="token", epsilon_low=0.2,
                epsilon_high=None, delta=None, beta=0.0, use_bias_correction_kl=False, loss_type="dapo",
                max_completion_length=7):
    """The loss and its metrics, token by token. at: rows before a move, from which CISPO's weights come."""
    weights = oracle_weights(list(map(len, rows)), loss_type, max_completion_length)
    N = sum(map(len, rows))
    loss = low = high = mean_kl = 0.0
    for row, fixed, w in zip(rows, at or rows, weights):
        ratios = oracle_ratios([token[:2] for token in row], importance_sampling_level)
        constants = oracle_ratios([token[:2] for token in fixed], importance_sampling_level)
        for (p, _, ref, A), rho, constant in zip(row, ratios, constants):
            if policy_loss == "clip":
                lowest, highest = 1 - epsilon_low, 1 + (epsilon_high or epsilon_low)
                policy = oracle_surrogate(rho, A, epsilon_low, epsilon_high or epsilon_low, delta or inf)
            elif policy_loss == "cispo":
                lowest, highest = 0.0, epsilon_high or 5.0
                policy = -min(constant, highest) * A * p
            else:
                lowest, highest = 0.0, inf
                policy = oracle_sapo(rho, A)
            k3 = oracle_kl(p, ref) * (rho if use_bias_correction_kl else 1.0)
            loss += w * (policy + beta * k3)
            mean_kl += k3 / N
            low += (rho < lowest and A < 0) / N
            high += (rho > highest and A > 0) / N
    return loss, {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high,
                  "clip_ratio/region_mean": low + high, "kl": mean_kl}


def oracle_slopes(rows, **options):
    """∂loss/∂log π of each token by central differences; CISPO's weight, a constant, does not move."""
    def loss(i, t, h):
        (p, *rest), moved = rows[i][t], list(map(list, rows))
        moved[i][t] = (p + h, *rest)
        return oracle_loss(moved, rows, **options)[0]

    places = [(i, t) for i, row in enumerate(rows) for t in range(len(row))]
    return [(loss(i, t, 1e-6) - loss(i, t, -1e-6)) / 2e-6 for i, t in places]


def on_policy(rows, advantages, **options):
    """The loss of rows of log-probs at ρ = 1, and its slope: [loss, ∂loss/∂log π of each real token]."""
    logps, mask = columns(rows)
    loss = lambda x: grpo.grpo_loss(x, f64(advantages), mask, **options)[0]
    return torch.cat([loss(logps)[None], slope(loss, logps)[mask == 1]])


@pytest.mark.parametrize("options, want, want_by_default", [                                    # page 1
    (dict(loss_type="grpo"), -0.010313, -0.008417), (dict(loss_type="bnpo"), -0.092608, -0.075584),
    (dict(), -0.092608, -0.075584), (of_type("dr_grpo", 6), -0.077174, -0.062986)], ids=str)
def test_grpo_loss_matches_the_worked_numbers(options, want, want_by_default):
    """Answers of 5, 4, 6 tokens, A = 1.225, -1.225, 0, then the default's ±0.9998: log ratios to one loss"""
    log_ratios = [[10, 5, -10, 8, 2], [-5, 10, -8, 5], [8, -5, 10, 5, -8, 10]]          # in hundredths
    logps, mask = columns([[(x / 100,) for x in row] for row in log_ratios])
    loss = lambda A: grpo.grpo_loss(logps, f64(A), mask, old_logps=0 * logps, **options)[0]
    expect(loss([1.225, -1.225, 0.0]), want, 5e-7)
    expect(loss([0.99980004, -0.99980004, 0.0]), want_by_default, 5e-7)


@pytest.mark.parametrize("lengths, loss_type, want", [                                          # page 2
    ([3, 3], "grpo", 0.0), ([2, 4], "grpo", 0.0), ([4, 2], "grpo", 0.0),
    ([3, 3], "dapo", 0.0), ([2, 4], "dapo", 1 / 3), ([4, 2], "dapo", -1 / 3)], ids=str)
def test_grpo_loss_on_policy_is_worked_out_from_lengths_alone(lengths, loss_type, want):
    """A = +1, -1, ρ = 1: loss = Σ -A·w, 0 for grpo or equal lengths; a token's gradient is -A·w, not 0"""
    got = on_policy([[(-1.0,)] * n for n in lengths], [1.0, -1.0], loss_type=loss_type)
    weights = oracle_weights(lengths, loss_type)
    expect(got, [want, *[-weights[0]] * lengths[0], *[weights[1]] * lengths[1]])


@one_option
@given(rated)
def test_grpo_loss_matches_the_oracle(options, rows):
    """loss = aggregate(l(ρ, A) + β·KL), with none, one or a few options, against a loop over tokens"""
    expect(loss_of(rows, **options)[0], oracle_loss(rows, **options)[0])


@pytest.mark.parametrize("by_token, rows", [(False, rated), pytest.param(True, far, marks=beyond("shapes"))],
                         ids=["A of answers", "A of tokens"])
@settings(max_examples=max(DRAWS, 200))
@given(data=st.data(), options=any_options)
def test_grpo_loss_matches_the_oracle_with_any_options(by_token, rows, data, options):
    """loss = aggregate(l(ρ, A) + β·KL), whatever is combined; A (B,) or (B, T); no bound up to log ρ = ±19"""
    rows = data.draw(rows, "rows")
    expect(loss_of(rows, by_token=by_token, **options)[0], oracle_loss(rows, **options)[0])


@one_option
@given(rated)
def test_grpo_loss_has_the_slope_of_the_oracle(options, rows):
    """∂loss/∂log π of every token, by finite differences of the loop over tokens"""
    expect(slopes_of(rows, **options), oracle_slopes(rows, **options), 1e-6)


@beyond("defaults")
@pytest.mark.parametrize("options, epsilon_high", [
    ({}, 0.2), (dict(epsilon_low=0.1), 0.1), (dict(policy_loss="cispo"), 5.0),
    (dict(policy_loss="cispo", epsilon_low=0.1), 5.0)], ids=str)
@given(rated)
def test_grpo_loss_without_epsilon_high_takes_epsilon_low_or_5_with_cispo(options, epsilon_high, rows):
    """ε_high = None is ε_low with "clip"; with "cispo", where it caps ρ itself, it is 5"""
    (loss, metrics), (want, metrics_wanted) = (
        loss_of(rows, **options), loss_of(rows, epsilon_high=epsilon_high, **options))
    expect(loss, want)
    expect(f64(list(metrics.values())), list(metrics_wanted.values()))
    expect(slopes_of(rows, **options), slopes_of(rows, epsilon_high=epsilon_high, **options))


@with_options({}, *map(of_type, ["grpo", "bnpo", "dr_grpo"]), CISPO, SAPO, SEQUENCE)
@given(answers(logp), st.data())
def test_grpo_loss_on_policy_has_the_gradient_of_reinforce(options, rows, data):
    """ρ = 1: ∂loss/∂log π_t = -A·w_t, of gspo, cispo, sapo, too; the value of "clip" is Σ -A·w"""
    A = data.draw(st.lists(advantage, min_size=len(rows), max_size=len(rows)), "advantages")
    weights = oracle_weights(list(map(len, rows)), options.get("loss_type", "dapo"))
    want = [-a * w for a, w, row in zip(A, weights, rows) for _ in row]
    value, *slopes = on_policy(rows, A, **options)
    expect(torch.stack(slopes), want)
    if "policy_loss" not in options:
        expect(value, sum(want))


@given(st.lists(st.tuples(logit, reward), min_size=2, max_size=3), st.integers(2, 3))
def test_grpo_loss_has_the_gradient_of_the_mean_reward_over_all_groups(words, G):
    """Σ π(group)·∇loss = -(G - 1)/G·∇E r over all V^G groups of one-token answers, on-policy, A = r - mean"""
    logits, rewards = f64(words).T

    def mean_loss(logits):
        logps, total = logits.log_softmax(0), 0.0
        for group in itertools.product(range(len(words)), repeat=G):    # which word each of the G answers is
            of_group = logps[list(group)]
            A = grpo.group_advantages(rewards[list(group)], G, scale_rewards="none")
            loss, _ = grpo.grpo_loss(of_group[:, None], A, torch.ones(G, 1), loss_type="grpo")
            total += of_group.detach().sum().exp() * loss               # the samples do not know of θ
        return total

    slope_of_mean_reward = slope(lambda logits: logits.softmax(0) @ rewards, logits)
    expect(slope(mean_loss, logits), -(G - 1) / G * slope_of_mean_reward)


@one_option
@given(answers(logp, advantage))
def test_grpo_loss_without_old_logps_takes_those_of_the_policy(options, rows):
    """old_logps = None is old_logps = log π, held fixed: on-policy it need not be given"""
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
@with_options({}, CISPO, SAPO, SEQUENCE | BIAS)
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
    """low: A < 0, ρ below the range; high: A > 0, ρ above it (cispo has a cap alone, sapo neither); both; mean kl"""
    want = oracle_loss(rows, **options)[1]
    metrics = {name: x for name, x in loss_of(rows, **options)[1].items() if name in want}
    expect(f64(list(metrics.values())), [want[name] for name in metrics])


kinds_of_loss = with_options({}, SEQUENCE, CISPO, SAPO)
batch_in_parts = given(st.lists(rated, min_size=1, max_size=3))


@type_of_a_whole_batch
@kinds_of_loss
@batch_in_parts
def test_grpo_loss_of_microbatches_adds_up_to_the_whole(options, loss_type, parts):
    """Σ loss(part; rows and tokens of the whole) = loss(whole), whatever the split; not bnpo"""
    whole, options = sum(parts, []), dict(beta=0.1) | options | of_type(loss_type)
    of_parts = [loss_of(part, **options, **counts_of(whole))[0] for part in parts]
    expect(sum(of_parts), loss_of(whole, **options)[0])


@type_of_a_whole_batch
@kinds_of_loss
@batch_in_parts
def test_grpo_loss_of_microbatches_has_the_slope_of_the_whole(options, loss_type, parts):
    """∂loss(part; rows and tokens of the whole) = ∂loss(whole) at each token of the part; not bnpo"""
    whole, options = sum(parts, []), dict(beta=0.1) | options | of_type(loss_type)
    of_parts = [slopes_of(part, **options, **counts_of(whole)) for part in parts]
    expect(torch.cat(of_parts), slopes_of(whole, **options))


@beyond("metrics")
@type_of_a_whole_batch
@kinds_of_loss
@batch_in_parts
def test_grpo_loss_metrics_of_microbatches_add_up_to_those_of_the_whole(options, loss_type, parts):
    """Σ metric(part; rows and tokens of the whole) = metric(whole): shares of all tokens"""
    whole, options = sum(parts, []), dict(beta=0.1) | options | of_type(loss_type)
    of_parts = [loss_of(part, **options, **counts_of(whole))[1] for part in parts]
    want = loss_of(whole, **options)[1]
    expect(f64([sum(metrics[name] for metrics in of_parts) for name in want]), list(want.values()))


@beyond("empty")
@every_loss_type
@with_options({}, SEQUENCE, CISPO, SAPO, SEQUENCE | BIAS, dict(beta=0.0))
@given(st.lists(st.lists(st.tuples(logp, logp, logp, advantage), max_size=3), max_size=3))
def test_grpo_loss_counts_an_answer_without_a_token(options, loss_type, rows):
    """It is one of grpo's and dr_grpo's rows, without gradient, in no metric; no token at all: 0"""
    options = dict(beta=0.1) | options | of_type(loss_type)
    (loss, got), (want, metrics) = loss_of(rows, by_token=True, **options), oracle_loss(rows, **options)
    expect(loss, want)
    expect(f64(list(got.values())), list(metrics.values()))
    assert list(got) == list(metrics) and set(map(type, got.values())) == {float}
    expect(slopes_of(rows, by_token=True, **options), oracle_slopes(rows, **options), 1e-6)
    logps, *_, mask = columns(rows, width=4)
    at_padding = slope(lambda x: loss_of(rows, x, by_token=True, **options)[0], logps)[mask == 0]
    expect(at_padding, torch.zeros_like(at_padding))


# §8 Process supervision, and two rewards that read a text ---------------------------------------------------

step = st.tuples(reward, st.integers(0, 3))                             # its reward, and its last token
no_step = st.tuples(st.just(nan), st.sampled_from([-7, 0, 99]))         # NaN: there is none, wherever it ends
solutions = st.lists(st.tuples(st.integers(1, 4), step | no_step, step), min_size=4, max_size=4)   # length


def process(solutions, G=2, **options):
    """(B, T): the advantages of the tokens of solutions, each its length and its graded steps."""
    mask = f64([[float(t < n) for t in range(6)] for n, *_ in solutions])
    grades = f64([[reward for reward, _ in steps] for _, *steps in solutions])
    ends = torch.tensor([[end for _, end in steps] for _, *steps in solutions])
    return grpo.process_advantages(grades, ends, mask, G, **options)


def oracle_process(solutions, correction=1, eps=1e-4):
    want = [[0.0] * 6 for _ in solutions]
    for first in (0, 2):
        graded = [(i, end, r) for i in (first, first + 1) for r, end in solutions[i][1:] if not math.isnan(r)]
        mean, std = oracle_stats([r for _, _, r in graded], correction)
        for i, end, r in graded:
            for t in range(min(end + 1, solutions[i][0])):
                want[i][t] += (r - mean) / (std + eps)
    return want


@pytest.mark.parametrize("solutions, want", [                                                   # page 11
    ([(6, (1, 1), (1, 3), (1, 5)), (4, (1, 1), (0, 3), (nan, -7))],
     [[1.5, 1.5, 1.0, 1.0, 0.5, 0.5], [-1.5, -1.5, -2.0, -2.0, 0.0, 0.0]]),
    ([(6, (1, 1), (1, 3), (1, 5)), (4, (0, 1), (1, 3), (nan, 99))],
     [[1.5, 1.5, 1.0, 1.0, 0.5, 0.5], [-1.5, -1.5, 0.5, 0.5, 0.0, 0.0]])], ids=["carry", "wrong first"])
def test_process_advantages_match_the_worked_numbers(solutions, want):
    """A_t = Σ z of the steps that end at or after t, z = (r - mean) / std over a group's steps (§4.1.3)"""
    expect(process(solutions, correction=0, eps=0.0), want)


@with_options({}, dict(correction=0), dict(eps=0.5))
@given(solutions)
def test_process_advantages_match_the_oracle(options, solutions):
    """A_t = Σ z of the steps that end at or after t, z = (r - mean) / (std + eps) over the group's steps"""
    expect(process(solutions, **options), oracle_process(solutions, **options))


@given(solutions, no_step, st.integers(1, 3))
def test_process_advantages_do_not_see_a_step_that_is_missing(solutions, missing, place):
    """r = NaN there, and anything as its end: each token has the advantage that it has without it"""
    longer = [solution[:place] + (missing,) + solution[place:] for solution in solutions]
    expect(process(longer), process(solutions))


@beyond("equal")
@given(st.integers(1, 6), any_float32)
def test_process_advantages_of_equal_step_rewards_are_exactly_zero_in_float32(S, r):
    """All steps of a group have one reward, or it has one step, or none: A = 0 to the last bit, not 0/0"""
    for rewards in ([[r] * S] * 2, [[r] * S, [nan] * S], [[nan] * S] * 2):
        steps, ends = torch.tensor(rewards), torch.arange(S).expand(2, S)
        A = grpo.process_advantages(steps, ends, torch.ones(2, S), 2, eps=0.0)
        expect(A, [[0.0] * S] * 2, 0)


@given(st.lists(st.tuples(st.integers(1, 4), reward), min_size=2, max_size=4))
def test_process_advantages_of_one_step_at_the_end_are_outcome_supervision(graded):
    """One step that ends at the last token: A_{i,t} = A_i"""
    outcome, = advantages([[r for _, r in graded]]).tolist()
    want = [[A if t < n else 0.0 for t in range(6)] for A, (n, _) in zip(outcome, graded)]
    expect(process([(n, (r, n - 1)) for n, r in graded], len(graded)), want)


numbers = lambda rewards: f64([nan if r is None else r for r in rewards])
beyond_text = functools.partial(pytest.param, marks=beyond("text"))


@pytest.mark.parametrize("answer, solution, want", [
    ("<think>7+5=12,4+8+1=13</think>132", "132", 1), ("<think>7+5=12,4+8+0=12</think>122", "132", 0), # page 7
    ("132", "132", 1), ("132.0", "132", 0), ("<think>132", "132", 0), ("<think>132</think>131", "132", 0),
    (r"\boxed{132}", "132", 1), (r"<think>\boxed{131}</think>It is \boxed{132}.", "132", 1), ("", "132", 0),
    (r"\boxed{132} or \boxed{131}", "132", 0), (r"\boxed{131} or \boxed{132}", "132", 1),
    (r"\boxed{}", "132", 0), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1), (r"\boxed{\frac{1}{2}}", "2", 0),
    beyond_text("B\n", " B", 1), beyond_text("5", 5, 1), beyond_text("1,0", "10", 0),
    beyond_text("b", "B", 0), beyond_text(r"\boxed{ Oslo }", "Oslo", 1),
    beyond_text(r"\boxed{{a}{b}} \boxed{3", "{a}{b}", 1), beyond_text(r"\boxed{1} 2", "2", 0),
    beyond_text("None", None, nan), beyond_text("", " ", nan),
    beyond_text("<think>1</think>131</think>132", "132", 1)], ids=str)
def test_accuracy_reward_matches_the_worked_answers(answer, solution, want):
    r"""r = 1 if the text after the last </think> (its last \boxed{}) is the solution; no solution: None"""
    expect(numbers(grpo.accuracy_reward([answer], [solution])), [want])


@pytest.mark.parametrize("answer, want", [
    ("<think>7+5=12,4+8+1=13</think>132", 1), ("<think>7+5=12,4+8+0=12</think>122", 1), # page 7
    ("132.0", 0), ("<think>132", 0), ("132</think>", 0), ("", 0), ("x<think>1</think>2", 0),
    ("<think>1</think>", 0), ("<think>\n1\n</think>\n\n2\n", 1), beyond_text("<think></think>b", 1),
    beyond_text("<Think>1</Think>2", 0), beyond_text(" <think>1</think>2", 0),
    beyond_text("<think>1</think> \n", 0), beyond_text("<think>1<think>2</think>3", 0),
    beyond_text("<think>1</think>2</think>3", 0), beyond_text("</think><think>1", 0),
    beyond_text("<think>1</think>2<think>", 0)], ids=str)
def test_think_format_reward_matches_the_worked_answers(answer, want):
    """r = 1 for one <think>...</think>, from the first character on, then an answer; else 0"""
    expect(numbers(grpo.think_format_reward([answer])), [want])


@beyond("text")
@pytest.mark.parametrize("name", ["accuracy_reward", "think_format_reward"])
def test_a_reward_of_a_chat_is_that_of_its_last_message(name):
    """r([..., {"content": text}]) = r(text), and columns that a reward does not know are no error"""
    texts = ["a", "<think>b</think>a", "<think>a", "", "<think></think>" + " " * 10**5]         # however long
    function = functools.partial(getattr(grpo, name), solution=["a"] * len(texts), prompts=texts)
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": text}] for text in texts]
    expect(numbers(function(completions=chats)), numbers(function(completions=texts)))


# Functions that take a mask: padding, width, dtype of the mask ----------------------------------------------

def masked_loss(by_token=False, **options):
    """The loss as a function of two columns and the mask."""
    def loss(x, y, m):
        more = dict(ref_logps=y) if "beta" in options else {}
        return grpo.grpo_loss(x, y if by_token else y[:, 0], m, old_logps=y, **more, **options)[0]
    return loss


def masked_aggregate(loss_type):
    return lambda x, y, m: grpo.aggregate(x, m, **of_type(loss_type))


MASKED = [  # a value that must not depend on the padding, from two columns and the mask
    ("broadcast_advantages", lambda x, y, m: grpo.broadcast_advantages(x[:, 0], m)),
    ("process_advantages", lambda x, y, m: grpo.process_advantages(
        x[:, :1], 0 * m[:, :1].long(), m, len(x), correction=0)),
    ("importance_ratio", lambda x, y, m: grpo.importance_ratio(x, y, m)[m != 0]),
    ("importance_ratio of a sequence", lambda x, y, m: grpo.importance_ratio(x, y, m, **SEQUENCE)),
    *[(f"aggregate {loss_type}", masked_aggregate(loss_type)) for loss_type in LOSS_TYPES],
    *[(f"grpo_loss {loss_type}", masked_loss(**of_type(loss_type))) for loss_type in LOSS_TYPES],
    ("grpo_loss with KL", masked_loss(beta=0.5)), ("grpo_loss cispo", masked_loss(**CISPO)),
    ("grpo_loss of a sequence", masked_loss(**SEQUENCE, loss_type="grpo")),
    ("grpo_loss sapo", masked_loss(**SAPO, loss_type="grpo")),
    pytest.param("grpo_loss with A of tokens", masked_loss(by_token=True), marks=beyond("shapes")),
    pytest.param("grpo_loss metrics", lambda x, y, m: f64(list(grpo.grpo_loss(
        x, y[:, 0], m, old_logps=y, ref_logps=y)[1].values())), marks=beyond("metrics"))]
of_masked = pytest.mark.parametrize("name, function", MASKED)
any_junk = pytest.mark.parametrize("junk", [                            # at the padding
    st.sampled_from([-100.0, 3.0]),
    pytest.param(st.sampled_from([nan, inf, -inf, 1e30]), marks=beyond("padding"))],
    ids=["a number", "NaN, infinite or huge"])


@of_masked
@any_junk
@given(rows=answers(number, number), data=st.data())
def test_what_is_at_the_padding_reaches_no_value_and_no_slope(name, function, junk, rows, data):
    """f(junk at the padding) = f(0 there), ∂f too, and ∂f/∂padding = 0"""
    (x, y, mask), (x0, y0, _) = columns(rows, data.draw(junk, "at the padding")), columns(rows, 0.0)
    expect(function(x, y, mask), function(x0, y0, mask))
    want = slope(lambda x: function(x, y0, mask), x0) * mask
    expect(slope(lambda x: function(x, y, mask), x), want)


@of_masked
@given(answers(number, number))
def test_one_more_column_of_padding_changes_nothing(name, function, rows):
    """f(rows padded to T + 1) = f(rows padded to T)"""
    wider = [torch.nn.functional.pad(x, (0, 1)) for x in columns(rows)]
    got, want = function(*wider), function(*columns(rows))
    expect(got[:, : want.size(1)] if want.dim() == 2 else got, want)


@beyond("masks")
@of_masked
@given(answers(number, number), st.sampled_from([torch.bool, torch.int64, torch.uint8, torch.float32]))
def test_a_mask_may_be_of_any_dtype(name, function, rows, dtype):
    """f(mask of this dtype) = f(mask of 0.0 and 1.0)"""
    x, y, mask = columns(rows)
    expect(function(x, y, mask.to(dtype)), function(x, y, mask))


# Shapes, dtypes and errors ----------------------------------------------------------------------------------

def tensors(dtype=torch.float64):
    """X numbers, M a mask, I integers (B, T); R (B,); C (B, 1); S a scalar; L logits (B, T, V)."""
    torch.manual_seed(0)
    X, L = torch.randn(4, 3).to(dtype), torch.randn(4, 3, 5).to(dtype)
    return types.SimpleNamespace(X=X, R=X[:, 0].clone(), C=X[:, :1].clone(), S=X[0, 0].clone(), L=L,
                                 M=torch.ones(4, 3).tril(), I=torch.randint(3, (4, 3)))


@beyond("dtypes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name, call, like", [                          # a call, and what the result is like
    ("combine_rewards", lambda t: grpo.combine_rewards(t.X, t.X[0]), "R"),
    ("group_stats", lambda t: torch.cat(grpo.group_stats(t.R, 2)), "R"),
    ("group_advantages", lambda t: grpo.group_advantages(t.R, 2), "R"),
    ("broadcast_advantages", lambda t: grpo.broadcast_advantages(t.R, t.M), "X"),
    ("process_advantages", lambda t: grpo.process_advantages(t.X, t.I, t.M, 2), "X"),
    ("make_completion_mask", lambda t: grpo.make_completion_mask(t.I, 1), "I"),
    ("selective_log_softmax", lambda t: grpo.selective_log_softmax(t.L, t.I.int()), "X"),
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


t = tensors()


@pytest.mark.errors
@pytest.mark.parametrize("name, argument, arguments, options", [      # wrong in silence, or torch's own error
    ("combine_rewards", "reward_weights", (t.X, [1, 2]), {}), ("group_stats", "rewards", (t.X, 2), {}),
    *[("group_stats", "num_generations", (t.R, G), {}) for G in (0, 1, 3, 8)],
    ("group_stats", "num_generations", (t.R, 2), dict(correction=2)),
    ("group_advantages", "num_generations", (t.R, 3), {}),
    ("group_advantages", "scale_rewards", (t.R, 2), dict(scale_rewards="std")),
    *[("broadcast_advantages", "advantages", (x, t.M), {}) for x in (t.X, t.C, t.S)],
    *[("process_advantages", "step_ends", (t.X, x, t.M, 2), {}) for x in (t.I - 1, t.I + 3, t.I[:, :1])],
    *[("selective_log_softmax", "index", (t.L, x), {}) for x in (t.I[:, :1], t.I[0])],
    *[("importance_ratio", "old_logps", (t.X, x, t.M), {}) for x in (t.R, t.C, t.S)],
    ("importance_ratio", "completion_mask", (t.X, t.X, t.M[:, :1]), {}),
    ("importance_ratio", "importance_sampling_level", (t.X, t.X, t.M),
     dict(importance_sampling_level="word")),
    ("clipped_surrogate_loss", "advantages", (t.X, t.R[:3]), {}),
    ("sapo_loss", "advantages", (t.X, t.R[:3]), {}), ("cispo_loss", "advantages", (t.X, t.X, t.R[:3]), {}),
    *[("kl_estimate", "ref_logps", (t.X, x), {}) for x in (t.R, t.C, t.S)],
    ("kl_estimate", "estimator", (t.X, t.X), dict(estimator="k4")),
    *[("aggregate", "per_token_loss", (x, t.M), dict(loss_type="dapo")) for x in (t.R, t.S)],
    ("aggregate", "loss_type", (t.X, t.M), dict(loss_type="mean")),
    ("aggregate", "max_completion_length", (t.X, t.M), dict(loss_type="dr_grpo")),
    *[("grpo_loss", "advantages", (t.X, x, t.M), {}) for x in (t.X[0], t.C, t.R[:1])],
    *[("grpo_loss", "completion_mask", (t.X, t.R, x), {}) for x in (t.M[0], t.M[:, :1])],
    *[("grpo_loss", "old_logps", (t.X, t.R, t.M), dict(old_logps=x)) for x in (t.R, t.C, t.S)],
    *[("grpo_loss", "ref_logps", (t.X, t.R, t.M), dict(ref_logps=x)) for x in (t.R, t.C, t.S)],
    ("grpo_loss", "ref_logps", (t.X, t.R, t.M), dict(beta=0.1)),
    ("grpo_loss", "policy_loss", (t.X, t.R, t.M), dict(policy_loss="ppo"))])
def test_a_wrong_shape_or_word_is_an_error_that_names_the_argument(name, argument, arguments, options):
    """For example a (B, 1) that would broadcast against (B, T), a wrong B, an unknown word"""
    message = rf"^([\w ,]+, )?{argument}(, [\w ,]+)?: (got|allowed)"
    with pytest.raises((AssertionError, ValueError), match=message):
        getattr(grpo, name)(*arguments, **options)
