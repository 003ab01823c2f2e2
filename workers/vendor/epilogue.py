"""The kernel after a vendor's product: what of the epilogue is not in the library's own, and the output's conversion.

It is made of the primitives and the epilogue nodes of codegen/device, so its text comes from packaged headers and
typed nodes only. Where rows allow it a thread moves 16 bytes at once: the vendor is not to lose time here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from codegen.dtypes import dtype
from codegen.epilogue import Node, chain_type, scalars, structures
from codegen.operand import Operand
from codegen.text.render_group import header_text

NAME = "cukiln_after_vendor"
CONVERSION = "the conversion to the output's type"
THREADS = 256
LARGEST_GRID = 65535  # of y and z
DEVICE_HEADERS = ("launch.h", "device.cuh", "convert.cuh", "epilogue.cuh")
# NVRTC has no standard headers, and no builtin of g++ and nvcc.
_FOR_NVRTC = """\
#if defined(__CUDACC_RTC__)
typedef long long int64_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#define __builtin_memcpy memcpy
#endif
"""
_KERNEL = """
namespace cukiln {{
namespace after_vendor {{
using Product = {product};
using Output = {output};
constexpr int width = {width};

// Row-major matrices of one batch; pitches and strides in elements. Residuals and masks lie as `out` does.
struct Arguments {{
  const Product* product;
  Output* out;
  int rows, columns, batch;
  long long product_pitch, product_stride, out_pitch, out_stride;
  EpilogueArguments epilogue;
}};

__device__ __forceinline__ void finish(const Arguments arguments) {{
  const int column = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * width;
  if (column >= arguments.columns) return;
  for (int matrix = static_cast<int>(blockIdx.z); matrix < arguments.batch; matrix += static_cast<int>(gridDim.z)) {{
    for (int row = static_cast<int>(blockIdx.y * blockDim.y + threadIdx.y); row < arguments.rows;
         row += static_cast<int>(gridDim.y * blockDim.y)) {{
      // An ordinary access, not through the read-only cache: the product may lie where the output goes.
      const Vector<Product, width> read = *reinterpret_cast<const Vector<Product, width>*>(
          arguments.product + matrix * arguments.product_stride + row * arguments.product_pitch + column);
      Vector<float, width> value;
      for (int i = 0; i < width; ++i) value.data[i] = to_float(read.data[i]);
      const int64_t offset = matrix * arguments.out_stride + row * arguments.out_pitch + column;
      {chain}::apply<width>(value, Position{{row, column, offset}}, arguments.epilogue);
      Vector<Output, width> result;
      for (int i = 0; i < width; ++i) result.data[i] = from_float<Output>(value.data[i]);
      store_global<width>(arguments.out + offset, result);
    }}
  }}
}}
}}  // namespace after_vendor
}}  // namespace cukiln
"""


def output_of(operands: Iterable[Operand]) -> Operand:
    """The one output of a problem."""
    (out,) = (operand for operand in operands if operand.role == "out")
    return out


@dataclass(frozen=True)
class Matrices:
    """Where a batch of row-major matrices lies, in elements."""

    dtype: str
    pitch: int
    stride: int


@dataclass(frozen=True)
class After:
    """What the kernel does: `chain` on matrices of `rows` and `columns`, from `product` to `out`."""

    chain: tuple[Node, ...]
    rows: int
    columns: int
    batch: int
    product: Matrices
    out: Matrices

    @property
    def width(self) -> int:
        """Elements that a thread moves at once: what 16 bytes hold of the wider type, where every row allows it."""
        widest = 16 // max(dtype(self.product.dtype).bytes, dtype(self.out.dtype).bytes)
        sides = (self.product, self.out)
        steps = [self.columns, *(side.pitch for side in sides), *(side.stride for side in sides if self.batch > 1)]
        return next(width for width in (8, 4, 2, 1) if width <= widest and all(step % width == 0 for step in steps))

    @property
    def tensors(self) -> int:
        return sum(node.operand is not None for node in self.chain)

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads along a row, as many as its vectors need, and rows."""
        along = THREADS
        while along > 1 and along // 2 * self.width >= self.columns:
            along //= 2
        return along, THREADS // along, 1

    @property
    def grid(self) -> tuple[int, int, int]:
        along, across, _ = self.block
        return (
            -(-self.columns // (along * self.width)),
            min(-(-self.rows // across), LARGEST_GRID),
            min(self.batch, LARGEST_GRID),
        )

    def kernel_text(self) -> str:
        """`cukiln::after_vendor::finish`, without the headers that it needs."""
        return _KERNEL.format(
            product=dtype(self.product.dtype).cxx,
            output=dtype(self.out.dtype).cxx,
            width=self.width,
            chain=chain_type(structures(self.chain), self.out.dtype),
        )

    def device_text(self) -> str:
        """A whole file for NVRTC or nvcc, with the kernel `NAME` that takes the values of `arguments`."""
        tensors = [f"const void* tensor_{index}" for index in range(self.tensors)]
        values = [f"float scalar_{index}" for index in range(len(scalars(self.chain)))]
        parameters = ["const void* product", "void* out", *_FIELDS, *tensors, *values]
        fills = [f"  arguments.epilogue.tensors[{i}] = tensor_{i};\n" for i in range(len(tensors))]
        fills += [f"  arguments.epilogue.scalars[{i}] = scalar_{i};\n" for i in range(len(values))]
        names = ", ".join(field.split()[-1] for field in _FIELDS)
        return (
            f"{_FOR_NVRTC}#define CUKILN_DEVICE 1\n"
            + "".join(map(header_text, DEVICE_HEADERS))
            + self.kernel_text()
            + f'extern "C" __global__ void __launch_bounds__({THREADS}) {NAME}({", ".join(parameters)}) {{\n'
            "  using namespace cukiln::after_vendor;\n"
            "  Arguments arguments = {static_cast<const Product*>(product), static_cast<Output*>(out), "
            f"{names}, {{}}}};\n{''.join(fills)}  finish(arguments);\n}}\n"
        )

    def extents(self) -> tuple[int, ...]:
        """The values of `_FIELDS`: three int, then four long long."""
        return (
            self.rows, self.columns, self.batch,
            self.product.pitch, self.product.stride, self.out.pitch, self.out.stride,
        )  # fmt: skip

    def scalars(self) -> Sequence[float]:
        return scalars(self.chain)


_FIELDS = (
    "int rows",
    "int columns",
    "int batch",
    "long long product_pitch",
    "long long product_stride",
    "long long out_pitch",
    "long long out_stride",
)
