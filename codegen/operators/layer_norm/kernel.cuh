// Each row of x with mean 0 and variance 1: out = (x - mean) / sqrt(variance + epsilon) * gamma + beta.
#pragma once

namespace cukiln {
namespace layer_norm {

struct Arguments : rows::Arguments {};

#if defined(CUKILN_DEVICE)

// Sums of distances from a value near the mean, and of their squares.
struct Distances {
  struct State {
    float sum, squares;
  };
  static __device__ __forceinline__ void merge(State& state, const State& other) {
    state.sum += other.sum;
    state.squares += other.squares;
  }
};

__device__ __forceinline__ float middle_of(float a, float b, float c) {
  const float low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c < high ? c : high;
}

// Variances that the square of the origin's distance from the mean may be: so much is lost of the sums.
constexpr float furthest = 8.0f;
// Vectors whose sum begins anew: distances of bfloat16 lie on a coarse grid, so that roundings of a long sum, many of them
// ties, add up to more than roundings of either sign would (a row of 131,073 by one thread: up to 3.1 times the bound).
constexpr int most_at_once = 256;

template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  using Values = Vector<float, C::vector>;
  rows::Part<C> part(arguments);
  const float columns = static_cast<float>(arguments.columns);
  float mean, variance;
  if constexpr (C::algorithm == rows::online) {
    // Distances from an element of the row (Chan, Golub and LeVeque, The American Statistician 37:3, 1983, "shifted
    // data"): the middle one of three, so that no single outlier is it. Unlike running means these sums are exact where
    // fp32 holds them. Where it is an outlier all the same, once more, from the mean that was found.
    float origin = 0.0f;
    if (part.columns > 0) origin = middle_of(part.element(0), part.element(part.columns / 2), part.element(part.columns - 1));
    bool again = true;
    mean = variance = 0.0f;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      Distances::State own = {0.0f, 0.0f}, some = {0.0f, 0.0f};
      int vectors = 0;
      if (again) {
        part.each([&](Values& values, unsigned) {
          if (vectors++ == most_at_once) {
            Distances::merge(own, some);
            some = {0.0f, 0.0f};
            vectors = 1;
          }
          Values squares;
#pragma unroll
          for (int i = 0; i < C::vector; ++i) {
            values.data[i] -= origin;
            squares.data[i] = values.data[i] * values.data[i];
            CUKILN_COUNT("multiply", 1);
          }
          some.sum += fold::added(values);
          some.squares += fold::added(squares);
        });
      }
      Distances::merge(own, some);
      own = rows::of_row<C, Distances>(own, pass);
      if (again) {
        const float distance = own.sum / columns;
        variance = cukiln::fma(-distance, distance, own.squares / columns);
        if (variance < 0.0f) variance = 0.0f;
        mean = origin + distance;
        again = distance * distance > furthest * variance;
        origin = mean;
      }
      if (C::rows == 1 && !again) break;  // all of the block have the same row
    }
  } else {
    mean = rows::sum_of<C>(part, 0, [](const Values& values) { return values; }) / columns;
    variance = rows::sum_of<C>(part, 1, [&](const Values& values) {
      Values squares;
#pragma unroll
      for (int i = 0; i < C::vector; ++i) {
        squares.data[i] = (values.data[i] - mean) * (values.data[i] - mean);
        CUKILN_COUNT("multiply", 1);
      }
      return squares;
    }) / columns;
  }
  rows::write_normalised<C>(part, mean, variance);
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t*, const double* scalars, void*) {
  return Arguments{rows::bind(rows::plan_of<C>, pointers, extents, scalars)};
}

using rows::check, rows::plan, rows::workspace_bytes;

#endif  // CUKILN_HOST

}  // namespace layer_norm
}  // namespace cukiln
