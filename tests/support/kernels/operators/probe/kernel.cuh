// The launches that work through the workspace, and the launch code.
#pragma once

namespace cukiln {
namespace probe {

#if defined(CUKILN_DEVICE)

// Block row s writes slice s of the workspace: the input in the first one, zeros in the others. Way 2 adds to its only
// slice, which `clear` has zeroed.
template <class C>
__device__ __forceinline__ void first(const Arguments& arguments) {
  static_assert(C::fault != 1, "fault 1: the front end refuses this kernel");
#if defined(__CUDACC__)
  if constexpr (C::fault == 2) asm volatile("no_such_instruction;");
  if constexpr (C::fault == 3) {
    __shared__ float too_much[100000];
    too_much[threadIdx.x] = arguments.in[threadIdx.x];
    __syncthreads();
    arguments.workspace[threadIdx.x] = too_much[threadIdx.x ^ 1];
  }
#endif
  const int index = index_of_thread<C>();
  const float added = hold<C>(arguments, index);
  if (index >= arguments.n) return;
  float* place = arguments.workspace + blockIdx.y * arguments.n + index;
  float value = blockIdx.y == 0 ? load_global<1>(arguments.in + index).data[0] * static_cast<float>(C::factor) : 0.0f;
  if constexpr (C::way == 2) value += *place;
  store_global<1>(place, Vector<float, 1>{{value + added}});
}

template <class C>
__device__ __forceinline__ void second(const Arguments& arguments) {
  const int index = index_of_thread<C>();
  if (index >= arguments.n) return;
  float sum = 0.0f;
  for (int slice = 0; slice < arguments.slices; ++slice)
    sum += arguments.workspace[slice * arguments.n + index];
  store_global<1>(arguments.out + index, Vector<float, 1>{{sum / arguments.factor * arguments.scale}});
}

#endif

#if defined(CUKILN_HOST)

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace) {
  static_assert(C::fault != 4, "fault 4: the host compiler refuses this kernel");
  static_assert(sizeof(typename C::Element) == 4, "elements are floats");
  const int n = extents[0] > INT32_MAX ? 0 : static_cast<int>(extents[0]);  // of none `plan` has a launch
  return Arguments{static_cast<const float*>(pointers[0]), static_cast<float*>(pointers[1]),
                   static_cast<float*>(workspace), n, static_cast<float>(scalars[0]), static_cast<float>(C::factor),
                   launch[0]};
}

template <class C>
int64_t workspace_bytes(const int64_t* extents, const int32_t* launch) {
  return C::way == 0 ? 0 : 4 * extents[0] * launch[0];
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  const uint32_t grid = static_cast<uint32_t>(ceil_div(arguments.n, C::threads));
  const uint32_t slices = static_cast<uint32_t>(arguments.slices);
  if (arguments.slices < 1 || arguments.n < 1) return 0;
  if (C::way == 0) {
    out[0] = Launch{0, {grid, 1, 1}, {C::threads, 1, 1}, 0};
    return 1;
  }
  int count = 0;
  if (C::way == 2) out[count++] = Launch{0, {grid, 1, 1}, {C::threads, 1, 1}, 0};
  out[count] = Launch{count, {grid, slices, 1}, {C::threads, 1, 1}, 0};
  ++count;
  out[count] = Launch{count, {grid, 1, 1}, {C::threads, 1, 1}, 128};
  return count + 1;
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
