// The gathered operand of an implicit product: where elements of the image belong that no buffer holds as a matrix.
//
// A column of k is a tap: a row r and a column s of the filter, and a channel c of the group. An image with channels last
// is A: a row for each output pixel, taps in the order (r, s, c), so that a vector of channels is one access. With channels
// first it is B: a column for each output pixel, taps in the order (c, r, s), one element at a time. Nothing is divided in
// the main loop: a thread keeps the corner of the filter's window at each of its pixels, and counts taps like an odometer.
//
// `Arguments` is an operator's own struct. Beside what gemm/tile.cuh reads it has the image (`a` with channels last, else
// `b`; stride_a, stride_b), its height and width, the pitches of it (image_pitch, row_pitch, pixel_pitch, channel_pitch: from
// one to the next, in elements), out_height and out_width, the geometry (stride_h, padding_h, dilation_h and those of w),
// the digits of a tap (radix_inner, radix_middle: with channels last channels and filter_width, else filter_width and
// filter_height) and `step`, from one tap of a thread to its next.
#pragma once

namespace cukiln {

#if defined(CUKILN_DEVICE)

// What is negative as int is beyond every extent as unsigned: one comparison for both ends.
__device__ __forceinline__ constexpr bool in_bounds(unsigned index, unsigned extent) { return index < extent; }

#endif  // CUKILN_DEVICE

namespace conv {

// A number of taps as digits of an odometer: inner digits turn over at `radix_inner` and `radix_middle`.
struct Taps {
  int inner, middle, outer;
};

#if defined(CUKILN_DEVICE)

// Where a filter's window begins at an output pixel: the corner may lie in the padding, `offset` is then not inside of the
// image. A pixel that does not exist has no tap inside.
struct Corner {
  int h, w, offset;
};

constexpr int nowhere = -2147483647 - 1;  // no number of rows down from here is inside

// Of the output pixel in row p and column q; `exists` says whether it is one.
template <class Arguments>
__device__ __forceinline__ Corner corner_at(const Arguments& arguments, int image, int p, int q, bool exists) {
  const int h = p * arguments.stride_h - arguments.padding_h, w = q * arguments.stride_w - arguments.padding_w;
  const int offset = image * arguments.image_pitch + h * arguments.row_pitch + w * arguments.pixel_pitch;
  return Corner{exists ? h : nowhere, w, offset};
}

// `pixel` counts those of all images.
template <class Arguments>
__device__ __forceinline__ Corner corner_of(const Arguments& arguments, int pixel, bool exists) {
  const int per_image = arguments.out_height * arguments.out_width;
  const int image = pixel / per_image, within = pixel - image * per_image;
  const int p = within / arguments.out_width, q = within - p * arguments.out_width;
  return corner_at(arguments, image, p, q, exists);
}

template <class Arguments>
__device__ __forceinline__ Taps taps_of(const Arguments& arguments, int k) {
  const int rest = k / arguments.radix_inner;
  return Taps{k - rest * arguments.radix_inner, rest % arguments.radix_middle, rest / arguments.radix_middle};
}

template <class Arguments>
__device__ __forceinline__ void count(Taps& at, const Taps& step, const Arguments& arguments) {
  at.inner += step.inner;
  const bool over_inner = at.inner >= arguments.radix_inner;
  at.inner -= over_inner ? arguments.radix_inner : 0;
  at.middle += step.middle + over_inner;
  const bool over_middle = at.middle >= arguments.radix_middle;
  at.middle -= over_middle ? arguments.radix_middle : 0;
  at.outer += step.outer + over_middle;
}

// A tap as distances from the corner of a window.
struct Tap {
  int h, w, offset;
};

template <bool channels_last, class Arguments>
__device__ __forceinline__ Tap tap_at(const Arguments& arguments, const Taps& at) {
  const int h = (channels_last ? at.outer : at.middle) * arguments.dilation_h;
  const int w = (channels_last ? at.middle : at.inner) * arguments.dilation_w;
  const int channel = channels_last ? at.inner : at.outer;
  // The axis that is last is packed.
  const int in_row = channels_last ? w * arguments.pixel_pitch + channel : w + channel * arguments.channel_pitch;
  return Tap{h, w, h * arguments.row_pitch + in_row};
}

// Whether the image has an element there, or only its padding. Here and below `&`, not `&&`: nvcc makes branches of the
// latter, one for each vector.
template <class Arguments>
__device__ __forceinline__ bool inside(const Arguments& arguments, const Corner& corner, const Tap& tap) {
  const unsigned h = static_cast<unsigned>(corner.h + tap.h), w = static_cast<unsigned>(corner.w + tap.w);
  const bool row_exists = in_bounds(h, static_cast<unsigned>(arguments.height));  // bounds: gather row
  const bool column_exists = in_bounds(w, static_cast<unsigned>(arguments.width));  // bounds: gather column
  return row_exists & column_exists;
}

// The image with channels last, as A: all vectors of a thread are of one tap, each of a pixel of its own.
template <class C, class Arguments>
struct RowsOfPixels {
  using T = typename C::Input;
  using V = gemm::Vectors<C, C::tile_m, C::tile_k, C::align_a>;
  static constexpr int tile_outer = C::tile_m, align = C::align_a;
  static constexpr bool gathered = true, along_k = true;
  static_assert(V::whole_rows, "a thread's vectors of the image must be of one tap");

  const Arguments& arguments;
  Taps at;
  Tap tap;
  // Where the tap lies of a window whose corner is the image's first element. It moves from step to step: of the sum of two
  // offsets nvcc would make an address anew for every vector, in five instructions.
  const T* first;
  Corner corners[V::per_thread];

  __device__ __forceinline__ RowsOfPixels(const Arguments& given, const gemm::Tile& tile, const gemm::Share& share)
      : arguments(given),
        at(taps_of(given, share.first + V::column(0))),
        tap(tap_at<true>(given, at)),
        first(static_cast<const T*>(given.a) + tile.matrix * given.stride_a + tap.offset) {
#pragma unroll
    for (int i = 0; i < V::per_thread; ++i) {
      const int pixel = tile.row * C::tile_m + V::row(i);
      const bool exists = in_bounds(pixel, arguments.m);  // bounds: gather pixel of a row
      corners[i] = corner_of(arguments, pixel, exists);
    }
  }

  __device__ __forceinline__ const T* address(int i) const { return first + corners[i].offset; }
  __device__ __forceinline__ bool wanted(int i, int k_left) const {
    const bool tap_exists = in_bounds(V::column(i), k_left);  // bounds: gather tap of a row
    return tap_exists & inside(arguments, corners[i], tap);
  }
  __device__ __forceinline__ void next_vector() {}
  __device__ __forceinline__ void next_step() {
    count(at, arguments.step, arguments);
    const Tap next = tap_at<true>(arguments, at);
    first += next.offset - tap.offset;
    tap = next;
  }
};

// The image with channels first, as B: all vectors of a thread are of one pixel, each of a tap of its own; after those of a
// step the next one begins.
template <class C, class Arguments>
struct ColumnsOfPixels {
  using T = typename C::Input;
  using V = gemm::Vectors<C, C::tile_k, C::tile_n, 1>;
  static constexpr int tile_outer = C::tile_n, align = 1;
  static constexpr bool gathered = true, along_k = false;
  static_assert(V::whole_rows && V::even, "a thread's vectors of the image must be of one pixel, in all steps alike");

  const Arguments& arguments;
  Taps at;
  Corner corner;
  const T* window;  // its corner

  __device__ __forceinline__ ColumnsOfPixels(const Arguments& given, const gemm::Tile& tile, const gemm::Share& share)
      : arguments(given), at(taps_of(given, share.first + V::row(0))) {
    const int pixel = tile.column * C::tile_n + V::column(0);
    const bool exists = in_bounds(pixel, arguments.n);  // bounds: gather pixel of a column
    corner = corner_of(arguments, pixel, exists);
    window = static_cast<const T*>(given.b) + tile.matrix * given.stride_b + corner.offset;
  }

  __device__ __forceinline__ const T* address(int) const { return window + tap_at<false>(arguments, at).offset; }
  __device__ __forceinline__ bool wanted(int i, int k_left) const {
    const bool tap_exists = in_bounds(V::row(i), k_left);  // bounds: gather tap of a column
    return tap_exists & inside(arguments, corner, tap_at<false>(arguments, at));
  }
  __device__ __forceinline__ void next_vector() { count(at, arguments.step, arguments); }
  __device__ __forceinline__ void next_step() {}
};

#endif  // CUKILN_DEVICE

}  // namespace conv
}  // namespace cukiln
