// The filters as an operand of a phase whose limbs are split ahead (conv/channel_planes.cuh).
#pragma once

namespace cukiln {
namespace conv2d_dgrad {

#if defined(CUKILN_DEVICE)

// The filters as rows of taps along channels of dy, one for each channel of dx: how limbs that are split ahead lie
// (conv/channel_planes.cuh), and where w has them.
template <class C>
struct TurnedFilters {
  using T = typename C::Input;
  const T* source;
  int groups, rows, taps, channels, vectors;  // rows, channels of dx, and channels of dy of a group

  static __device__ __forceinline__ TurnedFilters of_filters(const Arguments& a) {
    const int vectors = static_cast<int>(gemm::plane_pitch(a.channels)) / gemm::plane_vector;
    return TurnedFilters{static_cast<const T*>(C::channels_last ? a.b : a.a), a.groups, a.filters / a.groups,
                         a.h.taps * a.w.taps, a.channels, vectors};
  }

  __device__ __forceinline__ int64_t items() const { return int64_t(groups) * vectors * rows * taps; }
  __device__ __forceinline__ int64_t plane() const { return items() * gemm::plane_vector; }

  // Neighbouring items have neighbouring elements of w; those of an item are a filter apart.
  __device__ __forceinline__ void split(unsigned char* first, int64_t item) const {
    const int64_t filter = int64_t(rows) * taps, within = item % filter, outer = item / filter;
    const int64_t group = outer / vectors, vector = outer % vectors;
    const int64_t row = C::channels_last ? within % rows : within / taps, tap = C::channels_last ? within / rows : within % taps;
    const int begin = static_cast<int>(vector) * gemm::plane_vector;
    unsigned char* const to = first + (((group * rows + row) * taps + tap) * vectors + vector) * gemm::plane_vector;
    const T* const from = source + (group * channels + begin) * filter + within;
    gemm::split_vector<gemm::limbs_of<C>, 1>(from, filter, begin, channels, to, plane());
  }
};

namespace tensor {

// As an operand of a phase. All vectors of a thread are of 16 channels of one tap.
template <class C>
struct TapPlanes {
  using Channels = TurnedFilters<C>;
  static constexpr int tile_outer = C::channels_last ? C::tile_n : C::tile_m;
  using Tile = gemm::tensor::PlaneTile<C, tile_outer>;

  const Phase<C>& phase;
  const unsigned char* first;
  int64_t plane;
  int left;  // channels of dx from the tile's first
  Taps at;

  __device__ __forceinline__ TapPlanes(const Phase<C>& given, const gemm::Tile& tile, const Share& share,
                                       const unsigned char* planes, int64_t bytes)
      : phase(given), plane(bytes), at(conv::taps_of(given, share.first + Tile::k())) {
    const int row = (C::channels_last ? tile.column : tile.row) * tile_outer;
    const int of_group = C::channels_last ? given.n : given.m;
    left = of_group - row;
    const int64_t number = int64_t(given.group_of(tile.matrix)) * of_group + row;
    first = planes + number * given.weight_channel + given.last_weight;
  }

  __device__ __forceinline__ void start(char* tile, int k_left) {
    // Where a row has the thread's 16 channels of a tap; those of stored planes are as far from its beginning as in the tile.
    Tile::start(tile, first + phase.weight_of(at) - Tile::k(), phase.weight_channel, plane, left, k_left);
    conv::count(at, phase.weight_step, phase);
  }
};

// What brings tiles in.
template <class C, bool planes = gemm::splits_ahead<C>> struct FeedOf { using type = Feed<C>; };
template <class C> struct FeedOf<C, true> { using type = conv::tensor::PlaneFeed<C, TapPlanes<C>, Phase<C>>; };

}  // namespace tensor

#endif  // CUKILN_DEVICE

}  // namespace conv2d_dgrad
}  // namespace cukiln
