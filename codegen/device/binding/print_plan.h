// Prints the launches of a call, from the launch code that a library runs: a line per launch with function, grid, block,
// shared bytes; then one line with the workspace's bytes.
#pragma once
#include <stdint.h>
#include <stdio.h>

namespace cukiln {
namespace binding {

// By a kernel's Binding.
template <class B>
void print_plan(const int64_t* extents, const double* scalars) {
  void* pointers[64] = {};
  const typename B::Arguments arguments = B::bind(pointers, extents, B::launch, scalars, nullptr);
  Launch launches[16];
  const int count = B::plan(arguments, launches);
  for (int i = 0; i < count; ++i) {
    const Launch& each = launches[i];
    printf("%d %u %u %u %u %u %u %u\n", each.function, each.grid[0], each.grid[1], each.grid[2], each.block[0], each.block[1],
           each.block[2], each.shared_bytes);
  }
  printf("%lld\n", static_cast<long long>(B::workspace_bytes(extents, B::launch)));
}

}  // namespace binding
}  // namespace cukiln
