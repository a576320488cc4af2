// What the kernel is told. The same structures are in ops/cuda/library.py; sizes are compared when the library is loaded.
//
// Constants of a build, given as macros (ops/cuda/shape.py): HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, HALF (rotating
// pairs of a head), PAGE (tokens of a block of the cache), BIAS, QK_NORM, GELU (0 or 1), STAGES (of the ring).
#pragma once

#include "primitives.cuh"

namespace {

constexpr int MOST_ROWS = 8;   // tokens: the short side of a matrix product
constexpr int TILE = 16;       // weight rows of an item: the long side
constexpr int SLICE = 64;      // inner elements that a warp takes at a time
constexpr int STAGE = 32768;   // bytes of a stage of weights
constexpr int TILES_OF_HIDDEN = HIDDEN / TILE;
constexpr int SHARING = HEADS / KV_HEADS;  // query heads of a key head
constexpr int Q_SIZE = HEADS * HEAD_DIM, KV_SIZE = KV_HEADS * HEAD_DIM;
constexpr int QKV_SIZE = Q_SIZE + 2 * KV_SIZE;

static_assert(HIDDEN % SLICE == 0 && INNER % SLICE == 0 && Q_SIZE % SLICE == 0, "inner sizes are multiples of 64");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "heads are of 64 or 128");
static_assert(HEADS % KV_HEADS == 0 && SHARING <= 16, "at most 16 query heads share a key head");

// How a matrix [rows, inner] is cut: items of TILE rows times `span` inner elements, which come in `chunks` stages of
// `chunk` elements. Several spans (splits) of a tile are added up by whoever has the last of them.
struct Product {
  int tiles, splits, span, chunk, chunks, box, rows;
  int advance;     // items, modulo the number of CTAs
  uint32_t magic;  // 2^32 / (span / 8), rounded up: quotients of small numbers without a division
};

struct Layer {
  const float *attention_gain, *mlp_gain, *next_gain;  // [HIDDEN]  the last: of the norm behind the layer
  const float *qkv_bias;                   // [QKV_SIZE], with BIAS
  const float *q_gain, *k_gain;            // [HEAD_DIM], with QK_NORM
  bf16 *keys, *values;                     // [blocks, KV_HEADS, PAGE, HEAD_DIM]
};

enum { QKV, OUT, GATE_UP, DOWN, HEAD, NUM_PRODUCTS };

struct Params {
  const CUtensorMap* maps;    // of each layer QKV, OUT, GATE_UP, DOWN; then HEAD
  const Layer* layers;
  const bf16* embedding;      // [vocab, HIDDEN]
  const float *cosines, *sines;  // [positions, HALF]
  const int *num_tokens;      // [1]  that are not padding
  const int *token_ids, *positions;  // [capacity]
  const int *span_of;         // [capacity], or null: every token is a span
  const int *query_start;     // of each span its first token
  const int *rows;            // of each span that of the block table
  const int *block_table;     // [max rows, table_stride]
  float *residual;            // [MOST_ROWS, HIDDEN]
  bf16 *normed;               // [MOST_ROWS, HIDDEN]  times the next norm's gain, not yet divided by the root
  float *squares;             // [MOST_ROWS, TILES_OF_HIDDEN]  of each tile of a token's residual stream, summed
  float *qkv;                 // [MOST_ROWS, QKV_SIZE]
  bf16 *mixed;                // [MOST_ROWS, Q_SIZE]  what attention gives
  bf16 *activated;            // [MOST_ROWS, INNER]
  float *partial;             // [tiles, splits, MOST_ROWS, TILE]
  float *part_out, *part_norm;  // [units, SHARING * HEAD_DIM], [units, SHARING, 2]
  float *logits;              // [capacity, vocab]
  uint32_t *epoch, *counters, *product_tickets, *unit_tickets;
  Product products[NUM_PRODUCTS];
  int num_layers, capacity, table_stride, least_keys;
  float eps, head_eps, scale, embedding_scale;
};

constexpr int COUNTER_STRIDE = 32;  // words: a cache line each

}  // namespace
