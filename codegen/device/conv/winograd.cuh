// Winograd's minimal filtering of 3 x 3 filters with stride 1, F(2 x 2, 3 x 3) and F(4 x 4, 3 x 3) (Lavin and Gray, "Fast
// Algorithms for Convolutional Neural Networks", CVPR 2016, section 4), as products of matrices.
//
// Four launches. `transform_filters` writes G g G^T of each filter and channel, `transform_image` B^T d B of each tile and
// channel: one matrix for each of the 16 or 36 places of a tile. `run` multiplies them place by place (gemm/), `inverse` makes
// A^T m A of the sums and applies the epilogue. Transforms and sums are in fp32; what is multiplied is rounded once, to the
// type of the inputs. Over Z/2^32 and Z/2^64 all of it is exact (`Exact`). The matrices' extents are multiples of `unit`, zero behind the last element, so that accesses of the
// products are as wide as they can be, whatever the problem's extents are.
#pragma once

namespace cukiln {
namespace conv {
namespace winograd {

enum { unit = 8, taps = 3 };  // of extents of the matrices; of a filter along an axis

// Outputs of a tile along an axis (C::output_tile); 0: a kernel without Winograd.
template <int> struct Present { using type = void; };
template <class C, class = void> constexpr int outputs_of = 0;
template <class C> constexpr int outputs_of<C, typename Present<C::output_tile>::type> = C::output_tile;

// Whether one launch does all of it (winograd_fused.cuh).
template <class C, class = void> constexpr bool is_fused = false;
template <class C> constexpr bool is_fused<C, typename Present<C::fused>::type> = C::fused != 0;
template <class C> struct Fused;

// What is multiplied over a ring, and the sums, are of a larger one: its filters are not divided by the scale of their transform, so that
// a sum is 4 times (576 times, which is 64 times 9) the convolution's. In a ring of 2 (6) more bits that many zeros are its
// lowest bits; what is above them, times the inverse of 9, is the convolution modulo 2^32 or 2^64.
template <class T> struct Work;
template <> struct Work<int> { using type = int64_t; };
template <> struct Work<int64_t> { using type = Wide; };

// The Config of `run`: its sums go to the workspace as they are.
template <class C, bool ring = gemm::over_ring<C>>
struct Product : C {
  using Output = typename C::Accumulator;
  using Epilogue = Chain<>;
  static constexpr bool rounded = true;
};
template <class C>
struct Product<C, true> : C {
  using Input = typename Work<typename C::Input>::type;
  using Accumulator = Input;
  using Output = Input;
  using Epilogue = Chain<>;
  static constexpr int fraction_bits = 0, limbs = static_cast<int>(sizeof(typename C::Input)) + 1;
  static constexpr int limb_split = gemm::splits_ahead<C> ? gemm::limbs_given : gemm::limbs_fused;
};

// Whether the transforms write limbs (winograd_planes.cuh).
template <class C> constexpr bool writes_planes = gemm::reads_planes<Product<C>>;

// The Config as a call's tensors have it: `align_x` and `align_w` elements of an access to x and w, `align_c` to out.
template <class C, bool is_winograd = (outputs_of<C> > 0)>
struct Stored : C {
  static constexpr bool image_is_a = C::channels_last || C::direct;
  static constexpr int align_x = image_is_a ? C::align_a : C::align_b, align_w = image_is_a ? C::align_b : C::align_a;
};
template <class C>
struct Stored<C, true> : C {
  static constexpr int align_x = C::image_width, align_w = 1, align_c = C::out_width;
};

// The convolution that is computed, forward: a gradient of an image is one of the output's gradient, with its filters turned
// over and channels for filters. Member `layer` of an operator's Arguments.
struct Layer {
  const void *image, *weights;
  void* result;
  int images, height, width, channels, filters, out_height, out_width;
  int padding_h, padding_w, tiles_h, tiles_w;
  int64_t image_pitch, channel_pitch, row_pitch, pixel_pitch;  // elements of the image from one to the next
  int64_t weight_filter, weight_channel, weight_tap;           // and of w; taps are 3 r + s
};

#if defined(CUKILN_DEVICE)

// A number of a ring, as passes compute with it: their coefficients are whole.
template <class T>
struct Whole {
  T value;

  __device__ __forceinline__ Whole operator+(const Whole& other) const { return {plus(value, other.value)}; }
  __device__ __forceinline__ Whole operator-(const Whole& other) const { return *this + other * -1.0f; }
  __device__ __forceinline__ Whole operator*(float coefficient) const {
    return {gemm::product(static_cast<T>(static_cast<int64_t>(coefficient)), value)};
  }
};

// Of one axis: B^T d. `largest` bounds |B^T d B| for |d| <= 1, rounded up to a power of two.
template <int outputs> struct ImagePass;
template <> struct ImagePass<2> {
  static constexpr int in = 4, out = 4;
  static constexpr float largest = 4.0f;
  template <class V>
  static __device__ __forceinline__ void apply(const V (&d)[4], V (&v)[4]) {
    v[0] = d[0] - d[2];
    v[1] = d[1] + d[2];
    v[2] = d[2] - d[1];
    v[3] = d[1] - d[3];
  }
};
template <> struct ImagePass<4> {
  static constexpr int in = 6, out = 6;
  static constexpr float largest = 128.0f;
  template <class V>
  static __device__ __forceinline__ void apply(const V (&d)[6], V (&v)[6]) {
    const V even = d[4] - d[2] * 4.0f, odd = d[3] - d[1] * 4.0f;
    const V near = d[4] - d[2], far = (d[3] - d[1]) * 2.0f;
    v[0] = d[0] * 4.0f - d[2] * 5.0f + d[4];
    v[1] = even + odd;
    v[2] = even - odd;
    v[3] = near + far;
    v[4] = near - far;
    v[5] = d[1] * 4.0f - d[3] * 5.0f + d[5];
  }
};

// Of one axis: G g times `scale`, which makes all its coefficients whole numbers.
template <int outputs> struct FilterPass;
template <> struct FilterPass<2> {
  static constexpr int in = 3, out = 4;
  static constexpr float scale = 2.0f;
  template <class V>
  static __device__ __forceinline__ void apply(const V (&g)[3], V (&u)[4]) {
    u[0] = g[0] * 2.0f;
    u[1] = g[0] + g[2] + g[1];
    u[2] = g[0] + g[2] - g[1];
    u[3] = g[2] * 2.0f;
  }
};
template <> struct FilterPass<4> {
  static constexpr int in = 3, out = 6;
  static constexpr float scale = 24.0f;
  template <class V>
  static __device__ __forceinline__ void apply(const V (&g)[3], V (&u)[6]) {
    const V outer = (g[0] + g[2]) * -4.0f, wide = g[0] + g[2] * 4.0f;
    u[0] = g[0] * 6.0f;
    u[1] = outer - g[1] * 4.0f;
    u[2] = outer + g[1] * 4.0f;
    u[3] = wide + g[1] * 2.0f;
    u[4] = wide - g[1] * 2.0f;
    u[5] = g[2] * 24.0f;
  }
};

// Of one axis: A^T m.
template <int outputs> struct InversePass;
template <> struct InversePass<2> {
  static constexpr int in = 4, out = 2;
  template <class V>
  static __device__ __forceinline__ void apply(const V (&m)[4], V (&y)[2]) {
    y[0] = m[0] + m[1] + m[2];
    y[1] = m[1] - m[2] - m[3];
  }
};
template <> struct InversePass<4> {
  static constexpr int in = 6, out = 4;
  template <class V>
  static __device__ __forceinline__ void apply(const V (&m)[6], V (&y)[4]) {
    const V inner_sum = m[1] + m[2], inner_rest = m[1] - m[2], outer_sum = m[3] + m[4], outer_rest = m[3] - m[4];
    y[0] = m[0] + inner_sum + outer_sum;
    y[1] = inner_rest + outer_rest * 2.0f;
    y[2] = inner_sum + outer_sum * 4.0f;
    y[3] = inner_rest + outer_rest * 8.0f + m[5];
  }
};

// A pass along both axes.
template <class Pass, class V>
__device__ __forceinline__ void transform(const V (&given)[Pass::in][Pass::in], V (&result)[Pass::out][Pass::out]) {
  V between[Pass::out][Pass::in];
#pragma unroll
  for (int column = 0; column < Pass::in; ++column) {
    V before[Pass::in], after[Pass::out];
#pragma unroll
    for (int row = 0; row < Pass::in; ++row) before[row] = given[row][column];
    Pass::apply(before, after);
#pragma unroll
    for (int row = 0; row < Pass::out; ++row) between[row][column] = after[row];
  }
#pragma unroll
  for (int row = 0; row < Pass::out; ++row) Pass::apply(between[row], result[row]);
}

// As an operand of the products: the next launch multiplies what is there.
template <class C>
__device__ __forceinline__ typename C::Input as_operand(float x) {
  using T = typename C::Input;
  if constexpr (C::tensor_cores && is_same<T, float>) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, sizeof(bits));
    bits = round_to_tf32(bits);
    __builtin_memcpy(&x, &bits, sizeof(bits));
    return x;
  } else {
    return from_float<T>(x);
  }
}

// Elements of fp16 are divided by the transform's largest growth, a power of two, so that none overflows.
template <class C>
__device__ __forceinline__ constexpr float growth() {
  return is_same<typename C::Input, Half> ? ImagePass<C::output_tile>::largest : 1.0f;
}

// How the launches read and write numbers.
template <class C, bool ring = gemm::over_ring<C>>
struct Exact {  // nearly: in fp32
  using Input = typename C::Input;
  using Operand = Input;
  using Sum = float;
  using Value = float;
  using Result = float;
  static constexpr float scale = FilterPass<C::output_tile>::scale;
  static __device__ __forceinline__ float read(Input element) { return to_float(element); }
  static __device__ __forceinline__ float read_sum(float sum) { return sum; }
  static __device__ __forceinline__ Operand of_filter(float value) { return as_operand<C>(value * (1.0f / (scale * scale))); }
  static __device__ __forceinline__ Operand of_image(float value) { return as_operand<C>(value * (1.0f / growth<C>())); }
  static __device__ __forceinline__ float result(float value) { return value * growth<C>(); }
  static __device__ __forceinline__ typename C::Output stored(float value) { return from_float<typename C::Output>(value); }
};
template <class C>
struct Exact<C, true> {
  using Input = typename C::Input;
  using Operand = typename Product<C>::Input;
  using Sum = Operand;
  using Value = Whole<Operand>;
  using Result = Number<C>;
  static constexpr int zeros = C::output_tile == 2 ? 2 : 6;
  static __device__ __forceinline__ Value read(Input element) { return {static_cast<Operand>(static_cast<int64_t>(element))}; }
  static __device__ __forceinline__ Value read_sum(Sum sum) { return {sum}; }
  static __device__ __forceinline__ Operand of_filter(Value value) { return value.value; }
  static __device__ __forceinline__ Operand of_image(Value value) { return value.value; }
  static __device__ __forceinline__ Result result(Value sum) {
    const Input multiple = static_cast<Input>(sum.value >> zeros);
    const Input inverse_of_9 = static_cast<Input>(0x8e38e38e38e38e39ull);
    return Result(gemm::truncated<C>(C::output_tile == 2 ? multiple : gemm::product(multiple, inverse_of_9)));
  }
  static __device__ __forceinline__ Input stored(Result number) { return number.value; }
};

// A tile of the output: its image, and its first row and column. `exists`: not behind the last one.
struct TileOf {
  int image, row, column;
  bool exists;

  __device__ __forceinline__ TileOf(const Layer& layer, int tile, int outputs) {
    const int per_image = layer.tiles_h * layer.tiles_w;
    image = tile / per_image;
    exists = in_bounds(image, layer.images);  // bounds: tile
    const int within = tile - image * per_image;
    row = within / layer.tiles_w * outputs;
    column = within % layer.tiles_w * outputs;
  }
};

// This thread's number among those of a launch.
__device__ __forceinline__ int64_t item() { return int64_t(blockIdx.x) * gemm::reduce_threads + threadIdx.x; }

// A channel of a filter; zeros where there is none.
template <class C, class V>
__device__ __forceinline__ void read_filter(const Layer& layer, int filter, int channel, V (&given)[taps][taps]) {
  using T = typename C::Input;
  const bool filter_exists = in_bounds(filter, layer.filters);  // bounds: filter
  const bool channel_exists = in_bounds(channel, layer.channels);  // bounds: channel of a filter
  if (filter_exists && channel_exists) {
    const T* const weights = static_cast<const T*>(layer.weights) + filter * layer.weight_filter + channel * layer.weight_channel;
#pragma unroll
    for (int r = 0; r < taps; ++r)
#pragma unroll
      for (int s = 0; s < taps; ++s)
        given[r][s] = Exact<C>::read(load_global<1>(weights + (r * taps + s) * layer.weight_tap).data[0]);
  }
}

// `width` channels of what a tile of the output sees of its image; zeros around it, and where there is no tile or channel.
template <class C, int width, int edge, class V>
__device__ __forceinline__ void read_image(const Layer& layer, const TileOf& tile, int channel, V (&given)[width][edge][edge]) {
  using T = typename C::Input;
  const bool channel_exists = in_bounds(channel, layer.channels);  // bounds: channel of the image
  const bool wanted = tile.exists && channel_exists;
  const int top = tile.row - layer.padding_h, left = tile.column - layer.padding_w;
  const T* const image = static_cast<const T*>(layer.image) + tile.image * layer.image_pitch + channel * layer.channel_pitch;
#pragma unroll
  for (int i = 0; i < edge; ++i) {
    const int row = top + i;
    const bool row_exists = row >= 0 && in_bounds(row, layer.height);  // bounds: row of the image
#pragma unroll
    for (int j = 0; j < edge; ++j) {
      const int column = left + j;
      const bool column_exists = column >= 0 && in_bounds(column, layer.width);  // bounds: column of the image
      if (wanted && row_exists && column_exists) {
        const Vector<T, width> loaded = load_global<width>(image + row * layer.row_pitch + column * layer.pixel_pitch);
#pragma unroll
        for (int w = 0; w < width; ++w) given[w][i][j] = Exact<C>::read(loaded.data[w]);
      }
    }
  }
}

// One thread for each filter and channel of the matrices.
template <class C, class Arguments>
__device__ __forceinline__ void transform_filters(const Arguments& arguments) {
  using E = Exact<C>;
  using Operand = typename E::Operand;
  using Pass = FilterPass<C::output_tile>;
  const int64_t pitch = C::channels_last ? arguments.ldb : arguments.lda;
  const int64_t per_place = C::channels_last ? arguments.stride_b : arguments.stride_a;
  const int64_t index = item();
  if (!writes_planes<C> && !in_bounds(index, per_place)) return;  // bounds: filter item
  const int filter = static_cast<int>(index / pitch), channel = static_cast<int>(index % pitch);
  typename E::Value given[taps][taps] = {}, result[Pass::out][Pass::out];
  read_filter<C>(arguments.layer, filter, channel, given);
  transform<Pass>(given, result);
  void* const matrices = const_cast<void*>(C::channels_last ? arguments.b : arguments.a);
  if constexpr (writes_planes<C>) {
    store_planes<Product<C>::limbs>(static_cast<unsigned char*>(matrices), index, per_place, result);
  } else {
    Operand* const out = static_cast<Operand*>(matrices) + index;
#pragma unroll
    for (int place = 0; place < Pass::out * Pass::out; ++place)
      store_global<1>(out + place * per_place, Vector<Operand, 1>{{E::of_filter(result[place / Pass::out][place % Pass::out])}});
  }
}

// One thread for each tile and `image_width` channels of the matrices. Neighbouring threads have neighbouring channels where
// those are last or limbs are written, else neighbouring tiles.
template <class C, class Arguments>
__device__ __forceinline__ void transform_image(const Arguments& arguments) {
  using E = Exact<C>;
  using Operand = typename E::Operand;
  using Pass = ImagePass<C::output_tile>;
  constexpr int width = C::image_width, widest = 16 / static_cast<int>(sizeof(Operand)), part = width < widest ? width : widest;
  const int64_t pitch = C::channels_last ? arguments.lda : arguments.ldb;
  const int64_t per_place = C::channels_last ? arguments.stride_a : arguments.stride_b;
  const int64_t index = item() * width;
  if (!writes_planes<C> && !in_bounds(index, per_place)) return;  // bounds: image item
  const int row_of = static_cast<int>(index / pitch), column_of = static_cast<int>(index % pitch);
  constexpr bool along_channels = C::channels_last || writes_planes<C>;
  const int channel = along_channels ? column_of : row_of;
  const TileOf tile(arguments.layer, along_channels ? row_of : column_of, C::output_tile);
  typename E::Value given[width][Pass::in][Pass::in] = {};
  read_image<C>(arguments.layer, tile, channel, given);
  typename E::Value result[width][Pass::out][Pass::out];
#pragma unroll
  for (int w = 0; w < width; ++w) transform<Pass>(given[w], result[w]);
  void* const matrices = const_cast<void*>(C::channels_last ? arguments.a : arguments.b);
  if constexpr (writes_planes<C>) {
    static_assert(width == 1, "limbs are written channel by channel");
    store_planes<Product<C>::limbs>(static_cast<unsigned char*>(matrices), index, per_place, result[0]);
  } else {
    Operand* const out = static_cast<Operand*>(matrices) + index;
#pragma unroll
    for (int place = 0; place < Pass::out * Pass::out; ++place) {
#pragma unroll
      for (int first = 0; first < width; first += part) {
        Vector<Operand, part> rounded;
#pragma unroll
        for (int w = 0; w < part; ++w) rounded.data[w] = E::of_image(result[first + w][place / Pass::out][place % Pass::out]);
        store_global<part>(out + place * per_place + first, rounded);
      }
    }
  }
}

// The outputs of a tile of `width` filters, with the epilogue.
template <class C, int width, class Arguments, class V, int outputs>
__device__ __forceinline__ void write_tile(const Arguments& arguments, const TileOf& tile, int filter,
                                           const V (&result)[width][outputs][outputs]) {
  using Output = typename C::Output;
  using E = Exact<C>;
  const Layer& layer = arguments.layer;
  const int64_t first_pixel = C::channels_last ? int64_t(tile.image) * layer.out_height
                                               : (int64_t(tile.image) * layer.filters + filter) * layer.out_height;
#pragma unroll
  for (int i = 0; i < outputs; ++i) {
    const int row = tile.row + i;
    if (!in_bounds(row, layer.out_height)) continue;  // bounds: row of the output
#pragma unroll
    for (int j = 0; j < outputs; ++j) {
      const int column = tile.column + j;
      if (!in_bounds(column, layer.out_width)) continue;  // bounds: column of the output
      const int64_t pixel = (first_pixel + row) * layer.out_width + column;
      const int64_t offset = C::channels_last ? pixel * layer.filters + filter : pixel;
      Vector<typename E::Result, width> value;
#pragma unroll
      for (int w = 0; w < width; ++w) value.data[w] = E::result(result[w][i][j]);
      C::Epilogue::apply(value, Position{filter, filter, offset}, arguments.epilogue);
      Vector<Output, width> rounded;
#pragma unroll
      for (int w = 0; w < width; ++w) rounded.data[w] = E::stored(value.data[w]);
      store_global<width>(static_cast<Output*>(layer.result) + offset, rounded);
    }
  }
}

// One thread for each tile that exists and `out_width` filters.
template <class C, class Arguments>
__device__ __forceinline__ void inverse(const Arguments& arguments) {
  using E = Exact<C>;
  using Sum = typename E::Sum;
  using Pass = InversePass<C::output_tile>;
  constexpr int width = C::out_width, widest = 16 / static_cast<int>(sizeof(Sum)), part = width < widest ? width : widest;
  const Layer& layer = arguments.layer;
  const int64_t tiles = int64_t(layer.images) * layer.tiles_h * layer.tiles_w, vectors = layer.filters / width;
  const int64_t index = item();
  if (!in_bounds(index, tiles * vectors)) return;  // bounds: output item
  const int filter = static_cast<int>(C::channels_last ? index % vectors * width : index / tiles);
  const int number = static_cast<int>(C::channels_last ? index / vectors : index % tiles);
  const TileOf tile(layer, number, C::output_tile);
  const Sum* const sums = static_cast<const Sum*>(arguments.out) +
      (C::channels_last ? number * arguments.ldc + filter : filter * arguments.ldc + number);
  typename E::Value given[width][Pass::in][Pass::in], result[width][Pass::out][Pass::out];
#pragma unroll
  for (int place = 0; place < Pass::in * Pass::in; ++place) {
#pragma unroll
    for (int first = 0; first < width; first += part) {
      const Vector<Sum, part> loaded = load_global<part>(sums + place * arguments.stride_c + first);
#pragma unroll
      for (int w = 0; w < part; ++w) given[first + w][place / Pass::in][place % Pass::in] = E::read_sum(loaded.data[w]);
    }
  }
#pragma unroll
  for (int w = 0; w < width; ++w) transform<Pass>(given[w], result[w]);
  write_tile<C>(arguments, tile, filter, result);
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

// What launches depend on, beside the product's. `outputs` is 0 of a kernel without Winograd; of one launch for all of it
// there are tiles and filters of a block, and nothing in the workspace.
struct Plan {
  int outputs, input_bytes, operand_bytes, sum_bytes, image_width, out_width;
  int tile_m, tile_n, threads;
  uint32_t shared_bytes;
  int planes = 0;  // limbs of an operand, which are written one by one
};

template <class C>
constexpr Plan make_plan() {
  if constexpr (is_fused<C>) {
    return {C::output_tile, static_cast<int>(sizeof(typename C::Input)), 0, 0, 1, 1, C::tile_m, C::tile_n, C::threads,
            Fused<C>::shared_bytes};
  } else if constexpr (outputs_of<C> > 0) {
    using P = Product<C>;
    return {C::output_tile, static_cast<int>(sizeof(typename C::Input)), static_cast<int>(sizeof(typename P::Input)),
            static_cast<int>(sizeof(typename P::Accumulator)), C::image_width, C::out_width, 0, 0, 0, 0,
            writes_planes<C> ? gemm::limbs_of<P> : 0};
  } else {
    return {};
  }
}

inline int64_t rounded_up(int64_t extent) { return ceil_div(extent, unit) * unit; }

// Rows and columns of the matrices of a call. `pitch`: elements of rows that run along channels.
struct Extents {
  int64_t tiles_h, tiles_w, tiles, channels, filters, places, pitch, operand_bytes;

  Extents(const Plan& kernel, const Shape& shape)
      : tiles_h(ceil_div(shape.out_height, kernel.outputs)), tiles_w(ceil_div(shape.out_width, kernel.outputs)),
        tiles(rounded_up(shape.images * tiles_h * tiles_w)), channels(rounded_up(shape.channels)),
        filters(rounded_up(shape.filters)), places((kernel.outputs + taps - 1) * (kernel.outputs + taps - 1)),
        pitch(kernel.planes ? gemm::plane_pitch(channels) : channels),
        operand_bytes(kernel.planes ? kernel.planes : kernel.operand_bytes) {}

  int64_t image_bytes() const { return places * tiles * pitch * operand_bytes; }
  int64_t filter_bytes() const { return places * filters * pitch * operand_bytes; }
  int64_t sum_bytes(const Plan& kernel) const { return places * tiles * filters * kernel.sum_bytes; }
};

// The image's matrices, then those of the filters, then the sums.
inline int64_t workspace_bytes(const Plan& kernel, const Shape& shape) {
  const Extents extents(kernel, shape);
  return extents.image_bytes() + extents.filter_bytes() + extents.sum_bytes(kernel);
}

// The image and the filters that are read, packed; `gradient`: of the output's gradient, by the filters turned over.
inline Layer layer_of(const Plan& kernel, bool channels_last, bool gradient, const Shape& shape, const int64_t* extents,
                      void* const* pointers, void* result) {
  const int64_t pixels = shape.height * shape.width, channels = shape.channels, every_tap = taps * taps;
  Layer layer = {};
  layer.image = pointers[0];
  layer.weights = pointers[1];
  layer.result = result;
  layer.images = gemm::as_extent(shape.images);
  layer.height = gemm::as_extent(shape.height);
  layer.width = gemm::as_extent(shape.width);
  layer.channels = gemm::as_extent(channels);
  layer.filters = gemm::as_extent(shape.filters);
  layer.out_height = gemm::as_extent(shape.out_height);
  layer.out_width = gemm::as_extent(shape.out_width);
  layer.padding_h = gradient ? taps - 1 - as_distance(extents[top]) : as_distance(extents[top]);
  layer.padding_w = gradient ? taps - 1 - as_distance(extents[left]) : as_distance(extents[left]);
  layer.image_pitch = channels * pixels;
  layer.row_pitch = channels_last ? shape.width * channels : shape.width;
  layer.pixel_pitch = channels_last ? channels : 1;
  layer.channel_pitch = channels_last ? 1 : pixels;
  // Of w the stored rows are filters of the convolution, each with its channels.
  const int64_t stored_channels = gradient ? shape.filters : channels;
  const int64_t row = every_tap * stored_channels, column = channels_last ? 1 : every_tap;
  layer.weight_filter = gradient ? column : row;
  layer.weight_channel = gradient ? row : column;
  layer.weight_tap = channels_last ? stored_channels : 1;
  if (gradient) {
    const int64_t last_tap = (every_tap - 1) * layer.weight_tap * kernel.input_bytes;
    layer.weights = static_cast<const char*>(pointers[1]) + last_tap;
    layer.weight_tap = -layer.weight_tap;
  }
  const Extents tiled(kernel, shape);
  layer.tiles_h = gemm::as_extent(tiled.tiles_h);
  layer.tiles_w = gemm::as_extent(tiled.tiles_w);
  return layer;
}

// Whether Winograd computes the convolution: every stride and dilation is 1, and there is one group.
inline bool takes(const Shape& shape, const int64_t* extents) {
  return shape.filter_height == taps && shape.filter_width == taps && shape.groups == 1 && extents[stride_h] == 1 &&
      extents[stride_w] == 1 && extents[dilation_h] == 1 && extents[dilation_w] == 1;
}

// Writes the layer and, in place of the product that `arguments` has of the whole convolution, those of the places (none
// where Winograd computes no such convolution). `shape` is that of the layer.
template <class Arguments>
void bind(const Plan& kernel, bool channels_last, bool gradient, const Shape& shape, const int64_t* extents, void* const* pointers,
          void* result, void* workspace, Arguments& arguments) {
  const Extents tiled(kernel, shape);
  char* const image = static_cast<char*>(workspace);
  char* const filters = image + tiled.image_bytes();
  arguments.layer = layer_of(kernel, channels_last, gradient, shape, extents, pointers, result);
  arguments.a = channels_last ? image : filters;
  arguments.b = channels_last ? filters : image;
  arguments.out = filters + tiled.filter_bytes();
  arguments.batch = takes(shape, extents) ? gemm::as_extent(tiled.places) : 0;
  arguments.m = gemm::as_extent(channels_last ? tiled.tiles : tiled.filters);
  arguments.n = gemm::as_extent(channels_last ? tiled.filters : tiled.tiles);
  arguments.k = gemm::as_extent(tiled.channels);
  arguments.lda = tiled.pitch;
  arguments.ldb = channels_last || kernel.planes ? tiled.pitch : tiled.tiles;
  arguments.ldc = channels_last ? tiled.filters : tiled.tiles;
  arguments.stride_a = (channels_last ? tiled.tiles : tiled.filters) * tiled.pitch;
  arguments.stride_b = (channels_last ? tiled.filters : tiled.tiles) * tiled.pitch;
  arguments.stride_c = tiled.tiles * tiled.filters;
}

// Writes the launches of one call and returns how many they are; 0 where an extent is beyond what they can index.
template <class Arguments>
int plan(const Plan& kernel, const gemm::Plan& product, bool channels_last, const Arguments& a, Launch* out) {
  const int64_t image = channels_last ? a.stride_a : a.stride_b, filters = channels_last ? a.stride_b : a.stride_a;
  const int64_t tiles = int64_t(a.layer.images) * a.layer.tiles_h * a.layer.tiles_w;
  if (kernel.threads) {
    const int64_t across = ceil_div(tiles, kernel.tile_m), down = ceil_div(a.layer.filters, kernel.tile_n);
    if (!a.batch || across < 1 || across > INT32_MAX || down < 1 || down > 65535) return 0;
    const uint32_t threads = static_cast<uint32_t>(kernel.threads);
    out[0] = Launch{0, {static_cast<uint32_t>(across), static_cast<uint32_t>(down), 1}, {threads, 1, 1}, kernel.shared_bytes};
    return 1;
  }
  const bool planned = gemm::plan_items(0, filters, &out[0]) && gemm::plan_items(1, image / kernel.image_width, &out[1]) &&
      gemm::plan(product, a, &out[2]) == 1 && gemm::plan_items(3, tiles * (a.layer.filters / kernel.out_width), &out[3]);
  if (!planned) return 0;
  out[2].function = 2;
  return 4;
}

// Bytes of the filters' matrices, which a caller may have transformed once ahead (binding/transform.h).
inline int64_t transformed_bytes(const Plan& kernel, const Shape& shape) { return Extents(kernel, shape).filter_bytes(); }

// Has them written and read there, not in the workspace.
template <class C, class Arguments>
void use_transformed(Arguments& arguments, void* filters) {
  (C::channels_last ? arguments.b : arguments.a) = filters;
}

// Of a call's tensors: whether this kernel computes filters of that size.
template <class C>
bool check_filters(const Shape& shape, Complaint complaint) {
  if constexpr (outputs_of<C> > 0) {
    if (shape.filter_height != taps || shape.filter_width != taps || shape.groups != 1)
      CUKILN_REFUSE(complaint, "ValueError: w has %lld x %lld taps and %lld groups; this kernel is for 3 x 3 and one group: look up "
                    "the kernel of this shape", static_cast<long long>(shape.filter_height),
                    static_cast<long long>(shape.filter_width), static_cast<long long>(shape.groups));
  }
  return true;
}

#endif  // CUKILN_HOST

}  // namespace winograd
}  // namespace conv
}  // namespace cukiln
