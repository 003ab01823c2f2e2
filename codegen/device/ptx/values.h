// What PTX instructions do with values (PTX ISA 9.2). Registers are unsigned words; floats are their bits.
#pragma once

#include "../cpu/convert.h"

namespace cukiln {
namespace ptx {

using cpu::whole_warp;

// Of a run. `approximation`: whether instructions with a documented error come out at its lower end (-1), exact (0) or at its
// upper end (1). `fuse`: whether products and sums that ptxas may fuse are fused.
inline int approximation = 0;
inline bool fuse = false;

// Integers.

template <class T> struct Wider;
template <> struct Wider<int16_t> { using type = int32_t; };
template <> struct Wider<uint16_t> { using type = uint32_t; };
template <> struct Wider<int32_t> { using type = int64_t; };
template <> struct Wider<uint32_t> { using type = uint64_t; };
template <> struct Wider<int64_t> { using type = __int128; };
template <> struct Wider<uint64_t> { using type = unsigned __int128; };

template <class T> struct Unsigned { using type = T; };
template <> struct Unsigned<int32_t> { using type = uint32_t; };
template <> struct Unsigned<int64_t> { using type = uint64_t; };

// The upper half of the product, as a number of the type.
template <class T>
CUKILN_INLINE T mul_hi(T a, T b) {
  using W = typename Wider<T>::type;
  return static_cast<T>((static_cast<W>(a) * static_cast<W>(b)) >> (8 * sizeof(T)));
}

// Division by zero gives what the manual leaves open: here all bits set. -2^31 / -1 wraps around.
template <class T>
CUKILN_INLINE T div_unsigned(T a, T b) { return b == 0 ? static_cast<T>(-1) : static_cast<T>(a / b); }
template <class T>
CUKILN_INLINE T rem_unsigned(T a, T b) { return b == 0 ? static_cast<T>(-1) : static_cast<T>(a % b); }
template <class T>
CUKILN_INLINE T div_signed(T a, T b) {
  using W = typename Wider<T>::type;
  return b == 0 ? static_cast<T>(-1) : b == -1 ? static_cast<T>(-static_cast<W>(a)) : static_cast<T>(a / b);
}
template <class T>
CUKILN_INLINE T rem_signed(T a, T b) {
  return b == 0 ? static_cast<T>(-1) : b == -1 ? static_cast<T>(0) : static_cast<T>(a % b);
}
template <class T>
CUKILN_INLINE T min_unsigned(T a, T b) { return a < b ? a : b; }
template <class T>
CUKILN_INLINE T max_unsigned(T a, T b) { return a > b ? a : b; }
template <class T>
CUKILN_INLINE T min_signed(T a, T b) { return a < b ? a : b; }
template <class T>
CUKILN_INLINE T max_signed(T a, T b) { return a > b ? a : b; }

// Amounts above the width count as the width ("shl", "shr").
template <class T>
CUKILN_INLINE T shift_left(T a, uint32_t amount) { return amount >= 8 * sizeof(T) ? T(0) : static_cast<T>(a << amount); }
template <class T>
CUKILN_INLINE T shift_right(T a, uint32_t amount) {
  if (amount >= 8 * sizeof(T)) return a < 0 ? static_cast<T>(-1) : T(0);
  return static_cast<T>(a >> amount);
}
// Of the 64 bits b:a, with a the lower half ("shf").
CUKILN_INLINE uint32_t funnel_left(uint32_t a, uint32_t b, uint32_t amount) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(b) << 32 | a) << amount) >> 32);
}
CUKILN_INLINE uint32_t funnel_right(uint32_t a, uint32_t b, uint32_t amount) {
  return static_cast<uint32_t>((static_cast<uint64_t>(b) << 32 | a) >> amount);
}

// `position` and `length` are their lowest 8 bits. Bits that lie beyond the word are none ("bfi").
template <class T>
CUKILN_INLINE T insert_bits(T field, T into, uint32_t position, uint32_t length) {
  constexpr uint32_t width = 8 * sizeof(T);
  position &= 255;
  length &= 255;
  if (position >= width || length == 0) return into;
  const T ones = length >= width ? static_cast<T>(-1) : static_cast<T>((T(1) << length) - 1);
  const T mask = static_cast<T>(ones << position);
  return static_cast<T>((into & ~mask) | (static_cast<T>(field << position) & mask));
}
// Bits beyond the word, or beyond the field, are 0, or the sign of the field ("bfe").
template <class T>
CUKILN_INLINE T extract_bits(T from, uint32_t position, uint32_t length) {
  constexpr uint32_t width = 8 * sizeof(T);
  using U = typename Unsigned<T>::type;
  position &= 255;
  length &= 255;
  if (length == 0) return T(0);
  const uint32_t last = position + length - 1 < width - 1 ? position + length - 1 : width - 1;
  const bool sign = T(-1) < T(0) && (static_cast<U>(from) >> last & 1);
  const U shifted = position >= width ? U(0) : static_cast<U>(static_cast<U>(from) >> position);
  const uint32_t there = position >= width ? 0 : width - position < length ? width - position : length;
  const U mask = there >= width ? static_cast<U>(-1) : static_cast<U>((U(1) << there) - 1);
  return static_cast<T>((shifted & mask) | (sign ? static_cast<U>(~mask) : U(0)));
}

CUKILN_INLINE uint32_t popc(uint32_t a) { return static_cast<uint32_t>(__builtin_popcount(a)); }
CUKILN_INLINE uint32_t popc(uint64_t a) { return static_cast<uint32_t>(__builtin_popcountll(a)); }
CUKILN_INLINE uint32_t clz(uint32_t a) { return a == 0 ? 32u : static_cast<uint32_t>(__builtin_clz(a)); }
CUKILN_INLINE uint32_t clz(uint64_t a) { return a == 0 ? 64u : static_cast<uint32_t>(__builtin_clzll(a)); }
inline uint32_t brev(uint32_t a) {
  uint32_t reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (a >> i & 1u) << (31 - i);
  return reversed;
}
inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (uint32_t i = 0; i < 8; ++i)
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return result;
}

// The carry flag: of a sum whether it is 2^N or more, of a difference whether it is below 0.
template <class T>
CUKILN_INLINE T add_carried(T a, T b, bool in, bool writes, bool& carry) {
  const unsigned __int128 sum = static_cast<unsigned __int128>(a) + b + in;
  if (writes) carry = sum >> (8 * sizeof(T)) != 0;
  return static_cast<T>(sum);
}
template <class T>
CUKILN_INLINE T sub_carried(T a, T b, bool in, bool writes, bool& carry) {
  const unsigned __int128 taken = static_cast<unsigned __int128>(b) + in;
  if (writes) carry = taken > a;
  return static_cast<T>(a - static_cast<T>(taken));
}

// Each nibble of the selector picks one of the 8 bytes b:a; its highest bit spreads that byte's sign ("prmt").
CUKILN_INLINE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t nibble = selector >> (4 * i) & 15, byte = static_cast<uint32_t>(bytes >> (8 * (nibble & 7))) & 255;
    result |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return result;
}
// The special modes, by the lowest two bits of the selector.
inline uint32_t permute_f4e(uint32_t a, uint32_t b, uint32_t s) { return static_cast<uint32_t>((static_cast<uint64_t>(b) << 32 | a) >> (8 * (s & 3))); }
inline uint32_t permute_b4e(uint32_t a, uint32_t b, uint32_t s) {
  constexpr uint32_t selectors[] = {0x5670, 0x6701, 0x7012, 0x0123};
  return permute_bytes(a, b, selectors[s & 3]);
}
inline uint32_t permute_rc8(uint32_t a, uint32_t b, uint32_t s) { return permute_bytes(a, b, (s & 3) * 0x1111); }
inline uint32_t permute_ecl(uint32_t a, uint32_t b, uint32_t s) {
  constexpr uint32_t selectors[] = {0x3210, 0x3211, 0x3222, 0x3333};
  return permute_bytes(a, b, selectors[s & 3]);
}
inline uint32_t permute_ecr(uint32_t a, uint32_t b, uint32_t s) {
  constexpr uint32_t selectors[] = {0x0000, 0x1110, 0x2210, 0x3210};
  return permute_bytes(a, b, selectors[s & 3]);
}
inline uint32_t permute_rc16(uint32_t a, uint32_t b, uint32_t s) { return permute_bytes(a, b, s & 1 ? 0x3232 : 0x1010); }

// Floats. The host rounds as .rn does. A NaN that comes out is always the same (CUDA C++ Programming Guide, "Floating-Point
// Standard"): it has all bits, so that integer arithmetic on it may carry out of it.

constexpr uint32_t canonical_nan = 0x7fffffffu;

CUKILN_INLINE bool is_notanumber(uint32_t a) { return (a & 0x7fffffffu) > 0x7f800000u; }
CUKILN_INLINE bool is_number(uint32_t a) { return !is_notanumber(a); }
CUKILN_INLINE bool is_finite(uint32_t a) { return (a & 0x7f800000u) != 0x7f800000u; }
CUKILN_INLINE bool is_infinite(uint32_t a) { return (a & 0x7fffffffu) == 0x7f800000u; }
CUKILN_INLINE bool unordered(uint32_t a, uint32_t b) { return is_notanumber(a) || is_notanumber(b); }
// Neither has an exponent.
CUKILN_INLINE bool is_zero_or_subnormal(uint32_t a) { return (a & 0x7f800000u) == 0; }
// Subnormal numbers become zeros of their sign (.ftz).
CUKILN_INLINE uint32_t flush(uint32_t a) { return is_zero_or_subnormal(a) ? a & 0x80000000u : a; }
// To [0, 1]; a NaN becomes +0 (.sat).
CUKILN_INLINE uint32_t saturate(uint32_t a) {
  const float value = float_of(a);
  return value > 0.0f ? (value < 1.0f ? a : 0x3f800000u) : 0u;
}

CUKILN_INLINE uint32_t result_of(float value) { return value == value ? bits_of(value) : canonical_nan; }
CUKILN_INLINE uint32_t add_f32(uint32_t a, uint32_t b) { return result_of(float_of(a) + float_of(b)); }
CUKILN_INLINE uint32_t sub_f32(uint32_t a, uint32_t b) { return result_of(float_of(a) - float_of(b)); }
CUKILN_INLINE uint32_t mul_f32(uint32_t a, uint32_t b) { return result_of(float_of(a) * float_of(b)); }
CUKILN_INLINE uint32_t div_f32(uint32_t a, uint32_t b) { return result_of(float_of(a) / float_of(b)); }
CUKILN_INLINE uint32_t rcp_f32(uint32_t a) { return result_of(1.0f / float_of(a)); }
CUKILN_INLINE uint32_t sqrt_f32(uint32_t a) { return result_of(__builtin_sqrtf(float_of(a))); }
CUKILN_INLINE uint32_t fma_f32(uint32_t a, uint32_t b, uint32_t c) {
  return result_of(__builtin_fmaf(float_of(a), float_of(b), float_of(c)));
}
CUKILN_INLINE uint32_t neg_f32(uint32_t a) { return a ^ 0x80000000u; }
CUKILN_INLINE uint32_t abs_f32(uint32_t a) { return a & 0x7fffffffu; }

// Of a number and a NaN the number, with `nan` the NaN; -0 is below +0 ("min", "max").
template <bool nan>
CUKILN_INLINE uint32_t max_f32(uint32_t a, uint32_t b) {
  if (is_notanumber(a)) return nan || is_notanumber(b) ? canonical_nan : b;
  if (is_notanumber(b)) return nan ? canonical_nan : a;
  const float x = float_of(a), y = float_of(b);
  return x > y ? a : y > x ? b : a & b;
}
template <bool nan>
CUKILN_INLINE uint32_t min_f32(uint32_t a, uint32_t b) {
  if (is_notanumber(a)) return nan || is_notanumber(b) ? canonical_nan : b;
  if (is_notanumber(b)) return nan ? canonical_nan : a;
  const float x = float_of(a), y = float_of(b);
  return x < y ? a : y < x ? b : a | b;
}

// The next float toward an end of the line; of an infinity that lies beyond it, the largest finite one.
inline uint32_t next_down(uint32_t a) {
  if ((a & 0x7fffffffu) == 0) return 0x80000001u;
  return a & 0x80000000u ? a + 1 : a - 1;
}
inline uint32_t next_up(uint32_t a) { return neg_f32(next_down(neg_f32(a))); }

// a * b + c with the product exact, rounded down. Doubles have the product, and their sum with its error says on which side
// of the float that is nearest the true one lies (Knuth, TAOCP 2, 4.2.2, theorem B).
inline uint32_t fma_rm_f32(uint32_t a, uint32_t b, uint32_t c) {
  const uint32_t nearest = fma_f32(a, b, c);
  const double product = static_cast<double>(float_of(a)) * static_cast<double>(float_of(b)), added = static_cast<double>(float_of(c));
  const double sum = product + added;
  if (is_notanumber(nearest) || !__builtin_isfinite(product) || !__builtin_isfinite(added)) return nearest;
  const double of_product = sum - added, of_added = sum - of_product;
  const double error = (product - of_product) + (added - of_added);
  const double value = static_cast<double>(float_of(nearest));
  if (sum == 0.0 && error == 0.0) {
    const bool negative = __builtin_signbit(product), other = __builtin_signbit(added);
    return negative == other ? nearest : 0x80000000u;  // of unlike signs the sum is -0
  }
  return value > sum || (value == sum && error < 0.0) ? next_down(nearest) : nearest;
}
inline uint32_t fma_rp_f32(uint32_t a, uint32_t b, uint32_t c) {
  return result_of(float_of(neg_f32(fma_rm_f32(neg_f32(a), b, neg_f32(c)))));
}
// Of unlike signs a sum of 0 is -0 when it is rounded down alone; what lies next to 0 becomes the zero of its sign.
inline uint32_t fma_rz_f32(uint32_t a, uint32_t b, uint32_t c) {
  const uint32_t nearest = fma_f32(a, b, c);
  if ((nearest & 0x7fffffffu) == 0) return nearest;
  return nearest & 0x80000000u ? fma_rp_f32(a, b, c) : fma_rm_f32(a, b, c);
}

// Conversions.

CUKILN_INLINE uint32_t round_nearest(uint32_t a) { return bits_of(__builtin_rintf(float_of(a))); }
CUKILN_INLINE uint32_t round_toward_zero(uint32_t a) { return bits_of(__builtin_truncf(float_of(a))); }
CUKILN_INLINE uint32_t round_down(uint32_t a) { return bits_of(__builtin_floorf(float_of(a))); }
CUKILN_INLINE uint32_t round_up(uint32_t a) { return bits_of(__builtin_ceilf(float_of(a))); }

// Of a whole number: clamped to the type. A NaN is 0, and the highest bit alone in 64 bits ("cvt", notes on NaN).
template <class T>
CUKILN_INLINE T to_integer(uint32_t whole) {
  constexpr int bits = 8 * sizeof(T);
  constexpr bool is_signed = T(-1) < T(0);
  if (is_notanumber(whole)) return bits == 64 ? static_cast<T>(uint64_t{1} << 63) : T(0);
  const float value = float_of(whole);
  const float beyond = is_signed ? __builtin_ldexpf(1.0f, bits - 1) : __builtin_ldexpf(1.0f, bits);
  constexpr uint64_t most = is_signed ? ~uint64_t{0} >> (64 - bits + 1) : ~uint64_t{0} >> (64 - bits);
  if (value >= beyond) return static_cast<T>(most);
  if (is_signed) return value < -beyond ? static_cast<T>(uint64_t{1} << (bits - 1)) : static_cast<T>(value);
  return value <= 0.0f ? T(0) : static_cast<T>(value);
}
CUKILN_INLINE uint16_t to_f16(uint32_t a) { return from_float<Half>(float_of(a)).bits; }
CUKILN_INLINE uint16_t to_bf16(uint32_t a) {
  return is_notanumber(a) ? uint16_t{0x7fff} : from_float<BFloat16>(float_of(a)).bits;
}
// Of two numbers one behind the other the one nearer to zero has the smaller bits, its sign apart; infinity has the
// largest number before it.
CUKILN_INLINE uint16_t toward_zero(uint16_t nearest, float narrowed, uint32_t a) {
  return nearest - (is_finite(a) && __builtin_fabsf(narrowed) > __builtin_fabsf(float_of(a)));
}
CUKILN_INLINE uint16_t to_f16_toward_zero(uint32_t a) { return toward_zero(to_f16(a), to_float(Half{to_f16(a)}), a); }
CUKILN_INLINE uint16_t to_bf16_toward_zero(uint32_t a) {
  return toward_zero(to_bf16(a), float_of(uint32_t(to_bf16(a)) << 16), a);
}
// To 10 bits of mantissa, the nearest, ties away from zero.
CUKILN_INLINE uint32_t to_tf32(uint32_t a) { return is_finite(a) ? (a + 0x1000u) & 0xffffe000u : is_notanumber(a) ? canonical_nan : a; }

}  // namespace ptx
}  // namespace cukiln
