"""What a run of grpo.py promises: sampling (§9), Algorithm 1 (§10), command line, files and devices (§11).

A test's name is a promise, its docstring says it. The equations themselves are tested in test_grpo.py.
"""

import copy
import functools
import itertools
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
import torch
import transformers
from support import (ROOT, SMALL, assert_same_run, by_row, chat_tokenizer, cli, command, files_of, first_two, lines_of,
                     make_model, passes_of, python, resume, steps_of, weights_of)
from tokenizers.processors import TemplateProcessing
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import grpo

nan, inf, aten = math.nan, math.inf, torch.ops.aten
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


@pytest.mark.parametrize("kind", ["Llama", "Qwen3Next"])
@pytest.mark.parametrize("G", [1, 8])
def test_each_token_is_where_its_uniform_number_falls(kind, G):
    """Σ_{w<o} p_w <= u < Σ_{w<=o} p_w: a token follows from its own prompt, its own number and nothing else."""
    model = make_model(kind)
    ids, mask, _, _ = sample(model, G=G)
    for i in range(3 * G):
        answer = ids[i][mask[i] == 1]
        assert len(answer) == 12 or answer[-1] in (1, 2)
        prompt = PROMPT_IDS[i // G][PROMPT_MASK[i // G] == 1]           # in one pass, without padding or cache
        logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1:-1]
        probabilities = (logits / 0.7).softmax(-1)
        high = probabilities.cumsum(-1).gather(1, answer[:, None])[:, 0]
        low, u = high - probabilities.gather(1, answer[:, None])[:, 0], UNIFORMS[i, :len(answer)]
        assert (low - 1e-5 <= u).all() and (u <= high + 1e-5).all()


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


def test_each_prompt_is_prefilled_once_and_ended_rows_leave_the_batch():
    """The passes of sampling: all prompts, then one token of each row that has not ended; no argmax on the way."""
    model = make_model("Llama")
    passes = passes_of(model)
    with mock.patch.object(torch.Tensor, "argmax", side_effect=AssertionError("a likeliest word is looked for")):
        live = sample(model)[1].sum(0).tolist()                         # rows whose token t is real
    assert live[0] == 24 > live[4] > live[-1] > 0
    assert passes == [(rows, width, torch.float32) for rows, width in [(3, 4)] + [(rows, 1) for rows in live[1:]]]


def test_greedy_takes_the_likeliest_word():
    """Without uniform numbers: as sampling does where the temperature is next to 0."""
    options = dict(prompt_ids=PROMPT_IDS, prompt_mask=PROMPT_MASK, max_completion_length=8, eos_token_ids=1)
    greedy, *_ = grpo.generate(make_model("Qwen2"), **options)
    cold, *_ = grpo.generate(make_model("Qwen2"), **options, temperature=1e-4, uniforms=UNIFORMS[:3])
    assert torch.equal(greedy, cold) and len(greedy.unique()) > 2


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
    tokenizer, texts = chat_tokenizer(), ["12+3=", "4="]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<eos> $A", None, [("<eos>", 1)])
    chats = [[{"role": "user", "content": x} for x in contents] for contents in (["1", "2+3"], ["4"])]
    for prompts, special in ((texts, [1]), (chats, [])):
        ids, mask = grpo.encode_prompts(tokenizer, prompts, "cpu")
        want = [special + grpo.tiny_tokenizer()(text)["input_ids"] for text in texts]
        assert [row[m == 1].tolist() for row, m in zip(ids, mask)] == want
        assert mask[1].tolist() == [0, 0, 0] + [1] * len(want[1])


def test_every_eos_id_ends_a_completion():
    """The tokenizer's EOS and those of the model's generation config."""
    model, tokenizer = make_model("Llama"), grpo.tiny_tokenizer()
    assert grpo.all_eos_token_ids(model, tokenizer) == [1]
    model.generation_config.eos_token_id = [5, 7]
    assert grpo.all_eos_token_ids(model, tokenizer) == [1, 5, 7]
    (_, r, _), = steps_of(model, [first_two], generation_batch_size=64, num_generations=32)
    last = r.completion_ids.gather(1, r.completion_mask.sum(1, keepdim=True) - 1).squeeze(1)
    assert torch.equal(r.terminated, torch.isin(last, torch.tensor([1, 5, 7]))) and {5, 7} < set(last.tolist())
    assert (r.terminated & (r.completion_mask.sum(1) == 10)).any()      # an EOS at the very limit, too


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


def test_a_silent_step_moves_by_momentum():
    """Where no row learns the gradient is 0, not absent: AdamW goes on in the direction of the steps before."""
    calls = itertools.count()                                           # two for each step: the run's, the twin's
    assert_run_by_hand([lambda completions, **_: by_row(completions) if next(calls) < 2 else [0.0] * 8], max_steps=3)


@pytest.mark.parametrize("row, difference", [(0, 0.5), (1, 0.25), (3, 0.0)])
def test_the_sampler_is_compared_with_the_scorer(row, difference):
    """In the rows that learn, which row 3 (A = 0) does not, and before the first update changes the weights."""
    def shifted(*args, generate=grpo.generate, **options):
        ids, mask, logps, entropies = generate(*args, **options)
        logps[row] += {0: -0.5, 1: 0.25, 3: 0.5}[row] * mask[row]
        return ids, mask, logps, entropies

    with mock.patch.object(grpo, "generate", shifted):
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


def test_samples_and_prompts_are_keyed_by_seed_and_step():
    """No state is carried along: step 1 of a run that goes on there is step 1 of the whole run. The seed is 42."""
    with mock.patch.object(grpo, "generate", wraps=grpo.generate) as generate:
        runs = [r for seed in (0, 1, 42) for _, r, _ in steps_of(make_model("Llama"), seed=seed, max_steps=3)]
        state = grpo.initial_state(make_model("Llama"), grpo.GRPOConfig(**SMALL))
        state.step = 1
        runs += [r for _, r, _ in steps_of(make_model("Llama"), train={"state": state}, max_steps=2)]
    u = torch.stack([call.kwargs["uniforms"] for call in generate.call_args_list])
    prompts = [tuple(row["prompt"] for row in r.rows) for r in runs]
    assert u.shape == (10, 8, 10) and len(u.unique()) == 720 and 0 <= u.min() < 0.05 < 0.95 < u.max() < 1
    assert prompts[9] == prompts[7] and torch.equal(u[9], u[7]) and len(set(prompts)) > 4
    assert all(len(set(row)) == 2 for row in prompts)                   # no prompt twice in a step


def test_dropout_changes_no_run_and_what_is_frozen_stays():
    """train puts the policy in eval mode, which would switch gradient checkpointing off: refused, not silent.
    Weights that need no gradient get none, no moments and no decay."""
    one, other = (make_model("GPT2").train(mode) for mode in (True, False))
    lines = [[metrics | {"step_time": 0} for *_, metrics in steps_of(model, max_steps=2)] for model in (one, other)]
    assert lines[0] == lines[1]
    frozen = one.transformer.wte.weight.requires_grad_(False)
    before = frozen.clone()
    (state, _, _), = steps_of(one, weight_decay=0.5, beta=0.1)
    assert torch.equal(frozen, before) and set(state.optimizer.state) == set(one.parameters()) - {frozen}
    one.transformer.h[0].gradient_checkpointing = True                  # as one.gradient_checkpointing_enable() does
    with pytest.raises(ValueError, match="gradient checkpointing"):
        next(steps_of(one))


def test_a_score_and_its_gradient_make_five_tensors_of_the_logits_size():
    """What bounds memory: log_softmax and gather, forward and backward."""
    logits, made = torch.zeros(2, 3, 5, requires_grad=True), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made.append(function(*args, **kwargs or {}))
            return made[-1]

    with Watch():
        grpo.selective_log_softmax(logits, torch.zeros(2, 3).long()).sum().backward()
    assert len({x.data_ptr() for x in made if isinstance(x, torch.Tensor) and x.shape == logits.shape}) <= 5


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
    trl = dict(learning_rate=1e-6, beta=0.0, num_iterations=1, epsilon=0.2, epsilon_high=None, delta=None, bf16=False,
               loss_type="dapo", scale_rewards="group", importance_sampling_level="token", num_generations=8, seed=42,
               max_completion_length=512, temperature=1.0, mask_truncated_completions=False, max_grad_norm=1.0,
               sync_ref_model=False, ref_model_sync_steps=512, lr_scheduler_type="linear", weight_decay=0.0,
               warmup_steps=0, per_device_train_batch_size=8, reward_weights=None)
    default = grpo.GRPOConfig()
    assert vars(default) == trl | dict(generation_batch_size=64, policy_loss="clip", use_bias_correction_kl=False,
                                       max_steps=100, output_dir=None, save_steps=100)
    with pytest.raises(AttributeError):
        default.beta = 1.0
    with pytest.raises(ValueError, match="loss_type: got 'bnpo'; allowed is "):
        grpo.GRPOConfig(loss_type="bnpo")
    tested_elsewhere = {"bf16", "seed", "per_device_train_batch_size", "output_dir", "save_steps"}
    assert {field for field, _, _ in OPTIONS} | tested_elsewhere == set(vars(default)), "an option without a test"


@pytest.mark.parametrize("function", [functools.partial(by_row), mock.Mock(side_effect=by_row, spec=[])], ids=type)
def test_rewards_reach_the_prompt_that_they_belong_to(function):
    """Any callable gets prompts, completions, their ids without padding, and the dataset's columns, by row."""
    seen, problems = {}, {p["prompt"]: p["solution"] for p in grpo.tiny_problems(0)[0][:6]}
    look = lambda **columns: seen.update(columns) or function(**columns)
    (_, r, metrics), = steps_of(make_model("Llama"), [look, function])
    tokenizer, name = grpo.tiny_tokenizer(), type(function).__name__    # it has no __name__ of its own
    assert metrics[f"rewards/{name}/mean"] == metrics["rewards/<lambda>/mean"] == 1.0
    assert sorted(seen) == ["completion_ids", "completions", "prompts", "solution"]
    assert [text.replace("<pad>", "") for text in tokenizer.batch_decode(r.prompt_ids)] == seen["prompts"]
    assert seen["prompts"] == [p for p in seen["prompts"][::4] for _ in range(4)] and len(set(seen["prompts"])) == 2
    assert seen["solution"] == [problems[p] for p in seen["prompts"]]
    assert seen["completion_ids"] == [ids[m == 1].tolist() for ids, m in zip(r.completion_ids, r.completion_mask)]
    assert seen["completions"] == tokenizer.batch_decode(seen["completion_ids"], skip_special_tokens=True)


def test_what_a_reward_function_changes_is_its_own():
    """The dataset, the rollout, the other answers of the group and the other functions keep what they had."""
    row = {"prompt": [{"role": "user", "content": "1"}], "notes": [], "completion_ids": None}     # a column's name, too
    seen, dataset, before = [], [row] * 2, copy.deepcopy(row)

    def judge(**columns):
        seen.append(copy.deepcopy(columns))
        for name, lists in columns.items():
            for i, mine in enumerate(lists):
                assert mine == seen[-1][name][i]                        # no other answer has added to it
                mine.append({"role": "user", "content": "is it right?"})
        return by_row(**columns)

    (_, r, _), = grpo.train(make_model("Llama"), chat_tokenizer(), dataset, [judge, judge], grpo.GRPOConfig(**SMALL))
    assert seen[0] == seen[1] and dataset == [before] * 2
    assert [r.rows, r.completions] == [[before] * 8, seen[0]["completions"]]


def test_advantages_are_an_argument_and_the_rollout_stays_as_it_is():
    """compute_advantages gives (B,) or (B, T), which is what the loss gets; another shape is an error."""
    def run(change):
        def compute_advantages(*args):
            kept.append(copy.deepcopy(args[1]))
            return change(grpo.outcome_advantages(*args))
        (_, rollout, metrics), = steps_of(make_model("Llama"), train={"compute_advantages": compute_advantages},
                                          beta=0.1, mask_truncated_completions=True)
        kept.append(rollout)
        return metrics["grad_norm"]

    kept = []
    assert run(lambda A: 3 * A) == pytest.approx(3 * run(lambda A: A), rel=1e-4)
    assert run(lambda A: A[:, 0]) == run(lambda A: A)                   # one for each answer
    for before, after in zip(kept[::2], kept[1::2], strict=True):
        assert all(torch.equal(*x) if isinstance(x[0], torch.Tensor) else x[0] == x[1] for x in zip(before, after))
    with pytest.raises((ValueError, AssertionError), match="advantages: got"):
        run(lambda A: torch.ones(8, 99))


@pytest.mark.parametrize("result", [[1.0], [1.0] * 9, [], [inf] * 8, [nan] * 8, [None] * 7 + [-inf]], ids=str)
def test_rewards_of_wrong_number_or_not_finite_are_named_and_none_is_nan(result):
    """The error names the function, what it gave and what is allowed. None, a tuple, booleans and tensors will do."""
    with pytest.raises(ValueError, match="reward function <lambda>: got .*; allowed is 8 numbers"):
        next(steps_of(make_model("Llama"), [by_row, lambda **kwargs: result]))
    rollout = next(steps_of(make_model("Llama")))[1]
    rewards = grpo.compute_rewards([lambda **_: [None] * 8, lambda **_: (None, True, *torch.arange(6))], rollout)
    assert rewards.isnan().tolist() == [[True, True]] + [[True, False]] * 7
    assert rewards[1:, 1].tolist() == [1, 0, 1, 2, 3, 4, 5] and rewards.dtype == torch.float32


# Command line and files -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, prompts", [("GPT2", "text"), ("half", "chat"), ("Qwen2", "chat")])
def test_any_causal_lm_trains_on_a_file(kind, prompts, data):
    """Its float32 weights are trained and saved for from_pretrained; code that comes with it is never run."""
    (data / "plan2.py").write_text("answer = [None] * 8")               # no reward of this function in the second step
    loaders = [mock.patch.object(auto, "from_pretrained", wraps=auto.from_pretrained)
               for auto in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM)]
    with loaders[0] as load_tokenizer, loaders[1] as load_model:
        done = cli(*command(data, model=data / "models" / kind, dataset=data / f"{prompts}.jsonl", beta=0.1,
                            reward_funcs=["accuracy", f"{data}/rewards.py:length"], reward_weights=[1, 0.1]))
    assert done.code == 0 and done.out == f"metrics.jsonl and checkpoint are in {data}/out\n"
    assert [load.call_args.kwargs["trust_remote_code"] for load in (load_tokenizer, load_model)] == [False, False]
    lines = lines_of(data / "out")
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["kl"] > 0.0
    assert isinstance(lines[0]["rewards/length/mean"], float) and lines[1]["rewards/length/mean"] is None
    assert {weight.dtype for weight in weights_of(data / "out").values()} == {torch.float32}
    assert transformers.AutoTokenizer.from_pretrained(data / "out/checkpoint").decode([2, 5, 3]) == "<think>1</think>"


def test_the_tiny_job_from_end_to_end(tmp_path, monkeypatch):
    """Cold start, samples and accuracy, GRPO, samples and accuracy, in README's form; flags win over presets."""
    def begin(model, tokenizer, problems, seed):
        assert seed == 3 and problems == grpo.tiny_problems(3)[0]
        assert all(map(torch.equal, model.parameters(), grpo.tiny_model(tokenizer, 3).parameters()))
        cold_start(model, tokenizer, problems, seed, steps=3)

    cold_start, out = grpo.cold_start, tmp_path / "out"
    monkeypatch.setattr(grpo, "cold_start", begin)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "grpo.py")])
    (tmp_path / "grpo.args").write_text("--learning_rate 1")            # no file but those named on the command line
    torch.set_num_threads(2)
    flags = "--model tiny --max_steps 2 --generation_batch_size 32 --seed 3 --preset deepseekmath --beta 0.5".split()
    done = cli(*flags, "--output_dir", out)
    again = cli(*flags, "--max_steps", 3, "--resume_from_checkpoint", out / "checkpoint")
    assert done.code == again.code == 0 and len(lines_of(out)) == 3 and torch.get_num_threads() == 1
    samples = [r"  \d\d\+\d\d=.*   (right|wrong, it is \d+)"] * 4
    form = ["before GRPO:", *samples, r"metrics\.jsonl and checkpoint are in \S+", "after GRPO:", *samples,
            r"held-out accuracy: \d\.\d\d -> \d\.\d\d \(greedy, 500 problems\)"]
    readme = re.search(r"^before GRPO:\n.*?^held-out[^\n]*\n", (ROOT / "README.md").read_text(), re.S | re.M)[0]
    for text in (done.out, readme, again.out.replace("at the checkpoint:", "before GRPO:")):
        assert re.fullmatch("\n".join(form) + "\n", text), text
    assert again.out.startswith("at the checkpoint:")
    preset = grpo.PRESETS["deepseekmath"] | grpo.TINY                   # flags win over sizes, and sizes over presets
    config = grpo.GRPOConfig(**preset | dict(max_steps=2, generation_batch_size=32, seed=3, beta=0.5))
    assert grpo.parse_options(flags)[0] == config
    assert grpo.TINY | dict(num_iterations=2, max_steps=60) == grpo.TINY and "warmup_steps" not in grpo.TINY


def test_the_teacher_is_right_but_for_the_carry_and_the_cold_start_learns_its_words():
    """The held-out problems are not those to train on. No loss comes from a problem's own words, or from padding."""
    train, held_out = grpo.tiny_problems(3)
    assert len(held_out) == 500 and len({p["prompt"] for p in train + held_out}) == len(train) + 500 > 6000
    assert grpo.teacher_trace("47+85=", False) == "<think>7+5=12,4+8+1=13</think>132<eos>"
    assert grpo.teacher_trace("47+85=", True) == "<think>7+5=12,4+8+0=12</think>122<eos>"
    traces = {p["prompt"] + grpo.teacher_trace(p["prompt"], False): p["solution"] for p in train}
    assert all(grpo.accuracy_reward([trace.removesuffix("<eos>") for trace in traces], traces.values()))
    tokenizer, seen = grpo.tiny_tokenizer(), {}
    model = grpo.tiny_model(tokenizer, 3)
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    grpo.cold_start(model, tokenizer, train, 3, steps=1)
    texts = tokenizer.batch_decode(seen["input_ids"])
    assert 0.2 < sum(text.replace("<pad>", "") in traces for text in texts) / 64 < 0.7            # 45% have no carry
    learned = [tokenizer.decode(row[row >= 0]) for row in seen["labels"]]
    assert learned == [text[len("47+85="):].replace("<pad>", "") for text in texts]


def test_the_accuracy_is_the_share_of_right_answers_and_four_are_shown(capsys):
    """Here the policy's answers are a teacher's, who forgets every second carry."""
    tokenizer, sums = grpo.tiny_tokenizer(), ["25+17", "25+18", "25+61", "25+62"] * 2       # 2 of 4 have a carry
    problems = [{"prompt": f"{x}=", "solution": str(eval(x))} for x in sums]
    answers = [grpo.teacher_trace(p["prompt"], i % 2 == 1) for i, p in enumerate(problems)]
    ids = tokenizer(answers, return_tensors="pt", padding=True)["input_ids"]
    with mock.patch.object(grpo, "generate", return_value=(ids, None, None, None)) as generate:
        assert grpo.held_out_accuracy(grpo.tiny_model(tokenizer, 0), tokenizer, problems) == 0.75
    assert generate.call_args.kwargs.get("uniforms") is None            # greedy
    assert [line.split("   ")[1] for line in capsys.readouterr().out.splitlines()] == [
        "right", "wrong, it is 43", "right", "right"]


def test_an_earlier_run_is_never_overwritten(data, monkeypatch):
    """A run claims its folder when it starts: one in which another run takes its first step is refused, too."""
    monkeypatch.chdir(data)
    for name in ("grpo-output", "grpo-output-2", "grpo-output-3"):
        assert cli(*command(data, output_dir=None, max_steps=1)).code == 0 and len(lines_of(data / name)) == 1
    before, done = files_of(data), cli(*command(data, output_dir="grpo-output"))
    assert done.code == 2 and "output_dir: got" in done.err and before == files_of(data)
    second = command(data, reward_funcs="think_format", max_steps=3)
    (data / "plan1.py").write_text(f"import grpo\nassert grpo.main({second}) == 2")
    assert cli(*command(data)).code == 0 and len(lines_of(data / "out")) == 2
    done = cli(*command(data, max_steps=1, learning_rate=1, weight_decay=1e39, output_dir=data / "far"))    # overflows
    assert done.code == 1 and "after step 1 are not finite" in done.err and not (data / "far/checkpoint").exists()


LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)
FULL = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (%d, {LIMIT[1]}))"    # the longest file, in bytes
ENDS = {  # what happens in the third call of the reward function, the exit code, what is said, some options
    "Ctrl-C": ("raise KeyboardInterrupt", 130, "", dict(num_iterations=2, beta=0.1, lr_scheduler_type="cosine")),
    "an error": ("raise KeyError('oh')", 1, "Traceback.*rewards.py.*KeyError: 'oh'", dict(
        warmup_steps=3, beta=0.1, sync_ref_model=True, ref_model_sync_steps=3)),
    "a wrong reward": ("answer = [0.5]", 2, "^grpo.py: error: reward function length: got .0.5.; allowed is 8 ", {}),
    "a loss": ("answer = [3e38, -3e38] * 4", 1, "FloatingPointError: step 3: the loss", dict(num_iterations=2)),
    "before a silent step": ("raise KeyboardInterrupt", 130, "", dict(max_steps=3)),
    "no room for a line": (FULL % 50, 1, "Traceback.*OSError: .*File too large", dict(save_steps=1)),
    "no room for weights": (FULL % 20_000, 2, "^grpo.py: error: output_dir: cannot write .* stays, if any", dict(
        save_steps=1))}


@pytest.mark.parametrize("what", ENDS)
def test_what_ends_a_run_leaves_its_last_whole_step(what, data):
    """The command that is printed goes on from there, and ends on the bits of the run that nothing stopped."""
    plan, code, said, options = ENDS[what]
    usual = dict(max_steps=5, output_dir=data / "a folder", reward_funcs=f"{data}/rewards.py:length")
    run = command(data, **usual | options)
    silent = "answer = [1.0] * 8" if what == "before a silent step" else "pass"
    (data / "plan3.py").write_text(silent)
    assert cli(*run, "--output_dir", data / "whole").code == 0
    (data / "plan3.py").write_text(plan)
    done, again = cli(*run), [*run, "--resume_from_checkpoint", f"{data}/a folder/checkpoint"]
    resource.setrlimit(resource.RLIMIT_FSIZE, LIMIT)
    step = 4 if what == "no room for weights" else 3
    assert done.code == code and re.search(said, done.err, re.S) and len(lines_of(data / "a folder")) == step - 1, done
    assert sorted(os.listdir(data / "a folder")) == ["checkpoint", "metrics.jsonl"]
    printed = re.findall(rf"^stopped in step {step}; to go on: python \S+ (--.*)", done.out, re.M)
    (data / "plan1.py").write_text(silent)                              # the third step's rewards again
    assert list(map(shlex.split, printed)) == [again] and cli(*again).code == 0
    assert_same_run(data / "a folder", data / "whole")


@pytest.mark.parametrize("error, times", [(KeyboardInterrupt, 1), (KeyboardInterrupt, 2), (SystemExit, 99)],
                         ids=["Ctrl-C", "Ctrl-C twice", "a kill"])
def test_what_stops_a_run_at_any_moment_leaves_a_whole_checkpoint(error, times, data, whole, monkeypatch):
    """From the first save to the second, before each call that samples, updates or touches the disk: the run goes on
    to the end of the run that nothing stopped. Ctrl-C leaves the last whole step and nothing else."""
    left = [inf]                                                        # calls until then

    def stops(function):
        @functools.wraps(function)
        def counted(*args, **kwargs):
            left[0] -= 1
            if -times <= left[0] < 0:
                raise error
            return function(*args, **kwargs)
        return counted

    for owner, name in ((grpo, "sample_rollout"), (torch.optim.AdamW, "step"), (grpo, "step_metrics"), (torch, "save"),
                        (os, "rename"), (shutil, "copy"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, stops(getattr(owner, name)))
    saved_steps = []
    for calls in range(6, 20):
        out, left[0] = data / f"out{calls}", calls
        done = cli(*command(data, max_steps=5, save_steps=1, output_dir=out))
        left[0] = inf
        folder = out / ("checkpoint" if (out / "checkpoint").exists() else "checkpoint.old")
        saved_steps.append(torch.load(folder / "trainer_state.pt", weights_only=True)["step"])
        if times == 1:
            assert done.code == 130 and sorted(os.listdir(out)) == ["checkpoint", "metrics.jsonl"]
            assert saved_steps[-1] == len(lines_of(out))
        assert resume(data, out, output_dir=None, save_steps=1).code == 0
        assert_same_run(out, whole)
        assert sorted(os.listdir(out)) == ["checkpoint", "metrics.jsonl"]
    assert saved_steps[0] == 1 and saved_steps[-1] == 2                 # the second save has been gone through


def test_a_checkpoint_goes_on_elsewhere_and_further_and_with_other_options(data, whole):
    """What the user repeats or changes on the command line counts; what the checkpoint holds is data alone."""
    out = data / "out"
    assert cli(*command(data, max_steps=3)).code == 0                   # finished: its linear schedule is at 0
    before = files_of(out)
    for name in ("copy", "linked"):
        shutil.copytree(out, data / name)
    assert resume(data, data / "copy").code == 2                        # --output_dir names the original
    done = resume(data, out, beta=0.1)
    assert done.code == 2 and done.err.startswith("grpo.py: error: beta: got 0.1") and files_of(out) == before
    assert resume(data, data / "copy", output_dir=None, save_steps=1, per_device_train_batch_size=9).code == 0
    (data / "linked/checkpoint").rename(data / "elsewhere")
    (data / "linked/checkpoint").symlink_to(data / "elsewhere")
    assert resume(data, data / "linked", output_dir=None, weight_decay=0.5).code == 0
    assert (data / "linked/checkpoint").is_symlink() and not (data / "elsewhere.old").exists()
    assert resume(data, out, output_dir=data / "new", learning_rate=0.02).code == 0 and files_of(out) == before
    rates = [[line["learning_rate"] for line in lines_of(data / name)] for name in ("copy", "linked", "new")]
    assert rates[0] == rates[1] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3, 0.004, 0.002])
    assert rates[2] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3, 0.008, 0.004])
    free, decayed = (sum(x.square().sum() for x in weights_of(data / name).values()) for name in ("copy", "linked"))
    assert decayed / free == pytest.approx((1 - 0.5 * 0.004) ** 2 * (1 - 0.5 * 0.002) ** 2, rel=1e-4)
    torch.save(print, out / "checkpoint/trainer_state.pt")              # a function, not data
    assert resume(data, out).code == 2


def test_the_whole_process_group_hears_ctrl_c_and_a_sigterm_kills(data, whole):
    """The reward function's pool of workers and the run hear one Ctrl-C, as from a terminal. After a SIGTERM, the
    checkpoint of the last of save_steps is there."""
    (data / "plan3.py").write_text("""
import multiprocessing, threading
fork = multiprocessing.get_context("fork")
at_work = fork.Barrier(3)
def work(_):
    at_work.wait()
    time.sleep(3000)
def ctrl_c():
    at_work.wait()
    os.killpg(0, signal.SIGINT)
with fork.Pool(2) as pool:
    threading.Thread(target=ctrl_c).start()
    pool.map(work, [1, 2])
""")
    words = ["env", "OMP_NUM_THREADS=1", sys.executable, grpo.__file__, *command(data, max_steps=5)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=100, start_new_session=True)
    assert run.returncode == 130 and "stopped in step 3" in run.stdout, run.stderr
    (data / "plan3.py").write_text("os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(3000)")             # in step 5
    again = [*words, "--resume_from_checkpoint", str(data / "out/checkpoint"), "--save_steps", "3"]
    assert subprocess.run(again, capture_output=True).returncode == -signal.SIGTERM
    assert torch.load(data / "out/checkpoint/trainer_state.pt", weights_only=True)["step"] == 3
    assert resume(data, data / "out").code == 0
    assert_same_run(data / "out", whole)


BAD_ROWS = [  # what a dataset holds, what the one line must say
    ("\n\n", "line 1: got an empty"), ('{"prompt": "1"}\n\n{oops\n', "line 3: got {oops"), ("[1]\n", "line 1"),
    ('{"solution": "1"}\n', "line 1"), ('"prompt"', "line 1"), ('{"prompt": "1"}\n', "solution"),
    ('{"prompt": "\udcff"}\n', "line 1: got "), ('{"prompt": "1", "solution": "1"}\n{"prompt": "1"}\n', "line 2"),
    *((f'{{"prompt": "1", "solution": "1"}}\n{{"prompt": {prompt}, "solution": "1"}}\n', "line 2: got ")
      for prompt in ('""', "null", "1", "[]", '[{"role": "user", "content": "1"}]'))]
BAD_FLAGS = [  # flag, value, what the one line must say
    ("dataset", None, "--dataset"), ("dataset", "absent.jsonl", "absent.jsonl"), ("dataset", ".", "directory"),
    ("model", "tiny", "tiny"), ("model", "./nowhere", "nowhere"), ("beta", nan, "beta: got"), ("beta", "x", "--beta"),
    ("model", "models/bare", "pad"), ("model", "models/Mamba", "got MambaForCausalLM"), ("temperature", 0, "temp"),
    ("reward_funcs", "string.py:broken", "string.py:broken"), ("reward_funcs", "rewards.py:absent", "absent"),
    ("reward_funcs", "nonsense", "reward_funcs: got nonsense"), ("reward_funcs", "models/judge", "models/judge"),
    ("reward_funcs", "absent.py:f", "absent.py"), ("reward_funcs", "short.py:broken", "function broken: got"),
    ("reward_funcs", ["short.py:broken", "twin/short.py:broken"], "twin/short.py:broken; .*unique_name"),
    ("output_dir", "models", "models"), ("output_dir", "text.jsonl", "text.jsonl"), ("bf16", "maybe", "--bf16"),
    ("resume_from_checkpoint", "nowhere", "nowhere"), ("resume_from_checkpoint", "models/Llama", "Llama"),
    ("preset", "ppo", "--preset"), ("loss_type", "bnpo", "--loss_type"), ("no_such_flag", 1, "--no_such_flag"),
    ("num_gen", 4, "--num_gen"), ("reward_weights", [1, 2, 3], "reward_weights: "), ("seed", -1, "seed: got"),
    ("reward_weights", 1, "reward_weights: "), ("learning_rate", -1, "learning_rate: got"), ("max_steps", 0, "_steps"),
    ("max_grad_norm", inf, "max_grad_norm: got"), ("num_generations", 1, "generation_batch_size: got"),
    ("num_generations", 5, "generation_batch_size: got"), ("max_completion_length", 60, "the model's limit is 5[0-9]")]


@pytest.mark.parametrize("flag, value, said", [*BAD_FLAGS, *(("rows", *row) for row in BAD_ROWS)], ids=str)
def test_bad_input_is_one_line_and_exit_2(flag, value, said, data, monkeypatch):
    """The line says what is wrong and what is allowed; no file is written or changed."""
    monkeypatch.chdir(data)
    (data / "twin").mkdir()
    for name in ("short.py", "string.py", "twin/short.py"):             # string is a module of Python's, too
        (data / name).write_text("def broken(completions, **kwargs):\n    return [1.0]\n")
    if flag == "rows":
        (data / "bad.jsonl").write_bytes(value.encode(errors="surrogateescape"))
        flag, value = "dataset", "bad.jsonl"
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


# Devices --------------------------------------------------------------------------------------------------------------

if not hasattr(torch, "pretend"):                                       # once in a process, before its first backward
    backend_registration._setup_privateuseone_for_python_backend("pretend")
    torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16]


class There(torch.Tensor):
    """A tensor whose device is "pretend:0", but whose numbers are a tensor on the CPU, here."""
    __torch_function__ = torch._C._disabled_torch_function_impl
    tolist = lambda self: self.here.tolist()

    @staticmethod
    def __new__(cls, here):
        there = cls._make_wrapper_subclass(cls, here.shape, here.stride(), dtype=here.dtype, device="pretend:0")
        there.here = here
        return there

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Compute on the CPU. As on CUDA, tensors of two devices are an error, but for numbers, indices and copies."""
        kwargs = kwargs or {}
        mixed = args[:1] + args[2:] if function in (aten.index.Tensor, aten.index_put_.default) else args
        tensors = [x for x in tree_leaves((mixed, kwargs)) if isinstance(x, torch.Tensor)]
        there = any(isinstance(x, There) for x in tensors)
        if function is not aten.copy_.default and any(there != isinstance(x, There) and x.dim() > 0 for x in tensors):
            raise RuntimeError(f"{function}: tensors on two devices")
        if kwargs.get("device") is not None:                            # a new tensor, or a copy on another device
            there = torch.device(kwargs["device"]).type == "pretend"
            kwargs = kwargs | {"device": "cpu"}
        args_here, kwargs_here = tree_map_only(There, lambda x: x.here, (args, kwargs))
        result = function(*args_here, **kwargs_here)
        if function._schema.name.endswith("_"):                         # in place
            return result if result is None else args[0]
        return tree_map_only(torch.Tensor, There, result) if there else result


class Pretend(TorchDispatchMode):
    """Where tensors are made on, or moved to, the device "pretend"."""
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return There.__torch_dispatch__(function, types, args, kwargs)


@pytest.fixture
def pretend():
    torch._C._set_only_lift_cpu_tensors(True)
    with Pretend():
        yield
    torch._C._set_only_lift_cpu_tensors(False)


def run_on(device, kind, **options):
    """The metrics of two steps, and of a second run that goes on after the first of them."""
    def policy_of(weights):
        policy = make_model(kind).to(device)
        policy.tie_weights()
        policy.load_state_dict(weights)
        return policy

    policy, options = policy_of(make_model(kind).state_dict()), dict(max_steps=2, num_iterations=2) | options
    steps = steps_of(policy, **options)
    state, _, first = next(steps)
    saved = {"step": 1, "optimizer": state.optimizer.state_dict(),
             "reference": state.reference and state.reference.state_dict()}
    saved, weights = copy.deepcopy(tree_map_only(torch.Tensor, torch.Tensor.cpu, (saved, dict(policy.state_dict()))))
    again = policy_of(weights)
    config = grpo.GRPOConfig(**SMALL | options)
    second = steps_of(again, train={"state": grpo.initial_state(again, config, saved)}, **options)
    assert {weight.device.type for weight in (*policy.parameters(), *again.parameters())} == {device}
    return [metrics | {"step_time": 0} for metrics in (first, *(step[2] for step in (*steps, *second)))]


@pytest.mark.parametrize("kind, options", [
    ("Llama", dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, temperature=0.7)),
    ("GPT2", dict(importance_sampling_level="sequence", loss_type="grpo", per_device_train_batch_size=3)),
    ("Qwen2", dict(policy_loss="cispo", mask_truncated_completions=True, beta=0.1, per_device_train_batch_size=3)),
    ("Llama", dict(policy_loss="sapo", scale_rewards="batch", reward_weights=[0.5], loss_type="dr_grpo"))], ids=str)
def test_a_run_on_another_device_is_the_run_on_the_cpu(kind, options, pretend):
    """No tensor is on the wrong device, which here is an error as on CUDA, and the metrics are the same."""
    here, there = (run_on(device, kind, **options) for device in ("cpu", "pretend"))
    for a, b in zip(here, there, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


def test_the_tiny_job_on_another_device_is_that_on_the_cpu(pretend, capsys):
    """The cold start and the greedy answers; and the device is not too kind: it refuses a tensor of the CPU."""
    tokenizer, (problems, held_out), shown = grpo.tiny_tokenizer(), grpo.tiny_problems(0), []
    for device in ("cpu", "pretend"):
        model = grpo.tiny_model(tokenizer, 0).to(device)
        model.tie_weights()
        grpo.cold_start(model, tokenizer, problems, 0, steps=5)
        shown.append((grpo.held_out_accuracy(model, tokenizer, held_out[:20]), capsys.readouterr().out))
    assert shown[0] == shown[1]
    with pytest.raises(RuntimeError, match="two devices"):
        model.transformer.wte.weight + torch.ones(64)


def test_a_gpu_samples_as_it_scores_trains_and_resumes(data):
    """On CUDA, in float32 and bfloat16: the resumed run has the losses and gradients of the whole one."""
    gpu = {"GRPO_TEST_CUDA": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("GRPO_TEST_CUDA", "0")}
    look = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if not torch.backends.cuda.is_built() or python("-c", look, **gpu).returncode:
        pytest.skip("no GPU")
    for bf16 in (False, True):
        whole, out = data / f"whole {bf16}", data / f"out {bf16}"
        run = [grpo.__file__, *command(data, max_steps=4, bf16=bf16, beta=0.1, num_iterations=2, output_dir=None)]
        assert python(*run, "--output_dir", whole, **gpu).returncode == 0
        (data / "plan2.py").write_text("raise KeyboardInterrupt")
        assert python(*run, "--output_dir", out, **gpu).returncode == 130
        assert python(*run, "--resume_from_checkpoint", out / "checkpoint", **gpu).returncode == 0
        for a, b in zip(lines_of(out), lines_of(whole), strict=True):
            assert a["step"] == b["step"] and a["grad_norm"] > 0 and all(map(math.isfinite, a.values()))
            assert a["sampling/sampling_logp_difference/max"] < (0.1 if bf16 else 1e-3)
            for name in ("loss", "grad_norm", "kl"):
                assert a[name] == pytest.approx(b[name], rel=0.1 if bf16 else 1e-3, abs=1e-2 if bf16 else 1e-5), name
