// A panel of packed weights times some tokens. Included inside a code path's namespace.
//
// Every output of every token is one chain of multiply-adds over k = 0, 1, 2 ... on a weight that was decoded to float32
// first. Few tokens take the weights from the decoder's registers; more tokens have a stretch of the panel decoded once
// into scratch memory and go over it in tiles. Storing a float32 and loading it again changes nothing, so a token's
// result has the same bits either way, at any number of tokens, and prefill equals decode.

constexpr int kStretch = 256;  // k decoded at once: 32 KiB, which stays in the caches while the tiles pass over it

// Walks a stretch [k0, k0 + count) of a panel and calls use(k, decoder, z, j) for each k. k0 and, but for the panel's
// end, count are multiples of 256: a stretch begins at a header.
template <int kFormat, class Use>
INLINE const uint8_t* walk(const uint8_t* weights, int count, Use use) {
  using Decoder = typename DecoderOf<kFormat>::type;
  constexpr FormatInfo info = kFormats[kFormat];
  Decoder decoder{};  // K formats: the first block has a header, which the compiler cannot see
  for (int k = 0, block = 0; k < count; k += info.block, ++block) {
    if (Decoder::kHasHeader && block % kSuper == 0) {
      decoder.header(weights);
      weights += info.header_bytes;
    }
    for (int line = 0; line < info.block_bytes; line += 64) prefetch(weights + kPrefetch + line);
    decoder.open(weights);
    for (int z = 0; z < Decoder::kSteps; ++z) {
      decoder.word(z);
#pragma GCC unroll 8
      for (int j = 0; j < Decoder::kPer; ++j) use(k + z * Decoder::kPer + j, decoder, z, j);
    }
    weights += info.block_bytes;
  }
  return weights;
}

// Scale of up to 256 inputs that become 16-bit integers, and its inverse. False if an input is not finite: the scale is
// NaN then, and with it the token's results. A scale too small to be inverted is as good as none.
INLINE bool scale16(const float* x, int count, float* scale, float* inverse) {
  f most = zero(), poison = zero();  // poison: 0, or NaN where an input is not finite
  for (int e = 0; e < count; e += W) {
    const f value = load(x + e);
    most = max(max(value, sub(zero(), value)), most);
    poison = fma(value, zero(), poison);
  }
  const float largest = reduce_max(most);
  const bool finite = reduce_add(poison) == 0.0f, none = largest < 1e-30f;
  *inverse = !finite || none ? 0.0f : kLargest16 / largest;
  *scale = !finite ? __builtin_nanf("") : none ? 0.0f : largest / kLargest16;
  return finite;
}

INLINE void finish(const PanelJob& job, int token, const f* sums) {
  float* out = job.out + token * job.out_stride;
  for (int p = 0; p < P; ++p) {
    const int left = job.valid - p * W;
    if (left <= 0) break;
    f value = sums[p];
    if (job.bias) value = add(value, load_n(job.bias + p * W, left));
    store_n(out + p * W, value, left);
  }
}

template <int kFormat, int kTokens>
NOINLINE static void direct(const PanelJob& job, int first) {
  const float* x = job.x + first * job.x_stride;
  const ptrdiff_t stride = job.x_stride;
  f sums[kTokens][P];
  for (int t = 0; t < kTokens; ++t)
    for (int p = 0; p < P; ++p) sums[t][p] = zero();
  walk<kFormat>(job.weights, job.k, [&](int k, const auto& decoder, int z, int j) __attribute__((always_inline)) {
    f w[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) w[p] = decoder.get(z, j, p);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const f value = set1(x[t * stride + k]);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) sums[t][p] = fma(w[p], value, sums[t][p]);
    }
  });
  for (int t = 0; t < kTokens; ++t) finish(job, first + t, sums[t]);
}

template <int kFormat>
NOINLINE const uint8_t* decode(const uint8_t* weights, int count, float* out) {
  return walk<kFormat>(weights, count, [&](int k, const auto& decoder, int z, int j) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) store(out + k * kPanel + p * W, decoder.get(z, j, p));
  });
}

// kTokens tokens over a decoded stretch. Sums wait in `sums` [tokens][32] between stretches.
template <int kTokens>
NOINLINE static void tile(const PanelJob& job, const float* decoded, int k0, int count, int first, float* partial) {
  const float* x = job.x + first * job.x_stride + k0;
  const ptrdiff_t stride = job.x_stride;
  f sums[kTokens][P];
  for (int t = 0; t < kTokens; ++t)
    for (int p = 0; p < P; ++p) sums[t][p] = k0 ? load(partial + (first + t) * kPanel + p * W) : zero();
  for (int k = 0; k < count; ++k) {
    f w[P];
    for (int p = 0; p < P; ++p) w[p] = load(decoded + k * kPanel + p * W);
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const f value = set1(x[t * stride + k]);
      for (int p = 0; p < P; ++p) sums[t][p] = fma(w[p], value, sums[t][p]);
    }
  }
  const bool last = k0 + count == job.k;
  for (int t = 0; t < kTokens; ++t) {
    if (last) finish(job, first + t, sums[t]);
    else
      for (int p = 0; p < P; ++p) store(partial + (first + t) * kPanel + p * W, sums[t][p]);
  }
}

using TileFunction = void (*)(const PanelJob&, const float*, int, int, int, float*);
using DirectFunction = void (*)(const PanelJob&, int);
using DecodeFunction = const uint8_t* (*)(const uint8_t*, int, float*);

template <int kTokens>
struct Tiles {
  static void fill(TileFunction* table) {
    table[kTokens] = tile<kTokens>;
    Tiles<kTokens - 1>::fill(table);
  }
};
template <> struct Tiles<0> { static void fill(TileFunction*) {} };

template <int kFormat, int kTokens>
struct Directs {
  static void fill(DirectFunction* table) {
    table[kTokens] = direct<kFormat, kTokens>;
    Directs<kFormat, kTokens - 1>::fill(table);
  }
};
template <int kFormat> struct Directs<kFormat, 0> { static void fill(DirectFunction*) {} };

struct LinearTable {
  TileFunction tiles[kMaxTokens + 1];
  DirectFunction directs[kNumFormats][kMaxDirect + 1];
  DecodeFunction decoders[kNumFormats];
  template <int kFormat>
  void add_format() {
    Directs<kFormat, kMaxDirect>::fill(directs[kFormat]);
    decoders[kFormat] = decode<kFormat>;
  }
  // Called when the path has been chosen, not when the library is loaded: this code, too, may use the path's
  // instructions.
  void fill() {
    Tiles<kMaxTokens>::fill(tiles);
    add_format<F32>(), add_format<F16>(), add_format<BF16>();
    add_format<Q4_0>(), add_format<Q4_1>(), add_format<Q5_0>(), add_format<Q5_1>(), add_format<Q8_0>();
    add_format<Q4_K>(), add_format<Q5_K>(), add_format<Q6_K>(), add_format<I8>();
    add_format<Q4_64>(), add_format<Q8_64>();
  }
};
static LinearTable kLinear;

// Tokens beyond this many take several passes over a job, so that the partial sums stay small.
constexpr int kMaxPass = 1024;
static size_t linear_scratch() { return static_cast<size_t>(kStretch + kMaxPass) * kPanel; }

static void linear_panel(const PanelJob& whole) {
  if (whole.tokens <= kMaxDirect) {
    if (whole.tokens > 0) kLinear.directs[whole.format][whole.tokens](whole, 0);
    return;
  }
  for (int start = 0; start < whole.tokens; start += kMaxPass) {
    PanelJob job = whole;
    job.tokens = whole.tokens - start < kMaxPass ? whole.tokens - start : kMaxPass;
    job.x += start * job.x_stride;
    job.out += start * job.out_stride;
    float* partial = job.scratch + kStretch * kPanel;
    const uint8_t* weights = job.weights;
    const int num_tiles = (job.tokens + kMaxTokens - 1) / kMaxTokens;
    for (int k0 = 0; k0 < job.k || k0 == 0; k0 += kStretch) {
      const int count = job.k - k0 < kStretch ? job.k - k0 : kStretch;
      weights = kLinear.decoders[job.format](weights, count, job.scratch);
      for (int t = 0, first = 0; t < num_tiles; ++t) {  // tiles of nearly equal size: 13 tokens go as 7 and 6
        const int size = (job.tokens - first + num_tiles - t - 1) / (num_tiles - t);
        kLinear.tiles[size](job, job.scratch, k0, count, first, partial);
        first += size;
      }
    }
  }
}
