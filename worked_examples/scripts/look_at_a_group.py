"""One sampled group, token by token: a table in the terminal, or a page for the browser.

    python worked_examples/scripts/look_at_a_group.py
    python worked_examples/scripts/look_at_a_group.py --model NAME_OR_FOLDER --dataset FILE.jsonl ... --html group.html

It takes grpo.py's flags, with --learning_rate 3e-5 where none is given. Without --model, the tiny model answers after
its cold start, and half of the answers forget the carry; of another model it is the first group with unequal rewards.
The table: the best and the worst answer before and after one update on this group. --html: the group as a tree, before
and after each of ten updates.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import transformers

import grpo

USUAL = dict(policy_loss="clip", importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2)
METHODS = {                                                             # options of grpo_loss, as on page 10
    "grpo": dict(loss_type="grpo"),
    "dapo": dict(loss_type="dapo", epsilon_high=0.28),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "cispo": dict(loss_type="dapo", policy_loss="cispo", epsilon_high=5.0),
    "sapo": dict(loss_type="grpo", policy_loss="sapo"),
}


def parse(argv):
    """The page's file, and grpo.py's config and options. Of a flag given twice the last one counts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--html")
    own, argv = parser.parse_known_args(argv)
    usual = f"--model tiny --learning_rate 3e-5 --num_iterations {10 if own.html else 1}"
    config, options, _ = grpo.parse_options([*usual.split(), *argv])
    if config.epsilon_high is None:                                     # the page shows a number: as in its rows
        defaults = {"cispo": 5.0, "dapo": 0.28}
        high = defaults.get(config.policy_loss, defaults.get(config.loss_type, config.epsilon))
        config = replace(config, epsilon_high=high)
    return own.html, config, options


def load(config, options):
    """Policy, tokenizer, dataset, reward functions, and which group is wanted (None: one with unequal rewards)."""
    policy, tokenizer = grpo.load_model(options.model, config.seed)
    if options.model == "tiny":
        torch.set_num_threads(1)                                        # for so small a model, more would wait
        problems, _ = grpo.tiny_problems(config.seed)
        grpo.cold_start(policy, tokenizer, problems, config.seed)
        lengths = [[len(grpo.teacher_trace(row["prompt"], forgets)) for forgets in (False, True)] for row in problems]
        dataset = [row for row, (right, wrong) in zip(problems, lengths) if right > wrong]     # a carry is a token more
        wanted = has_two_halves
    else:
        dataset = grpo.load_dataset(options.dataset)
        wanted = None
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    return policy, tokenizer, dataset, [grpo.load_reward_func(name) for name in options.reward_funcs], wanted


def has_two_halves(rollout):
    """Whether one half of the answers agree, and the other half agree on something else."""
    counts = Counter(rollout.completions).values()
    return len(counts) == 2 and min(counts) == max(counts)


def find_step(policy, tokenizer, dataset, reward_funcs, wanted, config):
    """The first step with unequal rewards and a wanted group: from the step follow its question and its samples."""
    for step in range(config.max_steps):
        rng = grpo.step_rng(config, step)
        rollout = grpo.sample_rollout(policy, tokenizer, grpo.sample_batch(dataset, config, rng), config, rng)
        advantages = grpo.outcome_advantages(grpo.compute_rewards(reward_funcs, rollout), rollout, config)
        if advantages.any() and (wanted is None or wanted(rollout)):
            return step
    return 0


def find_forks(answers, advantages):
    """The beginnings after which answers differ, the largest pushes first -> the next tokens -> their ΣA."""
    pulls = {}
    for ids, A in zip(answers, advantages):
        for t, token in enumerate(ids):
            after = pulls.setdefault(tuple(ids[:t]), {})
            after[token] = after.get(token, 0.0) + A
    forks = {beginning: after for beginning, after in pulls.items() if len(after) > 1}
    return dict(sorted(forks.items(), key=lambda fork: -sum(map(abs, fork[1].values()))))


def next_token_probs(policy, rollout, beginning, config):
    """What the policy says after the question and the beginning of an answer: (V,)."""
    question = rollout.prompt_ids[0][rollout.prompt_mask[0] == 1]
    ids = torch.cat([question, question.new_tensor(beginning)]).unsqueeze(0)
    with torch.no_grad():
        logits = policy(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
    return (logits.float() / config.temperature).softmax(0)


def update_on_one_group(policy, tokenizer, dataset, reward_funcs, wanted, config):
    """Let train make its updates on one group: what it saw, and after 0, 1, ... updates log-probs and forks' probs."""
    config = replace(config, generation_batch_size=config.num_generations, num_mini_batches=1, max_steps=400)
    seen = SimpleNamespace(tokenizer=tokenizer, config=config, updates=[], probs=[])

    def note_policy(*_):
        seen.updates.append(grpo.score_rollout(policy, seen.rollout, config))
        seen.probs.append([next_token_probs(policy, seen.rollout, beginning, config) for beginning in seen.forks])

    def note_group(rewards_per_func, rollout, config):                  # train asks for advantages before it learns
        seen.rollout = rollout
        seen.rewards = grpo.combine_rewards(rewards_per_func, config.reward_weights)
        seen.rewards_per_func = {f.__name__: rewards for f, rewards in zip(reward_funcs, rewards_per_func.T)}
        seen.advantages = grpo.outcome_advantages(rewards_per_func, rollout, config)
        seen.answers = [ids[m != 0].tolist() for ids, m in zip(rollout.completion_ids, rollout.completion_mask)]
        seen.forks = find_forks(seen.answers, seen.advantages[:, 0].tolist())
        with torch.no_grad():
            _, seen.entropies = grpo.per_token_logps(
                policy, rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask,
                temperature=config.temperature, compute_entropy=True)
        note_policy()
        return seen.advantages

    state = grpo.initial_state(policy, config)
    state.step = find_step(policy, tokenizer, dataset, reward_funcs, wanted, config)
    state.optimizer.register_step_post_hook(note_policy)
    next(grpo.train(policy, tokenizer, dataset, reward_funcs, config, state=state, compute_advantages=note_group))
    return seen


def pushes(seen, u, options):
    """−∂loss/∂log π of each token after u updates, (B, T): a positive one pushes the token up."""
    logps, old_logps = seen.updates[u].double().requires_grad_(), seen.updates[0].double()
    loss, _ = grpo.grpo_loss(
        logps, seen.advantages.double(), seen.rollout.loss_mask, old_logps=old_logps, **options)
    return 0.0 - torch.autograd.grad(loss, logps)[0]                     # where it is 0: 0, not −0


def word(token, tokenizer):
    """A token's text; the tokenizer's own name for a token whose text shows nothing, or a part of a character."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    return tokenizer.convert_ids_to_tokens(token) if text in ("", "\ufffd") else text


def group_data(seen):
    """All numbers of the page, as JSON has them."""
    def numbers(x):                                                     # seven digits, None for NaN, no padding
        if x.dim() == 2:
            return [numbers(row[:len(ids)]) for row, ids in zip(x, seen.answers)]
        return [None if value != value else float(f"{value:.7g}") for value in x.tolist()]

    forks, words = [], {}                                               # of a fork the sampled tokens, and the likely
    for (beginning, after), probs in zip(seen.forks.items(), zip(*seen.probs)):
        likely = (torch.stack(probs).amax(0) > 0.01).nonzero()[:, 0].tolist()
        tokens = sorted({*after, *likely}, key=lambda token: -probs[0][token])
        forks.append((beginning, tokens, [numbers(p[tokens]) for p in probs]))
    for token in sorted({token for ids in (*seen.answers, *(tokens for _, tokens, _ in forks)) for token in ids}):
        text = word(token, seen.tokenizer)                              # the page knows a token by its text
        words[token] = text if text not in words.values() else f"{text}[{token}]"

    methods = {}
    for name, options in METHODS.items():
        options = USUAL | options | {"max_completion_length": seen.config.max_completion_length}
        weights = [numbers(pushes(seen, u, options)) for u in range(len(seen.updates))]
        methods[name] = {"options": options, "weights": weights}
    mean, std = grpo.group_stats(seen.rewards, len(seen.rewards))
    return {
        "prompt": seen.tokenizer.decode(seen.rollout.prompt_ids[0], skip_special_tokens=True),
        "rewards": numbers(seen.rewards), "mean": mean.item(), "std": std.item(),
        "advantages": numbers(seen.advantages[:, 0]), "counts": seen.rollout.loss_mask.sum(1).tolist(),
        "answers": [{"text": seen.tokenizer.decode(ids, skip_special_tokens=True), "tokens": [words[i] for i in ids]}
                    for ids in seen.answers],
        "old_logps": numbers(seen.updates[0]), "entropies": numbers(seen.entropies),
        "updates": [numbers(logps) for logps in seen.updates], "methods": methods,
        "forks": [{"prefix": [words[i] for i in beginning], "words": [words[i] for i in tokens], "probabilities": probs}
                  for beginning, tokens, probs in forks],
        "rewards_per_func": {name: numbers(rewards) for name, rewards in seen.rewards_per_func.items()},
        "run": grpo.loss_options(seen.config) | {"scale_rewards": seen.config.scale_rewards}}


def page(data):
    """The template with the data in it: no "<" of an answer may end the script that holds it."""
    template = Path(__file__).with_name("group_page.html").read_text(encoding="utf-8")
    return template.replace("GROUP_DATA", json.dumps(data, allow_nan=False).replace("<", "\\u003c"))


def show(data, i):
    """Print answer i as a table, a line for each token."""
    print(f"\nreward {data['rewards'][i]:.4g}, A = {data['advantages'][i]:.4f}: {data['answers'][i]['text']!r}")
    print(f"{'token':>14}   log π   after one update")
    for token, before, after in zip(data["answers"][i]["tokens"], data["updates"][0][i], data["updates"][1][i]):
        print(f"{token!r:>14} {before:8.4f} {after:8.4f}")


def main(argv):
    transformers.utils.logging.set_verbosity_error()
    html, config, options = parse(argv)
    data = group_data(update_on_one_group(*load(config, options), config))
    if html:
        Path(html).write_text(page(data), encoding="utf-8")
        return
    print(f"{len(data['rewards'])} answers to {data['prompt']!r}, rewards {data['rewards']}")
    for extreme in max, min:
        show(data, data["rewards"].index(extreme(data["rewards"])))


if __name__ == "__main__":
    main(sys.argv[1:])
