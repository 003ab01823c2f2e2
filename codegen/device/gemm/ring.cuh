// Sums of products over Z/2^32 (int) and Z/2^64 (int64_t), which wrap around as two's complement does, and their
// truncation: an arithmetic shift of the value by Config::fraction_bits, rounded down or to the nearest, ties up.
//
// A sum may be truncated once, when it is whole; after each tile of k (the parts are truncated and added); or product by
// product. The latter two differ from the first by as much as docs/operators/ring.md proves, where nothing wraps around.
#pragma once

namespace cukiln {

// A number of a larger ring than Z/2^64, of which Winograd's products are (conv/winograd.cuh).
using Wide = unsigned __int128;
#if defined(CUKILN_DEVICE)
__device__ __forceinline__ Wide plus(Wide a, Wide b) { return a + b; }
#endif

namespace gemm {

// Config::truncate.
enum { truncate_once, truncate_tile, truncate_product };

template <class C>
constexpr bool over_ring =
    is_same<typename C::Input, int> || is_same<typename C::Input, int64_t> || is_same<typename C::Input, Wide>;

// Bytes of a number that count (Config::limbs), where those are not all.
template <int> struct Named { using type = void; };
template <class C, class = void> constexpr int limbs_of = static_cast<int>(sizeof(typename C::Input));
template <class C> constexpr int limbs_of<C, typename Named<C::limbs>::type> = C::limbs;

#if defined(CUKILN_DEVICE)

template <class T> struct UnsignedOf;
template <> struct UnsignedOf<int> { using type = unsigned; };
template <> struct UnsignedOf<int64_t> { using type = unsigned long long; };
template <> struct UnsignedOf<Wide> { using type = Wide; };

template <class C>
__device__ __forceinline__ constexpr bool truncates_tiles() {
  if constexpr (over_ring<C>) return C::truncate == truncate_tile;
  return false;
}

// The shift leaves the sign: nvcc and g++ shift signed integers arithmetically. The bit below says whether the nearest is
// above, which is (value + 2^(bits - 1)) >> bits without a sum that could overflow.
template <class C, class T>
__device__ __forceinline__ T truncated(T value) {
  constexpr int bits = C::fraction_bits;
  if constexpr (bits == 0) {
    return value;
  } else {
    CUKILN_COUNT("truncate");
    const T floor = value >> bits;
    return C::nearest ? plus(floor, (value >> (bits - 1)) & T(1)) : floor;
  }
}

__device__ __forceinline__ int product(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) * static_cast<unsigned>(b)); }
__device__ __forceinline__ int64_t product(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<unsigned long long>(a) * static_cast<unsigned long long>(b));
}

__device__ __forceinline__ Wide product(Wide a, Wide b) { return a * b; }

// sum + a b, with the product truncated where each is.
template <class C, class T>
__device__ __forceinline__ T multiply_add(T a, T b, T sum) {
  CUKILN_COUNT("imad", 1);
  const T whole = product(a, b);
  return plus(sum, C::truncate == truncate_product ? truncated<C>(whole) : whole);
}

#endif  // CUKILN_DEVICE

}  // namespace gemm

#if defined(CUKILN_DEVICE)

// A number of the ring as the epilogue computes with it: one with fraction_bits, as are products of two once truncated.
template <class C>
struct Number {
  using T = typename C::Output;
  T value;

  Number() = default;
  __device__ __forceinline__ explicit Number(T given) : value(given) {}
  // Of a scalar that is one: fp32 holds it and, 2^fraction_bits times as large, it is whole.
  static __device__ __forceinline__ Number of(float scalar) {
    return Number(static_cast<T>(scalar * static_cast<float>(1ull << C::fraction_bits)));
  }
  __device__ __forceinline__ bool operator<(const Number& other) const { return value < other.value; }
};

template <class C>
__device__ __forceinline__ Number<C> plus(Number<C> a, Number<C> b) {
  return Number<C>(plus(a.value, b.value));
}
template <class C>
__device__ __forceinline__ Number<C> squared(Number<C> x) {
  CUKILN_COUNT("imad", 1);
  return Number<C>(gemm::truncated<C>(gemm::product(x.value, x.value)));
}
// The product is truncated, and then the sum taken.
template <class C>
__device__ __forceinline__ Number<C> multiply_add(Number<C> a, Number<C> b, Number<C> c) {
  CUKILN_COUNT("imad", 1);
  return Number<C>(plus(gemm::truncated<C>(gemm::product(a.value, b.value)), c.value));
}

#endif  // CUKILN_DEVICE

}  // namespace cukiln
