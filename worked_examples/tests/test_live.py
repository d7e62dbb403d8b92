"""Tests of the page that learns: its maths against grpo.py's, and its buttons in Chromium.

What compares numbers runs in Chromium, or, where there is none, in node; without both it is skipped.
"""

import base64
import functools
import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter

import numpy
import pytest
import torch
from conftest import EXAMPLES

import grpo
from worked_examples.live import make_live

PAGE = EXAMPLES / "live/live.html"
CHROMIUM = shutil.which("chromium")
if CHROMIUM and CHROMIUM.startswith("/snap"):                           # a snap does not see tmp_path
    CHROMIUM = None
IN_FULL = "GRPO_EXAMPLES" in os.environ                                  # as CI asks, before another test sets it
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="no chromium")


class Browser:
    """Chromium with one page: commands of its DevTools protocol go through one pipe, answers come through another."""

    def __init__(self, folder):
        (read, self.to), (self.back, write) = os.pipe(), os.pipe()
        flags = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={folder}/profile"
        self.process = subprocess.Popen(f"exec {CHROMIUM} {flags} about:blank 3<&{read} 4>&{write} 2>/dev/null",
                                        shell=True, executable="/bin/bash", pass_fds=(read, write))
        os.close(read)
        os.close(write)
        self.number, self.session, self.events, self.received = 0, {}, [], b""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.session = {"sessionId": session}
        for domain in "Page", "Runtime", "Network":
            self.send(f"{domain}.enable")

    def send(self, method, **params):
        self.number += 1
        data = json.dumps({"id": self.number, "method": method, "params": params} | self.session).encode() + b"\0"
        while data:
            data = data[os.write(self.to, data):]
        while True:
            while b"\0" not in self.received:
                self.received += os.read(self.back, 2**20)
            message, _, self.received = self.received.partition(b"\0")
            message = json.loads(message)
            if message.get("id") == self.number:
                return message["result"]
            self.events.append((message["method"], message["params"]))

    def value(self, expression):
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition):
        ends = time.monotonic() + 300
        while not self.value(condition):
            assert time.monotonic() < ends and not self.exceptions(), (condition, self.exceptions())
            time.sleep(0.05)

    def exceptions(self):
        return [params["exceptionDetails"] for method, params in self.events if method == "Runtime.exceptionThrown"]

    def press(self, key):
        text = {"Enter": "\r", " ": " "}.get(key, "")
        codes = dict(key=key, code={" ": "Space"}.get(key, key), text=text,
                     windowsVirtualKeyCode={"Enter": 13, " ": 32, "Tab": 9, "ArrowRight": 39, "ArrowDown": 40}[key])
        self.send("Input.dispatchKeyEvent", type="keyDown", **codes)
        self.send("Input.dispatchKeyEvent", type="keyUp", **codes | {"text": ""})

    def open_page(self):
        """The page on a phone, with its first group."""
        self.send("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=PAGE.as_uri())
        self.wait_for("typeof now === 'object' && !busy && now.held !== undefined")

    def close(self):
        self.process.terminate()
        self.process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


def part(name):
    return re.search(rf'id="{name}">\s*(.*?)</script>', PAGE.read_text(encoding="utf-8"), re.S)[1]


def in_javascript(expression, given, folder):
    """What an expression gives after the page's maths and transformer; given is there under this name."""
    script = f"{part('maths')}\n{part('gpt2')}\nconst given = {json.dumps(given)};\n"
    if CHROMIUM:
        browser = Browser(folder)
        try:
            return json.loads(browser.value(f"{script} JSON.stringify({expression})"))
        finally:
            browser.close()
    if not shutil.which("node"):
        pytest.skip("no chromium, no node")
    (folder / "script.cjs").write_text(f"{script} console.log(JSON.stringify({expression}))", encoding="utf-8")
    return json.loads(subprocess.run(["node", folder / "script.cjs"], capture_output=True, check=True).stdout)


def numbers_of(text, dtype="<f8"):
    return numpy.frombuffer(base64.b64decode(text), dtype).astype("f8")


@functools.cache
def weights():
    return torch.tensor(numbers_of(part("weights"), "<i2")) / 2**13


def model_of(numbers):
    model = grpo.tiny_model(grpo.tiny_tokenizer(), 0).double()
    torch.nn.utils.vector_to_parameters(numbers.clone(), model.parameters())
    return model


CASES = [{"num_generations": 8, "learning_rate": 3e-4, "reward_func": "accuracy_reward", "verdicts": {}, "epsilon": 0.2,
          "scale_rewards": scale_rewards, "beta": beta, "old": old}
         for scale_rewards, beta, old in [("group", 0, "own"), ("group", 0, "noisy"), ("none", 0, "noisy"),
                                          ("group", 0.4, "noisy"), ("none", 9, "noisy")]]
COMPUTED = """(() => {
  const base64 = numbers => {
    const bytes = new Uint8Array(Float64Array.from(numbers).buffer), texts = [];
    for (let i = 0; i < bytes.length; i += 9999) texts.push(btoa(String.fromCharCode(...bytes.subarray(i, i + 9999))));
    return texts.join("");
  };
  const reference = make_model(given.reference);
  const cases = given.cases.map(config => {
    const policy = make_model(given.weights);
    const rows = given.rows.map((row, i) => ({...row, old_logps: given.old[config.old][i]}));
    const logps = rows.map(row => [...per_token_logps(policy, row).x]);
    compute_rewards(rows, config);
    const metrics = backward(policy, reference, rows, config), gradient = base64(policy.all.d);
    const updated = [1, 2].map(() => (update(policy, reference, rows, config), base64(policy.all.x)));
    return {...metrics, logps, gradient, updated, advantages: rows.map(row => row.advantage)};
  });
  return cases;
})()"""


def test_the_maths_is_that_of_grpo_in_a_browser(tmp_path):
    """32 answers in float64: log-probs, advantages, loss, gradient, clipped share to 1e-10; two updates to 1e-4"""
    policy, reference, tokenizer = model_of(weights()), model_of(0.9 * weights()), grpo.tiny_tokenizer()
    _, config, _ = grpo.parse_options(["--generation_batch_size", "32", "--per_device_train_batch_size", "32"])
    dataset, _ = grpo.tiny_problems(42)
    rng = numpy.random.default_rng(0)
    rollout = grpo.sample_rollout(policy, tokenizer, dataset[:4], config, rng)
    mask, everything = rollout.completion_mask, torch.arange(32)
    rewards = torch.tensor(grpo.accuracy_reward(rollout.completions, [row["solution"] for row in rollout.examples]))
    with torch.no_grad():
        logps, ref_logps = (grpo.score_rows(model, rollout, everything, config) for model in (policy, reference))
    old = {"own": logps, "noisy": (logps + torch.tensor(rng.normal(0, 0.25, logps.shape))) * mask}
    cut = lambda x: [row[m != 0].tolist() for row, m in zip(x, mask)]
    columns = rollout.examples, rollout.completions, rollout.prompt_ids, cut(rollout.completion_ids)
    rows = [{"prompt": example["prompt"], "text": text, "prompt_ids": prompt_ids.tolist(), "completion_ids": ids}
            for example, text, prompt_ids, ids in zip(*columns)]
    given = {"weights": weights().tolist(), "reference": (0.9 * weights()).tolist(), "rows": rows, "cases": CASES,
             "old": {name: cut(x) for name, x in old.items()}}
    cases = in_javascript(COMPUTED, given, tmp_path)
    same = lambda mine, theirs: numpy.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-10)
    losses, shares, norms = set(), set(), set()
    for case, mine in zip(CASES, cases):
        advantages = grpo.group_advantages(rewards.double(), 8, scale_rewards=case["scale_rewards"])
        same(sum(mine["logps"], []), sum(cut(logps), []))
        same(mine["advantages"], advantages)
        model = model_of(weights())
        optimizer = torch.optim.AdamW(model.parameters(), lr=case["learning_rate"], weight_decay=0.0)
        for k in range(2):
            optimizer.zero_grad()
            loss, metrics = grpo.grpo_loss(
                grpo.score_rows(model, rollout, everything, config), advantages, mask, old_logps=old[case["old"]],
                ref_logps=ref_logps, beta=case["beta"])
            loss.backward()
            if k == 0:
                clipped = metrics["clip_ratio/region_mean"]
                same([mine["loss"], mine["clipped"]], [loss.item(), clipped])
                gradient = torch.cat([weight.grad.reshape(-1) for weight in model.parameters()])
                same(numbers_of(mine["gradient"]), gradient)
                losses.add(round(loss.item(), 6))
                shares.add(clipped > 0)
            norms.add(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() > 1)
            optimizer.step()
            change = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - weights()
            gap = torch.tensor(numbers_of(mine["updated"][k])) - weights() - change
            assert gap.norm() < 1e-4 * change.norm()
    assert len(losses) == len(CASES) and len(shares) == len(norms) == 2


def test_the_answers_are_those_of_grpo_in_a_browser(tmp_path):
    """The greedy answers to the page's held-out sums; which of some odd texts are right; where no answer is pushed and
    the KL is 0, AdamW counts an update only with a KL term, as PyTorch does"""
    texts = ["<think>7+5=12</think>132", "132", "<think>1</think>", "<think>132", "1</think>2</think>132", ""]
    _, config, _ = grpo.parse_options([])
    _, held_out = grpo.tiny_problems(config.seed)
    held = part("sums").split()
    assert held == [row["prompt"] for row in held_out[:100]]
    got = in_javascript("""({answers: given.held.map(prompt => generate(make_model(given.weights), prompt).text),
        right: given.texts.map(text => reward_funcs.accuracy_reward(text, "47+85=")),
        updates: [0, 1].map(beta => {
          const policy = make_model(given.weights), row = {...generate(policy, "47+85="), advantage: 0};
          update(policy, policy, [row], {beta, epsilon: 0.2, learning_rate: 1});
          return [policy.all.updates, policy.all.x.every((x, i) => x === given.weights[i])];
        })})""",
                        {"weights": weights().tolist(), "held": held, "texts": texts}, tmp_path)
    policy = model_of(weights())
    assert got["answers"] == grpo.sample_rollout(policy, grpo.tiny_tokenizer(), held_out[:100], config).completions
    assert got["right"] == grpo.accuracy_reward(texts, ["132"] * len(texts))
    assert got["updates"] == [[0, True], [1, True]]


def test_the_page_is_made_of_its_parts_and_of_grpos_cold_start():
    """Byte for byte but for the weights, which differ from processor to processor by a tenth; 350 KB at most"""
    html = PAGE.read_text(encoding="utf-8")
    policy, held_out = make_live.cold_start()
    without_weights = lambda text: re.sub("[A-Za-z0-9+/]{9999,}=*", "", text)
    assert without_weights(html) == without_weights(make_live.page(policy, held_out))
    fresh = torch.nn.utils.parameters_to_vector(policy.parameters()).detach().double()
    assert (fresh - weights()).norm() < 0.2 * weights().norm()
    assert len(html.encode()) <= 350_000 and "://" not in html


@needs_chromium
def test_the_page_learns_and_asks_nobody_in_a_browser(browser):
    """By the keyboard, on a phone: Step at most forty times, until 0.9 of the held-out sums are right"""
    browser.open_page()
    accuracy = "curves.c1(states.findLast(state => state.held))"
    assert browser.value(accuracy) < 0.8
    while browser.value("document.activeElement.id") != "step":
        browser.press("Tab")
    for step in range(1, 41):
        browser.press("Enter")
        browser.wait_for(f"now.step === {step} && !busy && states[{step // 2 * 2}].held !== undefined")
        assert browser.value("document.documentElement.scrollWidth") <= 390
        if browser.value(accuracy) > 0.9:
            break
    assert browser.value(accuracy) > 0.9
    assert not browser.exceptions()
    urls = [params["request"]["url"] for method, params in browser.events if method == "Network.requestWillBeSent"]
    assert PAGE.as_uri() in urls and all(url == PAGE.as_uri() or url.startswith("blob:null/") for url in urls)


PUSHES = """(() => {
  const group = now.rows.slice(0, 8), cells = find_pushes(group);
  return {advantages: group.map(row => row.advantage), prompts: group.map(row => row.prompt_ids),
          answers: group.map(row => row.completion_ids),
          cells: cells.map(cells => cells.map(({own, added, net}) => [own, added, net]))};
})()"""


@needs_chromium
def test_a_bar_is_minus_the_gradient_of_the_loss_in_a_browser(browser):
    """own: by the token's log-prob in its answer; added: over the answers that share it; net: by its logit"""
    browser.open_page()
    page = browser.value(PUSHES)
    by_logp, by_token, by_logit = [], Counter(), Counter()
    for prompt, answer, A in zip(page["prompts"], page["answers"], page["advantages"]):
        logits = model_of(weights())(input_ids=torch.tensor([prompt + answer])).logits[:, len(prompt) - 1:-1]
        logits = logits.detach().requires_grad_()
        logps = grpo.selective_log_softmax(logits, torch.tensor([answer]))
        loss, _ = grpo.grpo_loss(logps, torch.tensor([A], dtype=torch.float64), torch.ones_like(logps),
                                 num_items_in_batch=1)
        minus_logp, minus_logit = (-x[0] for x in torch.autograd.grad(loss, [logps, logits]))
        by_logp.append(minus_logp.tolist())
        for t, token in enumerate(answer):
            by_token[*answer[:t], token] += minus_logp[t].item()
            for v in range(logits.size(-1)):
                by_logit[*answer[:t], v] += minus_logit[t, v].item()
    assert any(page["advantages"])
    for answer, own, cells in zip(page["answers"], by_logp, page["cells"]):
        for t in range(len(answer)):
            place = tuple(answer[:t + 1])
            assert cells[t] == pytest.approx([own[t], by_token[place], by_logit[place]], abs=1e-12)


@needs_chromium
def test_each_control_works_in_a_browser(browser):
    """Each option of each list, each thing to try, a view, a verdict, another sum: a step, without an exception"""
    browser.open_page()
    lists = browser.value("[...form.querySelectorAll('select')].map(list => [list.name, list.length])")
    tries = browser.value("document.querySelectorAll('[data-rules]').length")
    assert len(lists) > 5 and tries > 5
    browser.value("sums.length = 2")                                            # other tests ask for held-out sums
    change = "dispatchEvent(new Event('change', {bubbles: true}))"
    actions = ["; ".join(f"form.elements.{name}.selectedIndex = {k % length}" for name, length in lists) +
               f"; form.{change}" for k in range(max(length for _, length in lists))]
    actions += [f"document.querySelectorAll('[data-rules]')[{k}].click()" for k in range(tries)]
    actions += ["$('group').querySelector('button').click()", "$('views').querySelector('[value=net]').click()",
                f"$('sum').value = '58+67'; $('sum').{change}", "$('run').click(); $('run').click()",
                "$('again').click()"]
    for action in actions:
        browser.value("form.reset(); form.elements.generation_batch_size.selectedIndex = 0")         # the quickest
        browser.value(action)
        browser.wait_for("!busy")
        browser.value("$('step').click()")
        browser.wait_for("!busy")
        assert browser.value("Number.isFinite(now.loss + now.grad_norm + now.reward)"), action
        assert browser.value("document.documentElement.scrollWidth") <= 390, action
    assert not browser.exceptions()


@needs_chromium
def test_a_silent_group_offers_another_in_a_browser(browser):
    """Overruled until all eight rewards are equal: the page says so, no row moves, a group that differs is shown"""
    browser.open_page()
    assert not browser.value("$('silent').querySelector('button')")
    place = "$('group').getBoundingClientRect().top"
    before = browser.value(place)
    right = "now.rows.slice(0, 8).findIndex(row => row.reward > 0)"
    while browser.value(right) >= 0:
        browser.value(f"$('group').querySelectorAll('button')[{right}].click()")
    assert "This is one." in browser.value("$('silent').textContent") and browser.value(place) == before
    browser.value("$('silent').querySelector('button').click()")
    browser.wait_for("!busy")
    rewards = browser.value("now.rows.slice(0, 8).map(row => row.reward)")
    assert set(rewards) == {0, 1} and not browser.value("$('silent').querySelector('button')")
    assert browser.value("prompt === now.rows[0].prompt && $('sum').value + '=' === prompt && prompt !== '15+87='")
    assert not browser.exceptions()


@needs_chromium
def test_the_bar_says_what_a_step_did_in_a_browser(browser):
    """π of the carry before → after, with each held-out number its step, a fifth of the screen; focus moves on"""
    browser.open_page()
    browser.value("$('try').querySelectorAll('button')[4].focus(); document.activeElement.click()")
    browser.wait_for("!busy && now.step === 0 && now.held")
    assert browser.value("document.activeElement.id") == "step"
    browser.value("$('step').click()")
    browser.wait_for("now.step === 1 && !busy")
    said = browser.value("$('said').textContent")
    before, after = browser.value("states.map(state => fixed(state.carry))")
    assert before != after and f"{before} → {after}" in said and re.search(r"right \(at step 0\)\s+0\.\d\d$", said)
    assert browser.value("$('bar').offsetHeight") <= 844 / 5


@needs_chromium
def test_a_rule_starts_again_and_a_sum_goes_on_in_a_browser(browser):
    """A sum is typed while a step is made: the answers after it are those to the new sum; a held-out one is refused"""
    browser.open_page()
    browser.value("$('step').click(); $('sum').focus(); $('sum').select()")
    browser.send("Input.insertText", text="12 + 31")
    browser.press("Enter")
    browser.wait_for("now.step === 1 && !busy && now.prompt === prompt")
    assert browser.value("now.rows[0].prompt") == "12+31=" and browser.value("now.rows[63].prompt") != "12+31="
    for text in browser.value("sums[0].slice(0, -1)"), "10+25", "12+3", "":
        browser.value("$('sum').focus(); $('sum').select()")
        browser.send("Input.insertText", text=text)
        browser.press("Enter")
        assert browser.value("!$('sum').validity.valid && prompt === '12+31='"), text
    browser.value("$('sum').value = '12+31'; $('run').click(); form.elements.beta.selectedIndex = 1; form.onchange()")
    assert browser.value("$('run').textContent") == "▶ 12 steps" and browser.value("busy && due === 0")
    browser.wait_for("states.length === 1 && !busy && now.held")
    time.sleep(2)                                                               # a step of before would come by now
    assert browser.value("states.length === 1 && now.rows[0].prompt === '12+31='")
    assert browser.value("$('step').click(), answered({data: {step: 0, held: states[0].held}}), busy")
    browser.wait_for("now.step === 1 && !busy")
    assert not browser.exceptions()


@needs_chromium
def test_what_the_page_promises_is_what_it_shows_in_a_browser(browser):
    """Beside each button under Try: π of the carry and the held-out sums after so many steps"""
    browser.open_page()
    overrule = "".join(f"verdicts['15+87=<think>5+7=12,{text}'] = {verdict};"
                       for text, verdict in (("1+8+1=10</think>102", 0), ("1+8+0=9</think>92", 1)))
    no_mean = "form.elements.scale_rewards.value = 'no mean'; start();"
    row = "now.rows.slice(0, 8).filter(row => row.text.endsWith('>102')).length"
    cases = [
        ("Large steps", "", 8, "fixed(states[1].carry), fixed(now.carry), fixed(curves.c1(now))", "0.69 0.99 0.27"),
        ("KL, β = 4", "", 4, "fixed(now.carry), fixed(curves.c1(now))", "0.32 0.44"),
        ("The first rules", "", 12, "fixed(now.carry), fixed(curves.c1(now))", "0.93 0.98"),
        ("Always 1", no_mean, 8, "fixed(now.carry)", "0.36"),
        ("Short answers", "", 12, "fixed(states[0].reward), fixed(now.reward), curves.c1(now)", "0.34 0.81 0"),
        ("Overrule", overrule, 12, f"{{7: 'seven'}}[{row}]", "seven"),
        ("16 updates, no clip", "", 2, "fixed(now.carry), fixed(curves.c1(now))", "0.98 0.89")]
    for name, before, steps, shown, promised in cases if IN_FULL else cases[:2]:
        button = f"[...document.querySelectorAll('[data-rules]')].find(button => button.textContent === '{name}')"
        text = browser.value(f"{button}.parentNode.nextElementSibling.textContent")
        browser.value(f"{button}.click(); {before} due = {steps}")
        browser.wait_for(f"now.step === {steps} && !busy && states.length === {steps + 1} && now.held !== undefined")
        assert browser.value(f"[{shown}].join(' ')") == promised, name
        assert all(number in text for number in promised.split() if number not in ("0", "0.44")), name


@needs_chromium
def test_the_page_follows_the_systems_colors_and_calm_in_a_browser(browser):
    """Dark where the system is dark; the views change by themselves, but without motion what is left is shown"""
    grounds, view = set(), "getComputedStyle($('answers')).getPropertyValue('--view3').trim()"
    browser.send("Emulation.setEmulatedMedia", features=[])
    browser.open_page()
    assert browser.value("$('answers').getAnimations().length") == 1 and browser.value(view) == "0"
    for scheme in "light", "dark":
        chosen = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        browser.send("Emulation.setEmulatedMedia", features=[{"name": x, "value": y} for x, y in chosen.items()])
        browser.open_page()
        grounds.add(browser.value("getComputedStyle($('bar')).backgroundColor"))
        assert browser.value("$('answers').getAnimations().length") == 0 and browser.value(view) == "1"
    browser.send("Emulation.setEmulatedMedia", features=[])
    assert len(grounds) == 2
