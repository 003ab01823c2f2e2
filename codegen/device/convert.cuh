// Between element types, and bytes between registers.
#pragma once

namespace cukiln {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(int value) { return __int2float_rn(value); }
__device__ __forceinline__ float to_float(Half value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}
__device__ __forceinline__ float to_float(BFloat16 value) {
  return __uint_as_float(static_cast<unsigned int>(value.bits) << 16);
}

// How `from_float` makes a T, one specialisation per type.
template <class T> struct FromFloat;
template <> struct FromFloat<float> {
  static __device__ __forceinline__ float convert(float value) { return value; }
};
template <> struct FromFloat<Half> {
  static __device__ __forceinline__ Half convert(float value) {
    Half narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
    return narrow;
  }
};
template <> struct FromFloat<BFloat16> {
  static __device__ __forceinline__ BFloat16 convert(float value) {
    return {static_cast<unsigned short>(__float_as_uint(round_to_bfloat16(value)) >> 16)};
  }
};

// To float, Half or BFloat16: to the nearest, ties to even. NaN stays NaN; its bits differ between GPUs and CPU.
template <class T>
__device__ __forceinline__ T from_float(float value) {
  return FromFloat<T>::convert(value);
}

// How `pack_pair` makes two T.
template <class T> struct PackPair;
template <> struct PackPair<Half> {
  static __device__ __forceinline__ unsigned convert(float low, float high) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
};
template <> struct PackPair<BFloat16> {
  static __device__ __forceinline__ unsigned convert(float low, float high) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
};

// Two Half or BFloat16 in one register, each as `from_float` makes it, in one instruction. Needs sm_80.
template <class T>
__device__ __forceinline__ unsigned pack_pair(float low, float high) {
  return PackPair<T>::convert(low, high);
}

// The bits of a float's nearest neighbour that tf32 holds (11 significant bits, 13 zeros behind them), ties away from zero.
// Without it mma cuts operands off, which is a bias. Needs sm_80.
__device__ __forceinline__ unsigned round_to_tf32(unsigned bits) {
  unsigned rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}

// Transposes 4 x 4 bytes: byte j of words[i] becomes byte i of words[j].
__device__ __forceinline__ void transpose_bytes(unsigned (&words)[4]) {
  const unsigned low01 = __byte_perm(words[0], words[1], 0x5140), low23 = __byte_perm(words[2], words[3], 0x5140);
  const unsigned high01 = __byte_perm(words[0], words[1], 0x7362), high23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low01, low23, 0x5410);
  words[1] = __byte_perm(low01, low23, 0x7632);
  words[2] = __byte_perm(high01, high23, 0x5410);
  words[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace cukiln
