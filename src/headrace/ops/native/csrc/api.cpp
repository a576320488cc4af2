// The library's plain C interface, which ops/native/library.py declares to ctypes: choice of the code path, and each
// operation cut into chunks for the thread pool. Strides are in elements. Nothing here checks shapes: Python has.
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "api.h"
#include "pool.h"
#include "processor.h"

namespace headrace {
namespace {

const Kernels* kernels = nullptr;  // set by headrace_select_path before anything else is called

constexpr int64_t kSmall = 16384;  // elements of pointwise work below which other threads are not called
constexpr int kChunksPerThread = 16;  // enough that a slow thread's rest can be taken from it

// A part of a merged matrix: `outputs` outputs in one format.
struct Segment {
  const uint8_t* data;
  int32_t format, outputs;
};

int panels_of(const Segment& segment) { return (segment.outputs + kPanel - 1) / kPanel; }

// function(first, last) over [0, count) in about kChunksPerThread ranges a thread; alone where `work` is small.
template <class Function>
void ranges(int64_t count, int64_t work, Function function) {
  if (count <= 0) return;
  if (work < kSmall) {
    function(static_cast<int64_t>(0), count);
    return;
  }
  const int64_t most = static_cast<int64_t>(num_threads()) * kChunksPerThread;
  const int64_t size = (count + most - 1) / most;
  parallel(static_cast<int>((count + size - 1) / size), [&](int chunk) {
    const int64_t first = chunk * size;
    function(first, first + size < count ? first + size : count);
  });
}

// Best first. The emulated path is for tests and runs only where it is asked for.
struct Path {
  const char* name;
  bool (*compiled)();
  bool (*runs)();
  const Kernels* (*kernels)();
  bool only_asked_for;
};
bool always() { return true; }
constexpr Path kPaths[] = {
    {"amx", amx_compiled, has_amx, amx_kernels, false},
    {"avx512", avx512_compiled, has_avx512, avx512_kernels, false},
    {"avx2", avx2_compiled, has_avx2, avx2_kernels, false},
    {"portable", always, always, portable_kernels, false},
    {"amx-emulated", amx_emulated_compiled, has_avx512, amx_emulated_kernels, true},
};

// How a segment is multiplied.
enum Product : int { kFloat32 = 0, kInt16, kBf16, kInt8 };
enum Mode : int { kExact = 0, kDefault, kFast, kBytes };
constexpr int kFewTokens = 4;  // of a product that fast mode makes in 16-bit integers even where there is bfloat16

Product product_of(int mode, int format, int tokens) {
  if (mode == kExact || format == F32) return kFloat32;
  const bool quantised = kFormats[format].block > 1, int16 = quantised && kernels->linear16_panel;
  if (mode == kBytes && quantised && kernels->int8_panel) return kInt8;
  if (kernels->bf16_panel && !(mode == kFast && int16 && tokens <= kFewTokens)) return kBf16;
  return int16 ? kInt16 : kFloat32;
}

// The calling thread's memory for a product's inputs as integers; kept, because the next product needs it again.
Tokens16 quantized_tokens(const float* x, ptrdiff_t x_stride, int tokens, int k) {
  thread_local std::vector<float> memory;
  const size_t blocks = static_cast<size_t>(k) / kBlock, scales = (static_cast<size_t>(k) + 255) / 256;
  const size_t count = static_cast<size_t>(tokens);
  const size_t needed = count * (static_cast<size_t>(k) / 2 + 4 * blocks + scales);
  if (memory.size() < needed) memory.resize(needed);
  Tokens16 out;
  out.q = reinterpret_cast<int16_t*>(memory.data());
  out.sums = memory.data() + count * static_cast<size_t>(k) / 2;
  out.scales = out.sums + count * blocks * 4;
  ranges(tokens, static_cast<int64_t>(tokens) * k, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      kernels->quantize16(x + t * x_stride, k, static_cast<int>(t), tokens, out);
  });
  return out;
}

// The same for inputs as bytes.
Tokens8 tokens_in_bytes(const float* x, ptrdiff_t x_stride, int tokens, int k) {
  thread_local std::vector<float> memory;
  const size_t blocks = static_cast<size_t>(k) / kBlock, count = static_cast<size_t>(tokens), words = kBlock / 4;
  if (memory.size() < count * blocks * (words + 5)) memory.resize(count * blocks * (words + 5));
  Tokens8 out;
  out.q = reinterpret_cast<int8_t*>(memory.data());
  out.sums = memory.data() + count * blocks * words;
  out.scales = out.sums + count * blocks * 4;
  ranges(tokens, static_cast<int64_t>(tokens) * k, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      kernels->quantize_int8(x + t * x_stride, k, static_cast<int>(t), tokens, out);
  });
  return out;
}

// The calling thread's memory for a product's inputs in bfloat16, kept as well. Rows of the last tile that no token fills
// hold what was there: nothing of them reaches other rows.
const uint16_t* bf16_tiles(const float* x, ptrdiff_t x_stride, int tokens, int k) {
  struct alignas(64) Line {
    uint16_t numbers[32];
  };
  thread_local std::vector<Line> memory;
  const size_t blocks = (static_cast<size_t>(k) + 31) / 32, needed = (static_cast<size_t>(tokens) + 15) / 16 * 16 * blocks;
  if (memory.size() < needed) memory.resize(needed);
  Line* lines = memory.data();  // [tiles][blocks of 32 k][16]
  ranges(tokens, static_cast<int64_t>(tokens) * k * 2, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      kernels->round_bf16(x + t * x_stride, k, lines[t / 16 * 16 * static_cast<int64_t>(blocks) + t % 16].numbers);
  });
  return lines->numbers;
}

// The tokens of a product that go over the weights together: in bfloat16 as many as leave their inputs in the cache while
// panel after panel reads them (half of the 2 MiB that a core has), but so many that unpacking weights again costs little.
int tokens_together(int tokens, int k) {
  constexpr int kBytes = 1 << 20, kLeast = 128;
  const int fit = kBytes / (2 * k), most = fit < kLeast ? kLeast : fit;
  const int parts = (tokens + most - 1) / most;
  return parts > 1 ? ((tokens + parts - 1) / parts + 31) / 32 * 32 : tokens;
}

uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits >> 16 | 0x40 : rounded);  // NaN stays NaN
}

// One vector of a head: element d lies at d * stride. int8: the scale goes to `scale`.
void write_vector(int format, const float* x, int dim, uint8_t* to, ptrdiff_t stride, uint8_t* scale) {
  if (format == kKvF32) {
    for (int d = 0; d < dim; ++d) std::memcpy(to + 4 * d * stride, x + d, 4);
  } else if (format == kKvBf16) {
    for (int d = 0; d < dim; ++d) {
      const uint16_t bits = to_bf16(x[d]);
      std::memcpy(to + 2 * d * stride, &bits, 2);
    }
  } else {
    float most = 0.0f, poison = 0.0f;
    for (int d = 0; d < dim; ++d) {
      most = std::fabs(x[d]) > most ? std::fabs(x[d]) : most;
      poison += x[d] * 0.0f;
    }
    const bool finite = poison == 0.0f, none = most < 1e-30f;
    const float step = !finite ? std::nanf("") : none ? 0.0f : most / 127.0f, inverse = finite && !none ? 127.0f / most : 0.0f;
    for (int d = 0; d < dim; ++d)
      to[d * stride] = finite ? static_cast<uint8_t>(static_cast<int8_t>(std::lrintf(x[d] * inverse))) : 0;
    std::memcpy(scale, &step, 4);
  }
}

// Heads [first, last) of a token's keys and values.
void write_token(const float* k, const float* v, int slot, const AttentionJob& job, int first, int last) {
  if (slot < 0) return;  // padding
  const int block = slot / job.block_size, inside = slot % job.block_size, dim = job.dim, format = job.kv_format;
  const ptrdiff_t size = format == kKvF32 ? 4 : format == kKvBf16 ? 2 : 1;
  const size_t bytes = kv_page_bytes(format, dim, job.block_size);
  for (int head = first; head < last; ++head) {
    const size_t page = static_cast<size_t>(block) * static_cast<size_t>(job.block_bytes) + head * bytes;
    uint8_t *keys = const_cast<uint8_t*>(job.keys) + page, *values = const_cast<uint8_t*>(job.values) + page;
    const ptrdiff_t scale = static_cast<ptrdiff_t>(dim) * job.block_size + 4 * inside;
    write_vector(format, k + head * dim, dim, keys + inside * size, job.block_size, keys + scale);
    write_vector(format, v + head * dim, dim, values + static_cast<ptrdiff_t>(inside) * dim * size, 1, values + scale);
  }
}

// A call's items, and what is to be merged where a span's context was cut (`chunk` is then the number of partial results
// that begin at `partial`). Bits are the same either way, so that how to cut may depend on anything.
struct AttentionWork {
  std::vector<AttentionItem> items, merges;
  std::vector<float> partials;
  int64_t size = 0;         // multiply-adds, about
  bool all_write = false;   // every span's every head is one item

  void plan(const AttentionJob& job, int spans) {
    const int group = job.heads / job.kv_heads;
    items.clear();
    merges.clear();
    size = 0;
    const auto items_of = [&](int queries) {
      int64_t found = 0;
      for (int span = 0; span < spans; ++span)
        found += (job.query_start[span + 1] - job.query_start[span] + queries - 1) / queries * job.kv_heads;
      return found;
    };
    // items as large as the path has them, unless threads would be left without
    int rows = job.kv_format == kKvBf16 && !job.parents ? kernels->attention_rows : kMaxRows;
    int most = queries_per_item(group, rows);
    for (; rows > kMaxRows && items_of(most) < 4 * num_threads(); most = queries_per_item(group, rows))
      rows = rows / 2 < kMaxRows ? kMaxRows : rows / 2;
    const int64_t whole = items_of(most);
    // where there are few items, those of short spans over long contexts are cut into their chunks
    const bool cut = num_threads() > 1 && whole < 4 * num_threads();
    std::vector<size_t> places;  // of items and merges that have partial results
    size_t floats = 0;
    for (int span = 0; span < spans; ++span) {
      const int length = job.query_start[span + 1] - job.query_start[span];
      if (length == 0) continue;
      const int position = job.positions[job.query_start[span]], last = position + length - 1;
      size += static_cast<int64_t>(length) * (position + length) * job.heads * job.dim / 4;
      const int lowest = job.window && position >= job.window ? position - job.window + 1 : 0;
      const int first = lowest / kChunk, chunks = last / kChunk - first + 1;
      if (cut && length <= most && chunks > 1) {
        const size_t step = kernels->attention_partial(job, length);
        for (int head = 0; head < job.kv_heads; ++head) {
          merges.push_back({span, head, 0, length, chunks, nullptr, nullptr});
          for (int chunk = first; chunk < first + chunks; ++chunk, floats += step) {
            items.push_back({span, head, 0, length, chunk, nullptr, nullptr});
            places.push_back(items.size() - 1);
            places.push_back(floats);
          }
        }
        continue;
      }
      // later queries have more to do: they come first, so that what is left at the end is small
      for (int query = (length - 1) / most * most; query >= 0; query -= most)
        for (int head = 0; head < job.kv_heads; ++head)
          items.push_back({span, head, query, length - query < most ? length - query : most, 0, nullptr, nullptr});
    }
    int64_t busy = 0;
    for (int span = 0; span < spans; ++span) busy += job.query_start[span + 1] > job.query_start[span];
    all_write = static_cast<int64_t>(items.size()) == busy * job.kv_heads;
    if (partials.size() < floats) partials.resize(floats);
    for (size_t i = 0; i + 1 < items.size(); ++i) items[i].next = &items[i + 1];
    for (size_t p = 0; p < places.size(); p += 2) items[places[p]].partial = partials.data() + places[p + 1];
    size_t place = 0;
    for (AttentionItem& merge : merges) {
      merge.partial = partials.data() + places[place + 1];
      place += 2 * static_cast<size_t>(merge.chunk);
    }
  }
};

// A call of headrace_linear. Tokens may go in several runs; how they are multiplied depends on how many there are in all.
struct LinearCall {
  const Segment* segments;
  int num_segments, k, mode, all_tokens, gate;
  const float* bias;

  Product product(int s) const { return product_of(mode, segments[s].format, all_tokens); }
  bool any(Product wanted) const {
    for (int s = 0; s < num_segments; ++s)
      if (product(s) == wanted) return true;
    return false;
  }

  // Panel `index` of all segments' times the job's tokens, to `to`, where the panel's own outputs begin.
  void multiply(PanelJob& job, int64_t index, float* to) const {
    int s = 0, column = 0;
    for (; index >= panels_of(segments[s]); ++s) index -= panels_of(segments[s]), column += segments[s].outputs;
    const Segment& segment = segments[s];
    const int output = static_cast<int>(index) * kPanel;
    job.format = segment.format;
    job.weights = segment.data + static_cast<size_t>(index) * panel_bytes(segment.format, k);
    job.valid = segment.outputs - output < kPanel ? segment.outputs - output : kPanel;
    job.bias = bias ? bias + column + output : nullptr;
    job.out = gate < 0 ? to + column + output : to;
    const Product how = product(s);
    (how == kBf16    ? kernels->bf16_panel
     : how == kInt16 ? kernels->linear16_panel
     : how == kInt8  ? kernels->int8_panel
                     : kernels->linear_panel)(job);
  }

  void run(const float* x, ptrdiff_t x_stride, int tokens, float* out, ptrdiff_t out_stride) const {
    int64_t total = 0;
    for (int s = 0; s < num_segments; ++s) total += panels_of(segments[s]);
    const Tokens16 x16 = any(kInt16) ? quantized_tokens(x, x_stride, tokens, k) : Tokens16{};
    const Tokens8 x8 = any(kInt8) ? tokens_in_bytes(x, x_stride, tokens, k) : Tokens8{};
    const uint16_t* tiles = any(kBf16) ? bf16_tiles(x, x_stride, tokens, k) : nullptr;
    size_t scratch = kernels->linear_scratch();
    if (tiles && kernels->bf16_scratch() > scratch) scratch = kernels->bf16_scratch();
    scratch = (scratch + 15) / 16 * 16;
    // with `gate`, two panels at a time: outputs that go through the activation, and those that are multiplied with them
    const int64_t units = gate < 0 ? total : total / 2;
    constexpr ptrdiff_t kPair = 2 * kPanel;
    ranges(units, total * kPanel * k * tokens / 8, [&](int64_t first, int64_t last) {
      PanelJob job;
      job.k = k;
      job.tokens = job.all_tokens = tokens;
      job.x = x;
      job.x_stride = x_stride;
      job.x16 = x16;
      job.x8 = x8;
      job.tiles = tiles;
      job.out_stride = gate < 0 ? out_stride : kPair;
      job.scratch = thread_scratch(scratch + (gate < 0 ? 0 : static_cast<size_t>(tokens) * kPair));
      float* pair = job.scratch + scratch;
      if (tiles) kernels->open_tiles(tokens);
      for (int64_t unit = first; unit < last; ++unit) {
        multiply(job, unit, gate < 0 ? out : pair);
        if (gate < 0) continue;
        multiply(job, unit + units, pair + kPanel);
        for (ptrdiff_t t = 0; t < tokens; ++t)
          kernels->gated(gate, pair + t * kPair, out + t * out_stride + unit * kPanel, kPanel);
      }
      if (tiles) kernels->close_tiles();
    });
  }
};

}  // namespace
}  // namespace headrace

using namespace headrace;

EXPORT int headrace_abi() { return 11; }

// Chooses the code path `forced`, or the best one where it is empty. Returns its name, null if it cannot run here.
EXPORT const char* headrace_select_path(const char* forced) {
  for (const Path& path : kPaths) {
    if (*forced ? std::strcmp(forced, path.name) != 0 : path.only_asked_for) continue;
    if (!path.compiled() || !path.runs()) continue;
    kernels = path.kernels();
    return kernels->name;
  }
  return nullptr;
}

// 0: code path `name` was not compiled in; 1: it was, and this processor or system cannot run it; 2: it runs here.
EXPORT int headrace_path_state(const char* name) {
  for (const Path& path : kPaths)
    if (!std::strcmp(name, path.name)) return path.compiled() ? 1 + path.runs() : 0;
  return 0;
}

EXPORT void headrace_set_num_threads(int count) { set_num_threads(count); }

EXPORT size_t headrace_panel_bytes(int format, int k) { return panel_bytes(format, k); }

// Packs rows of a file (see pack.cpp) into `out`; 1 if one holds a scale or a value that is not finite.
EXPORT int headrace_pack(int format, const uint8_t* rows, size_t row_bytes, const int64_t* order, int num_rows, int k,
                         uint8_t* out) {
  std::atomic<int> bad{0};
  const size_t bytes = panel_bytes(format, k);
  ranges((num_rows + kPanel - 1) / kPanel, static_cast<int64_t>(num_rows) * k, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel)
      if (pack_panel(format, rows, row_bytes, order, num_rows, static_cast<int>(panel) * kPanel, k, out + panel * bytes))
        bad.store(1, std::memory_order_relaxed);
  });
  return bad.load();
}

EXPORT void headrace_unpack_rows(int format, const uint8_t* matrix, int k, const int32_t* ids, int count, float* out,
                                 ptrdiff_t out_stride) {
  ranges(count, static_cast<int64_t>(count) * k, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) unpack_row(format, matrix, k, ids[t], out + t * out_stride);
  });
}

// out [count, size] = rows `ids` of a float32 table.
EXPORT void headrace_gather_rows(const float* table, ptrdiff_t table_stride, const int32_t* ids, int count, float* out,
                                 int size) {
  for (int t = 0; t < count; ++t)
    std::memcpy(out + static_cast<ptrdiff_t>(t) * size, table + ids[t] * table_stride,
                static_cast<size_t>(size) * sizeof(float));
}

// How the chosen path multiplies `tokens` tokens with a matrix in `format`, in `mode`: 0 in float32, 1 in 16-bit integers,
// 2 in bfloat16, 3 in bytes.
EXPORT int headrace_product(int mode, int format, int tokens) { return product_of(mode, format, tokens); }

// out [tokens, sum of outputs] = x [tokens, k] times the segments, one beside the other, + bias (null: none). `mode` 0:
// exact, 1: default, 2: fast, 3: int8; see product_of(). With `gate` 0 or more, the kind of a gated activation, out
// [tokens, half of the outputs] is that of both halves; then all segments' outputs, and half of them, are whole panels.
EXPORT void headrace_linear(const void* segments_at, int num_segments, int k, const float* x, ptrdiff_t x_stride,
                            int tokens, const float* bias, float* out, ptrdiff_t out_stride, int mode, int gate) {
  constexpr int kGated = 256;  // tokens whose pairs of panels leave room in a cache; 128 share one decoding anyway
  const LinearCall call{static_cast<const Segment*>(segments_at), num_segments, k, mode, tokens, gate, bias};
  const int together = call.any(kBf16) ? tokens_together(tokens, k) : gate < 0 ? tokens : kGated;
  for (int first = 0; first < tokens; first += together)
    call.run(x + first * x_stride, x_stride, tokens - first < together ? tokens - first : together,
             out + first * out_stride, out_stride);
}

// Norms of count0 x count1 vectors; (i, j) lies at i * stride0 + j * stride1.
EXPORT void headrace_rms_norm(const float* x, ptrdiff_t x0, ptrdiff_t x1, int count0, int count1, const float* weight,
                              float* out, ptrdiff_t out0, ptrdiff_t out1, int size, float eps) {
  ranges(count0, static_cast<int64_t>(count0) * count1 * size, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      for (int j = 0; j < count1; ++j)
        kernels->rms_norm(x + t * x0 + j * x1, nullptr, weight, out + t * out0 + j * out1, size, eps);
  });
}

EXPORT void headrace_add_rms_norm(const float* x, ptrdiff_t x_stride, float* residual, ptrdiff_t residual_stride,
                                  int tokens, const float* weight, float* out, ptrdiff_t out_stride, int size,
                                  float eps) {
  ranges(tokens, static_cast<int64_t>(tokens) * size, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      kernels->rms_norm(x + t * x_stride, residual + t * residual_stride, weight, out + t * out_stride, size, eps);
  });
}

// Heads [tokens, heads, dim] turned by cos and sin [tokens, half].
EXPORT void headrace_rope(const float* x, ptrdiff_t x0, ptrdiff_t x1, int tokens, int heads, const float* cos,
                          const float* sin, ptrdiff_t angle_stride, float* out, ptrdiff_t out0, ptrdiff_t out1,
                          int half, int dim) {
  ranges(tokens, static_cast<int64_t>(tokens) * heads * dim, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      for (int head = 0; head < heads; ++head)
        kernels->rope(x + t * x0 + head * x1, cos + t * angle_stride, sin + t * angle_stride,
                      out + t * out0 + head * out1, half, dim);
  });
}

EXPORT void headrace_gated(int kind, const float* x, ptrdiff_t x_stride, float* out, ptrdiff_t out_stride, int tokens,
                           int half) {
  ranges(tokens, static_cast<int64_t>(tokens) * half * 4, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) kernels->gated(kind, x + t * x_stride, out + t * out_stride, half);
  });
}

// Numbers in (0, 1), out [rows][4 * blocks]: see `uniforms` in pointwise.h.
EXPORT void headrace_uniforms(int64_t first, int blocks, const int64_t* positions, const int64_t* seeds,
                              const int64_t* choices, int rows, float* out) {
  constexpr int kPiece = 2048;  // blocks, a multiple of what goes at a time
  const int pieces = (blocks + kPiece - 1) / kPiece;
  ranges(int64_t{rows} * pieces, int64_t{rows} * blocks * 16, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / pieces, start = item % pieces * kPiece;
      const int count = static_cast<int>(blocks - start < kPiece ? blocks - start : kPiece);
      kernels->uniforms(static_cast<uint32_t>(first + start), count, static_cast<uint32_t>(positions[row]),
                        static_cast<uint32_t>(choices[row]), static_cast<uint32_t>(seeds[row]),
                        static_cast<uint32_t>(static_cast<uint64_t>(seeds[row]) >> 32), out + (row * blocks + start) * 4);
    }
  });
}

// Rows of `size` numbers, each by itself: x * value, value * tanh(x / value), or x + y (pointwise.h).
EXPORT void headrace_elementwise(int kind, const float* x, ptrdiff_t x_stride, const float* y, ptrdiff_t y_stride,
                                 float value, float* out, ptrdiff_t out_stride, int rows, int size) {
  const int64_t work = static_cast<int64_t>(rows) * size * (kind == 1 ? 8 : 1);
  ranges(rows, work, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      kernels->elementwise(kind, x + t * x_stride, y ? y + t * y_stride : nullptr, value, out + t * out_stride, size);
  });
}

// Writes k and v [tokens, kv heads * dim] to their slots, then attends: out [tokens, heads * dim].
EXPORT void headrace_attention(const AttentionJob* call, const float* k, ptrdiff_t k_stride, const float* v,
                               ptrdiff_t v_stride, const int32_t* slots, int tokens, int spans) {
  const AttentionJob& job = *call;
  static thread_local AttentionWork work;
  work.plan(job, spans);
  const auto write = [&](int64_t t, int head, int end) {
    write_token(k + t * k_stride, v + t * v_stride, slots[t], job, head, end);
  };
  // a span whose heads are one item each is written by its items; what several items read is written before them
  if (!work.all_write)
    ranges(tokens, static_cast<int64_t>(tokens) * job.kv_heads * job.dim * 4, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) write(t, 0, job.kv_heads);
    });
  const auto each = [&](const std::vector<AttentionItem>& list, auto use) {
    const AttentionItem* items = list.data();  // not the list: it belongs to this thread
    const auto one = [&, items](int item) { use(items[item], thread_scratch(kernels->attention_scratch(job))); };
    const int count = static_cast<int>(list.size());
    if (work.size < kSmall)
      for (int item = 0; item < count; ++item) one(item);
    else parallel(count, one);
  };
  const bool writes = work.all_write;
  each(work.items, [&](const AttentionItem& item, float* scratch) {
    if (writes)
      for (int t = job.query_start[item.span]; t < job.query_start[item.span + 1]; ++t)
        write(t, item.kv_head, item.kv_head + 1);
    kernels->attention(job, item, scratch);
  });
  each(work.merges, [&](const AttentionItem& item, float* scratch) {
    kernels->attention_merge(job, item, item.chunk, scratch);
  });
  for (int token = job.query_start[spans]; token < tokens; ++token)  // padding
    std::memset(job.out + token * job.out_stride, 0, static_cast<size_t>(job.heads) * job.dim * sizeof(float));
}
