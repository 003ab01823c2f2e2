// The entry points of a convolution, and the launch code that calls them, for every way of computing it.
#pragma once

namespace cukiln {
namespace conv2d {

#if defined(CUKILN_DEVICE)

using gemm::clear, gemm::reduce;
using conv::winograd::inverse, conv::winograd::transform_filters, conv::winograd::transform_image;

// A 1 x 1 filter that meets every pixel of the image is a product of stored matrices.
template <class C>
__device__ __forceinline__ void multiply(const Arguments& arguments) {
  if constexpr (conv::winograd::is_fused<C>) {
    conv::winograd::run_fused<C>(arguments);
  } else if constexpr (conv::winograd::outputs_of<C> > 0) {
    gemm::multiply_stored<conv::winograd::Product<C>>(arguments);
  } else if constexpr (C::direct) {
    conv::direct::run<C>(arguments, static_cast<int>(blockIdx.x));
  } else if constexpr (gemm::splits_ahead<C>) {
    gemm::tensor::run<C, conv::tensor::PlaneFeed<C, conv::tensor::FilterPlanes<C>, Arguments>>(arguments);
  } else if constexpr (C::pointwise) {
    gemm::multiply_stored<C>(arguments);
  } else {
    gemm::multiply<C, tensor::Feed<C>, simt::Feed<C>>(arguments);
  }
}

template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  multiply<typename separate::RunOf<C>::type>(arguments);
}

template <class C>
__device__ __forceinline__ void split_limbs(const Arguments& arguments) {
  conv::split_channels<C, conv::Channels<C>>(arguments);
}

// The nodes of a separate epilogue, by their places in the chain.
template <class C>
__device__ __forceinline__ void node0(const Arguments& arguments) {
  separate::node<C, 0>(arguments);
}

template <class C>
__device__ __forceinline__ void node1(const Arguments& arguments) {
  separate::node<C, 1>(arguments);
}

template <class C>
__device__ __forceinline__ void node2(const Arguments& arguments) {
  separate::node<C, 2>(arguments);
}

template <class C>
__device__ __forceinline__ void node3(const Arguments& arguments) {
  separate::node<C, 3>(arguments);
}

template <class C>
__device__ __forceinline__ void node4(const Arguments& arguments) {
  separate::node<C, 4>(arguments);
}

template <class C>
__device__ __forceinline__ void node5(const Arguments& arguments) {
  separate::node<C, 5>(arguments);
}

template <class C>
__device__ __forceinline__ void node6(const Arguments& arguments) {
  separate::node<C, 6>(arguments);
}

template <class C>
__device__ __forceinline__ void node7(const Arguments& arguments) {
  separate::node<C, 7>(arguments);
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

struct Shape : conv::Shape {
  using conv::Shape::Shape;

  // The implicit product; `planes`: of limbs that are split ahead.
  gemm::Extents product(bool channels_last, bool planes = false) const {
    const int64_t of_tap = planes ? gemm::plane_pitch(channels / groups) : channels / groups;
    const int64_t k = filter_height * filter_width * of_tap, pixels = out_height * out_width;
    if (channels_last) return {groups, images * pixels, filters / groups, k};
    return {images * groups, filters / groups, pixels, k};
  }
};

// Of the planes of limbs that are split ahead, by what Shape and Arguments both say; `channels` are those of a group.
template <class Extents>
int64_t plane_vectors(const Extents& e, int64_t channels) {
  return conv::plane_vectors(int64_t(e.images) * e.height * e.width, e.groups, int64_t(e.filters) * e.filter_height * e.filter_width, channels);
}

// What launches depend on, as values, as in gemm/launch.cuh. Of a direct kernel the product has the width of a store and the
// epilogue's counts alone.
struct Plan {
  gemm::Plan product;
  bool channels_last, direct, pointwise, depthwise;
  bool in_workspace;       // where the sums of a separate epilogue are
  int separate_nodes;      // launches after `run`; 0 of a fused epilogue
  int taps_of_step;  // from one of a thread's taps to its next: of a step of the product, of its next vector, or each
  conv::direct::Plan block;  // of a direct kernel
  conv::winograd::Plan winograd;
  int planes;  // limbs of an element, of an image and filters that are split ahead
};

template <class C>
constexpr Plan make_plan() {
  Plan plan = {};
  plan.winograd = conv::winograd::make_plan<C>();
  plan.channels_last = C::channels_last;
  plan.direct = C::direct;
  plan.pointwise = C::pointwise;
  plan.depthwise = C::depthwise;
  plan.separate_nodes = C::separate ? C::Epilogue::nodes : 0;
  plan.in_workspace = C::separate && separate::in_workspace<C>;
  if constexpr (conv::winograd::is_fused<C>) {
    plan.product.tile_k = C::tile_k;
  } else if constexpr (conv::winograd::outputs_of<C> > 0) {
    plan.product = gemm::plan_of<conv::winograd::Product<C>>;
    plan.taps_of_step = 1;
  } else if constexpr (C::direct) {
    plan.taps_of_step = 1;
    plan.block = conv::direct::plan_of<C>;
  } else {
    plan.product = gemm::plan_of<typename separate::RunOf<C>::type>;
    plan.planes = plan.product.planes;
    plan.product.planes = 0;
    plan.taps_of_step = C::channels_last || plan.planes ? C::tile_k : C::threads / C::tile_n;
  }
  plan.product.width = C::align_c;
  plan.product.epilogue_tensors = C::Epilogue::tensors;
  plan.product.epilogue_scalars = C::Epilogue::scalars;
  return plan;
}

template <class C>
constexpr Plan plan_of = make_plan<C>();

// Pointers: x, w, the epilogue's tensors, out. Extents: n, h, w, c, k, r, s, p, q, groups, then the geometry. Launch: raster,
// slices of k, blocks of stream-K. Scalars: those of the epilogue.
inline Arguments bind(const Plan& kernel, void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace) {
  const Shape shape(extents);
  const int64_t pixels = shape.height * shape.width, out_pixels = shape.out_height * shape.out_width;
  const bool image_is_a = kernel.channels_last || kernel.direct;
  const gemm::Extents product = shape.product(image_is_a, kernel.planes > 0);
  Arguments arguments = {};
  arguments.a = pointers[image_is_a ? 0 : 1];
  arguments.b = pointers[image_is_a ? 1 : 0];
  arguments.out = kernel.in_workspace ? workspace : pointers[2 + kernel.product.epilogue_tensors];
  arguments.workspace = workspace;
  arguments.result = pointers[2 + kernel.product.epilogue_tensors];
  gemm::bind_product(kernel.product, product, kernel.direct ? nullptr : launch, arguments);
  const int64_t group_channels = shape.channels / shape.groups, group_filters = shape.filters / shape.groups;
  const int64_t filter_stride = group_filters * product.k;
  if (image_is_a) {
    arguments.lda = shape.channels;
    arguments.stride_a = group_channels;
    arguments.ldb = product.k;
    arguments.stride_b = filter_stride;
    arguments.ldc = shape.filters;
    arguments.stride_c = group_filters;
  } else {
    arguments.lda = product.k;
    arguments.stride_a = kernel.pointwise ? 0 : filter_stride;  // with groups every image would begin with the first again
    arguments.ldb = pixels;
    arguments.stride_b = group_channels * pixels;
    arguments.ldc = out_pixels;
    arguments.stride_c = group_filters * out_pixels;
  }
  gemm::bind_epilogue(kernel.product, pointers + 2, scalars, arguments.epilogue);
  conv::bind_geometry(extents, arguments);

  // `plan` refuses what does not fit 32 bits.
  arguments.image_pitch = static_cast<int>(shape.channels * pixels);
  arguments.row_pitch = static_cast<int>(kernel.channels_last ? shape.width * shape.channels : shape.width);
  arguments.pixel_pitch = static_cast<int>(kernel.channels_last ? shape.channels : 1);
  arguments.channel_pitch = static_cast<int>(kernel.channels_last ? 1 : pixels);
  arguments.radix_inner = kernel.channels_last ? arguments.channels : arguments.filter_width;
  arguments.radix_middle = kernel.channels_last ? arguments.filter_width : arguments.filter_height;
  if (kernel.planes) {
    arguments.radix_inner = static_cast<int>(gemm::plane_pitch(group_channels));
    arguments.radix_middle = arguments.filter_width;
    arguments.pixel_pitch = static_cast<int>(shape.groups * arguments.radix_inner);
    arguments.row_pitch = static_cast<int>(shape.width * arguments.pixel_pitch);
    arguments.image_pitch = static_cast<int>(shape.height * arguments.row_pitch);
  }
  if (arguments.radix_inner > 0 && arguments.radix_middle > 0) {
    const int step = kernel.taps_of_step, rest = step / arguments.radix_inner;
    arguments.step = Taps{step % arguments.radix_inner, rest % arguments.radix_middle, rest / arguments.radix_middle};
  }
  if (kernel.winograd.outputs)
    conv::winograd::bind(kernel.winograd, kernel.channels_last, false, shape, extents, pointers, arguments.result, workspace, arguments);
  return arguments;
}

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace) {
  return bind(plan_of<C>, pointers, extents, launch, scalars, workspace);
}

template <class C>
int64_t workspace_bytes(const int64_t* extents, const int32_t* launch) {
  const Shape shape(extents);
  if (plan_of<C>.in_workspace) return int64_t(sizeof(float)) * shape.images * shape.out_height * shape.out_width * shape.filters;
  if constexpr (conv::winograd::outputs_of<C> > 0) return conv::winograd::workspace_bytes(plan_of<C>.winograd, shape);
  if constexpr (C::direct) return 0;
  const int64_t planes = plan_of<C>.planes ? plan_of<C>.planes * gemm::plane_vector * plane_vectors(shape, shape.channels / shape.groups) : 0;
  return gemm::workspace_bytes(plan_of<C>.product, shape.product(C::channels_last, planes > 0), launch) + planes;
}

// Of Winograd alone.
template <class C>
int64_t transformed_bytes(const int64_t* extents) {
  return conv::winograd::transformed_bytes(plan_of<C>.winograd, Shape(extents));
}

using conv::winograd::use_transformed;

// Elements between which a kernel reaches with 32 bits: of all images where their pixels are rows, else of one product's; and
// padding counts as if it were there.
inline int64_t reached(const Plan& kernel, const Arguments& a) {
  const int64_t rows = a.padded_height, columns = a.padded_width;
  const int64_t of_group = kernel.planes ? gemm::plane_pitch(a.channels) : a.channels;
  const int64_t of_image = kernel.planes ? a.groups * of_group : of_group;
  const int64_t channels = kernel.channels_last || kernel.direct ? int64_t(a.images) * a.groups * of_group : of_image;
  return rows > INT32_MAX / columns || rows * columns > INT32_MAX / channels ? INT64_MAX : rows * columns * channels;
}

// Whether the kernel can compute the call: its geometry makes this output, and its class is the call's.
inline bool takes(const Plan& kernel, const Arguments& a) {
  if (!conv::makes_its_output(a)) return false;
  if (kernel.pointwise && !(conv::one_by_one(a) && (kernel.channels_last || a.groups == 1))) return false;
  if (kernel.depthwise && (a.channels != 1 || a.filters != a.groups)) return false;
  if (kernel.block.window && (a.filter_width != kernel.block.window || a.stride_w != 1 || a.dilation_w != 1)) return false;
  if (kernel.direct && !kernel.depthwise && a.groups > 1 && a.filters / a.groups % kernel.block.filters) return false;
  return (kernel.pointwise && !kernel.direct && !kernel.planes) || reached(kernel, a) <= INT32_MAX;
}

// Writes the launches of one call and returns how many they are; 0 where the kernel cannot compute it.
inline int plan(const Plan& kernel, const Arguments& arguments, Launch* out) {
  if (!takes(kernel, arguments)) return 0;
  if (kernel.winograd.outputs) return conv::winograd::plan(kernel.winograd, kernel.product, kernel.channels_last, arguments, out);
  if (kernel.planes) return conv::plan_planes(kernel.product, plane_vectors(arguments, arguments.channels), arguments, out);
  int count = kernel.direct ? conv::direct::plan(kernel.block, arguments, arguments.out_width, 1, out)
                            : gemm::plan(kernel.product, arguments, out);
  if (count == 0) return 0;
  const int64_t outputs = int64_t(arguments.images) * arguments.out_height * arguments.out_width * arguments.filters;
  for (int node = 0; node < kernel.separate_nodes; ++node)
    if (!gemm::plan_items(1 + node, outputs / kernel.product.width, &out[count++])) return 0;
  return count;
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  return plan(plan_of<C>, arguments, out);
}

// Reads x, w, the epilogue's tensors and out into `extents`; false and a sentence where a call cannot be right.
template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  using conv::Tensors;
  using Stored = conv::winograd::Stored<C>;
  constexpr int align_x = Stored::align_x, align_w = Stored::align_w;
  const Tensors call = {{"x", "w", "out"}, {Tensors::image, Tensors::filters, Tensors::output}, {align_x, align_w, Stored::align_c}};
  if (!conv::check_tensors<C>(call, tensors, count, extents, complaint)) return false;
  const Shape shape(extents);
  if (!conv::check_window<C>(shape, complaint) || !conv::winograd::check_filters<C>(shape, complaint)) return false;
  const int64_t channels = shape.channels / shape.groups, filters = shape.filters / shape.groups;
  const bool planes = plan_of<C>.planes > 0;
  const int64_t sum_length = conv::winograd::outputs_of<C> > 0 ? shape.channels : shape.product(C::channels_last, planes).k;
  if (!conv::check_sums(plan_of<C>.product, sum_length, complaint)) return false;
  if (C::channels_last) {
    const int64_t x = C::depthwise ? shape.channels : channels, out = C::depthwise ? shape.filters : filters;
    if (!conv::check_multiple(C::depthwise ? "c" : "c / groups", x, align_x, complaint)) return false;
    if (!conv::check_multiple(C::depthwise ? "k" : "k / groups", out, Stored::align_c, complaint)) return false;
  } else {
    if (C::pointwise && !conv::check_multiple("h * w", shape.height * shape.width, align_x, complaint)) return false;
    if (!conv::check_multiple("p * q", shape.out_height * shape.out_width, Stored::align_c, complaint)) return false;
  }
  if (!conv::check_multiple("r * s * c / groups", shape.filter_height * shape.filter_width * channels, align_w, complaint)) return false;
  return conv::check_written<Stored>(call, tensors, shape.filters, complaint);
}

#endif  // CUKILN_HOST

}  // namespace conv2d
}  // namespace cukiln
