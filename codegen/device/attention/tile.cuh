// Tiles of Q, K, V and out in shared memory: how they are filled, and how warps read them as fragments of mma.sync m16n8k16.
#pragma once

namespace cukiln {
namespace attention {

#if defined(CUKILN_DEVICE)

constexpr int chunk_bytes = 16, per_chunk = 8;  // what ldmatrix reads per row: 8 elements of 2 bytes

template <class C> constexpr int threads_of = 32 * C::warps;

__device__ __forceinline__ constexpr bool in_bounds(int index, int extent) { return index < extent; }
__device__ __forceinline__ constexpr bool in_bounds(int64_t index, int64_t extent) { return index < extent; }

// Rows of `columns` elements without padding. XOR with bits of the row's number permutes the chunks of a row, within the
// largest power of two of them that divides a row: the 8 rows that ldmatrix reads at one chunk then lie in different banks.
template <class C, int columns_>
struct Tile {
  static constexpr int columns = columns_, chunks = columns / per_chunk, row_bytes = chunks * chunk_bytes;
  static constexpr int permuted = chunks % 8 == 0 ? 8 : chunks % 4 == 0 ? 4 : 2, mask = permuted - 1;
  static_assert(columns % 16 == 0, "a row is whole k-steps");

  static __device__ __forceinline__ constexpr int swizzle(int row) { return row / (8 / permuted) & mask; }
  // Byte offset of a chunk that has been swizzled.
  static __device__ __forceinline__ constexpr int at(int row, int swizzled) { return row * row_bytes + swizzled * chunk_bytes; }
};

// Stages of a ring of tiles.
__device__ __forceinline__ constexpr int next_of(int stage, int stages) { return stage + 1 == stages ? 0 : stage + 1; }
template <class Tile>
__device__ __forceinline__ char* stage_at(char* ring, int stage) {
  return ring + stage * Tile::bytes;
}

constexpr int common_divisor(int a, int b) { return b ? common_divisor(b, a % b) : a; }

// Copies rows of a matrix to a tile, C::align elements at a time. Rows and columns that do not exist become zeros. Of a row
// as many threads as divide it lie side by side, so that a thread's vectors lie whole rows and fixed columns apart.
template <class C, class Tile, int rows>
struct Copier {
  using T = typename C::Input;
  static constexpr int threads = threads_of<C>, bytes = C::align * static_cast<int>(sizeof(T));
  static constexpr int per_row = Tile::columns / C::align, beside = common_divisor(per_row, threads);
  static constexpr int rows_at_once = threads / beside, times = per_row / beside;
  static constexpr bool even = rows % rows_at_once == 0;

  // cp.async moves 4 bytes at least; a single element goes through a register.
  static __device__ __forceinline__ void copy(char* target, const T* source, bool exists) {
    if constexpr (bytes >= 4) {
      cp_async<bytes>(target, source, exists);
    } else {
      store_shared<1>(reinterpret_cast<T*>(target), exists ? load_global<1>(source) : Vector<T, 1>{});
    }
  }

  static __device__ __forceinline__ void start(char* tile, const T* source, int64_t pitch, int rows_left, int columns_left) {
    const int thread = static_cast<int>(threadIdx.x), first_row = thread / beside, first_column = thread % beside * C::align;
    const T* next = source + first_row * pitch + first_column;
#pragma unroll
    for (int i = 0; i < rows; i += rows_at_once, next += rows_at_once * pitch) {
      const int row = first_row + i;
      if (!even && !in_bounds(row, rows)) continue;  // bounds: row of a tile
      const bool row_exists = in_bounds(row, rows_left);  // bounds: copied row
      copy_row(tile, next, row, first_column, row_exists, columns_left);
    }
  }

  // Rows that lie anywhere: `places` have those of row `first`, which is the tile's first one, and behind it.
  template <class Places, class Strides>
  static __device__ __forceinline__ void start_apart(char* tile, const Places& places, const Strides& strides, int first, int rows_left,
                                                     int columns_left) {
    const int thread = static_cast<int>(threadIdx.x), first_row = thread / beside, first_column = thread % beside * C::align;
#pragma unroll
    for (int i = 0; i < rows; i += rows_at_once) {
      const int row = first_row + i;
      if (!even && !in_bounds(row, rows)) continue;  // bounds: row of a tile, apart
      const bool row_exists = in_bounds(row, rows_left);  // bounds: row apart
      const T* const source = row_exists ? places.row(strides, first + first_row, i) + first_column : places.base;
      copy_row(tile, source, row, first_column, row_exists, columns_left);
    }
  }

  static __device__ __forceinline__ void copy_row(char* tile, const T* source, int row, int first_column, bool row_exists, int columns_left) {
#pragma unroll
    for (int j = 0; j < times; ++j) {
      const int column = first_column + j * beside * C::align;
      const bool column_exists = in_bounds(column, columns_left);  // bounds: copied column
      const int swizzled = column / per_chunk ^ Tile::swizzle(row);  // swizzle: copy
      char* const target = tile + Tile::at(row, swizzled) + column % per_chunk * static_cast<int>(sizeof(T));
      copy(target, source + j * beside * C::align, row_exists && column_exists);
    }
  }
};

// A lane's place among the 16 x 16 elements that one ldmatrix.x4 brings a warp. What moves it flips bits of the swizzled
// chunk, or adds whole groups of chunks and whole rows.
template <class Tile>
struct Reader {
  int offset;

  __device__ __forceinline__ Reader(int row, int chunk) {
    const int swizzled = chunk ^ Tile::swizzle(row);  // swizzle: fragment
    offset = Tile::at(row, swizzled);
  }
  // `pair`: of 16 columns, `piece`: of 16 rows.
  __device__ __forceinline__ const char* at(const char* tile, int pair, int piece) const {
    const int flipped = 2 * pair & Tile::mask, added = 2 * pair & ~Tile::mask;
    return tile + (offset ^ flipped * chunk_bytes) + added * chunk_bytes + piece * 16 * Tile::row_bytes;
  }
};

// In which order the four 8 x 8 matrices of a ldmatrix.x4 lie: of Q down the rows first, as an mma's a has them; of K,
// whose rows are columns of b, along the row first; of V, whose rows run along k of b, down the rows first.
__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
template <class Tile>
__device__ __forceinline__ Reader<Tile> down_first(int first_row) {
  return Reader<Tile>(first_row + lane() % 16, lane() / 16);
}
template <class Tile>
__device__ __forceinline__ Reader<Tile> along_first() {
  return Reader<Tile>(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
}

template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  if constexpr (is_same<T, Half>) {
    mma_m16n8k16_f16(d, a, b);
  } else {
    mma_m16n8k16_bf16(d, a, b);
  }
}

// Adds the products of 16 x 16 elements of a and of b, which comes as ldmatrix brings it, to 16 x 16 sums.
template <class T>
__device__ __forceinline__ void multiply_square(float (&left)[4], float (&right)[4], const unsigned (&a)[4], const unsigned (&b)[4]) {
  const unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
  multiply<T>(left, a, first);
  multiply<T>(right, a, second);
}

#endif  // CUKILN_DEVICE

}  // namespace attention
}  // namespace cukiln
