// What Hopper's instructions look like from here: barriers in shared memory, bulk copies, matrix products, and counters
// by which CTAs wait for each other. PTX ISA, the sections named after the instructions.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <stdio.h>

namespace {

typedef __nv_bfloat16 bf16;

constexpr int WARPS = 8;                 // that compute; one more streams weights
constexpr int CONSUMERS = WARPS * 32;
constexpr int THREADS = CONSUMERS + 32;

// With SPIN_LIMIT a wait that lasts too long ends the kernel and says where: for tests, where a deadlock must not hang.
struct Patience {
#ifdef SPIN_LIMIT
  unsigned spins = 0;
  __device__ void operator()(const char* what, int which) {
    if (++spins > SPIN_LIMIT) {
      printf("CTA %d thread %d waits in vain for %s %d\n", (int)blockIdx.x, (int)threadIdx.x, what, which);
      __trap();
    }
  }
#else
  __device__ void operator()(const char*, int) {}
#endif
};

// The thread's number, read anew: what is derived from it is not worth a register for a whole step, as the compiler thinks.
__device__ __forceinline__ int tid() {
  int number;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
  return number;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  Patience patience;
  for (;;) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return;
    patience("a stage", (int)parity);
  }
}

// Only the warps that compute meet here.
__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Weights are read once a step: they leave the cache first.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy_tile(
    uint32_t target, const CUtensorMap* map, int inner, int row, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %3}], [%2], %6;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(0), "r"(inner), "r"(row), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// c [16, 8] += a [16, 16] b [16, 8]. Lane 4 g + t has of c rows g (c0, c1) and g + 8 (c2, c3), columns 2 t and 2 t + 1.
__device__ __forceinline__ void multiply_add(
    float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_shared(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, uint32_t low, uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<uint32_t*>(&both);
}

// -- counters in global memory. They only grow: a launch's arrivals begin where those of the launch before ended.

struct Epoch {
  uint32_t target;  // of every counter in this launch

  // Waits until all CTAs have arrived; to be called by all consumers. What was written before is visible afterwards.
  __device__ __forceinline__ void wait(const uint32_t* counter) const {
    if (threadIdx.x == 0) {
      Patience patience;
      for (;;) {
        uint32_t value;
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
        if ((int32_t)(value - target) >= 0) break;
        patience("counter", (int)(value - target));
      }
    }
    sync_consumers();
  }
};

// All consumers have done their part; to be called by all of them.
__device__ __forceinline__ void arrive(uint32_t* counter) {
  sync_consumers();
  if (threadIdx.x == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace
