// How tensor cores add: d + sum of a * b of one element of mma.sync, bit by bit, on whole tiles.
//
// PTX leaves the order of the additions and their rounding open (PTX ISA, "Multiply-and-accumulate instruction: mma"). What
// the hardware does was found by Xie et al., "MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores"
// (arXiv:2511.10909); tests/device/test_tensor_sums.py compares with their model. A step of mma is cut into blocks of so many
// bytes of k, one after the other. In each block
//   1. every product is exact, its exponent the sum of those of its factors (its significand is below 4; that of a
//      subnormal number is below 1); that of a zero is `Target::floor`;
//   2. the products and d are aligned to the largest exponent of them all and truncated, toward zero, to `fraction_bits`
//      bits behind the point;
//   3. their sum is exact, and becomes d: truncated toward zero for d in fp32 (an overflow is infinite), rounded to the
//      nearest, ties to even, for d in fp16. A zero is +0.
// Infinities and NaN spread as IEEE 754 says; a NaN is 0x7fffffff (fp16: 0x7fff). tf32 ignores the 13 lowest bits of its
// operands, so that a NaN without any of the higher bits counts as infinity.
//
// CUKILN_TENSOR_SUMS is the compute capability whose tensor cores are meant, the oldest that adds in this way: 75 for
// Turing, Ampere and Ada, 90 for Hopper and Blackwell.
#pragma once

#include "convert.h"

#if !defined(CUKILN_TENSOR_SUMS)
#define CUKILN_TENSOR_SUMS 75
#endif

namespace cukiln {
namespace cpu {

constexpr bool wide_sums = CUKILN_TENSOR_SUMS >= 90;
constexpr int fraction_bits = wide_sums ? 25 : 24, block_bytes = wide_sums ? 32 : 16;

template <class Type, class Target, int K>
void add_products(float (&d)[16][8], const float (&a)[16][K], const float (&b)[K][8]);
struct ToFloat;

// Numbers that tensor cores multiply, widened to floats: one function per type, over whole arrays so that it vectorises.
// `bytes`: of an element in the registers. `least`, `most`: the exponents between which `add_regular` is exact; `lowest`:
// that of subnormal numbers.
struct Halves {
  using Raw = unsigned short;
  using Sum = float;
  static constexpr int bytes = 2, lowest = -14, least = -24, most = 15;
  static CUKILN_INLINE void widen(const Raw* from, Sum* to, int count) {
    for (int i = 0; i < count; ++i) {
      const uint32_t sign = static_cast<uint32_t>(from[i] & 0x8000u) << 16, magnitude = from[i] & 0x7fffu;
      const uint32_t scaled = bits_of(float_of(magnitude << 13) * 0x1p112f);
      to[i] = float_of(sign | scaled | (magnitude >= 0x7c00u ? 0x7f800000u : 0u));
    }
  }
  template <int K>
  static CUKILN_INLINE void add(Sum (&d)[16][8], const Sum (&a)[16][K], const Sum (&b)[K][8]) {
    add_products<Halves, ToFloat, K>(d, a, b);
  }
};
struct BFloats {
  using Raw = unsigned short;
  using Sum = float;
  static constexpr int bytes = 2, lowest = -126, least = -48, most = 48;
  static CUKILN_INLINE void widen(const Raw* from, Sum* to, int count) {
    for (int i = 0; i < count; ++i) to[i] = float_of(static_cast<uint32_t>(from[i]) << 16);
  }
  template <int K>
  static CUKILN_INLINE void add(Sum (&d)[16][8], const Sum (&a)[16][K], const Sum (&b)[K][8]) {
    add_products<BFloats, ToFloat, K>(d, a, b);
  }
};
struct TensorFloats {
  using Raw = uint32_t;
  using Sum = float;
  static constexpr int bytes = 4, lowest = -126, least = -48, most = 48;
  static CUKILN_INLINE void widen(const Raw* from, Sum* to, int count) {
    for (int i = 0; i < count; ++i) to[i] = float_of(from[i] & 0xffffe000u);
  }
  template <int K>
  static CUKILN_INLINE void add(Sum (&d)[16][8], const Sum (&a)[16][K], const Sum (&b)[K][8]) {
    add_products<TensorFloats, ToFloat, K>(d, a, b);
  }
};

// What the sums become. `floor`: the exponent that zeros count with.
struct ToFloat {
  static constexpr int lowest = -126, floor = wide_sums ? -133 : -132, mantissa_bits = 23;
  static constexpr uint32_t nan = 0x7fffffffu;
};
struct ToHalf {
  static constexpr int lowest = -14, floor = wide_sums ? -21 : -20, mantissa_bits = 10;
  static constexpr uint32_t nan = 0x7fffe000u;  // that of the half 0x7fff, widened
};

inline float power_of_two(int exponent) { return float_of(static_cast<uint32_t>(exponent + 127) << 23); }

// A float as an integer below 2^24 and the exponent of its significand, which no number has below `lowest`.
struct Parts {
  int64_t significand;
  int exponent;
};
inline Parts parts_of(float value, int lowest) {
  const uint32_t magnitude = bits_of(value) & 0x7fffffffu;
  const int field = static_cast<int>(magnitude >> 23);
  Parts parts = {static_cast<int64_t>(field ? (magnitude & 0x7fffffu) | 0x800000u : magnitude), field ? field - 127 : -126};
  if (parts.exponent < lowest) {
    parts.significand = parts.exponent < lowest - 63 ? 0 : parts.significand >> (lowest - parts.exponent);  // exact
    parts.exponent = lowest;
  }
  if (value < 0) parts.significand = -parts.significand;
  return parts;
}

// `significand * 2^exponent` as what the sum becomes, widened to a float.
template <class Target>
inline float rounded(int64_t significand, int exponent) {
  if (significand == 0) return 0.0f;
  const uint64_t magnitude = static_cast<uint64_t>(significand < 0 ? -significand : significand);
  const int leading = 63 - __builtin_clzll(magnitude) + exponent;  // the exponent of the sum
  const int unit = (leading < Target::lowest ? Target::lowest : leading) - Target::mantissa_bits;
  const int drop = unit - exponent;
  uint64_t units = drop >= 64 ? 0 : drop > 0 ? magnitude >> drop : magnitude << -drop;
  if (Target::mantissa_bits == 10 && drop > 0 && drop <= 64) {  // to the nearest, ties to even
    const uint64_t rest = drop == 64 ? magnitude : magnitude & ((1ull << drop) - 1), half = 1ull << (drop - 1);
    units += rest > half || (rest == half && (units & 1));
  }
  const double value = static_cast<double>(units) * __builtin_ldexp(1.0, unit);  // exact
  const float result = value > (Target::mantissa_bits == 10 ? 65504.0 : 0x1.fffffep127) ? __builtin_inff() : static_cast<float>(value);
  return significand < 0 && units != 0 ? -result : result;
}

inline bool is_finite(float value) { return (bits_of(value) & 0x7f800000u) != 0x7f800000u; }

// What infinities and NaN among the terms make of the sum.
template <class Target>
inline float spread(float d, const float* a, const float* b, int stride, int count) {
  float sum = is_finite(d) ? 0.0f : d;
  for (int k = 0; k < count; ++k)
    if (!is_finite(a[k]) || !is_finite(b[k * stride])) sum += a[k] * b[k * stride];
  return sum != sum ? float_of(Target::nan) : sum;
}

// d after a block of `count` products, whatever they are. b has its elements `stride` apart.
template <class Type, class Target>
inline float add_any(float d, const float* a, const float* b, int stride, int count) {
  bool finite = is_finite(d);
  Parts terms[block_bytes / 2 + 1];
  terms[0] = parts_of(d, Target::lowest);
  terms[0].significand *= 1 << (fraction_bits - 23);
  for (int k = 0; k < count; ++k) {
    finite = finite && is_finite(a[k]) && is_finite(b[k * stride]);
    const Parts x = parts_of(a[k], Type::lowest), y = parts_of(b[k * stride], Type::lowest);
    // Of 11 significant bits each, so that 20 are behind the point.
    terms[k + 1] = {(x.significand >> 13) * (y.significand >> 13) * (1 << (fraction_bits - 20)), x.exponent + y.exponent};
  }
  if (!finite) return spread<Target>(d, a, b, stride, count);
  int largest = Target::floor;
  for (int k = 0; k <= count; ++k)
    if (terms[k].significand != 0 && terms[k].exponent > largest) largest = terms[k].exponent;
  int64_t total = 0;
  for (int k = 0; k <= count; ++k) {
    const int shift = largest - terms[k].exponent;
    total += shift > 40 || shift < 0 ? 0 : terms[k].significand / (1ll << shift);  // a zero may have the largest exponent
  }
  return rounded<Target>(total, largest - fraction_bits);
}

// A row of 8 elements of d, and what belongs to them.
typedef float Row __attribute__((vector_size(32)));
typedef int RowOfInts __attribute__((vector_size(32)));
typedef uint32_t RowOfWords __attribute__((vector_size(32)));
typedef double HalfRow __attribute__((vector_size(32)));
typedef int64_t HalfRowOfBits __attribute__((vector_size(32)));
typedef int HalfRowOfInts __attribute__((vector_size(16)));
typedef float HalfRowOfFloats __attribute__((vector_size(16)));

template <class To, class From>
CUKILN_INLINE To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bits of another number");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// The power of two of a float's significand, that of a subnormal number of `Kind` included; 0 of 0.
template <class Kind>
CUKILN_INLINE void powers_of(const float* from, float* to, int count) {
  const uint32_t lowest = static_cast<uint32_t>(Kind::lowest + 127) << 23;
  for (int i = 0; i < count; ++i) {
    const uint32_t power = bits_of(from[i]) & 0x7f800000u;
    to[i] = float_of(power == 0 ? 0 : power > lowest ? power : lowest);
  }
}

// Whether all are 0 or of an exponent from `least` to `most`.
CUKILN_INLINE bool regular(const float* numbers, int count, int least, int most) {
  const uint32_t low = static_cast<uint32_t>(least + 127) << 23, range = static_cast<uint32_t>(most - least + 1) << 23;
  uint32_t outside = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t magnitude = bits_of(numbers[i]) & 0x7fffffffu;
    outside |= (magnitude - low >= range) & (magnitude != 0);
  }
  return outside == 0;
}

// `products + start` units of `unit`, rounded: exact as doubles, then cut to the bits of a float. For halves the last of
// those bits says whether anything was cut, so that rounding it once more is right.
template <class Target>
CUKILN_INLINE void store_sums(const int* products, const int* start, const float* unit, float* d) {
  for (int half = 0; half < 8; half += 4) {
    HalfRowOfInts of_products, of_start;
    HalfRowOfFloats units;
    memcpy(&of_products, products + half, 16);
    memcpy(&of_start, start + half, 16);
    memcpy(&units, unit + half, 16);
    const HalfRow sum = (__builtin_convertvector(of_products, HalfRow) + __builtin_convertvector(of_start, HalfRow)) *
                        __builtin_convertvector(units, HalfRow);
    HalfRowOfBits bits = same_bits<HalfRowOfBits>(sum);
    const HalfRowOfBits cut = bits & 0x1fffffff;
    bits -= cut;
    if (Target::mantissa_bits == 10) bits |= (cut != 0) & 0x20000000;
    const HalfRowOfFloats result = __builtin_convertvector(same_bits<HalfRow>(bits), HalfRowOfFloats);
    memcpy(d + half, &result, 16);
  }
}

// Rows of d after a block of L products of regular numbers: `x` and `y` are the powers of two of a and b, `z` of d. All
// products are exact in fp32, their alignment a multiplication, and the conversion to an integer truncates.
template <class Target, int L, int K>
CUKILN_INLINE void add_regular(float* d, const float* z, const float* a, const float* x, const float (*b)[8], const float (*y)[8]) {
  const Row lowest = Row{} + power_of_two(Target::floor < -100 ? -100 : Target::floor);
  Row largest, row, sums;
  memcpy(&largest, z, sizeof(Row));
  largest = largest > lowest ? largest : lowest;
  for (int k = 0; k < L; ++k) {
    memcpy(&row, y[k], sizeof(Row));
    row = x[k] * row;
    largest = row > largest ? row : largest;
  }
  // 2^(fraction_bits - exponent) and its inverse, by their exponents' fields.
  const RowOfWords field = same_bits<RowOfWords>(largest);
  const Row scale = same_bits<Row>(((254u + fraction_bits) << 23) - field), unit = same_bits<Row>(field - (uint32_t{fraction_bits} << 23));
  memcpy(&sums, d, sizeof(Row));
  const RowOfInts start = __builtin_convertvector(sums * scale, RowOfInts);
  RowOfInts products = {};  // 16 of less than 2^27 with F of 25: apart from d, with which they could overflow
  for (int k = 0; k < L; ++k) {
    memcpy(&row, b[k], sizeof(Row));
    products += __builtin_convertvector(a[k] * row * scale, RowOfInts);
  }
  int of_products[8], of_start[8];
  float units[8];
  memcpy(of_products, &products, sizeof(Row));
  memcpy(of_start, &start, sizeof(Row));
  memcpy(units, &unit, sizeof(Row));
  store_sums<Target>(of_products, of_start, units, d);
}

// d += a * b as tensor cores add, for numbers of `Type` that were widened to floats; halves in d widened, too.
template <class Type, class Target, int K>
void add_products(float (&d)[16][8], const float (&a)[16][K], const float (&b)[K][8]) {
  constexpr int L = block_bytes / Type::bytes < K ? block_bytes / Type::bytes : K;
  const bool plain = regular(a[0], 16 * K, Type::least, Type::most) && regular(b[0], K * 8, Type::least, Type::most);
  float x[16][K], y[K][8], z[16][8];
  if (plain) {
    powers_of<Type>(a[0], x[0], 16 * K);
    powers_of<Type>(b[0], y[0], K * 8);
  }
  for (int block = 0; block < K; block += L) {
    if (plain && regular(d[0], 16 * 8, -100, 100)) {
      powers_of<Target>(d[0], z[0], 16 * 8);
      for (int i = 0; i < 16; ++i) add_regular<Target, L, K>(d[i], z[i], a[i] + block, x[i] + block, b + block, y + block);
      if (Target::mantissa_bits == 10)
        for (auto& row : d)
          for (float& sum : row) sum = round_to_half(sum) + 0.0f;  // what rounds to a zero is +0
    } else {
      for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 8; ++j) d[i][j] = add_any<Type, Target>(d[i][j], a[i] + block, &b[block][j], 8, L);
    }
  }
}

}  // namespace cpu
}  // namespace cukiln
