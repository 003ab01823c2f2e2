// The primitives of convert.cuh in plain C++.
#pragma once

#include "emulation.h"

namespace cukiln {

inline float to_float(float value) { return value; }
inline float to_float(int value) { return static_cast<float>(value); }
// A half's exponent is 112 less than a float's; the multiplication also normalises subnormal halves. NaN becomes quiet.
inline float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16, magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude > 0x7c00u ? 0x00400000u | magnitude << 13 : 0u));
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}
inline float to_float(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

template <class T> struct FromFloat;
template <> struct FromFloat<float> {
  static float convert(float value) { return value; }
};
template <> struct FromFloat<Half> {
  // The rounded value is a half, so that what is left is to move its parts. A NaN is 0x7fff, as cvt.rn.f16.f32 makes it.
  static Half convert(float value) {
    const uint32_t bits = bits_of(round_to_half(value));
    const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {0x7fff};
    if (magnitude == 0x7f800000u) return {static_cast<unsigned short>(sign | 0x7c00u)};
    if (magnitude < 0x38800000u) return {static_cast<unsigned short>(sign | static_cast<uint32_t>(float_of(magnitude) * 0x1p24f))};
    return {static_cast<unsigned short>(sign | (magnitude - 0x38000000u) >> 13)};
  }
};
template <> struct FromFloat<BFloat16> {
  static BFloat16 convert(float value) { return {static_cast<unsigned short>(bits_of(round_to_bfloat16(value)) >> 16)}; }
};

template <class T>
inline T from_float(float value) {
  return FromFloat<T>::convert(value);
}

template <class T>
inline unsigned pack_pair(float low, float high) {
  return from_float<T>(low).bits | static_cast<unsigned>(from_float<T>(high).bits) << 16;
}

inline unsigned round_to_tf32(unsigned bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu;
  return (bits + 0x1000u) & 0xffffe000u;
}

inline void transpose_bytes(unsigned (&words)[4]) {
  unsigned char before[4][4], after[4][4];
  memcpy(before, words, sizeof(before));
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) after[j][i] = before[i][j];
  memcpy(words, after, sizeof(after));
}

}  // namespace cukiln
