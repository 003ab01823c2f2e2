// The gradient of filters of one channel each, without a product of matrices, on the CUDA cores: depthwise convolutions, also
// with several filters for a channel. A product would have one column for each element of such a filter.
//
// A block has tile_m filters, tile_n elements of them and a slice of the output pixels. Its threads divide the filters and the
// pixels: each adds up the products of its own pixels, one after the other, for `filters` neighbouring filters and all of the
// elements. Then the block's threads add up what they have. With channels last neighbouring threads have neighbouring filters,
// with channels first neighbouring pixels.
#pragma once

namespace cukiln {
namespace conv2d_wgrad {
namespace direct {

#if defined(CUKILN_DEVICE)

template <class C>
struct Block {
  using T = typename C::Input;
  static constexpr int threads_p = C::tile_k;
  // Threads of a warp that have different pixels, and how many of the block's warps share a filter.
  static constexpr int lanes_p = C::channels_last ? (C::threads_k < 32 ? 32 / C::threads_k : 1) : (threads_p < 32 ? threads_p : 32);
  static constexpr int rows = threads_p / lanes_p;
  // Elements of one access to dy, and to the image where neighbouring filters have neighbouring channels.
  static constexpr int width_dy = !C::channels_last ? 1 : C::filters < C::align_a ? C::filters : C::align_a;
  static constexpr int width_x = C::filters < C::align_b ? C::filters : C::align_b;
  static constexpr int quad = C::filters < 4 ? C::filters : 4;
  static_assert(C::threads == C::threads_k * threads_p && C::threads % 32 == 0, "a block is whole warps and whole rows of threads");
  static_assert(C::tile_m == C::threads_k * C::filters, "threads must cover the filters");

  float sums[C::tile_n][C::filters];

  static __device__ __forceinline__ int thread_k() {
    return C::channels_last ? static_cast<int>(threadIdx.x) % C::threads_k : static_cast<int>(threadIdx.x) / threads_p;
  }
  static __device__ __forceinline__ int thread_p() {
    return C::channels_last ? static_cast<int>(threadIdx.x) / C::threads_k : static_cast<int>(threadIdx.x) % threads_p;
  }

  __device__ __forceinline__ Block() {
#pragma unroll
    for (int i = 0; i < C::tile_n; ++i)
#pragma unroll
      for (int j = 0; j < C::filters; ++j) sums[i][j] = 0.0f;
  }

  // Adds the products of one pixel. `dy` is where it has the thread's first filter, `image` where the corner of the window
  // would be in that filter's channel, `left` how many filters there are from there.
  __device__ __forceinline__ void add(const Arguments& arguments, const T* dy, const T* image, const Place& corner, int element, int left) {
    float factors[C::filters];
#pragma unroll
    for (int j = 0; j < C::filters; j += width_dy) {
      Vector<T, width_dy> part = {};
      if (in_bounds(j, left)) part = load_global<width_dy>(dy + j * (C::channels_last ? 1 : arguments.lda));  // bounds: direct filter
#pragma unroll
      for (int w = 0; w < width_dy; ++w) factors[j + w] = to_float(part.data[w]);
    }
    // Counted, not divided: the same for all threads of a block.
    int r = element / arguments.filter_width, s = element - r * arguments.filter_width;
#pragma unroll
    for (int i = 0; i < C::tile_n; ++i) {
      const int down = r * arguments.dilation_h, right = s * arguments.dilation_w;
      const T* const at = image + static_cast<int>(corner.offset + unsigned(down) * arguments.row_pitch + unsigned(right) * arguments.pixel_pitch);
      // No bounds check: the sums of elements behind the filter's last are unused. Not loading them saves bandwidth.
      const bool exists = element + i < arguments.n;
      if (exists && inside(arguments, corner.h + down, corner.w + right)) multiply(arguments, i, at, factors, left);
      const bool last = s + 1 == arguments.filter_width;
      s = last ? 0 : s + 1;
      r += last;
    }
  }

  __device__ __forceinline__ void multiply(const Arguments& arguments, int i, const T* at, const float (&factors)[C::filters], int left) {
    if constexpr (C::depthwise) {
#pragma unroll
      for (int j = 0; j < C::filters; j += width_x) {
        if (!in_bounds(j, left)) continue;  // bounds: direct channel
        const Vector<T, width_x> part = load_global<width_x>(at + j * arguments.channel_pitch);
#pragma unroll
        for (int w = 0; w < width_x; ++w) sums[i][j + w] = fma(factors[j + w], to_float(part.data[w]), sums[i][j + w]);
      }
    } else {
      const float value = to_float(load_global<1>(at).data[0]);
#pragma unroll
      for (int j = 0; j < C::filters; ++j) sums[i][j] = fma(factors[j], value, sums[i][j]);
    }
  }

  // Adds up the threads' sums in one order, element by element, and hands them on.
  __device__ __forceinline__ void write(const Arguments& arguments, const Tile& tile, float* shared) const {
    const bool first_lane = thread_p() % lanes_p == 0;
    float* const row = shared + thread_p() / lanes_p * C::tile_m + thread_k() * C::filters;
#pragma unroll
    for (int i = 0; i < C::tile_n; ++i) {
      if (i > 0) __syncthreads();  // every thread has read the sums of the element before
#pragma unroll
      for (int j = 0; j < C::filters; j += quad) {
        Vector<float, quad> part;
#pragma unroll
        for (int w = 0; w < quad; ++w) {
          float sum = sums[i][j + w];
#pragma unroll
          for (int apart = 1; apart < lanes_p; apart *= 2) sum += shuffle_xor(sum, apart * (C::channels_last ? C::threads_k : 1));
          part.data[w] = sum;
        }
        if (first_lane) store_shared<quad>(row + j, part);
      }
      __syncthreads();  // the sums of all warps are complete
#pragma unroll 1
      for (int filter = static_cast<int>(threadIdx.x); filter < C::tile_m; filter += C::threads) {
        Vector<float, 1> total = load_shared<1>(shared + filter);
#pragma unroll
        for (int r = 1; r < rows; ++r) total.data[0] += load_shared<1>(shared + r * C::tile_m + filter).data[0];
        const int of_all = tile.row * C::tile_m + filter, element = tile.column * C::tile_n + i;
        const bool filter_exists = in_bounds(of_all, arguments.m);  // bounds: direct write filter
        const bool element_exists = in_bounds(element, arguments.n);  // bounds: direct write element
        if (filter_exists && element_exists) gemm::hand_on<C, 1>(arguments, tile.matrix, of_all, element, total);
      }
    }
  }
};

template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  using B = Block<C>;
  using T = typename C::Input;
  const Tile tile = gemm::tile_at<C>(arguments, static_cast<int>(blockIdx.x));
  const Share share = gemm::share_of_block<C>(arguments, arguments.k);
  const int filter = tile.row * C::tile_m + B::thread_k() * C::filters, left = arguments.m - filter;
  // Without a filter of its own a thread reads what the last one's reads.
  const int known = left > 0 ? filter : arguments.m - 1;
  const int channel = C::depthwise ? known : known / (arguments.filters / arguments.groups);
  const T* const image = static_cast<const T*>(arguments.b) + channel * arguments.channel_pitch;
  const T* const dy = static_cast<const T*>(arguments.a) + filter * (C::channels_last ? 1 : arguments.lda);
  const int first = share.first + B::thread_p();
  Place corner(arguments, Tap{0, 0, 0}, first);
  GradientPixel<C> gradient(arguments, dy, first);
  B block;
#pragma unroll 1
  for (int pixel = first; pixel < share.end; pixel += C::tile_k) {
    block.add(arguments, gradient.at, image, corner, tile.column * C::tile_n, left);
    corner.next(arguments.walk);
    gradient.next_step(arguments);
  }
  block.write(arguments, tile, shared_memory<float>());
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

template <class C>
constexpr uint32_t shared_bytes() {
  constexpr int lanes_p = C::channels_last ? (C::threads_k < 32 ? 32 / C::threads_k : 1) : (C::tile_k < 32 ? C::tile_k : 32);
  return C::tile_k / lanes_p * C::tile_m * sizeof(float);
}

#endif  // CUKILN_HOST

}  // namespace direct
}  // namespace conv2d_wgrad
}  // namespace cukiln
