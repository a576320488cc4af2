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

// `work`, which goes through memory, under the rules by which tiles compute: denormals and what would be one are zero.
template <class Work>
INLINE void under_tile_rules(Work work) {
  uint32_t before;
  const uint32_t wanted = 0x9FC0;  // all exceptions masked, to nearest, denormals are zero, results flushed to zero
  asm volatile("stmxcsr %0\n\tldmxcsr %1" : "=m"(before) : "m"(wanted) : "memory");
  work();
  asm volatile("ldmxcsr %0" ::"m"(before) : "memory");
}

#include HEADRACE_TILES
#include "bf16_weights.h"
#include "bf16.h"
#include "exponential.h"
#include "attention_places.h"
#include "attention_bf16.h"

// A path that has everything of the AVX-512 one, with products and attention on tiles; filled once, as in path.h.
static const Kernels* kernels_with_tiles(const char* name) {
  static const Kernels table = [name] {
    Kernels made = *avx512_kernels();
    kBf16.fill();
    made.name = name;
    made.bf16_panel = bf16_panel;
    made.bf16_scratch = bf16_scratch;
    made.round_bf16 = round_bf16;
    made.open_tiles = open_tiles;
    made.close_tiles = close_tiles;
    made.attention = attention;
    made.attention_rows = kWideRows;
    made.attention_scratch = attention_scratch;
    made.attention_partial = attention_partial;
    made.attention_merge = attention_merge;
    return made;
  }();
  return &table;
}
}  // namespace
}  // namespace HEADRACE_PATH
}  // namespace headrace
