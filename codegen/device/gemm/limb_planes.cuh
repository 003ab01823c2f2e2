// Operands over Z/2^32 and Z/2^64 that are split into limbs once, ahead of the product (Config::limb_split): `split_limbs`
// writes a matrix of bytes for each limb of each operand, its planes, which run along k whatever the operand's layout is.
// `run` copies bytes, reads fragments by ldmatrix as those of int8 are read, and turns nothing.
//
// Planes lie in the workspace behind the partial sums: those of A, then those of B, matrix by matrix and limb by limb, in rows
// of plane_pitch(k) bytes that are 0 behind k. A matrix that all of a batch share is split once.
#pragma once

namespace cukiln {
namespace gemm {

// Config::limb_split; `limbs_given`: of a part of another algorithm, whose operands are planes.
enum { limbs_fused, limbs_ahead, limbs_given };
template <class C, class = void> constexpr int limb_split_of = limbs_fused;
template <class C> constexpr int limb_split_of<C, typename Named<C::limb_split>::type> = C::limb_split;
template <class C> constexpr bool splits_ahead = limb_split_of<C> == limbs_ahead;
template <class C> constexpr bool reads_planes = limb_split_of<C> != limbs_fused;

enum { plane_vector = 16 };  // bytes that rows of planes are made of

#if defined(CUKILN_DEVICE)
__device__ __forceinline__
#endif
constexpr int64_t plane_pitch(int64_t k) { return (k + plane_vector - 1) / plane_vector * plane_vector; }

#if defined(CUKILN_DEVICE)

// Writes the limbs of plane_vector elements along k, from element `begin` of `k` on; those behind the last are 0. `step`: from one
// element to the next where they are read one by one, else 1. `plane`: bytes from one limb to the next.
template <int limbs, int width, class T>
__device__ __forceinline__ void split_vector(const T* from, int64_t step, int begin, int k, unsigned char* to, int64_t plane) {
  constexpr int words = static_cast<int>(sizeof(T)) / 4;
  unsigned limb_words[4 * words][plane_vector / 4];
#pragma unroll
  for (int group = 0; group < plane_vector / 4; ++group) {
    T elements[4];
#pragma unroll
    for (int i = 0; i < 4; i += width) {
      Vector<T, width> loaded = {};
      const int at = group * 4 + i;
      if (in_bounds(begin + at, k)) loaded = load_global<width>(from + at * step);  // bounds: split k
#pragma unroll
      for (int j = 0; j < width; ++j) elements[i + j] = loaded.data[j];
    }
#pragma unroll
    for (int word = 0; word < words; ++word) {
      unsigned turned[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        turned[i] = static_cast<unsigned>(static_cast<typename UnsignedOf<T>::type>(elements[i]) >> (32 * word));
      transpose_bytes(turned);
#pragma unroll
      for (int limb = 0; limb < 4; ++limb) limb_words[word * 4 + limb][group] = turned[limb];
    }
  }
#pragma unroll
  for (int limb = 0; limb < limbs; ++limb) {
    Vector<unsigned, plane_vector / 4> whole;
#pragma unroll
    for (int group = 0; group < plane_vector / 4; ++group) whole.data[group] = limb_words[limb][group];
    store_global<plane_vector / 4>(reinterpret_cast<unsigned*>(to + limb * plane), whole);
  }
}

// The planes of one operand of a call.
template <class C, bool of_a, class Arguments>
struct Planes {
  using T = typename C::Input;
  static constexpr int limbs = limbs_of<C>;
  static constexpr bool along_k = of_a ? !C::a_transposed : C::b_transposed;
  static constexpr int align = of_a ? C::align_a : C::align_b;
  const T* source;
  int outer, k;
  int64_t stored_pitch, stored_stride, copies, pitch, plane;

  __device__ __forceinline__ explicit Planes(const Arguments& arguments)
      : source(static_cast<const T*>(of_a ? arguments.a : arguments.b)),
        outer(of_a ? arguments.m : arguments.n),
        k(arguments.k),
        stored_pitch(of_a ? arguments.lda : arguments.ldb),
        stored_stride(of_a ? arguments.stride_a : arguments.stride_b),
        copies(stored_stride ? arguments.batch : 1),
        pitch(plane_pitch(k)),
        plane(outer * pitch) {}

  __device__ __forceinline__ int64_t bytes() const { return copies * limbs * plane; }
  // Of a matrix of the batch; `first`: where those of the first matrix begin.
  template <class Byte>
  __device__ __forceinline__ Byte* of_matrix(Byte* first, int64_t matrix) const {
    return first + (stored_stride ? matrix * limbs * plane : 0);
  }

  // One of bytes() / limbs / plane_vector items: so many elements along k. Neighbouring items have neighbouring elements in
  // memory.
  __device__ __forceinline__ void split(unsigned char* first, int64_t item) const {
    const int64_t vectors = pitch / plane_vector, per_matrix = vectors * outer;
    const int64_t matrix = item / per_matrix, within = item - matrix * per_matrix;
    const int64_t row = along_k ? within / vectors : within % outer;
    const int begin = static_cast<int>(along_k ? within % vectors : within / outer) * plane_vector;
    const T* const from = source + matrix * stored_stride + (along_k ? row * stored_pitch + begin : begin * stored_pitch + row);
    unsigned char* const to = of_matrix(first, matrix) + row * pitch + begin;
    split_vector<limbs, along_k ? align : 1>(from, along_k ? 1 : stored_pitch, begin, k, to, plane);
  }
};

// Where the planes of A begin: behind the partial sums.
template <class C, class Arguments>
__device__ __forceinline__ unsigned char* planes_of(const Arguments& arguments) {
  const int64_t slices = C::split == split_none ? 0 : arguments.slices;
  const int64_t sums = slices * arguments.batch * arguments.m * workspace_pitch(arguments.n);
  return static_cast<unsigned char*>(arguments.workspace) + sums * static_cast<int>(sizeof(typename C::Accumulator));
}

// One thread for each item of A, then of B.
template <class C, class Arguments>
__device__ __forceinline__ void split_limbs(const Arguments& arguments) {
  using A = Planes<C, true, Arguments>;
  const A a(arguments);
  const Planes<C, false, Arguments> b(arguments);
  constexpr int per_item = A::limbs * plane_vector;
  unsigned char* const first = planes_of<C>(arguments);
  const int64_t index = int64_t(blockIdx.x) * reduce_threads + threadIdx.x, of_a = a.bytes() / per_item;
  if (index < of_a) {
    a.split(first, index);
  } else if (in_bounds(index, of_a + b.bytes() / per_item)) {  // bounds: split item
    b.split(first + a.bytes(), index - of_a);
  }
}

namespace tensor {

template <class C>
struct Bytes : C {
  using Input = unsigned char;
};

// A stage's part of an operand: of each limb a tile of bytes.
template <class C, int tile_outer>
struct PlaneTile {
  using Plane = SharedTile<Bytes<C>, tile_outer, true>;
  static constexpr int limbs = limbs_of<C>, bytes = limbs * Plane::bytes;
  using V = Vectors<C, limbs * tile_outer, C::tile_k, plane_vector>;
  // A thread's vectors are a number of rows apart that leaves the swizzle as it is: in every so many limbs, or parts of one.
  static constexpr int apart = V::rows_at_once, parts = apart < tile_outer ? tile_outer / apart : 1;
  static constexpr int limbs_apart = apart < tile_outer ? 1 : apart / tile_outer;
  static_assert(apart % 8 == 0 && apart * parts == limbs_apart * tile_outer, "threads divide the rows of planes evenly");

  // Of this thread's first vector.
  static __device__ __forceinline__ int limb() { return V::row(0) / tile_outer; }
  static __device__ __forceinline__ int outer() { return V::row(0) % tile_outer; }
  static __device__ __forceinline__ int k() { return V::column(0); }
  static __device__ __forceinline__ int target() {
    const int of_limb = limb(), row = outer();
    const int swizzled = k() / chunk_bytes ^ Plane::swizzle(row);  // swizzle: copy plane
    return of_limb * Plane::bytes + Plane::at(row, swizzled);
  }

  // `source` points at the first limb's first byte of the tile, `plane` bytes before the next limb's.
  static __device__ __forceinline__ void start(char* tile, const unsigned char* source, int64_t pitch, int64_t plane, int outer_left, int k_left) {
    char* const to = tile + target();
    const bool k_exists = in_bounds(k(), k_left);  // bounds: copy plane k
    const unsigned char* const from = source + limb() * plane + outer() * pitch + k();
#pragma unroll
    for (int i = 0; i < V::per_thread; ++i) {
      if (!V::even && !in_bounds(V::index(i), V::count)) continue;  // bounds: copy plane vector
      const int further = i / parts * limbs_apart, rows = i % parts * apart;
      const bool outer_exists = in_bounds(outer() + rows, outer_left);  // bounds: copy plane outer
      cp_async<plane_vector>(to + further * Plane::bytes + rows * Plane::row_bytes, from + further * plane + rows * pitch, outer_exists && k_exists);
    }
  }
};

// Both operands' planes as they stream by: every call moves on by one step of tile_k.
template <class C>
struct PlaneFeed {
  using TileA = PlaneTile<C, C::tile_m>;
  using TileB = PlaneTile<C, C::tile_n>;
  static constexpr int stage_bytes = TileA::bytes + TileB::bytes;
  static_assert(C::copy == copy_cp_async, "planes have no other copy");

  const unsigned char *a, *b;
  int64_t pitch, plane_a, plane_b;
  int rows_left, columns_left, k_left;  // along k with the zeros behind

  template <class Arguments>
  __device__ __forceinline__ PlaneFeed(const Arguments& arguments, const Tile& tile, const Share& share)
      : k_left(static_cast<int>(plane_pitch(share.end)) - share.first) {
    const Planes<C, true, Arguments> of_a(arguments);
    const Planes<C, false, Arguments> of_b(arguments);
    const int row = tile.row * C::tile_m, column = tile.column * C::tile_n;
    pitch = of_a.pitch;
    plane_a = of_a.plane;
    plane_b = of_b.plane;
    rows_left = of_a.outer - row;
    columns_left = of_b.outer - column;
    if constexpr (splits_ahead<C>) {
      unsigned char* const first = planes_of<C>(arguments);
      a = of_a.of_matrix(first, tile.matrix) + row * pitch + share.first;
      b = of_b.of_matrix(first + of_a.bytes(), tile.matrix) + column * pitch + share.first;
    } else {
      a = of_a.of_matrix(static_cast<const unsigned char*>(arguments.a), tile.matrix) + row * pitch + share.first;
      b = of_b.of_matrix(static_cast<const unsigned char*>(arguments.b), tile.matrix) + column * pitch + share.first;
    }
  }

  // As of stored matrices, an empty group behind the end of k.
  __device__ __forceinline__ void start(char* stage) {
    if (k_left > 0) {
      TileA::start(stage, a, pitch, plane_a, rows_left, k_left);
      TileB::start(stage + TileA::bytes, b, pitch, plane_b, columns_left, k_left);
      a += C::tile_k;
      b += C::tile_k;
      k_left -= C::tile_k;
    }
    cp_async_commit();
  }
};

// As FragmentReader reads bytes, limb by limb; of B two limbs at a time, 8 columns of each.
template <class C, int tile_outer, int limbs, bool of_a>
struct LimbReader<PlaneTile<C, tile_outer>, limbs, of_a> {
  using Plane = typename PlaneTile<C, tile_outer>::Plane;
  int offset;

  __device__ __forceinline__ explicit LimbReader(int first) {
    const int lane = static_cast<int>(threadIdx.x) % 32, middle = lane / 8 % 2, high = lane / 16;
    const int row = first + lane % 8 + (of_a ? 8 * middle : 0);
    const int swizzled = (of_a ? high : middle) ^ Plane::swizzle(row);  // swizzle: planes
    offset = Plane::at(row, swizzled) + (of_a ? 0 : high * Plane::bytes);
  }

  template <int words>
  __device__ __forceinline__ void fragments(unsigned (&out)[limbs][words], const char* tile, int outer, int k_step) const {
    static_assert(words == (of_a ? 4 : 2), "16 rows of A, 8 columns of B");
    const char* const source = tile + outer * Plane::row_bytes + (offset ^ k_step * step_bytes);
    constexpr int at_once = of_a ? 1 : 2;
#pragma unroll
    for (int limb = 0; limb + at_once <= limbs; limb += at_once) {
      unsigned read[4];
      ldmatrix<4>(read, source + limb * Plane::bytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[limb + i / words][i % words] = read[i];
    }
    if constexpr (limbs % at_once != 0) {
      // Of the upper lanes too the address is one of the tile, though nothing there is read.
      const int within = static_cast<int>(threadIdx.x) % 32 / 16 * Plane::bytes;
      ldmatrix<2>(out[limbs - 1], source + (limbs - 1) * Plane::bytes - within);
    }
  }
};

// What brings tiles of stored matrices in.
template <class C, bool planes = reads_planes<C>> struct StoredFeed { using type = Feed<C>; };
template <class C> struct StoredFeed<C, true> { using type = PlaneFeed<C>; };

}  // namespace tensor

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

// Of a stage in shared memory.
template <class C>
constexpr uint32_t plane_stage_bytes() {
  return limbs_of<C> * (C::tile_m + C::tile_n) * C::tile_k;
}

// Bytes of the planes of an operand, `outer` rows or columns of length k.
inline int64_t plane_bytes(int limbs, int64_t batch, int64_t outer, int64_t k, int64_t stride) {
  return (stride ? batch : 1) * limbs * outer * plane_pitch(k);
}

#endif  // CUKILN_HOST

}  // namespace gemm
}  // namespace cukiln
