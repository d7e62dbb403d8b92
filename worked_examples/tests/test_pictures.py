"""Tests of look_at_a_group.py and of the pictures."""

import functools
import itertools
import json
import math
from types import SimpleNamespace

import matplotlib
import pytest
import torch
from conftest import by_row, command

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


def test_the_heat_map_has_page_01s_averages():
    """By hand: answer 1's token losses add up to -6.326841, answer 2's to 4.937715"""
    one, two = -6.326841, 4.937715
    wanted = {"−1.2654": one / 5, "+1.2344": two / 4, "sum of the 15: −1.3891": one + two,
              "grpo: −0.0103": (one / 5 + two / 4) / 3, "dapo: −0.0926": (one + two) / 15,
              "dr_grpo: −0.0772": (one + two) / (3 * 6)}
    for text, number in wanted.items():
        assert figures.signed(number, 4) == text.split(": ")[-1]
    assert wanted.keys() <= {text.get_text() for text in figures.three_averages().findobj(matplotlib.text.Text)}


def test_the_sawtooth_returns_to_0_and_its_lows_rise_while_the_policy_gets_better():
    right, losses = (line.get_ydata() for line in figures.sawtooth().findobj(matplotlib.lines.Line2D)
                     if len(line.get_ydata()) == 40)
    assert right[0] == 0.5 and right[-1] > 0.985 and all(a <= b for a, b in itertools.pairwise(right))
    lows = [min(losses[start:start + 4]) for start in range(0, 40, 4)]
    assert lows[0] == pytest.approx(-0.2) and lows[-1] == pytest.approx(-0.103, abs=5e-4) and lows == sorted(lows)
    assert losses[::4] == pytest.approx([0] * 10, abs=1e-12)


def test_under_grpo_wrong_answers_grow_by_page_04s_odds():
    """An update multiplies the odds of long to short by e^0.75 for the wrong ones, by e^-0.75 for the right ones"""
    for sign, lengths in zip((-1, 1), figures.mean_lengths("grpo").T):
        assert lengths == pytest.approx([2 + 6 / (1 + math.exp(-sign * 0.75 * k)) for k in range(5)])
    assert figures.mean_lengths("dapo") == pytest.approx(5)


def test_a_square_has_the_area_of_its_weight():
    squares = [square for axis in figures.token_weights().axes for square in axis.patches]
    areas = [square.get_width() * square.get_height() / 8 for square in squares]
    wanted = [[w_2] * 2 + [w_8] * 8 for w_2, w_8 in ((1 / 8, 1 / 32), (1 / 20, 1 / 20), (1 / 40, 1 / 40))]
    assert areas == pytest.approx(sum(wanted, []))


def test_the_fork_has_the_net_push_of_all_tokens():
    """Under dapo: each of four answers A over the number of all tokens; at the tokens in common the pushes cancel"""
    data, shared = figures.group()
    net = [line.get_ydata()[-1] for line in figures.fork().axes[0].lines]
    push = 4 * max(data["advantages"]) / sum(data["counts"]) * 1000
    assert net == pytest.approx([0, 0, push, push, -push, -push])
    assert all(answer["tokens"][:len(shared)] == shared for answer in data["answers"])


def test_what_page_07_says_of_sorted_letters():
    """Each run earns the reward that it is trained on; in_order is hacked: no letter in place, one token"""
    toy = figures.csv("toy_run.csv")
    place, order = (toy[toy["run"] == run] for run in ("in_place", "in_order"))
    assert (place["reward"] == place["in_place"]).all()
    assert place["reward"][-10:].mean() == pytest.approx(0.96, abs=5e-3)
    assert order["reward"][19:].min() > 0.98 and order["in_place"][-10:].mean() < 0.005 and order["length"][-1] < 1.1


def test_each_picture_can_be_drawn_and_is_committed_and_the_group_has_a_runs_pushes():
    """No picture more, none less; group.json has the probabilities of a whole run, ten_methods.csv METHODS' rows"""
    for draw in figures.DRAWINGS.values():
        assert draw().axes
    assert {path.stem for path in figures.PICTURES.glob("*.png")} == figures.DRAWINGS.keys()
    assert list(dict.fromkeys(figures.csv("ten_methods.csv")["method"])) == list(figures.METHODS)
    data, _ = figures.group()
    assert data["methods"]["dapo"]["options"].items() <= data["run"].items()            # row and updates agree
    assert [*data["methods"], *data["whole_run"]] == [*look_at_a_group.METHODS, "words", "probabilities"]
