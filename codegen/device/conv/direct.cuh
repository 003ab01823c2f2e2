// Convolution without tiles of a product, on the CUDA cores: for depthwise problems and for few channels per group, where a
// product would be mostly padding.
//
// A thread computes `pixels` output pixels of `filters` neighbouring filters. With channels last neighbouring threads have
// neighbouring filters, with channels first neighbouring pixels. A block's filters come through shared memory, `taps` at a
// time, as floats. Without a `window` a thread's pixels lie apart, and every tap of each is loaded; with one, which is how many
// columns the filters have, they are neighbours that share what their windows have in common (conv/window.cuh).
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
  // How many come through shared memory at a time: of filters whose columns are known, whole rows.
  static constexpr int taps = C::window > 0 ? C::taps / C::window * C::window : C::taps;
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

  __device__ __forceinline__ Block() {
#pragma unroll
    for (int i = 0; i < C::pixels; ++i)
#pragma unroll
      for (int j = 0; j < C::filters; ++j) sums[i][j] = 0.0f;
  }

  // What the first of a thread's filters sees in the first image. Filters behind the last one read what that reads, and are not
  // written.
  static __device__ __forceinline__ const T* image(const Arguments& arguments) {
    const int filter = first_filter(), known = filter < arguments.filters ? filter : arguments.filters - 1;
    const int channel = C::depthwise ? known : known / (arguments.filters / arguments.groups) * arguments.channels;
    return static_cast<const T*>(arguments.a) + channel * arguments.channel_pitch;
  }

  // Brings taps [first, first + taps) of the block's filters to shared memory, tap by tap.
  static __device__ __forceinline__ void load_filters(const Arguments& arguments, float* shared, int first) {
    const T* const source = static_cast<const T*>(arguments.b);
#pragma unroll 1
    for (int index = static_cast<int>(threadIdx.x); index < tile_k * taps; index += C::threads) {
      const int filter = index / taps, tap = index % taps, of_all = static_cast<int>(blockIdx.y) * tile_k + filter;
      const bool filter_exists = in_bounds(of_all, arguments.filters);  // bounds: direct filter
      const bool tap_exists = in_bounds(first + tap, arguments.k);  // bounds: direct tap
      float value = 0.0f;
      if (filter_exists && tap_exists) value = to_float(load_global<1>(source + arguments.template weight<C::channels_last>(of_all, first, tap)).data[0]);
      store_shared<1>(shared + tap * pitch + filter, Vector<float, 1>{{value}});
    }
  }

  // Of one tap, which lies at `tap` in shared memory.
  static __device__ __forceinline__ void load_weights(float (&weights)[C::filters], const float* tap) {
#pragma unroll
    for (int j = 0; j < C::filters; j += quad) {
      const Vector<float, quad> part = load_shared<quad>(tap + thread_k() * C::filters + j);
#pragma unroll
      for (int w = 0; w < quad; ++w) weights[j + w] = part.data[w];
    }
  }

  // The vector from channel j on of an element of the image that lies at `from`; zero where one of them does not exist.
  static __device__ __forceinline__ Held load(const T* from, int j, bool exists, const Arguments& arguments) {
    const bool channel_exists = !C::depthwise || in_bounds(first_filter() + j, arguments.filters);  // bounds: direct channel
    Held held = {};
    if (exists & channel_exists) {
      from += C::channels_last ? j : j * arguments.channel_pitch;
      if constexpr (bytes_in < 4) {
        held = load_global<width_in>(from);
      } else {
        held = load_global<bytes_in / 4>(reinterpret_cast<const unsigned*>(from));
      }
    }
    return held;
  }

  static __device__ __forceinline__ Vector<T, width_in> values_of(const Held& held) {
    Vector<T, width_in> values;
    __builtin_memcpy(&values, &held, sizeof(values));
    return values;
  }

  // Of a pixel that exists.
  __device__ __forceinline__ void write_pixel(const Arguments& arguments, int pixel, int i) const {
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

// A thread's pixels lie apart.
template <class C, class Arguments>
struct Apart : Block<C, Arguments> {
  using B = Block<C, Arguments>;
  static constexpr int taps_at_once = 1;

  const typename B::T* first;  // where the tap lies of a window whose corner is the image's first element
  Corner corners[C::pixels];
  Taps at = {0, 0, 0};
  Tap tap = {0, 0, 0};

  static __device__ __forceinline__ int pixel(int place, int i) { return place * B::tile_p + B::thread_p() + i * B::threads_p; }

  __device__ __forceinline__ Apart(const Arguments& arguments, int place) : first(B::image(arguments)) {
#pragma unroll
    for (int i = 0; i < C::pixels; ++i) {
      const bool exists = in_bounds(pixel(place, i), arguments.m);  // bounds: direct pixel
      corners[i] = corner_of(arguments, pixel(place, i), exists);
    }
  }

  // Adds one tap of every pixel. All loads are on their way before a sum waits for one.
  __device__ __forceinline__ void add(const float* shared, const Arguments& arguments) {
    float weights[C::filters];
    B::load_weights(weights, shared);
    typename B::Held held[C::pixels][B::channels / B::width_in];
#pragma unroll
    for (int i = 0; i < C::pixels; ++i) {
      const bool exists = inside(arguments, corners[i], tap);
#pragma unroll
      for (int j = 0; j < B::channels; j += B::width_in) held[i][j / B::width_in] = B::load(first + corners[i].offset, j, exists, arguments);
    }
#pragma unroll
    for (int i = 0; i < C::pixels; ++i)
#pragma unroll
      for (int j = 0; j < B::channels; j += B::width_in) {
        const auto values = B::values_of(held[i][j / B::width_in]);
#pragma unroll
        for (int filter = j; filter < (C::depthwise ? j + B::width_in : C::filters); ++filter)
          this->sums[i][filter] = fma(to_float(values.data[filter % B::width_in]), weights[filter], this->sums[i][filter]);
      }
    count(at, arguments.step, arguments);
    const Tap next = tap_at<C::channels_last>(arguments, at);
    first += next.offset - tap.offset;
    tap = next;
  }

  __device__ __forceinline__ void write(const Arguments& arguments, int place) const {
#pragma unroll
    for (int i = 0; i < C::pixels; ++i)
      if (in_bounds(pixel(place, i), arguments.m)) this->write_pixel(arguments, pixel(place, i), i);  // bounds: direct write pixel
  }
};

template <class C, class Arguments>
struct Strip;  // of neighbours: conv/window.cuh

// `place` counts the blocks along the pixels.
template <class C, class Arguments>
__device__ __forceinline__ void run(const Arguments& arguments, int place) {
  using Pixels = typename Choose<(C::window > 0), Strip<C, Arguments>, Apart<C, Arguments>>::type;
  float* const shared = shared_memory<float>();
  Pixels pixels(arguments, place);
#pragma unroll 1
  for (int first = 0; first < arguments.k; first += Pixels::taps) {
    if (first > 0) __syncthreads();  // every thread has used the taps before
    Pixels::load_filters(arguments, shared, first);
    __syncthreads();  // the taps are complete before any thread reads them
    const int end = gemm::smaller(Pixels::taps, arguments.k - first);
#pragma unroll 1
    for (int k = 0; k < end; k += Pixels::taps_at_once) pixels.add(shared + k * Pixels::pitch, arguments);
  }
  pixels.write(arguments, place);
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

// What launches depend on, as values, as in gemm/launch.cuh.
struct Plan {
  int threads, tile_p, tile_k;  // of a block
  int filters, strip;           // of a thread; its neighbouring pixels
  int window;                   // columns of the filters; 0: any
  uint32_t shared_bytes;
};

template <class C>
constexpr Plan plan_of = {C::threads, C::threads / C::threads_k * C::pixels, C::threads_k * C::filters, C::filters,
                          C::window > 0 ? C::pixels : 1, C::window,
                          C::taps * (C::threads_k * C::filters + tap_padding) * static_cast<uint32_t>(sizeof(float))};

// Writes the launch for `phases` outputs with rows of `columns` pixels, in one of which a strip lies, and returns 1; 0 where the
// extents are beyond what it can index.
template <class Arguments>
int plan(const Plan& kernel, const Arguments& a, int64_t columns, int64_t phases, Launch* out) {
  const int64_t strips = a.m / columns * ceil_div(columns, kernel.strip);
  const int64_t across = ceil_div(strips, kernel.tile_p / kernel.strip), down = ceil_div(a.filters, kernel.tile_k);
  if (down > 65535 || across > INT32_MAX / phases || across * kernel.tile_p > INT32_MAX || down * kernel.tile_k > INT32_MAX) return 0;
  out[0] = Launch{0, {static_cast<uint32_t>(across * phases), static_cast<uint32_t>(down), 1},
                  {static_cast<uint32_t>(kernel.threads), 1, 1}, kernel.shared_bytes};
  return 1;
}

#endif  // CUKILN_HOST

}  // namespace direct
}  // namespace conv
}  // namespace cukiln
