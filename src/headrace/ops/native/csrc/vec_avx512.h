// Sixteen lanes with AVX-512 (F, BW, DQ, VL). Included inside a code path's own namespace.
constexpr int W = 16;
constexpr int kMaxDirect = 8;   // tokens that share one pass over packed weights: 2 x 8 sums and the decoder's state
constexpr int kMaxTokens = 12;  // tokens of a tile: 2 x 12 sums of 32 registers
constexpr int kAttnRows = 6;    // query vectors at once: 6 x 4 sums
using f = __m512;
using i = __m512i;

INLINE f zero() { return _mm512_setzero_ps(); }
INLINE f set1(float v) { return _mm512_set1_ps(v); }
INLINE f load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, f v) { _mm512_storeu_ps(p, v); }
INLINE __mmask16 lanes(int n) { return n >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << n) - 1); }
INLINE f load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
INLINE void store_n(float* p, f v, int n) { _mm512_mask_storeu_ps(p, lanes(n), v); }
INLINE f add(f a, f b) { return _mm512_add_ps(a, b); }
INLINE f sub(f a, f b) { return _mm512_sub_ps(a, b); }
INLINE f mul(f a, f b) { return _mm512_mul_ps(a, b); }
INLINE f div(f a, f b) { return _mm512_div_ps(a, b); }
INLINE f fma(f a, f b, f c) { return _mm512_fmadd_ps(a, b, c); }
INLINE f fnma(f a, f b, f c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE f max(f a, f b) { return _mm512_max_ps(a, b); }  // b where either is NaN
INLINE f min(f a, f b) { return _mm512_min_ps(a, b); }
INLINE float reduce_add(f v) { return _mm512_reduce_add_ps(v); }
INLINE float reduce_max(f v) { return _mm512_reduce_max_ps(v); }
// out[r] = the largest of rows[r][0 .. 15], for 16 rows: they share what it takes to bring lanes together.
INLINE void reduce_max_rows(const float* rows, float* out) {
  const auto quarters = [](f a, f b) __attribute__((always_inline)) {
    return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  const auto inside = [](f a, f b) __attribute__((always_inline)) {
    return _mm512_max_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
  };
  f every[4];  // [n]: rows n, n + 4, n + 8, n + 12, a quarter each
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    const float* at = rows + n * 16;
    every[n] = quarters(quarters(load(at), load(at + 64)), quarters(load(at + 128), load(at + 192)));
  }
  store(out, inside(inside(every[0], every[1]), inside(every[2], every[3])));
}
// lanes whose number lies in [low, high) keep v, the others get `other`
INLINE f keep(f v, int low, int high, f other) {
  const __mmask16 kept = static_cast<__mmask16>(lanes(high < 0 ? 0 : high) & ~lanes(low < 0 ? 0 : low));
  return _mm512_mask_mov_ps(other, kept, v);
}
INLINE f round_even(f v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE f scale2(f v, f n) { return _mm512_scalef_ps(v, n); }  // v * 2^n for whole n

INLINE i words(const uint8_t* p) { return _mm512_loadu_si512(p); }
INLINE f half(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
INLINE f bf16(const uint8_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE f bytes_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
INLINE f bytes_i8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// A look-up uses the low four bits of each word only, so neither a mask nor a conversion is needed.
INLINE f table16() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE f table2() { return _mm512_setr_ps(0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16); }
INLINE f table4() { return _mm512_setr_ps(0, 16, 32, 48, 0, 16, 32, 48, 0, 16, 32, 48, 0, 16, 32, 48); }
INLINE f nibble(i w, int shift) { return _mm512_permutexvar_ps(_mm512_srli_epi32(w, shift), table16()); }
INLINE f nibble_bit(i w, int shift, i high, int bit) {
  return add(nibble(w, shift), _mm512_permutexvar_ps(_mm512_srli_epi32(high, bit), table2()));
}
INLINE f nibble_pair(i w, int shift, i high, int bit) {
  return add(nibble(w, shift), _mm512_permutexvar_ps(_mm512_srli_epi32(high, bit), table4()));
}
INLINE i unbias(i w) { return _mm512_xor_si512(w, _mm512_set1_epi32(static_cast<int>(0x80808080u))); }
INLINE f byte(i w, int index) {
  const i up = index == 3 ? w : _mm512_slli_epi32(w, 24 - 8 * index);
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(up, 24));
}
INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Products of unsigned and signed bytes, four to a word.
constexpr bool kSmallBytes = false;  // unsigned ones may be any
INLINE i zero_words() { return _mm512_setzero_si512(); }
INLINE i words_everywhere(int32_t v) { return _mm512_set1_epi32(v); }
INLINE i quad_everywhere(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return _mm512_set1_epi32(quad);
}
INLINE i word_everywhere(const float* p) { return _mm512_castps_si512(_mm512_set1_ps(*p)); }
INLINE i dot8(i sum, i a, i b) { return _mm512_dpbusd_epi32(sum, a, b); }
INLINE i shift_right(i w, int count) { return _mm512_srli_epi32(w, count); }
INLINE i shift_right_signed(i w, int count) { return _mm512_srai_epi32(w, count); }
INLINE i shift_left(i w, int count) { return _mm512_slli_epi32(w, count); }
INLINE i and_word(i w, int mask) { return _mm512_and_si512(w, _mm512_set1_epi32(mask)); }
INLINE i or_words(i a, i b) { return _mm512_or_si512(a, b); }
INLINE i add_words(i a, i b) { return _mm512_add_epi32(a, b); }
INLINE i sub_words(i a, i b) { return _mm512_sub_epi32(a, b); }
INLINE int32_t reduce_add_words(i w) { return _mm512_reduce_add_epi32(w); }
INLINE i magnitude(f v) { return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7FFFFFFF)); }
INLINE i max_words(i a, i b) { return _mm512_max_epi32(a, b); }
INLINE int32_t reduce_max_words(i w) { return _mm512_reduce_max_epi32(w); }
INLINE f to_floats(i w) { return _mm512_cvtepi32_ps(w); }
INLINE i round_words(f v) { return _mm512_cvtps_epi32(v); }
INLINE void store_bytes(uint8_t* p, i w) {  // the lowest byte of each word
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(w));
}
// The same, and the sum of them as signed bytes.
INLINE int32_t store_bytes_and_sum(uint8_t* p, i w) {
  const __m128i bytes = _mm512_cvtepi32_epi8(w);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 2) - 16 * 128;
}
