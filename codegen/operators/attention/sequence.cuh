// Where the rows of a block's sequence lie, and how many there are: of a dense batch in `Arguments`, of a ragged one in tables
// on the device, which no host reads.
#pragma once

namespace cukiln {
namespace attention {

#if defined(CUKILN_DEVICE)

// A sequence of a ragged batch. Query i sees the keys from i + first_key to before i + end_key, as those of `Arguments` do.
//
// Tiles of a head are numbered through all sequences. A sequence whose queries begin with row b has the numbers from
// b / tile_q + its own number on, up to those of the next: as many as it needs, wherever it begins, and at most one more. Where
// heads are packed, a query is `group` rows.
struct Sequence {
  int number, tile;  // in the batch; of the block, in the sequence
  // Of keys in pages first_kv is the entry of the first page.
  int first_q, seq_q, first_kv, seq_kv, first_key, end_key;

  __device__ __forceinline__ Sequence(const TableArguments& arguments, int numbered, int tile_q, int group) : number(0) {
    // The last sequence whose numbers begin with `numbered` or before is one of `left` from `number` on.
    for (int left = arguments.batch; left > 1;) {
      const int half = left / 2, middle = number + half;
      const int first_number = entry(arguments.qo_indptr, middle) * group / tile_q + middle;
      if (first_number <= numbered) number = middle;
      left -= half;
    }
    read_queries(arguments);
    tile = numbered - first_q * group / tile_q - number;
  }

  // Known by its number, as is the tile in it.
  __device__ __forceinline__ Sequence(const TableArguments& arguments, int known, int tile_of_it) : number(known), tile(tile_of_it) {
    read_queries(arguments);
  }

  __device__ __forceinline__ bool has_query(int query) const { return query < seq_q; }

  __device__ __forceinline__ void read_queries(const TableArguments& arguments) {
    first_q = entry(arguments.qo_indptr, number);
    seq_q = entry(arguments.qo_indptr, number + 1) - first_q;
  }

  template <class C>
  __device__ __forceinline__ void read_keys(const ArgumentsOf<C>& arguments) {
    first_kv = entry(arguments.kv_indptr, number);
    seq_kv = entry(arguments.kv_indptr, number + 1) - first_kv;
    if constexpr (C::page_size > 0) {
      const int full = seq_kv - 1;
      if (full >= 0) seq_kv = full * C::page_size + entry(arguments.kv_last_page_len, number);
    }
    const int diagonal = seq_kv - seq_q;
    first_key = arguments.window_left < 0 ? -seq_q : diagonal - arguments.window_left;
    end_key = arguments.window_right < 0 ? seq_kv : diagonal + arguments.window_right + 1;
  }
};

// Elements before the first query, and before the first key, of the block's sequence.
template <class Place>
__device__ __forceinline__ int64_t before_queries(const Arguments&, const Place& place, const Strides& strides) {
  return place.batch * strides.batch;
}
template <class Place>
__device__ __forceinline__ int64_t before_queries(const Sequence& sequence, const Place&, const Strides& strides) {
  return sequence.first_q * strides.position;
}
template <class Place>
__device__ __forceinline__ int64_t before_keys(const Arguments&, const Place& place, const Strides& strides) {
  return place.batch * strides.batch;
}
template <class Place>
__device__ __forceinline__ int64_t before_keys(const Sequence& sequence, const Place&, const Strides& strides) {
  return sequence.first_kv * strides.position;
}

// The number of the first query among those of a matrix, or of the whole batch.
__device__ __forceinline__ int first_query(const Arguments&) { return 0; }
__device__ __forceinline__ int first_query(const Sequence& sequence) { return sequence.first_q; }

// Where the lse of the tile's `row` is.
template <class Place>
__device__ __forceinline__ float* lse_at(const Arguments& arguments, const Arguments&, const Place& place, int row) {
  const int64_t head = int64_t(place.batch) * arguments.heads_q + place.head;
  if constexpr (Place::packed) {
    return arguments.lse + head * arguments.seq_q + place.before(row, 1, arguments.seq_q);
  } else {
    return arguments.lse + head * arguments.seq_q + place.first + row;
  }
}
template <class Place>
__device__ __forceinline__ float* lse_at(const Arguments& arguments, const Sequence& sequence, const Place& place, int row) {
  if constexpr (Place::packed) {
    const int64_t first = int64_t(sequence.first_q) * arguments.heads_q + place.head;
    return arguments.lse + first + place.before(row, arguments.heads_q, 1);
  } else {
    const int64_t query = sequence.first_q + place.first + row;
    return arguments.lse + query * arguments.heads_q + place.head;
  }
}

#endif  // CUKILN_DEVICE

}  // namespace attention
}  // namespace cukiln
