// A kernel that is right with fault 0 and wrong in one way with every other one. Right: each block of 64 threads adds
// the two halves of its 64 elements of a row through shared memory and scales the sum by 1 in the epilogue.
#pragma once

namespace cukiln {
namespace faulty {

struct Arguments {
  const float* in;
  float* out;
  int rows, columns;
  int64_t pitch;
};

#if defined(CUKILN_DEVICE)

#if defined(CUKILN_CPU)
inline int recurse(volatile int depth) {
  volatile char frame[4096];
  frame[depth % 4096] = 1;
  return depth < 0 ? 0 : recurse(depth + 1) + frame[depth % 4096];
}
#endif

template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  const int thread = static_cast<int>(threadIdx.x);
  const int blocks_per_row = (arguments.columns + 63) / 64;
  const int row = static_cast<int>(blockIdx.x) / blocks_per_row;
  const int column = static_cast<int>(blockIdx.x) % blocks_per_row * 64 + thread;
  const int64_t at = row * arguments.pitch + column;
  const bool inside = column < arguments.columns;
  float* shared = shared_memory<float>();
  Vector<float, 1> value{{0.0f}};
  if (inside) value = load_global<1>(arguments.in + at);

  if constexpr (C::fault == 3) if (thread >= 32) return;
  if constexpr (C::fault == 4) value = load_global<1>(arguments.in + arguments.rows * arguments.pitch + thread);
  if constexpr (C::fault == 5) store_global<1>(arguments.out - 1 - thread, value);
  if constexpr (C::fault == 6) value.data[0] = arguments.in[arguments.rows * arguments.pitch + 4 + thread];
  if constexpr (C::fault == 7) arguments.out[-1 - thread] = 1.0f;
  if constexpr (C::fault == 8) value.data[0] = load_global<2>(arguments.in).data[0] + load_global<2>(arguments.in + 1).data[0];
  if constexpr (C::fault == 9) store_shared<1>(shared + 64 + thread, value);
  if constexpr (C::fault == 10) store_shared<4>(shared + 1, Vector<float, 4>{{1, 2, 3, 4}});
  if constexpr (C::fault == 12) for (volatile int i = 0;; i = i + 1) {}
  if constexpr (C::fault == 13) for (;;) __syncthreads();
  if constexpr (C::fault == 15) store_global<1>(const_cast<float*>(arguments.in), value);
  if constexpr (C::fault == 16) *const_cast<float*>(arguments.in) = 1.0f;
  if constexpr (C::fault == 17) value.data[0] = static_cast<float>(thread / (arguments.columns - arguments.columns * (thread < 64)));
#if defined(CUKILN_CPU)
  if constexpr (C::fault == 18) value.data[0] = static_cast<float>(recurse(0));
  if constexpr (C::fault == 28) _exit(3);
  if constexpr (C::fault == 36) {
    float fragment[4] = {value.data[0], 0, 0, 0};
    for (int i = 0; i <= 4; ++i) value.data[0] += fragment[i];
  }
  if constexpr (C::fault == 33) if (thread == 0) for (int pipe = 3; pipe < 1 << 16; ++pipe) (void)!write(pipe, "{\"kernel\": 0}\n", 14);
#endif
  if constexpr (C::fault == 19) value.data[0] = *reinterpret_cast<const volatile float*>(static_cast<unsigned long long>(thread));
  if constexpr (C::fault == 26) value.data[0] = C::no_such_field;
  if constexpr (C::fault == 27) __builtin_trap();
  if constexpr (C::fault == 29) {
    volatile float few[4];
    for (int i = 0; i < 4 + (column >= 0); ++i) few[i] = 0.0f;
    value.data[0] += few[3];
  }

#if defined(__CUDACC__)
  if constexpr (C::fault == 31) {
    // Keeps nvcc busy for minutes: two thousand variables that each of two thousand unrolled steps mixes.
    float many[2000];
#pragma unroll
    for (int i = 0; i < 2000; ++i) many[i] = value.data[0] + static_cast<float>(i);
#pragma unroll
    for (int step = 1; step < 2000; ++step)
#pragma unroll
      for (int i = 0; i < 2000; ++i) many[i] = many[i] * many[(i * step) % 2000] + static_cast<float>(step ^ thread);
    value.data[0] = many[thread];
  }
#endif

  if (C::fault != 11 || thread != 40) store_shared<1>(shared + thread, value);
  if constexpr (C::fault == 2) {
    if (thread < 32) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  } else if constexpr (C::fault != 1) {
    __syncthreads();
  }
  Vector<float, 1> sum{{load_shared<1>(shared + thread).data[0] + load_shared<1>(shared + (thread ^ 32)).data[0]}};

  if constexpr (C::fault == 21 || C::fault == 22) {
    // The last warp wins: the result depends on the order of warps. Through global memory, where nothing looks for
    // races.
    float* const last = arguments.out + at - thread;
    __syncthreads();
    store_global<1>(last, Vector<float, 1>{{static_cast<float>(thread / 32)}});
    __syncthreads();
    const float warp = *last;  // not load_global, which may not read what this launch wrote
    __syncthreads();
    // 22: too little to leave the bound of an approximate run, and nothing for integers.
    if (C::fault == 21) sum.data[0] += warp * 8.0f;
    if (C::fault == 22) sum.data[0] *= 1.0f + warp * (exact_epilogue() ? 0.0f : 2e-7f);
  }
  if constexpr (C::fault == 32) {
    // Relies on a lane to have stored before the next one reads, without a barrier.
    const int even = thread & ~1;
    const float expected = load_shared<1>(shared + even).data[0] + load_shared<1>(shared + (even ^ 32)).data[0];
    __syncthreads();
    store_shared<1>(shared + thread, sum);
    if (load_shared<1>(shared + even).data[0] != expected) sum.data[0] += 1.0f;
  }
  if constexpr (C::fault == 34 || C::fault == 35) {
    // The sum again, by atomic adds in whatever order warps come, with 8 more of the one and 8 less of the other.
    if (inside) arguments.out[at] = 0.0f;
    __syncthreads();
    const int64_t partner = at + (thread ^ 32) - thread;
    const bool both = column + (thread ^ 32) - thread < arguments.columns;
    const float more = exact_epilogue() ? 0.0f : (thread < 32 ? 8.0f : -8.0f);
    if (inside) atomic_add(arguments.out + at, value.data[0]);
    if (inside) atomic_add(arguments.out + at, more);
    if (both) atomic_add(arguments.out + partner, value.data[0]);
    if (both) atomic_add(arguments.out + partner, more);
    return;
  }
  if constexpr (C::fault == 23) if (column == 0 && row == 0) arguments.out[arguments.columns] = 0.0f;
  if constexpr (C::fault == 24) if (column == 0) sum.data[0] += load_global<1>(arguments.in + arguments.columns).data[0];
  if constexpr (C::fault == 30) sum.data[0] += exact_epilogue() ? 0.0f : 1e-3f;
  if (inside && (C::fault != 14 || column + 1 != arguments.columns)) store_global<1>(arguments.out + at, sum);
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t*, const double*, void*) {
  return Arguments{static_cast<const float*>(pointers[0]), static_cast<float*>(pointers[1]), static_cast<int>(extents[0]),
                   static_cast<int>(extents[1]), extents[2]};
}

template <class C>
int64_t workspace_bytes(const int64_t*, const int32_t*) {
  return 0;
}

template <class C>
bool check(const TensorView*, int count, int64_t*, Complaint complaint) {
  if (count != 2) CUKILN_REFUSE(complaint, "TypeError: %d tensors were given; in and out are wanted", count);
  return true;
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  const uint32_t grid = static_cast<uint32_t>(arguments.rows * ((arguments.columns + 63) / 64));
  out[0] = Launch{0, {grid, 1, 1}, {C::fault == 25 ? 2048u : 64u, 1, 1}, 64 * sizeof(float)};
  return 1;
}

#endif  // CUKILN_HOST

}  // namespace faulty
}  // namespace cukiln
