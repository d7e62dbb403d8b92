"""Iterative GRPO, Algorithm 1 of DeepSeekMath whole: the reward model r_φ is learned too, from rankings.

    python worked_examples/iterative_grpo.py --seed 0

The policy's only reward is the score of r_φ, which begins as the policy's body under a new head, and learns from pairs
of answers to one question of which a judge (here the true accuracy) prefers one. An outer iteration is the paper's:
π_ref ← π_θ (sync_ref_model), M steps of GRPO, then r_φ learns from the pairs of these steps and, for a tenth of each
batch, from earlier ones. What train() does not do of this stands in the body of the for loop.

It prints how often r_φ ranks an iteration's pairs as the judge does, greedy answers before and after, and last "true
accuracy: A -> B" on held-out problems. One thread: three minutes. In seconds, for a look: --cold_start_steps 100
--max_steps 2 --iteration_steps 1 --first_batches 2 --updates 1.
"""

import argparse
import copy
import sys
from pathlib import Path

import numpy
import torch
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo


def bradley_terry_loss(chosen, rejected):
    """Teach a reward model to score the better answer of a pair higher: L = mean of -log σ(r_chosen - r_rejected).

    Source: Bradley and Terry 1952 (σ is the probability that it is preferred); Ouyang et al. (arXiv:2203.02155) eq. 1.
    Takes scores (N,) and (N,), returns a scalar: log 2 where all scores are equal.
    """
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


class RewardModel:
    """r_φ reads question and answer, and gives one number, at the last token. Called, it is a reward function."""
    __name__ = "reward_model"

    def __init__(self, policy, tokenizer, seed):
        torch.manual_seed(seed)
        shape = copy.deepcopy(policy.config)
        shape.num_labels = 1
        self.tokenizer = tokenizer
        self.model = AutoModelForSequenceClassification.from_config(shape).eval()
        self.model.base_model.load_state_dict(policy.base_model.state_dict())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.rng = numpy.random.default_rng([seed, 5])

    def score(self, texts):
        inputs = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        return self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]

    @torch.no_grad()
    def __call__(self, prompts, completions, **kwargs):
        return self.score([prompt + completion for prompt, completion in zip(prompts, completions)]).tolist()

    def learn(self, pairs, earlier, updates, size=64):
        """The last line: minimise the loss on new pairs, with a replay of 10% of earlier ones."""
        for _ in tqdm(range(updates if pairs and earlier else 0), "reward model", leave=False):
            batch = [pairs[i] for i in self.rng.integers(len(pairs), size=size - size // 10)]
            batch += [earlier[i] for i in self.rng.integers(len(earlier), size=size // 10)]
            better, worse = zip(*batch)
            chosen, rejected = self.score(better + worse).split(size)
            self.optimizer.zero_grad()
            bradley_terry_loss(chosen, rejected).backward()
            self.optimizer.step()


def ranked_pairs(rollout, G):
    """The judge: pair the right answers of each group with its wrong ones, (better, worse), question included."""
    right = grpo.accuracy_reward(rollout.completions, [row["solution"] for row in rollout.rows])
    texts = [row["prompt"] + completion for row, completion in zip(rollout.rows, rollout.completions)]
    pairs = []
    for start in range(0, len(texts), G):
        group = range(start, start + G)
        pairs += zip([texts[i] for i in group if right[i]], [texts[i] for i in group if not right[i]])
    return pairs


def main():
    parser = argparse.ArgumentParser()
    defaults = dict(seed=0, cold_start_steps=500, max_steps=60, iteration_steps=20, first_batches=60, updates=100)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    config = grpo.GRPOConfig(**grpo.TINY | dict(          # "batch": r_φ's noise in a group of like answers stays small
        scale_rewards="batch", beta=0.1, sync_ref_model=True, ref_model_sync_steps=options.iteration_steps,
        generation_batch_size=256, max_steps=options.max_steps, seed=options.seed))
    torch.set_num_threads(1)                              # for so small a model, more would wait
    tokenizer = grpo.tiny_tokenizer()
    policy = grpo.tiny_model(tokenizer, config.seed)
    problems, held_out = grpo.tiny_problems(config.seed)
    grpo.cold_start(policy, tokenizer, problems, config.seed, steps=options.cold_start_steps)
    print("before:")
    before = grpo.held_out_accuracy(policy, tokenizer, held_out)
    reward_model, earlier, pairs = RewardModel(policy, tokenizer, config.seed), [], []
    for step in range(config.max_steps, config.max_steps + options.first_batches):        # samples of no step to come
        batch = grpo.sample_batch(problems, config, step)
        earlier += ranked_pairs(grpo.sample_rollout(policy, tokenizer, batch, config, step), config.num_generations)
    reward_model.learn(earlier, earlier, 3 * options.updates)

    steps = grpo.train(policy, tokenizer, problems, [reward_model], config)
    for state, rollout, _ in tqdm(steps, "iterative GRPO", total=config.max_steps):
        pairs += ranked_pairs(rollout, config.num_generations)
        if state.step % config.ref_model_sync_steps == 0 and pairs:                       # an outer iteration ends
            better, worse = (torch.tensor(reward_model([""] * len(pairs), side)) for side in zip(*pairs))
            agree = (better > worse).sum().item()
            print(f"step {state.step}: r_φ ranks {agree} of {len(pairs)} new pairs as the judge does")
            reward_model.learn(pairs, earlier, options.updates)
            earlier, pairs = earlier + pairs, []
    print("after:")
    after = grpo.held_out_accuracy(policy, tokenizer, held_out)
    print(f"true accuracy: {before:.2f} -> {after:.2f}")


if __name__ == "__main__":
    main()
