// A step of up to eight tokens as one kernel: embedding, layers, final norm and head. One CTA a processor; eight
// warps compute, one streams the weights of all products, in order, through a ring of stages.
//
// A phase (qkv, attention, out, gate and up, down) reads what all CTAs wrote in the phase before, so each phase has a
// counter at which every CTA arrives. Whoever has something to do in the next phase waits for it. Nothing is added up
// in the order of arrival: results are the same bits in every run.

#include <cudaTypedefs.h>

#include "attention.cuh"

namespace {

// The residual stream begins with the tokens' vectors.
__device__ __forceinline__ void embed(const Params& p, int rows) {
  constexpr int GROUPS = CONSUMERS / TILE;
  const int column = threadIdx.x & 15;
  for (int i = blockIdx.x * GROUPS + threadIdx.x / TILE; i < rows * TILES_OF_HIDDEN; i += gridDim.x * GROUPS) {
    const int token = i / TILES_OF_HIDDEN, tile = i % TILES_OF_HIDDEN, at = tile * TILE + column;
    const float value = __bfloat162float(p.embedding[(size_t)p.token_ids[token] * HIDDEN + at]);
    leave_residual(p, token, tile, value * p.embedding_scale, __ldg(p.layers[0].attention_gain + at));
  }
}

__global__ void __launch_bounds__(THREADS, 1) decode_step(const __grid_constant__ Params p) {
  __shared__ Cut cut;
  const int rows = min(*p.num_tokens, p.capacity);
  if (rows <= 0) return;  // a step of padding only
  if (threadIdx.x < 32) cut.make(p, rows);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(shared_address(shared + FULL_AT) + i * 8, 1);
      barrier_init(shared_address(shared + EMPTY_AT) + i * 8, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  Turn turn;

  if (threadIdx.x >= CONSUMERS) {
    if (threadIdx.x > CONSUMERS) return;
    const uint64_t policy = read_once();
    Ring ring{0};
    const CUtensorMap* map = p.maps;
    for (int i = 0; i <= p.num_layers * HEAD; i++, map++) {
      const int kind = i == p.num_layers * HEAD ? HEAD : i % HEAD;
      if (kind == QKV && i + HEAD < p.num_layers * HEAD)
        for (int ahead = 0; ahead < HEAD; ahead++) prefetch_map(map + HEAD + ahead);
      stream(p.products[kind], map, kind == GATE_UP ? TILE / 2 : TILE, turn, ring, policy);
    }
    return;
  }

  State s{rows, 0, {0}};
  const uint32_t passed = *(volatile uint32_t*)p.epoch;
  const Epoch epoch{(passed + 1) * gridDim.x};
  embed(p, rows);
  uint32_t* ready = p.counters;  // of the phase before
  arrive(ready);
#pragma unroll 1
  for (int l = 0; l <= p.num_layers; l++) {
    const bool last = l == p.num_layers;
    const Layer& layer = p.layers[last ? 0 : l];
#pragma unroll 1
    for (int kind = last ? HEAD : QKV; kind <= (last ? HEAD : DOWN); kind++) {
      if (kind == OUT) {
        attend(p, layer, cut, ready, epoch);
        arrive(ready += COUNTER_STRIDE);
      }
      const Product w = p.products[kind];
      const int item = turn.first(w);
      if (item < w.tiles * w.splits) {
        epoch.wait(ready);
        const bool normed = kind != OUT && kind != DOWN;
        const bf16* x = normed ? p.normed : kind == OUT ? p.mixed : p.activated;
        load_source(w, x + split_of(w, item) * w.span, normed ? HIDDEN : kind == OUT ? Q_SIZE : INNER,
                    normed ? p.squares : nullptr, p.eps, s);
        multiply(p, kind, w, item, kind == QKV ? layer.qkv_bias : nullptr,
                 kind == OUT ? layer.mlp_gain : layer.next_gain, s);
      }
      if (kind != HEAD) arrive(ready += COUNTER_STRIDE);
    }
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

int headrace_source_at() { return SOURCE_AT; }

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
