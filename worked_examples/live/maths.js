// grpo.py in JavaScript: the same names in the same order. A function takes one answer (or one group), without padding,
// so there is no mask. What grpo.py takes from PyTorch and transformers is in gpt2.js.
//
// A tensor is {x, d}: its numbers x, and d = ∂loss/∂x. Each function computes x, and leaves on the tape how d goes back
// to its arguments (the chain rule). To run the tape from its end to its beginning is what loss.backward() does.

const words = ["<pad>", "<eos>", "<think>", "</think>", ..."0123456789+=,"];
const V = words.length;
const eos = words.indexOf("<eos>");
const max_completion_length = 28;

const encode = text => text.match(/<.*?>|./g).map(word => words.indexOf(word));
const decode = ids => ids.map(id => words[id]).join("");
const sum = numbers => numbers.reduce((a, b) => a + b, 0);
const tensor = n => ({x: new Float64Array(n), d: new Float64Array(n)});

function map(x, f, slope, tape) {                           // y_i = f(x_i), so dx_i += f'(x_i)·dy_i
  const y = tensor(x.x.length);
  x.x.forEach((number, i) => { y.x[i] = f(number, i); });
  tape?.push(() => x.x.forEach((number, i) => { x.d[i] += slope(number, i) * y.d[i]; }));
  return y;
}

function add(x, y, tape, factor = 1) {                      // z = x + factor·y
  const z = tensor(x.x.length);
  x.x.forEach((number, i) => { z.x[i] = number + factor * y.x[i]; });
  tape?.push(() => z.d.forEach((d, i) => {
    x.d[i] += d;
    y.d[i] += factor * d;
  }));
  return z;
}

// §2 Group statistics and advantages ----------------------------------------------------------------------------------

function group_stats(rewards) {                             // of one group: mean, std = √(Σ (r_i - mean)² / (G - 1))
  const mean = sum(rewards) / rewards.length;
  const squares = sum(rewards.map(r => (r - mean) ** 2));
  const is_silent = rewards.every(r => r === rewards[0]);
  return is_silent ? [rewards[0], 0] : [mean, Math.sqrt(squares / (rewards.length - 1))];
}

function group_advantages(rewards, scale_rewards) {
  // "group": A_i = (r_i - mean) / (std + eps). "none": A_i = r_i - mean. Not in grpo.py: "no mean", A_i = r_i.
  const eps = 1e-4;
  const [mean, std] = group_stats(rewards);
  if (scale_rewards === "no mean") return rewards;
  const scale = scale_rewards === "group" ? std + eps : 1;
  return rewards.map(r => (r - mean) / scale);
}

// §3 Log-probabilities ------------------------------------------------------------------------------------------------

function log_softmax(logits) {                              // logit - log Σ exp(logit); the largest goes to exp as 0
  const top = Math.max(...logits);
  const log_total = top + Math.log(sum(logits.map(logit => Math.exp(logit - top))));
  return logits.map(logit => logit - log_total);
}

const row_of = (logits, i) => logits.x.subarray(i * V, i * V + V);          // logits: (n, V)

function selective_log_softmax(logits, first, index, tape) {                // of token index[t] in row first + t
  const rows = index.map((_, t) => log_softmax(row_of(logits, first + t)));
  const logps = tensor(index.length);
  rows.forEach((row, t) => { logps.x[t] = row[index[t]]; });
  tape?.push(() => index.forEach((token, t) => rows[t].forEach((logp, v) => {
    const slope = (v === token) - Math.exp(logp);                           // ∂log π(token) / ∂logit(v)
    logits.d[(first + t) * V + v] += slope * logps.d[t];
  })));
  return logps;
}

function per_token_logps(model, {prompt_ids, completion_ids}, tape) {       // log π(o_t | q, o_<t) of each token
  const ids = [...prompt_ids, ...completion_ids].slice(0, -1);
  const logits = forward(model, ids, [...ids.keys()], tape);
  return selective_log_softmax(logits, prompt_ids.length - 1, completion_ids, tape);     // t - 1 predicts token t
}

// §4 Importance ratio and clip ----------------------------------------------------------------------------------------

function importance_ratio(logps, old_logps, tape) {         // ρ = π / π_old = exp(log π - log π_old); ∇ρ = ρ·∇log π
  const ratio = (logp, t) => Math.exp(logp - old_logps[t]);
  return map(logps, ratio, ratio, tape);
}

const clip_ratio = (ρ, epsilon) => Math.min(Math.max(ρ, 1 - epsilon), 1 + epsilon);

const is_clipped = (ρ, A, epsilon) => clip_ratio(ρ, epsilon) * A < ρ * A;

function clipped_surrogate_loss(ratio, A, epsilon, tape) {  // l = -min(ρ·A, clip(ρ)·A); if clipped, its gradient is 0
  const loss = ρ => -Math.min(ρ * A, clip_ratio(ρ, epsilon) * A);
  const slope = ρ => is_clipped(ρ, A, epsilon) ? 0 : -A;
  return map(ratio, loss, slope, tape);
}

// §5 KL ---------------------------------------------------------------------------------------------------------------

function kl_estimate(logps, ref_logps, tape) {              // k3 = exp(-k1) + k1 - 1,  k1 = log π - log π_ref
  const k1 = (logp, t) => logp - ref_logps[t];
  const k3 = (logp, t) => Math.expm1(-k1(logp, t)) + k1(logp, t);
  const slope = (logp, t) => -Math.expm1(-k1(logp, t));
  return map(logps, k3, slope, tape);
}

// §6 The aggregations -------------------------------------------------------------------------------------------------

function denominator(num_tokens, {loss_type, num_items_in_batch, num_rows_in_batch}) {
  if (loss_type === "grpo") return num_rows_in_batch * num_tokens;          // of its own answer
  if (loss_type === "dr_grpo") return num_rows_in_batch * max_completion_length;
  return num_items_in_batch;                                                // dapo, bnpo: all tokens of the batch
}

function aggregate(per_token_loss, options, tape) {         // one answer's part of the loss: the parts add up to it
  const divisor = denominator(per_token_loss.x.length, options);
  tape?.push(() => per_token_loss.d.fill(1 / divisor));
  return sum(per_token_loss.x) / divisor;
}

// §7 The loss ---------------------------------------------------------------------------------------------------------

function grpo_loss(logps, A, old_logps, ref_logps, options, tape) {         // aggregate(l(ρ, A) + β·KL)
  const {epsilon, beta} = options;
  const ratio = importance_ratio(logps, old_logps, tape);
  let per_token_loss = clipped_surrogate_loss(ratio, A, epsilon, tape);
  if (beta > 0) {
    const kl = kl_estimate(logps, ref_logps, tape);
    per_token_loss = add(per_token_loss, kl, tape, beta);
  }
  const loss = aggregate(per_token_loss, options, tape);
  return {loss, clipped: ratio.x.filter(ρ => is_clipped(ρ, A, epsilon)).length};
}

// §8 Reward functions -------------------------------------------------------------------------------------------------

const final_answer = text => text.split("</think>").at(-1).trim();

const reward_funcs = {
  accuracy_reward: (text, prompt) => +(final_answer(text) === solution(prompt)),
  short_answer: text => 1 - encode(text + "<eos>").length / max_completion_length,      // not in grpo.py, nor the next
  always_1: () => 1};

// §9 Sampling ---------------------------------------------------------------------------------------------------------

function random(seed) {                                     // numbers in [0, 1): mulberry32
  return () => {
    seed = seed + 0x6D2B79F5 | 0;
    let t = Math.imul(seed ^ seed >>> 15, seed | 1);
    t ^= t + Math.imul(t ^ t >>> 7, t | 61);
    return ((t ^ t >>> 14) >>> 0) / 2 ** 32;
  };
}

function choose_token(logps, uniform) {                     // the first v with Σ_{w<=v} p_w > u; without u, greedily
  if (uniform === undefined) return logps.indexOf(Math.max(...logps));
  let total = 0;
  const chosen = logps.findIndex(logp => (total += Math.exp(logp)) > uniform);
  return chosen < 0 ? V - 1 : chosen;                       // the last sum may round to below u
}

function generate(model, prompts, rng) {                    // an answer to each prompt; without rng greedily
  const rows = prompts.map((prompt, i) => (
    {i, prompt, prompt_ids: encode(prompt), completion_ids: [], logps: [], text: ""}));
  const room = Math.max(...rows.map(row => row.prompt_ids.length)) + max_completion_length;
  const size = rows.length * room * 3 * n_embd;
  const cache = {room, layers: Array.from({length: n_layer}, () => new Float64Array(size))};
  const uniforms = rows.map(() => Array.from({length: max_completion_length}, () => rng?.()));
  let active = rows;                                        // the rows that have not ended
  for (let position = 0; active.length > 0; position++) {   // one token of each: of its prompt, then of its answer
    const ids = active.map(row => [...row.prompt_ids, ...row.completion_ids][position]);
    cache.rows = active.map(row => row.i);
    const logits = forward(model, ids, ids.map(() => position), null, cache);
    active.forEach((row, k) => {
      const t = position + 1 - row.prompt_ids.length;       // this pass predicts token t
      if (t < 0) return;
      const logps = log_softmax(row_of(logits, k)), token = choose_token(logps, uniforms[row.i][t]);
      row.completion_ids.push(token);
      row.logps.push(logps[token]);
    });
    active = active.filter(({completion_ids: ids}) => ids.at(-1) !== eos && ids.length < max_completion_length);
  }
  for (const row of rows) row.text = decode(row.completion_ids.filter(id => id !== eos));
  return rows;
}

// §10 Training --------------------------------------------------------------------------------------------------------

function compute_rewards(rows, {reward_func, verdicts, num_generations: G, scale_rewards}) {        // and advantages
  for (const row of rows)                                   // the reader's verdict on this text goes first
    row.reward = verdicts[row.prompt + row.text] ?? reward_funcs[reward_func](row.text, row.prompt);
  for (let first = 0; first < rows.length; first += G) {
    const group = rows.slice(first, first + G);
    const advantages = group_advantages(group.map(row => row.reward), scale_rewards);
    group.forEach((row, k) => { row.advantage = advantages[k]; });
  }
}

function backward(policy, reference, rows, config) {        // the loss of a batch, and its gradient in policy.all.d
  const num_items_in_batch = sum(rows.map(row => row.completion_ids.length));
  const options = {...config, num_items_in_batch, num_rows_in_batch: rows.length};
  const total = {loss: 0, clipped: 0};
  policy.all.d.fill(0);
  for (const row of rows) {
    if (row.advantage === 0 && config.beta === 0) continue;                 // its loss and its gradient are 0
    const tape = [];
    const logps = per_token_logps(policy, row, tape);
    const ref_logps = config.beta > 0 ? per_token_logps(reference, row).x : null;
    const {loss, clipped} = grpo_loss(logps, row.advantage, row.logps, ref_logps, options, tape);
    while (tape.length > 0) tape.pop()();
    total.loss += loss;
    total.clipped += clipped / num_items_in_batch;
  }
  total.grad_norm = Math.sqrt(sum(policy.all.d.map(d => d * d)));
  return total;
}

function update(policy, reference, rows, config, optimizer) {
  const metrics = backward(policy, reference, rows, config);
  if (metrics.grad_norm > 1)                                // max_grad_norm = 1
    policy.all.d.forEach((d, i, all) => { all[i] = d / metrics.grad_norm; });
  if (metrics.grad_norm > 0) adamw(policy.all, optimizer, config.learning_rate);
  return metrics;
}

// §11 The demo's task -------------------------------------------------------------------------------------------------

const solution = prompt => String(sum(prompt.replace("=", "").split("+").map(Number)));

function teacher_trace(prompt) {                            // 47+85= gets <think>7+5=12,4+8+1=13</think>132
  const [a, x, , b, y] = prompt, units = +x + +y, carry = +(units > 9);     // ax + by
  return `<think>${x}+${y}=${units},${a}+${b}+${carry}=${+a + +b + carry}</think>${solution(prompt)}`;
}
