// The host code in one translation unit, for compilers that do not compile .cu files as C++: the
// HIP library, and the tests with a fake runtime.
#include "gpu/c_api.cu"
#include "gpu/capture.cu"
#include "gpu/communicator.cu"
#include "gpu/ipc.cu"
#include "gpu/launch.cu"
#include "gpu/stream_order.cu"
