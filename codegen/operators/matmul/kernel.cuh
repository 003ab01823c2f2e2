// Matrix multiplication on the CUDA cores: out[m, n] = epilogue(sum over k of A[m, k] * B[k, n]), in fp32.
//
// A block computes a tile_m x tile_n tile of the output. Each step brings a tile_m x tile_k tile of A and a tile_k x
// tile_n tile of B through registers into shared memory, both k-major, so that the inner product reads both with vector
// loads. A thread owns thread_m x thread_n outputs, spread in quads over the tile so that a warp's vector loads of a row
// touch every bank once. For register blocking see Volkov and Demmel, "Benchmarking GPUs to Tune
// Dense Linear Algebra", SC 2008.
#pragma once

namespace cukiln {
namespace matmul {

struct Arguments {
  const float* a;  // stored m x k, or k x m where a_transposed
  const float* b;  // stored k x n, or n x k where b_transposed
  float* out;      // m x n; shares no element with anything read: inputs come through the read-only cache
  int batch, m, n, k;
  int64_t lda, ldb, ldc;                 // elements from one stored row to the next
  int64_t stride_a, stride_b, stride_c;  // elements from one matrix of the batch to the next; 0 repeats a or b
  int raster;                            // order of the tiles: 0 row by row, 1 column by column, g > 1 in bands of g rows
  EpilogueArguments epilogue;
};

#if defined(CUKILN_DEVICE)

__device__ __forceinline__ constexpr bool in_bounds(int index, int extent) { return index < extent; }

__device__ __forceinline__ constexpr int smaller(int a, int b) { return a < b ? a : b; }

// A block's own tile of the output, in tiles, and which matrix of the batch it belongs to.
struct Tile {
  int row, column, matrix;
};

// Blocks that run together should share rows of A and columns of B in L2: bands of `raster` tile rows do that.
template <class C>
__device__ __forceinline__ Tile tile_of_block(const Arguments& arguments) {
  const int tiles_m = (arguments.m - 1) / C::tile_m + 1;
  const int tiles_n = (arguments.n - 1) / C::tile_n + 1;
  const int per_matrix = tiles_m * tiles_n;
  const int matrix = static_cast<int>(blockIdx.x) / per_matrix;
  const int index = static_cast<int>(blockIdx.x) - matrix * per_matrix;
  if (arguments.raster == 0) return Tile{index / tiles_n, index % tiles_n, matrix};
  const int band_rows = arguments.raster == 1 ? tiles_m : arguments.raster;
  const int band = index / (band_rows * tiles_n);
  const int rows = smaller(band_rows, tiles_m - band * band_rows);
  const int in_band = index - band * band_rows * tiles_n;
  return Tile{band * band_rows + in_band % rows, in_band / rows, matrix};
}

// Brings one operand's tile from global memory to shared memory, through registers so that the loads of the next tile
// fly while this one is used. `outer` is the operand's own extent (m for A, n for B) and `stored_k_major` says that a
// stored row runs along it, as shared memory wants it; otherwise a stored row runs along k and is turned on the way.
template <class C, int tile_outer, bool stored_k_major, int align>
struct Loader {
  static constexpr int columns = stored_k_major ? tile_outer : C::tile_k;
  static constexpr int rows = stored_k_major ? C::tile_k : tile_outer;
  static constexpr int vectors_per_row = columns / align;
  static constexpr int vectors = rows * vectors_per_row;
  static constexpr int per_thread = (vectors + C::threads - 1) / C::threads;
  static constexpr bool even = vectors % C::threads == 0;
  static constexpr int pitch = tile_outer + C::padding;
  // Whether the threads take whole rows at a time: then all vectors of a thread lie in one column, rows a constant apart.
  static constexpr bool whole_rows = C::threads % vectors_per_row == 0;
  static constexpr int rows_at_once = whole_rows ? C::threads / vectors_per_row : 0;
  static_assert(columns % align == 0, "a tile row must be a whole number of vectors");

  Vector<float, align> held[per_thread];

  static __device__ __forceinline__ int row_of(int i) {
    const int thread = static_cast<int>(threadIdx.x);
    return whole_rows ? thread / vectors_per_row + i * rows_at_once : (thread + i * C::threads) / vectors_per_row;
  }

  static __device__ __forceinline__ int column_of(int i) {
    const int thread = static_cast<int>(threadIdx.x);
    return (whole_rows ? thread : thread + i * C::threads) % vectors_per_row * align;
  }

  // The thread's first address plus steps that are the same for all threads: else nvcc keeps an address per vector in
  // registers (level 0 of a 1024^3 problem with nvcc 13.2 for sm_90a: 241 registers instead of 168).
  static __device__ __forceinline__ const float* address(const float* source, int64_t pitch_in_memory, int i) {
    if constexpr (whole_rows) return source + row_of(0) * pitch_in_memory + column_of(0) + i * rows_at_once * pitch_in_memory;
    return source + row_of(i) * pitch_in_memory + column_of(i);
  }

  // `source` points at the tile's first element; `outer_left` and `k_left` are how many of each axis exist from there.
  __device__ __forceinline__ void load(const float* source, int64_t pitch_in_memory, int outer_left, int k_left) {
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
      const int row = row_of(i), column = column_of(i);
      const int outer = stored_k_major ? column : row;
      const int k = stored_k_major ? row : column;
      // No bounds check: a vector behind the tile is in bounds or zero, and never stored. Not loading it saves bandwidth.
      bool wanted = even || static_cast<int>(threadIdx.x) + i * C::threads < vectors;
      wanted = wanted && in_bounds(outer, outer_left);  // bounds: load outer
      wanted = wanted && in_bounds(k, k_left);  // bounds: load k
      if (wanted) {
        held[i] = load_global<align>(address(source, pitch_in_memory, i));
      } else {
#pragma unroll
        for (int j = 0; j < align; ++j) held[i].data[j] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void store(float* tile) const {
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
      const int vector = static_cast<int>(threadIdx.x) + i * C::threads;
      const int row = row_of(i), column = column_of(i);
      if (!even && !in_bounds(vector, vectors)) continue;  // bounds: store vector
      if constexpr (stored_k_major) {
        store_shared<align>(tile + row * pitch + column, held[i]);
      } else {
#pragma unroll
        for (int j = 0; j < align; ++j) store_shared<1>(tile + (column + j) * pitch + row, Vector<float, 1>{held[i].data[j]});
      }
    }
  }
};

// A thread's slice of one k-row of a shared tile: `count` elements in quads that are `stride` apart.
template <int count>
struct Fragment {
  static constexpr int quad = count < 4 ? count : 4;
  float data[count];

  __device__ __forceinline__ void load(const float* row, int first, int stride) {
#pragma unroll
    for (int q = 0; q < count / quad; ++q) {
      const Vector<float, quad> part = load_shared<quad>(row + first + q * stride);
#pragma unroll
      for (int i = 0; i < quad; ++i) data[q * quad + i] = part.data[i];
    }
  }
};

template <class C>
struct Block {
  static constexpr int lanes_m = C::warp_m, lanes_n = 32 / C::warp_m;
  static constexpr int threads_m = C::tile_m / C::thread_m, threads_n = C::tile_n / C::thread_n;
  static constexpr int warps_n = threads_n / lanes_n;
  static constexpr int pitch_a = C::tile_m + C::padding, pitch_b = C::tile_n + C::padding;
  static constexpr int stage_floats = C::tile_k * (pitch_a + pitch_b);
  using FragmentA = Fragment<C::thread_m>;
  using FragmentB = Fragment<C::thread_n>;
  // From a thread's quad to its next one, in elements.
  static constexpr int quad_stride_m = threads_m * FragmentA::quad, quad_stride_n = threads_n * FragmentB::quad;

  static_assert(C::threads == threads_m * threads_n, "threads is what the tile and the thread tile make it");
  static_assert(C::tile_m % C::thread_m == 0 && C::tile_n % C::thread_n == 0, "thread tiles must cover the tile");
  static_assert(threads_m % lanes_m == 0 && threads_n % lanes_n == 0, "warps must cover the tile");
  static_assert(C::threads % 32 == 0 && C::threads <= 1024, "a block is 1 to 32 whole warps");
  static_assert(C::tile_k % C::unroll_k == 0, "unrolled steps must cover the tile");
  static_assert(C::fragments == 1 || C::unroll_k % 2 == 0, "two fragment buffers need an even number of unrolled steps");
  static_assert(C::padding % 4 == 0, "rows of shared memory stay aligned to vectors");

  float accumulators[C::thread_m][C::thread_n];
  int first_m, first_n;  // of the thread's first quad, in the tile

  __device__ __forceinline__ Block() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    first_m = (warp / warps_n * lanes_m + lane / lanes_n) * FragmentA::quad;
    first_n = (warp % warps_n * lanes_n + lane % lanes_n) * FragmentB::quad;
#pragma unroll
    for (int i = 0; i < C::thread_m; ++i)
#pragma unroll
      for (int j = 0; j < C::thread_n; ++j) accumulators[i][j] = 0.0f;
  }

  __device__ __forceinline__ void multiply(const FragmentA& a, const FragmentB& b) {
#pragma unroll
    for (int i = 0; i < C::thread_m; ++i)
#pragma unroll
      for (int j = 0; j < C::thread_n; ++j) accumulators[i][j] = fma(a.data[i], b.data[j], accumulators[i][j]);
  }

  // Adds the product of one stage's tiles. With two fragment buffers the next k-row is read while this one multiplies.
  __device__ __forceinline__ void accumulate(const float* tile_a, const float* tile_b) {
    FragmentA a[C::fragments];
    FragmentB b[C::fragments];
    if constexpr (C::fragments == 2) {
      a[0].load(tile_a, first_m, quad_stride_m);
      b[0].load(tile_b, first_n, quad_stride_n);
    }
#pragma unroll 1
    for (int k0 = 0; k0 < C::tile_k; k0 += C::unroll_k) {
#pragma unroll
      for (int i = 0; i < C::unroll_k; ++i) {
        const int k = k0 + i;
        if constexpr (C::fragments == 2) {
          if (k + 1 < C::tile_k) {
            a[(i + 1) % 2].load(tile_a + (k + 1) * pitch_a, first_m, quad_stride_m);
            b[(i + 1) % 2].load(tile_b + (k + 1) * pitch_b, first_n, quad_stride_n);
          }
          multiply(a[i % 2], b[i % 2]);
        } else {
          a[0].load(tile_a + k * pitch_a, first_m, quad_stride_m);
          b[0].load(tile_b + k * pitch_b, first_n, quad_stride_n);
          multiply(a[0], b[0]);
        }
      }
    }
  }

  // Applies the epilogue and writes the thread's outputs, as wide as both the quad and the output's alignment allow.
  __device__ __forceinline__ void write(const Arguments& arguments, const Tile& tile) const {
    constexpr int width = FragmentB::quad < C::align_c ? FragmentB::quad : C::align_c;
#pragma unroll
    for (int i = 0; i < C::thread_m; ++i) {
      const int row = tile.row * C::tile_m + first_m + i / FragmentA::quad * quad_stride_m + i % FragmentA::quad;
      if (!in_bounds(row, arguments.m)) continue;  // bounds: write row
#pragma unroll
      for (int j = 0; j < C::thread_n; j += width) {
        const int column = tile.column * C::tile_n + first_n + j / FragmentB::quad * quad_stride_n + j % FragmentB::quad;
        if (!in_bounds(column, arguments.n)) continue;  // bounds: write column
        Vector<float, width> value;
#pragma unroll
        for (int w = 0; w < width; ++w) value.data[w] = accumulators[i][j + w];
        const int64_t offset = tile.matrix * arguments.stride_c + row * arguments.ldc + column;
        C::Epilogue::apply(value, Position{row, column, offset}, arguments.epilogue);
        store_global<width>(arguments.out + offset, value);
      }
    }
  }
};

// One block's work. Every thread of the block calls it; tiles are never empty because m, n and k are at least 1.
template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  using B = Block<C>;
  const Tile tile = tile_of_block<C>(arguments);
  const int first_row = tile.row * C::tile_m, first_column = tile.column * C::tile_n;
  const float* a = arguments.a + tile.matrix * arguments.stride_a + (C::a_transposed ? first_row : first_row * arguments.lda);
  const float* b = arguments.b + tile.matrix * arguments.stride_b + (C::b_transposed ? first_column * arguments.ldb : first_column);
  const int64_t step_a = C::a_transposed ? C::tile_k * arguments.lda : C::tile_k;
  const int64_t step_b = C::b_transposed ? C::tile_k : C::tile_k * arguments.ldb;
  const int rows_left = arguments.m - first_row, columns_left = arguments.n - first_column;

  float* shared = shared_memory<float>();
  Loader<C, C::tile_m, C::a_transposed, C::align_a> loader_a;
  Loader<C, C::tile_n, !C::b_transposed, C::align_b> loader_b;
  B block;

  loader_a.load(a, arguments.lda, rows_left, arguments.k);
  loader_b.load(b, arguments.ldb, columns_left, arguments.k);
  loader_a.store(shared);
  loader_b.store(shared + C::tile_k * B::pitch_a);
  __syncthreads();  // the first tiles are complete before any thread reads them

  int stage = 0;
#pragma unroll 1
  for (int k_left = arguments.k; k_left > 0; k_left -= C::tile_k) {
    const bool more = k_left > C::tile_k;
    if (more) {
      a += step_a;
      b += step_b;
      loader_a.load(a, arguments.lda, rows_left, k_left - C::tile_k);
      loader_b.load(b, arguments.ldb, columns_left, k_left - C::tile_k);
    }
    const float* tile_a = shared + stage * B::stage_floats;
    block.accumulate(tile_a, tile_a + C::tile_k * B::pitch_a);
    if (more) {
      if constexpr (C::stages == 1) {
        __syncthreads();  // one stage: every thread has read the tiles before they are overwritten
      } else {
        stage ^= 1;
      }
      // Not stage * stage_floats: nvcc 13.2 then loses the alignment and splits a 16-byte store into four.
      float* next = stage ? shared + B::stage_floats : shared;
      loader_a.store(next);
      loader_b.store(next + C::tile_k * B::pitch_a);
      // The next tiles are complete before any thread reads them. With two stages this also keeps a fast warp from
      // overwriting, one step later, what a slow warp still reads.
      __syncthreads();
    }
  }
  block.write(arguments, tile);
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

template <class C>
constexpr uint32_t shared_bytes() {
  return C::stages * C::tile_k * (C::tile_m + C::tile_n + 2 * C::padding) * sizeof(float);
}

// Tile arithmetic adds up to a tile to an extent, and a grid has at most 2^31 - 1 blocks along x.
constexpr int64_t largest_extent = INT32_MAX - 1024;

// As int; 0, which no launch accepts, where it is none or does not fit.
inline int as_extent(int64_t value) { return value < 1 || value > largest_extent ? 0 : static_cast<int>(value); }

// Pointers: a, b, out, then the epilogue's tensors. Extents: batch, m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c.
// Launch: raster. Scalars: those of the epilogue. The workspace is not used.
template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void*) {
  Arguments arguments = {};
  arguments.a = static_cast<const float*>(pointers[0]);
  arguments.b = static_cast<const float*>(pointers[1]);
  arguments.out = static_cast<float*>(pointers[2]);
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
  for (int i = 0; i < C::Epilogue::tensors; ++i) arguments.epilogue.tensors[i] = pointers[3 + i];
  for (int i = 0; i < C::Epilogue::scalars; ++i) arguments.epilogue.scalars[i] = static_cast<float>(scalars[i]);
  return arguments;
}

template <class C>
int64_t workspace_bytes(const int64_t*) {
  return 0;
}

// Thread blocks of a call; 0 where an extent is 0 or the grid would be too large.
template <class C>
uint32_t blocks(int64_t batch, int64_t m, int64_t n) {
  const int64_t per_matrix = ceil_div(m, C::tile_m) * ceil_div(n, C::tile_n);
  return batch < 1 || per_matrix < 1 || per_matrix > largest_extent / batch ? 0 : static_cast<uint32_t>(batch * per_matrix);
}

// Writes the launches of one call and returns how many they are; 0 where the extents are beyond what they can index.
template <class C>
int plan(const Arguments& arguments, Launch* out) {
  const uint32_t grid = blocks<C>(arguments.batch, arguments.m, arguments.n);
  if (grid == 0 || arguments.k == 0) return 0;
  out[0] = Launch{0, {grid, 1, 1}, {C::threads, 1, 1}, shared_bytes<C>()};
  return 1;
}

template <class C>
bool check_epilogue(const TensorView* tensors, const TensorView& out_tensor, const Matrix& out, Complaint complaint) {
  for (int i = 0; i < C::Epilogue::tensors; ++i) {
    const EpilogueTensor kind = C::Epilogue::tensor(i);
    const bool mask = kind == EpilogueTensor::mask;
    const bool vector = kind == EpilogueTensor::bias_m || kind == EpilogueTensor::bias_n;
    const char* name = vector ? "bias" : (mask ? "mask" : "residual");
    const int width = kind == EpilogueTensor::bias_m ? 1 : C::align_c;
    const int size = mask ? 1 : 4;
    const ElementType type = mask ? ElementType::uint8 : ElementType::float32;
    if (!check_pointer(name, tensors[i], type, out_tensor.device, size * width, complaint)) return false;
    const int64_t length = kind == EpilogueTensor::bias_m ? out.rows : out.columns;
    Matrix matrix = {1, 1, length, length, 0};
    if (vector ? !check_vector(name, tensors[i], length, complaint)
               : !read_matrix(name, tensors[i], C::align_c, matrix, complaint) || !same_layout(name, matrix, out, complaint))
      return false;
    if (!check_apart(name, tensors[i], matrix, size, out_tensor, out, complaint)) return false;
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
  Matrix matrices[3];
  for (int i = 0; i < 3; ++i) {
    if (!check_pointer(names[i], tensors[i], ElementType::float32, tensors[0].device, 4 * aligns[i], complaint)) return false;
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
  if (!fits || blocks<C>(out.batch, out.rows, out.columns) == 0)
    CUKILN_REFUSE(complaint, "ValueError: an extent or the number of blocks is over %lld", static_cast<long long>(largest_extent));
  for (int i = 0; i < 2; ++i)
    if (!check_apart(names[i], tensors[i], matrices[i], 4, tensors[2], out, complaint)) return false;
  if (!check_epilogue<C>(tensors + 3, tensors[2], out, complaint)) return false;
  const int64_t values[] = {out.batch, out.rows, out.columns, k, a.pitch, b.pitch, out.pitch, a.stride, b.stride, out.stride};
  for (int i = 0; i < 10; ++i) extents[i] = values[i];
  return true;
}

#endif  // CUKILN_HOST

}  // namespace matmul
}  // namespace cukiln
