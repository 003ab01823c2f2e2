// Finds races on shared memory: two threads, one address, no barrier between, one of them writing.
//
// Vector clocks, one per warp, because only whole warps synchronise: the block's barrier, named barriers, warp_barrier.
// Collectives such as mma and shuffles order nothing. A warp counts epochs: the present one is stamped on every access of
// its lanes, and each barrier that it comes to begins another. `clocks[w][v]` is an epoch of warp v: its accesses in epochs
// below that happened before whatever warp w does now. For v = w they are those of the warp's other lanes; what a
// thread did itself always happened before. (Lamport 1978; the division of a word's history into its last write and the
// reads since is that of Flanagan and Freund, "FastTrack", PLDI 2009.)
//
// A record for every word of 4 bytes; those of words that are accessed in smaller parts are split into one for each byte,
// so that threads may write different bytes of one word.
#pragma once

#include "sites.h"

namespace cukiln {
namespace cpu {

struct Clock {
  uint32_t seen[max_warps];
  uint32_t least;  // of those of the block's warps: whatever is older happened before, by any thread
};

inline uint32_t epochs[max_warps];
inline Clock clocks[max_warps];
inline uint32_t block_epoch = 1;  // the first one of the running block; whatever is stamped with less is of another one

constexpr uint32_t pending_epoch = 0xFFFFFFFF;  // after everything that anybody has seen

// `pending`: the target of a copy that has been issued and not been waited for; its epoch is `pending_epoch`.
struct LastWrite {
  uint32_t epoch;
  uint16_t thread : 15;
  uint16_t pending : 1;
  uint16_t site;
};

// The reads of one warp that none of its barriers has ordered since: the last one, and one of another lane. Where only one
// lane read, `other` is that lane too.
struct LastRead {
  uint32_t epoch;
  uint16_t site, other_site;
  uint8_t lane, other;
};

// The history of shared memory: a LastWrite for every cell, then for every warp of the block a LastRead for every cell.
// Cells are first all words, then all bytes. What an earlier block left here is recognised by its epoch.
inline LastWrite* last_writes = nullptr;
inline LastRead* last_reads = nullptr;
inline uint32_t* split_words = nullptr;  // the block epoch in which a word was split
inline bool any_split = false;
inline bool stale_cells = false;  // a run ended in the middle and left pending writes
inline size_t word_count = 0;
inline size_t cell_count = 0;
constexpr size_t max_words = max_shared_bytes / 4;

// What barriers do to the clocks of the warps that come to them.
void release_clock(int warp, Clock& clock);
void acquire_clock(int warp, const Clock& clock);
void join_lanes(int warp);

#if defined(CUKILN_RUNTIME)
// Makes room for the cells of a launch; memory is only taken where cells are used. False: out of memory.
inline bool reserve_cells() {
  constexpr size_t max_cells = 5 * max_words;
  constexpr size_t all = max_cells * (sizeof(LastWrite) + max_warps * sizeof(LastRead)) + max_words * sizeof(uint32_t);
  word_count = (shared_bytes + 3) / 4;
  cell_count = 5 * word_count;
  if (stale_cells) madvise(last_writes, all, MADV_DONTNEED);  // zeros from now on
  stale_cells = false;
  if (!last_writes) {
    void* mapped = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return false;
    last_writes = static_cast<LastWrite*>(mapped);
    last_reads = reinterpret_cast<LastRead*>(last_writes + max_cells);
    split_words = reinterpret_cast<uint32_t*>(last_reads + max_cells * max_warps);
  }
  return true;
}

inline void refresh_least(Clock& clock) {
  clock.least = clock.seen[0];
  for (int i = 1; i < warp_count; ++i) clock.least = clock.seen[i] < clock.least ? clock.seen[i] : clock.least;
}

// Everything before is forgotten: a new block has its shared memory for itself.
inline void start_clocks() {
  for (int i = 0; i < max_warps; ++i) block_epoch = epochs[i] >= block_epoch ? epochs[i] + 1 : block_epoch;
  for (int i = 0; i < warp_count; ++i) {
    epochs[i] = block_epoch;
    for (int j = 0; j < warp_count; ++j) clocks[i].seen[j] = block_epoch;
    clocks[i].least = block_epoch;
  }
  any_split = false;
}

// All lanes of the warp have come to a barrier, and what they did before is in `clock`.
void release_clock(int warp, Clock& clock) {
  ++epochs[warp];
  for (int i = 0; i < warp_count; ++i)
    if (clock.seen[i] < clocks[warp].seen[i]) clock.seen[i] = clocks[warp].seen[i];
  clock.seen[warp] = epochs[warp];
}

void acquire_clock(int warp, const Clock& clock) {
  for (int i = 0; i < warp_count; ++i)
    if (clocks[warp].seen[i] < clock.seen[i]) clocks[warp].seen[i] = clock.seen[i];
  refresh_least(clocks[warp]);
}

// The block's barrier.
inline void join_clocks() {
  Clock all = {};
  for (int i = 0; i < warp_count; ++i) all.seen[i] = ++epochs[i];
  refresh_least(all);
  for (int i = 0; i < warp_count; ++i) clocks[i] = all;
}

void join_lanes(int warp) {
  clocks[warp].seen[warp] = ++epochs[warp];
  refresh_least(clocks[warp]);
}

inline void say_deed(int thread, const Site& site) {
  const char* const did = site.access == Access::write ? "wrote" : site.access == Access::copy ? "copied" : "read";
  const bool together = site.access == Access::matrix_row;
  say("%s %d %s at %s:%d", together ? "warp" : "thread", together ? thread / warp_size : thread, did, site.file, site.line);
}

[[noreturn]] __attribute__((noinline, cold)) inline void report_race(size_t offset, size_t bytes, int thread, int earlier_site, bool pending,
                                                                       int later_site) {
  inside = 0;
  say("race on shared memory at offset %zu (%zu byte%s): ", offset, bytes, bytes == 1 ? "" : "s");
  if (pending) {
    say("thread %d copies to it since %s:%d and has not waited for that, ", thread, sites[earlier_site].file, sites[earlier_site].line);
  } else {
    say_deed(thread, sites[earlier_site]);
    say(", ");
  }
  say_deed(current, sites[later_site]);
  say("%s (block %u,%u,%u)", pending ? "" : ", no barrier between", blockIdx.x, blockIdx.y, blockIdx.z);
  abandon(status_runtime_error);
}

// One access of the running thread.
struct Touch {
  int warp, lane, site;
  bool writes;
  bool pending;     // the issue of an asynchronous copy
  bool lands;       // the end of one: its own pending write is no conflict
  bool whole_warp;  // the warp reads together: any lane's write is another thread's
};

// `count` cells of `bytes` bytes each from `cell` on, which begin at `offset` of shared memory.
struct Cells {
  size_t cell, count, offset, bytes;
};

inline void after_last_write(const Cells& cells, size_t i, const Touch& touch) {
  const LastWrite& last = last_writes[cells.cell + i];
  const size_t offset = cells.offset + i * cells.bytes;
  if (last.epoch < block_epoch) return;
  if (last.pending) report_race(offset, cells.bytes, last.thread, last.site, true, touch.site);
  const bool other = last.thread != touch.warp * warp_size + touch.lane || touch.whole_warp;
  if (other && last.epoch >= clocks[touch.warp].seen[last.thread / warp_size])
    report_race(offset, cells.bytes, last.thread, last.site, false, touch.site);
}

inline void read_cells(const Cells& cells, const Touch& touch) {
  const Clock& clock = clocks[touch.warp];
  const uint32_t own = clock.seen[touch.warp], least = clock.least;
  LastRead* const reads = last_reads + static_cast<size_t>(touch.warp) * cell_count + cells.cell;
  const uint16_t site = static_cast<uint16_t>(touch.site);
  const uint8_t lane = static_cast<uint8_t>(touch.lane);
  const LastRead alone = {epochs[touch.warp], site, site, lane, touch.whole_warp ? static_cast<uint8_t>(lane ^ 1) : lane};
  for (size_t i = 0; i < cells.count; ++i) {
    if (last_writes[cells.cell + i].epoch >= least) after_last_write(cells, i, touch);
    LastRead now = alone;
    if (reads[i].epoch >= own && !touch.whole_warp) {
      const bool repeated = reads[i].lane == lane;
      now.other = repeated ? reads[i].other : reads[i].lane;
      now.other_site = repeated ? reads[i].other_site : reads[i].site;
    }
    reads[i] = now;
  }
}

inline void after_last_reads(const Cells& cells, size_t i, const Touch& touch) {
  const uint32_t* const seen = clocks[touch.warp].seen;
  for (int v = 0; v < warp_count; ++v) {
    const LastRead& read = last_reads[static_cast<size_t>(v) * cell_count + cells.cell + i];
    if (read.epoch < seen[v]) continue;
    const bool own = v == touch.warp && read.lane == touch.lane;
    if (own && read.other == touch.lane) continue;
    const int lane = own ? read.other : read.lane;
    report_race(cells.offset + i * cells.bytes, cells.bytes, v * warp_size + lane, own ? read.other_site : read.site, false, touch.site);
  }
}

inline void write_cells(const Cells& cells, const Touch& touch) {
  LastWrite now;
  now.epoch = touch.pending ? pending_epoch : epochs[touch.warp];
  now.thread = static_cast<uint16_t>(touch.warp * warp_size + touch.lane) & 0x7fffu;
  now.pending = touch.pending;
  now.site = static_cast<uint16_t>(touch.site);
  for (size_t i = 0; i < cells.count; ++i) {
    LastWrite& last = last_writes[cells.cell + i];
    if (!touch.lands) {
      if (last.epoch >= clocks[touch.warp].least) after_last_write(cells, i, touch);
      after_last_reads(cells, i, touch);
    }
    last = now;
  }
}

inline void split_word(size_t word) {
  if (split_words[word] == block_epoch) return;
  split_words[word] = block_epoch;
  any_split = true;
  for (size_t byte = word_count + 4 * word; byte < word_count + 4 * word + 4; ++byte) {
    last_writes[byte] = last_writes[word];
    for (size_t v = 0; v < static_cast<size_t>(warp_count); ++v) last_reads[v * cell_count + byte] = last_reads[v * cell_count + word];
  }
}

// The block is over and a copy to there was not waited for.
inline void forget_pending(size_t offset, size_t bytes) {
  for (size_t at = offset; at < offset + bytes; ++at) last_writes[at / 4].epoch = last_writes[word_count + at].epoch = 0;
}

inline void touch_cells(const Cells& cells, const Touch& touch) {
  if (touch.writes) {
    write_cells(cells, touch);
  } else {
    read_cells(cells, touch);
  }
}

// `bytes` bytes of shared memory from `offset` on, inside of it.
inline void touch_shared(const Touch& touch, size_t offset, size_t bytes) {
  const bool words = offset % 4 == 0 && bytes % 4 == 0;
  if (words && !any_split) return touch_cells(Cells{offset / 4, bytes / 4, offset, 4}, touch);
  for (size_t at = offset; at < offset + bytes;) {
    if (!words) split_word(at / 4);
    const bool split = split_words[at / 4] == block_epoch;
    touch_cells(split ? Cells{word_count + at, 1, at, 1} : Cells{at / 4, 1, at, 4}, touch);
    at += split ? 1 : 4;
  }
}
#endif  // CUKILN_RUNTIME

}  // namespace cpu
}  // namespace cukiln
