// Attention forward: out = softmax(scale Q K^T) V over the keys that a query sees, and the logarithm of the softmax's sum.
//
// A block has tile_q rows, queries of one head or of all that share one of k and v, a warp whole pieces of 16 of them. Tiles of
// tile_kv keys and values go through two rings of `stages` in shared memory, filled by cp.async; of the scores no more exists
// than a warp's of one tile, in registers.
#pragma once

namespace cukiln {
namespace attention {

#if defined(CUKILN_DEVICE)

// Each row is divided by its total, staged in shared memory and written in whole vectors; a warp's rows are its own.
template <class C, class Rows>
__device__ __forceinline__ void write(const Arguments& arguments, const Rows& rows, const Place<C>& place, Warp<C>& warp, char* staged) {
  using T = typename C::Input;
  using OutTile = Tile<C, C::columns_vo>;
#pragma unroll
  for (int i = 0; i < Warp<C>::pieces; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = warp.total[i][half];
      total += shuffle_xor(total, 1);
      total += shuffle_xor(total, 2);
      const float share = total == 0.0f ? 0.0f : 1.0f / total;  // of a query that sees nothing: zeros
      const int row = warp.warp_row + i * 16 + half * 8 + lane() / 4;
      if constexpr (C::lse) {
        const int query = packs_heads<C> ? place.query(row) : place.first + row;
        const bool writes = lane() % 4 == 0 && in_bounds(query, rows.seq_q);  // bounds: lse row
        const float lse = warp.greatest[i][half] + cukiln::log2(total);  // -infinity where nothing is seen
        if (writes) store_global<1>(lse_at(arguments, rows, place, row), Vector<float, 1>{{lse}});
      }
#pragma unroll
      for (int j = 0; j < C::columns_vo / 8; ++j) {
        const unsigned pair = pack_pair<T>(warp.sums[i][j][half * 2] * share, warp.sums[i][j][half * 2 + 1] * share);
        const int swizzled = j ^ OutTile::swizzle(row);  // swizzle: staged out
        store_shared<1>(reinterpret_cast<unsigned*>(staged + OutTile::at(row, swizzled)) + lane() % 4, Vector<unsigned, 1>{{pair}});
      }
    }
  warp_barrier();
  T* const out = static_cast<T*>(arguments.out) + before_queries(rows, place, arguments.of_out) + place.head * arguments.of_out.head;
  constexpr int per_row = C::columns_vo / C::align_out;
#pragma unroll
  for (int i = lane(); i < Warp<C>::rows * per_row; i += 32) {
    const int row = warp.warp_row + i / per_row, column = i % per_row * C::align_out;
    const bool row_exists = in_bounds(packs_heads<C> ? place.query(row) : place.first + row, rows.seq_q);  // bounds: out row
    const bool column_exists = in_bounds(column, arguments.head_dim_vo);  // bounds: out column
    const int swizzled = column / per_chunk ^ OutTile::swizzle(row);  // swizzle: written out
    const T* const source = reinterpret_cast<const T*>(staged + OutTile::at(row, swizzled)) + column % per_chunk;
    const Vector<T, C::align_out> vector = load_shared<C::align_out>(source);
    if (row_exists && column_exists) {
      if constexpr (packs_heads<C>) {
        store_global<C::align_out>(out + place.before(row, arguments.of_out.position, arguments.of_out.head) + column, vector);
      } else {
        store_global<C::align_out>(out + (place.first + row) * arguments.of_out.position + column, vector);
      }
    }
  }
}

// Where the rows of a tile of packed heads lie.
template <class C>
struct PackedQueries {
  const typename C::Input* base;  // the group's first head
  TileRows<true> tile;

  __device__ __forceinline__ const typename C::Input* row(const Strides& strides, int first, int further) const {
    return base + tile.before(first + further, strides.position, strides.head);
  }
};

template <class C, bool pages> struct FeedFrom { using Type = Feed<C>; };
template <class C> struct FeedFrom<C, true> { using Type = PagedFeed<C>; };
template <class C> using FeedOf = typename FeedFrom<C, (C::page_size > 0)>::Type;

// `Rows`: Arguments, or Sequence of a ragged batch.
template <class C, class Rows>
__device__ __forceinline__ void attend(const ArgumentsOf<C>& arguments, const Rows& rows, const Place<C>& place) {
  using T = typename C::Input;
  using QTile = Tile<C, C::columns_qk>;
  using K = Keys<C>;
  using V = Values<C>;
  static_assert(C::stages >= 1, "a ring has a stage");
  char* const q_tile = shared_memory<char>();
  char* const keys = q_tile + (C::q_in == q_in_shared ? q_bytes<C> : 0);
  char* const values = keys + keys_bytes<C>;

  const T* q = static_cast<const T*>(arguments.q) + before_queries(rows, place, arguments.of_q) + place.head * arguments.of_q.head;
  using CopyQ = Copier<C, QTile, C::tile_q>;
  if constexpr (packs_heads<C>) {
    const PackedQueries<C> queries{q, place};
    CopyQ::start_apart(q_tile, queries, arguments.of_q, 0, rows.seq_q * place.group - place.first, arguments.head_dim_qk);
  } else {
    q += place.first * arguments.of_q.position;
    CopyQ::start(q_tile, q, arguments.of_q.position, rows.seq_q - place.first, arguments.head_dim_qk);
  }

  const auto [first_tile, tiles] = tiles_of<C>(arguments, rows, place);
  Warp<C> warp(place);
  // Where Q stays in shared memory it comes with the first keys.
  if constexpr (Warp<C>::holds_q) {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // all of Q has landed
    warp.hold_q(q_tile);
    __syncthreads();  // all warps have read it: the ring may take its place
  }
  FeedOf<C> feed(arguments, rows, place, first_tile * C::tile_kv, tiles);
#pragma unroll
  for (int i = 0; i < C::stages; ++i) {
    feed.start_keys(arguments, rows, stage_at<K>(keys, i), i);  // stage: first keys
    if (i + 1 < C::stages) feed.start_values(arguments, rows, stage_at<V>(values, i), i);  // stage: first values
  }
  // Of keys and values in turn the newest 2 (stages - 1) groups may be under way at each wait. The first stage is 0, which is
  // not known before: what nvcc 13.2 makes of a single stage's constant addresses depends on the other kernels of a file.
  int reading = arguments.seq_q < 1, filling = C::stages - 1;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<2 * (C::stages - 1)>();
    __syncthreads();  // these keys have landed, and all warps have left the values before
    feed.start_values(arguments, rows, stage_at<V>(values, filling), tile + C::stages - 1);  // stage: next values
    warp.score(q_tile, stage_at<K>(keys, reading));  // stage: scored keys
    cp_async_wait<2 * (C::stages - 1)>();
    __syncthreads();  // these values have landed, and all warps have left these keys
    feed.start_keys(arguments, rows, stage_at<K>(keys, reading), C::stages + tile);  // stage: next keys
    if constexpr (C::softcap) warp.cap(arguments);
    const int begin = (first_tile + tile) * C::tile_kv;
    if (warp.needs_mask(rows, begin)) warp.mask(rows, begin);
    warp.weigh(arguments);
    warp.add_values(stage_at<V>(values, reading));  // stage: added values
    filling = reading;
    if constexpr (C::stages > 1) reading = next_of(reading, C::stages);
  }
  if constexpr (splits_keys<C>) {
    write_partial<C>(arguments, rows, place, warp);
  } else {
    // No warp reads keys any more; values may still be read where out takes more room than they leave.
    if constexpr (out_bytes<C> > keys_bytes<C>) __syncthreads();
    write<C>(arguments, rows, place, warp, keys);
  }
}

// Block b takes the entries b, b + walkers, …: a tile of the list with each head, heads side by side.
template <class C>
__device__ __forceinline__ void walk_tiles(const ArgumentsOf<C>& arguments) {
  const unsigned heads = packs_heads<C> ? arguments.heads_kv : arguments.heads_q;
  const unsigned all = entry(arguments.list, 0) * heads;
#pragma unroll 1
  for (unsigned item = blockIdx.x; item < all; item += gridDim.x) {
    const int tile = static_cast<int>(item / heads), head = static_cast<int>(item % heads);
    const Vector<int, 2> listed = load_global<2>(static_cast<const int*>(arguments.list) + 2 * (1 + tile));
    Place<C> place(arguments, head);
    Sequence sequence(arguments, listed.data[0], listed.data[1]);
    place.begin(listed.data[1] * C::tile_q);
    sequence.template read_keys<C>(arguments);
    attend<C>(arguments, sequence, place);
    if constexpr (!Warp<C>::holds_q) cp_async_wait<0>();  // Q of a tile without keys is on its way
    __syncthreads();  // all warps have written out, and read keys and values no more
  }
}

template <class C>
__device__ __forceinline__ void run(const ArgumentsOf<C>& arguments) {
  if constexpr (walks_tiles<C>) {
    walk_tiles<C>(arguments);
    return;
  }
  Place<C> place(arguments);
  if constexpr (C::ragged) {
    Sequence sequence(arguments, place.first / C::tile_q, C::tile_q, place.group);
    place.begin(sequence.tile * C::tile_q);
    if (!sequence.has_query(place.query(0))) return;
    sequence.template read_keys<C>(arguments);
    attend<C>(arguments, sequence, place);
  } else {
    attend<C>(arguments, arguments, place);
  }
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

// What launches depend on, as values: non-template functions take it, so that g++ compiles them once for all kernels.
struct Plan {
  int tile_q, tile_kv, threads, shared_bytes, columns_qk, columns_vo, align, align_out, page_size;
  bool softcap, lse, heads_first, ragged, splits_keys, packs_heads, walks_tiles;
  ElementType type;
};

template <class C>
constexpr Plan plan_of = {C::tile_q, C::tile_kv, 32 * C::warps, shared_bytes<C>, C::columns_qk, C::columns_vo, C::align,
                          C::align_out, C::page_size, C::softcap, C::lse, C::heads_first, C::ragged, splits_keys<C>, packs_heads<C>,
                          walks_tiles<C>, element_type<typename C::Input>};

// Positions are indices of two of them and a tile, in 32 bits.
constexpr int64_t longest = int64_t{1} << 29, largest_extent = INT32_MAX - 1024;
constexpr int64_t largest_group = 1 << 15;  // of packed heads: see TileRows
constexpr int64_t most_walked = 4096;       // sequences, of which each is compared with all
constexpr double log2_of_e = 1.4426950408889634;

inline int64_t clipped(int64_t value, int64_t least, int64_t most) { return value < least ? least : value > most ? most : value; }

// Where the outputs are among the pointers and the tensors of a call: behind q, k, v and the tables of a ragged batch.
inline int first_output(const Plan& kernel) { return kernel.page_size ? 7 : kernel.ragged ? 5 : 3; }
constexpr const char* table_names[] = {"qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"};

// Rows of a tile: of packed heads all of a group.
inline int64_t rows_of_query(const Plan& kernel, int64_t heads_q, int64_t heads_kv) {
  return kernel.packs_heads && heads_kv > 0 && heads_q >= heads_kv ? heads_q / heads_kv : 1;
}
// Tiles of so many rows, and of a ragged batch numbers of them.
inline int64_t tiles_of(const Plan& kernel, int64_t batch, int64_t rows) {
  return kernel.ragged ? rows / kernel.tile_q + batch : ceil_div(rows, int64_t(kernel.tile_q));
}
inline int64_t heads_of(const Plan& kernel, int64_t batch, int64_t heads) { return kernel.ragged ? heads : batch * heads; }

// Pointers: q, k, v; qo_indptr and kv_indptr of a ragged batch; kv_indices and kv_last_page_len of pages; out, and lse where it
// is written. Integers: batch, seq_q, seq_kv (of a ragged batch the rows of q and of k, or of all pages that are listed),
// heads_q, heads_kv, head_dim_qk, head_dim_vo; the strides of batch, position and head of q, k, v and out; the windows to the
// left and to the right, -1: without an end. Launch: band, 0: all heads; splits of the keys; walkers. Scalars: scale, softcap where there
// is one.
inline Arguments bind(const Plan& kernel, void* const* pointers, const int64_t* integers, const int32_t* launch, const double* scalars) {
  Arguments arguments = {};
  arguments.q = pointers[0];
  arguments.k = pointers[1];
  arguments.v = pointers[2];
  arguments.out = pointers[first_output(kernel)];
  if (kernel.lse) arguments.lse = static_cast<float*>(pointers[first_output(kernel) + 1]);
  int* const extents[] = {&arguments.batch, &arguments.seq_q, &arguments.seq_kv, &arguments.heads_q, &arguments.heads_kv,
                          &arguments.head_dim_qk, &arguments.head_dim_vo};
  for (int i = 0; i < 7; ++i) {
    const int64_t least = i == 2 ? 0 : 1, most = i == 1 || i == 2 ? longest : largest_extent;
    *extents[i] = integers[i] >= least && integers[i] <= most ? static_cast<int>(integers[i]) : -1;
  }
  Strides* const strides[] = {&arguments.of_q, &arguments.of_k, &arguments.of_v, &arguments.of_out};
  for (int i = 0; i < 4; ++i) *strides[i] = Strides{integers[7 + 3 * i], integers[8 + 3 * i], integers[9 + 3 * i]};
  const int64_t left = integers[19], right = integers[20], seq_q = integers[1], seq_kv = integers[2];
  const int64_t diagonal = seq_kv - seq_q;
  arguments.first_key = static_cast<int>(left < 0 ? -seq_q : clipped(diagonal - clipped(left, 0, longest), -seq_q, seq_kv));
  arguments.end_key = static_cast<int>(right < 0 ? seq_kv : clipped(diagonal + clipped(right, 0, longest) + 1, -seq_q, seq_kv));
  const int64_t heads = heads_of(kernel, integers[0], integers[3] / rows_of_query(kernel, integers[3], integers[4]));
  arguments.band = static_cast<int>(launch[0] > 0 && launch[0] < heads ? launch[0] : clipped(heads, 1, largest_extent));
  const double factor = kernel.softcap ? scalars[1] : scalars[0];
  arguments.to_bits = static_cast<float>(factor * log2_of_e);
  arguments.inside_softcap = kernel.softcap ? static_cast<float>(scalars[0] / scalars[1]) : 0.0f;
  return arguments;
}

inline TableArguments with_tables(const Plan& kernel, const Arguments& arguments, void* const* pointers, const int64_t* integers) {
  const int64_t rows = integers[1] * rows_of_query(kernel, integers[3], integers[4]), tiles = tiles_of(kernel, integers[0], rows);
  return TableArguments{arguments,
                        static_cast<const int*>(pointers[3]),
                        static_cast<const int*>(pointers[4]),
                        static_cast<int>(clipped(tiles, 0, largest_extent)),
                        static_cast<int>(clipped(integers[19], -1, longest)),
                        static_cast<int>(clipped(integers[20], -1, longest))};
}

// Splits of a call: as many as asked, but no more than there are tiles of keys.
inline int splits(const Plan& kernel, int64_t seq_kv, int64_t asked) {
  const int64_t tiles = seq_kv < 1 ? 1 : ceil_div(seq_kv, kernel.tile_kv);
  return static_cast<int>(clipped(asked, 1, tiles));
}

template <class C>
WholeArguments<C> bind_whole(void* const* pointers, const int64_t* integers, const int32_t* launch, const double* scalars) {
  const Arguments arguments = bind(plan_of<C>, pointers, integers, launch, scalars);
  if constexpr (C::page_size > 0) {
    const TableArguments tables = with_tables(plan_of<C>, arguments, pointers, integers);
    return PageArguments{tables, static_cast<const int*>(pointers[5]), static_cast<const int*>(pointers[6])};
  } else if constexpr (C::ragged) {
    return with_tables(plan_of<C>, arguments, pointers, integers);
  } else {
    return arguments;
  }
}

template <class C>
ArgumentsOf<C> bind(void* const* pointers, const int64_t* integers, const int32_t* launch, const double* scalars, void* workspace) {
  const WholeArguments<C> whole = bind_whole<C>(pointers, integers, launch, scalars);
  if constexpr (splits_keys<C>) {
    return ArgumentsOf<C>{{whole, static_cast<float*>(workspace), splits(plan_of<C>, integers[2], launch[1])}};
  } else if constexpr (walks_tiles<C>) {
    return ArgumentsOf<C>{{whole, static_cast<int*>(workspace), static_cast<int>(clipped(launch[2], 1, largest_extent))}};
  } else {
    return whole;
  }
}

// Of a split's rows: their sums, and two floats of each. Nothing grows with the keys.
inline int64_t workspace_bytes(const Plan& kernel, const int64_t* integers, const int32_t* launch) {
  if (kernel.walks_tiles) {  // two numbers for each tile, and how many there are
    const int64_t rows = integers[1] * rows_of_query(kernel, integers[3], integers[4]);
    return 8 * (1 + tiles_of(kernel, integers[0], rows));
  }
  if (!kernel.splits_keys) return 0;
  const int64_t rows = heads_of(kernel, integers[0], integers[3]) * integers[1];
  return 4 * splits(kernel, integers[2], launch[1]) * rows * (workspace_pitch(static_cast<int>(integers[6])) + 2);
}

template <class C>
int64_t workspace_bytes(const int64_t* integers, const int32_t* launch) {
  return workspace_bytes(plan_of<C>, integers, launch);
}

inline bool is_multiple(const Strides& strides, int64_t of) {
  return strides.batch % of == 0 && strides.position % of == 0 && strides.head % of == 0;
}

// Writes the launches of a call and returns how many they are; 0 where the kernel cannot compute it.
// `parts`: splits of the keys, or blocks that walk the list.
inline int plan(const Plan& kernel, const Arguments& arguments, int parts, Launch* out) {
  const Arguments& a = arguments;
  if (a.batch < 1 || a.seq_q < 1 || a.seq_kv < 0 || a.heads_q < 1 || a.heads_kv < 1 || a.heads_q % a.heads_kv) return 0;
  if (a.head_dim_qk < 1 || a.head_dim_qk > kernel.columns_qk || a.head_dim_qk % kernel.align) return 0;
  if (a.head_dim_vo < 1 || a.head_dim_vo > kernel.columns_vo || a.head_dim_vo % kernel.align || a.head_dim_vo % kernel.align_out) return 0;
  if (!is_multiple(a.of_q, kernel.align) || !is_multiple(a.of_k, kernel.align) || !is_multiple(a.of_v, kernel.align)) return 0;
  if (!is_multiple(a.of_out, kernel.align_out)) return 0;
  const int64_t group = rows_of_query(kernel, a.heads_q, a.heads_kv), rows = group * a.seq_q;
  if (group > largest_group || rows > longest) return 0;
  const int64_t heads = heads_of(kernel, a.batch, a.heads_q / group), tiles = tiles_of(kernel, a.batch, rows);
  if (heads > largest_extent || tiles > largest_extent / heads || tiles > largest_extent / kernel.tile_q) return 0;
  if (kernel.walks_tiles) {
    if (a.batch > most_walked) return 0;
    const uint32_t walkers = static_cast<uint32_t>(parts < tiles * heads ? parts : tiles * heads);
    out[0] = Launch{0, {static_cast<uint32_t>(ceil_div(a.batch, int(list_threads))), 1, 1}, {list_threads, 1, 1}, 0};
    out[1] = Launch{1, {walkers, 1, 1}, {static_cast<uint32_t>(kernel.threads), 1, 1}, static_cast<uint32_t>(kernel.shared_bytes)};
    return 2;
  }
  out[0] = Launch{0, {static_cast<uint32_t>(tiles * heads), static_cast<uint32_t>(parts), 1},
                  {static_cast<uint32_t>(kernel.threads), 1, 1}, static_cast<uint32_t>(kernel.shared_bytes)};
  if (!kernel.splits_keys) return 1;
  const int64_t merging = ceil_div(heads * rows * (a.head_dim_vo / kernel.align_out), merge_threads);
  if (parts > 65535 || merging > INT32_MAX) return 0;
  out[1] = Launch{1, {static_cast<uint32_t>(merging), 1, 1}, {merge_threads, 1, 1}, 0};
  return 2;
}

template <class C>
int plan(const ArgumentsOf<C>& arguments, Launch* out) {
  if constexpr (splits_keys<C>) {
    return plan(plan_of<C>, arguments, arguments.splits, out);
  } else if constexpr (walks_tiles<C>) {
    return plan(plan_of<C>, arguments, arguments.walkers, out);
  } else {
    return plan(plan_of<C>, arguments, 1, out);
  }
}

// One tensor of a call: rank 4, of a ragged batch 3, the head's elements last. Of a cache `batch` are pages.
struct Heads {
  int64_t batch, positions, heads, columns;
  Strides strides;

  int64_t span() const {
    if (!positions) return 0;
    return (batch - 1) * strides.batch + (positions - 1) * strides.position + (heads - 1) * strides.head + columns;
  }
};

inline bool read_heads(const char* name, const TensorView& tensor, const Plan& kernel, int align, bool cached, Heads& heads,
                       Complaint complaint) {
  const bool packed = kernel.ragged && !cached;
  const char* const axes = packed               ? "(positions, heads, head_dim)"
                           : cached             ? "(pages, positions of a page, heads, head_dim)"
                           : kernel.heads_first ? "(batch, heads, positions, head_dim)"
                                                : "(batch, positions, heads, head_dim)";
  const int rank = packed ? 3 : 4, last = rank - 1;
  if (tensor.rank != rank) CUKILN_REFUSE(complaint, "ValueError: %s has rank %d; rank %d %s is allowed", name, tensor.rank, rank, axes);
  const int at_positions = packed ? 0 : kernel.heads_first ? 2 : 1, at_heads = packed ? 1 : 3 - at_positions;
  heads = Heads{packed ? 1 : tensor.shape[0], tensor.shape[at_positions], tensor.shape[at_heads], tensor.shape[last], {}};
  // The stride of an extent of 1 says nothing: frameworks put anything there.
  const auto stride = [&](int axis) { return tensor.shape[axis] > 1 ? tensor.strides[axis] : 0; };
  heads.strides = Strides{packed ? 0 : stride(0), stride(at_positions), stride(at_heads)};
  if (cached && heads.positions != kernel.page_size)
    CUKILN_REFUSE(complaint, "ValueError: %s has pages of %lld positions; this kernel takes pages of %d: look up the kernel of this shape", name,
                  static_cast<long long>(heads.positions), kernel.page_size);
  if (heads.batch < 1 || heads.heads < 1 || heads.columns < 1 || heads.positions < 0)
    CUKILN_REFUSE(complaint, "ValueError: %s is empty; every extent must be at least 1", name);
  if (heads.columns > 1 && tensor.strides[last] != 1)
    CUKILN_REFUSE(complaint, "ValueError: the last axis of %s has stride %lld; it must be contiguous (stride 1)", name,
                  static_cast<long long>(tensor.strides[last]));
  if (heads.strides.batch < 0 || heads.strides.position < 0 || heads.strides.head < 0)
    CUKILN_REFUSE(complaint, "ValueError: %s runs backwards; strides of at least 0 are allowed", name);
  if (heads.columns % align || !is_multiple(heads.strides, align))
    CUKILN_REFUSE(complaint,
                  "ValueError: %s has head_dim %lld and strides %lld, %lld, %lld; this kernel moves %d elements at once, so each "
                  "must be a multiple of %d: look up the kernel of this shape",
                  name, static_cast<long long>(heads.columns), static_cast<long long>(packed ? 0 : tensor.strides[0]),
                  static_cast<long long>(tensor.strides[last - 2]), static_cast<long long>(tensor.strides[last - 1]), align, align);
  return true;
}

// Whether no two elements share a place: each axis steps over all of the faster ones.
inline bool apart_from_itself(const Heads& out) {
  int64_t extents[] = {out.batch, out.positions, out.heads}, steps[] = {out.strides.batch, out.strides.position, out.strides.head};
  int64_t inner = out.columns;
  for (int done = 0; done < 3; ++done) {
    int least = -1;
    for (int axis = 0; axis < 3; ++axis)
      if (extents[axis] > 1 && (least < 0 || steps[axis] < steps[least])) least = axis;
    if (least < 0) return true;
    if (steps[least] < inner) return false;
    inner = steps[least] * (extents[least] - 1) + inner;
    extents[least] = 1;
  }
  return true;
}

inline bool check_memory_apart(const char* name, const TensorView& tensor, int64_t bytes, const char* written, const TensorView& other,
                               int64_t other_bytes, Complaint complaint) {
  const intptr_t begin = reinterpret_cast<intptr_t>(tensor.data), other_begin = reinterpret_cast<intptr_t>(other.data);
  if (begin + bytes <= other_begin || other_begin + other_bytes <= begin) return true;
  CUKILN_REFUSE(complaint, "ValueError: %s overlaps %s; its memory must be its own (a result cannot be written over an input)", written, name);
}

// The tables of a ragged batch: where its sequences lie they alone say, on the device. `listed`: entries of kv_indices.
inline bool read_tables(const Plan& kernel, const TensorView* tensors, int64_t& batch, int64_t& listed, Complaint complaint) {
  const TensorView* const tables = tensors + 3;
  const int count = first_output(kernel) - 3;
  for (int i = 0; i < count; ++i) {
    if (!check_pointer(table_names[i], tables[i], ElementType::int32, tensors[0].device, 4, complaint, "q")) return false;
    if (i == 0 && (tables[i].rank != 1 || tables[i].shape[0] < 2))
      CUKILN_REFUSE(complaint, "ValueError: qo_indptr must be a vector of at least 2 elements: where sequences begin, and where the last one ends");
    if (i == 2 && tables[i].rank != 1) CUKILN_REFUSE(complaint, "ValueError: kv_indices has rank %d; a vector of pages is allowed", tables[i].rank);
    const int64_t length = i == 2 ? tables[i].shape[0] : tables[0].shape[0] - (i == 3);
    if (!check_vector(table_names[i], tables[i], length, complaint)) return false;
  }
  batch = tables[0].shape[0] - 1;
  listed = kernel.page_size ? tables[2].shape[0] : 0;
  if (listed > longest / (kernel.page_size ? kernel.page_size : 1))
    CUKILN_REFUSE(complaint, "ValueError: kv_indices has %lld pages of %d positions; %lld positions are allowed", static_cast<long long>(listed),
                  kernel.page_size, static_cast<long long>(longest));
  return true;
}

// Reads q, k, v, tables, out and lse into `extents`; false and a sentence where a call cannot be right.
inline bool check(const Plan& kernel, const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  const int at_out = first_output(kernel), at_lse = at_out + 1;
  if (count != at_lse + kernel.lse)
    CUKILN_REFUSE(complaint, "TypeError: %d tensors were given; this kernel takes %d: q, k, v, %s%sout%s", count, at_lse + kernel.lse,
                  kernel.ragged ? "qo_indptr, kv_indptr, " : "", kernel.page_size ? "kv_indices, kv_last_page_len, " : "", kernel.lse ? ", lse" : "");
  const char* const names[] = {"q", "k", "v", "out"};
  const int places[] = {0, 1, 2, at_out};
  Heads heads[4];
  for (int i = 0; i < 4; ++i) {
    const TensorView& tensor = tensors[places[i]];
    const int align = i == 3 ? kernel.align_out : kernel.align;
    if (!check_pointer(names[i], tensor, kernel.type, tensors[0].device, 2 * align, complaint, "q")) return false;
    const bool cached = kernel.page_size && (i == 1 || i == 2);
    if (!read_heads(names[i], tensor, kernel, align, cached, heads[i], complaint)) return false;
  }
  int64_t batch = heads[0].batch, listed = 0;
  if (kernel.ragged && !read_tables(kernel, tensors, batch, listed, complaint)) return false;
  const Heads &q = heads[0], &k = heads[1], &v = heads[2], &out = heads[3];
  if (kernel.page_size) {
    if (!agree("the number of pages differs between k and v", k.batch, v.batch, complaint)) return false;
  } else {
    if (!agree("batch differs between q and k", q.batch, k.batch, complaint)) return false;
    if (!agree("batch differs between q and v", q.batch, v.batch, complaint)) return false;
  }
  if (!agree("batch differs between q and out", q.batch, out.batch, complaint)) return false;
  if (!agree("seq_kv differs between k and v", k.positions, v.positions, complaint)) return false;
  if (!agree("seq_q differs between q and out", q.positions, out.positions, complaint)) return false;
  if (!agree("heads_kv differs between k and v", k.heads, v.heads, complaint)) return false;
  if (!agree("heads_q differs between q and out", q.heads, out.heads, complaint)) return false;
  if (!agree("head_dim_qk differs between q and k", q.columns, k.columns, complaint)) return false;
  if (!agree("head_dim_vo differs between v and out", v.columns, out.columns, complaint)) return false;
  if (q.positions < 1) CUKILN_REFUSE(complaint, "ValueError: q is empty; every extent must be at least 1");
  if (q.heads % k.heads)
    CUKILN_REFUSE(complaint, "ValueError: %lld heads of q are no multiple of %lld heads of k and v", static_cast<long long>(q.heads),
                  static_cast<long long>(k.heads));
  if (q.columns > kernel.columns_qk || v.columns > kernel.columns_vo)
    CUKILN_REFUSE(complaint, "ValueError: head_dim is %lld of q and k and %lld of v; this kernel holds %d and %d: look up the kernel of this shape",
                  static_cast<long long>(q.columns), static_cast<long long>(v.columns), kernel.columns_qk, kernel.columns_vo);
  if (q.positions > longest || k.positions > longest)
    CUKILN_REFUSE(complaint, "ValueError: %lld queries and %lld keys; at most %lld of each are allowed", static_cast<long long>(q.positions),
                  static_cast<long long>(k.positions), static_cast<long long>(longest));
  const int64_t group = rows_of_query(kernel, q.heads, k.heads), tiles = tiles_of(kernel, batch, group * q.positions);
  if (group > largest_group || group * q.positions > longest)
    CUKILN_REFUSE(complaint, "ValueError: %lld queries of %lld packed heads; at most %lld heads and %lld of both multiplied are allowed",
                  static_cast<long long>(q.positions), static_cast<long long>(group), static_cast<long long>(largest_group),
                  static_cast<long long>(longest));
  if (q.heads > largest_extent / batch || tiles > largest_extent / heads_of(kernel, batch, q.heads / group))
    CUKILN_REFUSE(complaint, "ValueError: the number of blocks is over %lld", static_cast<long long>(largest_extent));
  if (tiles > largest_extent / kernel.tile_q)
    CUKILN_REFUSE(complaint, "ValueError: %lld queries in %lld sequences make %lld tiles of %d rows; %lld tiles are allowed",
                  static_cast<long long>(q.positions), static_cast<long long>(batch), static_cast<long long>(tiles), kernel.tile_q,
                  static_cast<long long>(largest_extent / kernel.tile_q));
  if (kernel.walks_tiles && batch > most_walked)
    CUKILN_REFUSE(complaint, "ValueError: %lld sequences; this kernel lists the tiles of at most %lld: look up another", static_cast<long long>(batch),
                  static_cast<long long>(most_walked));
  if (!apart_from_itself(out)) CUKILN_REFUSE(complaint, "ValueError: elements of out overlap each other (its strides are too small)");
  if (kernel.lse) {
    const TensorView& lse = tensors[at_lse];
    if (!check_pointer("lse", lse, ElementType::float32, tensors[0].device, 4, complaint, "q")) return false;
    const bool of_ragged = lse.rank == 2 && lse.shape[0] == q.positions && lse.shape[1] == q.heads;
    const bool of_dense = lse.rank == 3 && lse.shape[0] == q.batch && lse.shape[1] == q.heads && lse.shape[2] == q.positions;
    if (kernel.ragged && !of_ragged)
      CUKILN_REFUSE(complaint, "ValueError: lse must have the shape (positions of q, heads_q): %lld, %lld", static_cast<long long>(q.positions),
                    static_cast<long long>(q.heads));
    if (!kernel.ragged && !of_dense)
      CUKILN_REFUSE(complaint, "ValueError: lse must have the shape (batch, heads_q, seq_q): %lld, %lld, %lld", static_cast<long long>(q.batch),
                    static_cast<long long>(q.heads), static_cast<long long>(q.positions));
    if (!check_contiguous("lse", lse, complaint)) return false;
  }
  const int64_t lse_bytes = 4 * q.batch * q.heads * q.positions;
  for (int i = 0; i < 3; ++i) {
    if (!check_memory_apart(names[i], tensors[i], 2 * heads[i].span(), "out", tensors[at_out], 2 * out.span(), complaint)) return false;
    if (kernel.lse && !check_memory_apart(names[i], tensors[i], 2 * heads[i].span(), "lse", tensors[at_lse], lse_bytes, complaint)) return false;
  }
  for (int i = 3; i < at_out; ++i) {
    const char* const table = table_names[i - 3];
    const int64_t table_bytes = 4 * tensors[i].shape[0];
    if (!check_memory_apart(table, tensors[i], table_bytes, "out", tensors[at_out], 2 * out.span(), complaint)) return false;
    if (kernel.lse && !check_memory_apart(table, tensors[i], table_bytes, "lse", tensors[at_lse], lse_bytes, complaint)) return false;
  }
  if (kernel.lse && !check_memory_apart("out", tensors[at_out], 2 * out.span(), "lse", tensors[at_lse], lse_bytes, complaint)) return false;
  const int64_t keys = kernel.page_size ? listed * kernel.page_size : k.positions;
  const int64_t values[] = {batch, q.positions, keys, q.heads, k.heads, q.columns, v.columns};
  for (int i = 0; i < 7; ++i) extents[i] = values[i];
  for (int i = 0; i < 4; ++i) {
    extents[7 + 3 * i] = heads[i].strides.batch;
    extents[8 + 3 * i] = heads[i].strides.position;
    extents[9 + 3 * i] = heads[i].strides.head;
  }
  return true;
}

template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  return check(plan_of<C>, tensors, count, extents, complaint);
}

#endif  // CUKILN_HOST

}  // namespace attention
}  // namespace cukiln
