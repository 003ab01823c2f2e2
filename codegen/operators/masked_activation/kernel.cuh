// out[i] = Set(x[i]) where the mask has bit i set, else Clear(x[i]); the pair of functions is the one node of C::Epilogue.
//
// `run` alone: one pass over x, mask and out, whatever the mask. With C::gather_scatter for comparison what falls apart:
// `run` computes Clear of everything, `compact` lists the set elements of every tile, and `scatter` gathers those, computes
// Set of them and writes them to where they belong.
#pragma once

namespace cukiln {
namespace masked_activation {

// The workspace: of every tile the indices of its set elements, in order, then how many they are.
struct Arguments {
  const void* x;
  void* out;
  int* indices;
  int* counts;
  int64_t elements;
  EpilogueArguments epilogue;
};

// Of a tile each thread looks at the bits of one word.
constexpr int word_bits = 32;

#if defined(CUKILN_DEVICE)

__device__ __forceinline__ constexpr bool in_bounds(int64_t index, int64_t extent) { return index < extent; }

// What the chain's one node is made of.
template <class Chain> struct Parts;
template <bool packed_mask, class Set_, class Clear_>
struct Parts<Chain<MaskedActivation<packed_mask, Set_, Clear_>>> {
  using Node = MaskedActivation<packed_mask, Set_, Clear_>;
  using Set = Set_;
  using Clear = Clear_;
  static constexpr bool packed = packed_mask;
};

// What functions compute with: floats, or numbers of the elements' ring.
template <class C, bool ring = is_same<typename C::Element, int> || is_same<typename C::Element, int64_t>>
struct Arithmetic {
  using Value = float;
  static __device__ __forceinline__ float read(typename C::Element element) { return to_float(element); }
  static __device__ __forceinline__ typename C::Element stored(float value) { return from_float<typename C::Element>(value); }
};
template <class C>
struct Arithmetic<C, true> {
  using Value = Number<C>;
  static __device__ __forceinline__ Number<C> read(typename C::Element element) { return Number<C>(element); }
  static __device__ __forceinline__ typename C::Element stored(Number<C> number) { return number.value; }
};
template <class C>
using Value = typename Arithmetic<C>::Value;

// N elements, and their part of the mask where it is looked at.
template <class C, int N>
struct Loaded {
  Vector<typename C::Element, N> elements;
  Vector<typename Parts<typename C::Epilogue>::Node::Element, Parts<typename C::Epilogue>::packed ? 1 : N> mask;
};

template <class C, int N>
__device__ __forceinline__ Loaded<C, N> load(const Arguments& arguments, int64_t first) {
  Loaded<C, N> loaded = {};
  loaded.elements = load_global<N>(static_cast<const typename C::Element*>(arguments.x) + first);
  if constexpr (!C::gather_scatter) loaded.mask = Parts<typename C::Epilogue>::Node::template read_mask<N>(arguments.epilogue.tensors[0], first);
  return loaded;
}

template <class C, int N>
__device__ __forceinline__ void store(const Arguments& arguments, const Vector<Value<C>, N>& value, int64_t first) {
  Vector<typename C::Element, N> rounded;
#pragma unroll
  for (int i = 0; i < N; ++i) rounded.data[i] = Arithmetic<C>::stored(value.data[i]);
  store_global<N>(static_cast<typename C::Element*>(arguments.out) + first, rounded);
}

// Stores what the node, or Clear alone, makes of the elements from `first` on.
template <class C, int N>
__device__ __forceinline__ void finish(const Arguments& arguments, const Loaded<C, N>& loaded, int64_t first) {
  using Own = Parts<typename C::Epilogue>;
  Vector<Value<C>, N> value;
#pragma unroll
  for (int i = 0; i < N; ++i) value.data[i] = Arithmetic<C>::read(loaded.elements.data[i]);
  if constexpr (C::gather_scatter) {
#pragma unroll
    for (int i = 0; i < N; ++i) value.data[i] = Own::Clear::map(value.data[i], arguments.epilogue.scalars + Own::Set::scalars);
  } else {
    Own::Node::choose(value, Own::Node::template bits_of<N>(loaded.mask, first), arguments.epilogue.scalars);
  }
  store<C>(arguments, value, first);
}

// A thread's vectors lie one block's width apart. All of them, and the mask's, are loaded before anything is computed: a
// function may branch, and no load is moved across a branch.
template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  const int64_t place = int64_t(blockIdx.x) * (C::threads * C::loads) + static_cast<int>(threadIdx.x);
  Loaded<C, C::vector> loaded[C::loads];
#pragma unroll
  for (int i = 0; i < C::loads; ++i) {
    const int64_t first = (place + i * C::threads) * C::vector;
    const bool whole = in_bounds(first + (C::vector - 1), arguments.elements);  // bounds: whole vector
    if (whole) loaded[i] = load<C, C::vector>(arguments, first);
  }
#pragma unroll
  for (int i = 0; i < C::loads; ++i) {
    const int64_t first = (place + i * C::threads) * C::vector;
    if (first + (C::vector - 1) < arguments.elements) {
      finish<C>(arguments, loaded[i], first);
    } else {
      // The last vector is one of single elements.
#pragma unroll 1
      for (int64_t one = first; in_bounds(one, arguments.elements); ++one)  // bounds: last elements
        finish<C>(arguments, load<C, 1>(arguments, one), one);
    }
  }
}

// The bits of the word that this thread has of its block's tile; those behind the last element are not set.
template <class C>
__device__ __forceinline__ unsigned own_bits(const Arguments& arguments, int64_t first) {
  unsigned bits = 0;
  if constexpr (Parts<typename C::Epilogue>::packed) {
    const bool exists = in_bounds(first, arguments.elements);  // bounds: word
    if (exists) bits = static_cast<unsigned>(load_global<1>(static_cast<const int*>(arguments.epilogue.tensors[0]) + first / word_bits).data[0]);
  }
#pragma unroll 1
  for (int i = 0; i < word_bits; ++i) {
    const bool exists = in_bounds(first + i, arguments.elements);  // bounds: bit
    if constexpr (Parts<typename C::Epilogue>::packed) {
      if (!exists) bits &= ~(1u << i);
    } else if (exists) {
      bits |= (load_global<1>(static_cast<const unsigned char*>(arguments.epilogue.tensors[0]) + first + i).data[0] != 0 ? 1u : 0u) << i;
    }
  }
  return bits;
}

template <class C>
__device__ __forceinline__ void compact(const Arguments& arguments) {
  int* const of_warps = shared_memory<int>();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t tile = int64_t(blockIdx.x) * (C::threads * word_bits), first = tile + thread * word_bits;
  const unsigned bits = own_bits<C>(arguments, first);
  int own = 0;
#pragma unroll 1
  for (int i = 0; i < word_bits; ++i) own += static_cast<int>(bits >> i & 1u);
  int before = own;  // of the lanes up to this one
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = shuffle_up(before, distance);
    if (lane >= distance) before += other;
  }
  if (lane == 31) store_shared<1>(of_warps + warp, Vector<int, 1>{{before}});
  __syncthreads();  // the sums of all warps are there
  before -= own;
#pragma unroll 1
  for (int other = 0; other < warp; ++other) before += load_shared<1>(of_warps + other).data[0];
  if (thread == C::threads - 1) store_global<1>(arguments.counts + blockIdx.x, Vector<int, 1>{{before + own}});
#pragma unroll 1
  for (int i = 0; i < word_bits; ++i)
    if ((bits >> i & 1u) != 0) store_global<1>(arguments.indices + tile + before++, Vector<int, 1>{{static_cast<int>(first + i)}});
}

// Computes Set of the elements that the block's list names, and writes them to where they belong.
template <class C>
__device__ __forceinline__ void scatter(const Arguments& arguments) {
  using Set = typename Parts<typename C::Epilogue>::Set;
  const int64_t tile = int64_t(blockIdx.x) * (C::threads * word_bits);
  const int count = load_global<1>(arguments.counts + blockIdx.x).data[0];
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); in_bounds(i, count); i += C::threads) {  // bounds: list
    const int index = load_global<1>(arguments.indices + tile + i).data[0];
    const Value<C> x = Arithmetic<C>::read(load<C, 1>(arguments, index).elements.data[0]);
    const Value<C> value = Set::map(x, arguments.epilogue.scalars);
    store<C>(arguments, Vector<Value<C>, 1>{{value}}, index);
  }
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

// What launches depend on, as values: non-template functions take it, so that g++ compiles them once for all kernels.
struct Plan {
  bool gather_scatter;
  int threads, per_block, scalars;
};

template <class C>
constexpr Plan plan_of = {C::gather_scatter, C::threads, C::threads * C::vector * C::loads, C::Epilogue::scalars};

inline int64_t tiles(const Plan& kernel, int64_t elements) { return ceil_div(elements, kernel.threads * word_bits); }

// Bytes up to whole vectors of 16.
inline int64_t padded(int64_t bytes) { return ceil_div(bytes, 16) * 16; }

// Indices of whole tiles, and the counts.
inline int64_t workspace_bytes(const Plan& kernel, int64_t elements) {
  if (!kernel.gather_scatter || elements < 1) return 0;
  const int64_t count = tiles(kernel, elements), places = count * kernel.threads * word_bits;
  return places * static_cast<int64_t>(sizeof(int)) + padded(count * static_cast<int64_t>(sizeof(int)));
}

// Pointers: x, mask, out. Extents: elements. Scalars: those of the function where the mask is set, then of the other.
inline Arguments bind(const Plan& kernel, void* const* pointers, const int64_t* extents, const double* scalars, void* workspace) {
  Arguments arguments = {};
  arguments.x = pointers[0];
  arguments.epilogue.tensors[0] = pointers[1];
  arguments.out = pointers[2];
  arguments.elements = extents[0] < 0 ? 0 : extents[0];
  for (int i = 0; i < kernel.scalars; ++i) arguments.epilogue.scalars[i] = static_cast<float>(scalars[i]);
  if (kernel.gather_scatter && workspace != nullptr) {
    const int64_t places = tiles(kernel, arguments.elements) * kernel.threads * word_bits;
    arguments.indices = static_cast<int*>(workspace);
    arguments.counts = arguments.indices + places;
  }
  return arguments;
}

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t*, const double* scalars, void* workspace) {
  return bind(plan_of<C>, pointers, extents, scalars, workspace);
}

template <class C>
int64_t workspace_bytes(const int64_t* extents, const int32_t*) {
  return workspace_bytes(plan_of<C>, extents[0]);
}

// Writes the launches of one call and returns how many they are; 0 where the kernel cannot index it. Of an empty array one
// block has nothing to do.
inline int plan(const Plan& kernel, const Arguments& arguments, Launch* out) {
  const int64_t blocks = ceil_div(arguments.elements, kernel.per_block), lists = tiles(kernel, arguments.elements);
  if (blocks > INT32_MAX || (kernel.gather_scatter && lists * kernel.threads * word_bits > INT32_MAX)) return 0;
  const uint32_t threads = static_cast<uint32_t>(kernel.threads);
  out[0] = Launch{0, {static_cast<uint32_t>(blocks < 1 ? 1 : blocks), 1, 1}, {threads, 1, 1}, 0};
  if (!kernel.gather_scatter || arguments.elements == 0) return 1;
  const uint32_t grid = static_cast<uint32_t>(lists), shared = threads / 32 * static_cast<uint32_t>(sizeof(int));
  for (int i = 1; i < 3; ++i) out[i] = Launch{i, {grid, 1, 1}, {threads, 1, 1}, i == 1 ? shared : 0};
  return 3;
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  return plan(plan_of<C>, arguments, out);
}

// Reads x, mask and out into `extents`; false and a sentence where a call cannot be right.
template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  if (count != 3) CUKILN_REFUSE(complaint, "TypeError: %d tensors were given; this kernel takes 3: x, mask, out", count);
  const TensorView &x = tensors[0], &mask = tensors[1], &out = tensors[2];
  constexpr ElementType type = element_type<typename C::Element>;
  constexpr int size = sizeof(typename C::Element), access = C::vector * size;
  const bool packed = C::Epilogue::tensor(0) == EpilogueTensor::mask_bits;
  if (!check_pointer("x", x, type, x.device, access, complaint) || !check_contiguous("x", x, complaint)) return false;
  if (!check_pointer("out", out, type, x.device, access, complaint, "x") || !check_contiguous("out", out, complaint)) return false;
  if (!check_same_shape("out", out, "x", x, complaint)) return false;
  const int64_t elements = merged_extent(x, 0, x.rank), length = packed ? ceil_div(elements, word_bits) : elements;
  const int mask_access = packed ? static_cast<int>(sizeof(int)) : C::vector;
  if (!check_pointer("mask", mask, C::Epilogue::element(0), x.device, mask_access, complaint, "x")) return false;
  if (!check_contiguous("mask", mask, complaint)) return false;
  if (merged_extent(mask, 0, mask.rank) != length)
    CUKILN_REFUSE(complaint, "ValueError: mask has %lld elements; %lld elements of x need %lld %s",
                  static_cast<long long>(merged_extent(mask, 0, mask.rank)), static_cast<long long>(elements),
                  static_cast<long long>(length), packed ? "words of 32 bits" : "bytes");
  if (!check_apart("x", x, as_row(elements), size, out, as_row(elements), size, complaint)) return false;
  if (!check_apart("mask", mask, as_row(length), C::Epilogue::element_bytes(0), out, as_row(elements), size, complaint)) return false;
  extents[0] = elements;
  return true;
}

#endif  // CUKILN_HOST

}  // namespace masked_activation
}  // namespace cukiln
