// Strings of a GGUF file's metadata, each a 64-bit length and its bytes: a vocabulary is a hundred thousand of them.
#include <cstring>

#include "api.h"

// Where `count` strings from `position` on end; -1 if one runs past `size`. With `out` they are written there, a zero
// byte between two of them; -2 if a string has a zero byte itself.
EXPORT int64_t headrace_join_strings(const uint8_t* data, int64_t size, int64_t position, int64_t count, uint8_t* out) {
  for (int64_t s = 0; s < count; ++s) {
    uint64_t length;
    if (size - position < 8) return -1;
    std::memcpy(&length, data + position, 8);
    position += 8;
    if (length > static_cast<uint64_t>(size - position)) return -1;
    if (out) {
      if (std::memchr(data + position, 0, length)) return -2;
      if (s) *out++ = 0;
      std::memcpy(out, data + position, length);
      out += length;
    }
    position += static_cast<int64_t>(length);
  }
  return position;
}
