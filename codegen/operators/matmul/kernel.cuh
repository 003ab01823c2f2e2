// The entry points of a matmul kernel and the launch code that calls them, for both ways of computing it.
#pragma once

namespace cukiln {
namespace matmul {

#if defined(CUKILN_DEVICE)

template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  if constexpr (C::tensor_cores) {
    tensor::run<C>(arguments);
  } else {
    simt::run<C>(arguments);
  }
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

template <class C>
constexpr uint32_t shared_bytes() {
  if constexpr (C::tensor_cores) {
    return tensor::shared_bytes<C>();
  } else {
    return simt::shared_bytes<C>();
  }
}

// Tile arithmetic adds up to a tile to an extent, and a grid has at most 2^31 - 1 blocks along x.
constexpr int64_t largest_extent = INT32_MAX - 1024;

// As int; 0, which no launch accepts, where it is none or does not fit.
inline int as_extent(int64_t value) { return value < 1 || value > largest_extent ? 0 : static_cast<int>(value); }

// What launches depend on, as values: g++ compiles the functions that take it once for all kernels of a library, where
// templates over Config would take a quarter of nvcc's time for small kernels.
struct Plan {
  int split, tile_m, tile_n, tile_k, threads, width;  // width: elements of one store
  int static_k;                                       // 0 where any k will do
  int accumulator_bytes;
  uint32_t shared_bytes;
  int epilogue_tensors, epilogue_scalars;
};

template <class C>
constexpr int only_k() {
  if constexpr (C::tensor_cores) return C::static_k;
  return 0;
}

template <class C>
constexpr Plan plan_of = {C::split, C::tile_m, C::tile_n, C::tile_k, C::threads, C::align_c, only_k<C>(),
                          static_cast<int>(sizeof(typename C::Accumulator)), shared_bytes<C>(),
                          C::Epilogue::tensors, C::Epilogue::scalars};

// Slices that a call divides k into: as many as asked, but none empty. A kernel may be called with a smaller k than the
// one that it was tuned for.
inline int slices(const Plan& kernel, int64_t k, int64_t asked) {
  if (kernel.split == split_none || kernel.split == split_stream) return 1;
  const int64_t steps = k < 1 ? 1 : ceil_div(k, kernel.tile_k);
  return static_cast<int>(asked < 1 ? 1 : asked < steps ? asked : steps);
}

// Thread blocks of a call that are not split; 0 where an extent is 0 or the grid would be too large.
inline uint32_t blocks(const Plan& kernel, int64_t batch, int64_t m, int64_t n) {
  const int64_t per_matrix = ceil_div(m, kernel.tile_m) * ceil_div(n, kernel.tile_n);
  return batch < 1 || per_matrix < 1 || per_matrix > largest_extent / batch ? 0 : static_cast<uint32_t>(batch * per_matrix);
}

// Blocks of stream-K: as many as asked, but each with at least one step.
inline int stream_blocks(const Plan& kernel, const int64_t* extents, int64_t asked) {
  if (kernel.split != split_stream) return 0;
  const int64_t tiles = blocks(kernel, extents[0], extents[1], extents[2]);
  const int64_t steps = extents[3] < 1 ? 1 : ceil_div(extents[3], kernel.tile_k);
  const int64_t most = tiles < 1 ? 1 : tiles * steps;
  return static_cast<int>(asked < 1 ? 1 : asked < most ? asked : most);
}

// Pointers: a, b, out, then the epilogue's tensors. Extents: batch, m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c.
// Launch: raster, slices of k, blocks of stream-K. Scalars: those of the epilogue.
inline Arguments bind(const Plan& kernel, void* const* pointers, const int64_t* extents, const int32_t* launch,
                      const double* scalars, void* workspace) {
  Arguments arguments = {};
  arguments.a = pointers[0];
  arguments.b = pointers[1];
  arguments.out = pointers[2];
  arguments.workspace = workspace;
  arguments.batch = as_extent(extents[0]);
  arguments.m = as_extent(extents[1]);
  arguments.n = as_extent(extents[2]);
  arguments.k = as_extent(extents[3]);
  arguments.lda = extents[4];
  arguments.ldb = extents[5];
  arguments.ldc = extents[6];
  arguments.stride_a = extents[7];
  arguments.stride_b = extents[8];
  arguments.stride_c = extents[9];
  arguments.raster = launch[0];
  arguments.slices = slices(kernel, arguments.k, launch[1]);
  arguments.stream_blocks = stream_blocks(kernel, extents, launch[2]);
  for (int i = 0; i < kernel.epilogue_tensors; ++i) arguments.epilogue.tensors[i] = pointers[3 + i];
  for (int i = 0; i < kernel.epilogue_scalars; ++i) arguments.epilogue.scalars[i] = static_cast<float>(scalars[i]);
  return arguments;
}

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace) {
  return bind(plan_of<C>, pointers, extents, launch, scalars, workspace);
}

// Partial sums of every slice; of one where slices add to the same; two tiles for each block of stream-K.
inline int64_t workspace_bytes(const Plan& kernel, const int64_t* extents, const int32_t* launch) {
  if (kernel.split == split_none) return 0;
  if (kernel.split == split_stream)
    return int64_t(2) * stream_blocks(kernel, extents, launch[2]) * kernel.tile_m * kernel.tile_n * kernel.accumulator_bytes;
  const int64_t copies = kernel.split == split_atomic ? 1 : slices(kernel, extents[3], launch[1]);
  return copies * extents[0] * extents[1] * workspace_pitch(extents[2]) * kernel.accumulator_bytes;
}

template <class C>
int64_t workspace_bytes(const int64_t* extents, const int32_t* launch) {
  return workspace_bytes(plan_of<C>, extents, launch);
}

// A launch of one thread for each of `count` items; none where the grid would be too large.
inline int plan_items(int function, int64_t count, Launch* out) {
  const int64_t grid = ceil_div(count, reduce_threads);
  if (grid < 1 || grid > INT32_MAX) return 0;
  *out = Launch{function, {static_cast<uint32_t>(grid), 1, 1}, {reduce_threads, 1, 1}, 0};
  return 1;
}

// Whether the kernel was made for this k, or for any.
inline bool takes_k(const Plan& kernel, int64_t k) { return kernel.static_k == 0 || kernel.static_k == k; }

// Writes the launches of one call and returns how many they are; 0 where the extents are beyond what they can index.
inline int plan(const Plan& kernel, const Arguments& arguments, Launch* out) {
  const uint32_t grid = blocks(kernel, arguments.batch, arguments.m, arguments.n);
  if (grid == 0 || arguments.k == 0 || !takes_k(kernel, arguments.k) || arguments.slices > 65535) return 0;
  const uint32_t threads = static_cast<uint32_t>(kernel.threads);
  Launch main = {0, {grid, static_cast<uint32_t>(arguments.slices), 1}, {threads, 1, 1}, kernel.shared_bytes};
  int count = 0;
  const int64_t rows = int64_t(arguments.batch) * arguments.m;
  if (kernel.split == split_atomic) {
    if (!plan_items(main.function++, rows * workspace_pitch(arguments.n) / 4, &out[count++])) return 0;
  }
  if (kernel.split == split_stream) main.grid[0] = static_cast<uint32_t>(arguments.stream_blocks);
  out[count++] = main;
  if (kernel.split == split_stream) {
    if (!plan_items(main.function + 1, int64_t(grid) * (kernel.tile_m * kernel.tile_n / kernel.width), &out[count++])) return 0;
  } else if (kernel.split != split_none) {
    if (!plan_items(main.function + 1, rows * (arguments.n / kernel.width), &out[count++])) return 0;
  }
  return count;
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  return plan(plan_of<C>, arguments, out);
}

template <class C>
bool check_epilogue(const TensorView* tensors, const TensorView& out_tensor, const Matrix& out, Complaint complaint) {
  for (int i = 0; i < C::Epilogue::tensors; ++i) {
    const EpilogueTensor kind = C::Epilogue::tensor(i);
    const bool mask = kind == EpilogueTensor::mask;
    const bool vector = kind == EpilogueTensor::bias_m || kind == EpilogueTensor::bias_n;
    const char* name = vector ? "bias" : (mask ? "mask" : "residual");
    const int width = kind == EpilogueTensor::bias_m ? 1 : C::align_c;
    const int size = C::Epilogue::element_bytes(i);
    if (!check_pointer(name, tensors[i], C::Epilogue::element(i), out_tensor.device, size * width, complaint)) return false;
    const int64_t length = kind == EpilogueTensor::bias_m ? out.rows : out.columns;
    Matrix matrix = {1, 1, length, length, 0};
    if (vector ? !check_vector(name, tensors[i], length, complaint)
               : !read_matrix(name, tensors[i], C::align_c, matrix, complaint) || !same_layout(name, matrix, out, complaint))
      return false;
    if (!check_apart(name, tensors[i], matrix, size, out_tensor, out, sizeof(typename C::Output), complaint)) return false;
  }
  return true;
}

// Reads a, b, out and the epilogue's tensors into `extents`; false and a sentence where a call cannot be right.
template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  if (count != 3 + C::Epilogue::tensors)
    CUKILN_REFUSE(complaint, "TypeError: %d tensors were given; this kernel takes %d: a, b, out and %d of the epilogue", count,
                  3 + C::Epilogue::tensors, C::Epilogue::tensors);
  const char* const names[] = {"a", "b", "out"};
  const int aligns[] = {C::align_a, C::align_b, C::align_c};
  constexpr ElementType input = element_type<typename C::Input>, output = element_type<typename C::Output>;
  constexpr int sizes[] = {sizeof(typename C::Input), sizeof(typename C::Input), sizeof(typename C::Output)};
  Matrix matrices[3];
  for (int i = 0; i < 3; ++i) {
    const ElementType type = i < 2 ? input : output;
    if (!check_pointer(names[i], tensors[i], type, tensors[0].device, sizes[i] * aligns[i], complaint)) return false;
    if (!read_matrix(names[i], tensors[i], aligns[i], matrices[i], complaint)) return false;
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
  const bool fits = out.rows <= largest_extent && out.columns <= largest_extent && k <= largest_extent;
  if (!fits || blocks(plan_of<C>, out.batch, out.rows, out.columns) == 0)
    CUKILN_REFUSE(complaint, "ValueError: an extent or the number of blocks is over %lld", static_cast<long long>(largest_extent));
  if (!takes_k(plan_of<C>, k))
    CUKILN_REFUSE(complaint, "ValueError: k is %lld; this kernel was made for k = %d alone: look up the kernel of this shape",
                  static_cast<long long>(k), plan_of<C>.static_k);
  for (int i = 0; i < 2; ++i)
    if (!check_apart(names[i], tensors[i], matrices[i], sizes[i], tensors[2], out, sizes[2], complaint)) return false;
  if (!check_epilogue<C>(tensors + 3, tensors[2], out, complaint)) return false;
  const int64_t values[] = {out.batch, out.rows, out.columns, k, a.pitch, b.pitch, out.pitch, a.stride, b.stride, out.stride};
  for (int i = 0; i < 10; ++i) extents[i] = values[i];
  return true;
}

#endif  // CUKILN_HOST

}  // namespace matmul
}  // namespace cukiln
