// What one block computes: some rows of one sequence, which are pairs of a query and a head, over all keys that one of them
// sees. Heads share their keys, and of those the first columns are the values.
#pragma once

namespace cukiln {
namespace mla {

// A key, as a query, lies in two tensors, ckv and kpe; out and values have the columns of ckv.
enum { columns_ckv = 512, columns_kpe = 64, vector_elements = 8 };

// Elements from one index of a tensor's first axis, and of its second, to the next: tokens and heads, pages and positions.
struct Strides {
  int64_t outer, inner;
};

struct Arguments {
  const void* q_nope;
  const void* q_pe;
  const void* ckv;
  const void* kpe;
  void* out;
  float* lse;  // tokens x heads, null where the kernel writes none
  Strides of_q_nope, of_q_pe, of_ckv, of_kpe;
  // On the device: tokens and entries of kv_indices at which sequences begin and the last one ends, pages, keys of the last
  // page. Null where the kernel takes one query of each sequence, or pages of one key.
  const int* qo_indptr;
  const int* kv_indptr;
  const int* kv_indices;
  const int* kv_last_page_len;
  int batch, tokens, heads;
  int causal;     // whether query i of n sees only keys up to the last but n - 1 - i
  int tiles;      // numbers of them
  float to_bits;  // from a score to the exponent of 2
};

// Where keys are split, blocks leave what they have summed in the workspace: of each split and row columns_ckv floats; behind
// all of them of each two, its greatest score, as an exponent of 2, and its total.
struct SplitArguments : Arguments {
  float* workspace;
  int splits;
};

enum { split_none, split_workspace };  // Config::split
template <class C> constexpr bool splits_keys = C::split == split_workspace;
template <bool split> struct ArgumentsWith { using Type = Arguments; };
template <> struct ArgumentsWith<true> { using Type = SplitArguments; };
template <class C> using ArgumentsOf = typename ArgumentsWith<splits_keys<C>>::Type;

enum { columns = columns_ckv + columns_kpe };
template <class C> constexpr int q_bytes = C::tile_q * columns * 2;
template <class C> constexpr int stage_bytes = C::tile_kv * columns * 2;
template <class C> constexpr int weights_bytes = C::tile_q * C::tile_kv * 2;
template <class C> constexpr int exchange_bytes = C::warps_vo * C::tile_q * 4;
template <class C> constexpr int numbers_bytes = C::stages * C::tile_kv * 4;
// Q, where out is staged afterwards; the ring of keys; weights; what warps of the same rows exchange; numbers of pages.
template <class C>
constexpr int shared_bytes = q_bytes<C> + C::stages * stage_bytes<C> + weights_bytes<C> + exchange_bytes<C> + numbers_bytes<C>;

#if defined(CUKILN_DEVICE)

using attention::entry, attention::in_bounds, attention::lane, attention::next_of, attention::stage_at;

template <class C> using Ckv = attention::Tile<C, columns_ckv>;
template <class C> using Kpe = attention::Tile<C, columns_kpe>;
template <class C> using Weights = attention::Tile<C, C::tile_kv>;
template <class C>
struct Keys {
  static constexpr int bytes = stage_bytes<C>, at_kpe = C::tile_kv * Ckv<C>::row_bytes;
};

// What a row's sums are multiplied by: of a query that sees nothing they are zeros.
__device__ __forceinline__ float share_of(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }

// The sequence of a block, and which of its rows: query i has those from i heads on.
//
// Where sequences have queries as a table says, tiles are numbered through all of them. A sequence whose rows begin with row b
// of all has the numbers from b / tile_q + its own number on, up to those of the next: as many as it needs, and at most one
// more. The last ones, which see the most keys where attention is causal, come first.
template <class C>
struct Sequence {
  int number, first, rows;  // in the batch; the block's first row; rows of all queries
  int first_q;              // token of the first query
  int first_page, keys;
  int end;  // query i sees the keys before i + end, as far as there are any

  __device__ __forceinline__ explicit Sequence(const Arguments& arguments) : number(0), first_page(0), keys(0), end(0) {
    const int block = static_cast<int>(blockIdx.x);
    if constexpr (C::ragged) {
      const int numbered = arguments.tiles - 1 - block;
      for (int left = arguments.batch; left > 1;) {
        const int half = left / 2, middle = number + half;
        const int first_number = entry(arguments.qo_indptr, middle) * arguments.heads / C::tile_q + middle;
        if (first_number <= numbered) number = middle;
        left -= half;
      }
      first_q = entry(arguments.qo_indptr, number);
      rows = (entry(arguments.qo_indptr, number + 1) - first_q) * arguments.heads;
      first = (numbered - first_q * arguments.heads / C::tile_q - number) * C::tile_q;
    } else {
      const int of_sequence = (arguments.heads - 1) / C::tile_q + 1;
      number = block / of_sequence;
      first_q = number;
      rows = arguments.heads;
      first = block % of_sequence * C::tile_q;
    }
  }

  __device__ __forceinline__ bool has_row(int row) const { return row < rows; }

  __device__ __forceinline__ void read_keys(const Arguments& arguments) {
    first_page = entry(arguments.kv_indptr, number);
    const int pages = entry(arguments.kv_indptr, number + 1) - first_page;
    keys = pages;
    if constexpr (C::page_size > 1) {
      if (pages > 0) keys = (pages - 1) * C::page_size + entry(arguments.kv_last_page_len, number);
    }
    end = arguments.causal ? keys - rows / arguments.heads + 1 : keys;
  }

  // The number of a row among those of all sequences.
  __device__ __forceinline__ int64_t of_all(const Arguments& arguments, int row) const {
    return int64_t(first_q) * arguments.heads + row;
  }
  // Keys that a row sees are those before this one.
  __device__ __forceinline__ int end_seen(const Arguments& arguments, int row) const {
    const int key = row / arguments.heads + end;
    return key < keys ? key : keys;
  }
};

// Tiles of keys that a block takes.
struct Tiles {
  int first, count;
};

// Those that some of its rows see; where keys are split, this block's share of them, which may be none.
template <class C>
__device__ __forceinline__ Tiles tiles_of(const ArgumentsOf<C>& arguments, const Sequence<C>& sequence) {
  const int last = sequence.first + C::tile_q - 1;
  const int end = sequence.end_seen(arguments, last < sequence.rows ? last : sequence.rows - 1);
  const int count = end > 0 ? (end - 1) / C::tile_kv + 1 : 0;
  if constexpr (splits_keys<C>) {
    const int split = static_cast<int>(blockIdx.y), each = count / arguments.splits, more = count % arguments.splits;
    return Tiles{split * each + (split < more ? split : more), each + (split < more ? 1 : 0)};
  } else {
    return Tiles{0, count};
  }
}

// Copies `rows` rows of both tensors, whose places `ckv` and `kpe` have. Of the wide one 8 rows are a turn of a loop: a copy takes
// registers of its own where it is unrolled.
template <class C, int rows, class Source>
__device__ __forceinline__ void copy_rows(char* target, const Source& ckv, const Strides& of_ckv, const Source& kpe, const Strides& of_kpe,
                                          int first, int left) {
  char* const at_kpe = target + rows * Ckv<C>::row_bytes;
  attention::Copier<C, Kpe<C>, rows>::start_apart(at_kpe, kpe, of_kpe, first, left, columns_kpe);
#pragma unroll 1
  for (int row = 0; row < rows; row += 8)
    attention::Copier<C, Ckv<C>, 8>::start_apart(target + row * Ckv<C>::row_bytes, ckv, of_ckv, first + row, left - row, columns_ckv);
}

// Where the rows of a block lie in a tensor of queries, as `Copier` asks for them.
template <class T>
struct QueryRows {
  const T* base;
  int heads;

  __device__ __forceinline__ const T* row(const Strides& strides, int first, int from_first) const {
    const int number = first + from_first, query = number / heads;
    return base + query * strides.outer + (number - query * heads) * strides.inner;
  }
};

// Where the keys of a tile lie in a tensor of pages, by the numbers of their pages, which are in shared memory.
template <class C>
struct KeyRows {
  using T = typename C::Input;
  const T* base;
  const int* numbers;

  __device__ __forceinline__ const T* row(const Strides& strides, int first, int from_first) const {
    const int64_t page = load_shared<1>(numbers + (first + from_first) % C::tile_kv).data[0];
    return base + page * strides.outer + (first + from_first) % C::page_size * strides.inner;
  }
};

// The keys of the block's sequence, from the first tile that the block takes. A thread reads the page of one key of a tile, one
// tile ahead of the copies, which find the numbers in a ring. Each `start` commits a group, an empty one behind the last tile,
// so that waits can count tiles.
template <class C>
struct Feed {
  using T = typename C::Input;
  static_assert(C::tile_kv <= attention::threads_of<C>, "each key of a tile has a thread");
  static_assert(C::page_size % C::tile_kv == 0 || C::tile_kv % C::page_size == 0, "a tile begins with a page or within one");

  const int* table;
  int* numbers;  // shared
  int first_key, tiles, keys, number;

  __device__ __forceinline__ Feed(const Arguments& arguments, const Sequence<C>& sequence, const Tiles& own, int* ring)
      : table(arguments.kv_indices + sequence.first_page), numbers(ring), first_key(own.first * C::tile_kv), tiles(own.count),
        keys(sequence.keys), number(0) {}

  __device__ __forceinline__ int begin_of(int tile) const { return first_key + tile * C::tile_kv; }
  // The page of this thread's key.
  __device__ __forceinline__ void read(int tile) {
    const int own = static_cast<int>(threadIdx.x), key = begin_of(tile) + own;
    const bool listed = tile < tiles && own < C::tile_kv && in_bounds(key, keys);  // bounds: listed page
    if (listed) number = entry(table, key / C::page_size);
  }
  __device__ __forceinline__ void keep(int stage) {
    const int own = static_cast<int>(threadIdx.x);
    if (own < C::tile_kv) store_shared<1>(numbers + stage * C::tile_kv + own, Vector<int, 1>{{number}});
  }
  __device__ __forceinline__ void start(const Arguments& arguments, char* target, int stage, int tile) {
    if (tile < tiles) {
      const int begin = begin_of(tile);
      const int* const pages = numbers + stage * C::tile_kv;
      const KeyRows<C> ckv{static_cast<const T*>(arguments.ckv), pages}, kpe{static_cast<const T*>(arguments.kpe), pages};
      copy_rows<C, C::tile_kv>(target, ckv, arguments.of_ckv, kpe, arguments.of_kpe, begin, keys - begin);
    }
    cp_async_commit();
  }
};

// `warps_vo` warps have the same rows. Each takes a part of a tile's keys for the scores, and a part of the columns of out for
// the sums; their greatest scores and their weights meet in shared memory. Online softmax: Milakov and Gimelshein,
// arXiv:1805.02867; FlashAttention-2: Dao, arXiv:2307.08691. A lane has two rows of each piece of 16.
template <class C>
struct Warp {
  using T = typename C::Input;
  static constexpr int rows = C::tile_q * C::warps_vo / C::warps, pieces = rows / 16;
  static constexpr int keys = C::tile_kv / C::warps_vo, key_columns = keys / 8;
  static constexpr int own_columns = columns_ckv / C::warps_vo, out_columns = own_columns / 8;
  static_assert(C::warps % C::warps_vo == 0 && pieces * 16 * C::warps == C::tile_q * C::warps_vo, "a warp has pieces of 16 rows");
  static_assert(key_columns * 8 * C::warps_vo == C::tile_kv && C::tile_kv % 16 == 0, "a warp has columns of 8 keys");

  int part, warp_row;  // among the warps of the same rows; the first row, of the tile
  int least_end;       // of the first row, which sees the fewest keys
  int ends[pieces][2];
  attention::Reader<Ckv<C>> q_nope_reader, ckv_reader, value_reader;
  attention::Reader<Kpe<C>> q_pe_reader, kpe_reader;
  attention::Reader<Weights<C>> weight_reader;
  float scores[pieces][key_columns][4], sums[pieces][out_columns][4];
  float greatest[pieces][2], total[pieces][2];  // of a row: its greatest score so far, as an exponent of 2; this lane's weights

  __device__ __forceinline__ Warp(const Arguments& arguments, const Sequence<C>& sequence)
      : part(static_cast<int>(threadIdx.x) / 32 % C::warps_vo),
        warp_row(static_cast<int>(threadIdx.x) / 32 / C::warps_vo * rows),
        least_end(sequence.end_seen(arguments, sequence.first + warp_row)),
        q_nope_reader(attention::down_first<Ckv<C>>(warp_row)),
        ckv_reader(key_of_lane(part), lane() / 8),
        value_reader(attention::down_first<Ckv<C>>(0)),
        q_pe_reader(attention::down_first<Kpe<C>>(warp_row)),
        kpe_reader(key_of_lane(part), lane() / 8),
        weight_reader(attention::down_first<Weights<C>>(warp_row)) {
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
#pragma unroll
      for (int j = 0; j < out_columns; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) sums[i][j][r] = 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ends[i][half] = sequence.end_seen(arguments, sequence.first + row(i, half));
        greatest[i][half] = -attention::infinity();
        total[i][half] = 0.0f;
      }
    }
  }

  // The key of the tile that this lane shows ldmatrix first.
  static __device__ __forceinline__ int key_of_lane(int part) { return part * keys + lane() % 8; }
  // This lane's row, of the tile; it is swizzled as row lane() / 4.
  __device__ __forceinline__ int row(int piece, int half) const { return warp_row + piece * 16 + half * 8 + lane() / 4; }

  // scores = Q K^T. Where a warp has 16 rows and 8 keys, sums of every second k-step are a chain of their own.
  using Scores = float[pieces][key_columns][4];
  __device__ __forceinline__ void score(const char* q, const char* stage) {
    clear(scores);
    if constexpr (pieces * key_columns > 1) {
      add_products(scores, q, stage);
    } else {
      Scores odd;
      clear(odd);
      add_products(odd, q, stage);
#pragma unroll
      for (int r = 0; r < 4; ++r) scores[0][0][r] += odd[0][0][r];
    }
  }
  static __device__ __forceinline__ void clear(Scores& of) {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int j = 0; j < key_columns; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) of[i][j][r] = 0.0f;
  }
  // Those of odd k-steps to `odd`. In each 64 columns the chunks of a row are permuted among themselves: they are a turn of a
  // loop.
  __device__ __forceinline__ void add_products(Scores& odd, const char* q, const char* stage) {
#pragma unroll 1
    for (int first = 0; first < columns_ckv * 2; first += 128) add_64_columns(odd, q_nope_reader, q + first, ckv_reader, stage + first);
    add_64_columns(odd, q_pe_reader, q + C::tile_q * Ckv<C>::row_bytes, kpe_reader, stage + Keys<C>::at_kpe);
  }
  // An ldmatrix brings 32 columns of 8 keys: two k-steps.
  template <class Tile>
  __device__ __forceinline__ void add_64_columns(Scores& odd, const attention::Reader<Tile>& q_reader, const char* q,
                                                 const attention::Reader<Tile>& key_reader, const char* tile) {
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
      unsigned a[2][pieces][4];
#pragma unroll
      for (int i = 0; i < pieces; ++i) {
        ldmatrix<4>(a[0][i], q_reader.at(q, k, i));
        ldmatrix<4>(a[1][i], q_reader.at(q, k + 1, i));
      }
#pragma unroll
      for (int j = 0; j < key_columns; ++j) {
        unsigned b[4];
        ldmatrix<4>(b, key_reader.at(tile, k, 0) + j * 8 * Tile::row_bytes);
        const unsigned first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
#pragma unroll
        for (int i = 0; i < pieces; ++i) {
          attention::multiply<T>(scores[i][j], a[0][i], first);
          attention::multiply<T>(odd[i][j], a[1][i], second);
        }
      }
    }
  }

  // `begin`: the first key of the tile.
  __device__ __forceinline__ bool needs_mask(int begin) const { return begin + C::tile_kv > least_end; }
  __device__ __forceinline__ void mask(int begin) {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < key_columns; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = begin + part * keys + j * 8 + lane() % 4 * 2 + e;
            const bool seen = in_bounds(key, ends[i][half]);  // bounds: masked key
            if (!seen) scores[i][j][half * 2 + e] = -attention::infinity();
          }
  }

  // To the warps of the same rows: of each row the greatest of this warp's scores.
  __device__ __forceinline__ void tell_greatest(float* exchange) {
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
        write(exchange, i, half, most);
      }
  }
  __device__ __forceinline__ void write(float* exchange, int piece, int half, float value) const {
    if (lane() % 4 == 0) store_shared<1>(exchange + part * C::tile_q + row(piece, half), Vector<float, 1>{{value}});
  }
  __device__ __forceinline__ float read(const float* exchange, int other, int piece, int half) const {
    return load_shared<1>(exchange + other * C::tile_q + row(piece, half)).data[0];
  }

  // Scores become weights 2^(score - greatest), which all warps of the rows read, and what was summed before is brought to the
  // new greatest. That is kept as it is subtracted, so that its rounding is a factor that all weights share.
  __device__ __forceinline__ void weigh(const Arguments& arguments, const float* exchange, char* weights) {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float most = read(exchange, 0, i, half);
#pragma unroll
        for (int other = 1; other < C::warps_vo; ++other) most = maximum(most, read(exchange, other, i, half));
        const float now = maximum(greatest[i][half], most * arguments.to_bits);
        const float subtracted = now == -attention::infinity() ? 0.0f : now;  // where nothing is seen yet
        const float factor = cukiln::exp2(greatest[i][half] - subtracted);
        greatest[i][half] = now;
        float own = 0.0f;
#pragma unroll
        for (int j = 0; j < key_columns; ++j) {
          float pair[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float bits = cukiln::fma(scores[i][j][half * 2 + e], arguments.to_bits, -subtracted);
            pair[e] = cukiln::exp2(bits);
            own += pair[e];
          }
          const int swizzled = (part * key_columns + j) ^ Weights<C>::swizzle(lane() / 4);  // swizzle: weights
          unsigned* const target = reinterpret_cast<unsigned*>(weights + Weights<C>::at(row(i, half), swizzled)) + lane() % 4;
          store_shared<1>(target, Vector<unsigned, 1>{{pack_pair<T>(pair[0], pair[1])}});
        }
        total[i][half] = total[i][half] * factor + own;
#pragma unroll
        for (int j = 0; j < out_columns; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) sums[i][j][half * 2 + e] *= factor;
      }
  }

  // sums += weights V
  __device__ __forceinline__ void add_values(const char* weights, const char* stage) {
    const char* const values = stage + part * own_columns * 2;
#pragma unroll
    for (int k = 0; k < C::tile_kv / 16; ++k) {
      unsigned a[pieces][4];
#pragma unroll
      for (int i = 0; i < pieces; ++i) ldmatrix<4>(a[i], weight_reader.at(weights, k, i));
#pragma unroll
      for (int j = 0; j < own_columns / 16; ++j) {
        unsigned b[4];
        ldmatrix_trans<4>(b, value_reader.at(values, j, k));
#pragma unroll
        for (int i = 0; i < pieces; ++i) attention::multiply_square<T>(sums[i][2 * j], sums[i][2 * j + 1], a[i], b);
      }
    }
  }

  // To the warps of the same rows: of each row the weights of this warp's keys.
  __device__ __forceinline__ void tell_total(float* exchange) const {
#pragma unroll
    for (int i = 0; i < pieces; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float own = total[i][half];
        own += shuffle_xor(own, 1);
        own += shuffle_xor(own, 2);
        write(exchange, i, half, own);
      }
  }
  __device__ __forceinline__ float whole_total(const float* exchange, int piece, int half) const {
    float whole = read(exchange, 0, piece, half);
#pragma unroll
    for (int other = 1; other < C::warps_vo; ++other) whole += read(exchange, other, piece, half);
    return whole;
  }
};

#endif  // CUKILN_DEVICE

}  // namespace mla
}  // namespace cukiln
