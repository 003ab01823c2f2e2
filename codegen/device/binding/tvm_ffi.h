// The library's tvm-ffi entries, through the C header alone: run, prepare, workspace_bytes. Arguments are checked here.
#pragma once
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

// Weak: the library must load by plain dlopen too, where these are missing. Only tvm-ffi calls the entries that use them.
#pragma weak TVMFFIErrorSetRaisedFromCStr
#pragma weak TVMFFIEnvGetStream

namespace cukiln {
namespace binding {

constexpr int max_rank = 8;
constexpr DLDeviceType kernels_reach = on_gpu ? kDLCUDA : kDLCPU;

// The device's number; -1 where kernels of this library cannot reach its memory.
inline int ordinal_of(const DLDevice& device) {
  const bool reached = device.device_type == kernels_reach || (on_gpu && device.device_type == kDLCUDAManaged);
  return reached ? device.device_id : -1;
}

// Raises what last_error() says: "TypeError: sentence" becomes a TypeError with that sentence.
inline int raise_last_error() {
  char* text = last_error();
  char* colon = strstr(text, ": ");
  if (colon == nullptr) {
    TVMFFIErrorSetRaisedFromCStr("RuntimeError", text);
    return -1;
  }
  *colon = '\0';
  TVMFFIErrorSetRaisedFromCStr(text, colon + 2);
  return -1;
}

inline ElementType from_dlpack(DLDataType type) {
  if (type.lanes != 1) return ElementType::other;
  switch (type.code * 256 + type.bits) {
    case kDLFloat * 256 + 32: return ElementType::float32;
    case kDLFloat * 256 + 16: return ElementType::float16;
    case kDLBfloat * 256 + 16: return ElementType::bfloat16;
    case kDLInt * 256 + 32: return ElementType::int32;
    case kDLInt * 256 + 64: return ElementType::int64;
    case kDLInt * 256 + 8: return ElementType::int8;
    case kDLUInt * 256 + 8:
    case kDLBool * 256 + 8: return ElementType::uint8;
    default: return ElementType::other;
  }
}

inline const DLTensor* as_tensor(const TVMFFIAny& value) {
  if (value.type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>(value.v_ptr);
  if (value.type_index == kTVMFFITensor)
    return reinterpret_cast<const DLTensor*>(reinterpret_cast<const char*>(value.v_obj) + sizeof(TVMFFIObject));
  return nullptr;
}

inline int give(TVMFFIAny* result, int32_t type_index, int64_t value) {
  result->type_index = type_index;
  result->zero_padding = 0;
  result->v_int64 = value;
  return 0;
}

inline bool read_attribute(const TVMFFIAny& value, int index, const char* name, int64_t* out) {
  if (value.type_index != kTVMFFIInt) {
    fail("TypeError: argument %d, %s, must be an integer", index, name);
    return false;
  }
  *out = value.v_int64;
  return true;
}

inline bool read_scalar(const TVMFFIAny& value, int index, double* out) {
  if (value.type_index == kTVMFFIFloat) *out = value.v_float64;
  else if (value.type_index == kTVMFFIInt) *out = static_cast<double>(value.v_int64);
  else {
    fail("TypeError: argument %d must be a number", index);
    return false;
  }
  return true;
}

// The workspace: a tensor, or an address as an integer or an opaque pointer.
inline bool read_workspace(const TVMFFIAny& value, int64_t needed, int device, void** out) {
  if (value.type_index == kTVMFFIOpaquePtr || value.type_index == kTVMFFIInt) {
    *out = value.v_ptr;
    return true;
  }
  const DLTensor* tensor = as_tensor(value);
  if (tensor == nullptr) {
    fail("TypeError: the workspace must be a " CUKILN_TENSOR_WORD " tensor or an address");
    return false;
  }
  int64_t bytes = (tensor->dtype.bits * tensor->dtype.lanes + 7) / 8, elements = 1;
  for (int axis = tensor->ndim - 1; axis >= 0; elements *= tensor->shape[axis--]) {
    if (tensor->strides == nullptr || tensor->shape[axis] == 1 || tensor->strides[axis] == elements) continue;
    fail("ValueError: the workspace is not contiguous");
    return false;
  }
  bytes *= elements;
  if (tensor->device.device_type != kernels_reach || tensor->device.device_id != device || bytes < needed) {
    fail("ValueError: the workspace has %lld bytes; %lld on " CUKILN_DEVICE_WORD ":%d are needed", static_cast<long long>(bytes),
         static_cast<long long>(needed), device);
    return false;
  }
  *out = static_cast<char*>(tensor->data) + tensor->byte_offset;
  return true;
}

// What a call was given: its operands, checked and read into extents, its attributes behind them, and its scalars. DLPack leaves strides out where a
// tensor is contiguous; they are filled in here.
template <class B>
struct Call {
  TensorView views[B::operands];
  void* pointers[B::operands];
  int64_t strides[B::operands][max_rank];
  int64_t extents[B::extents] = {};
  double scalars[B::scalars + 1];
  int count = 0;

  // False, with the reason in last_error(), where the leading tensors are not what the kernel takes.
  bool read_operands(const TVMFFIAny* values, int given) {
    while (count < given && count < B::operands) {
      const DLTensor* tensor = as_tensor(values[count]);
      if (tensor == nullptr) break;
      if (!read_operand(*tensor)) return false;
      ++count;
    }
    return B::check(views, count, extents, Complaint{last_error(), error_size});
  }

  bool read_operand(const DLTensor& tensor) {
    if (tensor.ndim > max_rank) {
      fail("ValueError: operand %d has rank %d; at most %d is allowed", count, tensor.ndim, max_rank);
      return false;
    }
    int64_t stride = 1;
    for (int axis = tensor.ndim - 1; axis >= 0; --axis) {
      strides[count][axis] = tensor.strides ? tensor.strides[axis] : stride;
      stride *= tensor.shape[axis];
    }
    const int device = ordinal_of(tensor.device);
    if (!on_gpu && device < 0) {
      fail("ValueError: operand %d is on a GPU; a library of target cpu takes CPU tensors", count);
      return false;
    }
    void* data = static_cast<char*>(tensor.data) + tensor.byte_offset;
    pointers[count] = data;
    views[count] = TensorView{data, from_dlpack(tensor.dtype), device, tensor.ndim, tensor.shape, strides[count]};
    return true;
  }

  // The numbers of a call, which begin with argument `first`.
  bool read_numbers(const TVMFFIAny* values, int first) {
    for (int i = 0; i < B::attributes; ++i)
      if (!read_attribute(values[first + i], first + i, B::attribute_names[i], &extents[B::extents - B::attributes + i])) return false;
    first += B::attributes;
    for (int i = 0; i < B::scalars; ++i)
      if (!read_scalar(values[first + i], first + i, &scalars[i])) return false;
    return true;
  }
};

// run(*inputs, *outputs[, workspace], *attributes, *scalars) on the stream that tvm-ffi holds for the operands' device.
template <class B>
int run_entry(const TVMFFIAny* values, int given, TVMFFIAny* result) {
  Call<B> call;
  if (!call.read_operands(values, given)) return raise_last_error();
  const int64_t needed = B::workspace_bytes(call.extents, nullptr);
  const int first_number = B::operands + (needed > 0 ? 1 : 0), numbers = B::attributes + B::scalars;
  const int expected = first_number + numbers;
  if (given != expected) {
    fail("TypeError: %d arguments were given; this call takes %d tensors%s, then %d numbers", given, B::operands,
         needed > 0 ? ", the workspace" : "", numbers);
    return raise_last_error();
  }
  const int device = call.views[0].device;
  void* workspace = nullptr;
  if (!call.read_numbers(values, first_number)) return raise_last_error();
  if (needed > 0 && !read_workspace(values[B::operands], needed, device, &workspace)) return raise_last_error();
  void* stream = TVMFFIEnvGetStream(kDLCUDA, device);
  if (launch_on(entry_of<B>, device, call.pointers, call.extents, nullptr, call.scalars, workspace, stream)) return raise_last_error();
  return give(result, kTVMFFINone, 0);
}

// workspace_bytes(*operands), or workspace_bytes(*extents) before any tensor exists.
template <class B>
int workspace_bytes_entry(const TVMFFIAny* values, int given, TVMFFIAny* result) {
  if (given > 0 && values[0].type_index == kTVMFFIInt) {
    constexpr int shown = B::extents - B::attributes;
    int64_t extents[B::extents] = {};
    for (int i = 0; i < given && i < shown; ++i) {
      if (values[i].type_index != kTVMFFIInt) {
        fail("TypeError: extent %d must be an integer", i);
        return raise_last_error();
      }
      extents[i] = values[i].v_int64;
    }
    if (given != shown) {
      fail("TypeError: %d extents were given; this kernel has %d", given, shown);
      return raise_last_error();
    }
    return give(result, kTVMFFIInt, B::workspace_bytes(extents, nullptr));
  }
  Call<B> call;
  if (!call.read_operands(values, given)) return raise_last_error();
  return give(result, kTVMFFIInt, B::workspace_bytes(call.extents, nullptr));
}

// prepare(device): an ordinal or a device.
inline int prepare_entry(const TVMFFIAny* values, int given, TVMFFIAny* result) {
  int64_t device = -1;
  if (given == 1 && values[0].type_index == kTVMFFIInt) device = values[0].v_int64;
  else if (given == 1 && values[0].type_index == kTVMFFIDevice && values[0].v_device.device_type == kernels_reach)
    device = values[0].v_device.device_id;
  else {
    fail("TypeError: prepare takes one argument: a " CUKILN_TENSOR_WORD " device or its ordinal");
    return raise_last_error();
  }
  if (prepare(device)) return raise_last_error();
  return give(result, kTVMFFINone, 0);
}

}  // namespace binding
}  // namespace cukiln

// The entries of a kernel for tvm-ffi, by its Binding.
#define CUKILN_TVM_FFI_EXPORTS(binding_type)                                                                              \
  CUKILN_EXPORT int __tvm_ffi_run(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {                    \
    return cukiln::binding::run_entry<binding_type>(values, count, result);                                              \
  }                                                                                                                       \
  CUKILN_EXPORT int __tvm_ffi_prepare(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {                \
    return cukiln::binding::prepare_entry(values, count, result);                                                        \
  }                                                                                                                       \
  CUKILN_EXPORT int __tvm_ffi_workspace_bytes(void*, const TVMFFIAny* values, int32_t count, TVMFFIAny* result) {        \
    return cukiln::binding::workspace_bytes_entry<binding_type>(values, count, result);                                  \
  }
