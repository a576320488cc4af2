// Processors with AVX2, FMA and F16C (Intel since Haswell, AMD since Zen).
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HEADRACE_PATH avx2
#define HEADRACE_VECTOR "vec_avx2.h"
#define HEADRACE_HAS_DOT8
#define HEADRACE_HAS_DOT16  // in place of 16-bit products of two bytes
#include "path.h"
bool headrace::avx2_compiled() { return true; }
const headrace::Kernels* headrace::avx2_kernels() { return avx2::kernels("avx2"); }
#else
#include "kernels.h"
bool headrace::avx2_compiled() { return false; }
const headrace::Kernels* headrace::avx2_kernels() { return nullptr; }
#endif
