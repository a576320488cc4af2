// Attention of one item: some consecutive queries of a span with the heads that share one key/value head. Included
// inside a code path's namespace.
//
// Online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022) over tiles of 64 positions that begin at
// multiples of 64, from the first tile a query may see to its own. What a query vector does is a chain of operations of
// its own, lane by lane, that depends on its position only: neighbours in the item change nothing, and tiles or lanes
// hidden from it add exact zeros.

struct Item {
  const AttentionJob& job;
  int rows, group;           // query vectors; heads per key/value head
  int first_position;        // of the first query
  const int32_t* table;      // the span's blocks
  int kv_head, dim, padded;  // padded: dim rounded up to whole vectors
  float *q, *scores, *sums;  // [rows][dim], [rows][64], [rows][padded]
  float *top, *mass;         // [rows], [rows][W]
  float* shrink;             // [rows]: what the sums so far are multiplied with, for the tile at hand
  float* gathered;           // [dim][64]: keys of a tile whose blocks are not whole vectors
};

INLINE const float* key_page(const Item& item, int position) {
  const AttentionJob& job = item.job;
  const size_t block = static_cast<size_t>(item.table[position / job.block_size]);
  return job.keys + (block * job.kv_heads + item.kv_head) * job.dim * job.block_size + position % job.block_size;
}

INLINE const float* value_row(const Item& item, int position) {
  const AttentionJob& job = item.job;
  const size_t block = static_cast<size_t>(item.table[position / job.block_size]);
  return job.values + ((block * job.kv_heads + item.kv_head) * job.block_size + position % job.block_size) * job.dim;
}

// scores of kRows query vectors with kVectors vectors of positions; keys[v] + d * stride are W positions' dimension d
template <int kRows, int kVectors>
INLINE void scores_tile(const float* q, int dim, const float* const* keys, ptrdiff_t stride, float* out) {
  f sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
  const float* at[kVectors];
  for (int v = 0; v < kVectors; ++v) at[v] = keys[v];
  for (int d = 0; d < dim; ++d) {
    f k[kVectors];
    for (int v = 0; v < kVectors; ++v) k[v] = load(at[v]), at[v] += stride;
    for (int r = 0; r < kRows; ++r) {
      const f value = set1(q[r * dim + d]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(value, k[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(out + r * kTile + v * W, sums[r][v]);
}

template <int kRows>
NOINLINE static void scores_rows(const Item& item, int row, const float* const* keys, ptrdiff_t stride, int vectors) {
  const float* q = item.q + row * item.dim;
  float* out = item.scores + row * kTile;
  int v = 0;
  for (; v + 4 <= vectors; v += 4) scores_tile<kRows, 4>(q, item.dim, keys + v, stride, out + v * W);
  for (; v < vectors; ++v) scores_tile<kRows, 1>(q, item.dim, keys + v, stride, out + v * W);
}

// sums[kRows] = sums * shrink + scores x values, positions [begin, end) of the tile
template <int kRows, int kVectors>
INLINE void values_tile(const Item& item, int row, int column, const float* const* values, int begin, int end) {
  f sums[kRows][kVectors];
  const int left = item.dim - column;
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v)
      sums[r][v] = mul(load(item.sums + (row + r) * item.padded + column + v * W), set1(item.shrink[row + r]));
  const float* weights = item.scores + row * kTile;
  const bool whole = left >= kVectors * W;
  for (int j = begin; j < end; ++j) {
    f value[kVectors];
    const float* at = values[j] + column;
    for (int v = 0; v < kVectors; ++v) value[v] = whole ? load(at + v * W) : load_n(at + v * W, left - v * W);
    for (int r = 0; r < kRows; ++r) {
      const f weight = set1(weights[r * kTile + j]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = fma(weight, value[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) store(item.sums + (row + r) * item.padded + column + v * W, sums[r][v]);
}

template <int kRows>
NOINLINE static void values_rows(const Item& item, int row, const float* const* values, int begin, int end) {
  int column = 0;
  for (; column + 4 * W <= item.padded; column += 4 * W)
    values_tile<kRows, 4>(item, row, column, values, begin, end);
  for (; column < item.padded; column += W) values_tile<kRows, 1>(item, row, column, values, begin, end);
}

template <int kRows, class... Args>
INLINE void scores_by(int rows, const Args&... args) {
  if (rows == kRows) scores_rows<kRows>(args...);
  else if constexpr (kRows > 1) scores_by<kRows - 1>(rows, args...);
}
template <int kRows, class... Args>
INLINE void values_by(int rows, const Args&... args) {
  if (rows == kRows) values_rows<kRows>(args...);
  else if constexpr (kRows > 1) values_by<kRows - 1>(rows, args...);
}

// Hides, caps and exponentiates a row of scores; returns what the row's sums so far are to be multiplied with.
INLINE float softmax_row(const Item& item, int row, int tile_start, int vectors) {
  const AttentionJob& job = item.job;
  const int position = item.first_position + row / item.group;
  const int high = position + 1 - tile_start;
  const int low = job.window ? position - job.window + 1 - tile_start : 0;
  float* scores = item.scores + row * kTile;
  const f nothing = set1(-__builtin_inff());
  f best = nothing;
  for (int v = 0; v < vectors; ++v) {
    f score = load(scores + v * W);
    if (job.soft_cap != 0.0f) score = mul(set1(job.soft_cap), tanh(div(score, set1(job.soft_cap))));
    score = keep(score, low - v * W, high - v * W, nothing);
    store(scores + v * W, score);
    best = max(score, best);
  }
  const float before = item.top[row];
  const float found = reduce_max(best), after = found > before ? found : before;
  item.top[row] = after;
  const f shift = set1(after == -__builtin_inff() ? 0.0f : after);  // nothing seen yet: e^-inf is 0 all the same
  f mass = zero();
  for (int v = 0; v < vectors; ++v) {
    const f weight = keep(exp(sub(load(scores + v * W), shift)), low - v * W, high - v * W, zero());
    store(scores + v * W, weight);
    mass = add(mass, weight);
  }
  float shrink = 1.0f;
  if (before != after) {
    float lane[W];
    store(lane, exp(sub(set1(before), shift)));
    shrink = before == -__builtin_inff() ? 0.0f : lane[0];
  }
  store(item.mass + row * W, fma(load(item.mass + row * W), set1(shrink), mass));
  return shrink;
}

static void attend_tile(const Item& item, int tile_start, int begin, int end) {
  const AttentionJob& job = item.job;
  const int vectors = (end + W - 1) / W;
  const float* keys[kTile / W];
  ptrdiff_t stride = job.block_size;
  if (job.block_size % W == 0) {
    for (int v = 0; v < vectors; ++v) {
      const int seen = v * W + W <= begin ? begin : v * W;  // a vector wholly before the window: any block will do
      keys[v] = key_page(item, (tile_start + seen) / W * W);
    }
  } else {
    for (int j = begin; j < end; ++j) {
      const float* page = key_page(item, tile_start + j);
      for (int d = 0; d < item.dim; ++d) item.gathered[d * kTile + j] = page[d * job.block_size];
    }
    for (int v = 0; v < vectors; ++v) keys[v] = item.gathered + v * W;
    stride = kTile;
  }
  for (int row = 0; row < item.rows; row += kAttnRows)
    scores_by<kAttnRows>(item.rows - row < kAttnRows ? item.rows - row : kAttnRows, item, row, keys, stride, vectors);
  for (int row = 0; row < item.rows; ++row) item.shrink[row] = softmax_row(item, row, tile_start, vectors);
  const float* values[kTile];
  for (int j = begin; j < end; ++j) values[j] = value_row(item, tile_start + j);
  for (int row = 0; row < item.rows; row += kAttnRows)
    values_by<kAttnRows>(item.rows - row < kAttnRows ? item.rows - row : kAttnRows, item, row, values, begin,
                         end);
}

INLINE int padded_dim(int dim) { return (dim + W - 1) / W * W; }

static size_t attention_scratch(const AttentionJob& job) {
  const int group = job.heads / job.kv_heads, rows = queries_per_item(group) * group;
  return static_cast<size_t>(rows) * (job.dim + kTile + padded_dim(job.dim) + 2 + W) +
         static_cast<size_t>(job.dim) * kTile + 64;
}

static void attention(const AttentionJob& job, const AttentionItem& work, float* scratch) {
  const int group = job.heads / job.kv_heads, rows = work.count * group, padded = padded_dim(job.dim);
  Item item{job, rows, group, 0, job.tables + work.span * job.table_stride, work.kv_head, job.dim, padded,
            nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  item.scores = scratch;
  item.sums = item.scores + static_cast<size_t>(rows) * kTile;
  item.mass = item.sums + static_cast<size_t>(rows) * padded;
  item.gathered = item.mass + static_cast<size_t>(rows) * W;
  item.q = item.gathered + static_cast<size_t>(job.dim) * kTile;
  item.top = item.q + static_cast<size_t>(rows) * job.dim;
  item.shrink = item.top + rows;
  const int token = job.query_start[work.span] + work.first;
  item.first_position = job.positions[job.query_start[work.span]] + work.first;
  for (int row = 0; row < rows; ++row) {
    const int head = work.kv_head * group + row % group;
    const float* q = job.q + (token + row / group) * job.q_stride + static_cast<ptrdiff_t>(head) * job.dim;
    for (int d = 0; d < job.dim; ++d) item.q[row * job.dim + d] = q[d] * job.scale;
    item.top[row] = job.sinks ? job.sinks[head] : -__builtin_inff();
    for (int d = 0; d < padded; ++d) item.sums[row * padded + d] = 0.0f;
    for (int lane = 0; lane < W; ++lane) item.mass[row * W + lane] = 0.0f;
    if (job.sinks) item.mass[row * W] = 1.0f;  // e^(sink - sink)
  }
  const int last_position = item.first_position + work.count - 1;
  const int lowest = job.window && item.first_position >= job.window ? item.first_position - job.window + 1 : 0;
  for (int start = lowest / kTile * kTile; start <= last_position; start += kTile) {
    const int begin = lowest > start ? lowest - start : 0;
    const int end = last_position + 1 - start < kTile ? last_position + 1 - start : kTile;
    attend_tile(item, start, begin, end);
  }
  for (int row = 0; row < rows; ++row) {
    const int head = work.kv_head * group + row % group;
    float* out = job.out + (token + row / group) * job.out_stride + static_cast<ptrdiff_t>(head) * job.dim;
    const f mass = set1(reduce_add(load(item.mass + row * W)));
    for (int d = 0; d < job.dim; d += W)
      store_n(out + d, div(load(item.sums + row * padded + d), mass), job.dim - d);
  }
}
