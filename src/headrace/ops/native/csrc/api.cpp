// The library's plain C interface, which ops/native/library.py declares to ctypes: choice of the code path, and each
// operation cut into chunks for the thread pool. Strides are in elements. Nothing here checks shapes: Python has.
#include <atomic>
#include <cstring>
#include <vector>

#include "api.h"
#include "pool.h"

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

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
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
  ranges(tokens, static_cast<int64_t>(tokens) * k * 4, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      kernels->quantize16(x + t * x_stride, k, out.q + t * k, out.sums + t * static_cast<int64_t>(blocks) * 4,
                          out.scales + t * static_cast<int64_t>(scales));
  });
  return out;
}

void write_token(const float* k, const float* v, int slot, const AttentionJob& job, float* keys, float* values) {
  if (slot < 0) return;  // padding
  const int block = slot / job.block_size, inside = slot % job.block_size;
  for (int head = 0; head < job.kv_heads; ++head) {
    const size_t page = (static_cast<size_t>(block) * job.kv_heads + head) * job.dim * job.block_size;
    float* key = keys + page + inside;
    for (int d = 0; d < job.dim; ++d) key[static_cast<size_t>(d) * job.block_size] = k[head * job.dim + d];
    std::memcpy(values + page + static_cast<size_t>(inside) * job.dim, v + head * job.dim,
                static_cast<size_t>(job.dim) * sizeof(float));
  }
}

}  // namespace
}  // namespace headrace

using namespace headrace;

EXPORT int headrace_abi() { return 3; }

// Chooses the code path `forced`, or the best one where it is empty. Returns its name, null if it cannot run here.
EXPORT const char* headrace_select_path(const char* forced) {
  const bool any = !*forced;
  const Kernels* found = nullptr;
  if (!found && (any || !std::strcmp(forced, "avx512")) && has_avx512()) found = avx512_kernels();
  if (!found && (any || !std::strcmp(forced, "avx2")) && has_avx2()) found = avx2_kernels();
  if (!found && (any || !std::strcmp(forced, "portable"))) found = portable_kernels();
  if (!found) return nullptr;
  kernels = found;
  return kernels->name;
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

// Whether the chosen path has 16-bit products.
EXPORT int headrace_has_int16() { return kernels->linear16_panel != nullptr; }

// out [tokens, sum of outputs] = x [tokens, k] times the segments, one beside the other, + bias (null: none). With
// `int16`, quantised segments are multiplied in 16-bit integers (linear16.h), plain ones in float32 all the same.
EXPORT void headrace_linear(const void* segments_at, int num_segments, int k, const float* x, ptrdiff_t x_stride,
                            int tokens, const float* bias, float* out, ptrdiff_t out_stride, int int16) {
  const Segment* segments = static_cast<const Segment*>(segments_at);
  int64_t total = 0;
  bool any_quantised = false;
  for (int s = 0; s < num_segments; ++s) {
    total += panels_of(segments[s]);
    any_quantised |= kFormats[segments[s].format].block > 1;
  }
  int16 = int16 && any_quantised && kernels->linear16_panel;
  const Tokens16 x16 = int16 ? quantized_tokens(x, x_stride, tokens, k) : Tokens16{};
  ranges(total, total * kPanel * k * tokens / 8, [&](int64_t first, int64_t last) {
    PanelJob job;
    job.k = k;
    job.tokens = tokens;
    job.x = x;
    job.x_stride = x_stride;
    job.x16 = x16;
    job.out_stride = out_stride;
    job.scratch = thread_scratch(kernels->linear_scratch());
    int64_t start = 0;
    int column = 0;
    for (int s = 0; s < num_segments && start < last; ++s) {
      const Segment& segment = segments[s];
      const int64_t panels = panels_of(segment);
      const size_t bytes = panel_bytes(segment.format, k);
      const auto panel = int16 && kFormats[segment.format].block > 1 ? kernels->linear16_panel : kernels->linear_panel;
      job.format = segment.format;
      for (int64_t p = first > start ? first - start : 0; p < panels && start + p < last; ++p) {
        const int output = static_cast<int>(p) * kPanel;
        job.weights = segment.data + p * bytes;
        job.valid = segment.outputs - output < kPanel ? segment.outputs - output : kPanel;
        job.out = out + column + output;
        job.bias = bias ? bias + column + output : nullptr;
        panel(job);
      }
      start += panels;
      column += segment.outputs;
    }
  });
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

// Writes k and v [tokens, kv heads * dim] to their slots, then attends: out [tokens, heads * dim].
EXPORT void headrace_attention(const AttentionJob* call, const float* k, ptrdiff_t k_stride, const float* v,
                               ptrdiff_t v_stride, const int32_t* slots, int tokens, int spans) {
  const AttentionJob& job = *call;
  float *keys = const_cast<float*>(job.keys), *values = const_cast<float*>(job.values);
  ranges(tokens, static_cast<int64_t>(tokens) * job.kv_heads * job.dim * 4, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      write_token(k + t * k_stride, v + t * v_stride, slots[t], job, keys, values);
  });
  const int group = job.heads / job.kv_heads, most = queries_per_item(group);
  std::vector<AttentionItem> items;
  int64_t work = 0;
  for (int span = 0; span < spans; ++span) {
    const int length = job.query_start[span + 1] - job.query_start[span];
    if (length == 0) continue;
    work += static_cast<int64_t>(length) * (job.positions[job.query_start[span]] + length) * job.heads * job.dim / 4;
    // later queries have more to do: they come first, so that what is left at the end is small
    for (int first = (length - 1) / most * most; first >= 0; first -= most)
      for (int head = 0; head < job.kv_heads; ++head)
        items.push_back({span, head, first, length - first < most ? length - first : most});
  }
  const auto attend = [&](int64_t item) {
    kernels->attention(job, items[static_cast<size_t>(item)], thread_scratch(kernels->attention_scratch(job)));
  };
  const int count = static_cast<int>(items.size());
  if (work < kSmall) {
    for (int item = 0; item < count; ++item) attend(item);
  } else {
    parallel(count, attend);
  }
  for (int token = job.query_start[spans]; token < tokens; ++token)  // padding
    std::memset(job.out + token * job.out_stride, 0, static_cast<size_t>(job.heads) * job.dim * sizeof(float));
}
