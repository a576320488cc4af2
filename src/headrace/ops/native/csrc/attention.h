// Attention of one item: some consecutive queries of a span with the heads that share one key/value head. Included
// inside a code path's namespace.
//
// Positions go by in chunks of 256 that begin at multiples of 256. In a chunk: online softmax (Milakov and Gimelshein
// 2018; FlashAttention, Dao et al. 2022) over tiles of 64 positions. Chunks are then merged in their order (FlashDecoding,
// Dao et al. 2023), whether one thread went through them or several, so the number of threads changes nothing. What a
// query vector does is a chain of operations of its own, lane by lane, that depends on its position only: neighbours in
// the item change nothing, and tiles or lanes hidden from it add exact zeros.
//
// A span may be a token tree: behind its first token, a query sees its ancestors only (SpecInfer, Miao et al. 2023). What
// lies before the tree goes by as ever; tiles with tokens of the tree go by for one query at a time, whose ancestors are
// gathered from where they lie. A query's bits are those that it has in a chain of its ancestors.

struct Item : Places {
  int rows, group;                    // query vectors; heads per key/value head
  int padded;                         // dim rounded up to whole vectors
  float *q, *scores;                  // [rows][dim], [rows][64]
  State state;
  float* shrink;                      // [rows]: what the sums so far are multiplied with, for the tile at hand
  float* gathered;                    // [dim][64]: keys of a tile whose blocks are not whole vectors, or for many rows
  float* widened;                     // [64][padded]: values of a tile, for many rows
  float *key_scales, *value_scales;   // [64]: int8, of the tile at hand
  const int* positions;               // of each query
  int first_row, end_row;             // of the query vectors that the tile at hand goes by for
};

template <int kKv>
INLINE f kv_load(const uint8_t* p) {
  if (kKv == kKvF32) return load(reinterpret_cast<const float*>(p));
  return kKv == kKvBf16 ? bf16(p) : bytes_i8(p);
}

template <int kKv>
INLINE float kv_one(const uint8_t* p) {
  if (kKv == kKvInt8) return static_cast<float>(static_cast<int8_t>(*p));
  uint32_t bits = 0;
  __builtin_memcpy(&bits, p, kv_size<kKv>());
  if (kKv == kKvBf16) bits <<= 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

template <int kKv>
INLINE f kv_load_n(const uint8_t* p, int n) {
  if (n >= W) return kv_load<kKv>(p);
  if (n <= 0) return zero();
  if (kKv == kKvF32) return load_n(reinterpret_cast<const float*>(p), n);
  uint8_t bytes[W * 2] = {};
  __builtin_memcpy(bytes, p, static_cast<size_t>((n < W ? n : W) * kv_size<kKv>()));
  return kv_load<kKv>(bytes);
}

// scores of kRows query vectors with kVectors vectors of positions; keys[v] + d * stride are W positions' dimension d.
// Loops over sums are unrolled by name: the compiler leaves sums in memory otherwise.
template <int kKv, int kRows, int kVectors>
INLINE void scores_tile(const float* q, int dim, const uint8_t* const* keys, ptrdiff_t stride, float* out,
                        Ahead& ahead) {
  f sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
  const uint8_t* at[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) at[v] = keys[v];
  for (int d = 0; d < dim; ++d) {
    f k[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) k[v] = kv_load<kKv>(at[v]), at[v] += stride;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const f value = set1(q[r * dim + d]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(value, k[v], sums[r][v]);
    }
    ahead.some(1);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(out + r * kTile + v * W, sums[r][v]);
}

template <int kKv, int kRows>
NOINLINE static void scores_rows(const Item& item, int row, const uint8_t* const* keys, ptrdiff_t stride, int vectors,
                                 Ahead& ahead) {
  const float* q = item.q + row * item.dim;
  float* out = item.scores + row * kTile;
  int v = 0;
  for (; v + 4 <= vectors; v += 4) scores_tile<kKv, kRows, 4>(q, item.dim, keys + v, stride, out + v * W, ahead);
  if (vectors - v == 3) scores_tile<kKv, kRows, 3>(q, item.dim, keys + v, stride, out + v * W, ahead);
  else if (vectors - v == 2) scores_tile<kKv, kRows, 2>(q, item.dim, keys + v, stride, out + v * W, ahead);
  else if (vectors - v == 1) scores_tile<kKv, kRows, 1>(q, item.dim, keys + v, stride, out + v * W, ahead);
}

// sums[kRows] = sums * shrink + scores x values, positions [begin, end) of the tile; kWhole: every column exists. The
// cases are apart, again so that sums stay in registers.
template <int kKv, int kRows, int kVectors, bool kWhole>
INLINE void values_tile(const Item& item, int row, int column, const uint8_t* const* values, int begin, int end,
                        Ahead& ahead) {
  f sums[kRows][kVectors];
  const int left = item.dim - column;
  float* kept = item.state.sums + row * item.padded + column;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[r][v] = mul(load(kept + r * item.padded + v * W), set1(item.shrink[row + r]));
  const float* weights = item.scores + row * kTile;
  for (int j = begin; j < end; ++j) {
    f value[kVectors];
    const uint8_t* at = values[j] + column * kv_size<kKv>();
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      value[v] = kWhole ? kv_load<kKv>(at + v * W * kv_size<kKv>())
                        : kv_load_n<kKv>(at + v * W * kv_size<kKv>(), left - v * W);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const f weight = set1(weights[r * kTile + j]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(weight, value[v], sums[r][v]);
    }
    ahead.some(1);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store(kept + r * item.padded + v * W, sums[r][v]);
}

template <int kKv, int kRows>
NOINLINE static void values_rows(const Item& item, int row, const uint8_t* const* values, int begin, int end,
                                 Ahead& ahead) {
  int column = 0;
  for (; column + 4 * W <= item.dim; column += 4 * W)
    values_tile<kKv, kRows, 4, true>(item, row, column, values, begin, end, ahead);
  for (; column + W <= item.dim; column += W)
    values_tile<kKv, kRows, 1, true>(item, row, column, values, begin, end, ahead);
  if (column < item.dim) values_tile<kKv, kRows, 1, false>(item, row, column, values, begin, end, ahead);
}

template <int kKv, int kRows, class... Args>
INLINE void scores_by(int rows, Args&&... args) {
  if (rows == kRows) scores_rows<kKv, kRows>(args...);
  else if constexpr (kRows > 1) scores_by<kKv, kRows - 1>(rows, args...);
}
template <int kKv, int kRows, class... Args>
INLINE void values_by(int rows, Args&&... args) {
  if (rows == kRows) values_rows<kKv, kRows>(args...);
  else if constexpr (kRows > 1) values_by<kKv, kRows - 1>(rows, args...);
}

#include "attention_softmax.h"

// Positions [begin, end) of a tile; what follows the tile ends at `last`.
template <int kKv>
INLINE void attend_tile(const Item& item, int tile_start, int begin, int end, int last) {
  const AttentionJob& job = item.job;
  const int vectors = (end + W - 1) / W;
  const uint8_t* keys[kTile / W];
  const bool gathers = job.block_size % W != 0 || item.path;
  // for many rows numbers become float32 once, not for each kAttnRows of them
  const bool widens = kKv != kKvF32 && item.end_row - item.first_row > 2 * kAttnRows;
  if (!gathers) {
    for (int v = 0; v < vectors; ++v) {
      const int seen = v * W + W <= begin ? begin : v * W;  // a vector wholly before the window: any block will do
      keys[v] = key_column<kKv>(item, (tile_start + seen) / W * W);
    }
  } else {
    for (int j = begin; j < end; ++j) {
      const uint8_t* column = key_column<kKv>(item, tile_start + j);
      for (int d = 0; d < item.dim; ++d) {
        const uint8_t* at = column + d * job.block_size * kv_size<kKv>();
        item.gathered[d * kTile + j] = kv_one<kKv>(at);
      }
    }
  }
  const ptrdiff_t block_stride = static_cast<ptrdiff_t>(job.block_size * kv_size<kKv>());
  if (widens && !gathers)
    for (int v = 0; v < vectors; ++v)
      for (int d = 0; d < item.dim; ++d) store(item.gathered + d * kTile + v * W, kv_load<kKv>(keys[v] + d * block_stride));
  const bool as_floats = gathers || widens;
  if (as_floats)
    for (int v = 0; v < vectors; ++v) keys[v] = reinterpret_cast<const uint8_t*>(item.gathered + v * W);
  if (kKv == kKvInt8)
    for (int j = 0; j < vectors * W; ++j) {  // hidden positions: those of a seen one
      const int position = tile_start + (j < begin ? begin : j < end ? j : end - 1);
      item.key_scales[j] = scale_of(item, job.keys, position);
      item.value_scales[j] = scale_of(item, job.values, position);
    }
  // while one is at work, what comes next is brought nearer: this tile's values, then the next tile's keys
  Ahead ahead = ahead_of(item, item.table, item.kv_head, job.values,
                         tile_start + begin / job.block_size * job.block_size, tile_start + end);
  const ptrdiff_t stride = as_floats ? ptrdiff_t{kTile * 4} : block_stride;
  for (int row = item.first_row; row < item.end_row; row += kAttnRows) {
    const int count = item.end_row - row < kAttnRows ? item.end_row - row : kAttnRows;
    if (as_floats) scores_by<kKvF32, kAttnRows>(count, item, row, keys, stride, vectors, ahead);
    else scores_by<kKv, kAttnRows>(count, item, row, keys, stride, vectors, ahead);
  }
  softmax_rows<kKv>(item, tile_start, vectors);
  const uint8_t* values[kTile];
  for (int j = begin; j < end;) {  // block by block: finding a place takes two divisions
    const uint8_t* at = value_row<kKv>(item, tile_start + j);
    const int left = item.path ? 1 : job.block_size - (tile_start + j) % job.block_size;
    const int stop = j + left < end ? j + left : end;
    for (; j < stop; ++j, at += item.dim * kv_size<kKv>()) values[j] = at;
  }
  ahead = keys_ahead(item, tile_start, last);
  if (widens)
    for (int j = begin; j < end; ++j) {
      float* to = item.widened + j * item.padded;
      for (int d = 0; d < item.dim; d += W)
        store(to + d, kv_load_n<kKv>(values[j] + d * kv_size<kKv>(), item.dim - d));
      values[j] = reinterpret_cast<const uint8_t*>(to);
    }
  for (int row = item.first_row; row < item.end_row; row += kAttnRows) {
    const int count = item.end_row - row < kAttnRows ? item.end_row - row : kAttnRows;
    if (widens) values_by<kKvF32, kAttnRows>(count, item, row, values, begin, end, ahead);
    else values_by<kKv, kAttnRows>(count, item, row, values, begin, end, ahead);
  }
}

// A tile with tokens of a tree, for each query of the item by itself.
template <int kKv>
NOINLINE static void attend_tree_tile(Item& item, const int32_t* parents, const AttentionItem& work, int tile_start,
                                      int begin, int last) {
  int path[kMaxTree];
  item.path = path;
  for (int query = 0; query < work.count; ++query) {
    const int position = item.positions[query], end = position + 1 - tile_start;
    if (end <= begin) continue;
    find_path(parents, work.first + query, position - item.root, path);
    item.first_row = query * item.group;
    item.end_row = item.first_row + item.group;
    attend_tile<kKv>(item, tile_start, begin, end < kTile ? end : kTile, last);
  }
  item.path = nullptr;
  item.first_row = 0;
  item.end_row = item.rows;
}

static void clear(const State& state, int rows, int dim) {
  const size_t zeros = static_cast<size_t>(rows) * (static_cast<size_t>(padded_dim(dim)) + W);
  for (size_t e = 0; e < zeros; ++e) state.sums[e] = 0.0f;  // and the masses behind them
  for (int row = 0; row < rows; ++row) state.top[row] = -__builtin_inff();
}

// Adds what `more` has seen to `total`.
static void merge(const State& total, const State& more, int rows, int dim) {
  const int padded = padded_dim(dim);
  for (int row = 0; row < rows; ++row) {
    const float before = total.top[row], found = more.top[row], after = found > before ? found : before;
    if (found == -__builtin_inff()) continue;
    total.top[row] = after;
    add_row(total, more, row, padded, set1(shrunk(before, after)), set1(shrunk(found, after)));
  }
}

// Before anything was seen: nothing, or the sinks.
static void begin_total(const AttentionJob& job, const AttentionItem& work, const State& total) {
  const int group = job.heads / job.kv_heads, rows = work.count * group;
  clear(total, rows, job.dim);
  if (job.sinks)
    for (int row = 0; row < rows; ++row) {
      total.top[row] = job.sinks[work.kv_head * group + row % group];
      total.mass[row * W] = 1.0f;  // e^(sink - sink)
    }
}

static void write_out(const AttentionJob& job, const AttentionItem& work, const State& total) {
  const int group = job.heads / job.kv_heads, rows = work.count * group, padded = padded_dim(job.dim);
  const int token = job.query_start[work.span] + work.first;
  for (int row = 0; row < rows; ++row) {
    const int head = work.kv_head * group + row % group;
    float* out = job.out + (token + row / group) * job.out_stride + static_cast<ptrdiff_t>(head) * job.dim;
    const f mass = set1(reduce_add(load(total.mass + row * W)));
    for (int d = 0; d < job.dim; d += W)
      store_n(out + d, div(load(total.sums + row * padded + d), mass), job.dim - d);
  }
}

static size_t attention_partial(const AttentionJob& job, int count) {
  return state_floats(static_cast<size_t>(count * (job.heads / job.kv_heads)), job.dim);
}

static size_t attention_scratch(const AttentionJob& job) {
  const int group = job.heads / job.kv_heads;
  const size_t rows = static_cast<size_t>(queries_per_item(group, kMaxRows) * group), dim = static_cast<size_t>(job.dim);
  return 2 * state_floats(rows, job.dim) + rows * (dim + 1) + rows * kTile +
         (dim + static_cast<size_t>(padded_dim(job.dim))) * kTile + 2 * kTile + 64;
}

template <int kKv>
static void attend(const AttentionJob& job, const AttentionItem& work, float* scratch) {
  const int group = job.heads / job.kv_heads, rows = work.count * group;
  const size_t num_rows = static_cast<size_t>(rows), dim = static_cast<size_t>(job.dim);
  int positions[kMaxRows];
  const Extent extent = extent_of(job, work, positions);
  Item item{{job, work, job.tables + work.span * job.table_stride, work.kv_head, job.dim,
             kv_page_bytes(kKv, job.dim, job.block_size), job.positions[job.query_start[work.span]], nullptr},
            rows, group, padded_dim(job.dim), nullptr, scratch, State{}, nullptr, nullptr, nullptr, nullptr, nullptr,
            positions, 0, rows};
  item.gathered = item.scores + num_rows * kTile;
  item.widened = item.gathered + dim * kTile;
  item.key_scales = item.widened + padded_dim(job.dim) * kTile;
  item.value_scales = item.key_scales + kTile;
  item.q = item.value_scales + kTile;
  item.shrink = item.q + num_rows * dim;
  float* states = item.shrink + num_rows;
  State total = state_at(states, rows, job.dim);
  item.state = state_at(states + state_floats(num_rows, job.dim), rows, job.dim);
  const int token = job.query_start[work.span] + work.first;
  for (int row = 0; row < rows; ++row) {
    const int head = work.kv_head * group + row % group;
    const float* q = job.q + (token + row / group) * job.q_stride + static_cast<ptrdiff_t>(head) * job.dim;
    for (int d = 0; d < job.dim; ++d) item.q[row * job.dim + d] = q[d] * job.scale;
  }
  if (work.partial) item.state = state_at(work.partial, rows, job.dim);
  const int first = extent.first_chunk, last = extent.last_chunk, last_position = extent.last_position;
  // one chunk and no sinks: what it has seen is the total, as merging it into nothing would make it
  const bool alone = !work.partial && first == last && !job.sinks;
  if (!work.partial && !alone) begin_total(job, work, total);
  for (int chunk = first; chunk <= last; ++chunk) {
    clear(item.state, rows, job.dim);
    const int from = extent.lowest > chunk * kChunk ? extent.lowest : chunk * kChunk;
    const int to = last_position < (chunk + 1) * kChunk ? last_position + 1 : (chunk + 1) * kChunk;
    for (int start = from / kTile * kTile; start < to; start += kTile) {
      const int begin = from > start ? from - start : 0, end = to - start < kTile ? to - start : kTile;
      if (!extent.parents || start + kTile <= item.root + 1) attend_tile<kKv>(item, start, begin, end, last_position + 1);
      else attend_tree_tile<kKv>(item, extent.parents, work, start, begin, last_position + 1);
    }
    if (!work.partial && !alone) merge(total, item.state, rows, job.dim);
  }
  if (!work.partial) write_out(job, work, alone ? item.state : total);
}

static void attention(const AttentionJob& job, const AttentionItem& work, float* scratch) {
  if (job.kv_format == kKvBf16) attend<kKvBf16>(job, work, scratch);
  else if (job.kv_format == kKvInt8) attend<kKvInt8>(job, work, scratch);
  else attend<kKvF32>(job, work, scratch);
}

static void attention_merge(const AttentionJob& job, const AttentionItem& work, int num_chunks, float* scratch) {
  const int rows = work.count * (job.heads / job.kv_heads);
  const State total = state_at(scratch, rows, job.dim);
  begin_total(job, work, total);
  for (int chunk = 0; chunk < num_chunks; ++chunk)
    merge(total, state_at(work.partial + static_cast<size_t>(chunk) * attention_partial(job, work.count), rows, job.dim),
          rows, job.dim);
  write_out(job, work, total);
}
