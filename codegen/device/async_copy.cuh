// Copies from global to shared memory that go on while the thread computes (PTX ISA, "Data movement and conversion:
// non-bulk copy"). Needs sm_80. Copies through mbarrier and the tensor memory accelerator belong here too.
#pragma once

namespace cukiln {

// Starts the copy of `Bytes` (4, 8 or 16) bytes; fills with zeros and reads nothing where not `wanted`. Both addresses
// are aligned to `Bytes`. 16 bytes go past L1 (.cg), which the manual allows for that size alone.
template <int Bytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global, bool wanted) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async moves 4, 8 or 16 bytes");
  const unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const size_t source = __cvta_generic_to_global(global);
  const int read = wanted ? Bytes : 0;
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(read) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(Bytes), "r"(read) : "memory");
  }
}

// Ends a group: the copies that this thread started since the last one, which may be none.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the N newest groups of this thread have landed. Others see them after a barrier.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace cukiln
