"""grpo.py's names, each answered by TRL's own code (trl==1.16.0), for check.py, which asks the laws of TRL.

    python worked_examples/check_your_own/check.py worked_examples/check_your_own/check_trl.py
"""
import copy

import datasets
import grpo
import torch
import trl
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import add_fused_lm_head, entropy_from_logits, selective_log_softmax

ARGS = trl.GRPOConfig(output_dir=".", bf16=False, use_cpu=True, report_to="none", num_generations=2)
PROMPTS = datasets.Dataset.from_dict({"prompt": ["?"]})
WORDS = grpo.tiny_tokenizer()
MODEL = grpo.tiny_model(WORDS, 0).train()
TRAINER = trl.GRPOTrainer(MODEL, len, ARGS, PROMPTS, processing_class=WORDS)
for_texts = lambda reward: lambda texts, *columns: reward([[{"content": text}] for text in texts], *columns)
accuracy_reward, think_format_reward = map(for_texts, (trl.rewards.accuracy_reward, trl.rewards.think_format_reward))


def trainer(**settings):
    asked = copy.copy(TRAINER)
    asked.args, asked._metrics = copy.copy(TRAINER.args), copy.deepcopy(TRAINER._metrics)
    vars(asked.args).update(settings)
    vars(asked).update(settings)
    return asked


def group_advantages(rewards, num_generations, *, scale_rewards="group"):
    asked = trainer(num_generations=num_generations, scale_rewards=scale_rewards)
    ids, texts = [[1]] * len(rewards), ["."] * len(rewards)
    asked._generate = lambda prompts: (ids, ids, None, texts, None, {}, None, None)
    asked._calculate_rewards = lambda *args: rewards[:, None]
    return asked._generate_and_score_completions([{"prompt": "?"}] * len(rewards))["advantages"]


def make_completion_mask(completion_ids, eos_token_ids):
    MODEL.generate = lambda input_ids, **options: torch.cat([input_ids, completion_ids], 1)
    kept, _ = trainer(eos_token_ids=eos_token_ids)._generate_single_turn([[1]] * len(completion_ids), None, {}, 1)
    return torch.tensor([[int(t < len(row)) for t in range(completion_ids.size(1))] for row in kept])


def per_token_logps(model, prompt_ids, prompt_mask, answer_ids, mask, *, temperature=1.0, compute_entropy=False):
    add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"))
    inputs = torch.cat([prompt_ids, answer_ids], 1), torch.cat([prompt_mask, mask], 1), answer_ids.size(1)
    return trainer()._get_per_token_logps_and_entropies(model, *inputs, compute_entropy=compute_entropy)[:2]


def top_entropy_mask(entropies, completion_mask, quantile):
    return trainer().get_high_entropy_mask(entropies, completion_mask, 1 - quantile)


def aggregate(per_token_loss, mask, **options):                         # at ratio 1 a token's loss is -A
    return grpo_loss(torch.zeros_like(per_token_loss), -per_token_loss, mask, **options)[0]


def grpo_loss(logps, advantages, mask, *, old_logps=None, ref_logps=None, policy_loss="clip", loss_type="dapo",
              num_items_in_batch=None, num_rows_in_batch=None, use_bias_correction_kl=False, **settings):
    if loss_type != dict(clip=loss_type, cispo="dapo", sapo="grpo")[policy_loss]:
        raise NotImplementedError
    ids, steps = torch.ones_like(mask), (num_rows_in_batch or len(logps)) / len(logps)                # of accumulation
    settings = {name: value for name, value in settings.items() if value is not None}
    asked = trainer(**settings, loss_type=loss_type if policy_loss == "clip" else policy_loss,
                    steps_per_generation=steps, current_gradient_accumulation_steps=steps,
                    use_bias_correction_kl=use_bias_correction_kl)
    asked._get_per_token_logps_and_entropies = lambda *args, **options: (logps, torch.zeros(1, 1), None)
    constant = lambda x: x if x is None else x.detach()                # TRL computes π_old and π_ref without gradients
    inputs = dict(prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=mask, advantages=advantages,
                  old_per_token_logps=constant(old_logps), ref_per_token_logps=constant(ref_logps),
                  num_items_in_batch=torch.as_tensor(num_items_in_batch or mask.sum()))
    loss = asked._compute_loss(MODEL, inputs)
    metrics = {name: values[-1] for name, values in asked._metrics["train"].items() if name == "kl" or "clip" in name}
    return loss, {name.replace("cispo_clip_ratio", "clip_ratio/high_mean"): x for name, x in metrics.items()}
