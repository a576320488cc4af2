// Any 64-bit little-endian processor.
#define HEADRACE_PATH portable
#define HEADRACE_VECTOR "vec_portable.h"
#include "path.h"
const headrace::Kernels* headrace::portable_kernels() { return portable::kernels("portable"); }
