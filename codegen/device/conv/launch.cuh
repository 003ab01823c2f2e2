// Launch code that every convolution shares, forward or a gradient: what a call's tensors and numbers show, and its checks.
#pragma once

namespace cukiln {
namespace conv {

#if defined(CUKILN_HOST)

// What a call's tensors show, in the order of the launch ABI's extents.
constexpr int shape_extents = 10;
struct Shape {
  int64_t images, height, width, channels, filters, filter_height, filter_width, out_height, out_width, groups;

  explicit Shape(const int64_t* extents)
      : images(extents[0]), height(extents[1]), width(extents[2]), channels(extents[3]), filters(extents[4]),
        filter_height(extents[5]), filter_width(extents[6]), out_height(extents[7]), out_width(extents[8]),
        groups(extents[9] < 1 ? 1 : extents[9]) {}
};

// The attributes, which stand behind them: no tensor shows them.
enum { stride_h = shape_extents, stride_w, top, bottom, left, right, dilation_h, dilation_w };

// As int; -1, which no geometry has, where it does not fit.
inline int as_distance(int64_t value) { return value >= 0 && value <= INT32_MAX ? static_cast<int>(value) : -1; }

// An axis of the image with its padding; 0 where that does not fit.
inline int padded_extent(int64_t extent, int64_t before, int64_t behind) {
  const int64_t first = as_distance(before), last = as_distance(behind);
  return first < 0 || last < 0 ? 0 : gemm::as_extent(extent + first + last);
}

// Channels of a group; 0 where all of them do not fit, or groups do not divide them.
inline int of_group(int64_t channels, int64_t groups) {
  return gemm::as_extent(channels) && channels % groups == 0 ? gemm::as_extent(channels / groups) : 0;
}

// The geometry's members of an operator's Arguments; `channels` are those of a group.
template <class Arguments>
void bind_geometry(const int64_t* extents, Arguments& arguments) {
  const Shape shape(extents);
  arguments.images = gemm::as_extent(shape.images);
  arguments.height = gemm::as_extent(shape.height);
  arguments.width = gemm::as_extent(shape.width);
  arguments.filters = gemm::as_extent(shape.filters);
  arguments.filter_height = gemm::as_extent(shape.filter_height);
  arguments.filter_width = gemm::as_extent(shape.filter_width);
  arguments.out_height = gemm::as_extent(shape.out_height);
  arguments.out_width = gemm::as_extent(shape.out_width);
  arguments.groups = gemm::as_extent(shape.groups);
  arguments.channels = of_group(shape.channels, shape.groups);
  arguments.stride_h = as_distance(extents[stride_h]);
  arguments.stride_w = as_distance(extents[stride_w]);
  arguments.padding_h = as_distance(extents[top]);
  arguments.padding_w = as_distance(extents[left]);
  arguments.padded_height = padded_extent(shape.height, extents[top], extents[bottom]);
  arguments.padded_width = padded_extent(shape.width, extents[left], extents[right]);
  arguments.dilation_h = as_distance(extents[dilation_h]);
  arguments.dilation_w = as_distance(extents[dilation_w]);
}

// Output pixels along a padded axis; 0 where there are none.
inline int64_t output_extent(int64_t padded, int64_t filter, int64_t dilation, int64_t stride) {
  const int64_t rest = padded - dilation * (filter - 1) - 1;
  return stride < 1 || dilation < 1 || rest < 0 ? 0 : rest / stride + 1;
}

// Whether every extent fits and the geometry makes this output.
template <class Arguments>
bool makes_its_output(const Arguments& a) {
  const bool complete = a.batch && a.m && a.n && a.k && a.images && a.height && a.width && a.filters && a.filter_height &&
      a.filter_width && a.out_height && a.out_width && a.groups && a.channels;
  return complete && a.filters % a.groups == 0 &&
      output_extent(a.padded_height, a.filter_height, a.dilation_h, a.stride_h) == a.out_height &&
      output_extent(a.padded_width, a.filter_width, a.dilation_w, a.stride_w) == a.out_width;
}

// Whether every window is one pixel and every pixel has its window.
template <class Arguments>
bool one_by_one(const Arguments& a) {
  return a.filter_height == 1 && a.filter_width == 1 && a.stride_h == 1 && a.stride_w == 1 && a.padded_height == a.height &&
      a.padded_width == a.width;
}

// A tensor of four axes, packed.
inline bool check_packed(const char* name, const TensorView& tensor, const char* axes, Complaint complaint) {
  if (tensor.rank != 4) CUKILN_REFUSE(complaint, "ValueError: %s has rank %d; rank 4 (%s) is allowed", name, tensor.rank, axes);
  int64_t packed = 1;
  for (int axis = 3; axis >= 0; --axis) {
    if (tensor.shape[axis] < 1) CUKILN_REFUSE(complaint, "ValueError: %s is empty; every extent must be at least 1", name);
    if (tensor.shape[axis] > 1 && tensor.strides[axis] != packed)
      CUKILN_REFUSE(complaint, "ValueError: %s has stride %lld along axis %d; it must be packed (stride %lld)", name,
                    static_cast<long long>(tensor.strides[axis]), axis, static_cast<long long>(packed));
    packed *= tensor.shape[axis];
  }
  return true;
}

inline Matrix as_row(const TensorView& tensor) { return cukiln::as_row(merged_extent(tensor, 0, tensor.rank)); }

inline bool check_multiple(const char* what, int64_t value, int unit, Complaint complaint) {
  if (value % unit)
    CUKILN_REFUSE(complaint, "ValueError: %s is %lld; this kernel moves %d elements at once, so it must be a multiple of %d: "
                  "look up the kernel of this shape", what, static_cast<long long>(value), unit, unit);
  return true;
}

// Whether the accumulators of a kernel over a ring hold sums of so many products.
inline bool check_sums(const gemm::Plan& product, int64_t k, Complaint complaint) {
  if (product.longest_k > 0 && k > product.longest_k)
    CUKILN_REFUSE(complaint, "ValueError: a sum has %lld products; the accumulators of this kernel hold %d: look up the kernel of this "
                  "shape", static_cast<long long>(k), product.longest_k);
  return true;
}

// Whether filters have the columns that a kernel of neighbouring pixels is made for; of others any number is taken.
template <class C>
bool check_window(const Shape& shape, Complaint complaint) {
  if constexpr (C::direct) {
    if (C::window > 0 && shape.filter_width != C::window)
      CUKILN_REFUSE(complaint, "ValueError: w has %lld columns; this kernel is for filters of %d: look up the kernel of this shape",
                    static_cast<long long>(shape.filter_width), C::window);
  }
  return true;
}

// The three tensors of a convolution in the order of a call, which writes the last: what each is, or the gradient of, and
// elements of an access to it.
struct Tensors {
  enum Role { image, filters, output };
  const char* names[3];
  Role roles[3];
  int aligns[3];
};

// Reads the extents of tensors that are packed, by role; false and a sentence where they do not fit each other.
inline bool read_extents(const char* const (&names)[3], const int64_t* const (&shapes)[3], bool channels_last, int64_t* extents,
                         Complaint complaint) {
  const int64_t *x = shapes[Tensors::image], *w = shapes[Tensors::filters], *out = shapes[Tensors::output];
  const int channel = channels_last ? 3 : 1, row = channels_last ? 1 : 2, column = row + 1;
  char what[96];
  snprintf(what, sizeof(what), "n differs between %s and %s", names[Tensors::image], names[Tensors::output]);
  if (!agree(what, x[0], out[0], complaint)) return false;
  snprintf(what, sizeof(what), "k differs between %s and %s", names[Tensors::filters], names[Tensors::output]);
  if (!agree(what, w[0], out[channel], complaint)) return false;
  if (x[channel] % w[channel])
    CUKILN_REFUSE(complaint, "ValueError: %s has %lld channels and %s %lld for each group, which do not divide them",
                  names[Tensors::image], static_cast<long long>(x[channel]), names[Tensors::filters], static_cast<long long>(w[channel]));
  const int64_t groups = x[channel] / w[channel];
  if (w[0] % groups)
    CUKILN_REFUSE(complaint, "ValueError: %lld filters cannot be divided among %lld groups", static_cast<long long>(w[0]),
                  static_cast<long long>(groups));
  const int64_t values[] = {x[0], x[row], x[column], x[channel], w[0], w[row], w[column], out[row], out[column], groups};
  for (int i = 0; i < shape_extents; ++i) extents[i] = values[i];
  return true;
}

// Reads the tensors of a call into `extents`, all but the epilogue's; false and a sentence where one of them cannot be right.
template <class C>
bool check_tensors(const Tensors& call, const TensorView* tensors, int count, int64_t* extents, Complaint complaint) {
  constexpr int more = C::Epilogue::tensors;
  if (count != 3 + more)
    CUKILN_REFUSE(complaint, "TypeError: %d tensors were given; this kernel takes %d: %s, %s, %d of the epilogue and %s", count, 3 + more,
                  call.names[0], call.names[1], more, call.names[2]);
  const char* const axes[][2] = {{"n, c, h, w", "n, h, w, c"}, {"k, c / groups, r, s", "k, r, s, c / groups"}, {"n, k, p, q", "n, p, q, k"}};
  const char* names[3];
  const int64_t* shapes[3];
  for (int i = 0; i < 3; ++i) {
    const TensorView& tensor = tensors[i < 2 ? i : 2 + more];
    const ElementType type = i < 2 ? element_type<typename C::Input> : element_type<typename C::Output>;
    const int size = i < 2 ? sizeof(typename C::Input) : sizeof(typename C::Output), role = call.roles[i];
    if (!check_pointer(call.names[i], tensor, type, tensors[0].device, size * call.aligns[i], complaint, call.names[0])) return false;
    if (!check_packed(call.names[i], tensor, axes[role][C::channels_last], complaint)) return false;
    names[role] = call.names[i];
    shapes[role] = tensor.shape;
  }
  return read_extents(names, shapes, C::channels_last, extents, complaint);
}

// The epilogue's tensors: a bias has a number for each filter, all others have the shape of out, which is called `name`.
template <class C>
bool check_epilogue(const TensorView* tensors, const TensorView& out, const char* out_name, int64_t filters, Complaint complaint) {
  for (int i = 0; i < C::Epilogue::tensors; ++i) {
    const EpilogueTensor kind = C::Epilogue::tensor(i);
    const bool vector = kind == EpilogueTensor::bias_m || kind == EpilogueTensor::bias_n;
    const bool bits = kind == EpilogueTensor::mask_bits;
    const char* name = vector ? "bias" : bits || kind == EpilogueTensor::mask ? "mask" : "residual";
    const int size = C::Epilogue::element_bytes(i), width = bits || kind == EpilogueTensor::bias_m ? 1 : C::align_c;
    if (!check_pointer(name, tensors[i], C::Epilogue::element(i), out.device, size * width, complaint, out_name)) return false;
    if (vector || bits) {
      const int64_t length = bits ? ceil_div(as_row(out).columns, 32) : filters;
      if (!check_vector(name, tensors[i], length, complaint)) return false;
    } else {
      char axes[32];
      snprintf(axes, sizeof(axes), "as %s", out_name);
      if (!check_packed(name, tensors[i], axes, complaint)) return false;
      if (!check_same_shape(name, tensors[i], out_name, out, complaint)) return false;
    }
    if (!check_apart(name, tensors[i], as_row(tensors[i]), size, out, as_row(out), sizeof(typename C::Output), complaint, out_name))
      return false;
  }
  return true;
}

// Of a call whose extents are right: whether what is written lies apart from what is read, and the epilogue's tensors.
template <class C>
bool check_written(const Tensors& call, const TensorView* tensors, int64_t filters, Complaint complaint) {
  const TensorView& out = tensors[2 + C::Epilogue::tensors];
  for (int i = 0; i < 2; ++i)
    if (!check_apart(call.names[i], tensors[i], as_row(tensors[i]), sizeof(typename C::Input), out, as_row(out), sizeof(typename C::Output),
                     complaint, call.names[2]))
      return false;
  return check_epilogue<C>(tensors + 2, out, call.names[2], filters, complaint);
}

#endif  // CUKILN_HOST

}  // namespace conv
}  // namespace cukiln
