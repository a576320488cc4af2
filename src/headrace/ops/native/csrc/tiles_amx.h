// The tiles of a processor with Intel AMX: eight of them, each up to 16 rows of 64 bytes. Included inside a code path's
// namespace; tiles_emulated.h has the same functions for other processors.
//
// They are written in assembly: tile numbers are template arguments here, where GCC's intrinsics want literals, and GCC
// 12 takes the stores into a configuration for dead before `_tile_loadconfig` reads them. Each clobbers memory, so that
// tiles and ordinary loads and stores keep their order.
struct alignas(64) TileConfig {  // as the instruction reads it
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "the layout that ldtilecfg wants");

// Makes the tiles ready on this thread: sums (0 to 3) and inputs (4, 5) of `rows` rows, weights (6, 7) of 16.
INLINE void open_tiles_of(int rows) {
  TileConfig config = {};
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : 16);
  }
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
// Gives the tiles' state up: a thread without it is switched and woken faster.
INLINE void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int kNumber>
INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kNumber) : "memory");
}
template <int kNumber>
INLINE void tile_load(const void* from, ptrdiff_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kNumber) : "memory");
}
template <int kNumber>
INLINE void tile_store(void* to, ptrdiff_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kNumber) : "memory");
}
// sums[m][n] += inputs[m] . weights[.][n] over 16 pairs of bfloat16 (TDPBF16PS).
template <int kSums, int kInputs, int kWeights>
INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kInputs), "i"(kWeights) : "memory");
}

// 32 bfloat16: those of `low`, then those of `high`. To nearest, ties to even; denormals become zero.
INLINE i to_bf16(f low, f high) { return reinterpret_cast<i>(_mm512_cvtne2ps_pbh(high, low)); }

// Arithmetic on 32 fp16, rounded once to nearest even (AVX-512 FP16).
INLINE i half_fma(i a, i b, i c) {
  return _mm512_castph_si512(_mm512_fmadd_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b), _mm512_castsi512_ph(c)));
}
INLINE i half_mul(i a, i b) {
  return _mm512_castph_si512(_mm512_mul_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b)));
}
INLINE i half_sub(i a, i b) {
  return _mm512_castph_si512(_mm512_sub_ph(_mm512_castsi512_ph(a), _mm512_castsi512_ph(b)));
}
