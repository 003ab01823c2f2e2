// Approximations, at the end of their documented error that the run asks for; what the manual lists as exact stays exact.
// Figures and tables of special values: PTX ISA 9.1 and 9.4, in the section that is named at each; the larger error of both.
#pragma once

#include "values.h"

namespace cukiln {
namespace ptx {

// A result of which the manual gives the error in ulps: as many of them beside the float that is nearest. The sign stays, and
// what overflows is infinite.
inline uint32_t off_by_ulps(double exact, uint32_t ulps) {
  const uint32_t nearest = bits_of(static_cast<float>(exact)), sign = nearest & 0x80000000u, magnitude = nearest & 0x7fffffffu;
  if (approximation == 0 || magnitude >= 0x7f800000u) return nearest;
  const bool grows = (approximation > 0) == (sign == 0);
  return sign | (grows ? magnitude + ulps : magnitude > ulps ? magnitude - ulps : 0u);
}
// One of which it gives the distance: the float that is farthest from `exact` and at most `error` away, or the nearest of all.
inline uint32_t off_by(double exact, double error) {
  const auto within = [&](uint32_t a) { return __builtin_fabs(static_cast<double>(float_of(a)) - exact) <= error; };
  uint32_t far = bits_of(static_cast<float>(exact + approximation * error));
  if (!within(far)) far = approximation < 0 ? next_up(far) : next_down(far);
  return within(far) ? far : bits_of(static_cast<float>(exact));
}
inline uint32_t off_by_relative(double exact, double error) { return off_by(exact, __builtin_fabs(exact) * error); }

// 9.7.3.21: 2 ulp from the correctly rounded result, of all inputs.
inline uint32_t ex2_approx(uint32_t a) {
  const float x = float_of(a);
  if (!is_finite(a) || x == 0.0f) return bits_of(__builtin_exp2f(x));
  return off_by_ulps(__builtin_exp2(x), 2);
}
// 9.7.3.20: 2^-22 absolute in (0.5, 2), relative outside.
inline uint32_t lg2_approx(uint32_t a) {
  const float x = float_of(a);
  if (!is_finite(a) || x <= 0.0f) return x == 0.0f ? 0xff800000u : a == 0x7f800000u ? a : canonical_nan;
  const double exact = __builtin_log2(x);
  return x > 0.5f && x < 2.0f ? off_by(exact, 0x1p-22) : off_by_relative(exact, 0x1p-22);
}
// 9.7.3.13: 1 ulp, of all inputs.
inline uint32_t rcp_approx(uint32_t a) {
  const float x = float_of(a);
  if (!is_finite(a) || x == 0.0f) return bits_of(1.0f / x);
  return off_by_ulps(1.0 / x, 1);
}
// 9.7.3.16: 2^-22.9 relative, of all positive finite inputs.
inline uint32_t rsqrt_approx(uint32_t a) {
  const float x = float_of(a);
  if (!is_finite(a) || x <= 0.0f) return is_notanumber(a) || x < 0.0f ? canonical_nan : bits_of(1.0f / __builtin_sqrtf(x));
  return off_by_relative(1.0 / __builtin_sqrt(x), 0x1p-23 * 1.0717734625362931);
}
// 9.7.3.15: 2^-23 relative, of all positive finite inputs.
inline uint32_t sqrt_approx(uint32_t a) {
  const float x = float_of(a);
  if (!is_finite(a) || x <= 0.0f) return x < 0.0f ? canonical_nan : bits_of(__builtin_sqrtf(x));
  return off_by_relative(__builtin_sqrt(x), 0x1p-23);
}
// 9.7.3.18, 9.7.3.19: absolute, of sin 2^-20.5 and of cos 2^-20.4 (9.1: 2^-20.5) in [-2pi, 2pi], 2^-14.7 in [-100pi, 100pi].
// Beyond no error is given: -1 and 1.
inline uint32_t periodic(double x, double exact, double near) {
  constexpr double pi = 3.141592653589793;
  const double from_zero = __builtin_fabs(x);
  if (from_zero > 100 * pi && approximation != 0) return bits_of(static_cast<float>(approximation));
  return off_by(exact, from_zero <= 2 * pi ? near : 0x1p-15 * 1.2311444133449163);
}
inline uint32_t sin_approx(uint32_t a) {
  const float x = float_of(a);
  if (x == 0.0f) return a;
  return is_finite(a) ? periodic(x, __builtin_sin(x), 0x1p-21 * 1.4142135623730951) : canonical_nan;
}
inline uint32_t cos_approx(uint32_t a) {
  const float x = float_of(a);
  if (x == 0.0f) return bits_of(1.0f);
  return is_finite(a) ? periodic(x, __builtin_cos(x), 0x1p-21 * 1.515716566510398) : canonical_nan;
}
// 9.7.3.22: 2^-11 relative, of all inputs; subnormal ones come out as they are (9.1).
inline uint32_t tanh_approx(uint32_t a) {
  if (!is_finite(a)) return bits_of(__builtin_tanhf(float_of(a)));
  if (is_zero_or_subnormal(a)) return a;
  return off_by_relative(__builtin_tanh(float_of(a)), 0x1p-11);
}
// 9.7.3.8: 2 ulp where the divisor is in [2^-126, 2^126]; beyond it 0, and NaN of an infinity, as its reciprocal is 0. Of
// subnormal divisors the manual gives no error: that 2 ulp hold for them too has no source.
inline uint32_t div_approx(uint32_t a, uint32_t b) {
  const float x = float_of(a), y = float_of(b);
  if (is_number(a) && is_finite(b) && __builtin_fabsf(y) > 0x1p126f) return is_infinite(a) ? canonical_nan : (a ^ b) & 0x80000000u;
  if (!is_finite(a) || !is_finite(b) || y == 0.0f || x == 0.0f) return bits_of(x / y);
  return off_by_ulps(static_cast<double>(x) / y, 2);
}
// 9.7.3.8: 2 ulp, of all inputs.
inline uint32_t div_full(uint32_t a, uint32_t b) {
  const float x = float_of(a), y = float_of(b);
  if (!is_finite(a) || !is_finite(b) || y == 0.0f || x == 0.0f) return bits_of(x / y);
  return off_by_ulps(static_cast<double>(x) / y, 2);
}

}  // namespace ptx
}  // namespace cukiln
