// An epilogue in launches of its own, as a framework without fusion runs it: `run` ends with the sums, then a launch for each
// node reads them and writes them back. Between launches they are in fp32, as in registers of the fused kernel: in out where
// that holds fp32, else in the workspace, from where the last node writes out.
#pragma once

namespace cukiln {
namespace conv2d {
namespace separate {

// What `run` computes.
template <class C>
struct Sums : C {
  using Output = typename C::Accumulator;
  using Epilogue = Chain<>;
};

template <class C, bool is_separate = C::separate>
struct RunOf {
  using type = C;
};

template <class C>
struct RunOf<C, true> {
  using type = Sums<C>;
};

// Whether out has no room for the sums.
template <class C>
constexpr bool in_workspace = sizeof(typename C::Output) != sizeof(typename C::Accumulator);

#if defined(CUKILN_DEVICE)

// One thread per vector of the output.
template <class C, int index>
__device__ __forceinline__ void node(const Arguments& arguments) {
  if constexpr (index < C::Epilogue::nodes) {
    using Output = typename C::Output;
    constexpr int width = C::align_c;
    const int64_t per_image = int64_t(arguments.out_height) * arguments.out_width;
    const int64_t outputs = arguments.images * per_image * arguments.filters;
    const int64_t first = (int64_t(blockIdx.x) * gemm::reduce_threads + threadIdx.x) * width;
    if (!in_bounds(first, outputs)) return;  // bounds: separate node
    const int filter = static_cast<int>((C::channels_last ? first : first / per_image) % arguments.filters);
    float* const sums = static_cast<float*>(arguments.out) + first;
    // Not load_global: this launch writes there, too.
    CUKILN_COUNT("load_global", 0, sizeof(Vector<float, width>));
    Vector<float, width> value = *reinterpret_cast<const Vector<float, width>*>(sums);
    C::Epilogue::template apply_node<index>(value, Position{filter, filter, first}, arguments.epilogue);
    if constexpr (index + 1 < C::Epilogue::nodes) {
      store_global<width>(sums, value);
    } else {
      Vector<Output, width> rounded;
#pragma unroll
      for (int i = 0; i < width; ++i) rounded.data[i] = from_float<Output>(value.data[i]);
      store_global<width>(static_cast<Output*>(arguments.result) + first, rounded);
    }
  }
}

#endif  // CUKILN_DEVICE

}  // namespace separate
}  // namespace conv2d
}  // namespace cukiln
