"""What holds on a GPU, and cannot be seen on a CPU: a recorded step, the same numbers, the same bits if asked for."""

import subprocess
import sys

import numpy
import pytest
import torch
from conftest import HAS_GPU, assert_same_run, by_row, command, lines_of, make_model, steps_of

import grpo

pytestmark = pytest.mark.skipif(not HAS_GPU, reason="no GPU here")


def run(words):
    """A command line in a process of its own."""
    subprocess.run([sys.executable, grpo.__file__, *words], check=True)


@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2", "GPTNeoX", "Phi", "Mixtral"])
def test_a_recorded_step_gives_the_tokens_of_the_plain_one(kind, monkeypatch):
    """Greedy and drawn; a mixture of experts may read the CPU in a step, which then runs as it is."""
    model = make_model(kind).cuda()
    ids = torch.randint(2, 20, (3, 6), generator=torch.Generator().manual_seed(0)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    drawn = torch.tensor(numpy.random.default_rng(0).random((12, 20))).cuda()
    record, replays = grpo.record_on_gpu, []

    def note(function, *inputs):
        replays.append((function, record(function, *inputs)))
        return replays[-1][1]

    for uniforms in (drawn, None):
        sample = lambda: grpo.generate(model, ids, mask, max_completion_length=20, eos_token_ids=[1, 5],
                                       num_generations=4, uniforms=uniforms)
        with monkeypatch.context() as patch:
            patch.setattr(grpo, "record_on_gpu", note)
            got = sample()
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "_can_compile_fullgraph", False)
            want = sample()
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        torch.testing.assert_close(got[2], want[2], atol=1e-5, rtol=0)
    assert kind == "Mixtral" or replays and all(replay is not function for function, replay in replays)


CONFIGURATIONS = [
    ("Llama", dict()), ("GPT2", dict()),
    ("Qwen2", dict(beta=0.1, num_iterations=2, sync_ref_model=True, ref_model_sync_steps=1,
                   mask_truncated_completions=True)),
    ("Llama", dict(loss_type="grpo", importance_sampling_level="sequence", delta=2.0, scale_rewards="batch",
                   num_iterations=2)),
    ("GPT2", dict(loss_type="dr_grpo", policy_loss="cispo", epsilon_high=5.0, num_iterations=2)),
    ("Llama", dict(policy_loss="sapo", loss_type="grpo", beta=0.05))]


@pytest.mark.parametrize("kind, options", CONFIGURATIONS, ids=str)
def test_a_gpu_learns_as_a_cpu_does(kind, options):
    """The metrics of two steps, prompts of two lengths, parts of three rows"""
    options = dict(per_device_train_batch_size=3, max_steps=2) | options
    on_cpu, on_gpu = ([metrics for *_, metrics in steps_of(
        make_model(kind).to(device), [by_row, grpo.think_format_reward], **options)] for device in ("cpu", "cuda"))
    times = {"step_time": 0, "reward_time": 0}
    for ours, theirs in zip(on_gpu, on_cpu, strict=True):
        assert ours | times == pytest.approx(theirs | times, abs=1e-5, rel=1e-4)


def test_whole_again_and_killed_and_resumed_a_run_has_the_same_bits_with_full_determinism(data):
    """The third call of a reward function kills the run."""
    words = dict(full_determinism=True, save_steps=1, beta=0.1, num_iterations=2, max_steps=3)
    for name in ("whole", "again"):
        run(command(data, **words, output_dir=data / name))
    with open(data / "rewards.py", "a") as file:
        file.write("import os, signal\ncalls, plain = [], length\n"
                   "def length(**columns):\n"
                   "    calls.append(1)\n"
                   "    return os.kill(os.getpid(), signal.SIGKILL) if len(calls) == 3 else plain(**columns)\n")
    with pytest.raises(subprocess.CalledProcessError):
        run(command(data, **words, output_dir=data / "killed"))
    run(command(data, **words, output_dir=data / "resumed", resume_from_checkpoint=data / "killed"))
    assert_same_run(data / "whole", data / "again")
    assert_same_run(data / "whole", data / "resumed")


def test_a_gpu_samples_in_bfloat16_nearly_as_it_scores(data):
    """On the command line; in float32 a run itself ends where they differ"""
    run(command(data, bf16=True, beta=0.1, num_iterations=2))
    for line in lines_of(data / "out"):
        assert line["grad_norm"] > 0 and line["sampling/sampling_logp_difference/mean"] < 0.1
