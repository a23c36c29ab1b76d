// libcuda.so.1 of the emulator: the driver calls that the project makes (native/backend/cuda/driver.h,
// native/boot), over emulated memory, streams and kernels. Refuses: the rest of the driver's interface, more
// than one device, blocks of more than one dimension.
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "memory.h"
#include "run_block.h"
#include "settings.h"
#include "streams.h"

using namespace emulator;

namespace {

constexpr int kDriverVersion = 13000, kCapability = REFLEX_EMULATED_ARCH / 10;
constexpr uint32_t kMaxShared = 227u << 10, kDefaultShared = 48u << 10, kMaxGrid = 65535;
constexpr size_t kPage = 4096;

int capability() { return settings().capability ? settings().capability : kCapability; }

struct Function {
  const Kernel* kernel;
  uint32_t max_dynamic = kDefaultShared;
};
using StreamHandle = std::shared_ptr<Stream>;

struct Driver {
  std::recursive_mutex mutex;
  Memory memory{settings().memory_bytes};
  StreamHandle default_stream = std::make_shared<Stream>();
  std::set<StreamHandle*> streams;
  CUresult broken = CUDA_SUCCESS;  ///< what every call returns from the first failure on
  std::string report;
};
Driver& driver() {
  static auto* d = new Driver;  // threads may still call at exit
  return *d;
}

using Lock = std::lock_guard<std::recursive_mutex>;

void break_context(CUresult result, const std::string& report) {
  Driver& d = driver();
  if (d.broken != CUDA_SUCCESS) return;
  d.broken = result;
  d.report = report;
  std::fprintf(stderr, "emulator: %s\n", report.c_str());
}

StreamHandle& stream_of(CUstream s) {
  return s ? *reinterpret_cast<StreamHandle*>(s) : driver().default_stream;
}

CUresult finish(Stream& s, uint64_t number) {
  drain(s, number);
  return driver().broken;
}

CUresult finish_all() {
  Driver& d = driver();
  drain(*d.default_stream, d.default_stream->asked);
  for (StreamHandle* s : d.streams) drain(**s, (*s)->asked);
  return d.broken;
}

CUresult add(CUstream to, std::function<void()> run) {
  Driver& d = driver();
  if (d.broken != CUDA_SUCCESS) return d.broken;
  Stream& s = *stream_of(to);
  Operation op{[run = std::move(run)] {
                 if (driver().broken == CUDA_SUCCESS) run();
               },
               {}};
  if (s.capturing) {
    s.capturing->push_back(std::move(op));
    return CUDA_SUCCESS;
  }
  s.add(std::move(op));
  return settings().early ? finish(s, s.asked) : CUDA_SUCCESS;
}

/// A copy between host and card. Pageable memory is read before the call returns, and written too.
CUresult add_copy(CUstream to, void* at, const void* from, size_t n, bool from_host) {
  Driver& d = driver();
  const auto host = reinterpret_cast<uintptr_t>(from_host ? from : at),
             card = reinterpret_cast<uintptr_t>(from_host ? at : from);
  if (!d.memory.holds(card, n)) return CUDA_ERROR_INVALID_VALUE;
  const Memory::Pinned pinned = d.memory.pinned(host, n);
  if (pinned == Memory::Pinned::part) return CUDA_ERROR_INVALID_VALUE;
  const bool pageable = pinned == Memory::Pinned::none && !stream_of(to)->capturing;
  if (!pageable) return add(to, [=] { std::memcpy(at, from, n); });
  if (from_host) {
    auto bytes = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                     static_cast<const char*>(from) + n);
    return add(to, [=] { std::memcpy(at, bytes->data(), bytes->size()); });
  }
  const CUresult r = add(to, [=] { std::memcpy(at, from, n); });
  return r ? r : finish(*stream_of(to), stream_of(to)->asked);
}

void launch(const Kernel& kernel, const LaunchShape& shape, const void* params) {
  if (settings().trace)
    std::fprintf(stderr, "emulator: %s grid %u %u %u threads %u shared %u\n", kernel.name, shape.grid.x,
                 shape.grid.y, shape.grid.z, shape.threads, shape.shared);
  bool address = false;
  const std::string problem = run_launch(kernel, shape, params, address);
  if (!problem.empty())
    break_context(address ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_ERROR_LAUNCH_FAILED, problem);
}

CUresult refuse(CUresult r, const Kernel& k, const char* what, unsigned long found, unsigned long limit) {
  std::fprintf(stderr, "emulator: %s: %s %lu, at most %lu\n", k.name, what, found, limit);
  return r;
}

/// Whether a card would take the launch.
CUresult check_launch(const CUlaunchConfig& c, const Function& f) {
  const Kernel& k = *f.kernel;
  if (c.blockDimY != 1 || c.blockDimZ != 1) return CUDA_ERROR_NOT_SUPPORTED;
  if (!c.blockDimX || !c.gridDimX || !c.gridDimY || !c.gridDimZ)
    return refuse(CUDA_ERROR_INVALID_VALUE, k, "an empty grid or block", 0, 0);
  if (c.blockDimX > static_cast<unsigned>(k.max_threads))
    return refuse(CUDA_ERROR_INVALID_VALUE, k, "threads", c.blockDimX, static_cast<unsigned>(k.max_threads));
  if (c.gridDimY > kMaxGrid || c.gridDimZ > kMaxGrid || c.gridDimX > 0x7FFFFFFFu)
    return refuse(CUDA_ERROR_INVALID_VALUE, k, "blocks", std::max(c.gridDimY, c.gridDimZ), kMaxGrid);
  if (c.sharedMemBytes > f.max_dynamic)
    return refuse(CUDA_ERROR_INVALID_VALUE, k, "bytes of dynamic shared memory", c.sharedMemBytes,
                  f.max_dynamic);
  return CUDA_SUCCESS;
}

}  // namespace

#define CALL extern "C" __attribute__((visibility("default"))) CUresult
#define CHECKED             \
  Driver& d = driver();     \
  const Lock lock(d.mutex); \
  if (d.broken != CUDA_SUCCESS) return d.broken

// ---- the device
// ------------------------------------------------------------------------------------------------

CALL cuInit(unsigned) { return CUDA_SUCCESS; }
CALL cuDriverGetVersion(int* v) {
  *v = kDriverVersion;
  return CUDA_SUCCESS;
}
CALL cuDeviceGetCount(int* n) {
  *n = 1;
  return CUDA_SUCCESS;
}
CALL cuGetErrorName(CUresult r, const char** s) {
  *s = r == CUDA_ERROR_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
       : r == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED"
       : r == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
       : r == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
       : r == CUDA_ERROR_NOT_FOUND     ? "CUDA_ERROR_NOT_FOUND"
                                       : "a CUDA error";
  return CUDA_SUCCESS;
}
CALL cuGetErrorString(CUresult r, const char** s) {
  Driver& d = driver();
  const Lock lock(d.mutex);
  *s = r == d.broken && r != CUDA_SUCCESS ? d.report.c_str() : "of the emulated driver";
  return CUDA_SUCCESS;
}
CALL cuDeviceGet(CUdevice* device, int) {
  *device = 0;
  return CUDA_SUCCESS;
}
CALL cuDeviceGetName(char* s, int n, CUdevice) {
  std::snprintf(s, static_cast<size_t>(n), "emulated (no GPU)");
  return CUDA_SUCCESS;
}
CALL cuDeviceGetAttribute(int* v, CUdevice_attribute a, CUdevice) {
  switch (a) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
      *v = settings().multiprocessors;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *v = capability() / 10;
      break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *v = capability() % 10;
      break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *v = static_cast<int>(kMaxShared);
      break;
    case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
      *v = 1;
      break;
    default:
      *v = 0;
  }
  return CUDA_SUCCESS;
}
CALL cuDeviceTotalMem(size_t* n, CUdevice) {
  *n = settings().memory_bytes;
  return CUDA_SUCCESS;
}
CALL cuDeviceGetPCIBusId(char* bus, int n, CUdevice) {
  std::snprintf(bus, static_cast<size_t>(n), "0000:00:00.0");
  return CUDA_SUCCESS;
}
CALL cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) {
  if (!settings().memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  *c = reinterpret_cast<CUcontext>(&driver());
  return CUDA_SUCCESS;
}
CALL cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CALL cuCtxGetCurrent(CUcontext* c) {
  *c = reinterpret_cast<CUcontext>(&driver());
  return CUDA_SUCCESS;
}
CALL cuCtxSynchronize() {
  CHECKED;
  return finish_all();
}

// ---- memory
// ------------------------------------------------------------------------------------------------------

CALL cuMemAlloc(CUdeviceptr* p, size_t n) {
  CHECKED;
  if (!n) return CUDA_ERROR_INVALID_VALUE;
  *p = d.memory.allocate(n);
  return *p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
/// As the driver's, only when all that was asked for is done.
CALL cuMemFree(CUdeviceptr p) {
  Driver& d = driver();
  const Lock lock(d.mutex);
  finish_all();
  std::string problem;
  if (!d.memory.free(p, problem)) return CUDA_ERROR_INVALID_VALUE;
  if (!problem.empty()) break_context(CUDA_ERROR_ILLEGAL_ADDRESS, problem);
  return d.broken;
}
CALL cuMemGetInfo(size_t* free_bytes, size_t* total) {
  CHECKED;
  *total = d.memory.limit();
  *free_bytes = d.memory.limit() - d.memory.used();
  return CUDA_SUCCESS;
}
CALL cuMemHostRegister(void* p, size_t n, unsigned) {
  CHECKED;
  return d.memory.pin(reinterpret_cast<uintptr_t>(p), n) ? CUDA_SUCCESS
                                                         : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}
CALL cuMemHostUnregister(void* p) {
  Driver& d = driver();
  const Lock lock(d.mutex);
  return d.memory.unpin(reinterpret_cast<uintptr_t>(p)) ? CUDA_SUCCESS
                                                        : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}
CALL cuMemHostAlloc(void** p, size_t n, unsigned) {
  CHECKED;
  const size_t pages = (n + kPage - 1) / kPage * kPage;
  *p = std::aligned_alloc(kPage, pages);
  if (!*p) return CUDA_ERROR_OUT_OF_MEMORY;
  d.memory.pin(reinterpret_cast<uintptr_t>(*p), pages);
  return CUDA_SUCCESS;
}
CALL cuMemFreeHost(void* p) {
  Driver& d = driver();
  const Lock lock(d.mutex);
  d.memory.unpin(reinterpret_cast<uintptr_t>(p));
  std::free(p);
  return CUDA_SUCCESS;
}

// ---- copies
// ------------------------------------------------------------------------------------------------------

CALL cuMemcpyHtoDAsync(CUdeviceptr at, const void* from, size_t n, CUstream s) {
  CHECKED;
  return add_copy(s, reinterpret_cast<void*>(at), from, n, true);
}
CALL cuMemcpyDtoHAsync(void* at, CUdeviceptr from, size_t n, CUstream s) {
  CHECKED;
  return add_copy(s, at, reinterpret_cast<const void*>(from), n, false);
}
CALL cuMemcpyDtoDAsync(CUdeviceptr at, CUdeviceptr from, size_t n, CUstream s) {
  CHECKED;
  if (!d.memory.holds(at, n) || !d.memory.holds(from, n)) return CUDA_ERROR_INVALID_VALUE;
  return add(s, [=] { std::memmove(reinterpret_cast<void*>(at), reinterpret_cast<const void*>(from), n); });
}
CALL cuMemcpy2DAsync(const CUDA_MEMCPY2D* c, CUstream s) {
  CHECKED;
  return add(s, [c = *c] {
    const auto* from = c.srcMemoryType == CU_MEMORYTYPE_HOST ? static_cast<const char*>(c.srcHost)
                                                             : reinterpret_cast<const char*>(c.srcDevice);
    auto* to = c.dstMemoryType == CU_MEMORYTYPE_HOST ? static_cast<char*>(c.dstHost)
                                                     : reinterpret_cast<char*>(c.dstDevice);
    for (size_t y = 0; y < c.Height; ++y)
      std::memcpy(to + (y + c.dstY) * c.dstPitch + c.dstXInBytes,
                  from + (y + c.srcY) * c.srcPitch + c.srcXInBytes, c.WidthInBytes);
  });
}
CALL cuMemsetD8Async(CUdeviceptr at, unsigned char v, size_t n, CUstream s) {
  CHECKED;
  if (!d.memory.holds(at, n)) return CUDA_ERROR_INVALID_VALUE;
  return add(s, [=] { std::memset(reinterpret_cast<void*>(at), v, n); });
}

// ---- streams, events, graphs
// ---------------------------------------------------------------------------------------

CALL cuStreamCreate(CUstream* s, unsigned) {
  CHECKED;
  auto* handle = new StreamHandle(std::make_shared<Stream>());
  d.streams.insert(handle);
  *s = reinterpret_cast<CUstream>(handle);
  return CUDA_SUCCESS;
}
/// What is under way goes on, as the driver's does; so it must not need what the caller frees next.
CALL cuStreamDestroy(CUstream s) {
  Driver& d = driver();
  const Lock lock(d.mutex);
  auto* handle = reinterpret_cast<StreamHandle*>(s);
  finish(**handle, (*handle)->asked);
  d.streams.erase(handle);
  delete handle;
  return d.broken;
}
CALL cuStreamSynchronize(CUstream s) {
  CHECKED;
  Stream& stream = *stream_of(s);
  if (stream.capturing) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return finish(stream, stream.asked);
}
CALL cuStreamQuery(CUstream s) { return cuStreamSynchronize(s); }

CALL cuEventCreate(CUevent* e, unsigned) {
  *e = reinterpret_cast<CUevent>(new Point);
  return CUDA_SUCCESS;
}
CALL cuEventDestroy(CUevent e) {
  const Lock lock(driver().mutex);
  delete reinterpret_cast<Point*>(e);
  return CUDA_SUCCESS;
}
CALL cuEventRecord(CUevent e, CUstream s) {
  CHECKED;
  const StreamHandle& stream = stream_of(s);
  if (stream->capturing) return CUDA_ERROR_NOT_SUPPORTED;  // no graph of the project has events
  *reinterpret_cast<Point*>(e) = {stream, stream->asked};
  return CUDA_SUCCESS;
}
CALL cuEventSynchronize(CUevent e) {
  CHECKED;
  const Point p = *reinterpret_cast<Point*>(e);
  return p.stream ? finish(*p.stream, p.number) : CUDA_SUCCESS;
}
CALL cuEventQuery(CUevent e) { return cuEventSynchronize(e); }
CALL cuStreamWaitEvent(CUstream s, CUevent e, unsigned) {
  CHECKED;
  const Point p = *reinterpret_cast<Point*>(e);
  if (!p.stream) return CUDA_SUCCESS;  // never recorded: nothing to wait for
  Stream& stream = *stream_of(s);
  if (stream.capturing) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  stream.add({{}, p});
  return settings().early ? finish(stream, stream.asked) : CUDA_SUCCESS;
}

CALL cuStreamBeginCapture(CUstream s, CUstreamCaptureMode) {
  CHECKED;
  stream_of(s)->capturing = std::make_unique<Graph>();
  return CUDA_SUCCESS;
}
CALL cuStreamEndCapture(CUstream s, CUgraph* g) {
  CHECKED;
  *g = reinterpret_cast<CUgraph>(stream_of(s)->capturing.release());
  return *g ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
}
CALL cuGraphInstantiateWithFlags(CUgraphExec* e, CUgraph g, unsigned long long) {
  *e = reinterpret_cast<CUgraphExec>(new std::shared_ptr<Graph>(new Graph(*reinterpret_cast<Graph*>(g))));
  return CUDA_SUCCESS;
}
CALL cuGraphLaunch(CUgraphExec e, CUstream s) {
  CHECKED;
  return add(s, [graph = *reinterpret_cast<std::shared_ptr<Graph>*>(e)] {
    for (const Operation& op : *graph) op.run();
  });
}
CALL cuGraphDestroy(CUgraph g) {
  delete reinterpret_cast<Graph*>(g);
  return CUDA_SUCCESS;
}
CALL cuGraphExecDestroy(CUgraphExec e) {
  const Lock lock(driver().mutex);
  delete reinterpret_cast<std::shared_ptr<Graph>*>(e);
  return CUDA_SUCCESS;
}

// ---- kernels
// -------------------------------------------------------------------------------------------------------

CALL cuModuleLoadData(CUmodule* m, const void* image) {
  CHECKED;
  if (settings().old_driver) return CUDA_ERROR_INVALID_IMAGE;
  if (capability() < kCapability) return CUDA_ERROR_NO_BINARY_FOR_GPU;
  *m = reinterpret_cast<CUmodule>(const_cast<void*>(image));
  return CUDA_SUCCESS;
}
CALL cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CALL cuModuleGetFunction(CUfunction* f, CUmodule, const char* name) {
  CHECKED;
  const Kernel* kernel = find_kernel(name);
  if (!kernel) {
    std::fprintf(stderr, "emulator: no kernel '%s': is it defined with REFLEX_KERNEL?\n", name);
    return CUDA_ERROR_NOT_FOUND;
  }
  *f = reinterpret_cast<CUfunction>(new Function{kernel});  // for as long as the process lives, like a module
  return CUDA_SUCCESS;
}
CALL cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
  if (a != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  if (v < 0 || static_cast<uint32_t>(v) > kMaxShared) return CUDA_ERROR_INVALID_VALUE;
  reinterpret_cast<Function*>(f)->max_dynamic = static_cast<uint32_t>(v);
  return CUDA_SUCCESS;
}
CALL cuFuncGetAttribute(int* v, CUfunction_attribute, CUfunction) {
  *v = 0;
  return CUDA_SUCCESS;
}
CALL cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** params, void**) {
  CHECKED;
  const auto& function = *reinterpret_cast<Function*>(f);
  if (const CUresult r = check_launch(*c, function)) return r;
  LaunchShape shape;
  shape.grid = {c->gridDimX, c->gridDimY, c->gridDimZ};
  shape.threads = c->blockDimX;
  shape.shared = c->sharedMemBytes;
  for (unsigned i = 0; i < c->numAttrs; ++i)
    shape.overlaps |= c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                      c->attrs[i].value.programmaticStreamSerializationAllowed;
  const Kernel* kernel = function.kernel;
  const size_t n = kernel->params_bytes;
  auto copy = std::make_shared<std::vector<std::max_align_t>>((n + sizeof(std::max_align_t) - 1) /
                                                              sizeof(std::max_align_t));
  std::memcpy(copy->data(), params[0], n);
  return add(c->hStream, [=] { launch(*kernel, shape, copy->data()); });
}
