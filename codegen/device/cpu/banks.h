// Counts bank conflicts: how many wavefronts each access to shared memory takes, place by place.
//
// Shared memory has 32 banks of 4 bytes; successive words are in successive banks. A wavefront serves one word of every
// bank, to any number of lanes (CUDA C++ Programming Guide, "Shared Memory" of compute capability 5.x and later). Lanes
// that ask for wider words are served in parts: all 32 lanes at once for up to 4 bytes, half-warps for 8 and
// quarter-warps for 16 (the row addresses of ldmatrix: eight at once, a matrix). A part takes as many wavefronts as the
// most different words that it needs of one bank.
//
// Lanes run one after the other, so which of their accesses were one instruction has to be found out: the first that a
// lane makes at a place since its warp last met goes with the first of every other lane, and so on. Where some lanes skip
// an access in the middle of a loop, later ones go with those of the wrong turn until the warp meets again.
#pragma once

#include <stdlib.h>

#include "sites.h"

#if defined(CUKILN_RUNTIME)
namespace cukiln {
namespace cpu {

constexpr int banks = 32;

// One access of a warp: the lanes that take part, and where each goes.
struct Instruction {
  uint32_t lanes;
  uint32_t offsets[warp_size];
};

// An instruction that was counted before, its offsets from that of its first lane on.
struct Pattern {
  Instruction moved;
  uint32_t wavefronts, ideal;
};
constexpr int kept_patterns = 4;  // one line of a helper often serves two operands in turn

// What the lanes of the running warp did at one place since it last met: `offsets[lane * capacity + turn]`.
struct Visits {
  uint32_t* offsets;
  int capacity;
  int turns[warp_size];  // how often each lane came by
  bool open;
  Pattern patterns[kept_patterns];
  int next_pattern;
};

constexpr int max_turns = 4096;  // later ones of one place are not counted, so that an endless loop ends by its time
inline Visits visits[max_sites];
inline int open_sites[max_sites];
inline int open_count = 0;

inline void count_wavefronts(Pattern& pattern, int bytes) {
  const int together = bytes <= 4 ? warp_size : 4 * warp_size / bytes;
  const uint32_t words = bytes <= 4 ? 1 : static_cast<uint32_t>(bytes) / 4;
  pattern.wavefronts = pattern.ideal = 0;
  for (int first = 0; first < warp_size; first += together) {
    uint32_t asked[banks][warp_size];
    uint32_t counts[banks] = {};
    uint32_t most = 0;
    for (int i = first; i < first + together; ++i) {
      if (!(pattern.moved.lanes >> i & 1)) continue;
      for (uint32_t w = 0; w < words; ++w) {
        const uint32_t word = pattern.moved.offsets[i] / 4 + w, bank = word % banks;
        uint32_t known = 0;
        while (known < counts[bank] && asked[bank][known] != word) ++known;
        if (known < counts[bank]) continue;
        asked[bank][counts[bank]++] = word;
        if (counts[bank] > most) most = counts[bank];
      }
    }
    pattern.wavefronts += most;
    pattern.ideal += most > 0;
  }
}

inline bool same_instruction(const Instruction& a, const Instruction& b) {
  uint32_t different = a.lanes ^ b.lanes;
  for (int i = 0; i < warp_size; ++i) different |= a.offsets[i] ^ b.offsets[i];
  return different == 0;
}

// Loops repeat a pattern from another first address on; whole words apart it has the same conflicts.
inline void count_instruction(int site, const Instruction& instruction) {
  const uint32_t base = instruction.offsets[__builtin_ctz(instruction.lanes)] & ~3u;
  Instruction moved;
  moved.lanes = instruction.lanes;
  for (int i = 0; i < warp_size; ++i) moved.offsets[i] = (instruction.lanes >> i & 1) ? instruction.offsets[i] - base : 0;
  Visits& at = visits[site];
  const Pattern* found = nullptr;
  for (const Pattern& kept : at.patterns)
    if (same_instruction(kept.moved, moved)) found = &kept;
  if (!found) {
    Pattern& made = at.patterns[at.next_pattern++ % kept_patterns];
    made.moved = moved;
    count_wavefronts(made, sites[site].bytes);
    found = &made;
  }
  sites[site].wavefronts += found->wavefronts;
  sites[site].ideal += found->ideal;
  ++sites[site].warp_accesses;
}

// False: out of memory.
__attribute__((noinline, cold)) inline bool grow(Visits& at) {
  const int capacity = at.capacity ? 4 * at.capacity : 16;
  uint32_t* const grown = static_cast<uint32_t*>(malloc(sizeof(uint32_t) * warp_size * static_cast<size_t>(capacity)));
  if (!grown) return false;
  for (int lane = 0; lane < warp_size && at.offsets; ++lane)
    memcpy(grown + lane * capacity, at.offsets + lane * at.capacity, sizeof(uint32_t) * static_cast<size_t>(at.capacity));
  free(at.offsets);
  at.offsets = grown;
  at.capacity = capacity;
  return true;
}

// One lane's access. Allocates: see Undisturbed.
inline void count_lane(int site, int lane, uint32_t offset) {
  Visits& at = visits[site];
  const int turn = at.turns[lane];
  if (turn == at.capacity && (turn == max_turns || !grow(at))) return;
  if (!at.open) {
    at.open = true;
    open_sites[open_count++] = site;
  }
  at.offsets[lane * at.capacity + turn] = offset;
  ++at.turns[lane];
}

inline void settle_site(int site) {
  Visits& at = visits[site];
  for (int turn = 0;; ++turn) {
    Instruction instruction = {};
    for (int i = 0; i < warp_size; ++i) {
      if (at.turns[i] <= turn) continue;
      instruction.lanes |= 1u << i;
      instruction.offsets[i] = at.offsets[i * at.capacity + turn];
    }
    if (!instruction.lanes) break;
    count_instruction(site, instruction);
  }
  at.open = false;
  memset(at.turns, 0, sizeof(at.turns));
}

// The running warp meets or stops: what its lanes did so far belongs together.
inline void settle_instructions() {
  for (int i = 0; i < open_count; ++i) settle_site(open_sites[i]);
  open_count = 0;
}

// Before a watched run: another one may have ended in the middle, and its sites are others.
inline void forget_instructions() {
  for (int site = 0; site < site_count; ++site) {
    visits[site].open = false;
    memset(visits[site].turns, 0, sizeof(visits[site].turns));
    for (Pattern& pattern : visits[site].patterns) pattern.moved.lanes = 0;
  }
  open_count = 0;
}

}  // namespace cpu
}  // namespace cukiln
#endif  // CUKILN_RUNTIME
