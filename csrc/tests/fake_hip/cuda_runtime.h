// Replaces CUDA's header where the fake runtime and its tests are compiled under HIP's names.
#pragma once

#include "gpu/hip/runtime.h"

// The objects that HIP's handles refer to.
#define FakeStream ihipStream_t
#define FakeEvent ihipEvent_t
#define FakeGraph ihipGraph
#define FakeNode hipGraphNode

// Names that the fake and the tests use, but not the host code.
#define cudaErrorInvalidValue hipErrorInvalidValue
#define cudaErrorMemoryAllocation hipErrorOutOfMemory
#define cudaErrorInvalidResourceHandle hipErrorInvalidResourceHandle
#define cudaErrorStreamCaptureUnsupported hipErrorStreamCaptureUnsupported
#define cudaErrorStreamCaptureInvalidated hipErrorStreamCaptureInvalidated
#define cudaErrorStreamCaptureMerge hipErrorStreamCaptureMerge
#define cudaErrorStreamCaptureUnmatched hipErrorStreamCaptureUnmatched
#define cudaErrorStreamCaptureUnjoined hipErrorStreamCaptureUnjoined
#define cudaErrorStreamCaptureIsolation hipErrorStreamCaptureIsolation
#define cudaStreamCaptureModeGlobal hipStreamCaptureModeGlobal
#define cudaMemcpyKind hipMemcpyKind
#define cudaDeviceAttr hipDeviceAttribute_t

// Edges of graphs have no ports in HIP; these stay zero.
struct cudaGraphEdgeData {
  unsigned char from_port;
  unsigned char type;
};
