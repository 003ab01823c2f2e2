// Each row of x divided by its root mean square: out = x / sqrt(mean of x^2 + epsilon) * gamma + beta.
#pragma once

namespace cukiln {
namespace rms_norm {

struct Arguments : rows::Arguments {};

#if defined(CUKILN_DEVICE)

template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  using Values = Vector<float, C::vector>;
  rows::Part<C> part(arguments);
  const float sum = rows::sum_of<C>(part, 0, [](const Values& values) {
    Values squares;
#pragma unroll
    for (int i = 0; i < C::vector; ++i) {
      squares.data[i] = values.data[i] * values.data[i];
      CUKILN_COUNT("multiply", 1);
    }
    return squares;
  });
  rows::write_normalised<C>(part, 0.0f, sum / static_cast<float>(arguments.columns));
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t*, const double* scalars, void*) {
  return Arguments{rows::bind(rows::plan_of<C>, pointers, extents, scalars)};
}

using rows::check, rows::plan, rows::workspace_bytes;

#endif  // CUKILN_HOST

}  // namespace rms_norm
}  // namespace cukiln
