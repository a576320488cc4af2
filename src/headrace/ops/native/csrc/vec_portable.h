// Four lanes in the compiler's own vector type: SSE2 on any x86-64, NEON on 64-bit Arm, plain code elsewhere. Without
// fused multiply-add: a product is rounded before it is added, the same in every kernel of this path.
constexpr int W = 4;
constexpr int kMaxDirect = 1;
constexpr int kMaxTokens = 1;
constexpr int kAttnRows = 2;
typedef float f __attribute__((vector_size(16)));
typedef uint32_t i __attribute__((vector_size(16)));
typedef int32_t s __attribute__((vector_size(16)));

INLINE f zero() { return f{0, 0, 0, 0}; }
INLINE f set1(float v) { return f{v, v, v, v}; }
INLINE f load(const float* p) {
  f v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float* p, f v) { __builtin_memcpy(p, &v, sizeof v); }
INLINE f load_n(const float* p, int n) {
  f v = zero();
  for (int lane = 0; lane < W && lane < n; ++lane) v[lane] = p[lane];
  return v;
}
INLINE void store_n(float* p, f v, int n) {
  for (int lane = 0; lane < W && lane < n; ++lane) p[lane] = v[lane];
}
INLINE f add(f a, f b) { return a + b; }
INLINE f sub(f a, f b) { return a - b; }
INLINE f mul(f a, f b) { return a * b; }
INLINE f div(f a, f b) { return a / b; }
INLINE f fma(f a, f b, f c) { return a * b + c; }
INLINE f fnma(f a, f b, f c) { return c - a * b; }
INLINE f choose(s mask, f yes, f no) { return (f)(((s)yes & mask) | ((s)no & ~mask)); }
INLINE f max(f a, f b) { return choose(a > b, a, b); }  // b where either is NaN
INLINE f min(f a, f b) { return choose(a < b, a, b); }
INLINE float reduce_add(f v) { return (v[0] + v[2]) + (v[1] + v[3]); }
INLINE float reduce_max(f v) {
  float best = v[0];
  for (int lane = 1; lane < W; ++lane) best = best > v[lane] ? best : v[lane];
  return best;
}
INLINE void reduce_max_rows(const float* rows, float* out) {  // out[r] = the largest of rows[r][0 .. W-1], for 16 rows
  for (int row = 0; row < 16; ++row) out[row] = reduce_max(load(rows + row * W));
}
INLINE f keep(f v, int low, int high, f other) {
  const s lane = {0, 1, 2, 3};
  return choose((lane >= low) & (lane < high), v, other);
}
INLINE f round_even(f v) {
  // Adding and taking away 1.5 * 2^23 leaves a whole number, to even, for the |v| < 2^22 that it is used for.
  const f magic = set1(12582912.0f);
  return (v + magic) - magic;
}
INLINE f scale2(f v, f n) {
  const s whole = __builtin_convertvector(n, s), first = whole >> 1, rest = whole - first;
  return v * (f)((first + 127) << 23) * (f)((rest + 127) << 23);
}

INLINE i words(const uint8_t* p) {
  i v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
INLINE f half(const uint8_t* p) {
  uint16_t bits[W];
  __builtin_memcpy(bits, p, sizeof bits);
  return f{half_to_float(bits[0]), half_to_float(bits[1]), half_to_float(bits[2]), half_to_float(bits[3])};
}
INLINE f bf16(const uint8_t* p) {
  uint16_t bits[W];
  __builtin_memcpy(bits, p, sizeof bits);
  return (f)(i{bits[0], bits[1], bits[2], bits[3]} << 16);
}
INLINE f bytes_u8(const uint8_t* p) { return f{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
INLINE f bytes_i8(const uint8_t* p) {
  return f{float(int8_t(p[0])), float(int8_t(p[1])), float(int8_t(p[2])), float(int8_t(p[3]))};
}
INLINE f to_float(i v) { return __builtin_convertvector((s)v, f); }
INLINE f nibble(i w, int shift) { return to_float((w >> shift) & 15); }
INLINE f nibble_bit(i w, int shift, i high, int bit) {
  return to_float(((w >> shift) & 15) | (((high >> bit) & 1) << 4));
}
INLINE f nibble_pair(i w, int shift, i high, int bit) {
  return to_float(((w >> shift) & 15) | (((high >> bit) & 3) << 4));
}
INLINE i unbias(i w) { return w ^ 0x80808080u; }
INLINE f byte(i w, int index) { return __builtin_convertvector((s)(w << (24 - 8 * index)) >> 24, f); }
INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p); }
