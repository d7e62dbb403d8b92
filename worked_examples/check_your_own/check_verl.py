"""grpo.py's names, each answered by verl's own code (verl==0.9.1), for check.py, which asks the laws of verl.

verl imports cachetools, fastapi and uvicorn without asking for them: install them, too.

    python worked_examples/check_your_own/check.py worked_examples/check_your_own/check_verl.py
"""
import types

import torch
from torch.nn.functional import pad
from verl.trainer.ppo import core_algos
from verl.utils.tensordict_utils import get_tensordict
from verl.utils.torch_functional import entropy_from_logits, get_response_mask, logprobs_from_logits
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

make_completion_mask, selective_log_softmax = get_response_mask, logprobs_from_logits
MODES = dict(grpo="seq-mean-token-mean", dr_grpo="seq-mean-token-sum-norm", dapo="token-mean", bnpo="token-mean")
LOSSES = {"clip token": "vanilla", "clip sequence": "gspo", "cispo token": "cispo", "sapo token": "sapo"}
METRICS = {"kl": "kl_loss", "clip_ratio/region_mean": "actor/pg_clipfrac"}
leave_one_out_advantages = lambda rewards, num_generations: outcome("rloo", rewards, num_generations)
gae_advantages = lambda r, V, m, *, gamma=1.0, lam=0.95: core_algos.compute_gae_advantage_return(r, V, m, gamma, lam)
kl_estimate = lambda logps, ref_logps, *, estimator="k3": core_algos.kl_penalty(logps, ref_logps, estimator)


def outcome(estimator, rewards, G, **options):
    inputs = rewards[:, None], torch.ones(len(rewards), 1), (torch.arange(len(rewards)) // G).numpy()
    return core_algos.get_adv_estimator_fn(estimator)(*inputs, **options)[0][:, 0]


def group_advantages(rewards, num_generations, *, scale_rewards="group", eps=1e-6):     # 1e-6: verl's default
    if scale_rewards == "batch":
        raise NotImplementedError
    return outcome("grpo", rewards, num_generations, epsilon=eps, norm_adv_by_std_in_grpo=scale_rewards == "group")


def per_token_logps(model, prompt_ids, prompt_mask, completion_ids, completion_mask, *, temperature=1.0):
    ids, mask = torch.cat([prompt_ids, completion_ids], 1), torch.cat([prompt_mask, completion_mask], 1)
    jagged = lambda x: torch.nested.nested_tensor([row[m == 1] for row, m in zip(x, mask)], layout=torch.jagged)
    batch = get_tensordict(dict(input_ids=jagged(ids), position_ids=jagged(mask.cumsum(1) - 1), prompts=prompt_ids,
                                responses=completion_ids, attention_mask=mask),
                           dict(temperature=temperature, use_remove_padding=False))
    engine = types.SimpleNamespace(use_ulysses_sp=False, pad_to_length=None)
    inputs, rest = FSDPEngineWithLMHead.prepare_model_inputs(engine, batch)
    output = FSDPEngineWithLMHead.prepare_model_outputs(engine, model(**inputs), rest, batch, None)
    return no_padding_2_padding(output["log_probs"], batch), None


def aggregate(loss, mask, *, loss_type, max_completion_length=None, num_items_in_batch=None, num_rows_in_batch=None):
    tokens = None if loss_type == "bnpo" else num_items_in_batch
    return core_algos.agg_loss(loss, mask, MODES[loss_type], 1, tokens, num_rows_in_batch, max_completion_length)


def grpo_loss(logps, advantages, mask, *, old_logps=None, ref_logps=None, beta=0.0, epsilon_low=0.2,
              epsilon_high=None, delta=None, loss_type="dapo", policy_loss="clip", importance_sampling_level="token",
              max_completion_length=None, num_items_in_batch=None, num_rows_in_batch=None):
    mode = LOSSES.get(f"{policy_loss} {importance_sampling_level}")
    if mode is None or loss_type == "bnpo" or mode == "sapo" and loss_type != "grpo":
        raise NotImplementedError
    high = epsilon_low if epsilon_high is None else epsilon_high - (mode == "cispo")     # there grpo.py has the cap
    config = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=epsilon_low,
                             clip_ratio_high=high, policy_loss=PolicyLossConfig(loss_mode=mode), use_kl_loss=beta > 0,
                             kl_loss_coef=beta, kl_loss_type="k3", loss_agg_mode=MODES[loss_type],
                             loss_scale_factor=max_completion_length, clip_ratio_c=delta or 3.0)
    old = (logps if old_logps is None else old_logps).detach()         # verl computes π_old and π_ref without gradients
    tensors = dict(prompts=torch.ones(len(logps), 1), responses=logps, attention_mask=pad(mask, (1, 0), value=1).long(),
                   response_mask=mask, old_log_probs=old, advantages=advantages.view(len(logps), -1).expand_as(logps))
    tensors |= {} if ref_logps is None else dict(ref_log_prob=ref_logps.detach())
    counts = dict(dp_size=1, batch_num_tokens=num_items_in_batch or mask.sum().item())
    counts["global_batch_size"] = num_rows_in_batch or len(mask)
    packed = lambda x: torch.cat([pad(row[m == 1], (0, 1)) for row, m in zip(x, mask)])
    loss, metrics = ppo_loss(config, {"log_probs": packed(logps)}, get_tensordict(tensors, counts))
    return loss, {name: metrics[key].aggregate() for name, key in METRICS.items() if key in metrics}
