"""The job of a grpo.py command line, run by TRL's GRPOTrainer (trl==1.16.0): from here on to several GPUs.

    python worked_examples/scripts/the_same_run_in_trl.py --model tiny
    python worked_examples/scripts/the_same_run_in_trl.py --model tiny --max_steps 3 --compare

The flags are grpo.py's; those behind --trl are TRL's own, and win (--trl --resume_from_checkpoint FOLDER, too). With
--compare, TRL learns from the completions of grpo.train; the figures of both are printed, and the exit code is 1 where
they differ by more than 1e-5 (if a figure is above 1, of its size).
"""
import copy
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

import datasets
import torch
import trl
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo


def make_trainer(policy, tokenizer, dataset, reward_funcs, config, flags, rollout_func=None, **changes):
    """grpo.py's options are TRL's, under the same names, except for those named here.

    TRL splits the answers of a step into mini-batches once for all its passes and, with dapo and cispo, divides each
    part by the mean number of tokens of a part. Its step size changes with each update, grpo.py's with each step.
    """
    words, loss_type = dict(vars(config)), config.loss_type
    policy_loss, k = words.pop("policy_loss"), words.pop("num_mini_batches")
    assert config.generation_batch_size % k == 0, "num_mini_batches: TRL's parts are equal"
    assert policy_loss == "clip" or (policy_loss, loss_type) in [("cispo", "dapo"), ("sapo", "grpo")], "not in TRL"
    part = config.generation_batch_size // k // int(os.environ.get("WORLD_SIZE", 1))    # processes, as accelerate says
    rows = math.gcd(part, config.per_device_train_batch_size)
    words |= dict(per_device_train_batch_size=rows, gradient_accumulation_steps=part // rows,
                  loss_type=loss_type if policy_loss == "clip" else policy_loss, ref_model_mixup_alpha=1.0)
    if (policy_loss, config.epsilon_high) == ("cispo", None):
        words["epsilon_high"] = 5.0
    for name in ("max_steps", "ref_model_sync_steps", "save_steps"):
        words[name] *= config.num_iterations * k                # TRL counts updates
    parser = trl.TrlParser(trl.GRPOConfig, allow_abbrev=False)
    parser.set_defaults(**words, logging_steps=1, save_total_limit=1, report_to="none", disable_dropout=True, **changes)
    (args,) = parser.parse_args_into_dataclasses(flags, look_for_args_file=False)
    dataset = datasets.Dataset.from_list(dataset * (1 + args.generation_batch_size // len(dataset)))  # fills a batch
    return trl.GRPOTrainer(policy, reward_funcs, args, dataset, processing_class=tokenizer, rollout_func=rollout_func)


def compare(policy, tokenizer, dataset, reward_funcs, config, flags):
    """Take the steps of grpo.train, then TRL's on the same prompts and completions."""
    assert config.num_mini_batches == 1, "num_mini_batches: allowed with --compare is 1, TRL draws other parts"
    steps = list(grpo.train(copy.deepcopy(policy), tokenizer, dataset, reward_funcs, config))
    rollouts, difference = [rollout for _, rollout, _ in steps], 0.0
    prompts = [row for rollout in rollouts for row in rollout.examples[:: config.num_generations]]

    def rollout_func(prompts, trainer):
        r = rollouts.pop(0)
        return {"prompt_ids": [ids[m == 1].tolist() for ids, m in zip(r.prompt_ids, r.prompt_mask)], "logprobs": None,
                "completion_ids": [ids[m == 1].tolist() for ids, m in zip(r.completion_ids, r.completion_mask)]}

    trainer = make_trainer(policy, tokenizer, prompts, reward_funcs, config, flags, rollout_func, shuffle_dataset=False)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(   # grpo.py's step size, instead of TRL's
        trainer.create_optimizer(),
        lambda update: 1 - update // config.num_iterations / config.max_steps)
    trainer.train()
    for _, _, ours in steps:
        updates = [trainer.state.log_history.pop(0) for _ in range(config.num_iterations)]
        for name in ("reward", "loss", "grad_norm"):            # with several updates, their means
            theirs = statistics.mean(update[name] for update in updates if name in update)
            print(f"step {ours['step']}  {name:10} grpo.py {ours[name]:12.8f}   TRL {theirs:12.8f}")
            difference = max(difference, abs(ours[name] - theirs) / max(1, abs(theirs)))
    print(f"greatest difference: {difference:.1e}")
    sys.exit(difference > 1e-5)


if __name__ == "__main__":
    end = sys.argv.index("--trl") if "--trl" in sys.argv else len(sys.argv)
    words = [word for word in sys.argv[1:end] if word != "--compare"]
    options, config, _ = grpo.parse_options(["--output_dir", "trl-output", *words])
    flags = ["--output_dir", options.output_dir, *sys.argv[end + 1:]]
    policy, tokenizer, dataset, reward_funcs, held_out = grpo.load_job(options, config)
    if options.model == "tiny":
        policy.config.name_or_path = tempfile.mkdtemp()         # from where TRL takes its reference model
        policy.save_pretrained(policy.config.name_or_path)
    if "--compare" in sys.argv:
        compare(policy, tokenizer, dataset, reward_funcs, config, flags)
    trainer = make_trainer(policy, tokenizer, dataset, reward_funcs, config, flags)
    if held_out:                                                # by now the policy is on the trainer's device
        before = grpo.evaluate(policy.eval(), tokenizer, held_out, reward_funcs, config)
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    if held_out:
        after = grpo.evaluate(policy.eval(), tokenizer, held_out, reward_funcs, config)
        for name in reversed(after):                            # the first reward function last
            print(f"held-out {name}: {before[name]:.2f} -> {after[name]:.2f} (greedy, {len(held_out)} problems)")
