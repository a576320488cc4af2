// A panel of quantised weights times some tokens in 16-bit integers: the arithmetic of the default mode, here with
// products of pairs (planes.h: of bytes). Included inside a code path's namespace.
//
// A token's inputs are rounded to 16-bit integers under one scale for 256 k (relative to the largest of them, 2^-16), a
// block of 32 products is summed exactly in 32 bits (15 * 32639 * 32 and 128 * 32639 * 32 both fit), and a block's sum is
// scaled and added in float32:
//
//   part = fma(d, sum of q_w * q_x, part);  part = fma(m, sum of q_x, part)     each block of 32 (Q6_K: of 16) k
//   out  = fma(scale, part, out)                                                 each 256 k
//
// Integers have no rounding to depend on, and the float32 operations of an output are this chain whatever company the
// token keeps, so its bits do not change with the number of tokens. Weights are never rounded.

template <class Decoder>
struct Pairs;  // pair(z, j, p): sixteen-bit weights k = 8z + pair j of kernels.h, as W pairs

template <bool kHigh, class Decoder>
struct NibblePairs {
  static constexpr bool kHasMin = true;
  static constexpr int kScales = 1;  // of a block
  INLINE static void word(Decoder& decoder, int z) { decoder.word(z); }
  INLINE static i pair(const Decoder& decoder, int z, int j, int p) {
    const i low = and_word(shift_right(decoder.w[p], 4 * j), 0x000F000F);
    if constexpr (!kHigh) return low;
    else
      return or_words(low, shift_left(and_word(shift_right(decoder.high[p], 8 * (j / 2) + 2 * z + j % 2), 0x00010001), 4));
  }
};
template <bool kHigh, bool kSymmetric>
struct Pairs<Nibbles<kHigh, kSymmetric>> : NibblePairs<kHigh, Nibbles<kHigh, kSymmetric>> {};
template <bool kHigh>
struct Pairs<NibblesK<kHigh>> : NibblePairs<kHigh, NibblesK<kHigh>> {};
template <>
struct Pairs<GroupNibbles> : NibblePairs<false, GroupNibbles> {};

template <>
struct Pairs<SixBits> {
  static constexpr bool kHasMin = false;
  static constexpr int kScales = 2;
  INLINE static void word(SixBits& decoder, int z) { decoder.word(z); }
  INLINE static i pair(const SixBits& decoder, int z, int j, int p) {
    const i low = and_word(shift_right(decoder.w[p], 4 * j), 0x000F000F);
    const i high = shift_left(and_word(shift_right(decoder.high[p], 8 * (j / 2) + 4 * (z % 2) + 2 * (j % 2)), 0x00030003), 4);
    return sub16(or_words(low, high), 0x00200020);
  }
};

template <class Decoder>
struct BytePairs {
  static constexpr bool kHasMin = false;
  static constexpr int kScales = 1;
  // A word of bytes is four k, so a word here is two of them; pairs 0 and 2 come from the first.
  INLINE static void word(Decoder&, int) {}
  INLINE static i pair(const Decoder& decoder, int z, int j, int p) {
    const i w = unbias(words(decoder.at + (group_of(p) * 8 + 2 * z + j % 2) * 64 + within(p)));
    return j < 2 ? low_bytes(w) : high_bytes(w);
  }
};
template <bool kWide>
struct Pairs<Bytes<kWide>> : BytePairs<Bytes<kWide>> {};
template <>
struct Pairs<GroupBytes> : BytePairs<GroupBytes> {};

// Rounds a token to 16-bit integers, in the order of pairs: [tokens][k].
static void quantize16(const float* x, int k, int token, int, const Tokens16& to) {
  int16_t* q = to.q + static_cast<ptrdiff_t>(token) * k;
  float* sums = to.sums + static_cast<ptrdiff_t>(token) * (k / kBlock) * 4;
  float* scales = to.scales + static_cast<ptrdiff_t>(token) * ((k + 255) / 256);
  for (int start = 0; start < k; start += kBlock * kSuper) {
    const int count = k - start < kBlock * kSuper ? k - start : kBlock * kSuper;
    float inverse;
    const bool finite = scale16(x + start, count, scales++, &inverse);
    for (int block = start; block < start + count; block += kBlock) {
      i sum = zero_words();
      for (int e = 0; e < kBlock; e += W) {
        const i rounded = finite ? round_words(mul(load(x + block + e), set1(inverse))) : zero_words();
        sum = add_words(sum, rounded);
        store_in_pairs(q + block + e, rounded);
      }
      *sums++ = reduce_add(to_floats(sum));  // whole numbers below 2^24: exact in any order
    }
  }
}

// What is left to do with a token's block: the pointers move on with k.
template <int kTokens>
struct Rows16 {
  const int16_t* q[kTokens];
  const float *sums[kTokens], *scales[kTokens];
  INLINE Rows16(const PanelJob& job, int first, int k0) {
    for (int t = 0; t < kTokens; ++t) {
      const ptrdiff_t token = first + t;
      q[t] = job.x16.q + token * job.k + k0;
      sums[t] = job.x16.sums + token * (job.k / kBlock) * 4 + k0 / kBlock;
      scales[t] = job.x16.scales + token * ((job.k + 255) / 256) + k0 / 256;
    }
  }
};

template <int kFormat, int kTokens>
NOINLINE static void direct16(const PanelJob& job, int first) {
  using Decoder = typename DecoderOf<kFormat>::type;
  using Pair = Pairs<Decoder>;
  constexpr FormatInfo info = kFormats[kFormat];
  Decoder decoder{};
  const Rows16<kTokens> rows(job, first, 0);
  const uint8_t* weights = job.weights;
  f sums[kTokens][P], parts[kTokens][P];
  for (int t = 0; t < kTokens; ++t)
    for (int p = 0; p < P; ++p) sums[t][p] = zero();
  for (int k0 = 0; k0 < job.k; k0 += kBlock * kSuper) {
    const int end = job.k - k0 < kBlock * kSuper ? job.k : k0 + kBlock * kSuper;
    if (Decoder::kHasHeader) {
      decoder.header(weights);
      weights += info.header_bytes;
    }
    for (int t = 0; t < kTokens; ++t)
      for (int p = 0; p < P; ++p) parts[t][p] = zero();
    for (int k = k0; k < end; k += kBlock, weights += info.block_bytes) {
      for (int line = 0; line < info.block_bytes; line += 64) prefetch(weights + kPrefetch + line);
      decoder.open(weights);
      i dots[kTokens][P];
      for (int z = 0; z < 4; ++z) {
        if (z == 0 || (Pair::kScales == 2 && z == 2))
          for (int t = 0; t < kTokens; ++t)
            for (int p = 0; p < P; ++p) dots[t][p] = zero_words();
        Pair::word(decoder, z);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          i w[P];
          for (int p = 0; p < P; ++p) w[p] = Pair::pair(decoder, z, j, p);
#pragma GCC unroll 16
          for (int t = 0; t < kTokens; ++t) {
            const i x = pair_everywhere(rows.q[t] + k + 8 * z + 2 * j);
            for (int p = 0; p < P; ++p) dots[t][p] = dot16(dots[t][p], w[p], x);
          }
        }
        if (z == 3 || (Pair::kScales == 2 && z == 1))
          for (int t = 0; t < kTokens; ++t)
            for (int p = 0; p < P; ++p) parts[t][p] = fma(decoder.d[p], to_floats(dots[t][p]), parts[t][p]);
      }
      if constexpr (Pair::kHasMin)
        for (int t = 0; t < kTokens; ++t) {
          const f sum = set1(rows.sums[t][k / kBlock]);
          for (int p = 0; p < P; ++p) parts[t][p] = fma(decoder.m[p], sum, parts[t][p]);
        }
    }
    for (int t = 0; t < kTokens; ++t) {
      const f scale = set1(rows.scales[t][k0 / 256]);
      for (int p = 0; p < P; ++p) sums[t][p] = fma(scale, parts[t][p], sums[t][p]);
    }
  }
  for (int t = 0; t < kTokens; ++t) finish(job, first + t, sums[t]);
}

// A stretch of 256 k unpacked: [8 blocks][16 pairs][P] words, then d [8][kScales][32] and m [8][32].
struct Stretch16 {
  uint8_t* pairs;
  float *d, *m;
};
constexpr int kPairBytes = kPanel * 4;                             // one pair of all outputs
constexpr int kStretch16Floats = kSuper * (16 * kPanel + 3 * kPanel);

template <int kFormat>
NOINLINE static const uint8_t* decode16(const uint8_t* weights, int count, const Stretch16& out) {
  using Decoder = typename DecoderOf<kFormat>::type;
  using Pair = Pairs<Decoder>;
  constexpr FormatInfo info = kFormats[kFormat];
  Decoder decoder{};
  if (Decoder::kHasHeader) {
    decoder.header(weights);
    weights += info.header_bytes;
  }
  for (int block = 0; block < count / kBlock; ++block, weights += info.block_bytes) {
    for (int line = 0; line < info.block_bytes; line += 64) prefetch(weights + kPrefetch + line);
    decoder.open(weights);
    for (int z = 0; z < 4; ++z) {
      Pair::word(decoder, z);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        for (int p = 0; p < P; ++p)
          store_words(reinterpret_cast<int32_t*>(out.pairs + (block * 16 + 4 * z + j) * kPairBytes + p * W * 4),
                      Pair::pair(decoder, z, j, p));
      if (z % 2 == 1 && (z == 3 || Pair::kScales == 2))
        for (int p = 0; p < P; ++p)
          store(out.d + (block * 2 + (Pair::kScales == 2 ? z / 2 : 0)) * kPanel + p * W, decoder.d[p]);
    }
    if constexpr (Pair::kHasMin)
      for (int p = 0; p < P; ++p) store(out.m + block * kPanel + p * W, decoder.m[p]);
  }
  return weights;
}

template <int kScales, bool kHasMin, int kTokens>
NOINLINE static void tile16(const PanelJob& job, const Stretch16& in, int k0, int count, int first, float* partial) {
  const Rows16<kTokens> rows(job, first, k0);
  f parts[kTokens][P];
  for (int t = 0; t < kTokens; ++t)
    for (int p = 0; p < P; ++p) parts[t][p] = zero();
  for (int block = 0; block < count / kBlock; ++block) {
    for (int part = 0; part < kScales; ++part) {
      i dots[kTokens][P];
      for (int t = 0; t < kTokens; ++t)
        for (int p = 0; p < P; ++p) dots[t][p] = zero_words();
      constexpr int kPairs = 16 / kScales;
      const uint8_t* weights = in.pairs + (block * 16 + part * kPairs) * kPairBytes;
      const int at = block * kBlock + part * kPairs * 2;
#pragma GCC unroll 4
      for (int pair = 0; pair < kPairs; ++pair) {
        i w[P];
        for (int p = 0; p < P; ++p) w[p] = words(weights + pair * kPairBytes + p * W * 4);
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) {
          const i x = pair_everywhere(rows.q[t] + at + 2 * pair);
          for (int p = 0; p < P; ++p) dots[t][p] = dot16(dots[t][p], w[p], x);
        }
      }
      for (int p = 0; p < P; ++p) {
        const f d = load(in.d + (block * 2 + part) * kPanel + p * W);
        for (int t = 0; t < kTokens; ++t) parts[t][p] = fma(d, to_floats(dots[t][p]), parts[t][p]);
      }
    }
    if (kHasMin)
      for (int p = 0; p < P; ++p) {
        const f m = load(in.m + block * kPanel + p * W);
        for (int t = 0; t < kTokens; ++t) parts[t][p] = fma(m, set1(rows.sums[t][block]), parts[t][p]);
      }
  }
  const bool last = k0 + count == job.k;
  for (int t = 0; t < kTokens; ++t) {
    f sums[P];
    const f scale = set1(rows.scales[t][0]);
    float* kept = partial + (first + t) * kPanel;
    for (int p = 0; p < P; ++p) sums[p] = fma(scale, parts[t][p], k0 ? load(kept + p * W) : zero());
    if (last) finish(job, first + t, sums);
    else
      for (int p = 0; p < P; ++p) store(kept + p * W, sums[p]);
  }
}

using Tile16Function = void (*)(const PanelJob&, const Stretch16&, int, int, int, float*);
using Decode16Function = const uint8_t* (*)(const uint8_t*, int, const Stretch16&);

struct Linear16Table {
  Tile16Function tiles[kNumFormats][kMaxTokens16 + 1];
  DirectFunction directs[kNumFormats][kMaxDirect16 + 1];
  Decode16Function decoders[kNumFormats];

  template <int kFormat, int kTokens>
  void add() {
    using Pair = Pairs<typename DecoderOf<kFormat>::type>;
    if constexpr (kTokens <= kMaxTokens16) tiles[kFormat][kTokens] = tile16<Pair::kScales, Pair::kHasMin, kTokens>;
    if constexpr (kTokens <= kMaxDirect16) directs[kFormat][kTokens] = direct16<kFormat, kTokens>;
    if constexpr (kTokens > 1) add<kFormat, kTokens - 1>();
  }
  template <int kFormat>
  void add_format() {
    add<kFormat, (kMaxTokens16 > kMaxDirect16 ? kMaxTokens16 : kMaxDirect16)>();
    decoders[kFormat] = decode16<kFormat>;
  }
  void fill() {
    add_format<Q4_0>(), add_format<Q4_1>(), add_format<Q5_0>(), add_format<Q5_1>(), add_format<Q8_0>();
    add_format<Q4_K>(), add_format<Q5_K>(), add_format<Q6_K>(), add_format<I8>();
    add_format<Q4_64>(), add_format<Q8_64>();
  }
};
static Linear16Table kLinear16;

static void linear16_panel(const PanelJob& whole) {
  if (whole.tokens < kUnpackFrom16) {
    const int passes = (whole.tokens + kMaxDirect16 - 1) / kMaxDirect16;
    for (int t = 0, first = 0; t < passes; ++t) {  // all but the first find the panel in the cache
      const int size = (whole.tokens - first + passes - t - 1) / (passes - t);
      kLinear16.directs[whole.format][size](whole, first);
      first += size;
    }
    return;
  }
  for (int start = 0; start < whole.tokens; start += kMaxPass) {
    PanelJob job = whole;
    job.tokens = whole.tokens - start < kMaxPass ? whole.tokens - start : kMaxPass;
    job.x16.q += static_cast<ptrdiff_t>(start) * job.k;
    job.x16.sums += static_cast<ptrdiff_t>(start) * (job.k / kBlock) * 4;
    job.x16.scales += static_cast<ptrdiff_t>(start) * ((job.k + 255) / 256);
    job.out += start * job.out_stride;
    const Stretch16 stretch{reinterpret_cast<uint8_t*>(job.scratch), job.scratch + kSuper * 16 * kPanel,
                            job.scratch + kSuper * 18 * kPanel};
    float* partial = job.scratch + kStretch16Floats;
    const uint8_t* weights = job.weights;
    const int num_tiles = (job.tokens + kMaxTokens16 - 1) / kMaxTokens16;
    for (int k0 = 0; k0 < job.k; k0 += kBlock * kSuper) {
      const int count = job.k - k0 < kBlock * kSuper ? job.k - k0 : kBlock * kSuper;
      weights = kLinear16.decoders[job.format](weights, count, stretch);
      for (int t = 0, first = 0; t < num_tiles; ++t) {
        const int size = (job.tokens - first + num_tiles - t - 1) / (num_tiles - t);
        kLinear16.tiles[job.format][size](job, stretch, k0, count, first, partial);
        first += size;
      }
    }
  }
}
static_assert(kStretch16Floats <= kStretch * kPanel, "linear_scratch() serves both");
