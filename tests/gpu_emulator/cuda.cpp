// A CUDA runtime and driver that run nothing: device memory is the host's (untouched pages cost nothing), and each
// launch is a line of $FAKE_LOG: kind, name, grid x y z, threads. Preloaded, and found as libcuda.so.1.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

static std::mutex mutex;
static std::map<void*, size_t> blocks;  // allocations on the device
static std::map<const void*, std::string> kernels;  // by the host's function
static size_t used = 0;
static const size_t total = size_t(79.1 * (1ull << 30));
static const size_t copied = 64 << 20;  // larger copies are logged only
static bool capturing = false;
static long next_handle = 0x1000;

template <class T>
static cudaError_t handle(T* made) {
  *made = T(next_handle += 16);
  return cudaSuccess;
}

extern "C" {
void fake_log(const char* kind, const char* name, unsigned x, unsigned y, unsigned z, unsigned threads) {
  static FILE* log = getenv("FAKE_LOG") ? fopen(getenv("FAKE_LOG"), "a") : nullptr;
  if (!log) return;
  fprintf(log, "%s\t%s\t%u\t%u\t%u\t%u\n", kind, name, x, y, z, threads);
  fflush(log);
}

// ------------------------------------------------------------------------------------------------------- runtime
#define SETS(name, parameter, value, ...) \
  cudaError_t name(parameter, ##__VA_ARGS__) { value; return cudaSuccess; }

SETS(cudaGetDeviceCount, int* n, *n = 1)
SETS(cudaGetDevice, int* n, *n = 0)
SETS(cudaDriverGetVersion, int* n, *n = 13000)
SETS(cudaRuntimeGetVersion, int* n, *n = 13000)
SETS(cudaMemGetInfo, size_t* free, (*free = total - used, *all = total), size_t* all)
SETS(cudaStreamGetPriority, cudaStream_t, *n = 0, int* n)
SETS(cudaDeviceGetStreamPriorityRange, int* least, (*least = 0, *greatest = -5), int* greatest)
SETS(cudaEventElapsedTime, float* ms, *ms = 1, cudaEvent_t, cudaEvent_t)
SETS(cudaDeviceCanAccessPeer, int* can, *can = 0, int, int)
SETS(cudaDeviceGetPCIBusId, char* id, snprintf(id, n, "0000:00:1e.0"), int n, int)
SETS(cudaGraphGetNodes, cudaGraph_t, *n = 10, cudaGraphNode_t*, size_t* n)
SETS(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int* n, *n = 2, const void*, int, size_t, unsigned)
SETS(cudaStreamSynchronize, cudaStream_t, fake_log("SYNC", "stream", 0, 0, 0, 0))
SETS(cudaDeviceSynchronize, void, fake_log("SYNC", "device", 0, 0, 0, 0))
SETS(cudaEventSynchronize, cudaEvent_t, fake_log("SYNC", "event", 0, 0, 0, 0))
SETS(cudaGraphLaunch, cudaGraphExec_t, fake_log("GRAPH", "launch", 0, 0, 0, 0), cudaStream_t)
cudaError_t cudaStreamCreate(cudaStream_t* s) { return handle(s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) { return handle(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* s, unsigned, int) { return handle(s); }
cudaError_t cudaEventCreate(cudaEvent_t* e) { return handle(e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) { return handle(e); }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* e, cudaGraph_t, unsigned long long) { return handle(e); }
const char* cudaGetErrorString(cudaError_t) { return "emulated error"; }
const char* cudaGetErrorName(cudaError_t) { return "emulated"; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->totalGlobalMem = total + (1ull << 28);
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->reservedSharedMemPerBlock = 1024;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = 9;
  p->multiProcessorCount = 132;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = p->memoryPoolsSupported = 1;
  return cudaSuccess;
}
static int attribute(int number) {
  switch (number) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: return 65535;
    default: return 1;
  }
}
SETS(cudaDeviceGetAttribute, int* n, *n = attribute(a), cudaDeviceAttr a, int)

static void* pages(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}
cudaError_t cudaMalloc(void** p, size_t n) {
  std::lock_guard<std::mutex> guard(mutex);
  size_t bytes = (n + 4095) & ~4095ull;
  *p = used + bytes > total ? nullptr : pages(bytes + (2 << 20));
  if (!*p) return cudaErrorMemoryAllocation;
  blocks[*p] = bytes;
  used += bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  std::lock_guard<std::mutex> guard(mutex);
  auto found = blocks.find(p);
  if (found == blocks.end()) return cudaSuccess;
  munmap(p, found->second + (2 << 20));
  used -= found->second;
  blocks.erase(found);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
SETS(cudaHostAlloc, void** p, *p = pages((n + 4095) & ~4095ull), size_t n, unsigned)
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  std::lock_guard<std::mutex> guard(mutex);
  memset(a, 0, sizeof *a);
  auto next = blocks.upper_bound((void*)p);
  bool ours = next != blocks.begin() && (char*)p < (char*)std::prev(next)->first + std::prev(next)->second;
  a->type = ours ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  a->device = ours ? 0 : -1;
  a->devicePointer = (void*)p;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind kind) {
  bool up = kind == cudaMemcpyHostToDevice, down = kind == cudaMemcpyDeviceToHost;
  fake_log(up ? "H2D" : down ? "D2H" : "D2D", "memcpy", n >> 10, n, 0, 0);
  if (n <= copied) memmove(to, from, n);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, n, kind);
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t n, cudaStream_t) {
  fake_log("memset", "memset", n >> 10, n, 0, 0);
  if (n <= copied) memset(p, value, n);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t n) { return cudaMemsetAsync(p, value, n, nullptr); }
SETS(cudaStreamAddCallback, cudaStream_t s, f(s, cudaSuccess, data), cudaStreamCallback_t f, void* data, unsigned)
SETS(cudaLaunchHostFunc, cudaStream_t, f(data), cudaHostFn_t f, void* data)
static cudaStreamCaptureStatus status() {
  return capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}
SETS(cudaStreamIsCapturing, cudaStream_t, *s = status(), cudaStreamCaptureStatus* s)
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* s, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* n) {
  *s = status();
  if (id) *id = 7;
  if (graph) *graph = cudaGraph_t(0x77);
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  capturing = true;
  fake_log("CAPTURE", "begin", 0, 0, 0, 0);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  capturing = false;
  fake_log("CAPTURE", "end", 0, 0, 0, 0);
  return handle(graph);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024;
  a->numRegs = 64;
  a->binaryVersion = a->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** p, const void*) {
  static char memory[1 << 20];
  *p = memory;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *f ? cudaSuccess : cudaErrorSymbolNotFound;
}

// What the compiler calls for each kernel of torch's own libraries.
struct Launch { dim3 grid, block; size_t shared; void* stream; };
static thread_local Launch pushed;
void** __cudaRegisterFatBinary(void*) { static void* x; return &x; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(
    void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  std::lock_guard<std::mutex> guard(mutex);
  kernels[host] = name;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void**)stream = pushed.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) { *k = cudaKernel_t(f); return cudaSuccess; }
cudaError_t cudaLaunchKernel(const void* f, dim3 grid, dim3 block, void**, size_t, cudaStream_t) {
  auto found = kernels.find(f);
  const char* name = found == kernels.end() ? "?" : found->second.c_str();
  fake_log("K", name, grid.x, grid.y, grid.z, block.x * block.y * block.z);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void** a, size_t n, cudaStream_t s) {
  return cudaLaunchKernel((const void*)k, grid, block, a, n, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void** a) {
  return cudaLaunchKernel(f, c->gridDim, c->blockDim, a, 0, nullptr);
}

// ---------------------------------------------------------------------------------------- driver, as Triton uses it
#define DRIVER(name, value, ...) \
  CUresult name(__VA_ARGS__) { value; return CUDA_SUCCESS; }

static CUcontext context = CUcontext(0x11);
DRIVER(cuDriverGetVersion, *n = 13000, int* n)
DRIVER(cuDeviceGet, *d = 0, CUdevice* d, int)
DRIVER(cuDeviceGetCount, *n = 1, int* n)
DRIVER(cuDeviceGetName, snprintf(s, n, "NVIDIA H100 80GB HBM3"), char* s, int n, CUdevice)
DRIVER(cuDeviceGetAttribute, *n = attribute(a), int* n, CUdevice_attribute a, CUdevice)
DRIVER(cuDevicePrimaryCtxGetState, (*flags = 0, *active = 1), CUdevice, unsigned* flags, int* active)
DRIVER(cuDevicePrimaryCtxRetain, *c = context, CUcontext* c, CUdevice)
DRIVER(cuCtxGetCurrent, *c = context, CUcontext* c)
DRIVER(cuCtxPopCurrent_v2, *c = context, CUcontext* c)
DRIVER(cuCtxGetDevice, *d = 0, CUdevice* d)
DRIVER(cuGetErrorString, *s = "emulated", CUresult, const char** s)
DRIVER(cuModuleLoad, *m = CUmodule(0x22), CUmodule* m, const char*)
DRIVER(cuModuleLoadData, *m = CUmodule(0x22), CUmodule* m, const void*)
DRIVER(cuModuleLoadDataEx, *m = CUmodule(0x22), CUmodule* m, const void*, unsigned, CUjit_option*, void**)
DRIVER(cuModuleGetFunction, *f = CUfunction(strdup(name)), CUfunction* f, CUmodule, const char* name)
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor, *n = 2, int* n, CUfunction, int, size_t)
DRIVER(cuOccupancyMaxActiveClusters, *n = 132, int* n, CUfunction, const CUlaunchConfig*)
CUresult cuFuncGetAttribute(int* n, CUfunction_attribute a, CUfunction) {
  *n = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void* data, CUpointer_attribute a, CUdeviceptr p) {
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)data = p;
  else *(unsigned*)data = 0;
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void**, void**) {
  fake_log("T", (const char*)f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX * c->blockDimY * c->blockDimZ);
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(
    CUfunction f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c, unsigned, CUstream, void**,
    void**) {
  fake_log("T", (const char*)f, x, y, z, a * b * c);
  return CUDA_SUCCESS;
}
CUresult cuGetProcAddress_v2(const char* name, void** f, int, cuuint64_t, CUdriverProcAddressQueryResult* result) {
  *f = dlsym(RTLD_DEFAULT, name);
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return *f ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
}
