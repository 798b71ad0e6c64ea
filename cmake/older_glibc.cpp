// Defines a symbol for libraries that are linked for an older glibc (older_glibc.cmake).
//
// glibc sets it from 2.32 on: nonzero while the process has a single thread. libstdc++ then counts
// references without atomics. Zero is always correct.
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
