"""What a run of grpo.py promises (§9-§12): a test's name is a promise, its docstring says it."""

import argparse
import contextlib
import copy
import functools
import inspect
import itertools
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from unittest import mock

import numpy
import pytest
import safetensors.torch
import torch
import transformers
from conftest import (PROBLEMS, SMALL, assert_same_run, by_row, chat_tokenizer, cli, command, lines_of,
                      make_model, passes_of, steps_of)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

import grpo

nan, inf = math.nan, math.inf
close = torch.testing.assert_close
draws = lambda n: settings(max_examples=n, deadline=None, derandomize=True, database=None)

# §9 Sampling ----------------------------------------------------------------------------------------------------------

PROMPT_IDS = torch.tensor([[-7, -7, 5, 6], [7, 8, 9, 10], [-7, 3, 4, 5]])           # garbage where the mask is 0
PROMPT_MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
LLAMA = make_model("Llama")


def sample(model, uniforms, temperature=0.7, pad=0):
    """Eight completions for each of these prompts, of at most 12 tokens; two words end one."""
    return grpo.generate(model, PROMPT_IDS, PROMPT_MASK, max_completion_length=12, uniforms=uniforms,
                         eos_token_ids=[1, 2], num_generations=8, pad_token_id=pad, temperature=temperature)


@pytest.mark.parametrize("kind, pad", [("GPT2", 0), ("Llama", 0), ("Llama", 1)])
def test_each_token_is_where_its_uniform_number_falls(kind, pad):
    """Σ_{w<o} p_w <= u < Σ_{w<=o} p_w, and log p_o is recorded, with p from a pass without padding, cache or other
    rows: a row sampled alone or in a batch gives the same tokens. Rows that have ended leave the batch. Greedy is the
    limit of low temperatures: whatever u is, the likeliest token is taken."""
    model, u = make_model(kind), torch.rand(24, 12, generator=torch.Generator().manual_seed(0))
    passes = passes_of(model)
    ids, mask, logps = sample(model, u, pad=pad)
    assert [shape for *shape, _ in passes] == [[3, 4]] + [[live, 1] for live in mask.sum(0).tolist()[1:]]
    assert torch.equal(mask, grpo.make_completion_mask(ids, [1, 2])) and (ids[mask == 0] == pad).all()
    assert 2 * mask.sum(1).min() < mask.sum(1).max()                    # ragged, or nothing is tested
    for i, T in enumerate(mask.sum(1)):
        answer, prompt = ids[i, :T], PROMPT_IDS[i // 8][PROMPT_MASK[i // 8] == 1]
        logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1:-1]
        p = (logits / 0.7).softmax(-1).detach()
        high, of_token = p.cumsum(-1).gather(1, answer[:, None])[:, 0], p.gather(1, answer[:, None])[:, 0]
        assert (high - of_token - 1e-5 <= u[i, :T]).all() and (u[i, :T] <= high + 1e-5).all()
        close(logps[i, :T], of_token.log(), atol=2e-5, rtol=0)
    (cold, *_), (greedy, *_) = sample(model, u, temperature=1e-4), sample(model, None)
    assert torch.equal(cold, greedy)
    alone, *_ = grpo.generate(model, PROMPT_IDS, PROMPT_MASK, max_completion_length=12, eos_token_ids=[1, 2])
    assert torch.equal(alone, greedy[::8, :alone.size(1)])              # by default one answer, and 0 is the padding


def test_each_word_of_a_large_vocabulary_can_be_drawn_but_one_of_probability_0():
    """152,000 words, of which one is likely: in float32 the probabilities of the others would be lost in the sum."""
    model, logits = make_model("Llama"), torch.zeros(152_000)
    logits[:2] = torch.tensor([-inf, 20.0])
    model.lm_head.forward = lambda hidden: logits.expand(*hidden.shape[:2], -1)
    words, cdf = torch.arange(2, 152_000, 5_000), logits.softmax(0, dtype=torch.float64).cumsum(0)
    u = torch.tensor([0.0, *(cdf[words - 1] + cdf[words]) / 2, 1 - 2**-53], dtype=torch.float64)
    ids, *_ = grpo.generate(model, PROMPT_IDS[1:2], PROMPT_MASK[1:2], max_completion_length=1, eos_token_ids=1,
                            num_generations=len(u), uniforms=u[:, None])
    assert ids[:, 0].tolist() == [1, *words.tolist(), 151_999]


def test_prompts_are_padded_on_the_left_and_messages_pass_the_template():
    """A tokenizer's special tokens are added to a text, not once more to what its chat template has made."""
    tokenizer, texts = chat_tokenizer(), ["12+3=", "4="]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<eos> $A", None, [("<eos>", 1)])
    chats = [[{"role": "user", "content": text[:-1]}] for text in texts]
    for prompts, special in ((texts, [1]), (chats, [])):
        ids, mask = grpo.encode_prompts(tokenizer, prompts, "cpu")
        want = [special + grpo.tiny_tokenizer()(text)["input_ids"] for text in texts]
        assert [row[m == 1].tolist() for row, m in zip(ids, mask)] == want
        assert mask[1].tolist() == [0, 0, 0] + [1] * len(want[1])
    with pytest.raises(AssertionError, match="prompt_mask: got .* left-padded"):
        grpo.generate(LLAMA, PROMPT_IDS, PROMPT_MASK.flip(1), max_completion_length=1, eos_token_ids=1)


# §10 What a step draws ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2", "GPTNeoX", "Phi"])
def test_the_loop_of_a_gpu_gives_the_tokens_of_the_plain_one(kind, monkeypatch):
    """With a static cache and a step that could be recorded no row leaves, and what an ended row goes on with is cut
    off: tokens, mask and log-probs are as without, for ragged prompts, two EOS, greedy and drawn."""
    model = make_model(kind)
    drawn = torch.rand(24, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [sample(model, uniforms) for uniforms in (drawn, None)]
    steps, passes = [], passes_of(model)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(grpo, "recorded", lambda function, *inputs: steps.append(inputs) or function)
    for uniforms, want in zip((drawn, None), wanted):
        got = sample(model, uniforms)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        close(got[2], want[2], atol=1e-5, rtol=0)
        assert [shape for *shape, _ in passes] == [[3, 4]] + [[24, 1]] * (got[0].size(1) - 1)
        passes.clear()
    assert steps and all([x.shape for x in inputs] == [(24, 1), (24, 1)] for inputs in steps)


def test_a_step_that_cannot_be_recorded_is_called_as_it_is(monkeypatch):
    """A capture that fails gives the function back; one that does not, what repeats it on the recorded memory."""
    class Graph:
        replay = lambda self: result.copy_(inputs[0] + inputs[1])

    inputs, result = [], torch.zeros(2)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    step = lambda x, y: inputs.extend([x, y]) or result
    given = torch.ones(2), torch.ones(2)
    replay = grpo.recorded(step, *given)
    assert replay(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])) is result and result.tolist() == [4.0, 6.0]
    assert given[0].tolist() == [1.0, 1.0]                              # it has its own memory

    def reads_the_cpu(x):
        raise RuntimeError("operation not permitted when stream is capturing")
    assert grpo.recorded(reads_the_cpu, given[0]) is reads_the_cpu


@draws(100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any), st.integers(0, 99))
def test_a_uniform_number_chooses_the_first_token_whose_sum_is_above_it(weights, percent):
    """The first v with Σ_{w<=v} p_w > u; one of probability 0 is not chosen"""
    u = (percent + 0.5) / 100                                           # on no sum of these p
    sums = list(itertools.accumulate(weight / sum(weights) for weight in weights))
    want = next(v for v, total in enumerate(sums) if total > u)
    logits = torch.tensor([weights], dtype=torch.float64).log()
    chosen = grpo.choose_tokens(logits.expand(2, -1), torch.tensor([u, u], dtype=torch.float64))
    assert chosen.tolist() == [want, want] and weights[want] > 0
    assert grpo.choose_tokens(logits, None).item() == weights.index(max(weights))


def test_a_reward_sees_the_text_that_the_model_wrote():
    """Special tokens stay, EOS and padding do not; an answer begins with the <think> that its prompt, or the chat
    template, ends in."""
    tokenizer, config = chat_tokenizer(), grpo.GRPOConfig(**SMALL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    rng = numpy.random.default_rng(0)
    r = grpo.sample_rollout(LLAMA, tokenizer, PROBLEMS[:2], config, rng)
    words = [*tokenizer.convert_ids_to_tokens(range(17)), "", "", ""]   # the model has 20
    written = [[words[i] for i, m in zip(ids, mask) if m and i != 1]
               for ids, mask in zip(r.completion_ids.tolist(), r.completion_mask)]
    assert r.completions == ["".join(text) for text in written] and "<think>" in "".join(r.completions)
    tokenizer.chat_template += "<think>"
    ids = torch.tensor([[4, 3, 0, 5, 1], [4, 3, 5, 1, 0]])              # a <pad> that was sampled, and padding
    sampled = ids, grpo.make_completion_mask(ids, 1), torch.zeros(2, 5)
    with mock.patch.object(grpo, "generate", return_value=sampled):
        r = grpo.sample_rollout(LLAMA, tokenizer, [{"prompt": "1+<think>"}, {"prompt": "1+2="}], config)
        assert r.completions == ["<think>0</think><pad>1", "0</think>1"]
        r = grpo.sample_rollout(LLAMA, tokenizer, [{"prompt": [{"role": "user", "content": "1+2"}]}] * 2, config)
    assert [message["content"] for message, in r.completions] == ["<think>0</think><pad>1", "<think>0</think>1"]
    assert grpo.think_format_reward(r.completions) == [1.0, 1.0]


@draws(30)
@given(st.integers(1, 12), st.integers(1, 24), st.integers(1, 3))
def test_each_pass_deals_all_rows_to_the_mini_batches(groups, n, passes):
    """Each pass is a partition of range(B) in sorted parts"""
    B, n = 2 * groups, min(n, 2 * groups)
    config = grpo.GRPOConfig(num_generations=2, generation_batch_size=B, num_mini_batches=n, num_iterations=passes)
    parts = [rows.tolist() for rows in grpo.mini_batches(config, numpy.random.default_rng(B))]
    assert len(parts) == n * passes and all(part == sorted(part) for part in parts)
    for i in range(0, len(parts), n):
        assert sorted(sum(parts[i:i + n], [])) == list(range(B))


@draws(30)
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 10**6), st.integers(0, 10**6))
def test_prompts_of_a_step_are_distinct_where_the_data_suffice(size, count, seed, step):
    """P prompts of the dataset, none of them twice if it has P"""
    config = grpo.GRPOConfig(num_generations=2, generation_batch_size=2 * count, seed=seed)
    prompts = grpo.sample_batch(range(size), config, grpo.step_rng(config, step))
    assert len(prompts) == count and set(prompts) <= set(range(size))
    assert len(set(prompts)) == count or count > size


@draws(50)
@given(st.integers(1, 50), st.integers(0, 60), st.floats(1e-6, 1))
def test_the_step_size_rises_then_falls_and_stays_between_0_and_the_learning_rate(steps, warmup, top):
    """Up by equal amounts over warmup_steps, from there down by equal amounts, to be 0 at max_steps."""
    config = grpo.GRPOConfig(max_steps=steps, warmup_steps=warmup, learning_rate=top)
    rates = [grpo.learning_rate(config, step) for step in range(steps)]
    want = [top * (i + 1) / (warmup + 1) for i in range(warmup)] + [top]
    want += [top - top * (i + 1) / max(steps - warmup, 1) for i in range(steps)]
    assert rates == pytest.approx(want[:steps], abs=1e-12)


# §10 A run by hand ----------------------------------------------------------------------------------------------------

WORDS = ["beta", "delta", "loss_type", "policy_loss", "importance_sampling_level", "use_bias_correction_kl",
         "max_completion_length", "epsilon_high"]                       # mean the same in the config and in the loss


def first_two(completions, **kwargs):
    return [0.3 * (i < 2) + 0.5 * (i > 3) for i in range(len(completions))]             # the second group is silent


def perturbed(rewards, rollout, config):
    """As if the sampler's log-prob of the first token were 0.25 too high"""
    rollout.sampler_logps[0, 0] += 0.25
    return grpo.outcome_advantages(rewards, rollout, config)


def assert_run_by_hand(**options):
    """A twin of the policy draws the same prompts and answers from seed and step, and learns from them, each update in
    one pass: all metrics and weights are the same."""
    policy, twin, reference = (make_model("GPT2").double() for _ in range(3))
    policy.train()                                                      # its dropout changes no run
    policy.generation_config.eos_token_id = [5, 7]                      # they end an answer, as the tokenizer's 1 does
    policy(torch.tensor([[5, 6]])).logits.sum().backward()              # it has gradients, as of a cold start
    c = grpo.GRPOConfig(**SMALL | options)
    optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=0.0)
    B, G = c.generation_batch_size, c.num_generations
    by_func = torch.tensor([by_row(range(B)), first_two(range(B))])
    rewards = torch.tensor(c.reward_weights or [1.0, 1.0]) @ by_func
    A, groups = grpo.group_advantages(rewards, G, scale_rewards=c.scale_rewards), rewards.view(-1, G)
    for step, (_, r, metrics) in enumerate(steps_of(policy, [by_row, first_two], perturbed, **options)):
        if c.sync_ref_model and step % c.ref_model_sync_steps == 0:
            reference.load_state_dict(twin.state_dict())
        rng = numpy.random.default_rng([c.seed, 3, step])
        assert r.examples == [PROBLEMS[i] for i in rng.choice(6, B // G, replace=False) for _ in range(G)]
        answers, *_ = grpo.generate(
            twin, r.prompt_ids[::G], r.prompt_mask[::G], num_generations=G, eos_token_ids=[1, 5, 7],
            max_completion_length=c.max_completion_length, temperature=c.temperature,
            uniforms=torch.tensor(rng.random((B, c.max_completion_length))))
        assert torch.equal(answers, r.completion_ids)
        score = lambda model, rows: grpo.per_token_logps(
            model, r.prompt_ids[rows], r.prompt_mask[rows], r.completion_ids[rows], r.completion_mask[rows],
            temperature=c.temperature)[0]
        old, ref = score(twin, slice(None)).detach(), score(reference, slice(None)).detach()
        mask, ended = r.completion_mask, torch.isin(answers, torch.tensor([1, 5, 7])).any(1)
        loss_mask = mask * (ended[:, None] | (not c.mask_truncated_completions))
        learns = loss_mask.any(1) & (A.ne(0) | (c.beta > 0))
        updates = []
        for rows in [rows for _ in range(c.num_iterations)
                     for rows in numpy.array_split(rng.permutation(B), c.num_mini_batches)]:
            loss, found = grpo.grpo_loss(
                score(twin, rows), A[rows], loss_mask[rows], old_logps=old[rows],
                ref_logps=ref[rows] if c.beta > 0 else None, epsilon_low=c.epsilon,
                **{word: getattr(c, word) for word in WORDS})
            optimizer.zero_grad()
            if learns[rows].any():                                      # else no weight moves by AdamW's momentum
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), c.max_grad_norm or inf)
            rate = optimizer.param_groups[0]["lr"] = grpo.learning_rate(c, step)
            optimizer.step()
            updates.append({"loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate, **found})
        want = {"step": step + 1, **{name: statistics.mean(x[name] for x in updates) for name in updates[0]},
                "reward": rewards.mean(), "reward_std": rewards.std(), "step_time": metrics["step_time"],
                "frac_reward_zero_std": (groups.amax(1) == groups.amin(1)).double().mean(),
                "entropy": -(r.sampler_logps * mask).sum() / mask.sum(), "completions/mean_length": mask.sum() / B,
                "completions/clipped_ratio": 1 - ended.sum() / B, "rewards/by_row/mean": by_func[0].mean(),
                "rewards/first_two/mean": by_func[1].mean(), "sampling/sampling_logp_difference/max": 0.25 * learns[0]}
        assert metrics == pytest.approx({name: float(x) for name, x in want.items()}, rel=1e-4, abs=1e-6)
        close(policy.state_dict(), twin.state_dict(), atol=1e-6, rtol=0)
    assert step + 1 == c.max_steps


RUNS = [  # of two steps, or three, and of three passes, or two; each option that is not the default shows
    dict(beta=0.1, use_bias_correction_kl=True, sync_ref_model=True, ref_model_sync_steps=2, max_steps=3),
    dict(loss_type="grpo", scale_rewards="batch", reward_weights=[0.0, 2.0], warmup_steps=1, num_mini_batches=3,
         num_iterations=2),
    dict(loss_type="dr_grpo", scale_rewards="none", policy_loss="sapo", mask_truncated_completions=True,
         num_mini_batches=4),
    dict(policy_loss="cispo", epsilon_high=1.01, beta=0.1, temperature=0.7, max_grad_norm=0.0),
    dict(epsilon=0.1, epsilon_high=0.3), dict(epsilon=0.01, delta=1.02),
    dict(importance_sampling_level="sequence", max_grad_norm=0.02)]


@pytest.mark.parametrize("options", RUNS, ids=lambda options: "-".join(options))
def test_train_is_algorithm_1(options):
    """With several updates a step, so that the ratio is not 1"""
    assert_run_by_hand(**dict(max_steps=2, num_iterations=3) | options)


def test_every_option_has_a_test_and_most_defaults_are_trls():
    """TRL's but for KL's correction, bf16, batch, length, saving."""
    default = vars(grpo.GRPOConfig())
    assert default == dict(
        learning_rate=1e-6, beta=0.0, num_iterations=1, epsilon=0.2, epsilon_high=None, delta=None, bf16=False, seed=42,
        full_determinism=False,
        loss_type="dapo", scale_rewards="group", importance_sampling_level="token", num_generations=8, temperature=1.0,
        max_completion_length=512, mask_truncated_completions=False, max_grad_norm=1.0, sync_ref_model=False,
        ref_model_sync_steps=512, warmup_steps=0, reward_weights=None, save_steps=10,
        per_device_train_batch_size=8, generation_batch_size=64, policy_loss="clip", use_bias_correction_kl=False,
        max_steps=100, num_mini_batches=1)
    tested = set(SMALL).union(*RUNS) | {"bf16", "seed", "save_steps", "full_determinism"}    # elsewhere
    assert tested == set(default), "an option without a test"
    grpo.GRPOConfig(epsilon=1.0, num_mini_batches=64), grpo.GRPOConfig(delta=1.2)           # at a limit it is taken


CHOICES = dict(
    policy_loss=["clip", "cispo", "sapo"], loss_type=["grpo", "dr_grpo", "dapo"], beta=[0.0, 0.1],
    importance_sampling_level=["token", "sequence"], scale_rewards=["group", "batch", "none"], num_iterations=[1, 2],
    mask_truncated_completions=[False, True], num_mini_batches=[1, 2, 3], temperature=[1.0, 0.7], seed=range(100),
    per_device_train_batch_size=range(1, 9), reward_weights=[None, [1.0, 0.0], [0.0, 0.0]])


@settings(draws(8), phases=[Phase.generate])                            # shrinking would take minutes
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}))
def test_a_run_with_any_options_is_the_one_by_hand_whatever_its_parts(options):
    """Any split into parts and any combination give the metrics and weights of the twin, who has no parts."""
    assert_run_by_hand(**options)


@pytest.mark.parametrize("options, rows", [
    (dict(), 4), (dict(beta=0.1), 8 + 8), (dict(num_iterations=2), 8 + 2 * 4), (dict(num_mini_batches=2), 8 + 4)])
def test_a_pass_is_made_where_it_is_needed(options, rows):
    """One update: no pass for log π_old. Several: one of all rows, before the first. π_ref: one. At beta = 0 an update
    passes over the four of eight rows that differ from their group's mean. None has more rows than a part, and none
    leaves a gradient: sampling needs the memory."""
    policy = make_model("Llama")
    passes = passes_of(policy)
    (_, r, _), = steps_of(policy, per_device_train_batch_size=3, **options)
    scored = [count for count, width, _ in passes if width > r.prompt_ids.size(1)]
    assert sum(scored) == rows and max(scored) == 3 and len(scored) <= rows / 2
    assert all(weight.grad is None for weight in policy.parameters())


def test_without_the_pass_for_log_pi_old_the_weights_are_the_same_bits():
    """One update a step: π_old is π_θ, and ρ is 1 in value, not in gradient."""
    policy, twin = make_model("Llama"), make_model("Llama")
    config, advantages = grpo.GRPOConfig(**SMALL), grpo.group_advantages(torch.tensor(by_row(range(8))), 4)
    (_, r, _), = steps_of(policy)
    rows, mask = advantages.nonzero()[:, 0], r.completion_mask
    loss, _ = grpo.grpo_loss(grpo.score_rows(twin, r, rows, config), advantages[rows], mask[rows],
                             old_logps=grpo.score_rollout(twin, r, config)[rows], num_items_in_batch=mask.sum().item())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.0).step()
    assert torch.equal(policy.lm_head.weight, twin.lm_head.weight)
    assert not torch.equal(policy.lm_head.weight, LLAMA.lm_head.weight)


def test_a_debugger_sees_each_tensor_of_the_equations_in_the_frame_of_train():
    """r_i, A, log π, log π_old, log π_ref, the loss; `up` twice from importance_ratio is train"""
    callers, ratio = [], grpo.importance_ratio
    with mock.patch.object(grpo, "importance_ratio", side_effect=lambda *args, **options: (
            callers.append([frame.function for frame in inspect.stack()]), ratio(*args, **options))[1]):
        steps = steps_of(make_model("Llama"), num_iterations=2, beta=0.1)
        _, r, metrics = next(steps)
    seen = steps.gi_frame.f_locals
    B, T = r.completion_ids.shape
    assert seen["rewards"].shape == (B,) and seen["rewards_per_func"].shape == (B, 1) and seen["loss"].dim() == 0
    for name in ("advantages", "old_logps", "ref_logps", "logps", "mask"):
        assert seen[name].shape == (B, T), name
    assert seen["rewards"].tolist() == by_row(range(B)) and seen["logps"].requires_grad
    for caller in callers:
        below = [name for name in caller if name in vars(grpo)]
        assert below[:2] == ["grpo_loss", "train"]


def test_advantages_of_an_answers_tokens_that_add_up_to_0_move_weights():
    """+1, -1, 0, 0, ...: the answer's gradient is not 0."""
    policy, signs = make_model("Llama"), torch.tensor([1.0, -1.0] + 8 * [0.0])
    of_tokens = lambda rewards, rollout, config: signs[:rollout.completion_ids.size(1)].expand(8, -1)
    next(steps_of(policy, compute_advantages=of_tokens))
    assert not torch.equal(policy.lm_head.weight, LLAMA.lm_head.weight)


def test_with_bf16_a_copy_of_the_weights_samples_and_autocast_scores():
    """The policy's weights stay in float32, and are those that learn."""
    model, tokenizer = make_model("Llama"), grpo.tiny_tokenizer()
    passes, samplers = passes_of(model), []
    with mock.patch.object(grpo, "generate", side_effect=lambda model, *args, generate=grpo.generate, **options: (
            samplers.append(model), generate(model, *args, **options))[1]):
        list(grpo.train(model, tokenizer, PROBLEMS[:6], [by_row], grpo.GRPOConfig(**SMALL, bf16=True)))
    sampler, = samplers
    assert {dtype for _, _, dtype in passes} == {torch.bfloat16}
    assert {p.dtype for p in sampler.parameters()} == {torch.bfloat16} and sampler is not model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    close(sampler.lm_head.weight, LLAMA.lm_head.weight.bfloat16())
    assert not torch.equal(model.lm_head.weight, LLAMA.lm_head.weight)


def test_what_is_not_finite_ends_the_run_before_the_weights_change():
    """Here the gradient is not finite, though the loss is; then the weights, which give no samples."""
    model = make_model("Llama")
    weight = model.lm_head.weight
    weight.register_hook(lambda gradient: gradient * inf)
    before = weight.clone()
    with pytest.raises(RuntimeError, match="gradients .* is non-finite"):
        next(steps_of(model))
    assert torch.equal(before, weight)
    model.model.embed_tokens.weight.data[9] = nan                       # a word of the second prompt
    for uniforms in (None, torch.rand(24, 12)):
        with pytest.raises(FloatingPointError, match="LlamaForCausalLM are not finite"):
            sample(model, uniforms)


# §10 Rewards ----------------------------------------------------------------------------------------------------------

def test_rewards_reach_the_prompt_that_they_belong_to():
    """Any callable gets prompts, completions, their ids without padding, and the dataset's columns, by row: copies.
    What it changes is its own: dataset, rollout, other rows and other functions keep what they had."""
    dataset = [row | {"prompt": [{"role": "user", "content": row["prompt"][:-1]}]} for row in PROBLEMS[:6]]
    kept, tokenizer, seen = copy.deepcopy(dataset), chat_tokenizer(), []

    def judge(**columns):
        seen.append(copy.deepcopy(columns))
        for name in set(columns) - {"solution"}:
            columns[name][0].append("mine")
            assert columns[name][1:] == seen[-1][name][1:]
        return by_row(**columns)

    (_, r, _), = grpo.train(make_model("Llama"), tokenizer, dataset, [judge, judge], grpo.GRPOConfig(**SMALL))
    columns, again = seen
    assert columns == again and sorted(columns) == ["completion_ids", "completions", "prompts", "solution"]
    assert dataset == kept and all(row in kept for row in r.examples)
    rows = [(row["prompt"], row["solution"]) for row in r.examples]
    assert rows == list(zip(columns["prompts"], columns["solution"]))
    prompts = [prompt[0]["content"] + "=" for prompt in columns["prompts"]]
    assert prompts == [text.replace("<pad>", "") for text in tokenizer.batch_decode(r.prompt_ids)]
    assert prompts == [text for text in prompts[::4] for _ in range(4)] and len(set(prompts)) == 2
    assert columns["completion_ids"] == [ids[m == 1].tolist() for ids, m in zip(r.completion_ids, r.completion_mask)]
    answers = [tokenizer.decode([i for i in ids if i != 1]) for ids in columns["completion_ids"]]
    assert r.completions == columns["completions"] == [[{"role": "assistant", "content": x}] for x in answers]


@pytest.mark.parametrize("returned, said", [
    ([1.0], r"1 reward, \[1.0\]"), ([1.0] * 9, r"9 rewards, \[1.0, .*"), (0.5, "0.5"), ([], r"\[\]"),
    (["1"] * 8, r"8 rewards, \['1', .*"), ([None] * 7 + [nan], r"8 rewards, \[nan\]"),
    ([1e39] * 8, r"8 rewards, \[1e.*"), (dict.fromkeys(range(8), 0.5), r"\{0: 0.5, .*"),
    (set(range(8)), r"\{0, 1, .*"), ([[1.0]] * 8, r"8 rewards, .*")], ids=str)
def test_what_a_reward_function_returned_is_said_and_what_is_allowed(returned, said):
    """A number, strings, too few, NaN, more than float32 has, a dict (its keys are no rewards): the error shows it."""
    said = f"<lambda> returned {said}; allowed are 8, each a finite number or None"
    with pytest.raises(grpo.InputError, match=said):
        next(steps_of(make_model("Llama"), [by_row, lambda **columns: returned]))


class Judge:
    """Has no __name__"""
    def __call__(self, completions, **columns):
        return (float(i) for i in range(len(completions)))              # lazily


def test_each_reward_function_has_a_metric_of_its_own_name():
    """Two of one name, a partial, an object; a name of the command line: its word"""
    both = [by_row, functools.partial(first_two), Judge(), lambda **columns: by_row(columns["completions"]), by_row]
    (_, _, metrics), = steps_of(make_model("Llama"), [*both, *grpo.load_reward_funcs(["accuracy"])])
    means = {name: value for name, value in metrics.items() if name.startswith("rewards/")}
    assert means == pytest.approx({
        "rewards/by_row_0/mean": 1.0, "rewards/partial/mean": 0.325, "rewards/Judge/mean": 3.5,
        "rewards/<lambda>/mean": 1.0, "rewards/by_row_4/mean": 1.0, "rewards/accuracy/mean": 0.0})


@pytest.mark.parametrize("function, said", [
    (lambda completions, most, **columns: 1, "<lambda>: missing a required argument: 'most'"),
    (lambda completions: 1, "<lambda>: got an unexpected keyword argument"),
    (lambda **columns: [None] * 8, "got None from each for the prompt '")], ids=str)
def test_a_function_that_does_not_fit_the_columns_or_scores_nothing_is_a_sentence(function, said):
    with pytest.raises(grpo.InputError, match=f"reward_funcs: {re.escape(said)}.*; allowed "):
        next(steps_of(make_model("Llama"), [function]))


def test_a_column_that_grpo_fills_is_not_overwritten():
    rows = [row | {"completions": "mine"} for row in PROBLEMS[:2]]
    with pytest.raises(grpo.InputError, match="multiple values for keyword argument 'completions'"):
        next(grpo.train(make_model("Llama"), grpo.tiny_tokenizer(), rows, [by_row], grpo.GRPOConfig(**SMALL)))


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_an_error_inside_what_a_function_returns_lazily_is_its_own(kind):
    def wrong(completion):
        raise kind("mine")
    with pytest.raises(kind, match="mine") as error:
        next(steps_of(make_model("Llama"), [lambda completions, **columns: map(wrong, completions)]))
    assert error.type is kind
    with pytest.raises(RuntimeError, match="<lambda> called sys.exit"):         # as a completion that is executed may
        next(steps_of(make_model("Llama"), [lambda completions, **columns: sys.exit()]))


# §10, §12 Checkpoints -------------------------------------------------------------------------------------------------

def test_a_run_stopped_at_any_moment_goes_on_by_the_printed_command_to_the_bits_of_the_whole(data, monkeypatch):
    """Ctrl-C and a full disk in turn, before each update and each call that touches the disk, until the third step. At
    the end weights and metrics.jsonl are as if nothing had stopped the run, with a reference model and mini-batches.
    Before the first checkpoint the command itself starts the run again."""
    run = command(data, max_steps=3, save_steps=1, max_completion_length=3, num_mini_batches=2, warmup_steps=1,
                  beta=0.1, sync_ref_model=True, ref_model_sync_steps=2)
    assert cli(*run, "--output_dir", data / "whole").code == 0
    stops = (torch.nn.utils, "clip_grad_norm_"), (torch, "save"), (os, "rename"), (shutil, "copy"), (shutil, "rmtree")
    for calls in range(14):                                             # a step: two updates, and a save
        error, code = [(KeyboardInterrupt, 130), (OSError(28, "No space left"), 1)][calls % 2]
        moments = itertools.chain([mock.DEFAULT] * calls, [error], itertools.repeat(mock.DEFAULT))
        for owner, name in stops:                                       # DEFAULT: what the function itself returns
            monkeypatch.setattr(owner, name, mock.Mock(wraps=getattr(owner, name), side_effect=moments))
        out = data / f"out {calls}"
        done = cli(*run, "--output_dir", out)
        monkeypatch.undo()
        assert done.code == code, done
        printed = re.findall(r"^stopped; to go on: python \S+ (.*)", done.out + done.err, re.M)
        assert len(printed) == (calls > 5)                              # the first checkpoint is whole
        assert cli(*(shlex.split(printed[0]) if printed else [*run, "--output_dir", out])).code == 0
        assert_same_run(out, data / "whole")


def test_the_command_to_go_on_is_below_the_traceback_of_a_reward_and_names_a_checkpoint_that_helps(data):
    """A bug in the third step: the traceback, then the command. At once after a resume: no command repeats it."""
    (data / "rewards.py").write_text("calls = []\ndef length(completions, **columns):\n    calls.append(1)\n"
                                     "    if len(calls) > 2: raise OSError('mine')\n    return [0] * len(completions)")
    run = command(data, max_steps=5, save_steps=1, reward_funcs=f"{data}/rewards.py:length")
    done = cli(*run)
    assert done.code == 1 and "Traceback" in done.err
    assert re.search("OSError: mine\nstopped; to go on: python .*checkpoint-2\n$", done.err)
    (data / "rewards.py").write_text("def length(completions, **columns): raise OSError('mine')")
    done = cli(*run, "--resume_from_checkpoint", data / "out")
    assert done.code == 1 and "to go on" not in done.err + done.out


class Code:
    """Writes a file when it is unpickled."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_what_a_resume_changes_is_printed_and_a_run_s_folder_is_its_newest_checkpoint(data):
    """Options that a flag changes; nothing left to do; the checkpoint, not the word of --model. β > 0 needs the π_ref
    of a run that had one."""
    run = command(data, max_steps=10, save_steps=2)
    with mock.patch.object(shutil, "rmtree"):                           # older ones are kept
        assert cli(*run).code == 0
    again = [*run, "--model", "nowhere", "--resume_from_checkpoint", data / "out"]
    assert sorted(path.name for path in (data / "out").iterdir())[0] == "checkpoint-10"
    done = cli(*again, "--learning_rate", 0.5)
    assert done.code == 0 and f"{data}/out/checkpoint-10: 12 problems" in done.out and "nowhere" not in done.out
    done = cli(*again, "--learning_rate", 0.5, "--reward_funcs", "think_format")
    assert "learning_rate 0.01 -> 0.5\nreward_funcs ['think_format', " in done.out
    assert "] -> ['think_format']\nnothing left to do: step 10 of max_steps 10\n" in done.out
    done = cli(*again, "--beta", 0.5, "--max_steps", 12)
    assert done.code == 2 and "beta: got 0.5; allowed is 0" in done.err
    (data / "out/checkpoint-10/metrics.jsonl").unlink()
    done = cli(*again, "--max_steps", 12)
    assert done.code == 2 and "checkpoint-10" in done.err and "Traceback" not in done.err + done.out


def test_a_resume_from_a_copy_of_a_checkpoint_leaves_its_neighbours(data, monkeypatch):
    """A folder without metrics.jsonl is no run's: the resumed run takes a new one. A refused run leaves none there."""
    monkeypatch.chdir(data)
    for name, seed in ("a", 1), ("b", 2):
        assert cli(*command(data, max_steps=1 + seed, seed=seed, output_dir=data / name)).code == 0
    for copied in "a/checkpoint-2", "b/checkpoint-3":
        shutil.copytree(copied, data / "keep" / copied[2:])
    assert cli(*command(data, output_dir=data / "keep")).code == 2
    run = command(data, max_steps=4, output_dir=None, resume_from_checkpoint=data / "keep/checkpoint-2")
    assert cli(*run).code == 0 and len(lines_of(data / "grpo-output")) == 4
    assert sorted(os.listdir(data / "keep")) == ["checkpoint-2", "checkpoint-3"]


def test_a_folder_belongs_to_one_run_at_a_time(data, monkeypatch):
    """A second run takes the next free name, and is refused where it has named the first one's folder; what a refused
    run has made is removed, what was there is not."""
    monkeypatch.chdir(data)
    options = argparse.Namespace(output_dir=None, resume_from_checkpoint=None)
    claims = [grpo.claim_folder(options) for _ in range(3)]
    assert [str(folder) for folder, _, _ in claims] == ["grpo-output", "grpo-output-2", "grpo-output-3"]
    for _, log, _ in claims[1:]:
        log.close()
    done = cli(*command(data, output_dir="grpo-output"))
    assert done.code == 2 and "output_dir: got grpo-output; allowed is a folder" in done.err
    assert (data / "grpo-output/metrics.jsonl").exists() and "asking" not in done.out
    assert cli(*command(data, output_dir="grpo-output-2", max_steps=1)).code == 0       # its run is over
    (data / "deep").mkdir()
    assert cli(*command(data, output_dir="deep/er/out", model="models/judge")).code == 2
    assert list((data / "deep").iterdir()) == []


def test_a_checkpoint_goes_on_with_its_options_in_another_folder_or_beside_a_later_one(data):
    """What no flag says is as it was. Stopped before its first checkpoint in the other folder, the same command starts
    from the one elsewhere; the later one is replaced. A checkpoint is data alone, and names no file: one that carries
    code is refused, and the code does not run."""
    for name, steps in ("whole", 3), ("first", 1):
        given = dict(learning_rate=0.02, num_mini_batches=2, seed=7, max_steps=steps, output_dir=data / name)
        assert cli(*command(data, **given)).code == 0
    unsaid = dict.fromkeys(["learning_rate", "generation_batch_size", "num_generations", "max_completion_length"])
    run = command(data, **unsaid, max_steps=3, resume_from_checkpoint=data / "first/checkpoint-1")
    with mock.patch.object(grpo, "compute_rewards", side_effect=grpo.InputError("of a reward")):
        done = cli(*run, "--output_dir", data / "out")
    assert done.code == 2 and "error: of a reward" in done.err
    shutil.copytree(data / "whole/checkpoint-3", data / "first/checkpoint-3")
    for folder in ("out", "first"):
        assert cli(*run, "--output_dir", data / folder).code == 0
        assert_same_run(data / folder, data / "whole")
    state = data / "first/checkpoint-3/trainer_state.pt"
    again = [*run, "--resume_from_checkpoint", str(state.parent), "--learning_rate", "0.1"]
    saved = torch.load(state, weights_only=True)["config"]
    assert "output_dir" not in saved and vars(grpo.parse_options(again)[0]) == saved | dict(learning_rate=0.1)
    for wrong in (Code(data / "ran"), print, {}):                       # code, a function; another program's data
        torch.save(wrong, state)
        done = cli(*again)
        assert done.code == 2 and "resume_from_checkpoint: got" in done.err and not (data / "ran").exists()


# §11, §12 The demo and the command line -------------------------------------------------------------------------------

def test_any_causal_lm_trains_on_a_file_and_answers_another(data):
    """Weights in bfloat16 become float32, are trained and saved for from_pretrained; its own code is never run."""
    done = cli(*command(data, dataset=data / "chat.jsonl", eval_dataset=data / "text.jsonl", beta=0.1,
                        reward_weights=[1, 0.1, 1],
                        reward_funcs=["accuracy", f"{data}/rewards.py:length", f"{data}/rewards.py:nothing"]))
    first, *_, last = done.out.splitlines()
    assert done.code == 0 and first.startswith(f"{data}/models/Llama: 12 problems, rewards accuracy, ")
    assert last == "held-out accuracy: 0.00 -> 0.00 (greedy, 12 problems)"
    assert f"\nthe model and metrics.jsonl are in {data}/out/checkpoint-2\n" in done.out
    lines = lines_of(data / "out")
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["kl"] > 0.0
    assert math.isfinite(lines[1][f"rewards/{data}/rewards.py:length/mean"])
    assert lines[1][f"rewards/{data}/rewards.py:nothing/mean"] is None
    weights = safetensors.torch.load_file(data / "out/checkpoint-2/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_held_out_problems_are_answered_greedily(capsys):
    """The mean of the first reward function over the rows, in parts of a batch; the first four are shown."""
    length = lambda completion_ids, **columns: [len(ids) for ids in completion_ids]
    tokenizer, config = grpo.tiny_tokenizer(), grpo.GRPOConfig(**SMALL)
    alone = [grpo.sample_rollout(LLAMA, tokenizer, [row], config).completion_mask.sum().item() for row in PROBLEMS]
    assert grpo.evaluate(LLAMA, tokenizer, PROBLEMS, [length, by_row], config) == statistics.mean(alone)
    assert re.findall(r"^  (\S+) ", capsys.readouterr().out, re.M) == [row["prompt"] for row in PROBLEMS[:4]]


def test_the_tiny_job_from_end_to_end(tmp_path, monkeypatch):
    """Cold start, samples and accuracy, GRPO, samples and accuracy, in README's form; flags win over tiny's sizes."""
    assert grpo.teacher_trace("47+85=", False) == "<think>7+5=12,4+8+1=13</think>132<eos>"
    assert grpo.teacher_trace("47+85=", True) == "<think>7+5=12,4+8+0=12</think>122<eos>"
    problems, held_out = grpo.tiny_problems(3)
    assert len(problems) == 6061 and len(held_out) == 500
    monkeypatch.setattr(grpo, "tiny_problems", lambda seed: (problems[:64], held_out[:50]))
    monkeypatch.setattr(grpo, "cold_start", functools.partial(grpo.cold_start, steps=3))
    given = dict(max_steps=2, generation_batch_size=32, max_completion_length=8, seed=3, beta=0.5)
    flags = ["--model", "tiny", *(f"--{name}={value}" for name, value in given.items())]
    done = cli(*flags, "--output_dir", tmp_path / "out")
    again = cli(*flags, "--max_steps", 3, "--resume_from_checkpoint", tmp_path / "out/checkpoint-2")
    for text, count, since in ((done.out, 2, ""), (again.out, 1, "; the first number is of step 2")):
        steps = [r"  step \d+: reward -?\d\.\d\d, silent groups \d+%, entropy \d\.\d\d, \d+\.\d\d s"] * count
        samples = [r"  \d\d\+\d\d= '.*'   reward [01]"] * 4
        left = ["max_steps 2 -> 3"] * (count == 1)
        form = [r"(tiny|.*/checkpoint-2): 64 problems, rewards accuracy, think_format", *left, *samples, *steps,
                rf"the model and metrics\.jsonl are in {tmp_path}/out/checkpoint-\d+", *samples,
                rf"held-out accuracy: \d\.\d\d -> \d\.\d\d \(greedy, 50 problems{since}\)"]
        assert re.fullmatch("\n".join(form) + "\n", text), text
    assert grpo.parse_options(flags)[0] == grpo.GRPOConfig(**grpo.TINY | given)


def test_an_earlier_run_is_never_overwritten(data, monkeypatch):
    """Without a name, a run takes the next free one; a folder with a checkpoint of another run is refused."""
    monkeypatch.chdir(data)
    for name in ("grpo-output", "grpo-output-2", "grpo-output-3"):
        assert cli(*command(data, output_dir=None, max_steps=1)).code == 0 and len(lines_of(data / name)) == 1
    done = cli(*command(data, output_dir="grpo-output"))
    assert done.code == 2 and "output_dir: got grpo-output; allowed is a folder without" in done.err


any_json = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x, max_size=2))


@draws(25)
@given(rows=st.lists(st.tuples(st.text(min_size=1), any_json), min_size=1, max_size=4), ascii=st.booleans(),
       end=st.sampled_from(["\n", "\r\n"]), mark=st.sampled_from(["", "\ufeff"]), blank=st.booleans())
def test_any_json_text_survives_load_dataset(tmp_path_factory, rows, ascii, end, mark, blank):
    """Whatever the text: escaped or UTF-8, LF or CRLF, with or without a byte order mark and blank lines."""
    rows, path = [{"prompt": prompt, "more": more} for prompt, more in rows], tmp_path_factory.getbasetemp() / "any"
    text = mark + end * blank + end.join(json.dumps(row, ensure_ascii=ascii) + end * blank for row in rows) + end
    path.write_bytes(text.encode())
    assert grpo.load_dataset(path) == rows


def test_a_reward_file_may_be_called_like_a_module_and_import_its_neighbours(data, monkeypatch):
    monkeypatch.delitem(sys.modules, "random")                          # so that the neighbour looks for it
    (data / "random.py").write_text("import neighbour\ndef f(completions, **columns): return neighbour.f(completions)")
    (data / "neighbour.py").write_text("import random\ndef f(texts): return [random.random() for _ in texts]")
    done = cli(*command(data, reward_funcs=[f"{data}/random.py:f"], max_steps=1))
    assert done.code == 0 and 0 < lines_of(data / "out")[0][f"rewards/{data}/random.py:f/mean"] < 1


BAD = [  # flags or lines of the dataset, what the one line must say
    (dict(dataset=None), "dataset: got None; allowed is FILE.jsonl"), (dict(dataset="absent.jsonl"), "absent.jsonl"),
    ("\n\n", "an empty file"), ('{"prompt": "1"}\n', "solution"),
    ('{"prompt": "1"}\n\n{oops\n', "line 3: got {oops; it is not JSON"), ('"\udcff"\n', "line 1: .* is not JSON"),
    ("[1]\n", r"line 1: got \[1\]; it has no prompt"), ('{"prompt": "", "solution": "1"}', "line 1: .* has no prompt"),
    ('{"prompt": "1", "solution": "1"}\n{"prompt": "1"}\n', r"line 2: .* other columns than line 1, .*'prompt', 'sol"),
    ('{"prompt": "1", "a": 1}\n{"prompt": [{"role": "user", "content": "1"}], "a": 1}\n', "line 2.* mixes texts"),
    (dict(model="./nowhere"), "nowhere"), (dict(model="."), "tokenizer"), (dict(resume_from_checkpoint="."), "trainer"),
    (dict(reward_funcs="rewards.py:absent"), "absent"), (dict(reward_funcs="zeros.py:f"), "returned 1 reward"),
    (dict(reward_funcs="zeros.py:g"), "got zeros.py:g; allowed"),
    (dict(dataset="null.jsonl", reward_funcs="accuracy"), "got .*'solution': None.; allowed with accuracy: a solution"),
    (dict(output_dir="text.jsonl"), "text.jsonl"), (dict(loss_type="bnpo"), "--loss_type"),
    (dict(num_gen=4), "--num_gen"), (dict(max_completion_length=60), "got 60; allowed is up to 5[0-9]"),
    ('{"prompt": [{"role": "user"}], "a": 1}', "line 1: .* of a role and a text"),
    ('{"prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}', "last not the assistant"),
    ('{"prompt": "1", "solution": "1", "prompts": 1}', "multiple values for keyword argument 'prompts'"),
    (dict(dataset="empty.jsonl", reward_funcs="accuracy"), "'solution': ' '.; allowed with accuracy: a solution"),
    ('{"prompt": "1", "solution": ["1", "one"]}', "allowed with accuracy: a solution, a text or a number"),
    ('{"prompt": [{"role": "user", "content": [{"type": "text", "text": "1"}]}], "a": "1"}', "a text as content"),
    (dict(output_dir="text.jsonl/sub"), "output_dir: got text.jsonl/sub"), (dict(reward_weights=[nan, 1]), ".nan, 1"),
    (dict(model="models/judge"), "model: got models/judge; .*no .'lm_head.weight'"),
    (dict(model="broken"), "model: got broken; SafetensorError"), (dict(model="eos"), "got .* appends no token"),
    (dict(model="narrow"), "prompt: got '.*'; token 1[0-9] is not among the model's 10"),
    (dict(policy_loss="sapo", epsilon_high=0.3), "_high: got 0.3"), (dict(policy_loss="sapo", epsilon=0.1), "got 0.1"),
    (dict(reward_weights=1), "reward_weights: got"), (dict(num_generations=5), "generation_batch_size: got 8"),
    (dict(num_generations=1), "num_generations: got 1"), (dict(num_mini_batches=9), "num_mini_batches: got 9"),
    (dict(max_steps=0), "max_steps: got 0; .* 1 or more"), (dict(beta=inf), "beta: got inf"),
    (dict(temperature=0), "temperature: got 0.0; allowed"), (dict(epsilon=1.5), "epsilon: got 1.5"),
    (dict(epsilon=-0.1), "epsilon: got"), (dict(delta=1.25, epsilon_high=0.3), "delta: got 1.25; .* at least 1"),
    (dict(delta=2.0, policy_loss="sapo"), "delta: got 2.0; .* clip"), (dict(sync_ref_model=True), "with beta > 0: ref"),
    (dict(use_bias_correction_kl=True), "use_bias_correction_kl: .* beta > 0")]


def broken_models(data):
    """Folders of a model cut off, of one with too few embeddings, of one whose tokenizer ends each text."""
    make_model("Llama").save_pretrained(data / "broken")
    (data / "broken/model.safetensors").write_bytes(b"cut off")
    narrow = transformers.LlamaConfig(**make_model("Llama").config.to_dict() | {"vocab_size": 10})
    transformers.LlamaForCausalLM(narrow).save_pretrained(data / "narrow")
    make_model("Llama").save_pretrained(data / "eos")
    tokenizer = grpo.tiny_tokenizer()
    for name in ("broken", "narrow", "eos"):
        if name == "eos":
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A <eos>", None, [("<eos>", 1)])
        tokenizer.save_pretrained(data / name)


@pytest.mark.parametrize("given, said", BAD, ids=str)
def test_bad_input_is_one_line_and_exit_2(given, said, data, monkeypatch):
    """The line says what is wrong; no file is written, and no folder made."""
    monkeypatch.chdir(data)
    (data / "zeros.py").write_text("g, f = 5, lambda completions, **columns: [0]")
    (data / "null.jsonl").write_text('{"prompt": "1", "solution": null}')
    (data / "empty.jsonl").write_text('{"prompt": "1", "solution": " "}')
    if "model" in given:
        broken_models(data)
    if isinstance(given, str):
        (data / "bad.jsonl").write_bytes(given.encode(errors="surrogateescape"))
        given = dict(dataset="bad.jsonl")
    usual = dict(dataset="text.jsonl" if "model" in given else "chat.jsonl", output_dir="deep/out",
                 reward_funcs=["accuracy", "rewards.py:length"])
    before, done = sorted(data.rglob("*")), cli(*command(data, **usual | given))
    assert done.code == 2 and re.fullmatch(f"grpo.py: error: .*{said}.*\n", done.err), done
    assert "stopped" not in done.out
    assert ("asking the hub" in done.out) == ("./nowhere" in given.values())                # it may take a minute
    assert sorted(data.rglob("*")) == before


@pytest.mark.parametrize("text", ["raise ValueError('mine')", "def length(**columns): raise OSError('mine')"])
def test_a_bug_in_the_user_s_function_keeps_its_traceback(text, data):
    """When its file is loaded, and when it is called; of these errors the loaders' own are one line."""
    (data / "rewards.py").write_text(text)
    done = cli(*command(data))
    assert done.code == 1 and "Traceback" in done.err and "mine" in done.err


WITHOUT = {  # what a model does not do -> how it is called without it
    "a cache": lambda forward: lambda past_key_values, **kwargs: forward(**kwargs),
    "position ids": lambda forward: lambda position_ids, **kwargs: forward(**kwargs),   # GPT2's are absolute
    "a mask": lambda forward: lambda attention_mask, **kwargs: forward(**kwargs)}


@pytest.mark.parametrize("what", WITHOUT)
def test_a_trial_finds_a_model_that_ignores(what):
    """Sampler and scorer would agree on wrong log-probs."""
    model = make_model("GPT2")
    grpo.try_out(model)
    model.forward = WITHOUT[what](model.forward)
    with pytest.raises((grpo.InputError, TypeError), match="padding or its cache changes|past_key_values"):
        grpo.try_out(model)


def test_a_mixture_whose_router_logits_are_asked_for_is_refused(data):
    config = transformers.MixtralConfig(vocab_size=20, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, output_router_logits=True)
    transformers.MixtralForCausalLM(config).save_pretrained(data / "mixture")
    chat_tokenizer().save_pretrained(data / "mixture")
    done = cli(*command(data, model=data / "mixture"))
    assert done.code == 2 and re.fullmatch("grpo.py: error: model: got .*mixture; .*\n", done.err), done


def test_a_reward_may_use_a_pool_of_processes(data):
    """A function of its file is found in a worker, whatever the file is called, and a file is loaded once; no signal
    handler of the run's is inherited there."""
    (data / "rewards.py").write_text(
        "import multiprocessing, signal\nprint('loaded')\ndef one(text): return len(text) + 0.5\n"
        "def length(completions, **columns):\n"
        "    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL\n"
        "    with multiprocessing.get_context('fork').Pool(2) as pool: return pool.map(one, completions)\n"
        "def zero(completions, **columns): return [0] * len(completions)")
    shutil.copy(data / "rewards.py", data / "torch.py")
    names = [f"{data}/rewards.py:zero", f"{data}/rewards.py:length", f"{data}/torch.py:length"]
    words = command(data, dataset=data / "text.jsonl", reward_funcs=names, max_steps=2)
    done = subprocess.run([sys.executable, grpo.__file__, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("loaded") == 2, done
    for name in names[1:]:
        assert lines_of(data / "out")[1][f"rewards/{name}/mean"] > 0.5


def test_full_determinism_asks_torch_for_it(data, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with mock.patch.object(torch, "use_deterministic_algorithms") as asked:
        assert cli(*command(data, max_steps=1)).code == 0 and not asked.called
        assert cli(*command(data, max_steps=1, output_dir=data / "same bits", full_determinism=True)).code == 0
    asked.assert_called_once_with(True, warn_only=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


# Another device -------------------------------------------------------------------------------------------------------

class Elsewhere(TorchFunctionMode):
    """Pretend a device: a tensor that is made or moved there, or computed from one that is there, has a mark."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        """Compute on the CPU. As on CUDA, two devices are an error, but for numbers, indices and copies."""
        given, is_there = tree_leaves((args, kwargs)), lambda x: hasattr(x, "is_there")
        there = any(map(is_there, given))
        if function == torch.Tensor.device.__get__ and there:
            return torch.device("xla")
        operands = args[::2] if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else args
        here = any(isinstance(x, torch.Tensor) and x.dim() > 0 and not is_there(x)
                   for x in tree_leaves((operands, kwargs)))
        if here and there:
            raise RuntimeError(f"{function.__name__}: tensors on two devices")
        args, kwargs = tree_map_only(torch.device, lambda device: "cpu", (args, kwargs or {}))
        result = function(*args, **kwargs)
        targets = [x.type for x in given if isinstance(x, torch.device)] + ["cpu"] * (function is torch.Tensor.cpu)
        if targets:                                                     # a new tensor, or a copy on another device
            there, result = targets == ["xla"], result.clone()
        for x in tree_leaves(result):
            if there and isinstance(x, torch.Tensor):
                x.is_there = True
        return result


def test_a_run_on_another_device_is_the_run_on_the_cpu():
    """No tensor is on the wrong device, which here is an error as on CUDA, and the metrics are the same."""
    options = SMALL | dict(beta=0.1, sync_ref_model=True, num_mini_batches=2, mask_truncated_completions=True,
                           per_device_train_batch_size=3, max_completion_length=5, reward_weights=[1.0])
    found, tokenizer, config = [], grpo.tiny_tokenizer(), grpo.GRPOConfig(**options)
    for moves in (False, True):
        policy = make_model("Llama").double()
        state = grpo.initial_state(policy, config)
        for x in [*policy.parameters(), *policy.buffers(), *state.reference.parameters(), *state.reference.buffers()]:
            if moves:
                x.is_there = True
        with Elsewhere():
            (_, _, metrics), = grpo.train(policy, tokenizer, PROBLEMS[:6], [by_row], config, state=state)
            grpo.cold_start(policy, tokenizer, PROBLEMS[:4], 0, steps=1)
            right = grpo.evaluate(policy, tokenizer, PROBLEMS[:4], [grpo.accuracy_reward], config)
        found.append(metrics | {"step_time": 0, "accuracy": right})
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-5)
    with pytest.raises(RuntimeError, match="two devices"), Elsewhere():
        policy.lm_head.weight + torch.ones(32)
