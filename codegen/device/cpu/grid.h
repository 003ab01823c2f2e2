// Runs one block after the other, and in a block one warp after the other.
#pragma once

#include "async_copy.h"
#include "barriers.h"

#if defined(CUKILN_RUNTIME)
namespace cukiln {
namespace cpu {

inline void order_warps(int* found) {
  for (int i = 0; i < warp_count; ++i) found[i] = order == order_descending ? warp_count - 1 - i : i;
  if (order != order_seeded) return;
  for (int i = warp_count - 1; i > 0; --i) {
    const int other = static_cast<int>(random_state.below(static_cast<uint64_t>(i) + 1));
    const int kept = found[i];
    found[i] = found[other];
    found[other] = kept;
  }
}

inline uint32_t lanes_of(const Warp& warp) {
  const int lanes = thread_count - warp.first;
  return lanes >= warp_size ? whole_warp : (1u << lanes) - 1;
}

// After every thread ran as far as it could: true when all of them can go on from the block's barrier.
inline bool release_barrier() {
  bool together = true;
  for (int i = 1; i < thread_count; ++i) together = together && same_place(threads[0], threads[i]);
  if (together && threads[0].state == State::exited) return false;
  if (!together || threads[0].state == State::at_named_barrier) {
    report.status = status_runtime_error;
    say("divergent barrier in block %u,%u,%u", blockIdx.x, blockIdx.y, blockIdx.z);
    say_threads(0, thread_count);
    say_named_barriers();
    return false;
  }
  for (int i = 0; i < thread_count; ++i) threads[i].state = State::ready;
  for (int i = 0; i < warp_count; ++i) warps[i].ready = lanes_of(warps[i]);
  if (watching) join_clocks();
  return true;
}

inline bool run_over() {
  if (expired && report.status == status_ok) {
    report.status = status_run_timeout;
    say("still running after %.1f CPU seconds", limit_seconds);
    say_where();
  }
  return report.status != status_ok;
}

// Runs the warp until none of its lanes can go on.
inline void run_warp(Warp& warp) {
  // Lanes promise no order either: since Volta they are scheduled one by one.
  warp.backwards = order == order_descending || (order == order_seeded && random_state.below(2) == 1);
  current = next_thread(warp);
  threadIdx = threads[current].index;
  switch_to_fiber(current);
  if (watching) settle_instructions();
}

inline void prepare_block() {
  poison_shared();
  for (int i = 0; i < thread_count; ++i) {
    threads[i].state = State::ready;
    threads[i].file = nullptr;
    threads[i].what = nullptr;
  }
  warp_count = (thread_count + warp_size - 1) / warp_size;
  for (int i = 0; i < warp_count; ++i) {
    Warp& warp = warps[i];
    warp.first = i * warp_size;
    warp.ready = lanes_of(warp);
    warp.meeting = 0;
    warp.diverged = false;
  }
  forget_named_barriers();
  if (watching) start_clocks();
}

inline bool can_go_on() {
  for (int i = 0; i < warp_count; ++i)
    if (warps[i].ready) return true;
  return false;
}

// Runs the block `blockIdx`. False: the run has failed and `report` says why.
inline bool run_block() {
  prepare_block();
  int turns[max_warps];
  do {
    // More than once, because a warp that came to a named barrier may let others go on that had their turn.
    while (can_go_on()) {
      order_warps(turns);
      for (int i = 0; i < warp_count; ++i) {
        Warp& warp = warps[turns[i]];
        if (!warp.ready) continue;
        run_warp(warp);
        if (run_over() || !met(warp)) return false;
      }
    }
  } while (release_barrier());
  forget_copies();
  return report.status == status_ok;
}

inline uint64_t common_divisor(uint64_t a, uint64_t b) {
  while (b) {
    const uint64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// Sets up the block's threads. False: memory ran out, which is no verdict.
inline bool prepare_launch(const Launch& launch) {
  gridDim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  blockDim = {launch.block[0], launch.block[1], launch.block[2]};
  thread_count = static_cast<int>(launch.block[0] * launch.block[1] * launch.block[2]);
  if (!reserve_fibers(thread_count) || !reserve_shared(launch.shared_bytes) || !prepare_watch()) return false;
  for (; prepared < thread_count; ++prepared) prepare_fiber(prepared, thread_main);
  for (int i = 0; i < thread_count; ++i) {
    const unsigned at = static_cast<unsigned>(i);
    threads[i].index = {at % blockDim.x, at / blockDim.x % blockDim.y, at / blockDim.x / blockDim.y};
  }
  return true;
}

// Of each `of` blocks along x (0: of all of them) the last `count` alone run (0: all), for each y and z.
struct LastBlocks {
  uint64_t count, of;
};
inline LastBlocks last_blocks = {0, 0};

// Runs every block of the grid. The order of blocks follows that of the warps: nothing may depend on it either.
inline bool run_grid() {
  const uint64_t row = last_blocks.of ? last_blocks.of : gridDim.x;
  const uint64_t part = last_blocks.count && last_blocks.count < row ? last_blocks.count : row;
  const uint64_t across = gridDim.x / row * part, count = across * gridDim.y * gridDim.z;
  uint64_t step = 1, first = 0;
  if (order == order_seeded) {
    first = random_state.below(count);
    do step = 1 + random_state.below(count);
    while (common_divisor(step, count) != 1);
  }
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t block = order == order_descending ? count - 1 - i : (first + i * step) % count, x = block % across;
    blockIdx.x = static_cast<unsigned>((x / part + 1) * row - part + x % part);
    blockIdx.y = static_cast<unsigned>(block / across % gridDim.y);
    blockIdx.z = static_cast<unsigned>(block / across / gridDim.y);
    if (!run_block()) {
      prepared = 0;  // abandoned stacks start afresh
      forget_copies();
      return false;
    }
  }
  return true;
}

}  // namespace cpu
}  // namespace cukiln
#endif  // CUKILN_RUNTIME
