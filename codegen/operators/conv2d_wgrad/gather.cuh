// The operands of the gradient of the filters as an implicit product: sums over output pixels, those of all images.
//
//   dw[m, n] = sum over pixels l of dy[l, m] * x[where tap n meets the image at pixel l]
//
// m is a filter of the group, n a tap: a row r and a column s of the filter, and a channel c of the group, in the order in
// which dw has them. dy is A. With channels last it is stored as a matrix, pixel by pixel; with channels first as one for
// each image, filter by filter. The image is B: a row for each output pixel, a column for each tap, gathered on the way. A
// thread's vectors are all of one tap, each of a pixel of its own: nothing is divided in the main loop, pixels are counted
// like an odometer, whose digits move the place in the image.
#pragma once

namespace cukiln {
namespace conv2d_wgrad {

// How a place in the image moves from one output pixel of a thread to its next: by w and h; and where that is behind the end
// of a row of output pixels, or of an image of them, back to the begin of the next one. Offsets are elements of the image;
// sums of them may pass the ends of 32 bits on the way, and come back.
struct Walk {
  int step_w, step_h, row_w, row_h, image_h;
  unsigned step_offset, row_offset, image_offset;
};

struct Arguments {
  // The implicit product (gemm/tile.cuh), a matrix for each group; of a direct kernel one matrix of all filters.
  const void* a;  // dy
  const void* b;  // x
  void* out;
  void* workspace;
  int batch, m, n, k;
  int64_t lda, ldb, ldc;                 // of dy from one pixel (channels first: filter) to the next; of dw
  int64_t stride_a, stride_b, stride_c;  // from one group to the next
  int raster, slices, stream_blocks;     // see gemm/tile.cuh
  EpilogueArguments epilogue;

  int images, height, width, filters, filter_height, filter_width, out_height, out_width;
  int groups, channels;  // channels of a group
  int stride_h, stride_w, dilation_h, dilation_w;
  int padding_h, padding_w, padded_height, padded_width;  // before the image; with it and what is behind
  int image_pitch, row_pitch, pixel_pitch, channel_pitch;  // elements of the image from one to the next
  Walk walk;
  // Of dy with channels first, for a step of tile_k pixels: whole images and the pixels beyond them; and the elements by which
  // the next image's pixels are further away than if they followed.
  int step_images, step_within;
  int64_t between_images;

#if defined(CUKILN_DEVICE)
  __device__ __forceinline__ Position position(int matrix, int row, int column) const {
    return Position{matrix * m + row, column, matrix * stride_c + row * ldc + column};
  }
#endif
};

#if defined(CUKILN_DEVICE)

using Share = gemm::Share;
using Tile = gemm::Tile;

// A tap as distances from the corner of a window.
struct Tap {
  int h, w;
  unsigned offset;
};

template <bool channels_last>
__device__ __forceinline__ Tap tap_of(const Arguments& arguments, int column) {
  const int inner = channels_last ? arguments.channels : arguments.filter_width;
  const int middle = channels_last ? arguments.filter_width : arguments.filter_height;
  const int rest = column / inner, first = column - rest * inner, third = rest / middle, second = rest - third * middle;
  const int h = (channels_last ? third : second) * arguments.dilation_h, w = (channels_last ? second : first) * arguments.dilation_w;
  const unsigned offset = unsigned(channels_last ? first : third) * arguments.channel_pitch + unsigned(h) * arguments.row_pitch +
      unsigned(w) * arguments.pixel_pitch;
  return Tap{h, w, offset};
}

// Whether the image has an element there, or only its padding. Here and below `&`, not `&&`: nvcc makes branches of the
// latter, one for each vector.
__device__ __forceinline__ bool inside(const Arguments& arguments, int h, int w) {
  const bool row_exists = (h >= 0) & in_bounds(h, arguments.height);  // bounds: gather row
  const bool column_exists = (w >= 0) & in_bounds(w, arguments.width);  // bounds: gather column
  return row_exists & column_exists;
}

// Where a tap meets the image at one output pixel of a thread after the other; in its padding `offset` means nothing.
struct Place {
  int h, w, end_h, end_w;  // ends: of the tap's rows and columns in the windows of an image
  unsigned offset;

  __device__ __forceinline__ Place(const Arguments& arguments, const Tap& tap, int pixel) {
    const int per_image = arguments.out_height * arguments.out_width;
    const int image = pixel / per_image, within = pixel - image * per_image;
    const int p = within / arguments.out_width, q = within - p * arguments.out_width;
    const int corner_h = p * arguments.stride_h - arguments.padding_h, corner_w = q * arguments.stride_w - arguments.padding_w;
    h = corner_h + tap.h;
    w = corner_w + tap.w;
    end_h = tap.h - arguments.padding_h + arguments.walk.image_h;
    end_w = tap.w - arguments.padding_w + arguments.walk.row_w;
    offset = tap.offset + unsigned(image) * arguments.image_pitch + unsigned(corner_h) * arguments.row_pitch +
        unsigned(corner_w) * arguments.pixel_pitch;
  }

  __device__ __forceinline__ void next(const Walk& walk) {
    w += walk.step_w;
    h += walk.step_h;
    offset += walk.step_offset;
    const bool over_row = w >= end_w;
    w -= over_row ? walk.row_w : 0;
    h += over_row ? walk.row_h : 0;
    offset += over_row ? walk.row_offset : 0;
    const bool over_image = h >= end_h;
    h -= over_image ? walk.image_h : 0;
    offset += over_image ? walk.image_offset : 0;
  }
};

// The image, as B.
template <class C>
struct Image {
  using T = typename C::Input;
  using V = gemm::Vectors<C, C::tile_k, C::tile_n, C::align_b>;
  static constexpr int tile_outer = C::tile_n, align = C::align_b;
  static constexpr bool gathered = true, along_k = false;
  static_assert(V::whole_rows && (V::even || V::per_thread == 1), "a thread's vectors of the image must be of one tap");

  const Arguments& arguments;
  const T* image;
  bool tap_exists;
  Place at;

  __device__ __forceinline__ Image(const Arguments& given, const Tile& tile, const Share& share)
      : arguments(given),
        image(static_cast<const T*>(given.b) + tile.matrix * given.stride_b),
        tap_exists(tile.column * C::tile_n + V::column(0) < given.n),  // sums of others are unused, but have no address
        at(given, tap_of<C::channels_last>(given, tile.column * C::tile_n + V::column(0)), share.first + V::row(0)) {}

  __device__ __forceinline__ const T* address(int) const { return image + static_cast<int>(at.offset); }
  __device__ __forceinline__ bool wanted(int i, int k_left) const {
    const bool pixel_exists = in_bounds(V::row(i), k_left);  // bounds: gather pixel
    return tap_exists & pixel_exists & inside(arguments, at.h, at.w);
  }
  __device__ __forceinline__ void next_vector() { at.next(arguments.walk); }
  __device__ __forceinline__ void next_step() {}
};

// Where dy has a pixel's filters, one step of tile_k pixels after the other.
template <class C>
struct GradientPixel {
  using T = typename C::Input;

  const T* at;  // the first filter of `of_filters`
  int within;   // the image; counted with channels first only

  __device__ __forceinline__ GradientPixel(const Arguments& arguments, const T* of_filters, int pixel) {
    if constexpr (C::channels_last) {
      at = of_filters + pixel * arguments.lda;
    } else {
      const int per_image = arguments.out_height * arguments.out_width, image = pixel / per_image;
      within = pixel - image * per_image;
      at = of_filters + pixel + image * arguments.between_images;
    }
  }

  __device__ __forceinline__ void next_step(const Arguments& arguments) {
    if constexpr (C::channels_last) {
      at += C::tile_k * arguments.lda;
    } else {
      const int per_image = arguments.out_height * arguments.out_width;
      within += arguments.step_within;
      const bool over = within >= per_image;
      within -= over ? per_image : 0;
      at += C::tile_k + (arguments.step_images + over) * arguments.between_images;
    }
  }
};

// dy, as A: with channels last a stored row runs along the filters, else along the pixels. Then all vectors of a thread are of
// the same pixels, and `first` is the tile's first element as if its rows were as far from there as they are at these.
template <class C>
struct Gradient {
  using T = typename C::Input;
  static constexpr int tile_outer = C::tile_m, align = C::align_a;
  static constexpr bool gathered = false, along_k = !C::channels_last;
  using V = gemm::Vectors<C, along_k ? C::tile_m : C::tile_k, along_k ? C::tile_k : C::tile_m, C::align_a>;
  static_assert(!along_k || V::whole_rows, "a thread's vectors of dy must be of the same pixels");

  const Arguments& arguments;
  int left;  // filters from the tile's first one on
  GradientPixel<C> pixel;

  __device__ __forceinline__ Gradient(const Arguments& given, const Tile& tile, const Share& share)
      : arguments(given),
        left(given.m - tile.row * C::tile_m),
        pixel(given, static_cast<const T*>(given.a) + tile.matrix * given.stride_a + tile.row * C::tile_m * (along_k ? given.lda : 1),
              share.first + (along_k ? V::column(0) : 0)) {}

  __device__ __forceinline__ const T* first() const { return pixel.at - (along_k ? V::column(0) : 0); }
  __device__ __forceinline__ int64_t pitch() const { return arguments.lda; }
  __device__ __forceinline__ void next_step() { pixel.next_step(arguments); }
};

namespace simt {
template <class C> using Feed = conv::simt::Feed<C, Gradient<C>, Image<C>, true>;
}
namespace tensor {
template <class C> using Feed = conv::tensor::Feed<C, Gradient<C>, Image<C>, true>;
}

#endif  // CUKILN_DEVICE

}  // namespace conv2d_wgrad
}  // namespace cukiln
