// Launch code of every kernel that computes sums of products in tiles: how many blocks, which workspace, which launches.
#pragma once

namespace cukiln {
namespace gemm {

#if defined(CUKILN_HOST)

template <class C>
constexpr uint32_t shared_bytes() {
  if constexpr (reads_planes<C>) {
    return C::stages * plane_stage_bytes<C>();
  } else if constexpr (C::tensor_cores) {
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
  int longest_k = 0;                                  // 0 where none is too long
  int planes = 0;                                     // limbs of an element, of operands that are split ahead
};

template <class C>
constexpr int only_k() {
  if constexpr (C::tensor_cores) return C::static_k;
  return 0;
}

// What the diagonals of limbs hold without carries.
template <class C>
constexpr int longest_k() {
  if constexpr (C::tensor_cores && over_ring<C>)
    return C::chain_k == 0 && C::truncate == truncate_once ? tensor::unchained_k(limbs_of<C>) : 0;
  return 0;
}

template <class C>
constexpr Plan plan_of = {C::split, C::tile_m, C::tile_n, C::tile_k, C::threads, C::align_c, only_k<C>(),
                          static_cast<int>(sizeof(typename C::Accumulator)), shared_bytes<C>(),
                          C::Epilogue::tensors, C::Epilogue::scalars, longest_k<C>(), splits_ahead<C> ? limbs_of<C> : 0};

inline void bind_epilogue(const Plan& kernel, void* const* tensors, const double* scalars, EpilogueArguments& epilogue) {
  for (int i = 0; i < kernel.epilogue_tensors; ++i) epilogue.tensors[i] = tensors[i];
  for (int i = 0; i < kernel.epilogue_scalars; ++i) epilogue.scalars[i] = static_cast<float>(scalars[i]);
}

// The products of a call: `batch` matrices of m x n, sums of length k.
struct Extents {
  int64_t batch, m, n, k;
};

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
inline int stream_blocks(const Plan& kernel, const Extents& extents, int64_t asked) {
  if (kernel.split != split_stream) return 0;
  const int64_t tiles = blocks(kernel, extents.batch, extents.m, extents.n);
  const int64_t steps = extents.k < 1 ? 1 : ceil_div(extents.k, kernel.tile_k);
  const int64_t most = tiles < 1 ? 1 : tiles * steps;
  return static_cast<int>(asked < 1 ? 1 : asked < most ? asked : most);
}

// The product's members of an operator's Arguments; null `launch`: of a kernel that has none of its launch values.
template <class Arguments>
void bind_product(const Plan& kernel, const Extents& extents, const int32_t* launch, Arguments& arguments) {
  arguments.batch = as_extent(extents.batch);
  arguments.m = as_extent(extents.m);
  arguments.n = as_extent(extents.n);
  arguments.k = as_extent(extents.k);
  if (!launch) return;
  arguments.raster = launch[0];
  arguments.slices = slices(kernel, arguments.k, launch[1]);
  arguments.stream_blocks = stream_blocks(kernel, extents, launch[2]);
}

// Partial sums of every slice; of one where slices add to the same; two tiles for each block of stream-K. Launch values:
// raster, slices of k, blocks of stream-K.
inline int64_t workspace_bytes(const Plan& kernel, const Extents& extents, const int32_t* launch) {
  if (kernel.split == split_none) return 0;
  if (kernel.split == split_stream)
    return int64_t(2) * stream_blocks(kernel, extents, launch[2]) * kernel.tile_m * kernel.tile_n * kernel.accumulator_bytes;
  const int64_t copies = kernel.split == split_atomic ? 1 : slices(kernel, extents.k, launch[1]);
  return copies * extents.batch * extents.m * workspace_pitch(extents.n) * kernel.accumulator_bytes;
}

// A launch of one thread for each of `count` items; none where the grid would be too large.
inline int plan_items(int function, int64_t count, Launch* out) {
  const int64_t grid = ceil_div(count, reduce_threads);
  if (grid < 1 || grid > INT32_MAX) return 0;
  *out = Launch{function, {static_cast<uint32_t>(grid), 1, 1}, {reduce_threads, 1, 1}, 0};
  return 1;
}

// Whether the kernel was made for this k, or for any, and its accumulators hold the sum.
inline bool takes_k(const Plan& kernel, int64_t k) {
  return (kernel.static_k == 0 || kernel.static_k == k) && (kernel.longest_k == 0 || k <= kernel.longest_k);
}

// Writes the launches of one call and returns how many they are; 0 where the extents are beyond what they can index.
template <class Arguments>
int plan(const Plan& kernel, const Arguments& arguments, Launch* out) {
  const uint32_t grid = blocks(kernel, arguments.batch, arguments.m, arguments.n);
  if (grid == 0 || arguments.k == 0 || !takes_k(kernel, arguments.k) || arguments.slices > 65535) return 0;
  const uint32_t threads = static_cast<uint32_t>(kernel.threads);
  Launch main = {0, {grid, static_cast<uint32_t>(arguments.slices), 1}, {threads, 1, 1}, kernel.shared_bytes};
  int count = 0;
  const int64_t rows = int64_t(arguments.batch) * arguments.m;
  if (kernel.planes) {
    const int64_t planes = plane_bytes(kernel.planes, arguments.batch, arguments.m, arguments.k, arguments.stride_a) +
        plane_bytes(kernel.planes, arguments.batch, arguments.n, arguments.k, arguments.stride_b);
    if (!plan_items(main.function++, planes / (kernel.planes * plane_vector), &out[count++])) return 0;
  }
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

#endif  // CUKILN_HOST

}  // namespace gemm
}  // namespace cukiln
