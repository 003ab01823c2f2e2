// cp.async: a copy from global to shared memory that lands as late as it may.
//
// At the issue the target is poisoned, because from then on the copy may write it at any time. The bytes come at the wait
// that must complete the copy's group and never before, and a copy that is not committed never comes: so a missing commit,
// a missing wait and a wait for too few groups all show.
#pragma once

#include "emulation.h"

namespace cukiln {
namespace cpu {

struct Copy {
  char* target;
  const char* source;  // null: zeros
  uint32_t group;
  uint16_t bytes, site;
};

// The copies of one thread that have not landed, in the order of their issue.
struct Copies {
  Copy* list;
  int first, end, capacity;
  uint32_t committed;  // groups; the next one is not
};

inline Copies copies[max_threads];

void grow(Copies& held);
// Completes all but the last `left` committed groups of the running thread.
void land_copies(uint32_t left);

#if defined(CUKILN_RUNTIME)
// Copies without a wait end with their block.
inline void forget_copies() {
  for (int i = 0; i < thread_count; ++i) {
    Copies& held = copies[i];
    for (int k = held.first; k < held.end && watching; ++k) forget_pending(shared_offset(held.list[k].target), held.list[k].bytes);
    held.first = held.end = 0;
    held.committed = 0;
  }
}

[[noreturn]] __attribute__((noinline, cold)) inline void refuse_memory() {
  inside = 0;
  say("no memory for another asynchronous copy");
  say_where();
  abandon(status_runtime_error);
}

__attribute__((noinline, cold)) void grow(Copies& held) {
  const Undisturbed undisturbed;
  if (held.first > 0) {
    memmove(held.list, held.list + held.first, static_cast<size_t>(held.end - held.first) * sizeof(Copy));
    held.end -= held.first;
    held.first = 0;
    if (held.end < held.capacity / 2) return;
  }
  const int capacity = held.capacity ? 2 * held.capacity : 32;
  void* grown = realloc(held.list, static_cast<size_t>(capacity) * sizeof(Copy));
  if (!grown) refuse_memory();
  held.list = static_cast<Copy*>(grown);
  held.capacity = capacity;
}
#endif  // CUKILN_RUNTIME

// A null `source` stands for zeros.
template <int bytes>
__attribute__((noinline)) void issue_copy(void* target, const void* source, int line, const char* file) {
  if (!fits<bytes>(target, shared_bytes)) refuse_shared(Access::copy, target, bytes, line, file);
  const int site = watching ? watch_issue(target, bytes, line, file) : 0;
  Copies& held = copies[current];
  if (held.first == held.end) held.first = held.end = 0;
  if (held.end == held.capacity) grow(held);
  held.list[held.end++] = Copy{static_cast<char*>(target), static_cast<const char*>(source), held.committed,
                               bytes, static_cast<uint16_t>(site)};
  memset(target, 0xFF, bytes);
}

#if defined(CUKILN_RUNTIME)
__attribute__((noinline)) void land_copies(uint32_t left) {
  Copies& held = copies[current];
  if (held.committed <= left) return;
  for (; held.first < held.end && held.list[held.first].group < held.committed - left; ++held.first) {
    const Copy& copy = held.list[held.first];
    if (!copy.source) {
      memset(copy.target, 0, copy.bytes);
    } else if (copy.bytes == 16) {
      memcpy(copy.target, copy.source, 16);
    } else {
      memcpy(copy.target, copy.source, copy.bytes);
    }
    if (watching) watch_landing(copy.target, copy.bytes, copy.site);
  }
}
#endif  // CUKILN_RUNTIME

}  // namespace cpu

// Where it is not `wanted` the source is not read and zeros are written.
template <int Bytes>
CUKILN_INLINE void cp_async(void* shared, const void* global, bool wanted, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if (wanted) cpu::check_global(cpu::Global::read, global, Bytes, line, file);
  cpu::issue_copy<Bytes>(shared, wanted ? global : nullptr, line, file);
}

CUKILN_INLINE void cp_async_commit() { ++cpu::copies[cpu::current].committed; }

template <int N>
CUKILN_INLINE void cp_async_wait() {
  static_assert(N >= 0, "groups that may still be under way");
  cpu::land_copies(N);
}

}  // namespace cukiln
