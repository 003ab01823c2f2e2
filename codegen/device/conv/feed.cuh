// The two operands of an implicit product for gemm::simt::run and gemm::tensor::run. An operand says where the elements of a tile
// are: `tile_outer`, `align` and `along_k` as the loaders and copiers of stored matrices take them, `next_step()` to the next
// tile_k of k, and
//
//   gathered       for vector i of a thread, of those of `V`, its address(i) and whether it is wanted(i, k_left); next_vector()
//   not gathered   the tile's first() element in a matrix, the pitch() of that, and how many rows or columns are `left`
#pragma once

namespace cukiln {
namespace conv {

#if defined(CUKILN_DEVICE)

template <bool condition, class A, class B> struct Choose { using type = A; };
template <class A, class B> struct Choose<false, A, B> { using type = B; };

namespace simt {

template <class C, class Operand>
struct Loader : gemm::simt::Loader<C, Operand::tile_outer, !Operand::along_k, Operand::align> {
  using Stored = gemm::simt::Loader<C, Operand::tile_outer, !Operand::along_k, Operand::align>;

  __device__ __forceinline__ void load(Operand& operand, int k_left) {
    if constexpr (Operand::gathered) {
      using V = typename Operand::V;
#pragma unroll
      for (int i = 0; i < V::per_thread; ++i) {
        // No bounds check: a vector behind the tile is in bounds or zero, and never stored. Not loading it saves bandwidth.
        const bool in_tile = V::even || V::index(i) < V::count;
        this->held[i] = Vector<typename C::Input, Operand::align>{};
        if (in_tile && operand.wanted(i, k_left)) this->held[i] = load_global<Operand::align>(operand.address(i));
        operand.next_vector();
      }
    } else {
      Stored::load(operand.first(), operand.pitch(), operand.left, k_left);
    }
  }
};

// `First` is loaded first; it is A where `first_is_a`.
template <class C, class First, class Second, bool first_is_a>
struct Feed {
  using LoaderA = Loader<C, typename Choose<first_is_a, First, Second>::type>;
  using LoaderB = Loader<C, typename Choose<first_is_a, Second, First>::type>;

  First first;
  Second second;

  template <class Arguments>
  __device__ __forceinline__ Feed(const Arguments& arguments, const gemm::Tile& tile, const gemm::Share& share)
      : first(arguments, tile, share), second(arguments, tile, share) {}

  __device__ __forceinline__ void load(LoaderA& a, LoaderB& b, int k_left) {
    if constexpr (first_is_a) {
      a.load(first, k_left);
      b.load(second, k_left);
    } else {
      b.load(first, k_left);
      a.load(second, k_left);
    }
  }

  __device__ __forceinline__ void advance() {
    first.next_step();
    second.next_step();
  }
};

}  // namespace simt

namespace tensor {

template <class C, class Operand>
using SharedTile = gemm::tensor::SharedTile<C, Operand::tile_outer, Operand::along_k>;

template <class C, class Operand>
struct Copier : gemm::tensor::Copier<C, SharedTile<C, Operand>, Operand::tile_outer, Operand::along_k, Operand::align> {
  using Stored = gemm::tensor::Copier<C, SharedTile<C, Operand>, Operand::tile_outer, Operand::along_k, Operand::align>;
  using T = typename C::Input;
  static constexpr int align = Operand::align;

  // `k_left` by reference: with one more copy nvcc 13.2 generates other code.
  static __device__ __forceinline__ void start(char* tile, Operand& operand, const int& k_left) {
    if constexpr (Operand::gathered) {
      using V = typename Operand::V;
#pragma unroll
      for (int i = 0; i < V::per_thread; ++i) {
        const bool in_tile = V::even || in_bounds(V::index(i), V::count);  // bounds: gather vector
        if (in_tile) cp_async<align * static_cast<int>(sizeof(T))>(tile + Copier::target(i), operand.address(i), operand.wanted(i, k_left));
        operand.next_vector();
      }
    } else {
      Stored::start(tile, operand.first(), operand.pitch(), operand.left, k_left);
    }
  }

  __device__ __forceinline__ void fetch(Operand& operand, const int& k_left) {
    if constexpr (Operand::gathered) {
      using V = typename Operand::V;
#pragma unroll
      for (int i = 0; i < V::per_thread; ++i) {
        // A vector behind the tile is in bounds or not loaded, and never deposited: not loading it saves bandwidth.
        const bool in_tile = V::even || V::index(i) < V::count;
        this->held[i] = Vector<T, align>{};
        if (in_tile && operand.wanted(i, k_left)) this->held[i] = load_global<align>(operand.address(i));
        operand.next_vector();
      }
    } else {
      Stored::fetch(operand.first(), operand.pitch(), operand.left, k_left);
    }
  }
};

// As simt::Feed.
template <class C, class First, class Second, bool first_is_a>
struct Feed {
  using TileA = SharedTile<C, typename Choose<first_is_a, First, Second>::type>;
  using TileB = SharedTile<C, typename Choose<first_is_a, Second, First>::type>;
  static constexpr int stage_bytes = TileA::bytes + TileB::bytes;
  // Where the two lie in a stage.
  static constexpr int first_bytes = first_is_a ? 0 : TileA::bytes, second_bytes = first_is_a ? TileA::bytes : 0;

  First first;
  Second second;
  int k_left;
  Copier<C, First> first_copier;
  Copier<C, Second> second_copier;

  template <class Arguments>
  __device__ __forceinline__ Feed(const Arguments& arguments, const gemm::Tile& tile, const gemm::Share& share)
      : first(arguments, tile, share), second(arguments, tile, share), k_left(share.end - share.first) {}

  __device__ __forceinline__ void advance() {
    first.next_step();
    second.next_step();
    k_left -= C::tile_k;
  }

  // Every step commits a group, an empty one behind the end of k: so a wait can count steps.
  __device__ __forceinline__ void start(char* stage) {
    if (k_left > 0) {
      Copier<C, First>::start(stage + first_bytes, first, k_left);
      Copier<C, Second>::start(stage + second_bytes, second, k_left);
      advance();
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void fetch() {
    first_copier.fetch(first, k_left);
    second_copier.fetch(second, k_left);
    advance();
  }

  __device__ __forceinline__ void deposit(char* stage) const {
    first_copier.deposit(stage + first_bytes);
    second_copier.deposit(stage + second_bytes);
  }
};

}  // namespace tensor

#endif  // CUKILN_DEVICE

}  // namespace conv
}  // namespace cukiln
