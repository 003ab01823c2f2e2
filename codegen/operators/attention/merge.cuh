// Keys that are split among blocks: what each of them leaves in the workspace, which attention/merge_rows.cuh merges.
#pragma once

namespace cukiln {
namespace attention {

#if defined(CUKILN_DEVICE)

// The sums of each row as they are, its greatest score and its total.
template <class C, class Rows>
__device__ __forceinline__ void write_partial(const ArgumentsOf<C>& arguments, const Rows& of, const Place<C>& place, Warp<C>& warp) {
  const int heads = (C::ragged ? 1 : arguments.batch) * arguments.heads_q, pitch = workspace_pitch(arguments.head_dim_vo);
  const int64_t rows = int64_t(heads) * arguments.seq_q;
  const int64_t head = int64_t(blockIdx.y) * heads + place.batch * arguments.heads_q + place.head;
  const int64_t first = head * arguments.seq_q + first_query(of) + place.first;
  float* const sums = arguments.workspace + first * pitch;
  float* const weights = arguments.workspace + arguments.splits * rows * pitch + 2 * first;
#pragma unroll
  for (int i = 0; i < Warp<C>::pieces; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = warp.total[i][half];
      total += shuffle_xor(total, 1);
      total += shuffle_xor(total, 2);
      const int row = warp.warp_row + i * 16 + half * 8 + lane() / 4;
      const bool row_exists = in_bounds(place.query(row), of.seq_q);  // bounds: partial row
      if (!row_exists) continue;
      // Rows of a group are fewer than 2^29.
      const int at = packs_heads<C> ? static_cast<int>(place.before(row, 1, arguments.seq_q)) - place.first : row;
      if (lane() % 4 == 0) store_global<2>(weights + 2 * at, Vector<float, 2>{{warp.greatest[i][half], total}});
#pragma unroll
      for (int j = 0; j < C::columns_vo / 8; ++j) {
        const int column = j * 8 + lane() % 4 * 2;
        const bool column_exists = in_bounds(column, arguments.head_dim_vo);  // bounds: partial column
        const Vector<float, 2> pair = {{warp.sums[i][j][half * 2], warp.sums[i][j][half * 2 + 1]}};
        if (column_exists) store_global<2>(sums + int64_t(at) * pitch + column, pair);
      }
    }
}

#endif  // CUKILN_DEVICE

}  // namespace attention
}  // namespace cukiln
