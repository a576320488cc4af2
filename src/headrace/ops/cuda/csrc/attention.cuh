// Attention of tokens, one by one, over head-major pages: norms of heads, rotation, writing the new key and value, and the
// context in parts (Flash-Decoding, Dao et al. 2023), which the last of a token and key head adds up in their order. Keys
// of tokens before it in its span, as of drafts that are verified, are not in the cache yet: they are made anew of the
// projection, which all can read.
#pragma once

#include "product.cuh"

namespace {

constexpr int KEYS = 16;  // that a warp takes at a time
constexpr int MATES = SHARING <= 8 ? 1 : 2;  // eights of query heads
constexpr int BLOCKS = HEAD_DIM / 32;  // of a head, for scores
constexpr int HALVES = HEAD_DIM / 64;  // of a head, for sums of values
constexpr int LANE_DIMS = HEAD_DIM / 32;
constexpr int Q_STRIDE = HEAD_DIM * 2 + 64;  // bytes; no two heads in one bank

// Where things lie behind SOURCE_AT while attention runs.
constexpr int Q_BYTES = 16 * Q_STRIDE, NEW_BYTES = HEAD_DIM * 2;  // of a key or value of this step
constexpr int SCRATCH_AT = Q_BYTES + 2 * MOST_ROWS * NEW_BYTES, SCRATCH_BYTES = WARPS * HEAD_DIM * 4;
constexpr int NORM_AT = SCRATCH_AT + SCRATCH_BYTES, NORM_BYTES = WARPS * 16 * 2 * 4;
constexpr int SUMS_AT = NORM_AT + NORM_BYTES;
constexpr int ATTENTION_BYTES = SUMS_AT + WARPS * SHARING * HEAD_DIM * 4;

constexpr float NOTHING = -1e30f;  // a maximum over no key

// How this step's contexts are cut: the same in every CTA and layer.
struct Cut {
  int keys;                  // of a part, a multiple of KEYS
  int length[MOST_ROWS];     // of each token's context, itself included
  int cached[MOST_ROWS];     // of it, what the cache held before this step
  int home[MOST_ROWS];       // row of the block table
  int first[MOST_ROWS + 1];  // part of each token, counted over all tokens

  // The first warp does it: each lane tries another size, and the smallest that leaves no processor a second part counts.
  __device__ __forceinline__ void make(const Params& p, int tokens) {
    const int lane = threadIdx.x;
    int own = 0;
    if (lane < tokens) {
      const int span = p.span_of == nullptr ? lane : p.span_of[lane];
      own = p.positions[lane] + 1;
      home[lane] = p.rows[span];
      length[lane] = own;
      cached[lane] = p.span_of == nullptr ? own - 1 : p.positions[p.query_start[span]];
    }
    const int total = __reduce_add_sync(~0u, own), longest = __reduce_max_sync(~0u, own);
    const int places = max((int)gridDim.x / KV_HEADS, tokens);
    const int least = max((total + places - 1) / places, p.least_keys);
    int size = least + (int)((long long)max(longest - least, 0) * lane * lane / (31 * 31));
    size = (size + KEYS - 1) / KEYS * KEYS;
    int parts = 0;
    for (int token = 0; token < tokens; token++) parts += (__shfl_sync(~0u, own, token) + size - 1) / size;
    const unsigned fits = __ballot_sync(~0u, parts <= places);  // the last lane's does: a part a token
    size = __shfl_sync(~0u, size, __ffs(fits) - 1);
    __syncwarp();
    if (lane != 0) return;
    keys = size;
    first[0] = 0;
    for (int token = 0; token < MOST_ROWS; token++)
      first[token + 1] = first[token] + (token < tokens ? (length[token] + size - 1) / size : 0);
  }
};

// What a warp holds of KEYS keys and values: of keys g and g + 8 dimensions 32 b + 8 t and on; of values 2 t, 2 t + 1,
// 2 t + 8, 2 t + 9 dimensions 64 h + 8 g and on.
struct Tile {
  uint4 key[2][BLOCKS], value[4][HALVES];
};

struct Context {
  const bf16 *keys, *values;  // of the layer and key head
  const int* table;           // blocks of the row
  int end;                    // keys in the cache that are seen: those of this step are not among them

  __device__ __forceinline__ size_t place(int key) const {
    return ((size_t)__ldg(table + key / PAGE) * KV_HEADS * PAGE + key % PAGE) * HEAD_DIM;
  }
  // Where a key of the tile at `from` is, seen or not; blocks that are no multiple of a tile are looked up key by key.
  __device__ __forceinline__ const bf16* source(const bf16* pages, size_t home, int from, int offset) const {
    if (PAGE % KEYS == 0) return pages + home + offset * HEAD_DIM;
    return pages + place(min(from + offset, max(end - 1, 0)));
  }
  __device__ __forceinline__ size_t tile_home(int from) const {
    return PAGE % KEYS == 0 && from < end ? place(from) : 0;
  }
  __device__ __forceinline__ void load_keys(int from, int lane, Tile& tile) const {
    const int g = lane >> 2, t = lane & 3;
    const size_t home = tile_home(from);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const bool seen = from + 8 * i + g < end;
      const bf16* at = source(keys, home, from, 8 * i + g) + 8 * t;
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
        tile.key[i][b] = seen ? __ldcg(reinterpret_cast<const uint4*>(at + 32 * b)) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void load_values(int from, int lane, Tile& tile) const {
    const int g = lane >> 2, t = lane & 3;
    const size_t home = tile_home(from);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int offset = 2 * t + (i & 1) + 8 * (i >> 1);
      const bool seen = from + offset < end;
      const bf16* at = source(values, home, from, offset) + 8 * g;
#pragma unroll
      for (int h = 0; h < HALVES; h++)
        tile.value[i][h] = seen ? __ldcg(reinterpret_cast<const uint4*>(at + 64 * h)) : make_uint4(0, 0, 0, 0);
    }
  }
  // Lines of both towards the cache of all processors, before they are loaded.
  __device__ __forceinline__ void prefetch(int from, int lane) const {
    const size_t home = tile_home(from);
#pragma unroll
    for (int i = 0; i < HALVES; i++) {
      const int line = 32 * i + lane, of = line % (KEYS * HALVES), offset = of / HALVES;
      const bf16* at = source(line < KEYS * HALVES ? keys : values, home, from, offset) + of % HALVES * 64;
      if (from + offset < end) asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
    }
  }
};

// Keys and values from `cached` to `end`, which are in shared memory, into a tile that begins at key `from`.
__device__ __forceinline__ void add_new_keys(uint32_t stored, int cached, int end, int from, int lane, Tile& tile) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int key = from + 8 * i + g;
    if (key >= cached && key < end)
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
        tile.key[i][b] = load_shared(stored + (key - cached) * NEW_BYTES + 64 * b + 16 * t);
  }
}

__device__ __forceinline__ void add_new_values(uint32_t stored, int cached, int end, int from, int lane, Tile& tile) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int key = from + 2 * t + (i & 1) + 8 * (i >> 1);
    if (key >= cached && key < end)
#pragma unroll
      for (int h = 0; h < HALVES; h++)
        tile.value[i][h] = load_shared(stored + (key - cached) * NEW_BYTES + 128 * h + 16 * g);
  }
}

// By what a lane's dimensions, 32 i + lane, of a head are turned.
struct Rotation {
  float cosine[LANE_DIMS], sine[LANE_DIMS];

  __device__ __forceinline__ Rotation(const Params& p, int position) {
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
      const int at = 32 * i + (tid() & 31), pair = at < HALF ? at : at - HALF;
      cosine[i] = at < 2 * HALF ? __ldg(p.cosines + (size_t)position * HALF + pair) : 1.f;
      sine[i] = at < 2 * HALF ? __ldg(p.sines + (size_t)position * HALF + pair) : 0.f;
    }
  }
};

// One head of the projection, normed and turned if `gain` and `turned` say so, as bf16 into shared memory and, if there
// is a place for it, into the cache. A warp does it.
__device__ __forceinline__ void prepare_head(
    const Params& p, const float* source, const float* gain, bool turned, const Rotation& rotation, float* scratch,
    bf16* stored, bf16* cached) {
  const int lane = tid() & 31;
  float value[LANE_DIMS];
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) value[i] = __ldcg(source + 32 * i + lane);
#if QK_NORM
  if (gain != nullptr) {
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) square += value[i] * value[i];
#pragma unroll
    for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
    const float factor = rsqrtf(square / HEAD_DIM + p.head_eps);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) value[i] *= factor * __ldg(gain + 32 * i + lane);
  }
#endif
  __syncwarp();  // who read the scratch before is done
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) scratch[32 * i + lane] = value[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < LANE_DIMS; i++) {
    const int at = 32 * i + lane;
    if (turned && at < 2 * HALF) {
      const float other = at < HALF ? -scratch[at + HALF] : scratch[at - HALF];
      value[i] = value[i] * rotation.cosine[i] + other * rotation.sine[i];
    }
    const bf16 rounded = __float2bfloat16(value[i]);
    stored[at] = rounded;
    if (cached != nullptr) cached[at] = rounded;
  }
}

// A warp's running softmax over its keys. Scores have query heads on the long side of the matrix unit: a lane has those of
// head g (and g + 8). Sums of values have dimensions there, for no half of it is empty then: a lane has heads 2 t and 2 t + 1.
struct Running {
  float best[MATES], norm[MATES];
  float sums[MATES][HALVES][4][4];  // [h][j]: dimensions 64 h + 8 g + 2 j of both heads, then the dimension behind it

  __device__ __forceinline__ Running() {
#pragma unroll
    for (int mate = 0; mate < MATES; mate++) {
      best[mate] = NOTHING, norm[mate] = 0.f;
#pragma unroll
      for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int i = 0; i < 4; i++) sums[mate][h][j][i] = 0.f;
    }
  }

  // Scores of a tile's keys become weights, two a word: keys 2 t and on, 2 t + 8 and on. Sums so far are faded.
  __device__ __forceinline__ void weigh(float (*score)[4], int from, int end, float scale, uint32_t (*weights)[2]) {
    const int t = tid() & 3;
#pragma unroll
    for (int mate = 0; mate < MATES; mate++) {
      float value[4];
      float highest = best[mate];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = from + 2 * t + (i & 1) + 8 * (i >> 1);
        value[i] = key < end ? score[i >> 1][2 * mate + (i & 1)] * scale : NOTHING;
        highest = fmaxf(highest, value[i]);
      }
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      const float fade = exp2f(best[mate] - highest);
      best[mate] = highest;
      float own = 0.f;
#pragma unroll
      for (int i = 0; i < 4; i++) own += value[i] = exp2f(value[i] - highest);
      norm[mate] = norm[mate] * fade + own;
      weights[mate][0] = pack(value[0], value[1]);
      weights[mate][1] = pack(value[2], value[3]);
      const float even = __shfl_sync(~0u, fade, 8 * t), odd = __shfl_sync(~0u, fade, 8 * t + 4);
#pragma unroll
      for (int h = 0; h < HALVES; h++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          sums[mate][h][j][0] *= even, sums[mate][h][j][1] *= odd;
          sums[mate][h][j][2] *= even, sums[mate][h][j][3] *= odd;
        }
    }
  }

  __device__ __forceinline__ void add(const uint32_t (*weights)[2], const Tile& tile) {
#pragma unroll
    for (int h = 0; h < HALVES; h++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint4 all = tile.value[i][h];
          v[i] = j == 0 ? all.x : j == 1 ? all.y : j == 2 ? all.z : all.w;
        }
        const uint32_t a0 = __byte_perm(v[0], v[1], 0x5410), a1 = __byte_perm(v[0], v[1], 0x7632);
        const uint32_t a2 = __byte_perm(v[2], v[3], 0x5410), a3 = __byte_perm(v[2], v[3], 0x7632);
#pragma unroll
        for (int mate = 0; mate < MATES; mate++)
          multiply_add(sums[mate][h][j], a0, a1, a2, a3, weights[mate][0], weights[mate][1]);
      }
  }

  // Into the warp's part of shared memory: best and norm [16, 2], sums [SHARING, HEAD_DIM].
  __device__ __forceinline__ void leave(float* norms, float* out) {
    const int lane = tid() & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int mate = 0; mate < MATES; mate++) {
      float whole = norm[mate];
      whole += __shfl_xor_sync(~0u, whole, 1);
      whole += __shfl_xor_sync(~0u, whole, 2);
      if (t == 0) norms[(g + 8 * mate) * 2] = best[mate], norms[(g + 8 * mate) * 2 + 1] = whole;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int head = 2 * t + i + 8 * mate;
        if (head >= SHARING) continue;
#pragma unroll
        for (int h = 0; h < HALVES; h++)
#pragma unroll
          for (int j = 0; j < 4; j += 2)
            *reinterpret_cast<float4*>(out + head * HEAD_DIM + 64 * h + 8 * g + 2 * j) =
                make_float4(sums[mate][h][j][i], sums[mate][h][j][2 + i], sums[mate][h][j + 1][i],
                            sums[mate][h][j + 1][2 + i]);
      }
    }
  }
};

// Parts of one result [SHARING, HEAD_DIM], each with its maxima and norms.
struct Merge {
  float best = NOTHING, norm = 0.f, sum = 0.f;

  // What the warps left; those without keys left zeros.
  __device__ __forceinline__ void of_warps(const float* norms, const float* sums, int head, int at) {
    float maximum[WARPS];
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) best = fmaxf(best, maximum[warp] = norms[warp * 32 + head * 2]);
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
      const float factor = exp2f(maximum[warp] - best);
      norm += factor * norms[warp * 32 + head * 2 + 1];
      sum += factor * sums[warp * SHARING * HEAD_DIM + at];
    }
  }

  // What CTAs left in global memory: norms [parts, KV_HEADS, SHARING, 2], sums [parts, KV_HEADS, SHARING * HEAD_DIM].
  __device__ __forceinline__ void of_parts(const float* norms, const float* sums, int parts, int head, int at) {
#pragma unroll 4
    for (int part = 0; part < parts; part++)
      best = fmaxf(best, __ldcg(norms + (size_t)part * KV_HEADS * SHARING * 2 + head * 2));
#pragma unroll 4
    for (int part = 0; part < parts; part++) {
      const float* from = norms + (size_t)part * KV_HEADS * SHARING * 2 + head * 2;
      const float factor = exp2f(__ldcg(from) - best);
      norm += factor * __ldcg(from + 1);
      sum += factor * __ldcg(sums + (size_t)part * KV_HEADS * SHARING * HEAD_DIM + at);
    }
  }

  __device__ __forceinline__ bf16 result() const { return __float2bfloat16(__fdividef(sum, norm)); }
};

// One part of a token's context for one key head and the query heads that share it.
__device__ __forceinline__ void attend_unit(
    const Params& p, const Layer& layer, const Cut& cut, int unit, const uint32_t* ready, const Epoch& epoch) {
  const int thread = tid(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int part = unit / KV_HEADS, kv_head = unit % KV_HEADS;
  int token = 0;
#pragma unroll
  for (int i = 1; i < MOST_ROWS; i++)
    if (part >= cut.first[i] && part < cut.first[i + 1]) token = i;
  const int length = cut.length[token], cached = cut.cached[token], newest = length - 1;
  const int token_first = cut.first[token], parts = cut.first[token + 1] - token_first;
  const int begin = (part - token_first) * cut.keys, end = min(length, begin + cut.keys);
  const size_t head_offset = (size_t)kv_head * PAGE * HEAD_DIM;
  const Context context{layer.keys + head_offset, layer.values + head_offset,
                        p.block_table + (size_t)cut.home[token] * p.table_stride, min(end, cached)};
  // what is in the cache does not depend on this step: it comes while the projection is waited for
  Tile tile;
  int from = begin + warp * KEYS;
  context.load_keys(from, lane, tile);
  context.load_values(from, lane, tile);
  context.prefetch(from + WARPS * KEYS, lane);
  const Rotation rotation(p, newest);
  if (ready != nullptr) epoch.wait(ready);

  const uint32_t base = shared_address(shared + SOURCE_AT), keys_at = base + Q_BYTES;
  const uint32_t values_at = keys_at + MOST_ROWS * NEW_BYTES;
  bf16* stored = reinterpret_cast<bf16*>(shared + SOURCE_AT);
  float* scratch = reinterpret_cast<float*>(shared + SOURCE_AT + SCRATCH_AT) + warp * HEAD_DIM;
  const float* projected = p.qkv + (size_t)token * QKV_SIZE;
  for (int job = warp; job < SHARING + 2 * max(end - cached, 0); job += WARPS) {
    if (job < SHARING) {
      prepare_head(p, projected + (kv_head * SHARING + job) * HEAD_DIM, layer.q_gain, true, rotation, scratch,
                   stored + job * (Q_STRIDE / 2), nullptr);
      continue;
    }
    const int index = (job - SHARING) >> 1, key = cached + index;
    const bool is_key = !((job - SHARING) & 1);
    bf16* home = nullptr;  // the others' are written by those whose newest they are
    if (key == newest) home = const_cast<bf16*>(is_key ? context.keys : context.values) + context.place(newest);
    const float* source = projected - (newest - key) * QKV_SIZE + Q_SIZE + (is_key ? 0 : KV_SIZE) + kv_head * HEAD_DIM;
    prepare_head(p, source, is_key ? layer.k_gain : nullptr, is_key, key == newest ? rotation : Rotation(p, key), scratch,
                 stored + Q_BYTES / 2 + (index + (is_key ? 0 : MOST_ROWS)) * HEAD_DIM, home);
  }
  sync_consumers();

  uint4 query[MATES][BLOCKS];
#pragma unroll
  for (int mate = 0; mate < MATES; mate++)
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
      query[mate][b] = load_shared(base + (g + 8 * mate) * Q_STRIDE + 64 * b + 16 * t);
  Running running;
  const float scale = p.scale * 1.4426950408889634f;
  for (; from < end; from += WARPS * KEYS) {
    const bool new_here = min(end, from + KEYS) > cached;
    if (new_here) add_new_keys(keys_at, cached, end, from, lane, tile);
    float score[2][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        const uint4 low = query[0][b], k = tile.key[i][b];
        const uint4 high = MATES == 2 ? query[MATES - 1][b] : make_uint4(0, 0, 0, 0);
        multiply_add(score[i], low.x, high.x, low.y, high.y, k.x, k.y);
        multiply_add(score[i], low.z, high.z, low.w, high.w, k.z, k.w);
      }
    const int next = from + WARPS * KEYS;
    context.load_keys(next, lane, tile);
    uint32_t weights[MATES][2];
    running.weigh(score, from, end, scale, weights);
    if (new_here) add_new_values(values_at, cached, end, from, lane, tile);
    running.add(weights, tile);
    context.load_values(next, lane, tile);
  }
  float* norms = reinterpret_cast<float*>(shared + SOURCE_AT + NORM_AT);
  float* sums = reinterpret_cast<float*>(shared + SOURCE_AT + SUMS_AT);
  running.leave(norms + warp * 32, sums + warp * SHARING * HEAD_DIM);
  sync_consumers();

  bf16* out = p.mixed + (size_t)token * Q_SIZE + kv_head * SHARING * HEAD_DIM;
  float* unit_out = p.part_out + (size_t)unit * SHARING * HEAD_DIM;
  float* unit_norm = p.part_norm + (size_t)unit * SHARING * 2;
  for (int at = thread; at < SHARING * HEAD_DIM; at += CONSUMERS) {
    Merge merge;
    merge.of_warps(norms, sums, at / HEAD_DIM, at);
    if (parts == 1) {
      out[at] = merge.result();
      continue;
    }
    unit_out[at] = merge.sum;
    if (at % HEAD_DIM == 0) unit_norm[at / HEAD_DIM * 2] = merge.best, unit_norm[at / HEAD_DIM * 2 + 1] = merge.norm;
  }
  if (parts == 1 || !last_of(p.unit_tickets + token * KV_HEADS + kv_head, parts)) return;
  const size_t unit_first = (size_t)token_first * KV_HEADS + kv_head;
  for (int at = thread; at < SHARING * HEAD_DIM; at += CONSUMERS) {
    Merge merge;
    merge.of_parts(p.part_norm + unit_first * SHARING * 2, p.part_out + unit_first * SHARING * HEAD_DIM, parts,
                   at / HEAD_DIM, at);
    out[at] = merge.result();
  }
}

// All of this CTA's parts.
__device__ __forceinline__ void attend(
    const Params& p, const Layer& layer, const Cut& cut, const uint32_t* ready, const Epoch& epoch) {
  const int units = cut.first[MOST_ROWS] * KV_HEADS;
  bool first = true;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    if (!first) sync_consumers();  // shared memory of the part before has been read
    attend_unit(p, layer, cut, unit, first ? ready : nullptr, epoch);
    first = false;
  }
}

}  // namespace
