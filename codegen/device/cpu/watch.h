// What a watched run does at every access to shared memory; unwatched runs never come here.
#pragma once

#include "banks.h"
#include "race.h"

namespace cukiln {
namespace cpu {

// Accesses to shared memory inside of these bytes go unwatched. 0 in a watched run, so that the one comparison which
// every access makes anyway also leads here.
inline size_t unwatched_bytes = 0;

// A checked access of the running thread.
void watch_access(Access access, const void* at, int bytes, int line, const char* file);
// The issue of an asynchronous copy to checked shared memory; returns its site.
int watch_issue(const void* at, int bytes, int line, const char* file);
// Inside of a collective: lanes 0 to `count` - 1 brought the addresses of rows of 16 bytes, checked, that the whole warp reads.
void watch_rows(const void* const* rows, int count);

#if defined(CUKILN_RUNTIME)
inline uint32_t shared_offset(const void* at) { return static_cast<uint32_t>(static_cast<const char*>(at) - shared_begin); }

inline Touch touch_of(int site) { return Touch{current / warp_size, current % warp_size, site, false, false, false, false}; }

__attribute__((noinline)) void watch_access(Access access, const void* at, int bytes, int line, const char* file) {
  const Undisturbed undisturbed;
  Touch touch = touch_of(site_of(access, bytes, line, file));
  touch.writes = access == Access::write;
  count_lane(touch.site, touch.lane, shared_offset(at));
  touch_shared(touch, shared_offset(at), static_cast<size_t>(bytes));
}

int watch_issue(const void* at, int bytes, int line, const char* file) {
  const Undisturbed undisturbed;
  Touch touch = touch_of(site_of(Access::copy, bytes, line, file));
  touch.writes = touch.pending = true;
  count_lane(touch.site, touch.lane, shared_offset(at));
  touch_shared(touch, shared_offset(at), static_cast<size_t>(bytes));
  return touch.site;
}

// The running thread has waited for the copy.
inline void watch_landing(const void* at, int bytes, int site) {
  Touch touch = touch_of(site);
  touch.writes = touch.lands = true;
  touch_shared(touch, shared_offset(at), static_cast<size_t>(bytes));
}

void watch_rows(const void* const* rows, int count) {
  const Undisturbed undisturbed;
  const int self = current;
  const int site = site_of(Access::matrix_row, 16, threads[self].line, threads[self].file);
  Instruction instruction = {count == warp_size ? whole_warp : (1u << count) - 1, {}};
  for (int i = 0; i < count; ++i) {
    current = warp_of(self).first + i;
    instruction.offsets[i] = shared_offset(rows[i]);
    Touch touch = touch_of(site);
    touch.whole_warp = true;
    touch_shared(touch, instruction.offsets[i], 16);
  }
  current = self;
  count_instruction(site, instruction);
}

inline void start_watch(bool watch) {
  watching = watch;
  if (!watch) return;
  forget_instructions();
  forget_sites();
}

inline void end_watch(bool failed) {
  if (watching && failed) stale_cells = true;
}

// Makes ready for a launch. False: out of memory.
inline bool prepare_watch() {
  unwatched_bytes = watching ? 0 : shared_bytes;
  return !watching || reserve_cells();
}
#endif  // CUKILN_RUNTIME

}  // namespace cpu
}  // namespace cukiln
