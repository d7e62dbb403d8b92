"""What sampling and training promise (§9, §10): a test's name is a promise, its docstring the law."""

import contextlib
import copy
import functools
import io
import math
import statistics
from operator import or_
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest
import torch
from conftest import PROBLEMS, SMALL, by_row, chat_tokenizer, make_model, passes_of, question, steps_of
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


@pytest.mark.parametrize("options, lines", [({}, 0), (dict(shown=3), 3)])
def test_evaluate_means_the_rewards_of_all_problems_and_shows_so_many_answers(options, lines):
    """Answers are greedy, in parts of a batch; what a function has not scored is left out. Else nothing is printed."""
    def length(completion_ids, **columns):
        return [None if 11 in ids else len(ids) for ids in completion_ids]

    tokenizer, config = grpo.tiny_tokenizer(), grpo.GRPOConfig(**SMALL)
    r = grpo.sample_rollout(LLAMA, tokenizer, PROBLEMS, config)
    lengths = length([ids[mask == 1].tolist() for ids, mask in zip(r.completion_ids, r.completion_mask)])
    there = [n for n in lengths if n is not None]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        means = grpo.evaluate(LLAMA, tokenizer, PROBLEMS, [length], config, **options)
    assert len(PROBLEMS) > len(there) > 1 and means == {"length": pytest.approx(statistics.mean(there))}
    assert out.getvalue().count("\n") == lines


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


def draws_by_hand(policy, tokenizer, problems, c, step):
    """Prompts, none of them twice if there are enough, and answers, from seed and step; and what draws on."""
    B, G, rng = c.generation_batch_size, c.num_generations, numpy.random.default_rng([c.seed, 3, step])
    examples = [problems[i] for i in rng.choice(len(problems), B // G, replace=len(problems) < B // G)]
    prompts = grpo.encode_prompts(tokenizer, [row["prompt"] for row in examples], "cpu")
    answers, *_ = grpo.generate(
        policy, *prompts, num_generations=G, eos_token_ids=[1, 17], max_completion_length=c.max_completion_length,
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


# Of beta > 0 and rewards of 0 the gradient would be rounding alone, which AdamW blows up.
a_policy_loss = st.sampled_from([
    dict(), dict(epsilon=0.01), dict(epsilon_high=0.01), dict(epsilon_high=0.3), dict(delta=1.31),
    dict(policy_loss="cispo"), dict(policy_loss="cispo", epsilon_high=1.01), dict(policy_loss="sapo")])
a_reference = st.sampled_from([
    dict(), dict(reward_weights=[0.0, 2.0]), dict(reward_weights=[0.0, 0.0]), dict(beta=0.1),
    dict(beta=0.1, use_bias_correction_kl=True), dict(beta=0.1, sync_ref_model=True, ref_model_sync_steps=2)])
updates = st.sampled_from([
    dict(), dict(num_mini_batches=3), dict(num_iterations=2), dict(num_iterations=2, num_mini_batches=2),
    dict(num_iterations=3, num_mini_batches=4)])
others = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in dict(
    loss_type=["grpo", "dr_grpo"], importance_sampling_level=["sequence"], temperature=[0.7],
    scale_rewards=["batch", "none"], max_grad_norm=[0.0, 0.02], mask_truncated_completions=[True],
    per_device_train_batch_size=[1, 3]).items()})
any_options = st.tuples(a_policy_loss, a_reference, updates, others).map(lambda parts: functools.reduce(or_, parts))


@settings(DRAWS, max_examples=20, phases=[Phase.generate])              # shrinking would take minutes
@given(any_options, st.sampled_from([1, 2, 6]), st.integers(0, 99))
def test_train_is_algorithm_1_with_any_options(options, size, seed):
    """A twin of the policy that draws prompts and answers from seed and step, and learns from them, has in each of
    three steps the metrics and the weights of the run. The policy's config adds an EOS to the tokenizer's."""
    c, tokenizer = grpo.GRPOConfig(**SMALL | dict(max_steps=3, seed=seed) | options), grpo.tiny_tokenizer()
    tokenizer.add_tokens(["<turn>"])                                    # 17
    policy, twin, reference = (make_model("GPT2").double().train(mode) for mode in (True, False, False))
    policy.generation_config.eos_token_id = [1, 17]
    optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=0.0)
    v, w = c.reward_weights or [1, 1]
    rewards = [None if a is b is None else v * (a or 0) + w * (b or 0) for a, b in SCORES]
    A = grpo.group_advantages(torch.tensor([nan if x is None else x for x in rewards], dtype=torch.float64), 4,
                              scale_rewards=c.scale_rewards)
    steps = grpo.train(policy, tokenizer, PROBLEMS[:size], [first, second], c, compute_advantages=perturbed)
    for step, (_, r, metrics) in enumerate(steps):
        if c.sync_ref_model and step % c.ref_model_sync_steps == 0:
            reference.load_state_dict(twin.state_dict())
        examples, answers, rng = draws_by_hand(twin, tokenizer, PROBLEMS[:size], c, step)
        assert r.examples == examples and torch.equal(r.completion_ids, answers)
        assert torch.equal(r.terminated, ((answers == 1) | (answers == 17)).any(1))
        rate = optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 3)
        want = learn_by_hand(twin, reference, optimizer, r, A, c, rng) | samples_by_hand(r, rewards)
        assert 0 <= metrics.pop("reward_time") < metrics.pop("step_time") < 100
        assert metrics == pytest.approx({"step": step + 1, "learning_rate": rate} | want, rel=1e-6, abs=1e-8)
        close(policy.state_dict(), twin.state_dict(), atol=1e-8, rtol=0)
    assert step == 2


@pytest.mark.parametrize("leave", [
    lambda policy: policy.train(), lambda policy: policy(torch.tensor([[5, 6]])).logits.sum().backward()],
    ids=["dropout", "a gradient"])
def test_nothing_that_a_reward_function_leaves_reaches_the_run(leave):
    """Metrics and weights have the bits of a run whose reward function leaves nothing."""
    def run(leave):
        policy = make_model("GPT2")

        def by_hand(completions, **columns):
            leave(policy)
            return by_row(completions)

        steps = steps_of(policy, [by_hand], max_steps=2, num_iterations=2)
        return [metrics | dict(step_time=0, reward_time=0) for *_, metrics in steps], policy.state_dict()

    (steps, weights), (want, weights_wanted) = run(leave), run(lambda policy: None)
    assert steps == want
    same(weights, weights_wanted)


def test_a_debugger_sees_each_tensor_of_the_equations_in_the_frame_of_train():
    """It is reached from importance_ratio by `up`, twice. A, m, old, ref are rows of the part, logps the policy's."""
    steps = steps_of(make_model("Llama"), num_iterations=2, beta=0.1, per_device_train_batch_size=3)
    with mock.patch.object(grpo, "importance_ratio", side_effect=EOFError), pytest.raises(EOFError) as stopped:
        next(steps)                                                     # as if here were a breakpoint
    above = [entry for entry in stopped.traceback if entry.path == Path(grpo.__file__)]
    assert [entry.name for entry in above] == ["train", "grpo_loss"]
    seen = above[0].locals
    for name, whole in ("A", "advantages"), ("m", "mask"), ("old", "old_logps"), ("ref", "ref_logps"):
        same(seen[name], seen[whole][seen["part"]])
    assert seen["logps"].shape == seen["old"].shape and seen["logps"].requires_grad
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
    dict.fromkeys(range(8), 0.5), map(float, range(8)), [nan] + [0.5] * 7, numpy.full(8, nan), torch.full((8,), nan)],
    ids=str)
def test_what_is_no_list_of_a_number_for_each_row_is_an_error_that_names_the_function(returned):
    """Too few, too many, nested, infinite, words, what has no order, a dict (its keys are no rewards), a generator.
    NaN, a mean of no numbers or 0/0, is a mistake: only None abstains."""
    with pytest.raises((AssertionError, TypeError), match="a_judge|must be real number"):
        rewards_of(returned, 8)
