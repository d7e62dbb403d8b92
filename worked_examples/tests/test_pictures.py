"""Tests of explain.py, of its page in a browser, and of the pictures.

    python -m pytest -q worked_examples/tests/test_pictures.py

The tests in a browser need selenium, Chromium and its driver, and are skipped without them.
"""

import functools
import itertools
import json
import math
import re
import shutil
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(EXAMPLES.parent), str(EXAMPLES)]
import explain
import figures
import grpo

CONFIG = dict(num_generations=6, generation_batch_size=6, per_device_train_batch_size=4, num_iterations=4,
              max_completion_length=12, learning_rate=1e-3, lr_scheduler_type="constant")


# A small model's group ------------------------------------------------------------------------------------------------

@functools.cache
def small_group():
    """A group of a small model that shares beginnings, and whose ratios leave the clip range in four updates."""
    tokenizer, (problems, _) = grpo.tiny_tokenizer(), grpo.tiny_problems(0)
    model, config = grpo.tiny_model(tokenizer, 0), grpo.GRPOConfig(**CONFIG)
    grpo.cold_start(model, tokenizer, problems, 0, steps=60)
    seen = explain.update_on_one_group(model, tokenizer, problems, [digits_reward], config)
    return model, seen, tokenizer, config


def digits_reward(completions, **kwargs):
    return [sum(map(int, re.findall(r"\d", text))) % 5 / 2 for text in completions]


@functools.cache
def small_data():
    _, seen, tokenizer, config = small_group()
    return explain.group_data(seen, tokenizer, config)


def net_pushes(data, name, u):
    """The contract's arithmetic on lists: of a beginning and a token W, and W - π·ΣW of all tokens after it."""
    W, probability = {}, {}
    for answer, weights, logps in zip(data["answers"], data["methods"][name]["weights"][u], data["updates"][u]):
        for t, token in enumerate(answer["tokens"]):
            place = tuple(answer["tokens"][:t])
            W.setdefault(place, {}).setdefault(token, 0.0)
            W[place][token] += weights[t]
            probability[place, token] = math.exp(logps[t])
    return {(place, token): (w, w - probability[place, token] * sum(after.values()))
            for place, after in W.items() for token, w in after.items()}


def test_the_net_pushes_are_the_gradient_of_the_loss_at_the_logits():
    """What a bar shows is -∂loss/∂logit, summed over the answers with the same beginning, for each method."""
    model, seen, tokenizer, config = small_group()
    data, rollout = small_data(), seen.rollout
    ids, mask = (torch.cat(x, 1) for x in ((rollout.prompt_ids, rollout.completion_ids),
                                           (rollout.prompt_mask, rollout.completion_mask)))
    T = rollout.completion_ids.size(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():                                               # the model after the last update
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -T - 1:-1].double()
    old_logps, last = seen.updates[0].double(), config.num_iterations
    shared = set()
    for name, method in data["methods"].items():
        leaf = logits.clone().requires_grad_()
        loss, _ = grpo.grpo_loss(grpo.selective_log_softmax(leaf, rollout.completion_ids), seen.advantages.double(),
                                 rollout.completion_mask, old_logps=old_logps, **method["options"])
        gradient, = torch.autograd.grad(loss, leaf)
        by_place = {}
        for i, answer in enumerate(data["answers"]):
            for t in range(len(answer["tokens"])):
                place = tuple(answer["tokens"][:t])
                if place in by_place:
                    shared.add(place)
                by_place[place] = by_place.get(place, 0) - gradient[i, t]
        for (place, token), (_, push) in net_pushes(data, name, last).items():
            assert push == pytest.approx(by_place[place][tokenizer.convert_tokens_to_ids(token)].item(), abs=2e-7)
    assert len(shared) > 2 and len(data["forks"]) > 2                   # the answers agree, and part


def test_the_weights_of_the_page_are_the_gradients_in_closed_form():
    data = small_data()
    lengths = [len(row) for row in data["old_logps"]]
    assert data["updates"][0] == data["old_logps"] and len(data["updates"]) == 5
    clipped_once = set()
    for u, i, (name, method) in itertools.product(range(5), range(6), data["methods"].items()):
        o, A = method["options"], data["advantages"][i]
        ratios = [math.exp(new - old) for new, old in zip(data["updates"][u][i], data["old_logps"][i])]
        ratios = [statistics.geometric_mean(ratios)] * lengths[i] if name == "gspo" else ratios
        divisor = dict(grpo=6 * lengths[i], dapo=sum(lengths), dr_grpo=6 * 12)[o["loss_type"]]
        for ratio, weight in zip(ratios, method["weights"][u][i]):
            clipped = ratio > 1 + o["epsilon_high"] if A > 0 else ratio < 1 - o["epsilon_low"]
            gate = 1 / (1 + math.exp((1.0 if A > 0 else 1.05) * (1 - ratio)))
            slopes = dict(cispo=min(ratio, 5.0), sapo=4 * gate * (1 - gate) * ratio)
            assert weight == pytest.approx(slopes.get(name, 0.0 if clipped else ratio) * A / divisor, rel=1e-5)
            if clipped and o["policy_loss"] == "clip":
                clipped_once.add(name)
    assert clipped_once == {"grpo", "dapo", "dr_grpo", "gspo"}
    mean, std = statistics.mean(data["rewards"]), statistics.stdev(data["rewards"])
    assert data["mean"] == pytest.approx(mean, rel=1e-5) and data["std"] == pytest.approx(std, rel=1e-5)
    assert data["advantages"] == pytest.approx([(r - mean) / (std + 1e-4) for r in data["rewards"]], rel=1e-5)


def test_the_forks_of_the_page_are_where_answers_part():
    """A fork's probabilities are those of the sampled tokens there, after each update; the first one is pushed most."""
    data = small_data()
    after = {}
    for i, answer in enumerate(data["answers"]):
        for t, token in enumerate(answer["tokens"]):
            after.setdefault(tuple(answer["tokens"][:t]), {}).setdefault(token, []).append((i, t))
    forks = {tuple(fork["prefix"]): fork for fork in data["forks"]}
    assert forks.keys() == {place for place, tokens in after.items() if len(tokens) > 1}
    for place, fork in forks.items():
        assert set(after[place]) <= set(fork["words"]) and len(fork["probabilities"]) == 5
        assert all(sum(row) <= 1 + 1e-5 for row in fork["probabilities"])
        for (token, ((i, t), *_)), u in itertools.product(after[place].items(), range(5)):
            probability = fork["probabilities"][u][fork["words"].index(token)]
            assert probability == pytest.approx(math.exp(data["updates"][u][i][t]), rel=1e-3)
    pull = lambda place: sum(abs(sum(data["advantages"][i] for i, _ in who)) for who in after[place].values())
    pulls = [pull(tuple(fork["prefix"])) for fork in data["forks"]]
    assert pulls == pytest.approx(sorted(pulls, reverse=True))


def test_tokens_with_one_text_stay_apart_on_the_page():
    """Parts of a character decode to the same text; the tree must not take them for the same token."""
    _, seen, tokenizer, config = small_group()
    blind = SimpleNamespace(decode=lambda ids, **kwargs: "?" if len(ids) == 1 else tokenizer.decode(ids, **kwargs))
    names = [answer["tokens"] for answer in explain.group_data(seen, blind, config)["answers"]]
    for a, b in itertools.combinations(range(6), 2):
        assert (names[a] == names[b]) == (seen.answers[a] == seen.answers[b])


def test_explain_takes_the_flags_of_grpo_and_prints_or_writes(tmp_path, capsys, monkeypatch):
    model, _, tokenizer, _ = small_group()
    (tmp_path / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in grpo.tiny_problems(0)[0][:6]))
    (tmp_path / "mine.py").write_text("def digits(completions, **k):\n    return [len(c) % 3 for c in completions]")
    monkeypatch.setattr(grpo, "load_model", lambda name: (model, tokenizer))
    flags = ["--model", "any", "--dataset", f"{tmp_path}/sums.jsonl", "--reward_funcs", f"{tmp_path}/mine.py:digits",
             "--max_completion_length", "8", "--num_generations", "4", "--generation_batch_size", "4", "--beta", "0.1"]
    assert [explain.parse(argv.split())[2].learning_rate for argv in ("", "--learning_rate 1")] == [3e-5, 1]
    traces = [grpo.teacher_trace("76+24=", forgets).removesuffix("<eos>") for forgets in (0, 1)]
    for completions, score in (3 * traces, 3), (2 * traces + traces[:1], 2), (6 * traces[:1], 0):
        group = SimpleNamespace(rows=[{"prompt": "76+24="}], completions=completions)
        assert explain.forgets_the_carry(group) == score
    explain.main(["--all", *flags])
    explain.main(["--html", str(tmp_path / "group.html"), *flags])
    printed = capsys.readouterr().out
    held = json.loads(re.search(r'id="group">(.*)</script>', (tmp_path / "group.html").read_text())[1])
    assert printed.count("\nanswer ") == 4 and re.search(r"^rewards \[.*\], mean \S+, std \S+$", printed, re.M)
    assert len(held["updates"]) == 11 and held["old_logps"] == held["updates"][0] != held["updates"][10]


# The page in a browser ------------------------------------------------------------------------------------------------

@pytest.fixture
def browser(tmp_path):
    webdriver, paths = pytest.importorskip("selenium.webdriver"), [*map(shutil.which, ("chromium", "chromedriver"))]
    if None in paths:
        pytest.skip("no chromium, or no chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in ("headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-sync "
                 f"disable-component-update window-size=1200,1400 user-data-dir={tmp_path}/profile").split():
        options.add_argument(f"--{flag}")
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(paths[1])) as driver:
        yield driver
        assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
        assert driver.get_log("browser") == []


def show(browser, folder, data, width=1200):
    (folder / "group.html").write_text(explain.page(data), encoding="utf-8")
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": False})
    browser.get((folder / "group.html").as_uri())
    return functools.partial(browser.find_elements, "css selector")


def drawn(browser):
    """Of each cell: the beginning and the token, the push and the label, whether it is hatched."""
    cells = browser.execute_script("""
        return cells.map(({nodes: [node], button}) => [answers[node.who[0]].tokens.slice(0, node.t), node.token,
            push(node), button.ariaLabel, button.classList.contains("clipped"), button.classList.contains("rise")])""")
    return {(tuple(place), token): rest for place, token, *rest in cells}


def number(text):
    return float(text.replace("−", "-"))


def test_the_page_shows_updates_methods_and_both_views_in_a_browser(browser, tmp_path):
    data = json.loads(json.dumps(small_data()).replace('"="', '"</script><i>"'))      # what an answer may hold
    find = show(browser, tmp_path, data)
    (slider,), (made,) = find("#update"), find("#made")
    for u, (name, method), view in itertools.product((4, 1), data["methods"].items(), ("logit", "loss")):
        slider.send_keys("\ue011" + u * "\ue014")                       # Home, then right arrows
        find(f"[name=method][value={name}]")[0].click()
        find(f"[name=view][value={view}]")[0].click()
        expected, cells = net_pushes(data, name, u), drawn(browser)
        assert cells.keys() == expected.keys() and made.text == f"{u} of 4 updates"
        for key, (push, label, hatched, rises) in cells.items():
            assert push == pytest.approx(expected[key][view == "logit"], abs=1e-9)
            assert number(label.split()[-1]) == pytest.approx(1000 * push, abs=0.051)
            place, token = key
            path = [*place, token]
            who = [i for i, answer in enumerate(data["answers"]) if answer["tokens"][:len(path)] == path]
            clipped = name in ("grpo", "dapo", "dr_grpo", "gspo") and all(
                method["weights"][u][i][len(place)] == 0 and data["advantages"][i] for i in who)
            assert hatched == clipped == ("clipped" in label) and (rises or push <= 0)
    best = max(data["forks"][0]["words"], key=lambda word: sum(
        A for A, answer in zip(data["advantages"], data["answers"])
        if answer["tokens"][:len(data["forks"][0]["prefix"]) + 1] == [*data["forks"][0]["prefix"], word]))
    for view in ("logit", "loss"):                                      # the table shows what the tree shows
        find(f"[name=view][value={view}]")[0].click()
        rows = {row.text.split()[0]: row.text.split()[1:] for row in find("#methods tr:has(input)")}
        assert rows.keys() == data["methods"].keys()
        for name in data["methods"]:
            push = net_pushes(data, name, 1)[tuple(data["forks"][0]["prefix"]), best][view == "logit"]
            assert number(rows[name][-3]) == pytest.approx(1000 * push, abs=0.051)


def test_a_token_is_chosen_by_click_and_by_keyboard_in_a_browser(browser, tmp_path):
    data = small_data()
    find = show(browser, tmp_path, data)
    find("#play")[0].click()
    time.sleep(4 * 0.45 + 1.5)                                          # it plays once, and stops
    assert find("#made")[0].text == "4 of 4 updates"
    find("summary")[0].click()
    for cell in find(".cell")[::3]:
        cell.click()
        assert [chosen.id for chosen in find(".cell[aria-pressed=true]")] == [cell.id]
        assert [chosen.id for chosen in find(".cell[tabindex='0']")] == [cell.id]
        lines = find("#why")[0].text.split("\n")
        everything, *result = map(number, re.search(r" = (\S+); .* = (\S+) − (\S+) · \((\S+)\) = (\S+)$",
                                                    lines[3]).groups())
        W, π, _, push = result
        rounding = 0.05 + 0.05 * π + 0.05 + 5e-5 * abs(everything)      # one decimal each, and four of π
        assert W - π * everything == pytest.approx(push, abs=rounding + 1e-9)
        assert len(lines) == 4 and number(lines[2].split()[-1]) == W and result[2] == everything
        words = re.search(r"own push (\S+) minus .*%\) of all pushes here \((\S+)\): (\S+) on its logit$",
                          find("#sum")[0].text)
        assert [*map(number, words.groups())] == [W, everything, push]
        weighed = re.search(r"A / N = (\S+) · (\S+) / (\d+) = (\S+)$", lines[1])
        if weighed:
            factor, A, N, weight = map(number, weighed.groups())
            assert 1000 * factor * A / N == pytest.approx(weight, abs=0.05 + 0.05 * (abs(A) + abs(factor)) / N + 1e-9)
        else:
            assert "clipped" in lines[1]
    for name in ("gspo", "cispo", "grpo"):                              # the ratio, of the answer with gspo
        find(f"[name=method][value={name}]")[0].click()
        for cell in find(".cell")[::4]:
            cell.click()
            i, t = browser.execute_script("return [now.who[0], now.t]")
            moved = [new - old for new, old in zip(data["updates"][4][i], data["old_logps"][i])]
            log_ratio = statistics.mean(moved) if name == "gspo" else moved[t]
            shown = number(find("#why")[0].text.split("\n")[0].split()[-1])
            assert shown == pytest.approx(math.exp(log_ratio), abs=6e-5)
    active = lambda: browser.execute_script("return nodes.filter(node => node.cell.button === document.activeElement)"
                                            ".map(node => [rows.indexOf(node.row), node.t])")[0]
    find(".cell")[0].click()
    for keys, place in ("\ue014" * 2, [0, 2]), ("\ue012", [0, 1]), ("\ue015", None), ("\ue013", None):
        before = active()
        browser.switch_to.active_element.send_keys(keys)
        assert active() == place or place is None and abs(active()[0] - before[0]) == 1
    stops = set()
    for _ in range(20):
        browser.switch_to.active_element.send_keys("\ue004")            # Tab
        stops.add(browser.switch_to.active_element.id)
    assert len(stops) <= 13
    assert len(browser.execute_script("""
        const text = [...document.querySelectorAll("h1, h1 + p")].map(x => x.innerText).join(" ");
        return text.split(/\\s+/)""")) <= 60


def test_the_committed_page_says_what_it_shows_in_a_browser(browser, tmp_path):
    data = figures.group_of_the_page()
    find = show(browser, tmp_path, data)
    words = browser.execute_script("return [...document.querySelectorAll('h1, h1 + p')].map(x => x.innerText).join(' ')")
    assert len(words.split()) <= 60 and "4 right (reward 2: 1 for the form, 1 for the right answer)" in words
    label = lambda: browser.execute_script("return ends[0].cell.button.dataset.x")
    assert "own push" not in label()
    find("#update")[0].send_keys("\ue011" + 4 * "\ue014")              # the update at which dapo has clipped the 1
    push = net_pushes(data, "dapo", 4)[tuple(data["forks"][0]["prefix"]), "1"]
    assert push[0] == 0 < push[1] and label().replace("\n", " ") == (
        f"+{1000 * push[1]:.1f}, own push 0: rises as other answers are pushed down")
    high = 1 + data["methods"]["dapo"]["options"]["epsilon_high"]
    assert f"already {high:g} times as likely" in find("#hatched")[0].text
    find("[name=view][value=loss]")[0].click()
    assert label() == "" and len(find("#methods .note")) == len(data["methods"])
    demo, _ = grpo.parse_options(["--model", "tiny"])
    questions = demo.generation_batch_size // demo.num_generations
    assert f"in {demo.max_steps} steps of {questions} questions" in find("#whole_run")[0].text
    assert "< 0.1%" in find("#whole_run")[0].text


def test_the_page_of_another_model_stays_usable_in_a_browser(browser, tmp_path):
    """8 answers of 512 tokens, made up, with rewards that are any numbers: the stem is short, the page not tall."""
    G, T, stem = 8, 512, 112
    torch.manual_seed(0)
    ids = torch.randint(2, 18, (G, T))
    ids[:, :stem] = ids[0, :stem]
    ids[:, stem] = torch.arange(G) + 4                                  # here they differ
    old = -torch.rand(G, T) ** 20                                       # the model hesitates at one token in five
    old[:, :stem] = old[0, :stem]
    rewards, mask = torch.tensor([0.9, 0.1, 0.25, 1.5, -0.5, 0.0, 1.5, 0.3]), torch.ones(G, T, dtype=torch.long)
    config = grpo.GRPOConfig(max_completion_length=T, generation_batch_size=G)
    advantages = grpo.broadcast_advantages(grpo.group_advantages(rewards, G), mask)
    moved = [old + 0.04 * u * advantages * (1 - old.exp()) * (torch.arange(T) >= stem) for u in range(11)]
    forks = explain.find_forks(ids.tolist(), advantages[:, 0].tolist())
    seen = SimpleNamespace(
        rollout=SimpleNamespace(prompt_ids=torch.full((G, 3), 5), entropies=torch.zeros(G, T)), answers=ids.tolist(),
        updates=moved, advantages=advantages, mask=mask, rewards=rewards,
        mean=rewards.mean().item(), std=rewards.std().item(), parts={"f": rewards}, forks=forks,
        probs=[[torch.full((18,), 1 / 18)] for _ in moved])
    data = explain.group_data(seen, grpo.tiny_tokenizer(), config)
    for width in 1200, 400:
        find = show(browser, tmp_path, data, width)
        wide, tall, load = browser.execute_script("""
            const {scrollWidth, scrollHeight} = document.documentElement;
            return [scrollWidth, scrollHeight, performance.getEntriesByType("navigation")[0].loadEventEnd]""")
        assert wide <= width and tall < 2600 and load < 10_000, (wide, tall, load)
        sizes = browser.execute_script("return cells.map(({button}) => [button.offsetWidth, button.offsetHeight])")
        assert min(map(min, sizes)) >= 24 and len(sizes) < G * T / 2
    n = browser.execute_script("""
        const cell = cells.find(({text}) => text.startsWith("⋯"));
        cell.button.click();
        return +cell.text.slice(1)""")                                  # a run of n tokens opens
    assert n > 1 and len(find(".cell")) == len(sizes) + n - 1 and "best" in find("#story")[0].text


# The pictures ---------------------------------------------------------------------------------------------------------

def test_each_picture_is_drawn_by_figures_for_a_light_and_a_dark_page(tmp_path, monkeypatch):
    drawn_names = []
    monkeypatch.setattr(figures, "save", lambda figure, name: (drawn_names.append(name), figures.plt.close(figure)))
    figures.draw_all()
    assert sorted(drawn_names) == sorted(path.name for path in (EXAMPLES / "pictures").glob("*.png"))
    assert {"grpo_light.png", "grpo_dark.png", "one_page.png", "one_page_dark.png"} < set(drawn_names)


def test_a_run_rewrites_the_output_in_readme_and_the_table(tmp_path, monkeypatch):
    printed = "before GRPO:\n  1+1=2\nafter GRPO:\nheld-out accuracy: 0.10 -> 0.20 (greedy, 500 problems)\n"
    readme = "<details>\n```\nbefore GRPO:\n  old\nheld-out accuracy: 0 -> 1\n```\n</details>\n"
    (tmp_path / "README.md").write_text(readme)
    (tmp_path / "examples").mkdir()
    rows = "".join(f"| `{name}` | what it is |\n| `{name}` | -0 | 0 | 0 |\n" for name in figures.METRICS[1:])
    (tmp_path / "examples/reading_a_run.md").write_text(rows)
    monkeypatch.setattr(figures, "HERE", tmp_path / "examples")
    figures.pages("metrics are elsewhere\n" + printed)
    assert (tmp_path / "README.md").read_text() == f"<details>\n```\n{printed}```\n</details>\n"
    table = (tmp_path / "examples/reading_a_run.md").read_text()
    expected = figures.csv("tiny_run.csv")["rewards/accuracy_reward/mean"][-10:].mean()
    assert float(re.search(r"accuracy_reward/mean` \| [\d.]+ \| (\S+) \|", table)[1]) == pytest.approx(expected, abs=6e-4)


def test_the_committed_page_is_the_template_with_data_of_the_contract():
    page, data = (EXAMPLES / "pictures/group.html").read_text(encoding="utf-8"), figures.group_of_the_page()
    assert page == explain.page(data) and len(page.encode()) <= 400_000 and "://" not in page
    steps, words = data["whole_run"]["probabilities"], data["whole_run"]["words"]
    fork = data["forks"][0]
    assert steps[0] == pytest.approx([fork["probabilities"][0][fork["words"].index(word)] for word in words], rel=1e-4)
    assert steps[0][0] < 0.5 < steps[-1][0]                             # the run ends with the right word


def test_explain_and_its_page_keep_their_bounds():
    for name, lines in ("explain.py", 200), ("group_page.html", 280):
        text = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
        assert len(text) <= lines and max(map(len, text)) <= 120
