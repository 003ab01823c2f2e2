// What any operator's `check` asks of a caller's tensors: false, and a sentence for the caller, where it is not so.
#pragma once

namespace cukiln {

#if defined(CUKILN_HOST)

// One matrix operand of a call: a tensor of rank 2, or rank 3 with the batch first.
struct Matrix {
  int64_t batch, rows, columns, pitch, stride;
};

inline bool read_matrix(const char* name, const TensorView& tensor, int align, Matrix& matrix, Complaint complaint) {
  if (tensor.rank != 2 && tensor.rank != 3)
    CUKILN_REFUSE(complaint, "ValueError: %s has rank %d; rank 2 (rows, columns) or 3 (batch, rows, columns) is allowed", name, tensor.rank);
  const int first = tensor.rank - 2;
  matrix.batch = first ? tensor.shape[0] : 1;
  matrix.rows = tensor.shape[first];
  matrix.columns = tensor.shape[first + 1];
  // The stride of an extent of 1 says nothing: frameworks put anything there.
  matrix.pitch = matrix.rows > 1 ? tensor.strides[first] : matrix.columns;
  matrix.stride = first && matrix.batch > 1 ? tensor.strides[0] : 0;
  if (matrix.batch < 1 || matrix.rows < 1 || matrix.columns < 1)
    CUKILN_REFUSE(complaint, "ValueError: %s is empty; every extent must be at least 1", name);
  if (matrix.columns > 1 && tensor.strides[first + 1] != 1)
    CUKILN_REFUSE(complaint, "ValueError: the last axis of %s has stride %lld; it must be contiguous (stride 1)", name,
                  static_cast<long long>(tensor.strides[first + 1]));
  if (matrix.pitch < matrix.columns || matrix.stride < 0)
    CUKILN_REFUSE(complaint, "ValueError: rows of %s overlap or run backwards (row stride %lld, %lld columns)", name,
                  static_cast<long long>(matrix.pitch), static_cast<long long>(matrix.columns));
  if (matrix.columns % align || matrix.pitch % align || matrix.stride % align)
    CUKILN_REFUSE(complaint,
                  "ValueError: %s has %lld columns, row stride %lld, batch stride %lld; this kernel reads %d elements at "
                  "once, so each must be a multiple of %d: look up the kernel of this shape",
                  name, static_cast<long long>(matrix.columns), static_cast<long long>(matrix.pitch),
                  static_cast<long long>(matrix.stride), align, align);
  return true;
}

// `device` is that of another tensor of the call, which is called `other`.
inline bool check_pointer(const char* name, const TensorView& tensor, ElementType type, int device, int bytes, Complaint complaint,
                          const char* other = "the first tensor") {
  if (tensor.type != type)
    CUKILN_REFUSE(complaint, "TypeError: %s is %s; %s is allowed", name, name_of(tensor.type), name_of(type));
  if (tensor.device < 0) CUKILN_REFUSE(complaint, "ValueError: %s is in host memory; a CUDA tensor is needed", name);
  if (tensor.device != device)
    CUKILN_REFUSE(complaint, "ValueError: %s is on cuda:%d, but %s is on cuda:%d; all operands must share a device", name,
                  tensor.device, other, device);
  if (reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(bytes))
    CUKILN_REFUSE(complaint, "ValueError: the data of %s start at an address that is not a multiple of %d bytes", name, bytes);
  return true;
}

inline bool check_vector(const char* name, const TensorView& tensor, int64_t length, Complaint complaint) {
  if (tensor.rank != 1 || tensor.shape[0] != length || (length > 1 && tensor.strides[0] != 1))
    CUKILN_REFUSE(complaint, "ValueError: %s must be a contiguous vector of %lld elements", name, static_cast<long long>(length));
  return true;
}

// A tensor of any rank, packed; an empty one is.
inline bool check_contiguous(const char* name, const TensorView& tensor, Complaint complaint) {
  int64_t packed = 1;
  for (int axis = 0; axis < tensor.rank; ++axis)
    if (tensor.shape[axis] == 0) return true;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] > 1 && tensor.strides[axis] != packed)
      CUKILN_REFUSE(complaint, "ValueError: %s has stride %lld along axis %d; it must be packed (stride %lld)", name,
                    static_cast<long long>(tensor.strides[axis]), axis, static_cast<long long>(packed));
    packed *= tensor.shape[axis];
  }
  return true;
}

// The axes [first, last) as one: how many elements they have together.
inline int64_t merged_extent(const TensorView& tensor, int first, int last) {
  int64_t extent = 1;
  for (int axis = first; axis < last; ++axis) extent *= tensor.shape[axis];
  return extent;
}

inline Matrix as_row(int64_t elements) { return Matrix{1, 1, elements, elements, 0}; }

inline bool check_same_shape(const char* name, const TensorView& tensor, const char* of, const TensorView& other, Complaint complaint) {
  bool same = tensor.rank == other.rank;
  for (int axis = 0; same && axis < tensor.rank; ++axis) same = tensor.shape[axis] == other.shape[axis];
  if (!same) CUKILN_REFUSE(complaint, "ValueError: %s must have the shape of %s", name, of);
  return true;
}

inline bool same_layout(const char* name, const Matrix& matrix, const Matrix& out, Complaint complaint) {
  if (matrix.batch != out.batch || matrix.rows != out.rows || matrix.columns != out.columns || matrix.pitch != out.pitch ||
      matrix.stride != out.stride)
    CUKILN_REFUSE(complaint, "ValueError: %s must have the shape and the strides of out (%lld x %lld x %lld)", name,
                  static_cast<long long>(out.batch), static_cast<long long>(out.rows), static_cast<long long>(out.columns));
  return true;
}

// Inputs are read through the read-only cache, which needs them unchanged while the kernel runs (PTX ISA 9.0, ld.global.nc),
// so not even an element-wise residual may be overwritten in place. Column slices of one wider tensor share no element. The
// output is called `written`.
inline bool check_apart(const char* name, const TensorView& tensor, const Matrix& matrix, int64_t size, const TensorView& out_tensor,
                        const Matrix& out, int64_t out_size, Complaint complaint, const char* written = "out") {
  const auto span = [](const Matrix& x) { return (x.batch - 1) * x.stride + (x.rows - 1) * x.pitch + x.columns; };
  const int64_t begin = reinterpret_cast<intptr_t>(tensor.data), out_begin = reinterpret_cast<intptr_t>(out_tensor.data);
  if (begin + span(matrix) * size <= out_begin || out_begin + span(out) * out_size <= begin) return true;
  const int64_t pitch = out.pitch * out_size;
  if (matrix.pitch * size == pitch && matrix.stride % matrix.pitch == 0 && out.stride % out.pitch == 0) {
    const int64_t ahead = ((begin - out_begin) % pitch + pitch) % pitch;
    if (ahead >= out.columns * out_size && ahead + matrix.columns * size <= pitch) return true;
  }
  CUKILN_REFUSE(complaint, "ValueError: %s overlaps %s; its memory must be its own (a result cannot be written over an input)", written, name);
}

inline bool agree(const char* what, int64_t first, int64_t second, Complaint complaint) {
  if (first != second)
    CUKILN_REFUSE(complaint, "ValueError: %s: %lld and %lld", what, static_cast<long long>(first), static_cast<long long>(second));
  return true;
}

#endif  // CUKILN_HOST

}  // namespace cukiln
