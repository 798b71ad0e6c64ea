// The host side of the CUDA backend, compiled as C++ over the fake runtime.
#include "cuda/c_api.cu"
#include "cuda/capture.cu"
#include "cuda/communicator.cu"
#include "cuda/ipc.cu"
#include "cuda/launch.cu"
#include "cuda/stream_order.cu"
