// The entry points of the gradient of the filters, and the launch code that calls them, for every way of computing it.
#pragma once

namespace cukiln {
namespace conv2d_wgrad {

#if defined(CUKILN_DEVICE)

using gemm::clear, gemm::reduce;

// With channels last a 1 x 1 filter that meets every pixel of the image is a product of stored matrices.
template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  if constexpr (C::direct) {
    direct::run<C>(arguments);
  } else if constexpr (C::pointwise) {
    gemm::multiply_stored<C>(arguments);
  } else {
    gemm::multiply<C, tensor::Feed<C>, simt::Feed<C>>(arguments);
  }
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

struct Shape : conv::Shape {
  using conv::Shape::Shape;

  int64_t pixels() const { return out_height * out_width; }

  // The implicit product; of a direct kernel all groups are one matrix.
  gemm::Extents product(bool direct) const {
    const int64_t n = filter_height * filter_width * (channels / groups), k = images * pixels();
    if (direct) return {1, filters, n, k};
    return {groups, filters / groups, n, k};
  }
};

// What launches depend on, as values, as in gemm/launch.cuh.
struct Plan {
  gemm::Plan product;
  bool channels_last, direct, pointwise, depthwise;
  int pixels_of_step;  // from one of a thread's pixels of the image to its next
  int filters;         // of a thread of a direct kernel
};

template <class C>
constexpr Plan make_plan() {
  Plan plan = {};
  plan.channels_last = C::channels_last;
  plan.direct = C::direct;
  plan.pointwise = C::pointwise;
  plan.depthwise = C::depthwise;
  if constexpr (C::direct) {
    plan.product = {C::split, C::tile_m, C::tile_n, C::tile_k, C::threads, C::align_c, 0, sizeof(float), direct::shared_bytes<C>(),
                    C::Epilogue::tensors, C::Epilogue::scalars};
    plan.pixels_of_step = C::tile_k;
    plan.filters = C::filters;
  } else {
    constexpr int rows_at_once = C::threads / (C::tile_n / C::align_b);
    plan.product = gemm::plan_of<C>;
    plan.pixels_of_step = rows_at_once < C::tile_k ? rows_at_once : C::tile_k;
  }
  return plan;
}

template <class C>
constexpr Plan plan_of = make_plan<C>();

// `plan` refuses what does not fit 32 bits. Where there is one row of outputs, its stride means nothing.
inline Walk walk_of(const Arguments& a, int pixels) {
  const int rows = pixels / a.out_width, columns = pixels % a.out_width, images = rows / a.out_height;
  const unsigned step_w = unsigned(columns) * a.stride_w, step_h = unsigned(rows % a.out_height) * a.stride_h;
  const unsigned row_h = a.out_height == 1 ? 1 : a.stride_h, row_w = a.out_width == 1 ? 1 : unsigned(a.out_width) * a.stride_w;
  const unsigned image_h = a.out_height * row_h;
  return Walk{static_cast<int>(step_w), static_cast<int>(step_h), static_cast<int>(row_w), static_cast<int>(row_h),
              static_cast<int>(image_h),
              step_w * a.pixel_pitch + step_h * a.row_pitch + unsigned(images) * a.image_pitch,
              row_h * a.row_pitch - row_w * a.pixel_pitch, unsigned(a.image_pitch) - image_h * a.row_pitch};
}

// Pointers: dy, x, the epilogue's tensors, dw. Extents: n, h, w, c, k, r, s, p, q, groups, then the geometry. Launch: raster,
// slices of k, blocks of stream-K. Scalars: those of the epilogue.
inline Arguments bind(const Plan& kernel, void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace) {
  const Shape shape(extents);
  const gemm::Extents product = shape.product(kernel.direct);
  const int64_t in_pixels = shape.height * shape.width, pixels = shape.pixels();
  Arguments arguments = {};
  arguments.a = pointers[0];
  arguments.b = pointers[1];
  arguments.out = pointers[2 + kernel.product.epilogue_tensors];
  arguments.workspace = workspace;
  gemm::bind_product(kernel.product, product, launch, arguments);
  arguments.lda = kernel.channels_last ? shape.filters : pixels;
  arguments.ldb = shape.channels;
  arguments.ldc = product.n;
  arguments.stride_a = product.m * (kernel.channels_last ? 1 : pixels);
  arguments.stride_b = shape.channels / shape.groups * (kernel.channels_last ? 1 : in_pixels);
  arguments.stride_c = product.m * product.n;
  gemm::bind_epilogue(kernel.product, pointers + 2, scalars, arguments.epilogue);
  conv::bind_geometry(extents, arguments);

  arguments.image_pitch = static_cast<int>(shape.channels * in_pixels);
  arguments.row_pitch = static_cast<int>(kernel.channels_last ? shape.width * shape.channels : shape.width);
  arguments.pixel_pitch = static_cast<int>(kernel.channels_last ? shape.channels : 1);
  arguments.channel_pitch = static_cast<int>(kernel.channels_last ? 1 : in_pixels);
  if (arguments.out_height > 0 && arguments.out_width > 0) {
    arguments.walk = walk_of(arguments, kernel.pixels_of_step);
    arguments.step_images = static_cast<int>(kernel.product.tile_k / pixels);
    arguments.step_within = static_cast<int>(kernel.product.tile_k % pixels);
    arguments.between_images = (shape.filters - 1) * pixels;
  }
  return arguments;
}

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars, void* workspace) {
  return bind(plan_of<C>, pointers, extents, launch, scalars, workspace);
}

template <class C>
int64_t workspace_bytes(const int64_t* extents, const int32_t* launch) {
  return gemm::workspace_bytes(plan_of<C>.product, Shape(extents).product(C::direct), launch);
}

// Whether 32 bits reach every element of all images, padding included, and count the rows and columns of several images.
constexpr int64_t longest_axis = int64_t(1) << 28;
inline bool is_reached(const Arguments& a) {
  const int64_t rows = a.padded_height, columns = a.padded_width;
  const int64_t channels = int64_t(a.images) * a.groups * a.channels;
  return rows <= longest_axis && columns <= longest_axis && rows <= INT32_MAX / columns && rows * columns <= INT32_MAX / channels;
}

// Whether the kernel can compute the call: its geometry makes this output, and its class is the call's.
inline bool takes(const Plan& kernel, const Arguments& a) {
  if (!conv::makes_its_output(a)) return false;
  if (kernel.pointwise && !(conv::one_by_one(a) && kernel.channels_last)) return false;
  if (kernel.direct && a.channels != 1) return false;
  if (kernel.depthwise && a.filters != a.groups) return false;
  if (kernel.direct && !kernel.depthwise && a.filters / a.groups % kernel.filters) return false;
  return (kernel.pointwise && !kernel.direct) || is_reached(a);
}

// Writes the launches of one call and returns how many they are; 0 where the kernel cannot compute it.
inline int plan(const Plan& kernel, const Arguments& arguments, Launch* out) {
  return takes(kernel, arguments) ? gemm::plan(kernel.product, arguments, out) : 0;
}

template <class C>
int plan(const Arguments& arguments, Launch* out) {
  return plan(plan_of<C>, arguments, out);
}

// Reads dy, x, the epilogue's tensors and dw into `extents`; false and a sentence where a call cannot be right.
template <class C>
bool check(const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  using conv::Tensors;
  const Tensors call = {{"dy", "x", "dw"}, {Tensors::output, Tensors::image, Tensors::filters}, {C::align_a, C::align_b, C::align_c}};
  if (!conv::check_tensors<C>(call, tensors, count, extents, complaint)) return false;
  const Shape shape(extents);
  const int64_t channels = shape.channels / shape.groups, filters = shape.filters / shape.groups;
  if (!conv::check_sums(plan_of<C>.product, shape.product(C::direct).k, complaint)) return false;
  if (C::channels_last) {
    const int64_t dy = C::depthwise ? shape.filters : filters, x = C::depthwise ? shape.channels : channels;
    if (!conv::check_multiple(C::depthwise ? "k" : "k / groups", dy, C::align_a, complaint)) return false;
    if (!conv::check_multiple(C::depthwise ? "c" : "c / groups", x, C::align_b, complaint)) return false;
  } else if (!conv::check_multiple("p * q", shape.pixels(), C::align_a, complaint)) {
    return false;
  }
  if (!conv::check_multiple("r * s * c / groups", shape.filter_height * shape.filter_width * channels, C::align_c, complaint)) return false;
  return conv::check_written<C>(call, tensors, shape.filters, complaint);
}

#endif  // CUKILN_HOST

}  // namespace conv2d_wgrad
}  // namespace cukiln
