// Fibers: one stack per CUDA thread and a switch between them that costs nanoseconds. The C library's ucontext saves the
// signal mask with a system call at every switch, which made a whole run eleven times slower.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Saves the callee-saved registers on the present stack, its pointer in *save, and continues where `to` was saved.
extern "C" __attribute__((visibility("hidden"))) void cukiln_switch(void** save, void* to);

#if !defined(CUKILN_RUNTIME)
// It is the runtime's.
#elif defined(__x86_64__)
// System V AMD64 ABI 1.0, section 3.2.1: rbx, rbp and r12 to r15 belong to the caller. `ret` and no indirect jump: the
// lanes of a warp stop at the same place one after the other, so the return predictor, which remembers where the last
// one was called from, is right about this return and about those after it (11 ns for a rendezvous instead of 20).
asm(R"(
.pushsection .text
.globl cukiln_switch
.hidden cukiln_switch
.type cukiln_switch, @function
.p2align 4
cukiln_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cukiln_switch, .-cukiln_switch
.popsection
)");
#elif defined(__aarch64__)
// AAPCS64 2023Q3, section 6.1: x19 to x30 and the low halves of v8 to v15 belong to the caller.
asm(R"(
.pushsection .text
.globl cukiln_switch
.hidden cukiln_switch
.type cukiln_switch, %function
.p2align 4
cukiln_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size cukiln_switch, .-cukiln_switch
.popsection
)");
#else
#error "the CPU execution of kernels needs x86-64 or aarch64: write cukiln_switch for this processor"
#endif

namespace cukiln {
namespace cpu {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t stack_bytes = 512 * 1024;  // sanitised frames carry red zones around every array
#else
constexpr size_t stack_bytes = 128 * 1024;
#endif
constexpr int max_threads = 1024;
// Wider than a page, because a function with a large frame may touch its far end first and step over a single page.
constexpr size_t guard_bytes = 64 * 1024;

inline size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// One fiber. `stack` is its lowest usable address, above `guard_bytes` that must not be touched.
struct Fiber {
  char* stack;
  void* saved;       // stack pointer while it does not run
  void* fake_stack;  // the address sanitizer's own stack for this fiber
};

inline Fiber fibers[max_threads];
inline int fiber_count = 0;

// The scheduler's side of the switch: where to go back to and, for the sanitizer, which stack that is.
inline void* scheduler_saved = nullptr;
#if defined(__SANITIZE_ADDRESS__)
inline bool scheduler_left = false;  // the fiber that is entered next comes from the scheduler and not from another one
inline const void* scheduler_stack = nullptr;
inline size_t scheduler_stack_bytes = 0;
inline void* scheduler_fake_stack = nullptr;
#endif

#if defined(CUKILN_RUNTIME)
// Makes sure that at least `count` fibers have a stack. Stacks are kept until the process ends. False: out of memory.
inline bool reserve_fibers(int count) {
  while (fiber_count < count) {
    void* mapped = mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return false;
    if (mprotect(mapped, guard_bytes, PROT_NONE) != 0) return false;
    fibers[fiber_count++].stack = static_cast<char*>(mapped) + guard_bytes;
  }
  return true;
}

// Makes the fiber start in `entry` at its next switch. `entry` never returns.
inline void prepare_fiber(int index, void (*entry)()) {
  Fiber& fiber = fibers[index];
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber.stack, stack_bytes);  // of the frames that an abandoned run left
#endif
  // All stacks are page-aligned: without an offset of its own every fiber's frames would fall into the same cache sets.
  const size_t colour = static_cast<size_t>(index) * 704 % 4096;
  uintptr_t top = (reinterpret_cast<uintptr_t>(fiber.stack) + stack_bytes - colour) & ~static_cast<uintptr_t>(63);
#if defined(__x86_64__)
  // Six registers, the entry, then the zero that a return address would be: a function starts with rsp % 16 == 8.
  void** frame = reinterpret_cast<void**>(top) - 8;
  memset(frame, 0, 8 * sizeof(void*));
  frame[6] = reinterpret_cast<void*>(entry);
#else
  void** frame = reinterpret_cast<void**>(top - 160);
  memset(frame, 0, 160);
  frame[11] = reinterpret_cast<void*>(entry);  // x30
#endif
  fiber.saved = frame;
  fiber.fake_stack = nullptr;
}

// Runs the fiber, and those that it passes on to, until one of them switches back.
inline void switch_to_fiber(int index) {
#if defined(__SANITIZE_ADDRESS__)
  scheduler_left = true;
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fibers[index].stack, stack_bytes);
#endif
  cukiln_switch(&scheduler_saved, fibers[index].saved);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

// What a fiber does first after every switch to it.
inline void fiber_entered(int index) {
#if defined(__SANITIZE_ADDRESS__)
  const void* left = nullptr;
  size_t left_bytes = 0;
  __sanitizer_finish_switch_fiber(fibers[index].fake_stack, &left, &left_bytes);
  if (scheduler_left) {
    scheduler_stack = left;
    scheduler_stack_bytes = left_bytes;
    scheduler_left = false;
  }
#else
  (void)index;
#endif
}

// Leaves the fiber `index`, which is running; returns at the next switch to it.
inline void switch_to_scheduler(int index) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fibers[index].fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
  cukiln_switch(&fibers[index].saved, scheduler_saved);
  fiber_entered(index);
}

// As switch_to_scheduler, but the fiber `to` runs next: one switch where two by way of the scheduler would do the same.
inline void switch_fibers(int from, int to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fibers[from].fake_stack, fibers[to].stack, stack_bytes);
#endif
  cukiln_switch(&fibers[from].saved, fibers[to].saved);
  fiber_entered(from);
}
#endif  // CUKILN_RUNTIME

}  // namespace cpu
}  // namespace cukiln
