// Multi-head latent attention, absorbed: out = softmax(scale (q_nope ckv^T + q_pe kpe^T)) ckv over the keys that a query sees,
// and the logarithm of the softmax's sum. All heads share the keys, so rows of a tile are pairs of a query and a head.
//
// A block has tile_q rows. Tiles of tile_kv keys go through a ring of `stages` in shared memory, filled by cp.async, where the
// same bytes are read as keys and as values.
#pragma once

namespace cukiln {
namespace mla {

#if defined(CUKILN_DEVICE)

// A warp divides its columns of its rows, stages them where Q was, and writes whole vectors; lse is written by the first of the
// warps that share rows. `exchange` has their totals.
template <class C>
__device__ __forceinline__ void write(const Arguments& arguments, const Sequence<C>& sequence, const Warp<C>& warp, const float* exchange,
                                      char* staged) {
  using T = typename C::Input;
#pragma unroll
  for (int i = 0; i < Warp<C>::pieces; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp.row(i, half);
      const float total = warp.whole_total(exchange, i, half);
      const float share = share_of(total);
      if constexpr (C::lse) {
        const bool row_exists = in_bounds(sequence.first + row, sequence.rows);  // bounds: lse row
        const float lse = warp.greatest[i][half] + cukiln::log2(total);  // -infinity where nothing is seen
        float* const target = arguments.lse + sequence.of_all(arguments, sequence.first + row);
        if (warp.part == 0 && lane() % 4 == 0 && row_exists) store_global<1>(target, Vector<float, 1>{{lse}});
      }
#pragma unroll
      for (int j = 0; j < Warp<C>::out_columns; ++j) {
        const unsigned pair = pack_pair<T>(warp.sums[i][j][half * 2] * share, warp.sums[i][j][half * 2 + 1] * share);
        const int swizzled = (warp.part * Warp<C>::out_columns + j) ^ Ckv<C>::swizzle(row);  // swizzle: staged out
        store_shared<1>(reinterpret_cast<unsigned*>(staged + Ckv<C>::at(row, swizzled)) + lane() % 4, Vector<unsigned, 1>{{pair}});
      }
    }
  warp_barrier();
  T* const out = static_cast<T*>(arguments.out) + sequence.of_all(arguments, sequence.first) * columns_ckv;
  constexpr int per_row = Warp<C>::out_columns;
#pragma unroll
  for (int i = lane(); i < Warp<C>::rows * per_row; i += 32) {
    const int row = warp.warp_row + i / per_row, chunk = warp.part * per_row + i % per_row;
    const bool row_exists = in_bounds(sequence.first + row, sequence.rows);  // bounds: out row
    const int swizzled = chunk ^ Ckv<C>::swizzle(row);  // swizzle: written out
    const Vector<T, vector_elements> vector = load_shared<vector_elements>(reinterpret_cast<const T*>(staged + Ckv<C>::at(row, swizzled)));
    if (row_exists) store_global<vector_elements>(out + row * columns_ckv + chunk * vector_elements, vector);
  }
}

// The sums of each row as they are, its greatest score and its total.
template <class C>
__device__ __forceinline__ void write_partial(const SplitArguments& arguments, const Sequence<C>& sequence, const Warp<C>& warp,
                                              const float* exchange) {
  const int64_t rows = int64_t(arguments.tokens) * arguments.heads;
  const int64_t first = blockIdx.y * rows + sequence.of_all(arguments, sequence.first);
  float* const sums = arguments.workspace + first * columns_ckv + warp.part * Warp<C>::own_columns;
  float* const weights = arguments.workspace + arguments.splits * rows * columns_ckv + 2 * first;
#pragma unroll
  for (int i = 0; i < Warp<C>::pieces; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp.row(i, half);
      const bool row_exists = in_bounds(sequence.first + row, sequence.rows);  // bounds: partial row
      if (!row_exists) continue;
      const float total = warp.whole_total(exchange, i, half);
      if (warp.part == 0 && lane() % 4 == 0) store_global<2>(weights + 2 * row, Vector<float, 2>{{warp.greatest[i][half], total}});
#pragma unroll
      for (int j = 0; j < Warp<C>::out_columns; ++j) {
        const Vector<float, 2> pair = {{warp.sums[i][j][half * 2], warp.sums[i][j][half * 2 + 1]}};
        store_global<2>(sums + int64_t(row) * columns_ckv + j * 8 + lane() % 4 * 2, pair);
      }
    }
}

template <class C>
__device__ __forceinline__ void run(const ArgumentsOf<C>& arguments) {
  using T = typename C::Input;
  using K = Keys<C>;
  static_assert(C::stages >= 2, "a stage is filled while another is read");
  Sequence<C> sequence(arguments);
  if (!sequence.has_row(sequence.first)) return;
  sequence.read_keys(arguments);
  const Tiles own = tiles_of<C>(arguments, sequence);

  char* const q = shared_memory<char>();
  char* const ring = q + q_bytes<C>;
  char* const weights = ring + C::stages * stage_bytes<C>;
  float* const exchange = reinterpret_cast<float*>(weights + weights_bytes<C>);
  int* const numbers = reinterpret_cast<int*>(weights + weights_bytes<C> + exchange_bytes<C>);

  Feed<C> feed(arguments, sequence, own, numbers);
#pragma unroll
  for (int i = 0; i < C::stages; ++i) {
    feed.read(i);
    feed.keep(i);
  }
  // Q comes with the first keys.
  const int64_t token = sequence.first_q;
  const QueryRows<T> q_nope{static_cast<const T*>(arguments.q_nope) + token * arguments.of_q_nope.outer, arguments.heads};
  const QueryRows<T> q_pe{static_cast<const T*>(arguments.q_pe) + token * arguments.of_q_pe.outer, arguments.heads};
  const int left = sequence.rows - sequence.first;
  copy_rows<C, C::tile_q>(q, q_nope, arguments.of_q_nope, q_pe, arguments.of_q_pe, sequence.first, left);
  __syncthreads();  // all numbers of the first tiles are there
#pragma unroll
  for (int i = 0; i + 1 < C::stages; ++i) feed.start(arguments, stage_at<K>(ring, i), i, i);  // stage: first keys

  Warp<C> warp(arguments, sequence);
  int reading = 0, filling = C::stages - 1;
#pragma unroll 1
  for (int tile = 0; tile < own.count; ++tile) {
    cp_async_wait<C::stages - 2>();
    __syncthreads();  // this tile has landed, and all warps have left the one before
    feed.start(arguments, stage_at<K>(ring, filling), filling, tile + C::stages - 1);  // stage: next keys
    feed.read(tile + C::stages);
    warp.score(q, stage_at<K>(ring, reading));  // stage: scored keys
    const int begin = (own.first + tile) * C::tile_kv;
    if (warp.needs_mask(begin)) warp.mask(begin);
    warp.tell_greatest(exchange);
    feed.keep(reading);
    __syncthreads();  // all warps have written their greatest scores
    warp.weigh(arguments, exchange, weights);
    __syncthreads();  // all weights are there
    warp.add_values(weights, stage_at<K>(ring, reading));  // stage: added values
    filling = reading;
    reading = next_of(reading, C::stages);
  }
  warp.tell_total(exchange);
  if constexpr (!splits_keys<C>) cp_async_wait<C::stages - 2>();
  __syncthreads();  // all warps have written their totals, and Q has landed where there was no tile: out may take its place
  if constexpr (splits_keys<C>) {
    write_partial<C>(arguments, sequence, warp, exchange);
  } else {
    write<C>(arguments, sequence, warp, exchange, q);
  }
}

// Of attention with a query of each token: what its `merge` takes of its arguments, and of a Config.
struct MergeArguments {
  float* workspace;
  void* out;
  float* lse;
  struct {
    int64_t batch, position, head;
  } of_out;
  int batch, seq_q, heads_q, head_dim_vo, splits;
};
template <class C>
struct MergeConfig : C {
  static constexpr bool ragged = false;
  static constexpr int align_out = vector_elements;
};

template <class C>
__device__ __forceinline__ void merge(const SplitArguments& arguments) {
  if constexpr (C::ragged) {
    const int64_t row = (int64_t(blockIdx.x) * attention::merge_threads + threadIdx.x) / (columns_ckv / vector_elements);
    if (row >= int64_t(entry(arguments.qo_indptr, arguments.batch)) * arguments.heads) return;  // of no sequence
  }
  const int pitch = columns_ckv, of_token = arguments.heads * columns_ckv;
  attention::merge<MergeConfig<C>>(MergeArguments{arguments.workspace, arguments.out, arguments.lse, {of_token, 0, pitch},
                                                  arguments.tokens, 1, arguments.heads, columns_ckv, arguments.splits});
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

// What launches depend on, as values: non-template functions take it, so that g++ compiles them once for all kernels.
struct Plan {
  int tile_q, tile_kv, threads, shared_bytes, page_size;
  bool lse, ragged, splits_keys;
  ElementType type;
};

template <class C>
constexpr Plan plan_of = {C::tile_q, C::tile_kv, 32 * C::warps, shared_bytes<C>, C::page_size, C::lse, C::ragged, splits_keys<C>,
                          element_type<typename C::Input>};

// Rows and keys are numbers of two of them and a tile, in 32 bits.
constexpr int64_t longest = int64_t{1} << 29;
constexpr double log2_of_e = 1.4426950408889634;
enum { tensor_count = 4 };

// Behind the four tensors stand the tables: of queries, where the kernel takes several of a sequence; of pages; of the keys of last
// pages, where a page has several.
inline int table_count(const Plan& kernel) { return 2 + kernel.ragged + (kernel.page_size > 1); }
inline int first_output(const Plan& kernel) { return tensor_count + table_count(kernel); }

// Tiles of a call, or numbers of them.
inline int64_t tiles_of_call(const Plan& kernel, int64_t batch, int64_t rows) {
  return kernel.ragged ? rows / kernel.tile_q + batch : batch * ceil_div(rows / batch, int64_t(kernel.tile_q));
}

// Splits of a call: as many as asked, but no more than there are tiles of keys.
inline int splits(const Plan& kernel, int64_t keys, int64_t asked) {
  const int64_t tiles = keys < 1 ? 1 : ceil_div(keys, int64_t(kernel.tile_kv));
  return static_cast<int>(asked < 1 ? 1 : asked < tiles ? asked : tiles);
}

// Pointers: q_nope, q_pe, ckv_cache, kpe_cache; qo_indptr of several queries; kv_indptr, kv_indices; kv_last_page_len of pages with
// several keys; out, and lse where it is written. Integers: batch, tokens, heads, positions of all pages that are listed; the
// strides of tokens and heads of q_nope and q_pe, of pages and positions of ckv_cache and kpe_cache; causal. Launch: splits of the
// keys. Scalars: scale.
inline Arguments bind(const Plan& kernel, void* const* pointers, const int64_t* integers, const double* scalars) {
  Arguments arguments = {};
  arguments.q_nope = pointers[0];
  arguments.q_pe = pointers[1];
  arguments.ckv = pointers[2];
  arguments.kpe = pointers[3];
  const int at_kv = tensor_count + kernel.ragged;
  if (kernel.ragged) arguments.qo_indptr = static_cast<const int*>(pointers[tensor_count]);
  arguments.kv_indptr = static_cast<const int*>(pointers[at_kv]);
  arguments.kv_indices = static_cast<const int*>(pointers[at_kv + 1]);
  if (kernel.page_size > 1) arguments.kv_last_page_len = static_cast<const int*>(pointers[at_kv + 2]);
  arguments.out = pointers[first_output(kernel)];
  if (kernel.lse) arguments.lse = static_cast<float*>(pointers[first_output(kernel) + 1]);
  int* const extents[] = {&arguments.batch, &arguments.tokens, &arguments.heads};
  for (int i = 0; i < 3; ++i) *extents[i] = integers[i] >= 1 && integers[i] <= longest ? static_cast<int>(integers[i]) : -1;
  Strides* const strides[] = {&arguments.of_q_nope, &arguments.of_q_pe, &arguments.of_ckv, &arguments.of_kpe};
  for (int i = 0; i < tensor_count; ++i) *strides[i] = Strides{integers[4 + 2 * i], integers[5 + 2 * i]};
  arguments.causal = integers[12] != 0;
  const bool counted = arguments.batch > 0 && arguments.tokens > 0 && arguments.heads > 0 && integers[1] * integers[2] <= longest;
  arguments.tiles = counted ? static_cast<int>(tiles_of_call(kernel, integers[0], integers[1] * integers[2])) : -1;
  arguments.to_bits = static_cast<float>(scalars[0] * log2_of_e);
  return arguments;
}

template <class C>
ArgumentsOf<C> bind(void* const* pointers, const int64_t* integers, const int32_t* launch, const double* scalars, void* workspace) {
  const Arguments arguments = bind(plan_of<C>, pointers, integers, scalars);
  if constexpr (splits_keys<C>) {
    return SplitArguments{arguments, static_cast<float*>(workspace), splits(plan_of<C>, integers[3], launch[0])};
  } else {
    return arguments;
  }
}

// Of a split's rows: their sums, and two floats of each. Nothing grows with the keys.
inline int64_t workspace_bytes(const Plan& kernel, const int64_t* integers, const int32_t* launch) {
  if (!kernel.splits_keys) return 0;
  return 4 * splits(kernel, integers[3], launch[0]) * integers[1] * integers[2] * (columns_ckv + 2);
}

template <class C>
int64_t workspace_bytes(const int64_t* integers, const int32_t* launch) {
  return workspace_bytes(plan_of<C>, integers, launch);
}

// Writes the launches of a call and returns how many they are; 0 where the kernel cannot compute it.
inline int plan(const Plan& kernel, const Arguments& a, int splits, Launch* out) {
  if (a.tiles < 1 || (!kernel.ragged && a.tokens != a.batch) || splits > 65535) return 0;
  const Strides strides[] = {a.of_q_nope, a.of_q_pe, a.of_ckv, a.of_kpe};
  for (const Strides& of_tensor : strides)
    if (of_tensor.outer % vector_elements || of_tensor.inner % vector_elements) return 0;
  out[0] = Launch{0, {static_cast<uint32_t>(a.tiles), static_cast<uint32_t>(splits), 1},
                  {static_cast<uint32_t>(kernel.threads), 1, 1}, static_cast<uint32_t>(kernel.shared_bytes)};
  if (!kernel.splits_keys) return 1;
  const int64_t merging = ceil_div(int64_t(a.tokens) * a.heads * (columns_ckv / vector_elements), int64_t(attention::merge_threads));
  out[1] = Launch{1, {static_cast<uint32_t>(merging), 1, 1}, {attention::merge_threads, 1, 1}, 0};
  return 2;
}

template <class C>
int plan(const ArgumentsOf<C>& arguments, Launch* out) {
  if constexpr (splits_keys<C>) {
    return plan(plan_of<C>, arguments, arguments.splits, out);
  } else {
    return plan(plan_of<C>, arguments, 1, out);
  }
}

// One tensor of a call: rank 3, the elements last.
struct Rows {
  int64_t outer, inner;
  Strides strides;
  int columns;

  int64_t span() const { return outer && inner ? (outer - 1) * strides.outer + (inner - 1) * strides.inner + columns : 0; }
};

inline bool read_rows(const char* name, const TensorView& tensor, const Plan& kernel, bool cached, int columns, Rows& rows,
                      Complaint complaint) {
  const char* const axes = cached ? "(pages, positions of a page, elements)" : "(tokens, heads, elements)";
  if (tensor.rank != 3) CUKILN_REFUSE(complaint, "ValueError: %s has rank %d; rank 3 %s is allowed", name, tensor.rank, axes);
  if (tensor.shape[2] != columns)
    CUKILN_REFUSE(complaint, "ValueError: %s has %lld elements of a key; %d are allowed", name, static_cast<long long>(tensor.shape[2]), columns);
  // The stride of an extent of 1 says nothing: frameworks put anything there.
  const auto stride = [&](int axis) { return tensor.shape[axis] > 1 ? tensor.strides[axis] : 0; };
  rows = Rows{tensor.shape[0], tensor.shape[1], Strides{stride(0), stride(1)}, columns};
  if (cached && rows.inner != kernel.page_size)
    CUKILN_REFUSE(complaint, "ValueError: %s has pages of %lld positions; this kernel takes pages of %d: look up the kernel of this shape", name,
                  static_cast<long long>(rows.inner), kernel.page_size);
  if (rows.outer < 1 || rows.inner < 1) CUKILN_REFUSE(complaint, "ValueError: %s is empty; every extent must be at least 1", name);
  if (tensor.strides[2] != 1)
    CUKILN_REFUSE(complaint, "ValueError: the last axis of %s has stride %lld; it must be contiguous (stride 1)", name,
                  static_cast<long long>(tensor.strides[2]));
  if (rows.strides.outer < 0 || rows.strides.inner < 0)
    CUKILN_REFUSE(complaint, "ValueError: %s runs backwards; strides of at least 0 are allowed", name);
  if (rows.strides.outer % vector_elements || rows.strides.inner % vector_elements)
    CUKILN_REFUSE(complaint, "ValueError: %s has strides %lld, %lld; a kernel moves %d elements at once, so each must be a multiple of %d", name,
                  static_cast<long long>(tensor.strides[0]), static_cast<long long>(tensor.strides[1]), vector_elements, vector_elements);
  return true;
}

inline bool apart(const char* name, const TensorView& tensor, int64_t bytes, const char* written, const TensorView& other, int64_t other_bytes,
                  Complaint complaint) {
  const intptr_t begin = reinterpret_cast<intptr_t>(tensor.data), other_begin = reinterpret_cast<intptr_t>(other.data);
  if (begin + bytes <= other_begin || other_begin + other_bytes <= begin) return true;
  CUKILN_REFUSE(complaint, "ValueError: %s overlaps %s; its memory must be its own (a result cannot be written over an input)", written, name);
}

constexpr const char* tensor_names[] = {"q_nope", "q_pe", "ckv_cache", "kpe_cache"};

// The name of each table of a call, in order.
inline const char* table_name(const Plan& kernel, int index) {
  constexpr const char* names[] = {"qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"};
  return names[index + !kernel.ragged];
}

// Where sequences lie the tables alone say, on the device. `listed`: entries of kv_indices.
inline bool read_tables(const Plan& kernel, const TensorView* tensors, int64_t& batch, int64_t& listed, Complaint complaint) {
  const TensorView* const tables = tensors + tensor_count;
  const int at_kv = kernel.ragged, at_indices = at_kv + 1;
  for (int i = 0; i < table_count(kernel); ++i)
    if (!check_pointer(table_name(kernel, i), tables[i], ElementType::int32, tensors[0].device, 4, complaint, "q_nope")) return false;
  if (tables[at_kv].rank != 1 || tables[at_kv].shape[0] < 2)
    CUKILN_REFUSE(complaint, "ValueError: kv_indptr must be a vector of at least 2 elements: where pages of sequences begin, and where the last ones end");
  batch = tables[at_kv].shape[0] - 1;
  if (tables[at_indices].rank != 1)
    CUKILN_REFUSE(complaint, "ValueError: kv_indices has rank %d; a vector of pages is allowed", tables[at_indices].rank);
  listed = tables[at_indices].shape[0];
  for (int i = 0; i < table_count(kernel); ++i) {
    const int64_t length = i == at_indices ? listed : i > at_indices ? batch : batch + 1;
    if (!check_vector(table_name(kernel, i), tables[i], length, complaint)) return false;
  }
  if (listed > longest / kernel.page_size)
    CUKILN_REFUSE(complaint, "ValueError: kv_indices has %lld pages of %d positions; %lld positions are allowed", static_cast<long long>(listed),
                  kernel.page_size, static_cast<long long>(longest));
  return true;
}

// Reads the tensors of a call into `extents`; false and a sentence where a call cannot be right.
inline bool check(const Plan& kernel, const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  const int at_out = first_output(kernel), at_lse = at_out + 1;
  if (count != at_lse + kernel.lse)
    CUKILN_REFUSE(complaint, "TypeError: %d tensors were given; this kernel takes %d: q_nope, q_pe, ckv_cache, kpe_cache, %skv_indptr, kv_indices, %sout%s",
                  count, at_lse + kernel.lse, kernel.ragged ? "qo_indptr, " : "", kernel.page_size > 1 ? "kv_last_page_len, " : "",
                  kernel.lse ? ", lse" : "");
  Rows rows[tensor_count];
  for (int i = 0; i < tensor_count; ++i) {
    if (!check_pointer(tensor_names[i], tensors[i], kernel.type, tensors[0].device, 2 * vector_elements, complaint, "q_nope")) return false;
    if (!read_rows(tensor_names[i], tensors[i], kernel, i >= 2, i % 2 ? columns_kpe : columns_ckv, rows[i], complaint)) return false;
  }
  int64_t batch = 0, listed = 0;
  if (!read_tables(kernel, tensors, batch, listed, complaint)) return false;
  const int64_t tokens = rows[0].outer, heads = rows[0].inner;
  if (!agree("the number of tokens differs between q_nope and q_pe", tokens, rows[1].outer, complaint)) return false;
  if (!agree("heads differ between q_nope and q_pe", heads, rows[1].inner, complaint)) return false;
  if (!agree("the number of pages differs between ckv_cache and kpe_cache", rows[2].outer, rows[3].outer, complaint)) return false;
  if (!kernel.ragged && !agree("each sequence has one query; tokens of q_nope and sequences of kv_indptr", tokens, batch, complaint)) return false;
  if (tokens > longest / heads || tokens * heads + batch > longest)
    CUKILN_REFUSE(complaint, "ValueError: %lld tokens of %lld heads; %lld rows are allowed", static_cast<long long>(tokens), static_cast<long long>(heads),
                  static_cast<long long>(longest));
  const TensorView& out = tensors[at_out];
  if (!check_pointer("out", out, kernel.type, tensors[0].device, 2 * vector_elements, complaint, "q_nope")) return false;
  if (!check_same_shape("out", out, "q_nope", tensors[0], complaint) || !check_contiguous("out", out, complaint)) return false;
  const int64_t out_bytes = 2 * tokens * heads * columns_ckv, lse_bytes = 4 * tokens * heads;
  if (kernel.lse) {
    const TensorView& lse = tensors[at_lse];
    if (!check_pointer("lse", lse, ElementType::float32, tensors[0].device, 4, complaint, "q_nope")) return false;
    if (lse.rank != 2 || lse.shape[0] != tokens || lse.shape[1] != heads)
      CUKILN_REFUSE(complaint, "ValueError: lse must have the shape (tokens, heads): %lld, %lld", static_cast<long long>(tokens),
                    static_cast<long long>(heads));
    if (!check_contiguous("lse", lse, complaint)) return false;
    if (!apart("out", out, out_bytes, "lse", lse, lse_bytes, complaint)) return false;
  }
  for (int i = 0; i < at_out; ++i) {
    const char* const name = i < tensor_count ? tensor_names[i] : table_name(kernel, i - tensor_count);
    const int64_t bytes = i < tensor_count ? 2 * rows[i].span() : 4 * tensors[i].shape[0];
    if (!apart(name, tensors[i], bytes, "out", out, out_bytes, complaint)) return false;
    if (kernel.lse && !apart(name, tensors[i], bytes, "lse", tensors[at_lse], lse_bytes, complaint)) return false;
  }
  const int64_t values[] = {batch, tokens, heads, listed * kernel.page_size};
  for (int i = 0; i < 4; ++i) extents[i] = values[i];
  for (int i = 0; i < tensor_count; ++i) {
    extents[4 + 2 * i] = rows[i].strides.outer;
    extents[5 + 2 * i] = rows[i].strides.inner;
  }
  return true;
}

template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  return check(plan_of<C>, tensors, count, extents, complaint);
}

#endif  // CUKILN_HOST

}  // namespace mla
}  // namespace cukiln
