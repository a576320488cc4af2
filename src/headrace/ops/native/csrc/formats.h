// Decoders: how a block of packed weights becomes float32 in registers, for each format. Included inside a code path's
// namespace, after its vector header.
//
// A decoder is opened on a block and then walked in the order of k: `word(z)` loads the next words, `get(j, p)` gives
// the weights of k = z * kPer + j for lanes [p * W, (p + 1) * W) of the panel. The products q * d of every quantised
// format fit float32 exactly, so a weight is rounded at most once (where m is added) and has the very bits that the
// file's own definition gives.
constexpr int P = kPanel / W;  // vectors in a panel

INLINE int group_of(int p) { return p * W / 16; }    // group of 16 outputs that vector p of a panel lies in
INLINE int within(int p) { return p * W % 16 * 4; }  // bytes from the start of the group's words

// Shift that brings nibble k (0 .. 7) of a word down; see kernels.h for the order.
INLINE int nibble_shift(int k) { return 4 * (2 * (k & 3) + (k >> 2)); }

template <Format kFormat>
struct Plain {
  static constexpr int kSteps = 1, kPer = 1, kHasHeader = 0;
  const uint8_t* at;
  INLINE void header(const uint8_t*) {}
  INLINE void open(const uint8_t* block) { at = block; }
  INLINE void word(int) {}
  INLINE f get(int, int, int p) const {
    if (kFormat == F32) return load(reinterpret_cast<const float*>(at) + p * W);
    return kFormat == F16 ? half(at + p * W * 2) : bf16(at + p * W * 2);
  }
};

// Nibbles, with a fifth bit where kHigh: w = q * d + m, m stored or, where symmetric, -offset * d.
template <bool kHigh, bool kSymmetric>
struct Nibbles {
  static constexpr int kSteps = 4, kPer = 8, kHasHeader = 0;
  static constexpr int kScales = 512 + (kHigh ? 128 : 0);
  const uint8_t* at;
  f d[P], m[P];
  i w[P], high[P];
  INLINE void header(const uint8_t*) {}
  INLINE void open(const uint8_t* block) {
    at = block;
    for (int p = 0; p < P; ++p) {
      d[p] = half(block + kScales + p * W * 2);
      m[p] = kSymmetric ? mul(d[p], set1(kHigh ? -16.0f : -8.0f)) : half(block + kScales + 64 + p * W * 2);
      if (kHigh) high[p] = words(block + 512 + p * W * 4);
    }
  }
  INLINE void word(int z) {
    for (int p = 0; p < P; ++p) w[p] = words(at + (group_of(p) * 4 + z) * 64 + within(p));
  }
  INLINE f get(int z, int j, int p) const {
    const f q = kHigh ? nibble_bit(w[p], nibble_shift(j), high[p], bit_of(z * 8 + j)) : nibble(w[p], nibble_shift(j));
    return fma(q, d[p], m[p]);
  }
};

// Q4_K and Q5_K: as above with d = D * sc and m = -DM * mn, exact products of fp16 and a 6-bit integer.
template <bool kHigh>
struct NibblesK {
  static constexpr int kSteps = 4, kPer = 8, kHasHeader = 1;
  static constexpr int kScales = 512 + (kHigh ? 128 : 0);
  const uint8_t* at;
  f big[P], big_min[P], d[P], m[P];
  i w[P], high[P];
  INLINE void header(const uint8_t* at_header) {
    for (int p = 0; p < P; ++p) {
      big[p] = half(at_header + p * W * 2);
      big_min[p] = sub(zero(), half(at_header + 64 + p * W * 2));
    }
  }
  INLINE void open(const uint8_t* block) {
    at = block;
    for (int p = 0; p < P; ++p) {
      d[p] = mul(big[p], bytes_u8(block + kScales + p * W));
      m[p] = mul(big_min[p], bytes_u8(block + kScales + 32 + p * W));
      if (kHigh) high[p] = words(block + 512 + p * W * 4);
    }
  }
  INLINE void word(int z) {
    for (int p = 0; p < P; ++p) w[p] = words(at + (group_of(p) * 4 + z) * 64 + within(p));
  }
  INLINE f get(int z, int j, int p) const {
    const f q = kHigh ? nibble_bit(w[p], nibble_shift(j), high[p], bit_of(z * 8 + j)) : nibble(w[p], nibble_shift(j));
    return fma(q, d[p], m[p]);
  }
};

// Q6_K: w = D * sc * (q - 32), a signed byte scale for every 16 k.
struct SixBits {
  static constexpr int kSteps = 4, kPer = 8, kHasHeader = 1;
  const uint8_t* at;
  f big[P], d[P];
  i w[P], high[P];
  INLINE void header(const uint8_t* at_header) {
    for (int p = 0; p < P; ++p) big[p] = half(at_header + p * W * 2);
  }
  INLINE void open(const uint8_t* block) {
    at = block;
    open_half(0);
  }
  INLINE void open_half(int half_of) {
    for (int p = 0; p < P; ++p) {
      d[p] = mul(big[p], bytes_i8(at + 768 + half_of * 32 + p * W));
      high[p] = words(at + 512 + half_of * 128 + p * W * 4);
    }
  }
  INLINE void word(int z) {
    if (z == 2) open_half(1);
    for (int p = 0; p < P; ++p) w[p] = words(at + (group_of(p) * 4 + z) * 64 + within(p));
  }
  INLINE f get(int z, int j, int p) const {
    const f q = nibble_pair(w[p], nibble_shift(j), high[p], two_bits_of(z % 2 * 8 + j));
    return mul(sub(q, set1(32.0f)), d[p]);
  }
};

// Signed bytes with an fp16 scale for 32 k, or a float32 one: w = q * d.
template <bool kWide>
struct Bytes {
  static constexpr int kSteps = 8, kPer = 4, kHasHeader = 0;
  const uint8_t* at;
  f d[P];
  i w[P];
  INLINE void header(const uint8_t*) {}
  INLINE void open(const uint8_t* block) {
    at = block;
    for (int p = 0; p < P; ++p)
      d[p] = kWide ? load(reinterpret_cast<const float*>(block + 1024) + p * W) : half(block + 1024 + p * W * 2);
  }
  INLINE void word(int z) {
    for (int p = 0; p < P; ++p) w[p] = unbias(words(at + (group_of(p) * 8 + z) * 64 + within(p)));
  }
  INLINE f get(int, int j, int p) const { return mul(byte(w[p], j), d[p]); }
};

// Q4_64: w = q * d + m, a d and an m for 64 k, in the order of K in the header.
struct GroupNibbles {
  static constexpr int kSteps = 4, kPer = 8, kHasHeader = 1;
  const uint8_t *at, *scales;
  int opened;  // blocks since the header
  f d[P], m[P];
  i w[P];
  INLINE void header(const uint8_t* at_header) {
    scales = at_header;
    opened = 0;
  }
  INLINE void open(const uint8_t* block) {
    at = block;
    const uint8_t* own = scales + opened++ / 2 * 128;
    for (int p = 0; p < P; ++p) {
      d[p] = half(own + p * W * 2);
      m[p] = half(own + 64 + p * W * 2);
    }
  }
  INLINE void word(int z) {
    for (int p = 0; p < P; ++p) w[p] = words(at + (group_of(p) * 4 + z) * 64 + within(p));
  }
  INLINE f get(int, int j, int p) const { return fma(nibble(w[p], nibble_shift(j)), d[p], m[p]); }
};

// Q8_64: w = q * d, a d for 64 k.
struct GroupBytes {
  static constexpr int kSteps = 8, kPer = 4, kHasHeader = 1;
  const uint8_t *at, *scales;
  int opened;
  f d[P];
  i w[P];
  INLINE void header(const uint8_t* at_header) {
    scales = at_header;
    opened = 0;
  }
  INLINE void open(const uint8_t* block) {
    at = block;
    const uint8_t* own = scales + opened++ / 2 * 64;
    for (int p = 0; p < P; ++p) d[p] = half(own + p * W * 2);
  }
  INLINE void word(int z) {
    for (int p = 0; p < P; ++p) w[p] = unbias(words(at + (group_of(p) * 8 + z) * 64 + within(p)));
  }
  INLINE f get(int, int j, int p) const { return mul(byte(w[p], j), d[p]); }
};

template <int kFormat> struct DecoderOf;
template <> struct DecoderOf<F32> { using type = Plain<F32>; };
template <> struct DecoderOf<F16> { using type = Plain<F16>; };
template <> struct DecoderOf<BF16> { using type = Plain<BF16>; };
template <> struct DecoderOf<Q4_0> { using type = Nibbles<false, true>; };
template <> struct DecoderOf<Q4_1> { using type = Nibbles<false, false>; };
template <> struct DecoderOf<Q5_0> { using type = Nibbles<true, true>; };
template <> struct DecoderOf<Q5_1> { using type = Nibbles<true, false>; };
template <> struct DecoderOf<Q8_0> { using type = Bytes<false>; };
template <> struct DecoderOf<I8> { using type = Bytes<true>; };
template <> struct DecoderOf<Q4_K> { using type = NibblesK<false>; };
template <> struct DecoderOf<Q5_K> { using type = NibblesK<true>; };
template <> struct DecoderOf<Q6_K> { using type = SixBits; };
template <> struct DecoderOf<Q4_64> { using type = GroupNibbles; };
template <> struct DecoderOf<Q8_64> { using type = GroupBytes; };
