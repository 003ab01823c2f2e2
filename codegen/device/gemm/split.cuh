// The second half of split-K: adds the slices' partial sums in order, applies the epilogue, writes the output. Before
// slices that add atomically, `clear` makes the workspace zero.
#pragma once

namespace cukiln {
namespace gemm {

enum { reduce_threads = 256 };  // of a block of `reduce` or `clear`

#if defined(CUKILN_DEVICE)

// One thread per vector of every tile; those of tiles that one block computed alone have nothing to do.
template <class C, class Arguments>
__device__ __forceinline__ void reduce_stream(const Arguments& arguments) {
  using T = typename C::Accumulator;
  constexpr int width = C::align_c, per_row = C::tile_n / width, per_tile = C::tile_m * per_row;
  const Stream stream = stream_of<C>(arguments, arguments.k);
  const int64_t index = int64_t(blockIdx.x) * reduce_threads + threadIdx.x;
  if (!in_bounds(index, stream.tiles * per_tile)) return;  // bounds: reduce stream
  const int place = static_cast<int>(index / per_tile), vector = static_cast<int>(index - int64_t(place) * per_tile);
  const int64_t begin = int64_t(place) * stream.steps;
  const int first = stream.block_of(begin), last = stream.block_of(begin + stream.steps - 1);
  if (first == last) return;
  const Tile tile = tile_at<C>(arguments, place);
  const int row = vector / per_row, column = vector % per_row * width;
  const int out_row = tile.row * C::tile_m + row, out_column = tile.column * C::tile_n + column;
  const bool row_exists = in_bounds(out_row, arguments.m);  // bounds: reduce stream row
  const bool column_exists = in_bounds(out_column, arguments.n);  // bounds: reduce stream column
  if (!row_exists || !column_exists) return;
  const int offset = row * C::tile_n + column;
  // The first block has the tile's first steps as its last, all others have theirs as their first.
  Vector<T, width> sums = load_partial<width>(slot_at<C>(arguments, 2 * first + 1) + offset);
  for (int block = first + 1; block <= last; ++block) add_partial<width>(sums, slot_at<C>(arguments, 2 * block) + offset);
  write_output<C, width>(arguments, tile.matrix, out_row, out_column, sums);
}

// One thread per vector of the output.
template <class C, class Arguments>
__device__ __forceinline__ void reduce_slices(const Arguments& arguments) {
  using T = typename C::Accumulator;
  constexpr int width = C::align_c;
  const int64_t per_row = arguments.n / width, rows = int64_t(arguments.batch) * arguments.m;
  const int64_t index = int64_t(blockIdx.x) * reduce_threads + threadIdx.x;
  if (!in_bounds(index, rows * per_row)) return;  // bounds: reduce
  const int64_t row = index / per_row;
  const int column = static_cast<int>(index - row * per_row) * width;
  const int64_t pitch = workspace_pitch(arguments.n), slice_elements = rows * pitch;
  const T* partial = static_cast<const T*>(arguments.workspace) + row * pitch + column;
  Vector<T, width> sums = load_partial<width>(partial);
  const int slices = C::split == split_atomic ? 1 : arguments.slices;
#pragma unroll 4
  for (int slice = 1; slice < slices; ++slice) {
    partial += slice_elements;
    add_partial<width>(sums, partial);
  }
  const int matrix = static_cast<int>(row / arguments.m);
  write_output<C, width>(arguments, matrix, static_cast<int>(row - int64_t(matrix) * arguments.m), column, sums);
}

template <class C, class Arguments>
__device__ __forceinline__ void reduce(const Arguments& arguments) {
  if constexpr (C::split == split_stream) {
    reduce_stream<C>(arguments);
  } else {
    reduce_slices<C>(arguments);
  }
}

// One thread per 16 bytes of the workspace.
template <class C, class Arguments>
__device__ __forceinline__ void clear(const Arguments& arguments) {
  using T = typename C::Accumulator;
  const int64_t vectors = int64_t(arguments.batch) * arguments.m * workspace_pitch(arguments.n) / 4;
  const int64_t index = int64_t(blockIdx.x) * reduce_threads + threadIdx.x;
  if (!in_bounds(index, vectors)) return;  // bounds: clear
  store_global<4>(static_cast<T*>(arguments.workspace) + index * 4, Vector<T, 4>{{0, 0, 0, 0}});
}

#endif  // CUKILN_DEVICE

}  // namespace gemm
}  // namespace cukiln
