// CUDA on a CPU, for tests: the same sources, built by g++, run one block after another.
//
// Every thread of a block is a fiber. It runs until it comes to a barrier or a shuffle; who runs next is drawn at
// random, so what needs a barrier and has none computes something else. Blocks come in random order. Shared memory is
// filled with NaNs before each block. What CUDA leaves undefined ends the process with a sentence: a barrier or shuffle
// that not all threads come to, a shuffle in part of a warp, threads or blocks that CUDA does not allow.
//
// A program of it serves requests on stdin (host::serve), so that it may be built with -fsanitize=address,bounds, and
// so that what it does wrong ends it and not the tests. tests/kernels/host.py builds it and asks.

#pragma once

#include <unistd.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("rrd_shared")))
#define RRD_DP4A 1  // __dp4a is below

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
static dim3 gridDim, blockDim, blockIdx, threadIdx;

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};

extern char __start_rrd_shared[] __attribute__((weak)), __stop_rrd_shared[] __attribute__((weak));

namespace host {

constexpr unsigned WARP = 32;
constexpr unsigned PATIENCE = 120;  // seconds for a launch; a kernel that hangs ends the process

[[noreturn]] inline void die(const char* what) {
  std::fprintf(stderr, "host.h: %s (block %u,%u thread %u)\n", what, blockIdx.x, blockIdx.y, threadIdx.x);
  std::fflush(stderr);
  _exit(70);
}

// ---- fibers --------------------------------------------------------------------------------------------------------

struct Fiber {
  enum Waiting { NOT, BARRIER, SHUFFLE, ENDED } waiting = NOT;
  void* at = nullptr;      // where it goes on
  void* fake = nullptr;    // the sanitizer's
  uint64_t deposit = 0;    // what it gave to the shuffle it waits in
  unsigned width = 0;      // and of how many bytes that is: lanes must be in one shuffle
  std::vector<char> stack;
};

static std::vector<Fiber> fibers;
static Fiber* current;
static void (*body)(void*);
static void* body_arguments;
static uint64_t seed;
static unsigned long barriers, shuffles;

// Switching stacks: `save` gets where this one stands. ucontext does the same with a system call each time.
#if defined(__x86_64__)
extern "C" void rrd_switch(void** save, void* to);
asm(R"(
.text
.globl rrd_switch
.type rrd_switch, @function
rrd_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size rrd_switch, .-rrd_switch
)");
inline void* first_frame(char* stack, size_t size, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + size) - 7;  // 8 off a multiple of 16, as after a call
  top[0] = nullptr;                                         // where entry would return to
  top[-1] = reinterpret_cast<void*>(entry);
  for (int i = 2; i <= 7; i++) top[-i] = nullptr;           // the registers
  return top - 7;
}
#else
inline void rrd_switch(void** save, void* to) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}
inline void* first_frame(char* stack, size_t size, void (*entry)()) {
  ucontext_t* c = reinterpret_cast<ucontext_t*>(stack);
  getcontext(c);
  c->uc_stack.ss_sp = stack + sizeof *c, c->uc_stack.ss_size = size - sizeof *c, c->uc_link = nullptr;
  makecontext(c, entry, 0);
  return c;
}
#endif

static void* scheduler;
#ifdef __SANITIZE_ADDRESS__  // the sanitizer wants to know which stack is in use
static const void* scheduler_stack;
static size_t scheduler_size;
static void* scheduler_fake;
#endif

inline void arrived(void* fake) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_size);
#endif
}
inline void to_scheduler(bool for_good) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(for_good ? nullptr : &current->fake, scheduler_stack, scheduler_size);
#endif
  rrd_switch(&current->at, scheduler);
  arrived(current->fake);
}
inline void to_fiber(Fiber& f) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(&scheduler_fake, f.stack.data(), f.stack.size());
#endif
  rrd_switch(&scheduler, f.at);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(scheduler_fake, nullptr, nullptr);
#endif
}

inline void run_fiber() {  // a thread, from its first to its last instruction
  arrived(nullptr);
  body(body_arguments);
  current->waiting = Fiber::ENDED;
  to_scheduler(true);
}

inline void wait_in(Fiber::Waiting w) {
  current->waiting = w;
  to_scheduler(false);
}

// Fibers of [first, last) that all wait in a shuffle of one kind may go on.
inline bool release_warp(unsigned first, unsigned last) {
  unsigned in = 0;
  for (unsigned i = first; i < last; i++) in += fibers[i].waiting == Fiber::SHUFFLE;
  if (in < last - first) return false;
  for (unsigned i = first; i < last; i++)
    if (fibers[i].width != fibers[first].width) die("lanes of a warp are in different shuffles");
  for (unsigned i = first; i < last; i++) fibers[i].waiting = Fiber::NOT;
  return true;
}

inline bool release() {
  const unsigned n = fibers.size();
  unsigned at_barrier = 0, ended = 0;
  for (const Fiber& f : fibers) at_barrier += f.waiting == Fiber::BARRIER, ended += f.waiting == Fiber::ENDED;
  if (ended == n) return false;
  if (at_barrier == n) {
    for (Fiber& f : fibers) f.waiting = Fiber::NOT;
    return true;
  }
  bool any = false;
  for (unsigned first = 0; first < n; first += WARP) any |= release_warp(first, first + WARP < n ? first + WARP : n);
  if (!any) die("threads wait for others that never come to their barrier or shuffle");
  return true;
}

inline unsigned drawn(unsigned below) {  // xorshift*, Marsaglia 2003
  seed ^= seed >> 12, seed ^= seed << 25, seed ^= seed >> 27;
  return unsigned((seed * 0x2545f4914f6cdd1dull >> 33) % below);
}

// All numbers below n in a random order: start + i * step, modulo n.
struct Order {
  unsigned n, at, step;
  explicit Order(unsigned count) : n(count), at(drawn(count)), step(drawn(count) + 1) {
    while (gcd(step, n) != 1) step++;
  }
  unsigned next() {
    const unsigned now = at;
    at = unsigned((uint64_t(at) + step) % n);
    return now;
  }
  static unsigned gcd(unsigned a, unsigned b) { return b ? gcd(b, a % b) : a; }
};

// Runs every thread that may run until it waits or ends, as often as needed.
inline void run_block() {
  do {
    Order order(fibers.size());
    for (unsigned i = 0; i < order.n; i++) {
      const unsigned at = order.next();
      if (fibers[at].waiting != Fiber::NOT) continue;
      current = &fibers[at];
      threadIdx = {at, 0, 0};
      to_fiber(*current);
    }
  } while (release());
}

__attribute__((no_sanitize("address"))) inline void spoil_shared() {
  for (volatile char* p = __start_rrd_shared; p < __stop_rrd_shared; p++) *p = char(0xff);
}

inline void launch(dim3 grid, unsigned threads, void (*f)(void*), void* arguments) {
  if (threads == 0 || threads > 1024) die("a block has 1 to 1024 threads");
  if (grid.x == 0 || grid.y == 0 || grid.y > 65535) die("a grid that CUDA does not launch");
  gridDim = grid, blockDim = {threads, 1, 1}, body = f, body_arguments = arguments;
  fibers.resize(threads);
  Order order(grid.x * grid.y);
  for (unsigned i = 0; i < order.n; i++) {
    const unsigned block = order.next();
    blockIdx = {block % grid.x, block / grid.x, 0};
    spoil_shared();
    for (Fiber& fiber : fibers) {
      fiber.stack.resize(1 << 16);
      fiber.waiting = Fiber::NOT;
      fiber.at = first_frame(fiber.stack.data(), fiber.stack.size(), run_fiber);
    }
    run_block();
  }
}

// ---- a kernel's arguments: 8 bytes each, as they come ----------------------------------------------------------------

template <class T> inline T argument(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
template <class... A, size_t... I>
inline void spread(void (*kernel)(A...), const uint64_t* given, std::index_sequence<I...>) {
  kernel(argument<A>(given[I])...);
}
template <auto kernel> struct Caller;
template <class... A, void (*kernel)(A...)> struct Caller<kernel> {
  static constexpr unsigned count = sizeof...(A);
  static void call(void* given) {
    spread(kernel, static_cast<const uint64_t*>(given), std::index_sequence_for<A...>());
  }
};
struct Entry {
  const char* name;
  unsigned threads, count;
  void (*call)(void*);
};

// ---- the server: one request a launch --------------------------------------------------------------------------------
//
// Request:  name length, name; seed; grid x, y; count of arguments; each: kind (0 null, 1 scalar, 2 buffer) and
//           8 bytes of scalar, or size and bytes of the buffer. All numbers are uint64.
// Answer:   1, barriers, shuffles; then the bytes of every buffer in turn. Each buffer is memory of its own, to the byte.

inline bool take(void* to, size_t n) { return std::fread(to, 1, n, stdin) == n; }
inline uint64_t number() {
  uint64_t n;
  if (!take(&n, 8)) die("half a request");
  return n;
}
inline void give(uint64_t n) { std::fwrite(&n, 8, 1, stdout); }

struct Buffer {
  char* data;
  size_t size;
};

inline void answer(const Entry& e) {
  alarm(PATIENCE);
  seed = number() * 2 + 1;
  const dim3 grid{unsigned(number()), unsigned(number()), 1};
  std::vector<uint64_t> arguments(number());
  if (arguments.size() != e.count) die("a kernel called with another number of arguments");
  std::vector<Buffer> buffers;
  for (uint64_t& a : arguments) {
    const uint64_t kind = number();
    if (kind < 2) {
      a = kind ? number() : 0;
      continue;
    }
    Buffer b{nullptr, number()};
    b.data = static_cast<char*>(std::malloc(b.size));
    if (!take(b.data, b.size)) die("half a request");
    a = reinterpret_cast<uint64_t>(b.data);
    buffers.push_back(b);
  }
  barriers = shuffles = 0;
  launch(grid, e.threads, e.call, arguments.data());
  give(1), give(barriers), give(shuffles);
  for (const Buffer& b : buffers) std::fwrite(b.data, 1, b.size, stdout), std::free(b.data);
  std::fflush(stdout);
}

template <size_t n> inline int serve(const Entry (&table)[n]) {
  uint64_t length;
  while (take(&length, 8)) {
    std::vector<char> name(length + 1);
    if (!take(name.data(), length)) die("half a request");
    const Entry* found = nullptr;
    for (const Entry& e : table)
      if (!std::strcmp(name.data(), e.name)) found = &e;
    if (!found) die("no such kernel");
    answer(*found);
  }
  return 0;
}

// ---- shuffles --------------------------------------------------------------------------------------------------------

template <class T> inline T exchanged(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
  if (mask != 0xffffffffu) die("a shuffle of less than a warp");
  Fiber* self = current;
  const unsigned lane0 = threadIdx.x / WARP * WARP;
  self->deposit = 0, self->width = sizeof(T);
  std::memcpy(&self->deposit, &value, sizeof value);
  wait_in(Fiber::SHUFFLE);  // all have given
  shuffles += threadIdx.x == lane0;
  const unsigned from = lane0 + source % WARP;
  if (from >= fibers.size()) die("a shuffle from a lane that is not there");
  T got;
  std::memcpy(&got, &fibers[from].deposit, sizeof got);
  self->width = sizeof(T);
  wait_in(Fiber::SHUFFLE);  // all have taken
  return got;
}

}  // namespace host

inline void __syncthreads() {
  host::barriers += threadIdx.x == 0;
  host::wait_in(host::Fiber::BARRIER);
}
inline void __syncwarp() { host::exchanged(0xffffffffu, 0, threadIdx.x); }
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return host::exchanged(mask, value, (threadIdx.x % host::WARP) ^ unsigned(lanes));
}
template <class T> inline T __shfl_sync(unsigned mask, T value, int lane) {
  return host::exchanged(mask, value, unsigned(lane));
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned by) {
  const unsigned lane = threadIdx.x % host::WARP, from = lane + by < host::WARP ? lane + by : lane;
  return host::exchanged(mask, value, from);
}

// ---- atomics: fibers do not run at once, so the plain operation is one --------------------------------------------------

template <class T> inline T atomicAdd(T* p, T value) { const T old = *p; *p = old + value; return old; }
template <class T> inline T atomicMax(T* p, T value) { const T old = *p; if (value > old) *p = value; return old; }
template <class T> inline T atomicExch(T* p, T value) { const T old = *p; *p = value; return old; }

// ---- what CUDA has built in -------------------------------------------------------------------------------------------

using std::isfinite;
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += int(int8_t(a >> 8 * i)) * int8_t(b >> 8 * i);
  return c;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= unsigned(both >> 8 * (s >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
