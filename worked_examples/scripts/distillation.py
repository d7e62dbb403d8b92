"""On-policy distillation: a teacher's log-probs in place of rewards.

    python worked_examples/scripts/distillation.py

GRPO trains the tiny model: this is the teacher. The student is the model before GRPO. Each token of its answers has
A = log π_teacher - log π_student: it is pushed up if the teacher finds it likelier. No answer is scored. All that is
new against outcome supervision is compute_advantages. It takes about a minute on one core. The flags are grpo.py's.
"""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import grpo
from worked_examples import variants
from worked_examples.scripts.process_supervision import learn


def compute_advantages(rewards, rollout, config):
    """Line 9 of Algorithm 1 with a teacher, (B, T). The rewards are not used."""
    teacher_logps = grpo.score_rollout(teacher, rollout, config)                # (B, T)
    return variants.distillation_advantages(teacher_logps, rollout.sampler_logps, rollout.completion_mask)


if __name__ == "__main__":
    options, config, _ = grpo.parse_options(["--model", "tiny", *sys.argv[1:]])
    student, *job = grpo.load_job(options, config)
    teacher = copy.deepcopy(student)
    learn("GRPO, the teacher", teacher, *job, config, grpo.outcome_advantages)
    learn("distillation, the student", student, *job, config, compute_advantages)
