// Tests named shared memory: creating and opening it, and the errors.
#include <string>

#include "tests/testing.h"

namespace allnorm::testing {
namespace {

void expect(int32_t status, AllnormStatus expected, const char* word) {
  check(status == expected && strstr(allnorm_last_error(), word) != nullptr,
        "status %d, expected %d; \"%s\" lacks \"%s\"", status, expected, allnorm_last_error(),
        word);
}

TEST(shared_memory) {
  const std::string name = "/allnorm-test-" + std::to_string(getpid());
  void *created = nullptr, *opened = nullptr, *none = &created;
  expect(allnorm_shm_open(name.c_str(), 8192, &none), ALLNORM_SYSTEM, name.c_str());
  check(none == nullptr, "an address was returned with an error");

  check(allnorm_shm_create(name.c_str(), 8192, &created) == ALLNORM_OK, "%s", allnorm_last_error());
  expect(allnorm_shm_create(name.c_str(), 8192, &none), ALLNORM_SYSTEM, "unlink");
  expect(allnorm_shm_open(name.c_str(), 16384, &none), ALLNORM_INVALID_ARGUMENT, "8192");
  check(allnorm_shm_open(name.c_str(), 8192, &opened) == ALLNORM_OK, "%s", allnorm_last_error());
  static_cast<char*>(created)[8191] = 42;
  check(static_cast<char*>(opened)[8191] == 42 && static_cast<char*>(opened)[0] == 0,
        "two mappings differ");
  check(allnorm_shm_unlink(name.c_str()) == ALLNORM_OK, "%s", allnorm_last_error());
  expect(allnorm_shm_unlink(name.c_str()), ALLNORM_SYSTEM, name.c_str());
  // The mappings remain valid after unlink.
  static_cast<char*>(created)[0] = 7;
  check(static_cast<char*>(opened)[0] == 7, "memory was lost with its name");
  check(allnorm_shm_unmap(created, 8192) == ALLNORM_OK, "%s", allnorm_last_error());
  check(allnorm_shm_unmap(opened, 8192) == ALLNORM_OK, "%s", allnorm_last_error());
}

TEST(errors) {
  void* address = nullptr;
  // More memory than any machine has. Creating it fails with advice, and leaves no name behind.
  const std::string name = "/allnorm-test-large-" + std::to_string(getpid());
  expect(allnorm_shm_create(name.c_str(), int64_t{1} << 50, &address), ALLNORM_SYSTEM,
         "--shm-size");
  expect(allnorm_shm_open(name.c_str(), 4096, &address), ALLNORM_SYSTEM, name.c_str());
  for (const char* bad : {"", "/", "name", "/a/b"}) {
    expect(allnorm_shm_create(bad, 4096, &address), ALLNORM_INVALID_ARGUMENT, "leading '/'");
  }
  expect(allnorm_shm_create(nullptr, 4096, &address), ALLNORM_INVALID_ARGUMENT, "NULL");
  expect(allnorm_shm_create("/x", 0, &address), ALLNORM_INVALID_ARGUMENT, "0 bytes");
  expect(allnorm_shm_open("/x", -1, &address), ALLNORM_INVALID_ARGUMENT, "-1 bytes");
  expect(allnorm_shm_create("/x", 1, nullptr), ALLNORM_INVALID_ARGUMENT, "NULL");
  expect(allnorm_shm_unmap(nullptr, 1), ALLNORM_INVALID_ARGUMENT, "unmap");
}

}  // namespace
}  // namespace allnorm::testing
