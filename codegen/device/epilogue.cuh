// The fused epilogue: a chain of nodes applied to accumulators before they are stored, in fp32; over Z/2^32 and Z/2^64 in
// the ring's numbers (gemm/ring.cuh), whose sums wrap around.
#pragma once

namespace cukiln {

constexpr int max_epilogue_tensors = 8;
constexpr int max_epilogue_scalars = 64;  // of 8 nodes with two polynomials of degree 3 each

// Operands of the chain, in chain order: tensors of Bias, Residual and masks; scalars of Scale, LeakyRelu, Clip and
// polynomials.
struct EpilogueArguments {
  const void* tensors[max_epilogue_tensors];
  float scalars[max_epilogue_scalars];
};

enum class Axis { m, n };
// `mask` has a byte for each output; `mask_bits` are packed, 32 outputs in a word: bit i of word j is that of output 32 j + i,
// counted from the first one, which lie without gaps.
enum class EpilogueTensor { bias_m, bias_n, residual, mask, mask_bits };

#if defined(CUKILN_DEVICE)

// Where a vector of outputs lies: `offset` in elements from the start of the output and of whatever has its shape.
struct Position {
  int row;
  int column;
  int64_t offset;
};

#endif

#if defined(CUKILN_DEVICE)

__device__ __forceinline__ float plus(float a, float b) { return a + b; }
__device__ __forceinline__ int plus(int a, int b) { return static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)); }
__device__ __forceinline__ int64_t plus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<unsigned long long>(a) + static_cast<unsigned long long>(b));
}

// As a fused multiply-add, which no compiler fuses with what comes after: it is rounded once everywhere.
__device__ __forceinline__ float squared(float x) { return cukiln::fma(x, x, 0.0f); }

// a b + c, and a scalar as what the chain computes in.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return cukiln::fma(a, b, c); }
template <class V>
__device__ __forceinline__ V constant(float value) {
  if constexpr (is_same<V, float>) return value;
  else return V::of(value);
}

// An operand as what the chain computes in: V is float, or a number of the operand's ring.
template <class V, class T>
__device__ __forceinline__ V widened(T value) {
  if constexpr (is_same<V, float>) return to_float(value);
  else return V(value);
}

#endif

// Every node states how many tensors and scalars it takes. `apply` gets its own operands' indices at compile time.

// `T` is the type of the operand in memory, V that of the arithmetic.
template <Axis axis, class T = float>
struct Bias {
  using Element = T;
  static constexpr int tensors = 1, scalars = 0;
  static constexpr EpilogueTensor tensor = axis == Axis::m ? EpilogueTensor::bias_m : EpilogueTensor::bias_n;
#if defined(CUKILN_DEVICE)
  template <int tensor_index, int scalar_index, int N, class V>
  static __device__ __forceinline__ void apply(Vector<V, N>& value, const Position& at, const EpilogueArguments& arguments) {
    const T* bias = static_cast<const T*>(arguments.tensors[tensor_index]);
    if constexpr (axis == Axis::m) {
      const V shared_by_row = widened<V>(load_global<1>(bias + at.row).data[0]);
#pragma unroll
      for (int i = 0; i < N; ++i) value.data[i] = plus(value.data[i], shared_by_row);
    } else {
      const Vector<T, N> added = load_global<N>(bias + at.column);
#pragma unroll
      for (int i = 0; i < N; ++i) value.data[i] = plus(value.data[i], widened<V>(added.data[i]));
    }
  }
#endif
};

template <class T = float>
struct Residual {
  using Element = T;
  static constexpr int tensors = 1, scalars = 0;
  static constexpr EpilogueTensor tensor = EpilogueTensor::residual;
#if defined(CUKILN_DEVICE)
  template <int tensor_index, int scalar_index, int N, class V>
  static __device__ __forceinline__ void apply(Vector<V, N>& value, const Position& at, const EpilogueArguments& arguments) {
    const Vector<T, N> added = load_global<N>(static_cast<const T*>(arguments.tensors[tensor_index]) + at.offset);
#pragma unroll
    for (int i = 0; i < N; ++i) value.data[i] = plus(value.data[i], widened<V>(added.data[i]));
  }
#endif
};

// Keeps a value where its mask byte is not zero, gives zero elsewhere.
struct Mask {
  using Element = unsigned char;
  static constexpr int tensors = 1, scalars = 0;
  static constexpr EpilogueTensor tensor = EpilogueTensor::mask;
#if defined(CUKILN_DEVICE)
  template <int tensor_index, int scalar_index, int N, class V>
  static __device__ __forceinline__ void apply(Vector<V, N>& value, const Position& at, const EpilogueArguments& arguments) {
    const Vector<unsigned char, N> kept = load_global<N>(static_cast<const unsigned char*>(arguments.tensors[tensor_index]) + at.offset);
#pragma unroll
    for (int i = 0; i < N; ++i) value.data[i] = kept.data[i] != 0 ? value.data[i] : V(0);
  }
#endif
};

// A node that maps each value by itself: `Node::map(x, scalars)`.
template <class Node, int scalar_count>
struct Elementwise {
  using Element = float;
  static constexpr int tensors = 0, scalars = scalar_count;
  static constexpr EpilogueTensor tensor = EpilogueTensor::residual;  // never asked for: `tensors` is 0
#if defined(CUKILN_DEVICE)
  template <int tensor_index, int scalar_index, int N, class V>
  static __device__ __forceinline__ void apply(Vector<V, N>& value, const Position&, const EpilogueArguments& arguments) {
#pragma unroll
    for (int i = 0; i < N; ++i) value.data[i] = Node::map(value.data[i], arguments.scalars + scalar_index);
  }
#endif
};

// How many scalars a polynomial takes: its coefficients, the constant first.
template <int degree> constexpr int coefficients = degree + 1;

#if defined(CUKILN_DEVICE)

struct Scale : Elementwise<Scale, 1> {
  static __device__ __forceinline__ float map(float x, const float* scalars) { return x * scalars[0]; }
};
// Comparisons are written so that NaN goes through: they are false for NaN and keep it.
struct Relu : Elementwise<Relu, 0> {
  template <class V>
  static __device__ __forceinline__ V map(V x, const float*) { return x < V(0) ? V(0) : x; }
};
struct LeakyRelu : Elementwise<LeakyRelu, 1> {
  static __device__ __forceinline__ float map(float x, const float* scalars) { return x < 0.0f ? x * scalars[0] : x; }
};
struct Clip : Elementwise<Clip, 2> {
  static __device__ __forceinline__ float map(float x, const float* scalars) {
    return x < scalars[0] ? scalars[0] : (x > scalars[1] ? scalars[1] : x);
  }
};
// Exact gelu by erf (Hendrycks and Gimpel, arXiv:1606.08415), not the tanh approximation.
struct Gelu : Elementwise<Gelu, 0> {
  static __device__ __forceinline__ float map(float x, const float*) {
    return exact_epilogue() ? x : 0.5f * x * (1.0f + cukiln::erf(x * 0.70710678118654752f));
  }
};
struct Sigmoid : Elementwise<Sigmoid, 0> {
  static __device__ __forceinline__ float map(float x, const float*) {
    return exact_epilogue() ? x : 1.0f / (1.0f + cukiln::exp(-x));
  }
};
struct Silu : Elementwise<Silu, 0> {
  static __device__ __forceinline__ float map(float x, const float*) {
    return exact_epilogue() ? x : x / (1.0f + cukiln::exp(-x));
  }
};
struct Tanh : Elementwise<Tanh, 0> {
  static __device__ __forceinline__ float map(float x, const float*) { return exact_epilogue() ? x : cukiln::tanh(x); }
};
struct Identity : Elementwise<Identity, 0> {
  template <class V>
  static __device__ __forceinline__ V map(V x, const float*) { return x; }
};
struct Square : Elementwise<Square, 0> {
  template <class V>
  static __device__ __forceinline__ V map(V x, const float*) { return squared(x); }
};
// By Horner's rule.
template <int degree>
struct Polynomial : Elementwise<Polynomial<degree>, coefficients<degree>> {
  template <class V>
  static __device__ __forceinline__ V map(V x, const float* scalars) {
    V sum = constant<V>(scalars[degree]);
#pragma unroll
    for (int i = degree - 1; i >= 0; --i) sum = multiply_add(sum, x, constant<V>(scalars[i]));
    return sum;
  }
};
struct CastHalf : Elementwise<CastHalf, 0> {
  static __device__ __forceinline__ float map(float x, const float*) { return round_to_half(x); }
};
struct CastBfloat16 : Elementwise<CastBfloat16, 0> {
  static __device__ __forceinline__ float map(float x, const float*) { return round_to_bfloat16(x); }
};

#else  // launch code only asks for the counts

struct Scale : Elementwise<Scale, 1> {};
struct Relu : Elementwise<Relu, 0> {};
struct LeakyRelu : Elementwise<LeakyRelu, 1> {};
struct Clip : Elementwise<Clip, 2> {};
struct Gelu : Elementwise<Gelu, 0> {};
struct Sigmoid : Elementwise<Sigmoid, 0> {};
struct Silu : Elementwise<Silu, 0> {};
struct Tanh : Elementwise<Tanh, 0> {};
struct Identity : Elementwise<Identity, 0> {};
struct Square : Elementwise<Square, 0> {};
template <int degree> struct Polynomial : Elementwise<Polynomial<degree>, coefficients<degree>> {};
struct CastHalf : Elementwise<CastHalf, 0> {};
struct CastBfloat16 : Elementwise<CastBfloat16, 0> {};

#endif

template <bool packed> struct MaskElement { using Type = unsigned char; };
template <> struct MaskElement<true> { using Type = int; };

// `Set` where an output's bit, or byte, is set, `Clear` elsewhere: both are nodes that map each value by itself. Its scalars
// are those of Set, then those of Clear.
template <bool packed, class Set, class Clear>
struct MaskedActivation {
  using Element = typename MaskElement<packed>::Type;
  static constexpr int tensors = 1, scalars = Set::scalars + Clear::scalars;
  static constexpr EpilogueTensor tensor = packed ? EpilogueTensor::mask_bits : EpilogueTensor::mask;
#if defined(CUKILN_DEVICE)
  template <int tensor_index, int scalar_index, int N, class V>
  static __device__ __forceinline__ void apply(Vector<V, N>& value, const Position& at, const EpilogueArguments& arguments) {
    const auto read = read_mask<N>(arguments.tensors[tensor_index], at.offset);
    choose(value, bits_of<N>(read, at.offset), arguments.scalars + scalar_index);
  }

  // What says it of N outputs from `offset` on: a word, or bytes. A vector begins at a multiple of its length, so that its
  // bits are in one word.
  template <int N>
  static __device__ __forceinline__ Vector<Element, packed ? 1 : N> read_mask(const void* tensor, int64_t offset) {
    static_assert(32 % N == 0, "the bits of a vector are in one word");
    const Element* const mask = static_cast<const Element*>(tensor);
    if constexpr (packed) return load_global<1>(mask + (offset >> 5));
    else return load_global<N>(mask + offset);
  }

  // Bit i is that of output `offset` + i.
  template <int N>
  static __device__ __forceinline__ unsigned bits_of(const Vector<Element, packed ? 1 : N>& read, int64_t offset) {
    if constexpr (packed) {
      return static_cast<unsigned>(read.data[0]) >> static_cast<int>(offset & 31);
    } else {
      unsigned bits = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) bits |= (read.data[i] != 0 ? 1u : 0u) << i;
      return bits;
    }
  }

  // Set of the values whose bits are 1, Clear of the others.
  template <int N, class V>
  static __device__ __forceinline__ void choose(Vector<V, N>& value, unsigned bits, const float* scalars_of_set) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const V x = value.data[i];
      value.data[i] = (bits >> i & 1u) != 0 ? Set::map(x, scalars_of_set) : Clear::map(x, scalars_of_set + Set::scalars);
    }
  }
#endif
};

// The nodes in order. An empty chain stores the accumulator.
template <class... Nodes>
struct Chain {
  static constexpr int nodes = sizeof...(Nodes);
  static constexpr int tensors = (0 + ... + Nodes::tensors);
  static constexpr int scalars = (0 + ... + Nodes::scalars);
  static_assert(tensors <= max_epilogue_tensors && scalars <= max_epilogue_scalars, "the epilogue takes too many operands");

#if defined(CUKILN_HOST)
  // What the chain's `index`-th tensor is.
  static EpilogueTensor tensor(int index) {
    EpilogueTensor found = EpilogueTensor::residual;
    int seen = 0;
    ((Nodes::tensors == 1 && seen++ == index ? void(found = Nodes::tensor) : void()), ...);
    return found;
  }
  // The type of its elements, and how many bytes one has.
  static ElementType element(int index) {
    ElementType found = ElementType::other;
    int seen = 0;
    ((Nodes::tensors == 1 && seen++ == index ? void(found = element_type<typename Nodes::Element>) : void()), ...);
    return found;
  }
  static int element_bytes(int index) {
    int found = 0, seen = 0;
    ((Nodes::tensors == 1 && seen++ == index ? void(found = sizeof(typename Nodes::Element)) : void()), ...);
    return found;
  }
#endif

#if defined(CUKILN_DEVICE)
  template <int N, class V>
  static __device__ __forceinline__ void apply(Vector<V, N>& value, const Position& at, const EpilogueArguments& arguments) {
    apply_from<0, 0, N, Nodes...>(value, at, arguments);
  }

  // One node alone.
  template <int index, int N, class V>
  static __device__ __forceinline__ void apply_node(Vector<V, N>& value, const Position& at, const EpilogueArguments& arguments) {
    apply_at<index, 0, 0, N, Nodes...>(value, at, arguments);
  }

 private:
  template <int index, int tensor_at, int scalar_at, int N, class Node, class... Rest, class V>
  static __device__ __forceinline__ void apply_at(Vector<V, N>& value, const Position& at, const EpilogueArguments& arguments) {
    if constexpr (index == 0) {
      Node::template apply<tensor_at, scalar_at, N>(value, at, arguments);
    } else {
      apply_at<index - 1, tensor_at + Node::tensors, scalar_at + Node::scalars, N, Rest...>(value, at, arguments);
    }
  }

  template <int tensor_index, int scalar_index, int N, class V>
  static __device__ __forceinline__ void apply_from(Vector<V, N>&, const Position&, const EpilogueArguments&) {}

  template <int tensor_index, int scalar_index, int N, class Node, class... Rest, class V>
  static __device__ __forceinline__ void apply_from(Vector<V, N>& value, const Position& at, const EpilogueArguments& arguments) {
    Node::template apply<tensor_index, scalar_index, N>(value, at, arguments);
    apply_from<tensor_index + Node::tensors, scalar_index + Node::scalars, N, Rest...>(value, at, arguments);
  }
#endif
};

}  // namespace cukiln
