// The C entry points through which a test process runs the kernels of this library, and the signals it survives.
#pragma once

#include <pthread.h>

#include "grid.h"

namespace cukiln {
namespace cpu {

constexpr int max_launches = 16;

// One run of a candidate. `order`, `seed`: see Order; `cpu_seconds` limits the whole run. `watch`: look for races on
// shared memory and count its bank conflicts, which takes several times as long.
struct Call {
  void* const* pointers;
  const int64_t* integers;  // extents, then attributes
  const int32_t* launch;
  const double* scalars;
  void* workspace;
  int32_t order;
  int32_t exact;
  uint64_t seed;
  double cpu_seconds;
  int32_t watch;
  const uint64_t* last_blocks;  // as LastBlocks, two numbers for each launch; null: all run
};

// What a watched run counted at one place; `cukiln::cpu::Site` for the test process.
struct SiteReport {
  const char* file;
  const char* access;
  int32_t line;
  int32_t bytes;
  uint64_t warp_accesses, wavefronts, ideal;
};

// Runs the launches of one call one after the other. The status is in `report` too; -1: out of memory.
int execute(const Call& call, const Launch* launches, int count, const Function* functions, int function_count, const void* arguments);

#if defined(CUKILN_RUNTIME)
inline const char* name_of_signal(int number) {
  switch (number) {
    case SIGSEGV: return "segmentation fault";
    case SIGBUS: return "bus error";
    case SIGFPE: return "arithmetic fault (an integer division by zero)";
    case SIGILL: return "an element outside of an array of its own, or an illegal instruction";
    default: return "trap";
  }
}

inline void say_fault(const siginfo_t* info) {
  const char* const at = static_cast<const char*>(info->si_addr);
  say("%s", name_of_signal(info->si_signo));
  if (info->si_signo != SIGSEGV && info->si_signo != SIGBUS) return;
  const char* const stack = fibers[current].stack;
  const Buffer* buffer = buffer_near(at);
  if (at < stack && at >= stack - guard_bytes) {
    say(": the thread's stack of %zu bytes overflowed", stack_bytes);
  } else if (buffer) {
    const ptrdiff_t offset = at - buffer->begin;
    const bool outside = offset < 0 || static_cast<size_t>(offset) >= buffer->bytes;
    say(": unchecked access at offset %td of %s (%zu bytes)%s", offset, buffer->name, buffer->bytes,
        outside ? ", outside of it" : ", an input, which no kernel may write");
  } else if (at >= shared_map && at < shared_map + max_shared_bytes + 2 * page_bytes()) {
    say(": unchecked access at offset %td of shared memory (%zu bytes)", at - shared_begin, shared_bytes);
  } else {
    say(": unchecked access at address %p", info->si_addr);
  }
}

// A fault in kernel code ends the run, not the process: the handler leaves for the scheduler and never comes back.
inline void on_fault(int number, siginfo_t* info, void*) {
  if (!inside) {  // not a kernel's doing: let the process die of it
    signal(number, SIG_DFL);
    return;
  }
  inside = 0;
  tainted = true;
  say_fault(info);
  say_where();
  abandon(status_runtime_error);
}

// The thread that runs the kernel. Of a process with others the signal comes to any of them; the timer goes off again.
inline pthread_t runner;

inline void on_timer(int, siginfo_t*, void*) {
  expired = 1;
  if (inside && pthread_equal(pthread_self(), runner)) leave_fiber();  // for good: the scheduler sees `expired`, which ends the run
}

// Signal handlers of a run and their stack; put back what was there before. The sanitizer keeps its own: it ends the
// process with a report of its own, and a limit on wall time ends a sanitised run that never ends.
class Signals {
 public:
  explicit Signals(double cpu_seconds) {
#if !defined(__SANITIZE_ADDRESS__)
    static char handler_stack[64 * 1024];
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = sizeof(handler_stack);
    sigaltstack(&stack, &old_stack_);
    struct sigaction action = {};
    // SA_NODEFER: the handler is left by a switch of stacks, after which the signal must not stay blocked.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;
    action.sa_sigaction = on_fault;
    for (int i = 0; i < faults; ++i) sigaction(numbers[i], &action, &old_[i]);
    runner = pthread_self();
    action.sa_sigaction = on_timer;
    sigaction(SIGPROF, &action, &old_[faults]);
    set_timer(cpu_seconds);
#else
    (void)cpu_seconds;
#endif
  }
  ~Signals() {
#if !defined(__SANITIZE_ADDRESS__)
    set_timer(0);
    for (int i = 0; i < faults; ++i) sigaction(numbers[i], &old_[i], nullptr);
    sigaction(SIGPROF, &old_[faults], nullptr);
    sigaltstack(&old_stack_, nullptr);
#endif
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

 private:
  static constexpr int faults = 5;
  static constexpr int numbers[faults] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
  static void set_timer(double seconds) {
    itimerval timer = {};
    timer.it_value.tv_sec = static_cast<time_t>(seconds);
    timer.it_value.tv_usec = static_cast<suseconds_t>((seconds - static_cast<double>(timer.it_value.tv_sec)) * 1e6);
    // Again and again: a signal outside of kernel code ends nothing, and the kernel may never come back to the scheduler.
    if (seconds > 0) timer.it_interval.tv_usec = 10000;
    setitimer(ITIMER_PROF, &timer, nullptr);
  }
  struct sigaction old_[faults + 1];
  stack_t old_stack_;
};

inline void refuse_launch(const char* what, unsigned long long value, unsigned long long allowed) {
  if (report.status != status_ok) return;
  report.status = status_runtime_error;
  say("invalid launch: %s is %llu, allowed is 1 to %llu", what, value, allowed);
}

// CUDA C++ Programming Guide, technical specifications per compute capability: limits of a grid and of a block.
inline void check_launch(const Launch& launch, int functions) {
  const char* const axes[] = {"x", "y", "z"};
  const unsigned long long grid[] = {0x7fffffff, 65535, 65535}, block[] = {1024, 1024, 64};
  char what[32];
  for (int i = 0; i < 3; ++i) {
    snprintf(what, sizeof(what), "grid.%s", axes[i]);
    if (launch.grid[i] < 1 || launch.grid[i] > grid[i]) refuse_launch(what, launch.grid[i], grid[i]);
    snprintf(what, sizeof(what), "block.%s", axes[i]);
    if (launch.block[i] < 1 || launch.block[i] > block[i]) refuse_launch(what, launch.block[i], block[i]);
  }
  const unsigned long long count = 1ull * launch.block[0] * launch.block[1] * launch.block[2];
  if (count > max_threads) refuse_launch("the number of threads in a block", count, max_threads);
  if (launch.shared_bytes > max_shared_bytes) refuse_launch("shared memory in bytes", launch.shared_bytes, max_shared_bytes);
  if (launch.function < 0 || launch.function >= functions)
    refuse_launch("the kernel function", static_cast<unsigned long long>(launch.function) + 1, static_cast<unsigned long long>(functions));
}

inline void check_canaries() {
  for (int i = 0; i < buffer_count && report.status == status_ok; ++i) {
    ptrdiff_t offset = 0;
    if (!broken_canary(buffers[i], &offset)) continue;
    report.status = status_runtime_error;
    tainted = true;
    say("unchecked write at offset %td of %s (%zu bytes), outside of it", offset, buffers[i].name, buffers[i].bytes);
  }
}

int execute(const Call& call, const Launch* launches, int count, const Function* functions, int function_count, const void* arguments) {
  report.status = status_ok;
  report.message[0] = 0;
  expired = 0;
  limit_seconds = call.cpu_seconds;
  exact = call.exact != 0;
  function_arguments = arguments;
  order = static_cast<Order>(call.order);
  random_state.state = call.seed;
  start_watch(call.watch != 0);
#if defined(CUKILN_COUNTING)
  count_count = 0;
#endif
  if (count < 1 || count > max_launches)
    refuse_launch("the number of launches", static_cast<unsigned long long>(count), max_launches);
  for (int i = 0; i < count && report.status == status_ok; ++i) check_launch(launches[i], function_count);
  if (report.status != status_ok) return report.status;
  arm_buffers(true);
  {
    const Signals signals(call.cpu_seconds);
    for (int i = 0; i < count; ++i) {
      if (!prepare_launch(launches[i])) {
        arm_buffers(false);
        return -1;
      }
      function = functions[launches[i].function];
      last_blocks = call.last_blocks ? LastBlocks{call.last_blocks[2 * i], call.last_blocks[2 * i + 1]} : LastBlocks{0, 0};
      forget_writes();
#if defined(CUKILN_COUNTING)
      begin_launch(launches[i].function);
#endif
      if (!run_grid()) break;
#if defined(CUKILN_COUNTING)
      end_launch();
#endif
    }
  }
  end_watch(report.status != status_ok);
  fflush(stdout);  // what the kernel printed
  arm_buffers(false);
  check_canaries();
  return report.status;
}
#endif  // CUKILN_RUNTIME

}  // namespace cpu
}  // namespace cukiln

#define CUKILN_CPU_EXPORT extern "C" __attribute__((visibility("default")))

#if defined(CUKILN_RUNTIME)
CUKILN_CPU_EXPORT void* cukiln_allocate(const char* name, uint64_t bytes, uint64_t alignment, int writable) {
  return cukiln::cpu::allocate_buffer(name, bytes, alignment, writable != 0);
}

CUKILN_CPU_EXPORT void cukiln_free_all() { cukiln::cpu::free_buffers(); }

CUKILN_CPU_EXPORT const char* cukiln_message() { return cukiln::cpu::report.message; }

CUKILN_CPU_EXPORT int cukiln_tainted() { return cukiln::cpu::tainted; }

// The site `index` of the last watched run; 0 where there is none.
CUKILN_CPU_EXPORT int cukiln_site(int index, cukiln::cpu::SiteReport* found) {
  using namespace cukiln::cpu;
  if (index < 0 || index >= site_count) return 0;
  const Site& site = sites[index];
  *found = SiteReport{site.file, name_of(site.access), site.line, site.bytes, site.warp_accesses, site.wavefronts, site.ideal};
  return 1;
}

#if defined(CUKILN_COUNTING)
// The count `index` of the last run; 0 where there is none.
CUKILN_CPU_EXPORT int cukiln_count(int index, cukiln::cpu::Count* found) {
  using namespace cukiln::cpu;
  if (index < 0 || index >= count_count) return 0;
  *found = counts[index];
  return 1;
}
#endif

// For the tests of the primitives alone.
CUKILN_CPU_EXPORT void cukiln_round(const float* source, float* half, float* bfloat16, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    half[i] = cukiln::round_to_half(source[i]);
    bfloat16[i] = cukiln::round_to_bfloat16(source[i]);
  }
}
#endif  // CUKILN_RUNTIME
