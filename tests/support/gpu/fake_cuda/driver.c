// A stand-in for libcuda.so.1 that writes down what it is asked to do. Two devices; context 100 + device.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local intptr_t context = 0;

static void say(const char* words, long first, long second) {
  FILE* log = fopen(getenv("FAKE_CUDA_LOG"), "a");
  fprintf(log, "%s %ld %ld\n", words, first, second);
  fclose(log);
}

// FAKE_CUDA_FAIL=name makes that function fail with error 209.
static int fails(const char* name) {
  const char* asked = getenv("FAKE_CUDA_FAIL");
  return asked && strcmp(asked, name) == 0 ? 209 : 0;
}

static _Thread_local int capture_mode = 0;
int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  say("mode", capture_mode, 0);
  return 0;
}
// FAKE_CUDA_CAPTURED_ELSEWHERE: another thread captures, in the mode "global": what is unsafe there breaks its capture.
static int breaks_a_capture(void) {
  if (getenv("FAKE_CUDA_CAPTURED_ELSEWHERE") == NULL || capture_mode == 2) return 0;
  say("a capture is broken", 0, 0);
  return 900;
}
int cuInit(unsigned flags) { return (void)flags, fails("cuInit"); }
int cuDeviceGet(int* device, int ordinal) {
  if (ordinal > 1) return 101;
  *device = ordinal;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 97 ? 232448 : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** out, int device) {
  *out = (void*)(intptr_t)(100 + device);
  return 0;
}
int cuCtxGetCurrent(void** out) {
  *out = (void*)context;
  return 0;
}
int cuCtxGetDevice(int* device) {
  const char* current = getenv("FAKE_CUDA_CURRENT");
  if (current == NULL) return 201;
  *device = atoi(current);
  return 0;
}
int cuCtxPushCurrent_v2(void* pushed) {
  context = (intptr_t)pushed;
  say("push", context, 0);
  return 0;
}
int cuCtxPopCurrent_v2(void** out) {
  *out = (void*)context;
  context = 0;
  say("pop", 0, 0);
  return 0;
}
int cuModuleLoadData(void** module, const void* image) {
  say("load", context, memcmp(image, "\177ELF", 4));
  *module = (void*)7;
  return breaks_a_capture() ? 900 : fails("cuModuleLoadData");
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  static intptr_t next = 1000;
  (void)module;
  *function = (void*)next++;
  say(name, (long)(intptr_t)*function, 0);
  return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  (void)function;
  *value = attribute == 1 ? 448 : -1;
  return 0;
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute == 8) say("dynamic", (long)(intptr_t)function, value);
  return 0;
}
int cuStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  *status = getenv("FAKE_CUDA_CAPTURING") != NULL;
  return 0;
}
// FAKE_CUDA_CAPTURE=number: every stream is part of the capture of that number.
int cuStreamGetCaptureInfo_v2(void* stream, int* status, uint64_t* number, void** graph, const void** nodes, size_t* count) {
  (void)stream, (void)graph, (void)nodes, (void)count;
  const char* capture = getenv("FAKE_CUDA_CAPTURE");
  *status = capture != NULL;
  *number = capture ? strtoull(capture, NULL, 10) : 99;  // 99: what the driver leaves there without a capture
  return fails("cuStreamGetCaptureInfo_v2");
}
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  static uint64_t next = 0x50000000;
  *address = __atomic_fetch_add(&next, 0x10000, __ATOMIC_SEQ_CST);
  say("alloc", (long)*address, (long)bytes);
  return breaks_a_capture() ? 900 : fails("cuMemAlloc_v2");
}
int cuMemFree_v2(uint64_t address) {
  say("free", (long)address, 0);
  return 0;
}
int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** parameters, void** extra) {
  // FAKE_CUDA_PEEK=offset shows an int of the kernel's arguments.
  const char* peek = getenv("FAKE_CUDA_PEEK");
  const int seen = peek ? *(const int*)((const char*)parameters[0] + atoi(peek)) : 0;
  char words[200];
  snprintf(words, sizeof(words), "launch grid=%u,%u,%u block=%u,%u,%u shared=%u context=%ld peek=%d first=%p", gx, gy, gz, bx,
           by, bz, shared, (long)context, seen, extra ? NULL : *(void**)parameters[0]);
  say(words, (long)(intptr_t)function, (long)(intptr_t)stream);
  return fails("cuLaunchKernel");
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 209 ? "no kernel image is available" : "invalid device";
  return 0;
}
