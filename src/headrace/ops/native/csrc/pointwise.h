// Norms, rotation and gated activations of one token. Included inside a code path's namespace.

// out = x / sqrt(mean(x^2) + eps) * weight; with `residual`, that of residual + x, which is stored there first.
static void rms_norm(const float* x, float* residual, const float* weight, float* out, int size, float eps) {
  f sum0 = zero(), sum1 = zero();
  const float* source = x;
  for (int k = 0; k < size; k += 2 * W) {
    const int n0 = size - k, n1 = size - k - W;
    f a = load_n(x + k, n0), b = n1 > 0 ? load_n(x + k + W, n1) : zero();
    if (residual) {
      a = add(load_n(residual + k, n0), a);
      store_n(residual + k, a, n0);
      if (n1 > 0) {
        b = add(load_n(residual + k + W, n1), b);
        store_n(residual + k + W, b, n1);
      }
    }
    sum0 = fma(a, a, sum0);
    sum1 = fma(b, b, sum1);
  }
  if (residual) source = residual;
  const float mean = reduce_add(add(sum0, sum1)) / static_cast<float>(size);
  const f scale = set1(1.0f / __builtin_sqrtf(mean + eps));
  for (int k = 0; k < size; k += W) {
    const int n = size - k;
    store_n(out + k, mul(mul(load_n(source + k, n), scale), load_n(weight + k, n)), n);
  }
}

// Dimension d turns with d + half; the rest of the head is copied. `out` may be x.
static void rope(const float* x, const float* cos, const float* sin, float* out, int half, int dim) {
  for (int d = 0; d < half; d += W) {
    const int n = half - d;
    const f c = load_n(cos + d, n), s = load_n(sin + d, n), low = load_n(x + d, n), high = load_n(x + half + d, n);
    store_n(out + d, sub(mul(low, c), mul(high, s)), n);
    store_n(out + half + d, add(mul(high, c), mul(low, s)), n);
  }
  if (out != x)
    for (int d = 2 * half; d < dim; ++d) out[d] = x[d];
}

// g / (1 + e^-x). The bound keeps e^-x finite, and NaN goes through it; there the quotient is under 1e-33.
INLINE f gate(f g, f x, float most) { return div(g, add(exp(min(set1(most), sub(zero(), x))), set1(1.0f))); }

INLINE f silu(f g) { return gate(g, g, 80.0f); }

// g / 2 * (1 + tanh(x)) is g / (1 + e^-2x), which does not cancel where tanh nears -1.
INLINE f gelu_tanh(f g) {
  const f twice = mul(set1(1.5957691216f), fma(mul(set1(0.044715f), g), mul(g, g), g));
  return gate(g, twice, 88.0f);
}

// GPT-OSS's: (up + 1) * gate * sigmoid(1.702 gate), gate at most 7, up in -7 .. 7
INLINE f swiglu_clamped(f g, f up) {
  const f bound = set1(7.0f), below = sub(zero(), bound);
  const f least = min(bound, g), inside = max(below, min(bound, up));  // NaN goes through: it is the second operand
  return mul(gate(least, mul(set1(1.702f), least), 80.0f), add(inside, set1(1.0f)));
}

// out [half] = activation(x[0 .. half)) * x[half .. 2 half)
static void gated(int kind, const float* x, float* out, int half) {
  if (kind == 2) {
    for (int k = 0; k < half; ++k)
      out[k] = 0.5f * x[k] * (1.0f + __builtin_erff(x[k] * 0.70710678f)) * x[half + k];
    return;
  }
  for (int k = 0; k < half; k += W) {
    const int n = half - k;
    const f g = load_n(x + k, n), up = load_n(x + half + k, n);
    store_n(out + k, kind == 3 ? swiglu_clamped(g, up) : mul(kind == 0 ? silu(g) : gelu_tanh(g), up), n);
  }
}

// kind 0: out = x * value; 1: out = value * tanh(x / value); 2: out = x + y. `out` may be x or y.
static void elementwise(int kind, const float* x, const float* y, float value, float* out, int size) {
  const f v = set1(value);
  for (int k = 0; k < size; k += W) {
    const int n = size - k;
    const f a = load_n(x + k, n);
    store_n(out + k, kind == 0 ? mul(a, v) : kind == 1 ? mul(v, tanh(div(a, v))) : add(a, load_n(y + k, n)), n);
  }
}

// Philox4x32-10 (Salmon et al., SC 2011): numbers in (0, 1) from blocks first .. first + blocks - 1 under a key and the rest
// of the counter, four each, as ops/noise.py defines them. Plain loops over lanes, which the compiler turns into vectors.
static void uniforms(uint32_t first, int blocks, uint32_t position, uint32_t choice, uint32_t low, uint32_t high,
                     float* out) {
  constexpr int kLanes = 64;
  for (int start = 0; start < blocks; start += kLanes) {
    uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      c0[l] = first + static_cast<uint32_t>(start + l);
      c1[l] = position, c2[l] = choice, c3[l] = 0;
    }
    uint32_t k0 = low, k1 = high;
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
      for (int l = 0; l < kLanes; ++l) {
        const uint64_t p0 = uint64_t{c0[l]} * 0xD2511F53u, p1 = uint64_t{c2[l]} * 0xCD9E8D57u;
        c0[l] = static_cast<uint32_t>(p1 >> 32) ^ c1[l] ^ k0;
        c2[l] = static_cast<uint32_t>(p0 >> 32) ^ c3[l] ^ k1;
        c1[l] = static_cast<uint32_t>(p1), c3[l] = static_cast<uint32_t>(p0);
      }
    const int count = blocks - start < kLanes ? blocks - start : kLanes;
    float* to = out + 4 * static_cast<ptrdiff_t>(start);
    const auto unit = [](uint32_t bits) { return static_cast<float>(static_cast<int32_t>(bits >> 9)) * 0x1p-23f + 0x1p-24f; };
    for (int l = 0; l < count; ++l) {
      to[4 * l] = unit(c0[l]), to[4 * l + 1] = unit(c1[l]);
      to[4 * l + 2] = unit(c2[l]), to[4 * l + 3] = unit(c3[l]);
    }
  }
}
