// Runs the kernels of a library of target cpu, on the emulation that verifies them, in its plain order and unchecked: the
// kernel was verified. It changes nothing of the process, neither signal handlers nor timers.
//
// The text before this header defines kernel_functions[] in cukiln::binding.
#pragma once

// What messages call memory that the kernels reach.
#define CUKILN_DEVICE_WORD "cpu"
#define CUKILN_TENSOR_WORD "CPU"

namespace cukiln {
namespace binding {

constexpr bool on_gpu = false;

struct Loaded {};  // nothing is loaded

// Nothing is to be made ready, on whichever device; but a processor may lack what the library is compiled for.
inline int prepare(int64_t) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    return fail("RuntimeError: this library of target cpu is compiled for AVX2 and FMA, which this processor lacks");
#endif
  return fine;
}

inline int current_device(int* device) {
  *device = 0;
  return fine;
}

inline const Loaded* loaded_for_launch(int, void*) {
  static constexpr Loaded loaded = {};
  return prepare(0) == fine ? &loaded : nullptr;
}

// While it lives the calling thread alone runs kernels of this library: the emulation has one set of threads, of shared
// memory and of counters.
class Turn {
 public:
  Turn() { pthread_mutex_lock(mutex()); }
  ~Turn() { pthread_mutex_unlock(mutex()); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
};

// Runs launches one after the other, and returns when the last is done.
inline int submit(const Loaded&, int first_function, void* arguments, const Launch* launches, int count, void*) {
  const Turn turn;
  cpu::report.status = cpu::status_ok;
  cpu::report.message[0] = '\0';
  cpu::function_arguments = arguments;
  cpu::order = cpu::order_ascending;
  for (int i = 0; i < count; ++i) {
    if (!cpu::prepare_launch(launches[i]))
      return fail("MemoryError: no memory for a block's %d threads and %u bytes of shared memory", cpu::thread_count,
                  launches[i].shared_bytes);
    cpu::function = kernel_functions[first_function + launches[i].function];
    if (!cpu::run_grid()) return fail("RuntimeError: the kernel did not end: %s", cpu::report.message);
  }
  return fine;
}

}  // namespace binding
}  // namespace cukiln
