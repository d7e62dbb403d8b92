"""One sampled group, token by token: a table in the terminal, or its data as JSON.

    python worked_examples/scripts/look_at_a_group.py
    python worked_examples/scripts/look_at_a_group.py --model NAME_OR_FOLDER --dataset FILE.jsonl ... --json group.json

It takes grpo.py's flags, with --learning_rate 3e-5 where none is given. Without --model, the tiny model answers after
its cold start, and half of the answers forget the carry; of another model it is the first group with unequal rewards,
or, if each of 40 is silent, the last. The table: all answers, then the best and the worst one before and after one
update on this group. --json: its log-probs, pushes and forks, before and after each of ten updates.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

import grpo

METHODS = {                                                             # options of grpo_loss, as on page 10
    "grpo": dict(loss_type="grpo", epsilon_high=0.2),
    "dapo": dict(loss_type="dapo", epsilon_high=0.2),
    "dr_grpo": dict(loss_type="dr_grpo", epsilon_high=0.2),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "cispo": dict(loss_type="dapo", policy_loss="cispo", epsilon_high=5.0),
    "sapo": dict(loss_type="grpo", policy_loss="sapo"),
}


def load(argv):
    """The file to write, or None, and what group_data takes."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json")
    own, argv = parser.parse_known_args(argv)
    usual = f"--model tiny --learning_rate 3e-5 --num_iterations {10 if own.json else 1}"
    options, config, _ = grpo.parse_options([*usual.split(), *argv])    # of a flag given twice the last one counts
    if config.policy_loss == "clip" and config.epsilon_high is None:
        config = replace(config, epsilon_high=config.epsilon)
    policy, tokenizer, dataset, reward_funcs, _ = grpo.load_job(options, config)
    if options.model == "tiny":
        dataset = [row for row in dataset                               # the carry adds a digit
                   if len({len(grpo.teacher_trace(row["prompt"], forgets)) for forgets in (False, True)}) == 2]
    return own.json, (policy, tokenizer, dataset, reward_funcs, config, options.model == "tiny")


def find_group(policy, tokenizer, dataset, reward_funcs, config, in_halves):
    """The first sample with unequal rewards, in_halves: of two texts alike often. If there is none, the last."""
    at_rest = replace(config, learning_rate=0.0, num_iterations=1, max_steps=4000 if in_halves else 40)
    for _, rollout, _ in grpo.train(policy, tokenizer, dataset, reward_funcs, at_rest):      # no weight moves
        texts = rollout.completions
        if rollout.advantages.any() and (not in_halves or {2 * texts.count(text) for text in texts} == {len(texts)}):
            break
    return rollout


def find_forks(answers, advantages):
    """The beginnings after which answers differ, and the next tokens: those with the largest pushes first."""
    pulls = defaultdict(Counter)                                        # beginning -> next token -> ΣA
    for ids, A in zip(answers, advantages):
        for t, token in enumerate(ids):
            pulls[tuple(ids[:t])][token] += A
    forks = [beginning for beginning, after in pulls.items() if len(after) > 1]
    forks.sort(key=lambda beginning: -sum(map(abs, pulls[beginning].values())))
    return [{"prefix": beginning, "words": list(pulls[beginning]), "probabilities": []} for beginning in forks]


def next_token_probs(policy, question, beginning, temperature):
    """What the policy says after the question and the beginning of an answer: (V,)."""
    ids = torch.cat([question, question.new_tensor(beginning)]).unsqueeze(0)
    with torch.no_grad():
        logits = policy(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1]
    return (logits.float() / temperature).softmax(0)


def pushes(logps, old_logps, advantages, mask, options):
    """−∂loss/∂log π of each token, (B, T): a positive one pushes the token up."""
    logps = logps.double().requires_grad_()
    loss, _ = grpo.grpo_loss(logps, advantages.double(), mask, old_logps=old_logps.double(), **options)
    return 0.0 - torch.autograd.grad(loss, logps)[0]                    # where it is 0: 0, not −0


def names_of(tokens, tokenizer):
    """The file knows a token by its text, or by text[id] if the text is empty or another token's."""
    names = {}
    for token in sorted(tokens):
        text = tokenizer.decode([token], skip_special_tokens=False)
        names[token] = text if text and text not in names.values() else f"{text}[{token}]"
    return names


def group_data(policy, tokenizer, dataset, reward_funcs, config, in_halves=False):
    """All numbers of the file, as JSON has them: a group, and what 0, 1, ... updates on it alone change."""
    config = replace(config, generation_batch_size=config.num_generations, num_mini_batches=1)
    rollout = find_group(policy, tokenizer, dataset, reward_funcs, config, in_halves)
    advantages = rollout.advantages
    answers = [ids[mask != 0].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask)]
    question = rollout.prompt_ids[0]                                    # one for all rows, so without padding
    forks = find_forks(answers, advantages[:, 0].tolist())
    with torch.no_grad():
        _, entropies = grpo.per_token_logps(
            policy, rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask,
            temperature=config.temperature, compute_entropy=True)

    def numbers(x):                                                     # seven digits, None for NaN, no padding
        if x.dim() == 2:
            return [numbers(row[:len(ids)]) for row, ids in zip(x, answers)]
        return [None if value != value else float(f"{value:.7g}") for value in x.tolist()]

    mask, rows, updates = rollout.completion_mask, torch.arange(len(answers)), []
    if config.mask_truncated_completions:
        mask = mask * rollout.terminated.unsqueeze(1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=config.learning_rate, weight_decay=0.0)
    for u in range(config.num_iterations + 1):
        if u > 0:                                                       # at first the reference is the policy
            optimizer.zero_grad()
            loss, _ = grpo.grpo_loss(grpo.score_rows(policy, rollout, rows, config), advantages, mask,
                                     old_logps=updates[0], ref_logps=updates[0], **grpo.loss_options(config))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm or float("inf"))
            optimizer.step()
        updates.append(grpo.score_rollout(policy, rollout, config))     # (B, T)
        for fork in forks:
            probs = next_token_probs(policy, question, fork["prefix"], config.temperature)
            if u == 0:                                                  # words that are likely, not sampled
                words = {*fork["words"], *(probs > 0.01).nonzero()[:, 0].tolist()}
                fork["words"] = sorted(words, key=lambda token: -probs[token])
            fork["probabilities"].append(numbers(probs[fork["words"]]))

    names = names_of({token for ids in [*answers, *(fork["words"] for fork in forks)] for token in ids}, tokenizer)
    named = lambda ids: [names[token] for token in ids]
    methods = {}
    for name, options in METHODS.items():
        options = dict(policy_loss="clip", importance_sampling_level="token", epsilon_low=0.2,
                       max_completion_length=config.max_completion_length) | options
        weights = [pushes(logps, updates[0], advantages, mask, options) for logps in updates]
        methods[name] = {"options": options, "weights": [numbers(x) for x in weights]}
    rewards = grpo.combine_rewards(rollout.rewards_per_func, config.reward_weights)
    mean, std = grpo.group_stats(rewards, len(rewards))
    return {
        "prompt": tokenizer.decode(question, skip_special_tokens=True),
        "rewards": numbers(rewards), "mean": mean.item(), "std": std.item(), "advantages": numbers(advantages[:, 0]),
        "rewards_per_func": {f.__name__: numbers(x) for f, x in zip(reward_funcs, rollout.rewards_per_func.T)},
        "answers": [{"text": tokenizer.decode(ids, skip_special_tokens=True), "tokens": named(ids)} for ids in answers],
        "counts": mask.sum(1).tolist(), "entropies": numbers(entropies),
        "old_logps": numbers(updates[0]), "updates": [numbers(logps) for logps in updates], "methods": methods,
        "forks": [fork | {"prefix": named(fork["prefix"]), "words": named(fork["words"])} for fork in forks],
        "run": grpo.loss_options(config) | {"scale_rewards": config.scale_rewards}}


def main(argv):
    file, job = load(argv)
    data = group_data(*job)
    if file:
        Path(file).write_text(json.dumps(data, allow_nan=False) + "\n", encoding="utf-8")
        return
    rewards = data["rewards"]
    print(f"{len(rewards)} answers to {data['prompt']!r}" + ": a silent group, as all others" * (data["std"] == 0))
    for answer, reward in zip(data["answers"], rewards):
        print(f"  {answer['text']!r:.90}   reward {reward:.4g}")
    for i in dict.fromkeys([rewards.index(max(rewards)), rewards.index(min(rewards))]):
        answer = data["answers"][i]
        print(f"\nreward {rewards[i]:.4g}, A = {data['advantages'][i]:.4f}: {answer['text']!r}")
        print(f"{'token':>14}   log π   after one update")
        for token, before, after in zip(answer["tokens"], data["updates"][0][i], data["updates"][1][i]):
            print(f"{token!r:>14} {before:8.4f} {after:8.4f}")


if __name__ == "__main__":
    main(sys.argv[1:])
