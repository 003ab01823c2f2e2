// The list of a batch's tiles, longest sequences first, that persistent blocks walk: written on the device, which alone sees the
// tables.
#pragma once

namespace cukiln {
namespace attention {

enum { list_threads = 128 };  // of a block of `list_tiles`

#if defined(CUKILN_DEVICE)

__device__ __forceinline__ int length_of(const int* table, int number) { return entry(table, number + 1) - entry(table, number); }

// One thread per sequence: its tiles stand behind those of all sequences with more keys, or as many and a smaller number. Of a
// sequence the last queries come first, which see the most keys of causal attention. Ahead of the pairs of a sequence and one
// of its tiles stands how many there are.
template <class C>
__device__ __forceinline__ void list_tiles(const ArgumentsOf<C>& arguments) {
  const int own = static_cast<int>(blockIdx.x) * list_threads + static_cast<int>(threadIdx.x);
  const bool listed = in_bounds(own, arguments.batch);  // bounds: listed sequence
  if (!listed) return;
  const int group = packs_heads<C> ? arguments.heads_q / arguments.heads_kv : 1;
  const int keys = length_of(arguments.kv_indptr, own);
  const int tiles = (length_of(arguments.qo_indptr, own) * group + C::tile_q - 1) / C::tile_q;
  int before = 0, all = 0;
#pragma unroll 4
  for (int other = 0; other < arguments.batch; ++other) {
    const int others = length_of(arguments.kv_indptr, other);
    const int further = (length_of(arguments.qo_indptr, other) * group + C::tile_q - 1) / C::tile_q;
    const bool earlier = others > keys || (others == keys && other < own);
    before += earlier ? further : 0;
    all += further;
  }
  for (int i = 0; i < tiles; ++i) store_global<2>(arguments.list + 2 * (1 + before + i), Vector<int, 2>{{own, tiles - 1 - i}});
  if (own == 0) store_global<2>(arguments.list, Vector<int, 2>{{all, 0}});
}

#endif  // CUKILN_DEVICE

}  // namespace attention
}  // namespace cukiln
