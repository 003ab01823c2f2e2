// Matrix multiplication on tensor cores (mma.sync), for fp16, bf16, tf32 and int8 operands; limbs.cuh has what int32 and
// int64 do in another way.
//
// A block computes a tile_m x tile_n tile of the output; its warps divide the tile among them. Tiles of A and B of depth
// tile_k go through a ring of `stages` in shared memory, filled by cp.async (sm_80 and later) or through registers. The
// unit of the inner loop is a k-step of 32 bytes: 16 halves, 8 floats or 32 bytes of k, which is one mma.sync (two of
// m16n8k8 on sm_75). In these units the fragments of all element types lie alike: for A four 8 x 16-byte matrices, for
// B two for each 8 columns (PTX ISA, "Matrix Fragments for mma.m16n8k16" and its neighbours), so that one ldmatrix.x4
// serves a 16-row piece of A or a 16-column piece of B.
#pragma once

namespace cukiln {
namespace gemm {
namespace tensor {

// Floats between the rows of a warp's exchange buffer beyond its columns: rows 4 apart then start in different banks.
enum { exchange_padding = 8 };

// Config::copy and Config::epilogue_path.
enum { copy_cp_async, copy_registers };
enum { epilogue_direct, epilogue_shared };

#if defined(CUKILN_DEVICE)

constexpr int chunk_bytes = 16;  // what ldmatrix reads per row, and the widest copy
constexpr int step_bytes = 32;   // of k per k-step

template <class C, class Arguments>
__device__ __forceinline__ constexpr int extent_k(const Arguments& arguments) {
  return C::static_k ? C::static_k : arguments.k;
}

// Where an operand's tile lies in shared memory: rows of 16-byte chunks without padding. The chunks of a row are
// permuted by XOR with bits of the row number, so that both the 8 rows that ldmatrix reads at one chunk and the chunks
// that neighbouring threads fill lie in different banks. `along_k`: a row runs along k, as the fragments want it; else
// it runs along m or n, and ldmatrix.trans (16-bit elements) or single words (tf32) turn it on the way to registers.
template <class C, int tile_outer, bool along_k_>
struct SharedTile {
  using T = typename C::Input;
  static constexpr bool along_k = along_k_;
  static constexpr bool by_words = !along_k && sizeof(T) == 4;
  static constexpr int rows = along_k ? tile_outer : C::tile_k;
  static constexpr int row_bytes = (along_k ? C::tile_k : tile_outer) * static_cast<int>(sizeof(T));
  static constexpr int bytes = rows * row_bytes;
  static constexpr int chunks = row_bytes / chunk_bytes;
  static constexpr int rows_per_line = chunks < 8 ? 8 / chunks : 1;  // a line: the 128 bytes of all banks
  static constexpr int mask = (chunks < 8 ? chunks : 8) - 1;
  static_assert((chunks & (chunks - 1)) == 0, "a row is a power of two of chunks");

  // Reads by words touch 4 rows of k and two neighbouring chunks at a time: their rows must differ in a higher bit. Reads
  // of limbs touch 2 rows, in every other chunk of int64_t or in 4 neighbouring ones of int; or every fourth of 16 rows of k.
  static __device__ __forceinline__ constexpr int swizzle(int row) {
    if constexpr (over_ring<C>) return (along_k ? row % 2 * (sizeof(T) == 8 ? 1 : 4) : row / 4 % 4 * 2) & mask;
    return (by_words ? row / rows_per_line * 2 : row / rows_per_line) & mask;
  }
  // Byte offset of a chunk that has been swizzled.
  static __device__ __forceinline__ constexpr int at(int row, int swizzled) { return row * row_bytes + swizzled * chunk_bytes; }
};

// Whether an operand that is stored along m or n stays so in shared memory. Bytes cannot be turned by ldmatrix.
template <class C>
__device__ __forceinline__ constexpr bool lies_along_k(bool stored_along_k) {
  return stored_along_k || sizeof(typename C::Input) == 1;
}

// Copies an operand's tile from global to shared memory, `align` elements at a time: `start` leaves that to cp.async;
// `fetch` and `deposit` go through registers, between which the block can compute.
template <class C, class SharedTile, int tile_outer, bool stored_along_k, int align>
struct Copier {
  using T = typename C::Input;
  using V = Vectors<C, stored_along_k ? tile_outer : C::tile_k, stored_along_k ? C::tile_k : tile_outer, align>;
  static constexpr int per_chunk = chunk_bytes / static_cast<int>(sizeof(T));

  Vector<T, align> held[C::copy == copy_cp_async ? 1 : V::per_thread];

  static __device__ __forceinline__ bool wanted(int i, int outer_left, int k_left) {
    const int outer = stored_along_k ? V::row(i) : V::column(i), k = stored_along_k ? V::column(i) : V::row(i);
    const bool outer_exists = in_bounds(outer, outer_left);  // bounds: copy outer
    const bool k_exists = in_bounds(k, k_left);  // bounds: copy k
    return outer_exists && k_exists;
  }

  static __device__ __forceinline__ int target(int i) {
    const int row = V::row(i), column = V::column(i);
    const int swizzled = column / per_chunk ^ SharedTile::swizzle(row);  // swizzle: copy
    return SharedTile::at(row, swizzled) + column % per_chunk * static_cast<int>(sizeof(T));
  }

  // `source` points at the tile's first element; `outer_left` and `k_left` are how many of each axis exist from there.
  // What does not exist becomes zero.
  static __device__ __forceinline__ void start(char* tile, const T* source, int64_t pitch, int outer_left, int k_left) {
#pragma unroll
    for (int i = 0; i < V::per_thread; ++i) {
      if (!V::even && !in_bounds(V::index(i), V::count)) continue;  // bounds: copy vector
      cp_async<align * static_cast<int>(sizeof(T))>(tile + target(i), V::address(source, pitch, i), wanted(i, outer_left, k_left));
    }
  }

  __device__ __forceinline__ void fetch(const T* source, int64_t pitch, int outer_left, int k_left) {
#pragma unroll
    for (int i = 0; i < V::per_thread; ++i) {
      held[i] = Vector<T, align>{};
      // A vector behind the tile is in bounds or not loaded, and never deposited: not loading it saves bandwidth.
      const bool in_tile = V::even || V::index(i) < V::count;
      if (in_tile && wanted(i, outer_left, k_left)) held[i] = load_global<align>(V::address(source, pitch, i));
    }
  }

  __device__ __forceinline__ void deposit(char* tile) const {
#pragma unroll
    for (int i = 0; i < V::per_thread; ++i) {
      if (!V::even && !in_bounds(V::index(i), V::count)) continue;  // bounds: deposit vector
      store_shared<align>(reinterpret_cast<T*>(tile + target(i)), held[i]);
    }
  }
};

// The copier of bytes that are stored along m or n: it turns squares of 4 x 4 bytes on the way, so that shared memory
// holds them along k. A unit is 4 rows of k by `align` columns; neighbouring threads take neighbouring units along k,
// because those lie in different banks of shared memory.
template <class C, class SharedTile, int tile_outer, int align>
struct TurningCopier {
  static constexpr int units_k = C::tile_k / 4, units = units_k * (tile_outer / align);
  static constexpr int per_thread = (units + C::threads - 1) / C::threads;
  static constexpr bool even = units % C::threads == 0;
  static constexpr int square = align < 4 ? align : 4;
  // Words, not bytes: nvcc 13.2 keeps each byte of an array of bytes in a register of its own.
  static constexpr int words_held = align < 4 ? 1 : align / 4;

  Vector<unsigned, words_held> held[per_thread][4];

  static __device__ __forceinline__ int unit(int i) { return static_cast<int>(threadIdx.x) + i * C::threads; }

  static __device__ __forceinline__ Vector<unsigned, words_held> read(const signed char* source) {
    if constexpr (align < 4) {
      return {{static_cast<unsigned char>(load_global<1>(source).data[0])}};
    } else {
      return load_global<words_held>(reinterpret_cast<const unsigned*>(source));
    }
  }

  __device__ __forceinline__ void fetch(const signed char* source, int64_t pitch, int outer_left, int k_left) {
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
      const int k = unit(i) % units_k * 4, outer = unit(i) / units_k * align;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        held[i][j] = Vector<unsigned, words_held>{};
        const bool outer_exists = (even || unit(i) < units) && in_bounds(outer, outer_left);  // bounds: turn outer
        const bool k_exists = in_bounds(k + j, k_left);  // bounds: turn k
        if (outer_exists && k_exists) held[i][j] = read(source + (k + j) * pitch + outer);
      }
    }
  }

  __device__ __forceinline__ void deposit(char* tile) const {
#pragma unroll
    for (int i = 0; i < per_thread; ++i) {
      if (!even && !in_bounds(unit(i), units)) continue;  // bounds: turn unit
      const int k = unit(i) % units_k * 4, outer = unit(i) / units_k * align;
      // Where several units of k make a line of banks, neighbouring threads have rows a multiple of lines apart: each
      // begins at another row of its square.
      constexpr int rows_per_line = SharedTile::rows_per_line < square ? SharedTile::rows_per_line : square;
      const int turn = unit(i) / units_k % rows_per_line;
#pragma unroll
      for (int first = 0; first < align; first += square) {
        unsigned words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) words[j] = held[i][j].data[first / 4];
        transpose_bytes(words);
        if constexpr (rows_per_line > 1) exchange(words, 1, turn & 1);
        if constexpr (rows_per_line > 2) exchange(words, 2, turn & 2);
#pragma unroll
        for (int column = 0; column < square; ++column) {
          const int row = outer + first + (column ^ turn);
          const int swizzled = k / chunk_bytes ^ SharedTile::swizzle(row);  // swizzle: turn
          store_shared<1>(reinterpret_cast<unsigned*>(tile + SharedTile::at(row, swizzled) + k % chunk_bytes),
                          Vector<unsigned, 1>{{words[column]}});
        }
      }
    }
  }

  // Where `wanted`: words[i] becomes words[i ^ distance].
  static __device__ __forceinline__ void exchange(unsigned (&words)[4], int distance, bool wanted) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const unsigned low = words[i], high = words[i | distance];
      words[i] = wanted ? high : low;
      words[i | distance] = wanted ? low : high;
    }
  }
};

template <class C, class SharedTile, int tile_outer, bool stored_along_k, int align, bool turning>
struct ChooseCopier {
  using type = Copier<C, SharedTile, tile_outer, stored_along_k, align>;
};
template <class C, class SharedTile, int tile_outer, int align>
struct ChooseCopier<C, SharedTile, tile_outer, false, align, true> {
  using type = TurningCopier<C, SharedTile, tile_outer, align>;
};

// Both operands' tiles as they stream by, of stored matrices: every call moves on by one step of tile_k.
template <class C>
struct Feed {
  using T = typename C::Input;
  using TileA = SharedTile<C, C::tile_m, lies_along_k<C>(!C::a_transposed)>;
  using TileB = SharedTile<C, C::tile_n, lies_along_k<C>(C::b_transposed)>;
  using CopierA = typename ChooseCopier<C, TileA, C::tile_m, !C::a_transposed, C::align_a, sizeof(T) == 1>::type;
  using CopierB = typename ChooseCopier<C, TileB, C::tile_n, C::b_transposed, C::align_b, sizeof(T) == 1>::type;
  static constexpr int stage_bytes = TileA::bytes + TileB::bytes;

  const T *a, *b;
  int64_t lda, ldb;
  int rows_left, columns_left, k_left;
  CopierA copier_a;
  CopierB copier_b;

  template <class Arguments>
  __device__ __forceinline__ Feed(const Arguments& arguments, const Tile& tile, const Share& share)
      : lda(arguments.lda), ldb(arguments.ldb), k_left(share.end - share.first) {
    const int row = tile.row * C::tile_m, column = tile.column * C::tile_n;
    rows_left = arguments.m - row;
    columns_left = arguments.n - column;
    a = static_cast<const T*>(arguments.a) + tile.matrix * arguments.stride_a +
        (C::a_transposed ? row + share.first * lda : row * lda + share.first);
    b = static_cast<const T*>(arguments.b) + tile.matrix * arguments.stride_b +
        (C::b_transposed ? column * ldb + share.first : column + share.first * ldb);
  }

  __device__ __forceinline__ void advance() {
    a += C::a_transposed ? C::tile_k * lda : C::tile_k;
    b += C::b_transposed ? C::tile_k : C::tile_k * ldb;
    k_left -= C::tile_k;
  }

  // Every step commits a group, an empty one behind the end of k: so a wait can count steps.
  __device__ __forceinline__ void start(char* stage) {
    if (k_left > 0) {
      CopierA::start(stage, a, lda, rows_left, k_left);
      CopierB::start(stage + TileA::bytes, b, ldb, columns_left, k_left);
      advance();
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void fetch() {
    copier_a.fetch(a, lda, rows_left, k_left);
    copier_b.fetch(b, ldb, columns_left, k_left);
    advance();
  }

  __device__ __forceinline__ void deposit(char* stage) const {
    copier_a.deposit(stage);
    copier_b.deposit(stage + TileA::bytes);
  }
};

// How a warp reads an operand's fragments: 16 rows of A or 16 columns of B by one k-step, as four registers. Of A they
// are the four of an mma in order; of B those of columns 0 to 7 and then those of 8 to 15. A lane's offset is computed
// once; what moves it, the piece and the k-step, only flips bits of the swizzled chunk or adds whole rows.
template <class SharedTile, bool of_a>
struct FragmentReader {
  using T = typename SharedTile::T;
  static constexpr int per_chunk = chunk_bytes / static_cast<int>(sizeof(T));
  static constexpr int step_rows = step_bytes / static_cast<int>(sizeof(T));  // of k, where rows run along m or n
  int offset;

  // `first`: the warp's first row of A, or column of B, in the tile.
  __device__ __forceinline__ explicit FragmentReader(int first) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int low = lane % 8, middle = lane / 8 % 2, high = lane / 16;
    int row, chunk, within = 0;
    if constexpr (SharedTile::along_k) {
      row = first + low + 8 * (of_a ? middle : high);
      chunk = of_a ? high : middle;
    } else if constexpr (!SharedTile::by_words) {
      row = low + 8 * (of_a ? high : middle);
      chunk = first / per_chunk + (of_a ? middle : high);
    } else {
      const int outer = first + lane / 4;
      row = lane % 4;
      chunk = outer / per_chunk;
      within = outer % per_chunk * static_cast<int>(sizeof(T));
    }
    const int swizzled = chunk ^ SharedTile::swizzle(row);  // swizzle: fragment
    offset = SharedTile::at(row, swizzled) + within;
  }

  __device__ __forceinline__ void load(unsigned (&out)[4], const char* tile, int piece, int k_step) const {
    if constexpr (SharedTile::along_k) {
      ldmatrix<4>(out, tile + (offset ^ k_step * step_bytes) + piece * 16 * SharedTile::row_bytes);
    } else if constexpr (!SharedTile::by_words) {
      ldmatrix_trans<4>(out, tile + (offset ^ piece * 2 * chunk_bytes) + k_step * step_rows * SharedTile::row_bytes);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int outer_half = of_a ? i % 2 : i / 2, k_half = of_a ? i / 2 : i % 2;
        const int moved = offset ^ (piece * 4 + outer_half * 2) * chunk_bytes;
        const char* const word = tile + moved + (k_step * step_rows + k_half * 4) * SharedTile::row_bytes;
        out[i] = load_shared<1>(reinterpret_cast<const unsigned*>(word)).data[0];
      }
    }
  }
};

// One k-step for a 16 x 8 piece of the output. A struct, because functions cannot be specialised in part.
template <class T, int mma_k> struct Mma;
template <> struct Mma<Half, 16> {
  static __device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_m16n8k16_f16(d, a, b);
  }
};
template <> struct Mma<Half, 8> {
  static __device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const unsigned first[2] = {a[0], a[1]}, second[2] = {a[2], a[3]};
    mma_m16n8k8_f16(d, first, b[0]);
    mma_m16n8k8_f16(d, second, b[1]);
  }
};
template <> struct Mma<BFloat16, 16> {
  static __device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_m16n8k16_bf16(d, a, b);
  }
};
template <> struct Mma<float, 8> {
  static __device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_m16n8k8_tf32(d, a, b);
  }
};
template <> struct Mma<signed char, 32> {
  static __device__ __forceinline__ void multiply(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    mma_m16n8k32_s8(d, a, b);
  }
};

// Whether operands are fp32 that has not been rounded to tf32 yet (Config::rounded: in memory already).
template <class C, class = void> constexpr bool rounds_operands = is_same<typename C::Input, float>;
template <class C> constexpr bool rounds_operands<C, typename Named<C::rounded>::type> = false;

// A warp's piece of the block's tile: its accumulators and how it reads what they are made of.
template <class C, class Feed, bool by_limbs = over_ring<C>>
struct WarpTile {
  using T = typename C::Input;
  using Accumulator = typename C::Accumulator;
  static constexpr int rows = C::tile_m / C::warps_m, columns = C::tile_n / C::warps_n;
  static constexpr int pieces_m = rows / 16, pieces_n = columns / 16;  // of fragments
  static constexpr int k_steps = C::tile_k * static_cast<int>(sizeof(T)) / step_bytes;
  static_assert(C::threads == 32 * C::warps_m * C::warps_n && C::threads <= 1024, "threads is what the warps make it");
  static_assert(rows % 16 == 0 && columns % 16 == 0, "a warp computes pieces of 16 x 16");
  static_assert(rows * C::warps_m == C::tile_m && columns * C::warps_n == C::tile_n, "warps must cover the tile");
  static_assert(k_steps * step_bytes == C::tile_k * static_cast<int>(sizeof(T)), "tile_k must be whole k-steps");
  static_assert(C::fragments == 1 || k_steps % 2 == 0, "two fragment buffers need an even number of k-steps");

  struct Fragments {
    unsigned a[pieces_m][4], b[pieces_n][4];
  };

  int first_row, first_column;  // in the tile
  FragmentReader<typename Feed::TileA, true> reader_a;
  FragmentReader<typename Feed::TileB, false> reader_b;
  Accumulator sums[pieces_m][2 * pieces_n][4];

  __device__ __forceinline__ WarpTile()
      : first_row(static_cast<int>(threadIdx.x) / 32 / C::warps_n * rows),
        first_column(static_cast<int>(threadIdx.x) / 32 % C::warps_n * columns),
        reader_a(first_row),
        reader_b(first_column) {
#pragma unroll
    for (int i = 0; i < pieces_m; ++i)
#pragma unroll
      for (int j = 0; j < 2 * pieces_n; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) sums[i][j][r] = 0;
  }

  __device__ __forceinline__ void load(Fragments& fragments, const char* stage, int k_step) const {
#pragma unroll
    for (int i = 0; i < pieces_m; ++i) reader_a.load(fragments.a[i], stage, i, k_step);
#pragma unroll
    for (int j = 0; j < pieces_n; ++j) reader_b.load(fragments.b[j], stage + Feed::TileA::bytes, j, k_step);
    if constexpr (rounds_operands<C>) round(fragments);
  }

  static __device__ __forceinline__ void round(Fragments& fragments) {
#pragma unroll
    for (int i = 0; i < pieces_m; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) fragments.a[i][r] = round_to_tf32(fragments.a[i][r]);
#pragma unroll
    for (int j = 0; j < pieces_n; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) fragments.b[j][r] = round_to_tf32(fragments.b[j][r]);
  }

  __device__ __forceinline__ void multiply(const Fragments& fragments) {
#pragma unroll
    for (int i = 0; i < pieces_m; ++i)
#pragma unroll
      for (int j = 0; j < 2 * pieces_n; ++j) {
        const unsigned b[2] = {fragments.b[j / 2][j % 2 * 2], fragments.b[j / 2][j % 2 * 2 + 1]};
        Mma<T, C::mma_k>::multiply(sums[i][j], fragments.a[i], b);
      }
  }

  // Adds the product of one stage's tiles. With two fragment buffers the next k-step is read while this one multiplies.
  __device__ __forceinline__ void accumulate(const char* stage) {
    Fragments fragments[C::fragments];
    if constexpr (C::fragments == 2) load(fragments[0], stage, 0);
#pragma unroll
    for (int k = 0; k < k_steps; ++k) {
      if constexpr (C::fragments == 1) load(fragments[0], stage, k);
      if (C::fragments == 2 && k + 1 < k_steps) load(fragments[(k + 1) % 2], stage, k + 1);
      multiply(fragments[k % C::fragments]);
    }
  }
};

template <class Feed>
__device__ __forceinline__ char* stage_at(char* shared, int stage) {
  return shared + stage * Feed::stage_bytes;
}

__device__ __forceinline__ constexpr int next_of(int stage, int stages) { return stage + 1 == stages ? 0 : stage + 1; }

// cp.async pipeline with one barrier per step: the stage that is filled is the one that all warps left at that barrier.
template <class C, class Feed>
__device__ __forceinline__ void multiply_async(WarpTile<C, Feed>& warp, Feed& feed, char* shared, int steps) {
  static_assert(C::stages >= 2, "a copy needs a stage that is not being read");
#pragma unroll
  for (int i = 0; i < C::stages - 1; ++i) feed.start(stage_at<Feed>(shared, i));  // stage: first fill
  int reading = 0, filling = C::stages - 1;
  if constexpr (C::fragments == 1) {
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      cp_async_wait<C::stages - 2>();  // this step's tiles have landed
      __syncthreads();  // for all threads; and every warp has read the stage that is filled next
      feed.start(stage_at<Feed>(shared, filling));  // stage: fill
      warp.accumulate(stage_at<Feed>(shared, reading));  // stage: read
      filling = next_of(filling, C::stages);
      reading = next_of(reading, C::stages);
    }
  } else {
    // The first fragments of a step are read at the end of the one before, while its last products are computed.
    // Two names, not an array: where k is a constant of one step, nvcc 13.2 puts an array of them in local memory.
    using W = WarpTile<C, Feed>;
    typename W::Fragments even, odd;
    cp_async_wait<C::stages - 2>();  // the first tiles have landed
    __syncthreads();  // for all threads
    warp.load(even, stage_at<Feed>(shared, reading), 0);  // stage: first read
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int k = 0; k < W::k_steps; ++k) {
        if (k == 0) {
          feed.start(stage_at<Feed>(shared, filling));  // stage: fill ahead
          filling = next_of(filling, C::stages);
        }
        if (k + 1 == W::k_steps) {
          reading = next_of(reading, C::stages);
          cp_async_wait<C::stages - 2>();  // the next step's tiles have landed
          __syncthreads();  // for all threads; and every warp has read the stage that is filled next
        }
        // Behind the last step this reads a stage whose values are unused.
        if (k % 2 == 0) {
          warp.load(odd, stage_at<Feed>(shared, reading), k + 1);  // stage: read ahead
          warp.multiply(even);
        } else {
          warp.load(even, stage_at<Feed>(shared, reading), (k + 1) % W::k_steps);  // stage: read ahead, odd
          warp.multiply(odd);
        }
      }
    }
  }
}

// Through registers: the loads of the next tiles fly while this step computes.
template <class C, class Feed>
__device__ __forceinline__ void multiply_registers(WarpTile<C, Feed>& warp, Feed& feed, char* shared, int steps) {
  static_assert(C::stages <= 2, "registers hold one step");
  int stage = 0;
  feed.fetch();
  feed.deposit(stage_at<Feed>(shared, 0));  // stage: first deposit
  __syncthreads();  // the first tiles are complete before any thread reads them
#pragma unroll 1
  for (int step = 1; step <= steps; ++step) {
    const bool more = step < steps;
    if (more) feed.fetch();
    warp.accumulate(stage_at<Feed>(shared, stage));  // stage: read deposited
    if (more) {
      if constexpr (C::stages == 1) {
        __syncthreads();  // one stage: every thread has read the tiles before they are overwritten
      } else {
        stage ^= 1;
      }
      feed.deposit(stage_at<Feed>(shared, stage));  // stage: deposit
      // The next tiles are complete before any thread reads them. With two stages this also keeps a fast warp from
      // overwriting, one step later, what a slow warp still reads.
      __syncthreads();
    }
  }
}

// Hands on `width` sums of a row of the tile, where they exist; or all of them, where the tile is not whole.
template <class C, int width, class Arguments>
__device__ __forceinline__ void hand_on_existing(const Arguments& arguments, const Tile& tile, int row, int column,
                                                 const Vector<typename C::Accumulator, width>& sums) {
  if (C::split == split_stream && tile.slot >= 0) {
    store_partial<width>(slot_at<C>(arguments, tile.slot) + row * C::tile_n + column, sums);
    return;
  }
  row += tile.row * C::tile_m;
  column += tile.column * C::tile_n;
  const bool row_exists = in_bounds(row, arguments.m);  // bounds: write row
  const bool column_exists = in_bounds(column, arguments.n);  // bounds: write column
  if (row_exists && column_exists) hand_on<C, width>(arguments, tile.matrix, row, column, sums);
}

// Straight from the accumulators: a lane has two neighbouring columns of rows 8 apart (PTX ISA, fragment C of m16n8).
template <class C, class W, class Arguments>
__device__ __forceinline__ void write_direct(const Arguments& arguments, const Tile& tile, const W& warp) {
  constexpr int width = C::align_c < 2 ? 1 : 2;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < W::pieces_m; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 2 * W::pieces_n; ++j)
#pragma unroll
        for (int part = 0; part < 2; part += width) {
          Vector<typename C::Accumulator, width> sums;
#pragma unroll
          for (int w = 0; w < width; ++w) sums.data[w] = warp.sums[i][j][half * 2 + part + w];
          const int row = warp.first_row + i * 16 + half * 8 + lane / 4;
          hand_on_existing<C, width>(arguments, tile, row, warp.first_column + j * 8 + lane % 4 * 2 + part, sums);
        }
}

// By way of shared memory, 16 rows at a time and each warp for itself, so that a warp writes whole rows of its tile in
// the widest vectors that the output allows.
template <class C, class W, class Arguments>
__device__ __forceinline__ void write_shared(const Arguments& arguments, const Tile& tile, const W& warp, char* shared) {
  using T = typename C::Accumulator;
  constexpr int pitch = W::columns + exchange_padding;
  // Slices lie in rows of whole 16-byte vectors, whatever the output's alignment is.
  constexpr int width = C::split == split_workspace || C::split == split_atomic ? 4 : C::align_c;
  constexpr int part = width < 4 ? width : 4;
  constexpr int vectors_per_row = W::columns / width, vectors = 16 * vectors_per_row;
  static_assert(vectors % 32 == 0, "every lane writes as many vectors as the others");
  const int lane = static_cast<int>(threadIdx.x) % 32;
  T* const rows = reinterpret_cast<T*>(shared) + static_cast<int>(threadIdx.x) / 32 * 16 * pitch;
  __syncthreads();  // every warp has read the last stage, which this overwrites
#pragma unroll
  for (int i = 0; i < W::pieces_m; ++i) {
    if (i > 0) warp_barrier();  // every lane has read the rows before
#pragma unroll
    for (int j = 0; j < 2 * W::pieces_n; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_shared<2>(rows + (half * 8 + lane / 4) * pitch + j * 8 + lane % 4 * 2,
                        Vector<T, 2>{{warp.sums[i][j][half * 2], warp.sums[i][j][half * 2 + 1]}});
    warp_barrier();  // the rows are complete
#pragma unroll
    for (int first = 0; first < vectors; first += 32) {
      const int vector = first + lane, row = vector / vectors_per_row, column = vector % vectors_per_row * width;
      Vector<T, width> sums;
#pragma unroll
      for (int p = 0; p < width; p += part) {
        const Vector<T, part> loaded = load_shared<part>(rows + row * pitch + column + p);
#pragma unroll
        for (int w = 0; w < part; ++w) sums.data[p + w] = loaded.data[w];
      }
      hand_on_existing<C, width>(arguments, tile, warp.first_row + i * 16 + row, warp.first_column + column, sums);
    }
  }
}

// The product of a tile's rows and columns over a share of k.
template <class C, class Feed, class Arguments>
__device__ __forceinline__ void compute(const Arguments& arguments, const Tile& tile, const Share& share) {
  const int steps = (share.end - share.first - 1) / C::tile_k + 1;
  char* const shared = shared_memory<char>();
  Feed feed(arguments, tile, share);
  WarpTile<C, Feed> warp;
  if constexpr (C::copy == copy_cp_async) {
    multiply_async<C>(warp, feed, shared, steps);
  } else {
    multiply_registers<C>(warp, feed, shared, steps);
  }
  if constexpr (over_ring<C>) warp.finish();
  if constexpr (C::epilogue_path == epilogue_shared) {
    write_shared<C>(arguments, tile, warp, shared);
  } else {
    write_direct<C>(arguments, tile, warp);
  }
}

// One block's work. Every thread of the block calls it; neither tiles nor slices are ever empty.
template <class C, class Feed, class Arguments>
__device__ __forceinline__ void run(const Arguments& arguments) {
  const int k = extent_k<C>(arguments);
  if constexpr (C::split == split_stream) {
    const Stream stream = stream_of<C>(arguments, k);
    const int64_t end = stream.first_step(static_cast<int>(blockIdx.x) + 1);
    for (int64_t at = stream.first_step(static_cast<int>(blockIdx.x)); at < end;) {
      const int place = static_cast<int>(at / stream.steps), first = static_cast<int>(at - int64_t(place) * stream.steps);
      const int last = end - at < stream.steps - first ? first + static_cast<int>(end - at) : stream.steps;
      Tile tile = tile_at<C>(arguments, place);
      if (first > 0 || last < stream.steps) tile.slot = 2 * static_cast<int>(blockIdx.x) + (first == 0);
      compute<C, Feed>(arguments, tile, Share{first * C::tile_k, last == stream.steps ? k : last * C::tile_k});
      at += last - first;
      __syncthreads();  // every warp has left shared memory before the next tile comes in
    }
  } else {
    compute<C, Feed>(arguments, tile_at<C>(arguments, static_cast<int>(blockIdx.x)), share_of_block<C>(arguments, k));
  }
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

template <class C>
constexpr uint32_t shared_bytes() {
  constexpr int ring = C::stages * (C::tile_m + C::tile_n) * C::tile_k * static_cast<int>(sizeof(typename C::Input));
  constexpr int exchange = C::epilogue_path == epilogue_shared ? C::warps_m * C::warps_n * 16 * (C::tile_n / C::warps_n + exchange_padding) * 4 : 0;
  return ring > exchange ? ring : exchange;
}

#endif  // CUKILN_HOST

}  // namespace tensor
}  // namespace gemm
}  // namespace cukiln
