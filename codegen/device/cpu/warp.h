// The shuffles, votes and additions of warp.cuh in plain C++.
#pragma once

#include "emulation.h"

namespace cukiln {
namespace cpu {

// Which lane's value a lane gets; `operand` counts modulo 32 (PTX ISA, "shfl.sync": bits 4 to 0 of b).
struct FromIndex {
  static constexpr const char* name = "shuffle_idx";
  static int source(int, int operand) { return operand; }
};
struct FromBelow {
  static constexpr const char* name = "shuffle_up";
  static int source(int lane, int operand) { return lane < operand ? lane : lane - operand; }
};
struct FromAbove {
  static constexpr const char* name = "shuffle_down";
  static int source(int lane, int operand) { return lane + operand < warp_size ? lane + operand : lane; }
};
struct FromXor {
  static constexpr const char* name = "shuffle_xor";
  static int source(int lane, int operand) { return lane ^ operand; }
};

template <class Source>
struct Shuffle {
  static constexpr const char* name = Source::name;
  struct Lane {
    unsigned value;
    int operand;
    unsigned result;
  };
  static void run(const Lanes<Lane>& lanes) {
    for (int i = 0; i < warp_size; ++i)
      lanes[i].result = lanes[Source::source(i, static_cast<int>(static_cast<unsigned>(lanes[i].operand) % warp_size))].value;
  }
};

template <class Source, class T>
CUKILN_INLINE T shuffle(T value, int operand, int line, const char* file) {
  static_assert(sizeof(T) == 4, "a register has 4 bytes");
  typename Shuffle<Source>::Lane lane = {0, operand, 0};
  memcpy(&lane.value, &value, sizeof(value));
  collective<Shuffle<Source>>(lane, line, file);
  memcpy(&value, &lane.result, sizeof(value));
  return value;
}

inline constexpr char any_name[] = "vote_any";
inline constexpr char all_name[] = "vote_all";
inline constexpr char ballot_name[] = "vote_ballot";

template <const char* primitive>
struct Vote {
  static constexpr const char* name = primitive;
  struct Lane {
    bool value;
    unsigned ballot;
  };
  static void run(const Lanes<Lane>& lanes) {
    unsigned ballot = 0;
    for (int i = 0; i < warp_size; ++i) ballot |= static_cast<unsigned>(lanes[i].value) << i;
    for (int i = 0; i < warp_size; ++i) lanes[i].ballot = ballot;
  }
};

template <const char* primitive>
CUKILN_INLINE unsigned vote(bool value, int line, const char* file) {
  typename Vote<primitive>::Lane lane = {value, 0};
  collective<Vote<primitive>>(lane, line, file);
  return lane.ballot;
}

// As red.global.add.f32 treats its operands and its result: subnormals become zeros of their sign.
inline float without_subnormals(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }

}  // namespace cpu

template <class T>
CUKILN_INLINE T shuffle_idx(T value, int lane, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  return cpu::shuffle<cpu::FromIndex>(value, lane, line, file);
}
template <class T>
CUKILN_INLINE T shuffle_up(T value, int delta, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  return cpu::shuffle<cpu::FromBelow>(value, delta, line, file);
}
template <class T>
CUKILN_INLINE T shuffle_down(T value, int delta, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  return cpu::shuffle<cpu::FromAbove>(value, delta, line, file);
}
template <class T>
CUKILN_INLINE T shuffle_xor(T value, int mask, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  return cpu::shuffle<cpu::FromXor>(value, mask, line, file);
}

CUKILN_INLINE bool vote_any(bool value, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  return cpu::vote<cpu::any_name>(value, line, file) != 0;
}
CUKILN_INLINE bool vote_all(bool value, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  return cpu::vote<cpu::all_name>(value, line, file) == cpu::whole_warp;
}
CUKILN_INLINE unsigned vote_ballot(bool value, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  return cpu::vote<cpu::ballot_name>(value, line, file);
}

inline void atomic_add(float* target, float value, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  cpu::check_global(cpu::Global::write, target, sizeof(float), line, file);
  *target = cpu::without_subnormals(cpu::without_subnormals(*target) + cpu::without_subnormals(value));
}
inline void atomic_add(int* target, int value, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  cpu::check_global(cpu::Global::write, target, sizeof(int), line, file);
  *target = static_cast<int>(static_cast<unsigned>(*target) + static_cast<unsigned>(value));
}

}  // namespace cukiln
