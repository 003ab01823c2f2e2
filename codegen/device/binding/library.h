// The calls of a kernel, wherever it runs: what on_gpu.h or on_cpu.h loads and submits stands before this header.
#pragma once

namespace cukiln {
namespace binding {

constexpr int max_launches = 16;
constexpr int widest_access = 16;  // bytes that a thread moves at once
constexpr int most_argument_bytes = 4096;  // of a kernel's parameters (CUDA C++ Programming Guide, "__global__")

// What launching has to know of a kernel. Pointers to functions, not a template's parameter: of a group's dozens of kernels
// g++ then compiles only what differs.
struct KernelEntry {
  int operands, extents, attributes, scalars, first_function;  // extents: the attributes among them, behind the others
  const int32_t* launch;  // the values that the library was built with
  int bounded;  // of the scalars the first ones, each with the least and the greatest that a call may give
  const char* const* bounded_names;
  const double (*bounds)[2];
  int64_t (*workspace_bytes)(const int64_t* extents, const int32_t* launch);
  // Writes the arguments that all launches of a call take, and the launches; returns how many they are.
  int (*plan)(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace,
              void* arguments, Launch* out);
};

template <class B>
int plan_call(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace,
              void* arguments, Launch* out) {
  static_assert(sizeof(typename B::Arguments) <= most_argument_bytes, "a kernel's parameters are 4096 bytes at most");
  const typename B::Arguments bound = B::bind(pointers, extents, launch, scalars, workspace);
  __builtin_memcpy(arguments, &bound, sizeof(bound));
  return B::plan(bound, out);
}

// Of a kernel's Binding.
template <class B>
constexpr KernelEntry entry_of = {B::operands, B::extents, B::attributes,      B::scalars,  B::first_function,
                                  B::launch,   B::bounded,  B::bounded_names, B::bounds,      B::workspace_bytes,
                                  plan_call<B>};

// NaN is within no bounds.
inline int check_scalars(const KernelEntry& kernel, const double* scalars) {
  for (int i = 0; i < kernel.bounded; ++i) {
    const double least = kernel.bounds[i][0], most = kernel.bounds[i][1];
    if (!(scalars[i] >= least && scalars[i] <= most))
      return fail("ValueError: %s is %.16g; %.16g to %.16g is allowed", kernel.bounded_names[i], scalars[i], least, most);
  }
  return fine;
}

// Launches one call on a device. Null `launch` means the values the library was built with.
inline int launch_on(const KernelEntry& kernel, int device, void* const* pointers, const int64_t* extents, const int32_t* launch,
                     const double* scalars, void* workspace, void* stream) {
  if (const int status = check_scalars(kernel, scalars)) return status;
  const Loaded* loaded = loaded_for_launch(device, stream);
  if (loaded == nullptr) return failed;
  const int32_t* values = launch ? launch : kernel.launch;
  const int64_t needed = kernel.workspace_bytes(extents, values);
  if (needed > 0 && workspace == nullptr)
    return fail("ValueError: the workspace is null; this call needs %lld bytes", static_cast<long long>(needed));
  if (needed > 0 && reinterpret_cast<uintptr_t>(workspace) % widest_access != 0)
    return fail("ValueError: the workspace begins at %p; a multiple of %d bytes is allowed", workspace, widest_access);
  alignas(16) unsigned char arguments[most_argument_bytes];
  Launch launches[max_launches];
  const int count = kernel.plan(pointers, extents, values, scalars, workspace, arguments, launches);
  if (count < 1)
    return fail("ValueError: an extent is below 1 or beyond what the kernel can index%s",
                kernel.attributes > 0 ? ", or the attributes (such as stride and padding) do not fit the tensors" : "");
  return submit(*loaded, kernel.first_function, arguments, launches, count, stream);
}

// The plain C entry: as launch_on, on the device of the thread's current context. Not inlined into each kernel's entry.
__attribute__((noinline)) inline int launch_here(const KernelEntry& kernel, void* const* pointers, const int64_t* extents, const int32_t* launch,
                       const double* scalars, void* workspace, void* stream) {
  if (pointers == nullptr || extents == nullptr || (kernel.scalars > 0 && scalars == nullptr))
    return fail("ValueError: pointers, extents or scalars is null; %d pointers, %d extents and %d scalars are needed",
                kernel.operands, kernel.extents, kernel.scalars);
  int device = 0;
  if (const int status = current_device(&device)) return status;
  return launch_on(kernel, device, pointers, extents, launch, scalars, workspace, stream);
}

}  // namespace binding
}  // namespace cukiln

#define CUKILN_EXPORT extern "C" __attribute__((visibility("default")))
CUKILN_EXPORT int cukiln_prepare(int device) { return cukiln::binding::prepare(device); }
// What the last failed call on this thread had to say.
CUKILN_EXPORT const char* cukiln_last_error() { return cukiln::binding::last_error(); }

// The plain C entries of a kernel, by its Binding.
#define CUKILN_LAUNCH_EXPORTS(binding_type, suffix)                                                                       \
  CUKILN_EXPORT int cukiln_launch##suffix(void* const* pointers, const int64_t* extents, const int32_t* launch,          \
                                          const double* scalars, void* workspace, void* stream) {                        \
    return cukiln::binding::launch_here(cukiln::binding::entry_of<binding_type>, pointers, extents, launch, scalars,     \
                                        workspace, stream);                                                              \
  }                                                                                                                       \
  CUKILN_EXPORT int64_t cukiln_workspace_bytes##suffix(const int64_t* extents, const int32_t* launch) {                  \
    return binding_type::workspace_bytes(extents, launch);                                                               \
  }
