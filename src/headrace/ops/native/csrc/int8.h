// A panel of quantised weights times some tokens in signed bytes: the arithmetic of int8 mode. Included inside a code
// path's namespace.
//
// A token's inputs are rounded to bytes under one scale for 32 k (relative to the largest of them, 2^-8), a block of 32
// products is summed exactly in 32 bits, and a block's sum is scaled and added in float32:
//
//   out = fma(d * scale, sum of q_w * q_x, out);  out = fma(m, scale * sum of q_x, out)     each block of 32 (16) k
//
// That is this chain whatever company the token keeps, so its bits do not change with the number of tokens.

constexpr int kTogether = W == 16 ? P : 1;  // vectors of the panel whose weights registers hold at once
constexpr int kInt8Group = 4, kInt8Pass = 128;  // tokens: of a group, and of a pass over the panel

// One block in registers. d: of each of the block's scales.
template <class Quad>
struct Int8Block {
  static constexpr bool kSigned = kSmallBytes && Quad::kOffset == 128;  // bytes that dot8 would not take
  i w[kTogether][8];
  f d[Quad::kScales][kTogether], m[kTogether];
};

// What a group of tokens reads; strides are from token to token. sums: four words of a block, as in planes.h, but the
// last is the sum of all q times their scale.
struct Int8Inputs {
  const int8_t* q;
  const float *sums, *scales;
  ptrdiff_t q_stride, blocks;
};

// Adds a block's products to the sums of kTokens tokens [tokens][32]; block number `at` of the inputs.
template <class Quad, int kTokens>
INLINE void add_int8_block(const Int8Block<Quad>& block, const Int8Inputs& in, int at, float* out) {
  constexpr int kQuads = 8 / Quad::kScales;
  constexpr bool kSigned = Int8Block<Quad>::kSigned, kOffset = Quad::kOffset != 0 && !kSigned;
  const int8_t* q = in.q + at * kBlock;
#pragma GCC unroll 2
  for (int part = 0; part < Quad::kScales; ++part) {
    i dots[kTokens][kTogether];
    for (int t = 0; t < kTokens; ++t)
      for (int p = 0; p < kTogether; ++p) dots[t][p] = zero_words();
#pragma GCC unroll 8
    for (int quad = part * kQuads; quad < (part + 1) * kQuads; ++quad)
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        const i x = quad_everywhere(q + t * in.q_stride + 4 * quad);
        for (int p = 0; p < kTogether; ++p)
          dots[t][p] = kSigned ? dot8_signed(dots[t][p], block.w[p][quad], x) : dot8(dots[t][p], block.w[p][quad], x);
      }
    asm volatile("" ::: "memory");  // sums are not to be loaded earlier: there is no register for them
    for (int t = 0; t < kTokens; ++t) {
      const float* sums = in.sums + (t * in.blocks + at) * 4;
      const f scale = set1(in.scales[t * in.blocks + at]);
      i offset = zero_words();
      if constexpr (kOffset) offset = word_everywhere(sums + (Quad::kScales == 2 ? part : 2));
      f sum = zero();
      if constexpr (Quad::kHasMin) sum = set1(sums[3]);
      for (int p = 0; p < kTogether; ++p) {
        if constexpr (kOffset) dots[t][p] = sub_words(dots[t][p], offset);
        float* to = out + t * kPanel + p * W;
        f value = fma(mul(block.d[part][p], scale), to_floats(dots[t][p]), load(to));
        if constexpr (Quad::kHasMin) value = fma(block.m[p], sum, value);
        store(to, value);
      }
    }
  }
}

template <class Quad>
INLINE void add_int8_tokens(const Int8Block<Quad>& block, Int8Inputs in, int at, int tokens, float* out) {
  for (; tokens >= kInt8Group; tokens -= kInt8Group, out += kInt8Group * kPanel) {
    add_int8_block<Quad, kInt8Group>(block, in, at, out);
    in.q += kInt8Group * in.q_stride;
    in.sums += kInt8Group * in.blocks * 4;
    in.scales += kInt8Group * in.blocks;
  }
  if (tokens == 3) add_int8_block<Quad, 3>(block, in, at, out);
  else if (tokens == 2) add_int8_block<Quad, 2>(block, in, at, out);
  else if (tokens == 1) add_int8_block<Quad, 1>(block, in, at, out);
}

template <int kFormat>
NOINLINE static void int8_products(const PanelJob& job) {
  using Decoder = typename DecoderOf<kFormat>::type;
  using Quad = Quads<Decoder>;
  constexpr FormatInfo info = kFormats[kFormat];
  Decoder decoder{};
  Int8Block<Quad> block;
  const ptrdiff_t blocks = job.k / kBlock;
  const Int8Inputs in{job.x8.q, job.x8.sums, job.x8.scales, job.k, blocks};
  const uint8_t* weights = job.weights;
  float* sums = job.scratch;
  for (int e = 0; e < job.tokens * kPanel; e += W) store(sums + e, zero());
  for (int at = 0; at < blocks; ++at, weights += info.block_bytes) {
    if (Decoder::kHasHeader && at % kSuper == 0) {
      decoder.header(weights);
      weights += info.header_bytes;
    }
    for (int line = 0; line < info.block_bytes; line += 64) prefetch(weights + kPrefetch + line);
    decoder.open(weights);
    Decoder half = decoder;  // of the second half's scales, where there are two
    if constexpr (Quad::kScales == 2) half.open_half(1);
#pragma GCC unroll 4
    for (int first = 0; first < P; first += kTogether) {
      for (int p = 0; p < kTogether; ++p) {
        Quad::unpack(decoder, first + p, block.w[p]);
        if constexpr (Int8Block<Quad>::kSigned)
          for (int quad = 0; quad < 8; ++quad) block.w[p][quad] = unbias(block.w[p][quad]);
        block.d[0][p] = decoder.d[first + p];
        if constexpr (Quad::kScales == 2) block.d[1][p] = half.d[first + p];
        if constexpr (Quad::kHasMin) block.m[p] = decoder.m[first + p];
      }
      add_int8_tokens(block, in, at, job.tokens, sums + first * W);
    }
  }
  for (int t = 0; t < job.tokens; ++t) {
    f total[P];
    for (int p = 0; p < P; ++p) total[p] = load(sums + t * kPanel + p * W);
    finish(job, t, total);
  }
}

// Rounds a token to bytes.
static void quantize_int8(const float* x, int k, int8_t* q, float* sums, float* scales) {
  for (int block = 0; block < k; block += kBlock, q += kBlock, sums += 4, ++scales) {
    float inverse;
    const bool finite = integer_scale(x + block, kBlock, kLargest8, scales, &inverse);
    int32_t halves[2] = {0, 0};
    for (int e = 0; e < kBlock; e += W) {
      const i rounded = finite ? round_words(mul(load(x + block + e), set1(inverse))) : zero_words();
      store_bytes(reinterpret_cast<uint8_t*>(q) + e, rounded);
      halves[e / 16] += reduce_add_words(rounded);
    }
    const int32_t offsets[3] = {32 * halves[0], 32 * halves[1], 128 * (halves[0] + halves[1])};
    __builtin_memcpy(sums, offsets, sizeof offsets);
    sums[3] = *scales * static_cast<float>(halves[0] + halves[1]);
  }
}

using Int8Function = void (*)(const PanelJob&);

struct Int8Table {
  Int8Function of[kNumFormats];
  void fill() {
    of[Q4_0] = int8_products<Q4_0>, of[Q4_1] = int8_products<Q4_1>, of[Q5_0] = int8_products<Q5_0>;
    of[Q5_1] = int8_products<Q5_1>, of[Q8_0] = int8_products<Q8_0>, of[I8] = int8_products<I8>;
    of[Q4_K] = int8_products<Q4_K>, of[Q5_K] = int8_products<Q5_K>, of[Q6_K] = int8_products<Q6_K>;
    of[Q4_64] = int8_products<Q4_64>, of[Q8_64] = int8_products<Q8_64>;
  }
};
static Int8Table kInt8;

static void int8_panel(const PanelJob& whole) {
  PanelJob job = whole;
  for (int left = whole.tokens; left > 0; left -= job.tokens) {
    job.tokens = left < kInt8Pass ? left : kInt8Pass;
    kInt8.of[job.format](job);
    job.x8.q += static_cast<ptrdiff_t>(job.tokens) * job.k;
    job.x8.sums += static_cast<ptrdiff_t>(job.tokens) * (job.k / kBlock) * 4;
    job.x8.scales += static_cast<ptrdiff_t>(job.tokens) * (job.k / kBlock);
    job.out += job.tokens * job.out_stride;
  }
}
static_assert(kInt8Pass <= kStretch + kMaxPass, "linear_scratch() serves both");
