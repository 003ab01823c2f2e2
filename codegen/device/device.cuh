// The primitives that kernels are written in, for the GPU. cpu/emulation.h has the same names in plain C++.
#pragma once

namespace cukiln {

// Unsigned words that carry 1, 2, 4, 8 or 16 bytes in one memory instruction.
template <int Bytes> struct Word;
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned int; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

// Reads N consecutive elements that no kernel of this launch writes (ld.global.nc); `source` is aligned to the access.
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_global(const T* source) {
  using Access = typename Word<sizeof(T) * N>::type;
  const Access word = __ldg(reinterpret_cast<const Access*>(source));
  Vector<T, N> value;
  __builtin_memcpy(&value, &word, sizeof(word));
  return value;
}

// A plain access. Elements of less than 4 bytes move as words, because nvcc 13.2 takes vectors of them apart and puts
// them together again byte by byte.
template <int N, class T>
static __device__ __forceinline__ Vector<T, N> load_vector(const T* source) {
  if constexpr (sizeof(T) >= 4) {
    return *reinterpret_cast<const Vector<T, N>*>(source);
  } else {
    using Access = typename Word<sizeof(T) * N>::type;
    const Access word = *reinterpret_cast<const Access*>(source);
    Vector<T, N> value;
    __builtin_memcpy(&value, &word, sizeof(word));
    return value;
  }
}
template <int N, class T>
static __device__ __forceinline__ void store_vector(T* target, const Vector<T, N>& value) {
  if constexpr (sizeof(T) >= 4) {
    *reinterpret_cast<Vector<T, N>*>(target) = value;
  } else {
    using Access = typename Word<sizeof(T) * N>::type;
    Access word;
    __builtin_memcpy(&word, &value, sizeof(word));
    *reinterpret_cast<Access*>(target) = word;
  }
}

template <int N, class T>
__device__ __forceinline__ void store_global(T* target, const Vector<T, N>& value) {
  store_vector(target, value);
}

template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_shared(const T* source) {
  return load_vector<N>(source);
}

template <int N, class T>
__device__ __forceinline__ void store_shared(T* target, const Vector<T, N>& value) {
  store_vector(target, value);
}

// The block's dynamic shared memory; its size comes from the launch plan.
template <class T>
__device__ __forceinline__ T* shared_memory() {
  extern __shared__ __align__(16) unsigned char cukiln_shared_bytes[];
  return reinterpret_cast<T*>(cukiln_shared_bytes);
}

__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ float exp(float x) { return ::expf(x); }
// At most 2 ulp off; 1 of any zero, 0 of -infinity. Subnormal arguments and results are zeros (PTX ISA, "ex2").
__device__ __forceinline__ float exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
__device__ __forceinline__ float log(float x) { return ::logf(x); }
__device__ __forceinline__ float log2(float x) { return ::log2f(x); }
// Of a number and a NaN the number; +0 is greater than -0 (PTX ISA, "max").
__device__ __forceinline__ float maximum(float a, float b) { return ::fmaxf(a, b); }
// Rounded correctly (CUDA C++ Programming Guide, "Mathematical Functions").
__device__ __forceinline__ float sqrt(float x) { return __fsqrt_rn(x); }
__device__ __forceinline__ float erf(float x) { return ::erff(x); }
__device__ __forceinline__ float tanh(float x) { return ::tanhf(x); }

__device__ __forceinline__ float round_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  float rounded;
  asm("cvt.f32.f16 %0, %1;" : "=f"(rounded) : "h"(bits));
  return rounded;
}

// Integer arithmetic, because cvt.rn.bf16.f32 only exists from sm_80 on. Round to nearest even; NaN stays NaN.
__device__ __forceinline__ float round_to_bfloat16(float x) {
  const unsigned int bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return __uint_as_float(bits | 0x00400000u);
  return __uint_as_float((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// True only in exact CPU runs, where activations that no float type can represent exactly become the identity.
__device__ __forceinline__ constexpr bool exact_epilogue() { return false; }

}  // namespace cukiln
