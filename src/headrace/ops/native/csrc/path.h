// A code path: the kernels compiled for one set of instructions. Each path_*.cpp defines HEADRACE_PATH (its namespace)
// and HEADRACE_VECTOR (its vector header) and includes this; setup.py gives each file its own compiler flags.
//
// Nothing here may use a standard library template: its code would be compiled with this path's instructions, and the
// linker might hand it to another path. For the same reason everything lies in an unnamed namespace.
#include "kernels.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

namespace headrace {
namespace HEADRACE_PATH {
namespace {
#include HEADRACE_VECTOR
#include "formats.h"
#include "linear.h"
#if defined(HEADRACE_HAS_DOT8)
#include "quads.h"
#include "int8.h"
#if defined(HEADRACE_HAS_DOT16)
#include "linear16.h"
#else
#include "planes.h"
#endif
#endif
#include "exponential.h"
#include "pointwise.h"
#include "attention_places.h"
#include "attention.h"
}  // namespace

// The path's table. It is filled once and never changes: a path may be chosen again while another thread runs on it.
const Kernels* kernels(const char* name) {
  static const Kernels table = [name] {
    Kernels made = {};
    kLinear.fill();
    made.name = name;
    made.linear_panel = linear_panel;
    made.linear_scratch = linear_scratch;
#if defined(HEADRACE_HAS_DOT8)
    kInt8.fill();
    made.int8_panel = int8_panel;
    made.quantize_int8 = quantize_int8;
#if defined(HEADRACE_HAS_DOT16)
    kLinear16.fill();
    made.linear16_panel = linear16_panel;
    made.quantize16 = quantize16;
#else
    kPlanes.fill();
    made.linear16_panel = planes_panel;
    made.quantize16 = quantize_planes;
#endif
#endif
    made.rms_norm = rms_norm;
    made.rope = rope;
    made.gated = gated;
    made.elementwise = elementwise;
    made.uniforms = uniforms;
    made.attention = attention;
    made.attention_rows = kMaxRows;
    made.attention_scratch = attention_scratch;
    made.attention_partial = attention_partial;
    made.attention_merge = attention_merge;
    return made;
  }();
  return &table;
}
}  // namespace HEADRACE_PATH
}  // namespace headrace
