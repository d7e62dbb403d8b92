// What grpo.py takes from PyTorch and transformers: GPT-2 with two layers of width 64, and AdamW.

const n_embd = 64, n_head = 4, n_layer = 2, n_positions = 64;

function make_model(numbers) {                              // 105,280 weights in PyTorch's order, in one array
  const all = {x: Float64Array.from(numbers), d: new Float64Array(numbers.length)};
  let used = 0;
  const take = n => ({x: all.x.subarray(used, used + n), d: all.d.subarray(used, used += n)});
  const norm = () => ({weight: take(n_embd), bias: take(n_embd)});
  const layer = (inputs, outputs) => ({weight: take(inputs * outputs), bias: take(outputs)});
  const block = () => ({
    ln_1: norm(), c_attn: layer(n_embd, 3 * n_embd), attn_proj: layer(n_embd, n_embd),
    ln_2: norm(), c_fc: layer(n_embd, 4 * n_embd), mlp_proj: layer(4 * n_embd, n_embd)});
  return {all, wte: take(V * n_embd), wpe: take(n_positions * n_embd), h: Array.from({length: n_layer}, block), ln_f: norm()};
}

function forward(model, ids, positions, tape, cache) {      // logits (n, V) of n tokens: of one text, or, with a cache,
  let x = embed(model, ids, positions, tape);               // of the newest token of each of n texts
  model.h.forEach(({ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj}, l) => {
    const qkv = linear(layer_norm(x, ln_1, tape), c_attn, tape);
    x = add(x, linear(attention(qkv, positions, tape, cache, l), attn_proj, tape), tape);
    const hidden = gelu(linear(layer_norm(x, ln_2, tape), c_fc, tape), tape);
    x = add(x, linear(hidden, mlp_proj, tape), tape);
  });
  return unembed(layer_norm(x, model.ln_f, tape), model, tape);
}

function embed({wte, wpe}, ids, positions, tape) {
  const x = tensor(ids.length * n_embd);
  const each = visit => ids.forEach((id, i) => {
    for (let c = 0; c < n_embd; c++) visit(i * n_embd + c, id * n_embd + c, positions[i] * n_embd + c);
  });
  each((i, token, position) => { x.x[i] = wte.x[token] + wpe.x[position]; });
  tape?.push(() => each((i, token, position) => {
    wte.d[token] += x.d[i];
    wpe.d[position] += x.d[i];
  }));
  return x;
}

function unembed(x, {wte}, tape) {                          // logits = x·wteᵀ
  const n = x.x.length / n_embd, logits = tensor(n * V);
  matmul(logits.x, x.x, wte.x, n, n_embd, V, n_embd, 1, 1, n_embd);
  tape?.push(() => {
    matmul(x.d, logits.d, wte.x, n, V, n_embd, V, 1, n_embd, 1);
    matmul(wte.d, logits.d, x.x, V, n, n_embd, 1, V, n_embd, 1);
  });
  return logits;
}

function linear(x, {weight, bias}, tape) {                  // y = x·W + b
  const m = bias.x.length, k = weight.x.length / m, n = x.x.length / k, y = tensor(n * m);
  for (let i = 0; i < n; i++) y.x.set(bias.x, i * m);
  matmul(y.x, x.x, weight.x, n, k, m, k, 1, m, 1);
  tape?.push(() => {
    for (let i = 0; i < n; i++) for (let j = 0; j < m; j++) bias.d[j] += y.d[i * m + j];
    matmul(weight.d, x.x, y.d, k, n, m, 1, k, m, 1);        // dW = xᵀ·dy
    matmul(x.d, y.d, weight.x, n, m, k, m, 1, 1, m);        // dx = dy·Wᵀ
  });
  return y;
}

function matmul(C, A, B, n, k, m, ai, ap, bp, bj) {         // C[i, j] += Σ_p A[i·ai + p·ap]·B[p·bp + j·bj]
  for (let j = 0; j < m; j += 2) {                          // two by two: four sums for four numbers that are read
    for (let i = 0; i < n; i += 2) {
      const down = i + 1 < n ? 1 : 0, right = j + 1 < m ? 1 : 0;
      let c00 = 0, c01 = 0, c10 = 0, c11 = 0;
      for (let p = 0, a = i * ai, b = j * bj; p < k; p++, a += ap, b += bp) {
        const a0 = A[a], a1 = A[a + down * ai], b0 = B[b], b1 = B[b + right * bj];
        c00 += a0 * b0;
        c01 += a0 * b1;
        c10 += a1 * b0;
        c11 += a1 * b1;
      }
      C[i * m + j] += c00;
      if (right) C[i * m + j + 1] += c01;
      if (down) C[(i + 1) * m + j] += c10;
      if (down && right) C[(i + 1) * m + j + 1] += c11;
    }
  }
}

function layer_norm(x, {weight, bias}, tape) {              // y = z·weight + bias,  z = (x - mean) / √(variance + 1e-5)
  const n = x.x.length / n_embd, y = tensor(n * n_embd), z = new Float64Array(n * n_embd), scale = new Float64Array(n);
  for (let i = 0, first = 0; i < n; i++, first += n_embd) {
    let mean = 0, variance = 0;
    for (let c = 0; c < n_embd; c++) mean += x.x[first + c] / n_embd;
    for (let c = 0; c < n_embd; c++) variance += (x.x[first + c] - mean) ** 2 / n_embd;
    scale[i] = 1 / Math.sqrt(variance + 1e-5);
    for (let c = 0; c < n_embd; c++) {
      z[first + c] = (x.x[first + c] - mean) * scale[i];
      y.x[first + c] = z[first + c] * weight.x[c] + bias.x[c];
    }
  }
  tape?.push(() => {
    for (let i = 0, first = 0; i < n; i++, first += n_embd) {
      let mean = 0, along = 0;                              // of dz, and of dz·z
      for (let c = 0; c < n_embd; c++) {
        const dy = y.d[first + c], dz = dy * weight.x[c];
        weight.d[c] += dy * z[first + c];
        bias.d[c] += dy;
        mean += dz / n_embd;
        along += dz * z[first + c] / n_embd;
      }
      for (let c = 0; c < n_embd; c++)
        x.d[first + c] += scale[i] * (y.d[first + c] * weight.x[c] - mean - z[first + c] * along);
    }
  });
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
      const query = i * W + h * H, out = i * n_embd + h * H, key = first * W + n_embd + h * H;
      heads.push({query, out, key, value: key + n_embd, p: new Float64Array(position + 1)});
    }
  });
  const dot = (a, i, b, j) => {
    let total = 0;
    for (let c = 0; c < H; c++) total += a[i + c] * b[j + c];
    return total;
  };
  const add_to = (a, i, factor, b, j) => {
    for (let c = 0; c < H; c++) a[i + c] += factor * b[j + c];
  };
  for (const {query, out, key, value, p} of heads) {
    p.forEach((_, s) => { p[s] = dot(qkv.x, query, before, key + s * W) / Math.sqrt(H); });
    softmax(p);
    p.forEach((_, s) => add_to(y.x, out, p[s], before, value + s * W));
  }
  tape?.push(() => {
    for (const {query, out, key, value, p} of heads) {
      const dp = p.map((_, s) => dot(y.d, out, qkv.x, value + s * W));
      const mean = sum(p.map((p, s) => p * dp[s]));
      p.forEach((p, s) => {
        const slope = p * (dp[s] - mean) / Math.sqrt(H);
        add_to(qkv.d, query, slope, qkv.x, key + s * W);
        add_to(qkv.d, key + s * W, slope, qkv.x, query);
        add_to(qkv.d, value + s * W, p, y.d, out);
      });
    }
  });
  return y;
}

function softmax(numbers) {                                 // in place
  const top = numbers.reduce((a, b) => Math.max(a, b));
  let total = 0;
  numbers.forEach((x, i) => { total += numbers[i] = Math.exp(x - top); });
  numbers.forEach((x, i) => { numbers[i] = x / total; });
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
