// What the processor at hand can run, and the system lets it run.
#pragma once

namespace headrace {

bool has_avx2();    // with FMA and F16C
bool has_avx512();  // F, BW, DQ, VL and VNNI
bool has_amx();     // has_avx512(), AVX-512 BF16 and FP16, AMX with bfloat16; the first call asks the system for permission

}  // namespace headrace
