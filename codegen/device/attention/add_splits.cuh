// Splits of the keys: what some of them have left of a row in the workspace, brought together.
#pragma once

namespace cukiln {
namespace attention {

enum { merge_threads = 256 };  // of a block of `merge`

#if defined(CUKILN_DEVICE)

__device__ __forceinline__ float infinity() { return __builtin_huge_valf(); }

// The sums of a row from `column` on, of all splits, are brought to the greatest score of any of them and added in the order
// of the splits. The workspace has of each split `rows` rows of `pitch` sums; behind all of them of each two floats, its
// greatest and its total. A split in which a row sees no key has a greatest of -infinity and adds zeros.
template <class Arguments, int width>
__device__ __forceinline__ void add_splits(const Arguments& arguments, int64_t rows, int pitch, int64_t row, int column, float& greatest,
                                           float& total, float (&sums)[width]) {
  constexpr int part = width < 4 ? width : 4;
  const float* const weights = arguments.workspace + arguments.splits * rows * pitch + 2 * row;
  greatest = -infinity();
#pragma unroll 4
  for (int split = 0; split < arguments.splits; ++split) {
    const float own = load_global<1>(weights + 2 * split * rows).data[0];
    greatest = maximum(greatest, own);
  }
  const float subtracted = greatest == -infinity() ? 0.0f : greatest;  // where no split sees a key

  const float* const partial = arguments.workspace + row * pitch + column;
  total = 0.0f;
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
}

#endif  // CUKILN_DEVICE

}  // namespace attention
}  // namespace cukiln
