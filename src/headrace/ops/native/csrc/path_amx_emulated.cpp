// The AMX path with its tiles emulated: for tests, on processors with AVX-512. It is never chosen by itself.
#include "kernels.h"
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HEADRACE_TILES "tiles_emulated.h"
#define HEADRACE_PATH amx_emulated
#include "path_tiles.h"
bool headrace::amx_emulated_compiled() { return avx512_compiled(); }
const headrace::Kernels* headrace::amx_emulated_kernels() { return amx_emulated::kernels_with_tiles("amx-emulated"); }
#else
bool headrace::amx_emulated_compiled() { return false; }
const headrace::Kernels* headrace::amx_emulated_kernels() { return nullptr; }
#endif
