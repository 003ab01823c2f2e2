// Collectives: what a warp does together (mma, ldmatrix, shuffles, votes, warp_barrier). Each lane brings its arguments
// and waits; the last one carries the operation out for all 32 and then all go on.
//
// How to write the emulation of a warp-wide primitive:
//
//   struct ShuffleXor {
//     static constexpr const char* name = "shuffle_xor";  // what a person calls it: for messages
//     struct Lane {          // what one lane brings. It lives in that lane's frame until all go on, so it may hold
//       unsigned value;      // references and pointers to the caller's variables: inputs to read, outputs to write.
//       int mask;
//       unsigned result;
//     };
//     static void run(const Lanes<Lane>& lanes) {  // once per warp; lanes[i] is lane i's
//       for (int i = 0; i < warp_size; ++i) lanes[i].result = lanes[(i ^ lanes[i].mask) % warp_size].value;
//     }
//   };
//
//   CUKILN_INLINE unsigned shuffle_xor(unsigned value, int mask, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
//     ShuffleXor::Lane lane{value, mask, 0};
//     cpu::collective<ShuffleXor>(lane, line, file);
//     return lane.result;
//   }
//
// `run` reads every lane's input before it writes an output that another lane could still need as its input. Gather into
// local arrays, compute in plain loops over fixed bounds (g++ vectorises those), scatter. It is called on the stack of
// one of the lanes, with all other lanes stopped.
// An access that `run` makes for a lane (a row of ldmatrix) is refused as that lane's: `as_lane(i)` before refuse_shared.
// `refuse_collective("...")` ends the run with a message that names the primitive and its place.
//
// All 32 lanes must come to the same operation at the same place in the source: a lane that exited, that waits at a
// barrier or at another collective while others wait here ends the run with a report of where each lane is. The missing lanes
// of a block that is no multiple of 32 threads count as exited. A collective orders no memory accesses; warp_barrier does.
#pragma once

#include "watch.h"

namespace cukiln {
namespace cpu {

// What the 32 lanes of the running warp brought.
template <class Lane>
class Lanes {
 public:
  explicit Lanes(void* const* lanes) : lanes_(lanes) {}
  Lane& operator[](int lane) const { return *static_cast<Lane*>(lanes_[lane]); }

 private:
  void* const* lanes_;
};

// From here on accesses are checked and reported as this lane's.
inline void as_lane(int lane) { current = warp_of(current).first + lane; }

// A lane arrives at a collective; returns when `operation` has been carried out for all.
void meet(void (*operation)(void* const*), void* lane, const char* what, int line, const char* file);

#if defined(CUKILN_RUNTIME)
__attribute__((noinline)) void meet(void (*operation)(void* const*), void* lane, const char* what, int line, const char* file) {
  Warp& warp = warp_of(current);
  const int self = current;
  stop(State::meeting, line, file, what);
  if (warp.meeting == 0) {
    warp.operation = operation;
    warp.line = line;
    warp.file = file;
  } else if (warp.operation != operation || warp.line != line || !same_text(warp.file, file)) {
    warp.diverged = true;
  }
  warp.lanes[self % warp_size] = lane;
  warp.meeting |= lane_bit(self);
  // Where some lanes never come, no lane is ready in the end and the scheduler sees which are still in a meeting.
  if (warp.meeting == whole_warp && !warp.diverged) {
    if (watching) settle_instructions();
    warp.ready = whole_warp;
    operation(warp.lanes);  // may stop the warp again: a named barrier does
    warp.meeting = 0;
    current = self;  // `operation` may have spoken as another lane
    if (order == order_seeded) warp.backwards = random_state.below(2) == 1;
  }
  pass_on();
}
#endif  // CUKILN_RUNTIME

template <class Operation>
void perform(void* const* lanes) {
  Operation::run(Lanes<typename Operation::Lane>(lanes));
}

template <class Operation>
CUKILN_INLINE void collective(typename Operation::Lane& lane, int line, const char* file) {
  meet(perform<Operation>, &lane, Operation::name, line, file);
}

// Ends the run: the collective that is being carried out was called in a way that it cannot be.
[[noreturn]] __attribute__((cold, format(printf, 1, 2))) void refuse_collective(const char* format, ...);

#if defined(CUKILN_RUNTIME)
[[noreturn]] void refuse_collective(const char* format, ...) {
  inside = 0;
  const Thread& thread = threads[current];
  say("%s:%d: %s: ", thread.file, thread.line, thread.what);
  const size_t used = strlen(report.message);
  va_list values;
  va_start(values, format);
  vsnprintf(report.message + used, sizeof(report.message) - used, format, values);
  va_end(values);
  say_where();
  abandon(status_runtime_error);
}

// After a warp ran as far as it can: true when no lane of it waits for others of the same warp that never come.
inline bool met(const Warp& warp) {
  if (warp.meeting == 0) return true;
  const int end = warp.first + warp_size < thread_count ? warp.first + warp_size : thread_count;
  report.status = status_runtime_error;
  say("divergent collective in warp %d of block %u,%u,%u", warp.first / warp_size, blockIdx.x, blockIdx.y, blockIdx.z);
  say_threads(warp.first, end);
  if (end != warp.first + warp_size) say("; lanes %d-%d are not in this block of %d threads", end - warp.first, warp_size - 1, thread_count);
  return false;
}
#endif  // CUKILN_RUNTIME

}  // namespace cpu
}  // namespace cukiln
