// Packed weights as tiles of bfloat16, a block of 32 k of a panel at a time. Included inside a code path's namespace,
// after its vector header, its decoders and its tiles.
//
// A block becomes two tiles, one for each 16 outputs. A row holds a pair of k of output 0, then of output 1 and so on, and
// the 16 rows hold, of each 8 k, the pairs (0, 2), (4, 6), (1, 3), (5, 7): the order in which packed words (kernels.h) give
// 16-bit numbers.
//
// Most formats are decoded to float32 and rounded. Those of nibbles and bytes with fp16 scales stay in 16 bits, which is
// less work: q * d + m in fp16, rounded once, becomes bfloat16 by a shift of three bits (halves away from zero). The
// exponents of fp16 then stand for numbers 2^112 smaller, and what is denormal in fp16, under 6.2e-5, counts for zero.

constexpr int kTileBytes = 1024;
constexpr int kBlockTiles = P * kTileBytes;  // bytes of a block as tiles
constexpr float kInputScale = 0x1p64f;       // of inputs

constexpr bool stays_half(int format) {
  return format == Q4_0 || format == Q4_1 || format == Q4_64 || format == Q8_0 || format == Q8_64;
}

// Numbers of `first` and `second` side by side: a row.
INLINE void store_row(uint8_t* to, f first, f second) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), to_bf16(first, second)));
}

// A row of fp16 as one of bfloat16, 2^112 smaller: sign, five bits of exponent, seven of the fraction. Three bits between
// them are still to be cleared. The product's upper half, rounded, is (x + 4) >> 3 for every x that is no NaN.
INLINE i shifted_halves(i halves) { return _mm512_mulhrs_epi16(halves, _mm512_set1_epi16(1 << 12)); }
constexpr uint16_t kHalfBits = 0x8FFF;

// 16 fp16, each twice: for both k of an output.
INLINE i half_pairs(const uint8_t* p) {
  const i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_or_si512(wide, _mm512_slli_epi32(wide, 16));
}

// 0 .. 15, or -8 .. 7, as fp16 by the lowest four bits of each 16; the fifth, which a look-up also sees, is the next
// nibble's.
template <bool kSymmetric>
INLINE i nibble_halves(i w) {
  alignas(64) static constexpr uint16_t kNumbers[2][32] = {
      {0x0000, 0x3C00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700, 0x4800, 0x4880, 0x4900, 0x4980, 0x4A00, 0x4A80,
       0x4B00, 0x4B80, 0x0000, 0x3C00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700, 0x4800, 0x4880, 0x4900, 0x4980,
       0x4A00, 0x4A80, 0x4B00, 0x4B80},
      {0xC800, 0xC700, 0xC600, 0xC500, 0xC400, 0xC200, 0xC000, 0xBC00, 0x0000, 0x3C00, 0x4000, 0x4200, 0x4400, 0x4500,
       0x4600, 0x4700, 0xC800, 0xC700, 0xC600, 0xC500, 0xC400, 0xC200, 0xC000, 0xBC00, 0x0000, 0x3C00, 0x4000, 0x4200,
       0x4400, 0x4500, 0x4600, 0x4700}};
  return _mm512_permutexvar_epi16(w, _mm512_load_si512(kNumbers[kSymmetric]));
}

// Bytes q + 128 in the lower half of each 16 bits (the upper is 0) as fp16 q: 1024 + a byte is exact, and so is the rest.
INLINE i byte_halves(i w) { return half_sub(_mm512_or_si512(w, _mm512_set1_epi16(0x6400)), _mm512_set1_epi16(0x6480)); }

// A panel's weights. What comes out is to be multiplied with inputs times kInputScale, and the sums with kScale.
template <int kFormat>
struct Blocks {
  using Decoder = typename DecoderOf<kFormat>::type;
  static constexpr FormatInfo kInfo = kFormats[kFormat];
  static constexpr float kScale = stays_half(kFormat) ? 0x1p48f : 0x1p-64f;
  const uint8_t* at;
  int left;  // k
  Decoder decoder{};
  const uint8_t* header = nullptr;
  int block = 0;

  INLINE void unpack(uint8_t* to) {
    open();
    if constexpr (stays_half(kFormat))
      halves([to](int p, int row, i shifted) __attribute__((always_inline)) {
        const i kept = _mm512_and_si512(shifted, _mm512_set1_epi16(static_cast<short>(kHalfBits)));
        _mm512_store_si512(to + p * kTileBytes + row * 64, kept);
      });
    else if constexpr (kInfo.block == 1) {
      if (left >= kBlock) plain<true>(to);
      else plain<false>(to);
    } else floats(to);
    if constexpr (kInfo.block != 1) at += kInfo.block_bytes;
    ++block;
    left -= kBlock;
  }

  // The block's rows in order, instead of tiles: use(p, row, shifted halves). Of formats that stay in 16 bits.
  template <class Use>
  INLINE void rows(Use use) {
    open();
    halves(use);
    at += kInfo.block_bytes;
    ++block;
  }

 private:
  INLINE void open() {
    if constexpr (kInfo.header_bytes != 0)
      if (block % kSuper == 0) {
        header = at;
        at += kInfo.header_bytes;
        if constexpr (!stays_half(kFormat)) decoder.header(header);
      }
    const int lines = kInfo.block == 1 ? kBlock * kInfo.block_bytes : kInfo.block_bytes;
    for (int line = 0; line < lines; line += 64) prefetch(at + kPrefetch + line);
  }

  template <class Use>
  INLINE void halves(Use use) {
    constexpr bool kBytes = kFormat == Q8_0 || kFormat == Q8_64, kMin = kFormat == Q4_1 || kFormat == Q4_64;
    const uint8_t* scales = at + (kBytes ? 1024 : 512);
    if constexpr (kInfo.header_bytes != 0) scales = header + block % kSuper / 2 * (kMin ? 128 : 64);
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      const i d = half_pairs(scales + p * 32), m = kMin ? half_pairs(scales + 64 + p * 32) : zero_words();
      if constexpr (kBytes) {
#pragma GCC unroll 4
        for (int z = 0; z < 8; z += 2)
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            const i w = words(at + (p * 8 + z + j % 2) * 64);
            const i low = j < 2 ? _mm512_and_si512(w, _mm512_set1_epi16(0xFF)) : _mm512_srli_epi16(w, 8);
            use(p, 2 * z + j, shifted_halves(half_mul(byte_halves(low), d)));
          }
      } else {
#pragma GCC unroll 4
        for (int z = 0; z < 4; ++z) {
          const i w = words(at + (p * 4 + z) * 64);
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) {
            const i q = nibble_halves<!kMin>(j ? _mm512_srli_epi16(w, 4 * j) : w);
            use(p, 4 * z + j, shifted_halves(kMin ? half_fma(q, d, m) : half_mul(q, d)));
          }
        }
      }
    }
  }

  // Eight k of 16 outputs, four rows.
  INLINE static void store_eight(uint8_t* to, const f* k) {
    store_row(to, k[0], k[2]);
    store_row(to + 64, k[4], k[6]);
    store_row(to + 128, k[1], k[3]);
    store_row(to + 192, k[5], k[7]);
  }

  INLINE void floats(uint8_t* to) {
    decoder.open(at);
    for (int eight = 0; eight < 4; ++eight) {
      f k[P][8];
#pragma GCC unroll 2
      for (int part = 0; part < 8 / Decoder::kPer; ++part) {
        const int z = eight * (8 / Decoder::kPer) + part;
        decoder.word(z);
#pragma GCC unroll 8
        for (int j = 0; j < Decoder::kPer; ++j)
#pragma GCC unroll 2
          for (int p = 0; p < P; ++p) k[p][part * Decoder::kPer + j] = decoder.get(z, j, p);
      }
      for (int p = 0; p < P; ++p) store_eight(to + p * kTileBytes + eight * 256, k[p]);
    }
  }

  // Behind the last k come zeros.
  template <bool kWhole>
  INLINE void plain(uint8_t* to) {
    for (int eight = 0; eight < 4; ++eight) {
      f k[P][8];
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        const bool there = kWhole || eight * 8 + j < left;
        if (there) decoder.open(at);
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) k[p][j] = there ? decoder.get(0, 0, p) : zero();
        if (there) at += kInfo.block_bytes;
      }
      for (int p = 0; p < P; ++p) store_eight(to + p * kTileBytes + eight * 256, k[p]);
    }
  }
};
