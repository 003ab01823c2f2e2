// What a run did, by launch and primitive: of a build with CUKILN_COUNTING. Elsewhere CUKILN_COUNT is nothing (launch.h).
#pragma once

#include "scheduler.h"

#if defined(CUKILN_COUNTING)
#include <stdlib.h>

#define CUKILN_COUNT(...) ::cukiln::cpu::count(__VA_ARGS__)

namespace cukiln {
namespace cpu {

constexpr size_t sector_bytes = 32;  // what the L2 moves at least
constexpr int max_counts = 256;

// Of one primitive in launches of one function. `times`: of a lane; of a warp where the whole warp executes it.
struct Count {
  const char* primitive;
  int32_t function;
  uint64_t times, multiplications, read, written;
};

inline Count counts[max_counts];
inline int count_count = 0;
inline int counted_function = 0;

// Bit i of a buffer's: whether the launch that runs has read, or written, its sector i.
struct Sectors {
  uint64_t* bits;
  size_t words;
};
inline Sectors sectors[2][max_buffers];

void count(const char* primitive, uint64_t multiplications = 0, uint64_t read = 0, uint64_t written = 0);

#if defined(CUKILN_RUNTIME)
void count(const char* primitive, uint64_t multiplications, uint64_t read, uint64_t written) {
  int i = 0;
  while (i < count_count && !(counts[i].function == counted_function && same_text(counts[i].primitive, primitive))) ++i;
  if (i == max_counts) return;
  if (i == count_count) counts[count_count++] = Count{primitive, counted_function, 0, 0, 0, 0};
  Count& counted = counts[i];
  counted.times += 1;
  counted.multiplications += multiplications;
  counted.read += read;
  counted.written += written;
}

// An access of a lane to a buffer.
inline void count_access(const char* primitive, bool writes, int buffer, size_t offset, size_t bytes) {
  count(primitive, 0, writes ? 0 : bytes, writes ? bytes : 0);
  Sectors& touched = sectors[writes][buffer];
  for (size_t at = offset / sector_bytes; at <= (offset + bytes - 1) / sector_bytes; ++at)
    if (at / 64 < touched.words) touched.bits[at / 64] |= uint64_t{1} << at % 64;
}

inline void begin_launch(int function) {
  counted_function = function;
  count("launch");
  for (auto& kind : sectors)
    for (int i = 0; i < buffer_count; ++i) {
      const size_t words = buffers[i].bytes / (64 * sector_bytes) + 1;
      free(kind[i].bits);
      kind[i].bits = static_cast<uint64_t*>(calloc(words, sizeof(uint64_t)));
      kind[i].words = kind[i].bits ? words : 0;
    }
}

// The sectors of all buffers that the launch touched, as bytes of a primitive "sectors".
inline void end_launch() {
  uint64_t found[2] = {0, 0};
  for (int writes = 0; writes < 2; ++writes)
    for (int i = 0; i < buffer_count; ++i)
      for (size_t word = 0; word < sectors[writes][i].words; ++word)
        found[writes] += static_cast<uint64_t>(__builtin_popcountll(sectors[writes][i].bits[word]));
  count("sectors", 0, found[0] * sector_bytes, found[1] * sector_bytes);
}
#endif  // CUKILN_RUNTIME

}  // namespace cpu
}  // namespace cukiln
#endif
