// A libcuda whose device is this process: its launches run the host build of one source's kernels on CPU memory.
// Included behind host.h and a kernel's source, with KERNELS defined as the table's rows.

#include <atomic>

namespace fake {

constexpr int INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500, LAUNCH_FAILED = 719;
static char primary;                    // the context: its address
static thread_local void* now;          // of this thread
static std::atomic<int> version{11040}, launches, loads, refuse_from{-1};
static std::atomic<uint64_t> last_stream;

template <class A> A at(void* p) { return *static_cast<A*>(p); }
template <auto kernel> struct Run;
template <class... A, void (*kernel)(A...)> struct Run<kernel> {
  template <size_t... I> static void spread(void** p, std::index_sequence<I...>) { kernel(at<A>(p[I])...); }
  static void call(void* p) { spread(static_cast<void**>(p), std::index_sequence_for<A...>()); }
};

static const host::Entry table[] = {KERNELS};

}  // namespace fake

extern "C" {
int cuDriverGetVersion(int* v) { return *v = fake::version, 0; }
int cuDeviceGet(int* device, int index) { return *device = 7 + index, index ? fake::INVALID_VALUE : 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = &fake::primary, device == 7 ? 0 : 1; }
int cuCtxGetCurrent(void** context) { return *context = fake::now, 0; }
int cuCtxSetCurrent(void* context) { return fake::now = context, 0; }
int cuModuleLoadData(void** module, const char* image) {
  if (fake::now != &fake::primary) return fake::INVALID_CONTEXT;
  fake::loads++;
  return *module = &fake::loads, std::memcmp(image, "\x7f" "ELF", 4) ? fake::INVALID_IMAGE : 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  if (module != &fake::loads) return fake::INVALID_VALUE;
  for (const host::Entry& e : fake::table)
    if (!std::strcmp(e.name, name)) return *function = const_cast<host::Entry*>(&e), 0;
  return fake::NOT_FOUND;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, uint64_t stream, void** params, void** extra) {
  const host::Entry* e = static_cast<host::Entry*>(function);
  if (fake::now != &fake::primary) return fake::INVALID_CONTEXT;
  if (!x || !y || y > 65535 || z != 1 || bx != e->threads || by != 1 || bz != 1 || shared || extra)
    return fake::INVALID_VALUE;
  if (fake::launches++ == fake::refuse_from) return fake::LAUNCH_FAILED;
  fake::last_stream = stream;
  host::seed = 2 * fake::launches + 1;
  host::launch({x, y, 1}, bx, e->call, params);
  return 0;
}
int cuGetErrorName(int status, const char** text) {
  *text = status == fake::LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_OF_ANOTHER_KIND";
  return 0;
}
int cuGetErrorString(int status, const char** text) { return *text = "as asked for", status == 0; }

// For the tests.
void fake_set(int version, int refuse_from) { fake::version = version, fake::refuse_from = refuse_from; }
int fake_launches() { return fake::launches; }
int fake_loads() { return fake::loads; }
uint64_t fake_stream() { return fake::last_stream; }
}
