// The threads of the running block: what each does, where it stopped, and which one runs next. Every thread runs on its own
// fiber up to a point where it must wait for others. That is adversarial on purpose: a warp runs as far ahead of the
// others as it can, and so does a lane of a warp. grid.h decides which warp comes next.
#pragma once

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/time.h>

#include "memory.h"

#define CUKILN_INLINE inline __attribute__((always_inline))

struct uint3 {
  unsigned int x, y, z;
};
using dim3 = uint3;

// What kernels read; written before a switch to a thread.
inline uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace cukiln {
namespace cpu {

constexpr int warp_size = 32;
constexpr uint32_t whole_warp = 0xffffffffu;
constexpr int max_warps = max_threads / warp_size;

enum Status { status_ok = 0, status_runtime_error = 1, status_run_timeout = 2 };
enum Order { order_ascending = 0, order_descending = 1, order_seeded = 2 };

// How a run ended. The first failure is kept; the run stops there.
struct Report {
  int status;
  char message[2048];
};

// `at_barrier`: of the block; `meeting`: at a collective of its warp; `at_named_barrier`: its warp waits for other warps.
enum class State : unsigned char { ready, at_barrier, meeting, at_named_barrier, exited };

struct Thread {
  State state;
  int line;  // of the last barrier or collective it reached
  const char* file;
  const char* what;  // the primitive it waits in; null for the block's barrier
  uint3 index;
};

// The lanes of one warp as sets of bits. Lanes that a block of another size than a multiple of 32 lacks count as exited.
struct Warp {
  uint32_t ready;    // may go on; the running lane is one of them
  uint32_t meeting;  // have reached the collective of collective.h that the warp is at
  bool backwards;    // lanes go on from the last one to the first
  bool diverged;     // a lane is at another collective than those before it
  int first;         // its first thread in `threads`
  void (*operation)(void* const* lanes);  // of the collective
  int line;
  const char* file;
  void* lanes[warp_size];  // what each lane brought to the collective
};

using Function = void (*)(const void* arguments);

template <class Arguments, void (*kernel)(const Arguments)>
void call_kernel(const void* arguments) {
  kernel(*static_cast<const Arguments*>(arguments));
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

inline Report report;
inline Thread threads[max_threads];
inline Warp warps[max_warps];
inline int thread_count = 0;
inline int warp_count = 0;
inline int prepared = 0;  // fibers below this index stand at the start of `thread_main`'s loop or at its beginning
inline int current = 0;
inline Order order = order_ascending;
inline Random random_state = {0};
inline Function function = nullptr;
inline const void* function_arguments = nullptr;
inline bool exact = false;
inline bool tainted = false;  // kernel code faulted or wrote where it must not: the process may be damaged

// Set while kernel code runs on a fiber: only then may a signal handler leave for the scheduler.
inline volatile sig_atomic_t inside = 0;
inline volatile sig_atomic_t expired = 0;
inline double limit_seconds = 0;

#if defined(CUKILN_RUNTIME)
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
#endif  // CUKILN_RUNTIME

inline Warp& warp_of(int thread) { return warps[thread / warp_size]; }
inline uint32_t lane_bit(int thread) { return 1u << (thread % warp_size); }

// A thread arrives at the block's barrier and waits for all others.
void barrier(int line, const char* file);

#if defined(CUKILN_RUNTIME)
// The next thread of the warp to run; some lane is ready.
inline int next_thread(const Warp& warp) {
  return warp.first + (warp.backwards ? warp_size - 1 - __builtin_clz(warp.ready) : __builtin_ctz(warp.ready));
}

// The running thread has stopped and is ready no more, or its whole warp is ready again: the next lane of the warp goes
// on, and where none is ready the scheduler decides. Returns once this thread is resumed.
inline void pass_on() {
  const Warp& warp = warp_of(current);
  if (warp.ready == 0) return leave_fiber();
  const int from = current, to = next_thread(warp);
  if (to == from) return;
  current = to;
  threadIdx = threads[to].index;
  switch_fibers(from, to);
  inside = 1;  // it may be the scheduler that let this thread go on
}

inline void stop(State state, int line, const char* file, const char* what) {
  Thread& thread = threads[current];
  thread.state = state;
  thread.line = line;
  thread.file = file;
  thread.what = what;
  warp_of(current).ready &= ~lane_bit(current);
}

__attribute__((noinline)) void barrier(int line, const char* file) {
  stop(State::at_barrier, line, file, nullptr);
  pass_on();
}

// What every fiber runs: one kernel function per block, for ever, so that a stack is set up once.
inline void thread_main() {
  fiber_entered(current);
  inside = 1;
  for (;;) {
    function(function_arguments);
    threads[current].state = State::exited;
    warp_of(current).ready &= ~lane_bit(current);
    pass_on();
  }
}

inline bool same_text(const char* a, const char* b) { return a == b || (a && b && strcmp(a, b) == 0); }

inline bool same_place(const Thread& a, const Thread& b) {
  if (a.state != b.state) return false;
  return a.state == State::exited || (a.line == b.line && same_text(a.file, b.file) && same_text(a.what, b.what));
}

constexpr int named_stretches = 4;  // of threads at one place; those of further ones are counted

// Says which threads are where the first one is, "threads 0-6, 8-31" or "threads 0, 2, 4, 6 and 12 more"; returns how
// many those are.
inline int say_together(int first, int last) {
  int count = 0;
  for (int i = first; i < last; ++i) count += same_place(threads[first], threads[i]);
  say(count == 1 ? "thread" : "threads");
  int left = count;
  for (int i = first, stretches = 0; i < last && stretches < named_stretches; ++i) {
    if (!same_place(threads[first], threads[i])) continue;
    int end = i + 1;
    while (end < last && same_place(threads[first], threads[end])) ++end;
    say("%s%d", stretches ? ", " : " ", i);
    if (end - i > 1) say("-%d", end - 1);
    left -= end - i;
    ++stretches;
    i = end;  // the thread at `end` is elsewhere
  }
  if (left) say(" and %d more", left);
  return count;
}

// Says for every place which threads are there: "threads 0-31 wait at kernel.cuh:88; threads 32-63 have exited".
inline void say_threads(int first, int last) {
  const char* separator = ": ";
  for (int i = first; i < last; ++i) {
    int before = first;
    while (!same_place(threads[before], threads[i])) ++before;
    if (before < i) continue;  // said with that one
    say("%s", separator);
    const bool one = say_together(i, last) == 1;
    const Thread& thread = threads[i];
    if (thread.state == State::exited) {
      say(one ? " has exited" : " have exited");
    } else {
      say(one ? " waits at %s:%d" : " wait at %s:%d", thread.file, thread.line);
      if (thread.what) say(" in %s", thread.what);
    }
    separator = "; ";
  }
}
#endif  // CUKILN_RUNTIME

}  // namespace cpu
}  // namespace cukiln
