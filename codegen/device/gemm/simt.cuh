// Matrix multiplication on the CUDA cores: in fp32, and over Z/2^32 and Z/2^64.
//
// A block computes a tile_m x tile_n tile of the output. Each step brings a tile_m x tile_k tile of A and a tile_k x
// tile_n tile of B through registers into shared memory, both k-major, so that the inner product reads both with vector
// loads. A thread owns thread_m x thread_n outputs, spread in quads over the tile so that a warp's vector loads of a row
// touch every bank once. For register blocking see Volkov and Demmel, "Benchmarking GPUs to Tune
// Dense Linear Algebra", SC 2008.
#pragma once

namespace cukiln {
namespace gemm {
namespace simt {

#if defined(CUKILN_DEVICE)

// Brings one operand's tile from global memory to shared memory, through registers so that the loads of the next tile
// fly while this one is used. `outer` is the operand's own extent (m for A, n for B) and `stored_k_major` says that a
// stored row runs along it, as a row of shared memory does; otherwise a stored row runs along k and is turned on the way.
template <class C, int tile_outer, bool stored_k_major, int align>
struct Loader {
  using T = typename C::Input;
  using V = Vectors<C, stored_k_major ? C::tile_k : tile_outer, stored_k_major ? tile_outer : C::tile_k, align>;
  static constexpr int pitch = tile_outer + C::padding;

  Vector<T, align> held[V::per_thread];

  // `source` points at the tile's first element; `outer_left` and `k_left` are how many of each axis exist from there.
  __device__ __forceinline__ void load(const T* source, int64_t pitch_in_memory, int outer_left, int k_left) {
#pragma unroll
    for (int i = 0; i < V::per_thread; ++i) {
      const int row = V::row(i), column = V::column(i);
      const int outer = stored_k_major ? column : row;
      const int k = stored_k_major ? row : column;
      // No bounds check: a vector behind the tile is in bounds or zero, and never stored. Not loading it saves bandwidth.
      bool wanted = V::even || V::index(i) < V::count;
      wanted = wanted && in_bounds(outer, outer_left);  // bounds: load outer
      wanted = wanted && in_bounds(k, k_left);  // bounds: load k
      if (wanted) {
        held[i] = load_global<align>(V::address(source, pitch_in_memory, i));
      } else {
#pragma unroll
        for (int j = 0; j < align; ++j) held[i].data[j] = T(0);
      }
    }
  }

  __device__ __forceinline__ void store(T* tile) const {
#pragma unroll
    for (int i = 0; i < V::per_thread; ++i) {
      const int row = V::row(i), column = V::column(i);
      if (!V::even && !in_bounds(V::index(i), V::count)) continue;  // bounds: store vector
      if constexpr (stored_k_major) {
        store_shared<align>(tile + row * pitch + column, held[i]);
      } else {
#pragma unroll
        for (int j = 0; j < align; ++j) store_shared<1>(tile + (column + j) * pitch + row, Vector<T, 1>{held[i].data[j]});
      }
    }
  }
};

// A thread's slice of one k-row of a shared tile: `count` elements in quads (pairs of int64_t) that are `stride` apart.
template <class T, int count>
struct Fragment {
  static constexpr int widest = 16 / static_cast<int>(sizeof(T)), quad = count < widest ? count : widest;
  T data[count];

  __device__ __forceinline__ void load(const T* row, int first, int stride) {
#pragma unroll
    for (int q = 0; q < count / quad; ++q) {
      const Vector<T, quad> part = load_shared<quad>(row + first + q * stride);
#pragma unroll
      for (int i = 0; i < quad; ++i) data[q * quad + i] = part.data[i];
    }
  }
};

template <class C>
struct Block {
  using T = typename C::Input;
  static constexpr int lanes_m = C::warp_m, lanes_n = 32 / C::warp_m;
  static constexpr int threads_m = C::tile_m / C::thread_m, threads_n = C::tile_n / C::thread_n;
  static constexpr int warps_n = threads_n / lanes_n;
  static constexpr int pitch_a = C::tile_m + C::padding, pitch_b = C::tile_n + C::padding;
  static constexpr int stage_elements = C::tile_k * (pitch_a + pitch_b);
  using FragmentA = Fragment<T, C::thread_m>;
  using FragmentB = Fragment<T, C::thread_n>;
  // From a thread's quad to its next one, in elements.
  static constexpr int quad_stride_m = threads_m * FragmentA::quad, quad_stride_n = threads_n * FragmentB::quad;

  static_assert(C::threads == threads_m * threads_n, "threads is what the tile and the thread tile make it");
  static_assert(C::tile_m % C::thread_m == 0 && C::tile_n % C::thread_n == 0, "thread tiles must cover the tile");
  static_assert(threads_m % lanes_m == 0 && threads_n % lanes_n == 0, "warps must cover the tile");
  static_assert(C::threads % 32 == 0 && C::threads <= 1024, "a block is 1 to 32 whole warps");
  static_assert(C::tile_k % C::unroll_k == 0, "unrolled steps must cover the tile");
  static_assert(C::fragments == 1 || C::unroll_k % 2 == 0, "two fragment buffers need an even number of unrolled steps");
  static_assert(C::split != split_stream, "stream-K is for tensor cores");
  static_assert(C::padding % 4 == 0, "rows of shared memory stay aligned to vectors");

  T accumulators[C::thread_m][C::thread_n];
  // Sums of truncated tiles.
  T totals[truncates_tiles<C>() ? C::thread_m : 1][truncates_tiles<C>() ? C::thread_n : 1];
  int first_m, first_n;  // of the thread's first quad, in the tile

  __device__ __forceinline__ Block() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    first_m = (warp / warps_n * lanes_m + lane / lanes_n) * FragmentA::quad;
    first_n = (warp % warps_n * lanes_n + lane % lanes_n) * FragmentB::quad;
#pragma unroll
    for (int i = 0; i < C::thread_m; ++i)
#pragma unroll
      for (int j = 0; j < C::thread_n; ++j) accumulators[i][j] = T(0);
    if constexpr (truncates_tiles<C>()) {
#pragma unroll
      for (int i = 0; i < C::thread_m; ++i)
#pragma unroll
        for (int j = 0; j < C::thread_n; ++j) totals[i][j] = T(0);
    }
  }

  __device__ __forceinline__ void multiply(const FragmentA& a, const FragmentB& b) {
#pragma unroll
    for (int i = 0; i < C::thread_m; ++i)
#pragma unroll
      for (int j = 0; j < C::thread_n; ++j)
        if constexpr (over_ring<C>) accumulators[i][j] = multiply_add<C>(a.data[i], b.data[j], accumulators[i][j]);
        else accumulators[i][j] = fma(a.data[i], b.data[j], accumulators[i][j]);
  }

  // Where tiles are truncated: adds what this one gave to the totals, and begins the next.
  __device__ __forceinline__ void end_tile() {
#pragma unroll
    for (int i = 0; i < C::thread_m; ++i)
#pragma unroll
      for (int j = 0; j < C::thread_n; ++j) {
        totals[i][j] = plus(totals[i][j], truncated<C>(accumulators[i][j]));
        accumulators[i][j] = T(0);
      }
  }

  // Adds the product of one stage's tiles. With two fragment buffers the next k-row is read while this one multiplies.
  __device__ __forceinline__ void accumulate(const T* tile_a, const T* tile_b) {
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

  // Hands on the thread's sums, as wide as both the quad and the output's alignment allow.
  template <class Arguments>
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
        Vector<T, width> sums;
#pragma unroll
        for (int w = 0; w < width; ++w)
          if constexpr (truncates_tiles<C>()) sums.data[w] = totals[i][j + w];
          else sums.data[w] = accumulators[i][j + w];
        hand_on<C, width>(arguments, tile.matrix, row, column, sums);
      }
    }
  }
};

// Both operands' tiles as they stream by, of stored matrices: `load` brings those of the present step to the loaders'
// registers, `advance` moves on by a step of tile_k.
template <class C, class Arguments>
struct Feed {
  using LoaderA = Loader<C, C::tile_m, C::a_transposed, C::align_a>;
  using LoaderB = Loader<C, C::tile_n, !C::b_transposed, C::align_b>;

  using T = typename C::Input;

  const Arguments& arguments;
  const T *a, *b;
  int64_t step_a, step_b;
  int rows_left, columns_left;

  __device__ __forceinline__ Feed(const Arguments& given, const Tile& tile, const Share& share) : arguments(given) {
    const int first_row = tile.row * C::tile_m, first_column = tile.column * C::tile_n;
    a = static_cast<const T*>(arguments.a) + tile.matrix * arguments.stride_a +
        (C::a_transposed ? first_row + share.first * arguments.lda : first_row * arguments.lda + share.first);
    b = static_cast<const T*>(arguments.b) + tile.matrix * arguments.stride_b +
        (C::b_transposed ? first_column * arguments.ldb + share.first : first_column + share.first * arguments.ldb);
    step_a = C::a_transposed ? C::tile_k * arguments.lda : C::tile_k;
    step_b = C::b_transposed ? C::tile_k : C::tile_k * arguments.ldb;
    rows_left = arguments.m - first_row;
    columns_left = arguments.n - first_column;
  }

  __device__ __forceinline__ void load(LoaderA& loader_a, LoaderB& loader_b, int k_left) const {
    loader_a.load(a, arguments.lda, rows_left, k_left);
    loader_b.load(b, arguments.ldb, columns_left, k_left);
  }

  __device__ __forceinline__ void advance() {
    a += step_a;
    b += step_b;
  }
};

// The product of a tile's rows and columns over a share of k.
template <class C, class Feed, class Arguments>
__device__ __forceinline__ void compute(const Arguments& arguments, const Tile& tile, const Share& share) {
  using B = Block<C>;
  using T = typename C::Input;
  const int length = share.end - share.first;
  Feed feed(arguments, tile, share);

  T* shared = shared_memory<T>();
  typename Feed::LoaderA loader_a;
  typename Feed::LoaderB loader_b;
  B block;

  feed.load(loader_a, loader_b, length);
  loader_a.store(shared);
  loader_b.store(shared + C::tile_k * B::pitch_a);
  __syncthreads();  // the first tiles are complete before any thread reads them

  int stage = 0;
#pragma unroll 1
  for (int k_left = length; k_left > 0; k_left -= C::tile_k) {
    const bool more = k_left > C::tile_k;
    if (more) {
      feed.advance();
      feed.load(loader_a, loader_b, k_left - C::tile_k);
    }
    const T* tile_a = shared + stage * B::stage_elements;
    block.accumulate(tile_a, tile_a + C::tile_k * B::pitch_a);
    if constexpr (truncates_tiles<C>()) block.end_tile();
    if (more) {
      if constexpr (C::stages == 1) {
        __syncthreads();  // one stage: every thread has read the tiles before they are overwritten
      } else {
        stage ^= 1;
      }
      // Not stage * stage_elements: nvcc 13.2 then loses the alignment and splits a 16-byte store into four.
      T* next = stage ? shared + B::stage_elements : shared;
      loader_a.store(next);
      loader_b.store(next + C::tile_k * B::pitch_a);
      // The next tiles are complete before any thread reads them. With two stages this also keeps a fast warp from
      // overwriting, one step later, what a slow warp still reads.
      __syncthreads();
    }
  }
  block.write(arguments, tile);
}

// One block's work. Every thread of the block calls it; tiles are never empty because m, n and k are at least 1.
template <class C, class Feed, class Arguments>
__device__ __forceinline__ void run(const Arguments& arguments) {
  compute<C, Feed>(arguments, tile_at<C>(arguments, static_cast<int>(blockIdx.x)), share_of_block<C>(arguments, arguments.k));
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

template <class C>
constexpr uint32_t shared_bytes() {
  return C::stages * C::tile_k * (C::tile_m + C::tile_n + 2 * C::padding) * sizeof(typename C::Input);
}

#endif  // CUKILN_HOST

}  // namespace simt
}  // namespace gemm
}  // namespace cukiln
