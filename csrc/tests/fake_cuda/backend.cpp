// The host side of the CUDA backend, compiled as C++ with the fake runtime.
#include "gpu/c_api.cu"
#include "gpu/capture.cu"
#include "gpu/communicator.cu"
#include "gpu/ipc.cu"
#include "gpu/launch.cu"
#include "gpu/stream_order.cu"
