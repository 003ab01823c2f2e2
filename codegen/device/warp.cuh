// What the lanes of a warp and the warps of a block do together, and additions that several blocks make to one address.
#pragma once

namespace cukiln {

// The bits of a value of 4 bytes, and back.
template <class T>
static __device__ __forceinline__ unsigned word_of(T value) {
  static_assert(sizeof(T) == 4, "a register has 4 bytes");
  unsigned word;
  __builtin_memcpy(&word, &value, 4);
  return word;
}
template <class T>
static __device__ __forceinline__ T value_of(unsigned word) {
  T value;
  __builtin_memcpy(&value, &word, 4);
  return value;
}

// Every lane gives a value of 4 bytes and gets that of lane `lane` modulo 32.
template <class T>
__device__ __forceinline__ T shuffle_idx(T value, int lane) {
  return value_of<T>(__shfl_sync(0xffffffffu, word_of(value), lane));
}

// From the lane `delta` below; lanes that have none keep their own. `delta` counts modulo 32 in all of these.
template <class T>
__device__ __forceinline__ T shuffle_up(T value, int delta) {
  return value_of<T>(__shfl_up_sync(0xffffffffu, word_of(value), static_cast<unsigned>(delta)));
}

// From the lane `delta` above; lanes that have none keep their own.
template <class T>
__device__ __forceinline__ T shuffle_down(T value, int delta) {
  return value_of<T>(__shfl_down_sync(0xffffffffu, word_of(value), static_cast<unsigned>(delta)));
}

// From lane `own lane ^ mask`.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return value_of<T>(__shfl_xor_sync(0xffffffffu, word_of(value), mask));
}

__device__ __forceinline__ bool vote_any(bool value) { return __any_sync(0xffffffffu, value) != 0; }
__device__ __forceinline__ bool vote_all(bool value) { return __all_sync(0xffffffffu, value) != 0; }
// Bit i is the value of lane i.
__device__ __forceinline__ unsigned vote_ballot(bool value) { return __ballot_sync(0xffffffffu, value); }

// All lanes arrive, and see the memory that the others wrote before.
__device__ __forceinline__ void warp_barrier() { __syncwarp(); }

// One of the block's 16 barriers; __syncthreads() is 0. `threads` are those that arrive or wait, whole warps.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Adds to an address of global memory, in no order. As the manual says of red and atom, .f32 in global memory rounds to
// nearest even and takes subnormal operands and results for zeros of their sign.
__device__ __forceinline__ void atomic_add(float* target, float value) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(__cvta_generic_to_global(target)), "f"(value) : "memory");
}

// Wraps around on overflow.
__device__ __forceinline__ void atomic_add(int* target, int value) {
  asm volatile("red.global.add.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(target)), "r"(value) : "memory");
}

}  // namespace cukiln
