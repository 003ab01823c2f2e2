// Barriers of a warp and of some warps of a block.
#pragma once

#include "collective.h"

namespace cukiln {
namespace cpu {

struct WarpBarrier {
  static constexpr const char* name = "warp_barrier";
  struct Lane {};
  static void run(const Lanes<Lane>&) {
    if (watching) join_lanes(current / warp_size);
  }
};

constexpr int named_barrier_count = 16;  // PTX ISA, "bar": 0 to 15, and 0 is that of __syncthreads()

// One phase of a barrier: from the first warp that comes to it until as many threads as expected have come.
struct NamedBarrier {
  int expected, arrived;
  uint32_t came, waiting;  // sets of warps
  int line;                // of the first one that came
  const char* file;
  Clock clock;
};
inline NamedBarrier named_barriers[named_barrier_count];

#if defined(CUKILN_RUNTIME)
inline void forget_named_barriers() { memset(named_barriers, 0, sizeof(named_barriers)); }
#endif  // CUKILN_RUNTIME

struct BarrierLane {
  int id, threads;
};

void check_named_barrier(const Lanes<BarrierLane>& lanes);
void release_named_barrier(NamedBarrier& barrier);

#if defined(CUKILN_RUNTIME)
void check_named_barrier(const Lanes<BarrierLane>& lanes) {
  const BarrierLane& first = lanes[0];
  for (int i = 1; i < warp_size; ++i)
    if (lanes[i].id != first.id || lanes[i].threads != first.threads)
      refuse_collective("lane %d comes to barrier %d of %d threads, lane 0 to barrier %d of %d", i, lanes[i].id, lanes[i].threads, first.id,
                        first.threads);
  if (first.id < 1 || first.id >= named_barrier_count)
    refuse_collective("there is no barrier %d; 1 to %d are allowed (0 is that of __syncthreads)", first.id, named_barrier_count - 1);
  if (first.threads < warp_size || first.threads % warp_size || first.threads > thread_count)
    refuse_collective("a barrier of %d threads; a multiple of %d up to the block's %d is allowed", first.threads, warp_size, thread_count);
}

void release_named_barrier(NamedBarrier& barrier) {
  for (int w = 0; w < warp_count; ++w) {
    if (!(barrier.waiting >> w & 1)) continue;
    warps[w].ready = whole_warp;
    if (watching) acquire_clock(w, barrier.clock);
  }
  barrier = NamedBarrier{};
}
#endif  // CUKILN_RUNTIME

template <bool waits>
struct ComeToBarrier {
  static constexpr const char* name = waits ? "named_barrier" : "named_barrier_arrive";
  using Lane = BarrierLane;
  static void run(const Lanes<Lane>& lanes) {
    check_named_barrier(lanes);
    const int id = lanes[0].id, count = lanes[0].threads, w = current / warp_size;
    NamedBarrier& barrier = named_barriers[id];
    if (barrier.arrived == 0) {
      barrier.expected = count;
      barrier.line = threads[current].line;
      barrier.file = threads[current].file;
    }
    if (barrier.expected != count)
      refuse_collective("barrier %d of %d threads, but at %s:%d it is one of %d", id, count, barrier.file, barrier.line, barrier.expected);
    if (barrier.came >> w & 1)
      refuse_collective("warp %d comes to barrier %d again before the %d threads that are expected have come", w, id, count);
    barrier.came |= 1u << w;
    barrier.arrived += warp_size;
    if (watching) release_clock(w, barrier.clock);
    if (waits) {
      barrier.waiting |= 1u << w;
      warps[w].ready = 0;
      for (int i = 0; i < warp_size; ++i) threads[warps[w].first + i].state = State::at_named_barrier;
    }
    if (barrier.arrived == count) release_named_barrier(barrier);
  }
};

#if defined(CUKILN_RUNTIME)
// At the end of a sweep in which nothing could go on: says for what the waiting warps still wait.
inline void say_named_barriers() {
  for (int id = 1; id < named_barrier_count; ++id)
    if (named_barriers[id].waiting)
      say("; barrier %d: %d of %d threads have come", id, named_barriers[id].arrived, named_barriers[id].expected);
}
#endif  // CUKILN_RUNTIME

}  // namespace cpu

CUKILN_INLINE void warp_barrier(int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  cpu::WarpBarrier::Lane lane;
  cpu::collective<cpu::WarpBarrier>(lane, line, file);
}

CUKILN_INLINE void named_barrier(int id, int threads, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  cpu::BarrierLane lane = {id, threads};
  cpu::collective<cpu::ComeToBarrier<true>>(lane, line, file);
}

CUKILN_INLINE void named_barrier_arrive(int id, int threads, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
  cpu::BarrierLane lane = {id, threads};
  cpu::collective<cpu::ComeToBarrier<false>>(lane, line, file);
}

}  // namespace cukiln
