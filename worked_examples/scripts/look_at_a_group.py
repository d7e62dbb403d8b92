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


def load(argv):
    """The page's file, the config, and policy, tokenizer, dataset, reward functions and what is asked of a group."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--html")
    own, argv = parser.parse_known_args(argv)
    usual = f"--model tiny --learning_rate 3e-5 --num_iterations {10 if own.html else 1}"
    config, options, _ = grpo.parse_options([*usual.split(), *argv])    # of a flag given twice the last one counts
    if config.policy_loss == "clip" and config.epsilon_high is None:    # the page shows a number: as in its rows
        config = replace(config, epsilon_high=0.28 if config.loss_type == "dapo" else config.epsilon)
    policy, tokenizer = grpo.load_model(options.model, config.seed)
    wanted = lambda rollout: True
    if options.model == "tiny":
        torch.set_num_threads(1)                                        # for so small a model, more would wait
        problems, _ = grpo.tiny_problems(config.seed)
        grpo.cold_start(policy, tokenizer, problems, config.seed)
        length = lambda row, forgets: len(grpo.teacher_trace(row["prompt"], forgets))
        dataset = [row for row in problems if length(row, False) > length(row, True)]          # the carry adds a digit
        wanted = lambda rollout: sorted(Counter(rollout.completions).values()) == 2 * [config.num_generations / 2]
    else:
        dataset = grpo.load_dataset(options.dataset)
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    reward_funcs = [grpo.load_reward_func(name) for name in options.reward_funcs]
    return own.html, config, (policy, tokenizer, dataset, reward_funcs, wanted)


def find_group(policy, tokenizer, dataset, reward_funcs, wanted, config):
    """The first of 400 samples that has unequal rewards and is wanted, else the last, with rewards and advantages."""
    for step in range(400):
        rng = grpo.step_rng(config, step)
        rollout = grpo.sample_rollout(policy, tokenizer, grpo.sample_batch(dataset, config, rng), config, rng)
        rewards_per_func = grpo.compute_rewards(reward_funcs, rollout)
        advantages = grpo.outcome_advantages(rewards_per_func, rollout, config)
        if advantages.any() and wanted(rollout):
            break
    return rollout, rewards_per_func, advantages


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
    """All that the page shows of a group; log-probs and the forks' probabilities after 0, 1, ... updates on it."""
    config = replace(config, generation_batch_size=config.num_generations)
    rollout, rewards_per_func, advantages = find_group(policy, tokenizer, dataset, reward_funcs, wanted, config)
    answers = [ids[mask != 0].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask)]
    forks = find_forks(answers, advantages[:, 0].tolist())
    rows, state, updates, probs = torch.arange(len(answers)), grpo.initial_state(policy, config), [], []
    with torch.no_grad():
        _, entropies = grpo.per_token_logps(
            policy, rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask,
            temperature=config.temperature, compute_entropy=True)
    for u in range(config.num_iterations + 1):
        if u > 0:                                                       # at first the reference is the policy
            grpo.update_policy(policy, state, rollout, rows, advantages, updates[0], updates[0], config)
        updates.append(grpo.score_rollout(policy, rollout, config))
        probs.append([next_token_probs(policy, rollout, beginning, config) for beginning in forks])
    return SimpleNamespace(
        tokenizer=tokenizer, config=config, rollout=rollout, answers=answers, forks=forks, probs=probs, updates=updates,
        entropies=entropies, advantages=advantages,
        rewards=grpo.combine_rewards(rewards_per_func, config.reward_weights),
        rewards_per_func={f.__name__: rewards for f, rewards in zip(reward_funcs, rewards_per_func.T)})


def pushes(seen, u, options):
    """−∂loss/∂log π of each token after u updates, (B, T): a positive one pushes the token up."""
    logps, old_logps = seen.updates[u].double().requires_grad_(), seen.updates[0].double()
    loss, _ = grpo.grpo_loss(logps, seen.advantages.double(), seen.rollout.loss_mask, old_logps=old_logps, **options)
    return 0.0 - torch.autograd.grad(loss, logps)[0]                    # where it is 0: 0, not −0


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
    html, config, job = load(argv)
    data = group_data(update_on_one_group(*job, config))
    if html:
        Path(html).write_text(page(data), encoding="utf-8")
        return
    print(f"{len(data['rewards'])} answers to {data['prompt']!r}, rewards {data['rewards']}")
    for extreme in max, min:
        show(data, data["rewards"].index(extreme(data["rewards"])))


if __name__ == "__main__":
    main(sys.argv[1:])
