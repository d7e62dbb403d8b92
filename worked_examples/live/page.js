const $ = id => document.getElementById(id);
const form = $("config");
const glyph = {"<think>": "⟨", "</think>": "⟩", "<eos>": "■", "<pad>": "□"};
const show = ids => ids.map(id => glyph[words[id]] ?? words[id]).join("");
const fixed = (x, digits = 2) => x.toFixed(digits).replace("-", "−");
const color = x => x > 1e-9 ? "up" : x < -1e-9 ? "down" : "soft";
const bytes = Uint8Array.from(atob($("weights").textContent), character => character.charCodeAt());
const weights = Float64Array.from(new Int16Array(bytes.buffer), x => x / 2 ** 13);
const sums = $("sums").textContent.split(" ");              // held-out ones
$("sum").pattern = `(?!${sums.join("|").replaceAll("=", "").replaceAll("+", "\\+")})[1-9]{2}\\+[1-9]{2}`;
const code = URL.createObjectURL(new Blob(["maths", "gpt2", "worker"].map(id => $(id).textContent)));
let learner, states, now, verdicts, busy, due, prompt = "15+87=";           // due: steps that are still to be made

function config() {                                         // what the reader has chosen, by grpo.py's names
  const chosen = [...new FormData(form)].map(([name, value]) => [name, isNaN(value) ? value : +value]);
  return {...Object.fromEntries(chosen), prompt, verdicts};
}

function start() {                                          // from the cold start, by the rules that are chosen
  learner?.terminate();
  [learner, states, verdicts, due] = [new Worker(code), [], {}, 0];
  learner.onmessage = answered;
  ask("start", {weights, sums});
  go_on();
}

function ask(action, given) {
  busy = true;
  learner.postMessage({action, config: config(), ...given});
}

function answered({data}) {                                 // with new rows, or with the answers to the held-out sums
  states[data.step] = {...states[data.step], ...data};
  now = states.at(-1);
  if (data.rows) {
    busy = false;
    draw_group();
    go_on();
  }
  draw_learned();
}

function go_on() {                                          // one question at a time
  if (!busy && now.prompt !== prompt) ask("sample");
  else if (!busy && due > 0) {
    due--;
    ask("step");
  }
  $("run").textContent = due > 0 ? "❚❚ Pause" : "▶ 12 steps";
  $("bar").className = busy ? "busy" : "";
}

// How a token is pushed, in units of A, at ρ = 1. own: its log π in its answer. added: summed over the answers that
// begin alike and continue with this token. net: its logit, added − π·(the sum over all that begin alike).
function find_pushes(group) {
  const push = rows => sum(rows.map(row => row.advantage));
  return group.map(row => row.completion_ids.map((id, t) => {
    const before = row.completion_ids.slice(0, t), π = Math.exp(row.old_logps[t]);
    const alike = group.filter(other => before.every((id, s) => other.completion_ids[s] === id));
    const same = alike.filter(other => other.completion_ids[t] === id), added = push(same);
    return {before: show(before), word: show([id]), is_fork: same.length < alike.length, π,
            after: Math.exp(row.logps?.[t]), own: row.advantage, added, net: added - π * push(alike)};
  }));
}

function draw_group() {
  const {rows, moved, clipped} = now, options = config(), G = options.num_generations;
  compute_rewards(rows, options);
  now.reward = sum(rows.map(row => row.reward)) / rows.length;
  const cells = find_pushes(rows.slice(0, G)), firsts = [...rows.keys()].filter(i => i % G === 0);
  const loud = firsts.filter(i => rows.slice(i, i + G).some(row => row.advantage !== 0));
  $("group").innerHTML = cells.map((_, i) => row_html(rows[i], i, cells)).join("");
  $("silent").textContent = `Silent groups (A = 0: no push): ${firsts.length - loud.length} of ${firsts.length}. `;
  if (loud[0] !== 0) $("silent").append("This is one. ");
  if (loud[0] > 0) $("silent").innerHTML += `<button data-first="${loud[0]}">Show another</button>`;
  $("clipped").textContent = fixed(100 * (clipped ?? 0), 1);
  $("forks").innerHTML = forks_html(moved ? find_pushes(moved) : cells);
}

function row_html({prompt, text, reward, advantage}, i, cells) {
  const name = ({1: "✓ 1", 0: "✗ 0"}[reward] ?? fixed(reward)) + (prompt + text in verdicts ? " ✎" : "");
  const peak = view => Math.max(1e-9, ...cells.flat().map(cell => Math.abs(cell[view])));
  const height = (cell, view) => `--${view}: ${(9 * cell[view] / peak(view)).toFixed(2)}px`;
  const tokens = cells[i].map((cell, t) => `<span class="token ${cell.is_fork ? "fork" : ""}" style="--t: ${t}; ${
    ["own", "added", "net"].map(view => height(cell, view)).join("; ")}">${cell.word}</span>`);
  return `<div class="row">
    <button data-i="${i}" aria-label="answer ${i + 1}, reward ${fixed(reward)}: overrule">${name}</button>
    <span class="A ${color(advantage)}">${advantage > 0 ? "+" : ""}${fixed(advantage)}</span>
    <span class="mono">${tokens.join("")}</span></div>`;
}

function forks_html(cells) {                                // π where the answers part, the largest push first
  const forks = cells.flat().filter(cell => cell.is_fork).sort((a, b) => Math.abs(b.net) - Math.abs(a.net));
  const tokens = new Map(forks.map(cell => [cell.before + cell.word, cell]));
  return [...tokens.values()].map(({before, word, net, π, after}) => `<li><code>${before}<b class="${color(net)}">${
    word}</b></code>π = ${fixed(π, 3)}${after ? ` → ${fixed(after, 3)}` : ""}`).join("");
}

const curves = {
  c1: state => state.held && sum(state.held.map(row => row.right)) / state.held.length,
  c2: state => state.prompt === prompt ? state.carry : undefined,
  c3: state => state.reward};

function draw_learned() {
  const end = Math.max(20, now.step), known = states.filter(state => state.held);
  $("end").textContent = end;
  $("chart").innerHTML = Object.entries(curves).map(([name, value]) => {
    const points = states.filter(state => value(state) !== undefined);
    const places = points.map(state => `${100 * state.step / end},${100 - 100 * value(state)}`);
    return `<polyline class="${name}" points="${[...places, places.at(-1)].join(" ")}"/>`;
  }).join("");
  $("held").innerHTML = (known.at(-1)?.held ?? []).slice(0, 4).map(row =>
    `<li><code>${row.prompt}${show(row.completion_ids)}</code> ${row.right ? "✓" : "✗"}`).join("");
  const π = states.slice(-2).map(curves.c2).filter(Number.isFinite).map(x => fixed(x)).join(" → ");
  $("said").innerHTML = `step <b>${now.step}</b> · π of the right carry <b>${π}</b>` + (known.length === 0 ? "" :
    ` · held-out sums right (at step ${known.at(-1).step}) <b>${fixed(curves.c1(known.at(-1)))}</b>`);
}

$("step").onclick = () => { due++; go_on(); };
$("run").onclick = () => { due = due > 0 ? 0 : 12; go_on(); };
$("again").onclick = form.onchange = start;
$("group").onclick = ({target: {dataset: {i}}}) => {        // the reader overrules a reward, from the next step on
  if (!i || states.length === 0) return;                    // 0: it starts again, these rows are old
  const {prompt, text, reward} = now.rows[i];
  verdicts[prompt + text] = reward > 0.5 ? 0 : 1;
  draw_group();
  document.querySelector(`[data-i="${i}"]`).focus({preventScroll: true});
};
$("silent").onclick = ({target: {dataset: {first}}}) => {
  if (!first) return;
  prompt = now.rows[first].prompt;
  $("sum").value = prompt.slice(0, -1);
  if (!busy) ask("show", {first});
};
$("sum").onchange = ({target}) => {
  target.value = target.value.replaceAll(" ", "");
  if (target.reportValidity()) prompt = target.value + "=";
  go_on();
};
for (const button of document.querySelectorAll("[data-rules]")) button.onclick = () => {
  form.reset();
  $("sum").value = "15+87";
  prompt = "15+87=";
  for (const [name, value] of new URLSearchParams(button.dataset.rules)) form.elements[name].value = value;
  start();
  $("trying").textContent = `${button.textContent}: ${button.parentNode.nextElementSibling.textContent}`;
  $("step").focus();
  scrollTo(0, 0);
};
start();
