// Products of a few tokens with weights that a warp of its own streams through shared memory, ahead of what they are
// multiplied with: the stream goes on while the other warps wait for the phase before.
#pragma once

#include "params.cuh"

namespace {

constexpr int RED_TOKEN = 20;  // words of a token in a warp's part of a tile: no two rows in one bank
constexpr int RED = RED_TOKEN * MOST_ROWS;

// Shared memory: the ring of weights; then, of what computes, sums of warps (two, in turn), a factor for each token, a
// flag, barriers; then what weights are multiplied with, bf16 [tokens, span + 32], which attention has in turn.
extern __shared__ __align__(1024) unsigned char shared[];
constexpr int RED_AT = STAGES * STAGE;
constexpr int FACTORS_AT = RED_AT + 2 * WARPS * RED * 4;
constexpr int FLAG_AT = FACTORS_AT + MOST_ROWS * 4;
constexpr int FULL_AT = FLAG_AT + 16;
constexpr int EMPTY_AT = FULL_AT + STAGES * 8;
constexpr int SOURCE_AT = (EMPTY_AT + STAGES * 8 + 127) / 128 * 128;

// A place in the ring, from the side of whoever fills or empties it.
struct Ring {
  uint32_t count;  // of stages so far

  __device__ __forceinline__ uint32_t slot() const { return count % STAGES; }
  __device__ __forceinline__ uint32_t parity() const { return count / STAGES & 1; }
  __device__ __forceinline__ uint32_t stage() const { return shared_address(shared) + slot() * STAGE; }
  __device__ __forceinline__ uint32_t filled() const { return shared_address(shared + FULL_AT) + slot() * 8; }
  __device__ __forceinline__ uint32_t emptied() const { return shared_address(shared + EMPTY_AT) + slot() * 8; }
};

// Whether this CTA is the last of `arrivals` that come for a ticket, which is then as good as new; all consumers call
// it and get the same answer. The last one sees what the others wrote.
__device__ __forceinline__ bool last_of(uint32_t* ticket, int arrivals) {
  volatile int* flag = reinterpret_cast<int*>(shared + FLAG_AT);
  sync_consumers();
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
    const bool last = (int)before == arrivals - 1;
    if (last) *ticket = 0;
    *flag = last;
  }
  sync_consumers();
  return *flag != 0;
}

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

// The streaming warp's side: one thread. A gated product's tile is half as many rows of each half.
__device__ __forceinline__ void stream(
    const Product& w, const CUtensorMap* map, int tile_rows, Turn& turn, Ring& ring, uint64_t policy) {
  const int items = w.tiles * w.splits, bytes = TILE * w.chunk * 2;
  for (int item = turn.first(w); item < items; item += gridDim.x) {
    const int tile = item / w.splits, split = item % w.splits;
    int chunk = first_chunk(w);
    for (int i = 0; i < w.chunks; i++) {
      barrier_wait(ring.emptied(), ring.parity() ^ 1);  // at first every stage is empty
      barrier_expect(ring.filled(), bytes);
      copy_tile(ring.stage(), map, (split * w.span + chunk * w.chunk) / w.box, tile * tile_rows, ring.filled(), policy);
      if (++chunk == w.chunks) chunk = 0;
      ring.count++;
    }
  }
}

// What a CTA knows while it computes.
struct State {
  int rows;  // tokens of this step
  int turn;  // of the sums of warps
  Ring ring;
};

__device__ __forceinline__ int source_stride(int span) { return span * 2 + 64; }  // bytes; no two rows in one bank

__device__ __forceinline__ float* factors() { return reinterpret_cast<float*>(shared + FACTORS_AT); }

// bf16 [tokens, span] of x [tokens, stride] into shared memory, and of what was normed the factor of each token:
// 1 / root of the mean square, whose parts are squares [tokens, TILES_OF_HIDDEN].
__device__ __forceinline__ void load_source(
    const bf16* x, int stride, int span, const float* squares, float eps, const State& s) {
  const int warp = tid() >> 5, lane = tid() & 31;
  constexpr int PARTS = (TILES_OF_HIDDEN + 31) / 32;
  float square[PARTS];
  const bool sums = squares != nullptr && warp < s.rows;
  if (sums)
#pragma unroll
    for (int i = 0; i < PARTS; i++)
      square[i] = 32 * i + lane < TILES_OF_HIDDEN ? __ldcg(squares + warp * TILES_OF_HIDDEN + 32 * i + lane) : 0.f;
  const uint32_t target = shared_address(shared + SOURCE_AT);
  const int pieces = span / 8, all = s.rows * pieces;
  constexpr int DEPTH = 8;  // loads in flight
  int row = tid() / pieces, column = tid() % pieces;
  for (int at = tid(); at < all; at += CONSUMERS * DEPTH) {
    uint4 value[DEPTH];
    uint32_t home[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const bool there = at + i * CONSUMERS < all;
      value[i] = there ? __ldcg(reinterpret_cast<const uint4*>(x + (size_t)row * stride) + column)
                       : make_uint4(0, 0, 0, 0);
      home[i] = target + row * source_stride(span) + column * 16;
      for (column += CONSUMERS; column >= pieces; column -= pieces) row++;
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
      if (at + i * CONSUMERS < all) store_shared(home[i], value[i]);
  }
  if (sums) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) sum += square[i];
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) factors()[warp] = rsqrtf(sum / HIDDEN + eps);
  }
  sync_consumers();
}

// A warp's part of an item: accumulators of rows g and g + 8 of the tile, tokens 2 t and 2 t + 1.
__device__ __forceinline__ void multiply_item(const Product& w, State& s, float* sums) {
  const int warp = tid() >> 5, lane = tid() & 31, g = lane >> 2, t = lane & 3;
  const int row_bytes = w.chunk * 2;
  // Rows lie 128 bytes or a multiple apart, so odd ones read the other half of their 128 bytes first.
  const bool odd = g & 1;
  const uint32_t here = odd ? 64 : 0, there = odd ? 0 : 64;
  // where there is no token, that of another stands: its results are not looked at
  const uint32_t x = shared_address(shared + SOURCE_AT) + (g < s.rows ? g : 0) * source_stride(w.span) + t * 16;
  float acc[2][4] = {};
  Ring& ring = s.ring;
  int chunk = first_chunk(w);
  for (int i = 0; i < w.chunks; i++) {
    barrier_wait(ring.filled(), ring.parity());
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
    ring.count++;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) sums[i] = acc[0][i] + acc[1][i];
}

// The warps' parts of an item are in `red` afterwards, at [token * RED_TOKEN + row] of each warp.
__device__ __forceinline__ const float* share_sums(const float* sums, State& s) {
  const int warp = tid() >> 5, lane = tid() & 31, g = lane >> 2, t = lane & 3;
  float* all = reinterpret_cast<float*>(shared + RED_AT) + s.turn * WARPS * RED;
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

// A number of the residual stream and what is made of it: bf16 times the gain of the norm that follows, and its part of
// the sum of squares. Half a warp has the 16 columns of a tile.
__device__ __forceinline__ void leave_residual(const Params& p, int token, int tile, float value, float gain) {
  const int column = threadIdx.x & 15, at = token * HIDDEN + tile * TILE + column;
  p.residual[at] = value;
  p.normed[at] = __float2bfloat16(value * gain);
  float square = value * value;
  const unsigned half = 0xffffu << (threadIdx.x & 16);
#pragma unroll
  for (int step = 8; step; step >>= 1) square += __shfl_xor_sync(half, square, step);
  if (column == 0) p.squares[token * TILES_OF_HIDDEN + tile] = square;
}

// SiLU or GELU of gate, times up.
__device__ __forceinline__ float activated(float gate, float up) {
#if GELU
  const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
  return gate / (1.f + __expf(-2.f * inner)) * up;
#else
  return gate / (1.f + __expf(-gate)) * up;
#endif
}

// This CTA's items of one product, from `item` on, whose source is in shared memory. What becomes of a result:
//   QKV      float32, times the token's factor, plus a bias
//   OUT, DOWN  added to the residual stream; `gain` is that of the norm that follows
//   GATE_UP  activated; a tile is 8 rows of gate and the same 8 of up
//   HEAD     float32, times the token's factor
__device__ __forceinline__ void multiply(
    const Params& p, int kind, const Product& w, int item, const float* bias, const float* gain, State& s) {
  const int row = tid() & 15, token = (tid() >> 4) & 7;
  const bool mine = tid() < TILE * MOST_ROWS && token < s.rows;
  const bool adds = kind == OUT || kind == DOWN;
  for (const int items = w.tiles * w.splits; item < items; item += gridDim.x) {
    const int tile = item / w.splits, split = item % w.splits, column = tile * TILE + row;
    // what is needed at the end is on its way while the item is multiplied
    float before = 0.f, scale = 0.f;
    if (mine && adds) {
      before = __ldcg(p.residual + (size_t)token * HIDDEN + column);
      scale = __ldg(gain + column);
    } else if (BIAS && mine && bias != nullptr) {
      before = __ldg(bias + column);
    }
    float sums[4];
    multiply_item(w, s, sums);
    const float* all = share_sums(sums, s);
    if (kind == GATE_UP) {
      if (mine && row < 8) {
        const float factor = factors()[token];
        const float gate = sum_of_warps(all, token, row) * factor, up = sum_of_warps(all, token, row + 8) * factor;
        p.activated[(size_t)token * INNER + tile * 8 + row] = __float2bfloat16(activated(gate, up));
      }
      continue;
    }
    float sum = mine ? sum_of_warps(all, token, row) : 0.f;
    if (!adds) {
      float* out = kind == QKV ? p.qkv : p.logits;
      if (mine && column < w.rows) out[(size_t)token * w.rows + column] = sum * factors()[token] + before;
      continue;
    }
    if (w.splits > 1) {  // the last to come adds up all splits, in their order
      float* parts = p.partial + (size_t)tile * w.splits * TILE * MOST_ROWS + token * TILE + row;
      if (mine) parts[(size_t)split * TILE * MOST_ROWS] = sum;
      if (!last_of(p.product_tickets + tile, w.splits)) continue;
      sum = 0.f;
      if (mine)
        for (int i = 0; i < w.splits; i++) sum += __ldcg(parts + (size_t)i * TILE * MOST_ROWS);
    }
    if (mine) leave_residual(p, token, tile, before + sum, scale);
  }
}

}  // namespace
