"""What a run of grpo.py promises: sampling (§9), Algorithm 1 (§10), command line and files (§11).

    python -m pytest -q worked_examples/tests/test_training.py

A test's name is a promise, its docstring says it. The equations themselves are tested in test_grpo.py.
"""

import copy
import functools
import itertools
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from unittest import mock

import pytest
import tokenizers
import torch
import transformers
from support import (SMALL, assert_same_run, by_row, chat_tokenizer, cli, command, files_of, first_two, lines_of,
                     make_model, passes_of, python, resume, steps_of, weights_of)

import grpo

nan, inf = math.nan, math.inf
close = torch.testing.assert_close


# Sampling -------------------------------------------------------------------------------------------------------------

PROMPT_IDS = torch.tensor([[-7, -7, 5, 6], [7, 8, 9, 10], [-7, 3, 4, 5]])           # garbage where the mask is 0
PROMPT_MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
UNIFORMS = torch.rand(24, 12, generator=torch.Generator().manual_seed(0))


def sample(model, pad=0, G=8):
    """G completions for each of three prompts, of at most 12 tokens; two words end one."""
    ids, mask, uniforms = (x.to(model.device) for x in (PROMPT_IDS, PROMPT_MASK, UNIFORMS[:3 * G]))
    return grpo.generate(model, ids, mask, max_completion_length=12, eos_token_ids=[1, 2], num_generations=G,
                         pad_token_id=pad, temperature=0.7, uniforms=uniforms)


def assert_sampled_as_scored(model, pad=0, tolerance=2e-5):
    ids, mask, logps, entropies = sample(model, pad)
    prompts = (x.repeat_interleave(8, 0).to(model.device) for x in (PROMPT_IDS, PROMPT_MASK))
    scored = grpo.per_token_logps(model, *prompts, ids, mask, temperature=0.7, compute_entropy=True)
    assert 2 * mask.sum(1).min() < mask.sum(1).max()                    # ragged, or nothing is tested
    close(logps, scored[0].detach(), atol=tolerance, rtol=0)
    close(entropies, scored[1], atol=tolerance, rtol=0)
    assert torch.equal(mask, grpo.make_completion_mask(ids, [1, 2])) and (ids[mask == 0] == pad).all()


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2", "Qwen3Next"])
@pytest.mark.parametrize("pad", [0, 1], ids=["pad", "pad is EOS"])
def test_recorded_logps_and_entropies_are_the_scorers(kind, pad):
    """The sampler, with its cache, and the scorer, in one pass, say the same of each sampled token."""
    assert_sampled_as_scored(make_model(kind), pad)


def logits_of(model, i, answer):
    """The model's logits for each word of an answer to prompt i, in one pass without padding or cache."""
    prompt = PROMPT_IDS[i][PROMPT_MASK[i] == 1]
    return model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1:-1]


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Next"])
@pytest.mark.parametrize("G", [1, 8])
def test_each_token_is_where_its_uniform_number_falls(kind, G):
    """Σ_{w<o} p_w <= u < Σ_{w<=o} p_w: a token follows from its own prompt, its own number and nothing else."""
    model = make_model(kind)
    ids, mask, _, _ = sample(model, G=G)
    for i in range(3 * G):
        answer = ids[i][mask[i] == 1]
        assert len(answer) == 12 or answer[-1] in (1, 2)
        probabilities = (logits_of(model, i // G, answer) / 0.7).softmax(-1)
        high = probabilities.cumsum(-1).gather(1, answer[:, None])[:, 0]
        low, u = high - probabilities.gather(1, answer[:, None])[:, 0], UNIFORMS[i, :len(answer)]
        assert (low - 1e-5 <= u).all() and (u <= high + 1e-5).all()
    for u, word in ((0.0, 0), (1 - 2**-24, 19)):                        # the ends of the interval: first and last word
        ids, *_ = grpo.generate(model, PROMPT_IDS, PROMPT_MASK, max_completion_length=4, eos_token_ids=1,
                                temperature=100.0, uniforms=torch.full((3, 4), u))
        assert ids.tolist() == [[word] * 4] * 3


def test_each_word_of_a_large_vocabulary_can_be_drawn():
    """152,000 words, of which one is likely: in float32 the probabilities of the others would be lost in the sum."""
    model, logits = make_model("Llama"), torch.zeros(152_000)
    logits[0] = 20.0
    model.lm_head.forward = lambda hidden: logits.expand(*hidden.shape[:2], -1)
    words = torch.arange(1, 152_000, 5_000)
    cdf = logits.softmax(0, dtype=torch.float64).cumsum(0)
    between = (cdf[words - 1] + cdf[words]) / 2
    ids, *_ = grpo.generate(model, PROMPT_IDS[1:2], PROMPT_MASK[1:2], max_completion_length=1, eos_token_ids=1,
                            num_generations=len(words), uniforms=between[:, None])
    assert torch.equal(ids[:, 0], words)


def test_each_prompt_is_prefilled_once_and_ended_rows_leave_the_batch():
    """The passes of sampling: all prompts, then one token of each row that has not ended; no argmax on the way."""
    model = make_model("Llama")
    passes = passes_of(model)
    with mock.patch.object(torch.Tensor, "argmax", side_effect=AssertionError("a likeliest word is looked for")):
        live = sample(model)[1].sum(0).tolist()                         # rows whose token t is real
    assert live[0] == 24 > live[4] > live[-1] > 0
    assert passes == [(rows, width, torch.float32) for rows, width in [(3, 4)] + [(rows, 1) for rows in live[1:]]]


def test_greedy_takes_the_most_likely_word():
    """Without uniform numbers, each token is the likeliest after those before it."""
    model = make_model("Qwen2")
    ids, mask, logps, _ = grpo.generate(model, PROMPT_IDS, PROMPT_MASK, max_completion_length=5, eos_token_ids=1)
    for i in range(3):
        answer, real = ids[i][mask[i] == 1], logps[i][mask[i] == 1]
        best, words = logits_of(model, i, answer).log_softmax(-1).max(-1)
        assert torch.equal(answer, words)
        close(real, best.detach(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["lm_head", "model.layers.1.mlp.down_proj"])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_weights_that_are_not_finite_are_an_error(name, value):
    """A model that broke is named at once; no samples come from it."""
    model = make_model("Llama")
    model.get_submodule(name).weight.data[3, 3] = value
    with pytest.raises(FloatingPointError, match="LlamaForCausalLM are not finite"):
        sample(model)


def test_prompts_are_padded_on_the_left_and_messages_pass_the_template():
    """A tokenizer's special tokens are added to a text, not once more to what its chat template has made."""
    tokenizer, text, chat = chat_tokenizer(), ["12+3=", "4="], [[{"role": "user", "content": x} for x in y]
                                                                for y in (["1", "2+3"], ["4"])]
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<eos> $A", None, [("<eos>", 1)])
    for prompts, special in ((text, [1]), (chat, [])):
        ids, mask = grpo.encode_prompts(tokenizer, prompts, "cpu")
        want = [special + grpo.tiny_tokenizer()(prompt)["input_ids"] for prompt in text]
        assert [row[m == 1].tolist() for row, m in zip(ids, mask)] == want
        assert mask[1].tolist() == [0, 0, 0] + [1] * len(want[1])


def test_every_eos_id_ends_a_completion():
    """The tokenizer's EOS and those of the model's generation config."""
    model, tokenizer = make_model("Llama"), grpo.tiny_tokenizer()
    of_tiny = grpo.all_eos_token_ids(grpo.tiny_model(tokenizer, 0), tokenizer)
    assert grpo.all_eos_token_ids(model, tokenizer) == of_tiny == [1]
    model.generation_config.eos_token_id = [5, 7]
    assert grpo.all_eos_token_ids(model, tokenizer) == [1, 5, 7]
    (_, r, _), = steps_of(model)
    last = r.completion_ids.gather(1, r.completion_mask.sum(1, keepdim=True) - 1).squeeze(1)
    assert torch.equal(r.terminated, torch.isin(last, torch.tensor([1, 5, 7]))) and {5, 7} & set(last.tolist())


# Algorithm 1 ----------------------------------------------------------------------------------------------------------

def share_of_the_rate(c, update):
    """The schedule: the share of the learning rate at one of max_steps·mu updates."""
    if update < c.warmup_steps:
        return update / c.warmup_steps
    done = (update - c.warmup_steps) / (c.max_steps * c.num_iterations - c.warmup_steps)
    return {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}[c.lr_scheduler_type]


WORDS = ["beta", "delta", "loss_type", "policy_loss", "importance_sampling_level", "use_bias_correction_kl",
         "max_completion_length", "epsilon_high"]                       # mean the same in the config and in the loss


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
        close(r.logps, old, atol=1e-6, rtol=0)
        mask, ended = r.completion_mask, (r.completion_ids == 1).any(1)
        by_func = [f(range(B)) for f in reward_funcs]
        weights = c.reward_weights or [1.0] * len(reward_funcs)
        rewards = [sum(w * x for w, x in zip(weights, row)) for row in zip(*by_func, strict=True)]
        advantages = grpo.group_advantages(torch.tensor(rewards), G, scale_rewards=c.scale_rewards)
        for _ in range(c.num_iterations):
            loss, found = grpo.grpo_loss(
                score(twin, *sampled)[0], advantages, mask * (ended[:, None] | (not c.mask_truncated_completions)),
                old_logps=old, ref_logps=ref if c.beta > 0 else None, epsilon_low=c.epsilon,
                **{word: getattr(c, word) for word in WORDS})
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), c.max_grad_norm or inf).item()
            optimizer.param_groups[0]["lr"] = lr = c.learning_rate * share_of_the_rate(c, next(update))
            optimizer.step()
        silent = [len(set(rewards[i:i + G])) == 1 for i in range(0, B, G)]
        want = {"step": step + 1, "loss": loss.item(), "grad_norm": norm, "learning_rate": lr,
                "reward": statistics.mean(rewards), "reward_std": statistics.stdev(rewards),
                "frac_reward_zero_std": statistics.mean(silent), "entropy": (entropies * mask).sum() / mask.sum(),
                "completions/mean_length": mask.sum() / B, "completions/clipped_ratio": 1 - ended.sum() / B,
                **found, "sampling/sampling_logp_difference/max": 0.0,
                **{f"rewards/{f.__name__}/mean": statistics.mean(x) for f, x in zip(reward_funcs, by_func)}}
        want = {name: float(x) for name, x in want.items()} | {"step_time": metrics["step_time"]}
        assert metrics == pytest.approx(want, rel=1e-4, abs=1e-6)
        for a, b in zip(policy.parameters(), twin.parameters()):
            close(a, b, atol=1e-6, rtol=0)
    assert step + 1 == c.max_steps
    return r, [rows for rows, width, _ in passes if width > r.prompt_ids.size(1)]


MU = dict(num_iterations=3, max_steps=2)                                # the ratio is 1 in the first update
REFRESHED = dict(beta=0.1, max_steps=4)
OPTIONS = [  # field, a value that is not its default, and the options that let it show
    ("learning_rate", 0.003, {}), ("warmup_steps", 2, dict(max_steps=4)), ("weight_decay", 0.5, {}),
    ("lr_scheduler_type", "cosine", dict(max_steps=4)), ("lr_scheduler_type", "constant", dict(max_steps=2)),
    ("max_steps", 3, {}), ("max_grad_norm", 0.02, dict(max_steps=3)), ("max_grad_norm", 0.0, dict(max_steps=3)),
    ("num_generations", 2, {}), ("generation_batch_size", 12, {}), ("num_iterations", 3, {}),
    ("reward_weights", [2.0, -1.0], {}), ("max_completion_length", 7, dict(loss_type="dr_grpo")),
    ("temperature", 0.7, REFRESHED | MU), ("loss_type", "grpo", {}), ("loss_type", "dr_grpo", {}), ("beta", 0.1, {}),
    ("policy_loss", "cispo", MU), ("policy_loss", "sapo", MU), ("epsilon", 0.1, MU), ("epsilon_high", 0.3, MU),
    ("epsilon_high", 1.01, MU | dict(policy_loss="cispo")), ("importance_sampling_level", "sequence", MU),
    ("delta", 1.02, MU), ("use_bias_correction_kl", True, MU | REFRESHED), ("scale_rewards", "batch", {}),
    ("scale_rewards", "none", {}), ("mask_truncated_completions", True, {}),
    ("sync_ref_model", True, REFRESHED | dict(ref_model_sync_steps=2)),
    ("ref_model_sync_steps", 3, REFRESHED | dict(sync_ref_model=True))]


@pytest.mark.parametrize("field, value, others", OPTIONS, ids=[f"{field}-{value}" for field, value, _ in OPTIONS])
def test_each_option_does_what_its_word_says(field, value, others):
    """A run with the option is the twin's with it, and is not the twin's with the default."""
    options = others | {field: value}
    assert_run_by_hand(**options)
    default = SMALL.get(field, getattr(grpo.GRPOConfig(), field))
    with pytest.raises((AssertionError, ValueError)):                   # or the run does not show the option at all
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
        scored = options.get("num_iterations", 1) + (beta > 0)          # for each update, for π_ref
        assert passes == [min(part, rows - i) for i in range(0, rows, part)] * scored


@pytest.mark.parametrize("row, shift, difference", [(0, 0.5, 0.5), (1, -0.25, 0.25), (3, 0.5, 0.0)])    # A = 0 in row 3
def test_the_sampler_is_compared_with_the_scorer(row, shift, difference, monkeypatch):
    """In the rows that learn, before the first update changes the weights."""
    def shifted(*args, **options):
        ids, mask, logps, entropies = generate(*args, **options)
        logps[row] -= shift
        return ids, mask, logps * mask, entropies

    generate = grpo.generate
    monkeypatch.setattr(grpo, "generate", shifted)
    for _, _, metrics in steps_of(make_model("Llama"), num_iterations=2, per_device_train_batch_size=3):
        assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(difference, abs=1e-5)


def test_bf16_is_autocast_in_sampling_and_scoring_over_float32_weights():
    """Every pass computes in bfloat16, and the optimizer has float32 weights."""
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

    monkeypatch.setattr(grpo, "generate", note)
    runs = [r for seed in (0, 1, 42) for _, r, _ in steps_of(make_model("Llama"), seed=seed, max_steps=3)]
    u, prompts = torch.stack(numbers), [[row["prompt"] for row in r.rows] for r in runs]
    assert u.shape == (9, 8, 10) and len(u.unique()) > 700 and 0 <= u.min() < 0.05 < 0.95 < u.max() < 1
    assert len(set(map(tuple, prompts))) > 4
    state = grpo.initial_state(make_model("Llama"), grpo.GRPOConfig(**SMALL))
    state.step = 1
    (_, r, _), = steps_of(make_model("Llama"), train={"state": state}, max_steps=2)
    assert [row["prompt"] for row in r.rows] == prompts[7] and torch.equal(numbers[9], u[7])        # 42: the default


def test_dropout_changes_no_run_and_what_is_frozen_stays():
    """train puts the policy in eval mode. Weights that need no gradient get none, no moments and no decay."""
    one, other = (make_model("GPT2").train(mode) for mode in (True, False))
    lines = [[metrics for *_, metrics in steps_of(model, max_steps=2)] for model in (one, other)]
    assert [line | {"step_time": 0} for line in lines[0]] == [line | {"step_time": 0} for line in lines[1]]
    frozen = one.transformer.wte.weight.requires_grad_(False)
    before = frozen.clone()
    state = list(steps_of(one, weight_decay=0.5, beta=0.1))[0][0]
    assert torch.equal(frozen, before) and frozen not in state.optimizer.state
    assert all(weight in state.optimizer.state for weight in one.parameters() if weight is not frozen)


def test_a_policy_with_gradient_checkpointing_is_refused():
    """Eval mode would switch it off without a word, and the memory that it was to save would be needed."""
    model = make_model("Llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing"):
        next(steps_of(model))


def test_an_update_makes_five_tensors_of_the_logits_size():
    """What bounds memory: log_softmax and gather, forward and backward."""
    logits, shapes = torch.zeros(2, 3, 5, requires_grad=True), []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            shapes.append(function.__name__ if getattr(result, "shape", None) == logits.shape else None)
            return result

    with Count():
        grpo.selective_log_softmax(logits, torch.zeros(2, 3).long()).sum().backward()
    print(shapes)
    assert sum(name is not None for name in shapes) <= 5


@pytest.mark.parametrize("where", ["the loss", "its gradient alone"])
def test_what_is_not_finite_ends_the_run_before_the_weights_change(where, monkeypatch):
    """A loss, or a gradient whose loss is finite: an error that names the step; the step is not taken."""
    def broken(logps, *args, **options):
        loss, metrics = grpo_loss(logps, *args, **options)
        return loss + (inf if where == "the loss" else (logps.sum() * 0).sqrt()), metrics

    grpo_loss, model = grpo.grpo_loss, make_model("Llama")
    monkeypatch.setattr(grpo, "grpo_loss", broken)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match="step 1: the loss or its gradient is not finite"):
        next(steps_of(model))
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_presets_and_defaults_are_those_of_the_papers_and_of_trl():
    """A preset holds what its paper sets; the other defaults are TRL's, but for the KL's correction."""
    assert grpo.PRESETS == {
        "deepseekmath": dict(loss_type="grpo", beta=0.04, learning_rate=1e-6, num_generations=64,
                             generation_batch_size=1024, max_completion_length=1024),
        "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"), "sapo": dict(loss_type="grpo", policy_loss="sapo"),
        "dapo": dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=True),
        "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4),
        "cispo": dict(loss_type="dapo", policy_loss="cispo", epsilon_high=5.0)}           # the cap is TRL's advice
    trl = dict(learning_rate=1e-6, beta=0.0, num_iterations=1, epsilon=0.2, epsilon_high=None, delta=None,
               loss_type="dapo", scale_rewards="group", importance_sampling_level="token", num_generations=8,
               max_completion_length=512, temperature=1.0, mask_truncated_completions=False, max_grad_norm=1.0,
               sync_ref_model=False, ref_model_sync_steps=512, lr_scheduler_type="linear", weight_decay=0.0,
               warmup_steps=0)
    default = grpo.GRPOConfig()
    assert {name: getattr(default, name) for name in trl} == trl and default.use_bias_correction_kl is False
    of_loss = grpo.grpo_loss.__kwdefaults__                             # max_completion_length: None, the caller's
    assert {name: of_loss[name] for name in WORDS[:-2]} == {name: getattr(default, name) for name in WORDS[:-2]}
    with pytest.raises(AttributeError):
        default.beta = 1.0
    tested_elsewhere = {"bf16", "seed", "per_device_train_batch_size", "output_dir", "save_steps"}
    assert {field for field, _, _ in OPTIONS} | tested_elsewhere == set(vars(default)), "an option without a test"


def test_rewards_reach_the_prompt_that_they_belong_to():
    """A reward function sees prompts, completions, their ids without padding, and the dataset's columns, by row."""
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


def test_what_a_reward_function_changes_is_its_own():
    """The dataset, the rollout, the other answers of the group and the other functions keep what they had."""
    dataset = [{"prompt": [{"role": "user", "content": "1"}], "notes": []}] * 2
    seen = []

    def judge(prompts, completions, completion_ids, notes):
        seen.append(copy.deepcopy((prompts, completions, completion_ids, notes)))
        for prompt, completion, ids, note in zip(prompts, completions, completion_ids, notes):
            assert [len(prompt), len(completion), note] == [1, 1, []]   # no other answer has added to it
            prompt.append({"role": "user", "content": "is it right?"})
            completion.append({"role": "user", "content": "think again"})
            ids.clear()
            note.append("seen")
        return by_row(prompts)

    (_, r, _), = grpo.train(make_model("Llama"), chat_tokenizer(), dataset, [judge, judge], grpo.GRPOConfig(**SMALL))
    assert seen[0] == seen[1] and dataset == [{"prompt": [{"role": "user", "content": "1"}], "notes": []}] * 2
    assert [r.rows, r.completions] == [dataset[:1] * 8, seen[0][1]]


@pytest.mark.parametrize("function", [functools.partial(by_row), mock.Mock(wraps=by_row, spec=by_row.__call__)])
def test_any_callable_is_a_reward_function(function):
    """A functools.partial or an object has no __name__; its metric has the name of its class."""
    (_, _, metrics), = steps_of(make_model("Llama"), [function])
    assert metrics[f"rewards/{type(function).__name__}/mean"] == metrics["reward"] == 0.875


def test_advantages_are_an_argument_and_the_rollout_stays_as_it_is():
    """compute_advantages gives (B,) or (B, T); what it gives is what the loss gets; another shape is an error."""
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
    answers = lambda *args: grpo.outcome_advantages(*args)[:, 0]        # one for each answer will do
    (_, _, of_answers), = steps_of(make_model("Llama"), train={"compute_advantages": answers}, **options)
    assert of_answers == once | {"step_time": of_answers["step_time"]}
    with pytest.raises((ValueError, AssertionError), match="advantages: got"):
        list(steps_of(make_model("Llama"), train={"compute_advantages": lambda *args: torch.ones(8, 99)}))


@pytest.mark.parametrize("result", [[1.0], [1.0] * 9, [], [inf] * 8, [nan] * 8, [None] * 7 + [-inf]], ids=str)
def test_rewards_of_wrong_number_or_not_finite_are_named(result):
    """The error names the function, what it gave and what is allowed."""
    with pytest.raises(ValueError, match="reward function <lambda>: got .*; allowed is 8 numbers"):
        next(steps_of(make_model("Llama"), [by_row, lambda **kwargs: result]))


def test_no_reward_is_nan():
    """None is the reward of a function that does not apply; a tuple, booleans and tensors of one number will do."""
    rollout = next(steps_of(make_model("Llama")))[1]
    rewards = grpo.compute_rewards([lambda **_: [None] * 8, lambda **_: (None, True, *torch.arange(6))], rollout)
    assert rewards.isnan().tolist() == [[True, True]] + [[True, False]] * 7
    assert rewards[1:, 1].tolist() == [1, 0, 1, 2, 3, 4, 5] and rewards.dtype == torch.float32
