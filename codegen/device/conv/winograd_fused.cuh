// Winograd in one launch: a block transforms what its tiles see of the image, and its filters, a few channels at a time, into
// shared memory, multiplies place by place, and applies the inverse transform and the epilogue to its sums. No workspace;
// what several blocks need each of them transforms.
#pragma once

namespace cukiln {
namespace conv {
namespace winograd {

// Elements behind the tiles, or filters, of a row in shared memory, which are 16 bytes: against bank conflicts.
template <class T> constexpr int row_padding = 16 / static_cast<int>(sizeof(T));

// Where a block has what in shared memory, in elements: of each place and channel the tiles, then of each the filters; in the
// end, in their place, of each place and tile the sums of the filters.
template <class C>
struct Fused {
  using Operand = typename Product<C>::Input;
  static constexpr int edge = C::output_tile + taps - 1, places = edge * edge;
  static constexpr int across = C::tile_n / C::thread_n, per_place = C::tile_m / C::thread_m * across;
  static constexpr int image_pitch = C::tile_m + row_padding<Operand>, filter_pitch = C::tile_n + row_padding<Operand>;
  static constexpr int image = places * C::tile_k * image_pitch, filters = places * C::tile_k * filter_pitch;
  static constexpr int sums = places * C::tile_m * filter_pitch;
  static constexpr unsigned shared_bytes =
      static_cast<unsigned>(sizeof(Operand)) * (image + filters > sums ? image + filters : sums);
  static constexpr bool all_multiply = C::threads == places * per_place;  // else the last few of them transform alone
  static_assert(C::threads >= places * per_place && C::threads % 32 == 0 && C::threads <= 1024, "threads share the places");
  static_assert(C::tile_m % C::thread_m == 0 && C::tile_n % C::thread_n == 0, "threads cover the tile");
};

#if defined(CUKILN_DEVICE)

// Of 16 bytes 9 count: without the last word, ptxas leaves out what would compute it.
template <class T>
__device__ __forceinline__ T in_three_words(T value) {
  if constexpr (is_same<T, Wide>) return value & ~(~Wide(0) << 96);
  else return value;
}

// `count` neighbouring elements of shared memory, in accesses of at most 16 bytes.
template <int count, class T>
__device__ __forceinline__ void read_row(T (&out)[count], const T* source) {
  constexpr int widest = 16 / static_cast<int>(sizeof(T)), part = count < widest ? count : widest;
#pragma unroll
  for (int first = 0; first < count; first += part) {
    const Vector<T, part> loaded = load_shared<part>(source + first);
#pragma unroll
    for (int i = 0; i < part; ++i) out[first + i] = in_three_words(loaded.data[i]);
  }
}

template <int count, class T>
__device__ __forceinline__ void write_row(T* target, const T (&row)[count]) {
  constexpr int widest = 16 / static_cast<int>(sizeof(T)), part = count < widest ? count : widest;
#pragma unroll
  for (int first = 0; first < count; first += part) {
    Vector<T, part> stored;
#pragma unroll
    for (int i = 0; i < part; ++i) stored.data[i] = in_three_words(row[first + i]);
    store_shared<part>(target + first, stored);
  }
}

// sum + a b, over a ring that of the products.
template <class C, class T>
__device__ __forceinline__ T add_product(T a, T b, T sum) {
  if constexpr (gemm::over_ring<C>) return gemm::multiply_add<Product<C>>(a, b, sum);
  else return fma(a, b, sum);
}

// A thread computes thread_m tiles by thread_n filters of one place.
template <class C, class Arguments>
__device__ __forceinline__ void run_fused(const Arguments& arguments) {
  using F = Fused<C>;
  using E = Exact<C>;
  using Operand = typename E::Operand;
  using Sum = typename E::Sum;
  using Image = ImagePass<C::output_tile>;
  using Filter = FilterPass<C::output_tile>;
  using Inverse = InversePass<C::output_tile>;
  const Layer& layer = arguments.layer;
  const int thread = static_cast<int>(threadIdx.x);
  const int place = thread / F::per_place, within = thread % F::per_place;
  const bool multiplies = F::all_multiply || place < F::places;
  const int row = within / F::across * C::thread_m, column = within % F::across * C::thread_n;
  const int first_tile = static_cast<int>(blockIdx.x) * C::tile_m, first_filter = static_cast<int>(blockIdx.y) * C::tile_n;
  Operand* const image = shared_memory<Operand>();
  Operand* const filters = image + F::image;
  Sum sums[C::thread_m][C::thread_n] = {};
#pragma unroll 1
  for (int first_channel = 0; first_channel < layer.channels; first_channel += C::tile_k) {
    // Neighbouring threads have neighbouring elements of memory.
#pragma unroll 1
    for (int item = thread; item < C::tile_m * C::tile_k; item += C::threads) {
      const int tile = C::channels_last ? item / C::tile_k : item % C::tile_m;
      const int channel = C::channels_last ? item % C::tile_k : item / C::tile_m;
      typename E::Value given[1][Image::in][Image::in] = {}, result[Image::out][Image::out];
      read_image<C>(layer, TileOf(layer, first_tile + tile, C::output_tile), first_channel + channel, given);
      transform<Image>(given[0], result);
#pragma unroll
      for (int i = 0; i < F::places; ++i)
        store_shared<1>(image + (i * C::tile_k + channel) * F::image_pitch + tile,
                        Vector<Operand, 1>{{in_three_words(E::of_image(result[i / F::edge][i % F::edge]))}});
    }
#pragma unroll 1
    for (int item = thread; item < C::tile_n * C::tile_k; item += C::threads) {
      const int filter = item / C::tile_k, channel = item % C::tile_k;
      typename E::Value given[taps][taps] = {}, result[Filter::out][Filter::out];
      read_filter<C>(layer, first_filter + filter, first_channel + channel, given);
      transform<Filter>(given, result);
#pragma unroll
      for (int i = 0; i < F::places; ++i)
        store_shared<1>(filters + (i * C::tile_k + channel) * F::filter_pitch + filter,
                        Vector<Operand, 1>{{in_three_words(E::of_filter(result[i / F::edge][i % F::edge]))}});
    }
    __syncthreads();  // all channels are transformed
    if (multiplies) {
#pragma unroll
      for (int channel = 0; channel < C::tile_k; ++channel) {
        Operand a[C::thread_m], b[C::thread_n];
        read_row(a, image + (place * C::tile_k + channel) * F::image_pitch + row);
        read_row(b, filters + (place * C::tile_k + channel) * F::filter_pitch + column);
#pragma unroll
        for (int i = 0; i < C::thread_m; ++i)
#pragma unroll
          for (int j = 0; j < C::thread_n; ++j) sums[i][j] = add_product<C>(a[i], b[j], sums[i][j]);
      }
    }
    __syncthreads();  // every thread has read them before the next ones, or the sums, come
  }
  Sum* const exchanged = shared_memory<Sum>();
  if (multiplies) {
#pragma unroll
    for (int i = 0; i < C::thread_m; ++i) write_row(exchanged + (place * C::tile_m + row + i) * F::filter_pitch + column, sums[i]);
  }
  __syncthreads();  // the sums of all places are there
#pragma unroll 1
  for (int item = thread; item < C::tile_m * C::tile_n; item += C::threads) {
    const int tile = C::channels_last ? item / C::tile_n : item % C::tile_m;
    const int filter = C::channels_last ? item % C::tile_n : item / C::tile_m;
    const TileOf of(layer, first_tile + tile, C::output_tile);
    const bool filter_exists = in_bounds(first_filter + filter, layer.filters);  // bounds: filter of the output
    if (!of.exists || !filter_exists) continue;
    typename E::Value given[Inverse::in][Inverse::in], result[1][Inverse::out][Inverse::out];
#pragma unroll
    for (int i = 0; i < F::places; ++i)
      given[i / F::edge][i % F::edge] = E::read_sum(load_shared<1>(exchanged + (i * C::tile_m + tile) * F::filter_pitch + filter).data[0]);
    transform<Inverse>(given, result[0]);
    write_tile<C>(arguments, of, first_filter + filter, result);
  }
}

#endif  // CUKILN_DEVICE

}  // namespace winograd
}  // namespace conv
}  // namespace cukiln
