// The entry points of a convolution's gradient of the image, and the launch code that calls them, for every way of computing
// it.
#pragma once

namespace cukiln {
namespace conv2d_dgrad {

#if defined(CUKILN_DEVICE)

using gemm::clear, gemm::reduce;
using conv::winograd::inverse, conv::winograd::transform_filters, conv::winograd::transform_image;

// Of a phase without taps.
template <class C>
__device__ __forceinline__ void write_zeros(const Phase<C>& phase, const Tile& tile) {
  constexpr int width = C::align_c, per_row = C::tile_n / width;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < C::tile_m * per_row; index += C::threads) {
    const int row = tile.row * C::tile_m + index / per_row, column = tile.column * C::tile_n + index % per_row * width;
    const bool row_exists = in_bounds(row, phase.m);  // bounds: zero row
    const bool column_exists = in_bounds(column, phase.n);  // bounds: zero column
    if (row_exists && column_exists) gemm::write_output<C, width>(phase, tile.matrix, row, column, Vector<typename C::Accumulator, width>{});
  }
}

// One tile of one phase. Phases have as many tiles as the largest: what lies behind a phase's own has nothing to do.
template <class C>
__device__ __forceinline__ void run_phase(const Arguments& arguments) {
  static_assert(C::split == gemm::split_none, "slices of phases would differ");
  Tile tile = gemm::tile_at<C>(arguments, static_cast<int>(blockIdx.x));
  const int matrices = arguments.batch / (arguments.h.phases * arguments.w.phases), number = tile.matrix / matrices;
  tile.matrix -= number * matrices;
  const Phase<C> phase(arguments, number);
  if (tile.row * C::tile_m >= phase.m || tile.column * C::tile_n >= phase.n) return;
  if (phase.k == 0) {
    write_zeros<C>(phase, tile);
  } else if constexpr (C::tensor_cores) {
    gemm::tensor::compute<C, typename tensor::FeedOf<C>::type>(phase, tile, Share{0, phase.k});
  } else {
    gemm::simt::compute<C, simt::Feed<C>>(phase, tile, Share{0, phase.k});
  }
}

template <class C>
__device__ __forceinline__ void run_direct(const Arguments& arguments) {
  constexpr int tile_p = C::threads / C::threads_k * C::pixels;
  const int phases = arguments.h.phases * arguments.w.phases;
  // The number of strips does not follow from that of pixels, but from the grid.
  const int per_phase = C::window > 0 ? static_cast<int>(gridDim.x) / phases : (arguments.m - 1) / tile_p + 1;
  const int number = static_cast<int>(blockIdx.x) / per_phase;
  const Phase<C> phase(arguments, number);
  const int place = static_cast<int>(blockIdx.x) - number * per_phase;
  if (C::window > 0 || place * tile_p < phase.m) conv::direct::run<C>(phase, place);
}

// A 1 x 1 filter that meets every pixel of the image is a product of stored matrices.
template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  if constexpr (conv::winograd::is_fused<C>) {
    conv::winograd::run_fused<C>(arguments);
  } else if constexpr (conv::winograd::outputs_of<C> > 0) {
    gemm::multiply_stored<conv::winograd::Product<C>>(arguments);
  } else if constexpr (C::direct) {
    run_direct<C>(arguments);
  } else if constexpr (C::strided) {
    run_phase<C>(arguments);
  } else if constexpr (C::pointwise && !gemm::splits_ahead<C>) {
    gemm::multiply_stored<C>(arguments);
  } else {
    gemm::multiply<C, typename tensor::FeedOf<C>::type, simt::Feed<C>>(Phase<C>(arguments, 0));
  }
}

template <class C>
__device__ __forceinline__ void split_limbs(const Arguments& arguments) {
  conv::split_channels<C, TurnedFilters<C>>(arguments);
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

using Shape = conv::Shape;

// The convolution of dy.
inline Shape layer_shape(const Shape& s) {
  const int64_t extents[] = {s.images, s.out_height, s.out_width, s.filters, s.channels, s.filter_height, s.filter_width,
                             s.height, s.width, s.groups};
  return Shape(extents);
}

// What launches depend on, as values, as in gemm/launch.cuh. Of a direct kernel the product has the epilogue's counts alone.
struct Plan {
  gemm::Plan product;
  bool channels_last, direct, pointwise, depthwise, strided;
  conv::direct::Plan block;  // of a direct kernel
  conv::winograd::Plan winograd;
  int planes;  // limbs of an element, of dy and filters that are split ahead
};

template <class C>
constexpr Plan make_plan() {
  Plan plan = {};
  plan.winograd = conv::winograd::make_plan<C>();
  plan.channels_last = C::channels_last;
  plan.direct = C::direct;
  plan.pointwise = C::pointwise;
  plan.depthwise = C::depthwise;
  plan.strided = C::strided;
  if constexpr (conv::winograd::is_fused<C>) {
    plan.product.tile_k = C::tile_k;
  } else if constexpr (conv::winograd::outputs_of<C> > 0) {
    plan.product = gemm::plan_of<conv::winograd::Product<C>>;
  } else if constexpr (C::direct) {
    plan.block = conv::direct::plan_of<C>;
  } else {
    plan.product = gemm::plan_of<C>;
    plan.planes = plan.product.planes;
    plan.product.planes = 0;
  }
  plan.product.epilogue_tensors = C::Epilogue::tensors;
  plan.product.epilogue_scalars = C::Epilogue::scalars;
  return plan;
}

template <class C>
constexpr Plan plan_of = make_plan<C>();

// Without phases where a distance is none.
inline Along along_of(int64_t extent, int64_t taps, int64_t stride_, int64_t before, int64_t behind, int64_t dilation_) {
  const int stride = conv::as_distance(stride_), padding = conv::as_distance(before), dilation = conv::as_distance(dilation_);
  const int padded = conv::padded_extent(extent, before, behind);
  Along along = {gemm::as_extent(extent), gemm::as_extent(taps), stride, padding, dilation, padded, 0, 0, 0};
  if (stride < 1 || dilation < 1 || padding < 0) return along;
  int common = stride;
  for (int rest = dilation; rest != 0;) {
    const int next = common % rest;
    common = rest;
    rest = next;
  }
  along.phases = stride < along.extent ? stride : along.extent;
  along.tap_step = stride / common;
  along.pixel_step = dilation / common;
  return along;
}

// The products of a call: of the largest phase, in all of them. A direct kernel counts neither groups nor phases as products.
inline gemm::Extents product(const Plan& kernel, const Shape& shape, const Along& h, const Along& w) {
  const int64_t phases = int64_t(h.phases) * w.phases;
  if (phases == 0) return {0, 0, 0, 0};
  const int64_t pixels = ceil_div(shape.height, h.stride) * ceil_div(shape.width, w.stride);
  const int64_t filters = shape.filters / shape.groups, of_tap = kernel.planes ? gemm::plane_pitch(filters) : filters;
  const int64_t k = ceil_div(shape.filter_height, h.tap_step) * ceil_div(shape.filter_width, w.tap_step) * of_tap;
  const int64_t channels = shape.channels / shape.groups;
  if (kernel.direct) return {1, shape.images * pixels, channels, k};
  if (kernel.channels_last) return {shape.groups * phases, shape.images * pixels, channels, k};
  return {shape.images * shape.groups * phases, channels, pixels, k};
}

// Pointers: dy, w, the epilogue's tensors, dx. Extents: n, h, w, c, k, r, s, p, q, groups, then the geometry. Launch: raster,
// slices of k, blocks of stream-K. Scalars: those of the epilogue.
inline Arguments bind(const Plan& kernel, void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace) {
  const Shape shape(extents);
  const bool last = kernel.channels_last, dy_is_a = last || kernel.direct;
  Arguments arguments = {};
  arguments.a = pointers[dy_is_a ? 0 : 1];
  arguments.b = pointers[dy_is_a ? 1 : 0];
  arguments.out = pointers[2 + kernel.product.epilogue_tensors];
  arguments.workspace = workspace;
  arguments.h = along_of(shape.height, shape.filter_height, extents[conv::stride_h], extents[conv::top], extents[conv::bottom],
                         extents[conv::dilation_h]);
  arguments.w = along_of(shape.width, shape.filter_width, extents[conv::stride_w], extents[conv::left], extents[conv::right],
                         extents[conv::dilation_w]);
  const gemm::Extents extent = product(kernel, shape, arguments.h, arguments.w);
  gemm::bind_product(kernel.product, extent, kernel.direct ? nullptr : launch, arguments);
  const int64_t channels = shape.channels / shape.groups, filters = shape.filters / shape.groups;
  const int64_t taps = shape.filter_height * shape.filter_width, pixels = shape.height * shape.width;
  const int64_t dy_pixels = shape.out_height * shape.out_width, stride_dy = filters * (last ? 1 : dy_pixels);
  const int64_t stride_w = filters * taps * channels;
  arguments.stride_a = dy_is_a ? stride_dy : stride_w;
  arguments.stride_b = dy_is_a ? stride_w : stride_dy;
  arguments.stride_c = channels * (last ? 1 : pixels);
  arguments.lda = last ? shape.filters : shape.channels;
  arguments.ldb = last ? channels : dy_pixels;
  arguments.ldc = last ? shape.channels : pixels;
  if (kernel.pointwise && !dy_is_a) arguments.stride_a = 0;  // every image has the same filters
  gemm::bind_epilogue(kernel.product, pointers + 2, scalars, arguments.epilogue);

  arguments.images = gemm::as_extent(shape.images);
  arguments.height = gemm::as_extent(shape.out_height);
  arguments.width = gemm::as_extent(shape.out_width);
  arguments.filters = gemm::as_extent(shape.channels);
  arguments.groups = gemm::as_extent(shape.groups);
  arguments.channels = conv::of_group(shape.filters, shape.groups);
  // `plan` refuses what does not fit 32 bits.
  arguments.image_pitch = static_cast<int>(shape.filters * dy_pixels);
  arguments.row_pitch = static_cast<int>(last ? shape.out_width * shape.filters : shape.out_width);
  arguments.pixel_pitch = static_cast<int>(last ? shape.filters : 1);
  arguments.channel_pitch = static_cast<int>(last ? 1 : dy_pixels);
  arguments.weight_pitch = static_cast<int>(taps * channels);
  arguments.weight_column = static_cast<int>(last ? channels : 1);
  arguments.weight_row = static_cast<int>(shape.filter_width * arguments.weight_column);
  arguments.weight_channel = static_cast<int>(last ? 1 : taps);
  if (kernel.planes) {
    const int64_t of_tap = gemm::plane_pitch(filters);
    arguments.pixel_pitch = static_cast<int>(shape.groups * of_tap);
    arguments.row_pitch = static_cast<int>(shape.out_width * arguments.pixel_pitch);
    arguments.image_pitch = static_cast<int>(shape.out_height * arguments.row_pitch);
    arguments.weight_pitch = 1;
    arguments.weight_column = static_cast<int>(of_tap);
    arguments.weight_row = static_cast<int>(shape.filter_width * of_tap);
    arguments.weight_channel = static_cast<int>(taps * of_tap);
  }
  if (kernel.winograd.outputs)
    conv::winograd::bind(kernel.winograd, last, true, layer_shape(shape), extents, pointers, arguments.out, workspace, arguments);
  return arguments;
}

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace) {
  return bind(plan_of<C>, pointers, extents, launch, scalars, workspace);
}

inline int64_t plane_vectors(const Shape& shape) {
  const int64_t taps = shape.filter_height * shape.filter_width, pixels = shape.images * shape.out_height * shape.out_width;
  return conv::plane_vectors(pixels, shape.groups, shape.channels * taps, shape.filters / shape.groups);
}

// Without phases, which divide no sum, all is as with stride 1.
template <class C>
int64_t workspace_bytes(const int64_t* extents, const int32_t* launch) {
  const Shape shape(extents);
  if constexpr (conv::winograd::outputs_of<C> > 0) return conv::winograd::workspace_bytes(plan_of<C>.winograd, layer_shape(shape));
  const int64_t planes = plan_of<C>.planes ? plan_of<C>.planes * gemm::plane_vector * plane_vectors(shape) : 0;
  if constexpr (C::direct || C::strided) return planes;
  return planes + gemm::workspace_bytes(plan_of<C>.product, product(plan_of<C>, shape, along_of(shape.height, shape.filter_height, 1, 0, 0, 1),
                                                           along_of(shape.width, shape.filter_width, 1, 0, 0, 1)), launch);
}

// Of Winograd alone.
template <class C>
int64_t transformed_bytes(const int64_t* extents) {
  return conv::winograd::transformed_bytes(plan_of<C>.winograd, layer_shape(Shape(extents)));
}

using conv::winograd::use_transformed;

// Rows of dy between which a phase reaches: of its windows the first begin, and the last end, outside of it.
inline int64_t rows_reached(int64_t extent, const Along& along) {
  return extent + 2 * (int64_t(along.taps - 1) * along.dilation / along.stride + 1);
}

// Elements between which a kernel reaches with 32 bits: of all images where their pixels are rows, else of one product's; or
// of the filters of a group.
inline int64_t reached(const Plan& kernel, const Arguments& a) {
  const int64_t weights = kernel.channels_last || kernel.direct ? a.stride_b : a.stride_a;
  if (weights > INT32_MAX) return weights;
  const int64_t rows = rows_reached(a.height, a.h), columns = rows_reached(a.width, a.w);
  const int64_t of_group = kernel.planes ? gemm::plane_pitch(a.channels) : a.channels;
  const int64_t of_image = kernel.planes ? a.groups * of_group : of_group;
  const int64_t channels = kernel.channels_last || kernel.direct ? int64_t(a.images) * a.groups * of_group : of_image;
  return rows > INT32_MAX / columns || rows * columns > INT32_MAX / channels ? INT64_MAX : rows * columns * channels;
}

// Whether the kernel can compute the call: its geometry makes this output, and its class is the call's.
inline bool takes(const Plan& kernel, const Arguments& a) {
  const Along &h = a.h, &w = a.w;
  const bool complete = a.batch && a.m && a.n && a.k && a.images && a.height && a.width && a.filters && a.groups && a.channels &&
      h.extent && h.taps && w.extent && w.taps;
  if (!complete || a.filters % a.groups) return false;
  if (int64_t(h.extent) * w.extent > gemm::largest_extent / a.images) return false;
  if (conv::output_extent(h.padded, h.taps, h.dilation, h.stride) != a.height ||
      conv::output_extent(w.padded, w.taps, w.dilation, w.stride) != a.width)
    return false;
  const bool one_by_one = h.taps == 1 && w.taps == 1 && h.stride == 1 && w.stride == 1 && h.padded == h.extent && w.padded == w.extent;
  if (kernel.pointwise && !(one_by_one && (kernel.channels_last || a.groups == 1))) return false;
  if (kernel.depthwise && (a.channels != 1 || a.filters != a.groups)) return false;
  if (kernel.block.window && (w.taps != kernel.block.window || w.stride != 1 || w.dilation != 1)) return false;
  if (!kernel.strided && (h.stride > 1 || w.stride > 1)) return false;
  if (kernel.direct && !kernel.depthwise && a.groups > 1 && a.filters / a.groups % kernel.block.filters) return false;
  return (kernel.pointwise && !kernel.direct && !kernel.planes) || reached(kernel, a) <= INT32_MAX;
}

// Writes the launches of one call and returns how many they are; 0 where the kernel cannot compute it.
inline int plan(const Plan& kernel, const Arguments& arguments, Launch* out) {
  if (!takes(kernel, arguments)) return 0;
  if (kernel.winograd.outputs) return conv::winograd::plan(kernel.winograd, kernel.product, kernel.channels_last, arguments, out);
  if (kernel.planes) {
    const int64_t pixels = int64_t(arguments.images) * arguments.height * arguments.width;
    const int64_t of_filters = int64_t(arguments.filters) * arguments.h.taps * arguments.w.taps;
    const int64_t items = conv::plane_vectors(pixels, arguments.groups, of_filters, arguments.channels);
    return conv::plan_planes(kernel.product, items, arguments, out);
  }
  if (!kernel.direct) return gemm::plan(kernel.product, arguments, out);
  const int64_t columns = ceil_div(arguments.w.extent, arguments.w.stride);
  return conv::direct::plan(kernel.block, arguments, columns, int64_t(arguments.h.phases) * arguments.w.phases, out);
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  return plan(plan_of<C>, arguments, out);
}

// Reads dy, w, the epilogue's tensors and dx into `extents`; false and a sentence where a call cannot be right.
template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  using conv::Tensors;
  using Stored = conv::winograd::Stored<C>;
  constexpr int align_dy = Stored::align_x, align_w = Stored::align_w;
  const Tensors call = {{"dy", "w", "dx"}, {Tensors::output, Tensors::filters, Tensors::image}, {align_dy, align_w, Stored::align_c}};
  if (!conv::check_tensors<C>(call, tensors, count, extents, complaint)) return false;
  const Shape shape(extents);
  if (!conv::check_window<C>(shape, complaint) || !conv::winograd::check_filters<C>(shape, complaint)) return false;
  if (C::channels_last) {
    const int64_t groups = C::depthwise ? 1 : shape.groups;
    if (!conv::check_multiple(C::depthwise ? "k" : "k / groups", shape.filters / groups, align_dy, complaint)) return false;
    if (!conv::check_multiple(C::depthwise ? "c" : "c / groups", shape.channels / groups, Stored::align_c, complaint)) return false;
  } else {
    if (C::pointwise && !conv::check_multiple("p * q", shape.out_height * shape.out_width, align_dy, complaint)) return false;
    if (!conv::check_multiple("h * w", shape.height * shape.width, Stored::align_c, complaint)) return false;
  }
  if (!conv::check_multiple("c / groups", shape.channels / shape.groups, align_w, complaint)) return false;
  return conv::check_written<Stored>(call, tensors, shape.channels, complaint);
}

#endif  // CUKILN_HOST

}  // namespace conv2d_dgrad
}  // namespace cukiln
