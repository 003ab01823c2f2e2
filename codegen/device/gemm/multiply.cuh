// One block's share of a product, by the way of computing it that a Config has chosen.
#pragma once

namespace cukiln {
namespace gemm {

#if defined(CUKILN_DEVICE)

// Tiles come as the feed of the chosen way brings them in.
template <class C, class TensorFeed, class SimtFeed, class Arguments>
__device__ __forceinline__ void multiply(const Arguments& arguments) {
  if constexpr (C::tensor_cores) {
    tensor::run<C, TensorFeed>(arguments);
  } else {
    simt::run<C, SimtFeed>(arguments);
  }
}

// Of stored matrices.
template <class C, class Arguments>
__device__ __forceinline__ void multiply_stored(const Arguments& arguments) {
  multiply<C, typename tensor::StoredFeed<C>::type, simt::Feed<C, Arguments>>(arguments);
}

#endif  // CUKILN_DEVICE

}  // namespace gemm
}  // namespace cukiln
