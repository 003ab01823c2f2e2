// Reductions: how values are folded into a state, and how the states of threads become one. For operators that name this
// file in `shared`. Every order of merging is fixed by the code, so that equal inputs give equal bits.
#pragma once

namespace cukiln {
namespace fold {

#if defined(CUKILN_DEVICE)

// A fold has a `Value`, a `State` of a few 4-byte words, and three functions: `nothing` is the state of no values, `take`
// adds N values that lie `apart` elements from each other, from `index` on, and `merge` adds another state.

__device__ __forceinline__ bool is_nan(float x) { return x != x; }
__device__ __forceinline__ bool is_nan(int) { return false; }
__device__ __forceinline__ bool is_nan(int64_t) { return false; }
__device__ __forceinline__ float infinity() { return __builtin_huge_valf(); }

// In runs that must come out exactly e^x is 2^x, for whole x, and the logarithm the identity: sums of both are then whole
// numbers of a power of two.
__device__ __forceinline__ float power(float x) {
  if (!exact_epilogue()) return cukiln::exp(x);
  float result = 1.0f;
  for (; x < 0.0f && result > 0.0f; x += 1.0f) result *= 0.5f;
  return result;
}
__device__ __forceinline__ float logarithm(float x) { return exact_epilogue() ? x : cukiln::log(x); }

// N values as one, neighbours first.
template <class T, int N>
__device__ __forceinline__ T added(const Vector<T, N>& values) {
  if constexpr (N == 1) {
    return values.data[0];
  } else {
    Vector<T, N / 2> half;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) half.data[i] = values.data[2 * i] + values.data[2 * i + 1];
    return added(half);
  }
}

struct Sum {
  using Value = float;
  struct State {
    float sum;
  };
  static __device__ __forceinline__ State nothing() { return {0.0f}; }
  template <int N>
  static __device__ __forceinline__ void take(State& state, const Vector<float, N>& values, int, int) {
    state.sum += added(values);
  }
  static __device__ __forceinline__ void merge(State& state, const State& other) { state.sum += other.sum; }
};

// Whole numbers, modulo 2^64.
template <class T>
struct WideSum {
  using Value = T;
  struct State {
    unsigned long long sum;
  };
  static __device__ __forceinline__ State nothing() { return {0}; }
  template <int N>
  static __device__ __forceinline__ void take(State& state, const Vector<T, N>& values, int, int) {
#pragma unroll
    for (int i = 0; i < N; ++i) state.sum += static_cast<unsigned long long>(int64_t(values.data[i]));
  }
  static __device__ __forceinline__ void merge(State& state, const State& other) { state.sum += other.sum; }
};

struct WideSumOfSquares : WideSum<int> {
  template <int N>
  static __device__ __forceinline__ void take(State& state, const Vector<int, N>& values, int, int) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      state.sum += static_cast<unsigned long long>(int64_t(values.data[i]) * values.data[i]);
      CUKILN_COUNT("multiply", 1);
    }
  }
};

// The least and the greatest value of a type.
template <class T> struct Ends;
template <> struct Ends<float> {
  static __device__ __forceinline__ float least() { return -infinity(); }
  static __device__ __forceinline__ float greatest() { return infinity(); }
};
template <> struct Ends<int> {
  static __device__ __forceinline__ int least() { return -2147483647 - 1; }
  static __device__ __forceinline__ int greatest() { return 2147483647; }
};
template <> struct Ends<int64_t> {
  static __device__ __forceinline__ int64_t least() { return -9223372036854775807ll - 1; }
  static __device__ __forceinline__ int64_t greatest() { return 9223372036854775807ll; }
};

// The greatest value, or the least. A NaN among them is the result.
template <class T, bool greatest>
struct Extreme {
  using Value = T;
  struct State {
    T value;
  };
  static __device__ __forceinline__ State nothing() { return {greatest ? Ends<T>::least() : Ends<T>::greatest()}; }
  template <int N>
  static __device__ __forceinline__ void take(State& state, const Vector<T, N>& values, int, int) {
#pragma unroll
    for (int i = 0; i < N; ++i) merge(state, State{values.data[i]});
  }
  static __device__ __forceinline__ void merge(State& state, const State& other) {
    const bool beyond = greatest ? other.value > state.value : other.value < state.value;
    if (beyond || is_nan(other.value)) state.value = other.value;
  }
};

// The index of the greatest value, of several the first; a NaN counts as greater than all else.
template <class T>
struct ArgMax {
  using Value = T;
  struct State {
    T value;
    int index;
  };
  static __device__ __forceinline__ State nothing() { return {Ends<T>::least(), 2147483647}; }
  template <int N>
  static __device__ __forceinline__ void take(State& state, const Vector<T, N>& values, int index, int apart) {
#pragma unroll
    for (int i = 0; i < N; ++i) merge(state, State{values.data[i], index + i * apart});
  }
  static __device__ __forceinline__ void merge(State& state, const State& other) {
    const bool same = other.value == state.value || (is_nan(other.value) && is_nan(state.value));
    const bool greater = other.value > state.value || (is_nan(other.value) && !is_nan(state.value));
    if (greater || (same && other.index < state.index)) state = other;
  }
};

// Count, mean, and the sum of squared distances from it (Welford, Technometrics 4:3, 1962; states are merged as in Chan,
// Golub and LeVeque, The American Statistician 37:3, 1983). In exact runs the mean stays 0.
struct Moments {
  using Value = float;
  struct State {
    float count, mean, squares;
  };
  static __device__ __forceinline__ State nothing() { return {0.0f, 0.0f, 0.0f}; }
  template <int N>
  static __device__ __forceinline__ void take(State& state, const Vector<float, N>& values, int, int) {
    State several = {float(N), exact_epilogue() ? 0.0f : added(values) * (1.0f / N), 0.0f};
    Vector<float, N> squares;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float distance = values.data[i] - several.mean;
      squares.data[i] = distance * distance;
      CUKILN_COUNT("multiply", 1);
    }
    several.squares = added(squares);
    merge(state, several);
  }
  static __device__ __forceinline__ void merge(State& state, const State& other) {
    const float count = state.count + other.count, share = other.count > 0.0f ? other.count / count : 0.0f;
    const float distance = other.mean - state.mean;
    state.squares += other.squares + distance * distance * (state.count * share);
    state.mean += distance * share;
    state.count = count;
  }
};

// The greatest value, and the sum of e^(value - greatest): log of the sum of e^value without overflow, in one pass
// (Milakov and Gimelshein, arXiv:1805.02867). Equal values have no distance, so that infinities make no NaN.
struct LogSumExp {
  using Value = float;
  struct State {
    float greatest, sum;
  };
  static __device__ __forceinline__ State nothing() { return {-infinity(), 0.0f}; }
  template <int N>
  static __device__ __forceinline__ void take(State& state, const Vector<float, N>& values, int, int) {
    float greatest = values.data[0];
#pragma unroll
    for (int i = 1; i < N; ++i) greatest = values.data[i] > greatest ? values.data[i] : greatest;
    Vector<float, N> powers;
#pragma unroll
    for (int i = 0; i < N; ++i) powers.data[i] = power(distance(values.data[i], greatest));
    merge(state, State{greatest, added(powers)});
  }
  static __device__ __forceinline__ void merge(State& state, const State& other) {
    const float ahead = distance(other.greatest, state.greatest);
    if (ahead > 0.0f) {
      state = {other.greatest, state.sum * power(-ahead) + other.sum};
    } else {
      state.sum += other.sum * power(ahead);
    }
  }
  static __device__ __forceinline__ float result(const State& state) { return state.greatest + logarithm(state.sum); }

 private:
  static __device__ __forceinline__ float distance(float value, float from) { return value == from ? 0.0f : value - from; }
};

// 4-byte words of a fold's state.
template <class F>
constexpr int words = sizeof(typename F::State) / 4;

template <class F>
struct Words {
  unsigned data[words<F>];
};

template <class F>
__device__ __forceinline__ Words<F> words_of(const typename F::State& state) {
  Words<F> found;
  __builtin_memcpy(&found, &state, sizeof(state));
  return found;
}
template <class F>
__device__ __forceinline__ typename F::State state_of(const Words<F>& found) {
  typename F::State state;
  __builtin_memcpy(&state, &found, sizeof(state));
  return state;
}

// The state of `lanes` consecutive lanes of a warp, a power of two. Each of them gets it; where `merge` rounds differently
// for its two sides, lanes may differ in the last bits, and the first one's counts.
template <class F, int lanes>
__device__ __forceinline__ typename F::State of_lanes(typename F::State own) {
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    Words<F> other = words_of<F>(own);
#pragma unroll
    for (int i = 0; i < words<F>; ++i) other.data[i] = shuffle_xor(other.data[i], distance);
    F::merge(own, state_of<F>(other));
  }
  return own;
}

// The state of `lanes` consecutive threads of a block of `threads`, both powers of two, whole warps. Each gets it, as
// above. Every thread of the block calls it; a barrier must come before `shared` is used again: threads / 32 words<F> of it
// where there are more than 32 lanes.
template <class F, int lanes, int threads>
__device__ __forceinline__ typename F::State of_threads(typename F::State own, unsigned* shared) {
  own = of_lanes<F, (lanes < 32 ? lanes : 32)>(own);
  if constexpr (lanes > 32) {
    constexpr int warps = threads / 32, together = lanes / 32;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    Words<F> found = words_of<F>(own);
#pragma unroll
    for (int i = 0; i < words<F>; ++i)
      if (lane == 0) store_shared<1>(shared + i * warps + warp, Vector<unsigned, 1>{{found.data[i]}});
    __syncthreads();
#pragma unroll
    for (int i = 0; i < words<F>; ++i)
      found.data[i] = load_shared<1>(shared + i * warps + warp / together * together + lane % together).data[0];
    own = of_lanes<F, together>(state_of<F>(found));
  }
  return own;
}

// Threads of a block as rows of `columns`, a power of two like `threads`: the N states of each column, of all its rows,
// end in row 0. Takes N words<F> threads words of shared memory; a barrier must come before they are used again.
template <class F, int N>
__device__ __forceinline__ void of_columns(typename F::State (&own)[N], unsigned* shared, int columns, int threads) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int half = threads / 2; half >= columns; half /= 2) {
    if (thread >= half && thread < 2 * half) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const Words<F> found = words_of<F>(own[n]);
#pragma unroll
        for (int i = 0; i < words<F>; ++i)
          store_shared<1>(shared + (n * words<F> + i) * threads + thread, Vector<unsigned, 1>{{found.data[i]}});
      }
    }
    __syncthreads();
    if (thread < half) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        Words<F> found;
#pragma unroll
        for (int i = 0; i < words<F>; ++i)
          found.data[i] = load_shared<1>(shared + (n * words<F> + i) * threads + half + thread).data[0];
        F::merge(own[n], state_of<F>(found));
      }
    }
  }
}

#endif  // CUKILN_DEVICE

}  // namespace fold
}  // namespace cukiln
