// A code path that is the AVX-512 one with products on tiles beside it. What path.h says of its files holds here too:
// no templates of the standard library, everything in an unnamed namespace. HEADRACE_TILES is the header of the tiles.
#include <immintrin.h>

#include "kernels.h"

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

namespace headrace {
namespace HEADRACE_PATH {
namespace {
#include "vec_avx512.h"
#include "formats.h"
#include HEADRACE_TILES
#include "bf16_weights.h"
#include "bf16.h"
}  // namespace
}  // namespace HEADRACE_PATH
}  // namespace headrace
