// The two operands of the implicit product: the image, which is gathered (conv/gather.cuh), and the filters, which are
// stored as a matrix.
#pragma once

namespace cukiln {
namespace conv2d {

using Taps = conv::Taps;

struct Arguments {
  // The implicit product (gemm/tile.cuh). Channels last: a is the image, b the filters, a matrix for each group. Channels
  // first: a is the filters, b the image, a matrix for each image and group.
  const void* a;
  const void* b;
  void* out;
  void* workspace;
  int batch, m, n, k;
  int64_t lda, ldb, ldc;                 // of what is stored as a matrix; of the image only where the filter is 1 x 1
  int64_t stride_a, stride_b, stride_c;  // from the matrix of one group to the next; of the image from one product to the next
  int raster, slices, stream_blocks;     // see gemm/tile.cuh
  EpilogueArguments epilogue;

  int images, height, width, filters, filter_height, filter_width, out_height, out_width;
  int groups, channels;  // channels of a group
  int stride_h, stride_w, dilation_h, dilation_w;
  int padding_h, padding_w, padded_height, padded_width;  // before the image; with it and what is behind
  int image_pitch, row_pitch, pixel_pitch, channel_pitch;  // elements of the image from one to the next
  int radix_inner, radix_middle;  // channels last: channels, filter_width; first: filter_width, filter_height
  Taps step;                      // from one tap of a thread to its next
  void* result;                   // where the last launch of a separate epilogue writes
  conv::winograd::Layer layer;    // of Winograd

#if defined(CUKILN_DEVICE)
  __device__ __forceinline__ int group_of(int matrix) const { return groups == batch ? matrix : matrix % groups; }
  __device__ __forceinline__ Position position(int matrix, int row, int column) const {
    const int first = group_of(matrix) * (filters / groups);
    // Channels last have a bias of the columns, channels first one of the rows: the other index is not looked at.
    return Position{first + row, first + column, matrix * stride_c + row * ldc + column};
  }

  // What conv/direct.cuh asks.
  template <bool channels_last>
  __device__ __forceinline__ int64_t weight(int filter, int first, int tap) const {
    return filter * ldb + first + tap;
  }
  template <bool channels_last>
  __device__ __forceinline__ conv::direct::Output output(int pixel) const {
    const int per_image = out_height * out_width, image = pixel / per_image;
    if (channels_last) return {int64_t(pixel) * filters, 1};
    return {int64_t(image) * filters * per_image + (pixel - image * per_image), per_image};
  }
#endif
};

#if defined(CUKILN_DEVICE)

using Share = gemm::Share;
using Tile = gemm::Tile;

template <class C>
using Image = typename conv::Choose<C::channels_last, conv::RowsOfPixels<C, Arguments>, conv::ColumnsOfPixels<C, Arguments>>::type;

// The filters, which both layouts store along k: B with channels last, else A.
template <class C>
struct Filters {
  using T = typename C::Input;
  static constexpr int tile_outer = C::channels_last ? C::tile_n : C::tile_m;
  static constexpr int align = C::channels_last ? C::align_b : C::align_a;
  static constexpr bool gathered = false, along_k = true;

  const T* at;  // the tile's first element
  int64_t filter_pitch;
  int left;  // how many filters there are from there

  __device__ __forceinline__ Filters(const Arguments& arguments, const Tile& tile, const Share& share)
      : filter_pitch(C::channels_last ? arguments.ldb : arguments.lda) {
    const int row = (C::channels_last ? tile.column : tile.row) * tile_outer;
    const int64_t stride = C::channels_last ? arguments.stride_b : arguments.stride_a;
    left = (C::channels_last ? arguments.n : arguments.m) - row;
    at = static_cast<const T*>(C::channels_last ? arguments.b : arguments.a) + arguments.group_of(tile.matrix) * stride +
        row * filter_pitch + share.first;
  }

  __device__ __forceinline__ const T* first() const { return at; }
  __device__ __forceinline__ int64_t pitch() const { return filter_pitch; }
  __device__ __forceinline__ void next_step() { at += C::tile_k; }
};

namespace simt {
template <class C> using Feed = conv::simt::Feed<C, Image<C>, Filters<C>, C::channels_last>;
}
namespace tensor {
template <class C> using Feed = conv::tensor::Feed<C, Image<C>, Filters<C>, C::channels_last>;
}

#endif  // CUKILN_DEVICE

}  // namespace conv2d
}  // namespace cukiln
