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
from conftest import (PROBLEMS, SMALL, assert_same_run, by_row, chat_tokenizer, cli, command, make_model, passes_of,
                      steps_of)
from hypothesis import Phase, given, settings
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


def question(text):
    return [{"role": "user", "content": text}]


def rewards_of(returned, rows):
    """What compute_rewards makes of what a function returned for so many rows."""
    ids = torch.zeros(rows, 1)
    rollout = SimpleNamespace(examples=[{"prompt": ""}] * rows, completions=[""] * rows, completion_ids=ids,
                              completion_mask=ids)
    return grpo.compute_rewards([lambda **columns: returned], rollout)


def tree(folder):
    """Each path below a folder, and the bytes of each file."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {path: path.is_file() and path.read_bytes() for path in paths}


def written_by(done):
    """The folder that a run names at its end."""
    assert done.code == 0, done.err
    return Path(re.search(r"^the model and metrics.jsonl are in (.*)/checkpoint-\d+\b", done.out, re.M)[1])


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
    """A longrope model has other frequencies, and so other keys, from its original positions on: there it ends."""
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    longrope = transformers.Phi3ForCausalLM(transformers.Phi3Config(
        vocab_size=20, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0,
        max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope))
    for model, room in (LLAMA, 64), (longrope, 16):
        ids, *_ = answers_of(model, None, max_completion_length=room - 4, eos_token_ids=-1)
        assert ids.size(1) == room - 4
        with pytest.raises(AssertionError, match="max_completion_length"):
            answers_of(model, None, max_completion_length=room - 3, eos_token_ids=-1)


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


def test_a_prompt_that_is_at_its_end_is_refused():
    """A tokenizer appends the EOS, or a template ends the turn and opens no other, or the assistant has spoken."""
    appends, ends_turns = chat_tokenizer(), chat_tokenizer()
    appends.backend_tokenizer.post_processor = TemplateProcessing("$A <eos>", None, [("<eos>", 1)])
    ends_turns.chat_template = "{% for m in messages %}{{m.content}}<eos>{% endfor %}"
    answered = [*question("1+2"), {"role": "assistant", "content": "3"}]
    for tokenizer, *prompts in ((appends, "1+2="), (chat_tokenizer(), "1+2=", "1<eos>"),
                                (ends_turns, question("1+2")), (chat_tokenizer(), answered)):
        with pytest.raises(AssertionError, match="prompt"):
            grpo.sample_rollout(LLAMA, tokenizer, [{"prompt": prompt} for prompt in prompts], grpo.GRPOConfig(**SMALL))


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


@pytest.mark.parametrize("behind, ends", [
    ("<|im_end|>", True), ("<|im_end|>\n", True), ("", False), ("\n", False), ("<turn>", False)])
def test_an_answer_ends_where_the_chat_template_ends_a_turn(behind, ends):
    """The special token that the template writes behind an assistant's text ends an answer, though no EOS: its text
    is without it. Another text, or a token that is not special, ends nothing."""
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})             # 17
    tokenizer.add_tokens(["<turn>"])                                                        # 18
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + '" + behind + "'}}{% endfor %}{{ '=' }}"
    config = grpo.GRPOConfig(**SMALL | dict(generation_batch_size=64, num_generations=64))
    r = grpo.sample_rollout(LLAMA, tokenizer, [{"prompt": question("1+2")}], config, numpy.random.default_rng(0))
    eos = [1, 17] if ends else [1]
    assert {17, 18} <= set(r.completion_ids.flatten().tolist())         # both were drawn
    assert torch.equal(r.completion_mask, grpo.make_completion_mask(r.completion_ids, eos))
    assert ends != any("<|im_end|>" in message["content"] for message, in r.completions)


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


def perturbed(rewards, rollout, config, nats=9e-4):
    """As if the sampler's log-prob of each second token were higher."""
    rollout.sampler_logps[:, ::2] += nats
    return grpo.outcome_advantages(rewards, rollout, config)


def assert_run_by_hand(problems, **options):
    """A twin of the policy draws the same prompts, none of them twice if there are enough, and answers from seed and
    step, and learns from them, each update in one pass: all metrics and weights are the same. Nothing that a reward
    function leaves reaches the run: dropout that is switched on, gradients, another default dtype."""
    policy, twin, reference = (make_model("GPT2").double().train(mode) for mode in (True, False, False))
    policy.generation_config.eos_token_id = [5, 7]                      # they end an answer, as the tokenizer's 1 does

    def careless(completions, **columns):
        policy.train()
        policy(torch.tensor([[5, 6]])).logits.sum().backward()
        torch.set_default_dtype(torch.bfloat16)
        return [0.3 * (i < 2) + 0.5 * (i > 3) for i in range(len(completions))]         # the second group is silent

    c = grpo.GRPOConfig(**SMALL | options)
    optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=0.0)
    B, G = c.generation_batch_size, c.num_generations
    by_func = torch.tensor([by_row(range(B)), [0.3, 0.3, 0, 0, 0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
    rewards = torch.tensor(c.reward_weights or [1, 1], dtype=torch.float64) @ by_func
    A, groups = grpo.group_advantages(rewards, G, scale_rewards=c.scale_rewards), rewards.view(-1, G)
    steps = grpo.train(policy, grpo.tiny_tokenizer(), problems, [by_row, careless], c, compute_advantages=perturbed)
    for step, (_, r, metrics) in enumerate(steps):
        torch.set_default_dtype(torch.float32)
        if c.sync_ref_model and step % c.ref_model_sync_steps == 0:
            reference.load_state_dict(twin.state_dict())
        rng = numpy.random.default_rng([c.seed, 3, step])
        chosen = rng.choice(len(problems), B // G, replace=len(problems) < B // G)
        assert r.examples == [problems[i] for i in chosen for _ in range(G)]
        answers, *_ = grpo.generate(
            twin, r.prompt_ids[::G], r.prompt_mask[::G], num_generations=G, eos_token_ids=[1, 5, 7],
            max_completion_length=c.max_completion_length, temperature=c.temperature,
            uniforms=torch.tensor(rng.random((B, c.max_completion_length))))
        assert torch.equal(answers, r.completion_ids)

        def score(model, rows):
            return grpo.per_token_logps(model, r.prompt_ids[rows], r.prompt_mask[rows], r.completion_ids[rows],
                                        r.completion_mask[rows], temperature=c.temperature)[0]

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
            rate = optimizer.param_groups[0]["lr"] = c.learning_rate * (1 - step / c.max_steps)
            optimizer.step()
            updates.append({"loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate, **found})
        gap = 9e-4 * loss_mask[learns][:, ::2].sum() / loss_mask[learns].sum().clamp(min=1)
        want = {name: statistics.mean(x[name] for x in updates) for name in updates[0]} | {
            "step": step + 1, "reward": rewards.mean(), "reward_std": rewards.std(),
            "rewards/by_row/mean": by_func[0].mean(), "rewards/careless/mean": by_func[1].mean(),
            "frac_reward_zero_std": (groups.amax(1) == groups.amin(1)).double().mean(),
            "completions/mean_length": mask.sum() / B, "completions/clipped_ratio": 1 - ended.sum() / B,
            "entropy": -(r.sampler_logps * mask).sum() / mask.sum(), "sampling/sampling_logp_difference/mean": gap}
        assert 0 <= metrics.pop("reward_time") < metrics.pop("step_time") < 100
        assert metrics == pytest.approx({name: float(x) for name, x in want.items()}, rel=1e-6, abs=1e-8)
        close(policy.state_dict(), twin.state_dict(), atol=1e-8, rtol=0)
    assert step + 1 == c.max_steps


def one_of(**values):
    return st.fixed_dictionaries({name: st.sampled_from(options) for name, options in values.items()})


# Of beta > 0 and rewards of 0 the gradient would be rounding alone, which AdamW blows up.
any_policy_loss = (
    one_of(epsilon=[0.01, 0.2], epsilon_high=[None, 0.01, 0.3], delta=[None, 1.31]) |
    one_of(policy_loss=["cispo"], epsilon_high=[None, 1.01]) | one_of(policy_loss=["sapo"]))
any_reference = one_of(reward_weights=[None, [0.0, 2.0], [0.0, 0.0]]) | one_of(
    beta=[0.1], use_bias_correction_kl=[False, True], sync_ref_model=[False, True], ref_model_sync_steps=[1, 2])
any_batch = one_of(
    loss_type=["grpo", "dr_grpo", "dapo"], importance_sampling_level=["token", "sequence"], temperature=[1.0, 0.7],
    scale_rewards=["group", "batch", "none"], mask_truncated_completions=[False, True],
    per_device_train_batch_size=range(1, 9), num_iterations=[1, 2, 3], num_mini_batches=[1, 2, 3, 4],
    max_grad_norm=[0.0, 0.02, 1.0], max_steps=[1, 2, 3], seed=range(100))


@settings(DRAWS, max_examples=25, phases=[Phase.generate])              # shrinking would take minutes
@given(st.sampled_from([1, 2, 6]), any_policy_loss, any_reference, any_batch)
def test_train_is_algorithm_1_with_any_options(size, policy_loss, reference, batch):
    try:
        assert_run_by_hand(PROBLEMS[:size], **policy_loss, **reference, **batch)
    finally:
        torch.set_default_dtype(torch.float32)


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


def test_no_run_has_the_loss_whose_parts_do_not_add_up():
    pytest.raises(AssertionError, grpo.GRPOConfig, loss_type="bnpo")


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


@DRAWS
@given(st.lists(st.none() | st.floats(allow_infinity=False) | st.integers(-2**53, 2**53), min_size=1, max_size=4))
def test_rewards_are_in_float64_to_the_last_bit_what_a_function_returned(values):
    """A list, a tuple, an array or a tensor of numbers; None, and NaN, is no reward."""
    want = torch.tensor([nan if value is None else value for value in values], dtype=torch.float64)
    for returned in values, tuple(values), numpy.array(values), want.numpy(), want:
        same(rewards_of(returned, len(values)), want[:, None])


@pytest.mark.parametrize("returned", [
    0.5, [], [1.0] * 7, [1.0] * 9, [[1.0]] * 8, [inf] + [0.0] * 7, ["right"] * 8, "01234567", set(range(8)),
    dict.fromkeys(range(8), 0.5), map(float, range(8))], ids=str)
def test_what_is_no_list_of_a_number_for_each_row_is_refused(returned):
    """Too few, too many, nested, infinite, words, what has no order, a dict (its keys are no rewards), a generator."""
    with pytest.raises((AssertionError, TypeError, ValueError)):
        rewards_of(returned, 8)


# §12 Folders and checkpoints ------------------------------------------------------------------------------------------

STOPPABLE = dict(max_steps=3, save_steps=1, max_completion_length=3, num_mini_batches=2, beta=0.1,
                 sync_ref_model=True, ref_model_sync_steps=2)


def go_on(data, printed):
    """Go on by the printed command, or where there is none yet, begin again, to the bits of the run that nothing stops.
    No file that was there changes."""
    whole = data.joinpath("models").resolve() / "whole"                 # one for all tests
    if not whole.exists():
        assert written_by(cli(*command(data, **STOPPABLE, output_dir=whole))) == whole
    before, commands = tree(data), re.findall(r"after a stop: python \S*grpo.py (--resume_from_checkpoint .*)", printed)
    assert len(commands) == any(re.fullmatch(r"checkpoint-\d+", path.name) is not None for path in before)
    words = shlex.split(commands[0]) if commands else command(data, **STOPPABLE)
    folder = written_by(cli(*words))
    assert before.items() <= tree(data).items()
    assert_same_run(folder, whole)
    return folder


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("a bug"), OSError(28, "a full disk")], ids=repr)
@pytest.mark.parametrize("owner, name, nth", [
    (grpo, "compute_rewards", 2), (torch.optim.AdamW, "step", 2), (grpo, "make_folder", 1),
    (grpo, "save_checkpoint", 2), (transformers.PreTrainedTokenizerBase, "save_pretrained", 2), (torch, "save", 2),
    (Path, "rename", 2), (shutil, "rmtree", 1)], ids=lambda x: getattr(x, "__name__", str(x)))
def test_a_run_stopped_at_any_moment_goes_on_to_the_bits_of_the_whole(owner, name, nth, error, data):
    """Stopped before the n-th of these calls, which come one after the other: metrics, texts and weights are as if
    nothing had happened, with a reference model and mini-batches."""
    calls, call = [], getattr(owner, name)

    def stop(*args, **options):
        calls.append(1)
        if len(calls) == nth:
            raise error
        return call(*args, **options)

    with mock.patch.object(owner, name, stop):
        stopped = cli(*command(data, **STOPPABLE))
    assert stopped.code == 1 and "Traceback" in stopped.err
    go_on(data, stopped.out)


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
    """SIGKILL in the third step, in a process of its own, whose rewards are found in the working folder. All that it
    writes is in the folder that was meant."""
    text = (data / "rewards.py").read_text()
    (data / "rewards.py").write_text(text + CARELESS_REWARDS)
    words = [sys.executable, grpo.__file__, *command(data, **STOPPABLE, output_dir="a run/out")]
    killed = subprocess.run(words, cwd=data, capture_output=True, text=True, timeout=300)
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


def test_options_model_and_data_come_back_from_the_newest_checkpoint_and_reward_functions_are_repeated(data):
    """The newest by its number that is whole. Flags that are given again win. A checkpoint is data: it names no code,
    and one that does is refused."""
    first = command(data, learning_rate=0.02, seed=7, reward_weights=[1, 2], scale_rewards="batch")
    assert cli(*first).code == 0
    for name in "checkpoint-10", "checkpoint-11.part":
        shutil.copytree(data / "out/checkpoint-2", data / "out" / name)
    rewards = ["--reward_funcs", "think_format_reward", "rewards.length"]
    options, config, _ = grpo.parse_options(first)
    resumed_config, resumed, _ = grpo.parse_options(["--resume_from_checkpoint", "out", *rewards, "--seed", "8"])
    assert resumed_config == grpo.GRPOConfig(**vars(config) | {"seed": 8})
    assert vars(resumed) == vars(options) | {"resume_from_checkpoint": "out/checkpoint-10"}
    longer = ["--resume_from_checkpoint", "out/checkpoint-2", "--max_steps", 3]
    assert cli(*longer).code == 2
    assert written_by(cli(*longer, *rewards)) == data / "out-2"
    state = data / "out/checkpoint-2/trainer_state.pt"
    torch.save(torch.load(state, weights_only=True) | {"code": print}, state)
    assert cli(*longer, *rewards).code == 1


# §11, §12 The demo and the command line -------------------------------------------------------------------------------

ANSWER = r"  ('.*') -> (.*?)(?: \(cut off\))?   reward (\S+)"
SHOWN = ["reward", "frac_reward_zero_std", "entropy", "completions/clipped_ratio", "step_time", "reward_time"]


def test_the_console_shows_ten_times_the_means_since_the_last_time_and_an_answer(data):
    """Of metrics.jsonl's lines; at the start the first prompt as the model reads it. completions.jsonl has of each step
    a prompt, its answers, what each function gave them, their advantages."""
    names, weights = ["rewards.length", "think_format_reward", "rewards.nothing"], [2.0, 1.0, 1.0]
    done = cli(*command(data, dataset=data / "chat.jsonl", max_steps=20, reward_funcs=names, reward_weights=weights))
    first, *printed, last = [line for line in done.out.splitlines() if "after a stop" not in line]
    assert repr(PROBLEMS[0]["prompt"]) in first and len(printed) == 20                  # the template has added its =
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
    assert step == 20


def test_the_tiny_job_from_end_to_end(tmp_path, monkeypatch):
    """Cold start, answers and accuracy, GRPO, answers and accuracy; a resume begins with no cold start. Flags win over
    tiny's sizes."""
    assert grpo.teacher_trace("47+85=", False) == "<think>7+5=12,4+8+1=13</think>132<eos>"
    assert grpo.teacher_trace("47+85=", True) == "<think>7+5=12,4+8+0=12</think>122<eos>"
    problems, held_out = grpo.tiny_problems(3)
    assert len(problems) == 6061 and len(held_out) == 500
    monkeypatch.setattr(grpo, "tiny_problems", lambda seed: (problems[:64], held_out[:50]))
    cold_start = mock.Mock(wraps=functools.partial(grpo.cold_start, steps=3))
    monkeypatch.setattr(grpo, "cold_start", cold_start)
    flags = ["--generation_batch_size", 32, "--max_completion_length", 8, "--output_dir", tmp_path / "out"]
    done = cli("--model", "tiny", *flags, "--max_steps", 2)
    again = cli("--resume_from_checkpoint", tmp_path / "out", "--max_steps", 3, "--reward_funcs", "accuracy_reward")
    for text, steps in (done.out, 2), (again.out, 1):
        assert text.count(": reward ") == steps and len(re.findall(ANSWER, text)) == 4 + steps + 4
        assert re.search(r"^held-out accuracy_reward: \d\.\d\d -> \d\.\d\d \(greedy, 50 problems\)$", text, re.M)
    assert cold_start.call_count == 1


def test_any_causal_lm_trains_on_a_file_and_answers_another(data):
    """Weights in bfloat16 become float32, are trained and saved for from_pretrained; its own code is never run. Before
    and after, all problems of the other file are answered greedily."""
    done = cli(*command(data, dataset=data / "chat.jsonl", eval_dataset=data / "text.jsonl",
                        reward_funcs=["rewards.length", "accuracy_reward"]))
    assert written_by(done) == data / "out"
    means, config, length = [], grpo.parse_options(command(data))[0], grpo.load_reward_funcs(["rewards.length"])
    for name in data / "models/Llama", data / "out/checkpoint-2":
        model, tokenizer = grpo.load_model(name)
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        r = grpo.sample_rollout(model, tokenizer, PROBLEMS, config)
        means.append(grpo.compute_rewards(length, r).nanmean())
    assert means[0] != means[1]
    assert f": {means[0]:.2f} -> {means[1]:.2f} (greedy, 12 problems)\n" in done.out


def test_a_dataset_may_have_any_line_breaks_and_a_byte_order_mark(tmp_path):
    """In its texts, escaped or as UTF-8, and between its rows: LF or CRLF, blank lines."""
    rows = [{"prompt": "\n\r\x0b\x85\u2028ü", "more": more} for more in (None, [True, ""], 0.5)]
    for ascii, end, mark in (True, "\n", ""), (False, "\r\n\n", "\ufeff"):
        lines = [json.dumps(row, ensure_ascii=ascii) for row in rows]
        (tmp_path / "any").write_bytes((mark + end + end.join(lines)).encode())
        assert grpo.load_dataset(tmp_path / "any") == rows


@pytest.mark.parametrize("line", ["{oops", '{"prompt": "1"', '["1"]', '{"solution": "1"}', '{"prompt": "1"}',
                                  '{"prompt": "", "solution": "1"}', '{"prompt": "1", "solution": "1", "more": 1}'])
def test_a_broken_line_of_the_data_is_named(line, tmp_path):
    """Its file and its number, blank lines counted: no JSON, no object, no prompt, other columns than the first."""
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{"prompt": "1", "solution": "1"}}\n\n{line}\n{{"prompt": "1", "solution": "1"}}\n')
    with pytest.raises((AssertionError, ValueError), match="data.jsonl, line 3"):
        grpo.load_dataset(path)


@pytest.mark.parametrize("code, options, named", [
    # What would do nothing, or harm, in silence is one line below the usage.
    (2, dict(learning_rate=-0.01), "learning_rate"), (2, dict(epsilon=nan), "epsilon"), (2, dict(delta=1.1), "delta"),
    (2, dict(temperature=inf), "temperature"), (2, dict(temperature=0), "temperature"),
    (2, dict(num_generations=3), "generation_batch_size"), (2, dict(num_gen=4), "--num_gen"),
    (2, dict(model="tiny"), "--dataset"), (2, dict(dataset=None), "--dataset"),
    (2, dict(epsilon=0.1, policy_loss="cispo"), "epsilon"), (2, dict(sync_ref_model=True), "sync_ref"),
    # All else is Python's own error, whole: no weights of a head (none are drawn), a NaN, two functions of one name,
    # which would share a metric, a function that fails.
    (1, dict(model="models/judge"), "lm_head.weight"), (1, dict(reward_weights=[nan, 1]), "reward_weights"),
    (1, dict(reward_funcs="math.sqrt"), "sqrt"), (1, dict(reward_funcs=["accuracy_reward"] * 2), "accuracy_reward")],
    ids=str)
def test_a_run_that_is_refused_or_fails_before_its_first_step_is_done_makes_nothing(code, options, named, data):
    """The last line names what is wrong."""
    before, refused = tree(data), cli(*command(data, **options))
    *above, line = refused.err.splitlines()
    assert refused.code == code and named in line
    assert "Traceback" in refused.err if code == 1 else len(above) == 1 and refused.out == ""
    assert tree(data) == before


def test_full_determinism_asks_torch_for_it(data, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    with mock.patch.object(torch, "use_deterministic_algorithms") as asked:
        assert cli(*command(data, max_steps=1, full_determinism=True)).code == 0
    asked.assert_called_once_with(True, warn_only=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
