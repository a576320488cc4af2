// Processors with AVX-512 F, BW, DQ and VL (Intel since Skylake-X, AMD since Zen 4).
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HEADRACE_PATH avx512
#define HEADRACE_VECTOR "vec_avx512.h"
#include "path.h"
const headrace::Kernels* headrace::avx512_kernels() { return avx512::kernels("avx512"); }
#else
#include "kernels.h"
const headrace::Kernels* headrace::avx512_kernels() { return nullptr; }
#endif
