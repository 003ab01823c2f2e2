// The filters as an operand of a phase: what the product takes as a matrix with a row or a column for each tap lies in w tap
// by tap, and a phase has only some of them. Both operands come element by element or vector by vector (conv/gather.cuh).
#pragma once

namespace cukiln {
namespace conv2d_dgrad {

#if defined(CUKILN_DEVICE)

using Share = gemm::Share;
using Tile = gemm::Tile;

// With channels last, as B: a row for each tap, along which vectors are of channels of dx. All vectors of a thread are of the
// same channels; after those of a step the next one begins.
template <class C>
struct RowsOfTaps {
  using T = typename C::Input;
  using V = gemm::Vectors<C, C::tile_k, C::tile_n, C::align_b>;
  static constexpr int tile_outer = C::tile_n, align = C::align_b;
  static constexpr bool gathered = true, along_k = false;
  static_assert(V::whole_rows && (V::even || V::per_thread == 1), "a thread's vectors of the filters must be of the same channels");

  const Phase<C>& phase;
  const T* first;
  int left;  // channels from the tile's first
  Taps at;

  __device__ __forceinline__ RowsOfTaps(const Phase<C>& given, const Tile& tile, const Share& share)
      : phase(given), left(given.n - tile.column * C::tile_n), at(conv::taps_of(given, share.first + V::row(0))) {
    const int channel = tile.column * C::tile_n + V::column(0);
    first = static_cast<const T*>(given.b) + tile.matrix * given.stride_b + given.last_weight + channel;
  }

  __device__ __forceinline__ const T* address(int) const { return first + phase.weight_of(at); }
  __device__ __forceinline__ bool wanted(int i, int k_left) const {
    const bool channel_exists = in_bounds(V::column(i), left);  // bounds: filters channel of a row
    const bool tap_exists = in_bounds(V::row(i), k_left);  // bounds: filters tap of a row
    return channel_exists && tap_exists;
  }
  __device__ __forceinline__ void next_vector() { conv::count(at, phase.weight_step, phase); }
  __device__ __forceinline__ void next_step() {}
};

// With channels first, as A: a column for each tap, one element at a time. All of a thread are of one tap.
template <class C>
struct ColumnsOfTaps {
  using T = typename C::Input;
  using V = gemm::Vectors<C, C::tile_m, C::tile_k, 1>;
  static constexpr int tile_outer = C::tile_m, align = 1;
  static constexpr bool gathered = true, along_k = true;
  static_assert(V::whole_rows, "a thread's elements of the filters must be of one tap");

  const Phase<C>& phase;
  const T* first;
  int left;  // channels from the tile's first
  Taps at;

  __device__ __forceinline__ ColumnsOfTaps(const Phase<C>& given, const Tile& tile, const Share& share)
      : phase(given), left(given.m - tile.row * C::tile_m), at(conv::taps_of(given, share.first + V::column(0))) {
    const int channel = tile.row * C::tile_m + V::row(0);
    first = static_cast<const T*>(given.a) + given.group_of(tile.matrix) * given.stride_a + given.last_weight +
        channel * given.weight_channel;
  }

  __device__ __forceinline__ const T* address(int i) const {
    return first + (phase.weight_of(at) + i * V::rows_at_once * phase.weight_channel);
  }
  __device__ __forceinline__ bool wanted(int i, int k_left) const {
    const bool channel_exists = in_bounds(V::row(i), left);  // bounds: filters channel of a column
    const bool tap_exists = in_bounds(V::column(i), k_left);  // bounds: filters tap of a column
    return channel_exists && tap_exists;
  }
  __device__ __forceinline__ void next_vector() {}
  __device__ __forceinline__ void next_step() { conv::count(at, phase.weight_step, phase); }
};

template <class C>
using OperandA = typename conv::Choose<C::channels_last, conv::RowsOfPixels<C, Phase<C>>, ColumnsOfTaps<C>>::type;
template <class C>
using OperandB = typename conv::Choose<C::channels_last, RowsOfTaps<C>, conv::ColumnsOfPixels<C, Phase<C>>>::type;

namespace simt {
template <class C> using Feed = conv::simt::Feed<C, OperandA<C>, OperandB<C>, true>;
}
namespace tensor {
template <class C> using Feed = conv::tensor::Feed<C, OperandA<C>, OperandB<C>, true>;
}

#endif  // CUKILN_DEVICE

}  // namespace conv2d_dgrad
}  // namespace cukiln
