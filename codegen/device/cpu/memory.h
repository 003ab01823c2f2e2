// The memory a kernel may see: global buffers between guard pages, and one block's shared memory.
#pragma once

#include "fiber.h"

namespace cukiln {
namespace cpu {

constexpr int max_buffers = 32;
constexpr unsigned char canary = 0xFF;  // read as any float type it is NaN
constexpr size_t min_canary_bytes = 64;

// A global buffer:  [guard][canary ... ][ bytes ][canary, a few bytes][guard]
// Its end lies as close to the second guard as its alignment allows, so that even a raw access just behind it traps.
// Guards are untouchable and take address space alone: so wide that an index that is wrong by a few rows, pages or images,
// or that wrapped at 32 bits, falls into one of them and not into another operand.
constexpr size_t guard_bytes_of_buffer = size_t{4} << 30;
struct Buffer {
  char name[32];
  char* mapped;
  size_t mapped_bytes;
  size_t guard;  // bytes of each of the two
  char* begin;
  size_t bytes;
  bool writable;
  size_t written_from, written_to;  // offsets between which the launch that runs has written; from behind to: nowhere
};

inline Buffer buffers[max_buffers];
inline int buffer_count = 0;

#if defined(CUKILN_RUNTIME)
inline void forget_writes(Buffer& buffer) {
  buffer.written_from = buffer.bytes;
  buffer.written_to = 0;
}

inline void note_write(Buffer& buffer, size_t offset, size_t bytes) {
  if (offset < buffer.written_from) buffer.written_from = offset;
  if (offset + bytes > buffer.written_to) buffer.written_to = offset + bytes;
}

// Whether the launch that runs has written there, or both before and behind.
inline bool was_written(const Buffer& buffer, size_t offset, size_t bytes) {
  return offset < buffer.written_to && offset + bytes > buffer.written_from;
}

inline size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

inline char* canary_begin(const Buffer& buffer) { return buffer.mapped + buffer.guard; }
inline char* canary_end(const Buffer& buffer) { return buffer.mapped + buffer.mapped_bytes - buffer.guard; }

constexpr size_t far_bytes = size_t{1} << 30;  // of a buffer with more only little is touched

// Maps a buffer and fills its canaries. It starts at a multiple of `alignment` and of nothing better, up to the 16 bytes
// of the widest access: a vector access that the operand's alignment does not promise must not work by luck.
// Untouched pages take no memory, so that rows may lie as far apart as a caller's. Returns its data, or null where memory
// or room for buffers ran out.
inline void* allocate_buffer(const char* name, size_t bytes, size_t alignment, bool writable) {
  if (buffer_count == max_buffers) return nullptr;
  const size_t inner = round_up(round_up(bytes, alignment) + alignment + min_canary_bytes, page_bytes());
  const size_t all = inner + 2 * guard_bytes_of_buffer;
  void* mapped = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  // Rows that lie far apart would take 2 MiB each. Where a kernel has no huge pages it fails, and nothing is lost.
  if (all > far_bytes) madvise(mapped, all, MADV_NOHUGEPAGE);
  char* inner_begin = static_cast<char*>(mapped) + guard_bytes_of_buffer;
  if (mprotect(inner_begin, inner, PROT_READ | PROT_WRITE) != 0) {
    munmap(mapped, all);
    return nullptr;
  }
  Buffer& buffer = buffers[buffer_count++];
  snprintf(buffer.name, sizeof(buffer.name), "%s", name);
  buffer.mapped = static_cast<char*>(mapped);
  buffer.mapped_bytes = all;
  buffer.guard = guard_bytes_of_buffer;
  buffer.begin = inner_begin + inner - round_up(bytes, alignment);
  if (alignment < 16 && reinterpret_cast<uintptr_t>(buffer.begin) % (2 * alignment) == 0) buffer.begin -= alignment;
  buffer.bytes = bytes;
  buffer.writable = writable;
  forget_writes(buffer);
  memset(inner_begin, canary, static_cast<size_t>(buffer.begin - inner_begin));
  memset(buffer.begin + bytes, canary, static_cast<size_t>(canary_end(buffer) - buffer.begin) - bytes);
  return buffer.begin;
}

inline void free_buffers() {
  for (int i = 0; i < buffer_count; ++i) munmap(buffers[i].mapped, buffers[i].mapped_bytes);
  buffer_count = 0;
}

// Before each launch: what an earlier one wrote may be read.
inline void forget_writes() {
  for (int i = 0; i < buffer_count; ++i) forget_writes(buffers[i]);
}

// Inputs can only be read while a kernel runs; canaries are hidden from raw accesses where the sanitizer watches them.
inline void arm_buffers(bool armed) {
  for (int i = 0; i < buffer_count; ++i) {
    const Buffer& buffer = buffers[i];
    if (!buffer.writable)
      mprotect(canary_begin(buffer), static_cast<size_t>(canary_end(buffer) - canary_begin(buffer)),
               armed ? PROT_READ : PROT_READ | PROT_WRITE);
#if defined(__SANITIZE_ADDRESS__)
    char* const end = buffer.begin + buffer.bytes;
    if (armed) {
      __asan_poison_memory_region(canary_begin(buffer), static_cast<size_t>(buffer.begin - canary_begin(buffer)));
      __asan_poison_memory_region(end, static_cast<size_t>(canary_end(buffer) - end));
    } else {
      __asan_unpoison_memory_region(canary_begin(buffer), static_cast<size_t>(canary_end(buffer) - canary_begin(buffer)));
    }
#endif
  }
}

// The first canary byte that changed, as an offset from the start of the data; false where none did.
inline bool broken_canary(const Buffer& buffer, ptrdiff_t* offset) {
  for (const char* at = canary_begin(buffer); at < canary_end(buffer); ++at) {
    if (at == buffer.begin) {
      at += buffer.bytes;
      if (at >= canary_end(buffer)) return false;
    }
    if (static_cast<unsigned char>(*at) != canary) {
      *offset = at - buffer.begin;
      return true;
    }
  }
  return false;
}

// The buffer whose mapping, guards included, holds `address`; null where none does.
inline const Buffer* buffer_near(const void* address) {
  const char* at = static_cast<const char*>(address);
  for (int i = 0; i < buffer_count; ++i)
    if (at >= buffers[i].mapped && at < buffers[i].mapped + buffers[i].mapped_bytes) return &buffers[i];
  return nullptr;
}
#endif  // CUKILN_RUNTIME

// Dynamic shared memory of the running block: exactly `shared_bytes`, its end against an untouchable page.
constexpr size_t max_shared_bytes = 256 * 1024;
inline char* shared_map = nullptr;
inline char* shared_begin = nullptr;
inline size_t shared_bytes = 0;

#if defined(CUKILN_RUNTIME)
inline bool reserve_shared(size_t bytes) {
  const size_t page = page_bytes();
  if (!shared_map) {
    void* mapped = mmap(nullptr, max_shared_bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return false;
    if (mprotect(static_cast<char*>(mapped) + page, max_shared_bytes, PROT_READ | PROT_WRITE) != 0) return false;
    shared_map = static_cast<char*>(mapped);
  }
  char* const end = shared_map + page + max_shared_bytes;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(shared_map + page, max_shared_bytes);
#endif
  shared_begin = end - round_up(bytes, 16);  // shared_memory() promises 16 bytes of alignment
  shared_bytes = bytes;
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(shared_map + page, static_cast<size_t>(shared_begin - shared_map) - page);
#endif
  return true;
}

// All bits set: NaN as float, double, half and bfloat16, and no valid index.
inline void poison_shared() { memset(shared_begin, 0xFF, shared_bytes); }
#endif  // CUKILN_RUNTIME

}  // namespace cpu
}  // namespace cukiln
