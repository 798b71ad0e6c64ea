// Part of libraries that are linked for an older glibc (older_glibc.cmake).
//
// libstdc++ asks glibc, from 2.32 on, whether the process has one thread, and then counts references
// without atomics. To say no is right at any time.
extern "C" {
extern char __libc_single_threaded;
char __libc_single_threaded = 0;
}
