// Processors with AVX-512 F, BW, DQ, VL and VNNI (Intel since Cascade Lake and Ice Lake, AMD since Zen 4).
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#define HEADRACE_PATH avx512
#define HEADRACE_VECTOR "vec_avx512.h"
#define HEADRACE_HAS_DOT8
#include "path.h"
bool headrace::avx512_compiled() { return true; }
const headrace::Kernels* headrace::avx512_kernels() { return avx512::kernels("avx512"); }
#else
#include "kernels.h"
bool headrace::avx512_compiled() { return false; }
const headrace::Kernels* headrace::avx512_kernels() { return nullptr; }
#endif
