// One kernel for each primitive, or for a few that only make sense together. The same text runs on the GPU and on the
// CPU emulations; confirm_primitives.py feeds both the same inputs. Block i reads its inputs at `in` and writes its results at
// `out`, each as many bytes further as one block takes.
#pragma once

namespace cukiln {
namespace confirm {

struct Arguments {
  const void* in;
  void* out;
};

// What block `blockIdx.x` reads or writes, as elements of T, `per_block` of them.
template <class T>
__device__ __forceinline__ const T* input(const Arguments& arguments, int per_block) {
  return static_cast<const T*>(arguments.in) + static_cast<int>(blockIdx.x) * per_block;
}
template <class T>
__device__ __forceinline__ T* output(const Arguments& arguments, int per_block) {
  return static_cast<T*>(arguments.out) + static_cast<int>(blockIdx.x) * per_block;
}

__device__ __forceinline__ unsigned word(const unsigned* from) { return load_global<1>(from).data[0]; }
template <class T>
__device__ __forceinline__ void put(T* to, T value) {
  store_global<1>(to, Vector<T, 1>{{value}});
}

// Vectors of N elements through global memory and through shared memory, there to the opposite thread's place.
template <class T, int N>
__device__ __forceinline__ void vectors(const Arguments& arguments) {
  const int thread = static_cast<int>(threadIdx.x);
  const T* in = input<T>(arguments, 32 * N);
  T* out = output<T>(arguments, 64 * N);
  T* shared = shared_memory<T>();
  const Vector<T, N> value = load_global<N>(in + thread * N);
  store_global<N>(out + thread * N, value);
  store_shared<N>(shared + (31 - thread) * N, value);
  __syncthreads();
  store_global<N>(out + (32 + thread) * N, load_shared<N>(shared + thread * N));
}

// From three words: the functions of one or three floats.
__device__ __forceinline__ void arithmetic(const Arguments arguments) {
  const int thread = static_cast<int>(threadIdx.x);
  const float* in = input<float>(arguments, 96) + thread * 3;
  float* out = output<float>(arguments, 384) + thread * 12;
  const float a = load_global<1>(in).data[0], b = load_global<1>(in + 1).data[0], c = load_global<1>(in + 2).data[0];
  put(out, cukiln::fma(a, b, c));
  put(out + 1, cukiln::exp(a));
  put(out + 2, cukiln::erf(a));
  put(out + 3, cukiln::tanh(a));
  put(out + 4, round_to_half(a));
  put(out + 5, round_to_bfloat16(a));
  put(out + 6, exact_epilogue() ? 1.0f : 0.0f);
  put(out + 7, cukiln::log(a));
  put(out + 8, cukiln::sqrt(a));
  put(out + 9, cukiln::exp2(a));
  put(out + 10, cukiln::log2(a));
  put(out + 11, maximum(a, b));
}

// Every conversion of a word's bits, and the transposed bytes of four of them.
__device__ __forceinline__ void conversions(const Arguments arguments) {
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned* in = input<unsigned>(arguments, 128) + thread * 4;
  unsigned words[4] = {word(in), word(in + 1), word(in + 2), word(in + 3)};
  const unsigned bits = words[0];
  float value;
  __builtin_memcpy(&value, &bits, 4);
  float* out = output<float>(arguments, 224) + thread * 7;
  put(out, to_float(value));
  put(out + 1, to_float(static_cast<int>(bits)));
  put(out + 2, to_float(Half{static_cast<unsigned short>(bits)}));
  put(out + 3, to_float(BFloat16{static_cast<unsigned short>(bits)}));
  put(out + 4, from_float<float>(value));
  put(out + 5, to_float(from_float<Half>(value)));
  put(out + 6, to_float(from_float<BFloat16>(value)));
}

// Two floats of each lane as a pair of halves and as one of bfloat16, and back; the first rounded to tf32.
__device__ __forceinline__ void pairs(const Arguments arguments) {
  const int thread = static_cast<int>(threadIdx.x);
  const float* in = input<float>(arguments, 64) + thread * 2;
  float* out = output<float>(arguments, 160) + thread * 5;
  const float low = load_global<1>(in).data[0], high = load_global<1>(in + 1).data[0];
  const unsigned halves = pack_pair<Half>(low, high), bfloats = pack_pair<BFloat16>(low, high);
  put(out, to_float(Half{static_cast<unsigned short>(halves & 0xffffu)}));
  put(out + 1, to_float(Half{static_cast<unsigned short>(halves >> 16)}));
  put(out + 2, to_float(BFloat16{static_cast<unsigned short>(bfloats & 0xffffu)}));
  put(out + 3, to_float(BFloat16{static_cast<unsigned short>(bfloats >> 16)}));
  unsigned bits;
  __builtin_memcpy(&bits, &low, 4);
  bits = round_to_tf32(bits);
  float rounded;
  __builtin_memcpy(&rounded, &bits, 4);
  put(out + 4, rounded);
}

__device__ __forceinline__ void bytes_transposed(const Arguments arguments) {
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned* in = input<unsigned>(arguments, 128) + thread * 4;
  unsigned* out = output<unsigned>(arguments, 128) + thread * 4;
  unsigned words[4] = {word(in), word(in + 1), word(in + 2), word(in + 3)};
  transpose_bytes(words);
  for (int i = 0; i < 4; ++i) put(out + i, words[i]);
}

// Of each lane: a value and an operand, which differs from lane to lane.
__device__ __forceinline__ void shuffles(const Arguments arguments) {
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned* in = input<unsigned>(arguments, 64) + lane * 2;
  unsigned* out = output<unsigned>(arguments, 128) + lane * 4;
  const unsigned value = word(in);
  const int operand = static_cast<int>(word(in + 1));
  put(out, shuffle_idx(value, operand));
  put(out + 1, shuffle_up(value, operand));
  put(out + 2, shuffle_down(value, operand));
  put(out + 3, shuffle_xor(value, operand));
}

// Of each lane: a vote and its own number where it is not zero.
__device__ __forceinline__ void votes(const Arguments arguments) {
  const int lane = static_cast<int>(threadIdx.x);
  const bool value = word(input<unsigned>(arguments, 32) + lane) != 0;
  unsigned* out = output<unsigned>(arguments, 96) + lane * 3;
  put(out, vote_any(value) ? 1u : 0u);
  put(out + 1, vote_all(value) ? 1u : 0u);
  put(out + 2, vote_ballot(value));
}

// Lanes of a warp hand words to each other through shared memory, twice.
__device__ __forceinline__ void warp_exchange(const Arguments arguments) {
  const int lane = static_cast<int>(threadIdx.x);
  unsigned* shared = shared_memory<unsigned>();
  unsigned* out = output<unsigned>(arguments, 64) + lane * 2;
  store_shared<1>(shared + lane, load_global<1>(input<unsigned>(arguments, 32) + lane));
  warp_barrier();
  put(out, load_shared<1>(shared + (lane * 7 + 3) % 32).data[0]);
  warp_barrier();
  store_shared<1>(shared + (lane + 1) % 32, Vector<unsigned, 1>{{static_cast<unsigned>(lane)}});
  warp_barrier();
  put(out + 1, load_shared<1>(shared + lane).data[0]);
}

// Four warps do the same as a block.
__device__ __forceinline__ void block_exchange(const Arguments arguments) {
  const int thread = static_cast<int>(threadIdx.x);
  unsigned* shared = shared_memory<unsigned>();
  unsigned* out = output<unsigned>(arguments, 256) + thread * 2;
  store_shared<1>(shared + thread, load_global<1>(input<unsigned>(arguments, 128) + thread));
  __syncthreads();
  put(out, load_shared<1>(shared + (thread * 37 + 11) % 128).data[0]);
  __syncthreads();
  store_shared<1>(shared + (thread + 33) % 128, Vector<unsigned, 1>{{static_cast<unsigned>(thread)}});
  __syncthreads();
  put(out + 1, load_shared<1>(shared + thread).data[0]);
}

// Three warps: the first hands words to the second and goes on, and takes its answer at a barrier of the two; the third
// stays away from both.
__device__ __forceinline__ void named_exchange(const Arguments arguments) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  unsigned* shared = shared_memory<unsigned>();
  unsigned* out = output<unsigned>(arguments, 96);
  const unsigned own = word(input<unsigned>(arguments, 96) + thread);
  unsigned result = ~own;
  if (thread < 32) {
    store_shared<1>(shared + lane, Vector<unsigned, 1>{{own}});
    named_barrier_arrive(1, 64);
    named_barrier(2, 64);
    result = load_shared<1>(shared + 32 + (lane + 1) % 32).data[0];
  } else if (thread < 64) {
    named_barrier(1, 64);
    const unsigned given = load_shared<1>(shared + (lane + 5) % 32).data[0];
    store_shared<1>(shared + 32 + lane, Vector<unsigned, 1>{{given ^ own}});
    named_barrier(2, 64);
    result = given;
  }
  put(out + thread, result);
}

// Of each thread: a start and an addend of its own address, then one sum of the whole block; as floats and as ints.
__device__ __forceinline__ void additions(const Arguments arguments) {
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned* in = input<unsigned>(arguments, 192) + thread * 6;
  float* floats = output<float>(arguments, 66);
  int* ints = output<int>(arguments, 66) + 33;
  float start, addend, part;
  const unsigned words[3] = {word(in), word(in + 1), word(in + 2)};
  __builtin_memcpy(&start, words, 4);
  __builtin_memcpy(&addend, words + 1, 4);
  __builtin_memcpy(&part, words + 2, 4);
  put(floats + thread, start);
  put(ints + thread, static_cast<int>(word(in + 3)));
  if (thread == 0) {
    put(floats + 32, 0.0f);
    put(ints + 32, 0);
  }
  __syncthreads();
  atomic_add(floats + thread, addend);
  atomic_add(ints + thread, static_cast<int>(word(in + 4)));
  atomic_add(floats + 32, part);
  atomic_add(ints + 32, static_cast<int>(word(in + 5)));
}

// Of each thread: whether a copy is wanted, and 48 bytes in four copies that go two by two: after the first wait its own
// bytes of the first group, after the second those of its neighbour of both.
__device__ __forceinline__ void async_copies(const Arguments arguments) {
  const int thread = static_cast<int>(threadIdx.x), other = (thread + 1) % 32;
  const unsigned char* in = input<unsigned char>(arguments, 32 * 64) + thread * 64;
  unsigned* out = output<unsigned>(arguments, 32 * 20) + thread * 20;
  unsigned char* shared = shared_memory<unsigned char>();
  const unsigned wanted = load_global<1>(reinterpret_cast<const unsigned*>(in + 48)).data[0];
  unsigned char* own = shared + thread * 48;
  cp_async<16>(own, in, (wanted & 1) != 0);
  cp_async<8>(own + 16, in + 16, (wanted & 2) != 0);
  cp_async_commit();
  cp_async<4>(own + 24, in + 24, (wanted & 4) != 0);
  cp_async<4>(own + 28, in + 28, (wanted & 8) != 0);
  cp_async<16>(own + 32, in + 32, (wanted & 16) != 0);
  cp_async_commit();
  cp_async_wait<1>();
  for (int i = 0; i < 6; ++i) put(out + i, load_shared<1>(reinterpret_cast<const unsigned*>(own) + i).data[0]);
  cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 12; ++i) put(out + 6 + i, load_shared<1>(reinterpret_cast<const unsigned*>(shared + other * 48) + i).data[0]);
  put(out + 18, wanted);
  put(out + 19, 0u);
}

// Of each lane: 16 bytes of a row of shared memory, and which lane's row it passes.
template <int N, bool transposed>
__device__ __forceinline__ void matrices(const Arguments& arguments) {
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned* in = input<unsigned>(arguments, 32 * 5);
  unsigned* out = output<unsigned>(arguments, 32 * N) + lane * N;
  unsigned* shared = shared_memory<unsigned>();
  for (int i = 0; i < 4; ++i) store_shared<1>(shared + lane * 4 + i, load_global<1>(in + lane * 4 + i));
  __syncthreads();
  const unsigned* row = shared + static_cast<int>(word(in + 128 + lane) % 32) * 4;
  unsigned found[N];
  if constexpr (transposed) {
    ldmatrix_trans(found, row);
  } else {
    ldmatrix(found, row);
  }
  for (int i = 0; i < N; ++i) put(out + i, found[i]);
}

// Of each lane: its registers of d, a and b.
template <class D, int count_d, int count_a, int count_b>
struct Registers {
  D d[count_d];
  unsigned a[count_a], b[count_b];

  __device__ __forceinline__ explicit Registers(const Arguments& arguments) {
    constexpr int count = count_d + count_a + count_b;
    const unsigned* in = input<unsigned>(arguments, 32 * count) + static_cast<int>(threadIdx.x) * count;
    for (int i = 0; i < count_d; ++i) {
      const unsigned bits = word(in + i);
      __builtin_memcpy(&d[i], &bits, 4);
    }
    for (int i = 0; i < count_a; ++i) a[i] = word(in + count_d + i);
    for (int i = 0; i < count_b; ++i) b[i] = word(in + count_d + count_a + i);
  }
  __device__ __forceinline__ void write(const Arguments& arguments) const {
    D* out = output<D>(arguments, 32 * count_d) + static_cast<int>(threadIdx.x) * count_d;
    for (int i = 0; i < count_d; ++i) put(out + i, d[i]);
  }
};

__device__ __forceinline__ void m16n8k16_f16(const Arguments arguments) {
  Registers<float, 4, 4, 2> held(arguments);
  mma_m16n8k16_f16(held.d, held.a, held.b);
  held.write(arguments);
}
__device__ __forceinline__ void m16n8k16_bf16(const Arguments arguments) {
  Registers<float, 4, 4, 2> held(arguments);
  mma_m16n8k16_bf16(held.d, held.a, held.b);
  held.write(arguments);
}
__device__ __forceinline__ void m16n8k16_f16_f16(const Arguments arguments) {
  Registers<unsigned, 2, 4, 2> held(arguments);
  mma_m16n8k16_f16_f16(held.d, held.a, held.b);
  held.write(arguments);
}
__device__ __forceinline__ void m16n8k8_f16(const Arguments arguments) {
  Registers<float, 4, 2, 1> held(arguments);
  mma_m16n8k8_f16(held.d, held.a, held.b[0]);
  held.write(arguments);
}
__device__ __forceinline__ void m16n8k8_tf32(const Arguments arguments) {
  Registers<float, 4, 4, 2> held(arguments);
  mma_m16n8k8_tf32(held.d, held.a, held.b);
  held.write(arguments);
}
__device__ __forceinline__ void m16n8k32_s8(const Arguments arguments) {
  Registers<int, 4, 4, 2> held(arguments);
  mma_m16n8k32_s8(held.d, held.a, held.b);
  held.write(arguments);
}
__device__ __forceinline__ void m16n8k32_u8(const Arguments arguments) {
  Registers<int, 4, 4, 2> held(arguments);
  mma_m16n8k32_u8(held.d, held.a, held.b);
  held.write(arguments);
}

}  // namespace confirm
}  // namespace cukiln
