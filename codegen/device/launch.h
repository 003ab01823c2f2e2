// What device code, launch code and the library's stub share: plain data only, no CUDA, no heavy header.
#pragma once
#if !defined(__CUDACC__)
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#endif

// What a CPU build with CUKILN_COUNTING counts (cpu/counts.h); elsewhere nothing.
#if !defined(CUKILN_COUNT)
#define CUKILN_COUNT(...)
#endif

namespace cukiln {

// N elements that move as one access: the alignment makes nvcc emit one 4-, 8- or 16-byte instruction.
template <class T, int N>
struct alignas(sizeof(T) * N) Vector {
  T data[N];
};

template <class A, class B> constexpr bool is_same = false;
template <class A> constexpr bool is_same<A, A> = true;

// Storage of the 16-bit floating-point types: IEEE 754 binary16, and the upper half of a binary32.
struct Half {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};

#if defined(CUKILN_HOST)

// One kernel launch of a candidate. `function` indexes the operator's list of kernel functions.
struct Launch {
  int function;
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
};

enum class ElementType { float32, float16, bfloat16, int32, int64, int8, uint8, other };

template <class T> constexpr ElementType element_type = ElementType::other;
template <> constexpr ElementType element_type<float> = ElementType::float32;
template <> constexpr ElementType element_type<Half> = ElementType::float16;
template <> constexpr ElementType element_type<BFloat16> = ElementType::bfloat16;
template <> constexpr ElementType element_type<int> = ElementType::int32;
template <> constexpr ElementType element_type<int64_t> = ElementType::int64;
template <> constexpr ElementType element_type<signed char> = ElementType::int8;
template <> constexpr ElementType element_type<unsigned char> = ElementType::uint8;

inline const char* name_of(ElementType type) {
  switch (type) {
    case ElementType::float32: return "float32";
    case ElementType::float16: return "float16";
    case ElementType::bfloat16: return "bfloat16";
    case ElementType::int32: return "int32";
    case ElementType::int64: return "int64";
    case ElementType::int8: return "int8";
    case ElementType::uint8: return "uint8";
    default: return "another dtype";
  }
}

// A caller's tensor as the binding sees it. Strides are in elements; `device` is a CUDA ordinal, -1 for host memory.
struct TensorView {
  const void* data;
  ElementType type;
  int device;
  int rank;
  const int64_t* shape;
  const int64_t* strides;
};

// Where a check writes the sentence that the caller of the library reads.
struct Complaint {
  char* text;
  size_t size;
};

#define CUKILN_REFUSE(complaint, ...) \
  return (snprintf((complaint).text, (complaint).size, __VA_ARGS__), false)

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

#endif  // CUKILN_HOST

}  // namespace cukiln
