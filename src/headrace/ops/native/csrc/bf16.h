// A panel of weights times some tokens in bfloat16, on tiles (tiles_amx.h, or tiles_emulated.h in its place). Included
// inside a code path's namespace, after its vector header, its decoders and its tiles.
//
// Inputs and decoded weights are rounded to bfloat16, products and sums are float32. An output of a token is the sum of
// what each 32 k give, added in their order; how a tile sums its 32 k is the processor's own order, always the same. Rows
// of a tile do not meet, and a sum that leaves its tile for memory comes back as it was. So a token's result has the same
// bits at any number of tokens, and prefill equals decode.
//
// Inputs lie in tiles of 16 tokens, [tiles][blocks of 32 k][16][32], in the order of k that weights have (bf16_weights.h),
// times 2^64. That is taken off the sums; it makes room for weights that are too small by 2^112.

constexpr int kTileNumbers = 512;
constexpr int kDirect = 2;                   // tokens for which no tiles are filled
constexpr int kFew = 32;                     // tokens whose sums stay in tiles for the whole of k
constexpr int kRing = 4, kLag = 2;           // unpacked blocks kept; blocks that unpacking is ahead of multiplying
constexpr int kStretch = 12;                 // most blocks unpacked at once for more tokens: 24 KiB
constexpr int kPass = 1024;                  // tokens that share one unpacking
static_assert(W == 16 && P == 2, "a vector is a row of a tile");

static size_t bf16_scratch() { return kStretch * kBlockTiles / sizeof(float) + kPass * kPanel; }

// Sums of tokens first .. first + count - 1 become outputs.
INLINE void finish_bf16(const PanelJob& job, const float* sums, float scale, int first, int count) {
  for (int t = 0; t < count; ++t) {
    float* out = job.out + (first + t) * job.out_stride;
    for (int p = 0; p < P; ++p) {
      const int left = job.valid - p * W;
      if (left <= 0) break;
      f value = mul(load(sums + t * kPanel + p * W), set1(scale));
      if (job.bias) value = add(value, load_n(job.bias + p * W, left));
      store_n(out + p * W, value, left);
    }
  }
}

// Sums are tiles 0 and 1 for the first 16 tokens, 2 and 3 for the others.
template <int kTiles>
INLINE void clear_sums() {
  tile_zero<0>(), tile_zero<1>();
  if constexpr (kTiles == 2) tile_zero<2>(), tile_zero<3>();
}
template <int kTiles>
INLINE void load_sums(const float* from) {
  constexpr ptrdiff_t kRow = kPanel * sizeof(float);
  tile_load<0>(from, kRow), tile_load<1>(from + W, kRow);
  if constexpr (kTiles == 2) tile_load<2>(from + 16 * kPanel, kRow), tile_load<3>(from + 16 * kPanel + W, kRow);
}
template <int kTiles>
INLINE void store_sums(float* to) {
  constexpr ptrdiff_t kRow = kPanel * sizeof(float);
  tile_store<0>(to, kRow), tile_store<1>(to + W, kRow);
  if constexpr (kTiles == 2) tile_store<2>(to + 16 * kPanel, kRow), tile_store<3>(to + 16 * kPanel + W, kRow);
}
template <int kTiles>
INLINE void multiply_block(const uint16_t* first, const uint16_t* second, const uint8_t* weights) {
  tile_load<4>(first, 64);
  tile_load<6>(weights, 64);
  tile_load<7>(weights + kTileBytes, 64);
  if constexpr (kTiles == 2) tile_load<5>(second, 64);
  tile_multiply<0, 4, 6>();
  tile_multiply<1, 4, 7>();
  if constexpr (kTiles == 2) {
    tile_multiply<2, 5, 6>();
    tile_multiply<3, 5, 7>();
  }
}

// Up to 16 (kTiles 1) or 32 tokens: each block is unpacked and multiplied while the next is on its way.
template <int kFormat, int kTiles>
NOINLINE static void few(const PanelJob& job) {
  const int blocks = (job.k + kBlock - 1) / kBlock;
  uint8_t* ring = reinterpret_cast<uint8_t*>(job.scratch);
  float* sums = job.scratch + kRing * kBlockTiles / sizeof(float);
  Blocks<kFormat> weights{job.weights, job.k};
  const uint16_t *first = job.tiles, *second = job.tiles + static_cast<ptrdiff_t>(blocks) * kTileNumbers;
  clear_sums<kTiles>();
  for (int at = 0; at < blocks + kLag; ++at) {
    if (at < blocks) weights.unpack(ring + at % kRing * kBlockTiles);
    if (at < kLag) continue;
    const int due = at - kLag;
    multiply_block<kTiles>(first + due * kTileNumbers, second + due * kTileNumbers, ring + due % kRing * kBlockTiles);
  }
  store_sums<kTiles>(sums);
  finish_bf16(job, sums, Blocks<kFormat>::kScale, 0, job.tokens);
}

// One or two tokens, in registers: what the tiles would do, bit for bit (tiles_emulated.h says what that is), which takes
// less time than filling tiles for so few. x: of each token and block the first numbers of its pairs, then the second.
template <int kFormat, int kTokens>
NOINLINE static void direct_sums(const PanelJob& job, const float* x, float* sums) {
  const int blocks = job.k / kBlock;
  Blocks<kFormat> weights{job.weights, job.k};
  f total[kTokens][P];
  for (int t = 0; t < kTokens; ++t)
    for (int p = 0; p < P; ++p) total[t][p] = zero();
  for (int b = 0; b < blocks; ++b, x += 32) {
    f even[kTokens][P], odd[kTokens][P];
    for (int t = 0; t < kTokens; ++t)
      for (int p = 0; p < P; ++p) even[t][p] = odd[t][p] = zero();
    weights.rows([&](int p, int row, i shifted) __attribute__((always_inline)) {
      const i mask = _mm512_set1_epi32(static_cast<int>(uint32_t{kHalfBits} << 16));
      const f first = _mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(shifted, 16), mask));
      const f second = _mm512_castsi512_ps(_mm512_and_si512(shifted, mask));
#pragma GCC unroll 2
      for (int t = 0; t < kTokens; ++t) {
        even[t][p] = fma(set1(x[t * job.k + row]), first, even[t][p]);
        odd[t][p] = fma(set1(x[t * job.k + 16 + row]), second, odd[t][p]);
      }
    });
    for (int t = 0; t < kTokens; ++t)
      for (int p = 0; p < P; ++p) total[t][p] = add(total[t][p], add(even[t][p], odd[t][p]));
  }
  for (int t = 0; t < kTokens; ++t)
    for (int p = 0; p < P; ++p) store(sums + t * kPanel + p * W, total[t][p]);
}

template <int kFormat>
NOINLINE static void direct(const PanelJob& job) {
  float *sums = job.scratch, *x = job.scratch + kDirect * kPanel;
  for (int t = 0; t < job.tokens; ++t)
    for (int b = 0; b < job.k / kBlock; ++b) {
      const i pairs = _mm512_loadu_si512(job.tiles + b * kTileNumbers + t * 32);
      const i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
      store(x + t * job.k + b * 32, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
      store(x + t * job.k + b * 32 + W, _mm512_castsi512_ps(_mm512_and_si512(pairs, high)));
    }
  const auto sum = job.tokens == 1 ? direct_sums<kFormat, 1> : direct_sums<kFormat, 2>;
  under_tile_rules([&] { sum(job, x, sums); });
  finish_bf16(job, sums, Blocks<kFormat>::kScale, 0, job.tokens);
}

// 16 * kTiles tokens over a stretch of `count` unpacked blocks.
template <int kTiles>
NOINLINE static void stretch(const uint16_t* first, ptrdiff_t apart, const uint8_t* weights, int count, bool begins,
                             float* sums) {
  if (begins) clear_sums<kTiles>();
  else load_sums<kTiles>(sums);
  for (int b = 0; b < count; ++b)
    multiply_block<kTiles>(first + b * kTileNumbers, first + apart + b * kTileNumbers, weights + b * kBlockTiles);
  store_sums<kTiles>(sums);
}

// More tokens: a stretch of the panel is unpacked once, and they go over it. Stretches are of about one length: half of
// the nearest cache, so that weights stay in it while inputs pass through.
template <int kFormat>
NOINLINE static void many(const PanelJob& job) {
  const int blocks = (job.k + kBlock - 1) / kBlock, tiles = (job.tokens + 15) / 16;
  const int stretches = (blocks + kStretch - 1) / kStretch;
  const ptrdiff_t apart = static_cast<ptrdiff_t>(blocks) * kTileNumbers;  // from tile to tile of 16 tokens
  uint8_t* unpacked = reinterpret_cast<uint8_t*>(job.scratch);
  float* sums = job.scratch + kStretch * kBlockTiles / sizeof(float);
  Blocks<kFormat> weights{job.weights, job.k};
  for (int number = 0, start = 0; number < stretches; ++number) {
    const int count = (blocks - start) / (stretches - number);
    for (int b = 0; b < count; ++b) weights.unpack(unpacked + b * kBlockTiles);
    for (int tile = 0; tile < tiles; tile += 2) {
      const uint16_t* x = job.tiles + tile * apart + static_cast<ptrdiff_t>(start) * kTileNumbers;
      float* to = sums + tile * 16 * kPanel;
      if (tile + 1 < tiles) stretch<2>(x, apart, unpacked, count, start == 0, to);
      else stretch<1>(x, apart, unpacked, count, start == 0, to);
      const int left = job.tokens - tile * 16;
      if (number + 1 == stretches) finish_bf16(job, to, Blocks<kFormat>::kScale, tile * 16, left < 32 ? left : 32);
    }
    start += count;
  }
}

struct Bf16Functions {
  void (*direct)(const PanelJob&);  // null: there is none for the format
  void (*one)(const PanelJob&);
  void (*two)(const PanelJob&);
  void (*many)(const PanelJob&);
};
struct Bf16Table {
  Bf16Functions of[kNumFormats];
  template <int kFormat>
  void add_format() {
    void (*no_tiles)(const PanelJob&) = nullptr;
    if constexpr (stays_half(kFormat)) no_tiles = direct<kFormat>;
    of[kFormat] = {no_tiles, few<kFormat, 1>, few<kFormat, 2>, many<kFormat>};
  }
  void fill() {  // F32 is not here: such a matrix is multiplied in float32
    add_format<F16>(), add_format<BF16>(), add_format<Q4_0>(), add_format<Q4_1>(), add_format<Q5_0>();
    add_format<Q5_1>(), add_format<Q8_0>(), add_format<Q4_K>(), add_format<Q5_K>(), add_format<Q6_K>();
    add_format<I8>(), add_format<Q4_64>(), add_format<Q8_64>();
  }
};
static Bf16Table kBf16;

static void bf16_panel(const PanelJob& whole) {
  if (whole.tokens <= 0) return;
  const Bf16Functions& functions = kBf16.of[whole.format];
  const bool fits = static_cast<size_t>(whole.tokens) * whole.k + kDirect * kPanel <= bf16_scratch();
  if (functions.direct && whole.tokens <= kDirect && fits) return functions.direct(whole);
  if (whole.tokens <= kFew) return whole.tokens <= 16 ? functions.one(whole) : functions.two(whole);
  PanelJob job = whole;
  for (int left = whole.tokens; left > 0; left -= job.tokens) {
    job.tokens = left < kPass ? left : kPass;
    functions.many(job);
    job.tiles += static_cast<ptrdiff_t>(job.tokens) * ((job.k + kBlock - 1) / kBlock) * kBlock;
    job.out += job.tokens * job.out_stride;
  }
}
static_assert(kPass % 32 == 0 && kFew == 32, "passes are whole pairs of tiles");

// A token's row of its tile, 32 numbers for every block of k, kTileNumbers apart; behind the last k come zeros.
static void round_bf16(const float* x, int k, uint16_t* row) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  2,  4,  6,  1,  3,  5,  7,  8,  10, 12, 14, 9,  11, 13, 15,
                                                      16, 18, 20, 22, 17, 19, 21, 23, 24, 26, 28, 30, 25, 27, 29, 31};
  const i order = _mm512_load_si512(kOrder);
  const f scale = set1(kInputScale);
  for (int start = 0; start < k; start += kBlock, row += kTileNumbers) {
    const int left = k - start;
    const f low = load_n(x + start, left), high = left > W ? load_n(x + start + W, left - W) : zero();
    _mm512_store_si512(row, _mm512_permutexvar_epi16(order, to_bf16(mul(low, scale), mul(high, scale))));
  }
}

static void open_tiles(int tokens) { open_tiles_of(tokens < 16 ? tokens : 16); }
static void close_tiles() { release_tiles(); }
