// What PTX instructions do to memory and with other lanes, on the fibers, checks and watches of cpu/. Bodies that need the
// matrices of cpu/matrix.h are the runtime's: a translated kernel is compiled without them.
#pragma once

#include "approximations.h"

namespace cukiln {
namespace ptx {

using cpu::Access;
using cpu::Global;
using cpu::current;
using cpu::land_copies;
using cpu::thread_count;
using cpu::warp_size;

// Where shared memory begins in its own state space: a multiple of 16 and of nothing better, and not 0, so that an offset
// is no address.
constexpr uint64_t shared_base = 0x430;

CUKILN_INLINE char* shared_pointer(uint64_t address) { return cpu::shared_begin + static_cast<int64_t>(address - shared_base); }
CUKILN_INLINE uint64_t shared_to_generic(uint64_t address) { return reinterpret_cast<uint64_t>(shared_pointer(address)); }
CUKILN_INLINE uint64_t shared_of_generic(uint64_t address) {
  return address - reinterpret_cast<uint64_t>(cpu::shared_begin) + shared_base;
}

template <int bytes>
CUKILN_INLINE void* shared_word(Access access, uint64_t address, int line, const char* file) {
  return const_cast<void*>(cpu::check_shared<bytes>(access, shared_pointer(address), line, file));
}
template <int bytes>
CUKILN_INLINE void* global_word(Global access, uint64_t address, int line, const char* file) {
  cpu::check_global(access, reinterpret_cast<const void*>(address), bytes, line, file);
  return reinterpret_cast<void*>(address);
}

// Ends the run: an instruction was executed in a way that it cannot be.
[[noreturn]] __attribute__((cold, format(printf, 3, 4))) void refuse(int line, const char* file, const char* format, ...);

// A thread's own arrays lie in its frame.
template <int bytes>
CUKILN_INLINE void* local_word(const void* memory, uint64_t size, uint64_t address, int line, const char* file) {
  const uint64_t offset = address - reinterpret_cast<uint64_t>(memory);
  if (address % bytes != 0 || size < bytes || offset > size - bytes)
    refuse(line, file, "an access of %d bytes at offset %lld of %llu bytes of local memory", bytes, static_cast<long long>(offset),
           static_cast<unsigned long long>(size));
  return reinterpret_cast<void*>(address);
}
template <int bytes>
CUKILN_INLINE const void* parameter_word(const void* arguments, uint64_t size, uint64_t address, int line, const char* file) {
  const uint64_t offset = address - reinterpret_cast<uint64_t>(arguments);
  if (offset % bytes != 0 || size < bytes || offset > size - bytes)
    refuse(line, file, "%d bytes at offset %llu of %llu bytes of parameters", bytes, static_cast<unsigned long long>(offset),
           static_cast<unsigned long long>(size));
  return reinterpret_cast<const void*>(address);
}

void check_threads(int most);

// A part of a copy, byte by byte: each lands as late as it may, as whole ones do.
template <int bytes>
__attribute__((noinline, cold)) void copy_part(uint64_t target, uint64_t source, uint32_t read, int line, const char* file) {
  if (read > bytes) refuse(line, file, "a copy that reads %u of its %d bytes", read, bytes);
  if (source % bytes != 0) refuse(line, file, "a copy of %d bytes from a misaligned source", bytes);
  char* const to = shared_pointer(target);
  if (!cpu::fits<bytes>(to, cpu::shared_bytes)) cpu::refuse_shared(Access::copy, to, bytes, line, file);
  for (uint32_t i = 0; i < bytes; ++i) {
    const void* const from = i < read ? reinterpret_cast<const void*>(source + i) : nullptr;
    if (from) cpu::check_global(Global::read, from, 1, line, file);
    cpu::issue_copy<1>(to + i, from, line, file);
  }
}
// cp.async: `read` bytes come from the source, the rest are zeros ("cp.async", src-size).
template <int bytes>
CUKILN_INLINE void copy_async(uint64_t target, uint64_t source, uint32_t read, int line, const char* file) {
  if (read != 0 && read != bytes) return copy_part<bytes>(target, source, read, line, file);
  if (read != 0) cpu::check_global(Global::read, reinterpret_cast<const void*>(source), bytes, line, file);
  cpu::issue_copy<bytes>(shared_pointer(target), read != 0 ? reinterpret_cast<const void*>(source) : nullptr, line, file);
}

template <class T>
CUKILN_INLINE void add_to_global(uint64_t address, uint32_t value, int line, const char* file) {
  void* const to = global_word<4>(Global::write, address, line, file);
  if (cukiln::is_same<T, float>) {
    *static_cast<uint32_t*>(to) = flush(add_f32(flush(*static_cast<uint32_t*>(to)), flush(value)));
  } else {
    *static_cast<uint32_t*>(to) += value;
  }
}

struct Shuffled {
  uint32_t value;
  bool inside;
};
enum Shuffling { Shuffle_idx, Shuffle_up, Shuffle_down, Shuffle_bfly };

// Whatever all lanes of a warp do together. A mask that does not name all of them ends the run.
Shuffled shuffle_in_warp(Shuffling mode, uint32_t value, uint32_t lane, uint32_t clamp, uint32_t mask, int line, const char* file);
template <Shuffling mode>
CUKILN_INLINE Shuffled shuffle(uint32_t value, uint32_t lane, uint32_t clamp, uint32_t mask, int line, const char* file) {
  return shuffle_in_warp(mode, value, lane, clamp, mask, line, file);
}
uint32_t ballot(bool value, uint32_t mask, int line, const char* file);
void warp_barrier(uint32_t mask, int line, const char* file);
void load_matrix(int count, bool transposed, uint64_t address, unsigned* out, int line, const char* file);
// d += a * b.
void mma_f16(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file);
void mma_bf16(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file);
void mma_f16_f16(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file);
void mma_f16_k8(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file);
void mma_tf32(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file);
void mma_s8(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file);
void mma_u8(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file);

}  // namespace ptx
}  // namespace cukiln
