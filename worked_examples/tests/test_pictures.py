"""Tests of look_at_a_group.py, of the pictures, and, where Chromium is, of the page in a browser."""

import functools
import html
import itertools
import json
import math
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from conftest import EXAMPLES, by_row, command

import grpo
from worked_examples.scripts import figures, look_at_a_group


@functools.cache
def small_group():
    """The page's numbers of a group with beginnings in common, whose ratios leave the clip range in four updates."""
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


def test_the_forks_of_the_page_are_where_answers_differ():
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


def test_tokens_that_share_a_text_are_told_apart_and_none_ends_the_script():
    texts = SimpleNamespace(decode=lambda ids, **_: ["", "a", "a"][ids[0]])
    assert look_at_a_group.names_of([2, 1, 0], texts) == {0: "[0]", 1: "a", 2: "a[2]"}
    assert look_at_a_group.page({"prompt": "</script>"}).count("</script>") == 2        # those of the template


def test_it_takes_the_flags_of_grpo_and_prints_or_writes(data, capsys):
    """Of a group in which all earn 0 it prints one answer token by token, of others two"""
    look_at_a_group.main(command(data))
    assert capsys.readouterr().out.count("\nreward ") == 2
    look_at_a_group.main(command(data, reward_funcs="think_format_reward"))
    out = capsys.readouterr().out
    assert out.count("\n  '") == 4 and out.count("\nreward 0, A = 0.0000: ") == 1 and "a silent group" in out
    look_at_a_group.main(["--html", f"{data}/group.html", *command(data)])
    held = look_at_a_group.data_in((data / "group.html").read_text())
    assert len(held["updates"]) == 11 and held["old_logps"] == held["updates"][0]
    assert all(before != after for before, after in itertools.pairwise(held["updates"]))


IN_THE_PAGE = """<script>
  const found = CASES.map(([u, name, view]) => {
    $("update").value = u;
    $("update").oninput();
    for (const choice of [`[name=method][value=${name}]`, `[name=view][value=${view}]`])
      document.querySelector(choice).click();
    return cells.map(({node, button}) => [answers[node.who[0]].tokens.slice(0, node.t), node.token,
      +button.ariaLabel.split(" ").at(-1).replace("−", "-"),
      getComputedStyle(button.firstChild).backgroundImage !== "none"]);
  });
  cells[2].button.click();
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
  const chosen = cells.map(({button}) => button.ariaPressed + button.tabIndex);
  document.body.textContent = JSON.stringify([found, chosen]);
</script>"""


def test_the_page_shows_updates_methods_and_both_views_in_a_browser(tmp_path):
    """Own pushes W, net ones W - π·ΣW', hatched where the clip makes all own ones 0; a click and an arrow choose"""
    chromium = shutil.which("chromium")
    if chromium is None or chromium.startswith("/snap"):                # a snap does not see tmp_path
        pytest.skip("no chromium")
    data, path = small_group(), tmp_path / "group.html"
    cases = [*itertools.product((4, 1), data["methods"], ("logit", "loss"))]
    path.write_text(look_at_a_group.page(data) + IN_THE_PAGE.replace("CASES", json.dumps(cases)), encoding="utf-8")
    flags = f"--headless --no-sandbox --window-size=1200,1400 --user-data-dir={tmp_path}/profile --dump-dom".split()
    dom = subprocess.run([chromium, *flags, path.as_uri()], capture_output=True, text=True, timeout=300).stdout
    found, chosen = json.loads(html.unescape(re.search("<body>(.*)</body>", dom, re.S)[1]))
    after = sampled_after(data)
    for (u, name, view), cells in zip(cases, found):
        options, weights = data["methods"][name]["options"], data["methods"][name]["weights"][u]
        assert len(cells) == sum(map(len, after.values()))
        for beginning, token, push, hatched in cells:
            t, tokens = len(beginning), after[tuple(beginning)]
            own = {other: [weights[i][t] for i in who] for other, who in tokens.items()}
            want = sum(own[token])
            if view == "logit":
                want -= math.exp(data["updates"][u][tokens[token][0]][t]) * sum(map(sum, own.values()))
            assert push == pytest.approx(1000 * want, abs=0.051)
            clipped = not any(own[token]) and all(data["advantages"][i] for i in tokens[token])
            assert hatched == (options["policy_loss"] == "clip" and clipped)
    assert chosen == [*["false-1"] * 3, "true0", *["false-1"] * (len(chosen) - 4)]


def test_each_picture_can_be_drawn_and_is_committed_and_the_page_is_that_of_the_template():
    """No picture more, none less; the page has 400 KB at most and no address"""
    for draw in figures.DRAWINGS.values():
        assert draw().axes
    drawn = [f"{name}.png" for name in figures.DRAWINGS]
    pictures = sorted(path.name for path in (EXAMPLES / "pictures").glob("*.png"))
    assert sorted([*drawn, "toy_run.png"]) == pictures                  # page 7's, which plot_run.py has drawn
    page = (EXAMPLES / "pictures/group.html").read_text(encoding="utf-8")
    data = look_at_a_group.data_in(page)
    assert data["methods"]["dapo"]["options"].items() <= data["run"].items()            # row and updates agree
    assert page == look_at_a_group.page(data) and len(page.encode()) <= 400_000 and "://" not in page
