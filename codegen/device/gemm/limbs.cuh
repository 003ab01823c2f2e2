// Products over Z/2^32 and Z/2^64 on tensor cores, whose integer operands are bytes.
//
// An element is its 4 or 8 bytes, the limbs: a = sum of a_p 256^p. With a b = sum over p and q of a_p b_q 256^(p + q), what
// counts modulo 2^32 (2^64) are the 10 of 16 (36 of 64) products of limbs with p + q below 4 (8). Those of one p + q are
// added up by mma.sync on unsigned bytes in a diagonal of its own, and sum = sum of diagonal_d 256^d.
//
// The diagonals are sums in int32, which wrap around. Of diagonal d the low 32 - 8 d (64 - 8 d) bits count. Modulo 2^32 and
// in diagonals 4 to 7 modulo 2^64 these are at most 32: what wraps around there is not part of the result. Diagonals 0 to 3
// modulo 2^64 must not wrap around as unsigned numbers. Diagonal 3 has the most products for each k, 4 of at most 255^2
// each: it holds a k of up to floor((2^32 - 1) / (4 * 255^2)) = 16,512 (unchained_k). Beyond that `carry` moves all but the
// low byte of each diagonal to the next one every chain_k elements of k: with c_d for what it moves out of diagonal d, that
// one holds at most (d + 1) 255^2 chain_k + 255 + c_(d - 1), and c_d is a 256th of it, rounded down; in diagonal 3 that is
// 4,273,996,032 for a chain_k of 16,384, the largest that the schedules have, below 2^32.
#pragma once

namespace cukiln {
namespace gemm {
namespace tensor {

// Rings between have their own number of limbs, n: of Winograd's products 5 and 9 (conv/winograd.cuh). Diagonals from n - 4 on
// may wrap around; of the others n - 5 fills first, with n - 4 products for each k.
#if defined(CUKILN_HOST)
constexpr int unchained_k(int limbs) { return limbs <= 4 ? 0 : static_cast<int>(4294967295u / ((limbs - 4) * 255u * 255u)); }
#endif

#if defined(CUKILN_DEVICE)

// How a warp reads limbs: a lane has four neighbouring elements along k of one row of A or column of B, whose bytes it turns,
// so that a register holds one limb of all four. That is where fragments of m16n8k32 have them (PTX ISA, "Matrix Fragments
// for mma.m16n8k32").
template <class SharedTile, int limbs, bool of_a>
struct LimbReader {
  using T = typename SharedTile::T;
  static constexpr int words_used = (limbs + 3) / 4;
  static constexpr int size = sizeof(T), per_chunk = chunk_bytes / size, line_bytes = 128;
  int offset;

  // `first`: the warp's first row of A, or column of B, in the tile.
  __device__ __forceinline__ explicit LimbReader(int first) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int outer = first + lane / 4, k = lane % 4 * 4;
    const int row = SharedTile::along_k ? outer : k, column = SharedTile::along_k ? k : outer;
    const int swizzled = column / per_chunk ^ SharedTile::swizzle(row);  // swizzle: limbs
    offset = SharedTile::at(row, swizzled) + column % per_chunk * size;
  }

  // What lies `near` and `far` bytes further in a row: beyond a line of banks by adding, which is free, within it by XOR.
  __device__ __forceinline__ int moved(int near, int far) const {
    return far % line_bytes == 0 ? (offset ^ near) + far : offset ^ near ^ far;
  }

  // Of the row (column) `outer` further, a multiple of 8, in half `half` of a k-step. `outer` and `half` only flip bits of
  // the swizzled chunk or add whole rows, as the k-step does.
  __device__ __forceinline__ void load(unsigned (&out)[limbs], const char* tile, int outer, int k_step, int half) const {
    unsigned words[size / 4][4];
    if constexpr (SharedTile::along_k) {
      const char* const rows = tile + outer * SharedTile::row_bytes + k_step * 32 * size;
#pragma unroll
      for (int i = 0; i < size / 4; ++i) {
        const char* const chunk = rows + moved(i * chunk_bytes, half * 16 * size);
        const Vector<unsigned, 4> loaded = load_shared<4>(reinterpret_cast<const unsigned*>(chunk));
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j % (size / 4)][(i * 4 + j) / (size / 4)] = loaded.data[j];
      }
    } else {
      const char* const column = tile + moved(0, outer * size);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const char* const element = column + (k_step * 32 + half * 16 + j) * SharedTile::row_bytes;
        const Vector<unsigned, size / 4> loaded = load_shared<size / 4>(reinterpret_cast<const unsigned*>(element));
#pragma unroll
        for (int w = 0; w < size / 4; ++w) words[w][j] = loaded.data[w];
      }
    }
#pragma unroll
    for (int w = 0; w < words_used; ++w) {
      transpose_bytes(words[w]);
#pragma unroll
      for (int limb = 0; limb < 4 && w * 4 + limb < limbs; ++limb) out[w * 4 + limb] = words[w][limb];
    }
  }

  // A fragment of each limb: 8 rows or columns and 16 of k after the other, rows (of A alone) first.
  template <int words>
  __device__ __forceinline__ void fragments(unsigned (&out)[limbs][words], const char* tile, int outer, int k_step) const {
    constexpr int groups = words / 2;
#pragma unroll
    for (int word = 0; word < words; ++word) {
      unsigned loaded[limbs];
      load(loaded, tile, outer + word % groups * 8, k_step, word / groups);
#pragma unroll
      for (int limb = 0; limb < limbs; ++limb) out[limb][word] = loaded[limb];
    }
  }
};

template <class C, class Feed>
struct WarpTile<C, Feed, true> {
  using T = typename C::Input;
  using Accumulator = typename C::Accumulator;
  using Unsigned = typename UnsignedOf<T>::type;
  static constexpr int rows = C::tile_m / C::warps_m, columns = C::tile_n / C::warps_n;
  static constexpr int pieces_m = rows / 16, pieces_n = columns / 16;
  static constexpr int k_steps = C::tile_k / 32, limbs = limbs_of<C>;
  static constexpr bool chained = C::chain_k > 0 && !truncates_tiles<C>();
  static_assert(C::threads == 32 * C::warps_m * C::warps_n && C::threads <= 1024, "threads is what the warps make it");
  static_assert(rows % 16 == 0 && columns % 16 == 0, "a warp computes pieces of 16 x 16");
  static_assert(rows * C::warps_m == C::tile_m && columns * C::warps_n == C::tile_n, "warps must cover the tile");
  static_assert(k_steps * 32 == C::tile_k, "tile_k must be whole k-steps");
  static_assert(C::fragments == 1 && C::mma_k == 32 && C::epilogue_path == epilogue_direct, "limbs have no other way");
  static_assert(C::chain_k % C::tile_k == 0, "carries come between tiles");
  static_assert(C::truncate != truncate_product, "a product is truncated where it is alone");

  int first_row, first_column;  // in the tile
  LimbReader<typename Feed::TileA, limbs, true> reader_a;
  LimbReader<typename Feed::TileB, limbs, false> reader_b;
  int diagonals[pieces_m][2 * pieces_n][limbs][4];
  Accumulator sums[pieces_m][2 * pieces_n][4];
  int since_carry;  // steps

  __device__ __forceinline__ WarpTile()
      : first_row(static_cast<int>(threadIdx.x) / 32 / C::warps_n * rows),
        first_column(static_cast<int>(threadIdx.x) / 32 % C::warps_n * columns),
        reader_a(first_row),
        reader_b(first_column),
        since_carry(0) {
    each_sum([&](int i, int j, int r) {
      sums[i][j][r] = 0;
#pragma unroll
      for (int d = 0; d < limbs; ++d) diagonals[i][j][d][r] = 0;
    });
  }

  // Adds the product of one stage's tiles.
  __device__ __forceinline__ void accumulate(const char* stage) {
#pragma unroll
    for (int k = 0; k < k_steps; ++k)
#pragma unroll
      for (int i = 0; i < pieces_m; ++i) {
        unsigned a[limbs][4];
        reader_a.fragments(a, stage, 16 * i, k);
        // Columns are read again for each 16 rows: those of all at a time would spill.
#pragma unroll
        for (int j = 0; j < 2 * pieces_n; ++j) {
          unsigned b[limbs][2];
          reader_b.fragments(b, stage + Feed::TileA::bytes, 8 * j, k);
          multiply(diagonals[i][j], a, b);
        }
      }
    if constexpr (truncates_tiles<C>()) add_up();
    if constexpr (chained) {
      if (++since_carry == C::chain_k / C::tile_k) {
        since_carry = 0;
        carry();
      }
    }
  }

  // The sums are whole.
  __device__ __forceinline__ void finish() {
    if constexpr (!truncates_tiles<C>()) add_up();
  }

 private:
  static __device__ __forceinline__ void multiply(int (&d)[limbs][4], const unsigned (&a)[limbs][4], const unsigned (&b)[limbs][2]) {
#pragma unroll
    for (int p = 0; p < limbs; ++p)
#pragma unroll
      for (int q = 0; q < limbs - p; ++q) mma_m16n8k32_u8(d[p + q], a[p], b[q]);
  }

  // Adds what the diagonals hold to the sums, truncated where tiles are, and begins anew.
  __device__ __forceinline__ void add_up() {
    each_sum([&](int i, int j, int r) {
      Unsigned sum = 0;
#pragma unroll
      for (int d = 0; d < limbs; ++d) {
        const Unsigned part = static_cast<Unsigned>(static_cast<unsigned>(diagonals[i][j][d][r]));
        sum += part << 8 * d;
        diagonals[i][j][d][r] = 0;
      }
      const Accumulator whole = static_cast<Accumulator>(sum);
      sums[i][j][r] = plus(sums[i][j][r], truncates_tiles<C>() ? truncated<C>(whole) : whole);
    });
  }

  __device__ __forceinline__ void carry() {
    each_sum([&](int i, int j, int r) {
#pragma unroll
      for (int d = 0; d + 1 < limbs; ++d) {
        const unsigned held = static_cast<unsigned>(diagonals[i][j][d][r]);
        diagonals[i][j][d][r] = static_cast<int>(held & 255u);
        diagonals[i][j][d + 1][r] = static_cast<int>(static_cast<unsigned>(diagonals[i][j][d + 1][r]) + (held >> 8));
      }
    });
  }

  template <class Function>
  static __device__ __forceinline__ void each_sum(Function function) {
#pragma unroll
    for (int i = 0; i < pieces_m; ++i)
#pragma unroll
      for (int j = 0; j < 2 * pieces_n; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) function(i, j, r);
  }
};

#endif  // CUKILN_DEVICE

}  // namespace tensor
}  // namespace gemm
}  // namespace cukiln
