// From the rows of a file to panels (kernels.h) and back. Plain code: a model is packed once, by all threads.
//
// Block layouts of the files: ggml's quantisation types (ggml-org/ggml, src/ggml-common.h and docs/gguf.md). I8 is what
// loading/compressed.py makes of int8 weights: 32 k are a float32 scale and 32 signed bytes. Q4_64 and Q8_64 are what
// quant/online.py makes: 64 k are fp16 d, fp16 m and 32 bytes, whose low nibbles come first; or fp16 d and 64 signed bytes.
#include <cstring>

#include "kernels.h"

namespace headrace {
namespace {

inline uint16_t read16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}
inline uint32_t read32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}
inline void write16(uint8_t* p, uint16_t v) { std::memcpy(p, &v, 2); }
inline void write32(uint8_t* p, uint32_t v) { std::memcpy(p, &v, 4); }
inline bool bad_half(uint16_t bits) { return (bits & 0x7C00) == 0x7C00; }

// 32 elements of a row as the file has them.
struct Elements {
  uint8_t q[kBlock];  // 0 .. 255
  uint16_t d, m;      // fp16; K formats: of the super-block
  uint32_t wide;      // I8: the scale, a float32
  uint8_t sc[2], mn;  // K formats: scales of the block (Q6_K: two signed bytes)
};

inline void nibbles_of(const uint8_t* qs, uint8_t* q) {
  for (int j = 0; j < 16; ++j) {
    q[j] = qs[j] & 15;
    q[j + 16] = qs[j] >> 4;
  }
}

// Scale and minimum of block j of 8 in a Q4_K or Q5_K super-block: 6 bits each, spread over 12 bytes.
inline void scales_of(const uint8_t* s, int j, uint8_t* sc, uint8_t* mn) {
  if (j < 4) {
    *sc = s[j] & 63;
    *mn = s[j + 4] & 63;
  } else {
    *sc = static_cast<uint8_t>((s[j + 4] & 15) | (s[j - 4] >> 6 << 4));
    *mn = static_cast<uint8_t>((s[j + 4] >> 4) | (s[j] >> 6 << 4));
  }
}

// Elements [32 * block, 32 * block + 32) of a row.
void read_block(int format, const uint8_t* row, int block, Elements* e) {
  const FormatInfo& info = kFormats[format];
  const uint8_t* s = row + static_cast<size_t>(block * kBlock / info.source_block) * info.source_bytes;
  const int j = block % kSuper;  // within a super-block
  e->d = format == I8 ? 0 : read16(s);
  e->m = 0;
  e->wide = 0;
  switch (format) {
    case Q4_0:
      nibbles_of(s + 2, e->q);
      break;
    case Q4_1:
      e->m = read16(s + 2);
      nibbles_of(s + 4, e->q);
      break;
    case Q5_0:
    case Q5_1: {
      if (format == Q5_1) e->m = read16(s + 2);
      const uint8_t* high = s + (format == Q5_1 ? 4 : 2);
      const uint32_t bits = read32(high);
      nibbles_of(high + 4, e->q);
      for (int k = 0; k < kBlock; ++k) e->q[k] |= (bits >> k & 1) << 4;
      break;
    }
    case Q8_0:
      for (int k = 0; k < kBlock; ++k) e->q[k] = s[2 + k] ^ 0x80;
      break;
    case Q4_64:
      e->m = read16(s + 2);
      for (int k = 0; k < kBlock; ++k) e->q[k] = block % 2 ? s[4 + k] >> 4 : s[4 + k] & 15;
      break;
    case Q8_64:
      for (int k = 0; k < kBlock; ++k) e->q[k] = s[2 + block % 2 * kBlock + k] ^ 0x80;
      break;
    case I8:
      e->wide = read32(s);
      for (int k = 0; k < kBlock; ++k) e->q[k] = s[4 + k] ^ 0x80;
      break;
    case Q4_K:
    case Q5_K: {
      e->m = read16(s + 2);
      scales_of(s + 4, j, &e->sc[0], &e->mn);
      const uint8_t* low = s + (format == Q4_K ? 16 : 48) + j / 2 * 32;
      for (int k = 0; k < kBlock; ++k) {
        e->q[k] = j % 2 ? low[k] >> 4 : low[k] & 15;
        if (format == Q5_K) e->q[k] |= (s[16 + k] >> j & 1) << 4;
      }
      break;
    }
    case Q6_K: {
      const int half = j / 4, quarter = j % 4;  // 128 elements; 32 of them
      const uint8_t* low = s + half * 64 + quarter % 2 * 32;
      const uint8_t* high = s + 128 + half * 32;
      for (int k = 0; k < kBlock; ++k) {
        const int four = quarter < 2 ? low[k] & 15 : low[k] >> 4;
        e->q[k] = static_cast<uint8_t>(four | (high[k] >> 2 * quarter & 3) << 4);
      }
      e->sc[0] = s[192 + 2 * j];
      e->sc[1] = s[193 + 2 * j];
      e->d = read16(s + 208);
      break;
    }
  }
}

void write_nibbles(const uint8_t* q, int output, uint8_t* out) {
  for (int z = 0; z < 4; ++z) {
    const uint32_t low = read32(q + 8 * z) & 0x0F0F0F0Fu, high = read32(q + 8 * z + 4) & 0x0F0F0F0Fu;
    write32(out + ((output / 16 * 4 + z) * 16 + output % 16) * 4, low | high << 4);
  }
}

// Writes elements as output `output` of a panel's block, the j-th behind `header`.
void write_block(int format, const Elements& e, int output, uint8_t* block, uint8_t* header, int j) {
  if (format == Q8_0 || format == I8 || format == Q8_64) {
    for (int z = 0; z < 8; ++z)
      write32(block + ((output / 16 * 8 + z) * 16 + output % 16) * 4, read32(e.q + 4 * z));
    if (format == I8) write32(block + 1024 + 4 * output, e.wide);
    else if (format == Q8_64) write16(header + j / 2 * 64 + 2 * output, e.d);
    else write16(block + 1024 + 2 * output, e.d);
    return;
  }
  write_nibbles(e.q, output, block);
  uint8_t* scales = block + 512;
  if (format == Q5_0 || format == Q5_1 || format == Q5_K) {
    uint32_t bits = 0;
    for (int k = 0; k < kBlock; ++k) bits |= static_cast<uint32_t>(e.q[k] >> 4) << bit_of(k);
    write32(block + 512 + 4 * output, bits);
    scales += 128;
  }
  if (format == Q6_K) {
    for (int half = 0; half < 2; ++half) {
      uint32_t bits = 0;
      for (int k = 0; k < 16; ++k) bits |= static_cast<uint32_t>(e.q[16 * half + k] >> 4) << two_bits_of(k);
      write32(block + 512 + half * 128 + 4 * output, bits);
      block[768 + half * 32 + output] = e.sc[half];
    }
    write16(header + 2 * output, e.d);
  } else if (format == Q4_K || format == Q5_K) {
    scales[output] = e.sc[0];
    scales[32 + output] = e.mn;
    write16(header + 2 * output, e.d);
    write16(header + 64 + 2 * output, e.m);
  } else if (format == Q4_64) {
    write16(header + j / 2 * 128 + 2 * output, e.d);
    write16(header + j / 2 * 128 + 64 + 2 * output, e.m);
  } else {
    write16(scales + 2 * output, e.d);
    if (format == Q4_1 || format == Q5_1) write16(scales + 64 + 2 * output, e.m);
  }
}

inline float scaled(int q, float d, float m) { return static_cast<float>(q) * d + m; }

}  // namespace

float half_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  uint32_t out;
  float value;
  if (exponent == 31) {
    out = sign | 0x7F800000u | fraction << 13;
  } else if (exponent == 0) {
    value = static_cast<float>(fraction) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&out, &value, 4);
    out |= sign;
  } else {
    out = sign | (exponent + 112) << 23 | fraction << 13;
  }
  std::memcpy(&value, &out, 4);
  return value;
}

// Rows [first, first + 32) of a file's matrix, cut off at num_rows, into one panel; row r of the panel's matrix is row
// order[r] of the file. Returns 1 if a scale or a plain value is not finite.
int pack_panel(int format, const uint8_t* rows, size_t row_bytes, const int64_t* order, int num_rows, int first, int k,
               uint8_t* out) {
  const FormatInfo& info = kFormats[format];
  int bad = 0;
  std::memset(out, 0, panel_bytes(format, k));
  for (int output = 0; output < kPanel && first + output < num_rows; ++output) {
    const int64_t source = order ? order[first + output] : first + output;
    const uint8_t* row = rows + static_cast<size_t>(source) * row_bytes;
    if (info.block == 1) {
      const int size = info.source_bytes;
      for (int e = 0; e < k; ++e) {
        std::memcpy(out + static_cast<size_t>(e) * info.block_bytes + output * size, row + static_cast<size_t>(e) * size,
                    static_cast<size_t>(size));
        if (format == F32) bad |= (read32(row + 4 * static_cast<size_t>(e)) & 0x7F800000u) == 0x7F800000u;
        else if (format == F16) bad |= bad_half(read16(row + 2 * static_cast<size_t>(e)));
        else bad |= (read16(row + 2 * static_cast<size_t>(e)) & 0x7F80) == 0x7F80;
      }
      continue;
    }
    uint8_t *at = out, *header = out;
    for (int block = 0; block < k / kBlock; ++block) {
      Elements e;
      read_block(format, row, block, &e);
      bad |= bad_half(e.d) | bad_half(e.m) | ((e.wide & 0x7F800000u) == 0x7F800000u);
      if (info.header_bytes && block % kSuper == 0) {
        header = at;
        at += info.header_bytes;
      }
      write_block(format, e, output, at, header, block % kSuper);
      at += info.block_bytes;
    }
  }
  return bad;
}

// Row `row` of a packed matrix as float32 [k]: the same bits as the kernels' decoders give.
void unpack_row(int format, const uint8_t* matrix, int k, int row, float* out) {
  const FormatInfo& info = kFormats[format];
  const uint8_t* at = matrix + static_cast<size_t>(row / kPanel) * panel_bytes(format, k);
  const uint8_t* header = at;
  const int output = row % kPanel;
  const bool five = format == Q5_0 || format == Q5_1 || format == Q5_K;
  for (int block = 0; block < k / info.block; ++block) {
    if (info.header_bytes && block % kSuper == 0) {
      header = at;
      at += info.header_bytes;
    }
    if (info.block == 1) {
      if (format == F16) {
        out[block] = half_to_float(read16(at + 2 * output));
      } else {
        const uint32_t bits = format == F32 ? read32(at + 4 * output) : static_cast<uint32_t>(read16(at + 2 * output)) << 16;
        std::memcpy(out + block, &bits, 4);
      }
    } else if (format == Q8_0 || format == I8 || format == Q8_64) {
      const uint8_t* scale = format == Q8_64 ? header + block % kSuper / 2 * 64 : at + 1024;
      float d = half_to_float(read16(scale + 2 * output));
      if (format == I8) std::memcpy(&d, at + 1024 + 4 * output, 4);
      const uint8_t* q = at + (output / 16 * 8 * 16 + output % 16) * 4;
      for (int e = 0; e < kBlock; ++e) out[block * kBlock + e] = static_cast<float>(q[e / 4 * 64 + e % 4] - 128) * d;
    } else {
      const uint8_t* scales = at + (five ? 640 : 512);
      const uint32_t bits = five || format == Q6_K ? read32(at + 512 + 4 * output) : 0;
      const uint32_t more = format == Q6_K ? read32(at + 640 + 4 * output) : 0;
      const uint8_t* halves = info.header_bytes ? header : scales;  // where d and m lie
      if (format == Q4_64) halves += block % kSuper / 2 * 128;
      float d = half_to_float(read16(halves + 2 * output)), m = 0.0f;
      const float big = d;
      if (format == Q4_0) m = -8.0f * d;
      else if (format == Q5_0) m = -16.0f * d;
      else if (format == Q4_1 || format == Q5_1 || format == Q4_64) m = half_to_float(read16(halves + 64 + 2 * output));
      else if (format != Q6_K) {
        d = big * static_cast<float>(scales[output]);
        m = -half_to_float(read16(halves + 64 + 2 * output)) * static_cast<float>(scales[32 + output]);
      }
      for (int e = 0; e < kBlock; ++e) {
        const uint32_t word = read32(at + ((output / 16 * 4 + e / 8) * 16 + output % 16) * 4);
        int q = static_cast<int>(word >> 4 * (2 * (e & 3) + (e >> 2 & 1)) & 15);
        if (five) q |= static_cast<int>(bits >> bit_of(e) & 1) << 4;
        if (format == Q6_K) {
          q |= static_cast<int>((e < 16 ? bits : more) >> two_bits_of(e % 16) & 3) << 4;
          q -= 32;
          d = big * static_cast<float>(static_cast<int8_t>(at[768 + e / 16 * 32 + output]));
        }
        out[block * kBlock + e] = scaled(q, d, m);
      }
    }
    at += info.block_bytes;
  }
}

}  // namespace headrace
