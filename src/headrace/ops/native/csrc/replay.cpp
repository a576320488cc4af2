// A recorded step: calls of the C interface, made one after the other (ops/native/recording.py writes them down).
#include <cstring>

#include "api.h"

namespace {

struct Call {
  int64_t code;
  int64_t a[13];
};

template <class T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(address);
}

int whole(int64_t value) { return static_cast<int>(value); }

float real(int64_t bits) {
  const uint32_t low = static_cast<uint32_t>(bits);
  float value;
  std::memcpy(&value, &low, 4);
  return value;
}

void make(const Call& call) {
  const int64_t* a = call.a;
  switch (call.code) {
    case 0:
      headrace_linear(at<void>(a[0]), whole(a[1]), whole(a[2]), at<float>(a[3]), a[4], whole(a[5]), at<float>(a[6]),
                      at<float>(a[7]), a[8], whole(a[9]), whole(a[10]));
      break;
    case 1:
      headrace_rms_norm(at<float>(a[0]), a[1], a[2], whole(a[3]), whole(a[4]), at<float>(a[5]), at<float>(a[6]), a[7],
                        a[8], whole(a[9]), real(a[10]));
      break;
    case 2:
      headrace_add_rms_norm(at<float>(a[0]), a[1], at<float>(a[2]), a[3], whole(a[4]), at<float>(a[5]), at<float>(a[6]),
                            a[7], whole(a[8]), real(a[9]));
      break;
    case 3:
      headrace_rope(at<float>(a[0]), a[1], a[2], whole(a[3]), whole(a[4]), at<float>(a[5]), at<float>(a[6]), a[7],
                    at<float>(a[8]), a[9], a[10], whole(a[11]), whole(a[12]));
      break;
    case 4:
      headrace_gated(whole(a[0]), at<float>(a[1]), a[2], at<float>(a[3]), a[4], whole(a[5]), whole(a[6]));
      break;
    case 5:
      headrace_attention(at<headrace::AttentionJob>(a[0]), at<float>(a[1]), a[2], at<float>(a[3]), a[4],
                         at<int32_t>(a[5]), whole(a[6]), whole(a[7]));
      break;
    case 6:
      headrace_unpack_rows(whole(a[0]), at<uint8_t>(a[1]), whole(a[2]), at<int32_t>(a[3]), whole(a[4]), at<float>(a[5]),
                           a[6]);
      break;
    case 8:
      headrace_elementwise(whole(a[0]), at<float>(a[1]), a[2], at<float>(a[3]), a[4], real(a[5]), at<float>(a[6]), a[7],
                           whole(a[8]), whole(a[9]));
      break;
    case 7:
      headrace_gather_rows(at<float>(a[0]), a[1], at<int32_t>(a[2]), whole(a[3]), at<float>(a[4]), whole(a[5]));
      break;
  }
}

}  // namespace

EXPORT void headrace_replay(const void* calls_at, int count) {
  const Call* calls = static_cast<const Call*>(calls_at);
  for (int i = 0; i < count; ++i) make(calls[i]);
}
