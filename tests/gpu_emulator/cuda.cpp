// A CUDA runtime and driver that run nothing: device memory is the host's (untouched pages cost nothing), and each
// launch is a line of $FAKE_LOG: kind, name, grid x y z, threads. Preloaded, and found as libcuda.so.1. All functions
// that are not here only say that all went well (`build` in __main__.py).
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

static const size_t total = size_t(79.1 * (1ull << 30));
static const size_t span = 1ull << 42;  // of addresses, which are used once
static const size_t block = 2 << 20;
static const size_t copied = 64 << 20;  // larger copies are logged only
static std::map<const void*, const char*> kernels;  // names, by the host's function
static std::atomic<long> next_handle(0x1000);
static std::atomic<size_t> used(0), taken(0);
static bool capturing = false;

static char* pages(size_t bytes) {
  return (char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
static char* const device = pages(span);

template <class T>
static cudaError_t handle(T* made) {
  *made = T(next_handle += 16);
  return cudaSuccess;
}

// A function that succeeds, after it has done `value`.
#define SETS(name, value, ...) \
  cudaError_t name(__VA_ARGS__) { value; return cudaSuccess; }
#define DRIVER(name, value, ...) \
  CUresult name(__VA_ARGS__) { value; return CUDA_SUCCESS; }

extern "C" {
void fake_log(const char* kind, const char* name, unsigned x, unsigned y, unsigned z, unsigned threads) {
  static FILE* log = fopen(getenv("FAKE_LOG"), "a");
  fprintf(log, "%s\t%s\t%u\t%u\t%u\t%u\n", kind, name, x, y, z, threads);
  fflush(log);
}

// --- the device
static std::map<int, int> attributes = {
    {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrWarpSize, 32}, {cudaDevAttrMaxRegistersPerBlock, 65536},
    {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrMaxSharedMemoryPerBlock, 49152}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
    {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535}};
static int attribute(int number) { return attributes.count(number) ? attributes[number] : 1; }
SETS(cudaDeviceGetAttribute, *n = attribute(a), int* n, cudaDeviceAttr a, int)
DRIVER(cuDeviceGetAttribute, *n = attribute(a), int* n, CUdevice_attribute a, CUdevice)
SETS(cudaGetDeviceCount, *n = 1, int* n)
SETS(cudaGetDevice, *n = 0, int* n)
SETS(cudaMemGetInfo, (*free = total - used, *all = total), size_t* free, size_t* all)
SETS(cudaDeviceGetStreamPriorityRange, (*least = 0, *greatest = -5), int* least, int* greatest)
DRIVER(cuDeviceGet, *d = 0, CUdevice* d, int)
DRIVER(cuDevicePrimaryCtxGetState, (*flags = 0, *active = 1), CUdevice, unsigned* flags, int* active)
DRIVER(cuCtxGetCurrent, *c = CUcontext(0x11), CUcontext* c)
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->totalGlobalMem = total + (1ull << 28);
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = 9;
  p->multiProcessorCount = 132;
  p->l2CacheSize = 50 << 20;
  return cudaSuccess;
}

// --- memory: a block's size is before it
cudaError_t cudaMalloc(void** p, size_t n) {
  size_t bytes = (n + block - 1) & ~(block - 1);
  if (used + bytes > total) return cudaErrorMemoryAllocation;
  used += bytes;
  *p = device + taken.fetch_add(bytes + block) + block;
  ((size_t*)*p)[-1] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  if (!p) return cudaSuccess;
  size_t bytes = ((size_t*)p)[-1];
  used -= bytes;
  madvise(p, bytes, MADV_DONTNEED);
  return cudaSuccess;
}
SETS(cudaHostAlloc, *p = pages(n), void** p, size_t n, unsigned)
static bool ours(const void* p) { return p >= device && p < device + span; }
SETS(cudaPointerGetAttributes, (*a = {cudaMemoryType(ours(p) * cudaMemoryTypeDevice), ours(p) - 1, (void*)p}),
     cudaPointerAttributes* a, const void* p)
DRIVER(cuPointerGetAttribute, *(CUdeviceptr*)data = p, void* data, CUpointer_attribute, CUdeviceptr p)
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t) {
  bool up = kind == cudaMemcpyHostToDevice, down = kind == cudaMemcpyDeviceToHost;
  fake_log(up ? "H2D" : down ? "D2H" : "D2D", "memcpy", n >> 10, n, 0, 0);
  if (n <= copied) memmove(to, from, n);
  return cudaSuccess;
}
SETS(cudaMemcpy, cudaMemcpyAsync(to, from, n, k, 0), void* to, const void* from, size_t n, cudaMemcpyKind k)
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t) {
  fake_log("memset", "memset", n >> 10, n, 0, 0);
  if (n <= copied) memset(p, value, n);
  return cudaSuccess;
}

// --- streams, events and graphs
SETS(cudaStreamCreateWithPriority, handle(s), cudaStream_t* s, unsigned, int)
SETS(cudaEventCreateWithFlags, handle(e), cudaEvent_t* e, unsigned)
SETS(cudaEventElapsedTime, *ms = 1, float* ms, cudaEvent_t, cudaEvent_t)
SETS(cudaStreamSynchronize, fake_log("SYNC", "stream", 0, 0, 0, 0), cudaStream_t)
SETS(cudaDeviceSynchronize, fake_log("SYNC", "device", 0, 0, 0, 0))
SETS(cudaEventSynchronize, fake_log("SYNC", "event", 0, 0, 0, 0), cudaEvent_t)
static cudaStreamCaptureStatus status() {
  return capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
SETS(cudaStreamIsCapturing, *s = status(), cudaStream_t, cudaStreamCaptureStatus* s)
SETS(cudaStreamGetCaptureInfo, (*s = status(), *id = 7), cudaStream_t, cudaStreamCaptureStatus* s,
     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*)
SETS(cudaStreamBeginCapture, (capturing = true, fake_log("CAPTURE", "begin", 0, 0, 0, 0)), cudaStream_t,
     cudaStreamCaptureMode)
SETS(cudaStreamEndCapture, (capturing = false, fake_log("CAPTURE", "end", 0, 0, 0, 0), handle(graph)), cudaStream_t,
     cudaGraph_t* graph)
SETS(cudaGraphInstantiateWithFlags, handle(e), cudaGraphExec_t* e, cudaGraph_t, unsigned long long)
SETS(cudaGraphGetNodes, *n = 10, cudaGraph_t, cudaGraphNode_t*, size_t* n)
SETS(cudaGraphLaunch, fake_log("GRAPH", "launch", 0, 0, 0, 0), cudaGraphExec_t, cudaStream_t)

// --- kernels of torch's own libraries: what nvcc's code calls
static thread_local dim3 pushed[2];
char __cudaInitModule(void**) { return 1; }
SETS(__cudaRegisterFunction, kernels[host] = name, void**, const char* host, char*, const char* name, int, uint3*,
     uint3*, dim3*, dim3*, int*)
SETS(__cudaPushCallConfiguration, (pushed[0] = grid, pushed[1] = block), dim3 grid, dim3 block, size_t, void*)
SETS(__cudaPopCallConfiguration, (*grid = pushed[0], *block = pushed[1], *shared = 0, *stream = nullptr), dim3* grid,
     dim3* block, size_t* shared, void** stream)
SETS(__cudaGetKernel, *k = f, const void** k, const void* f)
SETS(cudaLaunchKernel, fake_log("K", kernels[f], grid.x, grid.y, grid.z, block.x * block.y * block.z), const void* f,
     dim3 grid, dim3 block, void**, size_t, cudaStream_t)
SETS(__cudaLaunchKernel, cudaLaunchKernel(f, grid, block, 0, 0, 0), const void* f, dim3 grid, dim3 block, void**,
     size_t, cudaStream_t)
SETS(cudaFuncGetAttributes, (*a = {}, a->maxThreadsPerBlock = 1024, a->binaryVersion = a->ptxVersion = 90),
     cudaFuncAttributes* a, const void*)
SETS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, *n = 2, int* n, const void*, int, size_t, unsigned)

// --- kernels of Triton
DRIVER(cuModuleLoad, *m = CUmodule(0x22), CUmodule* m, const char*)
DRIVER(cuModuleLoadData, *m = CUmodule(0x22), CUmodule* m, const void*)
DRIVER(cuModuleGetFunction, *f = CUfunction(strdup(name)), CUfunction* f, CUmodule, const char* name)
DRIVER(cuFuncGetAttribute, *n = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, int* n,
       CUfunction_attribute a, CUfunction)
DRIVER(cuLaunchKernelEx, fake_log("T", (char*)f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX),
       const CUlaunchConfig* c, CUfunction f, void**, void**)
DRIVER(cuLaunchKernel, fake_log("T", (char*)f, x, y, z, threads), CUfunction f, unsigned x, unsigned y, unsigned z,
       unsigned threads, unsigned, unsigned, unsigned, CUstream, void**, void**)
}
