// The places of the source where a kernel touches shared memory, as a watched run tells them apart and counts them.
#pragma once

#include "scheduler.h"

namespace cukiln {
namespace cpu {

// `copy`: cp_async, whose target is written some time between its issue and the wait for it. `matrix_row`: of ldmatrix.
enum class Access : unsigned char { read, write, copy, matrix_row };

inline const char* name_of(Access access) {
  switch (access) {
    case Access::read: return "read";
    case Access::write: return "write";
    case Access::copy: return "cp_async";
    default: return "ldmatrix";
  }
}

// One access instruction of the source. Counts are of whole warps: `wavefronts` is how often shared memory was busy with
// them, `ideal` how often it would have been without bank conflicts.
struct Site {
  const char* file;
  int line;
  int bytes;  // of one lane
  Access access;
  uint64_t warp_accesses, wavefronts, ideal;
};

constexpr int max_sites = 2048;
inline Site sites[max_sites];
inline int site_count = 0;
inline uint16_t site_slots[2 * max_sites];  // hash table of indices + 1

// True in runs that look for races and count bank conflicts (race.h, banks.h).
inline bool watching = false;

#if defined(CUKILN_RUNTIME)
inline void forget_sites() {
  site_count = 0;
  memset(site_slots, 0, sizeof(site_slots));
}

// The index of a site; the last one is shared by all that found no room of their own.
inline int site_of(Access access, int bytes, int line, const char* file) {
  uint32_t slot = (static_cast<uint32_t>(line) * 4u + static_cast<uint32_t>(access)) * 0x9E3779B1u + static_cast<uint32_t>(bytes);
  for (;; ++slot) {
    uint16_t& held = site_slots[slot % (2 * max_sites)];
    if (held == 0) {
      if (site_count == max_sites) return max_sites - 1;
      sites[site_count] = Site{file, line, bytes, access, 0, 0, 0};
      held = static_cast<uint16_t>(++site_count);
      return held - 1;
    }
    const Site& site = sites[held - 1];
    if (site.line == line && site.access == access && site.bytes == bytes && same_text(site.file, file)) return held - 1;
  }
}

// While it lives no signal leaves for the scheduler: what is done meanwhile must be finished. Not for what abandons.
class Undisturbed {
 public:
  Undisturbed() { inside = 0; }
  ~Undisturbed() {
    inside = 1;
    if (expired) leave_fiber();
  }
  Undisturbed(const Undisturbed&) = delete;
  Undisturbed& operator=(const Undisturbed&) = delete;
};
#endif  // CUKILN_RUNTIME

}  // namespace cpu
}  // namespace cukiln
