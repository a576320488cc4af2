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

// Whether a thread is the last of `arrivals` that come for a ticket, which is then as good as new. The last one sees what
// the others wrote before they came, and what their CTAs wrote before a barrier.
__device__ __forceinline__ bool take_ticket(uint32_t* ticket, int arrivals) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(ticket) : "memory");
  const bool last = (int)before == arrivals - 1;
  if (last) *ticket = 0;
  return last;
}

// The same for a CTA: all consumers call it and get the same answer.
__device__ __forceinline__ bool last_of(uint32_t* ticket, int arrivals) {
  volatile int* flag = reinterpret_cast<int*>(shared + FLAG_AT);
  sync_consumers();
  if (threadIdx.x == 0) *flag = take_ticket(ticket, arrivals);
  sync_consumers();
  return *flag != 0;
}

// Items go round the CTAs, each product's from where the one before ended, so that nobody has the larger share twice.
struct Turn {
  int offset = 0;

  __device__ __forceinline__ int first(const Product& w) {
    int item = (int)blockIdx.x - offset;
    if (item < 0) item += gridDim.x;
    offset += w.advance;
    if (offset >= (int)gridDim.x) offset -= gridDim.x;
    return item;
  }
};

// CTAs begin at different chunks, so that they do not ask one channel of the memory all at once.
__device__ __forceinline__ int first_chunk(const Product& w) { return w.chunks == 1 ? 0 : blockIdx.x % w.chunks; }

// Which tile an item is of, and which split of it.
__device__ __forceinline__ int tile_of(const Product& w, int item) { return w.splits == 1 ? item : item / w.splits; }
__device__ __forceinline__ int split_of(const Product& w, int item) { return w.splits == 1 ? 0 : item % w.splits; }

// The streaming warp's side: one thread. A gated product's tile is half as many rows of each half.
__device__ __forceinline__ void stream(
    const Product& w, const CUtensorMap* map, int tile_rows, Turn& turn, Ring& ring, uint64_t policy) {
  const int items = w.tiles * w.splits, bytes = TILE * w.chunk * 2, start = first_chunk(w);
  for (int item = turn.first(w); item < items; item += gridDim.x) {
    const int tile = tile_of(w, item), split = split_of(w, item);
    int chunk = start;
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

// bf16 [tokens, w.span] of x [tokens, stride] into shared memory, with DEPTH loads of a thread in flight.
template <int DEPTH>
__device__ __forceinline__ void copy_source(const Product& w, const bf16* x, int stride, int rows) {
  const uint32_t target = shared_address(shared + SOURCE_AT);
  const int pieces = w.span / 8, all = rows * pieces;
  for (int at = tid(); at < all; at += CONSUMERS * DEPTH) {
    uint4 value[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const int piece = at + i * CONSUMERS, row = __umulhi(piece, w.magic), column = piece - row * pieces;
      value[i] = piece < all ? __ldcg(reinterpret_cast<const uint4*>(x + (size_t)row * stride) + column)
                             : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
      const int piece = at + i * CONSUMERS, row = __umulhi(piece, w.magic), column = piece - row * pieces;
      if (piece < all) store_shared(target + row * source_stride(w.span) + column * 16, value[i]);
    }
  }
}

// What is to be multiplied into shared memory, and of what was normed the factor of each token: 1 / root of the mean
// square, whose parts are squares [tokens, TILES_OF_HIDDEN].
__device__ __forceinline__ void load_source(
    const Product& w, const bf16* x, int stride, const float* squares, float eps, const State& s) {
  const int warp = tid() >> 5, lane = tid() & 31;
  constexpr int PARTS = (TILES_OF_HIDDEN + 31) / 32;
  float square[PARTS];
  const bool sums = squares != nullptr && warp < s.rows;
  if (sums)
#pragma unroll
    for (int i = 0; i < PARTS; i++)
      square[i] = 32 * i + lane < TILES_OF_HIDDEN ? __ldcg(squares + warp * TILES_OF_HIDDEN + 32 * i + lane) : 0.f;
  if (s.rows * w.span <= CONSUMERS * 8 * 2)
    copy_source<2>(w, x, stride, s.rows);
  else
    copy_source<8>(w, x, stride, s.rows);
  if (sums) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PARTS; i++) sum += square[i];
#pragma unroll
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) factors()[warp] = rsqrtf(sum * (1.f / HIDDEN) + eps);
  }
  sync_consumers();
}

// A warp's part of an item: accumulators of rows g and g + 8 of the tile, tokens 2 t and 2 t + 1.
__device__ __forceinline__ void multiply_item(const Product& w, int start, State& s, float* sums) {
  const int warp = tid() >> 5, lane = tid() & 31, g = lane >> 2, t = lane & 3;
  const int row_bytes = w.chunk * 2;
  // Rows lie 128 bytes or a multiple apart, so odd ones read the other half of their 128 bytes first.
  const bool odd = g & 1;
  const uint32_t here = odd ? 64 : 0, there = odd ? 0 : 64;
  // where there is no token, that of another stands: its results are not looked at
  const uint32_t x = shared_address(shared + SOURCE_AT) + (g < s.rows ? g : 0) * source_stride(w.span) + t * 16;
  float acc[2][4] = {};
  Ring& ring = s.ring;
  int chunk = start;
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
  return __fdividef(gate, 1.f + __expf(-2.f * inner)) * up;
#else
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
#endif
}

// The CTA that leaves the last split of a tile adds all of them up, in their order. Of the items from `first` on, up to 32.
__device__ __forceinline__ void add_splits(
    const Params& p, const Product& w, int first, const float* gain, const State& s) {
  const int items = w.tiles * w.splits;
  volatile unsigned* flags = reinterpret_cast<unsigned*>(shared + FLAG_AT);
  sync_consumers();
  if (tid() < 32) {
    const int item = first + tid() * gridDim.x;
    const bool last = item < items && take_ticket(p.product_tickets + item / w.splits, w.splits);
    const unsigned all = __ballot_sync(~0u, last);
    if (tid() == 0) *flags = all;
  }
  sync_consumers();
  const int row = tid() & 15, token = (tid() >> 4) & 7;
  if (tid() >= TILE * MOST_ROWS || token >= s.rows) return;
  for (unsigned left = *flags; left; left &= left - 1) {
    const int tile = (first + (__ffs(left) - 1) * (int)gridDim.x) / w.splits;
    const float* parts = p.partial + (size_t)tile * w.splits * TILE * MOST_ROWS + token * TILE + row;
    float sum = __ldcg(p.residual + (size_t)token * HIDDEN + tile * TILE + row);
    for (int i = 0; i < w.splits; i++) sum += __ldcg(parts + (size_t)i * TILE * MOST_ROWS);
    leave_residual(p, token, tile, sum, __ldg(gain + tile * TILE + row));
  }
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
  const int items = w.tiles * w.splits, start = first_chunk(w), first = item;
  for (; item < items; item += gridDim.x) {
    const int tile = tile_of(w, item), column = tile * TILE + row;
    // what is needed at the end is on its way while the item is multiplied
    float before = 0.f, scale = 0.f;
    if (mine && adds && w.splits == 1) {
      before = __ldcg(p.residual + (size_t)token * HIDDEN + column);
      scale = __ldg(gain + column);
    } else if (BIAS && mine && bias != nullptr) {
      before = __ldg(bias + column);
    }
    float sums[4];
    multiply_item(w, start, s, sums);
    const float* all = share_sums(sums, s);
    if (kind == GATE_UP) {
      if (mine && row < 8) {
        const float factor = factors()[token];
        const float gate = sum_of_warps(all, token, row) * factor, up = sum_of_warps(all, token, row + 8) * factor;
        p.activated[(size_t)token * INNER + tile * 8 + row] = __float2bfloat16(activated(gate, up));
      }
      continue;
    }
    if (!mine) continue;
    const float sum = sum_of_warps(all, token, row);
    if (adds && w.splits == 1) {
      leave_residual(p, token, tile, before + sum, scale);
    } else if (adds) {
      p.partial[(size_t)item * TILE * MOST_ROWS + token * TILE + row] = sum;
    } else if (column < w.rows) {
      float* out = kind == QKV ? p.qkv : p.logits;
      out[(size_t)token * w.rows + column] = sum * factors()[token] + before;
    }
  }
  if (adds && w.splits > 1) add_splits(p, w, first, gain, s);
}

}  // namespace
