// The functions of tiles_amx.h in ordinary instructions, bit for bit: their slow twin, with which the AMX path is tested
// on processors that have no AMX. Included inside a code path's namespace.
//
// TDPBF16PS as the Intel 64 and IA-32 Architectures Software Developer's Manual defines it (volume 2, its "Operation"):
// for each sum, one chain of fused multiply-adds over the 16 even numbers of a row and one over the odd ones, both from
// zero; the two are added, then added to the sum. Everything is float32, rounded to nearest even, with denormal inputs and
// results taken for zero, whatever the thread's own settings are.
//
// What the processor refuses ends the process here too: tiles used before they are made ready or after they are given up,
// and a number of rows outside 1 .. 16. Their state is each thread's own.
struct Tile {
  alignas(64) uint8_t bytes[16 * 64];
};
thread_local Tile tile_data[8];
thread_local int tile_rows[8];  // 0: not ready

INLINE void refuse_unless(bool right) {
  if (!right) __builtin_trap();
}

INLINE void open_tiles_of(int rows) {
  refuse_unless(rows >= 1 && rows <= 16);
  for (int tile = 0; tile < 8; ++tile) tile_rows[tile] = tile < 6 ? rows : 16;
}
INLINE void release_tiles() {
  for (int& rows : tile_rows) rows = 0;
}

template <int kNumber>
INLINE void tile_zero() {
  refuse_unless(tile_rows[kNumber] > 0);
  __builtin_memset(tile_data[kNumber].bytes, 0, sizeof tile_data[kNumber].bytes);
}
template <int kNumber>
INLINE void tile_load(const void* from, ptrdiff_t stride) {
  tile_zero<kNumber>();
  for (int row = 0; row < tile_rows[kNumber]; ++row)
    __builtin_memcpy(tile_data[kNumber].bytes + row * 64, static_cast<const uint8_t*>(from) + row * stride, 64);
}
template <int kNumber>
INLINE void tile_store(void* to, ptrdiff_t stride) {
  refuse_unless(tile_rows[kNumber] > 0);
  for (int row = 0; row < tile_rows[kNumber]; ++row)
    __builtin_memcpy(static_cast<uint8_t*>(to) + row * stride, tile_data[kNumber].bytes + row * 64, 64);
}

INLINE f low_halves(i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
INLINE f high_halves(i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

NOINLINE static void multiply_tiles(Tile& sums, const Tile& inputs, const Tile& weights, int rows) {
  for (int row = 0; row < rows; ++row) {
    f even = zero(), odd = zero();
    for (int k = 0; k < 16; ++k) {
      int32_t pair;
      __builtin_memcpy(&pair, inputs.bytes + row * 64 + k * 4, 4);
      const i x = _mm512_set1_epi32(pair), w = words(weights.bytes + k * 64);
      even = fma(low_halves(x), low_halves(w), even);
      odd = fma(high_halves(x), high_halves(w), odd);
    }
    float* to = reinterpret_cast<float*>(sums.bytes + row * 64);
    store(to, add(load(to), add(even, odd)));
  }
}

template <int kSums, int kInputs, int kWeights>
INLINE void tile_multiply() {
  refuse_unless(tile_rows[kSums] > 0 && tile_rows[kInputs] == tile_rows[kSums] && tile_rows[kWeights] == 16);
  under_tile_rules(
      [] { multiply_tiles(tile_data[kSums], tile_data[kInputs], tile_data[kWeights], tile_rows[kSums]); });
}

INLINE i rounded_to_bf16(f value) {  // in the lower half of each word
  const i bits = _mm512_castps_si512(value);
  const i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  i out = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  out = _mm512_mask_or_epi32(out, nan, bits, _mm512_set1_epi32(0x400000));  // NaN stays NaN
  const __mmask16 small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7F800000));
  out = _mm512_mask_and_epi32(out, small, bits, _mm512_set1_epi32(static_cast<int>(0x80000000u)));
  return _mm512_srli_epi32(out, 16);
}

INLINE i to_bf16(f low, f high) {
  const __m256i first = _mm512_cvtepi32_epi16(rounded_to_bf16(low)), second = _mm512_cvtepi32_epi16(rounded_to_bf16(high));
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

INLINE f lower_halves(i halves) { return _mm512_cvtph_ps(_mm512_castsi512_si256(halves)); }
INLINE f upper_halves(i halves) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)); }
INLINE i to_halves(f low, f high) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, kNearest)), _mm512_cvtps_ph(high, kNearest), 1);
}

// a * b + c of numbers whose product is exact, rounded to float32 such that rounding that to fp16 rounds the exact sum:
// where the sum is not exact, its last bit is odd (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums").
INLINE f sum_to_odd(f a, f b, f c) {
  const f product = mul(a, b), sum = add(product, c), more = sub(sum, product);
  const f rest = add(sub(product, sub(sum, more)), sub(c, more));  // of the exact sum (Knuth's two-sum)
  const __mmask16 inexact = _mm512_cmp_ps_mask(rest, zero(), _CMP_NEQ_OQ);
  const i bits = _mm512_castps_si512(sum), one = _mm512_set1_epi32(1);
  // where the sum is larger in size than the exact one, down to the number below it first
  const __mmask16 opposite = _mm512_movepi32_mask(_mm512_xor_si512(bits, _mm512_castps_si512(rest)));
  const i toward = _mm512_mask_sub_epi32(bits, inexact & opposite, bits, one);
  return _mm512_castsi512_ps(_mm512_mask_or_epi32(toward, inexact, toward, one));
}
INLINE i half_fma(i a, i b, i c) {
  return to_halves(sum_to_odd(lower_halves(a), lower_halves(b), lower_halves(c)),
                   sum_to_odd(upper_halves(a), upper_halves(b), upper_halves(c)));
}
// Of numbers whose product, or difference, is exact in float32.
INLINE i half_mul(i a, i b) {
  return to_halves(mul(lower_halves(a), lower_halves(b)), mul(upper_halves(a), upper_halves(b)));
}
INLINE i half_sub(i a, i b) {
  return to_halves(sub(lower_halves(a), lower_halves(b)), sub(upper_halves(a), upper_halves(b)));
}
