// What operators share that compute each row of a matrix from all of it: softmax and the norms. A row belongs to
// C::row_threads threads, a block has C::rows of them, and a thread moves C::vector elements at once. The row is
//
//   in registers   read once: a thread has C::steps vectors, all in flight at once
//   in shared      read once, C::loads vectors in flight, into room for C::steps vectors of each thread
//   online         read twice, C::loads vectors in flight: once for what the result needs of the whole row, once for it
//
// For operators that name reduce.cuh and this file in `shared`.
#pragma once

namespace cukiln {
namespace rows {

// How a row is held (Config::algorithm).
enum { in_registers = 0, in_shared = 1, online = 2 };

// Packed rows. gamma and beta are vectors of `columns` elements, null where the operator has none.
struct Arguments {
  const void* x;
  void* out;
  const void* gamma;
  const void* beta;
  int rows, columns;
  float epsilon;
};

template <class C> constexpr int threads_of = C::row_threads * C::rows;
// States of the warps of a block, of at most two words, for two reductions: none uses the words of the one before it.
enum { most_words = 2, reductions = 2 };
template <class C> constexpr int state_words = C::row_threads > 32 ? threads_of<C> / 32 * most_words : 0;
template <class C>
constexpr int shared_bytes = static_cast<int>(sizeof(unsigned)) * reductions * state_words<C> +
    (C::algorithm == in_shared ? threads_of<C> * C::steps * C::vector * static_cast<int>(sizeof(typename C::Input)) : 0);

#if defined(CUKILN_DEVICE)

__device__ __forceinline__ constexpr bool in_bounds(int64_t index, int64_t extent) { return index < extent; }
__device__ __forceinline__ constexpr bool in_bounds(unsigned index, unsigned extent) { return index < extent; }

// What the threads of a row have in common after the reduction number `which`.
template <class C, class F>
__device__ __forceinline__ typename F::State of_row(const typename F::State& own, int which) {
  static_assert(fold::words<F> <= most_words, "there is room for two words of a state");
  return fold::of_threads<F, C::row_threads, threads_of<C>>(own, shared_memory<unsigned>() + which * state_words<C>);
}

// This thread's part of its row: vectors that lie C::row_threads vectors apart. Threads beyond the last row have none, but
// take part in every reduction.
template <class C>
struct Part {
  using T = typename C::Input;
  using Values = Vector<float, C::vector>;
  static constexpr int in_flight = C::algorithm == in_registers ? C::steps : C::loads;

  const Arguments& arguments;
  int64_t offset;    // of the row
  unsigned columns;  // of it; 0 where there is none
  Values held[C::algorithm == in_registers ? C::steps : 1];

  __device__ __forceinline__ explicit Part(const Arguments& given) : arguments(given) {
    const int64_t row = int64_t(blockIdx.x) * C::rows + static_cast<int>(threadIdx.x) / C::row_threads;
    const bool exists = in_bounds(row, static_cast<int64_t>(given.rows));  // bounds: row
    offset = row * given.columns;
    columns = exists ? static_cast<unsigned>(given.columns) : 0;
    if constexpr (C::algorithm == in_registers) {
      Vector<T, C::vector> vectors[in_flight];
      read_several(vectors, 0);
#pragma unroll
      for (int step = 0; step < C::steps; ++step)
        if (has(step)) held[step] = widened(vectors[step]);
    } else if constexpr (C::algorithm == in_shared) {
#pragma unroll 1
      for (int first = 0; has(first); first += in_flight) {
        Vector<T, C::vector> vectors[in_flight];
        read_several(vectors, first);
#pragma unroll
        for (int i = 0; i < in_flight; ++i)
          if (has(first + i)) store_shared<C::vector>(place(first + i), vectors[i]);
      }
    }
  }

  static __device__ __forceinline__ unsigned lane() { return threadIdx.x % C::row_threads; }
  static __device__ __forceinline__ unsigned column(int step) {
    return (static_cast<unsigned>(step) * C::row_threads + lane()) * C::vector;
  }
  __device__ __forceinline__ bool has(int step) const {
    const bool exists = in_bounds(column(step), columns);  // bounds: column
    return exists;
  }

  // Calls visit(values, column) for each vector, in order. What it changes stays in registers, and nowhere else.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) {
    if constexpr (C::algorithm == in_registers) {
#pragma unroll
      for (int step = 0; step < C::steps; ++step)
        if (has(step)) visit(held[step], column(step));
    } else {
#pragma unroll 1
      for (int first = 0; has(first); first += in_flight) {
        Vector<T, C::vector> vectors[in_flight];
        if constexpr (C::algorithm == in_shared) {
#pragma unroll
          for (int i = 0; i < in_flight; ++i)
            if (has(first + i)) vectors[i] = load_shared<C::vector>(place(first + i));
        } else {
          read_several(vectors, first);
        }
#pragma unroll
        for (int i = 0; i < in_flight; ++i) {
          if (!has(first + i)) continue;
          Values values = widened(vectors[i]);
          visit(values, column(first + i));
        }
      }
    }
  }

  __device__ __forceinline__ float element(unsigned at) const {
    return to_float(load_global<1>(static_cast<const T*>(arguments.x) + offset + at).data[0]);
  }

  // Rounds to the output's type; accesses are of 16 bytes at most.
  __device__ __forceinline__ void store(const Values& values, unsigned at) const {
    using Out = typename C::Output;
    constexpr int most = 16 / static_cast<int>(sizeof(Out)), width = C::vector < most ? C::vector : most;
#pragma unroll
    for (int i = 0; i < C::vector; i += width) {
      Vector<Out, width> rounded;
#pragma unroll
      for (int j = 0; j < width; ++j) rounded.data[j] = from_float<Out>(values.data[i + j]);
      store_global<width>(static_cast<Out*>(arguments.out) + offset + at + i, rounded);
    }
  }

 private:
  __device__ __forceinline__ Vector<T, C::vector> read(int step) const {
    return load_global<C::vector>(static_cast<const T*>(arguments.x) + offset + column(step));
  }
  __device__ __forceinline__ void read_several(Vector<T, C::vector> (&vectors)[in_flight], int first) const {
#pragma unroll
    for (int i = 0; i < in_flight; ++i)
      if (has(first + i)) vectors[i] = read(first + i);
  }
  static __device__ __forceinline__ Values widened(const Vector<T, C::vector>& vector) {
    Values values;
#pragma unroll
    for (int i = 0; i < C::vector; ++i) values.data[i] = to_float(vector.data[i]);
    return values;
  }
  // Where a vector is in shared memory; read by this thread alone.
  static __device__ __forceinline__ T* place(int step) {
    T* const all = reinterpret_cast<T*>(shared_memory<unsigned>() + reductions * state_words<C>);
    return all + (static_cast<int>(threadIdx.x) / C::row_threads * C::steps * C::row_threads * C::vector + static_cast<int>(column(step)));
  }
};

// The sum of all values that `term` makes of the row's, a vector of values at a time.
template <class C, class Term>
__device__ __forceinline__ float sum_of(Part<C>& part, int which, Term term) {
  fold::Sum::State own = fold::Sum::nothing();
  part.each([&](Vector<float, C::vector>& values, unsigned) { fold::Sum::take(own, term(values), 0, 0); });
  return of_row<C, fold::Sum>(own, which).sum;
}

// A vector of gamma or beta, which all rows share.
template <class C>
__device__ __forceinline__ Vector<float, C::vector> shared_by_rows(const void* vector, unsigned column) {
  const auto read = load_global<C::vector>(static_cast<const typename C::Input*>(vector) + column);
  Vector<float, C::vector> values;
#pragma unroll
  for (int i = 0; i < C::vector; ++i) values.data[i] = to_float(read.data[i]);
  return values;
}

// out = (x - mean) / sqrt(square + epsilon) * gamma + beta, with gamma and beta where C has them.
template <class C>
__device__ __forceinline__ void write_normalised(Part<C>& part, float mean, float square) {
  const Arguments& arguments = part.arguments;
  const float factor = 1.0f / cukiln::sqrt(square + arguments.epsilon);
  part.each([&](Vector<float, C::vector>& values, unsigned column) {
#pragma unroll
    for (int i = 0; i < C::vector; ++i) {
      values.data[i] = (values.data[i] - mean) * factor;
      CUKILN_COUNT("multiply", 1);
    }
    if constexpr (C::scale) {
      const Vector<float, C::vector> gamma = shared_by_rows<C>(arguments.gamma, column);
#pragma unroll
      for (int i = 0; i < C::vector; ++i) {
        values.data[i] *= gamma.data[i];
        CUKILN_COUNT("multiply", 1);
      }
    }
    if constexpr (C::shift) {
      const Vector<float, C::vector> beta = shared_by_rows<C>(arguments.beta, column);
#pragma unroll
      for (int i = 0; i < C::vector; ++i) values.data[i] += beta.data[i];
    }
    part.store(values, column);
  });
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

// What launches depend on, as values: non-template functions take it, so that g++ compiles them once for all kernels.
// `capacity`: columns that a row may have; 0: any.
struct Plan {
  int row_threads, rows, vector, capacity, shared_bytes;
  bool scale, shift, epsilon;
};

template <class C>
constexpr Plan plan_of = {C::row_threads, C::rows, C::vector, C::algorithm == online ? 0 : C::row_threads * C::steps * C::vector,
                          shared_bytes<C>, C::scale, C::shift, C::epsilon};

constexpr int64_t largest_extent = INT32_MAX - 1024;

// Pointers: x, gamma and beta where there are any, out. Extents: rows, columns. Scalars: epsilon where there is one.
inline Arguments bind(const Plan& kernel, void* const* pointers, const int64_t* extents, const double* scalars) {
  Arguments arguments = {};
  arguments.x = pointers[0];
  if (kernel.scale) arguments.gamma = pointers[1];
  if (kernel.shift) arguments.beta = pointers[1 + kernel.scale];
  arguments.out = pointers[1 + kernel.scale + kernel.shift];
  const bool fits = extents[0] >= 0 && extents[0] <= largest_extent && extents[1] >= 0 && extents[1] <= largest_extent;
  arguments.rows = fits ? static_cast<int>(extents[0]) : -1;
  arguments.columns = static_cast<int>(extents[1]);
  if (kernel.epsilon) arguments.epsilon = static_cast<float>(scalars[0]);
  return arguments;
}

// Writes the launch of a call and returns 1; 0 where the kernel cannot compute it. Of an empty array one block has nothing
// to do.
inline int plan(const Plan& kernel, const Arguments& arguments, Launch* out) {
  if (arguments.rows < 0 || arguments.columns % kernel.vector || (kernel.capacity && arguments.columns > kernel.capacity)) return 0;
  const int64_t grid = arguments.rows ? ceil_div(arguments.rows, kernel.rows) : 1;
  out[0] = Launch{0, {static_cast<uint32_t>(grid), 1, 1}, {static_cast<uint32_t>(kernel.row_threads * kernel.rows), 1, 1},
                  static_cast<uint32_t>(kernel.shared_bytes)};
  return 1;
}

// What a kernel's element types are, as values.
struct Types {
  ElementType input, output;
  int input_bytes, output_bytes;
};

template <class C>
constexpr Types types_of = {element_type<typename C::Input>, element_type<typename C::Output>, sizeof(typename C::Input),
                            sizeof(typename C::Output)};

// Reads x, gamma, beta and out into `extents`; false and a sentence where a call cannot be right. Axes before the last one
// are merged.
inline bool check(const Plan& kernel, const Types& types, const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  const int expected = 2 + kernel.scale + kernel.shift, last = expected - 1;
  if (count != expected)
    CUKILN_REFUSE(complaint, "TypeError: %d tensors were given; this kernel takes %d: x%s%s, out", count, expected,
                  kernel.scale ? ", gamma" : "", kernel.shift ? ", beta" : "");
  const auto name = [&](int i) { return i == 0 ? "x" : i == last ? "out" : i == 1 && kernel.scale ? "gamma" : "beta"; };
  const auto access = [&](int bytes) { return kernel.vector * bytes < 16 ? kernel.vector * bytes : 16; };
  for (int i = 0; i < count; ++i) {
    const int bytes = i == last ? types.output_bytes : types.input_bytes;
    if (!check_pointer(name(i), tensors[i], i == last ? types.output : types.input, tensors[0].device, access(bytes), complaint, "x"))
      return false;
  }
  const TensorView &x = tensors[0], &out = tensors[last];
  if (x.rank < 1) CUKILN_REFUSE(complaint, "ValueError: x has rank 0; rank 1 or more is allowed, its last axis is a row");
  if (!check_same_shape("out", out, "x", x, complaint)) return false;
  if (!check_contiguous("x", x, complaint) || !check_contiguous("out", out, complaint)) return false;
  const int64_t rows = merged_extent(x, 0, x.rank - 1), columns = x.shape[x.rank - 1];
  if (rows > largest_extent || columns > largest_extent)
    CUKILN_REFUSE(complaint, "ValueError: x has %lld rows of %lld elements; at most %lld of each are allowed", static_cast<long long>(rows),
                  static_cast<long long>(columns), static_cast<long long>(largest_extent));
  if (columns % kernel.vector)
    CUKILN_REFUSE(complaint, "ValueError: rows of x have %lld elements; this kernel moves %d at once, so it must be a multiple of %d: "
                  "look up the kernel of this shape", static_cast<long long>(columns), kernel.vector, kernel.vector);
  if (kernel.capacity && columns > kernel.capacity)
    CUKILN_REFUSE(complaint, "ValueError: rows of x have %lld elements; this kernel holds rows of at most %d: look up the kernel of this shape",
                  static_cast<long long>(columns), kernel.capacity);
  for (int i = 1; i < last; ++i)
    if (!check_vector(name(i), tensors[i], columns, complaint)) return false;
  for (int i = 0; i < last; ++i)
    if (!check_apart(name(i), tensors[i], as_row(i ? columns : rows * columns), types.input_bytes, out, as_row(rows * columns),
                     types.output_bytes, complaint))
      return false;
  extents[0] = rows;
  extents[1] = columns;
  return true;
}

template <class C>
int64_t workspace_bytes(const int64_t*, const int32_t*) {
  return 0;
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  return plan(plan_of<C>, arguments, out);
}

template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  return check(plan_of<C>, types_of<C>, tensors, count, extents, complaint);
}

#endif  // CUKILN_HOST

}  // namespace rows
}  // namespace cukiln
