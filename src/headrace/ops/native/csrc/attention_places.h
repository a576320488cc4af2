// Where attention's queries, keys and values lie, and what is kept of a row. Included inside a code path's namespace, before
// attention.h and attention_bf16.h, which say how they are gone through.

// Running softmax of some query vectors: [rows][padded] sums, [rows][W] masses (to be added up), [rows] largest scores.
struct State {
  float *sums, *mass, *top;
};

// A row of `total` shrinks by `old`, and what `more` has of it is added, shrunk by `fresh`.
INLINE void add_row(const State& total, const State& more, int row, int padded, f old, f fresh) {
  const auto add_up = [&](float* to, const float* from) __attribute__((always_inline)) {
    store(to, fma(load(to), old, mul(load(from), fresh)));
  };
  add_up(total.mass + row * W, more.mass + row * W);
  for (int d = 0; d < padded; d += W) add_up(total.sums + row * padded + d, more.sums + row * padded + d);
}

INLINE int padded_dim(int dim) { return (dim + W - 1) / W * W; }  // whole vectors

INLINE size_t state_floats(size_t rows, int dim) { return rows * (static_cast<size_t>(padded_dim(dim)) + W + 1); }

INLINE State state_at(float* memory, int rows, int dim) {
  State state;
  state.sums = memory;
  state.mass = state.sums + static_cast<size_t>(rows) * static_cast<size_t>(padded_dim(dim));
  state.top = state.mass + static_cast<size_t>(rows) * W;
  return state;
}

// The keys and values that an item's queries see.
struct Places {
  const AttentionJob& job;
  const AttentionItem& work;
  const int32_t* table;  // the span's blocks
  int kv_head, dim;
  size_t page_bytes;
  int root;         // position of a tree's first token
  const int* path;  // null, or: places in the tree's span of the query's ancestors, by depth
};

// The place in the span's blocks of the token at `position`, as the query at hand sees it.
INLINE int place(const Places& item, int position) {
  return item.path && position > item.root ? item.root + item.path[position - item.root] : position;
}

template <int kKv>
constexpr int kv_size() { return kKv == kKvF32 ? 4 : kKv == kKvBf16 ? 2 : 1; }

INLINE const uint8_t* page_of(const AttentionJob& job, const int32_t* table, int kv_head, size_t page_bytes,
                              const uint8_t* pages, int position) {
  const size_t block = static_cast<size_t>(table[position / job.block_size]);
  return pages + block * static_cast<size_t>(job.block_bytes) + static_cast<size_t>(kv_head) * page_bytes;
}
INLINE const uint8_t* page(const Places& item, const uint8_t* pages, int position) {
  return page_of(item.job, item.table, item.kv_head, item.page_bytes, pages, position);
}

template <int kKv>
INLINE const uint8_t* key_column(const Places& item, int position) {
  position = place(item, position);
  return page(item, item.job.keys, position) + position % item.job.block_size * kv_size<kKv>();
}

template <int kKv>
INLINE const uint8_t* value_row(const Places& item, int position) {
  position = place(item, position);
  return page(item, item.job.values, position) + position % item.job.block_size * item.dim * kv_size<kKv>();
}

INLINE float scale_of(const Places& item, const uint8_t* pages, int position) {
  position = place(item, position);
  const int inside = position % item.job.block_size;
  float scale;
  __builtin_memcpy(&scale, page(item, pages, position) + item.dim * item.job.block_size + 4 * inside, 4);
  return scale;
}

// Pages that are soon to be read, brought nearer a few lines at a time: pages are scattered, and too short for the
// processor to see a pattern in time.
struct Ahead {
  static constexpr int kMostPages = 4;
  const uint8_t* pages[kMostPages];
  int count = 0, lines = 0, line = 0;  // lines of each page; the next one
  INLINE void some(int number) {
    for (; number > 0 && line < lines; number -= count, ++line)
      for (int p = 0; p < count; ++p) prefetch(pages[p] + 64 * line);
  }
};

// Positions [start, end) of a tile.
INLINE Ahead ahead_of(const Places& item, const int32_t* table, int kv_head, const uint8_t* pages, int start, int end) {
  Ahead ahead;
  const int size = item.job.block_size;
  if (kTile % size == 0 && kTile / size <= Ahead::kMostPages && start < end) {
    for (int position = start; position < end && position < start + kTile; position += size)
      ahead.pages[ahead.count++] = page_of(item.job, table, kv_head, item.page_bytes, pages, position);
    ahead.lines = static_cast<int>(item.page_bytes / 64);
  }
  return ahead;
}

// Keys of the tile behind the one at `tile_start`; behind the item's last one, those with which the next item begins.
INLINE Ahead keys_ahead(const Places& item, int tile_start, int last) {
  const AttentionJob& job = item.job;
  const AttentionItem* next = item.work.next;
  int start = tile_start + kTile;
  if (start < last || !next) return ahead_of(item, item.table, item.kv_head, job.keys, start, last);
  const int position = job.positions[job.query_start[next->span]] + next->first;
  start = next->partial ? next->chunk * kChunk : job.window && position >= job.window ? position - job.window + 1 : 0;
  const int32_t* table = job.tables + next->span * job.table_stride;
  return ahead_of(item, table, next->kv_head, job.keys, start / kTile * kTile, position + 1);
}

// Positions of an item's queries, and the chunks that they see something of.
struct Extent {
  const int32_t* parents;  // of the tree that the span is, or null
  int lowest, last_position, first_chunk, last_chunk;
};
INLINE Extent extent_of(const AttentionJob& job, const AttentionItem& work, int* positions) {
  const int start = job.query_start[work.span], token = start + work.first;
  Extent extent;
  extent.parents = job.parents && job.parents[start] == -1 ? job.parents + start : nullptr;
  const int first_position = job.positions[start] + work.first;
  int lowest_query = first_position;
  extent.last_position = first_position + work.count - 1;
  for (int query = 0; query < work.count; ++query) positions[query] = first_position + query;
  if (extent.parents) {
    lowest_query = extent.last_position = job.positions[token];
    for (int query = 0; query < work.count; ++query) {
      const int position = positions[query] = job.positions[token + query];
      if (position < lowest_query) lowest_query = position;
      if (position > extent.last_position) extent.last_position = position;
    }
  }
  extent.lowest = job.window && lowest_query >= job.window ? lowest_query - job.window + 1 : 0;
  extent.first_chunk = work.partial ? work.chunk : extent.lowest / kChunk;
  extent.last_chunk = work.partial ? work.chunk : extent.last_position / kChunk;
  return extent;
}

// Places in a tree's span of the ancestors of its token at `at`, and its own, by depth.
INLINE void find_path(const int32_t* parents, int at, int depth, int* path) {
  for (; depth >= 0; --depth, at = parents[at]) path[depth] = at;
}
