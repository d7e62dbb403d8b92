"""Tests of look_at_a_group.py, of the pictures, and, where selenium and Chromium are, of the page in a browser."""

import functools
import itertools
import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import EXAMPLES, cold_started

import grpo
from worked_examples.scripts import figures, look_at_a_group


def digits(completions, **columns):
    return [sum(map(int, re.findall(r"\d", text))) % 5 / 2 for text in completions]


@functools.cache
def small_group():
    """A group of a small model that shares beginnings, and whose ratios leave the clip range in four updates."""
    tokenizer, (problems, _) = grpo.tiny_tokenizer(), grpo.tiny_problems(0)
    config = grpo.GRPOConfig(num_iterations=4, max_completion_length=12, epsilon_high=0.28, learning_rate=1e-3,
                             temperature=1.5)
    model = grpo.tiny_model(tokenizer, 0)
    model.load_state_dict(cold_started(0))
    seen = look_at_a_group.update_on_one_group(model, tokenizer, problems, [digits], lambda rollout: True, config)
    return model, seen, look_at_a_group.group_data(seen)


def sampled_after(data):
    """A beginning -> a token sampled after it -> the answers that have both."""
    after = {}
    for i, answer in enumerate(data["answers"]):
        for t, token in enumerate(answer["tokens"]):
            after.setdefault(tuple(answer["tokens"][:t]), {}).setdefault(token, []).append(i)
    return after


def pushes(data, name, u):
    """The contract's arithmetic: (beginning, token) -> W in the loss, W - π·ΣW' on the logit."""
    weights, found = data["methods"][name]["weights"][u], {}
    for place, after in sampled_after(data).items():
        W = {token: sum(weights[i][len(place)] for i in who) for token, who in after.items()}
        for token, (i, *_) in after.items():
            found[place, token] = W[token], W[token] - math.exp(data["updates"][u][i][len(place)]) * sum(W.values())
    return found


def test_the_net_pushes_are_the_gradient_of_the_loss_at_the_logits():
    """For each method, after all updates: minus the gradient with respect to the logit of each sampled token"""
    model, seen, data = small_group()
    ids, old_logps = seen.rollout.completion_ids, seen.updates[0].double()
    beginnings = [[tuple(row[:t]) for t in range(len(row))] for row in ids.tolist()]
    places = sorted({*itertools.chain(*beginnings)})
    index = torch.tensor([[places.index(place) for place in row] for row in beginnings])
    assert len(places) < ids.numel() - 2 and len(data["forks"]) > 2     # the answers agree, and differ
    probs = [look_at_a_group.next_token_probs(model, seen.rollout, place, seen.config) for place in places]
    for name, method in data["methods"].items():
        logits = torch.stack(probs).log().double().requires_grad_()
        loss, _ = grpo.grpo_loss(grpo.selective_log_softmax(logits[index], ids), seen.advantages.double(),
                                 seen.rollout.completion_mask, old_logps=old_logps, **method["options"])
        gradient, = torch.autograd.grad(loss, logits)
        for (place, token), (_, push) in pushes(data, name, 4).items():
            *place, token = seen.tokenizer.convert_tokens_to_ids([*place, token])
            assert push == pytest.approx(-gradient[places.index(tuple(place)), token].item(), abs=2e-7)


def test_the_forks_of_the_page_are_where_answers_differ():
    """The strongest pull first; a fork's probabilities are those of the sampled tokens there, after each update"""
    *_, data = small_group()
    forks = {place: after for place, after in sampled_after(data).items() if len(after) > 1}
    pull = lambda place: sum(abs(sum(data["advantages"][i] for i in who)) for who in forks[place].values())
    assert [tuple(fork["prefix"]) for fork in data["forks"]] == sorted(forks, key=pull, reverse=True)
    for fork, u in itertools.product(data["forks"], range(5)):
        for token, (i, *_) in forks[tuple(fork["prefix"])].items():
            probability = fork["probabilities"][u][fork["words"].index(token)]
            assert probability == pytest.approx(math.exp(data["updates"][u][i][len(fork["prefix"])]), rel=1e-3)


def test_a_token_without_a_text_is_shown_by_its_name():
    """Tokens that share a text are told apart on the page, and an answer does not end its script"""
    _, seen, _ = small_group()
    texts = SimpleNamespace(decode=lambda ids, **_: ["", "\ufffd", "</script>"][min(ids[0], 2)],
                            convert_ids_to_tokens=lambda token: f"byte {token}")
    assert [look_at_a_group.word(token, texts) for token in range(3)] == ["byte 0", "byte 1", "</script>"]
    data = look_at_a_group.group_data(SimpleNamespace(**vars(seen) | {"tokenizer": texts}))
    assert len(sampled_after(data)) == len({tuple(ids[:t]) for ids in seen.answers for t in range(len(ids))})
    assert look_at_a_group.page(data).count("</script>") == 2           # those of the template


def test_it_takes_the_flags_of_grpo_and_prints_or_writes(tmp_path, capsys, monkeypatch):
    model, seen, _ = small_group()
    (tmp_path / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in grpo.tiny_problems(0)[0][:6]))
    (tmp_path / "mine.py").write_text("def digits(completions, **k):\n    return [len(c) % 3 for c in completions]")
    monkeypatch.setattr(grpo, "load_model", lambda name, seed: (model, seen.tokenizer))
    flags = [*f"--model any --dataset {tmp_path}/sums.jsonl --reward_funcs {tmp_path}/mine.py:digits".split(),
             *"--max_completion_length 8 --num_generations 4 --generation_batch_size 4 --beta 0.1".split()]
    look_at_a_group.main(flags)
    assert capsys.readouterr().out.count("\nreward ") == 2
    look_at_a_group.main(["--html", str(tmp_path / "group.html"), *flags])
    held = json.loads(re.search(r'id="group">(.*)</script>', (tmp_path / "group.html").read_text())[1])
    assert len(held["updates"]) == 11 and held["old_logps"] == held["updates"][0] != held["updates"][10]


def test_the_page_shows_updates_methods_and_both_views_in_a_browser(tmp_path):
    """The push of each token, and hatched those whose own push the clip makes 0; a click and an arrow choose a token"""
    webdriver, paths = pytest.importorskip("selenium.webdriver"), [*map(shutil.which, ("chromium", "chromedriver"))]
    if None in paths:
        pytest.skip("no chromium, or no chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in "headless", "no-sandbox", "disable-background-networking", f"user-data-dir={tmp_path}/profile":
        options.add_argument(f"--{flag}")
    *_, data = small_group()
    after = sampled_after(data)
    (tmp_path / "group.html").write_text(look_at_a_group.page(data), encoding="utf-8")
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(paths[1])) as browser:
        find = functools.partial(browser.find_elements, "css selector")
        browser.set_window_size(1200, 1400)
        browser.get((tmp_path / "group.html").as_uri())
        for u, (name, method), view in itertools.product((4, 1), data["methods"].items(), ("logit", "loss")):
            find("#update")[0].send_keys("\ue011" + u * "\ue014")       # Home, then right arrows
            find(f"[name=method][value={name}]")[0].click()
            find(f"[name=view][value={view}]")[0].click()
            expected, cells = pushes(data, name, u), browser.execute_script("""
                return cells.map(({node, button}) => [answers[node.who[0]].tokens.slice(0, node.t), node.token,
                    +button.ariaLabel.split(" ").at(-1).replace("−", "-"),
                    getComputedStyle(button.firstChild).backgroundImage !== "none"])""")
            assert {(tuple(place), token) for place, token, *_ in cells} == expected.keys()
            for place, token, push, hatched in cells:
                assert push == pytest.approx(1000 * expected[tuple(place), token][view == "logit"], abs=0.051)
                own = [method["weights"][u][i][len(place)] for i in after[tuple(place)][token] if data["advantages"][i]]
                assert hatched == (method["options"]["policy_loss"] == "clip" and not any(own))
        find(".cell")[0].click()
        browser.switch_to.active_element.send_keys("\ue014")            # the right arrow
        assert find(".cell[aria-pressed=true]") == find(".cell[tabindex='0']") == [find(".cell")[1]]
        assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
        assert browser.get_log("browser") == []


def test_the_committed_pictures_and_page_are_those_of_the_code(monkeypatch):
    """No picture more, none less; the page has the template of today, 400 KB at most and no address"""
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, name: (drawn.append(name), figures.plt.close(figure)))
    figures.draw_all()
    pictures = sorted(path.name for path in (EXAMPLES / "pictures").glob("*.png"))
    assert sorted([*drawn, "toy_run.png"]) == pictures                  # page 7's, which plot_run.py has drawn
    page, data = (EXAMPLES / "pictures/group.html").read_text(encoding="utf-8"), figures.group_of_the_page()
    assert data["methods"]["dapo"]["options"].items() <= data["run"].items()            # row and updates agree
    assert page == look_at_a_group.page(data) and len(page.encode()) <= 400_000 and "://" not in page
