// A decode step of up to eight rows as one kernel: embedding, layers, final norm and head. One CTA a processor; eight
// warps compute, one streams the weights of all products, in order, through a ring of stages.
//
// A phase (qkv, attention, out, gate and up, down) reads what all CTAs wrote in the phase before, so each phase has a
// counter at which every CTA arrives. Whoever has something to do in the next phase waits for it. Nothing is added up
// in the order of arrival: results are the same bits in every run.

#include <cudaTypedefs.h>

#include "attention.cuh"

namespace {

struct Shared {
  static constexpr int RED_BYTES = 2 * WARPS * RED * 4, SQUARE_BYTES = MOST_ROWS * WARPS * 4;
  static constexpr int FLAG_BYTES = 16;

  static int bytes(int stages, int source_bytes) {
    return stages * (STAGE + 16) + source_bytes + RED_BYTES + SQUARE_BYTES + FLAG_BYTES;
  }
};

__global__ void __launch_bounds__(THREADS, 1) decode_step(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ Cut cut;
  const int rows = min(*p.num_rows, p.capacity);
  if (rows <= 0) return;  // a step of padding only
  unsigned char* at = memory + p.stages * STAGE;
  Workspace s;
  s.source = at, at += p.source_bytes;
  s.red = reinterpret_cast<float*>(at), at += Shared::RED_BYTES;
  s.squares = reinterpret_cast<float*>(at), at += Shared::SQUARE_BYTES;
  s.flag = reinterpret_cast<int*>(at), at += Shared::FLAG_BYTES;
  s.turn = 0;
  s.rows = rows;
  Ring ring{shared_address(memory), shared_address(at), shared_address(at) + p.stages * 8, p.stages, 0, 0};
  if (threadIdx.x == 0) {
    cut.make(p, rows);
    for (int i = 0; i < p.stages; i++) {
      barrier_init(ring.full + i * 8, 1);
      barrier_init(ring.empty + i * 8, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  Turn turn;

  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x > CONSUMERS) return;
    const uint64_t policy = read_once();
    ring.parity = 1;  // every stage is empty
    const CUtensorMap* map = p.maps;
    for (int l = 0; l < p.num_layers; l++, map += HEAD) {
      const int ahead = l + 1 < p.num_layers ? HEAD : 1;
      for (int i = 0; i < ahead; i++) prefetch_map(map + HEAD + i);
      stream(p.products[QKV], map + QKV, TILE, turn, ring, policy);
      stream(p.products[OUT], map + OUT, TILE, turn, ring, policy);
      stream(p.products[GATE_UP], map + GATE_UP, TILE / 2, turn, ring, policy);
      stream(p.products[DOWN], map + DOWN, TILE, turn, ring, policy);
    }
    stream(p.products[HEAD], map, TILE, turn, ring, policy);
    return;
  }

  const uint32_t passed = *(volatile uint32_t*)p.epoch;
  const Epoch epoch{(passed + 1) * gridDim.x};
  for (int i = blockIdx.x * CONSUMERS + threadIdx.x; i < rows * HIDDEN / 2; i += gridDim.x * CONSUMERS) {
    const int token = i / (HIDDEN / 2), pair = i % (HIDDEN / 2);
    const size_t row = p.token_ids[token];
    const float2 value =
        __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(p.embedding + row * HIDDEN)[pair]);
    reinterpret_cast<float2*>(p.residual)[i] =
        make_float2(value.x * p.embedding_scale, value.y * p.embedding_scale);
  }
  uint32_t* ready = p.counters;  // of the phase before
  arrive(ready);
  for (int l = 0; l < p.num_layers; l++) {
    const Layer& layer = p.layers[l];
    {
      const Product& w = p.products[QKV];
      const int item = turn.first(w);
      if (item < w.tiles) {
        const Gain gain(layer.attention_gain);
        epoch.wait(ready);
        load_normed(p.residual, gain, s);
        to_floats(w, item, BIAS ? layer.qkv_bias : nullptr, p.qkv, p.eps, s, ring);
      }
      arrive(ready += COUNTER_STRIDE);
    }
    attend(p, layer, cut, ready, epoch, s);
    arrive(ready += COUNTER_STRIDE);
    {
      const Product& w = p.products[OUT];
      const int item = turn.first(w);
      if (item < w.tiles * w.splits) {
        epoch.wait(ready);
        load_source(p.mixed + item % w.splits * w.span, Q_SIZE, w.span, s);
        to_residual(w, item, p.residual, p.partial, p.product_tickets, s, ring);
      }
      arrive(ready += COUNTER_STRIDE);
    }
    {
      const Product& w = p.products[GATE_UP];
      const int item = turn.first(w);
      if (item < w.tiles) {
        const Gain gain(layer.mlp_gain);
        epoch.wait(ready);
        load_normed(p.residual, gain, s);
        to_activated(w, item, p.activated, p.eps, s, ring);
      }
      arrive(ready += COUNTER_STRIDE);
    }
    {
      const Product& w = p.products[DOWN];
      const int item = turn.first(w);
      if (item < w.tiles * w.splits) {
        epoch.wait(ready);
        load_source(p.activated + item % w.splits * w.span, INNER, w.span, s);
        to_residual(w, item, p.residual, p.partial, p.product_tickets, s, ring);
      }
      arrive(ready += COUNTER_STRIDE);
    }
  }
  const Product& w = p.products[HEAD];
  const int item = turn.first(w);
  if (item < w.tiles) {
    const Gain gain(p.final_gain);
    epoch.wait(ready);
    load_normed(p.residual, gain, s);
    to_floats(w, item, nullptr, p.logits, p.eps, s, ring);
  }
  if (blockIdx.x == 0) {
    epoch.wait(ready);  // all have read the epoch
    if (threadIdx.x == 0) *p.epoch = passed + 1;
  }
}

}  // namespace

extern "C" {

int headrace_params_bytes() { return (int)sizeof(Params); }

int headrace_attention_bytes() { return ATTENTION_BYTES; }

int headrace_shared_bytes(int stages, int source_bytes) { return Shared::bytes(stages, source_bytes); }

// A tensor map of `weight` bf16 [halves * rows, inner] whose boxes are `tile_rows` rows of each half and `chunk` inner
// elements, in rows of `box`; 128 bytes in the host's memory at `map`. 0, or an error of the CUDA driver or runtime.
int headrace_encode(void* map, void* weight, long long rows, int halves, int inner, int tile_rows, int chunk, int box) {
  static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  if (encode == nullptr) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess) return (int)error;
    if (result != cudaDriverEntryPointSuccess) return (int)cudaErrorNotSupported;
    encode = (PFN_cuTensorMapEncodeTiled_v12000)found;
  }
  const cuuint64_t dims[4] = {(cuuint64_t)box, (cuuint64_t)(inner / box), (cuuint64_t)rows, (cuuint64_t)halves};
  const cuuint64_t strides[3] = {(cuuint64_t)box * 2, (cuuint64_t)inner * 2, (cuuint64_t)rows * inner * 2};
  const cuuint32_t boxes[4] = {(cuuint32_t)box, (cuuint32_t)(chunk / box), (cuuint32_t)tile_rows, (cuuint32_t)halves};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  CUtensorMap made;
  const CUresult result = encode(&made, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, weight, dims, strides, boxes, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  *(CUtensorMap*)map = made;
  return (int)result;
}

// Lets the kernel have its shared memory; once for each device and each size. 0, or an error of the CUDA runtime.
int headrace_prepare(int shared_bytes) {
  return (int)cudaFuncSetAttribute(decode_step, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

// One step on `stream`, in `grid` CTAs that run at once. 0, or an error of the CUDA runtime.
int headrace_launch(const void* params, int grid, int shared_bytes, void* stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = (cudaStream_t)stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeCooperative;
  attribute[0].val.cooperative = 1;
  config.attrs = attribute;
  config.numAttrs = 1;
  return (int)cudaLaunchKernelEx(&config, decode_step, *(const Params*)params);
}

const char* headrace_error(int error) { return cudaGetErrorString((cudaError_t)error); }
}
