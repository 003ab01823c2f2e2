// ldmatrix and mma.sync of matrix.cuh in plain C++.
//
// Sums of floats round as tensor_sums.h says, those of bytes wrap around (modulo 2^32).
#pragma once

#include "tensor_sums.h"

namespace cukiln {
namespace cpu {

template <int N, bool transposed>
struct LoadMatrix {
  static constexpr const char* name = transposed ? "ldmatrix_trans" : "ldmatrix";
  struct Lane {
    const void* row;
    unsigned* out;
  };
  static void run(const Lanes<Lane>& lanes) {
    const void* rows[warp_size];
    for (int i = 0; i < warp_size; ++i) {
      rows[i] = lanes[i].row;
      // Of all lanes, also those whose row is not read: up to sm_75 they too must pass a valid address (PTX ISA, "ldmatrix").
      if (!fits<16>(rows[i], shared_bytes)) {
        as_lane(i);
        refuse_shared(Access::matrix_row, rows[i], 16, threads[current].line, threads[current].file);
      }
    }
    if (watching) watch_rows(rows, N * 8);
    unsigned short elements[N * 8][8];
    for (int i = 0; i < N * 8; ++i) memcpy(elements[i], rows[i], 16);
    for (int i = 0; i < warp_size; ++i) {
      const int group = i / 4, pair = i % 4 * 2;
      for (int m = 0; m < N; ++m) {
        const unsigned short(*const matrix)[8] = elements + m * 8;
        const unsigned low = transposed ? matrix[pair][group] : matrix[group][pair];
        const unsigned high = transposed ? matrix[pair + 1][group] : matrix[group][pair + 1];
        lanes[i].out[m] = low | high << 16;
      }
    }
  }
};

// The matrices of one warp's mma, 16 x K and K x 8, of elements as the registers hold them.
template <class Raw, int K>
struct Operands {
  static constexpr int per_word = 4 / static_cast<int>(sizeof(Raw));
  static constexpr int words_a = 16 * K / per_word / warp_size, words_b = K * 8 / per_word / warp_size;
  Raw a[16][K];
  Raw b[K][8];

  template <class Lane>
  CUKILN_INLINE void gather(const Lanes<Lane>& lanes) {
    for (int i = 0; i < warp_size; ++i) {
      const int group = i / 4, first = i % 4 * per_word;
      for (int r = 0; r < words_a; ++r) memcpy(&a[group + r % 2 * 8][first + r / 2 * 4 * per_word], &lanes[i].a[r], 4);
      for (int r = 0; r < words_b; ++r) {
        Raw word[per_word];
        memcpy(word, &lanes[i].b[r], 4);
        for (int e = 0; e < per_word; ++e) b[first + r * 4 * per_word + e][group] = word[e];
      }
    }
  }
};

template <int K>
CUKILN_INLINE void add_bytes(unsigned (&d)[16][8], const unsigned (&a)[16][K], const unsigned (&b)[K][8]) {
  // Vectors, because g++ keeps no row of plain arrays in a register throughout the loop over k; four rows at a time,
  // because additions to one of them wait for each other.
  typedef unsigned Row __attribute__((vector_size(32)));
  for (int i = 0; i < 16; i += 4) {
    Row d0, d1, d2, d3, row;
    memcpy(&d0, d[i], sizeof(Row));
    memcpy(&d1, d[i + 1], sizeof(Row));
    memcpy(&d2, d[i + 2], sizeof(Row));
    memcpy(&d3, d[i + 3], sizeof(Row));
    for (int k = 0; k < K; ++k) {
      memcpy(&row, b[k], sizeof(Row));
      d0 += a[i][k] * row;
      d1 += a[i + 1][k] * row;
      d2 += a[i + 2][k] * row;
      d3 += a[i + 3][k] * row;
    }
    memcpy(d[i], &d0, sizeof(Row));
    memcpy(d[i + 1], &d1, sizeof(Row));
    memcpy(d[i + 2], &d2, sizeof(Row));
    memcpy(d[i + 3], &d3, sizeof(Row));
  }
}

// Bytes as what they are multiplied in; tensor_sums.h has the floats.
struct SignedBytes {
  using Raw = signed char;
  using Sum = unsigned;  // wraps around
  static CUKILN_INLINE void widen(const Raw* from, Sum* to, int count) {
    for (int i = 0; i < count; ++i) to[i] = static_cast<unsigned>(static_cast<int>(from[i]));
  }
  template <int K>
  static CUKILN_INLINE void add(Sum (&d)[16][8], const Sum (&a)[16][K], const Sum (&b)[K][8]) {
    add_bytes<K>(d, a, b);
  }
};

struct UnsignedBytes {
  using Raw = unsigned char;
  using Sum = unsigned;  // wraps around
  static CUKILN_INLINE void widen(const Raw* from, Sum* to, int count) {
    for (int i = 0; i < count; ++i) to[i] = from[i];
  }
  template <int K>
  static CUKILN_INLINE void add(Sum (&d)[16][8], const Sum (&a)[16][K], const Sum (&b)[K][8]) {
    add_bytes<K>(d, a, b);
  }
};

template <class Type, int K>
struct Product {
  using Sum = typename Type::Sum;
  Sum a[16][K], b[K][8];

  template <class Lane>
  CUKILN_INLINE explicit Product(const Lanes<Lane>& lanes) {
    Operands<typename Type::Raw, K> raw;
    raw.gather(lanes);
    Type::widen(raw.a[0], a[0], 16 * K);
    Type::widen(raw.b[0], b[0], K * 8);
  }
};

// D is the type of the registers of d.
template <const char* primitive, class Type, class D, int K>
struct MultiplyAccumulate {
  static constexpr const char* name = primitive;
  struct Lane {
    D* d;
    const unsigned* a;
    const unsigned* b;
  };
  static void run(const Lanes<Lane>& lanes) {
    CUKILN_COUNT(name, 16 * 8 * K);
    using Sum = typename Type::Sum;
    const Product<Type, K> operands(lanes);
    Sum d[16][8];
    for (int i = 0; i < warp_size; ++i)
      for (int r = 0; r < 4; r += 2) memcpy(&d[i / 4 + r * 4][i % 4 * 2], &lanes[i].d[r], 8);
    Type::template add<K>(d, operands.a, operands.b);
    for (int i = 0; i < warp_size; ++i)
      for (int r = 0; r < 4; r += 2) memcpy(&lanes[i].d[r], &d[i / 4 + r * 4][i % 4 * 2], 8);
  }
};

// d in f16, two elements to a register.
struct MultiplyAccumulateHalf {
  static constexpr const char* name = "mma_m16n8k16_f16_f16";
  struct Lane {
    unsigned* d;
    const unsigned* a;
    const unsigned* b;
  };
  static void run(const Lanes<Lane>& lanes) {
    CUKILN_COUNT(name, 16 * 8 * 16);
    const Product<Halves, 16> operands(lanes);
    unsigned short d[16][8];
    float sums[16][8];
    for (int i = 0; i < warp_size; ++i)
      for (int r = 0; r < 2; ++r) memcpy(&d[i / 4 + r * 8][i % 4 * 2], &lanes[i].d[r], 4);
    Halves::widen(d[0], sums[0], 16 * 8);
    add_products<Halves, ToHalf, 16>(sums, operands.a, operands.b);
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 8; ++j) d[i][j] = FromFloat<Half>::convert(sums[i][j]).bits;
    for (int i = 0; i < warp_size; ++i)
      for (int r = 0; r < 2; ++r) memcpy(&lanes[i].d[r], &d[i / 4 + r * 8][i % 4 * 2], 4);
  }
};

inline constexpr char m16n8k16_f16[] = "mma_m16n8k16_f16";
inline constexpr char m16n8k16_bf16[] = "mma_m16n8k16_bf16";
inline constexpr char m16n8k8_f16[] = "mma_m16n8k8_f16";
inline constexpr char m16n8k8_tf32[] = "mma_m16n8k8_tf32";
inline constexpr char m16n8k32_s8[] = "mma_m16n8k32_s8";
inline constexpr char m16n8k32_u8[] = "mma_m16n8k32_u8";

template <const char* primitive, class Type, int K, class D>
CUKILN_INLINE void multiply_accumulate(D* d, const unsigned* a, const unsigned* b, int line, const char* file) {
  using Operation = MultiplyAccumulate<primitive, Type, D, K>;
  typename Operation::Lane lane = {d, a, b};
  collective<Operation>(lane, line, file);
}

}  // namespace cpu

template <int N>
CUKILN_INLINE void ldmatrix(unsigned (&out)[N], const void* row, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  typename cpu::LoadMatrix<N, false>::Lane lane = {row, out};
  cpu::collective<cpu::LoadMatrix<N, false>>(lane, line, file);
}
template <int N>
CUKILN_INLINE void ldmatrix_trans(unsigned (&out)[N], const void* row, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  typename cpu::LoadMatrix<N, true>::Lane lane = {row, out};
  cpu::collective<cpu::LoadMatrix<N, true>>(lane, line, file);
}

CUKILN_INLINE void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE(),
                                    const char* file = __builtin_FILE()) {
  cpu::multiply_accumulate<cpu::m16n8k16_f16, cpu::Halves, 16>(d, a, b, line, file);
}
CUKILN_INLINE void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE(),
                                     const char* file = __builtin_FILE()) {
  cpu::multiply_accumulate<cpu::m16n8k16_bf16, cpu::BFloats, 16>(d, a, b, line, file);
}
CUKILN_INLINE void mma_m16n8k16_f16_f16(unsigned (&d)[2], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE(),
                                        const char* file = __builtin_FILE()) {
  cpu::MultiplyAccumulateHalf::Lane lane = {d, a, b};
  cpu::collective<cpu::MultiplyAccumulateHalf>(lane, line, file);
}
CUKILN_INLINE void mma_m16n8k8_f16(float (&d)[4], const unsigned (&a)[2], unsigned b, int line = __builtin_LINE(),
                                   const char* file = __builtin_FILE()) {
  cpu::multiply_accumulate<cpu::m16n8k8_f16, cpu::Halves, 8>(d, a, &b, line, file);
}
CUKILN_INLINE void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE(),
                                    const char* file = __builtin_FILE()) {
  cpu::multiply_accumulate<cpu::m16n8k8_tf32, cpu::TensorFloats, 8>(d, a, b, line, file);
}
CUKILN_INLINE void mma_m16n8k32_s8(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE(),
                                   const char* file = __builtin_FILE()) {
  cpu::multiply_accumulate<cpu::m16n8k32_s8, cpu::SignedBytes, 32>(d, a, b, line, file);
}
CUKILN_INLINE void mma_m16n8k32_u8(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE(),
                                   const char* file = __builtin_FILE()) {
  cpu::multiply_accumulate<cpu::m16n8k32_u8, cpu::UnsignedBytes, 32>(d, a, b, line, file);
}

}  // namespace cukiln
