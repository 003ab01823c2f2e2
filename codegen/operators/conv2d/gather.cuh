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

  const T* first;  // of the tile
  int64_t pitch;
  int left;  // how many there are from there

  __device__ __forceinline__ Filters(const Arguments& arguments, const Tile& tile, const Share& share)
      : pitch(C::channels_last ? arguments.ldb : arguments.lda) {
    const int row = (C::channels_last ? tile.column : tile.row) * tile_outer;
    const int64_t stride = C::channels_last ? arguments.stride_b : arguments.stride_a;
    left = (C::channels_last ? arguments.n : arguments.m) - row;
    first = static_cast<const T*>(C::channels_last ? arguments.b : arguments.a) + arguments.group_of(tile.matrix) * stride +
        row * pitch + share.first;
  }

  __device__ __forceinline__ void next_step() { first += C::tile_k; }
};

namespace simt {

// The image and the filters for gemm::simt::run.
template <class C>
struct Feed {
  using ImageLoader = conv::simt::Loader<C, Image<C>>;
  using FilterLoader = gemm::simt::Loader<C, Filters<C>::tile_outer, false, Filters<C>::align>;
  using LoaderA = typename conv::Choose<C::channels_last, ImageLoader, FilterLoader>::type;
  using LoaderB = typename conv::Choose<C::channels_last, FilterLoader, ImageLoader>::type;

  Image<C> image;
  Filters<C> filters;

  __device__ __forceinline__ Feed(const Arguments& arguments, const Tile& tile, const Share& share)
      : image(arguments, tile, share), filters(arguments, tile, share) {}

  __device__ __forceinline__ void load(LoaderA& a, LoaderB& b, int k_left) {
    if constexpr (C::channels_last) {
      load_both(a, b, k_left);
    } else {
      load_both(b, a, k_left);
    }
  }

  __device__ __forceinline__ void load_both(ImageLoader& of_image, FilterLoader& of_filters, int k_left) {
    of_image.load(image, k_left);
    of_filters.load(filters.first, filters.pitch, filters.left, k_left);
  }

  __device__ __forceinline__ void advance() {
    image.next_step();
    filters.next_step();
  }
};

}  // namespace simt

namespace tensor {

// The image and the filters for gemm::tensor::run.
template <class C>
struct Feed {
  using ImageTile = conv::tensor::SharedTile<C, Image<C>>;
  using ImageCopier = conv::tensor::Copier<C, Image<C>>;
  using FilterTile = gemm::tensor::SharedTile<C, Filters<C>::tile_outer, true>;
  using FilterCopier = gemm::tensor::Copier<C, FilterTile, Filters<C>::tile_outer, true, Filters<C>::align>;
  using TileA = typename conv::Choose<C::channels_last, ImageTile, FilterTile>::type;
  using TileB = typename conv::Choose<C::channels_last, FilterTile, ImageTile>::type;
  static constexpr int stage_bytes = TileA::bytes + TileB::bytes;
  // Where the two lie in a stage.
  static constexpr int image_bytes = C::channels_last ? 0 : TileA::bytes, filter_bytes = C::channels_last ? TileA::bytes : 0;

  Image<C> image;
  Filters<C> filters;
  int k_left;
  ImageCopier image_copier;
  FilterCopier filter_copier;

  __device__ __forceinline__ Feed(const Arguments& arguments, const Tile& tile, const Share& share)
      : image(arguments, tile, share), filters(arguments, tile, share), k_left(share.end - share.first) {}

  __device__ __forceinline__ void advance() {
    image.next_step();
    filters.next_step();
    k_left -= C::tile_k;
  }

  // Every step commits a group, an empty one behind the end of k: so a wait can count steps.
  __device__ __forceinline__ void start(char* stage) {
    if (k_left > 0) {
      ImageCopier::start(stage + image_bytes, image, k_left);
      FilterCopier::start(stage + filter_bytes, filters.first, filters.pitch, filters.left, k_left);
      advance();
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void fetch() {
    image_copier.fetch(image, k_left);
    filter_copier.fetch(filters.first, filters.pitch, filters.left, k_left);
    advance();
  }

  __device__ __forceinline__ void deposit(char* stage) const {
    image_copier.deposit(stage + image_bytes);
    filter_copier.deposit(stage + filter_bytes);
  }
};

}  // namespace tensor

#endif  // CUKILN_DEVICE

}  // namespace conv2d
}  // namespace cukiln
