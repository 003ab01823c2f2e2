// A reduction over some axes of an array. Its axes are two lists, kept and reduced, neighbours merged where their strides
// allow it; an element lies at the sum of an offset along the kept axes and one along the reduced axes.
// The output is packed in the caller's order of the kept axes: where the list has another (`scattered`), each result is
// written to a place of its own.
//
// `rows`: threads side by side take vectors along the innermost reduced axis; the states of `lanes` threads become one.
// `columns`: they take vectors along the innermost kept axis, one state for each element; `lanes` of them side by side, the
// rows of threads become one. Either divides what is reduced into slices, where one wave of blocks would not do: each block
// then leaves its states in the workspace, and `combine` merges those of an output, in an order that the slices decide.
#pragma once

namespace cukiln {
namespace reduce {

constexpr int max_axes = 8;
constexpr int combine_threads = 256, combine_unroll = 8;

// What an output is of its values, after the map (`FUNCTIONS` in problem.py).
enum { fn_sum, fn_mean, fn_sum_of_squares, fn_max, fn_min, fn_argmax, fn_variance, fn_logsumexp };
// What a value is of an element, or of two (`MAPS` in problem.py): the latter are `dy` times the derivative of an activation at x.
enum { map_identity, map_square, map_multiply, map_relu_grad, map_gelu_grad, map_silu_grad, map_tanh_grad, map_sigmoid_grad };

// From the outermost to the innermost. Along an axis that is read in vectors, in vectors.
struct Axes {
  int extent[max_axes];
  int64_t stride[max_axes];
};

struct Arguments {
  const void* in;
  const void* other;   // x, where the map takes two
  void* out;
  void* mapped;        // where mapped values are written too
  unsigned* workspace; // word, slice, output
  Axes kept, reduced;
  int outputs;
  int units;           // rows, or vectors of columns
  int steps, chunk;    // along the reduced axes: of a unit, and of a slice of it
  int slices;
  int combine_columns; // outputs side by side of a block of `combine`
  float count;         // values of an output
  EpilogueArguments epilogue;
  Axes placed;         // the kept axes in the output, in elements
};

#if defined(CUKILN_DEVICE)

// Whether `index` is below `extent`. Every use is marked for the mutation suite.
__device__ __forceinline__ constexpr bool in_bounds(int index, int extent) { return index < extent; }

template <class T> constexpr bool is_whole = is_same<T, int> || is_same<T, int64_t>;

template <class C>
constexpr auto fold_of() {
  constexpr bool whole = is_whole<typename C::Input>;
  using Value = typename C::Input;
  if constexpr (C::fn == fn_variance) {
    return fold::Moments{};
  } else if constexpr (C::fn == fn_logsumexp) {
    return fold::LogSumExp{};
  } else if constexpr (whole && C::fn == fn_sum_of_squares) {
    return fold::WideSumOfSquares{};
  } else if constexpr (C::fn == fn_sum || C::fn == fn_mean || C::fn == fn_sum_of_squares) {
    if constexpr (whole) return fold::WideSum<Value>{};
    else return fold::Sum{};
  } else if constexpr (C::fn == fn_argmax) {
    if constexpr (whole) return fold::ArgMax<Value>{};
    else return fold::ArgMax<float>{};
  } else {
    if constexpr (whole) return fold::Extreme<Value, C::fn == fn_max>{};
    else return fold::Extreme<float, C::fn == fn_max>{};
  }
}
template <class C>
using Fold = decltype(fold_of<C>());
template <class C>
using State = typename Fold<C>::State;

template <int axes>
__device__ __forceinline__ int64_t offset_along(const Axes& along, int index) {
  int64_t offset = 0;
#pragma unroll
  for (int i = axes - 1; i > 0; --i) {
    const int rest = index / along.extent[i];
    offset += int64_t(index - rest * along.extent[i]) * along.stride[i];
    index = rest;
  }
  return offset + int64_t(index) * along.stride[0];
}

// The derivative of the map's activation. In exact runs x itself, for those that fp32 only approximates.
template <int map>
__device__ __forceinline__ float derivative(float x) {
  if (exact_epilogue()) return x;
  if constexpr (map == map_gelu_grad) {
    return 0.5f * (1.0f + cukiln::erf(x * 0.70710678118654752f)) + x * (0.39894228040143268f * cukiln::exp(-0.5f * x * x));
  } else if constexpr (map == map_tanh_grad) {
    const float y = cukiln::tanh(x);
    return 1.0f - y * y;
  } else {
    const float y = 1.0f / (1.0f + cukiln::exp(-x));
    return map == map_silu_grad ? y * (1.0f + x * (1.0f - y)) : y * (1.0f - y);
  }
}

template <int map>
__device__ __forceinline__ float value_of_two(float value, float x) {
  if constexpr (map != map_identity && map != map_relu_grad) CUKILN_COUNT("multiply", 1);
  if constexpr (map == map_identity) return value;
  else if constexpr (map == map_square) return value * value;
  else if constexpr (map == map_multiply) return value * x;
  else if constexpr (map == map_relu_grad) return x <= 0.0f ? 0.0f : value;  // as frameworks have it: a NaN lets dy through
  else return value * derivative<map>(x);
}

// Vectors that a thread has in flight, and where they came from.
template <class C>
struct Batch {
  Vector<typename C::Input, C::vector> in[C::unroll], other[C::two_inputs ? C::unroll : 1];
  int64_t offset[C::unroll];
  bool has[C::unroll];
};

template <class C>
__device__ __forceinline__ void load(const Arguments& arguments, int64_t offset, int u, Batch<C>& batch) {
  batch.offset[u] = offset;
  batch.in[u] = load_global<C::vector>(static_cast<const typename C::Input*>(arguments.in) + offset);
  if constexpr (C::two_inputs) batch.other[u] = load_global<C::vector>(static_cast<const typename C::Input*>(arguments.other) + offset);
}

// The values of a vector, which are written where the Config says so: rounded there, but not here.
template <class C>
__device__ __forceinline__ Vector<typename Fold<C>::Value, C::vector> values_of(const Arguments& arguments, const Batch<C>& batch, int u) {
  using Input = typename C::Input;
  Vector<typename Fold<C>::Value, C::vector> values;
  if constexpr (is_whole<typename Fold<C>::Value>) {
    return batch.in[u];
  } else {
#pragma unroll
    for (int i = 0; i < C::vector; ++i)
      values.data[i] = value_of_two<C::map>(to_float(batch.in[u].data[i]), to_float(batch.other[C::two_inputs ? u : 0].data[i]));
    if constexpr (C::write_map) {
      Vector<Input, C::vector> rounded;
#pragma unroll
      for (int i = 0; i < C::vector; ++i) rounded.data[i] = from_float<Input>(values.data[i]);
      store_global<C::vector>(static_cast<Input*>(arguments.mapped) + batch.offset[u], rounded);
    }
    if constexpr (C::fn == fn_sum_of_squares) {
#pragma unroll
      for (int i = 0; i < C::vector; ++i) {
        values.data[i] *= values.data[i];
        CUKILN_COUNT("multiply", 1);
      }
    }
    return values;
  }
}

// A sum over the count. In exact runs the sum, which an epilogue can go on with exactly.
__device__ __forceinline__ float divided(float sum, float count) { return exact_epilogue() ? sum : sum / count; }

// What an output is of its state.
template <class C>
__device__ __forceinline__ auto result_of(const Arguments& arguments, const State<C>& state) {
  constexpr bool whole = is_whole<typename C::Input>;
  if constexpr (C::fn == fn_argmax) {
    return state.index;
  } else if constexpr (C::fn == fn_max || C::fn == fn_min) {
    return state.value;
  } else if constexpr (C::fn == fn_variance) {
    return divided(state.squares, arguments.count);
  } else if constexpr (C::fn == fn_logsumexp) {
    return fold::LogSumExp::result(state);
  } else if constexpr (!whole) {
    return C::fn == fn_mean ? divided(state.sum, arguments.count) : state.sum;
  } else if constexpr (C::fn == fn_mean) {
    return divided(static_cast<float>(static_cast<int64_t>(state.sum)), arguments.count);
  } else {
    return static_cast<int64_t>(state.sum);
  }
}

// N outputs that are neighbours in the order of the kept axes.
template <class C, int N>
__device__ __forceinline__ void write(const Arguments& arguments, int first, const State<C> (&states)[N]) {
  using Output = typename C::Output;
  constexpr int width = C::scattered ? 1 : sizeof(Output) * N <= 16 ? N : 16 / sizeof(Output);
  int place = first, apart = 1;
  if constexpr (C::scattered) {
    place = static_cast<int>(offset_along<C::kept_axes>(arguments.placed, first));
    apart = static_cast<int>(arguments.placed.stride[C::kept_axes - 1]);
  }
#pragma unroll
  for (int from = 0; from < N; from += width) {
    Vector<Output, width> stored;
    if constexpr (is_whole<Output>) {
#pragma unroll
      for (int i = 0; i < width; ++i) stored.data[i] = static_cast<Output>(result_of<C>(arguments, states[from + i]));
    } else {
      Vector<float, width> results;
#pragma unroll
      for (int i = 0; i < width; ++i) results.data[i] = static_cast<float>(result_of<C>(arguments, states[from + i]));
      C::Epilogue::template apply<width>(results, Position{0, 0, place + from * apart}, arguments.epilogue);
#pragma unroll
      for (int i = 0; i < width; ++i) stored.data[i] = from_float<Output>(results.data[i]);
    }
    store_global<width>(static_cast<Output*>(arguments.out) + place + from * apart, stored);
  }
}

// The end of a block: outputs, or the states of its slice.
template <class C, int N>
__device__ __forceinline__ void finish(const Arguments& arguments, int first, const State<C> (&states)[N]) {
  if constexpr (!C::two_pass) {
    write<C, N>(arguments, first, states);
  } else {
    constexpr int width = N < 4 ? N : 4;
#pragma unroll
    for (int i = 0; i < fold::words<Fold<C>>; ++i) {
      unsigned* const target = arguments.workspace + (int64_t(i) * arguments.slices + blockIdx.y) * arguments.outputs + first;
#pragma unroll
      for (int from = 0; from < N; from += width) {
        Vector<unsigned, width> words;
#pragma unroll
        for (int j = 0; j < width; ++j) words.data[j] = fold::words_of<Fold<C>>(states[from + j]).data[i];
        store_global<width>(target + from, words);
      }
    }
  }
}

// Steps of the block.
struct Slice {
  int begin, end;
};
__device__ __forceinline__ Slice slice_of_block(const Arguments& arguments) {
  const int begin = static_cast<int>(blockIdx.y) * arguments.chunk;
  return {begin, arguments.steps - begin < arguments.chunk ? arguments.steps : begin + arguments.chunk};
}

template <class C>
__device__ __forceinline__ void rows(const Arguments& arguments) {
  const int lane = static_cast<int>(threadIdx.x) % C::lanes;
  const int row = static_cast<int>(blockIdx.x) * (C::threads / C::lanes) + static_cast<int>(threadIdx.x) / C::lanes;
  const bool exists = in_bounds(row, arguments.units);  // bounds: row
  const int64_t base = exists ? offset_along<C::kept_axes>(arguments.kept, row) : 0;
  const Slice slice = slice_of_block(arguments);
  State<C> state[1] = {Fold<C>::nothing()};
  for (int first = slice.begin + lane; exists && first < slice.end; first += C::lanes * C::unroll) {
    Batch<C> batch;
#pragma unroll
    for (int u = 0; u < C::unroll; ++u) {
      const int step = first + u * C::lanes;
      batch.has[u] = in_bounds(step, slice.end);  // bounds: step of a row
      if (batch.has[u]) load<C>(arguments, base + offset_along<C::reduced_axes>(arguments.reduced, step), u, batch);
    }
#pragma unroll
    for (int u = 0; u < C::unroll; ++u)
      if (batch.has[u]) Fold<C>::take(state[0], values_of<C>(arguments, batch, u), (first + u * C::lanes) * C::vector, 1);
  }
  state[0] = fold::of_threads<Fold<C>, C::lanes, C::threads>(state[0], shared_memory<unsigned>());
  if (exists && lane == 0) finish<C, 1>(arguments, row, state);
}

template <class C>
__device__ __forceinline__ void columns(const Arguments& arguments) {
  constexpr int depth = C::threads / C::lanes;
  const int x = static_cast<int>(threadIdx.x) % C::lanes, y = static_cast<int>(threadIdx.x) / C::lanes;
  const int unit = static_cast<int>(blockIdx.x) * C::lanes + x;
  const bool exists = in_bounds(unit, arguments.units);  // bounds: column
  const int64_t base = exists ? offset_along<C::kept_axes>(arguments.kept, unit) : 0;
  const Slice slice = slice_of_block(arguments);
  State<C> states[C::vector];
#pragma unroll
  for (int i = 0; i < C::vector; ++i) states[i] = Fold<C>::nothing();
  for (int first = slice.begin + y; exists && first < slice.end; first += depth * C::unroll) {
    Batch<C> batch;
#pragma unroll
    for (int u = 0; u < C::unroll; ++u) {
      const int step = first + u * depth;
      batch.has[u] = in_bounds(step, slice.end);  // bounds: step of a column
      if (batch.has[u]) load<C>(arguments, base + offset_along<C::reduced_axes>(arguments.reduced, step), u, batch);
    }
    Vector<typename Fold<C>::Value, C::vector> values[C::unroll];
#pragma unroll
    for (int u = 0; u < C::unroll; ++u)
      if (batch.has[u]) values[u] = values_of<C>(arguments, batch, u);
    const bool all = batch.has[C::unroll - 1];
#pragma unroll
    for (int i = 0; i < C::vector; ++i) {
      if (all) {
        Vector<typename Fold<C>::Value, C::unroll> column;
#pragma unroll
        for (int u = 0; u < C::unroll; ++u) column.data[u] = values[u].data[i];
        Fold<C>::take(states[i], column, first, depth);
      } else {
#pragma unroll
        for (int u = 0; u < C::unroll; ++u)
          if (batch.has[u]) Fold<C>::take(states[i], Vector<typename Fold<C>::Value, 1>{{values[u].data[i]}}, first + u * depth, depth);
      }
    }
  }
  fold::of_columns<Fold<C>>(states, shared_memory<unsigned>(), C::lanes, C::threads);
  if (exists && y == 0) finish<C, C::vector>(arguments, unit * C::vector, states);
}

template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  if constexpr (C::along_rows) {
    rows<C>(arguments);
  } else {
    columns<C>(arguments);
  }
}

// The states of the slices of each output.
template <class C>
__device__ __forceinline__ void combine(const Arguments& arguments) {
  const int columns = arguments.combine_columns, depth = combine_threads / columns;
  const int x = static_cast<int>(threadIdx.x) % columns, y = static_cast<int>(threadIdx.x) / columns;
  const int output = static_cast<int>(blockIdx.x) * columns + x;
  const bool exists = in_bounds(output, arguments.outputs);  // bounds: output of combine
  State<C> state[1] = {Fold<C>::nothing()};
  for (int first = y; exists && first < arguments.slices; first += depth * combine_unroll) {
    fold::Words<Fold<C>> words[combine_unroll];
    bool has[combine_unroll];
#pragma unroll
    for (int u = 0; u < combine_unroll; ++u) {
      const int slice = first + u * depth;
      has[u] = in_bounds(slice, arguments.slices);  // bounds: slice of combine
#pragma unroll
      for (int i = 0; has[u] && i < fold::words<Fold<C>>; ++i)
        words[u].data[i] = load_global<1>(arguments.workspace + (int64_t(i) * arguments.slices + slice) * arguments.outputs + output).data[0];
    }
#pragma unroll
    for (int u = 0; u < combine_unroll; ++u)
      if (has[u]) Fold<C>::merge(state[0], fold::state_of<Fold<C>>(words[u]));
  }
  fold::of_columns<Fold<C>>(state, shared_memory<unsigned>(), columns, combine_threads);
  if (exists && y == 0) write<C, 1>(arguments, output, state);
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

// No index, nor one that adds a block's steps to it, leaves 32 bits.
constexpr int64_t largest_count = int64_t(1) << 30;
constexpr int64_t most_slices = 65535;  // blocks of a grid along y

// 4-byte words of a fold's state; `whole`: of int32.
constexpr int state_words(int fn, bool whole, int size) {
  if (size == 8) return 2;
  if (fn == fn_variance) return 3;
  if (fn == fn_argmax || fn == fn_logsumexp) return 2;
  return whole && (fn == fn_sum || fn == fn_mean || fn == fn_sum_of_squares) ? 2 : 1;
}

// What launches depend on, as values: g++ compiles the functions that take it once for all kernels of a library.
struct Plan {
  bool along_rows, two_pass, two_inputs, write_map, in_order, scattered;
  int threads, lanes, vector, kept_axes, reduced_axes, words;
  uint32_t shared_bytes;
  int epilogue_tensors, epilogue_scalars;
};

template <class C>
constexpr Plan make_plan() {
  Plan plan = {};
  plan.along_rows = C::along_rows;
  plan.two_pass = C::two_pass;
  plan.two_inputs = C::two_inputs;
  plan.write_map = C::write_map;
  plan.in_order = C::fn == fn_argmax;
  plan.scattered = C::scattered;
  plan.threads = C::threads;
  plan.lanes = C::lanes;
  plan.vector = C::vector;
  plan.kept_axes = C::kept_axes;
  plan.reduced_axes = C::reduced_axes;
  plan.words = state_words(C::fn, is_same<typename C::Input, int>, sizeof(typename C::Input));
  const int across = C::lanes > 32 ? C::threads / 32 : 0, down = C::threads > C::lanes ? C::threads * C::vector : 0;
  plan.shared_bytes = static_cast<uint32_t>(4 * plan.words * (C::along_rows ? across : down));
  plan.epilogue_tensors = C::Epilogue::tensors;
  plan.epilogue_scalars = C::Epilogue::scalars;
  return plan;
}

template <class C>
constexpr Plan plan_of = make_plan<C>();

// An array of up to `max_axes` axes: missing ones come first, with extent 1.
struct Array {
  int64_t shape[max_axes], strides[max_axes];
};

// Merged axes of one kind, from the outermost to the innermost; never none.
struct List {
  int count;
  int64_t extent[max_axes], stride[max_axes], placed[max_axes];  // placed: the stride in the output

  int64_t elements() const {
    int64_t found = 1;
    for (int i = 0; i < count; ++i) found = extent[i] > 0 && found > INT64_MAX / extent[i] ? INT64_MAX : found * extent[i];
    return found;
  }
};

// The axes whose bit in `mask` is `chosen` (bit 0: the last axis), neighbours merged. `sorted`: by stride, the largest first,
// where the order of elements does not matter.
inline List list_of(const Array& array, unsigned mask, bool chosen, bool sorted) {
  List found = {};
  int64_t places[max_axes], packed = 1;
  for (int axis = max_axes - 1; axis >= 0; --axis) {
    const bool kept = (mask >> (max_axes - 1 - axis) & 1u) == 0;
    places[axis] = kept ? packed : 0;
    if (kept) packed = packed * array.shape[axis] > largest_count ? largest_count + 1 : packed * array.shape[axis];
  }
  for (int axis = 0; axis < max_axes; ++axis) {
    if (((mask >> (max_axes - 1 - axis) & 1u) != 0) != chosen || array.shape[axis] == 1) continue;
    int at = found.count++;
    for (; sorted && at > 0 && found.stride[at - 1] < array.strides[axis]; --at) {
      found.extent[at] = found.extent[at - 1];
      found.stride[at] = found.stride[at - 1];
      found.placed[at] = found.placed[at - 1];
    }
    found.extent[at] = array.shape[axis];
    found.stride[at] = array.strides[axis];
    found.placed[at] = places[axis];
  }
  int merged = 0;
  for (int i = 1; i < found.count; ++i) {
    if (found.stride[merged] == found.extent[i] * found.stride[i] && found.placed[merged] == found.extent[i] * found.placed[i]) {
      found.extent[merged] *= found.extent[i];
    } else {
      found.extent[++merged] = found.extent[i];
    }
    found.stride[merged] = found.stride[i];
    found.placed[merged] = found.placed[i];
  }
  if (found.count == 0) found.extent[0] = 1;
  found.count = merged + 1;
  return found;
}

// How what is reduced is divided: none of the slices is empty.
struct Division {
  int64_t slices, chunk;
};
inline Division divide(int64_t steps, int64_t asked) {
  if (steps < 1) return {1, 1};
  const int64_t slices = asked < 1 ? 1 : asked < steps ? asked : steps, chunk = ceil_div(steps, slices);
  return {ceil_div(steps, chunk), chunk};
}

// Extents: the shape, the strides, the elements of the output; then the one attribute, which no tensor shows: the reduced
// axes, as the sum of 2^(axes behind each).
enum { at_strides = max_axes, at_outputs = 2 * max_axes, at_reduced };

// Of a call with outputs.
inline Division division(const Plan& kernel, const int64_t* extents, const int32_t* launch) {
  int64_t elements = 1;
  for (int i = 0; i < max_axes; ++i) elements = extents[i] > 0 && elements > INT64_MAX / extents[i] ? INT64_MAX : elements * extents[i];
  return divide(elements / extents[at_outputs] / (kernel.along_rows ? kernel.vector : 1), launch[0]);
}

// In vectors along the innermost one, where `vector` is not 1. False where an extent or a stride is not of so many elements.
inline bool set_axes(const List& list, int vector, bool inner, Axes& axes) {
  bool fits = true;
  for (int i = 0; i < list.count; ++i) {
    const bool vectors = inner && i == list.count - 1 && vector > 1;
    fits = fits && (vectors ? list.stride[i] == 1 && list.extent[i] % vector == 0 : list.stride[i] % vector == 0);
    axes.extent[i] = static_cast<int>(vectors ? list.extent[i] / vector : list.extent[i]);
    axes.stride[i] = vectors ? vector : list.stride[i];
  }
  return fits;
}

// Pointers: the inputs, the epilogue's tensors, out, the mapped values. Scalars: those of the epilogue. Launch: slices. What the kernel cannot compute has no units.
inline Arguments bind(const Plan& kernel, void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace) {
  Arguments arguments = {};
  arguments.in = *pointers++;
  if (kernel.two_inputs) arguments.other = *pointers++;
  for (int i = 0; i < kernel.epilogue_tensors; ++i) arguments.epilogue.tensors[i] = *pointers++;
  for (int i = 0; i < kernel.epilogue_scalars; ++i) arguments.epilogue.scalars[i] = static_cast<float>(scalars[i]);
  arguments.out = *pointers++;
  if (kernel.write_map) arguments.mapped = *pointers++;
  arguments.workspace = static_cast<unsigned*>(workspace);

  Array array;
  for (int i = 0; i < max_axes; ++i) {
    array.shape[i] = extents[i];
    array.strides[i] = extents[at_strides + i];
    if (array.shape[i] < 0 || array.shape[i] > largest_count) return arguments;
  }
  const int64_t axes = extents[at_reduced];
  const unsigned mask = axes >= 1 && axes < 1 << max_axes ? static_cast<unsigned>(axes) : 0;
  const List kept = list_of(array, mask, false, true), reduced = list_of(array, mask, true, !kernel.in_order);
  const int64_t outputs = kept.elements(), count = reduced.elements();
  if (mask == 0 || kept.count != kernel.kept_axes || reduced.count != kernel.reduced_axes || outputs < 1 ||
      outputs != extents[at_outputs] || outputs > largest_count || count > largest_count)
    return arguments;
  if (!set_axes(kept, kernel.vector, !kernel.along_rows, arguments.kept) ||
      !set_axes(reduced, kernel.vector, kernel.along_rows, arguments.reduced))
    return arguments;
  for (int i = 0; i < kept.count; ++i) {
    if (!kernel.scattered && i > 0 && kept.placed[i - 1] < kept.placed[i]) return arguments;
    arguments.placed.extent[i] = static_cast<int>(kept.extent[i]);
    arguments.placed.stride[i] = kept.placed[i];
  }
  const int32_t undivided = 1;
  const Division parts = division(kernel, extents, kernel.two_pass ? launch : &undivided);
  arguments.outputs = static_cast<int>(outputs);
  arguments.units = static_cast<int>(kernel.along_rows ? outputs : outputs / kernel.vector);
  arguments.steps = static_cast<int>(kernel.along_rows ? count / kernel.vector : count);
  arguments.chunk = static_cast<int>(parts.chunk);
  arguments.slices = static_cast<int>(parts.slices);
  arguments.count = static_cast<float>(count);
  arguments.combine_columns = 1;
  // Eight words are the least that memory gives at once; more of them where there are few slices.
  while (arguments.combine_columns < combine_threads && arguments.combine_columns < outputs &&
         (arguments.combine_columns < 8 || combine_threads / arguments.combine_columns > 2 * parts.slices))
    arguments.combine_columns *= 2;
  return arguments;
}

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace) {
  return bind(plan_of<C>, pointers, extents, launch, scalars, workspace);
}

template <class C>
int64_t workspace_bytes(const int64_t* extents, const int32_t* launch) {
  if (!C::two_pass || extents[at_outputs] < 1) return 0;
  return 4 * plan_of<C>.words * division(plan_of<C>, extents, launch).slices * extents[at_outputs];
}

// Writes the launches of one call and returns how many they are; 0 where the kernel cannot compute it.
inline int plan(const Plan& kernel, const Arguments& arguments, Launch* out) {
  if (arguments.units < 1 || arguments.slices > most_slices) return 0;
  const int64_t blocks = ceil_div(arguments.units, kernel.along_rows ? kernel.threads / kernel.lanes : kernel.lanes);
  const uint32_t threads = static_cast<uint32_t>(kernel.threads);
  out[0] = Launch{0, {static_cast<uint32_t>(blocks), static_cast<uint32_t>(arguments.slices), 1}, {threads, 1, 1}, kernel.shared_bytes};
  if (!kernel.two_pass) return 1;
  const uint32_t grid = static_cast<uint32_t>(ceil_div(arguments.outputs, arguments.combine_columns));
  out[1] = Launch{1, {grid, 1, 1}, {combine_threads, 1, 1}, static_cast<uint32_t>(4 * kernel.words * combine_threads)};
  return 2;
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  return plan(plan_of<C>, arguments, out);
}

// First and last byte that a tensor's elements may lie in.
struct Span {
  int64_t begin, end;

  Span(const TensorView& tensor, int64_t size) : begin(reinterpret_cast<intptr_t>(tensor.data)), end(begin + size) {
    for (int i = 0; i < tensor.rank; ++i) {
      if (tensor.shape[i] < 1) end = begin;
      else if (end > begin) end += (tensor.shape[i] - 1) * tensor.strides[i] * size;
    }
  }
};

inline bool check_apart(const char* name, Span one, const char* written, Span other, Complaint complaint) {
  if (one.begin < other.end && other.begin < one.end)
    CUKILN_REFUSE(complaint, "ValueError: %s overlaps %s; its memory must be its own (a result cannot be written over an input)", written, name);
  return true;
}

inline bool check_array(const char* name, const TensorView& tensor, Complaint complaint) {
  if (tensor.rank < 1 || tensor.rank > max_axes)
    CUKILN_REFUSE(complaint, "ValueError: %s has rank %d; 1 to %d is allowed", name, tensor.rank, max_axes);
  for (int i = 0; i < tensor.rank; ++i)
    if (tensor.shape[i] > 1 && tensor.strides[i] < 1)
      CUKILN_REFUSE(complaint, "ValueError: axis %d of %s has stride %lld; strides must be at least 1", i, name, static_cast<long long>(tensor.strides[i]));
  return true;
}

// A function that has no value of nothing asks for an element at least (`OF_NOTHING` in problem.py).
inline bool check_not_empty(const char* name, const TensorView& tensor, Complaint complaint) {
  for (int i = 0; i < tensor.rank; ++i)
    if (tensor.shape[i] == 0)
      CUKILN_REFUSE(complaint, "ValueError: axis %d of %s has extent 0; this kernel's function has no value of no elements", i, name);
  return true;
}

inline bool same_array(const char* name, const TensorView& tensor, const char* as, const TensorView& other, Complaint complaint) {
  bool same = tensor.rank == other.rank;
  for (int i = 0; same && i < tensor.rank; ++i)
    same = tensor.shape[i] == other.shape[i] && (tensor.shape[i] == 1 || tensor.strides[i] == other.strides[i]);
  if (!same) CUKILN_REFUSE(complaint, "ValueError: %s must have the shape and the strides of %s", name, as);
  return true;
}

// Packed, of any shape: how many elements it has. -1 where it is not.
inline int64_t packed_elements(const TensorView& tensor) {
  int64_t packed = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] != packed) return -1;
    packed *= tensor.shape[i];
  }
  return packed;
}

inline bool check_packed(const char* name, const TensorView& tensor, int64_t elements, Complaint complaint) {
  const int64_t found = packed_elements(tensor);
  if (found < 1) CUKILN_REFUSE(complaint, "ValueError: %s must be packed, with an element at least", name);
  if (elements && found != elements)
    CUKILN_REFUSE(complaint, "ValueError: %s has %lld elements, and out %lld", name, static_cast<long long>(found), static_cast<long long>(elements));
  return true;
}

// Reads the inputs, the epilogue's tensors, out and the mapped values into `extents`; false and a sentence where a call
// cannot be right.
template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  constexpr int inputs = C::two_inputs ? 2 : 1, outputs = C::write_map ? 2 : 1, fixed = inputs + outputs;
  if (count != fixed + C::Epilogue::tensors)
    CUKILN_REFUSE(complaint, "TypeError: %d tensors were given; this kernel takes %d: %s, %d of the epilogue, out%s", count,
                  fixed + C::Epilogue::tensors, C::two_inputs ? "dy, x" : "x", C::Epilogue::tensors, C::write_map ? ", dx" : "");
  const char* const first = C::two_inputs ? "dy" : "x";
  const TensorView* const written = tensors + inputs + C::Epilogue::tensors;
  const TensorView &in = tensors[0], &out = written[0];
  constexpr int in_size = sizeof(typename C::Input), out_size = sizeof(typename C::Output);
  constexpr int widest = 16 / out_size, across = C::along_rows || C::scattered ? 1 : C::vector < widest ? C::vector : widest;
  if (!check_pointer(first, in, element_type<typename C::Input>, in.device, in_size * C::vector, complaint)) return false;
  if (!check_array(first, in, complaint)) return false;
  constexpr bool of_nothing = C::fn == fn_sum || C::fn == fn_sum_of_squares || C::fn == fn_logsumexp;
  if (!of_nothing && !check_not_empty(first, in, complaint)) return false;
  if (!check_pointer("out", out, element_type<typename C::Output>, in.device, out_size * across, complaint, first)) return false;
  if (!check_packed("out", out, 0, complaint)) return false;
  const int64_t elements = packed_elements(out);
  const auto check_like_first = [&](const char* name, const TensorView& tensor) {
    return check_pointer(name, tensor, element_type<typename C::Input>, in.device, in_size * C::vector, complaint, first) &&
        same_array(name, tensor, first, in, complaint);
  };
  if (C::two_inputs && !check_like_first("x", tensors[1])) return false;
  if (C::write_map && !check_like_first("dx", written[1])) return false;
  for (int i = 0; i < C::Epilogue::tensors; ++i) {
    const TensorView& tensor = tensors[inputs + i];
    const char* const name = C::Epilogue::tensor(i) == EpilogueTensor::mask ? "mask" : "residual";
    const int size = C::Epilogue::element_bytes(i);
    if (!check_pointer(name, tensor, C::Epilogue::element(i), in.device, size * across, complaint, first)) return false;
    if (!check_packed(name, tensor, elements, complaint)) return false;
    if (!check_apart(name, Span(tensor, size), "out", Span(out, out_size), complaint)) return false;
    if (C::write_map && !check_apart(name, Span(tensor, size), "dx", Span(written[1], in_size), complaint)) return false;
  }
  for (int i = 0; i < inputs; ++i) {
    const char* const name = i ? "x" : first;
    if (!check_apart(name, Span(tensors[i], in_size), "out", Span(out, out_size), complaint)) return false;
    if (C::write_map && !check_apart(name, Span(tensors[i], in_size), "dx", Span(written[1], in_size), complaint)) return false;
  }
  if (C::write_map && !check_apart("dx", Span(written[1], in_size), "out", Span(out, out_size), complaint)) return false;
  for (int i = 0; i < max_axes; ++i) {
    const int axis = i - (max_axes - in.rank);
    extents[i] = axis < 0 ? 1 : in.shape[axis];
    extents[at_strides + i] = axis < 0 || in.shape[axis] == 1 ? 0 : in.strides[axis];
  }
  extents[at_outputs] = elements;
  return true;
}

#endif  // CUKILN_HOST

}  // namespace reduce
}  // namespace cukiln
