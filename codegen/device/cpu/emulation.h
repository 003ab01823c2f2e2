// The primitives of device.cuh in plain C++: the same names and results, and every access checked.
#pragma once

#include "collective.h"

#define __device__
#define __host__
#define __global__ static
// Forcing every copy of a kernel's helpers in, as nvcc must, costs g++ 12 % more time and gains no speed.
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __syncthreads() ::cukiln::cpu::barrier(__LINE__, __FILE__)

namespace cukiln {
namespace cpu {

[[noreturn]] __attribute__((cold)) void refuse_shared(Access access, const void* at, size_t bytes, int line, const char* file);

#if defined(CUKILN_RUNTIME)
inline void say_access(const char* verb, size_t bytes, int line, const char* file) {
  say("%s:%d: %s of %zu bytes", file, line, verb, bytes);
}

[[noreturn]] void refuse_shared(Access access, const void* at, size_t bytes, int line, const char* file) {
  inside = 0;  // the time limit no longer matters
  const ptrdiff_t offset = static_cast<const char*>(at) - shared_begin;
  const bool outside = offset < 0 || static_cast<size_t>(offset) + bytes > shared_bytes;
  say_access(name_of(access), bytes, line, file);
  say(" at offset %td of shared memory: %s", offset, outside ? "outside of" : "misaligned in");
  say(" its %zu bytes", shared_bytes);
  say_where();
  abandon(status_runtime_error);
}
#endif  // CUKILN_RUNTIME

// How global memory is accessed. `constant`: through the read-only cache, which need not see what this launch wrote.
enum class Global { read, constant, write };

inline const char* name_of(Global access) {
  return access == Global::write ? "store_global" : access == Global::read ? "cp_async" : "load_global";
}

#if defined(CUKILN_RUNTIME)
[[noreturn]] __attribute__((noinline, cold)) inline void refuse_global(Global access, const void* at, size_t bytes, int line,
                                                                         const char* file) {
  inside = 0;
  const Buffer* buffer = buffer_near(at);
  say_access(access == Global::write ? "write" : "read", bytes, line, file);
  if (!buffer) {
    say(" at %p, which is in no buffer", at);
  } else {
    const ptrdiff_t offset = static_cast<const char*>(at) - buffer->begin;
    const bool outside = offset < 0 || static_cast<size_t>(offset) + bytes > buffer->bytes;
    say(" at offset %td of %s (%zu bytes): ", offset, buffer->name, buffer->bytes);
    say("%s", outside                                      ? "outside of it"
              : reinterpret_cast<uintptr_t>(at) % bytes ? "misaligned"
              : access == Global::write                  ? "it is an input, which no kernel may write"
                                                         : "this launch wrote to it; load_global reads through the read-only cache");
  }
  say_where();
  abandon(status_runtime_error);
}
#endif  // CUKILN_RUNTIME

#if defined(CUKILN_UNCHECKED)
// A library of target cpu: its kernel was verified, and where its callers' operands end is not described here.
template <int bytes>
CUKILN_INLINE bool fits(const void*, size_t) {
  return true;
}
#else
// Whether the access is aligned and inside of the first `room` bytes of shared memory. Few instructions, because a kernel
// reads shared memory for every few multiplications.
template <int bytes>
CUKILN_INLINE bool fits(const void* at, size_t room) {
  const size_t offset = static_cast<size_t>(static_cast<const char*>(at) - shared_begin);
  const bool misaligned = reinterpret_cast<uintptr_t>(at) % bytes != 0;
  return __builtin_expect(!(misaligned | (offset > room - bytes) | (room < bytes)), 1);
}
#endif

// `pure` is true of what a kernel's own code can see: nothing that it has in registers must be read again after the call,
// which would make the path that is not taken slow the other one down (8 % of a kernel of 8 x 8 outputs per thread). That
// is why the address goes through it: a pure call whose result is unused is none.
template <int bytes>
__attribute__((noinline, cold, pure)) const void* look_at_shared(Access access, const void* at, int line, const char* file) {
  if (!fits<bytes>(at, shared_bytes)) refuse_shared(access, at, bytes, line, file);
  watch_access(access, at, bytes, line, file);
  return at;
}

// Returns the address once the access has been found right; watched runs keep it in mind.
template <int bytes>
CUKILN_INLINE const void* check_shared(Access access, const void* at, int line, const char* file) {
  if (!fits<bytes>(at, unwatched_bytes)) return look_at_shared<bytes>(access, at, line, file);
  return at;
}

#if defined(CUKILN_UNCHECKED)
CUKILN_INLINE void check_global(Global, const void*, size_t, int, const char*) {}
#else
void check_global(Global access, const void* at, size_t bytes, int line, const char* file);
#endif

#if defined(CUKILN_RUNTIME) && !defined(CUKILN_UNCHECKED)
// Out of line, because inlined into every access of every kernel it would cost more compile time than it saves.
__attribute__((noinline)) void check_global(Global access, const void* at, size_t bytes, int line, const char* file) {
  const char* const address = static_cast<const char*>(at);
  for (int i = 0; i < buffer_count; ++i) {
    Buffer& buffer = buffers[i];
    const size_t offset = static_cast<size_t>(address - buffer.begin);
    if (offset >= buffer.bytes) continue;
    if (offset + bytes > buffer.bytes || reinterpret_cast<uintptr_t>(at) % bytes != 0) break;
    if (access == Global::write ? !buffer.writable : access == Global::constant && was_written(buffer, offset, bytes)) break;
    if (access == Global::write) note_write(buffer, offset, bytes);
#if defined(CUKILN_COUNTING)
    count_access(name_of(access), access == Global::write, i, offset, bytes);
#endif
    return;
  }
  refuse_global(access, at, bytes, line, file);
}
#endif  // CUKILN_RUNTIME

}  // namespace cpu

template <int N, class T>
CUKILN_INLINE Vector<T, N> load_global(const T* source, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  static_assert(sizeof(T) * N <= 16, "an access moves at most 16 bytes");
  cpu::check_global(cpu::Global::constant, source, sizeof(T) * N, line, file);
  return *reinterpret_cast<const Vector<T, N>*>(source);
}

template <int N, class T>
CUKILN_INLINE void store_global(T* target, const Vector<T, N>& value, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  static_assert(sizeof(T) * N <= 16, "an access moves at most 16 bytes");
  cpu::check_global(cpu::Global::write, target, sizeof(T) * N, line, file);
  *reinterpret_cast<Vector<T, N>*>(target) = value;
}

template <int N, class T>
CUKILN_INLINE Vector<T, N> load_shared(const T* source, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  static_assert(sizeof(T) * N <= 16, "an access moves at most 16 bytes");
  return *static_cast<const Vector<T, N>*>(cpu::check_shared<sizeof(T) * N>(cpu::Access::read, source, line, file));
}

template <int N, class T>
CUKILN_INLINE void store_shared(T* target, const Vector<T, N>& value, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  static_assert(sizeof(T) * N <= 16, "an access moves at most 16 bytes");
  const void* const at = cpu::check_shared<sizeof(T) * N>(cpu::Access::write, target, line, file);
  *static_cast<Vector<T, N>*>(const_cast<void*>(at)) = value;
}

template <class T>
CUKILN_INLINE T* shared_memory() {
  return reinterpret_cast<T*>(cpu::shared_begin);
}

// One rounding, as fma.rn.f32. Where the processor has no such instruction (x86-64 before Haswell) the library call is
// slow but rounds alike, so that results never depend on the machine that verified.
CUKILN_INLINE float fma(float a, float b, float c) {
  CUKILN_COUNT("fma", 1);
  return __builtin_fmaf(a, b, c);
}

inline float exp(float x) { return __builtin_expf(x); }
// A subnormal result is a zero; of a subnormal argument 2^x is 1 without that.
inline float exp2(float x) {
  const float power = __builtin_exp2f(x);
  return power < 0x1p-126f ? 0.0f : power;
}
inline float log(float x) { return __builtin_logf(x); }
inline float log2(float x) { return __builtin_log2f(x); }
inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline float erf(float x) { return __builtin_erff(x); }
inline float tanh(float x) { return __builtin_tanhf(x); }

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

inline float maximum(float a, float b) {
  if (a > b || b != b) return a;
  if (b > a || a != a) return b;
  return float_of(bits_of(a) & bits_of(b));  // equal, but for the signs of zeros
}

// To the nearest half, ties to even, and back. NaN keeps its sign and becomes quiet.
inline float round_to_half(float x) {
  const uint32_t sign = bits_of(x) & 0x80000000u, magnitude = bits_of(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return float_of(bits_of(x) | 0x00400000u);
  if (magnitude >= 0x477ff000u) return float_of(sign | 0x7f800000u);  // 65520 and above round to infinity
  // Below 2^-14 halves are 2^-24 apart, like the floats from 0.5 to 1: adding 0.5 makes the processor round.
  if (magnitude < 0x38800000u) return float_of(sign | bits_of((float_of(magnitude) + 0.5f) - 0.5f));
  return float_of(sign | ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) & ~0x1fffu));
}

inline float round_to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return float_of(bits | 0x00400000u);
  return float_of((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// True in runs on integers that must come out exactly: activations that no float represents exactly are the identity.
inline bool exact_epilogue() { return cpu::exact; }

}  // namespace cukiln
