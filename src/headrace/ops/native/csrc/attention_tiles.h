// Attention's two products in bfloat16, on tiles: queries times keys, and weights times values, for 16 query vectors at a
// time. Included by attention.h; for caches in bfloat16, on paths that have tiles.
//
// Queries and weights are rounded to bfloat16, products and sums are float32. A score is the sum of what each 32 dimensions
// give, in their order; a tile of positions adds to the sums what its first 32 positions give, then the others. Rows of a
// tile do not meet, and hidden positions have the weight zero, so a query vector has the same bits in any company, as
// attention.h promises.

#if defined(HEADRACE_HAS_TILES)
template <int kKv>
constexpr bool kOnTiles = kKv == kKvBf16;

constexpr int kTileShorts = 512, kTileSize = 1024;  // bfloat16, or bytes, of a tile: 16 rows of 64 bytes

INLINE int row_tiles(int rows) { return (rows + 15) / 16; }
INLINE int dim_blocks(int dim) { return (dim + 31) / 32; }

// Where the tiles of an item lie, 64-byte aligned.
struct OnTiles {
  uint16_t *q, *weights;  // [row tiles][dim blocks], [row tiles][2]: tiles of 16 query vectors
  uint8_t* pairs;         // tiles of keys [vectors][dim blocks] or of values [2][vectors of a head]
  float* products;        // [16][padded]
};

INLINE size_t tiles_floats(int rows, int dim) {
  const size_t tiles = static_cast<size_t>(row_tiles(rows)), blocks = static_cast<size_t>(dim_blocks(dim));
  return (tiles * (blocks + 2) + 4 * blocks) * kTileSize / sizeof(float) + 16 * 32 * blocks;
}

INLINE OnTiles tiles_at(float* memory, int rows, int dim) {
  const int tiles = row_tiles(rows), blocks = dim_blocks(dim);
  OnTiles at;
  at.q = reinterpret_cast<uint16_t*>(memory);
  at.weights = at.q + tiles * blocks * kTileShorts;
  at.pairs = reinterpret_cast<uint8_t*>(at.weights + tiles * 2 * kTileShorts);
  at.products = reinterpret_cast<float*>(at.pairs + 4 * blocks * kTileSize);
  return at;
}

// Rows that scores are kept of: whole tiles are stored.
INLINE size_t scored_rows(size_t rows) { return (rows + 15) / 16 * 16; }

// Makes this thread's tiles ready, and tiles of the item's query vectors, rounded.
static void open_tiles_with(const Item& item) {
  open_tiles_of(16);
  const int blocks = dim_blocks(item.dim);
  uint16_t* to = tiles_at(item.tiles, item.rows, item.dim).q;
  __builtin_memset(to, 0, static_cast<size_t>(row_tiles(item.rows) * blocks) * kTileSize);
  for (int row = 0; row < item.rows; ++row)
    for (int b = 0; b < blocks; ++b) {
      const float* from = item.q + row * item.dim + b * 32;
      const int left = item.dim - b * 32;
      const i both = to_bf16(load_n(from, left), left > W ? load_n(from + W, left - W) : zero());
      _mm512_store_si512(to + (row / 16 * blocks + b) * kTileShorts + row % 16 * 32, both);
    }
}

// 16 numbers that are bfloat16 already beside 16 others: a row of a tile, pairs.
INLINE void store_pairs(uint8_t* to, __m256i first, __m256i second) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both));
}

// 16 keys' dimension, as bfloat16.
template <int kKv>
INLINE __m256i key_halves(const uint8_t* p) {
  if (kKv == kKvBf16) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(words(p), 16));
}

INLINE void clear_four() { tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>(); }

// Tiles 0 .. count-1 of sums += tile 4 times `count` tiles of pairs, `apart` bytes from each other.
INLINE void multiply_four(const uint8_t* pairs, ptrdiff_t apart, int count) {
  tile_load<6>(pairs, 64), tile_multiply<0, 4, 6>();
  if (count > 1) tile_load<7>(pairs + apart, 64), tile_multiply<1, 4, 7>();
  if (count > 2) tile_load<6>(pairs + 2 * apart, 64), tile_multiply<2, 4, 6>();
  if (count > 3) tile_load<7>(pairs + 3 * apart, 64), tile_multiply<3, 4, 7>();
}

INLINE void store_four(float* to, ptrdiff_t stride, int count) {
  stride *= sizeof(float);
  tile_store<0>(to, stride);
  if (count > 1) tile_store<1>(to + W, stride);
  if (count > 2) tile_store<2>(to + 2 * W, stride);
  if (count > 3) tile_store<3>(to + 3 * W, stride);
}

// What scores_rows() does, for all query vectors at hand. kKv: what `keys` point to.
template <int kKv>
NOINLINE static void scores_on_tiles(const Item& item, const OnTiles& at, const uint8_t* const* keys, ptrdiff_t stride,
                                     int vectors, Ahead& ahead) {
  const int blocks = dim_blocks(item.dim);
  for (int v = 0; v < vectors; ++v) {
    uint8_t* to = at.pairs + v * blocks * kTileSize;  // 64 bytes for a pair of dimensions
    const uint8_t* from = keys[v];
    for (int d = 0; d + 1 < item.dim; d += 2, to += 64, from += 2 * stride) {
      store_pairs(to, key_halves<kKv>(from), key_halves<kKv>(from + stride));
      ahead.some(1);
    }
    if (item.dim % 2) store_pairs(to, key_halves<kKv>(from), _mm256_setzero_si256()), to += 64;
    for (; to < at.pairs + (v + 1) * blocks * kTileSize; to += 64) _mm512_store_si512(to, zero_words());
  }
  for (int tile = item.first_row / 16; tile * 16 < item.end_row; ++tile) {
    clear_four();
    for (int b = 0; b < blocks; ++b) {
      tile_load<4>(at.q + (tile * blocks + b) * kTileShorts, 64);
      multiply_four(at.pairs + b * kTileSize, blocks * kTileSize, vectors);
    }
    store_four(item.scores + tile * 16 * kTile, kTile, vectors);
  }
}

// What values_rows() does, for all query vectors at hand.
NOINLINE static void values_on_tiles(const Item& item, const OnTiles& at, const uint8_t* const* values, int begin, int end,
                                     Ahead& ahead) {
  const int columns = item.padded / W, halves = end > 32 ? 2 : 1;
  const auto numbers = [&](int j, int c) __attribute__((always_inline)) {  // 32 of position j, from column c on
    if (j < begin || j >= end) return zero_words();
    const int left = item.dim - c * W;
    return _mm512_maskz_loadu_epi16(left < 32 ? (1u << left) - 1 : ~0u, values[j] + c * W * 2);
  };
  for (int pair = 0; pair < halves * 16; ++pair) {
    uint8_t* to = at.pairs + pair / 16 * columns * kTileSize + pair % 16 * 64;
    for (int c = 0; c < columns; c += 2) {
      const i first = numbers(2 * pair, c), second = numbers(2 * pair + 1, c);
      store_pairs(to + c * kTileSize, _mm512_castsi512_si256(first), _mm512_castsi512_si256(second));
      if (c + 1 < columns)
        store_pairs(to + (c + 1) * kTileSize, _mm512_extracti64x4_epi64(first, 1), _mm512_extracti64x4_epi64(second, 1));
      ahead.some(2);
    }
  }
  for (int row = item.first_row; row < item.end_row; ++row)
    for (int h = 0; h < halves; ++h) {
      const float* from = item.scores + row * kTile + h * 32;
      const i both = to_bf16(load(from), end > h * 32 + W ? load(from + W) : zero());
      _mm512_store_si512(at.weights + (row / 16 * 2 + h) * kTileShorts + row % 16 * 32, both);
    }
  for (int tile = item.first_row / 16; tile * 16 < item.end_row; ++tile) {
    for (int c = 0; c < columns; c += 4) {
      const int count = columns - c < 4 ? columns - c : 4;
      clear_four();
      for (int h = 0; h < halves; ++h) {
        tile_load<4>(at.weights + (tile * 2 + h) * kTileShorts, 64);
        multiply_four(at.pairs + (h * columns + c) * kTileSize, kTileSize, count);
      }
      store_four(at.products + c * W, item.padded, count);
    }
    const int last = tile * 16 + 16 < item.end_row ? tile * 16 + 16 : item.end_row, padded = columns * W;
    for (int row = tile * 16 > item.first_row ? tile * 16 : item.first_row; row < last; ++row) {
      float* kept = item.state.sums + row * padded;
      const float* fresh = at.products + row % 16 * padded;
      const f shrink = set1(item.shrink[row]);
      for (int c = 0; c < padded; c += W) store(kept + c, fma(load(kept + c), shrink, load(fresh + c)));
    }
  }
}
#else
template <int kKv>
constexpr bool kOnTiles = false;
struct OnTiles {};
INLINE size_t tiles_floats(int, int) { return 0; }
INLINE size_t scored_rows(size_t rows) { return rows; }
INLINE OnTiles tiles_at(float*, int, int) { return {}; }
INLINE void open_tiles_with(const Item&) {}
INLINE void close_tiles() {}
template <int kKv>
INLINE void scores_on_tiles(const Item&, const OnTiles&, const uint8_t* const*, ptrdiff_t, int, Ahead&) {}
INLINE void values_on_tiles(const Item&, const OnTiles&, const uint8_t* const*, int, int, Ahead&) {}
#endif
