// Tries each door out of the fence and says of each whether it opened, a line each: `name open` or `name shut`. As a
// program, the way a compiler runs, and as a library, the way a candidate's kernel runs on the CPU.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <string>

extern char** environ;

static void say(const char* name, bool open) {
  char line[200];
  const int length = snprintf(line, sizeof line, "%s %s\n", name, open ? "open" : "shut");
  if (write(2, line, length) < 0) _exit(9);
}

static std::string content(const std::string& path) {
  std::string found;
  const int file = open(path.c_str(), O_RDONLY);
  char part[4096];
  for (ssize_t length; file >= 0 && (length = read(file, part, sizeof part)) > 0;) found.append(part, length);
  if (file >= 0) close(file);
  return found;
}

static bool holds(const std::string& text, const char* secret) { return text.find(secret) != std::string::npos; }

static bool any_process(const char* file, const char* secret) {
  DIR* folder = opendir("/proc");
  bool found = false;
  for (dirent* entry; folder && (entry = readdir(folder));)
    if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9' && atoi(entry->d_name) != getpid())
      found |= holds(content(std::string("/proc/") + entry->d_name + "/" + file), secret);
  if (folder) closedir(folder);
  return found;
}

// The thing itself: a mount may show an empty one in its place.
static bool opens(const char* path, int way) {
  const int file = open(path, way | O_CLOEXEC);
  struct stat found = {};
  if (file < 0) return false;
  fstat(file, &found);
  close(file);
  return S_ISREG(found.st_mode);
}

static bool lists(const char* path) {
  DIR* folder = opendir(path);
  int entries = 0;
  while (folder && readdir(folder)) ++entries;
  if (folder) closedir(folder);
  return entries > 2;
}

static bool connects(const sockaddr* address, socklen_t length) {
  const int handle = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool done = handle >= 0 && connect(handle, address, length) == 0;
  if (handle >= 0) close(handle);
  return done;
}

static bool connects_unix(const char* name, bool abstract) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  strncpy(address.sun_path + abstract, name, sizeof address.sun_path - 2);
  return connects(reinterpret_cast<sockaddr*>(&address), offsetof(sockaddr_un, sun_path) + abstract + strlen(name));
}

static bool connects_tcp(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return connects(reinterpret_cast<sockaddr*>(&address), sizeof address);
}

static bool reads_memory(int pid, const char* secret_at) {
  char part[1];
  const iovec here = {part, 1}, there = {reinterpret_cast<void*>(strtoull(secret_at, nullptr, 16)), 1};
  return process_vm_readv(pid, &here, 1, &there, 1, 0) == 1;
}

static bool traces(int pid) {
  if (ptrace(PTRACE_SEIZE, pid, nullptr, nullptr) != 0) return false;
  _exit(7);  // the tracee goes on where its tracer ends
}

static bool in_child(bool (*try_door)(int), int value) {
  const int child = fork();
  if (child == 0) _exit(try_door(value) ? 7 : 0);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 7;
}

// Whether `most` processes can be there at once, for long enough to be seen.
static bool bombs(int most) {
  int made = 0, pipes[2];
  if (pipe(pipes) != 0) return false;
  for (int child; made < most && (child = fork()) >= 0; ++made)
    if (child == 0) {
      char end;
      close(pipes[1]);
      _exit(read(pipes[0], &end, 1) < 0);
    }
  if (made >= most) sleep(20);
  close(pipes[0]), close(pipes[1]);
  while (wait(nullptr) > 0) {
  }
  return made >= most;
}

// secret pid address database other data_folder unix_socket abstract_name port processes
extern "C" __attribute__((visibility("default"))) int doors(int count, const char* const* words) {
  if (count != 11) return 8;
  const char *secret = words[1], *database = words[4], *other = words[5], *folder = words[6];
  const int pid = atoi(words[2]);
  char number[20];
  if (write(1, number, snprintf(number, sizeof number, "%d\n", geteuid())) < 0) return 9;
  bool named = false;
  for (char** entry = environ; *entry; ++entry) named |= holds(*entry, secret);
  say("environment", named);
  say("environment-of-others", any_process("environ", secret));
  say("processes-of-others", any_process("cmdline", secret));
  say("database-read", opens(database, O_RDONLY));
  say("database-write", opens(database, O_RDWR));
  say("data-folder", lists(folder));
  say("file-of-another", opens(other, O_RDONLY));
  say("shadow", opens("/etc/shadow", O_RDONLY));
  say("unix-socket", connects_unix(words[7], false));
  say("abstract-socket", connects_unix(words[8], true));
  say("tcp", connects_tcp(atoi(words[9])));
  int pair[2];
  say("socket-pair", socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);
  say("ptrace", in_child(traces, pid));
  say("memory-of-others", reads_memory(pid, words[3]));
  say("signal", kill(pid, SIGCONT) == 0);
  say("fork-bomb", bombs(atoi(words[10])));
  return 0;
}

int main(int count, const char* const* words) { return doors(count, words); }
