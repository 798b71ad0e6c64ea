// POSIX shared memory for the workspaces of one host's ranks.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>

#include "abi/error.h"
#include "allnorm.h"

namespace {

using allnorm::fail;

int32_t check_name(const char* name) {
  if (name == nullptr) return fail(ALLNORM_INVALID_ARGUMENT, "shared memory name is NULL");
  const size_t length = strlen(name);
  if (name[0] != '/' || length < 2 || length > NAME_MAX || strchr(name + 1, '/') != nullptr) {
    return fail(ALLNORM_INVALID_ARGUMENT,
                "shared memory name \"%s\": expected a leading '/', no other '/', and 2 to %d "
                "characters",
                name, NAME_MAX);
  }
  return ALLNORM_OK;
}

int32_t check_arguments(const char* name, int64_t bytes, void** address) {
  if (address == nullptr) return allnorm::missing("address");
  *address = nullptr;
  if (bytes <= 0) {
    return fail(ALLNORM_INVALID_ARGUMENT, "shared memory size is %lld bytes; expected at least 1",
                static_cast<long long>(bytes));
  }
  return check_name(name);
}

int32_t no_space(const char* name, int64_t bytes) {
  struct statvfs space = {};
  const bool known = statvfs("/dev/shm", &space) == 0;
  const double mib = 1.0 / (1 << 20);
  return fail(
      ALLNORM_SYSTEM,
      "cannot reserve %.1f MiB of shared memory for \"%s\": /dev/shm has %.1f MiB free of "
      "%.1f MiB. Enlarge it (docker run --shm-size=1g, or mount -o remount,size=1g "
      "/dev/shm), delete left-over files there, or ask for a smaller workspace",
      static_cast<double>(bytes) * mib, name,
      known ? static_cast<double>(space.f_bavail) * static_cast<double>(space.f_frsize) * mib : 0.0,
      known ? static_cast<double>(space.f_blocks) * static_cast<double>(space.f_frsize) * mib
            : 0.0);
}

int32_t map(const char* name, int fd, int64_t bytes, void** address) {
  void* const mapped =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    return fail(ALLNORM_SYSTEM, "cannot map %lld bytes of shared memory \"%s\": %s",
                static_cast<long long>(bytes), name, strerror(errno));
  }
  *address = mapped;
  return ALLNORM_OK;
}

// Sizes the new object and allocates its pages: writing to a page for which /dev/shm has no memory
// would raise SIGBUS in the middle of a collective.
int32_t reserve(const char* name, int fd, int64_t bytes) {
  int error = ftruncate(fd, bytes) == 0 ? 0 : errno;
  if (error == 0) {
    do {
      error = posix_fallocate(fd, 0, bytes);
    } while (error == EINTR);
  }
  if (error == 0) return ALLNORM_OK;
  if (error == ENOSPC || error == ENOMEM) return no_space(name, bytes);
  if (error == EFBIG) {
    return fail(
        ALLNORM_SYSTEM,
        "cannot reserve %lld bytes of shared memory \"%s\": more than a file of this process "
        "may have. Raise RLIMIT_FSIZE (ulimit -f), or ask for a smaller workspace",
        static_cast<long long>(bytes), name);
  }
  return fail(ALLNORM_SYSTEM, "cannot reserve %lld bytes of shared memory \"%s\": %s",
              static_cast<long long>(bytes), name, strerror(error));
}

}  // namespace

int32_t allnorm_shm_create(const char* name, int64_t bytes, void** address) {
  int32_t status = check_arguments(name, bytes, address);
  if (status != ALLNORM_OK) return status;
  const int fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) {
    return fail(ALLNORM_SYSTEM, "cannot create shared memory \"%s\": %s%s", name, strerror(errno),
                errno == EEXIST ? ". Another run uses this name or was killed while it did: choose "
                                  "another name, or unlink it"
                                : ". Is /dev/shm mounted and writable?");
  }
  status = reserve(name, fd, bytes);
  if (status == ALLNORM_OK) status = map(name, fd, bytes, address);
  close(fd);
  if (status != ALLNORM_OK) shm_unlink(name);
  return status;
}

int32_t allnorm_shm_open(const char* name, int64_t bytes, void** address) {
  int32_t status = check_arguments(name, bytes, address);
  if (status != ALLNORM_OK) return status;
  const int fd = shm_open(name, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0 && errno == EACCES) {
    return fail(ALLNORM_SYSTEM,
                "cannot open shared memory \"%s\": %s. It belongs to the user of the rank that "
                "created it, and this process runs as user %lld: start all ranks as the same user",
                name, strerror(EACCES), static_cast<long long>(geteuid()));
  }
  if (fd < 0) {
    return fail(ALLNORM_SYSTEM,
                "cannot open shared memory \"%s\": %s. The rank that owns it must create it first, "
                "on the same host and in the same container",
                name, strerror(errno));
  }
  struct stat info = {};
  if (fstat(fd, &info) != 0) {
    status = fail(ALLNORM_SYSTEM, "cannot read the size of shared memory \"%s\": %s", name,
                  strerror(errno));
  } else if (info.st_size != bytes) {
    // Access past the end of the object would raise SIGBUS.
    status = fail(ALLNORM_INVALID_ARGUMENT,
                  "shared memory \"%s\" has %lld bytes, expected %lld: every rank must ask for the "
                  "same workspace size",
                  name, static_cast<long long>(info.st_size), static_cast<long long>(bytes));
  } else {
    status = map(name, fd, bytes, address);
  }
  close(fd);
  return status;
}

int32_t allnorm_shm_unlink(const char* name) {
  const int32_t status = check_name(name);
  if (status != ALLNORM_OK) return status;
  if (shm_unlink(name) == 0) return ALLNORM_OK;
  return fail(ALLNORM_SYSTEM, "cannot unlink shared memory \"%s\": %s", name, strerror(errno));
}

int32_t allnorm_shm_unmap(void* address, int64_t bytes) {
  if (address == nullptr || bytes <= 0) {
    return fail(ALLNORM_INVALID_ARGUMENT,
                "cannot unmap %lld bytes at %p: expected what allnorm_shm_create or "
                "allnorm_shm_open returned",
                static_cast<long long>(bytes), address);
  }
  if (munmap(address, static_cast<size_t>(bytes)) == 0) return ALLNORM_OK;
  return fail(ALLNORM_SYSTEM, "cannot unmap %lld bytes at %p: %s", static_cast<long long>(bytes),
              address, strerror(errno));
}
