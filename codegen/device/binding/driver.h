// The few functions of the CUDA driver that a launch needs, found at run time: the library must load where no driver is.
#pragma once
#include <dlfcn.h>
#include <stddef.h>

namespace cukiln {
namespace binding {

// CUDA Driver API reference; names with _v2 are what its header maps the plain names to.
struct Driver {
  int (*init)(unsigned);
  int (*device_get)(int*, int);
  int (*device_get_attribute)(int*, int, int);
  int (*primary_context_retain)(void**, int);
  int (*context_get_current)(void**);
  int (*context_get_device)(int*);
  int (*context_push)(void*);
  int (*context_pop)(void**);
  int (*module_load_data)(void**, const void*);
  int (*module_get_function)(void**, void*, const char*);
  int (*function_get_attribute)(int*, int, void*);
  int (*function_set_attribute)(void*, int, int);
  int (*stream_is_capturing)(void*, int*);
  int (*launch_kernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*get_error_string)(int, const char**);
};

constexpr int attribute_shared_bytes_opt_in = 97;      // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
constexpr int function_static_shared_bytes = 1;        // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int function_max_dynamic_shared_bytes = 8;   // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

// Call with the mutex held. Null, with the reason in last_error(), where there is no usable driver. A failure is not
// remembered: a driver may come later.
inline const Driver* load_driver() {
  static Driver driver;
  static bool ready = false;
  if (ready) return &driver;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    fail("RuntimeError: no NVIDIA driver: libcuda.so.1 cannot be loaded (%s); a kernel runs only where a GPU and its driver are", dlerror());
    return nullptr;
  }
  struct Entry {
    const char* name;
    void* place;
  };
  const Entry entries[] = {
      {"cuInit", &driver.init},
      {"cuDeviceGet", &driver.device_get},
      {"cuDeviceGetAttribute", &driver.device_get_attribute},
      {"cuDevicePrimaryCtxRetain", &driver.primary_context_retain},
      {"cuCtxGetCurrent", &driver.context_get_current},
      {"cuCtxGetDevice", &driver.context_get_device},
      {"cuCtxPushCurrent_v2", &driver.context_push},
      {"cuCtxPopCurrent_v2", &driver.context_pop},
      {"cuModuleLoadData", &driver.module_load_data},
      {"cuModuleGetFunction", &driver.module_get_function},
      {"cuFuncGetAttribute", &driver.function_get_attribute},
      {"cuFuncSetAttribute", &driver.function_set_attribute},
      {"cuStreamIsCapturing", &driver.stream_is_capturing},
      {"cuLaunchKernel", &driver.launch_kernel},
      {"cuGetErrorString", &driver.get_error_string},
  };
  for (const Entry& entry : entries) {
    void* symbol = dlsym(library, entry.name);
    if (symbol == nullptr) {
      fail("RuntimeError: the NVIDIA driver is too old: libcuda.so.1 has no %s", entry.name);
      dlclose(library);
      return nullptr;
    }
    memcpy(entry.place, &symbol, sizeof(symbol));
  }
  const int code = driver.init(0);
  if (code != 0) {
    fail("RuntimeError: the NVIDIA driver does not start (cuInit: error %d); is there a GPU?", code);
    dlclose(library);
    return nullptr;
  }
  ready = true;
  return &driver;
}

inline int driver_failed(const Driver& driver, const char* what, int code) {
  const char* text = nullptr;
  driver.get_error_string(code, &text);
  return fail("RuntimeError: %s: %s (CUDA error %d)", what, text ? text : "unknown error", code);
}

}  // namespace binding
}  // namespace cukiln
