// A small operator for tests: out = in * scale in two launches with a workspace between them, and faults on demand.
#pragma once

namespace cukiln {
namespace probe {

struct Arguments {
  const float* in;
  float* out;
  float* workspace;
  int n;
  float scale;
};

#if defined(CUKILN_DEVICE)

template <class C>
__device__ __forceinline__ void first(const Arguments& arguments) {
  static_assert(C::fault != 1, "fault 1: the front end refuses this kernel");
  if constexpr (C::fault == 2) asm volatile("no_such_instruction;");
  if constexpr (C::fault == 3) {
    __shared__ float too_much[100000];
    too_much[threadIdx.x] = arguments.in[threadIdx.x];
    __syncthreads();
    arguments.workspace[threadIdx.x] = too_much[threadIdx.x ^ 1];
  }
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index < arguments.n) arguments.workspace[index] = arguments.in[index] * static_cast<float>(C::factor);
}

template <class C>
__device__ __forceinline__ void second(const Arguments& arguments) {
  const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (index < arguments.n) arguments.out[index] = arguments.workspace[index] * arguments.scale;
}

#endif

#if defined(CUKILN_HOST)

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t*, const double* scalars, void* workspace) {
  static_assert(C::fault != 4, "fault 4: the host compiler refuses this kernel");
  return Arguments{static_cast<const float*>(pointers[0]), static_cast<float*>(pointers[1]),
                   static_cast<float*>(workspace), static_cast<int>(extents[0]), static_cast<float>(scalars[0])};
}

template <class C>
int64_t workspace_bytes(const int64_t* extents) {
  return 4 * extents[0];
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  const uint32_t grid = static_cast<uint32_t>(ceil_div(arguments.n, C::threads));
  out[0] = Launch{0, {grid, 1, 1}, {C::threads, 1, 1}, 0};
  out[1] = Launch{1, {grid, 1, 1}, {C::threads, 1, 1}, 128};
  return 2;
}

template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  if (count != 2) CUKILN_REFUSE(complaint, "TypeError: %d tensors were given; this kernel takes 2: in, out", count);
  if (tensors[0].type != ElementType::float32)
    CUKILN_REFUSE(complaint, "TypeError: in is %s; float32 is allowed", name_of(tensors[0].type));
  if (tensors[0].rank != 1 || tensors[1].rank != 1 || tensors[0].shape[0] != tensors[1].shape[0])
    CUKILN_REFUSE(complaint, "ValueError: in and out must be vectors of one length");
  extents[0] = tensors[0].shape[0];
  return true;
}

#endif

}  // namespace probe
}  // namespace cukiln
