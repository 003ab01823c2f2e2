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

// Twice, for the CPU and in `asm`: faults 5 and 6 are wrong in the second alone, 7 is an opcode that nothing translates.
template <class C>
__device__ __forceinline__ float load(const float* place) {
#if defined(__CUDACC__)
  float value;
  if constexpr (C::fault == 5) {
    asm volatile("ld.global.f32 %0, [%1+4096];" : "=f"(value) : "l"(place));
    return value;
  }
  if constexpr (C::fault == 6) {
    asm volatile("ld.global.f32 %0, [%1]; add.f32 %0, %0, %0;" : "=f"(value) : "l"(place));
    return value;
  }
  if constexpr (C::fault == 7) {
    asm volatile("ld.volatile.global.f32 %0, [%1];" : "=f"(value) : "l"(place));
    return value;
  }
#endif
  return load_global<1>(place).data[0];
}

template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  const int index = index_of_thread<C>();
  if (index >= arguments.n) return;
  const float value = load<C>(arguments.in + index);
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
