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

// What a group of tokens reads of a block: [tokens][32], [tokens][4], [tokens]. sums: four words as in planes.h, but the
// last is the sum of all q times their scale.
struct Int8Inputs {
  const int8_t* q;
  const float *sums, *scales;
};

// Adds a block's products to the sums of kTokens tokens [tokens][32].
template <class Quad, int kTokens>
INLINE void add_int8_block(const Int8Block<Quad>& block, const Int8Inputs& in, float* out) {
  constexpr int kQuads = 8 / Quad::kScales;
  constexpr bool kSigned = Int8Block<Quad>::kSigned, kOffset = Quad::kOffset != 0 && !kSigned;
#pragma GCC unroll 2
  for (int part = 0; part < Quad::kScales; ++part) {
    i dots[kTokens][kTogether];
    for (int t = 0; t < kTokens; ++t)
      for (int p = 0; p < kTogether; ++p) dots[t][p] = zero_words();
#pragma GCC unroll 8
    for (int quad = part * kQuads; quad < (part + 1) * kQuads; ++quad)
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        const i x = quad_everywhere(in.q + t * kBlock + 4 * quad);
        for (int p = 0; p < kTogether; ++p) {
          if constexpr (kSigned) dots[t][p] = dot8_signed(dots[t][p], block.w[p][quad], x);
          else dots[t][p] = dot8(dots[t][p], block.w[p][quad], x);
        }
      }
    asm volatile("" ::: "memory");  // sums are not to be loaded earlier: there is no register for them
    for (int t = 0; t < kTokens; ++t) {
      const float* sums = in.sums + t * 4;
      const f scale = set1(in.scales[t]);
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
INLINE void add_int8_tokens(const Int8Block<Quad>& block, Int8Inputs in, int tokens, float* out) {
  for (; tokens >= kInt8Group; tokens -= kInt8Group, out += kInt8Group * kPanel) {
    add_int8_block<Quad, kInt8Group>(block, in, out);
    in.q += kInt8Group * kBlock;
    in.sums += kInt8Group * 4;
    in.scales += kInt8Group;
  }
  if (tokens == 3) add_int8_block<Quad, 3>(block, in, out);
  else if (tokens == 2) add_int8_block<Quad, 2>(block, in, out);
  else if (tokens == 1) add_int8_block<Quad, 1>(block, in, out);
}

template <int kFormat>
NOINLINE static void int8_products(const PanelJob& job) {
  using Decoder = typename DecoderOf<kFormat>::type;
  using Quad = Quads<Decoder>;
  constexpr FormatInfo info = kFormats[kFormat];
  Decoder decoder{};
  Int8Block<Quad> block;
  const ptrdiff_t blocks = job.k / kBlock;
  const uint8_t* weights = job.weights;
  float* sums = job.scratch;
  for (int e = 0; e < job.tokens * kPanel; e += W) store(sums + e, zero());
  for (int at = 0; at < blocks; ++at, weights += info.block_bytes) {
    if (Decoder::kHasHeader && at % kSuper == 0) {
      decoder.header(weights);
      weights += info.header_bytes;
    }
    for (int line = 0; line < info.block_bytes; line += 64) prefetch(weights + kPrefetch + line);
    const ptrdiff_t before = at * job.all_tokens;
    const Int8Inputs in{job.x8.q + before * kBlock, job.x8.sums + before * 4, job.x8.scales + before};
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
      add_int8_tokens(block, in, job.tokens, sums + first * W);
    }
  }
  for (int t = 0; t < job.tokens; ++t) {
    f total[P];
    for (int p = 0; p < P; ++p) total[p] = load(sums + t * kPanel + p * W);
    finish(job, t, total);
  }
}

// Rounds a token to bytes, in steps that each do one thing for many blocks: what a block waits for, others fill.
static void quantize_int8(const float* x, int k, int token, int tokens, const Tokens8& to) {
  constexpr int kMost = 64;
  int8_t* q = to.q + static_cast<ptrdiff_t>(token) * kBlock;
  float *sums = to.sums + static_cast<ptrdiff_t>(token) * 4, *scales = to.scales + token;
  const ptrdiff_t step = tokens;
  for (int start = 0; start < k; start += kMost * kBlock) {
    const int count = (k - start < kMost * kBlock ? k - start : kMost * kBlock) / kBlock;
    float largest[kMost], scale[kMost], inverse[kMost];
    for (int block = 0; block < count; ++block) {
      i most = zero_words();  // of the bits without the sign, in whose order infinities and NaN come last
      for (int e = 0; e < kBlock; e += W) most = max_words(most, magnitude(load(x + start + block * kBlock + e)));
      const int32_t bits = reduce_max_words(most);
      __builtin_memcpy(largest + block, &bits, 4);
    }
    for (int block = 0; block < count; ++block) {
      const bool finite = largest[block] < __builtin_inff(), some = finite && largest[block] >= 1e-30f;
      inverse[block] = some ? kLargest8 / largest[block] : 0.0f;
      scale[block] = some ? largest[block] / kLargest8 : finite ? 0.0f : __builtin_nanf("");
    }
    for (int block = 0; block < count; ++block, q += step * kBlock, sums += step * 4, scales += step) {
      const float* at = x + start + block * kBlock;
      int32_t halves[2] = {0, 0};
      for (int e = 0; e < kBlock; e += W) {
        const bool finite = scale[block] == scale[block];
        const i rounded = finite ? round_words(mul(load(at + e), set1(inverse[block]))) : zero_words();
        halves[e / 16] += store_bytes_and_sum(reinterpret_cast<uint8_t*>(q) + e, rounded);
      }
      store_offsets(sums, halves[0], halves[1]);
      sums[3] = scale[block] * static_cast<float>(halves[0] + halves[1]);
      *scales = scale[block];
    }
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
    job.x8.q += job.tokens * kBlock;
    job.x8.sums += job.tokens * 4;
    job.x8.scales += job.tokens;
    job.out += job.tokens * job.out_stride;
  }
}
static_assert(kInt8Pass <= kStretch + kMaxPass, "linear_scratch() serves both");
