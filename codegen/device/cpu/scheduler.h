// Runs one block after the other, and in a block one warp after the other, each thread on its own fiber up to its next
// barrier. That is adversarial on purpose: without a barrier a warp runs as far ahead of the others as it can, and so does
// a lane of a warp.
#pragma once

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/time.h>

#include "memory.h"

struct uint3 {
  unsigned int x, y, z;
};
using dim3 = uint3;

// What kernels read. The scheduler writes them before it switches to a thread.
inline uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace cukiln {
namespace cpu {

enum Status { status_ok = 0, status_runtime_error = 1, status_run_timeout = 2 };
enum Order { order_ascending = 0, order_descending = 1, order_seeded = 2 };

// How a run ended. The first failure is kept; the run stops there.
struct Report {
  int status;
  char message[2048];
};

enum class State : unsigned char { ready, waiting, exited };

struct Thread {
  State state;
  int line;  // of the last barrier it reached
  const char* file;
  uint3 index;
};

using Function = void (*)(const void* arguments);

inline Report report;
inline Thread threads[max_threads];
inline int thread_count = 0;
inline int prepared = 0;  // fibers below this index stand at the start of `thread_main`'s loop or at its beginning
inline int current = 0;
inline Function function = nullptr;
inline const void* function_arguments = nullptr;
inline bool exact = false;
inline bool tainted = false;  // kernel code faulted or wrote where it must not: the process may be damaged

// Set while kernel code runs on a fiber: only then may a signal handler leave for the scheduler.
inline volatile sig_atomic_t inside = 0;
inline volatile sig_atomic_t expired = 0;
inline double limit_seconds = 0;

inline void leave_fiber() {
  inside = 0;
  switch_to_scheduler(current);
  inside = 1;
}

// Appends to the report; what does not fit is cut.
__attribute__((format(printf, 1, 2))) inline void say(const char* format, ...) {
  const size_t used = strlen(report.message);
  va_list values;
  va_start(values, format);
  vsnprintf(report.message + used, sizeof(report.message) - used, format, values);
  va_end(values);
}

inline void say_where() {
  const uint3 at = threads[current].index;
  say(" (block %u,%u,%u thread %u,%u,%u", blockIdx.x, blockIdx.y, blockIdx.z, at.x, at.y, at.z);
  if (threads[current].file) say("; last barrier reached: %s:%d", threads[current].file, threads[current].line);
  say(")");
}

// Ends the run from inside a thread; the message has been said.
[[noreturn]] inline void abandon(Status status) {
  report.status = status;
  for (;;) leave_fiber();
}

// A thread arrives at a barrier and waits for the others of its block.
__attribute__((noinline)) inline void barrier(int line, const char* file) {
  Thread& thread = threads[current];
  thread.state = State::waiting;
  thread.line = line;
  thread.file = file;
  leave_fiber();
}

// What every fiber runs: one kernel function per block, for ever, so that a stack is set up once.
inline void thread_main() {
  fiber_entered(current);
  inside = 1;
  for (;;) {
    function(function_arguments);
    threads[current].state = State::exited;
    leave_fiber();
  }
}

// splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t limit) { return next() % limit; }
};

inline void order_warps(int* warps, int count, Order order, Random& random) {
  for (int i = 0; i < count; ++i) warps[i] = order == order_descending ? count - 1 - i : i;
  if (order != order_seeded) return;
  for (int i = count - 1; i > 0; --i) {
    const int other = static_cast<int>(random.below(static_cast<uint64_t>(i) + 1));
    const int kept = warps[i];
    warps[i] = warps[other];
    warps[other] = kept;
  }
}

inline bool same_place(const Thread& a, const Thread& b) {
  if (a.state != b.state) return false;
  return a.state == State::exited || (a.line == b.line && strcmp(a.file, b.file) == 0);
}

// Says for every stretch of threads what they do: "threads 0-31 wait at kernel.cuh:88; threads 32-63 have exited".
inline void say_threads() {
  const char* separator = ": ";
  for (int first = 0; first < thread_count;) {
    int end = first + 1;
    while (end < thread_count && same_place(threads[first], threads[end])) ++end;
    say(end - first == 1 ? "%sthread %d" : "%sthreads %d-%d", separator, first, end - 1);
    if (threads[first].state == State::exited) {
      say(end - first == 1 ? " has exited" : " have exited");
    } else {
      say(end - first == 1 ? " waits at %s:%d" : " wait at %s:%d", threads[first].file, threads[first].line);
    }
    separator = "; ";
    first = end;
  }
}

// After every thread ran to a barrier or its end: true when all of them can go on from the same barrier.
inline bool release_barrier() {
  bool together = true;
  for (int i = 1; i < thread_count; ++i) together = together && same_place(threads[0], threads[i]);
  if (together && threads[0].state == State::exited) return false;
  if (!together) {
    report.status = status_runtime_error;
    say("divergent barrier in block %u,%u,%u", blockIdx.x, blockIdx.y, blockIdx.z);
    say_threads();
    return false;
  }
  for (int i = 0; i < thread_count; ++i) threads[i].state = State::ready;
  return true;
}

inline bool run_over() {
  if (expired && report.status == status_ok) {
    report.status = status_run_timeout;
    say("still running after %.1f CPU seconds", limit_seconds);
    say_where();
  }
  return report.status != status_ok;
}

inline void run_thread(int index) {
  current = index;
  threadIdx = threads[index].index;
  switch_to_fiber(index);
}

// Runs the block `blockIdx`. False: the run has failed and `report` says why.
inline bool run_block(Order order, Random& random) {
  poison_shared();
  for (int i = 0; i < thread_count; ++i) {
    threads[i].state = State::ready;
    threads[i].file = nullptr;
  }
  const int warp_count = (thread_count + 31) / 32;
  int warps[max_threads / 32];
  do {
    order_warps(warps, warp_count, order, random);
    for (int w = 0; w < warp_count; ++w) {
      const int first = warps[w] * 32, end = first + 32 < thread_count ? first + 32 : thread_count;
      // Lanes promise no order either: since Volta they are scheduled one by one.
      const bool backwards = order == order_descending || (order == order_seeded && random.below(2) == 1);
      for (int i = first; i < end; ++i) {
        run_thread(backwards ? first + end - 1 - i : i);
        if (run_over()) return false;
      }
    }
  } while (release_barrier());
  return report.status == status_ok;
}

inline uint64_t common_divisor(uint64_t a, uint64_t b) {
  while (b) {
    const uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// Runs every block of the grid. The order of blocks follows that of the warps: nothing may depend on it either.
inline bool run_grid(Order order, Random& random) {
  const uint64_t count = static_cast<uint64_t>(gridDim.x) * gridDim.y * gridDim.z;
  uint64_t step = 1, first = 0;
  if (order == order_seeded) {
    first = random.below(count);
    do step = 1 + random.below(count);
    while (common_divisor(step, count) != 1);
  }
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t block = order == order_descending ? count - 1 - i : (first + i * step) % count;
    blockIdx.x = static_cast<unsigned>(block % gridDim.x);
    blockIdx.y = static_cast<unsigned>(block / gridDim.x % gridDim.y);
    blockIdx.z = static_cast<unsigned>(block / gridDim.x / gridDim.y);
    if (!run_block(order, random)) {
      prepared = 0;  // abandoned stacks start afresh
      return false;
    }
  }
  return true;
}

}  // namespace cpu
}  // namespace cukiln
