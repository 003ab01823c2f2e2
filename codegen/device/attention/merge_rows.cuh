// Splits of the keys: what they have left of each row in the workspace is brought together.
#pragma once

namespace cukiln {
namespace attention {

enum { merge_threads = 256 };  // of a block of `merge`

// Floats from one row of the workspace to the next: whole 16-byte vectors.
#if defined(CUKILN_DEVICE)
__device__ __forceinline__
#endif
constexpr int workspace_pitch(int head_dim) { return (head_dim + 3) / 4 * 4; }

#if defined(CUKILN_DEVICE)

__device__ __forceinline__ float infinity() { return __builtin_huge_valf(); }
__device__ __forceinline__ int entry(const int* table, int index) { return load_global<1>(table + index).data[0]; }

// One thread per vector of out. The sums of all splits are brought to the greatest score of any of them, added in the order
// of the splits, divided, and rounded once. A split in which a row sees no key has a greatest of -infinity and adds zeros.
template <class C, class Arguments>
__device__ __forceinline__ void merge(const Arguments& arguments) {
  using T = typename C::Input;
  constexpr int width = C::align_out, part = width < 4 ? width : 4;
  const int per_row = arguments.head_dim_vo / width, pitch = workspace_pitch(arguments.head_dim_vo);
  const int64_t rows = int64_t(C::ragged ? 1 : arguments.batch) * arguments.heads_q * arguments.seq_q;
  const int64_t index = int64_t(blockIdx.x) * merge_threads + threadIdx.x;
  if (!in_bounds(index, rows * per_row)) return;  // bounds: merge
  const int64_t row = index / per_row;
  const int column = static_cast<int>(index - row * per_row) * width;
  const int64_t head = row / arguments.seq_q, query = row - head * arguments.seq_q;
  if constexpr (C::ragged) {
    if (query >= entry(arguments.qo_indptr, arguments.batch)) return;  // of no sequence
  }

  const float* const weights = arguments.workspace + arguments.splits * rows * pitch + 2 * row;
  float greatest = -infinity();
#pragma unroll 4
  for (int split = 0; split < arguments.splits; ++split) {
    const float own = load_global<1>(weights + 2 * split * rows).data[0];
    greatest = maximum(greatest, own);
  }
  const float subtracted = greatest == -infinity() ? 0.0f : greatest;  // where no split sees a key

  const float* const partial = arguments.workspace + row * pitch + column;
  float total = 0.0f, sums[width];
#pragma unroll
  for (int i = 0; i < width; ++i) sums[i] = 0.0f;
#pragma unroll 4
  for (int split = 0; split < arguments.splits; ++split) {
    const Vector<float, 2> own = load_global<2>(weights + 2 * split * rows);
    const float bits = own.data[0] - subtracted;
    const float factor = cukiln::exp2(bits);
    total = cukiln::fma(factor, own.data[1], total);
#pragma unroll
    for (int i = 0; i < width; i += part) {
      const Vector<float, part> loaded = load_global<part>(partial + split * rows * pitch + i);
#pragma unroll
      for (int j = 0; j < part; ++j) sums[i + j] = cukiln::fma(factor, loaded.data[j], sums[i + j]);
    }
  }

  const float share = total == 0.0f ? 0.0f : 1.0f / total;  // of a query that sees nothing: zeros
  Vector<T, width> out;
#pragma unroll
  for (int i = 0; i < width; ++i) out.data[i] = from_float<T>(sums[i] * share);
  if constexpr (C::lse) {
    const float lse = greatest + cukiln::log2(total);  // -infinity where nothing is seen
    const int64_t at = C::ragged ? query * arguments.heads_q + head : row;
    if (column == 0) store_global<1>(arguments.lse + at, Vector<float, 1>{{lse}});
  }
  const int64_t batch = head / arguments.heads_q;
  T* const target = static_cast<T*>(arguments.out) + batch * arguments.of_out.batch +
      (head - batch * arguments.heads_q) * arguments.of_out.head + query * arguments.of_out.position;
  store_global<width>(target + column, out);
}

#endif  // CUKILN_DEVICE

}  // namespace attention
}  // namespace cukiln
