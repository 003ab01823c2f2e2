// Each row of x as weights: out = e^(x - greatest) / sum over the row of e^(x - greatest), so that nothing overflows. Online
// the greatest value and the sum are found in one pass (Milakov and Gimelshein, arXiv:1805.02867).
#pragma once

namespace cukiln {
namespace softmax {

struct Arguments : rows::Arguments {};

#if defined(CUKILN_DEVICE)

template <class C>
__device__ __forceinline__ void run(const Arguments& arguments) {
  using Values = Vector<float, C::vector>;
  rows::Part<C> part(arguments);
  float greatest, sum;
  if constexpr (C::algorithm == rows::online) {
    fold::LogSumExp::State own = fold::LogSumExp::nothing();
    part.each([&](Values& values, unsigned) { fold::LogSumExp::take(own, values, 0, 0); });
    own = rows::of_row<C, fold::LogSumExp>(own, 0);
    greatest = own.greatest;
    sum = own.sum + (greatest - greatest);  // of an infinity NaN, as e^(x - greatest) is then where x is that
  } else {
    using Greatest = fold::Extreme<float, true>;
    Greatest::State own = Greatest::nothing();
    part.each([&](Values& values, unsigned) { Greatest::take(own, values, 0, 0); });
    greatest = rows::of_row<C, Greatest>(own, 0).value;
    sum = rows::sum_of<C>(part, 1, [&](Values& values) {
      Values powers;
#pragma unroll
      for (int i = 0; i < C::vector; ++i) powers.data[i] = cukiln::exp(values.data[i] - greatest);
      if constexpr (C::algorithm == rows::in_registers) values = powers;  // computed once
      return powers;
    });
  }
  const float share = 1.0f / sum;
  part.each([&](Values& values, unsigned column) {
#pragma unroll
    for (int i = 0; i < C::vector; ++i) {
      const float power = C::algorithm == rows::in_registers ? values.data[i] : cukiln::exp(values.data[i] - greatest);
      values.data[i] = power * share;
      CUKILN_COUNT("multiply", 1);
    }
    part.store(values, column);
  });
}

#endif  // CUKILN_DEVICE

#if defined(CUKILN_HOST)

template <class C>
Arguments bind(void* const* pointers, const int64_t* extents, const int32_t*, const double* scalars, void*) {
  return Arguments{rows::bind(rows::plan_of<C>, pointers, extents, scalars)};
}

using rows::check, rows::plan, rows::workspace_bytes;

#endif  // CUKILN_HOST

}  // namespace softmax
}  // namespace cukiln
