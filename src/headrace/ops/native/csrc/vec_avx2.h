// Eight lanes with AVX2, FMA and F16C. Included inside a code path's own namespace.
constexpr int W = 8;
constexpr int kMaxDirect = 2;  // tokens that share one pass over packed weights: 4 x 2 sums and the decoder's state
constexpr int kMaxTokens = 3;  // tokens of a tile: 4 x 3 sums of 16 registers
constexpr int kAttnRows = 3;
using f = __m256;
using i = __m256i;

INLINE f zero() { return _mm256_setzero_ps(); }
INLINE f set1(float v) { return _mm256_set1_ps(v); }
INLINE f load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, f v) { _mm256_storeu_ps(p, v); }
INLINE i iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
INLINE i lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), iota()); }
INLINE f load_n(const float* p, int n) { return n >= W ? load(p) : _mm256_maskload_ps(p, lanes(n)); }
INLINE void store_n(float* p, f v, int n) {
  if (n >= W) store(p, v);
  else _mm256_maskstore_ps(p, lanes(n), v);
}
INLINE f add(f a, f b) { return _mm256_add_ps(a, b); }
INLINE f sub(f a, f b) { return _mm256_sub_ps(a, b); }
INLINE f mul(f a, f b) { return _mm256_mul_ps(a, b); }
INLINE f div(f a, f b) { return _mm256_div_ps(a, b); }
INLINE f fma(f a, f b, f c) { return _mm256_fmadd_ps(a, b, c); }
INLINE f fnma(f a, f b, f c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE f max(f a, f b) { return _mm256_max_ps(a, b); }
INLINE f min(f a, f b) { return _mm256_min_ps(a, b); }
INLINE float reduce_add(f v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE float reduce_max(f v) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
INLINE void reduce_max_rows(const float* rows, float* out) {  // out[r] = the largest of rows[r][0 .. W-1], for 16 rows
  for (int row = 0; row < 16; ++row) out[row] = reduce_max(load(rows + row * W));
}
INLINE f keep(f v, int low, int high, f other) {
  const i kept = _mm256_andnot_si256(lanes(low), lanes(high));
  return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(kept));
}
INLINE f round_even(f v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE f scale2(f v, f n) {
  // in two factors, so that results down to the smallest denormal and up to the largest number come out
  const i whole = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, first);
  const i bias = _mm256_set1_epi32(127);
  const f a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23));
  const f b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return mul(mul(v, a), b);
}

INLINE i words(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE f half(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
INLINE f bf16(const uint8_t* p) {
  const i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE f bytes_u8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
INLINE f bytes_i8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
INLINE i nibble_word(i w, int shift) { return _mm256_and_si256(_mm256_srli_epi32(w, shift), _mm256_set1_epi32(15)); }
INLINE i high_word(i high, int bit, int mask) {
  return _mm256_slli_epi32(_mm256_and_si256(_mm256_srli_epi32(high, bit), _mm256_set1_epi32(mask)), 4);
}
INLINE f nibble(i w, int shift) { return _mm256_cvtepi32_ps(nibble_word(w, shift)); }
INLINE f nibble_bit(i w, int shift, i high, int bit) {
  return _mm256_cvtepi32_ps(_mm256_or_si256(nibble_word(w, shift), high_word(high, bit, 1)));
}
INLINE f nibble_pair(i w, int shift, i high, int bit) {
  return _mm256_cvtepi32_ps(_mm256_or_si256(nibble_word(w, shift), high_word(high, bit, 3)));
}
INLINE i unbias(i w) { return _mm256_xor_si256(w, _mm256_set1_epi32(static_cast<int>(0x80808080u))); }
INLINE f byte(i w, int index) {
  const i up = index == 3 ? w : _mm256_slli_epi32(w, 24 - 8 * index);
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(up, 24));
}
INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Sixteen-bit products: words are pairs of int16.
constexpr int kMaxDirect16 = 2, kMaxTokens16 = 2;
constexpr int kUnpackFrom16 = 3;  // tokens from which unpacking once for all of them pays
INLINE i zero_words() { return _mm256_setzero_si256(); }
INLINE i shift_right(i w, int count) { return _mm256_srli_epi32(w, count); }
INLINE i shift_left(i w, int count) { return _mm256_slli_epi32(w, count); }
INLINE i and_word(i w, int mask) { return _mm256_and_si256(w, _mm256_set1_epi32(mask)); }
INLINE i or_words(i a, i b) { return _mm256_or_si256(a, b); }
INLINE i sub16(i w, int pair) { return _mm256_sub_epi16(w, _mm256_set1_epi32(pair)); }
INLINE i low_bytes(i w) { return _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8); }
INLINE i high_bytes(i w) { return _mm256_srai_epi16(w, 8); }
INLINE i pair_everywhere(const int16_t* p) {
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return _mm256_set1_epi32(pair);
}
INLINE i dot16(i sum, i a, i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
INLINE f to_floats(i w) { return _mm256_cvtepi32_ps(w); }
INLINE i round_words(f v) { return _mm256_cvtps_epi32(v); }
INLINE i add_words(i a, i b) { return _mm256_add_epi32(a, b); }
// W words as int16 in the order of pairs (kernels.h): 0, 2, 4, 6, 1, 3, 5, 7 of each eight
INLINE void store_in_pairs(int16_t* p, i w) {
  const i ordered = _mm256_permutevar8x32_epi32(w, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
  const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow);
}
// Products of unsigned bytes, of 128 at most, and signed ones, four to a word: pairs fit 16 bits then. Larger ones become
// signed bytes.
constexpr bool kSmallBytes = true;
INLINE i words_everywhere(int32_t v) { return _mm256_set1_epi32(v); }
INLINE i quad_everywhere(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return _mm256_set1_epi32(quad);
}
INLINE i word_everywhere(const float* p) { return _mm256_castps_si256(_mm256_set1_ps(*p)); }
INLINE i dot8(i sum, i a, i b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}
INLINE i dot8_signed(i sum, i a, i b) { return dot8(sum, _mm256_abs_epi8(a), _mm256_sign_epi8(b, a)); }
INLINE i sub_words(i a, i b) { return _mm256_sub_epi32(a, b); }
INLINE i magnitude(f v) { return _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7FFFFFFF)); }
INLINE i max_words(i a, i b) { return _mm256_max_epi32(a, b); }
INLINE int32_t reduce_max_words(i w) {
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}
// The lowest byte of each word, and the sum of them as signed bytes.
INLINE int32_t store_bytes_and_sum(uint8_t* p, i w) {
  const i lowest = _mm256_shuffle_epi8(w, _mm256_set1_epi32(0x0C080400));
  const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(lowest), _mm256_extracti128_si256(lowest, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bytes);
  const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
  return _mm_cvtsi128_si32(sums) - 8 * 128;
}
INLINE void store_words(int32_t* p, i w) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), w); }
