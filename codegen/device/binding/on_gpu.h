// Loads the embedded cubin once per device and launches its kernels. Nothing here allocates on the GPU.
//
// The text before this header defines function_count, function_names[] (mangled) and target in cukiln::binding.
#pragma once

extern "C" const unsigned char cukiln_cubin[] __attribute__((visibility("hidden")));

// What messages call memory that the kernels reach.
#define CUKILN_DEVICE_WORD "cuda"
#define CUKILN_TENSOR_WORD "CUDA"

namespace cukiln {
namespace binding {

constexpr bool on_gpu = true;
constexpr int max_devices = 64;

struct Loaded {
  const Driver* driver;
  void* context;  // the device's primary context, which frameworks use too
  void* functions[function_count];
};

struct Device {
  Loaded loaded;
  bool ready;  // written last, with release order: launches read it without the mutex
};

inline Device* devices() {
  static Device table[max_devices];
  return table;
}

inline const Loaded* loaded_on(int device) {
  Device& entry = devices()[device];
  return __atomic_load_n(&entry.ready, __ATOMIC_ACQUIRE) ? &entry.loaded : nullptr;
}

// With the primary context current. Dynamic shared memory is opened to all that the device has: what a launch asks for
// is known only from its extents.
inline int load_functions(const Driver& driver, int device, Loaded& loaded) {
  void* module = nullptr;
  if (const int code = driver.module_load_data(&module, cukiln_cubin)) {
    char what[160];
    snprintf(what, sizeof(what), "the kernels, made for %s, cannot be loaded on cuda:%d", target, device);
    return driver_failed(driver, what, code);
  }
  int most = 0;
  if (const int code = driver.device_get_attribute(&most, attribute_shared_bytes_opt_in, device))
    return driver_failed(driver, "cuDeviceGetAttribute", code);
  for (int i = 0; i < function_count; ++i) {
    if (const int code = driver.module_get_function(&loaded.functions[i], module, function_names[i]))
      return driver_failed(driver, function_names[i], code);
    int fixed = 0;
    if (const int code = driver.function_get_attribute(&fixed, function_static_shared_bytes, loaded.functions[i]))
      return driver_failed(driver, "cuFuncGetAttribute", code);
    if (const int code = driver.function_set_attribute(loaded.functions[i], function_max_dynamic_shared_bytes, most - fixed))
      return driver_failed(driver, "cuFuncSetAttribute", code);
  }
  return fine;
}

inline int prepare_locked(int device) {
  Device& entry = devices()[device];
  if (entry.ready) return fine;
  const Driver* driver = load_driver();
  if (driver == nullptr) return failed;
  int handle = 0;
  if (const int code = driver->device_get(&handle, device)) {
    char what[64];
    snprintf(what, sizeof(what), "there is no device cuda:%d", device);
    return driver_failed(*driver, what, code);
  }
  Loaded loaded = {};
  loaded.driver = driver;
  if (const int code = driver->primary_context_retain(&loaded.context, handle))
    return driver_failed(*driver, "cuDevicePrimaryCtxRetain", code);
  if (const int code = driver->context_push(loaded.context)) return driver_failed(*driver, "cuCtxPushCurrent", code);
  const int status = load_functions(*driver, handle, loaded);
  void* popped = nullptr;
  driver->context_pop(&popped);
  if (status != fine) return status;
  entry.loaded = loaded;
  __atomic_store_n(&entry.ready, true, __ATOMIC_RELEASE);
  return fine;
}

// Loads the kernels on a device. Thread-safe; a second call costs nothing. Not under graph capture: it loads a module.
inline int prepare(int64_t device) {
  if (device < 0 || device >= max_devices)
    return fail("ValueError: device is %lld; 0 to %d is allowed", static_cast<long long>(device), max_devices - 1);
  if (loaded_on(static_cast<int>(device))) return fine;
  pthread_mutex_lock(mutex());
  const int status = prepare_locked(static_cast<int>(device));
  pthread_mutex_unlock(mutex());
  return status;
}

// For the first launch on a device that was not prepared.
inline int prepare_for_launch(int device, void* stream) {
  pthread_mutex_lock(mutex());
  const Driver* driver = load_driver();
  pthread_mutex_unlock(mutex());
  if (driver == nullptr) return failed;
  int capturing = 0;  // CU_STREAM_CAPTURE_STATUS_NONE
  if (driver->stream_is_capturing(stream, &capturing) == 0 && capturing != 0)
    return fail("RuntimeError: prepare(%d) must be called before graph capture: a module cannot be loaded under capture", device);
  return prepare(device);
}

// The device of the calling thread's context.
inline int current_device(int* device) {
  pthread_mutex_lock(mutex());
  const Driver* driver = load_driver();
  pthread_mutex_unlock(mutex());
  if (driver == nullptr) return failed;
  if (const int code = driver->context_get_device(device))
    return driver_failed(*driver, "this thread has no current CUDA context; select a device before the launch", code);
  return fine;
}

// The kernels of a device, loaded if need be; null, with the reason in last_error(), where they cannot be.
inline const Loaded* loaded_for_launch(int device, void* stream) {
  if (device < 0 || device >= max_devices) {
    fail("ValueError: device is %d; 0 to %d is allowed", device, max_devices - 1);
    return nullptr;
  }
  if (const Loaded* loaded = loaded_on(device)) return loaded;
  return prepare_for_launch(device, stream) == fine ? loaded_on(device) : nullptr;
}

// Puts launches on the stream, with the device's primary context current.
inline int submit(const Loaded& loaded, int first_function, void* arguments, const Launch* launches, int count, void* stream) {
  const Driver& driver = *loaded.driver;
  void* current = nullptr;
  driver.context_get_current(&current);
  const bool push = current != loaded.context;
  if (push)
    if (const int code = driver.context_push(loaded.context)) return driver_failed(driver, "cuCtxPushCurrent", code);
  int code = 0;
  void* parameters[] = {arguments};
  for (int i = 0; i < count && code == 0; ++i) {
    const Launch& each = launches[i];
    code = driver.launch_kernel(loaded.functions[first_function + each.function], each.grid[0], each.grid[1], each.grid[2],
                                each.block[0], each.block[1], each.block[2], each.shared_bytes, stream, parameters, nullptr);
  }
  if (push) driver.context_pop(&current);
  return code ? driver_failed(driver, "the launch failed", code) : static_cast<int>(fine);
}

}  // namespace binding
}  // namespace cukiln
