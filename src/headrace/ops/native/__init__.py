"""The native CPU kernels: a C++ library with several code paths, and what binds it to the ops.

    csrc/       the library; kernels.h explains packed weights, path.h how a code path is made
    library     loads it, chooses the path, says why it could not
    packed      weights in the library's layout
    variants    registers the kernels as `native` variants of the ops

`HEADRACE_NATIVE=0` leaves it out, `HEADRACE_NATIVE_PATH=portable|avx2|avx512|amx` forces a path;
`amx-emulated` is the last one in ordinary AVX-512 instructions, for tests.
"""
