// Entries of a kernel whose first launch reads one operand alone, as Winograd's transform of its filters: that launch on its
// own, into memory of the caller's, and calls that begin behind it.
#pragma once

namespace cukiln {
namespace binding {

// Puts the launches of a call from `begin` up to `end` on the stream, with the transformed operand at `transformed`.
template <class B>
int launch_part(int device, void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars,
                void* workspace, void* transformed, void* stream, int begin, int end) {
  static_assert(B::bounded == 0, "a call in parts checks no scalars");
  const Loaded* loaded = loaded_for_launch(device, stream);
  if (loaded == nullptr) return failed;
  const int32_t* values = launch ? launch : B::launch;
  if (transformed == nullptr || reinterpret_cast<uintptr_t>(transformed) % widest_access != 0)
    return fail("ValueError: the transformed %s begins at %p; a multiple of %d bytes is allowed, and no null", B::transformed,
                transformed, widest_access);
  if (begin > 0 && (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % widest_access != 0))
    return fail("ValueError: the workspace begins at %p; a multiple of %d bytes is allowed, and no null", workspace, widest_access);
  typename B::Arguments arguments = B::bind(pointers, extents, values, scalars, workspace);
  B::use_transformed(arguments, transformed);
  Launch launches[max_launches];
  const int count = B::plan(arguments, launches);
  if (count < 1)
    return fail("ValueError: an extent is below 1 or beyond what the kernel can index%s",
                B::attributes > 0 ? ", or the attributes (such as stride and padding) do not fit the tensors" : "");
  const int last = end < count ? end : count;
  return submit(*loaded, B::first_function, &arguments, launches + begin, last - begin, stream);
}

template <class B>
int launch_part_here(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace,
                     void* transformed, void* stream, int begin, int end) {
  if (pointers == nullptr || extents == nullptr || (B::scalars > 0 && scalars == nullptr))
    return fail("ValueError: pointers, extents or scalars is null; %d pointers, %d extents and %d scalars are needed", B::operands,
                B::extents, B::scalars);
  int device = 0;
  if (const int status = current_device(&device)) return status;
  return launch_part<B>(device, pointers, extents, launch, scalars, workspace, transformed, stream, begin, end);
}

// transform(*inputs, *outputs, transformed, *attributes, *scalars), of which only the one operand is read.
// run_transformed(*inputs, *outputs, workspace, transformed, *attributes, *scalars): of that operand nothing but its shape.
template <class B>
int transform_entry(const TVMFFIAny* values, int given, TVMFFIAny* result, bool whole) {
  Call<B> call;
  if (!call.read_operands(values, given)) return raise_last_error();
  const int first_number = B::operands + (whole ? 2 : 1), expected = first_number + B::attributes + B::scalars;
  if (given != expected) {
    fail("TypeError: %d arguments were given; this call takes %d tensors, %sthe transformed %s, then %d numbers", given, B::operands,
         whole ? "the workspace, " : "", B::transformed, expected - first_number);
    return raise_last_error();
  }
  const int device = call.views[0].device;
  void *workspace = nullptr, *transformed = nullptr;
  if (!call.read_numbers(values, first_number)) return raise_last_error();
  if (whole && !read_workspace(values[B::operands], B::workspace_bytes(call.extents, nullptr), device, &workspace)) return raise_last_error();
  const int64_t needed = B::transformed_bytes(call.extents);
  if (!read_workspace(values[first_number - 1], needed, device, &transformed)) {
    fail("TypeError: the transformed %s must be a tensor of %lld bytes on " CUKILN_DEVICE_WORD ":%d, or its address", B::transformed,
         static_cast<long long>(needed), device);
    return raise_last_error();
  }
  void* stream = TVMFFIEnvGetStream(kDLCUDA, device);
  if (launch_part<B>(device, call.pointers, call.extents, nullptr, call.scalars, workspace, transformed, stream, whole, whole ? max_launches : 1))
    return raise_last_error();
  return give(result, kTVMFFINone, 0);
}

// transformed_bytes(*operands).
template <class B>
int transformed_bytes_entry(const TVMFFIAny* values, int given, TVMFFIAny* result) {
  Call<B> call;
  if (!call.read_operands(values, given)) return raise_last_error();
  return give(result, kTVMFFIInt, B::transformed_bytes(call.extents));
}

}  // namespace binding
}  // namespace cukiln

#define CUKILN_TRANSFORM_EXPORTS(binding_type)                                                                            \
  CUKILN_EXPORT int64_t cukiln_transformed_bytes(const int64_t* extents) { return binding_type::transformed_bytes(extents); } \
  CUKILN_EXPORT int cukiln_transform(void* const* pointers, const int64_t* extents, void* transformed, void* stream) {    \
    const double scalars[binding_type::scalars + 1] = {};                                                                \
    return cukiln::binding::launch_part_here<binding_type>(pointers, extents, nullptr, scalars, nullptr, transformed,    \
                                                           stream, 0, 1);                                                \
  }                                                                                                                       \
  CUKILN_EXPORT int cukiln_launch_transformed(void* const* pointers, const int64_t* extents, const int32_t* launch,      \
                                              const double* scalars, void* workspace, void* transformed, void* stream) {  \
    return cukiln::binding::launch_part_here<binding_type>(pointers, extents, launch, scalars, workspace, transformed,   \
                                                           stream, 1, cukiln::binding::max_launches);                    \
  }                                                                                                                       \
  CUKILN_EXPORT int __tvm_ffi_transform(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {              \
    return cukiln::binding::transform_entry<binding_type>(values, count, result, false);                                 \
  }                                                                                                                       \
  CUKILN_EXPORT int __tvm_ffi_run_transformed(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {        \
    return cukiln::binding::transform_entry<binding_type>(values, count, result, true);                                  \
  }                                                                                                                       \
  CUKILN_EXPORT int __tvm_ffi_transformed_bytes(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {      \
    return cukiln::binding::transformed_bytes_entry<binding_type>(values, count, result);                                \
  }
