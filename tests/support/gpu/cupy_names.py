"""What CuPy 14.2.0 has, as `dir` lists it: functions of `cupy`, attributes and operators of `cupy.ndarray`."""

from __future__ import annotations

FUNCTIONS = """
abs absolute acos acosh add all allclose alltrue amax amin angle any append apply_along_axis apply_over_axes
arange arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argpartition argsort argwhere around
array array2string array_equal array_equiv array_repr array_split array_str asanyarray asarray
asarray_chkfinite ascontiguousarray asfarray asfortranarray asin asinh asnumpy astype atan atan2 atanh
atleast_1d atleast_2d atleast_3d average bartlett base_repr binary_repr bincount bitwise_and bitwise_count
bitwise_invert bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman
broadcast_arrays broadcast_shapes broadcast_to byte_bounds can_cast cbrt ceil choose clear_memo clip
column_stack common_type compress concat concatenate conj conjugate convolve copy copysign copyto corrcoef
correlate cos cosh count_nonzero cov cross cumprod cumproduct cumsum cumulative_prod cumulative_sum deg2rad
degrees delete diag diag_indices diag_indices_from diagflat diagonal diff digitize disp divide divmod dot
dsplit dstack ediff1d einsum empty empty_like equal exp exp2 expand_dims expm1 extract eye fabs fill_diagonal
find_common_type fix flatnonzero flip fliplr flipud float_power floor floor_divide fmax fmin fmod
format_float_positional format_float_scientific frexp fromDlpack from_dlpack frombuffer fromfile fromfunction
fromiter fromstring full full_like fuse gcd genfromtxt get_array_module get_array_wrap get_default_memory_pool
get_default_pinned_memory_pool get_printoptions gradient greater greater_equal hamming hanning heaviside
histogram histogram2d histogramdd hsplit hstack hypot i0 identity imag in1d indices inner interp intersect1d
invert is_available isclose iscomplex iscomplexobj isdtype isfinite isfortran isin isinf isnan isneginf
isposinf isreal isrealobj isscalar issctype issubclass_ issubdtype issubsctype iterable ix_ kaiser kron lcm
ldexp left_shift less less_equal lexsort linspace load loadtxt log log10 log1p log2 logaddexp logaddexp2
logical_and logical_not logical_or logical_xor logspace make_aligned_dtype mask_indices matmul
matrix_transpose max maximum may_share_memory mean median memoize meshgrid min min_scalar_type minimum
mintypecode mod modf moveaxis msort multiply nan_to_num nanargmax nanargmin nancumprod nancumsum nanmax
nanmean nanmedian nanmin nanprod nanstd nansum nanvar ndim negative nextafter nonzero not_equal obj2sctype
ones ones_like outer packbits pad partition percentile permute_dims piecewise place poly polyadd polyfit
polymul polysub polyval positive pow power printoptions prod product promote_types ptp put put_along_axis
putmask quantile rad2deg radians ravel ravel_multi_index real real_if_close reciprocal remainder repeat
require reshape resize result_type right_shift rint roll rollaxis roots rot90 round round_ row_stack safe_eval
save savetxt savez savez_compressed sctype2char searchsorted select set_printoptions set_string_function
setdiff1d setxor1d shape shares_memory show_config sign signbit sin sinc sinh size sometrue sort sort_complex
split sqrt square squeeze stack std subtract sum swapaxes take take_along_axis tan tanh tensordot tile trace
transpose trapezoid trapz tri tril tril_indices tril_indices_from trim_zeros triu triu_indices
triu_indices_from true_divide trunc typename union1d unique unique_all unique_counts unique_inverse
unique_values unpackbits unravel_index unwrap vander var vdot vsplit vstack where who zeros zeros_like
"""

ATTRIBUTES = """
T all any argmax argmin argpartition argsort astype base byteswap choose clip compress conj conjugate copy
cstruct cumprod cumsum data device diagonal dot dtype dump dumps fill flags flat flatten get imag item
itemsize mT max mdspan mean min nbytes ndim nonzero partition prod ptp put ravel real reduced_view repeat
reshape round scatter_add scatter_max scatter_min searchsorted set shape size sort squeeze std strides sum
swapaxes take toDlpack tobytes tofile tolist trace transpose var view
"""

OPERATORS = """
__abs__ __add__ __and__ __array__ __array_finalize__ __array_function__ __array_priority__ __array_ufunc__
__bool__ __bytes__ __class_getitem__ __complex__ __copy__ __cuda_array_interface__ __deepcopy__ __delitem__
__divmod__ __dlpack__ __dlpack_device__ __eq__ __float__ __floordiv__ __ge__ __getitem__ __gt__ __iadd__
__iand__ __ifloordiv__ __ilshift__ __imod__ __imul__ __int__ __invert__ __ior__ __ipow__ __irshift__ __isub__
__iter__ __itruediv__ __ixor__ __le__ __len__ __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __neg__
__or__ __pos__ __pow__ __radd__ __rand__ __rdivmod__ __rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__
__ror__ __rpow__ __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __setitem__ __sub__ __truediv__ __xor__
"""
