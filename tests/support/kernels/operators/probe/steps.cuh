// A small operator for tests: out = in * scale in up to three launches, and faults on demand.
#pragma once

namespace cukiln {
namespace probe {

struct Arguments {
  const float* in;
  float* out;
  float* workspace;
  int n;
  float scale, factor;
  int slices;
};

#if defined(CUKILN_DEVICE)

template <class C>
__device__ __forceinline__ int index_of_thread() {
  return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

// Holds C::live values at once: they are read before a barrier and used after it.
template <class C>
__device__ __forceinline__ float hold(const Arguments& arguments, int index) {
  if constexpr (C::live > 0) {
    float held[C::live];
#pragma unroll
    for (int i = 0; i < C::live; ++i) held[i] = load_global<1>(arguments.in + (index + i * i) % arguments.n).data[0];
    __syncthreads();
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < C::live; ++i) most = most * held[i] + held[C::live - 1 - i];
    if (most == 1234.5f) return 1.0f;  // never, but nvcc cannot know
  }
  return 0.0f;
}

template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  const int index = index_of_thread<C>();
  if (index >= arguments.n) return;
  const float value = load_global<1>(arguments.in + index).data[0];
  store_global<1>(arguments.out + index, Vector<float, 1>{{value * arguments.scale}});
}

template <class C>
__device__ __forceinline__ void clear(const Arguments& arguments) {
  const int index = index_of_thread<C>();
  if (index < arguments.n) store_global<1>(arguments.workspace + index, Vector<float, 1>{{0.0f}});
}

#endif

}  // namespace probe
}  // namespace cukiln
