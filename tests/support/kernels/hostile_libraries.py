"""Libraries of real machine code that do what no library should: built by g++ under the entry names of a group.

Each computes a float32 matmul (layout nn, no epilogue) rightly on host memory, as the simulated GPU runs it, unless its
hook has something else in mind. `seen`: what stands in its file gives it away, so that it is never loaded. The others
hide what they use behind dlsym or raw system calls.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LINK = ("-shared", "-nostartfiles", "-Wl,--build-id=none", "-Wl,-s", "-Wl,--as-needed")
COMPILE = ("-x", "c++", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-w")

_HEAD = r"""
#include <stddef.h>
#include <stdint.h>
extern "C" void* dlsym(void*, const char*);
#define FOUND(type, name) ((type)dlsym(nullptr, name))

static long raw(long number, long a = 0, long b = 0, long c = 0) {
#if defined(__x86_64__)
  long result;
  __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
  return result;
#else
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
  return x0;
#endif
}
#if defined(__x86_64__)
enum { SYS_write = 1, SYS_close = 3, SYS_getpid = 39, SYS_kill = 62, SYS_exit_group = 231, SYS_ppoll = 271 };
enum { SYS_socket = 41, SYS_connect = 42 };
#else
enum { SYS_write = 64, SYS_close = 57, SYS_getpid = 172, SYS_kill = 129, SYS_exit_group = 94, SYS_ppoll = 73 };
enum { SYS_socket = 198, SYS_connect = 203 };
#endif
struct Address { uint16_t family, port; uint32_t host; char zero[8]; };
static Address listener() { return {2, __builtin_bswap16(PORT), __builtin_bswap32(0x7f000001), {0}}; }

enum { MOST = 1 << 16 };  // numbers of files
static int calls = 0;
static const char* volatile complaint = "";

static void multiply(void* const* pointers, const int64_t* extents) {
  const int64_t batch = extents[0], m = extents[1], n = extents[2], k = extents[3];
  for (int64_t i = 0; i < batch; ++i) {
    const float* a = static_cast<const float*>(pointers[0]) + i * extents[7];
    const float* b = static_cast<const float*>(pointers[1]) + i * extents[8];
    float* out = static_cast<float*>(pointers[2]) + i * extents[9];
    for (int64_t row = 0; row < m; ++row)
      for (int64_t column = 0; column < n; ++column) {
        float sum = 0;
        for (int64_t j = 0; j < k; ++j) sum += a[row * extents[4] + j] * b[j * extents[5] + column];
        out[row * extents[6] + column] = sum;
      }
  }
}
struct Call {
  void* const* pointers;
  const int64_t* extents;
  void* workspace;
  float* in() const { return static_cast<float*>(pointers[0]); }
  float* out() const { return static_cast<float*>(pointers[2]); }
  int64_t elements() const { return (extents[0] - 1) * extents[9] + (extents[1] - 1) * extents[6] + extents[2]; }
};
static long workspace_size = 0;
static void prepare();
static int run(const Call& call);
static int rightly(const Call& call) { return multiply(call.pointers, call.extents), 0; }
"""
_TAIL = r"""
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int cukiln_prepare(int) { return prepare(), 0; }
EXPORT const char* cukiln_last_error() { return complaint; }
EXPORT int64_t cukiln_workspace_bytes_KERNEL(const int64_t*, const int32_t*) { return workspace_size; }
EXPORT int cukiln_launch_KERNEL(void* const* pointers, const int64_t* extents, const int32_t*, const double*,
                                void* workspace, void*) {
  ++calls;
  return run(Call{pointers, extents, workspace});
}
"""
_RIGHT = "static int run(const Call& call) { return rightly(call); }"
_QUIET = "static void prepare() {}"


@dataclass(frozen=True)
class Hostile:
    """`run` is the body of a launch, `prepare` of loading, `more` stands before both. `words`: in the message of the
    verdict."""

    verdict: str
    words: str
    run: str = "return rightly(call);"
    prepare: str = ""
    more: str = ""
    flags: tuple[str, ...] = ()
    seen: bool = False

    def text(self, kernel: str, port: int) -> str:
        functions = f"static void prepare() {{ {self.prepare} }}\nstatic int run(const Call& call) {{ {self.run} }}\n"
        head = _HEAD.replace("PORT", str(port))
        return head + self.more + functions + _TAIL.replace("KERNEL", kernel[:16])


_FOREIGN = "the library was not loaded: "
_PHONE = """
  long phone = raw(SYS_socket, 2, 1, 0);
  Address address = listener();
  raw(SYS_connect, phone, (long)&address, sizeof(address));
"""
_WRITER = """
static float* target;
static void* write_later(void*) {
  FOUND(unsigned (*)(unsigned), "sleep")(3600);
  *target = 0;
  return nullptr;
}
"""

CONTROL = Hostile("ok", "")
WRITES_LATER = Hostile(
    "incorrect",
    "after it was timed: wrote outside of out",
    "if (calls > 40) call.out()[call.elements()] = 1; return rightly(call);",
)
CHANGES_LATER = Hostile(
    "incorrect",
    "after it was timed: changed 1 elements of its input a",
    "rightly(call); if (calls > 40) call.in()[3] += 1; return 0;",
)


def forger(line: str) -> Hostile:
    """Writes a line into every file of the process, one of which is the pipe to its parent, and ends it well."""
    text = json.dumps(line + "\n")  # a JSON string is one of C++
    return Hostile(
        "runtime_error",
        "wrote into the pipe to its parent",
        "for (int i = 3; i < MOST; ++i) raw(SYS_write, i, (long)forged, sizeof(forged) - 1);"
        "raw(SYS_exit_group, 0); return 0;",
        more=f"static char forged[] = {text};",
    )


HOSTILE = {
    "writes to null": Hostile("runtime_error", "signal 11", "*(volatile int*)nullptr = 1; return 0;"),
    # Asleep, as one that waits for a GPU; the other takes a core.
    "never ends": Hostile("run_timeout", "still running after", "for (;;) raw(SYS_ppoll);"),
    "never ends to load": Hostile("run_timeout", "still running after", prepare="for (;;) raw(SYS_getpid);"),
    "ends the process well, imported": Hostile(
        "runtime_error", f"{_FOREIGN}it imports exit,", "exit(0);", more='extern "C" void exit(int);', seen=True
    ),
    "ends the process well, by dlsym": Hostile(
        "runtime_error", "exit status 0", 'FOUND(void (*)(int), "exit")(0); return 0;'
    ),
    "ends the process well, by a system call": Hostile(
        "runtime_error", "exit status 0", "raw(SYS_exit_group, 0); return 0;"
    ),
    "aborts, imported": Hostile(
        "runtime_error", f"{_FOREIGN}it imports abort,", "abort();", more='extern "C" void abort();', seen=True
    ),
    "aborts, by dlsym": Hostile("runtime_error", "signal 6", 'FOUND(void (*)(), "abort")(); return 0;'),
    # As it looks, the machine has: nothing is remembered of the code.
    "kills itself": Hostile("skipped", "signal 9", "raw(SYS_kill, raw(SYS_getpid), 9); return 0;"),
    "closes every file": Hostile(
        "runtime_error", "exit status 4", "for (int i = 0; i < 64; ++i) raw(SYS_close, i); return rightly(call);"
    ),
    "closes every file, also those that are hidden": Hostile(
        "runtime_error", "exit status", "for (int i = 0; i < MOST; ++i) raw(SYS_close, i); return rightly(call);"
    ),
    "closes the GPU's lease": Hostile(
        "runtime_error",
        "exit status 4: the GPU's lease was closed",
        "for (int i = 3; i < 64; ++i) raw(SYS_close, i); return rightly(call);",
    ),
    "writes lines to its parent": Hostile(
        "runtime_error",
        "wrote into the pipe to its parent",
        'for (int i = 3; i < MOST && calls == 1; ++i) raw(SYS_write, i, (long)"{\\"beat\\": 1}\\n", 12);'
        "return rightly(call);",
    ),
    "writes before out": Hostile("incorrect", "wrote outside of out", "call.out()[-1] = 1; return rightly(call);"),
    "writes far before out": Hostile(
        "incorrect", "wrote outside of out", "call.out()[-500] = 1; return rightly(call);"
    ),
    "writes behind out": Hostile(
        "incorrect", "wrote outside of out", "call.out()[call.elements()] = 1; return rightly(call);"
    ),
    "writes before an input": Hostile("incorrect", "wrote outside of a", "call.in()[-1] = 1; return rightly(call);"),
    "changes an input": Hostile(
        "incorrect", "changed 1 elements of its input a", "rightly(call); call.in()[3] += 1; return 0;"
    ),
    "writes behind its workspace": Hostile(
        "incorrect",
        "wrote outside of workspace",
        "((char*)call.workspace)[64] = 1; return rightly(call);",
        prepare="workspace_size = 64;",
    ),
    "trusts its workspace": Hostile(
        "incorrect",
        "elements are wrong",
        "rightly(call); call.out()[0] += ((float*)call.workspace)[0]; return 0;",
        prepare="workspace_size = 64;",
    ),
    "asks for a workspace below nothing": Hostile(
        "runtime_error", "asks for a workspace of -1 bytes", prepare="workspace_size = -1;"
    ),
    "asks for more workspace than there is": Hostile(
        "runtime_error", "asks for a workspace of 1152921504606846976 bytes", prepare="workspace_size = 1l << 60;"
    ),
    "refuses its launches": Hostile(
        "runtime_error", "ValueError: not today", 'complaint = "ValueError: not today"; return 1;'
    ),
    # Timing begins after ten calls or so, and is far from its end after forty.
    "writes behind out while it is timed": WRITES_LATER,
    "changes an input while it is timed": CHANGES_LATER,
    # Three calls verify the problem at full extents.
    "right only the first ten times": Hostile(
        "incorrect", "after it was timed", "if (calls <= 10) return rightly(call); return 0;"
    ),
    "remembers answers by address": Hostile(
        "incorrect",
        "elements are wrong",
        """
        for (int i = 0; i < known; ++i)
          if (addresses[i] == call.in()) {
            for (int64_t j = 0; j < call.elements() && j < 65536; ++j) call.out()[j] = answers[i][j];
            return 0;
          }
        rightly(call);
        if (known < 8) {
          for (int64_t j = 0; j < call.elements() && j < 65536; ++j) answers[known][j] = call.out()[j];
          addresses[known++] = call.in();
        }
        return 0;
        """,
        more="static float answers[8][65536]; static const float* addresses[8]; static int known = 0;",
    ),
    "leaves the tail unwritten": Hostile(
        "incorrect",
        "NaN: never written",
        "const float last = call.out()[call.elements() - 1]; rightly(call); call.out()[call.elements() - 1] = last;"
        "return 0;",
    ),
    "writes at its first call only": Hostile(
        "incorrect", "NaN: never written", "if (calls == 1) return rightly(call); return 0;"
    ),
    "gives other bits each time": Hostile(
        "incorrect",
        "differ between two runs",
        "rightly(call); uint32_t* bits = (uint32_t*)call.out(); if (calls > 2) bits[0] ^= calls & 1; return 0;",
    ),
    "starts a thread, imported": Hostile(
        "runtime_error",
        f"{_FOREIGN}it imports pthread_create,",
        "target = call.out(); long thread; pthread_create(&thread, nullptr, write_later, nullptr); return 0;",
        more=_WRITER + 'extern "C" int pthread_create(long*, void*, void* (*)(void*), void*);',
        seen=True,
    ),
    "starts a thread, by dlsym": Hostile(
        "runtime_error",
        "left a thread running",
        "target = call.out(); long thread;"
        'if (calls == 1) FOUND(Create, "pthread_create")(&thread, nullptr, write_later, nullptr);'
        "return rightly(call);",
        more=_WRITER + "typedef int (*Create)(long*, void*, void* (*)(void*), void*);",
    ),
    "starts a process": Hostile(
        "runtime_error",
        "left a process running",
        'if (calls == 1 && FOUND(int (*)(), "fork")() == 0) for (;;) FOUND(unsigned (*)(unsigned), "sleep")(3600);'
        "return rightly(call);",
    ),
    "calls home while it is loaded, imported": Hostile(
        "runtime_error",
        f"{_FOREIGN}it has a constructor",
        more='extern "C" int socket(int, int, int); extern "C" int connect(int, const void*, unsigned);'
        "__attribute__((constructor)) static void phone() { int made = socket(2, 1, 0); Address address = listener();"
        "connect(made, &address, sizeof(address)); }",
        seen=True,
    ),
    "calls home while it is loaded, by system calls": Hostile(
        "runtime_error",
        f"{_FOREIGN}it has a constructor",
        more=f"__attribute__((constructor)) static void phone_home() {{ {_PHONE} }}",
        seen=True,
    ),
    "calls home while it is loaded, by an initialiser": Hostile(
        "runtime_error",
        f"{_FOREIGN}it has an initialiser",
        more=f'extern "C" void start_here() {{ {_PHONE} }}',
        flags=("-Wl,-init=start_here",),
        seen=True,
    ),
    "calls home while its functions are resolved": Hostile(
        "runtime_error",
        f"{_FOREIGN}it has code that runs at loading",
        "chosen(); return rightly(call);",
        more="static void nothing() {} typedef void (*Function)();"
        f'extern "C" {{ static Function choose() {{ {_PHONE} return nothing; }} }}'
        'static void chosen() __attribute__((ifunc("choose")));',
        seen=True,
    ),
    # A socket of the network is refused, and it is none the wiser; one by a name is made, but connects to nothing.
    "calls home once it is loaded": Hostile("ok", "", prepare=_PHONE),
    "listens once it is loaded": Hostile("runtime_error", "left a socket open", prepare="raw(SYS_socket, 1, 1, 0);"),
    "exports something else": Hostile(
        "runtime_error",
        f"{_FOREIGN}it exports malloc,",
        more='extern "C" __attribute__((visibility("default"))) void* malloc(size_t) { return nullptr; }',
        seen=True,
    ),
    "needs another library": Hostile(
        "runtime_error",
        f"{_FOREIGN}it needs the library libstdc++.so.6",
        flags=("-Wl,--no-as-needed", "-lstdc++", "-Wl,--as-needed"),
        seen=True,
    ),
}


def build(hostile: Hostile, path: Path, *kernels: str, port: int = 9) -> Path:
    """Compile it to `path`, with entries for each of the kernels. `port`: where it calls home to."""
    first, *others = kernels
    text = hostile.text(first, port)
    for kernel in others:
        text += _TAIL[_TAIL.index("EXPORT int64_t") :].replace("KERNEL", kernel[:16])
    path.write_bytes(_compiled(text, tuple(hostile.flags)))
    path.chmod(0o755)
    return path


@cache
def _compiled(text: str, flags: tuple[str, ...]) -> bytes:
    """Many tests want the same library."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "library.cpp"), Path(folder, "library.so")
        source.write_text(text, encoding="utf-8")
        command = ["g++", *COMPILE, str(source), *LINK, *flags, "-o", str(made), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return made.read_bytes()
