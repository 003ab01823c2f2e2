// The arguments and entry points of a matmul kernel, and the launch code that calls them, for both ways of computing it.
#pragma once

namespace cukiln {
namespace matmul {

struct Arguments {
  const void* a;  // stored m x k, or k x m where a_transposed
  const void* b;  // stored k x n, or n x k where b_transposed
  void* out;      // m x n; shares no element with anything read: inputs come through the read-only cache
  void* workspace;
  int batch, m, n, k;
  int64_t lda, ldb, ldc;                 // elements from one stored row to the next
  int64_t stride_a, stride_b, stride_c;  // elements from one matrix of the batch to the next; 0 repeats a or b
  int raster, slices, stream_blocks;     // see gemm/tile.cuh
  EpilogueArguments epilogue;

#if defined(CUKILN_DEVICE)
  __device__ __forceinline__ Position position(int matrix, int row, int column) const {
    return Position{row, column, matrix * stride_c + row * ldc + column};
  }
#endif
};

#if defined(CUKILN_DEVICE)

using gemm::clear, gemm::reduce, gemm::split_limbs;

template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  gemm::multiply_stored<C>(arguments);
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

inline gemm::Extents read_extents(const int64_t* extents) { return {extents[0], extents[1], extents[2], extents[3]}; }

// Pointers: a, b, the epilogue's tensors, out. Extents: batch, m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c.
// Launch: raster, slices of k, blocks of stream-K. Scalars: those of the epilogue.
inline Arguments bind(const gemm::Plan& kernel, void* const* pointers, const int64_t* extents, const int32_t* launch,
                      const double* scalars, void* workspace) {
  Arguments arguments = {};
  arguments.a = pointers[0];
  arguments.b = pointers[1];
  arguments.out = pointers[2 + kernel.epilogue_tensors];
  arguments.workspace = workspace;
  gemm::bind_product(kernel, read_extents(extents), launch, arguments);
  arguments.lda = extents[4];
  arguments.ldb = extents[5];
  arguments.ldc = extents[6];
  arguments.stride_a = extents[7];
  arguments.stride_b = extents[8];
  arguments.stride_c = extents[9];
  gemm::bind_epilogue(kernel, pointers + 2, scalars, arguments.epilogue);
  return arguments;
}

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace) {
  return bind(gemm::plan_of<C>, pointers, extents, launch, scalars, workspace);
}

template <class C>
int64_t workspace_bytes(const int64_t* extents, const int32_t* launch) {
  const gemm::Plan& kernel = gemm::plan_of<C>;
  const int64_t sums = gemm::workspace_bytes(kernel, read_extents(extents), launch);
  if (!kernel.planes) return sums;
  return sums + gemm::plane_bytes(kernel.planes, extents[0], extents[1], extents[3], extents[7]) +
      gemm::plane_bytes(kernel.planes, extents[0], extents[2], extents[3], extents[8]);
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  return gemm::plan(gemm::plan_of<C>, arguments, out);
}

template <class C>
bool check_epilogue(const TensorView* tensors, const TensorView& out_tensor, const Matrix& out, Complaint complaint) {
  for (int i = 0; i < C::Epilogue::tensors; ++i) {
    const EpilogueTensor kind = C::Epilogue::tensor(i);
    const bool bits = kind == EpilogueTensor::mask_bits;
    const bool vector = kind == EpilogueTensor::bias_m || kind == EpilogueTensor::bias_n;
    const char* name = vector ? "bias" : bits || kind == EpilogueTensor::mask ? "mask" : "residual";
    const int width = bits || kind == EpilogueTensor::bias_m ? 1 : C::align_c;
    const int size = C::Epilogue::element_bytes(i);
    if (!check_pointer(name, tensors[i], C::Epilogue::element(i), out_tensor.device, size * width, complaint, "out")) return false;
    const int64_t length = bits ? ceil_div(out.batch * out.rows * out.columns, 32)
                                : kind == EpilogueTensor::bias_m ? out.rows : out.columns;
    Matrix matrix = {1, 1, length, length, 0};
    if (bits && (out.pitch != out.columns || (out.batch > 1 && out.stride != out.rows * out.columns)))
      CUKILN_REFUSE(complaint, "ValueError: out has gaps between its rows or matrices; a packed mask counts its outputs without any");
    if (vector || bits ? !check_vector(name, tensors[i], length, complaint)
               : !read_matrix(name, tensors[i], C::align_c, matrix, complaint) || !same_layout(name, matrix, out, complaint))
      return false;
    if (!check_apart(name, tensors[i], matrix, size, out_tensor, out, sizeof(typename C::Output), complaint)) return false;
  }
  return true;
}

// Reads a, b, the epilogue's tensors and out into `extents`; false and a sentence where a call cannot be right.
template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  if (count != 3 + C::Epilogue::tensors)
    CUKILN_REFUSE(complaint, "TypeError: %d tensors were given; this kernel takes %d: a, b, %d of the epilogue and out", count,
                  3 + C::Epilogue::tensors, C::Epilogue::tensors);
  const char* const names[] = {"a", "b", "out"};
  const int aligns[] = {C::align_a, C::align_b, C::align_c};
  constexpr ElementType input = element_type<typename C::Input>, output = element_type<typename C::Output>;
  constexpr int sizes[] = {sizeof(typename C::Input), sizeof(typename C::Input), sizeof(typename C::Output)};
  const TensorView* const given[] = {&tensors[0], &tensors[1], &tensors[count - 1]};
  Matrix matrices[3];
  for (int i = 0; i < 3; ++i) {
    const ElementType type = i < 2 ? input : output;
    if (!check_pointer(names[i], *given[i], type, given[0]->device, sizes[i] * aligns[i], complaint, "a")) return false;
    if (!read_matrix(names[i], *given[i], aligns[i], matrices[i], complaint)) return false;
  }
  const Matrix &a = matrices[0], &b = matrices[1], &out = matrices[2];
  const int64_t k = C::a_transposed ? a.rows : a.columns;
  if (!agree("m differs between a and out", C::a_transposed ? a.columns : a.rows, out.rows, complaint)) return false;
  if (!agree("n differs between b and out", C::b_transposed ? b.rows : b.columns, out.columns, complaint)) return false;
  if (!agree("k differs between a and b", k, C::b_transposed ? b.columns : b.rows, complaint)) return false;
  if (a.batch != 1 && !agree("batch differs between a and out", a.batch, out.batch, complaint)) return false;
  if (b.batch != 1 && !agree("batch differs between b and out", b.batch, out.batch, complaint)) return false;
  if (out.batch > 1 && out.stride < out.pitch * (out.rows - 1) + out.columns)
    CUKILN_REFUSE(complaint, "ValueError: matrices of out overlap (batch stride %lld)", static_cast<long long>(out.stride));
  const bool fits = out.rows <= gemm::largest_extent && out.columns <= gemm::largest_extent && k <= gemm::largest_extent;
  if (!fits || gemm::blocks(gemm::plan_of<C>, out.batch, out.rows, out.columns) == 0)
    CUKILN_REFUSE(complaint, "ValueError: an extent or the number of blocks is over %lld", static_cast<long long>(gemm::largest_extent));
  if (gemm::plan_of<C>.longest_k > 0 && k > gemm::plan_of<C>.longest_k)
    CUKILN_REFUSE(complaint, "ValueError: k is %lld; the accumulators of this kernel hold %d: look up the kernel of this shape",
                  static_cast<long long>(k), gemm::plan_of<C>.longest_k);
  if (!gemm::takes_k(gemm::plan_of<C>, k))
    CUKILN_REFUSE(complaint, "ValueError: k is %lld; this kernel was made for k = %d alone: look up the kernel of this shape",
                  static_cast<long long>(k), gemm::plan_of<C>.static_k);
  for (int i = 0; i < 2; ++i)
    if (!check_apart(names[i], *given[i], matrices[i], sizes[i], *given[2], out, sizes[2], complaint)) return false;
  if (!check_epilogue<C>(tensors + 2, *given[2], out, complaint)) return false;
  const int64_t values[] = {out.batch, out.rows, out.columns, k, a.pitch, b.pitch, out.pitch, a.stride, b.stride, out.stride};
  for (int i = 0; i < 10; ++i) extents[i] = values[i];
  return true;
}

#endif  // CUKILN_HOST

}  // namespace matmul
}  // namespace cukiln
