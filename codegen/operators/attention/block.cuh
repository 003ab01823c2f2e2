// What one block computes: some queries of one head, or of a group, over all keys that one of them sees.
#pragma once

namespace cukiln {
namespace attention {

// Elements from one matrix of a batch, one position and one head of a tensor to the next.
struct Strides {
  int64_t batch, position, head;
};

struct Arguments {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;  // batch x heads_q x seq_q, null where the kernel writes none
  Strides of_q, of_k, of_v, of_out;
  int batch, seq_q, seq_kv, heads_q, heads_kv, head_dim_qk, head_dim_vo;
  // Query i sees the keys from i + first_key to before i + end_key, as far as there are any.
  int first_key, end_key;
  int band;              // heads whose blocks are started side by side
  float to_bits;         // from a score to the exponent of 2
  float inside_softcap;  // scores times this are tanh's argument
};

// Of a ragged batch. The tables are on the device: the rows at which sequences begin and the last one ends.
struct TableArguments : Arguments {
  const int* qo_indptr;
  const int* kv_indptr;
  int tiles;                      // numbers of a head's tiles
  int window_left, window_right;  // -1: without an end
};

// Of a cache in pages kv_indptr has entries of kv_indices, which are pages; all but the last of a sequence are full.
struct PageArguments : TableArguments {
  const int* kv_indices;
  const int* kv_last_page_len;
};

// Where keys are split, blocks leave what they have summed in the workspace: of each split, matrix, head and query
// workspace_pitch(head_dim_vo) floats; behind all of them of each two, its greatest score, as an exponent of 2, and its total.
template <class Whole>
struct Split : Whole {
  float* workspace;
  int splits;
};
struct SplitArguments : Split<Arguments> {};
struct SplitTableArguments : Split<TableArguments> {};
struct SplitPageArguments : Split<PageArguments> {};

// Where blocks walk a list of tiles, it is in the workspace: how many there are, then of each its sequence and its number there.
template <class Whole>
struct Walk : Whole {
  int* list;
  int walkers;
};
struct WalkTableArguments : Walk<TableArguments> {};
struct WalkPageArguments : Walk<PageArguments> {};

// Config::q_in, Config::split, Config::packing, Config::walk.
enum { q_in_registers, q_in_shared };
enum { split_none, split_workspace };
enum { packing_none, packing_group };
enum { walk_none, walk_longest_first };

template <class C> constexpr bool splits_keys = C::split == split_workspace;
template <class C> constexpr bool packs_heads = C::packing == packing_group;

template <class C> constexpr bool walks_tiles = C::walk == walk_longest_first;

template <bool tables, bool pages> struct ArgumentsWith { using Whole = Arguments; using Split = SplitArguments; };
template <> struct ArgumentsWith<true, false> {
  using Whole = TableArguments;
  using Split = SplitTableArguments;
  using Walk = WalkTableArguments;
};
template <> struct ArgumentsWith<true, true> {
  using Whole = PageArguments;
  using Split = SplitPageArguments;
  using Walk = WalkPageArguments;
};
template <class With, bool split, bool walk> struct Chosen { using Type = typename With::Whole; };
template <class With> struct Chosen<With, true, false> { using Type = typename With::Split; };
template <class With> struct Chosen<With, false, true> { using Type = typename With::Walk; };
template <class C> using WholeArguments = typename ArgumentsWith<C::ragged, (C::page_size > 0)>::Whole;
template <class C>
using ArgumentsOf = typename Chosen<ArgumentsWith<C::ragged, (C::page_size > 0)>, splits_keys<C>, walks_tiles<C>>::Type;

template <class C> constexpr int q_bytes = C::tile_q * C::columns_qk * 2;
template <class C> constexpr int keys_bytes = C::stages * C::tile_kv * C::columns_qk * 2;
template <class C> constexpr int ring_bytes = keys_bytes<C> + C::stages * C::tile_kv * C::columns_vo * 2;
template <class C> constexpr int out_bytes = splits_keys<C> ? 0 : C::tile_q * C::columns_vo * 2;
constexpr int greater(int a, int b) { return a > b ? a : b; }
// Q (where it stays), the ring of keys, that of values. Q on its way to registers, and out on its way to memory, lie where
// the ring does.
template <class C>
constexpr int shared_bytes = C::q_in == q_in_shared ? q_bytes<C> + greater(ring_bytes<C>, out_bytes<C>)
                                                    : greater(ring_bytes<C>, greater(q_bytes<C>, out_bytes<C>));

#if defined(CUKILN_DEVICE)

// A tile with its number of rows, which a stage of the ring holds.
template <class C, int columns>
struct Stage : Tile<C, columns> {
  static constexpr int bytes = C::tile_kv * Tile<C, columns>::row_bytes;
  using Copy = Copier<C, Tile<C, columns>, C::tile_kv>;
};
template <class C> using Keys = Stage<C, C::columns_qk>;
template <class C> using Values = Stage<C, C::columns_vo>;

// The rows of a block's tile: queries of one head, the first of which is `first`.
template <bool packs>
struct TileRows {
  static constexpr bool packed = false;
  static constexpr int group = 1;
  int first;

  __device__ __forceinline__ void begin(int row) { first = row; }
  __device__ __forceinline__ int query(int row) const { return first + row; }
  // Elements from the sequence's first query of the block's head to `row`.
  __device__ __forceinline__ int64_t before(int row, int64_t per_query, int64_t) const { return (first + row) * per_query; }
};

// Packed: row r of a sequence is query r / group of the group's head r % group, so queries, on which masks depend, never go down.
template <>
struct TileRows<true> {
  static constexpr bool packed = true;
  int first, group;
  int first_query, first_head;  // of row `first`
  unsigned inverse;             // n / group is n * inverse / 2^31 where n * group < 2^31

  __device__ __forceinline__ void share(int heads) {
    group = heads;
    inverse = (0x7fffffffu + heads) / heads;
  }
  __device__ __forceinline__ void begin(int row) {
    first = row;
    first_query = row / group;
    first_head = row - first_query * group;
  }
  __device__ __forceinline__ int further(int row) const {
    return static_cast<int>(static_cast<unsigned long long>(2u * (first_head + row)) * inverse >> 32);
  }
  __device__ __forceinline__ int query(int row) const { return first_query + further(row); }
  // As above, of the group's first head.
  __device__ __forceinline__ int64_t before(int row, int64_t per_query, int64_t per_head) const {
    const int queries = further(row), head = first_head + row - queries * group;
    return (first_query + queries) * per_query + head * per_head;
  }
};

// The block's rows and head, where heads are packed the group's first one. Blocks with the last queries, which see the most keys
// of causal attention, come first among the heads of a band. Of a ragged batch `first` is that of the tile among those of all
// sequences.
template <class C>
struct Place : TileRows<packs_heads<C>> {
  using TileRows<packs_heads<C>>::first;
  int batch, head, kv_head;

  __device__ __forceinline__ explicit Place(const ArgumentsOf<C>& arguments) {
    const int tiles = tiles_of_head(arguments), block = static_cast<int>(blockIdx.x);
    const int first_head = block / (arguments.band * tiles) * arguments.band, inside = block % (arguments.band * tiles);
    const int left = (C::ragged ? 1 : arguments.batch) * heads_of(arguments) - first_head, heads = left < arguments.band ? left : arguments.band;
    const int number = first_head + inside % heads;
    first = (tiles - 1 - inside / heads) * C::tile_q;
    batch = number / heads_of(arguments);
    head = number % heads_of(arguments);
    if constexpr (packs_heads<C>) {
      this->share(arguments.heads_q / arguments.heads_kv);
      this->begin(first);
      kv_head = head;
      head *= this->group;
    } else {
      kv_head = head / (arguments.heads_q / arguments.heads_kv);
    }
  }

  // Of a tile that begins where `begin` says: of packed heads `number` is a group's.
  __device__ __forceinline__ Place(const ArgumentsOf<C>& arguments, int number) : batch(0), head(number), kv_head(number) {
    const int group = arguments.heads_q / arguments.heads_kv;
    if constexpr (packs_heads<C>) {
      this->share(group);
      head *= group;
    } else {
      kv_head /= group;
    }
  }

 private:
  static __device__ __forceinline__ int heads_of(const Arguments& arguments) {
    return packs_heads<C> ? arguments.heads_kv : arguments.heads_q;
  }
  static __device__ __forceinline__ int tiles_of_head(const ArgumentsOf<C>& arguments) {
    if constexpr (C::ragged) {
      return arguments.tiles;
    } else {
      const int rows = packs_heads<C> ? arguments.seq_q * (arguments.heads_q / arguments.heads_kv) : arguments.seq_q;
      return (rows - 1) / C::tile_q + 1;
    }
  }
};

// Keys that query `row` sees: from the first to before the end. `Rows`: Arguments, or Sequence of a ragged batch.
template <class Rows>
__device__ __forceinline__ int first_seen(const Rows& rows, int row) {
  const int key = row + rows.first_key;
  return key > 0 ? key : 0;
}
template <class Rows>
__device__ __forceinline__ int end_seen(const Rows& rows, int row) {
  const int key = row + rows.end_key;
  return key < rows.seq_kv ? key : rows.seq_kv;
}

// Tiles of keys that a block takes.
struct Tiles {
  int first, count;
};

// Those that some of its queries see; where keys are split, this block's share of them, which may be none.
template <class C, class Rows>
__device__ __forceinline__ Tiles tiles_of(const ArgumentsOf<C>& arguments, const Rows& rows, const Place<C>& place) {
  const int first = first_seen(rows, place.query(0)) / C::tile_kv;
  const int end = end_seen(rows, place.query(C::tile_q - 1));
  const int count = end > 0 ? (end - 1) / C::tile_kv + 1 - first : 0;
  if constexpr (splits_keys<C>) {
    const int split = static_cast<int>(blockIdx.y), each = count / arguments.splits, more = count % arguments.splits;
    const int before = split * each + (split < more ? split : more);
    const int own = each + (split < more ? 1 : 0);
    return Tiles{first + before, own};
  } else {
    return Tiles{first, count};
  }
}

// The keys and values of the block's head, from the first tile that one of its queries sees. Each call commits a group, an
// empty one behind the last tile, so that waits can count tiles.
template <class C>
struct Feed {
  using T = typename C::Input;
  const T *k, *v;
  int first_key, tiles;

  template <class Rows>
  __device__ __forceinline__ Feed(const Arguments& given, const Rows& rows, const Place<C>& place, int first, int count)
      : first_key(first), tiles(count) {
    k = static_cast<const T*>(given.k) + before_keys(rows, place, given.of_k) + place.kv_head * given.of_k.head + first * given.of_k.position;
    v = static_cast<const T*>(given.v) + before_keys(rows, place, given.of_v) + place.kv_head * given.of_v.head + first * given.of_v.position;
  }
  template <class Rows>
  __device__ __forceinline__ void start_keys(const Arguments& arguments, const Rows& rows, char* stage, int tile) const {
    start<Keys<C>>(stage, tile, k, arguments.of_k.position, rows.seq_kv, arguments.head_dim_qk);
  }
  template <class Rows>
  __device__ __forceinline__ void start_values(const Arguments& arguments, const Rows& rows, char* stage, int tile) const {
    start<Values<C>>(stage, tile, v, arguments.of_v.position, rows.seq_kv, arguments.head_dim_vo);
  }
  template <class Stage>
  __device__ __forceinline__ void start(char* stage, int tile, const T* source, int64_t pitch, int seq_kv, int columns) const {
    if (tile < tiles) {
      const int before = tile * C::tile_kv;
      Stage::Copy::start(stage, source + before * pitch, pitch, seq_kv - first_key - before, columns);
    }
    cp_async_commit();
  }
};

// A warp's queries: their scores of one tile of keys, and what is known of the tiles before (online softmax: Milakov and
// Gimelshein, arXiv:1805.02867; FlashAttention-2: Dao, arXiv:2307.08691). A lane has two rows of each piece of 16.
template <class C>
struct Warp {
  using T = typename C::Input;
  using QTile = Tile<C, C::columns_qk>;
  static constexpr int rows = C::tile_q / C::warps, pieces = rows / 16;
  static constexpr int key_columns = C::tile_kv / 8, out_columns = C::columns_vo / 8, k_steps = C::columns_qk / 16;
  static constexpr bool holds_q = C::q_in == q_in_registers;
  static_assert(pieces * 16 * C::warps == C::tile_q, "a warp has pieces of 16 queries");
  static_assert(C::tile_kv % 16 == 0, "a tile has pieces of 16 keys");

  TileRows<packs_heads<C>> tile;
  int warp_row;  // of the tile
  Reader<QTile> q_reader;
  Reader<Keys<C>> key_reader;
  Reader<Values<C>> value_reader;
  unsigned q[holds_q ? pieces : 1][holds_q ? k_steps : 1][4];
  float scores[pieces][key_columns][4], sums[pieces][out_columns][4];
  float greatest[pieces][2], total[pieces][2];  // of a row: its greatest score so far, as an exponent of 2; this lane's weights

  __device__ __forceinline__ explicit Warp(const TileRows<packs_heads<C>>& rows_of_tile)
      : tile(rows_of_tile),
        warp_row(static_cast<int>(threadIdx.x) / 32 * rows),
        q_reader(down_first<QTile>(warp_row)),
        key_reader(along_first<Keys<C>>()),
        value_reader(down_first<Values<C>>(0)) {
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
#pragma unroll
      for (int j = 0; j < out_columns; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) sums[i][j][r] = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        greatest[i][half] = -infinity();
        total[i][half] = 0.0f;
      }
    }
  }

  // The query of this lane's row, in the sequence.
  __device__ __forceinline__ int query(int piece, int half) const {
    if constexpr (packs_heads<C>) {
      return tile.query(warp_row + piece * 16 + half * 8 + lane() / 4);
    } else {
      return tile.first + warp_row + piece * 16 + half * 8 + lane() / 4;
    }
  }

  __device__ __forceinline__ void hold_q(const char* tile) {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int k = 0; k < k_steps; ++k) ldmatrix<4>(q[i][k], q_reader.at(tile, k, i));
  }

  // scores = Q K^T
  __device__ __forceinline__ void score(const char* q_tile, const char* keys) {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int j = 0; j < key_columns; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) scores[i][j][r] = 0.0f;
#pragma unroll
    for (int k = 0; k < k_steps; ++k) {
      if constexpr (!holds_q) {
        unsigned a[pieces][4];
#pragma unroll
        for (int i = 0; i < pieces; ++i) ldmatrix<4>(a[i], q_reader.at(q_tile, k, i));
        score_step(a, keys, k);
      } else {
        unsigned a[pieces][4];
#pragma unroll
        for (int i = 0; i < pieces; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r) a[i][r] = q[i][k][r];
        score_step(a, keys, k);
      }
    }
  }
  __device__ __forceinline__ void score_step(const unsigned (&a)[pieces][4], const char* keys, int k) {
#pragma unroll
    for (int j = 0; j < C::tile_kv / 16; ++j) {
      unsigned b[4];
      ldmatrix<4>(b, key_reader.at(keys, k, j));
#pragma unroll
      for (int i = 0; i < pieces; ++i) multiply_square<T>(scores[i][2 * j], scores[i][2 * j + 1], a[i], b);
    }
  }

  // Whether a query of this warp does not see all of the tile that begins with key `begin`.
  template <class Rows>
  __device__ __forceinline__ bool needs_mask(const Rows& sequence, int begin) const {
    const int first_query = packs_heads<C> ? tile.query(warp_row) : tile.first + warp_row;
    const int last_query = packs_heads<C> ? tile.query(warp_row + rows - 1) : first_query + rows - 1;
    return begin + C::tile_kv > end_seen(sequence, first_query) || begin < first_seen(sequence, last_query);
  }
  template <class Rows>
  __device__ __forceinline__ void mask(const Rows& sequence, int begin) {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int from = first_seen(sequence, query(i, half)), end = end_seen(sequence, query(i, half));
#pragma unroll
        for (int j = 0; j < key_columns; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = begin + j * 8 + lane() % 4 * 2 + e;
            const bool seen = key >= from && in_bounds(key, end);  // bounds: masked key
            if (!seen) scores[i][j][half * 2 + e] = -infinity();
          }
      }
  }

  // softcap's tanh, whose factor is in `to_bits`.
  __device__ __forceinline__ void cap(const Arguments& arguments) {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int j = 0; j < key_columns; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float argument = scores[i][j][r] * arguments.inside_softcap;
          scores[i][j][r] = exact_epilogue() ? argument : cukiln::tanh(argument);
        }
  }

  // Scores become weights 2^(score - greatest), and what was summed before is brought to the new greatest. That is kept as
  // it is subtracted, so that its rounding is a factor that all weights share.
  __device__ __forceinline__ void weigh(const Arguments& arguments) {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = scores[i][0][half * 2];
#pragma unroll
        for (int j = 0; j < key_columns; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) most = maximum(most, scores[i][j][half * 2 + e]);
        most = maximum(most, shuffle_xor(most, 1));
        most = maximum(most, shuffle_xor(most, 2));
        const float now = maximum(greatest[i][half], most * arguments.to_bits);
        const float subtracted = now == -infinity() ? 0.0f : now;  // where nothing is seen yet
        const float factor = cukiln::exp2(greatest[i][half] - subtracted);
        greatest[i][half] = now;
        float weights = 0.0f;
#pragma unroll
        for (int j = 0; j < key_columns; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float bits = cukiln::fma(scores[i][j][half * 2 + e], arguments.to_bits, -subtracted);
            const float weight = cukiln::exp2(bits);
            scores[i][j][half * 2 + e] = weight;
            weights += weight;
          }
        total[i][half] = total[i][half] * factor + weights;
#pragma unroll
        for (int j = 0; j < out_columns; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) sums[i][j][half * 2 + e] *= factor;
      }
  }

  // sums += weights V
  __device__ __forceinline__ void add_values(const char* values) {
#pragma unroll
    for (int k = 0; k < C::tile_kv / 16; ++k) {
      unsigned a[pieces][4];
#pragma unroll
      for (int i = 0; i < pieces; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float(&square)[4] = scores[i][2 * k + r / 2];
          a[i][r] = pack_pair<T>(square[r % 2 * 2], square[r % 2 * 2 + 1]);
        }
#pragma unroll
      for (int j = 0; j < C::columns_vo / 16; ++j) {
        unsigned b[4];
        ldmatrix_trans<4>(b, value_reader.at(values, j, k));
#pragma unroll
        for (int i = 0; i < pieces; ++i) multiply_square<T>(sums[i][2 * j], sums[i][2 * j + 1], a[i], b);
      }
    }
  }
};

#endif  // CUKILN_DEVICE

}  // namespace attention
}  // namespace cukiln
