// Depthwise with channels last, where the columns of the filters are known as `window`, stride_w is 1 and dilation_w is 1: the
// pixels of a thread are neighbours in a row of the output, a strip.
//
// Their windows overlap. Of every row of the filter a thread loads the `pixels` + `window` - 1 elements that its strip meets
// once, converts each once, and adds each to all the sums that it belongs to. At the end of a row a strip may have pixels that do
// not exist: what they read does, or is zero, and they are not written.
#pragma once

namespace cukiln {
namespace conv {
namespace direct {

#if defined(CUKILN_DEVICE)

template <class C, class Arguments>
struct Strip : Block<C, Arguments> {
  using B = Block<C, Arguments>;
  static constexpr int taps_at_once = C::window, columns = C::pixels + C::window - 1;
  static_assert(C::depthwise && C::channels_last, "an element of the image is of as many filters as a thread has");
  static_assert(C::window <= C::taps, "a row of the filters comes at once");

  const typename B::T* row;  // where the strip's first window has its first element
  Corner corner;
  int h = 0;  // from there to the row of the filter that is next
  int first, left;  // pixels: the first one, and how many there are from there to the end of its row

  __device__ __forceinline__ Strip(const Arguments& arguments, int place) : row(B::image(arguments)) {
    const int per_row = (arguments.out_width - 1) / C::pixels + 1, strip = place * B::threads_p + B::thread_p();
    const int out_row = strip / per_row, column = (strip - out_row * per_row) * C::pixels;
    const int image = out_row / arguments.out_height;
    const bool exists = in_bounds(out_row, arguments.images * arguments.out_height);  // bounds: strip
    corner = corner_at(arguments, image, out_row - image * arguments.out_height, column, exists);
    row += corner.offset;
    first = out_row * arguments.out_width + column;
    left = exists ? arguments.out_width - column : 0;
  }

  // Adds one row of the filter. All loads are on their way before a sum waits for one.
  __device__ __forceinline__ void add(const float* shared, const Arguments& arguments) {
    typename B::Held held[columns][C::filters / B::width_in];
#pragma unroll
    for (int x = 0; x < columns; ++x) {
      const bool exists = inside(arguments, corner, Tap{h, x, 0});
#pragma unroll
      for (int j = 0; j < C::filters; j += B::width_in)
        held[x][j / B::width_in] = B::load(row + x * arguments.pixel_pitch, j, exists, arguments);
    }
    float weights[C::window][C::filters];
#pragma unroll
    for (int s = 0; s < C::window; ++s) B::load_weights(weights[s], shared + s * B::pitch);
#pragma unroll
    for (int x = 0; x < columns; ++x)
#pragma unroll
      for (int j = 0; j < C::filters; ++j) {
        const float value = to_float(B::values_of(held[x][j / B::width_in]).data[j % B::width_in]);
#pragma unroll
        for (int s = 0; s < C::window; ++s)
          if (x >= s && x - s < C::pixels) this->sums[x - s][j] = fma(value, weights[s][j], this->sums[x - s][j]);
      }
    h += arguments.dilation_h;
    row += arguments.dilation_h * arguments.row_pitch;
  }

  __device__ __forceinline__ void write(const Arguments& arguments, int) const {
#pragma unroll
    for (int i = 0; i < C::pixels; ++i)
      if (in_bounds(i, left)) this->write_pixel(arguments, first + i, i);  // bounds: strip write pixel
  }
};

#endif  // CUKILN_DEVICE

}  // namespace direct
}  // namespace conv
}  // namespace cukiln
