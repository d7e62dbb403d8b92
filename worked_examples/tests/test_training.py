"""What a run of grpo.py promises (§9-§11): a test's name is a promise, its docstring says it."""

import contextlib
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
import time

import numpy
import pytest
import torch
from conftest import (PROBLEMS, ROOT, SMALL, assert_same_run, by_row, chat_tokenizer, cli, command, files_of,
                      first_two, last_checkpoint, lines_of, make_model, passes_of, python, resume, steps_of,
                      weights_of)
from tokenizers.processors import TemplateProcessing
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import grpo

nan, inf, aten = math.nan, math.inf, torch.ops.aten
close = torch.testing.assert_close

PROMPT_IDS = torch.tensor([[-7, -7, 5, 6], [7, 8, 9, 10], [-7, 3, 4, 5]])           # garbage where the mask is 0
PROMPT_MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
UNIFORMS = torch.rand(24, 12, generator=torch.Generator().manual_seed(0))


def sample(model, pad=0, G=8):
    """G completions for each of three prompts, of at most 12 tokens; two words end one."""
    return grpo.generate(model, PROMPT_IDS, PROMPT_MASK, max_completion_length=12, eos_token_ids=[1, 2],
                         num_generations=G, pad_token_id=pad, temperature=0.7, uniforms=UNIFORMS[:3 * G])


@pytest.mark.parametrize("kind, pad", [("GPT2", 0), ("Llama", 0), ("Llama", 1), ("Qwen2", 0)])
def test_recorded_logps_and_entropies_are_the_scorers(kind, pad):
    """The sampler, with its cache, and the scorer, in one pass, say the same. Rows that have ended leave the batch."""
    model = make_model(kind)
    passes = passes_of(model)
    ids, mask, logps, entropies = sample(model, pad)
    assert [shape for *shape, _ in passes] == [[3, 4]] + [[live, 1] for live in mask.sum(0).tolist()[1:]]
    prompts = (x.repeat_interleave(8, 0) for x in (PROMPT_IDS, PROMPT_MASK))
    scored = grpo.per_token_logps(model, *prompts, ids, mask, temperature=0.7, compute_entropy=True)
    assert 2 * mask.sum(1).min() < mask.sum(1).max()                    # ragged, or nothing is tested
    close(logps, scored[0].detach(), atol=2e-5, rtol=0)
    close(entropies, scored[1], atol=2e-5, rtol=0)
    assert torch.equal(mask, grpo.make_completion_mask(ids, [1, 2])) and (ids[mask == 0] == pad).all()


@pytest.mark.parametrize("G", [1, 8])
def test_each_token_is_where_its_uniform_number_falls(G):
    """Σ_{w<o} p_w <= u < Σ_{w<=o} p_w: a token follows from its own prompt, its own number and nothing else."""
    model = make_model("Llama")
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
    greedy, *_ = grpo.generate(model, PROMPT_IDS, PROMPT_MASK, max_completion_length=1, eos_token_ids=1)
    assert greedy.tolist() == [[1]] * 3


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


def test_every_eos_id_ends_a_completion():
    """The tokenizer's EOS and those of the model's generation config."""
    model, tokenizer = make_model("Llama"), grpo.tiny_tokenizer()
    model.generation_config.eos_token_id = [5, 7]
    assert grpo.all_eos_token_ids(model, tokenizer) == [1, 5, 7]
    (_, r, _), = steps_of(model, [first_two], generation_batch_size=64, num_generations=32)
    last = r.completion_ids.gather(1, r.completion_mask.sum(1, keepdim=True) - 1).squeeze(1)
    assert torch.equal(r.terminated, torch.isin(last, torch.tensor([1, 5, 7]))) and {5, 7} < set(last.tolist())
    assert (r.terminated & (r.completion_mask.sum(1) == 10)).any()      # an EOS at the very limit, too


def test_each_step_has_questions_and_random_numbers_of_its_own():
    """They follow from seed and step alone: a resumed run goes on with those that come next."""
    config, steps, tokenizer = grpo.GRPOConfig(**SMALL), (0, 1, 0), grpo.tiny_tokenizer()
    batches = [grpo.sample_batch(PROBLEMS, config, step) for step in steps]
    sample_again = functools.partial(grpo.sample_rollout, make_model("Llama"), tokenizer, batches[0], config)
    for first, second, again in (batches, [sample_again(step).completions for step in steps]):
        assert first == again != second


WORDS = ["beta", "delta", "loss_type", "policy_loss", "importance_sampling_level", "use_bias_correction_kl",
         "max_completion_length", "epsilon_high"]                       # mean the same in the config and in the loss


def run_of(reward_funcs=(by_row, first_two), **options):
    """The rollout, the metrics and the weights of each step of a run; the passes of its policy."""
    policy = make_model("Llama").double()
    passes = passes_of(policy)
    return [(r, metrics, copy.deepcopy(policy.state_dict()))
            for _, r, metrics in steps_of(policy, reward_funcs, **options)], passes


def assert_run_by_hand(reward_funcs=(by_row, first_two), instead={}, run=None, **options):
    """A twin of the policy learns from its samples, each update in one pass; all metrics and weights must be the same.
    instead: what the twin takes some options to be. Returns: the last rollout; the rows of each pass that scored."""
    steps, passes = run or run_of(reward_funcs, **options)
    twin, reference = make_model("Llama").double(), make_model("Llama").double()
    c = grpo.GRPOConfig(**SMALL | options | instead)
    optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=c.weight_decay)
    B, G, update = c.generation_batch_size, c.num_generations, itertools.count()
    for step, (r, metrics, weights) in enumerate(steps):
        if c.sync_ref_model and step % c.ref_model_sync_steps == 0:
            reference.load_state_dict(twin.state_dict())
        sampled = r.prompt_ids, r.prompt_mask, r.completion_ids, r.completion_mask
        score = functools.partial(grpo.per_token_logps, temperature=c.temperature, compute_entropy=True)
        with torch.no_grad():
            (old, entropies), (ref, _) = score(twin, *sampled), score(reference, *sampled)
        close(r.logps, old, atol=1e-6, rtol=0)
        mask, ended = r.completion_mask, (r.completion_ids == 1).any(1)
        loss_mask = mask * (ended[:, None] | (not c.mask_truncated_completions))
        by_func = [f(range(B)) for f in reward_funcs]
        of_funcs = c.reward_weights or [1.0] * len(reward_funcs)
        rewards = [sum(w * x for w, x in zip(of_funcs, row)) for row in zip(*by_func, strict=True)]
        advantages = grpo.group_advantages(torch.tensor(rewards), G, scale_rewards=c.scale_rewards)
        updates = []
        for iteration in range(c.num_iterations):
            order = numpy.random.default_rng([c.seed, 5, step, iteration]).permutation(B)
            for rows in numpy.array_split(order, c.num_mini_batches):   # each is a batch of its own
                loss, found = grpo.grpo_loss(
                    score(twin, *[x[rows] for x in sampled])[0], advantages[rows], loss_mask[rows],
                    old_logps=old[rows], ref_logps=ref[rows] if c.beta > 0 else None, epsilon_low=c.epsilon,
                    **{word: getattr(c, word) for word in WORDS})
                optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), c.max_grad_norm or inf).item()
                u, warmup, count = next(update), c.warmup_steps, c.num_iterations * c.num_mini_batches
                done = max(0, u - warmup) / (c.max_steps * count - warmup)
                falling = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}
                lr = c.learning_rate * (u / warmup if u < warmup else falling[c.lr_scheduler_type])
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
                updates.append({"loss": loss.item(), "grad_norm": norm, "learning_rate": lr, **found})
        silent = [len(set(rewards[i:i + G])) == 1 for i in range(0, B, G)]
        want = {"step": step + 1, **{name: statistics.mean(x[name] for x in updates) for name in updates[0]},
                "reward": statistics.mean(rewards), "reward_std": statistics.stdev(rewards),
                "frac_reward_zero_std": statistics.mean(silent), "entropy": (entropies * mask).sum() / mask.sum(),
                "completions/mean_length": mask.sum() / B, "completions/clipped_ratio": 1 - ended.sum() / B,
                "sampling/sampling_logp_difference/max": 0.0,
                **{f"rewards/{f.__name__}/mean": statistics.mean(x) for f, x in zip(reward_funcs, by_func)}}
        want = {name: float(x) for name, x in want.items()} | {"step_time": metrics["step_time"]}
        assert metrics == pytest.approx(want, rel=1e-4, abs=1e-6)
        close(weights, twin.state_dict(), atol=1e-6, rtol=0)
    assert step + 1 == c.max_steps
    return r, [rows for rows, width, _ in passes if width > r.prompt_ids.size(1)]


MU = dict(num_iterations=3, max_steps=2)                                # the ratio is 1 in the first update
REFRESHED = dict(beta=0.1, max_steps=4)
OPTIONS = [  # field, a value that is not its default, and the options that let it show
    ("learning_rate", 0.003, {}), ("warmup_steps", 2, dict(max_steps=4)), ("weight_decay", 0.5, {}),
    ("lr_scheduler_type", "cosine", dict(max_steps=4)), ("lr_scheduler_type", "constant", dict(max_steps=2)),
    ("max_steps", 3, {}), ("max_grad_norm", 0.02, dict(max_steps=3)), ("max_grad_norm", 0.0, dict(max_steps=3)),
    ("num_generations", 2, {}), ("generation_batch_size", 12, {}), ("num_iterations", 3, {}),
    ("num_mini_batches", 2, dict(max_steps=2)), ("num_mini_batches", 3, dict(num_iterations=2, loss_type="grpo")),
    ("reward_weights", [2.0, -1.0], {}), ("max_completion_length", 7, dict(loss_type="dr_grpo")),
    ("temperature", 0.7, REFRESHED | MU), ("loss_type", "grpo", {}), ("loss_type", "dr_grpo", {}), ("beta", 0.1, {}),
    ("policy_loss", "cispo", MU), ("policy_loss", "sapo", MU), ("epsilon", 0.1, MU), ("epsilon_high", 0.3, MU),
    ("epsilon_high", 1.01, MU | dict(policy_loss="cispo")), ("importance_sampling_level", "sequence", MU),
    ("delta", 1.02, MU | dict(epsilon=0.01)), ("use_bias_correction_kl", True, MU | REFRESHED),
    ("scale_rewards", "batch", {}), ("scale_rewards", "none", {}), ("mask_truncated_completions", True, {}),
    ("sync_ref_model", True, REFRESHED | dict(ref_model_sync_steps=2)),
    ("ref_model_sync_steps", 3, REFRESHED | dict(sync_ref_model=True))]


@pytest.mark.parametrize("field, value, others", OPTIONS, ids=[f"{field}-{value}" for field, value, _ in OPTIONS])
def test_each_option_does_what_its_word_says(field, value, others):
    """A run with the option is the twin's with it, and is not the twin's with the default."""
    options = others | {field: value}
    run = run_of(**options)
    assert_run_by_hand(**options, run=run)
    default = SMALL.get(field, getattr(grpo.GRPOConfig(), field))
    with pytest.raises((AssertionError, ValueError)):                   # or the run does not show the option at all
        assert_run_by_hand(**options, run=run, instead={field: default})


def test_train_is_algorithm_1():
    """Outer iterations that begin with π_ref ← π_θ, and mu updates against one π_old and π_ref."""
    assert_run_by_hand(**REFRESHED, sync_ref_model=True, ref_model_sync_steps=2, num_iterations=2)


@pytest.mark.parametrize("options", [
    dict(num_iterations=2), dict(num_iterations=2, importance_sampling_level="sequence", loss_type="grpo"),
    dict(loss_type="dr_grpo")], ids=str)
def test_rows_of_advantage_zero_cost_no_pass_and_parts_do_not_matter(options):
    """Parts are a memory knob. Each row that learns is scored once for π_old, once for π_ref, once in each pass."""
    for weight, beta, part, rows in ((1, 0, 8, 4), (1, 0, 3, 4), (1, 0.1, 3, 8), (0, 0, 8, 0), (0, 0.1, 8, 8)):
        _, passes = assert_run_by_hand([by_row], per_device_train_batch_size=part, beta=beta,
                                       reward_weights=[float(weight)], **options)
        scored = 1 + (beta > 0) + options.get("num_iterations", 1)
        assert passes == [min(part, rows - i) for i in range(0, rows, part)] * scored


def test_each_pass_deals_all_rows_anew_to_the_mini_batches():
    """Every row is in one part of a pass; the parts differ from pass to pass and from step to step."""
    config = grpo.GRPOConfig(**SMALL | dict(generation_batch_size=16, num_mini_batches=3, num_iterations=2))
    parts = [[rows.tolist() for rows in grpo.mini_batches(config, step)] for step in (0, 1)]
    for first in (parts[0][:3], parts[0][3:], parts[1][:3]):
        assert sorted(sum(first, [])) == list(range(16)) and [len(rows) for rows in first] == [6, 5, 5]
    assert parts[0][:3] != parts[0][3:] != parts[1][:3]
    assert parts[0] == [rows.tolist() for rows in grpo.mini_batches(config, 0)]


def test_with_one_mini_batch_the_first_ratio_is_1_to_the_bit():
    """π_old is scored in the parts of the update: at epsilon 0, a token that has moved with A would be clipped."""
    for kind in ("Llama", "GPT2"):
        (_, _, one), = steps_of(make_model(kind), epsilon=0.0, per_device_train_batch_size=3)
        (_, _, two), = steps_of(make_model(kind), epsilon=0.0, num_iterations=2)
        assert one["clip_ratio/region_mean"] == 0.0 < two["clip_ratio/region_mean"]


def weights_after(**options):
    model = make_model("Llama").double()
    *_, _ = steps_of(model, max_steps=2, generation_batch_size=16, num_generations=4, **options)
    return torch.cat([weight.flatten() for weight in model.parameters()])


@pytest.mark.parametrize("one, other", [("gspo", "sapo"), ("cispo", "dapo")])
def test_what_a_preset_is_shows_with_the_mini_batches_of_its_paper(one, other):
    """With one update of a batch gspo and sapo are the same run, and so are cispo and dapo (without its mask of
    truncated answers); with their papers' parts they are not."""
    presets = [grpo.PRESETS[name] | {"mask_truncated_completions": False} for name in (one, other)]
    same = [weights_after(**preset | {"num_mini_batches": 1}) for preset in presets]
    differ = [weights_after(**preset) for preset in presets]
    assert (same[0] - same[1]).abs().max() < 1e-6 and (differ[0] - differ[1]).abs().max() > 1e-3


def test_a_silent_step_moves_by_momentum():
    """Where no row learns the gradient is 0, not absent: AdamW goes on in the direction of the steps before."""
    calls = itertools.count()                                           # three of the run, then three of the twin
    once = lambda completions, **_: [0.0] * 8 if next(calls) % 3 else by_row(completions)
    assert_run_by_hand([once], max_steps=3)


def test_bf16_is_autocast_in_sampling_and_scoring_over_float32_weights():
    """Every pass computes in bfloat16, and the optimizer has float32 weights."""
    model = make_model("Llama")
    passes = passes_of(model)
    (_, _, metrics), = steps_of(model, bf16=True)
    assert {dtype for _, _, dtype in passes} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert metrics["sampling/sampling_logp_difference/max"] < 0.1       # rounding; in float32 next to none


def test_the_entropy_is_that_of_all_samples_and_truncated_rows_have_no_loss():
    """Truncated rows count in the statistics of their group, too."""
    rollout, passes = assert_run_by_hand(mask_truncated_completions=True, beta=0.1)
    assert 0 < rollout.terminated.sum() < 8 and passes == [rollout.terminated.sum()] * 3


def test_dropout_changes_no_run_and_what_is_frozen_stays():
    """Frozen weights get no moments and no decay."""
    one, other, another = (make_model("GPT2").train(mode) for mode in (True, False, False))
    lines = [[metrics | {"step_time": 0} for *_, metrics in steps_of(model, max_steps=2, seed=seed, beta=0.1)]
             for model, seed in ((one, 42), (other, 42), (another, 1))]
    assert lines[0] == lines[1] != lines[2]
    frozen = one.transformer.wte.weight.requires_grad_(False)
    before = frozen.clone()
    (state, _, _), = steps_of(one, weight_decay=0.5, beta=0.1)
    assert torch.equal(frozen, before) and set(state.optimizer.state) == set(one.parameters()) - {frozen}


def test_what_is_not_finite_ends_the_run_before_the_weights_change():
    """Here the gradient is not finite, though the loss is; then the weights, which give no samples."""
    model = make_model("Llama")
    model.lm_head.weight.register_hook(lambda gradient: gradient * inf)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="gradients .* is non-finite"):
        next(steps_of(model))
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    model.lm_head.weight.data[3, 3] = nan
    with pytest.raises(FloatingPointError, match="LlamaForCausalLM are not finite"):
        next(steps_of(model))


def test_presets_are_settings_of_the_papers_and_most_defaults_are_trls():
    """A preset holds settings of its paper. Defaults are TRL's but for KL's correction, bf16, batch, length, saving."""
    assert grpo.PRESETS == {
        "deepseekmath": dict(loss_type="grpo", beta=0.04, learning_rate=1e-6, num_generations=64,
                             generation_batch_size=1024, max_completion_length=1024),
        "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none"),
        "dapo": dict(loss_type="dapo", epsilon=0.2, epsilon_high=0.28, mask_truncated_completions=True,
                     num_mini_batches=16),
        "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4,
                     num_mini_batches=4),
        "cispo": dict(loss_type="dapo", policy_loss="cispo", epsilon_high=5.0, num_mini_batches=16),    # TRL's cap
        "sapo": dict(loss_type="grpo", policy_loss="sapo", num_mini_batches=4)}
    default = vars(grpo.GRPOConfig())
    assert default == dict(
        learning_rate=1e-6, beta=0.0, num_iterations=1, epsilon=0.2, epsilon_high=None, delta=None, bf16=False, seed=42,
        loss_type="dapo", scale_rewards="group", importance_sampling_level="token", num_generations=8, temperature=1.0,
        max_completion_length=512, mask_truncated_completions=False, max_grad_norm=1.0, sync_ref_model=False,
        ref_model_sync_steps=512, lr_scheduler_type="linear", weight_decay=0.0, warmup_steps=0, reward_weights=None,
        per_device_train_batch_size=8, generation_batch_size=64, policy_loss="clip", use_bias_correction_kl=False,
        max_steps=100, output_dir=None, save_steps=10, num_mini_batches=1)
    tested_elsewhere = {"bf16", "seed", "per_device_train_batch_size", "output_dir", "save_steps"}
    assert {field for field, _, _ in OPTIONS} | tested_elsewhere == set(default), "an option without a test"


def test_rewards_reach_the_prompt_that_they_belong_to():
    """Any callable gets prompts, completions, their ids without padding, and the dataset's columns, by row."""
    seen, problems = {}, {p["prompt"]: p["solution"] for p in PROBLEMS[:6]}
    look = lambda **columns: seen.update(columns) or by_row(**columns)
    (_, r, metrics), = steps_of(make_model("Llama"), [look, by_row])
    tokenizer = grpo.tiny_tokenizer()
    assert metrics["rewards/by_row/mean"] == metrics["rewards/<lambda>/mean"] == 1.0
    assert sorted(seen) == ["completion_ids", "completions", "prompts", "solution"]
    assert [text.replace("<pad>", "") for text in tokenizer.batch_decode(r.prompt_ids)] == seen["prompts"]
    assert seen["prompts"] == [p for p in seen["prompts"][::4] for _ in range(4)] and len(set(seen["prompts"])) == 2
    assert seen["solution"] == [problems[p] for p in seen["prompts"]]
    assert seen["completion_ids"] == [ids[m == 1].tolist() for ids, m in zip(r.completion_ids, r.completion_mask)]
    assert seen["completions"] == tokenizer.batch_decode(seen["completion_ids"], skip_special_tokens=True)
    for wrong in ([1.0] * 9, [], [inf] * 8, [nan] * 8, [None] * 7 + [-inf]):
        with pytest.raises(ValueError, match="function <lambda>: got .*; allowed: 8 floats"):
            next(steps_of(make_model("Llama"), [by_row, lambda **columns: wrong]))


def test_what_a_reward_function_changes_is_its_own():
    """The dataset, the rollout, the other answers of the group and the other functions keep what they had."""
    row = {"prompt": [{"role": "user", "content": "1"}], "notes": [], "completion_ids": None}     # a column's name, too
    seen, dataset, kept = [], [row] * 2, copy.deepcopy(row)

    def judge(**columns):
        seen.append(copy.deepcopy(columns))
        for name, lists in columns.items():
            for mine, before in zip(lists, seen[-1][name]):
                assert mine == before                                   # no other answer has added to it
                mine.append({"role": "user", "content": "is it right?"})
        return by_row(**columns)

    (_, r, _), = grpo.train(make_model("Llama"), chat_tokenizer(), dataset, [judge, judge], grpo.GRPOConfig(**SMALL))
    assert seen[0] == seen[1] and dataset == [kept] * 2
    assert [r.rows, r.completions] == [[kept] * 8, seen[0]["completions"]]


def test_any_causal_lm_trains_on_a_file(data):
    """Its float32 weights are trained and saved for from_pretrained; code that comes with it is never run."""
    (data / "plan2.py").write_text("answer = [None] * 8")               # no reward of this function in the second step
    done = cli(*command(data, model=data / "models/half", dataset=data / "chat.jsonl", beta=0.1,
                        reward_funcs=["accuracy", f"{data}/rewards.py:length"], reward_weights=[1, 0.1]))
    assert done.code == 0 and done.out.splitlines()[-1] == f"metrics.jsonl and checkpoint-2 are in {data}/out"
    lines = lines_of(data / "out")
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["kl"] > 0.0
    assert math.isfinite(lines[0]["rewards/length/mean"]) and math.isnan(lines[1]["rewards/length/mean"])
    assert {weight.dtype for weight in weights_of(data / "out").values()} == {torch.float32}


def test_the_tiny_job_from_end_to_end(tmp_path, monkeypatch):
    """Cold start, samples and accuracy, GRPO, samples and accuracy, in README's form; flags win over presets."""
    assert grpo.teacher_trace("47+85=", False) == "<think>7+5=12,4+8+1=13</think>132<eos>"
    assert grpo.teacher_trace("47+85=", True) == "<think>7+5=12,4+8+0=12</think>122<eos>"
    problems, held_out = grpo.tiny_problems(3)
    monkeypatch.setattr(grpo, "tiny_problems", lambda seed: (problems[:64], held_out))
    monkeypatch.setattr(grpo, "cold_start", functools.partial(grpo.cold_start, steps=3))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "grpo.py")])
    (tmp_path / "grpo.args").write_text("--learning_rate 1")            # no file but those named on the command line
    flags = ("--model tiny --max_steps 2 --generation_batch_size 32 --max_completion_length 8 --seed 3 "
             "--preset deepseekmath --beta 0.5").split()
    done = cli(*flags, "--output_dir", tmp_path / "out")
    again = cli(*flags, "--max_steps", 3, "--resume_from_checkpoint", tmp_path / "out/checkpoint-2")
    readme = re.search(r"```\n(  \d\d\+\d\d= .*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    for text, count in ((done.out, 2), (again.out, 1), (readme, 10)):
        steps = [r"  step \d+: reward -?\d\.\d\d, entropy \d\.\d\d, clipped \d+\.\d%"] * count
        samples = [r"  \d\d\+\d\d= '.*'   reward [01]"] * 4
        form = [*samples, *steps, r"metrics\.jsonl and checkpoint-\d+ are in \S+", *samples,
                r"held-out accuracy: \d\.\d\d -> \d\.\d\d \(greedy, 500 problems\)"]
        assert re.fullmatch("\n".join(form) + "\n", text), text
    sizes = grpo.PRESETS["deepseekmath"] | grpo.TINY                    # flags win over sizes, and sizes over presets
    given = dict(max_steps=2, generation_batch_size=32, max_completion_length=8, seed=3, beta=0.5)
    assert grpo.parse_options(flags)[0] == grpo.GRPOConfig(**sizes | given)


def test_an_earlier_run_is_never_overwritten(data, monkeypatch):
    """Without a name, a run takes the next free one; a folder that holds something is refused."""
    monkeypatch.chdir(data)
    for name in ("grpo-output", "grpo-output-2", "grpo-output-3"):
        assert cli(*command(data, output_dir=None, max_steps=1)).code == 0 and len(lines_of(data / name)) == 1
    before, done = files_of(data), cli(*command(data, output_dir="grpo-output"))
    assert done.code == 2 and "output_dir: got grpo-output, not new or empty" in done.err and before == files_of(data)
    done = cli(*command(data, max_steps=1, learning_rate=1, weight_decay=1e39, output_dir=data / "far"))    # overflows
    assert done.code == 1 and "the weights are not finite" in done.err
    assert os.listdir(data / "far") == ["metrics.jsonl"]


LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)
FULL = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (%d, {LIMIT[1]}))"    # the longest file, in bytes
ENDS = {  # what happens in the fourth call of the reward function, the exit code, what is said, some options
    "Ctrl-C": ("raise KeyboardInterrupt", 130, "", dict(num_iterations=2, beta=0.1, lr_scheduler_type="cosine")),
    "an error": ("raise KeyError('oh')", 1, "Traceback.*rewards.py.*KeyError: 'oh'", dict(
        warmup_steps=3, beta=0.1, sync_ref_model=True, ref_model_sync_steps=3, num_mini_batches=2)),
    "no room for a line": (FULL % 50, 1, "Traceback.*OSError: .*File too large", {}),
    "no room for weights": (FULL % 20_000, 1, "Traceback.*File too large", {})}


@pytest.mark.parametrize("what", ENDS)
def test_what_ends_a_run_leaves_its_last_checkpoint(what, data):
    """The command that is printed goes on from there, and ends on the bits of the run that nothing stopped."""
    plan, code, said, options = ENDS[what]
    run = command(data, **dict(max_steps=5, save_steps=2, output_dir=data / "a folder") | options)
    assert cli(*run, "--output_dir", data / "whole").code == 0
    (data / "plan4.py").write_text(plan)
    done, again = cli(*run), [*run, "--resume_from_checkpoint", f"{data}/a folder/checkpoint-2"]
    resource.setrlimit(resource.RLIMIT_FSIZE, LIMIT)
    assert done.code == code and re.search(said, done.err, re.S), done
    assert last_checkpoint(data / "a folder").name == "checkpoint-2"
    printed = re.findall(r"^stopped; to go on after step 2: python \S+ (--.*)", done.out, re.M)
    assert list(map(shlex.split, printed)) == [again] and cli(*again).code == 0
    assert_same_run(data / "a folder", data / "whole")
    assert sorted(os.listdir(data / "a folder")) == ["checkpoint-5", "metrics.jsonl"]


@pytest.mark.parametrize("error, times", [(KeyboardInterrupt, 1), (SystemExit, 99)])
def test_what_stops_a_run_at_any_moment_leaves_a_whole_checkpoint(error, times, data, monkeypatch):
    """From the first save to the second, before calls that sample, score, update or touch the disk: the run
    goes on from the last checkpoint to the end of the run that nothing stopped. (99 times: as a kill, no more calls.)"""
    options = dict(max_steps=5, save_steps=2, num_mini_batches=2, max_completion_length=3)
    assert cli(*command(data, output_dir=data / "whole", **options)).code == 0
    left = [inf]                                                        # calls until then

    def stops(function):
        @functools.wraps(function)
        def counted(*args, **kwargs):
            left[0] -= 1
            if -times <= left[0] < 0:
                raise error
            return function(*args, **kwargs)
        return counted

    for owner, name in ((grpo, "sample_rollout"), (grpo, "score_rollout"), (torch.optim.AdamW, "step"),
                        (grpo, "step_metrics"), (torch, "save"), (os, "rename"), (shutil, "copy"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, stops(getattr(owner, name)))
    saved_steps = []
    for calls in range(13, 28):                                         # the first checkpoint is there after 13
        out, left[0] = data / f"out{calls}", calls
        done = cli(*command(data, output_dir=out, **options))
        left[0] = inf
        checkpoint = last_checkpoint(out)
        saved_steps.append(torch.load(checkpoint / "trainer_state.pt", weights_only=True)["step"])
        assert checkpoint.name == f"checkpoint-{saved_steps[-1]}" and done.code == (130 if times < 99 else None)
        assert f"to go on after step {saved_steps[-1]}: " in done.out
        assert resume(data, out, output_dir=None, **options).code == 0
        assert_same_run(out, data / "whole")
        assert sorted(os.listdir(out)) == ["checkpoint-5", "metrics.jsonl"]
    assert saved_steps[0] == 2 and saved_steps[-1] == 4                 # the second save has been gone through


def test_ctrl_c_ends_a_process_at_once_and_says_how_to_go_on(data):
    """Exit code 130; the command that is printed names the last checkpoint, and metrics.jsonl agrees with it."""
    run = command(data, max_steps=10**6, save_steps=3, output_dir=data / "out")
    process = subprocess.Popen([sys.executable, grpo.__file__, *run], stdout=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))    # nohup ignores it
    while not list(data.glob("out/checkpoint-*[0-9]")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    checkpoint = last_checkpoint(data / "out")
    assert process.returncode == 130 and f"--resume_from_checkpoint {checkpoint}\n" in out
    steps = int(checkpoint.name.rpartition("-")[2]) + 1
    assert resume(data, data / "out", output_dir=None, max_steps=steps).code == 0
    assert [line["step"] for line in lines_of(data / "out")] == list(range(1, steps + 1))


def test_a_checkpoint_goes_on_elsewhere_and_further_and_with_other_options(data):
    """What the user repeats or changes on the command line counts; what the checkpoint holds is data alone."""
    out = data / "out"
    assert cli(*command(data, max_steps=3)).code == 0                   # finished: its linear schedule is at 0
    before = files_of(out)
    shutil.copytree(out, data / "copy")
    assert resume(data, data / "copy").code == 2                        # --output_dir names the original
    assert resume(data, data / "copy", output_dir=None).code == 0
    assert resume(data, out, output_dir=data / "decayed", weight_decay=0.5).code == 0
    assert resume(data, out, output_dir=data / "new", learning_rate=0.02).code == 0 and files_of(out) == before
    rates = [[line["learning_rate"] for line in lines_of(data / name)] for name in ("copy", "decayed", "new")]
    assert rates[0] == rates[1] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3, 0.004, 0.002])
    assert rates[2] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3, 0.008, 0.004])
    free, decayed = (sum(x.square().sum() for x in weights_of(data / name).values()) for name in ("copy", "decayed"))
    assert decayed / free == pytest.approx((1 - 0.5 * 0.004) ** 2 * (1 - 0.5 * 0.002) ** 2, rel=1e-4)
    torch.save(print, out / "checkpoint-3/trainer_state.pt")            # a function, not data
    assert resume(data, out).code == 2


def test_an_eval_dataset_is_answered_greedily_before_and_after(data):
    """The mean of the first reward function over its rows, in parts of a batch."""
    shutil.copy(data / "chat.jsonl", data / "eval.jsonl")               # 12 rows: a batch of 8 and one of 4
    run = dict(dataset=data / "chat.jsonl", eval_dataset=data / "eval.jsonl", max_steps=5)
    done = cli(*command(data, **run))
    assert done.code == 0 and len(re.findall(r"^  \d\d\+\d\d '.*'   reward 0$", done.out, re.M)) == 8
    assert done.out.splitlines()[-1] == "held-out think_format: 0.00 -> 0.00 (greedy, 12 problems)"
    policy, tokenizer = grpo.load_model(last_checkpoint(data / "out"))
    rows, config = grpo.load_dataset(data / "eval.jsonl"), grpo.GRPOConfig(**SMALL)
    alone = [grpo.sample_rollout(policy, tokenizer, [row], config) for row in rows]
    lengths = [rollout.completion_mask.sum().item() for rollout in alone]
    length = lambda completion_ids, **columns: [len(ids) for ids in completion_ids]
    assert grpo.evaluate(policy, tokenizer, rows, [length], config) == statistics.mean(lengths)


BAD_ROWS = [  # what a dataset holds, what the one line must say
    ("", "an empty file"), ('{"prompt": "1"}\n{oops\n', "line 2: got {oops"), ("[1]\n", "line 1"),
    ('{"solution": "1"}\n', "line 1"), ('{"prompt": "1"}\n', "solution"), ('{"prompt": "\udcff"}\n', "line 1: got "),
    ('{"prompt": "1", "solution": "1"}\n{"prompt": "1"}\n', "line 2"), ('{"prompt": "", "solution": "1"}', "line 1"),
    ('{"prompt": "1", "solution": "1"}\n{"prompt": [{"role": "user", "content": "1"}], "solution": "1"}\n', "line 2")]
BAD_FLAGS = [  # flag, value, what the one line must say
    ("dataset", None, "--dataset"), ("dataset", "absent.jsonl", "absent.jsonl"), ("model", "./nowhere", "nowhere"),
    ("beta", nan, "beta: got"), ("temperature", 0, "temperature: got"), ("reward_funcs", "rewards.py:absent", "absent"),
    ("reward_funcs", "string.py:broken", "string.py:broken"), ("max_steps", 0, "max_steps: got"),
    ("reward_funcs", "short.py:broken", "function broken: got"), ("output_dir", "text.jsonl", "text.jsonl"),
    ("resume_from_checkpoint", "nowhere", "nowhere"), ("resume_from_checkpoint", "models/Llama", "Llama"),
    ("loss_type", "bnpo", "--loss_type"), ("num_gen", 4, "--num_gen"), ("reward_weights", 1, "reward_weights: "),
    ("num_generations", 5, "size: .* got"), ("max_completion_length", 60, "the model's limit is 5[0-9]"),
    ("eval_dataset", "absent.jsonl", "absent.jsonl"), ("num_mini_batches", 9, "num_mini_batches: .* got 9")]
USELESS = [  # an option that would do nothing, or nothing good, and what is said
    (dict(delta=1.1), "delta: .* at least 1.2; got 1.1"), (dict(delta=2.0, policy_loss="sapo"), "delta: .* clip"),
    (dict(delta=1.25, epsilon_high=0.3), "delta: .* at least 1.3"), (dict(sync_ref_model=True), "sync_ref_model: "),
    (dict(use_bias_correction_kl=True), "use_bias_correction_kl: .* beta > 0"), (dict(epsilon=1.5), "epsilon: .* 1; "),
    (dict(reward_weights=[1.0, nan]), "reward_weights: "), (dict(loss_type="bnpo"), "loss_type: got 'bnpo'")]


@pytest.mark.parametrize("options, said", USELESS, ids=str)
def test_an_option_that_would_do_nothing_is_refused(options, said):
    """The error names it, what came and what is allowed; at its limit it is taken."""
    with pytest.raises(grpo.InputError, match=said):
        grpo.GRPOConfig(**options)
    grpo.GRPOConfig(delta=1.2, epsilon=0.2), grpo.GRPOConfig(epsilon=1.0, reward_weights=[0.0])
    grpo.GRPOConfig(beta=0.1, sync_ref_model=True, use_bias_correction_kl=True)


@pytest.mark.parametrize("flag, value, said", [*BAD_FLAGS, *(("rows", *row) for row in BAD_ROWS)], ids=str)
def test_bad_input_is_one_line_and_exit_2(flag, value, said, data, monkeypatch):
    """The line says what is wrong; no file is written or changed."""
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
    __torch_dispatch__ = lambda self, *call: There.__torch_dispatch__(*call)


@pytest.mark.parametrize("kind, more", [
    ("Llama", dict(scale_rewards="batch")), ("GPT2", dict(importance_sampling_level="sequence", loss_type="grpo")),
    ("Qwen2", dict(policy_loss="cispo", use_bias_correction_kl=True))])
def test_a_run_on_another_device_is_the_run_on_the_cpu(kind, more, request):
    """No tensor is on the wrong device, which here is an error as on CUDA, and the metrics are the same."""
    options = SMALL | more | dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=1, temperature=0.7,
                                  num_iterations=2, num_mini_batches=2, mask_truncated_completions=True,
                                  per_device_train_batch_size=3, max_completion_length=5)
    request.addfinalizer(lambda: torch._C._set_only_lift_cpu_tensors(False))
    torch._C._set_only_lift_cpu_tensors(True)
    found = {"cpu": [], "pretend": []}
    for device, lines in found.items():
        with Pretend() if device == "pretend" else contextlib.nullcontext():
            policy, saved = make_model(kind).double().to(device), None
            policy.tie_weights()                                        # moving to this device has parted them
            for options["max_steps"] in (1, 2):                         # the second step goes on from a checkpoint
                state = grpo.initial_state(policy, grpo.GRPOConfig(**options), saved)
                for *_, metrics in steps_of(policy, train={"state": state}, **options):
                    lines.append(metrics | {"step_time": 0})
                saved = {"step": state.step, "moments": state.optimizer.state_dict()["state"],
                         "reference": state.reference.state_dict()}
                saved = tree_map_only(torch.Tensor, torch.Tensor.cpu, saved)
            grpo.cold_start(policy, grpo.tiny_tokenizer(), PROBLEMS[:4], 0, steps=1)
            config = grpo.GRPOConfig(**options)
            right = grpo.evaluate(policy, grpo.tiny_tokenizer(), PROBLEMS[:4], [grpo.accuracy_reward], config)
            lines.append({"accuracy": right})
    with pytest.raises(RuntimeError, match="two devices"):
        policy.lm_head.weight + torch.ones(32)
    assert found["cpu"] == [pytest.approx(line, rel=1e-4, abs=1e-5) for line in found["pretend"]]


def test_a_gpu_samples_as_it_scores_trains_and_resumes(data):
    """On CUDA, in float32 and bfloat16: the resumed run has the losses and gradients of the whole one."""
    gpu = {"GRPO_TEST_CUDA": "1", "CUDA_VISIBLE_DEVICES": os.environ.get("GRPO_TEST_CUDA", "0")}
    there = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if not torch.backends.cuda.is_built() or python("-c", there, **gpu).returncode:
        pytest.skip("no GPU")
    for bf16 in (False, True):
        whole, out = data / f"whole {bf16}", data / f"out {bf16}"
        run = [grpo.__file__, *command(data, max_steps=4, bf16=bf16, beta=0.1, num_iterations=2, save_steps=1,
                                       output_dir=None)]
        assert python(*run, "--output_dir", whole, **gpu).returncode == 0
        (data / "plan2.py").write_text("raise KeyboardInterrupt")
        assert python(*run, "--output_dir", out, **gpu).returncode == 130
        assert python(*run, "--resume_from_checkpoint", last_checkpoint(out), **gpu).returncode == 0
        for a, b in zip(lines_of(out), lines_of(whole), strict=True):
            assert a["step"] == b["step"] and a["grad_norm"] > 0 and all(map(math.isfinite, a.values()))
            assert a["sampling/sampling_logp_difference/max"] < (0.1 if bf16 else 1e-3)
            for name in ("loss", "grad_norm", "kl"):
                assert a[name] == pytest.approx(b[name], rel=0.1 if bf16 else 1e-3, abs=1e-2 if bf16 else 1e-5), name
