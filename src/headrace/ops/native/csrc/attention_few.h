// Attention's two products in bfloat16 for few query vectors, in registers: what the tiles would do, bit for bit
// (tiles_emulated.h says what that is), without making tiles of keys and values for so few. attention_bf16.h includes
// this.
//
// A tile sums the even ones of 32 products in one chain of multiply-adds and the odd ones in another.
template <class Sums, class Next>
INLINE void in_two_chains(Sums& even, Sums& odd, int begin, int end, const Next& next, Ahead& ahead) {
  int at = begin;
  if (at < end && at % 2) next(odd, at++);
  for (; at + 1 < end; at += 2) {
    next(even, at);
    next(odd, at + 1);
    if (at % 8 == 0) ahead.some(8);
  }
  if (at < end) next(even, at);
}

// Scores of kRows query vectors with kVectors vectors of positions.
template <int kRows, int kVectors>
INLINE void few_scores(const float* q, int dim, const KeyVector* keys, float* out, Ahead& ahead) {
  f total[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) total[r][v] = zero();
  const uint8_t* at[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) at[v] = keys[v].at;
  for (int block = 0; block < dim; block += 32) {
    f even[kRows][kVectors], odd[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = zero();
    const auto next = [&](f(&sums)[kRows][kVectors], int d) __attribute__((always_inline)) {
      f k[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) k[v] = widened(at[v]), at[v] += keys[v].stride;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const f value = set1(q[r * dim + d]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(value, k[v], sums[r][v]);
      }
    };
    in_two_chains(even, odd, block, dim - block < 32 ? dim : block + 32, next, ahead);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) total[r][v] = add(total[r][v], add(even[r][v], odd[r][v]));
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(out + r * kStride + v * W, total[r][v]);
}

// sums[kRows], kColumns vectors of them from `column` on, += weights x values of 32 positions, of which [begin, end)
// are seen: the others weigh nothing.
template <int kRows, int kColumns, bool kWhole>
INLINE void few_values(const Item16& item, const float* weights, int column, const uint8_t* const* values, int begin,
                       int end, float* sums, Ahead& ahead) {
  f even[kRows][kColumns], odd[kRows][kColumns];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) even[r][c] = odd[r][c] = zero();
  const auto next = [&](f(&chain)[kRows][kColumns], int j) __attribute__((always_inline)) {
    f value[kColumns];
    const uint8_t* at = values[j] + column * 2;
    const int left = item.dim - column;
    if constexpr (kWhole) {
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) value[c] = widened(at + c * W * 2);
    } else {
      const __m256i some = _mm256_maskz_loadu_epi16(lanes(left), at);
      value[0] = low_half_floats(_mm512_castsi256_si512(some));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const f weight = set1(weights[r * kStride + j]);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) chain[r][c] = fma(weight, value[c], chain[r][c]);
    }
  };
  in_two_chains(even, odd, begin, end, next, ahead);
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      float* to = sums + r * item.padded + column + c * W;
      store(to, add(load(to), add(even[r][c], odd[r][c])));
    }
}

// A chunk for query vectors row .. row + kRows - 1 of the item.
template <int kRows>
NOINLINE static void few_rows(const Item16& item, const Chunk& chunk, int row, int last, const State& state) {
  constexpr int kVectors = kRows <= 2 ? 4 : 2, kColumns = kVectors;  // as many sums as there are registers
  const float* q = item.q + row * item.dim;
  const Vectors vectors = vectors_of(chunk.begin, chunk.end);
  const int count = (chunk.end + W - 1) / W;
  for (int tile = chunk.begin / kTile * kTile; tile < chunk.end; tile += kTile) {
    Ahead ahead = behind_keys(item, chunk, tile);
    const int first = tile / W > vectors.first ? tile / W : vectors.first;
    const int stop = tile / W + kTile / W < count ? tile / W + kTile / W : count;
    KeyVector keys[kTile / W];
    for (int v = first; v < stop; ++v) keys[v - first] = key_vector(item, chunk, v);
    int v = first;
    for (; v + kVectors <= stop; v += kVectors)
      few_scores<kRows, kVectors>(q, item.dim, keys + v - first, item.scores + v * W, ahead);
    if (kVectors > 2 && v + 2 <= stop)
      few_scores<kRows, 2>(q, item.dim, keys + v - first, item.scores + v * W, ahead), v += 2;
    if (v < stop) few_scores<kRows, 1>(q, item.dim, keys + v - first, item.scores + v * W, ahead);
  }
  float* weights = item.scores;  // in their place
  weigh(item, chunk, row, kRows, item.scores, vectors, state,
        [weights](int r, int v, i rounded) __attribute__((always_inline)) {
          store(weights + r * kStride + v * W, low_half_floats(rounded));
          store(weights + r * kStride + v * W + W, high_half_floats(rounded));
        });
  for (int e = 0; e < kRows * item.padded; e += W) store(state.sums + e, zero());
  const uint8_t* values[kChunk];
  find_values(item, chunk, chunk.begin, chunk.end, values);
  for (int tile = chunk.begin / kTile * kTile; tile < chunk.end; tile += kTile) {
    Ahead ahead = behind_values(item, chunk, tile, last);
    for (int from = tile; from < tile + kTile && from < chunk.end; from += 32) {
      const int begin = from > chunk.begin ? from : chunk.begin, end = from + 32 < chunk.end ? from + 32 : chunk.end;
      int c = 0;
      for (; c + kColumns * W <= item.dim; c += kColumns * W)
        few_values<kRows, kColumns, true>(item, weights, c, values, begin, end, state.sums, ahead);
      for (; c + W <= item.dim; c += W)
        few_values<kRows, 1, true>(item, weights, c, values, begin, end, state.sums, ahead);
      if (c < item.dim) few_values<kRows, 1, false>(item, weights, c, values, begin, end, state.sums, ahead);
    }
  }
}

static void few_by(const Item16& item, const Chunk& chunk, int row, int count, int last, const State& state) {
  switch (count) {
    case 1: return few_rows<1>(item, chunk, row, last, state);
    case 2: return few_rows<2>(item, chunk, row, last, state);
    case 3: return few_rows<3>(item, chunk, row, last, state);
    default: return few_rows<4>(item, chunk, row, last, state);
  }
}
