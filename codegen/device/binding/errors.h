// What went wrong in a call, for its caller, and which of a library's threads may change what they share.
#pragma once
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

namespace cukiln {
namespace binding {

constexpr size_t error_size = 1024;

// What went wrong last on this thread, as "<Kind>Error: sentence".
inline char* last_error() {
  static thread_local char text[error_size];
  return text;
}

enum Status { fine = 0, failed = 1 };

__attribute__((format(printf, 1, 2))) inline int fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(last_error(), error_size, format, values);
  va_end(values);
  return failed;
}

inline pthread_mutex_t* mutex() {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  return &lock;
}

}  // namespace binding
}  // namespace cukiln
