// What grpo.py takes from transformers and PyTorch: GPT-2, here two layers of width 64 with four heads, and AdamW.
const n_embd = 64, n_head = 4, n_layer = 2, n_positions = 64;

function make_model(numbers) {                              // 105,280 weights in one array, in PyTorch's order
  const all = {x: Float64Array.from(numbers), d: new Float64Array(numbers.length)};
  let used = 0;
  const take = n => ({x: all.x.subarray(used, used + n), d: all.d.subarray(used, used += n)});
  const norm = () => ({weight: take(n_embd), bias: take(n_embd)});
  const layer = (inputs, outputs) => ({weight: take(inputs * outputs), bias: take(outputs)});
  const block = () => ({
    ln_1: norm(), c_attn: layer(n_embd, 3 * n_embd), attn_proj: layer(n_embd, n_embd),
    ln_2: norm(), c_fc: layer(n_embd, 4 * n_embd), mlp_proj: layer(4 * n_embd, n_embd)});
  const wte = take(V * n_embd), wpe = take(n_positions * n_embd), h = Array.from({length: n_layer}, block);
  return {all, wte, wpe, h, ln_f: norm()};
}

function forward(model, ids, positions, tape, cache) {      // logits (n, V) after each token of one text, or, with
  let x = embed(model, ids, positions, tape);               // a cache, after the newest token of each of n texts
  model.h.forEach(({ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj}, l) => {
    const qkv = linear(layer_norm(x, ln_1, tape), c_attn, tape);
    x = add(x, linear(attention(qkv, positions, tape, cache, l), attn_proj, tape), tape);
    const hidden = gelu(linear(layer_norm(x, ln_2, tape), c_fc, tape), tape);
    x = add(x, linear(hidden, mlp_proj, tape), tape);
  });
  return unembed(layer_norm(x, model.ln_f, tape), model, tape);
}

function dot(a, i, b, j, n) {                               // of n numbers from a[i] and from b[j]
  let total = 0;
  for (let c = 0; c < n; c++) total += a[i + c] * b[j + c];
  return total;
}

function add_to(a, i, factor, b, j, n) {                    // to n numbers from a[i]: factor times those from b[j]
  for (let c = 0; c < n; c++) a[i + c] += factor * b[j + c];
}

function embed({wte, wpe}, ids, positions, tape) {          // x_i = wte[id] + wpe[position]
  const x = tensor(ids.length * n_embd);
  ids.forEach((id, i) => {
    add_to(x.x, i * n_embd, 1, wte.x, id * n_embd, n_embd);
    add_to(x.x, i * n_embd, 1, wpe.x, positions[i] * n_embd, n_embd);
  });
  tape?.push(() => ids.forEach((id, i) => {
    add_to(wte.d, id * n_embd, 1, x.d, i * n_embd, n_embd);
    add_to(wpe.d, positions[i] * n_embd, 1, x.d, i * n_embd, n_embd);
  }));
  return x;
}

function unembed(x, {wte}, tape) {                          // logits = x·wteᵀ
  const n = x.x.length / n_embd, logits = tensor(n * V);
  logits.x.forEach((_, k) => {
    logits.x[k] = dot(x.x, Math.floor(k / V) * n_embd, wte.x, k % V * n_embd, n_embd);
  });
  tape?.push(() => logits.d.forEach((d, k) => {
    const i = Math.floor(k / V) * n_embd, v = k % V * n_embd;
    add_to(x.d, i, d, wte.x, v, n_embd);
    add_to(wte.d, v, d, x.x, i, n_embd);
  }));
  return logits;
}

function linear(x, {weight, bias}, tape) {                  // y = x·W + b
  const m = bias.x.length, k = weight.x.length / m, n = x.x.length / k, y = tensor(n * m);
  for (let i = 0; i < n; i++) y.x.set(bias.x, i * m);
  matmul(y.x, x.x, weight.x, n, k, m, k, 1, m, 1);
  tape?.push(() => {
    for (let i = 0; i < n; i++) add_to(bias.d, 0, 1, y.d, i * m, m);
    matmul(weight.d, x.x, y.d, k, n, m, 1, k, m, 1);        // dW = xᵀ·dy
    matmul(x.d, y.d, weight.x, n, m, k, m, 1, 1, m);        // dx = dy·Wᵀ
  });
  return y;
}

function matmul(C, A, B, n, k, m, ai, ap, bp, bj) {         // C[i, j] += Σ_p A[i·ai + p·ap]·B[p·bp + j·bj], m is even
  for (let j = 0; j < m; j += 2) {
    for (let i = 0; i < n; i += 2) {                        // two by two: four sums for four numbers that are read
      const down = i + 1 < n ? 1 : 0;                       // 0: this is the last row
      let c00 = 0, c01 = 0, c10 = 0, c11 = 0;
      for (let p = 0, a = i * ai, b = j * bj; p < k; p++, a += ap, b += bp) {
        const a0 = A[a], a1 = A[a + down * ai], b0 = B[b], b1 = B[b + bj];
        c00 += a0 * b0;
        c01 += a0 * b1;
        c10 += a1 * b0;
        c11 += a1 * b1;
      }
      C[i * m + j] += c00;
      C[i * m + j + 1] += c01;
      if (down === 0) continue;
      C[(i + 1) * m + j] += c10;
      C[(i + 1) * m + j + 1] += c11;
    }
  }
}

function layer_norm(x, {weight, bias}, tape) {              // y = z·weight + bias,  z = (x - mean) / √(variance + 1e-5)
  const y = tensor(x.x.length), z = new Float64Array(x.x.length), scales = [];
  for (let i = 0; i < z.length; i += n_embd) {
    const row = x.x.subarray(i, i + n_embd), mean = sum(row) / n_embd;
    const variance = sum(row.map(number => (number - mean) ** 2)) / n_embd;
    const scale = 1 / Math.sqrt(variance + 1e-5);
    for (let c = 0; c < n_embd; c++) {
      z[i + c] = (row[c] - mean) * scale;
      y.x[i + c] = z[i + c] * weight.x[c] + bias.x[c];
    }
    scales.push(scale);
  }
  tape?.push(() => scales.forEach((scale, row) => {
    const i = row * n_embd, dz = weight.x.map((number, c) => number * y.d[i + c]);
    const mean = sum(dz) / n_embd, along = dot(dz, 0, z, i, n_embd) / n_embd;
    for (let c = 0; c < n_embd; c++) {
      weight.d[c] += y.d[i + c] * z[i + c];
      bias.d[c] += y.d[i + c];
      x.d[i + c] += scale * (dz[c] - mean - z[i + c] * along);
    }
  }));
  return y;
}

function gelu(x, tape) {                                    // x·(1 + tanh(u)) / 2,  u = k·(x + 0.044715·x³)
  const k = Math.sqrt(2 / Math.PI);
  const tanh = x => 1 - 2 / (Math.exp(2 * k * (x + 0.044715 * x * x * x)) + 1);
  const slope = x => {
    const t = tanh(x);
    return (1 + t + x * k * (1 + 3 * 0.044715 * x * x) * (1 - t * t)) / 2;
  };
  return map(x, x => x * (1 + tanh(x)) / 2, slope, tape);
}

function attention(qkv, positions, tape, cache, l) {        // y = Σ_s p_s·v_s,  p = softmax(q·k_s / √H), s up to itself
  const H = n_embd / n_head, W = 3 * n_embd, y = tensor(positions.length * n_embd), heads = [];
  const before = cache ? cache.layers[l] : qkv.x;           // queries, keys and values of all tokens so far
  positions.forEach((position, i) => {
    const first = cache ? cache.rows[i] * cache.room : 0;   // where the text of token i begins
    if (cache) before.set(qkv.x.subarray(i * W, i * W + W), (first + position) * W);
    for (let h = 0; h < n_head; h++) {
      const query = i * W + h * H, out = i * n_embd + h * H, key = first * W + n_embd + h * H, value = key + n_embd;
      const scores = new Float64Array(position + 1);
      scores.forEach((_, s) => { scores[s] = dot(qkv.x, query, before, key + s * W, H) / Math.sqrt(H); });
      const p = log_softmax(scores).map(x => Math.exp(x));
      p.forEach((p, s) => add_to(y.x, out, p, before, value + s * W, H));
      heads.push({query, out, key, value, p});
    }
  });
  tape?.push(() => heads.forEach(({query, out, key, value, p}) => {
    const dp = p.map((_, s) => dot(y.d, out, qkv.x, value + s * W, H));
    const mean = dot(p, 0, dp, 0, p.length);
    p.forEach((p, s) => {
      const slope = p * (dp[s] - mean) / Math.sqrt(H);
      add_to(qkv.d, query, slope, qkv.x, key + s * W, H);
      add_to(qkv.d, key + s * W, slope, qkv.x, query, H);
      add_to(qkv.d, value + s * W, p, y.d, out, H);
    });
  }));
  return y;
}

function adamw({x, d}, optimizer, learning_rate) {          // without weight decay
  optimizer.m ??= new Float64Array(x.length);
  optimizer.v ??= new Float64Array(x.length);
  optimizer.updates = (optimizer.updates ?? 0) + 1;
  const {m, v, updates} = optimizer;
  for (let i = 0; i < x.length; i++) {
    m[i] = 0.9 * m[i] + 0.1 * d[i];
    v[i] = 0.999 * v[i] + 0.001 * d[i] * d[i];
    const mean = m[i] / (1 - 0.9 ** updates), square = v[i] / (1 - 0.999 ** updates);
    x[i] -= learning_rate * mean / (Math.sqrt(square) + 1e-8);
  }
}
