// Attention over keys and values in bfloat16, on paths that have tiles. Included inside a code path's namespace.
//
// Queries, and the weights that scores become, are rounded to bfloat16; products and sums are float32. Positions go by
// in chunks of 256 that begin at multiples of 256. In a chunk a score is the sum of what each 32 dimensions give, in
// their order; its largest score is found; weights are powers of 2 (scores carry the factor log2 e); and sums are those
// of what each 32 positions give, in their order. How 32 products are summed is the tiles' order (tiles_emulated.h).
// Chunks are merged in their order (FlashDecoding, Dao et al. 2023), whether one thread went through them or several.
//
// So a query vector has the same bits in any company: rows of a tile do not meet, hidden positions have the weight zero
// and add exact zeros, and where query vectors are few they are multiplied in registers with the tiles' bits instead
// (attention_few.h; attention_tiles.h for the others). All of it runs under the tiles' rules for denormals.
//
// Queries of a token tree go by one at a time through the chunks that tokens of the tree are in: attention.h says what
// they see.

constexpr int kStride = kChunk + W;    // floats from row to row of scores: rows begin in different sets of the cache
constexpr int kTogether = 32;          // query vectors that go through a chunk together: two tiles
constexpr int kWideRows = 192;         // of an item: they share what it takes to make tiles of keys and values
constexpr int kFewRows = 4;            // for which no tiles are made
constexpr float kLog2E = 1.44269504f;

struct Item16 : Places {
  int rows, group, padded;  // as in Item
  const int* positions;     // of each query
  float* q;                 // [rows][dim], rounded: for few
  uint16_t* q_tiles;        // [row tiles][dim blocks]
  uint8_t *keys, *values;   // tiles: [vectors of a chunk][dim blocks], [32 positions of a chunk][vectors of a head]
  float* scores;            // [kTogether][kStride]
  uint16_t* gathered;       // [vectors of a chunk][dim][W]: keys that do not lie side by side
};

// A chunk of positions, of which the item sees [begin, end), counted from `start`.
struct Chunk {
  int start, begin, end;
};

INLINE State rows_from(const State& state, int row, int padded) {
  return {state.sums + row * padded, state.mass + row * W, state.top + row};
}

// 2^x for x <= 0, within 3e-6 of it: a polynomial (minimax, p(0) = 1) for what is above the whole number below x. NaN
// stays NaN, 2^0 is 1, and what would be denormal is 0 under the tiles' rules.
INLINE f exp2(f x) {
  constexpr int kFloor = 9;  // and no exceptions
  const f r = _mm512_reduce_ps(x, kFloor);
  f p = fma(set1(0.01342668f), r, set1(0.05224247f));
  p = fma(p, r, set1(0.2412802f));
  p = fma(p, r, set1(0.69304484f));
  p = fma(p, r, set1(1.0f));
  return _mm512_scalef_ps(p, x);  // 2 to the whole number below x
}

INLINE f low_half_floats(i pairs) {  // 16 bfloat16 in the lower half of a register
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(pairs)), 16));
}
INLINE f high_half_floats(i pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(pairs, 1)), 16));
}

// 16 bfloat16 in memory as float32: each in the upper half of its word.
INLINE f widened(const uint8_t* p) {
  alignas(64) static constexpr uint16_t kPlaces[32] = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                                                       0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
  const i both = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, _mm512_load_si512(kPlaces), both));
}

// Lanes of a chunk that are shown to a query: [low, high).
struct Shown {
  int low, high;
};
INLINE Shown shown_to(const Item16& item, int query, const Chunk& chunk) {
  const int position = item.positions[query], window = item.job.window;
  const int low = window ? position - window + 1 - chunk.start : 0, high = position + 1 - chunk.start;
  return {low < 0 ? 0 : low, high > chunk.end ? chunk.end : high};
}

// Vectors of a chunk, by twos, that have what queries see.
struct Vectors {
  int first, last;
};
INLINE Vectors vectors_of(int low, int high) {
  const int first = low / 32 * 2, last = (high + 31) / 32 * 2;
  return {first, last < first ? first : last};
}

INLINE __mmask16 shown_lanes(const Shown& shown, int v) {
  const int low = shown.low - v * W, high = shown.high - v * W;
  return static_cast<__mmask16>(lanes(high < 0 ? 0 : high) & ~lanes(low < 0 ? 0 : low));
}

// Those of `vectors` all of whose lanes are shown, again by twos.
INLINE Vectors whole_vectors(const Vectors& vectors, const Shown& shown) {
  const int low = (shown.low + 31) / 32 * 2, high = shown.high / 32 * 2;
  const int first = low < vectors.last ? low > vectors.first ? low : vectors.first : vectors.last;
  return {first, high > first ? high : first};
}

INLINE f capped(f score, float cap) { return mul(set1(cap * kLog2E), tanh(div(score, set1(cap)))); }

// The largest of a row's scores in each lane.
INLINE f largest_of(const Item16& item, float* scores, const Vectors& vectors, const Shown& shown) {
  const float cap = item.job.soft_cap;
  if (cap != 0.0f)
    for (int v = vectors.first; v < vectors.last; ++v) store(scores + v * W, capped(load(scores + v * W), cap));
  f best = set1(-__builtin_inff()), other = best;
  const auto some = [&](int v) __attribute__((always_inline)) {
    best = _mm512_mask_max_ps(best, shown_lanes(shown, v), load(scores + v * W), best);
  };
  const Vectors whole = whole_vectors(vectors, shown);
  for (int v = vectors.first; v < whole.first; ++v) some(v);
  for (int v = whole.first; v < whole.last; v += 2)
    best = max(load(scores + v * W), best), other = max(load(scores + v * W + W), other);
  for (int v = whole.last; v < vectors.last; ++v) some(v);
  return max(other, best);
}

// Scores of `count` query vectors, up to 16, from row `row` of the item on, become weights: of each row and each 32
// positions use(row of them, the first of their two vectors, weights rounded). Masses and tops become the chunk's.
template <class Use>
INLINE void weigh(const Item16& item, const Chunk& chunk, int row, int count, float* scores, const Vectors& vectors,
                  const State& state, Use use) {
  alignas(64) float best[W * W], top[W];
  for (int r = 0; r < count; ++r) {
    const Shown shown = shown_to(item, (row + r) / item.group, chunk);
    store(best + r * W, largest_of(item, scores + r * kStride, vectors, shown));
  }
  if (count > 2) reduce_max_rows(best, top);  // of rows behind `count` nothing is used
  else
    for (int r = 0; r < count; ++r) top[r] = reduce_max(load(best + r * W));
  for (int r = 0; r < count; ++r) {
    const Shown shown = shown_to(item, (row + r) / item.group, chunk);
    const float* from = scores + r * kStride;
    const f shift = set1(top[r] == -__builtin_inff() ? 0.0f : top[r]);  // nothing shown: all is hidden below
    f mass = zero();
    const auto some = [&](int v) __attribute__((always_inline)) {
      const f low = _mm512_maskz_mov_ps(shown_lanes(shown, v), exp2(sub(load(from + v * W), shift)));
      const f high = _mm512_maskz_mov_ps(shown_lanes(shown, v + 1), exp2(sub(load(from + v * W + W), shift)));
      mass = add(add(mass, low), high);
      use(r, v, to_bf16(low, high));
    };
    const Vectors whole = whole_vectors(vectors, shown);
    for (int v = vectors.first; v < whole.first; v += 2) some(v);
    for (int v = whole.first; v < whole.last; v += 2) {
      const f low = exp2(sub(load(from + v * W), shift)), high = exp2(sub(load(from + v * W + W), shift));
      mass = add(add(mass, low), high);
      use(r, v, to_bf16(low, high));
    }
    for (int v = whole.last; v < vectors.last; v += 2) some(v);
    state.top[r] = top[r];
    store(state.mass + r * W, mass);
  }
}

// Where nothing is shown: nothing.
INLINE void clear_rows(const State& state, int rows, int padded) {
  for (int row = 0; row < rows; ++row) {
    for (int d = 0; d < padded; d += W) store(state.sums + row * padded + d, zero());
    store(state.mass + row * W, zero());
    state.top[row] = -__builtin_inff();
  }
}

// Adds what `more` has seen to `total`.
INLINE void merge_rows(const State& total, const State& more, int rows, int padded) {
  const f nothing = set1(-__builtin_inff());
  for (int base = 0; base < rows; base += W) {
    const int count = rows - base < W ? rows - base : W;
    const f before = load_n(total.top + base, count), found = load_n(more.top + base, count);
    const f after = max(found, before);
    const auto kept = [&](f top) __attribute__((always_inline)) {  // exactly 1 of the larger one, 0 of nothing
      const f share = _mm512_mask_mov_ps(exp2(sub(top, after)), _mm512_cmp_ps_mask(top, after, _CMP_EQ_OQ), set1(1.0f));
      return _mm512_mask_mov_ps(share, _mm512_cmp_ps_mask(top, nothing, _CMP_EQ_OQ), zero());
    };
    alignas(64) float old[W], fresh[W];
    store(old, kept(before)), store(fresh, kept(found));
    store_n(total.top + base, after, count);
    for (int r = 0; r < count; ++r) {
      const int row = base + r;
      if (more.top[row] == -__builtin_inff()) continue;
      add_row(total, more, row, padded, set1(old[r]), set1(fresh[r]));
    }
  }
}

// Before anything was seen where there are sinks.
static void begin_with_sinks(const AttentionJob& job, const AttentionItem& work, const State& total) {
  const int group = job.heads / job.kv_heads, rows = work.count * group;
  clear_rows(total, rows, padded_dim(job.dim));
  for (int row = 0; row < rows; ++row) {
    total.top[row] = job.sinks[work.kv_head * group + row % group] * kLog2E;
    total.mass[row * W] = 1.0f;  // 2^(sink - sink)
  }
}

static void write_rows(const AttentionJob& job, const AttentionItem& work, const State& total) {
  const int group = job.heads / job.kv_heads, rows = work.count * group, padded = padded_dim(job.dim);
  const int token = job.query_start[work.span] + work.first;
  for (int row = 0; row < rows; ++row) {
    const int head = work.kv_head * group + row % group;
    float* out = job.out + (token + row / group) * job.out_stride + static_cast<ptrdiff_t>(head) * job.dim;
    const f share = set1(1.0f / reduce_add(load(total.mass + row * W)));
    for (int d = 0; d < job.dim; d += W)
      store_n(out + d, mul(load(total.sums + row * padded + d), share), job.dim - d);
  }
}

// Positions [start, start + W) of a chunk as keys: where their first dimension lies, and the bytes to the next one.
struct KeyVector {
  const uint8_t* at;
  ptrdiff_t stride;
};
INLINE KeyVector key_vector(const Item16& item, const Chunk& chunk, int v) {
  const int size = item.job.block_size, last = v * W + W < chunk.end ? v * W + W : chunk.end;
  if (size % W == 0 && (!item.path || chunk.start + last - 1 <= item.root)) {
    const int seen = v * W + W <= chunk.begin ? chunk.begin : v * W;  // wholly before the window: any block will do
    return {key_column<kKvBf16>(item, (chunk.start + seen) / W * W), size * 2};
  }
  uint16_t* to = item.gathered + v * item.dim * W;
  for (int j = v * W < chunk.begin ? chunk.begin : v * W; j < last; ++j) {
    const uint8_t* column = key_column<kKvBf16>(item, chunk.start + j);
    for (int d = 0; d < item.dim; ++d) __builtin_memcpy(to + d * W + j % W, column + d * size * 2, 2);
  }
  return {reinterpret_cast<const uint8_t*>(to), W * 2};
}

// Where the values of positions [begin, end) of a chunk lie.
INLINE void find_values(const Item16& item, const Chunk& chunk, int begin, int end, const uint8_t** values) {
  for (int j = begin; j < end;) {  // block by block: finding a place takes two divisions
    const uint8_t* at = value_row<kKvBf16>(item, chunk.start + j);
    const int left = item.path ? 1 : item.job.block_size - (chunk.start + j) % item.job.block_size;
    const int stop = j + left < end ? j + left : end;
    for (; j < stop; ++j, at += item.dim * 2) values[j] = at;
  }
}

// While keys of a tile of a chunk are at work: those of the next one, behind the last one the chunk's first values.
// While values are: the next ones, behind the last ones the next chunk's keys, or the next item's.
INLINE Ahead behind_keys(const Item16& item, const Chunk& chunk, int tile) {
  const int start = chunk.start, end = start + chunk.end, next = tile + kTile;
  if (next < chunk.end) return ahead_of(item, item.table, item.kv_head, item.job.keys, start + next, end);
  const int from = start + chunk.begin / item.job.block_size * item.job.block_size;
  return ahead_of(item, item.table, item.kv_head, item.job.values, from, end);
}
INLINE Ahead behind_values(const Item16& item, const Chunk& chunk, int tile, int last) {
  const int start = chunk.start, end = start + chunk.end, next = tile + kTile;
  if (next < chunk.end) return ahead_of(item, item.table, item.kv_head, item.job.values, start + next, end);
  return keys_ahead(item, start + tile, last);
}

#include "attention_few.h"
#include "attention_tiles.h"

// State of an item's, and a partial result's, query vectors.
INLINE size_t state16_floats(int rows, int dim) { return state_floats(whole_tiles(static_cast<size_t>(rows)), dim); }
INLINE State state16_at(float* memory, int rows, int dim) {
  return state_at(memory, static_cast<int>(whole_tiles(static_cast<size_t>(rows))), dim);
}

static size_t partial16(const AttentionJob& job, int count) {
  return (state16_floats(count * (job.heads / job.kv_heads), job.dim) + W - 1) / W * W;
}

// Memory of an item, each part whole lines.
struct Memory16 {
  float *at, *const from;
  explicit Memory16(float* memory) : at(memory), from(memory) {}
  float* floats(size_t count) {
    float* part = at;
    at += (count + W - 1) / W * W;
    return part;
  }
  uint16_t* tiles(size_t count) { return reinterpret_cast<uint16_t*>(floats(count * kTileSize / sizeof(float))); }
};

// The item's parts from memory->at on, and its states: what chunks come to, and one chunk of some query vectors.
INLINE void lay_out(Item16& item, Memory16& memory, State& total, State& fresh) {
  const size_t rows = static_cast<size_t>(item.rows), dim = static_cast<size_t>(item.dim);
  const size_t blocks = static_cast<size_t>(dim_blocks(item.dim)), columns = static_cast<size_t>(item.padded / W);
  item.scores = memory.floats(kTogether * kStride);
  item.keys = reinterpret_cast<uint8_t*>(memory.tiles(kChunk / W * blocks));
  item.values = reinterpret_cast<uint8_t*>(memory.tiles(kChunk / 32 * columns));
  item.q_tiles = memory.tiles(whole_tiles(rows) / 16 * blocks);
  item.q = memory.floats(rows * dim);
  item.gathered = reinterpret_cast<uint16_t*>(memory.floats(kChunk * dim / 2));
  total = state16_at(memory.floats(state16_floats(item.rows, item.dim)), item.rows, item.dim);
  fresh = state16_at(memory.floats(state16_floats(kTogether, item.dim)), kTogether, item.dim);
}

static size_t scratch16(const AttentionJob& job) {
  const int group = job.heads / job.kv_heads, rows = queries_per_item(group, kWideRows) * group;
  const AttentionItem work = {};
  Item16 item{{job, work, nullptr, 0, job.dim, 0, 0, nullptr}, rows, group, padded_dim(job.dim),
              nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  Memory16 memory{nullptr};
  State total, fresh;
  lay_out(item, memory, total, fresh);
  return static_cast<size_t>(memory.at - memory.from);
}

NOINLINE static void attend16(const AttentionJob& job, const AttentionItem& work, float* scratch) {
  const int group = job.heads / job.kv_heads, rows = work.count * group, padded = padded_dim(job.dim);
  int positions[kWideRows];
  const Extent extent = extent_of(job, work, positions);
  Item16 item{{job, work, job.tables + work.span * job.table_stride, work.kv_head, job.dim,
               kv_page_bytes(kKvBf16, job.dim, job.block_size), job.positions[job.query_start[work.span]], nullptr},
              rows, group, padded, positions, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  Memory16 memory(scratch);
  State total, fresh;
  lay_out(item, memory, total, fresh);
  const float by = job.soft_cap == 0.0f ? job.scale * kLog2E : job.scale;
  const int token = job.query_start[work.span] + work.first, last_position = extent.last_position;
  const bool few = rows <= kFewRows;
  if (few || extent.parents)
    for (int row = 0; row < rows; ++row) {
      const int head = work.kv_head * group + row % group;
      const float* q = job.q + (token + row / group) * job.q_stride + static_cast<ptrdiff_t>(head) * job.dim;
      for (int d = 0; d < job.dim; d += W) {
        const i rounded = to_bf16(mul(load_n(q + d, job.dim - d), set1(by)), zero());
        store_n(item.q + row * job.dim + d, low_half_floats(rounded), job.dim - d);
      }
    }
  if (!few) open_tiles_with(item, by);
  if (work.partial) total = state16_at(work.partial, rows, job.dim);
  else if (job.sinks) begin_with_sinks(job, work, total);
  for (int number = extent.first_chunk; number <= extent.last_chunk; ++number) {
    const int start = number * kChunk;
    Chunk chunk{start, extent.lowest > start ? extent.lowest - start : 0,
                last_position < start + kChunk ? last_position + 1 - start : kChunk};
    // what comes first is the total, as merging it into nothing would make it
    const bool first = work.partial || (number == extent.first_chunk && !job.sinks);
    const auto into = [&](int row, int count, auto attend) __attribute__((always_inline)) {
      const State at = rows_from(total, row, padded);
      const bool saw = attend(first ? at : fresh);
      if (saw && !first) merge_rows(at, fresh, count, padded);
      else if (!saw && first) clear_rows(at, count, padded);
    };
    if (few || (extent.parents && start + kChunk > item.root + 1)) {
      int path[kMaxTree];
      const int step = few && !extent.parents ? rows : group, end = chunk.end;
      for (int from = 0; from < rows; from += step) {
        if (extent.parents) {
          const int query = from / group, position = positions[query];
          find_path(extent.parents, work.first + query, position - item.root, path);
          item.path = path;
          chunk.end = position + 1 - start < end ? position + 1 - start : end;
        }
        for (int row = from; row < from + step; row += kFewRows) {
          const int count = from + step - row < kFewRows ? from + step - row : kFewRows;
          into(row, count, [&](const State& state) {
            if (chunk.end <= chunk.begin) return false;
            few_by(item, chunk, row, count, last_position + 1, state);
            return true;
          });
        }
      }
      item.path = nullptr;
      continue;
    }
    make_key_tiles(item, chunk);
    make_value_tiles(item, chunk, last_position + 1);
    for (int row = 0; row < rows; row += kTogether) {
      const int count = rows - row < kTogether ? rows - row : kTogether;
      into(row, count, [&](const State& state) {
        return (count > 16 ? rows_on_tiles<2> : rows_on_tiles<1>)(item, chunk, row, count, state);
      });
    }
  }
  if (!few) close_tiles();
  if (!work.partial) write_rows(job, work, total);
}

NOINLINE static void merge16(const AttentionJob& job, const AttentionItem& work, int num_chunks, float* scratch) {
  const int rows = work.count * (job.heads / job.kv_heads), padded = padded_dim(job.dim);
  const State total = state16_at(scratch, rows, job.dim);
  if (job.sinks) begin_with_sinks(job, work, total);
  else clear_rows(total, rows, padded);
  for (int chunk = 0; chunk < num_chunks; ++chunk)
    merge_rows(total, state16_at(work.partial + static_cast<size_t>(chunk) * partial16(job, work.count), rows, job.dim),
               rows, padded);
  write_rows(job, work, total);
}

// Keys and values in other formats are the AVX-512 path's.
static void attention(const AttentionJob& job, const AttentionItem& work, float* scratch) {
  if (job.kv_format == kKvBf16) under_tile_rules([&] { attend16(job, work, scratch); });
  else avx512_kernels()->attention(job, work, scratch);
}
static void attention_merge(const AttentionJob& job, const AttentionItem& work, int num_chunks, float* scratch) {
  if (job.kv_format == kKvBf16) under_tile_rules([&] { merge16(job, work, num_chunks, scratch); });
  else avx512_kernels()->attention_merge(job, work, num_chunks, scratch);
}
static size_t attention_scratch(const AttentionJob& job) {
  return job.kv_format == kKvBf16 ? scratch16(job) : avx512_kernels()->attention_scratch(job);
}
static size_t attention_partial(const AttentionJob& job, int count) {
  return job.kv_format == kKvBf16 ? partial16(job, count) : avx512_kernels()->attention_partial(job, count);
}
