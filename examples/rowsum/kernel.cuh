// out[r] = sum over columns of in[r, c]. A block has 64 threads and 32 rows, which it reads in tiles of 32 columns: while
// it adds one tile up, cp.async brings the next one.
#pragma once

namespace cukiln {
namespace rowsum {

struct Arguments {
  const float* in;
  float* out;
  int rows, columns;
};

constexpr int threads = 64, tile_rows = 32, tile_columns = 32;

#if defined(CUKILN_DEVICE)

// Starts the copies of a tile: 16 bytes each, four by every thread. What lies outside of the matrix becomes zero.
template <class C>
__device__ __forceinline__ void start_tile(const Arguments& arguments, float* tile, int step) {
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < tile_rows * tile_columns / 4; i += threads) {
    const int row = i / (tile_columns / 4), column = i % (tile_columns / 4) * 4;
    const int from_row = static_cast<int>(blockIdx.x) * tile_rows + row, from_column = step * tile_columns + column;
    const bool exists = from_row < arguments.rows && from_column < arguments.columns;
    const int64_t from = exists ? int64_t(from_row) * arguments.columns + from_column : 0;
    cp_async<16>(tile + row * C::pitch + column, arguments.in + from, exists);
  }
}

// Two threads share a row: each adds half of its columns in every tile.
template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  float* const tiles = shared_memory<float>();
  const int row = static_cast<int>(threadIdx.x) / 2, half = static_cast<int>(threadIdx.x) % 2;
  const int steps = (arguments.columns - 1) / tile_columns + 1;
  float sum = 0.0f;
  start_tile<C>(arguments, tiles, 0);
  cp_async_commit();
  for (int step = 0; step < steps; ++step) {
    float* const tile = tiles + step % 2 * tile_rows * C::pitch;
    float* const next = tiles + (step + 1) % 2 * tile_rows * C::pitch;
    if (step + 1 < steps) start_tile<C>(arguments, next, step + 1);
    cp_async_commit();
    cp_async_wait<1>();  // this thread's copies of the tile have landed, all but those of the next one
    __syncthreads();     // and those of all other threads
#pragma unroll
    for (int column = 0; column < tile_columns / 2; column += 4) {
      const Vector<float, 4> four = load_shared<4>(tile + row * C::pitch + half * (tile_columns / 2) + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += four.data[i];
    }
    __syncthreads();  // all threads have read the tile before it is overwritten
  }
  sum += shuffle_xor(sum, 1);
  const int out_row = static_cast<int>(blockIdx.x) * tile_rows + row;
  if (half == 0 && out_row < arguments.rows) store_global<1>(arguments.out + out_row, Vector<float, 1>{{sum}});
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

// What a call of the library binds: pointers and extents in the order of `operands` and `extent_names`.
template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t*, const double*, void*) {
  return Arguments{static_cast<const float*>(pointers[0]), static_cast<float*>(pointers[1]),
                   static_cast<int>(extents[0]), static_cast<int>(extents[1])};
}

template <class C>
int64_t workspace_bytes(const int64_t*, const int32_t*) {
  return 0;
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  const uint32_t grid = static_cast<uint32_t>(ceil_div(arguments.rows, tile_rows));
  out[0] = Launch{0, {grid, 1, 1}, {threads, 1, 1}, 2 * tile_rows * C::pitch * sizeof(float)};
  return 1;
}

// Refuses tensors that the kernel would read or write wrongly.
template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  if (count != 2) CUKILN_REFUSE(complaint, "TypeError: %d tensors were given; this kernel takes 2: in, out", count);
  Matrix in;
  if (!check_pointer("in", tensors[0], ElementType::float32, tensors[0].device, 16, complaint)) return false;
  if (!check_pointer("out", tensors[1], ElementType::float32, tensors[0].device, 4, complaint)) return false;
  if (!read_matrix("in", tensors[0], 4, in, complaint)) return false;
  if (in.batch != 1 || in.pitch != in.columns) CUKILN_REFUSE(complaint, "ValueError: in must be a packed matrix");
  if (!check_vector("out", tensors[1], in.rows, complaint)) return false;
  const Matrix out = {1, 1, in.rows, in.rows, 0};
  if (!check_apart("in", tensors[0], in, 4, tensors[1], out, 4, complaint)) return false;
  extents[0] = in.rows;
  extents[1] = in.columns;
  return true;
}

#endif  // CUKILN_HOST

}  // namespace rowsum
}  // namespace cukiln
