// The gradient of the image as convolutions of the output's gradient, one for each phase.
//
// dx[h] is a sum over the taps r of which h + padding - r dilation is a multiple of the stride: that quotient is the row of
// dy. So the rows of dx that are equal modulo the stride, a phase, have their taps in common: every (stride / gcd(stride,
// dilation))th of the filter, from the first one that fits. Their rows of dy lie dilation / gcd apart, and go up as the taps
// go down. Beginning with its last tap, a phase is a convolution of dy: with stride 1, this distance as its dilation, and
// channels of dx for filters. The same holds for columns; a phase is a pair of residues. What no tap fits is zero.
#pragma once

namespace cukiln {
namespace conv2d_dgrad {

using Taps = conv::Taps;

// One axis: h or w.
struct Along {
  int extent, taps;  // of dx, of the filter
  int stride, padding, dilation;
  int padded;      // dx with the padding before and behind it; `padding` is that before it
  int phases;      // residues of the stride that dx has
  int tap_step;    // from one tap of a phase to its next
  int pixel_step;  // from their one row of dy to the other
};

struct Arguments {
  // The implicit product (gemm/tile.cuh), of phases the largest. Channels last: a is dy, b the filters, a matrix for each
  // group. Channels first: a is the filters, b is dy, a matrix for each image and group. Then those of the next phase.
  const void* a;
  const void* b;
  void* out;
  void* workspace;
  int batch, m, n, k;
  int64_t lda, ldb, ldc;                 // where the product is of stored matrices; ldc also without phases
  int64_t stride_a, stride_b, stride_c;  // from the matrix of one group, or image and group, to the next; of filters of a group
  int raster, slices, stream_blocks;     // see gemm/tile.cuh
  EpilogueArguments epilogue;

  // As a convolution: of images that are dy, by as many filters as dx has channels.
  int images, height, width, filters, groups, channels;  // channels of a group
  int image_pitch, row_pitch, pixel_pitch, channel_pitch;  // elements of dy from one to the next
  int weight_pitch, weight_column, weight_row, weight_channel;  // of w: from one channel of dy, column, row, channel of dx
  Along h, w;
  conv::winograd::Layer layer;  // of Winograd

#if defined(CUKILN_DEVICE)
  __device__ __forceinline__ int group_of(int matrix) const { return matrix % groups; }
  __device__ __forceinline__ Position position(int matrix, int row, int column) const {
    return Position{0, 0, matrix * stride_c + row * ldc + column};
  }
#endif
};

#if defined(CUKILN_DEVICE)

// Where an axis has the first pixel of its phase with that number. Phases are numbered by falling numbers of taps, as their
// blocks start: a long one that started last would run alone. Phase t < tap_step begins with tap t of the filter, if it has as
// many; those from tap_step on have none. An axis shorter than the stride lacks residues: its phases are not ordered.
__device__ __forceinline__ int first_pixel(const Along& along, int number) {
  if (along.phases < along.stride) return number;
  const int64_t tap = number % along.tap_step, behind = number / along.tap_step;
  const int rest = static_cast<int>((tap * along.dilation + behind - along.padding) % along.stride);
  return rest < 0 ? rest + along.stride : rest;
}

// What of an axis belongs to a phase.
struct Part {
  int extent, taps;
  int last;     // the last tap of the filter
  int padding;  // rows of dy above the first one that is seen
};

template <bool strided>
__device__ __forceinline__ Part part_of(const Along& along, int phase) {
  if (!strided) return Part{along.extent, along.taps, along.taps - 1, (along.taps - 1) * along.dilation - along.padding};
  const int end = gemm::smaller(along.taps, along.tap_step);
  int first = 0;
  while (first < end && (phase + along.padding - first * along.dilation) % along.stride != 0) ++first;
  const int taps = first < end ? (along.taps - 1 - first) / along.tap_step + 1 : 0;
  const int last = first + (taps - 1) * along.tap_step;
  return Part{(along.extent - 1 - phase) / along.stride + 1, taps, last,
              (last * along.dilation - along.padding - phase) / along.stride};
}

// Whether channels are the inner digit of a tap: where they are last, and of limbs that are split ahead.
template <class C> constexpr bool channels_inner = C::channels_last || gemm::splits_ahead<C>;

// From one of a thread's taps to its next, of dy and of the filters: of a step of the product or of its next vector.
template <class C>
__device__ __forceinline__ constexpr int taps_of_step() {
  if constexpr (C::direct) {
    return 1;
  } else {
    return channels_inner<C> ? C::tile_k : C::threads / C::tile_n;
  }
}

template <class C>
__device__ __forceinline__ constexpr int weights_of_step() {
  if constexpr (C::direct) {
    return 1;
  } else if constexpr (gemm::splits_ahead<C>) {
    return C::tile_k;
  } else {
    return C::channels_last ? gemm::smaller(C::threads * C::align_b / C::tile_n, C::tile_k) : C::tile_k;
  }
}

// A phase as the convolution that it is, as conv/gather.cuh and conv/direct.cuh want it.
template <class C>
struct Phase : Arguments {
  static constexpr int stride_h = 1, stride_w = 1;
  int out_height, out_width, padding_h, padding_w, dilation_h, dilation_w;
  int radix_inner, radix_middle;
  Taps step, weight_step;
  int first_h, first_w;  // of dx
  int last_weight;       // where w has the last tap

  __device__ __forceinline__ Phase(const Arguments& given, int number) : Arguments(given) {
    first_h = C::strided ? first_pixel(given.h, number / given.w.phases) : 0;
    first_w = C::strided ? first_pixel(given.w, number % given.w.phases) : 0;
    const Part of_h = part_of<C::strided>(given.h, first_h), of_w = part_of<C::strided>(given.w, first_w);
    out_height = of_h.extent;
    out_width = of_w.extent;
    padding_h = of_h.padding;
    padding_w = of_w.padding;
    dilation_h = given.h.pixel_step;
    dilation_w = given.w.pixel_step;
    last_weight = of_h.last * weight_row + of_w.last * weight_column;
    if constexpr (C::strided) {
      const int pixels = out_height * out_width;
      if constexpr (C::channels_last || C::direct) {
        m = images * pixels;
      } else {
        n = pixels;
      }
      k = of_h.taps * of_w.taps * channels_of_tap();
    }
    radix_inner = channels_inner<C> ? channels_of_tap() : of_w.taps;
    radix_middle = channels_inner<C> ? of_w.taps : of_h.taps;
    if (k > 0) {
      step = conv::taps_of(*this, taps_of_step<C>());
      weight_step = conv::taps_of(*this, weights_of_step<C>());
    }
  }

  // Of a group.
  __device__ __forceinline__ int channels_of_tap() const {
    if constexpr (gemm::splits_ahead<C>) return static_cast<int>(gemm::plane_pitch(channels));
    return channels;
  }

  // Where w has a tap of a channel of dy: elements from its last one. A phase counts them from there.
  __device__ __forceinline__ int weight_of(const Taps& at) const {
    const int r = channels_inner<C> ? at.outer : at.middle, s = channels_inner<C> ? at.middle : at.inner;
    const int channel = channels_inner<C> ? at.inner : at.outer;
    return channel * weight_pitch - r * h.tap_step * weight_row - s * w.tap_step * weight_column;
  }

  // Where dx has a pixel of the phase, `pixel` counting those of all images.
  __device__ __forceinline__ int64_t pixel_of(int pixel) const {
    const int per_image = out_height * out_width, image = pixel / per_image, within = pixel - image * per_image;
    const int row = within / out_width, column = within - row * out_width;
    const int64_t of_image = int64_t(first_h + row * h.stride) * w.extent + first_w + column * w.stride;
    const int64_t before = int64_t(image) * h.extent * w.extent;  // pixels of other images
    return C::channels_last ? (before + of_image) * filters : before * filters + of_image;
  }

  __device__ __forceinline__ Position position(int matrix, int row, int column) const {
    if constexpr (!C::strided) return Arguments::position(matrix, row, column);
    if constexpr (C::channels_last) return Position{0, 0, pixel_of(row) + matrix * stride_c + column};
    return Position{0, 0, matrix * stride_c + row * ldc + pixel_of(column)};
  }

  // What conv/direct.cuh asks.
  template <bool channels_last>
  __device__ __forceinline__ int64_t weight(int filter, int first, int tap) const {
    const int group = filter / (filters / groups), channel = filter - group * (filters / groups);
    return group * stride_b + last_weight + channel * weight_channel + weight_of(conv::taps_of(*this, first + tap));
  }
  template <bool channels_last>
  __device__ __forceinline__ conv::direct::Output output(int pixel) const {
    return {pixel_of(pixel), h.extent * w.extent};
  }
};

#endif  // CUKILN_DEVICE

}  // namespace conv2d_dgrad
}  // namespace cukiln
