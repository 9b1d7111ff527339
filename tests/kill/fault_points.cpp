// SPDX-License-Identifier: Apache-2.0
// A library for LD_PRELOAD in which the disk, or the whole process, fails at a chosen instant. It
// counts the calls that change files whose path contains $FAULT_PATH, those of all threads
// together; at the one with the number $FAULT_AT it does what $FAULT_KIND says:
//
//   kill, kill-after       SIGKILL before the call, or after it
//   short                  half of what is to be written, then SIGKILL
//   enospc, eio, erofs     that error, at the first call from there on that may give it; a disk
//   that
//                          is full has room for half of a write
//
// With $FAULT_LASTING the error stays. $FAULT_LOG gets "fault NUMBER CALL PATH" when it comes;
// without $FAULT_AT, a line "point NUMBER CALL PATH" of each.
#undef _FILE_OFFSET_BITS  // which gives pwrite and pwrite64 one name
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

enum class Call { open, write, sync, close, truncate, rename, mkdir, symlink, remove };
constexpr const char* kNames[] = {"open",   "write", "sync",    "close", "truncate",
                                  "rename", "mkdir", "symlink", "remove"};

// Read when they are first needed: other libraries call before this one's constructors.
struct Plan {
  std::string path, kind, log;
  long at = 0;
  bool lasting = false;
  Plan() {
    const auto text = [](const char* name) {
      const char* value = std::getenv(name);
      return std::string(value != nullptr ? value : "");
    };
    path = text("FAULT_PATH");
    kind = text("FAULT_KIND");
    log = text("FAULT_LOG");
    at = std::atol(text("FAULT_AT").c_str());
    lasting = !text("FAULT_LASTING").empty();
  }
  int error() const { return kind == "enospc" ? ENOSPC : kind == "erofs" ? EROFS : EIO; }
  bool kills() const { return kind == "kill" || kind == "kill-after" || kind == "short"; }
  // May the call give the error?
  bool fits(Call call) const {
    if (kind == "enospc") {
      return call == Call::open || call == Call::write || call == Call::sync ||
             call == Call::rename || call == Call::mkdir || call == Call::symlink;
    }
    if (kind == "erofs") {
      return call == Call::open || call == Call::truncate || call == Call::rename ||
             call == Call::mkdir || call == Call::symlink || call == Call::remove;
    }
    return true;
  }
};

const Plan& plan() {
  static const Plan& all = *new Plan;  // stays: what ends after this library may still call it
  return all;
}

std::atomic<long> points{0};
std::atomic<bool> came{false};  // an error, once

template <typename Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

void log_line(const std::string& line) {
  if (plan().log.empty()) return;
  const int file = real<int(const char*, int, ...)>("open")(plan().log.c_str(),
                                                            O_WRONLY | O_CREAT | O_APPEND, 0666);
  const auto written =
      real<ssize_t(int, const void*, size_t)>("write")(file, line.data(), line.size());
  (void)written;
  real<int(int)>("close")(file);
}

std::string path_of(int descriptor) {
  char target[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  const ssize_t size = readlink(link.c_str(), target, sizeof target);
  return size > 0 ? std::string(target, static_cast<std::size_t>(size)) : std::string();
}

std::string path_at(int directory, const char* name) {
  if (name[0] == '/' || directory == AT_FDCWD) return name;
  return path_of(directory) + "/" + name;
}

[[noreturn]] void end_process() {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

bool counts(const std::string& path) {
  return !plan().path.empty() && path.find(plan().path) != std::string::npos;
}

// Does it come now? Counts the call.
bool now(Call call, const std::string& path) {
  const long number = ++points;
  const Plan& p = plan();
  const auto log = [&](const char* what) {
    log_line(what + (" " + std::to_string(number)) + " " + kNames[static_cast<int>(call)] + " " +
             path + "\n");
  };
  if (p.at <= 0) log("point");
  if (p.at <= 0 || number < p.at) return false;
  if (p.kills()) {
    if (number != p.at) return false;
  } else if (!p.fits(call) || (came.exchange(true) && !p.lasting)) {
    return false;
  }
  log("fault");
  return true;
}

// What a call returns: `act` makes it. -1 with errno where a fault comes.
template <typename Act>
auto point(Call call, const std::string& path, Act act) -> decltype(act()) {
  if (!counts(path) || !now(call, path)) return act();
  if (!plan().kills()) {
    if (call == Call::close) act();  // it is closed all the same
    errno = plan().error();
    return -1;
  }
  if (plan().kind == "kill-after") act();
  end_process();
}

// `act` writes so many bytes.
template <typename Act>
ssize_t write_point(int descriptor, std::size_t size, Act act) {
  thread_local bool full = false;
  const std::string path = path_of(descriptor);
  if (!counts(path)) return act(size);
  if (full) {  // the rest of what had room for half
    full = false;
    errno = ENOSPC;
    return -1;
  }
  if (!now(Call::write, path)) return act(size);
  const std::string& kind = plan().kind;
  if (kind == "enospc" && size > 1) {
    full = true;
    return act(size / 2);
  }
  if (!plan().kills()) {
    errno = plan().error();
    return -1;
  }
  if (kind == "short") act(size / 2);
  if (kind == "kill-after") act(size);
  end_process();
}

int open_point(const char* name, int directory, const char* path, int flags, mode_t mode) {
  const auto act = [&] {
    return std::strncmp(name, "openat", 6) == 0
               ? real<int(int, const char*, int, ...)>(name)(directory, path, flags, mode)
               : real<int(const char*, int, ...)>(name)(path, flags, mode);
  };
  if ((flags & O_CREAT) == 0) return act();
  return point(Call::open, path_at(directory, path), act);
}

mode_t mode_of(int flags, va_list& rest) {
  return (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
}

}  // namespace

extern "C" {

#define OPEN(name)                                         \
  int name(const char* path, int flags, ...) {             \
    va_list rest;                                          \
    va_start(rest, flags);                                 \
    const mode_t mode = mode_of(flags, rest);              \
    va_end(rest);                                          \
    return open_point(#name, AT_FDCWD, path, flags, mode); \
  }
#define OPENAT(name)                                          \
  int name(int directory, const char* path, int flags, ...) { \
    va_list rest;                                             \
    va_start(rest, flags);                                    \
    const mode_t mode = mode_of(flags, rest);                 \
    va_end(rest);                                             \
    return open_point(#name, directory, path, flags, mode);   \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void* data, size_t size) {
  return write_point(file, size, [&](size_t count) {
    return real<ssize_t(int, const void*, size_t)>("write")(file, data, count);
  });
}
ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  return write_point(file, size, [&](size_t count) {
    return real<ssize_t(int, const void*, size_t, off_t)>("pwrite")(file, data, count, offset);
  });
}
ssize_t pwrite64(int file, const void* data, size_t size, off64_t offset) {
  return write_point(file, size, [&](size_t count) {
    return real<ssize_t(int, const void*, size_t, off64_t)>("pwrite64")(file, data, count, offset);
  });
}
int fsync(int file) {
  return point(Call::sync, path_of(file), [&] { return real<int(int)>("fsync")(file); });
}
int fdatasync(int file) {
  return point(Call::sync, path_of(file), [&] { return real<int(int)>("fdatasync")(file); });
}
int ftruncate(int file, off_t size) noexcept {
  return point(Call::truncate, path_of(file),
               [&] { return real<int(int, off_t)>("ftruncate")(file, size); });
}
int close(int file) {
  // Of a file that was written: nothing else that is closed changes anything.
  const int flags = fcntl(file, F_GETFL);
  const auto act = [&] { return real<int(int)>("close")(file); };
  if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY) return act();
  return point(Call::close, path_of(file), act);
}
int rename(const char* from, const char* to) noexcept {
  return point(Call::rename, to,
               [&] { return real<int(const char*, const char*)>("rename")(from, to); });
}
int renameat2(int from_directory, const char* from, int to_directory, const char* to,
              unsigned flags) noexcept {
  return point(Call::rename, path_at(to_directory, to), [&] {
    return real<int(int, const char*, int, const char*, unsigned)>("renameat2")(
        from_directory, from, to_directory, to, flags);
  });
}
int mkdir(const char* path, mode_t mode) noexcept {
  return point(Call::mkdir, path,
               [&] { return real<int(const char*, mode_t)>("mkdir")(path, mode); });
}
int symlink(const char* target, const char* path) noexcept {
  return point(Call::symlink, path,
               [&] { return real<int(const char*, const char*)>("symlink")(target, path); });
}
int unlink(const char* path) noexcept {
  return point(Call::remove, path, [&] { return real<int(const char*)>("unlink")(path); });
}
int unlinkat(int directory, const char* path, int flags) noexcept {
  return point(Call::remove, path_at(directory, path), [&] {
    return real<int(int, const char*, int)>("unlinkat")(directory, path, flags);
  });
}
int rmdir(const char* path) noexcept {
  return point(Call::remove, path, [&] { return real<int(const char*)>("rmdir")(path); });
}
int remove(const char* path) noexcept {
  return point(Call::remove, path, [&] { return real<int(const char*)>("remove")(path); });
}

}  // extern "C"
