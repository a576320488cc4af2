// How the bytes of a block's weights come out of its packed words. Included inside a code path's namespace by the two
// kinds of products that take bytes, planes.h and int8.h.

// What offsets add to the products of a block whose halves' inputs have these sums. One word after the other: gathered in
// an array first they would be copied before they are there, which takes longer than all else.
INLINE void store_offsets(float* to, int32_t first, int32_t second) {
  const int32_t low = 32 * first, high = 32 * second, both = 128 * (first + second);
  __builtin_memcpy(to, &low, 4);
  __builtin_memcpy(to + 1, &high, 4);
  __builtin_memcpy(to + 2, &both, 4);
}

// unpack(decoder, p, w): bytes of quad q (k = 4q .. 4q+3) of vector p of the panel, for W outputs. A weight is such a byte
// less kOffset; d is of 32 / kScales k. kMost: tokens of a group of planes.h where there are many.
template <class Decoder>
struct Quads;

template <bool kHigh, class Decoder>
struct NibbleQuads {
  static constexpr bool kHasMin = true;
  static constexpr int kScales = 1, kOffset = 0, kMost = 6;
  INLINE static void unpack(const Decoder& decoder, int p, i* w) {
#pragma GCC unroll 4
    for (int z = 0; z < 4; ++z) {
      const i word = words(decoder.at + (group_of(p) * 4 + z) * 64 + within(p));
      w[2 * z] = and_word(word, 0x0F0F0F0F);
      w[2 * z + 1] = and_word(shift_right(word, 4), 0x0F0F0F0F);
    }
    if constexpr (kHigh) {
#pragma GCC unroll 8
      for (int q = 0; q < 8; ++q) {
        const i bits = q < 4 ? shift_left(decoder.high[p], 4 - q) : shift_right(decoder.high[p], q - 4);
        w[q] = or_words(w[q], and_word(bits, 0x10101010));
      }
    }
  }
};
template <bool kHigh, bool kSymmetric>
struct Quads<Nibbles<kHigh, kSymmetric>> : NibbleQuads<kHigh, Nibbles<kHigh, kSymmetric>> {};
template <bool kHigh>
struct Quads<NibblesK<kHigh>> : NibbleQuads<kHigh, NibblesK<kHigh>> {};
template <>
struct Quads<GroupNibbles> : NibbleQuads<false, GroupNibbles> {};

template <>
struct Quads<SixBits> {
  static constexpr bool kHasMin = false;
  static constexpr int kScales = 2, kOffset = 32, kMost = 4;
  INLINE static void unpack(const SixBits& decoder, int p, i* w) {
#pragma GCC unroll 4
    for (int z = 0; z < 4; ++z) {
      const i word = words(decoder.at + (group_of(p) * 4 + z) * 64 + within(p));
      const i bits = words(decoder.at + 512 + z / 2 * 128 + p * W * 4);
      const i first = z % 2 ? bits : shift_left(bits, 4), second = z % 2 ? shift_right(bits, 2) : shift_left(bits, 2);
      w[2 * z] = or_words(and_word(word, 0x0F0F0F0F), and_word(first, 0x30303030));
      w[2 * z + 1] = or_words(and_word(shift_right(word, 4), 0x0F0F0F0F), and_word(second, 0x30303030));
    }
  }
};

template <class Decoder>
struct ByteQuads {
  static constexpr bool kHasMin = false;
  static constexpr int kScales = 1, kOffset = 128, kMost = 4;
  INLINE static void unpack(const Decoder& decoder, int p, i* w) {
#pragma GCC unroll 8
    for (int q = 0; q < 8; ++q) w[q] = words(decoder.at + (group_of(p) * 8 + q) * 64 + within(p));
  }
};
template <bool kWide>
struct Quads<Bytes<kWide>> : ByteQuads<Bytes<kWide>> {};
template <>
struct Quads<GroupBytes> : ByteQuads<GroupBytes> {};
