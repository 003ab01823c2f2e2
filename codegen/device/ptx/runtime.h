// The bodies of machine.h that are compiled once for all kernels.
#pragma once

#include "machine.h"
#include "../cpu/matrix.h"

#if defined(CUKILN_RUNTIME)
namespace cukiln {
namespace ptx {

void refuse(int line, const char* file, const char* format, ...) {
  cpu::inside = 0;
  cpu::say("%s:%d: ", file, line);
  const size_t used = strlen(cpu::report.message);
  va_list values;
  va_start(values, format);
  vsnprintf(cpu::report.message + used, sizeof(cpu::report.message) - used, format, values);
  va_end(values);
  cpu::say_where();
  cpu::abandon(cpu::status_runtime_error);
}

void check_threads(int most) {
  if (thread_count > most) refuse(0, "kernel.ptx", "a launch of %d threads, .maxntid allows %d", thread_count, most);
}

static void check_mask(uint32_t mask, int line, const char* file) {
  if (mask != whole_warp) refuse(line, file, "a mask of members 0x%08x; all lanes take part here", mask);
}

// "shfl.sync": bits 4 to 0 of `clamp` bound the source, bits 12 to 8 say which lanes form a segment.
struct ShuffleWarp {
  static constexpr const char* name = "shfl.sync";
  struct Lane {
    Shuffling mode;
    uint32_t value, lane, clamp;
    Shuffled result;
  };
  static void run(const cpu::Lanes<Lane>& lanes) {
    Shuffled results[warp_size];
    for (int i = 0; i < warp_size; ++i) {
      const Lane& own = lanes[i];
      const int operand = static_cast<int>(own.lane & 31), clamp = static_cast<int>(own.clamp & 31), segment = static_cast<int>(own.clamp >> 8 & 31);
      const int last = (i & segment) | (clamp & ~segment & 31), first = i & segment;
      int source = i;
      bool inside = false;
      switch (own.mode) {
        case Shuffle_up: source = i - operand; inside = source >= last; break;
        case Shuffle_down: source = i + operand; inside = source <= last; break;
        case Shuffle_bfly: source = i ^ operand; inside = source <= last; break;
        case Shuffle_idx: source = first | (operand & ~segment & 31); inside = source <= last; break;
      }
      results[i] = {lanes[inside ? source : i].value, inside};
    }
    for (int i = 0; i < warp_size; ++i) lanes[i].result = results[i];
  }
};

Shuffled shuffle_in_warp(Shuffling mode, uint32_t value, uint32_t lane, uint32_t clamp, uint32_t mask, int line, const char* file) {
  check_mask(mask, line, file);
  ShuffleWarp::Lane own = {mode, value, lane, clamp, {0, false}};
  cpu::collective<ShuffleWarp>(own, line, file);
  return own.result;
}

uint32_t ballot(bool value, uint32_t mask, int line, const char* file) {
  check_mask(mask, line, file);
  return cpu::vote<cpu::ballot_name>(value, line, file);
}

void warp_barrier(uint32_t mask, int line, const char* file) {
  check_mask(mask, line, file);
  cukiln::warp_barrier(line, file);
}

template <int N, bool transposed>
static void load_matrices(uint64_t address, unsigned* out, int line, const char* file) {
  typename cpu::LoadMatrix<N, transposed>::Lane lane = {shared_pointer(address), out};
  cpu::collective<cpu::LoadMatrix<N, transposed>>(lane, line, file);
}
void load_matrix(int count, bool transposed, uint64_t address, unsigned* out, int line, const char* file) {
  if (count == 1) return transposed ? load_matrices<1, true>(address, out, line, file) : load_matrices<1, false>(address, out, line, file);
  if (count == 2) return transposed ? load_matrices<2, true>(address, out, line, file) : load_matrices<2, false>(address, out, line, file);
  return transposed ? load_matrices<4, true>(address, out, line, file) : load_matrices<4, false>(address, out, line, file);
}

// Registers of d hold the bits of floats.
template <const char* primitive, class Type, int K>
static void multiply_floats(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file) {
  float sums[4];
  memcpy(sums, d, sizeof(sums));
  cpu::multiply_accumulate<primitive, Type, K>(sums, a, b, line, file);
  memcpy(d, sums, sizeof(sums));
}
void mma_f16(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file) {
  multiply_floats<cpu::m16n8k16_f16, cpu::Halves, 16>(d, a, b, line, file);
}
void mma_bf16(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file) {
  multiply_floats<cpu::m16n8k16_bf16, cpu::BFloats, 16>(d, a, b, line, file);
}
void mma_f16_k8(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file) {
  multiply_floats<cpu::m16n8k8_f16, cpu::Halves, 8>(d, a, b, line, file);
}
void mma_tf32(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file) {
  multiply_floats<cpu::m16n8k8_tf32, cpu::TensorFloats, 8>(d, a, b, line, file);
}
void mma_f16_f16(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file) {
  cpu::MultiplyAccumulateHalf::Lane lane = {d, a, b};
  cpu::collective<cpu::MultiplyAccumulateHalf>(lane, line, file);
}
void mma_s8(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file) {
  cpu::multiply_accumulate<cpu::m16n8k32_s8, cpu::SignedBytes, 32>(d, a, b, line, file);
}
void mma_u8(unsigned* d, const unsigned* a, const unsigned* b, int line, const char* file) {
  cpu::multiply_accumulate<cpu::m16n8k32_u8, cpu::UnsignedBytes, 32>(d, a, b, line, file);
}

}  // namespace ptx
}  // namespace cukiln

// How the runs to come round: see `approximation` and `fuse`.
CUKILN_CPU_EXPORT void cukiln_ptx_rounding(int approximation, int fuse) {
  cukiln::ptx::approximation = approximation;
  cukiln::ptx::fuse = fuse != 0;
}
#endif  // CUKILN_RUNTIME
