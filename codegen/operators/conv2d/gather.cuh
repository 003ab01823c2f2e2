// The gathered operand of an implicit product: where elements of the image belong that no buffer holds as a matrix.
//
// A column of k is a tap: a row r and a column s of the filter, and a channel c of the group. An image with channels last
// is A: a row for each output pixel, taps in the order (r, s, c), so that a vector of channels is one access. With channels
// first it is B: a column for each output pixel, taps in the order (c, r, s), one element at a time. Nothing is divided in
// the main loop: a thread knows the corner of the filter's window at each of its pixels, and counts taps like an odometer.
#pragma once

namespace cukiln {

#if defined(CUKILN_DEVICE)

// What is negative as int is beyond every extent as unsigned: one comparison for both ends.
__device__ __forceinline__ constexpr bool in_bounds(unsigned index, unsigned extent) { return index < extent; }

#endif  // CUKILN_DEVICE

namespace conv2d {

// A number of taps as digits of an odometer: inner digits turn over at `radix_inner` and `radix_middle`.
struct Taps {
  int inner, middle, outer;
};

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
  int stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  int image_pitch, row_pitch, pixel_pitch, channel_pitch;  // elements of the image from one to the next
  int radix_inner, radix_middle;  // channels last: channels, filter_width; first: filter_width, filter_height
  Taps step;                      // from one tap of a thread to its next
  void* result;                   // where the last launch of a separate epilogue writes

#if defined(CUKILN_DEVICE)
  __device__ __forceinline__ int group_of(int matrix) const { return groups == batch ? matrix : matrix % groups; }
  __device__ __forceinline__ Position position(int matrix, int row, int column) const {
    const int first = group_of(matrix) * (filters / groups);
    // Channels last have a bias of the columns, channels first one of the rows: the other index is not looked at.
    return Position{first + row, first + column, matrix * stride_c + row * ldc + column};
  }
#endif
};

#if defined(CUKILN_DEVICE)

using Share = gemm::Share;
using Tile = gemm::Tile;

// Where a filter's window begins at an output pixel: the corner may lie in the padding, `offset` is then not inside of the
// image. A pixel that does not exist has no tap inside.
struct Corner {
  int h, w, offset;
};

constexpr int nowhere = -2147483647 - 1;  // no number of rows down from here is inside

// `pixel` counts those of all images, and `exists` says whether it is one.
__device__ __forceinline__ Corner corner_of(const Arguments& arguments, int pixel, bool exists) {
  const int per_image = arguments.out_height * arguments.out_width;
  const int image = pixel / per_image, within = pixel - image * per_image;
  const int p = within / arguments.out_width, q = within - p * arguments.out_width;
  const int h = p * arguments.stride_h - arguments.padding_h, w = q * arguments.stride_w - arguments.padding_w;
  const int offset = image * arguments.image_pitch + h * arguments.row_pitch + w * arguments.pixel_pitch;
  return Corner{exists ? h : nowhere, w, offset};
}

__device__ __forceinline__ Taps taps_of(const Arguments& arguments, int k) {
  const int rest = k / arguments.radix_inner;
  return Taps{k - rest * arguments.radix_inner, rest % arguments.radix_middle, rest / arguments.radix_middle};
}

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

template <bool channels_last>
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
__device__ __forceinline__ bool inside(const Arguments& arguments, const Corner& corner, const Tap& tap) {
  const unsigned h = static_cast<unsigned>(corner.h + tap.h), w = static_cast<unsigned>(corner.w + tap.w);
  const bool row_exists = in_bounds(h, static_cast<unsigned>(arguments.height));  // bounds: gather row
  const bool column_exists = in_bounds(w, static_cast<unsigned>(arguments.width));  // bounds: gather column
  return row_exists & column_exists;
}

// The image with channels last, as A: all vectors of a thread are of one tap, each of a pixel of its own.
template <class C>
struct RowsOfPixels {
  using T = typename C::Input;
  using V = gemm::Vectors<C, C::tile_m, C::tile_k, C::align_a>;
  static constexpr int tile_outer = C::tile_m, align = C::align_a;
  static constexpr bool along_k = true;
  static_assert(V::whole_rows, "a thread's vectors of the image must be of one tap");

  const Arguments& arguments;
  Taps at;
  Tap tap;
  // Where the tap lies of a window whose corner is the image's first element. It moves from step to step: of the sum of two
  // offsets nvcc would make an address anew for every vector, in five instructions.
  const T* first;
  Corner corners[V::per_thread];

  __device__ __forceinline__ RowsOfPixels(const Arguments& given, const Tile& tile, const Share& share)
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
template <class C>
struct ColumnsOfPixels {
  using T = typename C::Input;
  using V = gemm::Vectors<C, C::tile_k, C::tile_n, 1>;
  static constexpr int tile_outer = C::tile_n, align = 1;
  static constexpr bool along_k = false;
  static_assert(V::whole_rows && V::even, "a thread's vectors of the image must be of one pixel, in all steps alike");

  const Arguments& arguments;
  Taps at;
  Corner corner;
  const T* window;  // its corner

  __device__ __forceinline__ ColumnsOfPixels(const Arguments& given, const Tile& tile, const Share& share)
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

template <bool condition, class A, class B> struct Choose { using type = A; };
template <class A, class B> struct Choose<false, A, B> { using type = B; };

template <class C> using Image = typename Choose<C::channels_last, RowsOfPixels<C>, ColumnsOfPixels<C>>::type;

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

template <class C>
struct ImageLoader : gemm::simt::Loader<C, Image<C>::tile_outer, !Image<C>::along_k, Image<C>::align> {
  using V = typename Image<C>::V;

  __device__ __forceinline__ void load(Image<C>& image, int k_left) {
#pragma unroll
    for (int i = 0; i < V::per_thread; ++i) {
      // No bounds check: a vector behind the tile is in bounds or zero, and never stored. Not loading it saves bandwidth.
      const bool in_tile = V::even || V::index(i) < V::count;
      this->held[i] = Vector<float, Image<C>::align>{};
      if (in_tile && image.wanted(i, k_left)) this->held[i] = load_global<Image<C>::align>(image.address(i));
      image.next_vector();
    }
  }
};

// The image and the filters for gemm::simt::run.
template <class C>
struct Feed {
  using FilterLoader = gemm::simt::Loader<C, Filters<C>::tile_outer, false, Filters<C>::align>;
  using LoaderA = typename Choose<C::channels_last, ImageLoader<C>, FilterLoader>::type;
  using LoaderB = typename Choose<C::channels_last, FilterLoader, ImageLoader<C>>::type;

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

  __device__ __forceinline__ void load_both(ImageLoader<C>& of_image, FilterLoader& of_filters, int k_left) {
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

template <class C>
using ImageTile = gemm::tensor::SharedTile<C, Image<C>::tile_outer, Image<C>::along_k>;

template <class C>
struct ImageCopier : gemm::tensor::Copier<C, ImageTile<C>, Image<C>::tile_outer, Image<C>::along_k, Image<C>::align> {
  using V = typename Image<C>::V;
  using T = typename C::Input;
  static constexpr int align = Image<C>::align;

  static __device__ __forceinline__ void start(char* tile, Image<C>& image, int k_left) {
#pragma unroll
    for (int i = 0; i < V::per_thread; ++i) {
      const bool in_tile = V::even || in_bounds(V::index(i), V::count);  // bounds: gather vector
      if (in_tile) cp_async<align * static_cast<int>(sizeof(T))>(tile + ImageCopier::target(i), image.address(i), image.wanted(i, k_left));
      image.next_vector();
    }
  }

  __device__ __forceinline__ void fetch(Image<C>& image, int k_left) {
#pragma unroll
    for (int i = 0; i < V::per_thread; ++i) {
      // A vector behind the tile is in bounds or not loaded, and never deposited: not loading it saves bandwidth.
      const bool in_tile = V::even || V::index(i) < V::count;
      this->held[i] = Vector<T, align>{};
      if (in_tile && image.wanted(i, k_left)) this->held[i] = load_global<align>(image.address(i));
      image.next_vector();
    }
  }
};

// The image and the filters for gemm::tensor::run.
template <class C>
struct Feed {
  using FilterTile = gemm::tensor::SharedTile<C, Filters<C>::tile_outer, true>;
  using FilterCopier = gemm::tensor::Copier<C, FilterTile, Filters<C>::tile_outer, true, Filters<C>::align>;
  using TileA = typename Choose<C::channels_last, ImageTile<C>, FilterTile>::type;
  using TileB = typename Choose<C::channels_last, FilterTile, ImageTile<C>>::type;
  static constexpr int stage_bytes = TileA::bytes + TileB::bytes;
  // Where the two lie in a stage.
  static constexpr int image_bytes = C::channels_last ? 0 : TileA::bytes, filter_bytes = C::channels_last ? TileA::bytes : 0;

  Image<C> image;
  Filters<C> filters;
  int k_left;
  ImageCopier<C> image_copier;
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
      ImageCopier<C>::start(stage + image_bytes, image, k_left);
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
