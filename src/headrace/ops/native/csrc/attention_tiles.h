// Attention's two products in bfloat16 on tiles, for 16 or 32 query vectors at a time. attention_bf16.h includes this.
//
// A chunk's keys and values become tiles once for an item; groups of query vectors then go through it one after the
// other, so that their scores, weights and sums stay in the nearest cache. Tiles that nothing of a group sees are left
// out.

constexpr int kTileShorts = 512, kTileSize = 1024;  // bfloat16, or bytes, of a tile: 16 rows of 64 bytes

INLINE int dim_blocks(int dim) { return (dim + 31) / 32; }
INLINE size_t whole_tiles(size_t rows) { return (rows + 15) / 16 * 16; }  // tiles are stored as a whole

// 16 bfloat16 of two places side by side: a row of a tile, pairs.
INLINE void store_pairs(uint8_t* to, __m256i first, __m256i second) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const i both = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), both));
}
INLINE __m256i sixteen(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Makes this thread's tiles ready, and tiles of the item's query vectors, which are `by` times what the job has.
static void open_tiles_with(const Item16& item, float by) {
  open_tiles_of(item.rows < 16 ? item.rows : 16);
  const AttentionJob& job = item.job;
  const int blocks = dim_blocks(item.dim), token = job.query_start[item.work.span] + item.work.first;
  for (int row = 0; row < static_cast<int>(whole_tiles(static_cast<size_t>(item.rows))); ++row) {
    uint16_t* to = item.q_tiles + row / 16 * blocks * kTileShorts + row % 16 * 32;
    const int head = item.kv_head * item.group + row % item.group;
    const float* from = job.q + (token + row / item.group) * job.q_stride + static_cast<ptrdiff_t>(head) * item.dim;
    for (int b = 0; b < blocks; ++b, to += kTileShorts) {
      const int left = row < item.rows ? item.dim - b * 32 : 0;
      const f low = left > 0 ? load_n(from + b * 32, left) : zero();
      const f high = left > W ? load_n(from + b * 32 + W, left - W) : zero();
      _mm512_store_si512(to, to_bf16(mul(low, set1(by)), mul(high, set1(by))));
    }
  }
}

// A chunk's keys as tiles: a row is a pair of dimensions of 16 positions. Vectors come by twos; behind the last, zeros.
NOINLINE static void make_key_tiles(const Item16& item, const Chunk& chunk) {
  const int blocks = dim_blocks(item.dim), count = (chunk.end + W - 1) / W;
  const Vectors vectors = vectors_of(chunk.begin, chunk.end);
  Ahead ahead;
  for (int v = vectors.first; v < vectors.last; ++v) {
    if (v == vectors.first || v % (kTile / W) == 0) ahead = behind_keys(item, chunk, v * W / kTile * kTile);
    uint8_t *to = item.keys + v * blocks * kTileSize, *const end = to + blocks * kTileSize;
    if (v < count) {
      const KeyVector keys = key_vector(item, chunk, v);
      const uint8_t* from = keys.at;
      int d = 0;
      for (; d + 8 <= item.dim; d += 8, to += 256, from += 8 * keys.stride) {
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; ++pair)
          store_pairs(to + pair * 64, sixteen(from + 2 * pair * keys.stride),
                      sixteen(from + (2 * pair + 1) * keys.stride));
        ahead.some(4);
      }
      for (; d + 2 <= item.dim; d += 2, to += 64, from += 2 * keys.stride)
        store_pairs(to, sixteen(from), sixteen(from + keys.stride));
      if (d < item.dim) store_pairs(to, sixteen(from), _mm256_setzero_si256()), to += 64;
    }
    for (; to < end; to += 64) _mm512_store_si512(to, zero_words());
  }
}

// A chunk's values as tiles: a row is a pair of positions of 16 dimensions. What is not seen is zero: its weight would
// make NaN of infinity.
NOINLINE static void make_value_tiles(const Item16& item, const Chunk& chunk, int last) {
  const int columns = item.padded / W, whole = item.dim / W;
  const Vectors vectors = vectors_of(chunk.begin, chunk.end);
  const uint8_t* values[kChunk];
  find_values(item, chunk, chunk.begin, chunk.end, values);
  Ahead ahead;
  for (int j = vectors.first * W; j < vectors.last * W; j += 2) {
    if (j == vectors.first * W || j % kTile == 0) ahead = behind_values(item, chunk, j / kTile * kTile, last);
    uint8_t* to = item.values + j / 32 * columns * kTileSize + j % 32 * 32;
    const bool first = j >= chunk.begin && j < chunk.end, second = j + 1 >= chunk.begin && j + 1 < chunk.end;
    if (first && second) {
      const uint8_t *at = values[j], *next = values[j + 1];
      for (int c = 0; c < whole; ++c, to += kTileSize) store_pairs(to, sixteen(at + c * 32), sixteen(next + c * 32));
      ahead.some(columns);
    } else {
      for (int c = 0; c < whole; ++c, to += kTileSize)
        store_pairs(to, first ? sixteen(values[j] + c * 32) : _mm256_setzero_si256(),
                    second ? sixteen(values[j + 1] + c * 32) : _mm256_setzero_si256());
    }
    if (whole < columns) {
      const __mmask16 left = lanes(item.dim - whole * W);
      store_pairs(to, first ? _mm256_maskz_loadu_epi16(left, values[j] + whole * 32) : _mm256_setzero_si256(),
                  second ? _mm256_maskz_loadu_epi16(left, values[j + 1] + whole * 32) : _mm256_setzero_si256());
    }
  }
}

INLINE void clear_four() { tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>(); }

// Two tiles of rows, `row` bytes from each other, times two of pairs: sums 0, 1 and 2, 3.
INLINE void multiply_two(const uint16_t* first, const uint16_t* second, ptrdiff_t row, const uint8_t* pairs,
                         ptrdiff_t apart) {
  tile_load<4>(first, row), tile_load<6>(pairs, 64), tile_multiply<0, 4, 6>();
  tile_load<7>(pairs + apart, 64), tile_multiply<1, 4, 7>();
  tile_load<5>(second, row), tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
}
// One tile of rows times `count` of pairs, up to four: sums 0 .. count - 1.
INLINE void multiply_one(const uint16_t* rows, ptrdiff_t row, const uint8_t* pairs, ptrdiff_t apart, int count) {
  tile_load<4>(rows, row);
  tile_load<6>(pairs, 64), tile_multiply<0, 4, 6>();
  if (count > 1) tile_load<7>(pairs + apart, 64), tile_multiply<1, 4, 7>();
  if (count > 2) tile_load<6>(pairs + 2 * apart, 64), tile_multiply<2, 4, 6>();
  if (count > 3) tile_load<7>(pairs + 3 * apart, 64), tile_multiply<3, 4, 7>();
}
INLINE void store_one(float* to, ptrdiff_t stride, int count) {
  stride *= sizeof(float);
  tile_store<0>(to, stride);
  if (count > 1) tile_store<1>(to + W, stride);
  if (count > 2) tile_store<2>(to + 2 * W, stride);
  if (count > 3) tile_store<3>(to + 3 * W, stride);
}

// Weights take the place of scores, row by row from its beginning on: two vectors are read before they are overwritten.
constexpr int kWeightStride = 2 * kStride;
constexpr ptrdiff_t kWeightRow = kWeightStride * sizeof(uint16_t);
INLINE uint16_t* weights_of(const Item16& item) { return reinterpret_cast<uint16_t*>(item.scores); }

// Scores of kTiles tiles of query vectors, which begin at `q`.
template <int kTiles>
INLINE void scores_on_tiles(const Item16& item, const uint16_t* q, const Vectors& vectors) {
  constexpr ptrdiff_t kRow = kStride * sizeof(float);
  const int blocks = dim_blocks(item.dim);
  const ptrdiff_t apart = blocks * kTileSize;
  if constexpr (kTiles == 2) {
    for (int v = vectors.first; v < vectors.last; v += 2) {
      clear_four();
      for (int b = 0; b < blocks; ++b)
        multiply_two(q + b * kTileShorts, q + (blocks + b) * kTileShorts, 64, item.keys + v * apart + b * kTileSize,
                     apart);
      float* to = item.scores + v * W;
      tile_store<0>(to, kRow), tile_store<1>(to + W, kRow);
      tile_store<2>(to + 16 * kStride, kRow), tile_store<3>(to + 16 * kStride + W, kRow);
    }
  } else {
    for (int v = vectors.first; v < vectors.last; v += 4) {
      const int count = vectors.last - v < 4 ? vectors.last - v : 4;
      clear_four();
      for (int b = 0; b < blocks; ++b)
        multiply_one(q + b * kTileShorts, 64, item.keys + v * apart + b * kTileSize, apart, count);
      store_one(item.scores + v * W, kStride, count);
    }
  }
}

// Their sums, of weights times values.
template <int kTiles>
INLINE void values_on_tiles(const Item16& item, const Vectors& vectors, float* sums) {
  const ptrdiff_t row = item.padded * sizeof(float);
  const int columns = item.padded / W;
  for (int c = 0; c < columns;) {
    const int left = columns - c, count = left < 4 ? left : 4;
    const bool by_two = kTiles == 2 && left > 1;
    for (int tile = 0; tile < (by_two ? 1 : kTiles); ++tile) {
      const uint16_t* weights = weights_of(item) + tile * 16 * kWeightStride;
      clear_four();
      for (int h = vectors.first / 2; h < vectors.last / 2; ++h) {
        const uint8_t* pairs = item.values + (h * columns + c) * kTileSize;
        if (by_two)
          multiply_two(weights + h * 32, weights + h * 32 + 16 * kWeightStride, kWeightRow, pairs, kTileSize);
        else multiply_one(weights + h * 32, kWeightRow, pairs, kTileSize, count);
      }
      float* to = sums + tile * 16 * item.padded + c * W;
      if (by_two) {
        tile_store<0>(to, row), tile_store<1>(to + W, row);
        tile_store<2>(to + 16 * item.padded, row), tile_store<3>(to + 16 * item.padded + W, row);
      } else store_one(to, item.padded, count);
    }
    c += by_two ? 2 : count;
  }
}

// A chunk for query vectors row .. row + count - 1 of the item, which fill kTiles tiles. Returns whether they see
// anything.
template <int kTiles>
NOINLINE static bool rows_on_tiles(const Item16& item, const Chunk& chunk, int row, int count, const State& state) {
  const Shown first = shown_to(item, row / item.group, chunk);
  const Shown last = shown_to(item, (row + count - 1) / item.group, chunk);
  const Vectors vectors = vectors_of(first.low > chunk.begin ? first.low : chunk.begin, last.high);
  if (vectors.first == vectors.last) return false;
  const int blocks = dim_blocks(item.dim);
  scores_on_tiles<kTiles>(item, item.q_tiles + row / 16 * blocks * kTileShorts, vectors);
  for (int tile = 0; tile < kTiles; ++tile) {
    uint16_t* weights = weights_of(item) + tile * 16 * kWeightStride;
    const int left = count - tile * 16;
    weigh(item, chunk, row + tile * 16, left < 16 ? left : 16, item.scores + tile * 16 * kStride, vectors,
          rows_from(state, tile * 16, item.padded), [weights](int r, int v, i rounded) __attribute__((always_inline)) {
            _mm512_store_si512(weights + r * kWeightStride + v * W, rounded);
          });
  }
  values_on_tiles<kTiles>(item, vectors, state.sums);
  return true;
}
