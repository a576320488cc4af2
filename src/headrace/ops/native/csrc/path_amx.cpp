// Processors with AVX-512, its BF16 and FP16 too, and Intel AMX with bfloat16 (Intel since Sapphire Rapids).
#include "kernels.h"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512FP16__) && \
    defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define HEADRACE_TILES "tiles_amx.h"
#define HEADRACE_PATH amx
#include "path_tiles.h"
bool headrace::amx_compiled() { return avx512_compiled(); }
const headrace::Kernels* headrace::amx_kernels() { return amx::kernels_with_tiles("amx"); }
#else
bool headrace::amx_compiled() { return false; }
const headrace::Kernels* headrace::amx_kernels() { return nullptr; }
#endif
