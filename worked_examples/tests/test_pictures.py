"""Tests of look_at_a_group.py and of the pictures."""

import functools
import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import EXAMPLES, by_row, command

import grpo
from worked_examples.scripts import figures, look_at_a_group


@functools.cache
def small_group():
    """The numbers of a group with beginnings in common, whose ratios leave the clip range in four updates."""
    model = grpo.tiny_model(grpo.tiny_tokenizer(), 0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    config = grpo.GRPOConfig(num_iterations=4, max_completion_length=12, epsilon_high=0.28, learning_rate=1e-3,
                             temperature=0.2, seed=0)
    return look_at_a_group.group_data(model, grpo.tiny_tokenizer(), grpo.tiny_problems(0)[0], [by_row], config)


def sampled_after(data):
    """A beginning -> a token sampled after it -> the answers that have both."""
    after = {}
    for i, answer in enumerate(data["answers"]):
        for t, token in enumerate(answer["tokens"]):
            after.setdefault(tuple(answer["tokens"][:t]), {}).setdefault(token, []).append(i)
    return after


def test_a_push_is_the_ratio_times_the_advantage_over_the_denominator_or_clipped():
    """Before and after all updates, for grpo: an answer's tokens are divided by 8 times its length"""
    data, clipped = small_group(), set()
    for u, i in itertools.product((0, 4), range(8)):
        A, weights = data["advantages"][i], data["methods"]["grpo"]["weights"][u][i]
        for now, old, push in zip(data["updates"][u][i], data["old_logps"][i], weights):
            ratio = math.exp(now - old)
            out = ratio > 1.2 if A > 0 else ratio < 0.8
            assert push == pytest.approx(0 if out else ratio * A / (8 * len(weights)), rel=1e-4)
            clipped.add((A > 0, out))
    assert len(clipped) == 4                                            # pushed and clipped, up and down


def test_the_forks_are_where_answers_differ():
    """The strongest pull first; after each update the probabilities of the sampled tokens, and of other likely ones"""
    data = small_group()
    forks = {place: after for place, after in sampled_after(data).items() if len(after) > 1}
    pull = lambda place: sum(abs(sum(data["advantages"][i] for i in who)) for who in forks[place].values())
    assert [tuple(fork["prefix"]) for fork in data["forks"]] == sorted(forks, key=pull, reverse=True)
    for fork, u in itertools.product(data["forks"], range(5)):
        assert 1 - 0.01 * 18 < sum(fork["probabilities"][u]) < 1.00001
        for token, (i, *_) in forks[tuple(fork["prefix"])].items():
            probability = fork["probabilities"][u][fork["words"].index(token)]
            assert probability == pytest.approx(math.exp(data["updates"][u][i][len(fork["prefix"])]), rel=1e-3)


def test_tokens_that_share_a_text_are_told_apart():
    texts = SimpleNamespace(decode=lambda ids, **_: ["", "a", "a"][ids[0]])
    assert look_at_a_group.names_of([2, 1, 0], texts) == {0: "[0]", 1: "a", 2: "a[2]"}


def test_it_takes_the_flags_of_grpo_and_prints_or_writes(data, capsys):
    """Of a group in which all earn 0 it prints one answer token by token, of others two"""
    look_at_a_group.main(command(data))
    assert capsys.readouterr().out.count("\nreward ") == 2
    look_at_a_group.main(command(data, reward_funcs="think_format_reward"))
    out = capsys.readouterr().out
    assert out.count("\n  '") == 4 and out.count("\nreward 0, A = 0.0000: ") == 1 and "a silent group" in out
    look_at_a_group.main(["--json", f"{data}/group.json", *command(data)])
    held = json.loads((data / "group.json").read_text())
    assert len(held["updates"]) == 11 and held["old_logps"] == held["updates"][0]
    assert all(before != after for before, after in itertools.pairwise(held["updates"]))


def test_each_picture_can_be_drawn_and_is_committed_and_the_group_has_a_runs_pushes():
    """No picture more, none less; group.json has the probabilities of a whole run"""
    for draw in figures.DRAWINGS.values():
        assert draw().axes
    drawn = [f"{name}.png" for name in figures.DRAWINGS]
    pictures = sorted(path.name for path in (EXAMPLES / "pictures").glob("*.png"))
    assert sorted([*drawn, "toy_run.png"]) == pictures                  # page 7's, which plot_run.py has drawn
    data = json.loads((EXAMPLES / "pictures/group.json").read_text(encoding="utf-8"))
    assert data["methods"]["dapo"]["options"].items() <= data["run"].items()            # row and updates agree
    assert [*data["methods"], *data["whole_run"]] == [*look_at_a_group.METHODS, "words", "probabilities"]
