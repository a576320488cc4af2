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

// Pairs of numbers that are bfloat16 already, as a row of a tile has them.
INLINE void store_pairs(uint8_t* to, f first, f second) {
  const i low = shift_right(_mm512_castps_si512(first), 16), high = _mm512_castps_si512(second);
  _mm512_store_si512(to, or_words(low, and_word(high, static_cast<int>(0xFFFF0000u))));
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
  for (int v = 0; v < vectors; ++v)
    for (int d = 0; d < blocks * 32; d += 2) {
      const f first = d < item.dim ? kv_load<kKv>(keys[v] + d * stride) : zero();
      const f second = d + 1 < item.dim ? kv_load<kKv>(keys[v] + (d + 1) * stride) : zero();
      store_pairs(at.pairs + (v * blocks + d / 32) * kTileSize + d % 32 / 2 * 64, first, second);
      ahead.some(1);
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
  for (int pair = 0; pair < halves * 16; ++pair) {
    const int j = 2 * pair;
    uint8_t* to = at.pairs + pair / 16 * columns * kTileSize + pair % 16 * 64;
    for (int c = 0; c < columns; ++c) {
      const int left = item.dim - c * W;
      const f first = j >= begin && j < end ? kv_load_n<kKvBf16>(values[j] + c * W * 2, left) : zero();
      const f second = j + 1 >= begin && j + 1 < end ? kv_load_n<kKvBf16>(values[j + 1] + c * W * 2, left) : zero();
      store_pairs(to + c * kTileSize, first, second);
      ahead.some(1);
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
    const int last = tile * 16 + 16 < item.end_row ? tile * 16 + 16 : item.end_row;
    for (int row = tile * 16 > item.first_row ? tile * 16 : item.first_row; row < last; ++row)
      for (int c = 0; c < columns; ++c) {
        float* kept = item.state.sums + row * item.padded + c * W;
        const f fresh = load(at.products + row % 16 * item.padded + c * W);
        store(kept, fma(load(kept), set1(item.shrink[row]), fresh));
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
