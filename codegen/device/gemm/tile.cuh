// What every kernel shares that computes sums of products over k in tiles: the order of its tiles, its share of k, which
// vectors a thread moves, and the way out of a sum.
//
//   out[m, n] = epilogue(sum over k of A[m, k] * B[k, n])
//
// `Arguments` is an operator's own struct. Beside what its feed reads it has: batch, m, n, k; out; workspace; raster
// (order of the tiles: 0 row by row, 1 column by column, g > 1 in bands of g rows); slices (of k, each with at least one
// step; 1 where nothing is split); stream_blocks (that share all steps of all tiles; used by stream-K alone); epilogue;
// and `position(matrix, row, column)`, where an output lies. out shares no element with anything read: inputs come
// through the read-only cache. The workspace holds accumulators: slices (1 where they are added atomically) x batch x m x
// workspace_pitch(n); of stream-K two tiles for each block.
#pragma once

namespace cukiln {

#if defined(CUKILN_DEVICE)

__device__ __forceinline__ constexpr bool in_bounds(int64_t index, int64_t extent) { return index < extent; }
__device__ __forceinline__ constexpr bool in_bounds(int index, int extent) { return index < extent; }

#endif  // CUKILN_DEVICE

namespace gemm {

// How k is divided among blocks (Config::split). Slices write partial sums to the workspace, or add to it atomically;
// `reduce` then adds the slices in order, applies the epilogue and writes the output. Stream-K gives every block the same
// number of steps of all tiles in a row, so that no block idles in the last wave: only tiles that lie in several blocks
// go through the workspace (Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix
// Multiplication on the GPU", PPoPP 2023).
enum { split_none = 0, split_workspace = 1, split_atomic = 2, split_stream = 3 };

// Accumulators from one row of partial sums to the next: a whole number of 16-byte vectors.
#if defined(CUKILN_DEVICE)
__device__ __forceinline__
#endif
constexpr int64_t workspace_pitch(int64_t n) { return (n + 3) / 4 * 4; }

#if defined(CUKILN_DEVICE)

__device__ __forceinline__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// A tile of the output: its place in tiles, and which matrix of the batch it belongs to. `slot`: of stream-K, the tile of
// the workspace that takes the sums; -1 where they are whole.
struct Tile {
  int row, column, matrix, slot;
};

// Blocks that run together should share rows of A and columns of B in L2: bands of `raster` tile rows do that.
template <class C, class Arguments>
__device__ __forceinline__ Tile tile_at(const Arguments& arguments, int place) {
  const int tiles_m = (arguments.m - 1) / C::tile_m + 1;
  const int tiles_n = (arguments.n - 1) / C::tile_n + 1;
  const int per_matrix = tiles_m * tiles_n;
  const int matrix = place / per_matrix;
  const int index = place - matrix * per_matrix;
  if (arguments.raster == 0) return Tile{index / tiles_n, index % tiles_n, matrix, -1};
  const int band_rows = arguments.raster == 1 ? tiles_m : arguments.raster;
  const int band = index / (band_rows * tiles_n);
  const int rows = smaller(band_rows, tiles_m - band * band_rows);
  const int in_band = index - band * band_rows * tiles_n;
  return Tile{band * band_rows + in_band % rows, in_band / rows, matrix, -1};
}

// A block's share of k: elements [first, end), whole steps of tile_k but for the last one of all.
struct Share {
  int first, end;
};

// Slices differ by one step at most, and none is empty. blockIdx.y counts them.
template <class C, class Arguments>
__device__ __forceinline__ Share share_of_block(const Arguments& arguments, int k) {
  if constexpr (C::split == split_none) return Share{0, k};
  const int64_t steps = (k - 1) / C::tile_k + 1, slice = blockIdx.y;
  const int first = static_cast<int>(slice * steps / arguments.slices);
  const int end = static_cast<int>((slice + 1) * steps / arguments.slices);
  return Share{first * C::tile_k, slice + 1 == arguments.slices ? k : end * C::tile_k};
}

// Which vectors of an operand's tile a thread moves: whole rows of the block's threads one after the other, where the
// row length divides the number of threads; then all vectors of a thread lie in one column, rows a constant apart.
template <class C, int rows, int columns, int align>
struct Vectors {
  static constexpr int per_row = columns / align, count = rows * per_row;
  static constexpr int per_thread = (count + C::threads - 1) / C::threads;
  static constexpr bool even = count % C::threads == 0;
  static constexpr bool whole_rows = C::threads % per_row == 0;
  static constexpr int rows_at_once = whole_rows ? C::threads / per_row : 0;
  static_assert(columns % align == 0, "a tile row must be a whole number of vectors");

  static __device__ __forceinline__ int index(int i) { return static_cast<int>(threadIdx.x) + i * C::threads; }
  static __device__ __forceinline__ int row(int i) {
    return whole_rows ? static_cast<int>(threadIdx.x) / per_row + i * rows_at_once : index(i) / per_row;
  }
  static __device__ __forceinline__ int column(int i) {
    return (whole_rows ? static_cast<int>(threadIdx.x) : index(i)) % per_row * align;
  }
  // One base and a step that is the same for all threads, not an address per vector, which nvcc would keep in registers
  // (fp32, level 0 of a 1024^3 problem with nvcc 13.2 for sm_90a: 241 registers instead of 168).
  template <class T>
  static __device__ __forceinline__ const T* address(const T* source, int64_t pitch, int i) {
    if constexpr (whole_rows) return source + row(0) * pitch + column(0) + i * rows_at_once * pitch;
    return source + row(i) * pitch + column(i);
  }
};

// Applies the epilogue to `width` sums of a row and writes them. An int32 output of int8 takes its sums as they are.
template <class C, int width, class Arguments>
__device__ __forceinline__ void write_output(const Arguments& arguments, int matrix, int row, int column,
                                             const Vector<typename C::Accumulator, width>& sums) {
  using Output = typename C::Output;
  const Position at = arguments.position(matrix, row, column);
  Output* const out = static_cast<Output*>(arguments.out) + at.offset;
  if constexpr (over_ring<C>) {
    Vector<Number<C>, width> shifted;
#pragma unroll
    for (int i = 0; i < width; ++i)
      shifted.data[i] = Number<C>(C::truncate == truncate_once ? truncated<C>(sums.data[i]) : sums.data[i]);
    C::Epilogue::apply(shifted, at, arguments.epilogue);
    Vector<Output, width> stored;
#pragma unroll
    for (int i = 0; i < width; ++i) stored.data[i] = shifted.data[i].value;
    store_global<width>(out, stored);
  } else if constexpr (is_same<Output, int>) {
    store_global<width>(out, sums);
  } else {
    Vector<float, width> value;
#pragma unroll
    for (int i = 0; i < width; ++i) value.data[i] = to_float(sums.data[i]);
    C::Epilogue::apply(value, at, arguments.epilogue);
    Vector<Output, width> rounded;
#pragma unroll
    for (int i = 0; i < width; ++i) rounded.data[i] = from_float<Output>(value.data[i]);
    store_global<width>(out, rounded);
  }
}

// Hands on `width` sums of a row: to the output, or to the workspace where other blocks hold the rest of them.
template <class C, int width, class Arguments>
__device__ __forceinline__ void hand_on(const Arguments& arguments, int matrix, int row, int column,
                                        const Vector<typename C::Accumulator, width>& sums) {
  if constexpr (C::split == split_none || C::split == split_stream) {
    write_output<C, width>(arguments, matrix, row, column, sums);
  } else {
    const int64_t rows = int64_t(arguments.batch) * arguments.m;
    const int64_t slice = C::split == split_atomic ? 0 : blockIdx.y;
    typename C::Accumulator* const partial = static_cast<typename C::Accumulator*>(arguments.workspace) +
        (slice * rows + int64_t(matrix) * arguments.m + row) * workspace_pitch(arguments.n) + column;
    if constexpr (C::split == split_atomic) {
#pragma unroll
      for (int i = 0; i < width; ++i) atomic_add(partial + i, sums.data[i]);
    } else {
      store_global<width>(partial, sums);
    }
  }
}

// The steps of all tiles in a row, divided evenly among the blocks of stream-K.
struct Stream {
  int64_t tiles, total;
  int steps, blocks;

  // Of a block; `blocks` gives the end of the last one.
  __device__ __forceinline__ int64_t first_step(int block) const { return total / blocks * block + total % blocks * block / blocks; }
  // The block that a step belongs to: the last one whose first step is not behind it.
  __device__ __forceinline__ int block_of(int64_t step) const { return static_cast<int>(((step + 1) * blocks - 1) / total); }
};

template <class C, class Arguments>
__device__ __forceinline__ Stream stream_of(const Arguments& arguments, int k) {
  const int64_t per_matrix = int64_t((arguments.m - 1) / C::tile_m + 1) * ((arguments.n - 1) / C::tile_n + 1);
  const int64_t tiles = arguments.batch * per_matrix;
  const int steps = (k - 1) / C::tile_k + 1;
  return Stream{tiles, tiles * steps, steps, arguments.stream_blocks};
}

// A tile of the workspace of stream-K.
template <class C, class Arguments>
__device__ __forceinline__ typename C::Accumulator* slot_at(const Arguments& arguments, int slot) {
  return static_cast<typename C::Accumulator*>(arguments.workspace) + int64_t(slot) * (C::tile_m * C::tile_n);
}

// `width` accumulators, in accesses of at most 16 bytes.
template <int width, class T>
__device__ __forceinline__ Vector<T, width> load_partial(const T* source) {
  constexpr int part = width < 4 ? width : 4;
  Vector<T, width> value;
#pragma unroll
  for (int i = 0; i < width; i += part) {
    const Vector<T, part> loaded = load_global<part>(source + i);
#pragma unroll
    for (int j = 0; j < part; ++j) value.data[i + j] = loaded.data[j];
  }
  return value;
}

template <int width, class T>
__device__ __forceinline__ void add_partial(Vector<T, width>& sums, const T* source) {
  const Vector<T, width> more = load_partial<width>(source);
#pragma unroll
  for (int i = 0; i < width; ++i) sums.data[i] = plus(sums.data[i], more.data[i]);
}

template <int width, class T>
__device__ __forceinline__ void store_partial(T* target, const Vector<T, width>& value) {
  constexpr int part = width < 4 ? width : 4;
#pragma unroll
  for (int i = 0; i < width; i += part) {
    Vector<T, part> stored;
#pragma unroll
    for (int j = 0; j < part; ++j) stored.data[j] = value.data[i + j];
    store_global<part>(target + i, stored);
  }
}

#endif  // CUKILN_DEVICE

}  // namespace gemm
}  // namespace cukiln
