// A panel of quantised weights times some tokens in 16-bit integers, for processors whose dot products take bytes: the
// arithmetic of linear16.h, with the same bits. Included inside a code path's namespace.
//
// An input q is 256 * high + low, two signed bytes, and a weight is an unsigned byte (less a constant, which is taken
// off by the sum of the inputs). Four products are summed into 32 bits at once, so two planes cost what 16-bit products
// of pairs cost, but bytes come out of packed words with half the work. All 32 k of a block for all 32 outputs fit
// half of the registers: they are unpacked once for as many tokens as there are, which go by in groups: of four, and where
// there are many of six, if registers do for that; a group's sums are chains of 16 products, too few of which would wait.

// One block in registers. d: of each of the block's scales.
template <class Plane>
struct PlaneBlock {
  i w[P][8];
  f d[Plane::kScales][P], m[P];
};

template <int kFormat>
INLINE const uint8_t* open_planes(const uint8_t* weights, typename DecoderOf<kFormat>::type& decoder,
                                  PlaneBlock<Quads<typename DecoderOf<kFormat>::type>>& block) {
  using Plane = Quads<typename DecoderOf<kFormat>::type>;
  constexpr FormatInfo info = kFormats[kFormat];
  for (int line = 0; line < info.block_bytes; line += 64) prefetch(weights + kPrefetch + line);
  decoder.open(weights);
  for (int p = 0; p < P; ++p) {
    Plane::unpack(decoder, p, block.w[p]);
    block.d[0][p] = decoder.d[p];
  }
  if constexpr (Plane::kScales == 2) {
    decoder.open_half(1);
    for (int p = 0; p < P; ++p) block.d[1][p] = decoder.d[p];
  }
  if constexpr (Plane::kHasMin)
    for (int p = 0; p < P; ++p) block.m[p] = decoder.m[p];
  return weights + info.block_bytes;
}

// What a group of tokens reads of a block: its planes [tokens][64], and four words a token: what a weight's offset adds to
// the first half (times 32, a whole number), to the second half, to both (times 128), and the sum of all q as a float32.
// A block's tokens lie together: tokens whose blocks lay together would be as many lines, and pages, apart.
struct PlaneInputs {
  const int8_t* q;
  const float* sums;
};

// Adds a block's products to the parts of kTokens tokens [tokens][32], which begin with the stretch's first block.
template <class Plane, bool kFirst, int kTokens>
INLINE void add_block(const PlaneBlock<Plane>& block, const PlaneInputs& in, float* parts) {
  constexpr bool kApart = kTokens <= 3;  // few chains of sums: twice as many, since their latency would show
  constexpr int kQuads = 8 / Plane::kScales;
#pragma GCC unroll 2
  for (int part = 0; part < Plane::kScales; ++part) {
    i dots[kTokens][P], lows[kTokens][P];
    for (int t = 0; t < kTokens; ++t)
      for (int p = 0; p < P; ++p) dots[t][p] = lows[t][p] = zero_words();
#pragma GCC unroll 8
    for (int quad = part * kQuads; quad < (part + 1) * kQuads; ++quad)
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const i x = quad_everywhere(in.q + t * 64 + 4 * quad);
        for (int p = 0; p < P; ++p) dots[t][p] = dot8(dots[t][p], block.w[p][quad], x);
      }
    for (int t = 0; t < kTokens; ++t) {
      for (int p = 0; p < P; ++p) dots[t][p] = shift_left(dots[t][p], 8);
    }
#pragma GCC unroll 8
    for (int quad = part * kQuads; quad < (part + 1) * kQuads; ++quad)
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const i x = quad_everywhere(in.q + t * 64 + 32 + 4 * quad);
        for (int p = 0; p < P; ++p) {
          i& sum = kApart ? lows[t][p] : dots[t][p];
          sum = dot8(sum, block.w[p][quad], x);
        }
      }
    asm volatile("" ::: "memory");  // parts are not to be loaded earlier: there is no register for them
    for (int t = 0; t < kTokens; ++t) {
      const float* sums = in.sums + t * 4;
      i offset = zero_words();
      if constexpr (Plane::kOffset != 0) offset = word_everywhere(sums + (Plane::kScales == 2 ? part : 2));
      f sum = zero();
      if constexpr (Plane::kHasMin) sum = set1(sums[3]);
      for (int p = 0; p < P; ++p) {
        if (kApart) dots[t][p] = add_words(dots[t][p], lows[t][p]);
        if constexpr (Plane::kOffset != 0) dots[t][p] = sub_words(dots[t][p], offset);
        float* to = parts + t * kPanel + p * W;
        f value = fma(block.d[part][p], to_floats(dots[t][p]), kFirst && part == 0 ? zero() : load(to));
        if constexpr (Plane::kHasMin) value = fma(block.m[p], sum, value);
        store(to, value);
      }
    }
  }
}

constexpr int kPlanePass = 128;  // tokens of a pass over the panel
constexpr int kMany = 12;        // tokens from which larger groups pay

// out = scale * parts, added to what earlier stretches of k left in `sums`.
INLINE void add_stretch(const PanelJob& job, int stretch, const float* parts, float* sums) {
  const ptrdiff_t stretches = (job.k + 255) / 256;
  for (int t = 0; t < job.tokens; ++t) {
    const f scale = set1(job.x16.scales[static_cast<ptrdiff_t>(stretch) * job.all_tokens + t]);
    f total[P];
    for (int p = 0; p < P; ++p) {
      float* kept = sums + t * kPanel + p * W;
      total[p] = fma(scale, load(parts + t * kPanel + p * W), stretch ? load(kept) : zero());
      if (stretch + 1 < stretches) store(kept, total[p]);
    }
    if (stretch + 1 == stretches) finish(job, t, total);
  }
}

// A block for all tokens.
template <class Plane, bool kFirst, int kGroup>
INLINE void add_tokens(const PlaneBlock<Plane>& block, PlaneInputs in, int tokens, float* parts) {
  for (; tokens >= kGroup; tokens -= kGroup, parts += kGroup * kPanel) {
    add_block<Plane, kFirst, kGroup>(block, in, parts);
    in.q += kGroup * 64;
    in.sums += kGroup * 4;
  }
  if (kGroup > 5 && tokens == 5) add_block<Plane, kFirst, 5>(block, in, parts);
  else if (kGroup > 4 && tokens == 4) add_block<Plane, kFirst, 4>(block, in, parts);
  else if (tokens == 3) add_block<Plane, kFirst, 3>(block, in, parts);
  else if (tokens == 2) add_block<Plane, kFirst, 2>(block, in, parts);
  else if (tokens == 1) add_block<Plane, kFirst, 1>(block, in, parts);
}

template <int kFormat, int kGroup>
NOINLINE static void planes(const PanelJob& job) {
  using Decoder = typename DecoderOf<kFormat>::type;
  using Plane = Quads<Decoder>;
  Decoder decoder{};
  PlaneBlock<Plane> block;
  const PlaneInputs in{reinterpret_cast<const int8_t*>(job.x16.q), job.x16.sums};
  const auto of_block = [&](ptrdiff_t at) { return PlaneInputs{in.q + at * job.all_tokens * 64, in.sums + at * job.all_tokens * 4}; };
  const uint8_t* weights = job.weights;
  float *parts = job.scratch, *sums = job.scratch + kPlanePass * kPanel;
  for (int at = 0; at < job.k / kBlock;) {
    if (Decoder::kHasHeader) {
      decoder.header(weights);
      weights += kFormats[kFormat].header_bytes;
    }
    const int stretch = at / kSuper, end = job.k / kBlock - at < kSuper ? job.k / kBlock : at + kSuper;
    weights = open_planes<kFormat>(weights, decoder, block);
    add_tokens<Plane, true, kGroup>(block, of_block(at), job.tokens, parts);
    for (++at; at < end; ++at) {
      weights = open_planes<kFormat>(weights, decoder, block);
      add_tokens<Plane, false, kGroup>(block, of_block(at), job.tokens, parts);
    }
    add_stretch(job, stretch, parts, sums);
  }
}

// Rounds a token to 16-bit integers: a block's 32 high bytes, then its 32 low ones. 127 * 256 + 127 is the largest.
static void quantize_planes(const float* x, int k, int token, int tokens, const Tokens16& to) {
  uint8_t* q = reinterpret_cast<uint8_t*>(to.q) + static_cast<ptrdiff_t>(token) * 64;
  float *sums = to.sums + static_cast<ptrdiff_t>(token) * 4, *scales = to.scales + token;
  for (int start = 0; start < k; start += kBlock * kSuper) {
    const int count = k - start < kBlock * kSuper ? k - start : kBlock * kSuper;
    float inverse;
    const bool finite = scale16(x + start, count, scales, &inverse);
    scales += tokens;
    for (int block = start; block < start + count; block += kBlock, q += ptrdiff_t{64} * tokens, sums += ptrdiff_t{4} * tokens) {
      int32_t halves[2];
      for (int half = 0; half < 2; ++half) {
        const i rounded =
            finite ? round_words(mul(load(x + block + half * W), set1(inverse))) : zero_words();
        const i high = shift_right_signed(add_words(rounded, words_everywhere(128)), 8);
        store_bytes(q + half * W, high);
        store_bytes(q + kBlock + half * W, rounded);  // the lowest byte of each
        halves[half] = reduce_add_words(rounded);
      }
      store_offsets(sums, halves[0], halves[1]);
      sums[3] = static_cast<float>(halves[0] + halves[1]);
    }
  }
}

using PlanesFunction = void (*)(const PanelJob&);

struct PlanesTable {
  PlanesFunction few[kNumFormats], many[kNumFormats];
  template <int kFormat>
  void add() {
    few[kFormat] = planes<kFormat, 4>;
    many[kFormat] = planes<kFormat, Quads<typename DecoderOf<kFormat>::type>::kMost>;
  }
  void fill() {
    add<Q4_0>(), add<Q4_1>(), add<Q5_0>(), add<Q5_1>(), add<Q8_0>(), add<Q4_K>(), add<Q5_K>(), add<Q6_K>();
    add<I8>(), add<Q4_64>(), add<Q8_64>();
  }
};
static PlanesTable kPlanes;

static void planes_panel(const PanelJob& whole) {
  PanelJob job = whole;
  for (int left = whole.tokens; left > 0; left -= job.tokens) {
    job.tokens = left < kPlanePass ? left : kPlanePass;
    (job.tokens < kMany ? kPlanes.few : kPlanes.many)[job.format](job);
    job.x16.q += job.tokens * 32;
    job.x16.sums += job.tokens * 4;
    job.x16.scales += job.tokens;
    job.out += job.tokens * job.out_stride;
  }
}
static_assert(W == kBlock / 2, "a half of a block is one vector");
static_assert(2 * kPlanePass <= kStretch + kMaxPass, "linear_scratch() serves both");
