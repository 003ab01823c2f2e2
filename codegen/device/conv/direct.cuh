// Convolution without tiles of a product, on the CUDA cores: for depthwise problems and for few channels per group, where a
// product would be mostly padding.
//
// A thread computes `pixels` output pixels of `filters` neighbouring filters. With channels last neighbouring threads have
// neighbouring filters, with channels first neighbouring pixels. A block's filters come through shared memory, `taps` at a
// time, as floats.
//
// `Arguments` has, beside what conv/gather.cuh reads, how many filters, groups, and channels of a group there are (of a
// gradient of the image, its channels are the filters); the image is `a`, with the number of its output pixels in m, and the
// number of taps is k; `weight<channels_last>(filter, first, tap)`, where b has tap first + tap of a filter; and
// `output<channels_last>(pixel)`, where an output pixel has its filters.
#pragma once

namespace cukiln {
namespace conv {
namespace direct {

// Floats between the rows of taps beyond a block's filters: vectors stay aligned, and threads that store a column of taps
// meet in fewer banks.
enum { tap_padding = 4 };

// The first filter of an output pixel, and with channels first the elements to the next one; with channels last that is 1.
struct Output {
  int64_t first;
  int pitch;
};

#if defined(CUKILN_DEVICE)

template <class C, class Arguments>
struct Block {
  using T = typename C::Input;
  static constexpr int threads_p = C::threads / C::threads_k;
  static constexpr int tile_k = C::threads_k * C::filters, tile_p = threads_p * C::pixels;
  static constexpr int pitch = tile_k + tap_padding;
  static constexpr int quad = C::filters < 4 ? C::filters : 4;
  // Channels of a tap of a thread: one that all its filters see, or one of each.
  static constexpr int channels = C::depthwise ? C::filters : 1;
  // Elements of one access to the image and to the output.
  static constexpr int width_in = channels < C::align_a ? channels : C::align_a;
  // What holds them: words, because nvcc 13.2 takes vectors of halves that may be zero apart.
  static constexpr int bytes_in = width_in * static_cast<int>(sizeof(T));
  using Held = typename Choose<(bytes_in < 4), Vector<T, width_in>, Vector<unsigned, bytes_in / 4 + (bytes_in < 4)>>::type;
  static constexpr int width_out = C::filters < C::align_c ? C::filters : C::align_c;
  static_assert(C::threads % C::threads_k == 0 && C::threads % 32 == 0, "a block is whole warps and whole rows of threads");

  float sums[C::pixels][C::filters];

  static __device__ __forceinline__ int thread_k() {
    return C::channels_last ? static_cast<int>(threadIdx.x) % C::threads_k : static_cast<int>(threadIdx.x) / threads_p;
  }
  static __device__ __forceinline__ int thread_p() {
    return C::channels_last ? static_cast<int>(threadIdx.x) / C::threads_k : static_cast<int>(threadIdx.x) % threads_p;
  }
  static __device__ __forceinline__ int first_filter() { return static_cast<int>(blockIdx.y) * tile_k + thread_k() * C::filters; }
  static __device__ __forceinline__ int pixel(int place, int i) { return place * tile_p + thread_p() + i * threads_p; }

  __device__ __forceinline__ Block() {
#pragma unroll
    for (int i = 0; i < C::pixels; ++i)
#pragma unroll
      for (int j = 0; j < C::filters; ++j) sums[i][j] = 0.0f;
  }

  // Brings taps [first, first + C::taps) of the block's filters to shared memory, tap by tap.
  static __device__ __forceinline__ void load_filters(const Arguments& arguments, float* shared, int first) {
    const T* const source = static_cast<const T*>(arguments.b);
#pragma unroll 1
    for (int index = static_cast<int>(threadIdx.x); index < tile_k * C::taps; index += C::threads) {
      const int filter = index / C::taps, tap = index % C::taps, of_all = static_cast<int>(blockIdx.y) * tile_k + filter;
      const bool filter_exists = in_bounds(of_all, arguments.filters);  // bounds: direct filter
      const bool tap_exists = in_bounds(first + tap, arguments.k);  // bounds: direct tap
      float value = 0.0f;
      if (filter_exists && tap_exists) value = to_float(load_global<1>(source + arguments.template weight<C::channels_last>(of_all, first, tap)).data[0]);
      store_shared<1>(shared + tap * pitch + filter, Vector<float, 1>{{value}});
    }
  }

  static __device__ __forceinline__ Held load(const T* from) {
    if constexpr (bytes_in < 4) {
      return load_global<width_in>(from);
    } else {
      return load_global<bytes_in / 4>(reinterpret_cast<const unsigned*>(from));
    }
  }

  // Adds one tap of every pixel: it lies at `first` of a window whose corner is the image's first element. All loads are on
  // their way before a sum waits for one; what does not exist is zero.
  __device__ __forceinline__ void add(const T* first, const Corner (&corners)[C::pixels], const Tap& tap,
                                      const float (&weights)[C::filters], const Arguments& arguments) {
    Held held[C::pixels][channels / width_in];
#pragma unroll
    for (int i = 0; i < C::pixels; ++i) {
      const bool pixel_exists = inside(arguments, corners[i], tap);
#pragma unroll
      for (int j = 0; j < channels; j += width_in) {
        const bool channel_exists = !C::depthwise || in_bounds(first_filter() + j, arguments.filters);  // bounds: direct channel
        held[i][j / width_in] = Held{};
        if (pixel_exists & channel_exists)
          held[i][j / width_in] = load(first + corners[i].offset + (C::channels_last ? j : j * arguments.channel_pitch));
      }
    }
#pragma unroll
    for (int i = 0; i < C::pixels; ++i)
#pragma unroll
      for (int j = 0; j < channels; j += width_in) {
        Vector<T, width_in> values;
        __builtin_memcpy(&values, &held[i][j / width_in], sizeof(values));
#pragma unroll
        for (int filter = j; filter < (C::depthwise ? j + width_in : C::filters); ++filter)
          sums[i][filter] = fma(to_float(values.data[filter % width_in]), weights[filter], sums[i][filter]);
      }
  }

  // Of a pixel that exists.
  __device__ __forceinline__ void write(const Arguments& arguments, int pixel, int i) const {
    const Output output = arguments.template output<C::channels_last>(pixel);
#pragma unroll
    for (int j = 0; j < C::filters; j += width_out) {
      const int filter = first_filter() + j;
      if (!in_bounds(filter, arguments.filters)) continue;  // bounds: direct write filter
      const int64_t offset = output.first + (C::channels_last ? filter : int64_t(filter) * output.pitch);
      Vector<float, width_out> value;
#pragma unroll
      for (int w = 0; w < width_out; ++w) value.data[w] = sums[i][j + w];
      C::Epilogue::apply(value, Position{filter, filter, offset}, arguments.epilogue);
      Vector<typename C::Output, width_out> rounded;
#pragma unroll
      for (int w = 0; w < width_out; ++w) rounded.data[w] = from_float<typename C::Output>(value.data[w]);
      store_global<width_out>(static_cast<typename C::Output*>(arguments.out) + offset, rounded);
    }
  }
};

// `place` counts the blocks along the pixels.
template <class C, class Arguments>
__device__ __forceinline__ void run(const Arguments& arguments, int place) {
  using B = Block<C, Arguments>;
  float* const shared = shared_memory<float>();
  const int filter = B::first_filter();
  // Filters behind the last one read what the last one reads, and are not written.
  const int known = filter < arguments.filters ? filter : arguments.filters - 1;
  const int channel = C::depthwise ? known : known / (arguments.filters / arguments.groups) * arguments.channels;
  const typename C::Input* at_tap = static_cast<const typename C::Input*>(arguments.a) + channel * arguments.channel_pitch;
  Corner corners[C::pixels];
#pragma unroll
  for (int i = 0; i < C::pixels; ++i) {
    const bool exists = in_bounds(B::pixel(place, i), arguments.m);  // bounds: direct pixel
    corners[i] = corner_of(arguments, B::pixel(place, i), exists);
  }
  B block;
  Taps at = {0, 0, 0};
  Tap tap = {0, 0, 0};
#pragma unroll 1
  for (int first = 0; first < arguments.k; first += C::taps) {
    if (first > 0) __syncthreads();  // every thread has used the taps before
    B::load_filters(arguments, shared, first);
    __syncthreads();  // the taps are complete before any thread reads them
    const int end = gemm::smaller(C::taps, arguments.k - first);
#pragma unroll 1
    for (int k = 0; k < end; ++k) {
      float weights[C::filters];
#pragma unroll
      for (int j = 0; j < C::filters; j += B::quad) {
        const Vector<float, B::quad> part = load_shared<B::quad>(shared + k * B::pitch + B::thread_k() * C::filters + j);
#pragma unroll
        for (int w = 0; w < B::quad; ++w) weights[j + w] = part.data[w];
      }
      block.add(at_tap, corners, tap, weights, arguments);
      count(at, arguments.step, arguments);
      const Tap next = tap_at<C::channels_last>(arguments, at);
      at_tap += next.offset - tap.offset;
      tap = next;
    }
  }
#pragma unroll
  for (int i = 0; i < C::pixels; ++i)
    if (in_bounds(B::pixel(place, i), arguments.m)) block.write(arguments, B::pixel(place, i), i);  // bounds: direct write pixel
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

template <class C>
constexpr uint32_t shared_bytes() {
  return C::taps * (C::threads_k * C::filters + tap_padding) * sizeof(float);
}

#endif  // CUKILN_HOST

}  // namespace direct
}  // namespace conv
}  // namespace cukiln
