// What the code paths (portable, AVX2, AVX-512, AMX) have in common: packed weight formats and the table of kernels that
// each path fills in. Kernels here run on one thread and on one piece of work; api.cpp cuts the work and spreads it.
//
// Packed weights. A matrix [N, K] is cut into panels of 32 outputs; a panel's data is one contiguous stream in the
// order of K, so a step reads each weight once and forwards only. For the quantised formats a panel is a row of blocks
// of 32 k, each (sizes in bytes, every part a multiple of a cache line):
//
//   nibbles 512   group g (16 outputs) of 2, word z of 4, output n of 16: a uint32 at ((g * 4 + z) * 16 + n) * 4 whose
//                 nibbles 0, 2, 4, 6 are k = 8z .. 8z+3 and 1, 3, 5, 7 are k = 8z+4 .. 8z+7. Two masks make bytes of
//                 it; shifted by 4j and masked it is four pairs of 16-bit numbers, k = 8z + (0,2), (4,6), (1,3), (5,7)
//   bytes 1024    (Q8_0, I8) group g, word z of 8, output n: four bytes, k = 4z .. 4z+3, stored as q + 128
//   high 128      (Q5_*) a uint32 per output: the bit of k at 8 (k % 4) + k / 4
//   high 256      (Q6_K) a uint32 per output for k < 16 and one for the rest: two bits at 8 (k % 4) + 2 (k % 16 / 4)
//   scales        fp16 d [32] (I8: float32), then fp16 m [32] where the format has one: w = q * d + m
//   K formats     a header every 8 blocks (fp16 D [32], fp16 DM [32]) and byte scales in each block
//   Q*_64         a header every 8 blocks, and nothing beside the q in them: for each pair of blocks fp16 d [32], then
//                 (Q4_64) fp16 m [32]
//
// Plain formats (F32, F16, BF16) are 32 values per k.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

constexpr int kPanel = 32;    // outputs in a panel
constexpr int kBlock = 32;    // k in a block of a quantised format
constexpr int kSuper = 8;     // blocks under one header
constexpr int kTile = 64;     // positions in a tile of attention
constexpr int kChunk = 256;   // positions whose attention is one partial result
constexpr int kPrefetch = 4096;  // bytes ahead: 1 KiB was clearly slower, 2 to 16 KiB alike

enum Format : int { F32 = 0, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, I8, Q4_64, Q8_64, kNumFormats };

struct FormatInfo {
  int block;         // k per block: 1 or 32
  int block_bytes;   // of a panel's block
  int header_bytes;  // of a panel, every 8 blocks
  int source_block;  // elements in a block of the file's format
  int source_bytes;  // its bytes
};

constexpr FormatInfo kFormats[kNumFormats] = {
    {1, 128, 0, 1, 4},      {1, 64, 0, 1, 2},      {1, 64, 0, 1, 2},       {32, 576, 0, 32, 18},
    {32, 640, 0, 32, 20},   {32, 704, 0, 32, 22},  {32, 768, 0, 32, 24},   {32, 1088, 0, 32, 34},
    {32, 576, 128, 256, 144}, {32, 704, 128, 256, 176}, {32, 832, 64, 256, 210},
    {32, 1152, 0, 32, 36},  {32, 512, 512, 64, 36}, {32, 1024, 256, 64, 66},
};

// Bytes of one panel of a matrix with `k` inputs.
inline size_t panel_bytes(int format, int k) {
  const FormatInfo& info = kFormats[format];
  const size_t blocks = static_cast<size_t>(k / info.block);
  return blocks * info.block_bytes + (blocks + kSuper - 1) / kSuper * info.header_bytes;
}

// Tokens as 16-bit integers: x = q * scale, one scale for 256 k. In what order the q lie, and which exact sums of them
// are kept, is the path's own affair.
struct Tokens16 {
  int16_t* q;     // memory for [tokens][k]
  float* sums;    // memory for four words a block of 32 k
  float* scales;  // memory for [tokens][blocks of 256]
};
constexpr float kLargest16 = 32639.0f;  // of a q: its two bytes are -127 .. 127 and -128 .. 127

// Tokens as signed bytes: x = q * scale, one scale for 32 k.
struct Tokens8 {
  int8_t* q;      // [blocks of 32][tokens][32]
  float* sums;    // [blocks of 32][tokens][4]: see int8.h
  float* scales;  // [blocks of 32][tokens]
};
constexpr float kLargest8 = 127.0f;

// One panel times `tokens` rows of x. `out` points at the panel's first output; `valid` of its 32 outputs exist.
struct PanelJob {
  const uint8_t* weights;
  int format, k, valid, tokens;
  int all_tokens;  // that x16 and x8 hold
  const float* x;
  ptrdiff_t x_stride;
  float* out;
  ptrdiff_t out_stride;
  const float* bias;  // of the panel's outputs, or null
  float* scratch;     // linear_scratch() floats, 64-byte aligned
  Tokens16 x16;       // for linear16_panel, in place of x
  Tokens8 x8;         // for int8_panel, in place of x
  const uint16_t* tiles;  // for bf16_panel, in place of x: the tokens in bfloat16 as bf16.h has them, 64-byte aligned
};

// Place of the high bits of k (0 .. 31; two bits: 0 .. 15) in their uint32.
constexpr int bit_of(int k) { return 8 * (k % 4) + k / 4; }
constexpr int two_bits_of(int k) { return 8 * (k % 4) + k / 4 * 2; }

// How keys and values are stored, a page (one block of one key/value head) at a time: keys [dim][block_size], values
// [block_size][dim] as float32, bfloat16, or signed bytes with a float32 scale for each position behind them.
enum KvFormat : int { kKvF32 = 0, kKvBf16, kKvInt8 };

inline size_t kv_page_bytes(int format, int dim, int block_size) {
  const size_t positions = static_cast<size_t>(block_size), size = static_cast<size_t>(dim);
  return positions * (format == kKvF32 ? 4 * size : format == kKvBf16 ? 2 * size : size + 4);
}

// Queries [first, first + count) of one span for one key/value head. With `partial`, only the positions of chunk
// `chunk`, and what comes out goes there (attention_partial() floats), to be merged.
struct AttentionItem {
  int span, kv_head, first, count, chunk;
  float* partial;
  const AttentionItem* next;  // what its thread is likely to do then, whose first keys are brought nearer; or null
};

struct AttentionJob {
  const float* q;
  ptrdiff_t q_stride;
  float* out;
  ptrdiff_t out_stride;
  const uint8_t *keys, *values;  // pages [block][kv head]
  ptrdiff_t block_bytes;         // from block to block of either
  const int32_t *query_start, *positions, *tables;
  ptrdiff_t table_stride;
  int heads, kv_heads, dim, block_size;
  int window;  // 0: none
  int kv_format;
  float scale, soft_cap;  // soft_cap 0: none
  const float* sinks;     // null: none
  // Null: no span is a token tree. Else of each token of a tree the place in its span of the token before it (of its
  // first token -1), of tokens of other spans -2. Of a tree, `positions` are depths from the first one's; its keys and
  // values lie in the order of the span.
  const int32_t* parents;
};

struct Kernels {
  const char* name;
  void (*linear_panel)(const PanelJob& job);
  size_t (*linear_scratch)();  // floats
  void (*linear16_panel)(const PanelJob& job);  // null: this path has no 16-bit products
  void (*quantize16)(const float* x, int k, int token, int tokens, const Tokens16& to);  // token `token` of `tokens`
  void (*int8_panel)(const PanelJob& job);  // null: this path has no products of bytes
  void (*quantize_int8)(const float* x, int k, int token, int tokens, const Tokens8& to);
  void (*bf16_panel)(const PanelJob& job);  // null: this path has no products in bfloat16
  size_t (*bf16_scratch)();                 // floats
  void (*round_bf16)(const float* x, int k, uint16_t* row);
  // Around a thread's calls of bf16_panel for `tokens` tokens.
  void (*open_tiles)(int tokens);
  void (*close_tiles)();
  void (*rms_norm)(const float* x, float* residual, const float* weight, float* out, int size, float eps);
  void (*rope)(const float* x, const float* cos, const float* sin, float* out, int half, int dim);
  // kind 0: silu, 1: gelu (tanh form), 2: gelu, 3: GPT-OSS's clamped one
  void (*gated)(int kind, const float* x, float* out, int half);
  void (*uniforms)(uint32_t first, int blocks, uint32_t position, uint32_t choice, uint32_t low, uint32_t high, float* out);
  void (*elementwise)(int kind, const float* x, const float* y, float value, float* out, int size);
  void (*attention)(const AttentionJob& job, const AttentionItem& item, float* scratch);
  int attention_rows;  // most query vectors of an item over a cache in bfloat16; of trees and elsewhere it is kMaxRows
  size_t (*attention_scratch)(const AttentionJob& job);  // floats
  size_t (*attention_partial)(const AttentionJob& job, int count);  // floats, for `count` queries of a head
  // Merges `num_chunks` partial results of consecutive chunks, which lie one behind the other from item.partial on.
  void (*attention_merge)(const AttentionJob& job, const AttentionItem& item, int num_chunks, float* scratch);
};

// Whether a path was compiled in; its kernels() may be called only on a processor that can run them.
bool avx2_compiled();
bool avx512_compiled();
bool amx_compiled();
bool amx_emulated_compiled();
const Kernels* portable_kernels();
const Kernels* avx2_kernels();    // null where not compiled in
const Kernels* avx512_kernels();  // null where not compiled in
const Kernels* amx_kernels();     // null where not compiled in
const Kernels* amx_emulated_kernels();  // null where not compiled in

// Most query vectors (queries times heads that share a key/value head) of one attention item; paths may take more.
constexpr int kMaxRows = 48;
constexpr int kMaxTree = 65;  // tokens of a tree's span
inline int queries_per_item(int heads_per_kv, int rows) { return heads_per_kv >= rows ? 1 : rows / heads_per_kv; }

// pack.cpp, plain code for every processor
int pack_panel(int format, const uint8_t* rows, size_t row_bytes, const int64_t* order, int num_rows, int first, int k,
               uint8_t* out);
void unpack_row(int format, const uint8_t* matrix, int k, int row, float* out);
float half_to_float(uint16_t bits);

}  // namespace headrace
