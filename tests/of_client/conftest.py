"""A library that can be loaded, made once for the tests of the client."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
import tvm_ffi

# A library with the entry points of a kernel's, whose `run` counts its arguments and whose constructor leaves a trace.
SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <tvm/ffi/c_api.h>
#define EXPORT __attribute__((visibility("default")))
__attribute__((constructor)) static void loaded(void) {
  const char* path = getenv("CUKILN_TEST_TRACE");
  FILE* file = path ? fopen(path, "w") : NULL;
  if (file) fclose(file);
}
static double last_scalar = 0;
static int count = 0;
EXPORT int __tvm_ffi_run(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  count = n;
  last_scalar = n > 0 && args[n - 1].type_index == kTVMFFIFloat ? args[n - 1].v_float64 : -1;
  if (n == 0) { TVMFFIErrorSetRaisedFromCStr("ValueError", "run: 0 arguments, 1 expected"); return -1; }
  return 0;
}
EXPORT int __tvm_ffi_seen(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  result->type_index = kTVMFFIFloat; result->v_float64 = count + last_scalar / 100; return 0;
}
EXPORT int __tvm_ffi_prepare(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", "no CUDA driver: libcuda.so.1 was not found"); return -1;
}
EXPORT int __tvm_ffi_workspace_bytes(void* self, const TVMFFIAny* args, int32_t n, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt; result->v_int64 = 0;
  if (n > 0 && args[0].type_index != kTVMFFIInt) return 0;  // of tensors: none
  for (int i = 0; i < n; ++i) result->v_int64 = result->v_int64 * 10 + args[i].v_int64;
  return 0;
}
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("library")
    (folder / "stub.c").write_text(SOURCE)
    include = Path(tvm_ffi.__file__).parent / "include"
    command = ["g++", "-x", "c", "-shared", "-fPIC", f"-I{include}", "-o", "stub.so", "stub.c"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "stub.so").read_bytes()


@pytest.fixture
def digest(library: bytes) -> str:
    return hashlib.sha256(library).hexdigest()
