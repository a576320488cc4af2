// Products of a few tokens with weights that a warp of its own streams through shared memory, ahead of what they are
// multiplied with: the stream goes on while the other warps wait for the phase before.
#pragma once

#include "params.cuh"

namespace {

constexpr int RED = TILE * MOST_ROWS + 32;  // floats of a warp's part of a tile, 20 words a token
constexpr int RED_TOKEN = 20;

// The ring of stages, from the side of whoever holds it.
struct Ring {
  uint32_t memory, full, empty;  // addresses in shared memory
  int stages, slot;
  uint32_t parity;

  __device__ __forceinline__ uint32_t stage() const { return memory + slot * STAGE; }
  __device__ __forceinline__ uint32_t filled() const { return full + slot * 8; }
  __device__ __forceinline__ uint32_t emptied() const { return empty + slot * 8; }
  __device__ __forceinline__ void next() {
    if (++slot == stages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Items go round the CTAs, each product's from where the one before ended, so that nobody has the larger share twice.
struct Turn {
  int offset = 0;

  __device__ __forceinline__ int first(const Product& w) {
    int item = (int)blockIdx.x - offset;
    if (item < 0) item += gridDim.x;
    offset = (offset + w.tiles * w.splits) % gridDim.x;
    return item;
  }
};

// CTAs begin at different chunks, so that they do not ask one channel of the memory all at once.
__device__ __forceinline__ int first_chunk(const Product& w) { return blockIdx.x % w.chunks; }

// The streaming warp's side: one thread.
__device__ __forceinline__ void stream(
    const Product& w, const CUtensorMap* map, int tile_rows, Turn& turn, Ring& ring, uint64_t policy) {
  const int items = w.tiles * w.splits, bytes = TILE * w.chunk * 2;
  for (int item = turn.first(w); item < items; item += gridDim.x) {
    const int tile = item / w.splits, split = item % w.splits;
    int chunk = first_chunk(w);
    for (int i = 0; i < w.chunks; i++) {
      barrier_wait(ring.emptied(), ring.parity);
      barrier_expect(ring.filled(), bytes);
      copy_tile(ring.stage(), map, (split * w.span + chunk * w.chunk) / w.box, tile * tile_rows, ring.filled(), policy);
      if (++chunk == w.chunks) chunk = 0;
      ring.next();
    }
  }
}

// Shared memory beside the ring.
struct Workspace {
  unsigned char* source;  // what weights are multiplied with, bf16 [tokens, span + 32]; attention has it in turn
  float* red;             // [2, WARPS, RED]
  float* squares;         // [MOST_ROWS, WARPS]
  int* flag;
  int turn;               // of `red`
  int rows;               // tokens of this step
};

__device__ __forceinline__ int source_stride(int span) { return span * 2 + 64; }  // bytes; no two rows in one bank

// bf16 [tokens, span] of x [tokens, stride] into shared memory.
__device__ __forceinline__ void load_source(const bf16* x, int stride, int span, const Workspace& s) {
  const uint32_t target = shared_address(s.source);
  const int pieces = span / 8, all = s.rows * pieces;
  constexpr int DEPTH = 4;  // loads in flight
  for (int at = threadIdx.x; at < all; at += CONSUMERS * DEPTH) {
    uint4 value[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const int piece = at + i * CONSUMERS, row = piece / pieces;
      value[i] = piece < all ? __ldcg(reinterpret_cast<const uint4*>(x + (size_t)row * stride) + piece % pieces)
                             : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const int piece = at + i * CONSUMERS, row = piece / pieces;
      if (piece < all) store_shared(target + row * source_stride(span) + piece % pieces * 16, value[i]);
    }
  }
  sync_consumers();
}

constexpr int NORM_PARTS = (HIDDEN + CONSUMERS * 4 - 1) / (CONSUMERS * 4);

struct Gain {
  float4 part[NORM_PARTS];

  __device__ __forceinline__ explicit Gain(const float* gain) {
#pragma unroll
    for (int i = 0; i < NORM_PARTS; i++) {
      const int at = (i * CONSUMERS + threadIdx.x) * 4;
      part[i] = at < HIDDEN ? __ldg(reinterpret_cast<const float4*>(gain + at)) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
};

// The residual stream times the norm's gain into shared memory, and the sums of squares, by which results are divided.
__device__ __forceinline__ void load_normed(const float* residual, const Gain& gain, const Workspace& s) {
  const uint32_t target = shared_address(s.source);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  constexpr int DEPTH = NORM_PARTS <= 2 ? 4 : 2;  // rows whose loads are in flight
  for (int first = 0; first < s.rows; first += DEPTH) {
    float4 value[DEPTH][NORM_PARTS];
#pragma unroll
    for (int r = 0; r < DEPTH; r++)
#pragma unroll
      for (int i = 0; i < NORM_PARTS; i++) {
        const int at = (i * CONSUMERS + threadIdx.x) * 4;
        value[r][i] = first + r < s.rows && at < HIDDEN
                          ? __ldcg(reinterpret_cast<const float4*>(residual + (size_t)(first + r) * HIDDEN + at))
                          : make_float4(0.f, 0.f, 0.f, 0.f);
      }
#pragma unroll
    for (int r = 0; r < DEPTH; r++) {
      if (first + r < s.rows) {
        float square = 0.f;
#pragma unroll
        for (int i = 0; i < NORM_PARTS; i++) {
          const int at = (i * CONSUMERS + threadIdx.x) * 4;
          const float4 v = value[r][i], w = gain.part[i];
          square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
          if (at < HIDDEN)
            store_shared(target + (first + r) * source_stride(HIDDEN) + at * 2, pack(v.x * w.x, v.y * w.y),
                         pack(v.z * w.z, v.w * w.w));
        }
#pragma unroll
        for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
        if (lane == 0) s.squares[(first + r) * WARPS + warp] = square;
      }
    }
  }
  sync_consumers();
}

// 1 / root of the mean square of a token that load_normed has loaded.
__device__ __forceinline__ float inverse_root(const Workspace& s, int token, float eps) {
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += s.squares[token * WARPS + warp];
  return rsqrtf(sum / HIDDEN + eps);
}

// A warp's part of an item: accumulators of rows g and g + 8 of the tile, tokens 2 t and 2 t + 1.
__device__ __forceinline__ void multiply_item(const Product& w, const Workspace& s, Ring& ring, float* sums) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int row_bytes = w.chunk * 2;
  // Rows lie 128 bytes or a multiple apart, so odd ones read the other half of their 128 bytes first.
  const bool odd = g & 1;
  const uint32_t here = odd ? 64 : 0, there = odd ? 0 : 64;
  // where there is no token, that of another stands: its results are not looked at
  const uint32_t x = shared_address(s.source) + (g < s.rows ? g : 0) * source_stride(w.span) + t * 16;
  float acc[2][4] = {};
  int chunk = first_chunk(w);
  for (int i = 0; i < w.chunks; i++) {
    barrier_wait(ring.filled(), ring.parity);
    const uint32_t a = ring.stage() + g * row_bytes + t * 16;
    const int end = min(w.chunk, w.span - chunk * w.chunk);
#pragma unroll 2
    for (int k = warp * SLICE; k < end; k += WARPS * SLICE) {
      const uint32_t at = a + k * 2, x_at = x + (chunk * w.chunk + k) * 2;
      const uint4 low_a = load_shared(at + here), low_b = load_shared(at + there);
      const uint4 high_a = load_shared(at + 8 * row_bytes + here), high_b = load_shared(at + 8 * row_bytes + there);
      const uint4 x0 = load_shared(x_at), x1 = load_shared(x_at + 64);
      const uint4 low0 = odd ? low_b : low_a, low1 = odd ? low_a : low_b;
      const uint4 high0 = odd ? high_b : high_a, high1 = odd ? high_a : high_b;
      // the order of inner elements is the same on both sides: 8 t and on in four pairs
      multiply_add(acc[0], low0.x, high0.x, low0.y, high0.y, x0.x, x0.y);
      multiply_add(acc[1], low0.z, high0.z, low0.w, high0.w, x0.z, x0.w);
      multiply_add(acc[0], low1.x, high1.x, low1.y, high1.y, x1.x, x1.y);
      multiply_add(acc[1], low1.z, high1.z, low1.w, high1.w, x1.z, x1.w);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(ring.emptied());
    if (++chunk == w.chunks) chunk = 0;
    ring.next();
  }
#pragma unroll
  for (int i = 0; i < 4; i++) sums[i] = acc[0][i] + acc[1][i];
}

// The warps' parts of an item are in `red` afterwards, at [token * RED_TOKEN + row] of each warp.
__device__ __forceinline__ const float* share_sums(const float* sums, Workspace& s) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float* all = s.red + s.turn * WARPS * RED;
  float* mine = all + warp * RED;
  mine[2 * t * RED_TOKEN + g] = sums[0];
  mine[(2 * t + 1) * RED_TOKEN + g] = sums[1];
  mine[2 * t * RED_TOKEN + g + 8] = sums[2];
  mine[(2 * t + 1) * RED_TOKEN + g + 8] = sums[3];
  sync_consumers();
  s.turn ^= 1;
  return all;
}

__device__ __forceinline__ float sum_of_warps(const float* all, int token, int row) {
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < WARPS; warp++) sum += all[warp * RED + token * RED_TOKEN + row];
  return sum;
}

// out [tokens, w.rows] float32 = source * weights, times each token's factor, plus `bias` if there is one.
__device__ __forceinline__ void to_floats(
    const Product& w, int item, const float* bias, float* out, float eps, Workspace& s, Ring& ring) {
  const int row = threadIdx.x & 15, token = (threadIdx.x >> 4) & 7;
  const bool mine = threadIdx.x < TILE * MOST_ROWS && token < s.rows;
  const float factor = mine ? inverse_root(s, token, eps) : 0.f;
  for (; item < w.tiles; item += gridDim.x) {
    const int at = item * TILE + row;
    float sums[4];
    const float more = bias != nullptr && mine ? __ldg(bias + at) : 0.f;
    multiply_item(w, s, ring, sums);
    const float* all = share_sums(sums, s);
    if (mine && at < w.rows) out[(size_t)token * w.rows + at] = sum_of_warps(all, token, row) * factor + more;
  }
}

// SiLU or GELU of gate, times up, both times each token's factor. A tile is 8 rows of gate and the same 8 of up.
__device__ __forceinline__ void to_activated(
    const Product& w, int item, bf16* out, float eps, Workspace& s, Ring& ring) {
  const int row = threadIdx.x & 7, token = (threadIdx.x >> 3) & 7;
  const bool mine = threadIdx.x < 8 * MOST_ROWS && token < s.rows;
  const float factor = mine ? inverse_root(s, token, eps) : 0.f;
  for (; item < w.tiles; item += gridDim.x) {
    float sums[4];
    multiply_item(w, s, ring, sums);
    const float* all = share_sums(sums, s);
    if (!mine) continue;
    const float gate = sum_of_warps(all, token, row) * factor, up = sum_of_warps(all, token, row + 8) * factor;
#if GELU
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    const float value = 0.5f * gate * (2.f / (1.f + __expf(-2.f * inner))) * up;
#else
    const float value = gate / (1.f + __expf(-gate)) * up;
#endif
    out[(size_t)token * INNER + item * 8 + row] = __float2bfloat16(value);
  }
}

// residual [tokens, HIDDEN] += source * weights. Splits of a tile are added up in their order.
__device__ __forceinline__ void to_residual(
    const Product& w, int item, float* residual, float* partial, uint32_t* tickets, Workspace& s, Ring& ring) {
  const int row = threadIdx.x & 15, token = (threadIdx.x >> 4) & 7;
  const bool mine = threadIdx.x < TILE * MOST_ROWS && token < s.rows;
  for (const int items = w.tiles * w.splits; item < items; item += gridDim.x) {
    const int tile = item / w.splits, split = item % w.splits;
    float* home = residual + (size_t)token * HIDDEN + tile * TILE + row;
    const float before = mine ? __ldcg(home) : 0.f;  // on its way while the item is multiplied
    float sums[4];
    multiply_item(w, s, ring, sums);
    const float* all = share_sums(sums, s);
    const float sum = mine ? sum_of_warps(all, token, row) : 0.f;
    if (w.splits == 1) {
      if (mine) *home = before + sum;
      continue;
    }
    float* parts = partial + (size_t)tile * w.splits * TILE * MOST_ROWS + token * TILE + row;
    if (mine) parts[(size_t)split * TILE * MOST_ROWS] = sum;
    if (!last_of(tickets + tile, w.splits, s.flag)) continue;
    if (mine) {
      float whole = before;
      for (int i = 0; i < w.splits; i++) whole += __ldcg(parts + (size_t)i * TILE * MOST_ROWS);
      *home = whole;
    }
  }
}

}  // namespace
