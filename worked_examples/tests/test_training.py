"""What a run of grpo.py promises (§9-§12): a test's name is a promise, its docstring the law."""

import copy
import functools
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
import transformers
from conftest import (PROBLEMS, SMALL, assert_same_run, by_row, chat_tokenizer, cli, command, disk_full_at, lines_of,
                      make_model, passes_of, question, steps_of)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

import grpo

nan, inf = math.nan, math.inf
close = torch.testing.assert_close
same = functools.partial(close, atol=0, rtol=0, equal_nan=True)
LLAMA = make_model("Llama")
DRAWS = settings(max_examples=50, deadline=None, derandomize=True, database=None)


def answers_of(model, uniforms, **options):
    """Eight answers of at most 12 tokens to each of three prompts; two words end one."""
    ids = torch.tensor([[-7, -7, 5, 6], [7, 8, 9, 10], [-7, 3, 4, 5]])                  # garbage where the mask is 0
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    usual = dict(max_completion_length=12, eos_token_ids=[1, 2], num_generations=8, temperature=0.7)
    return grpo.generate(model, ids, mask, uniforms=uniforms, **usual | options)


def tree(folder):
    """Each path below a folder, and the bytes of each file."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {path: path.is_file() and path.read_bytes() for path in paths}


def to_go_on(printed):
    """The arguments of the command that a run prints: --resume_from_checkpoint and its folder."""
    _, _, *words = shlex.split(re.search("python .*grpo.py .*", printed)[0])
    assert words[0] == "--resume_from_checkpoint" and len(words) == 2
    return words


def written_by(done):
    """The folder of a run that has come to its end."""
    assert done.code == 0, done.err
    return Path(to_go_on(done.out)[1])


# §9 Sampling ----------------------------------------------------------------------------------------------------------

def test_each_word_of_a_large_vocabulary_can_be_drawn_but_one_of_probability_0():
    """151,936 words, of which one is likely: in float32 the probabilities of the others would be lost in the sum.
    Without a uniform number it is the likely one."""
    logits, words = torch.zeros(151_936), torch.arange(2, 151_936, 5_000)
    logits[:2] = torch.tensor([-inf, 20.0])
    cdf = logits.softmax(0, dtype=torch.float64).cumsum(0)
    u = torch.tensor([0.0, *(cdf[words - 1] + cdf[words]) / 2, 1 - 2**-53], dtype=torch.float64)
    assert grpo.choose_tokens(logits.expand(len(u), -1), u).tolist() == [1, *words.tolist(), 151_935]
    assert grpo.choose_tokens(logits[None], None).tolist() == [1]


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2", "GPTNeoX", "Phi"])
@pytest.mark.parametrize("pad, on_gpu", [(0, False), (1, False), (0, True)])
def test_each_token_is_where_its_uniform_number_falls(kind, pad, on_gpu):
    """Σ_{w<o} p_w <= u < Σ_{w<=o} p_w, and log p_o is recorded, with p from a pass without padding, cache or other
    rows: a row sampled alone or in a batch gives the same tokens, and the loop of a GPU those of the plain one. Rows
    that have ended leave the batch; on a GPU, with a static cache and a step that could be recorded, none leaves."""
    model, u = make_model(kind), torch.rand(24, 12, generator=torch.Generator().manual_seed(0))
    prompts, passes, passes_before = [[5, 6], [7, 8, 9, 10], [3, 4, 5]], passes_of(model), []

    def record(function, *inputs):
        passes_before.append(len(passes))
        return function

    with mock.patch.object(grpo, "record_on_gpu", record), mock.patch.object(torch.Tensor, "is_cuda", on_gpu):
        ids, mask, logps = answers_of(model, u, pad_token_id=pad)
    rows = [24 if on_gpu else live for live in mask.sum(0).tolist()[1:]]
    assert [shape for *shape, _ in passes] == [[3, 4]] + [[live, 1] for live in rows]
    assert passes_before == [2] * on_gpu                                # the prompts' one, and that of a first step
    assert torch.equal(mask, grpo.make_completion_mask(ids, [1, 2])) and (ids[mask == 0] == pad).all()
    assert 2 * mask.sum(1).min() < mask.sum(1).max()                    # ragged, or nothing is tested
    for i, T in enumerate(mask.sum(1)):
        answer, prompt = ids[i, :T, None], torch.tensor(prompts[i // 8])
        logits = model(input_ids=torch.cat([prompt, ids[i, :T]])[None]).logits[0, len(prompt) - 1:-1]
        p = (logits / 0.7).softmax(-1).detach()
        high, of_token = p.cumsum(-1).gather(1, answer)[:, 0], p.gather(1, answer)[:, 0]
        assert (high - of_token - 1e-5 <= u[i, :T]).all() and (u[i, :T] <= high + 1e-5).all()
        close(logps[i, :T], of_token.log(), atol=2e-5, rtol=0)
        assert not logps[i, T:].any()


def test_no_answer_runs_beyond_the_positions_that_the_model_knows():
    ids, *_ = answers_of(LLAMA, None, max_completion_length=60, eos_token_ids=-1)
    assert ids.size(1) == 60
    with pytest.raises(AssertionError, match="max_completion_length"):
        answers_of(LLAMA, None, max_completion_length=61, eos_token_ids=-1)


def test_prompts_are_padded_on_the_left_and_messages_pass_the_template():
    """A tokenizer's special tokens are added to a text, not once more to what its chat template has made."""
    tokenizer, texts = chat_tokenizer(), ["12+3=", "4="]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<eos> $A", None, [("<eos>", 1)])
    for prompts, special in ((texts, [1]), ([question(text[:-1]) for text in texts], [])):
        ids, mask = grpo.encode_prompts(tokenizer, prompts, "cpu")
        want = [special + grpo.tiny_tokenizer()(text)["input_ids"] for text in texts]
        assert [row[m == 1].tolist() for row, m in zip(ids, mask)] == want
        assert mask[1].tolist() == [0, 0, 0] + [1] * len(want[1])
        with pytest.raises(AssertionError, match="prompt_mask"):        # padded on the right
            grpo.generate(LLAMA, ids, mask.flip(1), max_completion_length=1, eos_token_ids=1)


def test_a_reward_sees_the_text_that_the_model_wrote():
    """Special tokens stay, and a space before a comma; EOS and padding do not. An answer begins with the <think> that
    its prompt, or the chat template, ends in."""
    tokenizer, config = chat_tokenizer(), grpo.GRPOConfig(**SMALL)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer.add_tokens([" "])                                                             # 17
    tokenizer.chat_template = tokenizer.chat_template.replace("'='", "'=<think>'")
    ids = torch.tensor([[4, 3, 0, 5, 1], [4, 17, 16, 1, 0]])            # a <pad> that was sampled, and padding
    sampled = ids, grpo.make_completion_mask(ids, 1), torch.zeros(2, 5)
    with mock.patch.object(grpo, "generate", return_value=sampled):
        of_texts = grpo.sample_rollout(LLAMA, tokenizer, [{"prompt": "1+<think>"}, {"prompt": "1+2="}], config)
        of_chats = grpo.sample_rollout(LLAMA, tokenizer, [{"prompt": question("1+2")}] * 2, config)
    assert of_texts.completions == ["<think>0</think><pad>1", "0 ,"]
    assert [message["content"] for message, in of_chats.completions] == ["<think>0</think><pad>1", "<think>0 ,"]


@pytest.mark.parametrize("behind, end", [
    ("<|im_end|>", 17), (" \n<|im_end|>\n", 17), ("<turn>", 18), ("", 1), ("\n", 1), ("3<turn>", 1)])
def test_an_answer_ends_where_the_chat_template_ends_a_turn(behind, end):
    """The added token, special or not, that the template writes behind an assistant's text ends an answer, as the EOS
    does; the answer's text is without it. Blanks before it are skipped; behind another text it ends nothing."""
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})             # 17
    tokenizer.add_tokens(["<turn>"])                                                        # 18
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '" + behind + "'}}{% endfor %}{{ '=' }}"
    config = grpo.GRPOConfig(**SMALL | dict(generation_batch_size=64, num_generations=64))
    r = grpo.sample_rollout(LLAMA, tokenizer, [{"prompt": question("1+2")}], config, numpy.random.default_rng(0))
    assert {17, 18} <= set(r.completion_ids.flatten().tolist())         # both were drawn
    assert torch.equal(r.completion_mask, grpo.make_completion_mask(r.completion_ids, [1, end]))
    text = "".join(message["content"] for message, in r.completions)
    assert ("<|im_end|>" in text, "<turn>" in text) == (end != 17, end != 18)


@pytest.mark.parametrize("of_config, ends", [(None, {1}), (1, {1}), (5, {1}), ([5, 17], {1, 17})])
def test_an_id_of_the_models_config_ends_an_answer_if_it_is_an_added_token(of_config, ends):
    """A config's default, in a small Llama 2, may be a letter of one's own tokenizer: then no answer would have it."""
    model, tokenizer = make_model("Llama"), chat_tokenizer()
    tokenizer.add_tokens(["<turn>"])                                                        # 17; 5 is a 1
    model.generation_config.eos_token_id = of_config
    assert set(grpo.ends_of_an_answer(model, tokenizer)) == ends


def test_with_bf16_a_copy_of_the_weights_samples_and_autocast_scores():
    """The policy's weights stay in float32, and are those that learn; the copy's buffers, RoPE's frequencies, too."""
    model = make_model("Llama")
    passes = passes_of(model)
    with mock.patch.object(grpo, "generate", wraps=grpo.generate) as generate:
        next(steps_of(model, bf16=True))
    sampler = generate.call_args.args[0]
    assert {dtype for *_, dtype in passes} == {torch.bfloat16}
    same(list(sampler.parameters()), [x.bfloat16() for x in LLAMA.parameters()])
    same(list(sampler.buffers()), list(LLAMA.buffers()))
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    assert not torch.equal(model.lm_head.weight, LLAMA.lm_head.weight)


# §10 Training ---------------------------------------------------------------------------------------------------------

WORDS = ["beta", "delta", "loss_type", "policy_loss", "importance_sampling_level", "use_bias_correction_kl",
         "max_completion_length", "epsilon_high"]                       # mean the same in the config and in the loss
SCORES = [[0, 0.3], [2, 0.3], [None, None], [1, 0], [0, 0.5], [None, None], [1, 0.5], [None, 0.5]]


def first(**columns):
    return [score for score, _ in SCORES]


def second(**columns):
    return [score for _, score in SCORES]


def perturbed(rewards, rollout, config, nats=9e-4):
    """As if the sampler's log-prob of each second token were higher."""
    rollout.sampler_logps[:, ::2] += nats * rollout.completion_mask[:, ::2]
    return grpo.outcome_advantages(rewards, rollout, config)


def draws_by_hand(policy, problems, c, step):
    """Prompts, none of them twice if there are enough, and answers, from seed and step; and what draws on."""
    B, G, rng = c.generation_batch_size, c.num_generations, numpy.random.default_rng([c.seed, 3, step])
    examples = [problems[i] for i in rng.choice(len(problems), B // G, replace=len(problems) < B // G)]
    prompts = grpo.encode_prompts(grpo.tiny_tokenizer(), [row["prompt"] for row in examples], "cpu")
    answers, *_ = grpo.generate(
        policy, *prompts, num_generations=G, eos_token_ids=1, max_completion_length=c.max_completion_length,
        temperature=c.temperature, uniforms=torch.tensor(rng.random((B, c.max_completion_length))))
    return [row for row in examples for _ in range(G)], answers, rng


def learn_by_hand(policy, reference, optimizer, r, A, c, rng):
    """Each update in one pass; the means of what the updates show."""
    def score(model, rows=slice(None)):
        logps, _ = grpo.per_token_logps(model, r.prompt_ids[rows], r.prompt_mask[rows], r.completion_ids[rows],
                                        r.completion_mask[rows], temperature=c.temperature)
        return logps

    old, ref = score(policy).detach(), score(reference).detach()
    mask = r.completion_mask * (r.terminated[:, None] | (not c.mask_truncated_completions))
    learns = mask.any(1) & (A.ne(0) | (c.beta > 0))
    updates = []
    for _ in range(c.num_iterations):
        for rows in numpy.array_split(rng.permutation(c.generation_batch_size), c.num_mini_batches):
            loss, found = grpo.grpo_loss(
                score(policy, rows), A[rows], mask[rows], old_logps=old[rows],
                ref_logps=ref[rows] if c.beta > 0 else None, epsilon_low=c.epsilon,
                **{word: getattr(c, word) for word in WORDS})
            optimizer.zero_grad()
            if learns[rows].any():                                      # else no weight moves by AdamW's momentum
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), c.max_grad_norm or inf)
            optimizer.step()
            updates.append({"loss": loss.item(), "grad_norm": norm.item(), **found})
    gap = 9e-4 * mask[learns][:, ::2].sum() / mask[learns].sum().clamp(min=1)
    means = {name: statistics.mean(update[name] for update in updates) for name in updates[0]}
    return means | {"sampling/sampling_logp_difference/mean": gap.item()}


def samples_by_hand(r, rewards):
    """What the answers of two groups of four show; rewards of None are left out."""
    there = [reward for reward in rewards if reward is not None]
    silent = [len({*rewards[i:i + 4]} - {None}) == 1 for i in (0, 4)]
    entropy = -(r.sampler_logps * r.completion_mask).sum() / r.completion_mask.sum()
    return {"reward": statistics.mean(there), "reward_std": statistics.stdev(there), "entropy": entropy.item(),
            "rewards/first/mean": 4 / 5, "rewards/second/mean": 2.1 / 6, "frac_reward_nan": 2 / 8,
            "frac_reward_zero_std": sum(silent) / 2, "completions/mean_length": r.completion_mask.sum().item() / 8,
            "completions/clipped_ratio": 1 - r.terminated.sum().item() / 8}


def one_of(name, *values):
    return st.sampled_from([{name: value} for value in values])


# Of beta > 0 and rewards of 0 the gradient would be rounding alone, which AdamW blows up.
any_policy_loss = (
    one_of("epsilon", 0.01, 0.2) | one_of("epsilon_high", 0.01, 0.3) | one_of("delta", 1.31) | st.sampled_from([
        dict(policy_loss="cispo"), dict(policy_loss="cispo", epsilon_high=1.01), dict(policy_loss="sapo")]))
any_reference = one_of("reward_weights", None, [0.0, 2.0], [0.0, 0.0]) | st.sampled_from([
    dict(beta=0.1), dict(beta=0.1, use_bias_correction_kl=True), dict(beta=0.1, sync_ref_model=True,
                                                                      ref_model_sync_steps=2)])
any_others = st.lists(
    one_of("loss_type", "grpo", "dr_grpo") | one_of("importance_sampling_level", "sequence") |
    one_of("temperature", 0.7) | one_of("scale_rewards", "batch", "none") | one_of("max_grad_norm", 0.0, 0.02) |
    one_of("mask_truncated_completions", True) | one_of("per_device_train_batch_size", 1, 3), max_size=4)
any_updates = st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 4)])


@settings(DRAWS, max_examples=20)
@given(any_policy_loss, any_reference, any_others, any_updates, st.sampled_from([1, 2, 6]), st.integers(0, 99))
def test_train_is_algorithm_1_with_any_options(policy_loss, reference_or_weights, others, updates, size, seed):
    """A twin of the policy that draws prompts and answers from seed and step, and learns from them, has in each of
    three steps the metrics and the weights of the run."""
    options = SMALL | dict(max_steps=3, seed=seed, num_iterations=updates[0], num_mini_batches=updates[1])
    for more in [policy_loss, reference_or_weights, *others]:
        options |= more
    c = grpo.GRPOConfig(**options)
    policy, twin, reference = (make_model("GPT2").double().train(mode) for mode in (True, False, False))
    optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=0.0)
    v, w = c.reward_weights or [1, 1]
    rewards = [None if a is b is None else v * (a or 0) + w * (b or 0) for a, b in SCORES]
    A = grpo.group_advantages(torch.tensor([nan if x is None else x for x in rewards], dtype=torch.float64), 4,
                              scale_rewards=c.scale_rewards)
    steps = grpo.train(policy, grpo.tiny_tokenizer(), PROBLEMS[:size], [first, second], c,
                       compute_advantages=perturbed)
    for step, (_, r, metrics) in enumerate(steps):
        if c.sync_ref_model and step % c.ref_model_sync_steps == 0:
            reference.load_state_dict(twin.state_dict())
        examples, answers, rng = draws_by_hand(twin, PROBLEMS[:size], c, step)
        assert r.examples == examples and torch.equal(r.completion_ids, answers)
        assert torch.equal(r.terminated, (answers == 1).any(1))
        rate = optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 3)
        want = learn_by_hand(twin, reference, optimizer, r, A, c, rng) | samples_by_hand(r, rewards)
        assert 0 <= metrics.pop("reward_time") < metrics.pop("step_time") < 100
        assert metrics == pytest.approx({"step": step + 1, "learning_rate": rate} | want, rel=1e-6, abs=1e-8)
        close(policy.state_dict(), twin.state_dict(), atol=1e-8, rtol=0)
    assert step == 2


@pytest.mark.parametrize("leave", [
    lambda policy: policy.train(), lambda policy: policy(torch.tensor([[5, 6]])).logits.sum().backward(),
    lambda policy: torch.set_default_dtype(torch.bfloat16)], ids=["dropout", "a gradient", "another dtype"])
def test_nothing_that_a_reward_function_leaves_reaches_the_run(leave):
    """Metrics and weights have the bits of a run whose reward function leaves nothing."""
    def run(leave):
        policy = make_model("GPT2")

        def by_hand(completions, **columns):
            leave(policy)
            return by_row(completions)

        try:
            steps = [metrics for *_, metrics in steps_of(policy, [by_hand], max_steps=2, num_iterations=2)]
        finally:
            torch.set_default_dtype(torch.float32)
        return [metrics | dict(step_time=0, reward_time=0) for metrics in steps], policy.state_dict()

    (steps, weights), (want, weights_wanted) = run(leave), run(lambda policy: None)
    assert steps == want
    same(weights, weights_wanted)


def test_a_debugger_sees_each_tensor_of_the_equations_in_the_frame_of_train():
    """It is reached from importance_ratio by `up`, twice. What is there of the part has the shape (part, T)."""
    steps = steps_of(make_model("Llama"), num_iterations=2, beta=0.1, per_device_train_batch_size=3)
    with mock.patch.object(grpo, "importance_ratio", side_effect=EOFError), pytest.raises(EOFError) as stopped:
        next(steps)                                                     # as if here were a breakpoint
    above = [entry for entry in stopped.traceback if entry.path == Path(grpo.__file__)]
    assert [entry.name for entry in above] == ["train", "grpo_loss"]
    seen = above[0].locals
    T = seen["mask"].size(1)
    for name, whole in ("A", "advantages"), ("m", "mask"), ("old", "old_logps"), ("ref", "ref_logps"):
        assert seen[whole].shape == (8, T) and seen[name].shape == (3, T)
        assert torch.equal(seen[name], seen[whole][seen["part"]])
    assert seen["logps"].shape == (3, T) and seen["logps"].requires_grad
    assert seen["rewards"].tolist() == by_row(range(8))


@pytest.mark.parametrize("options, of_all, of_some", [
    (dict(), 0, 1), (dict(beta=0.1), 2, 0), (dict(num_iterations=2), 1, 2)], ids=str)
def test_a_pass_is_made_where_it_is_needed_and_is_no_wider(options, of_all, of_some):
    """One update: no pass for log π_old. Several: one of all rows, before the first. π_ref: one. At beta = 0 an update
    passes over the four of eight rows that differ from their group's mean. Short answers are passed first, in parts of
    three, each as wide as prompts, longest answer and one. None leaves a gradient: sampling needs the memory."""
    policy = make_model("Llama")
    passes, config = passes_of(policy), grpo.GRPOConfig(**SMALL | dict(per_device_train_batch_size=3) | options)
    (_, r, _), = grpo.train(policy, grpo.tiny_tokenizer(), PROBLEMS[:2], [by_row], config)
    L, lengths, expected = r.prompt_ids.size(1), r.completion_mask.sum(1), []
    for rows in [torch.arange(8)] * of_all + [torch.tensor(by_row(range(8))).ne(1).nonzero()[:, 0]] * of_some:
        for part in lengths[rows].sort().values.split(3):
            expected.append([len(part), 1 + L + part.max()])
    assert [shape for *shape, _ in passes if shape[1] > L] == expected
    assert all(weight.grad is None for weight in policy.parameters())


@pytest.mark.parametrize("ignored", ["past_key_values", "position_ids", "attention_mask"])
def test_a_model_that_ignores_its_cache_positions_or_mask_ends_the_run_at_the_first_ragged_batch(ignored):
    """Sampler and scorer never pad alike, so they disagree."""
    model, config = make_model("GPT2"), grpo.GRPOConfig(**SMALL)        # its positions are absolute
    ask = functools.partial(grpo.train, model, grpo.tiny_tokenizer(), PROBLEMS[:2], [by_row], config)
    forward = model.forward
    next(ask())
    model.forward = lambda **arguments: forward(**arguments | {ignored: None})
    with pytest.raises(AssertionError, match="log-probs differ"):
        next(ask())


@pytest.mark.parametrize("nats, bf16", [(2.1e-3, False), (-2.1e-3, False), (nan, False), (2.1, True), (nan, True)])
def test_sampler_and_scorer_differ_by_a_thousandth_of_a_nat_at_most_or_the_run_ends(nats, bf16):
    """On average over the scored tokens, in each step: every second one differs here. A run by hand has 9e-4 there. In
    bfloat16 they differ by a nat at most."""
    steps = steps_of(make_model("Llama"), compute_advantages=functools.partial(perturbed, nats=nats), bf16=bf16)
    with pytest.raises(AssertionError, match="log-probs differ"):
        next(steps)


def test_what_is_not_finite_ends_the_run_before_the_weights_change():
    """A gradient whose loss is finite; a weight, though its answers are alike, so that no row learns."""
    model = make_model("Llama")
    model.lm_head.weight.register_hook(lambda gradient: gradient * inf)
    with pytest.raises(RuntimeError):
        next(steps_of(model))
    same(model.state_dict(), LLAMA.state_dict())
    model.lm_head.weight.data[0] = nan
    with pytest.raises(AssertionError, match="differ by nan"):
        next(steps_of(model, [grpo.think_format_reward]))


def test_no_run_has_the_loss_whose_parts_do_not_add_up_or_two_rewards_of_one_name():
    """The second would share a metric."""
    pytest.raises(AssertionError, grpo.GRPOConfig, loss_type="bnpo")
    with pytest.raises(AssertionError, match="by_row"):
        next(steps_of(make_model("Llama"), [by_row, by_row]))


def test_rewards_reach_the_prompt_that_they_belong_to():
    """A function is given prompts, completions, their ids without padding, and the dataset's columns, row by row. What
    it changes is its own: dataset, rollout, other rows and other functions keep what they had."""
    dataset = [row | {"prompt": question(row["prompt"][:-1])} for row in PROBLEMS[:6]]
    kept, tokenizer, seen = copy.deepcopy(dataset), chat_tokenizer(), []

    def judge(**columns):
        seen.append(copy.deepcopy(columns))
        for name in "prompts", "completions", "completion_ids":
            for x in columns[name]:
                x.append("mine")
            assert columns[name] == [x + ["mine"] for x in seen[-1][name]]
        return by_row(**columns)

    judges = [judge, lambda **columns: judge(**columns)]
    (_, r, _), = grpo.train(make_model("Llama"), tokenizer, dataset, judges, grpo.GRPOConfig(**SMALL))
    columns, again = seen
    assert columns == again and dataset == kept
    assert sorted(columns) == ["completion_ids", "completions", "prompts", "solution"]
    for i, example in enumerate(r.examples):
        prompt, ids = r.prompt_ids[i][r.prompt_mask[i] == 1], r.completion_ids[i][r.completion_mask[i] == 1].tolist()
        answer = [{"role": "assistant", "content": tokenizer.decode([token for token in ids if token != 1])}]
        assert example == {"prompt": columns["prompts"][i], "solution": columns["solution"][i]} == r.examples[i - i % 4]
        assert example in kept and tokenizer.decode(prompt) == example["prompt"][0]["content"] + "="
        assert columns["completion_ids"][i] == ids and columns["completions"][i] == r.completions[i] == answer


def rewards_of(returned, rows):
    """What compute_rewards makes of what a function returned for so many rows."""
    def a_judge(**columns):
        return returned

    ids = torch.zeros(rows, 1)
    rollout = SimpleNamespace(examples=[{"prompt": ""}] * rows, completions=[""] * rows, completion_ids=ids,
                              completion_mask=ids)
    return grpo.compute_rewards([a_judge], rollout)


@DRAWS
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(-2**53, 2**53), min_size=1, max_size=4),
       st.lists(st.none(), max_size=2))
def test_rewards_are_in_float64_to_the_last_bit_what_a_function_returned(numbers, gaps):
    """A list, a tuple, an array or a tensor of numbers; a None in a list, a tuple or an array is no reward, NaN."""
    values, array = gaps + numbers, numpy.array(numbers, dtype=float)
    want = torch.tensor([nan] * len(gaps) + numbers, dtype=torch.float64)
    for returned in values, tuple(values), numpy.array(values):
        same(rewards_of(returned, len(values)), want[:, None])
    for returned in array, torch.tensor(array):
        same(rewards_of(returned, len(numbers)), want[len(gaps):, None])


@pytest.mark.parametrize("returned", [
    0.5, [], [1.0] * 7, [1.0] * 9, [[1.0]] * 8, [inf] + [0.0] * 7, ["right"] * 8, "01234567", set(range(8)),
    dict.fromkeys(range(8), 0.5), map(float, range(8))], ids=str)
def test_what_is_no_list_of_a_number_for_each_row_is_refused(returned):
    """Too few, too many, nested, infinite, words, what has no order, a dict (its keys are no rewards), a generator."""
    with pytest.raises((AssertionError, TypeError, ValueError)):
        rewards_of(returned, 8)


@pytest.mark.parametrize("returned", [[0.5, nan], numpy.array([nan, 1]), torch.tensor([nan, 1])], ids=str)
def test_a_nan_that_a_function_returns_is_an_error_that_names_it(returned):
    """Only None abstains: NaN is a mistake, a mean of no numbers or 0/0."""
    with pytest.raises(AssertionError, match="a_judge"):
        rewards_of(returned, 2)


# §12 Data -------------------------------------------------------------------------------------------------------------

TEXT, CHAT = dict(prompt="1+2=", solution="3"), dict(prompt=question("1+2"), solution="3")


def load(path, rows):
    """Write rows, some of them bytes, and load them as a run does, with a small model and a chat template."""
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return grpo.load_dataset(path, LLAMA, chat_tokenizer(), grpo.GRPOConfig(**SMALL))


def test_a_dataset_may_have_any_line_breaks_and_a_byte_order_mark(tmp_path):
    """In its texts, escaped or as UTF-8, and between its rows: LF or CRLF, blank lines."""
    rows = [{"prompt": "\n\r\x0b\x85\u2028ü", "more": more} for more in (None, [True, ""], 0.5)]
    for ascii, end, mark in (True, "\n", ""), (False, "\r\n\n", "\ufeff"):
        lines = [json.dumps(row, ensure_ascii=ascii) + end for row in rows]
        (tmp_path / "any").write_bytes("".join([mark, *lines]).encode())
        assert grpo.load_dataset(tmp_path / "any") == rows


@pytest.mark.parametrize("good, bad", [
    (TEXT, b'{"prompt": "\xfc", "solution": "3"}'), (TEXT, b"{oops"), (TEXT, ["1"]), (TEXT, dict(solution="3")),
    (TEXT, dict(prompt="1+2=")), (TEXT, TEXT | dict(more=1)), (TEXT, TEXT | dict(prompt="")),
    (TEXT, TEXT | dict(prompt=7)), (TEXT, TEXT | dict(prompt="1" * 55)), (TEXT, TEXT | dict(prompt="1<eos>")),
    (CHAT, CHAT | dict(prompt=[])), (CHAT, CHAT | dict(prompt=["1+2"])), (CHAT, CHAT | dict(prompt=[{"role": "user"}])),
    (CHAT, CHAT | dict(prompt=[{"content": "1+2"}])),
    (CHAT, CHAT | dict(prompt=[*question("1+2"), {"role": "assistant", "content": "3"}]))], ids=str)
def test_a_row_that_no_step_could_use_is_named_before_training(good, bad, tmp_path):
    """File and line, blank lines counted, are a note of what went wrong: no UTF-8, no JSON, no object, no prompt, other
    columns, a prompt too long for the model's positions, at its end, or answered, a message without role or text."""
    with pytest.raises(Exception) as error:
        load(tmp_path / "data.jsonl", [good, b"", bad, good])
    assert f"{tmp_path}/data.jsonl, line 3" in "".join(error.value.__notes__)


@pytest.mark.parametrize("rows", [[], [TEXT, CHAT]])
def test_a_file_without_a_row_or_of_texts_and_chats_is_named(rows, tmp_path):
    with pytest.raises(AssertionError, match=str(tmp_path)):
        load(tmp_path / "data.jsonl", rows)


def test_solutions_that_the_tokenizer_cannot_write_are_said_once(tmp_path, capsys):
    """How many, and the line of the first: no answer could be right. Numbers and gaps are none of them."""
    for solutions, numbers in ([["3", 7, 0.5, None, "1 "], []], [["3", "é", None, "x"], ["2", "2"]]):
        load(tmp_path / "data", [TEXT | dict(solution=solution) for solution in solutions])
        assert re.findall(r"\d+", capsys.readouterr().out.replace(str(tmp_path), "")) == numbers


@pytest.mark.parametrize("solution, text", [
    (None, ""), (nan, ""), (72, "72"), (72.0, "72"), (-0.5, "-0.5"), (5e-05, "0.00005"), (1e16, "1" + "0" * 16),
    (" 72 ", "72"), (r"so \boxed{72}", "72"), ("<think>6</think>7", "7")], ids=str)
def test_a_solution_has_one_text(solution, text):
    """Which answers are compared with, and which small_model.py imitates."""
    assert grpo.solution_text(solution) == text


@DRAWS
@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_the_text_of_a_number_is_that_number_without_an_exponent(number):
    assert type(number)(grpo.solution_text(number)) == number and "e" not in grpo.solution_text(number)


# §12 Folders and checkpoints ------------------------------------------------------------------------------------------

STOPPABLE = dict(max_steps=3, save_steps=1, max_completion_length=3, num_mini_batches=2, beta=0.1,
                 sync_ref_model=True, ref_model_sync_steps=2)


def go_on(data, printed):
    """Go on by the printed command, or where no checkpoint is whole, begin again, to the bits of the run that nothing
    stops. No file that was there changes."""
    whole = data.joinpath("models").resolve() / "whole"                 # one for all tests
    if not whole.exists():
        assert written_by(cli(*command(data, **STOPPABLE, output_dir=whole))) == whole
    before = tree(data)
    has_checkpoint = any(re.fullmatch(r"checkpoint-\d+", path.name) for path in before)
    folder = written_by(cli(*(to_go_on(printed) if has_checkpoint else command(data, **STOPPABLE))))
    assert before.items() <= tree(data).items()
    assert_same_run(folder, whole)
    return folder


@pytest.mark.parametrize("moment", [1, *range(10, 19)])                 # its folder is made; what a second step changes
def test_a_run_stopped_at_any_moment_goes_on_to_the_bits_of_the_whole(moment, data):
    """The disk is full at this change of the run's folder: a file opened to write, a folder made, renamed, removed.
    Metrics, texts and weights are as if nothing had happened, with a reference model and mini-batches."""
    with disk_full_at(moment, data / "out"):
        stopped = cli(*command(data, **STOPPABLE))
    assert stopped.code == 1 and "a full disk" in stopped.err
    go_on(data, stopped.out)


def test_ctrl_c_ends_a_run_with_the_command_that_goes_on(data):
    with mock.patch.object(torch.optim.AdamW, "step", side_effect=[None] * 2 + [KeyboardInterrupt]):
        stopped = cli(*command(data, **STOPPABLE))
    assert stopped.code == 1 and to_go_on(stopped.err.splitlines()[-1]) == to_go_on(stopped.out)


CARELESS_REWARDS = """
import multiprocessing, os, signal
calls, plain = [], length
def same(reward): return reward
def length(**columns):
    calls.append(1)
    if len(calls) == 1:
        with multiprocessing.get_context('spawn').Pool(1) as pool: return pool.map(same, plain(**columns))
    os.chdir('/')
    if len(calls) == 3: os.kill(os.getpid(), signal.SIGKILL)
    return plain(**columns)
"""


def test_a_killed_run_goes_on_and_its_rewards_may_use_processes_and_move_to_another_folder(data):
    """SIGKILL in the third step, in a process of its own, whose rewards are those of the working folder, though an old
    file of this name is elsewhere. All that it writes is in the folder that was meant."""
    text = (data / "rewards.py").read_text()
    (data / "rewards.py").write_text(text + CARELESS_REWARDS)
    (data / "old").mkdir()
    (data / "old/rewards.py").write_text("")
    words = [sys.executable, grpo.__file__, *command(data, **STOPPABLE, output_dir="a run/out")]
    killed = subprocess.run(words, cwd=data, capture_output=True, text=True, timeout=300,
                            env=os.environ | {"PYTHONPATH": f"{data}/old"})
    assert killed.returncode == -9, killed.stderr
    (data / "rewards.py").write_text(text)
    assert go_on(data, killed.stdout) == data / "a run/out-2"


def test_no_run_touches_what_it_has_not_made(data):
    """A run writes into NAME, or NAME-2, NAME-3, ..., the first that is not there, be it a file or an empty folder; so
    do many that begin at once. go_on asks the same of a run that is resumed."""
    (data / "out").write_text("mine")
    (data / "out-2").mkdir()
    before = tree(data)
    assert written_by(cli(*command(data, max_steps=1))) == data / "out-3"
    after = tree(data)
    assert before.items() <= after.items()
    assert all(path.is_relative_to(data / "out-3") for path in after.keys() - before.keys())
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(grpo.make_folder, [data / "many/out"] * 80))
    assert folders == set(data.joinpath("many").iterdir()) and len(folders) == 80


def test_all_that_a_run_is_named_by_comes_back_in_any_folder(data, monkeypatch):
    """Config, model, data and rewards of the newest checkpoint, by its number, that is whole. Flags that come again win;
    other rewards, or another order, are refused. A checkpoint is data: one that names code is refused."""
    first = command(data, dataset="text.jsonl", output_dir="out", learning_rate=0.02, seed=7, reward_weights=[1, 2])
    options, config, _ = grpo.parse_options(first)
    assert cli(*first).code == 0
    for name in "checkpoint-10", "checkpoint-11.part":
        shutil.copytree(data / "out/checkpoint-2", data / "out" / name)
    (data / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    resumed, resumed_config, _ = grpo.parse_options(["--resume_from_checkpoint", str(data / "out"), "--seed", "8"])
    assert resumed_config == grpo.GRPOConfig(**vars(config) | {"seed": 8})
    assert vars(resumed) == vars(options) | {"resume_from_checkpoint": str(data / "out/checkpoint-10")}
    resume, rewards = ["--resume_from_checkpoint", data / "out/checkpoint-2", "--max_steps", 3], options.reward_funcs
    assert cli(*resume, "--reward_funcs", *rewards[::-1]).code == 2
    assert cli(*resume, "--reward_funcs", *rewards).code == 0
    assert written_by(cli(*resume)) == data / "out-3"
    state = data / "out/checkpoint-2/trainer_state.pt"
    torch.save(torch.load(state, weights_only=True) | {"code": print}, state)
    assert cli(*resume).code == 1


# §11, §12 The demo and the command line -------------------------------------------------------------------------------

ANSWER = r"  ('.*') -> (.*?)(?: \(cut off\))?   reward (\S+)"
SHOWN = ["reward", "frac_reward_zero_std", "entropy", "completions/clipped_ratio", "step_time", "reward_time"]


def test_the_console_shows_ten_times_the_means_since_the_last_time_and_an_answer(data):
    """Of metrics.jsonl's lines; at the start the first prompt as the model reads it, and the rewards' names.
    completions.jsonl has of each step a prompt, its answers, what each function gave them, their advantages."""
    names, weights = ["rewards.length", "think_format_reward", "rewards.nothing"], [2.0, 1.0, 1.0]
    done = cli(*command(data, dataset=data / "chat.jsonl", max_steps=20, reward_funcs=names, reward_weights=weights))
    begin, _, *printed = done.out.splitlines()
    assert repr(PROBLEMS[0]["prompt"]) in begin and ", ".join(names) in begin           # the template has added its =
    rows, groups = ([json.loads(line) for line in open(data / "out" / name)]
                    for name in ("metrics.jsonl", "completions.jsonl"))
    for step, group in enumerate(groups, 1):
        texts = [message["content"] for message, in group["completions"]]
        assert group["step"] == step and group["prompt"][0]["content"] + "=" in [row["prompt"] for row in PROBLEMS]
        assert group["rewards"]["think_format_reward"] == grpo.think_format_reward(texts)
        assert group["rewards"]["nothing"] == [None] * 4
        scores = torch.tensor(numpy.array(list(group["rewards"].values()), dtype=float).T)
        rewards = grpo.combine_rewards(scores, weights)
        close(torch.tensor(group["advantages"]), grpo.group_advantages(rewards, 4).float())
        if step % 2 == 0:
            means = [(rows[step - 2][name] + rows[step - 1][name]) / 2 for name in SHOWN]
            numbers = re.findall(r"(-?\d[.\d]*)(%?)", printed[step - 2])
            shown = [float(number) / (100 if percent else 1) for number, percent in numbers]
            assert shown == pytest.approx([step, *means], abs=0.006)
            prompt, answer, reward = re.fullmatch(ANSWER, printed[step - 1]).groups()
            assert (prompt, answer) == (repr(group["prompt"][0]["content"]), repr(texts[0])[:90])
            assert float(reward) == pytest.approx(rewards[0].item(), abs=1e-4)
    assert step == len(printed) == 20


@pytest.mark.parametrize("reward, of_all, unscored", [("think_format_reward", 0, 0), ("rewards.nothing", None, 1)])
def test_a_stretch_in_which_no_weight_has_moved_says_so(reward, of_all, unscored, data):
    """All answers earn the same, or nobody scores them: the weights keep their bits. null is a metric of no number."""
    done = cli(*command(data, reward_funcs=reward))
    (before, _), (after, _) = map(grpo.load_model, (data / "models/Llama", written_by(done) / "checkpoint-2"))
    same(after.state_dict(), before.state_dict())
    assert done.out.count("no weight has moved") == 2 and done.out.count("100.0% of the answers") == 2 * unscored
    for row in lines_of(data / "out"):
        assert (row["reward"], row["frac_reward_nan"], row["grad_norm"]) == (of_all, unscored, 0)


def test_held_out_rewards_are_said_when_they_are_known_and_compared_with_the_first_runs(data):
    """Any causal LM, whose own code is never run, trains on a file in float32, saves weights for from_pretrained, and
    answers another file greedily: before training, each eval_steps and at the end, for each reward function."""
    names = ["rewards.length", "accuracy_reward"]
    options = dict(dataset=data / "chat.jsonl", eval_dataset=data / "text.jsonl", reward_funcs=names)
    done = cli(*command(data, **options, eval_steps=2, max_steps=5))
    again = cli(*to_go_on(done.out), "--max_steps", 7)
    said = [re.findall(r"^(?:  step (\d): )?held-out length: (\S+)(?: -> (\S+))? \(greedy, 12 problems\)$", text, re.M)
            for text in (done.out, again.out)]
    (_, first, _), *_ = said[0]
    known = {row["step"]: f"{row['eval_rewards/length/mean']:.2f}" for row in lines_of(written_by(again))
             if "eval_rewards/accuracy_reward/mean" in row}
    assert list(known) == [2, 4, 5, 6, 7] and done.out.index("held-out") < done.out.index(" takes the run")
    assert said == [[("", first, ""), ("2", first, known[2]), ("4", first, known[4]), ("", first, known[5])],
                    [("6", first, known[6]), ("", first, known[7])]]
    for folder, mean in (data / "models/Llama", first), (written_by(again) / "checkpoint-7", known[7]):
        model, tokenizer = grpo.load_model(folder)
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        _, config, _ = grpo.parse_options(command(data))
        r = grpo.sample_rollout(model, tokenizer, PROBLEMS, config)
        assert f"{grpo.compute_rewards(grpo.load_reward_funcs(names[:1]), r).nanmean():.2f}" == mean != known[5]


def test_the_tiny_job_from_end_to_end(tmp_path, monkeypatch):
    """Cold start, answers and accuracy, GRPO, answers and accuracy; a resume begins with no cold start, and compares
    with the first run's accuracy. Flags win over tiny's sizes."""
    assert grpo.teacher_trace("47+85=", False) == "<think>7+5=12,4+8+1=13</think>132<eos>"
    assert grpo.teacher_trace("47+85=", True) == "<think>7+5=12,4+8+0=12</think>122<eos>"
    problems, held_out = grpo.tiny_problems(3)
    assert len(problems) == 6061 and len(held_out) == 500
    monkeypatch.setattr(grpo, "tiny_problems", lambda seed: (problems[:64], held_out[:50]))
    cold_start = mock.Mock(wraps=functools.partial(grpo.cold_start, steps=3))
    monkeypatch.setattr(grpo, "cold_start", cold_start)
    flags = ["--generation_batch_size", 32, "--max_completion_length", 8, "--output_dir", tmp_path / "out"]
    done = cli("--model", "tiny", *flags, "--max_steps", 2)
    again = cli(*to_go_on(done.out), "--max_steps", 3)
    for text, steps, answers in (done.out, 2, 4 + 2 + 4), (again.out, 1, 1 + 4):
        assert text.count(": reward ") == steps and len(re.findall(ANSWER, text)) == answers
        for name in "accuracy_reward", "think_format_reward":
            assert re.search(rf"^held-out {name}: \d\.\d\d -> \d\.\d\d \(greedy, 50 problems\)$", text, re.M)
    assert cold_start.call_count == 1


@pytest.mark.parametrize("code, options, named", [
    # What would do nothing, or harm, in silence is one line below the usage.
    (2, dict(learning_rate=-0.01), "learning_rate"), (2, dict(epsilon=nan), "epsilon"), (2, dict(delta=1.1), "delta"),
    (2, dict(temperature=0), "temperature"), (2, dict(num_generations=3), "generation_batch_size"),
    (2, dict(num_gen=4), "--num_gen"), (2, dict(model="tiny"), "--dataset"), (2, dict(dataset=None), "--dataset"),
    (2, dict(epsilon=0.1, policy_loss="cispo"), "epsilon"), (2, dict(sync_ref_model=True), "sync_ref"),
    # All else is Python's own error, whole: no weights of a head (none are drawn), a row, a name that is nowhere.
    (1, dict(model="models/judge"), "lm_head.weight"), (1, dict(dataset="rewards.py"), "rewards.py, line 1"),
    (1, dict(reward_funcs="accuracy"), "accuracy_reward")], ids=str)
def test_a_run_that_is_refused_makes_nothing(code, options, named, data):
    """The last line names what is wrong."""
    before, refused = tree(data), cli(*command(data, **options))
    *above, line = refused.err.splitlines()
    assert refused.code == code and named in line
    assert "Traceback" in refused.err if code == 1 else len(above) == 1 and refused.out == ""
    assert tree(data) == before
