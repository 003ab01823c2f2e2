// Keys and values that lie in pages of a cache: a table has the page of each `page_size` keys of a sequence. Where the pages of
// the next tile lie is read while this one is computed.
#pragma once

namespace cukiln {
namespace attention {

#if defined(CUKILN_DEVICE)

// The pages of the rows that a thread copies of one tile.
template <class C, class Stage>
struct Pages {
  using T = typename C::Input;
  using Copy = typename Stage::Copy;
  // A thread's rows lie in each page of a tile, or each in a page of its own.
  static constexpr bool whole = C::page_size % Copy::rows_at_once == 0;
  static constexpr int apart = whole ? C::page_size : Copy::rows_at_once;  // rows from one number to the next
  static constexpr int count = (C::tile_kv + apart - 1) / apart;
  static_assert(C::page_size % C::tile_kv == 0 || C::tile_kv % C::page_size == 0, "a tile begins with a page or within one");

  const T* base;  // of the cache
  int numbers[count];

  __device__ __forceinline__ void read(const int* table, int begin, int keys) {
    const int first = begin + static_cast<int>(threadIdx.x) / Copy::beside;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int key = first + i * apart;
      const bool listed = in_bounds(key, keys);  // bounds: listed page
      if (listed) numbers[i] = entry(table, key / C::page_size);
    }
  }

  // Row `from_first` behind the thread's first one, which is key `first`.
  __device__ __forceinline__ const T* row(const Strides& strides, int first, int from_first) const {
    const int64_t page = numbers[from_first / apart];
    return base + page * strides.batch + (first + from_first) % C::page_size * strides.position;
  }
};

// As Feed, of a sequence whose keys lie in pages.
template <class C>
struct PagedFeed {
  Pages<C, Keys<C>> k;
  Pages<C, Values<C>> v;
  const int* table;
  int first_key, tiles;

  __device__ __forceinline__ PagedFeed(const PageArguments& given, const Sequence& rows, const Place<C>& place, int first, int count)
      : table(given.kv_indices + rows.first_kv), first_key(first), tiles(count) {
    using T = typename C::Input;
    k.base = static_cast<const T*>(given.k) + place.kv_head * given.of_k.head;
    v.base = static_cast<const T*>(given.v) + place.kv_head * given.of_v.head;
    read(k, rows, 0);
    read(v, rows, 0);
  }
  __device__ __forceinline__ void start_keys(const Arguments& arguments, const Sequence& rows, char* stage, int tile) {
    start(k, arguments.of_k, rows, stage, tile, arguments.head_dim_qk);
  }
  __device__ __forceinline__ void start_values(const Arguments& arguments, const Sequence& rows, char* stage, int tile) {
    start(v, arguments.of_v, rows, stage, tile, arguments.head_dim_vo);
  }

 private:
  __device__ __forceinline__ int begin_of(int tile) const { return first_key + tile * C::tile_kv; }
  template <class Own>
  __device__ __forceinline__ void read(Own& pages, const Sequence& rows, int tile) {
    if (tile < tiles) pages.read(table, begin_of(tile), rows.seq_kv);
  }
  template <class Own>
  __device__ __forceinline__ void start(Own& pages, const Strides& strides, const Sequence& rows, char* stage, int tile, int columns) {
    if (tile < tiles) {
      const int begin = begin_of(tile);
      Own::Copy::start_apart(stage, pages, strides, begin, rows.seq_kv - begin, columns);
      read(pages, rows, tile + 1);
    }
    cp_async_commit();
  }
};

#endif  // CUKILN_DEVICE

}  // namespace attention
}  // namespace cukiln
