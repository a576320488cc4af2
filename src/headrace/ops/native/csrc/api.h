// The C interface as one file of the library sees another's. api.cpp says what each function does.
#pragma once
#include "kernels.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void headrace_unpack_rows(int format, const uint8_t* matrix, int k, const int32_t* ids, int count, float* out,
                                 ptrdiff_t out_stride);
EXPORT void headrace_gather_rows(const float* table, ptrdiff_t table_stride, const int32_t* ids, int count, float* out,
                                 int size);
EXPORT void headrace_linear(const void* segments_at, int num_segments, int k, const float* x, ptrdiff_t x_stride,
                            int tokens, const float* bias, float* out, ptrdiff_t out_stride, int mode, int gate);
EXPORT void headrace_rms_norm(const float* x, ptrdiff_t x0, ptrdiff_t x1, int count0, int count1, const float* weight,
                              float* out, ptrdiff_t out0, ptrdiff_t out1, int size, float eps);
EXPORT void headrace_add_rms_norm(const float* x, ptrdiff_t x_stride, float* residual, ptrdiff_t residual_stride,
                                  int tokens, const float* weight, float* out, ptrdiff_t out_stride, int size,
                                  float eps);
EXPORT void headrace_rope(const float* x, ptrdiff_t x0, ptrdiff_t x1, int tokens, int heads, const float* cos,
                          const float* sin, ptrdiff_t angle_stride, float* out, ptrdiff_t out0, ptrdiff_t out1,
                          int half, int dim);
EXPORT void headrace_gated(int kind, const float* x, ptrdiff_t x_stride, float* out, ptrdiff_t out_stride, int tokens,
                           int half);
EXPORT void headrace_attention(const headrace::AttentionJob* call, const float* k, ptrdiff_t k_stride, const float* v,
                               ptrdiff_t v_stride, const int32_t* slots, int tokens, int spans);
EXPORT void headrace_elementwise(int kind, const float* x, ptrdiff_t x_stride, const float* y, ptrdiff_t y_stride,
                                 float value, float* out, ptrdiff_t out_stride, int rows, int size);
