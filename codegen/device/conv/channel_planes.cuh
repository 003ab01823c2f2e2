// A convolution over a ring whose image and filters are split into limbs once, ahead of the implicit product
// (Config::limb_split): `split_limbs` writes a matrix of bytes for each limb of both, its planes, with channels last whatever the
// layout is. A group's channels fill plane_pitch bytes, 0 behind the last, so that 16 channels of a tap are one copy: the sum is
// over filter_height x filter_width x plane_pitch products.
//
// Planes lie in the workspace behind the partial sums: those of the filters, then those of the image, limb by limb. `Arguments`
// is what conv/gather.cuh asks for, of the image's planes as an image with channels last, whose elements are bytes.
#pragma once

namespace cukiln {
namespace conv {

#if defined(CUKILN_DEVICE)

// The image or the filters: `outer` times `inner` places (images and pixels, filters and taps), of each the channels of `groups`.
template <class C>
struct Channels {
  using T = typename C::Input;
  static constexpr int limbs = gemm::limbs_of<C>, width = C::channels_last ? C::align_a : 1;
  const T* source;
  int64_t outer;
  int inner, groups, channels, vectors;

  template <class Arguments>
  static __device__ __forceinline__ Channels of_image(const Arguments& a) {
    return of(C::channels_last ? a.a : a.b, a.images, a.height * a.width, a.groups, a.channels);
  }
  template <class Arguments>
  static __device__ __forceinline__ Channels of_filters(const Arguments& a) {
    return of(C::channels_last ? a.b : a.a, a.filters, a.filter_height * a.filter_width, 1, a.channels);
  }
  static __device__ __forceinline__ Channels of(const void* source, int outer, int inner, int groups, int channels) {
    const int vectors = static_cast<int>(gemm::plane_pitch(channels)) / gemm::plane_vector;
    return Channels{static_cast<const T*>(source), outer, inner, groups, channels, vectors};
  }

  // One for each vector of a plane.
  __device__ __forceinline__ int64_t items() const { return outer * inner * groups * vectors; }
  __device__ __forceinline__ int64_t plane() const { return items() * gemm::plane_vector; }

  // Neighbouring items have neighbouring elements in memory.
  __device__ __forceinline__ void split(unsigned char* first, int64_t item) const {
    int64_t place = 0, group = 0, vector = 0, from = 0;
    if constexpr (C::channels_last) {
      vector = item % vectors;
      from = item / vectors * channels + vector * gemm::plane_vector;
      place = item / vectors / groups;
      group = item / vectors % groups;
    } else {
      const int64_t rest = item / inner;
      vector = rest % vectors;
      from = (rest / vectors * channels + vector * gemm::plane_vector) * inner + item % inner;
      place = rest / vectors / groups * inner + item % inner;
      group = rest / vectors % groups;
    }
    unsigned char* const to = first + ((place * groups + group) * vectors + vector) * gemm::plane_vector;
    const int begin = static_cast<int>(vector) * gemm::plane_vector;
    gemm::split_vector<limbs, width>(source + from, C::channels_last ? 1 : inner, begin, channels, to, plane());
  }
};

// One thread for each item of the filters, which `Filters` is, then of the image.
template <class C, class Filters, class Arguments>
__device__ __forceinline__ void split_channels(const Arguments& arguments) {
  const Channels<C> image = Channels<C>::of_image(arguments);
  const Filters filters = Filters::of_filters(arguments);
  unsigned char* const first = gemm::planes_of<C>(arguments);
  const int64_t index = int64_t(blockIdx.x) * gemm::reduce_threads + threadIdx.x;
  if (index < filters.items()) {
    filters.split(first, index);
  } else if (in_bounds(index, filters.items() + image.items())) {  // bounds: split channels
    image.split(first + Channels<C>::limbs * filters.plane(), index - filters.items());
  }
}

namespace tensor {

// The planes of the image as an operand: rows of pixels. All vectors of a thread are of 16 channels of one tap.
template <class C, class Arguments>
struct PixelPlanes {
  static constexpr int tile_outer = C::channels_last ? C::tile_m : C::tile_n;
  using Tile = gemm::tensor::PlaneTile<C, tile_outer>;
  using Plane = typename Tile::Plane;
  using V = typename Tile::V;

  const Arguments& arguments;
  Taps at;
  Tap tap;
  const unsigned char* first;  // as that of RowsOfPixels, of the thread's first limb
  int64_t plane;
  Corner corners[Tile::parts];

  __device__ __forceinline__ PixelPlanes(const Arguments& given, const gemm::Tile& tile, const gemm::Share& share,
                                         const unsigned char* planes, int64_t bytes)
      : arguments(given), at(taps_of(given, share.first + Tile::k())), tap(tap_at<true>(given, at)), plane(bytes) {
    // Products of channels first are of one image each.
    const int group = given.group_of(tile.matrix), image = C::channels_last ? 0 : tile.matrix / given.groups;
    const int64_t of_group = int64_t(group) * given.radix_inner + int64_t(image) * given.image_pitch;
    first = planes + Tile::limb() * plane + of_group + tap.offset;
    const int pixels = C::channels_last ? given.m : given.n;
#pragma unroll
    for (int part = 0; part < Tile::parts; ++part) {
      const int pixel = (C::channels_last ? tile.row : tile.column) * tile_outer + Tile::outer() + part * Tile::apart;
      const bool exists = in_bounds(pixel, pixels);  // bounds: gather pixel of planes
      corners[part] = corner_of(given, pixel, exists);
    }
  }

  __device__ __forceinline__ void start(char* tile, int k_left) {
    // No bounds check: the filters are 0 behind the end of the sum. Not copying saves bandwidth.
    const bool tap_exists = Tile::k() < k_left;
    char* const to = tile + Tile::target();
#pragma unroll
    for (int i = 0; i < V::per_thread; ++i) {
      if (!V::even && !in_bounds(V::index(i), V::count)) continue;  // bounds: gather vector of planes
      const int further = i / Tile::parts * Tile::limbs_apart, part = i % Tile::parts;
      cp_async<gemm::plane_vector>(to + further * Plane::bytes + part * Tile::apart * Plane::row_bytes,
                                   first + further * plane + corners[part].offset, tap_exists & inside(arguments, corners[part], tap));
    }
    count(at, arguments.step, arguments);
    const Tap next = tap_at<true>(arguments, at);
    first += next.offset - tap.offset;
    tap = next;
  }
};

// The planes of filters that are rows along the sum.
template <class C>
struct FilterPlanes {
  using Channels = conv::Channels<C>;
  static constexpr int tile_outer = C::channels_last ? C::tile_n : C::tile_m;
  using Tile = gemm::tensor::PlaneTile<C, tile_outer>;

  const unsigned char* first;
  int64_t pitch, plane;
  int left;  // filters from the tile's first

  template <class Arguments>
  __device__ __forceinline__ FilterPlanes(const Arguments& arguments, const gemm::Tile& tile, const gemm::Share& share,
                                          const unsigned char* planes, int64_t bytes)
      : pitch(arguments.k), plane(bytes) {
    const int row = (C::channels_last ? tile.column : tile.row) * tile_outer;
    const int of_group = C::channels_last ? arguments.n : arguments.m;
    left = of_group - row;
    first = planes + (int64_t(arguments.group_of(tile.matrix)) * of_group + row) * pitch + share.first;
  }

  __device__ __forceinline__ void start(char* tile, int k_left) {
    Tile::start(tile, first, pitch, plane, left, k_left);
    first += C::tile_k;
  }
};

// The planes of the image and of the filters for gemm::tensor::run.
template <class C, class Filters, class Arguments>
struct PlaneFeed {
  using Image = PixelPlanes<C, Arguments>;
  using TileA = typename Choose<C::channels_last, typename Image::Tile, typename Filters::Tile>::type;
  using TileB = typename Choose<C::channels_last, typename Filters::Tile, typename Image::Tile>::type;
  static constexpr int stage_bytes = TileA::bytes + TileB::bytes;
  static constexpr int image_bytes = C::channels_last ? 0 : TileA::bytes, filter_bytes = C::channels_last ? TileA::bytes : 0;
  static_assert(C::copy == gemm::tensor::copy_cp_async, "planes have no other copy");

  Image image;
  Filters filters;
  int k_left;

  __device__ __forceinline__ PlaneFeed(const Arguments& arguments, const gemm::Tile& tile, const gemm::Share& share)
      : image(arguments, tile, share,
              gemm::planes_of<C>(arguments) + Channels<C>::limbs * Filters::Channels::of_filters(arguments).plane(),
              Channels<C>::of_image(arguments).plane()),
        filters(arguments, tile, share, gemm::planes_of<C>(arguments), Filters::Channels::of_filters(arguments).plane()),
        k_left(share.end - share.first) {}

  // As of stored matrices, an empty group behind the end of k.
  __device__ __forceinline__ void start(char* stage) {
    if (k_left > 0) {
      image.start(stage + image_bytes, k_left);
      filters.start(stage + filter_bytes, k_left);
      k_left -= C::tile_k;
    }
    cp_async_commit();
  }
};

}  // namespace tensor

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

// Vectors of a plane of the image and of one of the filters; `channels` are those of a group.
inline int64_t plane_vectors(int64_t pixels, int64_t groups, int64_t taps, int64_t channels) {
  return (pixels * groups + taps) * (gemm::plane_pitch(channels) / gemm::plane_vector);
}

// The launches of a product whose planes have so many vectors.
template <class Arguments>
int plan_planes(const gemm::Plan& product, int64_t vectors, const Arguments& arguments, Launch* out) {
  if (!gemm::plan_items(0, vectors, &out[0])) return 0;
  const int count = gemm::plan(product, arguments, out + 1);
  for (int i = 1; i <= count; ++i) ++out[i].function;
  return count ? 1 + count : 0;
}

#endif  // CUKILN_HOST

}  // namespace conv
}  // namespace cukiln
