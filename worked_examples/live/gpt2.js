// What grpo.py takes from transformers and PyTorch: GPT-2, here two layers of width 64 with four heads, and AdamW.
// A tensor is {x, d}: numbers x, and d = ∂loss/∂x. Each function computes x, and leaves on the tape how d goes back to
// its arguments (the chain rule). To run the tape from its end to its beginning is what loss.backward() does.
const n_embd = 64, n_head = 4, n_layer = 2, n_positions = 64;

const zeros = n => new Float64Array(n);
const tensor = x => ({x, d: zeros(x.length)});
const row_of = (numbers, i, n) => numbers.subarray(i * n, (i + 1) * n);

// A matrix is a view of numbers x: element (i, j) is x[first + i·down + j·right].
const matrix = (x, rows, columns, first = 0, down = columns) => ({x, rows, columns, first, down, right: 1});
const transposed = M => ({...M, rows: M.columns, columns: M.rows, down: M.right, right: M.down});

function add_product(C, A, B) {                             // C += A·B, two by two: four sums for four numbers read
  const {x: a_x, right: a_step} = A, {x: b_x, down: b_step} = B;
  for (let j = 0; j < B.columns; j += 2) {
    const right = j + 1 < B.columns ? B.right : 0;          // to the next column of B; 0: j is the last
    for (let i = 0; i < A.rows; i += 2) {
      const down = i + 1 < A.rows ? A.down : 0, c = C.first + i * C.down + j * C.right;
      let a = A.first + i * A.down, b = B.first + j * B.right, c00 = 0, c01 = 0, c10 = 0, c11 = 0;
      for (const end = a + A.columns * a_step; a < end; a += a_step, b += b_step) {
        const a0 = a_x[a], a1 = a_x[a + down], b0 = b_x[b], b1 = b_x[b + right];
        c00 += a0 * b0;
        c01 += a0 * b1;
        c10 += a1 * b0;
        c11 += a1 * b1;
      }
      C.x[c] += c00;
      if (right > 0) C.x[c + C.right] += c01;
      if (down > 0) C.x[c + C.down] += c10;
      if (right > 0 && down > 0) C.x[c + C.right + C.down] += c11;
    }
  }
}

function make_model(numbers) {                              // 105,280 weights in one array, in PyTorch's order
  const N = numbers.length, all = {...tensor(Float64Array.from(numbers)), m: zeros(N), v: zeros(N), updates: 0};
  let used = 0;
  const take = n => ({x: all.x.subarray(used, used + n), d: all.d.subarray(used, used += n)});
  const norm = () => ({weight: take(n_embd), bias: take(n_embd)});
  const layer = (k, m) => ({weight: take(k * m), bias: take(m), view: x => matrix(x, k, m)});
  const wte = take(V * n_embd), wpe = take(n_positions * n_embd);
  const h = Array.from({length: n_layer}, () => ({
    ln_1: norm(), c_attn: layer(n_embd, 3 * n_embd), attn_proj: layer(n_embd, n_embd),
    ln_2: norm(), c_fc: layer(n_embd, 4 * n_embd), mlp_proj: layer(4 * n_embd, n_embd)}));
  const lm_head = {weight: wte, bias: tensor(zeros(V)), view: x => transposed(matrix(x, V, n_embd))};
  return {all, wte, wpe, h, ln_f: norm(), lm_head};
}

function forward({wte, wpe, h, ln_f, lm_head}, ids, tape, cache) {          // logits (n, V) after each of n tokens;
  const first = cache?.used ?? 0, positions = ids.map((_, i) => first + i); // the cache knows the tokens before them
  let x = add(embedding(wte, ids, tape), embedding(wpe, positions, tape), tape);
  h.forEach(({ln_1, c_attn, attn_proj, ln_2, c_fc, mlp_proj}, l) => {
    const qkv = linear(layer_norm(x, ln_1, tape), c_attn, tape);
    x = add(x, linear(attention(qkv, first, cache?.layers[l], tape), attn_proj, tape), tape);
    const hidden = gelu(linear(layer_norm(x, ln_2, tape), c_fc, tape), tape);
    x = add(x, linear(hidden, mlp_proj, tape), tape);
  });
  if (cache) cache.used += ids.length;
  return linear(layer_norm(x, ln_f, tape), lm_head, tape);
}

function embedding(weight, ids, tape) {                     // x_i = row ids[i] of the weight
  const x = tensor(zeros(ids.length * n_embd));
  ids.forEach((id, i) => x.x.set(row_of(weight.x, id, n_embd), i * n_embd));
  tape?.push(() => ids.forEach((id, i) =>
    row_of(x.d, i, n_embd).forEach((d, c) => { weight.d[id * n_embd + c] += d; })));
  return x;
}

function add(x, y, tape) {                                  // z = x + y
  const z = tensor(x.x.map((number, i) => number + y.x[i]));
  tape?.push(() => z.d.forEach((d, i) => { x.d[i] += d; y.d[i] += d; }));
  return z;
}

function linear(x, {weight, bias, view}, tape) {            // y = x·W + b
  const W = view(weight.x), k = W.rows, m = W.columns, n = x.x.length / k, y = tensor(zeros(n * m));
  for (let i = 0; i < n; i++) y.x.set(bias.x, i * m);
  add_product(matrix(y.x, n, m), matrix(x.x, n, k), W);
  tape?.push(() => {
    const dy = matrix(y.d, n, m);
    add_product(view(weight.d), transposed(matrix(x.x, n, k)), dy);
    add_product(matrix(x.d, n, k), dy, transposed(W));
    for (let i = 0; i < n; i++) row_of(y.d, i, m).forEach((d, j) => { bias.d[j] += d; });
  });
  return y;
}

function layer_norm(x, {weight, bias}, tape) {              // y = z·weight + bias,  z = (x - mean) / √(variance + 1e-5)
  const y = tensor(zeros(x.x.length)), mean_of = numbers => sum(numbers) / n_embd;
  for (let i = 0; i < y.x.length; i += n_embd) {
    const row = x.x.subarray(i, i + n_embd), mean = mean_of(row);
    const scale = 1 / Math.sqrt(mean_of(row.map(number => (number - mean) ** 2)) + 1e-5);
    const z = row.map(number => (number - mean) * scale);
    y.x.set(z.map((number, c) => number * weight.x[c] + bias.x[c]), i);
    tape?.push(() => {
      const dy = y.d.subarray(i, i + n_embd), dz = dy.map((d, c) => d * weight.x[c]);
      const mean_dz = mean_of(dz), mean_dz_z = mean_of(dz.map((d, c) => d * z[c]));
      dy.forEach((d, c) => {
        weight.d[c] += d * z[c];
        bias.d[c] += d;
        x.d[i + c] += scale * (dz[c] - mean_dz - z[c] * mean_dz_z);
      });
    });
  }
  return y;
}

function gelu(x, tape) {                                    // x·s,  s = (1 + tanh(u / 2)) / 2,  u = k·(x + 0.044715·x³)
  const k = 2 * Math.sqrt(2 / Math.PI), s = x.x.map(x => 1 / (1 + Math.exp(-k * (x + 0.044715 * x * x * x))));
  const y = tensor(x.x.map((number, i) => number * s[i]));
  tape?.push(() => x.x.forEach((number, i) => {
    const slope = s[i] * (1 - s[i]) * k * (1 + 3 * 0.044715 * number * number);
    x.d[i] += (s[i] + number * slope) * y.d[i];
  }));
  return y;
}

function log_softmax(logits) {                              // logit - log Σ exp(logit); the largest goes to exp as 0
  const top = Math.max(...logits);
  const log_total = top + Math.log(sum(logits.map(logit => Math.exp(logit - top))));
  return logits.map(logit => logit - log_total);
}

function attention(qkv, first, cache, tape) {               // of each head P·V,  P = softmax(Q·Kᵀ / √H), causal
  const H = n_embd / n_head, width = 3 * n_embd, n = qkv.x.length / width, y = tensor(zeros(n * n_embd));
  const so_far = cache ?? qkv.x, N = first + n;             // the rows of all tokens so far
  cache?.set(qkv.x, first * width);
  for (let h = 0; h < n_head; h++) {
    const part = (x, k, rows) => matrix(x, rows, H, k * n_embd + h * H, width);          // k = 0: Q, 1: K, 2: V
    const Q = part(qkv.x, 0, n), K = part(so_far, 1, N), values = part(so_far, 2, N);
    const P = matrix(zeros(n * N), n, N), head = x => matrix(x, n, H, h * H, n_embd);
    add_product(P, Q, transposed(K));
    for (let i = 0; i < n; i++) {
      const scores = row_of(P.x, i, N).map((score, s) => s <= first + i ? score / Math.sqrt(H) : -Infinity);
      P.x.set(log_softmax(scores).map(Math.exp), i * N);
    }
    add_product(head(y.x), P, values);
    tape?.push(() => {                                      // with a tape there is no cache, so N = n
      const dP = matrix(zeros(n * n), n, n), dY = head(y.d);
      add_product(dP, dY, transposed(values));
      add_product(part(qkv.d, 2, n), transposed(P), dY);
      for (let i = 0; i < n; i++) {                         // dP becomes that of Q·Kᵀ: P·(dP - Σ P·dP) / √H
        const p = row_of(P.x, i, n), dp = row_of(dP.x, i, n), mean = sum(dp.map((d, s) => d * p[s]));
        dp.forEach((d, s) => { dp[s] = p[s] * (d - mean) / Math.sqrt(H); });
      }
      add_product(part(qkv.d, 0, n), dP, K);
      add_product(part(qkv.d, 1, n), transposed(dP), Q);
    });
  }
  return y;
}

function adamw(all, learning_rate) {                        // without weight decay
  const {x, d, m, v} = all, updates = ++all.updates;
  for (let i = 0; i < x.length; i++) {
    m[i] = 0.9 * m[i] + 0.1 * d[i];
    v[i] = 0.999 * v[i] + 0.001 * d[i] * d[i];
    const mean = m[i] / (1 - 0.9 ** updates), square = v[i] / (1 - 0.999 ** updates);
    x[i] -= learning_rate * mean / (Math.sqrt(square) + 1e-8);
  }
}
